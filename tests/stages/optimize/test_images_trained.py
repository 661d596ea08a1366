"""Training on prompts with pictures: logprobs and gradients of the model's own pass, what is
trained, what a swapped picture gives, and how often a picture is looked at."""

import itertools

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import AutoModelForImageTextToText

from quiver.schemas.errors import NumericError
from quiver.stages.core.store import Store
from quiver.stages.model.forward.media import feature_places
from quiver.stages.model.forward.policy import Policy
from quiver.stages.model.forward.verify import choose_mode
from quiver.stages.model.media.dataset import files_of
from tests import shown, sight
from tests.stages.model.forward.test_policy import packed
from tests.writing import run_here

ROWS = [
    {"prompt": "What is seven", "images": ["0.png"]},
    {"prompt": "zero one two three", "images": ["1.png", "0.png"]},
    {"prompt": "five", "images": []},
    {"prompt": "six", "images": ["1.png"]},
]
IMAGE = sight.words().convert_tokens_to_ids("<image>")
REFS = sight.REFS
EVERYTHING = {"train_vision": True, "activation_checkpointing": True}


def make_store(folder, kind: str) -> Store:
    """A policy that sees, and its rollouts on four prompts."""
    store = sight.make_prompts(folder, ROWS, kind)
    shown.sample(store, REFS)
    return store


@pytest.fixture(scope="module", params=["idefics3", "llava", *sight.THREE_AXES])
def store(request, tmp_path_factory) -> Store:
    return make_store(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture
def model(store):
    folder = store.open(REFS["policy"]).files.folder
    return AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="sdpa").eval()


def read(store: Store, change=lambda ids: ids) -> shown.Read:
    return shown.read(store, "sees", "images", change)


@pytest.mark.parametrize("most", [(None,), (1, None)], ids=["all", "some of one token"])
def test_logprobs_and_gradients_are_transformers_own(store, model, most):
    counts = itertools.cycle(most)
    given = read(store, lambda ids: [id if id != IMAGE else 5 for id in ids[: next(counts)]])
    folder = store.open(REFS["policy"]).files.folder

    def inputs_of(row):
        return sight.own_inputs(folder, row, row["images"])

    names = shown.require_own_pass(model, given, inputs_of)
    assert any("vis" in name for name in names)


def test_an_id_of_a_picture_that_was_sampled_is_an_ordinary_one(store, model):
    """The features are put in by hand, by the places that the processor wrote."""
    given = read(store, lambda ids: [IMAGE, *ids[:3], IMAGE, 7])
    _, sequences, numbers = given
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
        expected.append(shown.logprobs_of(logits, sequences.completions[row]))
    shown.require_logprobs(model, given, expected)


def test_features_stand_where_span_and_id_say_so():
    """A prompt that was given as ids may hold that id beside its pictures."""
    ids = np.array([IMAGE, 5, IMAGE, IMAGE, 5, IMAGE])
    assert feature_places(ids, [(1, 3), (4, 1)], [IMAGE]).tolist() == [2, 3]


def test_files_may_have_more_than_two_gibibytes_together():
    """Nine shards whose memory is never touched."""
    large = np.zeros(250 * 2**20, np.uint8)
    buffers = [None, pa.py_buffer(np.array([0, len(large)], np.int32)), pa.py_buffer(large)]
    files = pa.Array.from_buffers(pa.binary(), 1, buffers)
    items = pa.StructArray.from_arrays([files], ["bytes"])
    shard = pa.ListArray.from_arrays(pa.array([0, 1], pa.int32()), items)
    last = pa.array([[], [{"bytes": b"of no row"}], [{"bytes": b"a"}, {"bytes": b"b"}], None])
    column = pa.chunked_array([*[shard] * 9, last.cast(shard.type).slice(2)])
    found = files_of(column)
    assert [len(found), found[9].as_py(), found[10].as_py()] == [11, b"a", b"b"]


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


def changed_parts(store: Store, **options) -> set[str]:
    """Which parts of the model a training changes."""
    changed = shown.changed_weights(AutoModelForImageTextToText, store, "sees", **options)
    assert changed
    names = ("vis", "connector", "projector", "text_model", "language_model", "lm_head")
    return {next(part for part in names if part in name) for name in changed}


def test_what_sees_is_trained_only_where_it_is_asked_for(store):
    of_language = {"text_model", "language_model", "lm_head"}
    assert changed_parts(store) <= of_language
    assert changed_parts(store, lora={"rank": 2}) <= of_language
    everything = changed_parts(store, **EVERYTHING)
    assert "vis" in everything


def test_what_sees_gets_no_adapter_though_its_layers_have_the_names_that_were_chosen(store, model):
    shown.require_no_adapters(model, store.open(REFS["policy"]))


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
        "rewards": ["sees/rewards@1", shown.score(store, lost)],
        "policy": REFS["policy"],
    }
    ref = run_here("optimize", shown.OPTIMIZE, store, **refs)
    assert store.open(ref).manifest.metrics["audit"]["max_gap"] < 1e-5


def test_trained_weights_are_a_policy_that_sees(store):
    config = {**shown.OPTIMIZE, **EVERYTHING}
    refs = {"rollouts": "sees/rollouts@1", "rewards": "sees/rewards@1", "policy": REFS["policy"]}
    trained = run_here("optimize", config, store, into="trained", **refs)
    generate = {"engine": "transformers", "dtype": "float32", "sampling": {"max_tokens": 4}}
    refs = {"prompts": REFS["prompts"], "policy": str(trained)}
    rollouts = run_here("generate", generate, store, into="next", **refs)
    model = store.open(rollouts).manifest.models[0]
    assert model.processor == store.open("sees/rollouts@1").manifest.models[0].processor != ""


def test_swapped_pictures_fail_the_audit(tmp_path):
    store = make_store(tmp_path, "idefics3")
    swapped = dict(zip(sight.PICTURES, reversed(sight.PICTURES), strict=True))
    refs = shown.with_other_files(store, "sees", "images", swapped)
    with pytest.raises(NumericError, match="differ"):
        run_here("optimize", shown.OPTIMIZE, store, **refs)


def test_logprobs_are_scored_with_the_pictures(store):
    shown.require_scored_as_sampled(store, "sees", atol=3e-5)
