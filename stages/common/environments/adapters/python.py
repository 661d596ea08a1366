"""The tool `python`: runs a program of the policy in the sandbox. Each call starts afresh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quiver.stages.common import sandbox
from quiver.stages.common.environments.tool_schemas import PYTHON_TOOL

_SECONDS = 10.0


def python(code: str) -> str:
    """Run a Python program and read what it prints. Only the standard library is there, no file or
    variable of an earlier program, and no network.

    Args:
        code: The program. Print what you want to see.
    """
    finished = sandbox.run_program(code, limits=sandbox.Limits(seconds=_SECONDS))
    output = finished.stdout
    if finished.stderr:
        output += ("\n" if output and not output.endswith("\n") else "") + finished.stderr
    if finished.timed_out:
        output += f"\n(ended: it took longer than {_SECONDS:g} s)"
    elif finished.killed_by:
        output += f"\n(ended by {finished.killed_by})"
    elif finished.exit_code:
        output += f"\n(exit code {finished.exit_code})"
    return output or "(it printed nothing)"


def open_tools(name: str) -> tuple[list[dict[str, Any]], dict[str, Callable[..., Any]]]:
    """Return the tool's schema and function. Raises SecurityError if no sandbox is permitted."""
    from quiver.stages.common.environments.tool_schemas import schema_of

    sandbox.check("full", "")
    return [schema_of(python, PYTHON_TOOL)], {PYTHON_TOOL: python}
