"""Shared work on the level of shards: whose each is, what a death leaves, two commits at once, and
who may not join."""

import os
import re

import pyarrow as pa
import pytest

from quiver.schemas.errors import BusyError, ConfigError, OutcomeUnknownError
from quiver.stages.common import files
from quiver.stages.common.claims import Finished, each
from quiver.stages.common.process import Call, perform
from quiver.stages.common.work import begin
from tests.stages.common.test_store import Settings, table

KIND = "a/logprobs"


def work_on(store, share=True, **options):
    about = {"stage": "logprobs", "stage_version": 1, "config": Settings(), "inputs": {}}
    return begin(store, "a", "logprobs", **{**about, **options}, share=share)


def require_one(store):
    assert store.numbers("a", "logprobs") == [1] and store.verify() == (1, [])
    assert list((store.path / KIND / ".staging").iterdir()) == []


def test_one_takes_ahead_only_what_leaves_the_others_something(store):
    with work_on(store) as one, work_on(store) as two:
        first, second = one.claims(4), two.claims(4)
        assert first.take() == 0
        assert first.take() == 1, "three are free, and one process has none"
        assert second.take() == 2
        assert second.take() == 3, "each has something to do"
        assert first.take() is None
        one.write(0, table(0))
        assert first.unfinished() == second.unfinished() == [1, 2, 3]
    with work_on(store) as one, work_on(store) as two:
        first, second = one.claims(3), two.claims(3)
        assert first.take() == 1, "what was held is free, and what is finished is finished"
        assert first.take() is None, "the last one is for the process that has none"
        assert second.take() == 2


def test_the_shard_that_was_seen_held_first_is_done_again_first(store):
    with work_on(store) as slow, work_on(store, patience=0.0) as quick:
        assert [slow.claims(3).take() for _ in range(2)] == [0, 1]
        claims = quick.claims(3)
        order = []
        for index in each(claims):
            order.append(index)
            quick.write(index, table(2 * index))
        assert order == [2, 0, 1]
        quick.commit()
        with pytest.raises(Finished):
            slow.write(1, table(2))
    require_one(store)


def test_the_first_of_two_shards_stays(store):
    """A slow process writes a shard that another has finished: the file is not touched, nor its
    note."""
    with work_on(store) as slow, work_on(store, patience=0.0) as quick:
        assert slow.claims(1).take() == 0 and quick.claims(1).take() == 0
        quick.write(0, table(0))
        path, note = quick.folder / "part-00000.arrow", quick.notes / "part-00000.arrow.json"
        before = path.stat().st_ino, path.read_bytes(), note.read_bytes()
        slow.write(0, table(50))
        assert (path.stat().st_ino, path.read_bytes(), note.read_bytes()) == before
        assert sorted(each.name for each in quick.folder.iterdir()) == ["part-00000.arrow"]


def test_a_death_between_shard_and_note_leaves_the_shard(store):
    with work_on(store) as work:
        work.claims(1).take()
        work.write(0, table(0))
        inode = (work.folder / "part-00000.arrow").stat().st_ino
        (work.notes / "part-00000.arrow.json").unlink()
    with work_on(store) as work:
        for index in each(work.claims(1)):
            work.write(index, table(0))
        version = work.commit()
    assert (version.path / "part-00000.arrow").stat().st_ino == inode
    require_one(store)


def test_a_damaged_shard_is_done_again_before_the_commit(store):
    with work_on(store) as work:
        claims, done = work.claims(2), []
        for index in each(claims):
            done.append(index)
            work.write(index, table(2 * index))
            if done == [0, 1]:
                path = work.folder / "part-00000.arrow"
                path.write_bytes(path.read_bytes()[:-1] + b"x")
        assert done == [0, 1, 0]
        work.commit()
    require_one(store)


def test_of_two_commits_at_once_one_wins(store, monkeypatch):
    """The second commits at the moment when the first is about to rename its folder; both have seen
    no such version."""
    real, turn = files.publish, []

    def publish(folder, target):
        if not turn:
            turn.append(target)
            made.append(two.commit().ref)
        return real(folder, target)

    made = []
    with work_on(store, patience=0.0) as two, work_on(store, patience=0.0) as one:
        for index in each(one.claims(2)):
            one.write(index, table(2 * index))
        assert not two.claims(2).more()
        monkeypatch.setattr(files, "publish", publish)
        one.commit()
        pytest.fail("it has not noticed the other")
    assert one.done.ref == two.done.ref == made[0]
    assert store.written == {"a/logprobs@1"}
    require_one(store)


def test_another_version_between_takes_its_number_and_nothing_else(store, monkeypatch):
    real = files.publish

    def publish(folder, target):
        monkeypatch.setattr(files, "publish", real)
        with work_on(store, None, config=Settings(seed=1)) as other:
            other.write(0, table(0))
            other.commit()
        return real(folder, target)

    with work_on(store) as work:
        for index in each(work.claims(1)):
            work.write(index, table(0))
        monkeypatch.setattr(files, "publish", publish)
        assert work.commit().ref.version == 2
    assert store.verify() == (2, [])


def test_seconds_are_summed_and_the_total_is_the_longest(store):
    with work_on(store) as one, work_on(store) as two:
        first, second = one.claims(2), two.claims(2)
        one.seconds, two.seconds = {"score": 2.0, "load": 0.5}, {"score": 1.0}
        one._started -= 100
        two.told = {"rows": 3}
        assert (first.take(), second.take()) == (0, 1)
        one.write(0, table(0))
        two.write(1, table(2))
        assert [part.get("rows") for part in one.parts()] == [None, 3]
        assert not first.more()
        manifest = one.commit().manifest
    assert (manifest.seconds["score"], manifest.seconds["load"]) == (3.0, 0.5)
    assert 100 < manifest.seconds["total"] < 160
    assert manifest.metrics["workers"] == 2


def test_one_alone_and_those_that_share_keep_out_of_each_others_way(store):
    alone, shared = (
        f"process {os.getpid()} is at this very work alone",
        f"process {os.getpid()} and others that share it",
    )
    with work_on(store, share=False), pytest.raises(BusyError, match=alone), work_on(store):
        pass
    with (
        work_on(store),
        pytest.raises(BusyError, match=shared) as caught,
        work_on(store, share=False),
    ):
        pass
    assert "start all of them with share" in caught.value.next
    with work_on(store), pytest.raises(BusyError) as caught, work_on(store, share=None):
        pass
    assert "share" not in caught.value.next, "where it would be of no use"
    assert list((store.path / KIND / ".staging").glob("*.lock")) == []


def test_an_error_after_the_others_have_committed_is_none(store, caplog):
    with work_on(store) as quick, work_on(store) as late:
        for index in each(quick.claims(1)):
            quick.write(index, table(0))
        quick.commit()
        raise RuntimeError("the engine is gone")
    assert late.done.ref == quick.done.ref
    assert "a/logprobs@1 was finished by others; here: the engine is gone" in caplog.text
    require_one(store)


def test_an_unclear_outcome_of_ones_own_commit_is_said(store, monkeypatch):
    """The version is visible, but not because of another: nobody may claim that it will stay."""
    real = files.sync

    def failing(path):
        if path.name == "logprobs" and list(path.glob("v*")):
            raise OSError(5, "Input/output error")
        real(path)

    with pytest.raises(OutcomeUnknownError, match="v000001: it is visible"), work_on(store) as work:
        for index in each(work.claims(1)):
            work.write(index, table(0))
        monkeypatch.setattr(files, "sync", failing)
        work.commit()


def test_what_can_not_be_shared_says_so(store):
    with pytest.raises(ConfigError, match="only one process can"), work_on(store, force=True):
        pass
    with pytest.raises(ConfigError, match="can not be shared") as caught:
        perform(Call("evaluate", {}, store.path, share=True))
    assert caught.value.object == "stage evaluate"


def test_claims_of_the_dead_are_free(store):
    pid = os.fork()
    if not pid:
        with work_on(store) as work:
            work.claims(2).take()
            os._exit(9)
    os.waitpid(pid, 0)
    with work_on(store) as work:
        claims = work.claims(2)
        holder = (work.notes / "part-00000.claim0").read_text()
        assert re.match(rf"{pid}-", holder)
        assert [claims.take(), claims.take()] == [0, 1]


def die_after(store, share, act):
    """A process of its own does `act(work)`, and then dies as by kill -9."""
    pid = os.fork()
    if not pid:
        with work_on(store, share) as work:
            act(work)
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9


def test_one_alone_knows_what_is_left_after_each_shard(store):
    """Also of a work that an earlier attempt began: what was finished then is no part of it."""
    die_after(store, False, lambda work: (work.claims(4), work.write(2, table(4))))
    with work_on(store, False) as work:
        claims, left = work.claims(4), []
        for index in each(claims):
            left.append(claims.unfinished())
            work.write(index, table(2 * index))
        assert left == [[0, 1, 3], [1, 3], [3]] and claims.unfinished() == []


def first_shard(work):
    work.claims(3).take()
    work.seconds["score"] = 100.0
    work.write(0, table(0))


def test_what_the_dead_told_is_forgotten_where_nobody_else_lives(store):
    """Their shards stay; what they said of their seconds would count among those of this
    attempt."""
    die_after(store, True, first_shard)
    with work_on(store) as work:
        assert [part["shards"] for part in work.parts()] == [0]
        for index in each(work.claims(3)):
            work.write(index, table(2 * index))
        manifest = work.commit().manifest
    assert "score" not in manifest.seconds and manifest.metrics["workers"] == 1
    require_one(store)


def test_what_was_told_stays_while_one_of_them_lives(store):
    with work_on(store) as living:
        die_after(store, True, first_shard)
        living.claims(3).take()
        living.write(1, table(2))
        with work_on(store) as late:
            assert [part["shards"] for part in late.parts()] == [0, 1, 1]


def test_a_shard_of_another_size_that_the_dead_left_is_replaced(store):
    """Its writer had planned longer shards, and died between the file and the note that makes it
    count."""

    def dies(work):
        work.claims(1).take()
        work._write("part-00000.arrow", table(0, rows=3))

    die_after(store, True, dies)
    with work_on(store) as work:
        assert pa.ipc.open_file(work.folder / "part-00000.arrow").read_all().num_rows == 3
        for index in each(work.claims(2)):
            work.write(index, table(2 * index))
        version = work.commit()
    assert version.table()["rollout_id"].to_pylist() == ["r0", "r1", "r2", "r3"]
    require_one(store)
