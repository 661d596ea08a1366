"""Damage to any file of a store: told by `verify`, or harmless; never other rows, never an untyped
error."""

import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from quiver.schemas.errors import QuiverError
from quiver.stages.core.store import Store, leases
from quiver.stages.core.store.retention import remove
from tests.faults.scenes import killed, one_version, three_kinds, verified, written
from tests.faults.sizes import sizes

UNFINISHED = 3
"""Seed of what was begun and not finished: a table of four shards, and a training."""


def flip(raw: bytearray, random: Random) -> None:
    """Another bit somewhere."""
    raw[random.randrange(len(raw))] ^= 1 << random.randrange(8)


def cut(raw: bytearray, random: Random) -> None:
    """The end is missing, or all of it."""
    del raw[random.randrange(len(raw)) :]


def zero_tail(raw: bytearray, random: Random) -> None:
    """The end was allotted, and never written."""
    begin = random.randrange(len(raw))
    raw[begin:] = bytes(len(raw) - begin)


def extend(raw: bytearray, random: Random) -> None:
    """Something stands behind the end."""
    raw += random.randbytes(random.choice((1, 512)))


OF_BYTES = (flip, cut, zero_tail, extend)


@pytest.fixture(scope="module")
def whole(fast_path_factory) -> Path:
    """A store with a file of every sort: versions of four kinds, tags, marks, an index, and
    unfinished work of processes that died."""
    path = fast_path_factory("whole") / "store"
    written(path, 100, 1)
    written(path, 101, 2, inputs=["a/logprobs@1"])
    written(path, 102, 1)
    store = Store(path)
    remove(store, "a/logprobs@3", why="too old")
    list(three_kinds(path, 7))
    for ref in ("a/logprobs@1", "a/logprobs@2"):
        store.tag("a", "prod", ref)
    store.tag("a", "best", "a/policy@1")
    killed(lambda: one_version(path, UNFINISHED), "shard.noted@3")
    killed(lambda: three_kinds(path, UNFINISHED), "resume.noted@2")
    return path


def contents(store: Store) -> dict[str, object]:
    """All that a reader gets: rows, bytes of a policy, what tags point at. Typed errors in place of
    what cannot be read."""
    refs = ("a/logprobs@1", "a/logprobs@2", "a/advantages@1", "a/updates@1")
    names = ("model.safetensors", "optimizer/state.safetensors", "optimizer/state.json")
    return looked_at(
        {ref: lambda ref=ref: store.open(ref).table() for ref in refs}
        | {name: lambda name=name: store.open("a/policy@1").files.read(name) for name in names}
        | {tag: lambda tag=tag: store.tagged("a", tag) for tag in ("prod", "best")}
        | {
            f"{tag} moves": lambda tag=tag: [entry.ref for entry in store.history("a", tag)]
            for tag in ("prod", "best")
        }
    )


def looked_at(reads: dict[str, Callable[[], object]]) -> dict[str, object]:
    """What each gets, or its typed error."""
    seen: dict[str, object] = {}
    for name, read in reads.items():
        try:
            seen[name] = read()
        except QuiverError as error:
            seen[name] = error
    return seen


def next_runs(path: Path) -> dict[str, object]:
    """What was begun is finished, and something new is made: rows and weights, or typed errors."""
    return looked_at(
        {
            "unfinished": lambda: written(path, UNFINISHED, 4).table(),
            "training": lambda: (
                Store(path)
                .open(list(three_kinds(path, UNFINISHED, starts_over=True))[-1][1])
                .files.read("model.safetensors")
            ),
            "new": lambda: written(path, 200, 2).table(),
            "again": lambda: written(path, 101, 2, inputs=["a/logprobs@1"]).table(),
        }
    )


def check(
    path: Path, expected: dict[str, object], expected_runs: dict[str, object], *, is_staged: bool
) -> str:
    """`detected` or `harmless`; AssertionError for anything else, and where what is damaged was
    only staged and is not made again."""
    try:
        store = Store(path)
        _, errors = verified(store)
    except QuiverError as error:
        assert "store.json" in error.message, error
        return "detected"
    for found, right in ((contents(store), expected), (next_runs(path), expected_runs)):
        for name, value in found.items():
            if isinstance(value, QuiverError):
                assert errors, f"{name} fails, and verify had nothing to say: {value}"
                assert not is_staged, f"{name} fails: {value}"
            else:
                assert value == right[name], f"{name} is wrong, verify says {errors}"
    return "detected" if errors else "harmless"


def to_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()
    (file / "inside").write_text("x")


def to_link(file: Path) -> None:
    """To the same bytes elsewhere, which may go."""
    file.symlink_to(file.rename(file.parents[4] / "elsewhere"))


@pytest.fixture
def damaged(whole, fast_path, monkeypatch) -> Callable[..., str]:
    """Damages one file of a copy of the store, and checks what becomes of it."""
    monkeypatch.setattr(leases, "SECONDS_TO_LIVE", 0.2)  # a lease that cannot be read waits so long
    shutil.copytree(whole, fast_path / "right")
    right = contents(Store(whole)), next_runs(fast_path / "right")

    def damage_one(file: Path, damage: Callable, random: Random) -> str:
        path = fast_path / "store"
        shutil.copytree(whole, path)
        copied = path / file.relative_to(whole)
        if damage in OF_BYTES:
            raw = bytearray(file.read_bytes())
            damage(raw, random)
            copied.write_bytes(raw)
        else:
            damage(copied)
        try:
            outcome = check(path, *right, is_staged="/.work/" in str(file))
        except AssertionError as error:
            raise AssertionError(f"{damage.__name__} of {file.relative_to(whole)}") from error
        shutil.rmtree(path)
        return outcome

    return damage_one


@pytest.mark.parametrize("trials", sizes(short=3, full=500))
@pytest.mark.parametrize("damage", OF_BYTES)
def test_damage_anywhere_is_told_or_harmless(whole, damaged, record_property, damage, trials):
    files = [file for file in sorted(whole.rglob("*")) if file.is_file() and file.stat().st_size]
    random = Random(damage.__name__)
    for trial in range(trials * (2 if damage is flip else 1)):
        outcome = damaged(files[trial % len(files)], damage, random)
        record_property(f"damaged files: {damage.__name__}, {outcome}", 1)


@pytest.mark.parametrize("share", sizes(short=5, full=1))
@pytest.mark.parametrize("damage", [*OF_BYTES, Path.unlink, to_folder, to_link])
def test_what_was_staged_is_made_again_whatever_became_of_it(whole, damaged, damage, share):
    """By the same command, without an error. One file of `share` is damaged; which ones depends on
    the damage."""
    staged = [file for file in sorted(whole.glob("*/*/.work/**/*")) if file.is_file()]
    assert {"000001", "cut", "sources", "progress", "part-00000.json"} < {
        file.name for file in staged
    }
    Random(damage.__name__).shuffle(staged)
    for file in staged[::share]:
        damaged(file, damage, Random(file.name))
