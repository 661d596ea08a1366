"""Training on prompts with clips: logprobs and gradients of the model's own pass, what is trained,
and what a swapped clip gives."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import AutoModelForMultimodalLM

from quiver.schemas.errors import ConfigError, NumericError
from quiver.stages.core.store import Store
from quiver.stages.model.forward.layout import Sequences, prompt_numbers
from quiver.stages.model.forward.media import medium_features
from quiver.stages.model.forward.policy import Policy
from quiver.stages.model.media.dataset import load_media
from quiver.stages.model.ragged import Ragged
from tests import sight, sound, tiny
from tests.stages.model.forward.test_policy import packed
from tests.stages.optimize.test_images_trained import OPTIMIZE, REWARD
from tests.writing import begin, run_here

ROWS = [
    {"prompt": "What is seven", "audio": ["0.flac"]},
    {"prompt": "zero one two three", "audio": ["1.wav", "0.flac"]},
    {"prompt": "five", "audio": []},
    {"prompt": "six", "audio": ["1.wav"]},
]
REFS = sound.REFS
ROLLOUTS = "hears/rollouts@1"


def make_store(folder: Path, kind: str) -> Store:
    """A policy that hears, and its rollouts on four prompts."""
    store = sound.make_prompts(folder, ROWS, kind)
    run_here("generate", sight.GENERATE, store, **REFS)
    (folder / "rewards.py").write_text(REWARD)
    score(store, ROLLOUTS)
    return store


def score(store: Store, rollouts: str) -> str:
    config = {"functions": [{"use": f"{Path(store.url).parent}/rewards.py:score"}]}
    return str(run_here("reward", config, store, rollouts=rollouts))


@pytest.fixture(scope="module", params=sound.FAMILIES)
def store(request, tmp_path_factory) -> Store:
    return make_store(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture
def model(store):
    folder = store.open(REFS["policy"]).files.folder
    return AutoModelForMultimodalLM.from_pretrained(folder, attn_implementation="sdpa").eval()


def read(store: Store, change=lambda ids: ids) -> tuple[list[dict], Sequences, list[int]]:
    """The rollouts, each with its clips; what the model reads of them; their prompts' numbers.
    `change`: of each row's sampled ids."""
    rollouts = store.open(ROLLOUTS)
    media = load_media(store, rollouts, rollouts.table(), store.open(REFS["policy"]))
    rows = rollouts.table().to_pylist()
    prompts = {row["group_id"]: row for row in store.open(REFS["prompts"]).table().to_pylist()}
    for row in rows:
        row["audio"] = [clip["bytes"] for clip in prompts[row["group_id"]]["audio"]]
        row["completion_ids"] = change(row["completion_ids"])
    prompt_ids, completions = (
        Ragged.from_lengths(
            torch.tensor([id for row in rows for id in row[column]]),
            torch.tensor([len(row[column]) for row in rows]),
        )
        for column in ("prompt_ids", "completion_ids")
    )
    temperature = torch.full((len(rows),), 0.9)
    sequences = Sequences(prompt_ids, completions, temperature, media=media)
    return rows, sequences, prompt_numbers(prompt_ids, [row["group_id"] for row in rows])


def own_logprobs(model, folder, row) -> torch.Tensor:
    """By the whole model, which merges clips itself."""
    inputs = sound.own_inputs(folder, row, row["audio"])
    logits = model(**inputs).logits[0, len(row["prompt_ids"]) - 1 : -1]
    table = (logits / 0.9).log_softmax(-1)
    return table.gather(1, torch.tensor(row["completion_ids"])[:, None])[:, 0]


@pytest.mark.parametrize("mode", ["shared", "packed", "single"])
def test_logprobs_and_gradients_are_transformers_own(store, model, mode):
    rows, sequences, numbers = read(
        store, lambda ids: [id if id != sound.AUDIO else 5 for id in ids]
    )
    folder = store.open(REFS["policy"]).files.folder
    expected = torch.cat([own_logprobs(model, folder, row) for row in rows])
    weights = torch.randn(len(expected), generator=torch.Generator().manual_seed(1))
    (weights * expected).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert any("audio_tower" in name for name in gradients)
    model.zero_grad()
    logprobs = packed(Policy(model, autocast=False), mode, sequences, numbers, 10_000)
    torch.testing.assert_close(logprobs, expected, rtol=5e-6, atol=1e-5)
    (weights * logprobs).sum().backward()
    total = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    for name, parameter in model.named_parameters():
        if name in gradients:
            gap = (parameter.grad - gradients[name]).norm()
            assert gap <= 1e-5 * gradients[name].norm() + 1e-6 * total, name


def test_an_id_of_a_clip_that_was_sampled_is_an_ordinary_one(store, model):
    """The features are put in by hand, by the places that the processor wrote."""
    _, sequences, numbers = read(store, lambda ids: [sound.AUDIO, *ids[:3], sound.AUDIO, 7])
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
        table = (logits / 0.9).log_softmax(-1)
        expected.append(table.gather(1, sequences.completions[row][:, None])[:, 0])
    for mode in ("shared", "packed", "single"):
        logprobs = packed(Policy(model, autocast=False), mode, sequences, numbers, 10_000)
        torch.testing.assert_close(logprobs, torch.cat(expected), rtol=5e-6, atol=1e-5)


def test_a_group_listens_to_its_clips_once(store, model):
    _, sequences, numbers = read(store)
    heard = []
    tower = model.base_model.audio_tower
    tower.register_forward_pre_hook(lambda *_: heard.append(1))
    packed(Policy(model, autocast=False), "shared", sequences, numbers, 10_000)
    assert len(heard) == 4  # of four places in three prompts, answered three times each


def trained(store: Store, **options) -> set[str]:
    """Which weights a training changes."""
    refs = {"rollouts": ROLLOUTS, "rewards": "hears/rewards@1", "policy": REFS["policy"]}
    ref = run_here("optimize", {**OPTIMIZE, **options}, store, into="trained", **refs)
    assert store.open(ref).manifest.metrics["audit"]["max_gap"] < 3e-5
    before, after = (
        AutoModelForMultimodalLM.from_pretrained(store.open(each).files.folder).state_dict()
        for each in (REFS["policy"], str(ref))
    )
    return {name for name in before if not torch.equal(before[name], after[name])}


def test_what_hears_is_trained_only_where_it_is_asked_for(store):
    for options in ({}, {"lora": {"rank": 2}}):
        changed = trained(store, **options)
        assert changed and not any("audio_tower" in n or "projector" in n for n in changed)
    assert any("audio_tower" in name for name in trained(store, train_vision=True))


def test_logprobs_are_scored_with_the_clips(store):
    config = {"role": "ref", "precision": "fp32", "device": "cpu"}
    refs = {"rollouts": ROLLOUTS, "policy": REFS["policy"]}
    scored = store.open(run_here("logprobs", config, store, **refs)).table()
    sampled = store.open(ROLLOUTS).table()
    for now, then in zip(scored["logprobs"], sampled["old_logprobs"], strict=True):
        np.testing.assert_allclose(now.as_py(), then.as_py(), atol=1e-5)


def test_an_engine_in_bfloat16_hears_too(store):
    config = {**sight.GENERATE, "dtype": "bfloat16", "samples_per_prompt": 1}
    rollouts = run_here("generate", config, store, into="narrow", **REFS)
    assert len(store.open(rollouts).table()) == len(ROWS)


def test_swapped_clips_fail_the_audit(store):
    prompts = store.open(REFS["prompts"]).table()
    others = (sound.stored(sound.tone(400, length)) for length in (0.4, 0.7))
    swapped = dict(zip(sound.CLIPS, others, strict=True))
    audio = [
        [{**clip, "bytes": swapped[clip["bytes"]]} for clip in clips]
        for clips in prompts["audio"].to_pylist()
    ]
    place = prompts.schema.get_field_index("audio")
    field = prompts.schema.field("audio")
    about = {"stage": "prompt", "stage_version": 1, "config": sight.Plain()}
    with begin(store, "swapped", "prompts", inputs={}, **about) as work:
        work.write(0, prompts.set_column(place, field, pa.array(audio, field.type)))
        other = work.commit()
    rollouts = store.open(ROLLOUTS)
    about = {"stage": "generate", "stage_version": 1, "config": sight.Plain()}
    models = rollouts.manifest.models
    with begin(
        store, "swapped", "rollouts", inputs={"prompts": other}, models=models, **about
    ) as work:
        work.write(0, rollouts.table())
        swapped_rollouts = str(work.commit().ref)
    rewards = score(store, swapped_rollouts)
    refs = {"rollouts": swapped_rollouts, "rewards": rewards, "policy": REFS["policy"]}
    with pytest.raises(NumericError, match="differ"):
        run_here("optimize", OPTIMIZE, store, **refs)


def test_a_policy_that_hears_nothing_is_refused(tmp_path):
    store = sound.make_prompts(tmp_path, ROWS)
    tiny.make_policy(store)
    refs = {"prompts": REFS["prompts"], "policy": "tiny/policy@0"}
    with pytest.raises(ConfigError, match="tiny/policy@0 hears no clips") as refusal:
        run_here("generate", sight.GENERATE, store, **refs)
    assert "qwen2_audio" in refusal.value.next
