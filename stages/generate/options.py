"""Options for sampling and for each engine: plain configs, so that a wrong key is found before an
engine is loaded.

`Sampling` is complete: it holds every value that shapes the sampled distribution, and the model's
own generation config has no effect. Engine options that only affect speed or memory are `Runtime`.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from quiver.stages.core.config import Config, Runtime
from quiver.stages.core.servers import refuse_section, root_of

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
"""vLLM arguments that the engine sets, because they decide which model answers, how, and with how
much memory."""


class Sampling(Config):
    """The distribution that completions are drawn from, and what ends them."""

    temperature: float = Field(default=1.0, ge=0)
    """Divides the logits. 0 takes the likeliest id (evaluation only: such rows cannot be trained
    on). `generate` takes 0 or at least 0.01."""
    max_tokens: int = Field(default=256, ge=1, lt=2**31)
    """Maximum ids of a completion, the end token included. Prompt and completion together must fit
    the context."""
    min_tokens: int = Field(default=0, ge=0)
    """Minimum ids before an end token is allowed."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the smallest set of ids with this much probability. Rows sampled below 1 are
    refused for training unless allowed there."""
    top_k: int = Field(default=0, ge=0)
    """Sample from the k likeliest ids; 0 is off."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Sample from ids with at least this fraction of the likeliest id's probability; 0 is off."""
    repetition_penalty: float = Field(default=1.0, gt=0)
    """Divides positive logits, and multiplies negative ones, of ids that are in the prompt or
    completion; 1 is off."""
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    """Subtracted from the logits of ids that are in the completion; 0 is off."""
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    """Subtracted once for each time that the id is in the completion; 0 is off."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end a completion, besides the model's own end tokens. The sampled one stays as the
    last id, but its text is left out, like an end token's. `stop` keeps the text."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion, such as `["</answer>"]`. The ids are kept up to the one that
    completes the text, which may add more text after it. The texts may contain special tokens."""
    ignore_eos: bool = False
    """Let completions continue past the model's own end tokens."""

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
    """Maximum sequences decoded together. Default: vLLM's choice on a GPU (1024 on an H100, 256 on
    an A100 or a smaller one), 256 on a CPU."""
    max_num_batched_tokens: Runtime[int | None] = Field(default=None, ge=1)
    """Maximum tokens of one engine step. Default: vLLM's choice on a GPU; the larger of 4096 and
    the context on a CPU."""
    gpu_memory_utilization: Runtime[float] = Field(default=0.9, gt=0, le=1)
    """Fraction of the GPU's memory that the engine may take."""
    cpu_kv_cache_gib: Runtime[float | None] = Field(default=None, gt=0)
    """Memory of the CPU's key/value cache. Default: enough for max_num_seqs full sequences, at most
    40 % of the free memory."""
    tensor_parallel_size: Runtime[int] = Field(default=1, ge=1)
    """GPUs that share one copy of the model; must divide its number of heads."""
    enforce_eager: Runtime[bool | None] = None
    """Skip compilation and CUDA graphs: starts sooner, decodes slower. Default: on a CPU only."""
    enable_prefix_caching: Runtime[bool] = True
    """Compute a group's shared prompt once."""
    logits_dtype: Literal["auto", "float32"] = "auto"
    """Dtype of the output embedding's product. auto: the model's own. The trainer always has
    float32 logits, so for a bfloat16 model float32 brings the engine's logprobs nearer to the
    trainer's, at some cost of speed."""
    batch_invariant: bool = False
    """Use kernels whose sums do not depend on which rows are decoded together. Without them a row's
    ids in bfloat16 change with its batch-mates. Needs a GPU; costs some speed."""
    lora: bool = False
    """Load a policy's adapter beside the weights that it was trained over, instead of the merged
    weights. bfloat16 then rounds the change apart from the weights, at some cost of speed. A policy
    without an adapter is loaded unchanged."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """More arguments of `vllm.LLM`, under its names (`quantization = "fp8_per_tensor"`,
    kv_cache_dtype, …). Arguments that the engine sets itself are refused."""

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
    """URLs of one or several vLLM servers, `http://HOST:PORT`, all serving the policy's weights;
    the stage prints how to start one. A server with other weights is left out."""
    token: Runtime[str] = ""
    """The servers' API key, as `env:NAME`: an environment variable on the machine that runs the
    stage."""
    allow_plain_http: Runtime[bool] = False
    """Allow sending a token over http to another host."""
    concurrency: Runtime[int] = Field(default=256, ge=1, le=16_384)
    """Requests in flight at each server: at least as many as it decodes together (its
    max_num_seqs)."""
    connect_seconds: Runtime[float] = Field(default=5.0, gt=0)
    """Maximum wait for a connection."""
    row_seconds: Runtime[float] = Field(default=1800.0, gt=0)
    """Maximum time for one row, including the wait in the server's queue."""
    retries: Runtime[int] = Field(default=5, ge=0)
    """Number of times a failed row is requested again, at another server if there is one."""
    wait_seconds: Runtime[float] = Field(default=0.0, ge=0)
    """Maximum wait, at the start of the stage, for a server to serve the policy's weights. A run
    of several iterations needs this, because each iteration has other weights."""
    down_seconds: Runtime[float] = Field(default=60.0, ge=0)
    """Maximum time that a failed server may stay away; after it the others continue without it."""

    @model_validator(mode="before")
    @classmethod
    def _nothing_secret(cls, section: Any) -> Any:
        if not isinstance(section, dict):
            return section
        if not isinstance(section.get("urls", ()), list | tuple):  # the text may hold a secret
            raise ValueError('urls: a list is expected, such as ["http://127.0.0.1:8000"]')
        urls = [root_of(str(url)) for url in section.get("urls", ())]
        if len(set(urls)) < len(urls):
            raise ValueError("urls: a server is named twice")
        refuse_section(section)
        return section


class TransformersOptions(Config):
    """Options of engine `transformers`."""

    batch_size: Runtime[int] = Field(default=32, ge=1)
    """Sequences of one shard decoded together: at most `rows_per_shard`."""
    attn_implementation: str = "sdpa"
    """The attention implementation of transformers: sdpa, eager, flash_attention_2, … With `sdpa`,
    models that have logit caps or sinks use `eager`, as in training; for them every other
    implementation is refused."""


class ScriptedOptions(Config):
    """Options of engine `scripted`."""

    script: str = "sample"
    """`sample` (ids of the prompt, drawn with the seed), `echo` (the prompt again), `fixed`, or a
    dotted path `module:function`."""
    completion_ids: tuple[int, ...] = ()
    """Ids that `fixed` answers, before the end token."""
    logprob: float = Field(default=-0.6931471805599453, le=0)
    """The logprob of every id. Default: log(1/2)."""
    seconds_per_row: Runtime[float] = Field(default=0.0, ge=0)
    """Seconds to wait for each row, for trying out progress, cancelling and crashes."""
