"""Leases: who has one, who may take it over, and what a process that was asleep cannot do."""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from quiver.schemas.errors import QuiverError
from quiver.stages.core.store import leases as module
from quiver.stages.core.store.disk import Disk
from quiver.stages.core.store.leases import Leases
from tests.faults.failing import failing
from tests.faults.seam import watched
from tests.stages.core.store.test_sharing import KIND, require_one, work_on, write_all

OWNED = (
    '{"token": "t", "renewed_at": 0.0, "released": false, "owner": '
    '{"boot_id": "b", "pid_namespace": 1, "start_time": 1, "pid": %s}}'
)
"""A lease of the process with this number."""
FORK = multiprocessing.get_context("fork")


@pytest.fixture
def leases(tmp_path) -> Leases:
    return Leases(Disk(tmp_path), "leases")


def test_a_lease_whose_taking_failed_is_free_at_once(tmp_path):
    """Its object is there already, and names this process."""
    leases = Leases(Disk(tmp_path), "key.leases")
    with failing("lease.taken:raise=5"), pytest.raises(OSError, match="Input/output error"):
        leases.take("work")
    assert leases.names() == ["work"]
    assert leases.holder("work") is None and leases.take("work").is_held()


@pytest.fixture
def short_lived(monkeypatch):
    """Leases that live for half a second, renewed five times in it."""
    monkeypatch.setattr(module, "SECONDS_TO_LIVE", 0.5)
    monkeypatch.setattr(module, "SECONDS_BETWEEN_RENEWALS", 0.1)


def elsewhere(leases):
    """The same leases as another process would see them."""
    return Leases(leases.storage, leases.prefix)


def wait_until(condition, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.02)


def test_one_has_it_until_it_is_released(leases):
    lease = leases.take("work")
    assert lease.is_held() and elsewhere(leases).take("work") is None
    assert leases.holder("work").owner.pid == os.getpid()
    lease.release()
    assert leases.holder("work") is None and not lease.is_held()
    again = elsewhere(leases).take("work")
    assert again.is_held() and not lease.is_held()


@pytest.mark.parametrize("name", ["000008.json", "0000008", "8", "000008 copy"])
def test_what_others_put_into_a_chain_is_no_lease(leases, name):
    held = leases.take("work")
    Path(leases.storage.url, leases.prefix, "work", name).write_text("{}")
    assert leases.holder("work").owner.pid == os.getpid() and held.is_held()
    held.release()
    assert elsewhere(leases).take("work").is_held()


def test_how_long_it_is_seen_held_is_counted_anew_for_each_holder(leases):
    first = leases.take("work")
    watcher = elsewhere(leases)
    assert watcher.seconds_seen("work") < 0.2
    time.sleep(0.4)
    assert watcher.seconds_seen("work") >= 0.4
    first.release()
    leases.take("work")
    assert watcher.seconds_seen("work") < 0.2, "it has only begun"


def take_in_child(leases, start=None):
    """A process that takes the lease, if it can, and stays; and what says whether it could."""
    reader, writer = os.pipe()

    def take():
        if start is not None:
            start.wait()
        os.write(writer, b"+" if elsewhere(leases).take("work") else b"-")
        time.sleep(60)

    child = FORK.Process(target=take, daemon=True)
    child.start()
    os.close(writer)
    return child, reader


def end(child, reader):
    child.kill()
    child.join()
    os.close(reader)


def test_of_many_that_take_over_from_the_dead_one_does(leases):
    holder, reader = take_in_child(leases)
    assert os.read(reader, 1) == b"+"
    for _ in range(5):
        end(holder, reader)
        start = FORK.Barrier(6)
        children = [take_in_child(leases, start) for _ in range(6)]
        answers = [os.read(answer, 1) for _, answer in children]
        assert sorted(answers) == [b"+"] + [b"-"] * 5
        holder, reader = children.pop(answers.index(b"+"))
        for child in children:
            end(*child)
    end(holder, reader)


def test_whoever_renews_keeps_it_and_whoever_is_stopped_loses_it(leases, short_lived):
    child, reader = take_in_child(leases)
    assert os.read(reader, 1) == b"+"
    for _ in range(15):
        assert leases.take("work") is None, "it is renewed"
        time.sleep(0.1)
    os.kill(child.pid, signal.SIGSTOP)
    wait_until(lambda: leases.take("work") is not None)
    end(child, reader)


def test_a_copy_of_a_process_renews_its_own_leases_alone(leases, short_lived):
    """From another host, one that has died would be seen to live on in its copy."""
    reader, writer = os.pipe()

    def hold():
        elsewhere(leases).take("work")
        if os.fork() == 0:
            elsewhere(leases).take("its own")
            os.write(writer, str(os.getpid()).encode())
        time.sleep(60)

    def times():
        return [leases.top(name).renewed_at for name in ("work", "its own")]

    child = FORK.Process(target=hold, daemon=True)
    child.start()
    copy = int(os.read(reader, 20))
    os.close(writer)
    end(child, reader)
    try:
        before, own = times()
        wait_until(lambda: times()[1] != own)
        own = times()[1]
        wait_until(lambda: times()[1] != own)
        assert times()[0] == before
    finally:
        os.kill(copy, signal.SIGKILL)


def test_who_comes_after_a_stopped_holder_has_slept_too_long_need_not_wait_again(
    leases, short_lived
):
    """Each try of a run that waits is a process of its own, which has seen nothing before."""
    child, reader = take_in_child(leases)
    assert os.read(reader, 1) == b"+"
    os.kill(child.pid, signal.SIGSTOP)
    try:
        assert elsewhere(leases).take("work") is None, "it was heard of a moment ago"
        time.sleep(module.SECONDS_TO_LIVE + 0.2)
        assert elsewhere(leases).take("work") is not None
    finally:
        end(child, reader)


def test_a_renewal_that_comes_late_begins_the_minute_anew(leases, monkeypatch):
    """The holder was slow, and is heard of again in the last second; then never more."""
    monkeypatch.setattr(module, "_keep_renewed", lambda lease: None)
    lease = leases.take("work")
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], time=time.time, sleep=time.sleep)
    monkeypatch.setattr(module, "time", clock)
    watcher = elsewhere(leases)

    def is_free(second):
        now[0] = second
        return watcher.holder("work") is None

    assert not is_free(0.0) and not is_free(59.0)
    assert lease.renew()
    assert not is_free(59.5) and not is_free(60.0) and not is_free(119.0)
    assert is_free(119.5)


def test_a_renewal_never_takes_a_release_back(leases):
    """The thread that renews all leases is at this one when it is released."""
    lease = leases.take("work")
    with ThreadPoolExecutor(1) as pool:
        released = []

        def around(name, path, call):
            # leases of other tests are renewed meanwhile
            if name == "replace" and path.startswith(leases.storage.url) and not released:
                released.append(pool.submit(lease.release))
                wait(released, timeout=0.3)
            return call()

        with watched(around):
            assert lease.renew()
            released[0].result()
    assert elsewhere(leases).take("work") is not None


def test_a_lease_whose_object_is_given_to_another_user_is_still_renewed(leases):
    """By `chown -R` of the whole store, which changes its stamp."""
    lease = leases.take("work")
    leases.storage.local(leases.key("work", 1)).chmod(0o664)
    before = leases.top("work")
    assert lease.renew() and lease.renew() and leases.top("work") != before


@pytest.mark.parametrize(
    "text",
    ['{"owner": {"bo', "[]", "{}", '{"token": "t"}', '{"owner": 1}', "[" * 5000, OWNED % "-1"]
    + [OWNED % pid for pid in ('"x"', "null", "9" * 300)],
)
def test_a_lease_torn_by_a_power_loss_is_free(leases, text):
    leases.take("work").release()
    leases.storage.put_if_absent(leases.key("work", 2), text.encode())
    assert leases.take("work").is_held() and leases.top("work").number == 3


def put_lease(leases, **changes):
    """A lease of this process, but for these words about its owner."""
    owner = {**asdict(module.Owner.this_process()), **changes}
    fields = {"owner": owner, "token": "t", "renewed_at": time.time(), "released": False}
    leases.storage.put_if_absent(leases.key("work", 1), json.dumps(fields).encode())


def test_a_process_with_the_number_of_a_dead_one_is_not_that_one(leases):
    put_lease(leases)
    assert leases.take("work") is None
    shutil.rmtree(leases.storage.local(leases.prefix))
    put_lease(leases, start_time=module.Owner.this_process().start_time - 1)
    assert leases.take("work").is_held()


@pytest.mark.parametrize("is_alike", [False, True])
def test_a_process_of_another_boot_is_neither_dead_nor_alive_here(leases, monkeypatch, is_alike):
    """Whether or not a process here has its number and start time; only the minute tells."""
    child = FORK.Process(target=int)
    child.start()
    child.join()
    put_lease(leases, boot_id="another", **({} if is_alike else {"pid": child.pid}))
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], time=time.time, sleep=time.sleep)
    monkeypatch.setattr(module, "time", clock)
    assert leases.holder("work").owner.boot_id == "another"
    now[0] = module.SECONDS_TO_LIVE + 1
    assert leases.holder("work") is None


def test_one_of_another_host_is_waited_for_though_its_last_word_is_new(leases, short_lived):
    """What it was last heard of at is by its own clock."""
    put_lease(leases, boot_id="another")
    assert leases.take_or_wait("work").is_held()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes a namespace here")
@pytest.mark.skipif(not shutil.which("unshare"), reason="no unshare")
def test_equal_process_numbers_in_two_namespaces_are_two_processes(leases, short_lived):
    """A process of a container has the number of another one here: it is not dead for that."""
    code = (
        "import os, sys, time; from pathlib import Path\n"
        "from quiver.stages.core.store import disk, leases\n"
        "leases.SECONDS_BETWEEN_RENEWALS = 0.1\n"
        "lease = leases.Leases(disk.Disk(Path(sys.argv[1])), 'leases').take('work')\n"
        "print(os.getpid(), flush=True); time.sleep(60)\n"
    )
    command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    with subprocess.Popen(
        [*command, sys.executable, "-c", code, leases.storage.url],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout.readline() == "1\n"
            assert leases.top("work").owner.pid == 1 and not leases.top("work").owner.can_be_seen
            for _ in range(10):
                assert leases.take("work") is None
                time.sleep(0.1)
        finally:
            process.kill()
    wait_until(lambda: leases.take("work") is not None)


def _commit_asleep(store, queue, place):
    """Write all, and fall asleep at this place."""
    try:
        with work_on(store, share=False) as work, failing(f"{place}:signal={signal.SIGSTOP:d}"):
            work.hand_out(2)
            write_all(work, 2)
            work.commit()
        queue.put(str(work.done.ref))
    except QuiverError as error:
        queue.put(error.code)


@pytest.mark.parametrize("place", ["commit.private", "commit.renaming"])
def test_a_commit_that_slept_too_long_makes_no_second_version(store, short_lived, place):
    """Its look at the lease was in time; another has committed when it goes on."""
    queue = FORK.Queue()
    child = FORK.Process(target=_commit_asleep, args=(store, queue, place), daemon=True)
    child.start()
    wait_until(lambda: module._status(child.pid)[0] == "T")
    time.sleep(module.SECONDS_TO_LIVE)
    with work_on(store, share=False) as work:
        write_all(work, 2)
        work.commit()
    os.kill(child.pid, signal.SIGCONT)
    assert queue.get(timeout=20) == "a/logprobs@1"
    child.join()
    require_one(store)


def test_nothing_of_leases_stays_after_a_commit(store):
    with work_on(store, share=False) as work:
        write_all(work, 1)
        assert [path.name for path in (Path(store.url) / KIND / ".work").glob("*.leases/*")] == [
            "work"
        ]
        work.commit()
    require_one(store)
