r"""The reward function `code`: the program in a completion, run apart against the row's tests.

The program never runs in this process, nor does the text of a test: both go to
`quiver.stages.reward.sandbox`, or to a server. A failure of the sandbox is an error of the row;
what the program does wrong is 0.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from quiver.schemas.errors import ResourceError, printable

if TYPE_CHECKING:
    from quiver.stages.reward.sandbox import Finished, Limits

_FENCE = re.compile(
    r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE
)
_PYTHON = ("", "py", "python", "python3")
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
        must return the output, lists and tuples being the same;
      * Python text, or a list of texts, run top to bottom after the program. Counted is each
        statement with an assert, each function `test_…`, and `check(entry)` where they define
        `check`. Names that they do not define are the program's, but for builtins; it may be
        imported as `solution`; its `__name__` is not `__main__`.
    `timeout_seconds` and `memory_mib` are limits of one test; tests after one that timed out are
    not run and count as failed, as do those after the program's process has ended. Null tests give
    None. `entry` and `language` may be columns.

    `isolation`: see `sandbox.run`; `sandbox_python`: an interpreter with packages to use;
    `sandbox_url`, `sandbox_token` (as `env:NAME`): a server that runs the programs, see
    `sandbox.remote`. These come from the recipe alone.

    What can be gamed. Expected outputs are kept out of the sandbox, or in a process that the
    program can not read: leaving early, patching builtins, printing a verdict or overriding == wins
    nothing. But a program may answer just the inputs that it is given; a test that hands what it
    expects to the program (`f(x).startswith("a")` where f returns an object of its own, `a == b` of
    two such objects) has the program's word for it; and isolation "process" keeps no program from
    reading the tests out of the judge's memory. Tests that need a class of the program as a base or
    in `isinstance`, or hand it objects of their own classes, fail.

    Raises ValueError for tests that can not be read, SecurityError and ResourceError of the
    sandbox, RemoteError of the server.

    >>> tests = ["assert double(2) == 4", "assert double(1) == 3"]
    >>> code(["Sure:\n```python\ndef double(x):\n    return 2 * x\n```"], [tests])
    [0.5]
    """
    from quiver.stages.reward.sandbox import Limits

    num_rows = len(completions)
    languages = [language] * num_rows if isinstance(language, str) else language
    entries = [entry] * num_rows if isinstance(entry, str) else entry
    rows = [
        None if column is None else read_tests(column, name or "", spoken)
        for column, name, spoken in zip(tests, entries, languages, strict=True)
    ]
    limits = Limits(seconds=timeout_seconds, memory_mib=memory_mib)
    if not num_rows:
        return []
    run = _runner(isolation, sandbox_python, sandbox_url, sandbox_token)
    with ThreadPoolExecutor(min(num_rows, len(os.sched_getaffinity(0)))) as pool:
        scores = [
            None if row is None else pool.submit(_score, extract(text), row, run, limits, all)
            for text, row in zip(completions, rows, strict=True)
        ]
        try:
            return [None if score is None else score.result() for score in scores]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def extract(completion: str) -> str:
    """The program in a completion, as `code` describes it.

    >>> first, last = "```python\\nx = 1\\n```\\n", "```\\nx = 2\\n```\\n"
    >>> extract(f"First:\\n{first}then\\n{last}prints\\n```text\\n2\\n```"), extract("x = 3")
    ('x = 2\\n', 'x = 3')
    """
    blocks = [text for mark, text in _FENCE.findall(completion) if mark.lower() in _PYTHON]
    return blocks[-1] if blocks else completion


# -- tests


class Tests(NamedTuple):
    """The tests of a row: `cases` of stdin and stdout, or `calls` of `entry` with arguments and
    value, or Python `text`."""

    cases: list[tuple[str, str]]
    calls: list[tuple[list[Any], Any]]
    text: str
    entry: str


def read_tests(column: Any, entry: str = "", language: str = "python") -> Tests:
    """What a column holds, as `code` describes it. ValueError when it holds no tests.

    >>> read_tests([{"input": "1 2", "output": "3"}]).cases
    [('1 2', '3')]
    >>> read_tests('{"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}').calls
    [([1, 2], 3)]
    """
    if language.lower() not in ("py", "python", "python3"):
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
        return Tests([], [], column, entry)
    if not isinstance(column, list) or not column:
        raise ValueError(f"tests must be a list of tests, or text, got {printable(repr(column))}")
    if isinstance(column[0], str):
        return Tests([], [], "\n".join(column), entry)
    if any(not isinstance(case, dict) or not {"input", "output"} <= set(case) for case in column):
        raise ValueError("a test must have input and output")
    if entry:
        return Tests([], [_read_call(case["input"], case["output"]) for case in column], "", entry)
    return Tests(
        [(_as_text(case["input"]), _as_text(case["output"])) for case in column], [], "", ""
    )


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


def _runner(isolation: str, python: str, url: str, token: str) -> Run:
    """What runs a program; that it can run any is tried first, so that no program is blamed for a
    sandbox that fails."""
    from quiver.stages.reward.sandbox import check, remote, run_program

    if url:
        remote.check(url, token)
        return functools.partial(remote.run_program, url=url, token=token)
    check(isolation, python)
    return functools.partial(run_program, isolation=isolation, python=python)


def _score(program: str, tests: Tests, run: Run, limits: Limits, all: bool) -> float:
    judge = _compare_outputs if tests.cases else _run_harness
    passed, total = judge(program, tests, run, limits, all)
    return float(passed == total) if all else passed / total


def _compare_outputs(
    program: str, tests: Tests, run: Run, limits: Limits, all: bool
) -> tuple[int, int]:
    """Run the program on each stdin; how many outputs are right, and how many tests there are."""
    passed = 0
    for stdin, expected in tests.cases:
        output_kib = limits.output_kib + len(expected) // 256
        finished = run(
            program, stdin=stdin, limits=dataclasses.replace(limits, output_kib=output_kib)
        )
        is_right = finished.exit_code == 0 and finished.stdout.split() == expected.split()
        passed += is_right
        if finished.timed_out or (all and not is_right):
            break
    return passed, len(tests.cases)


def _run_harness(
    program: str, tests: Tests, run: Run, limits: Limits, all: bool
) -> tuple[int, int]:
    """Have the tests' text or calls run by the harness; how many passed, and how many there are."""
    judge, candidate = _harness()
    job = {
        "tests": tests.text,
        "calls": tests.calls,
        "entry": tests.entry,
        "seconds": limits.seconds,
        "all": all,
        "program": program,
        "candidate": candidate,
    }
    # at most; the harness times each
    steps = len(tests.calls) + tests.text.count("\n") + tests.text.count(";") + 3
    seconds = min(limits.seconds * steps, _DAY)
    finished = run(
        judge, stdin=json.dumps(job), limits=dataclasses.replace(limits, seconds=seconds)
    )
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


@functools.cache
def _harness() -> tuple[str, str]:
    folder = Path(__file__).with_name("harness")
    return tuple((folder / name).read_text("utf-8") for name in ("judge.py", "candidate.py"))


def sandbox_is_there(arguments: dict[str, Any]) -> None:
    """SecurityError where this system does not permit a layer of the sandbox that `arguments` of
    `code` ask for.

    ConfigError where that is on a server and its token's variable holds none.
    """
    from quiver.stages.reward.sandbox import check
    from quiver.stages.reward.servers.config import secret

    if arguments.get("sandbox_url"):
        secret(arguments.get("sandbox_token", ""), "sandbox_token")
    else:
        check(arguments.get("isolation", "full"), arguments.get("sandbox_python", ""))
