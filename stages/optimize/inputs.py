"""The input versions of optimize, grouped into one set for each version of rollouts.

Replay trains on several versions at once, each sampled by its own policy. Rewards and logprobs are
matched to rollouts by the content hash in their manifests, never by position. Refused: the same
rollouts twice, rewards or logprobs of other rollouts or twice of the same, rollouts without them,
and logprobs of more than one reference.

    rewards = ["a/rewards@2", "a/rewards@3"]
    rollouts = ["a/rollouts@3", "a/rollouts@2"]
    inputs = open_inputs(store, "a/policy@2", rollouts, {"rewards": rewards})
    list(inputs)    # policy, rollouts, rollouts.2, rewards, rewards.2: the roles in the manifest
    sets(inputs)[1]["rewards"]     # a/rewards@2, made of a/rollouts@2
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from quiver.schemas.errors import ConfigError, LineageError
from quiver.schemas.refs import Ref
from quiver.stages.common.models.checkpoints import OPTIMIZER_FOLDER
from quiver.stages.common.store import Store, Version

GivenRefs = str | Ref | list[str | Ref]
"""One version, or several."""
_HOW_TO_MAKE = {
    "rewards": "quiver reward RECIPE --rollouts {}",
    "ref": "quiver logprobs RECIPE --rollouts {}",
    "prox": "score {} under the policy that optimize.prox_of names",
}
_NAMES = {
    "rewards": "rewards",
    "ref": "reference logprobs",
    "prox": "proximal logprobs",
}


def open_inputs(
    store: Store,
    policy: str | Ref,
    rollouts: GivenRefs,
    beside: Mapping[str, GivenRefs | None],
) -> dict[str, Version]:
    """Open all versions, by role. `beside`: references by role (rewards, ref, prox) of the versions
    that belong to the rollouts. Raises ConfigError, LineageError."""
    rollouts_by_content: dict[str, Version] = {}
    for version in map(store.open, _as_list(rollouts)):
        equal = rollouts_by_content.setdefault(version.manifest.content_hash, version)
        if equal is not version:
            is_same = equal.ref == version.ref
            problem = "is given twice" if is_same else f"holds the very rows of {equal.ref}"
            raise ConfigError(str(version.ref), problem, next="name each version of rollouts once")
    if not rollouts_by_content:
        raise ConfigError("optimize", "no rollouts are given", next="name a version of rollouts")
    inputs = {
        "policy": store.open(policy),
        **_numbered("rollouts", rollouts_by_content.values()),
    }
    for role, refs in beside.items():
        versions = [store.open(ref) for ref in _as_list(refs)]
        if versions or role == "rewards":
            ordered = _in_order_of(rollouts_by_content, role, versions)
            inputs |= _numbered(role, ordered)
            if role == "ref":
                _require_one_reference(ordered)
    return inputs


def require_state(inputs: Mapping[str, Version]) -> None:
    """Raise LineageError if the optimizer state of the policy expired."""
    policy = inputs["policy"]
    try:
        policy.require(f"{OPTIMIZER_FOLDER}/state.json")
    except LineageError as error:
        error.message += "; optimize.load_optimizer = false starts with a new one"
        if "--restore" not in error.next:
            names = [f"--rollouts {version['rollouts'].ref}" for version in sets(inputs)]
            error.next = (
                f"quiver optimize RECIPE --policy {policy.ref} {' '.join(names)} "
                "--set optimize.load_optimizer=false"
            )
        raise


def sets(inputs: Mapping[str, Version]) -> list[dict[str, Version]]:
    """Return one set for each version of rollouts: the policy, the rollouts and the versions that
    belong to them, by plain roles."""
    sets_by_number: dict[str, dict[str, Version]] = {}
    for name, version in inputs.items():
        role, _, number = name.partition(".")
        sets_by_number.setdefault(number, {"policy": inputs["policy"]})[role] = version
    return list(sets_by_number.values())


def _as_list(refs: GivenRefs | None) -> list[str | Ref]:
    if refs is None:
        return []
    return refs if isinstance(refs, list) else [refs]


def _numbered(role: str, versions: Iterable[Version]) -> dict[str, Version]:
    """Return the versions by role: `rollouts`, `rollouts.2`, `rollouts.3`, …"""
    return {
        f"{role}.{number}" if number > 1 else role: version
        for number, version in enumerate(versions, 1)
    }


def _in_order_of(
    rollouts: Mapping[str, Version], role: str, versions: list[Version]
) -> list[Version]:
    """Return `versions` in the order of their rollouts, which are keyed by content hash. Raises
    LineageError or ConfigError unless each of the rollouts has exactly one."""
    versions_by_content: dict[str, Version] = {}
    for version in versions:
        source = version.manifest.input("rollouts")
        if source is None or source.content_hash not in rollouts:
            source_name = source.ref if source else "no rollouts that its manifest names"
            expected = " or ".join(str(sampled.ref) for sampled in rollouts.values())
            raise LineageError(
                str(version.ref),
                f"made of {source_name}, not of {expected}",
                next=f"name {_NAMES[role]} of {expected}",
            )
        equal = versions_by_content.setdefault(source.content_hash, version)
        if equal is not version:
            raise ConfigError(
                str(version.ref),
                f"{_NAMES[role]} of {rollouts[source.content_hash].ref}, and so is {equal.ref}",
                next="name one of them",
            )
    for content, sampled in rollouts.items():
        if content not in versions_by_content:
            names = ", ".join(str(version.ref) for version in versions) or "none"
            raise LineageError(
                str(sampled.ref),
                f"no {_NAMES[role]} of these rollouts are given, found {names}",
                next=_HOW_TO_MAKE[role].format(sampled.ref),
            )
    return [versions_by_content[content] for content in rollouts]


def _require_one_reference(versions: list[Version]) -> None:
    """Raise LineageError unless all logprobs are of one reference: the KL term needs a single one,
    even with several sampling policies."""
    models = [version.manifest.model("ref") for version in versions]
    unknown = "no model that its manifest names"
    for version, model in zip(versions, models, strict=True):
        if (model and model.weights) != (models[0] and models[0].weights):
            raise LineageError(
                str(version.ref),
                f"logprobs under {model.ref if model else unknown}, those of {versions[0].ref} are "
                f"under {models[0].ref if models[0] else unknown}",
                next=f"score the rollouts of {version.ref} under the same reference (stage "
                "logprobs)",
            )
