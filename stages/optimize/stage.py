"""optimize: train a checkpoint on saved rollouts and their rewards, and write the next one.

It reads versions of the store, and of other places only `critic_from` and a user's algorithm: no
engine, no tokenizer. Several versions of rollouts may be given (replay), each with its own rewards
and logprobs. Each version may be sampled by a policy at most `max_staleness` older than the one
that is trained.

Refused: rollouts of any other policy, rewards or logprobs that do not name exactly these rollouts,
greedy rows, biased sampling (unless `allow_biased_sampling`, with proximal logprobs), a KL term
without reference logprobs, and logprobs of the starting policy that the trainer cannot reproduce
(the audit).

It writes three versions under one run key: advantages, updates and, last, the policy with its
optimizer state. The weights on disk have `save_dtype`: bfloat16 after training in `bf16`, and then
the state keeps the other half of each float32 weight. A killed training resumes after the last step
that it saved (`resume_minutes`). If it is killed between two versions, the first ones exist without
a policy; the same call resumes or repeats the training and publishes the policy. If every advantage
is 0 and no other term of the loss trains (KL, entropy, NLL), the same weights become the next
policy, and its metrics say so.

    refs = {"policy": "a/policy@0", "rollouts": "a/rollouts@1", "rewards": "a/rewards@1"}
    ref = run_stage("optimize", Config(algorithm="dapo"), store, **refs)
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

from quiver.schemas.errors import ConfigError
from quiver.stages.core.run.stage import Plan, Refs
from quiver.stages.core.store import Store, Version
from quiver.stages.core.store.versions import OPTIMIZER_FOLDER
from quiver.stages.core.store.writer import Writer
from quiver.stages.model import checkpoints

from . import algorithms
from .checks import check_8bit, check_credit, check_lora, check_schedule, check_trackers
from .classifier import find_classifier
from .config import Audit, Config, Correction
from .inputs import (
    has_optimizer_state,
    open_inputs,
    require_optimizer_state,
    steered,
    with_base,
)

if TYPE_CHECKING:
    from accelerate import Accelerator

    from .batch import Batch
    from .trainer import Trainer

__all__ = ["Audit", "Config", "Correction", "check", "import_ahead", "make", "plan", "resolve"]
STAGE_VERSION = 1
RANKS = True
log = logging.getLogger(__name__)


def resolve(config: Config) -> Config:
    """Return `config` with the defaults of its algorithm. Runs the file of a user's own algorithm.
    Raises ConfigError."""
    return config.resolved()


def plan(config: Config, store: Store, refs: Refs, into: str | None = None) -> Plan:
    """Plan the training of a policy.

    Args:
        refs: policy, rollouts, rewards and, if given, ref_logprobs and prox_logprobs. All but
            policy may be lists.
        into: run to write into. Default: the policy's run.
    Raises:
        ConfigError, LineageError.
    """
    inputs = open_inputs(
        store,
        refs["policy"],
        refs["rollouts"],
        {
            "rewards": refs["rewards"],
            "ref": refs.get("ref_logprobs"),
            "prox": refs.get("prox_logprobs"),
        },
    )
    resolved = resolve(config)
    inputs = with_base(resolved.lora, store, inputs)
    # the roles now: base (of adapters), policy, rollouts, rollouts.2, …, rewards, rewards.2, …
    policy = inputs["policy"]
    check_schedule(resolved, policy)
    check_credit(resolved, inputs)
    if resolved.kl_coef > 0 and "ref" not in inputs:
        raise ConfigError(
            "optimize.kl_coef",
            f"{resolved.kl_coef} needs the reference's logprobs, and none are given",
            next="compute their logprobs under the reference first (stage logprobs), or set "
            "kl_coef = 0",
        )
    models = [checkpoints.model_entry("policy", policy)]
    if classifier := find_classifier(resolved, store.open, policy):
        models.append(classifier[1])
    return Plan(
        store=store,
        stage="optimize",
        stage_version=STAGE_VERSION,
        config=resolved,
        run=into or policy.ref.run,
        kinds=("advantages", "updates", "policy"),
        inputs=inputs,
        models=tuple(models),
        first_number=policy.ref.version + 1,
    )


def check(config: Config, columns: Iterable[str], prompts: Version | None = None) -> None:
    """Raise ConfigError if adapters, a base of 4 bits or moments in 8 bits cannot be had here, or a
    tracker is not installed."""
    check_trackers(config.trackers, config.tracker_folder)
    if config.optimizer == "adamw_8bit":
        check_8bit()
    if config.lora:
        check_lora(config.lora)


def import_ahead(config: Config) -> None:
    """Import the slow modules early, before there are rollouts."""
    from transformers import AutoModelForCausalLM  # noqa: F401

    from . import results, rollouts, trainer  # noqa: F401

    if config.optimizer == "adamw_8bit" or config.has_nf4_base:
        import bitsandbytes  # noqa: F401


def make(plan: Plan, writers: Mapping[str, Writer]) -> None:
    """Load, audit, train, save. Every rank calls this; only rank 0 has writers.

    Raises ConfigError, LineageError (also if the policy's optimizer state expired and
    `load_optimizer` asks for it), NumericError, and ResourceError if memory is short; nothing is
    published then.
    """
    from quiver.stages.model.loading import short_of_memory

    config = steered(plan.config, plan.inputs["policy"])
    loads_optimizer = config.load_optimizer and has_optimizer_state(
        config.lora, plan.inputs["policy"]
    )
    if loads_optimizer:
        require_optimizer_state(config, plan.inputs)
    writer = writers.get("policy")
    phase = writer.phase if writer else nullcontext
    with phase("import"):
        from . import results, rollouts
        from .accelerator import make_accelerator
        from .resume import SavedProgress

        accelerator = make_accelerator(config, plan)
    # a user's file may have changed since the plan
    config.require_unchanged_code()
    algorithm = config.chosen_algorithm()
    next_step = "lower optimize.token_budget, or set optimize.activation_checkpointing = true"
    with short_of_memory("optimize", next_step):
        with phase("load"):
            loaded = rollouts.load(config, algorithm, plan.store, plan.inputs)
            trainer = _load_trainer(
                plan, config, algorithm, loaded.batch, accelerator, loads_optimizer
            )
        # Runs the pass that advantages may need. The audit uses a pass of its own only if it must;
        # else the first step's pass is audited.
        with phase("audit"):
            trainer.prepare()
        with phase("steps"):
            trainer.train(SavedProgress(plan, loaded.batch_ids(), saves=writer is not None))
        with phase("save"):
            results.save(plan.inputs["policy"], trainer, writer)
    if writer:
        results.finish(writers, loaded, trainer)
    # Free what uses the process group before the group ends: gloo's threads otherwise abort a
    # rank at its exit, now and then.
    accelerator.free_memory()
    accelerator.wait_for_everyone()
    accelerator.end_training()


def _load_trainer(
    plan: Plan,
    config: Config,
    algorithm: algorithms.Algorithm,
    batch: Batch,
    accelerator: Accelerator,
    loads_optimizer: bool,
) -> Trainer:
    """Make the trainer; its step count goes on from the policy's. With `loads_optimizer`, it has
    the policy's optimizer state too."""
    import torch

    from quiver.stages.model.forward.media import vision_parameters
    from quiver.stages.model.loading import base_of, load_model

    from . import critic
    from .accelerator import trainer_of
    from .classifier import start_of
    from .lora import load_with_adapters
    from .optimizer import load_optimizer_state, read_tensors

    policy = plan.inputs["policy"]
    critic_kind = config.critic if algorithm.has_critic else None
    # ranks that shard the weights have another trainer; `load_on_cpu` is None for all others
    trainer_class, load_on_cpu = trainer_of(config, accelerator)
    load = load_on_cpu or partial(load_model, dtype=torch.float32, device=accelerator.device)
    load_whole = partial(load, policy, base=base_of(plan.store, policy))
    if config.lora:
        model = load_with_adapters(config, plan.inputs, accelerator.device, load_on_cpu)
    else:
        model = load_whole()
    value_trunk = critic.trunk_of(load_whole()) if critic_kind == "model" else None
    if not config.train_vision:
        for parameter in vision_parameters(model):
            parameter.requires_grad_(False)
    step = int(policy.manifest.metrics.get("step", 0))
    trainer = trainer_class(
        config, model, batch, algorithm, accelerator, step=step, value_trunk=value_trunk
    )
    if config.entropy_target is not None:
        trainer.last_entropy = policy.manifest.metrics.get("last_entropy")
    if loads_optimizer:
        state = read_tensors(policy, OPTIMIZER_FOLDER)
        load_optimizer_state(trainer.optimizer, model, state)
    if critic_kind:
        start = start_of(config, plan, trainer.critic)
        options = {"moments": config.load_optimizer, "start": start}
        critic.resume(trainer.critic, trainer.optimizer, policy, critic_kind, **options)
    return trainer
