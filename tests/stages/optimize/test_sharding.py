"""Weights that lie sharded over two and three processes, with gloo on the CPU, give what whole ones
give in one process: one launch of each does the work of all tests that are not slow."""

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quiver.stages.common.models.checkpoints import PolicyConfig
from quiver.stages.common.models.loading import load_model
from quiver.stages.common.store import Store
from quiver.stages.optimize.stage import Config
from quiver.stages.optimize.trainer import Trainer
from tests import episodes
from tests.stages.optimize import world
from tests.stages.optimize.launching import run_ranks
from tests.stages.optimize.test_images_trained import make_store
from tests.stages.optimize.test_seq2seq_policies import sampled
from tests.tiny import make_folder, make_policy
from tests.writing import run_here

pytestmark = pytest.mark.dist
COMMON = {"device": "cpu", "minibatches": 2, "token_budget": 40, "grad_clip": 1e9}
LINEAR = {**COMMON, "learning_rate": 1e-3, "eps": 1.0}
"""AdamW's eps is 1, so that the step follows the gradient and not only its sign."""
SIX_STEPS = {**LINEAR, "epochs": 3, "resume_steps": 2}
PICTURES = {**LINEAR, "precision": "fp32", "drop_zero_variance": False}
CASES = {
    "shared prompts": LINEAR,
    "whole rollouts": {
        **LINEAR,
        "packing": "packed",
        "grad_clip": 0.1,
        "activation_checkpointing": True,
    },
    "single, epochs": {
        **LINEAR,
        "packing": "single",
        "epochs": 2,
        "score_after": True,
        "entropy_coef": 0.01,
    },
    "lora": {**LINEAR, "learning_rate": 1e-2, "lora": {"rank": 4, "alpha": 12}},
    "ppo": {**LINEAR, "algorithm": "ppo", "bootstrap_length": True, "critic_warmup_steps": 1},
    "critic": {**LINEAR, "algorithm": "ppo", "critic": "model", "critic_warmup_steps": 1},
    "bfloat16 base": LINEAR,
    "turns": LINEAR,
    "pictures": {**PICTURES, "train_vision": True},
}
"""A rank may have no micro-batch: of the first case's steps one has three, the other two."""
QUICK = ("shared prompts", "single, epochs", "critic")
SLOW = [pytest.param(case, marks=pytest.mark.slow) for case in CASES if case not in QUICK]
"""Each is tried on two ranks; the first one on three besides."""
GOES_ON = {"from one to two": 2, "from two to three": 3, "from three to one": 1}
"""On how many ranks a training ends that was killed on as many as its name says."""
RANK = """
import json, sys
from pathlib import Path

import torch
from accelerate import Accelerator

from quiver import run_stage
from quiver.schemas.errors import ConfigError
from quiver.stages.common.forward import attention
from quiver.stages.common.store import Store
from quiver.stages.optimize.sharding import ShardedTrainer
from quiver.stages.optimize.stage import Config
from quiver.stages.optimize.trainer import Trainer

folder, jobs = Path(sys.argv[1]), json.loads(sys.argv[2])
Accelerator.end_training = lambda self: None  # it takes the ranks apart, which go on with the next
accelerator = Accelerator(cpu=True)
rank, size = accelerator.process_index, accelerator.num_processes
said = {}
train, step, block_attention = Trainer.train, Trainer._train_minibatch, attention.block_attention


def seen(self, *arguments):
    outcome = train(self, *arguments)
    tensors = {"weights": self.parameters, "moments": [state["exp_avg"] for state in self.optimizer.state.values() if state]}
    said[job["name"]] = {name: sum(t.to_local().numel() for t in each) for name, each in tensors.items()}
    said[job["name"]] |= {"all": self.num_trained, "mode": self.mode}
    return outcome


def dies(self, *arguments):
    if len(self.updates) == 3:
        raise KeyboardInterrupt
    return step(self, *arguments)


def fails(*arguments, **options):
    raise NotImplementedError


for job in jobs:
    Trainer.train = seen
    Trainer._train_minibatch = dies if job["dies"] else step
    attention.block_attention = fails if job["fails"] else block_attention
    config = Config(**{**job["config"], "processes": size, "shard": True})
    try:
        run_stage("optimize", config, Store(job["store"]), in_process=True, into=job["into"], **job["refs"])
    except KeyboardInterrupt:
        said[job["name"]] = "died"
    except ConfigError as error:
        said[job["name"]] = str(error)
(folder / f"said.{size}.{rank}").write_text(json.dumps(said))
"""


def _made(store: Store, case: str) -> dict[str, str]:
    """The policy, rollouts and rewards that a case trains on."""
    if case == "bfloat16 base":
        folder = make_folder(store.path.parent / "bfloat16")
        weights = load_file(folder / "model.safetensors")
        narrow = {name: weight.bfloat16() for name, weight in weights.items()}
        save_file(narrow, folder / "model.safetensors", {"format": "pt"})
        about = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**about, "dtype": "bfloat16"}))
        policy = store.open(run_here("policy", PolicyConfig(model=str(folder)), store, into="base"))
    else:
        policy = make_policy(store, *["t5" if case == "critic" else "llama"] * 2)
    if case == "turns":
        model = load_model(policy, dtype=torch.float32)
        rollouts = episodes.write(store, policy, episodes.sample(model, episodes.prompts(5), 4))
        rewards = episodes.write_rewards(store, rollouts)
    elif case in ("ppo", "critic"):  # one rollout a prompt
        rollouts = sampled(store, policy, groups=12 if case == "ppo" else 8, each=1)
        rewards = world.write_rewards(store, rollouts, world.even_share)
    else:
        rollouts, rewards = world.make(store, policy, world.even_share, groups=5)
    return {"policy": policy, "rollouts": rollouts, "rewards": rewards}


def _launch(folder: Path, size: int, jobs: list[dict]) -> list[dict]:
    """What each of `size` ranks says of the jobs."""
    (folder / "rank.py").write_text(RANK)
    run_ranks(folder / "rank.py", size, str(folder), json.dumps(jobs))
    return [json.loads((folder / f"said.{size}.{rank}").read_text()) for rank in range(size)]


class Scene:
    """Cases, each in a store of its own, and what one process makes of them."""

    def __init__(self, folder: Path, cases: Iterable[str]) -> None:
        self.folder = folder
        self.stores: dict[str, Store] = {}
        self.refs: dict[str, dict[str, str]] = {}
        self.said: dict[int, list[dict]] = {}
        for case in cases:
            if case == "pictures":
                (folder / case).mkdir()
                self.stores[case] = make_store(folder / case, "llava")
                names = {"policy": "sees/policy@0", "rollouts": "sees/rollouts@1"}
                self.refs[case] = {**names, "rewards": "sees/rewards@1"}
            else:
                store = Store(folder / case.replace(", ", "-").replace(" ", "-"))
                self.stores[case] = store
                self.refs[case] = {role: str(v.ref) for role, v in _made(store, case).items()}
            self.run_alone(case, "one", CASES[case])

    def run_alone(self, case: str, into: str, config: dict, **refs: str) -> None:
        named = {**self.refs[case], **refs}
        run_here("optimize", Config(**config), self.stores[case], **named, into=into)

    def job(self, case: str, into: str, config: dict, **options) -> dict:
        """What ranks are to train; `dies`: up to the third step, `fails`: each way of packing."""
        named = {**self.refs[case], **options.pop("refs", {})}
        place = {"name": into, "into": into, "store": str(self.stores[case].path)}
        usual = {"config": config, "refs": named, "dies": False, "fails": False}
        return {**place, **usual, **options}

    def launch(self, size: int, jobs: list[dict]) -> None:
        self.said[size] = _launch(self.folder, size, jobs)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What two and three ranks said and wrote of the quick cases, and of trainings that one number
    of ranks began and another one goes on with."""
    scene = Scene(tmp_path_factory.mktemp("sharded"), QUICK)
    first = QUICK[0]
    scene.run_alone(first, "six", SIX_STEPS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_train_minibatch", _dies(Trainer._train_minibatch))
        with pytest.raises(KeyboardInterrupt):
            scene.run_alone(first, "from-one-to-two", SIX_STEPS)
    scene.launch(
        2,
        [
            *(scene.job(case, "two", CASES[case], name=case) for case in QUICK),
            scene.job(first, "narrow", {**LINEAR, "save_dtype": "bfloat16"}),
            scene.job(first, "from-one-to-two", SIX_STEPS),
            scene.job(first, "from-two-to-three", SIX_STEPS, dies=True),
            scene.job(first, "fails", LINEAR, fails=True),
        ],
    )
    again = {"policy": "narrow/policy@1"}
    second = {**LINEAR, "max_staleness": 1}
    scene.launch(
        3,
        [
            scene.job(first, "three", CASES[first], name=first),
            scene.job(first, "from-two-to-three", SIX_STEPS),
            scene.job(first, "from-three-to-one", SIX_STEPS, dies=True),
            scene.job(first, "three-after-two", second, refs=again),
        ],
    )
    scene.run_alone(first, "from-three-to-one", SIX_STEPS)
    scene.run_alone(first, "one-after-two", second, **again)
    return scene


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """What two ranks said and wrote of the other cases, and refused."""
    cases = [case for case in CASES if case not in QUICK]
    scene = Scene(tmp_path_factory.mktemp("others"), cases)
    jobs = [scene.job(case, "two", CASES[case], name=case) for case in cases]
    scene.launch(2, [*jobs, scene.job("turns", "refused", {**LINEAR, "packing": "single"})])
    return scene


@pytest.fixture
def scene(case, request):
    """The one that has the case."""
    return request.getfixturevalue("ranks" if case in QUICK else "others")


def _dies(step):
    def die_after_three(self, *arguments):
        if len(self.updates) == 3:
            raise KeyboardInterrupt
        return step(self, *arguments)

    return die_after_three


def _same(store: Store, first: str, second: str, atol: float = 1e-6) -> None:
    """One run's policy is the other's: the files, their bytes but for those of tensors, and these
    up to `atol`; loss and norm of every step."""
    one, other = (store.open(f"{run}/policy@latest") for run in (first, second))
    assert one.files.names == other.files.names
    for name in one.files.names:
        ours, theirs = one.files.path(name), other.files.path(name)
        if not name.endswith(".safetensors"):
            assert ours.read_bytes() == theirs.read_bytes(), name
            continue
        with ours.open("rb") as our_file, theirs.open("rb") as their_file:
            header = 8 + int.from_bytes(our_file.read(8), "little")
            our_file.seek(0)
            assert our_file.read(header) == their_file.read(header), name
        tensors = load_file(theirs)
        for key, tensor in load_file(ours).items():
            torch.testing.assert_close(tensors[key], tensor, rtol=0, atol=atol)
    rows = [
        store.open(version.manifest.metrics["updates"]).table().to_pylist()
        for version in (one, other)
    ]
    for row, their_row in zip(*rows, strict=True):
        for column in ("loss", "grad_norm", "entropy", "tokens", "rollouts", "microbatches"):
            assert their_row[column] == pytest.approx(row[column], abs=1e-5), column
        assert their_row["value_loss"] == pytest.approx(row["value_loss"], abs=1e-5)


@pytest.mark.parametrize("case", [*QUICK, *SLOW])
def test_two_ranks_with_shards_train_as_one_process_with_all(scene, case):
    _same(scene.stores[case], "one", "two")


def test_three_ranks_do(ranks):
    _same(ranks.stores[QUICK[0]], "one", "three")


@pytest.mark.parametrize("case", [*QUICK, *SLOW])
def test_what_is_trained_has_moved(scene, case):
    store = scene.stores[case]
    before, after = (
        load_file(store.open(ref).files.folder / "model.safetensors")
        for ref in (scene.refs[case]["policy"], "one/policy@1")
    )
    gaps = [(after[name].float() - weight.float()).abs().max() for name, weight in before.items()]
    assert max(gaps) > 1e-6


@pytest.mark.parametrize("case", [*QUICK, *SLOW])
def test_each_rank_holds_its_share(scene, case):
    """Of weights and of moments; the rows of a weight need not divide evenly."""
    for size, said in scene.said.items():
        shares = [answers[case] for answers in said if case in answers]
        for name in ("weights", "moments") if shares else ():
            num_held = sum(share[name] for share in shares)
            assert num_held == shares[0]["all"] or case == "pictures"  # some weights see nothing
            assert max(share[name] for share in shares) <= 1.25 * shares[0]["all"] / size


@pytest.mark.parametrize("name", GOES_ON)
def test_a_training_that_was_killed_goes_on_with_another_number_of_ranks(ranks, name):
    store = ranks.stores["shared prompts"]
    into = name.replace(" ", "-")
    size = GOES_ON[name]
    assert store.open(f"{into}/policy@1").manifest.metrics["processes"] == size
    _same(store, "six", into)
    before = {"from two to three": 2, "from three to one": 3}.get(name)
    if before:
        assert [said[into] for said in ranks.said[before]] == ["died"] * before


def test_three_ranks_train_on_with_the_moments_of_two(ranks):
    _same(ranks.stores["shared prompts"], "one-after-two", "three-after-two")


def test_a_way_of_packing_that_fails_leaves_the_next_one_whole(ranks):
    assert [said["fails"]["mode"] for said in ranks.said[2]] == ["single"] * 2
    store = ranks.stores["shared prompts"]
    expected = load_file(store.open("one/policy@1").files.folder / "model.safetensors")
    weights = load_file(store.open("fails/policy@1").files.folder / "model.safetensors")
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-6)


@pytest.mark.slow
def test_histories_that_take_several_passes_a_rollout_are_refused(others):
    """Where each rollout runs alone: ranks would exchange weights a different number of times."""
    for said in others.said[2]:
        assert "ranks would not come out even" in said["refused"]
    assert others.stores["turns"].numbers("refused", "policy") == []


def test_one_process_has_nobody_to_share_weights_with(ranks):
    store = ranks.stores["shared prompts"]
    refs = {"policy": "llama/policy@0", "rollouts": "tiny/rollouts@1", "rewards": "tiny/rewards@1"}
    ref = run_here("optimize", Config(**LINEAR, shard=True), store, **refs, into="one")
    assert str(ref) == "one/policy@1", "the very work that is done without"


def test_weights_in_bfloat16_are_not_sharded():
    with pytest.raises(ValueError, match="does not go with shard"):
        Config(precision="bf16_stochastic", shard=True)
