"""Arrow files with right hashes and wrong contents: whoever reads them gives an answer or a typed
error. What would crash its reader crashes a child process alone."""

import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from random import Random

import pytest

from quiver.flows.commands import versions
from quiver.schemas.manifest import FileEntry, content_hash
from quiver.schemas.refs import parse
from quiver.stages.common import verification
from quiver.stages.common.store import Store, arrow_check
from quiver.stages.common.store.arrow_check import ArrowCheck
from quiver.stages.common.store.storage import sha256
from tests.faults.broken import error_of, sealed

NUMBERS = (0, 1, 7, 127, 128, 255, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1)


def wounded(random: Random, raw: bytes) -> bytes:
    """`raw` with one to three of its numbers or bits changed, or a part of it gone or doubled."""
    for _ in range(random.choice((1, 1, 2, 3))):
        # half of them in the description at the end, which says where all else lies
        first = random.choice((0, max(0, len(raw) - 2000)))
        place = random.randrange(first, len(raw))
        width = random.choice((1, 2, 4, 8))
        aligned = place - place % width
        number = (random.choice(NUMBERS) % 256**width).to_bytes(width, "little")
        end = min(len(raw), place + 8 * random.randint(1, 64))
        raw = random.choice(
            (
                raw[:place] + bytes([raw[place] ^ 1 << random.randrange(8)]) + raw[place + 1 :],
                raw[:aligned] + number + raw[aligned + width :],
                raw[:place] + random.randbytes(width) + raw[place + width :],
                raw[:place] + raw[end:],
                raw[:place] + raw[place:end] * 2 + raw[end:],
                raw[:place] + bytes(end - place) + raw[end:],
            )
        )
    return raw


def wound(random: Random, store: Path) -> tuple[str, dict[Path, bytes]]:
    """Another file in one of the store's versions, with hashes that fit it: the reference, and
    what was there."""
    path = random.choice(sorted(store.glob("*/*/v*/*.arrow")))
    manifest = path.with_name("manifest.json")
    before = {written: written.read_bytes() for written in (path, manifest)}
    path.write_bytes(wounded(random, before[path]))
    fields = json.loads(before[manifest])
    del fields["checksum"]
    for entry in fields["files"]:
        if entry["name"] == path.name:
            entry.update(sha256=sha256(path), bytes=path.stat().st_size)
    entries = tuple(FileEntry(**entry) for entry in fields["files"])
    fields["content_hash"] = content_hash(fields["schema"], entries)
    manifest.write_bytes(sealed(json.dumps(fields)))
    return f"{fields['run']}/{fields['kind']}@{fields['version']}", before


def fuzz(store: Path, seed: int, count: int) -> int:
    """`count` files, each before `verify`, a reader of all rows, `show` and `report`. How many of
    them cannot be parsed."""
    random = Random(seed)
    unparsed = 0
    for number in range(count):
        ref, before = wound(random, store)
        for ledger in store.glob("*/*/.ledger"):
            shutil.rmtree(ledger)  # it would tell of other content under the number
        readers = {
            "table": lambda ref=ref: Store(store).open(ref).table().to_pylist(),
            "show": lambda ref=ref: versions.show(ref, 3, str(store)),
            "report": lambda ref=ref: versions.report(parse(ref).run, store=str(store)),
        }
        try:
            told = verification.verify(Store(store), ref)[1]
            errors = {name: error_of(read) for name, read in readers.items()}
            is_unparsed = any("cannot be parsed" in str(error) for error in told)
            assert not is_unparsed or errors["table"].code == "E-CORRUPT"
            assert {error.code for error in told} <= {"E-CORRUPT"}, told
        except BaseException as error:
            error.add_note(f"seed {seed}, file {number} ({ref})")
            raise
        unparsed += is_unparsed
        for path, raw in before.items():
            path.write_bytes(raw)
    return unparsed


@pytest.mark.parametrize(
    ("seed", "count"),
    [
        pytest.param(1, 12, id="short"),
        *(
            pytest.param(seed, 1000, id=f"full-{seed}", marks=pytest.mark.torture)
            for seed in range(10, 20)
        ),
    ],
)
def test_wrong_tables_are_typed_errors(
    finished, tmp_path, monkeypatch, capsys, record_property, seed, count
):
    """The store belongs to somebody else, so a child parses each file before anybody reads it."""
    store = tmp_path / "store"
    shutil.copytree(finished / "finished", store)
    child = ArrowCheck()  # one for all of them
    for reader in (verification, arrow_check):
        monkeypatch.setattr(reader, "ArrowCheck", lambda: nullcontext(child))
    monkeypatch.setattr("os.geteuid", lambda: (store / "store.json").stat().st_uid + 1)
    try:
        unparsed = fuzz(store, seed, count)
    finally:
        child.end()
    assert unparsed > count / 4, "most of them are read without a word: the fuzzer breaks nothing"
    record_property("wrong tables before four readers", count)
