"""Broken files of every sort: whoever reads them gives an answer or a typed error, and changes
nothing."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from quiver.flows.cli import versions as commands
from quiver.schemas.manifest import MAX_BYTES, from_json
from quiver.schemas.refs import parse
from quiver.stages.core.store import Store
from tests.faults import fuzzers
from tests.faults.broken import error_of, fuzz, sealed, snapshot
from tests.faults.fuzzers import READERS, WRITTEN_BY_READERS, fields_of
from tests.faults.sizes import part

FUZZERS = {
    fuzzers.manifests: (30, range(10, 60), 1000),
    fuzzers.tables: (12, range(10, 20), 1000),
    fuzzers.recipes: (24, range(10, 15), 1000),
    fuzzers.models: (8, range(10, 20), 500),
    fuzzers.small_files: (16, range(10, 20), 2000),
}
"""Cases in `make test`, seeds of `make torture`, and cases of each seed."""


@pytest.fixture
def place(finished, tmp_path, monkeypatch) -> Path:
    """A copy of a finished store of every stage, beside the inputs that its recipes name."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path / "inputs")
    return tmp_path


@pytest.fixture
def store(place) -> Path:
    return place / "finished"


@pytest.mark.parametrize(
    ("fuzzer", "seed", "count"),
    [
        pytest.param(fuzzer, seed, count, id=f"{fuzzer.__name__}-{seed}", marks=marks)
        for fuzzer, (short, seeds, full) in FUZZERS.items()
        for seed, count, marks in [
            (1, short, ()),
            *((seed, full, pytest.mark.torture) for seed in part(seeds)),
        ]
    ],
)
def test_broken_files_are_typed_errors(place, capsys, record_property, fuzzer, seed, count):
    num_refused = fuzz(fuzzer(place, Random(seed)), count)
    assert num_refused > count / 10, "most of them are read without a word: it breaks nothing"
    require_safe(capsys)
    record_property(f"broken files: {fuzzer.__name__}", count)


def require_safe(capsys) -> str:
    """What was printed, in which nothing moves the cursor."""
    printed = capsys.readouterr().out
    assert {character for character in printed if not character.isprintable()} <= {"\n"}
    return printed


# -- what the fuzzers found


def rewrite(store: Path, ref: str, change: Callable[[dict], object]) -> None:
    """The manifest of a version after `change`, with the checksum that fits it."""
    path = store / parse(ref).folder / "manifest.json"
    fields = fields_of(path)
    change(fields)
    path.write_bytes(sealed(json.dumps(fields)))


def let_lead(ref: str, role: str = "policy") -> Callable[[dict], object]:
    """Let the source of this role be `ref`."""
    return lambda fields: [
        entry.update(ref=ref) for entry in fields["inputs"] if entry["role"] == role
    ]


def drop(name: str, role: str) -> Callable[[dict], object]:
    """Take the sources of this role out."""
    return lambda fields: fields.update(
        {name: [entry for entry in fields[name] if entry["role"] != role]}
    )


FOUND = [
    ("golden/policy@1", let_lead("golden/policy@1"), "report", "E-LINEAGE"),
    ("golden/policy@1", let_lead("golden/policy@2"), "first", "E-LINEAGE"),
    ("golden/policy@1", let_lead("golden/policy@2"), "check_lineage", "E-LINEAGE"),
    ("golden/rewards@6", drop("inputs", "rollouts"), "report", None),  # it is left out
    ("golden/rollouts@1", drop("models", "policy"), "sampler", "E-LINEAGE"),
    ("held/evaluations@1", drop("inputs", "rewards"), "compare", "E-LINEAGE"),
    ("golden/prompts@2", lambda fields: fields.update(bytes={}), "report", None),
    ("golden/rewards@6", lambda fields: fields["metrics"].update(reward_mean="high"), "ls", None),
    ("held/evaluations@4", lambda fields: fields.update(metrics=[]), "ls", None),
    ("golden/policy@2", let_lead("golden/updates@1", "rewards"), "report", None),  # left out
    ("held/rollouts@1", let_lead("golden/prompts@1", "prompts"), "compare two", "E-LINEAGE"),
    (
        "held/evaluations@4",
        lambda fields: fields["models"][0].update(ref="golden/policy@" + "9" * 300),
        "report held",
        "E-LINEAGE",
    ),
    (
        "golden/policy@2",
        lambda fields: fields["metrics"].update(skipped_steps={"a": 1}),
        "report",
        "E-CORRUPT",
    ),
    (
        "golden/rewards@6",
        lambda fields: fields["metrics"]["functions"]["length"].update(mean="high"),
        "report",
        "E-CORRUPT",
    ),
    (
        "held/evaluations@4",
        lambda fields: fields["metrics"].pop("score"),
        "show",
        "E-CORRUPT",
    ),
    (
        "held/evaluations@4",
        lambda fields: fields["metrics"]["pass@k"]["2"]["interval"].pop(),
        "show",
        "E-CORRUPT",
    ),
    (
        "golden/updates@2",
        lambda fields: fields["files"][0].pop("rows"),
        "show updates",
        "E-CORRUPT",
    ),
    (
        "held/evaluations@4",
        lambda fields: fields["metrics"].pop("difference"),
        "judge",
        "E-LINEAGE",
    ),
    (
        "golden/rollouts@1",
        lambda fields: fields["models"][0].update(ref="golden/policy@latest"),
        "verify",
        "E-LINEAGE",
    ),
    (
        "golden/rollouts@1",
        lambda fields: fields["config"].update(sampling="greedy"),
        "check_lineage",
        "E-CORRUPT",
    ),
    (
        "golden/rewards@3",
        lambda fields: fields["config"].update(functions={"use": 1}),
        "retry",
        "E-CONFIG",
    ),
    (
        "lora/policy@1",
        lambda fields: fields["config"].update(lora={"rank": "high"}),
        "adapt",
        "E-CONFIG",
    ),
    (
        "lora/policy@1",
        lambda fields: fields["config"].update(lora=[2, 4]),
        "adapt",
        "E-CORRUPT",
    ),
]


@pytest.mark.parametrize(("ref", "change", "reader", "code"), FOUND)
def test_what_was_found_is_told(store, capsys, ref, change, reader, code):
    rewrite(store, ref, change)
    before = snapshot(store, WRITTEN_BY_READERS)
    error = error_of(lambda: READERS[reader](store))
    assert (error and error.code) == code
    assert snapshot(store, WRITTEN_BY_READERS) == before


HOSTILE = "\r\x1b[2J\x9b31m\u202e\nforged"


def spoil(fields: dict) -> None:
    """Words that move the cursor, wherever a manifest may have words of its own."""
    fields["stage"] = f"optimize{HOSTILE}"
    fields["created"] = f"\nforged{HOSTILE}"
    for name in ("config", "metrics", "environment"):
        fields[name] |= {f"key{HOSTILE}": f"value{HOSTILE}"}
    for name in ("status", "seconds", "bytes"):
        fields[name] |= {f"key{HOSTILE}": 1}
    for entry in fields["inputs"]:
        entry["role"] += HOSTILE
    fields["models"].append(
        {"role": HOSTILE, "ref": f"hub{HOSTILE}", "weights": "w", "tokenizer": "t", "template": "t"}
    )


@pytest.mark.parametrize(
    "command",
    [
        lambda path: commands.lineage("golden/rewards@1", store=path),
        lambda path: commands.diff("golden/rewards@1", "golden/rewards@2", path),
        lambda path: commands.show("golden/rewards@1", 1, path),
    ],
    ids=["lineage", "diff", "show"],
)
def test_no_word_of_a_manifest_moves_the_cursor(store, capsys, command):
    rewrite(store, "golden/rewards@1", spoil)
    commands.ls(None, str(store))  # lists it as torn
    command(str(store))
    shown = require_safe(capsys)
    assert r"\r\x1b[2J\x9b31m\u202e" in shown
    assert "\nforged" not in shown, "nor does it begin a line of its own"


@pytest.mark.parametrize("command", ["rm", "verify"])
def test_a_version_with_a_wrong_manifest_can_be_put_aside_or_deleted(store, capsys, command):
    rewrite(store, "own/updates@1", lambda fields: fields.update(metrics=[]))
    written = ("v000001", "v000001.removed", ".index")
    before = snapshot(store, written)
    if command == "rm":
        commands.rm("own/updates@1", "broken", str(store))
    else:
        commands.verify(None, "own/updates@1", True, str(store))
    assert not Store(store).exists(parse("own/updates@1"))
    assert snapshot(store, written) == before


@pytest.mark.parametrize("unit", [b"[],", b"{},", b'"ab",', b"999,", "\U0001f600".encode()])
def test_the_largest_manifest_takes_little_memory(unit):
    """Whatever it is full of."""
    inside = unit * ((MAX_BYTES - 100) // len(unit))
    text = b'{"x":["' + inside + b'"]}' if unit[-1:] != b"," else b'{"x":[' + inside + b"0]}"
    assert error_of(lambda: from_json(text, "a/rollouts@1")).code == "E-CORRUPT"
