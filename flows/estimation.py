"""Estimate policies from saved held-out rollouts, without sampling: `quiver estimate`.

    with by_hand(recipe):
        estimate(recipe, ["toy/policy@4", "toy/policy@5"], ["toy/evaluations@1"])

The logprobs stage reads the rollouts again under each policy, and under the one that sampled them;
a second call finds these versions done. The denominators are the engine's logprobs, or the ones
computed here if the two differ by more than `LARGEST_GAP`. Refused is a policy that learned from
these rollouts: it would look better than it is. Refused is also one that cannot read them, such as
one with other tokens; the other policies still get their estimates. The estimates are not stored.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from quiver.schemas.errors import ConfigError, LineageError, SchemaError
from quiver.schemas.manifest import Manifest
from quiver.schemas.refs import parse
from quiver.stages.core.run.stage import is_made_alike
from quiver.stages.core.store import Store, Version
from quiver.stages.evaluate import offpolicy
from quiver.stages.optimize.checks import biases

from .calls import perform
from .look.lineage import parents_of
from .placement import check_places
from .recipe import Recipe

LARGEST_GAP = 0.005
"""Largest mean |recomputed − engine's logprob|, in nats a token, with the engine's as
denominators."""


def estimate(
    recipe: Recipe, policies: Sequence[str], evaluations: Sequence[str] = ()
) -> dict[str, Any]:
    """Estimate the held-out score of each policy.

    Args:
        recipe: The recipe; its run, store, [logprobs] and placement apply.
        policies: Their references.
        evaluations: The evaluations whose rollouts to use. Default: the recipe's run's newest one
            of the first policy's nearest ancestor.

    Returns:
        from: reference, rollouts, policy, score and gap of each evaluation
        estimates: for each policy its `estimate`, `interval` and `refused`, and the numbers that
            decide this: see `offpolicy.estimate`. They are None if nothing was computed: it learned
            from the rollouts, or cannot read them

    Raises LineageError if the evaluations cannot be used, or not together, or have too few rows.
    """
    check_places(recipe.placement, recipe.store)
    store = Store(recipe.store)
    names = [_resolve(store, recipe.run, policy, "policy") for policy in policies]
    sources = [
        store.open(_resolve(store, recipe.run, evaluation, "evaluations"))
        for evaluation in evaluations
    ] or [_of_nearest_ancestor(store, recipe.run, names[0])]
    samplers = [_require_usable(store, sources, source) for source in sources]
    samples = offpolicy.read(store, sources)
    num_rows = len(samples.prompts)
    if num_rows < offpolicy.FEWEST_ROWS:  # even rows of equal weight would be too few
        raise LineageError(
            " ".join(str(source.ref) for source in sources),
            f"too few scored rows: {num_rows}, an estimate needs {offpolicy.FEWEST_ROWS}",
            next="name more evaluations by --from, or evaluate more rows",
        )

    def logprobs(policy: str) -> list[Version]:
        """Return logprobs of each evaluation's rollouts under a policy; missing ones are made."""
        config = recipe.logprobs.for_role("ref")
        if config.precision == "auto":  # bfloat16 is too coarse for a ratio of whole sequences
            config = config.model_copy(update={"precision": "fp32"})
        outcomes = [
            perform(
                "logprobs",
                config,
                {"rollouts": str(rollouts.ref), "policy": policy},
                label=f"logprobs of {policy}",
                into=f"{recipe.run}.eval",
            )
            for rollouts in samples.rollouts
        ]
        return [store.open(outcome.ref) for outcome in outcomes]

    engines = samples.logprobs(samples.rollouts, "old_logprobs")
    gaps = []
    of_samplers = []
    for number, sampler in enumerate(samplers):
        versions = logprobs(sampler)
        gaps.append(samples.gap(number, versions[number]))
        _check_gap(samples.rollouts[number], gaps[number], recipe.optimize.audit.max_mean_gap)
        sums = samples.logprobs(versions)
        if gaps[number] <= LARGEST_GAP:
            sums = np.where(samples.samplers[:, None] == number, engines, sums)
        of_samplers.append(sums)
    denominators = samples.mixture(of_samplers)
    hashes = {rollouts.manifest.content_hash for rollouts in samples.rollouts}
    estimates = []
    for name in names:
        try:
            line = _line(store, name)
            if any(entry.content_hash in hashes for policy in line for entry in policy.inputs):
                answer = offpolicy.refusal("it was trained on these rollouts")
            else:
                weights = samples.logprobs(logprobs(name)) - denominators
                answer = offpolicy.estimate(samples, weights)
        except (ConfigError, LineageError, SchemaError) as error:  # other tokens, expired, …
            answer = offpolicy.refusal(f"{error.object}: {error.message}")
        estimates.append({"policy": name, **answer})
    used = [
        {
            "evaluation": str(source.ref),
            "rollouts": str(rollouts.ref),
            "policy": sampler,
            "score": source.manifest.metrics["score"],
            "rows": len(ids),
            "gap": gap,
        }
        for source, rollouts, sampler, ids, gap in zip(
            sources, samples.rollouts, samplers, samples.ids, gaps, strict=True
        )
    ]
    return {"from": used, "estimates": estimates}


def _resolve(store: Store, run: str, name: str, kind: str) -> str:
    """Return the reference with its number. Raises ConfigError if it is of another kind."""
    ref = parse(name, run)
    if ref.kind != kind:
        raise ConfigError(name, f"expected a version of {kind}", next=f"quiver ls {ref.run}")
    if kind == "policy" and isinstance(ref.version, int):
        store = store.with_expired()  # an expired policy is refused beside the others, not for all
    return str(store.resolve(ref))


def _line(store: Store, policy: str) -> Iterator[Manifest]:
    """Yield the manifest of a policy and of every policy it was made from, nearest first."""
    with_expired = store.with_expired()  # a manifest is enough
    waiting = [policy]
    seen = {policy}
    for ref in waiting:
        manifest = with_expired.open(ref).manifest
        yield manifest
        parents = {parent for parent in parents_of(manifest) if parse(parent).kind == "policy"}
        waiting += sorted(parents - seen)
        seen |= parents


def _of_nearest_ancestor(store: Store, run: str, policy: str) -> Version:
    """Return the run's newest evaluation of the policy's nearest ancestor that has a usable one.

    Raises LineageError if there is none; if all are unusable, it says why the first one is.
    """
    newest_first: dict[str, list[Version]] = defaultdict(list)
    for version in reversed(list(store.versions(run, "evaluations"))):
        if model := version.manifest.model("policy"):
            newest_first[model.ref].append(version)
    ancestors = [manifest.ref for manifest in _line(store, policy)][1:]
    unusable = None
    for ancestor in ancestors:
        for version in newest_first[ancestor]:
            try:
                _require_usable(store, [version], version)
                return version
            except LineageError as error:
                unusable = unusable or error
    if unusable:
        raise unusable
    asked = f" --policy {ancestors[0]}" if ancestors else ""
    raise LineageError(
        policy,
        f"run {run} has no evaluation of a policy that it was trained from",
        next=f"quiver evaluate RECIPE{asked}",
    )


def _require_usable(store: Store, sources: Sequence[Version], source: Version) -> str:
    """Return the policy that sampled an evaluation's rollouts. Raises LineageError if they cannot
    be weighted, or were sampled or scored in another way than the first evaluation's."""
    ways = []
    for evaluation in (sources[0], source):
        rollouts, paid = (
            store.open(evaluation.manifest.require_input(role).ref).manifest
            for role in ("rollouts", "rewards")
        )
        scored = [evaluation.manifest.config.get(name) for name in ("score", "unscored")]
        sampled = [rollouts.config_section(name) for name in ("sampling", "turns")]
        ways.append((scored, sampled, paid))
    sampling = rollouts.config_section("sampling")
    changed = biases(sampling)
    if sampling.get("temperature") == 0:  # where no token has a probability
        changed.append("temperature = 0")
    if changed:
        raise LineageError(
            str(source.ref),
            f"its rollouts were sampled with {', '.join(changed)}, so they do not follow the "
            "policy's own distribution",
            next="evaluate at temperature > 0, without truncation and penalties, by [evaluate] "
            "generate",
        )
    if ways[0][:2] != ways[1][:2] or not is_made_alike(ways[0][2], ways[1][2]):
        raise LineageError(
            str(source.ref),
            f"was sampled or scored in another way than {sources[0].ref}",
            next="leave one of them out",
        )
    return source.manifest.require_model("policy").ref


def _check_gap(rollouts: Version, gap: float, limit: float) -> None:
    """Raise LineageError if the engine's logprobs are not the sampling policy's."""
    if gap > limit:
        raise LineageError(
            str(rollouts.ref),
            f"the engine's logprobs differ from its policy's by {gap:.3f} nats a token, allowed is "
            f"optimize.audit.max_mean_gap = {limit}: another policy may have sampled",
            next="name another evaluation by --from",
        )
