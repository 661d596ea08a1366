"""Dialects `vllm-classify` and `vllm-score` against a real vLLM server with a tiny reward model,
compared with transformers."""

import pytest
import torch
from transformers import Qwen3ForSequenceClassification

from quiver.stages.reward.servers.config import ServerConfig
from quiver.stages.reward.servers.scorer import ServerScorer
from tests.tiny import _config, tokenizer
from tests.vllm_process import VllmProcess

pytestmark = pytest.mark.vllm
CHATS = [[{"role": "user", "content": f"{a} + 1?"}] for a in range(4)]
BATCH = {
    "prompts": [*CHATS, "what is 7? "],
    "completions": ["1", "two", "it is 3", "four", "seven"],
    "completion_ids": [[5]] * 5,
    "rollout_ids": list("abcde"),
    "finish_reason": ["stop"] * 5,
}
CONTEXT = 128


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny reward model with one scalar, and its folder."""
    folder = tmp_path_factory.mktemp("rm")
    config = _config("qwen3", 320)
    config.num_labels = 1
    torch.manual_seed(0)
    made = Qwen3ForSequenceClassification(config).float().eval()
    for parameter in made.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    made.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return made, folder


@pytest.fixture(scope="module")
def url(model, tmp_path_factory):
    options = f"--runner pooling --max-model-len {CONTEXT}"
    server = VllmProcess(model[1], tmp_path_factory.mktemp("log") / "vllm.log", *options.split())
    try:
        server.wait()
        yield server.url
    finally:
        server.kill()


def logit(model, ids: list[int]) -> float:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, 0].item()


def test_a_reward_model_behind_vllm_scores_as_it_does_alone(url, model):
    parts = ServerScorer(ServerConfig(dialect="vllm-classify", urls=[url])).score(BATCH)
    asked = [
        [*chat, {"role": "assistant", "content": text}]
        for chat, text in zip(CHATS, BATCH["completions"], strict=False)
    ]
    rendered = [tokenizer().apply_chat_template(messages, return_dict=False) for messages in asked]
    wanted = [
        logit(model[0], ids) for ids in [*rendered, tokenizer()("what is 7? seven")["input_ids"]]
    ]
    assert [part.value for part in parts] == pytest.approx(wanted, abs=1e-4)
    squashed = ServerScorer(
        ServerConfig(dialect="vllm-classify", urls=[url], use_activation=True)
    ).score(BATCH)
    assert [part.value for part in squashed] == pytest.approx(
        torch.tensor(wanted).sigmoid().tolist(), abs=1e-4
    )


def test_pairs_of_texts_and_a_row_that_is_too_long(url, model):
    config = ServerConfig(dialect="vllm-score", urls=[url], message_template="{content}")
    completions = [*BATCH["completions"][:2], "x" * 1000, *BATCH["completions"][3:]]
    parts = ServerScorer(config).score({**BATCH, "completions": completions})
    assert parts[2].value is None and "maximum context length" in parts[2].error
    pairs = [tokenizer()(f"{a} + 1?", completions[a])["input_ids"] for a in (0, 1, 3)]
    assert [parts[a].value for a in (0, 1, 3)] == pytest.approx(
        [logit(model[0], ids) for ids in pairs], abs=1e-4
    )
