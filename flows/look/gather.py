"""Gather all that a report says about a run: its line of policies, their data, their evaluations.
Look here to change what the HTML report and Prefect's pages show.

The line ends at a given policy; default: the end of the run's own line (`ends_of`). It goes back to
the base model, and into other runs if the run is a fork. A version whose files expired keeps its
manifest, so it is shown. A version that is missing otherwise is left out. Both are listed.

    gathered = gather(store, "arith")
    gathered.iterations[-1].rewards.metrics["reward_mean"]
    gathered.evaluations[-1].metrics["score"]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from quiver.schemas.errors import CorruptError, LineageError, QuiverError, printable
from quiver.schemas.manifest import Manifest, line_of
from quiver.schemas.metrics import groups_with_contrast
from quiver.schemas.refs import KINDS, as_version
from quiver.stages.core.run.stage import is_made_alike
from quiver.stages.core.store import Store
from quiver.stages.core.store.listing import is_of_sweep
from quiver.stages.core.store.tags import Entry

from . import sweeps
from .episodes import FEW_BYTES, numbers_of
from .nights import NightRow, nights_of, read_about

STEP_COLUMNS = ("loss", "grad_norm", "approx_kl", "clip_fraction", "entropy", "learning_rate")
_UPDATES_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class Iteration:
    """One policy that optimize made, with the newest versions that it learned from."""

    versions: list[Manifest]
    """The existing versions in the order in which they were made (`Manifests.made_of`): prompts,
    rollouts and rewards of each round of sampling, logprobs, and last the policy."""
    steps: list[dict[str, Any]]
    """Rows of its updates: `step` and `STEP_COLUMNS`."""
    episodes: dict[str, Any] | None = None
    """Counts of its first rollouts' episodes, from `turns.statistics.measure`. None if they have no
    turns or are missing."""

    def of_kind(self, kind: str) -> list[Manifest]:
        """Return the versions of this kind, one per round."""
        return [manifest for manifest in self.versions if manifest.kind == kind]

    @property
    def policy(self) -> Manifest:
        """The policy."""
        return self.versions[-1]

    @property
    def rollouts(self) -> Manifest | None:
        """The first round's rollouts."""
        return next(iter(self.of_kind("rollouts")), None)

    @property
    def rewards(self) -> Manifest | None:
        """The first round's rewards."""
        return next(iter(self.of_kind("rewards")), None)

    @property
    def reward_mean(self) -> float | None:
        """Mean reward over the scored rollouts of all rounds."""
        total = 0.0
        num_scored = 0
        for rewards in self.of_kind("rewards"):
            scored = rewards.status.get("scored", 0)
            total += (rewards.metrics.get("reward_mean") or 0.0) * scored
            num_scored += scored
        return total / num_scored if num_scored else metric(self.rewards, "reward_mean")

    @property
    def contrast(self) -> tuple[int, int] | None:
        """(groups whose rewards differ, all groups), over all rounds. None if a count is
        missing."""
        groups = [metric(rewards, "groups") or {} for rewards in self.of_kind("rewards")]
        if not groups or not all("count" in counts for counts in groups):
            return None
        return sum(map(groups_with_contrast, groups)), sum(counts["count"] for counts in groups)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds by stage."""
        seconds: Counter[str] = Counter()
        for manifest in self.versions:
            seconds[manifest.stage] += manifest.seconds.get("total", 0.0)
        return seconds

    @property
    def length_share(self) -> float | None:
        """Share of the first round's completions that ended at the token limit."""
        if self.rollouts is None or not self.rollouts.rows:
            return None
        return self.rollouts.status.get("length", 0) / self.rollouts.rows

    @property
    def num_bytes(self) -> int:
        """Bytes of data in all versions."""
        return sum(manifest.bytes.get("data", 0) for manifest in self.versions)


@dataclass(frozen=True)
class Gathered:
    """Everything that a report shows about a run."""

    run: str
    base: Manifest
    iterations: list[Iteration]
    evaluations: list[Manifest]
    """Newest comparable evaluation of each policy on the line, by policy number, if possible one
    whose answers were sampled alike. If nights decide, of each policy of the run. Comparable to the
    newest policy's latest one, if possible one by the reward that the line was trained by."""
    measured_by: str
    """The reward behind `evaluations`, if the line was measured by others too; else empty."""
    nights: dict[str, list[NightRow]]
    """Decisions by tag, for each tag that nights decide about."""
    nightly: list[Manifest]
    """Evaluations of nights by policy number, if the held-out rows change from night to night.
    Empty if all nights use the same rows."""
    gone: list[str]
    """References that are named but no longer exist."""
    expired: list[str]
    """References of expired versions: only the manifest is left."""
    branches: list[str]
    """Policies of the run that end other lines than this one."""
    sweeps: list[sweeps.Shown]
    """The run's sweeps."""

    @property
    def scores(self) -> dict[int, dict[str, Any]]:
        """Metrics of each measured policy's evaluation, by policy number."""
        return {policy_number(evaluation): evaluation.metrics for evaluation in self.evaluations}


class Manifests:
    """The manifests of a store. References that cannot be opened are collected in `gone`,
    references of expired versions in `expired`.

    Args:
        passed_over: Errors that count as a missing version.
    """

    def __init__(self, store: Store, passed_over: type[QuiverError] = LineageError) -> None:
        self.store = store.with_expired()
        self.gone: set[str] = set()
        self.expired: set[str] = set()
        self._passed_over = passed_over

    def open(self, ref: str | None, kind: str | None = None) -> Manifest | None:
        """Return the manifest of `ref`. None if it is missing or not of `kind`. Default: any
        kind."""
        if ref is None:
            return None
        try:
            version = self.store.open(ref)
        except self._passed_over:
            self.gone.add(ref)
            return None
        if kind not in (None, version.ref.kind):
            self.gone.add(ref)
            return None
        if version.mark is not None:
            self.expired.add(ref)
        return version.manifest

    def input(self, manifest: Manifest | None, role: str) -> Manifest | None:
        """Return the first input of `manifest` that has this role."""
        entry = manifest.input(role) if manifest else None
        return self.open(entry.ref, role if role in KINDS else None) if entry else None

    def line(self, policy: Manifest) -> Iterator[Manifest]:
        """Yield `policy` and its ancestors, newest first, as far as they exist.

        Raises LineageError if they form a circle.
        """
        return line_of(policy, self.open)

    def made_of(self, policy: Manifest, learned_from: Collection[str] = ()) -> list[Manifest]:
        """Return the existing versions that `policy` was made of, in the order in which they were
        made, and itself last.

        Args:
            learned_from: References that an earlier policy learned from. Further rounds that are
                among them are replay, and are left out.
        """
        versions = []
        for entry in policy.inputs:
            kind, _, number = entry.role.partition(".")
            if kind == "policy" or (number and entry.ref in learned_from):
                continue
            manifest = self.open(entry.ref, kind if kind in KINDS else None)
            versions += [self.input(manifest, "prompts") if kind == "rollouts" else None, manifest]
        return [*filter(None, versions), policy]

    def iterations(self, policies: Sequence[Manifest]) -> Iterator[list[Manifest]]:
        """Yield `made_of` of each policy that optimize made, the oldest first. `policies`: a line,
        the newest first."""
        learned_from: set[str] = set()
        for policy in reversed(policies):
            if policy.stage == "optimize":
                yield self.made_of(policy, learned_from)
            learned_from.update(entry.ref for entry in policy.inputs)

    def steps(self, policy: Manifest) -> list[dict[str, Any]]:
        """Return the rows of the updates that made `policy`: `step` and `STEP_COLUMNS`."""
        updates = self.open(policy.metrics.get("updates"), "updates")
        if updates is None or updates.rows == 0:
            return []
        columns = ["step", *STEP_COLUMNS]
        with suppress(LineageError):  # they expired
            return self.store.open(updates.ref).head(columns, _UPDATES_BYTES).to_pylist()
        return []

    def episodes(self, rollouts: Manifest | None) -> dict[str, Any] | None:
        """Count the episodes of a rollouts version, from its first shards."""
        if rollouts is not None:
            with suppress(LineageError):  # they expired
                return numbers_of(self.store.open(rollouts.ref), FEW_BYTES)
        return None

    def comparable(self, evaluation: Manifest, candidates: Iterable[Manifest]) -> list[Manifest]:
        """Return the `candidates` that measured the same prompts as `evaluation`, scored in the
        same way."""
        prompts = self.prompts_hash(evaluation)
        rewards = self.input(evaluation, "rewards")
        alike = []
        for candidate in candidates if prompts and rewards else ():
            if self.prompts_hash(candidate) != prompts or not is_made_alike(candidate, evaluation):
                continue
            its_rewards = self.input(candidate, "rewards")
            if its_rewards and is_made_alike(its_rewards, rewards):
                alike.append(candidate)
        return alike

    def leading(self, measured: Sequence[Manifest], trained_by: Manifest | None) -> Manifest:
        """Return the evaluation that the others are compared to: of the newest policy the latest
        one by the reward `trained_by`, else the latest. `measured`: sorted by policy."""
        number = policy_number(measured[-1])
        for each in reversed(measured) if trained_by else ():
            if policy_number(each) == number and self._is_by(each, trained_by):
                return each
        return measured[-1]

    def measured_by(self, evaluation: Manifest, measured: Iterable[Manifest]) -> str:
        """Name the reward of `evaluation` if one of `measured` is by another; else return ""."""
        rewards = self.input(evaluation, "rewards")
        if rewards is None or all(self._is_by(each, rewards) for each in measured):
            return ""
        return ", ".join(map(printable, rewards.metrics.get("functions", ()))) or rewards.ref

    def _is_by(self, evaluation: Manifest, rewards: Manifest) -> bool:
        its_rewards = self.input(evaluation, "rewards")
        return its_rewards is not None and is_made_alike(its_rewards, rewards)

    def are_sampled_alike(self, first: Manifest, second: Manifest) -> bool:
        """True if the rollouts of two evaluations are there and differ in their policy alone."""
        rollouts = [self.input(evaluation, "rollouts") for evaluation in (first, second)]
        return None not in rollouts and is_made_alike(*rollouts)

    def prompts_hash(self, evaluation: Manifest) -> str | None:
        """Return the hash of the prompts that were answered; None if the rollouts are gone."""
        rollouts = self.input(evaluation, "rollouts")
        prompts = rollouts.input("prompts") if rollouts else None
        return prompts.content_hash if prompts else None


def ends_of(store: Store, run: str) -> list[str]:
    """Return the policies of a run that no other policy of the run was trained from.

    The end of the run's own line comes first. This is the longest line; of two equally long lines
    it is the older, since policies trained by hand come later. If nights decide, the newest policy
    is first. What a sweep trained is a sibling of the run's iterations: it ends no line of them,
    and comes last. Raises CorruptError, or LineageError if the run has no policy.
    """
    visible = set(map(str, store.refs(run, "policy")))
    lengths: dict[str, int] = {}
    swept: set[str] = set()
    for version, summary in store.with_expired().summaries(run, "policy"):  # parents first
        if summary.error:
            raise CorruptError(str(version), summary.error)
        ref = str(version)
        parent = summary.trained_from
        continues = parent in lengths
        if is_of_sweep(summary.note):
            swept.add(ref)
            # a cell ends no line of the run's own, but may end that of a run with a base alone
            continues = continues and (parent in swept or lengths[parent] == 0)
        if continues and ref in visible:
            visible.discard(parent)
        lengths[ref] = lengths.get(parent, 0) + 1 if parent else 0
    ends = [ref for ref in lengths if ref in visible]
    if not ends:
        raise LineageError(f"run {run}", "has no policy yet", next="quiver ls")
    if histories(store, run):
        ends.reverse()
    else:
        ends.sort(key=lambda ref: -lengths[ref])
    return sorted(ends, key=lambda ref: ref in swept)


def histories(store: Store, run: str) -> dict[str, list[Entry]]:
    """Return the histories of the run's tags that nights decide about, by tag."""
    return {
        name: entries
        for name, entries in read_tags(store, run, store.history).items()
        if any(read_about(entry).night for entry in entries)
    }


def read_tags(store: Store, run: str, read: Callable[[str, str], Any]) -> dict[str, Any]:
    """Return `read(run, name)` of each tag of a run, by its name. Damaged or unreadable tags are
    skipped; `verify` reports them."""
    tags: dict[str, Any] = {}
    with suppress(CorruptError, PermissionError):
        for name in store.tag_names(run):
            with suppress(CorruptError, PermissionError):
                tags[name] = read(run, name)
    return tags


def gather(store: Store, run: str, end: str | None = None) -> Gathered:
    """Read everything about the line that ends at the policy `end`.

    Args:
        end: Default: the end of the run's own line (`ends_of`).

    Raises LineageError if the run has no policy.
    """
    ends = ends_of(store, run)
    end = end or ends[0]
    manifests = Manifests(store)
    policies = list(manifests.line(manifests.store.open(end).manifest))
    line = {manifest.ref for manifest in policies}
    iterations = []
    for versions in manifests.iterations(policies):
        iteration = Iteration(versions, manifests.steps(versions[-1]))
        episodes = manifests.episodes(iteration.rollouts)
        iterations.append(replace(iteration, episodes=episodes))
    histories_of_tags = histories(store, run)
    measured = []
    for version in manifests.store.versions(run, "evaluations"):
        model = version.manifest.model("policy")
        # nights also measure policies that they reject, which are not on the line
        if model and (histories_of_tags or model.ref in line):
            measured.append(version.manifest)
    measured.sort(key=lambda evaluation: (policy_number(evaluation), evaluation.version))
    shown = []
    if measured:
        trained_by = iterations[-1].rewards if iterations else None
        first = manifests.leading(measured, trained_by)
        shown = [*manifests.comparable(first, [e for e in measured if e is not first]), first]
        # answers to the same seeds are better compared than newer ones
        shown.sort(key=lambda evaluation: manifests.are_sampled_alike(evaluation, first))
    newest = {evaluation.require_model("policy").ref: evaluation for evaluation in shown}
    return Gathered(
        run,
        policies[-1],
        iterations,
        evaluations=sorted(newest.values(), key=policy_number),
        measured_by=manifests.measured_by(shown[-1], measured) if shown else "",
        nights={tag: nights_of(entries) for tag, entries in histories_of_tags.items()},
        nightly=evaluations_of_nights(manifests, chain.from_iterable(histories_of_tags.values())),
        gone=sorted(manifests.gone),
        expired=sorted(manifests.expired),
        branches=[ref for ref in ends if ref not in line],
        sweeps=sweeps.sweeps_of(store, run),
    )


def evaluations_of_nights(manifests: Manifests, entries: Iterable[Entry]) -> list[Manifest]:
    """Return the evaluations that nights decided on, by policy number, if their held-out rows
    differ. Return none if all nights use the same rows: the ordinary curve shows them."""
    notes = [about for about in map(read_about, entries) if about.night and about.evaluation]
    evaluations = [manifests.open(about.evaluation, "evaluations") for about in notes]
    by_policy = {policy_number(each): each for each in evaluations if each and each.model("policy")}
    if len(set(map(manifests.prompts_hash, by_policy.values()))) < 2:
        return []
    return [by_policy[number] for number in sorted(by_policy)]


def policy_number(evaluation: Manifest) -> int:
    """Return the version of the policy that was measured. Raises LineageError if the reference has
    no number."""
    ref = evaluation.require_model("policy").ref
    if policy := as_version(ref):
        return policy.version
    problem = f"measured {printable(ref)}, which is not a reference with a version number"
    raise LineageError(evaluation.ref, problem, next=f"quiver lineage {evaluation.ref}")


def metric(manifest: Manifest | None, *names: str) -> Any:
    """Return the entry at this path of a version's metrics; None if it is missing."""
    metrics: Any = manifest.metrics if manifest else None
    for name in names:
        metrics = metrics.get(name) if isinstance(metrics, dict) else None
    return metrics
