"""The generate stage: a policy answers prompts; each sampled id is saved with its logprob.

The logprob is in column `old_logprobs`, in the distribution that the id was drawn from.

Finished shards are kept: a restart makes only the others, with the same rollout ids, seeds and
rows. A rollout's seed is a hash of the recipe's seed, the round, its group and its number in the
group (`rows.py`). The engine loads the policy's folder in `config.dtype`, whatever dtype the files
have, after their hashes were compared with the manifest's. Refused: prompts with ids that the
policy does not have, or that were rendered for a policy to which they are other tokens; prompts
that leave no room for max_tokens (`overlong = "drop"` counts and lists them instead; nothing is
ever cut); and malformed answers of an engine.

    run_stage("generate", Config(samples_per_prompt=8), store, prompts="arith/prompts@1",
        policy="arith/policy@0")
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from quiver.schemas.prompts import listed
from quiver.stages.core import plugins
from quiver.stages.core.run.stage import Plan, Refs
from quiver.stages.core.store import Store, Version
from quiver.stages.core.store.writer import Writer
from quiver.stages.model import checkpoints
from quiver.stages.model.loading import base_of, verify_model

from .config import Config
from .ends import end_ids_of_generation_config, stop_ids_of, unknown_end, warn_of_ends
from .engine import ENGINES, Setup, code_hash, engine_options
from .opening import request_maker, with_code_hashes
from .options import VllmOptions
from .prompts import context_limit, most_media, require_readable_ids, select_prompts
from .requests import Requests
from .resident import resident_or_fresh_engine
from .rows import Rows
from .shards import Shards
from .texts import Texts

STAGE_VERSION = 1
SHARED = True
_LEAST_ROOM = 64


def import_ahead(config: Config) -> None:
    """Import a shipped engine's slow libraries before there is anything to sample."""
    if config.engine in ENGINES:
        engine_class, _ = plugins.load(ENGINES[config.engine].path, "generate.engine")
        if hasattr(engine_class, "import_ahead"):
            engine_class.import_ahead(config)


def plan(config: Config, store: Store, refs: Refs, into: str | None = None) -> Plan:
    """Plan the rollouts of `refs["policy"]` on `refs["prompts"]`.

    Raises ConfigError or LineageError.
    """
    prompts = store.open(refs["prompts"])
    policy = store.open(refs["policy"])
    config = with_code_hashes(config, prompts)  # of [generate.turns]
    options = engine_options(config.engine, config.options)
    ends = () if config.sampling.ignore_eos else end_ids_of_generation_config(policy)
    filled_in = {"code_sha256": code_hash(config.engine, options), "end_token_ids": ends}
    return Plan(
        store=store,
        stage="generate",
        stage_version=STAGE_VERSION,
        config=config.model_copy(update=filled_in),
        run=into or prompts.ref.run,
        kinds=("rollouts",),
        inputs={"prompts": prompts},
        models=(checkpoints.model_entry("policy", policy),),
        patience_seconds=config.patience_seconds,
    )


def make(plan: Plan, writers: Mapping[str, Writer]) -> None:
    """Sample the missing shards; if none is missing, no engine is started.

    Raises ConfigError, LineageError, SchemaError, NumericError or ResourceError.
    """
    config = plan.config
    writer = writers["rollouts"]
    policy = plan.store.open(plan.models[0].ref)
    prompts, dropped, longest = select_prompts(config, plan.inputs["prompts"], policy)
    require_readable_ids(plan.inputs["prompts"], policy, plan.store.open)
    # rollout ids begin with 8 digits of the run key, so the same work gives the same ids
    rows = Rows(prompts, config, plan.run_key[:8])
    shards = Shards(writer, rows)
    if not len(rows):
        for index in shards.handout:
            writer.write(index, rows.empty_table())
    elif shards.handout.wait_for_work():
        warn_of_ends(plan, policy)
        setup = engine_setup(config, policy, longest, most_media(config, prompts))
        options = engine_options(config.engine, config.options)
        # vLLM can hold the adapter apart from its base; other engines need the base only if the
        # policy has no weights of its own
        keeps_adapter = isinstance(options, VllmOptions) and options.lora
        base = (checkpoints.adapter_base if keeps_adapter else base_of)(plan.store, policy)
        setup = replace(setup, base=base)
        # with [generate.turns], this opens the environments and the template
        with request_maker(plan, writer, setup) as new_requests:
            _sample(config, setup, writer, new_requests, rows, shards)
    metrics, status = shards.summary()
    infos: list[dict[str, Any]] = []
    # Processes on other machines may have another device or dtype.
    for report in writer.reports():
        if "engine" in report and report["engine"] not in infos:
            infos.append(report["engine"])
        if "template" in report:
            metrics["template"] = report["template"]
    info, *other_infos = infos or [{"name": config.engine}]
    metrics |= {"engine": info, "dropped": listed(dropped), **unknown_end(plan, policy)}
    if other_infos:
        metrics["other_engines"] = other_infos
    if dropped:
        status["dropped"] = len(dropped)
    device = info.get("device", "cpu")
    writer.finish(metrics=metrics, status=status, device=device, ids=rows.rollout_ids)


def engine_setup(
    config: Config, policy: Version, longest: int, most_media: Mapping[str, int]
) -> Setup:
    """Return the engine's setup, for rows of at most `longest` ids and `most_media` in each prompt.

    `max_model_len` is a power of two, or three quarters of one, or the context limit, so that it
    seldom changes with the prompts.
    """
    least_room = max(longest, _LEAST_ROOM)
    room = 2 ** math.ceil(math.log2(least_room))
    if least_room <= room * 3 // 4:
        room = room * 3 // 4
    return Setup(
        policy=policy,
        sampling=config.sampling,
        stop_ids=stop_ids_of(config.sampling, policy),
        max_model_len=min(room, context_limit(config, policy)),
        dtype=config.dtype,
        device=config.device,
        options=config.options,
        longest=longest,
        most_media=most_media,
    )


def _sample(
    config: Config,
    setup: Setup,
    writer: Writer,
    new_requests: Callable[..., Requests],
    rows: Rows,
    shards: Shards,
) -> None:
    """Start the engine and let it make all missing shards."""
    policy = setup.policy
    if setup.base is not None:
        verify_model(setup.base)
        policy.verify(f"{checkpoints.ADAPTER_FOLDER}/")
    sizes = policy.files.sizes()
    for entry in policy.manifest.files:
        # Name a missing or truncated file at once, before anything is imported.
        if "/" not in entry.name and sizes.get(entry.name) != entry.bytes:
            policy.verify(entry.name)
    with resident_or_fresh_engine(config, setup, writer) as engine:
        requests = new_requests(
            rows=rows,
            texts=Texts.of(policy, setup.stop_ids),
            take_shard=shards.take,
            ahead=getattr(engine, "ahead", 1),  # optional; see `Engine`
            vocabulary_size=checkpoints.vocabulary_size(policy),
        )
        shards.make(engine, requests)
