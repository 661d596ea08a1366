"""The direction of imports, schemas ← stages.core ← stages.model ← stages.turns ← stages.<x> ← flows ←
deployments, and who may import the heavy libraries."""

import ast
import subprocess
import sys
import tomllib
from functools import cache
from importlib import metadata
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.each import check_each

ROOT = Path(__file__).parents[1]
ROOMS = ("schemas", "stages", "flows", "deployments")
# stages/api is `quiver` itself, above all rooms
FILES = sorted(
    path
    for room in ROOMS
    for path in (ROOT / room).rglob("*.py")
    if path.parent != ROOT / "stages" / "api"
)
SHARED = ("core", "model", "turns")
"""The rooms that all stages use, lowest first."""
STAGES = {path.name for path in (ROOT / "stages").iterdir() if path.is_dir()} - {
    "api",
    "__pycache__",
    *SHARED,
}
NAMES = {
    path: ".".join(("quiver", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(
        ".__init__"
    )
    for path in FILES
}


@cache
def imported(path: Path, *, top_only: bool = False) -> set[str]:
    """Dotted names that a file imports, relative ones resolved; `top_only`: not inside functions or
    TYPE_CHECKING."""
    tree = ast.parse(path.read_text())
    package = ("quiver", *path.relative_to(ROOT).parts[:-1])
    found = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(
                [*package[: len(package) - node.level + 1], *([node.module] if node.module else [])]
            )
            module = base if node.level else node.module
            found.add(module)
            found.update(f"{module}.{alias.name}" for alias in node.names)
        skipped = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or (
            isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        )
        if not (top_only and skipped):
            for child in ast.iter_child_nodes(node):
                visit(child)

    visit(tree)
    return found


def uses(path: Path, library: str, *, top_only: bool = False) -> bool:
    return any(
        name == library or name.startswith(f"{library}.")
        for name in imported(path, top_only=top_only)
    )


def floor(module: str) -> int:
    _, room, *inner = module.split(".")
    if room == "stages":
        if inner and inner[0] in SHARED:
            return 1 + SHARED.index(inner[0])
        return 4 if inner and inner[0] in STAGES else 1
    return {"schemas": 0, "flows": 5, "deployments": 6}[room]


def test_imports_go_one_way():
    def check(path: Path) -> None:
        own = NAMES[path]
        for name in imported(path):
            package = name.partition(".")[0]
            assert package != "tests", f"{own} imports the tests"
            assert package not in ROOMS, f"{own} imports {name} without `quiver.`"
            if package != "quiver" or name == "quiver":
                continue
            assert floor(name) <= floor(own), f"{own} imports {name} from above"
            if floor(own) == floor(name) == 4:
                assert own.split(".")[2] == name.split(".")[2], (
                    f"{own} imports another stage: {name}"
                )

    check_each(FILES, check, NAMES.get)


@pytest.mark.parametrize(
    ("lower", "upper"),
    [
        ("stages.core.store", "stages.core.run"),
        ("stages.core.processes", "stages.core.run"),
        ("stages.core.processes", "stages.core.store"),
        ("flows.look", "flows.cli"),
    ],
)
def test_within_a_room_imports_go_one_way_too(lower, upper):
    below = [path for path in FILES if NAMES[path].startswith(f"quiver.{lower}.")]
    assert below, f"there is no {lower}: the rule is empty"
    users = [NAMES[path] for path in below if uses(path, f"quiver.{upper}")]
    assert users == []


def test_a_flow_does_not_import_the_command_line():
    flows = [path for path in FILES if path.parent == ROOT / "flows"]
    assert [NAMES[path] for path in flows if uses(path, "quiver.flows.cli")] == []


@pytest.mark.parametrize(
    ("library", "allowed"),
    [
        ("prefect", ("quiver.flows.", "quiver.deployments.")),
        (
            "vllm",
            ("quiver.stages.generate.engines.vllm", "quiver.stages.reward.models.vllm_pooling"),
        ),
        ("accelerate", ("quiver.stages.optimize.", "quiver.stages.logprobs.")),
        ("typer", ("quiver.flows.cli.main", "quiver.flows.cli")),
    ],
)
def test_who_may_import_what(library, allowed):
    users = [NAMES[path] for path in FILES if uses(path, library)]
    assert users, f"nobody imports {library}: the rule is empty"
    assert [name for name in users if not name.startswith(allowed)] == []


BROUGHT = {"pydantic_core": "pydantic", "triton": "torch"}
"""Libraries that come with a declared one, in the version that it asks for."""
UNLISTED = {"gymnasium", "mcp", "mlflow"}
"""Those that a recipe may name, and whose lack an error tells."""


def test_each_library_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    declared = {canonicalize_name(Requirement(text).name) for text in texts}
    brought_by = metadata.packages_distributions() | {name: [by] for name, by in BROUGHT.items()}
    libraries = {name.partition(".")[0]: NAMES[path] for path in FILES for name in imported(path)}
    for own in ("quiver", *sys.stdlib_module_names):
        libraries.pop(own, None)
    assert libraries.keys() >= BROUGHT.keys() | UNLISTED, "nobody imports what the rule names"
    undeclared = {
        library: user
        for library, user in libraries.items()
        if declared.isdisjoint(map(canonicalize_name, brought_by.get(library, [library])))
    }
    assert undeclared.keys() == UNLISTED, undeclared


def test_torch_stays_out_of_the_light_rooms():
    light = (
        "quiver.schemas",
        "quiver.stages.core.store",
        "quiver.stages.core.run",
        "quiver.stages.core.plugins",
        "quiver.stages.core.config",
        "quiver.stages.prompt",
    )
    heavy = [
        NAMES[p]
        for p in FILES
        if uses(p, "torch") and NAMES[p].startswith((*light, "quiver.stages.reward.stage"))
    ]
    assert heavy == []


@pytest.mark.parametrize("name", ["losses", "advantages"])
def test_the_maths_stands_alone(name):
    path = ROOT / "stages/optimize" / f"{name}.py"
    ours_or_foreign = {module.partition(".")[0] for module in imported(path)} - set(
        sys.stdlib_module_names
    )
    assert ours_or_foreign <= {"torch", "quiver"}
    assert {m for m in imported(path) if m.startswith("quiver")} <= {
        "quiver.stages.model.ragged",
        "quiver.stages.model.ragged.Ragged",
    }


def test_no_flow_file_bears_the_name_of_a_library():
    libraries = {
        "datasets",
        "evaluate",
        "torch",
        "transformers",
        "prefect",
        "accelerate",
        "vllm",
        "pyarrow",
        "typer",
        "rich",
    }
    assert {path.stem for path in (ROOT / "flows").glob("*.py")} & (
        libraries | set(sys.stdlib_module_names)
    ) == set()


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        (
            "quiver.stages.prompt.stage, quiver.stages.generate.stage, quiver.stages.reward.stage, "
            "quiver.stages.optimize.stage",
            "torch vllm prefect transformers accelerate",
        ),
        (
            "quiver.flows.cli.main",
            "torch vllm prefect transformers accelerate pyarrow numpy pydantic",
        ),
    ],
)
def test_a_stage_is_cheap_to_import_and_help_waits_for_no_library(modules, heavy):
    code = f"import sys, {modules}; print(sorted({{*{heavy.split()}}} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "[]"


def test_every_config_field_has_a_docstring():
    sys.path.insert(0, str(ROOT))
    from pydantic import BaseModel

    from quiver.flows.recipe import Recipe
    from quiver.stages.core.config import descriptions

    seen: set[type] = set()

    def check(model: type[BaseModel]) -> None:
        if model in seen:
            return
        seen.add(model)
        for name, field in model.model_fields.items():
            assert descriptions(model).get(name), (
                f"{model.__module__}.{model.__name__}.{name} has no docstring"
            )
            for part in (field.annotation, *getattr(field.annotation, "__args__", ())):
                if isinstance(part, type) and issubclass(part, BaseModel):
                    check(part)

    check(Recipe)
    assert len(seen) > 8


def test_nothing_of_a_machine_is_tracked():
    """No link is tracked: one to an absolute path is broken in every other checkout."""
    listed = subprocess.run(
        ["git", "ls-files", "--stage"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    if listed.returncode:
        pytest.skip("this is no checkout of git's")
    entries = [line.partition("\t") for line in listed.stdout.splitlines()]
    assert entries
    assert [name for about, _, name in entries if about.startswith("120000")] == []
