"""The two frozen stores of `stores/` and `expected.json`, as the code of 2026-11-23 (d82498f) wrote them. NOT to be run again.

    PYTHONPATH=. python tests/golden/make_stores.py

What it made is the promise of HOUSE.md, "keys do not move": a store that an earlier Quiver wrote is "already done" to a later one,
and what an earlier one left half done is finished by a later one without doing again what is whole. Made anew by later code the
stores would only say that this code agrees with itself. The script stays as a record of how they came about.

  * `stores/inputs`    what a user has: rows, templates, functions, an algorithm, an engine, a model. The working directory of every
                       call, so that no manifest holds a path of the machine. Not to be formatted: their hashes are in the keys
  * `stores/finished`  every stage, finished. `expected.json` "finished": each call with the reference that it found again;
                       "keys": calls that were never made, with the run_key that they would have (engine vllm, reward models, …)
  * `stores/half`      what processes left that ended by SIGKILL: of their own hand, at a line that `_die_at` names, in a child that
                       this script starts. "half": each call, the staged shards with their sha256, the files that are torn, and
                       the reference under which a copy of the store was finished by the same code
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")

HERE = Path(__file__).parent
STORES = HERE / "stores"
INPUTS, FINISHED, HALF = STORES / "inputs", STORES / "finished", STORES / "half"

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
    "source": "deployments.recipes.larger:rows",
    "arguments": {"split": "train"},
    "group_id": "group_id",
    "messages": "messages",
    "limit": 2,
}
QUESTIONS = {"source": "questions.jsonl", "prompt": "question", "limit": 4, "seed": 7}


def call(
    name: str, stage: str, config: dict[str, Any], into: str | None = None, **refs: Any
) -> dict[str, Any]:
    """One call of a stage, as `expected.json` holds it."""
    return {
        "name": name,
        "stage": stage,
        "config": config,
        "refs": refs,
        "into": into,
        "share": False,
    }


# The calls that are made, in this order; each finds what those before it made
CALLS = [
    call(
        "a model that a function in a file makes",
        "policy",
        {"model": "model.py:make", "arguments": {"seed": 0}},
        "golden",
    ),
    call("a model directory", "policy", {"model": "model"}, "folder"),
    call(
        "rows of JSONL, first part of a shuffle", "prompt", {**QUESTIONS}, policy="golden/policy@0"
    ),
    call("the next part", "prompt", {**QUESTIONS, "iteration": 1}, policy="golden/policy@0"),
    call("a generator by dotted module path", "prompt", LARGER, policy="golden/policy@0"),
    call(
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
        "token ids",
        "prompt",
        {"source": "ids.jsonl", "limit": 2, "seed": 1},
        policy="golden/policy@0",
    ),
    call(
        "held-out rows",
        "prompt",
        {"source": "held_out.jsonl", "prompt": "question"},
        "held",
        policy="golden/policy@0",
    ),
    call(
        "sampled by transformers",
        "generate",
        SAMPLED,
        prompts="golden/prompts@1",
        policy="golden/policy@0",
    ),
    call("scripted", "generate", RANDOM, prompts="golden/prompts@3", policy="golden/policy@0"),
    call(
        "a script in a file",
        "generate",
        {**RANDOM, "options": {"script": "answers.py:answer", "logprob": -1.0}},
        prompts="golden/prompts@4",
        policy="golden/policy@0",
    ),
    call(
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
        "other sampling, other runtime knobs",
        "generate",
        {
            **SAMPLED,
            "sampling": {"max_tokens": 3, "temperature": 0.7, "top_p": 0.9, "stop_token_ids": [5]},
            "options": {"batch_size": 2},
            "rows_per_shard": 8,
            "iteration": 1,
            "max_model_len": 300,
        },
        prompts="golden/prompts@5",
        policy="folder/policy@0",
    ),
    call("builtin and own functions", "reward", MIXED, rollouts="golden/rollouts@1"),
    call("a builtin function, clipped", "reward", LENGTH, rollouts="golden/rollouts@2"),
    call("a function that fails", "reward", FLAKY, rollouts="golden/rollouts@3"),
    call(
        "what failed, again",
        "reward",
        FLAKY,
        rollouts="golden/rollouts@3",
        retry="golden/rewards@3",
    ),
    call(
        "a person's word", "override", {}, rewards="golden/rewards@1"
    ),  # its config is filled in when the rollouts are there
    call(
        "logprobs of the reference",
        "logprobs",
        {"role": "ref"},
        rollouts="golden/rollouts@1",
        policy="folder/policy@0",
    ),
    call(
        "proximal logprobs",
        "logprobs",
        {"role": "prox", "precision": "fp32", "packing": "single"},
        rollouts="golden/rollouts@1",
        policy="golden/policy@0",
    ),
    call(
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
        "average",
        "average",
        {"rate": 0.25},
        "golden.ref",
        reference="golden/policy@0",
        policy="golden/policy@1",
    ),
    call(
        "sampled by the second policy",
        "generate",
        SAMPLED,
        prompts="golden/prompts@2",
        policy="golden/policy@1",
    ),
    call("its rewards", "reward", MIXED, rollouts="golden/rollouts@6"),
    call(
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
        "an algorithm in a file",
        "optimize",
        {**ALONE, "algorithm": "algo.py:ALGORITHM", "clip_low": 0.15},
        "own",
        policy="golden/policy@0",
        rollouts="golden/rollouts@1",
        rewards="golden/rewards@1",
    ),
    call(
        "adapters",
        "optimize",
        {**ALONE, "algorithm": "rloo", "lora": {"rank": 2, "alpha": 4}},
        "lora",
        policy="golden/policy@0",
        rollouts="golden/rollouts@1",
        rewards="golden/rewards@1",
    ),
    call(
        "a critic",
        "optimize",
        {**ALONE, "algorithm": "ppo", "critic_warmup_steps": 1, "epochs": 2},
        "ppo",
        policy="golden/policy@0",
        rollouts="golden/rollouts@1",
        rewards="golden/rewards@1",
    ),
    call(
        "held-out, before",
        "generate",
        {**SAMPLED, "samples_per_prompt": 2},
        prompts="held/prompts@1",
        policy="golden/policy@0",
    ),
    call(
        "held-out, after",
        "generate",
        {**SAMPLED, "samples_per_prompt": 2},
        prompts="held/prompts@1",
        policy="golden/policy@2",
    ),
    call("rewards of it, before", "reward", MIXED, rollouts="held/rollouts@1"),
    call("rewards of it, after", "reward", MIXED, rollouts="held/rollouts@2"),
    call(
        "an evaluation",
        "evaluate",
        {"k": [1, 2], "threshold": 0.3},
        rollouts="held/rollouts@1",
        rewards="held/rewards@1",
    ),
    call(
        "an evaluation against a baseline",
        "evaluate",
        {"k": [1, 2], "threshold": 0.3},
        rollouts="held/rollouts@2",
        rewards="held/rewards@2",
        baseline="held/evaluations@1",
    ),
    call(
        "of one part",
        "evaluate",
        {"score": "polite"},
        rollouts="held/rollouts@2",
        rewards="held/rewards@2",
    ),
]

# Other words for a call that was made: the same version answers
ALIKE = [
    call("through a tag", "generate", {**SAMPLED, "samples_per_prompt": 2}, prompts="held/prompts@1", policy="golden/policy@prod"),
    call("a path with a folder", "prompt", {**QUESTIONS, "source": "./questions.jsonl"}, policy="golden/policy@0"),
    call("other weights, same tokenizer", "prompt", QUESTIONS, policy="golden/policy@2"),
    call(
        "other runtime knobs",
        "generate",
        {**SAMPLED, "options": {"batch_size": 3}, "rows_per_shard": 5, "device": "cpu", "patience_seconds": 1.0},
        prompts="golden/prompts@1",
        policy="golden/policy@0",
    ),
    call("others of a reward", "reward", {**MIXED, "workers": 1, "batch_rows": 3}, rollouts="golden/rollouts@1"),
    call(
        "defaults written out",
        "optimize",
        {**TRAIN, "algorithm": "dapo", "epochs": 2, "max_staleness": 1, "schedule": "cosine", "total_steps": 90, "clip_high": 0.28,
         "aggregation": "token_mean", "token_budget": 77, "lora": None},
        policy="golden/policy@1",
        rollouts=["golden/rollouts@1", "golden/rollouts@6"][::-1],
        rewards=["golden/rewards@6", "golden/rewards@1"],
    ),
]  # fmt: skip

ALGORITHMS = (
    *("grpo", "bnpo", "dapo", "dr_grpo", "rloo", "gspo", "cispo", "sapo"),
    *("reinforce_pp", "reinforce_pp_baseline", "ppo"),
)
_AT = {"prompts": "golden/prompts@1", "policy": "golden/policy@0"}
_ON = {"policy": "golden/policy@0", "rollouts": "golden/rollouts@1", "rewards": "golden/rewards@1"}
JUDGE = {
    "model": "model",
    "kind": "token",
    "token": "Y",
    "against": "N",
    "dtype": "float32",
    "name": "judge",
}
# What is not made here, for want of an engine, a server or size: its key is held all the same
KEYS = [
    call("vllm as it is", "generate", {}, **_AT),
    call(
        "vllm",
        "generate",
        {"options": {"lora": True, "max_num_seqs": 8, "engine_args": {"kv_cache_dtype": "fp8"}}},
        **_AT,
    ),
    call(
        "vllm, the demo's",
        "generate",
        {"dtype": "float32", "sampling": {"max_tokens": 12, "temperature": 1.0}},
        **_AT,
    ),
    call("engine transformers as it is", "generate", {"engine": "transformers"}, **_AT),
    call(
        "left out where too long", "generate", {"engine": "transformers", "overlong": "drop"}, **_AT
    ),
    call(
        "the demo's reward",
        "reward",
        {
            "functions": [
                {"use": "numeric", "name": "accuracy"},
                {"use": "format", "weight": 0.2, "arguments": {"pattern": r"\s*Answer: \d+\s*"}},
            ]
        },
        rollouts="golden/rollouts@1",
    ),
    call(
        "a reward by dotted module path",
        "reward",
        {"functions": [{"use": "mine:polite"}]},
        rollouts="golden/rollouts@1",
    ),
    call("a reward model", "reward", {"models": [JUDGE]}, rollouts="golden/rollouts@1"),
    call(
        "reward servers",
        "reward",
        {
            "servers": [
                {"dialect": "quiver", "urls": ["http://127.0.0.1:8700"], "columns": ["answer"]},
                {
                    "dialect": "openai-judge",
                    "urls": ["http://127.0.0.1:8701"],
                    "model": "m",
                    "range": [0, 10],
                    "rescale": True,
                },
                {
                    "dialect": "vllm-score",
                    "urls": ["http://127.0.0.1:8702/score"],
                    "revision": "2",
                    "batch_rows": 4,
                },
            ]
        },
        rollouts="golden/rollouts@1",
    ),
    *(call(f"algorithm {name}", "optimize", {"algorithm": name}, **_ON) for name in ALGORITHMS),
    call(
        "a critic of its own",
        "optimize",
        {"algorithm": "ppo", "critic": "model", "gamma": 0.9, "gae_lambda": 1.0},
        **_ON,
    ),
    call(
        "some layers' adapters",
        "optimize",
        {"lora": {"target_modules": ["q_proj", "v_proj"]}},
        **_ON,
    ),
    call(
        "many options",
        "optimize",
        {
            "algorithm": "gspo",
            "token_form": True,
            "on_length": "mask",
            "audit": {"enabled": False},
            "precision": "bf16",
            "dual_clip": 3.0,
            "betas": [0.9, 0.95],
            "weight_decay": 0.01,
            "score_after": True,
            "max_completion_tokens": 64,
            "drop_zero_variance": True,
            "seed": 3,
        },
        **_ON,
    ),
    call(
        "a policy by dotted module path",
        "policy",
        {"model": "model:make", "arguments": {"seed": 1, "hidden": 8}},
        "other",
    ),
    call(
        "a policy of this repository's",
        "policy",
        {"model": "deployments.recipes.t5_digits:prepare"},
        "t5",
    ),
    call(
        "rows of this repository's",
        "prompt",
        {**LARGER, "arguments": {"split": "held_out", "seed": "night"}},
        policy=_AT["policy"],
    ),
    call(
        "a reward of this repository's",
        "reward",
        {"functions": [{"use": "deployments.recipes.t5_digits:in_place"}]},
        rollouts="golden/rollouts@1",
    ),
    call(
        "logprobs in bfloat16",
        "logprobs",
        {"precision": "bf16_pure"},
        rollouts="golden/rollouts@1",
        policy="golden/policy@1",
    ),
    call(
        "another average",
        "average",
        {"rate": 0.5},
        "golden.ref",
        reference="folder/policy@0",
        policy="golden/policy@2",
    ),
    call("k of 1", "evaluate", {}, rollouts="held/rollouts@2", rewards="held/rewards@2"),
]

SCRIPTED = {**RANDOM, "options": {"script": "answers.py:answer"}, "rows_per_shard": 4}
UNCHECKED = {**TRAIN, "audit": {"enabled": False}, "minibatches": 2}
_LEARN = {"policy": "h/policy@0", "rollouts": "h/rollouts@1", "rewards": "h/rewards@1"}
# What the half store holds besides: finished by ordinary calls
GROUND = [
    call("policy", "policy", {"model": "model.py:make", "arguments": {"seed": 0}}, "h"),
    call("three prompts", "prompt", {"source": "ids.jsonl", "limit": 3}, policy="h/policy@0"),
    call("all prompts", "prompt", {"source": "ids.jsonl"}, policy="h/policy@0"),
    call("12 rollouts", "generate", RANDOM, prompts="h/prompts@1", policy="h/policy@0"),
    call(
        "516 rollouts",
        "generate",
        SCRIPTED | {"rows_per_shard": 256},
        prompts="h/prompts@2",
        policy="h/policy@0",
    ),
    call("rewards", "reward", LENGTH, rollouts="h/rollouts@1"),
]
# What is ended by SIGKILL, and where: behind so many shards, the next one written but without its note; or at a step of optimize
KILLED = [
    (call("generate", "generate", SCRIPTED, "cut", prompts="h/prompts@1", policy="h/policy@0"), 2),
    (
        call(
            "generate, shared",
            "generate",
            SCRIPTED | {"seed": 1},
            "shared",
            prompts="h/prompts@1",
            policy="h/policy@0",
        )
        | {"share": True},
        1,
    ),
    (
        call(
            "reward",
            "reward",
            {"functions": [{"use": "counted.py:counted"}]},
            "scored",
            rollouts="h/rollouts@2",
        ),
        2,
    ),
    (
        call(
            "logprobs",
            "logprobs",
            {"precision": "fp32"},
            "judged",
            rollouts="h/rollouts@2",
            policy="h/policy@0",
        ),
        1,
    ),
    (call("optimize, the checkpoint written", "optimize", UNCHECKED, "train", **_LEARN), "written"),
    (
        call("optimize, all published but the policy", "optimize", UNCHECKED, "between", **_LEARN),
        "published",
    ),
]


def main() -> None:
    """Make both stores and `expected.json`."""
    for folder in (FINISHED, HALF):
        shutil.rmtree(folder, ignore_errors=True)
    if not (INPUTS / "model").is_dir():
        sys.path.insert(0, str(INPUTS))
        from model import make

        (INPUTS / "model").mkdir()
        make(INPUTS / "model", seed=5)
        sys.path.remove(str(INPUTS))
    os.chdir(INPUTS)
    expected = {
        "finished": make_finished(),
        "keys": [key_of(FINISHED, entry) for entry in KEYS],
        "half": make_half(),
    }
    for folder in INPUTS.rglob("__pycache__"):
        shutil.rmtree(folder)
    for entry in (each for part in expected.values() for each in part if each["into"] is None):
        del entry["into"]
    whole = {
        "about": "What tests/golden/test_golden_stores.py expects of stores/; written by make_stores.py, once.",
        **expected,
    }
    (HERE / "expected.json").write_text(json.dumps(whole, indent=1) + "\n")


def make_finished() -> list[dict[str, Any]]:
    """The store in which all is done; its calls with what they made."""
    from stages.common.store import Store

    made = []
    for entry in CALLS:
        if entry["stage"] == "override":
            ids = (
                Store(FINISHED)
                .open(entry["refs"]["rewards"])
                .table(["rollout_id"])["rollout_id"]
                .to_pylist()
            )
            entry["config"] = {
                "author": "ada",
                "reason": "in another unit",
                "overrides": {ids[0]: 1.5, ids[5]: -0.25},
            }
        broken = Path("broken")
        if entry["name"] == "a function that fails":
            broken.touch()
        made.append(perform_one(FINISHED, entry))
        broken.unlink(missing_ok=True)
    store = Store(FINISHED)
    store.tag("golden", "prod", "golden/policy@0", expected=None, why="the base model", key="base")
    about = {
        "night": "n1",
        "decision": "promoted",
        "candidate": "golden/policy@1",
        "evaluation": "held/evaluations@1",
    }
    store.tag(
        "golden",
        "prod",
        "golden/policy@1",
        expected="golden/policy@0",
        why="better",
        key="promote n1",
        about=about,
    )
    store.tag(
        "golden",
        "prod",
        "golden/policy@2",
        expected="golden/policy@1",
        why="better still",
        key="promote n2",
        about=about,
    )
    store.tag("held", "best", "held/evaluations@2")
    # the same work twice: the newer version answers
    from stages.common.process import Call, perform

    again = next(entry for entry in made if entry["name"] == "an evaluation against a baseline")
    outcome = perform(Call(again["stage"], again["config"], FINISHED, again["refs"], force=True))
    again["ref"] = outcome.ref
    made += [perform_one(FINISHED, entry, made_already=True) for entry in ALIKE]
    for entry in made:  # once more, now that all is there
        assert perform_one(FINISHED, entry, made_already=True)["ref"] == entry["ref"], entry["name"]
    return made


def perform_one(
    store: Path, entry: dict[str, Any], *, made_already: bool = False
) -> dict[str, Any]:
    """`entry` with the reference and the run_key of what the call makes, or finds."""
    from stages.common.process import Call, perform

    from stages.common.store import Store

    given = Call(
        entry["stage"], entry["config"], store, entry["refs"], entry["into"], share=entry["share"]
    )
    outcome = perform(given, lookup=made_already)
    assert outcome.cached == made_already, entry["name"]
    print(f"{entry['stage']:9} {outcome.ref:24} {entry['name']}", flush=True)
    return {**entry, "ref": outcome.ref, "run_key": Store(store).open(outcome.ref).manifest.run_key}


def key_of(store: Path, entry: dict[str, Any]) -> dict[str, Any]:
    """`entry` with the run_key that the call would have; it is not made."""
    from stages.common.process import Call, perform
    from stages.common.work import NotDone

    try:
        outcome = perform(
            Call(entry["stage"], entry["config"], store, entry["refs"], entry["into"]), lookup=True
        )
    except NotDone as missing:
        return {**entry, "run_key": missing.work.run_key}
    raise AssertionError(f"{entry['name']} is there: {outcome}")


def make_half() -> list[dict[str, Any]]:
    """The store with what killed processes left; its calls with what finishes them."""
    for entry in GROUND:
        perform_one(HALF, entry)
    half = []
    for number, (entry, _) in enumerate(KILLED):
        done = subprocess.run([sys.executable, __file__, str(number)], cwd=INPUTS, check=False)
        assert done.returncode == -signal.SIGKILL, f"{entry['name']}: {done}"
    with tempfile.TemporaryDirectory() as folder:
        for entry, where in KILLED:
            copy = Path(folder) / entry["into"]
            shutil.copytree(HALF, copy)
            finished = perform_one(copy, entry)
            key = finished["run_key"]
            kind, version = finished["ref"].partition("/")[2].split("@")
            staging = HALF / entry["into"] / kind / ".staging"
            notes, shards = staging / f"{key}.notes", staging / key
            whole = {
                note.name.removesuffix(".json"): json.loads(note.read_bytes())
                for note in sorted(notes.glob("*.arrow.json"))
            }
            torn = sorted(
                path.name for path in shards.glob("part-*.arrow") if path.name not in whole
            )
            assert len(whole) == (where if isinstance(where, int) else 0), entry["name"]
            published = copy / entry["into"] / kind / f"v{int(version):06d}"
            for name, note in whole.items():
                assert note["sha256"] == _sha256(shards / name) == _sha256(published / name), name
            half.append(
                {
                    **finished,
                    "staging": shards.relative_to(HALF).as_posix(),
                    "shards": {name: note["sha256"] for name, note in whole.items()},
                    "torn": torn,
                    "rows": json.loads((published / "manifest.json").read_bytes())["rows"],
                    "published": sorted(
                        path.parent.relative_to(HALF).as_posix()
                        for path in (HALF / entry["into"]).rglob("manifest.json")
                    ),
                }
            )
    return half


def _die_at(where: int | str) -> None:
    """Let this process end by SIGKILL: behind `where` whole shards, or at a step of optimize."""
    from stages.common.work import Work

    def die(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if (
        where == "written"
    ):  # checkpoint and optimizer state are there, and announced; nothing is hashed or published
        from stages.optimize import results

        results.commit = die
    elif where == "published":
        commit = Work.commit
        Work.commit = lambda work, **about: (
            die() if work.kind == "policy" else commit(work, **about)
        )
    else:
        note, noted = Work._note, []

        def count(work: Work, entry: Any) -> None:
            if len(noted) == where:
                die()
            noted.append(entry)
            note(work, entry)

        Work._note = count


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        chosen, place = KILLED[int(sys.argv[1])]
        _die_at(place)
        perform_one(HALF, chosen)
    else:
        main()
