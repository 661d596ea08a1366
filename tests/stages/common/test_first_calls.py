"""Functions whose first call two threads may not make at once: all that torch hands to MKL, before
any model computes."""

import multiprocessing
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from quiver.stages.common.models.mkl_warmup import FUNCTIONS, make_first_calls

HEADER = Path(torch.__file__).parent / "include/ATen/cpu/vml.h"
FIRST_COSINES = """
import torch
from quiver.stages.common.models.mkl_warmup import make_first_calls
make_first_calls()
angles = torch.outer(torch.arange(639.0), 100_000 ** -torch.linspace(0, 1, 32)).repeat(1, 2)
assert torch.equal(angles.cos(), angles.cos())
"""


@pytest.mark.skipif(not HEADER.exists(), reason="this build of torch brings no headers")
def test_every_function_that_torch_hands_to_mkl_is_called():
    handed = re.findall(r"^IMPLEMENT_VML_MKL\((\w+),", HEADER.read_text(), re.MULTILINE)
    assert set(handed) == {*FUNCTIONS, "trunc"}


@pytest.mark.parametrize(
    "using",
    [
        "from quiver.stages.common.models import vllm_env; vllm_env.prepare('test')",
        "from quiver.stages.common.models.loading import load_model; load_model(None, dtype=None)",
        "from quiver.stages.reward.models.forward import _load; _load('/none', False, None)",
        "from quiver.stages.reward.functions.embedding import _load; _load('/none')",
    ],
)
def test_whoever_computes_made_them_first(using):
    """In a fork that has not made them."""

    def compute():
        make_first_calls.cache_clear()
        with suppress(Exception):
            exec(using)
        sys.exit(make_first_calls.cache_info().currsize != 1)

    fork = multiprocessing.get_context("fork").Process(target=compute)
    fork.start()
    fork.join()
    assert fork.exitcode == 0


@pytest.mark.slow
def test_the_first_cosines_of_a_process_are_right():
    """Without the first calls one process of ten to thirty failed, on a processor where torch takes
    MKL's AVX-512."""
    for _ in range(60):
        subprocess.run([sys.executable, "-c", FIRST_COSINES], check=True)
