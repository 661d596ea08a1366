"""Environments that show pictures: at the start and after each turn, to both engines and the
trainer; what is refused; played again and branched."""

import hashlib
import re
from functools import cache

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image

from quiver.schemas.errors import ConfigError, LineageError
from quiver.stages.core.run.runner import run_stage
from quiver.stages.core.store import Store
from quiver.stages.model.media.dataset import load_media
from quiver.stages.turns.environment import (
    files_in,
    for_people,
    read_answer,
    read_media,
    read_messages,
    read_step,
)
from tests import sight
from tests.shown import OPTIMIZE, paid, require_end, require_refused, require_told_apart
from tests.writing import begin, run_here

IMAGE = sight.words().convert_tokens_to_ids("<image>")
GAME = '''
import io
import numpy as np
from PIL import Image

class Gallery:
    """Shows another picture of noise each time, of another size."""

    def picture(self):
        self.count += 1
        random = np.random.default_rng(self.first + self.count)
        size = (10 + 5 * self.count, 30, 3)
        return Image.fromarray(random.integers(0, 255, size, dtype=np.uint8))

    def reset(self, first):
        self.first, self.count = first, 0
        parts = [{"type": "image", "image": self.picture()}, {"type": "text", "text": "Look."}]
        return [{"role": "user", "content": parts if first else "Nothing yet."}]

    def step(self, turn):
        images = [self.picture() for _ in range(self.count % 3)]
        reward = len(turn.text) % 5
        return {"text": f"seven {self.count}", "images": images, "reward": reward}
'''
ROWS = [
    {"prompt": "What is seven", "images": ["0.png"], "first": 5},
    {"prompt": "zero one two", "images": [], "first": 0},
    {"prompt": "three", "images": [], "first": 9},
]
# what ends a turn stands in most texts of random weights
SAMPLING = {"max_tokens": 6, "temperature": 0.9, "stop_token_ids": [*range(150, 300)]}


def episodes_of(folder, kind="idefics3", game=GAME, rows=ROWS, **turns):
    """The store, and the name of its episodes."""
    store = sight.make_prompts(folder, rows, kind)
    (folder / "game.py").write_text(game)
    environment = {"environment": f"{folder}/game.py:Gallery"}
    config = {
        "source": str(folder / "rows.jsonl"),
        "prompt": "prompt",
        "images": "images",
        "turns": environment,
    }
    prompts = run_here("prompt", config, store, policy=sight.REFS["policy"])
    config = {
        **sight.GENERATE,
        "sampling": SAMPLING,
        "turns": {**environment, "max_turns": 3, "max_tokens": 18, "max_images": 3, **turns},
    }
    refs = {"prompts": str(prompts), "policy": sight.REFS["policy"]}
    return store, config, refs


@pytest.fixture(scope="module")
def sampled(tmp_path_factory):
    """By kind of model, each made once: a store, and its episodes."""

    @cache
    def make(kind: str) -> tuple[Store, str]:
        store, config, refs = episodes_of(tmp_path_factory.mktemp(kind), kind)
        return store, str(run_here("generate", config, store, **refs))

    return make


@pytest.fixture(params=["idefics3", "llava", "qwen3_vl"])
def saved(request, sampled):
    return sampled(request.param)


def features_of(store: Store, images: list[dict]) -> int:
    """How many features those pictures have."""
    sizes = [sight.decode(image["bytes"]).size for image in images]
    if "qwen" in store.url:  # one for 16 × 16 pixels
        return sum(round(width / 16) * round(height / 16) for width, height in sizes)
    return len(sizes) * (16 if "llava" in store.url else 4)


def test_what_was_shown_is_saved_where_its_ids_stand(saved):
    store, rollouts = saved
    version = store.open(rollouts)
    manifest = version.manifest
    assert manifest.kind_schema == "rollouts/3" and manifest.models[0].processor
    prompts = {row["group_id"]: row for row in store.open("sees/prompts@2").table().to_pylist()}
    assert [len(row["images"]) for row in prompts.values()] == [2, 0, 1]
    assert prompts["000000"]["messages"][-1]["content"] == "What is seven\n\nLook."
    num_shown = 0
    for row in version.table().to_pylist():
        assert len(row["turns"]) <= 3
        ids = [turn["observation_ids"] for turn in row["turns"]]
        for image in row["images"] or []:
            shown = ids[image["turn"]][image["start"] : image["start"] + image["length"]]
            assert IMAGE in shown
            assert sight.decode(image["bytes"]).width == 30
            num_shown += 1
        heights = [sight.decode(image["bytes"]).height for image in row["images"] or []]
        assert heights == sorted(heights), "each picture of an episode is higher than the last"
        each = prompts[row["group_id"]]
        assert each["prompt_ids"].count(IMAGE) == features_of(store, each["images"])
        for number, turn in enumerate(row["turns"][:-1]):
            shown = [image for image in row["images"] or [] if image["turn"] == number]
            assert turn["observation_ids"].count(IMAGE) == features_of(store, shown)
            assert turn["observation"].count("[picture ") == len(shown)
    assert num_shown > 6


@pytest.mark.parametrize(
    ("saved", "packing"),
    [
        ("idefics3", "packed"),
        ("llava", "single"),
        *(("qwen3_vl", packing) for packing in ("shared", "packed", "single")),
    ],
    indirect=["saved"],
)
def test_the_trainer_sees_what_the_engine_saw(saved, packing):
    """The audit compares with what was sampled; `packing` is tried against the whole model."""
    store, rollouts = saved
    config = {**OPTIMIZE, "packing": packing}
    ref = run_here(
        "optimize", config, store, into=packing, **paid(store, rollouts, sight.REFS["policy"])
    )
    metrics = store.open(ref).manifest.metrics
    assert metrics["packing"] == packing
    assert metrics["audit"]["max_gap"] < 1e-5 and metrics["audit"]["rollouts"] == 9


def test_rows_that_are_taken_keep_what_they_were_shown(saved):
    store, rollouts = saved
    version = store.open(rollouts)
    policy = store.open(sight.REFS["policy"])
    observed = load_media(store, version, version.table(), policy).observed
    rows = [7, 2, 0]
    taken = observed.take(torch.tensor(rows))
    for name in ("numbers", "starts", "places"):
        whole, part = getattr(observed, name), getattr(taken, name)
        assert [part[n].tolist() for n in range(3)] == [whole[row].tolist() for row in rows]


def test_prompts_need_not_show_any(tmp_path):
    """What answers them is seen, and by the same processor."""
    store, config, refs = episodes_of(tmp_path, rows=ROWS[1:2])
    assert store.open(refs["prompts"]).table()["images"].to_pylist() == [[]]
    rollouts = str(run_here("generate", config, store, **refs))
    ref = run_here("optimize", OPTIMIZE, store, **paid(store, rollouts, sight.REFS["policy"]))
    assert store.open(ref).manifest.metrics["audit"]["max_gap"] < 1e-5
    path = sight.make_folder(tmp_path / "other") / "processor_config.json"
    path.write_text(path.read_text().replace("0.5,", "0.4,"))
    other = run_here("policy", {"model": str(path.parent)}, store, into="other")
    config = {"role": "ref", "device": "cpu"}
    with pytest.raises(LineageError, match="with another processor"):
        run_here("logprobs", config, store, rollouts=rollouts, policy=str(other))


def test_what_was_shown_behind_a_sampled_id_of_a_picture_may_be_scored(saved):
    """The model's own pass, which ways of packing are compared with, ends before it."""
    store, rollouts = saved
    rows = store.open(rollouts).table().to_pylist()
    for row in rows:
        row["completion_ids"][row["turns"][0]["length"]] = IMAGE
    changed = write_again(store, rollouts, rows)
    config = {"role": "ref", "precision": "fp32", "device": "cpu"}
    scored = run_here("logprobs", config, store, rollouts=changed, policy=sight.REFS["policy"])
    assert store.open(scored).manifest.metrics["packing"] == "shared"


def write_again(store: Store, rollouts: str, rows: list[dict]) -> str:
    """Changed rows of `rollouts`, as if they had been sampled."""
    version = store.open(rollouts)
    about = {"stage": "generate", "stage_version": 1, "config": sight.Plain()}
    inputs = {"prompts": store.open("sees/prompts@2")}
    models = version.manifest.models
    with begin(store, "changed", "rollouts", inputs=inputs, models=models, **about) as work:
        work.write(0, pa.Table.from_pylist(rows, version.table().schema))
        return str(work.commit().ref)


def test_vllm_is_shown_them_too(tmp_path):
    store, config, refs = episodes_of(tmp_path)
    config = {**config, "engine": "vllm", "turns": {**config["turns"], "max_turns": 2}}
    rollouts = str(run_stage("generate", config, store, **refs))
    rows = store.open(rollouts).table().to_pylist()
    assert sum(len(row["images"] or []) for row in rows) > 3
    ref = run_here("optimize", OPTIMIZE, store, **paid(store, rollouts, sight.REFS["policy"]))
    assert store.open(ref).manifest.metrics["audit"]["max_gap"] < 1e-4


@pytest.mark.parametrize(
    "before, after, turns, end, why",
    [
        ("", "", {"max_images": 0}, "environment_error", "set generate.turns.max_images"),
        ("", "", {"max_images": 2}, "max_images", None),
        ("", "", {"max_observation_tokens": 20}, "max_observation_tokens", None),
        (
            "for _ in range(self.count % 3)]",
            ", b'no picture']",
            {},
            "environment_error",
            "its picture 2 is not a picture of type PNG, JPEG, WEBP",
        ),
        (
            "images = [self.picture()",
            "images = ['a path'",
            {},
            "environment_error",
            "a picture is str, expected a PIL image or bytes",
        ),
    ],
)
def test_what_can_not_be_shown_ends_the_episode(tmp_path, before, after, turns, end, why):
    """Alone, and told why."""
    game = GAME.replace(before, after) if before else GAME
    store, config, refs = episodes_of(tmp_path, game=game, rows=ROWS[:1], **turns)
    require_end(store, config, refs, end, why)


def test_a_tools_pictures_are_shown_as_a_users_where_there_are_no_tools(tmp_path):
    said = '"text": f"seven {self.count}", "images": images'
    assert said in GAME
    message = '{"role": "tool", "name": "look", "content": "seven", "images": images}'
    game = GAME.replace(said, f'"messages": [{message}]')
    store, config, refs = episodes_of(tmp_path, game=game, rows=ROWS[:1], tool_role="user")
    rows = store.open(run_here("generate", config, store, **refs)).table().to_pylist()
    assert [len(row["images"]) for row in rows] == [3] * 3


def test_who_sees_nothing_is_not_asked(tmp_path):
    store, config, refs = episodes_of(tmp_path, rows=[{"prompt": "one", "images": [], "first": 0}])
    found = require_refused(store, tmp_path, config, refs, "sees no pictures")
    assert found == "generate.turns.max_images"


def test_a_history_that_is_rewritten_loses_its_pictures(tmp_path):
    store, config, refs = episodes_of(tmp_path, max_images=0)
    config["turns"]["rewritten"] = "restart"
    with pytest.raises(ConfigError, match="loses the pictures of sees/prompts@2") as refusal:
        run_here("generate", config, store, **refs)
    assert refusal.value.object == "generate.turns.rewritten"


def test_another_picture_is_another_answer(saved, tmp_path):
    store, rollouts = saved
    (tmp_path / "other.py").write_text(GAME.replace("5 * self.count", "6 * self.count"))
    require_told_apart(store, rollouts, f"{tmp_path}/other.py:Gallery", "[picture ")


def test_a_branch_shows_what_was_shown_before(saved):
    """Each prompt is all that the policy had read, pictures of answers included."""
    store, rollouts = saved
    prompts = store.open(run_here("branch", {"turn": 2}, store, into="cut", rollouts=rollouts))
    saved_rows = {row["rollout_id"]: row for row in store.open(rollouts).table().to_pylist()}
    opened = {row["group_id"]: row for row in store.open("sees/prompts@2").table().to_pylist()}
    rows = prompts.table().to_pylist()
    assert rows
    for row in rows:
        rollout = saved_rows[row["group_id"].removesuffix(".2")]
        before = [image for image in rollout["images"] or [] if image["turn"] < 2]
        first = [image["bytes"] for image in opened[rollout["group_id"]]["images"]]
        shown = [*first, *(image["bytes"] for image in before)]
        assert [image["bytes"] for image in row["images"]] == shown
        ids = [row["prompt_ids"][s["start"] :][: s["length"]] for s in row["spans"]]
        assert len(ids) == len(shown) and all(IMAGE in part for part in ids)
        assert sum(part.count(IMAGE) for part in ids) == row["prompt_ids"].count(IMAGE)


def test_an_id_that_was_sampled_before_a_picture_costs_vllm_its_episode(tmp_path):
    """Where pictures go it knows by that id alone, so it could not be told which is which."""
    store, config, refs = episodes_of(tmp_path)
    version = store.open(run_here("generate", config, store, **refs))
    rows = version.table().to_pylist()
    rows = [row for row in rows if any(image["turn"] == 0 for image in row["images"] or [])]
    for row in rows:
        row["completion_ids"][0] = IMAGE  # of the first turn, before what is shown then
    rollouts = write_again(store, str(version.ref), rows)
    prompts = store.open(run_here("branch", {"turn": 1}, store, into="cut", rollouts=rollouts))
    config = {**config, "engine": "vllm", "samples_per_prompt": 1}
    refs = {"prompts": str(prompts.ref), "policy": sight.REFS["policy"]}
    made = store.open(run_stage("generate", config, store, into="cut", **refs)).table().to_pylist()
    assert len(made) == len(rows) > 0
    for row in made:
        assert row["end_reason"] == "environment_error"
        assert row["turns"][0]["finish_reason"] == "abort"


def test_a_template_without_pictures_is_refused_before_anything_is_sampled(tmp_path):
    store, config, _ = episodes_of(tmp_path)
    (tmp_path / "text.jinja").write_text(
        "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
        "{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] }}"
        "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    rows = {"source": sight.write_rows(tmp_path, [{"prompt": "one", "first": 0}], "text.jsonl")}
    template = {"template": str(tmp_path / "text.jinja"), "prompt": "prompt"}
    turns = {"environment": config["turns"]["environment"]}
    policy = sight.REFS["policy"]
    prompts = run_here("prompt", {**rows, **template, "turns": turns}, store, policy=policy)
    with pytest.raises(ConfigError, match="chat template shows no picture") as refusal:
        run_here("generate", config, store, prompts=str(prompts), policy=policy)
    assert refusal.value.object == "generate.turns.max_images"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "text", "text": 1},
        {"type": "image"},
        {"url": "data:AAAA", "type": "image_url"},
        None,
    ],
)
def test_other_parts_are_refused(part):
    shown = re.escape(repr(part))
    with pytest.raises(ValueError, match=f"a part of a message is {shown}, expected pictures"):
        read_messages([{"role": "user", "content": [part]}])
    behind = [{"type": "text", "text": "y"}, {"type": "image", "image": b"x"}]
    with pytest.raises(ValueError, match="expected pictures"):
        read_messages([{"role": "user", "content": behind}])
    with pytest.raises(ValueError, match="images are bytes, expected a list"):
        read_step({"text": "y", "images": b"x"})


def picture(mode: str) -> Image.Image:
    return Image.new("RGB", (3, 2), (255, 0, 0)).convert(mode)


@pytest.mark.parametrize(
    "returned, content, count",
    [
        (picture("RGB"), "", 1),
        (picture("CMYK"), "", 1),
        (sight.png(0), "", 1),
        ([picture("L"), sight.png(0)], "", 2),
        (("seen", picture("RGB")), "seen", 1),
        ([{"type": "image", "image": picture("RGB")}, {"type": "text", "text": "x"}], "x", 1),
        (["no", "picture"], '["no", "picture"]', 0),
    ],
)
def test_what_a_tool_may_return(returned, content, count):
    message = read_answer(returned)
    assert message["content"] == content
    shown = files_in([message]).get("image", [])
    assert len(shown) == count and all(sight.decode(each) for each in shown)


def test_people_are_told_the_beginning_of_a_pictures_own_hash():
    message = {"role": "user", "content": "x", "images": read_media("image", [b"bytes"])}
    assert for_people([message]) == f"[picture {hashlib.sha256(b'bytes').hexdigest()[:12]}]\nx"
    with pytest.raises(ValueError, match="images are ndarray, expected a list"):
        read_media("image", np.zeros((2, 2, 3), np.uint8))
