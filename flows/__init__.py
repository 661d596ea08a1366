"""In what order: recipes, Prefect flows and the command line. Nothing is sent to anybody: analytics
and telemetry are off."""

import os

os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
os.environ.setdefault("DO_NOT_TRACK", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault(
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "120"
)  # its 20 s are short for a busy laptop

has_forms = True
"""Whether a flow that is imported describes its parameters, of which Prefect's pages make a form. A
command that deploys nothing sets it to False: describing a recipe takes a third of its imports."""

if "PREFECT__FLOW_RUN_ID" in os.environ:  # set by the worker that started this process
    from .orphan import end_with_the_parent

    end_with_the_parent()
