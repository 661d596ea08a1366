"""Run by test_generate_vllm_lora.py in its own process: prints references of the rollouts that vLLM
samples greedily.

python -m tests.stages.generate.lora_checks STORE PROMPTS POLICY:with_adapter ...
"""

from __future__ import annotations

import json
import sys

from quiver.stages.core.run.runner import run_stage


def main() -> None:
    store, prompts = sys.argv[1:3]
    refs = []
    for argument in sys.argv[3:]:
        policy, _, way = argument.partition(":")
        options = {"max_num_seqs": 16, "cpu_kv_cache_gib": 0.01, "lora": way == "adapter"}
        config = {"samples_per_prompt": 1, "dtype": "float32", "options": options}
        config["sampling"] = {"temperature": 0, "max_tokens": 12}
        inputs = {"prompts": prompts, "policy": policy}
        refs.append(str(run_stage("generate", config, store, in_process=True, **inputs)))
    print(json.dumps(refs))


if __name__ == "__main__":
    main()
