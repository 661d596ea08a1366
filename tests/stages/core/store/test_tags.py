"""A tag's entries: one for every move, none for what did not happen, and the way back."""

import doctest
import json
import multiprocessing
import shutil
from pathlib import Path

import pytest

from quiver.flows.verification import verify
from quiver.schemas.errors import (
    ConfigError,
    ConflictError,
    CorruptError,
    ExpiredError,
    LineageError,
)
from quiver.schemas.manifest import digest
from quiver.schemas.refs import parse
from quiver.stages.core.store import Store, disk, marks, tags
from quiver.stages.core.store.listing import EXPIRED
from quiver.stages.core.store.retention import Rule, collect
from tests.faults.seam import watched
from tests.stages.core.store.histories import make_policy
from tests.stages.core.store.test_store import Settings, commit


@pytest.fixture
def versions(store) -> list[str]:
    return [str(commit(store, Settings(seed=seed)).ref) for seed in range(4)]


def line(store) -> list[tuple[str | None, str]]:
    return [(entry.before, entry.ref) for entry in store.history("a", "prod")]


def path_of(store, number: int, name: str = "prod") -> Path:
    return Path(store.url) / f"a/tags/{name}/{number:06d}.json"


def test_every_move_has_its_entry(store, versions):
    first, second, *_ = versions
    assert store.history("a", "prod") == [] and store.tagged("a", "prod") is None
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
    for expected in (first, None):
        with pytest.raises(ConflictError, match=f"expected {expected}, found {second}"):
            store.tag("a", "prod", first, expected=expected, key="wednesday")
    assert len(store.history("a", "prod")) == 3
    assert store.tag_names("a") == ["prod"] and store.runs() == ["a"]


def test_a_tag_stands_for_its_version_of_its_kind(store, versions):
    store.tag("a", "prod", versions[1])
    assert str(store.open("a/logprobs@prod").ref) == versions[1]
    with pytest.raises(LineageError, match=f"points at {versions[1]}"):
        store.open("a/rollouts@prod")


def test_a_tag_names_versions_of_its_own_run_alone(store, versions):
    with pytest.raises(ConfigError, match="a version of another run") as caught:
        store.tag("b", "prod", versions[0])
    assert caught.value.next == f"quiver tag prod {versions[0]}"
    assert store.runs() == ["a"]


def test_a_tag_is_not_taken_from_a_version_of_another_kind(store, versions):
    """gc would delete what it kept, and a reference to it would end in an error."""
    policy = str(make_policy(store, 1).ref)
    store.tag("a", "best", policy)
    with pytest.raises(ConfigError, match=f"holds {policy}, a version of another kind") as caught:
        store.tag("a", "best", versions[0])
    assert "choose another name" in caught.value.next
    assert str(store.resolve("a/policy@best")) == policy and len(store.history("a", "best")) == 1
    path_of(store, 1, "best").write_bytes(b"{")
    store.tag("a", "best", versions[0])
    assert str(store.resolve("a/logprobs@best")) == versions[0]


def test_a_tag_does_not_stand_for_another_version_with_the_same_number(store):
    """The folder of the highest number was deleted by hand, and its number given again."""
    first = commit(store, Settings(seed=0))
    store.tag("a", "prod", first.ref)
    shutil.rmtree(first.files.folder)
    again = commit(store, Settings(seed=1), shards=1)
    assert again.ref == first.ref
    with pytest.raises(LineageError, match="an earlier a/logprobs@1, which was replaced"):
        store.resolve("a/logprobs@prod")
    store.tag("a", "prod", again.ref)
    assert store.open("a/logprobs@prod").manifest == again.manifest


def test_a_tag_names_no_version_with_a_torn_manifest(store, versions):
    """Nobody could tell later if it is still the version that was meant."""
    store.tag("a", "prod", versions[1])
    (Path(store.url) / "a/logprobs/v000001/manifest.json").write_bytes(b"{")
    with pytest.raises(CorruptError) as caught:
        store.tag("a", "prod", versions[0])
    assert caught.value.next == f"quiver verify {versions[0]}"
    assert line(store) == [(None, versions[1])]


def test_a_version_that_expires_while_a_tag_moves_to_it_is_not_tagged(store, versions):
    """It is marked after the look at it, and the collection may not have seen the entry."""
    first, second, *_ = versions
    ref = parse(second)
    store.tag("a", "prod", first)

    def around(name, path, call):
        if name == "link" and "/tags/" in path and store.exists(ref):
            marks.write(store.storage, ref, EXPIRED, "gc")
        return call()

    with watched(around), pytest.raises(ExpiredError, match="expired"):
        store.tag("a", "prod", second)
    assert line(store) == [(None, first), (first, second), (second, first)]
    assert str(store.resolve("a/logprobs@prod")) == first and not store.exists(ref)


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


def test_what_another_process_decided_is_flushed_before_it_is_answered(store, versions):
    """That process may not have flushed its entry yet."""
    store.tag("a", "prod", versions[0])
    flushed = []

    def around(name, path, call):
        if name == "fsync":
            flushed.append(path)
        return call()

    with watched(around):
        store.tag("a", "prod", versions[0])
    assert flushed == [f"{store.url}/a/tags/prod"]


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_move_that_a_crash_stopped_did_not_happen_or_is_done(store, versions, moment):
    """The process dies right before or after its entry appears."""
    first, second, *_ = versions
    store.tag("a", "prod", first)

    def die(name, path, call):
        if name != "link":
            return call()
        if moment == "after":
            call()
        raise KeyboardInterrupt

    with watched(die), pytest.raises(KeyboardInterrupt):
        store.tag("a", "prod", second, expected=first, key="night 1")
    entries = [(None, first), (first, second)]
    assert line(store) == (entries if moment == "after" else entries[:1])
    assert str(store.resolve("a/logprobs@prod")) == (second if moment == "after" else first)
    assert verify(store)[1] == []
    store.tag("a", "prod", second, expected=first, key="night 1")
    assert line(store) == entries


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
            args=(
                store.url,
                versions[0],
                target,
                "night" if same_key else target,
                start,
                answers,
            ),
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
    """What this process decides on is the tag at one moment, not its history then and its target
    later."""
    first, second, *_ = versions
    store.tag("a", "prod", first)
    looks = []

    def after_another(real):
        def look(*arguments):
            looks.append(arguments)
            if len(looks) == moment + 1:
                Store(store.url).tag("a", "prod", second, expected=first, key="night 1")
            return real(*arguments)

        return look

    for name in ("list", "read"):
        monkeypatch.setattr(disk.Disk, name, after_another(getattr(disk.Disk, name)))
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
    path_of(store, 1).unlink()  # by hand; the second entry still says where it came from
    assert tags.previous(store.history("a", "prod")) == a
    store.tag("a", "prod", b, why="d is no better", key="night")
    assert tags.previous(store.history("a", "prod")) == a
    store.tag("a", "prod", d)
    assert tags.previous(store.history("a", "prod")) == b
    assert doctest.testmod(tags).failed == 0


@pytest.mark.parametrize("trick", ["again", "of another tag", "swapped"])
def test_an_entry_counts_in_its_own_place_alone(store, versions, trick):
    for ref in versions[:3]:
        store.tag("a", "prod", ref)
    store.tag("a", "best", versions[0])
    if trick == "again":
        shutil.copy(path_of(store, 2), path_of(store, 4))
    elif trick == "of another tag":
        shutil.copy(path_of(store, 1, "best"), path_of(store, 4))
    else:
        path_of(store, 2).replace(path_of(store, 3))
    with pytest.raises(CorruptError, match="it is another entry's"):
        store.resolve("a/logprobs@prod")


def sealed(store, **changes) -> bytes:
    """The first entry with other words, and the checksum that fits them."""
    fields = json.loads(path_of(store, 1).read_bytes())
    del fields["checksum"]
    fields |= changes
    return json.dumps({**fields, "checksum": digest(fields)}).encode()


@pytest.mark.parametrize("ref", ["a/logprobs@prod", "a/logprobs@latest", "nonsense", 7])
@pytest.mark.parametrize("name", ["ref", "before"])
def test_an_entry_that_names_no_version_is_told(store, versions, name, ref):
    """One that named its own tag was followed for ever."""
    store.tag("a", "prod", versions[0])
    path_of(store, 1).write_bytes(sealed(store, **{name: ref}))
    with pytest.raises(CorruptError, match="entry 1 cannot be read"):
        store.resolve("a/logprobs@prod")


@pytest.mark.parametrize(
    "damage",
    [b"", b"{", b"\xff", b'{"at": "2026"}', b"[1]", b"[" * 5000, "flipped", "folder", "loop"],
)
def test_an_entry_that_cannot_be_read_is_told(store, versions, damage):
    """Nobody takes an older one for the newest; who says what is meant may go on."""
    for ref in versions[:2]:
        store.tag("a", "prod", ref)
    path = path_of(store, 2)
    flipped = bytearray(path.read_bytes())
    flipped[-20] ^= 1
    path.unlink()
    if damage == "folder":
        path.mkdir()
    elif damage == "loop":
        path.symlink_to(path)
    else:
        path.write_bytes(flipped if damage == "flipped" else damage)
    for call in (
        lambda: store.history("a", "prod"),
        lambda: store.resolve("a/logprobs@prod"),
        lambda: store.tag("a", "prod", versions[2], expected=versions[1]),
    ):
        with pytest.raises(CorruptError, match="entry 2 cannot be read") as caught:
            call()
        # an entry that is deleted takes its decision along, so the tag has to be pointed again
        assert caught.value.next.endswith("let the tag point at the version that is meant")
    (error,) = verify(store)[1]
    assert str(error) == str(caught.value)
    store.tag("a", "prod", versions[2])
    assert str(store.resolve("a/logprobs@prod")) == versions[2]


def test_an_entry_of_another_tag_of_the_run_is_told(store, versions):
    store.tag("a", "prod", versions[0])
    store.tag("a", "other", versions[1])
    other = path_of(store, 1).parents[1] / "other" / "000001.json"
    path_of(store, 1).write_bytes(other.read_bytes())
    with pytest.raises(CorruptError, match=r"a tag prod.*another entry's"):
        store.resolve("a/logprobs@prod")


def test_verify_reads_the_entries_of_old_moves_too(store, versions):
    for ref in versions[:3]:
        store.tag("a", "prod", ref)
    path_of(store, 1).write_bytes(b"{")
    assert store.tagged("a", "prod") == versions[2]
    (error,) = verify(store)[1]
    assert "entry 1 cannot be read" in error.message


def test_what_lies_beside_entries_is_no_entry(store, versions):
    store.tag("a", "prod", versions[0])
    for name in (
        "000002.json.1-01234567-0123.tmp",
        "notes.txt",
        "00003.json",
        "000004",
        "0000005.json",
    ):
        path_of(store, 1).with_name(name).write_text("")
    (Path(store.url) / "a/tags/prod.17-01234567-0123.tmp").write_text("")
    assert store.tagged("a", "prod") == versions[0] and store.tag_names("a") == ["prod"]
    assert verify(store)[1] == []
    store.tag("a", "prod", versions[1])
    assert path_of(store, 2).exists()


def test_a_misspelt_tag_is_answered_with_the_tags_there_are(store, versions):
    for name in ("best", "prod"):
        store.tag("a", name, versions[0])
    with pytest.raises(LineageError, match="run a has no tag rpod, only best, prod; there are a/"):
        store.resolve("a/logprobs@rpod")


def test_a_tag_whose_folder_was_deleted_by_hand_is_gone(store, versions):
    """Nothing keeps the versions that it pointed at."""
    store.tag("a", "prod", versions[0])
    store.tag("a", "prod", versions[1])
    shutil.rmtree(path_of(store, 1).parent)
    assert store.tag_names("a") == [] and verify(store)[1] == []
    with pytest.raises(LineageError, match="run a has no tag prod"):
        store.resolve("a/logprobs@prod")
    marked = collect(store, Rule(keep=1)).marked
    assert [str(expiring.ref) for expiring in marked] == versions[:3]
    store.tag("a", "prod", versions[3], expected=None)
    assert line(store) == [(None, versions[3])]


def test_a_tag_goes_on_where_a_torn_entry_in_the_middle_was_deleted(store, versions):
    for ref in versions[:3]:
        store.tag("a", "prod", ref)
    path_of(store, 2).unlink()
    store.tag("a", "prod", versions[3])
    assert [ref for _, ref in line(store)] == [versions[0], versions[2], versions[3]]
