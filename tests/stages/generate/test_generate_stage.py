"""The generate stage under the scripted engine: rows, ids, seeds, shards, restarts, refusals."""

import hashlib
import json
import math
import multiprocessing
import re
import time
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from quiver.flows.verification import verify
from quiver.schemas import prompts as prompts_kind
from quiver.schemas.errors import (
    ConfigError,
    CorruptError,
    LineageError,
    NumericError,
    ResourceError,
    SchemaError,
)
from quiver.stages.core.config import parse
from quiver.stages.core.run.runner import run_stage
from quiver.stages.core.store import Store, sharing, writer
from quiver.stages.generate import shards, stage, subset
from quiver.stages.generate.prompts import select_prompts
from quiver.stages.generate.requests import Requests
from quiver.stages.generate.rows import Rows, row_seed
from quiver.stages.generate.stage import Config
from quiver.stages.model import checkpoints
from tests.stages.generate import making
from tests.stages.generate.making import good, make_prompts, random_prompts
from tests.tiny import EOS, make_folder, make_policy
from tests.tokens import swap, with_tokenizer

MAKING = "tests.stages.generate.making"
stage_run = partial(run_stage, "generate", in_process=True)
SCRIPTED = {"engine": "scripted", "samples_per_prompt": 3, "sampling": {"max_tokens": 8}}


def config(**changed) -> Config:
    return parse(Config, {**SCRIPTED, **changed}, "generate")


def run(store, prompts, policy, *, force=False, share=False, **changed):
    """The rollouts of these prompts, under the scripted engine with `changed`."""
    given = {"prompts": prompts.ref, "policy": policy.ref, "force": force, "share": share}
    return store.open(stage_run(config(**changed), store, **given))


def rows_of(version) -> list[dict]:
    return version.table().to_pylist()


def test_each_prompt_gets_its_group_in_order(store, policy):
    prompts = make_prompts(store, [[5, 6, 7], [9] * 8])
    version = run(store, prompts, policy, options={"script": "echo"}, seed=3, round=5)
    rows = rows_of(version)
    manifest = version.manifest
    assert [row["rollout_id"] for row in rows] == [
        f"{manifest.run_key[:8]}-g{g}-{s}" for g in (0, 1) for s in (0, 1, 2)
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
    # 63 bits of sha256 over the four names, so that rollouts of another release are still found
    digest = hashlib.sha256(b'[0,3,"sum-0017",2]').hexdigest()
    assert row_seed(0, 3, "sum-0017", 2) == int(digest[:16], 16) // 2
    assert [(entry.role, str(entry.ref)) for entry in manifest.inputs] == [
        ("prompts", "tiny/prompts@1")
    ]
    assert manifest.model("policy").weights and manifest.model("policy").ref == "tiny/policy@0"
    assert (manifest.metrics["tokens"], manifest.metrics["mean_completion_tokens"]) == (36, 6.0)
    engine = {"name": "scripted", "script": "echo", "logprobs_mode": "scripted"}
    assert manifest.metrics["engine"] == engine and manifest.metrics["dropped"] == []
    assert manifest.status == {"length": 3, "stop": 3}
    assert {"load", "generate", "write", "total"} <= set(manifest.seconds)


@pytest.mark.parametrize(
    ("sampling", "is_told"),
    [
        ({}, True),
        ({"stop_token_ids": [1]}, False),
        ({"stop": ["im_start"]}, False),
        ({"ignore_eos": True}, False),
    ],
)
def test_a_template_whose_end_ends_no_completion_is_told(store, policy, caplog, sampling, is_told):
    end = {"id": 1, "text": "<|im_start|>"}
    prompts = make_prompts(store, [[5]], assistant_end=end)
    version = run(store, prompts, policy, sampling={"max_tokens": 8, **sampling})
    told = [line for line in caplog.messages if "generate.sampling.stop_token_ids = [1]" in line]
    assert len(told) == is_told
    assert version.manifest.metrics.get("unknown_end") == (end if is_told else None)


def test_no_speed_is_told_while_most_rows_are_under_way(store, policy, caplog, monkeypatch):
    """Of finished rows alone, a first speed would be many times too low."""
    caplog.set_level("INFO")
    monkeypatch.setattr(shards, "_SECONDS_BETWEEN_LINES", -1.0)
    prompts = make_prompts(store, [[5], [6], [7], [8]])
    run(store, prompts, policy, options={"script": "echo"})
    lines = [line for line in caplog.messages if line.startswith("generate: ")]
    for line in lines:
        rows = int(line.split()[1])
        speed = r", \d+ tokens/s" if rows >= 6 else ""
        assert re.fullmatch(rf"generate: {rows} of 12 rows{speed}", line)
    assert len(lines) > 3


def with_ends(store, folder, ids):
    """The policy with these end tokens, in a run named like its folder."""
    path = make_folder(folder) / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": ids}))
    config = {"model": str(folder)}
    return store.open(run_stage("policy", config, store, into=folder.name, in_process=True))


def test_end_tokens_outside_the_vocabulary_end_nothing(store, tmp_path, caplog):
    """An engine would look for their logits."""
    prompts = make_prompts(store, [[5, 7]])
    sampling = {"max_tokens": 4, "min_tokens": 2}
    policy = with_ends(store, tmp_path / "some", [EOS, 9999])
    for engine in ("scripted", "transformers"):
        version = run(store, prompts, policy, engine=engine, sampling=sampling)
        assert version.manifest.rows == 3
        (line,) = (line for line in caplog.messages if "9999" in line)
        assert "some/policy@0: its end tokens [9999] are outside" in line
        caplog.clear()
    policy = with_ends(store, tmp_path / "all", [9999])
    with pytest.raises(ConfigError, match=r"end tokens \[9999\] are outside") as caught:
        run(store, prompts, policy, sampling=sampling)
    assert "generation_config.json" in caught.value.next
    assert run(store, prompts, policy, sampling={"max_tokens": 4, "ignore_eos": True})


def test_policies_with_other_end_tokens_are_other_work(store, tmp_path):
    """generation_config.json names them, which no hash of a model covers."""
    named = (("plain", EOS), ("more", [EOS, 1]), ("again", [1, EOS]))
    policies = [with_ends(store, tmp_path / name, ids) for name, ids in named]
    assert len({checkpoints.model_entry("policy", policy).weights for policy in policies}) == 1
    prompts = make_prompts(store, [[5, 7, 9]])
    echo = {"options": {"script": "echo"}}
    versions = [run(store, prompts, policy, **echo) for policy in policies]
    refs = [str(version.ref) for version in versions]
    assert refs == ["tiny/rollouts@1", "tiny/rollouts@2", "tiny/rollouts@2"]
    assert [rows_of(version)[0]["completion_ids"][-1] for version in versions[:2]] == [EOS, 1]
    echo["sampling"] = {"max_tokens": 3, "ignore_eos": True}
    refs = {str(run(store, prompts, policy, **echo).ref) for policy in policies}
    assert refs == {"tiny/rollouts@3"}


def test_same_work_is_already_done_and_other_work_is_not(store, policy, tmp_path):
    prompts = random_prompts(store, 7)
    first = run(store, prompts, policy)
    assert run(store, prompts, policy, rows_per_shard=2).ref == first.ref
    for size in (1, 5, 1000):
        again = run(store, prompts, policy, rows_per_shard=size, force=True)
        assert again.ref != first.ref and rows_of(again) == rows_of(first)
        assert len(again.manifest.files) == -(-21 // size)
    other = run(store, prompts, policy, round=1)
    assert other.ref != first.ref
    ids = [version.table()["completion_ids"] for version in (first, other)]
    assert not ids[0].equals(ids[1])
    assert run(store, prompts, make_policy(store, "other", seed=1)).ref != first.ref
    path = tmp_path / "mine.py"
    for last in (11, 12):
        path.write_text(f"def answer(prompt_ids, seed):\n    return [{last}]\n")
        edited = run(store, prompts, policy, options={"script": f"{path}:answer"})
        assert rows_of(edited)[0]["completion_ids"] == [last, EOS]
    (tmp_path / "moved").mkdir()
    moved = path.rename(tmp_path / "moved" / path.name)
    assert run(store, prompts, policy, options={"script": f"{moved}:answer"}).ref == edited.ref


def test_an_option_of_your_own_engine_keeps_its_folder(store, policy):
    """Nothing hashes the files that it names, `script` neither."""
    prompts = make_prompts(store, [[5]])
    own = {"engine": f"{MAKING}:Honest"}
    refs = {
        run(store, prompts, policy, **own, options={"script": f"{folder}/plan.txt"}).ref
        for folder in ("a", "b")
    }
    assert len(refs) == 2


def test_shards_grow_with_the_rollouts(store, policy, monkeypatch):
    prompts = random_prompts(store, 200)
    small = run(store, prompts, policy)
    monkeypatch.setattr(writer, "MOST_SHARDS", 2)
    large = run(store, prompts, policy, force=True)
    sizes = [[entry.rows for entry in version.manifest.files] for version in (small, large)]
    assert sizes == [[256, 256, 88], [512, 88]]
    assert small.table().equals(large.table())


def test_shards_of_episodes_do_not_grow():
    """All environments of a shard may be open at once."""
    single = config()
    episodes = config(turns={"environment": "mine.py:Game"})
    assert (single.rows_in_shard(1_000_000), episodes.rows_in_shard(1_000_000)) == (4096, 256)
    assert config(rows_per_shard=32).rows_in_shard(1_000_000) == 32
    with pytest.raises(ConfigError, match="1000000 rollouts would have more than") as refused:
        config(rows_per_shard=30).rows_in_shard(1_000_000)
    assert refused.value.next == "set it to 31 or more"


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


@pytest.mark.parametrize(("size", "most"), [(4, 6), (2, 4)])
def test_an_engine_has_enough_to_do_at_the_end_of_a_shard(store, policy, size, most):
    """At least three rows are in flight as long as there are so many; of a shard's end without
    `ahead`, one would be."""
    making.Steps.flying.clear()
    version = run(
        store, random_prompts(store, 8), policy, engine=f"{MAKING}:Steps", rows_per_shard=size
    )
    assert [
        count >= min(3, left)
        for left, count in zip(range(24, 0, -1), making.Steps.flying, strict=True)
    ] == [True] * 24
    assert max(making.Steps.flying) == most, "and never two shards before they are needed"
    assert len(version.manifest.files) == 24 // size


# -- an engine that answers wrongly


@pytest.fixture
def requests() -> Requests:
    """Six rows of two prompts, all asked for."""
    table = pa.table(
        {"group_id": ["g0", "g1"], "prompt_ids": pa.array([[5], [6]], pa.list_(pa.int32()))}
    )
    requests = Requests(
        rows=Rows(table, config(), "x"),
        texts=None,
        take_shard=lambda: range(6),
        ahead=1,
        vocabulary_size=320,
    )
    assert requests.open_shard()
    return requests


def int32(*ids: int) -> np.ndarray:
    return np.array(ids, np.int32)


def float32(*logprobs: float) -> np.ndarray:
    return np.array(logprobs, np.float32)


@pytest.mark.parametrize(
    ("index", "changed", "error", "words"),
    [
        (999, {}, SchemaError, "row 999 was never asked for"),
        (0, {}, SchemaError, "row 0 was answered twice"),
        (1, {"logprobs": float32(-0.5)}, SchemaError, "2 ids but 1 logprobs"),
        (1, {"logprobs": float32(-0.5, np.nan)}, NumericError, "logprob nan"),
        (1, {"logprobs": float32(-0.5, 0.5)}, NumericError, "logprob 0.5"),
        (1, {"completion_ids": int32(5, 320)}, SchemaError, "id 320 is outside the vocabulary of 320"),
        (1, {"completion_ids": int32(5, -1)}, SchemaError, "id -1 is outside the vocabulary of 320"),
        (1, {"completion_ids": int32(5, 2)[None]}, SchemaError, r"is int32 \[1, 2\], expected a flat"),
        (1, {"completion_ids": [5, 2]}, SchemaError, "completion_ids is list"),
        (1, {"completion_ids": int32(*[5] * 9), "logprobs": float32(*[-1] * 9)}, SchemaError, "9 ids, max_tokens is 8"),
        (1, {"finish_reason": "error"}, SchemaError, "finish_reason 'error'"),
    ],
)  # fmt: skip
def test_a_wrong_answer_is_refused(requests, index, changed, error, words):
    requests.answer(good(0))
    with pytest.raises(error, match=words):
        requests.answer(good(index, **changed))


def test_rows_are_answered_in_any_order_and_none_is_left_out(requests):
    """The logprob of a token that is nearly certain may be a little above 0, by rounding."""
    for index in (5, 0, 1, 4, 3):
        requests.answer(good(index, logprobs=float32(-0.5, 1e-6)))
    assert [index for index, _ in requests.finished_rows()] == [5, 0, 1, 4, 3]
    with pytest.raises(SchemaError, match="1 of 6 rows were never answered, the first is row 2"):
        requests.settle()
    assert not requests.is_done()
    requests.answer(good(2))
    requests.settle()
    assert requests.is_done() and requests.num_tokens == 12


@pytest.mark.parametrize(
    ("mistake", "error", "words"),
    [
        ("init", ConfigError, "raised KeyError: 'licence'"),
        ("generate", ConfigError, "raised KeyError: 'licence'"),
        ("close", ConfigError, "raised KeyError: 'licence'"),
        ("nothing", ConfigError, "raised TypeError: 'NoneType' object is not iterable"),
        ("info", ConfigError, "info must be a dict of plain values: .* float32"),
        ("no info", ConfigError, "info must be a dict of plain values: it is NoneType"),
        ("tuple", SchemaError, "it answered with tuple, expected a Completion"),
        ("index", SchemaError, "it answered row list, expected an int"),
        ("stop_reason", SchemaError, "row 0: stop_reason is int, expected str or None"),
    ],
)
def test_a_mistake_of_your_own_engine_is_no_bug_in_quiver(store, policy, mistake, error, words):
    own = f"{MAKING}:Mistakes"
    with pytest.raises(error, match=words) as caught:
        run(store, make_prompts(store, [[5]]), policy, engine=own, options={"mistake": mistake})
    assert caught.value.object == f"engine {own}"
    assert caught.value.next.startswith("correct the engine")


def test_what_is_not_your_engines_fault_passes(store, policy):
    """A list of answers is as good as an iterator; a full disk is told as such."""
    own = {"engine": f"{MAKING}:Mistakes"}
    prompts = make_prompts(store, [[5]])
    version = run(store, prompts, policy, **own, options={"mistake": "list"})
    assert version.table()["completion_ids"].to_pylist() == [[5, 2]] * 3
    with pytest.raises(ResourceError, match="the disk is full"):
        run(store, prompts, policy, **own, options={"mistake": "disk"})


def test_a_logprob_that_is_no_number_sends_to_the_weights(requests):
    """Sampling again gives the same."""
    with pytest.raises(NumericError) as caught:
        requests.answer(good(0, logprobs=float32(-0.5, np.nan)))
    assert "the policy's weights" in caught.value.next


def test_an_engine_that_leaves_a_row_out_is_not_asked_for_ever(store, policy):
    prompts = make_prompts(store, [[5], [6]])
    with pytest.raises(SchemaError, match="1 of 6 rows were never answered, the first is row 2"):
        run(store, prompts, policy, engine=f"{MAKING}:Forgets")


def test_work_that_another_process_has_committed_is_not_done_to_its_end(store, policy, monkeypatch):
    """A shard may take an hour; a process looks whenever it writes a line of progress."""
    monkeypatch.setattr(shards, "_SECONDS_BETWEEN_LINES", -1.0)
    monkeypatch.setattr(sharing, "LEAST_PATIENCE_SECONDS", 0.0)
    prompts = make_prompts(store, [[5], [6]])
    answered, versions = [], []

    def answers(self, request):
        answered.append(request.index)
        if len(answered) == 1:  # the slow process; the quick one takes its shard
            versions.append(run(store, prompts, policy, engine=f"{MAKING}:Honest", share=True))
        yield good(request.index)

    monkeypatch.setattr(making.Honest, "answers", answers)
    versions.append(run(store, prompts, policy, engine=f"{MAKING}:Honest", share=True))
    assert [str(version.ref) for version in versions] == ["tiny/rollouts@1"] * 2
    assert answered == [0, *range(6)]


def test_finished_shards_outlive_an_engine_that_dies(store, policy, monkeypatch):
    prompts = make_prompts(store, [[5], [6]])
    given = {"engine": f"{MAKING}:Dies", "rows_per_shard": 2}
    with pytest.raises(ConfigError, match="raised RuntimeError: the engine is gone"):
        run(store, prompts, policy, **given)
    assert store.numbers("tiny", "rollouts") == []
    asked = []
    monkeypatch.setattr(
        making.Dies,
        "answers",
        lambda self, request: asked.append(request.index) or iter([good(request.index)]),
    )
    assert run(store, prompts, policy, **given).manifest.rows == 6
    assert asked == [2, 3, 4, 5]


# -- what is refused


def test_a_prompt_without_room_is_an_error_or_dropped(store, policy, monkeypatch):
    prompts = make_prompts(store, [[5] * 10, [6] * 249, [7] * 248])  # the context is 256
    with pytest.raises(ConfigError, match=r"1 of 3 prompts leave no room.*of 256") as caught:
        run(store, prompts, policy)
    assert "g1" in caught.value.object
    version = run(store, prompts, policy, overlong="drop")
    assert version.table().column("group_id").unique().to_pylist() == ["g0", "g2"]
    assert (version.manifest.status["dropped"], version.manifest.metrics["dropped"]) == (1, ["g1"])
    monkeypatch.setattr(prompts_kind, "_MOST_LISTED_BYTES", 3)
    version = run(store, prompts, policy, overlong="drop", max_model_len=10)
    assert version.table().num_rows == 0 and version.manifest.metrics["tokens"] == 0
    assert (version.manifest.status["dropped"], version.manifest.metrics["dropped"]) == (3, ["g0"])


@pytest.mark.parametrize(
    ("ids", "stop_token_ids", "error", "words"),
    [
        ([[5], [320]], [], SchemaError, "id 320 is outside the vocabulary"),
        ([[5], []], [], SchemaError, "g1: prompt_ids is empty"),
        ([[], []], [], SchemaError, "g0: prompt_ids is empty"),
        ([[5]], [5, 320], ConfigError, "320 is outside the vocabulary"),
        ([[5]], [-1], ConfigError, "-1 is outside the vocabulary"),
    ],
)
def test_ids_that_the_policy_does_not_know(store, policy, ids, stop_token_ids, error, words):
    given = config(sampling={"max_tokens": 8, "stop_token_ids": stop_token_ids})
    with pytest.raises(error, match=words):
        select_prompts(given, make_prompts(store, ids), policy)


def test_prompts_of_another_tokenizer_are_refused(store, policy, tmp_path):
    """The policy would read other words. Only the ids of the prompts count."""
    prompts = make_prompts(store, [[5, 6, 299], [7]], renderer=policy)
    swapped = make_prompts(store, [[5, 6, 301], [7]], renderer=policy)
    other = with_tokenizer(store, tmp_path, "other", swap)
    assert run(store, prompts, other).manifest.rows == run(store, swapped, policy).manifest.rows
    with pytest.raises(LineageError, match=r"another than tiny/policy@0's: 1 ids .* 301") as caught:
        run(store, swapped, other)
    assert caught.value.object == str(other.ref)
    assert caught.value.next == "render the prompts again with this policy"


@pytest.mark.parametrize(
    ("turns", "context", "longest"),
    [
        (None, 256, 6 + 8),
        ({"max_turns": 3}, 256, 6 + 40 + 2 * 16),
        ({"max_turns": 1}, 256, 6 + 40),
        ({"max_turns": 20}, 256, 256),
        ({"max_turns": 3}, 50, 50),
    ],
)
def test_the_most_ids_of_a_row(store, policy, turns, context, longest):
    """0 and 319 are the vocabulary's first and last id."""
    if turns is not None:
        turns |= {"environment": "game.py:Game", "max_tokens": 40, "max_observation_tokens": 16}
    given = config(
        turns=turns,
        max_model_len=context,
        sampling={"max_tokens": 8, "stop_token_ids": [0, 319]},
    )
    prompts = make_prompts(store, [[0, 319] * 3, [7]])
    kept, dropped, most = select_prompts(given, prompts, policy)
    assert (kept.num_rows, dropped, most) == (2, [], longest)


def test_an_encoder_and_its_decoder_have_a_context_each(store):
    """The tiny model's context is 256: prompt and completion of 200 tokens fit, of 257 not."""
    policy = make_policy(store, "seq2seq", "bart")
    prompts = make_prompts(store, [[5] * 200, [6] * 257])
    for max_tokens, expected in ((200, ["g1"]), (257, ["g0", "g1"])):
        given = config(sampling={"max_tokens": max_tokens}, overlong="drop")
        _, dropped, longest = select_prompts(given, prompts, policy)
        assert dropped == expected and longest == (200 if max_tokens == 200 else 1)


ENGINE_ARGS = (
    "trust_remote_code",
    "logprobs_mode",
    "skip_tokenizer_init",
    "enable_chunked_prefill",
)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"samples_per_promt": 2}, "did you mean samples_per_prompt"),
        ({"sampling": {"temperatur": 2}}, "did you mean temperature"),
        ({"options": {"scrypt": "echo"}}, "did you mean script"),
        ({"sampling": {"temperature": 0}}, "temperature 0 gives 3 equal samples"),
        ({"sampling": {"min_tokens": 9, "max_tokens": 8}}, "min_tokens 9 is above max_tokens 8"),
        ({"sampling": {"temperature": -1}}, "sampling.temperature"),
        ({"sampling": {"temperature": 0.0099}}, r"temperature 0\.0099 is below 0\.01, .* take 0"),
        ({"sampling": {"stop": ["", "a"]}}, "an empty text would end a completion at once"),
        ({"engine": "scriptd"}, r"no such engine.* did you mean scripted\?"),
        *(
            ({"engine": "vllm", "options": {"engine_args": {name: 1}}}, f"{name} cannot be set here")
            for name in ENGINE_ARGS
        ),
    ],
)  # fmt: skip
def test_wrong_config_is_named(changed, words):
    with pytest.raises(ConfigError, match=words):
        config(**changed)
    assert config(engine="vllm", options={"engine_args": {"quantization": "fp8"}})
    assert config(sampling={"temperature": 0.01})
    with pytest.raises(ConfigError, match=r"seed: .* greater than or equal to 0"):
        parse(subset.Config, {"seed": -1}, "stage subset")


@pytest.mark.parametrize("engine", ["Honest", "Waits", "Chokes"])
def test_a_flipped_bit_in_the_weights_is_found_before_a_row_is_made(store, policy, engine):
    weights = policy.files.folder / "model.safetensors"
    torn = bytearray(weights.read_bytes())
    torn[-1] ^= 1
    weights.write_bytes(torn)
    with pytest.raises(CorruptError, match=r"model.safetensors: sha256 expected"):
        run(store, make_prompts(store, [[5]]), policy, engine=f"{MAKING}:{engine}")
    assert not making.Waits.has_read


# -- killed in the middle


def test_kill_9_costs_at_most_one_shard(tmp_path):
    """An uninterrupted store and one whose stage was killed end with the same rows; finished shards
    are not touched again."""
    stores = [Store(tmp_path / name) for name in ("calm", "killed")]
    for store in stores:
        make_policy(store)
        random_prompts(store, 20)
    calm, killed = stores
    refs = {"prompts": "tiny/prompts@1", "policy": "tiny/policy@0"}
    stage_run(config(samples_per_prompt=2, rows_per_shard=5), calm, **refs)
    slow = config(samples_per_prompt=2, rows_per_shard=5, options={"seconds_per_row": 0.05})
    fork = multiprocessing.get_context("fork")
    child = fork.Process(target=stage_run, args=(slow, killed), kwargs=refs)
    child.start()
    work = Path(killed.url) / "tiny/rollouts/.work"
    while len(list(work.glob("*.notes/part-*.json"))) < 3:
        assert child.is_alive()
        time.sleep(0.01)
    child.kill()
    child.join()
    before = {path.name: path.stat().st_ino for path in work.glob("*/part-*.arrow")}
    assert killed.numbers("tiny", "rollouts") == [] and 3 <= len(before) <= 7
    again = config(samples_per_prompt=2, rows_per_shard=3)
    version = killed.open(stage_run(again, killed, **refs))
    assert str(version.ref) == "tiny/rollouts@1"
    assert {name: (version.files.folder / name).stat().st_ino for name in before} == before
    undisturbed = calm.open("tiny/rollouts@1")
    assert version.table().equals(undisturbed.table())
    assert version.manifest.run_key == undisturbed.manifest.run_key
    assert version.manifest.metrics["tokens"] == undisturbed.manifest.metrics["tokens"]
    assert verify(killed)[1] == []


@pytest.mark.parametrize(
    ("longest", "limit", "room"),
    [(1, None, 64), (64, None, 64), (65, None, 96), (97, None, 128), (129, 160, 160)],
)
def test_the_engines_room_changes_seldom(policy, longest, limit, room):
    """Neither much more than the rows need nor, where it can be, another for a few tokens more."""
    setup = stage.engine_setup(config(max_model_len=limit), policy, longest, most_media={})
    assert (setup.max_model_len, setup.longest) == (room, longest)
