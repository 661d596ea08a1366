"""The manifest: a version's description as canonical JSON (sorted keys, no spaces, no NaN).

It carries its own checksum, so a flipped bit in it is detected. It also has the sha256, size and
row count of each file, because a flipped bit in an Arrow file would silently read as other numbers.

Not of the spine: any manifest.json of a store shows the same fields.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .errors import CorruptError, LineageError, SchemaError, printable
from .plain import read_json
from .refs import KINDS, NAME, version_name

FORMAT = 3
"""Format of the store, in store.json and every manifest; no other format is read."""
MAX_BYTES = 8 * 1024 * 1024
"""Largest manifest; as Python objects it takes up to 24 times as much memory."""
_SHA = r"^[0-9a-f]{64}$"
FILE_NAME = "[A-Za-z0-9_][A-Za-z0-9._-]{0,254}"
_PLACE = r"^([0-9a-f]{64}\.[0-9]{1,6}(\.[0-9a-f]{12})?)?$"
_VERSION = rf"^{NAME.pattern}/({'|'.join(KINDS)})@[0-9]{{1,12}}$"
_Count = Annotated[int, Field(ge=0, lt=2**63)]


def canonical(data: Any) -> bytes:
    """Return canonical JSON in UTF-8. Raises ValueError for NaN, infinity, lone surrogates."""
    return json.dumps(
        data, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode()


def digest(data: Any) -> str:
    """Return the sha256 of the canonical JSON, as 64 hex digits."""
    return hashlib.sha256(canonical(data)).hexdigest()


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FileEntry(_Part):
    """One file of a version. `rows` is 0 for files that are not tables."""

    name: str = Field(pattern=rf"^{FILE_NAME}(/{FILE_NAME})*$", max_length=1000)
    bytes: _Count
    sha256: str = Field(pattern=_SHA)
    rows: _Count = 0


class Input(_Part):
    """One dataset or checkpoint that this version was made from."""

    role: str
    ref: str = Field(pattern=_VERSION)
    content_hash: str = Field(pattern=_SHA)


class ModelEntry(_Part):
    """One model that took part, identified by the hashes of everything that decides its numbers."""

    role: str
    ref: str
    weights: str = ""
    tokenizer: str = ""
    template: str = ""
    processor: str = ""
    """Hash of the image processor; empty if the model sees no pictures."""

    @property
    def hashes(self) -> list[str]:
        """Hashes of everything that decides the model's output."""
        return [self.weights, self.tokenizer, self.template, self.processor]


class Manifest(_Part):
    """The contents of `manifest.json`. `kind_schema` is written as `schema`."""

    model_config = ConfigDict(populate_by_name=True)

    format: Literal[3] = FORMAT
    run: str
    kind: str
    version: _Count
    kind_schema: str = Field(alias="schema")
    created: str
    commit_id: str
    stage: str
    stage_version: int
    run_key: str = Field(pattern=_SHA)
    config: dict[str, Any]
    inputs: tuple[Input, ...]
    models: tuple[ModelEntry, ...]
    files: tuple[FileEntry, ...]
    place: str = Field("", pattern=_PLACE)
    """Name in `.data` of the folder with the files; empty if they lie beside the manifest."""
    rows: _Count
    content_hash: str = Field(pattern=_SHA)
    environment: dict[str, Any]
    seconds: dict[str, float]
    usage: dict[str, int | float] = {}
    """What its making used: see `stages.core.store.usage`."""
    bytes: dict[str, _Count]
    metrics: dict[str, Any]
    status: dict[str, _Count]
    """Row counts by outcome (stop, length, not_scored, dropped, …)."""
    note: str = ""
    """A user's words about it; not part of the run key."""

    @property
    def ref(self) -> str:
        return f"{self.run}/{self.kind}@{self.version}"

    @property
    def prefix(self) -> str:
        """Prefix of the files in the store."""
        return f"{self.run}/{self.kind}/" + (
            f".data/{self.place}" if self.place else version_name(self.version)
        )

    def model(self, role: str) -> ModelEntry | None:
        """Return the model with this role, or None."""
        return next((model for model in self.models if model.role == role), None)

    def input(self, role: str) -> Input | None:
        """Return the input with this role, or None."""
        return next((entry for entry in self.inputs if entry.role == role), None)

    def require_model(self, role: str) -> ModelEntry:
        """Return the model with this role. Raises LineageError if there is none."""
        return self.model(role) or self._names_no(role)

    def require_input(self, role: str) -> Input:
        """Return the input with this role. Raises LineageError if there is none."""
        return self.input(role) or self._names_no(role)

    def config_section(self, name: str) -> dict[str, Any]:
        """Return a section of the config; empty if there is none.

        Raises CorruptError if the key is not a section.
        """
        section = self.config.get(name) or {}
        if isinstance(section, dict):
            return section
        problem = f"manifest.json: config.{name} is not a table"
        raise CorruptError(self.ref, problem, next=f"quiver verify {self.ref}")

    def _names_no(self, role: str) -> NoReturn:
        next = f"quiver lineage {self.ref}"
        raise LineageError(self.ref, f"its manifest names no {role}", next=next)

    def to_json(self) -> bytes:
        """Return canonical JSON, with a checksum of everything else under `checksum`.

        Raises SchemaError if it is larger than a reader accepts.
        """
        data = self.model_dump(mode="json", by_alias=True)
        raw = canonical({**data, "checksum": digest(data)})
        if len(raw) > MAX_BYTES:
            problem = f"its manifest has {len(raw)} bytes, at most {MAX_BYTES} are read"
            raise SchemaError(self.ref, problem, next="shorten what the recipe puts into it")
        return raw


def content_hash(schema: str, files: tuple[FileEntry, ...]) -> str:
    """Hash a version's content: its schema and its files' names, hashes and rows.

    Time and place of making do not enter.
    """
    return digest([schema, [[entry.name, entry.sha256, entry.rows] for entry in files]])


def line_of(newest: Manifest, open: Callable[[str], Manifest | None]) -> Iterator[Manifest]:
    """Yield the policy `newest` and its ancestors, newest first, until `open` returns None.

    Raises LineageError if they form a circle.
    """
    seen: set[str] = set()
    manifest: Manifest | None = newest
    while manifest is not None:
        if manifest.ref in seen:
            problem = f"is trained from {manifest.ref}, which is said to be trained from itself"
            raise LineageError(newest.ref, problem, next=f"quiver lineage {newest.ref}")
        seen.add(manifest.ref)
        yield manifest
        parent = manifest.input("policy")
        manifest = open(parent.ref) if parent else None


def from_json(raw: bytes, name: str) -> Manifest:
    """Parse a manifest.

    Raises:
        CorruptError: about `name`; it is torn, changed, of another format, or no manifest.
    """

    def corrupt(problem: str, next: str = f"quiver verify {name}") -> CorruptError:
        state = "no file was changed; other versions are not affected."
        return CorruptError(name, problem, state=state, next=next)

    if not raw or len(raw) > MAX_BYTES:
        raise corrupt(f"manifest.json has {len(raw)} bytes, expected 1 to {MAX_BYTES}")
    try:
        data = read_json(raw)
        if not isinstance(data, dict):
            raise ValueError(f"expected an object, found {type(data).__name__}")
        checksum = data.pop("checksum", None)
        found = digest(data)
    except ValueError as error:
        raise corrupt(f"manifest.json cannot be read: {printable(error)}") from None
    if checksum != found:
        raise corrupt(f"manifest.json: checksum expected {printable(checksum)}, found {found}")
    if data.get("format") != FORMAT:
        problem = f"has format {printable(data.get('format'))}, expected {FORMAT}"
        raise corrupt(f"manifest.json {problem}", next="read it with the Quiver that wrote it")
    try:
        return Manifest.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise corrupt(f"manifest.json: {where}: {printable(first['msg'])}") from None
