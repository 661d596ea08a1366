"""One optimizer step (loss, backward, clip, AdamW) on the very same rollouts: Quiver against the best
of TRL's GRPOTrainer.

    python -m tests.benchmarks.optimizer_step --shapes 64,64,8 --precisions fp32 --repeat 1
    python -m tests.benchmarks.optimizer_step --model qwen3-0.6b --shapes 512,1024,8 --precisions bf16        # on a GPU

P prompt tokens, C completion tokens, G rollouts of one prompt; logical tokens of a step =
`--groups` · G · (P + C), whatever is computed for them. Both sides start from the same weights,
ids, old logprobs and advantages; the loss and the gradient's norm of the first step must agree,
else the run fails. TRL is fed through its own training loop. A setting of TRL is an allocator
(`glibc` has the variables that our stages set; the others are preloaded beside them), activation
checkpointing or not, rows of one forward pass (all of a step, or 2 with accumulated gradients), and
on a GPU Liger's kernels or not. Each setting runs once, and one that runs out of memory is left
out; then the fastest and the one with the least memory take turns with Quiver. On a GPU memory is
the device's, allocators are not tried, and MFU is the share of `--peak` that the useful FLOPs are:
a group's prompt once, the head at completion positions, nothing computed twice.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from quiver.stages.core.run.stage_process import ENVIRONMENT

from .made import SHAPES, random_policy, real_policy
from .side_by_side import answer, machine, median, run_side, table

MODELS = ("smollm2-135m", *SHAPES)
ALLOCATORS = {
    "glibc": None,
    "tcmalloc": "libtcmalloc_minimal.so.4",
    "jemalloc": "libjemalloc.so.2",
}
"""What the dynamic linker preloads."""
SETTINGS = [
    f"{allocator}/{activations}/{rows}"
    for allocator in ALLOCATORS
    for activations in ("checkpointing", "plain")
    for rows in ("all", "2")
]
"""Of TRL."""
ON_A_GPU = [
    f"{setting}{kernels}"
    for setting in SETTINGS
    if setting.startswith("glibc")
    for kernels in ("", "/liger")
]


def main() -> None:
    """Compare, or be one side of a comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--side", choices=("quiver", "trl", "model"))
    parser.add_argument("--work", type=Path)
    parser.add_argument(
        "--model",
        choices=MODELS,
        default=MODELS[0],
        help="the real 135M one, or random weights of a real shape",
    )
    parser.add_argument(
        "--peak",
        type=float,
        default=989e12,
        help="FLOP/s of the GPU; an H100's or H200's in bfloat16 by default",
    )
    parser.add_argument(
        "--shapes", nargs="+", default=["64,64,8", "256,64,8", "512,128,8", "256,64,8,ragged"]
    )
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--steps", type=int, default=2, help="timed steps; one more comes before")
    parser.add_argument("--groups", type=int, default=1, help="groups of one step")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one small shape and two settings: to see that it runs, not to be quoted",
    )
    parser.add_argument(
        "--settings", nargs="*", choices=[*SETTINGS, *ON_A_GPU], help="of TRL; by default all"
    )
    parser.add_argument("--options", default="{}", help="JSON: keys of [optimize]")
    parser.add_argument("--peer-options", default="{}", help="JSON: keys of GRPOConfig")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.shapes, arguments.precisions = ["16,16,4"], ["fp32"]
        arguments.settings = ["glibc/plain/all", "glibc/checkpointing/2"]
    if arguments.side:
        {"quiver": _quiver, "trl": _trl, "model": _model}[arguments.side](arguments)
    else:
        _compare(arguments)


def _compare(arguments: argparse.Namespace) -> None:
    import torch

    if arguments.settings is None:
        arguments.settings = ON_A_GPU if torch.cuda.is_available() else SETTINGS
    with tempfile.TemporaryDirectory() as folder:
        arguments.work = folder
        run_side("optimizer_step", "model", "--work", folder, "--model", arguments.model)
        rows = []
        for shape in arguments.shapes:
            for precision in arguments.precisions:
                rows.append(_row(arguments, shape, precision))
                print(table(rows[-1:]), file=sys.stderr, flush=True)
    print(machine(), f"{arguments.model}.", table(rows), sep="\n\n")


def _row(arguments: argparse.Namespace, shape: str, precision: str) -> dict[str, str]:
    def run(side: str) -> dict:
        """Of Quiver, or of a setting of TRL."""
        name, env = ("quiver", {}) if side == "quiver" else ("trl", _environment(side))
        given = vars(arguments)
        options = [
            f"--{key}={given[key]}" for key in ("work", "steps", "groups", "peak", "options")
        ]
        options += [f"--peer-options={arguments.peer_options}"]
        options += ["--shapes", shape, "--precisions", precision]
        options += [] if side == "quiver" else ["--settings", side]
        return run_side("optimizer_step", name, *options, peers=side != "quiver", env=env)

    tried = {}
    for setting in arguments.settings:
        try:
            tried[setting] = run(setting)
        except SystemExit as failed:
            if "OutOfMemoryError" not in str(failed):
                raise
            print(f"{shape} {precision} {setting}: out of memory", file=sys.stderr)
    for setting, answered in tried.items():
        rate, peak = answered["tokens_per_second"], answered["peak_gb"]
        print(f"{shape} {precision} {setting}: {rate:.0f} tokens/s, {peak:.1f} GB", file=sys.stderr)
    fastest = max(tried, key=lambda setting: tried[setting]["tokens_per_second"])
    smallest = min(tried, key=lambda setting: tried[setting]["peak_gb"])
    sides = dict.fromkeys(["quiver", fastest, smallest])
    answers: dict[str, list[dict]] = {side: [] for side in sides}
    for _ in range(arguments.repeat):
        for side in sides:
            answers[side].append(run(side))
    rates = {side: median(answers[side], "tokens_per_second") for side in sides}
    peaks = {side: median(answers[side], "peak_gb") for side in sides}
    everyone = [answered for side in answers.values() for answered in side] + [*tried.values()]
    norms = [answered["grad_norm"] for answered in everyone]
    losses = [answered["loss"] for answered in everyone]
    row = {
        "P,C,G": shape,
        "precision": precision,
        "Quiver: tokens/s": f"{rates['quiver']:.0f}",
        "GB": f"{peaks['quiver']:.1f}",
        "TRL's fastest": fastest,
        "tokens/s": f"{rates[fastest]:.0f}",
        "GB ": f"{peaks[fastest]:.1f}",
        "times": f"{rates['quiver'] / rates[fastest]:.2f}",
        "memory": f"{peaks['quiver'] / peaks[fastest]:.2f}",
        "TRL's smallest": smallest,
        "tokens/s ": f"{rates[smallest]:.0f}",
        "GB  ": f"{peaks[smallest]:.1f}",
        "memory ": f"{peaks['quiver'] / peaks[smallest]:.2f}",
        "gradient norm": f"{min(norms):.4f} to {max(norms):.4f}",
    }
    if "mfu" in answers["quiver"][0]:
        row |= {"MFU": f"{median(answers['quiver'], 'mfu'):.3f}"}
    allowed = 2e-3 if precision == "fp32" else 5e-2
    if max(norms) - min(norms) > allowed * norms[0] or max(losses) - min(losses) > 1e-4:
        sys.exit(f"the sides do not compute the same loss and gradient: {losses}, {row}")
    return row


def _environment(setting: str) -> dict[str, str]:
    """That of our stages, with the setting's allocator."""
    library = ALLOCATORS[setting.partition("/")[0]]
    return {**ENVIRONMENT, **({"LD_PRELOAD": library} if library else {})}


# -- what both sides read


def _model(arguments: argparse.Namespace) -> None:
    """Import the model once, as policy@0 of a store in the work folder."""
    from quiver.stages.core.store import Store

    store = Store(arguments.work / "store")
    real_policy(store) if arguments.model == MODELS[0] else random_policy(store, arguments.model)
    answer()


def _rollouts(shape: str, groups: int) -> dict[str, np.ndarray]:
    """Prompts [groups, P], completions [groups · G, C] with their lengths [groups · G], advantages
    [groups · G]."""
    sizes = shape.removesuffix(",ragged").split(",")
    prompt, completion, group = (int(size) for size in sizes)
    random = np.random.default_rng(0)
    lengths = np.full(group, completion)
    if shape.endswith("ragged"):
        lengths = np.linspace(completion // 8, completion, group).round().astype(int)
    rewards = random.standard_normal((groups, group))
    centred = rewards - rewards.mean(1, keepdims=True)
    return {
        "prompts": random.integers(20, 40_000, (groups, prompt)),
        "completions": random.integers(20, 40_000, (groups * group, completion)),
        "lengths": np.tile(lengths, groups),
        "advantages": (centred / (rewards.std(1, ddof=1, keepdims=True) + 1e-4))
        .astype(np.float32)
        .ravel(),
    }


def _logical_tokens(rollouts: dict[str, np.ndarray]) -> int:
    return int(len(rollouts["lengths"]) * rollouts["prompts"].shape[1] + rollouts["lengths"].sum())


def _useful_flops(config, rollouts: dict[str, np.ndarray], weights: int) -> float:
    """Of forward and backward pass: 6 a weight and token, 12 a hidden number and pair of tokens
    that see each other."""
    (groups, prompt), lengths = rollouts["prompts"].shape, rollouts["lengths"] - 1
    head = config.vocab_size * config.hidden_size
    pairs = groups * prompt**2 / 2 + float((lengths * prompt + lengths**2 / 2).sum())
    width = config.num_attention_heads * config.head_dim * config.num_hidden_layers
    return (
        6
        * ((weights - head) * (groups * prompt + lengths.sum()) + head * rollouts["lengths"].sum())
        + 12 * width * pairs
    )


def _memory() -> dict[str, float]:
    """On a GPU the device's peak stands in for the process's."""
    import torch

    return {"peak_gb": torch.cuda.max_memory_allocated() / 1e9} if torch.cuda.is_available() else {}


# -- sides


def _quiver(arguments: argparse.Namespace) -> None:
    import torch

    from quiver.stages.core.store import Store
    from quiver.stages.model.forward.layout import Sequences
    from quiver.stages.model.loading import load_model
    from quiver.stages.model.ragged import Ragged
    from quiver.stages.optimize import algorithms
    from quiver.stages.optimize.accelerator import make_accelerator
    from quiver.stages.optimize.batch import Batch
    from quiver.stages.optimize.stage import Config
    from quiver.stages.optimize.trainer import Trainer

    rollouts = _rollouts(arguments.shapes[0], arguments.groups)
    lengths = torch.from_numpy(rollouts["lengths"])
    total, group = len(lengths), len(lengths) // arguments.groups
    completions = np.concatenate(
        [row[:length] for row, length in zip(rollouts["completions"], lengths, strict=True)]
    )
    prompts = torch.from_numpy(rollouts["prompts"].repeat(group, 0)).int()
    data = Sequences(
        Ragged.from_lengths(prompts.flatten(), torch.full((total,), prompts.shape[1])),
        Ragged.from_lengths(torch.from_numpy(completions).int(), lengths),
        torch.ones(total),
    )
    owners = [row // group for row in range(total)]
    batch = Batch(
        data,
        owners,
        owners,
        torch.from_numpy(rollouts["advantages"]),
        torch.zeros(len(completions)),
        None,
        None,
        masked=torch.zeros(total, dtype=torch.bool),
    )
    options = {
        "precision": arguments.precisions[0],
        "epochs": arguments.steps + 1,
        "learning_rate": 1e-6,
    }
    config = Config(
        **{**options, "audit": {"enabled": False}, **json.loads(arguments.options)}
    ).resolved()
    accelerator = make_accelerator(config)
    model = load_model(
        Store(arguments.work / "store").open("bench/policy@0"),
        dtype=torch.float32,
        device=accelerator.device,
    )
    trainer = Trainer(config, model, batch, algorithms.find_algorithm("grpo"), accelerator)
    batch.old_logprobs.copy_(trainer.compute_logprobs(range(total)))
    trainer.train()
    updates = trainer.updates
    seconds = float(np.median([row["seconds"] for row in updates[1:]]))
    numbers = {
        "tokens_per_second": _logical_tokens(rollouts) / seconds,
        "grad_norm": updates[0]["grad_norm"],
        "loss": updates[0]["loss"],
    }
    numbers |= _memory()
    if accelerator.device.type == "cuda":
        weights = sum(parameter.numel() for parameter in model.parameters())
        numbers["mfu"] = _useful_flops(model.config, rollouts, weights) / seconds / arguments.peak
    answer(**numbers)


def _trl(arguments: argparse.Namespace) -> None:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from quiver.stages.core.store import Store

    rollouts = _rollouts(arguments.shapes[0], arguments.groups)
    path = str(Store(arguments.work / "store").open("bench/policy@0").files.folder)
    total, width = rollouts["completions"].shape
    group = total // arguments.groups
    mask = np.arange(width)[None] < rollouts["lengths"][:, None]
    fed = {
        "prompt_ids": torch.from_numpy(rollouts["prompts"].repeat(group, 0)),
        "completion_ids": torch.from_numpy(np.where(mask, rollouts["completions"], 2)),
        "completion_mask": torch.from_numpy(mask).int(),
        "advantages": torch.from_numpy(rollouts["advantages"]),
        "num_items_in_batch": torch.tensor(int(mask.sum())),
    }
    fed["prompt_mask"] = torch.ones_like(fed["prompt_ids"]).int()

    class Fed(GRPOTrainer):
        """TRL's own loop on given rollouts."""

        def _generate_and_score_completions(self, inputs):
            return {name: tensor.to(self.accelerator.device) for name, tensor in fed.items()}

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

    _, activations, rows, *kernels = arguments.settings[0].split("/")
    batch = total if rows == "all" else int(rows)
    options = {
        "gradient_checkpointing": activations == "checkpointing",
        "gradient_accumulation_steps": total // batch,
        "use_liger_kernel": bool(kernels),
        **json.loads(arguments.peer_options),
    }
    config = GRPOConfig(
        output_dir=str(arguments.work / "trl"), per_device_train_batch_size=batch, num_generations=group, learning_rate=1e-6,
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
        train_dataset=Dataset.from_dict({"prompt": ["x"] * total * (arguments.steps + 1)}),
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    trainer.train()
    rate = _logical_tokens(rollouts) / float(np.median(times[1:]))
    answer(tokens_per_second=rate, grad_norm=norms[0], loss=losses[0], **_memory())


if __name__ == "__main__":
    main()
