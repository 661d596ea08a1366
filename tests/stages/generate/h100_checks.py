"""Run by test_vllm_on_h100.py in a process of its own: what vLLM makes of our arguments where its
platform is an H100, as JSON on the last line. No engine is started.

python -m tests.stages.generate.h100_checks STORE
"""

from __future__ import annotations

import json
import sys
import types

from quiver.stages.core.store import Store
from quiver.stages.generate.engine import Setup
from quiver.stages.generate.engines import vllm
from quiver.stages.generate.options import Sampling, VllmOptions
from quiver.stages.model.vllm_env import prepare


def fake_platform() -> None:
    """Python sources of vLLM's two builds differ in three files only; what is missing here is
    compiled, and no config needs it."""
    sys.modules["vllm._C_stable_libtorch"] = types.ModuleType("vllm._C_stable_libtorch")
    from vllm.platforms import current_platform
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    class H100(CudaPlatformBase):
        get_device_capability = classmethod(lambda _, device_id=0: DeviceCapability(9, 0))
        get_device_name = classmethod(lambda _, device_id=0: "NVIDIA H100 80GB HBM3")
        get_device_total_memory = classmethod(lambda _, device_id=0: 80 << 30)
        get_device_uuid = classmethod(lambda _, device_id=0: "GPU-0")
        is_fully_connected = classmethod(lambda _, device_ids: True)
        log_warnings = classmethod(lambda _: None)
        is_sleep_mode_available = classmethod(lambda _: True)
        is_cumem_allocator_available = classmethod(lambda _: True)

    current_platform.__class__ = H100  # of the one object that every module of vLLM has


def config_of(policy, path: str, *, resident: bool = False, **options):
    """vLLM's whole config for the policy, read from `path`."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext

    engine = vllm.VllmEngine.__new__(vllm.VllmEngine)
    engine.setup = Setup(policy, Sampling(), (1,), max_model_len=128, resident=resident)
    engine.options = VllmOptions(**options)
    engine.cpu = False
    arguments = engine.arguments()
    arguments.pop("use_tqdm_on_load")
    return EngineArgs(model=path, use_tqdm_on_load=False, **arguments).create_engine_config(
        usage_context=UsageContext.LLM_CLASS
    )


def main() -> None:
    store = Store(sys.argv[1], create=False)
    policies = [store.open(ref) for ref in ("tiny/policy@0", "other/policy@0")]
    prepare("test")
    from vllm import ModelRegistry
    from vllm.model_executor.models.llama import LlamaForCausalLM

    # what the architecture's class can do is looked up by importing it, which needs what is compiled
    # for the platform
    ModelRegistry.register_model("LlamaForCausalLM", LlamaForCausalLM)
    fake_platform()
    out: dict = {"by path": [], "by link": []}
    for policy in policies:
        folder = policy.files.folder
        out["by path"].append(config_of(policy, str(folder)).compute_hash())
        vllm._linked.clear()  # as in another process
        link = vllm.ModelLink(folder)
        out["by link"].append(config_of(policy, str(link.path)).compute_hash())
        link.release()
    for name, options in {
        "plain": {},
        "changed": {"max_num_seqs": 64, "logits_dtype": "float32"},
        "resident": {"resident": True},
        "resident with more": {"resident": True, "engine_args": {"kv_cache_dtype": "fp8"}},
    }.items():
        config = config_of(policies[0], str(policies[0].files.folder), **options)
        out[name] = {
            "dtype": str(config.model_config.dtype),
            "head": str(config.model_config.head_dtype),
            "sequences": config.scheduler_config.max_num_seqs,
            "sleeps": config.model_config.enable_sleep_mode,
            "allocator": config.model_config.enable_cumem_allocator,
        }
    print(json.dumps(out))


if __name__ == "__main__":
    main()
