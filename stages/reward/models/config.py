"""What a recipe says of a reward model under `[[reward.models]]`, and what can be told of the model
without loading it.

Refused before any generation: a directory that is not whole, pickled weights, code that a model
brings, a language model in a classifier's place (its head would be random), several labels and none
chosen.

    check(ModelConfig(model="path/to/reward-model"))
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field, field_validator, model_validator

from quiver.schemas.errors import ConfigError, printable
from quiver.schemas.manifest import Model, digest
from quiver.stages.common.chat.template_file import read_template
from quiver.stages.common.config import Runtime
from quiver.stages.common.models import checkpoints, vllm_env
from quiver.stages.common.models.folder import parse_object
from quiver.stages.reward.scoring import ScorerConfig

_SET_BY_FIELDS = {
    "model",
    "runner",
    "dtype",
    "max_model_len",
    "seed",
    "hf_overrides",
    "trust_remote_code",
    "pooler_config",
}


class ModelConfig(ScorerConfig):
    """One reward model."""

    model: str = Field(min_length=1)
    """A model directory, `package:NAME/FOLDER` (a directory inside an installed package), or a hub
    id. Safetensors only."""
    kind: Literal["classifier", "token"] = "classifier"
    """`classifier`: a sequence classifier's logit. `token`: a language model that judges, and how
    probable it finds `token`."""
    label: str | int | None = None
    """Which of a classifier's labels is the reward, by name or number. None: the only one."""
    activation: Literal["none", "sigmoid", "softmax"] = "none"
    """Of a classifier's logits; softmax is over its labels."""
    question: str = "Is the answer above correct? Reply with Yes or No."
    """What a judge is asked: one more user message behind the conversation. Empty: the template
    file asks, or nobody does."""
    token: str = Field(default="Yes", min_length=1)
    """The word whose probability as the judge's next token is the reward."""
    against: str | None = Field(default=None, min_length=1)
    """The other word, such as No: probability among the two. None: over the whole vocabulary."""
    template: str | None = None
    """File with a jinja chat template. None: the model's own. An encoder's writes the token that
    ends an input, such as [SEP]."""
    template_arguments: dict[str, Any] = Field(default_factory=dict)
    """More variables for the template, such as date_string for one that would ask for today's
    date."""
    text_as: Literal["user"] | None = None
    """How prompts that are plain text are read: as one user message. None: they are an error."""
    prefill: str | None = None
    """What the policy was given to continue, as the beginning of each answer. None: what the
    prompts' manifest tells of each."""
    max_tokens: int | None = Field(default=None, ge=2)
    """Longest input; a longer one is that row's error. None: the model's context."""
    pooling: Literal["last", "last_not_pad"] | None = None
    """Which token's hidden state a classifier's logit is of. It must be said only where inputs end
    with the pad token: `last` as vLLM takes it, `last_not_pad` as transformers does (and models
    trained with its own forward pass need)."""
    engine: Literal["transformers", "vllm"] = "transformers"
    """Who runs it. On vLLM a judge needs `against`."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """What it computes in; auto: bfloat16 on a GPU, float32 on a CPU."""
    revision: str | None = None
    """Commit or tag of a hub id."""
    device: Runtime[Literal["auto", "cpu", "cuda"]] = "auto"
    """Where transformers runs it; auto: the GPU where there is one."""
    token_budget: Runtime[int | None] = Field(default=None, ge=1)
    """Tokens of one pass. None: 8192 on a GPU, 2048 on a CPU (vLLM: its own choice)."""
    template_seconds: Runtime[float] = Field(default=10.0, gt=0)
    """Longest time that the template may take for one row."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """More arguments of `vllm.LLM`, as vLLM names them."""

    @model_validator(mode="before")
    @classmethod
    def _name_of_folder(cls, section: Any) -> Any:
        if isinstance(section, dict) and isinstance(section.get("model"), str):
            folder = Path(section["model"]).name
            name = section.get("name") or re.sub(r"[^A-Za-z0-9_.-]", "-", folder)[-64:]
            return {**section, "name": name}
        return section

    @field_validator("engine_args")
    @classmethod
    def _not_set_by_fields(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        names = sorted(_SET_BY_FIELDS & arguments.keys())
        if names:
            raise ValueError(
                f"{', '.join(names)} cannot be set here: it follows from the model and its other "
                "fields"
            )
        return arguments

    @model_validator(mode="after")
    def _fits(self) -> ModelConfig:
        if self.kind == "token":
            foreign = ("label", "activation", "pooling", "extra")
        else:
            foreign = ("question", "token", "against")
        for name in foreign:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"{name} is no field of kind {self.kind!r}: leave it out, or choose the other "
                    "kind"
                )
        if self.engine_args and self.engine != "vllm":
            raise ValueError(f"engine_args are for engine 'vllm', got engine {self.engine!r}")
        if self.engine == "vllm" and self.kind == "token" and self.against is None:
            raise ValueError(
                'a judge on vLLM needs against, such as "No": set it, or engine = "transformers"'
            )
        return self

    @property
    def title(self) -> str:
        """What errors call it."""
        return f"reward model {printable(self.name)}"

    def key(self) -> dict[str, Any]:
        """The bytes decide, wherever they lie, once the fingerprint is there."""
        key = super().key()
        if self.fingerprint:
            for name in ("model", "revision", "template"):
                del key[name]
        return key


class ModelFolder(NamedTuple):
    """What can be told of a reward model without loading it."""

    folder: Path
    labels: list[str]
    """Of a classifier, in the order of its logits."""
    label: int
    limit: float
    """Most ids of an input."""
    pad: int | None
    template: str | None
    """Text of the file that replaces its own."""


def check(config: ModelConfig) -> ModelFolder:
    """What and where the model is. ConfigError or SecurityError unless it is whole and of its kind.
    Loads no torch."""
    folder = checkpoints.find_folder(config.model, config.revision, "reward.models.model")
    about = parse_object((folder / "config.json").read_bytes()) or {}
    architectures = about.get("architectures")
    names = [str(name) for name in architectures] if isinstance(architectures, list) else []
    is_classifier = any(name.endswith("ForSequenceClassification") for name in names)
    problem = ""
    if about.get("is_encoder_decoder"):
        problem = "is an encoder-decoder model; reward models are decoders or encoders"
    elif is_classifier != (config.kind == "classifier"):
        needed = "a language model" if is_classifier else "a sequence classifier"
        problem = (
            f"is {printable(', '.join(names)) or 'of no known architecture'}; kind {config.kind!r} "
            f"needs {needed}"
        )
    if problem:
        raise ConfigError(config.title, problem, next="name another model, or its kind")
    try:
        label_of = about.get("id2label") or {
            number: f"LABEL_{number}" for number in range(min(about.get("num_labels", 2), 10_000))
        }
        labels = [str(label_of[number]) for number in sorted(label_of, key=int)]
    except (TypeError, ValueError, KeyError) as error:
        problem = f"config.json: its labels cannot be told: {printable(error)}"
        raise ConfigError(config.title, problem, next="name another model") from None
    if config.engine == "vllm":
        vllm_env.find_build(config.title)
    template = read_template(config.template, f"{config.title}: template")
    return ModelFolder(
        folder,
        labels,
        _choose_label(config, labels) if is_classifier else 0,
        min(checkpoints.context_of(about) or math.inf, config.max_tokens or math.inf),
        {**about, **(about.get("text_config") or {})}.get("pad_token_id"),
        template,
    )


def _choose_label(config: ModelConfig, labels: list[str]) -> int:
    """The number of the label that is the reward. ConfigError."""
    if config.activation == "softmax" and len(labels) == 1:
        raise ConfigError(
            config.title,
            "softmax over one label is always 1",
            next='set activation = "sigmoid" or "none"',
        )
    label = 0 if config.label is None and len(labels) == 1 else config.label
    if label in labels:
        return labels.index(label)
    if isinstance(label, int) and 0 <= label < len(labels):
        return label
    problem = "label is not set"
    if label is not None:
        problem = f"it has no label {printable(repr(label))}"
    raise ConfigError(
        config.title,
        f"{problem}; its labels are {printable(', '.join(labels))}",
        next="set label to one of them",
    )


def model_entry(config: ModelConfig, *, remembered: bool = True) -> Model:
    """Its entry in the manifest, by hashes from memory unless they are to be computed. ConfigError,
    SecurityError: it is not there, or not whole."""
    model = check(config)
    role = f"reward:{config.name}"
    entry = checkpoints.folder_as_model(role, config.model, model.folder, remembered=remembered)
    if model.template is None:
        return entry
    return entry.model_copy(update={"template": digest(model.template)})


def fingerprint(entry: Model) -> str:
    """Hash of weights, tokenizer and template: another model scores anew."""
    return f"sha256:{digest([entry.weights, entry.tokenizer, entry.template])}"
