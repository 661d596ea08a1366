"""Families of language models that are known to train, so that importing one needs no trial.

A model of any other family is tried at its import, before anything is sampled from it. _TRAINED is
generated, together with the table for readers (deployments/docs/architectures.md).

Not of the spine: a list of names.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quiver.schemas.errors import ConfigError, printable
from quiver.stages.common.models.folder import PROCESSOR_FILES, load_errors, parse_object

if TYPE_CHECKING:
    from transformers import ProcessorMixin

log = logging.getLogger(__name__)

# generated: python -m tests.architectures --update
_TRAINED = """
    afmoe apertus arcee aria_text axk1 axk2 bamba bart biogpt bitnet blenderbot blenderbot-small
    bloom codegen cohere cohere2 cohere2_moe cohere_compass_text ctrl cwm dbrx deepseek_v2
    deepseek_v3 deepseek_v32 deepseek_v4 diffllama doge dots1 ernie4_5 ernie4_5_moe exaone4
    exaone_moe falcon falcon_h1 falcon_mamba flex_olmo fuyu gemma gemma2 gemma3 gemma3_text
    gemma3n_text gemma4 gemma4_text gemma4_unified gemma4_unified_text git glm glm4 glm4_moe
    glm4_moe_lite glm_moe_dsa got_ocr2 gpt2 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gpt_oss
    gptj granite granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared helium
    hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 hyperclovax inkling_text jais2 jamba jetmoe
    kimi_linear laguna led lfm2 lfm2_moe llama llama4 llama4_text longcat_flash longt5 m2m_100 mamba
    mamba2 marian mbart mellum mimo_v2_flash minicpm3 minimax minimax_m2 minimax_m3_vl_text
    ministral ministral3 mistral mixtral moshi mpt mt5 mvp nanochat nemotron nemotron_h nllb-moe
    olmo olmo2 olmo3 olmo_hybrid olmoe openai-gpt opt pegasus pegasus_x persimmon phi phi3
    phi4_multimodal phimoe plbart qwen2 qwen2_moe qwen3 qwen3_5 qwen3_5_moe qwen3_5_moe_text
    qwen3_5_text qwen3_moe qwen3_next qwen4_exp qwen4_exp_text recurrent_gemma rwkv seamless_m4t
    seamless_m4t_v2 seed_oss smollm3 solar_open stablelm starcoder2 switch_transformers t5 t5gemma
    t5gemma2 trocr umt5 vaultgemma xglm xlstm youtu zamba zamba2 zaya
"""
TRAINED = {*_TRAINED.split()}
"""The `model_type` of each family that is known to train."""
UNPADDED = {"deepseek_v4", "git", "minimax_m3_vl_text", "trocr"}
"""Families in which padding before a prompt changes the numbers after it, despite the mask. All
prompts of one batch must then have the same length."""
NOT_SAMPLED = {"hrm_text", "moshi", "rwkv", "xlstm"}
"""Families whose code in transformers gives wrong numbers, or fails, when it reads a row id by id.
Engine `transformers` refuses them."""


def types_of(config: Any) -> set[str]:
    """Return the `model_type` of a loaded config and of its text part."""
    return {config.model_type, config.get_text_config().model_type}


def require_processor(folder: Path, name: str) -> None:
    """Raise ConfigError if the model reads pictures and its processor cannot be loaded here.

    Many processors need torchvision.
    """
    if any((folder / file).is_file() for file in PROCESSOR_FILES):
        load_folders_processor(folder, name)


def load_folders_processor(folder: Path, name: str) -> ProcessorMixin:
    """Return the processor of a model directory. Raises ConfigError about model `name`."""
    from transformers import AutoProcessor

    title = f"model {name}"
    try:
        with load_errors(title):
            return AutoProcessor.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
    except ConfigError as error:
        if isinstance(error.__cause__, ImportError):
            problem = printable(" ".join(str(error.__cause__).split()))
            next = "install what it needs, or take a model whose processor works without"
            raise ConfigError(title, f"its processor: {problem}", next=next) from None
        raise


def require_trainable(folder: Path, name: str) -> None:
    """Raise ConfigError if models of this architecture cannot be trained.

    Checked at import, before rollouts are paid for.
    """
    about = parse_object((folder / "config.json").read_bytes()) or {}
    if str(about.get("model_type")) in {
        *TRAINED,
        "None",
    }:  # a config without model_type is left to the loader, whose error is clearer
        return
    from transformers import AutoConfig

    from quiver.stages.common.forward.architecture import judge

    title = f"model {name}"
    with load_errors(title):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        verdict = judge(config)
    verdict.require(title)
    if not verdict.tried:
        log.warning("%s may not train: %s", title, verdict.reason)
