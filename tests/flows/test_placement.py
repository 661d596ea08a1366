"""What [placement] refuses before anything runs, and how it is read."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from quiver.flows import nightly, post_train
from quiver.flows.placement import StageCall, check_placement, stage_call
from quiver.flows.recipe import load
from quiver.flows.stage import answer_in
from quiver.schemas.errors import ConfigError, NumericError
from quiver.stages.common.runtime.runner import Call
from quiver.stages.common.store import Store
from tests.flows.conftest import RECIPE
from tests.tiny import make_folder

SERVER = {PREFECT_API_URL: "http://127.0.0.1:4200/api"}


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "recipe.toml").write_text(RECIPE)
    return lambda *settings: load(tmp_path / "recipe.toml", settings)


def test_a_pool_needs_a_server_and_a_store_that_all_see(recipe, tmp_path):
    pooled = "placement.generate='gpu-pool'"
    check_placement(recipe())
    with (
        temporary_settings(restore_defaults={PREFECT_API_URL}),
        pytest.raises(ConfigError) as caught,
    ):
        check_placement(recipe(pooled))
    assert (caught.value.object, caught.value.next[:20]) == (
        "placement.generate gpu-pool",
        "prefect server start",
    )
    with temporary_settings(SERVER):
        with pytest.raises(ConfigError, match="relative") as caught:
            check_placement(recipe(pooled))
        assert caught.value.object == "store"
        assert str(Path("store").absolute()) in caught.value.next
        check_placement(recipe(pooled, f"store={str(tmp_path)!r}"))


def test_each_stage_has_its_place(recipe, tmp_path):
    said = recipe(
        f"policy.model={str(tmp_path)!r}",
        "placement.generate=gpus", "placement.fan_out=4", "placement.python.generate=/v/bin/python", "placement.slots=1",
        "placement.timeout_seconds={optimize=60}", "placement.limits={optimize='training'}",
    )  # fmt: skip
    same = {"store": "store", "into": "tiny", "slots": 1}
    config = said.generate_config(1)
    assert stage_call(said, "generate", config, {}) == StageCall(
        stage="generate",
        config=config.model_dump(mode="json"),
        label="tiny · generate",
        python="/v/bin/python",
        **same,
    )
    config = said.optimize_config()
    assert stage_call(said, "optimize", config, {}, label="optimize 1/2") == StageCall(
        stage="optimize",
        config=config.model_dump(mode="json"),
        label="tiny · optimize 1/2",
        timeout_seconds=60,
        limit="training",
        **same,
    )
    assert said.placement.pools == {"generate": "gpus"}
    assert said.placement.fan_out == 4


def test_a_call_travels_whole(store):
    call = StageCall(
        stage="reward",
        config={"functions": []},
        store=str(store.path),
        refs={"rollouts": ["a/rollouts@1"]},
        into="a",
        label="a · reward 1/1",
        python="/v/bin/python",
        timeout_seconds=5.0,
        online=True,
        slots=2,
        limit="l",
    )
    sent = call.for_workers()
    travelled = StageCall.model_validate_json(sent.model_dump_json())
    travelled.require_store()
    assert travelled.store_id
    assert travelled.runner_call == Call(
        "reward",
        {"functions": []},
        str(store.path),
        {"rollouts": ["a/rollouts@1"]},
        "a",
        share=True,
    )
    kept = {"store_id", "share"}
    assert travelled.model_dump(exclude=kept) == call.model_dump(exclude=kept)
    assert not call.model_copy(update={"force": True}).for_workers().share
    assert not call.model_copy(update={"stage": "optimize"}).for_workers().share


def test_what_a_last_state_tells():
    error = NumericError("optimize", "loss is NaN", state="whole", next="lower it")
    told_error = answer_in(
        f'{error}\n{{"error": {{"code": "E-NUMERIC", "object": "optimize", "message": "loss is '
        f'NaN"}}}}'
    )["error"]
    assert (type(told_error), told_error.message) == (NumericError, "loss is NaN")
    assert answer_in('a/b@1\n{"ref": "a/policy@1", "cached": false}')["ref"] == "a/policy@1"
    assert (
        answer_in("Flow run encountered an exception: ImportError") is None
        and answer_in(None) is None
        and answer_in("17") is None
    )


@pytest.mark.parametrize("pool", ["", "a/b", "two words"])
def test_a_pool_s_name_is_one_of_prefect_s(recipe, pool):
    with pytest.raises(ConfigError, match=r"placement\.generate"):
        recipe(f"placement.generate={pool!r}")


@pytest.mark.parametrize(
    ("settings", "iteration", "sampled_for"),
    [
        ((), 1, 2),
        ((), 2, "evaluation"),
        (("data.held_out=null",), 2, None),
        (("evaluate.every=1",), 1, "evaluation"),
        (("overlap=1", "optimize.max_staleness=1"), 1, None),
        (("overlap=1", "optimize.max_staleness=1"), 2, "evaluation"),
    ],
)
def test_what_a_new_policy_is_asked_first(recipe, settings, iteration, sampled_for):
    """Of two iterations; None where nothing is sampled by it next."""
    loaded = recipe("iterations=2", *settings)
    expected = {}
    if sampled_for == "evaluation":
        expected = {"generate": loaded.generate_config(0, evaluation=True)}
    elif sampled_for:
        expected = {"generate": loaded.generate_config(sampled_for)}
    assert post_train.configs_after(loaded, iteration) == expected


def test_a_night_is_measured_at_its_end_alone(recipe, tmp_path):
    night = nightly.plan_night(
        recipe("iterations=2", "evaluate.every=1", f"store={str(tmp_path / 'store')!r}"), "one"
    )
    assert [night.recipe.is_measured(iteration) for iteration in (1, 2)] == [False, True]


def test_what_trains_elsewhere_is_not_checked_here(recipe, tmp_path, monkeypatch):
    """In a pool, or under another interpreter: this one need not have what it needs."""
    checked = []
    made = SimpleNamespace(ref="tiny/prompts@1")
    monkeypatch.setattr(post_train, "perform", lambda *_, **__: made)
    monkeypatch.setattr(
        post_train, "check_stages", lambda recipe, configs, *_: checked.append(sorted(configs))
    )
    settings = ("run=tiny", "placement.optimize=gpus", "placement.python.optimize=/v/bin/python")
    for setting in settings:
        post_train.make_prompts(recipe(setting), "tiny/policy@0", 1, ())
    assert checked == [["optimize", "reward"], ["reward"], ["reward"]]


def test_what_needs_no_prompts_is_told_before_the_base_model_is_imported(
    recipe, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "peft", None)
    store = tmp_path / "store"
    model = make_folder(tmp_path / "model")
    settings = (f"store={str(store)!r}", f"policy.model={str(model)!r}", "optimize.lora={rank=2}")
    with pytest.raises(ConfigError, match="peft is not installed"):
        post_train.import_policy(recipe(*settings))
    assert list(Store(store).versions()) == []
    settings = (*settings[:2], "reward.functions=[{use='nowhere.py:score'}]")
    with pytest.raises(ConfigError, match=r"there is no file .*nowhere\.py") as caught:
        post_train.import_policy(recipe(*settings))
    assert list(Store(store).versions()) == [] and caught.value.state == "nothing was changed."
