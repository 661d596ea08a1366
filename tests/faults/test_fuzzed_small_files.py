"""The small files of a store, with right checksums and wrong contents or torn: tags and journals,
ledgers, the index, leases, staging notes, store.json. Who reads them gives an answer or a typed
error; who writes beside them leaves every version as it was."""

import json
import shutil
import zlib
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from quiver.flows.commands import versions as commands
from quiver.stages.common.store import Store, leases
from quiver.stages.common.store.leases import Owner
from quiver.stages.common.store.retention import remove
from quiver.stages.common.verification import verify
from tests.faults.broken import (
    VALUES,
    Raw,
    error_of,
    garbled,
    mutated,
    sealed,
    snapshot,
    to_text,
)
from tests.stages.common.store.test_store import Settings, commit, table, work_on

REFS = ('"a/logprobs@1"', '"a/logprobs@prod"', '"a/policy@0"', '"a/logprobs@77"', '"b/x@1"')
STAGED = Settings(seed=7)
VERSIONS = "v0*"


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A store with versions, a deleted one, a tag, and half a version that
    processes share, of which one still holds the work."""
    store = Store(tmp_path_factory.mktemp("small") / "store")
    first, second, third = (commit(store, Settings(seed=seed), shards=1) for seed in range(3))
    remove(store, third.ref, "no longer needed")
    store.tag("a", "prod", first.ref, why="first", about={"iteration": 1})
    store.tag("a", "prod", second.ref, why="better", key="night n1", about={"iteration": 2})
    store.find("a", "logprobs", "0" * 64)
    with suppress(KeyboardInterrupt), work_on(store, STAGED, share=True) as work:
        for index in work.take_shards(3):
            if index == 2:
                raise KeyboardInterrupt
            work.write(index, table(2 * index))
    (folder,) = (store.path / "a/logprobs/.staging").glob("*.leases")
    owner = {**vars(Owner.this_process()), "start_time": 1}  # of a process that is no more
    held = {"owner": owner, "token": "t", "label": "alone", "released": False}
    (folder / "work").mkdir()
    (folder / "work/000001").write_text(json.dumps(held))
    return store.path


@pytest.fixture(autouse=True)
def short_lived(monkeypatch):
    """Leases of processes that cannot be seen are waited for less long."""
    monkeypatch.setattr(leases, "SECONDS_TO_LIVE", 0.1)


def small_files(store: Path) -> list[Path]:
    """All that is neither a version's nor a shard."""
    paths = [
        path
        for path in store.rglob("*")
        if path.is_file() and path.suffix != ".arrow" and not path.parent.match(VERSIONS)
    ]
    return sorted(paths)


def break_some(random: Random, store: Path) -> list[Path]:
    """Break one or two of the small files."""
    paths = random.sample(small_files(store), random.choice((1, 1, 2)))
    for path in paths:
        break_one(random, path)
    return paths


def break_one(random: Random, path: Path) -> None:
    """Another content for a file; its checksum fits, if it carries one."""
    raw = path.read_bytes()
    is_plain = path.name in ("prod", ".reserve", "newest") or not raw
    if random.random() < 0.2 or is_plain:
        texts = (random.choice(REFS), random.choice(VALUES))
        broken = random.choice((garbled(random, raw), *map(str.encode, texts)))
    elif path.name == "versions":
        broken = index_of(random, raw)
    else:
        fields = json.loads(raw)
        fields.pop("checksum", None)
        if random.random() < 0.1:
            fields = Raw(random.choice(VALUES))
        text = to_text(mutated(random, fields, REFS))
        is_sealed = b'"checksum"' in raw
        broken = sealed(text) if is_sealed else text.encode("utf-8", "surrogatepass")
    path.write_bytes(broken)


def index_of(random: Random, raw: bytes) -> bytes:
    """An index of other lines, whose last line fits them."""
    *lines, last = map(json.loads, raw.splitlines())
    texts = [to_text(mutated(random, line)) for line in lines]
    body = "".join(f"{text}\n" for text in texts).encode("utf-8", "surrogatepass")
    state = mutated(random, last) if random.random() < 0.3 else last
    if isinstance(state, dict):
        state["crc32"] = zlib.crc32(body)
    return body + to_text(state).encode("utf-8", "surrogatepass") + b"\n"


def readers_of(store: Path) -> dict:
    path = str(store)
    return {
        "ls": lambda: commands.ls(None, path),
        "show": lambda: commands.show("a/logprobs@prod", 2, path),
        "show old": lambda: commands.show("a/logprobs@old", 2, path),
        "deleted": lambda: commands.show("a/logprobs@3", 2, path),
        "lineage": lambda: commands.lineage("a/logprobs@3", path),
        "history": lambda: commands.history("a/logprobs@prod", path),
        "history old": lambda: commands.history("a/logprobs@old", path),
        "verify": lambda: verify(Store(store)),
        "find": lambda: Store(store).find("a", "logprobs", "0" * 64),
    }


def writers_of(store: Path) -> dict:
    path = str(store)
    return {
        "tag": lambda: commands.tag("prod", "a/logprobs@1", "back", path),
        "tag old": lambda: commands.tag("old", "a/logprobs@2", "on", path),
        "decide": lambda: Store(store).tag("a", "prod", "a/logprobs@1", key="night n2"),
        "rm": lambda: commands.rm("a/logprobs@1", "", path),
        "commit": lambda: commit(Store(store), Settings(seed=5), shards=1),
        "again": lambda: commit(Store(store), Settings(seed=2), shards=1),
        "finish": lambda: commit(Store(store), STAGED, shards=3),
        "finish together": lambda: finish_together(store),
    }


def finish_together(store: Path) -> None:
    with work_on(Store(store), STAGED, share=True, patience=0.0) as work:
        if work.done is None:
            work.rows_per_shard(2)
            for index in work.take_shards(3):
                work.write(index, table(2 * index))
            work.commit()


def fuzz(whole: Path, folder: Path, seed: int, count: int, capsys) -> None:
    """`count` stores, each with one or two broken files."""
    random = Random(seed)
    refused = 0
    for number in range(count):
        store = folder / "store"
        shutil.copytree(whole, store)
        paths = break_some(random, store)
        everything = snapshot(store, (".index", ".ledger"))
        data = snapshot_of_versions(store)
        readers, writers = readers_of(store), writers_of(store)
        names = [*random.sample(sorted(readers), 3), None, *random.sample(sorted(writers), 2)]
        for name in names:
            if name is None:
                assert snapshot(store, (".index", ".ledger")) == everything
                continue
            try:
                refused += error_of((readers | writers)[name]) is not None
            except BaseException as error:
                texts = {str(path): path.read_bytes()[:500] for path in paths if path.exists()}
                error.add_note(f"seed {seed}, store {number}, {name}: {texts}")
                raise
        after = snapshot_of_versions(store)
        assert {key: after.get(key) for key in data if "v000001" not in key} == {
            key: data[key] for key in data if "v000001" not in key
        }, "what was committed stays, but for the one that is deleted"
        shutil.rmtree(store)
        capsys.readouterr()
    assert refused > count / 4


def snapshot_of_versions(store: Path) -> dict[str, tuple]:
    return {
        key: state for key, state in snapshot(store).items() if "/v0" in key and ".led" not in key
    }


def test_wrong_small_files_are_typed_errors_or_done_again(whole, tmp_path, capsys):
    fuzz(whole, tmp_path, seed=1, count=8, capsys=capsys)


@pytest.mark.torture
@pytest.mark.parametrize("seed", range(10, 20))
def test_10_000_stores_with_wrong_small_files(whole, tmp_path, capsys, seed):
    fuzz(whole, tmp_path, seed=seed, count=1000, capsys=capsys)
