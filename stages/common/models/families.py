"""The families of language models that are known to train, so that nothing needs to be tried when
one of them is imported; every other one is tried then, before anything is sampled from it.

_TRAINED is generated, with the table for people (deployments/docs/architectures.md).

Not of the spine: a list of names.
"""

from __future__ import annotations

import logging
from pathlib import Path

from quiver.stages.common.models.folder import load_errors, parse_object

log = logging.getLogger(__name__)

# generated: python -m tests.architectures --update
_TRAINED = """
    llama qwen2 qwen3 gpt2 t5 bart
"""
TRAINED = {*_TRAINED.split()}
"""The `model_type` of each."""


def require_trainable(folder: Path, name: str) -> None:
    """ConfigError where a model of this architecture can not be trained: told at its import, not
    after its rollouts were paid for."""
    about = parse_object((folder / "config.json").read_bytes()) or {}
    if about.get("model_type") in {*TRAINED, None}:  # without a type loading tells what is wrong
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
