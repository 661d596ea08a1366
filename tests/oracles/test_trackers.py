"""Each tracker for real, offline: two trainings and an evaluation fill one run, which is read back
from what the tracker wrote.

`make oracle` installs them into `.trackers`; without them the tests skip.
"""

import importlib.util
import json
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from quiver.stages.evaluate.stage import Config
from tests.stages.optimize import world
from tests.writing import run_here

pytestmark = pytest.mark.oracle
Curves = dict[str, list[tuple[int, float]]]


def wandb(folder: Path) -> Iterator[tuple[str, Curves]]:
    """Run and curves of each process. The file: 7 bytes, then LevelDB's log of protobufs."""
    from wandb.proto.wandb_internal_pb2 import Record

    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        data = path.read_bytes()
        at = 7
        record = b""
        curves: Curves = {}
        while at + 7 < len(data):
            left_in_block = 2**15 - at % 2**15
            if left_in_block < 7:
                at += left_in_block
                continue
            size, place = struct.unpack_from("<HB", data, at + 4)
            record += data[at + 7 : at + 7 + size]
            at += 7 + size
            if place in (1, 4):  # whole, or the last piece
                parsed = Record.FromString(record)
                record = b""
                items = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json)
                    for item in parsed.history.item
                }
                for name, value in items.items():
                    curves.setdefault(name, []).append((items["step"], value))
        yield path.stem.removeprefix("run-"), curves


def mlflow(folder: Path) -> Iterator[tuple[str, Curves]]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("quiver")
    for run in client.search_runs([experiment.experiment_id]):
        history = partial(client.get_metric_history, run.info.run_id)
        yield (
            run.data.tags["quiver"],
            {name: [(m.step, m.value) for m in history(name)] for name in run.data.metrics},
        )


def trackio(folder: Path) -> Iterator[tuple[str, Curves]]:
    from trackio.sqlite_storage import SQLiteStorage

    for run in SQLiteStorage.get_runs("quiver"):
        curves: Curves = {}
        for row in SQLiteStorage.get_logs("quiver", run):
            for name, value in row.items():
                curves.setdefault(name, []).append((row["step"], value))
        yield run, curves


@pytest.mark.parametrize("read", [wandb, mlflow, trackio], ids=lambda read: read.__name__)
def test_two_trainings_and_an_evaluation_are_one_run(
    store, policy, tmp_path, monkeypatch, read: Callable[[Path], Any]
):
    name = read.__name__
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed: make oracle")
    folder = tmp_path / "logs"
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(folder / "trackio"))
    for module in [each for each in sys.modules if each.partition(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, module)  # another test's: it reads its folder once
    made = world.make(store, policy, world.even_share)
    config = world.config(trackers=[name], tracker_folder=str(folder), max_staleness=1)
    first = world.trained(store, policy, made, config)
    world.trained(store, first, made, config)
    ref = run_here("evaluate", Config(), store, rollouts=made[0].ref, rewards=made[1].ref)
    call = {"trackers": [name], "folder": str(folder), "store": store.url, "ref": str(ref)}
    subprocess.run(
        [sys.executable, "-m", "quiver.stages.optimize.tracking"],
        input=json.dumps(call),
        text=True,
        check=True,
    )
    curves: Curves = {}
    runs = list(read(folder))
    assert {run for run, _ in runs} == {f"tiny-{store.id[:8]}"}
    for _, piece in runs:
        for key, points in piece.items():
            curves.setdefault(key, []).extend(points)
    assert [step for step, _ in curves["loss"]] == [0, 1]
    cut = made[0].table()["finish_reason"].to_pylist().count("length") / made[0].manifest.rows
    of_the_start = [(step, pytest.approx(cut)) for step in (0, 1)]
    assert curves["completion_tokens/truncated"] == of_the_start, "where each training begins"
    score = store.open(ref).manifest.metrics["score"]
    assert curves["evaluation/score"] == [(0, pytest.approx(score))]
