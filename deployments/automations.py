"""Prefect automations: mark silent runs as crashed, and start a deployment at a new version or a
promotion. Look here for what happens without a schedule.

Automations watch events. A flow run sends a heartbeat every `HEARTBEAT_SECONDS`. Quiver emits an
event for each version it makes, with the asset `quiver://RUN/KIND`. It emits another with the asset
`quiver://RUN/KIND@TAG` when a tag moves, in a flow or by hand. Installing twice leaves one
automation of each name.

    install(client, silent_runs())
    triggers = [on_event("arith/prompts", "post-train/arith")]    # a deployment owns them
"""

from __future__ import annotations

from datetime import timedelta

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.events.schemas.deployment_triggers import DeploymentEventTrigger
from prefect.events.schemas.events import ResourceSpecification

from quiver.flows.look.pages.events import EVENT, MOVED
from quiver.flows.sections import SIDE_RUNS
from quiver.schemas.errors import ConfigError, printable
from quiver.schemas.refs import KINDS, NAME

TAG = "quiver"
"""Tag of all our deployments and so of their runs. Runs of other flows are never marked."""
HEARTBEAT_SECONDS = 30
"""Prefect's minimum."""
SILENT_SECONDS = 180
"""Longest silence of a live run. If the server is away for less, no run is marked."""
_BEAT = "prefect.flow-run.heartbeat"
_ENDS = tuple(
    f"prefect.flow-run.{state}"
    for state in ("Completed", "Failed", "Crashed", "Cancelled", "Suspended")
)


def silent_runs(seconds: float = SILENT_SECONDS) -> AutomationCore:
    """Return the automation that marks one of our runs as crashed. The run must have sent a
    heartbeat, and then neither another nor its end for `seconds`."""
    trigger = EventTrigger(
        after={_BEAT},
        expect={_BEAT, *_ENDS},
        match=ResourceSpecification({"prefect.resource.id": ["prefect.flow-run.*"]}),
        match_related=ResourceSpecification({"prefect.resource.id": [f"prefect.tag.{TAG}"]}),
        for_each={"prefect.resource.id"},
        posture=Posture.Proactive,
        threshold=1,
        within=timedelta(seconds=seconds),
    )
    message = (
        f"no sign of life for {seconds:g} s: its process is gone; the next run continues where it "
        "stopped"
    )
    return AutomationCore(
        name="quiver: a silent run has crashed",
        description="Marks flow runs whose process died together with its worker, so that they "
        "hold no slot.",
        trigger=trigger,
        actions=[ChangeFlowRunState(state=StateType.CRASHED, message=message)],
    )


def on_event(source: str, deployment: str) -> DeploymentEventTrigger:
    """Return the trigger that runs `deployment` at each new version of `source` = RUN/KIND, or each
    time that the tag of `source` = RUN/policy@TAG moves.

    Raises ConfigError if `source` has another form, or if the deployment would start itself for
    ever: at versions of its run or of that run's side runs, and a night at its tag.
    """
    run, slash, dataset = source.partition("/")
    kind, at, tag = dataset.partition("@")
    tagged = kind == "policy" and NAME.fullmatch(tag) if at else True
    if not slash or not NAME.fullmatch(run) or kind not in KINDS or not tagged:
        problem = f"expected RUN/KIND or RUN/policy@TAG, with KIND one of {', '.join(KINDS)}"
        raise ConfigError(
            f"--on {printable(source)}",
            problem,
            next="e.g. --on feed/prompts, --on arith/policy@prod",
        )
    flow, _, own = deployment.partition("/")
    is_own = run in (own, *(own + ending for ending in SIDE_RUNS))
    if is_own and (not tag or flow == "nightly"):  # only a night moves a tag
        raise ConfigError(
            f"--on {printable(source)}",
            f"{deployment} makes these versions itself, so each run would start another",
            next="name another run",
        )
    return DeploymentEventTrigger(
        name=f"quiver: new {source} → {deployment}",
        expect={MOVED if tag else EVENT},
        match=ResourceSpecification({"prefect.resource.id": [f"quiver://{source}"]}),
        posture=Posture.Reactive,
        threshold=1,
    )


def install(client: SyncPrefectClient, automation: AutomationCore) -> dict[str, bool]:
    """Create or correct the automation of this name. An automation that a person switched off stays
    off. Returns whether it is `new`, and whether it is `changed`."""
    installed = client.read_automations_by_name(automation.name)
    if not installed:
        client.create_automation(automation)
        return {"new": True, "changed": False}
    first, *doubles = installed
    for double in doubles:
        client.delete_automation(double.id)
    compared = {"trigger", "actions", "description"}
    # compare models, not JSON, in which the order of sets would differ
    if first.model_dump(include=compared) == automation.model_dump(include=compared):
        return {"new": False, "changed": bool(doubles)}
    client.update_automation(first.id, automation.model_copy(update={"enabled": first.enabled}))
    return {"new": False, "changed": True}
