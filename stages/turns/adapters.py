"""Adapters of the kinds of environments and tools that a recipe may name.

A user's class is classified by its members: `action_space` (gymnasium's), else `step`, else public
methods that are tools, as in TRL's `environment_factory`:

    class Counter:
        def reset(self, start, **columns):            # a text is the opening
            self.number = start

        def add(self, amount: int) -> str:            # a tool, its docstring the schema
            …

        def get_reward(self):                         # or an attribute `reward`
            return float(self.number == 12)

If a tool raises, the policy reads the error. A turn without calls is the answer. An object of a
class with a `step` answers its turns itself; if it has an attribute `tools` (schemas or documented
functions), the policy is shown these.

Of gymnasium's text environments, a turn's text is the action and the observation a user message. If
actions are numbers (a `Discrete` action space), the last whole number in the turn's text is the
action. A turn without a valid number changes nothing; the policy reads that it was no action.
`reset(seed, options)` gets the row as options.

Those on servers are in `servers`. To add a kind, add a row to the tables in `environment_config`.
"""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Callable
from typing import Any

from quiver.schemas.errors import ConfigError, printable
from quiver.stages.core import plugins, sandbox
from quiver.stages.core.isolation import Limits
from quiver.stages.turns.environment import (
    Factory,
    Message,
    Row,
    Step,
    Turn,
    call_reset,
    call_tool,
    read_opening,
    read_reward,
    read_step,
    read_text,
    waited,
)
from quiver.stages.turns.environment_config import ENVIRONMENTS, TOOLS
from quiver.stages.turns.tool_schemas import ToolSchema, schema_of, tool_methods

Functions = dict[str, Callable[..., Any]]
"""Tools by name."""
_PYTHON_SECONDS = 10.0


# -- a user's code


class ObjectEnvironment:
    """An object of a user's class; or functions alone, which keep no state between calls."""

    def __init__(self, user_object: Any, tools: Functions, *, steps: bool = False) -> None:
        """Wrap the object, or None if there are only `tools`. `steps`: it has a method `step`."""
        self._object = user_object
        self._tools = tools
        self._steps = steps

    def reset(self, row: Row, seed: int) -> list[Message]:
        """Call `reset(**columns)` if the object has it; its result is the opening."""
        reset = getattr(self._object, "reset", None)
        return read_opening(None if reset is None else call_reset(reset, row, seed))

    def step(self, turn: Turn) -> Step:
        """Call the object's `step(turn)`, or run the turn's calls one after another."""
        if self._steps:
            return read_step(waited(self._object.step(turn)))
        return Step(messages=[call_tool(self._tools, call) for call in turn.calls])

    def finish(self) -> float | None:
        """Return the result of `get_reward()`; without it, the attribute `reward` of an object
        whose methods are tools."""
        get_reward = getattr(self._object, "get_reward", None)
        if get_reward is not None:
            return read_reward(waited(get_reward()))
        return None if self._steps else read_reward(getattr(self._object, "reward", None))

    def close(self) -> None:
        """Call `close()` if the object has it."""
        close = getattr(self._object, "close", None)
        if close is not None:
            waited(close())


class GymEnvironment:
    """Adapter of one gymnasium environment."""

    def __init__(self, gym: Any) -> None:
        self._gym = gym

    def reset(self, row: Row, seed: int) -> list[Message]:
        """Reset the environment; its first observation is the opening."""
        observation, _ = self._gym.reset(seed=seed % 2**32, options=row)
        return read_opening(_as_text(observation))

    def step(self, turn: Turn) -> Step:
        """Take the turn's text as an action."""
        action: Any = turn.text.strip()
        space = self._gym.action_space
        if hasattr(space, "n"):
            numbers = re.findall(r"-?\d{1,18}", turn.text)
            action = int(numbers[-1]) if numbers else None
        if action is None or not space.contains(action):
            return Step(text=f"{turn.text.strip()[:200]!r} is no action here")
        observation, reward, is_over, is_cut, info = self._gym.step(action)
        return read_step(
            Step(
                text=_as_text(observation),
                reward=reward,
                done=is_over or is_cut,
                info=info or None,
            )
        )

    def finish(self) -> float | None:
        """Return None, because gymnasium rewards steps only."""
        return None

    def close(self) -> None:
        """Close the gymnasium environment."""
        self._gym.close()


def _as_text(observation: Any) -> str:
    return read_text(observation.tolist() if hasattr(observation, "tolist") else observation)


def open_source(environment: str, tools: list[str], arguments: dict[str, Any]) -> Factory:
    """Return the maker of the environments that a recipe names.

    Raises ConfigError if the code does not exist or lacks something.
    """
    if not environment:
        return _of_tools(tools)
    before, _, name = environment.partition(":")
    if before in ENVIRONMENTS:
        return pkgutil.resolve_name(ENVIRONMENTS[before])(name, arguments)
    constructor, sha256 = plugins.load(environment, "generate.turns.environment")
    probe = _probe(environment, lambda: constructor(**arguments))
    if hasattr(probe, "action_space"):
        probe.close()
        return Factory(lambda: GymEnvironment(constructor(**arguments)), [], False, sha256)
    steps = callable(getattr(probe, "step", None))
    if steps:
        schemas = [schema_of(tool, environment) for tool in getattr(probe, "tools", ())]
    else:
        schemas = [schema_of(method, environment) for method in tool_methods(probe).values()]
    if not steps and not schemas:
        raise ConfigError(
            f"generate.turns.environment {printable(environment)}",
            "has neither a method `step` nor any public method that is a tool",
            next="give it one",
        )
    for name, schema in zip(tool_methods(probe), schemas, strict=False):
        if not steps and schema["function"]["name"] != name:
            raise ConfigError(
                f"tool {printable(name)} of {printable(environment)}",
                f"its own schema has the name {printable(schema['function']['name'])}",
                next="give both the same name",
            )

    def make() -> ObjectEnvironment:
        user_object = constructor(**arguments)
        return ObjectEnvironment(user_object, tool_methods(user_object), steps=steps)

    return Factory(make, schemas, not steps, sha256)


def _probe(environment: str, make: Callable[[], Any]) -> Any:
    """Make the first object of an environment. Raises ConfigError if its own code raises."""
    try:
        return make()
    except Exception as error:
        raise ConfigError(
            f"generate.turns.environment {printable(environment)}",
            f"cannot be made: {type(error).__name__}: {printable(error)}",
            next="correct generate.turns.environment, its arguments, or the class",
        ) from error


def _of_tools(sources: list[str]) -> Factory:
    schemas: list[ToolSchema] = []
    functions: Functions = {}
    hashes = []
    for source in sources:
        before, _, behind = source.partition(":")
        if before in TOOLS:
            tools = pkgutil.resolve_name(TOOLS[before])(behind)
        else:
            function, sha256 = plugins.load(source, "generate.turns.tools")
            tools = [function]
            hashes.append(sha256)
        for tool in tools:
            schema = schema_of(tool, source)
            name = schema["function"]["name"]
            if name in functions:
                raise ConfigError(
                    f"generate.turns.tools {printable(source)}",
                    f"there are two tools with the name {printable(name)}",
                    next="rename one of them",
                )
            schemas.append(schema)
            functions[name] = tool
    fingerprint = "".join(dict.fromkeys(hashes))
    return Factory(lambda: ObjectEnvironment(None, functions), schemas, True, fingerprint)


# -- of the tables


def open_gymnasium(name: str, arguments: dict[str, Any]) -> Factory:
    """Return the maker of environments registered under a name.

    Raises ConfigError if gymnasium is not installed, or if the environment cannot be made.
    """
    try:
        import gymnasium
    except ImportError as error:
        raise ConfigError(
            f"generate.turns.environment gymnasium:{printable(name)}",
            "gymnasium is not installed",
            next="pip install gymnasium",
        ) from error
    _probe(f"gymnasium:{name}", lambda: gymnasium.make(name, **arguments)).close()
    return Factory(lambda: GymEnvironment(gymnasium.make(name, **arguments)), [], False)


def open_python(behind: str) -> list[Callable[..., Any]]:
    """Return the tool `python`. Raises SecurityError if no sandbox is permitted."""
    sandbox.check("full", "")
    return [python]


def python(code: str) -> str:
    """Run a Python program and read what it prints. Only the standard library is there, no file or
    variable of an earlier program, and no network.

    Args:
        code: The program. Print what you want to see.
    """
    finished = sandbox.run_program(code, limits=Limits(seconds=_PYTHON_SECONDS))
    output = finished.stdout
    if finished.stderr:
        output += ("\n" if output and not output.endswith("\n") else "") + finished.stderr
    if finished.timed_out:
        output += f"\n(ended: it took longer than {_PYTHON_SECONDS:g} s)"
    elif finished.killed_by:
        output += f"\n(ended by {finished.killed_by})"
    elif finished.exit_code:
        output += f"\n(exit code {finished.exit_code})"
    return output or "(it printed nothing)"
