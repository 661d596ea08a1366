"""Trace a version back to its sources, and forward to what was made of it. Look here for
`quiver lineage`.

    lineage(store, "arith/policy@4")                 # its parents, their parents, and so on
    lineage(store, "arith/policy@4", depth=3)        # three levels; a line of policies is folded
    descent(store, "arith/rollouts@2", depth=3)      # its children, their children, and so on

What was made of a version is known by the indexes beside the versions (`Index`), so no manifest is
opened for it.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache, cached_property, partial
from itertools import product
from typing import Any

import pyarrow.compute as pc

from quiver.schemas.errors import CorruptError, LineageError, printable
from quiver.schemas.manifest import Manifest
from quiver.schemas.refs import KINDS, Ref, as_version, parse
from quiver.stages.core.store import Store
from quiver.stages.core.store.listing import Summary
from quiver.stages.core.store.readable import open_kept
from quiver.stages.core.threads import map_in_threads

from .joined import prompt_fields

SHORTEST_FOLD = 3
"""Least policies, or least versions made alike of one version, that are folded into one node."""
_IDS = ("group_id", "rollout_id")
BESIDE_A_POLICY = ("advantages", "updates")
"""Kinds that optimize writes beside a policy; descent names the policy alone."""


def sources_of(manifest: Manifest) -> dict[str, str]:
    """Return the references of models and inputs, each with its role. A reward model named by a hub
    id or a folder is no version of a store."""
    entries = (*manifest.models, *manifest.inputs)
    return {entry.ref: entry.role for entry in entries if entry.ref != manifest.ref}


def parents_of(manifest: Manifest) -> dict[str, str]:
    """Return the versions of a store that this one was made from, each with its role."""
    return {ref: role for ref, role in sources_of(manifest).items() if as_version(ref)}


def origin_of(manifest: Manifest) -> dict[str, Any]:
    """Return a version as a row of a table: the version, its stage, what it was made of, its rows
    and its content."""
    made_of = []
    for ref, role in parents_of(manifest).items():
        name = ref.removeprefix(f"{manifest.run}/")
        made_of.append(name if f"{role}@" in name else f"{name} ({role})")
    return {
        "version": manifest.ref,
        "stage": manifest.stage,
        "made of": ", ".join(made_of),
        "rows": manifest.rows or None,
        "content": manifest.content_hash[:12],
        "note": manifest.note,
    }


class Index:
    """Summaries of a store's readable versions by reference, gone ones too, each folder's read at
    its first use."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._folders: dict[tuple[str, str], dict[str, Summary]] = {}

    def folder(self, run: str, kind: str) -> dict[str, Summary]:
        """Return the summaries of one kind in one run, by reference."""
        if (run, kind) not in self._folders:
            summaries = self._store.listing(run, kind).summaries()
            self._folders[run, kind] = {
                str(Ref(run, kind, one.number)): one for one in summaries if not one.error
            }
        return self._folders[run, kind]

    def get(self, ref: str) -> Summary | None:
        """Return the summary of a version, or None."""
        version = as_version(ref)
        return self.folder(version.run, version.kind).get(str(version)) if version else None

    @cached_property
    def users(self) -> dict[str, list[str]]:
        """References of what was made of each version, by kind, in the order of making."""
        users: dict[str, list[str]] = defaultdict(list)
        kinds = [kind for kind in KINDS if kind not in BESIDE_A_POLICY]
        for kind, run in product(kinds, self._store.runs()):
            entries = self.folder(run, kind).items()
            for ref, summary in sorted(entries, key=lambda entry: entry[1].created):
                for source in summary.sources:
                    users[source].append(ref)
        return users

    def trained_from(self, ref: str) -> str | None:
        """Return the policy that a policy was trained from, or None."""
        summary = self.get(ref) if "/policy@" in ref else None
        return summary.trained_from if summary else None

    def trained_on(self, ref: str) -> list[str]:
        """Return the policies that were trained from a policy."""
        return [user for user in self.users[ref] if self.trained_from(user) == ref]

    def next_policy(self, ref: str) -> str | None:
        """Return the only policy that was trained from a policy; None if there are several."""
        policies = self.trained_on(ref)
        return policies[0] if len(policies) == 1 else None

    def chain(self, ref: str, step: Callable[[str], str | None]) -> list[str]:
        """Return the policies from `ref` on, by `step`, that were made alike: by the same stage of
        inputs with the same roles."""
        shapes: dict[str, Any] = {}
        following: str | None = ref
        while following is not None and following not in shapes:
            summary = self.get(following)
            shape = summary and (summary.stage, sorted(summary.sources.values()))
            if shape is None or shape != next(iter(shapes.values()), shape):
                break
            shapes[following] = shape
            following = step(following)
        return list(shapes)


def lineage(store: Store, ref: str, depth: int | None = None) -> dict[str, Any]:
    """Return `ref` and everything it was made from, down to the sources: {"ref", "stage", "inputs":
    [{"role", "ref", …}]}.

    A version that occurs again is marked `seen`, and named without its inputs. Other marks:

        expired, removed    when and why; only its manifest is kept
        missing             there is no such version
        replaced            another version has its number now, with other content
        error               its manifest is torn
        more                it has inputs, which lie below `depth`

    With a depth, policies that were trained one from another in the same way are one node: `ref` is
    the nearest of them, `to` the furthest, whose inputs it has, and `count` how many they are.
    Their manifests are not opened. Without one, the tree is as deep as the line of policies is
    long.

    Raises LineageError or CorruptError about `ref` itself.
    """
    index = Index(store)
    root: dict[str, Any] = {"ref": ref}

    def expand(node: dict[str, Any]) -> list[dict[str, Any]]:
        content_hash = node.pop("content_hash", None)
        try:
            version, gone = open_kept(store, node.get("to", node["ref"]))
        except (LookupError, CorruptError) as error:
            if node is root:
                raise
            is_torn = isinstance(error, CorruptError)
            node |= {"error": str(error).partition("\n")[0]} if is_torn else {"missing": True}
            return []
        manifest = version.manifest
        node["stage"] = manifest.stage
        if "to" not in node:
            node |= {"ref": manifest.ref, **gone}
        if content_hash not in (None, manifest.content_hash):
            node["replaced"] = True
            return []
        hashes = {entry.ref: {"content_hash": entry.content_hash} for entry in manifest.inputs}
        children = []
        for source, role in sources_of(manifest).items():
            child = {"role": role, "ref": source, "inputs": []}
            chain = []
            if depth is not None and manifest.kind == role == "policy":
                chain = index.chain(source, index.trained_from)
            children.append(child | (_folded(chain, "iterations") or hashes.get(source, {})))
        return children

    return _walk(root, "inputs", depth, expand)


def descent(store: Store, ref: str, depth: int | None = None) -> dict[str, Any]:
    """Return `ref` and everything that was made from it: {"ref", "stage", "outputs": [{"role",
    "ref", …}]}. The role is that of the version above in what was made of it.

    Marks are `seen` and `more`, as in `lineage`. With a depth, two things are one node with `ref`,
    `to`, `count` and `folded`: "iterations", policies trained one from another in the same way,
    with what was made of the last one; and "versions" of one kind made by one stage of the same
    version, without what was made of them.
    """
    index = Index(store)
    version, gone = open_kept(store, ref)
    root: dict[str, Any] = {"ref": str(version.ref), "stage": version.manifest.stage, **gone}

    def expand(node: dict[str, Any]) -> list[dict[str, Any]]:
        source = node.get("to", node["ref"])
        if node.get("folded") == "versions":  # nothing was made of all of them
            return []
        policies = index.trained_on(source)
        alike: dict[Any, list[str]] = defaultdict(list)
        for user in index.users[source]:
            key = (user.partition("@")[0], index.get(user).stage, index.get(user).sources[source])
            alike[key if user not in policies and depth is not None else user].append(user)
        children = []
        for users in alike.values():
            fold = _folded(users, "versions")
            for user in users[:1] if fold else users:
                summary = index.get(user)
                if user in policies and depth is not None:
                    fold = _folded(index.chain(user, index.next_policy), "iterations")
                about = {"role": summary.sources[source], "stage": summary.stage}
                children.append({**about, "ref": user, "outputs": [], **fold})
        return children

    return _walk(root, "outputs", depth, expand)


def _folded(refs: list[str], noun: str) -> dict[str, Any]:
    """Return the fields of a node that stands for all of `refs`; none if they are few. `noun`:
    "iterations" of a line of policies, or "versions" made alike of one version."""
    if len(refs) < SHORTEST_FOLD:
        return {}
    return {"ref": refs[0], "to": refs[-1], "count": len(refs), "folded": noun}


def _walk(
    root: dict[str, Any],
    key: str,
    depth: int | None,
    expand: Callable[[dict[str, Any]], list[dict[str, Any]]],
) -> dict[str, Any]:
    """Fill `key` of each node with its children by `expand`, each version's once; returns the
    root. Depth first: the first child is followed by everything below it."""
    seen: set[str] = set()
    waiting = [(root, 0)]
    while waiting:
        node, level = waiting.pop()
        children = expand(node)
        node[key] = []
        if "to" not in node and node["ref"] in seen:
            node["seen"] = True
        elif children and level == depth:
            node["more"] = True
        else:
            seen |= {node["ref"], node.get("to", node["ref"])}
            node[key] = children
            walked = [child for child in children if as_version(child["ref"])]
            waiting += [(child, level + 1) for child in reversed(walked)]
    return root


# -- one row


def trace_row(store: Store, row: str, most: int | None = None) -> dict[str, Any]:
    """Return where a rollout, or all rollouts of a group, went.

    Args:
        row: Rollout id or group id.
        most: Newest rollouts versions to look into. None: all.

    Returns:
        row: the id
        num_asked: how many rollouts versions have it. For a group, of those beyond `most` only the
            prompts are known to have it
        asked: by rollouts version, newest last, its `prompts`; the `prompt` that the id stands for
            there, None if it is gone; and the `policies` that learned from that version, each with
            `kept`, the number of these rollouts that it was trained on, and `dropped`, counts by
            reason. Both are None if the advantages are gone
        line: the last policies that were trained from these

    The same group id may stand for another prompt elsewhere: by default it is a row's number in its
    source. Then each of `asked` also has a `row_of`, equal for what is the same row, and a `line`
    of its own.

    Raises LineageError if no rollouts have it.
    """
    index = Index(store)
    asked = _asked_in(store, index, row)
    shown: list[str] = []
    for ref in reversed(asked):
        if len(shown) == most:
            break
        # expired rollouts are taken to have what their prompts have
        if any(_has_row(store, ref, column, row) is not False for column in _IDS):
            shown.insert(0, ref)
        else:
            asked = [each for each in asked if each != ref]
    if not asked:
        raise LineageError(
            f"row {printable(row)}",
            "no rollouts or prompts whose data are here have this rollout id or group id",
            next="quiver ls",
        )
    answer = {"row": row, "num_asked": len(asked), "asked": []}
    asked_by = cache(partial(_asked_by, store))
    contents = {}
    for ref in asked:
        summary = index.get(ref)
        # a rollout's id holds its group's
        group = row.removeprefix(f"{summary.run_key[:8]}-")
        group = row if group == row else group.rpartition("-")[0]
        contents[ref] = asked_by(summary.source("prompts"), group)
    for ref in shown:
        summary = index.get(ref)
        prompts = summary.source("prompts")
        prefix = f"{summary.run_key[:8]}-"
        is_one = row.startswith(prefix)
        pattern = re.escape(row) if is_one else f"{re.escape(prefix + row)}-[0-9]+"
        trained = [
            {"policy": user, **_use_of(store, user, f"^{pattern}$")}
            for user in index.users[ref]
            if "/policy@" in user
        ]
        asks = contents[ref].get("prompt")
        answer["asked"].append(
            {"rollouts": ref, "prompts": prompts, "prompt": asks, "policies": trained}
        )
    answer["line"] = _last_trained(index, asked)
    alike: dict[str, list[str]] = defaultdict(list)
    for ref in asked:
        alike[repr(contents[ref])].append(ref)
    for row_of, refs in enumerate(alike.values() if len(alike) > 1 else ()):
        line = _last_trained(index, refs)
        for one in answer["asked"]:
            if one["rollouts"] in refs:
                one.update(row_of=row_of, line=line)
    return answer


def _asked_by(store: Store, prompts: str | None, group: str) -> dict[str, Any]:
    """Return what `prompt_fields` returns of a group in `prompts`; {} if it is not there."""
    if prompts is None:
        return {}
    with suppress(LineageError, CorruptError):
        table = store.version(parse(prompts)).table()
        for row in table.filter(pc.equal(table["group_id"], group)).to_pylist():
            return prompt_fields(row)
    return {}


def _last_trained(index: Index, rollouts: Iterable[str]) -> list[str]:
    """Return the last policies that were trained from those that learned from `rollouts`."""
    policies = {user for ref in rollouts for user in index.users[ref] if "/policy@" in user}
    waiting = sorted(policies, key=lambda ref: (parse(ref).run, parse(ref).version))
    for policy in waiting:  # grows while it is walked
        further = [user for user in index.trained_on(policy) if user not in policies]
        policies.update(further)
        waiting += further
    return [policy for policy in waiting if not index.trained_on(policy)]


def _asked_in(store: Store, index: Index, row: str) -> list[str]:
    """Return the rollouts that have a rollout id or a group id, in the order of making. A rollout
    id begins with the first 8 digits of its version's run key. A group is looked for in all
    prompts, so rollouts that left it out are returned too; parts drawn from rollouts are not."""

    def folders(kind: str) -> dict[str, Summary]:
        return {ref: one for run in store.runs() for ref, one in index.folder(run, kind).items()}

    rollouts = folders("rollouts")
    same_key = [ref for ref, one in rollouts.items() if row.startswith(f"{one.run_key[:8]}-")]
    asked = [ref for ref in same_key if _has_row(store, ref, "rollout_id", row)]
    if not asked:
        prompts = list(folders("prompts"))
        having = map_in_threads(lambda ref: _has_row(store, ref, "group_id", row), prompts)
        sources = {ref for ref, has in zip(prompts, having, strict=True) if has}
        asked = [
            ref
            for ref, one in rollouts.items()
            if one.stage != "subset" and not sources.isdisjoint(one.sources)
        ]
    return sorted(asked, key=lambda ref: rollouts[ref].created)


def _has_row(store: Store, ref: str, column: str, row: str) -> bool | None:
    """Return whether a version has this id; None if its rows are gone or damaged."""
    try:
        ids = store.version(parse(ref)).table([column])[column]
    except (LineageError, CorruptError):
        return None
    return pc.any(pc.equal(ids, row)).as_py()


def _use_of(store: Store, policy: str, pattern: str) -> dict[str, Any]:
    """Return how many rollouts with these ids a policy was trained on, and why others were
    dropped."""
    try:
        advantages = store.version(parse(policy)).manifest.metrics["advantages"]
        table = store.version(parse(advantages)).table(["rollout_id", "kept", "drop_reason"])
    except (KeyError, LineageError, CorruptError):
        return {"kept": None, "dropped": None}
    table = table.filter(pc.match_substring_regex(table["rollout_id"], pattern))
    return {
        "kept": table["kept"].to_pylist().count(True),
        "dropped": dict(Counter(table["drop_reason"].drop_null().to_pylist())),
    }
