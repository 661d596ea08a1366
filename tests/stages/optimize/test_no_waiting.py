"""The host runs ahead of a GPU: between the first pass of a step and its last nothing is read back
from the device, and nothing is copied between the two. Counted on meta tensors, whose operations
are those of a GPU without its numbers."""

from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from quiver.stages.model.forward.policy import Policy
from quiver.stages.model.forward.transfer import to_device
from quiver.stages.model.loading import load_model
from quiver.stages.optimize.batch import StepColumns
from tests.stages.optimize import test_trainer, world

META = torch.device("meta")
WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique"}


class Waits(TorchDispatchMode):
    """Names of the operations that make the host wait for the device, or copy between the two."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        name = function.name().split("::")[1].split(".")[0]
        result = function(*arguments, **(keywords or {}))
        tensors = [
            leaf
            for leaf in tree_leaves((arguments, keywords, result))
            if isinstance(leaf, torch.Tensor)
        ]
        devices = {tensor.device.type for tensor in tensors if tensor.dim()}
        is_copy = name in ("_to_copy", "copy_") and len(devices) > 1
        if "meta" in devices and (name in WAITING or is_copy):
            self.names.append(name)
        return result


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "algorithm, options", [("grpo", {"kl_coef": 0.1}), ("gspo", {}), ("cispo", {"nll_coef": 0.1})]
)
def test_a_micro_batch_reads_nothing_back(policy, algorithm, options, dtype, monkeypatch):
    # autocast knows no meta tensors
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    monkeypatch.setattr(torch.amp, "autocast", lambda *_, **__: nullcontext())
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device="cpu": False)
    rows = world.sample(load_model(policy, dtype=torch.float32), world.prompts(4), 4)
    for row in rows:
        row |= {
            "old": row["old_logprobs"],
            "ref": row["old_logprobs"],
            "reward": world.even_share(row),
            "group": int(row["group_id"][2:]),
        }
    config = test_trainer._config(**options)
    trainer = test_trainer._trainer(policy, rows, config, algorithm, prox=True, ref=True)
    batch = trainer.batch
    everyone = range(len(rows))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(trainer.model.config, dtype=dtype)
    on_meta = Policy(model, autocast=False)
    on_meta.set_mode("shared")
    (pieces,) = on_meta.microbatches(everyone, batch.prompt_numbers, batch.sequences, 10_000)
    layout = on_meta.layout(pieces, batch.sequences)
    weights = trainer.objective.weights(batch, list(everyone))
    step = StepColumns(weights, kl_coef=config.kl_coef, nll_weights=weights)
    step = step.at(batch.places(layout.rows))
    columns, step = to_device((batch.token_columns(layout.rows), step), META)
    with Waits() as waits:
        outputs = on_meta(layout)
        loss, _, _ = trainer.objective.loss(columns, outputs, step)
        loss.backward()
    assert waits.names == []
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_what_waits_is_noticed():
    with Waits() as waits:
        torch.ones(3).to(META)
        torch.empty(3, device=META).repeat_interleave(torch.empty(3, device=META), output_size=5)
    assert waits.names == ["_to_copy"]
