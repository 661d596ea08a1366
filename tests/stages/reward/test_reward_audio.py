"""What scorers are given of clips: functions samples and their rate, servers nothing; and how people
are shown them."""

import base64
import io
from pathlib import Path

import pytest
import soundfile

from quiver.flows.look.episodes import pieces_of
from quiver.flows.look.joined import open_joined
from quiver.flows.look.templates import clip_url
from quiver.schemas.errors import ConfigError
from quiver.stages.core.run.runner import run_stage
from quiver.stages.core.store import Store
from tests import sight, sound
from tests.stages.reward.fake_server import FakeServer, reply

SCORE = """
import numpy as np

def seconds(audio, completions):
    for clips in audio:
        for samples, rate in clips:
            assert samples.dtype == np.float32 and samples.ndim == 1 and rate == 16_000
    return [sum(len(samples) / rate for samples, rate in clips) for clips in audio]

def needs_images(images):
    return [0.0] * len(images)
"""
ROWS = [
    {"prompt": "one", "audio": ["0.flac"]},
    {"prompt": "two", "audio": ["1.wav", "0.flac"]},
    {"prompt": "three", "audio": []},
]


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Store:
    folder = tmp_path_factory.mktemp("clips")
    store = sound.make_prompts(folder, ROWS)
    (folder / "score.py").write_text(SCORE)
    config = {**sight.GENERATE, "samples_per_prompt": 1}
    run_stage("generate", config, store, in_process=True, **sound.REFS)
    return store


def rewards(store: Store, **config) -> list[float]:
    ref = run_stage("reward", config, store, rollouts="hears/rollouts@1", in_process=True)
    return store.open(ref).table()["reward"].to_pylist()


def test_a_function_gets_samples_and_their_rate(store):
    file = f"{Path(store.url).parent}/score.py"
    found = rewards(store, functions=[{"use": f"{file}:seconds"}])
    assert found == pytest.approx([0.4, 1.1, 0])
    with pytest.raises(ConfigError, match="needs images, and the prompts show none"):
        rewards(store, functions=[{"use": f"{file}:needs_images"}])


def test_a_server_is_sent_no_clips(store):
    def behave(asked):
        rows = [{"id": row["id"], "reward": 1.0} for row in asked.body["rows"]]
        return reply({"format": 1, "rows": rows})

    with FakeServer(behave) as server:
        assert rewards(store, servers=[{"dialect": "quiver", "urls": [server.url]}]) == [1.0] * 3
    columns = [row.get("columns", {}) for request in server.asked for row in request.body["rows"]]
    assert columns and not any("audio" in each for each in columns)


def test_people_are_shown_clips(store):
    (row,) = open_joined(store, "hears/rollouts@1").rows([0])
    lines = [piece.text for piece in pieces_of(row) if piece.name == "clip"]
    assert lines == ["FLAC, 0.4 s, 16,000 Hz, 12.5 kB, 0.flac"]
    for rate in (8_000, sound.RATE):
        url = clip_url({"bytes": sound.stored(sound.noise(0, 30.0, rate), rate=rate)})
        kind, _, content = url.partition(",")
        about = soundfile.info(io.BytesIO(base64.b64decode(content)))
        assert kind == "data:audio/flac;base64"
        assert (about.duration, about.samplerate, about.channels) == (20, sound.RATE, 1)
