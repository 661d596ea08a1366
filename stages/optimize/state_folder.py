"""Named tensors in a folder below a policy's: safetensors, and JSON that says of what; never a
pickle.

    write(folder / "optimizer", tensors, optimizer="adamw", step=12)
    tensors = read(policy, "optimizer", optimizer="adamw")
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from quiver.schemas.errors import ConfigError, printable
from quiver.stages.common.models.folder import load_errors, parse_object
from quiver.stages.common.store import Version, storage

_FORMAT = 1


def write(folder: Path, tensors: Mapping[str, Tensor], **about: Any) -> None:
    """Make `folder` and write `tensors`, which lie on the CPU, and what is said `about` them."""
    from safetensors.torch import save_file

    folder.mkdir()
    save_file(dict(tensors), folder / "state.safetensors")
    note = json.dumps({"format": _FORMAT, **about})
    storage.write_bytes(folder / "state.json", note.encode())


def holds(policy: Version, folder: str) -> bool:
    """Whether there is such a folder below this policy's."""
    return f"{folder}/state.json" in policy.files.names


def read(policy: Version, folder: str, **about: Any) -> dict[str, Tensor]:
    """What `write` wrote into this policy, checked against its hashes. ConfigError where it was
    written by another Quiver, or is not what `about` says."""
    from safetensors.torch import load_file

    policy.verify(f"{folder}/")
    note = parse_object(policy.files.read(f"{folder}/state.json")) or {}
    expected = {"format": _FORMAT, **about}
    if not expected.items() <= note.items():
        raise ConfigError(
            str(policy.ref),
            f"{folder}/ is {printable(note)}, expected {expected}",
            next="take a newer Quiver, or start from another policy",
        )
    with load_errors(f"{policy.ref} {folder}/"):
        return load_file(policy.files.path(f"{folder}/state.safetensors"))
