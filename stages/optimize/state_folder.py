"""Named tensors in a folder below a policy's, as safetensors, with a JSON note about their content;
never a pickle.

    write(folder / "optimizer", tensors, optimizer="adamw", step=12)
    tensors = read(policy, "optimizer", optimizer="adamw")

The tensors are in one file, state.safetensors, or in several, state-00001-of-00003.safetensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from quiver.schemas.errors import ConfigError, printable
from quiver.stages.common.models.checkpoints import FILE_BYTES
from quiver.stages.common.models.folder import load_errors, parse_object
from quiver.stages.common.store import Version, storage


def write(
    folder: Path, tensors: Mapping[str, Tensor], *, file_bytes: int = FILE_BYTES, **about: Any
) -> None:
    """Create `folder` with `tensors`, which may be on any device, and a note with the fields
    `about`.

    Only one file's tensors are in host memory at a time. `file_bytes`: largest file, unless a
    single tensor is larger.
    """
    from safetensors.torch import save_file

    files: list[list[str]] = [[]]
    free = file_bytes
    for name, tensor in tensors.items():
        if files[-1] and tensor.nbytes > free:
            files.append([])
            free = file_bytes
        files[-1].append(name)
        free -= tensor.nbytes
    folder.mkdir()
    for number, names in enumerate(files, 1):
        of_file = {name: tensors[name].cpu().contiguous() for name in names}
        save_file(of_file, folder / _file_name(number, len(files)))
    note = json.dumps({"files": len(files), **about})
    storage.write_bytes(folder / "state.json", note.encode())


def _file_name(number: int, count: int) -> str:
    return f"state-{number:05d}-of-{count:05d}.safetensors" if count > 1 else "state.safetensors"


def holds(policy: Version, folder: str) -> bool:
    """Return True if this policy has such a folder."""
    return f"{folder}/state.json" in policy.files.names


def read(policy: Version, folder: str, **about: Any) -> dict[str, Tensor]:
    """Return the tensors that `write` wrote into this policy, checked against its hashes. Raises
    ConfigError if the note does not match `about`."""
    from safetensors.torch import load_file

    policy.verify(f"{folder}/")
    note = parse_object(policy.files.read(f"{folder}/state.json")) or {}
    count = note.get("files")
    if type(count) is not int or count < 1 or not about.items() <= note.items():
        raise ConfigError(
            str(policy.ref),
            f"{folder}/ is {printable(note)}, expected a number of files and {about}",
            next="start from another policy",
        )
    tensors: dict[str, Tensor] = {}
    with load_errors(f"{policy.ref} {folder}/"):
        for number in range(1, count + 1):
            tensors |= load_file(policy.files.path(f"{folder}/{_file_name(number, count)}"))
    return tensors
