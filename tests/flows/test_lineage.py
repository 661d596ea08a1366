"""What a version was made of, down to the sources, and what of it lies outside the store."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from quiver.flows.cli import versions
from quiver.flows.cli.shared import to_json
from quiver.flows.look.lineage import lineage, parents_of
from quiver.schemas.errors import CorruptError, LineageError
from quiver.schemas.manifest import Input, ModelEntry
from quiver.schemas.refs import Ref
from quiver.stages.core.store import Store, marks
from quiver.stages.core.store.listing import EXPIRED
from quiver.stages.core.store.retention import remove
from tests.benchmarks.made import (
    make_prompts,
    make_rewards,
    rollouts_table,
    tiny_policy,
    write_version,
)


@pytest.fixture
def store(tmp_path) -> Store:
    """prompts → rollouts → rewards of run `bench`; a reward model that a hub's id names took part
    in the rollouts."""
    store = Store(tmp_path / "store")
    tiny_policy(store)
    asked = make_prompts(store, 2)
    models = (ModelEntry(role="reward:helpful", ref="somebody/reward-model"),)
    table = rollouts_table(4, 8, 8, 2)
    make_rewards(
        store, write_version(store, "rollouts", "generate", table, {"prompts": asked}, models)
    )
    return store


def test_the_tree_goes_down_to_the_sources(store):
    tree = lineage(store, "bench/rewards@1")
    (rollouts,) = tree["inputs"]
    assert (rollouts["role"], rollouts["ref"]) == ("rollouts", "bench/rollouts@1")
    outside, asked = rollouts["inputs"]
    assert outside == {"role": "reward:helpful", "ref": "somebody/reward-model", "inputs": []}
    assert (asked["ref"], asked["stage"]) == ("bench/prompts@1", "prompt")
    assert parents_of(store.open("bench/rollouts@1").manifest) == {"bench/prompts@1": "prompts"}


def test_a_version_that_comes_again_is_named_without_its_inputs(store):
    rollouts, rewards = store.open("bench/rollouts@1"), store.open("bench/rewards@1")
    both = {"rewards": rewards, "rollouts": rollouts}
    again = write_version(store, "rewards", "reward", rewards.table(), both)
    first, second = lineage(store, str(again.ref))["inputs"]
    assert first["inputs"][0]["ref"] == second["ref"] == "bench/rollouts@1"
    assert second["seen"] and second["inputs"] == []
    with pytest.raises(LineageError, match="bench/rewards@9"):
        lineage(store, "bench/rewards@9")


def test_what_is_gone_is_marked(store):
    shutil.rmtree(Path(store.url) / "bench/prompts/v000001")
    (rollouts,) = lineage(store, "bench/rewards@1")["inputs"]
    gone = {"role": "prompts", "ref": "bench/prompts@1", "inputs": [], "missing": True}
    assert rollouts["inputs"][1] == gone


def test_of_what_was_removed_or_expired_the_manifest_is_known(store):
    remove(store, "bench/rollouts@1", "wrong template")
    marks.write(store.storage, Ref("bench", "prompts", 1), EXPIRED, "gc, keep = 1")
    (rollouts,) = lineage(store, "bench/rewards@1")["inputs"]
    asked = rollouts["inputs"][1]
    assert rollouts["removed"].endswith("wrong template") and "expired" not in rollouts
    assert asked["expired"].endswith("gc, keep = 1") and asked["stage"] == "prompt"
    assert lineage(store, "bench/rollouts@1")["removed"]


def test_a_torn_source_hides_no_other(store, command):
    rewards = store.open("bench/rewards@1")
    both = {kind: store.open(f"bench/{kind}@1") for kind in ("rollouts", "prompts")}
    write_version(store, "rewards", "reward", rewards.table(), both)
    (Path(store.url) / "bench/rollouts/v000001/manifest.json").write_text("{")
    code, tree = command("lineage", "bench/rewards@2", "--store", store.url)
    torn, whole = tree["inputs"]
    assert torn["ref"] == "bench/rollouts@1" and torn["error"].startswith(
        "E-CORRUPT bench/rollouts"
    )
    assert whole["stage"] == "prompt" and code == 3
    with pytest.raises(CorruptError):
        lineage(store, "bench/rollouts@1")


def test_another_version_under_the_same_number_is_no_source(store, capsys):
    """It was made of something else, which is not shown."""
    shutil.rmtree(Path(store.url) / "bench/rollouts/v000001")
    table = rollouts_table(4, 8, 8, 2).slice(0, 3)
    write_version(store, "rollouts", "generate", table, {"prompts": store.open("bench/prompts@1")})
    versions.lineage("bench/rewards@1", store=store.url)
    assert capsys.readouterr().out.splitlines() == [
        "bench/rewards@1",
        "  rollouts: bench/rollouts@1 (replaced: it has other content now)",
    ]


def test_a_line_of_a_thousand_policies(store, capsys):
    """Each is an input of the next, so the tree is as deep as the line is long."""
    length = 1100
    first = store.open("bench/policy@0")
    content_hash = first.manifest.content_hash
    for number in range(1, length + 1):
        parent = Input(role="policy", ref=f"bench/policy@{number - 1}", content_hash=content_hash)
        changes = {"version": number, "run_key": f"{number:064x}", "inputs": (parent,)}
        copy = first.files.folder.with_name(f"v{number:06d}")
        copy.mkdir()
        manifest = first.manifest.model_copy(update=changes)
        (copy / "manifest.json").write_bytes(manifest.to_json())
    ref = f"bench/policy@{length}"
    versions.lineage(ref, depth="all", store=store.url)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [ref, f"  policy: bench/policy@{length - 1}"]
    assert lines[length].strip() == "policy: bench/policy@0" and len(lines) == length + 1
    told = to_json(lineage(store, ref))
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20 * length)  # of the reader, and of ==
    try:
        assert json.loads(told) == lineage(store, ref)
    finally:
        sys.setrecursionlimit(limit)
