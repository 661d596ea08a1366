"""Which device a model goes on.

uses_gpu("logprobs.device", config.device)     # of "auto", "cpu" and "cuda"

Not of the spine: it is one question, with an answer that is never a guess.
"""

from __future__ import annotations

import os
from pathlib import Path

from quiver.schemas.errors import ConfigError


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
