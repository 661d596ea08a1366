"""Fuzzers: each breaks files of one sort and names who reads them, one case after another.

They work in a copy of a folder in which every stage has made something: `finished` is its store,
`inputs`, the working directory, has the model, rows and code that recipes name.
"""

from __future__ import annotations

import copy
import json
import shutil
import tomllib
from collections.abc import Callable, Generator, Iterator
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import torch

from quiver.flows import rerun, verification
from quiver.flows.calls import NotFinished, calls_of, perform
from quiver.flows.cli import versions as commands
from quiver.flows.promotion import Promotion, judge
from quiver.flows.recipe import Recipe
from quiver.schemas.errors import QuiverError
from quiver.schemas.manifest import FileEntry, content_hash
from quiver.schemas.refs import parse
from quiver.stages.core.files import sha256_of
from quiver.stages.core.run.call import Call
from quiver.stages.core.run.runner import find_outcome, plan_of, run_stage
from quiver.stages.core.store import Store, arrow_check, leases
from quiver.stages.core.store.arrow_check import ArrowCheck
from quiver.stages.core.store.leases import Owner
from quiver.stages.core.store.retention import remove
from quiver.stages.model.loading import load_model
from quiver.stages.optimize.checks import check_lineage
from quiver.stages.optimize.config import Config
from quiver.stages.optimize.inputs import RolloutSet
from tests import finished
from tests.faults.broken import (
    DEPTHS,
    VALUES,
    Case,
    Raw,
    garbled,
    members,
    mutated,
    sealed,
    snapshot,
    to_bytes,
    to_text,
)
from tests.stages.core.store.test_store import Settings, commit, table, work_on

Cases = Generator[Case]
WRITTEN_BY_READERS = (".index", "report.html")


def fields_of(manifest: Path) -> dict[str, Any]:
    """All but its checksum."""
    fields = json.loads(manifest.read_bytes())
    del fields["checksum"]
    return fields


def verify(store: Path, ref: str | None = None) -> None:
    """Raise the first error, if there is one."""
    for error in verification.verify(Store(store), ref)[1]:
        raise error


# -- manifests with right checksums and wrong contents

CALLS = [
    call
    for call in [*finished.CALLS, *finished.ALIKE]
    if not call.config.get("source", "").startswith("quiver.")  # its rows take long
]
CALLS_BY_REF = {call.ref: call for call in CALLS}
TRAIN = {"learning_rate": 1e-3, "device": "cpu", "algorithm": "rloo", "schedule": "linear"}
SCORED = {"rollouts": "golden/rollouts@1", "rewards": "golden/rewards@1"}
CALLS += [
    finished.call(
        "",
        "",
        "optimize",
        {**TRAIN, "total_steps": 9, **learning},
        policy="lora/policy@1",
        **SCORED,
    )
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
SAMPLED = {"policy": "golden/policy@2", "prox": "golden/logprobs@2", **SCORED}


def follow_lineage(store: Path) -> None:
    config = Config(max_staleness=9, allow_biased_sampling=True)
    versions = {role: Store(store).version(parse(ref)) for role, ref in SAMPLED.items()}
    check_lineage(config, Store(store), RolloutSet(versions))


READERS: dict[str, Callable[[Path], object]] = {
    "report": lambda store: commands.report("golden", store=str(store)),
    "report held": lambda store: commands.report("held", store=str(store)),
    "first": lambda store: rerun.first_of_line(Store(store), "golden/policy@2"),
    "sampler": lambda store: (
        Store(store).open("golden/rollouts@1").manifest.require_model("policy")
    ),
    "check_lineage": follow_lineage,
    "retry": lambda store: plan_of(CALLS_BY_REF["golden/rewards@4"].on(store)),
    "compare": lambda store: plan_of(CALLS_BY_REF["held/evaluations@4"].on(store)),
    "adapt": lambda store: plan_of(CALLS[-2].on(store)),
    "judge": lambda store: judge(
        Promotion(), Store(store).open("held/evaluations@4").manifest.metrics
    ),
    "compare two": lambda store: commands.compare(
        "held/evaluations@1", "held/evaluations@4", store=str(store)
    ),
    "ls": lambda store: commands.ls(None, str(store)),
    "show": lambda store: commands.show("held/evaluations@4", 1, str(store)),
    "show updates": lambda store: commands.show("golden/updates@2", 1, str(store)),
    "verify": lambda store: verify(store, "golden/rollouts@1"),
}
"""Of the versions of `finished`, by name."""


def readers_of(store: Path, ref: str, random: Random) -> dict[str, Callable[[], object]]:
    """Four of those who read the manifest of `ref`: commands, plans, and what follows a line."""
    path = str(store)
    run, _, name = ref.partition("/")
    kind, _, number = name.partition("@")
    other = random.choice([f"{run}/{kind}@{n}" for n in range(3) if n != int(number)])
    first, second = random.sample((ref, other), 2)
    call = random.choice([call for call in CALLS if ref in json.dumps(call.refs)] or CALLS)
    start = random.choice((ref, f"{run}/policy@latest", "held/evaluations@4"))
    readers = {
        "ls": partial(commands.ls, random.choice((None, run)), path),
        "show": lambda: commands.show(ref, 2, path),
        "lineage": lambda: commands.lineage(start, store=path),
        "diff": lambda: commands.diff(first, second, path),
        "report": lambda: commands.report(run if run != "held" else "golden", store=path),
        "plan": lambda: plan_of(call.on(store)),
        "find": lambda: find_outcome(call.on(store)),
        "open": lambda: Store(store).open(f"{run}/{kind}@latest").files.names,
        "verify": lambda: verify(store, ref),
    } | {
        name: partial(READERS[name], store)
        for name in ("check_lineage", "judge", "first", "sampler")
    }
    return {name: readers[name] for name in random.sample(sorted(readers), 4)}


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


def manifests(place: Path, random: Random) -> Cases:
    store = place / "finished"
    while True:
        path = random.choice(sorted(store.glob("*/*/v*/manifest.json")))
        before = path.read_bytes()
        fields = fields_of(path)
        ref = f"{fields['run']}/{fields['kind']}@{fields['version']}"
        path.write_bytes(sealed(to_text(changed(random, fields))))
        yield Case(
            readers_of(store, ref, random),
            state=lambda: snapshot(store, WRITTEN_BY_READERS),
            text=lambda path=path: (path, path.read_bytes()),
        )
        path.write_bytes(before)


# -- Arrow files with right hashes and wrong contents

NUMBERS = (0, 1, 7, 127, 128, 255, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**64 - 1)


def wounded(random: Random, raw: bytes) -> bytes:
    """`raw` with one to three of its numbers or bits changed, or a part of it gone or doubled."""
    for _ in range(random.choice((1, 1, 2, 3))):
        # half of them in the description at the end, which says where all else lies
        first = random.choice((0, max(0, len(raw) - 2000)))
        place = random.randrange(first, len(raw))
        width = random.choice((1, 2, 4, 8))
        aligned = place - place % width
        number = (random.choice(NUMBERS) % 256**width).to_bytes(width, "little")
        end = min(len(raw), place + 8 * random.randint(1, 64))
        raw = random.choice(
            (
                raw[:place] + bytes([raw[place] ^ 1 << random.randrange(8)]) + raw[place + 1 :],
                raw[:aligned] + number + raw[aligned + width :],
                raw[:place] + random.randbytes(width) + raw[place + width :],
                raw[:place] + raw[end:],
                raw[:place] + raw[place:end] * 2 + raw[end:],
                raw[:place] + bytes(end - place) + raw[end:],
            )
        )
    return raw


def reseal(path: Path) -> str:
    """Let the manifest of a version have the hash of its file at `path`: the reference."""
    manifest = path.with_name("manifest.json")
    fields = fields_of(manifest)
    for entry in fields["files"]:
        if entry["name"] == path.name:
            entry.update(sha256=sha256_of(path), bytes=path.stat().st_size)
    entries = tuple(FileEntry(**entry) for entry in fields["files"])
    fields["content_hash"] = content_hash(fields["schema"], entries)
    manifest.write_bytes(sealed(json.dumps(fields)))
    return f"{fields['run']}/{fields['kind']}@{fields['version']}"


def require_unparsed(errors: dict[str, QuiverError | None]) -> None:
    """What `verify` cannot parse is no table."""
    error = errors["verify"]
    assert error is None or error.code == "E-CORRUPT", error
    if "cannot be parsed" in str(error):
        assert errors["table"].code == "E-CORRUPT"


def tables(place: Path, random: Random) -> Cases:
    """In a store of somebody else, so that a child parses each file before anybody reads it."""
    store = place / "finished"
    owner = (store / "store.json").stat().st_uid + 1
    with (
        ArrowCheck() as child,  # one for all of them
        patch.object(verification, "ArrowCheck", lambda: nullcontext(child)),
        patch.object(arrow_check, "ArrowCheck", lambda: nullcontext(child)),
        patch("os.geteuid", lambda: owner),
    ):
        while True:
            path = random.choice(sorted(store.glob("*/*/v*/*.arrow")))
            before = {file: file.read_bytes() for file in (path, path.with_name("manifest.json"))}
            path.write_bytes(wounded(random, before[path]))
            ref = reseal(path)
            readers = {
                "verify": partial(verify, store, ref),
                "table": lambda ref=ref: Store(store).open(ref).table().to_pylist(),
                "show": partial(commands.show, ref, 3, str(store)),
                "report": partial(commands.report, parse(ref).run, store=str(store)),
            }
            yield Case(
                readers,
                state=lambda: snapshot(store, WRITTEN_BY_READERS),
                text=lambda path=path: path,
                require=require_unparsed,
            )
            for file, raw in before.items():
                file.write_bytes(raw)


# -- recipes: wrong types at every key, nesting and numbers without end, no text, no TOML

RECIPE = """
run = "golden"
store = "../finished"
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
TOML_VALUES = (
    *r"""
    true 0 -1 7 1.5 -0.0 1e308 1e400 nan -inf 0x7fffffffffffffff
    "" "x" "\u0000" "a\u0000b" "\u001b[31m" "../../x" "/dev/zero" "/proc/self" "*" "a:b" "ä/ö"
    "datasets:nowhere" "/" "." "~" "~/nowhere" "env:NOWHERE" "http://[" "module:function"
    "x.jsonl" "json.py:x" "os:getcwd" "package:x/y.gguf" "package:/x" "package:..x/y" ".py:f"
    ":" "a..b:c" ".a:b" "questions.jsonl" "http://x" "{night}" "latest"
    [] {} [[]] [{}] [1,"a"] ["a","a"] {a=1} {a={}} {a.b.c=1} {""=1} {"a\u0020b"=1} [1,2,3,4]
    1979-05-27 07:32:00 1979-05-27T07:32:00Z
    """.split(),  # noqa: SIM905
    *map(str, (2**31, 2**63 - 1, 2**63, 2**64)),
    *("9" * 400, "9" * 4000, "9" * 5000, f"[{', '.join(['0'] * 50_000)}]"),
    *(f'"{"x" * 300}"', f'"{"y" * 300}.py:f"', f'"{"é" * 70_000}"'),
    *("[" * depth + "]" * depth for depth in DEPTHS),
    *("{ a = " * depth + "1" + " }" * depth for depth in DEPTHS),
)
"""TOML, and what is nearly TOML, of every wrong kind."""
SECTIONS = tomllib.loads(RECIPE)
NAMED = {"optimize": SCORED}
STAGES = ("run", "prompt", "generate", "reward", "logprobs", "optimize", "evaluate")


def recipe_text(random: Random) -> bytes:
    """A recipe that is broken somewhere."""
    if random.random() < 0.1:
        return garbled(random, RECIPE.encode())
    if random.random() < 0.5:
        sections = retyped(random)
    else:
        sections = mutated(random, SECTIONS, values=TOML_VALUES)
    if not isinstance(sections, dict):
        return to_bytes(sections, " = ")
    lines = [f"{json.dumps(key)} = {to_text(child, ' = ')}\n" for key, child in members(sections)]
    return to_bytes(Raw("".join(lines)))


def retyped(random: Random) -> dict[str, Any]:
    """The recipe with another value of the same type at one to three keys."""
    sections = copy.deepcopy(SECTIONS)
    for _ in range(random.choice((1, 1, 2, 3))):
        parent, key = random.choice(list(leaves(sections)))
        is_text = isinstance(parent[key], str)
        choices = [
            text for text in TOML_VALUES if (text[0] == '"') == is_text and text[0] not in "[{"
        ]
        parent[key] = Raw(random.choice(choices))
    return sections


def leaves(node: Any) -> Iterator[tuple[Any, Any]]:
    """The places of all that is no section and no list."""
    for key in list(node) if isinstance(node, dict) else range(len(node)):
        if isinstance(node[key], dict | list):
            yield from leaves(node[key])
        else:
            yield node, key


def use_recipe(path: Path, stage: str) -> None:
    """All that a command does with a recipe before it starts a stage."""
    recipe = Recipe.load(path)
    json.loads(recipe.model_dump_json())  # as a deployment keeps it
    with suppress(NotFinished), calls_of(recipe, None):
        if stage == "run":
            perform("policy", recipe.resolved().policy, {})
        else:
            rerun.rerun(recipe, stage, NAMED.get(stage, {}))


def recipes(place: Path, random: Random) -> Cases:
    path = place / "inputs/recipe.toml"
    while True:
        path.write_bytes(recipe_text(random))
        stage = random.choice(STAGES)
        yield Case(
            {stage: partial(use_recipe, path, stage)},
            state=lambda: snapshot(place / "finished", WRITTEN_BY_READERS),
            text=path.read_bytes,
        )


# -- model folders: broken JSON, weights that are cut, empty or not numbers

NAMES = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")
MODEL_VALUES = (
    *"""
    null true -1 [] [2,3] [null] ["2"] 2.0 "2" 1000000000 98
    {"auto_map":{"AutoModel":"evil.Model"}} [{"auto_map":{}}] "evil.Model" "llama" "t5" "gpt2"
    "LlamaForCausalLM" "PreTrainedTokenizerFast" "LlamaTokenizer" "BPE" "WordLevel" "float64"
    "int8" "gelu" "dynamic" {"rope_type":"yarn"} "<|im_end|>" {"quant_method":"gptq"}
    {"quant_method":"bitsandbytes","load_in_8bit":true} "eager"
    """.split(),  # noqa: SIM905
)


def break_model(random: Random, folder: Path) -> None:
    """Break one or two files of a model folder, or add one."""
    for name in random.sample(NAMES, random.choice((1, 1, 2))):
        path = folder / name
        raw = path.read_bytes()
        is_garbled = random.random() < 0.1
        path.write_bytes(
            garbled(random, raw)
            if is_garbled
            else to_bytes(mutated(random, json.loads(raw), MODEL_VALUES))
        )
    if random.random() < 0.1:
        break_weights(random, folder / "model.safetensors")
    if random.random() < 0.1:
        weights = {"metadata": {}, "weight_map": {"model.norm.weight": "model.safetensors"}}
        (folder / "model.safetensors.index.json").write_bytes(to_bytes(mutated(random, weights)))


def break_weights(random: Random, path: Path) -> None:
    """Break the header of a weight file, or its numbers."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    if random.random() < 0.4:
        path.write_bytes(garbled(random, raw))
        return
    header = to_bytes(mutated(random, json.loads(raw[8 : 8 + length])))
    claimed = random.choice((len(header), len(header), 0, 2**40, 2**63))
    path.write_bytes(claimed.to_bytes(8, "little") + header + raw[8 + length :])


def models(place: Path, random: Random) -> Cases:
    """The import refuses them by name, or the first stage that needs what was imported."""
    model = place / "broken"
    generate = {"engine": "scripted", "samples_per_prompt": 2, "sampling": {"max_tokens": 4}}
    while True:
        shutil.copytree(place / "inputs/model", model)
        break_model(random, model)
        store = Store(place / "imported")

        def make(stage: str, config: dict, store=store, **refs: str) -> None:
            run_stage(stage, config, store, in_process=True, into="a", **refs)

        def train(store=store) -> None:
            load_model(store.open("a/policy@0"), dtype=torch.float32)

        def require(errors: dict[str, QuiverError | None], store=store) -> None:
            assert not errors["policy"] or list(store.refs()) == []

        refs = {"policy": "a/policy@0", "rollouts": "a/rollouts@1"}
        policy, prompts = {"policy": "a/policy@0"}, {"prompts": "a/prompts@1"}
        rows = {"source": "ids.jsonl", "limit": 2}
        yield Case(
            {
                "policy": partial(make, "policy", {"model": str(model)}),
                "prompt": partial(make, "prompt", rows, **policy),
                "generate": partial(make, "generate", generate, **policy, **prompts),
                "load": train,
                "logprobs": partial(plan_of, Call("logprobs", {"role": "ref"}, store.url, refs)),
            },
            state=lambda: snapshot(model),
            text=lambda: {name: (model / name).read_bytes()[:1500] for name in NAMES},
            require=require,
            in_order=True,
        )
        shutil.rmtree(model)
        shutil.rmtree(store.url)


# -- the small files of a store: tags, marks, the index, leases, notes, store.json

SMALL_REFS = ('"a/logprobs@1"', '"a/logprobs@prod"', '"a/policy@0"', '"a/logprobs@77"', '"b/x@1"')
STAGED = Settings(seed=7)


def make_small_files(path: Path) -> None:
    """A store with versions, a removed one, a tag, and half a version that processes share, of
    which one still holds the work."""
    store = Store(path)
    first, second, third = (commit(store, Settings(seed=seed), shards=1) for seed in range(3))
    remove(store, third.ref, "no longer needed")
    store.tag("a", "prod", first.ref, why="first", about={"iteration": 1})
    store.tag("a", "prod", second.ref, why="better", key="night n1", about={"iteration": 2})
    store.find("a", "logprobs", "0" * 64)
    with suppress(KeyboardInterrupt), work_on(store, STAGED, share=True) as work:
        for index in work.take_shards(3):
            if index == 2:
                raise KeyboardInterrupt
            work.write(index, table(2 * index))
    (folder,) = (Path(store.url) / "a/logprobs/.work").glob("*.leases")
    owner = {**vars(Owner.this_process()), "start_time": 1}  # of a process that is no more
    held = {"owner": owner, "token": "t", "renewed_at": 0.0, "released": False}
    (folder / "work").mkdir()
    (folder / "work/000001").write_text(json.dumps(held))


def break_small(random: Random, path: Path) -> None:
    """Another content for a file; its checksum fits, if it carries one."""
    raw = path.read_bytes()
    if random.random() < 0.2 or path.name == ".index":
        texts = (random.choice(SMALL_REFS), random.choice(VALUES))
        broken = random.choice((garbled(random, raw), *map(str.encode, texts)))
    else:
        fields = json.loads(raw)
        fields.pop("checksum", None)
        if random.random() < 0.1:
            fields = Raw(random.choice(VALUES))
        text = to_text(mutated(random, fields, SMALL_REFS))
        is_sealed = b'"checksum"' in raw
        broken = sealed(text) if is_sealed else to_bytes(Raw(text))
    path.write_bytes(broken)


def finish_together(store: Path) -> None:
    with work_on(Store(store), STAGED, share=True, patience=0.0) as work:
        if work.done is None:
            work.rows_per_shard(2)
            for index in work.take_shards(3):
                work.write(index, table(2 * index))
            work.commit()


def small_files(place: Path, random: Random) -> Cases:
    """Each store twice: three who read it change nothing, two who write beside what is broken leave
    every version but the one that is deleted."""
    store, whole = place / "small", place / "whole"
    path = str(store)
    make_small_files(whole)
    readers = {
        "ls": lambda: commands.ls(None, path),
        "show": lambda: commands.show("a/logprobs@prod", 2, path),
        "show old": lambda: commands.show("a/logprobs@old", 2, path),
        "deleted": lambda: commands.show("a/logprobs@3", 2, path),
        "lineage": lambda: commands.lineage("a/logprobs@3", store=path),
        "history": lambda: commands.history("a/logprobs@prod", path),
        "history old": lambda: commands.history("a/logprobs@old", path),
        "verify": lambda: verify(store),
        "find": lambda: Store(store).find("a", "logprobs", "0" * 64),
    }
    writers = {
        "tag": lambda: commands.tag("prod", "a/logprobs@1", "back", path),
        "tag old": lambda: commands.tag("old", "a/logprobs@2", "on", path),
        "decide": lambda: Store(store).tag("a", "prod", "a/logprobs@1", key="night n2"),
        "rm": lambda: commands.rm("a/logprobs@1", "", path),
        "commit": lambda: commit(Store(store), Settings(seed=5), shards=1),
        "again": lambda: commit(Store(store), Settings(seed=2), shards=1),
        "finish": lambda: commit(Store(store), STAGED, shards=3),
        "finish together": lambda: finish_together(store),
    }
    # leases of processes that cannot be seen are waited for less long
    with patch.object(leases, "SECONDS_TO_LIVE", 0.1):
        while True:
            shutil.copytree(whole, store)
            small = sorted(
                file
                for file in store.rglob("*")
                if file.is_file() and file.suffix != ".arrow" and not file.parent.match("v0*")
            )
            broken = random.sample(small, random.choice((1, 1, 2)))
            for file in broken:
                break_small(random, file)
            texts = {str(file): file.read_bytes()[:500] for file in broken}
            versions = [name for name in snapshot(store) if "/v0" in name and "v000001" not in name]
            for users, count, state in (
                (readers, 3, lambda: snapshot(store, WRITTEN_BY_READERS)),
                (writers, 2, lambda kept=versions: [snapshot(store).get(name) for name in kept]),
            ):
                names = random.sample(sorted(users), count)
                yield Case(
                    {name: users[name] for name in names}, state, text=lambda texts=texts: texts
                )
            shutil.rmtree(store)
