"""Code that a recipe names: which file it comes from, and which hash it has; and Python's parser
under several threads."""

import ast
import contextlib
import gc
import hashlib
import os
import pickle
import py_compile
import subprocess
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from quiver.schemas.errors import ConfigError
from quiver.stages.core.plugins import definition, fingerprint, load, locate
from quiver.stages.core.threads import parse_python
from tests.flows.test_unreadable import AS_ANYBODY

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


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


# -- load

HELPED = "from .helper import NUMBER\n\ndef f():\n    return NUMBER\n"
LATE = "def f():\n    from .helper import NUMBER\n    return NUMBER\n"


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("mine.py:f", {"mine.py": HELPED}),
        ("mine.py:f", {"mine.py": LATE}),
        ("mine.py:f", {"mine.py": HELPED, "__init__.py": "NUMBER = 2\n"}),
        ("mine.py:f", {"mine.py": HELPED.replace(".helper", "."), "__init__.py": "NUMBER = 1\n"}),
        ("mine.py:f", {"mine.py": HELPED.replace(".helper", ".deep.one"), "deep/one.py": "NUMBER = 1\n"}),
        ("v1.2 a.py:f", {"v1.2 a.py": HELPED}),
        ("random.py:f", {"random.py": HELPED, "json.py": ""}),
        ("mine:f", {"mine.py": HELPED.replace(".h", "h")}),
        ("bare.mine:f", {"bare/mine.py": HELPED.replace(".h", "h")}),
        ("bare.mine:f", {"bare/mine.py": HELPED.replace(".h", "bare.h"), "bare/helper.py": "NUMBER = 1\n"}),
    ],
)  # fmt: skip
def test_code_finds_what_it_imports(project, name, files):
    write(project, {"helper.py": "NUMBER = 1\n", **files})
    function, sha256 = load(name, "field")
    assert function() == 1
    assert sha256 == fingerprint(locate(name, "field"))
    assert pickle.loads(pickle.dumps(function)) is function


def test_each_folder_has_its_own_files(tmp_path):
    functions = []
    for number, folder in enumerate("aba"):
        write(tmp_path / folder, {"mine.py": LATE, "helper.py": f"NUMBER = {number % 2}\n"})
        functions.append(load(f"{tmp_path}/{folder}/mine.py:f", "field")[0])
    assert [function() for function in functions] == [0, 1, 0]
    files = [function.__code__.co_filename for function in functions]
    assert files == [str(tmp_path / folder / "mine.py") for folder in "aba"]


def test_another_process_finds_a_function_by_its_name(tmp_path):
    write(tmp_path, {"mine.py": HELPED, "helper.py": "NUMBER = 1\n"})
    function, _ = load(f"{tmp_path}/mine.py:f", "field")
    code = f"import pickle; print(pickle.loads({pickle.dumps(function)!r})())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"


def test_a_file_beside_it_is_imported_by_relative_name(tmp_path):
    write(tmp_path, {"mine.py": HELPED.replace(".h", "h"), "helper.py": "NUMBER = 1\n"})
    with pytest.raises(ConfigError, match="No module named 'helper'") as caught:
        load(f"{tmp_path}/mine.py:f", "field")
    assert caught.value.next.endswith("from .helper import …")


@pytest.mark.parametrize(
    "statement",
    ["from .. import load as NUMBER", "from ..helper import NUMBER", "from ...config import parse"],
)
@pytest.mark.parametrize("file", ["mine.py", "deep/one.py"])
def test_an_import_from_above_the_folder_is_refused(project, statement, file):
    """It would find modules of ours, or folders of the working directory."""
    write(project, {"helper.py": "NUMBER = 1\n", "helper/__init__.py": "NUMBER = 1\n"})
    function = "\n\ndef f():\n    return 1\n"
    if "/" in file:
        statement = statement.replace("from ", "from .")
        write(project, {"folder/mine.py": "from .deep.one import f\n"})
    write(project, {f"folder/{file}": statement + function})
    with pytest.raises(ConfigError, match="from above its folder") as caught:
        load("folder/mine.py:f", "field")
    assert caught.value.next == "name it by its module: package.module:function"
    tried = f"try:\n    {statement}\nexcept ImportError:\n    pass"
    write(project, {f"folder/{file}": tried + function})
    assert load("folder/mine.py:f", "field")[0]() == 1


def test_a_folder_below_may_import_from_the_folder(project):
    code = "from ..helper import NUMBER\n\ndef f():\n    return NUMBER\n"
    write(project, {"helper.py": "NUMBER = 1\n", "deep/one.py": code})
    write(project, {"mine.py": "from .deep.one import f\n"})
    assert load("mine.py:f", "field")[0]() == 1


class Raising(types.ModuleType):
    """A module that raises whatever it is asked for, as lazy ones may."""

    def __getattribute__(self, name):
        if name == "__dict__":
            return {}
        raise ImportError(name)


@pytest.mark.parametrize(
    ("name", "helper", "statement"),
    [
        ("mine.py:f", "mine.py", ""),
        ("mine.py:f", "helper.py", "from . import helper\nfrom .helper import NUMBER"),
        ("mine.py:f", "helper.py", "from helper import NUMBER"),
        ("mine:f", "helper.py", "from helper import NUMBER"),
        ("package.mine:f", "package/helper.py", "from . import helper\nNUMBER = helper.NUMBER"),
        ("package.mine:f", "package/helper.py", "from package.helper import NUMBER"),
        ("package/mine.py:f", "package/helper.py", "from .helper import NUMBER"),
    ],
)
def test_an_edited_file_is_read_again(project, monkeypatch, name, helper, statement):
    """Of the same length and in the same second, which a bytecode file cannot tell apart; beside
    modules that raise."""
    monkeypatch.setitem(sys.modules, "raising", Raising("raising"))
    file = name.partition(":")[0].removesuffix(".py").replace(".", "/") + ".py"
    code = f"{statement}\n\ndef f():\n    return NUMBER\n"
    answers = []
    for number in (1, 2, 1):
        write(project, {"package/__init__.py": "", file: code})
        write(project, {helper: f"NUMBER = {number}\n" + (code if helper == file else "")})
        function, sha256 = load(name, "field")
        answers.append((function(), sha256))
    assert [number for number, _ in answers] == [1, 2, 1]
    assert answers[0][1] == answers[2][1] != answers[1][1]


@pytest.mark.parametrize("name", ["mine.py:f", "mine:f"])
def test_a_file_is_read_again_where_its_bytecode_cannot_be_deleted(project, name):
    """In a folder of somebody else; the bytecode has the second and the size of the new text."""
    prefix = [] if os.geteuid() else AS_ANYBODY
    if subprocess.run([*prefix, "true"], check=False).returncode:
        pytest.skip("root cannot give up its powers here")
    helped = HELPED if ".py" in name else HELPED.replace(".h", "h")
    for number in (1, 2):
        write(project, {"mine.py": helped, "helper.py": f"NUMBER = {number}\n"})
        for path in (project / "mine.py", project / "helper.py"):
            os.utime(path, (1e9, 1e9))
            if number == 1:
                os.utime(py_compile.compile(str(path)), (1e9, 1e9))
    (project / "__pycache__").chmod(0o555)
    code = f"from quiver.stages.core.plugins import load; print(load({name!r}, 'field')[0]())"
    command = [*prefix, sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    (project / "__pycache__").chmod(0o755)
    assert (done.stdout, done.stderr) == ("2\n", "")


@pytest.mark.parametrize("suffix", ["", ".py"])
def test_what_files_share_is_one_module_and_read_again_by_all(project, suffix):
    """And by a third that is loaded only then."""
    statement = "from . import helper" if suffix else "import helper"
    code = f"{statement}\n\ndef f():\n    return helper.NUMBERS\n"
    write(project, {f"{name}.py": code for name in "abc"})
    for number, names in ((1, "ab"), (2, "ab"), (3, "cab")):
        write(project, {"helper.py": f"NUMBERS = [{number}]\n"})
        functions = [load(f"{name}{suffix}:f", "field")[0] for name in names]
        assert [function() for function in functions] == [[number]] * len(names)
    assert functions[1]() is functions[2]()


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


@pytest.mark.parametrize(
    ("code", "is_plain"),
    [
        ("def f(x): ...", True),
        ("async def f(x): ...", True),
        ("@print\ndef f(x): ...", False),
        ("class f: ...", False),
        ("if 1:\n    def f(x): ...", False),
        ("f = g = 1", False),
        ("from helper import g as f", False),
        ("from helper import *", False),
        ("globals()['f'] = 1", False),
    ],
)
def test_a_definition_is_read_and_not_run(project, code, is_plain):
    write(project, {"mine.py": f"{code}\n{EXPLODING}"})
    node = definition("mine.py:f", "field")
    assert (node is not None and node.args.args[0].arg == "x") == is_plain


def test_a_name_that_is_not_defined_is_told(project):
    write(project, {"mine.py": "def score(): ...\nother = 1\n"})
    for ask in (load, definition):
        with pytest.raises(ConfigError, match=r"has no function f; it has score"):
            ask("mine.py:f", "field")
    write(project, {"mine.py": "def f(:\n"})
    with pytest.raises(ConfigError, match="SyntaxError"):
        definition("mine.py:f", "field")


# -- fingerprint


def test_a_file_alone_has_the_hash_of_its_bytes(project):
    for code in ("import json, random\nfrom pathlib import Path\nimport gone\n", "def f(:\n"):
        write(project, {"mine.py": code, "other.py": "import mine"})
        assert fingerprint(project / "mine.py") == hashlib.sha256(code.encode()).hexdigest()


@pytest.mark.parametrize(
    ("statement", "neighbour"),
    [
        ("import helper", "helper.py"),
        ("from helper import x", "helper.py"),
        ("from . import helper", "helper.py"),
        ("from . import x", "__init__.py"),
        ("from .helper import *", "helper.py"),
        ("from package.helper import x", "helper.py"),
        ("import package.helper", "__init__.py"),
        ("def f():\n    from .helper import x\n", "helper.py"),
        ("try:\n    import helper\nexcept ImportError:\n    pass\n", "helper.py"),
        ("from . import between", "between.py"),
        ("from . import between", "helper.py"),
    ],
)
def test_a_neighbour_that_is_imported_counts(project, statement, neighbour):
    code = {"__init__.py": "", "mine.py": statement, "unused.py": "1", "helper.py": "1"}
    code["between.py"] = "from . import helper, mine"
    package = project / "package"
    write(package, {**code, neighbour: "1"})
    before = fingerprint(package / "mine.py")
    write(package, {"unused.py": "2"})
    assert fingerprint(package.rename(project / "moved") / "mine.py") == before
    write(project / "moved", {neighbour: "2"})
    assert fingerprint(project / "moved/mine.py") != before


@pytest.mark.parametrize(
    "statement",
    [
        "import sibling",
        "from .. import sibling",
        "import deep.helper",
        "from .deep import helper",
        "import importlib; importlib.import_module('unused')",
    ],
)
def test_other_folders_and_computed_names_do_not_count(project, statement):
    names = ["unused", "deep/helper", "deep/__init__", "../sibling"]
    write(project, {f"folder/{name}.py": "1" for name in names})
    write(project, {"folder/mine.py": statement})
    expected = hashlib.sha256(statement.encode()).hexdigest()
    assert fingerprint(project / "folder/mine.py") == expected


# -- the parser


SOURCE = "x = (1, [2, {3: f(4)}])\n" * 20


@pytest.fixture
def often_switched():
    """Threads are switched at each chance, and collecting garbage gives many: it runs Python."""

    def collected(phase, info):
        return list(range(20))

    interval, threshold = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(1e-6)
    gc.set_threshold(10)
    gc.callbacks.append(collected)
    yield
    gc.callbacks.remove(collected)
    gc.set_threshold(*threshold)
    sys.setswitchinterval(interval)


def test_threads_may_parse_at_once(often_switched):
    """With `ast.parse` itself three of four threads end in a SystemError on Python 3.11."""

    def parse(_):
        return [len(parse_python(SOURCE).body) for _ in range(50)]

    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(parse, range(4))] == [[20] * 50] * 4


def test_the_thread_of_a_library_may_parse_meanwhile(often_switched):
    """It knows nothing of our lock."""
    is_done = threading.Event()

    def parse_for_ever():
        while not is_done.is_set():
            with contextlib.suppress(SystemError):
                ast.parse(SOURCE)

    with ThreadPoolExecutor(1) as library:
        library.submit(parse_for_ever)
        try:
            assert [len(parse_python(SOURCE).body) for _ in range(300)] == [20] * 300
        finally:
            is_done.set()
