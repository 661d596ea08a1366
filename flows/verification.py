"""Verify that a store is whole: every version, and the small files around them.

For a version, everything is checked: size and hash of each file; that Arrow files can be parsed (by
a child process: see `arrow_check`) and fit the kind's schema; that the manifest's totals follow
from its files; and that its inputs and models are unchanged. Inputs that expired or were removed on
purpose are no error.

    count, errors = verify(store)
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from quiver.schemas import refs
from quiver.schemas.errors import CorruptError, LineageError, QuiverError, SchemaError, printable
from quiver.schemas.fields import kind_of
from quiver.schemas.manifest import Manifest, content_hash
from quiver.schemas.refs import Ref
from quiver.stages.core.files import storage_errors
from quiver.stages.core.store import Store, Version, marks, schema_module
from quiver.stages.core.store.arrow_check import ArrowCheck
from quiver.stages.core.store.leases import Leases
from quiver.stages.core.store.notes import damaged_notes
from quiver.stages.core.store.retention import folders_of, unfinished, users_of
from quiver.stages.model.checkpoints import adapter_base, is_adapter_alone, model_entry


def verify(store: Store, ref: str | Ref | None = None) -> tuple[int, list[QuiverError]]:
    """Check one version, or the whole store.

    Returns:
        The number of versions checked, and all errors.
    """
    errors: list[QuiverError] = []
    checked = [store.resolve(ref)] if ref else []
    for run, kind in store.kinds(() if ref else None):
        with _collected(errors, f"{run}/{kind}"):
            checked += store.refs(run, kind)
    with ArrowCheck() as arrow_check:
        for version_ref in checked:
            with _collected(errors, version_ref):
                try:
                    _verify_version(store, version_ref, arrow_check)
                except QuiverError as error:
                    # only if the version itself is damaged, which was checked already
                    if error.next == f"quiver verify {version_ref}":
                        error.next = f"quiver verify {version_ref} --quarantine"
                        with suppress(OSError):  # a store that cannot be read is told elsewhere
                            tags, versions = users_of(store, version_ref)
                            users = [*(f"tag {name}" for name in tags), *versions]
                            error.state = (
                                "no other version is affected; tags and versions that refer to "
                                f"this one: {', '.join(users) or 'nothing'}."
                            )
                            if not (tags or versions or store.storage.list(version_ref.folder)):
                                folder = f"{store.url}/{version_ref.folder}"
                                error.next = shlex.join(["rmdir", printable(folder, 4096)])
                    raise
    if ref is None:
        _verify_around(store, errors)
    return len(checked), list({str(error): error for error in errors}.values())


def _verify_around(store: Store, errors: list[QuiverError]) -> None:
    """Check folders, tags, marks and unfinished work; problems are added to `errors`."""
    for key in folders_of(store):
        with _collected(errors, key):
            store.storage.list(key)
    for run in store.runs():
        with _collected(errors, f"{run}/tags"):
            for name in store.tag_names(run):
                with _collected(errors, f"{run} tag {name}"):
                    for entry in store.history(run, name)[-1:]:
                        try:
                            store.resolve(f"{run}/{refs.parse(entry.ref).kind}@{name}")
                        except (LineageError, CorruptError) as error:
                            raise LineageError(
                                f"{run} tag {name}",
                                f"points at {error.object}: {error.message}",
                                next="point the tag at another version",
                            ) from None
    for run, kind in store.kinds():
        with _collected(errors, f"{run}/{kind}/.work"):
            errors += damaged_notes(store.storage, run, kind)
        with _collected(errors, f"{run}/{kind}/.work"):
            for work in unfinished(store, run, kind):
                Leases(store.storage, f"{work.prefix}.leases").holders()
        with _collected(errors, f"{run}/{kind}"):
            listing = store.listing(run, kind)
            for name, numbers in listing.marks.items():
                for number in numbers:
                    with _collected(errors, f"{run}/{kind}@{number}"):
                        marks.checked(store.storage, Ref(run, kind, number), name)


@contextmanager
def _collected(errors: list[QuiverError], name: object) -> Iterator[None]:
    """Add an error about `name` to `errors`, also if it cannot be read."""
    try:
        with storage_errors(name):
            yield
    except QuiverError as error:
        errors.append(error)


def _verify_version(store: Store, ref: Ref, arrow_check: ArrowCheck) -> None:
    version = store.version(ref)
    manifest = version.manifest
    version.verify()
    listed = {*version.files.names, "manifest.json"}
    # In a bucket the files stay where they were written, beside shards of a process that died, or
    # of one that shared the work. Nobody reads those, and they go with the version.
    for name in () if manifest.place else version.files.sizes():
        if name not in listed:
            error = version.corrupt(printable(name), "is not a file of this version")
            place = f"{store.url}/{manifest.prefix}/{name}"
            error.next = shlex.join(["rm", printable(place, 4096)])
            raise error
    if manifest.content_hash != content_hash(manifest.kind_schema, manifest.files):
        raise version.corrupt("manifest.json", "content_hash does not match its files")
    if manifest.rows != sum(entry.rows for entry in manifest.files):
        raise version.corrupt(
            "manifest.json", f"says {manifest.rows} rows, its files have another number"
        )
    if ref.kind != "policy":
        for name in version.files.names:
            problem = arrow_check.problem(version.files.path(name))
            if problem:
                raise version.corrupt(name, f"cannot be parsed: {problem}")
        try:
            schema_name = kind_of(schema_module(ref.kind).check(version.table()))
        except SchemaError as error:
            raise version.corrupt(error.object, error.message) from error
        if schema_name != manifest.kind_schema:
            problem = f"says {manifest.kind_schema}, its files are {schema_name}"
            raise version.corrupt("manifest.json", problem)
    _verify_sources(store, version)


def _verify_sources(store: Store, version: Version) -> None:
    """Raise LineageError if an input, a model, or a version made together with it has changed.

    The files of sources that expired or were removed are left out.
    """
    manifest = version.manifest
    changed = []
    for entry in manifest.inputs:
        source = _manifest(store, version, refs.parse(entry.ref))
        if source.content_hash != entry.content_hash:
            changed.append(f"input {entry.ref}")
    if version.ref.kind == "policy" and is_adapter_alone(version):
        adapter_base(store, version)
    for model in manifest.models:
        try:
            ref = refs.parse(model.ref)
        except QuiverError:
            continue  # a folder or a hub's id
        if ref.kind != "policy" or ref == version.ref:
            continue
        _manifest(store, version, ref)
        if not store.exists(ref):
            continue  # it expired, so its files cannot be compared
        now = model_entry(model.role, store.version(ref))
        # a stage names only the parts it reads; a template may come from a file instead of the
        # policy
        if model.weights not in ("", now.weights) or model.tokenizer not in ("", now.tokenizer):
            changed.append(f"model {ref}")
    if changed:
        raise LineageError(
            str(version.ref),
            f"{changed[0]} has changed",
            next=f"make {version.ref.kind} again from {changed[0].partition(' ')[2]} as it is now",
        )
    if version.ref.kind == "policy":
        for kind in {"advantages", "updates"} & manifest.metrics.keys():
            _manifest(store, version, refs.parse(manifest.metrics[kind]))


def _manifest(store: Store, version: Version, ref: Ref) -> Manifest:
    """Return the manifest of a source of `version`, even if the source expired or was removed.

    Raises LineageError if it is gone or torn, or `ref` has no version number.
    """
    if not isinstance(ref.version, int):
        problem = f"is made of {ref}, which is not a reference with a version number"
        raise LineageError(str(version.ref), problem, next=f"quiver lineage {version.ref}")
    problem = "is gone"
    with storage_errors(ref):
        try:
            if store.has_manifest(ref):
                return store.version(ref).manifest
        except CorruptError as error:
            problem = f"is damaged: {error.message}"
    raise LineageError(
        str(version.ref),
        f"{'its input ' if ref.kind not in ('advantages', 'updates') else ''}{ref} {problem}",
        next=f"restore {store.url}/{ref.folder} from a copy; without it {version.ref} is "
        "complete, but its lineage is not",
    )
