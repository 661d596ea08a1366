"""average: a reference that follows the policy, as a mixture of the weights of both; again and
again, an exponential moving average.

    reference ← (1 − rate) · reference + rate · policy

The result is a policy version of its own (the flow writes it into the run `<run>.ref`), so it has a
hash and a lineage. It can be loaded, evaluated or give logprobs like any other. Models whose
weights have other names or shapes are refused, and a tokenizer with another token for some id,
special tokens aside.

    run_stage("average", Config(rate=0.1), store, reference="arith/policy@0",
        policy="arith/policy@3", into="arith.ref")
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import ExitStack

from pydantic import Field

from quiver.schemas.errors import ConfigError, LineageError
from quiver.stages.core.config import Config as Base
from quiver.stages.core.files import storage_errors
from quiver.stages.core.run.stage import Plan, Refs
from quiver.stages.core.store import Store
from quiver.stages.core.store.writer import Writer
from quiver.stages.model import checkpoints
from quiver.stages.model.loading import empty_model, verify_model
from quiver.stages.model.same_tokens import require_same_tokens

STAGE_VERSION = 1
_ADVICE = "average two versions of one model"


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
        raise ConfigError("stage average", "no run is named", next="name the run to write into")
    versions = {role: store.open(refs[role]) for role in ("reference", "policy")}
    for version in versions.values():
        if checkpoints.is_adapter_alone(version):
            raise ConfigError(
                str(version.ref),
                "it holds only an adapter, and only whole weights can be averaged",
                next='train with optimize.lora.save = "merged"',
            )
    models = tuple(checkpoints.model_entry(role, version) for role, version in versions.items())
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
    """Write the average of every weight. Raises LineageError unless both are of one model.

    Computes in float32: in bfloat16 a small rate would change nothing. Files may leave out the
    prefix that transformers gives to names inside a model's trunk, as the hub's GPT-2 does; the
    result has the policy's names.
    """
    import torch
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    writer = writers["policy"]
    reference, policy = (plan.store.open(model.ref) for model in plan.models)
    verify_model(reference)
    verify_model(policy)
    require_same_tokens(plan.models[0], plan.store.open, policy, next=_ADVICE, ignore_special=True)
    model = empty_model(policy)
    # Of the model, not of its file, which may also hold a tied head or masks.
    names = [
        {name for name, _ in each.named_parameters()} for each in (model, empty_model(reference))
    ]
    lost = sorted(names[1] - names[0])
    if lost:
        problem = f"has weight {lost[0]}, which {policy.ref} lacks"
        raise LineageError(str(reference.ref), problem, next=_ADVICE)
    with writer.phase("average"), storage_errors(plan.name), ExitStack() as stack:
        prefix = f"{model.base_model_prefix}."
        places = {}
        for path in reference.files.folder.glob("*.safetensors"):
            file = stack.enter_context(safe_open(path, "pt"))
            places |= {key.removeprefix(prefix): (file, key) for key in file.keys()}  # noqa: SIM118
        for name in policy.files.names:
            if "/" in name:
                continue
            if not name.endswith(".safetensors"):
                shutil.copyfile(policy.files.path(name), writer.folder / name)
                continue
            weights = load_file(policy.files.path(name))
            for key, weight in weights.items():
                file, old_key = places.get(key.removeprefix(prefix), (None, ""))
                old = file.get_tensor(old_key) if file else None
                if old is None or old.shape != weight.shape:
                    raise LineageError(
                        str(reference.ref),
                        f"weight {key}: expected shape {list(weight.shape)}, found "
                        + ("nothing" if old is None else f"shape {list(old.shape)}"),
                        next=_ADVICE,
                    )
                weights[key] = torch.lerp(old.float(), weight.float(), plan.config.rate)
            save_file(weights, writer.folder / name, {"format": "pt"})
    writer.finish()
