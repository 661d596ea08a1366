"""A run of any length whose manifests alone are written, for what reads no rows."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from quiver.schemas.manifest import Input, Manifest, ModelEntry, digest
from quiver.schemas.refs import Ref
from quiver.stages.core.store import Store

_BEGIN = datetime(2026, 3, 1, tzinfo=UTC)
SECONDS = {"prompt": 1.0, "generate": 60.0, "reward": 5.0, "optimize": 30.0, "evaluate": 2.0}


def write(store: Store, ref: str, stage: str, inputs=(), models=(), **fields) -> str:
    """The manifest of a version without files, made a minute after the one before."""
    name, _, number = ref.partition("@")
    run, _, kind = name.partition("/")
    made = getattr(store, "num_made", 0)
    store.num_made = made + 1
    seconds = SECONDS.get(stage, 0.0)
    about = {
        "kind_schema": f"{kind}/1",
        "created": (_BEGIN + timedelta(minutes=made)).isoformat(timespec="milliseconds"),
        "commit_id": str(uuid.UUID(int=made)),
        "stage": stage,
        "stage_version": 1,
        "run_key": digest([stage, ref]),
        "config": {"seed": made},
        "files": (),
        "rows": 0,
        "content_hash": digest(ref),
        "environment": {"device": "cpu"},
        "seconds": {"work": seconds - seconds / 4, "total": seconds},
        "bytes": {"data": 1000},
        "metrics": {},
        "status": {},
    }
    manifest = Manifest(
        run=run,
        kind=kind,
        version=int(number),
        inputs=tuple(
            Input(role=role, ref=source, content_hash=digest(source)) for role, source in inputs
        ),
        models=tuple(ModelEntry(role=role, ref=source) for role, source in models),
        **{**about, **fields},
    )
    folder = Path(store.url) / Ref(run, kind, int(number)).folder
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_bytes(manifest.to_json())
    return ref


def write_run(store: Store, length: int, run: str = "long") -> None:
    """policy@0 and `length` iterations of six versions, measured before and after."""
    policy = write(store, f"{run}/policy@0", "policy")
    _measure(store, run, policy, 1)
    for number in range(1, length + 1):
        ref = f"{run}/{{}}@{number}".format
        usage = {"processor_seconds": 70.0, "peak_memory": 1000 + number}
        sampled, paid = _sample(store, ref, policy, tokens=100, usage=usage)
        learned = [("policy", policy), ("rollouts", sampled), ("rewards", paid)]
        beside = {kind: ref(kind) for kind in ("advantages", "updates")}
        for made in beside.values():
            write(store, made, "optimize", learned, run_key=digest(["optimize", number]))
        policy = write(
            store,
            ref("policy"),
            "optimize",
            learned,
            run_key=digest(["optimize", number]),
            metrics={"tokens": 100, "processes": 2, **beside},
            environment={"device": "cuda"},
            usage={
                "processor_seconds": 20.0,
                "peak_memory": 5000,
                "peak_device_memory": 7000,
                **({"unfinished_attempts": 1} if number == 2 else {}),
            },
        )
    _measure(store, run, policy, 2)


def _sample(store: Store, ref: Callable, policy: str, tokens: int, **about) -> tuple[str, str]:
    """Prompts, rollouts and rewards; returns the last two."""
    models = [("policy", policy)]
    asked = write(store, ref("prompts"), "prompt", models=models)
    inputs, metrics = [("prompts", asked)], {"tokens": tokens}
    sampled = write(store, ref("rollouts"), "generate", inputs, models, metrics=metrics, **about)
    return sampled, write(store, ref("rewards"), "reward", [("rollouts", sampled)])


def _measure(store: Store, run: str, policy: str, number: int) -> None:
    ref = f"{run}.eval/{{}}@{number}".format
    sampled, paid = _sample(store, ref, policy, tokens=50)
    write(
        store,
        f"{run}/evaluations@{number}",
        "evaluate",
        [("rollouts", sampled), ("rewards", paid)],
        [("policy", policy)],
        metrics={"score": 0.5, "stderr": 0.1, "n": 9},
    )
