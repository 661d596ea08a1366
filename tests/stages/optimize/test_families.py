"""Families of models: each trains as the table of architectures says, or is refused where it is
imported."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from quiver.schemas.errors import ConfigError
from quiver.stages.common.forward.architecture import judge, make_tiny
from quiver.stages.common.forward.policy import Policy
from quiver.stages.common.forward.verify import choose_mode
from quiver.stages.common.models import checkpoints, small
from quiver.stages.common.models.families import TRAINED, require_trainable
from quiver.stages.common.models.shrink import shrink
from tests import architectures
from tests.stages.common.forward import test_policy as forward
from tests.tiny import tokenizer


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# gpt_oss has sinks, gptj and mamba have no sdpa: each ended in an error at optimize
@pytest.mark.parametrize("family", ["mistral", "gpt_oss", "gptj", "mamba", "bert"])
def test_a_family_trains_as_the_table_says(family):
    row = architectures.try_family(family)
    assert row == architectures.documented()[family]
    assert (CONFIG_MAPPING[family].model_type in TRAINED) == (row.how != "refused")


def test_the_table_tells_of_every_family_that_transformers_has():
    assert set(architectures.documented()) == set(architectures.FAMILIES)


@pytest.mark.slow
def test_every_family_trains_as_the_table_says():
    rows = [architectures.try_family(family) for family in architectures.FAMILIES]
    assert architectures.document(rows) == architectures.DOCUMENT.read_text()


def test_a_model_that_reads_later_tokens_is_refused_before_anything_is_sampled(tmp_path):
    """Where the recipe is resolved, as `quiver check` does. Named as a decoder it reads none, but
    its logits are no product with its last hidden states."""
    config = CONFIG_MAPPING["roberta"]()
    folder = tmp_path / "model"
    make_tiny(AutoModelForCausalLM.from_config, config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    with pytest.raises(ConfigError, match="depends on later tokens") as caught:
        checkpoints.resolve(checkpoints.PolicyConfig(model=str(folder)))
    assert "is_decoder = true" in caught.value.next
    config.is_decoder = True
    assert "output embedding" in judge(config).reason


def test_an_architecture_that_transformers_does_not_have_is_refused_by_name(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "whisper"}')
    with pytest.raises(ConfigError, match="no text model of type whisper"):
        require_trainable(tmp_path, "w")
    (tmp_path / "config.json").write_text('{"model_type": "of_tomorrow"}')
    with pytest.raises(ConfigError, match="of_tomorrow"):
        require_trainable(tmp_path, "t")


@pytest.mark.parametrize("family", ["llama4_text", "minimax_m3_vl_text"])
def test_attention_that_only_long_rows_tell_from_full_attention_is_not_packed(family):
    """Chunks, and blocks that an indexer picks: in rows of a dozen tokens, which are what is
    compared before the first step, both see every key."""
    config = shrink(CONFIG_MAPPING[family](**architectures.CONFIGS.get(family, {})))
    config.attention_chunk_size = config.index_topk_blocks = 512
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    data, groups = forward._data()
    assert choose_mode(Policy(model, autocast=False), data, groups, "shared") == "single"


def test_what_attention_is_given_and_does_not_know_is_refused():
    """An option of tomorrow is not left out in silence."""
    model, (data, groups) = forward._model("llama"), forward._data()
    policy = Policy(model, autocast=False)
    policy.set_mode("packed")
    micro = policy.microbatches(range(len(groups)), groups, data, 1000)[0]
    layer = model.model.layers[0].self_attn
    plain = layer.forward
    layer.forward = lambda *args, **more: plain(*args, **more, chosen_keys=torch.zeros(1))
    with pytest.raises(NotImplementedError, match="chosen_keys"):
        policy(policy.layout(micro, data))


def test_a_tiny_config_has_every_kind_of_layer_and_loads_again(tmp_path):
    config = CONFIG_MAPPING["jamba"]()  # attention in one of eight layers
    tiny = shrink(config)
    assert set(tiny.layers_block_type) == set(config.layers_block_type)
    assert tiny.num_hidden_layers == len(tiny.layers_block_type) < config.num_hidden_layers
    tiny.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).layers_block_type == tiny.layers_block_type
    gemma = shrink(CONFIG_MAPPING["gemma3_text"]())
    assert (gemma.sliding_window, gemma.vocab_size) == (6, 96)
    assert {"sliding_attention", "full_attention"} == set(gemma.layer_types)


def test_a_tiny_config_says_nothing_of_layers_that_it_lacks(tmp_path):
    """Of Gemma 4's 30 layers every sixth is wider, in a list of its own."""
    tiny = shrink(CONFIG_MAPPING["gemma4_text"]())
    tiny.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert again.num_hidden_layers == 6
    assert [layer.head_dim for layer in again.per_layer_config] == [*[32] * 5, 512]
    smaller = CONFIG_MAPPING["gemma4_text"]()
    small.shrink(smaller)
    smaller.save_pretrained(tmp_path)
    assert len(AutoConfig.from_pretrained(tmp_path).per_layer_config) == small.LAYERS


@pytest.mark.parametrize(("heads", "key_heads"), [(1, 1), (2, 2), (2, 1), (3, 3), (4, 2), (8, 8)])
def test_a_model_of_few_heads_gets_no_more(heads, key_heads):
    sizes = {"num_attention_heads": heads, "num_key_value_heads": key_heads}
    tiny = shrink(CONFIG_MAPPING["llama"](hidden_size=32 * heads, head_dim=32, **sizes))
    assert tiny.num_attention_heads % tiny.num_key_value_heads == 0
    assert tiny.num_attention_heads == min(heads, 4)
    model = AutoModelForCausalLM.from_config(tiny)
    assert model(input_ids=torch.tensor([[1, 2, 3]])).logits.shape[:2] == (1, 3)
