"""`quiver fit`: check if a recipe fits a machine, before anything runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from quiver.schemas.errors import ResourceError

from .shared import RecipeFile, Settings, StorePath, read_recipe, say

if TYPE_CHECKING:
    from quiver.flows.fit import Estimate, Need


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
    shapes are used: nothing runs, and no weight is read."""
    from quiver.flows import fit
    from quiver.stages.model.memory import shape_of

    machine = fit.parse_machine(gpu) if gpu else fit.this_host()
    loaded = read_recipe(recipe, settings, store)
    work = fit.workload_of(loaded.generate, loaded.data, loaded.store, loaded.run)
    shape = shape_of(fit.find_config(loaded.policy, loaded.store, loaded.run))
    estimate = fit.Estimate(loaded, shape, work, machine)
    count = f"{machine.count} × " if machine.count > 1 else ""
    lines = [
        f"{loaded.run} on {count}{machine.name} with {_gb(machine.memory)} GB: "
        f"{estimate.shape.weights / 1e6:,.0f} million weights in {estimate.shape.layers} layers",
        f"{work.prompts} prompts × {work.samples} rollouts of {work.prompt_tokens:.0f} + "
        f"{work.completion_tokens:.0f} tokens ({work.source})",
    ]
    stages = []
    for need in estimate.needs():
        is_fit = estimate.fits(need)
        remedies = [] if is_fit else estimate.remedies(need)
        lines += _in_lines(estimate, need, remedies)
        stages.append(
            {
                "stage": need.stage,
                "devices": need.devices,
                "bytes": round(need.bytes),
                "parts": {name: round(count) for name, count in need.memory.items()},
                "notes": list(need.notes),
                "fits": is_fit,
                "fits_with": [
                    {"settings": setting, "bytes": round(changed.bytes)}
                    for setting, changed in remedies
                ],
            }
        )
    engine = loaded.generate.engine
    if engine not in ("vllm", "transformers", "scripted"):
        lines.append(f"generate: the memory that engine {engine} needs is not known")
    missing = [stage["stage"] for stage in stages if not stage["fits"]]
    lines.append(f"does not fit: {', '.join(missing)}" if missing else "it fits")
    say(
        {
            "run": loaded.run,
            "machine": {"name": machine.name, "count": machine.count, "bytes": machine.memory},
            "weights": estimate.shape.weights,
            "workload": {**work.__dict__, "rollouts": work.rollouts},
            "stages": stages,
            "fits": not missing,
        },
        lines,
    )
    if missing:
        raise SystemExit(ResourceError.exit_code)


def _in_lines(estimate: Estimate, need: Need, remedies: list[tuple[str, Need]]) -> Iterator[str]:
    machine = estimate.machine
    is_enough = estimate.has_enough(need)
    is_fit = estimate.fits(need)
    memory = ", ".join(f"{name} {_gb(count)}" for name, count in need.memory.items() if count > 5e6)
    per_device = f" each of {need.devices}" if need.devices > 1 else ""
    verdict = ", too much" if is_enough and not is_fit else ""
    yield f"{need.stage:<16} {_gb(need.bytes):>6} GB{per_device}{verdict}: {memory}"
    for note in need.notes:
        yield f"    {note}"
    if not is_enough:
        yield f"    needs {need.devices} GPUs, and there are {machine.count}"
    for setting, changed in remedies:
        yield f"    fits with {setting}: {_gb(changed.bytes)} GB"
    if is_enough and not (is_fit or remedies):
        yield "    no known setting makes it fit: use a larger device"


def _gb(count: float) -> str:
    return f"{count / 1e9:,.1f}"
