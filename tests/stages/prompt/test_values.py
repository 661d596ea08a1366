"""A cell reaches a reward function with the value that its file says, through every reader and every
Arrow type; or a message says what is wrong."""

import csv
import datetime
import io
import json
import uuid
from decimal import Decimal

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.feather
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quiver.schemas.cells import json_array, without_nulls, wrap
from quiver.schemas.errors import ConfigError
from quiver.stages.prompt import sources
from quiver.stages.prompt.columns import to_table
from quiver.stages.reward import tables


def read(source, **options):
    return sources.read(sources.SourceConfig(source=str(source), **options)).table


def offered(table):
    """The columns that a reward function gets, after a version of prompts was written and read."""
    rows = pa.array(range(table.num_rows))
    struct = table.take(rows).combine_chunks().to_struct_array().combine_chunks()
    prompts = pa.table(
        {
            "prompt_text": pa.array([""] * table.num_rows),
            "messages": pa.nulls(table.num_rows, pa.list_(pa.struct({"role": pa.string()}))),
            "columns": struct,
        }
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, prompts.schema) as file:
        file.write_table(prompts)
    written = pa.ipc.open_file(sink.getvalue()).read_all().take(rows)
    nothing = pa.array([None] * table.num_rows)
    names = ("completion_text", "completion_ids", "finish_reason", "rollout_id", "prompt_ids")
    batch = tables.offered(pa.table(dict.fromkeys(names, nothing)), written)
    return {name: batch[name] for name in table.column_names}


def exact(values):
    """Text that tells 7 from 7.0 and True, and an absent key from one that is null."""
    return repr(values)


# -- JSON

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    ),
    max_leaves=6,
)
ROWS = st.lists(st.dictionaries(st.sampled_from("xyz"), JSON, min_size=1), min_size=1, max_size=4)


@given(ROWS)
def test_json_rows_are_what_json_loads_gives(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("json") / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), "utf-8")
    names = dict.fromkeys(name for row in rows for name in row)
    expected = {name: [row.get(name) for row in rows] for name in names}
    assert exact(offered(read(path))) == exact(expected)
    path.with_suffix(".json").write_text(json.dumps(rows))
    assert exact(offered(read(path.with_suffix(".json")))) == exact(expected)


@pytest.mark.parametrize(
    "cells",
    [
        [7, "seven", True, None, [1], {"a": None}],
        [{"a": 1, "b": 2}, {"b": 2, "a": 1}],
        [10**30, -(2**63), 2**63],
        [{"a": None}, {"a": None}],
    ],
)
@pytest.mark.parametrize("between", [0, 1500])
def test_cells_of_other_types_keep_theirs(tmp_path, cells, between):
    """Also where the rows between are more than are read at once."""
    cells = [cells[0]] * between + cells
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"answer": cell}) for cell in cells))
    assert exact(offered(read(path))["answer"]) == exact(cells)


def test_columns_of_one_type_stay_arrow(tmp_path):
    path = tmp_path / "rows.jsonl"
    row = {"i": 1, "f": 0.5, "t": "a", "ids": [1, 2], "nested": {"a": [{"b": 1}]}}
    path.write_text("\n".join([json.dumps(row)] * 1100 + [json.dumps({"f": None, "ids": []})]))
    assert {field.name: field.type for field in read(path).schema} == {
        "i": pa.int64(),
        "f": pa.float64(),
        "t": pa.string(),
        "ids": pa.list_(pa.int64()),
        "nested": pa.struct({"a": pa.list_(pa.struct({"b": pa.int64()}))}),
    }


# -- rows of Python

DAY = datetime.date(2020, 1, 2)
MOMENT = datetime.datetime(2020, 1, 2, 3, 4, 5, 6)
LENGTH = datetime.timedelta(1, 2, 3)


def columns_of(*cells):
    """The table of rows with one column x."""
    return to_table("mine.py:rows", [(f"row {n}", {"x": cell}) for n, cell in enumerate(cells, 1)])


UTC = datetime.UTC
PLAIN = st.one_of(
    JSON,
    st.binary(max_size=2),
    st.dates(),
    st.datetimes(timezones=st.sampled_from([None, UTC])).map(lambda at: at.replace(fold=0)),
    st.decimals(allow_nan=False, allow_infinity=False, places=2, max_value=10**6, min_value=0),
    st.floats(),
    st.timedeltas(max_value=datetime.timedelta(99), min_value=datetime.timedelta()),
)


@given(st.lists(PLAIN, min_size=1, max_size=3))
def test_python_rows_are_kept_or_refused(cells):
    try:
        column = offered(columns_of(*cells))["x"]
    except ConfigError as error:
        assert "column x" in str(error)
        return
    # a zone may have another name
    expected = exact(cells).replace("datetime.timezone.utc", "zoneinfo.ZoneInfo(key='UTC')")
    assert exact(column) == expected


@pytest.mark.parametrize(
    ("cells", "kept"),
    [
        ([(1, (2, 3)), [np.int8(1), np.array([2, 3])]], [[1, [2, 3]]] * 2),
        ([np.float64(1.5), 2, np.int64(3)], [1.5, 2, 3]),
        ([np.float64(1.5), None], [1.5, None]),
        ([{"at": DAY, "no": None}], [{"at": DAY, "no": None}]),
    ],
)
def test_tuples_and_values_of_numpy_become_pythons(cells, kept):
    assert exact(columns_of(*cells)["x"].to_pylist()) == exact(kept)


@pytest.mark.parametrize(
    ("cells", "why"),
    [
        ([b"1", 2], "row 2: column x: "),
        ([b"1", "2"], "row 2: column x: '2' becomes b'2': its rows need values of one type"),
        ([MOMENT, 0.5], "row 2: column x: 0.5 becomes datetime"),
        ([MOMENT, -6.3e16], "row 2: column x: date value out of range"),
        ([Decimal("1.0"), Decimal("2.25")], r"row 1: column x: .* becomes Decimal\('1.00'\)"),
        ([{"a": b"1"}, {"b": b"2"}], "row 1: column x: {'a': b'1'} becomes .*'b': None}: its rows"),
        ([{1, 2}, b"1"], "row 2: column x"),
        ([{1, 2}], r"row 1: column x: \{1, 2\} becomes \[1, 2\]"),
        ([[[3]], [{1, 2}]], r"row 2: column x: \[\{1, 2\}\] becomes \[\[1, 2\]\]"),
        ([{1: 2}], "row 1: column x: .*dict key"),
        (["\ud800"], "row 1: column x: .*surrogates"),
        ([json.loads('{"a":' * 300 + "0.5" + "}" * 300)], "row 1: column x: .* levels deep"),
        ([DAY, pd.NaT], "row 2: column x: NaT of pandas is a null: give None"),
        (["a", pd.NA], "row 2: column x: <NA> of pandas is a null"),
    ],
)
def test_python_rows_that_neither_arrow_nor_json_keeps_are_named(cells, why):
    with pytest.raises(ConfigError, match=why):
        columns_of(*cells)


# -- CSV


@given(
    st.lists(
        st.lists(
            st.sampled_from(["", "7", "-1", "007", "1.0", "2.5", "1.50", "true", "NA", "1e5"])
            | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
            | st.integers().map(str)
            | st.floats().map(str),
            min_size=2,
            max_size=2,
        ),
        min_size=1,
        max_size=4,
    )
)
def test_csv_cells_say_what_stands_in_the_file(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("csv") / "rows.csv"
    text = io.StringIO(newline="")
    csv.writer(text, quoting=csv.QUOTE_ALL).writerows([["x", "y"], *rows])
    path.write_text(text.getvalue(), "utf-8", newline="")
    with open(path, encoding="utf-8", newline="") as file:
        expected = [*csv.DictReader(file)]
    found = read(path).to_pylist()
    assert [
        {name: "" if cell is None else str(cell) for name, cell in row.items()} for row in found
    ] == expected


def test_csv_columns_are_numbers_only_if_every_cell_is_one(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(
        "int,mixed,zeros,places,words,day,empty,none,large\n"
        "7,7,007,1.50,true,2020-01-02,,nan,inf\n\n"
        ',2.5,8,2,NA,2020-01-03,,1.5,-inf\n"-1",-3,9,2.5,null,,,2,3\n'
    )
    assert exact(offered(read(path))) == exact(
        {
            "int": [7, None, -1],
            "mixed": [7, 2.5, -3],
            "zeros": ["007", "8", "9"],
            "places": ["1.50", "2", "2.5"],
            "words": ["true", "NA", "null"],
            "day": ["2020-01-02", "2020-01-03", ""],
            "empty": ["", "", ""],
            "none": ["nan", "1.5", "2"],
            "large": ["inf", "-inf", "3"],
        }
    )


@pytest.mark.parametrize("digits", [301, 308, 309, 5000])
def test_a_csv_cell_with_more_digits_than_json_may_have_is_text(tmp_path, digits):
    path = tmp_path / "rows.csv"
    path.write_text(f"q,n\na,{'9' * digits}\nb,-{'9' * digits}\nc,7\n")
    assert read(path)["n"].to_pylist() == ["9" * digits, "-" + "9" * digits, "7"]


def test_a_csv_cell_may_be_as_long_as_memory_and_break_lines(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text('question,program\n"q\n?",' + "x" * 3_000_000 + "\n")
    assert read(path).to_pylist() == [{"question": "q\n?", "program": "x" * 3_000_000}]


@pytest.mark.parametrize(
    "text, why",
    [
        ("q,a\n", "has no rows"),
        ("a,b\n1,2\n1,2,3\n", r"row 2 \(line 3\): has 3 cells"),
        ('a\n"x\n', "line 2: is not CSV: unexpected end of data"),
        ('a\n"x"y\n', "line 2: is not CSV"),
        ("a,b,a\n1,2,3\n", "rows.csv: column a occurs more than once"),
        ("a\n1\0\n", r"row 1 \(line 2\): column a has a NUL character"),
        ("question,answer\n1,2\n".encode("utf-16"), "column .* is not UTF-8"),
        (
            "question;answer\n1;2\n",
            "column question;answer is the only one: expected commas .* found ';'",
        ),
    ],
)
def test_bad_csv_is_named(tmp_path, text, why):
    path = tmp_path / "rows.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=why):
        read(path)


# -- Arrow

NUMBERS = pa.array([1, 1, None, 2])
TEXTS = pa.array(["a", None, "a text of more than twelve bytes", ""])
VIEWS = TEXTS.cast(pa.string_view())
RUNS = pc.run_end_encode(NUMBERS)
SMALL = pa.array([0.1, None, 3.3], pa.float32())
B_SMALL = pa.struct({"b": pa.float32()})
LISTS = [[1], None, [], [2, None]]
MAPS = [[("a", 1)], None, [], [("b", None), ("c", 2)]]
DICTS = [{"a": 1}, None, {}, {"b": None, "c": 2}]
JSON_TEXTS = ['{"a": null}', None, '"B"', "[1, 2.5]"]
JSON_CELLS = [{"a": None}, None, "B", [1, 2.5]]


def json_list(texts):
    return pa.array(texts, pa.list_(pa.string())).cast(pa.list_(pa.json_()))


ARROW = {
    "bool": pa.array([True, None, False, True]),
    "int8": NUMBERS.cast(pa.int8()),
    "float64": pa.array([1.0, None, 2.5, -0.0]),
    "decimal256": pa.array([Decimal("1.50"), None], pa.decimal256(50, 2)),
    "timestamp": pa.array([MOMENT.replace(microsecond=0), None], pa.timestamp("s")),
    "duration": pa.array([LENGTH, None]),
    "binary": pa.array([b"\xff", None]),
    "binary_view": pa.array([b"\xff", None], pa.binary_view()),
    "string": TEXTS,
    "string_view": VIEWS,
    "dictionary": TEXTS.dictionary_encode(),
    "dictionary of nulls": pa.DictionaryArray.from_arrays(pa.array([0, None, 1]), TEXTS),
    "list": pa.array(LISTS),
    "fixed_size_list": pa.array([[1, 2], None], pa.list_(pa.int64(), 2)),
    "list_view": pa.array(LISTS, pa.list_view(pa.int64())),
    "run_end_encoded": RUNS,
    "list of runs": pa.ListArray.from_arrays(pa.array([0, 2, 2, 4], pa.int32()), RUNS),
    "struct": pa.array([{"a": 1, "b": [{"c": "x"}]}, None, {"a": None, "b": None}]),
    "struct of views": pa.array(
        [{"a": "x", "b": ["y"]}, None],
        pa.struct({"a": pa.string_view(), "b": pa.list_view(pa.string_view())}),
    ),
    "null": pa.nulls(3),
    "uuid": pa.array([uuid.UUID(int=1), None]),
}
"""Arrays whose values are those of `to_pylist`."""
OTHERWISE = {
    "map": (pa.array(MAPS, pa.map_(pa.string(), pa.int64())), DICTS),
    "struct of maps": (
        pa.array([{"m": MAPS[0]}, {"m": None}], pa.struct({"m": pa.map_(pa.string(), pa.int64())})),
        [{"m": {"a": 1}}, {"m": None}],
    ),
    "json": (pa.array(JSON_TEXTS, pa.json_()), JSON_CELLS),
    "json of views": (
        pa.ExtensionArray.from_storage(
            pa.json_(pa.string_view()), pa.array(JSON_TEXTS, pa.string_view())
        ),
        JSON_CELLS,
    ),
    # the shortest decimal that the type tells from others; whole numbers are exact
    "float32": (
        pa.array([0.1, None, 2.5, 2.0**27, -0.0, 1e-40], pa.float32()),
        [0.1, None, 2.5, 134217728.0, -0.0, 1e-40],
    ),
    "float16": (pa.array([0.1, None, 65504.0], pa.float16()), [0.1, None, 65504.0]),
    "dictionary of float32": (SMALL.dictionary_encode(), [0.1, None, 3.3]),
    "struct of float32": (
        pa.array([{"a": [{"b": 0.1}]}, None], pa.struct({"a": pa.list_(B_SMALL)})),
        [{"a": [{"b": 0.1}]}, None],
    ),
    "map of float32": (
        pa.array([[("a", 0.1)], None], pa.map_(pa.string(), pa.float32())),
        [{"a": 0.1}, None],
    ),
    "tensor of float32": (
        pa.FixedShapeTensorArray.from_numpy_ndarray(np.array([[0.1, 3.3]], np.float32)),
        [[0.1, 3.3]],
    ),
    "list of json": (json_list([JSON_TEXTS, None, []]), [JSON_CELLS, None, []]),
    "struct of json and views": (
        pa.StructArray.from_arrays([pa.array(JSON_TEXTS, pa.json_()), VIEWS], ["j", "v"]),
        [{"j": cell, "v": text} for cell, text in zip(JSON_CELLS, TEXTS.to_pylist(), strict=True)],
    ),
}
CASES = {**{name: (array, array.to_pylist()) for name, array in ARROW.items()}, **OTHERWISE}


def write_arrow(path, table, kind):
    if kind == "parquet":
        pa.parquet.write_table(table, path)
    elif kind == "feather":
        pa.feather.write_feather(table, str(path))
    else:
        opened = {"arrow": pa.ipc.new_file, "stream": pa.ipc.new_stream}[kind]
        with opened(path, table.schema) as file:
            file.write_table(table)


@pytest.mark.parametrize("name", CASES)
def test_arrow_cells_are_what_to_pylist_gives_but_for_maps_json_and_short_floats(tmp_path, name):
    array, values = CASES[name]
    table = pa.table({"x": pa.chunked_array([array, array])})
    for kind in ("arrow", "stream", "feather", "parquet"):
        path = tmp_path / f"{kind}.{kind if kind != 'stream' else 'arrow'}"
        try:
            write_arrow(path, table, kind)
        except (pa.ArrowException, TypeError):  # the format has no such type
            assert kind == "parquet" or name.startswith("dictionary of")
            continue
        assert exact(offered(read(path))["x"]) == exact(values * 2), kind


@pytest.mark.parametrize(
    "array, why",
    [
        (pa.array([0, 10**18], pa.timestamp("s")), "row 2: column x: "),
        (pa.array([None, "{"], pa.json_()), "row 2: column x: Expecting property name"),
        (pa.array(["1", '{"a": 1, "a": 2}'], pa.json_()), "row 2: column x: a key occurs twice"),
        (json_list([["1"], ["1", "[NaN]"]]), "row 2: column x: NaN is not JSON"),
        (pa.array(["1", '["x\\u0000"]'], pa.json_()), "row 2: column x: 0 has a NUL character"),
        (
            pa.array([[], [("a", 1), ("a", 2)]], pa.map_(pa.string(), pa.int64())),
            "row 2: column x: a map has a key twice",
        ),
        (
            pa.UnionArray.from_sparse(pa.array([0, 1], pa.int8()), [NUMBERS[:2], TEXTS[:2]]),
            "column x is of the type sparse_union.*: write its values as JSON, numbers or text",
        ),
        (
            pa.array([[(1, 15, 30)]], pa.list_(pa.month_day_nano_interval())),
            "column x is of the type list<item: month_day_nano_interval>",
        ),
        (
            pa.array([None, [([1], 1)]], pa.map_(pa.list_(pa.int64()), pa.int64())),
            "row 2: column x: unhashable type: 'list'",
        ),
        (
            pa.StructArray.from_arrays(
                [pa.array([0.5], pa.float32()), pa.array([bytes(16)], pa.uuid())], ["a", "b"]
            ),
            "column x of type struct<a: float, b: extension<arrow.uuid>>: extension",
        ),
    ],
)
def test_arrow_cells_that_python_cannot_hold_are_named(tmp_path, array, why):
    write_arrow(tmp_path / "rows.arrow", pa.table({"x": array}), "arrow")
    with pytest.raises(ConfigError, match=why):
        read(tmp_path / "rows.arrow")


def test_a_struct_inside_a_map_has_no_null_of_another_rows_key():
    kind = pa.map_(pa.string(), pa.struct({"a": pa.int64(), "b": pa.int64()}))
    column = pa.chunked_array([[[("x", {"a": 1, "b": None}), ("y", None)]]], kind)
    assert without_nulls(wrap(column)) == [{"x": {"a": 1}, "y": None}]
    written = [{"a": None, "b": [{"c": None}]}]
    assert without_nulls(json_array(written)) == written


def test_a_folder_of_datasets_gives_what_datasets_gives(tmp_path):
    import datasets

    rows = [
        {"mixed": 5, "list": [{"a": 1}, "x"], "object": {"a": 1}, "day": DAY, "label": 0},
        {"mixed": "B", "list": [], "object": {"b": [None]}, "day": None, "label": 1},
        {"mixed": [1, 2.5], "list": [7], "object": None, "day": DAY, "label": 1},
    ]
    features = datasets.Features(
        {
            "mixed": datasets.Json(),
            "list": datasets.List(datasets.Json()),
            "object": datasets.Json(),
            "day": datasets.Value("date32"),
            "label": datasets.ClassLabel(names=["no", "yes"]),
        }
    )
    dataset = datasets.Dataset.from_list(rows, features=features)
    dataset.save_to_disk(tmp_path / "folder")
    dataset.to_parquet(tmp_path / "rows.parquet")
    expected = {name: [row[name] for row in rows] for name in rows[0]}
    assert exact(offered(read(f"datasets:{tmp_path / 'folder'}"))) == exact(expected)
    assert exact(offered(read(tmp_path / "rows.parquet"))) == exact(expected)
