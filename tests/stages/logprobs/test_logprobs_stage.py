"""The logprobs stage against transformers' own forward pass, one rollout at a time; its refusals; its
use in a training."""

from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

from quiver.schemas.errors import ConfigError, LineageError, ResourceError, SchemaError
from quiver.stages.core.run.runner import run_stage
from quiver.stages.core.store import writer
from quiver.stages.logprobs.forward_pass import LogprobPass
from quiver.stages.logprobs.stage import Config
from quiver.stages.model.loading import load_model
from quiver.stages.model.ragged import Ragged
from tests.stages.optimize import world
from tests.tiny import make_folder, make_policy, plain_logprobs
from tests.tokens import make_special, rename, swap, with_tokenizer
from tests.writing import ids_asked_for

run = partial(run_stage, "logprobs", in_process=True)


@pytest.fixture
def other(store):
    """A policy that did not sample."""
    return make_policy(store, "other", seed=1)


@pytest.fixture
def rollouts(store, policy):
    """40 rollouts of 8 prompts, of which one is empty."""
    rows = world.rows_of(policy, 8, 5, temperature=0.7)
    rows[3] |= {"completion_ids": [], "old_logprobs": []}
    return world.write_rollouts(store, policy, rows)


@pytest.fixture
def few(store, policy):
    """Rollouts of 2 prompts."""
    return world.write_rollouts(store, policy, world.rows_of(policy, 2, 2))


def score(store, rollouts, policy, **config):
    """The version that the stage makes."""
    ref = run(Config(**config), store, rollouts=rollouts.ref, policy=policy.ref)
    return store.open(ref)


def logprobs(version) -> list[list[float]]:
    return version.table()["logprobs"].to_pylist()


def expected(version, rollouts) -> list[list[float]]:
    model = load_model(version, dtype=torch.float32)
    names = ("prompt_ids", "completion_ids", "temperature")
    return [
        plain_logprobs(model, *(row[name] for name in names)).tolist()
        for row in rollouts.table().to_pylist()
    ]


def assert_close(rows, expected_rows) -> None:
    for row, expected_row in zip(rows, expected_rows, strict=True):
        assert row == pytest.approx(expected_row, abs=1e-5)


@pytest.mark.parametrize("packing", ["shared", "packed", "single"])
def test_it_is_the_models_own_logprob(store, policy, other, rollouts, packing):
    for role, version in (("ref", other), ("prox", policy)):
        scored = score(store, rollouts, version, role=role, packing=packing)
        ids = scored.table()["rollout_id"].to_pylist()
        assert ids == rollouts.table()["rollout_id"].to_pylist()
        assert_close(logprobs(scored), expected(version, rollouts))
        manifest = scored.manifest
        assert (manifest.config["role"], manifest.model(role).ref) == (role, str(version.ref))
        attention = "model" if packing == "single" else "blocks"
        assert (manifest.metrics["packing"], manifest.metrics["attention"]) == (packing, attention)


def test_its_rows_must_be_those_of_the_rollouts(store, policy, few, monkeypatch):
    asked = ids_asked_for(monkeypatch)
    score(store, few, policy)
    assert asked == [few.table()["rollout_id"].to_pylist()]


def test_rollouts_of_one_group_are_each_scored_under_their_own_prompt(store, policy):
    """A group whose rows have different prompts, as after an edit by hand: nothing is shared
    between these, neither here nor in a training."""
    rows = world.rows_of(policy, 4, 3)
    for row in rows:
        row["group_id"] = f"g-{int(row['group_id'][2:]) // 2}"
    rollouts, rewards = world.scored(store, policy, rows)
    version = score(store, rollouts, policy)
    assert version.manifest.metrics["packing"] == "shared"
    assert_close(logprobs(version), [row["old_logprobs"] for row in rows])
    metrics = world.trained(store, policy, (rollouts, rewards)).manifest.metrics
    assert metrics["packing"] == "shared" and metrics["audit"]["max_gap"] < 1e-4


def test_many_shards_and_another_budget_are_the_same_work(store, policy, other, monkeypatch):
    """Shards grow with the rollouts."""
    rows = world.rows_of(policy, 150, 4, longest=3)
    rollouts = world.write_rollouts(store, policy, rows)
    version = score(store, rollouts, other)
    assert [entry.rows for entry in version.manifest.files] == [256, 256, 88]
    assert_close(logprobs(version), expected(other, rollouts))
    assert score(store, rollouts, other, token_budget=64).ref == version.ref
    monkeypatch.setattr(writer, "MOST_SHARDS", 2)
    scored = score(store, rollouts, policy, role="prox")
    assert [entry.rows for entry in scored.manifest.files] == [512, 88]
    assert_close(logprobs(scored), [row["old_logprobs"] for row in rows])


def test_completions_without_a_token_have_no_logprobs(store, policy, other):
    """All of a shard; nothing of it is infinite."""
    empty = {"completion_ids": [], "old_logprobs": []}
    rows = [row | empty for row in world.rows_of(policy, 2, 2)]
    assert logprobs(score(store, world.write_rollouts(store, policy, rows), other)) == [[]] * 4


def test_proximal_logprobs_are_of_the_policy_that_sampled(store, policy, other, few):
    with pytest.raises(
        LineageError, match="proximal logprobs must be of the same weights"
    ) as caught:
        score(store, few, other, role="prox")
    assert caught.value.next == f"give {policy.ref}"


@pytest.mark.parametrize(
    ("changes", "words", "is_special"),
    [
        ((swap,), "2 ids are other tokens, such as 300", False),
        ((rename,), r"1 special ids .* found '<\|end\|>'", True),
        ((swap, rename), "3 ids are other tokens", False),
        ((make_special,), "1 special ids are other tokens, such as 300", True),
    ],
)
def test_an_id_must_be_the_same_token_to_both(
    store, policy, few, tmp_path, changes, words, is_special
):
    version = with_tokenizer(store, tmp_path, "other", *changes)
    with pytest.raises(LineageError, match=words) as caught:
        score(store, few, version)
    assert caught.value.object == str(version.ref)
    if is_special:
        assert caught.value.next == "set logprobs.other_special_tokens = true"
        assert score(store, few, version, other_special_tokens=True)
    else:
        assert caught.value.next == f"take a policy with the tokenizer of {policy.ref}"
        with pytest.raises(LineageError, match="2 ids are other tokens"):
            score(store, few, version, other_special_tokens=True)


def test_a_tokenizer_with_the_same_tokens_may_have_another_file(store, few, tmp_path):
    assert score(store, few, with_tokenizer(store, tmp_path, "other"))


def test_a_sweep_over_kl_uses_the_same_column(store, policy, other, few):
    """The KL of the first step is that of the two models; the reference's folder may be gone by
    then."""
    rewards = world.write_rewards(store, few, lambda row: float(len(row["completion_ids"]) % 3))
    scored = score(store, few, other)
    other.files.folder.rename(other.files.folder.with_name("elsewhere"))
    losses = []
    for kl_coef in (0.1, 0.2):
        kl = {"kl_coef": kl_coef, "kl_estimator": "k1", "aggregation": "token_mean"}
        config = world.config(learning_rate=1e-5, **kl)
        done = world.trained(store, policy, (few, rewards), config, ref_logprobs=scored.ref)
        losses.append(world.updates(store, done)[0]["kl_loss"])
    old = Ragged.from_arrow(few.table()["old_logprobs"]).values
    reference = Ragged.from_arrow(scored.table()["logprobs"]).values
    assert losses == pytest.approx([(old - reference).mean().item()] * 2, rel=1e-4)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"prompt_ids": []}, SchemaError, "a prompt has no ids"),
        (
            {"completion_ids": [320], "old_logprobs": [-1.0]},
            SchemaError,
            "completion_ids holds 320, the policy knows ids below 320",
        ),
        ({"prompt_ids": [5] * 256}, SchemaError, "the policy reads 256"),
        ({"temperature": 0.0}, ConfigError, "temperature 0"),
    ],
)
def test_rows_that_cannot_be_scored_are_refused(store, policy, other, change, error, words):
    """The last of many: none of those that the packing is tried out with."""
    rows = world.rows_of(policy, 6, 3)
    rollouts = world.write_rollouts(store, policy, [*rows[:-1], rows[-1] | change])
    with pytest.raises(error, match=words):
        score(store, rollouts, other)
    assert store.numbers("tiny", "logprobs") == []


def test_lack_of_memory_says_what_helps(store, policy, few, monkeypatch):
    monkeypatch.setattr(
        "quiver.stages.logprobs.forward_pass.compute_logprobs", lambda *_: torch.empty(1 << 60)
    )
    with pytest.raises(ResourceError, match="memory is short") as caught:
        score(store, few, policy)
    assert "token_budget" in caught.value.next


@pytest.mark.parametrize("precision", ["bf16", "bf16_pure"])
def test_another_precision_is_near(store, policy, other, rollouts, precision):
    rows = logprobs(score(store, rollouts, other, precision=precision))
    gaps = [
        abs(logprob - exact)
        for row, exact_row in zip(rows, expected(other, rollouts), strict=True)
        for logprob, exact in zip(row, exact_row, strict=True)
    ]
    assert 1e-4 < sum(gaps) / len(gaps) < 0.03


def test_a_policy_saved_in_bfloat16_is_scored_the_same_from_half_the_bytes(
    store, few, tmp_path, monkeypatch
):
    """Of linear layers: autocast would round their weights to what the file holds."""
    folder = make_folder(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    half = store.open(run_stage("policy", {"model": str(folder)}, store, into="half"))
    narrow = LogprobPass(Config(precision="bf16"), half)
    dtypes = {type(each): each.weight.dtype for each in narrow._policy.model.base_model.modules()
              if hasattr(each, "weight")}  # fmt: skip
    assert dtypes.pop(torch.nn.Linear) == torch.bfloat16
    assert set(dtypes.values()) == {torch.float32}
    as_float32 = {"weight": ("F32", ())}
    monkeypatch.setattr("quiver.stages.model.loading.stored_weights", lambda folder: as_float32)
    wide = LogprobPass(Config(precision="bf16"), half)
    table = few.table()
    assert narrow.compute_logprobs(table).equals(wide.compute_logprobs(table))


def test_bf16_pure_is_the_pass_of_training_in_bfloat16(store, policy):
    inputs = world.make(store, policy, world.even_share)
    prox = score(store, inputs[0], policy, role="prox", precision="bf16_pure")
    done = world.trained(store, policy, inputs, world.config(precision="bf16_stochastic"))
    means = [row["mean_logprob"] for row in world.advantages(store, done)]
    pairs = [
        (sum(row) / len(row), mean)
        for row, mean in zip(logprobs(prox), means, strict=True)
        if mean is not None
    ]
    assert len(pairs) > 10
    for scored, trained in pairs:
        assert scored == pytest.approx(trained, abs=1e-4)
