"""What [placement] refuses before anything runs, and how it is read."""

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from quiver.flows import nightly, post_train
from quiver.flows.placement import Place, check_placement, place_of
from quiver.flows.recipe import load
from quiver.flows.stage import StageCall, told
from quiver.schemas.errors import ConfigError, NumericError
from quiver.stages.common.runtime.runner import Call
from tests.flows.conftest import RECIPE

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
        check_placement(recipe(pooled, f"store={str(tmp_path)!r}"))


def test_each_stage_has_its_place(recipe, tmp_path):
    said = recipe(
        f"policy.model={str(tmp_path)!r}",
        "placement.generate=gpus", "placement.fan_out=4", "placement.python.generate=/v/bin/python", "placement.slots=1",
        "placement.timeout_seconds={optimize=60}", "placement.limits={optimize='training'}",
    )  # fmt: skip
    assert place_of(said, "generate") == Place(
        pool="gpus", workers=4, python="/v/bin/python", slots=1
    )
    assert place_of(said, "optimize") == Place(
        workers=1, timeout_seconds=60, limit="training", slots=1
    )
    assert said.placement.pools == {"generate": "gpus"}


def test_a_call_travels_whole(store):
    call = Call(
        "reward", {"functions": []}, store.path, {"rollouts": ["a/rollouts@1"]}, "a", share=True
    )
    where = Place(
        pool="box", python="/v/bin/python", timeout_seconds=5.0, online=True, slots=2, limit="l"
    )
    travelled = StageCall.model_validate_json(
        StageCall.of(call, where, "a · reward 1/1").model_dump_json()
    )
    place, arrived = travelled.here()
    assert arrived == Call(
        "reward",
        {"functions": []},
        str(store.path),
        {"rollouts": ["a/rollouts@1"]},
        "a",
        share=True,
    )
    assert place == Place(
        python="/v/bin/python", timeout_seconds=5.0, online=True, slots=2, limit="l"
    )


def test_what_a_last_state_tells():
    error = NumericError("optimize", "loss is NaN", state="whole", next="lower it")
    told_error = told(
        f'{error}\n{{"error": {{"code": "E-NUMERIC", "object": "optimize", "message": "loss is '
        f'NaN"}}}}'
    )["error"]
    assert (type(told_error), told_error.message) == (NumericError, "loss is NaN")
    assert told('a/b@1\n{"ref": "a/policy@1", "cached": false}')["ref"] == "a/policy@1"
    assert (
        told("Flow run encountered an exception: ImportError") is None
        and told(None) is None
        and told("17") is None
    )


@pytest.mark.parametrize("pool", ["", "a/b", "two words"])
def test_a_pool_s_name_is_one_of_prefect_s(recipe, pool):
    with pytest.raises(ConfigError, match=r"placement\.generate"):
        recipe(f"placement.generate={pool!r}")


@pytest.mark.parametrize(
    ("settings", "iteration", "asked"),
    [
        ((), 1, "tiny/prompts@latest"),
        ((), 2, "tiny.eval/prompts@latest"),
        (("data.held_out=null",), 2, None),
        (("evaluate.every=1",), 1, "tiny.eval/prompts@latest"),
        (("overlap=1", "optimize.max_staleness=1"), 1, None),
        (("overlap=1", "optimize.max_staleness=1"), 2, "tiny.eval/prompts@latest"),
    ],
)
def test_what_a_new_policy_is_asked_first(recipe, settings, iteration, asked):
    """Of two iterations; None where nothing is sampled by it next."""
    hints = post_train._soon(recipe("iterations=2", *settings), iteration)
    assert [hint.refs["prompts"] for hint in hints.values()] == ([asked] if asked else [])


def test_a_night_is_measured_at_its_end_alone(recipe, tmp_path):
    night = nightly.begin(
        recipe("iterations=2", "evaluate.every=1", f"store={str(tmp_path / 'store')!r}"), "one"
    )
    assert [night.recipe.is_measured(iteration) for iteration in (1, 2)] == [False, True]
