"""`make setup` in a folder of its own, with a lock of two tiny packages and indexes on the disk."""

import os
import shutil
import subprocess
import sys
import zipfile
from functools import cache
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
TORCH = "torch==1.0+cpu"


BACKEND = """
import shutil
def build_editable(folder, settings=None, metadata=None):
    return shutil.copy("tiny-1.0-py3-none-any.whl", folder).rpartition("/")[2]
"""
"""An environment of no setuptools builds nothing."""


def write_wheel(index: Path, name: str, version: str) -> None:
    """A package of one empty module, in the simple index at `index`."""
    folder = index / name
    folder.mkdir(parents=True)
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": "",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n",
    }
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    (folder / "index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>')


@pytest.fixture
def clone(tmp_path) -> Path:
    """The Makefile, a lock, an index without torch and one with it."""
    write_wheel(tmp_path / "indexes/own", "plain", "2.0")
    write_wheel(tmp_path / "indexes/torch", "torch", "1.0+cpu")
    folder = tmp_path / "clone"
    folder.mkdir()
    shutil.copy(ROOT / "Makefile", folder)
    (folder / "requirements-cpu.lock").write_text(f"plain==2.0\n{TORCH}\n")
    write_wheel(tmp_path / "indexes/none", "tiny", "1.0")
    shutil.copy(tmp_path / "indexes/none/tiny/tiny-1.0-py3-none-any.whl", folder)
    (folder / "backend.py").write_text(BACKEND)
    (folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "tiny"\nversion = "1.0"\n'
    )
    return folder


def setup(clone: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    env |= {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": index(clone, "own")}
    given = {"PYTHON": sys.executable, "LOCK": "requirements-cpu.lock", **variables}
    command = ["make", "setup", *(f"{name}={value}" for name, value in given.items())]
    return subprocess.run(command, cwd=clone, env=env, capture_output=True, text=True, check=False)


def index(clone: Path, name: str) -> str:
    return (clone.parent / "indexes" / name).as_uri()


def with_driver(clone: Path, version: str) -> str:
    """A PATH on which `nvidia-smi` tells this version."""
    smi = clone / "bin/nvidia-smi"
    smi.parent.mkdir(exist_ok=True)
    smi.write_text(f"#!/bin/sh\necho {version}\n")
    smi.chmod(0o755)
    return f"{smi.parent}{os.pathsep}{os.environ['PATH']}"


def lying_python(clone: Path, lie: str) -> str:
    """A Python that runs a line before what it is asked by `-c`."""
    python = clone / "python"
    python.write_text(
        f'#!/bin/sh\nexec {sys.executable} -c "import sys; {lie}; exec(sys.argv[1])" "$2"\n'
    )
    python.chmod(0o755)
    return str(python)


def test_a_lock_is_installed_with_torch_from_its_own_index_and_another_lock_anew(clone):
    cpu, gpu = "requirements-cpu.lock", "requirements-gpu.lock"
    shutil.copy(clone / cpu, clone / gpu)
    # a CPU build of torch would satisfy the pin of a GPU's, and stay
    old = clone / ".venv/.installed-requirements-old.lock"
    old.parent.mkdir()
    old.touch()
    refused = setup(clone, LOCK=gpu, PATH=with_driver(clone, "570.133.20"))
    told = f"The GPU's driver is 570.133.20, and {TORCH} needs 580 or newer"
    assert refused.returncode != 0 and told in refused.stderr
    path = with_driver(clone, "580.65.06")
    without = setup(clone, LOCK=gpu, PATH=path, CC="/no/such/cc")
    assert without.returncode != 0
    assert "No C compiler (/no/such/cc), and Triton needs one" in without.stderr
    python = lying_python(clone, "import sysconfig; sysconfig.get_path = lambda *_: '/no/such'")
    bare = setup(clone, LOCK=gpu, PATH=path, CC="sh", PYTHON=python)
    assert bare.returncode != 0
    assert "There is no /no/such/Python.h, and Triton needs it" in bare.stderr
    assert old.exists(), "nothing was changed"
    failed = setup(clone, LOCK=cpu, CC="/no/such/cc", TORCH_INDEX=index(clone, "own"))
    assert failed.returncode != 0
    assert "The .venv was made from requirements-old.lock: it is made anew." in failed.stdout
    assert f"No index has {TORCH}: make setup TORCH_INDEX=URL" in failed.stderr
    assert not list(clone.glob(".venv/.installed-*"))
    done = setup(clone, LOCK=gpu, PATH=path, TORCH_INDEX=index(clone, "torch"))
    assert done.returncode == 0, done.stderr
    assert "Installing the packages of requirements-gpu.lock" in done.stdout
    assert "Successfully installed torch-1.0+cpu" in done.stdout
    assert "Successfully installed plain-2.0" in done.stdout
    subprocess.run([clone / ".venv/bin/python", "-c", "import plain, torch, tiny"], check=True)
    assert [each.name for each in clone.glob(".venv/.installed-*")] == [f".installed-{gpu}"]
    assert "Installing" not in setup(clone, LOCK=gpu, PATH=path).stdout, "it is there already"


def test_another_python_is_refused_at_once(clone):
    failed = setup(clone, PYTHON=lying_python(clone, "sys.version_info = (3, 14, 0)"))
    assert failed.returncode != 0 and not (clone / ".venv").exists()
    assert "Quiver runs on Python 3.11 3.12 3.13, found 3.14: make setup PYTHON=" in failed.stderr


# -- what the locks hold


def locked(lock: str, python: str) -> dict[str, str]:
    """The versions that a lock has for a Python, by name."""
    versions = {}
    for line in (ROOT / lock).read_text().splitlines():
        requirement = Requirement(line)
        environment = {"python_version": python, "python_full_version": f"{python}.0"}
        if requirement.marker is None or requirement.marker.evaluate(environment):
            (specifier,) = requirement.specifier
            versions[canonicalize_name(requirement.name)] = specifier.version
    return versions


@cache
def installed(name: str) -> tuple[str, list[Requirement]]:
    """The version of a package here, without its build, and what it asks for; empty if it is not."""
    try:
        wheel = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return "", []
    return wheel.version.partition("+")[0], [*map(Requirement, wheel.requires or ())]


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
@pytest.mark.parametrize("lock", ["requirements-cpu.lock", "requirements-gpu.lock"])
def test_each_locked_version_fits_what_the_others_ask_for(lock, python):
    """As far as their metadata are installed here."""
    versions = locked(lock, python)
    environment = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    asked = 0
    for name in versions:
        here, requirements = installed(name)
        if here != versions[name].partition("+")[0]:
            continue
        for requirement in requirements:
            version = versions.get(canonicalize_name(requirement.name))
            is_asked = requirement.marker is None or requirement.marker.evaluate(environment)
            if version is not None and is_asked:
                asked += 1
                fits = requirement.specifier.contains(version, prereleases=True)
                assert fits, f"{name} asks for {requirement}, the lock has {version}"
    assert asked > 300


def test_what_only_the_lock_for_a_gpu_has():
    """What processors of pictures want; one release of CUDA's bindings, whose wheels own the same
    paths otherwise; and setuptools as vLLM asks for it."""
    for python in ("3.11", "3.12", "3.13"):
        versions = locked("requirements-gpu.lock", python)
        assert versions["cuda-python"] == versions["cuda-bindings"]
        assert "torchvision" in versions
        assert int(versions["setuptools"].partition(".")[0]) < 81
        assert "torchvision" not in locked("requirements-cpu.lock", python)


def test_no_file_is_of_two_packages():
    """Who is installed last would decide what it holds. The same is true of either environment:
    this is the one that runs the tests."""
    owners: dict[str, str] = {}
    for distribution in metadata.distributions():
        name = distribution.name
        for line in (distribution.read_text("RECORD") or "").splitlines():
            path = line.rsplit(",", 2)[0]
            if not path.endswith(".pyc"):
                assert owners.setdefault(path, name) == name, path
    assert len(owners) > 10_000
