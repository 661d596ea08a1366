"""Episodes of several turns where people look: `quiver show`, `quiver view` and its application, the
report of a run, and what `quiver run` and Prefect's pages say of them."""

import asyncio
import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from quiver.flows.commands import versions, viewing
from quiver.flows.commands.summary import summary
from quiver.flows.pages import views
from quiver.flows.retention import Retention
from quiver.flows.view.details import details, sections_of
from quiver.stages.common.episodes import measure
from quiver.stages.common.store import Store
from quiver.stages.report import stage as report
from quiver.stages.report.gather import gather
from quiver.stages.report.joined import Selection, open_joined
from quiver.stages.report.paired import pair
from quiver.stages.report.troubles import warnings
from tests import episodes
from tests.episodes import row, turn
from tests.flows.conftest import quiver_each
from tests.stages.optimize import world
from tests.tiny import EOS, make_policy, tokenizer

HOSTILE = "<b>bold</b> \x1b[31mred\u202e"
SEEN = [40, 41]
CALL = json.dumps([{"name": "look_up", "arguments": {"word": "elk"}}])
LATE = json.dumps({"quiver_failure": "no answer within generate.turns.step_seconds 2", "port": 7})
LONG = 60


def ids_of(text: str) -> list[int]:
    return [*tokenizer()(text)["input_ids"], EOS]


def told() -> list[dict]:
    """Four episodes of two prompts: one that used a tool, was not understood and began anew; one
    that failed; one that had no more turns; and a long one."""
    texts = ["seven plus", "eight", "12"]
    ids = [ids_of(text) for text in texts]
    turns = [
        turn(len(ids[0]), SEEN, text=texts[0], tool_calls=CALL, observation=HOSTILE, reward=0.25, seconds=0.5),
        turn(len(ids[1]), text=texts[1], parse_error="no closing tag", observation="Error: again"),
        turn(len(ids[2]), text=texts[2], restart_ids=[20, 21, 22, 23], reward=1.0, info='{"a": 1}'),
    ]  # fmt: skip
    steps = [
        turn(1, [30], text=f"step {number}", observation=f"seen {number}") for number in range(LONG)
    ]
    steps[-1] |= {"observation_ids": [], "finish_reason": "length"}
    return [
        row("a-0", turns, [each for part in ids for each in part]),
        row("a-1", [turn(2, text="x", finish_reason="abort", info=LATE)], end_reason="timeout"),
        row("b-0", [turn(2, text="y", reward=0.5)], end_reason="max_turns"),
        row("b-1", steps, end_reason="max_tokens"),
    ]


def earned(episode: dict) -> list[float] | None:
    """By the number of the turn; the failed one is not scored."""
    if episode["end_reason"] == "timeout":
        return None
    return [float(number + 1) for number in range(len(episode["turns"]))]


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Store:
    """`tiny`: a policy that learned from rollouts of one turn, then one from episodes."""
    store = Store(tmp_path_factory.mktemp("looking") / "store")
    policy = make_policy(store)
    rows = told()
    asked = world.write_prompts(store, rows)
    single = [{k: v for k, v in each.items() if k not in ("turns", "end_reason")} for each in rows]
    for index, each in enumerate(single):
        each["rollout_id"] = f"single-{index}"
    learn = world.config(audit={"enabled": False}, precision="fp32", clip_low=1.0, clip_high=1e9)
    for made, of_turns in ((single, False), (rows, True)):
        rollouts = episodes.write(store, policy, made, prompts=asked, max_tokens=99)
        if of_turns:
            rewards = episodes.write_rewards(store, rollouts, earned)
        else:
            rewards = world.write_rewards(store, rollouts, lambda each: each["sample_index"] * 1.0)
        policy = world.trained(store, policy, (rollouts, rewards), learn)
    return store


# -- quiver show


def test_show_tells_turn_by_turn(store, capsys):
    versions.show("tiny/rewards@2", 1, str(store.path))
    shown = capsys.readouterr().out
    first = shown[shown.index("1 of 4: ") :].split("\n\n")[0].splitlines()
    lengths = [part["length"] for part in told()[0]["turns"]]
    assert first == [
        "1 of 4: a-0",
        "  prompt      a",
        "  columns     n 0",
        f"  turn 0      {lengths[0]} tokens, stop · reward 1 · 0.5 s · then 2 tokens of observation",
        "  sampled     seven plus",
        '  calls       look_up {"word": "elk"}',
        r"  observation │ <b>bold</b> \x1b[31mred\u202e",
        f"  turn 1      {lengths[1]} tokens, stop · reward 2 · 0 s",
        "  sampled     eight",
        "  parse error no closing tag",
        "  observation │ Error: again",
        "  restart     a new sequence begins with 4 tokens: the history was rewritten",
        f"  turn 2      {lengths[2]} tokens, stop · reward 3 · 0 s",
        "  sampled     12",
        '  info        {"a": 1}',
        f"  ended by    answered, after 3 turns and {sum(lengths)} tokens",
        "  reward      6",
        "  parts       f 6",
        *[line for line in first if line.startswith("  advantage")],
    ]


def test_show_tells_why_an_episode_failed_and_cuts_a_long_one(store, capsys):
    versions.show("tiny/rollouts@2", 4, str(store.path))
    shown = capsys.readouterr().out
    assert "  failure     no answer within generate.turns.step_seconds 2" in shown
    assert '  info        {"port": 7}' in shown
    last = shown[shown.index("4 of 4: ") :]
    assert last.count("  sampled ") == 20 and "  left out    40 turns" in last
    assert "step 16" in last and "step 17" not in last and "step 57" in last
    assert "ended by    max_tokens, after 60 turns and 60 tokens" in last


def test_rewards_of_an_environment_are_shown_where_no_others_are(store, capsys, tmp_path):
    alone = Store(tmp_path / "store")
    rollouts = episodes.write(alone, make_policy(alone), told())
    versions.show(str(rollouts.ref), 1, str(alone.path))
    shown = capsys.readouterr().out
    assert "stop · environment's reward 0.25 · 0.5 s" in shown
    assert shown.count("environment's reward") == 2, "the second turn has none"


def test_calls_and_infos_of_any_content_are_only_text(capsys, tmp_path):
    """What is no JSON is shown as it is; half a character is spelt out."""
    odd = [r'["x", {"name": 3}, "\ud800"]', "{", '{"name": "f", "arguments": [1]}', "null"]
    turns = [turn(1, text="t", tool_calls=calls, info=calls) for calls in odd]
    alone = Store(tmp_path / "store")
    rollouts = episodes.write(alone, make_policy(alone), [row("a-0", turns)])
    versions.show(str(rollouts.ref), 1, str(alone.path))
    shown = capsys.readouterr().out
    assert 'calls       x\n              {"name": 3}\n              \\ud800' in shown
    assert "calls       {\n" in shown and "calls       f [1]\n" in shown
    assert all(character.isprintable() or character == "\n" for character in shown)


def test_show_sums_up_how_episodes_went(store, capsys):
    versions.show("tiny/rollouts@2", 0, str(store.path))
    lines = capsys.readouterr().out.splitlines()
    observed = 2 + (LONG - 1)
    expected = [
        f"  turns       {(3 + 1 + 1 + LONG) / 4:.4g} on average, 60 at most",
        "  ended by    answered 1 (25.0%) · max_tokens 1 (25.0%) · max_turns 1 (25.0%)"
        " · timeout 1 (25.0%)",
        "  tool calls  1, 0.25 an episode",
        "  parse error in 1 of 65 turns (1.5%)",
        "  failed      1 of 4 episodes (25.0%)",
        f"  observation {observed / 4:.4g} tokens an episode, 2 tokens at most after a turn",
        "  restarts    1 sequence begun anew",
        "  environment 0.125 s an episode, 0.5 s at most in one turn",
    ]
    assert lines[lines.index(expected[0]) :] == expected


@pytest.fixture(scope="module")
def answers(store, tmp_path_factory) -> list[dict]:
    """What three commands print with --json."""
    calls = ["show", "tiny/rollouts@1"], ["show", "tiny/rollouts@2"], ["view", "tiny/rewards@2"]
    path = str(store.path)
    done = quiver_each(tmp_path_factory.mktemp("json"), *([*c, "--store", path] for c in calls))
    return [answer for _, answer in done]


def test_the_json_of_show_has_the_same_as_plain_keys(answers):
    single, answer, _ = answers
    assert "episodes" not in single
    rows = told()
    turns = [part for each in rows for part in each["turns"]]
    assert answer["episodes"] == {
        "rollouts": 4,
        "turns": len(turns),
        "mean_turns": len(turns) / 4,
        "max_turns": LONG,
        "end_reasons": {"answered": 1, "max_tokens": 1, "max_turns": 1, "timeout": 1},
        "failed": 1,
        "failed_share": 0.25,
        "timeouts": {"step_seconds": 1},
        "tool_calls": 1,
        "mean_tool_calls": 0.25,
        "parse_errors": 1,
        "parse_error_share": 1 / len(turns),
        "mean_observation_tokens": sum(len(part["observation_ids"]) for part in turns) / 4,
        "max_observation_tokens": 2,
        "max_limited_tokens": LONG,
        "restarts": 1,
        "environment_seconds": 0.5,
        "max_seconds": 0.5,
    }


def test_no_rows_are_no_episodes():
    numbers = measure(episodes.table_of(told()).slice(0, 0))
    assert (numbers["rollouts"], numbers["mean_turns"], numbers["failed_share"]) == (0, None, None)


# -- quiver view


def test_a_plain_table_has_turns_and_end_reasons(store, capsys):
    viewing.view("tiny/rewards@2", sort="turns", descending=True, store=str(store.path))
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split()[:5] == ["row", "reward", "tokens", "turns", "end_reason"]
    assert [cells.split()[3:5] for cells in rows] == [
        ["60", "max_tokens"], ["3", "answered"], ["1", "timeout"], ["1", "max_turns"],
    ]  # fmt: skip
    viewing.view("tiny/rewards@1", store=str(store.path))
    assert capsys.readouterr().out.split()[:4] == ["row", "reward", "tokens", "end"]


def test_episodes_are_filtered_and_searched_in_every_turn(store):
    joined = open_joined(store, "tiny/rollouts@2")

    def meant(**selection) -> list[int]:
        return list(joined.order(Selection(**selection)))

    assert meant(where="end_reason = timeout") == [1]
    assert meant(where="end_reason != timeout, turns > 1") == [0, 3]
    assert meant(where="parse_errors = 1") == meant(where="tool_calls = 1") == [0]
    assert meant(sort="observation_tokens", descending=True) == [3, 0, 1, 2]
    assert meant(search="STEP 33") == meant(search="seen 33") == [3]
    assert meant(search="nowhere") == []


def test_the_json_of_view_has_turns_without_their_ids(answers):
    shown = answers[2]["rows"][0]
    assert (shown["end_reason"], shown["turn_rewards"]) == ("answered", [1.0, 2.0, 3.0])
    first, _, last = shown["turns"]
    assert first["tool_calls"] == json.loads(CALL) and last["info"] == {"a": 1}
    assert [part["observation_tokens"] for part in shown["turns"]] == [2, 0, 0]
    assert [part["restart_tokens"] for part in shown["turns"]] == [None, None, 4]
    assert not {"observation_ids", "restart_ids"} & set(first)


def test_what_was_sampled_is_coloured_turn_by_turn(store):
    """Every sampled token has the colour of its logprob, and no token of an observation has."""
    joined = open_joined(store, "tiny/rewards@2")
    (episode,) = joined.rows([0])
    sections = sections_of(joined, episode, "logprob", 100)
    assert [section.turn for section in sections] == [None, 0, 1, 2, None]
    for section, part in zip(sections[1:-1], told()[0]["turns"], strict=True):
        text = section.text
        coloured = [span for span in text.spans if "on rgb" in str(span.style)]
        assert len(coloured) == part["length"]
        sampled = "".join(text.plain[span.start : span.end] for span in coloured)
        assert sampled == f"{part['text']}<|im_end|>"
    (observed,) = [span for span in sections[1].text.spans if str(span.style) == "italic green"]
    spelt = r"<b>bold</b> \x1b[31mred\u202e"
    assert spelt in sections[1].text.plain[observed.start : observed.end]
    assert "a new sequence begins with 4 tokens" in sections[3].text.plain


def test_a_long_episode_is_cut_in_the_list(store):
    joined = open_joined(store, "tiny/rollouts@2")
    (episode,) = joined.rows([3])
    shown = details(joined, episode, "logprob", 100, "", 12).plain
    assert "left out    48 turns" in shown and "turn 8 " in shown and "turn 59 " in shown
    assert "turn 30 " not in shown


def drive(app, *steps, size=(120, 40)) -> list[str]:
    """What the screen says at first and after each step, a list of keys."""
    shown = []

    async def run() -> None:
        async with app.run_test(size=size) as pilot:
            for keys in ([], *steps):
                await pilot.press(*keys)
                await app.workers.wait_for_complete()
                await pilot.pause()
                strips = app.screen._compositor.render_strips()
                shown.append("\n".join(strip.text for strip in strips))

    asyncio.run(run())
    return shown


@pytest.fixture
def view_app():
    pytest.importorskip("textual")
    from quiver.flows.view.app import ViewApp

    return ViewApp


def test_an_episode_opens_turn_by_turn(view_app, store):
    app = view_app(store, pair(store, "tiny/rewards@2", None))
    steps = ["enter"], ["n", "n"], ["n"], ["p"]
    rows, tokens, second, third, back = drive(app, *steps, size=(120, 16))
    assert "end_reason" in rows and "max_tokens" in rows
    assert "turn 0 " in tokens and "Next turn" in tokens
    assert "turn 1 " in second.splitlines()[0] and "parse error no closing tag" in second
    assert "a new sequence begins with 4 tokens: the history" in third.splitlines()[0]
    assert "— a new sequence begins with 4 tokens —" in third, "the table goes there too"
    assert "turn 1 " in back.splitlines()[0]


def test_the_screen_of_a_rollout_says_what_was_observed(view_app, store):
    app = view_app(store, pair(store, "tiny/rewards@2", None))
    rows, shown = drive(app, ["enter"], size=(120, 80))
    for screen in (rows, shown):
        assert 'calls       look_up {"word": "elk"}' in screen
        assert r"observation │ <b>bold</b> \x1b[31mred\u202e" in screen
    table = shown[shown.index(" id ") :].splitlines()[1:]
    cells = [line.split() for line in table if line.split()[:1] == ["0"]]
    length = told()[0]["turns"][0]["length"]
    assert len(cells) == length + 2
    assert [line[1] for line in cells[:length]] == [str(n) for n in range(1, length + 1)]
    assert [line[-1] for line in cells[length:]] == list(map(str, SEEN)), "and no logprob"


def test_a_long_episode_is_gone_through(view_app, store):
    app = view_app(
        store, pair(store, "tiny/rewards@2", None), Selection(sort="turns", descending=True)
    )
    *_, middle, end = drive(app, ["enter"], ["n"] * 30, ["n"] * 32)
    assert "turn 29 " in middle.splitlines()[0] and "│ seen 29" in middle
    assert "ended by" in end and "max_tokens, after 60 turns" in end


def test_one_turn_has_no_keys_for_turns(view_app, store):
    app = view_app(store, pair(store, "tiny/rewards@1", None))
    rows, tokens = drive(app, ["enter"])
    assert "end_reason" not in rows and "Next turn" not in tokens
    assert "completion, by logprob" in tokens


# -- the report


@pytest.fixture(scope="module")
def page(store) -> str:
    return report.render(store, gather(store, "tiny"))


def test_samples_of_the_report_show_turns(page):
    assert '<pre class="policy">seven plus</pre>' in page
    assert '<pre class="policy">calls: look_up {&#34;word&#34;: &#34;elk&#34;}</pre>' in page
    assert '<pre class="error">parse error: no closing tag</pre>' in page
    assert r'<pre class="observation">&lt;b&gt;bold&lt;/b&gt; \x1b[31mred\u202e</pre>' in page
    assert "restart: a new sequence begins with 4 tokens" in page
    assert "<td>answered, after 3 turns</td>" in page and "left out: 52 turns" in page


def test_an_iteration_of_the_report_says_how_its_episodes_went(store, page):
    """That with rollouts of one turn has no line there, and stays in the other tables."""
    start = page.index('<h2 id="episodes">')
    table = page[start : page.index("</section>", start)]
    assert table.count("<tr>") == 2 and "tiny/rollouts@2" in table
    for cell in ("16.25", "60", "25.0%", "1.5%", "15.25", "0.125"):
        assert f">{cell}</td>" in table
    assert "answered 1 (25.0%) · max_tokens 1 (25.0%)" in table
    first, second = gather(store, "tiny").iterations
    assert first.episodes is None and second.episodes["turns"] == 65
    assert "tiny/rollouts@1" in page and "turns of an episode" in page


def test_a_run_without_episodes_has_no_word_of_them(store):
    gathered = gather(store, "tiny")
    single = dataclasses.replace(gathered, iterations=gathered.iterations[:1])
    shown = report.render(store, single)
    assert "Episodes" not in shown and "pre.observation" not in shown
    assert "turns of an episode" not in shown


def test_a_run_of_episodes_stands_beside_one_without(store):
    gathered = gather(store, "tiny")
    single = dataclasses.replace(gathered, run="other", iterations=gathered.iterations[:1])
    assert report.render(store, single, gathered).count('id="episodes"') == 1
    assert report.render(store, gathered, single).count('id="episodes"') == 1


HEALTHY = {"answered": 96, "timeout": 4}
LIMITS = {"turns": {"max_turns": 4, "max_tokens": 100}}


@pytest.mark.parametrize(
    ("changes", "config", "expected"),
    [
        ({}, {}, []),
        (
            {"end_reasons": {"answered": 92, "timeout": 8}, "timeouts": {"episode_seconds": 8}},
            {},
            [
                "8% of the episodes failed (8 timeout), and teach nothing: raise "
                "generate.turns.episode_seconds."
            ],
        ),
        (
            {"end_reasons": {"answered": 90, "timeout": 4, "environment_error": 6}},
            {},
            [
                "10% of the episodes failed (4 timeout, 6 environment_error), and teach nothing: "
                '`quiver view tiny/rollouts@2 --where "end_reason = environment_error"` tells why.'
            ],
        ),
        (
            {"end_reasons": {"answered": 40, "max_turns": 45, "max_tokens": 15}},
            LIMITS,
            [
                "60% of the episodes ended by a limit, most by max_turns: raise "
                "generate.turns.max_turns."
            ],
        ),
        ({"end_reasons": {"answered": 60, "max_turns": 40}}, LIMITS, []),
        (
            {"end_reasons": {"max_tokens": 100}, "max_limited_tokens": 100},
            LIMITS,
            [
                "100% of the episodes ended by a limit, most by max_tokens: raise "
                "generate.turns.max_tokens."
            ],
        ),
        (
            {"end_reasons": {"max_tokens": 100}, "max_limited_tokens": 70},
            LIMITS,
            [
                "100% of the episodes ended by a limit, most by max_tokens: raise "
                "generate.sampling.max_tokens."
            ],
        ),
        (
            {"end_reasons": {"context": 100}},
            {"max_model_len": 512},
            [
                "100% of the episodes ended by a limit, most by context: raise "
                "generate.max_model_len."
            ],
        ),
        (
            {"end_reasons": {"context": 100}},
            {"max_model_len": None},
            [
                "100% of the episodes ended by a limit, most by context: lower "
                "generate.turns.max_observation_tokens."
            ],
        ),
        (
            {"parse_error_share": 0.25},
            {},
            [
                "in 25% of the turns no tool call could be read: set generate.turns.parser to the "
                "format that the policy writes."
            ],
        ),
    ],
)
def test_troubles_of_episodes_name_the_key_that_helps(store, changes, config, expected):
    gathered = gather(store, "tiny")
    last = gathered.iterations[-1]
    numbers = {**last.episodes, "rollouts": 100, "parse_error_share": 0.1, "timeouts": {}}
    numbers |= {"end_reasons": HEALTHY, **changes}
    rollouts = last.rollouts.model_copy(update={"config": config})
    last = dataclasses.replace(last, episodes=numbers, rollouts=rollouts)
    gathered = dataclasses.replace(gathered, iterations=[last])
    sentences = [text for text in warnings(gathered) if text.startswith("tiny/rollouts@2")]
    assert sentences == [f"tiny/rollouts@2: {text}" for text in expected]


def test_troubles_are_counted_in_the_rows_and_stand_on_the_page(page):
    told = (
        "tiny/rollouts@2: 25% of the episodes failed (1 timeout), and teach nothing: raise "
        "generate.turns.step_seconds. So in 1 of 2 iterations."
    )
    assert f'<p class="warn">{told}</p>' in page


def test_an_episode_at_its_limit_is_no_completion_at_the_limit(store):
    """`generate.sampling.max_tokens` is not what ends an episode."""
    gathered = gather(store, "tiny")
    last = gathered.iterations[-1]
    assert last.length_share == 0.25
    alone = dataclasses.replace(gathered, iterations=[last])
    assert not any("sampling.max_tokens" in text for text in warnings(alone))


# -- what a run and Prefect's pages say


@pytest.mark.parametrize(("number", "says"), [(1, False), (2, True)])
def test_what_a_run_prints_at_its_end_sums_up_its_episodes(store, number, says):
    done = {"iteration": 1, "policy": f"tiny/policy@{number}", "reward_mean": 1.0}
    done |= {"rollouts": f"tiny/rollouts@{number}", "evaluation": None}
    recipe = SimpleNamespace(
        run="tiny",
        store=str(store.path),
        retention=Retention(),
        overlap=0,
        optimize=SimpleNamespace(learning_rate=1e-5),
    )
    outcome = {"baseline": None, "iterations": [done]}
    lines = summary(recipe, Path("recipe.toml"), [], outcome)
    assert (f"episodes of tiny/rollouts@{number}" in lines) == says
    assert ("   turns        16.25 on average, 60 at most" in lines) == says


def test_a_page_of_rollouts_has_turns_and_end_reasons(store):
    pages = [views.rollouts(store, store.open(f"tiny/rollouts@{number}"))[0] for number in (1, 2)]
    single, several = (page.table for page in pages)
    assert set(single[0]) == {"tokens", "finish_reason", "prompt", "completion"}
    assert [(line["turns"], line["end_reason"]) for line in several] == [
        (3, "answered"), (1, "timeout"), (1, "max_turns"), (60, "max_tokens"),
    ]  # fmt: skip
