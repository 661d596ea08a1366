"""Trackers: the curves of a run in tensorboard, wandb, mlflow or trackio, over optimizer steps.

A training logs the numbers of each step and, at its start, the numbers of its rollouts. An
evaluation is logged later, by a process of its own:

    python -m quiver.stages.optimize.tracking < call.json
    # {"trackers": ["wandb"], "folder": "logs", "store": "store", "ref": "arith/evaluations@1"}

Each process starts its own trackers. A tracker that supports it continues its one run for a run of
this store; a second training from the same policy has a run of its own (`curve_of`). A measurement
is logged at the step of the measured policy, beside its training.

Not of the spine: nothing depends on what is tracked.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, TrackioTracker, WandBTracker

from quiver.schemas.errors import ConfigError, QuiverError, printable
from quiver.schemas.refs import parse
from quiver.stages.core.run.stage import Plan
from quiver.stages.core.store import Store, Version
from quiver.stages.core.store.listing import Listing, Summary, is_of_sweep
from quiver.stages.turns.statistics import truncated_share

from .inputs import sets

PROJECT = "quiver"
"""Project name under which trackers file all runs."""
log = logging.getLogger(__name__)


class _Wandb(WandBTracker):
    """accelerate's tracker with `step` as the axis. wandb's own counter only goes up, so numbers of
    an earlier step would be dropped."""

    def start(self) -> None:
        super().start()
        self.run.define_metric("*", step_metric="step")

    def log(self, values: dict[str, Any], step: int | None = None, **options: Any) -> None:
        self.run.log({**values, "step": step}, **options)


class _Trackio(TrackioTracker):
    """accelerate's tracker without the number `step`, a name that trackio reserves."""

    def log(self, values: dict[str, Any], step: int | None = None, **options: Any) -> None:
        numbers = {name: number for name, number in values.items() if name != "step"}
        self.run.log(numbers, step=step, **options)


def start(trackers: Sequence[str], folder: str, plan: Plan) -> list[GeneralTracker]:
    """Start the trackers of a training in `folder`, and log the numbers of its rollouts."""
    policy = str(plan.inputs["policy"].ref)
    training = Summary(0, plan.run_key, note=plan.note, sources={policy: "policy"})
    opened = open_trackers(trackers, folder, plan.store, curve_of(plan.listing, plan.run, training))
    step = int(plan.inputs["policy"].manifest.metrics.get("step", 0))
    for name, tracker in zip(trackers, opened, strict=True):
        tracker.log = partial(_log_or_warn, name, tracker.log)
        tracker.log(learned_from(plan.inputs), step=step)
    return opened


def _log_or_warn(
    name: str, log_numbers: Callable[..., None], *arguments: Any, **named: Any
) -> None:
    """Log, and warn on any error: a dead service or a full disk must not stop a training."""
    try:
        log_numbers(*arguments, **named)
    except Exception as error:  # any library may raise anything
        log.warning("%s did not get all numbers: %s", name, printable(str(error)))


def curve_of(policies: Listing, run: str, training: Summary | None) -> str:
    """Return the name of a tracker's run for a policy that is being made, or was made, in `run`.

    It is the run's name along the line of first trainings. Another training from the same policy
    would write over its steps, so it and those that go on from it have their own name, which ends
    with its run key. Each training of a sweep has its own.
    """
    summaries = policies.summaries()
    by_number = {summary.number: summary for summary in summaries}
    first: dict[str, str] = {}
    for summary in summaries:
        if summary.trained_from and not is_of_sweep(summary.note):
            first.setdefault(summary.trained_from, summary.run_key)
    while training is not None and (parent := training.trained_from):
        # work that is done again has the same run key
        if is_of_sweep(training.note) or first.get(parent, training.run_key) != training.run_key:
            return f"{run}-{training.run_key[:8]}"
        ref = parse(parent)
        is_before = ref.run == run and (training.number == 0 or ref.version < training.number)
        training = by_number.get(ref.version) if is_before else None
    return run


def open_trackers(
    trackers: Sequence[str], folder: str, store: Store, curve: str
) -> list[GeneralTracker]:
    """Start accelerate's trackers by name, and let them write files in `folder`. Raises ConfigError
    if one does not start."""
    place = Path(folder).absolute()
    identity = f"{curve}-{store.id[:8]}"
    opened = []
    for name in trackers:
        tracker_class = LOGGER_TYPE_TO_CLASS[name]
        try:
            place.mkdir(parents=True, exist_ok=True)
            if name == "tensorboard":
                tracker = tracker_class(identity, place)
            elif name == "wandb":
                tracker = _Wandb(PROJECT, dir=place, id=identity, name=curve, resume="allow")
            elif name == "mlflow":
                tracker = tracker_class(PROJECT, **_mlflow_run(place, curve, identity))
            elif name == "trackio":
                os.environ.setdefault("TRACKIO_DIR", str(place / "trackio"))
                tracker = _Trackio(PROJECT, name=identity, resume="allow")
            else:
                places = [place] if tracker_class.requires_logging_directory else []
                tracker = tracker_class(PROJECT, *places)
            tracker.start()
        except Exception as error:  # any library may raise anything
            raise ConfigError(
                f"optimize.trackers {name}",
                f"does not start: {type(error).__name__}: {printable(str(error))}",
                next=f"correct that, or leave {name} out of optimize.trackers",
            ) from error
        opened.append(tracker)
    return opened


def _mlflow_run(place: Path, curve: str, identity: str) -> dict[str, Any]:
    """Return the arguments that make accelerate's tracker use the mlflow run with this identity,
    existing or new. It is in `place`, unless MLFLOW_TRACKING_URI names a server."""
    import mlflow

    options = {"run_name": curve, "tags": {"quiver": identity}}
    if "MLFLOW_TRACKING_URI" not in os.environ:
        mlflow.set_tracking_uri(f"sqlite:///{place / 'mlflow.db'}")
        options["logging_dir"] = (place / "mlflow").as_uri()
    earlier = mlflow.search_runs(
        experiment_names=[PROJECT],
        filter_string=f"tags.quiver = '{identity}'",
        output_format="list",
    )
    return {**options, "run_id": earlier[0].info.run_id if earlier else None}


# -- numbers


def learned_from(inputs: Mapping[str, Version]) -> dict[str, float]:
    """Return the mean rewards and lengths of a training's rollouts. Rollouts of a policy other than
    the newest set's are trained on again, and were logged before.

    {"reward/mean": 0.4, "reward/parts/length": 0.1, "completion_tokens/mean": 88.0,
     "completion_tokens/truncated": 0.02}
    """
    newest = inputs["rollouts"].manifest.require_model("policy").weights
    numbers: dict[str, float] = {}
    counts: Counter[str] = Counter()
    for version in sets(inputs):
        rollouts = version["rollouts"].manifest
        rewards = version["rewards"].manifest
        if rollouts.require_model("policy").weights != newest:
            continue
        rows = rollouts.rows
        means = {
            "reward/mean": (rewards.metrics.get("reward_mean"), rewards.status.get("scored", 0)),
            "completion_tokens/mean": (rollouts.metrics.get("mean_completion_tokens"), rows),
            "completion_tokens/truncated": (truncated_share(rollouts), rows),
        }
        for name, part in rewards.metrics.get("functions", {}).items():
            num_scored = rewards.rows - part["null"] - part["errors"]
            means[f"reward/parts/{name}"] = (part["mean"], num_scored)
        for name, (mean, count) in means.items():
            if mean is not None and count:
                counts[name] += count
                before = numbers.get(name, 0.0)
                numbers[name] = before + (mean - before) * count / counts[name]
    return numbers


def evaluated(store: Store, evaluation: Version) -> tuple[str, int, dict[str, float]]:
    """Return the name of the tracker's run, the step of the measured policy, and its scores.

    ("arith", 12,
     {"evaluation/score": 0.61, "evaluation/stderr": 0.02, "evaluation/pass_at_4": 0.8})
    """
    metrics = evaluation.manifest.metrics
    numbers = {f"evaluation/{name}": metrics[name] for name in ("score", "stderr")}
    for k, estimate in metrics["pass@k"].items():
        numbers[f"evaluation/pass_at_{k}"] = estimate["score"]
    rollouts = store.open(evaluation.manifest.require_input("rollouts").ref).manifest
    known = {name: number for name, number in numbers.items() if number is not None}
    policy = store.open(rollouts.require_model("policy").ref)
    run = evaluation.ref.run
    training = None
    if policy.ref.run == run:
        training = Summary.of(policy.manifest.model_dump(mode="json"), policy.ref.version)
    curve = curve_of(store.listing(run, "policy"), run, training)
    return curve, int(policy.manifest.metrics.get("step", 0)), known


def main() -> None:
    """Log the evaluation named on stdin to the trackers named there."""
    from accelerate import PartialState

    asked = json.load(sys.stdin)
    PartialState(cpu=True)
    try:
        store = Store(asked["store"], create=False).with_expired()
        evaluation = store.open(asked["ref"])
        curve, step, numbers = evaluated(store, evaluation)
        opened = open_trackers(asked["trackers"], asked["folder"], store, curve)
    except QuiverError as error:
        sys.exit(f"{error.object}: {error.message}")  # the flow logs this line
    for tracker in opened:
        tracker.log(numbers, step=step)
        tracker.finish()


if __name__ == "__main__":
    main()
