"""Rollouts joined by id with what is told of them elsewhere: read shard by shard, sorted, filtered
and searched by whole columns."""

import hashlib
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import quiver
from quiver.flows.exporting import Options, export
from quiver.flows.look.joined import Joined, Selection, open_joined
from quiver.flows.look.shards import Shards
from quiver.schemas.cells import json_array
from quiver.schemas.errors import ConfigError, CorruptError, LineageError
from quiver.stages.core.store import Store
from tests.benchmarks.made import (
    make_prompts,
    make_rewards,
    rollouts_table,
    write_rollouts,
    write_version,
)
from tests.writing import run_here

NUM_ROWS = 600  # three shards


@pytest.fixture(scope="module")
def golden(finished, tmp_path_factory) -> Store:
    path = tmp_path_factory.mktemp("golden") / "store"
    shutil.copytree(finished / "finished", path)
    return Store(path)


@pytest.fixture
def changing(golden, tmp_path) -> Store:
    """A copy of it."""
    return Store(shutil.copytree(golden.url, tmp_path / "store"))


@pytest.fixture(scope="module")
def shuffled(tmp_path_factory) -> Store:
    """600 rollouts of 75 prompts; the rewards stand in another order than they do."""
    store = Store(tmp_path_factory.mktemp("shuffled") / "store")
    texts = [f"Answer: {number}" for number in range(NUM_ROWS)]
    asked, table = make_prompts(store, NUM_ROWS // 8), rollouts_table(NUM_ROWS, 4, 4)
    rollouts = write_rollouts(store, asked, table, texts)
    ordered = make_rewards(store, rollouts).table()
    order = np.random.default_rng(0).permutation(NUM_ROWS)
    write_version(store, "rewards", "reward", ordered.take(order), {"rollouts": rollouts})
    return store


def rewards_of(store: Store) -> dict[str, float]:
    rows = store.open("bench/rewards@1").table().select(["rollout_id", "reward"]).to_pylist()
    return {row["rollout_id"]: row["reward"] for row in rows}


def test_rewards_in_another_order_are_joined_by_id(shuffled):
    joined = open_joined(shuffled, "bench/rewards@2")
    expected = rewards_of(shuffled)
    rows = joined.rows([0, 599, 300])
    assert [row["position"] for row in rows] == [0, 599, 300]
    assert [row["completion_text"] for row in rows] == ["Answer: 0", "Answer: 599", "Answer: 300"]
    assert [row["reward"] for row in rows] == [expected[row["rollout_id"]] for row in rows]
    assert [row["reference"] for row in rows] == ["0", "74", "37"], "the group's own answer"
    ids = shuffled.open("bench/rollouts@1").table()["rollout_id"].to_pylist()
    assert joined.number("reward").tolist() == [expected[each] for each in ids]


def test_rows_are_sorted_filtered_and_searched(shuffled):
    joined = open_joined(shuffled, "bench/rollouts@1")
    rewards = joined.number("reward")
    best = joined.order(Selection(sort="reward", descending=True))
    assert best.tolist() == np.argsort(-rewards, kind="stable").tolist()
    few = joined.order(Selection(sort="reward", where="reward < 0.25, group_id != g3"))
    assert set(few) == {row for row in np.flatnonzero(rewards < 0.25) if row // 8 != 3}
    assert np.all(np.diff(rewards[few]) >= 0)
    assert joined.order(Selection(search="ANSWER: 59")).tolist() == [59, *range(590, 600)]
    assert sorted(joined.order(Selection(sort="random"))) == list(range(NUM_ROWS))
    assert joined.order(Selection()) == range(NUM_ROWS)


def test_what_has_no_number_comes_last_either_way(golden):
    joined = open_joined(golden, "golden/rewards@3")  # four of twelve failed
    for descending in (False, True):
        order = joined.order(Selection(sort="reward", descending=descending))
        assert np.isnan(joined.number("reward")[order]).tolist() == [False] * 8 + [True] * 4
    assert joined.order(Selection(where="errors > 0")).tolist() == [
        position for position, row in enumerate(joined.rows(range(12))) if row["reward"] is None
    ]


def test_a_group_is_chosen_by_its_whole_id(store):
    """An id may hold what separates conditions."""
    groups = pa.array(["a, b", "a", "a, b", "b"])
    table = rollouts_table(4, 4, 4).drop_columns("group_id").append_column("group_id", groups)
    schema = rollouts_table(4, 4, 4).schema
    rollouts = write_version(store, "rollouts", "generate", table.select(schema.names), {})
    joined = open_joined(store, rollouts.ref)
    assert joined.order(Selection(group="a, b")).tolist() == [0, 2]
    assert joined.groups()["mean"].to_pylist() == [None] * 3, "nothing is scored"


CANNOT_BE_READ = [
    "reward",
    "reward < high",
    "nowhere > 1",
    "finish_reason < 3",
    "finish_reason = lenght",
    "finish_reason => length",
    "group_id = <none>",
    "end != stopped",
    'reward < 1, "reward < 1',
]


@pytest.mark.parametrize("where", CANNOT_BE_READ)
def test_a_condition_that_can_not_be_read_is_refused(golden, where):
    with pytest.raises(ConfigError):
        open_joined(golden, "golden/rewards@1").order(Selection(where=where))


def with_columns(store: Store, own: pa.Array) -> Joined:
    """Return 8 scored rollouts each of prompts that have these columns of the user's; the prompts
    are saved from the last to the first."""
    prompts = make_prompts(store, len(own)).table().drop_columns("columns")
    asked = prompts.append_column("columns", own).take([*reversed(range(len(own)))])
    asked = write_version(store, "prompts", "prompt", asked)
    table = rollouts_table(8 * len(own), 4, 4)
    rollouts = write_rollouts(store, asked, table)
    return open_joined(store, make_rewards(store, rollouts).ref)


@pytest.fixture(scope="module")
def levelled(tmp_path_factory) -> Joined:
    """Of 10 prompts in another order."""
    own = [
        {"level": "hard" if n % 3 else "easy", "digits": None if n == 4 else n, "odd": n % 2 == 1}
        for n in range(10)
    ]
    own = pa.array([{**row, "tokens": 9.5, "tags": ["a"]} for row in own])
    return with_columns(Store(tmp_path_factory.mktemp("levelled") / "store"), own)


@pytest.mark.parametrize(
    ("where", "groups"),
    [
        ("level = easy", [0, 3, 6, 9]),
        ("level != easy, digits > 4", [5, 7, 8]),
        ("odd = 1, end = length", [1, 3, 5, 7, 9]),
        ("tokens = 4", range(10)),  # the rollouts' own
    ],
)
def test_conditions_name_own_columns_and_the_titles_of_a_table(levelled, where, groups):
    order = levelled.order(Selection(where=where))
    assert order.tolist() == [8 * group + sample for group in groups for sample in range(8)]


def test_means_by_an_own_column(levelled):
    groups = {row["level"]: row for row in levelled.groups("level").to_pylist()}
    rewards = levelled.number("reward").reshape(10, 8)
    for level, rows in (("easy", rewards[[0, 3, 6, 9]]), ("hard", rewards[[1, 2, 4, 5, 7, 8]])):
        assert groups[level]["count"] == rows.size
        assert groups[level]["mean"] == pytest.approx(rows.mean())
    hard = levelled.groups("level", levelled.order(Selection(where="level = hard")))
    assert hard.to_pylist() == [groups["hard"]]
    assert levelled.groups("digits")["digits"].to_pylist()[4:6] == [None, 5]
    assert levelled.groups("end")["finish_reason"].to_pylist() == ["length"]
    with pytest.raises(ConfigError, match="level, digits, odd"):
        levelled.groups("tags")


def test_what_has_no_prompt_is_found_by_its_own_text_alone(tmp_path):
    """Not by the text of the last prompt."""
    store = Store(tmp_path / "store")
    prompts = make_prompts(store, 2).table()
    index = prompts.schema.get_field_index("prompt_text")
    texts = pa.array(["Where?", "When?"], prompts.schema.field(index).type)
    asked = write_version(
        store, "prompts", "prompt", prompts.set_column(index, "prompt_text", texts)
    )
    rollouts = write_version(
        store, "rollouts", "generate", rollouts_table(24, 4, 4), {"prompts": asked}
    )
    joined = open_joined(store, rollouts.ref)
    assert joined.order(Selection(search="when")).tolist() == list(range(8, 16))


def chosen(joined: Joined, conditions: Iterable[str]) -> dict[str, set[int]]:
    """The prompts whose rollouts meet each condition."""
    orders = {where: joined.order(Selection(where=where)) for where in conditions}
    return {where: {row // 8 for row in order} for where, order in orders.items()}


def test_own_numbers_are_compared_exactly(store):
    columns = {
        "date": pa.array([20240101, 20240102]),
        "id": pa.array([2**53, 2**53 + 1]),
        "code": pa.array([2**63, None], pa.uint64()),
        "double": pa.array([0.1, 0.1 + 1e-12]),
        "single": pa.array([0.1, 0.2], pa.float32()),
        "tokens": pa.array(["few", "many"]),
    }
    joined = with_columns(store, pa.StructArray.from_arrays([*columns.values()], [*columns]))
    groups_of = {
        "date = 20240101": {0},
        "date < 20240102": {0},
        "date > 20240101.5": {1},
        "date = 2.0240102e7": {1},
        "id = 9007199254740993": {1},
        "id < 9007199254740993": {0},
        "id > 1e30": set(),
        "code > 9223372036854775807": {0},
        "code < -1": set(),
        "code != 3": {0, 1},
        "double = 0.1": {0},
        "single = 0.1": {0},
        "single > 1e300": set(),
        "tokens = 4": {0, 1},  # the rollouts' own
    }
    assert chosen(joined, groups_of) == groups_of
    assert len(joined.order(Selection(sort="id", descending=True))) == 16


def test_own_columns_of_any_storage_are_texts_numbers_and_yes_or_no(store):
    """As pandas and `datasets` write texts, and as a column is kept that mixes 1 and 2.5."""
    columns = {
        "large": pa.array(["easy", "hard"], pa.large_string()),
        "category": pa.array(["easy", "hard"]).dictionary_encode(),
        "mixed": json_array([1, 2.5]).chunk(0),
        "other": json_array([1, "b"]).chunk(0),
        "flag": pa.array([True, None]),
    }
    joined = with_columns(store, pa.StructArray.from_arrays([*columns.values()], [*columns]))
    groups_of = {
        "large = easy": {0},
        "category != easy": {1},
        "mixed > 1": {1},
        "mixed = 1": {0},
        "flag = true": {0},
        "flag != true": {1},
    }
    assert chosen(joined, groups_of) == groups_of
    assert joined.groups("mixed")["mixed"].to_pylist() == [1, 2.5]
    assert joined.groups("category")["category"].to_pylist() == ["easy", "hard"]
    with pytest.raises(ConfigError, match="large, category, mixed, flag"):
        joined.groups("other")


def test_names_and_texts_of_conditions_may_be_quoted(store):
    columns = {
        "is it hard?": ["yes, it's", "no"],
        "said": ['"yes"', ""],
        "it's": ["a = b", "c"],
    }
    joined = with_columns(store, pa.table(columns).to_struct_array().combine_chunks())
    groups_of = {
        """"is it hard?" = "yes, it's" """: {0},
        "is it hard? == no": {1},
        "is it hard? != 'no', tokens >= 1,": {0},
        """said = '"yes"'""": {0},
        'said = "", reward >= "0"': {1},
        "it's = a = b": {0},
        "it's != 'c'": {0},
        "finish_reason == 'length'": {0, 1},
        'finish_reason != "length"': set(),
        " , ": {0, 1},
    }
    assert chosen(joined, groups_of) == groups_of


def test_own_columns_keep_their_names_beside_those_of_a_table(store):
    """Under a longer one, `columns.NAME`."""
    own = [
        {"end": "e1", "ratio": 1.0, "tokens": 9, "reward": "low", "finish_reason": "stop"},
        {"end": "e2", "ratio": 3.0, "tokens": 8, "reward": "high", "finish_reason": "length"},
    ]
    joined = with_columns(store, pa.array(own))
    groups_of = {
        "end = length": {0, 1},
        "columns.end = e1": {0},
        "columns.ratio > 2": {1},
        "columns.tokens > 8": {0},
        "tokens = 4": {0, 1},
        "columns.reward = high": {1},
        "columns.finish_reason = stop": {0},
        "finish_reason = length": {0, 1},
    }
    assert chosen(joined, groups_of) == groups_of
    assert joined.order(Selection(sort="columns.ratio", descending=True))[0] == 8
    assert joined.order(Selection(sort="columns.tokens"))[0] == 8
    assert joined.groups("columns.end")["columns.end"].to_pylist() == ["e1", "e2"]
    assert joined.groups("end")["finish_reason"].to_pylist() == ["length"]
    for name in ("reward", "columns.reward"):
        assert joined.groups(name)["columns.reward"].to_pylist() == ["low", "high"]


def test_an_own_column_may_have_a_name_of_the_table_of_means(store):
    others = ["count", "mean", "std", "min", "max", "position"]
    own = dict.fromkeys(["number", *others], 7)
    joined = with_columns(store, pa.array([own, dict.fromkeys(own, 5)]))
    means = joined.number("reward").reshape(2, 8).mean(1)
    for name in own:
        groups = joined.groups(name)
        title = f"columns.{name}" if name in others else name
        assert groups.column_names == [title, *others]
        assert groups[title].to_pylist() == [7, 5] and groups["count"].to_pylist() == [8, 8]
        assert groups["position"].to_pylist() == [0, 8]
        np.testing.assert_allclose(groups["mean"], means, rtol=1e-12)


def test_a_group_has_the_numbers_of_its_rollouts(shuffled):
    joined = open_joined(shuffled, "bench/rewards@1")
    groups = joined.groups()
    rewards = joined.number("reward").reshape(75, 8)
    assert groups["group_id"].to_pylist() == [f"g{group}" for group in range(75)]
    assert groups["count"].to_pylist() == [8] * 75
    for name in ("mean", "std", "min", "max"):
        np.testing.assert_allclose(groups[name], getattr(rewards, name)(1), rtol=1e-12)


def test_only_the_shards_that_are_needed_are_read(shuffled, tmp_path):
    shutil.copytree(shuffled.url, tmp_path / "store")
    store = Store(tmp_path / "store")
    version = store.open("bench/rollouts@1")
    last = Path(version.files.path(version.files.names[2]))
    last.write_bytes(last.read_bytes()[:-1])
    rows = Shards(version)
    assert [row["rollout_id"] for row in rows.at([0, 511])] == ["g0-0", "g63-7"]
    with pytest.raises(CorruptError, match=last.name):
        rows.at([512])
    with pytest.raises(CorruptError):
        rows.column("rollout_id")


def test_rows_far_apart_are_taken_without_what_lies_between(shuffled):
    version = shuffled.open("bench/rollouts@1")
    rows = Shards(version)
    whole = version.table()
    places = np.array([599, 0, -1, 300, 0, 256])
    pool = pa.proxy_memory_pool(pa.default_memory_pool())
    usual = pa.default_memory_pool()
    rows.take(places[:1])  # maps the files
    pa.set_memory_pool(pool)
    try:
        taken = rows.take(places).to_pylist()  # no buffer outlives the pool
    finally:
        pa.set_memory_pool(usual)
    assert pool.max_memory() < whole.nbytes / 2
    expected = [{} if place < 0 else whole.slice(place, 1).to_pylist()[0] for place in places]
    nulls = dict.fromkeys(whole.column_names)
    assert taken == [row or nulls for row in expected]


def test_a_policy_shows_what_it_learned_from(golden):
    joined = open_joined(golden, "golden/policy@1")
    kinds = ("rollouts@1", "prompts@1", "rewards@5", "advantages@1", "logprobs@2", "logprobs@1")
    assert joined.sources == [f"golden/{kind}" for kind in kinds]
    rows = golden.open("golden/advantages@1").table().to_pylist()
    advantages = {row["rollout_id"]: (row["advantage"], row["mean_ratio"]) for row in rows}
    for row in joined.rows(range(16)):
        assert (row["advantage"], row["mean_ratio"]) == advantages[row["rollout_id"]]


def test_a_policy_of_several_rollouts_says_which_are_shown(golden, tmp_path):
    """It was trained on earlier rollouts again; only the first are joined, and none exported."""
    joined = open_joined(golden, "golden/policy@2")
    assert joined.all_rollouts == ["golden/rollouts@6", "golden/rollouts@1"]
    assert joined.title.endswith("(rows of golden/rollouts@6, not of golden/rollouts@1)")
    for ref in ("golden/policy@1", "golden/rewards@1", "golden/rollouts@3"):
        assert "rows of" not in open_joined(golden, ref).title
    with pytest.raises(LineageError, match="rollouts@6, golden/rollouts@1") as caught:
        export(golden, "golden/policy@2", tmp_path / "out.jsonl", Options("sft"))
    assert "each by itself" in caught.value.next


def test_advantages_are_those_made_of_the_rewards_that_are_shown(changing):
    """Rollouts@1 were scored twice, and each score was trained on; then one training expired."""
    advantages = {
        "golden/rewards@5": "golden/advantages@1",
        "golden/rewards@1": "golden/advantages@2",
    }
    for rewards, expected in advantages.items():
        assert str(open_joined(changing, rewards).shards["advantages"].version.ref) == expected
    shown = open_joined(changing, "golden/rollouts@1").shards["rewards"].version.ref
    assert str(shown) == "golden/rewards@5"
    shutil.rmtree(Path(changing.url) / "golden/advantages/v000001")
    for ref in ("golden/rewards@5", "golden/rollouts@1", "golden/policy@1"):
        assert "advantages" not in open_joined(changing, ref).shards


def test_of_several_versions_that_of_the_runs_own_line_is_shown(changing):
    """Cells of a sweep and replay, which came later, hide nothing of what was trained on first."""
    shutil.rmtree(
        Path(changing.url) / "golden/tags"
    )  # with nights, the newest policy ends the line
    shorter = {"functions": [{"use": "length", "arguments": {"target": 1}}]}
    later = run_here("reward", shorter, changing, rollouts="golden/rollouts@1")
    refs = {"rollouts": "golden/rollouts@1", "rewards": "golden/rewards@5"}
    config = {"learning_rate": 1e-2, "device": "cpu", "save_optimizer": False}
    cell = run_here("optimize", config, changing, policy="golden/policy@0", **refs)
    joined = open_joined(changing, "golden/rollouts@1")
    assert joined.title == "golden/rollouts@1 by golden/policy@0 with golden/rewards@5"
    assert str(joined.shards["advantages"].version.ref) == "golden/advantages@1"
    assert open_joined(changing, later).title == f"{later} by golden/policy@0"
    advantages = changing.open(cell).manifest.metrics["advantages"]
    assert advantages in open_joined(changing, cell).sources
    assert (
        open_joined(changing, "golden/rollouts@4").title == "golden/rollouts@4 by golden/policy@0"
    )


def test_a_sweeps_rewards_are_shown_only_if_there_are_no_others(store):
    """Of rollouts that no policy has learned from."""
    rollouts = write_rollouts(store, make_prompts(store, 1), rollouts_table(4, 4, 4))
    for target, note in (
        (1, "sweep 0123456789ab, cell 1 (1)"),
        (2, ""),
        (3, "sweep 0123456789ab, cell 2 (3)"),
    ):
        config = {"functions": [{"use": "length", "arguments": {"target": target}}]}
        run_here("reward", config, store, rollouts=rollouts.ref, note=note)
        shown = open_joined(store, rollouts.ref).shards["rewards"].version.ref
        assert str(shown) == f"bench/rewards@{min(target, 2)}"


def test_rewards_that_are_gone_are_not_those_of_another_version(changing):
    shutil.rmtree(Path(changing.url) / "golden/rewards/v000005")
    joined = open_joined(changing, "golden/advantages@1")
    assert "rewards" not in joined.shards
    assert str(joined.shards["advantages"].version.ref) == "golden/advantages@1"


def test_tokens_have_their_ratio_to_the_model_that_scored_again(golden):
    tokens = open_joined(golden, "ppo/policy@1").tokens(3)
    (rollout,) = golden.open("golden/rollouts@1").table().slice(3, 1).to_pylist()
    reference, weighed = (
        {row["rollout_id"]: row for row in golden.open(ref).table().to_pylist()}
        for ref in ("golden/logprobs@1", "ppo/advantages@1")
    )
    assert tokens.ids == rollout["completion_ids"]
    assert tokens.numbers["logprob"] == rollout["old_logprobs"]
    scored = np.array(reference[rollout["rollout_id"]]["logprobs"])
    ratios = np.exp(scored - np.array(rollout["old_logprobs"]))
    np.testing.assert_allclose(tokens.numbers["ratio ref"], ratios, rtol=1e-12)
    expected = weighed[rollout["rollout_id"]]["advantage"]
    assert tokens.numbers["advantage"] == expected
    assert len(set(expected)) == len(expected), "one a token"


def test_what_comes_of_no_rollouts_is_refused(golden):
    with pytest.raises(LineageError, match="it was not made from rollouts"):
        open_joined(golden, "golden/policy@0")


def test_a_part_and_a_mean_logprob_are_numbers_too(golden):
    joined: Joined = open_joined(golden, "golden/rewards@1")
    rows = joined.rows(range(16))
    assert joined.number("part evenness").tolist() == [row["parts"]["evenness"] for row in rows]
    logprobs = golden.open("golden/rollouts@1").table()["old_logprobs"].to_pylist()
    expected = [np.mean(np.array(each, np.float64)) for each in logprobs]
    np.testing.assert_allclose(joined.number("logprob"), expected, rtol=1e-12)
    assert joined.number("tokens").tolist() == [len(each) for each in logprobs]


def rewrite(store: Store, ref: str, change) -> None:
    """Replace the one file of a version by what `change` makes of its table, as if it had been
    written so: sizes, hashes and checksum fit."""
    version = store.open(ref)
    path = version.files.path(version.files.names[0])
    sink = pa.BufferOutputStream()
    table = change(version.table())
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    content = sink.getvalue().to_pybytes()
    path.unlink()  # it is mapped
    path.write_bytes(content)
    (entry,) = version.manifest.files
    update = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest = version.manifest.model_copy(update={"files": (entry.model_copy(update=update),)})
    version.files.path("manifest.json").write_bytes(manifest.to_json())


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table.drop_columns("finish_reason"),
        lambda table: table.set_column(4, "completion_ids", table["completion_text"]),
    ],
    ids=["a column is missing", "a column is of another type"],
)
def test_a_file_of_another_schema_is_told(changing, change):
    rewrite(changing, "golden/rollouts@1", change)
    joined = open_joined(changing, "golden/rewards@1")
    with pytest.raises(CorruptError, match=r"its column \w+ is missing, or not"):
        joined.rows([0])


def test_rollouts_that_are_none_are_refused(changing):
    version = changing.open("golden/rewards@1")
    inputs = [entry.model_copy(update={"role": "rollouts"}) for entry in version.manifest.inputs]
    manifest = version.manifest.model_copy(update={"inputs": tuple(inputs[1:])})
    version.files.path("manifest.json").write_bytes(manifest.to_json())
    with pytest.raises(
        LineageError, match="its rollouts must be a version of rollouts, found golden/prompts@1"
    ):
        open_joined(changing, "golden/rewards@1")


def test_all_rows_are_one_table_with_the_cells_of_each_row(golden, shuffled):
    """Of every kind that a chain has: an advantage for each token, groups that were dropped, and
    rewards in another order."""
    for store, run, kind in (
        (golden, "golden", "policy"),
        (golden, "golden", "advantages"),
        (shuffled, "bench", "rewards"),
    ):
        for number in filter(None, store.numbers(run, kind)):  # policy@0 learned from nothing
            joined = open_joined(store, f"{run}/{kind}@{number}")
            table = quiver.rows(store, joined.ref)
            assert table["rollout_id"].equals(joined.rollouts.column("rollout_id"))
            rows = joined.rows(range(len(joined)))
            for row, cells in zip(rows, table.to_pylist(), strict=True):
                names = row.keys() & cells.keys() - {"columns", "turns"}
                assert {"prompt", "tokens", "reward", "parts"} <= names
                for name in names:
                    is_number = isinstance(cells[name], float)
                    assert row[name] == (pytest.approx(cells[name]) if is_number else cells[name])
