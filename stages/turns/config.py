"""The section [generate.turns]: the environment or tools that answer, and the limits of an
episode."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from quiver.schemas.outside import MEDIA
from quiver.stages.core.config import without_folder
from quiver.stages.turns.environment_config import EnvironmentConfig, OwnCode
from quiver.stages.turns.tool_calls import check_parser


class Turns(EnvironmentConfig):
    """Episodes of several turns: the environment or tools that answer, and the limits. One turn is
    limited by `generate.sampling.max_tokens`."""

    parser: str = "hermes"
    """Format of calls in a turn's text: `hermes`, `llama`, `python_tag`, `tokenizer` (the
    tokenizer's own response template), or your own function, `my_calls.py:parse`."""
    tool_role: Literal["auto", "tool", "user"] = "auto"
    """Role of the messages that hold tool outputs. auto: `tool` if the chat template has such
    messages, else `user`."""
    rewritten: Literal["refuse", "restart", "append"] = "refuse"
    """Action if the template rewrites earlier turns, for example by dropping their thinking.
    refuse: stop at the start. restart: read the rewritten history as a new sequence of the same
    rollout. append: append anyway, so that the policy keeps reading what it sampled."""
    max_turns: int = Field(default=8, ge=1, le=10_000)
    """Maximum turns of the policy; the environment still acts on the last one."""
    max_tokens: int = Field(default=4096, ge=1, lt=2**31)
    """Maximum sampled ids of an episode, over all its turns."""
    max_observation_tokens: int = Field(default=1024, ge=16)
    """Maximum ids between two turns. A longer observation is cut in the middle of its text; the
    text says so, and the turn's info says how much. Text far above this limit is cut before it is
    encoded."""
    max_images: int = Field(default=0, ge=0)
    """Maximum pictures that the environment or tools may show in an episode, besides the
    prompt's pictures. One more ends the episode; with 0 it is an error of the environment. Each
    picture must fit into max_observation_tokens."""
    max_audio: int = Field(default=0, ge=0)
    """Maximum clips that they may play in an episode; the rest is as for max_images."""
    step_seconds: float = Field(default=60.0, gt=0)
    """Maximum seconds for one answer of the environment, including the time to read it; a slower
    answer ends the episode."""
    episode_seconds: float = Field(default=600.0, gt=0)
    """Maximum seconds for all answers in one episode, including the time to read them. The policy's
    own time does not count."""
    max_tool_calls: int | None = Field(default=None, ge=1)
    """Maximum calls of an episode; the turn that asks for more ends it. Default: no limit."""
    parser_fingerprint: str = ""
    """Filled in by the stage: hash of the file of your own parser."""

    @field_validator("parser")
    @classmethod
    def _parser_exists(cls, parser: str) -> str:
        check_parser(parser)
        return parser

    @property
    def most_media(self) -> dict[str, int]:
        """Maximum pictures and clips that the environment may show, for each modality that it
        may."""
        most = {modality: getattr(self, f"max_{column}") for modality, column in MEDIA.items()}
        return {modality: count for modality, count in most.items() if count}

    @property
    def most_read_tokens(self) -> int:
        """Maximum ids of an episode after its prompt."""
        return self.max_tokens + (self.max_turns - 1) * self.max_observation_tokens

    def own_code(self) -> list[OwnCode]:
        """Return the user's own code that this config names."""
        return [*super().own_code(), *self._own_parser()]

    def _own_parser(self) -> list[OwnCode]:
        is_own = ":" in self.parser
        return [OwnCode(self.parser, "generate.turns.parser", "function")] if is_own else []

    def with_fingerprint(self) -> Turns:
        """Return a copy with the hashes of the code that it names, which is not run. Raises
        ConfigError."""
        hashes = [code.fingerprint() for code in self._own_parser()]
        update = {"parser_fingerprint": "".join(hashes)}
        return super().with_fingerprint().model_copy(update=update)

    def key(self) -> dict[str, Any]:
        """Return the base class's key, without a parser's folder once its hash is known."""
        fields = super().key()
        if self.parser_fingerprint:
            fields["parser"] = without_folder(self.parser)
        return fields
