"""LoRA: a pair of small matrices beside each linear layer is trained, the layer itself stays.

    W' = W + (alpha / rank) · B A,    A [rank, in], B [out, rank]

B starts at 0, so the first ratio is 1. W is that of the base: the policy that the first adapter was
trained over, whichever iteration that was; for passes in bfloat16 it is held in that where nothing
is lost. A policy trained this way holds two things: at the top the merged weights W' in float32, so
that every reader takes it for a model like any other (its size on disk is that of a full one);
below them `adapter/`, A and B as peft writes them. The next iteration goes on from the base's
weights and the adapter, so the rounding of merges never adds up; its manifest names the base as an
input. Refused: another rank, alpha or other layers than the adapter has; a base that is gone or
changed.

    attach(config.lora, model, policy, seed=0)        # then train what still requires a gradient
    save_and_merge(model, folder)

Not of the spine: only a recipe with `[optimize.lora]` uses it.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from quiver.schemas.errors import ConfigError, printable
from quiver.stages.common.config import Config, parse
from quiver.stages.common.models.checkpoints import (
    ADAPTER_FOLDER,
    OPTIMIZER_FOLDER,
    adapter_base,
)
from quiver.stages.common.store import Store, Version, storage

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

_NAME = "default"
_PREFIX = "base_model.model."
"""What stands before every name in a file of peft."""
_WEIGHTS = f"{ADAPTER_FOLDER}/adapter_model.safetensors"
log = logging.getLogger(__name__)


class Lora(Config):
    """Adapters instead of all weights. They want a larger learning rate than full training does,
    about ten times.

    References: https://arxiv.org/abs/2106.09685; rate and alpha:
    https://thinkingmachines.ai/blog/lora/.
    """

    rank: int = Field(default=16, ge=1)
    """Rows of A and columns of B."""
    alpha: int = Field(default=32, ge=1)
    """The adapter counts alpha / rank. Fixed rather than a multiple of the rank: then one learning
    rate does for all ranks."""
    target_modules: Literal["all-linear"] | Annotated[list[str], Field(min_length=1)] = "all-linear"
    """Which layers: all linear ones of the language model but the output embedding, or those whose
    names end so, such as ["q_proj", "v_proj"]."""


def with_base(config: Lora | None, store: Store, inputs: dict[str, Version]) -> dict[str, Version]:
    """The stage's inputs and, where adapters are trained, under role `base` the policy whose
    weights stay as they are.

    ConfigError: the adapter of the starting policy is of another kind. LineageError: its base is
    gone or changed.
    """
    if config is None:
        return inputs
    policy = inputs["policy"]
    base = adapter_base(store, policy)
    if base is None:
        return {"base": policy, **inputs}
    saved = parse(Lora, policy.manifest.config_section("lora"), f"{policy.ref} lora")
    changed = [name for name in Lora.model_fields if getattr(config, name) != getattr(saved, name)]
    if changed:
        expected = ", ".join(f"{name} = {getattr(saved, name)}" for name in changed)
        asked = ", ".join(f"{name} = {getattr(config, name)}" for name in changed)
        raise ConfigError(
            f"optimize.lora {policy.ref}",
            f"its adapter has {expected}, the recipe asks for {asked}",
            next="ask for what it has, or start a new run with policy.model = "
            f"{str(policy.files.folder)!r}",
        )
    return {"base": base, **inputs}


def check_installed() -> None:
    """ConfigError where there is no peft."""
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(
            "optimize.lora", "peft is not installed here", next='pip install "quiver-rl[lora]"'
        )


def has_moments(config: Lora | None, policy: Version) -> bool:
    """Whether `policy` holds optimizer state of what is trained now, adapters or whole weights."""
    if f"{OPTIMIZER_FOLDER}/state.json" not in policy.files.names:
        return False
    trained = ["whole weights", "adapters"]
    had_adapters = policy.manifest.input("base") is not None
    has_adapters = config is not None
    if had_adapters != has_adapters:
        log.warning(
            "%s was trained by %s, now it is %s: the moments start anew",
            policy.ref,
            trained[had_adapters],
            trained[has_adapters],
        )
    return had_adapters == has_adapters


def attach(config: Lora, model: PreTrainedModel, policy: Version, *, seed: int) -> None:
    """Freeze `model` (the base) and put adapters on it, in place: those of `policy`, else new ones,
    which `seed` decides.

    ConfigError when a name in `target_modules` is no layer of the model, or the adapter is of
    another one.
    """
    import torch
    from peft import LoraConfig, inject_adapter_in_model
    from safetensors.torch import load_file

    layers = _layers(config, model)
    peft_config = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=0.0,
        target_modules=layers,
        task_type="SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=()):
        # new layers are made on the CPU, whatever the model's device
        torch.default_generator.manual_seed(seed)
        inject_adapter_in_model(peft_config, model, _NAME)
    adapters = _adapters(model)
    if policy.manifest.input("base") is not None:
        policy.verify(f"{ADAPTER_FOLDER}/")
        saved = load_file(policy.files.path(_WEIGHTS))
        shapes = {name: parameter.shape for name, parameter in adapters.items()}
        if {name: tensor.shape for name, tensor in saved.items()} != shapes:
            raise ConfigError(
                f"{policy.ref} {ADAPTER_FOLDER}",
                "its matrices have other names or shapes than the base's layers",
                next=f"install the transformers that the manifest of {policy.ref} names",
            )
        with torch.no_grad():
            for name, parameter in adapters.items():
                parameter.copy_(saved[name])
    trained = sum(parameter.numel() for parameter in adapters.values())
    log.info(
        "lora: rank %d on %d layers, %d numbers are trained", config.rank, len(layers), trained
    )


def _layers(config: Lora, model: PreTrainedModel) -> list[str]:
    """Full names of the layers that get an adapter.

    Not the output embedding: its weight is read by the trainer's head, past any adapter.
    """
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    from quiver.stages.common.forward.pictures import sight

    head = model.get_output_embeddings()
    linear = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module is not head
    ]
    if config.target_modules == "all-linear":
        of_sight = {id(parameter) for parameter in sight(model)}
        return [name for name in linear if id(model.get_submodule(name).weight) not in of_sight]
    chosen = set()
    for target in config.target_modules:
        matching = [name for name in linear if f".{name}".endswith(f".{target}")]
        if not matching:
            endings = sorted({name.rpartition(".")[2] for name in linear})
            nearest = difflib.get_close_matches(target, endings, 1, 0.5)
            raise ConfigError(
                "optimize.lora.target_modules",
                f"no linear layer inside the model is called {printable(repr(target))}; there are "
                f"{', '.join(endings)}",
                next=f"set target_modules = {nearest}"
                if nearest
                else 'set target_modules = "all-linear"',
            )
        chosen.update(matching)
    return [name for name in linear if name in chosen]


def narrow_frozen(model: nn.Module) -> None:
    """Make the frozen weights of linear layers bfloat16 in place, where that loses nothing, as in a
    base that was saved so.

    For passes under bfloat16 autocast alone, which give the same numbers bit for bit: it rounds
    these weights anyway, and, as they have no gradient, in each pass anew. An output embedding that
    is the input embedding too stays, for that one is not rounded.
    """
    import torch
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    linear_weights = []
    read_elsewhere = set()
    for module in model.modules():
        parameters = list(module.parameters(recurse=False))
        if isinstance(module, nn.Linear | Conv1D):
            linear_weights += parameters
        else:
            read_elsewhere.update(map(id, parameters))
    for parameter in linear_weights:
        if not parameter.requires_grad and id(parameter) not in read_elsewhere:
            rounded = parameter.data.to(torch.bfloat16)
            if torch.equal(rounded.to(parameter.dtype), parameter.data):
                parameter.data = rounded


def _adapters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trained matrices by their names in peft's files."""
    return {
        _PREFIX + name.replace(f".{_NAME}.", "."): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def save_and_merge(model: PreTrainedModel, folder: Path) -> None:
    """Write the adapters into `adapter/` below `folder`, as peft and vLLM read them; then make
    `model` in place the plain float32 model that base and adapters are together."""
    from peft.tuners.lora import LoraLayer
    from safetensors.torch import save_file

    (folder / ADAPTER_FOLDER).mkdir()
    tensors = {name: p.detach().cpu().contiguous() for name, p in _adapters(model).items()}
    save_file(tensors, folder / _WEIGHTS, {"format": "pt"})
    peft_config = model.peft_config[_NAME].to_dict()
    peft_config["inference_mode"] = True
    peft_config["target_modules"] = sorted(peft_config["target_modules"])  # a set, in any order
    storage.write_bytes(
        folder / ADAPTER_FOLDER / "adapter_config.json",
        json.dumps(peft_config, indent=2, sort_keys=True).encode(),
    )
    model.float()
    for name, module in list(model.named_modules()):
        if isinstance(module, LoraLayer):
            module.merge()
            model.set_submodule(name, module.get_base_layer())
    del model.peft_config
