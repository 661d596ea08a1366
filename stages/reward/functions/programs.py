r"""The reward function `code`: run the program in a completion, isolated, against the row's tests.

Neither the program nor the text of a test runs in this process: both go to
`quiver.stages.core.sandbox`, or to a server. A failure of the sandbox is an error of the row; a
failure of the program is 0.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from quiver.schemas.errors import ConfigError, ResourceError, printable
from quiver.stages.core.threads import map_in_threads

from .answers import fenced

if TYPE_CHECKING:
    from quiver.stages.core.isolation import Limits
    from quiver.stages.core.sandbox import Finished

_HARNESS = Path(__file__).with_name("harness")
_PYTHON = ("py", "python", "python3")
_DAY = 86400.0
Run = Callable[..., "Finished"]


def code(
    completions: Sequence[str],
    tests: Sequence[Any],
    timeout_seconds: float = 10.0,
    memory_mib: int = 512,
    all: bool = False,
    entry: str | Sequence[str | None] = "",
    language: str | Sequence[str] = "python",
    preamble: str = "",
    isolation: str = "full",
    sandbox_python: str = "",
    sandbox_url: str = "",
    sandbox_token: str = "",
) -> list[float | None]:
    r"""Return the share of the row's `tests` that the program in the completion passes; with `all`,
    1 if it passes all of them, else 0.

        reward_i = passed_i / tests_i            all: reward_i = 1 if passed_i = tests_i else 0

    The program is the last fenced block of the completion that is marked python or not marked (an
    open one reaches to the end; see `answers.fenced`); without one the whole completion. The column
    `tests` holds a row's tests, as plain data or as JSON text, in one of these forms:
      * A list of {"input": stdin, "output": stdout}, or {"inputs": [...], "outputs": [...]}. The
        program runs once per test and must end with exit code 0. Its output is compared word by
        word, so white space does not count.
      * The same with an `entry`, the name of a function, or of a method of a class `Solution`; also
        written Solution().f. It is called with each input (a list of arguments, or text with one
        JSON value per line) and must return the output; lists and tuples are equal. Tests may name
        the function themselves, as "fn_name" or "func_name" in their "metadata"; all tests of a row
        call the same one. A "testtype" or "type" of "functional" or "function_call" requires a
        name. As in APPS and TACO, an output that is a list of one item beside a "fn_name" also
        allows the item alone.
      * Python text, or a list of texts, run top to bottom after the program. Each statement with an
        assert counts, each function `test_…`, and `check(entry)` if they define `check`. Names that
        they do not define are the program's, except builtins. The program may be imported as
        `solution`; its `__name__` is not `__main__`.

    Args:
        timeout_seconds: Limit of one test. Tests after one that timed out do not run and count as
            failed, and so do tests after the end of the program's process.
        memory_mib: Memory limit of one test.
        tests: Null gives None.
        entry, language: May be columns.
        preamble: Python text that is run before each program, for names that it uses without an
            import. What the harnesses of LeetCode and LiveCodeBench put there is about
            "from typing import *", the same for collections, math, heapq, bisect, itertools,
            functools, operator, string and re, and an import of each of these modules by name.
        isolation: See `stages.core.sandbox`.
        sandbox_python: An interpreter with packages to use.
        sandbox_url, sandbox_token: A server that runs the programs, and its token as `env:NAME`.
            See `remote_sandbox`.

    In tests that call functions, a program that ends with a NameError is loaded once more with
    annotations as text, so `nums: List[int]` needs no import. A program that is run on stdin is
    read as Python reads a script.

    `preamble`, `isolation` and the sandbox's arguments come from the recipe alone. Called on no
    rows, the function only checks that a sandbox here could run programs, that the preamble runs,
    and that a server has a token.

    Ways to game it: Expected outputs stay out of the sandbox, or in a process that the program
    cannot read. So leaving early, patching builtins, printing a verdict or overriding == gains
    nothing. But a program may answer only the inputs that it is given. A test that hands its
    expectation to the program (`f(x).startswith("a")` with an object of f's own, `a == b` or
    `a + b` of two such objects) relies on the program's word. Isolation "process" does not keep a
    program from reading the tests out of the judge's memory. Tests fail if they need a class of the
    program as a base or in `isinstance`, hand it objects of their own classes, use an operator
    between an object of the program and plain data (`V(1) * 2`), or rely on a `with` that swallows
    errors.

    Raises:
        ValueError: The tests cannot be read.
        ConfigError: The preamble fails by itself.
        SecurityError, ResourceError: From the sandbox.
        RemoteError: From the server.

    >>> tests = ["assert double(2) == 4", "assert double(1) == 3"]
    >>> code(["Sure:\n```python\ndef double(x):\n    return 2 * x\n```"], [tests])
    [0.5]
    """
    from quiver.stages.core import sandbox
    from quiver.stages.core.isolation import Limits

    num_rows = len(completions)
    languages = [language] * num_rows if isinstance(language, str) else language
    entries = [entry] * num_rows if isinstance(entry, str) else entry
    rows = [
        None if column is None else (extract(text), read_tests(column, name or "", spoken))
        for text, column, name, spoken in zip(completions, tests, entries, languages, strict=True)
    ]
    limits = Limits(seconds=timeout_seconds, memory_mib=memory_mib)
    # check first that any program can run, so that no program is blamed for a broken sandbox
    if sandbox_url:
        from quiver.stages.core.servers import secret
        from quiver.stages.reward import remote_sandbox

        secret(sandbox_token, "sandbox_token")
        if num_rows:
            remote_sandbox.check(sandbox_url, sandbox_token)
        run = functools.partial(remote_sandbox.run_program, url=sandbox_url, token=sandbox_token)
    else:
        sandbox.check(isolation, sandbox_python)
        run = functools.partial(sandbox.run_program, isolation=isolation, python=sandbox_python)

    if preamble and (num_rows or not sandbox_url):
        _check_preamble(run(preamble, limits=limits))

    def score(row: tuple[str, Tests] | None) -> float | None:
        if row is None:
            return None
        judge = _compare_outputs if row[1].cases else _run_harness
        passed, total = judge(preamble, *row, run, limits, all)
        return float(passed == total) if all else passed / total

    return map_in_threads(score, rows)


def extract(completion: str) -> str:
    """Return the program in a completion, as `code` describes it.

    >>> first, last = "```python\\nx = 1\\n```\\n", "```\\nx = 2\\n```\\n"
    >>> extract(f"First:\\n{first}then\\n{last}prints\\n```text\\n2\\n```"), extract("x = 3")
    ('x = 2\\n', 'x = 3')
    """
    blocks = [text for mark, text in fenced(completion) if mark in ("", *_PYTHON)]
    return blocks[-1] if blocks else completion


# -- tests


class Tests(NamedTuple):
    """The tests of a row: `cases` of stdin and stdout, `calls` of `entry` with arguments and the
    values that are right, or Python `text`."""

    entry: str = ""
    text: str = ""
    calls: Sequence[tuple[list[Any], list[Any]]] = ()
    cases: Sequence[tuple[str, str]] = ()


def read_tests(column: Any, entry: str = "", language: str = "python") -> Tests:
    """Read the tests of a column, as `code` describes them. Raises ValueError if there are none.

    >>> read_tests([{"input": "1 2", "output": "3"}]).cases
    [('1 2', '3')]
    >>> read_tests('{"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}').calls
    [([1, 2], [3])]
    """
    if language.lower() not in _PYTHON:
        raise ValueError(
            f"language must be python, got {printable(language)}; set it in arguments if that "
            "column means another"
        )
    if isinstance(column, str) and column.lstrip()[:1] in ("[", "{"):
        column = json.loads(column)
    if isinstance(column, dict):
        inputs, outputs = (column.get(key, column.get(key + "s")) for key in ("input", "output"))
        both = isinstance(inputs, list) and isinstance(outputs, list)
        if not both or len(inputs) != len(outputs):
            raise ValueError(
                f"tests with the keys {', '.join(map(printable, column))}, expected inputs and "
                "outputs, as many of each"
            )
        pairs = zip(inputs, outputs, strict=True)
        column = [{**column, "input": input, "output": output} for input, output in pairs]
    if isinstance(column, str):
        column = [column]
    if not isinstance(column, list) or not column:
        raise ValueError(f"tests must be a list of tests, or text, got {printable(repr(column))}")
    if isinstance(column[0], str):
        return Tests(_name_in(entry), "\n".join(column))
    if any(not isinstance(case, dict) or not {"input", "output"} <= set(case) for case in column):
        raise ValueError("a test must have input and output")
    entry = entry or _function_of(column)
    if entry:
        return Tests(_name_in(entry), calls=[_read_call(case) for case in column])
    return Tests(cases=[(_as_text(case["input"]), _as_text(case["output"])) for case in column])


def _name_in(entry: str) -> str:
    """Return the name of the function or of the method of `Solution` that an entry means."""
    name = re.sub(r"^Solution(\(\))?\.", "", entry) if isinstance(entry, str) else None
    if name is None or (entry and not name.isidentifier()):
        raise ValueError(
            "entry must be the name of a function, or of a method of Solution, got "
            + printable(repr(entry))
        )
    return name


def _function_of(cases: Sequence[dict[str, Any]]) -> str:
    """Return the function that the cases call by name; empty if they are of stdin and stdout."""
    names, kinds = set(), set()
    for case in cases:
        metadata = case.get("metadata")
        named = metadata.get("func_name") if isinstance(metadata, dict) else None
        names.add(case.get("fn_name") or named or "")
        kinds |= {case.get("testtype"), case.get("type")} & {"functional", "function_call"}
    if len(names) > 1:
        raise ValueError(
            "the tests of a row must call one function, got "
            + ", ".join(printable(repr(name)) for name in sorted(names, key=str))
        )
    (name,) = names
    if kinds and not name:
        raise ValueError(
            f"tests of the type {kinds.pop()} call a function: name it in a column entry, or in "
            "arguments.entry"
        )
    return name


def _as_text(stream: Any) -> str:
    if stream is None:
        raise ValueError("a test must have input and output")
    return "\n".join(map(str, stream)) if isinstance(stream, list) else str(stream)


def _read_call(case: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Return the arguments of a call, and the values that it may return."""
    input, output = case["input"], case["output"]
    if isinstance(input, str):  # then the output is JSON text too
        lines = filter(str.strip, input.splitlines())
        return [json.loads(line) for line in lines], [json.loads(output)]
    if not isinstance(input, list):
        raise ValueError(
            f"the input of a call must be a list of arguments, got {printable(repr(input))}"
        )
    is_wrapped = case.get("fn_name") and isinstance(output, list) and len(output) == 1
    return input, [output, *output] if is_wrapped else [output]


# -- runs


def _check_preamble(finished: Finished) -> None:
    """Raise ConfigError if the preamble failed, or printed what would stand before each program's
    output: no program is blamed for it."""
    if finished.exit_code != 0 or finished.stdout:
        why = finished.stderr.strip().rpartition("\n")[2] or finished.killed_by or "it prints"
        raise ConfigError(
            "reward function code",
            f"the preamble fails: {printable(why)}",
            next="correct arguments.preamble, or name an interpreter with its packages in "
            "arguments.sandbox_python",
        )


def _compare_outputs(
    preamble: str, program: str, tests: Tests, run: Run, limits: Limits, all: bool
) -> tuple[int, int]:
    """Run the program on each stdin. Returns the number of right outputs and of tests."""
    if preamble:  # apart, so that the program keeps its line numbers and imports of __future__
        program = "".join(
            f"exec(compile({text!r}, 'program.py', 'exec'))\n" for text in (preamble, program)
        )
    passed = 0
    for stdin, expected in tests.cases:
        output_kib = limits.output_kib + len(expected) // 256
        limits_of_case = dataclasses.replace(limits, output_kib=output_kib)
        finished = run(program, stdin=stdin, limits=limits_of_case)
        is_right = finished.exit_code == 0 and finished.stdout.split() == expected.split()
        passed += is_right
        if finished.timed_out or (all and not is_right):
            break
    return passed, len(tests.cases)


def _run_harness(
    preamble: str, program: str, tests: Tests, run: Run, limits: Limits, all: bool
) -> tuple[int, int]:
    """Run the tests' text or calls in the harness. Returns the number of passed tests and of
    tests."""
    job = {
        **tests._asdict(),
        "seconds": limits.seconds,
        "all": all,
        "programs": [preamble, program],
        "candidate": (_HARNESS / "candidate.py").read_text("utf-8"),
    }
    # an upper bound for the whole run; the harness times each step
    steps = len(tests.calls) + tests.text.count("\n") + tests.text.count(";") + 3
    limits = dataclasses.replace(limits, seconds=min(limits.seconds * steps, _DAY))
    judge = (_HARNESS / "judge.py").read_text("utf-8")
    finished = run(judge, stdin=json.dumps(job), limits=limits)
    total, has_started, verdicts = finished.stdout.partition("\n")
    if not has_started:
        raise ResourceError(
            "sandbox",
            f"the harness did not start: {printable(finished.stderr[-200:]) or finished.killed_by}",
            state="the program was not judged.",
            next="raise memory_mib, or see that the machine has memory and time to spare",
        )
    if not total.isdecimal():
        raise ValueError(total)
    return verdicts.count("1"), int(total)
