"""Fixtures for all tests: offline, one thread, a store in the test's own folder, a tiny policy in
it."""

import gc
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    DO_NOT_TRACK="1",
    VLLM_NO_USAGE_STATS="1",
    PREFECT_SERVER_ANALYTICS_ENABLED="false",
    OMP_NUM_THREADS="1",
    TORCH_COMPILE_DISABLE="1",  # a kernel of vLLM's takes longer to compile than a tiny model to run
    TOKENIZERS_PARALLELISM="false",
)

import pytest
from filelock import FileLock

from quiver.stages.core.store import Store, Version
from tests import buckets, spent
from tests.warm import REAL_PYTHON, start_servers, use_warm_python

# with Python's default, collecting garbage takes a twentieth of the time
gc.set_threshold(10_000, 20, 50)
# a shell's background job ignores SIGINT, and so would every child: tests that interrupt one would
# wait for nothing
signal.signal(signal.SIGINT, signal.default_int_handler)

# a fork of this process has no threads to wait for at its end; Prefect's, once a flow ran here, would
# fail there, and the fork would end with 1 and say nothing
os.register_at_fork(after_in_child=threading._threading_atexits.clear)


def pytest_configure(config):
    if config.getoption("numprocesses", None):  # of xdist; its processes share the servers
        start_servers()
    config.pluginmanager.register(spent)
    config.pluginmanager.register(buckets)


def pytest_collection_finish():
    """What the tests import stays: else every stage that trains, which collects garbage at its end,
    looks through half a million objects again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def what_a_module_leaves_stays():
    """Leave what the tests of a module imported and made out of later collections of garbage."""
    yield
    gc.collect(1)  # of the young, which costs little
    gc.freeze()


def pytest_sessionfinish():
    gc.unfreeze()


@pytest.fixture(autouse=True)
def search_path(monkeypatch):
    """What a test adds to the search path, or a recipe's dotted name in its folder, ends with it.

    The rooms have one import name, `quiver.…`: a second copy of a module would be another class.
    """
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    doubled = {"schemas", "stages", "flows", "deployments"} & set(sys.modules)
    assert not doubled, f"imported without `quiver.`: {sorted(doubled)}"


@pytest.fixture(autouse=True)
def settings_of_a_command():
    """What a command that ran in this process does at SIGTERM, and what it logs, ends with its
    test: a fork would do it, too, and the next test would hear less."""
    before = signal.getsignal(signal.SIGTERM)
    loggers = [logging.getLogger(name) for name in (None, "quiver", "quiver.stages")]
    levels = [logger.level for logger in loggers]
    yield
    signal.signal(signal.SIGTERM, before)
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.fixture(scope="session", autouse=True)
def warm_python():
    """Commands and stages start as forks of a process that has imported what they need."""
    use_warm_python()


@pytest.fixture
def fresh_python(monkeypatch):
    """Commands and stages start in fresh interpreters, as a user's do."""
    monkeypatch.setattr(sys, "executable", REAL_PYTHON)


@pytest.fixture(autouse=True)
def vllm_imported(request, monkeypatch):
    """Stages of tests that start vLLM are forks of a process that has imported it."""
    if request.node.get_closest_marker("vllm"):
        monkeypatch.setenv("WARM", "vllm")


@pytest.fixture
def store(tmp_path) -> Store:
    """An empty store."""
    return Store(tmp_path / "store")


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> Path:
    """A folder with `inputs` and a store, `finished`, in which every stage has made something; to be
    copied, not changed. The processes of a run share it."""
    folder = tmp_path_factory.mktemp("finished")
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parents[1] / "finished"  # beside the folders of the processes
        folder.mkdir(exist_ok=True)
    is_complete = folder.with_suffix(".complete")
    with FileLock(f"{folder}.lock"):
        if not is_complete.exists():
            command = [sys.executable, "-m", "tests.finished", str(folder)]
            done = subprocess.run(
                command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, done.stderr
            is_complete.touch()
    return folder


@pytest.fixture(scope="session")
def made_policy(tmp_path_factory) -> Version:
    """To be copied, not changed."""
    from tests.tiny import make_policy

    return make_policy(Store(tmp_path_factory.mktemp("policy") / "store"))


@pytest.fixture
def policy(store, made_policy) -> Version:
    """`tiny/policy@0`: a tiny llama."""
    made = made_policy.files.folder.parent
    shutil.copytree(made, Path(store.url) / "tiny" / "policy")
    return store.open(made_policy.ref)
