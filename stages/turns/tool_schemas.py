"""Turns functions and methods into tools: the schemas shown to the policy, and checked calls.

    def look_up(word: str) -> str:
        '''Say what a word means.

        Args:
            word: The word.
        '''

    schema_of(look_up, "my_tools.py:look_up")
    # {"type": "function", "function": {"name": "look_up", "parameters": {…}, …}}
    run_tool(look_up, {"word": "elk"})

pydantic describes the types, so a parameter may be a TypedDict, a dataclass, a model, an Enum, or a
list or union of these. Arguments of calls are validated against them and converted to them.
Descriptions come from the docstring, in Google style as transformers parses it: each parameter has
a line under `Args:`. A tool may carry its own JSON schema instead, as an attribute
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
"""Name of the tool that runs the code of a turn that calls no tool by name."""
_VALUES = frozenset({"const", "default", "enum", "examples", "required"})
"""Members of a JSON schema that contain values, not schemas."""
NOT_TOOLS = frozenset({"reset", "get_reward", "close"})
"""Public methods of an environment that are not tools."""
_WRAPPED_METHODS = (classmethod, functools.partialmethod, functools.singledispatchmethod)
_CHOICES = re.compile(r"\(choices:\s*(\[.*\])\s*\)\s*$", re.IGNORECASE | re.DOTALL)


def schema_of(function: Callable[..., Any] | ToolSchema, source: str) -> ToolSchema:
    """Return the schema of one tool, given as a function or as its schema alone.

    Raises ConfigError, which names `source`, the function and what it lacks.
    """
    name = getattr(function, "__name__", type(function).__name__)
    try:
        schema = function if isinstance(function, dict) else getattr(function, "schema", None)
        return _described(function, name) if schema is None else read_schema(schema)
    except Exception as error:  # raised by a bad docstring, or by a type without a JSON form
        problem = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
    raise ConfigError(
        f"tool {printable(name)} of {printable(source)}",
        printable(problem, 400),
        next="give it a docstring with one line for each parameter under `Args:`, and each "
        "parameter a type; or its own JSON schema as an attribute `schema`",
    )


def read_schema(schema: Any) -> ToolSchema:
    """Validate a tool's own schema and return it in the form that chat templates take.

    Raises ValueError, or jsonschema's error.
    """
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
    """Build the schema from signature and docstring. Raises ValueError, or pydantic's error."""
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
    parameters.pop("additionalProperties", None)  # redundant: a function takes only its parameters
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
        with suppress(PydanticUserError):  # the return type has no schema, a picture for example
            schema["return"] = _plain_schema(TypeAdapter(answer).json_schema())
            if returns:
                schema["return"]["description"] = returns
    return {"type": "function", "function": schema}


def run_tool(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Call a tool with a model's arguments and return its result.

    Raises TypeError if the arguments do not match the schema; then the tool is not called.
    """
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import best_match
    from pydantic import ValidationError
    from referencing import Registry

    schema = getattr(function, "schema", None)
    if schema is not None:
        parameters = read_schema(schema)["function"]["parameters"]
        validator = Draft202012Validator(parameters, registry=Registry())  # fetches no schemas
        error = best_match(validator.iter_errors(arguments))
        if error is not None:
            place = ".".join(map(str, error.absolute_path)) or "the arguments"
            raise TypeError(f"{place}: {error.message}")
        return function(**arguments)
    try:
        # as JSON, because the strict Python mode accepts no dict for a dataclass
        return _adapter(function).validate_json(json.dumps(arguments), strict=True)
    except ValidationError as error:
        problems = [
            f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()
        ]
        raise TypeError("; ".join(problems)) from None


def _adapter(function: Callable[..., Any]) -> Any:
    """Return pydantic's validator of a function's arguments, which also calls the function."""
    from pydantic import TypeAdapter
    from pydantic._internal import _generate_schema

    # pydantic rejects typing.TypedDict of Python 3.11, although it reads all that tools use of it
    _generate_schema._SUPPORTS_TYPEDDICT = True

    @functools.wraps(function)
    def call(*positional: Any, **named: Any) -> Any:
        return function(*positional, **named)

    # pydantic does not resolve a method's annotations if they are strings
    call.__signature__ = inspect.signature(function, eval_str=True)
    call.__annotations__ = typing.get_type_hints(function, include_extras=True)
    return TypeAdapter(call)


def _plain_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Convert pydantic's JSON schema to transformers' form, which chat templates expect.

    Titles are dropped, null becomes `nullable`, and each definition is inlined unless it is
    recursive; recursive definitions stay under "$defs".
    """
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
            if key == "properties":  # its keys are parameter names, so any word may occur
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
    """Write null in a union as `nullable`, and a union of plain types as a list of type names."""
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
    """Return the public methods of an environment that are tools, by name, sorted."""
    names = [name for name in dir(environment) if not name.startswith("_")]
    return {
        name: getattr(environment, name)
        for name in names
        if name not in NOT_TOOLS
        and _is_method(inspect.getattr_static(type(environment), name, None))
    }


def _is_method(member: Any) -> bool:
    """Return True for what a class's body holds as a method; to inspect, a cached property looks
    like one."""
    return inspect.isroutine(member) and (callable(member) or isinstance(member, _WRAPPED_METHODS))
