"""What a version was made of, down to the sources, and what of it lies outside the store."""

import json
import shutil
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from quiver.flows.cli import versions
from quiver.flows.cli.shared import to_json
from quiver.flows.look.lineage import Index, descent, lineage, parents_of, trace_row
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
    write_rollouts,
    write_version,
)
from tests.flows import long_run
from tests.writing import run_here


@pytest.fixture
def store(tmp_path) -> Store:
    """prompts → rollouts → rewards of run `bench`; a reward model that a hub's id names took part
    in the rollouts."""
    store = Store(tmp_path / "store")
    tiny_policy(store)
    asked = make_prompts(store, 2)
    models = (ModelEntry(role="reward:helpful", ref="somebody/reward-model"),)
    table = rollouts_table(4, 8, 8, 2)
    make_rewards(store, write_rollouts(store, asked, table, models=models))
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
    assert torn["ref"] == "bench/rollouts@1"
    assert torn["error"].startswith("E-CORRUPT bench/rollouts")
    assert whole["stage"] == "prompt" and code == 3
    with pytest.raises(CorruptError):
        lineage(store, "bench/rollouts@1")


def test_another_version_under_the_same_number_is_no_source(store, capsys):
    """It was made of something else, which is not shown."""
    shutil.rmtree(Path(store.url) / "bench/rollouts/v000001")
    table = rollouts_table(4, 8, 8, 2).slice(0, 3)
    write_rollouts(store, store.open("bench/prompts@1"), table)
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


# -- a long run, and what was made of a version


def said(capsys, store, *arguments, **options) -> list[str]:
    capsys.readouterr()
    versions.lineage(*arguments, store=store.url, **options)
    return [line.strip() for line in capsys.readouterr().out.splitlines()]


@pytest.fixture
def long(tmp_path) -> Store:
    store = Store(tmp_path / "long")
    long_run.write_run(store, 12)
    return store


def test_policies_that_were_trained_alike_are_one_line(long, capsys):
    assert said(capsys, long, "long/policy@12") == [
        "long/policy@12",
        "policy: long/policy@11 … long/policy@1 × 11 iterations",
        "policy: long/policy@0",
        "rollouts: long/rollouts@1",
        "policy: long/policy@0 (above)",
        "prompts: long/prompts@1 (more below)",
        "rewards: long/rewards@1",
        "rollouts: long/rollouts@1 (above)",
        "rollouts: long/rollouts@12",
        "policy: long/policy@11 (above)",
        "prompts: long/prompts@12",
        "policy: long/policy@11 (above)",
        "rewards: long/rewards@12",
        "rollouts: long/rollouts@12 (above)",
    ]
    assert len(said(capsys, long, "long/policy@12", depth="all")) == 1 + 12 * 7


def test_a_fork_begins_with_the_policy_that_was_trained_otherwise(long, capsys):
    for number in (13, 14, 15):
        learned = [("policy", f"long/policy@{number - 1}"), ("rollouts", "long/rollouts@5")]
        long_run.write(long, f"long/policy@{number}", "optimize", learned)
    assert said(capsys, long, "long/policy@15", depth="2")[:3] == [
        "long/policy@15",
        "policy: long/policy@14",
        "policy: long/policy@13 (more below)",
    ]


def score(store, iterations: int) -> None:
    """Logprobs of the first iterations under the base policy, which all of them have."""
    models = [("ref", "long/policy@0")]
    for number in range(1, iterations + 1):
        inputs = [("rollouts", f"long/rollouts@{number}")]
        long_run.write(store, f"long/logprobs@{number}", "logprobs", inputs, models)


@pytest.mark.parametrize("down", [False, True])
def test_the_output_does_not_grow_with_the_run(tmp_path, capsys, down):
    lengths = set()
    for number in (6, 18):
        store = Store(tmp_path / str(number))
        long_run.write_run(store, number)
        score(store, number - 1)
        ref = f"long/policy@{0 if down else number}"
        lengths.add(len(said(capsys, store, ref, down=down)))
    assert len(lengths) == 1


def test_descent_is_what_the_manifests_name(long):
    """Of every version, one level deep, and nothing folded."""
    users = {str(ref): set() for ref in long.refs()}
    for version in long.versions():
        if version.ref.kind not in ("advantages", "updates"):
            for source in parents_of(version.manifest):
                users[source].add(str(version.ref))
    for ref, expected in users.items():
        assert {node["ref"] for node in descent(long, ref)["outputs"]} == expected


def test_descent_folds_a_line_and_what_is_made_alike(long, capsys):
    score(long, 4)
    assert said(capsys, long, "long/policy@0", down=True, depth="2") == [
        "long/policy@0",
        "policy: long/prompts@1",
        "prompts: long/rollouts@1 (more below)",
        "policy: long.eval/prompts@1",
        "prompts: long.eval/rollouts@1 (more below)",
        "policy: long/rollouts@1",
        "rollouts: long/rewards@1 (more below)",
        "rollouts: long/logprobs@1",
        "rollouts: long/policy@1 (more below)",
        "policy: long.eval/rollouts@1",
        "rollouts: long.eval/rewards@1 (more below)",
        "rollouts: long/evaluations@1",
        "ref: long/logprobs@1 … long/logprobs@4 × 4 versions",
        "policy: long/evaluations@1 (above)",
        "policy: long/policy@1 … long/policy@12 × 12 iterations",
        "policy: long.eval/prompts@2 (more below)",
        "policy: long.eval/rollouts@2 (more below)",
        "policy: long/evaluations@2",
    ]


def test_policies_of_the_same_rollouts_are_no_iterations(long, capsys):
    """Such as the cells of a sweep; what was made of the last one is not made of all."""
    for number in range(1, 5):
        inputs = [("policy", "long/policy@0"), ("rollouts", "long/rollouts@1")]
        long_run.write(long, f"cells/policy@{number}", "optimize", inputs, [])
    long_run.write(long, "cells/rollouts@1", "generate", [("policy", "cells/policy@4")], [])
    lines = said(capsys, long, "long/rollouts@1", down=True, depth="2")
    assert "rollouts: cells/policy@1 … cells/policy@4 × 4 versions" in lines
    assert not any("cells/rollouts@1" in line for line in lines)


def test_a_moving_average_was_not_trained_from_its_policy(long):
    """Such as the reference of a KL penalty, which follows the run's own line."""
    before = descent(long, "long/policy@1", 1)["outputs"]
    average = "long/policy@0"
    for number in range(1, 12):
        models = [("reference", average), ("policy", f"long/policy@{number}")]
        average = long_run.write(long, f"long.ref/policy@{number}", "average", (), models)
    after = descent(long, "long/policy@1", 1)["outputs"]
    assert [node["ref"] for node in after if node not in before] == ["long.ref/policy@1"]
    (line,) = [node for node in after if "folded" in node]
    assert (line["ref"], line["to"], line["count"]) == ("long/policy@2", "long/policy@12", 11)
    assert Index(long).trained_on("long/policy@3") == ["long/policy@4"]
    assert Index(long).trained_from("long.ref/policy@3") is None


def test_what_was_made_of_one_policy_is_no_line_of_policies(long, capsys):
    for number in range(1, 5):
        inputs = [("policy", "cells/policy@1")]
        long_run.write(long, f"cells/evaluations@{number}", "evaluate", inputs, [])
    long_run.write(long, "cells/policy@1", "optimize", [("policy", "long/policy@0")], [])
    long_run.write(long, "cells/logprobs@1", "logprobs", [("policy", "cells/evaluations@4")], [])
    lines = said(capsys, long, "cells/policy@1", down=True, depth="2")
    assert lines == [
        "cells/policy@1",
        "policy: cells/evaluations@1 … cells/evaluations@4 × 4 versions",
    ]


def test_descent_opens_no_manifest_but_its_own(long):
    before = descent(long, "long/rollouts@3", 2)
    for path in Path(long.url).glob("*/*/v*/manifest.json"):
        if "rollouts/v000003" not in str(path):
            path.write_text("torn")
    assert descent(long, "long/rollouts@3", 2) == before


def test_descent_of_what_was_removed_is_known(store):
    remove(store, "bench/rollouts@1", "wrong template")
    tree = descent(store, "bench/rollouts@1")
    assert tree["removed"] and [node["ref"] for node in tree["outputs"]] == ["bench/rewards@1"]


def test_a_row_is_found_where_it_was_asked_and_trained_on(finished):
    """By the tables: the advantages of each policy that learned from the rollouts."""
    store = Store(finished / "finished")
    rollouts = store.open("golden/rollouts@1")
    prompts = rollouts.manifest.require_input("prompts").ref
    trained = {}
    for version in store.versions(kind="policy"):
        if any(entry.ref == str(rollouts.ref) for entry in version.manifest.inputs):
            trained[str(version.ref)] = store.open(version.manifest.metrics["advantages"]).table()
    assert trained
    row = rollouts.table().slice(5, 1).to_pylist()[0]
    for id, is_ours in (
        (row["rollout_id"], lambda each: each == row["rollout_id"]),
        (row["group_id"], lambda each: f"-{row['group_id']}-" in each),
    ):
        answer = trace_row(store, id)
        found = {asked["rollouts"]: asked for asked in answer["asked"]}[str(rollouts.ref)]
        assert found["prompts"] == prompts
        kept = {policy["policy"]: policy["kept"] for policy in found["policies"]}
        dropped = {policy["policy"]: policy["dropped"] for policy in found["policies"]}
        for policy, table in trained.items():
            mine = [each for each in table.to_pylist() if is_ours(each["rollout_id"])]
            assert kept[policy] == sum(each["kept"] for each in mine)
            assert sum(dropped[policy].values()) == len(mine) - kept[policy]
        for policy in answer["line"]:
            line = lineage(store, policy)
            assert set(kept) & set(refs_in(line)) and parents_of_none(store, policy)


def refs_in(node):
    yield node["ref"]
    for child in node["inputs"]:
        yield from refs_in(child)


def parents_of_none(store, policy) -> bool:
    """True if no policy was trained from it."""
    policies = [version.manifest for version in store.versions(kind="policy")]
    return policy not in [each.input("policy").ref for each in policies if each.input("policy")]


def test_a_group_is_asked_only_in_sampled_rollouts_that_have_it(store):
    """Not in a part that was drawn for an audit, nor in rollouts that left the prompt out."""
    rollouts = store.open("bench/rollouts@1")
    refs = {"rollouts": str(rollouts.ref)}
    run_here("subset", {"prompts": 2}, store, into="bench.audit", **refs)
    table = rollouts.table()
    few = table.filter(pc.equal(table["group_id"], "g1"))
    write_rollouts(store, store.open("bench/prompts@1"), few)
    for group, expected in (
        ("g0", ["bench/rollouts@1"]),
        ("g1", ["bench/rollouts@1", "bench/rollouts@2"]),
    ):
        for most in (None, len(expected)):
            answer = trace_row(store, group, most)
            assert [one["rollouts"] for one in answer["asked"]] == expected
            assert answer["num_asked"] == len(expected)


def test_rows_of_two_sources_with_one_group_id_are_told_apart(store, capsys):
    """Group ids are row numbers unless a recipe names others."""
    table = store.open("bench/prompts@1").table()
    texts = pa.array(["Name a sea.", "Name a lake."])
    place = table.schema.get_field_index("prompt_text")
    table = table.set_column(place, table.schema.field(place), texts)
    write_version(store, "prompts", "prompt", table)
    for prompts in ("bench/prompts@1", "bench/prompts@2"):
        write_rollouts(store, store.open(prompts), rollouts_table(4, 8, 8, 2))
    policies = []
    for number in (1, 2, 3):
        learned = [("policy", "bench/policy@0"), ("rollouts", f"bench/rollouts@{number}")]
        policies.append(long_run.write(store, f"bench/policy@{number}", "optimize", learned))
    answer = trace_row(store, "g1")
    assert [one["row_of"] for one in answer["asked"]] == [0, 0, 1]
    assert [one["line"] for one in answer["asked"]] == [policies[:2], policies[:2], policies[2:]]
    lines = said(capsys, store, row="g1")
    words = [f"{line.split()[0]} {line.split()[-1]}" for line in lines]
    assert words[0].startswith("prompt ") and words[1:] == [
        "asked bench/prompts@1",
        "trained gone)",
        "asked bench/prompts@1",
        "trained gone)",
        "in bench/policy@1",
        "in bench/policy@2",
        "prompt lake.",
        "asked bench/prompts@2",
        "trained gone)",
        "in bench/policy@3",
    ]


def test_a_row_that_was_asked_often_is_shown_of_the_newest(finished, capsys, monkeypatch):
    store = Store(finished / "finished")
    group = store.open("golden/prompts@1").table()["group_id"][0].as_py()
    num_asked = trace_row(store, group)["num_asked"]
    assert num_asked > 1
    monkeypatch.setattr(versions, "_MOST_ASKED", 1)
    lines = said(capsys, store, row=group)
    assert [line.split()[0] for line in lines].count("asked") == 1
    assert lines[-1].startswith(f"{num_asked - 1} earlier")
    with pytest.raises(LineageError, match="no rollouts or prompts"):
        trace_row(store, "elsewhere-1")


@pytest.mark.parametrize(
    "words", [(), ("--down",), ("a/policy@1", "--row", "x"), ("a/policy@1", "--depth", "deep")]
)
def test_one_of_version_and_row_is_asked_for(store, command, words):
    assert command("lineage", *words, "--store", store.url)[0] == 2
