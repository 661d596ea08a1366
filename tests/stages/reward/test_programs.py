"""The reward function `code`: what counts as the program, as a test and as passed, and that a
program cannot pass by cheating."""

import doctest
import functools
import json
import math
import subprocess
import sys

import pytest

from quiver.schemas.errors import ConfigError, SecurityError
from quiver.stages.core.sandbox import check as check_sandbox
from quiver.stages.core.sandbox import run_program
from quiver.stages.reward.functions import programs
from quiver.stages.reward.functions.config import FunctionConfig
from quiver.stages.reward.functions.programs import extract, read_tests
from quiver.stages.reward.pool.pool import Pool
from quiver.stages.reward.pool.scorer import FunctionScorer
from quiver.stages.reward.scoring import Part
from quiver.stages.reward.stage import Config, check


@functools.cache
def isolation() -> str:
    """The verdict does not depend on it: where the system permits no full isolation, these tests
    run with less."""
    try:
        check_sandbox("full")
    except SecurityError:
        return "process"
    return "full"


def code(completions, tests, **arguments) -> list[float | None]:
    return programs.code(completions, tests, **{"isolation": isolation(), **arguments})


DOUBLE = "def double(x):\n    return 2 * x\n"
ASSERTS = ["assert double(2) == 4", "assert double(-1) == -2"]


@pytest.mark.skipif(
    isolation() != "full",
    reason="the example of `code` asks for full isolation, which this system refuses",
)
def test_examples_in_docstrings():
    result = doctest.testmod(programs)
    assert result.attempted >= 3 and result.failed == 0


# -- what the program is

COMPLETIONS = {
    "marked": "Here:\n```python\nx = 1\n```\nDone.",
    "last one counts": "```python\nx = 0\n```\nBetter:\n```py\nx = 1\n```",
    "not marked": "```\nx = 1\n```",
    "other languages do not count": "```Python\nx = 1\n```\nIt "
    "prints\n```text\nx\n```\nby\n```bash\npython x.py\n```",
    "indented": "1. so\n   ```python\nx = 1\n   ```",
    "cut by its length": "thus ```x``` is\n```python\nx = 1\n",
    "with a title": '```python title="a.py"\nx = 1\n```',
    "no fence": "x = 1\n",
    "closed behind its last line": "```python\nx = 1```\nDone",
    "mentioned fences": "```python\nx = 1\n```\nIt ends with ```\nDone",
    "in a list": "1. ```python\n   x = 1\n   ```\n2. ```text\n   x\n   ```",
    "an open block before": "```text\n1\n\n```python\nx = 1\n```",
}
INDENTED = {
    "a list's item": "1. so\n   ```python\n   if x:\n\n       y\n   ```",
    "the program is indented less": "     ```python\n  if x:\n\n      y\n     ```",
    "its fence alone": "    ```python\nif x:\n\n    y\n    ```",
    "behind an item's sign": "- ```python\n  if x:\n\n      y\n  ```",
    "tabs": "\t```python\n\tif x:\n\t\n\t    y\n\t```",
    "in a line of prose": "The program: ```python\nif x:\n\n    y\n```",
    "by carriage returns": "  ```python\r\n  if x:\r\n\r\n      y\r\n  ```\r\n",
}


def test_the_program_in_a_completion():
    for name, completion in COMPLETIONS.items():
        assert extract(completion).strip() == "x = 1", name
    for name, completion in INDENTED.items():
        assert extract(completion).splitlines() == ["if x:", "", "    y"], name
    program = 'x = """\nbetween ``` and ```\nor """ + "```"\n'
    assert extract(f"```python\n{program}```") == program


# -- what the tests are


def test_stdin_and_stdout():
    tests = [
        {"input": "1 2", "output": "3"},
        {"input": "4\n5\n", "output": " 9 \n\n"},
        {"input": "0 0", "output": "1"},
    ]
    adder = "import sys\nprint(sum(map(int, sys.stdin.read().split())))"
    assert code([adder], [tests]) == [pytest.approx(2 / 3)]
    assert code([adder, adder], [tests, tests[:2]], all=True) == [0.0, 1.0]
    columns = {"inputs": [["1", "2"], "3 4"], "outputs": [["3"], "7"]}
    assert code([adder, adder], [columns, json.dumps(columns)]) == [1.0, 1.0]
    wrong = [adder + "\nexit(1)", adder.replace("print(", "print('sum', "), "print(3"]
    assert code(wrong, [tests] * 3) == [0.0] * 3
    numbers = [{"input": "", "output": " ".join(map(str, range(40_000)))}]  # to the end
    assert code(["print(*range(40000))", "print(*range(39999))"], [numbers] * 2) == [1.0, 0.0]


def test_calls_of_a_function():
    add = "def add(a, b):\n    return a + b\n"
    method = "class Solution:\n    def add(self, a, b):\n        return a + b\n"
    tests = [
        {"input": [1, 2], "output": 3},
        {"input": "[1]\n[2]", "output": "[1, 2]"},
        {"input": ["a", "b"], "output": "ba"},
    ]
    share = pytest.approx(2 / 3)
    assert code([add, method, "def plus(): pass"], [tests] * 3, entry="add") == [share, share, 0.0]
    named = json.dumps({"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"})
    assert code([add], [named]) == [1.0]
    wrapped = {"fn_name": "add", "inputs": [[1, 2], [["a"], ["b"]]], "outputs": [[3], [["a", "b"]]]}
    items = "def add(a, b):\n    return [a + b]\n"
    assert code([add, items, "def add(a, b):\n    return 3"], [wrapped] * 3) == [1.0, 1.0, 0.5]
    assert code([add, items], [tests[:1], [{**tests[0], "output": [3]}]], entry="add") == [1.0, 1.0]
    assert code([add, items], [[{"input": [1, 2], "output": [3]}]] * 2, entry="add") == [0.0, 1.0]
    assert code([method], [[tests[0]]], entry=["Solution().add"]) == [1.0]
    longer = {"fn_name": "add", "inputs": [[1, 2]], "outputs": [[3, 4]]}
    assert code([add], [longer]) == [0.0]
    pairs = [{"input": [[3, 1]], "output": [[1, 3], {"a": [1]}]}]
    for value, passed in (("(sorted(x), x)", 0.0), ("tuple(sorted(x))", 1.0)):
        assert code([f"def f(x):\n    return {value}, {{'a': (1,)}}"], [pairs], entry="f") == [
            passed
        ]
    cases = [{"type": "function_call", "fn_name": "add", **case} for case in tests]
    metadata = {"testtype": "functional", "metadata": {"func_name": "add"}}
    inside = [json.dumps(cases), [{**metadata, **case} for case in tests]]
    assert code([add, method], inside) == [share, share]
    by_row = [tests[:1], [{"input": "x", "output": "x"}]]
    assert code([add, "print(input())"], by_row, entry=["add", None]) == [1.0, 1.0]


LEETCODE = """\
class Solution:
    def largest(self, nums: List[int], than: Optional[int] = None) -> int:
        return max(nums)
"""
DATED = """\
from __future__ import annotations
from dataclasses import dataclass
@dataclass
class Point:
    x: int
    y: Missing = 0
def line():
    import sys
    return sys._getframe().f_lineno
"""


def test_annotations_need_no_import():
    tests = {"fn_name": "largest", "inputs": [[[1, 3, 2]]], "outputs": [3]}
    fields = [
        "assert [f for f in Point(1).__dataclass_fields__] == ['x', 'y']",
        "assert line() == 9",
    ]
    texts = ["assert Solution().largest([4]) == 4"]
    assert code([LEETCODE, LEETCODE, DATED], [tests, texts, fields]) == [1.0] * 3
    evaluated = LEETCODE.replace(" = None", " = inf")
    assert code([evaluated], [tests]) == [0.0]


def test_a_preamble_stands_before_each_program():
    preamble = "from math import *\nimport sys\nfrom typing import *"
    tests = {"fn_name": "largest", "inputs": [[[1, 3, 2]]], "outputs": [3]}
    evaluated = LEETCODE.replace(" = None", " = inf")
    lines = ["assert line() == 9", "assert Point(1).y == 0"]
    assert code([evaluated, DATED], [tests, lines], preamble=preamble) == [1.0, 1.0]
    printing = DATED + "x: List[int] = [line(), floor(2.5), __name__]\nprint(*x)"
    right, wrong = ([{"input": "", "output": f"{n} 2 __main__"}] for n in (9, 12))
    assert code([printing, printing], [right, wrong], preamble=preamble) == [1.0, 0.0]
    assert code([printing], [right]) == [0.0]
    failing = {"import nothing_of_that_name": "Error", "x = (": "Error", "print(1)": "it prints"}
    for broken, why in failing.items():
        for completions, columns in (([DOUBLE], [ASSERTS]), ([], [])):
            with pytest.raises(ConfigError, match=f"the preamble fails: .*{why}") as caught:
                code(completions, columns, preamble=broken)
            assert "sandbox_python" in caught.value.next


def test_the_names_of_a_preamble_are_not_the_programs():
    preamble = "from math import *\nfrom re import *"
    method = "class Solution:\n    def search(self, x: List[int]):\n        return max(x)"
    asked = {"fn_name": "search", "inputs": [[[1, 3]]], "outputs": [3]}
    assert code([method], [asked], preamble=preamble) == [1.0]
    empty = [{"fn_name": "gcd", "inputs": [[4, 6]], "outputs": [2]}, "assert gcd(4, 6) == 2"]
    assert code(["x = 1"] * 2, empty, preamble=preamble) == [0.0, 0.0]
    own = "from math import gcd"
    assert code([own] * 2, empty, preamble=preamble) == [1.0, 1.0]


def test_a_program_may_read_its_annotations():
    program = (
        "from functools import singledispatch\n\n\nclass Own:\n    pass\n\n\n@singledispatch\n"
        "def size(x):\n    return 0\n\n\n@size.register\ndef _(x: Own):\n    return 7\n\n\n"
        "def seven():\n    return size(Own())"
    )
    assert code([program], [["assert seven() == 7"]]) == [1.0]


STATEMENTS = {
    "one by one": (1.0, DOUBLE, ASSERTS),
    "as text": (1.0, DOUBLE, "\n".join(ASSERTS)),
    "half": (0.5, "def double(x): return 4", ASSERTS),
    "a failing one does not stop the next": (
        0.5,
        DOUBLE,
        ["assert double(1) == 1", "assert missing(1)", *ASSERTS],
    ),
    "set-up is not counted": (
        1.0,
        DOUBLE,
        """
import math
x = double(2)
assert x == 4
assert math.isclose(double(.1), .2)
""",
    ),
    "functions of a test": (
        0.5,
        DOUBLE,
        """
def test_a():
    assert double(1) == 2
def test_b():
    assert double(1) == 3
""",
    ),
    "imported": (
        1.0,
        DOUBLE,
        """
from solution import double as d
import solution
assert d(2) == solution.double(2) == 4
""",
    ),
    "exceptions": (
        0.5,
        """
def f(x):
    raise KeyError(x) if x else ZeroDivisionError("no")
""",
        """
try:
    f(0)
    assert False
except ArithmeticError as error:
    assert str(error) == "no"
try:
    f(1)
    assert False
except ValueError:
    pass
""",
    ),
    "changed in place": (
        1.0,
        """
def f(x, d, s):
    x.sort()
    d["n"] = len(x)
    s |= {5}
""",
        """
x, d, s = [3, 1], {}, set()
f(x, d, s)
assert x == [1, 3]
assert d == {"n": 2}
assert s == {5}
""",
    ),
    "functions given": (
        1.0,
        """
def apply(f, x):
    return [f(one) for one in x]
""",
        """
assert apply(lambda x: x + 1, (1, 2)) == [2, 3]
assert apply(str, iter([1])) == ["1"]
""",
    ),
    "iterators": (
        1.0,
        """
def f(x):
    yield from x
""",
        """
assert list(f(iter("ab"))) == ["a", "b"]
assert "b" in f("ab") and "c" not in f("ab")
""",
    ),
    "objects": (
        1.0,
        """
class Stack(list):
    size = 0
    def push(self, x):
        self.append(x)
        self.size += 1
class Point:
    def __init__(self, x):
        self.x = x
    def __eq__(self, other):
        return self.x == other.x
""",
        """
s = Stack()
s.push(1)
s.push([2])
assert s == [1, [2]]
assert s < [2]
assert s.size == len(s) == 2
assert s[1] == [2]
assert s.pop() == [2]
s.size = 7
assert s.size == 7
assert Point(1) == Point(1) and Point(1) != Point(2)
assert Point(3).x > 2
""",
    ),
    "operators": (
        1.0,
        """
class V:
    def __init__(self, x):
        self.x = x
    def __add__(self, other):
        return V(self.x + other.x)
    def __mul__(self, other):
        return self.x * other.x
    def __lt__(self, other):
        return self.x < other.x
    def __eq__(self, other):
        return self.x == other.x
    def __hash__(self):
        return hash(self.x)
    def __neg__(self):
        return V(-self.x)
    def __abs__(self):
        return abs(self.x)
    def __int__(self):
        return self.x
    def __float__(self):
        return self.x / 2
    def __round__(self, digits=0):
        return digits
    def __enter__(self):
        return self
    def __exit__(self, *error):
        self.x = error
        return True
class Count(int):
    pass
""",
        """
assert (V(1) + V(2)).x == 3
assert V(2) * V(3) == 6
assert V(1) < V(2) and not V(2) < V(1) and V(2) > V(1)
assert max(V(1), V(3), V(2)).x == 3 and [v.x for v in sorted([V(2), V(1)])] == [1, 2]
assert (-V(1)).x == abs(V(-1)) * -1 == -1
assert int(V(3)) == 3 and float(V(3)) == 1.5 and round(V(3), 2) == 2
assert len({V(1), V(1)}) == 1 and {V(1): 7}[V(1)] == 7 and V(3) in {V(3)}
with V(1) as v:
    assert v.x == 1
assert v.x == (None, None, None)
try:
    V(1) - V(2)
    assert False
except TypeError:
    pass
assert Count(3) + 1 == 4 and 1 - Count(3) == -2 and Count(3) in {3}
""",
    ),
    "the main block is left out": (
        1.0,
        DOUBLE
        + """
if __name__ == "__main__":
    raise SystemExit(input())
""",
        ASSERTS,
    ),
    "names of the program": (
        1.0,
        """
import math
LIMIT = 7
""",
        """
assert LIMIT == 7
assert math.floor(1.5) == 1
""",
    ),
}


@pytest.mark.parametrize(("expected", "program", "tests"), STATEMENTS.values(), ids=STATEMENTS)
def test_statements(expected, program, tests):
    assert code([program], [tests]) == [expected]


IMPORTS = (
    "from collections import *\nfrom datetime import *\nfrom decimal import Decimal\nfrom "
    "fractions import Fraction\n"
)
VALUES = """[
    None, True, 10**5000, float("inf"), 1j, "é\\ud800", b"x", bytearray(b"y"), (1,), [[]], {1, 2}, frozenset("a"), range(1, 9, 2),
    {(1, 2): {None: 3}}, Counter("aa"), OrderedDict(a=1), defaultdict(int, b=2), deque([1]), Decimal(".1"), Fraction(1, 3),
    date(2020, 1, 2), datetime(2020, 1, 2, 3), timedelta(1, 2, 3),
]"""


def test_values_arrive_as_they_are():
    program = f"{IMPORTS}def f():\n    return {VALUES}"
    tests = (
        f"{IMPORTS}x = f()\nassert x == {VALUES}\nassert x[0] is None and x[1] is True and "
        "type(x[8]) is tuple"
    )
    assert code([program], [tests]) == [1.0]


def test_a_value_of_a_type_of_its_own_is_compared_as_the_plain_one():
    program = "class Count(int):\n    pass\n\ndef f():\n    return Count(3)"
    tests = ["assert f() > 2.5", "assert f() == 3.0 and f() < 2.5"]
    assert code([program] * 2, tests) == [1.0, 0.0]


def test_check_functions_of_an_entry():
    tests = (
        "METADATA = {}\n\ndef check(candidate):\n    assert candidate(2) == 4\n    assert "
        "candidate(3) == 6\n"
    )
    programs = [DOUBLE, DOUBLE.replace("2 *", "4 +"), DOUBLE]
    columns = [tests, tests, tests + "check(double)"]
    assert code(programs, columns, entry="double") == [1, 0, 1]
    assert code([DOUBLE], columns[2:]) == [1.0]


def test_what_can_not_be_a_test_is_an_error_of_the_row_and_null_is_null():
    assert code([DOUBLE, DOUBLE], [None, ASSERTS]) == [None, 1.0]
    for tests in (
        [],
        {},
        7,
        "x = 1",
        "assert (",
        [{"input": "1"}],
        "[1, 2",
        {"inputs": ["1"], "outputs": []},
        "def f():\n    assert f",
    ):
        with pytest.raises(ValueError):
            code([DOUBLE], [tests])
    with pytest.raises(ValueError, match="a list of arguments, got 3"):
        read_tests([{"input": 3, "output": 3}], "double")
    functional = [{"input": "1\n2", "output": "3", "testtype": "functional"}]
    with pytest.raises(ValueError, match="functional call a function: name it in a column entry"):
        read_tests(functional)
    assert read_tests(json.dumps(functional), "add").calls == [([1, 2], [3])]
    with pytest.raises(ValueError, match="function_call call a function"):
        read_tests({"type": "function_call", "fn_name": None, "inputs": [[1]], "outputs": [1]})
    two = [{"input": [1], "output": 1, "fn_name": name} for name in ("f", "g")]
    for cases, names in ((two, "'f', 'g'"), ([two[0], {"input": [1], "output": 1}], "'', 'f'")):
        with pytest.raises(ValueError, match=f"must call one function, got {names}"):
            read_tests(cases)
    assert read_tests([{**functional[0], "testtype": "stdin"}]).cases == [("1\n2", "3")]
    for entry in ("Solution().double", "Solution.double", "double"):
        assert read_tests(ASSERTS, entry).entry == "double"
        assert read_tests({"fn_name": entry, "inputs": [[1]], "outputs": [2]}).entry == "double"
    for entry in ("Solutions().double", "double(x)", "a.double", "Solution()", math.nan):
        with pytest.raises(ValueError, match="entry must be the name of a function"):
            read_tests(ASSERTS, entry)
    with pytest.raises(ValueError, match="language must be python, got rust"):
        code([DOUBLE], [ASSERTS], language=["rust"])


# -- cheats

EQUAL = (
    "class Equal:\n    def __getattr__(self, name): return self\n    def __call__(self, *a): "
    "return self\n"
)
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    EQUAL += f"    def __{_name}__(self, other): return True\n"
EQUAL += "    __hash__ = object.__hash__\n"
FORGE = """
import json, os
line = json.dumps(["value", ["builtins.list", [True, ["builtins.list", []]]]]).encode() + b"\\n"
def everywhere(text):
    for handle in range(1, 64):
        try:
            os.write(handle, text)
        except OSError:
            pass
"""
CHEATS = {
    "leave by sys.exit": "import sys\nsys.exit(0)",
    "leave by os._exit": "import os\nos._exit(0)",
    "leave when called": "import os\ndef double(x):\n    os._exit(0)",
    "raise SystemExit when called": "def double(x):\n    raise SystemExit(0)",
    "be equal to everything": EQUAL + "def double(x):\n    return Equal()",
    "be a number equal to everything": EQUAL.replace("class Equal", "class Equal(int)")
    + "def double(x):\n    return Equal(7)",
    "be the function itself": EQUAL + "double = Equal()",
    "patch builtins": """
import builtins
builtins.all = builtins.abs = builtins.AssertionError = lambda *a: True
def double(x):
    return 7
""",
    "shadow what tests use": "abs = len = isinstance = lambda *a: True\nAssertionError = "
    "True\ndef double(x):\n    return 7",
    "print verdicts": FORGE
    + "everywhere(b'2\\n11')\nprint('2\\n11')\neverywhere(b'11')\nos._exit(0)",
    "print verdicts when called": FORGE + "def double(x):\n    everywhere(b'1')\n    os._exit(0)",
    "answer beforehand": FORGE + "everywhere(line * 10)\ndef double(x):\n    return 7",
    "look for the tests": """
import gc, inspect, os, sys
seen = [repr(one) for one in gc.get_objects() if isinstance(one, (str, dict, list))]
frame = sys._getframe()
while frame:
    seen.append(repr(frame.f_globals) + repr(frame.f_locals) + repr(frame.f_code.co_consts))
    frame = frame.f_back
for handle in range(64):
    try:
        seen.append(repr(os.pread(handle, 1 << 20, 0)))
    except OSError:
        pass
seen += [open(path).read() for path in ("/stdin", "/program.py", "/proc/self/cmdline", sys.argv[0]) if os.path.exists(path)]
seen += sys.argv + sys.orig_argv + list(os.environ.values())
found = " ".join(["double(-1)", "==", "-2"]) in "".join(seen)
def double(x):
    return {2: 4, -1: -2}[x] if found else 7
""",
    "end the judge": "import os, signal\ndef double(x):\n    os.kill(os.getppid(), signal.SIGKILL)",
    "interrupt the judge": "import os, signal, time\ndef double(x):\n    os.kill(os.getppid(), "
    "signal.SIGALRM)\n    time.sleep(9)",
    "change the judge's limits": """
import os, resource
def double(x):
    resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (0, 0))
""",
    "raise what a test expects": "def double(x):\n    raise AssertionError()",
    "return the wire's words": "def double(x):\n    return ['value', True]",
    "nothing there": "",
    "no Python": "I would double it.",
    "no text": "def double(x): return '\ud800\0'",
    "hang": "def double(x):\n    while True: pass",
    "hang at once": "import time\ntime.sleep(99)",
    "an endless value": "def double(x):\n    while True: yield x",
    "a value that refers to itself": "x = []\nx.append(x)\ndef double(y):\n    return x",
    "a value without end": "def double(x):\n    return [0] * 10**8",
}


@pytest.mark.parametrize("program", CHEATS.values(), ids=CHEATS)
def test_cheating_wins_nothing(program):
    assert code([program], [ASSERTS], timeout_seconds=1.5) == [0.0]


WILLING = """
class Willing:
    def __exit__(self, *error):
        return True
    def __enter__(self):
        return self
    def __hash__(self):
        return 4
    def agree(self, other):
        return 0
    def equal(self, other):
        return True
    for name in "sub rsub truediv rtruediv mod rmod xor rxor".split():
        locals()[f"__{name}__"] = agree
    for name in "eq lt le gt ge contains".split():
        locals()[f"__{name}__"] = equal
def double(x):
    return Willing()
"""


def test_operators_with_what_a_test_expects_win_nothing():
    tests = [
        "assert abs(double(2) - 4) < 1e-6",
        "assert 4 - double(2) == 0",
        "assert not double(2) ^ 4",
        "assert double(2) % 4 == 0",
        "assert double(2) <= 4",
        "assert double(2) in {4}",
        "assert 4 in double(2)",
        "assert {double(2): 1}[4]",
        "with double(2):\n    assert double(2) == 4",
    ]
    assert code([WILLING] * len(tests), tests) == [0.0] * len(tests)


@pytest.mark.parametrize("name", ["leave by sys.exit", "leave by os._exit", "leave when called", "be equal to everything",
                                  "look for the tests"])  # fmt: skip
def test_the_same_cheats_win_where_program_and_tests_share_an_interpreter(name):
    """The control: such a harness takes the exit code for the verdict."""
    program = CHEATS[name] + "\n" + "\n".join(ASSERTS)
    assert run_program(program, isolation=isolation()).exit_code == 0


def test_honest_work_wins_under_the_same_limit():
    assert code([DOUBLE], [ASSERTS], timeout_seconds=1.5) == [1.0]


EXPECTS = "try:\n    double('x')\nexcept Exception:\n    pass\nelse:\n    assert False\n"


def test_the_end_of_the_process_is_no_exception_of_the_program():
    programs = [
        "def double(x):\n    raise TypeError",
        "import os\ndef double(x):\n    os._exit(0)",
    ]
    assert code(programs, [EXPECTS] * 2) == [1.0, 0.0]


def test_cheating_on_outputs_wins_nothing():
    tests = [{"input": "2", "output": "4"}]
    cheats = [
        "import sys, os\nos._exit(0)",
        "print('4 4')",
        "print(open('/proc/self/cmdline').read())",
        "import sys\nsys.stderr.write('4')",
    ]
    assert code(cheats, [tests] * 4) == [0.0] * 4
    calls = [{"input": [2], "output": 4}, {"input": [3], "output": 6}]
    cheats = [EQUAL + "def double(x):\n    return Equal()", FORGE + "everywhere(line * 9)"]
    assert code(cheats, [calls] * 2, entry="double") == [0.0] * 2


def test_after_a_test_that_takes_too_long_the_others_are_not_run():
    slow = "import time\ndef double(x):\n    time.sleep(99 * (x == 0))\n    return 2 * x"
    tests = [f"assert double({x}) == {2 * x}" for x in (1, 0, 2, 3)]
    assert code([slow], [tests], timeout_seconds=1) == [0.25]
    echo = "import time\nx = input()\ntime.sleep(99 * (x == '0'))\nprint(x)"
    cases = [{"input": digit, "output": digit} for digit in "1023"]
    assert code([echo], [cases], timeout_seconds=1) == [0.25]
    assert code([echo], [cases[2:]], timeout_seconds=1, all=True) == [1.0]


# -- in the stage


def test_what_runs_programs_comes_from_the_recipe_alone():
    """Columns of those names are not given to the function; `entry` and `language` are."""
    names = ("sandbox_url", "sandbox_python", "sandbox_token", "all", "timeout_seconds")
    batch = {name: [["http://127.0.0.1:1"]] for name in names}
    batch |= {"completions": [DOUBLE], "rollout_ids": ["r"], "language": ["python"]}
    batch |= {"tests": [[{"input": [2], "output": 4}]], "entry": ["double"]}
    config = FunctionConfig(use="code", arguments={"isolation": isolation()})
    with Pool(1) as pool:
        assert FunctionScorer(config, pool, 256).score(batch) == [Part(1.0)]


def test_a_sandbox_that_is_not_permitted_is_told_before_any_generation(monkeypatch, tmp_path):
    check_sandbox.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    why = "bwrap, mount, unshare, setpriv, prlimit not found in PATH"
    with pytest.raises(SecurityError, match=why):
        check(Config(functions=[{"use": "code"}]), ["tests"])
    elsewhere = {"use": "code", "arguments": {"sandbox_url": "http://127.0.0.1:1"}}
    check(Config(functions=[elsewhere]), ["tests"])  # a server's sandbox is the server's matter


def test_in_the_stage(score, sample, column):
    arguments = {"isolation": isolation(), "timeout_seconds": 5}
    function = {"use": "code", "arguments": arguments}
    with pytest.raises(ConfigError, match="needs tests"):
        check(Config(functions=[function]), ["answer"])
    texts = [[f"So:\n```python\n{DOUBLE}```", "def double(x): return 4"], ["print(1)", "no"]]
    version = score(sample(texts, {"tests": [ASSERTS, ["broken ("]]}), function, max_invalid=0.5)
    assert column(version) == {"0-0": 1.0, "0-1": 0.5, "1-0": None, "1-1": None}
    assert "was never closed" in column(version, "errors")["1-0"]["code"]


def test_many_rows_at_once():
    """More rows than cores, each with its own answer."""
    texts = [f"def double(x):\n    return 2 * x if x < {row} else 0" for row in range(6)]
    tests = [f"assert double({x}) == {2 * x}" for x in range(1, 5)]
    assert code(texts, [tests] * 6) == [0.0, 0.0, 0.25, 0.5, 0.75, 1.0]


def test_what_processes_of_functions_import_stays_cheap():
    script = """
import sys
import quiver.stages.reward.functions
print({"httpx", "subprocess", "quiver.stages.core.sandbox"} & set(sys.modules))
import quiver.stages.reward.pool.calls
print({"httpx", "numpy", "pyarrow", "quiver.stages.core.sandbox"} & set(sys.modules))
"""
    said = subprocess.check_output([sys.executable, "-c", script], text=True)
    assert said == "set()\n" * 2
