"""What the spine holds: plain names, no chains of helpers, no import circles, and a README that
names it."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.each import check_each
from tests.measures import ROOMS, ROOT, SPINE, measure, product_files
from tests.test_architecture import NAMES, imported

README = (ROOT / "README.md").read_text()


@pytest.fixture(scope="module")
def spine():
    return measure([ROOT / name for name in SPINE])


@pytest.fixture(scope="module")
def product():
    return measure(product_files())


def test_the_spine_says_what_its_names_hold(spine):
    assert spine.vague_percent <= 2, spine.vague


def test_the_spine_reads_from_top_to_bottom(spine):
    assert spine.one_caller_per_1000 <= 8, spine.one_caller
    assert [name for name, lines in spine.function_lines.items() if lines > 50] == []


def test_the_product_says_what_its_names_hold(product):
    assert product.vague_percent <= 3, product.vague


def test_the_product_is_not_made_of_helpers(product):
    assert product.one_caller_per_1000 <= 10, product.one_caller
    assert [name for name, lines in product.function_lines.items() if lines > 80] == []


def test_lines_are_100_characters_long_at_most():
    files = product_files()
    lines = [(path, line) for path in files for line in path.read_text().splitlines()]
    assert [(path, line) for path, line in lines if len(line) > 100] == []


def test_there_is_no_circle_of_imports():
    """Imports inside functions and under TYPE_CHECKING count too."""
    modules = {name: path for path, name in NAMES.items()}
    imports = {}
    for name, path in modules.items():
        package = name if path.name == "__init__.py" else None
        targets = {target for target in imported(path) if target in modules}
        # a module's import of its own package is Python's doing, not a dependency
        imports[name] = {t for t in targets if t != name and not name.startswith(f"{t}.")} - {
            package
        }
    finished, path = set(), []

    def visit(name):
        if name in path:
            pytest.fail(" -> ".join([*path[path.index(name) :], name]))
        if name not in finished:
            path.append(name)
            for target in sorted(imports[name]):
                visit(target)
            path.pop()
            finished.add(name)

    for name in sorted(imports):
        visit(name)


def test_the_spine_is_in_the_readme():
    for name in SPINE:
        folder, _, file = name.rpartition("/")
        assert name in README or (folder in README and file.removesuffix(".py") in README), name


def needed_by_the_spine() -> list[Path]:
    """Modules beside the spine that two of its files import, and packages with code of their own."""
    files = {name: path for path, name in NAMES.items()}
    spine_files = {ROOT / name for name in SPINE}
    counts = Counter(name for path in spine_files for name in imported(path))
    return sorted(
        files[name]
        for name, count in counts.items()
        if count >= 2 and name in files and files[name] not in spine_files and has_code(files[name])
    )


def has_code(path: Path) -> bool:
    """Whether there is more in a file than a docstring."""
    statements = ast.parse(path.read_text()).body
    return any(not isinstance(statement, ast.Expr) for statement in statements)


def test_two_files_are_enough_to_need_a_module():
    names = {str(path.relative_to(ROOT)) for path in needed_by_the_spine()}
    assert {"schemas/errors.py", "flows/__init__.py"} <= names
    assert "schemas/__init__.py" not in names, "it holds no code"
    assert not names & set(SPINE)


def test_what_the_spine_needs_says_why_one_can_go_on_without_it():
    """A module that two files of the spine import belongs to it, or its docstring says why not."""

    def check(path: Path) -> None:
        docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
        assert re.search(r"(?m)^Not of the spine: (\S+\s+){3,}\S+\.$", docstring), (
            'add it to SPINE, or a sentence "Not of the spine: …" that says why not'
        )

    check_each(needed_by_the_spine(), check, NAMES.get)


def test_the_spine_is_small(spine):
    assert spine.files <= 38
    assert spine.tokens <= 42_500


def test_rooms_are_all_there():
    for room in ROOMS:
        assert ast.get_docstring(ast.parse((ROOT / room / "__init__.py").read_text()))
