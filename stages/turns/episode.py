"""One episode as a state machine: what to sample, what to ask the environment, and how it ended.

It knows no engine and no process.

    episode = Episode(setting, "sum-0017-2", prompt_ids, messages)
    while episode.state != "ended":
        if episode.state == "sample":
            request = episode.request()                # ids so far, maximum ids of the turn
            episode.sampled(ids, logprobs, finish_reason)
        elif episode.state == "act":
            episode.observed(step, seconds)            # the environment's answer to `episode.turn`
        else:                                          # "finish": the environment's final reward
            episode.rewarded(reward)
    episode.record()                                   # the columns of rollouts/2

        sample ──────────────→ act ──→ sample …        a turn, and its answer
           └─ (parse error) ──→ sample                 the policy reads the error
           └─ (answer, limit) ─→ finish → ended        the environment is asked for its reward
    any but sample ─ failed ──────────→ ended          without any rewards

Ids are only ever appended. Each limit that ends an episode is its `end_reason`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from quiver.schemas.errors import ConfigError, SecurityError
from quiver.schemas.outside import MEDIA, is_finite
from quiver.stages.model.media import WORDS, Medium
from quiver.stages.turns.bridge import (
    Bridge,
    Fitting,
    History,
    answers_of_calls,
    cut_to,
    longest_content,
    turn_message,
)
from quiver.stages.turns.config import Turns
from quiver.stages.turns.environment import Message, Step, Turn, files_in, for_people
from quiver.stages.turns.statistics import CUT_INFO, FAILURE_INFO, FAILURES
from quiver.stages.turns.tool_calls import Parse, ParsedTurn

_UNTOLD = "the engine gave this turn up"
_REFUSED = "the policy cannot be shown its observation: {}"
_TOO_MUCH = "the rewards of its last turn and of the whole episode add up to no float32"
_LATE = "its observation was not read within generate.turns.{} {:g}"
_NOT_SHOWN = "it shows a {}; set generate.turns.{} to how many an episode may show"
State = Literal["sample", "act", "finish", "ended"]


@dataclass(frozen=True)
class Setting:
    """Settings and functions that the episodes of one stage share."""

    limits: Turns
    bridge: Bridge
    parse: Parse | None
    """None if the environment has no tools and reads a turn's text unchanged."""
    decode: Callable[[list[int]], str]
    """Decodes a turn's ids into the text that the policy wrote."""
    stop_ids: frozenset[int]
    """Ids with which the model or its template ends a turn."""
    max_turn_tokens: int
    """Maximum sampled ids of one turn."""
    context: int
    """Maximum ids of one sequence."""
    answers: bool
    """If true, a turn without calls is the policy's answer and ends the episode."""
    check_file: Callable[[str, str, bytes], object] = lambda modality, name, content: None
    """Raises ConfigError, about the name, if the content cannot be decoded within limits."""
    histories: Sequence[History] = ()
    """The template's treatment of earlier turns."""

    def rewrites(self, role: str, thinks: bool) -> bool:
        """Return True if the sequence must restart before a message of that role.

        `thinks` is true if earlier turns contain thinking.
        """
        if self.limits.rewritten != "restart":
            return False
        role = self.bridge.tool_role if role == "tool" else role
        return any(
            history.role == role
            and not (history.appends and (history.keeps_thinking or not thinks))
            for history in self.histories
        )


class Request(NamedTuple):
    """The next turn to sample."""

    turn: int
    """Turn number, from 0."""
    prompt_ids: list[int]
    """Everything that the policy reads before it."""
    max_tokens: int
    media: tuple[Medium, ...]
    """Pictures and clips that the environment has shown in these ids."""


@dataclass
class _Turn:
    """A turn as rollouts/2 stores it."""

    length: int
    text: str
    finish_reason: str
    restart_ids: list[int] | None
    observation_ids: list[int] = field(default_factory=list)
    tool_calls: str | None = None
    parse_error: str | None = None
    observation: str = ""
    reward: float | None = None
    info: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


class Episode:
    """One episode, from its prompt to its end."""

    def __init__(
        self,
        setting: Setting,
        name: str,
        prompt_ids: Sequence[int],
        messages: list[Message],
    ) -> None:
        """Begin an episode.

        Args:
            setting: Shared by the episodes of a stage.
            name: The episode's name in errors.
            prompt_ids: [P] ids of the prompt.
            messages: The prompt's, from which a rewriting template restarts the sequence.
        """
        self.setting = setting
        self.name = name
        self.state: State = "sample"
        self.end_reason: str | None = None
        self.turn = Turn("")
        """The turn that the environment must answer, in the state `act`."""
        self._ids = list(prompt_ids)
        """Ids that the policy has read and sampled since the sequence began."""
        self._messages = messages
        self._turns: list[_Turn] = []
        self._restart_ids: list[int] | None = None
        self._media: list[Medium] = []
        self._shown: dict[str, list[dict[str, Any]]] = {modality: [] for modality in MEDIA}
        """The pictures and clips in the form of rollouts/4."""
        self._completion_ids: list[int] = []
        self._logprobs: list[float] = []
        self._stop_reason: str | None = None
        self._num_calls = 0
        self._has_end = False
        self._bridge_seconds = 0.0
        """Time spent reading observations, besides the environment's own time."""
        self._thinks = False

    # -- the next request

    def request(self) -> Request:
        """Return what to sample, in the state `sample`."""
        room, _ = self._room()
        return Request(len(self._turns), list(self._ids), room, tuple(self._media))

    def _room(self) -> tuple[int, str]:
        """Return the maximum ids of the next turn, and the end reason if the turn fills them."""
        limits = self.setting.limits
        rooms = [(limits.max_tokens - len(self._completion_ids), "max_tokens")]
        rooms.append((self.setting.max_turn_tokens, "max_tokens"))
        rooms.append((self.setting.context - len(self._ids), "context"))
        return min(rooms, key=lambda room: room[0])

    # -- answers of the engine and the environment

    def sampled(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float],
        finish_reason: str,
        stop_reason: str | None = None,
    ) -> None:
        """Add a turn, from the engine's answer to the request."""
        setting = self.setting
        _, limit = self._room()
        ids = np.asarray(ids, np.int64).tolist()
        self._ids += ids
        self._completion_ids += ids
        self._logprobs += np.asarray(logprobs, np.float32).tolist()
        self._stop_reason = stop_reason
        self._has_end = bool(ids) and ids[-1] in setting.stop_ids
        text = setting.decode(ids)
        record = _Turn(len(ids), text, finish_reason, self._restart_ids)
        self._restart_ids = None
        self._turns.append(record)
        parsed = ParsedTurn(text) if setting.parse is None else setting.parse(text)
        self._thinks |= "</think>" in text
        self._num_calls += len(parsed.calls)
        if parsed.calls:
            record.tool_calls = json.dumps([call._asdict() for call in parsed.calls])
        record.parse_error = parsed.error
        said = ParsedTurn(text) if parsed.error else parsed  # a call that is not made stays text
        self._messages = [*self._messages, turn_message(said, setting.bridge.gap)]
        if finish_reason == "abort":
            self.failed("environment_error", _UNTOLD)
        elif finish_reason == "length":
            self._end(limit)
        elif parsed.is_broken:
            self._end("parse_error")
        elif parsed.error is not None:
            refusal = {"role": "tool", "name": "error", "content": f"Error: {parsed.error}"}
            self._continue(answers_of_calls([refusal]))
        elif setting.answers and not parsed.calls:
            self._end("answered")
        elif self._num_calls > (setting.limits.max_tool_calls or self._num_calls):
            self._end("max_tool_calls")
        else:
            self.turn = Turn(parsed.text, parsed.calls)
            self.state = "act"

    def observed(self, step: Step, seconds: float = 0.0) -> None:
        """Add the environment's answer to `turn`."""
        record = self._turns[-1]
        record.seconds += seconds
        record.reward = step.reward
        record.info |= step.info or {}
        messages = answers_of_calls(step.observation())
        if step.done:
            self._note(messages)
            self._end("environment")
        else:
            self._continue(messages)

    def failed(self, reason: str, why: str, seconds: float = 0.0) -> None:
        """End the episode because the environment did not answer; `reason` is one of FAILURES."""
        if not self._turns:  # it could not even begin
            self._turns.append(_Turn(0, "", "abort", None))
        record = self._turns[-1]
        record.seconds += seconds
        record.info[FAILURE_INFO] = why
        self.end_reason = reason
        self.state = "ended"

    def rewarded(self, reward: float | None, seconds: float = 0.0) -> None:
        """End the episode with the environment's reward for the whole episode, in the state
        `finish`.

        The reward is added to the last turn's.
        """
        record = self._turns[-1]
        record.seconds += seconds
        if reward is not None:
            record.reward = reward + (record.reward or 0.0)
            if not is_finite(record.reward):
                return self.failed("environment_error", _TOO_MUCH)
        self.state = "ended"
        return None

    # -- the finished episode

    def record(self) -> dict[str, Any]:
        """Return the columns of rollouts/4 that an episode decides. A failed episode has no
        rewards."""
        has_failed = self.end_reason in FAILURES
        turns = [
            {
                **vars(turn),
                "reward": None if has_failed else turn.reward,
                "info": json.dumps(turn.info) if turn.info else None,
            }
            for turn in self._turns
        ]
        return {
            "completion_ids": self._completion_ids,
            "old_logprobs": self._logprobs,
            "finish_reason": self._turns[-1].finish_reason,
            "stop_reason": self._stop_reason,
            "completion_text": self._turns[-1].text,
            "turns": turns,
            "end_reason": self.end_reason,
            **{MEDIA[modality]: shown or None for modality, shown in self._shown.items()},
        }

    # -- between two turns

    def _continue(self, messages: list[Message]) -> None:
        """Let the policy read `messages`, unless a limit is reached."""
        record = self._turns[-1]
        self._note(messages)
        files = files_in(messages)
        limit = self._limit_reached(files)
        if limit is not None:
            return self._end(limit)
        refusal = self._refusal(messages, files)
        if refusal is not None:
            return self.failed("environment_error", refusal)
        # The template rewrites the history before these messages, so a new sequence begins.
        is_rewritten = self.setting.rewrites(
            messages[0]["role"] if messages else "user", self._thinks
        )
        restart = None
        try:
            fitting = self._fitting(messages)
            if fitting is None:
                return None
            if is_rewritten:
                restart = self.setting.bridge.restart(
                    self.name, [*self._messages, *fitting.messages]
                )
        except (ConfigError, SecurityError) as error:
            return self.failed("environment_error", _REFUSED.format(error.message))
        if fitting.num_cut:
            record.info[CUT_INFO] = fitting.num_cut
            record.observation = for_people(fitting.messages)
        ids = [*self._ids, *fitting.rendering.ids] if restart is None else restart.ids
        if len(ids) >= self.setting.context:
            return self._end("context")
        if restart is None:
            record.observation_ids = fitting.rendering.ids
            unread = {modality: iter(contents) for modality, contents in files.items()}
            for modality, start, length in fitting.spans:
                content = next(unread[modality])
                self._media.append(Medium(modality, content, len(self._ids) + start, length))
                at = {"turn": len(self._turns) - 1, "start": start, "length": length}
                self._shown[modality].append({**at, "bytes": content})
        else:
            self._restart_ids = restart.ids
        self._ids = list(ids)  # copied, because it grows
        self._messages = [*self._messages, *fitting.messages]
        self.state = "sample"
        return None

    def _limit_reached(self, files: dict[str, list[bytes]]) -> str | None:
        """Return the name of the limit that ends the episode before these files are shown, if
        any."""
        limits = self.setting.limits
        reached = [
            ("max_turns", len(self._turns) >= limits.max_turns),
            ("max_tokens", len(self._completion_ids) >= limits.max_tokens),
        ]
        for modality, most in limits.most_media.items():
            num_shown = len(self._shown[modality]) + len(files.get(modality, ()))
            reached.append((f"max_{MEDIA[modality]}", num_shown > most))
        return next((name for name, is_reached in reached if is_reached), None)

    def _fitting(self, messages: list[Message]) -> Fitting | None:
        """Return the messages as ids; None if the episode ended instead."""
        limits = self.setting.limits
        started = time.monotonic()
        late_key = ""
        fitting = None
        try:
            fitting = self.setting.bridge.fitting(
                self.name,
                messages,
                has_end=self._has_end,
                most=limits.max_observation_tokens,
                seconds=limits.step_seconds,
            )
        except TimeoutError:
            late_key = "step_seconds"
        self._bridge_seconds += time.monotonic() - started
        seconds = self._bridge_seconds + sum(turn.seconds for turn in self._turns)
        if seconds > limits.episode_seconds:
            late_key = late_key or "episode_seconds"
        if late_key:
            self.failed("timeout", _LATE.format(late_key, getattr(limits, late_key)))
            return None
        if fitting is None:
            self._end("max_observation_tokens")
        return fitting

    def _note(self, messages: list[Message]) -> None:
        """Record the environment's messages, cut to what a policy could read."""
        record = self._turns[-1]
        longest = longest_content(messages, self.setting.limits.max_observation_tokens)
        messages, num_cut = cut_to(messages, longest)
        record.observation = for_people(messages)
        if num_cut:
            record.info[CUT_INFO] = num_cut

    def _refusal(self, messages: list[Message], files: dict[str, list[bytes]]) -> str | None:
        """Return why the policy cannot be shown these messages; None if it can."""
        for role in dict.fromkeys(message["role"] for message in messages):
            if not self.setting.bridge.writes(role):
                return f"the policy's chat template cannot write a message of the role {role} here"
        for modality in files.keys() - self.setting.limits.most_media.keys():
            return _NOT_SHOWN.format(WORDS[modality], f"max_{MEDIA[modality]}")
        try:
            for modality, contents in files.items():
                for number, content in enumerate(contents, 1):
                    self.setting.check_file(modality, f"its {WORDS[modality]} {number}", content)
        except ConfigError as error:
            return f"{error.object} {error.message}"
        return None

    def _end(self, reason: str) -> None:
        self.end_reason = reason
        self.state = "finish"
