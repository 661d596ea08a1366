"""Tokens/s of the generate stage, its Arrow files included, against a bare `vllm.LLM.generate` and
transformers' generate.

    python -m tests.benchmarks.generation

The same model, prompts, group, seeds and engine arguments for both vLLM sides, so that they sample
the same tokens; the start (from the process's first moment to the first request) stands apart. Our
rate runs from the first request to the committed version, without the engine's end, which the bare
script does not wait for either. Transformers samples a share of the same prompts.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .made import RUN, demo_prompts, real_policy
from .side_by_side import (
    answer,
    machine,
    make_parser,
    median,
    run_side,
    since_start,
    table,
    take_turns,
)

PROMPTS, SAMPLES, TOKENS, DTYPE, CACHE_GIB = 128, 8, 64, "float32", 2.0
TRANSFORMERS_BATCH = 64
SIDES = ("quiver", "vllm", "transformers")


def main() -> None:
    """Compare, or be one side of a comparison."""
    arguments = make_parser(__doc__, (*SIDES, "prompts"), repeat=2).parse_args()
    if arguments.side:
        {"quiver": _quiver, "vllm": _vllm, "transformers": _transformers, "prompts": _prompts}[
            arguments.side
        ](arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        arguments.work = Path(folder)
        run_side("generation", "prompts", "--work", folder)
        found = take_turns("generation", SIDES, arguments)
    bare = median(found["vllm"], "tokens_per_second")
    rows = [_row(side, found[side], bare) for side in SIDES]
    if len({each["tokens"] for side in ("quiver", "vllm") for each in found[side]}) > 1:
        sys.exit("the two sides with vLLM did not sample the same number of tokens")
    print(machine(), table(rows), sep="\n\n")


def _row(side: str, found: list[dict[str, Any]], bare: float) -> dict[str, str]:
    rate = median(found, "tokens_per_second")
    return {
        "": {
            "quiver": "Quiver, stage generate",
            "vllm": "vLLM, bare script",
            "transformers": "transformers, generate",
        }[side],
        "start s": f"{median(found, 'start'):.1f}",
        "tokens/s": f"{rate:.0f}",
        "of bare vLLM": f"{rate / bare:.3f}",
        "CPU ms a token": f"{1000 * median(found, 'cpu_seconds') / median(found, 'tokens'):.3f}",
        "peak GB": f"{median(found, 'peak_gb'):.1f}",
    }


def _sizes(arguments: argparse.Namespace) -> tuple[int, int]:
    return (8, 16) if arguments.quick else (PROMPTS, TOKENS)


# -- sides


def _prompts(arguments: argparse.Namespace) -> None:
    """The model and every size's prompts, once, in the store that the sides share."""
    from quiver.stages.core.store import Store

    store = Store(arguments.work / "store")
    policy = real_policy(store)
    for count in (8, PROMPTS):
        demo_prompts(store, policy, count)
    answer()


def _inputs(arguments: argparse.Namespace):
    """The store, its policy, and the prompts of this size."""
    from quiver.stages.core.store import Store

    store = Store(arguments.work / "store")
    prompts = store.open(f"{RUN}/prompts@{1 if arguments.quick else 2}")
    return store, store.open(f"{RUN}/policy@0"), prompts


class Clock:
    """Wall and processor time since the first request."""

    def start(self) -> None:
        """The engine is there; the first request comes now."""
        self.started, self.wall, self.cpu = since_start(), time.monotonic(), time.process_time()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is done inside does not count."""
        wall, cpu = time.monotonic(), time.process_time()
        yield
        self.wall, self.cpu = (
            self.wall + time.monotonic() - wall,
            self.cpu + time.process_time() - cpu,
        )

    def stop(self) -> None:
        """All is done that counts."""
        self.seconds, self.cpu_seconds = (
            time.monotonic() - self.wall,
            time.process_time() - self.cpu,
        )

    def answer(self, tokens: int) -> None:
        """The side's last word."""
        answer(
            start=self.started,
            tokens=tokens,
            tokens_per_second=tokens / self.seconds,
            cpu_seconds=self.cpu_seconds,
        )


def _quiver(arguments: argparse.Namespace) -> None:
    """The stage's own process: `python -m quiver.stages generate`, with a clock around its
    engine."""
    from quiver.stages import __main__ as process
    from quiver.stages.core.run.runner import Call
    from quiver.stages.generate import engine

    clock, make = Clock(), engine.make_engine
    engine.make_engine = lambda name, setup: _clocked(make(name, setup), clock)
    store, policy, prompts = _inputs(arguments)
    config = {
        "samples_per_prompt": SAMPLES,
        "dtype": DTYPE,
        "sampling": {"max_tokens": _sizes(arguments)[1]},
        "options": {"cpu_kv_cache_gib": CACHE_GIB},
    }
    refs = {"prompts": str(prompts.ref), "policy": str(policy.ref)}
    call = Call("generate", config, store.url, refs, force=True)
    answer_path = arguments.work / "answer.json"
    (arguments.work / "call.json").write_text(json.dumps(call.to_json()))
    sys.argv[1:] = ["generate", str(arguments.work)]
    sys.stdin = io.StringIO("\n")  # the call is there
    if process.main():
        sys.exit(answer_path.read_text())
    clock.stop()
    clock.answer(json.loads(answer_path.read_text())["metrics"]["tokens"])


def _clocked(made: Any, clock: Clock) -> Any:
    """The engine `made`: its first request starts the clock, and the time of its end does not
    count."""
    generate, close = made.generate, made.close

    def first(requests):
        clock.start()
        return generate(requests)

    def last() -> None:
        with clock.paused():
            close()

    made.generate, made.close = first, last
    return made


def _vllm(arguments: argparse.Namespace) -> None:
    """What a script of one's own would be, with the stage's arguments."""
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    cpu = {}
    if not os.path.exists("/dev/nvidiactl"):
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "TORCH_COMPILE_DISABLE": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        cpu = {
            "block_size": 32,
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": 4096,
            "enforce_eager": True,
        }
        cpu["kv_cache_memory_bytes"] = int(CACHE_GIB * 2**30)
    from vllm import LLM, SamplingParams, TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    from quiver.stages.generate.rows import row_seed

    _, policy, prompts = _inputs(arguments)
    asked, groups = (
        prompts.table().column(name).to_pylist() for name in ("prompt_ids", "group_id")
    )
    limit, clock = _sizes(arguments)[1], Clock()
    llm = LLM(
        str(policy.files.folder), dtype=DTYPE, max_model_len=max(map(len, asked)) + limit, seed=0, generation_config="vllm",
        logprobs_mode="processed_logprobs", max_num_seqs=256, enable_prefix_caching=True, use_tqdm_on_load=False, **cpu,
    )  # fmt: skip
    clock.start()
    common = {
        "max_tokens": limit,
        "logprobs": 0,
        "detokenize": False,
        "output_kind": RequestOutputKind.FINAL_ONLY,
    }
    stops = [llm.get_tokenizer().eos_token_id]
    outputs = llm.generate(
        [TokensPrompt(prompt_token_ids=ids) for ids in asked for _ in range(SAMPLES)],
        [
            SamplingParams(
                seed=row_seed(0, 0, group, sample), ignore_eos=True, stop_token_ids=stops, **common
            )
            for group in groups
            for sample in range(SAMPLES)
        ],
        use_tqdm=False,
    )
    clock.stop()
    clock.answer(sum(len(output.outputs[0].token_ids) for output in outputs))


def _transformers(arguments: argparse.Namespace) -> None:
    """Left-padded batches through `model.generate`, on a share of the prompts."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _, policy, prompts = _inputs(arguments)
    tokenizer = AutoTokenizer.from_pretrained(policy.files.folder, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(
        policy.files.folder, dtype=getattr(torch, DTYPE)
    ).eval()
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    asked = prompts.table().column("prompt_ids").to_pylist()
    rows = [ids for ids in asked for _ in range(SAMPLES)][
        : TRANSFORMERS_BATCH * (1 if arguments.quick else 2)
    ]
    torch.manual_seed(0)
    tokens, clock = 0, Clock()
    clock.start()
    for start in range(0, len(rows), TRANSFORMERS_BATCH):
        batch = tokenizer.pad(
            {"input_ids": rows[start : start + TRANSFORMERS_BATCH]}, return_tensors="pt"
        ).to(model.device)
        made = model.generate(
            **batch, max_new_tokens=_sizes(arguments)[1], do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            pad_token_id=tokenizer.pad_token_id,
        )[:, batch["input_ids"].shape[1] :]  # fmt: skip
        ended = (made == tokenizer.eos_token_id).int()
        tokens += int(
            (ended.cumsum(1) - ended == 0).sum()
        )  # up to the first end token, which counts
    clock.stop()
    clock.answer(tokens)


if __name__ == "__main__":
    main()
