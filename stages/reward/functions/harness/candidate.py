"""The program's side of the harness of `code`: a process of its own that holds the program and is
asked by a pipe.

Run in the sandbox as `python -c SOURCE READ WRITE`, so: one file, stdlib only. The judge loads the
same text as a module, for its end of the wire.

Values cross as plain data (numbers, text, lists, dicts, … made anew on the other side). An object
of the program's own stays here and is a `Remote` over there: its attributes, items, length and
methods are asked for; compared with plain data it counts as the plain value that it derives from
(list, dict, int, …), or is unequal. So no `==` of the program's ever sees what a test expects.
"""

import builtins
import json
import operator
import os
import sys
import types

SCALARS = {type(None), bool, int, float, str}


class Ended(BaseException):
    """The other process is gone: no exception of the program's, so no test that expects one is
    passed by it."""


# -- values on the wire


def _pairs(value):
    return [list(pair) for pair in value.items()]


def _made(name, constructor=None):
    """What makes a value of a standard type, whose module is loaded only when one comes."""
    module, _, kind = name.rpartition(".")

    def make(*parts):
        found = getattr(__import__(module), kind)
        return (getattr(found, constructor) if constructor else found)(*parts)

    return make


# name of a type: (to something plain, back again); what comes is looked up here, so nothing else can be made
_VALUES = {
    "builtins.list": (list, list),
    "builtins.tuple": (list, tuple),
    "builtins.set": (list, set),
    "builtins.frozenset": (list, frozenset),
    "builtins.dict": (_pairs, dict),
    "builtins.bytes": (bytes.hex, bytes.fromhex),
    "builtins.bytearray": (bytearray.hex, bytearray.fromhex),
    "builtins.complex": (lambda value: [value.real, value.imag], lambda parts: complex(*parts)),
    "builtins.range": (
        lambda value: [value.start, value.stop, value.step],
        lambda parts: range(*parts),
    ),
    "collections.deque": (list, _made("collections.deque")),
    "collections.Counter": (_pairs, dict),
    "collections.OrderedDict": (_pairs, dict),
    "collections.defaultdict": (_pairs, dict),
    "decimal.Decimal": (str, _made("decimal.Decimal")),
    "fractions.Fraction": (str, _made("fractions.Fraction")),
    "datetime.date": (str, _made("datetime.date", "fromisoformat")),
    "datetime.datetime": (str, _made("datetime.datetime", "fromisoformat")),
    "datetime.timedelta": (
        lambda v: [v.days, v.seconds, v.microseconds],
        lambda parts: _made("datetime.timedelta")(*parts),
    ),
}
_BASES = (bool, int, float, str, list, tuple, dict, set, frozenset, bytes)


def _name(value):
    """The name under which a value is sent; None unless its type is exactly the one of that
    name."""
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if (
        name in _VALUES
        and sys.modules.get(kind.__module__)
        and getattr(sys.modules[kind.__module__], kind.__name__) is kind
    ):
        return name
    return None


class Remote:
    """An object that lives on the other side."""

    def __init__(self, wire, number):
        self.__dict__.update(_wire=wire, _number=number)

    def __call__(self, *args, **kwargs):
        value, changed = self._wire.ask("call", self, list(args), kwargs)
        for argument, after in zip(
            args, changed, strict=True
        ):  # a function may have changed them in place
            if isinstance(argument, list | bytearray) and isinstance(after, list | bytearray):
                argument[:] = after
            elif isinstance(argument, dict | set) and isinstance(after, dict | set):
                argument.clear()
                argument.update(after)
        return value

    def __getattr__(self, name):
        return self._wire.ask("getattr", self, name)

    def __setattr__(self, name, value):
        self._wire.ask("setattr", self, name, value)

    def __hash__(self):
        return self._number

    def __eq__(self, other):
        if isinstance(other, Remote):
            return self._wire.ask("equal", self, other)
        plain = self._wire.ask("plain", self)
        return not isinstance(plain, Remote) and plain == other


def _by_plain(name):
    """A comparison with plain data: of the plain value that the object derives from, never by the
    object's own method."""

    def compare(self, other):
        plain = self._wire.ask("plain", self)
        return NotImplemented if isinstance(plain, Remote) else getattr(plain, name)(other)

    return compare


def _by_asking(name):
    return lambda self, *values: self._wire.ask(name, self, *values)


_ASKED = ("getitem", "setitem", "len", "iter", "next", "str", "repr", "bool")
for _asked in _ASKED:
    setattr(Remote, f"__{_asked}__", _by_asking(_asked))
for _compared in ("__lt__", "__le__", "__gt__", "__ge__"):
    setattr(Remote, _compared, _by_plain(_compared))


class Wire:
    """Questions and answers between the two processes, one JSON array a line; either side may ask
    while it is asked.

    What an operation raises is sent back, except for `passing`.
    """

    def __init__(self, read, write, operations, passing=(Ended,)):
        self.read = open(read, "rb")  # noqa: SIM115, open as long as the process lives
        self.write, self.operations, self.passing = write, operations, passing
        self.held, self.remotes, self.ended = {}, {}, False

    def ask(self, operation, *values):
        """What the other side answers; raises what it raised, as the nearest of Python's own
        exceptions."""
        self.send(["ask", operation, [self.pack(value) for value in values]])
        while True:
            kind, *rest = self.receive()
            if kind == "ask":
                self.answer(*rest)
            elif kind == "value":
                return self.unpack(rest[0])
            else:
                raise _exception(*rest)

    def serve(self):
        """Answer until the other side hangs up."""
        while True:
            self.answer(*self.receive()[1:])

    def answer(self, operation, values):
        try:
            found = self.operations[operation](*[self.unpack(value) for value in values])
            reply = ["value", self.pack(found)]
        except self.passing:
            raise
        except BaseException as error:
            reply = ["raised", [kind.__name__ for kind in type(error).__mro__], str(error)[:1000]]
        self.send(reply)

    def send(self, message):
        data = json.dumps(message).encode() + b"\n"
        try:
            while data:
                data = data[os.write(self.write, data) :]
        except OSError as error:
            self.ended = True
            raise Ended(str(error)) from None

    def receive(self):
        if self.ended:
            raise Ended("gone")
        # an exception from here on, a test's time being up among them, leaves half a message behind
        self.ended = True
        line = self.read.readline()
        if not line.endswith(b"\n"):
            raise Ended("gone")
        message = json.loads(line)
        self.ended = False
        return message

    def pack(self, value):
        if type(value) in SCALARS:
            return value
        if isinstance(value, types.ModuleType) and value.__name__ in sys.stdlib_module_names:
            return ["module", value.__name__]
        if isinstance(value, Remote):
            return ["yours", value._number]
        name = _name(value)
        if name is None:
            self.held[id(value)] = value
            return ["mine", id(value)]
        plain = _VALUES[name][0](value)
        if isinstance(plain, list) and not SCALARS.issuperset(map(type, plain)):
            plain = [self.pack(item) for item in plain]
        return [name, plain]

    def unpack(self, value):
        if not isinstance(value, list):
            return value
        name, content = value
        if name == "mine":
            return self.remotes.setdefault(content, Remote(self, content))
        if name == "yours":
            return self.held[content]
        if name == "module":
            return __import__(content) if content in sys.stdlib_module_names else None
        if isinstance(content, list) and list in map(type, content):
            content = [self.unpack(item) for item in content]
        return _VALUES[name][1](content)


def _exception(names, text):
    for name in names:
        kind = getattr(builtins, name, None)
        if isinstance(kind, type) and issubclass(kind, Exception):
            try:
                return kind(text)
            except TypeError:
                continue
    return RuntimeError(text)


# -- the program's side


def program(read, write):
    """Load the program when asked to, then do with it what is asked, until the judge hangs up."""
    from _sitebuiltins import Quitter

    builtins.exit = builtins.quit = Quitter("exit", "Ctrl-D")
    module = types.ModuleType("solution")
    sys.modules["solution"] = module

    def load(source):
        exec(compile(source, "solution.py", "exec"), module.__dict__)

    def names(wanted):
        return {name: module.__dict__[name] for name in wanted if name in module.__dict__}

    def entry(name):
        return (
            module.__dict__[name] if name in module.__dict__ else getattr(module.Solution(), name)
        )

    def call(function, args, kwargs):
        before = [wire.pack(argument) for argument in args]
        value = function(*args, **kwargs)
        return [
            value,
            [None if wire.pack(a) == b else a for a, b in zip(args, before, strict=True)],
        ]

    def plain(value):
        return next((base(value) for base in _BASES if isinstance(value, base)), value)

    operations = {
        name: getattr(builtins, name, None) or getattr(operator, name)
        for name in (*_ASKED, "getattr", "setattr")
    }
    operations |= {
        "load": load,
        "names": names,
        "entry": entry,
        "call": call,
        "plain": plain,
        "equal": operator.eq,
    }
    wire = Wire(read, write, operations)
    try:
        wire.serve()
    except Ended:
        os._exit(0)


if __name__ == "__main__":
    sys.set_int_max_str_digits(0)
    program(int(sys.argv[1]), int(sys.argv[2]))
