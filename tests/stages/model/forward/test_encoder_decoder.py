"""Encoder-decoder models in padded micro-batches against transformers' own forward pass, one
rollout at a time."""

from itertools import product

import pytest
import torch
from transformers import (
    AutoModelForSeq2SeqLM,
    BartConfig,
    MBartConfig,
    MT5Config,
    PegasusConfig,
    T5Config,
    UMT5Config,
)

from quiver.schemas.errors import ConfigError
from quiver.stages.model.forward.encoder_decoder import make_pairs, pack_pairs
from quiver.stages.model.forward.layout import Sequences
from quiver.stages.model.forward.logprob_head import Shaping
from quiver.stages.model.forward.packing import Piece
from quiver.stages.model.forward.policy import Policy
from quiver.stages.model.forward.verify import choose_mode
from tests.stages.model.forward.test_policy import _ragged, compare

PAD, EOS = 0, 2
IDS = {"vocab_size": 61, "pad_token_id": PAD, "eos_token_id": EOS, "d_model": 16}
T5 = {**IDS, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": PAD}
BART = {**IDS, "max_position_embeddings": 64}
for part in ("encoder", "decoder"):
    BART |= {f"{part}_layers": 2, f"{part}_attention_heads": 4, f"{part}_ffn_dim": 32}
CONFIGS = {
    "t5": lambda: T5Config(**T5),
    "t5_untied": lambda: T5Config(**T5, tie_word_embeddings=False),  # T5 1.1: no scale
    "mt5": lambda: MT5Config(**T5),
    "umt5": lambda: UMT5Config(**T5),
    "bart": lambda: BartConfig(**BART, decoder_start_token_id=EOS),
    "mbart": lambda: MBartConfig(**BART, decoder_start_token_id=EOS),
    "pegasus": lambda: PegasusConfig(**BART, decoder_start_token_id=PAD),
}


def _model(kind: str):
    torch.manual_seed(0)
    model = AutoModelForSeq2SeqLM.from_config(CONFIGS[kind](), attn_implementation="sdpa").eval()
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.2)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    if hasattr(model, "final_logits_bias"):
        model.final_logits_bias.normal_()
    return model


def _data() -> tuple[Sequences, list[int]]:
    """Four prompts with several completions; among their ids are pad, start and end, in the middle
    too."""
    torch.manual_seed(1)
    prompts, groups = [], []
    for group, (copies, length) in enumerate([(3, 5), (1, 12), (4, 1), (2, 7)]):
        prompts += [torch.randint(61, (length,))] * copies
        groups += [group] * copies
    completions = [torch.randint(61, (length,)) for length in [1, 5, 2, 7, 1, 9, 11, 3, 4, 2]]
    completions[1] = torch.tensor([PAD, 7, EOS, PAD, PAD])
    completions[6][:4] = torch.tensor([EOS, PAD, EOS, EOS])
    prompts[3] = torch.cat([prompts[3][:4], torch.tensor([PAD, EOS, PAD])])
    return Sequences(
        _ragged(prompts), _ragged(completions), torch.linspace(0.6, 1.4, len(groups))
    ), groups


# a budget of one token packs each rollout by itself, as `single` does
@pytest.mark.parametrize("kind, mode", [*product(CONFIGS, ["shared", "packed"]), ("t5", "single")])
def test_logprobs_and_gradients_are_those_of_one_rollout_at_a_time(kind, mode):
    compare(Policy(_model(kind), autocast=False), mode, *_data())


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_self_check_takes_every_family(kind):
    assert choose_mode(Policy(_model(kind), autocast=False), *_data(), "shared") == "shared"


@pytest.mark.parametrize("kind", ["t5", "t5_untied"])
def test_a_scale_that_is_wrong_is_noticed(kind):
    data, groups = _data()
    policy = Policy(_model(kind), autocast=False)
    policy.shaping = Shaping(1.0 if kind == "t5" else 0.25)
    with pytest.raises(ConfigError, match="last hidden state"):
        choose_mode(policy, data, groups, "shared")


@pytest.mark.parametrize("shared", [True, False])
def test_the_budget_counts_padding(shared):
    data, groups = _data()
    keys = groups if shared else range(len(groups))
    for budget in (1, 20, 45, 1000):
        bins = pack_pairs(range(len(groups)), keys, data, budget)
        assert sorted(row for micro in bins for piece in micro for row in piece.rows) == list(
            range(len(groups))
        )
        for micro in bins:
            pairs = make_pairs(micro, data, PAD)
            assert pairs.prompts.numel() + pairs.inputs.numel() <= budget or len(pairs.rows) == 1
            assert len({keys[piece.rows[0]] for piece in micro}) == len(micro)
    assert len(bins) == 1 and len(bins[0]) == (4 if shared else 10)


def test_a_model_without_a_start_id_is_refused():
    model = _model("t5")
    model.config.decoder_start_token_id = model.generation_config.decoder_start_token_id = None
    with pytest.raises(ConfigError, match="no decoder_start_token_id"):
        Policy(model, autocast=False)


def test_padding_is_counted():
    data = Sequences(
        _ragged([torch.ones(3), torch.ones(5)]),
        _ragged([torch.ones(4), torch.ones(1)]),
        torch.ones(2),
    )
    (micro,) = pack_pairs([0, 1], [0, 1], data, 100)
    assert make_pairs(micro, data, PAD).filling == (2 + 3, 2 * 5 + 2 * 4)


def test_layouts_come_in_the_order_of_their_micro_batches_and_an_error_in_one_reaches_its_reader():
    data, groups = _data()
    policy = Policy(_model("t5"), autocast=False)
    policy.set_mode("shared")
    micros = policy.microbatches(range(len(groups)), groups, data, 30)
    assert len(micros) > 2
    found = [layout.rows.tolist() for layout in policy.layouts(micros, data)]
    assert found == [[row for piece in micro for row in piece.rows] for micro in micros]
    assert list(policy.layouts([], data)) == []
    reading = policy.layouts([micros[0], [Piece((999,), 1)], micros[1]], data)
    assert next(reading).rows.tolist() == found[0]
    with pytest.raises(IndexError):
        next(reading)
