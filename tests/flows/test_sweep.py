"""`quiver sweep`: cells on the same saved rollouts, and cells that are whole runs."""

import csv
import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from quiver.flows import dispatch
from quiver.flows.calls import by_hand
from quiver.flows.cli import main as cli
from quiver.flows.cli import shared
from quiver.flows.cli.sweeping import _csv_lines
from quiver.flows.estimation import estimate
from quiver.flows.look.gather import gather
from quiver.flows.look.stage import render
from quiver.flows.look.sweeps import cell_rows, flat_row, read, show, sweep_lines, table_of
from quiver.flows.look.words import score_of
from quiver.flows.recipe import load
from quiver.flows.sweep import _distinct, _hopeless, _Running, cells_of, name_of, sweep
from quiver.schemas.errors import ConfigError
from quiver.schemas.refs import parse
from quiver.stages.core.run import stage_process
from quiver.stages.core.run.call import Call
from quiver.stages.core.store import Store, retention
from quiver.stages.core.store.listing import is_of_sweep
from quiver.stages.core.store.storage import with_checksum
from quiver.stages.evaluate.comparison import compare
from quiver.stages.evaluate.statistics import holm
from tests.flows.conftest import QUICK, options, stay_here, write_recipe
from tests.flows.test_report import Page
from tests.writing import run_here, run_iteration, write_lines

SWEEP = """
[sweep]
rollouts = "tiny/rollouts@1"
[sweep.over]
reward = [
    { name = "even", functions = [{ use = "rewards.py:evenness" }] },
    { name = "low", functions = [{ use = "low.py:share" }] },
]
"optimize.learning_rate" = [1e-3, 1e-2]
"""
FAST = options(QUICK)
LOW = """
def share(completion_ids, **_):
    return [sum(t < 160 for t in ids) / len(ids) for ids in completion_ids]
"""
ESTIMATE = {"estimate": 0.1, "interval": [0.0, 0.2], "refused": None}
CELL = ["generate", "reward", "evaluate"]
"""What the measurement of a cell makes; its prompts are the base's."""


def saved(recipe):
    """The record of the recipe's sweep; None if it was never begun."""
    return read(Store(recipe.store, create=False), recipe.run, name_of(recipe))


def alike():
    """The record of the sweep that several tests look at."""
    return saved(load("recipe.toml", ["run=alike"]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A recipe with a sweep, and rollouts of its first iteration."""
    path = write_recipe(tmp_path_factory.mktemp("sweep"))
    (path / "low.py").write_text(LOW)
    with (path / "recipe.toml").open("a") as recipe:
        recipe.write(SWEEP)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        run_iteration(load("recipe.toml"), Store("store"))
    return path


@pytest.fixture
def made(folder, monkeypatch) -> list[str]:
    """Stages that were run, in this process."""
    stages: list[str] = []
    stay_here(folder, monkeypatch, stages)
    return stages


@pytest.fixture
def swept(made, command) -> Callable[..., dict]:
    """A function that runs `quiver sweep` on the recipe; returns its answer."""

    def call(run: str, *words: str, code: int = 0) -> dict:
        ended, answer = command("sweep", "recipe.toml", "--set", f"run={run}", *words)
        assert ended == code, answer
        return answer

    return call


def test_each_cell_trains_on_the_saved_rollouts_and_all_are_judged_alike(made, swept):
    answer = swept("alike")
    rows = answer["cells"]
    assert [row["error"] for row in rows] == [None] * 4
    # one reward for two cells each, and one for each measurement; nothing is sampled for training
    expected = {"prompt": 1, "generate": 5, "reward": 2 + 5, "optimize": 4, "evaluate": 5}
    assert Counter(made) == expected
    scores = [row["score"] for row in rows]
    assert scores == sorted(scores, reverse=True)
    store = Store("store")
    baseline = store.open(answer["baseline"])
    seeds, labels = set(), set()
    for row in rows:
        name, rate = (row["settings"][key] for key in ("reward", "optimize.learning_rate"))
        name = name["name"]
        labels.add((name, rate))
        policy = store.open(row["policy"]).manifest
        assert policy.input("policy").ref == "tiny/policy@0"
        assert policy.input("rollouts").ref == "tiny/rollouts@1"
        assert policy.config["learning_rate"] == rate and name in policy.note
        rewards = store.open(policy.input("rewards").ref).manifest
        file = {"low": "low.py", "even": "rewards.py"}[name]
        assert rewards.config["functions"][0]["use"].startswith(file)
        evaluation = store.open(row["evaluation"])
        rollouts = store.open(evaluation.manifest.input("rollouts").ref)
        seeds.add(tuple(rollouts.table()["seed"].to_pylist()))
        paired = compare(store, baseline, evaluation)["difference"]["score"]
        assert row["difference"] == pytest.approx(paired["score"])
    assert len(seeds) == 1, "the same random numbers for all"
    assert labels == set(itertools.product(("even", "low"), (1e-3, 1e-2)))


def test_show_needs_manifests_alone_and_the_same_again_makes_nothing(
    made, monkeypatch, swept, capsys
):
    options = ("recipe.toml", "--set", "run=alike")
    first = swept("alike")
    assert made == [] and not any(row["cached"] for row in first["cells"])
    assert cli_lines(capsys, "sweep", *options)[-1].startswith("All of it was already done")
    shown = cli_lines(capsys, "sweep", *options, "--show")
    assert shown[-1].startswith("4 cells: 4 trained, 0 already done; 4 generations saved")
    with monkeypatch.context() as patch:
        patch.setattr("quiver.flows.sweep.Cell.train", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            sweep(load("recipe.toml", ["run=alike"]))
    assert cli_lines(capsys, "sweep", *options, "--show") == shown, "until as much is known again"
    retention.remove(Store("store"), first["cells"][-1]["policy"])
    assert swept("alike", "--show")["cells"] == first["cells"] and made == []
    refused = swept("alike", "--show", "--then", "2", code=2)
    assert "runs nothing" in refused["error"]["message"]


def test_show_lists_all_sweeps_of_the_run_if_none_has_these_settings(made, swept, capsys):
    options = ("recipe.toml", "--set", "run=listed")
    assert "the run has none" in swept("listed", "--show", code=2)["error"]["message"]
    swept("alike")
    store = Store("store")
    record = alike()
    for name, begun in (("a" * 12, "2026-03-02T01:00:00.000+00:00"), ("b" * 12, "2026-03-01")):
        text = with_checksum({**record, "sweep": name, "begun": begun})
        store.storage.put(f"listed/sweeps/{name}.json", text)
    made.clear()
    sweeps = swept("listed", "--show")["sweeps"]
    found = [(one["sweep"][0], len(one["cells"])) for one in sweeps]
    assert found == [("b", 4), ("a", 4)] and made == []
    lines = cli_lines(capsys, "sweep", *options, "--show")
    assert [line for line in lines if line.startswith("Sweep")] == [
        f"Sweep {name * 12} of {begun} UTC, on tiny/rollouts@1, over reward even, low; "
        "learning_rate 0.001, 0.01"
        for name, begun in (("b", "2026-03-01 00:00"), ("a", "2026-03-02 01:00"))
    ]
    rows = list(csv.DictReader(cli_lines(capsys, "sweep", *options, "--show", "--csv")))
    assert Counter(row["sweep"][0] for row in rows) == {"a": 4, "b": 4}


def test_what_a_sweep_makes_is_told_from_the_iterations_of_its_run(swept):
    answer = swept("alike")
    store = Store("store")
    refs = [answer["baseline"]]
    refs += [row[kind] for row in answer["cells"] for kind in ("policy", "evaluation")]
    assert all(is_of_sweep(store.version(parse(ref)).manifest.note) for ref in refs)
    assert not any(is_of_sweep(version.manifest.note) for version in store.versions("tiny"))
    other = swept("alike", "--over", "optimize.learning_rate=1e-3")
    assert [row["cached"] for row in other["cells"]] == [True, True], "another sweep's cells"


def test_a_sweep_that_was_killed_in_its_first_cell_says_how_to_go_on(made, monkeypatch):
    recipe = load("recipe.toml", ["run=begun"])
    kill(monkeypatch, recipe, lambda call: call.stage == "optimize")
    shown = show(Store("store"), saved(recipe))
    assert [row[3] for row in shown.cells[1:]] == ["not trained yet"] * 4
    [note] = shown.notes
    assert note.startswith("4 cells: none is done yet") and "`quiver sweep RECIPE` with" in note


def kill(monkeypatch, recipe, comes: Callable[[Call], bool]) -> None:
    """Interrupt a sweep at the first call for which `comes` is true."""
    run_call = dispatch.run_call

    def run_or_kill(call, **options):
        if comes(call):
            raise KeyboardInterrupt
        return run_call(call, **options)

    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "run_call", run_or_kill)
        with pytest.raises(KeyboardInterrupt):
            sweep(recipe)


def cli_lines(capsys, *words: str) -> list[str]:
    """What a command line prints for a reader."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["quiver", *words])
        patch.setattr(shared, "_stdout", None)
        capsys.readouterr()
        assert not cli._run()
    return capsys.readouterr().out.splitlines()


def test_a_killed_sweep_goes_on_and_makes_nothing_twice(made, monkeypatch):
    recipe = load("recipe.toml", [*QUICK, "run=killed", "sweep.over.reward=[{}]"])
    for num_calls in (4, 9):
        kill(monkeypatch, recipe, lambda call, after=num_calls: len(made) == after)
    record = sweep(recipe)
    assert all("evaluation" in cell for cell in record["cells"].values())
    counts = {"prompt": 1, "generate": 3, "reward": 1 + 3, "optimize": 2, "evaluate": 3}
    assert Counter(made) == counts


def test_a_failing_cell_does_not_end_the_others_and_is_tried_again(made, monkeypatch, swept):
    Path("low.py").write_text(
        "def share(completions, **_):\n    return [1 / 0 for _ in completions]\n"
    )
    options = ("failing", *FAST, "--over", "optimize.learning_rate=1e-3")
    even, low = swept(*options, code=6)["cells"]
    assert (even["error"], low["score"]) == (None, None)
    assert (even["settings"]["reward"]["name"], low["error"]["code"]) == ("even", "E-REWARD")
    Path("low.py").write_text(LOW)
    made.clear()
    store, recipe = Store("store"), load("recipe.toml", [*QUICK, "run=failing"])
    over = {**recipe.sweep.over, "optimize.learning_rate": [1e-3]}
    recipe = recipe.model_copy(update={"sweep": recipe.sweep.model_copy(update={"over": over})})
    record = saved(recipe)
    shown = show(store, record)
    [failed] = [row for row in shown.cells if any("failed: E-REWARD" in text for text in row)]
    assert max(map(len, failed)) < 80, "the table does not grow with the error"
    assert "1 trained, 0 already done, 1 failed; 1 generation saved" in shown.notes[0]
    assert shown.notes[-1].startswith("cell 2 failed: E-REWARD")
    assert low["error"]["message"] in shown.notes[-1] and low["error"]["next"] in shown.notes[-1]
    read = csv.DictReader(_csv_lines([shown.answer]))
    assert [row["error"].partition(" ")[0] for row in read] == ["", "E-REWARD"]
    swept(*options)
    assert Counter(made) == Counter(["reward", "optimize", *CELL])
    # a cell's reward has changed, and the sweep is killed before that cell is done: no mixed table
    record = saved(recipe)
    Path("low.py").write_text(LOW.replace("160", "150"))
    kill(monkeypatch, recipe, lambda call: True)
    assert saved(recipe) == record
    Path("low.py").write_text(LOW)


def test_the_best_two_continue_on_fresh_rollouts_with_fresh_samples(
    made, monkeypatch, swept, command
):
    answer = swept("alike", "--then", "1")
    best = [row["policy"] for row in answer["cells"][:2]]
    store = Store("store")
    for row in answer["then"]:
        policy = store.open(row["policy"]).manifest
        assert policy.input("policy").ref in best
        rollouts = store.open(policy.input("rollouts").ref).manifest
        assert rollouts.require_model("policy").ref == policy.input("policy").ref
        assert rollouts.config["round"] == 2
        evaluation = store.open(row["evaluation"]).manifest
        sampled = store.open(evaluation.input("rollouts").ref).manifest.config["seed"]
        before = store.open(answer["cells"][0]["evaluation"]).manifest.input("rollouts").ref
        assert sampled == store.open(before).manifest.config["seed"] + 1
    assert len(answer["then"]) == 2
    fresh = store.open(answer["then_baseline"]).manifest.metrics
    [line] = [line for line in sweep_lines(show(store, alike())) if "by which" in line]
    assert line.endswith(f"tiny/policy@0 scores {score_of(fresh)}:")
    for row in answer["then"]:
        assert row["score"] - fresh["score"] == pytest.approx(row["difference"])
    # the start was measured with both seeds: a comparison takes the seed that both policies have
    first = answer["cells"][0]
    _, compared = command("compare", "tiny/policy@0", first["policy"])
    assert compared["difference"]["score"]["score"] == pytest.approx(first["difference"])
    shown = gather(store, "alike", first["policy"]).evaluations
    assert [each.ref for each in shown] == [answer["baseline"], first["evaluation"]]
    assert swept("alike", "--show") == answer
    made.clear()
    assert swept("alike")["then"] == answer["then"] and made == []
    assert swept("alike", "--then", "1") and made == []
    # the same again, killed while the second one continues
    record = alike()
    first = Mock(side_effect=[answer["then"][0]["policy"], KeyboardInterrupt])
    monkeypatch.setattr("quiver.flows.sweep.Cell.train_further", first)
    with pytest.raises(KeyboardInterrupt):
        sweep(load("recipe.toml", ["run=alike"]), 1)
    assert alike() == record


def test_rollouts_of_several_policies_train_the_newest_and_a_setting_continues_once(swept):
    recipe, store = load("recipe.toml"), Store("store")
    asked = {"prompts": "tiny/prompts@1", "policy": "tiny/policy@1"}
    run_here("generate", recipe.generate_config(2), store, into="tiny", **asked)
    settings = [
        "optimize.max_staleness=1",
        "sweep.rollouts=['tiny/rollouts@1','tiny/rollouts@2']",
        "sweep.over={'optimize.learning_rate'=[1e-3]}",
        "evaluate.generate.samples_per_prompt=3",
        "retention={keep=1, grace_hours=0}",
    ]
    answer = swept("mixed", *FAST, *options(settings), "--seeds", "2", "--then", "2")
    tested = store.version(parse(answer["baseline"])).manifest.require_model("policy").ref
    cells = [store.version(parse(row["policy"])).manifest for row in answer["cells"]]
    trained = {manifest.input("policy").ref for manifest in cells}
    assert trained == {tested} == {"tiny/policy@1"}
    [further] = answer["then"]  # another seed is no other setting

    def rollouts_of(ref: str) -> dict:
        rollouts = store.version(parse(ref)).manifest.require_input("rollouts").ref
        return store.version(parse(rollouts)).manifest.config

    assert rollouts_of(further["policy"])["round"] == 4, "behind both rounds that were learned from"
    measured = [answer["baseline"], answer["then_baseline"], further["evaluation"]]
    assert [rollouts_of(ref)["samples_per_prompt"] for ref in measured] == [3, 3, 3]
    assert all(store.exists(parse(row["policy"])) for row in answer["cells"]), "no retention"


def test_cells_without_rollouts_are_whole_runs_under_names_of_their_own(made, swept):
    settings = ["sweep.rollouts=null", "sweep.over={}", "iterations=1"]
    words = ["whole", *FAST, *options(settings), "--over", "optimize.algorithm=grpo,rloo"]
    cells = swept(*words)["cells"]
    store = Store("store")
    policies = [store.open(row["policy"]).manifest for row in cells]
    runs, notes = ({getattr(each, name) for each in policies} for name in ("run", "note"))
    assert len(runs) == 2 and all(run.startswith("whole-") for run in runs)
    assert len(notes) == 2 and all("cell" in note for note in notes)
    assert {each.config["algorithm"] for each in policies} == {"grpo", "rloo"}
    assert {store.open(row["evaluation"]).ref.run for row in cells} == {"whole"}
    made.clear()
    assert swept(*words) and made == []


def test_a_process_serves_all_cells(folder, monkeypatch, command):
    monkeypatch.chdir(folder)
    started = []
    start = stage_process.StageProcess.__init__
    monkeypatch.setattr(
        stage_process.StageProcess,
        "__init__",
        lambda self, *arguments: (started.append(arguments), start(self, *arguments))[1],
    )
    options = (*FAST, "--set", "run=served", "--set", "sweep.over.reward=[{}]")
    code, answer = command("sweep", "recipe.toml", *options)
    assert code == 0 and len(answer["cells"]) == 2 and len(started) == 1


def test_over_is_read_as_a_recipe_is(folder, monkeypatch, command, capsys):
    monkeypatch.chdir(folder)
    recipe = load("recipe.toml", ["sweep.over={}", "sweep.num_seeds=3"])
    assert [cell.recipe.seed for cell in cells_of(recipe)] == [7, 8, 9]
    whole, same = "sweep.rollouts=null", "is the same for all cells"
    named = "{data=[{name='main'}, {name='socratic'}]}"
    recipe = load("recipe.toml", [whole, f"sweep.over={named}"])
    assert [cell.recipe.data.name for cell in cells_of(recipe)] == ["main", "socratic"]
    for over, words, *settings in (
        ("{}", "names no key"),
        ("{generate=[{}]}", "does not change what is learned"),
        ("{'optimize.lerning_rate'=[1]}", "did you mean learning_rate"),
        ("{seed=[1]}", "num_seeds", "sweep.num_seeds=2"),
        ("{seed=[1, 2]}", "change nothing", "optimize.seed=3"),
        ("{'evaluate.k'=[[1]]}", same, whole),
        ("{store=['a']}", same, whole),
        ("{'policy.model'=['model']}", same, whole),
        ("{data=[{held_out={limit=2}}]}", same, whole),
    ):
        wrong = load("recipe.toml", [f"sweep.over={over}", *settings])
        with pytest.raises(ConfigError, match=words):
            cells_of(wrong)


def held_out(num_rows: int) -> str:
    """The setting of a file with so many held-out questions."""
    rows = [{"question": f"What is {n} plus 5?", "answer": n} for n in range(num_rows)]
    write_lines(f"{num_rows}.jsonl", rows)
    return f"data.held_out={{source='{num_rows}.jsonl'}}"


def test_trained_cells_are_estimated_from_the_rollouts_of_the_first_measurement(swept):
    settings = [held_out(40), "sweep.over.reward=[{}]"]
    words = ["estimated", *options(settings), "--over", "optimize.learning_rate=1e-4,0.5"]
    answer = swept(*words, "--estimate")
    assert {row["error"] for row in answer["cells"]} == {None}
    small, large = sorted(answer["cells"], key=lambda row: row["cell"])
    recipe = load("recipe.toml", ["run=estimated"])
    with by_hand(recipe):
        [again] = estimate(recipe, [small["policy"]], [answer["baseline"]])["estimates"]
    assert small["estimate"]["estimate"] == pytest.approx(again["estimate"], abs=1e-9)
    assert abs(small["estimate"]["estimate"] - small["score"]) < 0.1
    assert large["estimate"]["refused"], "it moved too far"
    assert large["evaluation"], "and so is measured"
    assert swept(*words, "--show")["cells"] == answer["cells"]


def test_cells_that_cannot_be_estimated_are_measured(swept, caplog):
    """The base policy's held-out answers are greedy, which an estimate cannot weigh."""
    greedy = "evaluate.generate={samples_per_prompt=1,sampling={temperature=0}}"
    settings = [held_out(3), "sweep.over.reward=[{}]", greedy]
    over = ("--over", "optimize.learning_rate=1e-4,1e-3")
    cells = swept("greedy", *options(settings), *over, "--estimate")["cells"]
    assert all(row["evaluation"] and not row["error"] for row in cells)
    assert "nothing is estimated, so each cell is measured" in caplog.text
    assert "its rollouts were sampled with temperature = 0" in caplog.text


def test_a_cell_whose_interval_ends_below_another_ones_is_not_measured(made):
    def trained(number: int, low: float, high: float, **estimate) -> dict:
        expected = {"estimate": (low + high) / 2, "interval": [low, high], "refused": None}
        settings = {"optimize.learning_rate": number / 10}
        estimate = {**expected, **estimate}
        return {"settings": settings, "policy": f"a/policy@{number}", "estimate": estimate}

    refused = {"interval": None, "estimate": None, "refused": "too far"}
    entries = [trained(1, 0.5, 0.7), trained(2, 0.2, 0.49), trained(3, 0.3, 0.5)]
    entries.append(trained(4, 0.0, 0.1, **refused))
    assert _hopeless(entries) == {"a/policy@2"}
    rows = cell_rows(Store("store"), {"2": entries[1], "1": entries[0], "4": entries[3]})
    assert [row["cell"] for row in rows] == [1, 2, 4]
    first, second, last = (line[3:5] for line in table_of(rows, "a/policy@0")[1:])
    assert second == ["estimated 0.3450, 0.2000 … 0.4900", "not measured"]
    assert first[0] == "estimated 0.6000, 0.5000 … 0.7000" and last == ["", "not measured"]
    assert flat_row("cells", rows[1])["estimate_high"] == 0.49


def test_settings_are_shown_as_they_were_given_and_other_seeds_are_one_setting():
    rates = (1e-5, 1.00002e-5)
    cells = {
        str(number): {"settings": {"optimize.learning_rate": rate, "optimize.seed": seed,
                                   "data.limit": 2048, "optimize.lora": None, "reward.clip": True},
                      "policy": None}
        for number, (rate, seed) in enumerate(itertools.product(rates, (1, 2)), 1)
    }  # fmt: skip
    rows = cell_rows(Store("store"), cells)
    shown = [flat_row("cells", row)["learning_rate"] for row in rows]
    assert list(map(float, shown)) == [1e-5, 1e-5, 1.00002e-5, 1.00002e-5]
    flat = flat_row("cells", rows[0])
    assert [flat[name] for name in ("limit", "lora", "clip")] == ["2048", "null", "true"]
    measured = [{**row, "evaluation": "e", "weights": str(row["cell"])} for row in rows]
    assert [row["cell"] for row in _distinct(measured)] == [1, 3]


def test_a_cell_that_was_only_estimated_counts_in_the_correction(swept):
    """It was left out by the answers to the same held-out prompts."""
    answer = swept("alike")
    entries = alike()["cells"]
    for number in ("3", "4"):
        entries[number] = {**entries[number], "estimate": ESTIMATE}
        entries[number].pop("evaluation")
    rows = cell_rows(Store("store"), entries)
    ps = sorted(row["p"] for row in rows if row["p"] is not None)
    assert [row["p"] for row in rows].count(None) == 2 and rows[-1]["p_holm"] is None
    assert sorted(row["p_holm"] for row in rows[:2]) == holm([*ps, 1.0, 1.0])[:2]
    assert "Holm over 4)" in table_of(rows, answer["baseline"])[0][-3]


def test_the_report_shows_sweeps_and_no_estimate_as_a_measurement(swept):
    swept("alike")
    store, record = Store("store"), alike()
    measured = table_of(cell_rows(store, record["cells"]), "tiny/policy@0")
    record["cells"]["3"] |= {"estimate": ESTIMATE, "evaluation": None}
    store.storage.put("alike/sweeps/estimated.json", with_checksum(record))
    store.storage.put("alike/sweeps/damaged.json", b"{}")
    estimated = table_of(cell_rows(store, record["cells"]), "tiny/policy@0")
    page = Page(render(store, gather(store, "alike")))
    assert all(row in page.rows for row in [*measured, *estimated])
    assert sum("estimated 0.1000, 0.0000 … 0.2000" in row and "not measured" in row
               for row in page.rows) == 1  # fmt: skip
    begun = f"{record['begun'][:10]} {record['begun'][11:16]} UTC"
    title = f"Sweep {record['sweep']} of {begun}, on tiny/rollouts@1, over reward even, low; "
    assert f"{title}learning_rate 0.001, 0.01" in page.words
    assert page.words.count("Sweeps") == 2 and "1 cell only estimated" in page.words


def test_what_was_trained_further_is_forgotten_when_a_cell_cannot_be_measured_again(made):
    recipe = load("recipe.toml", ["run=forgotten"])
    cell = cells_of(recipe)[0]
    running = _Running(Store("store"), recipe.run, name_of(recipe), ["tiny/rollouts@1"])
    running._before["cells"] = {"1": {"evaluation": "forgotten/evaluations@1"}}
    entry = {"settings": cell.settings, "policy": "forgotten/policy@7"}
    running.record |= {"cells": {"1": entry}, "then": {"1": entry}}
    with by_hand(recipe):
        running.measure("cells", [cell], recipe.held_out_resolved(), "forgotten/evaluations@9")
    record = saved(recipe)
    assert record["cells"]["1"]["error"]["code"] == "E-LINEAGE" and record["then"] == {}
