"""Config of generate: which engine answers, how often, and how it samples."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from quiver.schemas.errors import ConfigError
from quiver.stages.core.config import Config as Base
from quiver.stages.core.config import Runtime, without_folder
from quiver.stages.core.store.writer import ROWS_PER_SHARD, shard_rows
from quiver.stages.turns.config import Turns

from .engine import engine_options
from .options import Sampling, ScriptedOptions, VllmServerOptions

_MOST_SHARDS = 32_768
"""Most shards if their size is given: more would not fit the manifest."""


class Config(Base):
    """Config of the generate stage."""

    engine: str = "vllm"
    """`vllm`, `vllm-server`, `transformers`, `scripted`, or your own: module:Class or
    file.py:Class."""
    samples_per_prompt: int = Field(default=8, ge=1, le=1_000_000)
    """Rollouts per prompt: the group size."""
    sampling: Sampling = Sampling()
    """The distribution to sample from."""
    seed: int = Field(default=0, ge=0)
    """Base seed. Each row's own seed is derived from it, `round`, the group id and the sample
    index."""
    round: int = Field(default=0, ge=0)
    """Number of the round of sampling, from 1; changes the seeds of the same prompts. 0: an
    evaluation. A recipe's flow sets it."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype that the model computes in. auto: the trainer's default, which is bfloat16 on a GPU
    (float32 if the GPU has none) and float32 on a CPU. vLLM's FlashAttention takes no float32."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Maximum tokens of prompt and completion together. Default: the model's context."""
    turns: Turns | None = None
    """Episodes of several turns, in which an environment or tools answer the policy. Default: one
    completion per row."""
    overlong: Literal["error", "drop"] = "error"
    """If a prompt leaves no room for max_tokens: stop with an error, or drop the prompt, which is
    then counted and listed."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The engine's own options: see `stages/generate/options.py`."""
    device: Runtime[Literal["auto", "cpu", "cuda"]] = "auto"
    """auto: the GPU if there is one."""
    rows_per_shard: Runtime[int | None] = Field(default=None, ge=1)
    """Rows written at once, and the unit of work for processes that share a run: with fewer shards
    than `placement.devices`, some GPUs stay idle. A crash loses the shards in progress: one, and
    with vLLM also the shards that it decodes in the same batch (`max_num_seqs`). Default: 256;
    above 65,536 rows more, so that there are at most 256 shards, unless `turns` is set."""
    patience_seconds: Runtime[float | None] = Field(default=None, ge=0)
    """With several processes: how long an idle process waits for a shard that another process is
    making before it makes that shard too. Default: twice the slowest shard so far, and at least 30
    s."""
    code_sha256: str = ""
    """Filled in by the stage: hash of the file of your own engine or script."""
    end_token_ids: tuple[int, ...] = ()
    """Filled in by the stage: the model's end tokens, if its generation_config.json names other ids
    than its config.json (whose hash identifies the model)."""

    @model_validator(mode="after")
    def _fits(self) -> Config:
        if self.sampling.temperature == 0 and self.samples_per_prompt > 1:
            raise ValueError(
                f"temperature 0 gives {self.samples_per_prompt} equal samples: set a temperature "
                "above 0, or samples_per_prompt = 1 if nothing is trained on them"
            )
        # vLLM would sample at 0.01, and the rows would record the lower one
        if 0 < self.sampling.temperature < 0.01:
            raise ValueError(
                f"sampling.temperature {self.sampling.temperature:g} is below 0.01, the least that "
                "vLLM knows: take 0 or at least 0.01"
            )
        try:
            options = engine_options(self.engine, self.options)
        except ConfigError as error:
            raise ValueError(error.message) from None
        if isinstance(options, VllmServerOptions) and not options.urls:
            raise ValueError(
                'engine vllm-server needs options.urls, such as ["http://127.0.0.1:8000"]'
            )
        return self

    def rows_in_shard(self, rows: int) -> int:
        """Return the rows per shard of a version with `rows` rows. Raises ConfigError if the
        shards would be too many for its manifest, which lists them all."""
        if self.rows_per_shard is not None:
            if rows > self.rows_per_shard * _MOST_SHARDS:
                least = -(-rows // _MOST_SHARDS)
                raise ConfigError(
                    "generate.rows_per_shard",
                    f"is {self.rows_per_shard}: {rows} rollouts would have more than "
                    f"{_MOST_SHARDS} shards",
                    next=f"set it to {least} or more",
                )
            return self.rows_per_shard
        # with `ahead` = 1, all environments of a shard may be open at once
        return shard_rows(rows) if self.turns is None else ROWS_PER_SHARD

    def key(self) -> dict[str, Any]:
        """Return the base class's key without the engine options that only affect speed or memory,
        and without the folder of your own code. Options of your own engine stay as they are."""
        shipped_options = engine_options(self.engine, self.options)
        options = shipped_options.key() if shipped_options else dict(self.options)
        engine = self.engine
        if self.code_sha256:
            engine = without_folder(engine)
            if isinstance(shipped_options, ScriptedOptions):
                options["script"] = without_folder(options["script"])
        return {**super().key(), "options": options, "engine": engine}
