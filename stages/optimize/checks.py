"""Checks before a training: which policy sampled the rollouts, and how; and whether credit,
schedule, trackers and adapters can be had.

Several versions of rollouts are checked one by one. Only names and manifests are read here: no
torch, no weights.

    check_lineage(config, store, sampled)        # a `RolloutSet` for each of `inputs.sets`

Not of the spine: it says what is refused, and nothing of how training goes.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quiver.schemas import fields, rewards
from quiver.schemas.errors import ConfigError, LineageError, NumericError, did_you_mean, printable
from quiver.schemas.manifest import ModelEntry, line_of
from quiver.stages.core.store import Store, Version
from quiver.stages.model import checkpoints

if TYPE_CHECKING:
    from .batch import Batch
    from .config import Config, Lora
    from .inputs import RolloutSet

_TRACKERS = (
    *("aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab", "tensorboard", "trackio"),
    "wandb",
)
"""Names of accelerate's trackers, which are the packages that they need."""
_MOST_LEARNED_FROM = 1e15
"""Rewards, advantages and returns beyond this may be why a step is not finite: sums of their
squares come near float32's limit."""
log = logging.getLogger(__name__)


def check_lineage(config: Config, store: Store, version: RolloutSet) -> list[str]:
    """Check which policy sampled the rollouts, and how.

    Refuses rollouts of a foreign or too old policy, proximal logprobs of a policy other than
    `prox_of` requires, and biased sampling that is not allowed or lacks proximal logprobs. Raises
    LineageError, ConfigError.

    Returns the biases of sampling that were allowed.
    """
    rollouts = version.rollouts
    sampler = rollouts.manifest.model("policy")
    weights = sampler.weights if sampler else None
    allowed: list[ModelEntry] = []
    # a missing ancestor is an error only for rollouts that old
    policy = version.inputs["policy"].manifest
    with_expired = store.with_expired()  # a manifest is enough
    for manifest in line_of(policy, lambda ref: with_expired.open(ref).manifest):
        allowed.append(checkpoints.model_entry("policy", with_expired.open(manifest.ref)))
        if weights == allowed[-1].weights or len(allowed) > config.max_staleness:
            break
    if weights != allowed[-1].weights:
        found = f"{weights[:12]}… ({sampler.ref})" if sampler else "no policy at all"
        raise LineageError(
            str(rollouts.ref),
            f"sampled by weights {found}, expected "
            f"{' or '.join(f'{m.weights[:12]}… ({m.ref})' for m in allowed)}; "
            f"optimize.max_staleness is {config.max_staleness}",
            next="generate with the starting checkpoint, start from the one that sampled, or "
            "raise optimize.max_staleness",
        )
    for part in ("tokenizer", "template"):
        if getattr(sampler, part) not in ("", getattr(allowed[-1], part)):
            raise LineageError(
                str(rollouts.ref),
                f"sampled by {sampler.ref}, whose {part} differs from {allowed[-1].ref}'s",
                next="generate with the starting checkpoint, or start from the one that sampled",
            )
    refuse_scripted(str(rollouts.ref), rollouts.manifest.config.get("engine"), config)
    prox = version.inputs.get("prox")
    if prox is not None:
        _check_prox(config, version, prox)
    elif config.prox_of == "start":
        raise ConfigError(
            "optimize.prox_of",
            f"'start' needs proximal logprobs of {rollouts.ref}, none are given",
            next=f"compute them under {version.inputs['policy'].ref} (stage logprobs, role "
            "prox), or take 'behaviour'",
        )
    biased = biases(rollouts.manifest.config_section("sampling"))
    if biased and not config.allow_biased_sampling:
        raise ConfigError(
            str(rollouts.ref),
            f"sampled with {', '.join(biased)}: its tokens do not follow the policy's own "
            "distribution",
            next="generate without truncation and penalties, or set "
            "optimize.allow_biased_sampling = true",
        )
    if biased and prox is None:
        raise ConfigError(
            str(rollouts.ref),
            f"sampled with {', '.join(biased)}: the ratio to the engine's logprobs is not 1 even "
            "before the first step, and no proximal logprobs are given",
            next="compute them under the policy that sampled (stage logprobs, role prox), as a "
            "recipe does by itself",
        )
    return biased


def refuse_scripted(name: str, engine: str | None, config: Config) -> None:
    """Raise ConfigError if the audit would compare logprobs that engine `scripted` made up.

    `name`: the rollouts, or the key that names the engine.
    """
    if engine == "scripted" and config.audit.enabled:
        raise ConfigError(
            name,
            "a script answers in place of the policy, and its logprobs are made up: optimize "
            "compares them with the policy's, and would stop",
            next='set generate.engine = "vllm" or "transformers"; only to try the stages out, set '
            "optimize.audit.enabled = false",
        )


def _check_prox(config: Config, version: RolloutSet, prox: Version) -> None:
    """Raise LineageError if the proximal logprobs are of a policy other than `prox_of` requires."""
    if config.prox_of == "start":
        policy = checkpoints.model_entry("policy", version.inputs["policy"])
        description = "this training starts from"
    else:
        policy = version.rollouts.manifest.require_model("policy")
        description = "sampled"
    computed_by = {model.weights for model in prox.manifest.models}
    if computed_by != {policy.weights}:
        found = ", ".join(f"{other[:12]}…" for other in sorted(computed_by)) or "no model"
        raise LineageError(
            str(prox.ref),
            f"proximal logprobs must be under the policy that {description}: expected weights "
            f"{policy.weights[:12]}…, found {found}; optimize.prox_of is {config.prox_of!r}",
            next=f"compute those of {version.rollouts.ref} under {policy.ref}",
        )


def check_credit(config: Config, inputs: Mapping[str, Version]) -> None:
    """Raise ConfigError if `credit` needs the rewards of turns, and a version of rewards has
    none."""
    if config.credit == "rollout":
        return
    for role, version in inputs.items():
        has_turns = version.manifest.kind_schema == fields.kind_of(rewards.OF_TURNS)
        if role.partition(".")[0] == "rewards" and not has_turns:
            raise ConfigError(
                f"optimize.credit {config.credit}",
                f"needs rewards of turns, and {version.ref} has none",
                next='score the rollouts with a reward function whose use is "environment", or set '
                'optimize.credit = "rollout"',
            )


def check_schedule(config: Config, policy: Version) -> None:
    """Raise ConfigError if every step of this stage would have learning rate 0; warn if only the
    last ones would."""
    if config.schedule == "constant":
        return
    first, steps = int(policy.manifest.metrics.get("step", 0)), config.epochs * config.minibatches
    if first >= config.total_steps:
        raise ConfigError(
            "optimize.total_steps",
            f"schedule {config.schedule!r} is at learning rate 0 from step {config.total_steps} "
            f"on, and {policy.ref} has taken {first} steps: nothing would be learned",
            next=f"raise optimize.total_steps above {first + steps - 1}",
        )
    if first + steps > config.total_steps:
        log.warning(
            "optimize.total_steps: the learning rate is 0 from step %d on, and this stage goes "
            "from step %d up to step %d",
            config.total_steps,
            first,
            first + steps - 1,
        )


def biases(sampling: dict[str, Any]) -> list[str]:
    """Return the sampling settings that make the sampled distribution differ from the policy's."""
    neutral = {
        "top_p": [1],
        "top_k": [0, -1],
        "min_p": [0],
        "min_tokens": [0],
        "presence_penalty": [0],
        "frequency_penalty": [0],
        "repetition_penalty": [1],
    }
    return [
        f"{name} = {printable(sampling[name])}"
        for name, values in neutral.items()
        if sampling.get(name) not in (None, *values)
    ]


def quantization(options: Mapping[str, Any]) -> str:
    """Return the options by which vLLM rounds weights or cache further than its dtype, such as
    `quantization = fp8`; empty if there are none."""
    arguments = options.get("engine_args") or {}
    rounded = {
        name: arguments.get(name)
        for name in ("quantization", "kv_cache_dtype")
        if arguments.get(name) not in (None, "auto", "bfloat16", "float16")
    }
    return ", ".join(f"{name} = {printable(kind)}" for name, kind in rounded.items())


def check_trackers(trackers: Sequence[str], folder: str | None) -> None:
    """Raise ConfigError for a tracker that accelerate does not know or that is not installed, and
    for a `folder` that is a file."""
    for name in trackers:
        if name not in _TRACKERS:
            raise ConfigError(
                f"optimize.trackers {printable(repr(name))}",
                f"accelerate has no such tracker; it has {', '.join(_TRACKERS)}"
                f"{did_you_mean(name, _TRACKERS)}",
                next="correct optimize.trackers",
            )
        _check_installed(name, f"optimize.trackers {name}", name)
    if trackers and Path(folder).exists() and not Path(folder).is_dir():
        raise ConfigError(
            f"optimize.tracker_folder {printable(folder)}",
            "is a file, not a folder",
            next="name another folder in optimize.tracker_folder",
        )


def check_lora(config: Lora) -> None:
    """Raise ConfigError if peft or, for a base of 4 bits, bitsandbytes is not installed."""
    _check_installed("peft", "optimize.lora", '"quiver-rl[lora]"')
    if config.base == "nf4":
        check_8bit("optimize.lora.base nf4")


def check_8bit(setting: str = "optimize.optimizer adamw_8bit") -> None:
    """Raise ConfigError about `setting` if bitsandbytes, which quantizes, is not installed."""
    _check_installed("bitsandbytes", setting, '"quiver-rl[8bit]"')


def _check_installed(package: str, setting: str, requirement: str) -> None:
    if importlib.util.find_spec(package) is None:
        problem = f"{package} is not installed here"
        raise ConfigError(setting, problem, next=f"pip install {requirement}")


def not_finite(batch: Batch, message: str) -> NumericError:
    """Return the error that a training stops, with what helps: another rate, or smaller numbers to
    learn from if these are too large to be squared."""
    large, advice = "", "lower optimize.learning_rate"
    for name in ("returns", "advantages", "rewards"):
        column = getattr(batch, name)
        sizes = [] if column is None else column[~column.isnan()].abs().tolist()
        if max(sizes, default=0.0) > _MOST_LEARNED_FROM:
            large = f"; the largest {name[:-1]} is {max(sizes):.3g}, and losses and norms square it"
            advice = f"make the {name} smaller"
    return NumericError(
        "optimize",
        message + large,
        state="the starting checkpoint is intact; no version was written.",
        next=advice,
    )
