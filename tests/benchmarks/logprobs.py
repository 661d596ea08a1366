"""Saved completions scored again: our logprobs stage (packed, a group's prompt once) against TRL's
per-token logps on padded rows.

    python -m tests.benchmarks.logprobs

SmolLM2-135M in float32 on the same rollouts: groups of 8, prompts of 128 to 256 tokens, completions
of 8 to 64. Logical tokens are those of all rollouts, prompts included, whatever is computed for
them. Ours is the stage's own `score` phase, in which it also tries out its packing; TRL has rows of
one batch at a time, padded as its trainer pads them. Both must give the same numbers.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from .made import RUN, make_rollouts, real_policy
from .side_by_side import answer, machine, make_parser, median, run_side, table, take_turns

GROUPS, GROUP, PROMPT, COMPLETION = 8, 8, 256, 64
SIDES = {"quiver": "Quiver, stage logprobs", "trl": "TRL, per-token logps"}


def main() -> None:
    """Compare, or be one side of a comparison."""
    arguments = make_parser(__doc__, (*SIDES, "make"), repeat=2).parse_args()
    if arguments.side:
        {"quiver": _quiver, "trl": _trl, "make": _make}[arguments.side](arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        arguments.work = Path(folder)
        run_side("logprobs", "make", "--work", folder, *(["--quick"] if arguments.quick else []))
        found = take_turns("logprobs", list(SIDES), arguments, peers=["trl"])
        ours, theirs = (np.load(arguments.work / f"{side}.npy") for side in SIDES)
    rates = {side: median(found[side], "tokens_per_second") for side in SIDES}
    rows = [
        {
            "": SIDES[side],
            "logical tokens/s": f"{rates[side]:.0f}",
            "times": f"{rates[side] / rates['trl']:.2f}",
            "peak GB": f"{median(found[side], 'peak_gb'):.1f}",
        }
        for side in SIDES
    ]
    gap = float(np.abs(ours - theirs).max())
    print(machine(), table(rows), f"Largest difference of a logprob: {gap:.1e}.", sep="\n\n")
    if not gap <= 1e-3:
        sys.exit("the two sides do not compute the same logprobs")


# -- sides


def _make(arguments: argparse.Namespace) -> None:
    from quiver.stages.core.store import Store

    store = Store(arguments.work / "store")
    count = (1 if arguments.quick else GROUPS) * GROUP
    make_rollouts(store, real_policy(store), count, PROMPT, COMPLETION, GROUP, ragged=True)
    answer()


def _saved(arguments: argparse.Namespace):
    """The store, the policy, and prompt and completion ids of all rollouts."""
    from quiver.stages.core.store import Store

    store = Store(arguments.work / "store")
    rollouts = store.open(f"{RUN}/rollouts@1").table()
    return (
        store,
        store.open(f"{RUN}/policy@0"),
        *(rollouts[name].to_pylist() for name in ("prompt_ids", "completion_ids")),
    )


def _quiver(arguments: argparse.Namespace) -> None:
    from quiver import run_stage
    from quiver.stages.logprobs.stage import Config

    store, policy, prompts, completions = _saved(arguments)
    made = store.open(
        run_stage(
            "logprobs",
            Config(),
            store,
            rollouts=f"{RUN}/rollouts@1",
            policy=policy.ref,
            force=True,
            in_process=True,
        )
    )
    np.save(arguments.work / "quiver.npy", np.concatenate(made.table()["logprobs"].to_pylist()))
    tokens = sum(map(len, prompts)) + sum(map(len, completions))
    answer(tokens_per_second=tokens / made.manifest.seconds["pass"])


def _trl(arguments: argparse.Namespace) -> None:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    _, policy, prompts, completions = _saved(arguments)
    tokenizer = AutoTokenizer.from_pretrained(policy.files.folder)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    config = GRPOConfig(
        output_dir=str(arguments.work / "trl"), per_device_train_batch_size=GROUP, num_generations=GROUP, bf16=False,
        use_cpu=not torch.cuda.is_available(), report_to=[],
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(policy.files.folder, dtype=torch.float32),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["x"] * GROUP}),
        processing_class=tokenizer,
    )
    left, right = max(map(len, prompts)), max(map(len, completions))
    ids, mask = (
        torch.zeros(len(prompts), left + right, dtype=torch.int64),
        torch.zeros(len(prompts), left + right).int(),
    )
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        place = slice(left - len(prompt), left + len(completion))
        ids[row, place], mask[row, place] = torch.tensor(prompt + completion), 1
    device = trainer.accelerator.device
    with torch.no_grad():
        start = time.monotonic()
        found = trainer._get_per_token_logps_and_entropies(
            trainer.model, ids.to(device), mask.to(device), right, batch_size=GROUP
        )
        seconds = time.monotonic() - start
    np.save(
        arguments.work / "trl.npy", found[0].float().cpu().numpy()[mask[:, left:].bool().numpy()]
    )
    answer(tokens_per_second=int(mask.sum()) / seconds)


if __name__ == "__main__":
    main()
