"""A reward model's pass over many inputs, by vLLM's pooling runner: ids in, raw logits out.

vLLM would put a sigmoid or softmax over them; it is told not to. A judge becomes a classifier of
one logit, that of `token` less that of `against`. The engine lives as long as its scorer; one that
fails is not used again.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quiver.stages.common.models import vllm_env

if TYPE_CHECKING:
    import numpy as np

    from .config import ModelConfig

_CPU_SEQUENCES = 64  # that the cache of a CPU has room for


class Pooling:
    """`vllm.LLM` with its pooling runner."""

    def __init__(self, folder: Path, config: ModelConfig, words: list[str]) -> None:
        """`words`: the judge's two tokens as its vocabulary spells them; none: a classifier.
        ConfigError, ResourceError."""
        self._who, self._judge = f"reward model {config.name}", bool(words)
        build = vllm_env.prepare(self._who, config.device)
        auto = "float32" if build.cpu else "bfloat16"
        arguments: dict[str, Any] = {
            "runner": "pooling",
            "dtype": auto if config.dtype == "auto" else config.dtype,
            "max_model_len": config.max_tokens,
            "max_num_batched_tokens": config.token_budget,
            "seed": 0,
            "trust_remote_code": False,
            "enforce_eager": build.cpu,
            "use_tqdm_on_load": False,
            **({"hf_overrides": _as_classifier(folder, words)} if words else {}),
            **(_cpu_arguments(folder, config) if build.cpu else {}),
            **config.engine_args,
        }
        with self._fatal("could not start"):
            from vllm import LLM, PoolingParams

            self._llm = LLM(str(folder), **arguments)
            self._raw = PoolingParams(use_activation=False)

    def score(self, inputs: list[list[int]], groups: list[int]) -> np.ndarray:
        """[inputs, values] float32: a classifier's logits; a judge's logit of its word against the
        other, and 0."""
        import numpy as np
        from vllm import TokensPrompt

        prompts = [TokensPrompt(prompt_token_ids=ids) for ids in inputs]
        with self._fatal("failed"):
            found = self._llm.classify(prompts, pooling_params=self._raw, use_tqdm=False)
        values = np.array([each.outputs.probs for each in found], np.float32)
        return np.pad(values, ((0, 0), (0, 1))) if self._judge else values

    def _fatal(self, what: str) -> Any:
        return vllm_env.fatal(
            self._who,
            what,
            "run the same command again; for lack of memory, set engine_args = { "
            "gpu_memory_utilization = 0.5 }",
        )

    def close(self) -> None:
        """End the engine and its processes."""
        self._llm.llm_engine.engine_core.shutdown()
        del self._llm


def _as_classifier(folder: Path, words: list[str]) -> dict[str, Any]:
    """What makes vLLM read a language model as a classifier: its one weight is the head's row of
    `token` less that of `against`."""
    architecture = json.loads((folder / "config.json").read_bytes())["architectures"][0]
    token, against = words
    return {
        "architectures": [architecture.replace("ForCausalLM", "ForSequenceClassification")],
        "classifier_from_token": [against, token],
        "method": "from_2_way_softmax",
    }


def _cpu_arguments(folder: Path, config: ModelConfig) -> dict[str, Any]:
    about = json.loads((folder / "config.json").read_bytes())
    length = (
        config.max_tokens or {**about, **about.get("text_config", {})}["max_position_embeddings"]
    )
    arguments: dict[str, Any] = {"block_size": vllm_env.CPU_BLOCK}
    if not os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
        arguments["kv_cache_memory_bytes"] = vllm_env.cpu_cache_bytes(
            about, length, _CPU_SEQUENCES, 4
        )
    return arguments
