"""Processes that are there before their call is, and engines that start before their checkpoint is
committed."""

import subprocess
import sys
import textwrap
from contextlib import contextmanager

import pytest

from quiver.schemas.errors import CorruptError
from quiver.stages.common import announced, child, early
from quiver.stages.common.early import Hint
from quiver.stages.common.process import Call, run_stage
from quiver.stages.common.store import Store, Version
from quiver.stages.common.work import Work, begin
from tests.benchmarks.made import Made, make_prompts, make_rollouts, tiny_policy
from tests.stages.common.runtime.test_subprocesses import gone
from tests.tiny import make_folder, make_policy

SAMPLED = {
    "engine": "transformers",
    "samples_per_prompt": 2,
    "sampling": {"max_tokens": 4},
    "device": "cpu",
}


@pytest.fixture
def begun():
    """Starts a child early; at the end it is gone."""
    children = []

    def begin(stage: str, *hint) -> subprocess.Popen:
        early.begin_early(stage, Hint(*hint))
        children.append(early._early[stage, None, False][0].process)
        return children[-1]

    yield begin
    early.end_early()
    assert gone([process.pid for process in children])


def test_a_child_that_is_there_early_is_told_its_call(begun, store, tmp_path):
    """One waits of a kind; a dead one is replaced, and one that began in another environment is
    left alone."""
    (tmp_path / "seen.py").write_text(
        "import os\n\n\ndef one(completions, **_):\n    return [float(os.environ.get('HINT', 0))] "
        "* len(completions)\n"
    )
    rollouts = make_rollouts(store, tiny_policy(store), 4, 8, 8, 2, asked=make_prompts(store, 2))
    config = {"functions": [{"use": f"{tmp_path}/seen.py:one"}]}
    call = Call("reward", config, str(store.path), {"rollouts": str(rollouts.ref)}, force=True)
    first = begun("reward", config)
    assert begun("reward", config) is first
    assert run_stage(call, env={"HINT": "0.5"}).metrics["reward_mean"] == 0.5
    assert first.poll() is None
    assert run_stage(call).metrics["reward_mean"] == 0
    assert first.returncode == 0, "it was this one that did it"
    dead = begun("reward", config)
    dead.kill()
    dead.wait()
    assert run_stage(call).metrics["reward_mean"] == 0


def test_what_can_not_be_prepared_for_is_told_by_the_call(begun, store):
    begun("generate", {"engine": "vllm", "device": "no device"})
    call = Call(
        "generate", {"engine": "scripted", "options": {"script": "nowhere"}}, str(store.path)
    )
    spec = {**call.__dict__, "refs": {"prompts": "a/prompts@1", "policy": "a/policy@0"}}
    with early.taken("generate") as mine:
        mine.tell(spec)
        child.follow(mine.process, "generate", print)
        assert mine.answer()["error"]["code"] == "E-LINEAGE"


def test_who_begins_with_its_call_prepares_for_nothing(store):
    """Its phases are its own: a bad config is its error, never a death without an answer."""
    spec = {**Call("generate", {"engine": "vllm", "device": "no device"}, str(store.path)).__dict__}
    with child.Child("generate") as mine:
        mine.tell(spec)
        code, _ = child.follow(mine.process, "generate", print)
        assert (code, mine.answer()["error"]["code"]) == (2, "E-CONFIG")


@contextmanager
def in_the_making(store: Store, seed: int):
    """Work on a checkpoint whose model is written, and not announced yet."""
    about = {"stage": "optimize", "stage_version": 1, "config": Made(rows=seed), "inputs": {}}
    with begin(store, "tiny", "policy", **about) as work:
        make_folder(work.folder, seed=seed)
        yield work


def started(begun, store: Store, work: Work, prompts: str, **config) -> early.Child:
    """A child that was hinted at prompts and checkpoint, and has said what came of that."""
    begun(
        "generate",
        {**SAMPLED, **config},
        str(store.path),
        {"prompts": prompts},
        str(work.announcement),
    )
    work.announce(1)
    mine = early.taken("generate")
    lines = child.lines_of(mine.process, "generate", 60)
    mine.said = next(line for line in lines if "before" in line)
    return mine


def called(mine: early.Child, call: Call) -> tuple[dict, str]:
    lines = []
    with mine:
        mine.tell(call.__dict__)
        child.follow(mine.process, "generate", lines.append)
        return mine.answer(), "\n".join(lines)


def sampled(store: Store, prompts: Version, policy: Version, **config) -> Call:
    refs = {"prompts": str(prompts.ref), "policy": str(policy.ref)}
    return Call("generate", {**SAMPLED, **config}, str(store.path), refs, "tiny", force=True)


@pytest.fixture
def prompts(store):
    make_policy(store)
    return make_prompts(store, 3)


@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_an_engine_starts_on_a_checkpoint_that_is_not_committed(begun, store, prompts, engine):
    """What it samples is what one that starts afterwards samples. That the folder is renamed
    meanwhile, it does not notice; nor what becomes of the weights, which it has read: so it is this
    very engine that samples."""
    with in_the_making(store, 1) as work:
        mine = started(begun, store, work, str(prompts.ref), engine=engine)
        assert mine.said == f"engine {engine} is ready for tiny/policy@1 before that is committed"
        policy = work.commit()
    call, weights = (
        sampled(store, prompts, policy, engine=engine),
        policy.path / "model.safetensors",
    )
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    answer, _ = called(mine, call)
    with pytest.raises(CorruptError, match="sha256"):
        run_stage(call)
    weights.write_bytes(whole)
    made, again = store.open(answer["ref"]).manifest, store.open(run_stage(call).ref).manifest
    assert made.content_hash == again.content_hash and made.rows == 6
    assert made.model("policy").ref == "tiny/policy@1"


@pytest.mark.parametrize("other", ["model", "config"])
def test_an_engine_for_something_else_starts_again(begun, store, prompts, other):
    with in_the_making(store, 1) as work:
        mine = started(
            begun,
            store,
            work,
            str(prompts.ref),
            **({"dtype": "bfloat16"} if other == "config" else {}),
        )
        policy = work.commit()
    if other == "model":
        with in_the_making(store, 2) as work:
            policy = work.commit()
    answer, lines = called(mine, sampled(store, prompts, policy))
    made, again = (
        store.open(answer["ref"]).manifest,
        store.open(run_stage(sampled(store, prompts, policy)).ref).manifest,
    )
    assert (
        made.content_hash == again.content_hash
        and "was made ready for something else, and starts again" in lines
    )


def test_an_engine_that_could_not_start_early_starts_again(begun, store, prompts):
    with in_the_making(store, 1) as work:
        mine = started(begun, store, work, "tiny/prompts@9")
        assert (
            "could not start before its checkpoint was committed" in mine.said
            and "tiny/prompts@9" in mine.said
        )
        policy = work.commit()
    answer, _ = called(mine, sampled(store, prompts, policy))
    assert answer["rows"] == 6


def test_those_that_may_hold_an_engine_end_alone(begun, store, prompts):
    importing = begun("optimize", {})
    with in_the_making(store, 1) as work:
        holding = begun(
            "generate",
            SAMPLED,
            str(store.path),
            {"prompts": str(prompts.ref)},
            str(work.announcement),
        )
        early.end_early(engines=True)
    assert gone([holding.pid]) and importing.poll() is None


def test_what_is_announced_is_what_is_committed(store, prompts):
    """The files of the model, each hashed once; not those below the folder, which come later."""
    with in_the_making(store, 1) as work:
        assert announced.look(work.announcement, 0) is None
        work.announce(1)
        seen = announced.look(work.announcement, 0)
        assert announced.look(work.announcement, work.announcement.stat().st_mtime + 1) is None, (
            "of an earlier attempt"
        )
        (work.folder / "optimizer").mkdir()
        (work.folder / "optimizer" / "state.json").write_text("{}")
        committed = work.commit()
    assert announced.look(work.announcement, 0) is None, "no longer"
    assert [
        entry.name for entry in committed.manifest.files if entry not in seen.manifest.files
    ] == ["optimizer/state.json"]
    assert announced.holds(committed, seen)
    seen.verify()  # by a path that the commit did not break
    assert (seen.path / "config.json").samefile(committed.path / "config.json")
    with in_the_making(store, 2) as work:
        work.announce(2)
        assert not announced.holds(committed, announced.look(work.announcement, 0))


@pytest.mark.vllm
def test_what_generate_prepares_is_the_engine():
    code = """
        import sys
        from quiver.stages.generate.stage import Config, prepare
        prepare(Config(engine="scripted", options={"script": "echo"}))
        before = "vllm" in sys.modules
        prepare(Config(engine="vllm"))
        print(before, "vllm.entrypoints.llm" in sys.modules)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split()[-2:] == ["False", "True"]
