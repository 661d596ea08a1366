"""Hash and columns of a source are remembered for planning until one of its files changes; the rows
of a version are always read."""

import hashlib
import json
import os
from multiprocessing import get_context
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet
import pytest

from quiver.schemas.errors import ConfigError
from quiver.stages.core.run.runner import run_stage
from quiver.stages.prompt import sources
from quiver.stages.prompt.stage import Config, resolve, resolve_with_columns

ROWS = [{"prompt": f"What is {n} plus 5?", "answer": n + 5} for n in range(1000)]


@pytest.fixture
def kept(cache, later) -> Path:
    """Folder of what is remembered of sources."""
    return cache.with_name("sources")


def write(path: Path, rows=ROWS) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def saved(kind: str, folder: Path) -> tuple[str, Path]:
    """The same rows as a source of a kind, and its file with the rows."""
    table = pa.Table.from_pylist(ROWS)
    path = folder / f"rows.{kind}"
    if kind == "jsonl":
        write(path)
    elif kind == "csv":
        pyarrow.csv.write_csv(table, path)
    elif kind == "parquet":
        pyarrow.parquet.write_table(table, path)
    elif kind == "feather":
        pyarrow.feather.write_feather(table, path, compression="uncompressed")
    else:
        import datasets

        dataset = datasets.Dataset(table)
        if kind == "splits":
            dataset = datasets.DatasetDict(train=dataset, test=dataset.select([0]))
        dataset.save_to_disk(path)
        (data_file,) = path.glob("**/train/*.arrow" if kind == "splits" else "*.arrow")
        return f"datasets:{path}", data_file
    return str(path), path


KINDS = ["jsonl", "csv", "parquet", "feather", "folder", "splits"]


def num_bytes_read() -> int:
    """Bytes that this process has read so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


def change(path: Path) -> None:
    """Change a file without changing its size or the time of its last change."""
    before = path.stat()
    raw = path.read_bytes()
    assert b" 7 plus" in raw
    path.write_bytes(raw.replace(b" 7 plus", b" 6 plus"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size


def alter(kept: Path, **changes) -> None:
    """Change fields of the only thing that is remembered."""
    (entry,) = kept.iterdir()
    entry.write_text(json.dumps({**json.loads(entry.read_text()), **changes}))


def test_the_bytes_of_a_source_are_read_once_to_plan(kept, tmp_path):
    path = write(tmp_path / "rows.jsonl", ROWS * 10)
    config = Config(source=str(path))
    before = num_bytes_read()
    first = resolve_with_columns(config)
    assert num_bytes_read() - before > path.stat().st_size > 400_000
    before = num_bytes_read()
    assert resolve_with_columns(config) == first
    assert num_bytes_read() - before < 100_000
    assert first[0].source_sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert first[1] == ["prompt", "answer"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file_is_remembered(kept, tmp_path, kind):
    source, _ = saved(kind, tmp_path)
    config = Config(source=source)
    assert resolve_with_columns(config)[1] == ["prompt", "answer"]
    alter(kept, content={"sha256": "f" * 64, "columns": ["prompt", "level"]})
    resolved, columns = resolve_with_columns(config)
    assert resolved.source_sha256 == "f" * 64 and columns == ["prompt", "level"]


@pytest.mark.parametrize("kind", sorted({*KINDS} - {"parquet"}))  # its text is compressed
def test_a_changed_file_is_read_again(kept, tmp_path, kind):
    """Even of the same size, with the time of its last change put back."""
    source, path = saved(kind, tmp_path)
    config = Config(source=source)
    first = resolve(config)
    change(path)
    second = resolve(config)
    assert second.source_sha256 != first.source_sha256
    assert resolve(config) == second


def test_a_file_that_changes_while_it_is_read_is_read_again(kept, tmp_path, monkeypatch):
    path = write(tmp_path / "rows.jsonl")
    config = Config(source=str(path))
    real = sources._read_file

    def changed_meanwhile(path):
        table = real(path)
        change(path)
        return table

    with monkeypatch.context() as patched:
        patched.setattr(sources, "_read_file", changed_meanwhile)
        resolve(config)
    assert resolve(config).source_sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_each_split_has_its_own_memory(kept, tmp_path):
    source, _ = saved("splits", tmp_path)
    configs = [Config(source=source, split=split) for split in ("train", "test")]
    first = [resolve(config) for config in configs]
    assert [resolve(config) for config in configs] == first
    assert first[0].source_sha256 != first[1].source_sha256
    with pytest.raises(ConfigError, match="has the splits train, test"):
        resolve(Config(source=source, split="dev"))


def test_a_file_under_another_suffix_is_another_source(kept, tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("prompt\nhello\n")
    link = tmp_path / "rows.jsonl"
    link.symlink_to(path)
    resolve(Config(source=str(path)))
    with pytest.raises(ConfigError, match="is not JSON"):
        resolve(Config(source=str(link)))


def test_a_wrong_memory_makes_no_version_and_is_corrected(kept, store, policy, tmp_path):
    config = Config(source=str(write(tmp_path / "rows.jsonl", ROWS[:3])))
    right = resolve(config)
    alter(kept, content={"sha256": "f" * 64, "columns": ["prompt"]})
    options = {"in_process": True, "policy": policy.ref}
    with pytest.raises(ConfigError, match="sha256 expected ffff"):
        run_stage("prompt", config, store, **options)
    version = store.open(run_stage("prompt", config, store, **options))
    assert version.manifest.config["source_sha256"] == right.source_sha256


@pytest.mark.parametrize("text", ["{", "", "null", '{"identity": {}}', "damaged \0"])
def test_a_broken_memory_is_none(kept, tmp_path, text):
    config = Config(source=str(write(tmp_path / "rows.jsonl")))
    first = resolve(config)
    (entry,) = kept.iterdir()
    entry.write_text(text)
    assert resolve(config) == first
    assert json.loads(entry.read_text())["content"]["sha256"] == first.source_sha256


def test_another_software_reads_again(kept, tmp_path):
    config = Config(source=str(write(tmp_path / "rows.jsonl")))
    first = resolve(config)
    (entry,) = kept.iterdir()
    identity = json.loads(entry.read_text())["identity"]
    assert pa.__version__ in identity["made_by"]
    identity["made_by"] = [*identity["made_by"][:-1], "0.1"]
    alter(kept, identity=identity, content={"sha256": "f" * 64, "columns": ["prompt"]})
    assert resolve(config) == first


def test_a_bad_row_is_the_same_error_each_time(kept, tmp_path):
    path = write(tmp_path / "rows.jsonl")
    with open(path, "a") as file:
        file.write('{"prompt": \n')
    texts = []
    for _ in range(2):
        with pytest.raises(ConfigError, match="line 1001") as caught:
            resolve(Config(source=str(path)))
        texts.append(str(caught.value))
    assert texts[0] == texts[1] and not kept.exists()


@pytest.mark.parametrize("name", ["n" * 300, "nothing/here"])
def test_a_folder_that_cannot_be_is_the_same_error_each_time(kept, name):
    for _ in range(2):
        with pytest.raises(ConfigError, match="source datasets:"):
            resolve(Config(source=f"datasets:{name}"))
    assert not kept.exists()


def test_a_column_that_is_missing_is_the_same_error_each_time(kept, tmp_path):
    """The rows are remembered; the error is about the config."""
    path = write(tmp_path / "rows.jsonl")
    for _ in range(2):
        with pytest.raises(ConfigError, match="has no such column; it has prompt, answer"):
            resolve(Config(source=str(path), prompt="question"))
    assert resolve(Config(source=str(path))).prompt == "prompt"


def test_pictures_and_generators_are_read_each_time(kept, tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"prompt": "What?", "images": "a.png"}])
    (tmp_path / "made.py").write_text('def rows(path):\n    yield {"prompt": open(path).read()}\n')
    picture = tmp_path / "a.png"
    configs = [
        Config(source=str(path), images="images"),
        Config(source=f"{tmp_path}/made.py:rows", arguments={"path": str(picture)}),
    ]
    hashes = []
    for text in ("one", "two"):
        picture.write_text(text)
        hashes += [resolve(config).source_sha256 for config in configs]
    assert len(set(hashes)) == 4 and not kept.exists()


def _resolve_with_another(source: str, barrier, results) -> None:
    barrier.wait(20)
    for _ in range(20):
        results.put(resolve(Config(source=source)).source_sha256)


def test_two_processes_at_once_both_have_it(kept, tmp_path):
    path = write(tmp_path / "rows.jsonl", ROWS[:10])
    context = get_context("fork")
    barrier, results = context.Barrier(2), context.Queue()
    arguments = (str(path), barrier, results)
    processes = [context.Process(target=_resolve_with_another, args=arguments) for _ in range(2)]
    for process in processes:
        process.start()
    found = {results.get(timeout=30) for _ in range(40)}
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0, 0]
    assert found == {hashlib.sha256(path.read_bytes()).hexdigest()}
    assert len(list(kept.iterdir())) == 1
