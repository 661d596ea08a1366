"""What a report tells of a run, read from its versions: the line of policies, what each learned
from, and how they were measured.

The line ends at the run's latest policy and goes back to the base model, into other runs where the
run is a fork. Versions that are gone are left out, and counted.

    found = gather(store, "arith")
    found.iterations[-1].rewards.metrics["reward_mean"], found.evaluations[-1].metrics["score"]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from quiver.schemas.errors import LineageError
from quiver.schemas.manifest import Manifest
from quiver.stages.common.store import Store
from quiver.stages.common.work import is_made_alike

STEP_COLUMNS = ("loss", "grad_norm", "approx_kl", "clip_fraction", "entropy", "learning_rate")
_UPDATES_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class Iteration:
    """One policy that optimize made, and the newest of what it learned from."""

    number: int
    policy: Manifest
    prompts: Manifest | None
    rollouts: Manifest | None
    rewards: Manifest | None
    steps: list[dict[str, Any]]
    """The rows of its updates: `step` and `STEP_COLUMNS`."""

    def made(self) -> Iterator[tuple[str, Manifest]]:
        """Stage and version, in the order in which they were made."""
        for manifest in (self.prompts, self.rollouts, self.rewards, self.policy):
            if manifest is not None:
                yield manifest.stage, manifest


@dataclass(frozen=True)
class Gathered:
    """All that a report tells."""

    run: str
    base: Manifest
    iterations: list[Iteration]
    evaluations: list[Manifest]
    """Those of the run that measured what its latest one did, by number of the policy."""
    gone: list[str] = field(default_factory=list)
    """References that are named and no longer there."""


def latest(store: Store, run: str) -> str:
    """The newest policy and evaluation of a run: what a report over it must know. LineageError: it
    has no policy."""
    if not store.numbers(run, "policy"):
        raise LineageError(f"run {run}", "has no policy to tell of", next="quiver ls")
    kinds = ("policy", "evaluations")
    return " ".join(
        f"{run}/{kind}@{numbers[-1]}" for kind in kinds if (numbers := store.numbers(run, kind))
    )


def gather(store: Store, run: str) -> Gathered:
    """Read it all. LineageError: the run has no policy."""
    latest(store, run)
    gone: list[str] = []

    def opened(ref: str | None) -> Manifest | None:
        try:
            return store.open(ref).manifest if ref else None
        except LineageError:
            gone.append(ref)
            return None

    def of(manifest: Manifest | None, role: str) -> Manifest | None:
        """What has this role among the inputs; of several, the first."""
        entries = manifest.inputs if manifest else ()
        return opened(
            next((entry.ref for entry in entries if entry.role.partition(".")[0] == role), None)
        )

    policy, iterations = store.open(f"{run}/policy@latest").manifest, []
    while policy.stage == "optimize":
        rollouts = of(policy, "rollouts")
        steps = _steps(store, opened(policy.metrics.get("updates")))
        iterations.append(
            Iteration(
                policy.version,
                policy,
                of(rollouts, "prompts"),
                rollouts,
                of(policy, "rewards"),
                steps,
            )
        )
        before = of(policy, "policy")
        if before is None:
            break
        policy = before
    return Gathered(run, policy, iterations[::-1], _evaluations(store, run, of), sorted(set(gone)))


def _steps(store: Store, updates: Manifest | None) -> list[dict[str, Any]]:
    if updates is None or updates.rows == 0:
        return []
    return store.open(updates.ref).head(["step", *STEP_COLUMNS], _UPDATES_BYTES).to_pylist()


def _evaluations(
    store: Store, run: str, of: Callable[[Manifest | None, str], Manifest | None]
) -> list[Manifest]:
    """Those that measured what the latest one did, on the same prompts, scored in the same way; of
    one policy the newest."""
    found = [
        manifest
        for ref in store.refs(run, "evaluations")
        if (manifest := store.open(ref).manifest).model("policy")
    ]

    if not found:
        return []

    def measured(manifest: Manifest) -> tuple[str | None, Manifest | None]:
        """Hash of the prompts, and what scored the answers."""
        sampled = of(manifest, "rollouts")
        asked = sampled.input("prompts") if sampled else None
        return asked.content_hash if asked else None, of(manifest, "rewards")

    *earlier, last = found
    prompts, scored = measured(last)
    same = {}
    for manifest in earlier if prompts and scored else []:
        other_prompts, other_scored = measured(manifest)
        alike = other_scored is not None and is_made_alike(other_scored, scored)
        if other_prompts == prompts and manifest.config == last.config and alike:
            same[manifest.model("policy").ref] = manifest
    same[last.model("policy").ref] = last
    return sorted(same.values(), key=policy_number)


def policy_number(evaluation: Manifest) -> int:
    """The version of the policy that was measured."""
    return int(evaluation.model("policy").ref.rpartition("@")[2])
