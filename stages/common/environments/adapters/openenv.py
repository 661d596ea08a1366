"""A server that speaks OpenEnv over HTTP: each episode is reset and stepped under its own id.

    POST URL/reset  {"seed": 7, "episode_id": "…", column: …}
    POST URL/step   {"action": {"message": "…"}, "episode_id": "…"}
                    → {"observation": {…}, "reward": 0.5, "done": false}

The action has the turn's text under `action_key` (set in `arguments`; default: "message"). If the
turn has exactly one call, the action is the call's arguments instead. The policy reads the member
`text_key` of the observation. Without `text_key` it reads the only member if that is a text, else
the whole observation as JSON. The server must keep episodes apart by their id; a server that makes
a new environment for each request cannot be used.
"""

from __future__ import annotations

import uuid
from typing import Any

import httpx

from quiver.schemas.errors import ConfigError, printable
from quiver.schemas.plain import read_json
from quiver.stages.common.environments.environment import (
    Factory,
    Message,
    Row,
    Step,
    Turn,
    clean,
    read_opening,
    read_step,
    read_text,
)

_BESIDE = ("reward", "done", "metadata")
_LONGEST_SECONDS = 24 * 3600.0  # never reached: the step's own limit ends this process earlier
_MOST_BYTES = 16 << 20


class OpenEnvironment:
    """One episode on the server."""

    def __init__(self, client: httpx.Client, action_key: str, text_key: str | None) -> None:
        self._client = client
        self._action_key = action_key
        self._text_key = text_key
        self._episode_id = str(uuid.uuid4())

    def reset(self, row: Row, seed: int) -> list[Message]:
        """Reset the episode; its first observation is the opening."""
        answer = self._ask("reset", {**row, "seed": seed % 2**31})
        return read_opening(self._text_of(answer["observation"]))

    def step(self, turn: Turn) -> Step:
        """Send one action and return the server's answer."""
        action: dict[str, Any] = {self._action_key: turn.text}
        if len(turn.calls) == 1:
            action = turn.calls[0].arguments
        answer = self._ask("step", {"action": action})
        return read_step(
            {
                "text": self._text_of(answer["observation"]),
                "reward": answer.get("reward"),
                "done": answer.get("done") is True,
                "info": answer.get("metadata") or None,
            }
        )

    def finish(self) -> float | None:
        """Return None, because OpenEnv rewards steps only."""
        return None

    def close(self) -> None:
        """Do nothing, because the server manages its episodes itself."""

    def _ask(self, verb: str, request: dict[str, Any]) -> dict[str, Any]:
        """POST a request and return its answer.

        Raises RuntimeError if the server refuses, or answers without an observation.
        """
        request = {**request, "episode_id": self._episode_id}
        received = bytearray()
        with self._client.stream("POST", f"/{verb}", json=request) as response:
            for chunk in response.iter_raw():  # not decompressed: a small body could expand hugely
                received += chunk
                if len(received) > _MOST_BYTES:
                    raise RuntimeError(f"/{verb}: its answer has more than {_MOST_BYTES} bytes")
        text = printable(received.decode(errors="replace"))
        if response.status_code != 200:
            raise RuntimeError(f"/{verb}: {response.status_code} {text}")
        try:
            answer = read_json(received)
        except ValueError as error:
            raise RuntimeError(f"/{verb}: no JSON, {printable(error)}: {text}") from None
        if not isinstance(answer, dict) or not isinstance(answer.get("observation"), dict):
            raise RuntimeError(f"/{verb}: no observation in {text}")
        return answer

    def _text_of(self, observation: dict[str, Any]) -> str:
        parts_to_read = {name: part for name, part in observation.items() if name not in _BESIDE}
        if self._text_key is not None:
            return read_text(parts_to_read.get(self._text_key))
        texts = [part for part in parts_to_read.values() if isinstance(part, str)]
        return (
            clean(texts[0]) if len(texts) == len(parts_to_read) == 1 else read_text(parts_to_read)
        )


def open_environment(name: str, arguments: dict[str, Any]) -> Factory:
    """Return the maker of episodes on the server at a URL.

    Raises ConfigError if `name` is not a URL or an argument is unknown.
    """
    unknown = sorted(set(arguments) - {"action_key", "text_key"})
    if unknown or not name.startswith(("http://", "https://")):
        problem = f"unknown argument {printable(unknown[0])}" if unknown else "is no URL"
        raise ConfigError(
            f"generate.turns.environment openenv:{printable(name)}",
            f"{problem}; expected openenv:http://… with action_key and text_key as arguments",
            next="correct generate.turns",
        )
    # ignore proxies and passwords in this machine's environment variables, and follow no redirects
    client = httpx.Client(
        base_url=name.rstrip("/"),
        headers={"Accept-Encoding": "identity"},
        timeout=_LONGEST_SECONDS,
        trust_env=False,
    )
    action_key = arguments.get("action_key", "message")
    text_key = arguments.get("text_key")
    return Factory(lambda: OpenEnvironment(client, action_key, text_key), [], False)
