"""A finished run after gc: it stays finished, goes on, and makes again what it has to read; and a
run that cleans up after itself.

The stages are the real ones, in this process instead of children of it.
"""

import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from quiver.flows.calls import by_hand
from quiver.flows.cli.summary import next_commands
from quiver.flows.look.gather import gather
from quiver.flows.look.stage import render
from quiver.flows.post_train import post_train
from quiver.flows.recipe import load
from quiver.flows.rerun import rerun
from quiver.flows.retention import Retention, clean_up
from quiver.flows.verification import verify
from quiver.schemas.errors import ExpiredError
from quiver.stages.core.store import Store, marks
from quiver.stages.core.store.listing import EXPIRED
from quiver.stages.core.store.retention import Rule, collect
from quiver.stages.core.store.storage import read_checked, with_checksum
from tests.flows.conftest import QUICK, quiver, stay_here, write_recipe
from tests.stages.core.store import histories
from tests.stages.core.store.test_store import Settings, table
from tests.writing import begin

pytestmark = [pytest.mark.prefect, pytest.mark.usefixtures("api")]
GC = Rule(keep=1, grace_seconds=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_recipe(tmp_path_factory.mktemp("kept"))


@pytest.fixture
def made(folder, monkeypatch) -> list[str]:
    """Stages that are run, not found; here."""
    stages = []
    stay_here(folder, monkeypatch, stages)
    return stages


def run(*settings: str) -> dict:
    return post_train(load("recipe.toml", [*QUICK, *settings]))


def names(run: str = "tiny") -> set[str]:
    return {str(ref) for ref in Store("store").refs() if ref.run.partition(".")[0] == run}


def of_kind(kind: str) -> list[str]:
    return sorted(name for name in names() if name.startswith(f"tiny/{kind}@"))


def plainly(answer: dict) -> list[dict]:
    """The iterations without what differs from one time to the next."""
    return [{**each, "seconds": None} for each in answer["iterations"]]


@pytest.fixture(scope="module")
def finished(folder, api) -> dict:
    """Three iterations, of which gc kept what belongs to the last."""
    with pytest.MonkeyPatch.context() as patch:
        stay_here(folder, patch)
        answer = run("iterations=3")
        before = names()
        listed = collect(Store("store"), GC, apply=False).marked
        assert len(listed) > 10 and before == names()
        collected = quiver(folder, "gc", "--keep", "1", "--grace-hours", "0", "--apply")
        for what in ("expired", "deleted"):
            assert {each["ref"] for each in collected[what]} == {str(each.ref) for each in listed}
    return answer


def test_a_finished_run_is_already_done(made, finished, caplog):
    left = names()
    assert of_kind("policy") == ["tiny/policy@2", "tiny/policy@3"]
    assert of_kind("rollouts") == ["tiny/rollouts@3"]
    with caplog.at_level("INFO", "quiver"):
        assert plainly(run("iterations=3")) == plainly(finished)
    assert (made, names()) == ([], left) and verify(Store("store"))[1] == []
    assert caplog.text.count("already done") == 1 + 4 + 3 * 4 + 4


def test_its_report_tells_all_of_it(made, finished):
    """The curves come from manifests; rows that expired are left out, and that is said."""
    store = Store("store")
    gathered = gather(store, "tiny")
    means = [done.rewards.metrics["reward_mean"] for done in gathered.iterations]
    assert means == [each["reward_mean"] for each in finished["iterations"]]
    assert {"tiny/policy@0", "tiny/rollouts@1", "tiny/updates@2"} <= set(gathered.expired)
    page = render(store, gathered)
    assert f"{len(gathered.expired)} versions expired" in page
    assert "The rollouts of an evaluation are gone" in page


def test_a_trained_policy_is_not_made_again_unasked(made, finished):
    """Measuring policy@1 now would mean to train it first."""
    message = r"files expired: 20.* gc, keep = 1"
    with pytest.raises(ExpiredError, match=message) as caught:
        run("iterations=3", "evaluate.every=1")
    assert caught.value.object == "tiny/policy@1" and made == []
    assert caught.value.next == "quiver run RECIPE --from optimize"


def test_one_more_iteration_does_only_that(made, finished):
    before = names()
    longer = run("iterations=4")
    assert plainly(longer)[:2] == plainly(finished)[:2]
    kinds = ("advantages", "evaluations", "policy", "prompts", "rewards", "rollouts", "updates")
    assert sorted(name.partition("@")[0] for name in names() - before) == [
        "tiny.eval/rewards",
        "tiny.eval/rollouts",
        *(f"tiny/{kind}" for kind in kinds),
    ]
    assert made == ["prompt", "generate", "reward", "optimize", "generate", "reward", "evaluate"]
    manifest = Store("store").open("tiny/policy@4").manifest
    assert manifest.input("policy").ref == "tiny/policy@3"
    assert manifest.metrics["step"] == 4, "it went on with its optimizer state"


def test_to_go_on_without_the_optimizer_state_is_to_be_asked_for(made, finished):
    """policy@2 is there, since it sampled rollouts@3; its optimizer state is not."""
    folder = Path("store/tiny/policy/v000002")
    assert (folder / "model.safetensors").exists() and not (folder / "optimizer").exists()
    recipe = load("recipe.toml", [*QUICK, "optimize.learning_rate=5e-4"])
    before = names()
    refused = pytest.raises(ExpiredError, match="optimizer state expired")
    with refused as caught, by_hand(recipe):
        rerun(recipe, "optimize", {"rollouts": "tiny/rollouts@3"})
    assert caught.value.object == "tiny/policy@2" and names() == before
    assert caught.value.next == (
        "quiver optimize RECIPE --policy tiny/policy@2 --rollouts tiny/rollouts@3 "
        "--set optimize.load_optimizer=false"
    )
    afresh = ["optimize.learning_rate=5e-4", "optimize.load_optimizer=false"]
    references = {"policy": "tiny/policy@2", "rollouts": "tiny/rollouts@3"}
    recipe = load("recipe.toml", [*QUICK, *afresh])
    with by_hand(recipe):
        outcome = rerun(recipe, "optimize", references)
    assert outcome.metrics["step"] == 3


def test_what_another_optimizer_reads_is_made_again(made, finished):
    """Under the next numbers, and nothing else; also the base model."""
    store, before = Store("store"), names()
    expired = store.with_expired().open("tiny/rollouts@1").manifest
    settings = ("iterations=1", "optimize.learning_rate=2e-3", "data.held_out=null")
    (changed,) = run(*settings)["iterations"]
    kinds = ("advantages", "policy", "policy", "prompts", "rewards", "rollouts", "updates")
    added = names() - before
    assert sorted(name.partition("@")[0] for name in added) == [f"tiny/{kind}" for kind in kinds]
    assert verify(store)[1] == [] and made[-4:] == ["prompt", "generate", "reward", "optimize"]
    again = store.open(changed["policy"]).manifest.input("rollouts")
    assert again.ref in added and again.content_hash == expired.content_hash
    made.clear()
    run("iterations=1", "optimize.learning_rate=3e-3", "data.held_out=null")
    assert made == ["optimize"], "what was made again is there now"


def test_a_run_cleans_up_after_itself(made):
    """With overlap, and a reference that follows: all that the next iteration reads stays."""
    settings = ["run=clean", "iterations=4", "retention={keep=1, moments=1, grace_hours=0}"]
    settings += ["overlap=1", "optimize.max_staleness=1", "data.held_out.limit=2"]
    settings += ["optimize.kl_coef=0.05", "reference.rule=ema"]
    answer = run(*settings)
    store = Store("store")
    left = names("clean")
    policies = sorted(name for name in left if name.startswith("clean/policy"))
    assert policies == ["clean/policy@2", "clean/policy@3", "clean/policy@4"]
    assert [path.parent.name for path in Path(store.url).glob("clean/policy/*/optimizer")] == [
        "v000004"
    ]
    assert {"clean/rollouts@4", "clean/rewards@4", "clean.ref/policy@2"} <= left
    assert "clean/rollouts@2" not in left and histories.expired_files(store) == []
    page = (Path(store.url) / "clean/report.html").read_text()
    assert "The rollouts of an evaluation are gone" not in page, "it was written before they went"
    made.clear()
    assert plainly(run(*settings)) == plainly(answer) and (made, names("clean")) == ([], left)


def test_the_runs_that_belong_to_it_are_cleaned_with_it(store):
    runs = ("a", "a.eval", "a.ref")
    for run in (*runs, "ab"):
        for seed in range(2):
            about = {"stage": "logprobs", "stage_version": 1, "config": Settings(seed=seed)}
            with begin(store, run, "logprobs", **about, inputs={}) as work:
                work.write(0, table(seed))
                work.commit()
    clean_up(store.url, "a", Retention(keep=1, grace_hours=0))
    assert [store.numbers(run, "logprobs") for run in (*runs, "ab")] == [[2]] * 3 + [[1, 2]]


@pytest.mark.parametrize(("hours_ago", "is_left"), [(0.9, True), (1.1, False)])
def test_what_expired_stays_for_the_hours_of_grace(tmp_path, hours_ago, is_left):
    store = Store(tmp_path / "store")
    first, _ = (histories.make_policy(store, number) for number in range(2))
    rules = Retention(keep=1, grace_hours=1)
    clean_up(store.url, "a", rules)
    key = marks.key_of(first.ref, EXPIRED)
    marked_at = datetime.now(UTC) - timedelta(hours=hours_ago)
    fields = {**read_checked(store.storage, key), "at": marked_at.isoformat()}
    store.storage.put(key, with_checksum(fields))
    clean_up(store.url, "a", rules)
    assert (first.files.folder / "model.safetensors").exists() is is_left


def test_what_is_trained_by_hand_beside_a_run_takes_no_state_from_it(store):
    """policy@3 is an experiment, from policy@0; the run goes on from policy@2."""
    base = histories.make_policy(store, 0, state=False)
    first = histories.make_policy(store, 1, inputs={"policy": base})
    second = histories.make_policy(store, 2, inputs={"policy": first})
    histories.make_policy(store, 3, inputs={"policy": base})
    rules = Retention(keep=1, moments=1, grace_hours=0)
    clean_up(store.url, "a", rules, str(first.ref))
    assert histories.with_state(store) == ["a/policy@1", "a/policy@2", "a/policy@3"]
    clean_up(store.url, "a", rules, str(second.ref))
    assert histories.with_state(store) == ["a/policy@2", "a/policy@3"]
    assert store.exists(second.ref)
    histories.make_policy(store, 4, inputs={"policy": second})
    clean_up(store.url, "a", rules, str(second.ref))
    assert histories.with_state(store) == ["a/policy@2", "a/policy@4"], "the run's, and the newest"
    clean_up(store.url, "a", rules)
    assert histories.with_state(store) == ["a/policy@4"]


def test_what_goes_wrong_with_cleaning_is_a_warning(tmp_path, caplog):
    path = str(tmp_path / "store")
    store = Store(path)
    rules = Retention(keep=1)
    (Path(store.url) / "a/tags/prod").mkdir(parents=True)
    (Path(store.url) / "a/tags/prod/000001.json").write_text("nonsense")
    with caplog.at_level("INFO", "quiver"):
        clean_up(path, "a", Retention())
        assert caplog.messages == []
        clean_up(path, "a", rules)
        assert "retention" in caplog.messages[-1] and "E-CORRUPT a tag prod" in caplog.messages[-1]
        shutil.rmtree(path)
        clean_up(path, "a", rules)
    assert "E-CONFIG" in caplog.messages[-1] and "the run continues" in caplog.messages[-1]
    assert {record.levelname for record in caplog.records} == {"WARNING"}


def test_the_next_commands_know_whose_state_is_gone(folder, finished):
    def second(*settings: str) -> str:
        recipe = load(folder / "recipe.toml", list(settings))
        return next_commands(recipe, folder / "recipe.toml", [], finished)[0]

    fresh = "optimize.load_optimizer=false"
    assert fresh not in second() and fresh not in second("retention.moments=2")
    assert fresh in second("retention.moments=1")
    assert "save_dtype" not in second("retention.moments=1")
    rounded = second("retention.moments=1", "optimize.save_dtype=bfloat16")
    assert f"--set {fresh} --set optimize.save_dtype=auto" in rounded
    assert fresh in second("retention.moments=2", "overlap=1", "optimize.max_staleness=1")
