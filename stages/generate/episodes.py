"""Requests of episodes: each row's turns in order, with the environment's answers between them.

A turn that can be sampled now goes before a row that has not begun, so a running episode is not
delayed. An engine that decodes many rows at once (`ahead`) gets new rows only while it has empty
slots. The environment's time costs the engine nothing as long as other episodes have turns to
sample.

`opening.request_maker` creates these requests.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from quiver.stages.generate.engine import Completion, Request
from quiver.stages.generate.requests import Requests
from quiver.stages.turns.environment import Message, Step, without_files
from quiver.stages.turns.episode import Episode, Setting
from quiver.stages.turns.pool import EnvironmentPool, Reply
from quiver.stages.turns.saved import Beginning, Played

_SECONDS_TO_WAIT = 2.0
"""Maximum wait for an environment's answer, before the stage does other work."""
_ANOTHER_BEGINNING = (
    "it begins differently than when its prompt was rendered, so it depends on more than seed and "
    "row"
)
_OPEN_FOR_EACH_PLACE = 4
"""Maximum open episodes for each row that the engine decodes at once."""


@dataclass
class _Running:
    """An episode that has begun."""

    row: int
    episode: Episode
    key: int
    """Key of its environment in the pool."""
    past: deque[Played]
    """Turns to replay before the prompt's state is reached."""
    playing: Played | None = None
    """The turn being replayed; None while the environment begins."""
    is_open: bool = False
    """True if the environment has reached that state."""
    failure: Reply | None = None
    """Failure of an environment that could not begin, kept until the first turn is sampled."""
    max_tokens: int = 0
    """Maximum ids of the turn being sampled."""


@dataclass(kw_only=True)
class Episodes(Requests):
    """Iterator of requests for rows that are episodes."""

    setting: Setting
    pool: EnvironmentPool
    beginnings: list[Beginning]
    """Beginning of each prompt's episodes."""
    chats: list[list[Message]]
    """Messages of each prompt."""
    _new_rows: deque[int] = field(default_factory=deque)
    """Rows that were taken and have not begun."""
    _ready: deque[_Running] = field(default_factory=deque)
    """Episodes whose next turn can be sampled."""
    _running: dict[int, _Running] = field(default_factory=dict)
    """Begun episodes, by row."""
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
        """Take the next shard; return False if there was none."""
        indices = self.take_shard()
        if indices is None:
            return False
        self._asked.update(indices)
        self._new_rows.extend(indices)
        return True

    def is_done(self) -> bool:
        """True if all episodes of the rows that were taken have ended."""
        return not self._running and not self._new_rows

    def settle(self) -> None:
        """Wait for an environment, when the engine has no more answers for now.

        Raises SchemaError if a turn has no answer.
        """
        super().settle()
        if self._running and not self._ready and not self._new_rows:
            self._hear(wait=_SECONDS_TO_WAIT)

    def table(self, start: int, finished: list[Any]) -> pa.Table:
        """Return the ended episodes from row `start` on, ordered by row. [rows]"""
        return self.rows.table_of_episodes(start, finished)

    # -- the engine's side

    def _begin(self, row: int) -> Request:
        """Return the request for the first turn of a row; its environment begins at the same
        time."""
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
        media = (*self.rows.media(running.row), *shown)
        return Request(running.row, ids, seed, turn, running.max_tokens, media)

    def answer(self, completion: Completion) -> None:
        """Accept a sampled turn. Raises SchemaError or NumericError: see `check`."""
        running = self._running.get(completion.index)
        self.check(completion, running.max_tokens if running else 0)
        episode = running.episode
        episode.sampled(*completion[1:])
        if running.failure is not None and episode.state != "ended":
            self._fail(running, running.failure)
        self._go_on(running)

    # -- the environment's side

    def _hear(self, wait: float) -> None:
        """Handle the environments' answers; wait up to `wait` seconds if there is none yet."""
        for reply in self.pool.replies(wait):
            running = self._of_key.get(reply.key)
            if running is None:  # the engine gave up this episode
                self.pool.forget(reply.key)
            elif running.is_open:
                self._hear_of_turn(running, reply)
            else:
                self._hear_of_past(running, reply)

    def _hear_of_past(self, running: _Running, reply: Reply) -> None:
        """Handle the reply of an environment that began, or answered a replayed turn."""
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
        """Return True if the environment repeats what it said when the prompt was rendered or
        sampled."""
        if running.playing is not None:
            return running.playing.is_answered_by(step)
        prompt = running.row // self.rows.config.samples_per_prompt
        opening = self.beginnings[prompt].opening
        return opening is None or opening == without_files(step.observation())

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
        """Do the next step of the episode."""
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
            pass  # it continues when its environment has begun
        elif episode.state == "act":
            self.pool.step(running.key, episode.turn)
        else:
            self.pool.finish(running.key)
