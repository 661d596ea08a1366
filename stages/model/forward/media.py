"""Media in a strip of ids: their features take the place of the embeddings of their ids.

    ids         <fake> <global> <image> <image> <image> <image> <fake>  what  is  …
    embeddings    e       e       f0      f1      f2      f3       e      e    e      f: features

A medium's positions come from its span in the prompt, never from the id alone: a policy can sample
that id, and then it is an ordinary one.

Not of the spine: only prompts with pictures or clips need it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn
from transformers.masking_utils import create_bidirectional_mask

from quiver.schemas.errors import SchemaError
from quiver.stages.model.families import HEARING
from quiver.stages.model.ragged import Ragged

from .axes import Grid, shifts
from .transfer import to_device

Inputs = dict[str, Tensor]
"""Arguments of the model's function that makes features, for one medium or more."""
At = tuple[np.ndarray, np.ndarray]
"""[n] rollouts, and [n] the index in a strip at which each begins."""


@dataclass(frozen=True)
class Shown:
    """Media that B rollouts are shown by their prompts, or after them by observations."""

    numbers: Ragged
    """[B rows] int64: numbers of the media, in the order of their places."""
    starts: Ragged
    """[B rows] int64: start of each one's ids, counted from the end of the prompt; −1 in a
    prompt."""
    places: Ragged
    """[B rows] int64, ascending: positions of their features, counted from the start of the prompt,
    or from its end for observed media."""

    @classmethod
    def of_lists(cls, numbers: list, starts: list, places: list) -> Shown:
        """Make them from lists of lists, one per rollout."""
        return cls(
            *(
                Ragged.from_lengths(
                    torch.from_numpy(np.concatenate([np.empty(0, np.int64), *rows])).long(),
                    torch.tensor([len(row) for row in rows], dtype=torch.int64),
                )
                for rows in (numbers, starts, places)
            )
        )

    @classmethod
    def of_observations(
        cls, rows: pa.Table, tokens: Sequence[int], first_numbers: Mapping[str, int]
    ) -> Shown:
        """Read observed media from rollouts/3 or rollouts/4.

        Args:
            rows: The rollouts.
            tokens: Ids at features' positions.
            first_numbers: By column, the number of its first file.
        """
        numbers: list[list[int]] = []
        starts: list[list[int]] = []
        places: list[np.ndarray] = []
        next_numbers = dict(first_numbers)
        for row, turns in enumerate(rows["turns"]):
            spans: list[tuple[int, int, int, int]] = []
            for column in first_numbers:
                files = rows[column][row]
                if files.is_valid:
                    fields = (files.values.field(name) for name in ("turn", "start", "length"))
                    next_numbers[column] += len(files)
                    of_column = range(next_numbers[column] - len(files), next_numbers[column])
                    spans += zip(*(field.to_pylist() for field in fields), of_column, strict=True)
            spans.sort()
            begins = []  # start of each turn's observation, counted from the end of the prompt
            ids = []
            if spans:
                end = 0
                for turn in turns.as_py():
                    begins.append(end + turn["length"])
                    ids.append(np.array(turn["observation_ids"]))
                    end = begins[-1] + len(ids[-1])
            numbers.append([number for *_, number in spans])
            starts.append([begins[turn] + start for turn, start, *_ in spans])
            parts = [
                begins[turn] + feature_places(ids[turn], [(start, length)], tokens)
                for turn, start, length, _ in spans
            ]
            places.append(np.concatenate([np.empty(0, np.int64), *parts]))
        return cls.of_lists(numbers, starts, places)

    @classmethod
    def nothing(cls, count: int) -> Shown:
        """Return no media for `count` rollouts."""
        return cls.of_lists(*[[[]] * count] * 3)

    @classmethod
    def joined(cls, tables: Sequence[Shown]) -> Shown:
        """Join the media of several tables of rollouts."""
        columns = ([shown.numbers, shown.starts, shown.places] for shown in tables)
        return cls(*map(Ragged.joined, zip(*columns, strict=True)))

    def take(self, rows: Tensor) -> Shown:
        """Return rollouts `rows`, in that order."""
        return Shown(self.numbers.take(rows), self.starts.take(rows), self.places.take(rows))


@dataclass(frozen=True)
class Media:
    """Media that B rollouts are shown."""

    in_prompts: Shown
    observed: Shown
    """Media shown after the prompts."""
    read: Callable[[Sequence[int]], Inputs]
    """Returns the model inputs of the media with these numbers."""
    tokens: Sequence[int]
    """Ids at features' positions."""
    merge: int | None = None
    """For a model that counts positions by three axes (axes.py): patches a side that make one
    feature."""

    def take(self, rows: Tensor) -> Media:
        """Return rollouts `rows`, in that order."""
        return replace(
            self, in_prompts=self.in_prompts.take(rows), observed=self.observed.take(rows)
        )

    def slice(self, start: int, count: int) -> Media:
        """Return `count` rollouts from `start` on."""
        return self.take(torch.arange(start, start + count))

    def of_rollout(
        self, row: int, device: torch.device, prompt_length: int, num_read: int
    ) -> Inputs:
        """Return the joint model inputs of all media that rollout `row` is shown by its prompt
        of `prompt_length` ids and in the first `num_read` ids after it."""
        numbers = [
            number
            for shown in (self.in_prompts, self.observed)
            for number in shown.numbers[row][shown.starts[row] < num_read].tolist()
        ]
        if not numbers:
            return {}
        inputs = self.read(numbers)
        if self.merge is not None:  # such a model finds its pictures by these types
            types = torch.zeros(1, prompt_length + num_read, dtype=torch.int64)
            types[0, self.in_prompts.places[row]] = 1
            observed = self.observed.places[row]
            types[0, prompt_length + observed[observed < num_read]] = 1
            inputs = {**inputs, "mm_token_type_ids": types}
        return to_device(inputs, device)


@dataclass(frozen=True)
class MediaInStrip:
    """Media in a strip."""

    inputs: tuple[Inputs, ...]
    """Inputs of each medium, once."""
    order: tuple[int, ...]
    """Indices into `inputs` in the order in which the strip shows them."""
    places: Tensor
    """[m] int64: indices into the strip of their features."""
    shifts: Tensor | None = None
    """[3, L] int64: what positions of three axes differ by from plain ones, if the model has them.
    """


def in_strip(media: Media | None, prompts: At, completions: At, length: int) -> MediaInStrip | None:
    """Return the media in a strip, or None if it has none.

    Args:
        media: Media of all rollouts.
        prompts: Rollouts whose prompts are in the strip, and where each prompt begins.
        completions: Rollouts whose completions are in the strip, and where each begins.
        length: Tokens of the strip.
    """
    if media is None:
        return None
    sources = [(media.in_prompts, *prompts), (media.observed, *completions)]
    of_rows = [numbers for source, rows, _ in sources for numbers in source.numbers.views(rows)]
    shown = np.concatenate([np.empty(0, np.int64), *of_rows])
    if not len(shown):
        return None
    numbers, order = np.unique(shown, return_inverse=True)
    places = [
        places + start
        for source, rows, starts in sources
        for places, start in zip(source.places.views(rows), starts, strict=True)
    ]
    inputs = [media.read([number]) for number in numbers.tolist()]
    shift = None
    if media.merge is not None:
        grids = {
            number: grid_of(each, media.merge)
            for number, each in zip(numbers.tolist(), inputs, strict=True)
        }
        shift = torch.from_numpy(_shifts(media, grids, prompts, completions, length))
    return MediaInStrip(
        tuple(inputs),
        tuple(order.tolist()),
        torch.from_numpy(np.concatenate(places)),
        shift,
    )


def grid_of(inputs: Inputs, merge: int) -> Grid:
    """Return the grid of one picture's features, each made from `merge` × `merge` patches."""
    _, rows, columns = inputs["image_grid_thw"][0].tolist()
    return rows // merge, columns // merge


def _shifts(
    media: Media, grids: Mapping[int, Grid], prompts: At, completions: At, length: int
) -> np.ndarray:
    """Return the shifts of the positions in a strip of `length` tokens: [3, length] int64. `grids`
    has the grid of each picture, by number; the other arguments are as in `in_strip`."""
    segments = [
        *((start, row, media.in_prompts) for row, start in zip(*prompts, strict=True)),
        *((start, row, media.observed) for row, start in zip(*completions, strict=True)),
    ]
    # a completion of one token has none in the strip, and the next prompt begins where it does
    segments.sort(key=lambda segment: (segment[0], segment[2] is media.in_prompts))
    ends = [*(start for start, _, _ in segments[1:]), length]
    strip = np.zeros((3, length), np.int64)
    after_prompt = 0
    for (start, row, source), end in zip(segments, ends, strict=True):
        is_prompt = source is media.in_prompts
        shift = shifts(
            end - start,
            source.places[row].numpy(),
            [grids[number] for number in source.numbers[row].tolist()],
            before=0 if is_prompt else after_prompt,
        )
        strip[:, start:end] = shift[:, :-1]
        if is_prompt:
            after_prompt = int(shift[0, -1])
    return strip


def feature_places(
    ids: np.ndarray, spans: Sequence[tuple[int, int]], tokens: Sequence[int]
) -> np.ndarray:
    """Return the positions [m] int64, ascending, in prompt `ids` [P] that hold features.

    These are the positions of ids `tokens` within the media's `spans`, (start, length) each.
    """
    in_spans = [np.arange(start, start + length) for start, length in spans]
    places = np.concatenate([np.empty(0, np.int64), *in_spans])
    return places[np.isin(ids[places], tokens)]


def join_media(tables: Sequence[tuple[Media | None, int]]) -> Media | None:
    """Join the media of several tables, given each with its number of rows.

    Returns None if no table has any.
    """
    firsts: dict[int, Media] = {}  # by the first number that the table's media get
    in_prompts: list[Shown] = []
    observed: list[Shown] = []
    next_number = 0
    for media, count in tables:
        if media is None:
            in_prompts.append(Shown.nothing(count))
            observed.append(Shown.nothing(count))
            continue
        first = next_number
        firsts[first] = media
        for source, joined in ((media.in_prompts, in_prompts), (media.observed, observed)):
            numbers = source.numbers.with_values(source.numbers.values + first)
            joined.append(replace(source, numbers=numbers))
            next_number = max([next_number, *(numbers.values + 1).tolist()])
    if not firsts:
        return None

    def read(chosen: Sequence[int]) -> Inputs:
        first = max(first for first in firsts if first <= chosen[0])
        return firsts[first].read([number - first for number in chosen])

    first_one = next(iter(firsts.values()))
    return replace(
        first_one, in_prompts=Shown.joined(in_prompts), observed=Shown.joined(observed), read=read
    )


def embed(model: nn.Module, ids: Tensor, media: MediaInStrip) -> dict[str, Any]:
    """Return the arguments of a pass over a strip of `ids` [1, L], with features put in.

    Each medium is encoded once. Raises SchemaError if features and places differ in number.
    """
    features = [medium_features(model, inputs) for inputs in media.inputs]
    shown = [features[medium] for medium in media.order]
    return put_features(model, ids, media.places, shown, f"model {type(model).__name__}")


def medium_features(model: nn.Module, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the features of a picture or clip for all of its positions, [m, d] each.

    The first ones take the place of embeddings. Others are added to the states after one of the
    first layers each (DeepStack, arXiv:2406.04334); most models have none.
    """
    if "input_features" in inputs:
        return [_heard(model, **inputs)]
    output = model.get_image_features(**inputs)
    levels = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
    parts = [level if isinstance(level, list | tuple) else [level] for level in levels]
    return [torch.cat([part.reshape(-1, part.shape[-1]) for part in level]) for level in parts]


def _heard(model: nn.Module, input_features: Tensor, **masks: Tensor) -> Tensor:
    """Return the features [m, d] of a clip, from its spectrum; `masks` end it where it ends."""
    input_features = input_features.to(model.dtype)
    if hasattr(model, "get_audio_features"):
        return model.get_audio_features(input_features, **masks).pooler_output
    # Qwen2-Audio has no function for it: these lines are from its forward pass
    trunk = model.base_model
    tower = trunk.audio_tower
    (mask,) = masks.values()
    num_frames, num_features = tower._get_feat_extract_output_lengths(mask.sum(-1))
    frames = torch.arange((input_features.shape[-1] - 2) // 2 + 1, device=mask.device)
    inside = create_bidirectional_mask(
        config=tower.config,
        inputs_embeds=input_features.new_zeros(len(mask), len(frames), 1),
        attention_mask=(frames < num_frames[:, None]).long(),
    )
    states = tower(input_features, attention_mask=inside).last_hidden_state
    features = trunk.multi_modal_projector(states)
    places = torch.arange(features.shape[1], device=mask.device)
    return features[places < num_features[:, None]]


def put_features(
    model: nn.Module, ids: Tensor, places: Tensor, shown: Sequence[list[Tensor]], name: str
) -> dict[str, Any]:
    """Return the arguments of a pass over `ids` [B, L] with the features of media put in.

    Args:
        model: The model, or its trunk.
        ids: Ids of the rows.
        places: [m] indices of the features into the flat ids, in the order of the media.
        shown: Result of `medium_features` for each medium.
        name: Named by errors.

    Raises:
        SchemaError: About `name`: features and places differ in number.
    """
    features, *deeper = (torch.cat(level) for level in zip(*shown, strict=True))
    if len(features) != len(places):
        raise SchemaError(
            name,
            f"its media give {len(features)} features, and its prompt has {len(places)} places "
            "for them",
            next="render the prompts again with this policy",
        )
    embeddings = model.get_input_embeddings()(ids)
    flat = embeddings.flatten(0, 1).index_copy(0, places, features.to(embeddings.dtype))
    arguments: dict[str, Any] = {"inputs_embeds": flat.view_as(embeddings)}
    if deeper:
        mask = torch.zeros_like(ids, dtype=torch.bool)
        mask.view(-1)[places] = True
        order = places.argsort()  # the model adds them in the order of the mask
        arguments["visual_pos_masks"] = mask
        arguments["deepstack_visual_embeds"] = [level[order] for level in deeper]
    return arguments


def reader_of(trunk: nn.Module, arguments: Mapping[str, Any]) -> nn.Module:
    """Return the part of `trunk` that takes the `arguments` of `put_features`: its language model
    if some features are added after layers, since the whole trunk would make these itself."""
    return trunk.get_decoder() if "deepstack_visual_embeds" in arguments else trunk


def vision_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the weights that only pictures and clips go through: all except the language model's
    and its embeddings'."""
    if not (hasattr(model, "get_image_features") or model.config.model_type in HEARING):
        return
    parts = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
    of_language = {id(parameter) for part in parts for parameter in part.parameters()}
    yield from (each for each in model.parameters() if id(each) not in of_language)
