"""Pictures in a strip of ids: their features take the place of the embeddings of their ids.

    ids         <fake> <global> <image> <image> <image> <image> <fake>  what  is  …
    embeddings    e       e       f0      f1      f2      f3       e      e    e      f: features

A picture's positions come from its span in the prompt, never from the id alone: a policy can sample
that id, and then it is an ordinary one.

Not of the spine: only prompts with pictures need it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn

from quiver.schemas.errors import SchemaError
from quiver.stages.model.ragged import Ragged

Inputs = dict[str, Tensor]
"""Arguments of a model's `get_image_features`, for one picture or more."""
At = tuple[np.ndarray, np.ndarray]
"""[n] rollouts, and [n] the index in a strip at which each begins."""


@dataclass(frozen=True)
class Shown:
    """Pictures that B rollouts are shown by their prompts, or after them by observations."""

    numbers: Ragged
    """[B rows] int64: numbers of the pictures, in the order of their places."""
    starts: Ragged
    """[B rows] int64: start of each picture's ids, counted from the end of the prompt; −1 in a
    prompt."""
    places: Ragged
    """[B rows] int64, ascending: positions of their features, counted from the start of the prompt,
    or from its end for observed pictures."""

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
    def of_observations(cls, rows: pa.Table, token: int, first_number: int) -> Shown:
        """Read observed pictures from rollouts/3.

        Pictures are numbered from `first_number` on; `token` is the id at each feature's position.
        """
        numbers: list[list[int]] = []
        starts: list[list[int]] = []
        places: list[np.ndarray] = []
        next_number = first_number
        for images, turns in zip(rows["images"], rows["turns"], strict=True):
            spans: list[tuple[int, int, int]] = []
            begins = []  # start of each turn's observation, counted from the end of the prompt
            ids = []
            if images.is_valid:
                columns = (images.values.field(name) for name in ("turn", "start", "length"))
                spans = list(zip(*(column.to_pylist() for column in columns), strict=True))
                end = 0
                for turn in turns.as_py():
                    begins.append(end + turn["length"])
                    ids.append(np.array(turn["observation_ids"]))
                    end = begins[-1] + len(ids[-1])
            numbers.append([*range(next_number, next_number + len(spans))])
            next_number += len(spans)
            starts.append([begins[turn] + start for turn, start, _ in spans])
            parts = [
                begins[turn] + feature_places(ids[turn], [(start, length)], token)
                for turn, start, length in spans
            ]
            places.append(np.concatenate([np.empty(0, np.int64), *parts]))
        return cls.of_lists(numbers, starts, places)

    @classmethod
    def nothing(cls, count: int) -> Shown:
        """Return no pictures for `count` rollouts."""
        return cls.of_lists(*[[[]] * count] * 3)

    @classmethod
    def joined(cls, tables: Sequence[Shown]) -> Shown:
        """Join the pictures of several tables of rollouts."""
        columns = ([shown.numbers, shown.starts, shown.places] for shown in tables)
        return cls(
            *(
                Ragged.from_lengths(
                    torch.cat([rows.values for rows in column]),
                    torch.cat([rows.lengths for rows in column]),
                )
                for column in zip(*columns, strict=True)
            )
        )

    def take(self, rows: Tensor) -> Shown:
        """Return rollouts `rows`, in that order."""
        return Shown(self.numbers.take(rows), self.starts.take(rows), self.places.take(rows))


@dataclass(frozen=True)
class Pictures:
    """Pictures that B rollouts are shown."""

    in_prompts: Shown
    observed: Shown
    """Pictures shown after the prompts."""
    read: Callable[[Sequence[int]], Inputs]
    """Returns the model inputs of the pictures with these numbers."""
    token: int
    """Id at each feature's position."""

    def take(self, rows: Tensor) -> Pictures:
        """Return rollouts `rows`, in that order."""
        return replace(
            self, in_prompts=self.in_prompts.take(rows), observed=self.observed.take(rows)
        )

    def slice(self, start: int, count: int) -> Pictures:
        """Return `count` rollouts from `start` on."""
        return self.take(torch.arange(start, start + count))

    def of_rollout(self, row: int, device: torch.device, num_read: int) -> Inputs:
        """Return the joint model inputs of all pictures that rollout `row` is shown by its prompt
        and in the first `num_read` ids after it."""
        numbers = [
            number
            for shown in (self.in_prompts, self.observed)
            for number in shown.numbers[row][shown.starts[row] < num_read].tolist()
        ]
        return _moved(self.read(numbers), device) if numbers else {}


@dataclass(frozen=True)
class PicturesInStrip:
    """Pictures in a strip, on the model's device."""

    inputs: tuple[Inputs, ...]
    """Inputs of each picture, once."""
    order: tuple[int, ...]
    """Indices into `inputs` in the order in which the strip shows them."""
    places: Tensor
    """[m] int64: indices into the strip of their features."""


def in_strip(
    pictures: Pictures | None, prompts: At, completions: At, device: torch.device | str
) -> PicturesInStrip | None:
    """Return the pictures in a strip, or None if it has none.

    Args:
        pictures: Pictures of all rollouts.
        prompts: Rollouts whose prompts are in the strip, and where each prompt begins.
        completions: Rollouts whose completions are in the strip, and where each begins.
        device: The model's device.
    """
    if pictures is None:
        return None
    sources = [(pictures.in_prompts, *prompts), (pictures.observed, *completions)]
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
    return PicturesInStrip(
        tuple(_moved(pictures.read([number]), device) for number in numbers.tolist()),
        tuple(order.tolist()),
        torch.from_numpy(np.concatenate(places)).to(device),
    )


def _moved(inputs: Inputs, device: torch.device | str) -> Inputs:
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def feature_places(ids: np.ndarray, spans: Sequence[tuple[int, int]], token: int) -> np.ndarray:
    """Return the positions [m] int64, ascending, in prompt `ids` [P] that hold features.

    These are the positions of id `token` within the pictures' `spans`, (start, length) each.
    """
    in_spans = [np.arange(start, start + length) for start, length in spans]
    places = np.concatenate([np.empty(0, np.int64), *in_spans])
    return places[ids[places] == token]


def join_pictures(tables: Sequence[tuple[Pictures | None, int]]) -> Pictures | None:
    """Join the pictures of several tables, given each with its number of rows.

    Returns None if no table has pictures.
    """
    firsts: dict[int, Pictures] = {}  # by the first number that the table's pictures get
    in_prompts: list[Shown] = []
    observed: list[Shown] = []
    next_number = 0
    for pictures, count in tables:
        if pictures is None:
            in_prompts.append(Shown.nothing(count))
            observed.append(Shown.nothing(count))
            continue
        first = next_number
        firsts[first] = pictures
        for source, joined in ((pictures.in_prompts, in_prompts), (pictures.observed, observed)):
            numbers = source.numbers.with_values(source.numbers.values + first)
            joined.append(replace(source, numbers=numbers))
            next_number = max([next_number, *(numbers.values + 1).tolist()])
    if not firsts:
        return None

    def read(chosen: Sequence[int]) -> Inputs:
        first = max(first for first in firsts if first <= chosen[0])
        return firsts[first].read([number - first for number in chosen])

    token = next(iter(firsts.values())).token
    return Pictures(Shown.joined(in_prompts), Shown.joined(observed), read, token)


def embed(model: nn.Module, ids: Tensor, pictures: PicturesInStrip) -> Tensor:
    """Return [1, L, d] the embeddings of a strip of `ids` [1, L], with picture features put in.

    Each picture is encoded once. Raises SchemaError if features and places differ in number.
    """
    features = [image_features(model, inputs) for inputs in pictures.inputs]
    shown = torch.cat([features[picture] for picture in pictures.order])
    embeddings = model.get_input_embeddings()(ids)[0]
    return put_features(embeddings, pictures.places, shown, f"model {type(model).__name__}")[None]


def image_features(model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return [m, d] the features of a picture, for all of its positions."""
    output = model.get_image_features(**inputs).pooler_output
    parts = output if isinstance(output, list | tuple) else [output]
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


def put_features(embeddings: Tensor, places: Tensor, features: Tensor, name: str) -> Tensor:
    """Return `embeddings` [L, d] with `features` [m, d] at `places` [m].

    Raises SchemaError about `name` if their numbers differ.
    """
    if len(features) != len(places):
        raise SchemaError(
            name,
            f"its pictures give {len(features)} features, and its prompt has {len(places)} places "
            "for them",
            next="render the prompts again with this policy",
        )
    return embeddings.index_copy(0, places, features.to(embeddings.dtype))


def vision_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the weights that only pictures go through: all except the language model's and its
    embeddings'."""
    if not hasattr(model, "get_image_features"):
        return
    parts = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
    of_language = {id(parameter) for part in parts for parameter in part.parameters()}
    yield from (each for each in model.parameters() if id(each) not in of_language)
