"""Each precision of a pass against float32, and that the process is left as it was."""

import pytest
import torch

from quiver.stages.model.forward.policy import Policy, compute_logprobs
from quiver.stages.model.forward.precision import (
    choose_precision,
    narrow,
    onednn_is_exact,
    products,
)
from quiver.stages.model.forward.verify import choose_mode
from tests.stages.model.forward import test_encoder_decoder, test_policy

CPU = torch.device("cpu")
FLOAT32_BY = "medium" if onednn_is_exact() else "highest"


def _policy(kind: str, precision: str) -> tuple[Policy, list, object]:
    """A tiny model with that precision, micro-batches, and their rollouts."""
    made = test_encoder_decoder if kind == "t5" else test_policy
    data, groups = made._data()
    policy = Policy(made._model(kind), autocast=precision == "bf16")
    choose_mode(policy, data, groups, "shared")
    if precision == "bf16_pure":
        narrow(policy.model)
    return policy, policy.microbatches(range(len(groups)), groups, data, 40), data


def _gradient(policy: Policy, micros: list, data) -> torch.Tensor:
    with policy.context():
        for micro in micros:
            policy(policy.layout(micro, data))[0].square().sum().backward()
    return torch.cat([p.grad.flatten() for p in policy.parameters()])


@pytest.mark.parametrize("precision", ["bf16", "bf16_pure"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "t5"])
def test_a_pass_is_float32s_up_to_its_precision(kind, precision):
    """bfloat16 rounds by 2^-9 = 0.002 at most, each of some ten results on the way, among them
    logits of 1 to 5."""
    exact, rounded = _policy(kind, "fp32"), _policy(kind, precision)
    gap = (compute_logprobs(*rounded) - compute_logprobs(*exact)).abs()
    expected, found = _gradient(*exact), _gradient(*rounded)
    distance = float((found - expected).norm() / expected.norm())
    assert found.dtype == torch.float32
    assert 1e-4 < float(gap.mean()) < 0.03 and 1e-4 < distance < 0.1


def test_auto_is_the_devices():
    devices = CPU, torch.device("cuda")
    assert [choose_precision("auto", device) for device in devices] == ["fp32", "bf16"]
    assert [choose_precision("bf16_pure", device) for device in devices] == ["bf16_pure"] * 2


def test_the_setting_of_products_ends_with_the_context():
    before = torch.get_float32_matmul_precision()
    with pytest.raises(ZeroDivisionError), products(CPU):
        assert torch.get_float32_matmul_precision() == FLOAT32_BY
        1 / 0  # noqa: B018
    assert torch.get_float32_matmul_precision() == before == "highest"


def test_a_held_context_is_for_the_backward_pass_too():
    policy, micros, data = _policy("llama", "fp32")
    seen = []
    layer = policy.model.base_model.layers[0].mlp
    layer.register_forward_hook(
        lambda *_: seen.append(("forward", torch.get_float32_matmul_precision()))
    )
    layer.register_full_backward_hook(
        lambda *_: seen.append(("backward", torch.get_float32_matmul_precision()))
    )
    _gradient(policy, micros[:1], data)
    assert seen == [("forward", FLOAT32_BY), ("backward", FLOAT32_BY)]
    assert torch.get_float32_matmul_precision() == "highest"


def test_gradients_of_narrow_weights_add_up_in_float32():
    """512 times 2^-9 upon 1: in bfloat16 it would stay 1."""
    layer = torch.nn.Linear(1, 1, bias=False)
    narrow(layer)
    for value in [1.0] + [2.0**-9] * 512:
        layer(torch.tensor([[value]], dtype=torch.bfloat16)).sum().backward()
    assert layer.weight.dtype == torch.bfloat16
    assert layer.weight.grad.item() == 2.0


def test_narrow_rounds_weights_alone_and_gives_back_what_they_were():
    model = test_policy._model("llama")
    expected = {name: value.clone() for name, value in model.named_parameters()}
    before = narrow(model)
    assert model.lm_head.weight is model.base_model.embed_tokens.weight  # tied as they were
    assert {value.dtype for value in model.buffers()} == {torch.float32}
    for name, parameter in model.named_parameters():
        assert torch.equal(before[parameter], expected[name])
        assert torch.equal(parameter, expected[name].to(torch.bfloat16))


def test_the_faster_library_is_taken_where_its_error_is_that_of_float32():
    with products(CPU):
        a, b = torch.randn(64, 512), torch.randn(512, 300)
        product = a @ b
    exact = a.double() @ b.double()
    assert float((product - exact).norm() / exact.norm()) < 1e-6


def test_on_a_gpu_float32_products_are_left_as_they_are():
    before = torch.get_float32_matmul_precision()
    with products(torch.device("cuda")):
        assert torch.get_float32_matmul_precision() == before
