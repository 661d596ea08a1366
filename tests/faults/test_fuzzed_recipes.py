"""Recipes: wrong types at every key, nesting and numbers without end, what is no text, no file or no
TOML. Whatever a command does with one before it starts a stage ends in an answer or a typed
error."""

import copy
import json
import os
import shutil
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest

from quiver.flows.calls import Maker, calls_of, perform
from quiver.flows.recipe import Recipe
from quiver.flows.rerun import rerun
from quiver.stages.common.runtime.call import Call
from tests.faults.broken import DEPTHS, Raw, error_of, garbled, members, mutated, snapshot, to_text

RECIPE = """
run = "golden"
store = "store"
seed = 7
iterations = 2
overlap = 0

[policy]
model = "model.py:make"
arguments = { seed = 0 }
dtype = "float32"

[data]
source = "questions.jsonl"
prompt = "question"
limit = 4
held_out = { source = "held_out.jsonl", limit = 3 }

[prompt]
overlong = "drop"
template_arguments = { enable = true }

[generate]
engine = "scripted"
samples_per_prompt = 4
options = { script = "answers.py:answer", logprob = -1.0 }
sampling = { max_tokens = 6, temperature = 1.0, stop_token_ids = [5] }

[reward]
max_invalid = 0.5
reward_clip = [0.0, 1.0]
overlong = { max_tokens = 6, cache = 2, weight = 0.1 }
functions = [
    { use = "length", arguments = { target = 3, tolerance = 3 } },
    { use = "mine.py:polite", weight = 0.2, name = "polite" },
]
servers = [{ urls = ["http://127.0.0.1:9/score"], name = "far", dialect = "openrlhf" }]

[reference]
rule = "fixed"
iterations = 2

[logprobs]
prox = true
packing = "single"

[optimize]
algorithm = "algo.py:ALGORITHM"
learning_rate = 1e-3
kl_coef = 0.1
schedule = "cosine"
total_steps = 90
betas = [0.9, 0.99]
lora = { rank = 2, alpha = 4 }
correction = { mode = "mask", low = 0.1, high = 3.0 }

[evaluate]
k = [1]
score = "polite"
generate = { samples_per_prompt = 2 }

[promotion]
tag = "prod"
margin = 0.1

[placement]
timeout_seconds = { generate = 60.0 }
python = { generate = "python3" }
limits = { optimize = "gpus" }
"""
VALUES = (
    *("true", "0", "-1", "7", "1.5", "-0.0", "1e308", "1e400", "nan", "-inf", str(2**31)),
    *(
        str(2**63 - 1),
        str(2**63),
        str(2**64),
        "9" * 400,
        "9" * 4000,
        "9" * 5000,
        "0x7fffffffffffffff",
    ),
    *(
        '""',
        '"x"',
        '"\\u0000"',
        '"a\\u0000b"',
        '"\\u001b[31m"',
        '"../../x"',
        '"/dev/zero"',
        '"/proc/self"',
    ),
    *(
        f'"{"x" * 300}"',
        f'"{"y" * 300}.py:f"',
        f'"{"é" * 70_000}"',
        '"*"',
        '"datasets:nowhere"',
        '"a:b"',
    ),
    *(
        '"/"',
        '"."',
        '"~"',
        '"~/nowhere"',
        '"env:NOWHERE"',
        '"http://["',
        '"module:function"',
        '"x.jsonl"',
    ),
    *(
        '"json.py:x"',
        '"os:getcwd"',
        '"package:x/y.gguf"',
        '"package:/x"',
        '"package:..x/y"',
        '".py:f"',
    ),
    *(
        '":"',
        '"a..b:c"',
        '".a:b"',
        '"questions.jsonl"',
        '"http://x"',
        '"{night}"',
        '"ä/ö"',
        '"latest"',
    ),
    *(
        "[]",
        "{}",
        "[[]]",
        "[{}]",
        '[1, "a"]',
        '["a", "a"]',
        "{ a = 1 }",
        "{ a = {} }",
        "{ a.b.c = 1 }",
    ),
    *(
        "1979-05-27",
        "07:32:00",
        "1979-05-27T07:32:00Z",
        '{ "" = 1 }',
        '{ "a b" = 1 }',
        "[1, 2, 3, 4]",
    ),
    *("[" * depth + "]" * depth for depth in DEPTHS),
    *("{ a = " * depth + "1" + " }" * depth for depth in DEPTHS),
    f"[{', '.join(['0'] * 50_000)}]",
)
"""TOML, and what is nearly TOML, of every wrong kind."""
SECTIONS = tomllib.loads(RECIPE)


def text_of(random: Random) -> bytes:
    """A recipe that is broken somewhere."""
    if random.random() < 0.1:
        return garbled(random, RECIPE.encode())
    if random.random() < 0.5:
        sections = retyped(random)
    else:
        sections = mutated(random, SECTIONS, values=VALUES)
    if not isinstance(sections, dict):
        return to_text(sections, " = ").encode("utf-8", "surrogatepass")
    lines = [f"{json.dumps(key)} = {to_text(child, ' = ')}\n" for key, child in members(sections)]
    return "".join(lines).encode("utf-8", "surrogatepass")


def retyped(random: Random) -> dict[str, Any]:
    """The recipe with another value of the same type at one to three keys."""
    sections = copy.deepcopy(SECTIONS)
    for _ in range(random.choice((1, 1, 2, 3))):
        parent, key = random.choice(list(leaves(sections)))
        is_text = isinstance(parent[key], str)
        choices = [text for text in VALUES if (text[0] == '"') == is_text and text[0] not in "[{"]
        parent[key] = Raw(random.choice(choices))
    return sections


def leaves(node: Any) -> Iterator[tuple[Any, Any]]:
    """The places of all that is no section and no list."""
    for key in list(node) if isinstance(node, dict) else range(len(node)):
        if isinstance(node[key], dict | list):
            yield from leaves(node[key])
        else:
            yield node, key


@pytest.fixture(scope="module")
def inputs(finished, tmp_path_factory):
    """The working directory that a recipe's files lie in, with a finished store."""
    folder = tmp_path_factory.mktemp("recipes") / "inputs"
    shutil.copytree(finished / "inputs", folder)
    shutil.copytree(finished / "finished", folder / "store")
    before = Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


NAMED = {"optimize": {"rollouts": "golden/rollouts@1", "rewards": "golden/rewards@1"}}
STAGES = ("run", "prompt", "generate", "reward", "logprobs", "optimize", "evaluate")


class NotMade(Exception):
    """A stage would be started now."""


def refuse(call: Call) -> Maker:
    """What is not finished is not made."""
    raise NotMade(call.label)


def use(path: Path, stage: str) -> None:
    """All that a command does with a recipe before it starts a stage."""
    recipe = Recipe.load(path)
    json.loads(recipe.model_dump_json())  # as a deployment keeps it
    with suppress(NotMade), calls_of(recipe, refuse):
        if stage == "run":
            perform("policy", recipe.resolved().policy, {})
        else:
            rerun(recipe, stage, NAMED.get(stage, {}))


def fuzz(inputs: Path, seed: int, count: int) -> None:
    """`count` recipes, each by one command."""
    random = Random(seed)
    path = inputs / "recipe.toml"
    for number in range(count):
        path.write_bytes(text_of(random))
        state = snapshot(inputs / "store", (".index", ".ledger"))
        stage = random.choice(STAGES)
        try:
            error = error_of(lambda: use(path, stage))  # noqa: B023
        except BaseException as error:
            error.add_note(f"seed {seed}, recipe {number}, {stage}: {path.read_bytes()[:3000]!r}")
            raise
        assert snapshot(inputs / "store", (".index", ".ledger")) == state


def test_wrong_recipes_are_typed_errors_to_all_commands(inputs):
    fuzz(inputs, seed=1, count=24)


@pytest.mark.torture
@pytest.mark.parametrize("seed", range(10, 15))
def test_5000_wrong_recipes_are_typed_errors(inputs, seed):
    fuzz(inputs, seed=seed, count=1000)
