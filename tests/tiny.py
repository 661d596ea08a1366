"""Tiny real models for tests: random fp32 weights, a byte-level BPE tokenizer with a ChatML
template, written as a policy@0."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache, wraps
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BartConfig,
    GenerationConfig,
    GPT2Config,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    T5Config,
)

from quiver.stages.core.run.runner import run_stage
from quiver.stages.core.store import Store, Version

PAD, BOS, EOS = 0, 1, 2
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] "
    "}}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEXTS = [
    "What is seven plus 5? The answer is 12. user assistant system",
    "zero one two three four five six seven eight nine ten",
    "0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18",
]


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of 320 ids: 0 pad, 1 <|im_start|>, 2 <|im_end|> (the end token)."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_TEXTS * 4, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token=SPECIALS[0], bos_token=SPECIALS[1], eos_token=SPECIALS[2]
    )
    fast.chat_template = CHATML
    return fast


def _config(kind: str, vocabulary: int):
    ids = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS, "vocab_size": vocabulary}
    decoder = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,  # the smallest that vLLM's CPU attention knows
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
    }
    if kind == "llama":
        return LlamaConfig(**ids, **decoder)
    if kind == "qwen3":
        return Qwen3Config(**ids, **decoder)
    if kind == "t5":
        return T5Config(
            **ids,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=PAD,
        )
    if kind == "gpt2":
        return GPT2Config(**ids, n_embd=32, n_layer=2, n_head=4, n_positions=256)
    layers = {
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
    }
    return BartConfig(
        **ids,
        **layers,
        d_model=32,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_position_embeddings=256,
        decoder_start_token_id=EOS,
        forced_eos_token_id=None,
    )


def made_once(make: Callable[..., Path]) -> Callable[..., Path]:
    """`make(folder, ...)`, which runs once a process for the same arguments: later folders are
    copies."""

    @cache
    def files(*arguments: object, **options: object) -> dict[str, bytes]:
        with tempfile.TemporaryDirectory() as folder:
            make(Path(folder), *arguments, **options)
            return {path.name: path.read_bytes() for path in Path(folder).iterdir()}

    @wraps(make)
    def copy(folder: Path, *arguments: object, **options: object) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files(*arguments, **options).items():
            (folder / name).write_bytes(content)
        return folder

    return copy


@made_once
def make_folder(folder: Path, kind: str = "llama", seed: int = 0, vocabulary: int = 320) -> Path:
    """A tiny model directory: `kind` is llama, qwen3, gpt2, t5 or bart; the same seed gives the same
    weights."""
    config = _config(kind, vocabulary)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        loader = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        model = loader.from_config(config)
        for parameter in model.parameters():
            # the usual 0.02 gives a near-uniform model, in which little can go visibly wrong
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.15)
    model.generation_config = GenerationConfig(eos_token_id=EOS, pad_token_id=PAD, bos_token_id=BOS)
    if config.is_encoder_decoder:
        model.generation_config.decoder_start_token_id = config.decoder_start_token_id
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def make_policy(
    store: Store, run_name: str = "tiny", kind: str = "llama", seed: int = 0, vocabulary: int = 320
) -> Version:
    """`run_name/policy@0` in `store`: a tiny model imported as a user's directory would be."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = make_folder(Path(temporary), kind, seed, vocabulary)
        config = {"model": str(folder)}
        return store.open(run_stage("policy", config, store, into=run_name, in_process=True))


@torch.no_grad()
def plain_logprobs(
    model: torch.nn.Module,
    prompt_ids: list[int],
    completion_ids: list[int],
    temperature: float = 1.0,
) -> torch.Tensor:
    """Logprobs [T] float64 of one completion by one plain forward pass: no batch, padding or
    cache."""
    prompt = torch.tensor([prompt_ids])
    ids = torch.tensor([completion_ids], dtype=torch.long)
    if model.config.is_encoder_decoder:
        start = torch.tensor([[model.config.decoder_start_token_id]])
        shifted = torch.cat([start, ids[:, :-1]], 1)
        logits = model(input_ids=prompt, decoder_input_ids=shifted).logits[0]
    else:
        logits = model(input_ids=torch.cat([prompt, ids], 1)).logits[0, prompt.shape[1] - 1 : -1]
    logprobs = (logits.double() / temperature).log_softmax(-1)
    return logprobs.gather(-1, ids[0, :, None])[:, 0]
