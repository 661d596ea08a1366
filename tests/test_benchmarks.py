"""Benchmarks find every name of ours that they use, and the sides of them that are quick run."""

from __future__ import annotations

import ast
import json
import pkgutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from quiver.stages.model.memory import layers_of
from tests.benchmarks import data_path, growth, reward_servers, sharded_memory, store

FOLDER = Path(data_path.__file__).parent


def used_names(source: str) -> Iterator[str]:
    """Dotted names of ours that a benchmark imports, and those that it asks of what it imported."""
    tree = ast.parse(source)
    dotted = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("quiver"))
            dotted |= {
                alias.asname or "quiver": "quiver" for alias in node.names if alias.name == "quiver"
            }
        elif isinstance(node, ast.ImportFrom):
            package = "tests.benchmarks" if node.level else ""
            module = ".".join(filter(None, (package, node.module)))
            if module.partition(".")[0] in ("quiver", "tests"):
                names = {
                    alias.asname or alias.name: f"{module}.{alias.name}" for alias in node.names
                }
                dotted |= names
                yield from names.values()
    for node in ast.walk(tree):
        owner = node.value if isinstance(node, ast.Attribute) else None
        if isinstance(owner, ast.Name) and owner.id in dotted:
            yield f"{dotted[owner.id]}.{node.attr}"


def test_every_name_that_a_benchmark_uses_of_ours_exists():
    sources = [path.read_text() for path in FOLDER.glob("*.py")]
    names = sorted({name for source in sources for name in used_names(source)})
    assert len(names) > 50
    missing = []
    for name in names:
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError) as error:
            missing.append(f"{name}: {error}")
    assert missing == []


def test_a_name_is_seen_in_an_import_and_in_what_is_asked_of_it():
    source = "import quiver\nfrom quiver.stages.optimize import stage as optimize\nfrom .made import RUN\n"
    source += "import torch\noptimize.run(quiver.Store(torch.ones(1)))\n"
    assert sorted(used_names(source)) == [
        "quiver",
        "quiver.Store",
        "quiver.stages.optimize.stage",
        "quiver.stages.optimize.stage.run",
        "tests.benchmarks.made.RUN",
    ]


@pytest.fixture
def run_side(tmp_path, monkeypatch, capsys) -> Callable[..., dict]:
    """Be one side of a benchmark, in this process, at a small size; what it printed."""
    monkeypatch.setattr(data_path, "ROWS", 16 * 20)
    monkeypatch.setattr(store, "ROWS", 16)

    def run(module, *arguments: str) -> dict:
        command = [module.__name__, "--work", str(tmp_path), "--side", *arguments]
        monkeypatch.setattr(sys, "argv", command)
        module.main()
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    return run


def test_data_path_reads_what_it_made(run_side):
    run_side(data_path, "make", "--quick")
    answer = run_side(data_path, "read", "--quick")
    assert list(answer["seconds"]) == list(data_path.STEPS)
    assert answer["micros"] == 1


@pytest.mark.parametrize("case", [case for case in growth.CASES if "SmolLM2" not in case])
def test_growth_runs_each_stage_with_a_small_model(run_side, case):
    size = ("--case", case, "--rows", "16", "--times", "1")
    run_side(growth, "make", *size)
    assert run_side(growth, "stage", *size)["rows"] == 16


@pytest.mark.parametrize("side", store.SIDES)
def test_store_reads_in_each_format_what_it_wrote(run_side, side):
    assert run_side(store, side, "--step", "write")["bytes"] > 0
    assert run_side(store, side, "--step", "read")["sum"] > 0


def test_reward_servers_scores_each_row(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["reward_servers", "--quick"])
    reward_servers.main()
    rounds = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["rows"] for one in rounds] == [reward_servers.ROWS // 10] * 3


@pytest.mark.parametrize("size", [8, 64])
def test_a_rank_holds_of_70_billion_weights_what_the_shapes_say(size):
    """torch's own sharding of meta tensors, over ranks that are not there."""
    model = sharded_memory.model_of(sharded_memory.LLAMA_70B)
    share = sharded_memory.share_of(model, size)
    layers = [*layers_of(model)]
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        mesh = init_device_mesh("cpu", (size,))
        for module in (*layers, model):
            fully_shard(module, mesh=mesh)
        shards = [parameter.to_local() for parameter in model.parameters()]
    finally:
        distributed.destroy_process_group()
    assert share.weights == sum(shard.nbytes for shard in shards)
    assert len(layers) == 80
    assert share.weights == pytest.approx(4 * 70.554e9 / size, rel=1e-3)
