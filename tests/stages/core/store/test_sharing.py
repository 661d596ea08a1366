"""Shared work on the level of shards: whose each is, what a death leaves, two commits at once, and
who may not join."""

import os
from pathlib import Path

import pytest

from quiver.flows.verification import verify
from quiver.schemas.errors import BusyError, ConfigError, LineageError
from quiver.stages.core.run.stage import Plan
from quiver.stages.core.store import sharing
from quiver.stages.core.store.retention import remove
from quiver.stages.core.store.sharing import CommittedByOther
from quiver.stages.core.store.storage import with_checksum
from quiver.stages.core.store.writer import open_staging
from tests.stages.core.store.test_store import (
    CLOSING,
    PUBLISHING,
    Settings,
    asleep,
    commit,
    staged,
    table,
)
from tests.writing import begin

KIND = "a/logprobs"


def work_on(store, share=True, **options):
    about = {"stage": "logprobs", "stage_version": 1, "config": Settings(), "inputs": {}}
    return begin(store, "a", "logprobs", **{**about, **options}, share=share)


def write_all(work, count):
    for index in work.take_shards(count):
        work.write(index, table(2 * index))


def require_one(store):
    assert store.numbers("a", "logprobs") == [1] and verify(store) == (1, [])
    assert list((Path(store.url) / KIND / ".work").iterdir()) == []


def test_one_takes_ahead_only_what_leaves_the_others_something(store):
    with work_on(store) as one, work_on(store) as two:
        first, second = one.hand_out(4), two.hand_out(4)
        taken = {first.take(), first.take()}
        assert len(taken) == 2 and None not in taken, "three are free, and one other is there"
        other = second.take()
        assert other in set(range(4)) - taken
        assert second.take() is None and first.take() is None, "the last is for who has none"
        index = min(taken)
        one.write(index, table(2 * index))
        assert first.unfinished() == second.unfinished() == sorted({0, 1, 2, 3} - {index})


def test_where_a_process_starts_follows_from_its_place(store):
    with work_on(store) as one, work_on(store) as two, work_on(store) as three:
        begun = {work.hand_out(9).take() for work in (one, two, three)}
    assert begun == {0, 3, 6}


def test_the_shard_that_was_seen_held_first_is_done_again_first(store):
    """The slow process writes its own when the version is there already."""
    with work_on(store) as slow, work_on(store, patience=0.0) as quick:
        taken = [slow.hand_out(3).take() for _ in range(2)]
        order = []
        for index in quick.take_shards(3):
            order.append(index)
            quick.write(index, table(2 * index))
        assert order[0] not in taken and sorted(order) == [0, 1, 2]
        quick.commit()
        slow.write(taken[0], table(2 * taken[0]))
        with pytest.raises(CommittedByOther):
            slow.hand_out(3).wait_for_work()
    require_one(store)


def test_patience_follows_from_the_slowest_shard_of_any_process(store, monkeypatch):
    """An idle one that has finished none does not take what another is at, as long as that takes no
    longer than its shards did."""
    monkeypatch.setattr(sharing, "LEAST_PATIENCE_SECONDS", 0.0)
    with work_on(store) as slow, work_on(store) as idle:
        shards, waiting = slow.hand_out(2), idle.hand_out(2)
        first = shards.take()
        shards._held[first].taken_at -= 100  # so long did it take
        slow.write(first, table(2 * first))
        assert shards.take() == 1 - first
        assert waiting.take() is None
        monkeypatch.setattr(idle.staging.leases, "seconds_seen", lambda name: 201.0)
        assert waiting.take() == 1 - first


def test_the_first_of_two_shards_stays(store):
    """A slow process writes a shard that another has finished."""
    with work_on(store) as slow, work_on(store, patience=0.0) as quick:
        assert slow.hand_out(1).take() == 0 and quick.hand_out(1).take() == 0
        quick.write(0, table(0))
        slow.write(0, table(50))
        assert not quick.handout.wait_for_work()
        assert quick.commit().table()["rollout_id"].to_pylist() == ["r0", "r1"]
    require_one(store)


def test_a_shard_that_a_power_loss_damaged_before_its_note_was_written_is_replaced(store):
    with pytest.raises(KeyboardInterrupt), work_on(store) as work:
        work.hand_out(1).take()
        work.write(0, table(0))
        raise KeyboardInterrupt
    path = staged(store, "part-00000-*.arrow")
    path.write_bytes(bytes(path.stat().st_size))
    staged(store, "part-00000.json").unlink()
    with work_on(store) as work:
        write_all(work, 1)
        version = work.commit()
    assert version.table().equals(table(0).cast(version.table().schema))
    require_one(store)


@pytest.mark.parametrize("name", ["part-00000-*.arrow", "part-00000.json"])
def test_what_was_damaged_is_done_again_before_the_commit(store, name):
    with work_on(store) as work:
        done = []
        for index in work.take_shards(2):
            done.append(index)
            work.write(index, table(2 * index))
            if len(done) == 2:
                path = staged(store, name)
                flipped = bytearray(path.read_bytes())
                flipped[len(flipped) // 2] ^= 1
                path.write_bytes(flipped)
        assert sorted(done) == [0, 0, 1]
        work.commit()
    require_one(store)


@pytest.mark.parametrize("ending", [CLOSING, PUBLISHING])
def test_of_two_commits_at_once_one_wins(store, ending):
    """The second takes over when the first is about to rename its folder; both have seen no such
    version."""

    def commit_too():
        one.handout.commit_lease.release()
        assert not two.handout.wait_for_work()
        two.commit()

    with work_on(store, patience=0.0) as two, work_on(store, patience=0.0) as one:
        write_all(one, 2)
        two.hand_out(2)
        with asleep(ending, commit_too):
            one.commit()
        pytest.fail("it has not noticed the other")
    assert str(one.done.ref) == str(two.done.ref) == "a/logprobs@1"
    assert store.written == {"a/logprobs@1"}
    require_one(store)


def test_another_version_between_takes_its_number_and_nothing_else(store):
    with work_on(store) as work:
        write_all(work, 1)
        with asleep(PUBLISHING, lambda: commit(store, Settings(seed=1))):
            assert work.commit().ref.version == 2
    assert verify(store) == (2, [])


def test_seconds_are_summed_and_the_total_is_the_longest(store):
    with work_on(store) as one, work_on(store) as two:
        first, second = one.hand_out(2), two.hand_out(2)
        one.seconds.update({"score": 2.0, "load": 0.5})
        two.seconds.update({"score": 1.0})
        one.writer._meter._started_at -= 100
        two.report_fields["rows"] = 3
        for work, index in ((one, first.take()), (two, second.take())):
            work.write(index, table(2 * index))
        assert [part.get("rows") for part in one.reports()] == [None, 3]
        assert not first.wait_for_work()
        manifest = one.commit().manifest
    assert (manifest.seconds["score"], manifest.seconds["load"]) == (3.0, 0.5)
    assert 100 < manifest.seconds["total"] < 160
    assert manifest.metrics["workers"] == 2


def test_one_alone_and_those_that_share_keep_out_of_each_others_way(store, monkeypatch):
    monkeypatch.setattr("quiver.stages.core.store.writer._JOIN_SECONDS", 0.1)
    alone = f"process {os.getpid()} is already doing this work alone"
    shared = f"process {os.getpid()} is already doing this work, and shares it with others"
    with work_on(store, share=False), pytest.raises(BusyError, match=alone), work_on(store):
        pass
    with work_on(store), pytest.raises(BusyError, match=shared), work_on(store, share=False):
        pass


def test_an_error_after_the_others_have_committed_is_none(store, caplog):
    with work_on(store) as quick, work_on(store) as late:
        write_all(quick, 1)
        quick.commit()
        raise RuntimeError("the engine is gone")
    assert late.done.ref == quick.done.ref
    assert "a/logprobs@1 was finished by others; here: the engine is gone" in caplog.text
    require_one(store)


def test_one_that_was_overtaken_before_the_last_kind_is_committed_is_told(store):
    plan = Plan(store, "optimize", 1, Settings(), "a", ("advantages", "updates", "policy"))
    with pytest.raises(BusyError, match="took over"), open_staging(plan):
        raise CommittedByOther  # the other has committed the first kind, and is at the next


def test_what_can_not_be_shared_says_so(store):
    with (
        pytest.raises(ConfigError, match="force repeats finished work"),
        work_on(store, force=True),
    ):
        pass


def die_after(store, share, act):
    """A process of its own does `act(work)`, and then dies as by kill -9."""
    pid = os.fork()
    if not pid:
        with work_on(store, share) as work:
            act(work)
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9


def test_shards_that_the_dead_held_are_free(store):
    die_after(store, True, lambda work: work.hand_out(2).take())
    with work_on(store) as work:
        shards = work.hand_out(2)
        assert {shards.take(), shards.take()} == {0, 1}


def test_one_alone_knows_what_is_left_after_each_shard(store):
    """Also of a work that an earlier process began: what was finished then is no part of it."""
    die_after(store, False, lambda work: (work.hand_out(4), work.write(2, table(4))))
    with work_on(store, False) as work:
        shards, left = work.hand_out(4), []
        for index in shards:
            left.append(shards.unfinished())
            work.write(index, table(2 * index))
        assert left == [[0, 1, 3], [1, 3], [3]] and shards.unfinished() == []


def first_shard(work):
    shards = work.hand_out(3)
    index = shards.take()
    work.seconds["score"] = 100.0
    work.write(index, table(2 * index))


def test_what_the_dead_told_is_forgotten_where_nobody_else_lives(store):
    """Their shards stay; what they said of their seconds would count among those of this
    attempt."""
    die_after(store, True, first_shard)
    with work_on(store) as work:
        assert [part["shards"] for part in work.reports()] == [0]
        write_all(work, 3)
        manifest = work.commit().manifest
    assert "score" not in manifest.seconds and manifest.metrics["workers"] == 1
    require_one(store)


def test_what_was_told_stays_while_one_of_them_lives(store):
    with work_on(store) as living:
        die_after(store, True, first_shard)
        shards = living.hand_out(3)
        index = shards.take()
        living.write(index, table(2 * index))
        with work_on(store) as late:
            assert [part["shards"] for part in late.reports()] == [0, 1, 1]


@pytest.mark.parametrize("fields", [{}, {"rows_per_shard": "3"}, {"rows_per_shard": 0}])
def test_a_cut_that_says_nothing_is_made_anew(store, fields):
    with work_on(store) as work:
        work.rows_per_shard(3)
        staged(store, "cut").write_bytes(with_checksum(fields))
    with work_on(store) as work:
        assert work.rows_per_shard(2) == 2


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("part-00000.json", {"name": "part-00000-01234567.arrow"}),
        ("part-00000.json", {"name": ["x"], "bytes": 1, "sha256": "0" * 64, "rows": 1}),
        ("part-x.json", {}),
        ("another.report", {"seconds": 1}),
        ("another.report", {"shards": "many", "slowest": 0.0, "seconds": {}, "usage": {}}),
        (
            "another.report",
            {"shards": 1, "slowest": 0.0, "seconds": {"total": "long"}, "usage": {}},
        ),
        ("sources", {"refs": 7}),
    ],
)
def test_a_note_of_another_form_counts_for_nothing(store, name, fields):
    with work_on(store) as work:
        write_all(work, 2)
    staged(store, "part-00001.json").with_name(name).write_bytes(with_checksum(fields))
    with pytest.raises(LineageError):
        remove(store, "a/logprobs@1")
    with work_on(store) as work:
        write_all(work, 2)
        work.commit()
    require_one(store)


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("is_gone", [False, True])
@pytest.mark.parametrize(("before", "left", "now"), [(3, 1, 2), (2, 1, 3), (2, 2, 4)])
def test_where_the_cut_is_torn_or_gone_its_shards_are_done_again(
    store, is_gone, share, before, left, now
):
    """How long they are is not known any more, and may be longer or shorter now."""
    rows = table(0, rows=4)

    def write(size):
        with work_on(store, share=share) as work:
            assert work.rows_per_shard(size) == size
            for index in work.hand_out(-(-4 // size)):
                work.write(index, rows.slice(index * size, size))
                if (size, index + 1) == (before, left):
                    raise InterruptedError
            return work.commit(ids=rows["rollout_id"])

    with pytest.raises(InterruptedError):
        write(before)
    cut = staged(store, "cut")
    cut.write_bytes(cut.read_bytes()[:-4])
    if is_gone:
        cut.unlink()
    assert write(now).table().equals(rows)
    require_one(store)


def test_a_torn_cut_is_written_anew_so_its_shards_are_done_again_once(store):
    rows = table(0, rows=6)

    def attempt() -> list[int]:
        with work_on(store) as work:
            assert work.rows_per_shard(2) == 2
            found = work.noted()
            index = next(work.take_shards(3))
            work.write(index, rows.slice(2 * index, 2))
            return found

    assert attempt() == []
    cut = staged(store, "cut")
    cut.write_bytes(cut.read_bytes()[:-4])
    assert [attempt(), attempt()] == [[], [0]]


def test_a_cut_of_which_nothing_is_finished_binds_nobody(store):
    for size in (10, 5):
        with work_on(store, share=False) as work:
            assert work.rows_per_shard(size) == size
