"""What stays in a store and what goes, by whatever order things happen and whenever somebody dies."""

import errno
import json
import multiprocessing
import os
import re
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from quiver.flows.cli import cleaning
from quiver.flows.retention import Retention, clean_up
from quiver.flows.verification import verify
from quiver.schemas.errors import (
    ConflictError,
    CorruptError,
    ExpiredError,
    LineageError,
    QuiverError,
)
from quiver.schemas.manifest import digest
from quiver.stages.core.store import Store, marks, retention
from quiver.stages.core.store.disk import Disk
from quiver.stages.core.store.leases import Leases, Owner
from quiver.stages.core.store.listing import EXPIRED, REMOVED
from quiver.stages.core.store.retention import (
    Rule,
    collect,
    find_kept,
    put_aside,
    remove,
    users_of,
)
from quiver.stages.model import checkpoints
from tests.faults.seam import watched
from tests.faults.sizes import part, sizes
from tests.stages.core.store.histories import (
    History,
    expired_files,
    identity,
    make_policy,
    make_table,
    plan,
    visible,
    with_state,
)
from tests.stages.core.store.test_store import Settings, commit, table
from tests.writing import begin

ALL = Rule(keep=1, moments=1, grace_seconds=0)
DAY_AGO = time.time() - 25 * 3600


@pytest.fixture(autouse=True)
def no_flushing(monkeypatch):
    """What is written here need not outlive a power loss."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def line(store: Store, length: int = 3) -> None:
    """A run of so many iterations: policy@0, then a table by each policy, and the next one."""
    policy = make_policy(store, 0, state=False)
    for number in range(1, length + 1):
        rollouts = make_table(store, number, models={"policy": policy})
        policy = make_policy(store, number, inputs={"policy": policy, "rollouts": rollouts})


# -- what stays


def test_a_version_keeps_what_it_was_made_of_and_a_policy_only_as_a_root(store):
    """The last policy keeps its rollouts and the policy that sampled them, which keeps nothing."""
    line(store, 4)
    assert visible(store)[4:] == [f"a/policy@{number}" for number in range(5)]
    collect(store, ALL, apply=True)
    assert visible(store) == ["a/logprobs@4", "a/policy@3", "a/policy@4"]
    assert verify(store) == (3, []) and expired_files(store) == []


def test_a_table_keeps_tables_and_the_policy_of_its_rows_and_prompts_keep_none(store):
    policy = make_policy(store, 0)
    prompts = make_table(store, 1, "b")
    rollouts = make_table(store, 2, "c", inputs={"prompts": prompts}, models={"policy": policy})
    make_table(store, 3, "d", inputs={"rollouts": rollouts})
    make_table(store, 4, "b"), make_table(store, 5, "c"), make_policy(store, 6)
    collect(store, ALL, apply=True)
    expected = ["a/policy@0", "a/policy@1", "b/logprobs@1", "b/logprobs@2"]
    assert visible(store) == [*expected, "c/logprobs@1", "c/logprobs@2", "d/logprobs@1"]
    kept = find_kept(store, 1, 1)
    assert {str(ref) for ref in kept.optimizer} == {"a/policy@1"}


def test_the_base_of_an_adapter_stays_with_it(store):
    base = make_policy(store, 0, state=False)
    first = make_policy(store, 1, inputs={"base": base, "policy": base})
    make_policy(store, 2, inputs={"base": base, "policy": first})
    make_policy(store, 3, "b"), make_policy(store, 4, "b")
    collect(store, ALL, apply=True)
    assert visible(store) == ["a/policy@0", "a/policy@1", "a/policy@2", "b/policy@1"]


def test_what_a_sweep_made_is_counted_apart_from_the_runs_own_iterations(store):
    line(store)
    newest = store.open("a/policy@3")
    for number in range(4, 8):
        of_cell = {"note": f"sweep 0123456789ab, cell {number} (grpo)"}
        make_table(store, number, models={"policy": newest}, **of_cell)
        make_policy(store, number, inputs={"policy": newest}, **of_cell)
    assert with_state(store)[0] == "a/policy@1"
    collect(store, Rule(moments=1, grace_seconds=0), apply=True)
    assert with_state(store) == ["a/policy@3", "a/policy@7"]
    clean_up(store.url, "a", Retention(keep=1, moments=1, grace_hours=0), "a/policy@3")
    policies = ["a/policy@2", "a/policy@3", "a/policy@7"]  # 2 sampled what 3 learned from
    assert visible(store) == ["a/logprobs@3", "a/logprobs@7", *policies]


def test_tags_hold_what_they_point_at_and_what_they_would_go_back_to(store):
    line(store, 5)
    for number in (1, 2, 3):
        store.tag("a", "prod", f"a/policy@{number}")
    collect(store, ALL, apply=True)
    policies = [ref for ref in visible(store) if "policy" in ref]
    assert policies == [f"a/policy@{number}" for number in (1, 2, 3, 4, 5)]
    assert with_state(store) == ["a/policy@2", "a/policy@3", "a/policy@5"]
    assert "a/logprobs@1" not in visible(store), "policy@1 is only what policy@2 was trained from"


def test_what_cannot_be_told_stops_it(store):
    line(store)
    store.tag("a", "prod", "a/policy@1")
    before, entry = visible(store), Path(store.url) / "a/tags/prod/000001.json"
    entry.write_text("{")
    for apply in (False, True):
        with pytest.raises(CorruptError, match="tag prod"):
            collect(store, ALL, apply=apply)
    entry.unlink()
    (Path(store.url) / "a/policy/v000003/manifest.json").write_text("{")
    with pytest.raises(CorruptError, match="a/policy@3"):
        collect(store, ALL, apply=True)
    assert visible(store) == before and list(Path(store.url).glob("*/*/v*.expired*")) == []


def test_damaged_versions_stay(store):
    line(store)
    (Path(store.url) / "a/logprobs/v000001/manifest.json").write_text("{")
    elsewhere = Path(store.url).with_name("elsewhere")
    shutil.move(Path(store.url) / "a/logprobs/v000002", elsewhere)
    (Path(store.url) / "a/logprobs/v000002").symlink_to(elsewhere)
    collect(store, ALL, apply=True)
    assert visible(store) == [
        *(f"a/logprobs@{number}" for number in (1, 2, 3)),
        *(f"a/policy@{number}" for number in (2, 3)),
    ]


def test_what_the_command_says(store, capsys):
    line(store)
    gone = ["a/logprobs@1", "a/logprobs@2", "a/policy@0", "a/policy@1", "a/policy@2"]

    def said(**options) -> list[str]:
        cleaning.gc(keep=1, moments=1, store=store.url, **options)
        return capsys.readouterr().out.splitlines()

    heading, *rows, last = said(grace_hours=24)
    assert heading == "would expire now:"
    assert [row.split()[0] for row in rows] == gone and rows[-1].split()[1] == "optimizer"
    left = r"\d.*B {} left for quiver gc --apply to delete {} after they expired"
    assert re.fullmatch(f"nothing would be deleted; {left.format('would be', '24 hours')}", last)
    assert expired_files(store) == []
    heading, *rows, last = said(grace_hours=1, apply=True)
    assert heading == "expired now:" and len(rows) == 5
    assert re.fullmatch(f"nothing was deleted; {left.format('is', '1 hour')}", last)
    (last,) = said(grace_hours=0, apply=True)
    assert re.fullmatch(r"\d.* kB was deleted", last) and expired_files(store) == []
    assert said(grace_hours=0, apply=True) == ["nothing was deleted"]
    assert said(grace_hours=0) == ["nothing would be deleted"]


# -- when it goes


def test_by_default_only_optimizer_state_goes(store):
    line(store)
    looked = collect(store, Rule())
    assert [str(expiring.ref) for expiring in looked.marked] == ["a/policy@1", "a/policy@2"]
    assert sum(expiring.bytes for expiring in looked.marked) > 400
    assert with_state(store) == ["a/policy@1", "a/policy@2", "a/policy@3"], "it only looked"
    before = visible(store)
    for rule in (Rule(), Rule(grace_seconds=0)):
        collect(store, rule, apply=True)
        assert (visible(store), with_state(store)) == (before, ["a/policy@3"])
        assert verify(store) == (len(before), []) and collect(store, Rule()).marked == []
        policy = store.open("a/policy@1")
        policy.verify()
        assert checkpoints.model_config(policy)["vocab_size"] == 320
        for use in (policy.verify, policy.files.read):
            with pytest.raises(ExpiredError, match=r"optimizer state expired: 20.*gc, moments = 1"):
                use("optimizer/state.json")
    assert expired_files(store) == []
    assert make_policy(store, 4, inputs={"policy": policy}).ref.version == 4, "it can be read"


def age(store: Store, hours: float) -> None:
    """Let all marks be of so many hours ago."""
    at = (datetime.now(UTC) - timedelta(hours=hours)).isoformat()
    for path in Path(store.url).glob("*/*/v*.expired*"):
        fields = {**json.loads(path.read_bytes()), "at": at}
        del fields["checksum"]
        path.write_text(json.dumps({**fields, "checksum": digest(fields)}))


@pytest.mark.parametrize(
    "clean",
    [
        lambda path: cleaning.gc(apply=True, store=path),
        lambda path: clean_up(path, "a", Retention(keep=1)),
        lambda path: collect(Store(path), Rule(), apply=True),
    ],
    ids=["command", "recipe", "rule"],
)
def test_data_stay_for_a_day_where_nobody_says_another(store, clean):
    make_table(store, 1), make_table(store, 2)
    collect(store, Rule(keep=1), apply=True)
    for hours, is_there in ((23.9, True), (24.1, False)):
        age(store, hours)
        clean(store.url)
        assert bool(expired_files(store)) == is_there


def test_a_run_that_cleans_up_leaves_others_alone(store):
    line(store)
    for number in range(3):
        make_table(store, number, "b")
        make_table(store, number, "b.eval")
    collect(store, Rule(1, 1, 0, runs=("a", "nowhere")), apply=True)
    assert [ref for ref in visible(store) if ref[0] == "b"] == [
        *(f"b/logprobs@{number}" for number in (1, 2, 3)),
        *(f"b.eval/logprobs@{number}" for number in (1, 2, 3)),
    ]
    make_table(store, 8), make_table(store, 9)
    collect(store, Rule(keep=1, runs=("a", "b")), apply=True)
    left = expired_files(store)
    collect(store, Rule(1, 1, 0, runs=("b",)), apply=True)
    assert expired_files(store) == [name for name in left if name.startswith("a/")] != []


def test_numbers_stay_given_and_what_expired_is_made_again_under_another(store):
    line(store)
    first = store.open("a/logprobs@1")
    collect(store, ALL, apply=True)
    assert str(make_table(store, 9).ref) == "a/logprobs@4"
    policy = make_policy(store, 0, state=False)
    again = make_table(store, 1, models={"policy": policy})
    assert [str(policy.ref), str(again.ref)] == ["a/policy@4", "a/logprobs@5"]
    assert identity(again) == identity(first) and verify(store)[1] == []
    for seen in (store, store.with_expired()):
        assert seen.find("a", "logprobs", again.manifest.run_key).ref == again.ref
    assert make_table(store, 1, models={"policy": policy}).ref == again.ref, "it is done"


def test_what_expired_says_so_and_is_seen_by_its_manifest_where_that_is_asked(store):
    line(store)
    versions = {str(version.ref): version.manifest for version in store.versions()}
    collect(store, Rule(keep=1), apply=True)
    for use in (store.open, lambda ref: store.tag("a", "old", ref)):
        with pytest.raises(ExpiredError, match=r"its files expired: 20.* gc, keep = 1") as caught:
            use("a/logprobs@1")
        assert caught.value.next == "quiver lineage a/logprobs@1"
        assert "the command that made it makes it again" in caught.value.state
    assert store.tag_names("a") == []
    assert store.find("a", "logprobs", versions["a/logprobs@1"].run_key) is None
    seen = store.with_expired()
    expired = seen.open("a/policy@1")
    for rule in (Rule(), ALL):
        collect(store, rule, apply=True)
        for ref, manifest in versions.items():
            assert seen.open(ref).manifest == manifest
            assert str(seen.find("a", manifest.kind, manifest.run_key).ref) == ref
        assert checkpoints.context_length(expired) == 64
        assert checkpoints.end_token_ids(expired) == [2]
        for use in (
            expired.verify,
            lambda: expired.files.read("model.safetensors"),
            lambda: seen.open("a/logprobs@1").table(),
        ):
            with pytest.raises(ExpiredError, match="expired"):
                use()
        assert [str(ref) for ref in seen.refs()] == list(versions)


def test_finding_what_expired_reads_as_few_objects_however_many_did(store, monkeypatch):
    keys = []
    read = Disk.read
    monkeypatch.setattr(
        Disk, "read", lambda self, key, *most: keys.append(key) or read(self, key, *most)
    )
    counts = []
    for number in (4, 16):
        for seed in range(len(store.listing("a", "logprobs").numbers), number):
            make_table(store, seed)
        run_key = store.with_expired().open("a/logprobs@2").manifest.run_key
        collect(store, ALL, apply=True)
        keys.clear()
        assert store.with_expired().find("a", "logprobs", run_key).ref.version == 2
        counts.append(len(keys))
    assert counts[0] == counts[1] <= 4


def test_what_rm_deletes_is_gone_at_once_and_made_again(store):
    line(store)
    run_key = store.open("a/logprobs@1").manifest.run_key
    remove(store, "a/logprobs@1", "so\x1b" + "o" * 100_000)
    assert expired_files(store) == []
    seen = store.with_expired()
    with pytest.raises(LineageError, match=r"removed on purpose: 20.* so\\x1bo") as caught:
        seen.open("a/logprobs@1")
    assert len(str(caught.value)) < 600 and seen.find("a", "logprobs", run_key) is None
    again = make_table(store, 1, models={"policy": store.open("a/policy@0")})
    assert (again.manifest.run_key, again.ref.version) == (run_key, 4)


# -- against others


def test_a_reader_reads_on_while_what_it_reads_is_deleted(store):
    """Its files are mapped. One that opened the version and has read nothing yet is told."""
    line(store)
    mapped = store.open("a/logprobs@1").table()
    late, later = store.open("a/logprobs@1"), store.open("a/logprobs@1")
    expected = table(10).to_pydict()
    collect(store, Rule(keep=1), apply=True)
    assert mapped.to_pydict() == late.table().to_pydict() == expected, "within the grace time"
    collect(store, ALL, apply=True)
    assert expired_files(store) == [] and mapped.to_pydict() == expected
    with pytest.raises(ExpiredError, match="its files expired: 20"):
        later.table()
    late = store.open("a/logprobs@3")
    remove(store, late.ref, "by hand")
    with pytest.raises(LineageError, match=r"was removed on purpose: .* by hand"):
        late.table()


def when_called(monkeypatch, owner, name: str, act: Callable, *, call: int, before: bool) -> None:
    """Let `act` happen right before or after a certain call of a function, the first being 1."""
    real, calls = getattr(owner, name), []

    def watched(*arguments, **options):
        calls.append(name)
        if before and len(calls) == call:
            act()
        answer = real(*arguments, **options)
        if not before and len(calls) == call:
            act()
        return answer

    monkeypatch.setattr(owner, name, watched)


NEEDS = {
    "tag": lambda store, stack, version: store.tag("a", "prod", version.ref),
    "input": lambda store, stack, version: stack.enter_context(
        begin(store, "b", "logprobs", **plan(7, inputs={"first": version}))
    ),
    "model": lambda store, stack, version: stack.enter_context(
        begin(store, "b", "logprobs", **plan(7, models={"first": version}))
    ),
}
"""What may need a version: a tag, or a stage at work."""


def needed_by(need: str) -> str:
    """The version of a `line` that is needed, and that a collection would not keep."""
    return "a/policy@0" if need == "model" else "a/logprobs@1"


@pytest.mark.parametrize("need", NEEDS)
def test_what_comes_into_use_right_before_its_mark_keeps_its_data(store, monkeypatch, need):
    """A collection had looked already. Its second look sees the tag or the stage."""
    line(store)
    version = store.open(needed_by(need))
    with ExitStack() as stack:
        act = lambda: NEEDS[need](store, stack, version)  # noqa: E731
        when_called(monkeypatch, retention, "find_kept", act, call=1, before=False)
        for _ in range(2):
            collect(store, ALL, apply=True)
        version.verify()
        # a tag is a way to ask for it later, too
        assert store.exists(version.ref) == (need == "tag")
    assert "a/policy@1" not in visible(store) and verify(store)[1] == []
    if need == "tag":
        assert store.open("a/logprobs@prod").table().num_rows == 2
        store.tag("a", "prod", "a/logprobs@3")
        assert store.exists(version.ref), "its mark was taken back"
    else:
        collect(store, ALL, apply=True)
        assert expired_files(store) == []


@pytest.mark.parametrize("need", NEEDS)
@pytest.mark.parametrize("before", [True, False], ids=["first look", "second look"])
def test_what_has_a_mark_is_refused_to_all_that_need_it(store, monkeypatch, need, before):
    """Also where they asked right before the mark, and a collection has looked for the last time."""
    line(store)
    ref, refused = needed_by(need), []
    version = store.open(ref)

    def act():
        with ExitStack() as stack, pytest.raises(ExpiredError, match="expired") as caught:
            NEEDS[need](store, stack, version)
        refused.append(caught.value.object)

    when_called(monkeypatch, retention, "find_kept", act, call=2, before=before)
    collect(store, ALL, apply=True)
    assert refused == [ref] and expired_files(store) == []
    assert store.tag_names("a") == [] and verify(store)[1] == []


@pytest.mark.parametrize("need", NEEDS)
def test_what_comes_into_use_right_before_rm_marks_it_stays(store, monkeypatch, need):
    line(store)
    version = store.open(needed_by(need))
    with ExitStack() as stack:
        act = lambda: NEEDS[need](store, stack, version)  # noqa: E731
        when_called(monkeypatch, marks, "write", act, call=1, before=True)
        with pytest.raises(ConflictError, match="points at it" if need == "tag" else "reads it"):
            remove(store, version.ref)
        store.open(version.ref).verify()
    assert verify(store)[1] == []


@pytest.mark.parametrize("call", [1, 2], ids=["before the mark", "after it"])
def test_rm_deletes_nothing_if_it_cannot_see_who_needs_it(store, monkeypatch, call):
    """Otherwise an unread adapter could lose its base."""
    ref = make_table(store, 1).ref

    def fail():
        raise OSError(errno.EIO, "Input/output error")

    when_called(monkeypatch, retention, "users_of", fail, call=call, before=True)
    with pytest.raises((QuiverError, OSError), match="nput/output error"):
        remove(store, ref)
    assert marks.read(store.storage, ref, REMOVED) is None
    store.open(ref).verify()


def test_rm_of_what_was_put_aside_deletes_nothing_if_it_cannot_see_who_needs_it(store, monkeypatch):
    version = make_table(store, 1)
    retention.put_aside(store, version.ref)

    def fail():
        raise OSError(errno.EIO, "Input/output error")

    when_called(monkeypatch, retention, "users_of", fail, call=1, before=True)
    with pytest.raises(OSError, match="Input/output error"):
        remove(store, version.ref)
    assert marks.read(store.storage, version.ref, REMOVED).keep
    assert (version.files.folder / version.files.names[0]).is_file()


def test_who_needs_a_version_is_not_told_if_a_folder_cannot_be_read(store, monkeypatch):
    ref = make_table(store, 1).ref
    read = Disk.list

    def fail(storage, key):
        if key == "a/logprobs":
            raise OSError(errno.EIO, "Input/output error")
        return read(storage, key)

    monkeypatch.setattr(Disk, "list", fail)
    with pytest.raises(OSError, match="Input/output error"):
        retention.users_of(store, ref)


def test_a_mark_whose_flush_failed_deletes_nothing(store, monkeypatch):
    """A full disk: the mark is there, but a power loss could take it back, and not the deletion."""
    line(store)
    failed = []

    def around(name, path, call):
        if name == "fsync" and os.path.isdir(path) and not failed:
            failed.append(path)
            raise OSError(errno.ENOSPC, "No space left on device")
        return call()

    marked = [store.open(ref) for ref in store.refs()]
    with watched(around), pytest.raises(QuiverError, match="disk is full"):
        collect(store, ALL, apply=True)
    for version in marked:
        version.verify()


def test_a_mark_that_rm_takes_back_meanwhile_deletes_nothing(store, monkeypatch):
    ref = make_table(store, 1).ref
    marks.write(store.storage, ref, REMOVED, "by hand")
    act = lambda: store.storage.delete(marks.key_of(ref, REMOVED))  # noqa: E731
    when_called(monkeypatch, marks, "checked", act, call=1, before=True)
    collect(store, ALL, apply=True)
    assert store.open(ref).table().num_rows == 2


def test_a_collection_spares_what_a_tag_got_before_rm_marked_it(store, monkeypatch):
    """rm sees the tag only at its second look; a collection saw the mark before."""
    line(store)
    ref = store.resolve("a/logprobs@1")

    def act():
        store.tag("a", "prod", ref)
        marks.write(store.storage, ref, REMOVED, "by hand")

    when_called(monkeypatch, retention, "find_kept", act, call=2, before=False)
    collect(store, Rule(grace_seconds=0), apply=True)
    store.storage.delete(marks.key_of(ref, REMOVED))
    assert store.open("a/logprobs@prod").table().num_rows == 2


def test_what_has_a_mark_stays_expired_whatever_is_tagged_later(store):
    """Its data go, and do not lie there for ever."""
    line(store)
    for number in (1, 2, 3):
        store.tag("a", "prod", f"a/policy@{number}")
    collect(store, Rule(keep=1), apply=True)
    store.tag("a", "prod", "a/policy@2")  # it would go back to policy@1, which expired
    store.tag("a", "best", "a/policy@2")
    collect(store, ALL, apply=True)
    assert with_state(store) == ["a/policy@2", "a/policy@3"] and expired_files(store) == []
    make_policy(store, 4), make_policy(store, 5)
    collect(store, Rule(), apply=True)
    store.tag("a", "prod", "a/policy@4")
    collect(store, ALL, apply=True)
    assert "a/policy@4" not in with_state(store) and expired_files(store) == []


def test_a_tag_that_moves_while_its_version_is_marked_goes_back(store, monkeypatch):
    line(store)
    store.tag("a", "prod", "a/logprobs@2")
    ref = store.resolve("a/logprobs@1")
    act = lambda: marks.write(store.storage, ref, EXPIRED, "gc")  # noqa: E731
    when_called(monkeypatch, Disk, "put_if_absent", act, call=1, before=True)
    with pytest.raises(ExpiredError, match="expired"):
        store.tag("a", "prod", ref)
    assert store.tagged("a", "prod") == "a/logprobs@2" and verify(store)[1] == []


def test_what_a_stage_at_work_may_be_publishing_stays(store):
    for number in (1, 2, 3):
        make_table(store, number)
    with begin(store, "a", "logprobs", **plan(1), force=True):
        collect(store, ALL, apply=True)
    assert visible(store) == ["a/logprobs@1", "a/logprobs@3"]


def test_what_is_committed_meanwhile_is_not_touched(store, monkeypatch):
    line(store)
    made = []

    def act():
        made.append(make_table(store, 9, inputs={"other": store.open("a/logprobs@3")}))
        made.append(make_table(store, 10))

    when_called(monkeypatch, retention, "find_kept", act, call=1, before=False)
    collect(store, ALL, apply=True)
    assert {str(version.ref) for version in made} <= set(visible(store))
    assert verify(store)[1] == []


def test_a_stage_at_work_holds_what_it_reads(store):
    line(store)
    first = store.open("a/logprobs@1")
    with begin(store, "b", "logprobs", **plan(7, inputs={"rollouts": first})):
        collect(store, ALL, apply=True)
        assert {"a/logprobs@1", "a/policy@0"} <= set(visible(store))
        with pytest.raises(ConflictError, match="reads it"):
            remove(store, first.ref)
    collect(store, ALL, apply=True)
    assert "a/logprobs@1" not in visible(store)


def test_several_at_once(store):
    for number in range(12):
        make_table(store, number)
    context = multiprocessing.get_context("fork")
    workers = [
        context.Process(target=lambda: collect(Store(store.url), ALL, apply=True)) for _ in range(3)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert visible(store) == ["a/logprobs@12"] and verify(store) == (1, [])
    collect(store, ALL, apply=True)
    assert expired_files(store) == []


# -- unfinished work


def leave_work(store: Store, number: int) -> str:
    """What a killed stage leaves; its run_key."""

    def work_and_die() -> None:
        with begin(store, "a", "logprobs", **plan(number)) as work:
            work.write(0, table(0))
            os._exit(0)

    process = multiprocessing.get_context("fork").Process(target=work_and_die)
    process.start()
    process.join()
    assert process.exitcode == 0
    (key,) = {path.name.split(".")[0] for path in (Path(store.url) / "a/logprobs/.work").iterdir()}
    return key


def test_unfinished_work_that_was_given_up_goes_after_the_grace_time(store):
    make_table(store, 1)
    run_key = leave_work(store, 2)
    work = Path(store.url) / "a/logprobs/.work"
    assert collect(store, Rule(), apply=True).work == []
    lease = next((work / f"{run_key}.0.leases/work").iterdir())
    for path in work.rglob("*"):
        os.utime(path, (DAY_AGO, DAY_AGO))
    expected = sum(path.stat().st_size for path in work.rglob("*") if path.is_file())
    ((left, num_bytes),) = collect(store, Rule()).work
    assert (left.run_key, num_bytes) == (run_key, expected) and lease.exists()
    # a process on another host, heard of just now
    owner = {"boot_id": "x", "pid_namespace": 1, "pid": 1, "start_time": 1}
    fields = {"owner": owner, "token": "t", "renewed_at": time.time()}
    lease.write_text(json.dumps(fields))
    assert collect(store, Rule(grace_seconds=0), apply=True).work == []
    lease.write_text(json.dumps({**fields, "released": True}))
    for path in (lease, lease.parent, lease.parent.parent):
        os.utime(path, (DAY_AGO, DAY_AGO))
    assert len(collect(store, Rule(), apply=True).work) == 1
    assert list(work.iterdir()) == []
    with begin(store, "a", "logprobs", **plan(2)) as writer:
        assert not writer.is_finished(0)
        assert collect(store, Rule(grace_seconds=0), apply=True).work == []
        writer.write(0, make_table(store, 1).table())
        assert writer.commit().ref.version == 2


def test_what_is_left_of_work_that_is_done_goes_at_once(store):
    run_key = leave_work(store, 1)
    work = Path(store.url) / "a/logprobs/.work"
    shutil.copytree(work, Path(store.url).parent / "copy")
    make_table(store, 1)
    shutil.rmtree(work)
    shutil.move(Path(store.url).parent / "copy", work)
    ((left, _),) = collect(store, Rule(), apply=True).work
    assert left.run_key == run_key and list(work.iterdir()) == []


@pytest.mark.parametrize("count", sizes(300, 10_000))
def test_a_commit_costs_the_same_whatever_the_dead_left_and_all_of_it_goes(store, count):
    def changes_of_commit(number: int) -> int:
        """Counts those in .work: how often the index is written depends on the folder's clock."""
        changes = []

        def note(_: str, path: str, call: Callable[[], Any]) -> Any:
            if "/.work/" in str(path):
                changes.append(path)
            return call()

        with watched(note):
            make_table(store, number)
        return len(changes)

    def leave(numbers: range) -> None:
        for number in numbers:
            left = work / f"{number:064x}.0"
            left.mkdir()
            (left / "part").write_text("{")
            for path in (left / "part", left):
                os.utime(path, (DAY_AGO, DAY_AGO))

    changes_of_commit(1)
    work = Path(store.url) / "a/logprobs/.work"
    leave(range(1))
    expected = changes_of_commit(2)
    leave(range(1, count))
    assert changes_of_commit(3) <= expected
    assert verify(store)[1] == []
    assert len(collect(store, Rule(), apply=True).work) == count
    assert list(work.iterdir()) == []
    assert store.numbers("a", "logprobs") == [1, 2, 3]


# -- by chance


def live_through(store: Store, seed: int, steps: int) -> None:
    history = History(store, seed)
    history.run(steps)
    for _ in range(2):
        collect(store, ALL, apply=True)
    assert expired_files(store) == [] and verify(store)[1] == []


@pytest.mark.parametrize("seed", range(5))
def test_whatever_happens_what_is_reachable_stays(store, seed):
    live_through(store, seed, 16)


@pytest.mark.torture
@pytest.mark.parametrize("seed", part(range(100, 600)))
def test_whatever_happens_in_500_histories(store, seed):
    live_through(store, seed, 60)


def test_what_is_made_again_stands_for_the_first_and_is_not_newer(store):
    first = commit(store)
    second = commit(store, Settings(seed=1), inputs={"other": first})
    entry = second.manifest.require_input("other")
    remove(store, first.ref)
    with pytest.raises(LineageError, match="removed on purpose"):
        store.open(entry.ref)
    again = commit(store)
    assert str(again.ref) == "a/logprobs@3" and store.open(entry.ref).ref == again.ref
    assert store.resolve("a/logprobs@latest") == second.ref
    commit(store, Settings(seed=2))
    store.tag("a", "prod", second.ref)
    collect(store, ALL, apply=True)
    assert [ref.version for ref in store.refs()] == [3, 2, 4]


def test_what_stands_for_a_tagged_version_is_kept_with_its_state_and_rm_refuses_it(store):
    tagged = make_policy(store, 0)
    make_policy(store, 1)
    store.tag("a", "prod", tagged.ref)
    put_aside(store, tagged.ref)
    again = make_policy(store, 0)
    make_policy(store, 2)
    assert store.resolve("a/policy@prod") == again.ref != tagged.ref
    with pytest.raises(ConflictError, match="tag prod points at it"):
        remove(store, again.ref)
    collect(store, Rule(moments=1, grace_seconds=0), apply=True)
    assert with_state(store) == [str(again.ref), "a/policy@3"]


def test_what_stands_for_the_base_of_an_adapter_is_not_removed(store):
    base = make_policy(store, 0, state=False)
    with begin(store, "a", "policy", **plan(1, inputs={"base": base})) as work:
        (work.folder / "adapter").mkdir()
        (work.folder / "adapter/adapter_model.safetensors").write_bytes(b"w")
        adapter = work.commit()
    put_aside(store, base.ref)
    again = make_policy(store, 0, state=False)
    assert users_of(store, again.ref) == ([], [str(adapter.ref)])
    with pytest.raises(ConflictError, match=f"{adapter.ref} is an adapter alone"):
        remove(store, again.ref)
    with begin(store, "a", "policy", **plan(2, inputs={"other": base})) as work:
        (work.folder / "model.safetensors").write_bytes(b"w2")
        other = work.commit()
    remove(store, adapter.ref)
    assert remove(store, again.ref)[1] == [str(other.ref)]


def test_what_is_made_again_with_other_content_is_the_newest(store):
    """A server was away, say: it is another version, and the one before stands for nothing."""
    first, second = commit(store), commit(store, Settings(seed=1))
    remove(store, first.ref)
    other = commit(store, shards=1)
    assert other.manifest.run_key == first.manifest.run_key
    assert [ref.version for ref in store.refs()] == [2, 3]
    assert store.resolve("a/logprobs@latest") == other.ref
    collect(store, ALL, apply=True)
    assert list(store.refs()) == [other.ref] and not store.exists(second.ref)


def test_what_is_made_a_third_time_stands_for_the_first_too(store):
    first, second = commit(store), commit(store, Settings(seed=1))
    for ref in (first.ref, "a/logprobs@3"):
        remove(store, ref)
        again = commit(store)
    assert str(again.ref) == "a/logprobs@4"
    assert [ref.version for ref in store.refs()] == [4, 2]
    assert store.resolve("a/logprobs@latest") == second.ref


def test_what_a_stage_reads_keeps_what_it_was_made_of_though_both_are_marked(store):
    line(store)
    first = store.open("a/logprobs@1")
    with begin(store, "b", "logprobs", **plan(7, inputs={"rollouts": first})):
        for ref in ("a/logprobs@1", "a/policy@0"):
            marks.write(store.storage, store.resolve(ref), EXPIRED, "gc")
        collect(store, ALL, apply=True)
        assert first.table().num_rows == 2
        assert (Path(store.url) / "a/policy/v000000/model.safetensors").exists()


def test_what_was_made_again_stays_though_a_stage_reads_what_was_made_of_the_first(store):
    first = make_table(store, 1)
    tagged, read = (make_table(store, number, inputs={"first": first}) for number in (2, 3))
    store.tag("a", "prod", tagged.ref)
    remove(store, first.ref)
    again = make_table(store, 1)
    make_table(store, 4)
    with begin(store, "b", "logprobs", **plan(7, inputs={"rollouts": read})):
        collect(store, ALL, apply=True)
    assert store.exists(again.ref) and store.open(first.ref).ref == again.ref


def test_what_a_stage_reads_though_it_is_marked_stays_where_no_number_is_kept(store):
    """The rule of this collection keeps all; an earlier one marked it."""
    first = make_table(store, 1)
    with begin(store, "b", "logprobs", **plan(7, inputs={"rollouts": first})):
        marks.write(store.storage, first.ref, EXPIRED, "gc, keep = 1")
        collect(store, Rule(keep=None, grace_seconds=0), apply=True)
        assert first.table().num_rows == 2


def test_a_damaged_version_and_a_full_disk_do_not_keep_what_is_due(store, monkeypatch):
    line(store)
    collect(store, Rule(keep=2), apply=True)
    due = expired_files(store)
    store.open("a/policy@2").files.path("config.json").write_bytes(b"torn")
    collect(store, ALL, apply=True)
    assert due and not set(due) & set(expired_files(store))
    for number in range(4, 8):
        make_table(store, number)
    collect(store, Rule(keep=2), apply=True)
    due = expired_files(store)
    real = marks.write

    def write(storage, ref, *arguments, **options):
        if str(ref) == "a/logprobs@6":
            raise OSError(errno.EDQUOT, "there is no room")
        real(storage, ref, *arguments, **options)

    monkeypatch.setattr(marks, "write", write)
    collect(store, ALL, apply=True)
    assert due and not set(due) & set(expired_files(store))


def test_abandoned_work_goes_before_its_leases(store):
    leave_work(store, 1)
    gone = []

    def around(call, path, do):
        if call == "rename" and path.endswith(".gone"):
            gone.append(path.rpartition("/")[2].split(".")[2])
        return do()

    with watched(around):
        collect(store, Rule(grace_seconds=0), apply=True)
    assert gone[-1] == "leases" and {"notes", "leases"} < set(gone)


def test_on_a_full_disk_work_that_another_process_shares_stays(store, monkeypatch):
    """There is no room for the lease with which a collection keeps others away."""
    leave_work(store, 1)
    (work,) = retention.unfinished(store, "a", "logprobs")
    presence = Leases(store.storage, f"{work.prefix}.leases").take("worker-1")

    def no_room(*_, **options):
        raise OSError(errno.ENOSPC, "there is no room")

    monkeypatch.setattr(Leases, "take", no_room)
    assert not retention._sweep(store, work)
    assert retention.unfinished(store, "a", "logprobs") == [work]
    presence.release()
    assert retention._sweep(store, work)


def test_a_process_of_another_boot_that_fell_silent_is_not_at_work(store):
    key = leave_work(store, 1)
    folder = Path(store.url) / f"a/logprobs/.work/{key}.0.leases"
    (path,) = folder.glob("*/*")
    path.write_text(path.read_text().replace(Owner.this_process().boot_id, "another"))
    assert [stage.run_key for stage in retention.stages_at_work(store)] == [key]
    for entry in (path, path.parent, folder):
        os.utime(entry, (DAY_AGO, DAY_AGO))
    assert list(retention.stages_at_work(store)) == []


def test_a_reader_is_told_that_what_it_read_has_gone(store):
    version = commit(store)
    assert version.table().num_rows == 4
    remove(store, version.ref)
    with pytest.raises(LineageError, match="removed on purpose"):
        version.table()


def test_data_behind_a_link_are_not_deleted(store, tmp_path):
    """They may be another store's."""
    first, second = commit(store), commit(store, Settings(seed=1))
    for version, where in ((first, "one"), (second, "two")):
        shutil.move(version.files.folder, tmp_path / where)
        version.files.folder.symlink_to(tmp_path / where)
    with pytest.raises(CorruptError, match="is a link"):
        remove(store, first.ref)
    assert store.listing("a", "logprobs").marks["removed"] == set()
    marks.write(store.storage, second.ref, EXPIRED, "gc")
    commit(store, Settings(seed=2))
    collect(store, Rule(grace_seconds=0), apply=True)
    assert all(len(list((tmp_path / where).glob("*.arrow"))) == 2 for where in ("one", "two"))


def test_a_mark_that_is_another_versions_deletes_nothing_and_is_told(store, tmp_path):
    first, second = commit(store), commit(store, Settings(seed=1))
    other = Store(tmp_path / "other")
    commit(other, Settings(seed=7))
    for name, here in (("mine", store), ("theirs", other)):
        marks.write(here.storage, first.ref, EXPIRED, name)
    mark = Path(store.url) / "a/logprobs/v000001.expired"
    copies = {
        "a/logprobs/v000002.expired": mark.read_bytes(),
        "a/logprobs/v000001.expired": other.storage.read("a/logprobs/v000001.expired"),
    }
    for key, content in copies.items():
        (Path(store.url) / key).write_bytes(content)
    collect(store, Rule(grace_seconds=0), apply=True)
    for version in (first, second):
        assert len(list(version.files.folder.glob("*.arrow"))) == 2
    with pytest.raises(CorruptError, match=r"v000002\.expired: the mark"):
        store.open(second.ref)
    told = " ".join(map(str, verify(store)[1]))
    for key in copies:
        assert key in told
        (Path(store.url) / key).unlink()
    assert visible(store) == ["a/logprobs@1", "a/logprobs@2"] and verify(store)[1] == []
