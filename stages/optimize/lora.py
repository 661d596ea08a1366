"""LoRA: a pair of small matrices beside each linear layer is trained; the layer itself stays.

    W' = W + (alpha / rank) · B A,    A [rank, in], B [out, rank]

B starts at 0, so the first ratio is 1. W is the weight of the base: the policy on which the first
adapter was trained, several iterations ago or in this one. For passes in bfloat16 it is held in
bfloat16 if that loses nothing.

A policy trained this way holds two things. At the top are the merged weights W' in float32, so
every reader can use it like any other model, with the disk size of a full one. Below them is
`adapter/`, with A and B in peft's format. The next iteration starts from the base's weights and the
adapter, so rounding of merges never adds up; its manifest names the base as an input. With `save =
"adapter"` a policy holds only the adapter, and its readers read the base too. With `base = "nf4"`,
W is rounded to 4 bits (nf4.py), in each iteration to the same numbers, and W' has these.

    model = load_with_adapters(config, plan.inputs, device)   # then train what requires a gradient
    save(model, folder)
    merge(model)

Not of the spine: only a recipe with `[optimize.lora]` uses it. Its fields are in `config`, the
choice of the base in `inputs`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.models.falcon.modeling_falcon import FalconLinear
from transformers.pytorch_utils import Conv1D

from quiver.schemas.errors import ConfigError, did_you_mean, printable
from quiver.stages.core.files import write_bytes
from quiver.stages.core.store import Version
from quiver.stages.model.checkpoints import ADAPTER_FOLDER, ADAPTER_PREFIX, ADAPTER_WEIGHTS
from quiver.stages.model.forward.media import vision_parameters
from quiver.stages.model.forward.precision import choose_precision
from quiver.stages.model.loading import (
    empty_model,
    load_for_autocast,
    load_model,
    read_by_linear_layers_alone,
)

from .checks import check_lora
from .config import Config, Lora
from .nf4 import Nf4Linear, quantize_frozen
from .optimizer import is_sharded

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NAME = "default"
_LINEAR = (nn.Linear, Conv1D, FalconLinear)
"""Layers that compute W x + b alone. Routers of experts are derived from `nn.Linear` in some
families, and give more than one tensor."""
log = logging.getLogger(__name__)


def load_with_adapters(
    config: Config,
    inputs: Mapping[str, Version],
    device: torch.device,
    load: Callable[[Version], nn.Module] | None = None,
) -> PreTrainedModel:
    """Load the frozen base in float32 with the policy's adapters, or with new ones.

    For passes in bfloat16, weights of linear layers that are bfloat16 on disk stay so. With `base =
    "nf4"` they are quantized one by one on the way to the device. `load` replaces the default
    loader, for a trainer that needs the model elsewhere. Raises ConfigError as `attach` does.
    """
    check_lora(config.lora)
    base = inputs["base"]
    place = "cpu" if config.has_nf4_base else device  # a GPU may not hold the base in 16 bits
    if load:
        model = load(base)
    elif choose_precision(config.precision, device) == "bf16":
        model = load_for_autocast(base, place)
    else:
        model = load_model(base, dtype=torch.float32, device=place)
    attach(config.lora, model, inputs["policy"], seed=config.seed)
    if config.has_nf4_base:
        quantize_frozen(model, device)
    return model


@contextmanager
def _float32_in_name(model: nn.Module) -> Iterator[None]:
    """Make 16-bit weights look like float32 without using memory: peft creates its matrices in the
    layer's dtype."""
    narrow = [p for p in model.parameters() if p.dtype in (torch.bfloat16, torch.float16)]
    weights = [parameter.data for parameter in narrow]
    for parameter in narrow:
        nothing = torch.zeros((), device=parameter.device)
        parameter.data = nothing.expand(parameter.shape)
    try:
        yield
    finally:
        for parameter, weight in zip(narrow, weights, strict=True):
            parameter.data = weight


def require_layers(config: Lora, policy: Version) -> None:
    """Raise ConfigError if the model of `policy` has no such layers, or peft cannot adapt them.

    No weight is read, so that this can be checked before there are rollouts.
    """
    check_lora(config)
    model = empty_model(policy)
    with torch.device("meta"):
        _add_new(config, model, seed=0)


def attach(config: Lora, model: PreTrainedModel, policy: Version, *, seed: int) -> None:
    """Freeze `model` (the base) and add adapters in place: the adapters of `policy`, or new ones,
    initialised from `seed`.

    Raises ConfigError if a name in `target_modules` is no layer of the model, or if the adapter
    does not fit the model.
    """
    num_layers = _add_new(config, model, seed)
    adapters = _adapters(model)
    if policy.manifest.input("base") is not None:
        policy.verify(f"{ADAPTER_FOLDER}/")
        saved = load_file(policy.files.path(ADAPTER_WEIGHTS))
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
    log.info("lora: rank %d on %d layers, %d numbers are trained", config.rank, num_layers, trained)


def _add_new(config: Lora, model: PreTrainedModel, seed: int) -> int:
    """Freeze `model` and add new adapters in place; return how many layers got one. Raises
    ConfigError."""
    from peft import LoraConfig, inject_adapter_in_model

    layers = _without_experts(config, model, _layers(config, model))
    peft_config = LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=0.0,
        target_modules=layers,
        task_type="SEQ_2_SEQ_LM" if model.config.is_encoder_decoder else "CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=()), _float32_in_name(model):
        # peft makes new layers on the CPU, so only the CPU's generator matters
        torch.default_generator.manual_seed(seed)
        inject_adapter_in_model(peft_config, model, _NAME)
    return len(layers)


def _without_experts(config: Lora, model: PreTrainedModel, layers: list[str]) -> list[str]:
    """Return the `layers` that peft adapts as they are.

    If a family's experts are fused into one tensor, peft takes every layer that is called like one
    of theirs for an expert, the dense ones too, and would adapt that tensor instead. Such layers
    get no adapter. Raises ConfigError if the recipe names them.
    """
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    tried = LoraConfig(target_modules=layers)
    try:
        convert_peft_config_for_transformers(tried, model, None)
        left = [name for name in layers if name in tried.target_modules]
    except ValueError as error:  # only one of two layers that would be fused
        raise ConfigError(
            "optimize.lora.target_modules",
            f"peft takes them for experts: {printable(error)}",
            next="name other layers, or leave [optimize.lora] out",
        ) from error
    if len(left) == len(layers):
        return layers
    names = sorted({name.rpartition(".")[2] for name in {*layers} - {*left}})
    problem = f"peft takes {', '.join(names)} of a {type(model).__name__} for experts"
    if config.target_modules != "all-linear" or not left:
        raise ConfigError(
            "optimize.lora.target_modules",
            f"{problem}, which get no adapter",
            next="name other layers, or leave [optimize.lora] out",
        )
    log.warning("lora: %s: %d layers get no adapter", problem, len(layers) - len(left))
    return left


def _layers(config: Lora, model: PreTrainedModel) -> list[str]:
    """Return the full names of the layers that get an adapter.

    What reads pictures and clips gets none: it stays frozen, and `save` writes what is trained. The
    output embedding gets none either: the trainer's head reads its weight directly and would bypass
    an adapter.
    """
    head = model.get_output_embeddings()
    of_vision = {id(parameter) for parameter in vision_parameters(model)}
    linear = [
        name
        for name, module in model.named_modules()
        if type(module) in _LINEAR and module is not head and id(module.weight) not in of_vision
    ]
    if config.target_modules == "all-linear":
        return linear
    chosen = set()
    for target in config.target_modules:
        matching = [name for name in linear if f".{name}".endswith(f".{target}")]
        if not matching:
            endings = sorted({name.rpartition(".")[2] for name in linear})
            raise ConfigError(
                "optimize.lora.target_modules",
                "no linear layer inside the language model is called "
                f"{printable(repr(target))}; there are {', '.join(endings)}"
                f"{did_you_mean(target, endings)}",
                next='correct optimize.lora.target_modules, or set it to "all-linear"',
            )
        chosen.update(matching)
    return [name for name in linear if name in chosen]


def narrow_frozen(model: nn.Module) -> None:
    """Make the frozen weights of linear layers bfloat16 in place if that loses nothing, as for a
    base that was saved in bfloat16.

    Only for passes under bfloat16 autocast, which give the same numbers bit for bit. Autocast
    rounds these weights anyway and, as they have no gradient, again in each pass. An output
    embedding that is tied to the input embedding stays as it is, because embeddings are not
    rounded.
    """
    for parameter in read_by_linear_layers_alone(model):
        if not parameter.requires_grad and not is_sharded(parameter):
            rounded = parameter.data.to(torch.bfloat16)
            if torch.equal(rounded.to(parameter.dtype), parameter.data):
                parameter.data = rounded


def _adapters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trained matrices by their names in peft's files."""
    return {
        ADAPTER_PREFIX + name.replace(f".{_NAME}.", "."): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def save(model: PreTrainedModel, folder: Path) -> None:
    """Write the adapters into `adapter/` below `folder`, as peft and vLLM read them."""
    (folder / ADAPTER_FOLDER).mkdir()
    tensors = {name: p.detach().cpu().contiguous() for name, p in _adapters(model).items()}
    save_file(tensors, folder / ADAPTER_WEIGHTS, {"format": "pt"})
    peft_config = model.peft_config[_NAME].to_dict()
    peft_config["inference_mode"] = True
    write_bytes(
        folder / ADAPTER_FOLDER / "adapter_config.json",
        # `sorted` makes lists of sets
        json.dumps(peft_config, indent=2, sort_keys=True, default=sorted).encode(),
    )


def merge(model: PreTrainedModel) -> None:
    """Turn `model` in place into the plain float32 model, base plus adapters. Layers are merged one
    by one, each into host memory, so a device never holds the base in float32."""
    from peft.tuners.lora import LoraLayer

    for name, module in reversed(list(model.named_modules())):  # what is inside comes first
        if isinstance(module, Nf4Linear):
            model.set_submodule(name, module.dequantized())
        elif isinstance(module, LoraLayer):
            module.to(module.get_base_layer().weight.device, torch.float32).merge()
            model.set_submodule(name, module.get_base_layer().cpu())
    model.cpu().float()
    del model.peft_config
