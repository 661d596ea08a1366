"""The recipe: one TOML file, one typed object, for the shell, Prefect's form and deployments.

Look here for rules between sections, and for how a section becomes a stage's config. The section of
a stage has the keys of its config, so a key is documented beside the code that reads it. Keys that
only a flow reads, such as those of [reference] and [placement], are in `sections`. Relative paths
start at the folder in which the command runs.

    recipe = load("deployments/recipes/demo.toml", ["optimize.learning_rate=1e-6", "iterations=2"])
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, PrivateAttr, ValidationInfo, model_validator

from quiver import flows
from quiver.schemas.errors import ConfigError
from quiver.schemas.prompts import MEDIA
from quiver.schemas.refs import check_name
from quiver.schemas.refs import parse as parse_ref
from quiver.stages.core.config import Config, parse, read_recipe
from quiver.stages.core.store import Store
from quiver.stages.evaluate.config import Config as EvaluateConfig
from quiver.stages.generate.stage import Config as GenerateConfig
from quiver.stages.model import checkpoints
from quiver.stages.model.checkpoints import PolicyConfig
from quiver.stages.model.from_function import is_function
from quiver.stages.optimize import stage as optimize
from quiver.stages.optimize.algorithms import ALGORITHMS
from quiver.stages.optimize.stage import Config as OptimizeConfig
from quiver.stages.prompt import stage as prompt
from quiver.stages.prompt.config import INPUTS, SourceConfig
from quiver.stages.prompt.config import Config as PromptConfig
from quiver.stages.reward import scoring
from quiver.stages.reward.stage import Config as RewardConfig

from .promotion import Promotion
from .retention import Retention
from .sections import (
    NIGHT,
    Data,
    Evaluate,
    Generate,
    Logprobs,
    Optimize,
    Placement,
    Prompt,
    Reference,
    RunName,
    Schedule,
    Sweep,
    merge,
    put_setting,
)

_UNBIASED_SAMPLING = {"temperature", "max_tokens", "stop_token_ids", "stop", "ignore_eos"}
"""Sampling options that leave the sampled distribution the policy's own. Every forward pass divides
the logits by the row's temperature, and the other options only end a completion."""
# A key of [data] in an error's text, which may stand for a key of [data.held_out].
_KEY_OF_DATA = rf"(?<![\w./])data\.(?=({'|'.join(SourceConfig.model_fields)})\b)"


class Recipe(Config):
    """Prompts → rollouts → rewards → the next policy, `iterations` times."""

    run: RunName
    """Name of the run: the folder of its versions in the store."""
    store: str = "store"
    """Folder of the store, or URL of a bucket: `s3://bucket/folder`, `gs://…`, `az://…`."""
    seed: int = Field(0, ge=0)
    """Seed of every random choice; a section's own `seed` replaces it there."""
    iterations: int = Field(1, ge=1)
    """Number of times the policy is improved."""
    overlap: int = Field(0, ge=0, le=1)
    """1: while an iteration optimizes, the next one samples and scores with the policy that the
    former starts from. From the second iteration on, rollouts are then one policy old, which their
    saved logprobs correct. The audit judges them only if `logprobs.prox` is set. 0: one after
    another; `quiver nightly` always does this."""
    report_url: str | None = Field(None, pattern=r"^https?://")
    """URL under which the store's folder is served, so that Prefect's pages can link to the run's
    report. Default: a link for this host."""
    policy: PolicyConfig
    """The base model: `policy@0`."""
    data: Data
    """Source of the prompts."""
    prompt: Prompt = Prompt()
    """Rendering of rows to token ids."""
    generate: Generate = Generate()
    """Engine and sampling."""
    reward: RewardConfig
    """Reward functions, models and servers, and their weights."""
    reference: Reference = Reference()
    """The policy that the KL term compares with."""
    logprobs: Logprobs = Logprobs()
    """Precision and batches for logprobs of saved completions."""
    optimize: Optimize = Optimize()
    """Algorithm and optimizer."""
    evaluate: Evaluate = Evaluate()
    """Held-out measurement."""
    promotion: Promotion = Promotion()
    """When a nightly run's policy becomes the one in use."""
    schedule: Schedule = Schedule()
    """Work of each run that a schedule starts."""
    retention: Retention = Retention()
    """Which of the run's versions and files are kept."""
    sweep: Sweep = Sweep()
    """Settings to compare by `quiver sweep`; nothing else reads it."""
    placement: Placement = Placement()
    """Work pools, interpreters, time limits, retries, slots, and the resident engine."""
    _looked_up: dict[str, Config] = PrivateAttr(default_factory=dict)
    """The sections as `resolved` left them. The same objects are still there if nobody replaced
    them: `model_copy` keeps what it does not update."""
    _columns: dict[str, list[str]] = PrivateAttr(default_factory=dict)
    """See `columns`."""

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: Any, handler: Any) -> dict[str, Any]:
        # Prefect's form for a flow is made from this; without forms nobody reads it, and it is slow
        if not flows.has_forms:
            return {"type": "object"}
        return super().__get_pydantic_json_schema__(core_schema, handler)

    @model_validator(mode="after")
    def _can_train(self) -> Recipe:
        """Check [generate] and [optimize] against each other."""
        sampling = self.generate.sampling
        if sampling.temperature == 0:
            raise ValueError(
                "generate.sampling.temperature must be > 0: greedy rows have no probability to "
                "train on"
            )
        lora = self.optimize.lora
        if lora and lora.save == "adapter" and 0 < self.reference.weight_of_newest < 1:
            raise ValueError(
                f"reference.rule {self.reference.rule!r} averages whole weights, and "
                "optimize.lora.save = 'adapter' saves none: set it to 'merged'"
            )
        changed = [
            name
            for name in sampling.model_dump(exclude_defaults=True)
            if name not in _UNBIASED_SAMPLING
        ]
        if changed and not self.optimize.allow_biased_sampling:
            raise ValueError(
                f"generate.sampling.{changed[0]} makes the sampled distribution differ from the "
                "policy's: leave it out, or set optimize.allow_biased_sampling = true"
            )
        staleness = {"optimize.replay": self.optimize.replay, "overlap": self.overlap}
        if sum(staleness.values()) > self.optimize.max_staleness:
            settings = [f"{name} = {policies}" for name, policies in staleness.items() if policies]
            raise ValueError(
                f"optimize.max_staleness must be >= {' + '.join(settings)}, got "
                f"{self.optimize.max_staleness}: rollouts may come from a policy that is so many "
                "iterations older"
            )
        least = self.optimize.least_samples
        # A user's own algorithm may compare groups: only its file, which is not read here, knows.
        is_own = self.optimize.algorithm not in ALGORITHMS
        self.data.check_refill(has_groups=least > 1 or is_own)
        if self.generate.samples_per_prompt < least:
            raise ValueError(
                f"generate.samples_per_prompt must be >= {least} for algorithm "
                f"{self.optimize.algorithm!r}, got {self.generate.samples_per_prompt}: raise it, "
                "or use 'ppo', which needs no group"
            )
        return self

    @model_validator(mode="after")
    def _can_evaluate(self, info: ValidationInfo) -> Recipe:
        """Check [data.held_out], [evaluate] and [promotion] against each other.

        `load(measures=False)` says so in the validation context: [evaluate] is not checked against
        [reward] then, because nothing is measured.
        """
        if self.data.held_out is None:
            return self
        keys = {"source", "split", "name", "arguments"}
        rows = self.data.model_dump(include=keys)
        if self.data.for_evaluation().model_dump(include=keys) == rows:
            raise ValueError(
                "data.held_out has the rows of [data]: give it another source, split, name or "
                "arguments"
            )
        samples = self.generate_config(0, evaluation=True).samples_per_prompt
        if info.context is None or info.context["measures"]:
            self.evaluate.check(samples, ["reward", *self.reward.part_names])
        self.promotion.check(self.evaluate.k)
        return self

    @property
    def online(self) -> bool:
        """True if a hub may be reached: only if the recipe names a hub model or dataset."""
        models = [self.policy.model, *(scorer.model for scorer in self.reward.models)]
        for function in self.reward.functions:
            if function.use == "similarity":
                models.append(str(function.arguments.get("model", ".")))
        critic = self.optimize.critic_from
        if critic is not None and "/policy@" not in critic:  # else a version of a store
            models.append(critic)
        for model in models:
            is_local = Path(os.path.expanduser(model)).exists() or model.startswith("package:")
            if not is_local and not is_function(model):
                return True
        sources = (self.data.source, (self.data.held_out or {}).get("source", ""))
        return any(source.startswith("datasets:") for source in sources)

    @classmethod
    def load(
        cls, path: str | Path, settings: Sequence[str] = (), *, measures: bool = True
    ) -> Recipe:
        """Read the recipe in a TOML file, with `KEY=VALUE` settings put over it.

        If `measures` is false, [evaluate] need not fit [reward]. Raises ConfigError with the file,
        line or key.
        """
        sections = read_recipe(Path(path))
        for setting in settings:
            put_setting(sections, setting)
        return parse(cls, sections, f"recipe {path}", context={"measures": measures})

    @property
    def media(self) -> set[str]:
        """Modalities of what prompts or environments may show."""
        turns = self.generate.turns
        return {*self.data.media, *(turns.most_media if turns else ())}

    def resolved(self) -> Recipe:
        """Return the recipe with everything it names outside the store looked up.

        This fills in the algorithm's defaults, the base model's hash, and each source's hash and
        input column. A run thus looks each up once, before anything is made. A resolved recipe is
        returned unchanged. Raises ConfigError.
        """
        names = ("data", "policy", "optimize")
        if all(self._looked_up.get(name) is getattr(self, name) for name in names):
            return self
        algorithm = optimize.resolve(self.optimize_config())
        source, columns = _source_fields(self.prompt_config(1), "data")
        with_held_out = self.held_out_resolved()
        resolved = self.model_copy(
            update={
                "data": with_held_out.data.model_copy(update=source),
                "policy": checkpoints.resolve(self.policy),
                "optimize": self.optimize.model_copy(update=dict(algorithm)),
            }
        )
        resolved._looked_up = {name: getattr(resolved, name) for name in names}
        resolved._columns = {**with_held_out._columns, "data": columns}
        return resolved

    @property
    def columns(self) -> dict[str, list[str]]:
        """Column names of each source of a resolved recipe, by section (data, data.held_out)."""
        return self._columns

    @property
    def offered_columns(self) -> tuple[str, ...]:
        """Names that reward functions may read besides the source's columns, for episodes and
        pictures."""
        of_turns = scoring.OF_TURNS if self.generate.turns else ()
        return (*of_turns, *(MEDIA[modality] for modality in self.data.media))

    def kl_reference(self) -> str | None:
        """Return the policy that [reference] names, with its number; None if it names none.

        It may have expired, and the run's own policy@0 may not exist yet. Raises ConfigError,
        LineageError.
        """
        name = self.reference.policy
        if name is None:
            return None
        ref = parse_ref(name, self.run)
        if ref.kind != "policy" or (ref.run, ref.version) == (self.run, "latest"):
            raise ConfigError(
                f"reference.policy {ref}",
                "expected a policy, and not the run's latest, which each iteration changes",
                next=f"quiver ls {ref.run}",
            )
        if (ref.run, ref.version) != (self.run, 0):
            ref = Store(self.store, create=False).with_expired().resolve(ref)
        return str(ref)

    def for_night(self, name: str) -> Recipe:
        """Return the recipe with `{night}` in [data] replaced by the night's name.

        Raises ConfigError if the name holds other characters than letters, digits, dots and dashes.
        """
        section = self.data.model_dump_json(exclude_unset=True).replace(
            NIGHT, check_name(name, "night")
        )
        filled_in = parse(Data, json.loads(section), "data", is_section=True)
        return self.model_copy(update={"data": filled_in})

    def held_out_resolved(self) -> Recipe:
        """Return the recipe with only the held-out source looked up, which is all that a
        measurement reads."""
        if self.data.held_out is None:
            return self
        source, columns = _source_fields(self.prompt_config(0, evaluation=True), "data.held_out")
        held_out = {**self.data.held_out, **source}
        section = self.data.model_copy(update={"held_out": held_out})
        recipe = self.model_copy(update={"data": section})
        recipe._columns = {"data.held_out": columns}
        return recipe

    # Prefect's form sends every default as if it had been typed in, so "set by the user" cannot be
    # told from "default". Sections are therefore dumped with `exclude_defaults`, and a field that
    # inherits another field's value has the default None.

    def prompt_config(self, round: int, *, evaluation: bool = False) -> PromptConfig:
        """Return the prompt stage's config for a round, counted from 1, or for evaluation.

        For the stage an evaluation is round 0. It uses the same rows each time.
        """
        source = self.data.for_evaluation() if evaluation else self.data
        generate = self.generate_config(0, evaluation=evaluation)  # its round does not matter here
        fields = {
            "seed": self.seed,
            "round": 0 if evaluation else round,
            "reserve_tokens": generate.sampling.max_tokens,
            # only the fields that decide how prompts are rendered
            "turns": generate.turns and generate.turns.alone(),
            **self.prompt.model_dump(exclude_defaults=True),
        }
        rows = source.model_dump(exclude={"held_out", "refill"})
        return parse(PromptConfig, {**rows, **fields}, "prompt")

    def generate_config(self, round: int, *, evaluation: bool = False) -> GenerateConfig:
        """Return the generate stage's config for a round, counted from 1, or for evaluation.

        For the stage an evaluation is round 0. It uses the same seeds each time, so that the
        measurements are paired.
        """
        section = self.generate.model_dump(exclude_defaults=True)
        if evaluation:
            over = self.evaluate.generate
            if over.get("engine", self.generate.engine) != self.generate.engine:
                section.pop("options", None)  # The options belong to another engine.
            section = merge(section, over)
        fields = {"seed": self.seed, "round": 0 if evaluation else round, **section}
        return parse(
            GenerateConfig,
            fields,
            "evaluate.generate" if evaluation else "generate",
            is_section=True,
        )

    def is_measured(self, iteration: int) -> bool:
        """True if the policy of this iteration is measured on the held-out rows."""
        if self.data.held_out is None:
            return False
        every = self.evaluate.every
        return iteration == self.iterations or bool(every and iteration % every == 0)

    def optimize_config(self) -> OptimizeConfig:
        """Return the optimize stage's config."""
        section = self.optimize.model_dump(exclude={"replay"}, exclude_defaults=True)
        if self.data.refill is not None:
            section = {"drop_zero_variance": True, **section}
        return OptimizeConfig(**{"seed": self.seed, **section})

    def evaluate_config(self) -> EvaluateConfig:
        """Return the evaluate stage's config."""
        return EvaluateConfig(**self.evaluate.model_dump(exclude={"every", "generate"}))


def _source_fields(config: PromptConfig, section: str) -> tuple[dict[str, Any], list[str]]:
    """Return the fields of a source that reading it fills in, and its columns.

    Raises ConfigError that names the keys of `section`.
    """
    try:
        resolved, columns = prompt.resolve_with_columns(config)
    except ConfigError as error:
        for field in ("object", "message", "next"):
            text = re.sub(_KEY_OF_DATA, f"{section}.", getattr(error, field))
            setattr(error, field, text)
        raise
    # Functions get the columns of media under their own names instead.
    columns = [column for column in columns if column not in config.media.values()]
    return {name: getattr(resolved, name) for name in ("source_sha256", *INPUTS)}, columns


load = Recipe.load
