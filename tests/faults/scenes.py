"""What is done to a store while faults happen, and what must hold of the store after each.

A scene is done step by step. Done again, it does only what is missing. The invariants are those of
the house: what was acknowledged is there byte for byte, nothing visible is torn, no number means
two things, no edge leads to what is missing and not expired, and the next run succeeds.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import torch
from safetensors.torch import save_file

from quiver.flows import verification
from quiver.schemas import advantages, logprobs, refs, updates
from quiver.schemas.errors import BusyError, QuiverError
from quiver.stages.core.run.stage import Plan
from quiver.stages.core.store import Store, Version, leases
from quiver.stages.core.store.arrow_check import ArrowCheck
from quiver.stages.core.store.listing import EXPIRED, REMOVED
from quiver.stages.core.store.notes import PROGRESS
from quiver.stages.core.store.retention import Rule, collect, remove
from quiver.stages.core.store.writer import open_staging
from quiver.stages.optimize.optimizer import write_tensors
from quiver.stages.optimize.resume import SavedProgress
from tests.faults.failing import failing
from tests.stages.core.store.test_store import Settings, work_on

Acknowledged = tuple[str, str]
"""What a step said when it was done: made, tagged or gone, and the reference."""


@dataclass(frozen=True)
class Scene:
    """`before` is there when it begins; `steps` say what is acknowledged."""

    steps: Callable[[Path, int], Iterator[Acknowledged]]
    before: Callable[[Path, int], None] = lambda path, seed: None
    keeps_shards: bool = True
    """Whether finished shards are taken up again."""
    leaving: frozenset[str] = frozenset()
    """Versions that are deleted."""
    moves_to: str | None = None
    """What the tag is moved to."""


# -- scenes


def shard(seed: int, index: int, process: int = 0) -> pa.Table:
    """Two rows with ids of their own. Each process that makes them comes to other numbers."""
    ids = [f"r{1000 * seed + 2 * index + row}" for row in range(2)]
    rows = {"rollout_id": ids, "logprobs": [[-1.0 - process, -2.0]] * 2}
    return pa.table(rows, schema=logprobs.SCHEMA)


def written(
    path: Path, seed: int, shards: int, *, share=None, inputs=(), process: int = 0
) -> Version:
    """A version of `shards` shards."""
    store = Store(path)
    named = {f"input-{number}": store.open(ref) for number, ref in enumerate(inputs)}
    with work_on(store, Settings(seed=seed), share=share, inputs=named) as work:
        if work.done:
            return work.done
        work.rows_per_shard(2)
        for index in work.take_shards(shards):
            work.write(index, shard(seed, index, process))
        work.commit()
    return work.done


def earlier(path: Path, seed: int) -> None:
    """A store with none, one or two versions, the second made of the first."""
    Store(path)
    for number in range(seed % 3):
        written(path, 100 + number, 1, inputs=["a/logprobs@1"] if number else [])


def one_version(path: Path, seed: int, share=None) -> Iterator[Acknowledged]:
    yield "made", str(written(path, seed, 1 + seed % 4, share=share).ref)


def shared_version(path: Path, seed: int) -> Iterator[Acknowledged]:
    yield from one_version(path, seed, share=True)


def slow_version(path: Path, seed: int) -> Iterator[Acknowledged]:
    """As `one_version`, by a process that says a thousand times a second that it is there."""
    with (
        patch.object(leases, "SECONDS_BETWEEN_RENEWALS", 0.001),
        patch.object(leases, "_thread", None),  # the one that is there sleeps for longer
    ):
        lease = leases.Leases(Store(path).storage, "a/logprobs/.work/other.leases").take("work")
        time.sleep(0.02)
        yield from one_version(path, seed)
        lease.release()


def left_by_the_dead(path: Path, seed: int) -> None:
    """A shard of a version, and leases of two processes that are no more."""
    earlier(path, seed)
    killed(lambda: one_version(path, seed), "shard.noted")
    killed(lambda: one_version(path, seed, share=True), "lease.taken@2")


def three_kinds(
    path: Path, seed: int, process: int = 0, *, starts_over: bool = False
) -> Iterator[Acknowledged]:
    """Advantages, updates and a policy with its optimizer's state, after three saved steps.
    `starts_over`: what was saved may be damaged, and then no step is behind it."""
    kinds = ("advantages", "updates", "policy")
    store = Store(path)
    plan = Plan(store, "optimize", 1, Settings(seed=seed), "a", kinds)
    with open_staging(plan) as staging:
        if staging.committed is None:
            _train(plan, seed, starts_over)
            _write_checkpoint(staging.writers, seed, process)
            staging.publish()
    for kind in kinds:
        yield "made", str(store.find("a", kind, plan.run_key).ref)


def _train(plan: Plan, seed: int, starts_over: bool) -> None:
    """Three steps, each saved. A training that was killed goes on after the last saved one."""

    def state_of(step: int) -> dict[str, torch.Tensor]:
        return {"weight": torch.full((64,), float(seed * 10 + step))}

    def load_state(tensors: dict[str, torch.Tensor], counters: dict[str, Any]) -> None:
        trainer.step = counters["step"]
        trainer.updates = counters["updates"]
        assert torch.equal(tensors["weight"], state_of(trainer.step)["weight"])

    def state(room: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        counters = {
            "step": trainer.step,
            "updates": trainer.updates,
            "audit_report": {},
            "padding": 0,
            "places": 0,
            "entropy_coef": 0.0,
            "last_entropy": None,
            "kl_coef": 0.0,
        }
        return state_of(trainer.step), counters

    trainer = SimpleNamespace(
        config=SimpleNamespace(resume_steps=1, resume_minutes=0, epochs=1, minibatches=3),
        step=0,
        updates=[],
        state=state,
        load_state=load_state,
        check_state=lambda tensors: None,
        agree=lambda is_time: is_time,
    )
    progress = SavedProgress(plan, pa.array([]), saves=True)
    saved = plan.store.storage.local(f"{plan.work}.resume/{PROGRESS}").exists()
    _, begin, _ = progress.load(trainer)
    assert bool(begin) == saved or starts_over, "a saved step is done again"
    for step in range(begin, 3):
        trainer.step = step + 1
        trainer.updates.append(_update(step))
        progress.step_done(trainer, 0, step + 1, 0)


def _update(step: int) -> dict[str, Any]:
    return {field.name: 0 for field in updates.SCHEMA} | {"applied": True, "step": step}


def _write_checkpoint(writers, seed: int, process: int) -> None:
    row = {"rollout_id": f"r{seed}", "advantage": float(process), "kept": True}
    for kind, schema, rows in (
        ("advantages", advantages.SCHEMA, [row]),
        ("updates", updates.SCHEMA, [_update(seed)]),
    ):
        for index in writers[kind].take_shards(1):
            writers[kind].write(index, pa.Table.from_pylist(rows, schema=schema))
        writers[kind].finish()
    weights = {"weight": torch.full((64,), float(seed + 100 * process))}
    writer = writers["policy"]
    save_file(weights, writer.folder / "model.safetensors")
    writer.file_done(writer.folder / "model.safetensors")
    write_tensors(writer.folder / "optimizer", weights, done=writer.file_done)
    writer.finish()


def tagged(path: Path, seed: int) -> None:
    """Two versions, and a tag that has moved from none of them to the first, or moved before."""
    for number in range(2):
        written(path, 100 + number, 1)
    store = Store(path)
    for ref in (["a/logprobs@2"] if seed % 2 else []) + ["a/logprobs@1"]:
        store.tag("a", "prod", ref)


def tag_move(path: Path, seed: int) -> Iterator[Acknowledged]:
    Store(path).tag("a", "prod", "a/logprobs@2", expected="a/logprobs@1", key="night")
    yield "tagged", "a/logprobs@2"


def removal(path: Path, seed: int) -> Iterator[Acknowledged]:
    """The first of two or three versions is deleted, then another is made."""
    store = Store(path)
    if store.exists(refs.Ref("a", "logprobs", 1)):
        remove(store, "a/logprobs@1", why="too old")
    yield "gone", "a/logprobs@1"
    yield from one_version(path, seed)


def two_or_three(path: Path, seed: int) -> None:
    earlier(path, 2)
    if seed % 2:
        written(path, 102, 1, inputs=["a/logprobs@1"])


def cleaning(path: Path, seed: int) -> Iterator[Acknowledged]:
    """A version is made; then all others of its kind, and a policy's optimizer state, expire, and
    their data are deleted."""
    yield from one_version(path, seed)
    # without room for all marks, the rest is left to the next collection
    while collect(Store(path), Rule(keep=1, moments=0, grace_seconds=0), apply=True).deleted:
        pass
    for number in (1, 2, 3):
        yield "gone", f"a/logprobs@{number}"
    # a power loss may bring back the folder's name, without its files
    assert not any((path / "a/policy/v000001/optimizer").rglob("*"))


def three_and_a_policy(path: Path, seed: int) -> None:
    """Of even seeds, the first two versions are marked already."""
    earlier(path, 2)
    written(path, 102, 1)
    list(three_kinds(path, 100))
    if seed % 2 == 0:
        collect(Store(path), Rule(keep=1), apply=True)


def new_store(path: Path, seed: int) -> Iterator[Acknowledged]:
    Store(path)
    yield from one_version(path, seed)


SCENES = {
    "new store": Scene(new_store),
    "alone": Scene(one_version, earlier),
    "shared": Scene(shared_version, earlier),
    "renewed": Scene(slow_version, earlier),
    "taken over": Scene(one_version, left_by_the_dead),
    "checkpoint": Scene(three_kinds, earlier, keeps_shards=False),
    "tag": Scene(tag_move, tagged, moves_to="a/logprobs@2"),
    "rm": Scene(removal, two_or_three, leaving=frozenset({"a/logprobs@1"})),
    "gc": Scene(
        cleaning,
        three_and_a_policy,
        leaving=frozenset(f"a/logprobs@{number}" for number in (1, 2, 3)),
    ),
}


# -- what must hold


@dataclass
class Known:
    """What was acknowledged of a store."""

    manifests: dict[str, bytes] = field(default_factory=dict)
    """Of each version that is there."""
    contents: dict[str, str] = field(default_factory=dict)
    """The content hash that each number was seen with, for good."""
    leaving: frozenset[str] = frozenset()
    """Versions that may be gone by now, or are being deleted."""
    tags: set[str | None] = field(default_factory=set)
    """What the tag may point at."""

    @classmethod
    def of(cls, path: Path, scene: Scene | None = None) -> Known:
        """What is there now, before a scene."""
        known = cls(leaving=scene.leaving if scene else frozenset())
        if path.exists():
            store = Store(path)
            for ref in store.refs():
                known.acknowledge("made", str(ref), store)
            known.tags = {store.tagged("a", "prod")}
            if scene and scene.moves_to:
                known.tags.add(scene.moves_to)
        return known

    def acknowledge(self, what: str, ref: str, store: Store) -> None:
        """A step has said that this is done."""
        if what == "tagged":
            self.tags = {ref}
        elif what == "gone":
            assert not store.exists(refs.parse(ref)), f"{ref} is still there"
        else:
            path = Path(store.url) / refs.parse(ref).folder / "manifest.json"
            self.manifests[ref] = path.read_bytes()
            self.contents.setdefault(ref, store.open(ref).manifest.content_hash)


def is_marked(store: Store, ref: refs.Ref) -> bool:
    """Whether a mark says that it expired, or was removed on purpose."""
    marks = store.listing(ref.run, ref.kind).marks
    return ref.version in marks[EXPIRED] | marks[REMOVED]


def every_version(store: Store) -> Iterator[Version]:
    """Also the marked ones: their manifests stay."""
    for run, kind in product(store.runs(), refs.KINDS):
        for number in store.listing(run, kind).numbers:
            yield store.version(refs.Ref(run, kind, number))


_arrow_check = ArrowCheck()


def verified(store: Store) -> tuple[int, list[QuiverError]]:
    """As `verify`, whose child process serves all calls."""
    with patch.object(verification, "ArrowCheck", lambda: nullcontext(_arrow_check)):
        return verification.verify(store)


def require_invariants(path: Path, known: Known, acknowledged: list[Acknowledged]) -> None:
    """I1 to I5, and that `verify` finds nothing."""
    store = Store(path)
    for step in acknowledged:
        known.acknowledge(*step, store)
    _, errors = verified(store)
    told = [str(error) for error in errors if " unfinished " not in error.object]
    assert told == [], told
    manifests = {str(version.ref): version.manifest for version in every_version(store)}
    for ref, raw in known.manifests.items():
        parsed = refs.parse(ref)
        assert (path / parsed.folder / "manifest.json").read_bytes() == raw, ref
        is_there = store.exists(parsed)
        assert is_there or (ref in known.leaving and is_marked(store, parsed)), f"{ref} is gone"
    for ref, manifest in manifests.items():
        now = manifest.content_hash
        assert known.contents.setdefault(ref, now) == now, f"{ref} was given twice"
        assert {entry.ref for entry in manifest.inputs} <= manifests.keys(), f"{ref}: of what?"
    if known.tags:
        assert store.tagged("a", "prod") in known.tags


def noted_shards(path: Path) -> set[str]:
    """Names of the unfinished work's shards that count."""
    names = set()
    for note in path.glob("a/*/.work/*.notes/part-*.json"):
        with suppress(ValueError):  # torn
            names.add(json.loads(note.read_bytes())["name"])
    return names


def shards_in(folder: Path) -> dict[str, int]:
    """The inode of each shard below a folder, by its name."""
    return {file.name: file.stat().st_ino for file in folder.rglob("part-*.arrow")}


def require_next_run(path: Path, scene: Scene, seed: int, known: Known) -> None:
    """I6 and I7: the same again succeeds, does what is missing, once, and leaves no work."""
    noted, before = noted_shards(path), shards_in(path / "a")
    acknowledged = list(scene.steps(path, seed))
    require_invariants(path, known, acknowledged)
    store = Store(path)
    made = [refs.parse(ref) for what, ref in acknowledged if what == "made"]
    for kind in {ref.kind for ref in made}:
        run_keys = Counter(version.manifest.run_key for version in store.versions("a", kind))
        assert set(run_keys.values()) == {1}, f"{kind}: a version was made twice"
        assert store.storage.list(f"a/{kind}/.work") in ([], ["other.leases"])
    if scene.keeps_shards and made:
        kept = shards_in(path / made[-1].folder)
        for name in noted & before.keys():
            assert kept[name] == before[name], "a finished shard was done again"


# -- one trial


class Trial:
    """A scene with the store in which it begins, done again and again."""

    def __init__(self, name: str, seed: int, folder: Path) -> None:
        self.scene, self.seed, self.folder = SCENES[name], seed, folder
        folder.mkdir(exist_ok=True)
        self._begin = folder / "begin"
        self.scene.before(self._begin, seed)
        self._known = Known.of(self._begin, self.scene)

    @contextmanager
    def store(self) -> Iterator[Path]:
        """The store, as it is when the scene begins."""
        # a process remembers what it has seen of a store, by its path
        path = Path(tempfile.mkdtemp(dir=self.folder)) / "store"
        try:
            if self._begin.exists():
                shutil.copytree(self._begin, path)
            yield path
        finally:
            shutil.rmtree(path.parent, ignore_errors=True)

    def steps(self, path: Path) -> Iterator[Acknowledged]:
        return self.scene.steps(path, self.seed)

    def require(self, path: Path, acknowledged: list[Acknowledged]) -> None:
        """What must hold after a fault: the store is whole, and the next run does the rest."""
        known = copy.deepcopy(self._known)
        require_invariants(path, known, acknowledged)
        require_next_run(path, self.scene, self.seed, known)


def in_child(
    steps: Callable[[], Iterator[Acknowledged]],
    failure: str = "",
    meanwhile: Callable[[], None] | None = None,
) -> tuple[int, list[Acknowledged]]:
    """Do the steps in a process of its own, which fails: its exit code, and what it acknowledged.
    `meanwhile` is done while it is stopped; E-BUSY ends it well."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            os.close(reader)
            signal.alarm(60)
            with failing(failure) if failure else nullcontext(), suppress(BusyError):
                for step in steps():
                    os.write(writer, pickle.dumps(step))
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    if meanwhile is not None:
        _, status = os.waitpid(pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), f"{failure} was not reached"
        try:
            meanwhile()
        finally:
            os.kill(pid, signal.SIGCONT)
    acknowledged = []
    with open(reader, "rb") as stream:
        while stream.peek():
            acknowledged.append(pickle.load(stream))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), acknowledged


def killed(steps: Callable[[], Iterator[Acknowledged]], place: str) -> list[Acknowledged]:
    """Do the steps in a process that is killed there: what it acknowledged."""
    code, acknowledged = in_child(steps, f"{place}:kill")
    assert code == -signal.SIGKILL, f"{place} was not reached"
    return acknowledged
