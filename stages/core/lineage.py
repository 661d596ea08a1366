"""Open a version's inputs, and check that they have the hash that its manifest names. Find the
prompts behind two versions, and which of them are equal."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from quiver.schemas.errors import LineageError, printable
from quiver.schemas.manifest import digest
from quiver.schemas.plain import without_nulls
from quiver.schemas.prompts import MEDIA, OURS
from quiver.schemas.refs import KINDS
from quiver.stages.core.store import Store, Version


def open_input(store: Store, version: Version, role: str) -> Version:
    """Return the version that `version` names as its input `role`.

    Raises LineageError if it names none, or if the input is missing, has other content, or has
    another kind than its role.
    """
    entry = version.manifest.require_input(role)
    source = store.open(entry.ref)
    if role in KINDS and source.ref.kind != role:
        raise LineageError(
            str(version.ref),
            f"its {role} must be a version of {role}, found {source.ref}",
            next=f"quiver lineage {version.ref}",
        )
    if source.manifest.content_hash != entry.content_hash:
        raise LineageError(
            str(source.ref),
            f"has other content than the version that {version.ref} was made of",
            next=f"quiver lineage {version.ref}",
        )
    return source


def prompt_rows(rollouts: pa.Table, prompts: pa.Table) -> pa.Array:
    """Return for each rollout the row of its prompt. Raises LineageError if a group has no
    prompt."""
    groups = rollouts.column("group_id").combine_chunks()
    order = pc.index_in(groups, value_set=prompts.column("group_id").combine_chunks())
    if order.null_count:
        unknown = groups.filter(pc.is_null(order))[0].as_py()
        raise LineageError(
            f"group {printable(unknown)}",
            "has rollouts but no prompt",
            next="generate rollouts of these prompts",
        )
    return order


def pair_prompts(
    store: Store, a: Version, b: Version
) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Return a name for each group id of the two versions: equal names mean the same prompt.

    If both come from the same prompts, or from prompts with the same bytes, a group's id is its
    name. Otherwise the name is made of the prompt's content: the chat, or the text if prompts of
    one of the two have no chat. If a version has that more than once ("Describe the image."), the
    row's own columns, pictures and clips count too. Of prompts that are still equal, those with the
    same group id in both belong together, and the others by their order.

    Raises LineageError if the prompts are gone or a version has none; and later, on looking up a
    group that the prompts do not have.
    """
    prompts_a = prompts_of(store, a)
    prompts_b = prompts_of(store, b)
    if prompts_a.manifest.content_hash == prompts_b.manifest.content_hash:
        groups = prompts_a.table(["group_id"])["group_id"].to_pylist()
        same = _Names(prompts_a, dict(zip(groups, groups, strict=True)))
        return same, same
    both = (prompts_a, prompts_b)
    tables = [prompts.table(["group_id", "messages", "prompt_text"]) for prompts in both]
    has_chats = not any(table["messages"].null_count for table in tables)
    column = "messages" if has_chats else "prompt_text"
    groups = [table["group_id"].to_pylist() for table in tables]
    contents = [
        # messages of prompts/2 have more fields
        [digest(without_nulls(cell)) for cell in table[column].to_pylist()]
        for table in tables
    ]
    repeated = {
        content for of_rows in contents for content, count in Counter(of_rows).items() if count > 1
    }
    contents = [
        _with_columns(prompts, of_rows, repeated)
        for prompts, of_rows in zip(both, contents, strict=True)
    ]
    pairs = [[*zip(*rows, strict=True)] for rows in zip(groups, contents, strict=True)]
    in_both = {*pairs[0]} & {*pairs[1]}
    names_a, names_b = (
        _Names(prompts, _named(rows, in_both)) for prompts, rows in zip(both, pairs, strict=True)
    )
    return names_a, names_b


class _Names(dict[str, str]):
    """Names of the groups of `prompts`; an unknown group raises LineageError."""

    def __init__(self, prompts: Version, names: dict[str, str]) -> None:
        super().__init__(names)
        self.prompts = prompts

    def __missing__(self, group: str) -> str:
        raise LineageError(
            str(self.prompts.ref),
            f"has no group {printable(group)}, although a version made of these prompts has it",
            next="quiver verify",
        )


def prompts_of(store: Store, version: Version) -> Version:
    """Return the prompts of a version, found through its rollouts. Raises LineageError."""
    entry = version.manifest.input("prompts")
    if entry is None:
        rollouts = version.manifest.input("rollouts")
        if rollouts is None:
            raise LineageError(
                str(version.ref), "was not made from rollouts", next="name another version"
            )
        version = store.open(rollouts.ref)
        entry = version.manifest.require_input("prompts")
    prompts = store.open(entry.ref)
    if prompts.ref.kind != "prompts":
        next = f"quiver lineage {version.ref}"
        raise LineageError(
            str(version.ref),
            f"its prompts must be a version of prompts, found {prompts.ref}",
            next=next,
        )
    return prompts


def _with_columns(prompts: Version, contents: Sequence[str], repeated: Container[str]) -> list[str]:
    """Return `contents`, one for each row of `prompts`; those that are `repeated` with a hash of
    the row's own columns, pictures and clips."""
    table = None
    longer = []
    for row, content in enumerate(contents):
        mark = content
        if content in repeated:
            table = table or prompts.table()
            cells = table.slice(row, 1).to_pylist()[0]
            columns = {name: cell for name, cell in cells["columns"].items() if name not in OURS}
            files = [
                hashlib.sha256(file["bytes"] or b"").hexdigest()
                for kind in MEDIA.values()
                for file in cells.get(kind) or ()
            ]
            mark = digest([content, repr(sorted(columns.items())), files])
        longer.append(mark)
    return longer


def _named(
    prompts: Iterable[tuple[str, str]], in_both: Container[tuple[str, str]]
) -> dict[str, str]:
    """Return a name for each group id of `prompts`, pairs of group id and content."""
    names: dict[str, str] = {}
    seen: Counter[str] = Counter()
    for group, content in prompts:
        if (group, content) in in_both:
            names[group] = f"{content} {group}"
            continue
        names[group] = f"{content}-{seen[content]}"
        seen[content] += 1
    return names
