"""The families of language models that are known to train, so that nothing needs to be tried when
one of them is imported; every other one is tried then, before anything is sampled from it.

TRAINED is generated, with the table for people (deployments/docs/architectures.md).

Not of the spine: a list of names.
"""

from __future__ import annotations

from pathlib import Path

from quiver.stages.common.models.folder import load_errors, parse_object

# generated: python -m tests.architectures --update
TRAINED = frozenset(
    """
    llama qwen2 qwen3 gpt2 t5 bart
    """.split()
)
"""The `model_type` of each."""


def require_trainable(folder: Path, name: str) -> None:
    """ConfigError where a model of this architecture can not be trained: told at its import, not
    after its rollouts were paid for."""
    about = parse_object((folder / "config.json").read_bytes()) or {}
    if about.get("model_type") in TRAINED:
        return
    from transformers import AutoConfig

    from quiver.stages.common.forward.architecture import judge

    title = f"model {name}"
    with load_errors(title):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        verdict = judge(config)
    verdict.require(title)
