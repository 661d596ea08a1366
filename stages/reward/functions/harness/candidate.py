"""The program's side of the harness of `code`: a separate process that holds the program and
answers the judge over a pipe.

It runs in the sandbox as `python -c SOURCE READ WRITE`, so it is one file and uses the standard
library only. The judge loads the same text as a module, for its own end of the wire.

Values cross as plain data (numbers, text, lists, dicts, …) and are rebuilt on the other side. An
object of the program's own stays here and is a `Remote` over there, which asks for its attributes,
items, length, hash and methods, and for operators between two such objects. With plain data it
counts as the plain value that it derives from (list, dict, int, …), else it is unequal, and other
operators raise TypeError. So no operator of the program ever sees a test's expectation.
"""

import __future__

import builtins
import json
import operator
import os
import sys
import types

SCALARS = {type(None), bool, int, float, str}


class Ended(BaseException):
    """The other process is gone. It is no Exception, so that a test that expects an exception does
    not pass because of it."""


# -- values on the wire


def _pairs(mapping):
    return [list(pair) for pair in mapping.items()]


def _maker(name):
    """Return a function that makes a value of a standard type; its module is loaded on first
    use."""
    module, _, attributes = name.partition(".")

    def make(*parts):
        return operator.attrgetter(attributes)(__import__(module))(*parts)

    return make


# name of a type: (to something plain, back again); received names are looked up here, so that no
# other type can be made
_TYPES = {
    "builtins.list": (list, list),
    "builtins.tuple": (list, tuple),
    "builtins.set": (list, set),
    "builtins.frozenset": (list, frozenset),
    "builtins.dict": (_pairs, dict),
    "builtins.bytes": (bytes.hex, bytes.fromhex),
    "builtins.bytearray": (bytearray.hex, bytearray.fromhex),
    "builtins.complex": (str, complex),
    "builtins.range": (lambda r: [r.start, r.stop, r.step], lambda ends: range(*ends)),
    "collections.deque": (list, _maker("collections.deque")),
    "collections.Counter": (_pairs, dict),
    "collections.OrderedDict": (_pairs, dict),
    "collections.defaultdict": (_pairs, dict),
    "decimal.Decimal": (str, _maker("decimal.Decimal")),
    "fractions.Fraction": (str, _maker("fractions.Fraction")),
    "datetime.date": (str, _maker("datetime.date.fromisoformat")),
    "datetime.datetime": (str, _maker("datetime.datetime.fromisoformat")),
    "datetime.timedelta": (
        lambda time: [time.days, time.seconds, time.microseconds],
        lambda numbers: _maker("datetime.timedelta")(*numbers),
    ),
}
_BASES = (bool, int, float, str, list, tuple, dict, set, frozenset, bytes)


def _type_name(thing):
    """Return the name under which a value is sent; None unless its type is exactly the type of that
    name."""
    kind = type(thing)
    name = f"{kind.__module__}.{kind.__qualname__}"
    module = sys.modules.get(kind.__module__)
    return name if name in _TYPES and getattr(module, kind.__name__, None) is kind else None


class Remote:  # noqa: PLW1641, its hash is among _ASKED
    """An object that lives on the other side."""

    def __init__(self, wire, number):
        self.__dict__.update(_wire=wire, _number=number)

    def __call__(self, *args, **kwargs):
        returned, arguments = self._wire.ask("call", self, list(args), kwargs)
        # a function may have changed them in place
        for argument, after in zip(args, arguments, strict=True):
            if isinstance(argument, list | bytearray) and isinstance(after, list | bytearray):
                argument[:] = after
            elif isinstance(argument, dict | set) and isinstance(after, dict | set):
                argument.clear()
                argument.update(after)
        return returned

    def __enter__(self):
        return self._wire.ask("getattr", self, "__enter__")()

    def __exit__(self, kind, *_):
        # told of no error, and never believed that one does not count; not asked when time is up
        if kind is None or issubclass(kind, Exception):
            self._wire.ask("getattr", self, "__exit__")(None, None, None)

    def __eq__(self, other_side):
        if isinstance(other_side, Remote):
            return self._wire.ask("equal", self, other_side)
        plain = self._wire.ask("plain", self)
        return not isinstance(plain, Remote) and plain == other_side


def _of_two(name, is_reflected=False):
    """Ask for an operator between two objects. With plain data, compute it by the plain value that
    the object derives from, never by the object's own method."""
    compute = getattr(operator, name)

    def operate(self, operand):
        if isinstance(operand, Remote):
            return self._wire.ask(name, self, operand)
        plain = self._wire.ask("plain", self)
        if isinstance(plain, Remote):
            return NotImplemented
        return compute(operand, plain) if is_reflected else compute(plain, operand)

    return operate


def _ask(name):
    return lambda self, *operands: self._wire.ask(name, self, *operands)


_ASKED = ["getattr", "setattr", "getitem", "setitem", "len", "iter", "next", "str", "repr", "bool"]
_ASKED += ["hash", "neg", "pos", "invert", "abs", "int", "float", "round"]
for _name in _ASKED:
    setattr(Remote, f"__{_name}__", _ask(_name))
_COMPARED = ["lt", "le", "gt", "ge"]
_COMPUTED = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor"]
for _name in _COMPARED + _COMPUTED:
    setattr(Remote, f"__{_name}__", _of_two(f"__{_name}__"))
for _name in _COMPUTED:
    setattr(Remote, f"__r{_name}__", _of_two(f"__{_name}__", is_reflected=True))


class Wire:
    """Questions and answers between the two processes, one JSON array per line. Either side may ask
    while it is being asked.

    An exception of an operation is sent back, except for `passing`.
    """

    def __init__(self, read, write, operations, passing=(Ended,)):
        self.read = open(read, "rb")  # noqa: SIM115, open as long as the process lives
        self.write = write
        self.operations = operations
        self.passing = passing
        self.sent = {}
        self.remotes = {}
        self.ended = False

    def ask(self, operation, *operands):
        """Return the other side's answer. Raises the other side's exception, as the nearest of
        Python's own exceptions."""
        self.send(["ask", operation, list(map(self.pack, operands))])
        while True:
            kind, *content = self.receive()
            if kind == "ask":
                self.answer(*content)
            elif kind == "value":
                return self.unpack(content[0])
            else:
                raise _exception(*content)

    def serve(self):
        """Answer until the other side hangs up."""
        while True:
            self.answer(*self.receive()[1:])

    def answer(self, operation, operands):
        try:
            returned = self.operations[operation](*map(self.unpack, operands))
            reply = ["value", self.pack(returned)]
        except self.passing:
            raise
        except BaseException as error:
            reply = ["raised", [kind.__name__ for kind in type(error).__mro__], str(error)[:1000]]
        self.send(reply)

    def send(self, message):
        unsent = json.dumps(message).encode() + b"\n"
        try:
            while unsent:
                unsent = unsent[os.write(self.write, unsent) :]
        except OSError as error:
            self.ended = True
            raise Ended(str(error)) from None

    def receive(self):
        if self.ended:
            raise Ended("gone")
        # an exception from here on, such as a test's TimeUp, would leave half a message behind
        self.ended = True
        line = self.read.readline()
        if not line.endswith(b"\n"):
            raise Ended("gone")
        message = json.loads(line)
        self.ended = False
        return message

    def pack(self, thing):
        """Return a scalar unchanged, anything else as a pair of a kind and its content."""
        if type(thing) in SCALARS:
            return thing
        if isinstance(thing, types.ModuleType) and thing.__name__ in sys.stdlib_module_names:
            return ["module", thing.__name__]
        if isinstance(thing, Remote):
            return ["yours", thing._number]
        name = _type_name(thing)
        if name is None:
            self.sent[id(thing)] = thing
            return ["mine", id(thing)]
        content = _TYPES[name][0](thing)
        if isinstance(content, list) and not SCALARS.issuperset(map(type, content)):
            content = list(map(self.pack, content))
        return [name, content]

    def unpack(self, packed):
        if not isinstance(packed, list):
            return packed
        name, content = packed
        if name == "mine":
            return self.remotes.setdefault(content, Remote(self, content))
        if name == "yours":
            return self.sent[content]
        if name == "module":
            return __import__(content) if content in sys.stdlib_module_names else None
        if isinstance(content, list) and list in map(type, content):
            content = list(map(self.unpack, content))
        return _TYPES[name][1](content)


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
    """Load the program when asked, then answer requests until the judge hangs up."""
    from _sitebuiltins import Quitter

    builtins.exit = builtins.quit = Quitter("exit", "Ctrl-D")
    module = types.ModuleType("solution")
    names = module.__dict__
    sys.modules["solution"] = module

    def prepare(source):
        defined = {}
        exec(compile(source, "preamble.py", "exec"), defined)
        # below the program's own names, so that no test and no entry finds one of these
        names["__builtins__"] = {**vars(builtins), **defined, "__name__": "builtins"}

    def load(source):
        before = {**names}
        try:
            exec(compile(source, "solution.py", "exec"), names)
        except NameError:  # an annotation may name what the program does not import
            names.clear()
            names.update(before)
            flag = __future__.annotations.compiler_flag  # keeps annotations as text
            exec(compile(source, "solution.py", "exec", flag), names)

    def entry(name):
        return names[name] if name in names else getattr(module.Solution(), name)

    def call(function, args, kwargs):
        before = list(map(wire.pack, args))
        returned = function(*args, **kwargs)
        pairs = zip(args, before, strict=True)
        return [returned, [None if wire.pack(arg) == packed else arg for arg, packed in pairs]]

    operations = {
        **{name: getattr(builtins, name, None) or getattr(operator, name) for name in _ASKED},
        **{f"__{name}__": getattr(operator, f"__{name}__") for name in _COMPARED + _COMPUTED},
        "prepare": prepare,
        "load": load,
        "names": lambda asked: {name: names[name] for name in asked if name in names},
        "entry": entry,
        "call": call,
        "plain": lambda thing: next((b(thing) for b in _BASES if isinstance(thing, b)), thing),
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
