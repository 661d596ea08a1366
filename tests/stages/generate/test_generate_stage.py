"""The generate stage under the scripted engine: rows, ids, seeds, shards, restarts, refusals."""

import hashlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from quiver.schemas.errors import ConfigError, CorruptError, NumericError, SchemaError
from quiver.stages.common.config import parse
from quiver.stages.common.models import checkpoints
from quiver.stages.common.models.checkpoints import PolicyConfig
from quiver.stages.common.runtime.runner import run_stage
from quiver.stages.common.store import Store
from quiver.stages.common.verification import verify
from quiver.stages.generate import shards, stage
from quiver.stages.generate.prompts import select_prompts
from quiver.stages.generate.rows import Rows, row_seed
from quiver.stages.generate.stage import Config
from tests.stages.generate import making
from tests.stages.generate.making import good, make_prompts, random_prompts
from tests.tiny import EOS, make_folder, make_policy
from tests.writing import begin

MAKING = "tests.stages.generate.making"
run = partial(run_stage, "generate", in_process=True)
SCRIPTED = {"engine": "scripted", "samples_per_prompt": 3, "sampling": {"max_tokens": 8}}


def config(**changed) -> Config:
    return parse(Config, {**SCRIPTED, **changed}, "generate")


def rows_of(store, ref) -> list[dict]:
    return store.open(ref).table().to_pylist()


def test_each_prompt_gets_its_group_in_order(store, policy):
    prompts = make_prompts(store, [[5, 6, 7], [9] * 8])
    named = config(options={"script": "echo"}, seed=3, iteration=5)
    ref = run(named, store, prompts=prompts.ref, policy=policy.ref)
    version = store.open(ref)
    rows = version.table().to_pylist()
    prefix = version.manifest.run_key[:8]
    assert [row["rollout_id"] for row in rows] == [
        f"{prefix}-g{g}-{s}" for g in (0, 1) for s in (0, 1, 2)
    ]
    assert [row["prompt_ids"] for row in rows] == [[5, 6, 7]] * 3 + [[9] * 8] * 3
    assert rows[0]["completion_ids"] == [5, 6, 7, EOS]
    assert (rows[0]["finish_reason"], rows[0]["stop_reason"]) == ("stop", str(EOS))
    assert rows[3]["completion_ids"] == [9] * 8
    assert (rows[3]["finish_reason"], rows[3]["stop_reason"]) == ("length", None)
    assert rows[0]["old_logprobs"] == pytest.approx([math.log(0.5)] * 4)
    assert {row["temperature"] for row in rows} == {1.0}
    assert len({row["seed"] for row in rows}) == 6
    assert rows[4]["seed"] == row_seed(3, 5, "g1", 1)


def test_text_is_decoded_without_control_tokens(store, policy):
    from tests.tiny import tokenizer

    ids = tokenizer().encode("seven plus 5", add_special_tokens=False)
    options = {"script": "fixed", "completion_ids": ids}
    ref = run(
        config(options=options, sampling={"max_tokens": 30}),
        store,
        prompts=make_prompts(store, [[5]]).ref,
        policy=policy.ref,
    )
    row = rows_of(store, ref)[0]
    assert row["completion_ids"] == [*ids, EOS]
    assert row["completion_text"] == "seven plus 5"


@pytest.mark.parametrize(
    ("sampling", "is_told"),
    [
        ({}, True),
        ({"stop_token_ids": [1]}, False),
        ({"stop": ["<|im_start|>"]}, False),
        ({"stop": ["im_start"]}, False),
        ({"ignore_eos": True}, False),
    ],
)
def test_a_template_whose_end_ends_no_completion_is_told(store, policy, caplog, sampling, is_told):
    end = {"id": 1, "text": "<|im_start|>"}
    prompts = make_prompts(store, [[5]], assistant_end=end)
    ref = run(
        config(sampling={"max_tokens": 8, **sampling}),
        store,
        prompts=prompts.ref,
        policy=policy.ref,
    )
    told = (
        f"{prompts.ref}: its chat template ends an assistant's turn with '<|im_start|>', at which "
        "no completion ends: one that writes it goes on, mostly to max_tokens; set "
        "generate.sampling.stop_token_ids = [1], or add that id to eos_token_id in the model's "
        "generation_config.json"
    )
    assert (told in caplog.messages) is is_told
    assert store.open(ref).manifest.metrics.get("unknown_end") == (end if is_told else None)


def test_manifest_tells_how_they_were_made(store, policy):
    ref = run(
        config(options={"script": "echo"}),
        store,
        prompts=make_prompts(store, [[5], [6] * 9]).ref,
        policy=policy.ref,
    )
    manifest = store.open(ref).manifest
    assert manifest.input("prompts").ref == "tiny/prompts@1"
    assert manifest.model("policy").weights and manifest.model("policy").ref == "tiny/policy@0"
    assert [entry.role for entry in manifest.inputs] == ["prompts"]
    assert manifest.config["sampling"]["top_p"] == 1.0
    assert manifest.metrics["tokens"] == 3 * 2 + 3 * 8
    assert manifest.metrics["mean_completion_tokens"] == 5.0
    engine = {"name": "scripted", "script": "echo", "logprobs_mode": "scripted"}
    assert manifest.metrics["engine"] == engine
    assert manifest.metrics["dropped"] == []
    assert manifest.status == {"length": 3, "stop": 3}
    assert {"load", "generate", "write", "total"} <= set(manifest.seconds)


def test_no_speed_is_told_while_most_rows_are_under_way(store, policy, caplog, monkeypatch):
    """Of finished rows alone, a first speed would be many times too low."""
    caplog.set_level("INFO")
    monkeypatch.setattr(shards, "_SECONDS_BETWEEN_LINES", -1.0)
    prompts = make_prompts(store, [[5], [6], [7], [8]])
    run(config(options={"script": "echo"}), store, prompts=prompts.ref, policy=policy.ref)
    lines = [line for line in caplog.messages if line.startswith("generate: ")]
    for line in lines:
        rows = int(line.split()[1])
        speed = r", \d+ tokens/s" if rows >= 6 else ""
        assert re.fullmatch(rf"generate: {rows} of 12 rows{speed}", line)
    assert len(lines) > 3


def test_seeds_are_a_hash_of_what_names_the_row():
    """63 bits of sha256 over the four names, so that rollouts made by another release are still
    found."""
    named = hashlib.sha256(b'[0,3,"sum-0017",2]').hexdigest()
    assert row_seed(0, 3, "sum-0017", 2) == int(named[:16], 16) // 2
    values = {
        row_seed(s, i, g, k) for s in (0, 1) for i in (0, 1) for g in ("a", "b") for k in (0, 1)
    }
    assert len(values) == 16 and all(0 <= value < 2**63 for value in values)


def test_policies_with_other_end_tokens_are_other_work(store, tmp_path):
    """generation_config.json names them, which no hash of a model covers."""
    policies = []
    for name, ids in (("plain", EOS), ("more", [EOS, 1]), ("again", [1, EOS])):
        folder = make_folder(tmp_path / name)
        path = folder / "generation_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": ids}))
        ref = run_stage("policy", {"model": str(folder)}, store, into=name, in_process=True)
        policies.append(store.open(ref))
    assert len({checkpoints.as_model("policy", policy).weights for policy in policies}) == 1
    prompts = make_prompts(store, [[5, 7, 9]])
    echo = config(options={"script": "echo"})
    refs = [str(run(echo, store, prompts=prompts.ref, policy=policy.ref)) for policy in policies]
    assert refs == ["tiny/rollouts@1", "tiny/rollouts@2", "tiny/rollouts@2"]
    assert [rows_of(store, ref)[0]["completion_ids"][-1] for ref in refs[:2]] == [EOS, 1]
    ignoring = config(options={"script": "echo"}, sampling={"max_tokens": 3, "ignore_eos": True})
    refs = {
        str(run(ignoring, store, prompts=prompts.ref, policy=policy.ref)) for policy in policies
    }
    assert refs == {"tiny/rollouts@3"}


def test_same_work_is_already_done_and_other_work_is_not(store, policy):
    prompts = random_prompts(store, 4)
    first = run(config(), store, prompts=prompts.ref, policy=policy.ref)
    assert run(config(rows_per_shard=2), store, prompts=prompts.ref, policy=policy.ref) == first
    other = run(config(iteration=1), store, prompts=prompts.ref, policy=policy.ref)
    assert other != first
    assert [r["completion_ids"] for r in rows_of(store, other)] != [
        r["completion_ids"] for r in rows_of(store, first)
    ]
    forced = run(config(), store, prompts=prompts.ref, policy=policy.ref, force=True)
    assert forced != first and rows_of(store, forced) == rows_of(store, first)


def test_other_weights_are_other_work(store, policy):
    prompts = random_prompts(store, 2)
    other = make_policy(store, "other", seed=1)
    first = run(config(), store, prompts=prompts.ref, policy=policy.ref)
    assert run(config(), store, prompts=prompts.ref, policy=other.ref) != first


def test_the_optimizers_state_of_the_policy_is_no_part_of_the_work(store, policy):
    """Another version with the same weights, tokenizer and template gives the same rollouts; its
    optimizer's state is not read."""
    config_ = PolicyConfig(model=str(policy.files.folder))
    about = {"stage": "test", "stage_version": 1, "config": config_, "inputs": {}}
    with begin(store, "tiny", "policy", **about) as work:
        for entry in policy.manifest.files:
            shutil.copyfile(policy.files.folder / entry.name, work.folder / entry.name)
        (work.folder / "optimizer").mkdir()
        (work.folder / "optimizer" / "state.json").write_text("{}")
        trained = work.commit()
    (trained.files.folder / "optimizer" / "state.json").write_text("[]")
    prompts = random_prompts(store, 2)
    first = run(config(), store, prompts=prompts.ref, policy=trained.ref)
    assert run(config(), store, prompts=prompts.ref, policy=policy.ref) == first


def test_rows_of_prompts_in_many_chunks(store, policy):
    """Offsets are those of the joined column, wherever its chunks were cut."""
    table = random_prompts(store, 9).table(["group_id", "prompt_ids"])
    cut = pa.concat_tables([table.slice(start, 2) for start in range(0, 9, 2)])
    whole, parts = (Rows(each, Config(samples_per_prompt=3), "x") for each in (table, cut))
    completions = [good(index) for index in range(4, 20)]
    assert parts.table(4, completions, ["t"] * 16) == whole.table(4, completions, ["t"] * 16)
    asked = [[request.prompt_ids.tolist(), request.seed] for request in parts.requests([3, 26])]
    assert asked == [
        [request.prompt_ids.tolist(), request.seed] for request in whole.requests([3, 26])
    ]
    assert asked[0][0] == table["prompt_ids"][1].as_py()


@pytest.mark.parametrize("size", [1, 5, 7, 1000])
def test_shards_change_nothing(store, policy, size):
    prompts = random_prompts(store, 7)
    whole = run(config(), store, prompts=prompts.ref, policy=policy.ref)
    other = run(
        config(rows_per_shard=size), store, prompts=prompts.ref, policy=policy.ref, force=True
    )
    assert rows_of(store, other) == rows_of(store, whole)
    assert len(store.open(other).manifest.files) == -(-21 // size)


def test_rows_keep_their_places_whatever_order_the_engine_answers_in(store, policy):
    prompts = random_prompts(store, 5)
    given = {"prompts": prompts.ref, "policy": policy.ref}
    forward = rows_of(
        store, run(config(engine=f"{MAKING}:Honest", rows_per_shard=4), store, **given)
    )
    back = rows_of(
        store, run(config(engine=f"{MAKING}:Backwards", rows_per_shard=4), store, **given)
    )
    for row in forward + back:
        del row["rollout_id"]
    assert back == forward


@pytest.mark.parametrize(("size", "most"), [(4, 6), (2, 4)])
def test_an_engine_has_enough_to_do_at_the_end_of_a_shard(store, policy, size, most):
    """At least three rows are in flight as long as there are so many; of a shard's end without
    `ahead`, one would be."""
    making.Steps.flying.clear()
    given = config(engine=f"{MAKING}:Steps", rows_per_shard=size, options={})
    ref = run(given, store, prompts=random_prompts(store, 8).ref, policy=policy.ref)
    assert [
        count >= min(3, left)
        for left, count in zip(range(24, 0, -1), making.Steps.flying, strict=True)
    ] == [True] * 24
    assert max(making.Steps.flying) == most, "and never two shards before they are needed"
    assert len(store.open(ref).manifest.files) == 24 // size


def test_a_script_of_ones_own(store, policy):
    ref = run(
        config(options={"script": f"{MAKING}:answer"}),
        store,
        prompts=make_prompts(store, [[44, 45]]).ref,
        policy=policy.ref,
    )
    assert rows_of(store, ref)[0]["completion_ids"] == [44, 7, EOS]


def test_a_changed_file_of_ones_own_engine_is_other_work(store, policy, tmp_path):
    path, prompts = tmp_path / "mine.py", make_prompts(store, [[5, 6]])
    refs = []
    for last in (11, 12):
        path.write_text(f"def answer(prompt_ids, seed):\n    return [{last}]\n")
        refs.append(
            run(
                config(options={"script": f"{path}:answer"}),
                store,
                prompts=prompts.ref,
                policy=policy.ref,
            )
        )
    assert [rows_of(store, ref)[0]["completion_ids"][0] for ref in refs] == [11, 12]


# -- an engine that answers wrongly


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("Less", SchemaError, "1 of 6 rows were never answered, the first is row 2"),
        ("More", SchemaError, "row 999 was never asked for"),
        ("Twice", SchemaError, "row 1 was answered twice"),
        ("ShortLogprobs", SchemaError, "2 ids but 1 logprobs"),
        ("NanLogprob", NumericError, "logprob nan"),
        ("PositiveLogprob", NumericError, "logprob 0.5"),
        ("OutsideVocabulary", SchemaError, "id 320 is outside the vocabulary of 320"),
        ("Negative", SchemaError, "id -1 is outside the vocabulary of 320"),
        ("Square", SchemaError, r"completion_ids is int32 \[1, 2\], expected a flat array"),
        ("Lists", SchemaError, "completion_ids is list"),
        ("TooLong", SchemaError, "9 ids, max_tokens is 8"),
        ("UnknownReason", SchemaError, "finish_reason 'error'"),
    ],
)
def test_a_wrong_answer_stops_the_stage(store, policy, name, error, words):
    prompts = make_prompts(store, [[5], [6]])
    with pytest.raises(error, match=words):
        run(config(engine=f"{MAKING}:{name}"), store, prompts=prompts.ref, policy=policy.ref)
    assert store.numbers("tiny", "rollouts") == []


def test_a_logprob_above_0_by_rounding_is_one(store, policy, monkeypatch):
    """Of a token that is nearly certain a float32 softmax may say a little more than 0."""
    logprobs = np.array([-0.5, 1e-6], np.float32)
    monkeypatch.setattr(
        making.Honest,
        "answers",
        lambda self, request: iter([good(request.index, logprobs=logprobs)]),
    )
    given = config(engine=f"{MAKING}:Honest")
    ref = run(given, store, prompts=make_prompts(store, [[5]]).ref, policy=policy.ref)
    assert rows_of(store, ref)[2]["old_logprobs"] == logprobs.tolist()


def test_finished_shards_outlive_an_engine_that_dies(store, policy, monkeypatch):
    from tests.stages.generate import making

    prompts, given = (
        make_prompts(store, [[5], [6]]),
        config(engine=f"{MAKING}:Dies", rows_per_shard=2),
    )
    with pytest.raises(RuntimeError, match="gone"):
        run(given, store, prompts=prompts.ref, policy=policy.ref)
    asked = []
    monkeypatch.setattr(
        making.Dies,
        "answers",
        lambda self, request: asked.append(request.index) or iter([making.good(request.index)]),
    )
    ref = run(given, store, prompts=prompts.ref, policy=policy.ref)
    assert asked == [2, 3, 4, 5]
    assert store.open(ref).manifest.rows == 6


# -- what is refused


def test_a_prompt_without_room_is_an_error_or_dropped(store, policy):
    prompts = make_prompts(store, [[5] * 10, [6] * 249, [7] * 248])  # the context is 256
    with pytest.raises(
        ConfigError, match=r"1 of 3 prompts leave no room.*context of 256"
    ) as caught:
        run(config(), store, prompts=prompts.ref, policy=policy.ref)
    assert "g1" in caught.value.object
    version = store.open(
        run(config(overlong="drop"), store, prompts=prompts.ref, policy=policy.ref)
    )
    assert version.table().column("group_id").unique().to_pylist() == ["g0", "g2"]
    assert version.manifest.status["dropped"] == 1
    assert version.manifest.metrics["dropped"] == ["g1"]
    shorter = config(overlong="drop", max_model_len=100)
    version = store.open(run(shorter, store, prompts=prompts.ref, policy=policy.ref))
    assert version.manifest.metrics["dropped"] == ["g1", "g2"]


def test_the_dropped_are_counted_also_beyond_those_that_are_listed(store, policy, monkeypatch):
    monkeypatch.setattr(stage, "_MOST_LISTED", 1)
    prompts = make_prompts(store, [[5] * 10, [6] * 249, [7] * 249])
    version = store.open(
        run(config(overlong="drop"), store, prompts=prompts.ref, policy=policy.ref)
    )
    assert version.manifest.metrics["dropped"] == ["g1"]
    assert version.manifest.status["dropped"] == 2


def test_no_prompt_left_is_a_version_of_no_rows(store, policy):
    version = store.open(
        run(
            config(overlong="drop", max_model_len=10),
            store,
            prompts=make_prompts(store, [[5] * 30]).ref,
            policy=policy.ref,
        )
    )
    assert version.table().num_rows == 0
    assert version.manifest.metrics["tokens"] == 0


def test_foreign_or_empty_prompt_ids(store, policy):
    with pytest.raises(SchemaError, match="id 320 is outside the vocabulary"):
        run(config(), store, prompts=make_prompts(store, [[5], [320]]).ref, policy=policy.ref)
    for ids, group in ([[5], []], "g1"), ([[], []], "g0"):
        with pytest.raises(SchemaError, match=f"{group}: prompt_ids is empty"):
            run(config(), store, prompts=make_prompts(store, ids).ref, policy=policy.ref)


def test_an_encoder_and_its_decoder_have_a_context_each(store):
    """The tiny model's context is 256: prompt and completion of 200 tokens fit, of 257 not."""
    policy = make_policy(store, "seq2seq", "bart")
    prompts = make_prompts(store, [[5] * 200, [6] * 257])
    given = config(sampling={"max_tokens": 200}, overlong="drop")
    kept, dropped, longest = select_prompts(given, prompts, policy)
    assert kept["group_id"].to_pylist() == ["g0"] and dropped == ["g1"] and longest == 200
    given = config(sampling={"max_tokens": 257}, overlong="drop")
    assert select_prompts(given, prompts, policy)[1] == ["g0", "g1"]


def test_every_id_of_the_vocabulary_is_allowed(store, policy):
    """0 … 319; the first and the last."""
    given = config(sampling={"max_tokens": 8, "stop_token_ids": [0, 319]})
    assert select_prompts(given, make_prompts(store, [[0, 319]]), policy)[0].num_rows == 1
    with pytest.raises(SchemaError, match="id 320 is outside the vocabulary"):
        select_prompts(given, make_prompts(store, [[0, 320]]), policy)


@pytest.mark.parametrize("token", [320, -1])
def test_a_stop_token_outside_the_vocabulary(store, policy, token):
    given = config(sampling={"max_tokens": 8, "stop_token_ids": [5, token]})
    with pytest.raises(ConfigError, match=f"{token} is outside the vocabulary"):
        run(given, store, prompts=make_prompts(store, [[5]]).ref, policy=policy.ref)


@pytest.mark.parametrize(
    "name", ["trust_remote_code", "logprobs_mode", "skip_tokenizer_init", "enable_chunked_prefill"]
)
def test_engine_args_can_not_replace_what_the_engine_sets(name):
    with pytest.raises(ConfigError, match=f"{name} cannot be set here"):
        config(engine="vllm", options={"engine_args": {name: True, "quantization": "fp8"}})
    assert config(engine="vllm", options={"engine_args": {"quantization": "fp8"}})


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"samples_per_promt": 2}, "did you mean samples_per_prompt"),
        ({"sampling": {"temperatur": 2}}, "did you mean temperature"),
        ({"options": {"scrypt": "echo"}}, "did you mean script"),
        ({"sampling": {"temperature": 0}}, "temperature 0 gives 3 equal samples"),
        ({"sampling": {"min_tokens": 9, "max_tokens": 8}}, "min_tokens 9 is above max_tokens 8"),
        ({"sampling": {"temperature": -1}}, "sampling.temperature"),
    ],
)
def test_wrong_config_is_named(changed, words):
    with pytest.raises(ConfigError, match=words):
        config(**changed)


def test_an_unknown_engine_is_named_with_the_nearest():
    with pytest.raises(ConfigError, match=r"no such engine.* did you mean scripted\?"):
        config(engine="scriptd")


@pytest.mark.parametrize("engine", ["scripted", "transformers", "vllm"])
def test_half_a_checkpoint_is_named_before_the_engine_starts(store, policy, engine):
    prompts = make_prompts(store, [[5]])
    (policy.files.folder / "model.safetensors").unlink()
    with pytest.raises(CorruptError, match=r"model.safetensors: is missing"):
        run(config(engine=engine), store, prompts=prompts.ref, policy=policy.ref)
    assert "vllm" not in sys.modules


@pytest.mark.parametrize("engine", ["Honest", "Waits", "Chokes"])
def test_a_flipped_bit_in_the_weights_is_found_before_a_row_is_made(store, policy, engine):
    weights = policy.files.folder / "model.safetensors"
    torn = bytearray(weights.read_bytes())
    torn[-1] ^= 1
    weights.write_bytes(torn)
    with pytest.raises(CorruptError, match=r"model.safetensors: sha256 expected"):
        run(
            config(engine=f"{MAKING}:{engine}", options={}),
            store,
            prompts=make_prompts(store, [[5]]).ref,
            policy=policy.ref,
        )
    assert not making.Waits.has_read


# -- killed in the middle

SCRIPT = """
import sys
from quiver.stages.common.runtime.runner import run_stage
config = {"engine": "scripted", "samples_per_prompt": 2, "rows_per_shard": 5,
    "sampling": {"max_tokens": 8}, "options": {"seconds_per_row": 0.05}}
refs = {"prompts": "tiny/prompts@1", "policy": "tiny/policy@0"}
print(run_stage("generate", config, sys.argv[1], in_process=True, **refs))
"""


def start(store: Store) -> subprocess.Popen:
    command = [sys.executable, "-c", SCRIPT, str(store.path)]
    return subprocess.Popen(
        command, cwd=Path(__file__).parents[3], stdout=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("size_after", [5, 3])
def test_kill_9_costs_at_most_one_shard(tmp_path, size_after):
    """An uninterrupted store and one whose stage was killed end with the same rows; finished shards
    are not touched again."""
    stores = [Store(tmp_path / name) for name in ("calm", "killed")]
    for store in stores:
        make_policy(store)
        random_prompts(store, 20)
    calm, killed = stores
    run(
        config(samples_per_prompt=2, rows_per_shard=5),
        calm,
        prompts="tiny/prompts@1",
        policy="tiny/policy@0",
    )
    child = start(killed)
    staging = killed.path / "tiny" / "rollouts" / ".staging"
    while len(list(staging.glob("*.notes/part-*.json"))) < 3:
        assert child.poll() is None
        time.sleep(0.01)
    os.kill(child.pid, signal.SIGKILL)
    child.communicate()
    before = {path.name: path.stat().st_ino for path in staging.glob("*/part-*.arrow")}
    assert killed.numbers("tiny", "rollouts") == [] and 3 <= len(before) <= 7
    again = config(samples_per_prompt=2, rows_per_shard=size_after)
    ref = run(again, killed, prompts="tiny/prompts@1", policy="tiny/policy@0")
    assert str(ref) == "tiny/rollouts@1"
    version = killed.open("tiny/rollouts@1")
    assert {name: (version.files.folder / name).stat().st_ino for name in before} == before
    assert version.table().equals(calm.open("tiny/rollouts@1").table())
    assert version.manifest.run_key == calm.open("tiny/rollouts@1").manifest.run_key
    assert (
        version.manifest.metrics["tokens"]
        == calm.open("tiny/rollouts@1").manifest.metrics["tokens"]
    )
    assert verify(killed)[1] == []


@pytest.mark.parametrize(
    ("max_turns", "context", "longest"),
    [(3, 256, 6 + 40 + 2 * 16), (1, 256, 6 + 40), (20, 256, 256), (3, 50, 50)],
)
def test_an_episode_has_room_for_its_turns_and_what_stands_between(
    store, policy, max_turns, context, longest
):
    limits = {"max_turns": max_turns, "max_tokens": 40, "max_observation_tokens": 16}
    given = config(turns={"environment": "game.py:Game", **limits}, max_model_len=context)
    prompts = make_prompts(store, [[5] * 6, [7]])
    assert select_prompts(given, prompts, policy)[2] == longest


@pytest.mark.parametrize(
    ("longest", "limit", "room"),
    [(1, None, 64), (64, None, 64), (65, None, 96), (97, None, 128), (129, 160, 160)],
)
def test_the_engines_room_changes_seldom(policy, longest, limit, room):
    """Neither much more than the rows need nor, where it can be, another for a few tokens more."""
    setup = stage.engine_setup(config(max_model_len=limit), policy, longest, most_pictures=0)
    assert (setup.max_model_len, setup.longest) == (room, longest)
