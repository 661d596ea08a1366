"""average: a reference that follows the policy, as an exponential moving average of weights.

    reference ← (1 − rate) · reference + rate · policy

Written as a policy version of its own (by the flow into the run `<run>.ref`), so it has a hash, a
lineage, and can be loaded, scored under or evaluated like any other. Refused: models whose weights
have other names or shapes.

    ref = run(Config(rate=0.1), store, reference="arith/policy@0", policy="arith/policy@3",
    into="arith.ref")
"""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pydantic import Field

from quiver.schemas.errors import LineageError
from quiver.schemas.refs import Ref
from quiver.stages.common.config import Config as Base
from quiver.stages.common.models import checkpoints
from quiver.stages.common.models.loading import verify_model
from quiver.stages.common.store import Store, Version, storage
from quiver.stages.common.work import begin

STAGE_VERSION = 1


class Config(Base):
    """How fast the reference follows."""

    rate: float = Field(gt=0, lt=1)
    """Share of the policy in the new reference."""


def run(
    config: Config,
    store: Store,
    *,
    reference: str | Ref,
    policy: str | Ref,
    into: str,
    force: bool = False,
) -> Ref:
    """Write the average of `reference` and `policy` as the next policy of run `into`. LineageError:
    they are not one model."""
    old, new = store.open(reference), store.open(policy)
    models = (checkpoints.as_model("reference", old), checkpoints.as_model("policy", new))
    about = {
        "stage": "average",
        "stage_version": STAGE_VERSION,
        "config": config,
        "inputs": {},
        "models": models,
    }
    with begin(store, into, "policy", force=force, **about) as work:
        if work.done:
            return work.done.ref
        for version in (old, new):
            verify_model(version)
        with work.phase("average"), storage.storage_errors(f"{into}/policy"):
            for entry in new.manifest.files:
                if "/" not in entry.name and not entry.name.endswith(".safetensors"):
                    shutil.copyfile(new.files.folder / entry.name, work.folder / entry.name)
            _average(old, new, config.rate, work.folder)
        return work.commit().ref


def _average(old: Version, new: Version, rate: float, folder: Path) -> None:
    """Every weight file of `new`, one at a time, in float32: in bfloat16 a small rate would move
    nothing."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    places = {name: file for file in _weights(old) for name in _names(file)}
    with ExitStack() as stack:
        opened = {file: stack.enter_context(safe_open(file, "pt")) for file in set(places.values())}
        for file in _weights(new):
            made: dict[str, Any] = {}
            with safe_open(file, "pt") as source:
                for name in source.keys():  # noqa: SIM118  not a dict
                    tensor = source.get_tensor(name)
                    held = opened[places[name]].get_tensor(name) if name in places else None
                    if held is None or held.shape != tensor.shape:
                        found = f"shape {list(held.shape)}" if held is not None else "nothing"
                        message = (
                            f"weight {name}: expected shape {list(tensor.shape)}, found {found}"
                        )
                        raise LineageError(
                            str(old.ref), message, next="average two versions of one model"
                        )
                    made[name] = torch.lerp(held.float(), tensor.float(), rate).contiguous()
            save_file(made, folder / file.name, {"format": "pt"})


def _weights(version: Version) -> list[Path]:
    return [
        version.files.folder / e.name
        for e in version.manifest.files
        if e.name.endswith(".safetensors") and "/" not in e.name
    ]


def _names(file: Path) -> list[str]:
    """Names of the tensors in a safetensors file, from its header."""
    with open(file, "rb") as raw:
        header = json.loads(raw.read(int.from_bytes(raw.read(8), "little")))
    return [name for name in header if name != "__metadata__"]
