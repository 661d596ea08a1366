"""The table of environment kinds that a recipe may name, and the functions that open them.

A user's class is classified by its members: `action_space` (gymnasium's), else `step`, else public
methods that are tools, as in TRL's `environment_factory`. To add a kind, add a row to ENVIRONMENTS
or TOOLS, and a module here with the function that `Entry.module` describes.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from quiver.schemas.errors import ConfigError, did_you_mean, printable
from quiver.stages.common import plugins
from quiver.stages.common.environments.environment import Factory

_HERE = "quiver.stages.common.environments.adapters"


class Entry(NamedTuple):
    """One kind: the word that a recipe writes before the colon."""

    description: str
    module: str
    """Module here that opens it. An environment's module has
    `open_environment(name, arguments) -> Factory`; a tool's has
    `open_tools(name) -> (schemas, functions by name)`. `name` is the text after the colon."""


ENVIRONMENTS = {
    "gymnasium": Entry("a registered text environment of gymnasium's, by its name", "gymnasium"),
    "openenv": Entry("a server that speaks OpenEnv, by its URL", "openenv"),
}
TOOLS = {
    "python": Entry("runs a program in the sandbox", "python"),
    "mcp": Entry("the tools of an MCP server, by the command that starts it", "mcp"),
}


def check_source(source: str, *, is_tool: bool) -> None:
    """Raise ConfigError if a recipe's name has no known form. Existence is not checked."""
    entries = TOOLS if is_tool else ENVIRONMENTS
    before, _, behind = source.partition(":")
    if source == "python" and is_tool:
        return
    if behind and before != "python":
        return
    names = ", ".join(f"{name}:…" if name != "python" else name for name in entries)
    raise ConfigError(
        f"generate.turns.{'tools' if is_tool else 'environment'} {printable(repr(source))}",
        f"{printable(repr(source))} is no such name, expected file.py:name, module:name, or one of "
        f"{names}{did_you_mean(before, entries)}",
        next="correct it",
    )


class OwnCode(NamedTuple):
    """Code of the user that a recipe names."""

    source: str
    field: str
    """Config key that names it."""
    kind_name: str
    """The word for it in messages: class or function."""


def own_code(environment: str, tools: Sequence[str]) -> list[OwnCode]:
    """Return the user's own code among an environment and tools."""
    if environment:
        is_own = environment.partition(":")[0] not in ENVIRONMENTS
        return [OwnCode(environment, "generate.turns.environment", "class")] if is_own else []
    return [
        OwnCode(tool, "generate.turns.tools", "function")
        for tool in tools
        if tool.partition(":")[0] not in TOOLS
    ]


def code_hash(environment: str, tools: Sequence[str]) -> str:
    """Return the hash of the user's code that a recipe names, without running it.

    The hash is empty if there is no such code. Raises ConfigError.
    """
    hashes = [plugins.fingerprint(plugins.locate(*code)) for code in own_code(environment, tools)]
    return hashes[0] if environment and hashes else _hash_of_tools(hashes)


def open_source(environment: str, tools: list[str], arguments: dict[str, Any]) -> Factory:
    """Return the maker of the environments that a recipe names.

    Raises ConfigError if the code does not exist or lacks something.
    """
    if not environment:
        return _of_tools(tools)
    before, _, name = environment.partition(":")
    if before in ENVIRONMENTS:
        return _module(ENVIRONMENTS[before]).open_environment(name, arguments)
    constructor, sha256 = plugins.load(environment, "generate.turns.environment")
    try:
        probe = constructor(**arguments)
    except Exception as error:  # the constructor is the user's code
        raise ConfigError(
            f"generate.turns.environment {printable(environment)}",
            f"cannot be made: {type(error).__name__}: {printable(error)}",
            next="correct generate.turns.arguments, or the class",
        ) from error
    module = "methods"
    if hasattr(probe, "action_space"):
        module = "gymnasium"
    elif callable(getattr(probe, "step", None)):
        module = "stepping"
    adapter = importlib.import_module(f"{_HERE}.{module}")
    factory = adapter.open_class(environment, lambda: constructor(**arguments), probe)
    return factory._replace(fingerprint=sha256)


def _of_tools(sources: list[str]) -> Factory:
    from quiver.stages.common.environments.adapters.methods import ToolEnvironment
    from quiver.stages.common.environments.tool_schemas import schema_of

    schemas: list[dict[str, Any]] = []
    functions: dict[str, Callable[..., Any]] = {}
    hashes = []
    for source in sources:
        before, _, name = source.partition(":")
        if before in TOOLS:
            new_schemas, new_functions = _module(TOOLS[before]).open_tools(name)
        else:
            function, sha256 = plugins.load(source, "generate.turns.tools")
            new_schemas = [schema_of(function, source)]
            new_functions = {new_schemas[0]["function"]["name"]: function}
            hashes.append(sha256)
        for tool in sorted(functions.keys() & new_functions):
            raise ConfigError(
                f"generate.turns.tools {printable(source)}",
                f"there are two tools with the name {printable(tool)}",
                next="rename one of them",
            )
        schemas += new_schemas
        functions |= new_functions
    return Factory(lambda: ToolEnvironment(functions), schemas, True, _hash_of_tools(hashes))


def _hash_of_tools(hashes: Iterable[str]) -> str:
    hashes = list(hashes)
    return hashlib.sha256("".join(hashes).encode()).hexdigest() if hashes else ""


def _module(entry: Entry) -> Any:
    return importlib.import_module(f"{_HERE}.{entry.module}")
