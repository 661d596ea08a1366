"""Functions and methods as tools: JSON schemas from signatures and docstrings, as chat templates
and TRL's environments take them.

    def look_up(word: str) -> str:
        '''Say what a word means.

        Args:
            word: The word.
        '''

    schema_of(look_up, "my_tools.py:look_up")
    # {"type": "function", "function": {"name": "look_up", "parameters": {…}, …}}

Types and descriptions are read by transformers' `get_json_schema`: the docstring is in Google's
form, and each parameter has a type and a line under `Args:`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from quiver.schemas.errors import ConfigError, printable

ToolSchema = dict[str, Any]
PYTHON_TOOL = "python"
"""The tool that runs the code of a turn that calls no tool by name."""
NOT_TOOLS = frozenset({"reset", "get_reward", "close"})
"""Public methods of an environment that are no tools."""


def schema_of(function: Callable[..., Any], source: str) -> ToolSchema:
    """The schema of one tool. ConfigError names `source`, the function and what it lacks."""
    from transformers.utils.chat_template_utils import get_json_schema

    name = getattr(function, "__name__", type(function).__name__)
    docstring = inspect.getdoc(function)
    try:
        parameters = inspect.signature(function).parameters
        untyped = [
            parameter.name
            for parameter in parameters.values()
            if parameter.annotation is inspect.Parameter.empty
        ]
        unnamed = [
            parameter.name
            for parameter in parameters.values()
            if parameter.kind is inspect.Parameter.POSITIONAL_ONLY
        ]
        if not docstring:
            problem = "it has no docstring"
        elif unnamed:
            problem = f"parameter {unnamed[0]} can not be given by its name, as calls do"
        elif untyped:
            problem = f"parameter {untyped[0]} has no type"
        else:
            return get_json_schema(function)
    except Exception as error:  # of the docstring or of a type that JSON has no word for
        problem = f"{type(error).__name__}: {error}"
    raise ConfigError(
        f"tool {printable(name)} of {printable(source)}",
        printable(problem, 400),
        next="give it a docstring with one line for each parameter under `Args:`, and each "
        "parameter a type",
    )


def tool_methods(environment: object) -> dict[str, Callable[..., Any]]:
    """The public methods of an environment that are its tools, by name, in alphabetical order."""
    names = [name for name in dir(environment) if not name.startswith("_")]
    return {
        name: getattr(environment, name)
        for name in names
        if name not in NOT_TOOLS
        and inspect.isroutine(inspect.getattr_static(type(environment), name, None))
    }
