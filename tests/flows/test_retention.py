"""A finished run after gc: it stays finished, goes on, and makes again what it has to read; and a
run that cleans up after itself."""

import json
import re
import shutil
import subprocess
import sys

import pytest

from quiver.flows import retention
from quiver.flows.commands.summary import next_commands
from quiver.flows.recipe import load
from quiver.flows.retention import Retention, clean_up
from quiver.stages.common.store import Store
from quiver.stages.common.verification import verify
from quiver.stages.report.gather import gather
from quiver.stages.report.stage import render
from tests.flows.conftest import command_environment, quiver

pytestmark = pytest.mark.prefect
SCRIPTED = [
    *("--set", "generate.engine='scripted'"),
    *("--set", "optimize.audit.enabled=false"),  # its logprobs are of no model
]
NOWHERE = [
    part
    for stage in ("policy", "prompt", "generate", "reward", "optimize")
    for part in ("--set", f"placement.python.{stage}='/nonexistent'")
]
"""With these no child process can start."""


def names(store: Store) -> set[str]:
    return {str(ref) for ref in store.refs()}


def of_kind(store: Store, kind: str) -> list[str]:
    return sorted(name for name in names(store) if name.startswith("tiny/") and kind in name)


def plainly(answer: dict) -> list[dict]:
    """The iterations without what differs from one time to the next."""
    return [{**each, "seconds": None} for each in answer["iterations"]]


@pytest.fixture(scope="module")
def finished(workplace) -> dict:
    """Three iterations, of which gc kept what belongs to the last."""
    answer = quiver(workplace, "run", "recipe.toml", *SCRIPTED, "--iterations", "3")
    looked = quiver(workplace, "gc", "--keep", "1")
    before = names(Store(workplace / "store"))
    assert not looked["applied"] and before == names(Store(workplace / "store"))
    options = ("--keep", "1", "--grace-hours", "0", "--apply")
    collected = quiver(workplace, "gc", *options)
    assert collected["versions"] == looked["versions"] and len(looked["versions"]) > 10
    again = quiver(workplace, "gc", *options)
    assert (again["versions"], again["trash_bytes"]) == ([], 0)
    assert again["deleted_bytes"] > sum(entry["bytes"] for entry in collected["versions"])
    return answer


def test_a_finished_run_is_already_done(workplace, finished):
    store = Store(workplace / "store")
    left = names(store)
    assert of_kind(store, "policy") == ["tiny/policy@2", "tiny/policy@3"]
    assert of_kind(store, "rollouts") == ["tiny/rollouts@3"]
    command = [sys.executable, "-m", "quiver.flows.cli", "run", "recipe.toml", "--json"]
    done = subprocess.run(
        [*command, *SCRIPTED, *NOWHERE, "--iterations", "3"],
        cwd=workplace,
        env=command_environment(workplace),
        capture_output=True,
        text=True,
        check=True,
    )
    assert names(store) == left and verify(store)[1] == []
    assert plainly(json.loads(done.stdout)) == plainly(finished)
    assert done.stderr.count("already done") == 1 + 4 + 3 * 4 + 4, done.stderr


def test_its_report_tells_all_of_it(workplace, finished):
    """The curves come from manifests; rows that expired are left out, and that is said."""
    store = Store(workplace / "store")
    gathered = gather(store, "tiny")
    assert [done.policy.version for done in gathered.iterations] == [1, 2, 3]
    means = [done.rewards.metrics["reward_mean"] for done in gathered.iterations]
    assert means == [each["reward_mean"] for each in finished["iterations"]]
    assert len(gathered.evaluations) == 2 and gathered.gone == []
    assert {"tiny/policy@0", "tiny/rollouts@1", "tiny/updates@2"} <= set(gathered.expired)
    page = render(store, gathered)
    assert f"{len(gathered.expired)} versions expired" in page
    assert "The rollouts of an evaluation are gone" in page


def test_to_go_on_without_the_optimizer_state_is_to_be_asked_for(workplace, finished):
    store = Store(workplace / "store")
    assert (store.path / "tiny/policy/v000002/model.safetensors").exists()
    assert not (store.path / "tiny/policy/v000002/optimizer").exists()
    train = ("optimize", "recipe.toml", "--rollouts", "tiny/rollouts@3")
    other = ("--set", "optimize.learning_rate=5e-4")
    error = quiver(workplace, *train, *SCRIPTED, *other, code=5)["error"]
    assert error["object"] == "tiny/policy@2" and "files in optimizer/ expired" in error["message"]
    assert error["next"] == (
        "quiver optimize recipe.toml --policy tiny/policy@2 --rollouts tiny/rollouts@3 "
        "--set optimize.load_optimizer=false --set 'generate.engine='\"'\"'scripted'\"'\"'' "
        "--set optimize.audit.enabled=false --set optimize.learning_rate=5e-4"
    )


def test_one_more_iteration_does_only_that(workplace, finished):
    store = Store(workplace / "store")
    before = names(store)
    longer = quiver(workplace, "run", "recipe.toml", *SCRIPTED, "--iterations", "4")
    first_two = [each["rollouts"] for each in longer["iterations"][:2]]
    assert first_two == [each["rollouts"] for each in finished["iterations"][:2]]
    added = sorted(names(store) - before)
    kinds = ("advantages", "evaluations", "policy", "prompts", "rewards", "rollouts", "updates")
    assert [name.partition("@")[0] for name in added] == [
        "tiny.eval/rewards",
        "tiny.eval/rollouts",
        *(f"tiny/{kind}" for kind in kinds),
    ]
    assert store.open("tiny/policy@4").manifest.input("policy").ref == "tiny/policy@3"
    assert store.open("tiny/policy@4").manifest.metrics["step"] == 4, "it went on with its state"


def test_what_another_optimizer_reads_is_made_again(workplace, finished):
    """Under its old numbers, and nothing else; also the base model."""
    store = Store(workplace / "store")
    before = names(store)
    rate = ("--set", "optimize.learning_rate=2e-3", "--set", "data.held_out=null")
    answer = quiver(workplace, "run", "recipe.toml", *SCRIPTED, "--iterations", "1", *rate)
    (changed,) = answer["iterations"]
    expected = {"tiny/policy@0", "tiny/prompts@1", "tiny/rollouts@1", "tiny/rewards@1"}
    number = int(changed["policy"].rpartition("@")[2])
    expected |= {f"tiny/{kind}@{number}" for kind in ("advantages", "updates", "policy")}
    assert names(store) - before == expected and verify(store)[1] == []
    manifest = store.open(changed["policy"]).manifest
    assert manifest.input("rollouts").ref == "tiny/rollouts@1"


def test_a_trained_policy_is_not_made_again_unasked(workplace, finished):
    """Measuring policy@1 now would mean to train it first."""
    every = ("--iterations", "3", "--set", "evaluate.every=1")
    error = quiver(workplace, "run", "recipe.toml", *SCRIPTED, *every, code=5)["error"]
    assert error["code"] == "E-LINEAGE" and error["object"] == "tiny/policy@1"
    assert re.search(r"files expired and are deleted: 20.* gc, keep = 1", error["message"])
    assert error["next"].startswith("quiver run recipe.toml --from optimize --set ")


def test_a_run_cleans_up_after_itself(workplace):
    """With overlap, and a reference that follows: all that the next iteration reads stays."""
    settings = (
        "run=clean",
        "iterations=3",
        "retention={keep=1, moments=1, grace_hours=0}",
        "overlap=1",
        "optimize.max_staleness=1",
        "optimize.kl_coef=0.05",
        "reference.rule=ema",
        "data.held_out=null",
    )
    options = [part for setting in settings for part in ("--set", setting)]
    answer = quiver(workplace, "run", "recipe.toml", *SCRIPTED, *options)
    store = Store(workplace / "store")
    left = {name for name in names(store) if name.startswith("clean")}
    policies = sorted(name for name in left if name.startswith("clean/policy"))
    assert policies == ["clean/policy@1", "clean/policy@2", "clean/policy@3"]
    assert [path.parent.name for path in store.path.glob("clean/policy/*/optimizer")] == ["v000003"]
    assert {"clean/rollouts@3", "clean/rewards@3", "clean.ref/policy@1"} <= left
    assert "clean/rollouts@1" not in left and not list(store.path.glob(".trash/*/clean*"))
    again = quiver(workplace, "run", "recipe.toml", *SCRIPTED, *options, *NOWHERE)
    assert plainly(again) == plainly(answer)
    assert {name for name in names(store) if name.startswith("clean")} == left


def test_what_goes_wrong_with_cleaning_is_a_warning(tmp_path, caplog):
    path = str(tmp_path / "store")
    store = Store(path)
    rules = Retention(keep=1)
    (store.path / "a/tags").mkdir(parents=True)
    (store.path / "a/tags/prod").write_text("nonsense")
    with caplog.at_level("INFO", "quiver"):
        clean_up(path, "a", Retention())
        assert caplog.messages == []
        clean_up(path, "a", rules)
        assert "retention" in caplog.messages[-1] and "E-CORRUPT a tag prod" in caplog.messages[-1]
        shutil.rmtree(path)
        clean_up(path, "a", rules)
    assert "E-CONFIG" in caplog.messages[-1] and "the run goes on" in caplog.messages[-1]
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    assert retention.log.name == "quiver"


def test_the_next_commands_know_whose_state_is_gone(workplace, finished):
    def second(*settings: str) -> str:
        recipe = load(workplace / "recipe.toml", list(settings))
        return next_commands(recipe, workplace / "recipe.toml", [], finished)[0]

    fresh = "optimize.load_optimizer=false"
    assert fresh not in second() and fresh not in second("retention.moments=2")
    assert fresh in second("retention.moments=1")
    assert fresh in second("retention.moments=2", "overlap=1", "optimize.max_staleness=1")
