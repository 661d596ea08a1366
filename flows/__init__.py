"""The order of the stages: recipes, Prefect flows and the command line.

Importing it turns off analytics and telemetry, and ends a worker's flow process with its worker.

Not of the spine: what a run makes does not depend on what is set here.
"""

import os

os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
os.environ.setdefault("DO_NOT_TRACK", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault(
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "120"
)  # Prefect's 20 s are short for a busy laptop.

has_forms = True
"""If true, an imported flow describes its parameters, from which Prefect's pages make a form. A
command that deploys nothing sets it to False: describing a recipe takes a third of its import
time."""

num_made = 0
"""Number of versions that this process has made so far, itself or by children and pools."""

if "PREFECT__FLOW_RUN_ID" in os.environ:  # Set by the worker that started this process.
    from .stopping import end_with_the_parent

    end_with_the_parent()
