"""A tag's journal: an entry for every move, none for what did not happen, and the way back."""

import doctest
import json
import multiprocessing
import shutil

import pytest

from quiver.flows.verification import verify
from quiver.schemas.errors import ConfigError, ConflictError, CorruptError
from quiver.schemas.manifest import digest
from quiver.stages.core.store import Store, storage, tags
from tests.stages.core.store.test_store import Settings, commit


@pytest.fixture
def versions(store) -> list[str]:
    return [str(commit(store, Settings(seed=seed)).ref) for seed in range(4)]


def line(store) -> list[tuple[str | None, str]]:
    return [(entry.before, entry.ref) for entry in store.history("a", "prod")]


def test_every_move_has_its_entry(store, versions):
    first, second, *_ = versions
    assert store.history("a", "prod") == []
    store.tag("a", "prod", first, expected=None, why="the base")
    store.tag("a", "prod", second, expected=first, why="better", key="monday", about={"score": 0.5})
    store.tag("a", "prod", second)
    store.tag("a", "prod", second, why="worse", key="tuesday")
    assert line(store) == [(None, first), (first, second), (second, second)]
    base, moved, stayed = store.history("a", "prod")
    assert (base.why, moved.why, moved.key, moved.about, stayed.why) == (
        "the base",
        "better",
        "monday",
        {"score": 0.5},
        "worse",
    )
    assert base.at < moved.at < stayed.at
    with pytest.raises(ConflictError):
        store.tag("a", "prod", first, expected=first, key="wednesday")
    assert len(store.history("a", "prod")) == 3
    assert store.runs() == ["a"]


@pytest.mark.parametrize("name", ["latest", "7"])
def test_what_could_be_taken_for_something_else_is_no_tag(store, versions, name):
    with pytest.raises(ConfigError, match="are not tags"):
        store.tag("a", name, versions[0])
    assert store.tag_names("a") == []


def test_what_was_decided_stays_decided(store, versions):
    store.tag("a", "prod", versions[0])
    store.tag("a", "prod", versions[1], expected=versions[0], key="monday")
    store.tag("a", "prod", versions[2], expected=versions[0], key="monday")
    assert str(store.resolve("a/logprobs@prod")) == versions[1]
    assert len(store.history("a", "prod")) == 2


def test_a_move_that_a_crash_stopped_did_not_happen(store, versions, monkeypatch):
    """The process dies before the entry is put, or after it and before the file beside it."""
    first, second, *_ = versions
    store.tag("a", "prod", first)

    def die(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(storage, "replacing", die)
        with pytest.raises(KeyboardInterrupt):
            store.tag("a", "prod", second, expected=first, key="night 1")
    assert line(store) == [(None, first)]
    assert str(store.resolve("a/logprobs@prod")) == first
    with monkeypatch.context() as patched:
        patched.setattr(storage.Storage, "write", die)
        with pytest.raises(KeyboardInterrupt):
            store.tag("a", "prod", second, expected=first, key="night 1")
    assert line(store) == [(None, first), (first, second)], "the entry is the move"
    assert str(store.resolve("a/logprobs@prod")) == second
    store.tag("a", "prod", second, expected=first, key="night 1")
    assert len(line(store)) == 2


def _race(path, expected, target, key, start, answers):
    store = Store(path)
    start.wait()
    while True:
        try:
            store.tag("a", "prod", target, expected=expected, key=key)
        except ConflictError:
            answers.put("conflict")
        else:
            answers.put("moved")
        return


@pytest.mark.parametrize("same_key", [False, True])
def test_of_two_that_move_at_once_one_does(store, versions, same_key):
    context = multiprocessing.get_context("fork")
    store.tag("a", "prod", versions[0])
    answers, start = context.Queue(), context.Barrier(3)
    workers = [
        context.Process(
            target=_race,
            args=(store.path, versions[0], target, "night" if same_key else target, start, answers),
        )
        for target in versions[1:]
    ]
    for worker in workers:
        worker.start()
    told = sorted(answers.get(timeout=60) for _ in workers)
    for worker in workers:
        worker.join()
    assert told == (["moved"] * 3 if same_key else ["conflict", "conflict", "moved"])
    assert len(line(store)) == 2 and line(store)[1][1] == str(store.resolve("a/logprobs@prod"))


@pytest.mark.parametrize("moment", range(12))
def test_another_moves_the_tag_between_any_two_looks_at_it(store, versions, monkeypatch, moment):
    """What this process decides on is the tag at one moment, not its journal then and its target
    later."""
    first, second, *_ = versions
    store.tag("a", "prod", first)
    looks = []

    def after_another(real):
        def look(*arguments):
            looks.append(arguments)
            if len(looks) == moment + 1:
                Store(store.path).tag("a", "prod", second, expected=first, key="night 1")
            return real(*arguments)

        return look

    for name in ("list", "read"):
        monkeypatch.setattr(storage.Storage, name, after_another(getattr(storage.Storage, name)))
    store.tag("a", "prod", second, expected=first, key="night 1")
    assert line(store) == [(None, first), (first, second)]


def test_the_way_back_leaves_out_what_was_given_up(store, versions):
    a, b, c, d = versions
    expected = {a: None, b: a, c: b}
    for ref in (a, b, c):
        store.tag("a", "prod", ref)
        assert tags.previous(store.history("a", "prod")) == expected[ref]
    store.tag("a", "prod", b, why="c got worse")
    assert tags.previous(store.history("a", "prod")) == a
    store.tag("a", "prod", b, why="d is no better", key="night")
    assert tags.previous(store.history("a", "prod")) == a
    store.tag("a", "prod", d)
    assert tags.previous(store.history("a", "prod")) == b
    assert doctest.testmod(tags).failed == 0


@pytest.mark.parametrize("trick", ["again", "of another tag", "swapped", "the newest is gone"])
def test_an_entry_counts_in_its_own_place_alone(store, versions, trick):
    for ref in versions[:3]:
        store.tag("a", "prod", ref)
    store.tag("a", "best", versions[0])
    folder = store.path / "a/tags/.prod"
    if trick == "again":
        shutil.copy(folder / "000002", folder / "000004")
    elif trick == "of another tag":
        shutil.copy(store.path / "a/tags/.best/000001", folder / "000004")
    elif trick == "swapped":
        (folder / "000003").rename(folder / "x")
        (folder / "000002").rename(folder / "000003")
        (folder / "x").rename(folder / "000002")
    else:
        (folder / "000003").unlink()
    with pytest.raises(CorruptError):
        store.resolve("a/logprobs@prod")


def test_a_tag_without_a_journal_is_told_and_gets_one(store, versions):
    """Nothing says whether its file is what was written."""
    (store.path / "a/tags").mkdir()
    (store.path / "a/tags/prod").write_text(f"{versions[0]}\n")
    for call in (lambda: store.resolve("a/logprobs@prod"), lambda: store.history("a", "prod")):
        with pytest.raises(
            CorruptError, match=f"says {versions[0]}, its journal is gone"
        ) as caught:
            call()
        assert caught.value.next == f"quiver tag prod {versions[0]}"
    (error,) = verify(store)[1]
    assert error.next == caught.value.next
    store.tag("a", "prod", versions[1])
    assert line(store) == [(versions[0], versions[1])]
    assert tags.previous(store.history("a", "prod")) == versions[0]


def sealed(store, **changes) -> bytes:
    """The first entry of the journal with other words, and the checksum that fits them."""
    fields = json.loads((store.path / "a/tags/.prod/000001").read_bytes())
    del fields["checksum"]
    fields |= changes
    return json.dumps({**fields, "checksum": digest(fields)}).encode()


@pytest.mark.parametrize("ref", ["a/logprobs@prod", "a/logprobs@latest", "nonsense", 7])
@pytest.mark.parametrize("name", ["ref", "before"])
def test_an_entry_that_names_no_version_is_told(store, versions, name, ref):
    """One that named its own tag was followed for ever."""
    store.tag("a", "prod", versions[0])
    (store.path / "a/tags/.prod/000001").write_bytes(sealed(store, **{name: ref}))
    with pytest.raises(CorruptError, match="000001 cannot be read"):
        store.resolve("a/logprobs@prod")


@pytest.mark.parametrize("damage", [b"{", b"\xff", b'{"at": "2026"}', b"[1]", b"[" * 5000, None])
def test_a_journal_that_can_not_be_read_is_told(store, versions, damage):
    store.tag("a", "prod", versions[0])
    path = store.path / "a/tags/.prod/000001"
    flipped = bytearray(path.read_bytes())
    flipped[-20] ^= 1
    path.write_bytes(flipped if damage is None else damage)
    for call in (
        lambda: store.history("a", "prod"),
        lambda: store.resolve("a/logprobs@prod"),
        lambda: store.tag("a", "prod", versions[1]),
    ):
        with pytest.raises(CorruptError, match="000001 cannot be read") as caught:
            call()
        # an entry that is gone takes its decision along, so the tag has to be pointed again
        assert caught.value.next.endswith("let the tag point at the version that is meant")


def test_verify_reads_the_entries_of_old_moves_too(store, versions):
    for ref in versions[:3]:
        store.tag("a", "prod", ref)
    (store.path / "a/tags/.prod/000001").write_bytes(b"{")
    assert store.tagged("a", "prod") == versions[2]
    (error,) = verify(store)[1]
    assert "000001 cannot be read" in error.message


@pytest.mark.parametrize(
    "damage", [b"a/logprobs@prod", b"\xff", b"", b"a/nothing@1", "folder", "loop"]
)
def test_a_file_that_names_no_version_is_told(store, versions, damage):
    path = store.path / "a/tags/prod"
    path.parent.mkdir()
    if damage == "folder":
        path.mkdir()
    elif damage == "loop":
        path.symlink_to(path)
    else:
        path.write_bytes(damage)
    for call in (lambda: store.resolve("a/logprobs@prod"), lambda: store.history("a", "prod")):
        with pytest.raises(CorruptError, match="prod cannot be read"):
            call()


def test_a_tag_goes_on_where_a_torn_entry_in_the_middle_was_deleted(store, versions):
    for ref in versions[:3]:
        store.tag("a", "prod", ref)
    (store.path / "a/tags/.prod/000002").unlink()
    store.tag("a", "prod", versions[3])
    assert [ref for _, ref in line(store)] == [versions[0], versions[2], versions[3]]


@pytest.mark.parametrize("num_lost", [1, 2, 3])
@pytest.mark.parametrize("end", ["back", "forth", "stays"])
def test_where_the_newest_entries_are_gone_nobody_takes_an_older_one_for_it(
    store, versions, num_lost, end
):
    """Also where the tag came back to what an older one says."""
    first, second, *_ = versions
    moves = {"back": [first, second, first], "forth": [first, second, first, second]}
    for ref in moves.get(end, [first, second]):
        store.tag("a", "prod", ref)
    if end == "stays":
        store.tag("a", "prod", second, key="night")
    pointed_at = store.tagged("a", "prod")
    entries = sorted((store.path / "a/tags/.prod").glob("0*"))
    for path in entries[-num_lost:]:
        path.unlink()
    said = f"{entries[-1].name} cannot be read"
    for call in (
        lambda: store.resolve("a/logprobs@prod"),
        lambda: store.history("a", "prod"),
        lambda: store.tag("a", "prod", versions[3], expected=pointed_at),
    ):
        with pytest.raises(CorruptError, match=said):
            call()
    (error,) = verify(store)[1]
    assert said in error.message
    store.tag("a", "prod", pointed_at)
    assert store.tagged("a", "prod") == pointed_at and verify(store)[1] == []


def test_a_number_of_the_newest_entry_that_is_none_is_told(store, versions):
    for ref in versions[:2]:
        store.tag("a", "prod", ref)
    for text in ("", "x\n"):
        (store.path / "a/tags/.prod/newest").write_text(text)
        with pytest.raises(CorruptError, match="newest cannot be read"):
            store.resolve("a/logprobs@prod")


def test_a_tag_whose_newest_number_was_not_noted_is_read_by_its_journal(store, versions):
    """A process died before it noted the number."""
    store.tag("a", "prod", versions[0])
    newest = store.path / "a/tags/.prod/newest"
    before = newest.read_bytes()
    store.tag("a", "prod", versions[1])
    newest.write_bytes(before)
    assert store.tagged("a", "prod") == versions[1]
    newest.unlink()
    assert store.tagged("a", "prod") == versions[1] and verify(store)[1] == []
    store.tag("a", "prod", versions[1])
    assert newest.read_text() == "2\n"
