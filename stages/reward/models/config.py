"""What a recipe says of a reward model under `[[reward.models]]`, and what can be told of the model
without loading it.

Refused before any generation: a directory that is not whole, pickled weights, code that a model
brings, a language model in a classifier's place (its head would be random), several labels and none
chosen.

    check(ModelConfig(model="path/to/reward-model"))
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field, field_validator, model_validator

from quiver.schemas.errors import ConfigError, printable
from quiver.schemas.manifest import Model, digest
from quiver.stages.common.config import Config, Runtime
from quiver.stages.common.models import checkpoints, vllm_env

_OWN_ARGUMENTS = (
    "model",
    "runner",
    "dtype",
    "max_model_len",
    "seed",
    "hf_overrides",
    "trust_remote_code",
    "pooler_config",
)


class ModelConfig(Config):
    """One reward model."""

    model: str = Field(min_length=1)
    """A model directory, `package:NAME/FOLDER` (a directory inside an installed package), or a hub
    id. Safetensors only."""
    name: str = Field(default="", pattern=r"^[A-Za-z0-9_.-]{0,64}$")
    """Its column in `parts`, unique. Empty: the last part of `model`."""
    weight: float = 1.0
    """Factor of its part in the reward."""
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
    extra: bool = False
    """Keep the values of all labels as JSON in `extra`."""
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
    fingerprint: str = ""
    """Filled in by the stage: hash of weights, tokenizer and template. If set, the model must have
    it."""

    @model_validator(mode="before")
    @classmethod
    def _own_name(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("model"), str) and not data.get("name"):
            return {**data, "name": re.sub(r"[^A-Za-z0-9_.-]", "-", Path(data["model"]).name)[-64:]}
        return data

    @field_validator("engine_args")
    @classmethod
    def _free(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        taken = sorted(set(_OWN_ARGUMENTS) & arguments.keys())
        if taken:
            raise ValueError(
                f"{', '.join(taken)} can not be set here: it follows from the model and its other "
                "fields"
            )
        return arguments

    @model_validator(mode="after")
    def _fits(self) -> ModelConfig:
        other = {
            "token": ("label", "activation", "pooling", "extra"),
            "classifier": ("question", "token", "against"),
        }[self.kind]
        default = {name: field.default for name, field in type(self).model_fields.items()}
        odd = [name for name in other if getattr(self, name) != default[name]]
        if odd:
            raise ValueError(
                f"{odd[0]} is no field of kind {self.kind!r}: leave it out, or choose the other "
                "kind"
            )
        if self.engine_args and self.engine != "vllm":
            raise ValueError(f"engine_args are for engine 'vllm', got engine {self.engine!r}")
        if self.engine == "vllm" and self.kind == "token" and self.against is None:
            raise ValueError(
                'a judge on vLLM needs against, such as "No": set it, or engine = "transformers"'
            )
        return self

    def key(self) -> dict[str, Any]:
        """The bytes decide, wherever they lie, once the fingerprint is known."""
        known = {"model", "revision", "template"} if self.fingerprint else set()
        return {name: value for name, value in super().key().items() if name not in known}


class Found(NamedTuple):
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


def check(config: ModelConfig) -> Found:
    """What and where the model is. ConfigError or SecurityError unless it is whole and of its kind.
    Loads no torch."""
    folder = checkpoints.find_folder(config.model, config.revision, "reward.models.model")
    about = json.loads((folder / "config.json").read_bytes())
    names = [str(name) for name in about.get("architectures") or ()]
    classifier = any(name.endswith("ForSequenceClassification") for name in names)
    if classifier != (config.kind == "classifier") or about.get("is_encoder_decoder"):
        wanted = "a sequence classifier" if config.kind == "classifier" else "a language model"
        message = (
            f"is {printable(', '.join(names)) or 'of no known architecture'}; kind {config.kind!r} "
            f"needs {wanted}"
        )
        if about.get("is_encoder_decoder"):
            message = "is an encoder-decoder model; reward models are decoders or encoders"
        raise ConfigError(who(config), message, next="name another model, or its kind")
    labels = (
        [str(about["id2label"][key]) for key in sorted(about["id2label"], key=int)]
        if about.get("id2label")
        else []
    )
    labels = labels or [f"LABEL_{number}" for number in range(about.get("num_labels", 2))]
    context = checkpoints.context_of(about)
    limit = min(context or math.inf, config.max_tokens or math.inf)
    if config.engine == "vllm":
        vllm_env.find_build(who(config))
    pad = {**about, **about.get("text_config", {})}.get("pad_token_id")
    return Found(folder, labels, _choose_label(config, labels), limit, pad, _read_template(config))


def model_entry(config: ModelConfig) -> Model:
    """Its entry in the manifest. ConfigError, SecurityError: it is not there, or not whole."""
    model = check(config)
    entry = checkpoints.folder_as_model(f"reward:{config.name}", config.model, model.folder)
    if model.template is None:
        return entry
    return entry.model_copy(update={"template": digest(model.template)})


def fingerprint(entry: Model) -> str:
    """Hash of weights, tokenizer and template: another model scores anew."""
    return f"sha256:{digest([entry.weights, entry.tokenizer, entry.template])}"


def who(config: ModelConfig) -> str:
    """What errors call it."""
    return f"reward model {printable(config.name)}"


def _choose_label(config: ModelConfig, labels: list[str]) -> int:
    if config.kind == "token":
        return 0
    if config.activation == "softmax" and len(labels) == 1:
        raise ConfigError(
            who(config),
            "softmax over one label is always 1",
            next='set activation = "sigmoid" or "none"',
        )
    chosen = 0 if config.label is None and len(labels) == 1 else config.label
    if isinstance(chosen, str) and chosen in labels:
        chosen = labels.index(chosen)
    if not isinstance(chosen, int) or not 0 <= chosen < len(labels):
        asked = (
            "label is not set" if chosen is None else f"it has no label {printable(repr(chosen))}"
        )
        raise ConfigError(
            who(config),
            f"{asked}; its labels are {printable(', '.join(labels))}",
            next="set label to one of them",
        )
    return chosen


def _read_template(config: ModelConfig) -> str | None:
    if config.template is None:
        return None
    try:
        return Path(config.template).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        what = f"{who(config)}: template {printable(config.template)}"
        raise ConfigError(what, printable(error), next="name a jinja file in UTF-8") from None
