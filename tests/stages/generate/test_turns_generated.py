"""generate with an environment: what the engine reads, whose seeds, faults, restarts, order."""

import json
import multiprocessing
import os
import signal
import time
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from quiver.schemas.errors import ConfigError, QuiverError
from quiver.stages.core.config import parse
from quiver.stages.core.run.runner import run_stage
from quiver.stages.core.store import Store, Version
from quiver.stages.generate.rows import row_seed
from quiver.stages.generate.stage import Config
from quiver.stages.model.loading import load_model
from quiver.stages.turns.environment import environment_seed
from tests.episodes import own_logprobs
from tests.stages.generate import guessing, making
from tests.tiny import CHATML, EOS, make_policy, tokenizer

stage_run = partial(run_stage, "generate", in_process=True)
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


def run(store, policy, names, prompts=None, **changed) -> Version:
    """Rollouts of the game, by a script or an engine."""
    given = config(names, **changed)
    if prompts is None:
        prompts = guessing.render(store, policy, names, arguments=given.turns.arguments)
    return store.open(stage_run(given, store, prompts=prompts.ref, policy=policy.ref))


def test_the_game_takes_a_digit_that_is_no_decimal_for_a_wrong_guess():
    names = {}
    exec(guessing.GAME, names)
    game = names["Guess"]()
    game.reset(5, 3, 1)
    assert game.step(SimpleNamespace(text="²"))["text"] == "higher"


def rows_of(version: Version) -> list[dict]:
    return version.table().to_pylist()


def why_failed(row: dict) -> str:
    assert row["end_reason"] in ("environment_error", "timeout")
    assert {turn["reward"] for turn in row["turns"]} == {None}
    return json.loads(row["turns"][-1]["info"])["quiver_failure"]


def test_the_engine_reads_prompt_turns_and_observations_and_nothing_else(
    store, policy, names, tmp_path, monkeypatch
):
    monkeypatch.setenv("READ_LOG", str(tmp_path / "read.jsonl"))
    rows = rows_of(run(store, policy, names, seed=1))
    read = [json.loads(line) for line in (tmp_path / "read.jsonl").read_text().splitlines()]
    expected = []
    reasons = set()
    for row in rows:
        level = int(row["group_id"])
        turns = row["turns"]
        assert len(row["completion_ids"]) == len(row["old_logprobs"])
        for count in range(len(turns)):
            ids = guessing.read_ids(row, count)
            chat = guessing.conversation(level, turns[:count])
            assert ids == guessing.rendered(chat, generation=True)
            expected.append(ids)
        number = guessing.number_of(environment_seed(row["group_id"]))
        guesses = guessing.guesses_of(row)
        is_right = guesses[-1] == number
        reasons.add(row["end_reason"])
        assert row["end_reason"] == ("environment" if is_right else "max_turns")
        assert is_right or len(guesses) == 4
        hints = ["higher" if guess < number else "lower" for guess in guesses]
        hints[-1] = "right" if is_right else hints[-1]
        assert [turn["observation"] for turn in turns] == hints
        rewards = [0.25] * (len(guesses) - 1) + [1.0 if is_right else 0.25]
        assert [turn["reward"] for turn in turns] == rewards
        assert turns[-1]["observation_ids"] == []
        assert (row["finish_reason"], row["stop_reason"]) == ("stop", str(EOS))
        assert row["completion_text"] == str(guesses[-1])
    assert Counter(map(tuple, read)) == Counter(map(tuple, expected))
    assert reasons == {"environment", "max_turns"}
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
    ref = run_stage("prompt", prompt_config, store, in_process=True, policy=str(policy.ref))
    turns = {"rewritten": "append"}
    row = rows_of(run(store, policy, names, store.open(ref), turns=turns))[0]
    for ids in (row["prompt_ids"], row["turns"][0]["observation_ids"]):
        assert tokenizer().decode(ids).endswith("<|im_start|>seven")


def test_each_turn_has_a_seed_of_its_own(store, policy, names):
    guessing.Watching.asked.clear()
    row = rows_of(run(store, policy, names, engine=f"{MAKING}:Watching", options={}, seed=3))[4]
    asked = guessing.Watching.asked
    for turn in range(4):
        seed = row_seed(3, 0, row["group_id"], row["sample_index"], turn)
        assert asked[4, turn] == (seed, 8)
    assert row["seed"] == row_seed(3, 0, row["group_id"], row["sample_index"])
    assert len({seed for seed, _ in asked.values()}) == 12 * 4


def test_an_id_that_stops_a_turn_within_its_text_does_not_stand_for_the_templates_end(
    store, policy, names
):
    """As a stop string does not. The text that the policy wrote is decoded without it."""
    sampling = {"max_tokens": 8, "stop_token_ids": guessing.DOTTED[-1:]}
    given = {"engine": f"{MAKING}:Dotting", "options": {}, "sampling": sampling}
    first = rows_of(run(store, policy, names, **given))[0]["turns"][0]
    seen = tokenizer().decode(first["observation_ids"])
    hint = first["observation"]
    assert seen == f"<|im_end|>\n<|im_start|>user\n{hint}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        ("hang 2", "step_seconds 1"),
        ("die 2", "code 7"),
        ("raise 2", "RuntimeError: the dice are lost"),
        ("shape 2", "message 0 has a list, expected role and content"),
    ],
)
def test_an_environment_that_fails_costs_its_own_episodes(
    store, policy, names, caplog, broken, why
):
    whole_rows = rows_of(run(store, policy, names, turns={"step_seconds": 1.0}))
    turns = {"arguments": {"broken": broken}, "step_seconds": 1.0}
    version = run(store, policy, names, turns=turns)
    for row, whole in zip(rows_of(version), whole_rows, strict=True):
        if row["group_id"].endswith("2"):
            assert why in why_failed(row)
        else:
            for name in ("completion_ids", "end_reason"):
                assert row[name] == whole[name]
    assert version.manifest.metrics["failed"] == 3
    assert "3 of 12 episodes failed; " in caplog.text


ORDERED = {"engine": f"{MAKING}:Ordered", "options": {}}


@pytest.mark.parametrize(
    ("engine", "broken", "variable", "why", "num_failed"),
    [
        ({}, "reset 1", "RESET_WORKS", "no number", 3),
        ({}, "fickle", "RENDERING", "begins differently", 12),
        ({}, "silent", "RENDERING", "begins differently", 12),
        ({}, "talkative", "RENDERING", "begins differently", 12),
        (ORDERED, "reset 1", "RESET_WORKS", "no number", 3),
        (ORDERED, "fickle", "RENDERING", "begins differently", 12),
    ],
)
def test_an_environment_that_begins_otherwise_than_its_prompt_says_has_failed(
    store, policy, names, monkeypatch, engine, broken, variable, why, num_failed
):
    """After its first turn, and while an engine that takes several samples it. It raises, says
    another thing each time, says nothing any more, or differs but in its last message."""
    turns = {"arguments": {"broken": broken}}
    monkeypatch.setenv(variable, "yes")
    prompts = guessing.render(store, policy, names, **turns)
    monkeypatch.delenv(variable)
    rows = rows_of(run(store, policy, names, prompts, turns=turns, **engine))
    failed = [row for row in rows if row["end_reason"] == "environment_error"]
    assert len(failed) == num_failed and all(why in why_failed(row) for row in failed)


def test_turns_that_can_be_sampled_go_before_new_rows(store, policy, names):
    order = guessing.Ordered.order
    order.clear()
    run(store, policy, names, **ORDERED, seed=1)
    assert len(order) == 12 * 4
    assert sorted(index for index, turn in order if turn == 0) == list(range(12))
    # no more than three rows are ever with the engine, so the first ended before the last began
    assert order.index((0, 3)) < order.index((11, 0))


def test_shards_and_restarts_change_nothing(store, policy, names, monkeypatch):
    expected = run(store, policy, names).table()
    monkeypatch.setenv("SCRIPT", names["script"])
    tired = {"engine": f"{MAKING}:Tires", "options": {}, "rows_per_shard": 2}
    with pytest.raises(ConfigError, match="raised RuntimeError: tired"):
        run(store, policy, names, **tired)
    monkeypatch.setenv("AWAKE", "yes")
    version = run(store, policy, names, **tired)
    assert len(version.manifest.files) == 6
    for name in ("completion_ids", "end_reason", "completion_text", "seed", "prompt_ids"):
        assert version.table()[name].equals(expected[name])


def test_other_environments_and_limits_are_other_work(store, policy, tmp_path):
    names = guessing.write_game(tmp_path / "game")
    prompts = guessing.render(store, policy, names)
    refs = [
        run(store, policy, names, prompts, turns=turns).ref
        for turns in ({}, {"max_turns": 2}, {"processes": 1})
    ]
    assert refs[0] == refs[2] != refs[1]
    none = run(store, policy, names, prompts, max_model_len=2, overlong="drop")
    assert (none.manifest.kind_schema, none.manifest.rows) == ("rollouts/2", 0)
    path = Path(names["environment"].rpartition(":")[0])
    path.write_text(path.read_text() + "\n# edited\n")
    assert guessing.render(store, policy, names).ref != prompts.ref
    for changed, rendered, why in [
        ({}, prompts, "rendered for another environment"),
        ({"environment": "x.py:Other"}, prompts, "there is no file"),
        ({}, making.make_prompts(store, [[5, 6, 7]]), r"rendered without \[generate.turns\]"),
    ]:
        with pytest.raises(ConfigError, match=why):
            run(store, policy, names, rendered, turns=changed)
    with pytest.raises(QuiverError, match="cannot begin with prompt 000003: ValueError"):
        guessing.render(store, policy, names, arguments={"broken": "reset 3"})


def test_transformers_samples_from_all_that_stood_before_each_turn(store, policy, names):
    sampling = {"max_tokens": 24, "temperature": 0.7, "stop_token_ids": list(range(280, 300))}
    version = run(
        store,
        policy,
        names,
        engine="transformers",
        dtype="float32",
        options={"batch_size": 5},
        sampling=sampling,
        turns={"max_tokens": 48},
    )
    rows = rows_of(version)
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
    calm = run(store, policy, names, prompts, **stage)
    settings = config(names, **stage)
    refs = {"prompts": prompts.ref, "policy": policy.ref, "into": f"killed-{kills}"}
    fork = multiprocessing.get_context("fork")
    work = Path(store.url) / f"killed-{kills}/rollouts/.work"
    for seconds in np.random.default_rng(0).uniform(0, 0.5, kills):
        found = shards_in(work)
        child = fork.Process(target=in_a_group_of_its_own, args=(settings, store.url, refs))
        child.start()
        while child.is_alive() and shards_in(work) == found:
            time.sleep(0.01)
        time.sleep(seconds)
        os.killpg(child.pid, signal.SIGKILL)
        child.join()
        assert child.exitcode == -signal.SIGKILL
    run_stage("generate", settings, Store(store.url), in_process=True, **refs)
    killed = store.open(f"killed-{kills}/rollouts@1")
    assert [*map(untimed, rows_of(killed))] == [*map(untimed, rows_of(calm))]


def in_a_group_of_its_own(settings, path: Path, refs: dict) -> None:
    """Generate; what it starts is killed with it."""
    os.setsid()
    run_stage("generate", settings, Store(path), in_process=True, **refs)


def shards_in(work: Path) -> int:
    """How many shards a killed stage would not do again."""
    return len(list(work.glob("*.notes/part-*.json")))


def untimed(row: dict) -> dict:
    """A row without the seconds that its environment took."""
    return {**row, "turns": [{**turn, "seconds": 0.0} for turn in row["turns"]]}
