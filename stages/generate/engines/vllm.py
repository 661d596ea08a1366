"""Engine `vllm`: runs one checkpoint at a time; ids in, ids and their processed logprobs out.

Sampling parameters are explicit, with `generation_config="vllm"`, so that nothing hidden in the
model has an effect; all ids that end a completion are named. Each row is one request with its own
seed, so a row does not depend on its batch-mates. An engine that fails is never used again: it may
be wedged, so the error is final for this process. Encoder-decoder models are refused.

On a CPU the engine runs in this process, eager and without compilation (it starts in seconds).
Chunked prefill is off there: the CPU build cannot restore the random numbers that a seeded,
half-read prompt drew. Prompts that do not fit into one step wait for the next.

On a GPU it can sleep, without weights or cache, and load the next checkpoint's weights in place of
the previous ones. The models must be the same except for their weights, and the engine must have no
extras (an adapter, pictures, `engine_args`). On a CPU it never sleeps: vLLM repacks weights as it
loads them, and silently reloads them wrong.
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import platform
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, get_args

import numpy as np
from filelock import FileLock, Timeout

from quiver.schemas.errors import ConfigError, SchemaError, printable
from quiver.stages.core.config import parse
from quiver.stages.core.store import Version
from quiver.stages.generate.config import Config
from quiver.stages.generate.engine import Completion, Request, Setup, require_decoder
from quiver.stages.generate.options import VllmOptions
from quiver.stages.model import checkpoints, vllm_env
from quiver.stages.model.folder import stored_weights
from quiver.stages.model.media.processor import features_merged, load_processor

LOGPROBS_MODE = "processed_logprobs"
_CPU_STEP_TOKENS = 4096
_CPU_SEQUENCES = 256
_linked: list[Path] = []
"""Models that this process has requested a link for."""
log = logging.getLogger(__name__)


class ModelLink:
    """A path that points to `model` until it is released, the same for one model after another.

    vLLM's compile cache has the model's path in its key, and each version of a policy has another
    path. So an engine reads its model by a link, `~/.cache/quiver/engines/HOST/0`, and finds what
    was compiled for the previous version. Engines that run at the same time have links with other
    numbers. A lock protects each link; the kernel frees it when its process dies, and a stopped
    process keeps it. (The folder is not in $TMPDIR, because each stage's process has its own.)

    The path is the model's own if no folder for links can be made. The same holds for a second
    engine in one process, which vLLM would otherwise confuse with the first one.
    """

    def __init__(self, model: Path) -> None:
        self.path = model
        self._lock: FileLock | None = None
        _linked.append(model)
        if len(_linked) > 1:
            return
        try:
            cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
            folder = Path(cache, "quiver", "engines", platform.node())
            folder.mkdir(parents=True, exist_ok=True)
            for number in itertools.count():
                lock = FileLock(folder / f"{number}.lock", blocking=False)
                with suppress(Timeout):
                    lock.acquire()
                    self._lock = lock
                    break
            replacement = folder / f"{number}.new"
            # Left over from a process that died.
            replacement.unlink(missing_ok=True)
            replacement.symlink_to(model.absolute())
            self.path = replacement.replace(folder / str(number))
        except (OSError, RuntimeError) as error:  # the link only saves time
            log.debug("no constant path for %s: %s", model, error)

    def release(self) -> None:
        """Give up the link, so that the next engine can use it; this engine reads no more files."""
        if self._lock is not None:
            self._lock.release()


def sampling_parameters(setup: Setup, request: Request) -> dict[str, Any]:
    """Return every value that shapes the row, in vLLM's names and as plain JSON, so that none of
    vLLM's defaults applies."""
    sampling = setup.sampling
    most_tokens = request.max_tokens or sampling.max_tokens
    return {
        **sampling.model_dump(exclude={"ignore_eos"}, mode="json"),
        "n": 1,
        "seed": request.seed,
        "max_tokens": most_tokens,
        "min_tokens": min(sampling.min_tokens, most_tokens),
        "logprobs": 0,
        "flat_logprobs": True,
        # Text is needed only for stop strings; their ids are kept.
        "detokenize": bool(sampling.stop),
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        # Every id that ends a completion is named, including the model's own.
        "ignore_eos": True,
        "stop_token_ids": list(setup.stop_ids),
    }


class VllmEngine:
    """`vllm.LLM` as an `Engine`.

    The environment is set before vLLM is imported; the user's own settings stay.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._max_model_len = setup.max_model_len
        self.options = parse(VllmOptions, setup.options, "generate.options")
        require_decoder("vllm", setup.policy)
        build = vllm_env.prepare(
            "engine vllm", setup.device, batch_invariant=self.options.batch_invariant
        )
        self.cpu = build.cpu
        if self.cpu and setup.most_media and features_merged(setup.policy) is not None:
            raise ConfigError(
                "engine vllm",
                f"its build for CPUs gives other logprobs than {setup.policy.ref} if it is shown "
                "pictures, whose positions have three axes",
                next='set generate.engine = "transformers"',
            )
        self.link = ModelLink((setup.base or setup.policy).files.folder)
        with _fatal("could not start"):
            self.llm = self._start()
        # No slot is empty while the last rows of a shard are decoded.
        self.ahead = self.llm.llm_engine.vllm_config.scheduler_config.max_num_seqs
        self.info = {
            "name": build.name,
            "version": build.version,
            "dtype": str(self.llm.model_config.dtype).removeprefix("torch."),
            "device": "cpu" if self.cpu else "cuda",
            "logprobs_mode": LOGPROBS_MODE,
        }
        if self.options.logits_dtype != "auto":
            self.info["logits_dtype"] = str(self.llm.model_config.head_dtype).removeprefix("torch.")
        if os.environ.get(vllm_env.BATCH_INVARIANT) == "1":
            self.info["batch_invariant"] = True
        if setup.base:
            self.info["base"] = str(setup.base.ref)
        if self._can_sleep:
            self._architecture = _architecture(setup.policy)

    @staticmethod
    def import_ahead(config: Config) -> None:
        """Import vLLM, which takes seconds and needs no checkpoint."""
        options = parse(VllmOptions, config.options, "generate.options")
        vllm_env.prepare("engine vllm", config.device, batch_invariant=options.batch_invariant)
        from vllm import LLM  # noqa: F401

    def _start(self) -> Any:
        from vllm import LLM

        self.setup.verified()
        # vLLM collects garbage five times as it starts, each time over every object that its import
        # made; frozen objects are skipped.
        gc.freeze()
        model = self.setup.policy
        arguments = self.arguments()
        if self.setup.most_media:
            self._processor = load_processor(model)
            arguments["limit_mm_per_prompt"] = dict(self.setup.most_media)
        if self.setup.base:
            from vllm.config.lora import MaxLoRARanks

            # vLLM allows only some ranks; a smaller one fits under the next allowed one.
            rank = checkpoints.adapter_rank(model)
            ranks = [choice for choice in get_args(MaxLoRARanks) if choice >= rank]
            arguments |= {"enable_lora": True, "max_lora_rank": min(ranks, default=rank)}
        try:
            return LLM(str(self.link.path), **arguments, **self.options.engine_args)
        except ValueError as error:
            # It supports no adapter for this model or of this rank.
            if not self.setup.base or "lora" not in str(error).lower():
                raise
            raise ConfigError(
                "engine vllm",
                f"cannot load the adapter of {model.ref}: {printable(error)}",
                next='train with optimize.lora.save = "merged" and leave options.lora out, or '
                'set generate.engine = "transformers"',
            ) from error

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `vllm.LLM` that follow from the options; None leaves one to
        vLLM."""
        options = self.options
        dtype = self.setup.dtype
        if dtype == "auto":
            from vllm.platforms import current_platform

            has_bf16 = not self.cpu and current_platform.has_device_capability(80)
            dtype = "bfloat16" if has_bf16 else "float32"
        arguments = {
            "dtype": dtype,
            "max_model_len": self.setup.max_model_len,
            "seed": 0,
            "logprobs_mode": LOGPROBS_MODE,
            "generation_config": "vllm",
            "trust_remote_code": False,
            "max_num_seqs": options.max_num_seqs,
            "max_num_batched_tokens": options.max_num_batched_tokens,
            "gpu_memory_utilization": options.gpu_memory_utilization,
            "tensor_parallel_size": options.tensor_parallel_size,
            "enable_prefix_caching": options.enable_prefix_caching,
            "enforce_eager": self.cpu if options.enforce_eager is None else options.enforce_eager,
            "use_tqdm_on_load": False,
        }
        if options.logits_dtype != "auto":
            arguments["hf_overrides"] = {"head_dtype": options.logits_dtype}
        if self._can_sleep:
            arguments["enable_sleep_mode"] = True
        if not self.cpu:
            return arguments
        step_tokens = options.max_num_batched_tokens or _CPU_STEP_TOKENS
        sequences = options.max_num_seqs or _CPU_SEQUENCES
        arguments |= {
            "max_num_seqs": sequences,
            "block_size": vllm_env.CPU_BLOCK,
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(step_tokens, self.setup.max_model_len, sequences),
        }
        if os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
            return arguments
        # Room for max_num_seqs full sequences, at most 40 % of the free memory; vLLM queues
        # sequences that do not fit.
        if options.cpu_kv_cache_gib is not None:
            cache_bytes = int(options.cpu_kv_cache_gib * 2**30)
        else:
            cache_bytes = vllm_env.cpu_cache_bytes(
                checkpoints.model_config(self.setup.policy),
                self.setup.longest or self.setup.max_model_len,
                sequences,
                itemsize=4 if arguments["dtype"] == "float32" else 2,
            )
        return {**arguments, "kv_cache_memory_bytes": cache_bytes}

    @property
    def _can_sleep(self) -> bool:
        """True if this engine may sleep: a later policy then changes only its weights. On a CPU,
        vLLM would reload them wrong."""
        setup = self.setup
        has_more = setup.base or setup.most_media or self.options.engine_args
        return setup.resident and not (self.cpu or has_more)

    def generate(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Yield completions as they finish.

        Up to twice as many requests as fit one batch are in flight, so that no slot is empty.
        """
        from vllm import SamplingParams, TokensPrompt
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind

        requests = iter(requests)
        adapter = None
        if self.setup.base is not None:
            folder = self.setup.policy.files.path(checkpoints.ADAPTER_FOLDER)
            adapter = LoRARequest("policy", 1, str(folder))
        asked: dict[str, Request] = {}
        room = max(2 * self.ahead, 512)
        while True:
            for request in itertools.islice(requests, room - len(asked)):
                prompt = self._prompt(request)
                if prompt is None:
                    nothing = np.empty(0, np.int32), np.empty(0, np.float32)
                    yield Completion(request.index, *nothing, "abort")
                    continue
                with _fatal("refused its requests"):
                    parameters = SamplingParams(
                        output_kind=RequestOutputKind.FINAL_ONLY,
                        **sampling_parameters(self.setup, request),
                    )
                    (name,) = self.llm.enqueue(
                        TokensPrompt(**prompt), parameters, adapter, use_tqdm=False
                    )
                # vLLM returns "7-1f2e3d4c" here and "7" in its output.
                asked[name.partition("-")[0]] = request
            if not asked:
                return
            with _fatal("failed"):
                outputs = [output for output in self.llm.llm_engine.step() if output.finished]
            for output in outputs:
                yield _completion(asked.pop(output.request_id), output)

    def _prompt(self, request: Request) -> dict[str, Any] | None:
        """Return a prompt in vLLM's form: one placeholder id per medium, which vLLM expands.

        vLLM finds the places of media only by the placeholder id. None if it would put the next
        one at a sampled id.
        """
        if not request.media:
            return {"prompt_token_ids": request.prompt_ids.tolist()}
        ids: list[int] = []
        opened: dict[str, list[Any]] = {}
        end = 0
        for number, medium in enumerate(request.media):
            before = request.prompt_ids[end : medium.start]
            placeholders = self._processor.placeholder_ids
            if any(placeholders[later.modality] in before for later in request.media[number:]):
                return None
            decoded = self._processor.open(medium.modality, medium.content)
            opened.setdefault(medium.modality, []).append(decoded)
            ids += [*before.tolist(), placeholders[medium.modality]]
            end = medium.start + medium.length
        ids += request.prompt_ids[end:].tolist()
        return {"prompt_token_ids": ids, "multi_modal_data": opened}

    def sleep(self) -> bool:
        """Drop weights and cache, but keep what was compiled and recorded for the GPU."""
        if not self._can_sleep:
            return False
        self.link.release()  # it reads no more files
        self.llm.sleep(level=2)
        return True

    def take(self, setup: Setup) -> bool:
        """Load the weights of `setup.policy` in place of the previous ones.

        Returns False, and loads nothing, unless an engine made from `setup` would differ from this
        one only in its weights. The settings that are part of each request (sampling, ends) may
        differ.
        """
        before = self.setup
        if parse(VllmOptions, setup.options, "generate.options") != self.options:
            return False
        if (setup.dtype, setup.device) != (before.dtype, before.device):
            return False
        if setup.base or setup.most_media or setup.max_model_len > self._max_model_len:
            return False
        # These positions depend on the maximum row length.
        if setup.max_model_len != self._max_model_len and "longrope" in str(self._architecture):
            return False
        policies = (before.policy, setup.policy)
        tokenizers = {checkpoints.model_entry("policy", policy).tokenizer for policy in policies}
        if len(tokenizers) > 1 or _architecture(setup.policy) != self._architecture:
            return False
        # Loading needs room for the weights only, so the cache wakes up later.
        self.llm.wake_up(["weights"])
        folder = str(setup.policy.files.folder)
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
        is_awake = self.llm.wake_up(["kv_cache"])
        # The cached prefixes were computed with the previous weights.
        is_empty = self.llm.reset_prefix_cache()
        self.setup = setup
        return is_awake and is_empty

    def close(self) -> None:
        """End the engine and its processes."""
        # vLLM's shutdown collects garbage: two passes over every object take a second and free
        # little.
        collect = gc.collect
        gc.collect = lambda *_: 0
        try:
            self.llm.llm_engine.engine_core.shutdown()
        finally:
            gc.collect = collect
        del self.llm
        self.link.release()


def _architecture(policy: Version) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """Return what vLLM builds the model from, besides the weights' values.

    These are the config with all defaults filled in, and the names and shapes of the weights.
    """
    from transformers import AutoConfig

    folder = policy.files.folder
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    # Where and with which versions it was saved; the engine computes in its own dtype.
    ignored = {"_name_or_path", "transformers_version", "dtype", "torch_dtype"}
    settings = {name: setting for name, setting in config.to_dict().items() if name not in ignored}
    shapes = {name: shape for name, (_, shape) in stored_weights(folder).items()}
    return settings, shapes


def _fatal(problem: str) -> AbstractContextManager[None]:
    return vllm_env.fatal(
        "engine vllm",
        problem,
        "run the same command again; for lack of memory, lower options.max_num_seqs or "
        "gpu_memory_utilization",
    )


def _completion(request: Request, output: Any) -> Completion:
    index = request.index
    answer = output.outputs[0]
    if request.media and list(output.prompt_token_ids) != request.prompt_ids.tolist():
        raise SchemaError(
            "engine vllm",
            f"row {index}: it read {len(output.prompt_token_ids)} ids, which are not the "
            f"{len(request.prompt_ids)} that were rendered with the prompt's pictures or clips",
            next='set generate.engine = "transformers"',
        )
    ids = np.array(answer.token_ids, np.int32)
    stop_reason = None
    if answer.finish_reason == "stop":
        stop_reason = str(ids[-1] if answer.stop_reason is None else answer.stop_reason)
    logprobs = np.array(answer.logprobs.logprobs, np.float32)
    return Completion(index, ids, logprobs, answer.finish_reason, stop_reason)
