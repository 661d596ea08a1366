"""The sequence classifier that a critic starts from, such as a reward model (`critic_from`): which
one it is, if it fits the policy, and its weights.

It is read only for a policy that has no critic yet; a saved critic continues from its own weights.
Refused: a model that is no classifier with one label, and another architecture than the policy's.

    found = find_classifier(config, store.open, policy)    # its folder and manifest entry, or None

Not of the spine: only a critic with its own trunk can start here. No torch before the weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quiver.schemas.errors import ConfigError, printable
from quiver.schemas.manifest import ModelEntry
from quiver.schemas.plain import flatten
from quiver.stages.core.run.stage import Plan
from quiver.stages.core.store import Version
from quiver.stages.model import checkpoints
from quiver.stages.model.folder import parse_object
from quiver.stages.model.loading import load_pretrained, verify_model

from .config import Config

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import ModuleDict
    from transformers import PreTrainedModel

FOLDERS = {"trunk": "value_head", "model": "critic"}
"""Folder of a saved critic below the policy's, by its kind."""
ADVICE = "name a classifier with one label that was trained from the policy's own base model"
_WITHOUT_EFFECT = re.compile(
    "token_id|drop|initializer|label|max_position|name|dtype|architectures|version|cache|problem|"
    "tie_word|attn_implementation|output_|return_|pretraining_tp"
)
"""Fields of a config.json that change no hidden state."""


def saved_kind(policy: Version) -> str | None:
    """Return the kind of critic that `policy` was saved with; None if it has none."""
    return next((k for k in FOLDERS if f"{FOLDERS[k]}/state.json" in policy.files.names), None)


def find_classifier(
    config: Config, open: Callable[[str], Version], policy: Version, *, remembered: bool = True
) -> tuple[Path, ModelEntry] | None:
    """Return folder and manifest entry of the classifier that the critic starts from.

    None if `critic_from` names none, or if `policy` has a critic.

    Args:
        open: Opens a version of the store, if `critic_from` names one.
        remembered: If true, cached hashes are enough, as for a plan.

    Raises:
        ConfigError: It is missing, or does not fit the policy.
        LineageError: The store has no such version.
    """
    name = config.critic_from
    if name is None or saved_kind(policy):
        return None
    if "/policy@" in name:
        version = open(name)
        if not remembered:
            verify_model(version)
        folder = version.files.folder
        about = checkpoints.model_config(version)
        entry = checkpoints.model_entry("critic", version)
    else:
        folder = checkpoints.find_folder(name, None, "optimize.critic_from")
        about = parse_object((folder / "config.json").read_bytes()) or {}
        entry = checkpoints.folder_model_entry("critic", name, folder, remembered=remembered)
    expected = checkpoints.model_config(policy)
    labels = about.get("id2label")
    num_labels = len(labels) if isinstance(labels, dict) else about.get("num_labels", 2)
    model_type = about.get("model_type")
    if "ForSequenceClassification" not in str(about.get("architectures")):
        problem = "is no sequence classifier"
    elif num_labels != 1:
        problem = f"has {printable(num_labels)} labels, and a value is one number"
    elif model_type != expected.get("model_type"):
        problem = f"is of type {printable(model_type)}, expected {expected.get('model_type')}"
    elif about.get("is_encoder_decoder"):
        problem = "is an encoder-decoder model, whose head is not one linear map"
    else:
        problem = difference(about, expected)
    if problem:
        problem += f"; the policy is {policy.ref}"
        raise ConfigError(f"optimize.critic_from {printable(name)}", problem, next=ADVICE)
    return folder, entry


def difference(about: Mapping[str, Any], expected: Mapping[str, Any]) -> str:
    """Return the first field that differs between two models' configs, in words; empty if none
    does. A field that one of them lacks has its default there."""
    fields = flatten(dict(expected))
    for key, field in flatten(dict(about)).items():
        other = fields.get(key, field)
        is_set = field is not None and other is not None
        if is_set and field != other and not _WITHOUT_EFFECT.search(key):
            return f"has {printable(key)} {printable(field)}, expected {printable(other)}"
    return ""


def start_of(config: Config, plan: Plan, critic: ModuleDict) -> dict[str, Tensor] | None:
    """Return the weights that a training's new critic starts from; None if it has its own.

    Raises ConfigError if the classifier does not fit, or has changed since the plan.
    """
    found = find_classifier(config, plan.store.open, plan.inputs["policy"], remembered=False)
    if found is None:
        return None
    folder, entry = found
    if entry not in plan.models:
        raise ConfigError(
            f"optimize.critic_from {entry.ref}",
            "has changed since this training was planned",
            next="run again",
        )
    return read_classifier(folder, entry.ref, critic["trunk"])


def read_classifier(folder: Path, name: str, trunk: PreTrainedModel) -> dict[str, Tensor]:
    """Return the classifier's weights in float32, named as in a critic with this `trunk`.

    Raises ConfigError about `name` if it does not fit.
    """
    import torch
    from transformers import AutoModelForSequenceClassification

    title = f"optimize.critic_from {printable(name)}"
    model = load_pretrained(AutoModelForSequenceClassification, folder, title, dtype=torch.float32)
    head = getattr(model, "score", None)
    problem = difference(model.config.to_dict(), trunk.config.to_dict())
    if not isinstance(head, torch.nn.Linear) or head.bias is not None:
        problem = f"{type(model).__name__} has no head that is one linear map without bias"
    if problem:
        raise ConfigError(title, problem, next=ADVICE)
    weights = {f"trunk.{key}": weight for key, weight in model.base_model.named_parameters()}
    weights |= {"head.weight": head.weight[0], "head.bias": torch.zeros(1)}
    return {key: weight.detach() for key, weight in weights.items()}
