"""Training on prompts with pictures: logprobs and gradients of the model's own pass, what is
trained, what a swapped picture gives, and how often a picture is looked at."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import AutoModelForImageTextToText

from quiver.schemas.errors import NumericError
from quiver.stages.core.store import Store
from quiver.stages.model.forward.layout import Sequences, prompt_numbers
from quiver.stages.model.forward.media import feature_places
from quiver.stages.model.forward.policy import Policy
from quiver.stages.model.forward.verify import choose_mode
from quiver.stages.model.media.dataset import load_media
from quiver.stages.model.ragged import Ragged
from tests import sight
from tests.stages.model.forward.test_policy import packed
from tests.writing import begin, run_here

ROWS = [
    {"prompt": "What is seven", "images": ["0.png"]},
    {"prompt": "zero one two three", "images": ["1.png", "0.png"]},
    {"prompt": "five", "images": []},
    {"prompt": "six", "images": ["1.png"]},
]
IMAGE = sight.words().convert_tokens_to_ids("<image>")
REFS = sight.REFS
REWARD = """
def score(completion_ids):
    return [sum(ids) % 7 for ids in completion_ids]
"""
OPTIMIZE = {
    "algorithm": "grpo",
    "precision": "fp32",
    "learning_rate": 1e-3,
    "drop_zero_variance": False,
    "device": "cpu",
}


def make_store(folder, kind: str) -> Store:
    """A policy that sees, and its rollouts on four prompts."""
    store = sight.make_prompts(folder, ROWS, kind)
    run_here("generate", sight.GENERATE, store, **REFS)
    (folder / "rewards.py").write_text(REWARD)
    score(store, "sees/rollouts@1")
    return store


def score(store: Store, rollouts: str) -> str:
    config = {"functions": [{"use": f"{Path(store.url).parent}/rewards.py:score"}]}
    return str(run_here("reward", config, store, rollouts=rollouts))


@pytest.fixture(scope="module", params=["idefics3", "llava", *sight.THREE_AXES])
def store(request, tmp_path_factory) -> Store:
    return make_store(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture
def model(store):
    folder = store.open(REFS["policy"]).files.folder
    return AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="sdpa").eval()


def read(store: Store, change=lambda ids: ids) -> tuple[list[dict], Sequences, list[int]]:
    """The rollouts, each with its pictures; what the model reads of them; their prompts' numbers.
    `change`: of each row's sampled ids."""
    rollouts = store.open("sees/rollouts@1")
    media = load_media(store, rollouts, rollouts.table(), store.open(REFS["policy"]))
    rows = rollouts.table().to_pylist()
    prompts = {row["group_id"]: row for row in store.open(REFS["prompts"]).table().to_pylist()}
    for row in rows:
        row["images"] = [image["bytes"] for image in prompts[row["group_id"]]["images"]]
        row["completion_ids"] = change(row["completion_ids"])
    groups = [row["group_id"] for row in rows]
    prompt_ids, completions = (
        Ragged.from_lengths(
            torch.tensor([id for row in rows for id in row[column]]),
            torch.tensor([len(row[column]) for row in rows]),
        )
        for column in ("prompt_ids", "completion_ids")
    )
    temperature = torch.full((len(rows),), 0.9)
    sequences = Sequences(prompt_ids, completions, temperature, media=media)
    return rows, sequences, prompt_numbers(prompt_ids, groups)


def own_logprobs(model, folder, row) -> torch.Tensor:
    """By the whole model, which merges pictures itself."""
    inputs = sight.own_inputs(folder, row, row["images"])
    logits = model(**inputs).logits[0, len(row["prompt_ids"]) - 1 : -1]
    table = (logits / 0.9).log_softmax(-1)
    return table.gather(1, torch.tensor(row["completion_ids"])[:, None])[:, 0]


def other_than_image(ids: list[int]) -> list[int]:
    return [id if id != IMAGE else 5 for id in ids]


@pytest.mark.parametrize("mode", ["shared", "packed", "single"])
def test_logprobs_and_gradients_are_transformers_own(store, model, mode):
    rows, sequences, numbers = read(store, other_than_image)
    folder = store.open(REFS["policy"]).files.folder
    expected = torch.cat([own_logprobs(model, folder, row) for row in rows])
    weights = torch.randn(len(expected), generator=torch.Generator().manual_seed(1))
    (weights * expected).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert any("vis" in name for name in gradients)
    for budget in (40, 10_000):
        model.zero_grad()
        logprobs = packed(Policy(model, autocast=False), mode, sequences, numbers, budget)
        torch.testing.assert_close(logprobs, expected, rtol=5e-6, atol=1e-5)
        (weights * logprobs).sum().backward()
        total = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
        for name, parameter in model.named_parameters():
            if name in gradients:
                gap = (parameter.grad - gradients[name]).norm()
                assert gap <= 1e-5 * gradients[name].norm() + 1e-6 * total, name


def test_an_id_of_a_picture_that_was_sampled_is_an_ordinary_one(store, model):
    """The features are put in by hand, by the places that the processor wrote."""
    _, sequences, numbers = read(store, lambda ids: [IMAGE, *ids[:3], IMAGE, 7])
    expected = []
    for row in range(len(numbers)):
        prompt = sequences.prompts[row]
        ids = torch.cat([prompt, sequences.completions[row]])[None]
        embeddings = model.get_input_embeddings()(ids).detach()
        places = (prompt == IMAGE).nonzero()[:, 0]
        chosen = sequences.media.in_prompts.numbers[row].tolist()
        reader, options = model.base_model, {}
        if chosen:
            inputs = sequences.media.read(chosen)
            seen = model.get_image_features(**inputs)
            features = torch.cat([*seen.pooler_output]).reshape(-1, embeddings.shape[-1])
            embeddings[0, places] = features.detach()
            if "image_grid_thw" in inputs:
                types = torch.zeros_like(ids).index_fill_(1, places, 1)
                axes, _ = reader.get_rope_index(ids, types, inputs["image_grid_thw"])
                reader, options = reader.language_model, {"position_ids": axes}
            if hasattr(seen, "deepstack_features"):
                options["visual_pos_masks"] = types.bool()
                deeper = [torch.cat([*level]) for level in seen.deepstack_features]
                options["deepstack_visual_embeds"] = deeper
        states = reader(inputs_embeds=embeddings, **options).last_hidden_state
        logits = model.get_output_embeddings()(states[0, len(prompt) - 1 : -1])
        table = (logits / 0.9).log_softmax(-1)
        expected.append(table.gather(1, sequences.completions[row][:, None])[:, 0])
    for mode in ("shared", "packed", "single"):
        logprobs = packed(Policy(model, autocast=False), mode, sequences, numbers, 10_000)
        torch.testing.assert_close(logprobs, torch.cat(expected), rtol=5e-6, atol=1e-5)


def test_features_stand_where_span_and_id_say_so():
    """A prompt that was given as ids may hold that id beside its pictures."""
    ids = np.array([IMAGE, 5, IMAGE, IMAGE, 5, IMAGE])
    assert feature_places(ids, [(1, 3), (4, 1)], [IMAGE]).tolist() == [2, 3]


def test_a_way_of_packing_is_tried_up_to_the_first_sampled_id_of_a_picture(store, model):
    """The model itself would take it for a picture that is not there."""
    _, sequences, numbers = read(store, lambda ids: [7, IMAGE, 8, IMAGE, 9])
    policy = Policy(model, autocast=False)
    assert choose_mode(policy, sequences, numbers, "shared") == "shared"


def test_a_group_looks_at_its_pictures_once(store, model):
    _, sequences, numbers = read(store)
    looked = []
    look = model.base_model.get_image_features

    def counted(**inputs):
        looked.append(inputs["pixel_values"].shape)
        return look(**inputs)

    model.base_model.get_image_features = counted
    packed(Policy(model, autocast=False), "shared", sequences, numbers, 10_000)
    assert len(looked) == 4  # of four places in three prompts, answered three times each


def weights_of(store: Store, ref: str) -> dict[str, torch.Tensor]:
    folder = store.open(ref).files.folder
    return AutoModelForImageTextToText.from_pretrained(folder).state_dict()


def changed_parts(store: Store, **options) -> set[str]:
    """Which parts of the model a training changes."""
    refs = {"rollouts": "sees/rollouts@1", "rewards": "sees/rewards@1", "policy": REFS["policy"]}
    config = {**OPTIMIZE, **options}
    ref = run_here("optimize", config, store, into="trained", **refs)
    report = store.open(ref).manifest.metrics["audit"]
    assert report["max_gap"] < 3e-5
    before, after = weights_of(store, REFS["policy"]), weights_of(store, str(ref))
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert changed
    names = ("vis", "connector", "projector", "text_model", "language_model", "lm_head")
    return {next(part for part in names if part in name) for name in changed}


def test_what_sees_is_trained_only_where_it_is_asked_for(store):
    of_language = {"text_model", "language_model", "lm_head"}
    assert changed_parts(store) <= of_language
    assert changed_parts(store, lora={"rank": 2}) <= of_language
    everything = changed_parts(store, train_vision=True)
    assert "vis" in everything


def test_a_version_may_have_lost_all_of_its_pictures(tmp_path):
    """The prompt that showed one was too long, and another version has some."""
    store = make_store(tmp_path, "idefics3")
    rows = [{"prompt": "six " * 20, "images": ["0.png"]}, {"prompt": "two", "images": []}]
    source = sight.write_rows(tmp_path, rows, "lost.jsonl")
    config = {"source": source, "prompt": "prompt", "images": "images"}
    prompts = run_here("prompt", config, store, into="lost", policy=REFS["policy"])
    config = {**sight.GENERATE, "max_model_len": 40, "overlong": "drop"}
    refs = {"prompts": str(prompts), "policy": REFS["policy"]}
    lost = str(run_here("generate", config, store, into="lost", **refs))
    assert len(store.open(lost).table()) == 3
    refs = {
        "rollouts": ["sees/rollouts@1", lost],
        "rewards": ["sees/rewards@1", score(store, lost)],
        "policy": REFS["policy"],
    }
    ref = run_here("optimize", OPTIMIZE, store, **refs)
    assert store.open(ref).manifest.metrics["audit"]["max_gap"] < 1e-5


def test_trained_weights_are_a_policy_that_sees(store):
    config = {**OPTIMIZE, "train_vision": True, "activation_checkpointing": True}
    refs = {"rollouts": "sees/rollouts@1", "rewards": "sees/rewards@1", "policy": REFS["policy"]}
    trained = run_here("optimize", config, store, into="next", **refs)
    generate = {"engine": "transformers", "dtype": "float32", "sampling": {"max_tokens": 4}}
    refs = {"prompts": REFS["prompts"], "policy": str(trained)}
    rollouts = run_here("generate", generate, store, into="next", **refs)
    model = store.open(rollouts).manifest.models[0]
    assert model.processor == store.open("sees/rollouts@1").manifest.models[0].processor != ""


def with_other_pictures(store: Store, swap) -> str:
    """The same rollouts, as if sampled from prompts whose pictures are `swap`ped."""
    prompts = store.open("sees/prompts@1")
    rows = prompts.table().to_pylist()
    for row in rows:
        row["images"] = [swap(image) for image in row["images"]]
    table = prompts.table()
    images = table.schema.get_field_index("images")
    field = table.schema.field("images")
    swapped = pa.array([row["images"] for row in rows], field.type)
    other = table.set_column(images, field, swapped)
    about = {"stage": "prompt", "stage_version": 1, "config": sight.Plain()}
    with begin(store, "swapped", "prompts", inputs={}, **about) as work:
        work.write(0, other)
        prompts_version = work.commit()
    rollouts = store.open("sees/rollouts@1")
    about = {"stage": "generate", "stage_version": 1, "config": sight.Plain()}
    inputs = {"prompts": prompts_version}
    models = rollouts.manifest.models
    with begin(store, "swapped", "rollouts", inputs=inputs, models=models, **about) as work:
        work.write(0, rollouts.table())
        return str(work.commit().ref)


def test_swapped_pictures_fail_the_audit(tmp_path):
    store = make_store(tmp_path, "idefics3")
    contents = dict(zip(sight.PICTURES, reversed(sight.PICTURES), strict=True))

    def swap(image):
        return {**image, "bytes": contents[image["bytes"]]}

    rollouts = with_other_pictures(store, swap)
    refs = {"rollouts": rollouts, "rewards": score(store, rollouts), "policy": REFS["policy"]}
    with pytest.raises(NumericError, match="differ"):
        run_here("optimize", OPTIMIZE, store, **refs)


def test_logprobs_are_scored_with_the_pictures(store):
    config = {"role": "ref", "precision": "fp32", "device": "cpu"}
    refs = {"rollouts": "sees/rollouts@1", "policy": REFS["policy"]}
    scored = store.open(run_here("logprobs", config, store, **refs)).table()
    sampled = store.open("sees/rollouts@1").table()
    for now, then in zip(scored["logprobs"], sampled["old_logprobs"], strict=True):
        np.testing.assert_allclose(now.as_py(), then.as_py(), atol=3e-5)
