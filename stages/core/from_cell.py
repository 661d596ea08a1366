"""Functions of a notebook or script as files, which a recipe and the processes of a stage can name.

    as_file(score)      # ~/.cache/quiver/functions/5e0b…/score.py:score

The file holds the function's source and what it uses: imports, other functions of the notebook, and
plain constants. Its name holds the hash of this text. Comments in it hold the hashes of imported
modules, but for installed ones: an edited one gives another file. What does not fit is refused: a
decorator, an object, one name with two values, a default that is another one in the file, or a
source that is not the one that runs. Not of the spine.
"""

from __future__ import annotations
import __future__

import ast
import bisect
import dis
import hashlib
import inspect
import pickle
import sys
import sysconfig
import textwrap
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from quiver.schemas.errors import ConfigError, printable
from quiver.stages.core.files import write_bytes
from quiver.stages.core.plugins import fingerprint, imports_above
from quiver.stages.core.threads import parse_python
from quiver.stages.core.user_cache import cache_folder

_PLAIN = (str, int, float, bool, type(None), list, tuple, dict)
_FUTURES = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
_JUMPS = {*dis.hasjrel, *dis.hasjabs}
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_OF_EACH_FILE = {*vars(types.ModuleType("")), "__builtins__", "__file__", "__annotations__"}
"""Names that each file has of its own."""
_HOW = "write the function into a file, and name it: my_rewards.py:score"
_Definitions = dict[str, tuple[Any, str]]
"""Value and source of each name of the file, in its order."""


def as_file(function: Callable[..., Any]) -> str:
    """Return `file.py:function` for a function; one that an importable file defines stays there.
    It is `module:function` if that file imports from above its folder, as files of packages may.

    Raises ConfigError if it has no source, uses something that a file cannot hold, or there is no
    home folder to write into.
    """
    name = getattr(function, "__name__", "")
    if not isinstance(function, types.FunctionType) or name == "<lambda>":
        raise ConfigError(
            f"function {printable(function)}",
            "expected a function that def defines",
            next="write it as a def in the cell: def score(completions, **columns)",
        )
    module = sys.modules.get(function.__module__)
    path = getattr(module, "__file__", None)
    if path and function.__module__ != "__main__" and _is_defined_in(module, function):
        needs_package = imports_above(Path(path))
        return f"{function.__module__ if needs_package else path}:{name}"
    definitions: _Definitions = {}
    _define_function(function, definitions)
    # annotations are not evaluated, so what they name is not needed
    parts = ["from __future__ import annotations", *(source for _, source in definitions.values())]
    text = "\n\n".join(parts)
    made: dict[str, Any] = {"__name__": name}
    try:
        exec(compile(text, f"{name}.py", "exec"), made)
    except Exception as error:
        raise _refused(function, f"its file cannot be imported: {error!r}") from error
    for own_name, (used, _) in definitions.items():
        if isinstance(used, types.FunctionType):
            _require_same_defaults(used, made[own_name], definitions)
    cache = cache_folder("functions")
    if cache is None:
        raise ConfigError(f"function {name}", "there is no home folder for its file", next=_HOW)
    file = cache / hashlib.sha256(text.encode()).hexdigest() / f"{name}.py"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(file, text.encode())
    return f"{file}:{name}"


def _is_defined_in(module: types.ModuleType, function: types.FunctionType) -> bool:
    """Return True if a module has the function under its name, perhaps loaded once more since. A
    function below a decorator has the name of the decorated one."""
    held = getattr(module, function.__name__, None)
    if held is function or not isinstance(held, types.FunctionType):
        return held is function
    codes = [function.__code__, held.__code__]
    is_named = all(code.co_name == function.__qualname__ for code in codes)
    return is_named and codes[0].co_filename == codes[1].co_filename


def _define(
    name: str, used: Any, definitions: _Definitions, user: types.FunctionType, attributes: set[str]
) -> None:
    """Add what a function uses under a name to `definitions`.

    Args:
        name: The name.
        used: Its value.
        definitions: What is defined so far.
        user: The function, of the notebook.
        attributes: Names of the attributes that it reads, which may be submodules.
    Raises ConfigError if a file cannot hold it.
    """
    if name in definitions:
        before, _ = definitions[name]
        # functions of one source may differ in their closures; their repr does too
        if before is not used and repr(before) != repr(used):
            raise _refused(user, f"needs two values of {printable(name)}")
    elif isinstance(used, types.FunctionType) and used.__module__ == user.__module__:
        own_name = used.__name__
        if own_name == name:
            _define_function(used, definitions)
        else:
            _define(own_name, used, definitions, user, attributes)
            definitions[name] = (used, f"{name} = {own_name}")
    elif text := _import_of(name, used, user, attributes) or _constant(name, used):
        definitions[name] = (used, text)
    else:
        problem = f"uses {printable(name)}, a {type(used).__name__}, which a file cannot hold"
        raise _refused(user, problem)


def _define_function(function: types.FunctionType, definitions: _Definitions) -> None:
    """Add a function of the notebook to `definitions`, after what it uses."""
    own_name = function.__name__
    source = _source_of(function)
    definitions[own_name] = (function, source)  # it may call itself
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    known = dict(function.__globals__)
    for name, cell in cells:
        try:
            known[name] = cell.cell_contents
        except ValueError:
            raise _refused(function, f"uses {printable(name)}, which has no value yet") from None
    flags = __future__.annotations.compiler_flag
    code = compile(source, f"{own_name}.py", "exec", flags=flags, dont_inherit=True)
    attributes = set(_read_by(code, ("LOAD_ATTR", "LOAD_METHOD")))
    # LOAD_NAME reads the names in defaults
    for name in dict.fromkeys(_read_by(code, ("LOAD_NAME", "LOAD_GLOBAL"))):
        if name in known and name not in _OF_EACH_FILE:
            _define(name, known[name], definitions, function, attributes)
    definitions[own_name] = definitions.pop(own_name)


def _source_of(function: types.FunctionType) -> str:
    """Return the source of a function. Raises ConfigError unless it is one def without decorators
    and gives the code that runs: inspect may find another function's source, or an edited one."""
    try:
        written = inspect.getsource(function)
        source = textwrap.dedent(written)
        (definition,) = parse_python(source).body
        if source != written and not _is_of(definition, function):
            source = f"if True:\n{written}"  # a text of several lines keeps its indentation
            definition = parse_python(source).body[0].body[0]
    except (OSError, SyntaxError, ValueError):
        raise _refused(function, "its source cannot be read") from None
    is_def = isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef)
    if not is_def or definition.name != function.__name__:
        raise _refused(function, "its source is not a def of this name")
    if definition.decorator_list:
        raise _refused(function, "has a decorator")
    if not _is_of(definition, function):
        raise _refused(function, "its source differs from what runs; it may be edited since")
    return source


def _is_of(definition: ast.stmt, function: types.FunctionType) -> bool:
    """Return True if a definition gives the function's code, among the same enclosing names."""
    code = function.__code__
    outer = parse_python(f"def _({', '.join(code.co_freevars)}): pass")
    outer.body[0].body = [definition]
    compiled = compile(outer, "", "exec", flags=code.co_flags & _FUTURES, dont_inherit=True)
    return any(_does(inner) == _does(code) for inner in _codes(compiled))


def _does(code: types.CodeType) -> tuple[Any, ...]:
    """Return what code does. Its place in a file is left out, and how Python calls a method, which
    depends on the imports beside the function."""
    steps = [
        step
        for step in dis.get_instructions(code)
        if step.opname not in ("PUSH_NULL", "EXTENDED_ARG")
    ]
    offsets = [step.offset for step in steps]
    done: list[tuple[str, Any]] = []
    for step, after in zip(steps, [*steps[1:], None], strict=True):
        argument = step.argval
        if step.opcode in _JUMPS:
            argument = bisect.bisect_left(offsets, argument)
        if after and after.opname == "STORE_NAME" and after.argval == "__qualname__":
            argument = None  # a class is named by what encloses it
        does = _does(argument) if isinstance(argument, types.CodeType) else repr(argument)
        done.append((step.opname.replace("METHOD", "ATTR"), does))
    arguments = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
    return (code.co_name, code.co_varnames, arguments, done)


def _require_same_defaults(
    function: types.FunctionType, made: types.FunctionType, definitions: _Definitions
) -> None:
    """Raise ConfigError unless the function made from the file has the function's defaults: those
    in the file are computed anew, from the values that names have now."""
    in_file = inspect.signature(made, follow_wrapped=False).parameters
    for name, parameter in inspect.signature(function, follow_wrapped=False).parameters.items():
        if not _is_same(parameter.default, in_file[name].default, definitions):
            problem = f"its default of {printable(name)} may be another one in a file"
            raise _refused(function, problem)


def _is_same(default: Any, made: Any, definitions: _Definitions) -> bool:
    """Return True if a default and the one made from the file are certainly the same."""
    if default is made or type(default) is not type(made):
        return default is made
    if isinstance(made, types.FunctionType):
        if made.__name__ in definitions:
            return definitions[made.__name__][0] is default
        has_values = default.__closure__ or default.__defaults__ or default.__kwdefaults__
        return not has_values and _does(default.__code__) == _does(made.__code__)  # lambdas
    if isinstance(made, dict):
        default, made = [*default.items()], [*made.items()]
    if isinstance(made, list | tuple):
        pairs = zip(default, made, strict=False)
        return len(default) == len(made) and all(_is_same(*pair, definitions) for pair in pairs)
    try:
        return pickle.dumps(default) == pickle.dumps(made)
    except Exception:  # any class may refuse
        return False


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield code, and the code inside it."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _codes(inner)


def _read_by(code: types.CodeType, operations: tuple[str, ...]) -> Iterator[str]:
    """Yield the names that code, and code inside it, reads by some operations."""
    for inner in _codes(code):
        for instruction in dis.get_instructions(inner):
            if instruction.opname in operations:
                yield instruction.argval


def _import_of(name: str, used: Any, user: types.FunctionType, attributes: set[str]) -> str:
    """Return the import of a module, with its submodules among `attributes`, or of an object of a
    module; empty if it is neither."""
    if isinstance(used, types.ModuleType):
        lines = [f"import {used.__name__} as {name}{_hash_of(used.__name__)}"]
        return "\n".join([*lines, *_submodules(used.__name__, attributes)])
    module = getattr(used, "__module__", None)
    own_name = getattr(used, "__name__", None)
    if not isinstance(module, str) or not isinstance(own_name, str):
        return ""
    if module in ("__main__", user.__module__):  # no process can import the notebook
        return ""
    if getattr(sys.modules.get(module), own_name, None) is not used:
        return ""
    return f"from {module} import {own_name} as {name}{_hash_of(module)}"


def _submodules(module: str, attributes: set[str]) -> Iterator[str]:
    """Yield the imports of the loaded submodules: `import scipy` alone may lack `scipy.stats`."""
    for inner in sorted(f"{module}.{attribute}" for attribute in attributes):
        if inner in sys.modules:
            yield f"import {inner}{_hash_of(inner)}"
            yield from _submodules(inner, attributes)


def _hash_of(module: str) -> str:
    """Return a comment with the hash of a module's file, and of those beside it that it imports, so
    that the hash of the cell's file follows them; empty if it is installed."""
    path = Path(getattr(sys.modules.get(module), "__file__", None) or "")
    is_installed = {"site-packages", "dist-packages"}.intersection(path.parts)
    if path.suffix != ".py" or is_installed or path.is_relative_to(_STANDARD_LIBRARY):
        return ""
    if module.partition(".")[0] == "quiver" or not path.is_file():
        return ""
    return f"  # sha256 {fingerprint(path)}"


def _constant(name: str, used: Any) -> str:
    """Return the assignment of a plain constant; empty if its repr is not its source."""
    try:
        is_plain = isinstance(used, _PLAIN) and bool(ast.literal_eval(repr(used)) == used)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return ""
    return f"{name} = {used!r}" if is_plain else ""


def _refused(function: types.FunctionType, problem: str) -> ConfigError:
    return ConfigError(f"function {function.__name__}", problem, next=_HOW)
