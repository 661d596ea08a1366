"""Commands that take data out of a store: `quiver export` to a file, `quiver push` to a hub."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from quiver.flows.look.words import counted, size

from .next_step import program, set_options
from .shared import ReadReference, StorePath, open_store, say


def export(
    ref: ReadReference,
    format: Annotated[
        Literal["dpo", "kto", "sft", "reward", "trajectories", "verl"],
        typer.Option("--as", help="format: a trainer of TRL, what `quiver import` reads, or verl"),
    ],
    out: Annotated[Path, typer.Option(help="a new file; .parquet is written as Parquet")],
    min_gap: Annotated[
        float, typer.Option(help="least difference of a pair's scores; kto: from the mean", min=0)
    ] = 0.0,
    pairs: Annotated[
        Literal["best-worst", "all"], typer.Option(help="pairs of the answers to a prompt")
    ] = "best-worst",
    cut: Annotated[
        Literal["keep", "leave-out"], typer.Option(help="answers that the token limit cut")
    ] = "keep",
    where: Annotated[str, typer.Option(help="only these rows, e.g. 'reward > 0.5'")] = "",
    ids: Annotated[bool, typer.Option("--ids", help="write the exact token ids too")] = False,
    parquet: Annotated[bool, typer.Option("--parquet", help="Parquet, not JSON lines")] = False,
    store: StorePath = None,
) -> None:
    """Write rollouts as another trainer's data. These are prompts with answers, pairs, labels, or
    trajectories. It counts what it leaves out."""
    from quiver.flows.exporting import Options
    from quiver.flows.exporting import export as write
    from quiver.flows.look.joined import with_rewards

    is_parquet = parquet or out.suffix == ".parquet"
    options = Options(format, min_gap, pairs, cut, ids, where, is_parquet)
    opened = open_store(store)
    done = write(opened, ref, out, options)
    num_bytes = out.stat().st_size
    written = f"{counted(done.rows, 'row')} in {out} ({size(num_bytes)})"
    lines = [f"{with_rewards(done.ref, done.rewards)} as {format}: {written}"]
    left_out = [f"{count:,} {why}" for why, count in done.left_out.items() if count]
    if left_out:
        lines.append(f"left out: {', '.join(left_out)}")
    if done.tokenised:
        lines.append(
            f"tokenised again, {done.other_ids:,} of {counted(done.tokenised, 'answer')} would "
            "be other ids"
        )
    answer = {**vars(done), "file": str(out), "bytes": num_bytes}
    if format == "trajectories":
        manifest = opened.open(done.ref).manifest
        words = [program(), "import", str(out), "--policy", manifest.require_model("policy").ref]
        words += set_options([f"sampling={json.dumps(done.sampling)}"])
        answer["import"] = shlex.join([*words, *(["--store", store] if store else [])])
        lines.append(f"to import it: {answer['import']}")
    say(answer, lines)


def push(
    ref: ReadReference,
    url: Annotated[
        str,
        typer.Argument(help="hf://NAME/REPO for a policy, hf://datasets/NAME/REPO", metavar="URL"),
    ],
    public: Annotated[
        bool, typer.Option("--public", help="make a new repository public, not private")
    ] = False,
    store: StorePath = None,
) -> None:
    """Upload a version to Hugging Face's hub. HF_ENDPOINT names another hub. A card says what the
    version was made from. A policy is loaded from there with from_pretrained."""
    from quiver.flows.pushing import push as upload

    place = upload(open_store(store), ref, url, public=public)
    say({"url": place}, [place])
