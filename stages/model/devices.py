"""Chooses the device of a model, and the GPUs of several models in one process.

uses_gpu("logprobs.device", config.device)     # config.device: "auto", "cpu" or "cuda"
[number] = next_gpus(1)                        # the GPU of the process's next model

Not of the spine: one question, whose answer is never a guess.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quiver.schemas.errors import ConfigError

if TYPE_CHECKING:
    import torch

SLEEPING_BYTES = 2_500_000_000
"""Bytes of a GPU that an engine keeps while it sleeps: CUDA's context and its graphs. Estimated."""
_turns = itertools.count()
"""Counter of the GPUs that models of this process have taken."""
placing = threading.RLock()
"""Lock held while a model moves to its GPUs: models load in threads, and `seeing_only` changes the
environment of the whole process."""


def uses_gpu(key: str, device: str, nodes: Path = Path("/dev")) -> bool:
    """True if the model goes on a GPU; "auto" takes one if torch sees one.

    Args:
        key: Config key, for the message.
        device: "auto", "cpu" or "cuda".
        nodes: Folder of device nodes.

    Raises:
        ConfigError: `device` is "cuda" and torch sees no GPU; or `device` is "auto" and `nodes`
            shows a GPU that torch does not see, so the run would silently use the CPU.
    """
    import torch

    if device == "cpu":
        return False
    if torch.cuda.is_available():
        return True
    if device == "cuda":
        raise ConfigError(f"{key} cuda", "torch sees no GPU", next=f'set {key} = "auto"')
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    node = next(iter(sorted(nodes.glob("nvidia[0-9]*"))), None)
    if node is not None and not is_hidden:
        raise ConfigError(
            f"{key} auto",
            f"there is a GPU, {node}, but torch sees none: its build ({torch.__version__}) and the "
            f'driver do not match; {key} = "cpu" runs without it',
            next="quiver doctor",
        )
    return False


def available_bytes(device: torch.device) -> int:
    """Return the memory of a GPU that this process holds or may still take, so without that of
    other processes, such as an engine that sleeps there. 0 for another device, or one that is not
    there."""
    import torch

    if device.type != "cuda" or not torch.cuda.is_available():
        return 0
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device)


def engine_gpus(
    options: Mapping[str, Any], axes: Collection[str] = ("tensor", "pipeline", "data")
) -> int:
    """Return how many GPUs an engine with these options takes.

    That is one, unless vLLM's `…_parallel_size` options split or copy the model along `axes`.
    """
    more = options.get("engine_args")
    arguments = {**options, **(more if isinstance(more, Mapping) else {})}
    sizes = [arguments.get(f"{axis}_parallel_size") for axis in axes]
    sizes = [int(size) for size in sizes if str(size).isdecimal()]
    return math.prod(size for size in sizes if size > 0)


def next_gpus(count: int) -> list[int]:
    """Return the GPU numbers for the next model of this process.

    Models take the visible GPUs in turn, so each has its own if there are enough.
    """
    import torch

    there = torch.cuda.device_count()
    return [next(_turns) % there for _ in range(min(count, there))]


@contextmanager
def seeing_only(numbers: list[int]) -> Iterator[None]:
    """Let processes started inside the context see only these of this process's GPUs."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(number) for number in range(max(numbers) + 1)]
    if before is not None:
        names = before.split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[number] for number in numbers)
    try:
        yield
    finally:
        del os.environ["CUDA_VISIBLE_DEVICES"]
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before
