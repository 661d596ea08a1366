"""The runner: what is finished is found, what is made is made in a process of its own, and errors
keep their type on the way back."""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from quiver import run_stage
from quiver.schemas.errors import ConfigError, LineageError
from quiver.schemas.refs import KINDS
from quiver.stages import MODULES
from quiver.stages.core.run import runner, stage_process
from quiver.stages.core.run.call import Call, Where, quiver_version
from quiver.stages.core.run.roles import RequiredRefs, kind_of
from quiver.stages.core.run.runner import find_or_make, find_outcome
from quiver.stages.core.run.stage import Plan, is_made_alike
from quiver.stages.core.run.stage_process import StageProcess, run_call
from quiver.stages.core.store import Store
from quiver.stages.core.store.retention import remove
from tests.stages.core.store.test_store import Settings, commit
from tests.tiny import make_folder


def answer_of(tmp_path, **fields):
    """Exit code, answer and stderr of a stage's process for a call with these fields."""
    call = {"refs": {}, "quiver": quiver_version(), **fields}
    (tmp_path / "call.json").write_text(json.dumps(call))
    done = subprocess.run(
        [sys.executable, "-m", "quiver.stages", "policy", str(tmp_path)],
        input="\n",
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, json.loads((tmp_path / "answer.json").read_text()), done.stderr


def test_an_unexpected_error_is_told_as_such(store, tmp_path):
    """Not as a dead process, and not with advice to try again."""
    call = {"stage": "policy", "store": store.url, "into": "a"}
    code, answer, _ = answer_of(tmp_path, **call, config={"model": 3})
    error = answer["error"]
    assert (code, error["code"], error["object"]) == (2, "E-CONFIG", "stage policy")
    code, answer, stderr = answer_of(tmp_path, **call, config={"model": "x"}, surprise=1)
    assert (code, answer["error"]["code"]) == (1, "E-INTERNAL")
    assert answer["error"]["message"].startswith("a bug in Quiver: TypeError: ")
    assert answer["error"]["next"].startswith("report it") and "Traceback" in stderr


def other_python(folder, version):
    """An interpreter like this one, in whose environment another version of Quiver is installed."""
    about = folder / f"quiver_rl-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: quiver-rl\nVersion: {version}\n")
    python = folder / "python"
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    python.write_text(f'#!/bin/sh\nPYTHONPATH={path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return str(python)


@pytest.mark.parametrize("version", ["9.9.9", "0.0.1"])
def test_the_caller_says_which_interpreter_has_another_version(store, tmp_path, version):
    """The child refuses the call; the caller, who knows whom it started, says so."""
    python = other_python(tmp_path, version)
    model = {"model": str(make_folder(tmp_path / "model"))}
    with pytest.raises(ConfigError) as caught:
        run_call(Call("policy", model, store.url, into="b", where=Where(python=python)))
    assert caught.value.code == "E-CONFIG"
    assert caught.value.object == f"interpreter {python}"
    assert caught.value.message == f"has Quiver {version}, expected {quiver_version()}"
    assert list(store.versions()) == []


def test_a_child_refuses_the_call_of_another_version(store, tmp_path):
    call = {"stage": "policy", "store": store.url, "into": "a", "config": {"model": "x"}}
    code, answer, _ = answer_of(tmp_path, **call, quiver="0.0.1")
    assert (code, answer["error"]["code"]) == (2, "E-CONFIG")
    assert answer["error"]["object"] == f"interpreter {sys.executable}"
    assert answer["error"]["message"] == f"has Quiver {quiver_version()}, expected 0.0.1"
    assert answer["quiver"] == quiver_version()


def test_a_typed_error_crosses_the_process(store):
    call = Call("policy", {"model": str(Path(store.url) / "nowhere")}, store.url, into="b")
    with pytest.raises(ConfigError, match="there is no such directory") as caught:
        run_call(call)
    assert caught.value.next == "correct policy.model"


def test_finished_work_is_found_without_a_child(store, tmp_path):
    call = Call("policy", {"model": str(make_folder(tmp_path / "model"))}, store.url, into="b")
    assert find_outcome(call) is None
    first = run_call(call)
    assert (first.ref, first.cached) == ("b/policy@0", False)
    again = find_outcome(call)
    assert (again.ref, again.cached) == ("b/policy@0", True)
    assert run_call(call) == again, (
        "another process finished it since: its seconds are the manifest's"
    )
    model = {"model": str(tmp_path / "model")}
    assert str(run_stage("policy", model, store, into="b")) == "b/policy@0"


def test_what_can_not_be_shared_or_is_no_stage_says_so(store, policy):
    call = Call("policy", {"model": store.url}, store.url, into="c", share=True)
    with pytest.raises(ConfigError, match=r"cannot be shared|config\.json"):
        find_or_make(call)
    with pytest.raises(ConfigError, match="expected one of policy, prompt"):
        find_outcome(Call("promt", {}, store.url))


@pytest.mark.parametrize(
    ("stage", "refs", "words"),
    [
        ("generate", {"prompts": "a/rollouts@1", "policy": "a/policy@0"}, "rollouts@1.* of prompts"),
        ("generate", {"prompts": "a/prompts@1", "policy": "a/rewards@2"}, "rewards@2.* of policy"),
        ("logprobs", {"rollouts": "a/prompts@1", "policy": "a/policy@0"}, "prompts@1.* of rollouts"),
        ("subset", {"rollouts": "a/prompts@best"}, "prompts@best.* of rollouts"),
        ("override", {"rewards": "a/rollouts@1"}, "rollouts@1.* of rewards"),
        ("average", {"reference": "a/rollouts@1", "policy": "a/policy@0"}, "rollouts@1.* of policy"),
        ("reward", {"rollouts": "a/rollouts@1", "retry": "a/policy@0"}, "policy@0.* of rewards"),
        ("evaluate", {"baseline": "a/rewards@1"}, "rewards@1.* of evaluations"),
        ("optimize", {"policy": "a/policy@0", "rollouts": ["a/rollouts@1", "a/rewards@1"]}, "rewards@1.* of rollouts"),
        ("optimize", {"ref_logprobs": ["a/rollouts@2"]}, "rollouts@2.* of logprobs"),
        ("prompt", {"policy": "a/policy@0", "rewards": "a/policy@0"}, "policy@0.* of rewards"),
    ],
)  # fmt: skip
def test_a_version_of_another_kind_is_refused_to_every_stage(stage, refs, words):
    """Before anything is opened: no store is needed."""
    given = RequiredRefs(stage, refs)
    with pytest.raises(LineageError, match=words):
        for role in refs:
            given[role]
    with pytest.raises(LineageError, match=words):
        for role in refs:
            given.get(role)


def test_every_role_of_a_stage_has_a_kind():
    """A new role has a kind's name, or is entered beside it."""
    asked = set()
    for module in MODULES.values():
        source = Path(find_spec(module).origin).read_text()
        asked.update(re.findall(r'\brefs(?:\.get\(|\[)"(\w+)"', source))
    assert len(asked) > 6
    assert {kind_of(role) for role in asked} <= set(KINDS)


def test_a_stage_that_knows_no_ranks_is_refused_to_the_second_one(store, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    call = Call("policy", {"model": str(make_folder(tmp_path))}, store.url, into="a")
    with pytest.raises(ConfigError, match="cannot be shared among ranks"):
        find_or_make(call)


@pytest.fixture
def second_rank(monkeypatch):
    """Performs a call as a rank beside the first; `make` and `sleep` are what the stage and the
    first rank do meanwhile."""

    def start(
        store, force, make=lambda plan, writers: None, sleep=lambda _: pytest.fail("it waits")
    ):
        about = {"stage": "logprobs", "stage_version": 1, "config": Settings(), "inputs": {}}
        plan = Plan(store=store, run="a", kinds=("logprobs",), **about)
        planned = {"Config": Settings, "plan": lambda *_: plan}
        stage = SimpleNamespace(RANKS=True, make=make, **planned)
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setattr(runner, "load_stage", lambda name: stage)
        monkeypatch.setattr(runner.time, "sleep", sleep)
        return find_or_make(Call("logprobs", {}, store.url, force=force), store).ref

    return start


def test_a_rank_that_does_not_write_waits_for_the_new_version_when_forced(store, second_rank):
    """Not for the one that was there before."""
    commit(store)
    # the first rank publishes while this one waits
    made = second_rank(store, True, sleep=lambda _: commit(store, force=True))
    assert made == "a/logprobs@2"


def test_it_finds_the_new_version_too_if_an_older_one_was_deleted_by_hand(bucket, second_rank):
    """The repetition is then higher than the count of the versions."""
    store = Store(bucket.url)
    first = commit(store)
    commit(store, force=True)
    store.storage.delete(f"{first.ref.folder}/")
    made = second_rank(store, True, sleep=lambda _: commit(store, force=True))
    assert made == "a/logprobs@3"


def test_it_waits_for_a_version_that_is_made_again(store, second_rank):
    first = commit(store)
    remove(store, first.ref)
    assert second_rank(store, False, make=lambda plan, writers: commit(store)) == "a/logprobs@2"


def test_what_another_release_of_a_stage_made_is_not_made_alike(store):
    """With the same config: the stage's version says that its numbers changed."""
    first, again, newer = (
        commit(store, stage_version=version, force=True).manifest for version in (1, 1, 2)
    )
    assert is_made_alike(first, again) and not is_made_alike(first, newer)


def test_a_config_with_a_key_that_is_gone_is_not_made_alike(store):
    """Such as `iteration` of generate, which is called `round` now."""
    now = commit(store).manifest.model_copy(
        update={"stage": "generate", "config": {"engine": "scripted", "round": 1}}
    )
    before = now.model_copy(update={"config": {"engine": "scripted", "iteration": 1}})
    assert not is_made_alike(now, before)
    assert is_made_alike(before, before)


def test_one_process_does_the_calls_of_all_stages_and_fails_once(tmp_path, monkeypatch):
    make_folder(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text('{"question": "What is 1 plus 5?"}\n')
    store = Store(tmp_path / "store")
    policy = Call("policy", {"model": str(tmp_path / "model")}, store.url, into="a")
    config = {"source": str(tmp_path / "rows.jsonl"), "prompt": "question"}
    prompt = Call("prompt", config, store.url, {"policy": "a/policy@0"}, into="a", force=True)
    started = []
    monkeypatch.setattr(
        stage_process,
        "StageProcess",
        lambda *about: started.append(StageProcess(*about)) or started[-1],
    )
    with stage_process.one_child_for_any_stage():
        stage_process.start_ahead("generate", {})  # needs none
        refs = [run_call(call).ref for call in (policy, prompt, prompt)]
        assert refs == ["a/policy@0", "a/prompts@1", "a/prompts@2"]
        with pytest.raises(ConfigError, match="there is no such"):
            run_call(Call("policy", {"model": str(tmp_path / "none")}, store.url, into="b"))
    assert len(started) == 1 and started[0].process.poll() is not None
