"""`quiver teach` and `quiver audit`, on rewards that tests write themselves."""

import json
import math

import numpy as np
import pyarrow as pa
import pytest

from quiver.flows.auditing import audit, by_reward, by_versions
from quiver.flows.calls import calls_of
from quiver.flows.cli.shared import to_json
from quiver.flows.look.teaching import teach
from quiver.flows.look.templates import lines
from quiver.flows.recipe import Recipe
from quiver.schemas import rewards, rollouts
from quiver.schemas.errors import ConfigError, LineageError
from quiver.stages.core.config import Config
from quiver.stages.core.run import runner
from quiver.stages.core.store.retention import remove
from quiver.stages.evaluate.statistics import paired_interval
from tests import episodes
from tests.stages.evaluate.held import ask, write
from tests.writing import begin


def sample(store, groups, cut=(), run="toy", text="**bold** text"):
    """Rollouts of answers with these lengths by group; the answers `cut` ended at the limit."""
    rows = [
        {
            "rollout_id": f"{run}-{group}-{index}",
            "group_id": group,
            "sample_index": index,
            "prompt_ids": [1],
            "completion_ids": [7 + place for place in range(length)],
            "old_logprobs": [-0.5] * length,
            "finish_reason": "length" if f"{group}-{index}" in cut else "stop",
            "completion_text": text,
            "temperature": 1.0,
            "seed": 0,
        }
        for group, lengths in groups.items()
        for index, length in enumerate(lengths)
    ]
    table = pa.Table.from_pylist(rows, schema=rollouts.SCHEMA)
    prompts = ask(store, {group: f"{group}?" for group in groups}, run)
    return write(store, "rollouts", table, run, inputs={"prompts": prompts})


def pay(store, sampled, numbers, parts=None):
    """Rewards of rollouts, in the reverse order of rows. `parts`: numbers by name."""
    parts = parts or {"right": numbers}
    columns = ("rollout_id", "group_id")
    rows = sampled.table(list(columns)).to_pylist()
    for place, row in enumerate(rows):
        of_row = {name: part[place] for name, part in parts.items()}
        row |= {"reward": numbers[place], "parts": of_row, "errors": dict.fromkeys(parts)}
    table = pa.Table.from_pylist(rows[::-1], schema=rewards.schema_for(list(parts)))
    inputs = {"rollouts": sampled}
    return write(store, "rewards", table, sampled.ref.run, inputs=inputs, stage="reward")


# -- teach


def test_the_pull_of_two_rewards_by_hand(store):
    """Prompt a has contrast under both, b under the second alone; one answer of b is not scored."""
    sampled = sample(store, {"a": [2, 6], "b": [4, 4, 1]}, cut=["a-1"])
    right = [1.0, 0.0, 1.0, 1.0, None]
    first = pay(store, sampled, right)
    second = pay(store, sampled, [-2.0, 0.0, 3.0, 1.0, 1.0], {"right": right, "fluent": [5.0] * 5})
    answer = teach(store, [str(first.ref), str(second.ref)], beta=0.5)
    assert (answer["rollouts"], answer["groups"]) == (str(sampled.ref), 2)
    lesson, other = answer["rewards"]
    w = math.exp(2) / (1 + math.exp(2))  # of the right answer to a
    assert (lesson["rewards"], lesson["groups_with_contrast"]) == (str(first.ref), 1)
    assert (lesson["samples"], lesson["beta"]) == (2, 0.5)
    assert lesson["effective_samples"] == pytest.approx(1 / (w**2 + (1 - w) ** 2))
    measures = {row["measure"]: row for row in lesson["measures"]}
    names = {f"reward of {first.ref}", f"reward of {second.ref}", "part right", "part fluent"}
    assert measures.keys() == names | {"tokens", "formatting", "share cut"}, (
        "the part of both is there once"
    )
    tokens = measures["tokens"]
    assert (tokens["now"], tokens["n"]) == (4, 2)
    assert tokens["then"] == pytest.approx((2 * w + 6 * (1 - w) + 4) / 2)
    assert tokens["change"] == pytest.approx(tokens["then"] - 4)
    assert tokens["interval"] == pytest.approx(paired_interval([2 * w + 6 * (1 - w) - 4, 0.0]))
    assert tokens["first_order"] == pytest.approx(-2 / 0.5 / 2), "Cov −2 in a, 0 in b"
    marks = measures["formatting"]
    assert (marks["now"], marks["change"]) == (2, 0), "two marks of bold text in each answer"
    assert measures["share cut"]["change"] == pytest.approx(-(w - 0.5) / 2)
    assert measures["part fluent"]["interval"] == pytest.approx((0, 0))
    assert measures[f"reward of {second.ref}"]["change"] == pytest.approx(-(2 * w - 1) / 2)
    assert other["groups_with_contrast"] == 2
    (pair,) = answer["opposed"]
    assert (pair["a"], pair["b"], pair["rows"]) == (str(first.ref), str(second.ref), 2)
    assert {row["rollout_id"]: (row["a"], row["b"]) for row in pair["examples"]} == {
        "toy-a-0": (1, -2),
        "toy-a-1": (0, 0),
    }


def test_an_episode_that_any_limit_ended_was_cut(store, policy):
    ends = ("max_turns", "answered")
    rows = [
        episodes.row(f"a-{number}", [episodes.turn(1)], end_reason=end)
        for number, end in enumerate(ends)
    ]
    sampled = episodes.write(store, policy, rows)
    paid = episodes.write_rewards(
        store, sampled, lambda row: [float(row["end_reason"] == "answered")]
    )
    (lesson,) = teach(store, [str(paid.ref)])["rewards"]
    (cut,) = [row for row in lesson["measures"] if row["measure"] == "share cut"]
    assert cut["now"] == 0.5 and cut["then"] < 0.5


def test_beta_is_the_rewards_own_deviation_and_scales_change_nothing(store):
    sampled = sample(store, {"a": [1, 2, 3], "b": [1, 1, 9], "c": [5, 5, 5]})
    numbers = [1.0, 2.0, 4.0, 0.0, 0.0, 3.0, 7.0, 7.0, 7.0]
    small = pay(store, sampled, numbers)
    large = pay(store, sampled, [10 * number - 3 for number in numbers])
    lessons = teach(store, [str(small.ref), str(large.ref)])["rewards"]
    variances = [np.var([1, 2, 4], ddof=1), np.var([0, 0, 3], ddof=1)]  # c has no contrast
    assert lessons[0]["beta"] == pytest.approx(math.sqrt(np.mean(variances)))
    assert lessons[1]["beta"] == pytest.approx(10 * lessons[0]["beta"])
    tokens = [
        {row["measure"]: row["then"] for row in each["measures"]}["tokens"] for each in lessons
    ]
    assert tokens[0] == pytest.approx(tokens[1])


def test_what_cannot_be_compared_is_refused(store):
    sampled = sample(store, {"a": [1, 2], "b": [3]})
    good, equal, alone = (
        str(pay(store, sampled, numbers).ref)
        for numbers in ([1.0, 0.0, 1.0], [1.0, 1.0, 0.0], [1.0, None, 0.0])
    )
    empty = str(pay(store, sample(store, {}, run="c"), []).ref)
    elsewhere = str(pay(store, sample(store, {"a": [1, 2]}, run="b"), [1.0, 0.0]).ref)
    for refs, beta, error, words in (
        ([good, equal], None, LineageError, "have the same reward"),
        ([alone], None, LineageError, "no prompt has two scored answers"),
        ([good, elsewhere], None, LineageError, f"scores b/rollouts@1, and {good} scores"),
        ([good, str(sampled.ref)], None, ConfigError, "expected a version of rewards"),
        ([empty], None, LineageError, "no prompt has two scored answers"),
        ([good], 0.0, ConfigError, "above 0"),
        ([good], math.nan, ConfigError, "above 0"),
    ):
        with pytest.raises(error, match=words):
            teach(store, refs, beta)


def test_the_command_says_the_same_in_json_and_in_words(store, command, monkeypatch):
    sampled = sample(store, {"a": [1, 2], "b": [3, 9]})
    refs = [str(pay(store, sampled, numbers).ref) for numbers in ([1.0, 0, 0, 1], [0.0, 1, 0, 1])]
    monkeypatch.setenv("QUIVER_STORE", store.url)
    code, answer = command("teach", *refs, "--beta", "0.5")
    assert code == 0
    expected = teach(store, refs, 0.5)
    assert answer == json.loads(to_json(expected))
    text = "\n".join(lines("lessons", expected))
    tokens = expected["rewards"][0]["measures"][-3]
    assert f"{100 * tokens['change'] / tokens['now']:+.1f} %" in text
    assert "advantages of opposite sign in 2 rows" in text and "toy-a-0" in text
    assert command("teach", "toy/rollouts")[0] == 2


# -- audit


class Run:
    """A run whose policies were trained on rollouts that a test writes; none has weights."""

    def __init__(self, store):
        self.store = store
        self.policy = self._policy("policy", {})

    def _policy(self, stage, inputs):
        about = {"stage": stage, "stage_version": 1, "config": Config(), "inputs": inputs}
        with begin(self.store, "toy", "policy", force=True, **about) as work:
            (work.folder / "config.json").write_text("{}")
            return work.commit()

    def train(self, lengths, training, parts=None):
        """One iteration; returns its rollouts."""
        groups = {f"q{group}": of_group for group, of_group in enumerate(lengths.tolist())}
        sampled = sample(self.store, groups)
        paid = pay(self.store, sampled, training.ravel().tolist(), parts)
        inputs = {"policy": self.policy, "rollouts": sampled, "rewards": paid}
        self.policy = self._policy("optimize", inputs)
        return sampled


def agreeing(store, iterations, shape, noise=0.0):
    """A run, and references to second rewards of its rollouts that are the training rewards plus
    noise. `shape`: prompts and answers."""
    draw = np.random.default_rng(1)
    run, seconds = Run(store), []
    for _ in range(iterations):
        training = draw.normal(size=shape)
        sampled = run.train(draw.integers(1, 9, shape), training)
        second = training + noise * draw.normal(size=shape)
        seconds.append(str(pay(store, sampled, second.ravel().tolist()).ref))
    return run, seconds


def iterations_of(answer):
    return [entry["iteration"] for entry in answer["iterations"]]


@pytest.fixture
def hacked(store):
    """Four iterations of 24 prompts with 4 answers. From the third on, the training reward pays for
    length, and the second reward falls. The second reward of the second iteration is unknown."""
    draw = np.random.default_rng(0)
    run, seconds, numbers = Run(store), [], []
    for number in range(4):
        lengths = draw.integers(1, 9, (24, 4))
        quality = draw.normal(size=(24, 4))
        hack = 2.0 if number >= 2 else 0.0
        training = quality + hack + 0.2 * hack * lengths
        second = quality - hack
        parts = {"quality": quality.ravel().tolist()}
        parts["wordy"] = (training - quality).ravel().tolist()
        sampled = run.train(lengths, training, parts)
        if number != 1:
            seconds.append(str(pay(store, sampled, second.ravel().tolist()).ref))
        numbers.append((training, second, lengths))
    return seconds, numbers


def test_the_gap_opens_where_the_reward_is_hacked(store, hacked):
    seconds, numbers = hacked
    answer = audit(store, "toy", by_versions(store, seconds), 20)
    entries = {entry["iteration"]: entry for entry in answer["iterations"]}
    assert (answer["opens"], answer["left_out"], list(entries)) == (3, [], [1, 3, 4])
    used = [numbers[index] for index in (0, 2, 3)]
    units = [np.std([each[side] for each in used]) for side in (0, 1)]
    gains = [(t / units[0] - s / units[1]).mean(axis=1) for t, s, _ in used]
    for entry, (training, second, lengths), gain in zip(entries.values(), used, gains, strict=True):
        assert entry["rows"] == 96
        assert entry["training"] == pytest.approx(training.mean(), rel=1e-5)
        assert entry["second"] == pytest.approx(second.mean(), rel=1e-5)
        x, y, z = (
            (column - column.mean(axis=1, keepdims=True)).ravel()
            for column in (training, second, lengths)
        )
        r = np.corrcoef([x, y, z])
        assert entry["correlation"] == pytest.approx(r[0, 1], abs=1e-5)
        if entry["iteration"] > 1:
            partial = (r[0, 2] - r[0, 1] * r[1, 2]) / math.sqrt(
                (1 - r[0, 1] ** 2) * (1 - r[1, 2] ** 2)
            )
            assert entry["partial"]["length"] == pytest.approx(partial, abs=1e-4) and partial > 0.9
            assert entry["gap"] == pytest.approx(gain.mean() - gains[0].mean(), rel=1e-4)
            assert entry["interval"][0] > 0 and entry["told_apart"]
        assert entry["partial"]["formatting"] is None, "all answers have as much of it"
        assert sum(entry["shares"].values()) == pytest.approx(1, abs=1e-3)
    assert entries[1]["shares"]["part quality"] == pytest.approx(1, abs=1e-3)
    above = [row["training"] / units[0] - row["second"] / units[1] for row in answer["rows"]]
    assert len(above) == 20 and above == sorted(above, reverse=True)
    every = np.concatenate([(t / units[0] - s / units[1]).ravel() for t, s, _ in used])
    assert above == pytest.approx(np.sort(every)[:-21:-1], rel=1e-4)
    row = answer["rows"][0]
    assert row["rewards"] in ("toy/rewards@4", "toy/rewards@6") and row["rollout_id"]
    text = "\n".join(lines("audit", answer))
    assert "From iteration 3 on" in text and "no early warning" in text


def test_without_hacking_no_gap_is_told_apart(store):
    _, seconds = agreeing(store, 3, (12, 4), noise=1.0)
    answer = audit(store, "toy", by_versions(store, seconds), 20)
    assert answer["opens"] is None
    remove(store, "toy/rewards@1")
    answer = audit(store, "toy", by_versions(store, seconds), num_iterations=2)
    assert (answer["left_out"], iterations_of(answer)) == ([1], [2, 3])
    assert "iterations 1." in "\n".join(lines("audit", answer))
    with pytest.raises(LineageError, match="no iteration has saved rollouts with both rewards"):
        audit(store, "toy", by_versions(store, []), 20)
    with pytest.raises(ConfigError, match="expected a version of rewards"):
        by_versions(store, ["toy/rollouts@2"])


def test_rounding_opens_no_gap(store):
    """The second reward is the training reward in other units, and both rise."""
    draw = np.random.default_rng(3)
    run, seconds = Run(store), []
    for number in range(3):
        training = (draw.random((24, 4)) < 0.3 + 0.3 * number).astype(float)
        sampled = run.train(draw.integers(1, 9, (24, 4)), training)
        seconds.append(str(pay(store, sampled, (0.1 * training).ravel().tolist()).ref))
    answer = audit(store, "toy", by_versions(store, seconds), 20)
    later = answer["iterations"][1:]
    assert [entry["told_apart"] for entry in later] == [False, False] and answer["opens"] is None


def test_each_named_version_counts_wherever_its_iteration_is(store):
    _, seconds = agreeing(store, 6, (4, 3))
    answer = audit(store, "toy", by_versions(store, [seconds[3], seconds[1]]), num_iterations=2)
    assert iterations_of(answer) == [2, 4]
    assert {row["second_rewards"] for row in answer["rows"]} == {seconds[1], seconds[3]}
    again = pay(store, store.open("toy/rollouts@2"), [1.0] * 12)
    with pytest.raises(ConfigError, match=f"scores toy/rollouts@2, as {seconds[1]} does"):
        by_versions(store, [seconds[1], str(again.ref)])
    stray = pay(store, sample(store, {"a": [1, 2]}), [1.0, 0.0])
    with pytest.raises(LineageError, match="toy/rollouts@7, which no iteration of run toy learned"):
        audit(store, "toy", by_versions(store, [seconds[0], str(stray.ref)]), 20)


def test_iterations_between_those_looked_at_are_not_opened(store):
    _, seconds = agreeing(store, 3, (6, 4))
    store.storage.put("toy/prompts/v000002/manifest.json", b"torn")
    answer = audit(store, "toy", by_versions(store, seconds[::2]), num_iterations=2)
    assert iterations_of(answer) == [1, 3]


def test_a_recipe_scores_the_same_part_of_each_iteration_once(store):
    draw = np.random.default_rng(2)
    run = Run(store)
    for _ in range(2):
        run.train(draw.integers(1, 9, (6, 3)), draw.normal(size=(6, 3)))
    recipe = Recipe(
        run="judge",
        store=store.url,
        policy={"model": "model"},
        data={"source": "rows.jsonl", "limit": 8},
        reward={"functions": [{"use": "repetition"}], "workers": 1},
    )
    made = []

    def make(call, *_):
        made.append(call.stage)
        return runner.find_or_make(call)

    def audited():
        with calls_of(recipe, make):
            return audit(store, "toy", by_reward(recipe.reward, store, "toy", num_prompts=4), 20)

    answer = audited()
    assert made == ["subset", "reward"] * 2
    assert [entry["rows"] for entry in answer["iterations"]] == [12, 12]
    parts = [store.open(f"toy.audit/rollouts@{number}") for number in (1, 2)]
    groups = [part.table()["group_id"].to_pylist() for part in parts]
    assert groups[0] == groups[1] and len(set(groups[0])) == 4, "whole prompts, by one seed"
    assert parts[0].manifest.model("policy") is None, "nothing is trained on it"
    scored = {row["rollout_id"]: row["second"] for row in answer["rows"]}
    ids = parts[1].table(["rollout_id"])["rollout_id"].to_pylist()
    assert scored.keys() <= set(ids)
    assert audited() == answer and len(made) == 4
    refs = ["toy.audit/rewards@1", "toy.audit/rewards@2"]
    assert audit(store, "toy", by_versions(store, refs), 20) == answer, "an audit's own scores"
    run.train(draw.integers(1, 9, (5, 3)), draw.normal(size=(5, 3)))
    for number in (1, 2):
        remove(store, f"toy/prompts@{number}")
    answer = audited()
    assert answer["left_out"] == [1, 2], "their prompts are gone"
    assert iterations_of(answer) == [3]


def test_what_the_second_reward_is_must_be_one_thing(store, command, monkeypatch):
    monkeypatch.setenv("QUIVER_STORE", store.url)
    code, answer = command("audit", "toy", "--with", "a.toml", "--with", "toy/rewards@1")
    assert code == 2 and "something else" in answer["error"]["message"]
