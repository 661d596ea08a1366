"""Two processes with gloo on the CPU give what one gives: one launch does the work of all these
tests."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from quiver.stages.common.store import Store
from quiver.stages.optimize.stage import Config
from tests.stages.optimize import world
from tests.stages.optimize.launching import run_ranks
from tests.stages.optimize.test_seq2seq_policies import sampled
from tests.tiny import make_policy
from tests.writing import run_here

pytestmark = pytest.mark.dist
COMMON = {"device": "cpu", "learning_rate": 1e-3, "minibatches": 2, "token_budget": 40}
LINEAR = {**COMMON, "grad_clip": 1e9, "eps": 1.0}
"""AdamW's eps is 1, so that the step follows the gradient and not only its sign."""
CONFIGS = {
    # of this seed the second step has its largest ratio on the second rank
    "plain": {**LINEAR, "seed": 1},
    "rounded": {**COMMON, "precision": "bf16_stochastic"},
    "ppo": {**LINEAR, "algorithm": "ppo", "bootstrap_length": True, "critic_warmup_steps": 1},
    "critic": {**LINEAR, "algorithm": "ppo", "critic": "model", "critic_warmup_steps": 1},
    "lora": {**LINEAR, "learning_rate": 1e-2, "lora": {"rank": 4, "alpha": 12}},
}
RANK = """
import json, sys
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors.torch import save_file

from quiver import run_stage
from quiver.schemas.errors import ConfigError
from quiver.stages.common.store import Store
from quiver.stages.optimize.stage import Config
from quiver.stages.optimize.trainer import Trainer

folder, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
Accelerator.end_training = lambda self: None  # it takes the ranks apart, which go on with the next case
accelerator = Accelerator(cpu=True)
rank, said = accelerator.process_index, {}
train = Trainer.train


def kept(self, *arguments, to):
    outcome = train(self, *arguments)
    weights = {name: value.detach() for name, value in self.model.named_parameters()}
    save_file(weights, to)
    return outcome


def optimize(name, **changed):
    case = cases[name]
    Trainer.train = lambda self, *arguments: kept(self, *arguments, to=folder / f"{name}.{rank}")
    config = Config(**{**case["config"], "processes": 2, **changed})
    return str(run_stage("optimize", config, Store(case["store"]), in_process=True, into="two", **case["refs"]))


try:
    optimize("plain", processes=3)
except ConfigError as error:
    said["refused"] = str(error), Store(cases["plain"]["store"]).numbers("two", "policy")
accelerator.wait_for_everyone()
for name in cases:
    said[name] = optimize(name)
said["again"] = optimize("plain")

# each rank sends its tokens through one of three experts
trainer = object.__new__(Trainer)
trainer.accelerator = accelerator
experts = [torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in range(3)]
trainer.parameters = experts
for expert in experts:
    expert.grad_dtype = torch.float32
experts[rank].grad = torch.full((3,), 2.0 + rank)
trainer._sum_gradients()
said["experts"] = [expert.grad if expert.grad is None else expert.grad.tolist() for expert in experts]
(folder / f"said.{rank}").write_text(json.dumps(said))
"""


def _made(store: Store, case: str):
    """(policy, rollouts, rewards) that a case trains on."""
    kind = "t5" if case == "critic" else "llama"
    policy = make_policy(store, kind, kind)
    if case in ("ppo", "critic"):  # one rollout a prompt
        rollouts = sampled(store, policy, groups=12 if case == "ppo" else 8, each=1)
        return policy, rollouts, world.write_rewards(store, rollouts, world.even_share, run=kind)
    return policy, *world.make(store, policy, world.even_share, groups=5, run=kind)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What two ranks said and wrote, each case in a store of its own; and what one process makes of
    the same."""
    folder, cases, one = tmp_path_factory.mktemp("ranks"), {}, {}
    for name, config in CONFIGS.items():
        store = Store(folder / "stores" / name)
        made = _made(store, name)
        refs = dict(
            zip(("policy", "rollouts", "rewards"), (each.ref for each in made), strict=True)
        )
        one[name] = store.open(run_here("optimize", Config(**config), store, **refs))
        named = {role: str(ref) for role, ref in refs.items()}
        cases[name] = {"store": str(store.path), "config": config, "refs": named}
    script = folder / "rank.py"
    script.write_text(RANK)
    run_ranks(script, 2, str(folder), json.dumps(cases))
    return SimpleNamespace(
        one=one,
        two={name: Store(cases[name]["store"]).open("two/policy@1") for name in cases},
        stores={name: Store(cases[name]["store"]) for name in cases},
        said=[json.loads((folder / f"said.{rank}").read_text()) for rank in range(2)],
        weights=lambda name: [load_file(folder / f"{name}.{rank}") for rank in range(2)],
    )


def _tensors(version, name: str = "model.safetensors") -> dict[str, torch.Tensor]:
    return load_file(version.files.folder / name)


def _same(ranks, case: str, files: tuple[str, ...], atol: float) -> None:
    """Both ranks name one version, and its tensors are those that one process made."""
    assert [said[case] for said in ranks.said] == ["two/policy@1"] * 2
    assert ranks.two[case].manifest.metrics["processes"] == 2
    for name in files:
        theirs = _tensors(ranks.two[case], name)
        for key, value in _tensors(ranks.one[case], name).items():
            torch.testing.assert_close(theirs[key], value, rtol=0, atol=atol)


def _same_updates(ranks, case: str, columns: tuple[str, ...]) -> None:
    mine, theirs = (
        ranks.stores[case].open(version.manifest.metrics["updates"]).table().to_pylist()
        for version in (ranks.one[case], ranks.two[case])
    )
    for row, their_row in zip(mine, theirs, strict=True):
        for name in columns:
            assert their_row[name] == pytest.approx(row[name], abs=1e-5)


def test_two_ranks_train_as_one(ranks):
    _same(ranks, "plain", ("model.safetensors",), 2.4e-7)  # two of float32's steps at 1.0
    base = _tensors(ranks.stores["plain"].open("llama/policy@0"))
    first = _tensors(ranks.one["plain"])
    assert max(float((first[name] - base[name]).abs().max()) for name in base) > 1e-5
    columns = ("loss", "grad_norm", "entropy", "tokens", "rollouts", "microbatches")
    _same_updates(ranks, "plain", (*columns, "clip_fraction", "ratio_max"))


def test_the_same_work_again_is_done_already(ranks):
    assert [said["again"] for said in ranks.said] == ["two/policy@1"] * 2
    store = ranks.stores["plain"]
    assert store.numbers("two", "policy") == [1] and store.numbers("two", "updates") == [1]


def test_two_ranks_train_a_policy_and_its_critic_as_one(ranks):
    _same(ranks, "ppo", ("model.safetensors", "value_head/state.safetensors"), 1e-6)
    _same_updates(ranks, "ppo", ("loss", "value_loss", "explained_variance", "grad_norm"))


def test_two_ranks_train_a_critic_of_its_own_as_one(ranks):
    _same(ranks, "critic", ("model.safetensors", "critic/state.safetensors"), 1e-6)


def test_two_ranks_train_an_adapter_as_one(ranks):
    adapter = "adapter/adapter_model.safetensors"
    _same(ranks, "lora", ("model.safetensors", adapter), 1e-7)
    moved = [
        value for key, value in _tensors(ranks.two["lora"], adapter).items() if "lora_B" in key
    ]
    assert max(float(value.abs().max()) for value in moved) > 1e-5


def test_ranks_round_alike(ranks):
    """Bit for bit; and as one rank does, but where a sum in another order comes to the other side
    of a draw."""
    first, second = ranks.weights("rounded")
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    alone = _tensors(ranks.one["rounded"])
    differ = sum(int((value != alone[name]).sum()) for name, value in first.items())
    assert differ < 0.01 * sum(value.numel() for value in first.values())


def test_another_number_of_processes_than_asked_for_is_refused(ranks):
    for said in ranks.said:
        message, versions = said["refused"]
        assert "expected 3 processes, found 2" in message and versions == []


def test_an_expert_that_one_rank_alone_used_has_the_same_gradient_on_both(ranks):
    expected = [[2.0, 2.0, 2.0], [3.0, 3.0, 3.0], None]
    assert [said["experts"] for said in ranks.said] == [expected] * 2
