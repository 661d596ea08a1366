"""Run by test_generate_vllm_lora.py in a process of its own: what vLLM greedily answers under three
policies, as references.

python -m tests.stages.generate.lora_checks STORE PROMPTS POLICY:with_adapter ...
"""

from __future__ import annotations

import json
import sys

from quiver.stages.common.runtime.runner import run_stage

SAMPLING = {"temperature": 0, "max_tokens": 12}


def main() -> None:
    store, prompts = sys.argv[1:3]
    out = []
    for asked in sys.argv[3:]:
        policy, _, how = asked.partition(":")
        options = {"max_num_seqs": 16, "cpu_kv_cache_gib": 0.01, "lora": how == "adapter"}
        given = {
            "samples_per_prompt": 1,
            "dtype": "float32",
            "options": options,
            "sampling": SAMPLING,
        }
        ref = run_stage("generate", given, store, in_process=True, prompts=prompts, policy=policy)
        out.append(str(ref))
    print(json.dumps(out))


if __name__ == "__main__":
    main()
