"""On which device a model goes, by what torch sees and what the machine has."""

import itertools
import os

import pytest
import torch

from quiver.schemas.errors import ConfigError
from quiver.stages.common.models import devices
from quiver.stages.common.models.devices import next_gpus, seeing_only, uses_gpu


@pytest.fixture
def nodes(tmp_path, monkeypatch):
    """As /dev of a machine with two GPUs, none of which torch sees."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("nvidia0", "nvidia1", "nvidiactl", "null"):
        (tmp_path / name).touch()
    return tmp_path


def test_auto_is_no_cpu_in_silence_where_there_is_a_gpu(nodes):
    with pytest.raises(ConfigError, match=r"there is a GPU, .*nvidia0, and torch sees none") as no:
        uses_gpu("generate.device", "auto", nodes)
    assert no.value.object == "generate.device auto"
    assert not uses_gpu("generate.device", "cpu", nodes)


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_a_gpu_that_is_hidden_on_purpose_is_none(nodes, monkeypatch, hidden):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert not uses_gpu("generate.device", "auto", nodes)


def test_without_a_gpu_auto_is_the_cpu_and_cuda_is_refused(nodes):
    for name in ("nvidia0", "nvidia1"):
        (nodes / name).unlink()
    assert not uses_gpu("generate.device", "auto", nodes)
    with pytest.raises(ConfigError, match="torch sees no GPU"):
        uses_gpu("generate.device", "cuda", nodes)


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
