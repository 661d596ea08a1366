"""Engine `transformers`: logprobs against an independent forward pass, independence of batch-mates,
end tokens, the sampled distribution."""

import numpy as np
import pytest
import torch

from quiver.schemas.errors import NumericError, ResourceError
from quiver.stages.core.run.runner import run_stage
from quiver.stages.generate.engine import Request, Setup
from quiver.stages.generate.engines.transformers import TransformersEngine
from quiver.stages.generate.options import Sampling
from quiver.stages.generate.sampling import draw, processed_logprobs
from quiver.stages.model.loading import load_model
from tests.stages.generate.making import make_prompts, random_prompts
from tests.stages.optimize.world import import_changed
from tests.tiny import EOS, make_policy, plain_logprobs


def generate(store, policy, prompts, *, batch_size=4, samples=3, **changed):
    config = {
        "engine": "transformers",
        "samples_per_prompt": samples,
        "dtype": "float32",
        "options": {"batch_size": batch_size},
        "sampling": {"temperature": 0.7, "max_tokens": 12, **changed},
    }
    refs = {"prompts": prompts.ref, "policy": policy.ref}
    ref = run_stage("generate", config, store, in_process=True, force=True, **refs)
    return store.open(ref).table().to_pylist()


# gpt2 learns a vector for each position, while the others only know distances
@pytest.mark.parametrize("kind", ["llama", "gpt2", "t5", "bart"])
def test_logprobs_are_those_of_a_plain_forward_pass(store, kind):
    policy = make_policy(store, kind, kind)
    rows = generate(store, policy, random_prompts(store, 4, run=kind))
    model = load_model(policy, dtype=torch.float32)
    for row in rows:
        expected = plain_logprobs(model, row["prompt_ids"], row["completion_ids"], 0.7)
        assert row["old_logprobs"] == pytest.approx(expected.tolist(), abs=1e-5)
    assert len({tuple(row["completion_ids"]) for row in rows}) > 6


@pytest.mark.parametrize("kind", ["llama", "t5", "bart"])
def test_a_row_does_not_depend_on_its_batch_mates(store, kind):
    policy = make_policy(store, kind, kind)
    prompts = random_prompts(store, 5, low=2, high=30, run=kind)
    alone, together = (generate(store, policy, prompts, batch_size=size) for size in (1, 15))
    for one, other in zip(alone, together, strict=True):
        assert one["completion_ids"] == other["completion_ids"]
        assert one["old_logprobs"] == pytest.approx(other["old_logprobs"], abs=1e-5)


def test_auto_is_the_trainers_float32_on_every_cpu(policy, monkeypatch):
    """Also where the processor has bfloat16: logprobs of the two would differ by its rounding."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    engine = TransformersEngine(Setup(policy, Sampling(), (EOS,), 64, "auto", "cpu"))
    assert engine.info["dtype"] == "float32"
    assert {weight.dtype for weight in engine.model.parameters()} == {torch.float32}


def test_an_end_token_is_the_last_id_and_ends_the_row(store, policy):
    prompts = random_prompts(store, 10)
    sampling = {"temperature": 2.0, "max_tokens": 60}
    rows = generate(store, policy, prompts, batch_size=10, samples=4, **sampling)
    assert {row["finish_reason"] for row in rows} == {"stop", "length"}
    for row in rows:
        ended = row["finish_reason"] == "stop"
        assert row["completion_ids"].count(EOS) == ended == (row["completion_ids"][-1] == EOS)
        assert ended or len(row["completion_ids"]) == 60
        assert row["stop_reason"] == (str(EOS) if ended else None)


def test_other_stop_ids_min_tokens_and_ignore_eos(store, policy):
    prompts = random_prompts(store, 10)
    ordinary = list(range(3, 320))
    ends = {"stop_token_ids": ordinary, "min_tokens": 3, "max_tokens": 9, "ignore_eos": True}
    for row in generate(store, policy, prompts, **ends):
        assert max(row["completion_ids"][:3]) < 3 and len(row["completion_ids"]) >= 4
    endless = {"temperature": 2.0, "ignore_eos": True, "max_tokens": 60}
    rows = generate(store, policy, prompts, batch_size=15, **endless)
    assert {len(row["completion_ids"]) for row in rows} == {60}
    assert any(EOS in row["completion_ids"] for row in rows)


def test_penalties_are_of_the_ids_in_the_row(store, policy):
    """Greedy rows, so that a wrong count would choose another id."""
    penalties = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    sampling = Sampling(temperature=0, max_tokens=30, **penalties)
    prompt = torch.tensor([5, 6, 7])
    (row,) = generate(
        store, policy, make_prompts(store, [prompt.tolist()]), samples=1, **sampling.model_dump()
    )
    model = load_model(policy, dtype=torch.float32)
    ids = prompt
    for token, logprob in zip(row["completion_ids"], row["old_logprobs"], strict=True):
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[:, -1]
        count = {"minlength": logits.shape[-1]}
        logprobs = processed_logprobs(
            logits,
            sampling,
            position=0,
            stop_ids=torch.tensor([EOS]),
            seen=ids.bincount(**count)[None] > 0,
            counts=ids[len(prompt) :].bincount(**count)[None],
        )[0]
        assert logprobs.argmax() == token
        assert logprob == pytest.approx(logprobs[token].item(), abs=1e-5)
        ids = torch.cat([ids, torch.tensor([token])])


def test_weights_that_are_no_numbers_show_in_the_first_logprob(store, tmp_path):
    """Importing a model does not look at its weights; sampling from it writes nothing."""
    policy = import_changed(store, tmp_path / "model", "tiny", nudge=float("nan"))
    with pytest.raises(NumericError, match="logprob nan"):
        generate(store, policy, random_prompts(store, 2, run="tiny"))
    assert store.numbers("tiny", "rollouts") == []


@pytest.mark.parametrize(
    ("fail", "error", "words"),
    [
        # the allocator itself refuses
        (lambda *_: torch.empty(1 << 60), ResourceError, "allocate"),
        (lambda *_: torch.ones(2, 3) @ torch.ones(2, 3), RuntimeError, "shapes cannot be"),
    ],
)
def test_only_lack_of_memory_is_a_resource_error(store, policy, fail, error, words):
    engine = TransformersEngine(Setup(policy, Sampling(), (EOS,), 64, "float32", "cpu"))
    engine.model.register_forward_hook(fail)
    with pytest.raises(error, match=words) as caught:
        next(engine.generate([Request(0, np.array([5], np.int32), 1)]))
    assert type(caught.value) is error
    assert error is RuntimeError or "batch_size" in caught.value.next


# -- the distribution

LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0, 0.5]])


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
        ({"min_tokens": 1, "position": 1}, [2, 1, 0, -1, 0.5]),
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
    state = {"position": 0, "seen": None, "counts": None}
    state |= {name: sampling[name] for name in state if name in sampling}
    sampling = Sampling(**{name: sampling[name] for name in sampling.keys() - state.keys()})
    logprobs = processed_logprobs(LOGITS, sampling, stop_ids=torch.tensor([0]), **state)
    expected = torch.tensor(values, dtype=torch.float64).softmax(-1)
    assert logprobs[0].exp().tolist() == pytest.approx(expected.tolist(), abs=1e-6)


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
    logprobs = torch.tensor([[0.0, 0.5, 0.5, 0.0]]).log().expand(2, 4)
    uniforms = torch.tensor([0.0, 1 - 2**-40], dtype=torch.float64)
    assert draw(logprobs, uniforms, 1.0).tolist() == [1, 2]


def test_temperature_0_takes_the_likeliest_id():
    logprobs = torch.tensor([[0.2, 0.3, 0.5]]).log()
    assert draw(logprobs, torch.zeros(1, dtype=torch.float64), 0).tolist() == [2]
