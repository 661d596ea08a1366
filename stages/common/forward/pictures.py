"""Pictures in a row of ids: their features take the place of the embeddings of their ids.

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
from quiver.stages.common.ragged import Ragged

Inputs = dict[str, Tensor]
"""Arguments of a model's `get_image_features`, for one picture or more."""
At = tuple[np.ndarray, np.ndarray]
"""[n] rollouts, and [n] the index in a row of tokens at which each begins."""


@dataclass(frozen=True)
class Observed:
    """Pictures that B rollouts were shown after their prompts."""

    numbers: Ragged
    """[B rows] int64: numbers of the pictures, in the order of their places."""
    starts: Ragged
    """[B rows] int64: start of each picture's ids, counted from the end of the prompt."""
    places: Ragged
    """[B rows] int64, ascending: positions of their features, counted likewise."""

    @classmethod
    def of_table(cls, rows: pa.Table, token: int, first_number: int) -> Observed:
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
        return cls(ragged_of(numbers), ragged_of(starts), ragged_of(places))

    def take(self, rows: Tensor) -> Observed:
        """Return rollouts `rows`, in that order."""
        return Observed(self.numbers.take(rows), self.starts.take(rows), self.places.take(rows))


@dataclass(frozen=True)
class Pictures:
    """Pictures that B rollouts are shown, by their prompts and by observations."""

    numbers: Ragged
    """[B rows] int64: numbers of the pictures, in the order of their places."""
    places: Ragged
    """[B rows] int64, ascending: positions of their features in the prompt."""
    read: Callable[[Sequence[int]], Inputs]
    """Returns the model inputs of the pictures with these numbers."""
    token: int
    """Id at each feature's position."""
    observed: Observed | None = None
    """Pictures shown after the prompts, if any."""

    def take(self, rows: Tensor) -> Pictures:
        """Return rollouts `rows`, in that order."""
        return replace(
            self,
            numbers=self.numbers.take(rows),
            places=self.places.take(rows),
            observed=self.observed and self.observed.take(rows),
        )

    def slice(self, start: int, count: int) -> Pictures:
        """Return `count` rollouts from `start` on."""
        return self.take(torch.arange(start, start + count))

    def of_rollout(self, row: int, device: torch.device, num_read: int = 0) -> Inputs:
        """Return the joint model inputs of all pictures that rollout `row` is shown.

        These are the pictures in its prompt and in the first `num_read` ids after it.
        """
        numbers = self.numbers[row].tolist()
        if self.observed is not None:
            is_read = self.observed.starts[row] < num_read
            numbers += self.observed.numbers[row][is_read].tolist()
        return _moved(self.read(numbers), device) if numbers else {}


@dataclass(frozen=True)
class PicturesInRow:
    """Pictures in a row of tokens, on the model's device."""

    inputs: tuple[Inputs, ...]
    """Inputs of each picture, once."""
    order: tuple[int, ...]
    """Indices into `inputs` in the order in which the row shows them."""
    places: Tensor
    """[m] int64: positions in the row of their features."""


def in_row(
    pictures: Pictures | None, prompts: At, completions: At, device: torch.device | str
) -> PicturesInRow | None:
    """Return the pictures in a row of tokens, or None if it has none.

    Args:
        pictures: Pictures of all rollouts.
        prompts: Rollouts whose prompts are in the row, and where each prompt begins.
        completions: Rollouts whose completions are in the row, and where each begins.
        device: The model's device.
    """
    if pictures is None:
        return None
    parts = [(pictures, prompts)]
    if pictures.observed is not None:
        parts.append((pictures.observed, completions))
    of_rows = [numbers for part, (rows, _) in parts for numbers in part.numbers.views(rows)]
    shown = np.concatenate([np.empty(0, np.int64), *of_rows])
    if not len(shown):
        return None
    numbers, order = np.unique(shown, return_inverse=True)
    places = [
        places + start
        for part, (rows, starts) in parts
        for places, start in zip(part.places.views(rows), starts, strict=True)
    ]
    return PicturesInRow(
        tuple(_moved(pictures.read([number]), device) for number in numbers.tolist()),
        tuple(order.tolist()),
        torch.from_numpy(np.concatenate(places)).to(device),
    )


def _moved(inputs: Inputs, device: torch.device | str) -> Inputs:
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def ragged_of(rows: list) -> Ragged:
    """Return lists of numbers, one per rollout, as int64 Ragged."""
    values = np.concatenate([np.empty(0, np.int64), *rows]).astype(np.int64)
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    return Ragged.from_lengths(torch.from_numpy(values), lengths)


def feature_places(ids: np.ndarray, spans: Sequence[tuple[int, int]], token: int) -> np.ndarray:
    """Return the positions [m] int64, ascending, in prompt `ids` [P] that hold features.

    These are the positions of id `token` within the pictures' `spans`, (start, length) each.
    """
    in_spans = [np.arange(start, start + length) for start, length in spans]
    places = np.concatenate([np.empty(0, np.int64), *in_spans])
    return places[ids[places] == token]


def join_pictures(parts: Sequence[tuple[Pictures | None, int]]) -> Pictures | None:
    """Join the pictures of several tables, given each with its number of rows.

    Returns None if no table has pictures.
    """
    shown = [part for part, _ in parts if part is not None]
    if not shown:
        return None
    if len(parts) == 1:
        return shown[0]
    firsts: list[int] = []
    numbers, places = [], []
    observed: list[Observed] = []
    has_observed = any(part.observed is not None for part in shown)
    next_number = 0
    nothing = Ragged.from_lengths(torch.empty(0, dtype=torch.int64), torch.zeros(1).long())
    for part, count in parts:
        firsts.append(next_number)
        if part is None:
            empty = nothing.take(torch.zeros(count).long())
            numbers.append(empty)
            places.append(empty)
            observed.append(Observed(empty, empty, empty))
            continue
        numbers.append(_raised(part.numbers, next_number))
        places.append(part.places)
        empty = nothing.take(torch.zeros(count).long())
        later = part.observed or Observed(empty, empty, empty)
        observed.append(replace(later, numbers=_raised(later.numbers, next_number)))
        both = torch.cat([numbers[-1].values, observed[-1].numbers.values])
        next_number = max([next_number, *(both + 1).tolist()])

    def read(chosen: Sequence[int]) -> Inputs:
        part = max(i for i, first in enumerate(firsts) if first <= chosen[0] and parts[i][0])
        return parts[part][0].read([number - firsts[part] for number in chosen])

    return Pictures(
        _concatenated(numbers),
        _concatenated(places),
        read,
        shown[0].token,
        Observed(
            _concatenated([each.numbers for each in observed]),
            _concatenated([each.starts for each in observed]),
            _concatenated([each.places for each in observed]),
        )
        if has_observed
        else None,
    )


def _raised(numbers: Ragged, by: int) -> Ragged:
    return numbers.with_values(numbers.values + by)


def _concatenated(parts: Sequence[Ragged]) -> Ragged:
    values = torch.cat([part.values for part in parts])
    return Ragged.from_lengths(values, torch.cat([part.lengths for part in parts]))


def embed(model: nn.Module, ids: Tensor, pictures: PicturesInRow) -> Tensor:
    """Return [1, N, d] the embeddings of a row of `ids` [1, N], with picture features put in.

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
    """Return `embeddings` [N, d] with `features` [m, d] at `places` [m].

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


def sight(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the weights that only pictures go through: all except the language model's and its
    embeddings'."""
    if not hasattr(model, "get_image_features"):
        return
    parts = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
    of_language = {id(parameter) for part in parts for parameter in part.parameters()}
    yield from (each for each in model.parameters() if id(each) not in of_language)
