"""[data] curriculum: which rows are asked by what earlier rewards measured of them."""

import json
from types import SimpleNamespace

import pyarrow as pa
import pytest

from quiver.schemas import prompts as prompts_kind
from quiver.schemas.errors import ConfigError, LineageError
from quiver.stages.core.config import parse
from quiver.stages.core.run.runner import run_stage
from quiver.stages.prompt.order import NEVER, OUTSIDE, WITHIN, choose, choose_rows
from quiver.stages.prompt.stage import Config
from tests.stages.optimize.world import write_rewards

ROWS = 8
MIDDLE = {"low": 0.25, "high": 0.75, "iterations": 9}


@pytest.fixture
def source(tmp_path):
    return write(tmp_path / "rows.jsonl", "What is {} plus 5?")


def write(path, question):
    rows = [{"question": question.format(number)} for number in range(ROWS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def prompts_of(store, source, round, *rewards, curriculum=MIDDLE, **fields):
    """The prompts version of a round that takes four rows."""
    about = {"source": source, "prompt": "question", "limit": 4, "seed": 7, "round": round}
    config = Config(**{**about, "curriculum": curriculum, **fields})
    refs = {"rewards": [str(version.ref) for version in rewards]} if rewards else {}
    ref = run_stage("prompt", config, store, in_process=True, policy="tiny/policy@0", **refs)
    return store.open(ref)


def score(store, prompts, *means, **fields):
    """Rewards of two answers to each prompt, by the row's number: of these means; None: no
    answer is scored."""
    config = {"engine": "scripted", "samples_per_prompt": 2, "sampling": {"max_tokens": 8}}
    config |= fields
    refs = {"prompts": prompts.ref, "policy": "tiny/policy@0"}
    rollouts = store.open(run_stage("generate", config, store, in_process=True, **refs))

    def reward(row):
        mean = means[int(row["group_id"]) % len(means)]
        return mean if mean is None else mean + 0.1 * (-1) ** row["sample_index"]

    return write_rewards(store, rollouts, reward)


def rows_of(prompts) -> list[int]:
    return [int(group) for group in prompts.table()["group_id"].to_pylist()]


def counts(prompts) -> tuple[int, ...]:
    """Of how many rows it is said that they were not asked, lie within, lie outside."""
    found = prompts.manifest.metrics["curriculum"]
    return tuple(found[name] for name in (NEVER, WITHIN, OUTSIDE))


def test_rows_that_were_never_asked_come_in_their_usual_order(store, policy, source):
    first = prompts_of(store, source, 1)
    assert rows_of(first) == choose(ROWS, 4, 7, 1)
    second = prompts_of(store, source, 2, score(store, first, 0.5))
    assert rows_of(second) == choose(ROWS, 4, 7, 2)
    assert counts(first) == counts(second) == (4, 0, 0)


def test_then_those_within_the_bounds_and_the_longest_unasked_first(store, policy, source):
    first = prompts_of(store, source, 1)
    second = prompts_of(store, source, 2, scored := score(store, first, 0.5, 1.0))
    others = score(store, second, 0.5, 0.0)
    third = prompts_of(store, source, 3, scored, others)
    even = [row for version in (first, second) for row in rows_of(version) if row % 2 == 0]
    assert len(even) == 4
    assert set(rows_of(third)) == set(even)
    asked_first = {row for row in rows_of(first) if row % 2 == 0}
    assert set(rows_of(third)[: len(asked_first)]) == asked_first
    assert counts(third) == (0, 4, 0)


@pytest.mark.parametrize("stage", ["prompt", "generate"])
def test_rows_that_were_dropped_are_not_asked_for_ever(store, policy, tmp_path, stage):
    """They never get a reward. Odd rows are too long, for the prompt stage or for generate."""
    rows = [{"question": "What is it? " * (1 + 20 * (number % 2))} for number in range(ROWS)]
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    limits = {"max_prompt_tokens": 60, "overlong": "drop"} if stage == "prompt" else {}
    drops = {"overlong": "drop", "max_model_len": 60} if stage == "generate" else {}
    scored: list = []
    for round in range(1, 6):
        prompts = prompts_of(store, str(source), round, *scored, **limits)
        scored.append(score(store, prompts, 1.0, **drops))
    asked = scored[-1].table()["group_id"].unique().to_pylist()
    assert sorted(map(int, asked)) == [0, 2, 4, 6]


def test_more_than_a_thousand_dropped_rows_were_asked(store, policy, tmp_path, monkeypatch, caplog):
    """Manifests list them, as long as they are short; what a list lacks is told."""
    source = tmp_path / "rows.jsonl"
    rows = [{"question": "What is it? " * (20 if n >= 10 else 1)} for n in range(1100)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    drops = {"overlong": "drop", "max_model_len": 60, "samples_per_prompt": 1}
    first = prompts_of(store, str(source), 1, limit=1100)
    scored = score(store, first, 0.4, **drops)
    assert counts(prompts_of(store, str(source), 2, scored, limit=1100)) == (0, 10, 1090)
    assert "are listed" not in caplog.text
    monkeypatch.setattr(prompts_kind, "_MOST_LISTED_BYTES", 1000)
    scored = score(store, first, 0.4, **drops, seed=1)
    not_asked, *_ = counts(prompts_of(store, str(source), 2, scored, limit=1100))
    assert 0 < not_asked < 1090
    told = f"tiny/rollouts@2: {1090 - not_asked} of 1090 dropped rows are listed"
    assert told in caplog.text


def test_where_too_few_lie_within_the_others_fill_the_round(store, policy, source):
    first = prompts_of(store, source, 1)
    scored = score(store, first, 1.0)
    others = score(store, prompts_of(store, source, 2, scored), 0.5, *[0.0] * 7)
    third = prompts_of(store, source, 3, scored, others)
    assert counts(third) == ((0, 1, 3) if 0 not in rows_of(first) else (0, 0, 4))
    outside = rows_of(third)[counts(third)[1] :]
    assert set(outside) <= set(rows_of(first)), "those that were asked first wait the longest"


def test_the_last_mean_counts_and_the_bounds_are_within(store, policy, source):
    first = prompts_of(store, source, 1)
    hard, middle = score(store, first, 0.0), score(store, first, 0.5)
    for scored, expected in [
        ([score(store, first, 0.25, 0.75)], (4, 4, 0)),
        ([score(store, first, None)], (4, 4, 0)),  # neither too easy nor too hard
        ([hard, middle], (4, 4, 0)),
        ([middle, hard], (4, 0, 4)),
    ]:
        assert counts(prompts_of(store, source, 2, *scored, limit=8)) == expected


@pytest.mark.parametrize(
    ("bounds", "rewards"),
    [
        ({"low": 0.7, "high": 0.9}, (0.7, 0.7)),
        ({"low": 0.7, "high": 0.9}, (0.4, 1.0)),
        ({"low": 0.0, "high": 0.1}, (0.1, 0.1)),
        ({"low": -0.1, "high": 0.0}, (-0.1, -0.1)),
        ({"low": 700.7, "high": 900.0}, (700.7, 700.7)),
    ],
)
def test_a_mean_at_a_bound_is_within_though_rewards_are_float32(bounds, rewards):
    config = Config(source="rows.jsonl", limit=1, round=2, curriculum={**MIDDLE, **bounds})
    table = pa.table({"group_id": ["a"] * 2, "reward": pa.array(rewards, pa.float32())})
    about = {"source_sha256": "", "group_id": None, "group_prefix": ""}
    manifest = SimpleNamespace(input=lambda role: None, config=about)
    scored = SimpleNamespace(manifest=manifest, ref="r/rewards@1", table=table.select)
    store = SimpleNamespace(with_expired=lambda: None)
    _, found = choose_rows(config, ["a"], [scored], store)
    assert found == {NEVER: 0, WITHIN: 1, OUTSIDE: 0}


def test_what_is_not_given_is_forgotten(store, policy, source):
    """A row that was too hard has its turn again."""
    first = prompts_of(store, source, 1)
    second = score(store, prompts_of(store, source, 2, score(store, first, 0.0)), 0.5)
    third = prompts_of(store, source, 3, second)
    assert set(rows_of(third)) == set(rows_of(first))
    assert counts(third) == (4, 0, 0)


def test_the_lineage_and_the_key_name_the_rewards(store, policy, source):
    first = prompts_of(store, source, 1)
    one, two = score(store, first, 0.5), score(store, first, 0.4)
    chosen = prompts_of(store, source, 2, one, two)
    inputs = {entry.role: entry.ref for entry in chosen.manifest.inputs}
    assert inputs == {"rewards": str(one.ref), "rewards.2": str(two.ref)}
    assert prompts_of(store, source, 2, one, two).ref == chosen.ref
    assert prompts_of(store, source, 2, two, one).ref != chosen.ref
    longer = {**MIDDLE, "iterations": 50}
    assert prompts_of(store, source, 2, one, two, curriculum=longer).ref == chosen.ref
    assert prompts_of(store, source, 2, one, two, curriculum={**MIDDLE, "low": 0}).ref != chosen.ref


def test_rewards_of_other_rows_are_refused(store, policy, source, tmp_path):
    scored = score(store, prompts_of(store, source, 1), 0.5)
    other = write(tmp_path / "other.jsonl", "How much is {}?")
    with pytest.raises(LineageError, match=r"measured rows of .*rows.jsonl"):
        prompts_of(store, other, 2, scored)
    with pytest.raises(LineageError, match=r"not the current rows of .*rows.jsonl"):
        prompts_of(store, source, 2, scored, group_prefix="new-")  # no row has these names
    with pytest.raises(ConfigError, match=r"has no data.curriculum that would use them"):
        prompts_of(store, source, 2, scored, curriculum=None)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"limit": None}, "set limit"),
        ({"curriculum": {**MIDDLE, "low": 0.8}}, "low 0.8 is above high 0.75"),
        ({"curriculum": {"low": 0.0, "high": 1.0}}, "curriculum.iterations is missing"),
    ],
)
def test_what_could_choose_nothing_is_refused(fields, said):
    given = {"source": "rows.jsonl", "limit": 4, "curriculum": MIDDLE, **fields}
    with pytest.raises(ConfigError) as caught:
        parse(Config, given, "data", is_section=True)
    assert said in caught.value.message
