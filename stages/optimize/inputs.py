"""Which versions optimize is given, and which of them belong together: one set for each version of
rollouts.

Replay trains on several versions at once, each sampled by a policy of its own. Rewards and logprobs
go with the rollouts that their manifests name by content hash, never by position. Refused: the same
rollouts twice, rewards or logprobs of other rollouts or twice of the same, rollouts that have none,
and logprobs of more than one reference.

    rewards = ["a/rewards@2", "a/rewards@3"]
    inputs = open_inputs(store, "a/policy@2", ["a/rollouts@3", "a/rollouts@2"], {"rewards":
    rewards}) list(inputs)    # the roles in the manifest: policy, rollouts, rollouts.2, rewards, rewards.2
    sets(inputs)[1]["rewards"]     # a/rewards@2, those of a/rollouts@2
"""

from __future__ import annotations

from collections.abc import Mapping

from quiver.schemas.errors import ConfigError, LineageError
from quiver.schemas.refs import Ref
from quiver.stages.common.store import Store, Version

Refs = str | Ref | list[str | Ref]
"""One version, or several."""
_SCORE = {
    "rewards": "quiver reward RECIPE --rollouts {}",
    "ref": "quiver logprobs RECIPE --rollouts {}",
    "prox": "score {} under the policy that sampled it",
}
_NAMES = {"rewards": "rewards", "ref": "reference logprobs", "prox": "proximal logprobs"}


def open_inputs(
    store: Store, policy: str | Ref, rollouts: Refs, others: Mapping[str, Refs | None]
) -> dict[str, Version]:
    """All versions by role, `others` (role -> references) beside the rollouts that they are of.
    ConfigError, LineageError."""
    saved = [store.open(ref) for ref in _listed(rollouts)]
    _require_distinct(saved)
    found = {"policy": store.open(policy), **_numbered("rollouts", saved)}
    for role, refs in others.items():
        given = [store.open(ref) for ref in _listed(refs)]
        if given or role == "rewards":
            found |= _numbered(role, _paired(role, saved, given))
    _require_one_reference(
        [version for role, version in found.items() if role.partition(".")[0] == "ref"]
    )
    return found


def sets(inputs: Mapping[str, Version]) -> list[dict[str, Version]]:
    """The policy, one version of rollouts and what belongs to it, by plain roles; as many sets as
    versions of rollouts."""
    found: dict[str, dict[str, Version]] = {}
    for name, version in inputs.items():
        role, _, number = name.partition(".")
        found.setdefault(number, {"policy": inputs["policy"]})[role] = version
    return list(found.values())


def _listed(refs: Refs | None) -> list[str | Ref]:
    if refs is None:
        return []
    return refs if isinstance(refs, list) else [refs]


def _numbered(role: str, versions: list[Version]) -> dict[str, Version]:
    return {
        role if number == 1 else f"{role}.{number}": version
        for number, version in enumerate(versions, 1)
    }


def _require_distinct(rollouts: list[Version]) -> None:
    if not rollouts:
        raise ConfigError("optimize", "no rollouts are given", next="name a version of rollouts")
    first: dict[str, Version] = {}
    for version in rollouts:
        other = first.setdefault(version.manifest.content_hash, version)
        if other is not version:
            what = (
                "is given twice"
                if other.ref == version.ref
                else f"holds the very rows of {other.ref}"
            )
            raise ConfigError(str(version.ref), what, next="name each version of rollouts once")


def _paired(role: str, rollouts: list[Version], given: list[Version]) -> list[Version]:
    """`given` in the order of the rollouts that they are of, each of which has exactly one."""
    wanted = {version.manifest.content_hash: version.ref for version in rollouts}
    chosen: dict[str, Version] = {}
    for version in given:
        entry = version.manifest.input("rollouts")
        if entry is None or entry.content_hash not in wanted:
            made = f"made of {entry.ref if entry else 'no rollouts that its manifest names'}"
            expected = " or ".join(map(str, wanted.values()))
            raise LineageError(
                str(version.ref),
                f"{made}, not of {expected}",
                next=f"name {_NAMES[role]} of {expected}",
            )
        other = chosen.setdefault(entry.content_hash, version)
        if other is not version:
            twice = f"{_NAMES[role]} of {wanted[entry.content_hash]}, and so is {other.ref}"
            raise ConfigError(str(version.ref), twice, next="name one of them")
    for missing in [ref for key, ref in wanted.items() if key not in chosen]:
        what = (
            f"no {_NAMES[role]} of these rollouts are given, found "
            f"{', '.join(str(version.ref) for version in given) or 'none'}"
        )
        raise LineageError(str(missing), what, next=_SCORE[role].format(missing))
    return [chosen[key] for key in wanted]


def _require_one_reference(versions: list[Version]) -> None:
    """The KL term holds on to one policy, whatever policies sampled."""
    models = [version.manifest.model("ref") for version in versions]
    for version, model in zip(versions, models, strict=True):
        if (model and model.weights) != (models[0] and models[0].weights):
            raise LineageError(
                str(version.ref),
                f"logprobs under {model.ref if model else 'no model that its manifest names'}, "
                f"those of {versions[0].ref} are "
                f"under {models[0].ref if models[0] else 'no model that its manifest names'}",
                next=f"score the rollouts of {version.ref} under the same reference (stage "
                "logprobs)",
            )
