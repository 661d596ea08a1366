"""Loads the media that saved rollouts were sampled from.

Media of prompts are stored once, in the prompts dataset, which the rollouts' manifest names.
Observed media are in the rollouts themselves.

Not of the spine: only prompts with media need it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from quiver.schemas.errors import LineageError, SchemaError
from quiver.schemas.prompts import MEDIA, most_media
from quiver.stages.core.lineage import open_input
from quiver.stages.core.store import Store, Version
from quiver.stages.model import checkpoints
from quiver.stages.model.forward.media import Inputs, Media, Shown, feature_places

from .processor import features_merged, load_processor, token_ids


def open_prompts(store: Store, rollouts: Version) -> pa.Table | None:
    """Return group_id, prompt_ids, spans and media of the prompts that `rollouts` answer.

    Returns None if they show none. Raises LineageError.
    """
    manifest = rollouts.manifest
    has_processor = any(model.processor for model in manifest.models)
    if not has_processor or manifest.input("prompts") is None:
        return None
    prompts = open_input(store, rollouts, "prompts")
    if prompts.manifest.kind_schema != "prompts/2":
        return None
    table = prompts.table(["group_id", "prompt_ids", "spans", *MEDIA.values()])
    return table if most_media(table) else None


def load_media(store: Store, rollouts: Version, rows: pa.Table, policy: Version) -> Media | None:
    """Return the media shown in `rows` of `rollouts` [B], as `policy` reads them.

    Returns None if there are none. A medium's bytes are read only when it is used. Raises
    LineageError if the sampling policy read media with another processor.
    """
    prompts = open_prompts(store, rollouts)
    observed = {
        column: files_of(rows[column]) for column in MEDIA.values() if column in rows.column_names
    }
    if prompts is None and not any(map(len, observed.values())):
        return None
    sampler = rollouts.manifest.require_model("policy")
    if sampler.processor != checkpoints.model_entry("policy", policy).processor:
        raise LineageError(
            str(rollouts.ref),
            f"{sampler.ref} read its media with another processor than {policy.ref} has",
            next=f"name a policy with the processor of {sampler.ref}",
        )
    processor = load_processor(policy)
    tokens = token_ids(policy)
    sources: list[tuple[str, pa.ChunkedArray]] = []
    groups = rows["group_id"].to_pylist()
    numbers: list[list[int]] = [[] for _ in groups]
    places: list[np.ndarray] = [np.empty(0, np.int64) for _ in groups]
    if prompts is not None:
        for modality, column in MEDIA.items():
            sources.append((modality, files_of(prompts[column])))
        of_group = _of_prompts(rollouts, prompts, tokens)
        numbers = [of_group[group][0] for group in groups]
        places = [of_group[group][1] for group in groups]
    num_of_prompts = len(sources)
    modalities = {column: modality for modality, column in MEDIA.items()}
    sources += [(modalities[column], files) for column, files in observed.items()]
    firsts = np.cumsum([0, *(len(files) for _, files in sources)])

    def read(chosen: Sequence[int]) -> Inputs:
        contents: dict[str, list[bytes]] = {}
        for number in chosen:
            source = int(np.searchsorted(firsts[: len(sources)], number, side="right")) - 1
            modality, files = sources[source]
            content = files[number - int(firsts[source])].as_py()
            contents.setdefault(modality, []).append(content)
        inputs: Inputs = {}
        for modality, of_modality in contents.items():
            for name, array in processor.read(modality, *of_modality).inputs.items():
                inputs[name] = torch.from_numpy(array)
        return inputs

    in_prompts = Shown.of_lists(numbers, [[-1] * len(shown) for shown in numbers], places)
    after_prompts = Shown.nothing(len(rows))
    if observed:
        first_numbers = dict(zip(observed, firsts[num_of_prompts:].tolist(), strict=False))
        after_prompts = Shown.of_observations(rows, tokens, first_numbers)
    return Media(in_prompts, after_prompts, read, tokens, features_merged(policy))


def files_of(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return the bytes of all files in a column of media, in its chunks: one array may hold at most
    2 GiB."""
    kind = column.type.value_type.field("bytes").type
    return pa.chunked_array([chunk.flatten().field("bytes") for chunk in column.chunks], kind)


def _of_prompts(
    rollouts: Version, prompts: pa.Table, tokens: Sequence[int]
) -> dict[str, tuple[list[int], np.ndarray]]:
    """Return, by group, the numbers of a prompt's media, and the positions in the prompt where
    their features go.

    All files of the first modality are numbered first, then those of the next one. Raises
    SchemaError.
    """
    counts = {
        modality: pc.fill_null(pc.list_value_length(prompts[column]), 0).to_pylist()
        for modality, column in MEDIA.items()
    }
    firsts = np.cumsum([0, *(sum(of_rows) for of_rows in counts.values())])
    next_numbers = dict(zip(MEDIA, firsts.tolist(), strict=False))
    shown = {}
    rows = prompts.select(["group_id", "prompt_ids", "spans"]).to_pylist()
    for row, prompt in enumerate(rows):
        spans = prompt["spans"] or []
        numbers = []
        for span in spans:
            numbers.append(next_numbers[span["modality"]])
            next_numbers[span["modality"]] += 1
        of_row = Counter(span["modality"] for span in spans)
        for modality, of_rows in counts.items():
            if of_row[modality] != of_rows[row]:
                problem = f"{of_rows[row]} {MEDIA[modality]}, {of_row[modality]} spans of them"
                raise SchemaError(
                    str(rollouts.ref),
                    f"{prompt['group_id']}: {problem}",
                    next="render the prompts again",
                )
        places = feature_places(
            np.array(prompt["prompt_ids"]),
            [(span["start"], span["length"]) for span in spans],
            tokens,
        )
        shown[prompt["group_id"]] = numbers, places
    return shown
