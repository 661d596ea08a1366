"""Functions and methods as tools: what the policy is told of them, and what it may call them with.

    def look_up(word: str) -> str:
        '''Say what a word means.

        Args:
            word: The word.
        '''

    schema_of(look_up, "my_tools.py:look_up")
    # {"type": "function", "function": {"name": "look_up", "parameters": {…}, …}}
    run_tool(look_up, {"word": "elk"})

Types are described by pydantic, so a parameter may be a TypedDict, a dataclass, a model, an Enum,
and lists or unions of these; calls are checked against them, and the function gets what it asks
for. Descriptions are read from the docstring, in Google's form as transformers reads it: each
parameter has a line under `Args:`. A tool may carry its own JSON schema instead, as an attribute
`schema`: {"name", "description", "parameters"}, alone or under "function".
"""

from __future__ import annotations

import functools
import inspect
import json
import re
import typing
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from quiver.schemas.errors import ConfigError, printable
from quiver.schemas.outside import read_name

ToolSchema = dict[str, Any]
PYTHON_TOOL = "python"
"""The tool that runs the code of a turn that calls no tool by name."""
_VALUES = frozenset({"const", "default", "enum", "examples", "required"})
"""Members of a schema that hold no schemas."""
NOT_TOOLS = frozenset({"reset", "get_reward", "close"})
"""Public methods of an environment that are no tools."""
_CHOICES = re.compile(r"\(choices:\s*(\[.*\])\s*\)\s*$", re.IGNORECASE | re.DOTALL)


def schema_of(function: Callable[..., Any] | ToolSchema, source: str) -> ToolSchema:
    """The schema of one tool, which may be given as its schema alone. ConfigError names `source`,
    the function and what it lacks."""
    name = getattr(function, "__name__", type(function).__name__)
    try:
        schema = function if isinstance(function, dict) else getattr(function, "schema", None)
        return _described(function, name) if schema is None else read_schema(schema)
    except Exception as error:  # of the docstring or of a type that JSON has no word for
        problem = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
    raise ConfigError(
        f"tool {printable(name)} of {printable(source)}",
        printable(problem, 400),
        next="give it a docstring with one line for each parameter under `Args:`, and each "
        "parameter a type; or its own JSON schema as an attribute `schema`",
    )


def read_schema(schema: Any) -> ToolSchema:
    """A tool's own schema, as chat templates take it. ValueError, or jsonschema's error."""
    from jsonschema import Draft202012Validator

    function = schema.get("function", schema) if isinstance(schema, dict) else {}
    name = read_name(function.get("name"), "name in its schema")
    parameters = function.get("parameters")
    if not isinstance(parameters, dict):
        raise ValueError('its schema has no object "parameters"')
    Draft202012Validator.check_schema(parameters)
    described = {"name": name, "description": function.get("description", "")}
    return {"type": "function", "function": {**described, **function}}


def _described(function: Callable[..., Any], name: str) -> ToolSchema:
    """The schema that signature and docstring give. ValueError, or an error of pydantic's."""
    from pydantic import PydanticUserError, TypeAdapter
    from transformers.utils.chat_template_utils import parse_google_format_docstring

    docstring = inspect.getdoc(function)
    if not docstring:
        raise ValueError("it has no docstring")
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            raise ValueError(f"parameter {parameter.name} cannot be given by its name, as calls do")
        if parameter.annotation is inspect.Parameter.empty:
            raise ValueError(f"parameter {parameter.name} has no type")
    description, lines, returns = parse_google_format_docstring(docstring)
    parameters = _plain_schema(_adapter(function).json_schema())
    parameters.pop("additionalProperties", None)  # no function takes more than it names
    properties = parameters.pop("properties", {})
    for parameter, shown in properties.items():
        if parameter not in (lines or {}):
            raise ValueError(f"its docstring has no line for the parameter {parameter!r}")
        line = lines[parameter]
        choices = _CHOICES.search(line)
        if choices is not None:
            shown["enum"] = json.loads(choices[1])
            line = line[: choices.start()].strip()
        shown["description"] = line
    schema = {
        "name": name,
        "description": description,
        "parameters": {"type": "object", "properties": properties, **parameters},
    }
    answer = typing.get_type_hints(function).get("return")
    if answer is not None:
        with suppress(PydanticUserError):  # a picture, say
            schema["return"] = _plain_schema(TypeAdapter(answer).json_schema())
            if returns:
                schema["return"]["description"] = returns
    return {"type": "function", "function": schema}


def run_tool(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """What a tool returns. TypeError says what is wrong with the arguments; it is not called with
    such."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import best_match
    from pydantic import ValidationError
    from referencing import Registry

    schema = getattr(function, "schema", None)
    if schema is not None:
        parameters = read_schema(schema)["function"]["parameters"]
        validator = Draft202012Validator(parameters, registry=Registry())  # which fetches nothing
        error = best_match(validator.iter_errors(arguments))
        if error is not None:
            place = ".".join(map(str, error.absolute_path)) or "the arguments"
            raise TypeError(f"{place}: {error.message}")
        return function(**arguments)
    try:
        # JSON, since from Python a strict reader takes no dict for a dataclass
        return _adapter(function).validate_json(json.dumps(arguments), strict=True)
    except ValidationError as error:
        problems = [
            f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()
        ]
        raise TypeError("; ".join(problems)) from None


def _adapter(function: Callable[..., Any]) -> Any:
    """pydantic's reader of a function's arguments, which also calls it."""
    from pydantic import TypeAdapter
    from pydantic._internal import _generate_schema

    # pydantic refuses TypedDict of Python 3.11's own typing, of which it reads all that tools have
    _generate_schema._SUPPORTS_TYPEDDICT = True

    @functools.wraps(function)
    def call(*positional: Any, **named: Any) -> Any:
        return function(*positional, **named)

    # of a method pydantic does not resolve annotations that are text
    call.__signature__ = inspect.signature(function, eval_str=True)
    call.__annotations__ = typing.get_type_hints(function, include_extras=True)
    return TypeAdapter(call)


def _plain_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema of pydantic's as transformers writes them, which chat templates are made for:
    without titles, with `nullable`, and with each definition in its place, but for those that
    hold themselves."""
    definitions = schema.get("$defs", {})
    recursive: dict[str, Any] = {}

    def plain(node: Any, inside: tuple[str, ...]) -> Any:
        if isinstance(node, list):
            return [plain(member, inside) for member in node]
        if not isinstance(node, dict):
            return node
        name = str(node.get("$ref", "")).removeprefix("#/$defs/")
        if name in inside:
            recursive[name] = None
        elif name in definitions:
            beside = {key: member for key, member in node.items() if key != "$ref"}
            return plain({**definitions[name], **beside}, (*inside, name))
        read = {}
        for key, member in node.items():
            if key == "properties":  # its keys are names of parameters, which may be any word
                read[key] = {name: plain(below, inside) for name, below in member.items()}
            elif key in _VALUES:
                if key != "default" or member is not None:
                    read[key] = member
            elif key != "title":
                read[key] = plain(member, inside)
        return _plain_union(read) if "anyOf" in read else read

    read = plain({key: member for key, member in schema.items() if key != "$defs"}, ())
    for name in list(recursive):
        recursive[name] = plain(definitions[name], (name,))
    return {**read, "$defs": recursive} if recursive else read


def _plain_union(node: dict[str, Any]) -> dict[str, Any]:
    """A union with `nullable` for null, and of plain types as a list of their names."""
    members = [member for member in node["anyOf"] if member != {"type": "null"}]
    beside = {key: member for key, member in node.items() if key != "anyOf"}
    if len(members) < len(node["anyOf"]):
        beside["nullable"] = True
    if len(members) == 1:
        return {**members[0], **beside}
    if all(member.keys() == {"type"} for member in members):
        return {"type": [member["type"] for member in members], **beside}
    return {"anyOf": members, **beside}


def tool_methods(environment: object) -> dict[str, Callable[..., Any]]:
    """The public methods of an environment that are its tools, by name, in alphabetical order."""
    names = [name for name in dir(environment) if not name.startswith("_")]
    return {
        name: getattr(environment, name)
        for name in names
        if name not in NOT_TOOLS
        and inspect.isroutine(inspect.getattr_static(type(environment), name, None))
    }
