"""Training on prompts with clips: logprobs and gradients of the model's own pass, what is trained,
and what a swapped clip gives."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForMultimodalLM

from quiver.schemas.errors import ConfigError, NumericError
from quiver.stages.core.store import Store
from quiver.stages.model.forward.media import medium_features
from quiver.stages.model.forward.policy import Policy
from tests import shown, sight, sound, tiny
from tests.stages.model.forward.test_policy import packed
from tests.writing import run_here

ROWS = [
    {"prompt": "What is seven", "audio": ["0.flac"]},
    {"prompt": "zero one two three", "audio": ["1.wav", "0.flac"]},
    {"prompt": "five", "audio": []},
    {"prompt": "six", "audio": ["1.wav"]},
]
REFS = sound.REFS


@pytest.fixture(scope="module", params=sound.FAMILIES)
def store(request, tmp_path_factory) -> Store:
    store = sound.make_prompts(tmp_path_factory.mktemp(request.param), ROWS, request.param)
    shown.sample(store, REFS)
    return store


@pytest.fixture
def model(store):
    folder = store.open(REFS["policy"]).files.folder
    return AutoModelForMultimodalLM.from_pretrained(folder, attn_implementation="sdpa").eval()


def read(store: Store, change=lambda ids: ids) -> shown.Read:
    return shown.read(store, "hears", "audio", change)


def test_logprobs_and_gradients_are_transformers_own(store, model):
    given = read(store, lambda ids: [id if id != sound.AUDIO else 5 for id in ids])
    folder = store.open(REFS["policy"]).files.folder

    def inputs_of(row):
        return sound.own_inputs(folder, row, row["audio"])

    names = shown.require_own_pass(model, given, inputs_of)
    assert any("audio_tower" in name for name in names)


def test_an_id_of_a_clip_that_was_sampled_is_an_ordinary_one(store, model):
    """The features are put in by hand, by the places that the processor wrote."""
    given = read(store, lambda ids: [sound.AUDIO, *ids[:3], sound.AUDIO, 7])
    _, sequences, numbers = given
    expected = []
    for row in range(len(numbers)):
        prompt = sequences.prompts[row]
        ids = torch.cat([prompt, sequences.completions[row]])[None]
        embeddings = model.get_input_embeddings()(ids).detach()
        chosen = sequences.media.in_prompts.numbers[row].tolist()
        if chosen:
            features = [medium_features(model, sequences.media.read([each]))[0] for each in chosen]
            embeddings[0, (prompt == sound.AUDIO).nonzero()[:, 0]] = torch.cat(features).detach()
        states = model.base_model(inputs_embeds=embeddings).last_hidden_state
        logits = model.get_output_embeddings()(states[0, len(prompt) - 1 : -1])
        expected.append(shown.logprobs_of(logits, sequences.completions[row]))
    shown.require_logprobs(model, given, expected)


def test_a_group_listens_to_its_clips_once(store, model):
    _, sequences, numbers = read(store)
    heard = []
    tower = model.base_model.audio_tower
    tower.register_forward_pre_hook(lambda *_: heard.append(1))
    packed(Policy(model, autocast=False), "shared", sequences, numbers, 10_000)
    assert len(heard) == 4  # of four places in three prompts, answered three times each


def test_what_hears_is_trained_only_where_it_is_asked_for(store):
    for options in ({}, {"lora": {"rank": 2}}):
        changed = shown.changed_weights(AutoModelForMultimodalLM, store, "hears", **options)
        assert changed and not any("audio_tower" in n or "projector" in n for n in changed)
    changed = shown.changed_weights(AutoModelForMultimodalLM, store, "hears", train_vision=True)
    assert any("audio_tower" in name for name in changed)


def test_what_hears_gets_no_adapter_though_its_layers_have_the_names_that_were_chosen(store, model):
    shown.require_no_adapters(model, store.open(REFS["policy"]))


def test_a_trained_policy_keeps_the_names_of_its_weights(store):
    """Engines know those of the hub; transformers has others for a model made from a config."""
    refs = {kind: f"hears/{kind}@1" for kind in ("rollouts", "rewards")}
    refs["policy"] = REFS["policy"]
    trained = run_here("optimize", shown.OPTIMIZE, store, into="trained", **refs)
    before, after = (
        load_file(store.open(ref).files.path("model.safetensors")).keys()
        for ref in (REFS["policy"], str(trained))
    )
    assert before == after


def test_logprobs_are_scored_with_the_clips(store):
    shown.require_scored_as_sampled(store, "hears", atol=1e-5)


def test_an_engine_in_bfloat16_hears_too(store):
    config = {**sight.GENERATE, "dtype": "bfloat16", "samples_per_prompt": 1}
    rollouts = run_here("generate", config, store, into="narrow", **REFS)
    assert len(store.open(rollouts).table()) == len(ROWS)


def test_swapped_clips_fail_the_audit(store):
    others = (sound.stored(sound.tone(400, length)) for length in (0.4, 0.7))
    swapped = dict(zip(sound.CLIPS, others, strict=True))
    refs = shown.with_other_files(store, "hears", "audio", swapped)
    with pytest.raises(NumericError, match="differ"):
        run_here("optimize", shown.OPTIMIZE, store, **refs)


def test_a_policy_that_hears_nothing_is_refused(tmp_path):
    store = sound.make_prompts(tmp_path, ROWS)
    tiny.make_policy(store)
    refs = {"prompts": REFS["prompts"], "policy": "tiny/policy@0"}
    with pytest.raises(ConfigError, match="tiny/policy@0 hears no clips") as refusal:
        run_here("generate", sight.GENERATE, store, **refs)
    assert "qwen2_audio" in refusal.value.next
