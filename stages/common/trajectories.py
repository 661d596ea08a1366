"""Trajectories of another system, as lines of a JSON file: ids and the logprobs that they had.

    {"prompt_ids": [1, 40], "completion_ids": [45, 2], "logprobs": [-0.3, -0.02], "reward": 1.0}
    {"prompt_ids": [1, 40], "completion_ids": [7, 2, 9, 2], "logprobs": [-1.1, -0.1, -0.7, -0.2],
     "turns": [{"length": 2, "observation_ids": [50, 51], "reward": 0.5}, {"length": 2}]}

`completion_ids` and `logprobs` are of sampled ids alone, those of all turns one after another, as
in rollouts/2; what stood between two turns is `observation_ids` of the first of them. Each line is
checked by itself: what is wrong is named by line and field.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from quiver.schemas import outside
from quiver.schemas.errors import ConfigError, printable, reason
from quiver.schemas.outside import LARGEST
from quiver.stages.common.config import parse
from quiver.stages.common.json_rows import bad_source, json_rows, unit_of
from quiver.stages.common.store import storage

_ROUNDING = 1e-4
"""A logprob may be above 0 by so much."""
Id = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
Logprob = Annotated[float, Field(strict=True, ge=-LARGEST, le=_ROUNDING)]
Reward = Annotated[float, Field(strict=True, ge=-LARGEST, le=LARGEST)]
Text = Annotated[str, Field(strict=True)]
FinishReason = Literal["stop", "length", "abort"]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class CalledTool(_Part):
    """A call that was read from a turn: {name, arguments}, alone or under `function`."""

    name: Text
    arguments: dict[str, Any]

    @model_validator(mode="before")
    @classmethod
    def _is_call(cls, given: Any) -> dict[str, Any]:
        return outside.read_tool_call(given, "the call")["function"]


class Turn(_Part):
    """A turn of a line."""

    length: Id
    """How many of `completion_ids` were sampled in it."""
    observation_ids: list[Id] = Field(default_factory=list)
    """What the model read after them."""
    restart_ids: list[Id] | None = Field(default=None, min_length=1)
    """All that it read before them, where the history was rewritten."""
    text: Text | None = None
    observation: Text | None = None
    """What the environment answered."""
    reward: Reward | None = None
    finish_reason: FinishReason | None = None
    tool_calls: list[CalledTool] | None = None


class Trajectory(_Part):
    """One line."""

    prompt_ids: list[Id] = Field(min_length=1)
    completion_ids: list[Id]
    logprobs: list[Logprob]
    """Of each completion id, in the distribution that it was sampled from."""
    group_id: Text | None = Field(default=None, min_length=1)
    """None: lines with the same prompt are a group."""
    temperature: Annotated[float, Field(strict=True, ge=0, le=1e6)] | None = None
    """The logits were divided by it. None: by the import's `sampling.temperature`."""
    finish_reason: FinishReason | None = None
    text: Text | None = None
    """Of the last turn."""
    reward: Reward | None = None
    """Of the whole; None: not scored, or the sum of what its turns earned."""
    turns: list[Turn] | None = Field(default=None, min_length=1)

    @model_validator(mode="after")
    def _fits(self) -> Trajectory:
        if len(self.logprobs) != len(self.completion_ids):
            raise ValueError(
                f"logprobs has {len(self.logprobs)} items, completion_ids has "
                f"{len(self.completion_ids)}"
            )
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
                raise ValueError(f"turns.{number}.observation_ids: nobody reads them, {why}")
        reason = turns[-1].finish_reason
        if reason is not None and self.finish_reason not in (None, reason):
            raise ValueError(
                f"finish_reason {self.finish_reason} is not that of its last turn, {reason}"
            )
        for number, turn in enumerate(turns[:-1]):
            if turn.finish_reason == "abort":
                raise ValueError(
                    f"turns.{number}.finish_reason: abort ends an episode, and turns follow it"
                )
        earned = [turn.reward for turn in turns if turn.reward is not None]
        total = math.fsum(earned)
        if abs(total) > LARGEST:
            raise ValueError(f"turns: their rewards add up to {total:g}, which no float32 holds")
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
            raise ValueError(f"{where}: what was given up (finish_reason abort) has no reward")
        return self

    @property
    def total_reward(self) -> float | None:
        """What the whole is worth."""
        earned = [turn.reward for turn in self.turns or () if turn.reward is not None]
        return self.reward if self.reward is not None or not earned else math.fsum(earned)

    @property
    def turn_rewards(self) -> list[float | None] | None:
        """One a turn, which add up to the reward; where only the whole has one, it is the last
        turn's. None: not scored."""
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
        """The length of each sequence that the model reads: a rewritten history begins another."""
        lengths = [len(self.prompt_ids)]
        if self.turns is None:
            return [lengths[0] + len(self.completion_ids)]
        for turn in self.turns:
            if turn.restart_ids is not None:
                lengths.append(len(turn.restart_ids))
            lengths[-1] += turn.length + len(turn.observation_ids)
        return lengths


def read(source: str, sha256: str = "") -> tuple[dict[str, Trajectory], str]:
    """All lines, by their place ("line 7"), and the hash of the file's bytes. ConfigError names
    line and field, or says that the hash is not `sha256`."""
    path = Path(os.path.expanduser(source))
    if not path.is_file():
        raise bad_source(source, f"there is no file {path.absolute()}")
    try:
        hash_now = storage.sha256(path)
        unit = unit_of(path)
        lines = {}
        for number, row in json_rows(path):
            place = f"{unit} {number}"
            if not isinstance(row, dict):
                problem = f"expected an object, found {type(row).__name__}"
                raise bad_source(f"{source} {place}", problem)
            lines[place] = parse(Trajectory, row, place_of(source, place))
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


def place_of(source: str, place: str) -> str:
    """What errors call a line."""
    return f"source {printable(source)} {place}"
