"""Run by test_optimize_goes_on.py in a process of its own: a training that can import neither vLLM nor
Prefect, and call no tokenizer. Its policy, as JSON on the last line.

python -m tests.stages.optimize.untouched_checks STORE ROLLOUTS REWARDS
"""

import json
import sys

import transformers.tokenization_utils_base as base

from quiver import run_stage


class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("vllm", "prefect"):
            raise ImportError(name)


def refuse(*_, **__):
    raise AssertionError("a tokenizer was called")


sys.meta_path.insert(0, Refuse())
base.PreTrainedTokenizerBase.from_pretrained = base.PreTrainedTokenizerBase.__call__ = refuse
store, rollouts, rewards = sys.argv[1:]
refs = {"policy": "tiny/policy@0", "rollouts": rollouts, "rewards": rewards}
config = {"device": "cpu", "learning_rate": 1e-3}
ref = run_stage("optimize", config, store, in_process=True, **refs)
assert "vllm" not in sys.modules and "prefect" not in sys.modules
print(json.dumps(str(ref)))
