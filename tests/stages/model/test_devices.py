"""The machine that a model runs on: its device, the memory that vLLM's cache is taken from, and the
functions whose first call two threads may not make at once."""

import itertools
import multiprocessing
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from quiver.schemas.errors import ConfigError
from quiver.stages.model import devices
from quiver.stages.model.devices import available_bytes, next_gpus, seeing_only, uses_gpu
from quiver.stages.model.mkl_warmup import FUNCTIONS, make_first_calls
from quiver.stages.model.vllm_env import cpu_cache_bytes, free_bytes


@pytest.fixture
def nodes(tmp_path, monkeypatch):
    """As /dev of a machine with two GPUs, none of which torch sees."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("nvidia0", "nvidia1", "nvidiactl", "null"):
        (tmp_path / name).touch()
    return tmp_path


def test_auto_is_no_cpu_in_silence_where_there_is_a_gpu(nodes):
    with pytest.raises(ConfigError, match=r"there is a GPU, .*nvidia0, but torch sees none") as no:
        uses_gpu("generate.device", "auto", nodes)
    assert no.value.object == "generate.device auto"
    assert not uses_gpu("generate.device", "cpu", nodes)
    with pytest.raises(ConfigError, match="torch sees no GPU"):
        uses_gpu("generate.device", "cuda", nodes)


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_a_gpu_that_is_hidden_on_purpose_is_none(nodes, monkeypatch, hidden):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert not uses_gpu("generate.device", "auto", nodes)


def test_without_a_gpu_auto_is_the_cpu(nodes):
    for name in ("nvidia0", "nvidia1"):
        (nodes / name).unlink()
    assert not uses_gpu("generate.device", "auto", nodes)


@pytest.mark.parametrize(
    ("there", "sizes", "numbers"),
    [(1, (1, 1), [[0], [0]]), (3, (1, 2, 1), [[0], [1, 2], [0]]), (1, (2,), [[0]])],
)
def test_models_of_one_process_take_turns_at_its_gpus(monkeypatch, there, sizes, numbers):
    monkeypatch.setattr(devices, "_turns", itertools.count())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    assert [next_gpus(size) for size in sizes] == numbers


def test_what_is_started_sees_the_gpus_of_its_model_alone(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-a,6")
    with seeing_only([1, 2]):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "GPU-a,6"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,GPU-a,6"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with seeing_only([1]):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


# -- vLLM's cache on a CPU, by the files of Linux's NUMA nodes

CONFIG = {
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
}
MEMINFO = """Node {node} MemTotal:       {total} kB
Node {node} MemFree:        {free} kB
Node {node} MemUsed:        5000 kB
Node {node} Active(file):     30 kB
Node {node} Inactive(file):   20 kB
Node {node} HugePages_Total:     0
"""


@pytest.mark.parametrize(
    ("sizes", "kilobytes"),
    [
        ([(9000, 800)], 850),
        ([(9000, 800), (9000, 700)], 750),
        ([(9000, 800), (0, 0)], 850),  # a node without memory
    ],
)
def test_the_fullest_node_decides(tmp_path, sizes, kilobytes):
    for number, (total, free) in enumerate(sizes):
        (tmp_path / f"node{number}").mkdir()
        text = MEMINFO.format(node=number, total=total, free=free)
        (tmp_path / f"node{number}/meminfo").write_text(text)
    assert free_bytes(tmp_path) == kilobytes * 1024


def test_without_nodes_it_is_the_machines(tmp_path):
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < free_bytes(tmp_path) <= pages


def test_a_cache_holds_all_sequences_or_what_there_is_room_for():
    token = 2 * 30 * 3 * 64 * 4
    assert cpu_cache_bytes(CONFIG, 96, 100, 4) == 100 * token * (96 + 32)
    gpt2 = {"model_type": "gpt2", "n_layer": 30, "n_head": 3, "n_embd": 3 * 64}
    assert cpu_cache_bytes(gpt2, 96, 100, 4) == 100 * token * (96 + 32)
    most = cpu_cache_bytes(CONFIG, 4000, 10**6, 4)
    assert most <= free_bytes() and most >= token * 4032


# -- first calls, of all that torch hands to MKL

HEADER = Path(torch.__file__).parent / "include/ATen/cpu/vml.h"
FIRST_COSINES = """
import torch
from quiver.stages.model.mkl_warmup import make_first_calls
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
        "from quiver.stages.model import vllm_env; vllm_env.prepare('test')",
        "from quiver.stages.model.loading import load_model; load_model(None, dtype=None)",
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


def test_memory_of_other_processes_is_not_available(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (50, 80))
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda device: 20)
    assert available_bytes(torch.device("cuda")) == 70
    assert available_bytes(torch.device("cpu")) == 0
