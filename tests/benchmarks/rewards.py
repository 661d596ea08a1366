"""What scoring costs: python -m tests.benchmarks.rewards

`math`: 10,000 answers on two workers beside math-verify called one after the other, once for whole
numbers in boxes (most of what models answer) and once for fractions, which are read as LaTeX.
`function`: what a row costs through the workers beyond the call of a function that does nothing.
`model`: a classifier of 6 layers × 384 over groups of 8 answers beside the usual loop, which pads
batches of 32 in the order in which they come.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from quiver.stages.reward.functions.config import FunctionConfig
from quiver.stages.reward.pool.pool import Pool
from quiver.stages.reward.pool.scorer import FunctionScorer

from .side_by_side import machine, table

REPEAT = 3
NOTHING = "def nothing(completions):\n    return [1.0] * len(completions)\n"


def main() -> None:
    """Print a table of ratios, the sides in turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the rows")
    rows = 1_000 if parser.parse_args().quick else 10_000
    found = [
        _math(rows, "math, whole numbers", r"so \boxed{{{}}}", "{}"),
        _math(rows // 5, "math, fractions", r"so $\frac{{{}}}{{7}}$", "{}/7"),
        _function(rows),
        _model(rows // 40),
    ]
    print(machine(), table(found), sep="\n\n")


def _seconds(sides: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median seconds of each side, after one call that warms it up; they take turns."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(REPEAT + 1):
        for name, call in sides.items():
            start = time.perf_counter()
            call()
            if turn:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(found) for name, found in times.items()}


def _batch(completions: list[str], **columns: list) -> dict[str, list]:
    return {
        "completions": completions,
        "rollout_ids": [str(row) for row in range(len(completions))],
        **columns,
    }


def _math(rows: int, name: str, said: str, wanted: str) -> dict[str, str]:
    from math_verify import parse, verify

    texts, answers = (
        [said.format(row) for row in range(rows)],
        [wanted.format(row - row % 2) for row in range(rows)],
    )

    def serial() -> list[float]:
        pairs = zip(texts, answers, strict=True)
        return [
            float(verify(parse(f"${want}$"), parse(text), timeout_seconds=None))
            for text, want in pairs
        ]

    with Pool(2) as pool:
        scorer = FunctionScorer(FunctionConfig(use="math"), pool, 256)
        ours = lambda: [part.value for part in scorer.score(_batch(texts, answer=answers))]  # noqa: E731
        assert ours() == serial()
        seconds = _seconds({"math-verify": serial, "quiver": ours})
    rate = {side: f"{rows / spent:.0f} rows/s" for side, spent in seconds.items()}
    return _row(
        name,
        rows,
        rate["quiver"],
        rate["math-verify"],
        f"{seconds['math-verify'] / seconds['quiver']:.2f} ×",
        "≥ 1.8 ×",
    )


def _function(rows: int) -> dict[str, str]:
    texts = ["a completion of some forty characters, say"] * rows
    with tempfile.TemporaryDirectory() as folder, Pool(2) as pool:
        path = Path(folder, "mine.py")
        path.write_text(NOTHING)
        scorer = FunctionScorer(FunctionConfig(use=f"{path}:nothing"), pool, 256)
        own: dict = {}
        exec(NOTHING, own)
        calls = {
            "direct": lambda: own["nothing"](texts),
            "quiver": lambda: scorer.score(_batch(texts)),
        }
        seconds = _seconds(calls)
    each = {side: spent / rows * 1e6 for side, spent in seconds.items()}
    beyond = f"{each['quiver'] - each['direct']:.1f} µs a row"
    return _row(
        "function that does nothing",
        rows,
        f"{each['quiver']:.1f} µs",
        f"{each['direct']:.2f} µs",
        beyond,
        "≤ 20 µs a row",
    )


def _model(rows: int) -> dict[str, str]:
    import torch
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    from quiver.stages.reward.models.config import ModelConfig
    from quiver.stages.reward.models.forward import Forward

    torch.manual_seed(0)
    size = {
        "vocab_size": 4096,
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 6,
        "head_dim": 64,
    }
    config = Qwen3Config(
        **size, num_attention_heads=6, num_key_value_heads=2, num_labels=1, pad_token_id=0
    )
    model = Qwen3ForSequenceClassification(config).eval()
    draw = lambda low, high: torch.randint(1, 4096, (int(torch.randint(low, high, ())),)).tolist()  # noqa: E731
    prompts = [draw(64, 192) for _ in range(max(rows // 8, 1))]
    inputs = [prompt + draw(16, 160) for prompt in prompts for _ in range(8)]
    groups = [group for group in range(len(prompts)) for _ in range(8)]

    @torch.inference_mode()
    def padded() -> list[float]:
        found: list[float] = []
        for start in range(0, len(inputs), 32):
            batch = inputs[start : start + 32]
            width = max(map(len, batch))
            ids = torch.tensor([row + [0] * (width - len(row)) for row in batch])
            mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in batch])
            found += model(input_ids=ids, attention_mask=mask).logits[:, 0].tolist()
        return found

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        forward = Forward(Path(folder), ModelConfig(model=folder))
        gap = max(
            abs(a - b)
            for a, b in zip(forward.score(inputs, groups)[:, 0].tolist(), padded(), strict=True)
        )
        assert gap < 1e-3, gap
        seconds = _seconds({"padded": padded, "quiver": lambda: forward.score(inputs, groups)})
    rate = {side: f"{len(inputs) / spent:.1f} rows/s" for side, spent in seconds.items()}
    name = f"reward model ({forward.way})"
    return _row(
        name,
        len(inputs),
        rate["quiver"],
        rate["padded"],
        f"{seconds['padded'] / seconds['quiver']:.2f} ×",
        "≥ 1.5 ×",
    )


def _row(name: str, rows: int, ours: str, theirs: str, ratio: str, goal: str) -> dict[str, str]:
    return {
        "what": name,
        "rows": str(rows),
        "quiver": ours,
        "beside": theirs,
        "ratio": ratio,
        "goal": goal,
    }


if __name__ == "__main__":
    main()
