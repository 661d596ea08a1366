"""`quiver fit`: what each stage of a recipe needs on a machine, from shapes alone.

    shape = shape_of(find_config(recipe.policy, recipe.store, recipe.run))
    estimate = Estimate(recipe, shape, workload_of(recipe), this_host())
    for need in estimate.needs():
        estimate.fits(need) or estimate.remedies(need)

stages/model/memory.py has the bytes that a process holds at once. Here are the machine, the size
of an iteration, and the settings with which a stage would fit.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import torch

from quiver.schemas.errors import ConfigError, LineageError, printable
from quiver.stages.core.store import Store
from quiver.stages.core.store.writer import shard_rows
from quiver.stages.generate.config import Config as GenerateConfig
from quiver.stages.logprobs.config import Config as LogprobsConfig
from quiver.stages.model import memory
from quiver.stages.model.checkpoints import PolicyConfig, find_folder, locate
from quiver.stages.model.devices import SLEEPING_BYTES, engine_gpus
from quiver.stages.model.folder import count_parameters, load_errors
from quiver.stages.model.forward.precision import choose_precision
from quiver.stages.model.from_function import is_function
from quiver.stages.optimize.config import Config as OptimizeConfig

from .placement import keeps_engine
from .recipe import Recipe
from .sections import Data, Generate

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_PROMPTS = 64
_PROMPT_TOKENS = 256
_DEVICES = (torch.device("cpu"), torch.device("cuda"))

# -- machines


@dataclass(frozen=True)
class Machine:
    """One kind of device, and their number. The name "cpu" means this host."""

    name: str
    memory: int
    """Bytes of one device."""
    count: int = 1


_MEBIBYTES = {
    "a10": 23028,
    "a100": 81920,
    "a100-40gb": 40960,
    "b200": 183359,
    "h100": 81559,
    "h200": 143771,
    "l4": 23034,
    "l40s": 46068,
    "rtx3090": 24576,
    "rtx4090": 24564,
}
"""Memory of each GPU, as nvidia-smi shows it."""


def this_host() -> Machine:
    """Return this host with its memory; stages run on the CPU."""
    return Machine("cpu", os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def parse_machine(text: str) -> Machine:
    """Parse `h100`, or `h100:8` for eight GPUs. Raises ConfigError."""
    name, _, count = text.lower().partition(":")
    if name not in _MEBIBYTES:
        near = difflib.get_close_matches(name, _MEBIBYTES, 1, 0.5)
        raise ConfigError(
            f"--gpu {printable(text)}",
            f"expected one of {', '.join(_MEBIBYTES)}, such as h100 or h100:8",
            next=f"name --gpu {near[0]}" if near else "name a GPU of the list",
        )
    if count and not (re.fullmatch("[1-9][0-9]{0,3}", count) and int(count) <= 1024):
        raise ConfigError(
            f"--gpu {printable(text)}",
            "expected a number of GPUs of one host after the colon",
            next=f"write it like --gpu {name}:8",
        )
    return Machine(name, _MEBIBYTES[name] * 2**20, int(count or 1))


# -- the model, and the size of an iteration


def find_config(policy: PolicyConfig, store: str, run: str) -> PreTrainedConfig:
    """Return the config of the base model.

    For a model made by a function, this is the config of the run's policy@0. Raises ConfigError.
    """
    from transformers import AutoConfig

    model = policy.model
    if is_function(model):
        try:
            base = Store(store, create=False).open(f"{run}/policy@0")
            path = base.files.path("config.json").parent
        except (ConfigError, LineageError):
            raise ConfigError(
                f"policy.model {printable(model)}",
                "the function has not made the model yet, so its shape is not known",
                next="let a run import the model, or name a directory of such a model by "
                "--set policy.model=FOLDER",
            ) from None
    else:
        path, _ = locate(model, policy.revision)
    with load_errors(f"model {printable(model)}"):
        if path.is_file():
            return AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)


@dataclass(frozen=True)
class Workload:
    """Size of one iteration. Token counts are means, except `longest`."""

    prompts: int
    samples: int
    """Rollouts per prompt."""
    prompt_tokens: float
    completion_tokens: float
    longest: int
    """Tokens of the longest rollout, including its prompt."""
    source: str
    """Origin of the numbers, for people."""

    @property
    def rollouts(self) -> int:
        return self.prompts * self.samples

    @property
    def passed_tokens(self) -> float:
        """Tokens that a pass over all rollouts reads; each prompt counts once."""
        return self.prompts * self.prompt_tokens + self.rollouts * (self.completion_tokens - 1)


def workload_of(generate: Generate, data: Data, store: str, run: str) -> Workload:
    """Return the workload of the run's newest rollouts if there are any, else of the recipe's keys.

    Completions count with their longest length, unless the rollouts were sampled with it too.
    """
    samples = generate.samples_per_prompt
    turns = generate.turns
    most = turns.most_read_tokens if turns else generate.sampling.max_tokens
    try:
        rollouts = Store(store, create=False).open(f"{run}/rollouts@latest")
        table = rollouts.table()
    except (ConfigError, LineageError):  # no store yet, or no rollouts
        prompts = data.limit or _PROMPTS
        source = (
            f"no rollouts yet: {prompts} prompts of {_PROMPT_TOKENS} tokens, completions of {most}"
        )
        longest = _PROMPT_TOKENS + most
        return Workload(prompts, samples, _PROMPT_TOKENS, most, longest, source)
    prompt_lengths = pc.list_value_length(table["prompt_ids"])
    lengths = pc.list_value_length(table["completion_ids"])
    source = str(rollouts.ref)
    if rollouts.manifest.config_section("sampling").get("max_tokens") != most:
        lengths = pa.nulls(len(table), pa.int64()).fill_null(most)
        source = f"prompts as in {source}, completions as long as they may be"
    return Workload(
        prompts=data.limit or pc.count_distinct(table["group_id"]).as_py(),
        samples=samples,
        prompt_tokens=pc.mean(prompt_lengths).as_py(),
        completion_tokens=max(1.0, pc.mean(lengths).as_py()),
        longest=pc.max(pc.add(prompt_lengths, lengths)).as_py(),
        source=source,
    )


# -- needs


@dataclass(frozen=True)
class Need:
    """Needs of one stage, on each device that it uses."""

    stage: str
    devices: int
    """Number of devices used at once."""
    on_gpu: bool
    memory: Mapping[str, float]
    """Bytes by use."""
    notes: tuple[str, ...] = ()

    @property
    def bytes(self) -> float:
        return sum(self.memory.values())


@dataclass(frozen=True)
class Estimate:
    """A recipe on a machine: what its stages need, if that fits, and what would make it fit."""

    recipe: Recipe
    shape: memory.Shape
    work: Workload
    machine: Machine

    def needs(self) -> list[Need]:
        """Return the needs of each stage that holds a model, in the order of an iteration.

        Servers hold their own models, and nothing is known about a user's own engine; both are left
        out.
        """
        recipe = self.recipe
        config = recipe.optimize_config()
        needs = []
        if recipe.generate.engine in ("vllm", "transformers"):
            needs.append(self.sampling(recipe.generate))
        for model in recipe.reward.models:
            on_gpu = self.uses_gpu(model.device)
            folder = find_folder(model.model, model.revision, "reward.models.model")
            automatic = "bfloat16" if on_gpu else "float32"
            width = _width(automatic if model.dtype == "auto" else model.dtype)
            split = memory.split_of(model.engine_args) if on_gpu else 1
            held = memory.reward_model(
                count_parameters(folder), width=width, on_gpu=on_gpu, split=split
            )
            devices = engine_gpus(model.engine_args) if on_gpu else 1
            held |= self.asleep(on_gpu)
            needs.append(Need(f"reward ({model.name})", devices, on_gpu, held))
        if config.kl_coef > 0:
            needs.append(self.logprobs(recipe.logprobs.for_role("ref")))
        if recipe.logprobs.prox or config.needs_prox:
            needs.append(self.logprobs(recipe.logprobs.for_role("prox")))
        return [*needs, self.training(config)]

    def training(self, config: OptimizeConfig) -> Need:
        """Return the needs of the optimize stage."""
        work = self.work
        on_gpu = self.uses_gpu(config.device)
        precision = choose_precision(config.precision, _DEVICES[on_gpu])
        ranks = config.processes or 1
        in_step = work.passed_tokens / config.minibatches

        def bytes_of(budget: int, recomputes: bool) -> dict[str, float]:
            return memory.training(
                self.shape,
                self._microbatch(budget, in_step),
                on_gpu=on_gpu,
                precision=precision,
                lora_rank=config.lora.rank if config.lora else None,
                has_critic=config.critic == "model",
                recomputes=recomputes,
                ranks=ranks if config.shard else 1,
                is_8bit=config.optimizer == "adamw_8bit",
                moments_on_host=config.moments_on_host,
                has_nf4_base=config.has_nf4_base,
            )

        asleep = self.asleep(on_gpu)
        device_bytes = self.machine.memory - sum(asleep.values()) if on_gpu else 0
        budget, recomputes = memory.choose_budget(
            bytes_of, device_bytes, config.token_budget, config.activation_checkpointing
        )
        note = f"micro-batches of {self._microbatch(budget, in_step):.0f} tokens, {precision}"
        if config.optimizer == "adamw_8bit":
            note += ", moments in 8 bits"
        if config.has_nf4_base:
            note += ", base in 4 bits"
        if config.moments_on_host and on_gpu:
            note += ", moments in host memory"
        if recomputes:
            note += ", activations recomputed"
        return Need("optimize", ranks, on_gpu, bytes_of(budget, recomputes) | asleep, (note,))

    def logprobs(self, config: LogprobsConfig) -> Need:
        """Return the needs of a logprobs stage."""
        work = self.work
        on_gpu = self.uses_gpu(config.device)
        precision = choose_precision(config.precision, _DEVICES[on_gpu])

        def bytes_of(budget: int, recomputes: bool) -> dict[str, float]:
            return memory.scoring(
                self.shape,
                self._microbatch(budget, work.passed_tokens),
                on_gpu=on_gpu,
                precision=precision,
            )

        asleep = self.asleep(on_gpu)
        device_bytes = self.machine.memory - sum(asleep.values()) if on_gpu else 0
        chosen = memory.choose_budget(bytes_of, device_bytes, config.token_budget, False)
        devices = self._devices(1, math.ceil(work.rollouts / shard_rows(work.rollouts)))
        return Need(f"logprobs ({config.role})", devices, on_gpu, bytes_of(*chosen) | asleep)

    def asleep(self, on_gpu: bool) -> dict[str, float]:
        """Return the bytes that a sleeping engine keeps on the device of another stage."""
        keeps = on_gpu and keeps_engine(self.recipe, self.machine.count)
        return {"sleeping engine": SLEEPING_BYTES} if keeps else {}

    def sampling(self, config: GenerateConfig) -> Need:
        """Return the needs of the generate stage with vLLM or transformers."""
        work = self.work
        shape = self.shape
        options = config.options
        on_gpu = self.uses_gpu(config.device)
        machine = self.machine if on_gpu else this_host()
        uses_split = on_gpu and config.engine == "vllm"
        split = memory.split_of(options) if uses_split else 1
        of_engine = engine_gpus(options) if uses_split else 1
        num_shards = math.ceil(work.rollouts / config.rows_in_shard(work.rollouts))
        devices = self._devices(of_engine, num_shards)
        dtype = config.dtype
        if dtype == "auto":
            dtype = "bfloat16" if on_gpu else "float32"
        width = _width(dtype)
        if config.engine == "transformers":
            together = options.get("batch_size", 32)
        else:  # vLLM's own default
            is_large = on_gpu and machine.memory >= 70 * 2**30 and machine.name != "a100"
            together = options.get("max_num_seqs") or (1024 if is_large else 256)
        held = memory.sampling(
            shape,
            engine=config.engine,
            options=options,
            width=width,
            longest=work.longest,
            sequences=together,
            on_gpu=on_gpu,
            device_bytes=machine.memory,
        )
        of_token = memory.cache_bytes(shape, width)
        if uses_split:
            mean_tokens = work.prompt_tokens + work.completion_tokens
            together = int(min(held["cache"] * split // (of_token * mean_tokens), together))
        note = f"up to {together} rollouts are decoded together, in {dtype}"
        return Need("generate", devices, on_gpu, held, (note,))

    def uses_gpu(self, device: str) -> bool:
        """True if a stage with this `device` runs on the GPUs; else it runs on this host's CPU."""
        return self.machine.name != "cpu" != device

    def _devices(self, of_process: int, shards: int) -> int:
        """Return how many devices the processes of a shared stage use together, `of_process` each.

        There are never more processes than shards.
        """
        asked = self.recipe.placement.devices
        if asked is None or self.machine.name == "cpu":
            return of_process
        most = self.machine.count if asked == "all" else min(asked, self.machine.count)
        return max(1, min(most // of_process, shards)) * of_process

    def _microbatch(self, budget: int, in_step: float) -> float:
        """Return the tokens of a micro-batch: a rollout is never split."""
        return max(min(budget, in_step), self.work.longest)

    # -- does it fit

    def has_enough(self, need: Need) -> bool:
        """True if the machine has as many devices as the stage needs. Any number of processes share
        a CPU."""
        return not need.on_gpu or need.devices <= self.machine.count

    def fits(self, need: Need) -> bool:
        """True if the machine can hold the stage.

        A GPU must hold its own share; this host's memory must hold all processes on its CPU.
        """
        if need.on_gpu:
            usable = memory.USABLE * self.machine.memory
            return self.has_enough(need) and need.bytes <= usable
        return need.devices * need.bytes <= memory.USABLE * this_host().memory

    def remedies(self, need: Need) -> list[tuple[str, Need]]:
        """Return at most three settings with which the stage fits, the mildest first, each with its
        new need."""
        count = self.machine.count
        needs = {}
        if need.stage == "generate" and need.on_gpu and self.recipe.generate.engine == "vllm":
            config = self.recipe.generate
            for size in (2, 4, 8, 16):
                now = config.options.get("tensor_parallel_size", 1)
                if size > now and self.shape.heads % size == 0:
                    options = {**config.options, "tensor_parallel_size": size}
                    changed = config.model_copy(update={"options": options})
                    setting = f"generate.options.tensor_parallel_size = {size}"
                    needs[setting] = self.sampling(changed)
        elif need.stage == "optimize":
            config = self.recipe.optimize_config()
            shorter = {"token_budget": self.work.longest}
            is_chosen = need.on_gpu and config.activation_checkpointing is None
            again = {} if is_chosen else {"activation_checkpointing": True}
            cheaper = shorter | again
            ranks = [{"processes": count, "shard": True}] if count > 1 else []
            few_bytes = {"optimizer": "adamw_8bit"}
            changes = [shorter, again, cheaper]
            changes += [each | less for each in ranks for less in ({}, cheaper)]
            for fewer in (few_bytes, {"lora": {}}):
                changes += [each | fewer | less for each in [{}, *ranks] for less in ({}, cheaper)]
            changes += [{"lora": {"base": "nf4"}, **cheaper}]
            fewest = few_bytes | {"precision": "bf16_stochastic"} | cheaper
            changes += [fewest, fewest | {"moments_on_host": True}]
            for change in changes:
                with suppress(ValueError):  # Some settings do not go with others of the recipe.
                    changed = OptimizeConfig.model_validate({**config.model_dump(), **change})
                    settings = [f"optimize.{key} = {json.dumps(change[key])}" for key in change]
                    needs[", ".join(settings)] = self.training(changed)
        return [(setting, changed) for setting, changed in needs.items() if self.fits(changed)][:3]


def _width(dtype: str) -> int:
    return getattr(torch, dtype).itemsize
