"""Requests of episodes: each row's turns one after another, with its environment's answers between
them.

A turn that can be sampled now goes before a row that has not begun, so an episode that is under way
is not held up; an engine that decodes many rows at once (`ahead`) is given new rows only while it
has empty places. What an environment takes costs the engine nothing as long as other episodes have
turns to sample.

See `opening.opened` for how they come to be.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from quiver.stages.common.environments.environment import Message, Step, without_pictures
from quiver.stages.common.environments.pool import EnvironmentPool, Reply
from quiver.stages.generate.engine import Completion, Request
from quiver.stages.generate.requests import Requests

from .episode import Episode, Setting
from .saved import Beginning, Played

_SECONDS_TO_WAIT = 2.0
"""For an environment's answer, before the stage looks after other things."""
_ANOTHER_BEGINNING = (
    "it begins otherwise than when its prompt was rendered, so it does not depend on seed and row "
    "alone"
)
_OPEN_FOR_EACH_PLACE = 4
"""Episodes that are begun for each row that the engine decodes at once, at most."""


@dataclass
class _Running:
    """An episode that has begun."""

    row: int
    episode: Episode
    key: int
    """Of its environment in the pool."""
    past: deque[Played]
    """What is still to be played before the prompt's place is reached."""
    playing: Played | None = None
    """What of it is being answered; None: the environment is to begin."""
    is_open: bool = False
    """Whether the environment is at that place."""
    failure: Reply | None = None
    """Of an environment that could not begin, until the first turn has been sampled."""
    max_tokens: int = 0
    """Most ids of the turn that is being sampled."""


@dataclass(kw_only=True)
class Episodes(Requests):
    """What the engine draws where rows are episodes."""

    setting: Setting
    pool: EnvironmentPool
    beginnings: list[Beginning]
    """Of each prompt."""
    chats: list[list[Message]]
    """Of each prompt its messages."""
    _new_rows: deque[int] = field(default_factory=deque)
    """Taken, and not begun."""
    _ready: deque[_Running] = field(default_factory=deque)
    """Those whose next turn can be sampled."""
    _running: dict[int, _Running] = field(default_factory=dict)
    """By row."""
    _of_key: dict[int, _Running] = field(default_factory=dict)

    def __next__(self) -> Request:
        self._hear(wait=0.0)
        if self._ready:
            return self._request(self._ready.popleft())
        has_place = self.ahead == 1 or len(self._unanswered) < self.ahead
        if has_place and not self._new_rows:
            most = _OPEN_FOR_EACH_PLACE * self.ahead if self.ahead > 1 else 1
            if len(self._running) < most:
                self.open_shard()
        if has_place and self._new_rows:
            return self._begin(self._new_rows.popleft())
        raise StopIteration

    def open_shard(self) -> bool:
        """Take the next shard; whether there was one."""
        indices = self.take_shard()
        if indices is None:
            return False
        self._asked.update(indices)
        self._new_rows.extend(indices)
        return True

    def is_done(self) -> bool:
        """Whether all episodes of the rows that were taken have ended."""
        return not self._running and not self._new_rows

    def settle(self) -> None:
        """The engine has no more to say for now: wait for an environment. SchemaError where a turn
        has no answer."""
        super().settle()
        if self._running and not self._ready and not self._new_rows:
            self._hear(wait=_SECONDS_TO_WAIT)

    def table(self, start: int, finished: list[Any]) -> pa.Table:
        """The ended episodes from row `start` on, in the order of their rows. [rows]"""
        return self.rows.table_of_episodes(start, finished)

    # -- the engine's side

    def _begin(self, row: int) -> Request:
        """The first turn of a row; its environment begins meanwhile."""
        prompt = row // self.rows.config.samples_per_prompt
        beginning = self.beginnings[prompt]
        key = self.pool.open(beginning.row, beginning.seed)
        (first,) = self.rows.requests([row])
        name = self.rows.rollout_id(row)
        episode = Episode(self.setting, name, first.prompt_ids.tolist(), self.chats[prompt])
        running = _Running(row, episode, key, deque(beginning.turns))
        self._running[row] = running
        self._of_key[key] = running
        return self._request(running)

    def _request(self, running: _Running) -> Request:
        turn, prompt_ids, running.max_tokens, shown = running.episode.request()
        self._unanswered.add(running.row)
        seed = self.rows.seed(running.row, turn)
        ids = np.array(prompt_ids, np.int32)
        pictures = (*self.rows.pictures(running.row), *shown)
        return Request(running.row, ids, seed, turn, running.max_tokens, pictures)

    def answer(self, completion: Completion) -> None:
        """Take a sampled turn in. SchemaError or NumericError: see `check`."""
        running = self._running.get(completion.index)
        self.check(completion, running.max_tokens if running else 0)
        episode = running.episode
        episode.sampled(*completion[1:])
        if running.failure is not None and episode.state != "ended":
            self._fail(running, running.failure)
        self._go_on(running)

    # -- the environment's side

    def _hear(self, wait: float) -> None:
        """Take in what environments have answered; `wait` seconds for the first, where there is
        none yet."""
        for reply in self.pool.replies(wait):
            running = self._of_key.get(reply.key)
            if running is None:  # of an episode that the engine gave up
                self.pool.forget(reply.key)
            elif running.is_open:
                self._hear_of_turn(running, reply)
            else:
                self._hear_of_past(running, reply)

    def _hear_of_past(self, running: _Running, reply: Reply) -> None:
        """It has begun, or has answered a turn before the first one that is sampled."""
        if reply.failure is None and not self._is_as_before(running, reply.step):
            reply = reply._replace(failure="environment_error", why=_ANOTHER_BEGINNING)
        if running.past and reply.failure is None:
            running.playing = running.past.popleft()
            self.pool.step(running.key, running.playing.turn)
            return
        running.is_open = True
        if running.episode.state == "sample":
            running.failure = reply if reply.failure is not None else None
            return
        if reply.failure is not None:
            self._fail(running, reply)
        self._go_on(running)

    def _is_as_before(self, running: _Running, step: Step) -> bool:
        """Whether the environment says what it said when the prompt was rendered, or sampled."""
        if running.playing is not None:
            return running.playing.is_answered_by(step)
        prompt = running.row // self.rows.config.samples_per_prompt
        opening = self.beginnings[prompt].opening
        return opening is None or opening == without_pictures(step.observation())

    def _hear_of_turn(self, running: _Running, reply: Reply) -> None:
        episode = running.episode
        if reply.failure is not None:
            self._fail(running, reply)
        elif episode.state == "act":
            episode.observed(reply.step, reply.seconds)
        else:
            episode.rewarded(reply.step.reward, reply.seconds)
            self.pool.forget(running.key)
        self._go_on(running)

    def _fail(self, running: _Running, reply: Reply) -> None:
        running.episode.failed(reply.failure, reply.why, reply.seconds)

    def _go_on(self, running: _Running) -> None:
        """Whatever the episode needs next."""
        episode = running.episode
        if episode.state == "sample":
            self._ready.append(running)
        elif episode.state == "ended":
            del self._running[running.row]
            del self._of_key[running.key]
            if self.pool.holds(running.key):
                self.pool.finish(running.key)
            self._finished.append((running.row, episode.record()))
        elif not running.is_open:
            pass  # it goes on when its environment has begun
        elif episode.state == "act":
            self.pool.step(running.key, episode.turn)
        else:
            self.pool.finish(running.key)
