"""Two processes with gloo on the CPU give what one gives."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quiver.stages.optimize.stage import Config
from tests.stages.optimize import world
from tests.writing import run_here

run = partial(run_here, "optimize")


ROOT = Path(__file__).parents[3]
CODE = """
import sys
from quiver.stages.common.store import Store
from quiver.stages.optimize.stage import Config
from functools import partial
from quiver import run_stage
run = partial(run_stage, "optimize", in_process=True)
store, rollouts, rewards, processes = sys.argv[1:5]
config = Config(device="cpu", learning_rate=1e-3, minibatches=2, token_budget=40, processes=int(processes), grad_clip=1e9, eps=1.0)
print(run(config, Store(store), policy="tiny/policy@0", rollouts=rollouts, rewards=rewards, into="two"))
"""

WEIGHTS_OF_EACH = """
import os, sys
from pathlib import Path
from safetensors.torch import save_file
from quiver.stages.common.store import Store
from quiver.stages.optimize.stage import Config
from functools import partial
from quiver import run_stage
run = partial(run_stage, "optimize", in_process=True)
from quiver.stages.optimize.trainer import Trainer
train = Trainer.train
def kept(self):
    outcome = train(self)
    weights = {name: value.detach() for name, value in self.model.named_parameters()}
    save_file(weights, Path(__file__).with_name(os.environ["RANK"]))
    return outcome
Trainer.train = kept
store, rollouts, rewards = sys.argv[1:4]
config = Config(device="cpu", learning_rate=1e-3, minibatches=2, token_budget=40, precision="bf16_stochastic", processes=2)
run(config, Store(store), policy="tiny/policy@0", rollouts=rollouts, rewards=rewards, into="two")
"""

EXPERTS = """
import torch
from accelerate import Accelerator
from quiver.stages.optimize.trainer import Trainer
trainer = object.__new__(Trainer)
trainer.accelerator = Accelerator(cpu=True)
experts = [torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in range(3)]
trainer.parameters = experts
rank = trainer.accelerator.process_index
for expert in experts:
    expert.grad_dtype = torch.float32
experts[rank].grad = torch.full((3,), 2.0 + rank)
trainer._sum_gradients()
print([expert.grad if expert.grad is None else expert.grad.tolist() for expert in experts])
"""
"""Each rank sends its tokens through one of three experts."""


def _launch(arguments: list[str], ranks: int) -> subprocess.CompletedProcess:
    env = {
        **os.environ,
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.run(
        [sys.executable, *launcher, *arguments],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.mark.dist
def test_two_ranks_train_as_one(store, policy, tmp_path):
    """AdamW's eps is 1 here, so that the step follows the gradient and not only its sign."""
    made = world.make(store, policy, world.even_share, groups=5)
    config = Config(
        device="cpu", learning_rate=1e-3, minibatches=2, token_budget=40, grad_clip=1e9, eps=1.0
    )
    one = store.open(
        run(config, store, policy=policy.ref, rollouts=made[0].ref, rewards=made[1].ref)
    )
    script = tmp_path / "train.py"
    script.write_text(CODE)
    arguments = [str(script), str(store.path), str(made[0].ref), str(made[1].ref)]
    done = _launch([*arguments, "2"], 2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("Ref(") + done.stdout.count("two/policy@1") == 2
    two = store.open("two/policy@1")
    assert store.numbers("two", "policy") == [1] and store.numbers("two", "updates") == [1]
    assert two.manifest.metrics["processes"] == 2
    base = load_file(policy.files.folder / "model.safetensors")
    first, second = (
        load_file(version.files.folder / "model.safetensors") for version in (one, two)
    )
    for name, value in first.items():
        torch.testing.assert_close(
            second[name], value, rtol=0, atol=2.4e-7
        )  # two of float32's steps at 1.0
    assert max(float((first[name] - base[name]).abs().max()) for name in base) > 1e-5
    rows = [store.open(f"{name}/updates@1").table().to_pylist() for name in ("tiny", "two")]
    for mine, theirs in zip(*rows, strict=True):
        for key in (
            "loss",
            "grad_norm",
            "entropy",
            "tokens",
            "rollouts",
            "microbatches",
            "clip_fraction",
        ):
            assert theirs[key] == pytest.approx(mine[key], abs=1e-5)
    again = _launch([*arguments, "2"], 2)
    assert again.returncode == 0, again.stderr[-3000:]
    assert store.numbers("two", "policy") == [1]


@pytest.mark.dist
def test_ranks_round_alike(store, policy, tmp_path):
    """Bit for bit; and as one rank does, but where a sum in another order comes to the other side
    of a draw."""
    made = world.make(store, policy, world.even_share, groups=5)
    config = Config(
        device="cpu",
        learning_rate=1e-3,
        minibatches=2,
        token_budget=40,
        precision="bf16_stochastic",
    )
    one = store.open(
        run(config, store, policy=policy.ref, rollouts=made[0].ref, rewards=made[1].ref)
    )
    script = tmp_path / "train.py"
    script.write_text(WEIGHTS_OF_EACH)
    done = _launch([str(script), str(store.path), str(made[0].ref), str(made[1].ref)], 2)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (load_file(tmp_path / rank) for rank in "01")
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    alone = load_file(one.files.folder / "model.safetensors")
    differ = sum(int((value != alone[name]).sum()) for name, value in first.items())
    assert differ < 0.01 * sum(value.numel() for value in first.values())


@pytest.mark.dist
def test_another_number_of_processes_than_asked_for_is_refused(store, policy, tmp_path):
    made = world.make(store, policy, world.even_share, groups=2)
    script = tmp_path / "train.py"
    script.write_text(CODE)
    done = _launch([str(script), str(store.path), str(made[0].ref), str(made[1].ref), "2"], 1)
    assert done.returncode != 0
    assert "expected 2 processes, found 1" in done.stderr
    assert not store.numbers("two", "policy")


@pytest.mark.dist
def test_an_expert_that_one_rank_alone_used_has_the_same_gradient_on_both(tmp_path):
    script = tmp_path / "experts.py"
    script.write_text(EXPERTS)
    done = _launch([str(script)], 2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == ["[[2.0, 2.0, 2.0], [3.0, 3.0, 3.0], None]"] * 2
