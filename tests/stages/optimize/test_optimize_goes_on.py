"""How the stage goes on from iteration to iteration, that it learns, and what it leaves alone."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quiver.schemas.errors import ConfigError
from quiver.stages.common.models.loading import load_model
from quiver.stages.common.store import Store
from quiver.stages.optimize import tracking
from tests.stages.optimize import world
from tests.stages.optimize.world import config as _config
from tests.stages.optimize.world import trained as _run
from tests.stages.optimize.world import weights as _weights
from tests.tiny import make_policy
from tests.writing import run_here

run = partial(run_here, "optimize")


ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    "schedule", [{}, {"schedule": "cosine", "warmup_steps": 1, "total_steps": 7}]
)
def test_two_iterations_of_one_step_are_one_of_two_bit_for_bit(store, policy, made, schedule):
    common = {"max_staleness": 1, **schedule}
    together = _run(store, policy, made, _config(epochs=2, **common), into="together")
    first = _run(store, policy, made, _config(epochs=1, **common))
    second = _run(store, first, made, _config(epochs=1, audit={"enabled": False}, **common))
    assert second.manifest.metrics["step"] == 2
    for folder in ("model.safetensors", "optimizer/state.safetensors"):
        one, other = (
            load_file(together.files.folder / folder),
            load_file(second.files.folder / folder),
        )
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_stage_that_would_learn_nothing_is_refused(store, policy, made, caplog):
    """Linear over two steps: the third, and each after it, has the learning rate 0."""
    common = {
        "max_staleness": 1,
        "audit": {"enabled": False},
        "schedule": "linear",
        "total_steps": 2,
    }
    first = _run(store, policy, made, _config(**common))
    assert "learning rate is 0" not in caplog.text
    second = _run(store, first, made, _config(epochs=3, **common))
    assert (
        "the learning rate is 0 from step 2 on, and this stage goes from step 1 up to step 3"
        in caplog.text
    )
    rates = store.open(second.manifest.metrics["updates"]).table()["learning_rate"].to_pylist()
    assert rates == [pytest.approx(rates[0]), 0.0, 0.0] and rates[0] > 0
    with pytest.raises(
        ConfigError, match=r"tiny/policy@2 has 4 steps behind it: nothing would be learned"
    ) as caught:
        _run(store, second, made, _config(**{**common, "max_staleness": 2}))
    assert caught.value.next == "raise optimize.total_steps above 4"


def test_without_the_state_the_moments_start_anew(store, policy, made):
    common = {"max_staleness": 1, "audit": {"enabled": False}}
    first = _run(store, policy, made, _config(save_optimizer=False))
    assert not (first.files.folder / "optimizer").exists()
    fresh = _run(store, first, made, _config(**common))
    kept = _run(store, _run(store, policy, made, _config()), made, _config(**common))
    assert any(
        not torch.equal(a, b)
        for a, b in zip(_weights(fresh).values(), _weights(kept).values(), strict=True)
    )
    assert fresh.manifest.metrics["step"] == 2


def test_it_learns(store, policy):
    """Even ids are rewarded; five iterations of one step raise their share in what is sampled
    anew."""
    share = []
    for iteration in range(6):
        model = load_model(policy, dtype=torch.float32)
        rows = world.sample(model, world.prompts(6), 16, seed=iteration)
        share.append(sum(map(world.even_share, rows)) / len(rows))
        rollouts = world.write_rollouts(store, policy, rows)
        made = rollouts, world.write_rewards(store, rollouts, world.even_share)
        policy = _run(store, policy, made, _config(algorithm="dr_grpo", learning_rate=2e-2))
    assert share[-1] > share[0] + 0.15


def test_neither_engine_nor_tokenizer_is_touched(store, policy, made):
    code = f"""
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("vllm", "prefect"):
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
import transformers.tokenization_utils_base as base
def refuse(*a, **k): raise AssertionError("a tokenizer was called")
base.PreTrainedTokenizerBase.from_pretrained = base.PreTrainedTokenizerBase.__call__ = refuse
from quiver.stages.common.store import Store
from quiver.stages.optimize.stage import Config
from functools import partial
from quiver import run_stage
run = partial(run_stage, "optimize", in_process=True)
refs = dict(policy="tiny/policy@0", rollouts="{made[0].ref}", rewards="{made[1].ref}")
print(run(Config(device="cpu"), Store({str(store.path)!r}), **refs))
assert "vllm" not in sys.modules and "prefect" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("tiny/policy@1")


def test_importing_the_stage_is_cheap():
    code = (
        "import sys, quiver.stages.optimize.stage; print([n for n in ('torch', 'transformers', "
        "'accelerate') if n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_bf16_autocast_trains_and_keeps_weights_in_float32(store, policy, made):
    done = _run(store, policy, made, _config(precision="bf16"))
    assert 0 < done.manifest.metrics["audit"]["mean_gap"] < 0.1
    assert {value.dtype for value in _weights(done).values()} == {torch.float32}


def test_a_qwen3_policy(store):
    policy = make_policy(store, "qwen", "qwen3")
    made = world.make(store, policy, world.even_share, run="qwen")
    done = _run(store, policy, made)
    assert str(done.ref) == "qwen/policy@1" and done.manifest.metrics["packing"] == "shared"
    assert done.manifest.metrics["padding_share"] == 0


def test_trackers_write_where_they_are_told(store, policy, made, tmp_path):
    _run(
        store,
        policy,
        made,
        _config(trackers=["tensorboard"], tracker_folder=str(tmp_path / "logs")),
    )
    assert any(path.name.startswith("events") for path in (tmp_path / "logs").rglob("*"))


def test_a_tracker_that_fails_later_costs_its_curve_alone(
    store, policy, made, tmp_path, monkeypatch, caplog
):
    """As on a disk that is full, or with a service that is gone."""

    class Failing(tracking.GeneralTracker):
        name, requires_logging_directory, tracker = "failing", True, None

        def __init__(self, *_, **__):
            super().__init__()

        def log(self, values, step=None, **_):
            raise OSError("no space left")

    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "tensorboard", Failing)
    trackers = {"trackers": ["tensorboard"], "tracker_folder": str(tmp_path)}
    assert _run(store, policy, made, _config(**trackers)).ref.version == 1
    assert "tensorboard has not got all numbers: no space left" in caplog.text


def test_store_is_only_read_by_name(store, policy, made):
    """A store opened anew gives the same answer: nothing is kept in memory between runs."""
    first = _run(store, policy, made)
    assert (
        run(
            _config(),
            Store(store.path),
            policy=policy.ref,
            rollouts=made[0].ref,
            rewards=made[1].ref,
        )
        == first.ref
    )
