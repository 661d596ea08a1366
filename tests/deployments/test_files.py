"""prefect.yaml, kubernetes.json and the Dockerfile against what reads them; Prefect itself drops a
misspelt key in silence."""

import importlib
import json
import re
import subprocess
import tomllib
from pathlib import Path

import prefect
import pytest
import yaml
from prefect.cli.deploy._models import (
    ConcurrencyLimitSpec,
    DeploymentConfig,
    PrefectYamlModel,
    RawScheduleConfig,
    WorkPoolConfig,
)
from prefect.client.schemas.objects import ConcurrencyLimitStrategy
from prefect.client.schemas.schedules import CronSchedule
from prefect.flows import load_flow_from_entrypoint
from prefect.utilities.callables import parameter_schema

from quiver.deployments import deploy
from quiver.deployments.automations import HEARTBEAT_SECONDS, TAG
from quiver.deployments.deploy import recipe_parameters
from quiver.deployments.paths import make_absolute
from quiver.flows.recipe import load
from quiver.schemas.errors import ConfigError
from tests.flows.conftest import RECIPE

ROOT = Path(__file__).parents[2]
FILE = yaml.safe_load((ROOT / "deployments/prefect.yaml").read_text())
ENTRIES = {entry["name"]: entry for entry in FILE["deployments"]}
WORKERS = json.loads(
    (
        Path(prefect.__file__).parent
        / "server/api/collections_data/views/aggregate-worker-metadata.json"
    ).read_text()
)
PACKAGE = {"process": "prefect", "docker": "prefect-docker", "kubernetes": "prefect-kubernetes"}
KUBERNETES = json.loads((ROOT / "deployments/kubernetes.json").read_text())
NEWER = {"docker": {"container_create_kwargs"}}
"""Variables of prefect-docker 0.7 that the list within Prefect does not have yet."""


def names(model) -> set[str]:
    return {field.alias or name for name, field in model.model_fields.items()}


def kind_of(entry: dict) -> str:
    return entry["work_pool"]["name"].partition("-")[2] or "process"


def template_of(kind: str) -> dict:
    """The base job template that a pool of this type has by default, as Prefect's server ships
    it."""
    return WORKERS[PACKAGE[kind]][kind]["default_base_job_configuration"]


def steps_of(entry: dict) -> list[tuple[str, dict]]:
    return [
        (name, dict(inputs)) for step in entry.get("build", []) for name, inputs in step.items()
    ]


def test_every_key_of_the_file_is_one_that_prefect_reads():
    assert set(FILE) <= names(PrefectYamlModel)
    assert len(ENTRIES) == len(FILE["deployments"]) == 7
    for entry in ENTRIES.values():
        assert set(entry) <= names(DeploymentConfig)
        assert set(entry["work_pool"]) <= names(WorkPoolConfig)
        assert set(entry.get("concurrency_limit", {})) <= names(ConcurrencyLimitSpec)
        for schedule in entry.get("schedules", []):
            RawScheduleConfig.model_validate(schedule)
            CronSchedule(cron=schedule["cron"], timezone=schedule["timezone"])
        if "concurrency_limit" in entry:
            ConcurrencyLimitStrategy(entry["concurrency_limit"]["collision_strategy"])


def test_there_is_a_variant_for_each_kind_of_pool_and_hardware():
    assert {f"{hardware}-{kind}" for hardware in ("cpu", "gpu") for kind in PACKAGE} <= set(ENTRIES)
    for name in set(ENTRIES) - {"gpu"}:
        hardware, _, kind = name.partition("-")
        pool = ENTRIES[name]["work_pool"]
        assert pool["name"] == (hardware if kind == "process" else name)
        assert kind == "process" or pool["job_variables"]["image"] == f"quiver:{hardware}"


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_an_entry_is_what_it_names(entry):
    """The flow exists and takes these parameters; the pull step and the build step exist and take
    these inputs."""
    flow = load_flow_from_entrypoint(entry["entrypoint"])
    schema = parameter_schema(flow)
    given = entry.get("parameters", {})
    assert set(given) <= set(schema.properties)
    assert set(schema.required) <= set(given) or entry["entrypoint"] == "quiver.flows.stage.stage"
    assert entry["tags"] == [TAG]
    assert entry["work_pool"]["job_variables"]["env"] == {
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": str(HEARTBEAT_SECONDS)
    }
    for name, inputs in steps_of(entry):
        module, _, attribute = name.rpartition(".")
        assert getattr(importlib.import_module(module), attribute) is recipe_parameters
        identifier, pool = inputs.pop("id"), inputs["pool"]
        assert (
            given == {"recipe": f"{{{{ {identifier}.recipe }}}}"}
            and pool == entry["work_pool"]["name"]
        )
        assert set(inputs) <= set(recipe_parameters.__annotations__)


@pytest.mark.parametrize(
    "entry",
    [entry for entry in ENTRIES.values() if "build" in entry],
    ids=lambda entry: entry["name"],
)
def test_the_recipe_of_an_entry_is_whole_where_it_runs(entry, monkeypatch):
    """Its files lie in the image, the folder /opt/quiver of which is this one; its store in what
    the pool mounts."""
    monkeypatch.chdir(ROOT)
    ((_, inputs),) = steps_of(entry)
    folder = inputs.get("folder")
    _, paths = make_absolute(
        load(inputs["file"], inputs.get("settings", [])),
        "a pool",
        folder=folder,
        must_exist=folder is None,
    )
    for name, path in paths.items():
        if folder and name == "store":
            assert path.is_relative_to("/srv/quiver")
        elif name != "store":
            assert (ROOT / path.relative_to(folder or ROOT)).exists()
    if kind_of(entry) == "docker":
        assert entry["work_pool"]["job_variables"]["volumes"] == ["/srv/quiver:/srv/quiver"]


@pytest.mark.parametrize("nightly", [False, True])
def test_a_recipe_is_refused_at_the_other_entry_point(nightly, tmp_path, monkeypatch):
    """The flow of the other would never promote, or has nothing to decide."""
    monkeypatch.setattr(deploy, "check_api", lambda: "")
    (tmp_path / "recipe.toml").write_text(RECIPE + ("" if nightly else "[promotion]\n"))
    name = "scheduled" if nightly else "nightly"
    words = rf"so its entry point is quiver\.flows\.{name}\.{name}"
    with pytest.raises(ConfigError, match=words) as caught:
        recipe_parameters(str(tmp_path / "recipe.toml"), "cpu", nightly=nightly)
    assert f"nightly: {str(not nightly).lower()}" in caught.value.next
    load_flow_from_entrypoint(f"quiver.flows.{name}.{name}")


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_job_variables_are_those_of_the_pools_type(entry):
    kind = kind_of(entry)
    template = KUBERNETES if kind == "kubernetes" else template_of(kind)
    known = set(template["variables"]["properties"]) | NEWER.get(kind, set())
    assert set(entry["work_pool"]["job_variables"]) <= known


def test_the_kubernetes_template_is_prefects_own_with_gpus_and_a_store():
    own = template_of("kubernetes")
    properties, ours = own["variables"]["properties"], KUBERNETES["variables"]["properties"]
    assert {name: ours[name] for name in properties} == properties
    assert set(ours) - set(properties) == {"gpus", "store_claim", "store_path"}
    written = json.dumps(KUBERNETES["job_configuration"])
    assert set(re.findall(r"\{\{ (\w+) \}\}", written)) == set(ours), (
        "each variable is used, and each that is used is declared"
    )
    pod = KUBERNETES["job_configuration"]["job_manifest"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"].pop("nvidia.com/gpu") == "{{ gpus }}"
    assert {mount["name"] for mount in container.pop("volumeMounts")} == {
        volume["name"] for volume in pod.pop("volumes")
    }
    assert KUBERNETES["job_configuration"] == own["job_configuration"], "and nothing else differs"


# -- Dockerfile

DOCKERFILE = (ROOT / "deployments/Dockerfile").read_text().replace("\\\n", " ")


def instructions(word: str) -> list[str]:
    return re.findall(rf"^{word} (.+)$", DOCKERFILE, re.MULTILINE)


def context() -> set[str]:
    """The files that a build gets to see: those that git knows, less what the ignore file leaves
    out."""
    lines = (ROOT / "deployments/Dockerfile.dockerignore").read_text().splitlines()
    assert lines[0] == "*", "nothing is taken that is not named: no store, no secret"
    taken = [line.removeprefix("!") for line in lines if line.startswith("!")]
    done = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return {
        path
        for path in done.stdout.splitlines()
        if any(path == each or path.startswith(f"{each}/") for each in taken)
    }


def test_what_is_copied_is_there_and_what_is_needed_is_copied():
    files, sources = (
        context(),
        [name for line in instructions("COPY") for name in line.split()[:-1]],
    )
    for source in sources:
        assert any(path == source or path.startswith(f"{source}/") for path in files), source
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = project["tool"]["setuptools"]["package-dir"].values()
    rooms = {folder.partition("/")[0] for folder in folders}
    about = {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]}
    assert rooms | about <= set(sources)


def test_both_builds_have_their_lock_file_and_install_as_make_does():
    (requirement,) = re.findall(r"-r (\S+)", DOCKERFILE)
    assert {requirement.replace("${ACCELERATOR}", each) for each in ("cpu", "gpu")} <= context()
    made = (ROOT / "Makefile").read_text()
    for flags in ("--no-deps", "--no-build-isolation --editable ."):
        assert flags in " ".join(instructions("RUN")) and flags in made
    assert "ACCELERATOR=cpu" in instructions("ARG")
    pythons = re.search(r"^PYTHONS := (.*)$", made, re.MULTILINE)[1].split()
    image_python = instructions("FROM")[0].removeprefix("python:").partition("-")[0]
    assert image_python in pythons, "the lock files are made for these"
    first, last = pythons[0], pythons[-1]
    after_last = f"{last.partition('.')[0]}.{int(last.partition('.')[2]) + 1}"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">={first},<{after_last}"


def test_signals_reach_the_whole_group_and_the_user_is_not_root():
    assert (
        instructions("ENTRYPOINT") == ['["tini", "-g", "--"]'] and "tini" in instructions("RUN")[0]
    )
    assert instructions("USER") == ["quiver"]
