"""Loads the pictures that saved rollouts were sampled from.

Pictures of prompts are stored once, in the prompts dataset, which the rollouts' manifest names.
Observed pictures are in the rollouts themselves.

Not of the spine: only prompts with pictures need it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from quiver.schemas.errors import LineageError, SchemaError
from quiver.schemas.prompts import most_images
from quiver.stages.core.lineage import open_input
from quiver.stages.core.store import Store, Version
from quiver.stages.model import checkpoints
from quiver.stages.model.forward.pictures import Inputs, Pictures, Shown, feature_places

from .decoder import open_image
from .processor import features_merged, image_token_id, load_processor


def open_prompts(store: Store, rollouts: Version) -> pa.Table | None:
    """Return group_id, prompt_ids, images and image_spans of the prompts that `rollouts` answer.

    Returns None if they show no pictures. Raises LineageError.
    """
    manifest = rollouts.manifest
    sees_images = any(model.processor for model in manifest.models)
    if not sees_images or manifest.input("prompts") is None:
        return None
    prompts = open_input(store, rollouts, "prompts")
    if prompts.manifest.kind_schema != "prompts/2":
        return None
    table = prompts.table(["group_id", "prompt_ids", "images", "image_spans"])
    return table if most_images(table) else None


def load_pictures(
    store: Store, rollouts: Version, rows: pa.Table, policy: Version
) -> Pictures | None:
    """Return the pictures shown in `rows` of `rollouts` [B], as `policy` reads them.

    Returns None if there are none. A picture's bytes are read only when it is used. Raises
    LineageError if the sampling policy read pictures with another processor.
    """
    prompts = open_prompts(store, rollouts)
    observed = rows["images"].combine_chunks() if "images" in rows.column_names else None
    if observed is not None and not len(observed.flatten()):
        observed = None
    if prompts is None and observed is None:
        return None
    sampler = rollouts.manifest.require_model("policy")
    if sampler.processor != checkpoints.model_entry("policy", policy).processor:
        raise LineageError(
            str(rollouts.ref),
            f"{sampler.ref} read its pictures with another processor than {policy.ref} has",
            next=f"name a policy with the processor of {sampler.ref}",
        )
    processor = load_processor(policy)
    token = image_token_id(policy)
    contents: list[pa.Array] = []
    groups = rows["group_id"].to_pylist()
    numbers: list[list[int]] = [[] for _ in groups]
    places: list[np.ndarray] = [np.empty(0, np.int64) for _ in groups]
    num_in_prompts = 0
    if prompts is not None:
        of_group = _of_prompts(rollouts, prompts, token)
        numbers = [of_group[group][0] for group in groups]
        places = [of_group[group][1] for group in groups]
        contents.append(prompts["images"].combine_chunks().flatten().field("bytes"))
        num_in_prompts = len(contents[0])
    if observed is not None:
        contents.append(observed.flatten().field("bytes"))

    def content(number: int) -> bytes:
        is_observed = number >= num_in_prompts
        part = contents[-1] if is_observed else contents[0]
        return part[number - num_in_prompts if is_observed else number].as_py()

    def read(chosen: Sequence[int]) -> Inputs:
        inputs = processor.read_images([open_image(content(number)) for number in chosen]).inputs
        return {name: torch.from_numpy(array) for name, array in inputs.items()}

    in_prompts = Shown.of_lists(numbers, [[-1] * len(shown) for shown in numbers], places)
    after_prompts = Shown.nothing(len(rows))
    if observed is not None:
        after_prompts = Shown.of_observations(rows, token, num_in_prompts)
    return Pictures(in_prompts, after_prompts, read, token, features_merged(policy))


def _of_prompts(
    rollouts: Version, prompts: pa.Table, token: int
) -> dict[str, tuple[list[int], np.ndarray]]:
    """Return, by group, the numbers of a prompt's pictures among all pictures, and the positions in
    the prompt where their features go. Raises SchemaError."""
    shown = {}
    num_before = 0
    counts = pc.fill_null(pc.list_value_length(prompts["images"]), 0).to_pylist()
    for prompt, count in zip(prompts.drop_columns("images").to_pylist(), counts, strict=True):
        spans = [(span["start"], span["length"]) for span in prompt["image_spans"] or []]
        if len(spans) != count:
            problem = f"{prompt['group_id']}: {count} images, {len(spans)} image_spans"
            raise SchemaError(str(rollouts.ref), problem, next="render the prompts again")
        places = feature_places(np.array(prompt["prompt_ids"]), spans, token)
        shown[prompt["group_id"]] = [*range(num_before, num_before + count)], places
        num_before += count
    return shown
