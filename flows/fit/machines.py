"""Memory and speed of machines, for `quiver fit`.

GPU figures are from data sheets, without sparsity.
"""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass, replace

from quiver.schemas.errors import ConfigError, printable


@dataclass(frozen=True)
class Machine:
    """One kind of device, and their number. The name "cpu" means this host, whose speed is
    unknown."""

    name: str
    memory: int
    """Bytes of one device."""
    count: int = 1
    bf16_flops: float = 0.0
    """FLOP/s of bfloat16 products with float32 sums."""
    fp32_flops: float = 0.0
    """FLOP/s of IEEE float32 products."""
    bandwidth: float = 0.0
    """Bytes per second of the device's own memory."""

    @property
    def is_gpu(self) -> bool:
        return self.name != "cpu"


def _gpu(name: str, mebibytes: int, bf16: float, fp32: float, bandwidth: float) -> Machine:
    return Machine(name, mebibytes * 2**20, 1, bf16 * 1e12, fp32 * 1e12, bandwidth * 1e12)


GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("a10", 23028, 125, 31.2, 0.600),
        _gpu("a100", 81920, 312, 19.5, 2.039),
        _gpu("a100-40gb", 40960, 312, 19.5, 1.555),
        _gpu("b200", 183359, 2250, 80, 8.0),
        _gpu("h100", 81559, 989, 67, 3.35),
        _gpu("h200", 143771, 989, 67, 4.8),
        _gpu("l4", 23034, 121, 30.3, 0.300),
        _gpu("l40s", 46068, 362, 91.6, 0.864),
        _gpu("rtx3090", 24576, 71, 35.6, 0.936),
        _gpu("rtx4090", 24564, 165, 82.6, 1.008),
    )
}
"""GPUs by name, made from memory in MiB as nvidia-smi shows it, TFLOP/s of bfloat16 and of float32,
and TB/s."""


def this_host() -> Machine:
    """Return this host with its memory; stages run on the CPU."""
    return Machine("cpu", os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def parse_machine(text: str) -> Machine:
    """Parse `h100`, or `h100:8` for eight GPUs. Raises ConfigError."""
    name, _, count = text.partition(":")
    gpu = GPUS.get(name.lower())
    if gpu is None:
        near = difflib.get_close_matches(name.lower(), GPUS, 1, 0.5)
        raise ConfigError(
            f"--gpu {printable(text)}",
            f"expected one of {', '.join(GPUS)}, such as h100 or h100:8",
            next=f"name --gpu {near[0]}" if near else "name a GPU of the list",
        )
    if count and not (re.fullmatch("[0-9]{1,4}", count) and 1 <= int(count) <= 1024):
        raise ConfigError(
            f"--gpu {printable(text)}",
            "expected a number of GPUs of one host behind the colon",
            next=f"name --gpu {name.lower()}:8, say",
        )
    return replace(gpu, count=int(count or 1))
