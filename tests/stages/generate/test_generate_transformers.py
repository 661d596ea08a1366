"""Engine `transformers`: logprobs against an independent forward pass, independence of batch-mates,
end tokens, processing."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from quiver.schemas.errors import NumericError
from quiver.stages.common.runtime.runner import run_stage
from quiver.stages.generate.options import Sampling
from quiver.stages.generate.sampling import draw, processed_logprobs
from tests.stages.generate.making import make_prompts, random_prompts
from tests.tiny import EOS, make_folder, make_policy

DECODER_START = {"t5": 0, "bart": 2}


def generate(store, policy, prompts, *, batch_size=4, samples=3, **changed):
    sampling = {"temperature": 0.7, "max_tokens": 12, **changed}
    given = {
        "engine": "transformers",
        "samples_per_prompt": samples,
        "dtype": "float32",
        "options": {"batch_size": batch_size},
        "sampling": sampling,
    }
    refs = {"prompts": prompts.ref, "policy": policy.ref}
    ref = run_stage("generate", given, store, in_process=True, force=True, **refs)
    return store.open(ref).table().to_pylist()


def recomputed(policy, row, temperature=0.7) -> np.ndarray:
    """Logprobs of one row by one plain forward pass: no batch, no padding, no cache."""
    prompt, ids = torch.tensor([row["prompt_ids"]]), torch.tensor([row["completion_ids"]])
    kind = policy.ref.run
    with torch.no_grad():
        if kind in DECODER_START:
            model = AutoModelForSeq2SeqLM.from_pretrained(
                policy.files.folder, dtype=torch.float32
            ).eval()
            shifted = torch.cat([torch.tensor([[DECODER_START[kind]]]), ids[:, :-1]], 1)
            logits = model(input_ids=prompt, decoder_input_ids=shifted).logits[0]
        else:
            model = AutoModelForCausalLM.from_pretrained(
                policy.files.folder, dtype=torch.float32
            ).eval()
            logits = model(input_ids=torch.cat([prompt, ids], 1)).logits[
                0, prompt.shape[1] - 1 : -1
            ]
    logprobs = torch.log_softmax(logits.double() / temperature, -1)
    return logprobs.gather(-1, ids[0][:, None])[:, 0].numpy()


# gpt2 learns a vector for each position, where the others only know distances
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "t5", "bart"])
def test_logprobs_are_those_of_a_plain_forward_pass(store, kind):
    policy = make_policy(store, kind, kind)
    rows = generate(store, policy, random_prompts(store, 4, run=kind))
    for row in rows:
        assert np.abs(np.array(row["old_logprobs"]) - recomputed(policy, row)).max() < 1e-5
    assert len({tuple(row["completion_ids"]) for row in rows}) > 6


@pytest.mark.parametrize("kind", ["llama", "t5", "bart"])
def test_a_row_does_not_depend_on_its_batch_mates(store, kind):
    policy = make_policy(store, kind, kind)
    prompts = random_prompts(store, 5, low=2, high=30, run=kind)
    alone, together = (generate(store, policy, prompts, batch_size=size) for size in (1, 15))
    for one, other in zip(alone, together, strict=True):
        assert one["completion_ids"] == other["completion_ids"]
        assert one["old_logprobs"] == pytest.approx(other["old_logprobs"], abs=1e-5)


def test_an_end_token_is_the_last_id_and_ends_the_row(store, policy):
    rows = generate(
        store, policy, random_prompts(store, 20), samples=4, temperature=2.0, max_tokens=60
    )
    stopped = [row for row in rows if row["finish_reason"] == "stop"]
    assert stopped and len(stopped) < len(rows)
    for row in rows:
        ended = row["finish_reason"] == "stop"
        assert row["completion_ids"].count(EOS) == ended == (row["completion_ids"][-1] == EOS)
        assert ended or len(row["completion_ids"]) == 60
        assert row["stop_reason"] == (str(EOS) if ended else None)


def test_other_stop_ids_min_tokens_and_ignore_eos(store, policy):
    prompts = random_prompts(store, 10)
    everything = list(range(3, 320))
    rows = generate(
        store,
        policy,
        prompts,
        stop_token_ids=everything,
        min_tokens=3,
        max_tokens=9,
        ignore_eos=True,
    )
    for row in rows:
        assert (
            all(token < 3 for token in row["completion_ids"][:3])
            and len(row["completion_ids"]) >= 4
        )
    rows = generate(store, policy, prompts, temperature=2.0, ignore_eos=True, max_tokens=60)
    assert {len(row["completion_ids"]) for row in rows} == {60}
    assert any(EOS in row["completion_ids"] for row in rows)


def test_temperature_0_takes_the_likeliest_id(store, policy):
    row = generate(store, policy, make_prompts(store, [[5, 6, 7]]), samples=1, temperature=0)[0]
    model = AutoModelForCausalLM.from_pretrained(policy.files.folder, dtype=torch.float32).eval()
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        for token in row["completion_ids"]:
            assert model(input_ids=ids).logits[0, -1].argmax() == token
            ids = torch.cat([ids, torch.tensor([[token]])], 1)
    assert row["old_logprobs"] == pytest.approx(recomputed(policy, row, 1.0), abs=1e-5)


def test_penalties_count_what_stands_in_the_row(store, policy):
    """A presence penalty at its most makes repeats rare in a row whose likeliest ids repeat."""
    prompts = make_prompts(store, [[5, 6, 7]])
    plain = generate(store, policy, prompts, samples=1, temperature=0, max_tokens=40)[0][
        "completion_ids"
    ]
    pushed = generate(
        store, policy, prompts, samples=1, temperature=0, max_tokens=40, frequency_penalty=2.0
    )[0]["completion_ids"]
    assert len(set(pushed)) > len(set(plain))


# -- the distribution

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0, 0.5]])


def processed(**sampling) -> np.ndarray:
    extra = {name: sampling.pop(name) for name in ("seen", "counts") if name in sampling}
    step = sampling.pop("step", 0)
    out = processed_logprobs(
        LOGITS, Sampling(**sampling), step=step, stop_ids=torch.tensor([0]), **extra
    )
    return out[0].double().numpy()


def softmax(values) -> np.ndarray:
    powers = np.exp(np.array(values, np.float64))
    return powers / powers.sum()


@pytest.mark.parametrize(
    ("sampling", "values"),
    [
        ({}, [2, 1, 0, -1, 0.5]),
        ({"temperature": 0.5}, [4, 2, 0, -2, 1]),
        ({"temperature": 0}, [2, 1, 0, -1, 0.5]),
        ({"top_k": 2}, [2, 1, -np.inf, -np.inf, -np.inf]),
        # probabilities .564 .207 .076 .028 .126: 0.7 is reached by the two likeliest, 0.8 by three
        ({"top_p": 0.7}, [2, 1, -np.inf, -np.inf, -np.inf]),
        ({"top_p": 0.8}, [2, 1, -np.inf, -np.inf, 0.5]),
        ({"top_p": 0.01}, [2, -np.inf, -np.inf, -np.inf, -np.inf]),
        # .564 * 0.2 = .113
        ({"min_p": 0.2}, [2, 1, -np.inf, -np.inf, 0.5]),
        ({"min_tokens": 1}, [-np.inf, 1, 0, -1, 0.5]),
        ({"min_tokens": 1, "step": 1}, [2, 1, 0, -1, 0.5]),
        (
            {"repetition_penalty": 2.0, "seen": torch.tensor([[True, False, False, True, False]])},
            [1, 1, 0, -2, 0.5],
        ),
        (
            {
                "presence_penalty": 0.5,
                "frequency_penalty": 0.25,
                "counts": torch.tensor([[2.0, 0, 1, 0, 0]]),
            },
            [1.0, 1, -0.75, -1, 0.5],
        ),
    ],
)
def test_processing(sampling, values):
    assert np.exp(processed(**sampling)) == pytest.approx(softmax(values), abs=1e-6)


def test_draws_follow_the_distribution():
    """Chi-square of 20,000 draws against the probabilities; 13.8 is the 0.1 % point at two degrees
    of freedom."""
    logprobs = torch.tensor([0.5, 0.0, 0.3, 0.2]).log().expand(20_000, 4)
    uniforms = torch.rand(20_000, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    counts = torch.bincount(draw(logprobs, uniforms, 1.0), minlength=4).numpy()
    expected = 20_000 * np.array([0.5, 0.3, 0.2])
    assert counts[1] == 0
    assert ((counts[[0, 2, 3]] - expected) ** 2 / expected).sum() < 13.8


def test_ends_of_the_unit_interval():
    logprobs = torch.tensor([[0.0, 0.5, 0.5, 0.0]]).log()
    assert [
        draw(logprobs, torch.tensor([u], dtype=torch.float64), 1.0).item()
        for u in (0.0, 1 - 2**-40)
    ] == [1, 2]


def test_weights_that_are_no_numbers_are_told_by_the_first_logprob(store, tmp_path):
    """Importing a model does not look at its weights; sampling from it writes nothing."""
    weights = make_folder(tmp_path / "model") / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.layers.0.mlp.down_proj.weight"][0, 0] = torch.nan
    save_file(tensors, weights, metadata={"format": "pt"})
    config = {"model": str(tmp_path / "model")}
    policy = store.open(run_stage("policy", config, store, in_process=True, into="tiny"))
    with pytest.raises(NumericError, match="logprob nan"):
        generate(store, policy, random_prompts(store, 2, run="tiny"))
    assert store.numbers("tiny", "rollouts") == []


def test_no_memory_is_a_resource_error(store, policy):
    from quiver.schemas.errors import ResourceError
    from quiver.stages.generate.engine import Request, Setup
    from quiver.stages.generate.engines.transformers import TransformersEngine

    engine = TransformersEngine(Setup(policy, Sampling(), (EOS,), 64, "float32", "cpu"))
    engine.model.register_forward_hook(
        lambda *_: torch.empty(1 << 60)
    )  # the allocator itself refuses
    with pytest.raises(ResourceError, match="allocate") as caught:
        next(engine.generate([Request(0, np.array([5], np.int32), 1)]))
    assert "batch_size" in caught.value.next


def test_another_error_of_torch_is_not_called_lack_of_memory(store, policy):
    from quiver.stages.generate.engine import Request, Setup
    from quiver.stages.generate.engines.transformers import TransformersEngine

    engine = TransformersEngine(Setup(policy, Sampling(), (EOS,), 64, "float32", "cpu"))
    engine.model.register_forward_hook(lambda *_: torch.ones(2, 3) @ torch.ones(2, 3))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        next(engine.generate([Request(0, np.array([5], np.int32), 1)]))
    assert type(caught.value) is RuntimeError
