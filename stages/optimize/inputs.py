"""Which versions optimize is given, and which of them belong together: one set for each version of
rollouts.

Replay trains on several versions at once, each sampled by a policy of its own. Rewards and logprobs
go with the rollouts that their manifests name by content hash, never by position. Refused: the same
rollouts twice, rewards or logprobs of other rollouts or twice of the same, rollouts that have none,
and logprobs of more than one reference.

    rewards = ["a/rewards@2", "a/rewards@3"]
    rollouts = ["a/rollouts@3", "a/rollouts@2"]
    inputs = open_inputs(store, "a/policy@2", rollouts, {"rewards": rewards})
    list(inputs)    # policy, rollouts, rollouts.2, rewards, rewards.2: the roles in the manifest
    sets(inputs)[1]["rewards"]     # a/rewards@2, those of a/rollouts@2
"""

from __future__ import annotations

from collections.abc import Mapping

from quiver.schemas.errors import ConfigError, LineageError
from quiver.schemas.refs import Ref
from quiver.stages.common.store import Store, Version

GivenRefs = str | Ref | list[str | Ref]
"""One version, or several."""
_HOW_TO_MAKE = {
    "rewards": "quiver reward RECIPE --rollouts {}",
    "ref": "quiver logprobs RECIPE --rollouts {}",
    "prox": "score {} under the policy that sampled it",
}
_NAMES = {"rewards": "rewards", "ref": "reference logprobs", "prox": "proximal logprobs"}


def open_inputs(
    store: Store,
    policy: str | Ref,
    rollouts: GivenRefs,
    beside: Mapping[str, GivenRefs | None],
) -> dict[str, Version]:
    """All versions by role. `beside`: references by role (rewards, ref, prox) of what goes with the
    rollouts. ConfigError, LineageError."""
    rollout_versions = [store.open(ref) for ref in _as_list(rollouts)]
    if not rollout_versions:
        raise ConfigError("optimize", "no rollouts are given", next="name a version of rollouts")
    versions_by_content: dict[str, Version] = {}
    for version in rollout_versions:
        equal = versions_by_content.setdefault(version.manifest.content_hash, version)
        if equal is not version:
            is_same = equal.ref == version.ref
            problem = "is given twice" if is_same else f"holds the very rows of {equal.ref}"
            raise ConfigError(str(version.ref), problem, next="name each version of rollouts once")
    inputs = {"policy": store.open(policy), **_numbered("rollouts", rollout_versions)}
    for role, refs in beside.items():
        versions = [store.open(ref) for ref in _as_list(refs)]
        if versions or role == "rewards":
            ordered = _in_order_of(rollout_versions, role, versions)
            inputs |= _numbered(role, ordered)
            if role == "ref":
                _require_one_reference(ordered)
    return inputs


def sets(inputs: Mapping[str, Version]) -> list[dict[str, Version]]:
    """The policy, one version of rollouts and what belongs to it, by plain roles; as many sets as
    versions of rollouts."""
    sets_by_number: dict[str, dict[str, Version]] = {}
    for name, version in inputs.items():
        role, _, number = name.partition(".")
        sets_by_number.setdefault(number, {"policy": inputs["policy"]})[role] = version
    return list(sets_by_number.values())


def _as_list(refs: GivenRefs | None) -> list[str | Ref]:
    if refs is None:
        return []
    return refs if isinstance(refs, list) else [refs]


def _numbered(role: str, versions: list[Version]) -> dict[str, Version]:
    """By role: `rollouts`, `rollouts.2`, `rollouts.3`, …"""
    return {
        f"{role}.{number}" if number > 1 else role: version
        for number, version in enumerate(versions, 1)
    }


def _in_order_of(rollouts: list[Version], role: str, versions: list[Version]) -> list[Version]:
    """`versions` in the order of the rollouts that they are of, each of which has exactly one."""
    refs_by_content = {version.manifest.content_hash: version.ref for version in rollouts}
    versions_by_content: dict[str, Version] = {}
    for version in versions:
        source = version.manifest.input("rollouts")
        if source is None or source.content_hash not in refs_by_content:
            source_name = source.ref if source else "no rollouts that its manifest names"
            expected = " or ".join(map(str, refs_by_content.values()))
            raise LineageError(
                str(version.ref),
                f"made of {source_name}, not of {expected}",
                next=f"name {_NAMES[role]} of {expected}",
            )
        equal = versions_by_content.setdefault(source.content_hash, version)
        if equal is not version:
            raise ConfigError(
                str(version.ref),
                f"{_NAMES[role]} of {refs_by_content[source.content_hash]}, and so is {equal.ref}",
                next="name one of them",
            )
    for content, ref in refs_by_content.items():
        if content not in versions_by_content:
            names = ", ".join(str(version.ref) for version in versions) or "none"
            raise LineageError(
                str(ref),
                f"no {_NAMES[role]} of these rollouts are given, found {names}",
                next=_HOW_TO_MAKE[role].format(ref),
            )
    return [versions_by_content[content] for content in refs_by_content]


def _require_one_reference(versions: list[Version]) -> None:
    """The KL term holds on to one policy, whatever policies sampled."""
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
