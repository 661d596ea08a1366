"""A retry scores again only the rows without a reward, and takes the others over as they are; what
is kept beside a number."""

import json
from pathlib import Path

import pyarrow.compute as pc
import pytest

from quiver import run_stage
from quiver.schemas.errors import ConfigError, LineageError, RewardError
from quiver.stages.core.store import writer
from quiver.stages.core.store.writer import ROWS_PER_SHARD

MINE = """
import json, pathlib

def flaky(completions):
    # Fails for odd numbers until the file `repaired` is there; notes what it was called for.
    with open("calls.jsonl", "a") as log:
        log.write(json.dumps(completions) + "\\n")
    repaired = pathlib.Path("repaired").exists()
    values = [int(text.split()[-1]) for text in completions]
    if not repaired and any(value % 2 for value in values):
        raise ConnectionError("server is gone")
    return [value + (0.5 if repaired else 0.0) for value in values]

def skips(completions):
    return [None] * len(completions)

def judge(completions):
    return [{"reward": None if "skip" in text else 1.0, "why": text} for text in completions]
"""


@pytest.fixture(autouse=True)
def mine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


def calls() -> list[str]:
    """Completions that `flaky` was called for since the last time, each once."""
    path = Path("calls.jsonl")
    lines = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return sorted({text for line in lines for text in json.loads(line)})


def numbers(rows: int) -> list[list[str]]:
    return [[f"it is {2 * row}", f"it is {2 * row + 1}"] for row in range(rows // 2)]


def test_only_rows_without_a_reward_are_scored_again(score, sample, column, mine):
    rows = 2 * ROWS_PER_SHARD + 10
    rollouts = sample(numbers(rows), {"n": list(range(rows // 2))})
    options = {"overlong": {"max_tokens": 9, "cache": 2}, "max_invalid": 0.6}
    first = score(rollouts, "mine.py:flaky", **options)
    assert first.manifest.status == {"scored": rows // 2, "not_scored": 0, "failed": rows // 2}
    assert len(calls()) == rows
    (mine / "repaired").touch()
    second = score(rollouts, "mine.py:flaky", retry=first, **options)
    assert second.ref.version == first.ref.version + 1
    assert {int(text.split()[-1]) % 2 for text in calls()} == {1}
    kept = pc.is_valid(first.table()["reward"])
    assert second.table().filter(kept).equals(first.table().filter(kept))
    texts = rollouts.table()["completion_text"].to_pylist()
    values = dict(zip(column(second), (int(text.split()[-1]) for text in texts), strict=True))
    expected = {name: value + 0.5 * (value % 2) for name, value in values.items()}
    assert column(second) == expected
    assert second.table()["rollout_id"].equals(rollouts.table()["rollout_id"])
    manifest = second.manifest
    assert manifest.status == {"scored": rows, "not_scored": 0, "failed": 0}
    assert (manifest.metrics["retried"], manifest.metrics["recovered"]) == (rows // 2, rows // 2)
    assert manifest.input("retry").ref == str(first.ref)
    for earlier in (first, second):  # done already; nothing to do
        assert score(rollouts, "mine.py:flaky", retry=earlier, **options).ref == second.ref
    assert calls() == []


def test_a_retry_that_fails_again_is_taken_up_where_it_stopped(score, sample, mine):
    """Rollouts stand in reverse order of their prompts: the odd one is in the last shard."""
    texts = [["it is 1"]] + [["it is 2"] for _ in range(ROWS_PER_SHARD)]
    rollouts = sample(texts, {"n": list(range(len(texts)))})
    half = score(rollouts, "mine.py:skips")
    named = {"use": "mine.py:flaky", "name": "skips"}
    why = r"1 of 257 rows.*0-sum-0-0 of prompts, group sum-0: ConnectionError: server is gone"
    with pytest.raises(RewardError, match=why) as caught:
        score(rollouts, named, retry=half)
    assert "1 finished shards are kept" in caught.value.state
    calls()
    (mine / "repaired").touch()
    score(rollouts, named, retry=half)
    assert calls() == ["it is 1"]


def test_what_can_not_be_taken_over_is_refused(score, sample):
    rollouts, others = (sample(numbers(4), {"answer": [1, 2]}) for _ in range(2))
    uses = ("mine.py:flaky", "mine.py:skips")
    options = {"max_invalid": 1, "overlong": {"max_tokens": 9, "cache": 2}}
    first = score(rollouts, *uses, **options)
    renamed = sample([["it is 4"]], {"answer": [1]})
    why = r"was made of arith/rollouts@1, not of arith/rollouts@3"
    with pytest.raises(LineageError, match=why):
        score(renamed, *uses, retry=first, **options)
    assert others.manifest.content_hash == rollouts.manifest.content_hash  # by content, not by name
    assert score(others, *uses, retry=first, **options).ref.version == first.ref.version + 1
    doubled = {"use": "mine.py:flaky", "weight": 2}
    for functions, changes, why in (
        (("mine.py:flaky", "numeric"), {}, "weight of numeric was None there and is 1.0 in"),
        ((doubled, "mine.py:skips"), {}, "weight of flaky was 1.0 there and is 2.0 in the recipe"),
        (uses, {"reward_clip": (0, 1)}, "reward_clip was None there"),
        (uses, {"overlong": {"max_tokens": 9, "cache": 8}}, "overlong was .* and is .* in the"),
    ):
        with pytest.raises(ConfigError, match=why):
            score(rollouts, *functions, retry=first, **{**options, **changes})


def test_misspelt_roles_and_lists_are_refused(score, sample, store):
    """Not ignored, so that a retry is not taken for scores of all rows."""
    rollouts = sample(numbers(4), {"n": [1, 2]})
    config = {"functions": [{"use": "mine.py:skips"}]}

    def refused(**refs):
        with pytest.raises(ConfigError) as caught:
            run_stage("reward", config, store, **refs)
        return caught.value.object, caught.value.message

    ref = str(rollouts.ref)
    assert refused(rollouts=ref, retries="arith/rewards@1") == (
        "stage reward", "takes retry and rollouts, not retries; did you mean retry?",
    )  # fmt: skip
    assert refused(rollouts=ref, nosuch=["x"])[1] == "takes retry and rollouts, not nosuch"
    assert refused(rollout=ref) == ("stage reward", "no rollouts are given, only rollout")
    for refs in ([ref], (ref,)):
        problem = "expected one version, got a list of 1"
        assert refused(rollouts=refs) == (f"references {[ref]}", problem)
    assert not store.numbers("arith", "rewards")


def test_the_advice_for_refused_rewards_helps(score, sample, mine):
    """Of rewards that were a retry, too."""
    rollouts = sample(numbers(4), {"n": [1, 2]})
    first = score(rollouts, "mine.py:flaky", max_invalid=0.5)
    again = score(rollouts, "mine.py:flaky", max_invalid=0.5, retry=first)
    (mine / "repaired").touch()
    for retry, named in ((None, f"rollouts {rollouts.ref}"), (first, f"retry {first.ref}")):
        with pytest.raises(RewardError, match="2 of 4 rows failed, more than") as caught:
            score(rollouts, "mine.py:flaky", retry=retry)
        assert caught.value.next == f"quiver reward RECIPE --{named} --force"
        whole = score(rollouts, "mine.py:flaky", retry=retry, force=True)
        assert whole.ref not in (first.ref, again.ref)
        assert score(rollouts, "mine.py:flaky", retry=retry).ref == whole.ref


def test_parts_in_another_order_are_taken_over_by_name(score, sample, column, mine):
    rollouts = sample(numbers(4), {"n": [1, 2]})
    first = score(rollouts, "mine.py:skips", "mine.py:flaky", max_invalid=0.5)
    (mine / "repaired").touch()
    second = score(rollouts, "mine.py:flaky", "mine.py:skips", retry=first)
    assert column(second, "parts")["1-0"] == {"flaky": 2.0, "skips": None}
    assert column(second, "parts")["1-1"] == {"flaky": 3.5, "skips": None}


# -- extra


def test_extra_is_a_column_only_where_a_function_may_give_it(score, sample, column, mine):
    """And a retry keeps it of the rows it takes over."""
    rollouts = sample([["good", "skip"]], {"answer": [1]})
    judge = {"use": "mine.py:judge", "extra": True}
    first = score(rollouts, judge)
    assert column(first, "extra") == {
        "0-0": {"judge": '{"why": "good"}'},
        "0-1": {"judge": '{"why": "skip"}'},
    }
    assert column(first) == {"0-0": 1.0, "0-1": None}
    both = score(rollouts, judge, "mine.py:skips")
    assert set(column(both, "extra")["0-0"]) == {"judge"}
    with pytest.raises(RewardError, match="extra = true lets it return mappings"):
        score(rollouts, "mine.py:judge")
    plain = score(rollouts, "mine.py:skips")
    assert plain.table().column_names == ["rollout_id", "group_id", "reward", "parts", "errors"]
    zero = "\ndef judge(completions):\n    return [0.0] * len(completions)\n"
    (mine / "mine.py").write_text(MINE + zero)
    second = score(rollouts, "mine.py:judge", retry=first)
    assert column(second) == {"0-0": 1.0, "0-1": 0.0}
    assert column(second, "extra") == {**column(first, "extra"), "0-1": {"judge": None}}
    assert second.manifest.metrics["recovered"] == 1


def test_a_retry_may_switch_extra_on(score, sample, column, mine):
    rollouts = sample([["good", "skip"]], {"answer": [1]})
    old = "\ndef judge(completions):\n    return [None if 'skip' in t else 1.0 for t in completions]\n"
    (mine / "mine.py").write_text(MINE + old)
    first = score(rollouts, "mine.py:judge")
    assert "extra" not in first.table().column_names
    (mine / "mine.py").write_text(MINE.replace("None if", "0.5 if"))
    second = score(rollouts, {"use": "mine.py:judge", "extra": True}, retry=first)
    assert column(second) == {"0-0": 1.0, "0-1": 0.5}
    assert column(second, "extra") == {
        "0-0": {"judge": None},
        "0-1": {"judge": '{"why": "skip"}'},
    }


def test_shards_grow_and_rewards_do_not_depend_on_it(score, sample, mine, monkeypatch):
    rollouts = sample(numbers(600), {"n": list(range(300))})
    (mine / "repaired").touch()
    versions = [score(rollouts, "mine.py:flaky", into="small")]
    monkeypatch.setattr(writer, "MOST_SHARDS", 2)
    versions.append(score(rollouts, "mine.py:flaky", into="large"))
    sizes = [[entry.rows for entry in version.manifest.files] for version in versions]
    assert sizes == [[256, 256, 88], [512, 88]]
    assert versions[0].table().equals(versions[1].table())
