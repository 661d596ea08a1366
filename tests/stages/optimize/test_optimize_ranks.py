"""Two and three ranks with gloo on the CPU give what one process gives, with whole weights and with
sharded ones: one launch of each number does the work of all tests that are not slow."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from quiver.stages.core.store import Store
from quiver.stages.model.loading import load_model
from tests import episodes
from tests.stages.optimize import world
from tests.stages.optimize.test_images_trained import make_store
from tests.tiny import make_folder, make_policy
from tests.writing import run_here

pytestmark = pytest.mark.dist
COMMON = {"device": "cpu", "learning_rate": 1e-3, "minibatches": 2, "token_budget": 40}
LINEAR = {**COMMON, "grad_clip": 1e9, "eps": 1.0}
"""AdamW's eps is 1, so that the step follows the gradient and not only its sign."""
PPO = {**LINEAR, "algorithm": "ppo", "critic_warmup_steps": 1}
SHARDED = {**LINEAR, "shard": True}
LORA = {**LINEAR, "learning_rate": 1e-2, "lora": {"rank": 4, "alpha": 12}}
FOUR_STEPS = {**SHARDED, "epochs": 2, "resume_steps": 2}
CASES = {
    # of this seed the second step has its largest ratio on the second rank
    "plain": {**LINEAR, "seed": 1},
    "rounded": {**COMMON, "precision": "bf16_stochastic"},
    "ppo": {**PPO, "bootstrap_length": True},
    "lora": LORA,
    # a rank may have no micro-batch: of its steps one has three, the other two
    "sharded": SHARDED,
    "sharded single": {
        **SHARDED,
        "packing": "single",
        "epochs": 2,
        "score_after": True,
        "entropy_coef": 0.01,
    },
    "sharded critic": {**PPO, "shard": True, "critic": "model"},
    # head and input embedding are apart, so that each is a unit of its own
    "sharded apart": SHARDED,
    "sharded apart 8bit": {
        **SHARDED,
        "precision": "bf16",
        "optimizer": "adamw_8bit",
    },
}
SLOW_CASES = {
    "sharded packed": {
        **SHARDED,
        "packing": "packed",
        "grad_clip": 0.1,
        "activation_checkpointing": True,
    },
    "sharded lora": {**LORA, "shard": True},
    "sharded ppo": {**PPO, "shard": True, "bootstrap_length": True},
    "sharded bfloat16 base": SHARDED,
    "sharded turns": SHARDED,
    "sharded pictures": {
        **SHARDED,
        "precision": "fp32",
        "drop_zero_variance": False,
        "train_vision": True,
    },
}
ALL_CASES = [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW_CASES)]
GOES_ON = {"from one to two": 2, "from two to three": 3, "from three to one": 1}
"""On how many ranks a training ends that was killed on as many as its name says."""


def _made(store: Store, case: str) -> dict[str, str]:
    """The policy, rollouts and rewards that a case trains on."""
    if case == "sharded pictures":
        names = {"policy": "policy@0", "rollouts": "rollouts@1", "rewards": "rewards@1"}
        return {role: f"sees/{name}" for role, name in names.items()}
    if case == "sharded bfloat16 base":
        folder = make_folder(Path(store.url).parent / "bfloat16")
        world.make_bfloat16(folder)
        world.edit_config(folder, dtype="bfloat16")
        policy = world.imported(store, folder, "base")
    elif "apart" in case:  # the output embedding is not the input embedding
        folder = make_folder(Path(store.url).parent / "apart")
        with world.edited_weights(folder) as weights:
            embedding = weights["model.embed_tokens.weight"]
            weights["lm_head.weight"] = embedding.flip(0).contiguous()
        world.edit_config(folder, tie_word_embeddings=False)
        policy = world.imported(store, folder, "base")
    else:
        kind = "t5" if case == "sharded critic" else "llama"
        policy = make_policy(store, kind, kind)
    if case == "sharded turns":
        model = load_model(policy, dtype=torch.float32)
        rollouts = episodes.write(store, policy, episodes.sample(model, episodes.prompts(5), 4))
        rewards = episodes.write_rewards(store, rollouts)
    elif "ppo" in case or "critic" in case:  # one rollout a prompt
        groups = 12 if "ppo" in case else 8
        rollouts, rewards = world.by_engine(store, policy, groups=groups, each=1)
    else:
        rollouts, rewards = world.make(store, policy, world.even_share, groups=5)
    inputs = world.inputs_of(policy, (rollouts, rewards))
    return {role: str(version.ref) for role, version in inputs.items()}


class Scene:
    """Cases, each in a store of its own, and what one process makes of them."""

    def __init__(self, folder: Path, cases: Iterable[str]) -> None:
        self.folder = folder
        self.stores: dict[str, Store] = {}
        self.refs: dict[str, dict[str, str]] = {}
        self.said: dict[int, list[dict]] = {}
        """By the number of ranks: what each of them says of its jobs."""
        for case in cases:
            (folder / case).mkdir()
            store = Store(folder / case / "store")
            self.stores[case] = make_store(folder / case, "llava") if "pictures" in case else store
            self.refs[case] = _made(self.stores[case], case)
            self.run_alone(case, "one", {**CASES, **SLOW_CASES}[case])

    def run_alone(self, case: str, into: str, config: dict, **refs: str) -> None:
        named = {**self.refs[case], **refs}
        run_here("optimize", config, self.stores[case], **named, into=into)

    def job(self, case: str, into: str, config: dict, **options) -> dict:
        """What ranks are to train; `dies`: up to the third step, `fails`: each way of packing,
        `differs`: something else on the second rank."""
        refs = {**self.refs[case], **options.pop("refs", {})}
        usual = {"name": into, "dies": False, "fails": False, "differs": False}
        store = self.stores[case].url
        return {**usual, "store": store, "into": into, "config": config, "refs": refs, **options}

    def launch(self, size: int, jobs: list[dict]) -> None:
        """Run the jobs on `size` ranks, and wait until all have ended well."""
        module, arguments = "tests.stages.optimize.rank_checks", json.dumps(jobs)
        ranks, logs = world.start_ranks(
            sys.executable, module, self.folder, size, str(self.folder), arguments
        )
        try:
            for rank, log in zip(ranks, logs, strict=True):
                assert rank.wait(480) == 0, log.read_text()[-3000:]
        finally:
            for rank in ranks:
                rank.kill()
                rank.communicate()
        paths = [self.folder / f"said.{size}.{rank}" for rank in range(size)]
        self.said[size] = [json.loads(path.read_text()) for path in paths]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What two and three ranks said and wrote of the quick cases, and of trainings that one number
    of ranks began and another one goes on with."""
    scene = Scene(tmp_path_factory.mktemp("ranks"), CASES)
    scene.run_alone("sharded", "four", FOUR_STEPS)
    with world.dies_after(3):
        scene.run_alone("sharded", "from-one-to-two", FOUR_STEPS)
    sharded = CASES["sharded"]
    scene.launch(
        2,
        [
            scene.job("plain", "refused", {**CASES["plain"], "processes": 3}),
            scene.job("plain", "differs", CASES["plain"], differs=True),
            *(scene.job(case, "two", CASES[case], name=case) for case in CASES),
            scene.job("plain", "two", CASES["plain"], name="again"),
            scene.job("sharded", "narrow", {**sharded, "save_dtype": "bfloat16"}),
            scene.job("sharded", "from-one-to-two", FOUR_STEPS),
            scene.job("sharded", "from-two-to-three", FOUR_STEPS, dies=True),
            scene.job("sharded", "fails", sharded, fails=True),
        ],
    )
    later = {**sharded, "max_staleness": 1}
    narrow = {"policy": "narrow/policy@1"}
    scene.launch(
        3,
        [
            scene.job("sharded", "three", sharded, name="sharded"),
            scene.job("sharded", "from-two-to-three", FOUR_STEPS),
            scene.job("sharded", "from-three-to-one", FOUR_STEPS, dies=True),
            scene.job("sharded", "three-after-two", later, refs=narrow),
        ],
    )
    scene.run_alone("sharded", "from-three-to-one", FOUR_STEPS)
    scene.run_alone("sharded", "one-after-two", later, **narrow)
    return scene


@pytest.fixture(scope="module")
def slow_ranks(tmp_path_factory):
    """What two ranks said and wrote of the slow cases, and refused."""
    scene = Scene(tmp_path_factory.mktemp("slow"), SLOW_CASES)
    jobs = [scene.job(case, "two", SLOW_CASES[case], name=case) for case in SLOW_CASES]
    single = {**SLOW_CASES["sharded turns"], "packing": "single"}
    scene.launch(2, [*jobs, scene.job("sharded turns", "refused", single)])
    return scene


@pytest.fixture
def scene(case, request):
    """The one that has the case."""
    return request.getfixturevalue("ranks" if case in CASES else "slow_ranks")


def _same(store: Store, first: str, second: str, atol: float = 1e-6) -> None:
    """One run's policy is the other's: the files, their bytes but for those of tensors, and these
    up to `atol`; loss and norm of every step."""
    one, other = (store.open(f"{run}/policy@latest") for run in (first, second))
    assert one.files.names == other.files.names
    for name in one.files.names:
        ours, theirs = one.files.read(name), other.files.read(name)
        if not name.endswith(".safetensors"):
            assert ours == theirs, name
            continue
        header = 8 + int.from_bytes(ours[:8], "little")
        assert ours[:header] == theirs[:header], name
        tensors = world.weights(other, name)
        for key, tensor in world.weights(one, name).items():
            torch.testing.assert_close(tensors[key], tensor, rtol=0, atol=atol)
    rows = [world.updates(store, version) for version in (one, other)]
    columns = ("loss", "grad_norm", "entropy", "clip_fraction", "ratio_max", "value_loss")
    columns += ("explained_variance", "tokens", "rollouts", "microbatches")
    for row, their_row in zip(*rows, strict=True):
        for column in columns:
            assert their_row[column] == pytest.approx(row[column], abs=1e-5), column


@pytest.mark.parametrize(
    "case", [case for case in ALL_CASES if case not in ("rounded", "sharded apart 8bit")]
)
def test_two_ranks_train_as_one_process(scene, case):
    store = scene.stores[case]
    _same(store, "one", "two")
    assert store.open("two/policy@1").manifest.metrics["processes"] == 2
    versions = [store.open(ref) for ref in (scene.refs[case]["policy"], "one/policy@1")]
    before, after = (world.weights(version) for version in versions)
    moved = [(after[name].float() - weight.float()).abs().max() for name, weight in before.items()]
    assert max(moved) > 1e-6


def test_products_in_bfloat16_give_nearly_the_same_step(ranks):
    """And moments in 8 bits have the blocks of one process."""
    store = ranks.stores["sharded apart 8bit"]
    one, two = (store.open(f"{run}/policy@1") for run in ("one", "two"))
    before = world.weights(store.open(ranks.refs["sharded apart 8bit"]["policy"]))
    ours, theirs = world.weights(one), world.weights(two)
    moved = torch.cat([(ours[name] - weight).flatten() for name, weight in before.items()])
    apart = torch.cat([(theirs[name] - ours[name]).flatten() for name in before])
    assert 0 < apart.norm() < 0.05 * moved.norm()
    states = [world.weights(version, "optimizer/state.safetensors") for version in (one, two)]
    kinds = [{name: (each.dtype, each.shape) for name, each in state.items()} for state in states]
    assert kinds[0] == kinds[1]
    assert torch.uint8 in {dtype for dtype, _ in kinds[0].values()}


def test_the_same_work_again_is_done_already(ranks):
    refs = [said[name]["ref"] for said in ranks.said[2] for name in ("plain", "again")]
    assert refs == ["two/policy@1"] * 4
    assert ranks.stores["plain"].numbers("two", "updates") == [1]


def test_ranks_round_alike(ranks):
    """Bit for bit; and as one rank does, but where a sum in another order comes to the other side
    of a draw."""
    first, second = (load_file(ranks.folder / f"rounded.{rank}") for rank in (0, 1))
    assert world.are_equal(first, second)
    alone = world.weights(ranks.stores["rounded"].open("one/policy@1"))
    differ = sum(int((value != alone[name]).sum()) for name, value in first.items())
    assert differ < 0.01 * sum(value.numel() for value in first.values())


def test_another_number_of_processes_than_asked_for_is_refused(ranks):
    assert all("expected 3 processes, found 2" in said["refused"] for said in ranks.said[2])
    assert ranks.stores["plain"].numbers("refused", "policy") == []


def test_other_settings_on_one_rank_are_refused_by_all(ranks):
    first, second = (said["differs"] for said in ranks.said[2])
    assert first == second
    assert "E-CONFIG optimize: the ranks do not train the same: run_key of rank 0" in first
    assert ranks.stores["plain"].numbers("differs", "policy") == []


def test_an_expert_that_one_rank_alone_used_has_the_same_gradient_on_all(ranks):
    for size, said in ranks.said.items():
        expected = [*([2.0 + rank] * 3 for rank in range(size)), None]
        assert [of_rank["experts"] for of_rank in said] == [expected] * size


# -- sharded weights


def test_sharded_weights_are_whole_where_the_kernel_is_probed(ranks):
    probed = [said["sharded"]["probed"] for said in ranks.said[2]]
    assert probed[0] == probed[1] == pytest.approx(ranks.said[3][0]["sharded"]["probed"])
    assert len(probed[0]) == 1 and probed[0][0] > 0


def test_three_ranks_do(ranks):
    _same(ranks.stores["sharded"], "one", "three")
    _same(ranks.stores["sharded"], "one-after-two", "three-after-two")


@pytest.mark.parametrize("case", [case for case in ALL_CASES if "sharded" in str(case)])
def test_each_rank_holds_its_share(scene, case):
    """Of weights and of moments; the rows of a weight need not divide evenly."""
    for size, said in scene.said.items():
        shares = [of_rank[case] for of_rank in said if case in of_rank]
        for name in ("weights", "moments") if shares else ():
            num_held = sum(share[name] for share in shares)
            assert num_held == shares[0]["all"] or "pictures" in case  # some weights see nothing
            assert max(share[name] for share in shares) <= 1.25 * shares[0]["all"] / size


@pytest.mark.parametrize("name", GOES_ON)
def test_a_training_that_was_killed_goes_on_with_another_number_of_ranks(ranks, name):
    store = ranks.stores["sharded"]
    into = name.replace(" ", "-")
    assert store.open(f"{into}/policy@1").manifest.metrics["processes"] == GOES_ON[name]
    _same(store, "four", into)
    before = {"from two to three": 2, "from three to one": 3}.get(name)
    assert not before or [said[into] for said in ranks.said[before]] == ["died"] * before


def test_a_way_of_packing_that_fails_leaves_the_next_one_whole(ranks):
    assert [said["fails"]["mode"] for said in ranks.said[2]] == ["single"] * 2
    one, other = (
        world.weights(ranks.stores["sharded"].open(f"{run}/policy@1")) for run in ("one", "fails")
    )
    for name, weight in one.items():
        torch.testing.assert_close(other[name], weight, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_histories_that_take_several_passes_a_rollout_are_refused(slow_ranks):
    """Where each rollout runs alone: ranks would exchange weights a different number of times."""
    for said in slow_ranks.said[2]:
        assert "different numbers of passes" in said["refused"]
    assert slow_ranks.stores["sharded turns"].numbers("refused", "policy") == []
