"""Push a version to a hub, with a card that says what it was made from.

    push(store, "arith/policy@5", "hf://me/arith")                  # a model
    push(store, "arith/rollouts@5", "hf://datasets/me/arith")       # a dataset

The version's own files are uploaded, checked, without optimizer state and manifest: a manifest may
name hosts and folders. Files of an earlier push that a loader would read too are deleted; others of
the repository stay. The licence is left to the user.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from quiver.flows.look.shards import schema_of
from quiver.schemas.errors import ConfigError, RemoteError, printable, reason
from quiver.stages.core.config import parse
from quiver.stages.core.run.stage import load_stage
from quiver.stages.core.store import Store, Version
from quiver.stages.core.store.versions import OPTIMIZER_FOLDER
from quiver.stages.model.checkpoints import CARRIED_FILES

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

_OF_DATASETS = "datasets/"
_PATH = re.compile(
    r"(?:~[^/\s]*|/[^/\s]+/[^/\s]+)/[^\n]+|/[^/\s]+/\S+|[~/][^\n]*/[^/\n]*\.\w+(?::\w+)?"
)
"""A text that is one path from a home or the root. If it holds blanks, then only below two folders,
or if a suffix ends it: `/no_think Answer yes/no.` is no path."""
_WEIGHTS = re.compile(
    r"(adapter/)?(adapter_)?model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json"
)
_OF_MODELS = {*CARRIED_FILES, "adapter_config.json", "adapter/adapter_config.json"}
"""Files beside the weights that a loader reads if they are there."""

_LOG_IN = "log in by `hf auth login`, or put a token that may write into HF_TOKEN"
_ADVICE = {
    401: _LOG_IN,
    403: _LOG_IN,
    404: "correct the url: NAME is you, or an organization of yours; and check HF_ENDPOINT",
    500: "the hub has a problem: push again later",
}
"""What to do about an error, by its status; 500 is for all above it too."""


def push(store: Store, ref: str, url: str, *, public: bool = False) -> str:
    """Upload a version and return its address. Raises ConfigError or RemoteError."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError

    version = store.open(ref)
    is_policy = version.ref.kind == "policy"
    scheme, _, name = url.partition("://")
    expected = "hf://NAME/REPO" if is_policy else "hf://datasets/NAME/REPO"
    if scheme != "hf" or name.startswith(_OF_DATASETS) == is_policy:
        problem = f"a version of {version.ref.kind} is pushed to {expected}"
        raise ConfigError(f"url {printable(url)}", problem, next="correct the url")
    additions = prepare(version)
    api = HfApi()
    repo = {
        "repo_id": name.removeprefix(_OF_DATASETS),
        "repo_type": "model" if is_policy else "dataset",
    }
    try:
        api.create_repo(**repo, private=not public, exist_ok=True)
        operations = [*additions, *deletions(additions, api.list_repo_files(**repo))]
        api.create_commit(**repo, operations=operations, commit_message=str(version.ref))
    except (HTTPError, OSError, ValueError) as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        raise RemoteError(
            f"hub {printable(api.endpoint)}",
            reason(error),
            next=_ADVICE.get(min(status or 0, 500), "check HF_ENDPOINT, then push again"),
        ) from error
    return f"{api.endpoint}/{name}"


def prepare(version: Version) -> list[CommitOperationAdd]:
    """Return what to upload: the card and the version's files. Raises CorruptError."""
    from huggingface_hub import CommitOperationAdd

    entries = [
        entry
        for entry in version.manifest.files
        if not entry.name.startswith(f"{OPTIMIZER_FOLDER}/") and entry.name != "README.md"
    ]
    version.verify(*(entry.name for entry in entries))
    folder = version.files.folder
    operations = [CommitOperationAdd(entry.name, folder / entry.name) for entry in entries]
    return [CommitOperationAdd("README.md", card(version).encode()), *operations]


def deletions(
    additions: Iterable[CommitOperationAdd], present: Iterable[str]
) -> list[CommitOperationDelete]:
    """Return the deletions of a model's files (for a data set: tables) in `present` that a loader
    would read beside the added ones."""
    from huggingface_hub import CommitOperationDelete

    names = {addition.path_in_repo for addition in additions}
    is_data = any(name.endswith(".arrow") for name in names)

    def is_read(name: str) -> bool:
        if is_data:
            return name.endswith(".arrow") and "/" not in name
        return name in _OF_MODELS or _WEIGHTS.fullmatch(name) is not None

    return [CommitOperationDelete(name) for name in present if name not in names and is_read(name)]


def _without_folders(value: Any) -> Any:
    """Return a setting with the last part alone of each text in it that is a path."""
    if isinstance(value, dict):
        return {name: _without_folders(member) for name, member in value.items()}
    if isinstance(value, list | tuple):
        return [_without_folders(member) for member in value]
    is_path = isinstance(value, str) and _PATH.fullmatch(value)
    return PurePath(value).name if is_path else value


def card(version: Version) -> str:
    """Return the card: front matter, lineage with hashes, settings, columns."""
    manifest = version.manifest
    lines = ["---", "tags: [quiver, reinforcement-learning]"]
    if version.ref.kind == "policy":
        lines.append("library_name: transformers")
    else:
        lines.append('configs: [{config_name: default, data_files: "*.arrow"}]')
    lines += ["---", f"# {version.ref}", "", f"Made by `{manifest.stage}` on {manifest.created}."]
    if manifest.note:
        lines.append(f"Note: {printable(manifest.note, 1000)}")
    lines += ["", "## Lineage", "| role | version | sha256 |", "|---|---|---|"]
    lines.append(f"| this | {version.ref} | {manifest.content_hash} |")
    for entry in manifest.inputs:
        lines.append(f"| {printable(entry.role)} | {entry.ref} | {entry.content_hash} |")
    for model in manifest.models:
        name = _without_folders(model.ref)
        for part in ("weights", "tokenizer", "template"):
            if getattr(model, part):
                role = f"{printable(model.role)}, {part}"
                lines.append(f"| {role} | {printable(name)} | {getattr(model, part)} |")
    # the run key's settings: they name no host that only ran the work
    config = parse(load_stage(manifest.stage).Config, manifest.config, str(version.ref))
    settings = json.dumps(_without_folders(config.key()), indent=2, ensure_ascii=False)
    lines += ["", "## Settings", "```json", settings, "```"]
    if version.ref.kind != "policy":
        lines += ["", "## Columns", "| column | type |", "|---|---|"]
        lines += [f"| {column.name} | {column.type} |" for column in schema_of(version)]
    return "\n".join([*lines, ""])
