"""average: a reference that follows the policy, as an exponential moving average of weights.

    reference ← (1 − rate) · reference + rate · policy

The result is a policy version of its own (the flow writes it into the run `<run>.ref`), so it has a
hash and a lineage. It can be loaded, scored under or evaluated like any other. Models whose weights
have other names or shapes are refused.

    run_stage("average", Config(rate=0.1), store, reference="arith/policy@0",
        policy="arith/policy@3", into="arith.ref")
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from pydantic import Field

from quiver.schemas.errors import ConfigError, LineageError
from quiver.stages.common.config import Config as Base
from quiver.stages.common.models import checkpoints
from quiver.stages.common.models.loading import verify_model
from quiver.stages.common.runtime.stage import Plan, Refs
from quiver.stages.common.store import Store, Version
from quiver.stages.common.store.storage import storage_errors
from quiver.stages.common.store.writer import Writer

STAGE_VERSION = 1


class Config(Base):
    """Config of average: how fast the reference follows."""

    rate: float = Field(gt=0, lt=1)
    """Weight of the policy in the new reference."""


def plan(config: Config, store: Store, refs: Refs, into: str | None = None) -> Plan:
    """Plan the average of `refs["reference"]` and `refs["policy"]`, as the next policy of run
    `into`.

    Raises ConfigError.
    """
    if into is None:
        raise ConfigError("stage average", "no run is named", next="say into which run it goes")
    versions = {role: store.open(refs[role]) for role in ("reference", "policy")}
    for version in versions.values():
        if checkpoints.is_adapter_alone(version):
            raise ConfigError(
                str(version.ref),
                "it holds an adapter alone, and whole weights are averaged",
                next='train with optimize.lora.save = "merged"',
            )
    models = tuple(checkpoints.as_model(role, version) for role, version in versions.items())
    return Plan(
        store=store,
        stage="average",
        stage_version=STAGE_VERSION,
        config=config,
        run=into,
        kinds=("policy",),
        models=models,
        first_number=0,
    )


def make(plan: Plan, writers: Mapping[str, Writer]) -> None:
    """Write the average. Raises LineageError if the two versions are not of one model."""
    writer = writers["policy"]
    reference, policy = (plan.store.open(model.ref) for model in plan.models)
    verify_model(reference)
    verify_model(policy)
    with writer.phase("average"), storage_errors(plan.name):
        for name in policy.files.names:
            if "/" not in name and not name.endswith(".safetensors"):
                shutil.copyfile(policy.files.path(name), writer.folder / name)
        _average(reference, policy, plan.config.rate, writer.folder)
    writer.finish()


def _average(reference: Version, policy: Version, rate: float, folder: Path) -> None:
    """Average every weight file of `policy`, one at a time.

    Computes in float32: in bfloat16 a small rate would change nothing.
    """
    import torch
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    with ExitStack() as stack:
        file_of_weight = {}
        for path in _weight_files(reference):
            file = stack.enter_context(safe_open(path, "pt"))
            file_of_weight.update(dict.fromkeys(file.keys(), file))
        for path in _weight_files(policy):
            weights = load_file(path)
            for name, weight in weights.items():
                expected = f"shape {list(weight.shape)}"
                found_shape = "nothing"
                if name in file_of_weight:
                    reference_weight = file_of_weight[name].get_tensor(name)
                    found_shape = f"shape {list(reference_weight.shape)}"
                if found_shape != expected:
                    raise LineageError(
                        str(reference.ref),
                        f"weight {name}: expected {expected}, found {found_shape}",
                        next="average two versions of one model",
                    )
                average = torch.lerp(reference_weight.float(), weight.float(), rate)
                weights[name] = average.contiguous()
            save_file(weights, folder / path.name, {"format": "pt"})


def _weight_files(version: Version) -> list[Path]:
    return [
        version.files.path(name)
        for name in version.files.names
        if name.endswith(".safetensors") and "/" not in name
    ]
