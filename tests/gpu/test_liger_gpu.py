"""Liger's kernels as a second oracle of ours, beside float64: the same inputs, outputs and gradients,
and GRPO's clipped loss from hidden states to their gradients.

They run where liger_kernel is installed.
"""

from functools import partial

import pytest
import torch

from quiver.stages.optimize.losses import Tokens, clipped
from tests.stages.model.forward import kernel_cases as cases

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]
WHY = "liger-kernel is not installed here"
grpo_loss = pytest.importorskip("liger_kernel.ops.grpo_loss", reason=WHY)
rms_norm = pytest.importorskip("liger_kernel.ops.rms_norm", reason=WHY)
rope = pytest.importorskip("liger_kernel.ops.rope", reason=WHY)
swiglu = pytest.importorskip("liger_kernel.ops.swiglu", reason=WHY)


def norm(states, weight, branch=None):
    total = states if branch is None else states + branch
    output = rms_norm.LigerRMSNormFunction.apply(total, weight, 1e-6, 0.0, "llama", False)
    return {"output": output} if branch is None else {"total": total, "output": output}


def gated(both):
    gate, up = both.split(1031, 1)
    return {"output": swiglu.LigerSiLUMulFunction.apply(gate, up)[None]}


def rotated(angles, queries, keys):
    states = (leaf.transpose(1, 2) for leaf in (queries, keys))
    positions = (position.to(queries.device) for position in (angles.cos(), angles.sin()))
    queries, keys = rope.LigerRopeFunction.apply(*states, *positions)
    return {"queries": queries, "keys": keys}


def rotation(dtype, tolerance):
    """The two halves of a head turn by the same angles, as Liger takes for granted."""
    angles = cases.drawn(1, 19, 32, seed=2, scale=100).repeat(1, 1, 2)
    leaves = {
        "queries": cases.drawn(1, 19, 4, 64).to(dtype),
        "keys": cases.drawn(1, 19, 2, 64, seed=1).to(dtype),
    }
    both = (partial(each, angles) for each in (cases.rotated, rotated))
    return cases.Case(leaves, *both, tolerance)


def same(name, theirs):
    """A case of ours whose other side is Liger's."""
    return cases.CASES[name]._replace(exact=theirs)


CASES = {
    **{
        f"norm: {name}": same(f"norm: {name}", norm)
        for name in ("states", "odd width", "bfloat16", "one row", "many rows", "sum of float32")
    },
    **{f"gate of {dtype}": same(f"gate of {dtype}", gated) for dtype in (cases.FP32, cases.BF16)},
    **{
        f"rotation of {dtype}": rotation(dtype, tolerance)
        for dtype, tolerance in ((cases.FP32, 1e-6), (cases.BF16, 8e-3))
    },
}


@pytest.mark.parametrize("name", CASES)
def test_a_kernel_gives_ligers_numbers(name):
    case = CASES[name]
    ours = case.answer(DEVICE)
    theirs = case._replace(ours=case.exact).answer(DEVICE)
    assert cases.largest_gap(ours, theirs) <= 2 * case.tolerance


LENGTHS, VOCABULARY, FACTOR = (5, 6), 1031, 0.8
BOUNDS = {"clip_low": 0.2, "clip_high": 0.28}
ADVANTAGES = torch.tensor([1.3, -0.7])


def leaves():
    hidden, weight = cases.drawn(11, 24), cases.drawn(VOCABULARY, 24, seed=1)
    return [leaf.to(DEVICE).requires_grad_() for leaf in (hidden, weight)]


def ids_and_old():
    """Ids [11], and old logprobs some of whose ratios are outside the bounds."""
    ids = torch.arange(0, VOCABULARY, 100)
    hidden, weight = (leaf.detach().cpu() for leaf in leaves())
    logprobs = (FACTOR * (hidden @ weight.T)).log_softmax(-1).gather(1, ids[:, None])[:, 0]
    return ids.to(DEVICE), (logprobs + cases.drawn(11, seed=3, scale=0.4)).to(DEVICE)


def our_loss(hidden, weight):
    ids, old = ids_and_old()
    factors = torch.full((11,), FACTOR, device=DEVICE)
    chunks = [slice(0, 8), slice(8, 11)]
    logprobs, _ = cases.fused_head.FusedHead.apply(
        hidden, weight, ids, factors, chunks, hidden.dtype, False, False
    )
    offsets = torch.tensor([0, 5, 11], device=DEVICE)
    advantages = ADVANTAGES.repeat_interleave(torch.tensor(LENGTHS)).to(DEVICE)
    losses, at_bound = clipped(Tokens(logprobs, old, advantages, offsets), **BOUNDS)
    assert 0 < int(at_bound.sum()) < 11
    return losses, logprobs


def ligers_loss(hidden, weight):
    """Its rows are padded, and have one more position, of which no id is sampled."""
    ids, old = ids_and_old()
    logits = (hidden @ weight.T).split(LENGTHS)
    logits = torch.nn.utils.rnn.pad_sequence([*logits, logits[0][:0]], batch_first=True)[:2]
    logits = torch.nn.functional.pad(logits, (0, 0, 0, 1)).contiguous()
    padded = [
        torch.nn.utils.rnn.pad_sequence(column.split(LENGTHS), batch_first=True).contiguous()
        for column in (ids, old, torch.ones(11, device=DEVICE))
    ]
    mask = padded[2]
    losses, _, _ = grpo_loss.GrpoLossFunction.apply(
        logits, padded[1], None, padded[0], ADVANTAGES.to(DEVICE), mask, 1 / FACTOR, 0.0, *BOUNDS.values(),
        False, "grpo", None, False,
    )  # fmt: skip
    logprobs = grpo_loss.fused_selective_log_softmax(logits.detach(), padded[0], 1 / FACTOR, mask)
    return losses[mask.bool()], logprobs[mask.bool()]


def test_the_clipped_loss_and_its_gradients_are_ligers():
    answers = []
    for loss in (our_loss, ligers_loss):
        inputs = leaves()
        losses, logprobs = loss(*inputs)
        grads = torch.autograd.grad(losses.sum(), inputs)
        tensors = (losses, logprobs, *grads)
        names = ("losses", "logprobs", "grad of hidden", "grad of weight")
        answers.append({name: t.detach() for name, t in zip(names, tensors, strict=True)})
    assert cases.largest_gap(*answers) < 1e-5
