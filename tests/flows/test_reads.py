"""How often a run reads what its recipe names, rows that a function makes and an algorithm, and how
often it tries whether its rewards can be had."""

from collections import Counter

import pytest

from tests.flows.conftest import QUICK, quiver

pytestmark = pytest.mark.prefect
ROWS = """
import json

def rows(name):
    with open("asked.txt", "a") as notes:
        notes.write(name + "\\n")
    yield from map(json.loads, open(name + ".jsonl"))
"""
ALGORITHM = """
import os
from quiver.stages.optimize.algorithms import Algorithm

with open("asked.txt", "a") as notes:
    notes.write("algorithm\\n")
OWN = Algorithm("own", "group_centered", "clipped", "constant", {"clip_low": 0.1, "clip_high": 0.3})
"""
REWARD = """
with open(NOTES, "a") as notes:
    notes.write("reward\\n")

def noted(completions, answer):
    return [float(len(text)) for text in completions]
"""
SETTINGS = (
    *QUICK,
    "run=counted",
    "data.source=counted.py:rows",
    "data.arguments={name='questions'}",
    "data.held_out={limit=3, arguments={name='held_out'}}",
    "optimize.algorithm=own_algo.py:OWN",
    "reward.functions=[{use='noted.py:noted'}]",
)


@pytest.fixture(scope="module")
def asked(workplace):
    """What a command with the recipe read, and how often."""
    (workplace / "counted.py").write_text(ROWS)
    (workplace / "own_algo.py").write_text(ALGORITHM)
    notes = workplace / "asked.txt"
    (workplace / "noted.py").write_text(REWARD.replace("NOTES", repr(str(notes))))
    settings = [part for setting in SETTINGS for part in ("--set", setting)]

    def count(command: str, *options: str) -> tuple[dict, Counter]:
        notes.write_text("")
        answer = quiver(workplace, command, "recipe.toml", *settings, *options)
        return answer, Counter(notes.read_text().split())

    return count


def test_one_stage_reads_its_rows_once_and_once_to_make_prompts(asked):
    answer, counts = asked("prompt")
    assert not answer["cached"] and counts == {"questions": 2}
    answer, counts = asked("prompt")
    assert answer["cached"] and counts == {"questions": 1}


def test_a_run_reads_all_once_and_once_for_each_version(asked):
    """The prompts of the first iteration are there; the held-out ones serve both measurements. A
    reward function is imported where each of two iterations and two measurements is scored, and
    tried once before all of them."""
    answer, counts = asked("run")
    assert len(answer["iterations"]) == 2 and answer["baseline"]
    assert counts == {"questions": 2, "held_out": 2, "algorithm": 3, "reward": 4 + 1}
    again, counts = asked("run")
    assert again["baseline"] == answer["baseline"]
    assert counts == {"questions": 1, "held_out": 1, "algorithm": 1}


def test_a_stage_of_a_finished_run_reads_only_what_it_is_made_of(asked):
    for command, expected in (
        ("evaluate", {"held_out": 1}),
        ("optimize", {"algorithm": 1}),
        ("reward", {}),
    ):
        answer, counts = asked(command)
        assert answer["cached"] and counts == expected, command
