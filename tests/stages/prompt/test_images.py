"""Prompts with pictures: what stands where, which pictures are refused, and what moves the key."""

import base64
import importlib.util
import io
import json
import zlib
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from quiver.schemas.errors import ConfigError
from quiver.schemas.prompts import OURS
from quiver.stages.core.run.runner import run_stage
from quiver.stages.core.store import Store
from quiver.stages.model import small
from quiver.stages.model.checkpoints import PolicyConfig
from quiver.stages.model.families import OTHER_AXES, THREE_AXES
from quiver.stages.model.loading import load_model
from quiver.stages.model.media.checking import FileCheck, Limits
from quiver.stages.model.media.decoder import open_image
from quiver.stages.model.media.processor import load_processor
from quiver.stages.prompt import sources, stage
from quiver.stages.prompt.config import Config
from quiver.stages.prompt.media import read_cell
from tests import sight, tiny

# <|im_start|>user\n … <|im_end|>\n<|im_start|>assistant\n
TOKENS = sight.words()
FAKE, IMAGE, _, GLOBAL = TOKENS.convert_tokens_to_ids(sight.MARKS)
PICTURE = [FAKE, GLOBAL, IMAGE, IMAGE, IMAGE, IMAGE, FAKE]


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Store:
    return Store(tmp_path_factory.mktemp("images") / "store")


@pytest.fixture(scope="module")
def policy(store, tmp_path_factory):
    return sight.make_policy(store, tmp_path_factory.mktemp("model"))


def render(store, folder, rows, policy="sees/policy@0", into=None, **config):
    source = sight.write_rows(folder, rows)
    column = "messages" if "messages" in rows[0] else "prompt"
    config = {"source": source, column: column, "images": "images", **config}
    return store.open(run_stage("prompt", config, store, policy=policy, into=into, in_process=True))


def ids(text: str) -> list[int]:
    return TOKENS(text, add_special_tokens=False).input_ids


def chat(*parts) -> list[int]:
    inner = [id for part in parts for id in (PICTURE if part is None else ids(part))]
    return [*ids("<|im_start|>user\n"), *inner, *ids("<|im_end|>\n<|im_start|>assistant\n")]


def test_pictures_stand_where_the_chat_shows_them(store, policy, tmp_path):
    contents = [sight.png(0), sight.png(1, (50, 30))]
    for number, content in enumerate(contents):
        (tmp_path / f"{number}.png").write_bytes(content)
    image = {"type": "image"}

    def row(*parts, images):
        parts = [part if part == image else {"type": "text", "text": part} for part in parts]
        return {"messages": [{"role": "user", "content": parts}], "images": images}

    rows = [
        row(image, "What is seven", images=["0.png"]),
        row("zero ", image, " one ", image, images=["1.png", "0.png"]),
        row("no picture", images=[]),
        row("before", images=["1.png"]),  # shown nowhere: before the text
    ]
    version = render(store, tmp_path, rows)
    found = version.table().to_pylist()
    assert [row["prompt_ids"] for row in found] == [
        chat(None, "What is seven"),
        chat("zero ", None, " one ", None),
        chat("no picture"),
        chat(None, "before"),
    ]
    starts = [[span["start"] for span in row["spans"]] for row in found]
    lead = len(ids("<|im_start|>user\n"))
    first = lead + len(ids("zero "))
    assert starts == [[lead], [first, first + 7 + len(ids(" one "))], [], [lead]]
    assert {span["length"] for row in found for span in row["spans"]} == {7}
    stored = [[image["bytes"] for image in row["images"]] for row in found]
    assert stored == [contents[:1], contents[::-1], [], contents[1:]]
    assert found[1]["messages"][0]["content"] == "zero  one "
    assert version.manifest.models[0].processor


def test_a_typed_mark_stays_text(store, policy, tmp_path):
    (tmp_path / "0.png").write_bytes(sight.png(0))
    rows = [{"prompt": "one <image> two <fake_token_around_image>", "images": ["0.png"]}]
    (row,) = render(store, tmp_path, rows).table().to_pylist()
    assert [row["prompt_ids"].count(mark) for mark in (IMAGE, FAKE)] == [4, 2]
    assert (
        row["prompt_ids"][: len(ids("<|im_start|>user\n")) + 7]
        == chat(None)[: -len(ids("<|im_end|>\n<|im_start|>assistant\n"))]
    )
    assert "<image> two <fake_token_around_image>" in row["prompt_text"]


def encoded(picture, kind="PNG", **options) -> bytes:
    content = io.BytesIO()
    picture.save(content, kind, **options)
    return content.getvalue()


SMALL = Image.new("RGB", (8, 8))
BOMB = encoded(Image.new("1", (5000, 5000)))


def corrupt() -> bytes:
    """A PNG whose pixels are no stream of zlib."""
    content = bytearray(sight.png(0))
    place = content.index(b"IDAT") + 4
    length = int.from_bytes(content[place - 8 : place - 4])
    content[place : place + length] = b"x" * length
    checksum = zlib.crc32(content[place - 4 : place + length])
    content[place + length : place + length + 4] = checksum.to_bytes(4)
    return bytes(content)


HOSTILE = {
    "is no EXIF": (encoded(SMALL, exif=b"Exif\0\0nothing of the kind"), "cannot be decoded"),
    "bomb": (BOMB, "has 5000 × 5000 pixels, at most 1,000,000 are read (a key)"),
    "large": (sight.png(0, (200, 200)), "at most 50,000 are read (prompt.max_image_bytes)"),
    "empty": (b"", "is not a picture of type PNG, JPEG, WEBP"),
    "text": (b"<svg/>", "is not a picture of type PNG, JPEG, WEBP"),
    "gif": (encoded(SMALL, "GIF"), "is not a picture of type PNG, JPEG, WEBP"),
    "frames": (
        encoded(SMALL, "WEBP", save_all=True, append_images=[Image.new("RGB", (8, 8), "blue")]),
        "has 2 frames, expected one picture",
    ),
    "cut": (sight.png(0)[:500], "cannot be decoded"),
    "corrupt": (corrupt(), "cannot be decoded"),
}


def test_hostile_pictures_are_refused():
    with closing(FileCheck({"image": Limits(1_000_000, "a key", 50_000)})) as check:
        for name, (content, message) in HOSTILE.items():
            with pytest.raises(ConfigError) as caught:
                check.require("image", name, content)
            assert caught.value.object == name and message in caught.value.message
    with (
        closing(FileCheck({"image": Limits(10**9, "a key", decode_seconds=0.001)})) as check,
        pytest.raises(ConfigError, match=r"was not decoded within 0\.001 seconds"),
    ):
        check.require("image", "slow", BOMB)


def test_a_picture_that_is_refused_is_named_by_its_row(store, policy, tmp_path):
    (tmp_path / "good.png").write_bytes(sight.png(0))
    (tmp_path / "bad.png").write_bytes(b"<svg/>")
    rows = [
        {"prompt": "one", "images": ["good.png"]},
        {"prompt": "two", "images": ["good.png", "bad.png"]},
    ]
    with pytest.raises(ConfigError) as caught:
        render(store, tmp_path, rows, into="hostile")
    assert "prompt 000001 (row 2 of" in caught.value.object
    assert caught.value.object.endswith(": picture 2")
    assert not (Path(store.url) / "hostile/prompts/v000001").exists()


def cell_of(folder, cell, source="rows.jsonl", **limits):
    """The pictures of a cell of `source` in `folder`."""
    fields = {"source": str(folder / source), "prompt": "prompt", "images": "images"}
    return read_cell("image", "row 1", cell, Config(**fields, **limits))


BASE64 = base64.encodebytes(sight.png(0)).decode()


@pytest.mark.parametrize(
    ("cell", "path"),
    [
        (sight.png(0), None),
        ({"bytes": sight.png(0), "path": "gone.png"}, "gone.png"),
        ({"bytes": None, "path": "a.png"}, "a.png"),
        ({"bytes": BASE64, "path": None}, None),
        ("a.png", "a.png"),
        ("file://FOLDER/a.png", "file://FOLDER/a.png"),
        ([sight.png(0)], None),
        (BASE64, None),
        (f"data:image/png;base64,{BASE64}", None),
    ],
)
@pytest.mark.parametrize("source", ["rows.jsonl", "run:3/rows.jsonl", "run:3/rows.py:rows"])
def test_a_picture_is_bytes_a_path_or_what_datasets_stores(tmp_path, cell, path, source):
    folder = (tmp_path / source).parent
    folder.mkdir(exist_ok=True)
    (folder / "a.png").write_bytes(sight.png(0))
    if isinstance(cell, str):
        cell, path = (text and text.replace("FOLDER", str(folder)) for text in (cell, path))
    assert cell_of(tmp_path, cell, source) == [{"bytes": sight.png(0), "path": path}]


@pytest.mark.parametrize("cell", [None, "", []])
def test_a_row_may_show_no_picture(tmp_path, cell):
    assert cell_of(tmp_path, cell) == []


@pytest.mark.parametrize(
    ("picture", "message"),
    [
        ("../outside.png", "leads out of the source's folder"),
        ("/etc/hostname", "leads out of the source's folder"),
        ("https://example.org/a.png", "leads out of the source's folder"),
        ("link.png", "leads out of the source's folder"),
        ("gone.png", "there is no file"),
        ("loop.png/a.png", "its path loop.png/a.png leads nowhere"),
        ("a\0.png", "the path has a NUL character"),
        ("a" * 300, "a name of more than 255 bytes"),
        (
            base64.b64encode(b"x" * 6000).decode(),
            "4096 bytes, and is not a picture (PNG, JPEG, WebP)",
        ),
        ("data:image/png;base64,no", "is a data URL, and holds no file in base64"),
        ({"bytes": "no base64!", "path": None}, "holds text, expected bytes, base64, a path, or"),
        ({"bytes": None, "path": None}, "has neither bytes nor a path"),
        ({"path": 7}, "the path holds a number, expected text"),
        (7, "holds a number, expected bytes, base64, a path"),
    ],
)
def test_pictures_lie_below_the_folder_of_the_source(tmp_path, picture, message):
    folder = tmp_path / "data"
    folder.mkdir()
    (tmp_path / "outside.png").write_bytes(sight.png(0))
    (folder / "link.png").symlink_to(tmp_path / "outside.png")
    (folder / "loop.png").symlink_to("loop.png")
    with pytest.raises(ConfigError) as caught:
        cell_of(folder, [picture])
    assert caught.value.object == "row 1: picture 1"
    assert message in caught.value.message


def test_a_source_whose_picture_is_missing_is_refused_when_it_is_read(tmp_path):
    source = sight.write_rows(tmp_path, [{"prompt": "one", "images": ["gone.png"]}])
    with pytest.raises(ConfigError, match="there is no file") as caught:
        sources.read(Config(source=source, prompt="prompt", images="images"))
    assert caught.value.object.startswith("row 1 of ")


def test_an_environment_begins_with_the_columns_that_it_begins_again_with(store, policy, tmp_path):
    (tmp_path / "tells.py").write_text(TELLS)
    (tmp_path / "0.png").write_bytes(sight.png(0))
    turns = {"environment": f"{tmp_path}/tells.py:Tells"}
    version = render(store, tmp_path, [{"prompt": "one", "n": 1, "images": "0.png"}], turns=turns)
    (row,) = version.table().to_pylist()
    saved = sorted(row["columns"].keys() - set(OURS))
    assert row["messages"][0]["content"] == f"one\n\n{' '.join(saved)}" == "one\n\nn prompt"


TELLS = """
class Tells:
    def reset(self, seed, **columns):
        return " ".join(sorted(columns))

    def step(self, turn):
        return None
"""


def test_every_picture_of_a_row_and_their_order_are_of_the_source(store, policy, tmp_path):
    rows = [{"prompt": "one", "images": ["0.png", "1.png"]}]
    rendered = []
    for seeds in ((0, 1), (0, 2), (2, 0), (2, 0)):
        for number, seed in enumerate(seeds):
            (tmp_path / f"{number}.png").write_bytes(sight.png(seed))
        rendered.append(render(store, tmp_path, rows).ref)
    assert len(set(rendered)) == 3 and rendered[-1] == rendered[-2]


def test_shards_with_pictures_stay_small(store, policy, tmp_path, monkeypatch):
    """They are held in memory."""
    monkeypatch.setattr(stage, "ROWS_PER_SHARD", 2)
    (tmp_path / "0.png").write_bytes(sight.png(0))
    rows = [{"prompt": text, "images": "0.png"} for text in ("one", "two", "three")]
    version = render(store, tmp_path, rows, into="small")
    assert [entry.rows for entry in version.manifest.files] == [2, 1]
    assert version.table()["images"].to_pylist()[2][0]["bytes"] == sight.png(0)


def test_each_picture_has_as_many_ids_as_it_is_large(store, tmp_path):
    folder = sight.make_folder(tmp_path / "model")
    path = folder / "processor_config.json"
    about = json.loads(path.read_text())
    about["image_processor"] |= {"do_image_splitting": True, "size": {"longest_edge": 64}}
    path.write_text(json.dumps(about))
    policy = run_stage("policy", {"model": str(folder)}, store, into="splits", in_process=True)
    processor = load_processor(store.open(policy))
    contents = [sight.png(0, (20, 40)), sight.png(1, (32, 32))]
    for number, content in enumerate(contents):
        (tmp_path / f"{number}.png").write_bytes(content)
    rows = [{"prompt": "one", "images": ["0.png", "1.png"]}]
    (row,) = render(store, tmp_path, rows, policy=str(policy)).table().to_pylist()
    shown = [row["prompt_ids"][at["start"] :][: at["length"]] for at in row["spans"]]
    assert shown == [processor.read("image", content).ids.tolist() for content in contents]
    assert len(shown[0]) < len(shown[1])


@pytest.mark.parametrize(
    "row, message",
    [
        ({"messages": [{"role": "user", "content": [{"type": "image"}] * 2}]}, "shows 2 pictures"),
        (
            {"messages": [{"role": "system", "content": "one"}]},
            "has 1 pictures and no message of a user that could show them",
        ),
    ],
)
def test_parts_and_pictures_go_together(store, policy, tmp_path, row, message):
    (tmp_path / "0.png").write_bytes(sight.png(0))
    with pytest.raises(ConfigError) as caught:
        render(store, tmp_path, [{**row, "images": ["0.png"]}])
    assert message in caught.value.message


@pytest.mark.parametrize("kind", ["qwen2_vl", "idefics3"])
def test_pictures_side_by_side_need_an_id_between_where_positions_have_three_axes(
    store, tmp_path, kind
):
    """As in transformers, which takes both for one picture and then lacks features."""
    policy = sight.make_policy(store, tmp_path / "model", kind, kind)
    for number in range(2):
        (tmp_path / f"{number}.png").write_bytes(sight.png(number, (32, 32)))
    options = {"policy": str(policy.ref), "prompt": None, "prompt_ids": "prompt_ids"}

    def shown(*between: int):
        row = {"prompt_ids": [7, IMAGE, *between, IMAGE, 8], "images": ["0.png", "1.png"]}
        return render(store, tmp_path, [row], **options).table()["spans"][0]

    assert len(shown(9)) == 2
    if kind == "idefics3":
        assert len(shown()) == 2
        return
    with pytest.raises(ConfigError, match="two of its pictures have no id between them"):
        shown()
    model = load_model(policy, dtype=torch.float32)
    row = {"prompt_ids": [7, *[IMAGE] * 8, 8], "completion_ids": [5]}
    inputs = sight.own_inputs(policy.files.folder, row, [sight.png(n, (32, 32)) for n in range(2)])
    with pytest.raises((RuntimeError, ValueError, StopIteration)):
        model(**inputs)


def test_a_policy_that_sees_nothing_is_told_so(store, tmp_path):
    tiny.make_policy(store)
    (tmp_path / "0.png").write_bytes(sight.png(0))
    with pytest.raises(ConfigError, match="sees no pictures"):
        render(store, tmp_path, [{"prompt": "one", "images": ["0.png"]}], policy="tiny/policy@0")


def test_text_alone_is_written_as_before_by_a_policy_that_sees(store, policy, tmp_path):
    version = render(store, tmp_path, [{"prompt": "one"}], images=None)
    assert version.manifest.kind_schema == "prompts/1"
    assert version.table()["prompt_ids"].to_pylist() == [chat("one")]


def test_turned_pictures_are_turned_as_their_camera_says():
    pixels = Image.new("RGB", (8, 4), "red")
    pixels.paste("blue", (0, 0, 4, 4))
    exif = pixels.getexif()
    exif[0x0112] = 6  # to be turned by 90° clockwise
    turned = open_image(encoded(pixels, exif=exif))
    assert turned.tobytes() == pixels.transpose(Image.Transpose.ROTATE_270).tobytes()


def with_config(store, tmp_path, **fields):
    """A policy that sees, with other fields in its config.json."""
    folder = sight.make_folder(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))
    run = fields.get("model_type", "pairs")
    return small.import_without_weights(PolicyConfig(model=str(folder)), store, run)


def test_positions_of_other_axes_are_refused(store, tmp_path):
    policy = with_config(store, tmp_path, model_type="glm4v")
    with pytest.raises(ConfigError, match="M-RoPE"):
        load_processor(policy, "image")


def test_each_family_of_transformers_with_such_positions_is_known():
    """Also those whose config.json need not say that they have them."""
    folder = Path(transformers.__file__).parent / "models"
    found = {
        path.parent.name
        for path in folder.glob("*/modeling_*.py")
        if "def get_rope_index" in path.read_text()
    }
    assert found > THREE_AXES
    assert found - THREE_AXES <= OTHER_AXES


@pytest.mark.parametrize("name", ["patch_size", "merge_size", "temporal_patch_size"])
def test_a_processor_of_another_model_is_refused_at_import(store, tmp_path, name):
    folder = sight.make_folder(tmp_path / "model", "qwen2_vl")
    path = folder / "preprocessor_config.json"
    about = json.loads(path.read_text())
    path.write_text(json.dumps({**about, name: about[name] * 2}))
    with pytest.raises(ConfigError, match=f"preprocessor_config.json has {name}"):
        run_stage("policy", {"model": str(folder)}, store, into="patches", in_process=True)


def test_an_encoder_decoder_that_sees_is_refused(store, tmp_path):
    """T5Gemma 2: its encoder would be given the ids without the pictures."""
    policy = with_config(store, tmp_path, is_encoder_decoder=True)
    with pytest.raises(ConfigError, match="given text alone"):
        load_processor(policy, "image")


def test_a_processor_that_can_not_be_loaded_here_is_refused_at_import(store, tmp_path):
    """That of Qwen2-VL wants torchvision, for its videos."""
    if importlib.util.find_spec("torchvision"):
        pytest.skip("torchvision is installed")
    folder = sight.make_folder(tmp_path / "model")
    (folder / "processor_config.json").unlink()
    about = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen2VLProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(about))
    with pytest.raises(ConfigError, match=r"its processor: .* requires the Torchvision library"):
        run_stage("policy", {"model": str(folder)}, store, into="torchvision", in_process=True)


@pytest.mark.parametrize(
    ("pixels", "seen"),
    [
        # what is transparent is white, as vLLM's own server has it
        (np.uint8([[[0, 0, 0, 255], [0, 0, 0, 0]]]), [0, 255]),
        # of sixteen bits of grey, the upper eight
        (np.uint16([[0, 255, 256, 511, 65535]]), [0, 0, 1, 1, 255]),
    ],
)
def test_pixels_become_eight_bits_of_three_colours(pixels, seen):
    content = encoded(Image.fromarray(pixels))
    with closing(FileCheck({"image": Limits(4096**2, "a key")})) as check:
        check.require("image", "picture", content)
    assert np.asarray(open_image(content)).tolist() == [[[grey] * 3 for grey in seen]]


def test_a_large_picture_that_was_allowed_is_read():
    """Pillow's own limit is for pictures that were not checked."""
    assert open_image(encoded(Image.new("1", (14_000, 14_000)))).size == (14_000, 14_000)
    assert Image.MAX_IMAGE_PIXELS is not None


def test_of_a_jpeg_with_a_second_frame_the_first_is_read():
    """As phones write them, with a preview or a depth map behind."""
    picture = Image.new("RGB", (16, 8), "red")
    content = encoded(picture, "MPO", save_all=True, append_images=[SMALL])
    with closing(FileCheck({"image": Limits(4096**2, "a key")})) as check:
        check.require("image", "picture", content)
    seen = open_image(content)
    assert seen.size == (16, 8) and seen.getpixel((0, 0)) == (254, 0, 0)


def test_files_are_read_up_to_the_limit_of_the_recipe(tmp_path):
    content = b"x" * (9 * 1024**2)
    (tmp_path / "large.png").write_bytes(content)
    assert cell_of(tmp_path, "large.png") == [{"bytes": content, "path": "large.png"}]
    with pytest.raises(
        ConfigError, match=r"at most 9,000,000 are read \(prompt\.max_image_bytes\)"
    ):
        cell_of(tmp_path, "large.png", max_image_bytes=9_000_000)


def test_ids_hold_one_placeholder_for_each_picture(store, policy, tmp_path):
    (tmp_path / "0.png").write_bytes(sight.png(0))
    rows = [{"prompt_ids": [7, IMAGE, 8], "images": ["0.png"]}]
    version = render(store, tmp_path, rows, into="ids", prompt=None, prompt_ids="prompt_ids")
    (row,) = version.table().to_pylist()
    assert row["prompt_ids"] == [7, *PICTURE, 8]
    assert row["spans"] == [{"modality": "image", "start": 1, "length": 7}]
