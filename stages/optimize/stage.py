"""optimize: saved rollouts and their rewards turn a checkpoint into the next one.

It reads datasets and weights, nothing else: no engine, no tokenizer. Several versions of rollouts
may be given (replay), each with its own rewards and logprobs. Refused: rollouts of another policy
(unless `max_staleness` allows), rewards or logprobs that do not name exactly these rollouts, greedy
rows, truncated sampling (unless `allow_biased_sampling`), a KL term without reference logprobs, and
logprobs that the trainer can not reproduce (the audit). Written, together or not at all: the policy
with its optimizer state, advantages and updates. When every advantage is 0 there is nothing to
learn: the same weights become the next policy, and its metrics say so.

    ref = run(Config(algorithm="dapo"), store, policy="a/policy@0", rollouts="a/rollouts@1",
    rewards="a/rewards@1")
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from quiver.schemas.errors import ConfigError
from quiver.schemas.refs import Ref
from quiver.stages.common.models import checkpoints
from quiver.stages.common.store import Store, Version
from quiver.stages.common.work import Work, begin

from . import algorithms
from .checks import check_schedule
from .config import SURROGATE_FIELDS as _SURROGATE  # noqa: F401
from .config import Audit, Config, Correction  # noqa: F401
from .inputs import Refs, open_inputs
from .lora import attach, check_installed, moments_fit, with_base

if TYPE_CHECKING:
    from accelerate import Accelerator

    from .rollouts import Loaded

STAGE_VERSION = 1
log = logging.getLogger(__name__)


def run(
    config: Config,
    store: Store,
    *,
    policy: str | Ref,
    rollouts: Refs,
    rewards: Refs,
    ref_logprobs: Refs | None = None,
    prox_logprobs: Refs | None = None,
    into: str | None = None,
    force: bool = False,
) -> Ref:
    """Train `policy` on `rollouts` with `rewards`; the next policy's reference. Into the policy's
    run by default.

    Of several versions of rollouts each has its own rewards and logprobs, found by what their
    manifests name, in any order. A policy may have sampled any of them that is at most
    `max_staleness` older than `policy`.

    Raises ConfigError, LineageError, NumericError (nothing is committed then), ResourceError when
    memory is short.
    """
    inputs = open_inputs(
        store, policy, rollouts, {"rewards": rewards, "ref": ref_logprobs, "prox": prox_logprobs}
    )
    config = config.resolved()
    inputs = with_base(config.lora, store, inputs)
    _check(config, inputs)
    about = {
        "stage": "optimize",
        "stage_version": STAGE_VERSION,
        "config": config,
        "inputs": inputs,
    }
    about["models"] = (checkpoints.as_model("policy", inputs["policy"]),)
    target = into or inputs["policy"].ref.run
    writer = os.environ.get("RANK", "0") == "0"
    with begin(store, target, "policy", force=force, **about) if writer else nullcontext() as work:
        if writer and work.done and os.environ.get("WORLD_SIZE", "1") == "1":
            return work.done.ref
        learn = partial(_learn, config, store, inputs, work, about, target, force)
        return _train(config, work, learn)


def prepare(config: Config) -> None:
    """Import what takes long, before there is anything to learn from."""
    from transformers import AutoModelForCausalLM  # noqa: F401

    from . import results, rollouts, trainer  # noqa: F401


def _check(config: Config, inputs: dict[str, Version]) -> None:
    """What can be told from names and manifests alone."""
    check_schedule(config, inputs["policy"])
    if config.kl_coef > 0 and "ref" not in inputs:
        raise ConfigError(
            "optimize.kl_coef",
            f"{config.kl_coef} needs the reference's logprobs, and none are given",
            next="score the rollouts under the reference first (stage logprobs), or set kl_coef = "
            "0",
        )


def _train(config: Config, work: Work | None, learn: Callable[[Accelerator], Ref | None]) -> Ref:
    """Call `learn` on every rank, unless the work is done; the reference that the writing rank
    knows, on every rank."""
    with work.phase("import") if work else nullcontext():
        from accelerate.utils import broadcast_object_list

        from . import trainer

        accelerator = trainer.make_accelerator(config)
    answer = [work.done.ref if work and work.done else None]
    broadcast_object_list(answer)
    if answer[0] is None:
        answer = [learn(accelerator)]
        broadcast_object_list(answer)
    # what holds on to the process group goes before the group does: gloo's threads else abort a
    # rank at its exit, now and then
    accelerator.free_memory()
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return answer[0]


def _learn(
    config: Config,
    store: Store,
    inputs: dict[str, Version],
    work: Work | None,
    about: dict[str, Any],
    run: str,
    force: bool,
    accelerator: Accelerator,
) -> Ref | None:
    """Load, audit, train; on the writing rank save and commit. The new policy's reference there,
    None elsewhere."""
    from quiver.stages.common.models.loading import short_of_memory

    from . import results, rollouts

    phase = work.phase if work else (lambda _: nullcontext())
    row = algorithms.resolve(config.algorithm)
    with short_of_memory(
        "optimize", "lower optimize.token_budget, or set optimize.activation_checkpointing = true"
    ):
        with phase("load"):
            loaded = rollouts.load(config, row, store, inputs)
            made, model = _trainer(row, inputs, loaded, accelerator)
        with phase("audit"):
            made.prepare()
        with phase("steps"):
            outcome = made.train()
    if work is None:
        return None
    with phase("save"):
        results.save(config, inputs["policy"], model, made, work)
    return results.commit(store, run, about, loaded, outcome, work, accelerator, force=force)


def _trainer(
    row: algorithms.Algorithm, inputs: dict[str, Version], loaded: Loaded, accelerator: Accelerator
):
    import torch

    from quiver.stages.common.models.loading import load_model

    from . import results, value_head
    from .optimizer import load_state
    from .trainer import Trainer

    policy, lora = inputs["policy"], loaded.config.lora
    critic = loaded.config.critic if row.critic else None
    if lora:
        check_installed()
    load = partial(load_model, dtype=torch.float32, device=accelerator.device)
    model, trunk = (
        load(inputs.get("base", policy)),
        value_head.trunk_of(load(policy)) if critic == "model" else None,
    )
    if lora:
        attach(lora, model, policy, seed=loaded.config.seed)
    step = int(policy.manifest.metrics.get("step", 0))
    made = Trainer(
        loaded.config, model, loaded.batch, row, accelerator, step=step, value_trunk=trunk
    )
    state = (
        results.load_optimizer(policy)
        if loaded.config.load_optimizer and moments_fit(lora, policy)
        else None
    )
    if state:
        load_state(made.optimizer, model, state)
    if critic:
        value_head.resume(
            made.judge, made.optimizer, policy, critic, moments=loaded.config.load_optimizer
        )
    return made, model
