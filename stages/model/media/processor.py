"""Converts media to a model's inputs with the policy's own processor: prompt ids and features.

    processor = load_processor(store.open("arith/policy@0"))
    seen = processor.read("image", content)     # the bytes of a PNG, JPEG or WebP
    seen.ids                                    # [7] ids that represent it in the prompt
    seen.inputs                                 # {"pixel_values": [1, 1, 3, 32, 32], …}

Not of the spine: only prompts with pictures or clips need it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

from quiver.schemas.errors import ConfigError
from quiver.schemas.prompts import MEDIA
from quiver.stages.core.store import Version
from quiver.stages.model import checkpoints
from quiver.stages.model.families import (
    HEARING,
    OTHER_AXES,
    THREE_AXES,
    GridProcessor,
    load_folders_processor,
)
from quiver.stages.model.folder import load_errors
from quiver.stages.model.media import WORDS
from quiver.stages.model.media.decoder import open_clip, open_image

_NOT_FEATURES = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"})


class Span(NamedTuple):
    """Position of a medium's ids in a prompt."""

    modality: str
    start: int
    length: int


@dataclass(frozen=True)
class Seen:
    """Media of one modality, pictures or clips, as model inputs."""

    ids: np.ndarray
    """[n] int32: ids that represent them in the prompt."""
    inputs: dict[str, np.ndarray]
    """Arguments of the model's function that makes their features."""


class Processor:
    """The processor of one policy."""

    def __init__(self, processor: Any, name: str) -> None:
        """Wrap `processor`, of transformers.

        Raises ConfigError about the policy `name` if it names no token for any modality.
        """
        self._processor = processor
        self.name = name
        tokens = {modality: getattr(processor, f"{modality}_token", None) for modality in MEDIA}
        self._tokens = {each: token for each, token in tokens.items() if isinstance(token, str)}
        """By modality, the text that a chat template writes in place of a medium."""
        if not self._tokens:
            raise ConfigError(
                name,
                f"its processor, a {type(processor).__name__}, names no image_token or audio_token",
                next="take a policy whose processor does",
            )
        self.placeholder_ids: dict[str, int] = {
            modality: processor.tokenizer.convert_tokens_to_ids(token)
            for modality, token in self._tokens.items()
        }
        """By modality, the id that an engine gets for a medium; the engine expands it itself."""

    def expand(
        self, name: str, ids: Sequence[int], contents: Mapping[str, Sequence[bytes]]
    ) -> tuple[list[int], list[Span]]:
        """Replace each medium's placeholder in rendered `ids` by the medium's own ids.

        Returns:
            The expanded ids, and the span of each medium in them.

        Raises:
            ConfigError: About `name`: `ids` do not have one placeholder for each of `contents`.
        """
        for modality in contents.keys() - self.placeholder_ids.keys():
            raise ConfigError(
                name,
                f"{self.name} reads no {WORDS[modality]}s",
                next="take a model that does, or leave them out",
            )
        expanded: list[int] = []
        spans = []
        modalities = {self.placeholder_ids[modality]: modality for modality in contents}
        unread = {modality: list(files) for modality, files in contents.items()}
        shown = Counter(modalities[id] for id in ids if id in modalities)
        for modality, files in contents.items():
            if shown[modality] != len(files):
                raise ConfigError(
                    name,
                    f"its ids have the placeholders of {shown[modality]} {WORDS[modality]}s, and "
                    f"there are {len(files)}",
                    next="set prompt.template to one that shows each part of type "
                    f"{modality}, or give one id {self.placeholder_ids[modality]} for each",
                )
        for id in ids:
            if id not in modalities:
                expanded.append(id)
                continue
            seen = self.read(modalities[id], unread[modalities[id]].pop(0))
            if id not in seen.ids:
                raise ConfigError(
                    name,
                    f"a {WORDS[modalities[id]]} is too short: {self.name} makes no feature of it",
                    next="take the row out of the source",
                )
            start = len(expanded)
            is_adjacent = bool(spans) and spans[-1].start + spans[-1].length == start
            if is_adjacent and isinstance(self._processor, GridProcessor):
                raise ConfigError(
                    name,
                    "two of its pictures have no id between them, by which models with positions "
                    "of three axes tell pictures apart",
                    next="put the model's marks of pictures, or a text, between them",
                )
            spans.append(Span(modalities[id], start, len(seen.ids)))
            expanded += seen.ids.tolist()
        return expanded, spans

    @property
    def most_seconds(self) -> float:
        """Length of the longest clip that it does not cut; infinite if it reads none."""
        extractor = getattr(self._processor, "feature_extractor", None)
        if extractor is None:
            return math.inf
        window = extractor.chunk_length
        most = getattr(self._processor, "max_audio_len", window)  # GlmAsr's has several windows
        return most // window * window

    def open(self, modality: str, content: bytes) -> Any:
        """Return a decoded picture, or a clip's samples at the rate that the model hears. `content`
        must have been checked."""
        if modality == "image":
            return open_image(content)
        return open_clip(content, self._processor.feature_extractor.sampling_rate)[0]

    def read(self, modality: str, *contents: bytes) -> Seen:
        """Return the model inputs of media that follow one another in one prompt.

        Raises ConfigError if the processor cannot read them.
        """
        token = self._tokens[modality]
        opened = [self.open(modality, content) for content in contents]
        if modality == "image":
            calls = [{"text": [token * len(opened)], "images": [opened], "return_tensors": "np"}]
        else:  # GlmAsr's takes one clip for each text, and gives only tensors
            rate = self._processor.feature_extractor.sampling_rate
            about = {"text": [token], "sampling_rate": rate, "return_tensors": "pt"}
            calls = [{**about, "audio": [clip]} for clip in opened]
        with load_errors(f"processor of {self.name}"):
            answers = [self._processor(**call, add_special_tokens=False) for call in calls]
        inputs = {
            name: np.concatenate([np.asarray(answer[name]) for answer in answers])
            for name in answers[0].keys() - _NOT_FEATURES
        }
        ids = [np.asarray(answer["input_ids"], np.int32)[0] for answer in answers]
        return Seen(np.concatenate(ids), inputs)


def load_processor(version: Version, *modalities: str) -> Processor:
    """Load the processor of a policy, from its folder alone, with hashes checked.

    Raises ConfigError if it does not read all of `modalities`, if it needs a package that is not
    installed, or if the model gives pictures positions of a kind that is not known here.
    """
    name = str(version.ref)
    require_senses(name, version, modalities)
    if "audio" in modalities and not find_spec("soundfile"):
        raise ConfigError(
            "data.audio", "soundfile is not installed here", next="pip install 'quiver-rl[audio]'"
        )
    if "image" in modalities and checkpoints.is_encoder_decoder(version):
        raise ConfigError(
            name,
            "is an encoder-decoder model, which is given text alone here",
            next="take a decoder-only vision-language model, or leave data.images out",
        )
    features_merged(version)
    checkpoints.verify_carried(version)
    return Processor(load_folders_processor(version.files.folder, name), name)


def require_senses(name: str, policy: Version, modalities: Iterable[str]) -> None:
    """Raise ConfigError about `name` unless the policy reads media of these modalities."""
    asked = set(modalities)
    missing = asked - set(checkpoints.modalities(policy))
    if missing and len(asked) > 1:
        raise ConfigError(
            name,
            f"{policy.ref} does not read both pictures and clips, and no model type that is known "
            "here does",
            next="leave data.images and max_images out, or data.audio and max_audio",
        )
    if "image" in missing:
        raise ConfigError(
            name,
            f"{policy.ref} sees no pictures: it has no vision_config, or no processor",
            next="take a vision-language model, or leave data.images out",
        )
    if missing:
        raise ConfigError(
            name,
            f"{policy.ref} hears no clips, or its type is not known here",
            next=f"take a model of type {' or '.join(sorted(HEARING))}, with its processor, or "
            "leave data.audio out",
        )


def token_ids(version: Version) -> list[int]:
    """Return the ids that mark features' positions in a prompt. Raises ConfigError."""
    config = checkpoints.model_config(version)
    fields = [f"{modality}_token_{kind}" for modality in MEDIA for kind in ("id", "index")]
    ids = [config[field] for field in fields if type(config.get(field)) is int]
    if not ids:
        raise ConfigError(
            str(version.ref),
            "config.json names no image_token_id or audio_token_id",
            next="import the model again, as another run",
        )
    return ids


def features_merged(version: Version) -> int | None:
    """Return how many patches a side make one feature, if pictures have positions of three axes.

    Returns None if the model counts ids. Raises ConfigError if it counts otherwise.
    """
    config = checkpoints.model_config(version)
    model_type = config["model_type"]
    if model_type in OTHER_AXES:
        raise ConfigError(
            str(version.ref),
            f"a model of type {model_type} gives pictures positions of several axes (M-RoPE), "
            "which are known here for " + ", ".join(sorted(THREE_AXES)),
            next="take a model of one of these types, or one with plain positions",
        )
    if model_type not in THREE_AXES:
        return None
    return config["vision_config"].get("spatial_merge_size", 2)
