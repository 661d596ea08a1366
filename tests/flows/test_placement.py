"""What [placement] refuses before anything runs, and how it is read."""

import json
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from quiver.flows import nightly
from quiver.flows.calls import by_hand, check_stages
from quiver.flows.placement import check_places, runs_here, where_of
from quiver.flows.pool import answer_in, for_workers
from quiver.flows.post_train import Chain
from quiver.flows.recipe import load
from quiver.flows.stage import require_store
from quiver.schemas.errors import ConfigError, NumericError, QuiverError
from quiver.stages.core.run.call import Call, Where
from quiver.stages.core.store import Store
from tests.flows.conftest import RECIPE
from tests.tiny import make_folder

SERVER = {PREFECT_API_URL: "http://127.0.0.1:4200/api"}


@pytest.fixture
def recipe(tmp_path):
    (tmp_path / "recipe.toml").write_text(RECIPE)
    return lambda *settings: load(tmp_path / "recipe.toml", settings)


def test_a_pool_needs_a_server_and_a_store_that_all_see(recipe, tmp_path):
    placement = recipe("placement.generate='gpu-pool'").placement
    check_places(recipe().placement, "store")
    with (
        temporary_settings(restore_defaults={PREFECT_API_URL}),
        pytest.raises(ConfigError) as caught,
    ):
        check_places(placement, "store")
    assert (caught.value.object, caught.value.next[:20]) == (
        "placement.generate gpu-pool",
        "prefect server start",
    )
    with temporary_settings(SERVER):
        with pytest.raises(ConfigError, match="relative") as caught:
            check_places(placement, "store")
        assert caught.value.object == "store"
        assert str(Path("store").absolute()) in caught.value.next
        check_places(placement, str(tmp_path))


def test_an_interpreter_that_is_not_here_is_refused_unless_a_pool_is_to_have_it(recipe, tmp_path):
    missing = "placement.python.generate='/no/python'"
    with pytest.raises(ConfigError, match="there is no such program here") as caught:
        check_places(recipe(missing).placement, str(tmp_path))
    assert caught.value.object == "placement.python.generate /no/python"
    check_places(recipe(f"placement.python.generate={sys.executable!r}").placement, str(tmp_path))
    with temporary_settings(SERVER):
        check_places(recipe(missing, "placement.generate=gpus").placement, str(tmp_path))


def test_each_stage_has_its_place(recipe):
    placement = recipe(
        "placement.generate=gpus", "placement.fan_out=4", "placement.python.generate=/v/bin/python",
        "placement.slots=1", "placement.devices=2", "placement.wait_seconds=5",
        "placement.timeout_seconds={optimize=60}", "placement.limits={optimize='training'}",
        "placement.resident_engine=true",
    ).placement  # fmt: skip
    everywhere = {"workers": 4, "wait_seconds": 5, "slots": 1, "devices": 2}
    assert where_of(placement, "generate", online=True) == Where(
        pool="gpus", python="/v/bin/python", online=True, resident_engine=True, **everywhere
    )
    assert where_of(placement, "optimize") == Where(
        timeout_seconds=60, concurrency_limit="training", **everywhere
    )
    assert not where_of(recipe().placement, "generate").resident_engine


def test_ranks_of_a_launcher_stay_in_no_pool(recipe, monkeypatch):
    placement = recipe("placement.optimize=gpus", "placement.reward=gpus").placement
    monkeypatch.setenv("WORLD_SIZE", "2")
    pools = [where_of(placement, stage).pool for stage in ("optimize", "reward")]
    assert pools == [None, "gpus"]


def test_a_call_travels_whole(store):
    where = Where(pool="gpus", workers=2, python="/v/bin/python", timeout_seconds=5, online=True,
                  slots=2, concurrency_limit="l", resident_engine=True)  # fmt: skip
    refs = {"rollouts": ["a/rollouts@1"]}
    call = Call("reward", {"functions": []}, store.url, refs, "a", label="a", where=where)
    sent = Call.from_json(json.loads(json.dumps(for_workers(call).to_json())))
    require_store(sent)
    there = replace(where, pool=None, store_id=store.id, resident_engine=False)
    assert sent == replace(call, store=store.url, share=True, where=there)
    assert not for_workers(replace(call, force=True)).share
    assert not for_workers(replace(call, stage="optimize")).share


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
    assert Chain(loaded).upcoming_after(iteration) == expected


def test_a_night_is_measured_at_its_end_alone(recipe, tmp_path):
    night = nightly.plan_night(
        recipe("iterations=2", "evaluate.every=1", f"store={str(tmp_path / 'store')!r}"), "one"
    )
    assert [night.recipe.is_measured(iteration) for iteration in (1, 2)] == [False, True]


def test_what_trains_elsewhere_is_not_checked_here(recipe):
    """In a pool, or under another interpreter: this one need not have what it needs."""
    settings = ("run=tiny", "placement.optimize=gpus", "placement.python.optimize=/v/bin/python")
    trains = [runs_here(recipe(setting).placement, "optimize") for setting in settings]
    assert trains == [True, False, False]


@pytest.mark.parametrize("place", ["placement.reward=gpus", "placement.python.reward=/v/python"])
def test_what_scores_elsewhere_has_its_secrets_there(recipe, monkeypatch, place):
    monkeypatch.delenv("QUIVER_JUDGE_KEY", raising=False)
    server = "{dialect='quiver', urls=['https://judge.example'], token='env:QUIVER_JUDGE_KEY'}"
    for settings in [place], []:
        loaded = recipe(f"reward={{servers=[{server}]}}", *settings)
        here = nullcontext() if settings else pytest.raises(QuiverError, match="QUIVER_JUDGE_KEY")
        with here, by_hand(loaded):
            check_stages({"reward": loaded.reward})


def test_what_needs_no_prompts_is_told_before_the_base_model_is_imported(
    recipe, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "peft", None)
    store = tmp_path / "store"
    model = make_folder(tmp_path / "model")
    settings = (f"store={str(store)!r}", f"policy.model={str(model)!r}", "optimize.lora={rank=2}")
    loaded = recipe(*settings)
    with pytest.raises(ConfigError, match="peft is not installed"), by_hand(loaded):
        Chain(loaded).import_policy()
    assert list(Store(store).versions()) == []
    settings = (*settings[:2], "reward.functions=[{use='nowhere.py:score'}]")
    loaded = recipe(*settings)
    refused = pytest.raises(ConfigError, match=r"there is no file .*nowhere\.py")
    with refused as caught, by_hand(loaded):
        Chain(loaded).import_policy()
    assert list(Store(store).versions()) == [] and caught.value.state == "nothing was changed."
