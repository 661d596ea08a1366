"""Replay saved episodes against their environment, to test that it answers as before.

It should depend on seed, row and turns only.

    report = reenact(store, "guess/rollouts@1")
    report.episodes_agree, report.episodes
    report.differences[0].what

Nothing is sampled or written. The replay compares the opening messages, if the prompt has them. For
each turn it compares the observation's text, the reward, and if the episode ended there. The first
difference ends an episode, because later ones may follow from it. Episodes that failed when they
were sampled are left out.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from quiver.schemas.errors import LineageError, printable
from quiver.stages.core.config import parse
from quiver.stages.core.lineage import open_input, prompt_rows
from quiver.stages.core.store import Store, Version
from quiver.stages.turns.config import Turns
from quiver.stages.turns.environment import Message, Turn, for_people, without_files
from quiver.stages.turns.pool import EnvironmentPool, Reply
from quiver.stages.turns.saved import (
    Beginning,
    as_float32,
    beginning_of,
    cut_of,
    refuse_foreign_code,
    require_episodes,
    text_before_calls,
    text_of,
    turns_answered,
)
from quiver.stages.turns.statistics import FAILURES

MOST_OPEN = 64
"""Maximum environments that run at the same time."""
_MOST_TEXT = 2000
"""Maximum characters of a text in a report."""
What = Literal["opening", "observation", "reward", "end", "failure"]


class Difference(NamedTuple):
    """The first point at which an episode went differently."""

    rollout_id: str
    turn: int | None
    """Turn, from 0; None if the difference is before the first turn."""
    what: What
    recorded: Any
    came: Any


@dataclass
class Report:
    """The result of replaying one version."""

    ref: str
    sources: tuple[str, ...]
    """Names of the environment or tools that were played against."""
    is_changed: bool
    """True if their code has changed since the rollouts were sampled."""
    episodes: int = 0
    episodes_agree: int = 0
    turns: int = 0
    """Turns of these episodes."""
    turns_agree: int = 0
    """Turns before the first difference of each episode."""
    failed: int = 0
    """Episodes that failed when they were sampled, and are not replayed."""
    differences: list[Difference] = field(default_factory=list)
    """The first difference of each episode, in the order of the version."""


class _Saved(NamedTuple):
    """An episode as it was saved."""

    rollout_id: str
    beginning: Beginning
    chat: list[Message] | None
    """The messages of its prompt."""
    turns: list[dict[str, Any]]
    answered: list[Turn | None]
    end_reason: str

    def differs(self, turn: int | None, what: What, recorded: Any, came: Any) -> Difference:
        """Return a difference at that turn, with texts cut to be shown."""
        return Difference(self.rollout_id, turn, what, _cut(recorded), _cut(came))

    def failed(self, turn: int | None, reply: Reply) -> Difference:
        """Return the difference of an environment that did not answer there."""
        recorded = "it began" if turn is None else self.turns[turn]["observation"]
        return self.differs(turn, "failure", recorded, f"{reply.failure}: {reply.why}")


class _Outcome(NamedTuple):
    num_agree: int
    """Turns before the first difference."""
    difference: Difference | None


Game = Generator[Turn | None, Reply, _Outcome]
"""Yields the turn that the environment must answer (None to ask for its final reward), and is sent
the reply."""


def reenact(
    store: Store,
    ref: str,
    *,
    rows: int | None = None,
    environment: str | None = None,
    tools: Sequence[str] = (),
    processes: int | None = None,
) -> Report:
    """Replay the episodes of `ref`.

    Args:
        store: Store of the rollouts and their prompts.
        ref: A rollouts version with episodes.
        rows: Replay only the first `rows` that did not fail. Default: all.
        environment: Environment to use instead of the manifest's.
        tools: Tools to use instead of the manifest's.
        processes: Processes for the environments. Default: one per core.

    Raises ConfigError, LineageError or SecurityError.
    """
    rollouts = store.open(ref)
    require_episodes(rollouts)
    prompts = open_input(store, rollouts, "prompts")
    config = _turns_config(store, rollouts, environment, tools)
    playing = config.model_copy(update={"fingerprint": "", "processes": processes})
    with EnvironmentPool(playing) as pool:
        is_changed = config.fingerprint not in ("", pool.loaded.fingerprint)
        report = Report(str(rollouts.ref), config.sources, is_changed)
        outcomes = _play_all(pool, _saved_episodes(store, rollouts, prompts, report, rows))
    report.differences = [outcome.difference for outcome in outcomes if outcome.difference]
    report.episodes_agree = report.episodes - len(report.differences)
    report.turns_agree = sum(outcome.num_agree for outcome in outcomes)
    return report


def _turns_config(
    store: Store, rollouts: Version, environment: str | None, tools: Sequence[str]
) -> Turns:
    """Return the config of the environment to play against.

    Raises SecurityError if the code is named by another user's store.
    """
    name = str(rollouts.ref)
    section = rollouts.manifest.config_section("turns")
    named_here: dict[str, Any] = {}
    if environment or tools:
        named_here = {"environment": environment or "", "tools": list(tools)}
        if tools:
            named_here["arguments"] = {}
        known = {key: entry for key, entry in section.items() if key in Turns.model_fields}
        return parse(Turns, {**known, **named_here}, "generate.turns")
    if not section.get("environment") and not section.get("tools"):
        raise LineageError(
            name,
            "its manifest names no environment and no tools",
            next=f"quiver reenact {name} --environment my_env.py:Guess",
        )
    refuse_foreign_code(store, rollouts)
    return parse(Turns, section, f"{name} config.turns")


def _saved_episodes(
    store: Store, rollouts: Version, prompts: Version, report: Report, rows: int | None
) -> Iterator[_Saved]:
    """Yield up to `rows` episodes that did not fail, and count them in the report.

    Raises LineageError if a prompt is missing, and SchemaError if calls cannot be read.
    """
    asked = prompts.table(["group_id", "messages", "columns"])
    before_calls = text_before_calls(store, rollouts)
    columns = ["rollout_id", "group_id", "turns", "end_reason"]
    table = rollouts.table(columns)
    places = prompt_rows(table, asked).to_pylist()
    for number, place in enumerate(places):
        (row,) = table.slice(number, 1).to_pylist()
        rollout_id, group, turns, end_reason = (row[name] for name in columns)
        if report.episodes == rows:
            return
        if end_reason in FAILURES:
            report.failed += 1
            continue
        report.episodes += 1
        report.turns += len(turns)
        (prompt,) = asked.slice(place, 1).to_pylist()
        answered = turns_answered(rollout_id, turns, end_reason, before_calls)
        yield _Saved(
            rollout_id,
            beginning_of(group, prompt["columns"]),
            prompt["messages"],
            turns,
            answered,
            end_reason,
        )


def _play_all(pool: EnvironmentPool, episodes: Iterator[_Saved]) -> list[_Outcome]:
    """Return the outcomes of the episodes, in order; plays up to `MOST_OPEN` at a time."""
    outcomes: dict[int, _Outcome] = {}
    """By the key of the environment; later episodes have higher keys."""
    games: dict[int, Game] = {}
    finishing: set[int] = set()
    """Keys of environments that were asked for their final reward."""
    while True:
        while len(games) < MOST_OPEN and (episode := next(episodes, None)):
            key = pool.open(episode.beginning.row, episode.beginning.seed)
            games[key] = _play(episode)
            next(games[key])
        if not games:
            return [outcomes[key] for key in sorted(outcomes)]
        for reply in pool.replies(wait=None):
            turn = None
            if reply.key not in outcomes:
                try:
                    turn = games[reply.key].send(reply)
                except StopIteration as end:
                    outcomes[reply.key] = end.value
            if turn is not None:
                pool.step(reply.key, turn)
            elif reply.failure is None and reply.key not in finishing:
                finishing.add(reply.key)  # after a difference too, so that it is closed
                pool.finish(reply.key)
            else:
                del games[reply.key]
                pool.forget(reply.key)


def _play(episode: _Saved) -> Game:
    """Play one episode, to its end or its first difference."""
    num_agree = 0
    difference = yield from _begin(episode)
    while difference is None and num_agree < len(episode.turns):
        difference = yield from _take_turn(episode, num_agree)
        num_agree += difference is None
    return _Outcome(num_agree, difference)


def _begin(episode: _Saved) -> Generator[Turn | None, Reply, Difference | None]:
    """Check the opening, and the turns replayed before the first sampled one."""
    reply = yield None  # the first message sent is the reply to `open`
    if reply.failure is not None:
        return episode.failed(None, reply)
    recorded, came = episode.beginning.opening, without_files(reply.step.observation())
    if recorded is not None and recorded != came:
        return episode.differs(None, "opening", for_people(recorded), for_people(came))
    for played in episode.beginning.turns:
        reply = yield played.turn
        if reply.failure is not None:
            return episode.failed(None, reply)
        if not played.is_answered_by(reply.step):
            text = text_of(reply.step, played.cut)
            return episode.differs(None, "observation", played.observation, text)
    return None


def _take_turn(episode: _Saved, number: int) -> Generator[Turn | None, Reply, Difference | None]:
    """Play turn `number`. After the last turn also ask for the final reward, which is part of its
    reward."""
    recorded = episode.turns[number]
    turn = episode.answered[number]
    is_last = number == len(episode.turns) - 1
    earned = None
    if turn is not None:
        reply = yield turn
        if reply.failure is not None:
            return episode.failed(number, reply)
        text = text_of(reply.step, cut_of(recorded))
        if text != recorded["observation"]:
            return episode.differs(number, "observation", recorded["observation"], text)
        had_ended = is_last and episode.end_reason == "environment"
        if reply.step.done != had_ended:
            words = ("it went on", "it ended")
            return episode.differs(number, "end", words[had_ended], words[reply.step.done])
        earned = reply.step.reward
    if is_last:
        reply = yield None
        if reply.failure is not None:
            return episode.failed(number, reply)
        if reply.step.reward is not None:
            earned = reply.step.reward + (earned or 0.0)
    if as_float32(earned) != as_float32(recorded["reward"]):
        return episode.differs(number, "reward", recorded["reward"], earned)
    return None


def _cut(shown: Any) -> Any:
    return printable(shown, _MOST_TEXT) if isinstance(shown, str) else shown
