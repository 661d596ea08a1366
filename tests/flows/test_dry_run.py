"""`quiver run` in this process: `--dry-run` tries the recipe from end to end, and nothing is left
of it; and what a run says at its end if something is amiss."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from prefect.settings import PREFECT_API_URL, temporary_settings
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    PretrainedConfig,
    Qwen3Config,
    T5Config,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from quiver.flows.cli.running import run
from quiver.flows.dry_run import rehearsal
from quiver.flows.recipe import Recipe
from quiver.schemas.errors import ConfigError, NumericError, RewardError
from quiver.stages.model import small
from quiver.stages.model.forward.media import medium_features
from quiver.stages.model.loading import load_model
from quiver.stages.model.media.processor import load_processor
from tests import sight
from tests.flows.conftest import QUICK, free_port, stay_here, write_recipe
from tests.tiny import make_folder, tokenizer
from tests.writing import run_here

SETTINGS = [*QUICK, "data.held_out=null"]


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A folder with the recipe; the working one."""
    stay_here(write_recipe(tmp_path), monkeypatch)
    return tmp_path


def try_out(settings: list[str], iterations: int = 1) -> None:
    """`quiver run --dry-run`."""
    run(Path("recipe.toml"), iterations=iterations, dry_run=True, settings=settings)


def rehearsed(settings: list[str], name: str = "demo") -> Recipe:
    return rehearsal(Recipe.load(f"deployments/recipes/{name}.toml", settings), "elsewhere")


def test_a_recipe_is_tried_from_end_to_end_and_nothing_is_kept(here, capfd, caplog):
    """Not even on Prefect's pages: no server is asked. The store that is named is the one that is
    used."""
    before = sorted(path.name for path in Path().iterdir())
    with temporary_settings({PREFECT_API_URL: f"http://127.0.0.1:{free_port()}/api"}):
        with caplog.at_level("INFO", "quiver"):
            try_out(SETTINGS, iterations=9)
        said = capfd.readouterr()
        told = "tiny: rehearsed for 2 iterations in a temporary store, /"
        assert caplog.messages[0].startswith(told)
        assert str(here / "store") not in caplog.text
        assert "recipe.toml runs from end to end" in said.out
        assert "not on Prefect's pages" not in said.err
        Path("rewards.py").write_text("def evenness(completions):\n    return completions[0].x\n")
        with pytest.raises(RewardError, match="'str' object has no attribute 'x'") as failed:
            try_out(SETTINGS)
        assert failed.value.state == "the temporary store is deleted; nothing was kept."
    after = sorted(path.name for path in Path().iterdir() if path.name != "__pycache__")
    assert after == before


def test_the_rehearsal_of_the_demo_is_small_and_keeps_what_decides():
    tracked = ["optimize.trackers=['wandb']", "optimize.tracker_folder='curves'"]
    settings = ["optimize.on_length=mask", "optimize.mask_counted=true", "retention.keep=1"]
    settings += tracked
    tried = rehearsed(settings)
    assert (tried.store, tried.iterations, tried.data.limit) == ("elsewhere", 2, 4)
    assert tried.data.held_out == {"arguments": {"split": "held_out"}, "limit": 4}
    assert (tried.generate.engine, tried.generate.sampling.max_tokens) == ("transformers", 12)
    assert (
        tried.policy.arguments["model"] == Recipe.load("deployments/recipes/demo.toml").policy.model
    )
    assert tried.reward.part_names == ["accuracy", "format", "random_reward_of_dry_run"]
    assert (tried.optimize.algorithm, tried.optimize.minibatches) == ("grpo", 4)
    assert (tried.optimize.on_length, tried.optimize.trackers) == ("keep", [])
    assert tried.retention.keep is None, "what was made is looked at afterwards"


def test_a_scorer_of_the_recipe_may_be_named_as_the_random_reward_is():
    name = "random_reward_of_dry_run"
    functions = f"[{{use='numeric', name='{name}'}}, {{use='repetition', name='{name}_2'}}]"
    settings = [f"reward.functions={functions}", f"evaluate.score={name}"]
    assert rehearsed(settings).reward.part_names == [name, f"{name}_2", f"{name}_3"]


@pytest.mark.parametrize(("groups", "expected"), [(64, 4), (128, 8), (256, 16), (40, 2), (1, 1)])
def test_a_refill_is_cut_as_its_rows_are(groups, expected):
    """It takes as many rounds at least, and never more than it may."""
    settings = ["data.limit=64", f"data.refill={{groups={groups}, max_rounds=4}}"]
    tried = rehearsed(settings)
    assert (tried.data.limit, tried.data.refill.groups) == (4, expected)
    assert tried.data.refill.max_rounds == 4


def test_the_small_model_needs_no_reference_or_classifier_of_the_recipes():
    """They are of the size of the recipe's own model, and in its store."""
    changes = ["reference.policy=teacher/policy@0", "optimize.kl_coef=0.1"]
    changes += ["optimize.critic=model", "optimize.critic_from=judge"]
    tried = rehearsed(changes, "t5_ppo")
    assert (tried.reference.policy, tried.optimize.critic_from) == (None, None)
    assert (tried.optimize.kl_coef, tried.optimize.critic) == (0.1, "model")


def made_small(folder: Path, config: PretrainedConfig) -> Path:
    """The small model of one with this config and no weights."""
    model, made = make_folder(folder / "model"), folder / "made"
    (model / "model.safetensors").unlink()
    config.save_pretrained(model)
    made.mkdir()
    small.make(made, model=str(model))
    return made


@pytest.mark.parametrize(
    "config",
    [
        Qwen3Config(num_hidden_layers=5, max_window_layers=5, vocab_size=320, hidden_size=96),
        GPT2Config(n_layer=5, n_embd=96, n_head=6, vocab_size=320),
        T5Config(num_layers=5, d_model=96, vocab_size=320, decoder_start_token_id=0),
    ],
    ids=lambda config: config.model_type,
)
def test_a_small_model_has_family_vocabulary_and_tokenizer(tmp_path, config):
    made = made_small(tmp_path, config)
    found = AutoConfig.from_pretrained(made)
    assert (found.model_type, found.vocab_size) == (config.model_type, 320)
    assert (found.num_hidden_layers, found.hidden_size) == (2, 64)
    assert AutoTokenizer.from_pretrained(made).encode("7 plus 5") == tokenizer().encode("7 plus 5")
    assert (made / "model.safetensors").stat().st_size < 2_000_000


@pytest.mark.parametrize(
    "family",
    ["deepseek_v3", "gemma3n_text", "gptj", "jamba", "kimi_linear", "longcat_flash", "mamba2"],
)
def test_a_small_model_of_latent_attention_or_of_several_kinds_of_layers_can_read(tmp_path, family):
    sizes = {"vocab_size": 320, "vocab_size_per_layer_input": 320, "pad_token_id": 0}
    made = made_small(tmp_path, CONFIG_MAPPING[family](**sizes))
    again = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32)
    assert again.num_parameters() < 3_000_000
    assert again(torch.arange(5)[None]).logits.isfinite().all()


@pytest.mark.parametrize("kind", ["idefics3", "llava", *sight.THREE_AXES])
def test_a_small_model_that_sees_reads_pictures_as_the_large_one(store, tmp_path, kind):
    model = sight.make_folder(tmp_path / "model", kind)
    policy = {"model": "quiver.stages.model.small:make", "arguments": {"model": str(model)}}
    refs = [
        run_here("policy", config, store, into=into)
        for config, into in [({"model": str(model)}, "large"), (policy, "small")]
    ]
    large, made = (load_processor(store.open(ref)).read("image", sight.png(0)) for ref in refs)
    assert np.array_equal(large.ids, made.ids)
    assert np.array_equal(large.inputs["pixel_values"], made.inputs["pixel_values"])
    sees = load_model(store.open(refs[1]), dtype=torch.float32)
    pixels = {name: torch.from_numpy(array) for name, array in made.inputs.items()}
    features = medium_features(sees, pixels)[0]
    assert features.shape[-1] == sees.get_input_embeddings().weight.shape[1]


def test_a_family_that_can_not_be_made_small_is_named(tmp_path):
    make_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nothing_of_ours"}))
    with pytest.raises(ConfigError, match="no small model of its family can be made"):
        small.make(tmp_path, model=str(tmp_path))


def test_an_environment_is_asked_for_answers(here):
    """Random models end their turns too seldom to be answered; here they do."""
    Path("game.py").write_text(
        "class Game:\n"
        "    def reset(self, answer):\n"
        "        return 'go'\n\n"
        "    def step(self, turn):\n"
        "        raise RuntimeError('the dice are lost')\n"
    )
    settings = ["data.held_out=null", "generate.turns={environment='game.py:Game'}"]
    settings += ["reward.functions=[{use='environment'}]"]
    with pytest.raises(NumericError, match=r"by environment_error.*the dice are lost") as failed:
        try_out(settings)
    # `quiver show tiny/rewards@1` would show another run's, or nothing
    assert failed.value.next == "correct what the message says, then repeat the dry run"
    # only some of them
    Path("game.py").write_text(
        Path("game.py")
        .read_text()
        .replace("  raise", "  if len(turn.text) % 2:\n            raise")
        + "        return {'reward': 1.0, 'done': True}\n"
    )
    with pytest.raises(ConfigError, match=r"of 16 episodes failed: .*the dice are lost"):
        try_out(settings)


def test_an_engine_that_can_not_sample_from_the_model_is_refused(here):
    """The rehearsal takes another one."""
    make_folder(Path("encodes"), "t5")
    settings = [*SETTINGS, "policy.model=encodes", "generate.engine=vllm"]
    with pytest.raises(ConfigError, match="is an encoder-decoder model"):
        try_out(settings)


@pytest.mark.prefect
def test_a_run_that_learned_nothing_says_so_in_a_word(api, here, capfd):
    """Every answer has the same reward."""
    Path("always.py").write_text("def score(completions):\n    return [0.0 for _ in completions]\n")
    settings = [*SETTINGS, "reward.functions=[{use='always.py:score'}]"]
    run(Path("recipe.toml"), iterations=1, settings=settings)
    told = capfd.readouterr().err
    assert "warning: tiny learned nothing: in no group did one answer score better" in told
