"""Off-policy evaluation: the score of a policy, estimated from saved rollouts of other policies.

Each rollout counts by the ratio of the two policies' probabilities of its sampled tokens
(`self_normalized`). With rewards of turns (rewards/2), each turn counts by the ratio up to it. If
several policies sampled, the denominator is their mixture at each prompt, the balance heuristic
(E. Veach and L. Guibas, 1995; A. Owen, Monte Carlo theory, methods and examples, section 9.11).

    samples = read(store, [store.open("toy/evaluations@1")])
    denominators = samples.mixture([samples.logprobs([store.open("toy.eval/logprobs@1")])])
    estimate(samples, samples.logprobs([store.open("toy.eval/logprobs@2")]) - denominators)

An estimate is refused, with a reason, if few rows have all the weight, if the weights' tail is too
heavy, or if their mean differs from 1 by more than chance: then the policy's own answers are hardly
among the rows. It is never stored as a measurement.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from quiver.schemas import fields, rewards
from quiver.schemas.errors import ConfigError, LineageError
from quiver.stages.core.lineage import open_input, prompts_of
from quiver.stages.core.store import Store, Version

from .statistics import (
    CONFIDENCE,
    Interval,
    effective_rows,
    pareto_k,
    score_interval,
    self_normalized,
    student_quantile,
)

FEWEST_ROWS = 100
"""Fewest effective rows of an estimate, so also fewest rows."""
LARGEST_K = 0.7
"""Largest Pareto k̂ of an estimate."""
MEAN_WEIGHT = (0.05, 3.0)
"""The mean weight may differ from 1 by this much, or by this many standard errors."""


@dataclass(frozen=True)
class Samples:
    """Scored rollouts of evaluations on the same prompts: N rows, at most T turns."""

    rollouts: list[Version]
    """Of each evaluation, in the order of the rows."""
    ids: list[pa.Array]
    """rollout_id of the scored rows of each evaluation."""
    prompts: np.ndarray
    """[N] int: number of the prompt."""
    scores: np.ndarray
    """[N, T]: what each turn earned. T = 1 without rewards of turns."""
    ends: np.ndarray
    """[N, T] int: sampled tokens up to the end of each turn; of the row, if it has fewer turns."""

    @cached_property
    def samplers(self) -> np.ndarray:
        """[N] int: number of the evaluation."""
        return np.repeat(np.arange(len(self.ids)), list(map(len, self.ids)))

    @property
    def row_scores(self) -> np.ndarray:
        """[N]: the score of each row."""
        return self.scores.sum(axis=1)

    def logprobs(self, versions: Sequence[Version], column: str = "logprobs") -> np.ndarray:
        """Return the logprob of each row up to the end of each turn: [N, T].

        `versions`: for each evaluation, logprobs of its rollouts, or with `column` "old_logprobs"
        the rollouts.
        """
        values, lengths = [], []
        for version, ids in zip(versions, self.ids, strict=True):
            rows = _aligned(version, ids, [column])[column].combine_chunks()
            values.append(rows.flatten().to_numpy())
            lengths.append(pc.list_value_length(rows).to_numpy())
        sums = np.concatenate([[0.0], np.cumsum(np.concatenate(values), dtype=np.float64)])
        lengths = np.concatenate(lengths)
        starts = (np.cumsum(lengths) - lengths)[:, None]
        return sums[starts + self.ends] - sums[starts]

    def gap(self, number: int, logprobs: Version) -> float:
        """Return the mean |recomputed − engine's logprob| a token, of one evaluation's rows."""
        versions = {"logprobs": logprobs, "old_logprobs": self.rollouts[number]}
        recomputed, engines = (
            _aligned(version, self.ids[number], [column])[column].combine_chunks().flatten()
            for column, version in versions.items()
        )
        return float(np.abs(recomputed.to_numpy() - engines.to_numpy()).mean())

    def mixture(self, logprobs: Sequence[np.ndarray]) -> np.ndarray:
        """Return the log of the probability that the rows were sampled with: [N, T].

        `logprobs`: [N, T] under the policy of each evaluation. A policy's share at a prompt is its
        share of the prompt's rows.
        """
        counts = np.zeros((len(self.ids), self.prompts.max() + 1))
        np.add.at(counts, (self.samplers, self.prompts), 1)
        with np.errstate(divide="ignore"):  # a policy may have no row of a prompt
            shares = np.log(counts / counts.sum(axis=0))[:, self.prompts]
        return np.logaddexp.reduce(
            [each + share[:, None] for each, share in zip(logprobs, shares, strict=True)]
        )


def read(store: Store, evaluations: Sequence[Version]) -> Samples:
    """Read the rows of evaluations that have a score. Raises LineageError if their prompts
    differ, and ConfigError if two are of the same rollouts, whose rows would count twice."""
    prompts = [prompts_of(store, evaluation) for evaluation in evaluations]
    for evaluation, other in zip(evaluations, prompts, strict=True):
        if other.manifest.content_hash != prompts[0].manifest.content_hash:
            raise LineageError(
                str(evaluation.ref),
                f"has other prompts than {evaluations[0].ref}",
                next="name evaluations on the same prompts",
            )
    rollouts = [open_input(store, evaluation, "rollouts") for evaluation in evaluations]
    by_content: dict[str, Version] = {}
    for evaluation, sampled in zip(evaluations, rollouts, strict=True):
        equal = by_content.setdefault(sampled.manifest.content_hash, evaluation)
        if equal is not evaluation:
            raise ConfigError(
                str(evaluation.ref),
                f"is of the same rollouts as {equal.ref}",
                next="name one evaluation of each rollouts",
            )
    tables = [evaluation.table() for evaluation in evaluations]
    tables = [table.filter(table["score"].is_valid()) for table in tables]
    ids = [table["rollout_id"].combine_chunks() for table in tables]
    rows = [
        row
        for evaluation, table, sampled in zip(evaluations, tables, rollouts, strict=True)
        for row in _turns(store, evaluation, table, sampled)
    ]
    num_turns = max((len(earned) for earned, _ in rows), default=1)
    scores = np.zeros((len(rows), num_turns))
    ends = np.zeros((len(rows), num_turns), np.int64)
    for row, (earned, lengths) in enumerate(rows):
        scores[row, : len(earned)] = earned
        ends[row] = sum(lengths)
        ends[row, : len(lengths)] = np.cumsum(lengths)
    groups = pa.concat_arrays([table["group_id"].combine_chunks() for table in tables])
    numbers = groups.dictionary_encode().indices.to_numpy()
    return Samples(rollouts, ids, numbers, scores, ends)


def _aligned(version: Version, ids: pa.Array, columns: list[str]) -> pa.Table:
    """Return the rows of a version with these rollout ids, in their order."""
    table = version.table(["rollout_id", *columns])
    return table.take(pc.index_in(ids, value_set=table["rollout_id"].combine_chunks()))


def _turns(
    store: Store, evaluation: Version, scored: pa.Table, rollouts: Version
) -> list[tuple[list[float], list[int]]]:
    """Return what each turn of each scored row earned, and how many tokens it sampled.

    A row is one turn if its score is not the reward of its turns.
    """
    ids = scored["rollout_id"].combine_chunks()
    scores = scored["score"].to_pylist()
    lengths = pc.list_value_length(_aligned(rollouts, ids, ["completion_ids"])["completion_ids"])
    whole = [([score], [length]) for score, length in zip(scores, lengths.to_pylist(), strict=True)]
    paid = open_input(store, evaluation, "rewards")
    has_turns = paid.manifest.kind_schema == fields.kind_of(rewards.OF_TURNS)
    if not has_turns or evaluation.manifest.config.get("score") != "reward":
        return whole
    earned = _aligned(paid, ids, ["turn_rewards"])["turn_rewards"].to_pylist()
    turns = _aligned(rollouts, ids, ["turns"])["turns"].to_pylist()
    rows = []
    for row, by_turn, of_row in zip(whole, earned, turns, strict=True):
        if by_turn is None:  # a limit cut it off: it has a score and no reward
            rows.append(row)
        else:
            scores = [reward or 0.0 for reward in by_turn]
            rows.append((scores, [turn["length"] for turn in of_row]))
    return rows


def refusal(reason: str) -> dict[str, Any]:
    """Return the answer of `estimate` for a policy of which nothing was computed."""
    return {
        "estimate": None,
        "interval": None,
        "refused": reason,
        "rows": None,
        "n": None,
        "effective_rows": None,
        "kl": None,
        "mean_weight": None,
        "pareto_k": None,
    }


def estimate(samples: Samples, log_weights: np.ndarray) -> dict[str, Any]:
    """Estimate the mean score of a policy, or refuse to.

    Args:
        samples: The rows.
        log_weights: [N, T], the policy's logprobs minus the denominators'.

    Returns:
        estimate, interval: the score over prompts and its 95 % interval; None if refused
        refused: why, or None
        rows, n, effective_rows: number of rows and prompts; rows of equal weight with the same
            variance
        kl: mean of −log w, an estimate of KL(sampler ‖ policy) per row, in nats
        mean_weight, pareto_k: 1 is expected; `pareto_k` of the weights
    """
    whole = log_weights[:, -1]
    n = int(samples.prompts.max()) + 1
    by_prompt = np.bincount(samples.prompts, np.exp(np.minimum(whole, 700)))
    by_prompt /= np.bincount(samples.prompts)
    mean_weight = float(by_prompt.mean())
    off = abs(mean_weight - 1)
    chance = float(by_prompt.std(ddof=1)) / math.sqrt(n) if n > 1 else math.inf
    num_effective = effective_rows(whole)
    k = pareto_k(whole)
    refused = None
    if n < 2:
        refused = "one prompt has no standard error"
    elif num_effective < FEWEST_ROWS or k > LARGEST_K:
        refused = f"{num_effective:.0f} of {len(whole)} effective rows, k̂ {k:.2f}"
    elif off > max(MEAN_WEIGHT[0], MEAN_WEIGHT[1] * chance):
        refused = f"the mean weight is {mean_weight:.2g}, expected 1"
    score = interval = None
    if refused is None:
        score, interval = _score(samples, log_weights, n, num_effective)
    return {
        "estimate": score,
        "interval": interval,
        "refused": refused,
        "rows": len(whole),
        "n": n,
        "effective_rows": num_effective,
        "kl": -float(whole.mean()),
        "mean_weight": mean_weight,
        "pareto_k": k,
    }


def _score(
    samples: Samples, log_weights: np.ndarray, n: int, num_effective: float
) -> tuple[float, Interval | None]:
    """Return the estimate and its interval.

    A sum over several turns may leave [0, 1] although every row is inside. So it is moved back, and
    has Student's interval around it, cut to [0, 1].
    """
    score, stderr = self_normalized(log_weights, samples.scores, samples.prompts)
    scores = samples.row_scores
    if scores.min() >= 0 and scores.max() <= 1:
        lowest, highest = 0.0, 1.0
    else:
        lowest, highest = -math.inf, math.inf
    score = min(max(score, lowest), highest)
    if samples.scores.shape[1] == 1 or stderr == 0:
        return score, score_interval(score, stderr, n, scores, num_effective)
    half = student_quantile((1 + CONFIDENCE) / 2, n - 1) * stderr
    return score, (max(score - half, lowest), min(score + half, highest))
