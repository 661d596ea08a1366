"""Tiny reward models with the published chat templates of five families, and tokenizers whose ids
can be written by hand.

The tokenizers are byte-level BPEs without merges: the id of a byte is its value, and the family's
control tokens follow from 256 on. So `[256, *b"user\\n"]` is what a test expects, with no tokenizer
in between.
"""

from __future__ import annotations

import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    Gemma2Config,
    LlamaConfig,
    MiniMaxConfig,
    ModernBertDecoderConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from quiver.schemas.manifest import digest


class Family(NamedTuple):
    """A family's control tokens (ids from 256 on, in this order), which of them is BOS, and its
    published template."""

    tokens: tuple[str, ...]
    template: str
    bos: str | None = None
    adds_bos: bool = False
    """Whether the tokenizer itself puts BOS before a text."""
    eos: str | None = None
    plain: tuple[str, ...] = ()
    """Added tokens that are not special; their ids come last."""


ALTERNATE = (
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') "
    "}}{% endif %}"
)
FAMILIES = {
    "qwen2": Family(
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
        "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% "
        "endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
        eos="<|im_end|>",
        plain=("<think>", "</think>"),
    ),
    "llama3": Family(
        (
            "<|begin_of_text|>",
            "<|end_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eot_id|>",
        ),
        "{% set loop_messages = messages %}{% for message in loop_messages %}"
        "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ "
        "message['content'] | trim "
        "+ '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% "
        "endif %}{{ content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' "
        "}}{% endif %}",
        bos="<|begin_of_text|>",
        adds_bos=True,
        eos="<|eot_id|>",
    ),
    "mistral": Family(
        ("<s>", "</s>", "[INST]", "[/INST]"),
        "{{ bos_token }}{% for message in messages %}"
        + ALTERNATE
        + "{% if message['role'] == 'user' %}"
        "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}"
        "{{ message['content'] + eos_token}}{% else %}{{ raise_exception('Only user and assistant "
        "roles are supported!') }}"
        "{% endif %}{% endfor %}",
        bos="<s>",
        adds_bos=True,
        eos="</s>",
    ),
    "gemma": Family(
        ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"),
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role "
        "not supported') }}{% endif %}"
        "{% for message in messages %}"
        + ALTERNATE
        + "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}"
        "{% else %}{% set role = message['role'] %}{% endif %}"
        "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% "
        "endfor %}"
        "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}",
        bos="<bos>",
        adds_bos=True,
        eos="<eos>",
    ),
    "zephyr": Family(
        ("<unk>", "<s>", "</s>"),
        "{% for message in messages %}\n{% if message['role'] == 'user' %}\n{{ '<|user|>\n' + "
        "message['content'] + eos_token }}\n"
        "{% elif message['role'] == 'system' %}\n{{ '<|system|>\n' + message['content'] + "
        "eos_token }}\n"
        "{% elif message['role'] == 'assistant' %}\n{{ '<|assistant|>\n'  + message['content'] + "
        "eos_token }}\n{% endif %}\n"
        "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% "
        "endfor %}",
        bos="<s>",
        adds_bos=True,
        eos="</s>",
    ),
}
VOCABULARY = 272


def byte_tokenizer(family: Family) -> PreTrainedTokenizerFast:
    """The family's tokenizer over single bytes."""
    made = Tokenizer(models.BPE(vocab={_shown(byte): byte for byte in range(256)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(family.tokens))
    made.add_tokens([AddedToken(text, special=False, normalized=False) for text in family.plain])
    if family.adds_bos:
        bos = (family.bos, 256 + family.tokens.index(family.bos))
        made.post_processor = processors.TemplateProcessing(
            single=f"{bos[0]} $A", special_tokens=[bos]
        )
    named = {"bos_token": family.bos, "eos_token": family.eos}
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, **{name: text for name, text in named.items() if text}
    )
    fast.chat_template = family.template
    return fast


def _shown(byte: int) -> str:
    """The character by which byte-level tokenizers write a byte: itself where printable, else the
    next free one from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return (
        chr(byte)
        if byte in printable
        else chr(256 + [b for b in range(256) if b not in printable].index(byte))
    )


_MADE = tempfile.TemporaryDirectory(prefix="quiver-reward-models-")
_MINIMAX = partial(
    MiniMaxConfig,
    layer_types=["linear_attention", "full_attention"],
    num_local_experts=2,
    num_experts_per_tok=1,
    block_size=8,
)
CONFIGS = {
    "llama": LlamaConfig,
    "qwen3": Qwen3Config,
    "gemma2": Gemma2Config,
    "bert": BertConfig,
    "minimax": _MINIMAX,
    "modernbert-decoder": ModernBertDecoderConfig,
}


def make_model(
    folder: Path,
    family: str = "llama3",
    kind: str = "llama",
    labels: int = 1,
    seed: int = 0,
    **config,
) -> Path:
    """A tiny classifier as a model directory; `labels` = 0: a language model. The same seed gives
    the same weights; each is made once a process, then copied."""
    made = Path(_MADE.name, digest([family, kind, labels, seed, config]))
    if not made.exists():
        _make_model(made, family, kind, labels, seed, config)
    shutil.copytree(made, folder, copy_function=shutil.copy, dirs_exist_ok=True)
    return folder


def _make_model(folder: Path, family: str, kind: str, labels: int, seed: int, config: dict) -> None:
    shape = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    if kind != "bert":
        shape |= {
            "num_key_value_heads": 2,
            "head_dim": 32,
        }  # the smallest head that vLLM's CPU attention knows
    ids = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    made = CONFIGS[kind](
        vocab_size=VOCABULARY, **{"max_position_embeddings": 512, **shape, **ids, **config}
    )
    if labels:
        made.num_labels = labels
    loader = AutoModelForSequenceClassification if labels else AutoModelForCausalLM
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = loader.from_config(made)
        for (
            parameter
        ) in model.parameters():  # the usual 0.02 leaves too little that could go visibly wrong
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)
    byte_tokenizer(FAMILIES[family]).save_pretrained(folder)
