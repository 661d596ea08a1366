"""The bugs of `make mutants`: what each operator makes of a short text, and that each file gets
enough of them. Whether tests notice them is for `make mutants`."""

import ast
import json
from pathlib import Path

import pytest

from tests.mutants import (
    EQUIVALENT,
    MOST_A_FILE,
    TARGETS,
    StaleTable,
    Target,
    choose,
    every_mutant,
    mutants_of,
    planted_mutant,
)
from tests.mutants.operators import OPERATORS, find_bugs, mutated
from tests.mutants.planted import PLANTED, Planted

ROOT = Path(__file__).parents[1]
SAMPLE = '''\
"""A sample: 1 + 1."""

def share(part: float, whole: float, least: int = 1) -> float:
    """Part of the whole: 1 + 1."""
    log.info("of %d", part - 1)
    if part > whole and part != 0:
        raise ValueError(f"{part - whole} too much")
    check(part, whole)
    é = "é", (part - least) / max(whole, 1)
    return -é[1]
'''
BUGS_OF_SAMPLE = {
    "sign": [
        "if (part <= whole) and part != 0:",
        "if part > whole and (part == 0):",
        'é = "é", ((part + least)) / max(whole, 1)',
        "return é[1]",
    ],
    "one": [
        "if (part >= whole) and part != 0:",
        "if part > whole and part != 1:",
        'é = "é", (part - least) / max(whole, 2)',
        'é = "é", (part - least) / max(whole, 0)',
        "return -é[2]",
        "return -é[0]",
    ],
    "swap": [
        "check(whole, part)",
        'é = "é", (max(whole, 1) / (part - least))',
        'é = "é", ((least - part)) / max(whole, 1)',
    ],
    "name": [
        "if whole > whole and part != 0:",
        "if part > part and part != 0:",
        "if part > whole and whole != 0:",
        "check(whole, whole)",
        "check(part, part)",
        'é = "é", (whole - least) / max(whole, 1)',
        'é = "é", (part - least) / max(part, 1)',
    ],
    "drop": [
        "if (part > whole):",
        "if (part != 0):",
        "None",
        'é = "é", (part - least)',
        'é = "é", (part) / max(whole, 1)',
        'é = "é", (part - least) / whole',
        'é = "é", (part - least) / 1',
    ],
}


def changed_lines(source: str, operator: str) -> list[str]:
    """The line of each of the operator's bugs, as it reads then. No other line may change."""
    found = []
    old = source.splitlines()
    for bug in find_bugs(source):
        if bug.operator != operator:
            continue
        new = mutated(source, bug).splitlines()
        place = bug.line - 1
        assert new[:place] == old[:place] and new[place + 1 :] == old[place + 1 :]
        found.append(new[place].strip())
    return found


def expressions(old: str, parameters: str = "") -> set[str]:
    """What the operators make of one expression."""
    source = f"def f({parameters}):\n    return {old}\n"
    new = {mutated(source, bug).splitlines()[1] for bug in find_bugs(source)}
    return {line.strip().removeprefix("return ") for line in new}


def test_every_operator_has_its_place_in_the_sample():
    assert set(BUGS_OF_SAMPLE) == set(OPERATORS)


@pytest.mark.parametrize("operator", OPERATORS)
def test_what_an_operator_makes_of_the_sample(operator):
    assert changed_lines(SAMPLE, operator) == BUGS_OF_SAMPLE[operator]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("not a", {"a"}),
        ("a * b", {"a", "b"}),
        ("a + b", {"(a - b)", "a", "b"}),
        ("a <= b", {"(a > b)", "(a < b)"}),
        ("a is b", {"(a is not b)"}),
        ("a if b else c", {"(c if b else a)"}),
        ("a if not b else c", {"a if b else c"}),
        ("a, b", {"(b, a)"}),
        ("a.clamp(b)", {"a"}),
        ("a.b(c, d, d)", {"a.b(d, c, d)"}),
        ("max(a, b)", {"a", "b"}),
        ("range(a[1:])", {"range(a[2:])", "range(a[0:])"}),
        ("[a] + b", {"([a])", "b"}),
        ("'a' if b else 'c'", {"('c' if b else 'a')"}),
        ("2048", set()),
        ("1 << 30", set()),
        ("f'{a - 1}'", set()),
        ("isinstance(a, b)", set()),
        ("suppress(a, b)", set()),
        ("np.exp(a)", set()),
        ("max(a, 1e-9)", set()),
    ],
)
def test_what_becomes_of_an_expression(old, new):
    assert expressions(old) == new


def test_a_parameter_is_taken_for_the_next_one_of_the_same_annotation():
    parameters = "a: int, b: str, c: int, d: int, e"
    assert expressions("(a, )", parameters) == {"(c, )"}
    assert expressions("(d, )", parameters) == {"(a, )"}
    assert expressions("(b, )", parameters) == expressions("(e, )", parameters) == set()


def test_parameters_of_different_annotations_do_not_change_places():
    assert expressions("(a, b)", "a: int, b: str") == set()
    assert expressions("(a, b)", "a, b: str") == {"(b, a)"}


@pytest.mark.parametrize(
    "line",
    [
        "log.info('%d', a - b)",
        "raise ValueError(a - b)",
        "message = f'{a - b}', a - b",
        "message = 'one' if a else 'other'",
        "seconds = time.monotonic() - started",
        "x: int | str = a",
        "if a < b: log.info('%d', a)",
        "'a text'",
        "try: pass\n    except (a, b): pass",
    ],
)
def test_what_only_speaks_is_left_alone(line):
    assert find_bugs(f"def f(a, b):\n    {line}\n") == []
    assert find_bugs(f"def free(a, b):\n    {line}\n    return a - b\n") == []
    assert find_bugs(f"def f(a, b) -> Error:\n    {line}\n    return a - b\n") == []


def test_an_expression_of_several_lines_keeps_its_lines():
    source = "def f(a, b):\n    return g(\n        a\n        + b,\n        b,\n    )\n"
    bug = next(bug for bug in find_bugs(source) if bug.operator == "sign")
    assert mutated(source, bug) == source.replace("a\n        + b", "(a - b\n)")


def test_names_do_not_depend_on_the_place_in_the_file():
    above = "ABOVE = 1\n\n\ndef above(a):\n    return -a\n\n\n"
    longer = SAMPLE.replace("def share", above + "def share")
    names = {bug.name for bug in find_bugs(longer)}
    assert names == {bug.name for bug in find_bugs(SAMPLE)} | {"above:sign:0"}


def test_a_method_and_a_function_inside_a_function_have_long_names():
    source = "class A:\n    def b(self):\n        def c(a):\n            return -a\n        return not c\n"
    assert {bug.name for bug in find_bugs(source)} == {"A.b.c:sign:0", "A.b:sign:0"}


def test_every_function_gives_its_first_bug_before_one_gives_a_second():
    many = "".join(f"def f{number}(a, b):\n    return a - b\n" for number in range(MOST_A_FILE))
    assert len({bug.function for bug in choose(find_bugs(many))}) == MOST_A_FILE
    assert len({bug.function for bug in choose(find_bugs(many), 8)}) == 8
    few = many.partition("def f2(")[0]
    assert choose(find_bugs(few)) == find_bugs(few)


def test_a_path_that_is_not_there_is_named(tmp_path):
    with pytest.raises(StaleTable, match=r"gone\.py is not in .*: correct TARGETS"):
        mutants_of(tmp_path, Target("gone.py", ()))


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.path)
def test_a_file_gets_enough_bugs_and_every_one_is_python(target):
    mutants = mutants_of(ROOT, target)
    most = min(target.most, len(find_bugs((ROOT / target.path).read_text())))
    assert min(8, most) <= len(mutants) <= most
    old_tree = ast.dump(ast.parse(mutants[0].old_source))
    for mutant in mutants:
        assert mutant.new_source.count("\n") == mutant.old_source.count("\n")
        assert ast.dump(ast.parse(mutant.new_source)) != old_tree


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_a_planted_bug_is_python_and_its_tests_are_there(planted):
    mutant = planted_mutant(ROOT, planted)
    assert ast.dump(ast.parse(mutant.new_source)) != ast.dump(ast.parse(mutant.old_source))
    for test in planted.tests:
        path, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / path).read_text()


@pytest.mark.parametrize(("source", "count"), [("a = 2", 0), ("a = 1\na = 1\n", 2)])
def test_a_planted_bug_whose_text_is_not_there_once_is_an_error(tmp_path, source, count):
    (tmp_path / "a.py").write_text(source)
    planted = Planted("bug", "a.py", "a = 1", "a = 3", ())
    with pytest.raises(StaleTable, match=rf"{count} times, .*: correct bug in .*planted\.py"):
        planted_mutant(tmp_path, planted)


def test_a_planted_bug_is_its_new_text_in_place_of_the_old(tmp_path):
    (tmp_path / "a.py").write_text("é = 0\na = 1\nb = 2\n")
    mutant = planted_mutant(tmp_path, Planted("bug", "a.py", "a = 1", "a = 3", ()))
    assert mutant.name == "a:bug:planted:0" and mutant.bug.line == 2
    assert mutant.new_source == "é = 0\na = 3\nb = 2\n"


def test_there_are_enough_bugs_and_each_has_a_name_of_its_own():
    names = [mutant.name for mutant in every_mutant(ROOT)]
    assert len(names) == len(set(names)) >= 200


def test_the_record_says_which_test_caught_a_bug():
    recorded = json.loads((ROOT / "tests/mutants/caught.json").read_text())
    stems = {mutant.target.stem for mutant in every_mutant(ROOT)}
    assert {name.partition(":")[0] for name in recorded} <= stems
    assert all(recorded[planted_mutant(ROOT, planted).name] for planted in PLANTED)
    named = {test for test in recorded.values() if not isinstance(test, bool)}
    assert [test for test in named if not (ROOT / test.partition("::")[0]).is_file()] == []


def test_those_that_change_nothing_are_still_bugs_of_today():
    names = set()
    for target in TARGETS:
        bugs = choose(find_bugs((ROOT / target.path).read_text()), target.most)
        names |= {f"{target.stem}:{bug.name}" for bug in bugs}
    assert set(EQUIVALENT) <= names
