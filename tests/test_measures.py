"""What the spine holds: plain names, no chains of helpers, no import circles, and a README that
names it."""

import ast

import pytest

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
    """The aim is 10 in 1,000 lines; what was reached is held."""
    assert product.one_caller_per_1000 <= 11, product.one_caller


def test_lines_are_100_characters_long_at_most():
    # the bytes of t5_digits.py are in keys of stores that were written before
    files = [path for path in product_files() if path.name != "t5_digits.py"]
    assert measure(files).long_lines == 0


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


def test_the_spine_is_small(spine):
    assert spine.files <= 38
    assert spine.tokens <= 42_000


def test_rooms_are_all_there():
    for room in ROOMS:
        assert ast.get_docstring(ast.parse((ROOT / room / "__init__.py").read_text()))
