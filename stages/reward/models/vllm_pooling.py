"""Run a reward model over many inputs with vLLM's pooling runner: ids in, raw logits out.

vLLM's default sigmoid or softmax is turned off. A judge becomes a classifier of one logit, the
difference between the logits of `token` and `against`. The engine lives as long as its scorer. An
engine that failed is not used again.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quiver.stages.model import checkpoints, vllm_env
from quiver.stages.model.devices import engine_gpus, next_gpus, placing, seeing_only
from quiver.stages.model.folder import parse_object

if TYPE_CHECKING:
    import numpy as np

    from .config import ModelConfig

_CPU_SEQUENCES = 64  # sequences that fit into the cache of a CPU


class Pooling:
    """`vllm.LLM` with its pooling runner."""

    def __init__(self, folder: Path, config: ModelConfig, words: list[str]) -> None:
        """Start the engine. Raises ConfigError, ResourceError.

        Args:
            words: The judge's two tokens as its vocabulary spells them; empty for a classifier.
        """
        self._title = config.title
        self._is_judge = bool(words)
        build = vllm_env.prepare(self._title, config.device)
        about = parse_object((folder / "config.json").read_bytes()) or {}
        dtype = config.dtype
        if dtype == "auto":
            dtype = "float32" if build.cpu else "bfloat16"
        arguments: dict[str, Any] = {
            "runner": "pooling",
            "dtype": dtype,
            "max_model_len": config.max_tokens,
            "max_num_batched_tokens": config.token_budget,
            "seed": 0,
            "trust_remote_code": False,
            "enforce_eager": build.cpu,
            "use_tqdm_on_load": False,
        }
        if words:
            token, against = words
            architecture = about["architectures"][0]
            # one weight row: the head's row of `token` minus its row of `against`
            arguments["hf_overrides"] = {
                "architectures": [architecture.replace("ForCausalLM", "ForSequenceClassification")],
                "classifier_from_token": [against, token],
                "method": "from_2_way_softmax",
            }
        if build.cpu:
            arguments["block_size"] = vllm_env.CPU_BLOCK
            if not os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
                longest = config.max_tokens or checkpoints.context_of(about)
                arguments["kv_cache_memory_bytes"] = vllm_env.cpu_cache_bytes(
                    about, longest, _CPU_SEQUENCES, itemsize=4
                )
        with self._fatal("could not start"), placing, ExitStack() as stack:
            from vllm import LLM, PoolingParams

            self.gpus = [] if build.cpu else next_gpus(engine_gpus(config.engine_args))
            if self.gpus:
                stack.enter_context(seeing_only(self.gpus))
            self._llm = LLM(str(folder), **{**arguments, **config.engine_args})
            self._raw = PoolingParams(use_activation=False)

    def score(self, inputs: list[list[int]], groups: list[str]) -> np.ndarray:
        """Return [inputs, values] float32: a classifier's logits, or a judge's logit of `token`
        against `against`, and 0."""
        import numpy as np
        from vllm import TokensPrompt

        prompts = [TokensPrompt(prompt_token_ids=ids) for ids in inputs]
        with self._fatal("failed"):
            outputs = self._llm.classify(prompts, pooling_params=self._raw, use_tqdm=False)
        values = np.array([output.outputs.probs for output in outputs], np.float32)
        return np.pad(values, ((0, 0), (0, 1))) if self._is_judge else values

    def _fatal(self, problem: str) -> AbstractContextManager[None]:
        return vllm_env.fatal(
            self._title,
            problem,
            "run the same command again; for lack of memory, set engine_args = { "
            "gpu_memory_utilization = 0.5 }",
        )

    def close(self) -> None:
        """End the engine and its processes."""
        self._llm.llm_engine.engine_core.shutdown()
        del self._llm
