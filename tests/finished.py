"""A store in which every stage has finished some work, made by the code as it is, for tests of what
reads stores.

    python -m tests.finished FOLDER

`FOLDER/inputs` is the working directory of every call: rows, templates, functions, an algorithm, an
engine and a model of a user's. `FOLDER/finished` is the store.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")

from quiver.stages.core.run.runner import Call, find_or_make
from quiver.stages.core.store import Store

INPUTS = Path(__file__).parent / "inputs"

RANDOM = {"engine": "scripted", "samples_per_prompt": 4, "sampling": {"max_tokens": 4}}
SAMPLED = {
    "engine": "transformers",
    "samples_per_prompt": 4,
    "dtype": "float32",
    "sampling": {"max_tokens": 6},
    "seed": 7,
}
MIXED = {
    "functions": [
        {"use": "length", "arguments": {"target": 3, "tolerance": 3}},
        {"use": "mine.py:polite", "weight": 0.2},
        {
            "use": "mine.py:even",
            "name": "evenness",
            "weight": 0.5,
            "arguments": {"half": 0.5},
            "extra": True,
        },
    ],
    "overlong": {"max_tokens": 6, "cache": 2, "weight": 0.1},
}
LENGTH = {
    "functions": [{"use": "length", "arguments": {"target": 1, "tolerance": 4}}],
    "reward_clip": [0.1, 0.9],
}
FLAKY = {"functions": [{"use": "flaky.py:sometimes"}], "max_invalid": 1.0}
TRAIN = {"learning_rate": 1e-3, "device": "cpu"}
ALONE = {**TRAIN, "save_optimizer": False}
LARGER = {
    "source": "quiver.deployments.recipes.larger:rows",
    "arguments": {"split": "train"},
    "group_id": "group_id",
    "messages": "messages",
    "limit": 2,
}
QUESTIONS = {"source": "questions.jsonl", "prompt": "question", "limit": 4, "seed": 7}


OVERRIDE = {"author": "ada", "reason": "in another unit"}
OVERRIDDEN = {0: 1.5, 5: -0.25}
"""What a person gives a row, by its number: its id is known once the rows are there."""


class Finished(NamedTuple):
    """One call of a stage, and the version that answers it."""

    name: str
    ref: str
    stage: str
    config: dict[str, Any]
    refs: dict[str, Any]
    into: str | None

    def on(self, store: Path | str, **options: Any) -> Call:
        """The call, on this store."""
        config = self.config
        if self.stage == "override":
            rows = Store(store).open(self.refs["rewards"]).table(["rollout_id"]).to_pylist()
            overrides = {rows[index]["rollout_id"]: reward for index, reward in OVERRIDDEN.items()}
            config = {**config, "overrides": overrides}
        return Call(self.stage, config, str(store), self.refs, self.into, **options)


def call(
    ref: str, name: str, stage: str, config: dict[str, Any], into: str | None = None, **refs: Any
) -> Finished:
    """The call that `ref` answers."""
    return Finished(name, ref, stage, config, refs, into)


CALLS = [
    call(
        "golden/policy@0",
        "a model that a function in a file makes",
        "policy",
        {"model": "model.py:make", "arguments": {"seed": 0}},
        "golden",
    ),
    call("folder/policy@0", "a model directory", "policy", {"model": "model"}, "folder"),
    call(
        "golden/prompts@1",
        "rows of JSONL, first part of a shuffle",
        "prompt",
        {**QUESTIONS},
        policy="golden/policy@0",
    ),
    call(
        "golden/prompts@2",
        "the next part",
        "prompt",
        {**QUESTIONS, "round": 2},
        policy="golden/policy@0",
    ),
    call(
        "golden/prompts@3",
        "a generator by dotted module path",
        "prompt",
        LARGER,
        policy="golden/policy@0",
    ),
    call(
        "golden/prompts@4",
        "a generator in a file, raw text",
        "prompt",
        {
            "source": "own_rows.py:rows",
            "arguments": {"count": 3},
            "prompt": "text",
            "raw_text": True,
            "group_id": "name",
        },
        policy="golden/policy@0",
    ),
    call(
        "golden/prompts@5",
        "a template of one's own, no limit",
        "prompt",
        {
            "source": "chats.jsonl",
            "messages": "talk",
            "group_id": "id",
            "group_prefix": "c/",
            "template": "plain.jinja",
        },
        policy="golden/policy@0",
    ),
    call(
        "golden/prompts@6",
        "token ids",
        "prompt",
        {"source": "ids.jsonl", "limit": 2, "seed": 1},
        policy="golden/policy@0",
    ),
    call(
        "held/prompts@1",
        "held-out rows",
        "prompt",
        {"source": "held_out.jsonl", "prompt": "question"},
        "held",
        policy="golden/policy@0",
    ),
    call(
        "golden/rollouts@1",
        "sampled by transformers",
        "generate",
        SAMPLED,
        prompts="golden/prompts@1",
        policy="golden/policy@0",
    ),
    call(
        "golden/rollouts@2",
        "scripted",
        "generate",
        RANDOM,
        prompts="golden/prompts@3",
        policy="golden/policy@0",
    ),
    call(
        "golden/rollouts@3",
        "a script in a file",
        "generate",
        {**RANDOM, "options": {"script": "answers.py:answer", "logprob": -1.0}},
        prompts="golden/prompts@4",
        policy="golden/policy@0",
    ),
    call(
        "golden/rollouts@4",
        "an engine in a file",
        "generate",
        {
            "engine": "engine.py:Engine",
            "samples_per_prompt": 2,
            "sampling": {"max_tokens": 2},
            "options": {"any": [1]},
        },
        prompts="golden/prompts@6",
        policy="golden/policy@0",
    ),
    call(
        "golden/rollouts@5",
        "other sampling, other runtime knobs",
        "generate",
        {
            **SAMPLED,
            "sampling": {"max_tokens": 3, "temperature": 0.7, "top_p": 0.9, "stop_token_ids": [5]},
            "options": {"batch_size": 2},
            "rows_per_shard": 8,
            "round": 1,
            "max_model_len": 300,
        },
        prompts="golden/prompts@5",
        policy="folder/policy@0",
    ),
    call(
        "golden/rewards@1",
        "builtin and own functions",
        "reward",
        MIXED,
        rollouts="golden/rollouts@1",
    ),
    call(
        "golden/rewards@2",
        "a builtin function, clipped",
        "reward",
        LENGTH,
        rollouts="golden/rollouts@2",
    ),
    call(
        "golden/rewards@3", "a function that fails", "reward", FLAKY, rollouts="golden/rollouts@3"
    ),
    call(
        "golden/rewards@4",
        "what failed, again",
        "reward",
        FLAKY,
        rollouts="golden/rollouts@3",
        retry="golden/rewards@3",
    ),
    call("golden/rewards@5", "a person's word", "override", OVERRIDE, rewards="golden/rewards@1"),
    call(
        "golden/logprobs@1",
        "logprobs of the reference",
        "logprobs",
        {"role": "ref"},
        rollouts="golden/rollouts@1",
        policy="folder/policy@0",
    ),
    call(
        "golden/logprobs@2",
        "proximal logprobs",
        "logprobs",
        {"role": "prox", "precision": "fp32", "packing": "single"},
        rollouts="golden/rollouts@1",
        policy="golden/policy@0",
    ),
    call(
        "golden/policy@1",
        "optimize with both logprobs",
        "optimize",
        {
            **TRAIN,
            "kl_coef": 0.1,
            "minibatches": 2,
            "correction": {"mode": "mask", "low": 0.1, "high": 3.0},
        },
        policy="golden/policy@0",
        rollouts="golden/rollouts@1",
        rewards="golden/rewards@5",
        ref_logprobs="golden/logprobs@1",
        prox_logprobs="golden/logprobs@2",
    ),
    call(
        "golden.ref/policy@0",
        "average",
        "average",
        {"rate": 0.25},
        "golden.ref",
        reference="golden/policy@0",
        policy="golden/policy@1",
    ),
    call(
        "golden/rollouts@6",
        "sampled by the second policy",
        "generate",
        SAMPLED,
        prompts="golden/prompts@2",
        policy="golden/policy@1",
    ),
    call("golden/rewards@6", "its rewards", "reward", MIXED, rollouts="golden/rollouts@6"),
    call(
        "golden/policy@2",
        "optimize by moments, with replay",
        "optimize",
        {
            **TRAIN,
            "algorithm": "dapo",
            "epochs": 2,
            "max_staleness": 1,
            "schedule": "cosine",
            "total_steps": 90,
        },
        policy="golden/policy@1",
        rollouts=["golden/rollouts@6", "golden/rollouts@1"],
        rewards=["golden/rewards@1", "golden/rewards@6"],
    ),
    call(
        "own/policy@1",
        "an algorithm in a file",
        "optimize",
        {**ALONE, "algorithm": "algo.py:ALGORITHM", "clip_low": 0.15},
        "own",
        policy="golden/policy@0",
        rollouts="golden/rollouts@1",
        rewards="golden/rewards@1",
    ),
    call(
        "lora/policy@1",
        "adapters",
        "optimize",
        {**ALONE, "algorithm": "rloo", "lora": {"rank": 2, "alpha": 4}},
        "lora",
        policy="golden/policy@0",
        rollouts="golden/rollouts@1",
        rewards="golden/rewards@1",
    ),
    call(
        "ppo/policy@1",
        "a critic",
        "optimize",
        {**ALONE, "algorithm": "ppo", "critic_warmup_steps": 1, "epochs": 2},
        "ppo",
        policy="golden/policy@0",
        rollouts="golden/rollouts@1",
        rewards="golden/rewards@1",
    ),
    call(
        "held/rollouts@1",
        "held-out, before",
        "generate",
        {**SAMPLED, "samples_per_prompt": 2},
        prompts="held/prompts@1",
        policy="golden/policy@0",
    ),
    call(
        "held/rollouts@2",
        "held-out, after",
        "generate",
        {**SAMPLED, "samples_per_prompt": 2},
        prompts="held/prompts@1",
        policy="golden/policy@2",
    ),
    call("held/rewards@1", "rewards of it, before", "reward", MIXED, rollouts="held/rollouts@1"),
    call("held/rewards@2", "rewards of it, after", "reward", MIXED, rollouts="held/rollouts@2"),
    call(
        "held/evaluations@1",
        "an evaluation",
        "evaluate",
        {"k": [1, 2], "threshold": 0.3},
        rollouts="held/rollouts@1",
        rewards="held/rewards@1",
    ),
    call(
        "held/evaluations@2",
        "an evaluation against a baseline",
        "evaluate",
        {"k": [1, 2], "threshold": 0.3},
        rollouts="held/rollouts@2",
        rewards="held/rewards@2",
        baseline="held/evaluations@1",
    ),
    call(
        "held/evaluations@3",
        "of one part",
        "evaluate",
        {"score": "polite"},
        rollouts="held/rollouts@2",
        rewards="held/rewards@2",
    ),
    call(
        "held/evaluations@4",
        "the same work twice",
        "evaluate",
        {"k": [1, 2], "threshold": 0.3},
        rollouts="held/rollouts@2",
        rewards="held/rewards@2",
        baseline="held/evaluations@1",
    ),
]
"""Those that are made, in this order; each finds what those before it made. The last one is made
although its work is done: the newer version answers."""
ALIKE = [
    call(
        "held/rollouts@2",
        "through a tag",
        "generate",
        {**SAMPLED, "samples_per_prompt": 2},
        prompts="held/prompts@1",
        policy="golden/policy@prod",
    ),
    call(
        "golden/prompts@1",
        "a path with a folder",
        "prompt",
        {**QUESTIONS, "source": "./questions.jsonl"},
        policy="golden/policy@0",
    ),
    call(
        "golden/prompts@1",
        "other weights, same tokenizer",
        "prompt",
        QUESTIONS,
        policy="golden/policy@2",
    ),
    call(
        "golden/rollouts@1",
        "other runtime knobs",
        "generate",
        {
            **SAMPLED,
            "options": {"batch_size": 3},
            "rows_per_shard": 5,
            "device": "cpu",
            "patience_seconds": 1.0,
        },
        prompts="golden/prompts@1",
        policy="golden/policy@0",
    ),
    call(
        "golden/rewards@1",
        "others of a reward",
        "reward",
        {**MIXED, "workers": 1, "batch_rows": 3},
        rollouts="golden/rollouts@1",
    ),
    call(
        "golden/policy@2",
        "defaults written out",
        "optimize",
        {
            **TRAIN,
            "algorithm": "dapo",
            "epochs": 2,
            "max_staleness": 1,
            "schedule": "cosine",
            "total_steps": 90,
            "clip_high": 0.28,
            "aggregation": "token_mean",
            "token_budget": 77,
            "lora": None,
        },
        policy="golden/policy@1",
        rollouts=["golden/rollouts@1", "golden/rollouts@6"][::-1],
        rewards=["golden/rewards@6", "golden/rewards@1"],
    ),
]
"""Other words for a call that was made: the same version answers."""


def make_inputs(folder: Path) -> None:
    """Make `folder`, with what a user has."""
    shutil.copytree(INPUTS, folder)
    sys.path.insert(0, str(folder))
    from model import make

    make(folder / "model", seed=5)


def make_finished(folder: Path) -> None:
    """Make `folder/inputs` and `folder/finished`."""
    make_inputs(folder / "inputs")
    os.chdir(folder / "inputs")
    store = Store(folder / "finished")
    for entry in CALLS:
        broken = Path("broken")
        if entry.name == "a function that fails":
            broken.touch()
        outcome = find_or_make(entry.on(store.url, force=entry is CALLS[-1]), store)
        broken.unlink(missing_ok=True)
        assert (outcome.ref, outcome.cached) == (entry.ref, False), entry.name
    about = {
        "night": "n1",
        "decision": "promoted",
        "candidate": "golden/policy@1",
        "evaluation": "held/evaluations@1",
    }
    store.tag("golden", "prod", "golden/policy@0", None, why="the base model", key="base")
    for number, why in ((1, "better"), (2, "better still")):
        before, after = (f"golden/policy@{each}" for each in (number - 1, number))
        key = f"promote n{number}"
        store.tag("golden", "prod", after, before, why=why, key=key, about=about)
    store.tag("held", "best", "held/evaluations@2")


if __name__ == "__main__":
    make_finished(Path(sys.argv[1]))
