"""Recipe sections that extend a stage's config, or belong to no stage.

Look here for the meaning of a key. The sections say which rows are read, which policy is the
reference of the KL term, and which place each stage has. The functions at the end merge the keys of
one section into another, and put `--set` values over both.

Not of the spine: each key is documented below its field, and `quiver keys` lists them.
"""

from __future__ import annotations

import json
import re
import tomllib
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field

from quiver.schemas.errors import ConfigError, printable
from quiver.schemas.plain import flatten
from quiver.schemas.refs import NAME
from quiver.stages import CHAIN
from quiver.stages.core.config import Config, Runtime, parse
from quiver.stages.evaluate.config import Config as EvaluateConfig
from quiver.stages.generate.config import Config as GenerateConfig
from quiver.stages.logprobs.config import Config as LogprobsConfig
from quiver.stages.logprobs.config import PassConfig
from quiver.stages.optimize.config import Config as OptimizeConfig
from quiver.stages.prompt.config import INPUTS, SourceConfig, TemplateConfig

NIGHT = "{night}"
"""Placeholder in [data] that a nightly run replaces by the night's name."""
SIDE_RUNS = (".eval", ".ref")
"""Suffixes of the runs that hold versions no iteration trains on: evaluations and the moving
average."""


def _free_name(run: str) -> str:
    for ending in SIDE_RUNS:
        if run.endswith(ending):
            raise ValueError(
                f"must not end in {ending}: Quiver gives such names to a run's side runs"
            )
    if ".." in f"{run}.":
        raise ValueError("must not have two dots in a row, or end in a dot")
    return run


RunName = Annotated[
    str, Field(pattern=rf"^{NAME.pattern}$", max_length=58), AfterValidator(_free_name)
]
"""Name of a run in a recipe."""
StageName = Literal[("policy", "average", *CHAIN)]


class Refill(Config):
    """Sample further rounds of `data.limit` rows in an iteration until enough groups have contrast,
    by the same policy. All its rounds are learned from together.

    This is the dynamic sampling of DAPO. The next iteration starts after the last row that was
    used. Groups without contrast are left out of the loss, unless `optimize.drop_zero_variance =
    false`.
    """

    groups: int = Field(ge=1)
    """Number of groups with contrast (scored rewards that are not all equal) that is enough."""
    max_rounds: int = Field(4, ge=1)
    """Most rounds of `data.limit` prompts in an iteration, including the first."""


class Data(SourceConfig):
    """The training rows, and how the held-out rows differ from them."""

    refill: Refill | None = None
    """Sample further prompts until enough groups have contrast. Default: one round per iteration.
    """
    held_out: dict[str, Any] | None = None
    """Keys of [data] with other values for evaluation, e.g. `{ split = "test", limit = 200 }`.
    Default: no evaluation. It must name other rows: another source, split, name or arguments. If it
    names messages, prompt or prompt_ids, that one alone counts."""

    def for_evaluation(self) -> SourceConfig:
        """Return the held-out source: [data] with the keys of [data.held_out] put over it.

        It has no limit unless [data.held_out] sets one. An input column that it names replaces the
        one of [data], also one of another kind.
        """
        own = self.held_out or {}
        inputs = INPUTS if any(own.get(name) for name in INPUTS) else ()
        train = self.model_dump(
            exclude={"curriculum", "held_out", "limit", "refill", "source_sha256", *inputs}
        )
        return parse(SourceConfig, {**train, **own}, "data.held_out", is_section=True)

    def require_held_out(self) -> None:
        """Raise ConfigError if there are no held-out rows, or only a night can fill them in."""
        if self.held_out is None:
            raise ConfigError(
                "data.held_out",
                "the recipe names no held-out rows",
                next="add [data.held_out] to the recipe",
            )
        self.require_filled_in()

    def require_filled_in(self) -> None:
        """Raise ConfigError if a text holds `{night}`, which only a nightly run replaces."""
        leaves = flatten(self.model_dump(mode="json", exclude_unset=True), "data")
        keys = [key for key, leaf in leaves.items() if NIGHT in f"{key} {leaf}"]
        if keys:
            raise ConfigError(
                printable(keys[0]),
                f"holds {NIGHT}, which only a night fills in: elsewhere, set a value with --set",
                next="quiver nightly RECIPE",
            )

    def check_refill(self, *, has_groups: bool) -> None:
        """Raise ValueError if `refill` can never reach its number of groups.

        `has_groups`: True if the algorithm compares the completions of one prompt.
        """
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
    """Work of a run that was started by a schedule, or by `--on`. With [promotion], such runs are
    nights."""

    each: Literal["go on", "again", "same"] = "go on"
    """`go on`: `iterations` more, counted from the last finished one. `again`: a new run from the
    base, named by date and time (UTC), with the next seed. `same`: the recipe unchanged, so from
    the second time on there is no work left."""


class Reference(Config):
    """The policy that the KL term compares with. It is used only if `optimize.kl_coef` is above
    0."""

    policy: str | None = None
    """The first reference: any policy of the store with the same tokens, `run/policy@version`, by
    number or tag; without `run/`, of this run. Default: policy@0, or for a rule that moves it the
    policy that the training starts from."""
    rule: Literal["fixed", "every", "ema"] = "fixed"
    """`fixed`: the first reference stays. `every` and `ema`: after each `iterations` iterations the
    weights become rate · policy + (1 − rate) · reference. They differ in the default of `rate`."""
    iterations: int = Field(1, ge=1)
    """Iterations between two changes of the reference."""
    rate: float | None = Field(None, gt=0, le=1)
    """Share of the policy in the new reference. Default: 1 for `every`, which takes the policy
    itself; 0.1 for `ema`, a moving average."""

    @property
    def weight_of_newest(self) -> float:
        """Weight of the newest policy in each new reference; 0 if the reference stays."""
        if self.rule == "fixed":
            return 0.0
        return self.rate or {"every": 1.0, "ema": 0.1}[self.rule]


class Logprobs(PassConfig):
    """Logprobs of saved completions: for the KL term, and for the denominator of the ratio."""

    prox: bool = False
    """Also compute logprobs with the trainer's numerics, under the policy that `optimize.prox_of`
    selects, and use them as the ratio's denominator. Always done if [optimize] or truncated
    sampling needs it, in the precision of [optimize] unless this section sets one."""

    def for_role(self, role: str) -> LogprobsConfig:
        """Return the logprobs stage's config, for role `ref` or `prox`."""
        return LogprobsConfig(role=role, **self.model_dump(exclude={"prox"}))


class Prompt(TemplateConfig):
    """Rendering of rows to token ids, and the length limit of prompts."""

    reserve_tokens: int | None = Field(None, ge=0)
    """Tokens of the model's context kept free for the completion. Default:
    `generate.sampling.max_tokens`."""


class Generate(GenerateConfig):
    """Engine, number of samples per prompt, and sampling."""

    seed: int | None = Field(None, ge=0)
    """Seed of this section. Default: the run's."""


class Optimize(OptimizeConfig):
    """Algorithm and optimizer, and the number of iterations whose rollouts are used."""

    seed: int | None = Field(None, ge=0)
    """Seed of this section. Default: the run's."""
    replay: Runtime[int] = Field(0, ge=0)
    """Train on the rollouts of up to this many earlier iterations as well, each row with its own
    old logprobs. `max_staleness` must be at least as large."""


class Evaluate(EvaluateConfig):
    """Measurement of the policy on the held-out rows."""

    every: Runtime[int] = Field(0, ge=0)
    """Also measure after every n-th iteration; 0: only before the first and after the last. A night
    ignores it: it measures the policy in use and the policy of its last iteration."""
    generate: dict[str, Any] = Field(default_factory=dict)
    """Keys of [generate] with other values for evaluation, e.g. `{ samples_per_prompt = 1, sampling
    = { temperature = 0.0 } }`. Another `engine` starts without the options of [generate]."""

    def check(self, samples: int, scores: list[str]) -> None:
        """Raise ValueError if `score` is not one of `scores`, or `k` needs more than `samples` per
        prompt."""
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


class Sweep(Config):
    """The settings that `quiver sweep` compares."""

    rollouts: str | Annotated[list[str], Field(min_length=1)] | None = None
    """Saved rollouts, `run/rollouts@version`, that every cell trains on. Default: each cell is a
    whole run."""
    over: dict[str, Annotated[list[Any], Field(min_length=1)]] = Field(default_factory=dict)
    """Values by key of the recipe, e.g. `"optimize.learning_rate" = [1e-6, 3e-6]`; each combination
    is a cell. A table is put over the recipe's, but for its `name`, which the result shows (the
    `name` of [data] is a key of its own)."""
    num_seeds: int = Field(1, ge=1)
    """Each cell this many times, with `seed`, `seed` + 1, …; each time is a row of the result."""


Pool = Annotated[str, Field(min_length=1, pattern=r"^[^/%&<>\"' ]+$")]


class Placement(Config):
    """Place and limits of each stage. A stage without a pool runs as a child process of the flow,
    with the flow's interpreter."""

    generate: Pool | None = None
    """Prefect work pool whose workers sample, e.g. `generate = "gpu-pool"`. It needs a deployment
    `stage/gpu-pool` (`quiver deploy` makes it), and its hosts must see the store under the same
    absolute path."""
    reward: Pool | None = None
    """Work pool that scores rollouts."""
    logprobs: Pool | None = None
    """Work pool of the logprobs of saved completions."""
    optimize: Pool | None = None
    """Work pool that trains."""
    prompt: Pool | None = None
    """Work pool that renders prompts; its hosts must see the source."""
    evaluate: Pool | None = None
    """Work pool of the estimators; held-out rows are sampled and scored in the pools of `generate`
    and `reward`."""
    policy: Pool | None = None
    """Work pool that imports the base model; its hosts must see the model."""
    average: Pool | None = None
    """Work pool that averages weights for a reference that follows the policy."""
    fan_out: int | None = Field(default=None, ge=1)
    """Number of workers that share one generate, reward or logprobs stage. Default: as many as are
    online when it starts."""
    wait_seconds: float = Field(default=600, gt=0)
    """Seconds that a stage waits for a worker if its pool has none online."""
    python: dict[StageName, str] = Field(default_factory=dict)
    """Interpreter by stage, e.g. `generate = "path/to/other/bin/python"`: vLLM may live in an
    environment of its own, in which Quiver is installed too. In a pool: a path on the worker's
    host."""
    timeout_seconds: dict[StageName, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """Wall-clock limit by stage, in seconds; a stage beyond it is ended, and its finished shards
    are kept."""
    retries: int = Field(default=2, ge=0)
    """Number of retries of a stage that lost a server, memory, a device or its process. Each
    attempt continues at the first unfinished shard. Other errors are reported at once."""
    retry_seconds: float = Field(default=10, gt=0)
    """Pause before the first retry, in seconds; each further pause is three times as long."""
    slots: int = Field(default=0, ge=0)
    """On a host without GPU: how many of generate, reward, logprobs and optimize run at once,
    including other flows. 0: any number. On a host with GPUs, each GPU has one slot."""
    devices: Annotated[int, Field(ge=1)] | Literal["all"] | None = None
    """Number of GPUs of one machine that a generate, logprobs or reward stage may use, without a
    server. It runs as several processes that share its shards, each with devices of its own. "all":
    the GPUs in CUDA_VISIBLE_DEVICES, else all of the machine. Each process takes the GPUs of one
    model copy (tensor_parallel_size and the like); there are never more processes than shards.
    Default: one process. Without a GPU, a number is how many processes share the cores, and "all"
    means `slots`, or one."""
    resident_engine: bool | None = None
    """Keep the sampling engine and its process between calls: it sleeps while other stages use the
    device, and then loads the next policy's weights. In any doubt a fresh one is started. For
    `vllm` on a GPU, and for your own engines that can sleep; not in a pool. Several processes that
    share the shards (`devices`) always start fresh engines. Default: true on a host with one GPU,
    unless vLLM runs a reward model there."""
    limits: dict[StageName, str] = Field(default_factory=dict)
    """Global concurrency limit of the Prefect server by stage; the stage holds one slot of it, e.g.
    `optimize = "gpus"` after `prefect gcl create gpus --limit 1`."""

    @property
    def pools(self) -> dict[str, str]:
        """Work pool by stage, for the stages that run in a pool."""
        return {
            stage: getattr(self, stage) for stage in get_args(StageName) if getattr(self, stage)
        }


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Return `base` with the keys of `over` put over it, section by section."""
    merged = {**base, **over}
    for key, section in over.items():
        if isinstance(base.get(key), dict) and isinstance(section, dict):
            merged[key] = merge(base[key], section)
    return merged


def put_setting(section: dict[str, Any], setting: str) -> None:
    """Put `KEY=VALUE` into the sections of a recipe.

    The value is read as TOML, else as JSON (for null), else as plain text. Raises ConfigError if
    the setting has no key or no "=", or if the key lies below a value.
    """
    key, equals, text = setting.partition("=")
    if not equals or not key:
        shown = re.match(r"[\w.]*", setting)[0]  # what follows the key may be a secret
        raise ConfigError(
            f"--set {printable(shown)}",
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
