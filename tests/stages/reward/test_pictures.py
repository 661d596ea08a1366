"""What scorers are given of pictures: functions PIL images, judges data URLs, other servers
nothing."""

import base64
from pathlib import Path

import pytest

from quiver.schemas.errors import ConfigError
from quiver.stages.core.run.runner import run_stage
from quiver.stages.core.store import Store
from quiver.stages.reward import shards
from tests import sight
from tests.stages.reward.fake_server import FakeServer, reply

SCORE = """
from PIL import Image

def width(images, completions, level):
    assert all(isinstance(image, Image.Image) for row in images for image in row)
    return [float(sum(image.width for image in row)) for row in images]

def compute_score(images, solution_str):
    return float(len(images))

def asks_for_the_column(pictures):
    return [0.0] * len(pictures)
"""
ROWS = [
    {"prompt": "one", "pictures": ["0.png"], "level": 1},
    {"prompt": "two", "pictures": ["1.png", "0.png"], "level": 2},
    {"prompt": "three", "pictures": [], "level": 3},
]


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Store:
    folder = tmp_path_factory.mktemp("pictures")
    store = sight.make_prompts(folder, ROWS, images="pictures")
    (folder / "score.py").write_text(SCORE)
    config = {**sight.GENERATE, "samples_per_prompt": 2}
    run_stage("generate", config, store, in_process=True, **sight.REFS)
    return store


def rewards(store: Store, **config) -> list[float]:
    ref = run_stage("reward", config, store, rollouts="sees/rollouts@1", in_process=True)
    return store.open(ref).table()["reward"].to_pylist()


def test_a_function_gets_pil_images(store):
    """All rows at once, or a row at a time."""
    file = f"{Path(store.url).parent}/score.py"
    assert rewards(store, functions=[{"use": f"{file}:width"}]) == [40, 40, 70, 70, 0, 0]
    verl = {"use": f"{file}:compute_score", "style": "verl"}
    assert rewards(store, functions=[verl]) == [1, 1, 2, 2, 0, 0]


def test_shards_with_pictures_stay_small(store, monkeypatch):
    """They are held in memory."""
    monkeypatch.setattr(shards, "ROWS_PER_SHARD", 4)
    functions = [{"use": f"{Path(store.url).parent}/score.py:width"}]
    options = {"rollouts": "sees/rollouts@1", "into": "small", "in_process": True}
    version = store.open(run_stage("reward", {"functions": functions}, store, **options))
    assert [entry.rows for entry in version.manifest.files] == [4, 2]
    assert version.table()["reward"].to_pylist() == [40, 40, 70, 70, 0, 0]


def test_the_sources_column_is_images_from_then_on(store):
    columns = store.open("sees/prompts@1").table().schema.field("columns").type
    assert [field.name for field in columns] == ["prompt", "level"]
    use = f"{Path(store.url).parent}/score.py:asks_for_the_column"
    with pytest.raises(ConfigError, match="pictures"):
        rewards(store, functions=[{"use": use}])


def behave(asked):
    """As a judge, and as a server of Quiver's own dialect."""
    if "messages" in asked.body:
        message = {"content": "Score: 3"}
        return reply({"choices": [{"message": message, "finish_reason": "stop"}]})
    rows = [{"id": row["id"], "reward": 1.0} for row in asked.body["rows"]]
    return reply({"format": 1, "rows": rows})


@pytest.fixture
def server():
    with FakeServer(behave) as server:
        yield server


def test_a_judge_sees_the_stored_bytes(store, server):
    config = {
        "dialect": "openai-judge",
        "urls": [server.url],
        "model": "judge",
        "range": [0, 10],
    }
    assert rewards(store, servers=[config]) == [3.0] * 6
    contents = [request.body["messages"][0]["content"] for request in server.asked]
    shown = []
    for content in contents:
        if isinstance(content, str):
            shown.append([])
            continue
        *images, text = content
        assert text["type"] == "text" and "QUESTION" in text["text"]
        urls = [image["image_url"]["url"] for image in images]
        assert all(url.startswith("data:image/png;base64,") for url in urls)
        shown.append([base64.b64decode(url.partition(",")[2]) for url in urls])
    first, second = sight.PICTURES
    expected = [[first]] * 2 + [[second, first]] * 2 + [[]] * 2
    assert sorted(shown) == sorted(expected)


def test_pictures_are_no_column_to_send(store, server):
    asks = {"dialect": "quiver", "urls": [server.url], "columns": ["level", "images"]}
    with pytest.raises(ConfigError, match="cannot be sent images"):
        rewards(store, servers=[asks])
    assert server.asked == []


def test_another_server_is_sent_no_pictures(store, server):
    config = {"dialect": "quiver", "urls": [server.url]}
    assert rewards(store, servers=[config]) == [1.0] * 6
    columns = [row["columns"] for request in server.asked for row in request.body["rows"]]
    assert {*map(tuple, map(sorted, columns))} == {("level", "prompt")}
