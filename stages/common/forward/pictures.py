"""Pictures in a row of ids: what the part of the model that sees makes of them stands in place of
the embeddings of their ids.

    ids         <fake> <global> <image> <image> <image> <image> <fake>  what  is  …
    embeddings    e       e       f0      f1      f2      f3       e      e    e      f: features

Which places are a picture's is told by its span in the prompt, never by the id alone: a policy can
sample that id, and it is an ordinary one then.

Not of the spine: only prompts with pictures come here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from quiver.schemas.errors import SchemaError


def image_token_id(config) -> int:
    """The id whose places in a picture's span hold its features."""
    id = getattr(config, "image_token_id", None)
    return config.image_token_index if id is None else id


def feature_places(ids: np.ndarray, spans: Sequence[tuple[int, int]], token: int) -> np.ndarray:
    """[m] int64, rising: the places in `ids` [P] of a prompt that hold features: those of id
    `token` in the `spans` of its pictures, (start, length) each."""
    in_spans = [np.arange(start, start + length) for start, length in spans]
    places = np.concatenate([np.empty(0, np.int64), *in_spans])
    return places[ids[places] == token]


def image_features(model: nn.Module, pictures: Sequence[Mapping[str, Tensor]]) -> Tensor:
    """[m, d] the features of `pictures`, one after another. Each has the arguments of the model's
    `get_image_features` for it alone."""
    features = []
    for inputs in pictures:
        arguments = {name: array.to(model.device) for name, array in inputs.items()}
        output = model.get_image_features(**arguments).pooler_output
        outputs = output if isinstance(output, list | tuple) else [output]
        features += [part.reshape(-1, part.shape[-1]) for part in outputs]
    return torch.cat(features)


def put_features(embeddings: Tensor, places: Tensor, features: Tensor, name: str) -> Tensor:
    """`embeddings` [N, d] with `features` [m, d] at `places` [m]. SchemaError about `name` where
    there are more or fewer of these."""
    if len(features) != len(places):
        raise SchemaError(
            name,
            f"its pictures give {len(features)} features, and its prompt has {len(places)} places "
            "for them",
            next="render the prompts again with this policy",
        )
    return embeddings.index_copy(0, places, features.to(embeddings.dtype))
