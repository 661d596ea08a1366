"""Two evaluations beside one another, paired by the prompts' contents and not by the names of their
rows; expected numbers are written out."""

import statistics

import pyarrow as pa
import pytest
from typer.main import get_command

from quiver.flows.cli.main import app
from quiver.flows.look.describe import listed
from quiver.flows.look.paired import find_evaluations, pair
from quiver.flows.look.view.plain import columns_of, lines_of
from quiver.schemas.errors import ConfigError, LineageError
from quiver.schemas.refs import Ref
from quiver.stages.core.run.runner import run_stage
from quiver.stages.core.store import marks
from quiver.stages.core.store.listing import EXPIRED
from quiver.stages.core.store.readable import readable_entries
from quiver.stages.core.store.retention import remove
from quiver.stages.evaluate.comparison import compare, compare_each
from quiver.stages.model.checkpoints import model_entry
from quiver.stages.reward.config import Config as Reward
from tests.stages.evaluate.held import ask, evaluate, score, write
from tests.writing import begin


@pytest.fixture
def evaluated(store, policy):
    """Make an evaluation in `run` of `tiny/policy@0` from scores by question; group ids are `prefix`
    and a number."""

    def make(run, scores, prefix="", **config):
        texts = {f"{prefix}{number}": question for number, question in enumerate(scores)}
        groups = dict(zip(texts, scores.values(), strict=True))
        models = (model_entry("policy", policy),)
        asked = ask(store, texts, f"{run}.eval")
        scored = score(store, groups, asked, f"{run}.eval", models=models)
        return evaluate(store, scored, into=run, **config)

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
    # with half a prompt of +1/2 and half of −1/2; 3.18245 is the 97.5 % quantile of t with 3 degrees
    square = sum((d - 0.125) ** 2 for d in differences) + (0.375**2 + 0.625**2) / 2
    low = 0.125 - 3.18245 * (square / 3 / 4) ** 0.5
    assert score["interval"] == pytest.approx((low, 1.0), abs=1e-5), "no difference is above 1"
    assert answer["difference"]["pass@k"]["1"]["n"] == score["n"] == 3
    counts = {name: answer[name] for name in ("better", "worse", "equal", "only_a", "only_b")}
    assert counts == {"better": 1, "worse": 1, "equal": 1, "only_a": 1, "only_b": 1}
    assert (answer["a"]["ref"], answer["b"]["policy"]) == ("first/evaluations@1", "tiny/policy@0")
    assert answer["notes"] == []
    backwards = compare(store, b, a)["difference"]["score"]
    assert backwards["score"] == pytest.approx(-score["score"])


@pytest.mark.parametrize("has_columns", [True, False])
def test_rows_of_one_text_are_paired_by_their_columns(store, policy, has_columns):
    """Without columns by their group ids, from which environments have their seeds. A row's scores
    are equal."""
    scores = {f"r{row:02d}": [float(row < 10)] for row in range(20)}
    models = (model_entry("policy", policy),)
    versions = []
    for run, names in (("all", [*scores]), ("late", [*scores][10:])):
        groups = {f"{run}{name}" if has_columns else name: scores[name] for name in names}
        table = ask(store, dict.fromkeys(groups, "Guess the number."), run).table()
        own = [{"name": name if has_columns else "same"} for name in names]
        table = table.drop_columns("columns").append_column("columns", pa.array(own))
        asked = write(store, "prompts", table, run)
        versions.append(evaluate(store, score(store, groups, asked, run, models=models), into=run))
    answer = compare(store, *versions)
    counts = [answer[name] for name in ("better", "worse", "equal", "only_a", "only_b")]
    assert counts == [0, 0, 10, 10, 0]


def test_evaluations_without_a_common_score_are_refused(store, evaluated):
    a = evaluated("first", BEFORE)
    with pytest.raises(LineageError, match="no prompt has a score in both"):
        compare(store, a, evaluated("second", {"else?": [1.0]}))
    with pytest.raises(LineageError, match="measured reward and right"):
        compare(store, a, evaluated("third", BEFORE, score="right"))


def test_other_rules_of_one_score_are_noted(store, evaluated):
    """The prompts have the same bytes, so their groups are paired by name."""
    a = evaluated("first", BEFORE)
    answer = compare(store, a, evaluated("fourth", BEFORE, threshold=0.5, unscored="worst"))
    score = answer["difference"]["score"]
    low, high = score.pop("interval")
    assert score == {"score": 0, "stderr": 0, "n": 4, "p": 1} and -0.5 < low == -high < 0
    assert answer["notes"] == [
        "a sample is correct from 1 in A, from 0.5 in B (evaluate.threshold)",
        "an answer that a limit cut off before it was scored counts as zero in A, as worst in B "
        "(evaluate.unscored)",
    ]


def test_scores_by_two_rewards_are_not_subtracted(store, evaluated):
    """Both are named, with the command that measures by one; `quiver view` subtracts none."""
    a = evaluated("first", BEFORE)
    b = rescored(store, a, "second", Reward(functions=[{"use": "numeric", "name": "near"}]))
    words = (
        r"of tiny/policy@0 is by first.eval/rewards@1, and .* is by near \(second.eval/rewards@1\)"
    )
    with pytest.raises(LineageError, match=words) as caught:
        compare(store, a, b)
    assert "quiver evaluate RECIPE --policy tiny/policy@0" in caught.value.next
    paired = pair(store, "first/evaluations@1", "second/evaluations@1")
    assert "gain" not in paired.first.numbers
    assert paired.titles[1].endswith("(by near (second.eval/rewards@1))")


@pytest.mark.parametrize(("score", "is_compared"), [("right", True), ("reward", False)])
def test_a_part_is_compared_whatever_stands_beside_it(store, evaluated, score, is_compared):
    """A watched part of weight 0 was added, and the measured one weighs more."""
    right = {"use": "numeric", "name": "right"}
    configs = [
        Reward(functions=[right]),
        Reward(functions=[{**right, "weight": 2}, {"use": "length", "weight": 0}]),
    ]
    first = evaluated("first", BEFORE)
    a, b = (
        rescored(store, first, f"by{place}", config, score=score)
        for place, config in enumerate(configs)
    )
    if is_compared:
        answer = compare(store, a, b)
        assert answer["equal"] == 4 and answer["notes"][0].startswith("[reward] differs: ")
    else:
        with pytest.raises(LineageError, match="two rewards have no difference"):
            compare(store, a, b)


def test_what_a_person_corrected_is_compared_with_the_rest(store, evaluated):
    a = evaluated("first", BEFORE)
    paid = store.open(a.manifest.require_input("rewards").ref)
    corrections = {"author": "me", "reason": "misread", "overrides": {"first.eval-0-1": 1.0}}
    run_stage("override", corrections, store, rewards=paid.ref, into="first.eval")
    sampled = store.open(a.manifest.require_input("rollouts").ref)
    b = evaluate(store, (sampled, store.open("first.eval/rewards@2")), into="second")
    assert compare(store, a, b)["better"] == 1


def rescored(store, evaluation, run, config, **of_evaluation):
    """Return another evaluation of the same answers and numbers, whose rewards have this config."""
    roles = ("rollouts", "rewards")
    sampled, paid = (store.open(evaluation.manifest.require_input(role).ref) for role in roles)
    plan = {"stage": "reward", "stage_version": 1, "inputs": {"rollouts": sampled}}
    with begin(store, f"{run}.eval", "rewards", **plan, config=config) as work:
        work.write(0, paid.table().combine_chunks())
        scored = work.commit(metrics={"functions": {each.name: {} for each in config.functions}})
    return evaluate(store, (sampled, scored), into=run, **of_evaluation)


def test_several_are_compared_with_the_first_and_corrected_for_their_number(
    store, evaluated, capsys
):
    questions = [f"{number}+1?" for number in range(20)]
    halves = {question: [float(index % 2)] * 2 for index, question in enumerate(questions)}
    evaluated("first", halves)
    evaluated("same", halves)
    evaluated("best", {question: [1.0, 1.0] for question in questions})
    answer = compare_each(
        store, [find_evaluations(store, "first", other) for other in ("same", "best")]
    )
    scores = [compared["difference"]["score"] for compared in answer["comparisons"]]
    assert [score["told_apart"] for score in scores] == [False, True]
    assert (scores[0]["p"], scores[0]["p_holm"]) == (1, 1)
    assert scores[1]["p_holm"] == pytest.approx(2 * scores[1]["p"])
    assert scores[1]["p_holm"] < 0.01
    command("compare", "first", "same", "best", "--store", store.url)
    header, first, same, best, *_ = capsys.readouterr().out.splitlines()
    assert "p (Holm over 2)" in header and "first/evaluations@1" in first
    assert "+0.0000 over 20 prompts" in same and same.endswith("  not told apart")
    assert "+0.5000 over 20 prompts" in best and best.endswith("  told apart")


def test_compare_through_the_command_line(store, evaluated, capsys):
    """By evaluation, policy or run; what has none is told the command that makes one."""
    evaluated("first", BEFORE)
    evaluated("second", AFTER, prefix="q")
    in_store = ("--store", store.url)
    texts = []
    for a, b in (
        ("first/evaluations@1", "second/evaluations@latest"),
        ("first", "second"),
        ("first", "tiny/policy@0"),
    ):
        command("compare", a, b, *in_store)
        texts.append(capsys.readouterr().out)
    assert len(set(texts)) == 1, "the newest evaluation of each"
    assert "score    +0.1667   95% interval -0.9765 … +1.0000" in texts[0]
    assert "prompts: 1 better, 1 worse, 1 equal" in texts[0]
    assert "left out: 1 only in A, 1 only in B" in texts[0]
    with pytest.raises(LineageError, match="has no evaluation yet") as caught:
        command("compare", "first", "first.eval", *in_store)
    assert caught.value.next == "quiver evaluate RECIPE"
    with pytest.raises(LineageError, match="has no versions; did you mean second") as caught:
        command("compare", "first", "secnd", *in_store)
    assert caught.value.next == "quiver ls"
    with pytest.raises(ConfigError, match="expected a version of evaluations or policy"):
        command("compare", "first", "first.eval/rollouts@1", *in_store)


def test_what_a_sweep_measured_counts_only_if_there_is_nothing_else(store, evaluated, policy):
    """The newest evaluation of a run, and the score that `quiver ls` shows beside a policy."""
    of_sweep = {"note": "sweep 0123456789ab, cell 1 (7)"}

    def taken() -> tuple[str, str]:
        rows = listed(store, readable_entries(store, None)[0])
        (of_policy,) = [row.score for row in rows if row.version == str(policy.ref)]
        of_run, of_name = find_evaluations(store, "first", str(policy.ref))
        assert of_run.ref == of_name.ref, "there is no other one on the same prompts"
        return str(of_run.ref), of_policy

    evaluated("first", {"1+1?": [1.0]}, **of_sweep)
    assert taken() == ("first/evaluations@1", "1 ± –")
    evaluated("first", {"1+2?": [0.5]})
    evaluated("first", {"1+3?": [0.25]}, **of_sweep)
    assert taken() == ("first/evaluations@2", "0.5 ± –")


def test_what_is_named_twice_is_compared_once(store, evaluated, capsys):
    for run, scores in (("first", BEFORE), ("second", AFTER)):
        evaluated(run, scores)
    command("compare", "first", "second", "second/evaluations@1", "--store", store.url)
    shown = capsys.readouterr().out
    assert "p (Holm over 1)" in shown and shown.count("second/evaluations@1") == 1


def test_an_evaluation_that_is_compared_with_itself_is_told(store, evaluated):
    evaluated("first", BEFORE)
    answer = compare(store, *find_evaluations(store, "first", "tiny/policy@0"))
    assert answer["notes"] == ["A and B are the same evaluation"]


def test_evaluations_that_were_deleted_are_named_with_the_command_that_makes_them_again(
    store, evaluated
):
    for run in ("first", "second"):
        evaluated(run, BEFORE)
    remove(store, "first/evaluations@1", "too old")
    marks.write(store.storage, Ref("second", "evaluations", 1), EXPIRED, "gc, keep = 1")
    for named, gone, why, next in (
        ("first", "first/evaluations@1", "was removed on purpose: .*too old", ""),
        ("second", "second/evaluations@1", "its files expired: .*gc, keep = 1", ""),
        (
            "tiny/policy@0",
            "second/evaluations@1",
            "its files expired",
            " --policy tiny/policy@0",
        ),
    ):
        with pytest.raises(LineageError, match=f"has no evaluation any more: {gone} {why}") as told:
            find_evaluations(store, named, named)
        assert told.value.next == f"quiver evaluate RECIPE{next}"


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


def test_a_policy_measured_twice_is_compared_by_the_score_of_the_other(store, evaluated):
    """And by rewards that were made alike, although a newer one asked the same."""
    a = evaluated("first", BEFORE)
    evaluated("same", BEFORE)
    sampled = a.manifest.require_input("rollouts").ref
    paid = store.open(a.manifest.require_input("rewards").ref).table().combine_chunks()
    plan = {"stage": "override", "inputs": {"rollouts": store.open(sampled)}}
    edited = write(store, "rewards", paid, "first.eval", **plan)
    evaluate(store, (store.open(sampled), edited), into="edited")
    evaluated("other", BEFORE, score="right")
    taken = find_evaluations(store, "first", "tiny/policy@0")
    assert [str(each.ref) for each in taken] == ["first/evaluations@1", "same/evaluations@1"]
    assert compare(store, *taken)["equal"] == 4


def test_scores_that_differ_have_no_difference(store, evaluated):
    evaluated("first", BEFORE)
    evaluated("same", BEFORE)
    evaluated("other", BEFORE, score="right")
    for other, is_one in (("same", True), ("other", False)):
        paired = pair(store, "first/evaluations@1", f"{other}/evaluations@1")
        assert ("gain" in paired.first.numbers, "change" in paired.first.numbers) == (is_one,) * 2
        titles = [column.title for column in columns_of(paired)]
        assert ("B − A" in titles) == is_one and {"score A", "score B"} <= {*titles}
        assert [title.endswith(")") for title in paired.titles] == [not is_one] * 2
        assert len(lines_of(paired, range(7))) == 8
    assert paired.titles[1].endswith("(by right)")


def test_a_diff_pairs_the_samples_of_a_prompt_where_no_id_is_the_same(store, evaluated, capsys):
    evaluated("first", BEFORE)
    evaluated("second", AFTER, prefix="q")
    for kind, changed in (("evaluations", "score"), ("rewards", "reward")):
        runs = ("first", "second") if kind == "evaluations" else ("first.eval", "second.eval")
        command("diff", *(f"{run}/{kind}@1" for run in runs), "--store", store.url)
        lines = capsys.readouterr().out.splitlines()
        rows = "rows, paired by prompt: 6 in both, 1 only in the first, 1 only in the second"
        assert rows in lines and f"  {changed}: 3 differ" in lines, lines
