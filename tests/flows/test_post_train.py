"""The main flow through the command line: a tiny model, real stages in child processes, Prefect's
embedded server."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
from safetensors.torch import load_file, save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from quiver.flows.calls import by_hand
from quiver.flows.commands.summary import next_commands
from quiver.flows.recipe import load
from quiver.flows.rerun import rerun
from quiver.schemas.errors import ConfigError
from quiver.stages.common.models.checkpoints import PolicyConfig, as_model
from quiver.stages.common.store import Store
from quiver.stages.common.verification import verify
from tests.flows.conftest import command_environment, left_behind, quiver, write_recipe
from tests.flows.test_embedded import SCRIPTED
from tests.writing import run_here

TIGHT = """
from quiver.stages.optimize.algorithms import Algorithm

BOUNDS = {"clip_low": 1e-3, "clip_high": 1e-3}
TIGHT = Algorithm("tight", "group_normalized", "sequence_clipped", "token_mean", BOUNDS)
"""
run_policy = partial(run_here, "policy")


pytestmark = pytest.mark.prefect


@pytest.fixture(scope="module")
def result(workplace) -> dict:
    settings = ("optimize.trackers=['tensorboard']", "optimize.tracker_folder=logs")
    return quiver(workplace, "run", "recipe.toml", *(f"--set={setting}" for setting in settings))


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
    prompts = [
        set(store.open(done["prompts"]).table()["group_id"].to_pylist())
        for done in result["iterations"]
    ]
    assert prompts[0] | prompts[1] == {f"{row:06d}" for row in range(8)}, (
        "two iterations of four see all eight rows"
    )


def test_trackers_have_rewards_lengths_and_evaluations_at_the_step_of_the_policy(workplace, result):
    """Beside the numbers of the optimizer step that begins with it."""
    events = EventAccumulator(str(workplace / "logs" / "tiny")).Reload()
    curves = {
        name: sorted((point.step, point.value) for point in events.Scalars(name))
        for name in events.Tags()["scalars"]
    }
    assert [step for step, _ in curves["loss"]] == [0, 1]
    store = Store(workplace / "store")
    expected = {"reward/mean": [], "completion_tokens/mean": [], "completion_tokens/truncated": []}
    for step, done in enumerate(result["iterations"]):
        rows = store.open(done["rollouts"]).table().to_pylist()
        lengths = [len(row["completion_ids"]) for row in rows]
        cut = [row["finish_reason"] == "length" for row in rows]
        expected["reward/mean"].append((step, done["reward_mean"]))
        mean = round(sum(lengths) / 16, 3)  # as the manifest has it
        expected["completion_tokens/mean"].append((step, mean))
        expected["completion_tokens/truncated"].append((step, sum(cut) / 16))
    expected["reward/parts/evenness"] = expected["reward/mean"]
    measured = [result["baseline"], result["iterations"][-1]["evaluation"]]
    for name in ("score", "stderr"):
        points = zip((0, 2), measured, strict=True)
        expected[f"evaluation/{name}"] = [(step, numbers[name]) for step, numbers in points]
    for name, points in expected.items():
        assert curves[name] == [(step, pytest.approx(value, abs=1e-6)) for step, value in points]


def test_again_is_already_done(workplace, result, tmp_path):
    """No new version, and no child: with an interpreter that cannot start, every stage still says
    "already done"."""
    before = names(Store(workplace / "store"))
    nowhere = [
        f"placement.python.{stage}='/nonexistent'"
        for stage in ("policy", "prompt", "generate", "reward", "optimize")
    ]
    options = [part for setting in nowhere for part in ("--set", setting)]
    command = [sys.executable, "-m", "quiver.flows.cli", "run", "recipe.toml", "--json", *options]
    env = command_environment(workplace)
    done = subprocess.run(
        command, cwd=workplace, env=env, capture_output=True, text=True, check=True
    )
    assert names(Store(workplace / "store")) == before
    assert done.stderr.count("already done") == 1 + 4 + 2 * 4 + 4, done.stderr
    assert "does not ask for" not in done.stderr
    without_seconds = [
        [{**each, "seconds": None} for each in run["iterations"]]
        for run in (result, json.loads(done.stdout))
    ]
    assert without_seconds[0] == without_seconds[1]


def test_the_next_commands_work_as_they_are_printed(workplace, result, monkeypatch):
    monkeypatch.chdir(workplace)
    settings = ["generate.rows_per_shard=7"]
    commands = next_commands(load("recipe.toml", settings), "recipe.toml", settings, result)
    assert len(commands) == 3
    named = [*settings, "store=store"]
    once = next_commands(load("recipe.toml", named), "recipe.toml", named, result)
    assert once == commands, "the store is named once"
    before = Store("store").numbers("tiny", "rollouts")
    for command in commands[:2]:
        runnable = command.replace("quiver ", f"{sys.executable} -m quiver.flows.cli ")
        subprocess.run(
            runnable,
            shell=True,
            check=True,
            env=command_environment(workplace),
            stdout=subprocess.DEVNULL,
        )
    assert Store("store").numbers("tiny", "rollouts") == before
    assert "--iterations 4" in commands[2] and "generate.rows_per_shard=7" in commands[2]


def test_one_more_iteration_adds_only_itself(workplace, result):
    before = names(Store(workplace / "store"))
    longer = quiver(workplace, "run", "recipe.toml", "--iterations", "3")
    done = longer["iterations"][0]
    assert {**done, "seconds": ...} == {**result["iterations"][0], "seconds": ...}
    store = Store(workplace / "store")
    for stage, kind in (("generate", "rollouts"), ("optimize", "policy")):
        made_in = store.open(done[kind]).manifest.seconds["total"]
        assert done["seconds"][stage] == round(made_in, 3), "of the run that did the work"
    added = sorted(ref.partition("@")[0] for ref in names(Store(workplace / "store")) - before)
    kinds = ("advantages", "evaluations", "policy", "prompts", "rewards", "rollouts", "updates")
    assert added == ["tiny.eval/rewards", "tiny.eval/rollouts", *(f"tiny/{kind}" for kind in kinds)]


def test_rescore_and_train_again_without_generation(workplace, result):
    before = Store(workplace / "store").numbers("tiny", "rollouts")
    length = "reward.functions=[{use='length',arguments={target=3}}]"
    rescored = quiver(
        workplace, "reward", "recipe.toml", "--rollouts", "tiny/rollouts@1", "--set", length
    )
    assert rescored["cached"] is False and rescored["rows"] == 16
    trained = quiver(
        workplace,
        "optimize",
        "recipe.toml",
        "--rollouts",
        "tiny/rollouts@1",
        "--rewards",
        rescored["ref"],
    )
    store = Store(workplace / "store")
    policy = store.open(trained["ref"])
    assert policy.manifest.input("policy").ref == "tiny/policy@0"
    assert policy.manifest.input("rewards").ref == rescored["ref"]
    assert store.numbers("tiny", "rollouts") == before
    again = quiver(
        workplace,
        "optimize",
        "recipe.toml",
        "--rollouts",
        "tiny/rollouts@1",
        "--rewards",
        rescored["ref"],
    )
    assert (again["ref"], again["cached"]) == (trained["ref"], True)


def test_a_retry_scores_what_has_no_reward_and_diff_says_what_became_of_it(workplace, result):
    (workplace / "flaky.py").write_text(
        "import os\ndef flaky(completion_ids):\n"
        "    values = [float(len(ids)) if os.path.exists('repaired') else None for ids in "
        "completion_ids]\n"
        "    return [1.0 if ids[0] % 2 else value for ids, value in zip(completion_ids, values)]\n"
    )
    flaky = ["reward", "recipe.toml", "--set", "reward.functions=[{use='flaky.py:flaky'}]"]
    first = quiver(workplace, *flaky, "--rollouts", "tiny/rollouts@1")
    missing = Store(workplace / "store").open(first["ref"]).manifest.status["not_scored"]
    (workplace / "repaired").touch()
    second = quiver(workplace, *flaky, "--retry", first["ref"])
    assert (second["metrics"]["retried"], second["metrics"]["recovered"]) == (
        missing,
        missing,
    ) and missing > 0
    again = quiver(workplace, *flaky, "--retry", second["ref"])
    assert (again["ref"], again["cached"]) == (second["ref"], True)
    differences = quiver(workplace, "diff", first["ref"], second["ref"])
    assert differences["rewards"]["null_to_value"] == missing
    assert (differences["rewards"]["order"], differences["rewards"]["mean_difference"]) == (0, 0.0)
    error = quiver(
        workplace, *flaky, "--rollouts", "tiny/rollouts@2", "--retry", first["ref"], code=5
    )["error"]
    assert error["code"] == "E-LINEAGE" and "was made of tiny/rollouts@1" in error["message"]


def test_tight_bounds_are_scored_for_by_themselves_under_the_starting_policy(workplace, result):
    """gspo needs proximal logprobs, and decoupled PPO has them of the policy that each iteration
    starts from, of replayed rollouts too; by hand the same versions are found."""
    settings = (
        "run=decoupled",
        "optimize.algorithm=gspo",
        "optimize.prox_of=start",
        "optimize.replay=1",
        "optimize.max_staleness=1",
        "optimize.precision=fp32",
        "data.held_out=null",
    )
    options = [part for setting in settings for part in ("--set", setting)]
    done = quiver(workplace, "run", "recipe.toml", *options)["iterations"]
    store = Store(workplace / "store")
    for iteration, each in enumerate(done):
        policy = store.open(each["policy"]).manifest
        assert policy.metrics["first_clip_fraction"] == 0.0
        assert policy.config["prox_of"] == "start"
        scored = {entry.role: entry.ref for entry in policy.inputs if entry.role[:4] == "prox"}
        assert scored["prox"] == each["prox_logprobs"]
        assert len(scored) == iteration + 1
        for ref in scored.values():
            manifest = store.open(ref).manifest
            assert manifest.model("prox").ref == f"decoupled/policy@{iteration}"
            assert manifest.config["precision"] == "fp32"
        assert "logprobs prox" in each["seconds"]
    rollouts = [part for each in done[::-1] for part in ("--rollouts", each["rollouts"])]
    again = quiver(workplace, "optimize", "recipe.toml", *options, *rollouts)
    assert (again["ref"], again["cached"]) == ("decoupled/policy@2", True)
    (workplace / "tight.py").write_text(TIGHT)
    options = ["--set", "run=decoupled", "--set", "optimize.algorithm=tight.py:TIGHT"]
    named = ["--rollouts", done[0]["rollouts"]]
    own = store.open(quiver(workplace, "optimize", "recipe.toml", *options, *named)["ref"])
    prox = store.open(own.manifest.input("prox").ref).manifest
    assert (prox.model("prox").ref, prox.config["prox_of"]) == ("decoupled/policy@0", "behaviour")


def test_truncated_sampling_is_scored_for_by_itself(workplace, result):
    settings = (
        "run=truncated",
        "generate.sampling.top_k=50",
        "optimize.allow_biased_sampling=true",
        "optimize.max_staleness=1",
        "overlap=1",
        "data.held_out=null",
    )
    options = [part for setting in settings for part in ("--set", setting)]
    done = quiver(workplace, "run", "recipe.toml", *options)["iterations"]
    store = Store(workplace / "store")
    for each in done:  # the second is one policy old
        prox = store.open(each["prox_logprobs"]).manifest
        assert prox.model("prox").ref == "truncated/policy@0"
        report = store.open(each["policy"]).manifest.metrics["audit"]["prox"]
        assert (report["judged"], report["biased_sampling"]) == ("mean_excess", "top_k = 50")
        assert report["mean_gap"] > 0.5 and report["mean_excess"] < 1e-3
    again = quiver(
        workplace, "optimize", "recipe.toml", *options, "--rollouts", done[0]["rollouts"]
    )
    assert (again["ref"], again["cached"]) == ("truncated/policy@1", True)


def test_references_and_proximal_logprobs(workplace, result):
    """`every` 1: the reference of an iteration is the policy that it starts from, so its logprobs
    are the proximal ones.

    What is replayed is scored under the reference of the present iteration; its proximal logprobs
    stay those of its own policy.
    """
    settings = (
        "run=kl",
        "optimize.kl_coef=0.05",
        "optimize.max_staleness=1",
        "logprobs.prox=true",
        "data.held_out=null",
    )
    options = [part for setting in settings for part in ("--set", setting)]
    every = ["--set", "reference.rule=every", "--set", "optimize.replay=1"]
    done = quiver(workplace, "run", "recipe.toml", *options, *every)["iterations"]
    store = Store(workplace / "store")
    for iteration, each in enumerate(done):
        ref, prox = store.open(each["ref_logprobs"]), store.open(each["prox_logprobs"])
        assert (
            ref.manifest.model("ref").ref
            == prox.manifest.model("prox").ref
            == f"kl/policy@{iteration}"
        )
        assert ref.table()["logprobs"].to_pylist() == prox.table()["logprobs"].to_pylist()
        roles = {entry.role: entry.ref for entry in store.open(each["policy"]).manifest.inputs}
        assert (roles["ref"], roles["prox"]) == (each["ref_logprobs"], each["prox_logprobs"])
        assert {"logprobs ref", "logprobs prox"} <= set(each["seconds"])
    assert roles["prox.2"] == done[0]["prox_logprobs"]
    assert store.open(roles["ref.2"]).manifest.model("ref").ref == "kl/policy@1"
    assert (
        store.open(roles["ref.2"]).manifest.input("rollouts").ref
        == roles["rollouts.2"]
        == done[0]["rollouts"]
    )
    ema = [
        "--set",
        "reference.rule=ema",
        "--set",
        "reference.rate=0.5",
        "--set",
        "logprobs.prox=false",
    ]
    moving = quiver(workplace, "run", "recipe.toml", *options, *ema)["iterations"]
    followed = [store.open(each["ref_logprobs"]).manifest.model("ref").ref for each in moving]
    assert followed == ["kl/policy@0", "kl.ref/policy@0"]
    halves = {m.role: m.ref for m in store.open(followed[1]).manifest.models}
    assert halves == {"reference": "kl/policy@0", "policy": moving[0]["policy"]}
    again = quiver(
        workplace, "optimize", "recipe.toml", *options, "--rollouts", done[0]["rollouts"]
    )
    assert (again["ref"], again["cached"]) == ("kl/policy@1", True)
    fixed = quiver(
        workplace, "logprobs", "recipe.toml", *options, "--rollouts", done[1]["rollouts"]
    )
    assert store.open(fixed["ref"]).manifest.model("ref").ref == "kl/policy@0"
    error = quiver(
        workplace,
        "optimize",
        "recipe.toml",
        *options,
        *every,
        "--rollouts",
        done[1]["rollouts"],
        code=2,
    )["error"]
    assert error["object"] == "reference.rule"


def test_a_fork_holds_on_to_the_first_policy_of_its_line(workplace, result):
    """The run that it goes into has no policy of its own: its reference is that of the run which it
    leaves."""
    fork = [
        "recipe.toml",
        "--set",
        "run=fork",
        "--set",
        "optimize.kl_coef=0.05",
        "--rollouts",
        "tiny/rollouts@2",
    ]
    forked = quiver(workplace, "optimize", *fork, "--rewards", "tiny/rewards@2")
    store = Store(workplace / "store")
    policy = store.open(forked["ref"])
    assert (
        forked["ref"] == "fork/policy@2" and policy.manifest.input("policy").ref == "tiny/policy@1"
    )
    assert store.open(policy.manifest.input("ref").ref).manifest.model("ref").ref == "tiny/policy@0"
    again = quiver(workplace, "logprobs", *fork)
    assert (again["ref"], again["cached"]) == (policy.manifest.input("ref").ref, True)


def test_optimize_where_vllm_can_not_be_imported(workplace, result, tmp_path):
    (tmp_path / "vllm.py").write_text("raise ImportError('there is no vllm here')\n")
    path = f"{tmp_path}{os.pathsep}{os.getcwd()}"
    arguments = [
        "optimize",
        "recipe.toml",
        "--rollouts",
        "tiny/rollouts@2",
        "--set",
        "optimize.learning_rate=2e-3",
    ]
    assert quiver(workplace, *arguments, PYTHONPATH=path)["cached"] is False


def test_one_changed_weight_is_refused(workplace, result, tmp_path):
    """The base model again, with a single weight changed: its weights are not those that sampled,
    and optimize says so."""
    changed = shutil.copytree(workplace / "model", tmp_path / "changed")
    tensors = load_file(changed / "model.safetensors")
    first = sorted(tensors)[0]
    tensors[first].view(-1)[0] += 1e-3
    save_file(tensors, changed / "model.safetensors", {"format": "pt"})
    store = Store(workplace / "store")
    other = run_policy(PolicyConfig(model=str(changed)), store, into="changed")
    arguments = ["optimize", "recipe.toml", "--rollouts", "tiny/rollouts@1", "--policy", str(other)]
    error = quiver(workplace, *arguments, code=5)["error"]
    assert error["code"] == "E-LINEAGE"
    for ref in ("tiny/policy@0", str(other)):
        assert as_model("policy", store.open(ref)).weights[:8] in error["message"]


def test_rewards_are_those_of_the_recipe_or_named(workplace, result):
    error = quiver(
        workplace,
        "optimize",
        "recipe.toml",
        "--rollouts",
        "tiny/rollouts@1",
        "--set",
        "reward.reward_clip=[0.0,0.5]",
        code=5,
    )["error"]
    assert error["message"] == "this recipe's [reward] has not scored these rollouts"


def test_an_error_of_a_stage_is_three_lines(workplace, result):
    """No traceback without --debug, whatever Prefect would log; the store is as it was."""
    path = Store(workplace / "store").open("tiny/rollouts@1").files.folder / "part-00000.arrow"
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    anew = ["--from", "reward", "--set", "data.held_out=null"]
    command = [sys.executable, "-m", "quiver.flows.cli", "run", "recipe.toml", *anew]
    env = command_environment(workplace)
    done = subprocess.run(
        command, cwd=workplace, env=env, capture_output=True, text=True, check=False
    )
    path.write_bytes(good)
    assert done.returncode == 3
    assert "Traceback" not in done.stderr
    assert [line.split()[0] for line in done.stderr.splitlines()[-3:]] == [
        "E-CORRUPT",
        "State:",
        "Next:",
    ]


def test_a_run_that_another_recipe_began_is_told_with_the_keys_that_differ(workplace, result):
    nowhere = [f"--set=placement.python.{stage}='/nonexistent'" for stage in ("prompt", "evaluate")]
    command = [sys.executable, "-m", "quiver.flows.cli", "run", "recipe.toml", "--set=seed=8"]
    env = command_environment(workplace)
    done = subprocess.run(
        [*command, *nowhere], cwd=workplace, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert (
        "run tiny has tiny/prompts@1, which this recipe does not ask for: seed was 7 and is 8."
        in " ".join(done.stderr.split())
    )


def test_the_store_explains_itself(workplace, result):
    listed = {version["ref"]: version for version in quiver(workplace, "ls", "tiny")["versions"]}
    assert (
        listed["tiny/rollouts@1"]["rows"] == 16 and listed["tiny/rollouts@1"]["stage"] == "generate"
    )
    shown = quiver(workplace, "show", "tiny/rewards@1", "-n", "2")
    assert len(shown["rows"]) == 2 and shown["manifest"]["schema"] == "rewards/1"
    traced = quiver(workplace, "lineage", "tiny/policy@1")
    flat = json.dumps(traced)
    assert traced["ref"] == "tiny/policy@1"
    assert all(
        ref in flat
        for ref in ("tiny/policy@0", "tiny/prompts@1", "tiny/rollouts@1", "tiny/rewards@1")
    )
    differences = quiver(workplace, "diff", "tiny/rollouts@1", "tiny/rollouts@2")
    assert differences["changed"]["config.iteration"] == [1, 2]
    assert differences["rows"]["both"] == 0
    checked = quiver(workplace, "verify")
    assert checked["bad"] == [] and checked["checked"] == len(quiver(workplace, "ls")["versions"])


def test_verify_finds_a_flipped_bit(workplace, result):
    path = Store(workplace / "store").open("tiny/rewards@2").files.folder / "part-00000.arrow"
    good = path.read_bytes()
    path.write_bytes(good[:300] + bytes([good[300] ^ 1]) + good[301:])
    found = quiver(workplace, "verify", "tiny/rewards@2", code=3)
    assert [bad["code"] for bad in found["bad"]] == ["E-CORRUPT"]
    path.write_bytes(good)
    assert quiver(workplace, "verify", "tiny/rewards@2")["bad"] == []


def test_a_reward_that_can_not_be_called_is_found_before_generation(workplace, result):
    before = names(Store(workplace / "store"))
    (workplace / "strict.py").write_text(
        "def strict(completions, anwser):\n    return [0.0] * len(completions)\n"
    )
    arguments = ["--set", "reward.functions=[{use='strict.py:strict'}]", "--set", "run='strict'"]
    error = quiver(workplace, "run", "recipe.toml", *arguments, code=2)["error"]
    assert (
        error["code"] == "E-CONFIG"
        and "anwser" in error["message"]
        and "answer" in error["message"]
    )
    assert names(Store(workplace / "store")) == before, "and before a model is read"
    assert error["state"] == "nothing was changed."


def test_replay_trains_on_the_iteration_before_too(workplace, result):
    """Of three iterations the second and third also take the rollouts before theirs; what was
    sampled is not sampled again."""
    store = Store(workplace / "store")
    settings = (
        "optimize.replay=1",
        "optimize.max_staleness=1",
        "data.held_out=null",
        "iterations=3",
    )
    options = [part for setting in settings for part in ("--set", setting)]
    done = quiver(workplace, "run", "recipe.toml", *options)["iterations"]
    assert done[0]["rollouts"] == result["iterations"][0]["rollouts"]
    for before, now in itertools.pairwise([None, *done]):
        manifest = store.open(now["policy"]).manifest
        roles = {entry.role: entry.ref for entry in manifest.inputs if entry.role != "policy"}
        expected = {"rollouts": now["rollouts"], "rewards": now["rewards"]}
        if before:
            expected |= {"rollouts.2": before["rollouts"], "rewards.2": before["rewards"]}
            audit = manifest.metrics["audit"]
            assert audit["mean_gap"] < 0.1 and audit["stale"]["mean_gap"] > audit["mean_gap"]
        assert roles == expected
    traced = json.dumps(quiver(workplace, "lineage", done[2]["policy"]))
    assert all(f'"{done[at][name]}"' in traced for at in (1, 2) for name in ("rollouts", "rewards"))
    versions = names(store)
    again = quiver(workplace, "run", "recipe.toml", *options)["iterations"]
    assert [each["policy"] for each in again] == [each["policy"] for each in done]
    assert names(store) == versions


def test_replay_by_hand(workplace, result, monkeypatch):
    """Rewards and the policy are found for several rollouts as for one."""
    monkeypatch.chdir(workplace)
    made = [each["rollouts"] for each in result["iterations"]]
    first, second = (
        {
            "rollouts": r,
            "rewards": quiver(workplace, "reward", "recipe.toml", "--rollouts", r)["ref"],
        }
        for r in made
    )
    options = [
        "--rollouts",
        first["rollouts"],
        "--rollouts",
        second["rollouts"],
        "--set",
        "optimize.max_staleness=1",
    ]
    trained = quiver(workplace, "optimize", "recipe.toml", *options)
    roles = {entry.role: entry.ref for entry in Store("store").open(trained["ref"]).manifest.inputs}
    assert roles.pop("policy") == result["iterations"][0]["policy"], (
        "the newest policy that sampled"
    )
    assert roles == {**first, **{f"{role}.2": ref for role, ref in second.items()}}
    recipe = load("recipe.toml", ["optimize.max_staleness=1"])
    both = {
        "rollouts": [first["rollouts"], second["rollouts"]],
        "rewards": [second["rewards"], first["rewards"]],
    }
    with by_hand(recipe):
        assert rerun(recipe, "optimize", both).ref == trained["ref"]
        found = rerun(recipe, "optimize", {"rewards": both["rewards"][::-1]})
    assert (found.ref, found.cached) == (trained["ref"], True)
    with by_hand(recipe), pytest.raises(ConfigError, match="is given twice"):
        rerun(recipe, "optimize", {"rollouts": [first["rollouts"]] * 2})
    with pytest.raises(ConfigError, match="quiver reward takes one, got 2"):
        rerun(recipe, "reward", {"rollouts": both["rollouts"]})


def test_an_algorithm_that_can_not_be_called_is_found_before_anything_is_made(workplace, result):
    before = names(Store(workplace / "store"))
    (workplace / "wrong.py").write_text(
        "from quiver.stages.optimize.algorithms import Algorithm\n"
        "MINE = Algorithm('mine', lambda rewards: rewards, 'clipped', 'token_mean')\n"
    )
    arguments = ["--set", "optimize.algorithm='wrong.py:MINE'", "--set", "run='wrong'"]
    error = quiver(workplace, "run", "recipe.toml", *arguments, code=2)["error"]
    assert (
        error["object"] == "optimize.algorithm wrong.py:MINE advantage"
        and "(rewards, groups)" in error["message"]
    )
    assert names(Store(workplace / "store")) == before


def test_two_runs_of_one_recipe_at_once_make_everything_once(workplace):
    command = [sys.executable, "-m", "quiver.flows.cli", "run", "recipe.toml", "--json", *SCRIPTED]
    runs = [
        subprocess.Popen(
            [*command, "--set", "run=both"],
            cwd=workplace,
            env=command_environment(workplace),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    words = [run.communicate(timeout=300) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], words
    first, second = (json.loads(stdout)["iterations"][0] for stdout, _ in words)
    assert {**first, "seconds": ...} == {**second, "seconds": ...}
    store = Store(workplace / "store")
    for kind in ("prompts", "rollouts", "rewards", "advantages", "updates"):
        assert store.numbers("both", kind) == [1]
    assert store.numbers("both", "policy") == [0, 1] and verify(store)[1] == []


SLOW_GENERATION = [
    "--set", "iterations=1", "--set", "generate.rows_per_shard=2", "--set", "generate.samples_per_prompt=16",
    "--set", "generate.sampling.max_tokens=60", "--set", "generate.sampling.ignore_eos=true", "--set", "data.held_out=null",
]  # fmt: skip


def finished_shards(folder) -> dict[str, int]:
    """The shards of an unfinished rollouts version that are done, and when they were written."""
    staging = folder / "store/tiny/rollouts/.staging"
    written = {path.name: path.stat().st_mtime_ns for path in staging.glob("*/part-*.arrow")}
    return {path.stem: written[path.stem] for path in staging.glob("*.notes/*.json")}


def start_and_wait_for_shards(folder, so_far: int) -> subprocess.Popen:
    """`quiver run` at the moment when some more shards of its rollouts are finished, and others
    not."""
    command = [sys.executable, "-m", "quiver.flows.cli", "run", "recipe.toml", *SLOW_GENERATION]
    running = subprocess.Popen(
        command, cwd=folder, env=command_environment(folder), start_new_session=True
    )
    notes = folder / "store/tiny/rollouts/.staging"
    while len([*notes.glob("*.notes/*.json")]) <= so_far:
        assert running.poll() is None, "the run ended before it could be stopped"
        time.sleep(0.01)
    return running


def test_a_run_that_is_stopped_again_and_again_leaves_nobody_and_goes_on(tmp_path):
    """By Ctrl-C, `timeout` and kill -9 in turn. No finished shard is redone, and the rollouts are
    those of an uninterrupted generation.

    As a terminal and `timeout` do, SIGINT and SIGTERM reach the whole group; what is started in it
    must not die before the flow.
    """
    folder = write_recipe(tmp_path / "stopped")
    kept = {}
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)):
        running = start_and_wait_for_shards(folder, len(kept))
        if number == signal.SIGKILL:
            running.kill()
        else:
            os.killpg(running.pid, number)
        assert running.wait(30) == code
        assert left_behind(folder) == []
        finished = finished_shards(folder)
        assert len(finished) > len(kept) and kept.items() <= finished.items(), (
            "a finished shard was done again"
        )
        assert not Store(folder / "store").numbers("tiny", "rollouts")
        kept = finished
    done = quiver(folder, "run", "recipe.toml", *SLOW_GENERATION)["iterations"]
    assert [(each["rollouts"], each["policy"]) for each in done] == [
        ("tiny/rollouts@1", "tiny/policy@1")
    ]
    resumed = Store(folder / "store").open("tiny/rollouts@1")
    assert len(resumed.manifest.files) == 32
    for name, written in kept.items():
        assert (resumed.files.folder / name).stat().st_mtime_ns == written, (
            "a finished shard was done again"
        )
    options = ["--policy", "tiny/policy@0", "--force", *SLOW_GENERATION]
    again = quiver(folder, "generate", "recipe.toml", *options)
    assert (again["ref"], again["cached"]) == ("tiny/rollouts@2", False)
    whole = Store(folder / "store").open("tiny/rollouts@2").table()
    exact = [name for name in whole.column_names if name != "old_logprobs"]
    assert resumed.table().select(exact).equals(whole.select(exact))
    gaps = [abs(a - b) for x, y in zip(resumed.table()["old_logprobs"].to_pylist(), whole["old_logprobs"].to_pylist(), strict=True)
            for a, b in zip(x, y, strict=True)]  # fmt: skip
    assert max(gaps) < 1e-5, "equal but for rounding: a restart batches the rows differently"
