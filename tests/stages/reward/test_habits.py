"""Functions that were written for TRL or for verl score as they are."""

import json
from functools import partial

import pytest

from quiver.schemas.errors import ConfigError, RewardError
from quiver.stages.common.config import parse
from quiver.stages.reward.functions.config import FunctionConfig
from quiver.stages.reward.pool.habits import require_sent
from quiver.stages.reward.preview import preview
from quiver.stages.reward.stage import Config
from tests.writing import run_here

run = partial(run_here, "reward")

THEIRS = """
import re

def trl_format(completions, **kwargs):
    # TRL's documentation scores conversational completions so
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if re.match(r"^<think>.*?</think>", content) else 0.0 for content in contents]

def trl_logs(prompts, completions, answer, completion_ids, log_extra=None, log_metric=None, **kwargs):
    right = [text == str(wanted) for text, wanted in zip(completions, answer)]
    if log_extra:
        log_extra("found", completions)
    if log_metric:
        log_metric("accuracy", sum(right) / len(right))
    return [float(each) for each in right]

async def trl_async(completions, answer, log_extra, **kwargs):
    log_extra("answer", answer)
    return [float(text == str(wanted)) for text, wanted in zip(completions, answer)]

def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    if data_source != "openai/gsm8k":
        raise NotImplementedError(data_source)
    score = bonus + float(solution_str.split("####")[-1].strip() == ground_truth)
    return {"score": score, "acc": score > bonus, "index": extra_info["index"]}

def compute_number(data_source, solution_str, ground_truth, **kwargs):
    return float(solution_str == ground_truth) if not kwargs["extra_info"] else sorted(kwargs)
"""
VERL_ROWS = {
    "data_source": ["openai/gsm8k", "openai/gsm8k", "other"],
    "ability": ["math"] * 3,
    "reward_model": [{"style": "rule", "ground_truth": truth} for truth in ("7", "8", "9")],
    "extra_info": [{"split": "train", "index": index} for index in range(3)],
}
SAID = [["is #### 7", "#### 6"], ["#### 8"], ["#### 9"]]


@pytest.fixture(autouse=True)
def theirs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "theirs.py").write_text(THEIRS)


def config(use: str, max_invalid: float = 0.0, **fields) -> Config:
    functions = [{"use": f"theirs.py:{use}" if "_" in use else use, **fields}]
    return parse(Config, {"functions": functions, "max_invalid": max_invalid}, "reward")


def scored(store, ref, field: str = "reward") -> dict:
    """`field` of each row, by rollout without its prefix."""
    return {
        row["rollout_id"].removeprefix("0-sum-"): row[field]
        for row in store.open(ref).table().to_pylist()
    }


def test_completions_as_messages(store, sample):
    rollouts = sample([["<think>a</think> 7", "7"]], {"answer": [7]})
    ref = run(config("trl_format", completions="messages"), store, rollouts=rollouts.ref)
    assert scored(store, ref) == {"0-0": 1.0, "0-1": 0.0}
    with pytest.raises(RewardError, match=r'theirs.py:6\).*completions = "messages"'):
        run(config("trl_format"), store, rollouts=rollouts.ref)


@pytest.mark.parametrize("use", ["trl_logs", "trl_async"])
def test_what_a_function_logs_is_kept_beside_its_numbers(store, sample, use):
    rollouts = sample([["7", "6"], ["8"]], {"answer": [7, 8]})
    ref = run(config(use, extra=True), store, rollouts=rollouts.ref)
    assert scored(store, ref) == {"0-0": 1.0, "0-1": 0.0, "1-0": 1.0}
    extras = {row: json.loads(extra[use]) for row, extra in scored(store, ref, "extra").items()}
    if use == "trl_logs":
        assert {row: extra["found"] for row, extra in extras.items()} == {
            "0-0": "7",
            "0-1": "6",
            "1-0": "8",
        }
        accuracies = [extra["accuracy"] for extra in extras.values()]
        means = store.open(ref).manifest.metrics["extra"]
        assert means == {"trl_logs": {"accuracy": pytest.approx(sum(accuracies) / 3)}}
    else:
        assert extras == {"0-0": {"answer": 7}, "0-1": {"answer": 7}, "1-0": {"answer": 8}}


def test_what_is_not_kept_is_said(store, sample, caplog):
    caplog.set_level("INFO", "quiver.stages")
    rollouts = sample([["7", "6"]], {"answer": [7]})
    run(config("trl_logs"), store, rollouts=rollouts.ref)
    assert "accuracy is not kept: extra = true keeps what the function logs" in caplog.text


def test_a_score_function_of_verls_reads_its_layout(store, sample):
    rollouts = sample(SAID, VERL_ROWS)
    given = config("compute_score", 0.5, style="verl", extra=True, arguments={"bonus": 0.5})
    ref = run(given, store, rollouts=rollouts.ref)
    assert scored(store, ref) == {"0-0": 1.5, "0-1": 0.5, "1-0": 1.5, "2-0": None}
    errors = scored(store, ref, "errors")
    assert errors["2-0"]["compute_score"] == "NotImplementedError: other (theirs.py:23)"
    extra = json.loads(scored(store, ref, "extra")["1-0"]["compute_score"])
    assert extra == {"acc": True, "index": 1}
    (means,) = store.open(ref).manifest.metrics["extra"].values()
    assert means["acc"] == pytest.approx(2 / 3)


def test_a_plain_column_comes_before_verls_layout(store, sample):
    rows = {"data_source": ["x"], "ground_truth": ["7"], "extra_info": [None]}
    rollouts = sample([["7", "8"]], {**rows, "reward_model": [{"ground_truth": "8"}]})
    ref = run(config("compute_number", style="verl"), store, rollouts=rollouts.ref)
    assert scored(store, ref) == {"0-0": 1.0, "0-1": 0.0}


def test_parameters_are_given_other_columns(store, sample):
    rollouts = sample(SAID, VERL_ROWS)
    given = config("numeric", columns={"answer": "reward_model.ground_truth"})
    ref = run(given, store, rollouts=rollouts.ref)
    assert scored(store, ref) == {"0-0": 1.0, "0-1": 0.0, "1-0": 1.0, "2-0": 1.0}


@pytest.mark.parametrize(
    ("use", "fields", "columns", "words"),
    [
        ("compute_score", {}, VERL_ROWS, "solution_str, which verl gives"),
        ("compute_score", {"style": "verl"}, ["data_source"], "needs reward_model"),
        ("numeric", {"columns": {"answer": "solutoin"}}, ["solution"], "solutoin.*solution"),
    ],
)
def test_what_is_missing_is_told_before_anything_runs(use, fields, columns, words):
    with pytest.raises(ConfigError, match=words):
        preview(config(use, **fields), columns)


def test_a_style_is_of_a_function_of_ones_own():
    with pytest.raises(ConfigError, match="style is of a function of yours"):
        config("numeric", style="verl")


def test_a_request_without_the_prompt_s_ids_says_where_they_are_asked_for():
    """What every stage offers, a reward server has only where its client sends it."""
    by_other_name = FunctionConfig(use="theirs.py:f", columns={"ids": "prompt_ids"})
    require_sent(by_other_name, ["ids"], {"completions": ["7"], "prompt_ids": [[1]]})
    with pytest.raises(ConfigError) as caught:
        require_sent(by_other_name, ["ids", "completions"], {"completions": ["7"]})
    assert "needs prompt_ids, which the request does not hold" in str(caught.value)
    assert (
        caught.value.next == "name prompt_ids in reward.servers.columns where the request is made"
    )
