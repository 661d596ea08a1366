"""Reward models as scorers: each scores as if it were used alone, and what is wrong with one is
told before anything runs."""

import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from quiver.schemas.errors import ConfigError, ResourceError
from quiver.stages.core.config import parse
from quiver.stages.generate.stage import Config as GenerateConfig
from quiver.stages.prompt.stage import Config as PromptConfig
from quiver.stages.reward.config import Config, with_fingerprints
from quiver.stages.reward.models.config import ModelConfig, check, fingerprint, model_entry
from quiver.stages.reward.models.scorer import ModelScorer
from tests import tiny
from tests.stages.reward.reward_models import FAMILIES, make_model
from tests.writing import run_here

ATOL = 1e-5
"""Of logits near 1 in float32: what another order of sums costs."""
ASK = {"role": "user", "content": "What is 3 + 4?"}


@pytest.fixture
def model(tmp_path):
    """Make a reward model; the same arguments give the same one."""

    def make(family="llama3", name="rm", **config) -> Path:
        return make_model(tmp_path / name, family, **config)

    return make


@pytest.fixture
def opened():
    """Open scorers, and close them in the end."""
    made = []

    def open_(folder, prompts=None, rollouts=None, **config):
        made.append(
            ModelScorer(
                parse(ModelConfig, {"model": str(folder), **config}, "reward.models"),
                prompts,
                rollouts,
            )
        )
        return made[-1]

    yield open_
    for scorer in made:
        scorer.close()


def batch_of(completions: list[str], prompts: list | None = None) -> dict[str, list]:
    prompts = prompts or [[ASK]] * len(completions)
    return {
        "prompts": prompts,
        "completions": completions,
        "completion_ids": [[0]] * len(completions),  # the policy's own: never read
        "finish_reason": ["stop"] * len(completions),
        "rollout_ids": [f"r-{row}" for row in range(len(completions))],
    }


def alone(
    folder, chats: list[list[dict]], kind=AutoModelForSequenceClassification, **template
) -> torch.Tensor:
    """The logits of the model with its own tokenizer and template, chat by chat. [chats, labels],
    or the last id's [chats, V]."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = kind.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        found = [
            model(**tokenizer.apply_chat_template(chat, return_tensors="pt", **template)).logits[0]
            for chat in chats
        ]
    return torch.stack([logits if logits.ndim == 1 else logits[-1] for logits in found])


def said(text: str) -> dict:
    return {"role": "assistant", "content": text}


def require_close(parts, expected: torch.Tensor) -> None:
    assert [part.error for part in parts] == [None] * len(parts)
    values = torch.tensor([part.value for part in parts])
    torch.testing.assert_close(values, expected, atol=ATOL, rtol=0)


# -- a policy of one family, a reward model of another


def test_a_qwen_policy_and_a_llama_reward_model_score_as_if_each_were_alone(
    store, model, opened, tmp_path
):
    """Through the stages: a ChatML policy that continues `<think>` unless the system message says
    otherwise, and a Llama-3 reward model that reads what both wrote."""
    policy = tiny.make_policy(store, kind="qwen3")
    thinks = (
        "<|im_start|>assistant\n{% if 'quick' not in messages[0].content %}{{ '<think>\n' }}{% "
        "endif %}"
    )
    template, source = tmp_path / "thinks.jinja", tmp_path / "chats.jsonl"
    template.write_text(tiny.CHATML.replace("<|im_start|>assistant\n", thinks))
    config = PromptConfig(source=str(source), template=str(template))
    sampling = GenerateConfig(engine="scripted", samples_per_prompt=2, sampling={"max_tokens": 8})
    folder = model("llama3")
    for systems in (("calm", "calm"), ("quick", "calm", "quick")):
        asked = [[{"role": "system", "content": system}, ASK] for system in systems]
        source.write_text("\n".join(json.dumps({"messages": chat}) for chat in asked))
        prompts = store.open(run_here("prompt", config, store, policy=policy.ref))
        ref = run_here("generate", sampling, store, prompts=prompts.ref, policy=policy.ref)
        rollouts = store.open(ref)
        chats = dict(zip(prompts.table()["group_id"].to_pylist(), asked, strict=True))
        rows = rollouts.table().to_pylist()
        batch = batch_of(
            [row["completion_text"] for row in rows], [chats[row["group_id"]] for row in rows]
        )
        batch["rollout_ids"] = [row["rollout_id"] for row in rows]
        scorer = opened(folder, prompts, rollouts)
        scorer.require(["prompt"])
        begins = {"calm": "<think>\n", "quick": ""}
        whole = [
            [*chat, said(begins[chat[0]["content"]] + text)]
            for chat, text in zip(batch["prompts"], batch["completions"], strict=True)
        ]
        require_close(scorer.score(batch), alone(folder, whole)[:, 0])
        assert scorer.seconds > 0


def test_equal_answers_are_equal_and_empty_ones_count(model, opened):
    first, second, empty, third = opened(model()).score(batch_of(["7", "8", "", "7"]))
    assert first == third != second and math.isfinite(empty.value)


# -- which number


LABELS = ["helpful", "correct", "verbose"]


@pytest.fixture
def of_three(model):
    """A classifier with three named labels."""
    return model("qwen2", labels=3, id2label=dict(enumerate(LABELS)))


def test_a_label_is_chosen_by_name_or_number_and_the_others_may_be_kept(of_three, opened):
    logits = alone(of_three, [[ASK, said("7")]])[0]
    numbers = {"none": logits, "sigmoid": logits.sigmoid(), "softmax": logits.softmax(-1)}
    for label, column in (("correct", 1), (2, 2)):
        for activation, expected in numbers.items():
            scorer = opened(of_three, label=label, activation=activation, extra=True)
            (part,) = scorer.score(batch_of(["7"]))
            assert part.value == pytest.approx(float(expected[column]), abs=ATOL)
            named = dict(zip(LABELS, expected.tolist(), strict=True))
            assert json.loads(part.extra) == pytest.approx(named, abs=ATOL)


def test_a_judge_says_how_probable_a_word_is(model, opened):
    folder = model("gemma", labels=0)
    texts, question = ["7", "It is eight.", ""], "Right? Y or N."
    ask = {"role": "user", "content": question}
    chats = [[ASK, said(text), ask] for text in texts]
    logits = alone(folder, chats, AutoModelForCausalLM, add_generation_prompt=True)
    judge = {"kind": "token", "token": "Y", "question": question}
    for against, expected in (
        (None, logits.softmax(-1)[:, ord("Y")]),
        ("N", logits[:, [ord("Y"), ord("N")]].softmax(-1)[:, 0]),
    ):
        scorer = opened(folder, **judge, against=against)
        scorer.require([])
        require_close(scorer.score(batch_of(texts)), expected)


def test_a_template_file_may_ask_the_question(model, opened, tmp_path):
    """The whole conversation in one message of the judge's own, and its mind set by a variable."""
    template = tmp_path / "judge.jinja"
    template.write_text(
        "<|im_start|>user\nQ: {{ messages[0].content }} A: {{ messages[-1].content }} {{ how "
        "}}?<|im_end|>\n<|im_start|>assistant"
    )
    folder = model("qwen2", labels=0)
    judge = {"kind": "token", "token": "Y", "question": "", "template": str(template)}
    scorer = opened(folder, **judge, template_arguments={"how": "Right"})
    text = "<|im_start|>user\nQ: What is 3 + 4? A: 7 Right?<|im_end|>\n<|im_start|>assistant"
    chat = [[{"role": "user", "content": ""}]]
    logits = alone(folder, chat, AutoModelForCausalLM, chat_template=text)
    require_close(scorer.score(batch_of(["7"])), logits.softmax(-1)[:, ord("Y")])


def test_where_inputs_end_with_the_pad_token_the_logit_must_be_chosen(model, opened):
    folder = model("llama3", pad_token_id=260)  # <|eot_id|>
    plain = model("llama3", name="plain")  # the same weights
    with pytest.raises(ConfigError, match=r"ends with its pad token '<\|eot_id\|>'") as caught:
        opened(folder).require([])
    assert "last_not_pad" in caught.value.next
    chats = [[ASK, said(text)] for text in ("7", "eight")]
    before, last = alone(folder, chats)[:, 0], alone(plain, chats)[:, 0]
    assert (before - last).abs().min() > 0.01
    for pooling, expected in (("last_not_pad", before), ("last", last)):
        scorer = opened(folder, pooling=pooling)
        scorer.require([])
        require_close(scorer.score(batch_of(["7", "eight"])), expected)


# -- rows that fail


def test_a_row_that_fails_costs_that_row(model, opened):
    scorer = opened(model("mistral"), max_tokens=60)
    system = {"role": "system", "content": "Be kind."}
    prompts = [[ASK], [ASK], [system, ASK], "plain text"]
    first, *failed = scorer.score(batch_of(["7", "x" * 60, "7", "7"], prompts))
    assert first.error is None and [part.value for part in failed] == [None] * 3
    assert [part.error for part in failed] == [
        "the input has 80 tokens, 60 are allowed",
        "the chat template failed: TemplateError: Conversation roles must alternate "
        "user/assistant/user/assistant/...",
        'the prompt is plain text: set text_as = "user"',
    ]
    short = model("mistral", name="short", max_position_embeddings=64)
    (part,) = opened(short).score(batch_of(["x" * 60]))
    assert part.error == "the input has 80 tokens, 64 are allowed"


def test_plain_text_is_one_user_message_where_that_is_said(model, opened, sample, store):
    scorer = opened(model(), text_as="user", prefill="<think>")
    text, chat = scorer.score(batch_of(["7"], [ASK["content"]])), scorer.score(batch_of(["7"]))
    assert text == chat and text[0].value is not None
    rollouts = sample([["7"]], {"answer": [7]}, messages=False)
    prompts = store.open("arith/prompts@1")
    with pytest.raises(ConfigError, match="holds plain text") as caught:
        opened(model(), prompts, rollouts)
    assert caught.value.next == 'set text_as = "user"'
    opened(model(), prompts, rollouts, text_as="user")


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_logit_that_is_not_finite_is_no_reward(model, opened, number):
    folder = model()
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][ord("~")] = number
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    well, ill = opened(folder).score(batch_of(["7", "~"]))
    assert well.error is None and ill.value is None and ill.error.startswith("the model gave nan")


def test_nothing_is_left_running(model, opened):
    scorer = opened(model())
    scorer.score(batch_of(["7"]))
    child = scorer._reader._template._script.pid
    scorer.close()
    scorer.close()
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_a_scorer_that_is_closed_while_it_scores_begins_nothing_anew(model, opened):
    """`close` comes from another thread when something else has failed: no template's process, no
    model is made after it."""
    scorer = opened(model())
    scorer.score(batch_of(["7"]))

    class Closing(list):
        def __getitem__(self, row):
            if row == 1:
                scorer.close()
            return super().__getitem__(row)

    with pytest.raises(ResourceError, match="was closed"):
        scorer.score({**batch_of(["7", "8", "9"]), "completions": Closing(["7", "8", "9"])})
    assert not {"_reader", "_engine"} & set(vars(scorer))
    with pytest.raises(ResourceError, match="was closed"):
        scorer.score(batch_of(["7"]))


# -- what is told before anything runs


def test_kinds_are_not_mixed_up(model, of_three, tmp_path):
    """`test_checkpoints` has the models that are not whole."""
    folder, seq2seq = model(name="llama"), tiny.make_folder(tmp_path / "t5", "t5")
    plain = model(name="plain", labels=0)
    for path, fields, why in (
        (folder, {"kind": "token"}, "kind 'token' needs a language model"),
        (plain, {}, "is LlamaForCausalLM; kind 'classifier' needs a sequence classifier"),
        (folder, {"activation": "softmax"}, "softmax over one label is always 1"),
        (seq2seq, {"kind": "token"}, "encoder-decoder"),
        (of_three, {}, "label is not set; its labels are helpful, correct, verbose"),
        (of_three, {"label": "good"}, "it has no label 'good'; its labels are helpful"),
        (of_three, {"label": 3}, "it has no label 3"),
        (of_three, {"label": -1}, "it has no label -1"),
        (tmp_path / "gone", {}, "there is no such directory"),
        (folder, {"template": str(tmp_path / "missing.jinja")}, r"missing\.jinja"),
    ):
        with pytest.raises(ConfigError, match=why):
            check(ModelConfig(model=str(path), **fields))


def test_fields_that_do_not_go_together():
    for fields, why in (
        ({"label": 0, "kind": "token"}, "label is not a field of kind 'token'"),
        ({"against": "No"}, "against is not a field of kind 'classifier'"),
        ({"engine_args": {"max_num_seqs": 8}}, "engine_args are for engine 'vllm'"),
        ({"engine": "vllm", "engine_args": {"seed": 1}}, "seed cannot be set here"),
        ({"engine": "vllm", "kind": "token"}, "a judge on vLLM needs against"),
        ({"activation": "tanh"}, "activation"),
        ({"wieght": 2.0}, "did you mean weight"),
    ):
        with pytest.raises(ConfigError, match=why):
            parse(ModelConfig, {"model": "some/model", **fields}, "reward.models")


def test_a_tokenizer_without_a_template_needs_one(model, opened):
    folder = model()
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="no chat template"):
        opened(folder).require([])


# -- which model it is


def test_the_fingerprint_is_of_weights_tokenizer_and_template(model, tmp_path):
    def fingerprint_of(folder, **config) -> str:
        return fingerprint(model_entry(ModelConfig(model=str(folder), **config)))

    folder = model()
    first = fingerprint_of(folder)
    assert fingerprint_of(shutil.copytree(folder, tmp_path / "elsewhere")) == first
    (tmp_path / "own.jinja").write_text(FAMILIES["zephyr"].template)
    other = model(name="other", seed=1)
    for changed in (
        fingerprint_of(other),
        fingerprint_of(model("zephyr", name="words")),
        fingerprint_of(folder, template=str(tmp_path / "own.jinja")),
    ):
        assert changed != first
    with pytest.raises(ConfigError, match="fingerprint expected"):
        with_fingerprints(Config(models=[{"model": str(other), "fingerprint": first}]))


def test_the_run_key_holds_what_decides_and_nothing_else():
    pinned = ModelConfig(model="a/b", name="rm", fingerprint="sha256:1")
    same = {"model": "/elsewhere/b", "revision": "v2", "template": "t.jinja"}
    same |= {"token_budget": 9, "device": "cpu"}
    assert pinned.model_copy(update=same).key() == pinned.key()
    other = {"label": 1, "activation": "sigmoid", "dtype": "float32", "max_tokens": 5}
    for name, changed in {**other, "fingerprint": "sha256:2"}.items():
        assert pinned.model_copy(update={name: changed}).key() != pinned.key()
    assert ModelConfig(model="org/rm v1").name == "rm-v1"
