"""A training that is killed goes on after the step that it saved, as if nothing had happened."""

import json
import multiprocessing
import os
import shutil
from functools import partial
from types import SimpleNamespace

import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file, save_file

from quiver.schemas.errors import NumericError
from quiver.schemas.manifest import digest
from quiver.stages.common.runtime.runner import run_stage
from quiver.stages.common.store import Store
from quiver.stages.common.store.storage import sha256
from quiver.stages.optimize import resume, trainer
from tests.stages.optimize import world
from tests.stages.optimize.world import config, trained
from tests.tiny import make_policy

TEN_STEPS = {"epochs": 5, "minibatches": 2, "resume_steps": 5}
CASES = {
    "fp32": {},
    "in the last epoch": {"resume_steps": 9},
    "bf16_stochastic": {"precision": "bf16_stochastic"},
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


def files_of(version) -> dict[str, dict[str, torch.Tensor]]:
    names = [name for name in version.files.names if name.endswith(".safetensors")]
    return {name: load_file(version.files.path(name)) for name in names}


def assert_equal(store, one, other) -> None:
    assert tables(store, one) == tables(store, other)
    ours, theirs = files_of(one), files_of(other)
    assert ours.keys() == theirs.keys() and len(ours) > 1
    for name, tensors in ours.items():
        assert tensors.keys() == theirs[name].keys()
        for key, tensor in tensors.items():
            assert torch.equal(tensor, theirs[name][key]), (name, key)


@pytest.mark.parametrize("case", CASES)
def test_ten_steps_are_some_a_kill_and_the_rest_bit_for_bit(store, policy, made, steps, case):
    chosen = config(**{**TEN_STEPS, **CASES[case]})
    refs = {}
    if chosen.kl_coef:
        off = [[old - 0.3 for old in row] for row in made[0].table()["old_logprobs"].to_pylist()]
        refs["ref_logprobs"] = world.write_logprobs(store, made[0], off, "ref", policy).ref
    train = partial(trained, store, policy, made, chosen, **refs)
    whole = train(into="whole")
    assert steps.count == 10
    saved = chosen.resume_steps
    steps.count, steps.dies_after = 0, min(saved + 2, 9)
    with pytest.raises(KeyboardInterrupt):
        train(into="killed")
    steps.count, steps.dies_after = 0, None
    resumed = train(into="killed")
    assert steps.count == 10 - saved, "those after the saved one are made again, no more"
    assert_equal(store, whole, resumed)
    assert not list(store.path.glob("killed/policy/.staging/*")), "it goes with the staging place"


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


def _die_after_six(store, refs, chosen):
    real = resume.SavedProgress.step_done

    def step_done(self, trainer, *place):
        real(self, trainer, *place)
        if len(trainer.updates) == 6:
            os._exit(9)

    resume.SavedProgress.step_done = step_done
    run_stage("optimize", chosen, store, in_process=True, into="killed", **refs)


@pytest.fixture(scope="module")
def died(tmp_path_factory):
    """A store in which a training was made, and another died after its sixth step, the policy and
    what they are made of."""
    store = Store(tmp_path_factory.mktemp("died") / "store")
    policy = make_policy(store)
    made = world.make(store, policy, world.even_share)
    trained(store, policy, made, config(**TEN_STEPS), into="whole")
    refs = {"policy": policy.ref, "rollouts": made[0].ref, "rewards": made[1].ref}
    process = multiprocessing.get_context("fork").Process(
        target=_die_after_six, args=(Store(store.path), refs, config(**TEN_STEPS))
    )
    process.start()
    process.join()
    assert process.exitcode == 9
    return store.path, policy.ref, made


@pytest.mark.parametrize("damage", [None, "flip", "note", "gone"])
def test_after_kill_9_a_state_that_is_not_whole_is_made_again(died, tmp_path, steps, damage):
    path, policy, made = died
    store = Store(shutil.copytree(path, tmp_path / "store"))
    folder = next(store.path.glob("killed/policy/.staging/*.resume"))
    state, note = next(folder.glob("*.safetensors")), folder / "progress"
    if damage == "flip":
        raw = bytearray(state.read_bytes())
        raw[-9] ^= 1
        state.write_bytes(raw)
    elif damage == "note":
        note.write_text(note.read_text().replace('"minibatch": 1', '"minibatch": 0'))
    elif damage == "gone":
        state.unlink()
    resumed = trained(store, store.open(policy), made, config(**TEN_STEPS), into="killed")
    assert steps.count == (5 if damage is None else 10)
    assert_equal(store, store.open("whole/policy@1"), resumed)


def _resealed(note, **changes) -> None:
    """Another note, with the checksum that fits it."""
    fields = json.loads(note.read_bytes())
    del fields["checksum"]
    fields |= changes
    note.write_text(json.dumps({**fields, "checksum": digest(fields)}))


def _other_state(state, note, change) -> None:
    """Another state, to which the note fits."""
    tensors = load_file(state)
    change(tensors)
    save_file(tensors, state)
    _resealed(note, sha256=sha256(state))


def _other_counters(note, **changes) -> None:
    counters = json.loads(json.loads(note.read_bytes())["counters"])
    _resealed(note, counters=json.dumps(counters | changes))


ODD = {
    "the note is a folder": lambda folder, state, note: (note.unlink(), note.mkdir()),
    "a file in place of all": lambda folder, state, note: (shutil.rmtree(folder), folder.touch()),
    "a link elsewhere": lambda folder, state, note: (
        folder.rename(folder.with_name("elsewhere")),
        folder.symlink_to("elsewhere"),
    ),
    "a pipe for a state": lambda folder, state, note: (state.unlink(), os.mkfifo(state)),
    "no list": lambda folder, state, note: note.write_text("[1]"),
    "too deep": lambda folder, state, note: note.write_text("[" * 5000),
    "no epoch": lambda folder, state, note: _resealed(note, epoch=None),
    "an epoch too many": lambda folder, state, note: _resealed(note, epoch=5),
    "a file outside": lambda folder, state, note: _resealed(note, file=f"../{state.name}"),
    "no counters": lambda folder, state, note: _resealed(note, counters="{}"),
    "deep counters": lambda folder, state, note: _resealed(note, counters="[" * 5000),
    "a step too many": lambda folder, state, note: _other_counters(note, step=9),
    "updates of another kind": lambda folder, state, note: _other_counters(note, updates=[{}] * 5),
    "no safetensors": lambda folder, state, note: (
        state.write_bytes(b"x"),
        _resealed(note, sha256=sha256(state)),
    ),
    "a weight is missing": lambda folder, state, note: _other_state(
        state, note, lambda tensors: tensors.pop("weight.1")
    ),
    "another shape": lambda folder, state, note: _other_state(
        state, note, lambda tensors: tensors.update({"exp_avg.0": torch.zeros(3)})
    ),
    "another dtype": lambda folder, state, note: _other_state(
        state, note, lambda tensors: tensors.update({"step.0": torch.tensor(5)})
    ),
    "a moment of nobody": lambda folder, state, note: _other_state(
        state, note, lambda tensors: tensors.update({"exp_avg.999": torch.zeros(3)})
    ),
}


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A store in which a training was killed after its seventh step, and what it is made of."""
    store = Store(tmp_path_factory.mktemp("killed") / "store")
    policy = make_policy(store)
    made = world.make(store, policy, world.even_share)
    with pytest.MonkeyPatch.context() as patch:
        real = trainer.Trainer._train_minibatch

        def die(self, *arguments):
            if len(self.updates) == 7:
                raise KeyboardInterrupt
            return real(self, *arguments)

        patch.setattr(trainer.Trainer, "_train_minibatch", die)
        with pytest.raises(KeyboardInterrupt):
            trained(store, policy, made, config(**TEN_STEPS), into="killed")
    return store.path, policy.ref, made


@pytest.mark.parametrize("name", ODD)
def test_a_state_of_another_form_is_thrown_away(killed, tmp_path, steps, name):
    path, policy, made = killed
    shutil.copytree(path, tmp_path / "store")
    folder = next((tmp_path / "store").glob("killed/policy/.staging/*.resume"))
    ODD[name](folder, next(folder.glob("*.safetensors")), folder / "progress")
    store = Store(tmp_path / "store")
    trained(store, store.open(policy), made, config(**TEN_STEPS), into="killed")
    assert steps.count == 10
    assert not list(store.path.glob("killed/policy/.staging/*.resume"))


def test_what_is_forced_starts_over(store, policy, made, steps):
    chosen = config(**TEN_STEPS)
    steps.dies_after = 7
    with pytest.raises(KeyboardInterrupt):
        trained(store, policy, made, chosen)
    steps.count, steps.dies_after = 0, None
    trained(store, policy, made, chosen, force=True)
    assert steps.count == 10


def test_a_step_that_was_left_out_is_saved_too(store, policy, made, steps, monkeypatch):
    real = trainer.Trainer.accumulate

    def accumulate(self, *arguments):
        numbers = real(self, *arguments)
        return {**numbers, "loss": float("nan")} if len(self.updates) == 3 else numbers

    monkeypatch.setattr(trainer.Trainer, "accumulate", accumulate)
    chosen = config(**TEN_STEPS)
    whole = trained(store, policy, made, chosen, into="whole")
    steps.count, steps.dies_after = 0, 7
    with pytest.raises(KeyboardInterrupt):
        trained(store, policy, made, chosen, into="killed")
    steps.count, steps.dies_after = 0, None
    assert_equal(store, whole, trained(store, policy, made, chosen, into="killed"))
    assert steps.count == 5 and whole.manifest.metrics["skipped_steps"] == 1


def test_the_rollouts_of_a_step_that_is_not_finite_are_kept(store, policy, made, monkeypatch):
    real = trainer.Trainer.accumulate
    monkeypatch.setattr(
        trainer.Trainer, "accumulate", lambda *args: {**real(*args), "loss": float("nan")}
    )
    with pytest.raises(NumericError):
        trained(store, policy, made, config(minibatches=4))
    paths = sorted(store.path.glob("tiny/policy/.not_finite/*.arrow"))
    assert paths
    table = pa.ipc.open_file(paths[0]).read_all()
    assert 0 < table.num_rows <= 4
    known = dict(
        zip(
            *(made[0].table()[name].to_pylist() for name in ("rollout_id", "old_logprobs")),
            strict=True,
        )
    )
    for row in table.to_pylist():
        assert row["old_logprobs"] == known[row["rollout_id"]]
        assert len(row["logprobs"]) == len(row["old_logprobs"])
