"""The pass over many inputs: every way of batching gives the value of one input alone, and only
ways that do are used."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from quiver.schemas.errors import ConfigError
from quiver.stages.reward.models.config import ModelConfig
from quiver.stages.reward.models.forward import WAYS, Forward
from tests.stages.reward.reward_models import make_model

ATOL = 1e-5
"""Of logits near 1 in float32: what another order of sums costs."""


def some_inputs(seed: int = 0) -> tuple[list[list[int]], list[int]]:
    """Ten inputs of five prompts: common beginnings of 1 to 40 ids, one input of a single id, one
    that is its mate's beginning."""
    make = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randint(1, 256, (n,), generator=make).tolist()  # noqa: E731
    inputs, groups = [[7], draw(90)], [0, 1]
    for group, (begin, *rest) in enumerate([(40, 3, 60), (1, 12, 70, 2), (25, 0, 9, 31)], 2):
        shared = draw(begin)
        inputs += [shared + draw(length) for length in rest]
        groups += [group] * len(rest)
    order = torch.randperm(len(inputs), generator=make).tolist()
    return [inputs[row] for row in order], [groups[row] for row in order]


def alone(folder, inputs: list[list[int]], kind=AutoModelForSequenceClassification) -> torch.Tensor:
    """What transformers gives for one input at a time, with the one attention that leaves nothing
    out."""
    model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return torch.stack([model(input_ids=torch.tensor([ids])).logits[0] for ids in inputs])


def forward_of(folder, **config) -> Forward:
    return Forward(folder, ModelConfig(model=str(folder), **config))


def require_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=ATOL, rtol=0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind, labels", [("llama", 1), ("qwen3", 3)])
def test_each_way_gives_what_one_input_alone_gives(tmp_path, kind, labels, way):
    folder = make_model(tmp_path / "rm", kind=kind, labels=labels)
    inputs, groups = some_inputs()
    forward = forward_of(folder, token_budget=128)
    forward.way = way
    values = forward.score(inputs, groups)
    assert values.shape == (10, labels) and values.dtype == torch.float32
    require_close(values, alone(folder, inputs))
    assert values.std() > 0.1  # such weights tell inputs apart


def test_values_do_not_depend_on_the_batch(tmp_path):
    folder = make_model(tmp_path / "rm", kind="qwen3")
    inputs, groups = some_inputs()
    whole = forward_of(folder, token_budget=2048).score(inputs, groups)
    small = forward_of(folder, token_budget=1)
    parts = [small.score(inputs[row : row + 3], groups[row : row + 3]) for row in range(0, 10, 3)]
    require_close(torch.cat(parts), whole)
    # wrong groups cost speed, not values
    turned = forward_of(folder, token_budget=100).score(inputs[::-1], [0] * 10)
    require_close(turned.flip(0), whole)


def test_a_judge_gives_log_probabilities_of_the_next_id(tmp_path):
    inputs, groups = some_inputs()
    for kind, config in (
        ("llama", {"tie_word_embeddings": False}),
        ("gemma2", {"final_logit_softcapping": 2.0}),
    ):
        folder = make_model(tmp_path / kind, kind=kind, labels=0, **config)
        last = [alone(folder, [ids], AutoModelForCausalLM)[0, -1] for ids in inputs]
        judge = Forward(folder, ModelConfig(model="rm", kind="token"), [89, 78])
        expected = torch.stack(last).log_softmax(-1)[:, [89, 78]]
        require_close(judge.score(inputs, groups), expected)


ROPE = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}


@pytest.mark.parametrize(
    "kind, config, way",
    [
        ("llama", {}, "shared"),
        ("gemma2", {"attn_logit_softcapping": 2.0, "sliding_window": 8}, "shared"),
        # no causal attention, no logit of the last token
        ("bert", {"type_vocab_size": 1, "hidden_act": "gelu"}, "padded"),
        ("llama", {"rope_parameters": ROPE}, "single"),
    ],
)
def test_the_way_follows_from_the_architecture(tmp_path, kind, config, way):
    folder = make_model(tmp_path / "rm", kind=kind, **config)
    inputs, groups = some_inputs()
    forward = forward_of(folder)
    values = forward.score(inputs, groups)
    assert forward.way == way
    require_close(values, alone(folder, inputs))


@pytest.mark.parametrize("first", [[5], [5, 5, 6], [9, 8, 7, 6, 5]])
def test_a_first_batch_of_one_input_does_not_hide_a_wrong_way(tmp_path, first):
    """The state of MiniMax's linear attention would run on from one input of a strip to the next;
    one input, or several times the same, cannot show it."""
    folder = make_model(tmp_path / "rm", kind="minimax")
    forward = forward_of(folder)
    forward.score([first, first], [0, 0])
    inputs, groups = some_inputs()
    require_close(forward.score(inputs, groups), alone(folder, inputs))
    assert forward.way == "padded"


STRICT = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 200)


@pytest.mark.parametrize(
    "kind, config, other",
    [("llama", {}, None), ("modernbert-decoder", {"head_dim": 8, **STRICT}, 200)],
)
def test_the_last_id_counts_even_where_it_is_the_pad_id(tmp_path, kind, config, other):
    """A config that cannot take 9 for padding, and the same weights, gives what is expected;
    transformers takes an earlier token there. ModernBERT's config admits no None."""
    folder = make_model(tmp_path / "rm", kind=kind, pad_token_id=9, **config)
    inputs = [[5, 9], [5, 6, 9, 9], [5, 9, 8]]
    found = forward_of(folder).score(inputs, [0, 0, 0])
    without = make_model(tmp_path / "other", kind=kind, pad_token_id=other, **config)
    require_close(found, alone(without, inputs))
    assert (found - alone(folder, inputs))[:2].abs().min() > 0.01


@pytest.mark.parametrize("way", WAYS)
def test_an_input_without_a_value_leaves_its_neighbours_alone(tmp_path, way):
    folder = make_model(tmp_path / "rm")
    inputs, groups = some_inputs()
    expected = alone(folder, inputs)
    ill = [inputs[0][-1] in ids for ids in inputs]
    well = [not is_ill for is_ill in ill]
    forward = forward_of(folder)
    forward.way = way
    with torch.no_grad():
        forward.model.get_input_embeddings().weight[inputs[0][-1]] = float("nan")
    found = forward.score(inputs, groups)
    assert sum(well) > 2 and found[ill].isnan().all()
    require_close(found[well], expected[well])


def test_random_heads_are_refused(tmp_path):
    folder = make_model(tmp_path / "lm", labels=0)
    about = json.loads((folder / "config.json").read_text())
    about["architectures"] = ["LlamaForSequenceClassification"]
    (folder / "config.json").write_text(json.dumps(about))
    why = r"1 weights are missing and would be random: score\.weight"
    with pytest.raises(ConfigError, match=why):
        forward_of(folder)
