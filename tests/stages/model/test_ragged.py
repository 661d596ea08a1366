"""Ragged against Arrow's own lists and plain Python loops."""

import random

import numpy as np
import pyarrow as pa
import pytest
import torch

from quiver.stages.model.ragged import Mapped, Ragged

KIND = pa.list_(pa.field("item", pa.float32(), nullable=False))


def _random_rows(seed: int) -> list[list[float]]:
    rng = random.Random(seed)
    return [
        [float(rng.randrange(1000)) for _ in range(rng.choice([0, 0, 1, 2, 7]))]
        for _ in range(rng.randrange(0, 30))
    ]


@pytest.mark.parametrize("seed", range(40))
def test_round_trip_of_random_rows_in_random_slices_and_chunks(seed):
    rows, rng = _random_rows(seed), random.Random(seed)
    column = pa.chunked_array([pa.array(rows, KIND)])
    low = rng.randrange(len(rows) + 1)
    high = rng.randrange(low, len(rows) + 1)
    middle = rng.randrange(low, high + 1)
    slices = [*column[low:middle].chunks, *column[middle:high].chunks]
    ragged = Ragged.from_arrow(pa.chunked_array(slices, KIND))
    assert [row.tolist() for row in ragged] == rows[low:high]
    assert ragged.lengths.tolist() == [len(row) for row in rows[low:high]]
    assert ragged.to_arrow().to_pylist() == rows[low:high]
    assert ragged.to_arrow().type == KIND


def test_one_chunk_is_not_copied(tmp_path):
    path = tmp_path / "x.arrow"
    table = pa.table({"ids": pa.array([[1, 2], [], [3]], pa.list_(pa.int32()))})
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)
    column = pa.ipc.open_file(pa.memory_map(str(path))).read_all()["ids"]
    ragged = Ragged.from_arrow(column)
    assert ragged.values.data_ptr() == column.chunk(0).values.buffers()[1].address
    assert ragged.values.dtype == torch.int32


def test_large_lists_and_empty_columns():
    ragged = Ragged.from_arrow(pa.array([[1], [2, 3]], pa.large_list(pa.int64())))
    assert [row.tolist() for row in ragged] == [[1], [2, 3]]
    empty = Ragged.from_arrow(pa.chunked_array([], pa.list_(pa.int32())))
    assert len(empty) == 0 and empty.values.dtype == torch.int32


@pytest.mark.parametrize("rows", [[[1], None], [[1, None]]])
def test_nulls_are_refused(rows):
    with pytest.raises(ValueError, match="null"):
        Ragged.from_arrow(pa.array(rows, pa.list_(pa.int32())))


@pytest.mark.parametrize("offsets", [[0, 2], [1, 3], [0, 4]])
def test_offsets_must_cover_the_values(offsets):
    with pytest.raises(ValueError, match="offsets"):
        Ragged(torch.zeros(3), torch.tensor(offsets))


@pytest.mark.parametrize("seed", range(20))
def test_take_sums_and_means_are_those_of_python_lists(seed):
    rows, rng = _random_rows(seed), random.Random(seed)
    ragged = Ragged.from_arrow(pa.array(rows, KIND))
    chosen = [rng.randrange(len(rows)) for _ in range(rng.randrange(9))] if rows else []
    taken = ragged.take(torch.tensor(chosen, dtype=torch.int64))
    assert [row.tolist() for row in taken] == [rows[i] for i in chosen]
    assert ragged.segment_sum().tolist() == [sum(row) for row in rows]
    assert ragged.segment_mean().tolist() == pytest.approx(
        [sum(row) / len(row) if row else 0.0 for row in rows]
    )
    assert ragged.segment_ids.tolist() == [i for i, row in enumerate(rows) for _ in row]
    for i in range(-len(rows), len(rows)):
        assert ragged[i].tolist() == rows[i]


@pytest.mark.parametrize(
    "chosen",
    [
        range(40),
        range(5, 17),
        [*range(30, 40), *range(30, 40)],
        [*range(9), 8, *range(39, 20, -1)],
    ],
)
def test_take_of_neighbours_is_what_python_lists_take(chosen):
    rows = [list(range(row, row + row % 4)) for row in range(40)]
    ragged = Ragged.from_arrow(pa.chunked_array([rows[:13], rows[13:]], KIND))
    taken = ragged.take(torch.tensor(chosen))
    assert [row.tolist() for row in taken] == [rows[row] for row in chosen]


def test_rows_of_vectors_have_sums_and_means_of_vectors():
    ragged = Ragged(torch.zeros(3), torch.tensor([0, 2, 2, 3]))
    vectors = ragged.with_values(torch.tensor([[1.0, 5.0], [3.0, 7.0], [2.0, 9.0]]))
    assert vectors.segment_sum().tolist() == [[4.0, 12.0], [0.0, 0.0], [2.0, 9.0]]
    assert vectors.segment_mean().tolist() == [[2.0, 6.0], [0.0, 0.0], [2.0, 9.0]]


def test_segment_mean_spreads_its_gradient_evenly():
    values = torch.arange(5.0, requires_grad=True)
    Ragged(values, torch.tensor([0, 2, 2, 5])).segment_mean().sum().backward()
    assert values.grad.tolist() == pytest.approx([0.5, 0.5, 1 / 3, 1 / 3, 1 / 3])


@pytest.fixture
def mapped_column(tmp_path) -> pa.ChunkedArray:
    """A list column of three mapped batches, the middle one empty."""
    kind = pa.list_(pa.field("item", pa.int32(), nullable=False))
    batches = [[[1, 2, 3], [], [4]], [], [[5, 6], [7, 8, 9, 10]]]
    schema = pa.schema([pa.field("ids", kind, nullable=False)])
    with pa.ipc.new_file(tmp_path / "x.arrow", schema) as writer:
        for rows in batches:
            writer.write_batch(pa.record_batch([pa.array(rows, kind)], schema=schema))
    return pa.ipc.open_file(pa.memory_map(str(tmp_path / "x.arrow"))).read_all()["ids"]


def test_mapped_rows_are_the_rows_joined(mapped_column):
    mapped, joined = Mapped.from_arrow(mapped_column), Ragged.from_arrow(mapped_column)
    assert len(mapped) == 5 and torch.equal(mapped.offsets, joined.offsets)
    assert [row.tolist() for row in mapped] == [[1, 2, 3], [], [4], [5, 6], [7, 8, 9, 10]]
    rows = torch.tensor([4, 0, 1, 4])
    chosen = mapped.take(rows).take(torch.tensor([3, 1, 2]))
    assert [view.tolist() for view in chosen.views(np.array([0, 2]))] == [[7, 8, 9, 10], []]
    assert torch.equal(chosen.values, joined.take(rows).take(torch.tensor([3, 1, 2])).values)
    assert torch.equal(mapped.places(rows), joined.places(rows))
    assert torch.equal(mapped.values, joined.values)


def test_mapped_rows_are_not_copied(mapped_column):
    mapped = Mapped.from_arrow(mapped_column)
    buffer = mapped_column.chunk(0).buffers()[3]
    assert buffer.address <= mapped[0].data_ptr() < buffer.address + buffer.size
    assert mapped.take(torch.tensor([2, 0]))[1].data_ptr() == mapped[0].data_ptr()


def test_a_mapped_column_may_be_empty_and_has_no_nulls(mapped_column):
    empty = Mapped.from_arrow(mapped_column.slice(0, 0))
    assert (len(empty), empty.values.dtype, empty.views(np.arange(0))) == (0, torch.int32, [])
    with pytest.raises(ValueError, match="null"):
        Mapped.from_arrow(pa.array([[1], None], mapped_column.type))
