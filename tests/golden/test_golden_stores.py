"""Keys do not move: stores that an earlier Quiver wrote are done to this one, and what it left half
done is finished.

`stores/` and `expected.json` are frozen; `make_stores.py` says how they came about. The functions
below the imports are all of the program's interface that is used here.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest

from quiver.stages.common.runtime.runner import Call, find, perform, plan_of
from quiver.stages.common.store import Store
from quiver.stages.common.verification import verify

HERE = Path(__file__).parent
EXPECTED = json.loads((HERE / "expected.json").read_bytes())
NOTES = "asked.txt"
SHARING = ("generate", "reward", "logprobs")


class Answer(NamedTuple):
    """What a call came to. `ref`: None where it would have to be made, under `run_key`."""

    ref: str | None
    cached: bool
    run_key: str


def call_stage(
    entry: dict[str, Any], store: Path, *, lookup: bool = False, share: bool | None = None
) -> Answer:
    """Make the call of `entry` in this process; with `lookup`, only see whether it is done."""
    shared = entry["share"] if share is None else share
    call = Call(
        entry["stage"], entry["config"], store, entry["refs"], entry.get("into"), share=shared
    )
    outcome = find(call) if lookup else perform(call)
    if outcome is None:
        return Answer(None, False, plan_of(call).run_key)
    return Answer(outcome.ref, outcome.cached, Store(store).open(outcome.ref).manifest.run_key)


def check_store(store: Path) -> tuple[int, list[str]]:
    """How many versions there are, and what is wrong with their bytes, schemas and lineage."""
    count, errors = verify(Store(store))
    return count, list(map(str, errors))


def tag_moves(store: Path, run: str, name: str) -> list[tuple[str | None, str, str]]:
    """Before, after and key of each entry of a tag's journal; the last one's reference is what the
    tag holds."""
    entries = Store(store).history(run, name)
    assert (
        str(Store(store).resolve(f"{entries[-1].ref.partition('@')[0]}@{name}")) == entries[-1].ref
    )
    return [(entry.before, entry.ref, entry.key) for entry in entries]


def make_again(entry: dict[str, Any], store: Path) -> None:
    """`call_stage`, which runs the stage where the version is not there."""
    answer = call_stage(entry, store)
    assert (answer.ref, answer.cached) == (entry["ref"], True)


# -- fixtures


@pytest.fixture(scope="module")
def stores(tmp_path_factory) -> Iterator[Path]:
    """A copy of `stores/`; the inputs are the working directory, as they were when all was made."""
    folder = tmp_path_factory.mktemp("golden") / "stores"
    shutil.copytree(HERE / "stores", folder)
    path, modules, before = list(sys.path), set(sys.modules), Path.cwd()
    os.chdir(folder / "inputs")
    yield folder
    os.chdir(before)
    sys.path[:] = path
    for name in ({"model", "mine"} - modules) & sys.modules.keys():
        del sys.modules[name]


@pytest.fixture
def half(stores, tmp_path) -> Iterator[Path]:
    """The half-finished store, in which nothing was touched yet, and a file in which the user's
    functions note their rows."""
    store = tmp_path / "half"
    shutil.copytree(HERE / "stores/half", store)
    notes = stores / "inputs" / NOTES
    notes.touch()
    yield store
    notes.unlink()


def _versions(store: Path) -> set[Path]:
    return {path.relative_to(store).parent for path in store.rglob("v[0-9]*/manifest.json")}


def _hashes(store: Path) -> dict[Path, str]:
    return {path.relative_to(store): _sha256(path) for path in store.rglob("*") if path.is_file()}


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _folder(store: Path, ref: str) -> Path:
    run, _, rest = ref.partition("/")
    kind, _, number = rest.partition("@")
    return store / run / kind / f"v{int(number):06d}"


def _read(path: Path) -> pa.Table:
    return pa.ipc.open_file(pa.BufferReader(path.read_bytes())).read_all()


def _named(part: str) -> list[Any]:
    return [
        pytest.param(entry, id=f"{entry['stage']}: {entry['name']}") for entry in EXPECTED[part]
    ]


# -- finished


@pytest.mark.parametrize("entry", _named("finished"))
def test_what_was_finished_is_done_already(stores, entry):
    before = _versions(stores / "finished")
    assert call_stage(entry, stores / "finished", lookup=True) == (
        entry["ref"],
        True,
        entry["run_key"],
    )
    make_again(entry, stores / "finished")
    assert _versions(stores / "finished") == before


@pytest.mark.parametrize("entry", _named("keys"))
def test_what_was_never_made_has_the_key_that_it_would_have_had(stores, entry):
    assert call_stage(entry, stores / "finished", lookup=True) == (None, False, entry["run_key"])


@pytest.mark.parametrize("name", ["finished", "half"])
def test_the_stores_are_whole(stores, name):
    versions = _versions(HERE / "stores" / name)
    assert check_store(stores / name) == (len(versions), [])


def test_a_tag_has_its_journal(stores):
    first, second, third = (f"golden/policy@{number}" for number in range(3))
    moves = [(None, first, "base"), (first, second, "promote n1"), (second, third, "promote n2")]
    assert tag_moves(stores / "finished", "golden", "prod") == moves
    assert tag_moves(stores / "finished", "held", "best") == [(None, "held/evaluations@2", "")]


def test_nothing_that_was_there_is_changed(stores):
    """The last to look at this copy: whatever was asked of it, its files are what they were."""
    for name in ("finished", "half"):
        assert _hashes(HERE / "stores" / name).items() <= _hashes(stores / name).items()


# -- half


def test_what_is_staged_is_what_was_noted():
    """Else a checkout changed line ends or left files out, and the tests below would test
    nothing."""
    for entry in EXPECTED["half"]:
        staged = HERE / "stores/half" / entry["staging"]
        assert staged.is_dir() and any(staged.iterdir())
        assert {name: _sha256(staged / name) for name in entry["shards"]} == entry["shards"]
        assert all((staged / name).is_file() for name in entry["torn"])
        assert _versions(HERE / "stores/half" / entry["into"]) == {
            Path(name).relative_to(entry["into"]) for name in entry["published"]
        }


@pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])
@pytest.mark.parametrize("entry", _named("half"))
def test_what_was_half_done_is_finished(stores, half, entry, shared):
    """Notes of that time had no checksum, so the staged shards are done again: the same rows."""
    if shared and entry["stage"] not in SHARING:
        pytest.skip("this stage's work is not shared")
    staged = half / entry["staging"]
    staged_shards = {name: _read(staged / name) for name in entry["shards"]}
    before = _versions(half)

    assert call_stage(entry, half, lookup=True) == (None, False, entry["run_key"])
    assert call_stage(entry, half, share=shared) == (entry["ref"], False, entry["run_key"])

    version = _folder(half, entry["ref"])
    beside = {version.relative_to(half)}
    if entry["stage"] == "optimize" and not entry["published"]:
        beside |= {Path(entry["into"], kind, "v000001") for kind in ("advantages", "updates")}
    assert _versions(half) - before == beside
    assert list((half / entry["into"]).glob("*/.staging/*")) == []
    for name, shard in staged_shards.items():
        _require_same(_read(version / name), shard)
    tables = [_read(path) for path in sorted(version.glob("part-*.arrow"))]
    assert sum(map(len, tables)) == entry["rows"]
    assert check_store(half)[1] == []
    column = {"generate": "seed", "reward": "rollout_id"}.get(entry["stage"])
    if column:  # what the user's own code was asked for: each row once
        rows = [str(value) for table in tables for value in table[column].to_pylist()]
        assert sorted((stores / "inputs" / NOTES).read_text().split()) == sorted(rows)
    if entry["published"]:  # the policy names what was published before it
        metrics = json.loads((version / "manifest.json").read_bytes())["metrics"]
        assert sorted(_folder(half, metrics[kind]) for kind in ("advantages", "updates")) == sorted(
            half / name for name in entry["published"]
        )
    make_again(entry, half)


def _require_same(table: pa.Table, expected: pa.Table) -> None:
    """Equal in every column, but for the last digits of logprobs, which another processor rounds
    otherwise."""
    exact = [name for name in expected.column_names if name != "logprobs"]
    assert table.select(exact).equals(expected.select(exact))
    if "logprobs" in expected.column_names:
        pairs = zip(table["logprobs"].to_pylist(), expected["logprobs"].to_pylist(), strict=True)
        assert all(logprobs == pytest.approx(before, abs=1e-5) for logprobs, before in pairs)


PLANNING = """
import json, os, subprocess, sys
started = []
def refuse(*command, **_):
    started.append(command)
    raise AssertionError("a process is started")
subprocess.Popen.__init__ = refuse
os.fork = os.posix_spawn = refuse
import quiver.stages.common.runtime.runner as runner
store, calls = sys.argv[1], json.load(sys.stdin)
for call in calls:
    outcome = runner.find(runner.Call(call["stage"], call["config"], store, call["refs"], call.get("into")))
    assert (outcome and outcome.ref) == call["ref"], call
print(len(calls), started, sorted({"torch", "transformers", "vllm", "accelerate", "prefect"} & set(sys.modules)))
"""


def test_looking_for_what_is_finished_starts_nothing_and_imports_nothing_heavy(stores):
    """Of every stage. Rows that a function makes have to be made to know which they are; its file
    is the user's own, and imports what it likes. For what else a user programmed see below."""
    calls = [
        entry for entry in EXPECTED["finished"] if ":" not in entry["config"].get("source", "")
    ]
    done = subprocess.run(
        [sys.executable, "-c", PLANNING, str(stores / "finished")],
        input=json.dumps(calls),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == f"{len(calls)} [] []\n", done.stderr
    assert {call["stage"] for call in calls} == {entry["stage"] for entry in EXPECTED["finished"]}


NOTING = """
with open("ran.txt", "a") as notes:
    notes.write("x")
import torch
"""
RESOLVING = """
import json, sys
from quiver.stages.common.runtime.stage import load
stage = load("optimize")
for config in json.load(sys.stdin):
    print(stage.resolve(stage.Config(**config)).model_dump_json())
"""


def _python(script: str, stdin: str, *arguments: str) -> list[str]:
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_planning_what_a_user_programmed_does_not_run_it(stores):
    """An algorithm and a base model of one's own, which import torch and note that they ran. What
    an algorithm leaves to its file is asked of it once, by `resolve`, and its key stays."""
    for name, source in (("noting_algo", "algo"), ("noting_model", "model")):
        whole = Path(f"{source}.py").read_text()
        Path(f"{name}.py").write_text(f"{whole}\n{NOTING}")
    trained = next(entry for entry in EXPECTED["finished"] if "algo.py" in str(entry["config"]))
    noting = {**trained["config"], "algorithm": "noting_algo.py:ALGORITHM"}
    configs = _python(RESOLVING, json.dumps([trained["config"], noting]))
    resolved, noting = map(json.loads, configs)
    assert Path("ran.txt").read_text() == "x" and resolved["clip_high"] == 0.3

    finished = str(stores / "finished")
    call = {**trained, "config": resolved}
    assert _python(PLANNING, json.dumps([call]), finished) == ["1 [] []"]
    base = {"stage": "policy", "config": {"model": "noting_model.py:make"}, "refs": {}, "into": "b"}
    calls = [{**base, "ref": None}, {**trained, "config": noting, "ref": None}]
    assert _python(PLANNING, json.dumps(calls), finished) == ["2 [] []"]
    assert Path("ran.txt").read_text() == "x"
