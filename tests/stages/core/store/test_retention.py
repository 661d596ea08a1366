"""What stays in a store and what goes, by whatever order things happen and whenever somebody dies."""

import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager

import pytest

from quiver.flows.cli import cleaning
from quiver.flows.retention import Retention, clean_up
from quiver.flows.verification import verify
from quiver.schemas.errors import (
    BusyError,
    ConfigError,
    ConflictError,
    CorruptError,
    LineageError,
)
from quiver.schemas.refs import Ref
from quiver.stages.core.store import Store, collection, trash
from quiver.stages.core.store.collection import Rule, collect
from quiver.stages.core.store.leases import Leases
from quiver.stages.core.store.ledger import Ledger
from quiver.stages.core.store.retention import find_kept, remove, restore
from quiver.stages.core.store.storage import Storage
from quiver.stages.model import checkpoints
from tests.faults.seam import watched
from tests.faults.sizes import sizes
from tests.stages.core.store.histories import (
    History,
    make_policy,
    make_table,
    plan,
    visible,
    with_state,
)
from tests.stages.core.store.test_store import table
from tests.writing import begin

ALL = Rule(keep=1, moments=1, grace_seconds=0)


@pytest.fixture(autouse=True)
def no_flushing(monkeypatch):
    """What is written here need not outlive a power loss."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def trash_bytes(store: Store) -> int:
    return collection.size(store.storage, ".trash")


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
    assert verify(store) == (3, [])


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
    before = visible(store)
    (store.path / "a/tags/.prod/000001").write_text("{")
    for apply in (False, True):
        with pytest.raises(CorruptError, match="tag prod"):
            collect(store, ALL, apply=apply)
    (store.path / "a/tags/.prod/000001").unlink()
    store.tag("a", "prod", "a/policy@1")
    (store.path / "a/policy/v000003/manifest.json").write_text("{")
    kept = find_kept(store, 1, 1)
    assert len(kept.versions) == 6, "the ledger's copy says what it keeps"
    shutil.rmtree(store.path / "a/policy/.ledger")
    with pytest.raises(CorruptError, match="a/policy@3"):
        collect(store, ALL, apply=True)
    assert visible(store) == before and trash_bytes(store) == 0


def test_damaged_versions_stay(store):
    line(store)
    (store.path / "a/logprobs/v000001/manifest.json").write_text("{")
    elsewhere = store.path.with_name("elsewhere")
    shutil.move(store.path / "a/logprobs/v000002", elsewhere)
    (store.path / "a/logprobs/v000002").symlink_to(elsewhere)
    collect(store, ALL, apply=True)
    assert visible(store) == [
        *(f"a/logprobs@{number}" for number in (1, 2, 3)),
        *(f"a/policy@{number}" for number in (2, 3)),
    ]


def test_a_damaged_copy_of_a_manifest_is_written_anew_before_its_version_goes(store):
    line(store)
    manifest = store.open("a/policy@1").manifest
    collect(store, Rule(), apply=True)
    (store.path / f"a/policy/.ledger/v000001.{manifest.content_hash}").write_text("{")
    collect(store, Rule(keep=1), apply=True)
    assert store.with_expired().open("a/policy@1").manifest == manifest
    assert restore(store, "a/policy@1")[1] == ["version", "optimizer"]
    assert verify(store)[1] == []


def test_what_the_command_says(store, capsys):
    line(store)
    options = {"moments": 1, "grace_hours": 24, "store": str(store.path)}
    cleaning.gc(keep=1, **options)
    *rows, moved, lying = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows] == [
        "a/policy@2",
        *(f"a/logprobs@{number}" for number in (1, 2)),
        *(f"a/policy@{number}" for number in (0, 1)),
    ]
    assert rows[0].split()[1] == "optimizer" and "kB would be moved to the trash" in moved
    assert "would lie in the trash: the next quiver gc --apply deletes what" in lying
    cleaning.gc(apply=True, **options)
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 2 + 2 and " moved to the trash, 0 B deleted" in rows[-2]
    cleaning.gc(restore="a/policy@1", **options)
    assert capsys.readouterr().out == "a/policy@1 is back\n"


# -- where it goes


def test_by_default_only_optimizer_state_goes(store):
    line(store)
    looked = collect(store, Rule())
    assert [str(candidate.ref) for candidate in looked.optimizer] == ["a/policy@1", "a/policy@2"]
    assert looked.trash_bytes == sum(candidate.bytes for candidate in looked.optimizer) > 400
    assert with_state(store) == ["a/policy@1", "a/policy@2", "a/policy@3"], "it only looked"
    before = visible(store)
    collect(store, Rule(), apply=True)
    assert (visible(store), with_state(store)) == (before, ["a/policy@3"])
    assert verify(store) == (len(before), []) and collect(store, Rule()).optimizer == []
    policy = store.open("a/policy@1")
    policy.verify()
    assert checkpoints.model_config(policy)["vocab_size"] == 320
    for use in (policy.verify, policy.files.read):
        with pytest.raises(LineageError, match=r"files in optimizer/ expired .*gc, moments = 1"):
            use("optimizer/state.json")
    assert make_policy(store, 4, inputs={"policy": policy}).ref.version == 4, "it can be read"


def test_what_lies_in_the_trash_for_the_grace_time_is_deleted_by_the_next(store):
    line(store)
    collect(store, Rule(keep=1), apply=True)
    lying = trash_bytes(store)
    assert lying > 0
    again = collect(store, Rule(keep=1), apply=True)
    assert (again.trash_bytes, again.deleted_bytes, trash_bytes(store)) == (lying, 0, lying)
    collected = collect(store, ALL, apply=True)
    assert (collected.deleted_bytes, trash_bytes(store)) == (lying, 0)
    assert list((store.path / ".trash").iterdir()) == []


@pytest.mark.parametrize(
    "clean",
    [
        lambda path: cleaning.gc(apply=True, store=path),
        lambda path: clean_up(path, "a", Retention(keep=1)),
        lambda path: collect(Store(path), Rule(), apply=True),
    ],
    ids=["command", "recipe", "rule"],
)
def test_the_grace_time_is_a_day_where_nobody_says_another(store, clean):
    make_table(store, 1), make_table(store, 2)
    collect(store, Rule(keep=1), apply=True)
    for hours, is_there in ((23.9, True), (24.1, False)):
        (folder,) = (store.path / ".trash").iterdir()
        folder.rename(folder.with_name(f"{int(time.time() - hours * 3600)}-1-00000000-0"))
        clean(str(store.path))
        assert (trash_bytes(store) > 0) == is_there


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
    lying = trash_bytes(store)
    collect(store, Rule(1, 1, 0, runs=("b",)), apply=True)
    assert trash_bytes(store) > lying, "what another run threw away waits for its own time"


def test_what_is_needed_comes_back_however_long_it_lay_in_the_trash(store):
    """As where a tag was moved while the version was taken away."""
    line(store)
    store.tag("a", "prod", "a/policy@1")
    with trash.open_trash(store.storage) as turn:
        assert turn.take(Ref("a", "policy", 1))
    assert "a/policy@1" not in visible(store)
    for apply in (False, True):
        collect(store, ALL, apply=apply)
    assert "a/policy@1" in visible(store) and verify(store)[1] == []


def test_numbers_stay_given_and_only_the_same_work_gets_them_back(store):
    line(store)
    collect(store, ALL, apply=True)
    assert str(make_table(store, 9).ref) == "a/logprobs@4"
    assert make_table(store, 1).ref.version == 5, "of nothing: another work than the first"
    policy = make_policy(store, 0, state=False)
    assert str(policy.ref) == "a/policy@0"
    again = make_table(store, 1, models={"policy": policy})
    assert str(again.ref) == "a/logprobs@1" and verify(store)[1] == []
    assert store.ledger("a", "logprobs").tombstone(1) is None


def test_what_expired_says_so_and_can_be_brought_back(store):
    line(store)
    first = store.open("a/logprobs@1").table().to_pydict()
    collect(store, Rule(keep=1), apply=True)
    with pytest.raises(LineageError) as caught:
        store.open("a/logprobs@1")
    error = caught.value
    assert "still lie in the trash: 20" in error.message and "gc, keep = 1" in error.message
    assert error.next == "quiver gc --restore a/logprobs@1"
    with pytest.raises(LineageError, match="expired"):
        store.tag("a", "old", "a/logprobs@1")
    assert store.tag_names("a") == []
    assert restore(store, "a/logprobs@1")[1] == ["version"]
    assert restore(store, "a/policy@2")[1] == ["optimizer"]
    assert store.open("a/logprobs@1").table().to_pydict() == first
    assert with_state(store) == ["a/policy@2", "a/policy@3"] and verify(store)[1] == []
    with pytest.raises(ConfigError, match="nothing of it expired"):
        restore(store, "a/policy@2")
    for _ in range(2):
        collect(store, ALL, apply=True)
    with pytest.raises(LineageError) as caught:
        store.open("a/logprobs@1")
    assert caught.value.next == "quiver lineage a/logprobs@1"
    with pytest.raises(LineageError, match="are deleted"):
        restore(store, "a/logprobs@1")


def test_a_version_that_expired_is_seen_by_its_manifest_where_that_is_asked(store):
    line(store)
    versions = {str(version.ref): version.manifest for version in store.versions()}
    collect(store, ALL, apply=True)
    seen = store.with_expired()
    for ref, manifest in versions.items():
        assert seen.open(ref).manifest == manifest
        assert str(seen.find("a", manifest.kind, manifest.run_key).ref) == ref
    assert store.find("a", "logprobs", versions["a/logprobs@1"].run_key) is None
    expired = seen.open("a/policy@1")
    assert checkpoints.context_length(expired) == 64 and checkpoints.end_token_ids(expired) == [2]
    for use in (
        expired.verify,
        lambda: expired.files.read("model.safetensors"),
        lambda: seen.open("a/logprobs@1").table(),
    ):
        with pytest.raises(LineageError, match="expired"):
            use()
    assert [str(ref) for ref in seen.refs()] == list(versions)
    newer = make_table(store, 1, models={"policy": make_policy(store, 0, state=False)})
    assert seen.find("a", "logprobs", newer.manifest.run_key).tombstone is None


def test_finding_what_expired_opens_as_few_files_however_many_did(store, monkeypatch):
    opened = []
    read = Storage.read
    monkeypatch.setattr(
        Storage, "read", lambda self, key, *most: opened.append(key) or read(self, key, *most)
    )
    counts = []
    for number in (4, 16):
        for seed in range(len(store.ledger("a", "logprobs").content_hashes()), number):
            make_table(store, seed)
        run_key = store.with_expired().open("a/logprobs@2").manifest.run_key
        collect(store, ALL, apply=True)
        opened.clear()
        assert store.with_expired().find("a", "logprobs", run_key).ref.version == 2
        rebuilt = len(opened)
        opened.clear()
        assert store.with_expired().find("a", "logprobs", run_key).ref.version == 2
        counts.append(len(opened))
        opened.clear()
        make_table(store, 100 + number)
        collect(store, ALL, apply=True)
        opened.clear()
        assert store.with_expired().find("a", "logprobs", run_key).ref.version == 2
        assert len(opened) < rebuilt, "only what went since is read"
    assert counts[0] == counts[1] <= 4


def test_rm_goes_the_same_way_and_is_made_again(store):
    line(store)
    run_key = store.open("a/logprobs@1").manifest.run_key
    remove(store, "a/logprobs@1", "by hand")
    assert trash_bytes(store) == 0 and not list((store.path / ".trash").iterdir())
    with pytest.raises(LineageError, match=r"deleted on purpose.*by hand"):
        store.with_expired().open("a/logprobs@1")
    assert store.with_expired().find("a", "logprobs", run_key) is None


# -- against others


@contextmanager
def paused_gc(store: Store, monkeypatch, where: str):
    """gc in another thread, which stops after its tombstones, or after its second look."""
    reached, go_on = threading.Event(), threading.Event()
    errors = []
    looks = []
    look = collection._candidates

    def stop(*arguments):
        looks.append(len(looks) + 1)
        if (looks[-1], where) == (2, "tombstones"):
            reached.set()
            go_on.wait(20)
        candidates = look(*arguments)
        if (looks[-1], where) in ((1, "first look"), (2, "second look")):
            reached.set()
            go_on.wait(20)
        return candidates

    def work():
        try:
            collect(Store(store.path), Rule(keep=1, moments=1), apply=True)
        except Exception as error:
            errors.append(error)

    monkeypatch.setattr(collection, "_candidates", stop)
    thread = threading.Thread(target=work)
    thread.start()
    assert reached.wait(20)
    yield go_on
    thread.join(20)
    assert errors == [] and not thread.is_alive()


def test_a_reader_reads_on_while_what_it_reads_is_deleted(store):
    """Its files are mapped. One that opened the version and has read nothing yet is told."""
    line(store)
    mapped = store.open("a/logprobs@1").table()
    late = store.open("a/logprobs@1")
    expected = table(10).to_pydict()
    collect(store, Rule(keep=1), apply=True)
    assert mapped.to_pydict() == expected
    with pytest.raises(LineageError, match="still lie in the trash"):
        late.table()
    collect(store, ALL, apply=True)
    assert trash_bytes(store) == 0 and mapped.to_pydict() == expected
    with pytest.raises(LineageError, match="are deleted"):
        late.table()
    late = store.open("a/logprobs@3")
    remove(store, late.ref, "by hand")
    with pytest.raises(LineageError, match=r"was deleted on purpose: .* by hand"):
        late.table()


@pytest.mark.parametrize("where", ["tombstones", "second look"])
@pytest.mark.parametrize("need", ["tag", "input", "model"])
def test_what_somebody_needs_while_it_goes_stays(store, monkeypatch, where, need):
    line(store)
    first = store.open("a/policy@0" if need == "model" else "a/logprobs@1")
    done = []

    def tag():
        store.tag("a", "prod", first.ref)
        done.append(str(store.resolve("a/logprobs@prod")))

    def stage():
        with begin(store, "b", "logprobs", **plan(7, **{f"{need}s": {"first": first}})):
            done.append(str(store.resolve(first.ref)))
            time.sleep(0.2)

    with paused_gc(store, monkeypatch, where) as go_on:
        thread = threading.Thread(target=tag if need == "tag" else stage)
        thread.start()
        said_so = "a/tags/prod" if need == "tag" else "b/logprobs/.staging/*/sources"
        deadline = time.monotonic() + 20
        while not list(store.path.glob(said_so)) and time.monotonic() < deadline:
            time.sleep(0.01)
        go_on.set()
        thread.join(20)
    assert done == [str(first.ref)]
    store.open(first.ref).verify()
    assert store.ledger("a", first.ref.kind).tombstone(first.ref.version) is None
    assert verify(store)[1] == []
    assert "a/policy@1" not in visible(store), "the others went"


@pytest.mark.parametrize("need", ["tag", "version"])
def test_what_somebody_needed_right_before_its_tombstone_stays(store, monkeypatch, need):
    """There was none to be seen then."""
    line(store)
    first = store.open("a/logprobs@1")
    with paused_gc(store, monkeypatch, "first look") as go_on:
        if need == "tag":
            store.tag("a", "prod", first.ref)
        else:
            make_table(store, 9, inputs={"other": first})
        go_on.set()
    assert "a/logprobs@1" in visible(store) and verify(store)[1] == []
    assert store.ledger("a", "logprobs").tombstones() == [(2, "")]
    assert trash_bytes(store) > 0, "the others went"


@pytest.mark.parametrize("need", ["tag", "stage"])
def test_what_somebody_needs_right_after_rm_looked_stays(store, monkeypatch, need):
    """There was no tombstone to be seen then either."""
    line(store)
    first = store.open("a/logprobs@1")
    write_tombstone = Ledger.expire
    with ExitStack() as stack:

        def expire(*arguments, **options):
            if need == "tag":
                store.tag("a", "prod", first.ref)
            else:
                work = begin(store, "b", "logprobs", **plan(7, inputs={"rollouts": first}))
                stack.enter_context(work)
            write_tombstone(*arguments, **options)

        monkeypatch.setattr(Ledger, "expire", expire)
        with pytest.raises(ConflictError, match="points at it" if need == "tag" else "reads it"):
            remove(store, first.ref)
    assert store.open(first.ref).table().num_rows == 2 and verify(store)[1] == []
    assert store.ledger("a", "logprobs").tombstones() == [] and trash_bytes(store) == 0


def test_a_tombstone_of_one_that_died_is_taken_back_where_the_version_stays(store):
    line(store)
    for number, folder in ((1, ""), (2, ""), (2, "optimizer")):
        store.ledger("a", "policy").expire(number, "gc", expired=True, folder=folder)
    before = visible(store)
    collect(store, Rule(keep=None, moments=None), apply=True)
    assert (visible(store), store.ledger("a", "policy").tombstones()) == (before, [])
    assert with_state(store) == ["a/policy@1", "a/policy@2", "a/policy@3"]


def test_what_a_stage_at_work_may_be_publishing_stays(store):
    for number in (1, 2, 3):
        make_table(store, number)
    with begin(store, "a", "logprobs", **plan(1), force=True):
        collect(store, ALL, apply=True)
    assert visible(store) == ["a/logprobs@1", "a/logprobs@3"]


def test_what_is_committed_meanwhile_is_not_touched(store, monkeypatch):
    line(store)
    with paused_gc(store, monkeypatch, "tombstones") as go_on:
        made = make_table(store, 9, inputs={"other": store.open("a/logprobs@3")})
        again = make_table(store, 10)
        go_on.set()
    assert {str(made.ref), str(again.ref)} <= set(visible(store)) and verify(store)[1] == []


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


def test_two_at_once_are_one_after_another(store):
    for number in range(12):
        make_table(store, number)
    context = multiprocessing.get_context("fork")
    workers = [
        context.Process(target=lambda: collect(Store(store.path), ALL, apply=True))
        for _ in range(3)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert visible(store) == ["a/logprobs@12"] and verify(store) == (1, [])


def test_whoever_was_asleep_while_another_took_over_takes_nothing(store, monkeypatch):
    monkeypatch.setattr(trash, "WAIT_SECONDS", 0)
    line(store)
    ref = store.resolve("a/logprobs@1")
    with trash.open_trash(store.storage) as sleeper:
        with pytest.raises(BusyError, match=f"process {os.getpid()} takes versions away just now"):
            collect(store, ALL, apply=True)
        sleeper.take(store.resolve("a/logprobs@2"))
        other = Leases(store.storage, ".leases").take("gc", from_living=True)
        with pytest.raises(BusyError, match="took over"):
            sleeper.take(ref)
        # it looked at its lease right before that: then its folder has another name by now
        monkeypatch.setattr(type(other), "is_held", lambda self: True)
        folder = store.path / f"{sleeper.folder}.open"
        folder.rename(folder.with_suffix(""))
        (folder.with_suffix("") / "a/logprobs").rename(folder.with_suffix("") / "moved")
        make_prefix = Storage.make_prefix
        monkeypatch.setattr(Storage, "make_prefix", lambda *_: None)
        with pytest.raises(BusyError, match="took over"):
            sleeper.take(ref)
        monkeypatch.setattr(Storage, "make_prefix", make_prefix)
    assert store.open(ref).table().num_rows == 2


DEATHS = """
import os, sys
from quiver.stages.core.store import Store, collection, storage
from quiver.stages.core.store.retention import remove

os.fsync = lambda handle: None
left = int(sys.argv[2])

def counted(name):
    real = getattr(os, name)
    def call(*arguments, **options):
        global left
        if left == 0:
            os.kill(os.getpid(), 9)
        left -= 1
        return real(*arguments, **options)
    setattr(os, name, call)

store = Store(sys.argv[1])
for name in ("rename", "replace", "link", "unlink", "rmdir", "mkdir"):
    counted(name)
if sys.argv[3] == "rm":
    remove(store, "a/logprobs@1")
else:
    collection.collect(store, collection.Rule(1, 1, 0), apply=True)
"""
"""One that dies before its n-th change of the disk."""


@pytest.mark.parametrize("what", ["gc", "rm"])
def test_killed_anywhere_the_next_one_finishes(tmp_path, what):
    """Each of these is a process of its own only on paper: forks of one that has imported all."""
    start = Store(tmp_path / "start")
    line(start)
    (start.path / ".trash/1700000000-1-00000000-0/a/logprobs/v000009").mkdir(parents=True)
    (start.path / ".trash/1700000000-1-00000000-0/a/logprobs/v000009/part-00000.arrow").write_bytes(
        b"x" * 99
    )
    content = {str(v.ref): v.manifest.content_hash for v in start.versions()}
    code = compile(DEATHS, "deaths", "exec")
    endings = set()
    for changes in range(0, 400, 1 if what == "rm" else 3):
        path = tmp_path / f"store{changes}"
        shutil.copytree(start.path, path)
        child = os.fork()
        if not child:
            try:
                sys.argv = ["", str(path), str(changes), what]
                exec(code, {"__name__": "deaths"})
                os._exit(0)
            except BaseException:
                os._exit(1)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        endings.add(status)
        store = Store(path)
        for version in store.versions():  # no version is torn, and none is other content
            version.verify()
            assert version.manifest.content_hash == content[str(version.ref)]
        for _ in range(2):
            collect(store, ALL, apply=True)
        assert visible(store) == ["a/logprobs@3", "a/policy@2", "a/policy@3"]
        assert trash_bytes(store) == 0 and not list(path.glob("**/*.gone"))
        assert find_kept(store, 1, 1).run_keys == set()
        shutil.rmtree(path)
        if status == 0:
            break
    assert endings == {0, -9}


# -- staging


def leave_staging(store: Store, number: int) -> str:
    """What a killed stage leaves; its run_key."""
    code = (
        "import os, sys\n"
        "from quiver.stages.core.store import Store\n"
        "from tests.stages.core.store.histories import plan, table\n"
        "from tests.writing import begin\n"
        f"with begin(Store(sys.argv[1]), 'a', 'logprobs', **plan({number})) as work:\n"
        "    work.write(0, table(0))\n"
        "    os._exit(0)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(store.path)], check=True)
    (key,) = {path.name.split(".")[0] for path in (store.path / "a/logprobs/.staging").iterdir()}
    return key


def test_what_was_staged_and_given_up_goes_after_the_grace_time(store):
    make_table(store, 1)
    run_key = leave_staging(store, 2)
    staging = store.path / "a/logprobs/.staging"
    assert collect(store, Rule(), apply=True).staging == []
    lease = next((staging / f"{run_key}.leases/work").iterdir())
    day_ago = time.time() - 25 * 3600
    for path in staging.rglob("*"):
        os.utime(path, (day_ago, day_ago))
    (swept,) = collect(store, Rule()).staging
    assert (swept.run_key, swept.bytes > 500) == (run_key, True) and lease.exists()
    # somebody on another host, heard of just now
    owner = {"boot_id": "x", "pid_namespace": 1, "pid": 1, "start_time": 1}
    fields = {"owner": owner, "token": "t", "label": "", "released": False}
    lease.write_text(json.dumps(fields))
    assert collect(store, Rule(grace_seconds=0), apply=True).staging == []
    os.utime(lease, (day_ago, day_ago))
    for path in (lease.parent, lease.parent.parent):
        os.utime(path, (day_ago, day_ago))
    assert len(collect(store, Rule(), apply=True).staging) == 1
    assert list(staging.iterdir()) == []
    with begin(store, "a", "logprobs", **plan(2)) as work:
        assert not work.has(0)
        assert collect(store, Rule(grace_seconds=0), apply=True).staging == []
        work.write(0, make_table(store, 1).table())
        assert work.commit().ref.version == 2


def test_what_was_staged_for_a_finished_version_goes_at_once(store):
    run_key = leave_staging(store, 1)
    staging = store.path / "a/logprobs/.staging"
    shutil.copytree(staging, store.path.parent / "copy")
    make_table(store, 1)
    shutil.rmtree(staging)
    shutil.move(store.path.parent / "copy", staging)
    half = store.path / "a/logprobs/v000007.0a1b2c3d.gone"
    half.mkdir()
    swept = collect(store, Rule(), apply=True).staging
    assert {leftover.run_key for leftover in swept} == {run_key, ""}
    assert list(staging.iterdir()) == [] and not half.exists()


@pytest.mark.parametrize("count", sizes(300, 10_000))
def test_leftovers_of_the_dead_cost_a_commit_nothing_and_all_go(store, count):
    def changes_of_commit(number: int) -> int:
        changes = []
        with watched(lambda name, path, call: (changes.append(name), call())[1]):
            make_table(store, number)
        return len(changes)

    changes_of_commit(1)
    expected = changes_of_commit(2)
    staging, day_ago = store.path / "a/logprobs/.staging", time.time() - 86_400
    for number in range(count):
        left = staging / f"{number:064x}"
        left.mkdir()
        (left / "plan").write_text("{")
        for path in (left / "plan", left):
            os.utime(path, (day_ago, day_ago))
    assert changes_of_commit(3) <= expected
    assert verify(store)[1] == []
    assert len(collect(store, Rule(), apply=True).staging) == count
    assert list(staging.iterdir()) == []
    assert store.numbers("a", "logprobs") == [1, 2, 3]


def test_what_came_back_and_was_deleted_then_is_no_more_expired(store):
    """Nobody looked in between."""
    line(store)
    collect(store, Rule(keep=1), apply=True)
    index = store.index("a", "logprobs")
    assert index.expired() == [1, 2]
    restore(store, "a/logprobs@1")
    remove(store, "a/logprobs@1")
    assert index.expired() == [2]


def test_a_long_reason_is_cut_where_it_is_told(store):
    remove(store, make_table(store, 1).ref, "so\x1b" + "o" * 100_000)
    with pytest.raises(LineageError) as caught:
        store.open("a/logprobs@1")
    assert "so\\x1bo" in str(caught.value) and len(str(caught.value)) < 600


def test_what_was_put_aside_is_only_listed(store):
    make_table(store, 1)
    aside = store.path / ".quarantine/a-logprobs-9-0a1b2c3d"
    aside.mkdir(parents=True)
    (aside / "manifest.json").write_bytes(b"{" * 70)
    assert collect(store, ALL, apply=True).quarantine == {aside.name: 70} and aside.exists()


# -- by chance


def live_through(store: Store, seed: int, steps: int) -> None:
    history = History(store, seed)
    history.run(steps)
    for _ in range(2):
        collect(store, ALL, apply=True)
    assert trash_bytes(store) == 0 and not list((store.path / ".trash").glob("*"))
    assert verify(store)[1] == []


@pytest.mark.parametrize("seed", range(5))
def test_whatever_happens_what_is_reachable_stays(store, seed):
    live_through(store, seed, 16)


@pytest.mark.torture
@pytest.mark.parametrize("seed", range(100, 600))
def test_whatever_happens_in_500_histories(store, seed):
    live_through(store, seed, 60)
