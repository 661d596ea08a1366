"""The bugs of `make mutants`: what each operator makes of a short text, and that there are enough
of them in each file. Whether they are caught is for `make mutants`."""

import ast
from collections import Counter
from pathlib import Path

import pytest

from tests.mutants import MOST_A_FILE, TARGETS, MissingFile, Target, choose, mutants_of
from tests.mutants.operators import find_bugs, mutated

ROOT = Path(__file__).parents[1]
SAMPLE = '''\
"""A sample. Nothing here: 1 + 1."""
LEAST = 1 + 1
def scaled(values: list, weights: list, most: int = 1) -> list:
    """[N] ≥ 0."""
    log.info("of %d", len(values) - 1)
    if len(values) != len(weights):
        raise ValueError(f"{len(values) - len(weights)} too many")
    values.sort()
    é = min(values[0], most) * ("é", -weights[0])[-1]
    return é
'''
IN_SAMPLE = {
    "sign": [
        "    if len(values) == len(weights):",
        '    é = min(values[0], most) * ("é", weights[0])[-1]',
        '    é = min(values[0], most) * ("é", -weights[0])[1]',
    ],
    "one": [
        "    if len(values) != len(weights):",
    ],
}


def changed_lines(source: str, operator: str) -> list[str]:
    """The one line that each of the operator's bugs changes, without its indentation."""
    found = []
    for bug in find_bugs(source):
        if bug.operator == operator:
            lines = mutated(source, bug).splitlines()
            differing = set(lines) - set(source.splitlines())
            found.append(differing.pop().strip() if len(differing) == 1 else differing)
    return found


def in_function(line: str, parameters: str = "a, b") -> str:
    return f"def f({parameters}):\n    {line}\n"
