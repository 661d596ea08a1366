"""How far a policy in each precision follows float32's at a small rate, from a base in bfloat16.

    python -m tests.benchmarks.small_rate --rate 1e-6 --steps 60

The tiny Llama is trained on the same rollouts in each precision. Compared is the change of its
logprobs in its own passes: its norm as a share of float32's change, the cosine between the two, and
the slope, the share of float32's change that it makes.
"""

from __future__ import annotations

import argparse
import tempfile

import torch

from quiver.stages.core.store import Store
from quiver.stages.model.loading import load_model
from tests.stages.optimize import world
from tests.tiny import make_policy

PRECISIONS = ("fp32", "bf16", "bf16_stochastic")


def main() -> None:
    """Print a line for each seed and precision."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=float, default=1e-6)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--optimizer", default="adamw")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = Store(f"{folder}/store")
        policy = make_policy(store)
        made = world.make(store, policy, world.even_share, groups=8, each=8)
        inputs = dict(zip(("policy", "rollouts", "rewards"), (policy, *made), strict=True))
        for seed in range(asked.seeds):
            plain = None
            for precision in PRECISIONS:
                config = world.config(
                    precision=precision,
                    optimizer=asked.optimizer,
                    algorithm="reinforce_pp_baseline",
                    learning_rate=asked.rate,
                    epochs=asked.steps,
                    seed=seed,
                    audit={"enabled": False},
                )
                change = change_of(store, inputs, config)
                plain = change if plain is None else plain
                product = float(change.dot(plain))
                print(
                    f"seed {seed}, {precision}: norm {float(change.norm() / plain.norm()):.2f}, "
                    f"cosine {product / float(change.norm() * plain.norm()):.2f}, "
                    f"slope {product / float(plain.norm()) ** 2:.2f}"
                )


def change_of(store, inputs, config) -> torch.Tensor:
    """[N] how much a training changes each token's logprob; the weights are moved by the seed
    first, and rounded to bfloat16."""
    model = load_model(inputs["policy"], dtype=torch.float32)
    chance = torch.Generator().manual_seed(config.seed)
    for weight in model.parameters():
        noise = torch.randn(weight.shape, generator=chance) * 0.02 * weight.data.abs().mean()
        weight.data = (weight.data + noise).bfloat16().float()
    trainer = world.trainer(store, inputs, config, model)
    rows = range(len(trainer.batch.groups))
    before = trainer.compute_logprobs(rows)
    trainer.prepare()
    trainer.train()
    return trainer.compute_logprobs(rows) - before


if __name__ == "__main__":
    main()
