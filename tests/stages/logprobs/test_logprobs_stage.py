"""The logprobs stage against transformers' own forward pass, one rollout at a time; what it
refuses; what uses it."""

import json
from functools import partial

import pytest
import torch

from quiver.schemas.errors import ConfigError, LineageError, ResourceError, SchemaError
from quiver.stages.common.models.loading import load_model
from quiver.stages.common.ragged import Ragged
from quiver.stages.common.runtime.runner import run_stage
from quiver.stages.logprobs.stage import Config
from quiver.stages.optimize import stage as optimize
from tests.stages.optimize import world
from tests.tiny import make_folder, make_policy
from tests.writing import ids_asked_for

run = partial(run_stage, "logprobs", in_process=True)


@pytest.fixture
def other(store):
    """A policy that did not sample."""
    return make_policy(store, "other", seed=1)


@pytest.fixture(params=[1.0, 0.7])
def rollouts(store, policy, request):
    """40 rollouts of 8 prompts, with one that is empty; 2 shards when a shard is 256 rows and the
    prompts are many."""
    model = load_model(policy, dtype=torch.float32)
    rows = world.sample(model, world.prompts(8), 5, temperature=request.param)
    rows[3] |= {"completion_ids": [], "old_logprobs": []}
    return world.write_rollouts(store, policy, rows)


def expected(version, rollouts) -> list[list[float]]:
    model, found = load_model(version, dtype=torch.float32), []
    for row in rollouts.table().to_pylist():
        prompt, completion = row["prompt_ids"], row["completion_ids"]
        with torch.no_grad():
            logits = (
                model(torch.tensor([prompt + completion])).logits[0].double() / row["temperature"]
            )
        scores = logits.log_softmax(-1)
        found.append(
            [float(scores[len(prompt) - 1 + t, token]) for t, token in enumerate(completion)]
        )
    return found


@pytest.mark.parametrize("packing", ["shared", "packed", "single"])
def test_it_is_the_models_own_logprob(store, policy, other, rollouts, packing):
    for role, version in (("ref", other), ("prox", policy)):
        ref = run(
            Config(role=role, packing=packing), store, rollouts=rollouts.ref, policy=version.ref
        )
        table = store.open(ref).table()
        assert table["rollout_id"].to_pylist() == rollouts.table()["rollout_id"].to_pylist()
        for ours, wanted in zip(
            table["logprobs"].to_pylist(), expected(version, rollouts), strict=True
        ):
            assert ours == pytest.approx(wanted, abs=1e-5)
        manifest = store.open(ref).manifest
        assert (manifest.config["role"], manifest.model(role).ref) == (role, str(version.ref))
        attention = "model" if packing == "single" else "blocks"
        assert (manifest.metrics["packing"], manifest.metrics["attention"]) == (packing, attention)


def test_its_rows_must_be_those_of_the_rollouts(store, policy, rollouts, monkeypatch):
    asked = ids_asked_for(monkeypatch)
    run(Config(role="prox"), store, rollouts=rollouts.ref, policy=policy.ref)
    assert asked == [rollouts.table()["rollout_id"].to_pylist()]


def test_rollouts_of_one_group_are_each_scored_under_their_own_prompt(store, policy):
    """A group whose rows have different prompts, as after an edit by hand: nothing is shared
    between these, neither here nor where the policy learns."""
    rows = world.sample(load_model(policy, dtype=torch.float32), world.prompts(4), 3)
    for row in rows:
        row["group_id"] = f"g-{int(row['group_id'][2:]) // 2}"
    rollouts = world.write_rollouts(store, policy, rows)
    refs = {"rollouts": rollouts.ref, "policy": policy.ref}
    version = store.open(run(Config(), store, **refs))
    assert version.manifest.metrics["packing"] == "shared"
    for found, row in zip(version.table()["logprobs"].to_pylist(), rows, strict=True):
        assert found == pytest.approx(row["old_logprobs"], abs=1e-5)
    refs["rewards"] = world.write_rewards(store, rollouts, world.even_share).ref
    config = optimize.Config(device="cpu")
    done = store.open(run_stage("optimize", config, store, in_process=True, **refs))
    metrics = done.manifest.metrics
    assert metrics["packing"] == "shared" and metrics["audit"]["max_gap"] < 1e-4


def test_many_shards_are_taken_up_again(store, policy, other, monkeypatch):
    model = load_model(policy, dtype=torch.float32)
    rollouts = world.write_rollouts(
        store, policy, world.sample(model, world.prompts(150), 2, longest=3)
    )
    ref = run(Config(), store, rollouts=rollouts.ref, policy=other.ref)
    version = store.open(ref)
    assert [entry.rows for entry in version.manifest.files] == [256, 44]
    found = Ragged.from_arrow(version.table()["logprobs"])
    assert found.values.tolist() == pytest.approx(
        [x for row in expected(other, rollouts) for x in row], abs=1e-5
    )
    assert run(Config(token_budget=64), store, rollouts=rollouts.ref, policy=other.ref) == ref


def test_completions_without_a_token_have_no_logprobs(store, policy, other):
    """All of a shard; nothing of it is infinite."""
    rows = world.sample(load_model(policy, dtype=torch.float32), world.prompts(2), 2)
    empty = {"completion_ids": [], "old_logprobs": []}
    rollouts = world.write_rollouts(store, policy, [row | empty for row in rows])
    ref = run(Config(), store, rollouts=rollouts.ref, policy=other.ref)
    assert store.open(ref).table()["logprobs"].to_pylist() == [[]] * 4


def test_proximal_logprobs_are_of_the_policy_that_sampled(store, policy, other, rollouts):
    with pytest.raises(LineageError, match="proximal logprobs are of those weights") as caught:
        run(Config(role="prox"), store, rollouts=rollouts.ref, policy=other.ref)
    assert caught.value.next == f"give {policy.ref}"


def retold(store, folder, run, change):
    """`run/policy@0`: the tiny policy with a tokenizer in whose JSON `change` was made."""
    path = make_folder(folder / run, seed=2) / "tokenizer.json"
    told = json.loads(path.read_text())
    change(told)
    path.write_text(json.dumps(told))
    config = {"model": str(path.parent)}
    return store.open(run_stage("policy", config, store, into=run, in_process=True))


def swap(told):
    """Two tokens have each other's id."""
    vocabulary = told["model"]["vocab"]
    a, b = (token for token, id in vocabulary.items() if id in (300, 301))
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]


def rename(told):
    """The end token has another name."""
    told["added_tokens"][2]["content"] = "<|end|>"
    told["model"]["vocab"]["<|end|>"] = told["model"]["vocab"].pop("<|im_end|>")


def both(told):
    swap(told)
    rename(told)


def test_an_id_must_be_the_same_token_to_both(store, policy, tmp_path):
    rollouts = world.write_rollouts(
        store, policy, world.sample(load_model(policy, dtype=torch.float32), world.prompts(2), 2)
    )

    def score(version, **config):
        return run(Config(**config), store, rollouts=rollouts.ref, policy=version.ref)

    assert score(retold(store, tmp_path, "same", lambda told: told.update(truncation=None)))
    swapped, renamed = (
        retold(store, tmp_path, "swapped", swap),
        retold(store, tmp_path, "renamed", rename),
    )
    for version, words in (
        (swapped, "2 ids are other tokens, such as 300"),
        (renamed, r"1 special ids .* found '<\|end\|>'"),
    ):
        with pytest.raises(LineageError, match=words) as caught:
            score(version)
        assert caught.value.object == str(version.ref)
    assert caught.value.next == "set logprobs.other_special_tokens = true"
    assert score(renamed, other_special_tokens=True)
    for version in (swapped, retold(store, tmp_path, "both", both)):
        with pytest.raises(LineageError, match="2 ids are other tokens") as caught:
            score(version, other_special_tokens=True)
        assert caught.value.next == f"score under a policy with the tokenizer of {policy.ref}"


def special(told):
    """An ordinary token becomes a control token of another name."""
    vocabulary = told["model"]["vocab"]
    (token,) = (token for token, id in vocabulary.items() if id == 300)
    vocabulary["<|tool|>"] = vocabulary.pop(token)
    told["model"]["merges"] = [
        pair for pair in told["model"]["merges"] if token not in (*pair, "".join(pair))
    ]
    told["added_tokens"].append(
        {**told["added_tokens"][2], "id": 300, "content": "<|tool|>", "special": True}
    )


def test_a_token_may_be_special_to_the_scoring_policy_alone(store, policy, tmp_path):
    rows = world.sample(load_model(policy, dtype=torch.float32), world.prompts(2), 2)
    refs = {"rollouts": world.write_rollouts(store, policy, rows).ref}
    refs["policy"] = retold(store, tmp_path, "special", special).ref
    with pytest.raises(LineageError, match="1 special ids are other tokens, such as 300"):
        run(Config(), store, **refs)
    assert run(Config(other_special_tokens=True), store, **refs)


def test_greedy_rows_have_no_probability(store, policy):
    rows = world.sample(load_model(policy, dtype=torch.float32), world.prompts(1), 2)
    rollouts = world.write_rollouts(store, policy, [row | {"temperature": 0.0} for row in rows])
    with pytest.raises(ConfigError, match="temperature 0"):
        run(Config(), store, rollouts=rollouts.ref, policy=policy.ref)


def test_a_sweep_over_kl_uses_the_same_column(store, policy, other, rollouts):
    """The KL of the first step is that of the two models; the reference's folder may be gone by
    then."""
    rewards = world.write_rewards(
        store, rollouts, lambda row: float(len(row["completion_ids"]) % 3)
    )
    scored = run(Config(), store, rollouts=rollouts.ref, policy=other.ref)
    other.files.folder.rename(other.files.folder.with_name("elsewhere"))
    losses = []
    for kl_coef in (0.1, 0.2):
        config = optimize.Config(
            kl_coef=kl_coef,
            kl_estimator="k1",
            aggregation="token_mean",
            device="cpu",
            learning_rate=1e-5,
        )
        named = {
            "policy": policy.ref,
            "rollouts": rollouts.ref,
            "rewards": rewards.ref,
            "ref_logprobs": scored,
        }
        done = store.open(run_stage("optimize", config, store, in_process=True, **named))
        losses.append(store.open(done.manifest.metrics["updates"]).table()["kl_loss"][0].as_py())
    pairs = zip(
        rollouts.table()["old_logprobs"].to_pylist(),
        store.open(scored).table()["logprobs"].to_pylist(),
        strict=True,
    )
    gaps = [old - ref for olds, refs in pairs for old, ref in zip(olds, refs, strict=True)]
    assert losses == pytest.approx([sum(gaps) / len(gaps)] * 2, rel=1e-4)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"prompt_ids": []}, "a prompt has no ids"),
        (
            {"completion_ids": [320], "old_logprobs": [-1.0]},
            "completion_ids holds 320, the policy knows ids below 320",
        ),
        ({"prompt_ids": [5] * 256}, "the policy reads 256"),
    ],
)
def test_rows_that_the_model_can_not_read_are_refused(store, policy, other, change, said):
    """The last of many: none of those that the packing is tried out with."""
    rows = world.sample(load_model(policy, dtype=torch.float32), world.prompts(6), 3)
    rollouts = world.write_rollouts(store, policy, [*rows[:-1], rows[-1] | change])
    with pytest.raises(SchemaError, match=said):
        run(Config(), store, rollouts=rollouts.ref, policy=other.ref)
    assert store.numbers("tiny", "logprobs") == []


def test_lack_of_memory_says_what_helps(store, policy, rollouts, monkeypatch):
    monkeypatch.setattr("quiver.stages.logprobs.scoring.score", lambda *_: torch.empty(1 << 60))
    with pytest.raises(ResourceError, match="memory is short") as caught:
        run(Config(), store, rollouts=rollouts.ref, policy=policy.ref)
    assert "token_budget" in caught.value.next


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_device_that_is_not_there_is_refused(store, policy, rollouts):
    with pytest.raises(ConfigError, match="torch sees no GPU") as caught:
        run(Config(device="cuda"), store, rollouts=rollouts.ref, policy=policy.ref)
    assert caught.value.object == "logprobs.device cuda"


@pytest.mark.parametrize("precision", ["bf16", "bf16_pure"])
def test_another_precision_is_near(store, policy, other, rollouts, precision):
    found = store.open(
        run(Config(precision=precision), store, rollouts=rollouts.ref, policy=other.ref)
    ).table()["logprobs"]
    pairs = zip(found.to_pylist(), expected(other, rollouts), strict=True)
    gaps = [abs(ours - wanted) for row in pairs for ours, wanted in zip(*row, strict=True)]
    assert 1e-4 < sum(gaps) / len(gaps) < 0.03


def test_bf16_pure_is_the_pass_of_training_in_bfloat16(store, policy):
    made = world.make(store, policy, world.even_share)
    refs = {"rollouts": made[0].ref, "policy": policy.ref}
    prox = run(Config(role="prox", precision="bf16_pure"), store, **refs)
    config = optimize.Config(precision="bf16_stochastic", device="cpu")
    refs["rewards"] = made[1].ref
    done = store.open(run_stage("optimize", config, store, in_process=True, **refs))
    trained = store.open(done.manifest.metrics["advantages"]).table()["mean_logprob"].to_pylist()
    scored = [sum(row) / len(row) for row in store.open(prox).table()["logprobs"].to_pylist()]
    both = [
        (mine, theirs) for mine, theirs in zip(scored, trained, strict=True) if theirs is not None
    ]
    assert len(both) > 10
    for mine, theirs in both:
        assert mine == pytest.approx(theirs, abs=1e-4)
