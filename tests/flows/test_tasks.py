"""What the flows show and pass on: forms with descriptions, small parameters and results, retries
for what a retry can help."""

import errno
import os

import pytest
from prefect import flow
from prefect.states import Failed

from quiver.flows import dispatch, nightly, post_train, stage
from quiver.flows.calls import perform, prefect_tags
from quiver.flows.placement import GivenUp
from quiver.flows.recipe import load
from quiver.flows.tasks import as_tasks, stage_task, worth_retrying
from quiver.schemas import errors
from quiver.stages.core.files import storage_errors
from quiver.stages.core.run import stage_process
from quiver.stages.core.store import Store
from tests.flows.conftest import options, quiver

FLOWS = {
    "nightly": nightly.nightly,
    "post-train": post_train.post_train,
    "stage": stage.stage,
}
DIES_ONCE = """
import os, sys
def rows():
    if sys.argv[0].endswith("stages/__main__.py") and not os.path.exists("died"):   # in the stage's own process, not where it is looked up
        open("died", "w").close()
        os.kill(os.getpid(), 9)
    return [{"question": f"{number}?"} for number in range(4)]
"""


def described(schema: dict) -> dict[str, str | None]:
    """Descriptions of all parameters and of all fields of what they are made of, by path."""
    found = {name: field.get("description") for name, field in schema["properties"].items()}
    for model, about in (schema.get("definitions") or {}).items():
        found |= {
            f"{model}.{name}": field.get("description")
            for name, field in about.get("properties", {}).items()
        }
    return found


@pytest.mark.parametrize("name", FLOWS)
def test_the_form_describes_every_field(name):
    flow = FLOWS[name]
    fields = described(flow.parameters.model_dump())
    assert (flow.name, flow.persist_result) == (name, False)
    assert [field for field, text in fields.items() if not text] == []
    if name != "stage":
        assert {
            "recipe",
            "Placement.generate",
            "FunctionConfig.use",
            "Sampling.temperature",
        } <= set(fields), "nested ones, lists too"


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (errors.RemoteError("server", "500"), True),
        (errors.BusyError("a/policy", "process 7 is at it"), False),
        (errors.ResourceError("stage generate", "its process ended by SIGKILL"), True),
        (errors.ConfigError("recipe", "wrong"), False),
        (errors.NumericError("optimize", "NaN"), False),
        (errors.CorruptError("a/rollouts@1", "sha256"), False),
        (GivenUp("pool box", "nobody is there"), False),
        (ZeroDivisionError(), False),
    ],
)
def test_what_is_tried_again(error, again):
    assert worth_retrying(stage_task, None, Failed(data=error)) is again


@pytest.mark.parametrize(
    ("number", "again"),
    [
        (errno.EROFS, False),
        (errno.EACCES, False),
        (errno.EPERM, False),
        (errno.ENOSPC, True),
        (errno.EIO, True),
    ],
)
def test_a_store_that_can_not_be_written_is_not_tried_again(tmp_path, number, again):
    with pytest.raises(errors.ResourceError) as caught, storage_errors("a/rollouts"):
        raise OSError(number, os.strerror(number), str(tmp_path / "part-00000.arrow"))
    assert worth_retrying(stage_task, None, Failed(data=caught.value)) is again


@pytest.mark.prefect
@pytest.mark.parametrize(("force", "tries"), [(False, 2), (True, 1)])
def test_a_forced_call_is_not_tried_again(api, workplace, monkeypatch, force, tries):
    """A retry would repeat even what the failed attempt finished."""
    monkeypatch.chdir(workplace)
    calls = []

    def run_call(call, **_):
        calls.append(call.force)
        raise errors.RemoteError("server", "500")

    monkeypatch.setattr(dispatch, "run_call", run_call)
    settings = ["placement.retries=1", "placement.retry_seconds=0.1"]
    recipe = load("recipe.toml", settings)

    @flow
    def one():
        with as_tasks(recipe):
            perform("policy", recipe.policy, {}, force=force)

    with pytest.raises(errors.RemoteError):
        one()
    assert calls == [force] * tries


def test_tags_tell_run_stage_and_iteration():
    assert prefect_tags("arith", "generate", 3) == ("run:arith", "stage:generate", "iteration:3")
    assert prefect_tags("arith") == ("run:arith",)


@pytest.mark.prefect
def test_what_travels_is_small_and_a_stage_is_a_flow(api, workplace, monkeypatch):
    """Over a whole run: parameters and results of every task are below 4 kB. Then single stages, as
    flows, find what is done."""
    (workplace / "dies_once.py").write_text(DIES_ONCE)
    monkeypatch.chdir(workplace)
    waiting, sizes, running, performing = [], [], dispatch.run_call, stage_task.fn

    def run_call(call, **named):
        waiting.extend([call.stage] if call.stage in stage_process._waiting else [])
        return running(call, **named)

    def measured(call, upcoming, tags):
        outcome = performing(call, upcoming, tags)
        sizes.extend([len(repr((call, upcoming, tags))), len(repr(outcome))])
        return outcome

    monkeypatch.setattr(dispatch, "run_call", run_call)
    monkeypatch.setattr(stage_task, "fn", measured)
    recipe = load("recipe.toml")
    done = post_train.post_train(recipe)

    @flow
    def one(stage, config, refs):
        with as_tasks(recipe):
            return perform(stage, config, refs, label=stage)

    reward = one("reward", recipe.reward, {"rollouts": "tiny/rollouts@1"})
    settings = [
        "data.source='dies_once.py:rows'",
        "data.held_out=null",
        "placement.retry_seconds=0.1",
    ]
    recipe = load("recipe.toml", settings)
    again = one("prompt", recipe.resolved().prompt_config(1), {"policy": "tiny/policy@0"})
    assert len(sizes) > 2 * 12 and 100 < max(sizes) < 4096
    assert (reward.ref, reward.cached) == (done["iterations"][0]["rewards"], True)
    assert waiting == ["optimize", "generate"] * 2 and not stage_process._waiting, (
        "each begun while the other ran"
    )
    assert (workplace / "died").exists() and again.rows == 4, "a killed stage was tried again"


@pytest.mark.prefect
def test_a_missing_training_source_is_told_before_anything_is_generated(workplace):
    rows = (workplace / "held_out.jsonl").rename(workplace / "other.jsonl")
    settings = ("run=nowhere", "data.source=nowhere.jsonl", "data.held_out={source='other.jsonl'}")
    error = quiver(workplace, "run", "recipe.toml", *options(settings), code=2)["error"]
    rows.rename(workplace / "held_out.jsonl")
    assert "nowhere.jsonl" in error["message"]
    assert [
        str(ref) for ref in Store(workplace / "store").refs() if ref.run.startswith("nowhere")
    ] == [], "not even the base model is imported"
