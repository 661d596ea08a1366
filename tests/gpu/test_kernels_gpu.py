"""The kernels of the forward pass on a CUDA device: their numbers against float64, whole passes with
and without them, and that nothing of a pass depends on when it is taken."""

import pytest
import torch

from quiver.stages.model.forward.gpu import choice, head
from tests.stages.model.forward import kernel_cases as cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]


@pytest.mark.parametrize("case", cases.CASES)
def test_a_kernel_gives_the_numbers_of_float64(case):
    tried = cases.CASES[case]
    assert cases.largest_gap(tried.answer("cuda"), tried.reference()) <= tried.tolerance


@pytest.mark.parametrize("case", cases.CASES)
def test_a_kernel_gives_the_same_bits_again(case):
    answers = [cases.CASES[case].answer("cuda") for _ in range(2)]
    assert all(torch.equal(*pair) for pair in zip(*(a.values() for a in answers), strict=True))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("kind", cases.PASSES)
def test_a_fused_pass_is_about_as_exact_as_the_models_own(kind, autocast):
    answers = cases.passes(kind, autocast=autocast, device="cuda")
    gap = cases.largest_gap(answers["plain"], answers["exact"])
    assert cases.largest_gap(answers["fused"], answers["exact"]) < 2 * gap + 1e-5
    assert answers["replaced"] == cases.PASSES[kind]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_heads_kernels_are_taken_here(dtype):
    assert head._is_right("cuda", dtype)


def test_a_product_of_bfloat16_is_float32_and_is_added_up_in_one_kernel():
    assert choice._abilities("cuda", torch.bfloat16) == (True, True)
    left, right = (torch.randn(256, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    exact = left.double() @ right.double()
    total = choice.float32_product(left, right)
    torch.testing.assert_close(total.double(), exact, rtol=1e-5, atol=1e-4)
    again = choice.float32_product(left, right, total)
    assert again is total
    torch.testing.assert_close(total.double(), 2 * exact, rtol=1e-5, atol=2e-4)


def test_a_gpu_has_kernels_and_a_cpu_has_none():
    assert choice.fits(torch.ones(1, device="cuda"))
    assert not choice.fits(torch.ones(1))
    assert not choice.fits(torch.ones(1, device="cuda", dtype=torch.float64))
