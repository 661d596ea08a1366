"""Which device a model goes on.

uses_gpu("logprobs.device", config.device)     # of "auto", "cpu" and "cuda"
[number] = next_gpus(1)                        # of several models in one process

Not of the spine: it is one question, with an answer that is never a guess.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quiver.schemas.errors import ConfigError

_turns = itertools.count()
"""Of GPUs that models of this process have taken."""
placing = threading.RLock()
"""Held while a model goes to its GPUs: models load in threads, and `seeing_only` changes what the
whole process sees."""


def uses_gpu(key: str, device: str, nodes: Path = Path("/dev")) -> bool:
    """Whether the model goes on a GPU: with `auto` where there is one that torch sees. ConfigError
    about `key`: the named one is not there, or there is one (`nodes` have it) that torch does not
    see, which would mean a night on the CPU without a word."""
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
            f"there is a GPU, {node}, and torch sees none: its build ({torch.__version__}) or the "
            f'driver is another; {key} = "cpu" would do without',
            next="quiver doctor",
        )
    return False


def engine_gpus(
    options: Mapping[str, Any], axes: Collection[str] = ("tensor", "pipeline", "data")
) -> int:
    """How many GPUs an engine with these options takes: one, unless it splits or copies its model
    in vLLM's way, along these axes."""
    more = options.get("engine_args")
    arguments = {**options, **(more if isinstance(more, Mapping) else {})}
    sizes = [arguments.get(f"{axis}_parallel_size") for axis in axes]
    sizes = [int(size) for size in sizes if str(size).isdecimal()]
    return math.prod(size for size in sizes if size > 0)


def next_gpus(count: int) -> list[int]:
    """The numbers of the GPUs for the next model of this process. Models take turns at those that
    it sees: each has its own where there are enough."""
    import torch

    there = torch.cuda.device_count()
    return [next(_turns) % there for _ in range(min(count, there))]


@contextmanager
def seeing_only(numbers: list[int]) -> Iterator[None]:
    """What is started inside sees these GPUs of this process alone."""
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
