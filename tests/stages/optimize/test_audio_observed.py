"""Environments that play clips: to the engine, the trainer and people; what is refused; played again
and branched."""

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForMultimodalLM

from quiver.flows.cli import versions
from quiver.flows.look import stage as report
from quiver.flows.look.gather import gather
from quiver.schemas.errors import ConfigError
from quiver.stages.core.store import Store
from quiver.stages.model.media.decoder import open_clip
from quiver.stages.turns.environment import files_in, for_people, read_answer, read_media
from tests import episodes, sight, sound
from tests.shown import OPTIMIZE, paid, require_end, require_refused, require_told_apart
from tests.stages.optimize.test_images_observed import SAMPLING
from tests.stages.prompt.test_images import encoded
from tests.writing import run_here

GAME = '''
import numpy as np

class Concert:
    """Plays another clip of noise each time, each longer than the last."""

    def clip(self):
        self.count += 1
        random = np.random.default_rng(self.first + self.count)
        return random.uniform(-0.5, 0.5, 3200 + 800 * self.count), 16000

    def reset(self, first):
        self.first, self.count = first, 0
        parts = [{"type": "audio", "audio": self.clip()}, {"type": "text", "text": "Listen."}]
        return [{"role": "user", "content": parts if first else "Nothing yet."}]

    def step(self, turn):
        clips = [self.clip() for _ in range(self.count % 3)]
        reward = len(turn.text) % 5
        return {"text": f"seven {self.count}", "audio": clips, "reward": reward}
'''
ROWS = [
    {"prompt": "What is seven", "audio": ["0.flac"], "first": 5},
    {"prompt": "zero one two", "audio": [], "first": 0},
    {"prompt": "three", "audio": [], "first": 9},
]
PROMPTS = "hears/prompts@2"


def episodes_of(folder, game=GAME, rows=ROWS, rendering=None, **turns):
    """The store, and config and references of episodes that are to be sampled."""
    store = sound.make_prompts(folder, rows)
    (folder / "game.py").write_text(game)
    environment = {"environment": f"{folder}/game.py:Concert"}
    config = {
        "source": str(folder / "rows.jsonl"),
        "prompt": "prompt",
        "audio": "audio",
        "turns": environment,
        **(rendering or {}),
    }
    prompts = run_here("prompt", config, store, policy=sound.REFS["policy"])
    config = {
        **sight.GENERATE,
        "sampling": SAMPLING,
        "turns": {**environment, "max_turns": 3, "max_tokens": 18, "max_audio": 3, **turns},
    }
    return store, config, {"prompts": str(prompts), "policy": sound.REFS["policy"]}


def trained(store: Store, rollouts: str, run: str, **options):
    """What a training on these episodes says of itself."""
    refs = paid(store, rollouts, sound.REFS["policy"])
    made = run_here("optimize", {**OPTIMIZE, **options}, store, into=run, **refs)
    return store.open(made).manifest.metrics


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    store, config, refs = episodes_of(tmp_path_factory.mktemp("concert"))
    return store, str(run_here("generate", config, store, **refs)), config


def test_what_was_played_is_saved_where_its_ids_stand(saved):
    store, rollouts, _ = saved
    version = store.open(rollouts)
    assert version.manifest.kind_schema == "rollouts/4" and version.manifest.models[0].processor
    prompts = store.open(PROMPTS).table()
    assert [len(clips) for clips in prompts["audio"].to_pylist()] == [2, 0, 1]
    num_played = 0
    for row in version.table().to_pylist():
        assert row["images"] is None
        clips = row["audio"] or []
        seconds = [len(open_clip(clip["bytes"])[0]) for clip in clips]
        assert seconds == sorted(set(seconds)), "each clip of an episode is longer than the last"
        for number, turn in enumerate(row["turns"]):
            played = [clip for clip in clips if clip["turn"] == number]
            places = [n for n, id in enumerate(turn["observation_ids"]) if id == sound.AUDIO]
            assert places == [
                n for c in played for n in range(c["start"], c["start"] + c["length"])
            ]
            if number + 1 < len(row["turns"]):
                assert turn["observation"].count("[clip ") == len(played)
            num_played += len(played)
    assert num_played > 6


def test_the_engines_logprobs_are_transformers_own(saved):
    """By the whole model, which puts features where the ids of clips are, so up to a sampled one."""
    store, rollouts, _ = saved
    folder = store.open(sound.REFS["policy"]).files.folder
    model = AutoModelForMultimodalLM.from_pretrained(folder).eval()
    asked = {row["group_id"]: row["audio"] for row in store.open(PROMPTS).table().to_pylist()}
    num_compared = 0
    for row in store.open(rollouts).table().to_pylist():
        if sound.AUDIO in row["completion_ids"]:
            continue
        ((ids, places),) = episodes.sequences_of(row)
        clips = [clip["bytes"] for clip in [*asked[row["group_id"]], *(row["audio"] or [])]]
        whole = {"prompt_ids": ids, "completion_ids": []}
        with torch.no_grad():
            logits = model(**sound.own_inputs(folder, whole, clips)).logits[0]
        table = (logits / row["temperature"]).log_softmax(-1)
        own = [float(table[place - 1, ids[place]]) for place in places]
        np.testing.assert_allclose(own, row["old_logprobs"], atol=3e-5)
        num_compared += len(own)
    assert num_compared > 30


@pytest.mark.parametrize("packing", ["shared", "packed", "single"])
def test_the_trainer_hears_what_the_engine_heard(saved, packing):
    store, rollouts, _ = saved
    metrics = trained(store, rollouts, packing, packing=packing)
    assert metrics["packing"] == packing
    assert metrics["audit"]["max_gap"] < 1e-5 and metrics["audit"]["rollouts"] > 4


def test_another_clip_is_another_answer(saved, tmp_path):
    store, rollouts, _ = saved
    (tmp_path / "other.py").write_text(GAME.replace("-0.5, 0.5", "-0.4, 0.4"))
    require_told_apart(store, rollouts, f"{tmp_path}/other.py:Concert", "[clip ")


def test_a_branch_plays_on_from_what_was_heard_before(saved):
    store, rollouts, config = saved
    branch = store.open(run_here("branch", {"turn": 2}, store, into="cut", rollouts=rollouts))
    of_rollouts = {row["rollout_id"]: row for row in store.open(rollouts).table().to_pylist()}
    asked = {row["group_id"]: row["audio"] for row in store.open(PROMPTS).table().to_pylist()}
    rows = branch.table().to_pylist()
    for row in rows:
        rollout = of_rollouts[row["group_id"].removesuffix(".2")]
        heard = [*asked[rollout["group_id"]]]
        heard += [clip for clip in rollout["audio"] or [] if clip["turn"] < 2]
        assert [clip["bytes"] for clip in row["audio"]] == [clip["bytes"] for clip in heard]
        ids = [id for s in row["spans"] for id in row["prompt_ids"][s["start"] :][: s["length"]]]
        assert len(row["spans"]) == len(heard) and set(ids) <= {sound.AUDIO}
    assert any(len(row["spans"]) > 2 for row in rows)
    config = {**config, "samples_per_prompt": 2}
    refs = {"prompts": str(branch.ref), "policy": sound.REFS["policy"]}
    played = str(run_here("generate", config, store, into="cut", **refs))
    assert "environment_error" not in store.open(played).table()["end_reason"].to_pylist()
    assert trained(store, played, "cut")["audit"]["max_gap"] < 1e-5


@pytest.mark.parametrize(
    "change, turns, rendering, end, why",
    [
        ({}, {"max_audio": 0}, {}, "environment_error", "set generate.turns.max_audio"),
        ({}, {"max_audio": 2}, {}, "max_audio", None),
        ({"3200": "40_000"}, {}, {}, "environment_error", "is longer than the 2 seconds"),
        (
            {},
            {},
            {"max_audio_seconds": 0.3},
            "environment_error",
            "its clip 2 is longer than the 0.3 seconds that are read (prompt.max_audio_seconds)",
        ),
        (
            {},
            {},
            {"max_audio_bytes": 9_000},
            "environment_error",
            "bytes, at most 9,000 are read (prompt.max_audio_bytes)",
        ),
        ({"[self.clip()": "[b'no clip'"}, {}, {}, "environment_error", "is not a clip of type WAV"),
        ({"[self.clip()": "['a path'"}, {}, {}, "environment_error", "a clip is str, expected"),
    ],
)
def test_what_can_not_be_played_ends_the_episode(tmp_path, change, turns, rendering, end, why):
    """Alone, and told why."""
    game = GAME.replace("if first else", "if first > 9 else").replace("self.count % 3", "2")
    for old, new in change.items():
        assert old in game
        game = game.replace(old, new)
    rows = [{"prompt": "five", "audio": [], "first": 1}]
    store, config, refs = episodes_of(tmp_path, game, rows, rendering, **turns)
    require_end(store, config, refs, end, why)


def test_who_hears_nothing_is_not_asked(tmp_path):
    store, config, refs = episodes_of(tmp_path, rows=[{"prompt": "one", "audio": [], "first": 0}])
    found = require_refused(store, tmp_path, config, refs, "hears no clips")
    assert found == "generate.turns.max_audio"


def test_a_picture_for_a_policy_that_only_hears_is_refused(tmp_path):
    """The rows have clips, so the processor is there already."""
    game = GAME.replace('"audio", "audio": self.clip()', f'"image", "image": {sight.png(0)!r}')
    with pytest.raises(ConfigError, match="hears/policy@0 reads no pictures"):
        episodes_of(tmp_path, game)


def test_people_hear_what_was_played(saved, capsys):
    store, rollouts, _ = saved
    trained(store, rollouts, "hears")
    page = report.render(store, gather(store, "hears"))
    assert page.count('<audio controls src="data:audio/flac;base64,') > 9
    versions.show(rollouts, 3, store.url)
    shown = capsys.readouterr().out
    assert "clip        FLAC, 0.4 s" in shown, "of the row"
    assert "clip        WAV, 0.25 s" in shown, "of the opening"
    assert "clip        WAV, 0.3 s" in shown, "of the first answer"


@pytest.mark.parametrize(
    ("modality", "content"),
    [
        *(("audio", sound.stored(sound.noise(0, 0.1), kind)) for kind in ("WAV", "FLAC", "MP3")),
        *(("image", encoded(Image.new("RGB", (8, 8)), kind)) for kind in ("PNG", "JPEG", "WEBP")),
    ],
)
def test_bytes_of_a_tool_are_told_apart(modality, content):
    assert files_in([read_answer(content)]) == {modality: [content]}


def test_what_a_tool_may_return():
    clip = sound.noise(0, 0.1), sound.RATE
    message = read_answer([{"type": "audio", "audio": clip}, "heard"])
    assert message["content"] == "heard"
    ((played, rate),) = map(open_clip, files_in([message])["audio"])
    np.testing.assert_allclose(played, clip[0], atol=1 / 2**15)
    assert rate == sound.RATE
    assert for_people([message]).startswith("[clip ")
    assert read_media("audio", [clip]) == read_media("audio", [list(clip)]), "the same bytes"
    with pytest.raises(ValueError, match="a clip is ndarray, expected"):
        read_media("audio", clip)
