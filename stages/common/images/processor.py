"""What a model reads of a picture, as the policy's own processor makes it: ids in the prompt, and
pixels for the part that sees.

    processor = load_processor(store.open("arith/policy@0"))
    seen = processor.read(content)      # the bytes of a PNG, JPEG or WebP
    seen.ids                            # [7] what stands for it in the prompt
    seen.inputs                         # {"pixel_values": [1, 1, 3, 32, 32], …}

Not of the spine: only prompts with pictures come here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from quiver.schemas.errors import ConfigError
from quiver.stages.common.images.decoder import open_image
from quiver.stages.common.models import checkpoints
from quiver.stages.common.models.families import load_folders_processor
from quiver.stages.common.models.folder import load_errors
from quiver.stages.common.store import Version

if TYPE_CHECKING:
    from PIL.Image import Image

_NOT_PIXELS = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"})


class Span(NamedTuple):
    """Where the ids of a picture stand."""

    start: int
    length: int


@dataclass(frozen=True)
class Seen:
    """Pictures as a model reads them."""

    ids: np.ndarray
    """[n] int32: what stands for them in the prompt."""
    inputs: dict[str, np.ndarray]
    """The arguments of the model's `get_image_features`, for these pictures alone."""


class Processor:
    """The processor of one policy."""

    def __init__(self, processor: Any, name: str) -> None:
        """`processor`: of transformers. ConfigError about the policy `name` where it names no token
        that stands for a picture."""
        self._processor = processor
        self.name = name
        self.token = getattr(processor, "image_token", None)
        """The text that a template writes where a picture is shown."""
        if not isinstance(self.token, str):
            raise ConfigError(
                name,
                f"its processor, a {type(processor).__name__}, names no image_token",
                next="take a policy whose processor does",
            )
        self.placeholder_id = processor.tokenizer.convert_tokens_to_ids(self.token)
        """What an engine gets for a picture, which it makes the ids of by itself."""

    def read(self, content: bytes) -> Seen:
        """The picture in `content`. ConfigError where the processor cannot take it."""
        return self.read_images([open_image(content)])

    def expand(
        self, name: str, ids: Sequence[int], contents: Sequence[bytes]
    ) -> tuple[list[int], list[Span]]:
        """`ids` as a template gave them, with all that the model reads of the pictures in
        `contents` in place of each one's placeholder; and where these stand. ConfigError about
        `name`."""
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
        """The same of pictures that are decoded, one after another in one prompt."""
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
    """The processor of a policy, from its folder alone, hashes checked. ConfigError where it has
    none, or needs what is not installed, or its policy's positions are not plain."""
    name = str(version.ref)
    if not checkpoints.sees_images(version):
        raise ConfigError(
            name,
            "sees no pictures: it has no preprocessor_config.json or processor_config.json",
            next="take a vision-language model, or leave data.images out",
        )
    config = checkpoints.model_config(version)
    text_config = {**config, **(config.get("text_config") or {})}
    for field in ("rope_parameters", "rope_scaling"):
        if "mrope_section" in (text_config.get(field) or {}):
            raise ConfigError(
                name,
                "reads pictures by positions of three axes (M-RoPE), which cannot be trained here",
                next="take a vision-language model with plain positions, as Idefics3 or LLaVA",
            )
    checkpoints.verify_carried(version)
    return Processor(load_folders_processor(version.files.folder, name), name)


def image_token_id(version: Version) -> int:
    """The id that stands in a prompt wherever a feature of a picture does. ConfigError."""
    config = checkpoints.model_config(version)
    id = config.get("image_token_id", config.get("image_token_index"))
    if type(id) is not int:
        raise ConfigError(
            str(version.ref),
            "config.json names no image_token_id",
            next="import the model again, as another run",
        )
    return id
