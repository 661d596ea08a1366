"""Where the field goes wrong with engines and tokenizers: one test a trap, through the real stages.

Each fails when its trap is put in. What goes wrong in a loss or an advantage is seen by their own
tests. The policy here invites the traps: its generation config holds sampling defaults, its
tokenizer puts a BOS before what its template has already begun with one, its pad is an ordinary id
of prompts and completions, and rollouts end by end token and by length. The engine here is
`transformers`; what vLLM could do wrong is in `tests/stages/generate/test_generate_vllm.py`.
"""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import processors

from quiver.schemas.errors import NumericError
from quiver.stages.core.store import Store
from quiver.stages.generate import stage as generate
from quiver.stages.model.checkpoints import PolicyConfig
from quiver.stages.model.loading import load_model
from quiver.stages.optimize import rollouts as joining
from quiver.stages.optimize import stage as optimize
from quiver.stages.optimize.accelerator import make_accelerator
from quiver.stages.optimize.algorithms import find_algorithm
from quiver.stages.optimize.trainer import Trainer
from quiver.stages.prompt import stage as prompt
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
    row = find_algorithm(config.algorithm)
    loaded = joining.load(config, row, chain.store, inputs)
    return Trainer(
        config,
        load_model(chain.policy, dtype=torch.float32),
        loaded.batch,
        row,
        make_accelerator(config),
    )


def rescored(chain, rows: list[dict]) -> tuple[list[float], list[float]]:
    """What the trainer and one plain pass say of `rows`' tokens."""
    rollouts = world.write_rollouts(chain.store, chain.policy, rows, run=chain.policy.ref.run)
    run = chain.policy.ref.run
    rewards = world.write_rewards(chain.store, rollouts, world.even_share, run=run)
    made = trainer(chain, rollouts, rewards)
    expected = torch.cat([own(chain.model, row, row["temperature"]) for row in rows])
    return made.compute_logprobs(range(len(rows))).tolist(), expected.tolist()


def gradient(made: Trainer) -> dict[str, torch.Tensor]:
    """The first step's gradient of every weight."""
    everyone = list(range(len(made.batch.groups)))
    made.accumulate(everyone, everyone)
    return {name: parameter.grad for name, parameter in made.model.named_parameters()}


# -- the engine's numbers


def test_trap_raw_instead_of_processed_logprobs(chain):
    """The engine reports the distribution that it sampled from; rows that hold the model's raw one
    stop before any update."""
    for row in chain.rows:
        assert row["old_logprobs"] == pytest.approx(own(chain.model, row).tolist(), abs=1e-4)
    raw = [{**row, "old_logprobs": own(chain.model, row, 1.0).tolist()} for row in chain.rows]
    rollouts = world.write_rollouts(chain.store, chain.policy, raw)
    before = chain.store.numbers("tiny", "policy")
    with pytest.raises(NumericError, match="raw logprobs"):
        rewards = world.write_rewards(chain.store, rollouts, world.even_share)
        world.trained(chain.store, chain.policy, (rollouts, rewards))
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
