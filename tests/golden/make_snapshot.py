"""A small store as the code writes it: `snapshot/`, by which a change of the format is noticed.

    python -m tests.golden.make_snapshot        # anew; only where the format is to change

Two prompts, four rollouts and their rewards, with a tag; of a policy, which would be large, only
its hashes. Indexes are left out: a format may be read without them.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from quiver.schemas.manifest import ModelEntry
from quiver.stages.core.store import Store
from tests.benchmarks.made import make_prompts, make_rewards, rollouts_table, write_version

PATH = Path(__file__).with_name("snapshot")
POLICY = ModelEntry(role="policy", ref="a-folder", weights="w", tokenizer="t", template="m")
NOT_KEPT = {".index", ".work"}


def make(path: Path) -> Store:
    """The store, whole."""
    store = Store(path)
    prompts = make_prompts(store, 2)
    table = rollouts_table(4, 3, 3, group=2)
    rollouts = write_version(store, "rollouts", "generate", table, {"prompts": prompts}, (POLICY,))
    rewards = make_rewards(store, rollouts)
    store.tag("bench", "best", rewards.ref, why="the only one", key="first", about={"night": "n1"})
    return store


def rows(store: Store) -> dict[str, list[dict[str, Any]]]:
    """All rows, by reference."""
    return {str(version.ref): version.table().to_pylist() for version in store.versions()}


if __name__ == "__main__":
    shutil.rmtree(PATH, ignore_errors=True)
    make(PATH)
    for path in sorted(PATH.rglob("*"), reverse=True):
        if path.name in NOT_KEPT:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
