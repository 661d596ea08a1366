"""Serves environments in a `UserProcess`; these are its requests and answers (see `answering`).

    {"load": {environment, tools, arguments}}
                                    → {"tools": […], "answers": …, "fingerprint": …, "error": null}
    {"key": …, "verb": "open", "row": pickled, "seed": …}
                                    → {"step": {…}, "error": null}   the opening messages
    {"key": …, "verb": "step", "turn": {text, calls}}
                                    → {"step": {…}, "error": null}
    {"key": …, "verb": "finish"}    → {"step": {"reward": …}, "error": null}    also closes it

`error` is what the environment raised. Each environment has its own random state, of Python and of
numpy, which begins with its seed. So an episode can be replayed in another process.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import numpy as np

from quiver.schemas.errors import printable
from quiver.stages.core.run.answering import no_copies
from quiver.stages.core.run.user_process import refusal
from quiver.stages.turns.adapters import open_source
from quiver.stages.turns.environment import Call, Turn


class Answerer:
    """The environments of this process, by key."""

    def __init__(self) -> None:
        self._factory: Any = None
        self._environments: dict[int, Any] = {}
        self._random_states: dict[int, tuple[Any, Any]] = {}

    def answer(self, request: dict[str, Any], send: Callable[..., None]) -> dict[str, Any]:
        """Return the answer to one request."""
        if "load" in request:
            return self.load(**request["load"])
        acts = {"open": self.open, "step": self.step, "finish": self.finish}
        arguments = {name: request[name] for name in request.keys() - {"key", "verb"}}
        return self._guarded(acts[request["verb"]], request["key"], **arguments)

    def load(self, environment: str, tools: list[str], arguments: dict[str, Any]) -> dict:
        """Load the code that makes environments, and return its tools or the error."""
        try:
            self._factory = open_source(environment, tools, arguments)
            return {**self._factory._asdict(), "make": None, "error": None}
        except BaseException as error:  # user code may raise SystemExit too
            title = f"generate.turns {printable(environment or ', '.join(tools))}"
            return {"error": refusal(error, title, "generate.turns.max_memory_gib")}

    def _guarded(self, act: Any, key: int, **arguments: Any) -> dict[str, Any]:
        """Return the answer of `act`, or the error that the environment's own code raised."""
        try:
            with no_copies(), self._randomness(key):
                return {**act(key, **arguments), "error": None}
        except BaseException as error:
            try:
                text = printable(f"{type(error).__name__}: {error}", 1000)
            except BaseException:  # converting the error to text may raise too
                text = type(error).__name__
            if key in self._environments:
                _close(self._environments.pop(key))
            return {"step": None, "error": text}

    def open(self, key: int, row: bytes, seed: int) -> dict[str, Any]:
        """Make an environment and reset it for its row."""
        random.seed(seed)
        np.random.seed(seed % 2**32)
        environment = self._environments[key] = self._factory.make()
        messages = environment.reset(pickle.loads(row), seed)
        return {"step": {"messages": messages}}

    def step(self, key: int, turn: dict[str, Any]) -> dict[str, Any]:
        """Return an environment's answer to a turn."""
        calls = tuple(Call(*call) for call in turn["calls"])
        return {"step": self._environments[key].step(Turn(turn["text"], calls))._asdict()}

    def finish(self, key: int) -> dict[str, Any]:
        """Return the reward of a finished episode and close its environment."""
        reward = self._environments[key].finish()
        _close(self._environments.pop(key))
        return {"step": {"reward": reward}}

    @contextmanager
    def _randomness(self, key: int) -> Any:
        """Restore an environment's random state on entry and save it on exit."""
        if key in self._random_states:
            state, numpy_state = self._random_states[key]
            random.setstate(state)
            np.random.set_state(numpy_state)
        yield
        if key in self._environments:
            self._random_states[key] = (random.getstate(), np.random.get_state())
        else:
            self._random_states.pop(key, None)


def _close(environment: Any) -> None:
    try:
        environment.close()
    except BaseException as error:  # printed only, because its episode is over
        print(f"closing an environment: {type(error).__name__}: {error}")
