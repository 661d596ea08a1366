"""The pictures that saved rollouts were sampled from: they lie in the prompts, once each, and are
found by the rollouts' manifest.

Not of the spine: only prompts with pictures come here.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from quiver.schemas.errors import LineageError, SchemaError
from quiver.schemas.manifest import IMAGES
from quiver.schemas.prompts import most_images
from quiver.stages.common.forward.pictures import Inputs, Pictures, feature_places
from quiver.stages.common.lineage import open_input
from quiver.stages.common.models import checkpoints
from quiver.stages.common.ragged import Ragged
from quiver.stages.common.store import Store, Version

from .decoder import open_image
from .processor import image_token_id, load_processor


def open_prompts(store: Store, rollouts: Version) -> pa.Table | None:
    """group_id, prompt_ids, images and image_spans of the prompts that `rollouts` answer; None
    where these show no pictures. LineageError."""
    manifest = rollouts.manifest
    if IMAGES not in manifest.required_features or manifest.input("prompts") is None:
        return None
    prompts = open_input(store, rollouts, "prompts")
    if prompts.manifest.kind_schema != "prompts/2":
        return None
    table = prompts.table(["group_id", "prompt_ids", "images", "image_spans"])
    return table if most_images(table) else None


def load_pictures(
    store: Store, rollouts: Version, groups: Sequence[str], policy: Version
) -> Pictures | None:
    """What the prompts of `rollouts` show, for rows of `groups` [B], as `policy` reads it; None
    where they show nothing. A picture's bytes are read where it is. LineageError where the policy
    reads pictures in another way than the one that sampled."""
    prompts = open_prompts(store, rollouts)
    if prompts is None:
        return None
    sampler = rollouts.manifest.require_model("policy")
    if sampler.processor != checkpoints.as_model("policy", policy).processor:
        raise LineageError(
            str(rollouts.ref),
            f"{sampler.ref} read its pictures by another processor than {policy.ref} has",
            next=f"name a policy with the processor of {sampler.ref}",
        )
    processor = load_processor(policy)
    token = image_token_id(policy)
    images = prompts["images"].combine_chunks()
    counts = pc.fill_null(pc.list_value_length(images), 0).to_pylist()
    contents = images.flatten().field("bytes")
    numbers: dict[str, list[int]] = {}
    places: dict[str, np.ndarray] = {}
    num_before = 0
    for prompt, count in zip(prompts.drop_columns("images").to_pylist(), counts, strict=True):
        spans = [(span["start"], span["length"]) for span in prompt["image_spans"] or []]
        if len(spans) != count:
            problem = f"{prompt['group_id']}: {count} images, {len(spans)} image_spans"
            raise SchemaError(str(rollouts.ref), problem, next="render the prompts again")
        numbers[prompt["group_id"]] = [*range(num_before, num_before + count)]
        places[prompt["group_id"]] = feature_places(np.array(prompt["prompt_ids"]), spans, token)
        num_before += count

    def read(chosen: Sequence[int]) -> Inputs:
        decoded = [open_image(contents[number].as_py()) for number in chosen]
        inputs = processor.read_images(decoded).inputs
        return {name: torch.from_numpy(array) for name, array in inputs.items()}

    return Pictures(
        _ragged([numbers[group] for group in groups]),
        _ragged([places[group] for group in groups]),
        read,
        token,
    )


def _ragged(rows: list) -> Ragged:
    values = np.concatenate([np.empty(0, np.int64), *rows]).astype(np.int64)
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    return Ragged.from_lengths(torch.from_numpy(values), lengths)
