"""The section [generate.turns]: which environment or tools answer the policy, and every limit of an
episode."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from quiver.stages.common import plugins
from quiver.stages.common.config import without_folder
from quiver.stages.common.environments.adapters import OwnCode
from quiver.stages.common.environments.config import EnvironmentConfig
from quiver.stages.generate.turns.tool_calls import check_parser


class Turns(EnvironmentConfig):
    """Episodes of several turns: who answers the policy, and how far they may go. The longest turn
    is `generate.sampling.max_tokens`."""

    parser: str = "hermes"
    """How calls stand in a turn's text: `hermes`, `llama`, `python_tag`, `tokenizer` (its own
    response template), or a function of yours, `my_calls.py:parse`."""
    tool_role: Literal["auto", "tool", "user"] = "auto"
    """Whose message a tool's output is; auto: `tool`, where the chat template has such messages."""
    rewritten: Literal["refuse", "restart", "append"] = "refuse"
    """What to do where the template rewrites earlier turns, as one does that drops their thinking:
    refuse it at the start; read the rewritten history as a new sequence of the same rollout; or
    append all the same, so that the policy goes on reading what it sampled."""
    max_turns: int = Field(default=8, ge=1, le=10_000)
    """Most turns of the policy; the last one is still acted on."""
    max_tokens: int = Field(default=4096, ge=1, lt=2**31)
    """Most sampled ids of an episode, over all its turns."""
    max_observation_tokens: int = Field(default=1024, ge=16)
    """Most ids between two turns. A longer observation is cut in the middle of its text; the text
    says so, and the turn's info how much. Text far above this is cut before it is encoded."""
    max_images: int = Field(default=0, ge=0)
    """Most pictures that the policy is shown in an episode by what answers it, beside those of its
    prompt. One more ends the episode; with 0 it is an error of the environment. Each has to fit
    into max_observation_tokens."""
    step_seconds: float = Field(default=60.0, gt=0)
    """Longest time of one answer of the environment, and of reading it; it ends the episode."""
    episode_seconds: float = Field(default=600.0, gt=0)
    """Longest time of all its answers in one episode, and of reading them; what the policy takes
    does not count."""
    max_tool_calls: int | None = Field(default=None, ge=1)
    """Most calls of an episode; the turn that asks for more ends it. None: any number."""
    parser_fingerprint: str = ""
    """Filled in by the stage: hash of the file of your own parser."""

    @field_validator("parser")
    @classmethod
    def _parser_exists(cls, parser: str) -> str:
        check_parser(parser)
        return parser

    @property
    def most_read_tokens(self) -> int:
        """Most ids of an episode behind its prompt."""
        return self.max_tokens + (self.max_turns - 1) * self.max_observation_tokens

    def own_code(self) -> list[OwnCode]:
        """The code of the user's that it names."""
        return [*super().own_code(), *self._own_parser()]

    def _own_parser(self) -> list[OwnCode]:
        is_own = ":" in self.parser
        return [OwnCode(self.parser, "generate.turns.parser", "function")] if is_own else []

    def with_fingerprint(self) -> Turns:
        """With the hashes of the code that it names, which is not run. ConfigError."""
        hashes = [plugins.fingerprint(plugins.locate(*code)) for code in self._own_parser()]
        update = {"parser_fingerprint": "".join(hashes)}
        return super().with_fingerprint().model_copy(update=update)

    def key(self) -> dict[str, Any]:
        """As the base has it; once its hash is known, the folder of a parser does not count."""
        fields = super().key()
        if self.parser_fingerprint:
            fields["parser"] = without_folder(self.parser)
        return fields
