"""Converts pictures to a model's inputs with the policy's own processor: prompt ids and pixels.

    processor = load_processor(store.open("arith/policy@0"))
    seen = processor.read(content)      # the bytes of a PNG, JPEG or WebP
    seen.ids                            # [7] ids that represent it in the prompt
    seen.inputs                         # {"pixel_values": [1, 1, 3, 32, 32], …}

Not of the spine: only prompts with pictures need it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from quiver.schemas.errors import ConfigError
from quiver.stages.core.store import Version
from quiver.stages.model import checkpoints
from quiver.stages.model.families import THREE_AXES, load_folders_processor
from quiver.stages.model.folder import load_errors
from quiver.stages.model.images.decoder import open_image

if TYPE_CHECKING:
    from PIL.Image import Image

_NOT_PIXELS = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"})


class Span(NamedTuple):
    """Position of a picture's ids in a prompt."""

    start: int
    length: int


@dataclass(frozen=True)
class Seen:
    """Pictures as model inputs."""

    ids: np.ndarray
    """[n] int32: ids that represent them in the prompt."""
    inputs: dict[str, np.ndarray]
    """Arguments of the model's `get_image_features`, for these pictures only."""


class Processor:
    """The processor of one policy."""

    def __init__(self, processor: Any, name: str) -> None:
        """Wrap `processor`, of transformers.

        Raises ConfigError about the policy `name` if it names no token for a picture.
        """
        self._processor = processor
        self.name = name
        self.token = getattr(processor, "image_token", None)
        """Text that a chat template writes in place of a picture."""
        if not isinstance(self.token, str):
            raise ConfigError(
                name,
                f"its processor, a {type(processor).__name__}, names no image_token",
                next="take a policy whose processor does",
            )
        self.placeholder_id = processor.tokenizer.convert_tokens_to_ids(self.token)
        """Id that an engine gets for a picture; the engine expands it itself."""

    def read(self, content: bytes) -> Seen:
        """Return the model inputs of the picture in `content`.

        Raises ConfigError if the processor cannot read it.
        """
        return self.read_images([open_image(content)])

    def expand(
        self, name: str, ids: Sequence[int], contents: Sequence[bytes]
    ) -> tuple[list[int], list[Span]]:
        """Replace each picture's placeholder in rendered `ids` by the picture's own ids.

        Returns:
            The expanded ids, and the span of each picture in them.

        Raises:
            ConfigError: About `name`: `ids` do not have one placeholder for each of `contents`.
        """
        places = [place for place, id in enumerate(ids) if id == self.placeholder_id]
        if len(places) != len(contents):
            raise ConfigError(
                name,
                f"the chat template shows {len(places)} pictures, and there are {len(contents)}",
                next="set prompt.template to one that shows each part of type image",
            )
        expanded: list[int] = []
        spans = []
        end = 0
        for place, content in zip(places, contents, strict=True):
            seen = self.read(content)
            expanded += ids[end:place]
            spans.append(Span(len(expanded), len(seen.ids)))
            expanded += seen.ids.tolist()
            end = place + 1
        return [*expanded, *ids[end:]], spans

    def read_images(self, images: Sequence[Image]) -> Seen:
        """Return the model inputs of decoded pictures that follow one another in one prompt."""
        with load_errors(f"processor of {self.name}"):
            arrays = self._processor(
                text=[self.token * len(images)],
                images=[list(images)],
                add_special_tokens=False,
                return_tensors="np",
            )
        inputs = {name: np.asarray(array) for name, array in arrays.items()}
        ids = inputs["input_ids"][0].astype(np.int32)
        pixels = {name: array for name, array in inputs.items() if name not in _NOT_PIXELS}
        return Seen(ids, pixels)


def load_processor(version: Version) -> Processor:
    """Load the processor of a policy, from its folder alone, with hashes checked.

    Raises ConfigError if it has none, if it needs a package that is not installed, or if the model
    gives pictures positions of a kind that is not known here.
    """
    name = str(version.ref)
    if not checkpoints.sees_images(version):
        raise ConfigError(
            name,
            "sees no pictures: it has no preprocessor_config.json or processor_config.json",
            next="take a vision-language model, or leave data.images out",
        )
    if checkpoints.is_encoder_decoder(version):
        raise ConfigError(
            name,
            "is an encoder-decoder model, which is given text alone here",
            next="take a decoder-only vision-language model, or leave data.images out",
        )
    features_merged(version)
    checkpoints.verify_carried(version)
    return Processor(load_folders_processor(version.files.folder, name), name)


def image_token_id(version: Version) -> int:
    """Return the id that marks each picture feature's position in a prompt. Raises ConfigError."""
    config = checkpoints.model_config(version)
    id = config.get("image_token_id", config.get("image_token_index"))
    if type(id) is not int:
        raise ConfigError(
            str(version.ref),
            "config.json names no image_token_id",
            next="import the model again, as another run",
        )
    return id


def features_merged(version: Version) -> int | None:
    """Return how many patches a side make one feature, if pictures have positions of three axes.

    Returns None if the model counts ids. Raises ConfigError if it counts otherwise.
    """
    config = checkpoints.model_config(version)
    text_config = {**config, **(config.get("text_config") or {})}
    ropes = [text_config.get(field) or {} for field in ("rope_parameters", "rope_scaling")]
    if not any("mrope_section" in rope for rope in ropes):
        return None
    if config["model_type"] not in THREE_AXES:
        raise ConfigError(
            str(version.ref),
            f"a model of type {config['model_type']} gives pictures positions of three axes "
            "(M-RoPE), which are known here for " + ", ".join(sorted(THREE_AXES)),
            next="take a model of one of these types, or one with plain positions",
        )
    return config["vision_config"].get("spatial_merge_size", 2)
