"""Episodes of several turns where people look: `quiver show`, `quiver view` and its application, the
report of a run, and Prefect's pages."""

import dataclasses
import json

import pytest

from quiver.flows.cli import versions, viewing
from quiver.flows.look import stage as report
from quiver.flows.look.gather import gather
from quiver.flows.look.joined import Selection, open_joined
from quiver.flows.look.pages import views
from quiver.flows.look.troubles import warnings
from quiver.flows.look.view.details import sections_of
from quiver.stages.core.store import Store
from quiver.stages.turns.statistics import first_failure, measure
from tests import episodes
from tests.episodes import row, turn
from tests.flows.test_pages_text import printed
from tests.flows.test_view import look
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
    versions.show("tiny/rewards@2", 1, store.url)
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
    versions.show("tiny/rollouts@2", 4, store.url)
    shown = capsys.readouterr().out
    assert "  failure     no answer within generate.turns.step_seconds 2" in shown
    assert '  info        {"port": 7}' in shown
    last = shown[shown.index("4 of 4: ") :]
    assert last.count("  sampled ") == 20 and "  left out    40 turns" in last
    assert "step 16" in last and "step 17" not in last and "step 57" in last
    assert "ended by    max_tokens, after 60 turns and 60 tokens" in last


def test_rewards_of_an_environment_and_odd_calls_are_shown(capsys, tmp_path):
    """Without other rewards; what is no JSON is shown as it is, half a character spelt out."""
    odd = [r'["x", {"name": 3}, "\ud800"]', "{", '{"name": "f", "arguments": [1]}', "null"]
    turns = [turn(1, text="t", tool_calls=calls, info=calls, reward=0.25) for calls in odd]
    turns[1]["reward"] = None
    store = Store(tmp_path / "store")
    rollouts = episodes.write(store, make_policy(store), [row("a-0", turns)])
    versions.show(str(rollouts.ref), 1, store.url)
    shown = capsys.readouterr().out
    assert shown.count("stop · environment's reward 0.25 · 0 s") == 3
    assert 'calls       x\n              {"name": 3}\n              \\ud800' in shown
    assert "calls       {\n" in shown and "calls       f [1]\n" in shown
    assert all(character.isprintable() or character == "\n" for character in shown)


def test_show_sums_up_how_episodes_went(store, capsys, in_json):
    path = store.url
    versions.show("tiny/rollouts@2", 0, path)
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
    assert "episodes" not in in_json(versions.show, "tiny/rollouts@1", store=path)
    numbers = measure(episodes.table_of(told()))
    assert in_json(versions.show, "tiny/rollouts@2", store=path)["episodes"] == numbers
    assert (numbers["timeouts"], numbers["max_limited_tokens"]) == ({"step_seconds": 1}, LONG)
    empty = measure(episodes.table_of(told()).slice(0, 0))
    assert (empty["rollouts"], empty["mean_turns"], empty["failed_share"]) == (0, None, None)


def test_a_run_prints_how_its_last_episodes_went(store):
    single, several = (printed([1.0] * count, store.url) for count in (1, 2))
    assert not any(line.startswith("episodes of") for line in single)
    start = several.index("episodes of tiny/rollouts@2")
    assert several[start + 1] == "   turns        16.25 on average, 60 at most"


# -- quiver view


def test_a_plain_table_has_turns_and_end_reasons(store, capsys, in_json):
    path = store.url
    viewing.view("tiny/rewards@2", sort="turns", descending=True, store=path)
    _, header, *rows = capsys.readouterr().out.splitlines()
    assert header.split()[:5] == ["row", "reward", "tokens", "turns", "end_reason"]
    assert [cells.split()[3:5] for cells in rows] == [
        ["60", "max_tokens"], ["3", "answered"], ["1", "timeout"], ["1", "max_turns"],
    ]  # fmt: skip
    viewing.view("tiny/rewards@1", store=path)
    _, header, *_ = capsys.readouterr().out.splitlines()
    assert header.split()[:4] == ["row", "reward", "tokens", "end"]
    shown = in_json(viewing.view, "tiny/rewards@2", store=path)["rows"][0]
    assert (shown["end_reason"], shown["turn_rewards"]) == ("answered", [1.0, 2.0, 3.0])
    first, _, last = shown["turns"]
    assert first["tool_calls"] == json.loads(CALL) and last["info"] == {"a": 1}
    assert [part["observation_tokens"] for part in shown["turns"]] == [2, 0, 0]
    assert [part["restart_tokens"] for part in shown["turns"]] == [None, None, 4]
    assert not {"observation_ids", "restart_ids"} & set(first)


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        ({"where": "end_reason = timeout"}, [1]),
        ({"where": "end_reason != timeout, turns > 1"}, [0, 3]),
        ({"where": "parse_errors = 1"}, [0]),
        ({"where": "tool_calls = 1"}, [0]),
        ({"sort": "observation_tokens", "descending": True}, [3, 0, 1, 2]),
        ({"search": "STEP 33"}, [3]),
        ({"search": "seen 33"}, [3]),
        ({"search": "nowhere"}, []),
    ],
)
def test_episodes_are_filtered_and_searched_in_every_turn(store, selection, expected):
    order = open_joined(store, "tiny/rollouts@2").order(Selection(**selection))
    assert list(order) == expected


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
    cut = sections_of(joined, joined.rows([3])[0], "logprob", 100, most_turns=12)
    assert [section.turn for section in cut] == [None, *range(9), None, 57, 58, 59, None]
    assert cut[10].text.plain == "  left out    48 turns"


def test_an_episode_opens_turn_by_turn(store):
    steps = ["enter"], ["n", "n"], ["n"], ["p"]
    rows, tokens, second, third, back = look(store, "tiny/rewards@2", *steps, size=(120, 16))
    assert "end_reason" in rows and "max_tokens" in rows
    assert "turn 0 " in tokens and "Next turn" in tokens
    assert "turn 1 " in second.splitlines()[0] and "parse error no closing tag" in second
    assert "a new sequence begins with 4 tokens: the history" in third.splitlines()[0]
    assert "— a new sequence begins with 4 tokens —" in third, "the table goes there too"
    assert "turn 1 " in back.splitlines()[0]


def test_the_screen_of_a_rollout_says_what_was_observed(store):
    rows, shown = look(store, "tiny/rewards@2", ["enter"], size=(120, 80))
    for screen in (rows, shown):
        assert 'calls       look_up {"word": "elk"}' in screen
        assert r"observation │ <b>bold</b> \x1b[31mred\u202e" in screen
    table = shown[shown.index(" id ") :].splitlines()[1:]
    cells = [line.split() for line in table if line.split()[:1] == ["0"]]
    length = told()[0]["turns"][0]["length"]
    assert len(cells) == length + 2
    assert [line[1] for line in cells[:length]] == [str(n) for n in range(1, length + 1)]
    assert [line[-1] for line in cells[length:]] == list(map(str, SEEN)), "and no logprob"


# -- the report


def test_the_report_shows_turns_and_how_episodes_went(store):
    """An iteration with rollouts of one turn has no line there, and stays in the other tables."""
    gathered = gather(store, "tiny")
    page = report.render(store, gathered)
    for text in (
        '<pre class="sampled">seven plus</pre>',
        '<pre class="policy">calls: look_up {&#34;word&#34;: &#34;elk&#34;}</pre>',
        '<pre class="error">parse error: no closing tag</pre>',
        r'<pre class="observation">&lt;b&gt;bold&lt;/b&gt; \x1b[31mred\u202e</pre>',
        "restart: a new sequence begins with 4 tokens",
        "<td>answered, after 3 turns</td>",
        "left out: 52 turns",
        "turns of an episode",
        '<p class="warn">tiny/rollouts@2: 25% of the episodes failed (1 timeout), and teach '
        "nothing: raise generate.turns.step_seconds (in 1 of 2 iterations).</p>",
    ):
        assert text in page
    start = page.index('<h2 id="episodes">')
    table = page[start : page.index("</section>", start)]
    assert table.count("<tr>") == 2 and "tiny/rollouts@2" in table
    for cell in ("16.25", "60", "25.0%", "1.5%", "15.25", "0.125"):
        assert f">{cell}</td>" in table
    assert "answered 1 (25.0%) · max_tokens 1 (25.0%)" in table
    single = dataclasses.replace(gathered, run="other", iterations=gathered.iterations[:1])
    for word in ("Episodes", "pre.observation", "turns of an episode"):
        assert word not in report.render(store, single)
    for pair_of_runs in ((single, gathered), (gathered, single)):
        assert report.render(store, *pair_of_runs).count('id="episodes"') == 1


@pytest.mark.parametrize("info", ["[" * 101 + "]" * 101, '{"f": 1' + "0" * 310 + "}", "[7]"])
def test_a_failure_whose_info_can_not_be_read_is_unknown(info):
    turns = [episodes.turn(1, info=info)]
    table = episodes.table_of([episodes.row("a-0", turns, end_reason="environment_error")])
    assert first_failure(table) is None


FAILED = "of the episodes failed"
LIMITED = "100% of the episodes ended by a limit, most by"


@pytest.mark.parametrize(
    ("ends", "changes", "config", "expected"),
    [
        ({"answered": 96, "timeout": 4}, {}, {}, ""),
        (
            {"answered": 92, "timeout": 8}, {"timeouts": {"episode_seconds": 8}}, {},
            f"8% {FAILED} (8 timeout), and teach nothing: raise generate.turns.episode_seconds.",
        ),
        (
            {"answered": 90, "timeout": 4, "environment_error": 6}, {}, {},
            f"10% {FAILED} (4 timeout, 6 environment_error), and teach nothing: "
            '`quiver view tiny/rollouts@2 --where "end_reason = environment_error"` tells why.',
        ),
        (
            {"answered": 40, "max_turns": 45, "max_tokens": 15}, {}, {},
            "60% of the episodes ended by a limit, most by max_turns: raise "
            "generate.turns.max_turns.",
        ),
        ({"answered": 60, "max_turns": 40}, {}, {}, ""),
        (
            {"max_tokens": 100}, {"max_limited_tokens": 100}, {"turns": {"max_tokens": 100}},
            f"{LIMITED} max_tokens: raise generate.turns.max_tokens.",
        ),
        (
            {"max_tokens": 100}, {"max_limited_tokens": 70}, {"turns": {"max_tokens": 100}},
            f"{LIMITED} max_tokens: raise generate.sampling.max_tokens.",
        ),
        (
            {"context": 100}, {}, {"max_model_len": 512},
            f"{LIMITED} context: raise generate.max_model_len.",
        ),
        (
            {"context": 100}, {}, {"max_model_len": None},
            f"{LIMITED} context: lower generate.turns.max_observation_tokens.",
        ),
        (
            {"max_observation_tokens": 100}, {}, {"max_model_len": None},
            f"{LIMITED} max_observation_tokens: raise generate.turns.max_observation_tokens.",
        ),
        (
            {"answered": 100}, {"parse_error_share": 0.25}, {},
            "in 25% of the turns no tool call could be read: set generate.turns.parser to the "
            "format that the policy writes.",
        ),
    ],
)  # fmt: skip
def test_troubles_of_episodes_name_the_key_that_helps(store, ends, changes, config, expected):
    """`generate.sampling.max_tokens` is not what ends an episode."""
    gathered = gather(store, "tiny")
    last = gathered.iterations[-1]
    numbers = {**last.episodes, "rollouts": 100, "parse_error_share": 0.1, "timeouts": {}}
    rollouts = last.rollouts.model_copy(update={"config": config})
    versions = [rollouts if each.kind == "rollouts" else each for each in last.versions]
    episodes = numbers | {"end_reasons": ends} | changes
    last = dataclasses.replace(last, episodes=episodes, versions=versions)
    gathered = dataclasses.replace(gathered, iterations=[last])
    sentences = [text for text in warnings(gathered) if text.startswith("tiny/rollouts@2")]
    assert sentences == ([f"tiny/rollouts@2: {expected}"] if expected else [])


def test_a_page_of_rollouts_has_turns_and_end_reasons(store):
    pages = [views.rollouts(store, store.open(f"tiny/rollouts@{number}"))[0] for number in (1, 2)]
    single, several = (page.table for page in pages)
    assert set(single[0]) == {"tokens", "finish_reason", "prompt", "completion"}
    assert [(line["turns"], line["end_reason"]) for line in several] == [
        (3, "answered"), (1, "timeout"), (1, "max_turns"), (60, "max_tokens"),
    ]  # fmt: skip
