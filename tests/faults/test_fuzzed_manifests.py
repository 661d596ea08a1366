"""Manifests with right checksums and wrong contents: every command and every plan that reads them
gives an answer or a typed error, and changes nothing."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from quiver.flows import rerun
from quiver.flows.commands import versions
from quiver.flows.promotion import Promotion, judge
from quiver.schemas.errors import QuiverError
from quiver.schemas.manifest import MAX_BYTES, from_json
from quiver.schemas.refs import parse
from quiver.stages.common.runtime.runner import find, plan_of
from quiver.stages.common.store import Store
from quiver.stages.common.verification import verify
from quiver.stages.optimize.checks import check_lineage
from quiver.stages.optimize.config import Config
from quiver.stages.optimize.inputs import Sampled
from tests import finished as made
from tests.faults.broken import Raw, error_of, mutated, sealed, snapshot, to_text

CALLS = [
    call
    for call in [*made.CALLS, *made.ALIKE]
    if not call.config.get("source", "").startswith("quiver.")  # its rows take long
]
CALLS_BY_REF = {call.ref: call for call in CALLS}
TRAIN = {"learning_rate": 1e-3, "device": "cpu", "algorithm": "rloo", "schedule": "linear"}
ADAPTED = {
    "policy": "lora/policy@1",
    "rollouts": "golden/rollouts@1",
    "rewards": "golden/rewards@1",
}
CALLS += [
    made.call("", "", "optimize", {**TRAIN, "total_steps": 9, **learning}, **ADAPTED)
    for learning in ({"lora": {"rank": 2, "alpha": 4}}, {"max_staleness": 5})
]
REFS = tuple(
    f'"{ref}"'
    for ref in (
        *("golden/policy@0", "golden/policy@1", "golden/policy@2", "golden/rollouts@1"),
        *("golden/prompts@1", "golden/rewards@1", "held/evaluations@1", "golden/updates@1"),
        *("golden/policy@77", "golden/policy@" + "9" * 5000, "golden/policy@" + "9" * 300),
        *("golden/policy@prod", "golden/policy@latest", "nowhere/policy@0", "policy@0", "a/b@1"),
        *("../x/policy@0", "golden/policy@٣", "golden/policy@-1", "GOLDEN/policy@0"),
    )
)
SAMPLED = {
    "policy": "golden/policy@2",
    "rollouts": "golden/rollouts@1",
    "rewards": "golden/rewards@1",
    "prox": "golden/logprobs@2",
}
WRITTEN_BY_READERS = (".index", ".ledger", "report.html")


@pytest.fixture(scope="module")
def stores(finished, tmp_path_factory):
    """A copy of a finished store of every stage, beside the inputs that its recipes name."""
    folder = tmp_path_factory.mktemp("fuzzed") / "stores"
    shutil.copytree(finished, folder)
    before = Path.cwd()
    os.chdir(folder / "inputs")
    yield folder / "finished"
    os.chdir(before)


def siblings(ref: str) -> list[str]:
    """Other versions of the same kind."""
    run, _, number = ref.rpartition("@")
    return [f"{run}@{other}" for other in range(3) if other != int(number)]


def readers_of(store: Path, ref: str, random: Random) -> dict[str, Callable[[], object]]:
    """Who reads the manifest of `ref`, by name: commands, plans, and what follows a line."""
    path = str(store)
    run = ref.partition("/")[0]
    kind = ref.partition("/")[2].partition("@")[0]
    other = random.choice(siblings(ref))
    first, second = random.sample((ref, other), 2)
    call = random.choice([call for call in CALLS if ref in json.dumps(call.refs)] or CALLS)
    return {
        "ls": lambda: versions.ls(random.choice((None, run)), path),
        "show": lambda: versions.show(ref, 2, path),
        "lineage": lambda: versions.lineage(
            random.choice((ref, f"{run}/policy@latest", "held/evaluations@4")), path
        ),
        "diff": lambda: versions.diff(first, second, path),
        "report": lambda: versions.report(run if run != "held" else "golden", store=path),
        "plan": lambda: plan_of(call.on(store)),
        "find": lambda: find(call.on(store)),
        "open": lambda: Store(store).open(f"{run}/{kind}@latest").files.names,
        "verify": lambda: _raise_first(verify(Store(store), ref)[1]),
        "lineage of rollouts": lambda: _check_lineage(store),
        "judge": lambda: judge(
            Promotion(), Store(store).open("held/evaluations@4").manifest.metrics
        ),
        "first of line": lambda: rerun.first_of_line(Store(store), "golden/policy@2"),
        "sampler": lambda: rerun.sampling_policy(Store(store), "golden/rollouts@1"),
    }


FREE = ("config", "metrics", "environment", "status", "seconds", "bytes", "inputs", "models")
"""Fields that hold anything, or lists of what holds anything."""


def changed(random: Random, fields: dict) -> dict:
    """Another manifest: broken anywhere, in one of the fields that hold anything, or whole with
    other references and roles in it."""
    way = random.random()
    if way < 0.2:
        return mutated(random, fields, REFS)
    if way < 0.75:
        name = random.choice(FREE)
        return fields | {name: mutated(random, fields[name], REFS)}
    sources = [*fields["inputs"], *fields["models"]]
    for entry in random.sample(sources, random.randint(0, len(sources))):
        entry["ref"] = Raw(random.choice(REFS))
        if random.random() < 0.3:
            entry["role"] = random.choice(("policy", "rollouts", "prompts", "rewards", "retry"))
    for kind in {"updates", "advantages"} & fields["metrics"].keys():
        fields["metrics"][kind] = Raw(random.choice(REFS))
    return fields


def _check_lineage(store: Path) -> None:
    config = Config(max_staleness=9, allow_biased_sampling=True)
    versions = {role: Store(store).version(parse(ref)) for role, ref in SAMPLED.items()}
    check_lineage(config, Store(store), Sampled(versions))


def _raise_first(errors: list[QuiverError]) -> None:
    for error in errors:
        raise error


def damage(random: Random, store: Path) -> tuple[str, Path, bytes]:
    """Write another manifest over one of the store's: its reference, its path, what it was."""
    path = random.choice(sorted(store.glob("*/*/v*/manifest.json")))
    before = path.read_bytes()
    fields = json.loads(before)
    del fields["checksum"]
    path.write_bytes(sealed(to_text(changed(random, fields))))
    return f"{fields['run']}/{fields['kind']}@{fields['version']}", path, before


def require_safe(capsys) -> str:
    """What was printed, in which nothing moves the cursor."""
    printed = "".join(capsys.readouterr())
    assert {character for character in printed if not character.isprintable()} <= {"\n"}
    return printed


def fuzz(stores: Path, seed: int, count: int, most_readers: int, capsys) -> None:
    """`count` manifests, each before `most_readers` of its readers."""
    random = Random(seed)
    refused = 0
    for number in range(count):
        ref, path, before = damage(random, stores)
        state = snapshot(stores, WRITTEN_BY_READERS)
        readers = readers_of(stores, ref, random)
        for name in random.sample(sorted(readers), min(most_readers, len(readers))):
            try:
                refused += error_of(readers[name]) is not None
            except BaseException as error:
                text = path.read_bytes()
                error.add_note(f"seed {seed}, manifest {number} ({ref}), {name}: {text[:2000]!r}")
                raise
        assert snapshot(stores, WRITTEN_BY_READERS) == state
        path.write_bytes(before)
        require_safe(capsys)
    assert refused > count / 4, "most of them are read without a word: the fuzzer breaks nothing"


def test_wrong_manifests_are_typed_errors_to_all_readers(stores, capsys):
    fuzz(stores, seed=1, count=30, most_readers=3, capsys=capsys)


@pytest.mark.torture
@pytest.mark.parametrize("seed", range(10, 60))
def test_50_000_wrong_manifests_are_typed_errors(stores, seed, capsys):
    fuzz(stores, seed=seed, count=1000, most_readers=4, capsys=capsys)


# -- what the fuzzer found


@pytest.fixture
def copied(stores, tmp_path) -> Path:
    """A copy of the store, to be broken."""
    shutil.copytree(stores, tmp_path / "store")
    return tmp_path / "store"


def rewrite(store: Path, ref: str, change: Callable[[dict], object]) -> None:
    """The manifest of a version after `change`, with the checksum that fits it."""
    path = store / parse(ref).folder / "manifest.json"
    fields = json.loads(path.read_bytes())
    del fields["checksum"]
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


READERS = {
    "report": lambda store: versions.report("golden", store=str(store)),
    "report held": lambda store: versions.report("held", store=str(store)),
    "first": lambda store: rerun.first_of_line(Store(store), "golden/policy@2"),
    "sampler": lambda store: rerun.sampling_policy(Store(store), "golden/rollouts@1"),
    "lineage": lambda store: versions.lineage("golden/policy@2", str(store)),
    "check_lineage": _check_lineage,
    "retry": lambda store: plan_of(CALLS_BY_REF["golden/rewards@4"].on(store)),
    "compare": lambda store: plan_of(CALLS_BY_REF["held/evaluations@4"].on(store)),
    "adapt": lambda store: plan_of(CALLS[-2].on(store)),
    "judge": lambda store: judge(
        Promotion(), Store(store).open("held/evaluations@4").manifest.metrics
    ),
    "compare two": lambda store: versions.compare(
        "held/evaluations@1", "held/evaluations@4", str(store)
    ),
    "show": lambda store: versions.show("held/evaluations@4", 1, str(store)),
    "show updates": lambda store: versions.show("golden/updates@2", 1, str(store)),
    "verify": lambda store: _raise_first(verify(Store(store), "golden/rollouts@1")[1]),
}
FOUND = [
    ("golden/policy@1", let_lead("golden/policy@1"), "report", "E-LINEAGE"),
    ("golden/policy@1", let_lead("golden/policy@2"), "first", "E-LINEAGE"),
    ("golden/policy@1", let_lead("golden/policy@2"), "check_lineage", "E-LINEAGE"),
    ("golden/rewards@6", drop("inputs", "rollouts"), "report", None),  # it is left out
    ("golden/rollouts@1", drop("models", "policy"), "sampler", "E-LINEAGE"),
    ("held/evaluations@1", drop("inputs", "rewards"), "compare", "E-LINEAGE"),
    ("golden/prompts@2", lambda fields: fields.update(bytes={}), "report", None),
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
def test_what_was_found_is_told(copied, capsys, ref, change, reader, code):
    rewrite(copied, ref, change)
    before = snapshot(copied, WRITTEN_BY_READERS)
    error = error_of(lambda: READERS[reader](copied))
    assert (error and error.code) == code
    assert snapshot(copied, WRITTEN_BY_READERS) == before


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
        lambda path: versions.ls(None, path),
        lambda path: versions.lineage("golden/rewards@1", path),
        lambda path: versions.diff("golden/rewards@1", "golden/rewards@2", path),
        lambda path: versions.show("golden/rewards@1", 1, path),
    ],
    ids=["ls", "lineage", "diff", "show"],
)
def test_no_word_of_a_manifest_moves_the_cursor(copied, capsys, command):
    rewrite(copied, "golden/rewards@1", spoil)
    command(str(copied))
    shown = require_safe(capsys)
    assert r"\r\x1b[2J\x9b31m\u202e" in shown
    assert "\nforged" not in shown, "nor does it begin a line of its own"


WRITTEN_BY_THOSE = {".index", ".leases", ".ledger", ".quarantine", ".reserve", ".trash", "v000001"}


@pytest.mark.parametrize("command", ["rm", "verify"])
def test_a_version_with_a_wrong_manifest_can_be_put_aside_or_deleted(copied, capsys, command):
    rewrite(copied, "own/updates@1", lambda fields: fields.update(metrics=[]))
    folder = copied / "own/updates/v000001"
    before = snapshot(copied, WRITTEN_BY_THOSE)
    if command == "rm":
        versions.rm("own/updates@1", "broken", str(copied))
    else:
        versions.verify(None, "own/updates@1", True, str(copied))
    assert not folder.exists()
    assert snapshot(copied, WRITTEN_BY_THOSE) == before


@pytest.mark.parametrize("unit", [b"[],", b"{},", b'"ab",', b"999,", "\U0001f600".encode()])
def test_the_largest_manifest_takes_little_memory(unit):
    """Whatever it is full of."""
    inside = unit * ((MAX_BYTES - 100) // len(unit))
    text = b'{"x":["' + inside + b'"]}' if unit[-1:] != b"," else b'{"x":[' + inside + b"0]}"
    assert error_of(lambda: from_json(text, "a/rollouts@1")).code == "E-CORRUPT"
