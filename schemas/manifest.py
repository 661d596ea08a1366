"""The manifest: what a version says of itself, as canonical JSON (sorted keys, no spaces, no NaN).

It carries its own checksum, so a flipped bit in it is found like one in the data, and the sha256,
size and row count of each file, because a flipped bit in an Arrow file reads as silently different
numbers.

Not of the spine: any manifest.json of a store shows the same fields.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .errors import CorruptError, printable

FORMAT = 1
FEATURES: frozenset[str] = frozenset()
MAX_BYTES = 64 * 1024 * 1024
_SHA = r"^[0-9a-f]{64}$"


def canonical(data: Any) -> bytes:
    """Canonical JSON as UTF-8 bytes. ValueError for NaN, infinity and lone surrogates."""
    return json.dumps(
        data, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode()


def digest(data: Any) -> str:
    """sha256 of the canonical JSON, as 64 hex digits."""
    return hashlib.sha256(canonical(data)).hexdigest()


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FileEntry(_Part):
    """One file of a version. `rows` is 0 for files that are not tables."""

    name: str = Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*$")
    bytes: int = Field(ge=0)
    sha256: str = Field(pattern=_SHA)
    rows: int = Field(ge=0, default=0)


class Input(_Part):
    """One dataset or checkpoint that this version was made of."""

    role: str
    ref: str
    content_hash: str = Field(pattern=_SHA)


class Model(_Part):
    """One model that took part, by the hash of what decides its numbers."""

    role: str
    ref: str
    weights: str = ""
    tokenizer: str = ""
    template: str = ""


class Manifest(_Part):
    """What `manifest.json` holds. `kind_schema` is written as `schema`."""

    model_config = ConfigDict(populate_by_name=True)

    format: Literal[1] = FORMAT
    required_features: tuple[str, ...] = ()
    run: str
    kind: str
    version: int = Field(ge=0)
    kind_schema: str = Field(alias="schema")
    created: str
    commit_id: str
    stage: str
    stage_version: int
    run_key: str = Field(pattern=_SHA)
    config: dict[str, Any]
    inputs: tuple[Input, ...]
    models: tuple[Model, ...]
    files: tuple[FileEntry, ...]
    rows: int = Field(ge=0)
    content_hash: str = Field(pattern=_SHA)
    environment: dict[str, Any]
    seconds: dict[str, float]
    bytes: dict[str, int]
    metrics: dict[str, Any]
    status: dict[str, int]
    """Row counts by what became of them (stop, length, not_scored, dropped, …)."""

    @property
    def ref(self) -> str:
        return f"{self.run}/{self.kind}@{self.version}"

    def model(self, role: str) -> Model | None:
        """The model with this role, or None."""
        return next((model for model in self.models if model.role == role), None)

    def input(self, role: str) -> Input | None:
        """The input with this role, or None."""
        return next((entry for entry in self.inputs if entry.role == role), None)

    def to_json(self) -> bytes:
        """Canonical JSON with the checksum of everything else under `checksum`."""
        data = self.model_dump(mode="json", by_alias=True)
        return canonical({**data, "checksum": digest(data)})


def content_hash(schema: str, files: tuple[FileEntry, ...]) -> str:
    """Hash of what a version holds: its schema and its files' names, hashes and rows; not of when
    or where it was made."""
    return digest([schema, [[entry.name, entry.sha256, entry.rows] for entry in files]])


def no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An `object_pairs_hook` for JSON that refuses an object with the same key twice.
    ValueError."""
    data = dict(pairs)
    if len(data) != len(pairs):
        raise ValueError("a key stands twice")
    return data


def no_constant(name: str) -> float:
    """A `parse_constant` for JSON that refuses NaN and Infinity. ValueError."""
    raise ValueError(f"{name} is not JSON")


def from_json(raw: bytes, name: str) -> Manifest:
    """The manifest in `raw`; CorruptError (naming `name`) when it is torn, changed, of a newer
    format, or not one at all."""

    def corrupt(problem: str, next: str = f"quiver verify {name}") -> CorruptError:
        state = "no file was changed; other versions are not touched by this."
        return CorruptError(name, problem, state=state, next=next)

    if not raw or len(raw) > MAX_BYTES:
        raise corrupt(f"manifest.json has {len(raw)} bytes, expected 1 to {MAX_BYTES}")
    try:
        data = json.loads(raw, object_pairs_hook=no_key_twice, parse_constant=no_constant)
        if not isinstance(data, dict):
            raise ValueError(f"expected an object, found {type(data).__name__}")
        checksum = data.pop("checksum", None)
        found = digest(data)
    except (ValueError, RecursionError) as error:
        raise corrupt(f"manifest.json can not be read: {printable(error)}") from None
    if checksum != found:
        raise corrupt(f"manifest.json: checksum expected {printable(checksum)}, found {found}")
    unknown = set(data.get("required_features") or ()) - FEATURES
    if data.get("format") != FORMAT or unknown:
        what = f"features {sorted(unknown)}" if unknown else f"format {data.get('format')!r}"
        newer = f"written by a newer Quiver: {what}; this one reads format {FORMAT}"
        raise corrupt(newer, next="update Quiver")
    try:
        return Manifest.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise corrupt(f"manifest.json: {where}: {printable(first['msg'])}") from None
