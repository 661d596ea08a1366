"""generate: a policy answers prompts; each sampled id is saved with the logprob that it had.

Finished shards are kept: a restart makes the others only, with the same rollout ids, seeds and
rows. Refused: prompts of other ids than the policy has, prompts that leave no room for max_tokens
(unless `overlong = "drop"`, which counts and lists them; nothing is ever cut), an engine's answer
that is not whole.

    ref = run(Config(samples_per_prompt=8), store, prompts="arith/prompts@1",
    policy="arith/policy@0")
"""

from __future__ import annotations

import logging
import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field, model_validator

from quiver.schemas.errors import ConfigError, SchemaError, printable
from quiver.schemas.refs import Ref
from quiver.stages.common import announced
from quiver.stages.common.config import Config as Base
from quiver.stages.common.config import Runtime, without_folder
from quiver.stages.common.early import Anew
from quiver.stages.common.models import checkpoints
from quiver.stages.common.models.loading import verify_model
from quiver.stages.common.store import Store, Version
from quiver.stages.common.work import ROWS_PER_SHARD, Work, begin
from quiver.stages.generate import engine as engines

from .options import Device, Dtype, Overlong, Sampling
from .rows import Rows
from .shards import Shards

STAGE_VERSION = 1
_LISTED = 1000
_LEAST_ROOM = 64
_started: list[tuple[str, engines.Setup, engines.Engine]] = []
"""The engine that `start` started, until it is used."""
log = logging.getLogger(__name__)


class Config(Base):
    """Who answers, how often, and how it is sampled."""

    engine: str = "vllm"
    """`vllm`, `transformers`, `scripted`, or your own: module:Class or file.py:Class."""
    samples_per_prompt: int = Field(default=8, ge=1)
    """Rollouts of each prompt: the size of a group."""
    sampling: Sampling = Sampling()
    """The distribution that is sampled from."""
    seed: int = Field(default=0, ge=0)
    """With `iteration`, group and sample it gives each row its own seed."""
    iteration: int = Field(default=0, ge=0)
    """Makes other seeds for the same prompts in the next iteration."""
    dtype: Dtype = "auto"
    """What the model computes in; auto: bfloat16 where the hardware has it, else float32."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Most tokens of prompt and completion together. None: the model's context."""
    overlong: Overlong = "error"
    """What to do with a prompt that leaves no room for max_tokens: stop, or leave it out, counted
    and listed."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The engine's own options: see `stages/generate/options.py`."""
    device: Runtime[Device] = "auto"
    """auto: the GPU where there is one."""
    rows_per_shard: Runtime[int] = Field(default=ROWS_PER_SHARD, ge=1)
    """Rows written at once: what a crash can cost at most, and what processes that share the work
    take at a time."""
    patience_seconds: Runtime[float | None] = Field(default=None, ge=0)
    """Processes that share the work: how long an idle one waits for another's shard before it makes
    that shard too. None: twice as long as the slowest shard took so far, and at least 30 s."""
    code_sha256: str = ""
    """Filled in by the stage: hash of the file of your own engine or script."""

    @model_validator(mode="after")
    def _fits(self) -> Config:
        if self.sampling.temperature == 0 and self.samples_per_prompt > 1:
            raise ValueError(
                f"temperature 0 gives {self.samples_per_prompt} equal samples: set "
                "samples_per_prompt = 1, or a temperature"
            )
        try:
            engines.engine_options(self.engine, self.options)
        except ConfigError as error:
            raise ValueError(error.message) from None
        return self

    def key(self) -> dict[str, Any]:
        """As the base has it, without the engine's options that decide only speed or memory, or
        where your own code lies."""
        known = engines.engine_options(self.engine, self.options)
        options = known.key() if known else dict(self.options)
        if self.code_sha256 and isinstance(options.get("script"), str):
            options["script"] = without_folder(options["script"])
        engine = without_folder(self.engine) if self.code_sha256 else self.engine
        return {**super().key(), "options": options, "engine": engine}


def prepare(config: Config) -> None:
    """Import what the engine needs, before there is anything to sample."""
    engines.prepare(config.engine, config.device)


def start(config: Config, store: Store, refs: dict[str, str], policy: Version) -> None:
    """Start the engine for `policy`, which is announced, and for prompts like `refs["prompts"]`. An
    engine of one's own, and one that loads an adapter, starts when its policy is committed."""
    known = engines.engine_options(config.engine, config.options)
    if known is None or getattr(known, "lora", False):
        return
    _, _, longest = _fitting(config, store.open(refs["prompts"]), policy)
    setup = _setup(config, policy, longest)
    _started.append((config.engine, setup, _make(config.engine, setup)))
    log.info("engine %s is ready for %s before that is committed", config.engine, policy.ref)


def run(
    config: Config,
    store: Store,
    *,
    prompts: str | Ref,
    policy: str | Ref,
    into: str | None = None,
    force: bool = False,
    share: bool = False,
) -> Ref:
    """Write the rollouts of `policy` on `prompts`, with `share` together with all who do the same;
    its Ref. ConfigError, SchemaError, NumericError, ResourceError."""
    asked, model = store.open(prompts), store.open(policy)
    code = engines.code_hash(config.engine, engines.engine_options(config.engine, config.options))
    with begin(
        store,
        into or asked.ref.run,
        "rollouts",
        stage="generate",
        stage_version=STAGE_VERSION,
        config=config.model_copy(update={"code_sha256": code}),
        inputs={"prompts": asked},
        models=(checkpoints.as_model("policy", model),),
        force=force,
        share=share,
        patience=config.patience_seconds,
    ) as work:
        if work.done:
            return work.done.ref
        table, dropped, longest = _fitting(config, asked, model)
        rows = Rows(
            table, config.samples_per_prompt, config.seed, config.iteration, work.run_key[:8]
        )
        shards = Shards(work, rows, config.rows_per_shard, config.sampling.temperature)
        _generate(config, work, model, shards, longest)
        metrics, status = shards.summary()
        engine, *others = _engines(work) or [{"name": config.engine}]
        metrics |= {"engine": engine, "dropped": dropped[:_LISTED]} | (
            {"other_engines": others} if others else {}
        )
        status |= {"dropped": len(dropped)} if dropped else {}
        return work.commit(metrics=metrics, status=status, device=engine.get("device", "cpu")).ref
    return work.done.ref  # committed by another of those who share the work


def _engines(work: Work) -> list[dict[str, Any]]:
    """What the engines that took part say of themselves, each once: on other machines it may be
    another device or dtype."""
    told = [part["engine"] for part in work.parts() if "engine" in part]
    return [each for place, each in enumerate(told) if each not in told[:place]]


def _fitting(config: Config, prompts: Version, policy: Version) -> tuple[pa.Table, list[str], int]:
    """The prompts that fit, the group ids of those that do not, and the most ids that a row can
    have."""
    table = prompts.table(["group_id", "prompt_ids"])
    vocabulary = checkpoints.vocabulary_size(policy)
    for chunk in table.column("prompt_ids").chunks:
        highest = pc.max(chunk.flatten()).as_py()
        if highest is not None and highest >= vocabulary:
            message = f"id {highest} is outside the vocabulary of {policy.ref}, {vocabulary}"
            raise SchemaError(
                str(prompts.ref), message, next="render the prompts again with this policy"
            )
    foreign = [token for token in config.sampling.stop_token_ids if not 0 <= token < vocabulary]
    if foreign:
        message = f"{foreign[0]} is outside the vocabulary of {policy.ref}, {vocabulary}"
        raise ConfigError(
            "generate.sampling.stop_token_ids", message, next="name ids of this policy's tokenizer"
        )
    lengths = pc.list_value_length(table.column("prompt_ids")).to_numpy()
    if (lengths == 0).any():
        raise SchemaError(
            str(prompts.ref),
            f"{_names(table, lengths == 0)}: prompt_ids is empty",
            next="correct the source",
        )
    context = min(_limit(policy, config), np.iinfo(np.int32).max)
    wanted = lengths + config.sampling.max_tokens
    if checkpoints.is_encoder_decoder(policy):
        wanted = np.maximum(
            lengths, config.sampling.max_tokens
        )  # encoder and decoder have a context each
    fits = wanted <= context
    if not fits.all() and config.overlong == "error":
        raise ConfigError(
            f"{prompts.ref} {_names(table, ~fits)}",
            f"{int((~fits).sum())} of {len(fits)} prompts leave no room: up to "
            f"{int(lengths.max())} tokens and "
            f"generate.sampling.max_tokens {config.sampling.max_tokens} exceed the context of "
            f"{context}",
            next='lower max_tokens, shorten the prompts, or set generate.overlong = "drop"',
        )
    dropped = table.column("group_id").filter(pa.array(~fits)).to_pylist()
    if dropped:
        log.warning(
            "%d of %d prompts leave no room for the completion and are dropped",
            len(dropped),
            len(fits),
        )
    return table.filter(pa.array(fits)), dropped, int(wanted[fits].max(initial=1))


def _limit(policy: Version, config: Config) -> float:
    own = checkpoints.context_length(policy) or float("inf")
    return min(own, config.max_model_len or float("inf"))


def _names(table: pa.Table, chosen: np.ndarray) -> str:
    return printable(table.column("group_id")[int(chosen.argmax())].as_py())


def _base(config: Config, store: Store, policy: Version) -> Version | None:
    """What an engine with `options.lora` loads beside the policy's adapter, both checked; None for
    all others."""
    known = engines.engine_options(config.engine, config.options)
    base = checkpoints.adapter_base(store, policy) if getattr(known, "lora", False) else None
    if base:
        verify_model(base)
        policy.verify(f"{checkpoints.ADAPTER_FOLDER}/")
    return base


def _check_sizes(policy: Version) -> None:
    """Name a file of the model that is missing or cut at once, before anything is imported."""
    for entry in policy.manifest.files:
        path = policy.files.folder / entry.name
        if "/" not in entry.name and not (path.is_file() and path.stat().st_size == entry.bytes):
            policy.verify(entry.name)


def _generate(config: Config, work: Work, policy: Version, shards: Shards, longest: int) -> None:
    """Make the shards that are missing. Without a missing shard no engine is started."""
    shards.finish_empty()
    if not shards.claims.more():
        return
    setup = _setup(config, policy, longest, _base(config, work.store, policy))
    _check_sizes(policy)
    with work.phase("load"):
        engine = _found(config.engine, setup) if _started else _make(config.engine, setup)
        shards.tokenizer = checkpoints.load_tokenizer(policy)
    work.told["engine"] = engine.info
    try:
        shards.take(
            engine,
            engines.Limits(
                config.engine, checkpoints.vocabulary_size(policy), config.sampling.max_tokens
            ),
        )
    finally:
        with work.phase("close"):
            engine.close()


def _setup(
    config: Config, policy: Version, longest: int, base: Version | None = None
) -> engines.Setup:
    """`max_model_len` is a power of two, or half as much more, or the limit: it changes seldom with
    the prompts."""
    stops = {
        *config.sampling.stop_token_ids,
        *([] if config.sampling.ignore_eos else checkpoints.end_token_ids(policy)),
    }
    power = 2 ** math.ceil(math.log2(max(longest, _LEAST_ROOM)))
    room = int(
        min(
            power * 3 // 4 if _LEAST_ROOM < longest <= power * 3 // 4 else power,
            _limit(policy, config),
        )
    )
    of = (
        policy,
        config.sampling,
        tuple(sorted(stops)),
        room,
        config.dtype,
        config.device,
        config.options,
        base,
    )
    return engines.Setup(*of, longest)


def _make(name: str, setup: engines.Setup) -> engines.Engine:
    with ThreadPoolExecutor(1) as aside:
        check = aside.submit(
            verify_model, setup.policy
        )  # hashing gigabytes takes as long as importing an engine's library
        try:
            return engines.make_engine(name, replace(setup, verified=check.result))
        finally:
            check.result()  # of a torn file this error says more than the engine's own


def _found(name: str, setup: engines.Setup) -> engines.Engine:
    """The engine that was started early. Anew when it has another model than the policy that was
    committed, or was started for something else."""
    named, started, engine = _started.pop()
    alike = replace(started, policy=setup.policy, longest=setup.longest) == setup
    if named == name and alike and announced.holds(setup.policy, started.policy):
        return engine
    log.info("engine %s was made ready for something else, and starts again", named)
    engine.close()
    raise Anew
