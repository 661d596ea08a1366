"""Model types: the table says how each may be packed, and a refused one is not imported."""

import json
import shutil
import tomllib

import pytest
import torch
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from quiver.schemas.errors import ConfigError
from quiver.stages.core.run.runner import run_stage
from quiver.stages.model import checkpoints, memory, small
from quiver.stages.model.families import FAMILIES, fastest_mode, require_trainable
from quiver.stages.model.forward.policy import Policy
from quiver.stages.model.loading import load_model
from quiver.stages.model.shrink import shrink as shrink_part
from quiver.stages.optimize import nf4
from tests import architectures, tiny
from tests.shrink import shrink
from tests.stages.model.forward import test_policy as forward


# sinks, caps, a prompt that cannot be shared, states with and without a convolution, later tokens,
# chunks, a window, an encoder
@pytest.mark.parametrize(
    "family",
    [
        "gpt_oss",
        "gemma2",
        "gptj",
        "qwen3_5_text",
        "rwkv",
        "bert",
        "llama4_text",
        "mistral",
        "mt5",
        "mistral4",
    ],
)
def test_a_trial_gives_the_row_of_the_table(family):
    assert architectures.try_family(family) == {family: FAMILIES[family]}


def test_a_model_that_transformers_lists_among_those_that_see_is_loaded(store, tmp_path):
    """For training, for the counts of `quiver fit`, and by what writes other weights of it."""
    exact, rounded, shrunk = (tmp_path / name for name in ("exact", "rounded", "shrunk"))
    made = architectures.make_tiny(architectures.config_of("mistral4"))
    made.save_pretrained(exact)
    tiny.tokenizer().save_pretrained(exact)
    unsampled = json.dumps({"temperature": 0.6, "eos_token_id": tiny.EOS})
    (exact / "generation_config.json").write_text(unsampled)  # transformers would not write it
    assert memory.shape_of(made.config).weights == sum(each.numel() for each in made.parameters())
    rounded.mkdir()
    nf4.rounded(rounded, str(exact))
    ids = torch.tensor([[5, 6, 7]])
    gaps = []
    for folder in (exact, rounded):
        ref = run_stage("policy", {"model": str(folder)}, store, into=folder.name, in_process=True)
        model = load_model(store.open(ref), dtype=torch.float32)
        with torch.no_grad():
            gap = model(input_ids=ids).logits - made(input_ids=ids).logits
        gaps.append(float(gap.norm()))
    assert gaps[0] == 0 < gaps[1]
    shrunk.mkdir()
    small.make(shrunk, model=str(exact))
    assert json.loads((shrunk / "config.json").read_text())["model_type"] == "mistral4"
    for folder in (rounded, shrunk):
        assert (folder / "generation_config.json").read_text() == unsampled


@pytest.mark.slow
def test_every_trial_gives_the_row_of_the_table():
    tried = {}
    for family in architectures.FAMILIES:
        tried |= architectures.try_family(family)
    names = sorted(tried.keys() | FAMILIES.keys())
    compared = {name: (tried.get(name), FAMILIES.get(name)) for name in names}
    assert {name: rows for name, rows in compared.items() if rows[0] != rows[1]} == {}
    assert architectures.table(tried) == architectures.families.TABLE.read_text()


def test_the_table_breaks_no_name():
    """However long the names before it are."""
    for length in range(1, 80):
        rows = {"a" * length: ("single", "why"), "bc with windows": ("single", "why")}
        [group] = tomllib.loads(architectures.table(rows))["group"]
        assert group["types"] == [*rows]


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("family", "changed", "mode", "reason"),
    [
        ("llama", {}, "shared", ""),
        ("gptj", {}, "packed", "share"),
        ("llama", {"rope_parameters": DYNAMIC}, "single", "length of the row"),
        ("internvl", {}, "shared", ""),
        ("gemma3n", {}, "shared", ""),  # the type of its text part was tried
        ("internvl", {"text_config": {"model_type": "rwkv"}}, "single", "its state"),
        ("qwen2_moe", {}, "shared", ""),
        ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 8}, "single", "behind"),
        ("bert", {"is_decoder": True}, "single", "later tokens"),
        ("blt", {}, "single", "type blt have not been tested"),
    ],
)
def test_the_mode_comes_from_the_type_of_each_part_and_from_rules(family, changed, mode, reason):
    fastest, why = fastest_mode(CONFIG_MAPPING[family](**changed))
    assert fastest == mode and reason in why and bool(reason) == bool(why)


@pytest.mark.parametrize(
    ("about", "problem"),
    [
        ({"model_type": "roberta"}, "depends on later tokens"),
        ({"model_type": "whisper"}, "no text model of this type"),
        ({"model_type": "of_tomorrow"}, "no text model of type of_tomorrow"),
        ({"model_type": "roberta", "is_decoder": True}, None),
        ({"model_type": "blt"}, None),
        ({"model_type": "llama"}, None),
        ({}, None),
    ],
)
def test_a_type_that_cannot_be_trained_is_refused(tmp_path, about, problem):
    (tmp_path / "config.json").write_text(json.dumps(about))
    if problem is None:
        return require_trainable(tmp_path, "m")
    with pytest.raises(ConfigError, match=f"cannot be trained: .*{problem}") as caught:
        require_trainable(tmp_path, "m")
    assert "is_decoder = true" in caught.value.next


def test_a_model_is_refused_before_anything_is_sampled(policy, tmp_path):
    """When the recipe is resolved, as `quiver check` does."""
    folder = shutil.copytree(policy.files.folder, tmp_path / "model")
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**about, "model_type": "bert"}))
    with pytest.raises(ConfigError, match="depends on later tokens"):
        checkpoints.resolve(checkpoints.PolicyConfig(model=str(folder)))


def test_an_option_that_attention_does_not_know_is_refused():
    model, (sequences, numbers) = forward._model("llama"), forward._data()
    policy = Policy(model, autocast=False)
    policy.set_mode("packed")
    pieces = policy.microbatches(range(len(numbers)), numbers, sequences, 1000)[0]
    layer = model.model.layers[0].self_attn
    plain = layer.forward
    layer.forward = lambda *args, **more: plain(*args, **more, chosen_keys=torch.zeros(1))
    with pytest.raises(NotImplementedError, match="chosen_keys"):
        policy(policy.layout(pieces, sequences))


def test_a_tiny_config_has_every_kind_of_layer_and_loads_again(tmp_path):
    config = CONFIG_MAPPING["jamba"]()  # attention in one of eight layers
    tiny = shrink(config)
    assert set(tiny.layers_block_type) == set(config.layers_block_type)
    assert tiny.num_hidden_layers == len(tiny.layers_block_type) < config.num_hidden_layers
    tiny.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).layers_block_type == tiny.layers_block_type


def test_a_small_config_has_no_settings_of_layers_that_it_lacks(tmp_path):
    """Every sixth of Gemma 4's 30 layers is wider, in a list of its own."""
    config = CONFIG_MAPPING["gemma4_text"]()
    shrink_part(config)
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert len(again.per_layer_config) == again.num_hidden_layers < 30
