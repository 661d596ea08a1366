"""Bad input as a table: each ends in an error that names its code, its object, what is wrong and
what to do, and changes nothing.

After every refusal the same versions are there, whole, and the next run on good input succeeds with
no clean-up.
"""

import sys
from typing import Any, NamedTuple

import pytest

from quiver.flows.verification import verify
from quiver.schemas.errors import QuiverError
from tests.stages.optimize import world

OWN = """
import torch
from quiver.stages.optimize.algorithms import Algorithm
from quiver.stages.optimize.losses import clipped, token_mean

def good(tokens, **options):
    return clipped(tokens, clip_low=0.2, clip_high=0.2)

seen = []
def poisoned(tokens, *, after, grad_only=False):
    loss, taken = good(tokens)
    seen.append(1)
    if len(seen) <= after:
        return loss, taken
    if grad_only:  # 0 where it stands, but its slope is infinite times 0
        return loss + (tokens.logprobs - tokens.logprobs.detach()).square().sqrt(), taken
    return loss * float("nan"), taken

def no_tokens():
    return None

def loss_alone(tokens):
    return good(tokens)[0]

def a_mean(tokens):
    loss, taken = good(tokens)
    return loss.mean(), taken

def detached(tokens):
    loss, taken = good(tokens)
    return loss.detach(), taken

def counts(tokens):
    loss, taken = good(tokens)
    return loss, taken.float()

def rewards_alone(rewards):
    return rewards

def of_groups(rewards, groups):
    return rewards[:1]

def critics(rewards, values, offsets, gamma, gae_lambda):
    return rewards, values

def lengths_alone(lengths):
    return token_mean(lengths)

def of_rollouts(lengths, max_completion_tokens):
    return torch.ones(len(lengths))

def row(advantage="group_normalized", surrogate=good, aggregation="token_mean", **more):
    return Algorithm("mine", advantage, surrogate, aggregation, **more)

FINE = row()
POISONED = row(surrogate=poisoned)
NO_TOKENS, LOSS_ALONE, A_MEAN = row(surrogate=no_tokens), row(surrogate=loss_alone), row(surrogate=a_mean)
DETACHED, COUNTS, NO_SUCH = row(surrogate=detached), row(surrogate=counts), row(surrogate="clip")
REWARDS_ALONE, OF_GROUPS = row(advantage=rewards_alone), row(advantage=of_groups)
CRITICS = row(advantage=critics, advantage_of="tokens", needs=("values", "last_values"))
NO_COLUMN = row(advantage="gae", advantage_of="tokens", needs=("worth",))
NO_UNIT = row(advantage=rewards_alone, advantage_of="token")
NOTHING = row(advantage=rewards_alone, advantage_of="tokens", needs=None)
NO_VALUES = row(advantage=critics, advantage_of="tokens", needs=("last_values",))
GAE_ALONE = row(advantage="gae", advantage_of="tokens")
OTB_OF_ROLLOUTS = row(advantage="optimal_token_baseline")
LENGTHS_ALONE, OF_ROLLOUTS = row(aggregation=lengths_alone), row(aggregation=of_rollouts)
"""


@pytest.fixture(autouse=True)
def own(tmp_path, monkeypatch):
    """The module `bad_algo` with a user's own algorithms."""
    (tmp_path / "bad_algo.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("bad_algo", None)


class Case(NamedTuple):
    """One bad input: the config, what becomes of the rollouts and their rewards, and what is said
    of it."""

    code: str
    exit_code: int
    object: str
    says: list[str]
    next: str
    config: dict[str, Any] = {}  # noqa: RUF012
    rows: Any = lambda row: row
    score: Any = world.even_share


def own_algorithm(name: str, part: str, *says: str, **config: Any) -> Case:
    told = "correct the function; stages/optimize/README.md"
    return Case(
        "E-CONFIG",
        2,
        f"optimize.algorithm bad_algo:{name} {part}",
        [*says],
        told,
        {"algorithm": f"bad_algo:{name}", **config},
    )


def poisoned(after: int, **options: Any) -> Case:
    says = ["3 optimizer steps in a row", "not finite"]
    config = {"algorithm": "bad_algo:POISONED", "epochs": 9, "options": {"after": after, **options}}
    return Case("E-NUMERIC", 8, "optimize", says, "lower optimize.learning_rate", config)


def alone(row: dict) -> dict:
    return {**row, "group_id": row["rollout_id"]}


def heated(row: dict) -> dict:
    """Half of the rows say that they were sampled at another temperature than they were."""
    return {**row, "temperature": 3.0} if row["sample_index"] % 2 else row


CASES = {
    "group too small": Case(
        "E-CONFIG", 2, "optimize.algorithm grpo", ["group_normalized needs 2 scored rollouts a prompt, found 1"],
        "samples_per_prompt >= 2", rows=alone,
    ),
    "kl_coef without a reference": Case(
        "E-CONFIG", 2, "optimize.kl_coef", ["0.1 needs the reference's logprobs"], "set kl_coef = 0", {"kl_coef": 0.1}
    ),
    "temperature 0": Case(
        "E-CONFIG", 2, "tiny/rollouts@2", ["1 rows were sampled at temperature 0"], "generate at temperature > 0",
        rows=lambda row: {**row, "temperature": 0.0} if row["rollout_id"] == "r-001-2" else row,
    ),
    "temperatures that the logprobs were not sampled at": Case(
        "E-NUMERIC", 8, "optimize audit", ["max_mean_gap = 0.1", "another temperature"], 'generate.dtype = "float32" and optimize.precision = "fp32"', rows=heated
    ),
    "no scored rollout": Case(
        "E-NUMERIC", 8, "tiny/rewards@2", ["0 of 16 rollouts are scored"], "raise generate.sampling.max_tokens", score=lambda row: None
    ),
    "NaN from the first step on": poisoned(0),
    "NaN from the third step on": poisoned(2),
    "NaN in the gradient alone": poisoned(1, grad_only=True),
    "own algorithm: takes no tokens": own_algorithm("NO_TOKENS", "surrogate", "(tokens, **options)", "too many positional"),
    "own algorithm: returns the loss alone": own_algorithm("LOSS_ALONE", "surrogate", "loss and clipped", "float32 ["),
    "own algorithm: returns a mean": own_algorithm("A_MEAN", "surrogate", "expected loss as float "
                                                                          "[", "found float32 []"),
    "own algorithm: has no gradient": own_algorithm("DETACHED", "surrogate", "no gradient", "tokens.logprobs"),
    "own algorithm: clipped is no bool": own_algorithm("COUNTS", "surrogate", "clipped as bool ["),
    "own algorithm: advantage of rewards alone": own_algorithm("REWARDS_ALONE", "advantage", "(rewards, groups)"),
    "own algorithm: advantage a group": own_algorithm("OF_GROUPS", "advantage", "advantages as float [16]", "float32 [1]"),
    "own algorithm: critic without last_values": own_algorithm("CRITICS", "advantage", "last_values"),
    "own algorithm: needs that no pass provides": Case(
        "E-CONFIG", 2, "optimize.algorithm bad_algo:NO_COLUMN", ["logprobs, values, collisions", "found ('worth',)"],
        "correct the algorithm's row", {"algorithm": "bad_algo:NO_COLUMN"},
    ),
    **{
        f"a row of one's own: {name}": Case(
            "E-CONFIG", 2, f"optimize.algorithm bad_algo:{name}", [says],
            "correct the algorithm's row", {"algorithm": f"bad_algo:{name}"},
        )
        for name, says in {
            "NO_UNIT": "rollouts, turns or tokens, found 'token'",
            "NOTHING": "found None",
            "NO_VALUES": "values beside last_values",
            "GAE_ALONE": "gae to be of tokens, with needs ('values', 'last_values')",
            "OTB_OF_ROLLOUTS": "optimal_token_baseline to be of tokens",
        }.items()
    },
    "own algorithm: weights of lengths alone": own_algorithm("LENGTHS_ALONE", "aggregation", "max_completion_tokens"),
    "own algorithm: weights a rollout": own_algorithm("OF_ROLLOUTS", "aggregation", "weights as float [", "float32 [16]"),
    "own algorithm: names a surrogate that is not there": Case(
        "E-CONFIG", 2, "optimize.algorithm", ["losses.py, found 'clip'"], "correct the "
                                                                          "algorithm's row",
        {"algorithm": "bad_algo:NO_SUCH"},
    ),
    "own algorithm: an option that it does not take": Case(
        "E-CONFIG", 2, "optimize.algorithm mine", ["does not take these options", "cap"], "correct optimize.options",
        {"algorithm": "bad_algo:A_MEAN", "options": {"cap": 2.0}},
    ),
    "own algorithm: an option that it needs": Case(
        "E-CONFIG", 2, "optimize.algorithm mine", ["missing a required", "after"], "correct optimize.options",
        {"algorithm": "bad_algo:POISONED"},
    ),
    "own algorithm: no such file": Case(
        "E-CONFIG", 2, "optimize.algorithm nowhere.py", ["there is no file"], "correct "
                                                                              "optimize.algorithm",
        {"algorithm": "nowhere.py:MINE"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_bad_input(store, policy, made, case):
    rows = made[0].table().to_pylist()
    bad = world.scored(store, policy, [case.rows(row) for row in rows], case.score)
    before = {str(v.ref): v.manifest.content_hash for v in store.versions()}
    with pytest.raises(QuiverError) as caught:
        world.trained(store, policy, bad, world.config(**case.config))
    error = caught.value
    assert (error.code, error.exit_code, error.object) == (case.code, case.exit_code, case.object)
    assert all(part in error.message for part in case.says), error.message
    assert case.next in error.next, error.next
    intact = ("nothing was changed", "intact", "no version was written")
    assert any(word in error.state for word in intact), error.state
    after = {str(v.ref): v.manifest.content_hash for v in store.versions()}
    assert after == before and verify(store)[1] == []
    good = world.scored(store, policy, rows)
    done = world.trained(store, policy, good, world.config(algorithm="bad_algo:FINE"))
    assert str(done.ref) == "tiny/policy@1"
