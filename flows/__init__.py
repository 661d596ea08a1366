"""In what order: recipes, Prefect flows and the command line. Nothing is sent to anybody: analytics
and telemetry are off."""

import os

os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
os.environ.setdefault("DO_NOT_TRACK", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault(
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "120"
)  # its 20 s are short for a busy laptop

if "PREFECT__FLOW_RUN_ID" in os.environ:  # set by the worker that started this process
    from .orphan import end_with_the_parent

    end_with_the_parent()
