"""Two evaluations beside one another: paired by what the prompts say, whatever their rows are
called; expected numbers are written out."""

import statistics

import numpy as np
import pyarrow as pa
import pytest
from typer.main import get_command

from quiver.flows.cli import app
from quiver.schemas import prompts, rewards, rollouts
from quiver.schemas.errors import ConfigError, LineageError
from quiver.stages.common import config as common
from quiver.stages.common.models.checkpoints import as_model
from quiver.stages.common.runtime.runner import run_stage
from quiver.stages.evaluate.comparison import compare
from quiver.stages.evaluate.estimators import bootstrap_interval
from quiver.stages.evaluate.stage import Config
from quiver.stages.report.paired import find_evaluations
from tests.writing import begin


def write(store, run, kind, table, inputs, models=()):
    about = {"stage": "test", "stage_version": 1, "config": common.Config(), "inputs": inputs}
    with begin(store, run, kind, **about, models=models, force=True) as work:
        work.write(0, table)
        return work.commit()


@pytest.fixture
def evaluated(store, policy):
    """An evaluation in `run` of `tiny/policy@0`, made of scores by question; groups are called by
    `prefix` and their number, and rollouts by the run."""

    def make(run, scores, prefix="", config=None):
        groups = [f"{prefix}{number}" for number in range(len(scores))]
        columns = pa.array([{}] * len(groups), pa.struct([]))
        schema = prompts.SCHEMA.set(4, pa.field("columns", columns.type, nullable=False))
        ids = pa.array([[1]] * len(groups), schema.field("prompt_ids").type)
        none = pa.nulls(len(groups), prompts.MESSAGES)
        asked = pa.table([groups, none, list(scores), ids, columns], schema=schema)
        prompt_version = write(store, f"{run}.eval", "prompts", asked, {})
        rows = [
            {
                "rollout_id": f"{run}-{group}-{index}",
                "group_id": group,
                "sample_index": index,
                "prompt_ids": [1],
                "completion_ids": [7],
                "old_logprobs": [-0.5],
                "finish_reason": "stop",
                "stop_reason": None,
                "completion_text": "x",
                "temperature": 1.0,
                "seed": 0,
                "reward": score,
                "parts": {"right": score},
                "errors": {"right": None},
            }
            for group, of_group in zip(groups, scores.values(), strict=True)
            for index, score in enumerate(of_group)
        ]
        tables = {
            "rollouts": pa.Table.from_pylist(rows, schema=rollouts.SCHEMA),
            "rewards": pa.Table.from_pylist(rows, schema=rewards.schema_for(["right"])),
        }
        models = (as_model("policy", policy),)
        sampled = write(
            store,
            f"{run}.eval",
            "rollouts",
            tables["rollouts"],
            {"prompts": prompt_version},
            models,
        )
        paid = write(store, f"{run}.eval", "rewards", tables["rewards"], {"rollouts": sampled})
        refs = {"rollouts": str(sampled.ref), "rewards": str(paid.ref)}
        ref = run_stage("evaluate", config or Config(), store, **refs, into=run, in_process=True)
        return store.open(ref)

    return make


def command(*words: str) -> None:
    get_command(app).main([*words], standalone_mode=False)


BEFORE = {"1+1?": [1.0, 0.0], "1+2?": [0.0, 0.0], "1+3?": [1.0, 1.0], "only a?": [1.0]}
AFTER = {"1+3?": [1.0, 1.0], "1+2?": [1.0, 1.0], "only b?": [0.0], "1+1?": [0.0, 0.0]}


def test_evaluations_are_paired_by_what_was_asked(store, evaluated):
    """Another run, other group ids, another order, other rollout ids."""
    a = evaluated("first", BEFORE)
    b = evaluated("second", AFTER, prefix="q")
    answer = compare(store, a, b)
    differences = [-0.5, 1.0, 0.0]
    score = answer["difference"]["score"]
    assert score["score"] == pytest.approx(statistics.mean(differences))
    assert score["stderr"] == pytest.approx(statistics.stdev(differences) / 3**0.5)
    assert score["interval"] == (-0.5, 1.0), "three prompts: each may be drawn three times"
    assert answer["difference"]["pass@k"]["1"]["n"] == score["n"] == 3
    counts = {name: answer[name] for name in ("better", "worse", "equal", "only_a", "only_b")}
    assert counts == {"better": 1, "worse": 1, "equal": 1, "only_a": 1, "only_b": 1}
    assert (answer["a"]["ref"], answer["b"]["policy"]) == ("first/evaluations@1", "tiny/policy@0")
    assert answer["notes"] == []
    backwards = compare(store, b, a)["difference"]["score"]
    assert backwards["score"] == pytest.approx(-score["score"])


def test_equal_questions_are_paired_in_their_order(store, evaluated):
    """The same bytes of prompts: groups are their own names, also where one question stands twice."""
    a = evaluated("first", BEFORE)
    again = evaluated("second", BEFORE)
    answer = compare(store, a, again)
    assert answer["difference"]["score"] == {"score": 0, "stderr": 0, "n": 4, "interval": (0, 0)}


def test_what_has_nothing_in_common_is_no_pair(store, evaluated):
    a = evaluated("first", BEFORE)
    with pytest.raises(LineageError, match="no prompt has a score in both"):
        compare(store, a, evaluated("second", {"else?": [1.0]}))
    with pytest.raises(LineageError, match="measured reward and right"):
        compare(store, a, evaluated("third", BEFORE, config=Config(score="right")))
    note = compare(store, a, evaluated("fourth", BEFORE, config=Config(threshold=0.5)))["notes"]
    assert note == ["a sample is correct from 1 in A, from 0.5 in B (evaluate.threshold)"]


def test_the_interval_covers_the_mean_as_often_as_it_says():
    """Of 300 draws of 60 skewed differences; three standard errors of that share are 4 points."""
    generator = np.random.RandomState(1)
    covered = 0
    for _ in range(300):
        low, high = bootstrap_interval(generator.exponential(size=60), 0.95)
        covered += low <= 1 <= high
    assert 0.89 < covered / 300 < 0.98
    assert bootstrap_interval([1.0], 0.95) is None
    many = generator.normal(size=5000)
    low, high = bootstrap_interval(many, 0.95)
    stderr = many.std(ddof=1) / 5000**0.5
    assert high - low == pytest.approx(2 * 1.96 * stderr, rel=0.1)


def test_compare_through_the_command_line(store, evaluated, capsys):
    """By evaluation, policy or run; what has none is told the command that makes one."""
    evaluated("first", BEFORE)
    evaluated("second", AFTER, prefix="q")
    in_store = ("--store", str(store.path))
    texts = []
    for a, b in (
        ("first/evaluations@1", "second/evaluations@1"),
        ("first", "second/evaluations@latest"),
        ("first", "second"),
        ("first", "tiny/policy@0"),
    ):
        command("compare", a, b, *in_store)
        texts.append(capsys.readouterr().out)
    assert len(set(texts)) == 1, "the newest evaluation of each"
    assert "score    +0.1667   95% interval -0.5000 … +1.0000" in texts[0]
    assert "1 prompts better, 1 worse, 1 equal" in texts[0]
    assert "left out: 1 only in A, 1 only in B" in texts[0]
    with pytest.raises(LineageError, match="has no evaluation yet") as caught:
        command("compare", "first", "first.eval", *in_store)
    assert caught.value.next == "quiver evaluate RECIPE"
    with pytest.raises(ConfigError, match="expected a version of evaluations or policy"):
        command("compare", "first", "first.eval/rollouts@1", *in_store)


def test_a_policy_measured_twice_is_compared_on_the_prompts_of_the_other(store, evaluated):
    """Not by its newest evaluation, which asked something else."""
    evaluated("first", BEFORE)
    evaluated("same", {question: [1.0] for question in BEFORE})
    evaluated("second", AFTER, prefix="q")
    for names, expected in [
        (("first", "tiny/policy@0"), ["first/evaluations@1", "same/evaluations@1"]),
        (("tiny/policy@0", "first"), ["same/evaluations@1", "first/evaluations@1"]),
    ]:
        assert [str(each.ref) for each in find_evaluations(store, *names)] == expected


def test_a_diff_pairs_the_samples_of_a_prompt_where_no_id_is_the_same(store, evaluated, capsys):
    evaluated("first", BEFORE)
    evaluated("second", AFTER, prefix="q")
    for kind, changed in (("evaluations", "score"), ("rewards", "reward")):
        runs = ("first", "second") if kind == "evaluations" else ("first.eval", "second.eval")
        command("diff", *(f"{run}/{kind}@1" for run in runs), "--store", str(store.path))
        lines = capsys.readouterr().out.splitlines()
        rows = "rows, paired by prompt: 6 in both, 1 only in the first, 1 only in the second"
        assert rows in lines and f"  {changed}: 3 differ" in lines, lines
