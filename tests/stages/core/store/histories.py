"""Stores for tests of what stays: tables and policies made of one another, and random histories."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from quiver.schemas.errors import ConflictError, LineageError
from quiver.schemas.refs import Ref, as_version, parse
from quiver.stages.core.config import Config
from quiver.stages.core.store import Store, Version
from quiver.stages.core.store.listing import EXPIRED, NO_OPTIMIZER
from quiver.stages.core.store.retention import Rule, collect, remove
from quiver.stages.core.store.tags import previous
from quiver.stages.model.checkpoints import model_entry
from tests.stages.core.store.test_store import table
from tests.writing import begin

MODEL_FILES = {
    "config.json": b'{"vocab_size": 320, "max_position_embeddings": 64}',
    "generation_config.json": b'{"eos_token_id": 2}',
}


class Made(Config):
    """What decides a version."""

    number: int = 0


def plan(
    number: int, inputs: dict | None = None, models: dict | None = None, note: str = ""
) -> dict:
    """What `begin` takes: a version that is the only one of its number, of these parents by role."""
    return {
        "stage": "logprobs",
        "stage_version": 1,
        "config": Made(number=number),
        "inputs": inputs or {},
        "models": tuple(model_entry(role, version) for role, version in (models or {}).items()),
        "note": note,
    }


def make_table(store: Store, number: int, run: str = "a", kind: str = "logprobs", **of) -> Version:
    """A table of two rows."""
    with begin(store, run, kind, **plan(number, **of)) as work:
        if not work.done:
            work.write(0, table(10 * number))
            return work.commit()
    return work.done


def make_policy(store: Store, number: int, run: str = "a", *, state: bool = True, **of) -> Version:
    """A policy, with optimizer state below it."""
    with begin(store, run, "policy", **plan(number, **of)) as work:
        if not work.done:
            for name, content in MODEL_FILES.items():
                (work.folder / name).write_bytes(content)
            (work.folder / "model.safetensors").write_bytes(b"w%d" % number)
            if state:
                (work.folder / "optimizer").mkdir()
                (work.folder / "optimizer/state.json").write_text(json.dumps({"step": number}))
                (work.folder / "optimizer/state.safetensors").write_bytes(b"m%d" % number * 100)
            return work.commit()
    return work.done


def visible(store: Store) -> list[str]:
    return [str(ref) for ref in store.refs()]


def with_state(store: Store) -> list[str]:
    """Policies whose optimizer state did not expire."""
    return [
        str(version.ref)
        for version in store.versions(kind="policy")
        if "optimizer/state.json" in version.files.names
        and version.ref.version not in store.listing(*version.ref[:2]).marks[NO_OPTIMIZER]
    ]


def expired_files(store: Store) -> list[str]:
    """Files of versions that expired or were removed, and of optimizer states that expired."""
    kept = {ref.folder for ref in store.refs()}
    kept |= {f"{parse(ref).folder}/optimizer" for ref in with_state(store)}
    names = [path.relative_to(store.url) for path in Path(store.url).glob("*/*/v*/**/*.*")]
    names = [name for name in names if name.name != "manifest.json"]
    return [str(name) for name in names if str(name.parent) not in kept]


def identity(version: Version) -> tuple[str, str]:
    """What a number is given to, for good."""
    return version.manifest.content_hash, version.manifest.run_key


class History:
    """Random things that happen to a store, and what must hold."""

    def __init__(self, store: Store, seed: int) -> None:
        self.store = store
        self.random = random.Random(seed)
        self.content: dict[str, tuple[str, str]] = {}
        """By reference: what the number was given to."""
        self.made = 0
        self.at_work: list[tuple[ExitStack, list[Version]]] = []
        """Stages at work, and what they read."""

    def run(self, steps: int) -> None:
        things = [self.commit, self.commit, self.commit_policy, self.tag, self.gc, self.gc]
        things += [self.remove, self.begin_stage, self.end_stage, self.make_again]
        for _ in range(steps):
            self.random.choice(things)()
            self.check_numbers()
        while self.at_work:
            self.end_stage()

    def some(self, kind: str, most: int) -> list[Version]:
        refs = [ref for ref in self.store.refs() if ref.kind == kind]
        return [self.store.open(ref) for ref in self.random.sample(refs, min(most, len(refs)))]

    def parents(self) -> dict[str, dict]:
        tables = self.some("logprobs", self.random.randrange(3))
        policies = self.some("policy", self.random.randrange(2))
        return {
            "inputs": {f"table{index}": version for index, version in enumerate(tables)},
            "models": {f"policy{index}": version for index, version in enumerate(policies)},
        }

    def commit(self) -> None:
        self.made += 1
        run = self.random.choice("ab")
        make_table(self.store, self.made, run, **self.parents())

    def commit_policy(self) -> None:
        self.made += 1
        parents = self.parents()
        for role in ("policy", "base"):
            if policies := self.some("policy", self.random.randrange(2)):
                parents["inputs"][role] = policies[0]
        make_policy(self.store, self.made, self.random.choice("ab"), **parents)

    def make_again(self) -> None:
        """What was made before, of nothing: found, or made again under another number."""
        if self.made:
            make_table(self.store, self.random.randint(1, self.made), self.random.choice("ab"))

    def tag(self) -> None:
        refs = list(self.store.refs())
        if refs:
            ref = self.random.choice(refs)
            name = self.random.choice(["prod", "best"])
            self.store.tag(ref.run, f"{name}-{ref.kind}", ref)

    def remove(self) -> None:
        refs = list(self.store.refs())
        if refs:
            try:
                remove(self.store, self.random.choice(refs))
            except ConflictError:
                return

    def begin_stage(self) -> None:
        self.made += 1
        parents = self.parents()
        stack = ExitStack()
        work = plan(1000 + self.made, **parents)
        stack.enter_context(begin(self.store, "a", "logprobs", **work))
        self.at_work.append((stack, [*parents["inputs"].values(), *parents["models"].values()]))

    def end_stage(self) -> None:
        if self.at_work:
            self.at_work.pop(self.random.randrange(len(self.at_work)))[0].close()

    def gc(self) -> None:
        keep = self.random.choice([None, 1, 1, 2])
        moments = self.random.choice([None, 1, 2])
        grace = self.random.choice([0, 24 * 3600])
        must_stay = set(self.reachable(keep))
        before = set(visible(self.store))
        states = set(with_state(self.store))
        newest = self.newest("policy", moments)
        needed = {str(ref) for ref in (*newest, *self.tagged(), *self.read_now())}
        collected = collect(self.store, Rule(keep, moments, grace), apply=True)
        after = set(visible(self.store))
        assert must_stay & before == after, "what is reachable stays, and nothing else"
        gone = {str(expiring.ref) for expiring in collected.marked if expiring.mark == EXPIRED}
        assert gone == before - after
        assert set(with_state(self.store)) == states & after & needed
        self.look_again(before - after)

    def look_again(self, gone: set[str]) -> None:
        """A version that stays can be read; one that is gone says so, and answers by its manifest."""
        for version in self.store.versions():
            version.verify()
            if version.ref.kind != "policy":
                assert version.table().num_rows == 2
        seen = self.store.with_expired()
        for ref in sorted(gone):
            try:
                self.store.open(ref)
                raise AssertionError(f"{ref} is there")
            except LineageError as error:
                assert "expired" in error.message and error.next.startswith("quiver ")
            version = seen.open(ref)
            assert self.content[ref] == identity(version)
            assert seen.find(*parse(ref)[:2], version.manifest.run_key) is not None

    # -- the same, told plainly

    def newest(self, kind: str, count: int | None) -> Iterator[Ref]:
        for run in ("a", "b"):
            yield from list(self.store.refs(run, kind))[::-1][:count]

    def tagged(self) -> Iterator[Ref]:
        for run in self.store.runs():
            for name in self.store.tag_names(run):
                yield parse(self.store.tagged(run, name))
                if earlier := previous(self.store.history(run, name)):
                    yield parse(earlier)

    def read_now(self) -> list[Ref]:
        return [version.ref for _, versions in self.at_work for version in versions]

    def reachable(self, keep: int | None) -> Iterator[str]:
        roots = {*self.tagged(), *self.newest("logprobs", keep), *self.newest("policy", keep)}

        def follow(ref: Ref, *, is_read: bool) -> Iterator[str]:
            # a stage may follow what it reads through versions that keep their manifest alone
            repeat = self.repeat(ref)
            if repeat is not None and not is_read:
                yield from follow(repeat, is_read=False)
            elif not is_read and not self.store.exists(ref):
                return
            yield str(ref)
            manifest = self.store.version(ref).manifest
            for entry in manifest.inputs:
                if ref.kind != "policy" or ref in roots or entry.role == "base":
                    yield from follow(parse(entry.ref), is_read=is_read)
            for model in manifest.models:
                if ref.kind != "policy" or ref in roots:
                    yield from follow(as_version(model.ref), is_read=is_read)

        for refs, is_read in ((roots, False), (self.read_now(), True)):
            for ref in refs:
                yield from follow(ref, is_read=is_read)

    def repeat(self, ref: Ref) -> Ref | None:
        """The version that was made again when this one's data were gone, if they are."""
        others = list(self.store.refs(ref.run, ref.kind))
        made = self.content.get(str(ref)) if ref not in others else None
        return next((other for other in others if self.content[str(other)] == made), None)

    def check_numbers(self) -> None:
        for version in self.store.versions():
            assert self.content.setdefault(str(version.ref), identity(version)) == identity(version)
