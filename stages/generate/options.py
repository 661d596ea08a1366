"""What a recipe may say about sampling and about each engine: plain configs, so a wrong key is
found before any engine is loaded.

`Sampling` is whole: every value that shapes the sampled distribution is here, and nothing of the
model's own generation config applies. The engines' options are `Runtime` where they decide only
speed or memory.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from quiver.stages.common.config import Config, Runtime
from quiver.stages.common.servers import refuse_section, root_of

_SET_BY_ENGINE = {
    "block_size", "code_revision", "dtype", "enable_chunked_prefill", "enable_lora",
    "enable_prefix_caching", "enable_sleep_mode", "enforce_eager", "generation_config",
    "gpu_memory_utilization",
    "hf_config_path", "hf_overrides", "hf_token", "kv_cache_memory_bytes", "load_format",
    "logprobs_mode", "max_lora_rank", "max_loras", "max_model_len", "max_num_batched_tokens",
    "max_num_seqs", "model", "model_class_overrides", "model_weights",
    "override_generation_config", "revision", "seed", "skip_tokenizer_init",
    "tensor_parallel_size", "tokenizer", "tokenizer_revision", "trust_remote_code",
    "use_tqdm_on_load",
}  # fmt: skip
"""What decides which model answers, how, and how much of the machine it takes."""


class Sampling(Config):
    """The distribution that completions are drawn from, and where they end."""

    temperature: float = Field(default=1.0, ge=0)
    """The logits are divided by it; 0 takes the likeliest id (evaluation only: such rows cannot be
    trained on)."""
    max_tokens: int = Field(default=256, ge=1, lt=2**31)
    """Most ids of a completion, the end token included; prompt and completion must fit the context
    together."""
    min_tokens: int = Field(default=0, ge=0)
    """No end token before so many ids."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Smallest set of ids with this much probability; below 1 the rows are refused for training
    unless allowed there."""
    top_k: int = Field(default=0, ge=0)
    """Only the k likeliest ids; 0 is off."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Only ids with at least this share of the likeliest id's probability; 0 is off."""
    repetition_penalty: float = Field(default=1.0, gt=0)
    """Divides (multiplies, where negative) the logits of ids that stand in prompt or completion; 1
    is off."""
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    """Subtracted from the logits of ids that stand in the completion; 0 is off."""
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    """Subtracted once for each time that the id stands in the completion; 0 is off."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end a completion, beside the model's own end tokens; the sampled one stays as the
    last id, and its text is left out as that of an end token. `stop` keeps the text."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion, such as `["</answer>"]`; the ids stay up to the one that
    completes the text, which may bring more text with it. They may hold special tokens."""
    ignore_eos: bool = False
    """The model's own end tokens do not end a completion."""

    @field_validator("stop")
    @classmethod
    def _not_empty(cls, strings: tuple[str, ...]) -> tuple[str, ...]:
        if "" in strings:
            raise ValueError("an empty text would end a completion at once: leave it out")
        return strings

    @model_validator(mode="after")
    def _fits(self) -> Sampling:
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens {self.min_tokens} is above max_tokens {self.max_tokens}: lower it"
            )
        return self


class VllmOptions(Config):
    """Options of engine `vllm`."""

    max_num_seqs: Runtime[int | None] = Field(default=None, ge=1)
    """Most sequences decoded together; None: vLLM's choice on a GPU (1024 on an H100, 256 on an
    A100 or a smaller one), 256 on a CPU."""
    max_num_batched_tokens: Runtime[int | None] = Field(default=None, ge=1)
    """Most tokens of one engine step; None: vLLM's choice on a GPU, the larger of 4096 and the
    context on a CPU."""
    gpu_memory_utilization: Runtime[float] = Field(default=0.9, gt=0, le=1)
    """Share of the GPU's memory that the engine may take."""
    cpu_kv_cache_gib: Runtime[float | None] = Field(default=None, gt=0)
    """Memory of the CPU's key/value cache; None: what max_num_seqs full sequences need, at most 40
    % of the free memory."""
    tensor_parallel_size: Runtime[int] = Field(default=1, ge=1)
    """GPUs that share one copy of the model; a divisor of its number of heads."""
    enforce_eager: Runtime[bool | None] = None
    """No compilation or CUDA graphs: starts sooner, decodes slower; None: on a CPU only."""
    enable_prefix_caching: Runtime[bool] = True
    """A group's shared prompt is computed once."""
    logits_dtype: Literal["auto", "float32"] = "auto"
    """What the output embedding's product is computed in; auto: the model's own dtype. The trainer
    has float32 logits whatever the model is in, so with a model in bfloat16 the engine's logprobs
    are nearer to the trainer's in float32, for some speed."""
    batch_invariant: bool = False
    """Kernels whose sums do not depend on which rows are decoded together: in bfloat16 a row's ids
    else change with its batch-mates. For a GPU, at some cost of speed."""
    lora: bool = False
    """Give a policy's adapter to the engine beside the weights that it was trained over, instead of
    the merged ones: bfloat16 then rounds the change apart from the weights, at some cost of speed.
    A policy without an adapter is loaded as it is."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """More arguments of `vllm.LLM`, as vLLM names them (`quantization = "fp8"`, kv_cache_dtype, …);
    those that the engine sets itself are refused."""

    @field_validator("engine_args")
    @classmethod
    def _free(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        refused = sorted(_SET_BY_ENGINE & arguments.keys())
        if refused:
            raise ValueError(
                f"{', '.join(refused)} cannot be set here: the engine sets it, or an option of "
                "its own does"
            )
        return arguments


class VllmServerOptions(Config):
    """Options of engine `vllm-server`."""

    model_config = ConfigDict(hide_input_in_errors=True)

    urls: Runtime[tuple[str, ...]] = ()
    """One or several vLLM servers, `http://HOST:PORT`, all of the policy's weights; the stage says
    how to start one. One that serves other weights is left out."""
    token: Runtime[str] = ""
    """The servers' API key, as `env:NAME`: the environment variable that holds it where the stage
    runs."""
    allow_plain_http: Runtime[bool] = False
    """Send a token over http to a host other than this one."""
    concurrency: Runtime[int] = Field(default=256, ge=1, le=16_384)
    """Requests under way at each server: as many as it decodes together (its max_num_seqs), or
    more."""
    connect_seconds: Runtime[float] = Field(default=5.0, gt=0)
    """Longest wait for a connection."""
    row_seconds: Runtime[float] = Field(default=1800.0, gt=0)
    """Longest time for one row, the wait in the server's queue included."""
    retries: Runtime[int] = Field(default=5, ge=0)
    """How often a row that failed is asked for again, at another server where there is one."""
    wait_seconds: Runtime[float] = Field(default=0.0, ge=0)
    """How long a server may take, when the stage begins, until it answers with the policy's
    weights. A run of several iterations needs it: each has other weights."""
    down_seconds: Runtime[float] = Field(default=60.0, ge=0)
    """How long a server that failed may be away until the others do without it."""

    @model_validator(mode="before")
    @classmethod
    def _nothing_secret(cls, section: Any) -> Any:
        if not isinstance(section, dict):
            return section
        if not isinstance(section.get("urls", ()), list | tuple):  # which may hold a secret too
            raise ValueError('urls: a list is expected, such as ["http://127.0.0.1:8000"]')
        urls = [root_of(str(url)) for url in section.get("urls", ())]
        if len(set(urls)) < len(urls):
            raise ValueError("urls: a server is named twice")
        refuse_section(section)
        return section


class TransformersOptions(Config):
    """Options of engine `transformers`."""

    batch_size: Runtime[int] = Field(default=32, ge=1)
    """Sequences decoded together, of one shard: at most `rows_per_shard`."""
    attn_implementation: str = "sdpa"
    """The attention of transformers: sdpa, eager, flash_attention_2, … With `sdpa` models that have
    logit caps or sinks take `eager`, as in training; with them every other one is refused."""


class ScriptedOptions(Config):
    """Options of engine `scripted`."""

    script: str = "sample"
    """`sample` (ids of the prompt, drawn by the seed), `echo` (the prompt again), `fixed`, or a
    dotted path `module:function`."""
    completion_ids: tuple[int, ...] = ()
    """What `fixed` answers, before the end token."""
    logprob: float = Field(default=-0.6931471805599453, le=0)
    """The logprob of every id: log(1/2) unless said otherwise."""
    seconds_per_row: Runtime[float] = Field(default=0.0, ge=0)
    """Waits so long for each row, so that progress, cancelling and crashes can be tried."""
