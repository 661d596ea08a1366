"""Estimates from rollouts of another policy, against scores that are known: token counts of policies
that draw each token alike, so that probabilities and expected scores are exact."""

import math

import numpy as np
import pyarrow as pa
import pytest

from quiver.schemas.errors import ConfigError
from quiver.stages.core.lineage import prompts_of
from quiver.stages.evaluate.offpolicy import Samples, estimate, read
from quiver.stages.evaluate.statistics import self_normalized
from tests import episodes
from tests.stages.evaluate.held import ask, evaluate

TOKENS = 4


def of(log_weights, scores):
    """Estimate from [prompts, samples] of one turn."""
    shape = (log_weights.size, 1)
    prompts = np.repeat(np.arange(len(log_weights)), log_weights.shape[1])
    samples = Samples([], [], prompts, scores.reshape(shape), np.zeros(shape, int))
    return estimate(samples, log_weights.reshape(shape))


class Setting:
    """A task with prompts of its own difficulty, a policy, and another one some nats away."""

    def __init__(self, draw):
        self.length = int(2 ** draw.uniform(3, 9))
        self.nats = 10 ** draw.uniform(-3, 1.5)
        self.graded = draw.random() < 0.5
        self.collapses = draw.random() < 0.1
        self.logits = draw.normal(size=TOKENS)
        self.differing = draw.uniform(0.2, 1)
        self.direction = draw.normal(size=TOKENS)
        self.direction_differs = draw.uniform(0, 1)
        self.needed = draw.uniform(0.1, 0.4)

    def prompts(self, draw, count):
        """Probabilities of the tokens under both policies, and how many of token 0 a prompt asks
        for."""
        logits = self.logits + self.differing * draw.normal(size=(count, TOKENS))
        before = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        direction = self.direction + self.direction_differs * draw.normal(size=(count, TOKENS))
        spread = (before * direction**2).sum(1) - (before * direction).sum(1) ** 2
        size = math.sqrt(2 * self.nats / (self.length * spread.mean()))
        if self.collapses:  # to one token
            direction, size = np.eye(TOKENS)[:1], 15.0
        after = before * np.exp(size * direction)
        after /= after.sum(axis=1, keepdims=True)
        return before, after, np.ceil(self.needed * self.length * draw.uniform(0.5, 1, count))

    def score(self, first, needed):
        return first / self.length if self.graded else (first >= needed).astype(float)

    def expected(self, after, needed):
        """The mean score under a policy, by the binomial distribution of token 0."""
        if self.graded:
            return after[:, 0].mean()
        counts = np.arange(self.length + 1)
        logs = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, self.length + 1)))])
        ways = logs[-1] - logs - logs[::-1]
        chance = np.clip(after[:, :1], 1e-12, 1 - 1e-12)
        probability = np.exp(
            ways + counts * np.log(chance) + (self.length - counts) * np.log1p(-chance)
        )
        return (probability * (counts >= needed[:, None])).sum(1).mean()


def test_an_estimate_covers_the_truth_or_is_refused():
    """200 settings: 8 to 512 tokens, moves from 0.001 nats to a collapse, scores 0/1 and graded; the
    truth is the mean over many prompts, not only over the ones that were asked."""
    draw = np.random.default_rng(0)
    covered, refused, far, near = [], 0, 0, []
    for _ in range(200):
        setting = Setting(draw)
        num_prompts, samples = draw.choice([16, 32, 64, 128]), draw.choice([4, 8])
        samples = max(samples, 256 // num_prompts)
        _, after, needed = setting.prompts(draw, 400)
        truth = setting.expected(after, needed)
        before, after, needed = setting.prompts(draw, num_prompts)
        counts = np.stack([draw.multinomial(setting.length, before) for _ in range(samples)], 1)
        log_weights = (counts * np.log(after / before)[:, None]).sum(2)
        answer = of(log_weights, setting.score(counts[:, :, 0], needed[:, None]))
        if answer["refused"]:
            refused += 1
            near += [] if setting.collapses else [setting.nats]
            continue
        low, high = answer["interval"]
        assert 0 <= low <= answer["estimate"] <= high <= 1
        covered.append(low <= truth <= high)
        far += setting.collapses or setting.nats > 10
    assert np.mean(covered) >= 0.9
    assert len(covered) > 80 and refused > 50 and far == 0
    assert min(near) > 0.03, "close policies are never refused"


def test_a_policy_whose_answers_were_never_sampled_is_refused():
    """All rows have the same small weight: as many effective rows as rows, and no tail."""
    answer = of(np.full((64, 8), math.log(0.001)), np.zeros((64, 8)))
    assert answer["effective_rows"] == pytest.approx(512)
    assert (
        answer["estimate"] is None and answer["refused"] == "the mean weight is 0.001, expected 1"
    )
    assert of(np.zeros((64, 8)), np.ones((64, 8)))["estimate"] == 1
    assert "effective rows" in of(np.zeros((9, 8)), np.ones((9, 8)))["refused"]
    assert (
        of(np.zeros((1, 500)), np.ones((1, 500)))["refused"] == "one prompt has no standard error"
    )


def test_turns_that_add_up_to_more_than_any_row_stay_in_range():
    """The first turn pays in rows of little weight later on, and the second in the others."""
    first = np.tile([1.0, 1.0, 0.0, 0.0], 100)
    scores = np.stack([first, 1 - first], axis=1)
    later = np.log(np.where(first, 0.4, 1.6))
    log_weights = np.stack([np.zeros(400), later], axis=1)
    draw = np.random.default_rng(8)
    prompts = np.repeat(np.arange(100), 4)
    log_weights[:, 1] += 0.1 * draw.normal(size=400)
    samples = Samples([], [], prompts, scores, np.zeros((400, 2), int))
    answer = estimate(samples, log_weights)
    assert self_normalized(log_weights, scores, prompts)[0] > 1.2
    low, high = answer["interval"]
    assert answer["refused"] is None and answer["estimate"] == high == 1 and 0.9 < low < 1


def test_a_heavy_tail_of_weights_is_refused():
    uniform = np.random.default_rng(6).uniform(size=(500, 8))
    answer = of(-0.9 * np.log(uniform) - math.log(10), np.zeros((500, 8)))  # mean 1, no variance
    assert answer["pareto_k"] > 0.7 and answer["refused"].endswith(f"k̂ {answer['pareto_k']:.2f}")


def test_rows_of_several_samplers_count_by_their_mixture():
    """Two policies that each sample a third of the answers hardly ever: alone neither is enough."""
    draw = np.random.default_rng(7)
    policies = np.array([[0.98, 0.01, 0.01], [0.01, 0.49, 0.5]])
    wanted, scores = np.array([0.5, 0.2, 0.3]), np.array([0.1, 0.9, 0.5])
    num_prompts, shape = 100, (300, 200)
    prompts = np.concatenate([np.arange(n) % num_prompts for n in shape])
    tokens = np.concatenate([draw.choice(3, n, p=p) for n, p in zip(shape, policies, strict=True)])
    ids = [pa.array(["row"] * n) for n in shape]
    rows = Samples([], ids, prompts, scores[tokens, None], np.zeros((500, 1), int))
    found = rows.mixture([np.log(policy)[tokens, None] for policy in policies])
    assert np.exp(found[:, 0]) == pytest.approx((0.6 * policies[0] + 0.4 * policies[1])[tokens])
    answer = estimate(rows, np.log(wanted)[tokens, None] - found)
    low, high = answer["interval"]
    assert low < wanted @ scores < high and high - low < 0.15
    assert answer["effective_rows"] > 300
    alone = Samples([], ids[:1], prompts[:300], scores[tokens[:300], None], np.zeros((300, 1), int))
    assert estimate(alone, np.log(wanted / policies[0])[tokens[:300], None])["refused"]


def test_turns_earn_by_the_logprobs_up_to_them(store, policy):
    """Rows of one and of two turns; one was cut off, and counts as its last turn's 0."""
    asked = ask(store, {"a": "?", "b": "?"})
    rows = [
        episodes.row("a-0", [episodes.turn(2), episodes.turn(1)]),
        episodes.row("a-1", [episodes.turn(3)]),
        episodes.row("b-0", [episodes.turn(1), episodes.turn(2)], end_reason="max_turns"),
        episodes.row("b-1", [episodes.turn(1)], end_reason="timeout"),
    ]
    for row in rows:
        row["old_logprobs"] = [-float(id) for id in row["completion_ids"]]  # −10, −11, …
    sampled = episodes.write(store, policy, rows, "held", prompts=asked)
    earned = {"a-0": [0.25, 0.5], "a-1": [1.0], "b-0": None, "b-1": None}
    paid = episodes.write_rewards(store, sampled, lambda row: earned[row["rollout_id"]], "held")
    evaluation = evaluate(store, (sampled, paid))
    samples = read(store, [evaluation])
    assert samples.ids[0].to_pylist() == ["a-0", "a-1", "b-0"], "the failed one has no score"
    assert samples.prompts.tolist() == [0, 0, 1]
    assert samples.scores.tolist() == [[0.25, 0.5], [1.0, 0.0], [0.0, 0.0]]
    found = samples.logprobs([sampled], "old_logprobs")
    assert found.tolist() == [[-21.0, -33.0], [-33.0, -33.0], [-33.0, -33.0]]
    with pytest.raises(ConfigError, match=f"of the same rollouts as {evaluation.ref}"):
        read(store, [evaluation, evaluate(store, (sampled, paid), score="f")])
    by_part = read(store, [evaluate(store, (sampled, paid), score="f")])
    assert by_part.scores.tolist() == [[0.75], [1.0], [0.0]], "a part has no rewards of turns"
    assert prompts_of(store, evaluation).ref == asked.ref
