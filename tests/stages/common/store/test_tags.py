"""A tag's journal: an entry for every move, none for what did not happen, and the way back."""

import doctest
import multiprocessing
import os
import time

import pytest

from quiver.schemas.errors import BusyError, ConflictError, CorruptError
from quiver.stages.common import tags
from quiver.stages.common.store import storage
from quiver.stages.common.store import Store
from tests.stages.common.store.test_store import Settings, commit


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


def test_what_was_decided_stays_decided(store, versions):
    store.tag("a", "prod", versions[0])
    store.tag("a", "prod", versions[1], expected=versions[0], key="monday")
    store.tag("a", "prod", versions[2], expected=versions[0], key="monday")
    assert str(store.resolve("a/logprobs@prod")) == versions[1]
    assert len(store.history("a", "prod")) == 2


def test_a_move_that_a_crash_stopped_did_not_happen(store, versions, monkeypatch):
    """The machine dies after each write in turn; the same move is then made once, with one
    entry."""
    first, second, *_ = versions
    for survived in range(3):
        store.tag("a", "prod", first)
        earlier, left = line(store), survived
        write = storage.write_bytes

        def dies(path, data, write=write):
            nonlocal left
            if left == 0:
                raise KeyboardInterrupt
            left -= 1
            write(path, data)

        with monkeypatch.context() as patched:
            patched.setattr(files, "write_bytes", dies)
            if survived < 2:
                with pytest.raises(KeyboardInterrupt):
                    store.tag("a", "prod", second, expected=first, key=f"night {survived}")
                assert line(store) == earlier
                assert str(store.resolve("a/logprobs@prod")) == first
        store.tag("a", "prod", second, expected=first, key=f"night {survived}")
        assert line(store) == [*earlier, (first, second)]


def _race(path, expected, target, key, start, answers):
    store = Store(path)
    start.wait()
    while True:
        try:
            store.tag("a", "prod", target, expected=expected, key=key)
        except BusyError:
            time.sleep(0.001)
            continue
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
    assert not os.path.exists(store.path / "a/tags/.prod.lock")


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


def test_a_tag_from_before_there_were_journals_gets_one(store, versions):
    (store.path / "a/tags").mkdir()
    (store.path / "a/tags/prod").write_text(f"{versions[0]}\n")
    assert store.history("a", "prod") == []
    store.tag("a", "prod", versions[1])
    assert line(store) == [(versions[0], versions[1])]
    assert tags.previous(store.history("a", "prod")) == versions[0]


def test_a_journal_that_is_none_is_told(store, versions):
    store.tag("a", "prod", versions[0])
    (store.path / "a/tags/.prod.journal").write_text('{"at": "2026", "before": nul')
    with pytest.raises(CorruptError, match="journal can not be read"):
        store.history("a", "prod")
    with pytest.raises(CorruptError):
        store.tag("a", "prod", versions[1])
    assert str(store.resolve("a/logprobs@prod")) == versions[0]
