"""Reward models as scorers: each scores as if it were used alone, and what is wrong with one is
told before anything runs."""

import json
import math
import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from quiver.schemas.errors import ConfigError, ResourceError, SecurityError
from quiver.stages.common.config import parse
from quiver.stages.generate.stage import Config as GenerateConfig
from quiver.stages.prompt.stage import Config as PromptConfig
from quiver.stages.reward.config import Config, pinned
from quiver.stages.reward.models.config import ModelConfig, check, fingerprint, model_entry
from quiver.stages.reward.models.scorer import ModelScorer
from tests import tiny
from tests.stages.reward.reward_models import FAMILIES, make_model
from tests.writing import run_here

generate = partial(run_here, "generate")
make_prompts = partial(run_here, "prompt")


ROOT = Path(__file__).parents[3]
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


def values(parts) -> torch.Tensor:
    assert [part.error for part in parts] == [None] * len(parts)
    return torch.tensor([part.value for part in parts])


# -- a policy of one family, a reward model of another


def test_a_qwen_policy_and_a_llama_reward_model_score_as_if_each_were_alone(
    store, model, opened, tmp_path
):
    """Through the stages: a ChatML policy that continues `<think>`, and a Llama-3 reward model that
    reads what both wrote."""
    policy = tiny.make_policy(store, kind="qwen3")
    (tmp_path / "thinks.jinja").write_text(
        tiny.CHATML.replace("assistant\n", "assistant\n{{ '<think>\n' }}")
    )
    (tmp_path / "sums.jsonl").write_text(
        "".join(json.dumps({"prompt": f"What is {n} + 4?"}) + "\n" for n in range(3))
    )
    config = PromptConfig(
        source=str(tmp_path / "sums.jsonl"), template=str(tmp_path / "thinks.jinja")
    )
    prompts = store.open(make_prompts(config, store, policy=policy.ref))
    sampling = GenerateConfig(engine="scripted", samples_per_prompt=2, sampling={"max_tokens": 12})
    rollouts = store.open(generate(sampling, store, prompts=prompts.ref, policy=policy.ref))
    asked = {row["group_id"]: row["messages"] for row in prompts.table().to_pylist()}
    rows = rollouts.table().to_pylist()
    batch = batch_of(
        [row["completion_text"] for row in rows], [asked[row["group_id"]] for row in rows]
    )
    batch["rollout_ids"] = [row["rollout_id"] for row in rows]

    folder = model("llama3")
    scorer = opened(folder, prompts, rollouts)
    scorer.require(["prompt"])
    chats = [
        [
            *asked[row["group_id"]],
            {"role": "assistant", "content": "<think>\n" + row["completion_text"]},
        ]
        for row in rows
    ]
    torch.testing.assert_close(
        values(scorer.score(batch)), alone(folder, chats)[:, 0], atol=ATOL, rtol=0
    )
    assert scorer.seconds > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_scores_as_alone(model, opened, family):
    folder = model(family, kind="qwen3")
    texts = ["7", "It is seven.", "é", "7", "no idea\n\n" * 9]
    chats = [[ASK, {"role": "assistant", "content": text}] for text in texts]
    if (
        family == "zephyr"
    ):  # its BOS comes from the tokenizer, which apply_chat_template does not ask: here it stands in the text
        expected = alone(folder, chats, chat_template="<s>" + FAMILIES[family].template)
    else:
        expected = alone(folder, chats)
    torch.testing.assert_close(
        values(opened(folder).score(batch_of(texts))), expected[:, 0], atol=ATOL, rtol=0
    )


def test_answers_that_are_equal_are_equal_and_empty_ones_count(model, opened):
    first, second, empty, third = opened(model()).score(batch_of(["7", "8", "", "7"]))
    assert first == third != second and math.isfinite(empty.value)


# -- which number


@pytest.fixture
def of_three(model):
    """A classifier with three named labels."""
    labels = ["helpful", "correct", "verbose"]
    return model(
        "qwen2",
        labels=3,
        id2label=dict(enumerate(labels)),
        label2id={name: n for n, name in enumerate(labels)},
    )


@pytest.mark.parametrize("label, column", [("correct", 1), (2, 2)])
def test_a_label_is_chosen_by_name_or_number(of_three, opened, label, column):
    expected = alone(of_three, [[ASK, {"role": "assistant", "content": "7"}]])[0]
    for activation, numbers in (
        ("none", expected),
        ("sigmoid", expected.sigmoid()),
        ("softmax", expected.softmax(-1)),
    ):
        scorer = opened(of_three, label=label, activation=activation)
        assert scorer.score(batch_of(["7"]))[0].value == pytest.approx(
            float(numbers[column]), abs=ATOL
        )


def test_the_other_labels_may_be_kept(of_three, opened):
    expected = alone(of_three, [[ASK, {"role": "assistant", "content": "7"}]])[0].tolist()
    (part,) = opened(of_three, label="correct", extra=True).score(batch_of(["7"]))
    assert json.loads(part.extra) == pytest.approx(
        dict(zip(["helpful", "correct", "verbose"], expected, strict=True)), abs=ATOL
    )


@pytest.mark.parametrize(
    "label, why",
    [(None, "label is not set"), ("good", "no label 'good'"), (3, "no label 3"), (-1, "-1")],
)
def test_several_labels_and_none_chosen(of_three, label, why):
    with pytest.raises(ConfigError, match=f"{why}; its labels are helpful, correct, verbose"):
        check(ModelConfig(model=str(of_three), label=label))


def test_a_judge_says_how_probable_a_word_is(model, opened):
    folder = model("gemma", labels=0)
    texts, question = ["7", "It is eight.", ""], "Right? Y or N."
    chats = [
        [ASK, {"role": "assistant", "content": text}, {"role": "user", "content": question}]
        for text in texts
    ]
    logits = alone(folder, chats, AutoModelForCausalLM, add_generation_prompt=True)
    whole = logits.softmax(-1)[:, ord("Y")]
    among = logits[:, [ord("Y"), ord("N")]].softmax(-1)[:, 0]
    asked = {"kind": "token", "token": "Y", "question": question}
    for against, expected in ((None, whole), ("N", among)):
        scorer = opened(folder, **asked, against=against)
        scorer.require([])
        torch.testing.assert_close(
            values(scorer.score(batch_of(texts))), expected, atol=ATOL, rtol=0
        )


def test_a_template_file_may_ask_the_question(model, opened, tmp_path):
    """The whole conversation in one message of the judge's own, and its mind set by a variable."""
    (tmp_path / "judge.jinja").write_text(
        "<|im_start|>user\nQ: {{ messages[0].content }} A: {{ messages[-1].content }} {{ how "
        "}}?<|im_end|>\n<|im_start|>assistant"
    )
    folder = model("qwen2", labels=0)
    scorer = opened(
        folder,
        kind="token",
        token="Y",
        question="",
        template=str(tmp_path / "judge.jinja"),
        template_arguments={"how": "Right"},
    )
    text = "<|im_start|>user\nQ: What is 3 + 4? A: 7 Right?<|im_end|>\n<|im_start|>assistant"
    ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")
    with torch.no_grad():
        logits = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            .eval()(**ids)
            .logits[0, -1]
        )
    assert scorer.score(batch_of(["7"]))[0].value == pytest.approx(
        float(logits.softmax(-1)[ord("Y")]), abs=ATOL
    )
    usual = opened(folder, kind="token", token="Y")
    assert model_entry(scorer.config).template != model_entry(usual.config).template


def test_where_inputs_end_with_the_pad_token_the_logit_must_be_chosen(model, opened):
    eot = 260
    folder, plain = (
        model("llama3", pad_token_id=eot),
        model("llama3", name="plain"),
    )  # the same weights
    with pytest.raises(ConfigError, match=r"ends with its pad token '<\|eot_id\|>'") as caught:
        opened(folder).require([])
    assert "last_not_pad" in caught.value.next
    chats, batch = (
        [[ASK, {"role": "assistant", "content": text}] for text in ("7", "eight")],
        batch_of(["7", "eight"]),
    )
    before, last = alone(folder, chats)[:, 0], alone(plain, chats)[:, 0]
    assert (before - last).abs().min() > 0.01
    for pooling, expected in (("last_not_pad", before), ("last", last)):
        scorer = opened(folder, pooling=pooling)
        scorer.require([])
        torch.testing.assert_close(values(scorer.score(batch)), expected, atol=ATOL, rtol=0)


# -- rows that fail


def test_a_row_that_fails_costs_that_row(model, opened):
    scorer = opened(model("mistral"), max_tokens=60)
    system = {"role": "system", "content": "Be kind."}
    parts = scorer.score(
        batch_of(["7", "x" * 60, "7", "7"], [[ASK], [ASK], [system, ASK], "plain text"])
    )
    assert parts[0].error is None and [part.value for part in parts[1:]] == [None] * 3
    assert [part.error for part in parts[1:]] == [
        "the input has 80 tokens, 60 are allowed",
        "the chat template failed: TemplateError: Conversation roles must alternate "
        "user/assistant/user/assistant/...",
        'the prompt is plain text: set text_as = "user"',
    ]


def test_the_models_own_context_is_the_limit_by_default(model, opened):
    (part,) = opened(model("mistral", max_position_embeddings=64)).score(batch_of(["x" * 60]))
    assert part.error == "the input has 80 tokens, 64 are allowed"


def test_plain_text_is_one_user_message_where_that_is_said(model, opened):
    scorer = opened(model(), text_as="user", prefill="<think>")
    text, chat = scorer.score(batch_of(["7"], [ASK["content"]])), scorer.score(batch_of(["7"]))
    assert text == chat and text[0].value is not None


@pytest.mark.parametrize("number, shown", [(math.nan, "nan"), (math.inf, "inf|-inf")])
def test_a_logit_that_is_not_finite_is_no_reward(model, opened, number, shown):
    from safetensors.torch import load_file, save_file

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


def test_checks_load_no_torch(model):
    folder = model()
    code = (
        "import sys; from quiver.stages.reward.models.scorer import ModelScorer; from "
        "quiver.stages.reward.models.config import ModelConfig, fingerprint, model_entry\n"
        f"scorer = ModelScorer(ModelConfig(model={str(folder)!r})); scorer.require([]); "
        "print(fingerprint(model_entry(scorer.config)))\n"
        "scorer.close(); print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    fingerprint, torch_is_loaded = done.stdout.splitlines()
    assert fingerprint.startswith("sha256:") and torch_is_loaded == "False"


def spoil_architecture(folder):
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**about, "architectures": ["LlamaForCausalLM"]})
    )


def spoil_code(folder):
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps({**about, "auto_map": {"AutoModel": "mine.Model"}})
    )


def spoil_weights(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def spoil_half(folder):
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])


def spoil_shards(folder):
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}})
    )


@pytest.mark.parametrize(
    "spoil, error, why",
    [
        (shutil.rmtree, ConfigError, "there is no such directory"),
        (
            lambda folder: (folder / "tokenizer.json").unlink(),
            ConfigError,
            "the tokenizer's files are missing",
        ),
        (spoil_half, ConfigError, "model.safetensors is cut"),
        (spoil_shards, ConfigError, "1 of 1 weight files are missing"),
        (spoil_weights, SecurityError, "pickled weights"),
        (spoil_code, SecurityError, "auto_map"),
        (
            spoil_architecture,
            ConfigError,
            "is LlamaForCausalLM; kind 'classifier' needs a sequence classifier",
        ),
    ],
)
def test_a_model_that_is_not_whole_or_not_a_reward_model(model, spoil, error, why):
    folder = model()
    spoil(folder)
    with pytest.raises(error, match=why):
        check(ModelConfig(model=str(folder)))


def test_kinds_are_not_mixed_up(model, tmp_path):
    with pytest.raises(
        ConfigError, match="is LlamaForSequenceClassification; kind 'token' needs a language model"
    ):
        check(ModelConfig(model=str(model()), kind="token"))
    with pytest.raises(ConfigError, match="softmax over one label is always 1"):
        check(ModelConfig(model=str(model()), activation="softmax"))
    seq2seq = tiny.make_folder(tmp_path / "t5", "t5")
    with pytest.raises(ConfigError, match="encoder-decoder"):
        check(ModelConfig(model=str(seq2seq), kind="token"))


@pytest.mark.parametrize(
    "fields, why",
    [
        ({"label": 0, "kind": "token"}, "label is no field of kind 'token'"),
        ({"against": "No"}, "against is no field of kind 'classifier'"),
        ({"engine_args": {"max_num_seqs": 8}}, "engine_args are for engine 'vllm'"),
        (
            {"engine": "vllm", "engine_args": {"hf_overrides": {}}},
            "hf_overrides cannot be set here",
        ),
        ({"engine": "vllm", "kind": "token"}, "a judge on vLLM needs against"),
        ({"activation": "tanh"}, "activation"),
        ({"wieght": 2.0}, "did you mean weight?"),
    ],
)
def test_fields_that_do_not_go_together(fields, why):
    with pytest.raises(ConfigError) as caught:
        parse(ModelConfig, {"model": "some/model", **fields}, "reward.models")
    assert why in caught.value.message


def test_a_tokenizer_without_a_template_needs_one(model, opened, tmp_path):
    folder = model()
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="no chat template"):
        opened(folder).require([])
    with pytest.raises(ConfigError, match=r"missing\.jinja"):
        check(ModelConfig(model=str(folder), template=str(tmp_path / "missing.jinja")))


def test_prompts_of_plain_text_are_refused_with_the_way_out(model, opened, sample, store):
    rollouts = sample([["7"]], {"answer": [7]}, messages=False)
    prompts = store.open("arith/prompts@1")
    with pytest.raises(ConfigError, match="holds plain text") as caught:
        opened(model(), prompts, rollouts)
    assert caught.value.next == 'set text_as = "user"'
    assert opened(model(), prompts, rollouts, text_as="user")


# -- which model it is


def fingerprint_of(folder, **config) -> str:
    return fingerprint(model_entry(ModelConfig(model=str(folder), **config)))


def test_the_fingerprint_is_of_weights_tokenizer_and_template(model, tmp_path):
    folder = model()
    first = fingerprint_of(folder)
    copied = Path(shutil.copytree(folder, tmp_path / "elsewhere"))
    assert fingerprint_of(copied) == first
    assert fingerprint_of(model(name="other", seed=1)) != first
    assert fingerprint_of(model("zephyr", name="words")) != first
    (tmp_path / "own.jinja").write_text(FAMILIES["zephyr"].template)
    assert fingerprint_of(folder, template=str(tmp_path / "own.jinja")) != first
    other = {"model": str(model(name="other", seed=1)), "fingerprint": first}
    with pytest.raises(ConfigError, match="fingerprint expected"):
        pinned(Config(models=[other]))


def test_the_run_key_holds_what_decides_and_nothing_else():
    pinned = ModelConfig(model="a/b", name="rm", fingerprint="sha256:1")
    for same in (
        {"model": "/elsewhere/b"},
        {"revision": "v2"},
        {"token_budget": 9},
        {"device": "cpu"},
        {"template": "t.jinja"},
    ):
        assert pinned.model_copy(update=same).key() == pinned.key()
    for other in (
        {"label": 1},
        {"activation": "sigmoid"},
        {"dtype": "float32"},
        {"fingerprint": "sha256:2"},
        {"max_tokens": 5},
    ):
        assert pinned.model_copy(update=other).key() != pinned.key()
    assert ModelConfig(model="org/rm v1").name == "rm-v1"
