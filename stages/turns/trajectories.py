"""Trajectories from another system, as lines of a JSON file: token ids and their logprobs.

    {"prompt_ids": [1, 40], "completion_ids": [45, 2], "logprobs": [-0.3, -0.02], "reward": 1.0}
    {"prompt_ids": [1, 40], "completion_ids": [7, 2, 9, 2], "logprobs": [-1.1, -0.1, -0.7, -0.2],
     "turns": [{"length": 2, "observation_ids": [50, 51], "reward": 0.5}, {"length": 2}]}

`completion_ids` and `logprobs` hold only the sampled ids, all turns one after another, as in
rollouts/2. The ids between two turns are `observation_ids` of the first one. Each line is checked
by itself, and errors name the line and field.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from quiver.schemas import outside
from quiver.schemas.errors import ConfigError, printable, reason
from quiver.schemas.manifest import digest
from quiver.schemas.outside import Number, is_finite
from quiver.stages.core import config as common
from quiver.stages.core.config import parse
from quiver.stages.core.file_rows import bad_source, json_rows
from quiver.stages.core.files import sha256_of

_ROUNDING = 1e-4
"""Largest logprob accepted, above 0 because of rounding."""
Id = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
Logprob = Annotated[Number, Field(strict=True, le=_ROUNDING)]
Reward = Annotated[Number, Field(strict=True)]
Text = Annotated[str, Field(strict=True)]
FinishReason = Literal["stop", "length", "abort"]


class Source(common.Config):
    """Config of a stage that reads such a file."""

    source: str = Field(min_length=1)
    """A file of JSON lines."""
    source_sha256: str = ""
    """Hash of the file, filled in by the stage."""

    def key(self) -> dict[str, Any]:
        """Return the key without the folder of `source`: the bytes decide, not their location."""
        return {**super().key(), "source": common.without_folder(self.source)}


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class CalledTool(_Part):
    """A call that was parsed from a turn: {name, arguments}, alone or under `function`."""

    name: Text
    arguments: dict[str, Any]

    @model_validator(mode="before")
    @classmethod
    def _is_call(cls, given: Any) -> dict[str, Any]:
        return outside.read_tool_call(given, "the call")["function"]


class Turn(_Part):
    """One turn of a trajectory."""

    length: Id
    """How many of `completion_ids` were sampled in it."""
    observation_ids: list[Id] = Field(default_factory=list)
    """Ids the model read after them."""
    restart_ids: list[Id] | None = Field(default=None, min_length=1)
    """All ids the model read before them, if the history was rewritten."""
    text: Text | None = None
    observation: Text | None = None
    """The environment's answer."""
    reward: Reward | None = None
    finish_reason: FinishReason | None = None
    tool_calls: list[CalledTool] | None = None


class Trajectory(_Part):
    """One line of the file."""

    prompt_ids: list[Id] = Field(min_length=1)
    completion_ids: list[Id]
    logprobs: list[Logprob]
    """Logprob of each completion id, in the distribution that it was sampled from."""
    group_id: Text | None = Field(default=None, min_length=1)
    """Group of the trajectory. Default: lines with the same prompt are a group."""
    temperature: Annotated[float, Field(strict=True, ge=0, le=1e6)] | None = None
    """The logits were divided by it. Default: the import's `sampling.temperature`."""
    finish_reason: FinishReason | None = None
    text: Text | None = None
    """Text of the last turn."""
    reward: Reward | None = None
    """Reward of the whole. None: not scored, or the sum of the turns' rewards."""
    turns: list[Turn] | None = Field(default=None, min_length=1)
    paid: list[Reward | None] | None = None
    """What the environment paid for each of `turns`. Default: the turns' rewards."""
    messages: list[dict[str, Any]] | None = Field(default=None, min_length=1)
    """The prompt's chat, for people and rewards; `prompt_ids` are what the model read."""
    tools: list[dict[str, Any]] | None = None
    """JSON schemas of the tools that the prompt shows."""
    columns: dict[str, Any] = Field(default_factory=dict)
    """The prompt's other columns, such as its answer, which rewards get by name."""

    @field_validator("messages")
    @classmethod
    def _are_messages(cls, given: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        if given is None:
            return None
        return [
            outside.read_message(message, f"message {number}")
            for number, message in enumerate(given)
        ]

    @field_validator("tools")
    @classmethod
    def _none_of_no_tools(cls, given: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        return given or None

    @model_validator(mode="after")
    def _fits(self) -> Trajectory:
        if len(self.logprobs) != len(self.completion_ids):
            raise ValueError(
                f"logprobs has {len(self.logprobs)} items, completion_ids has "
                f"{len(self.completion_ids)}"
            )
        if self.paid is not None and self.turns is None:
            raise ValueError("paid: the line has no turns")
        if self.paid is not None and len(self.paid) != len(self.turns):
            raise ValueError(f"paid has {len(self.paid)} items, turns has {len(self.turns)}")
        return self

    @model_validator(mode="after")
    def _turns_fit(self) -> Trajectory:
        turns = self.turns
        if turns is None:
            return self
        lengths = sum(turn.length for turn in turns)
        if lengths != len(self.completion_ids):
            raise ValueError(
                f"turns: their lengths add up to {lengths}, completion_ids has "
                f"{len(self.completion_ids)} items"
            )
        if turns[0].restart_ids is not None:
            raise ValueError("turns.0.restart_ids: the first turn begins with prompt_ids")
        for number, (turn, after) in enumerate(zip(turns, [*turns[1:], None], strict=True)):
            is_unread = after is None or after.restart_ids is not None
            if is_unread and turn.observation_ids:
                why = (
                    "it is the last turn" if after is None else "the history is rewritten after it"
                )
                raise ValueError(
                    f"turns.{number}.observation_ids: they are never read, because {why}"
                )
        reason = turns[-1].finish_reason
        if reason is not None and self.finish_reason not in (None, reason):
            raise ValueError(
                f"finish_reason {self.finish_reason} differs from its last turn's, {reason}"
            )
        for number, turn in enumerate(turns[:-1]):
            if turn.finish_reason == "abort":
                raise ValueError(
                    f"turns.{number}.finish_reason: abort ends an episode, and turns follow it"
                )
        earned = [turn.reward for turn in turns if turn.reward is not None]
        total = math.fsum(earned)
        if not is_finite(total):
            raise ValueError(f"turns: their rewards add up to {total:g}, too large for a float32")
        is_told_twice = self.reward is not None and earned
        if is_told_twice and not math.isclose(total, self.reward, rel_tol=1e-4, abs_tol=1e-4):
            raise ValueError(
                f"reward is {self.reward:g}, the rewards of its turns add up to {total:g}"
            )
        return self

    @model_validator(mode="after")
    def _has_no_reward_if_given_up(self) -> Trajectory:
        reasons = [self.finish_reason, *(turn.finish_reason for turn in self.turns or ())]
        if "abort" in reasons and self.total_reward is not None:
            where = "reward" if self.reward is not None else "turns"
            raise ValueError(f"{where}: a trajectory with finish_reason abort must have no reward")
        return self

    @property
    def group(self) -> str:
        """Id of the group; by default it follows from the prompt."""
        return self.group_id or digest(self.prompt_ids)[:16]

    @property
    def total_reward(self) -> float | None:
        """Reward of the whole trajectory, or None."""
        earned = [turn.reward for turn in self.turns or () if turn.reward is not None]
        return self.reward if self.reward is not None or not earned else math.fsum(earned)

    @property
    def turn_rewards(self) -> list[float | None] | None:
        """One reward per turn, adding up to the total; None if not scored.

        If only the whole has a reward, the last turn gets it.
        """
        earned = [turn.reward for turn in self.turns or ()]
        if self.total_reward is None:
            return None
        if all(reward is None for reward in earned):
            return [*earned[:-1], self.total_reward]
        return earned

    @property
    def ids(self) -> dict[str, list[int]]:
        """Every list of ids, by its field."""
        fields = {"prompt_ids": self.prompt_ids, "completion_ids": self.completion_ids}
        for number, turn in enumerate(self.turns or ()):
            fields[f"turns.{number}.observation_ids"] = turn.observation_ids
            fields[f"turns.{number}.restart_ids"] = turn.restart_ids or []
        return fields

    @property
    def sequences(self) -> list[int]:
        """Length of each sequence that the model reads: a rewritten history begins another one."""
        lengths = [len(self.prompt_ids)]
        if self.turns is None:
            return [lengths[0] + len(self.completion_ids)]
        for turn in self.turns:
            if turn.restart_ids is not None:
                lengths.append(len(turn.restart_ids))
            lengths[-1] += turn.length + len(turn.observation_ids)
        return lengths


def read(source: str, sha256: str = "") -> tuple[dict[str, Trajectory], str]:
    """Read all lines, by their place ("line 7"), and hash the file's bytes.

    Args:
        source: the path of the file.
        sha256: the expected hash. Empty: any.

    Raises:
        ConfigError: names the line and field, or says that the hash is not `sha256`.
    """
    path = Path(os.path.expanduser(source))
    if not path.is_file():
        raise bad_source(source, f"there is no file {path.absolute()}")
    try:
        hash_now = sha256_of(path)
        lines = {}
        for place, row in json_rows(path):
            if not isinstance(row, dict):
                problem = f"expected an object, found {type(row).__name__}"
                raise bad_source(f"{source} {place}", problem)
            lines[place] = parse(Trajectory, row, f"source {printable(source)} {place}")
    except OSError as error:
        raise bad_source(source, f"cannot be read: {reason(error)}") from error
    if not lines:
        raise bad_source(source, "has no lines")
    if sha256 not in ("", hash_now):
        raise ConfigError(
            f"source {printable(source)}",
            f"sha256 expected {sha256[:12]}…, found {hash_now[:12]}…",
            next="leave the file as it is while it is read",
        )
    return lines, hash_now
