"""Loads a checkpoint as a torch module: local safetensors and transformers' own classes only.

model = load_model(store.open("arith/policy@0"), dtype=torch.float32)
check_rows(table, "arith/rollouts@1", version)     # refuses rows without a probability

A policy that holds only an adapter (`optimize.lora.save = "adapter"`) is merged with its base in
memory; the merged weights are never written:

base = base_of(store, policy)                      # None if the policy has weights of its own
model = load_model(policy, dtype=torch.float32, base=base)

Importing this module does not import torch, because an engine first sets environment variables.

Not of the spine: the result is an ordinary transformers model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from quiver.schemas.errors import ConfigError, ResourceError, SchemaError, printable
from quiver.stages.core.store import Store, Version
from quiver.stages.model.checkpoints import (
    ADAPTER_FOLDER,
    ADAPTER_PREFIX,
    ADAPTER_WEIGHTS,
    adapter_base,
    context_length,
    is_adapter_alone,
    is_encoder_decoder,
    modalities,
    model_config,
    vocabulary_size,
)
from quiver.stages.model.families import loader_of
from quiver.stages.model.folder import check_folder, load_errors, says_no_memory, stored_weights
from quiver.stages.model.mkl_warmup import make_first_calls
from quiver.stages.model.weights import load_whole

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedConfig, PreTrainedModel


def verify_model(version: Version) -> None:
    """Check the hashes of the model's own files, at the top of the folder, and that it is complete.

    The optimizer's state is checked where it is read.
    """
    names = [entry.name for entry in version.manifest.files if "/" not in entry.name]
    version.verify(*names)
    has_weights = not is_adapter_alone(version)
    check_folder(version.files.folder, str(version.ref), has_weights=has_weights)


def base_of(store: Store, policy: Version) -> Version | None:
    """Return the version with the weights that `policy` lacks; None if it has its own.

    Raises LineageError.
    """
    return adapter_base(store, policy) if is_adapter_alone(policy) else None


def load_model(
    version: Version,
    *,
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
    base: Version | None = None,
) -> PreTrainedModel:
    """Return the model of a policy version in eval mode, with every dropout at 0.

    Hashes are checked first. Dropout is off in training too: the ratio π_θ / π_old must be 1 before
    the first update.

    Args:
        version: The policy version.
        dtype: Dtype of the weights.
        device: Device to put the model on.
        base: Version whose weights the adapter of `version` goes on, if it has none of its own (see
            `base_of`). Default: `version` has its own weights.

    Raises:
        ConfigError: Its files are not a model's.
        CorruptError: A file does not match its hash.
    """
    import torch

    make_first_calls()
    verify_model(version)
    if base is not None:
        verify_model(base)
    weights = base or version
    source = (_loader_of(version), weights.files.folder, str(weights.ref))
    model = load_pretrained(*source, dtype=dtype)
    if base is not None:
        exact = model if dtype == torch.float32 else load_pretrained(*source, dtype=torch.float32)
        put_adapter_on(model, exact, version)
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
        # some layers copy the dropout rates of their config, others read them from it
        for holder in (module, *configs_of(getattr(module, "config", None))):
            for name, rate in vars(holder).items():
                if "drop" in name and isinstance(rate, float):
                    setattr(holder, name, 0.0)
    return model.to(device).eval()


def _loader_of(version: Version) -> Any:
    """Return the class of transformers that loads the model of a policy version."""
    return loader_of(model_config(version), modalities(version))


def empty_model(version: Version) -> PreTrainedModel:
    """Return the model of a policy version without weights, on torch's meta device. Raises
    ConfigError."""
    import torch
    from transformers import AutoConfig

    with load_errors(str(version.ref)), torch.device("meta"):
        return _loader_of(version).from_config(AutoConfig.for_model(**model_config(version)))


def put_adapter_on(model: nn.Module, exact: nn.Module, policy: Version) -> None:
    """Write base weights plus the adapter of `policy` into `model`, rounded to its dtype.

        W + (alpha / rank) · B A, as peft merges

    Args:
        model: Model to change.
        exact: The base model in float32; may be `model` itself.
        policy: Version with the adapter.

    Raises:
        ConfigError: The adapter belongs to another model.
    """
    import torch
    from safetensors.torch import load_file
    from transformers.pytorch_utils import Conv1D

    policy.verify(f"{ADAPTER_FOLDER}/")
    with load_errors(str(policy.ref)), torch.no_grad():
        config = json.loads(policy.files.read(f"{ADAPTER_FOLDER}/adapter_config.json"))
        matrices = load_file(policy.files.path(ADAPTER_WEIGHTS))
        for name, a in matrices.items():
            if not name.endswith(".lora_A.weight"):
                continue
            path = name.removeprefix(ADAPTER_PREFIX).removesuffix(".lora_A.weight")
            layer = exact.get_submodule(path)
            change = matrices[name.replace(".lora_A.", ".lora_B.")] @ a
            change = change.T if isinstance(layer, Conv1D) else change
            merged = layer.weight + change.to(layer.weight.device) * (
                config["lora_alpha"] / config["r"]
            )
            model.get_submodule(path).weight.copy_(merged)


def load_as_stored(
    version: Version, device: str | torch.device = "cpu", base: Version | None = None
) -> PreTrainedModel:
    """Load like `load_model`, but keep the weights in the dtype of their files.

    On a CPU the weights are memory-mapped. Config and buffers are those of a float32 model.

    The model is loaded in float32 if its files have several dtypes, if it is on a `base`, or if it
    computes buffers in its own dtype, because these would be rounded.
    """
    import torch

    if base is not None:
        return load_model(version, dtype=torch.float32, device=device, base=base)
    verify_model(version)
    dtypes = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    stored = {dtype for dtype, _ in stored_weights(version.files.folder).values()}
    dtype = dtypes.get(*stored) if len(stored) == 1 else None
    if dtype in (None, torch.float32):
        return load_model(version, dtype=torch.float32, device=device)
    model = load_model(version, dtype=dtype, device=device)
    for module in model.modules():
        if getattr(module, "config", None) is not None:
            module.config.dtype = torch.float32
        for name, buffer in module.named_buffers(recurse=False):
            is_narrow = buffer.is_floating_point() and buffer.dtype != torch.float32
            if is_narrow and name in module._non_persistent_buffers_set:
                return load_model(version, dtype=torch.float32, device=device)
            if is_narrow:
                module._buffers[name] = buffer.float()
    return model


def load_for_autocast(
    version: Version, device: str | torch.device = "cpu", base: Version | None = None
) -> PreTrainedModel:
    """Load a model whose weights are not trained, for passes under bfloat16 autocast.

    Weights of linear layers that are bfloat16 on disk stay so and never exist in float32: autocast
    would round them to the same numbers. All others are float32. Arguments as for `load_model`.
    """
    import torch

    model = load_as_stored(version, device, base)
    stays = set(read_by_linear_layers_alone(model))
    for parameter in model.parameters():
        if parameter not in stays or parameter.dtype != torch.bfloat16:
            parameter.data = parameter.data.float()
    return model


def read_by_linear_layers_alone(model: nn.Module) -> list[nn.Parameter]:
    """Return the weights of linear layers, without an output embedding that is tied to the input
    embedding."""
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    linear_weights = []
    read_elsewhere = set()
    for module in model.modules():
        parameters = list(module.parameters(recurse=False))
        if isinstance(module, nn.Linear | Conv1D):
            linear_weights += parameters
        else:
            read_elsewhere.update(parameters)
    return [parameter for parameter in linear_weights if parameter not in read_elsewhere]


def load_pretrained(loader: Any, folder: Path, name: str, **options: Any) -> PreTrainedModel:
    """Load the model in `folder` with one of transformers' Auto classes and its own attention.

    Raises ConfigError as `load_whole` does.
    """
    model = load_whole(loader, folder, name, **options)
    take_own_attention(model)
    return model


def own_attention(model: PreTrainedModel) -> str:
    """Return the transformers attention that computes everything the model's layers need.

    `sdpa` silently ignores logit caps and has no sinks, yet transformers chooses it for models with
    caps. Trainer, engine, reference and reward models all use this function's choice.
    """
    for module in model.modules():
        config = getattr(module, "config", None)
        has_caps = bool(getattr(config, "attn_logit_softcapping", None))
        if has_caps or not getattr(module, "_supports_sdpa", True):
            return "eager"
    return "sdpa"


def take_own_attention(model: PreTrainedModel) -> None:
    """Set the attention that `own_attention` names on `model`."""
    own = own_attention(model)
    if model.config._attn_implementation != own:
        model.set_attn_implementation(own)


def set_attention(model: PreTrainedModel, name: str, option: str) -> None:
    """Set the attention `name` in place of the model's own.

    Raises ConfigError about `option` if it is not available, or if it would ignore a part that the
    model's own attention computes.
    """
    if own_attention(model) == "eager" and name != "eager":
        raise ConfigError(
            f"{option} {printable(repr(name))}",
            f"{type(model).__name__} has logit caps, sinks or another part that only the eager "
            "attention of transformers computes, as the trainer does",
            next=f"leave {option} out",
        )
    try:
        model.set_attn_implementation(name)
    except (ImportError, ValueError) as error:
        problem = printable(" ".join(str(error).split()))
        raise ConfigError(
            f"{option} {printable(repr(name))}", problem, next=f"leave {option} out"
        ) from error


def configs_of(config: object) -> Iterator[PreTrainedConfig]:
    """Yield `config` and the configs inside it; a composite model has one for its text part."""
    from transformers import PreTrainedConfig

    if isinstance(config, PreTrainedConfig):
        yield config
        for inner in vars(config).values():
            yield from configs_of(inner)


def restore_dropout(model: PreTrainedModel, version: Version) -> None:
    """Set the dropout rates in the model's config back to the rates of `version`, for saving.

    `load_model` switches dropout off for training, but a saved config keeps the original rates.
    """
    original = type(model.config).from_pretrained(version.files.folder)
    for config, before in zip(configs_of(model.config), configs_of(original), strict=True):
        for name, rate in vars(before).items():
            if "drop" in name:
                setattr(config, name, rate)


def decoder_start_id(model: PreTrainedModel) -> int:
    """Return the id that an encoder-decoder model's decoder reads first.

    Raises ConfigError if the model names none.
    """
    for config in (model.config, model.generation_config):
        if getattr(config, "decoder_start_token_id", None) is not None:
            return config.decoder_start_token_id
    raise ConfigError(
        f"model {type(model).__name__}",
        "no decoder_start_token_id",
        next="add it to the model's config.json and import it again",
    )


def check_rows(
    table: pa.Table, name: str, version: Version, *, with_next_state: bool = False
) -> None:
    """Check that the model of `version` can give every rollout a probability.

    Args:
        table: The rollouts.
        name: Their name, for messages.
        version: The policy version that reads them.
        with_next_state: If true, the state after the last id is needed too.

    Raises:
        ConfigError: Rows were sampled greedily, or an encoder-decoder model meets several turns.
        SchemaError: The model cannot read a row: empty prompt, unknown id, or too many tokens.
    """
    if not len(table):
        return
    greedy = pc.sum(pc.equal(table["temperature"], 0)).as_py()
    if greedy:
        raise ConfigError(
            name,
            f"{greedy} rows were sampled at temperature 0, where no token has a probability",
            next="generate at temperature > 0",
        )
    prompt_lengths = pc.list_value_length(table["prompt_ids"])
    completion_lengths = pc.list_value_length(table["completion_ids"])
    if pc.min(prompt_lengths).as_py() == 0:
        raise SchemaError(
            name,
            "a prompt has no ids, so nothing predicts its completion's first token",
            next="generate from prompts that have ids",
        )
    vocabulary = vocabulary_size(version)
    columns = {column: table[column] for column in ("prompt_ids", "completion_ids")}
    has_turns = "turns" in table.column_names
    if has_turns:
        turns = pc.list_flatten(table["turns"])
        for column in ("observation_ids", "restart_ids"):
            columns[column] = pc.struct_field(turns, column)
    for column, ids in columns.items():
        largest_id = pc.max(pc.list_flatten(ids)).as_py() or 0
        if largest_id >= vocabulary:
            raise SchemaError(
                name,
                f"{column} holds {largest_id}, the policy knows ids below {vocabulary}",
                next="take a policy with the tokenizer that made them",
            )
    if has_turns and is_encoder_decoder(version):
        raise ConfigError(
            name,
            "holds rollouts of several turns, but an encoder-decoder model answers a prompt only "
            "once",
            next="take a causal language model",
        )
    if has_turns:
        longest = longest_sequence(prompt_lengths, table["turns"])
    elif is_encoder_decoder(version):  # prompt and completion have a context each
        longest_completion = pc.max(completion_lengths).as_py() + with_next_state
        longest = max(pc.max(prompt_lengths).as_py(), longest_completion)
    else:
        longest = pc.max(pc.add(prompt_lengths, completion_lengths)).as_py()
    context = context_length(version)
    if context is not None and longest > context:
        raise SchemaError(
            name,
            f"a rollout has {longest} tokens, the policy reads {context}",
            next="generate with a lower max_tokens",
        )


def longest_sequence(prompt_lengths: pa.ChunkedArray, turns: pa.ChunkedArray) -> int:
    """Return the most tokens in one sequence of rollouts with `turns`.

    Observations count. A rewritten history begins a new sequence.
    """
    flat = pc.list_flatten(turns)
    sampled, observed, rewritten = (
        np.array(lengths.fill_null(0), dtype=np.int64)
        for lengths in (
            pc.struct_field(flat, "length"),
            pc.list_value_length(pc.struct_field(flat, "observation_ids")),
            pc.list_value_length(pc.struct_field(flat, "restart_ids")),
        )
    )
    counts = np.array(pc.list_value_length(turns), dtype=np.int64)
    first_turns = np.cumsum(counts) - counts
    tokens = sampled + observed + rewritten
    tokens[first_turns] += np.array(prompt_lengths, dtype=np.int64)
    is_start = rewritten > 0
    is_start[first_turns] = True
    return int(np.add.reduceat(tokens, np.flatnonzero(is_start)).max())


@contextmanager
def short_of_memory(name: str, help: str, **details: str) -> Iterator[None]:
    """Convert out-of-memory errors of torch and Python into ResourceError about `name`.

    Args:
        name: Subject of the error.
        help: Advice for the user.
        details: Further fields of the error, `state` if it is not the usual one.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not says_no_memory(error):
            raise
        problem = f"memory is short: {printable(error)}"
        raise ResourceError(name, problem, next=help, **details) from None
