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


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind, labels", [("llama", 1), ("qwen3", 3)])
def test_each_way_gives_what_one_input_alone_gives(tmp_path, kind, labels, way):
    folder = make_model(tmp_path / "rm", kind=kind, labels=labels)
    inputs, groups = some_inputs()
    forward = forward_of(folder, token_budget=128)
    forward.way = way
    values = forward.score(inputs, groups)
    assert values.shape == (10, labels) and values.dtype == torch.float32
    torch.testing.assert_close(values, alone(folder, inputs), atol=ATOL, rtol=0)
    assert values.std() > 0.1  # such weights tell inputs apart


def test_values_do_not_depend_on_the_batch(tmp_path):
    folder = make_model(tmp_path / "rm", kind="qwen3")
    inputs, groups = some_inputs()
    whole = forward_of(folder, token_budget=2048).score(inputs, groups)
    small = forward_of(folder, token_budget=1)
    parts = [small.score(inputs[row : row + 3], groups[row : row + 3]) for row in range(0, 10, 3)]
    turned = forward_of(folder, token_budget=100).score(
        inputs[::-1], [0] * 10
    )  # wrong groups cost speed, not values
    torch.testing.assert_close(torch.cat(parts), whole, atol=ATOL, rtol=0)
    torch.testing.assert_close(turned.flip(0), whole, atol=ATOL, rtol=0)


def test_a_judge_gives_log_probabilities_of_the_next_id(tmp_path):
    inputs, groups = some_inputs()
    for kind, config in (
        ("llama", {"tie_word_embeddings": False}),
        ("gemma2", {"final_logit_softcapping": 2.0}),
    ):
        folder = make_model(tmp_path / kind, kind=kind, labels=0, **config)
        expected = torch.stack(
            [logits[-1] for ids in inputs for logits in alone(folder, [ids], AutoModelForCausalLM)]
        ).log_softmax(-1)[:, [89, 78]]
        found = Forward(folder, ModelConfig(model="rm", kind="token"), [89, 78]).score(
            inputs, groups
        )
        torch.testing.assert_close(found, expected, atol=ATOL, rtol=0)


@pytest.mark.parametrize(
    "kind, config, way",
    [
        ("llama", {}, "shared"),
        ("gemma2", {"attn_logit_softcapping": 2.0}, "padded"),  # the block attention has no caps
        ("gemma2", {"attn_logit_softcapping": None, "sliding_window": 8}, "shared"),
        (
            "bert",
            {"type_vocab_size": 1, "hidden_act": "gelu"},
            "padded",
        ),  # no causal attention, no logit of the last token
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "single",
        ),
    ],
)
def test_the_way_follows_from_the_architecture(tmp_path, kind, config, way):
    folder = make_model(tmp_path / "rm", kind=kind, **config)
    inputs, groups = some_inputs()
    forward = forward_of(folder)
    values = forward.score(inputs, groups)
    assert forward.way == way
    torch.testing.assert_close(values, alone(folder, inputs), atol=ATOL, rtol=0)


def test_the_last_id_counts_even_where_it_is_the_pad_id(tmp_path):
    folder = make_model(tmp_path / "rm", pad_token_id=9)
    other = make_model(
        tmp_path / "other", pad_token_id=None
    )  # the same weights, and a config that cannot take 9 for padding
    inputs = [[5, 9], [5, 6, 9, 9], [5, 9, 8]]
    found = forward_of(folder).score(inputs, [0, 0, 0])
    torch.testing.assert_close(found, alone(other, inputs), atol=ATOL, rtol=0)
    assert (found - alone(folder, inputs))[
        :2
    ].abs().min() > 0.01  # transformers takes an earlier token there


@pytest.mark.parametrize("way", WAYS)
def test_an_input_without_a_value_leaves_its_neighbours_alone(tmp_path, way):
    folder = make_model(tmp_path / "rm")
    inputs, groups = some_inputs()
    expected = alone(folder, inputs)
    ill = [row for row, ids in enumerate(inputs) if inputs[0][-1] in ids]
    forward = forward_of(folder)
    forward.way = way
    with torch.no_grad():
        forward.model.get_input_embeddings().weight[inputs[0][-1]] = float("nan")
    found = forward.score(inputs, groups)
    well = [row for row in range(len(inputs)) if row not in ill]
    assert len(well) > 2 and found[ill].isnan().all()
    torch.testing.assert_close(found[well], expected[well], atol=ATOL, rtol=0)


def test_random_heads_are_refused(tmp_path):
    folder = make_model(tmp_path / "lm", labels=0)
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**about, "architectures": ["LlamaForSequenceClassification"]})
    )
    with pytest.raises(
        ConfigError, match=r"1 weights are missing, which would be random: score\.weight"
    ):
        forward_of(folder)
