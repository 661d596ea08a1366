"""A whole iteration (generate, score, optimize) of `quiver run` against TRL's own GRPOTrainer loop.

    python -m tests.benchmarks.iteration

The demo's task, model, rewards, group (8) and lengths in float32, 32 prompts an iteration, four
optimizer steps on them. TRL generates with transformers, as it does without a GPU, and runs as it
comes otherwise. Counted is the second iteration and later ones, from the end of one to the end of
the next: with Quiver's start of a process for every stage, its checkpoint with optimizer state, its
hashes; TRL stays in one process and saves nothing.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
import time
from datetime import datetime
from itertools import islice
from pathlib import Path

from .side_by_side import ROOT, answer, machine, make_parser, median, quiver, table, take_turns

RECIPE = "deployments/recipes/demo.toml"
PROMPTS, GROUP, TOKENS, STEPS, ITERATIONS, MICROBATCH = 32, 8, 12, 4, 2, 32
SIDES = {"quiver": "Quiver, quiver run", "trl": "TRL, GRPOTrainer.train"}


def main() -> None:
    """Compare, or be one side of a comparison."""
    parser = make_parser(__doc__, tuple(SIDES))
    parser.add_argument("--iterations", type=int, default=ITERATIONS)
    arguments = parser.parse_args()
    if arguments.side:
        {"quiver": _quiver, "trl": _trl}[arguments.side](arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        arguments.work = Path(folder)
        found = take_turns(
            "iteration",
            list(SIDES),
            arguments,
            "--iterations",
            str(arguments.iterations),
            peers=["trl"],
        )
    ours = median(found["quiver"], "seconds")
    rows = [
        {
            "": SIDES[side],
            "s an iteration": f"{median(found[side], 'seconds'):.1f}",
            "times": f"{median(found[side], 'seconds') / ours:.2f}",
            "mean reward": " → ".join(f"{reward:.3f}" for reward in found[side][0]["rewards"]),
            "peak GB": f"{median(found[side], 'peak_gb'):.1f}",
            "of it": found[side][0]["parts"],
        }
        for side in SIDES
    ]
    print(
        machine(),
        f"{_prompts(arguments)} prompts × {GROUP} × {TOKENS} tokens.",
        table(rows),
        sep="\n\n",
    )


def _prompts(arguments: argparse.Namespace) -> int:
    return 4 if arguments.quick else PROMPTS


# -- sides


def _quiver(arguments: argparse.Namespace) -> None:
    """The demo's recipe without its evaluation."""
    from quiver.stages.core.store import Store

    recipe = arguments.work / "recipe.toml"
    lines = (ROOT / RECIPE).read_text().splitlines(keepends=True)
    recipe.write_text("".join(line for line in lines if not line.startswith("held_out")))
    store = arguments.work / f"store{time.monotonic_ns()}"
    settings = [
        f"iterations={arguments.iterations}",
        f"data.limit={_prompts(arguments)}",
        f"optimize.minibatches={STEPS}",
    ]
    given = [part for setting in settings for part in ("--set", setting)]
    said, _ = quiver(arguments.work, "run", str(recipe), "--store", str(store), "--json", *given)
    result = json.loads(said)
    made = [Store(store).open(done["policy"]).manifest for done in result["iterations"]]
    ends = [datetime.fromisoformat(manifest.created).timestamp() for manifest in made]
    last = result["iterations"][-1]
    answer(
        seconds=(ends[-1] - ends[0]) / (len(ends) - 1),
        rewards=[done["reward_mean"] for done in result["iterations"]],
        parts=", ".join(f"{stage} {seconds:.1f}" for stage, seconds in last["seconds"].items()),
        peak_gb=round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e9, 2),
    )


def _trl(arguments: argparse.Namespace) -> None:
    """TRL's loop on the same questions, scored by the same functions."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    from quiver.deployments.recipes.larger import rows
    from quiver.stages.core.store import Store
    from quiver.stages.reward.functions import format as form
    from quiver.stages.reward.functions import numeric

    from .made import real_policy

    path = str(real_policy(Store(arguments.work / "trl_store")).files.folder)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    asked = [
        {"prompt": row["messages"], "answer": row["answer"]}
        for row in islice(rows("train"), PROMPTS * 4)
    ]
    begins, generating = [], []

    class Clocked(GRPOTrainer):
        """TRL's own loop, with the time at which each iteration begins."""

        def _generate_and_score_completions(self, inputs):
            begins.append(time.monotonic())
            made = super()._generate_and_score_completions(inputs)
            generating.append(time.monotonic() - begins[-1])
            return made

    def accuracy(completions, answer, **_):
        return numeric([each[0]["content"] for each in completions], answer)

    def shape(completions, **_):
        return form([each[0]["content"] for each in completions], pattern=r"\s*Answer: \d+\s*")

    batch = _prompts(arguments) * GROUP
    micro = min(MICROBATCH, batch // STEPS)
    config = GRPOConfig(
        output_dir=str(arguments.work / "trl"), per_device_train_batch_size=micro, num_generations=GROUP,
        gradient_accumulation_steps=batch // STEPS // micro, steps_per_generation=batch // micro,
        max_steps=STEPS * arguments.iterations, max_completion_length=TOKENS, loss_type="grpo", beta=0.0, temperature=1.0,
        learning_rate=1e-5, warmup_steps=3, lr_scheduler_type="constant_with_warmup", reward_weights=[1.0, 0.2], bf16=False,
        logging_steps=1, report_to=[], save_strategy="no", use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    trainer = Clocked(
        model=AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
        reward_funcs=[accuracy, shape],
        args=config,
        train_dataset=Dataset.from_list(asked),
        processing_class=tokenizer,
    )
    trainer.train()
    begins.append(time.monotonic())
    seconds = (begins[-1] - begins[1]) / (len(begins) - 2)
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    other = f"generate and score {generating[-1]:.1f}, optimize {seconds - generating[-1]:.1f}"
    answer(seconds=seconds, rewards=rewards, parts=other)


if __name__ == "__main__":
    main()
