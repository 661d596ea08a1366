"""A group of eight rollouts that shares its prompt's picture, beside eight rollouts that show it one
by one.

    python -m tests.benchmarks.images

An Idefics3 of random weights and the sizes of SmolVLM-256M in float32: a tower of 12 layers for
pictures of 512 × 512, a decoder of 30 layers. Two groups of 8, prompts of 32 ids and the 64 of a
picture, completions of 64. Logprobs of all rollouts and a backward pass, decoder alone trained, as
by default. `shared` has the prompt of a group once in a row of tokens, `packed` has it with each
rollout and its picture once, `single` has one rollout in a row, as trainers without packing do. All
must give the same numbers.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from .side_by_side import answer, machine, make_parser, median, table, take_turns

SIDES = ("shared", "packed", "single")
GROUPS, GROUP, TEXT, FEATURES, COMPLETION = 2, 8, 32, 64, 64
IMAGE_ID = 3
LARGE = {
    "text": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30},
    "vision": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12},
}
SMALL = {
    "text": {"hidden_size": 96, "intermediate_size": 64, "num_hidden_layers": 2},
    "vision": {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2},
}


def main() -> None:
    """Compare, or be one side of a comparison."""
    arguments = make_parser(__doc__, SIDES, repeat=3).parse_args()
    if arguments.side:
        _run(arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        arguments.work = Path(folder)
        found = take_turns("images", SIDES, arguments)
    rows = [
        {
            "": side,
            "passes of the tower": found[side][0]["looks"],
            "seconds": f"{median(found[side], 'seconds'):.1f}",
            "of these in the tower": f"{median(found[side], 'tower_seconds'):.1f}",
            "times": f"{median(found['single'], 'seconds') / median(found[side], 'seconds'):.2f}",
        }
        for side in SIDES
    ]
    print(machine(), table(rows), sep="\n\n")
    sums = [found[side][0]["logprobs"] for side in SIDES]
    if not np.allclose(sums, sums[0], rtol=1e-4):
        sys.exit(f"the sides do not compute the same logprobs: {sums}")


def _run(arguments: argparse.Namespace) -> None:
    import torch

    from quiver.stages.model.forward.layout import make_layout
    from quiver.stages.model.forward.policy import Policy

    torch.manual_seed(0)
    model = _model(SMALL if arguments.quick else LARGE)
    looks: list[float] = []
    look = model.base_model.get_image_features

    def timed(**inputs: Any) -> Any:
        started = time.monotonic()
        features = look(**inputs)
        looks.append(time.monotonic() - started)
        return features

    model.base_model.get_image_features = timed
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "vision" not in name and "connector" not in name
    policy = Policy(model, autocast=False)
    policy.set_mode(arguments.side)
    sequences, prompt_numbers = _sequences()
    rows = range(len(prompt_numbers))
    total = 0.0
    started = time.monotonic()
    for pieces in policy.microbatches(rows, prompt_numbers, sequences, 1 << 30):
        logprobs = policy(make_layout(pieces, sequences))[0]
        logprobs.sum().backward()
        total += float(logprobs.detach().sum())
    answer(
        seconds=time.monotonic() - started,
        looks=len(looks),
        tower_seconds=sum(looks),
        logprobs=total,
    )


def _model(sizes: dict[str, dict[str, int]]) -> Any:
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration

    text = {
        "model_type": "llama",
        "vocab_size": 4096,
        "num_attention_heads": sizes["text"]["hidden_size"] // 64 or 1,
        "num_key_value_heads": max(1, sizes["text"]["hidden_size"] // 192),
        "max_position_embeddings": 4096,
        "pad_token_id": 0,
    }
    vision = {"num_attention_heads": 12, "image_size": 512, "patch_size": 16}
    config = Idefics3Config(
        text_config={**text, **sizes["text"], "head_dim": 64},
        vision_config={**vision, **sizes["vision"]},
        image_token_id=IMAGE_ID,
        scale_factor=4,
        pad_token_id=0,
    )
    return Idefics3ForConditionalGeneration(config).eval()


def _sequences() -> tuple[Any, list[int]]:
    """What the rollouts are, and which of them have one prompt."""
    import torch

    from quiver.stages.model.forward.layout import Sequences
    from quiver.stages.model.forward.media import Media, Shown
    from quiver.stages.model.ragged import Ragged

    random = np.random.default_rng(0)
    count = GROUPS * GROUP
    prompt_numbers = [row // GROUP for row in range(count)]
    places = np.arange(4, 4 + FEATURES)
    prompts = random.integers(10, 4096, (GROUPS, TEXT + FEATURES))
    prompts[:, places] = IMAGE_ID
    completions = random.integers(10, 4096, (count, COMPLETION))
    pixels = torch.randn(GROUPS, 1, 1, 3, 512, 512)

    def ragged(rows: np.ndarray) -> Ragged:
        lengths = torch.full((count,), rows.shape[1])
        return Ragged.from_lengths(torch.from_numpy(rows.reshape(-1)), lengths)

    media = Media(
        Shown(
            ragged(np.array(prompt_numbers)[:, None]),
            ragged(np.full((count, 1), -1)),
            ragged(np.tile(places, (count, 1))),
        ),
        Shown.nothing(count),
        lambda chosen: {"pixel_values": pixels[list(chosen)].flatten(0, 1)},
        [IMAGE_ID],
    )
    sequences = Sequences(
        ragged(prompts[prompt_numbers]), ragged(completions), torch.ones(count), None, media
    )
    return sequences, prompt_numbers


if __name__ == "__main__":
    main()
