"""The one import name, `quiver`: beside a project that has `flows`, `stages` and `schemas` of its own."""

import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

import quiver

ROOT = Path(__file__).parents[1]
ROOMS = {"schemas", "stages", "flows", "deployments"}


def run(*command, cwd, **options):
    return subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
        **options,
    )


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    """An interpreter that has our wheel, and of this environment's libraries what a wheel needs."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    source = folder / "source"
    listed = run("git", "ls-files", "-co", "--exclude-standard", "-z", cwd=ROOT).stdout
    for name in filter(None, listed.split("\0")):
        if not name.startswith("tests/") and (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    built = run(*build, "--wheel-dir", folder, source, cwd=folder)
    assert built.returncode == 0, built.stderr
    venv.create(folder / "venv", with_pip=False)
    interpreter = folder / "venv/bin/python"
    where = "import site; print(site.getsitepackages()[0])"
    theirs = Path(run(interpreter, "-c", where, cwd=folder).stdout.strip())
    unpack = "import sys, zipfile; zipfile.ZipFile(sys.argv[1]).extractall(sys.argv[2])"
    (wheel,) = folder.glob("*.whl")
    assert run(sys.executable, "-c", unpack, wheel, theirs, cwd=folder).returncode == 0
    # Libraries come from this environment; its own Quiver is an editable one, found by a finder
    # that only its .pth file would install, and that is not read from here.
    ours = run(sys.executable, "-c", where, cwd=folder).stdout.strip()
    (theirs / "libraries.pth").write_text(ours + "\n")
    return interpreter


@pytest.fixture
def project(tmp_path) -> Path:
    """Somebody's own Prefect project, with rooms of the names that ours have."""
    for room in sorted(ROOMS):
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").write_text(f"WHOSE = 'theirs: {room}'\n")
    (tmp_path / "flows" / "etl.py").write_text("def rows():\n    return [{'question': '1 + 1?'}]\n")
    return tmp_path


def test_a_project_with_flows_stages_and_schemas_of_its_own(python, project):
    script = project / "script.py"
    script.write_text(
        "import flows, stages, schemas, deployments\n"
        "import quiver\n"
        "from quiver.stages.core.plugins import load\n"
        "store = quiver.Store('store')\n"
        "print(flows.WHOSE, stages.WHOSE, schemas.WHOSE, deployments.WHOSE)\n"
        "print(quiver.ConfigError.__module__, store.runs(), quiver.optimize.Config().algorithm)\n"
        "print(load('flows.etl:rows', 'data.source')[0]())\n"
    )
    done = run(python, script, cwd=project)
    assert done.stdout.splitlines() == [
        "theirs: flows theirs: stages theirs: schemas theirs: deployments",
        "quiver.schemas.errors [] grpo",
        "[{'question': '1 + 1?'}]",
    ], done.stderr
    listed = run(
        python, "-m", "quiver.flows.cli.main", "ls", "--store", "store", "--json", cwd=project
    )
    assert listed.stdout == '{"versions": []}\n', listed.stderr


def test_the_templates_of_the_report_are_in_the_wheel(python, project):
    code = (
        "from quiver.flows.look.plots import Panel, draw; "
        "print(draw([Panel('loss', [(1, 0.5, 0.0)])], 'step').svg[:4])"
    )
    done = run(python, "-c", code, cwd=project)
    assert done.stdout == "<svg\n", done.stderr


def test_the_documents_are_in_the_wheel(python, project):
    code = (
        "from pathlib import Path; import quiver.deployments as rooms; "
        "folder = Path(rooms.__path__[0]); "
        "print(*sorted(path.name for path in folder.glob('docs/*.md')), (folder / 'README.md').exists(),"
        " (folder.parent / 'stages/optimize/README.md').exists())"
    )
    done = run(python, "-c", code, cwd=project)
    names = sorted(path.name for path in (ROOT / "deployments/docs").glob("*.md"))
    assert done.stdout.split() == [*names, "True", "True"], done.stderr


def test_the_name_alone_loads_nothing(tmp_path):
    code = (
        "import sys, quiver; dir(quiver); "
        "print(sorted({'torch', 'prefect', 'pyarrow', 'pydantic', 'numpy'} & set(sys.modules)))"
    )
    done = run(sys.executable, "-c", code, cwd=tmp_path)
    assert done.stdout == "[]\n", done.stderr


def test_all_that_it_offers_is_there():
    from quiver.schemas.errors import QuiverError

    for name in dir(quiver):
        assert getattr(quiver, name), name
    errors = {error.__name__ for error in QuiverError.__subclasses__()} | {"QuiverError"}
    assert errors <= set(dir(quiver))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        quiver.nothing  # noqa: B018


def test_every_package_is_in_the_wheel():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {
        ".".join(("quiver", *path.parent.relative_to(ROOT).parts))
        for room in ROOMS
        for path in (ROOT / room).rglob("*.py")
        if path.parent != ROOT / "stages/api"
    }
    assert sorted(folders | {"quiver"}) == project["packages"]
