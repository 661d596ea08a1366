"""The section [generate.turns]: which environment or tools answer the policy, and every limit of an
episode."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from quiver.schemas.errors import ConfigError
from quiver.stages.common.config import Config, Runtime, without_folder
from quiver.stages.generate.turns.adapters import check_source
from quiver.stages.generate.turns.tool_calls import check_parser


class Turns(Config):
    """Episodes of several turns: who answers the policy, and how far they may go."""

    environment: str = ""
    """A class of yours, `my_env.py:Guess`: its public methods are tools, or it has a method `step`;
    or `gymnasium:NAME`, or `openenv:URL`. Empty: `tools`."""
    tools: tuple[str, ...] = ()
    """Functions that the policy may call, `my_tools.py:search` each; `python`: the sandbox; `mcp:`
    and a command: the tools of that server."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """What the environment is made with, beside the row: its constructor's arguments."""
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
    max_turn_tokens: int | None = Field(default=None, ge=1)
    """Most sampled ids of one turn. None: what is left of max_tokens."""
    max_observation_tokens: int = Field(default=1024, ge=16)
    """Most ids between two turns. A longer observation is cut in the middle of its text; the text
    says so, and the turn's info how much."""
    max_tool_calls: int | None = Field(default=None, ge=1)
    """Most calls of an episode; the turn that asks for more ends it. None: any number."""
    step_seconds: float = Field(default=60.0, gt=0)
    """Longest time of one answer of the environment."""
    episode_seconds: float = Field(default=600.0, gt=0)
    """Longest time of all its answers in one episode; what the policy takes does not count."""
    processes: Runtime[int | None] = Field(default=None, ge=1)
    """Worker processes, each with many environments. None: one a core."""
    max_memory_gib: Runtime[float | None] = Field(default=None, gt=0)
    """Most private memory of a process. None: its share of the machine's."""
    fingerprint: str = ""
    """Filled in by the stage: hash of your code."""

    @field_validator("parser")
    @classmethod
    def _parser_exists(cls, parser: str) -> str:
        check_parser(parser)
        return parser

    @model_validator(mode="after")
    def _names_one(self) -> Turns:
        if bool(self.environment) == bool(self.tools):
            raise ValueError("name an environment or tools, one of the two")
        if self.tools and self.arguments:
            raise ValueError("arguments are an environment's; tools take none")
        if self.max_turn_tokens is not None and self.max_turn_tokens > self.max_tokens:
            raise ValueError(
                f"max_turn_tokens {self.max_turn_tokens} is above max_tokens {self.max_tokens}"
            )
        for source in self.sources:
            try:
                check_source(source, is_tool=not self.environment)
            except ConfigError as error:
                raise ValueError(error.message) from None
        return self

    @property
    def sources(self) -> tuple[str, ...]:
        """The environment, or the tools, as the recipe names them."""
        return (self.environment,) if self.environment else self.tools

    def key(self) -> dict[str, Any]:
        """As the base has it; once the fingerprint is known, a file's folder does not count."""
        fields = super().key()
        if self.fingerprint:
            fields["environment"] = _without_folder(self.environment)
            fields["tools"] = [_without_folder(tool) for tool in self.tools]
        return fields


def _without_folder(source: str) -> str:
    """As `config.without_folder`, for names of code alone: a URL or a command stays whole."""
    is_code = source.rpartition(":")[0].endswith(".py") and not source.startswith("mcp:")
    return without_folder(source) if is_code else source
