"""Pair the rows of two versions by rollout id, or by prompt and sample.

paired = pair(store, "arith/rewards@1", "arith/rewards@2")       # the same rollouts, scored twice
paired = pair(store, "arith/policy@0", "arith/policy@5")         # by their newest evaluations
paired.first.order(Selection(sort="change", descending=True))
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from quiver.schemas.errors import ConfigError, LineageError, printable
from quiver.schemas.refs import Ref, check_name, parse
from quiver.stages.core.lineage import pair_prompts, prompts_of
from quiver.stages.core.run.stage import is_made_alike
from quiver.stages.core.store import Store, Version, marks
from quiver.stages.core.store.listing import EXPIRED, REMOVED, is_of_sweep
from quiver.stages.evaluate.comparison import are_scored_alike, reward_of

from .joined import Joined, open_joined
from .words import no_run


@dataclass
class Paired:
    """Rollouts and their partners in a second version, if any.

    With b the second and a the first reward or score of a pair, `first.number("gain")` is b − a and
    `first.number("change")` is |b − a|. Evaluations of different scores, or by different rewards,
    have neither.
    """

    first: Joined
    second: Joined | None = None
    places: np.ndarray | None = None
    """[rollouts of first] int64: row of the partner in `second`; −1 if there is none."""
    measured_by: tuple[str, ...] = ()
    """What the score of each side is, in words that differ if the scores have no difference."""

    def partners(self, positions: Sequence[int] | np.ndarray) -> list[dict[str, Any]]:
        """Return the rows of `second` that belong to these of `first`; {} if there is no
        partner."""
        if self.second is None:
            return [{} for _ in positions]
        places = self.places[positions]
        rows = iter(self.second.rows(places[places >= 0]))
        return [next(rows) if place >= 0 else {} for place in places]

    def sides(
        self, row: dict[str, Any], partner: dict[str, Any]
    ) -> list[tuple[str, Joined, dict[str, Any]]]:
        """Return name, rollouts and row of each side; a side that stands alone has no name."""
        if self.second is None:
            return [("", self.first, row)]
        return [("A", self.first, row), ("B", self.second, partner)]

    @property
    def titles(self) -> list[str]:
        """The title of each side, after its name; with its score, if they have different ones."""
        titles = [f"{name} {joined.title}".strip() for name, joined, _ in self.sides({}, {})]
        if all(self.measured_by) and len({*self.measured_by}) > 1:
            pairs = zip(titles, self.measured_by, strict=True)
            return [f"{title} (by {printable(measured)})" for title, measured in pairs]
        return titles


def pair(store: Store, first: str, second: str | None, most_bytes: int | None = None) -> Paired:
    """Pair two versions by the ids of their rollouts, else by prompt and sample.

    Policies are represented by their evaluations, chosen as in `quiver compare`. Without a
    `second`, the first stands alone. `most_bytes` is passed to `open_joined`. Raises LineageError
    if nothing pairs.
    """
    if not second:
        return Paired(open_joined(store, first, most_bytes))
    refs = [store.resolve(ref) for ref in (first, second)]
    if all(ref.kind == "policy" for ref in refs):
        refs = [version.ref for version in find_evaluations(store, *map(str, refs))]
    a, b = (open_joined(store, ref, most_bytes) for ref in refs)
    columns = ("rollout_id", "group_id", "sample_index")
    tables = [pa.table({name: side.rollouts.column(name) for name in columns}) for side in (a, b)]
    matches, _ = match_rows(store, a.rollouts.version, b.rollouts.version, *tables, "rollout_id")
    if matches.null_count == len(matches):
        raise LineageError(
            f"{refs[0]} {refs[1]}",
            "no rollouts of the two have the same prompt and sample_index",
            next="name two versions on the same prompts",
        )
    places = matches.fill_null(-1).to_numpy().astype(np.int64)

    def gain() -> np.ndarray:
        after = np.append(b.number(b.score_name), np.nan)
        return after[places] - a.number(a.score_name)

    measured = (_measured_by(a), _measured_by(b))
    if all(measured) and measured[0] == measured[1]:
        evaluations = [
            side.shards["evaluations"].version for side in (a, b) if side.shards.get("evaluations")
        ]
        if len(evaluations) == 2 and not are_scored_alike(store, *evaluations):
            measured = tuple(reward_of(store, each) for each in evaluations)
        else:
            a.numbers |= {"gain": gain, "change": lambda: np.abs(gain())}
    return Paired(a, b, places, measured)


def _measured_by(joined: Joined) -> str:
    """Return what the rollouts' score is: `reward`, or the score of an evaluation; empty if they
    have none."""
    evaluations = joined.shards.get("evaluations")
    return _score_of(evaluations.version) if evaluations else joined.score_name


def _score_of(evaluation: Version) -> str:
    return evaluation.manifest.config.get("score", "reward")


def match_rows(
    store: Store, a: Version, b: Version, rows_a: pa.Table, rows_b: pa.Table, key: str
) -> tuple[pa.Array, str]:
    """Return the row of `b` that belongs to each row of `a`, null if there is none, and what paired
    them: the column `key`, or "prompt" for rollouts of which no id is in both."""
    keys_a, keys_b = (rows[key].combine_chunks() for rows in (rows_a, rows_b))
    matches = pc.index_in(keys_a, value_set=keys_b)
    has_groups = key == "rollout_id" and "group_id" in rows_a.column_names
    if has_groups and matches.null_count == len(matches):
        with suppress(LineageError):  # without their prompts, no two rows can be matched
            names_a, names_b = pair_prompts(store, a, b)
            samples_b = _samples(rows_b, names_b)
            return pc.index_in(_samples(rows_a, names_a), value_set=samples_b), "prompt"
    return matches, key


def _samples(rows: pa.Table, names: Mapping[str, str]) -> pa.Array:
    """Return each row's prompt name and sample index. Shape: [rows]."""
    groups = rows["group_id"].to_pylist()
    if "sample_index" in rows.column_names:
        indices = rows["sample_index"].to_pylist()
    else:  # rewards are in the order of their rollouts
        seen: Counter[str] = Counter()
        indices = []
        for group in groups:
            indices.append(seen[group])
            seen[group] += 1
    pairs = zip(groups, indices, strict=True)
    return pa.array([f"{names[group]} {index}" for group, index in pairs])


def find_evaluations(store: Store, first: str, second: str) -> tuple[Version, Version]:
    """Return the evaluations that two names refer to: each itself, a policy's, or a run's newest.

    A policy with several evaluations is compared by its newest one on the same prompts. Of several,
    one of the same score is taken first, then one whose rewards were made alike, then one whose
    answers were sampled like the other's, with the same seed. Raises LineageError if a name has no
    evaluation.
    """
    named = [list(_newest_first(store, name)) for name in (first, second)]
    best: tuple[Version, Version] | None = None
    most = (False,) * 4
    for pair in product(*named):
        is_paired = pair[0].ref != pair[1].ref and _are_alike(store, pair, "prompts")
        likeness = (
            is_paired,
            _score_of(pair[0]) == _score_of(pair[1]),
            # without the same prompts nothing is paired, and these are not looked at
            *(is_paired and _are_alike(store, pair, role) for role in ("rewards", "rollouts")),
        )
        if best is None or likeness > most:
            best, most = pair, likeness
        if all(most):
            break
    return best


def _are_alike(store: Store, pair: tuple[Version, Version], role: str) -> bool:
    """Return whether two evaluations have the same prompts, or rollouts or rewards made alike.
    False if these were deleted."""
    with suppress(LineageError):
        if role == "prompts":
            first, second = (prompts_of(store, version).manifest for version in pair)
            return first.content_hash == second.content_hash
        inputs = [version.manifest.require_input(role) for version in pair]
        return is_made_alike(*(store.open(each.ref).manifest for each in inputs))
    return False


def _newest_first(store: Store, name: str) -> Iterator[Version]:
    """Yield the evaluations that `name` refers to, at least one; those of sweeps last. Raises
    LineageError if there is none."""
    if "/" not in name:
        if store.numbers(check_name(name, "run"), "evaluations"):
            yield store.open(f"{name}/evaluations@latest")
            return
        runs = store.runs()
        if name not in runs:
            raise no_run(name, runs)
        raise _no_evaluation(store, f"run {name}", [name])
    ref = parse(name)
    if ref.kind == "evaluations":
        yield store.open(ref)
        return
    if ref.kind != "policy":
        raise ConfigError(
            str(ref),
            "expected a version of evaluations or policy, or a run",
            next=f"quiver ls {ref.run}",
        )
    policy = store.resolve(ref)
    evaluations = [
        version
        for version in store.versions(kind="evaluations")
        if (model := version.manifest.model("policy")) and model.ref == str(policy)
    ]
    if not evaluations:
        raise _no_evaluation(store, str(policy), store.runs(), str(policy))

    def place(evaluation: Version) -> tuple[bool, str]:
        return not is_of_sweep(evaluation.manifest.note), evaluation.manifest.created

    yield from sorted(evaluations, key=place, reverse=True)


def _no_evaluation(
    store: Store, name: str, runs: Iterable[str], policy: str | None = None
) -> LineageError:
    """Build the error for `name`, a policy or a run, without an evaluation in `runs`. It names the
    newest one whose data were deleted."""
    gone = []
    for run in runs:
        for number in store.listing(run, "evaluations").numbers:
            version = store.version(Ref(run, "evaluations", number))
            model = version.manifest.model("policy")
            if policy is None or (model and model.ref == policy):
                gone.append(version)
    problem = "has no evaluation yet"
    if gone:
        newest = max(gone, key=lambda version: version.manifest.created)
        if error := marks.gone_error(store.storage, newest.ref, (REMOVED, EXPIRED)):
            problem = f"has no evaluation any more: {newest.ref} {error.message}"
    of_policy = f" --policy {policy}" if policy else ""
    return LineageError(name, problem, next=f"quiver evaluate RECIPE{of_policy}")
