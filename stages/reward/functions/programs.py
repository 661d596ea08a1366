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

from quiver.schemas.errors import ConfigError, ResourceError, printable

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

    >>> code(["Sure:\n```python\ndef double(x):\n    return 2 * x\n```"], [["assert double(2) == 4", "assert double(1) == 3"]])
    [0.5]
    """
    from quiver.stages.reward.sandbox import Limits

    rows = len(completions)
    _refuse_columns(
        isolation=isolation,
        sandbox_python=sandbox_python,
        sandbox_url=sandbox_url,
        sandbox_token=sandbox_token,
    )
    _refuse_columns(all=all, timeout_seconds=timeout_seconds, memory_mib=memory_mib)
    spoken = [language] * rows if isinstance(language, str) else language
    entries = [entry] * rows if isinstance(entry, str) else entry
    read = [
        None if given is None else read_tests(given, name or "", tongue)
        for given, name, tongue in zip(tests, entries, spoken, strict=True)
    ]
    limits = Limits(seconds=timeout_seconds, memory_mib=memory_mib)
    if not rows:
        return []
    run = _runner(isolation, sandbox_python, sandbox_url, sandbox_token)
    with ThreadPoolExecutor(min(rows, _cores())) as pool:
        waiting = [
            None if wanted is None else pool.submit(_score, extract(text), wanted, run, limits, all)
            for text, wanted in zip(completions, read, strict=True)
        ]
        try:
            return [None if one is None else one.result() for one in waiting]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _refuse_columns(**arguments: Any) -> None:
    """A column of the data that bears an argument's name would come as a list; where programs run
    is the recipe's to say."""
    for name, value in arguments.items():
        if not isinstance(value, str | int | float):
            raise ConfigError(
                "reward function code",
                f"{name} must be set in arguments, not by a column",
                next=f"set {name}",
            )


def extract(completion: str) -> str:
    """The program in a completion, as `code` describes it.

    >>> extract("First:\\n```python\\nx = 1\\n```\\nthen\\n```\\nx = 2\\n```\\nprints\\n```text\\n2\\n```"), extract("x = 3")
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


def read_tests(given: Any, entry: str = "", language: str = "python") -> Tests:
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
    if isinstance(given, str) and given.lstrip()[:1] in ("[", "{"):
        given = json.loads(given)
    if isinstance(given, dict):
        entry = entry or given.get("fn_name") or ""
        pairs = [given.get(name, given.get(name + "s")) for name in ("input", "output")]
        if not (isinstance(pairs[0], list) and isinstance(pairs[1], list)) or len(pairs[0]) != len(
            pairs[1]
        ):
            raise ValueError(
                f"tests with the keys {', '.join(map(printable, given))}, expected inputs and "
                "outputs, as many of each"
            )
        given = [{"input": one, "output": other} for one, other in zip(*pairs, strict=True)]
    if isinstance(given, str):
        return Tests([], [], given, entry)
    if not isinstance(given, list) or not given:
        raise ValueError(f"tests must be a list of tests, or text, got {printable(repr(given))}")
    if isinstance(given[0], str):
        return Tests([], [], "\n".join(given), entry)
    if any(not isinstance(case, dict) or not {"input", "output"} <= set(case) for case in given):
        raise ValueError("a test must have input and output")
    if entry:
        return Tests([], [_call(case["input"], case["output"]) for case in given], "", entry)
    return Tests([(_text(case["input"]), _text(case["output"])) for case in given], [], "", "")


def _text(value: Any) -> str:
    if value is None:
        raise ValueError("a test must have input and output")
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _call(given: Any, wanted: Any) -> tuple[list[Any], Any]:
    if isinstance(given, str):  # then the wanted value is JSON text too
        return [json.loads(line) for line in given.splitlines() if line.strip()], json.loads(wanted)
    if not isinstance(given, list):
        raise ValueError(
            f"the input of a call must be a list of arguments, got {printable(repr(given))}"
        )
    return given, wanted


# -- runs


def _runner(isolation: str, python: str, url: str, token: str) -> Run:
    """What runs a program; that it can run any is tried first, so that no program is blamed for a
    sandbox that fails."""
    from quiver.stages.reward.sandbox import describe, remote, run_program

    if url:
        remote.check(url, token)
        return functools.partial(remote.run_program, url=url, token=token)
    describe(isolation, python)
    return functools.partial(run_program, isolation=isolation, python=python)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _score(program: str, tests: Tests, run: Run, limits: Limits, all: bool) -> float:
    passed, total = (_compare if tests.cases else _judge)(program, tests, run, limits, all)
    return float(passed == total) if all else passed / total


def _compare(program: str, tests: Tests, run: Run, limits: Limits, all: bool) -> tuple[int, int]:
    """Run the program on each stdin; how many outputs are right, and how many tests there are."""
    passed = 0
    for stdin, wanted in tests.cases:
        room = dataclasses.replace(limits, output_kib=limits.output_kib + len(wanted) // 256)
        finished = run(program, stdin=stdin, limits=room)
        right = finished.exit_code == 0 and finished.stdout.split() == wanted.split()
        passed += right
        if finished.timed_out or (all and not right):
            break
    return passed, len(tests.cases)


def _judge(program: str, tests: Tests, run: Run, limits: Limits, all: bool) -> tuple[int, int]:
    """Have the tests' text or calls run by the harness; how many passed, and how many there are."""
    judge, candidate = _harness()
    about = {
        "tests": tests.text,
        "calls": tests.calls,
        "entry": tests.entry,
        "seconds": limits.seconds,
        "all": all,
    }
    job = json.dumps({**about, "program": program, "candidate": candidate})
    steps = (
        len(tests.calls) + tests.text.count("\n") + tests.text.count(";") + 3
    )  # at most; the harness times each
    whole = dataclasses.replace(limits, seconds=min(limits.seconds * steps, _DAY))
    finished = run(judge, stdin=job, limits=whole)
    total, begun, verdicts = finished.stdout.partition("\n")
    if not begun:
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
    return tuple(
        (folder / name).read_text(encoding="utf-8") for name in ("judge.py", "candidate.py")
    )


def sandbox_is_there(arguments: dict[str, Any]) -> None:
    """SecurityError where this system does not permit a layer of the sandbox that `arguments` of
    `code` ask for.

    ConfigError where that is on a server and its token's variable holds none.
    """
    from quiver.stages.reward.sandbox import describe, remote

    if arguments.get("sandbox_url"):
        remote.secret(arguments.get("sandbox_token", ""))
    else:
        describe(arguments.get("isolation", "full"), arguments.get("sandbox_python", ""))
