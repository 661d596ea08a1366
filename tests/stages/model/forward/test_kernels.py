"""The GPU's kernels without a GPU: their numbers by Triton's interpreter, in a child process,
against float64; and their code for an H100 by Triton's compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import triton
from transformers import AutoModelForCausalLM, GPTJConfig
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from quiver.stages.model.forward import modules
from quiver.stages.model.forward.gpu import choice, head, operations
from tests.stages.model.forward import kernel_cases as cases

ROOT = Path(__file__).parents[4]


def child(*command: str, **environment: str) -> None:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    subprocess.run(
        [sys.executable, "-W", "ignore", *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "PYTEST_ADDOPTS": "", **environment},
        check=True,
    )


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory) -> dict:
    """What the kernels give when Triton interprets them."""
    path = tmp_path_factory.mktemp("kernels") / "answers.pt"
    child("-m", cases.__name__, str(path), TRITON_INTERPRET="1")
    return torch.load(path)


@pytest.mark.parametrize("case", cases.CASES)
def test_a_kernel_gives_the_numbers_of_float64(case, interpreted):
    expected = cases.CASES[case].reference()
    assert cases.largest_gap(interpreted[case], expected) <= cases.CASES[case].tolerance


@pytest.mark.parametrize("name", [*cases.PASSES, *cases.WAYS])
def test_a_fused_pass_gives_the_numbers_and_gradients_of_the_model(name, interpreted):
    """Parts that another family computes otherwise stay; other ways of training have kernels."""
    answers = interpreted[name]
    assert cases.largest_gap(answers["fused"], answers["exact"]) < 1e-5
    assert answers["replaced"] == {**cases.PASSES, **cases.WAYS}[name]


@pytest.mark.parametrize("kind", cases.NARROW)
def test_a_fused_pass_in_bfloat16_is_about_as_exact_as_the_model(kind, interpreted):
    # a CPU's attention has queries and keys in float32, a GPU's in bfloat16 with kernels or without
    answers = interpreted[f"{kind} in bfloat16"]
    gap = cases.largest_gap(answers["plain"], answers["exact"])
    assert cases.largest_gap(answers["fused"], answers["exact"]) < 2 * gap
    assert answers["replaced"] == cases.PASSES[kind]


@pytest.mark.parametrize("stranger", cases.strangers(), ids=lambda module: type(module).__name__)
def test_what_gives_other_numbers_or_gradients_stays(stranger, interpreted):
    """Where states stand out, or by the gradients alone; or what it returns is of another kind."""
    assert not interpreted["strangers"][type(stranger).__name__]


def test_the_rotation_makes_norms_that_stand_right_before_it(interpreted):
    assert interpreted["norms"] == {"Qwen3Attention": True, "NormedLate": False}


def test_where_tf32_is_allowed_its_last_digits_may_differ(interpreted):
    assert interpreted["coarse"] == {"highest": 0, "high": 1}


def test_it_is_told_once_what_stays_because_its_numbers_differ(interpreted):
    of_norms, of_head = interpreted["told"]
    assert of_norms == (
        "INFO Clipped: runs without kernels, because they would compute something else"
    )
    assert of_head.startswith("INFO products of torch.float16 do not stay in float32 here")


def test_attention_that_is_called_in_another_way_is_no_reason_to_warn(monkeypatch, caplog):
    monkeypatch.setattr(choice, "DEVICES", {"cpu"})
    model = AutoModelForCausalLM.from_config(
        GPTJConfig(vocab_size=9, n_embd=32, n_layer=1, n_head=2, rotary_dim=8)
    )
    with caplog.at_level("INFO"):
        assert modules.fuse_modules(model) == 0
    (told,) = [record for record in caplog.records if record.name == modules.log.name]
    assert told.levelname == "INFO"
    assert told.getMessage().startswith("GPTJAttention")


def test_a_rotation_of_a_part_of_a_head_is_the_models_own(monkeypatch):
    def turn_first_half(queries, keys, cosines, sines):
        return queries + 1, keys + 1

    monkeypatch.setattr(choice, "DEVICES", {"cpu"})
    queries, positions = torch.ones(1, 2, 3, 8), torch.ones(1, 3, 4)
    turned, _ = modules.rotate(turn_first_half, queries, queries, positions, positions)
    assert torch.equal(turned, queries + 1)


@pytest.mark.slow
def test_stages_train_by_the_kernels():
    """Whole stages: adapters with a critic, and a pass under bfloat16."""
    lora = "test_lora.py::test_a_critics_head_is_trained_beside_the_adapters"
    bf16 = "test_optimize_goes_on.py::test_bf16_autocast_trains_and_saves_what_an_engine_loads"
    tests = [f"tests/stages/optimize/{name}" for name in (lora, bf16)]
    child("-m", "pytest", "-p", "tests.interpreted_kernels", "-p", "no:cacheprovider", *tests)


# -- compiled for a GPU that is not here


def launches(run: Callable[[], object]) -> list[tuple]:
    """The kernels that `run` would launch on a GPU: each with its arguments and options."""
    launched = []

    def launch(kernel, *arguments, grid, warmup, **options):
        launched.append((kernel, arguments, options))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.runtime.JITFunction, "run", launch)
        run()
    return launched


def code(kernel, arguments, options) -> str:
    """Its PTX for an H100."""
    names = [parameter.name for parameter in kernel.params]
    constants = {name: options[name] for name in names if name in options}
    types = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.int64: "i64"}
    signature = {}
    for name, argument in zip(names, arguments, strict=False):
        is_tensor = isinstance(argument, torch.Tensor)
        kind = "fp32" if isinstance(argument, float) else "i32"
        signature[name] = f"*{types[argument.dtype]}" if is_tensor else kind
    signature |= dict.fromkeys(constants, "constexpr")
    compiled = triton.compile(
        ASTSource(kernel, signature, constexprs=constants),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": options.get("num_warps", 4)},
    )
    return compiled.asm["ptx"]


def _heads() -> None:
    logits = torch.empty(2, 151936)
    targets, factors = torch.empty(2, dtype=torch.int64), torch.empty(2)
    for collision in (False, True):
        rows = operations.head(logits, targets, factors, collision)
    for grads in (None, factors):
        operations.head_slope(logits, targets, factors, rows, factors, grads, torch.bfloat16)


def _norm(width: int, states: torch.dtype, weight: torch.dtype) -> None:
    states, weight = torch.empty(64, width, dtype=states), torch.empty(width, dtype=weight)
    output, scales = operations.norm(states, weight, 1e-6, torch.bfloat16)
    operations.norm_slope(output, None, states, weight, scales, None)


def _add_norm(width: int, states: torch.dtype) -> None:
    states, weight = torch.empty(64, width, dtype=states), torch.empty(width, dtype=states)
    branch = torch.empty(64, width, dtype=torch.bfloat16)
    total, output, scales = operations.add_norm(states, branch, weight, 1e-6, torch.bfloat16)
    for branch_dtype in (None, torch.bfloat16):
        operations.norm_slope(output, total, total, weight, scales, branch_dtype)


def _gate() -> None:
    gate, up = torch.empty(3, 2 * 4864, dtype=torch.bfloat16).split(4864, 1)
    operations.gate_slope(operations.gate(gate, up), gate, up)


def _rotate(width: int, positions: torch.dtype, *, has_norms: bool = False) -> None:
    before = tuple(torch.empty(9, n, width, dtype=torch.bfloat16) for n in (14, 2))
    cosines = torch.empty(9, width, dtype=positions)
    weight = torch.empty(width)
    norms = operations.Norms(weight, weight, 1e-6) if has_norms else None
    positions, dtypes = (cosines, cosines), [torch.bfloat16] * 2
    *turned, _ = operations.rotate(*before, *positions, dtypes, norms)
    operations.rotate(*turned, *positions, dtypes, norms, inverse=True, before=before)


def _merge() -> None:
    output, log_sums = torch.empty(9, 14, 128, dtype=torch.bfloat16), torch.empty(14, 9)
    operations.merge(output, log_sums, output, log_sums)


BF16, FP32 = torch.bfloat16, torch.float32
CALLS = {
    "head": (_heads, 4),
    "norm of states": (partial(_norm, 896, FP32, FP32), 2),
    "norm of wide states": (partial(_norm, 3584, FP32, FP32), 2),
    "norm in bfloat16": (partial(_norm, 2048, BF16, BF16), 2),
    "norm of heads": (partial(_norm, 128, BF16, FP32), 2),
    "sum and norm": (partial(_add_norm, 3584, FP32), 3),
    "sum and norm in bfloat16": (partial(_add_norm, 896, BF16), 3),
    "gate": (_gate, 2),
    "rotation": (partial(_rotate, 128, FP32), 2),
    "rotation in bfloat16": (partial(_rotate, 64, BF16), 2),
    "norms and rotation": (partial(_rotate, 128, FP32, has_norms=True), 2),
    "merge": (_merge, 1),
}


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("call", CALLS)
def test_a_kernel_compiles_for_an_h100(call, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    run, number = CALLS[call]
    programs = [code(*launch) for launch in launches(run)]
    assert len(programs) == number
    assert all(".target sm_90" in program for program in programs)


# -- where Triton does not run


def test_a_model_stays_as_it_is_where_the_kernels_do_not_run(monkeypatch, caplog):
    """Here, for one, where there is no GPU that they could be compiled for."""
    monkeypatch.setattr(choice, "DEVICES", {"cpu"})
    head._is_right.cache_clear()
    with caplog.at_level("WARNING"):
        answers = cases.passes("qwen3")
    head._is_right.cache_clear()
    assert answers["replaced"] == 0
    assert cases.largest_gap(answers["fused"], answers["exact"]) < 1e-5
    told = [record.getMessage().split(" do not run here")[0] for record in caplog.records]
    kinds = ("DecoderLayer", "Attention", "MLP", "RMSNorm")
    assert sorted(told) == sorted(
        ["the head's kernels", *(f"Qwen3{kind}: its kernels" for kind in kinds)]
    )
