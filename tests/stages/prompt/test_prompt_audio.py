"""Prompts with clips: what stands where, how clips are decoded, which are refused, and prompts that
are given as ids beside their media."""

import base64
import io
import struct
from contextlib import closing

import datasets
import numpy as np
import pytest
import soundfile
from transformers import GlmAsrProcessor, WhisperFeatureExtractor

from quiver.schemas.errors import ConfigError
from quiver.stages.core.run.runner import run_stage
from quiver.stages.core.store import Store
from quiver.stages.model.media.checking import FileCheck, Limits
from quiver.stages.model.media.decoder import open_clip, try_clip
from quiver.stages.model.media.processor import Processor, load_processor
from quiver.stages.prompt.config import Config
from quiver.stages.prompt.media import read_cell
from tests import sight, sound

TOKENS = sight.words()
POLICY = sound.REFS["policy"]


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Store:
    folder = tmp_path_factory.mktemp("sound")
    store = Store(folder / "store")
    model = str(sound.make_folder(folder / "model"))
    run_stage("policy", {"model": model}, store, into="hears", in_process=True)
    return store


def render(store: Store, folder, rows, policy: str = POLICY, **config) -> list[dict]:
    for name, content in zip(sound.NAMES, sound.CLIPS, strict=True):
        (folder / name).write_bytes(content)
    config = {"source": sight.write_rows(folder, rows), "audio": "audio", **config}
    ref = run_stage("prompt", config, store, policy=policy, into="asked", in_process=True)
    return store.open(ref).table().to_pylist()


def ids(text: str) -> list[int]:
    return TOKENS(text, add_special_tokens=False).input_ids


def features(seconds: float) -> int:
    """How many Qwen2-Audio makes: of 100 frames a second each fourth."""
    frames = round(100 * seconds)
    return ((frames - 1) // 2 + 1 - 2) // 2 + 1


def test_clips_stand_where_the_chat_shows_them(store, tmp_path):
    parts = [{"type": "text", "text": "zero "}, {"type": "audio"}, {"type": "text", "text": " one"}]
    chat = [{"role": "user", "content": parts}]
    rows = [
        {"messages": chat, "audio": ["0.flac"]},
        {"messages": [{"role": "user", "content": "six <image>"}], "audio": ["1.wav", "0.flac"]},
        {"messages": [{"role": "user", "content": "five"}], "audio": None},
    ]
    found = render(store, tmp_path, rows)
    short, long = features(0.4), features(0.7)
    lead = len(ids("<|im_start|>user\n"))
    spans = [[(at["modality"], at["start"], at["length"]) for at in row["spans"]] for row in found]
    assert spans == [
        [("audio", lead + len(ids("zero ")), short)],
        [("audio", lead, long), ("audio", lead + long, short)],
        [],
    ]
    counts = [row["prompt_ids"].count(sound.AUDIO) for row in found]
    assert counts == [short, long + short, 0]  # a typed mark stays text
    assert [[clip["bytes"] for clip in row["audio"]] for row in found] == [
        [sound.CLIPS[0]],
        [*reversed(sound.CLIPS)],
        [],
    ]


def test_a_cell_is_what_datasets_stores_or_bytes_or_base64(store, tmp_path):
    clip = {"bytes": sound.CLIPS[1], "path": "one.wav"}
    rows = datasets.Dataset.from_dict({"prompt": ["one"], "audio": [clip]})
    rows.cast_column("audio", datasets.Audio()).save_to_disk(tmp_path / "saved")
    config = {"source": f"datasets:{tmp_path}/saved", "prompt": "prompt", "audio": "audio"}
    ref = run_stage("prompt", config, store, policy=POLICY, into="saved", in_process=True)
    (saved,) = store.open(ref).table().to_pylist()
    text = base64.b64encode(sound.CLIPS[1]).decode()
    (written,) = render(store, tmp_path, [{"prompt": "one", "audio": text}], prompt="prompt")
    assert saved["audio"] == [clip] and written["audio"] == [{**clip, "path": None}]


def encoded(samples, kind="WAV", rate=sound.RATE, **options) -> bytes:
    return sound.stored(samples, kind, rate, **options)


SECOND = sound.noise(5, 1.0)
HOSTILE = {
    "empty": (b"", "is not a clip of type WAV, FLAC, MP3"),
    "text": (b"RIFF and no more", "is not a clip of type WAV, FLAC, MP3"),
    "ogg": (encoded(SECOND, "OGG"), "is not a clip of type WAV, FLAC, MP3, but OGG"),
    "long": (
        encoded(np.zeros(sound.RATE * 40, np.float32), "FLAC"),
        "longer than the 30 seconds that are read (a key)",
    ),
    "large": (encoded(sound.noise(0, 20.0)), "at most 500,000 are read (prompt.max_audio_bytes)"),
    "no samples": (encoded(SECOND[:0]), "has no samples"),
    "channels": (encoded(np.zeros((8, 3), np.float32)), "has 3 channels at 16,000 Hz"),
    "rate": (encoded(SECOND[:99], rate=500_000), "1 channels at 500,000 Hz"),
    "not finite": (
        encoded(np.float32([0, np.nan]), subtype="FLOAT"),
        "has samples that are no finite numbers",
    ),
}


def with_number(content: bytes, at: int, number: int, kind: str) -> bytes:
    """The content with another number there."""
    field = struct.pack(kind, number)
    return content[:at] + field + content[at + len(field) :]


KILOBITS = (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320)


def with_padded_frames(content: bytes) -> bytes:
    """An MP3 at 44,100 Hz whose frames are a byte longer, and say so."""
    frames = []
    while content:
        size = 144_000 * KILOBITS[content[2] >> 4] // 44_100
        frames.append(content[:2] + bytes([content[2] | 2]) + content[3:size] + b"\0")
        content = content[size:]
    return b"".join(frames)


WAV = encoded(SECOND)
DATA = WAV.index(b"data") + 4
ODD_WAV = WAV[: DATA - 4] + b"note\3\0\0\0abc\0" + WAV[DATA - 4 :]
"""With a chunk of three bytes, and one that fills it up, before the samples."""
FLAC = encoded(SECOND, "FLAC")
MP3 = encoded(SECOND, "MP3")
FRAMES = MP3.index(b"Xing") + 8
LOUD_THEN_QUIET = np.concatenate([sound.noise(7, 3.0), sound.tone(200, 3.0)])
VBR = encoded(LOUD_THEN_QUIET, "MP3", bitrate_mode="VARIABLE")
UNTAGGED = VBR[VBR.index(VBR[:2], 8) :]
"""Without its first frame, which holds the number of frames."""
NOT_WHOLE = {
    "half a WAV": (WAV[: len(WAV) // 2], "is cut: its header says 32,000 bytes of samples"),
    "half a WAV with an odd chunk": (ODD_WAV[:9000], "is cut: its header says 32,000 bytes"),
    "WAV of 2^31": (with_number(WAV, DATA, 2**31, "<I"), "is cut: its header says 2,147,483,648"),
    "half a FLAC": (FLAC[: len(FLAC) // 2], "is cut or damaged"),
    "FLAC of too few": (with_number(FLAC, 22, 2000, ">I"), "other samples than its header says"),
    "FLAC of too many": (with_number(FLAC, 22, 80_000, ">I"), "is cut or damaged"),
    "FLAC of unknown length": (with_number(FLAC, 22, 0, ">I"), "does not say how long it is"),
    "half an MP3": (MP3[: len(MP3) // 2], "encode it again, or as FLAC"),
    "half an MP3 without number": (UNTAGGED[: len(UNTAGGED) // 2], "encode it again"),
    "MP3 of 3 frames": (with_number(MP3, FRAMES, 3, ">I"), "says 0.11 s, its frames are 1.0"),
    "MP3 of 2^31 frames": (with_number(MP3, FRAMES, 2**31, ">I"), "its frames are 1.0"),
    "VBR without number": (UNTAGGED, "s, its frames are 6."),
    "two MP3": (MP3 + MP3, "its frames are 2."),
}


@pytest.mark.parametrize("name", NOT_WHOLE)
def test_clips_that_would_be_heard_in_part_are_refused(name):
    content, message = NOT_WHOLE[name]
    with pytest.raises(ValueError) as caught:
        try_clip(content, 30, "a key")
    assert message in str(caught.value)


ID3 = b"ID3\x03\0\0\0\0\1\x0a" + b"\0" * 138
WHOLE = {
    "streamed WAV": with_number(WAV, DATA, 2**32 - 1, "<I"),
    "WAV with a tag": WAV + ID3,
    "FLAC behind ID3": ID3 + FLAC,
    "MP3 behind ID3, before ID3v1": ID3 + MP3 + b"TAG" + b"\0" * 125,
    "MP3 behind two ID3": ID3 + ID3 + MP3,
    "MP3 of padded frames": with_padded_frames(encoded(sound.noise(8, 1.0, 44_100), "MP3", 44_100)),
    "WAV with an odd chunk": ODD_WAV,
    "WAV of several blocks": encoded(sound.noise(8, 1.0, 192_000), rate=192_000),
    **{f"FLAC {depth}": encoded(SECOND, "FLAC", subtype=depth) for depth in ("PCM_S8", "PCM_24")},
    "stereo": encoded(np.stack([SECOND, SECOND], 1), "FLAC"),
    "stereo MP3": encoded(np.stack([SECOND, SECOND], 1), "MP3"),
    **{
        f"MP3 {mode} {rate}": encoded(sound.noise(8, 1.0, rate), "MP3", rate, bitrate_mode=mode)
        for mode in ("CONSTANT", "VARIABLE")
        for rate in (8_000, 11_025, 22_050, 24_000, 32_000, 44_100, 48_000)
    },
}


@pytest.mark.parametrize("name", WHOLE)
def test_clips_are_heard_to_their_end(name):
    try_clip(WHOLE[name], 30, "a key")
    samples, rate = open_clip(WHOLE[name])
    assert len(samples) / rate == pytest.approx(1.0, abs=0.01)


def test_hostile_clips_are_refused():
    with closing(FileCheck({"audio": Limits(30, "a key", 500_000)})) as check:
        for name, (content, message) in HOSTILE.items():
            with pytest.raises(ConfigError) as caught:
                check.require("audio", name, content)
            assert caught.value.object == name and message in caught.value.message
        check.require("audio", "good", encoded(SECOND))
    slow = encoded(np.zeros(sound.RATE * 3000, np.float32), "FLAC")
    with (
        closing(FileCheck({"audio": Limits(10**6, "a key", decode_seconds=0.001)})) as check,
        pytest.raises(
            ConfigError, match=r"was not decoded within 0\.001 seconds \(prompt\.decode_seconds"
        ),
    ):
        check.require("audio", "slow", slow)


def test_a_clip_at_its_limits_is_read():
    with closing(FileCheck({"audio": Limits(1.0, "a key", len(WAV))})) as check:
        check.require("audio", "a second", WAV)


@pytest.mark.parametrize("rate", [8_000, 16_000, 44_100, 48_000])
@pytest.mark.parametrize("kind", ["WAV", "FLAC", "MP3"])
def test_a_clip_is_heard_at_the_rate_of_the_model(kind, rate):
    """Half a second of whole periods of a tone, on the left; the right is silent."""
    tone = 0.5 * np.sin(2 * np.pi * 1000 * np.arange(rate // 2) / rate)
    content = encoded(np.stack([tone, np.zeros_like(tone)], 1), kind, rate)
    with closing(FileCheck({"audio": Limits(1, "a key")})) as check:
        check.require("audio", "tone", content)
    samples, _ = open_clip(content, sound.RATE)
    assert samples.dtype == np.float32
    if kind == "MP3":  # it may begin a little later
        spectrum = np.abs(np.fft.rfft(samples[:8000]))
        assert spectrum.argmax() == 500 and np.abs(samples).max() < 0.4
        return
    expected = 0.25 * np.sin(2 * np.pi * 1000 * np.arange(8000) / sound.RATE)
    np.testing.assert_allclose(samples, expected, atol=2e-4)
    own, own_rate = open_clip(content)
    assert own_rate == rate and len(own) == rate // 2
    assert open_clip(content, sound.RATE)[1] == sound.RATE


def test_a_clip_that_the_policy_would_cut_is_refused(store, tmp_path):
    (tmp_path / "long.wav").write_bytes(encoded(sound.noise(0, 2.5)))
    with pytest.raises(ConfigError, match="clip 1: is longer than the 2 seconds") as refusal:
        render(store, tmp_path, [{"prompt": "one", "audio": "long.wav"}], prompt="prompt")
    assert "row 1 of" in refusal.value.object
    assert refusal.value.message.endswith("(the policy hears no more)")


def test_a_clip_too_short_for_a_feature_is_refused(store, tmp_path):
    (tmp_path / "short.wav").write_bytes(encoded(SECOND[:80]))
    with pytest.raises(ConfigError, match="a clip is too short"):
        render(store, tmp_path, [{"prompt": "one", "audio": "short.wav"}], prompt="prompt")


def test_a_policy_that_hears_nothing_is_refused(store, tmp_path):
    sight.make_policy(store, tmp_path / "sees")
    with pytest.raises(ConfigError, match="hears no clips") as refusal:
        render(
            store, tmp_path, [{"prompt": "one", "audio": "1.wav"}], "sees/policy@0", prompt="prompt"
        )
    assert "glmasr or qwen2_audio" in refusal.value.next


@pytest.mark.parametrize("policy", [POLICY, "sees/policy@0"])
def test_pictures_and_clips_together_are_refused(store, tmp_path, policy):
    """Each model type that is known reads one of them."""
    sight.make_policy(store, tmp_path / "sees")
    (tmp_path / "0.png").write_bytes(sight.png(0))
    rows = [{"prompt": "one", "audio": "1.wav", "images": "0.png"}]
    with pytest.raises(ConfigError, match=f"{policy} does not read both pictures and clips"):
        render(store, tmp_path, rows, policy, prompt="prompt", images="images")


def test_ids_hold_one_placeholder_for_each_clip(store, tmp_path):
    row = {"prompt_ids": [7, sound.AUDIO, 8, sound.AUDIO, 9], "audio": ["0.flac", "1.wav"]}
    (found,) = render(store, tmp_path, [row], prompt_ids="prompt_ids")
    short, long = features(0.4), features(0.7)
    marks = [sound.AUDIO]
    assert found["prompt_ids"] == [7, *marks * short, 8, *marks * long, 9]
    assert [at["start"] for at in found["spans"]] == [1, 2 + short]
    for wrong in ([7, 8], [7, *marks * 3]):
        with pytest.raises(
            ConfigError, match=r"placeholders of \d clips, and there are 2"
        ) as refusal:
            render(store, tmp_path, [{**row, "prompt_ids": wrong}], prompt_ids="prompt_ids")
        assert f"one id {sound.AUDIO} for each" in refusal.value.next


def test_the_processor_is_transformers_own(store):
    """Its ids and spectrum, of a clip that is decoded here."""
    processor = load_processor(store.open(POLICY), "audio")
    folder = store.open(POLICY).files.folder
    row = {"prompt_ids": [], "completion_ids": []}
    own = sound.own_inputs(folder, row, sound.CLIPS[1:])
    seen = processor.read("audio", sound.CLIPS[1])
    assert seen.ids.tolist() == [sound.AUDIO] * features(0.7)
    assert seen.inputs.keys() == own.keys() - {"input_ids"}
    for name, array in seen.inputs.items():
        assert np.array_equal(array, own[name].numpy())
    assert soundfile.info(io.BytesIO(sound.CLIPS[1])).samplerate == sound.RATE


def test_a_clip_of_another_rate_has_the_features_of_its_length(store):
    processor = load_processor(store.open(POLICY), "audio")
    content = encoded(sound.noise(3, 0.5, 8_000), rate=8_000)
    assert len(processor.read("audio", content).ids) == features(0.5)


def test_a_clip_fills_whole_windows_at_most():
    """GlmAsr's processor leaves out what is in no whole window, here of two seconds."""
    extractor = WhisperFeatureExtractor(feature_size=16, chunk_length=2, return_attention_mask=True)
    own = GlmAsrProcessor(extractor, TOKENS, max_audio_len=5, audio_token="<image>")
    processor = Processor(own, "hears")
    clips = [encoded(sound.noise(0, seconds)) for seconds in (3.0, 4.0, 5.0)]
    lengths = [len(processor.read("audio", clip).ids) for clip in clips]
    assert lengths == [37, 50, 50]  # of 100 frames a second each eighth
    assert processor.most_seconds == 4


def test_a_placeholder_among_ids_needs_a_clip(store, tmp_path):
    """Without data.audio, the model would read it as an ordinary id."""
    rows = [{"prompt_ids": [7, sound.AUDIO, 8]}]
    with pytest.raises(ConfigError, match=f"column prompt_ids holds {sound.AUDIO}") as refusal:
        render(store, tmp_path, rows, prompt_ids="prompt_ids", audio=None)
    assert "data.images or data.audio" in refusal.value.next


@pytest.mark.parametrize("rate", [8_000, 16_000, 44_100])
@pytest.mark.parametrize("has_checksum", [True, False])
def test_every_mp3_may_be_base64(rate, has_checksum):
    content = bytearray(UNTAGGED if rate == 16_000 else encoded(SECOND, "MP3", rate))
    content[1] = content[1] & 0xFE | (not has_checksum)
    text = base64.b64encode(content).decode()
    config = Config(source="rows.jsonl", prompt="prompt", audio="audio")
    assert read_cell("audio", "row 1", text, config) == [{"bytes": bytes(content), "path": None}]


@pytest.mark.parametrize("cell", [[0.0, 0.5], [[0.0, 0.5], 16_000]], ids=["samples", "and rate"])
def test_samples_in_a_row_are_to_be_written(cell):
    config = Config(source="rows.jsonl", prompt="prompt", audio="audio")
    with pytest.raises(ConfigError, match=r"or \{bytes, path\}: write samples with soundfile"):
        read_cell("audio", "row 1", cell, config)
