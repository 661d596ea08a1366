"""What is put into Prefect's pages and trackers and printed at the end of a run, without a server:
text that stays text, pictures that are pictures, tables of versions, sizes that stay bounded."""

import base64
import json
import logging
import re
import shutil
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pyarrow as pa
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from quiver.flows.calls import describe
from quiver.flows.cli.summary import next_commands, summary
from quiver.flows.evaluation import track_evaluation
from quiver.flows.look import plots, samples, templates, words
from quiver.flows.look.pages import iterations_page, text
from quiver.flows.look.pages.events import version_events
from quiver.flows.look.pages.text import attempt, picture
from quiver.flows.look.pages.views import VIEWS
from quiver.flows.look.plots import Panel
from quiver.flows.look.templates import SPAN_LIMIT
from quiver.flows.progress import Bar, progress
from quiver.flows.recipe import load
from quiver.flows.retention import Retention
from quiver.schemas import fields, prompts, rewards, rollouts
from quiver.stages.core.config import Config
from quiver.stages.core.run.runner import Call, Outcome
from quiver.stages.core.store import Store, Version
from quiver.stages.core.store.writer import ROWS_PER_SHARD
from quiver.stages.optimize import config as optimize
from tests.flows.conftest import RECIPE
from tests.writing import begin, run_here

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = [
    "<script>document.title = 'x'</script>",
    '<img src="https://example.org/seen.png" onerror="alert(1)">',
    "[here](javascript:alert(1)) ![seen](https://example.org/seen.png)",
    "| a | b |\n|---|---|\n# head",
    "``` fence ``` `code` ~~~",
    "\x1b[31mred\x1b[0m\x07\x00\r\b",
    "left\u202eright\u200b\ufeff",
    "x" * 100_000,
    "\n" * 100_000,
    "`" * 100_000,
    "🙂 é 漢字 \\ &lt; {{ 7 * 7 }}",
]


def drawn(markdown: str) -> ElementTree.Element:
    """The picture in this markdown, parsed."""
    (encoded,) = re.findall(
        r"!\[[^\]]+\]\(data:image/svg\+xml;base64,([A-Za-z0-9+/=]+)\)", markdown
    )
    return ElementTree.fromstring(base64.b64decode(encoded))


def lines(picture: ElementTree.Element) -> list[list[str]]:
    """The points of each curve."""
    return [line.get("points").split() for line in picture.iter(f"{SVG}polyline")]


def test_foreign_text_is_one_code_span_on_one_line():
    for hostile in HOSTILE:
        shown = templates.quoted(hostile)
        assert re.fullmatch("`[^`]+`", shown), "the span cannot be left"
        assert shown.isprintable() and len(shown) <= templates.SPAN_LIMIT + 2
        assert shown.endswith("…`") == (len(hostile) > templates.SPAN_LIMIT)
    assert templates.quoted("It is 12.") == "`It is 12.`"
    assert templates.quoted("two\nlines") == "`two\\nlines`"
    assert templates.quoted("") == "", "two backticks would begin a longer span"


def test_a_long_text_is_several_lines_of_one_code_span_each():
    """In a table artifact; nothing of the text is lost between them."""
    words = "one two three `four` five\nsix seven" * 3
    parts = text.wrapped(words, limit=50, width=20).splitlines()
    assert all(re.fullmatch(r"`[^`]{1,20}`", part) for part in parts) and len(parts) == 3
    assert "".join(part[1:-1] for part in parts) == templates.quoted(words, 50)[1:-1]
    assert text.wrapped("") == ""


def test_a_pipe_does_not_end_a_cell():
    row = templates.page("row", templates.quoted("a|b\\|c"), 1.23456)
    assert row == "| `a∣b\\∣c` | 1.235 |"
    assert templates.page("head", "name", "value") == "| name | value |\n| --- | --- |"


@pytest.mark.parametrize(
    ("formatted", "amounts", "expected"),
    [
        (words.number, (None, 0, 12345, 0.5, 1234.5678), "– 0 12,345 0.5 1235"),
        (words.size, (0, 999, 13_100, 2_500_000_000), "0 bytes 999 bytes 13.1 kB 2.5 GB"),
        (words.cell, (True, False, -0.0, None, "a\x1b"), "yes no 0 – a\\x1b"),
    ],
)
def test_amounts_in_words(formatted, amounts, expected):
    assert " ".join(map(formatted, amounts)) == expected


def test_a_key_is_one_run_s():
    assert text.key("rewards", "my-run") == "rewards-my-run"
    keys = {text.key("rewards", f"my{a}run{b}eval") for a in "-_." for b in "-_."}
    assert len(keys) == 9
    assert all(re.fullmatch("rewards-my-run-eval(-[0-9a-f]{6})?", key) for key in keys)


# -- versions


def write(
    store: Store, kind: str, table: pa.Table, run: str = "tiny", metrics=None, **inputs: Version
) -> Version:
    about = {"stage": "test", "stage_version": 1, "config": Config(), "inputs": inputs}
    with begin(store, run, kind, force=True, **about) as work:
        for index, start in enumerate(range(0, max(1, table.num_rows), ROWS_PER_SHARD)):
            work.write(index, table.slice(start, ROWS_PER_SHARD))
        return work.commit(metrics=metrics, status={"stop": table.num_rows})


def write_rollouts(store: Store, texts: list[str], run: str = "tiny") -> Version:
    """One rollout a prompt; prompt n asks `question n`, rollout n has n + 1 tokens."""
    schema = fields.with_struct(prompts.SCHEMA, columns=pa.struct([pa.field("answer", pa.int64())]))
    asked = [
        {
            "group_id": f"g{index}",
            "messages": [{"role": "user", "content": f"question {index}"}],
            "prompt_text": "rendered",
            "prompt_ids": [1],
            "columns": {"answer": 0},
        }
        for index in range(len(texts))
    ]
    rows = [
        {
            "rollout_id": f"r{index}",
            "group_id": f"g{index}",
            "sample_index": 0,
            "prompt_ids": [1],
            "completion_ids": [5] * (index + 1),
            "old_logprobs": [-0.5] * (index + 1),
            "finish_reason": "stop",
            "completion_text": text,
            "temperature": 1.0,
            "seed": 0,
        }
        for index, text in enumerate(texts)
    ]
    questions = write(store, "prompts", pa.Table.from_pylist(asked[::-1], schema=schema), run)
    table = pa.Table.from_pylist(rows, schema=rollouts.SCHEMA)
    speed = {"tokens": 66, "tokens_per_second": 1234.5}
    return write(store, "rollouts", table, run, speed, prompts=questions)


def write_rewards(store: Store, sampled: Version, values: list[float | None]) -> Version:
    """Rewards of the rollouts, in another order than theirs; of two functions, the second always
    0."""
    rows = [
        {
            "rollout_id": f"r{index}",
            "group_id": f"g{index}",
            "reward": value,
            "parts": {"a": value, "b|`": 0.0},
            "errors": {"a": None, "b|`": None},
        }
        for index, value in enumerate(values)
    ]
    described = dict.fromkeys(("min", "null", "null_rate", "errors", "seconds"), 0)
    described |= {"mean": 0.5, "std": None, "max": 1.0}
    metrics = {
        "reward_mean": 1 / 3,
        "reward_null": 1,
        "functions": {"a": described, "b|`": described},
        "correlation": {"a b|`": 0.5},
    }
    table = pa.Table.from_pylist(rows[::-1], schema=rewards.schema_for(["a", "b|`"]))
    return write(store, "rewards", table, metrics=metrics, rollouts=sampled)


def shown(store: Store, stage: str, version: Version) -> dict[str, Any]:
    """The artifacts of a finished version by key, none of them large."""
    artifacts = VIEWS[stage](store, version)
    for artifact in artifacts:
        assert len(json.dumps(artifact.model_dump(), default=str)) < 64_000
    return {artifact.key: artifact for artifact in artifacts}


def test_rollouts_hostile_ones_too(store):
    sampled = write_rollouts(store, HOSTILE)
    page = shown(store, "generate", sampled)["rollouts-tiny"]
    assert len(page.table) == samples.ROWS
    for row in page.table:
        number = row["tokens"] - 1
        assert row["prompt"] == f"`question {number}`" and row["finish_reason"] == "stop"
        spans = row["completion"].splitlines()
        assert spans and all(re.fullmatch(r"`[^`]{1,60}`", span) for span in spans)
        assert "".join(spans).isprintable()
        assert sum(len(span) - 2 for span in spans) <= SPAN_LIMIT
    assert page.table[0]["completion"] == f"`{HOSTILE[0]}`"
    said = f"**tiny/rollouts@1**: {len(HOSTILE)} rollouts, 66 tokens, 1234 tokens/s, "
    assert page.description.startswith(said) and page.description.endswith(
        "ended by stop 11. 10 samples:"
    )


def test_rewards_best_and_worst_joined_by_id(store):
    values = [0.1, 0.9, None, 0.3, 0.8, 0.2, 0.7, 0.6, 0.4, 0.5, 1.0, 0.0]
    sampled = write_rollouts(store, [f"answer {index}" for index in range(len(values))])
    pages = shown(store, "reward", write_rewards(store, sampled, values))
    ranked = pages["best-and-worst-tiny"]
    scored = sorted((value for value in values if value is not None), reverse=True)
    assert [row["reward"] for row in ranked.table] == [*scored[:5], *scored[-5:]]
    for row in ranked.table:
        number = values.index(row["reward"])
        assert (row["prompt"], row["completion"]) == (f"`question {number}`", f"`answer {number}`")
        assert (row["tokens"], row["parts"]) == (number + 1, f"`a` {row['reward']:.4g}\n`b|ˋ` 0")
    assert ranked.description.endswith("the 5 best and the 5 worst of 11 rollouts with a reward")
    a, b, reward = pages["rewards-tiny"].table
    assert (a["function"], b["function"], reward["function"]) == ("`a`", "`b|ˋ`", "reward")
    assert (a["mean"], reward["mean"], reward["null"], a["std"]) == (0.5, 0.3333, 1, None)


@pytest.mark.parametrize(
    "values", [[], [None, None], [0.5, None]], ids=["no rows", "none scored", "one scored"]
)
def test_few_rows(store, values):
    sampled = write_rollouts(store, ["text"] * len(values))
    scored = write_rewards(store, sampled, values)
    pages = shown(store, "generate", sampled) | shown(store, "reward", scored)
    assert [row["reward"] for row in pages["best-and-worst-tiny"].table] == [
        each for each in values if each is not None
    ]
    assert len(pages["rollouts-tiny"].table) == len(values)


def test_only_the_first_shards_are_read(store, monkeypatch):
    """A page of a large dataset looks at the beginning alone: the rest may even be torn, which is
    for others to find."""
    monkeypatch.setattr(samples, "MOST_BYTES", 1)
    sampled = write_rollouts(store, ["text"] * (ROWS_PER_SHARD + 4))
    torn = sampled.files.path(sampled.files.names[1])
    torn.write_bytes(torn.read_bytes()[:-8])
    page = shown(store, "generate", sampled)["rollouts-tiny"]
    assert page.description.endswith(
        f"10 samples among the first {ROWS_PER_SHARD} of {ROWS_PER_SHARD + 4}:"
    )
    assert max(row["tokens"] for row in page.table) <= ROWS_PER_SHARD


@pytest.fixture
def trained(store, policy, caplog, monkeypatch):
    """The second of two policies in a row, each of two steps; and the lines of its steps."""
    from quiver.stages.optimize import trainer
    from quiver.stages.optimize.stage import Config as OptimizeConfig
    from tests.stages.optimize import world

    monkeypatch.setattr(trainer, "_SECONDS_BETWEEN_LINES", -1)  # a line after each micro-batch
    config = OptimizeConfig(learning_rate=1e-3, minibatches=2, token_budget=64, seed=1)
    made = [policy]
    with caplog.at_level(logging.INFO, "quiver.stages"):
        for _ in range(2):
            sampled, scored = world.make(store, made[-1], world.even_share)
            refs = {"policy": made[-1].ref, "rollouts": sampled.ref, "rewards": scored.ref}
            ref = run_here("optimize", config, store, **refs)
            made.append(store.open(ref))
    said = [record.getMessage() for record in caplog.records]
    return made[-1], said[said.index(next(line for line in said if line.startswith("step 2:"))) :]


def test_policy_page_lineage_and_progress(store, trained):
    second, said = trained
    pages = shown(store, "optimize", second)
    markdown, audit = pages["policy-tiny"].markdown, second.manifest.metrics["audit"]
    for line in (f"| mean_gap | {audit['mean_gap']:.4g} |", "| steps |", "| **total** |"):
        assert line in markdown
    # both policies' steps: loss, grad_norm, approx_kl, clip_fraction
    assert [len(line) for line in lines(drawn(markdown))] == [4] * 4
    assert "`grpo`, 2 steps, " in pages["policy-tiny"].description
    lineage = {row["version"]: row["made of"] for row in pages["lineage-tiny"].table}
    assert lineage["tiny/policy@2"] == "policy@1, rollouts@2, rewards@2"
    assert set(lineage) == {"tiny/policy@2", "tiny/rollouts@2", "tiny/rewards@2"}
    call = Call("optimize", {"minibatches": 2}, store.url)
    done = Outcome(str(second.ref), False, 0, 1.0, second.manifest.metrics)
    refs = [event["payload"]["ref"] for event in version_events(call, done)]
    assert refs == ["tiny/advantages@2", "tiny/updates@2", "tiny/policy@2"]
    bar, heard = Bar(call), []
    for line in said:
        bar.hear(line)
        heard.append(bar.percent)
    assert heard == sorted(heard) and {50.0, 100.0} <= set(heard)
    assert any(0 < percent < 50 for percent in heard), "within a step, too"


def test_evaluations_before_and_after(store, policy):
    from quiver.stages.evaluate.stage import Config as EvaluateConfig

    sampled = write_rollouts(store, ["a", "b", "c"])
    refs = []
    for values in ([0.0, 1.0, None], [1.0, 1.0, 0.5]):
        scored = write_rewards(store, sampled, values)
        measured = {"rollouts": sampled.ref, "rewards": scored.ref}
        refs.append(run_here("evaluate", EvaluateConfig(), store, **measured))
    other = run_here("evaluate", EvaluateConfig(score="a"), store, **measured)
    alone, after = (shown(store, "evaluate", store.open(ref))["evaluations-tiny"] for ref in refs)
    scores = "**0.5 ± 0.5 (1 left out)**", "**0.8333 ± 0.17**"
    assert alone.description == f"{scores[0]} (no policy)" and "data:image" not in alone.markdown
    sides = f"{scores[0]} before (no policy), {scores[1]} after (no policy)"
    assert after.description == f"{sides}: +0.3333"
    assert [len(line) for line in lines(drawn(after.markdown))] == [2]
    rows = [line for line in after.markdown.splitlines() if line.startswith("| evaluations@")]
    assert rows == [
        "| evaluations@1 | no policy | 0.5 ± 0.5 (1 left out) | 2 | 0.5 |",
        "| evaluations@2 | no policy | 0.8333 ± 0.17 | 3 | 0.6667 |",
    ]
    other = shown(store, "evaluate", store.open(other))["evaluations-tiny"]
    assert "before" not in other.description, "another score is no earlier measurement"


# -- pictures


def test_a_curve_goes_through_its_points():
    """Rising x goes right, larger y up (an SVG's y grows downwards); points without a number are
    left out."""
    points = [(1, 0.0, 0.0), (2, None, 0.0), (3, float("nan"), 0.0), (4, 1.0, 0.0), (5, 0.5, 0.0)]
    (line,) = lines(drawn(picture([Panel("reward", points)], "iteration")))
    (x1, y1), (x4, y4), (x5, y5) = (tuple(map(float, point.split(","))) for point in line)
    assert x1 < x4 < x5 and (x4 - x1) == pytest.approx(3 * (x5 - x4), abs=0.2)
    assert y4 < y5 < y1 and (y1 - y5) == pytest.approx(y5 - y4, abs=0.2)


def test_error_bars_reach_from_end_to_end():
    found = drawn(picture([Panel("score", [(0, 1.0, 0.5), (1, 2.0, 0.0)])], "iteration"))
    (bar,) = [path.get("d") for path in found.iter(f"{SVG}path") if "V" in path.get("d")]
    above, below = map(float, re.fullmatch(r"M\S+ (\S+)V(\S+)", bar).groups())
    (line,) = lines(found)
    (_, low), (_, high) = (tuple(map(float, point.split(","))) for point in line)
    assert below - above == pytest.approx(low - high, abs=0.2), "1 ± 0.5 is as long as from 1 to 2"


def test_a_long_curve_keeps_its_ends_and_few_points():
    points = [(step, float(step), 0.0) for step in range(100_000)]
    made = picture([Panel("loss", points)] * 4, "step")
    found = lines(drawn(made))
    assert [len(line) for line in found] == [plots.MOST_POINTS] * 4
    assert "loss 0 → 1e+05" in made and len(made) < 40_000


def test_what_can_not_be_drawn_is_left_out():
    assert picture([], "step") == picture([Panel("loss", [(1, None, 0.0)])], "step") == ""
    panels = [Panel("<loss> & more", [(1, 0.0, 0.0)]), Panel("none", [])]
    assert [len(line) for line in lines(drawn(picture(panels, "step")))] == [1], "a single point"


# -- the page of a run


def done(iteration: int, reward: float | None, evaluation=None) -> dict:
    return {
        "iteration": iteration,
        "policy": f"tiny/policy@{iteration}",
        "reward_mean": reward,
        "evaluation": evaluation,
        "seconds": {"generate": 1.5, "optimize": 2.0},
    }


def test_the_page_of_a_run_tells_the_curve_in_words_picture_and_rows():
    baseline, last = {"score": 0.25, "stderr": 0.1, "n": 3}, {"score": 0.5, "stderr": None, "n": 1}
    page = iterations_page("tiny", [done(1, 0.2), done(2, None), done(3, 0.6, last)], baseline)
    assert page["key"] == "iterations-tiny"
    told = "3 iterations: mean reward 0.2 → 0.6, held-out score 0.25 ± 0.1 → 0.5 ± –"
    assert page["description"] == told
    assert [len(line) for line in lines(drawn(page["markdown"]))] == [2, 2]
    rows = [row for row in page["markdown"].splitlines() if "tiny/policy" in row]
    assert rows[:2] == [
        "| 3 | tiny/policy@3 | 0.6 | 0.5 ± – | 3.5 |",
        "| 2 | tiny/policy@2 | – |  | 3.5 |",
    ]


def test_the_page_of_a_long_run_stays_small():
    page = iterations_page("tiny", [done(number, number / 7) for number in range(1, 5001)], None)
    assert len(page["markdown"]) < 32_000
    for told in ("The last 100 of 5000 iterations", "tiny/policy@5000"):
        assert told in page["markdown"]


# -- beside the pages


def test_what_can_not_be_shown_is_said_once_and_stops_nothing(caplog):
    with caplog.at_level(logging.INFO, "quiver"):
        for _ in range(3):
            with attempt("a page"):
                raise ValueError("no\nanswer")
    told = "not on Prefect's pages: a page (ValueError: no\\nanswer); the run continues"
    assert caplog.messages == [told]


def test_a_cancelled_run_is_not_held_up():
    with pytest.raises(KeyboardInterrupt), attempt("a page"):
        raise KeyboardInterrupt


def test_the_line_of_a_stage_says_what_has_no_reward():
    evaluated = {"score": 0.5, "null": 3, "limited": 2, "limited_score": 0.0}
    for metrics, told in (
        ({"reward_mean": 0.0, "reward_null": 0}, "reward 0.000"),
        ({"reward_mean": 0.0, "reward_null": 3}, "reward 0.000  3 not scored"),
        (evaluated, "score 0.500 (2 cut off count as 0, 3 left out)"),
    ):
        line = describe("reward 1/1", Outcome("a/rewards@1", False, 8, 1.0, metrics))
        assert line.endswith(f"8 rows  1.0 s  {told}")


def test_without_a_run_of_prefect_there_is_no_page(store):
    """A stage that a shell runs by itself talks to no server."""
    heard = []
    with progress(Call("generate", {}, store.url), heard.append) as on_line:
        on_line("generate: 1 of 2 rows")
        assert "progress" not in {thread.name for thread in threading.enumerate()}
    assert heard == ["generate: 1 of 2 rows"]


# -- the end of `quiver run`


def printed(
    means, store="/my store", baseline=None, evaluation=None, moments=None, report=None
) -> list[str]:
    """Lines after iterations of these mean rewards, the last of them measured."""
    iterations = [
        done(number, mean) | {"rollouts": f"tiny/rollouts@{number}"}
        for number, mean in enumerate(means, 1)
    ]
    iterations[-1]["evaluation"] = evaluation
    recipe = SimpleNamespace(
        run="tiny",
        store=store,
        retention=Retention(moments=moments),
        overlap=0,
        optimize=optimize.Config(learning_rate=1e-5),
    )
    outcome = {"run": "tiny", "report": report, "baseline": baseline, "iterations": iterations}
    commands = next_commands(recipe, Path("recipe.toml"), [], outcome)
    return summary(Path(store), outcome, commands)


def test_what_a_run_prints_at_its_end():
    """A single held-out prompt has no standard error."""
    before, after = {"score": 0.25, "stderr": None, "n": 1}, {"score": 0.5, "stderr": 0.125, "n": 4}
    lines = printed([0.2, None, 0.6], baseline=before, evaluation=after, moments=1, report="a.html")
    assert lines[1:3] == ["store   /my store", "report  a.html"]
    assert not any("report" in line for line in printed([0.2]))
    assert "iteration  reward, 0.000 to 0.600     policy" in lines
    assert f"{2:>9}  {'(none scored)':<26} tiny/policy@2" in lines
    assert "   before  0.250 ± – (standard error, n = 1)" in lines
    assert "after    3  0.500 ± 0.125 (standard error, n = 4)" in lines
    assert [line.strip() for line in lines if line.startswith("  quiver ")] == [
        "quiver optimize recipe.toml --store '/my store' --set optimize.learning_rate=5e-06 "
        "--rollouts tiny/rollouts@3 --set optimize.load_optimizer=false",
        "quiver lineage tiny/policy@3 --store '/my store'",
        "quiver run recipe.toml --store '/my store' --iterations 5",
    ]


@pytest.mark.parametrize("note", ["", "sweep 0123456789ab, cell 1 (7)"])
def test_a_result_that_is_a_sweeps_cell_is_told(store, note):
    """`latest` leaves it out, so that later commands would take another policy."""
    with begin(
        store,
        "tiny",
        "rewards",
        stage="test",
        stage_version=1,
        config=Config(),
        inputs={},
        note=note,
    ) as work:
        work.write(0, rewards.schema_for(["x"]).empty_table())
        work.commit()
    last = done(1, 0.5) | {"rollouts": "tiny/rollouts@1", "policy": "tiny/rewards@1"}
    outcome = {"run": "tiny", "report": None, "baseline": None, "iterations": [last]}
    text = "\n".join(summary(Path(store.url), outcome, ["a", "b", "c"]))
    assert ("which `latest` leaves out" in text) == bool(note)
    assert ("--policy tiny/rewards@1" in text) == bool(note)
    assert (f"quiver tag result tiny/rewards@1 --store {store.url}" in text) == bool(note)


@pytest.mark.parametrize(
    ("means", "bars"),
    [
        ((0.9, 1.0), ("█" * 14, "█" * 15)),
        ((-0.5, 1.0), ("█" * 5, " " * 5 + "█" * 10)),
        ((-1.0, -0.2), ("█" * 15, " " * 12 + "█" * 3)),
        ((0.0, 0.0), ("", "")),
    ],
)
def test_bars_begin_at_0(means, bars):
    """Bars of negative rewards lie to its left."""
    lines = printed(means)
    for number, (mean, bar) in enumerate(zip(means, bars, strict=True), 1):
        assert f"{number:>9}  {f'{mean:6.3f} {bar}':<26} tiny/policy@{number}" in lines


# -- progress


@pytest.mark.parametrize(
    ("stage", "config", "said", "percent"),
    [
        ("prompt", {}, ["prompts: shard 1 of 4"], 25.0),
        ("reward", {}, ["rewards: shard 3 of 4", "length: 9 of 9"], 75.0),
        ("logprobs", {}, ["logprobs: 256 of 1024 rows"], 25.0),
        (
            "optimize",
            {"epochs": 2, "minibatches": 2},
            ["step 10: loss 0.1", "step 11: 1 of 2 micro-batches"],
            37.5,
        ),
        ("optimize", {"epochs": 1}, ["step 3: loss nan", "step 3: loss 1"], 100.0),
    ],
)
def test_lines_of_the_stages(store, stage, config, said, percent):
    bar = Bar(Call(stage, config, store.url))
    for line in said:
        bar.hear(line)
    assert bar.percent == percent


# -- evaluations in trackers

REF = "held/evaluations@1"


@pytest.fixture
def tracked(finished, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(finished / "finished", "finished")
    Path("recipe.toml").write_text(RECIPE)
    optimize = "optimize={trackers=['tensorboard'], tracker_folder='logs'}"
    return load("recipe.toml", ["store=finished", optimize])


def scores() -> list[float]:
    """Of all files: each process that tracks writes one."""
    events = EventAccumulator(f"logs/held-{Store('finished').id[:8]}").Reload()
    if "evaluation/score" not in events.Tags()["scalars"]:
        return []
    return [point.value for point in events.Scalars("evaluation/score")]


def test_an_evaluation_is_tracked_once(tracked):
    """A run that ended between the two is made good by the next."""
    score = Store("finished").open(REF).manifest.metrics["score"]
    for _ in range(2):
        track_evaluation(tracked.optimize, tracked.store, REF, sys.executable)
        assert scores() == [pytest.approx(score, abs=1e-6)]


def test_what_could_not_be_told_is_told_the_next_time(tracked, caplog):
    Path("logs").write_text("in the way")
    with caplog.at_level("WARNING", logger="quiver"):
        track_evaluation(tracked.optimize, tracked.store, REF, sys.executable)
    assert "evaluations@1 was not sent to tensorboard: optimize.trackers tensorboard" in caplog.text
    Path("logs").unlink()
    track_evaluation(tracked.optimize, tracked.store, REF, sys.executable)
    assert len(scores()) == 1
