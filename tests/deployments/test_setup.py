"""`make setup` in a folder of its own, with a lock of two tiny packages and indexes on the disk."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

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


def test_torch_comes_from_its_own_index_where_pips_lack_it(clone):
    failed = setup(clone, TORCH_INDEX=index(clone, "own"))
    assert failed.returncode != 0
    assert f"No index has {TORCH}: make setup TORCH_INDEX=URL" in failed.stderr
    done = setup(clone, TORCH_INDEX=index(clone, "torch"))
    assert done.returncode == 0, done.stderr
    assert "Installing the packages of requirements-cpu.lock" in done.stdout
    assert "Successfully installed torch-1.0+cpu" in done.stdout
    assert "Successfully installed plain-2.0" in done.stdout
    subprocess.run([clone / ".venv/bin/python", "-c", "import plain, torch, tiny"], check=True)
    assert "Installing" not in setup(clone).stdout, "it is there already"


def test_another_python_is_refused_at_once(clone):
    python = clone / "python"
    lie = "import sys; sys.version_info = (3, 14, 0); exec(sys.argv[1])"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{lie}" "$2"\n')
    python.chmod(0o755)
    failed = setup(clone, PYTHON=str(python))
    assert failed.returncode != 0 and not (clone / ".venv").exists()
    assert "Quiver runs on Python 3.11 3.12 3.13, found 3.14: make setup PYTHON=" in failed.stderr
