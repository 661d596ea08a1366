"""Estimates of a tiny model from another one's rollouts, against its expected score by every
sequence of at most two tokens."""

import shutil

import numpy as np
import pyarrow as pa
import pytest
import torch
from pydantic import Field
from safetensors.torch import load_file, save_file

from quiver.flows.calls import calls_of
from quiver.flows.estimation import estimate
from quiver.flows.look.comparisons import estimate_lines
from quiver.flows.recipe import Recipe
from quiver.schemas import rewards, rollouts
from quiver.schemas.errors import LineageError
from quiver.stages.core.config import Config
from quiver.stages.core.run import runner
from quiver.stages.core.store import marks
from quiver.stages.core.store.listing import EXPIRED
from quiver.stages.model.checkpoints import PolicyConfig, model_entry
from quiver.stages.model.loading import load_model
from tests.stages.evaluate.held import ask, evaluate, write
from tests.tiny import EOS, make_folder
from tests.writing import begin, run_here

PROMPTS = [[5 + number, 40, 7 * number + 3] for number in range(8)]
SAMPLES = 48


class Sampled(Config):
    sampling: dict[str, int] = Field(default_factory=dict)


def nudged(store, folder, run, size):
    """`run/policy@0`: the tiny policy with `size` times normal noise on every weight."""
    path = make_folder(folder) / "model.safetensors"
    generator = torch.Generator().manual_seed(3)
    weights = {
        name: weight + size * torch.randn(weight.shape, generator=generator)
        for name, weight in load_file(path).items()
    }
    save_file(weights, path, {"format": "pt"})
    return store.open(run_here("policy", PolicyConfig(model=str(folder)), store, into=run))


@torch.no_grad()
def probabilities(policy):
    """Of the first token [prompts, V], and of the second one after it [prompts, V, V]."""
    model = load_model(policy, dtype=torch.float32)
    firsts, seconds = [], []
    for prompt in PROMPTS:
        logits = model(torch.tensor([prompt])).logits[0, -1]
        firsts.append(logits.double().softmax(-1).numpy())
        after = torch.tensor([[*prompt, token] for token in range(len(logits))])
        seconds.append(model(after).logits[:, -1].double().softmax(-1).numpy())
    return np.array(firsts), np.array(seconds)


def score(ids):
    return float(np.mean([id % 2 == 0 for id in ids]))


def expected(first, second):
    """The mean score over every sequence; one that ends at once has one token."""
    even = (np.arange(first.shape[1]) % 2 == 0).astype(float)
    two = (even[:, None] + even[None]) / 2
    by_first = (second * two).sum(2)
    by_first[:, EOS] = score([EOS])
    return (first * by_first).sum(1).mean()


def sampled_by(store, policy, run, seed, prompts=None):
    """The evaluation of rollouts drawn from the policy's exact probabilities, and its rows."""
    draw = np.random.default_rng(seed)
    first, second = probabilities(policy)
    rows = []
    for number, index in np.ndindex(len(PROMPTS), SAMPLES):
        token = int(draw.choice(len(first[number]), p=first[number]))
        ids, logprobs = [token], [np.log(first[number, token])]
        if token != EOS:
            ids.append(int(draw.choice(len(first[number]), p=second[number, token])))
            logprobs.append(np.log(second[number, token, ids[1]]))
        rows.append(
            {
                "rollout_id": f"{run}-{number}-{index}",
                "group_id": str(number),
                "sample_index": index,
                "prompt_ids": PROMPTS[number],
                "completion_ids": ids,
                "old_logprobs": logprobs,
                "finish_reason": "length",
                "completion_text": "",
                "temperature": 1.0,
                "seed": 0,
                "reward": score(ids),
                "parts": {"even": score(ids)},
                "errors": {"even": None},
            }
        )
    asked = prompts or ask(store, {str(number): f"{number}?" for number in range(8)}, "tiny.eval")
    return evaluation_of(store, policy, rows, asked), rows, asked


def evaluation_of(store, policy, rows, asked, config=None):
    """The evaluation of rows, sampled by a policy with a config."""
    table = pa.Table.from_pylist(rows, schema=rollouts.SCHEMA)
    about = {"inputs": {"prompts": asked}, "models": (model_entry("policy", policy),)}
    config = config or Sampled()
    sampled = write(store, "rollouts", table, "tiny.eval", config=config, **about)
    table = pa.Table.from_pylist(rows, schema=rewards.schema_for(["even"]))
    paid = write(store, "rewards", table, "tiny.eval", inputs={"rollouts": sampled})
    return evaluate(store, (sampled, paid), into="tiny")


def estimated(store, policies, *evaluations):
    """The answer, and how many versions were made for it."""
    recipe = Recipe(
        run="tiny",
        store=store.url,
        policy={"model": "model"},
        data={"source": "rows.jsonl", "limit": 8},
        reward={"functions": [{"use": "math"}]},
    )
    made = []

    def make(call, *_):
        outcome = runner.find_or_make(call)
        made.append(outcome.ref)
        return outcome

    with calls_of(recipe, make):
        return estimate(recipe, policies, evaluations), made


def test_an_estimate_is_the_expected_score_over_every_sequence(store, policy, tmp_path):
    near, far = (
        nudged(store, tmp_path / run, run, size) for run, size in (("near", 0.01), ("far", 0.5))
    )
    evaluation, rows, asked = sampled_by(store, policy, "a", 1)
    names = ["near/policy@0", "far/policy@0", "policy@0"]
    answer, made = estimated(store, names, str(evaluation.ref))
    close, refused, same = answer["estimates"]
    # weights by the exact probabilities
    chances = [probabilities(version) for version in (near, policy)]
    log_weights = []
    for row in rows:
        number, ids = int(row["group_id"]), row["completion_ids"]
        logs = [
            sum(np.log([first[number, ids[0]], *(second[number, ids[0], id] for id in ids[1:])]))
            for first, second in chances
        ]
        log_weights.append(logs[0] - logs[1])
    weights = np.exp(log_weights)
    scores = np.array([row["reward"] for row in rows])
    assert close["estimate"] == pytest.approx((weights * scores).sum() / weights.sum(), abs=1e-4)
    assert close["effective_rows"] == pytest.approx(
        weights.sum() ** 2 / (weights**2).sum(), rel=1e-3
    )
    assert close["interval"][0] < expected(*chances[0]) < close["interval"][1]
    assert close["estimate"] == pytest.approx(expected(*chances[0]), abs=0.05)
    assert close["effective_rows"] < 0.995 * len(rows), "the policies differ"
    assert refused["estimate"] is None and "effective rows" in refused["refused"]
    assert same["estimate"] == pytest.approx(evaluation.manifest.metrics["score"], abs=1e-5)
    assert answer["from"][0]["gap"] < 1e-4
    assert made == [f"tiny.eval/logprobs@{number}" for number in (1, 2, 3)]
    assert estimated(store, names, str(evaluation.ref)) == (answer, []), "already done"
    text = "\n".join(estimate_lines(answer, "toy.toml"))
    assert f"{close['estimate']:.4f}" in text and "from tiny.eval/rollouts@1: 384 rows" in text
    assert "sample instead: `quiver evaluate toy.toml --policy far/policy@0`" in text

    second, *_ = sampled_by(store, near, "b", 2, asked)
    both, _ = estimated(store, names[:1], str(evaluation.ref), str(second.ref))
    assert both["estimates"][0]["rows"] == 2 * len(rows)
    assert both["estimates"][0]["estimate"] == pytest.approx(expected(*chances[0]), abs=0.04)
    refused_pairs(store, policy, rows, asked, evaluation)
    unusable_ones(store, far, rows, asked)


def refused_pairs(store, policy, rows, asked, evaluation):
    """What learned from the rollouts, and an engine that sampled by another policy."""
    sampled = store.open("tiny.eval/rollouts@1")
    about = {"stage": "optimize", "stage_version": 1, "config": Config()}
    inputs = {"policy": policy, "rollouts": sampled}
    with begin(store, "tiny", "policy", inputs=inputs, **about) as work:
        shutil.copytree(policy.files.folder, work.folder, dirs_exist_ok=True)
        trained = work.commit()
    cut = evaluation_of(store, policy, rows[:-1], asked, Sampled(sampling={"top_k": 5}))
    answer, _ = estimated(store, [str(trained.ref)])
    assert answer["from"][0]["evaluation"] == str(evaluation.ref), "of its nearest ancestor"
    assert answer["estimates"][0]["refused"] == "it was trained on these rollouts"
    with begin(store, "tiny", "policy", inputs={"policy": trained}, **about) as work:
        shutil.copytree(policy.files.folder, work.folder, dirs_exist_ok=True)
        further = work.commit()
    answer, _ = estimated(store, [str(further.ref)], str(evaluation.ref))
    assert answer["estimates"][0]["refused"] == "it was trained on these rollouts", "its parent was"
    with pytest.raises(LineageError, match="were sampled with top_k = 5"):
        estimated(store, [str(trained.ref)], str(cut.ref))
    greedy = evaluation_of(store, policy, rows[:-2], asked, Sampled(sampling={"temperature": 0}))
    with pytest.raises(LineageError, match="were sampled with temperature = 0, so they do not"):
        estimated(store, [str(trained.ref)], str(greedy.ref))
    few = evaluation_of(store, policy, rows[:64], asked)
    with pytest.raises(LineageError, match="too few scored rows: 64, an estimate needs 100"):
        estimated(store, ["policy@0"], str(few.ref))
    marks.write(store.storage, store.resolve("near/policy@0"), EXPIRED, "gc")
    answer, _ = estimated(store, ["near/policy@0", "policy@0"], str(evaluation.ref))
    gone, kept = answer["estimates"]
    assert "near/policy@0" in gone["refused"] and kept["estimate"] is not None
    assert gone.keys() == kept.keys()
    with pytest.raises(LineageError, match="no evaluation of a policy that it was trained from"):
        estimated(store, ["far/policy@0"])
    for row in rows:
        row["old_logprobs"] = [-1.0] * len(row["completion_ids"])
    other = evaluation_of(store, policy, rows, asked)
    with pytest.raises(LineageError, match="the engine's logprobs differ"):
        estimated(store, ["policy@0"], str(other.ref))


def unusable_ones(store, policy, rows, asked):
    """Of several evaluations of the nearest ancestor the newest is told of."""
    about = {"stage": "optimize", "stage_version": 1, "config": Config()}
    with begin(store, "tiny", "policy", inputs={"policy": policy}, **about) as work:
        shutil.copytree(policy.files.folder, work.folder, dirs_exist_ok=True)
        trained = work.commit()
    for number, sampling in enumerate(({"temperature": 0}, {"top_k": 5}), 3):
        evaluation_of(store, policy, rows[:-number], asked, Sampled(sampling=sampling))
    with pytest.raises(LineageError, match="were sampled with top_k = 5"):
        estimated(store, [str(trained.ref)])
