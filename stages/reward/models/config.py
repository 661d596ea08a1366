"""The section `[[reward.models]]` of a recipe, and the checks of a reward model that need no
loading.

Refused before any generation: an incomplete directory, pickled weights, code in a model, a language
model in place of a classifier (its head would be random), several labels without a choice.

    check(ModelConfig(model="path/to/reward-model"))
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field, field_validator, model_validator

from quiver.schemas.errors import ConfigError, printable
from quiver.schemas.manifest import ModelEntry, digest
from quiver.stages.core.config import Runtime
from quiver.stages.model import checkpoints, vllm_env
from quiver.stages.model.chat.template import read_template
from quiver.stages.model.folder import parse_object
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
    """`classifier`: a sequence classifier's logit. `token`: a language model as judge, and its
    probability of `token`."""
    label: str | int | None = None
    """Label of a classifier that is the reward, by name or number. Default: the only one."""
    activation: Literal["none", "sigmoid", "softmax"] = "none"
    """Activation over a classifier's logits; softmax is over its labels."""
    question: str = "Is the answer above correct? Reply with Yes or No."
    """Question to a judge: one more user message after the conversation. Empty: no message; the
    template file may ask instead."""
    token: str = Field(default="Yes", min_length=1)
    """Word whose probability as the judge's next token is the reward."""
    against: str | None = Field(default=None, min_length=1)
    """The other word, such as No: the probability is among the two. Default: over the whole
    vocabulary."""
    template: str | None = None
    """File with a jinja chat template. Default: the model's own. An encoder's template writes the
    token that ends an input, such as [SEP]."""
    template_arguments: dict[str, Any] = Field(default_factory=dict)
    """Further variables for the template, such as date_string for a template that would use today's
    date."""
    text_as: Literal["user"] | None = None
    """`user` reads prompts that are plain text as one user message. Default: they are an error."""
    prefill: str | None = None
    """Text that the policy had to continue, as the beginning of each answer. Default: from the
    prompts' manifest."""
    max_tokens: int | None = Field(default=None, ge=2)
    """Longest input in tokens; a longer one is that row's error. Default: the model's context."""
    pooling: Literal["last", "last_not_pad"] | None = None
    """Token whose hidden state gives a classifier's logit. Required only if inputs end with the pad
    token: `last` as in vLLM, `last_not_pad` as in transformers (and for models trained with its own
    forward pass)."""
    engine: Literal["transformers", "vllm"] = "transformers"
    """Library that runs the model. On vLLM a judge needs `against`."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type to compute in. auto: bfloat16 on a GPU, float32 on a CPU."""
    revision: str | None = None
    """Commit or tag of a hub id."""
    device: Runtime[Literal["auto", "cpu", "cuda"]] = "auto"
    """Device for transformers. auto: the GPU if there is one."""
    token_budget: Runtime[int | None] = Field(default=None, ge=1)
    """Tokens per forward pass. Default: 8192 on a GPU, 2048 on a CPU (vLLM: its own choice)."""
    template_seconds: Runtime[float] = Field(default=10.0, gt=0)
    """Longest time that the template may take for one row."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of `vllm.LLM`, named as in vLLM."""

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
                    f"{name} is not a field of kind {self.kind!r}: leave it out, or choose the "
                    "other kind"
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
        """Name of the model in errors."""
        return f"reward model {printable(self.name)}"

    def key(self) -> dict[str, Any]:
        """Leave out the model's location once the fingerprint is set: then its bytes decide."""
        key = super().key()
        if self.fingerprint:
            for name in ("model", "revision", "template"):
                del key[name]
        return key


class ModelFolder(NamedTuple):
    """Facts about a reward model that need no loading."""

    folder: Path
    labels: list[str]
    """Labels of a classifier, in the order of its logits."""
    label: int
    limit: float
    """Most ids of an input."""
    pad: int | None
    template: str | None
    """Text of the file that replaces its own template. None: its own."""


def check(config: ModelConfig) -> ModelFolder:
    """Find the model. Raises ConfigError or SecurityError unless it is whole and of its kind. Does
    not load torch."""
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
        problem = f"config.json: its labels cannot be read: {printable(error)}"
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
    """Return the number of the label that is the reward. Raises ConfigError."""
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


def model_entry(config: ModelConfig, *, remembered: bool = True) -> ModelEntry:
    """Return the manifest's entry of a model.

    Args:
        remembered: If true, remembered hashes are used; else they are computed.

    Raises ConfigError or SecurityError if the model is missing or not whole.
    """
    model = check(config)
    role = f"reward:{config.name}"
    entry = checkpoints.folder_model_entry(role, config.model, model.folder, remembered=remembered)
    if model.template is None:
        return entry
    return entry.model_copy(update={"template": digest(model.template)})


def fingerprint(entry: ModelEntry) -> str:
    """Return the hash of weights, tokenizer and template: another model scores anew."""
    return f"sha256:{digest([entry.weights, entry.tokenizer, entry.template])}"
