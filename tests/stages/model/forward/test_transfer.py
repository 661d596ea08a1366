"""What a micro-batch reads moves to the device by one copy."""

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quiver.stages.model.forward.policy import Policy
from quiver.stages.model.forward.transfer import to_device
from quiver.stages.optimize.batch import StepColumns, TokenColumns
from tests.bytes_moved import META
from tests.stages.model.forward import test_policy


class Copies(TorchDispatchMode):
    """Counts what goes from the CPU to another device."""

    count = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        output = function(*arguments, **(keywords or {}))
        if function.overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.copy_):
            self.count += output.device == META
        return output


def _columns(layout):
    count = len(layout.targets)
    tokens = TokenColumns(torch.arange(3), *[torch.ones(count)] * 3, None, None, None)
    return layout, tokens, StepColumns(torch.ones(count, dtype=torch.float64), learns=tokens[1] > 0)


def test_a_layout_and_its_columns_are_one_copy():
    sequences, groups = test_policy._data()
    policy = Policy(test_policy._model("llama"), autocast=False)
    pieces, *_ = policy.microbatches(range(len(groups)), groups, sequences, 10_000)
    policy.model.to(META)
    for varlen in (False, True):
        policy.kernel = "varlen" if varlen else "blocks"
        with Copies() as copies:
            layout, tokens, step = policy.layout(pieces, sequences, _columns)
        assert copies.count == 1
        assert {layout.ids.device, tokens.old_logprobs.device, step.weights.device} == {META}
        assert isinstance(layout.rows, np.ndarray)
        assert (layout.made_blocks is None) == varlen


def test_shapes_and_dtypes_stay():
    """Numbers are seen in test_other_device.py."""
    tree = {"a": torch.ones(3, 5, dtype=torch.bool), "b": (torch.ones(2, 3).T, torch.tensor(1.5))}
    tree["b"] += (torch.empty(0, 4, dtype=torch.int64), None, "text")
    moved = to_device(tree, META)
    assert moved["b"][3:] == (None, "text")
    for before, after in zip(
        [tree["a"], *tree["b"][:3]], [moved["a"], *moved["b"][:3]], strict=True
    ):
        assert (after.device, after.dtype, after.shape) == (META, before.dtype, before.shape)
    assert to_device(tree, "cpu") is tree
