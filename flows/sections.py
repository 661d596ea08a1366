"""The sections of a recipe that say more than a stage's own config, and those that no stage has:
where rows come from, which policy the KL term holds on to, where each stage runs.

The keys of one section may be put over those of another, and over all those of the shell.

Not of the spine: each key says what it does, and `quiver keys` lists them.
"""

from __future__ import annotations

import json
import tomllib
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field

from quiver.schemas.errors import ConfigError, printable
from quiver.schemas.plain import flatten
from quiver.schemas.refs import NAME
from quiver.stages.common.config import Config, Runtime, parse
from quiver.stages.evaluate.config import Config as ScoreConfig
from quiver.stages.generate.config import Config as GenerateConfig
from quiver.stages.logprobs.config import PassConfig
from quiver.stages.optimize.config import Config as OptimizeConfig
from quiver.stages.prompt.config import SourceConfig, TemplateConfig

NIGHT = "{night}"
"""In [data]: the name of a night, which a nightly run puts in."""
SIDE_RUNS = (".eval", ".ref")
"""What the name of a run is followed by where the flow puts what no iteration trains on: its
evaluations, its moving average."""


def _free_name(run: str) -> str:
    for ending in SIDE_RUNS:
        if run.endswith(ending):
            raise ValueError(f"may not end in {ending}: runs of that form are made beside it")
    if ".." in f"{run}.":
        raise ValueError("may hold no two dots in a row and none at its end")
    return run


RunName = Annotated[
    str, Field(pattern=rf"^{NAME.pattern}$", max_length=58), AfterValidator(_free_name)
]
"""Of a run that a recipe names."""
StageName = Literal[
    "policy", "prompt", "generate", "reward", "logprobs", "average", "optimize", "evaluate"
]


class Refill(Config):
    """Sample the next `data.limit` rows too, in the same iteration and by the same policy, until
    enough groups have contrast, and learn from those of all rounds together.

    It is the dynamic sampling of DAPO. The next iteration goes on behind the last row that was
    asked. Groups without contrast are left out of the loss, unless `optimize.drop_zero_variance =
    false`.
    """

    groups: int = Field(ge=1)
    """How many groups with contrast (scored rewards that are not all equal) are enough."""
    max_rounds: int = Field(4, ge=1)
    """Most rounds of `data.limit` prompts an iteration, the first one included."""


class Data(SourceConfig):
    """The training rows, and what is different for the held-out ones."""

    refill: Refill | None = None
    """Sample further prompts until enough groups have contrast. None: each iteration has one
    round."""
    held_out: dict[str, Any] | None = None
    """Keys of [data] with other values for evaluation, e.g. `{ split = "test", limit = 200 }`.
    Without it: no evaluation. It must name other rows: another source, split, name or arguments."""

    def for_evaluation(self) -> SourceConfig:
        """The held-out source: [data] with the keys of [data.held_out] put over it. It has no limit
        unless [data.held_out] sets one."""
        train = self.model_dump(
            exclude={"curriculum", "held_out", "limit", "refill", "source_sha256"}
        )
        return parse(
            SourceConfig, {**train, **(self.held_out or {})}, "data.held_out", is_section=True
        )

    def require_filled_in(self) -> None:
        """ConfigError if a text holds `{night}`, which a night alone replaces by its name."""
        leaves = flatten(self.model_dump(mode="json", exclude_unset=True), "data")
        keys = [key for key, leaf in leaves.items() if NIGHT in f"{key} {leaf}"]
        if keys:
            raise ConfigError(
                printable(keys[0]),
                f"holds {NIGHT}, which only a night fills in; elsewhere put a value there by --set",
                next="quiver nightly RECIPE",
            )

    def check_refill(self, *, has_groups: bool) -> None:
        """ValueError where `refill` could never do what it says. `has_groups`: the algorithm
        compares the answers to one prompt."""
        refill = self.refill
        if refill is None:
            return
        if self.limit is None:
            raise ValueError("data.refill takes the next rows of the data: set data.limit")
        most = self.limit * refill.max_rounds
        if refill.groups > most:
            raise ValueError(
                f"data.refill.groups is {refill.groups}, and {refill.max_rounds} rounds of "
                f"data.limit = {self.limit} prompts have {most}: lower it, or raise max_rounds"
            )
        if not has_groups:
            raise ValueError(
                "data.refill counts groups whose rewards differ, which optimize.algorithm does not "
                "compare: leave it out, or take an algorithm with groups, such as dapo"
            )


class Schedule(Config):
    """What a run by a schedule, or by `--on`, does. Those of a recipe with [promotion] are
    nights."""

    each: Literal["go on", "again", "same"] = "go on"
    """`go on`: `iterations` more, counted from the last finished one. `again`: a run of its own
    from the base, named by date and time (UTC), with the next seed. `same`: the recipe as it is, so
    from the second time on nothing is left to do."""


class Reference(Config):
    """Which policy the KL term holds on to. It is scored only where `optimize.kl_coef` is above
    0."""

    rule: Literal["fixed", "every", "ema"] = "fixed"
    """`fixed`: policy@0. `every`: the policy that began the current span of `iterations`
    iterations. `ema`: a moving average of weights that takes `rate` of each new policy."""
    iterations: int = Field(1, ge=1)
    """Length of a span for `every`."""
    rate: float = Field(0.1, gt=0, lt=1)
    """Share of the new policy for `ema`."""

    def start(self, iteration: int) -> int:
        """Which iteration, counted from 1, the reference is the starting policy of."""
        if self.rule != "every":
            return 1
        return 1 + (iteration - 1) // self.iterations * self.iterations


class Logprobs(PassConfig):
    """How saved completions are scored again, and whether for the ratio's denominator too."""

    prox: bool = False
    """Score with the trainer's numerics too, under the policy that `optimize.prox_of` says, and
    take that as the ratio's denominator. Where [optimize] or truncated sampling needs it, it is
    done in any case, in the precision of [optimize] unless one is set here."""


class Prompt(TemplateConfig):
    """How rows become token ids, and how long a prompt may be."""

    reserve_tokens: int | None = Field(None, ge=0)
    """Tokens of the model's context that are kept for the completion. None:
    `generate.sampling.max_tokens`."""


class Generate(GenerateConfig):
    """Who answers, how often, and how it is sampled."""

    seed: int | None = Field(None, ge=0)
    """The section's own. None: the run's."""


class Optimize(OptimizeConfig):
    """How the policy learns, and from how many iterations' rollouts."""

    seed: int | None = Field(None, ge=0)
    """The section's own. None: the run's."""
    replay: Runtime[int] = Field(0, ge=0)
    """Train on the rollouts of up to this many earlier iterations besides the current ones, each
    row with its own old logprobs. `max_staleness` must be at least as large."""


class Evaluate(ScoreConfig):
    """When and how the policy is measured on the held-out rows."""

    every: Runtime[int] = Field(0, ge=0)
    """Also after every n-th iteration; 0: before the first and after the last only. A night leaves
    it out: it measures the policy in use and what its last iteration makes."""
    generate: dict[str, Any] = Field(default_factory=dict)
    """Keys of [generate] with other values for evaluation, e.g. `{ samples_per_prompt = 1, sampling
    = { temperature = 0.0 } }`. Another `engine` begins with no options of [generate]'s."""

    def check(self, samples: int, scores: list[str]) -> None:
        """ValueError unless what is asked for is among the `scores`, and needs no more than
        `samples` of a prompt."""
        if self.score not in scores:
            raise ValueError(
                f"evaluate.score must be one of {', '.join(scores)}, got {self.score!r}"
            )
        most = max(self.k, default=0)
        if most > samples:
            raise ValueError(
                f"evaluate.k asks for {most} samples, evaluate.generate.samples_per_prompt is "
                f"{samples}"
            )


Pool = Annotated[str, Field(min_length=1, pattern=r"^[^/%&<>\"' ]+$")]


class Placement(Config):
    """Where each stage runs. A stage that is not named runs as a child process of the flow, with
    the flow's interpreter."""

    generate: Pool | None = None
    """Prefect work pool whose workers sample, e.g. `generate = "gpu-pool"`. It holds a deployment
    `stage/gpu-pool` (`quiver deploy` makes it), and its hosts see the store under the same absolute
    path."""
    reward: Pool | None = None
    """Work pool that scores rollouts."""
    logprobs: Pool | None = None
    """Work pool that scores completions again."""
    optimize: Pool | None = None
    """Work pool that trains."""
    prompt: Pool | None = None
    """Work pool that renders prompts; its hosts see the source."""
    evaluate: Pool | None = None
    """Work pool of the estimators; held-out rows are sampled and scored where `generate` and
    `reward` say."""
    policy: Pool | None = None
    """Work pool that imports the base model; its hosts see the model."""
    average: Pool | None = None
    """Work pool that averages weights for a reference that follows the policy."""
    fan_out: int | None = Field(default=None, ge=1)
    """How many workers of its pool do a generate, reward or logprobs stage together. None: as many
    as are online when it starts."""
    wait_seconds: float = Field(default=600, gt=0)
    """How long a stage waits for a worker of its pool where none is online."""
    python: dict[StageName, str] = Field(default_factory=dict)
    """Interpreter by stage, e.g. `generate = "path/to/other/bin/python"`: vLLM may live in an
    environment of its own, in which Quiver is installed too. In a pool: on the worker's host."""
    timeout_seconds: dict[StageName, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Wall-clock limit by stage, in seconds; a stage beyond it is ended, and its finished shards
    are kept."""
    retries: int = Field(default=2, ge=0)
    """How often a stage is tried again when a server failed it, or when memory, a device or its
    process was lost. Each attempt goes on at the first unfinished shard. Any other error is told at
    once."""
    retry_seconds: float = Field(default=10, gt=0)
    """Pause before the first retry; three times as long before each further one."""
    slots: int = Field(default=0, ge=0)
    """On a host without GPU: how many of generate, reward, logprobs and optimize run at once, those
    of other flows included. 0: any number. Where there are GPUs, each has one slot."""
    devices: Annotated[int, Field(ge=1)] | Literal["all"] | None = None
    """How many GPUs of one machine a generate, logprobs or reward stage may use, with no server:
    it runs as so many processes that share its shards, each on devices of its own. "all": every one
    that CUDA_VISIBLE_DEVICES names, or else that there is. A process takes what one copy of the
    model needs (tensor_parallel_size and the like), and there are never more processes than shards.
    None: one process. Without a GPU a number is how many processes share the cores, and "all" is
    `slots`, or one."""
    resident_engine: bool = False
    """Keep the engine that samples, in its process, from one call to the next: it sleeps while
    other stages have the device, and takes the next policy's weights. At any doubt a fresh one is
    started. For `vllm` on a GPU, and for engines of your own that can sleep; not in a pool. Several
    processes that share the shards (`devices`) have fresh engines all the same."""
    limits: dict[StageName, str] = Field(default_factory=dict)
    """By stage: a global concurrency limit of the Prefect server of which the stage holds a slot,
    e.g. `optimize = "gpus"` after `prefect gcl create gpus --limit 1`."""

    @property
    def pools(self) -> dict[str, str]:
        """Work pool by stage, of those that run in one."""
        return {
            stage: getattr(self, stage) for stage in get_args(StageName) if getattr(self, stage)
        }


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`base` with the keys of `over` put over it, section by section."""
    merged = {**base, **over}
    for key, section in over.items():
        if isinstance(base.get(key), dict) and isinstance(section, dict):
            merged[key] = merge(base[key], section)
    return merged


def put_setting(section: dict[str, Any], setting: str) -> None:
    """Put `KEY=VALUE` into the sections of a recipe. TOML reads the value; JSON does where TOML has
    none (null); else it is the text itself."""
    key, equals, text = setting.partition("=")
    if not equals or not key:
        raise ConfigError(
            f"--set {printable(setting)}",
            "expected KEY=VALUE",
            next="write it like --set optimize.learning_rate=1e-6",
        )
    *section_names, field = key.strip().split(".")
    for name in section_names:
        section = section.setdefault(name, {})
        if not isinstance(section, dict):
            raise ConfigError(
                f"--set {printable(key)}",
                f"{name} is a value, not a section",
                next="correct the key",
            )
    try:
        values = tomllib.loads(f"v = {text}")
        if len(values) > 1:
            raise ValueError("a line of its own would be left out")
        section[field] = values["v"]
    except (ValueError, RecursionError):
        try:
            section[field] = json.loads(text)
        except (ValueError, RecursionError):
            section[field] = text
