"""The plan of a call: the versions to make, what they are made of, and their run key."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from quiver.schemas.errors import ConflictError, CorruptError
from quiver.schemas.manifest import Input, ModelEntry, digest
from quiver.schemas.refs import Ref
from quiver.stages.core.config import Config

from .listing import Listing
from .versions import Store, Version


@dataclass(frozen=True)
class Plan:
    """The result of planning a call: the versions to make, their inputs, and their run key."""

    store: Store
    stage: str
    stage_version: int
    config: Config
    """The config with all defaults filled in, as the manifest records it."""
    run: str
    """Run to write into."""
    kinds: tuple[str, ...]
    """Kinds that it makes, published in this order; the call returns the last one."""
    inputs: Mapping[str, Version] = field(default_factory=dict)
    """Versions that it reads, by role, in the manifest's order."""
    models: tuple[ModelEntry, ...] = ()
    """Models that take part, identified by their hashes."""
    first_number: int = 1
    """Number of the version if its run has none of the last kind yet; optimize from policy@4: 5."""
    only_number: int | None = None
    """The only number that the version may have, unless it is forced; import of a base: 0. None:
    the next free one."""
    if_number_taken: str = ""
    """Error message if another version has that number."""
    already_made: Version | None = None
    """A version that answers the call without any work, even with another run key (reward: a retry
    with no row left to score)."""
    patience_seconds: float | None = None
    """Seconds that an idle process waits for another's shard, if the work is shared."""
    note: str = ""
    """The user's words for the manifests; not part of the run key."""

    @cached_property
    def run_key(self) -> str:
        """Hash of everything that decides the result: the stage and its version, the config, and
        the content of inputs and models.

        `config.key()` leaves out the fields that are annotated `Runtime[…]`: those change speed,
        memory or place, and not the result. A content hash covers the schema, and each file's name,
        hash and rows.
        """
        hashes = {role: version.manifest.content_hash for role, version in self.inputs.items()}
        models = {model.role: model.hashes for model in self.models}
        return digest(
            {
                "stage": [self.stage, self.stage_version],
                "config": self.config.key(),
                "inputs": hashes,
                "models": models,
            }
        )

    @cached_property
    def listing(self) -> Listing:
        """The versions of the last kind when the call began.

        `numbers` are all of them, marked ones too, and `find` gives those with a run key.
        `given` also has numbers with only a mark left. No number in it is given again.
        """
        return self.store.listing(self.run, self.kinds[-1])

    @cached_property
    def repetition(self) -> int:
        """Number of versions that this work had before, or a higher one: repeated work never
        touches the data of an earlier version. Processes that share or resume the work have the
        same."""
        return self.repetition_at(self.kinds[-1], self.listing)

    def repetition_at(self, kind: str, listing: Listing) -> int:
        """Return a number whose folders no version of this kind uses.

        It is the number of versions with this run key. If a user deleted a version's folder by
        hand, that is too small, and in a bucket a later version may name those files; so it is
        also above the repetition that each manifest's `place` names (its folder in `.data`,
        `KEY.REPETITION` or `KEY.REPETITION.WORKER`; empty on a disk).
        """
        numbers = listing.find(self.run_key)
        repetitions = [len(numbers)]
        for number in numbers:
            version = Version(Ref(self.run, kind, number), self.store.storage)
            with suppress(CorruptError):
                if place := version.manifest.place:
                    repetitions.append(int(place.split(".")[1]) + 1)
        return max(repetitions)

    def require_number(self, listing: Listing) -> None:
        """Raise ConflictError if other work has the only number that the version may have."""
        number = self.only_number
        if number in listing.numbers and number not in listing.find(self.run_key):
            raise ConflictError(
                f"{self.name}@{number}",
                self.if_number_taken,
                next="choose another name for the run",
            )

    @property
    def work(self) -> str:
        """Prefix of the unfinished work of the last kind; `.notes`, `.leases` and `.resume` follow
        it."""
        return f"{self.name}/.work/{self.run_key}.{self.repetition}"

    @property
    def name(self) -> str:
        """Name of the work in error messages."""
        return f"{self.run}/{self.kinds[-1]}"

    def manifest_fields(self) -> dict[str, Any]:
        """Return the provenance fields for the manifest of each of its versions."""
        return {
            "stage": self.stage,
            "stage_version": self.stage_version,
            "run_key": self.run_key,
            "config": self.config.model_dump(mode="json"),
            "inputs": tuple(
                Input(role=role, ref=str(version.ref), content_hash=version.manifest.content_hash)
                for role, version in self.inputs.items()
            ),
            "models": self.models,
            "note": self.note,
        }
