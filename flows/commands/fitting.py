"""`quiver fit`: check if a recipe fits a machine, before anything runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from quiver.schemas.errors import ResourceError

from .shared import RecipeFile, Settings, StorePath, read_recipe, say

if TYPE_CHECKING:
    from ..fit.machines import Machine
    from ..fit.needs import Need


def fit(
    recipe: RecipeFile,
    gpu: Annotated[
        str | None,
        typer.Option(help="h100, a100, l40s, …; h100:8 for eight; default: this host's CPU"),
    ] = None,
    store: StorePath = None,
    settings: Settings = None,
) -> None:
    """Estimate what each stage needs of a machine. Also shows settings that would make it fit. Only
    shapes are used: nothing runs, no weight is read, and seconds are on paper."""
    from ..fit import machines, needs, remedies, shapes, workload

    machine = machines.parse_machine(gpu) if gpu else machines.this_host()
    loaded = read_recipe(recipe, settings, store)
    shape = shapes.shape_of(shapes.find_config(loaded))
    work = workload.workload_of(loaded)
    needed = needs.needs_of(loaded, shape, work, machine)
    count = f"{machine.count} × " if machine.count > 1 else ""
    lines = [
        f"{loaded.run} on {count}{machine.name} with {_gb(machine.memory)} GB: "
        f"{shape.weights / 1e6:,.0f} million weights in {shape.layers} layers",
        f"{work.prompts} prompts × {work.samples} rollouts of {work.prompt_tokens:.0f} + "
        f"{work.completion_tokens:.0f} tokens ({work.source})",
    ]
    answers = []
    for need in needed:
        is_fit = remedies.fits(need, machine)
        ways = [] if is_fit else remedies.remedies(need, loaded, shape, work, machine)
        is_enough = remedies.has_enough(need, machine)
        lines += _in_lines(need, machine, "" if is_fit or not is_enough else ", too much")
        if not is_enough:
            lines.append(f"    asks for {need.devices} GPUs, and there are {machine.count}")
        lines += [f"    fits with {setting}: {_gb(less.bytes)} GB" for setting, less in ways]
        if is_enough and not (is_fit or ways):
            lines.append("    nothing that is known here makes it fit: take a larger device")
        answers.append(_as_json(need, is_fit, ways))
    engine = loaded.generate.engine
    if engine not in ("vllm", "transformers", "scripted"):
        lines.append(f"generate: what engine {engine} needs is not known here")
    missing = [answer["stage"] for answer in answers if not answer["fits"]]
    lines.append(f"does not fit: {', '.join(missing)}" if missing else "it fits")
    say(
        {
            "run": loaded.run,
            "machine": {"name": machine.name, "count": machine.count, "bytes": machine.memory},
            "weights": shape.weights,
            "workload": {**work.__dict__, "rollouts": work.rollouts},
            "stages": answers,
            "fits": not missing,
        },
        lines,
    )
    if missing:
        raise SystemExit(ResourceError.exit_code)


def _in_lines(need: Need, machine: Machine, judged: str) -> list[str]:
    parts = ", ".join(f"{name} {_gb(held)}" for name, held in need.parts.items() if held > 5e6)
    each = f" each of {need.devices}" if need.devices > 1 else ""
    line = f"{need.stage:<16} {_gb(need.bytes):>6} GB{each}{judged}: {parts}"
    lines = [line, *(f"    {note}" for note in need.notes)]
    if need.seconds is not None:
        lines.append(
            f"    {need.flops / 1e12:,.1f} TFLOP, {need.moved / 1e12:,.2f} TB moved: "
            f"{need.seconds:,.1f} s an iteration on paper, at {machine.name}'s full speed"
        )
    return lines


def _as_json(need: Need, is_fit: bool, ways: list[tuple[str, Need]]) -> dict[str, Any]:
    return {
        "stage": need.stage,
        "devices": need.devices,
        "bytes": round(need.bytes),
        "parts": {name: round(held) for name, held in need.parts.items()},
        "flops": need.flops,
        "moved_bytes": need.moved,
        "paper_seconds": need.seconds,
        "notes": list(need.notes),
        "fits": is_fit,
        "fits_with": [{"settings": setting, "bytes": round(less.bytes)} for setting, less in ways],
    }


def _gb(count: float) -> str:
    return f"{count / 1e9:,.1f}"
