"""generate with an environment: what the engine reads, whose seeds, faults, restarts, order."""

import json
import multiprocessing
import os
import signal
import time
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from quiver.schemas.errors import ConfigError, QuiverError
from quiver.stages.common.config import parse
from quiver.stages.common.environments.environment import environment_seed
from quiver.stages.common.models.loading import load_model
from quiver.stages.common.runtime.runner import run_stage
from quiver.stages.common.store import Store, Version
from quiver.stages.generate.rows import row_seed
from quiver.stages.generate.stage import Config
from tests.episodes import own_logprobs
from tests.stages.generate import guessing, making
from tests.tiny import CHATML, EOS, make_policy, tokenizer

run = partial(run_stage, "generate", in_process=True)
MAKING = "tests.stages.generate.guessing"


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    return guessing.write_game(tmp_path_factory.mktemp("turns") / "game")


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Store:
    """One for all, so that what two tests ask for is made once."""
    return Store(tmp_path_factory.mktemp("turns") / "store")


@pytest.fixture(scope="module")
def policy(store) -> Version:
    return make_policy(store)


def config(names, *, turns=(), script="play", **changed) -> Config:
    fields = {
        "engine": "scripted",
        "samples_per_prompt": 3,
        "sampling": {"max_tokens": 8},
        "options": {"script": names["script"].replace(":play", f":{script}")},
        "turns": {"environment": names["environment"], "max_turns": 4, **dict(turns)},
        **changed,
    }
    return parse(Config, fields, "generate")


def rows_of(store, policy, names, environment=(), **options) -> list[dict]:
    """Rows of the game, by a script or an engine; `environment`: its arguments."""
    given = {"arguments": dict(environment)} if environment else {}
    prompts = guessing.render(store, policy, names, **given)
    options["turns"] = {**given, **dict(options.get("turns", ()))}
    ref = run(config(names, **options), store, prompts=prompts.ref, policy=policy.ref)
    return store.open(ref).table().to_pylist()


def test_the_engine_reads_prompt_turns_and_observations_and_nothing_else(
    store, policy, names, tmp_path, monkeypatch
):
    monkeypatch.setenv("READ_LOG", str(tmp_path / "read.jsonl"))
    rows = rows_of(store, policy, names, seed=1)
    read = [json.loads(line) for line in (tmp_path / "read.jsonl").read_text().splitlines()]
    expected = []
    for row in rows:
        level = int(row["group_id"])
        assert len(row["completion_ids"]) == len(row["old_logprobs"])
        for count in range(len(row["turns"])):
            ids = guessing.read_ids(row, count)
            chat = guessing.conversation(level, row["turns"][:count])
            assert ids == guessing.rendered(chat, generation=True)
            expected.append(ids)
    assert Counter(map(tuple, read)) == Counter(map(tuple, expected))
    assert max(len(row["turns"]) for row in rows) > 2


def test_every_turn_is_written_with_the_arguments_of_the_template(store, policy, names, tmp_path):
    (tmp_path / "own.jinja").write_text(
        CHATML.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>{{ style }}{% endif %}")
    )
    prompt_config = {
        "source": names["source"],
        "prompt": "question",
        "reserve_tokens": 8,
        "template": str(tmp_path / "own.jinja"),
        "template_arguments": {"style": "seven"},
        "turns": {"environment": names["environment"]},
    }
    prompts = run_stage("prompt", prompt_config, store, in_process=True, policy=str(policy.ref))
    rewritten = config(names, turns={"rewritten": "append"})
    ref = run(rewritten, store, prompts=prompts, policy=policy.ref)
    row = store.open(ref).table().to_pylist()[0]
    for ids in (row["prompt_ids"], row["turns"][0]["observation_ids"]):
        assert tokenizer().decode(ids).endswith("<|im_start|>seven")


def test_what_an_episode_keeps(store, policy, names):
    rows = rows_of(store, policy, names)
    reasons = set()
    for row in rows:
        number = guessing.number_of(environment_seed(row["group_id"]))
        guesses = guessing.guesses_of(row)
        is_right = guesses[-1] == number
        reasons.add(row["end_reason"])
        assert row["end_reason"] == ("environment" if is_right else "max_turns")
        assert is_right or len(guesses) == 4
        assert number not in guesses[:-1]
        hints = ["higher" if guess < number else "lower" for guess in guesses]
        assert [turn["observation"] for turn in row["turns"]] == [
            *hints[:-1],
            "right" if is_right else hints[-1],
        ]
        assert [turn["reward"] for turn in row["turns"]] == [
            *[0.25] * (len(guesses) - 1),
            1.0 if is_right else 0.25,
        ]
        assert row["turns"][-1]["observation_ids"] == []
        assert (row["finish_reason"], row["stop_reason"]) == ("stop", str(EOS))
        assert row["completion_text"] == str(guesses[-1])
    assert reasons == {"environment", "max_turns"}


def test_each_turn_has_a_seed_of_its_own(store, policy, names):
    guessing.Watching.asked.clear()
    rows = rows_of(store, policy, names, engine=f"{MAKING}:Watching", options={}, seed=3)
    asked = guessing.Watching.asked
    row = rows[4]
    for turn in range(4):
        seed = row_seed(3, 0, row["group_id"], row["sample_index"], turn)
        assert asked[4, turn] == (seed, 8)
    assert row["seed"] == row_seed(3, 0, row["group_id"], row["sample_index"])
    assert len({seed for seed, _ in asked.values()}) == 12 * 4


@pytest.mark.parametrize(
    ("turns", "script", "reason", "lengths"),
    [
        ({"max_tokens": 7}, "play", "max_tokens", None),
        ({}, "talk", "max_tokens", [8]),
        ({"max_turns": 1}, "play", "max_turns", None),
    ],
)
def test_limits(store, policy, names, turns, script, reason, lengths):
    rows = rows_of(store, policy, names, turns=turns, script=script)
    assert reason in {row["end_reason"] for row in rows}
    most = turns.get("max_tokens", 100)
    assert all(len(row["completion_ids"]) <= most for row in rows)
    if lengths:
        assert all([turn["length"] for turn in row["turns"]] == lengths for row in rows)


@pytest.mark.parametrize(
    ("broken", "reason", "why"),
    [
        ("hang 2", "timeout", "step_seconds 1"),
        ("die 2", "environment_error", "code 7"),
        ("raise 2", "environment_error", "the dice are lost"),
        ("role 2", "environment_error", "expected a word of"),
        ("shape 2", "environment_error", "message 0 has a list, expected role and content"),
    ],
)
def test_an_environment_that_fails_costs_its_own_episodes(
    store, policy, names, broken, reason, why
):
    whole = rows_of(store, policy, names, turns={"step_seconds": 1.0})
    prompts = guessing.render(store, policy, names, arguments={"broken": broken}, step_seconds=1.0)
    broken_config = config(names, turns={"arguments": {"broken": broken}, "step_seconds": 1.0})
    ref = run(broken_config, store, prompts=prompts.ref, policy=policy.ref)
    rows = store.open(ref).table().to_pylist()
    for row, whole_row in zip(rows, whole, strict=True):
        if row["group_id"].endswith("2"):
            assert row["end_reason"] == reason
            assert why in json.loads(row["turns"][-1]["info"])["quiver_failure"]
            assert [turn["reward"] for turn in row["turns"]] == [None]
        else:
            for name in ("completion_ids", "end_reason"):
                assert row[name] == whole_row[name]
    metrics = store.open(ref).manifest.metrics
    assert metrics["end_reasons"][reason] == 3


@pytest.mark.parametrize("engine", [{}, {"engine": f"{MAKING}:Ordered", "options": {}}])
def test_an_environment_that_can_not_begin_again_fails_its_episodes(
    store, policy, names, monkeypatch, engine
):
    """After its first turn, and while an engine that takes several samples it."""
    monkeypatch.setenv("RESET_WORKS", "yes")
    broken = {"broken": "reset 1"}
    prompts = guessing.render(store, policy, names, arguments=broken)
    monkeypatch.delenv("RESET_WORKS")
    broken_config = config(names, turns={"arguments": broken}, **engine)
    ref = run(broken_config, store, prompts=prompts.ref, policy=policy.ref)
    rows = store.open(ref).table().to_pylist()
    failed = [row for row in rows if row["end_reason"] == "environment_error"]
    assert [row["group_id"] for row in failed] == ["000001"] * 3
    assert "no number" in json.loads(failed[0]["turns"][0]["info"])["quiver_failure"]


def test_one_that_begins_otherwise_than_its_prompt_says_is_told(store, policy, names):
    rows = rows_of(store, policy, names, environment={"broken": "fickle"})
    assert {row["end_reason"] for row in rows} == {"environment_error"}
    assert "begins otherwise" in json.loads(rows[0]["turns"][0]["info"])["quiver_failure"]


@pytest.mark.parametrize("broken", ["silent", "talkative"])
def test_every_message_of_its_beginning_counts(store, policy, names, monkeypatch, broken):
    """One that says nothing any more, and one whose last message alone is the same."""
    monkeypatch.setenv("RENDERING", "yes")
    environment = {"arguments": {"broken": broken}}
    prompts = guessing.render(store, policy, names, **environment)
    monkeypatch.delenv("RENDERING")
    given = config(names, turns=environment)
    version = store.open(run(given, store, prompts=prompts.ref, policy=policy.ref))
    rows = version.table().to_pylist()
    assert {row["end_reason"] for row in rows} == {"environment_error"}


def test_episodes_that_failed_are_told_in_the_log(store, policy, names, caplog):
    environment = {"arguments": {"broken": "raise 1"}}
    prompts = guessing.render(store, policy, names, **environment)
    given = config(names, turns=environment)
    with caplog.at_level("WARNING", logger="quiver.stages.generate.shards"):
        run(given, store, prompts=prompts.ref, policy=policy.ref, into="told", force=True)
    assert "3 of 12 episodes failed; RuntimeError: the dice are lost" in caplog.text


def test_turns_that_can_be_sampled_go_before_new_rows(store, policy, names):
    order = guessing.Ordered.order
    order.clear()
    rows_of(store, policy, names, engine=f"{MAKING}:Ordered", options={})
    assert len(order) == 12 * 4
    assert sorted(index for index, turn in order if turn == 0) == list(range(12))
    # no more than three rows are ever with the engine, so the first ended before the last began
    assert order.index((0, 3)) < order.index((11, 0))


def test_no_episode_is_a_version_with_turns_all_the_same(store, policy, names):
    prompts = guessing.render(store, policy, names)
    options = {"max_model_len": 2, "overlong": "drop"}
    version = store.open(
        run(config(names, **options), store, prompts=prompts.ref, policy=policy.ref, into="none")
    )
    assert (version.manifest.kind_schema, version.manifest.rows) == ("rollouts/2", 0)


def test_an_engine_that_gives_a_turn_up_ends_the_episode(store, policy, names):
    rows = rows_of(store, policy, names, engine=f"{MAKING}:GivesUp", options={})
    assert rows[0]["end_reason"] == "environment_error"
    assert [turn["length"] for turn in rows[0]["turns"]] == [2, 2]
    assert {row["end_reason"] for row in rows[1:]} == {"max_turns"}


def test_shards_and_restarts_change_nothing(store, policy, names, monkeypatch):
    prompts = guessing.render(store, policy, names)
    at_once = run(config(names), store, prompts=prompts.ref, policy=policy.ref)
    expected = store.open(at_once).table().drop_columns(["rollout_id", "turns"])

    monkeypatch.setenv("SCRIPT", names["script"])
    tired = config(names, engine=f"{MAKING}:Tires", options={}, rows_per_shard=2)
    with pytest.raises(RuntimeError, match="tired"):
        run(tired, store, prompts=prompts.ref, policy=policy.ref)
    monkeypatch.setenv("AWAKE", "yes")
    ref = run(tired, store, prompts=prompts.ref, policy=policy.ref)
    table = store.open(ref).table().drop_columns(["rollout_id", "turns"])
    assert len(store.open(ref).manifest.files) == 6
    for name in ("completion_ids", "end_reason", "completion_text", "seed", "prompt_ids"):
        assert table[name].to_pylist() == expected[name].to_pylist()


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"arguments": {"seconds": 0.001}}, "rendered for another environment"),
        ({"environment": "x.py:Other"}, "there is no file"),
    ],
)
def test_prompts_of_another_environment_are_refused(store, policy, names, changed, why):
    prompts = guessing.render(store, policy, names)
    with pytest.raises(ConfigError, match=why):
        run(config(names, turns=changed), store, prompts=prompts.ref, policy=policy.ref)


def test_prompts_without_an_environment_are_refused(store, policy, names):
    prompts = making.make_prompts(store, [[5, 6, 7]])
    with pytest.raises(ConfigError, match=r"rendered without \[generate.turns\]"):
        run(config(names), store, prompts=prompts.ref, policy=policy.ref)


def test_another_limit_is_another_version_and_the_same_prompts(store, policy, names):
    prompts = guessing.render(store, policy, names)
    refs = [
        run(config(names, turns=turns), store, prompts=prompts.ref, policy=policy.ref)
        for turns in ({}, {"max_turns": 2}, {"processes": 1})
    ]
    assert refs[0] == refs[2] != refs[1]


def test_edited_code_is_another_environment(store, policy, tmp_path):
    names = guessing.write_game(tmp_path / "game")
    first = guessing.render(store, policy, names)
    assert guessing.render(store, policy, names).ref == first.ref
    path = names["environment"].rpartition(":")[0]
    with open(path, "a") as file:
        file.write("\n# another\n")
    assert guessing.render(store, policy, names).ref != first.ref
    with pytest.raises(ConfigError, match="another environment"):
        run(config(names), store, prompts=first.ref, policy=policy.ref)


def test_a_prompt_that_can_not_begin_is_named(store, policy, names):
    with pytest.raises(QuiverError, match="cannot begin with prompt 000003: ValueError"):
        guessing.render(store, policy, names, arguments={"broken": "reset 3"})


def test_transformers_samples_from_all_that_stood_before_each_turn(store, policy, names):
    sampling = {"max_tokens": 24, "temperature": 0.7, "stop_token_ids": list(range(280, 300))}
    rows = rows_of(
        store,
        policy,
        names,
        engine="transformers",
        dtype="float32",
        options={"batch_size": 5},
        sampling=sampling,
        turns={"max_tokens": 48},
    )
    assert max(len(row["turns"]) for row in rows) == 4
    model = load_model(policy, dtype=torch.float32)
    for row in rows:
        with torch.no_grad():
            expected = own_logprobs(model, row).numpy()
        assert np.abs(expected - row["old_logprobs"]).max() < 1e-4
        assert len(row["completion_ids"]) <= 48


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.torture)])
def test_kill_9_changes_no_row(policy, store, names, kills):
    slow = {"arguments": {"seconds": 0.05}}
    prompts = guessing.render(store, policy, names, **slow)
    stage = {"rows_per_shard": 3, "samples_per_prompt": 3 * kills, "turns": slow}
    calm = run(config(names, **stage), store, prompts=prompts.ref, policy=policy.ref, into="calm")
    settings = config(names, **stage)
    refs = {"prompts": prompts.ref, "policy": policy.ref, "into": f"killed-{kills}"}
    fork = multiprocessing.get_context("fork")
    staging = store.path / f"killed-{kills}/rollouts/.staging"
    for seconds in np.random.default_rng(0).uniform(0, 0.5, kills):
        found = shards_in(staging)
        child = fork.Process(target=in_a_group_of_its_own, args=(settings, store.path, refs))
        child.start()
        while child.is_alive() and shards_in(staging) == found:
            time.sleep(0.01)
        time.sleep(seconds)
        os.killpg(child.pid, signal.SIGKILL)
        child.join()
        assert child.exitcode == -signal.SIGKILL
    run_stage("generate", settings, Store(store.path), in_process=True, **refs)
    tables = [store.open(ref).table() for ref in (calm, f"killed-{kills}/rollouts@1")]
    rows, rows_of_killed = ([untimed(row) for row in table.to_pylist()] for table in tables)
    assert rows_of_killed == rows


def in_a_group_of_its_own(settings, path: Path, refs: dict) -> None:
    """Generate; what it starts is killed with it."""
    os.setsid()
    run_stage("generate", settings, Store(path), in_process=True, **refs)


def shards_in(staging: Path) -> int:
    """How many shards a killed stage would not do again."""
    return len(list(staging.rglob("part-*.arrow.json")))


def untimed(row: dict) -> dict:
    """A row without the seconds that its environment took."""
    return {**row, "turns": [{**turn, "seconds": 0.0} for turn in row["turns"]]}
