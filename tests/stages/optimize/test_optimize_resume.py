"""A training that is killed goes on after the step that it saved, as if nothing had happened."""

import errno
import json
import multiprocessing
import os
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file, save_file

from quiver.schemas.errors import ConfigError, NumericError, ResourceError
from quiver.stages.core.files import sha256_of as sha256
from quiver.stages.core.store import Store
from quiver.stages.core.store.storage import with_checksum
from quiver.stages.optimize import resume, trainer
from tests.stages.optimize import world
from tests.stages.optimize.world import config, trained
from tests.tiny import make_policy
from tests.writing import run_here

SIX_STEPS = {"epochs": 3, "minibatches": 2, "resume_steps": 3}
CASES = {
    "fp32": {},
    "in the last epoch": {"resume_steps": 5},
    "bf16_stochastic": {"precision": "bf16_stochastic"},
    "8bit": {"optimizer": "adamw_8bit"},
    "fewest bytes": {"optimizer": "adamw_8bit", "precision": "bf16_stochastic"},
    "critic": {"algorithm": "ppo", "max_staleness": 1},
    "critic model": {"algorithm": "ppo", "critic": "model"},
    "entropy target": {"entropy_target": 6.0, "entropy_coef_step": 0.5},
    "kl target": {"kl_coef": 0.1, "kl_target": 0.01, "kl_horizon": 16},
    "lora": {"lora": {"rank": 2}, "learning_rate": 1e-2},
}


@pytest.fixture
def steps(monkeypatch):
    """How many steps were made; `steps.dies_after`: how many are made before the process dies."""

    class Steps:
        count = 0
        dies_after = None

    def counted(self, *arguments):
        if Steps.count == Steps.dies_after:
            raise KeyboardInterrupt
        Steps.count += 1
        return real(self, *arguments)

    real = trainer.Trainer._train_minibatch
    monkeypatch.setattr(trainer.Trainer, "_train_minibatch", counted)
    return Steps


def tables(store, version) -> list[dict]:
    """Rows of updates and advantages, without the seconds."""
    refs = [version.manifest.metrics[kind] for kind in ("updates", "advantages")]
    rows = [row for ref in refs for row in store.open(ref).table().to_pylist()]
    return [{name: cell for name, cell in row.items() if name != "seconds"} for row in rows]


def assert_equal(store, one, other) -> None:
    assert tables(store, one) == tables(store, other)
    names = [name for name in one.files.names if name.endswith(".safetensors")]
    assert names == [n for n in other.files.names if n.endswith(".safetensors")] and len(names) > 1
    for name in names:
        assert world.are_equal(world.weights(one, name), world.weights(other, name)), name


@pytest.mark.parametrize("case", CASES)
def test_six_steps_are_some_a_kill_and_the_rest_bit_for_bit(store, policy, made, steps, case):
    chosen = config(**{**SIX_STEPS, **CASES[case]})
    refs = {}
    if chosen.kl_coef:
        off = world.sampled_logprobs(made[0], less=0.3)
        refs["ref_logprobs"] = world.write_logprobs(store, made[0], off, "ref", policy).ref
    train = partial(trained, store, policy, made, chosen, **refs)
    whole = train(into="whole")
    assert steps.count == 6
    saved = chosen.resume_steps
    steps.count, steps.dies_after = 0, min(saved + 2, 5)
    with pytest.raises(KeyboardInterrupt):
        train(into="killed")
    steps.count, steps.dies_after = 0, None
    resumed = train(into="killed")
    assert steps.count == 6 - saved, "those after the saved one are made again, no more"
    assert_equal(store, whole, resumed)
    assert not list(Path(store.url).glob("killed/policy/.work/*")), "it goes with the rest"


def test_the_speed_of_a_resumed_training_is_that_of_all_its_steps(store, policy, made, steps):
    train = partial(trained, store, policy, made, config(**SIX_STEPS))
    steps.dies_after = 5
    with pytest.raises(KeyboardInterrupt):
        train()
    steps.dies_after = None
    metrics = train().manifest.metrics
    rows = store.open(metrics["updates"]).table().to_pylist()
    seconds = sum(row["seconds"] for row in rows)
    assert len(rows) == 6 and metrics["tokens"] == sum(row["tokens"] for row in rows)
    assert metrics["tokens_per_second"] == pytest.approx(metrics["tokens"] / seconds)


@pytest.mark.parametrize(("chosen", "minutes"), [({"resume_minutes": 40}, 40), ({}, 15)])
def test_a_state_is_saved_when_its_time_has_come(
    store, policy, made, steps, monkeypatch, chosen, minutes
):
    """After the fourth step, by a clock that goes with the steps."""

    def monotonic() -> float:
        return 60 * minutes * (0, 0.99, 0.99, 0.99, 1.01)[min(steps.count, 4)]

    monkeypatch.setattr(resume, "time", SimpleNamespace(monotonic=monotonic))
    train = partial(trained, store, policy, made, config(epochs=5, minibatches=2, **chosen))
    steps.dies_after = 6
    with pytest.raises(KeyboardInterrupt):
        train()
    steps.count, steps.dies_after = 0, None
    train()
    assert steps.count == 6


def _die_after_four(path, refs):
    real = resume.SavedProgress.step_done

    def step_done(self, trainer, *place):
        real(self, trainer, *place)
        if len(trainer.updates) == 4:
            os._exit(9)

    resume.SavedProgress.step_done = step_done
    run_here("optimize", config(**SIX_STEPS), Store(path), into="killed", **refs)


@pytest.fixture(scope="module")
def died(tmp_path_factory):
    """A store in which a training was made, and another died after its fourth step, the policy and
    what they are made of."""
    store = Store(tmp_path_factory.mktemp("died") / "store")
    policy = make_policy(store)
    made = world.make(store, policy, world.even_share)
    trained(store, policy, made, config(**SIX_STEPS), into="whole")
    inputs = world.inputs_of(policy, made)
    refs = {role: version.ref for role, version in inputs.items()}
    process = multiprocessing.get_context("fork").Process(
        target=_die_after_four, args=(store.url, refs)
    )
    process.start()
    process.join()
    assert process.exitcode == 9
    return store.url, policy.ref, made


@pytest.fixture
def continued(died, tmp_path):
    """A copy of that store, and what makes the training that died there."""
    path, policy, made = died
    store = Store(shutil.copytree(path, tmp_path / "store"))
    again = partial(trained, store, store.open(policy), made, config(**SIX_STEPS), into="killed")
    return store, again


def _flip(path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-9] ^= 1
    path.write_bytes(raw)


def _sealed(state, note, change) -> None:
    """Another state, to which the note fits."""
    tensors = load_file(state)
    change(tensors)
    save_file(tensors, state)
    fields = json.loads(note.read_bytes())
    del fields["checksum"]
    note.write_bytes(with_checksum({**fields, "sha256": sha256(state)}))


DAMAGE = {
    "none": lambda state, note: None,
    "a bit": lambda state, note: _flip(state),
    "the place": lambda state, note: note.write_text(
        note.read_text().replace('"minibatch": 1', '"minibatch": 0')
    ),
    "gone": lambda state, note: state.unlink(),
    "the note is a folder": lambda state, note: (note.unlink(), note.mkdir()),
    "a file in place of all": lambda state, note: (shutil.rmtree(note.parent), note.parent.touch()),
    "a pipe for a state": lambda state, note: (state.unlink(), os.mkfifo(state)),
    "no list": lambda state, note: note.write_text("[1]"),
    "a weight is missing": lambda state, note: _sealed(
        state, note, lambda tensors: tensors.pop("weight.1")
    ),
    "another shape": lambda state, note: _sealed(
        state, note, lambda tensors: tensors.update({"exp_avg.0": torch.zeros(3)})
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_after_kill_9_a_state_that_is_not_whole_is_made_again(continued, steps, damage):
    store, again = continued
    folder = next(Path(store.url).glob("killed/policy/.work/*.resume"))
    DAMAGE[damage](next(folder.glob("*.safetensors")), folder / "progress")
    resumed = again()
    assert steps.count == (3 if damage == "none" else 6)
    assert_equal(store, store.open("whole/policy@1"), resumed)
    assert not list(Path(store.url).glob("killed/policy/.work/*.resume"))


def test_a_state_on_a_disk_that_fails_for_a_moment_is_kept(continued, steps, monkeypatch):
    store, again = continued
    (state,) = Path(store.url).glob("killed/policy/.work/*.resume/*.safetensors")
    real = resume.size_and_sha256

    def fail(storage, key):
        if key.endswith(state.name):
            raise OSError(errno.EIO, "Input/output error")
        return real(storage, key)

    with monkeypatch.context() as failing, pytest.raises(ResourceError, match="input/output error"):
        failing.setattr(resume, "size_and_sha256", fail)
        again()
    assert state.exists()
    assert_equal(store, store.open("whole/policy@1"), again())
    assert steps.count == 3


def test_ranks_that_would_go_on_after_different_steps_refuse(continued, monkeypatch):
    store, again = continued
    monkeypatch.setattr(resume, "of_all_ranks", lambda mine: [mine, "none"])
    with pytest.raises(ConfigError, match="would continue after different steps: state-000003-"):
        again()
    assert store.numbers("killed", "policy") == []


def test_what_is_forced_starts_over(continued, steps):
    _, again = continued
    again(force=True)
    assert steps.count == 6


def test_a_step_that_was_left_out_is_saved_too(store, train, steps, monkeypatch):
    real = trainer.Trainer.accumulate

    def accumulate(self, *arguments):
        numbers = real(self, *arguments)
        return {**numbers, "loss": float("nan")} if len(self.updates) == 1 else numbers

    monkeypatch.setattr(trainer.Trainer, "accumulate", accumulate)
    chosen = config(**SIX_STEPS)
    whole = train(chosen, into="whole")
    steps.count, steps.dies_after = 0, 4
    with pytest.raises(KeyboardInterrupt):
        train(chosen, into="killed")
    steps.count, steps.dies_after = 0, None
    assert_equal(store, whole, train(chosen, into="killed"))
    assert steps.count == 3 and whole.manifest.metrics["skipped_steps"] == 1


def test_the_rollouts_of_a_step_that_is_not_finite_are_kept(
    store, policy, made, train, monkeypatch
):
    real = trainer.Trainer.accumulate
    monkeypatch.setattr(
        trainer.Trainer, "accumulate", lambda *args: {**real(*args), "loss": float("nan")}
    )
    with pytest.raises(NumericError):
        train(minibatches=4)
    paths = sorted(Path(store.url).glob("tiny/policy/.not_finite/*.arrow"))
    table = pa.ipc.open_file(paths[0]).read_all()
    assert 0 < table.num_rows <= 4
    sampled = {row["rollout_id"]: row["old_logprobs"] for row in made[0].table().to_pylist()}
    for row in table.to_pylist():
        assert row["old_logprobs"] == sampled[row["rollout_id"]]
        assert len(row["logprobs"]) == len(row["old_logprobs"])
