"""Where the field goes wrong: one test a trap, through the real stages. Each fails when its trap is
put in.

The policy here invites them: its generation config holds sampling defaults, its tokenizer puts a
BOS before what its template has already begun with one, its pad is an ordinary id of prompts and
completions, and rollouts end by end token and by length. The engine here is `transformers`; what
vLLM could do wrong of it is in `tests/stages/generate/test_generate_vllm.py`.
"""

import json
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import processors

from quiver.schemas.errors import NumericError
from quiver.stages.common.forward.layout import Sequences
from quiver.stages.common.models.checkpoints import PolicyConfig
from quiver.stages.common.models.loading import load_model
from quiver.stages.common.ragged import Ragged
from quiver.stages.common.store import Store
from quiver.stages.generate import stage as generate
from quiver.stages.optimize import advantages, critic, losses
from quiver.stages.optimize import rollouts as joining
from quiver.stages.optimize import stage as optimize
from quiver.stages.optimize.accelerator import make_accelerator
from quiver.stages.optimize.algorithms import resolve
from quiver.stages.optimize.trainer import Trainer
from quiver.stages.prompt import stage as prompt
from quiver.stages.reward import stage as reward
from tests import tiny
from tests.stages.optimize import world
from tests.writing import run_here

import_policy = partial(run_here, "policy")


TEMPERATURE, LONGEST, STOPS = 0.7, 12, [*range(280, 300)]
HIDDEN = {
    "do_sample": True,
    "temperature": 0.05,
    "top_k": 1,
    "top_p": 0.1,
    "repetition_penalty": 1.8,
    "max_new_tokens": 2,
}
QUESTIONS = [
    "What is seven plus 5?",
    "<|endoftext|> zero one",
    "ten",
    "The answer is 12. What is the question?",
]


def import_inviting(store: Store, folder: Path):
    """`tiny/policy@0`, as the module's docstring says."""
    tiny.make_folder(folder)
    defaults = folder / "generation_config.json"
    defaults.write_text(json.dumps({**json.loads(defaults.read_text()), **HIDDEN}))
    tokenizer = type(tiny.tokenizer()).from_pretrained(folder, bos_token=tiny.SPECIALS[0])
    bos = (tiny.SPECIALS[0], tiny.PAD)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos[0]} $A", special_tokens=[bos]
    )
    tokenizer.chat_template = "{{ bos_token }}" + tiny.CHATML
    tokenizer.save_pretrained(folder)
    return store.open(import_policy(PolicyConfig(model=str(folder)), store, into="tiny"))


def sampled(store: Store, policy, prompts):
    """rollouts/1 of the transformers engine, four a prompt."""
    sampling = {"temperature": TEMPERATURE, "max_tokens": LONGEST, "stop_token_ids": STOPS}
    config = generate.Config(
        engine="transformers", samples_per_prompt=4, dtype="float32", sampling=sampling
    )
    return store.open(run_here("generate", config, store, prompts=prompts.ref, policy=policy.ref))


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    """store, policy, prompts, rollouts, their rows, rewards, and the policy's model in float64."""
    folder = tmp_path_factory.mktemp("traps")
    store = Store(folder / "store")
    policy = import_inviting(store, folder / "model")
    (folder / "rows.jsonl").write_text(
        "\n".join(json.dumps({"prompt": text}) for text in QUESTIONS)
    )
    prompts = store.open(
        run_here(
            "prompt", prompt.Config(source=str(folder / "rows.jsonl")), store, policy=policy.ref
        )
    )
    rollouts = sampled(store, policy, prompts)
    return SimpleNamespace(
        store=store,
        policy=policy,
        prompts=prompts,
        rollouts=rollouts,
        rows=rollouts.table().to_pylist(),
        rewards=world.write_rewards(store, rollouts, world.even_share),
        model=load_model(policy, dtype=torch.float64),
    )


def own(model, row: dict, temperature: float = TEMPERATURE) -> torch.Tensor:
    """[T] logprobs of one rollout by one plain forward pass: no batch, no padding, no cache."""
    ids, start = torch.tensor(row["completion_ids"]), len(row["prompt_ids"]) - 1
    with torch.no_grad():
        if model.config.is_encoder_decoder:
            shifted = torch.tensor(
                [[model.config.decoder_start_token_id, *row["completion_ids"][:-1]]]
            )
            logits = model(
                input_ids=torch.tensor([row["prompt_ids"]]), decoder_input_ids=shifted
            ).logits[0]
        else:
            logits = model(
                input_ids=torch.tensor([row["prompt_ids"] + row["completion_ids"]])
            ).logits[0, start:-1]
    return (logits.double() / temperature).log_softmax(-1).gather(1, ids[:, None])[:, 0]


def trainer(chain, rollouts=None, rewards=None, **config) -> Trainer:
    """The optimizer's loop over the chain's rollouts, before its first step."""
    config = optimize.Config(device="cpu", audit={"enabled": False}, **config).resolved()
    inputs = {
        "policy": chain.policy,
        "rollouts": rollouts or chain.rollouts,
        "rewards": rewards or chain.rewards,
    }
    row = resolve(config.algorithm)
    loaded = joining.load(config, row, chain.store, inputs)
    return Trainer(
        config,
        load_model(chain.policy, dtype=torch.float32),
        loaded.batch,
        row,
        make_accelerator(config),
    )


def rescored(chain, rows: list[dict], scores=world.even_share) -> tuple[list[float], list[float]]:
    """What the trainer and one plain pass say of `rows`' tokens."""
    rollouts = world.write_rollouts(chain.store, chain.policy, rows, run=chain.policy.ref.run)
    made = trainer(
        chain,
        rollouts,
        world.write_rewards(chain.store, rollouts, scores, run=chain.policy.ref.run),
    )
    expected = torch.cat([own(chain.model, row, row["temperature"]) for row in rows])
    return made.score(range(len(rows))).tolist(), expected.tolist()


def gradient(made: Trainer) -> dict[str, torch.Tensor]:
    """The first step's gradient of every weight."""
    everyone = list(range(len(made.batch.groups)))
    made.accumulate(everyone, everyone)
    return {name: parameter.grad for name, parameter in made.model.named_parameters()}


def optimized(chain, rollouts=None, rewards=None, *, config=None, **refs) -> dict[str, dict]:
    """advantages/1 that the stage writes, by rollout_id."""
    config = optimize.Config(device="cpu", **(config or {}))
    named = {
        "rollouts": (rollouts or chain.rollouts).ref,
        "rewards": (rewards or chain.rewards).ref,
        **refs,
    }
    done = chain.store.open(
        run_here("optimize", config, chain.store, policy=chain.policy.ref, **named)
    )
    return {
        row["rollout_id"]: row
        for row in chain.store.open(done.manifest.metrics["advantages"]).table().to_pylist()
    }


# -- the engine's numbers


def test_trap_off_by_one_of_logprobs(chain):
    """A token's logprob is read where the id before it stands, by the engine and by the trainer."""
    saved = [value for row in chain.rows for value in row["old_logprobs"]]
    found, expected = rescored(chain, chain.rows)
    assert saved == pytest.approx(expected, abs=1e-4)
    assert found == pytest.approx(expected, abs=1e-4)
    assert found[1:] != pytest.approx(expected[:-1], abs=1e-1)


def test_trap_temperature_forgotten_in_the_trainer(chain):
    """Each row has its own."""
    rows = [
        {**row, "temperature": (0.5, TEMPERATURE, 1.3)[at % 3]} for at, row in enumerate(chain.rows)
    ]
    found, expected = rescored(chain, rows)
    assert found == pytest.approx(expected, abs=1e-4)
    assert found != pytest.approx(
        torch.cat([own(chain.model, row, 1.0) for row in rows]).tolist(), abs=1e-1
    )


def test_trap_raw_instead_of_processed_logprobs(chain):
    """The engine reports the distribution that it sampled from; rows that hold the model's raw one
    stop before any update."""
    for row in chain.rows:
        assert row["old_logprobs"] == pytest.approx(own(chain.model, row).tolist(), abs=1e-4)
    raw = [{**row, "old_logprobs": own(chain.model, row, 1.0).tolist()} for row in chain.rows]
    rollouts = world.write_rollouts(chain.store, chain.policy, raw)
    before = chain.store.numbers("tiny", "policy")
    with pytest.raises(NumericError, match="raw logprobs"):
        optimized(chain, rollouts, world.write_rewards(chain.store, rollouts, world.even_share))
    assert chain.store.numbers("tiny", "policy") == before


def test_trap_hidden_sampling_defaults(chain):
    """The generation config's top_k = 1 would make a group's samples equal, its max_new_tokens all
    of them two ids long."""
    assert (
        json.loads((chain.policy.files.folder / "generation_config.json").read_text())["top_k"] == 1
    )
    for group in range(len(QUESTIONS)):
        members = [row["completion_ids"] for row in chain.rows if row["group_id"] == f"{group:06d}"]
        assert len({tuple(ids) for ids in members}) == 4
    assert max(len(row["completion_ids"]) for row in chain.rows) == LONGEST


def test_trap_an_end_token_left_out_or_invented(chain):
    """What was sampled is kept, with its own logprob; what was cut by length has no end token."""
    ends = {tiny.EOS, *STOPS}
    assert {row["finish_reason"] for row in chain.rows} == {"stop", "length"}
    for row in chain.rows:
        *body, last = row["completion_ids"]
        assert not ends & set(body) and (last in ends) == (row["finish_reason"] == "stop")
        assert row["old_logprobs"][-1] == pytest.approx(own(chain.model, row)[-1].item(), abs=1e-4)


def test_trap_a_sampled_end_token_masked_out_of_the_loss(chain):
    """Completions of nothing but the end token: it alone has to carry the gradient."""
    rows = [
        {**row, "completion_ids": [tiny.EOS], "old_logprobs": [-3.0], "finish_reason": "stop"}
        for row in chain.rows
    ]
    rollouts = world.write_rollouts(chain.store, chain.policy, rows)
    made = trainer(
        chain,
        rollouts,
        world.write_rewards(chain.store, rollouts, lambda row: float(row["sample_index"])),
    )
    assert max(float(grad.abs().max()) for grad in gradient(made).values()) > 1e-3


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_trap_masks_from_pad_ids(chain, kind, tmp_path):
    """Pad stands in prompts and completions of different lengths as an id like any other."""
    if kind == "t5":
        policy = tiny.make_policy(chain.store, "t5", "t5")
        chain = SimpleNamespace(
            **{**vars(chain), "policy": policy, "model": load_model(policy, dtype=torch.float64)}
        )
    path = tmp_path / "ids.jsonl"
    asked = [[5, tiny.PAD, 6], [tiny.PAD, tiny.PAD, 7, 8, 9, tiny.PAD], [11]]
    path.write_text("\n".join(json.dumps({"prompt_ids": ids}) for ids in asked))
    prompts = chain.store.open(
        run_here("prompt", prompt.Config(source=str(path)), chain.store, policy=chain.policy.ref)
    )
    rows = sampled(chain.store, chain.policy, prompts).table().to_pylist()
    for row in rows:
        assert row["old_logprobs"] == pytest.approx(own(chain.model, row).tolist(), abs=1e-4)
        row["completion_ids"][0] = tiny.PAD
    found, expected = rescored(chain, rows)
    assert found == pytest.approx(expected, abs=1e-4)


# -- text and ids


def test_trap_double_bos(chain):
    """The template writes one and the tokenizer would put another before it. A user's own
    "<|endoftext|>" is text."""
    bos = chain.prompts.table()["prompt_text"][0].as_py()[: len(tiny.SPECIALS[0])]
    assert bos == tiny.SPECIALS[0]
    for row in chain.rows:
        assert row["prompt_ids"][0] == tiny.PAD and row["prompt_ids"].count(tiny.PAD) == 1


def test_trap_retokenised_text(chain):
    """The sampled ids are kept and trained on as they are, though few of them are what their text
    would be encoded to."""
    tokenizer = tiny.tokenizer()
    rewritten = [
        row
        for row in chain.rows
        if tokenizer(row["completion_text"], add_special_tokens=False)["input_ids"]
        != row["completion_ids"]
    ]
    assert len(rewritten) > len(chain.rows) / 2
    assert all(len(row["completion_ids"]) == len(row["old_logprobs"]) for row in chain.rows)
    asked = {row["group_id"]: row["prompt_ids"] for row in chain.prompts.table().to_pylist()}
    assert all(row["prompt_ids"] == asked[row["group_id"]] for row in chain.rows)
    batch = trainer(chain).batch.sequences
    assert [ids.tolist() for ids in batch.completions] == [
        row["completion_ids"] for row in chain.rows
    ]
    assert [ids.tolist() for ids in batch.prompts] == [row["prompt_ids"] for row in chain.rows]
    for row in rewritten:
        assert row["old_logprobs"] == pytest.approx(own(chain.model, row).tolist(), abs=1e-4)


# -- rewards and advantages


@pytest.mark.parametrize("algorithm", ["grpo", "dr_grpo", "rloo", "reinforce_pp_baseline"])
def test_trap_group_of_one(chain, algorithm):
    """No 0/0, and no raw reward either: the rollout is dropped and counted, the others learn."""
    alone = chain.rows[0]
    rows = [alone, *[row for row in chain.rows if row["group_id"] != alone["group_id"]]]
    rollouts = world.write_rollouts(chain.store, chain.policy, rows)
    rewards = world.write_rewards(chain.store, rollouts, world.even_share)
    found = optimized(chain, rollouts, rewards, config={"algorithm": algorithm})
    assert (
        found[alone["rollout_id"]]["drop_reason"] == "small_group"
        and found[alone["rollout_id"]]["advantage"] is None
    )
    assert sum(row["kept"] for row in found.values()) == len(rows) - 1


def test_trap_reward_failure_stored_as_0(chain, tmp_path):
    """A function that failed for a row has said nothing of it: null, and no part of its group's
    mean."""
    path = tmp_path / "mine.py"
    path.write_text(
        "def score(completion_ids):\n"
        "    if len(completion_ids) > 1:\n        raise ValueError('one by one')\n"
        f"    if completion_ids[0] == {chain.rows[1]['completion_ids']}:\n        raise "
        "ValueError('boom')\n"
        "    return [1.0 + len(completion_ids[0])]\n"
    )
    config = reward.Config(functions=[{"use": f"{path}:score"}], max_invalid=0.1, batch_rows=1)
    rewards = chain.store.open(run_here("reward", config, chain.store, rollouts=chain.rollouts.ref))
    failed = chain.rows[1]["rollout_id"]
    scores = {row["rollout_id"]: row["reward"] for row in rewards.table().to_pylist()}
    assert scores[failed] is None and sum(score is None for score in scores.values()) == 1
    found = optimized(chain, rewards=rewards, config={"algorithm": "dr_grpo"})
    assert found[failed]["drop_reason"] == "not_scored"
    peers = [row["rollout_id"] for row in chain.rows[:4] if row["rollout_id"] != failed]
    mean = sum(scores[name] for name in peers) / 3
    assert [found[name]["advantage"] for name in peers] == pytest.approx(
        [scores[name] - mean for name in peers], abs=1e-5
    )


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_trap_kl_with_the_sign_swapped_in_the_loss(estimator):
    """Over a whole small vocabulary: k1 and k3 are the KL in the mean, and a step down the gradient
    of each lowers it."""
    logits = torch.tensor([0.3, -1.0, 0.8, 0.0], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.1, 0.5, -0.2, 0.0], dtype=torch.float64).log_softmax(0)

    def divergence(at: torch.Tensor) -> float:
        logprobs = at.detach().log_softmax(0)
        return float((logprobs.exp() * (logprobs - ref)).sum())

    logprobs = logits.log_softmax(0)
    mean = (logprobs.detach().exp() * losses.kl(logprobs, ref, estimator)).sum()
    if estimator != "k2":
        assert mean.item() == pytest.approx(divergence(logits))
    (slope,) = torch.autograd.grad(mean, logits)
    assert divergence(logits - 0.1 * slope) < divergence(logits) - 1e-3


def test_trap_kl_with_the_sign_swapped_in_the_reward(chain):
    """Equal rewards: the further the policy has gone from the reference, the less a rollout, or a
    token, is worth."""
    rewards = world.write_rewards(chain.store, chain.rollouts, lambda row: 1.0)
    away = [
        [value - 0.2 * row["sample_index"] for value in row["old_logprobs"]] for row in chain.rows
    ]
    reference = world.write_logprobs(chain.store, chain.rollouts, away)
    config = {"algorithm": "dr_grpo", "kl_in_reward": True, "kl_coef": 0.5}
    found = optimized(chain, rewards=rewards, config=config, ref_logprobs=reference.ref)
    for group in range(len(QUESTIONS)):
        members = [row for row in chain.rows if row["group_id"] == f"{group:06d}"]
        penalty = [0.5 * 0.2 * row["sample_index"] * len(row["completion_ids"]) for row in members]
        expected = [sum(penalty) / 4 - each for each in penalty]
        assert [found[row["rollout_id"]]["advantage"] for row in members] == pytest.approx(
            expected, abs=1e-4
        )
    rows = Ragged(torch.zeros(2, dtype=torch.int32), torch.tensor([0, 2]))
    batch = SimpleNamespace(
        sequences=Sequences(rows, rows, torch.ones(1)),
        rewards=torch.zeros(1),
        turn_rewards=None,
        reward_scale=1.0,
        old_logprobs=torch.tensor([-1.0, -2.0]),
        ref_logprobs=torch.tensor([-3.0, -1.0]),
    )
    tokens = critic.token_rewards(optimize.Config(kl_in_reward=True, kl_coef=1.0), batch)
    assert tokens.tolist() == [-2.0, 1.0]


def test_trap_mean_of_micro_batch_means(chain):
    """Completions of different lengths under `token_mean`: one, a few or all in a pass give one
    gradient."""
    assert len({len(row["completion_ids"]) for row in chain.rows}) > 3
    whole, *parts = (
        gradient(trainer(chain, algorithm="bnpo", token_budget=budget))
        for budget in (100_000, 40, 1)
    )
    for part in parts:
        for name, expected in whole.items():
            torch.testing.assert_close(part[name], expected, rtol=1e-4, atol=1e-6)


def test_trap_gae_through_masked_tokens(chain):
    """Nothing comes from the rollout before, from the one behind, or from the id that a cut
    rollout's last value is read at."""
    numbers = torch.arange(10, dtype=torch.float64).sin()
    offsets = torch.tensor([0, 3, 4, 10])
    whole, _ = advantages.gae(numbers, numbers.cos(), offsets, gamma=0.9)
    for start, end in pairwise(offsets.tolist()):
        alone, _ = advantages.gae(
            numbers[start:end], numbers[start:end].cos(), torch.tensor([0, end - start]), gamma=0.9
        )
        torch.testing.assert_close(whole[start:end], alone, rtol=0, atol=0)
    made, weight = (
        trainer(chain, algorithm="ppo", bootstrap_length=True, gae_lambda=0.0),
        torch.linspace(-1, 1, 32),
    )
    with torch.no_grad():
        made.policy.value_head.weight.copy_(weight)
    made.prepare()
    assert len({row["finish_reason"] for row in chain.rows}) == 2
    for row, returns in zip(
        chain.rows,
        Ragged(made.batch.returns, made.batch.sequences.completions.offsets),
        strict=True,
    ):
        ids = torch.tensor([row["prompt_ids"] + row["completion_ids"]])
        with torch.no_grad():
            states = chain.model(input_ids=ids, output_hidden_states=True).hidden_states[-1][
                0, len(row["prompt_ids"]) :
            ]
        following = (states @ weight.double()).tolist()
        following[-1] = world.even_share(row) + (
            following[-1] if row["finish_reason"] == "length" else 0.0
        )
        assert returns.tolist() == pytest.approx(
            following, abs=1e-4
        )  # λ = 0: the next state's value; at the end the reward


def test_trap_join_by_position(chain):
    """Rewards and reference logprobs in another order than the rollouts."""
    rows = [
        {name: row[name] for name in ("rollout_id", "group_id", "reward")}
        for row in chain.rewards.table().to_pylist()
    ]
    turned = world.write_rewards(chain.store, chain.rollouts, rows[::-1])
    config = {"algorithm": "dr_grpo", "kl_in_reward": True, "kl_coef": 0.1}
    reference = world.write_logprobs(
        chain.store, chain.rollouts, [row["old_logprobs"] for row in chain.rows]
    )  # it turns them
    assert (
        reference.table()["rollout_id"].to_pylist()
        == [row["rollout_id"] for row in chain.rows][::-1]
    )
    for rewards in (turned, chain.rewards):
        found = optimized(
            chain, rewards=rewards, config=config, ref_logprobs=reference.ref
        )  # of KL 0, so rewards are as given
        for row in chain.rows:
            peers = [
                world.even_share(each) for each in chain.rows if each["group_id"] == row["group_id"]
            ]
            expected = world.even_share(row) - sum(peers) / len(peers)
            assert found[row["rollout_id"]]["advantage"] == pytest.approx(expected, abs=1e-5)
