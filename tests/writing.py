"""Versions that tests write themselves, shard by shard, as a stage of any name would."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from quiver.stages.core.run.runner import run_stage
from quiver.stages.core.run.stage import Plan
from quiver.stages.core.store import Store, Version
from quiver.stages.core.store.writer import Staging, Writer, open_staging


class OpenWriter:
    """A writer that publishes by itself: `commit`. `done`: the version is there already."""

    def __init__(self, staging: Staging) -> None:
        self.staging = staging
        self.writer: Writer = staging.last

    @property
    def done(self) -> Version | None:
        return self.staging.committed

    def commit(self, **about) -> Version:
        self.writer.finish(**about)
        return self.staging.publish()

    def __getattr__(self, name: str):
        return getattr(self.writer, name)


@contextmanager
def begin(
    store: Store,
    run: str,
    kind: str,
    *,
    stage: str,
    stage_version: int,
    config,
    inputs,
    models=(),
    force: bool = False,
    share: bool = False,
    patience: float | None = None,
    note: str = "",
) -> Iterator[OpenWriter]:
    """The one writer of such a plan, once nobody else is at it; or the finished version."""
    first = 0 if kind == "policy" else 1
    plan = Plan(
        store,
        stage,
        stage_version,
        config,
        run,
        (kind,),
        inputs,
        models,
        first_number=first,
        patience_seconds=patience,
        note=note,
    )
    with open_staging(plan, force=force, share=share) as staging:
        yield OpenWriter(staging)


def write_lines(path: Path | str, rows: Iterable[dict]) -> None:
    """A JSONL file."""
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_here(stage: str, config, store, **options):
    """One stage in this process; the reference of its version."""
    return run_stage(stage, config, store, in_process=True, **options)


def run_iteration(recipe, store: Store) -> dict[str, str]:
    """The first iteration of a recipe, in this process; each version's reference by its kind."""
    base = run_here("policy", recipe.policy, store, into=recipe.run)
    prompts = run_here("prompt", recipe.prompt_config(1), store, policy=base)
    asked = {"prompts": prompts, "policy": base}
    rollouts = run_here("generate", recipe.generate_config(1), store, **asked)
    rewards = run_here("reward", recipe.reward, store, rollouts=rollouts)
    scored = {"rollouts": rollouts, "rewards": rewards}
    policy = run_here("optimize", recipe.optimize_config(), store, policy=base, **scored)
    return {"prompts": prompts, **scored, "policy": policy}


def ids_asked_for(monkeypatch) -> list[list[str] | None]:
    """A list to which each stage that finishes adds the ids that its version must have."""
    asked, finish = [], Writer.finish

    def watched(writer: Writer, *, ids=None, **fields):
        asked.append(None if ids is None else ids.to_pylist())
        finish(writer, ids=ids, **fields)

    monkeypatch.setattr(Writer, "finish", watched)
    return asked
