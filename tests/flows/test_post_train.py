"""The main flow through the command line: a tiny model, real stages in child processes, Prefect's embedded server."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from stages.common.store import Store
from tests.flows.conftest import command_environment, quiver, write_recipe

pytestmark = pytest.mark.prefect


@pytest.fixture(scope="module")
def result(workplace) -> dict:
    return quiver(workplace, "run", "recipe.toml")


def names(store: Store) -> set[str]:
    return {str(version.ref) for version in store.versions()}


def test_the_contract_of_run(workplace, result):
    assert result["run"] == "tiny"
    assert [done["iteration"] for done in result["iterations"]] == [1, 2]
    assert [done["policy"] for done in result["iterations"]] == ["tiny/policy@1", "tiny/policy@2"]
    store = Store(workplace / "store")
    for done in result["iterations"]:
        rollouts = store.open(done["rollouts"])
        assert rollouts.manifest.rows == 16
        assert rollouts.manifest.input("prompts").ref == done["prompts"]
        rewards = store.open(done["rewards"]).table()["reward"].to_pylist()
        assert done["reward_mean"] == pytest.approx(sum(rewards) / 16, abs=1e-6)
        assert set(done["seconds"]) >= {"prompt", "generate", "reward", "optimize"}
    last = result["iterations"][-1]["evaluation"]
    assert last["n"] == last["baseline"]["n"] == 3
    assert last["stderr"] > 0
    assert store.open("tiny/rollouts@2").manifest.model("policy").ref == "tiny/policy@1"
    prompts = [set(store.open(done["prompts"]).table()["group_id"].to_pylist()) for done in result["iterations"]]
    assert prompts[0] | prompts[1] == {f"{row:06d}" for row in range(8)}, "two iterations of four see all eight rows"


def test_again_is_already_done(workplace, result):
    before = names(Store(workplace / "store"))
    again = quiver(workplace, "run", "recipe.toml")
    assert names(Store(workplace / "store")) == before
    without_seconds = [[{**done, "seconds": None} for done in each["iterations"]] for each in (result, again)]
    assert without_seconds[0] == without_seconds[1]


def test_one_more_iteration_adds_only_itself(workplace, result):
    before = names(Store(workplace / "store"))
    longer = quiver(workplace, "run", "recipe.toml", "--iterations", "3")
    assert longer["iterations"][:1] == [{**result["iterations"][0], "seconds": longer["iterations"][0]["seconds"]}]
    added = names(Store(workplace / "store")) - before
    assert {ref for ref in added if not ref.startswith("tiny.eval")} == {
        "tiny/prompts@3", "tiny/rollouts@3", "tiny/rewards@3", "tiny/policy@3", "tiny/advantages@3", "tiny/updates@3",
        "tiny/evaluations@3",
    }  # fmt: skip


def test_rescore_and_train_again_without_generation(workplace, result):
    before = Store(workplace / "store").numbers("tiny", "rollouts")
    length = "reward.functions=[{use='length',arguments={target=3}}]"
    rescored = quiver(workplace, "reward", "recipe.toml", "--rollouts", "tiny/rollouts@1", "--set", length)
    assert rescored["cached"] is False and rescored["rows"] == 16
    trained = quiver(workplace, "optimize", "recipe.toml", "--rollouts", "tiny/rollouts@1", "--rewards", rescored["ref"])
    store = Store(workplace / "store")
    policy = store.open(trained["ref"])
    assert policy.manifest.input("policy").ref == "tiny/policy@0"
    assert policy.manifest.input("rewards").ref == rescored["ref"]
    assert store.numbers("tiny", "rollouts") == before
    again = quiver(workplace, "optimize", "recipe.toml", "--rollouts", "tiny/rollouts@1", "--rewards", rescored["ref"])
    assert (again["ref"], again["cached"]) == (trained["ref"], True)


def test_optimize_where_vllm_can_not_be_imported(workplace, result, tmp_path):
    (tmp_path / "vllm.py").write_text("raise ImportError('there is no vllm here')\n")
    path = f"{tmp_path}{os.pathsep}{os.getcwd()}"
    arguments = ["optimize", "recipe.toml", "--rollouts", "tiny/rollouts@2", "--set", "optimize.learning_rate=2e-3"]
    assert quiver(workplace, *arguments, PYTHONPATH=path)["cached"] is False


def test_a_changed_weight_is_refused(workplace, result):
    """The same rollouts with a policy that did not sample them: optimize names both hashes."""
    arguments = ["optimize", "recipe.toml", "--rollouts", "tiny/rollouts@1", "--policy", "tiny/policy@1"]
    error = quiver(workplace, *arguments, code=5)["error"]
    store = Store(workplace / "store")
    sampled, given = (store.open(ref).manifest.content_hash for ref in ("tiny/policy@0", "tiny/policy@1"))
    assert sampled != given and error["code"] == "E-LINEAGE"
    assert "policy" in error["message"]


def test_the_store_explains_itself(workplace, result):
    listed = {version["ref"]: version for version in quiver(workplace, "ls", "tiny")["versions"]}
    assert listed["tiny/rollouts@1"]["rows"] == 16 and listed["tiny/rollouts@1"]["stage"] == "generate"
    shown = quiver(workplace, "show", "tiny/rewards@1", "-n", "2")
    assert len(shown["rows"]) == 2 and shown["manifest"]["schema"] == "rewards/1"
    traced = quiver(workplace, "lineage", "tiny/policy@1")
    flat = json.dumps(traced)
    assert traced["ref"] == "tiny/policy@1"
    assert all(ref in flat for ref in ("tiny/policy@0", "tiny/prompts@1", "tiny/rollouts@1", "tiny/rewards@1"))
    differences = quiver(workplace, "diff", "tiny/rollouts@1", "tiny/rollouts@2")
    assert differences["changed"]["config.iteration"] == [1, 2]
    assert differences["rows"]["both"] == 0
    checked = quiver(workplace, "verify")
    assert checked["bad"] == [] and checked["checked"] == len(quiver(workplace, "ls")["versions"])


def test_verify_finds_a_flipped_bit(workplace, result):
    path = Store(workplace / "store").open("tiny/rewards@2").path / "part-00000.arrow"
    good = path.read_bytes()
    path.write_bytes(good[:300] + bytes([good[300] ^ 1]) + good[301:])
    found = quiver(workplace, "verify", "tiny/rewards@2", code=3)
    assert [bad["code"] for bad in found["bad"]] == ["E-CORRUPT"]
    path.write_bytes(good)
    assert quiver(workplace, "verify", "tiny/rewards@2")["bad"] == []


def test_a_reward_that_can_not_be_called_is_found_before_generation(workplace, result):
    before = names(Store(workplace / "store"))
    (workplace / "strict.py").write_text("def strict(completions, anwser):\n    return [0.0] * len(completions)\n")
    arguments = ["--set", "reward.functions=[{use='strict.py:strict'}]", "--set", "run='strict'", "--set", "data.held_out=null"]
    error = quiver(workplace, "run", "recipe.toml", *arguments, code=2)["error"]
    assert error["code"] == "E-CONFIG" and "anwser" in error["message"] and "answer" in error["message"]
    assert names(Store(workplace / "store")) - before == {"strict/policy@0", "strict/prompts@1"}


def test_kill_in_the_middle_of_generation_and_go_on(tmp_path):
    """kill -9 of the whole flow while shards are being written; the next run redoes at most one and gives the same rollouts."""
    folder = write_recipe(tmp_path)
    options = [
        "--iterations", "1", "--set", "generate.rows_per_shard=2", "--set", "generate.samples_per_prompt=16",
        "--set", "generate.sampling.max_tokens=60", "--set", "generate.sampling.ignore_eos=true", "--set", "data.held_out=null",
    ]  # fmt: skip
    command = [sys.executable, "-m", "flows.cli", "run", "recipe.toml", *options]
    killed = subprocess.Popen(command, cwd=folder, env=command_environment(folder), start_new_session=True)
    staging = folder / "store/tiny/rollouts/.staging"
    while not (finished := [*staging.glob("*/part-*.arrow")]) or not [*staging.glob("*.notes/*.json")]:
        assert killed.poll() is None, "the run ended before it could be killed"
        time.sleep(0.01)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    assert not Store(folder / "store").numbers("tiny", "rollouts")
    kept = {
        note.name: path.stat().st_mtime_ns
        for note in staging.glob("*.notes/*.json")
        for path in finished
        if path.name in note.name
    }
    quiver(folder, "run", "recipe.toml", *options)
    resumed = Store(folder / "store").open("tiny/rollouts@1")
    for note, changed in kept.items():
        assert (resumed.path / note.removesuffix(".json")).stat().st_mtime_ns == changed, "a finished shard was done again"
    other = write_recipe(tmp_path / "other")
    quiver(other, "run", "recipe.toml", *options)
    whole = Store(other / "store").open("tiny/rollouts@1")
    assert resumed.table().drop(["completion_text"]).equals(whole.table().drop(["completion_text"]))
