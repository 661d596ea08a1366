"""The chunked head against torch's own log_softmax: values, entropy and every gradient."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from quiver.stages.model.forward import logprob_head as module
from quiver.stages.model.forward.logprob_head import Shaping, completion_logprobs
from tests.bytes_moved import autocast_on_meta

N, D, V = 23, 12, 50


def drawn(seed: int = 0, *, bias: bool = True) -> tuple[torch.Tensor, nn.Linear, torch.Tensor]:
    """Hidden states, a head and targets."""
    torch.manual_seed(seed)
    layer = nn.Linear(D, V, bias=bias)
    return torch.randn(N, D, requires_grad=True), layer, torch.randint(V, (N,))


def _naive(hidden, layer, targets, temperature, shaping):
    logits = layer(hidden) * shaping.scale
    if shaping.softcap:
        logits = shaping.softcap * torch.tanh(logits / shaping.softcap)
    table = (logits / temperature[:, None]).log_softmax(-1)
    return table.gather(1, targets[:, None])[:, 0], -(table.exp() * table).sum(-1)


@pytest.mark.parametrize("kept", [0, N // 2, N])
@pytest.mark.parametrize("rows, tile", [(1, 1), (7, 3), (100, 3), (100, 100)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "shaping", [Shaping(), Shaping(scale=0.5), Shaping(scale=1.5, softcap=3.0)]
)
def test_values_and_gradients_are_those_of_log_softmax(
    monkeypatch, rows, tile, bias, shaping, kept
):
    """In chunks and tiles, some of them kept; with and without the entropy's gradient."""
    monkeypatch.setattr(module, "CHUNK_BYTES", rows * V * 4)
    monkeypatch.setattr(module, "TILE_BYTES", tile * V * 4)
    monkeypatch.setattr(module, "KEPT_BYTES", kept * V * 4)
    hidden, layer, targets = drawn(rows, bias=bias)
    grads = [torch.randn(N), torch.randn(N)]
    leaves = [hidden, *layer.parameters()]
    arguments = hidden, layer, targets, torch.rand(N) + 0.5, shaping
    expected = _naive(*arguments)
    plain = completion_logprobs(*arguments)
    both = completion_logprobs(*arguments, entropy_gradient=True)
    assert not plain[1].requires_grad
    for outputs, count in ((plain, 1), (both, 2)):
        torch.testing.assert_close(outputs, expected, rtol=1e-5, atol=1e-5)
        gradients = [
            torch.autograd.grad(each[:count], leaves, grads[:count], retain_graph=True)
            for each in (outputs, expected)
        ]
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shaping", [Shaping(), Shaping(scale=1.5, softcap=3.0)])
def test_the_probability_that_two_draws_are_one_stands_in_place_of_the_entropy(
    monkeypatch, shaping
):
    """In several chunks and tiles; logprobs and their gradient stay."""
    monkeypatch.setattr(module, "CHUNK_BYTES", 5 * V * 4)
    monkeypatch.setattr(module, "TILE_BYTES", 2 * V * 4)
    hidden, layer, targets = drawn(4)
    more = torch.rand(N) + 0.5, shaping
    plain, _ = completion_logprobs(hidden, layer, targets, *more)
    logprobs, collisions = completion_logprobs(hidden, layer, targets, *more, collision=True)
    of_ids = [_naive(hidden, layer, torch.full((N,), id), *more)[0].detach() for id in range(V)]
    torch.testing.assert_close(collisions, torch.stack(of_ids).exp().square().sum(0))
    assert torch.equal(logprobs, plain) and not collisions.requires_grad
    gradients = [torch.autograd.grad(rows.sum(), hidden)[0] for rows in (logprobs, plain)]
    assert torch.equal(*gradients)


def test_a_vocabulary_of_which_much_is_impossible_has_a_finite_entropy_gradient():
    layer = nn.Linear(2, 4, bias=False)
    layer.weight.data = torch.tensor([[0.0, 0.0], [1.0, 0.0], [-1e4, 0.0], [-1e4, 0.0]])
    hidden = torch.tensor([[1.0, 0.0]], requires_grad=True)
    _, entropy = completion_logprobs(
        hidden, layer, torch.tensor([0]), torch.ones(1), entropy_gradient=True
    )
    (gradient,) = torch.autograd.grad(entropy.sum(), layer.weight)
    rare = 1 / (1 + torch.e)  # H = −p log p − q log q; dH/dz = −p (log p + H)
    slope = -rare * torch.log(torch.tensor(rare)) - rare * entropy.detach()
    torch.testing.assert_close(
        gradient[:, 0], torch.stack([slope[0], -slope[0], *[slope[0] * 0] * 2])
    )


def test_under_autocast_softmax_stays_in_float32():
    hidden, layer, targets = drawn(bias=False)
    with torch.autocast("cpu", torch.bfloat16):
        logprobs, entropy = completion_logprobs(hidden, layer, targets, torch.ones(N))
    assert logprobs.dtype == torch.float32
    rounded = hidden.bfloat16() @ layer.weight.bfloat16().T
    table = rounded.float().log_softmax(-1)
    torch.testing.assert_close(logprobs, table.gather(1, targets[:, None])[:, 0])
    torch.testing.assert_close(entropy, -(table.exp() * table).sum(-1), rtol=1e-5, atol=1e-6)
    logprobs.sum().backward()
    assert hidden.grad.dtype == layer.weight.grad.dtype == torch.float32


def test_the_gradient_of_a_nearly_certain_token_survives_probabilities_that_are_kept_in_bfloat16():
    layer = nn.Linear(2, 3, bias=False)
    layer.weight.data = torch.tensor([[8.0, 0.0], [0.0, 1.0], [0.0, 2.0]])
    hidden = torch.tensor([[1.0, 0.0]], requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        found, _ = completion_logprobs(hidden, layer, torch.tensor([0]), torch.ones(1))
    found.sum().backward()
    rest = 2 / (torch.e**8 + 2)  # 1 − p = 6.7e-4, which bfloat16 holds, though not next to 1
    torch.testing.assert_close(hidden.grad[0, 0], torch.tensor(8 * rest), rtol=1e-2, atol=0)


@pytest.mark.parametrize(("kept", "chunk"), [(N - 1, 6), (N, N)])
def test_no_tensor_is_larger_than_a_chunk_and_no_wide_one_than_a_tile(monkeypatch, kept, chunk):
    """Where all probabilities are kept, all positions are one chunk."""
    monkeypatch.setattr(module, "CHUNK_BYTES", 6 * V * 2)
    monkeypatch.setattr(module, "TILE_BYTES", 2 * V * 4)
    monkeypatch.setattr(module, "KEPT_BYTES", kept * V * 2)
    assert _largest() == {torch.bfloat16: chunk, torch.float32: 2}


def _largest() -> dict[torch.dtype, int]:
    """Rows of the largest [rows, V] tensor of each dtype, in a pass forward and backward under
    autocast."""
    largest = {torch.bfloat16: 0, torch.float32: 0}

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            output = function(*arguments, **(options or {}))
            for tensor in output if isinstance(output, (tuple, list)) else [output]:
                # D: the weight, transposed
                if tensor is not None and tensor.shape[1:] == (V,) and len(tensor) != D:
                    largest[tensor.dtype] = max(largest[tensor.dtype], len(tensor))
            return output

    hidden, layer, targets = drawn(bias=False)
    with Watch(), torch.autocast("cpu", torch.bfloat16):
        completion_logprobs(hidden, layer, targets, torch.ones(N))[0].sum().backward()
    return largest


def test_logits_of_bfloat16_factors_are_float32_where_the_device_makes_them_so(monkeypatch):
    """In the forward pass and where the backward pass makes them again; on meta tensors, which have
    a GPU's operations."""
    dtypes = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            output = function(*arguments, **(keywords or {}))
            if function.name().startswith("aten::mm"):
                dtypes.append(output.dtype)
            return output

    with torch.device("meta"):
        head = nn.Linear(8, 50, dtype=torch.bfloat16)  # its bias keeps it from the kernels
        hidden = torch.empty(7, 8, dtype=torch.bfloat16, requires_grad=True)
        targets = torch.empty(7, dtype=torch.int64)
        temperature = torch.empty(7)
    with autocast_on_meta(monkeypatch):
        module._product(hidden.detach(), head.weight.detach())  # whether it can is tried once
    with autocast_on_meta(monkeypatch), Products():
        logprobs, _ = completion_logprobs(hidden, head, targets, temperature)
        probabilities_kept = len(logprobs.grad_fn.probabilities)
        logprobs.grad_fn.probabilities.clear()
        logprobs.sum().backward()
    narrow, wide = torch.bfloat16, torch.float32
    assert (probabilities_kept, dtypes) == (1, [wide, wide, narrow, narrow])
    assert (hidden.grad.dtype, head.weight.grad.dtype, head.bias.grad.dtype) == (narrow,) * 3
