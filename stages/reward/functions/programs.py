r"""The reward function `code`: the program in a completion, run apart against the row's tests.

The program never runs in this process, nor does the text of a test: both go to
`quiver.stages.common.sandbox`, or to a server. A failure of the sandbox is an error of the row;
what the program does wrong is 0.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from quiver.schemas.errors import ResourceError, printable
from quiver.stages.common.threads import map_in_threads

if TYPE_CHECKING:
    from quiver.stages.common.sandbox import Finished, Limits

_HARNESS = Path(__file__).with_name("harness")
_FENCE = re.compile(
    r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE
)
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
    isolation: str = "full",
    sandbox_python: str = "",
    sandbox_url: str = "",
    sandbox_token: str = "",
) -> list[float | None]:
    r"""The share of the row's `tests` that the program in the completion passes; with `all`, 1 for
    all of them, else 0.

        reward_i = passed_i / tests_i            all: reward_i = 1 if passed_i = tests_i else 0

    The program is the last fenced block of the completion that is marked python or not marked (an
    open one reaches to the end); without a fence the whole completion. The tests of a row, in the
    column `tests`, as they are or as JSON text, are one of
      * a list of {"input": stdin, "output": stdout}, or {"inputs": [...], "outputs": [...]}: the
        program is run once a test and must end with exit code 0; its output is compared word by
        word, so white space does not count;
      * the same with an `entry`, the name of a function (also of a method of a class `Solution`):
        it is called with each input (a list of arguments, or text with one JSON value a line) and
        must return the output, lists and tuples being the same. A "testtype" of "functional" asks
        for an entry;
      * Python text, or a list of texts, run top to bottom after the program. Counted is each
        statement with an assert, each function `test_…`, and `check(entry)` where they define
        `check`. Names that they do not define are the program's, but for builtins; it may be
        imported as `solution`; its `__name__` is not `__main__`.
    `timeout_seconds` and `memory_mib` are limits of one test; tests after one that timed out are
    not run and count as failed, as do those after the program's process has ended. Null tests give
    None. `entry` and `language` may be columns.

    `isolation`: see `sandbox.run`; `sandbox_python`: an interpreter with packages to use;
    `sandbox_url`, `sandbox_token` (as `env:NAME`): a server that runs the programs, see
    `remote_sandbox`. These come from the recipe alone. Called on no rows, it only sees whether a
    sandbox here could run programs, and whether there is a token for a server.

    What can be gamed. Expected outputs are kept out of the sandbox, or in a process that the
    program cannot read: leaving early, patching builtins, printing a verdict or overriding == wins
    nothing. But a program may answer just the inputs that it is given; a test that hands what it
    expects to the program (`f(x).startswith("a")` where f returns an object of its own, `a == b` of
    two such objects) has the program's word for it; and isolation "process" keeps no program from
    reading the tests out of the judge's memory. Tests that need a class of the program as a base or
    in `isinstance`, or hand it objects of their own classes, fail.

    Raises ValueError for tests that cannot be read, SecurityError and ResourceError of the
    sandbox, RemoteError of the server.

    >>> tests = ["assert double(2) == 4", "assert double(1) == 3"]
    >>> code(["Sure:\n```python\ndef double(x):\n    return 2 * x\n```"], [tests])
    [0.5]
    """
    from quiver.stages.common import sandbox

    num_rows = len(completions)
    languages = [language] * num_rows if isinstance(language, str) else language
    entries = [entry] * num_rows if isinstance(entry, str) else entry
    rows = [
        None if column is None else (extract(text), read_tests(column, name or "", spoken))
        for text, column, name, spoken in zip(completions, tests, entries, languages, strict=True)
    ]
    limits = sandbox.Limits(seconds=timeout_seconds, memory_mib=memory_mib)
    # that a program can run at all is tried first, so that none is blamed for a sandbox that fails
    if sandbox_url:
        from quiver.stages.common.servers import secret
        from quiver.stages.reward import remote_sandbox

        secret(sandbox_token, "sandbox_token")
        if num_rows:
            remote_sandbox.check(sandbox_url, sandbox_token)
        run = functools.partial(remote_sandbox.run_program, url=sandbox_url, token=sandbox_token)
    else:
        sandbox.check(isolation, sandbox_python)
        run = functools.partial(sandbox.run_program, isolation=isolation, python=sandbox_python)

    def score(row: tuple[str, Tests] | None) -> float | None:
        if row is None:
            return None
        judge = _compare_outputs if row[1].cases else _run_harness
        passed, total = judge(*row, run, limits, all)
        return float(passed == total) if all else passed / total

    return map_in_threads(score, rows)


def extract(completion: str) -> str:
    """The program in a completion, as `code` describes it.

    >>> first, last = "```python\\nx = 1\\n```\\n", "```\\nx = 2\\n```\\n"
    >>> extract(f"First:\\n{first}then\\n{last}prints\\n```text\\n2\\n```"), extract("x = 3")
    ('x = 2\\n', 'x = 3')
    """
    blocks = [text for mark, text in _FENCE.findall(completion) if mark.lower() in ("", *_PYTHON)]
    return blocks[-1] if blocks else completion


# -- tests


class Tests(NamedTuple):
    """The tests of a row: `cases` of stdin and stdout, or `calls` of `entry` with arguments and
    value, or Python `text`."""

    entry: str = ""
    text: str = ""
    calls: Sequence[tuple[list[Any], Any]] = ()
    cases: Sequence[tuple[str, str]] = ()


def read_tests(column: Any, entry: str = "", language: str = "python") -> Tests:
    """What a column holds, as `code` describes it. ValueError when it holds no tests.

    >>> read_tests([{"input": "1 2", "output": "3"}]).cases
    [('1 2', '3')]
    >>> read_tests('{"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}').calls
    [([1, 2], 3)]
    """
    if language.lower() not in _PYTHON:
        raise ValueError(
            f"language must be python, got {printable(language)}; set it in arguments if that "
            "column means another"
        )
    if isinstance(column, str) and column.lstrip()[:1] in ("[", "{"):
        column = json.loads(column)
    if isinstance(column, dict):
        entry = entry or column.get("fn_name") or ""
        inputs, outputs = (column.get(key, column.get(key + "s")) for key in ("input", "output"))
        both = isinstance(inputs, list) and isinstance(outputs, list)
        if not both or len(inputs) != len(outputs):
            raise ValueError(
                f"tests with the keys {', '.join(map(printable, column))}, expected inputs and "
                "outputs, as many of each"
            )
        pairs = zip(inputs, outputs, strict=True)
        column = [{"input": input, "output": output} for input, output in pairs]
    if isinstance(column, str):
        column = [column]
    if not isinstance(column, list) or not column:
        raise ValueError(f"tests must be a list of tests, or text, got {printable(repr(column))}")
    if isinstance(column[0], str):
        return Tests(entry, "\n".join(column))
    if any(not isinstance(case, dict) or not {"input", "output"} <= set(case) for case in column):
        raise ValueError("a test must have input and output")
    if entry:
        return Tests(entry, calls=[_read_call(case["input"], case["output"]) for case in column])
    if any(case.get("testtype") == "functional" for case in column):
        raise ValueError(
            "tests of the type functional call a function: name it in a column entry, or in "
            "arguments.entry"
        )
    return Tests(cases=[(_as_text(case["input"]), _as_text(case["output"])) for case in column])


def _as_text(stream: Any) -> str:
    if stream is None:
        raise ValueError("a test must have input and output")
    return "\n".join(map(str, stream)) if isinstance(stream, list) else str(stream)


def _read_call(input: Any, output: Any) -> tuple[list[Any], Any]:
    """The arguments of a call, and the value that it must return."""
    if isinstance(input, str):  # then the output is JSON text too
        lines = filter(str.strip, input.splitlines())
        return [json.loads(line) for line in lines], json.loads(output)
    if not isinstance(input, list):
        raise ValueError(
            f"the input of a call must be a list of arguments, got {printable(repr(input))}"
        )
    return input, output


# -- runs


def _compare_outputs(
    program: str, tests: Tests, run: Run, limits: Limits, all: bool
) -> tuple[int, int]:
    """Run the program on each stdin; how many outputs are right, and how many tests there are."""
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
    program: str, tests: Tests, run: Run, limits: Limits, all: bool
) -> tuple[int, int]:
    """Have the tests' text or calls run by the harness; how many passed, and how many there are."""
    job = {
        **tests._asdict(),
        "seconds": limits.seconds,
        "all": all,
        "program": program,
        "candidate": (_HARNESS / "candidate.py").read_text("utf-8"),
    }
    # at most; the harness times each
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
