"""Rows of every kind of source arrive untouched and typed; bad ones are ConfigErrors with file and
line."""

import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest

from quiver.schemas.errors import ConfigError
from quiver.stages.prompt import sources, stage
from quiver.stages.turns import trajectories


def read(source, **options):
    return sources.read(sources.SourceConfig(source=source, **options))


ROWS = [
    {"question": "3 + 4?", "answer": 7, "notes": {"from": ["a", "b"]}},
    {"question": "é漢?", "answer": -1, "notes": None},
]


def test_a_folder_of_datasets(tmp_path):
    import datasets

    table = datasets.Dataset.from_list(ROWS).select([1, 0])
    table.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"test": table}).save_to_disk(tmp_path / "split")
    assert read(f"datasets:{tmp_path / 'one'}").table.to_pylist() == ROWS[::-1]
    found = read(f"datasets:{tmp_path / 'split'}", split="test")
    assert found.table.to_pylist() == ROWS[::-1]
    assert len(found.sha256) == 64
    with pytest.raises(ConfigError, match=r"data.split train: .* has the splits test"):
        read(f"datasets:{tmp_path / 'split'}", split="train")
    with pytest.raises(ConfigError, match=r"data.split test: .* has the splits train"):
        read(f"datasets:{tmp_path / 'one'}", split="test")


def test_a_hub_id_without_a_network_is_a_config_error():
    with pytest.raises(ConfigError, match="datasets:nobody/nothing"):
        read("datasets:nobody/nothing")


GENERATOR = """
def sums(count, start=0):
    for number in range(start, start + count):
        yield {"question": f"{number} + 1?", "answer": number + 1}

def breaks():
    yield {"a": 1}
    raise KeyError("gone")

def lists():
    yield [1]

def numbered():
    yield {"prompt": "a"}
    yield {"prompt": "a", 1: 2}

def broken():
    yield {"a\\0b": 1}
"""


def test_an_array_may_begin_after_any_space(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text("\ufeff" + " " * 100_000 + "\n" + json.dumps([{"q": "1"}, {"q": "2"}]))
    assert read(str(path)).table["q"].to_pylist() == ["1", "2"]


def test_a_generator_is_hashed_by_its_rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "made.py").write_text(GENERATOR)
    found = read("made.py:sums", arguments={"count": 2000})
    assert found.table.num_rows == 2000
    assert found.table.slice(1999).to_pylist() == [{"question": "1999 + 1?", "answer": 2000}]
    assert read("made.py:sums", arguments={"count": 2000, "start": 0}).sha256 == found.sha256
    assert read("made.py:sums", arguments={"count": 2000, "start": 1}).sha256 != found.sha256


@pytest.mark.parametrize(
    "source, why",
    [
        ("made.py:sum", "did you mean sums"),
        ("made.py:breaks", "KeyError: 'gone'"),
        ("made.py:lists", "row 1: expected an object, found list"),
        ("made.py:numbered", "made.py:numbered row 2: the key 1 is not text"),
        ("made.py:broken", "made.py:broken row 1: the key .* has a NUL character"),
        ("made.py:sums", "missing 1 required positional argument"),
        ("none.py:sums", "there is no file"),
        ("no_such_module:sums", "ModuleNotFoundError"),
        ("broken.py:sums", "SyntaxError"),
        ("rows.txt", "expected a file"),
        ("folder", r"datasets:PATH \(a folder that save_to_disk wrote\)"),
        ("none.jsonl", "there is no file"),
        ("openai/gsm8k", r"function; did you mean datasets:openai/gsm8k\?"),
        ("hf://datasets/o/n/rows.parquet", r"function; did you mean datasets:o/n\?"),
        ("hf://datasets/o/n@main", r"function; did you mean datasets:o/n\?"),
        ("s3://b/rows.jsonl", r"function; addresses are not read: copy the file to this machine"),
        ("d/*.parquet", "there is no file .*; only one file is read: .* a generator"),
    ],
)
def test_what_is_not_there_is_named(tmp_path, monkeypatch, source, why):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "made.py").write_text(GENERATOR)
    (tmp_path / "broken.py").write_text("def (")
    with pytest.raises(ConfigError, match=why):
        read(source)


@pytest.mark.parametrize("given", [{}, {"prompt": "question"}])
def test_rows_inside_of_an_object_are_told(tmp_path, given):
    path = tmp_path / "rows.json"
    path.write_text('{"version": 1, "data": [{"question": "a"}]}')
    with pytest.raises(ConfigError, match=r"(?s)has only version, data.*rows are in data, write"):
        stage.resolve(stage.Config(source=str(path), **given))


GOOD = b'{"q": "fine"}\n'
BAD_LINES = [
    (b'{"q": "\xff"}', "line 2.*not UTF-8: byte 0xff"),
    (b'{"q": {"a": ["a\\u0000b"]}}', "line 2: cannot be read: q.a.0 has a NUL character"),
    (b'{"q": "a\x00b"}', "line 2.*not JSON"),
    (b'{"q": "\\ud800"}', "line 2.*lone surrogate"),
    (b'{"q": "cut', "line 2.*not JSON"),
    (b'{"q": 1, "q": 2}', "line 2: cannot be read: a key occurs twice: q"),
    (b'{"q": NaN}', "line 2.*NaN"),
    (b'{"q": -1e400}', "line 2.*-1e400 is more than a float holds"),
    (b"[1, 2]", "line 2.*expected an object, found list"),
    (b"[" * 200_000, "line 2.*nested more than 100 levels deep"),
    (
        b'{"n": -' + b"9" * 301 + b"}",
        "line 2: cannot be read: a number has 301 digits, at most 300",
    ),
]


@pytest.mark.parametrize("line, why", BAD_LINES)
def test_a_bad_line_is_named(tmp_path, line, why):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(GOOD + line + b"\n" + GOOD)
    with pytest.raises(ConfigError, match=why):
        read(str(path))


def test_an_item_of_an_array_is_no_line(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text('[\n {"q": 1},\n\n\n {"q": 2},\n 7]')
    with pytest.raises(ConfigError, match="item 3: expected an object, found int"):
        read(str(path))
    with pytest.raises(ConfigError, match="item 1: prompt_ids is missing"):
        trajectories.read(str(path))


@pytest.mark.parametrize("suffix", ["json", "jsonl"])
def test_an_object_over_several_lines_is_named(tmp_path, suffix):
    path = tmp_path / f"rows.{suffix}"
    path.write_text(json.dumps({"data": [{"q": "fine"}]}, indent=2))
    with pytest.raises(
        ConfigError, match="holds one object over several lines, expected an array of obj"
    ):
        read(str(path))


def test_escaped_pairs_of_surrogates_are_one_character(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"q": "\\ud83d\\ude00"}\n')
    assert read(str(path)).table.to_pylist() == [{"q": "😀"}]


@pytest.mark.parametrize(
    "name, data, why",
    [
        ("a.parquet", b"PAR1 not really", "cannot be read"),
        ("a.arrow", b"ARROW1 not really", "cannot be read"),
        ("a.json", b'[{"q": 1}', "not JSON"),
        ("a.jsonl", b"\n \n", "has no rows"),
        ("a.json", b"[]", "has no rows"),
        ("a.JSON", b"[]", r"expected a file \(.*, in lower case and unpacked\)"),
    ],
)
def test_a_torn_file(tmp_path, name, data, why):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ConfigError, match=why):
        read(str(tmp_path / name))


def test_columns_are_joined_over_chunks(tmp_path):
    path = tmp_path / "rows.jsonl"
    many = [{"n": 1, "only": None}] * 1500
    path.write_text("\n".join(map(json.dumps, [*many, {"n": 0.5, "s": {"x": 1}, "only": "late"}])))
    table = read(str(path)).table
    assert table.slice(1500).to_pylist() == [{"n": 0.5, "only": "late", "s": {"x": 1}}]
    assert repr(table.slice(0, 1).to_pylist()) == "[{'n': 1, 'only': None, 's': None}]"
    assert table.schema.field("only").type == pa.string()


def test_nesting_that_arrow_files_do_not_carry(tmp_path):
    path = tmp_path / "rows.jsonl"
    for levels, why in (
        (50, ""),
        (65, "column q is nested more than 60 levels deep"),
        (900, "line 1: cannot be read: it is nested more than 100 levels deep"),
    ):
        path.write_text('{"q": ' + "[" * levels + "1" + "]" * levels + "}")
        if why:
            with pytest.raises(ConfigError, match=why):
                read(str(path))
        else:
            assert read(str(path)).table.num_rows == 1


def test_arrow_text_that_is_not_utf8(tmp_path):
    path = tmp_path / "rows.arrow"
    bad = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe")]
    )
    with pa.ipc.new_file(path, pa.schema([("q", pa.string())])) as out:
        out.write_table(pa.table({"q": bad}))
    with pytest.raises(ConfigError, match="UTF"):
        read(str(path))


def test_the_hash_of_rows_does_not_depend_on_their_chunks_or_notes():
    whole = pa.Table.from_pylist(ROWS * 50)
    cut = pa.concat_tables([whole.slice(0, 7), whole.slice(7)])
    assert sources.hash_rows(whole) == sources.hash_rows(cut)
    told = whole.replace_schema_metadata({"huggingface": "{}"})
    assert sources.hash_rows(whole) == sources.hash_rows(told)
    assert sources.hash_rows(whole) != sources.hash_rows(whole.slice(1))
    assert sources.hash_rows(whole) != sources.hash_rows(
        whole.rename_columns(["q", "answer", "notes"])
    )


def test_the_documents_generator_reads_chats_of_sharegpt(tmp_path):
    document = Path(sources.__file__).parents[2] / "deployments/docs/sources.md"
    (code,) = re.findall(
        r"```python\n(\"{3}Chats in ShareGPT.*?)```", document.read_text(), re.DOTALL
    )
    (tmp_path / "sharegpt.py").write_text(code)
    said = [("system", "Be terse."), ("human", "1 + 1?"), ("gpt", "2"), ("human", "Sure?")]
    chats = [
        {"id": id, "conversations": [{"from": who, "value": text} for who, text in said[:count]]}
        for id, count in (("a", 3), ("b", 4))
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    asked = [
        {"role": "system", "content": "Be terse."},
        {"role": "user", "content": "1 + 1?"},
    ]
    again = [{"role": "assistant", "content": "2"}, {"role": "user", "content": "Sure?"}]
    expected = [
        {"messages": asked, "answer": "2"},
        {"messages": asked + again, "answer": None},
    ]
    for kind, text in (("jsonl", path.read_text()), ("json", json.dumps(chats))):
        path = tmp_path / f"chats.{kind}"
        path.write_text(text)
        read_rows = read(f"{tmp_path}/sharegpt.py:rows", arguments={"path": str(path)})
        assert read_rows.table.to_pylist() == expected
