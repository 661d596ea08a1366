"""The config of generate: who answers, how often, and how it is sampled."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from quiver.schemas.errors import ConfigError
from quiver.stages.common.config import Config as Base
from quiver.stages.common.config import Runtime, without_folder
from quiver.stages.common.store.writer import ROWS_PER_SHARD

from .engine import engine_options
from .options import Sampling, VllmServerOptions
from .turns.config import Turns


class Config(Base):
    """Who answers, how often, and how it is sampled."""

    engine: str = "vllm"
    """`vllm`, `vllm-server`, `transformers`, `scripted`, or your own: module:Class or
    file.py:Class."""
    samples_per_prompt: int = Field(default=8, ge=1, le=1_000_000)
    """Rollouts of each prompt: the size of a group."""
    sampling: Sampling = Sampling()
    """The distribution that is sampled from."""
    seed: int = Field(default=0, ge=0)
    """With `iteration`, group and sample it gives each row its own seed."""
    iteration: int = Field(default=0, ge=0)
    """Makes other seeds for the same prompts in the next iteration. In a recipe's flow the first
    iteration has 1, and an evaluation 0."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """What the model computes in; auto: bfloat16 where the hardware has it, else float32."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Most tokens of prompt and completion together. None: the model's context."""
    turns: Turns | None = None
    """Episodes of several turns: an environment or tools answer the policy. None: a completion is
    all."""
    overlong: Literal["error", "drop"] = "error"
    """What to do with a prompt that leaves no room for max_tokens: stop, or leave it out, counted
    and listed."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The engine's own options: see `stages/generate/options.py`."""
    device: Runtime[Literal["auto", "cpu", "cuda"]] = "auto"
    """auto: the GPU where there is one."""
    rows_per_shard: Runtime[int] = Field(default=ROWS_PER_SHARD, ge=1)
    """Rows written at once, and what processes that share the work take at a time: with fewer
    shards than `placement.devices`, GPUs have nothing to do. A crash costs
    the shards under way: one, and with vLLM as many more as it decodes together
    (`max_num_seqs`)."""
    patience_seconds: Runtime[float | None] = Field(default=None, ge=0)
    """Processes that share the work: how long an idle one waits for another's shard before it makes
    that shard too. None: twice as long as the slowest shard took so far, and at least 30 s."""
    code_sha256: str = ""
    """Filled in by the stage: hash of the file of your own engine or script."""
    end_token_ids: tuple[int, ...] = ()
    """Filled in by the stage: the model's own end tokens, where its generation_config.json names
    others than its config.json, whose hash says which model it is."""

    @model_validator(mode="after")
    def _fits(self) -> Config:
        if self.sampling.temperature == 0 and self.samples_per_prompt > 1:
            raise ValueError(
                f"temperature 0 gives {self.samples_per_prompt} equal samples: set a temperature "
                "above 0, or samples_per_prompt = 1 where nothing is trained on them"
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

    def key(self) -> dict[str, Any]:
        """As the base has it, without the engine's options that decide only speed or memory, or
        where your own code lies."""
        shipped_options = engine_options(self.engine, self.options)
        options = shipped_options.key() if shipped_options else dict(self.options)
        engine = self.engine
        if self.code_sha256:
            engine = without_folder(engine)
            if isinstance(options.get("script"), str):
                options["script"] = without_folder(options["script"])
        return {**super().key(), "options": options, "engine": engine}
