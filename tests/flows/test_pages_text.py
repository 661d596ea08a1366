"""What is put into Prefect's pages, without a server: text that stays text, pictures that are
pictures, sizes that stay bounded."""

import base64
import logging
import re
import threading
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from quiver.flows.commands.summary import summary
from quiver.flows.pages import iterations, text
from quiver.flows.pages.text import attempt, picture
from quiver.flows.progress import progress
from quiver.flows.retention import Retention
from quiver.flows.tasks import describe
from quiver.stages.common.runtime.runner import Call, Outcome
from quiver.stages.report import plots, templates, words
from quiver.stages.report.plots import Panel

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


@pytest.mark.parametrize("hostile", HOSTILE, ids=range(len(HOSTILE)))
def test_foreign_text_is_one_code_span_on_one_line(hostile):
    shown = templates.quoted(hostile)
    assert shown.startswith("`") and shown.endswith("`") and "`" not in shown[1:-1], (
        "the span cannot be left"
    )
    assert shown.isprintable() and len(shown) <= templates.SPAN_LIMIT + 2
    assert shown.endswith("…`") == (len(hostile) > templates.SPAN_LIMIT)


def test_ordinary_text_is_shown_as_it_is():
    assert templates.quoted("It is 12.") == "`It is 12.`"
    assert templates.quoted("two\nlines") == "`two\\nlines`"
    assert templates.quoted("") == "", (
        "an empty span would be two backticks, which begin a longer one"
    )


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


def test_numbers():
    assert [words.number(value) for value in (None, 0, 12345, 0.5, 1234.5678)] == [
        "–",
        "0",
        "12,345",
        "0.5",
        "1235",
    ]
    assert [words.size(count) for count in (0, 999, 13_100, 2_500_000_000)] == [
        "0 B",
        "999 B",
        "13.1 kB",
        "2.5 GB",
    ]
    assert (
        words.score_of({"score": 0.41234, "stderr": 0.03867}) == "0.4123 ± 0.039"
        and words.score_of({"score": 1.0, "stderr": None}) == "1 ± –"
    )


def test_a_key_is_one_run_s():
    assert text.key("rewards", "my-run") == "rewards-my-run"
    names = ("my-run-eval", "my_run.eval", "my-run.eval", "my.run_eval")
    keys = {text.key("rewards", name) for name in names}
    assert len(keys) == len(names) and all(
        re.fullmatch("rewards-my-run-eval(-[0-9a-f]{6})?", key) for key in keys
    )


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
    (line,) = lines(
        drawn(picture([Panel("<loss> & more", [(1, 0.0, 0.0)]), Panel("none", [])], "step"))
    )
    assert len(line) == 1, "a single point"


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
    page = iterations.page("tiny", [done(1, 0.2), done(2, None), done(3, 0.6, last)], baseline)
    assert page["key"] == "iterations-tiny"
    assert (
        page["description"]
        == "3 iterations: mean reward 0.2 → 0.6, held-out score 0.25 ± 0.1 → 0.5 ± –"
    )
    assert [len(line) for line in lines(drawn(page["markdown"]))] == [2, 2]
    rows = [row for row in page["markdown"].splitlines() if "tiny/policy" in row]
    assert rows[:2] == [
        "| 3 | tiny/policy@3 | 0.6 | 0.5 ± – | 3.5 |",
        "| 2 | tiny/policy@2 | – |  | 3.5 |",
    ]


def test_the_page_of_a_long_run_stays_small():
    page = iterations.page("tiny", [done(number, number / 7) for number in range(1, 5001)], None)
    assert len(page["markdown"]) < 32_000
    assert (
        "The last 100 of 5000 iterations" in page["markdown"]
        and "tiny/policy@5000" in page["markdown"]
    )


# -- beside the pages


def test_what_can_not_be_shown_is_said_once_and_stops_nothing(caplog):
    class Unheard(Exception):
        pass

    with caplog.at_level(logging.INFO, "quiver"):
        for _ in range(3):
            with attempt("a page"):
                raise Unheard("no\nanswer")
    (record,) = caplog.records
    assert (
        record.getMessage()
        == "not on Prefect's pages: a page (Unheard: no\\nanswer); the run goes on"
    )


def test_a_cancelled_run_is_not_held_up():
    with pytest.raises(KeyboardInterrupt), attempt("a page"):
        raise KeyboardInterrupt


def test_the_line_of_a_stage_says_what_has_no_reward():
    said = {
        null: describe(
            "reward 1/1",
            Outcome("a/rewards@1", False, 8, 1.0, {"reward_mean": 0.0, "reward_null": null}),
        )
        for null in (0, 3)
    }
    assert said[0].endswith("8 rows  1.0 s  reward 0.000")
    assert said[3].endswith("8 rows  1.0 s  reward 0.000  3 not scored")
    told = {"score": 0.5, "null": 3, "limited": 2, "limited_score": 0.0}
    evaluated = describe("evaluate policy@2", Outcome("a/evaluations@1", False, 8, 1.0, told))
    assert evaluated.endswith("8 rows  1.0 s  score 0.500 (2 cut off count as 0, 3 left out)")


def test_without_a_run_of_prefect_there_is_no_page(store):
    """A stage that a shell runs by itself talks to no server."""
    heard = []
    with progress(Call("generate", {}, store.path), heard.append) as on_line:
        on_line("generate: 1 of 2 rows")
        assert "progress" not in {thread.name for thread in threading.enumerate()}
    assert heard == ["generate: 1 of 2 rows"]


def test_what_a_run_prints_at_its_end():
    """Bars from 0 to each mean reward; a single held-out prompt has no standard error."""
    baseline = {"score": 0.25, "stderr": None, "n": 1}
    outcome = {
        "baseline": baseline,
        "iterations": [
            {**done(1, 0.2), "rollouts": "tiny/rollouts@1"},
            {**done(2, None), "rollouts": "tiny/rollouts@2"},
            {
                **done(3, 0.6, {"score": 0.5, "stderr": 0.125, "n": 4}),
                "rollouts": "tiny/rollouts@3",
            },
        ],
    }
    recipe = SimpleNamespace(
        run="tiny",
        store="/my store",
        retention=Retention(moments=1),
        overlap=0,
        optimize=SimpleNamespace(learning_rate=1e-5),
    )
    said = summary(recipe, Path("recipe.toml"), [], outcome)
    assert said[1:3] == ["store   /my store", "report  /my store/tiny/report.html"]
    assert "iteration  reward, 0.000 to 0.600     policy" in said
    bars = {1: f" 0.200 {'█' * 5}", 2: "(none scored)", 3: f" 0.600 {'█' * 15}"}
    for number, bar in bars.items():
        assert f"{number:>9}  {bar:<26} tiny/policy@{number}" in said
    assert "   before  0.250 ± – (standard error, n = 1)" in said
    assert "after    3  0.500 ± 0.125 (standard error, n = 4)" in said
    commands = [line.strip() for line in said if line.startswith("  quiver ")]
    assert commands == [
        "quiver optimize recipe.toml --store '/my store' --set optimize.learning_rate=5e-06 "
        "--rollouts tiny/rollouts@3 --set optimize.load_optimizer=false",
        "quiver lineage tiny/policy@3 --store '/my store'",
        "quiver run recipe.toml --store '/my store' --iterations 5",
    ]


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
    """Those of negative rewards lie to its left."""
    outcome = {
        "baseline": None,
        "iterations": [
            {**done(number, mean), "rollouts": f"tiny/rollouts@{number}"}
            for number, mean in enumerate(means, 1)
        ],
    }
    recipe = SimpleNamespace(
        run="tiny",
        store="/my store",
        retention=Retention(),
        overlap=0,
        optimize=SimpleNamespace(learning_rate=1e-5),
    )
    said = summary(recipe, Path("recipe.toml"), [], outcome)
    for number, (mean, bar) in enumerate(zip(means, bars, strict=True), 1):
        shown = f"{mean:6.3f} {bar}"
        assert f"{number:>9}  {shown:<26} tiny/policy@{number}" in said
