"""A critic that starts from a sequence classifier: its first values are the classifier's own scores;
which classifier counts in the run key; what is refused."""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    ModernBertDecoderConfig,
)

from quiver.flows.verification import verify
from quiver.schemas.errors import ConfigError, LineageError
from quiver.stages.core.store.writer import open_staging
from quiver.stages.model.loading import load_model
from quiver.stages.optimize import critic as critics
from quiver.stages.optimize import stage
from quiver.stages.optimize.classifier import find_classifier, read_classifier
from tests.stages.optimize import world
from tests.tiny import make_folder, make_policy, tokenizer

STALE = {"max_staleness": 2, "audit": {"enabled": False}}
"""Later trainings are on the same rollouts."""


def make_classifier(folder: Path, kind: str = "llama", labels: int = 1, **changes) -> Path:
    """A tiny classifier with the architecture of the tiny policies, and weights of its own."""
    config = AutoConfig.from_pretrained(make_folder(folder, kind), num_labels=labels, **changes)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = AutoModelForSequenceClassification.from_config(config)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def rewrite(folder: Path, **values) -> None:
    """Put other values into its config.json; None takes a key out."""
    path = folder / "config.json"
    about = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({key: value for key, value in about.items() if value is not None}))


def config(folder: object, **fields) -> stage.Config:
    fields = {"algorithm": "ppo", "critic": "model", "critic_from": str(folder), **fields}
    return world.config(**fields)


@pytest.fixture
def classifier(tmp_path) -> Path:
    return make_classifier(tmp_path / "classifier")


@torch.no_grad()
def scores(folder: Path, rows: list[dict]) -> list[float]:
    """What the classifier says of each prefix that a token of these rollouts follows."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    model.config.pad_token_id = None  # one prefix at a time has no padding
    found = []
    for row in rows:
        for end in range(len(row["completion_ids"])):
            prefix = row["prompt_ids"] + row["completion_ids"][:end]
            found.append(model(input_ids=torch.tensor([prefix])).logits.item())
    return found


# -- what it gives


@pytest.mark.parametrize(
    ("kind", "packing"), [("llama", "shared"), ("qwen3", "shared"), ("gpt2", "single")]
)
def test_the_first_values_are_the_classifiers_scores(store, tmp_path, kind, packing):
    policy = make_policy(store, kind, kind)
    made = world.by_engine(store, policy, groups=3, each=2)
    folder = make_classifier(tmp_path / "classifier", kind)
    trunk = critics.trunk_of(load_model(policy, dtype=torch.float32))
    inputs = world.inputs_of(policy, made)
    trainer = world.trainer(store, inputs, config(folder, packing=packing), value_trunk=trunk)
    start = read_classifier(folder, "classifier", trainer.critic["trunk"])
    critics.resume(trainer.critic, trainer.optimizer, policy, "model", moments=True, start=start)
    trainer.prepare()
    expected = scores(folder, made[0].table().to_pylist())
    assert max(expected) - min(expected) > 0.1
    assert trainer.batch.old_values.tolist() == pytest.approx(expected, abs=1e-5)


def test_a_training_starts_from_it_and_the_next_from_the_saved_critic(
    store, policy, made, train, classifier
):
    """Of weight 0 the critic gives values and stays: what is saved of it is the classifier. With
    λ = 1 the return of each token is the rollout's reward."""
    chosen = config(classifier, value_coef=0.0, gae_lambda=1.0, **STALE)
    first = train(chosen)
    rows = made[0].table().to_pylist()
    values = scores(classifier, rows)
    rewards = [world.even_share(row) for row in rows for _ in row["completion_ids"]]
    squares = [(value - reward) ** 2 for value, reward in zip(values, rewards, strict=True)]
    (update,) = world.updates(store, first)
    assert update["value_loss"] == pytest.approx(0.5 * sum(squares) / len(squares), rel=1e-4)
    saved = world.weights(first, "critic/state.safetensors")
    weights = load_file(classifier / "model.safetensors")
    assert torch.equal(saved["head.weight"], weights.pop("score.weight")[0])
    assert saved["head.bias"].tolist() == [0.0]
    trunk = {f"trunk.{name.removeprefix('model.')}": weight for name, weight in weights.items()}
    assert world.are_equal({name: saved[name] for name in trunk}, trunk)
    models = {model.role: model.ref for model in first.manifest.models}
    assert models == {"policy": "tiny/policy@0", "critic": str(classifier)}
    shutil.rmtree(classifier)  # from now on nothing reads it
    learning = chosen.model_copy(update={"value_coef": 0.1})
    second = train(learning, start=first)
    assert [model.role for model in second.manifest.models] == ["policy"]
    assert world.updates(store, second)[0]["value_loss"] == pytest.approx(
        update["value_loss"], rel=1e-4
    )
    alone = learning.model_copy(update={"critic_from": None})
    assert train(alone, start=first).ref == second.ref
    third = train(learning, start=second)
    assert not world.are_equal(
        *(world.weights(done, "critic/state.safetensors") for done in (second, third))
    )


def test_a_killed_training_goes_on_bit_for_bit(store, policy, made, classifier):
    train = partial(world.trained, store, policy, made)
    chosen = config(classifier, epochs=3, resume_steps=2)
    whole = train(chosen, into="whole")
    with world.dies_after(2):
        train(chosen, into="killed")
    resumed = train(chosen, into="killed")
    for name in ("critic/state.safetensors", "model.safetensors"):
        assert world.are_equal(world.weights(whole, name), world.weights(resumed, name))


def test_its_bytes_decide_which_version_is_made(train, classifier, tmp_path):
    first = train(config(classifier))
    moved = shutil.copytree(classifier, tmp_path / "moved")
    assert train(config(moved)).ref == first.ref
    plain = train(config(classifier, critic_from=None))
    with world.edited_weights(moved) as weights:
        weights["score.weight"][0, 0] += 1
    other = train(config(moved))
    assert len({first.ref, plain.ref, other.ref}) == 3


def test_a_classifier_of_the_store_is_named_by_number_or_tag(store, policy, train, classifier):
    imported = world.import_policy({"model": str(classifier)}, store, into="judge")
    store.tag("judge", "good", imported, expected=None, why="it judges well")
    done = train(config("judge/policy@good"))
    assert done.manifest.model("critic").ref == "judge/policy@0"
    assert verify(store)[1] == []
    # the same bytes, whatever they are called
    for name in ("judge/policy@0", str(classifier)):
        assert train(config(name)).ref == done.ref
    with pytest.raises(LineageError, match="run judge has no tag best"):
        train(config("judge/policy@best"))


# -- what is refused


def test_a_folder_that_changes_after_the_plan_is_refused(store, policy, made, classifier):
    inputs = world.inputs_of(policy, made)
    refs = {role: version.ref for role, version in inputs.items()}
    plan = stage.plan(config(classifier), store, refs)
    with world.edited_weights(classifier) as weights:
        weights["score.weight"] += 1
    with pytest.raises(ConfigError, match="has changed since"), open_staging(plan) as staging:
        stage.make(plan, staging.writers)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        ({"labels": 2}, "has 2 labels, and a value is one number"),
        ({"kind": "qwen3"}, "is of type qwen3, expected llama"),
        ({"hidden_size": 64}, "has hidden_size 64, expected 32"),
        ({"num_hidden_layers": 1}, "has num_hidden_layers 1, expected 2"),
        ({"vocab_size": 330}, "has vocab_size 330, expected 320"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_classifier_that_does_not_fit_is_refused(store, policy, tmp_path, make, problem):
    folder = make_classifier(tmp_path / "classifier", **make)
    with pytest.raises(ConfigError, match=problem) as caught:
        find_classifier(config(folder), store.open, policy)
    assert caught.value.object == f"optimize.critic_from {folder}"
    assert caught.value.message.endswith("the policy is tiny/policy@0")
    assert "one label" in caught.value.next


@pytest.mark.parametrize("changes", [{"max_position_embeddings": 64}, {"attention_dropout": 0.1}])
def test_numbers_without_effect_may_differ(store, policy, tmp_path, changes):
    folder = make_classifier(tmp_path / "classifier", **changes)
    assert find_classifier(config(folder), store.open, policy)


def test_other_models_are_refused(store, policy, tmp_path):
    missing = tmp_path / "missing"
    for folder, problem in (
        (missing, "there is no such directory"),
        (make_folder(tmp_path / "model"), "is no sequence classifier"),
    ):
        with pytest.raises(ConfigError, match=problem):
            find_classifier(config(folder), store.open, policy)
    encoder_decoder = make_classifier(tmp_path / "t5", "t5")
    with pytest.raises(ConfigError, match="head is not one linear map"):
        find_classifier(config(encoder_decoder), store.open, make_policy(store, "t5", "t5"))


def test_a_number_under_another_name_is_seen_when_it_is_loaded(train, classifier):
    """Older files have the base of rotary positions at the top."""
    rewrite(classifier, rope_parameters=None, rope_theta=77.0)
    with pytest.raises(ConfigError, match=r"has rope_parameters\.rope_theta 77\.0, expected 10000"):
        train(config(classifier))


def test_a_head_of_several_layers_is_seen_when_it_is_loaded(store, policy, tmp_path):
    ids = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id"), 0)
    sizes = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    judge = ModernBertDecoderConfig(**ids, **sizes, num_attention_heads=4, num_labels=1)
    AutoModelForSequenceClassification.from_config(judge).save_pretrained(tmp_path)
    trunk = critics.trunk_of(load_model(policy, dtype=torch.float32))
    with pytest.raises(ConfigError, match="ModernBertDecoderForSequenceClassification has no head"):
        read_classifier(tmp_path, "judge", trunk)


def test_only_a_critic_with_its_own_trunk_starts_from_one():
    with pytest.raises(ValueError, match="set critic = 'model'"):
        config("judge", critic="trunk")
    with pytest.raises(ValueError, match="critic, critic_from would have no effect"):
        config("judge", algorithm="grpo")
