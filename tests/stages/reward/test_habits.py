"""Functions that were written for TRL or for verl score as they are."""

import json
from contextlib import nullcontext

import pytest

from quiver.schemas.cells import json_array
from quiver.schemas.errors import ConfigError, RewardError
from quiver.stages.reward.functions.config import FunctionConfig
from quiver.stages.reward.pool.habits import require_sent
from quiver.stages.reward.preview import preview
from quiver.stages.reward.scoring import cells_of
from quiver.stages.reward.stage import Config

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


def function(use: str, **fields) -> dict:
    return {"use": f"theirs.py:{use}" if "_" in use else use, **fields}


def test_completions_as_messages(score, sample, column):
    rollouts = sample([["<think>a</think> 7", "7"]], {"answer": [7]})
    messages = function("trl_format", completions="messages")
    assert column(score(rollouts, messages)) == {"0-0": 1.0, "0-1": 0.0}
    with pytest.raises(RewardError, match=r'theirs.py:6\).*completions = "messages"'):
        score(rollouts, function("trl_format"))


def test_what_a_function_logs_is_kept_beside_its_numbers(score, sample, column, caplog):
    rollouts = sample([["7", "6"], ["8"]], {"answer": [7, 8]})
    uses = ("trl_logs", "trl_async")
    version = score(rollouts, *(function(use, extra=True) for use in uses))
    assert column(version) == {"0-0": 2.0, "0-1": 0.0, "1-0": 2.0}
    extras = {
        use: [json.loads(row[use]) for row in column(version, "extra").values()] for use in uses
    }
    assert [extra["found"] for extra in extras["trl_logs"]] == ["8", "6", "7"]
    assert extras["trl_async"] == [{"answer": 8}, {"answer": 7}, {"answer": 7}]
    accuracies = [extra["accuracy"] for extra in extras["trl_logs"]]
    means = version.manifest.metrics["extra"]
    assert means["trl_logs"] == {"accuracy": pytest.approx(sum(accuracies) / 3)}
    caplog.set_level("INFO", "quiver.stages")
    score(rollouts, function("trl_logs"))
    assert "accuracy is not kept: extra = true keeps what the function logs" in caplog.text


def test_a_score_function_of_verls_reads_its_layout(score, sample, column):
    verl = function("compute_score", style="verl", extra=True, arguments={"bonus": 0.5})
    version = score(sample(SAID, VERL_ROWS), verl, max_invalid=0.5)
    assert column(version) == {"0-0": 1.5, "0-1": 0.5, "1-0": 1.5, "2-0": None}
    error = "NotImplementedError: other (theirs.py:23)"
    assert column(version, "errors")["2-0"] == {"compute_score": error}
    extra = json.loads(column(version, "extra")["1-0"]["compute_score"])
    assert extra == {"acc": True, "index": 1}
    assert version.manifest.metrics["extra"]["compute_score"]["acc"] == pytest.approx(2 / 3)


def test_which_column_a_parameter_is(score, sample, column):
    """A plain column comes before verl's layout; the recipe before both."""
    rows = {"data_source": ["x"], "ground_truth": ["7"], "extra_info": [None]}
    rollouts = sample([["7", "8"]], {**rows, "reward_model": [{"ground_truth": "8"}]})
    verl = function("compute_number", style="verl")
    named = function("numeric", columns={"answer": "reward_model.ground_truth"})
    assert list(column(score(rollouts, verl, named), "parts").values()) == [
        {"compute_number": 0.0, "numeric": 1.0},
        {"compute_number": 1.0, "numeric": 0.0},
    ]


def test_what_is_missing_is_told_before_anything_runs():
    verl = function("compute_score", style="verl")
    misspelt = function("numeric", columns={"answer": "solutoin"})
    for section, columns, words in (
        (function("compute_score"), VERL_ROWS, "solution_str, which verl gives"),
        (verl, ["data_source"], "needs reward_model"),
        (misspelt, ["solution"], "solutoin.*solution"),
    ):
        with pytest.raises(ConfigError, match=words):
            preview(Config(functions=[section]), columns)
    judge = {"dialect": "openai-judge", "model": "m", "range": [0, 1], "urls": ["http://[::1]"]}
    for rubric, words in (("{reward_model.x} {completion}", None), ("{truth}", "needs truth")):
        told = pytest.raises(ConfigError, match=words) if words else nullcontext()
        with told:
            preview(Config(servers=[{**judge, "rubric": rubric}]), VERL_ROWS.keys())
    with pytest.raises(ValueError, match="style applies only to your own function"):
        FunctionConfig(use="numeric", style="verl")


def test_a_misspelt_parameter_of_columns_is_refused_as_of_arguments():
    """A function with **kwargs may take any, and an argument may stand beside a column."""
    numeric = {"answer": "solution"}
    for section, words in (
        (function("numeric", columns={**numeric, "answers": "solution"}), "answers; did you mean"),
        (function("numeric", columns={**numeric, "tolerance": "solution"}), "no column tolerance"),
        (function("trl_async", columns={"log_extra": "solution"}), None),
        (function("trl_format", columns={"refrence": "solution"}), None),
        (
            function("compute_score", style="verl", columns={"extra_inf": "solution"}),
            "takes no column extra_inf; did you mean extra_info",
        ),
    ):
        columns = ["solution", "answer", *VERL_ROWS]
        if words is None:
            preview(Config(functions=[section]), columns)
        else:
            with pytest.raises(ConfigError, match=words):
                preview(Config(functions=[section]), columns)


def test_a_field_that_no_row_can_have_is_refused(score, sample, column):
    """A struct has the same fields in every row; objects of JSON may each have their own."""
    misspelt = function("numeric", columns={"answer": "reward_model.ground_truht"})
    rows = {"reward_model": [{"ground_truth": "7", "of": {"x": "7"}}]}
    with pytest.raises(ConfigError, match=r"no field ground_truht; did you mean ground_truth\?"):
        score(sample([["7", "6"]], rows), misspelt)
    deep = function("numeric", columns={"answer": "reward_model.of.y"})
    with pytest.raises(ConfigError, match=r"reward_model\.of has no field y"):
        score(sample([["7", "6"]], rows), deep)
    optional = function("numeric", columns={"answer": "info.hint"})
    unlike = {"info": json_array([{"hint": "7"}, {"level": 3}, None]).chunk(0)}
    scored = score(sample([["7", "6"], ["7"], ["7"]], unlike), optional)
    assert column(scored) == {"0-0": 1.0, "0-1": 0.0, "1-0": None, "2-0": None}


def test_fields_of_json_text(score, sample, column):
    """As a CSV file holds verl's rows."""
    rows = {**VERL_ROWS, "reward_model": [*map(json.dumps, VERL_ROWS["reward_model"])]}
    verl = function("compute_score", style="verl")
    numeric = function("numeric", columns={"answer": "reward_model.ground_truth"})
    version = score(sample([["#### 7", "#### 6"], ["#### 8"], ["#### 8"]], rows), numeric)
    assert column(version) == {"0-0": 1.0, "0-1": 0.0, "1-0": 1.0, "2-0": 0.0}
    two = {name: cells[:2] for name, cells in rows.items()}
    version = score(sample([["#### 7"], ["#### 6"]], two), verl)
    assert column(version) == {"0-0": 1.0, "1-0": 0.0}


def test_a_cell_without_an_object_gives_none_whatever_stands_beside_it(score, sample, column):
    """A retry or a request may hold that row alone. A column without any object is refused."""
    numeric = function("numeric", columns={"answer": "reward_model.ground_truth"})
    cells = ['{"ground_truth": "7"}', "N/A", "null", "{", "7"]
    rewards = column(score(sample([["7"]] * len(cells), {"reward_model": cells}), numeric))
    assert rewards == {"0-0": 1.0, **{f"{row}-0": None for row in range(1, 5)}}
    for cell in "N/A", "null":
        batch = {"reward_model": [cell]}
        assert cells_of("reward_model.ground_truth", batch) == [None]
    for cells in ["N/A", "7", " "], [1, None, 2], [["7"], [], None]:
        version = sample([["7"]] * 3, {"reward_model": cells})
        with pytest.raises(ConfigError, match="reward_model holds no objects"):
            score(version, numeric)


def test_a_request_without_the_prompt_s_ids_says_where_they_are_asked_for():
    """What every stage offers, a reward server has only where its client sends it."""
    by_other_name = FunctionConfig(use="theirs.py:f", columns={"ids": "prompt_ids"})
    require_sent(by_other_name, ["ids"], {"completions": ["7"], "prompt_ids": [[1]]})
    why = "needs prompt_ids, which the request does not hold"
    with pytest.raises(ConfigError, match=why) as caught:
        require_sent(by_other_name, ["ids", "completions"], {"completions": ["7"]})
    assert "name prompt_ids in reward.servers.columns" in caught.value.next
