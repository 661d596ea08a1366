"""Code that a recipe names: which file it comes from, and which hash it has."""

import hashlib
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from quiver.schemas.errors import ConfigError
from quiver.stages.common.plugins import fingerprint, load, locate

CODE = "def where():\n    return __file__\n"
EXPLODING = "raise SystemExit('this file was run')\n"


@pytest.fixture
def project(tmp_path, monkeypatch):
    """An empty folder as working directory; what is imported from it is forgotten at the end."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    modules = set(sys.modules)
    yield tmp_path
    for name in sys.modules.keys() - modules:
        # not by getattr: torch puts modules there that make a name of whatever they are asked for
        members = vars(sys.modules[name])
        if str(tmp_path) in f"{members.get('__file__')} {members.get('__path__')}":
            del sys.modules[name]


@pytest.fixture
def nowhere(project, monkeypatch):
    """As `project`, which no entry of the path names: so the console script starts."""
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(project)])
    return project


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


# -- load


def test_copies_of_a_file_are_modules_of_their_own(tmp_path):
    """A function that opens what lies beside its file finds that folder's, not that of a copy
    loaded before."""
    found = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(CODE)
        function, sha256 = load(f"{tmp_path / name / 'mine.py'}:where", "field")
        found.append((function(), sha256))
    assert [path for path, _ in found] == [str(tmp_path / name / "mine.py") for name in ("a", "b")]
    assert found[0][1] == found[1][1], "the content is the same, and so is the hash"


class Raising(types.ModuleType):
    """A module that raises whatever it is asked for, as lazy ones may."""

    def __getattribute__(self, name):
        if name == "__dict__":
            return {}
        raise ImportError(name)


def test_an_edited_file_is_read_again_beside_modules_that_raise(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "raising", Raising("raising"))
    test_an_edited_file_is_read_again(tmp_path)


def test_an_edited_file_is_read_again(tmp_path):
    path = tmp_path / "mine.py"
    answers = []
    for number in (1, 2):
        path.write_text(f"def f():\n    return {number}\n")
        answers.append(load(f"{path}:f", "field")[0]())
    assert answers == [1, 2]


@pytest.mark.parametrize(
    ("name", "helper", "statement"),
    [
        ("mine.py:f", "helper.py", "import helper"),
        ("mine:f", "helper.py", "import helper"),
        ("package.mine:f", "package/helper.py", "from . import helper"),
        ("package.mine:f", "package/helper.py", "from package import helper"),
        ("package/mine.py:f", "package/helper.py", "from package import helper"),
    ],
)
def test_an_edited_neighbour_is_read_again(project, name, helper, statement):
    """Of the same length and in the same second, which a bytecode file cannot tell apart."""
    own_file = name.partition(":")[0].removesuffix(".py").replace(".", "/") + ".py"
    write(project, {"package/__init__.py": ""})
    write(project, {own_file: f"{statement}\n\ndef f():\n    return helper.NUMBER\n"})
    answers = []
    for number in (1, 2, 1):
        write(project, {helper: f"NUMBER = {number}\n"})
        function, sha256 = load(name, "field")
        answers.append((function(), sha256))
    assert [number for number, _ in answers] == [1, 2, 1]
    assert answers[0][1] == answers[2][1] != answers[1][1]


def test_what_two_files_share_is_read_again_by_both(project):
    """And by a third that is loaded only then."""
    write(
        project, {f"{n}.py": "import helper\n\ndef f():\n    return helper.NUMBER\n" for n in "abc"}
    )
    for number in (1, 2):
        write(project, {"helper.py": f"NUMBER = {number}\n"})
        assert [load(f"{name}:f", "field")[0]() for name in "ab"] == [number] * 2
    write(project, {"helper.py": "NUMBER = 3\n"})
    assert [load(f"{name}.py:f", "field")[0]() for name in "cab"] == [3] * 3


HELPED = "from helper import NUMBER\n\ndef f():\n    return NUMBER\n"
LATE = "def f():\n    from helper import NUMBER\n    return NUMBER\n"
RELATIVE = HELPED.replace("helper", ".helper")
PACKAGE = {"deep/__init__.py": "", "deep/helper.py": "NUMBER = 1\n"}


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("mine.py:f", {"mine.py": HELPED, "helper.py": "NUMBER = 1\n"}),
        ("mine:f", {"mine.py": HELPED, "helper.py": "NUMBER = 1\n"}),
        ("deep/mine.py:f", {"deep/mine.py": HELPED, "deep/helper.py": "NUMBER = 1\n"}),
        ("deep/mine.py:f", {"deep/mine.py": LATE, "deep/helper.py": "NUMBER = 1\n"}),
        ("deep.mine:f", {"deep/mine.py": HELPED, "deep/helper.py": "NUMBER = 1\n"}),
        ("deep/mine.py:f", {"deep/mine.py": HELPED, "helper.py": "NUMBER = 1\n"}),
        (
            "deep/mine.py:f",
            {"deep/mine.py": HELPED, "deep/helper.py": "NUMBER = 1\n", "helper.py": "NUMBER = 2\n"},
        ),
        ("deep/mine.py:f", {**PACKAGE, "deep/mine.py": RELATIVE}),
        ("deep/mine.py:f", {**PACKAGE, "deep/mine.py": RELATIVE.replace(".h", "deep.h")}),
        ("deep.mine:f", {**PACKAGE, "deep/mine.py": RELATIVE}),
    ],
)
def test_neighbours_are_found_wherever_the_command_runs(nowhere, name, files):
    """Those beside the file first, then those of its project; the path names none of them."""
    write(nowhere, files)
    function, sha256 = load(name, "field")
    assert function() == 1
    assert sha256 == fingerprint(locate(name, "field"))


def test_each_file_has_its_own_neighbours(nowhere):
    for number, folder in enumerate("aba"):
        write(nowhere / folder, {"mine.py": HELPED, "helper.py": f"NUMBER = {number % 2}\n"})
        assert load(f"{folder}/mine.py:f", "field")[0]() == number % 2


def test_a_file_with_a_dot_in_its_name_is_a_file(tmp_path):
    (tmp_path / "v1.2.py").write_text("def score(completions):\n    return 12\n")
    assert load(f"{tmp_path}/v1.2.py:score", "use", Callable)[0]([]) == 12


def test_folders_without_a_module_of_their_own_are_told_apart(nowhere):
    deep = "from helper.deep import NUMBER\n\ndef f():\n    return NUMBER\n"
    for number, folder in enumerate("ab"):
        write(nowhere / folder, {"mine.py": deep, "helper/deep.py": f"NUMBER = {number}\n"})
        assert load(f"{folder}/mine.py:f", "field")[0]() == number


def test_a_file_without_the_neighbour_gets_no_other_files(nowhere):
    write(nowhere / "a", {"mine.py": HELPED, "helper.py": "NUMBER = 1\n"})
    write(nowhere / "b", {"mine.py": HELPED})
    load("a/mine.py:f", "field")
    with pytest.raises(ConfigError, match="No module named 'helper'"):
        load("b/mine.py:f", "field")


def test_neighbours_stand_in_for_no_library(nowhere):
    """Neither a file of a name of the standard library's, nor a folder of an installed one's."""
    code = "import colorsys, pyarrow\n\ndef f():\n    return colorsys.__file__, pyarrow.__file__\n"
    write(nowhere, {"deep/mine.py": code, "deep/colorsys.py": "", "deep/pyarrow/notes.txt": ""})
    sys.modules.pop("colorsys", None)
    assert not any(str(nowhere) in file for file in load("deep/mine.py:f", "field")[0]())
    installed = sys.modules["pyarrow"]
    write(nowhere, {"mine.py": HELPED, "helper.py": "NUMBER = 1\n"})
    load("mine.py:f", "field")
    assert sys.modules["pyarrow"] is installed


# -- locate


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("mine.py:f", "mine.py"),
        ("mine:f", "mine.py"),
        ("package:f", "package/__init__.py"),
        ("package.mine:f", "package/mine.py"),
        ("package.deep.mine:f", "package/deep/mine.py"),
        ("bare.folder.mine:f", "bare/folder/mine.py"),
        ("stages.mine:f", "stages/mine.py"),
    ],
)
def test_locating_runs_nothing(project, name, file):
    package = ["package/__init__.py", "package/deep/__init__.py", "stages/__init__.py"]
    write(project, dict.fromkeys([*package, file], EXPLODING))
    assert locate(name, "field") == project / file


def test_modules_of_ours_are_located_below_quiver_alone(project):
    assert locate("quiver.deployments.recipes.larger:rows", "field").name == "larger.py"
    write(project, {"deployments/__init__.py": EXPLODING})
    with pytest.raises(ConfigError, match=r"No module named 'deployments\.recipes\.larger'"):
        locate("deployments.recipes.larger:rows", "field")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mine", "expected module:function or file.py:function"),
        (":f", "expected module:function"),
        (".a:f", "expected module:function"),
        ("mine.py:", "expected module:function"),
        ("gone.py:f", "there is no file"),
        ("gone:f", "No module named 'gone'"),
        ("empty.gone.deep:f", "No module named 'empty.gone.deep'"),
        ("empty:f", "No module named 'empty'"),
        ("quiver.gone.deep:f", "No module named 'quiver.gone.deep'"),
        ("stages.gone:f", "No module named 'stages.gone'"),
    ],
)
def test_what_is_not_there_is_told(project, name, message):
    (project / "empty").mkdir()
    for ask in (locate, load):
        with pytest.raises(ConfigError, match=message) as error:
            ask(name, "reward.functions[0].use")
        assert error.value.object.startswith("reward.functions[0].use")


# -- fingerprint


def test_a_file_alone_has_the_hash_of_its_bytes(project):
    code = "import json, random\nimport numpy as np\nfrom pathlib import Path\nimport gone\n"
    write(project, {"mine.py": code, "random.py": "", "other.py": "import mine"})
    assert fingerprint(project / "mine.py") == hashlib.sha256(code.encode()).hexdigest()
    write(project, {"mine.py": "def f(:\n"})
    assert fingerprint(project / "mine.py") == hashlib.sha256(b"def f(:\n").hexdigest()


@pytest.mark.parametrize(
    ("statement", "neighbour"),
    [
        ("import helper", "package/helper.py"),
        ("from helper import x", "package/helper.py"),
        ("from helper import *", "package/helper.py"),
        ("from . import helper", "package/helper.py"),
        ("from . import x", "package/__init__.py"),
        ("from .helper import x", "package/helper.py"),
        ("from .code import x", "package/code.py"),
        ("from package.helper import x", "package/helper.py"),
        ("import package.helper", "package/__init__.py"),
        ("from ..package.helper import x", "package/helper.py"),
        ("def f():\n    from .helper import x\n", "package/helper.py"),
        ("try:\n    import helper\nexcept ImportError:\n    pass\n", "package/helper.py"),
        ("import between", "package/between.py"),
        ("import between", "package/helper.py"),
    ],
)
def test_a_neighbour_that_is_imported_counts(project, statement, neighbour):
    code = {"package/__init__.py": "", "package/mine.py": statement, "package/unused.py": "1"}
    code["package/between.py"] = "import helper, mine"
    write(project, {**code, neighbour: "1"})
    path = project / "package/mine.py"
    before = fingerprint(path)
    assert before != hashlib.sha256(statement.encode()).hexdigest()
    write(project, {"package/unused.py": "2"})
    assert fingerprint(path) == before
    write(project, {neighbour: "2"})
    assert fingerprint(path) != before
    write(project, {neighbour: "1"})
    project.joinpath("package").rename(project / "moved")
    if "package" not in statement:
        assert fingerprint(project / "moved/mine.py") == before, "wherever the folder lies"


@pytest.mark.parametrize(
    "statement",
    [
        "import sibling",
        "from .. import sibling",
        "import deep.helper",
        "from .deep import helper",
        "import importlib; importlib.import_module('unused')",
        "import random",
    ],
)
def test_other_folders_and_computed_names_do_not_count(project, statement):
    names = ["unused", "random", "deep/helper", "deep/__init__", "../sibling"]
    write(project, {f"folder/{name}.py": "1" for name in names})
    write(project, {"folder/mine.py": statement})
    expected = hashlib.sha256(statement.encode()).hexdigest()
    assert fingerprint(project / "folder/mine.py") == expected


def test_installed_packages_and_ours_are_no_neighbours(project):
    folder = "env/lib/python3.11/site-packages/theirs"
    names = {f"{folder}/__init__.py": "from .b import x", f"{folder}/b.py": "x = 1"}
    write(project, {**names, "mine.py": "import theirs\nfrom stages.optimize import algorithms\n"})
    for name in (f"{folder}/__init__.py", "mine.py"):
        path = project / name
        assert fingerprint(path) == hashlib.sha256(path.read_bytes()).hexdigest()
    ours = locate("quiver.stages.optimize.algorithms:x", "field")
    assert fingerprint(ours) == hashlib.sha256(ours.read_bytes()).hexdigest()
