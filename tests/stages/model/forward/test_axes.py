"""Positions of three axes are those of transformers' Qwen2-VL, whatever pictures a row shows."""

import numpy as np
import pytest
import torch
from transformers import Qwen2VLConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel

from quiver.stages.model.forward.axes import shifts
from tests.sight import PATCHES, TEXT, THREE_AXES

IMAGE, TEXT_ID = 9, 5
ROWS = {
    "no picture": [3],
    "one": [2, (2, 3), 4],
    "at both ends": [(3, 2), 1, (1, 1)],
    "wide and high": [1, (1, 7), 1, (6, 1), 2],
    "many": [1, (2, 2), 3, (4, 4), 1, (3, 5), 1, (1, 2), 6],
}
"""Numbers of text ids, and grids of pictures."""


@pytest.fixture(scope="module")
def model():
    text = {name: size for name, size in TEXT.items() if name != "model_type"}
    with torch.device("meta"):
        return Qwen2VLModel(
            Qwen2VLConfig(
                text_config={**text, "vocab_size": 16, "num_hidden_layers": 1},
                vision_config=PATCHES | THREE_AXES["qwen2_vl"],
                image_token_id=IMAGE,
            )
        )


def positions(parts: list, before: int) -> np.ndarray:
    """[3, n + 1] by `shifts`, of the row and of what follows it."""
    lengths = [part if isinstance(part, int) else part[0] * part[1] for part in parts]
    starts = np.cumsum([0, *lengths])
    places = [
        np.arange(start, start + length)
        for part, start, length in zip(parts, starts, lengths, strict=False)
        if not isinstance(part, int)
    ]
    grids = [part for part in parts if not isinstance(part, int)]
    row = np.concatenate([np.empty(0, np.int64), *places])
    return np.arange(starts[-1] + 1) + shifts(int(starts[-1]), row, grids, before)


@pytest.mark.parametrize("name", ROWS)
def test_positions_are_those_of_transformers(model, name):
    parts = ROWS[name]
    ids = [
        id
        for part in parts
        for id in ([TEXT_ID] * part if isinstance(part, int) else [IMAGE] * (part[0] * part[1]))
    ]
    ids = torch.tensor([ids])
    grids = [(1, 2 * part[0], 2 * part[1]) for part in parts if not isinstance(part, int)]
    expected, delta = model.get_rope_index(
        ids, (ids == IMAGE).long(), torch.tensor(grids) if grids else None
    )
    ours = positions(parts, 0)
    np.testing.assert_array_equal(ours[:, :-1], expected[:, 0].numpy())
    assert ours[:, -1].tolist() == [ids.numel() + int(delta)] * 3


def test_what_precedes_a_row_shifts_all_of_it():
    parts = ROWS["many"]
    np.testing.assert_array_equal(positions(parts, -4), positions(parts, 0) - 4)
