"""[data] refill and curriculum: rounds of sampling until enough groups have contrast, and rows
chosen by their rewards. Which rows each round asks, what is learned from, and that a run that was
stopped continues to the same end."""

from collections import defaultdict

import pyarrow as pa
import pytest

from quiver.flows import calls
from quiver.flows.calls import perform
from quiver.flows.look.gather import gather
from quiver.flows.look.pages import iterations_page as page
from quiver.flows.look.stage import render
from quiver.flows.nightly import plan_night
from quiver.flows.post_train import Chain
from quiver.flows.recipe import load
from quiver.flows.rerun import rerun
from quiver.flows.rounds import Iteration, Round
from quiver.schemas.errors import ConfigError
from quiver.schemas.metrics import groups_with_contrast
from quiver.stages.core.store import Store
from quiver.stages.core.store.retention import Rule, collect
from quiver.stages.prompt.order import choose
from quiver.stages.reward.measures import groups
from tests.flows.conftest import QUICK, RECIPE
from tests.flows.stages_here import Stages
from tests.tiny import make_folder
from tests.writing import run_here, write_lines

ROWS = 24
CONTRAST = '''
def third(completion_ids, answer, **_):
    """Different rewards for the answers to every third question, else equal ones."""
    return [
        sum(t % 2 == 0 for t in ids) / len(ids) if number % 3 == 0 else 0.5
        for ids, number in zip(completion_ids, answer)
    ]
'''
REFILL = "data.refill={groups=3,max_rounds=3}"
SETTINGS = (
    *QUICK,
    "data.held_out=null",
    REFILL,
    "reward.functions=[{use='rewards.py:third'}]",
)


def write(folder):
    """The recipe with all that it names."""
    if not folder.exists():
        folder.mkdir()
        make_folder(folder / "model")
    (folder / "recipe.toml").write_text(RECIPE)
    rows = [{"question": f"What is {a} plus 5?", "answer": a} for a in range(ROWS)]
    write_lines(folder / "questions.jsonl", rows)
    (folder / "rewards.py").write_text(CONTRAST)
    return folder


def improve(monkeypatch, folder, *settings, stages=None, **about) -> list[dict]:
    """The iterations of a recipe in `folder`, as `quiver run` prints them."""
    monkeypatch.chdir(folder)
    stages = stages or Stages()
    monkeypatch.setattr(calls, "check_stages", lambda *_: None)
    recipe = load("recipe.toml", [*SETTINGS, *settings]).resolved()
    with stages.of(recipe):
        base = perform("policy", recipe.policy, {}).ref
        iterations = Chain(recipe).improve(base, base, **about)
    return [iteration.to_json() for iteration in iterations]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder in which a run was stopped after each of its stages, up to the second round of its
    second iteration."""
    folder = write(tmp_path_factory.mktemp("refill") / "work")
    with pytest.MonkeyPatch.context() as monkeypatch:
        for _ in range(13):
            with pytest.raises(KeyboardInterrupt):
                improve(monkeypatch, folder, stages=Stages(1))
    return folder


@pytest.fixture
def store(folder) -> Store:
    return Store(folder / "store")


@pytest.fixture(scope="module")
def done(folder) -> list[dict]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        return improve(monkeypatch, folder)


def contrast_of(store: Store, rewards: str) -> set[str]:
    """The groups of a rewards version whose rewards are not all equal."""
    found = defaultdict(set)
    for row in store.open(rewards).table().to_pylist():
        found[row["group_id"]].add(row["reward"])
    return {group for group, values in found.items() if len(values) > 1}


def test_rounds_follow_until_enough_groups_have_contrast(store, done):
    counts = []
    for iteration in done:
        found = [len(contrast_of(store, each["rewards"])) for each in iteration["rounds"]]
        assert [each["contrast_groups"] for each in iteration["rounds"]] == found
        assert sum(found[:-1]) < 3
        assert sum(found) >= 3 or len(found) == 3
        assert iteration["prompts"] == iteration["rounds"][0]["prompts"]
        counts.append(len(found))
    assert max(counts) > 1
    assert store.numbers("tiny", "rollouts") == list(range(1, sum(counts) + 1))


def test_each_round_asks_the_next_rows(store, done):
    rounds = [each for iteration in done for each in iteration["rounds"]]
    assert [each["round"] for each in rounds] == list(range(1, len(rounds) + 1))
    asked = []
    for each in rounds:
        rows = store.open(each["prompts"]).table()["group_id"].to_pylist()
        assert rows == [f"{row:06d}" for row in choose(ROWS, 4, 7, each["round"])]
        asked += rows
    assert len(set(asked)) == len(asked), "no row is asked twice before all were"


def test_the_policy_learns_from_the_contrast_of_all_rounds(store, done):
    for number, iteration in enumerate(done):
        before = f"tiny/policy@{number}"
        policy = store.open(iteration["policy"]).manifest
        inputs = {"policy": before}
        expected = set()
        for position, each in enumerate(iteration["rounds"], 1):
            suffix = f".{position}" if position > 1 else ""
            inputs |= {f"{kind}{suffix}": each[kind] for kind in ("rollouts", "rewards")}
            rollouts = store.open(each["rollouts"])
            assert rollouts.manifest.model("policy").ref == before
            groups = contrast_of(store, each["rewards"])
            rows = rollouts.table().to_pylist()
            expected |= {row["rollout_id"] for row in rows if row["group_id"] in groups}
        assert {entry.role: entry.ref for entry in policy.inputs} == inputs
        table = store.open(policy.metrics["advantages"]).table().to_pylist()
        assert {row["rollout_id"] for row in table if row["kept"]} == expected
        assert {row["drop_reason"] for row in table} == {None, "zero_variance"}


def test_again_and_further(store, folder, done, monkeypatch):
    """What is finished is found; one more iteration begins with the next round."""
    stages = Stages()
    again = improve(monkeypatch, folder, stages=stages)
    assert stages.num_made == 0
    assert without_seconds(again) == without_seconds(done)
    before = {str(version.ref) for version in store.versions()}
    longer = improve(monkeypatch, folder, "iterations=3")
    assert without_seconds(longer[:2]) == without_seconds(done)
    last = done[-1]["rounds"][-1]["round"]
    added = [each["round"] for each in longer[2]["rounds"]]
    assert added == list(range(last + 1, last + 1 + len(added)))
    refs = {str(version.ref) for version in store.versions()} - before
    assert len(refs) == 3 * len(added) + 3


def without_seconds(iterations: list[dict]) -> list[dict]:
    return [{**iteration, "seconds": None} for iteration in iterations]


def test_an_undisturbed_run_makes_the_same(folder, done, tmp_path, monkeypatch):
    other = improve(monkeypatch, write(tmp_path / "other"))
    assert without_seconds(other) == without_seconds(done)
    one, two = Store(folder / "store"), Store(tmp_path / "other/store")
    for ref in (done[-1]["policy"], done[-1]["rounds"][-1]["rewards"]):
        assert one.open(ref).manifest.content_hash == two.open(ref).manifest.content_hash


def test_with_overlap_all_rounds_of_an_iteration_are_one_policy_behind(
    store, folder, done, monkeypatch
):
    behind = improve(monkeypatch, folder, "overlap=1", "optimize.max_staleness=1", "run=behind")
    rounds = [each for iteration in behind for each in iteration["rounds"]]
    assert [each["round"] for each in rounds] == list(range(1, len(rounds) + 1))
    manifests = [store.open(each["rollouts"]).manifest for each in rounds]
    assert {manifest.model("policy").ref for manifest in manifests} == {"behind/policy@0"}


def test_replay_takes_all_rounds_and_the_report_tells_them_apart(store, folder, done, monkeypatch):
    settings = ("optimize.replay=1", "optimize.max_staleness=1", "run=replayed")
    replayed = improve(monkeypatch, folder, *settings)
    policy = store.open(replayed[1]["policy"]).manifest
    rounds = [each["rollouts"] for iteration in replayed[::-1] for each in iteration["rounds"]]
    entries = [entry for entry in policy.inputs if entry.role.startswith("rollouts")]
    assert [entry.ref for entry in entries] == rounds
    iterations = gather(store, "replayed").iterations
    for iteration, gathered in zip(replayed, iterations, strict=True):
        refs = [manifest.ref for manifest in gathered.of_kind("rollouts")]
        assert refs == [each["rollouts"] for each in iteration["rounds"]]


def test_a_night_goes_on_behind_the_last_round_of_a_decided_one(folder, done, monkeypatch):
    monkeypatch.chdir(folder)
    settings = [REFILL, "data.held_out={source='questions.jsonl',split='test'}", "run=night"]
    recipe = load("recipe.toml", settings)
    store = Store(recipe.store)
    assert (plan_night(recipe, "1").first, plan_night(recipe, "1").first_round) == (1, 1)
    about = {"decision": "rejected", "iteration": 2, "round": 5}
    base = run_here("policy", recipe.policy, store, into="night")
    store.tag("night", "prod", base, expected=None, why="no", key="night 1", about=about)
    assert (plan_night(recipe, "2").first, plan_night(recipe, "2").first_round) == (3, 6)
    iterations = improve(monkeypatch, folder, "run=night", "iterations=3", first=3, first_round=6)
    assert iterations[0]["rounds"][0]["round"] == 6


def test_page_and_report_tell_of_the_rounds(store, done):
    gathered = gather(store, "tiny")
    report = render(store, gathered)
    table = page("tiny", done, None)["markdown"]
    by_policy = {each.policy.ref: each for each in gathered.iterations}
    for iteration in done:
        rounds = iteration["rounds"]
        num_contrast = sum(each["contrast_groups"] for each in rounds)
        rewards = [store.open(each["rewards"]).table()["reward"].to_pylist() for each in rounds]
        mean = pytest.approx(sum(map(sum, rewards)) / sum(map(len, rewards)), abs=1e-6)
        shown = by_policy[iteration["policy"]]
        assert iteration["reward_mean"] == mean == shown.reward_mean
        assert shown.contrast == (num_contrast, 4 * len(rounds))
        assert f"<td>{num_contrast} of {4 * len(rounds)}</td>" in report
        assert f"<td>{', '.join(each['rollouts'] for each in rounds)}</td>" in report
        assert f" | {len(rounds)} | {num_contrast} |" in table
    assert "rounds of sampling" in report


def test_a_run_without_it_has_the_rounds_of_before(folder, done, monkeypatch):
    """Its first iteration finds what the first round of the filled up one is."""
    plain = improve(monkeypatch, folder, "data.refill=null", "iterations=1")
    assert plain[0]["rewards"] == done[0]["rewards"]
    assert "rounds" not in plain[0] and "more" not in plain[0] and "round" not in plain[0]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["data.limit=null"], "data.refill takes the next rows of the data: set data.limit"),
        (["data.refill={groups=13,max_rounds=3}"], "3 rounds of data.limit = 4 prompts have 12"),
        (["optimize.algorithm=ppo"], "which optimize.algorithm does not compare"),
        (["data.refill={groups=0}"], "data.refill.groups"),
        (["data.refill={max_rounds=2}"], "data.refill.groups is missing"),
    ],
)
def test_what_could_never_be_filled_up_is_refused(recipe, settings, said):
    with pytest.raises(ConfigError) as caught:
        load(recipe, ["data.held_out=null", REFILL, *settings])
    assert said in caught.value.message


def test_groups_without_contrast_are_left_out_unless_the_recipe_says_otherwise(recipe):
    plain, filled = load(recipe), load(recipe, SETTINGS)
    assert plain.optimize_config().drop_zero_variance is None
    assert filled.optimize_config().drop_zero_variance is True
    kept = load(recipe, [*SETTINGS, "optimize.drop_zero_variance=false"])
    assert kept.optimize_config().drop_zero_variance is False
    assert filled.prompt_config(3).key() == plain.prompt_config(3).key()


def test_groups_with_contrast_are_those_whose_scored_rewards_differ():
    rewards = {"a": [1, 1], "b": [0, 1], "c": [None, 1], "d": [0, None, 1], "e": [2] * 3}
    rows = [(group, reward) for group, values in rewards.items() for reward in values]
    columns = {"rollout_id": map(str, range(len(rows)))}
    columns |= dict(zip(("group_id", "reward"), zip(*rows, strict=True), strict=True))
    table = pa.table({name: pa.array(column) for name, column in columns.items()})
    assert groups_with_contrast(groups(table)) == 2
    assert groups_with_contrast(groups(table.slice(0, 0))) == 0


# -- prompts chosen by rewards

CHOSEN = (
    "data.curriculum={low=0.2,high=0.8,iterations=1}",
    "data.refill={groups=4,max_rounds=2}",
    "optimize.max_staleness=1",
    "overlap=1",
)


@pytest.fixture(scope="module")
def chosen_folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("chosen") / "work")


@pytest.fixture(scope="module")
def chosen(chosen_folder) -> list[dict]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        return improve(monkeypatch, chosen_folder, *CHOSEN)


def rewards_of(store: Store, prompts: str) -> list[str]:
    return [entry.ref for entry in store.open(prompts).manifest.inputs]


def test_each_round_is_chosen_by_the_rewards_of_the_last_iterations_and_of_its_own(
    chosen_folder, chosen
):
    """With overlap, too: what is sampled while another iteration trains is chosen by what that one
    measured."""
    store = Store(chosen_folder / "store")
    measured: list[list[str]] = [[]]
    for iteration in chosen:
        measured.append([])
        for each in iteration["rounds"]:
            assert rewards_of(store, each["prompts"]) == measured[-2] + measured[-1]
            measured[-1].append(each["rewards"])
        groups = [
            set(store.open(each["prompts"]).table()["group_id"].to_pylist())
            for each in iteration["rounds"]
        ]
        assert not groups[0] & groups[1], "further rounds ask other rows"
    assert [len(refs) for refs in measured[1:]] == [2, 2]


def test_by_hand_the_same_prompts_are_found(chosen_folder, chosen, monkeypatch):
    monkeypatch.chdir(chosen_folder)
    recipe = load("recipe.toml", [*SETTINGS, *CHOSEN])
    store = Store("store")
    each = chosen[1]["rounds"][0]
    references = {"rewards": rewards_of(store, each["prompts"]), "policy": "tiny/policy@0"}
    with Stages().of(recipe):
        outcome = rerun(recipe, "prompt", references, each["round"])
    assert (outcome.ref, outcome.cached) == (each["prompts"], True)


def test_what_prompts_were_chosen_by_stays_without_what_was_scored(
    chosen_folder, chosen, monkeypatch
):
    """And the run goes on by it."""
    store = Store(chosen_folder / "store")
    collect(store, Rule(keep=1, moments=1, grace_seconds=0), apply=True)
    last = chosen[-1]["rounds"][-1]
    kept = rewards_of(store, last["prompts"])
    assert kept == ["tiny/rewards@1", "tiny/rewards@2", "tiny/rewards@3"]
    assert store.numbers("tiny", "rewards") == [1, 2, 3, 4]
    assert store.numbers("tiny", "rollouts") == [3, 4], "those that policy@2 learned from"
    assert store.numbers("tiny", "prompts") == [3, 4]
    stages = Stages()
    again = improve(monkeypatch, chosen_folder, *CHOSEN, stages=stages)
    assert stages.num_made == 0
    assert without_seconds(again) == without_seconds(chosen)
    further = improve(monkeypatch, chosen_folder, *CHOSEN, "iterations=3")[2]["rounds"]
    measured = [each["rewards"] for each in chosen[-1]["rounds"]]
    assert rewards_of(store, further[0]["prompts"]) == measured


@pytest.mark.parametrize(
    ("rounds", "mean"),
    [
        ([(1.0, 1), (0.0, 3)], 0.25),
        ([(None, 0), (0.5, 2)], 0.5),
        ([(None, 0), (None, 0)], None),
    ],
)
def test_the_mean_reward_of_an_iteration_is_over_the_rewards_of_all_its_rounds(rounds, mean):
    def sampled(number: int, reward_mean: float | None, num_scored: int) -> Round:
        refs = [f"tiny/{kind}@{number}" for kind in ("prompts", "rollouts", "rewards")]
        return Round(1, number, *refs, None, reward_mean, num_scored, {})

    made = tuple(sampled(number, *about) for number, about in enumerate(rounds, 1))
    assert Iteration(made, None, "tiny/policy@1", {}).reward_mean == mean


def test_held_out_rows_are_not_chosen(recipe):
    loaded = load(recipe, [CHOSEN[0]])
    assert loaded.prompt_config(1).curriculum.high == 0.8
    assert loaded.prompt_config(0, evaluation=True).curriculum is None
    with pytest.raises(ConfigError, match=r"data\.curriculum: low 0\.9 is above high 0\.8"):
        load(recipe, ["data.curriculum={low=0.9,high=0.8,iterations=1}"])
