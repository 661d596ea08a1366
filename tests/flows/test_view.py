"""`quiver view`: a plain table where there is no terminal, the application where there is one."""

import asyncio
import base64
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from quiver.flows.cli import viewing
from quiver.flows.cli.shared import to_json
from quiver.flows.look.joined import Selection, open_joined
from quiver.flows.look.paired import pair
from quiver.flows.look.view.details import coloured, drawn, reader_of, style_of
from quiver.schemas.errors import ConfigError, LineageError
from quiver.stages.core.run.runner import run_stage
from quiver.stages.core.store import Store
from tests import sight
from tests.benchmarks.made import make_prompts, make_rewards, rollouts_table, write_rollouts
from tests.browser import needs_chromium, num_colours, opened
from tests.flows.conftest import command_line
from tests.tiny import make_policy, tokenizer

HOSTILE = "[red]\x1b[31mred[/red]\u202e"


@pytest.fixture(scope="module")
def store(finished, tmp_path_factory) -> Store:
    path = tmp_path_factory.mktemp("view") / "store"
    shutil.copytree(finished / "finished", path)
    return Store(path)


@pytest.fixture(scope="module")
def long(tmp_path_factory) -> Store:
    """256 rollouts of 32 prompts, the first with markup and control characters in its text."""
    store = Store(tmp_path_factory.mktemp("long") / "store")
    texts = [HOSTILE, *(f"Answer: {number}" for number in range(1, 256))]
    prompts = make_prompts(store, 32)
    make_rewards(store, write_rollouts(store, prompts, rollouts_table(256, 4, 4), texts))
    return store


# -- without a terminal


def test_a_plain_table_is_sorted_and_cut(store, capsys):
    viewing.view("golden/rewards@1", sort="reward", descending=True, n=3, store=store.url)
    title, header, *rows = capsys.readouterr().out.splitlines()
    assert title == "golden/rewards@1 by golden/policy@0"
    assert header.split() == [
        "row", "reward", "tokens", "end", "advantage", "ratio", "prompt", "reference", "completion",
    ]  # fmt: skip
    rewards = store.open("golden/rewards@1").table()["reward"].to_numpy()
    best = np.argsort(-rewards, kind="stable")[:3]
    shown = [(int(row.split()[0]) - 1, float(row.split()[1])) for row in rows]
    assert shown == [(place, float(f"{rewards[place]:.4g}")) for place in best]


def test_two_policies_stand_side_by_side_by_their_evaluations(store, capsys):
    viewing.view(
        "golden/policy@0", "golden/policy@2", sort="change", descending=True, store=store.url
    )
    first, second, _, *rows = capsys.readouterr().out.splitlines()
    assert first == "A held/evaluations@1 by golden/policy@0 with held/rewards@1"
    assert second == "B held/evaluations@4 by golden/policy@2 with held/rewards@2"
    gains = [float(row.split()[3]) for row in rows]
    scores = [store.open(f"held/evaluations@{n}").table()["score"].to_numpy() for n in (1, 4)]
    expected = sorted(scores[1] - scores[0], key=abs, reverse=True)
    np.testing.assert_allclose(gains, expected, atol=1e-4)


def test_other_rewards_of_the_same_rollouts_pair_by_id(store):
    paired = pair(store, "golden/rewards@1", "golden/rewards@5")
    a, b = (store.open(f"golden/rewards@{n}").table()["reward"].to_numpy() for n in (1, 5))
    np.testing.assert_array_equal(paired.first.number("gain"), b.astype(float) - a)
    assert [row["reward"] for row in paired.partners([3, 0])] == [b[3], b[0]]


def test_rollouts_on_other_prompts_do_not_pair(store):
    with pytest.raises(LineageError, match="no rollouts of the two have the same prompt"):
        pair(store, "golden/rollouts@1", "held/rollouts@1")


def test_a_run_alone_needs_a_terminal(store):
    with pytest.raises(ConfigError, match="a plain table shows one version"):
        viewing.view("golden", store=store.url)


def test_without_textual_a_terminal_is_told_what_to_install(store):
    """And a pipe is not."""
    code = (
        "import sys; sys.modules['textual'] = None; from quiver.flows.cli.main import main; main()"
    )
    command = [sys.executable, "-c", code, "view", "golden/rewards@1", "--store", store.url]
    leader, follower = pty.openpty()
    refused = subprocess.run(
        command, stdin=follower, stdout=follower, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(follower)
    os.close(leader)
    assert refused.returncode == 2
    assert 'Next: pip install "quiver-rl[view]"' in refused.stderr
    piped = subprocess.run([*command, "--json", "-n", "2"], capture_output=True, check=True)
    answer = json.loads(piped.stdout)
    assert answer["rewards"] == answer["ref"] == "golden/rewards@1"
    assert [row["position"] for row in answer["rows"]] == [0, 1] and answer["matching"] == 16


def test_means_by_a_column_are_a_table(store, capsys):
    viewing.view("golden/rewards@1", by="end", store=store.url)
    _, header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["finish_reason", "count", "mean", "std", "min", "max"]
    assert sum(int(row.split()[1]) for row in rows) == 16
    viewing.view("golden/rewards@1", by="end", where="tokens > 1000", store=store.url)
    assert len(capsys.readouterr().out.splitlines()) == 2, "no rollout is so long"
    with pytest.raises(ConfigError, match="not a page"):
        viewing.view("golden/rewards@1", by="end", web=True, store=store.url)


# -- in a browser


@pytest.fixture(scope="module")
def served(store):
    """The address that `quiver view --web` prints, while it serves."""
    pytest.importorskip("textual_serve")
    command = [*command_line(), "view", "golden/rewards@1", "--web", "--json", "--store", store.url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        url = json.loads(process.stdout.readline())["url"]
        yield url
        process.send_signal(signal.SIGINT)
        assert process.wait() == 0


def test_the_same_application_is_served_to_a_page_of_its_own(served):
    """And to no page of another site; the browser is kept from fetching anything elsewhere."""
    import aiohttp

    async def screen() -> str:
        async with aiohttp.ClientSession() as session:
            while True:
                try:
                    page = await session.get(served)
                    break
                except aiohttp.ClientConnectorError:
                    await asyncio.sleep(0.05)
            assert "connect-src 'self' ws://127.0.0.1" in page.headers["Content-Security-Policy"]
            address = re.search('data-session-websocket-url="([^"]+)"', await page.text())[1]
            for origin in (None, "http://elsewhere.example"):
                headers = {"Origin": origin} if origin else {}
                with pytest.raises(aiohttp.WSServerHandshakeError, match="403"):
                    await session.ws_connect(address, headers=headers)
            seen = b""
            headers = {"Origin": served}
            async with session.ws_connect(f"{address}?width=120&height=40", headers=headers) as ws:
                async for message in ws:
                    seen += message.data if message.type == aiohttp.WSMsgType.BINARY else b""
                    if b"golden/rewards@1" in seen:
                        return seen.decode(errors="replace")
        return ""

    assert "reward" in asyncio.run(asyncio.wait_for(screen(), 120))


@needs_chromium
def test_a_browser_shows_it_takes_keys_and_fetches_nothing_elsewhere(served, tmp_path):
    async def look() -> tuple[Image.Image, Image.Image, list[dict]]:
        async with opened(served, tmp_path / "profile") as tab:
            seen = "document.body?.classList.contains('-first-byte')"
            while not (await tab.ask("Runtime.evaluate", expression=seen))["result"].get("value"):
                await asyncio.sleep(0.1)
            before = await tab.still_picture()
            await tab.ask(
                "Runtime.evaluate", expression="document.querySelector('textarea').focus()"
            )
            await tab.press("?")
            return before, await tab.still_picture(other_than=before), tab.events

    before, after, events = asyncio.run(asyncio.wait_for(look(), 300))
    assert num_colours(before) > 20 and num_colours(after) > 20
    asked = {
        event["params"]["requestId"]: event["params"]["request"]["url"]
        for event in events
        if event["method"] == "Network.requestWillBeSent"
    }
    refused = {
        event["params"]["requestId"]
        for event in events
        if event["method"] == "Network.loadingFailed" and event["params"].get("blockedReason")
    }
    answered = [url for request, url in asked.items() if request not in refused]
    assert answered and all(url.startswith((served, "data:", "blob:")) for url in answered)
    assert [url.split("/")[2] for url in asked.values() if url not in answered] == [
        "fonts.googleapis.com"
    ]


# -- tokens


def test_tokens_have_their_text_and_their_colour(store):
    joined = open_joined(store, "ppo/policy@1")
    rows = joined.rows(range(16))
    for position, row in enumerate(rows):
        texts = reader_of(store, joined.policy)(joined.tokens(position).ids)
        visible = "".join(texts).replace("<|endoftext|>", "").replace("<|im_end|>", "")
        assert visible.replace("<|im_start|>", "") == row["completion_text"]
    assert reader_of(store, "golden/policy@77")([5, 6]) == ["⟨5⟩", "⟨6⟩"]
    text = coloured(["a", "\x1b", "\n"], [-5.0, -2.5, 0.0], "logprob")
    assert text.plain == "a\\x1b↵\n"
    assert [str(span.style) for span in text.spans] == [
        "white on rgb(190,40,40)",
        "white on rgb(110,35,35)",
    ]
    assert style_of("ratio ref", 1.0) == style_of("none", -5.0) == ""


def test_a_character_of_two_tokens_is_shown_once(tmp_path):
    store = Store(tmp_path / "store")
    policy = make_policy(store)
    ids = tokenizer()("6 × 5 = 30")["input_ids"]
    texts = reader_of(store, str(policy.ref))(ids)
    assert "".join(texts) == "6 × 5 = 30" and len(texts) == len(ids)
    assert texts[texts.index("×") - 1] == ""
    assert reader_of(store, str(policy.ref))(ids[: texts.index("×")])[-1] == "\ufffd"


# -- with a terminal


def look(store, ref, *steps, beside=None, selection=None, run=None, size=(120, 40)) -> list[str]:
    """What the application's screen says of a version, of two, or of a run: at first, and after
    each step, a list of keys."""
    pytest.importorskip("textual")
    from quiver.flows.look.view.app import ViewApp

    app = ViewApp(store, pair(store, ref, beside) if ref else None, selection, run)
    shown = []

    async def press() -> None:
        async with app.run_test(size=size, notifications=True) as pilot:
            for keys in ([], *steps):
                await pilot.press(*keys)
                await app.workers.wait_for_complete()
                await pilot.pause()
                strips = app.screen._compositor.render_strips()
                shown.append("\n".join(strip.text for strip in strips))

    asyncio.run(press())
    return shown


def test_the_best_come_first_and_open_token_by_token(store):
    first, best, tokens = look(store, "golden/policy@1", ["b"], ["enter"])
    assert "golden/policy@1 by golden/policy@0" in first and "1–16 of 16" in first
    (row,) = open_joined(store, "golden/policy@1").rows([0])
    assert "highest reward first" in best and row["rollout_id"] in best
    assert "reward       1.5".replace("       ", "      ") in best
    assert "completion, by logprob" in tokens and "ratio ref" in tokens
    logprob = open_joined(store, "golden/policy@1").tokens(0).numbers["logprob"][0]
    assert f"{logprob:.4g}" in tokens


def test_colours_go_round(store):
    shown = look(store, "ppo/policy@1", *[["c"]] * 5)
    assert [text.split("completion, by ")[1].split(":")[0] for text in shown] == [
        "logprob", "ratio prox", "ratio ref", "advantage", "none", "logprob",
    ]  # fmt: skip


def test_a_prompt_opens_its_rollouts(store):
    _, groups, second, back = look(
        store, "golden/rewards@1", ["g"], ["down", "enter"], ["escape", "escape"]
    )
    assert "1–4 of 4" in groups and "1+5?" in groups
    assert "where group_id = 000007" in second and "1–4 of 4" in second
    assert "1–16 of 16" in back


def test_versions_open_what_they_hold(store):
    steps = ["enter"], ["escape"], [*["down"] * 26, "enter"]
    versions, policy, _, base = look(store, None, *steps, run="golden", size=(120, 60))
    assert "versions of golden" in versions and "prod" in versions
    assert "golden/policy@2 by golden/policy@1" in policy, "what it learned from"
    assert "made by     policy" in base and "parameters" in base, "golden/policy@0 has no rollouts"


def test_what_can_not_be_read_hides_no_version(finished, tmp_path):
    shutil.copytree(finished / "finished", tmp_path / "store")
    shutil.rmtree(tmp_path / "store/golden/rewards")
    (tmp_path / "store/golden/rewards").symlink_to("rewards")
    versions, told = look(Store(tmp_path / "store"), None, ["enter"], run="golden")
    assert "golden/rewards: is a link" in versions and "golden/policy@2" in versions
    assert "E-CORRUPT" in told


def test_pages_searches_and_filters(long):
    searches = ["slash", *"ER: 25", "enter"], ["slash", *["backspace"] * 6, "enter"]
    steps = ["n"], ["n"], ["n"], *searches, ["f", *"reward < 0.5, tokens = 4", "enter"]
    first, second, last, none, found, all_again, filtered = look(long, "bench/rewards@1", *steps)
    assert r"[red]\x1b[31mred[/red]\u202e" in first, "text of a model is only text"
    assert all(character.isprintable() or character == "\n" for character in first)
    assert "1–100 of 256" in first and "101–200 of 256" in second
    assert "201–256 of 256" in last and "201–256 of 256" in none, "there is no page after the last"
    assert "1–7 of 7" in found and "with “ER: 25”" in found
    assert "1–100 of 256" in all_again
    rewards = open_joined(long, "bench/rewards@1").number("reward")
    assert f"of {np.sum(rewards < 0.5)}" in filtered


def test_a_filter_that_can_not_be_read_is_told_and_everything_stays(store):
    best, refused = look(store, "golden/rewards@1", ["b"], ["f", *"rewrd < 1", "enter"])[1:]
    assert "E-CONFIG column rewrd:" in refused
    assert best.splitlines()[:5] == refused.splitlines()[:5] and "highest reward first" in best


def test_two_versions_stand_beside_one_another(store):
    refs = "held/evaluations@1", "held/evaluations@2"
    shown = look(store, refs[0], ["m"], ["enter"], beside=refs[1])
    a, b = (open_joined(store, f"held/evaluations@{n}") for n in (1, 2))
    most = int(np.argmax(np.abs(b.number("score") - a.number("score"))))
    for joined, name in ((a, "A"), (b, "B")):
        (row,) = joined.rows([most])
        for text in shown[1:]:
            assert f"{name}  {row['rollout_id']}" in text


def test_a_picture_stands_above_the_completion(tmp_path):
    store = sight.make_prompts(tmp_path, [{"prompt": "seven", "images": ["0.png"]}])
    config = {**sight.GENERATE, "samples_per_prompt": 1}
    rollouts = str(run_stage("generate", config, store, in_process=True, **sight.REFS))
    _, opened = look(store, rollouts, ["enter"])
    told = opened.index("PNG, 40 × 20")
    blocks = opened.index("▀" * 40)
    assert told < blocks < opened.index("ended by")
    assert opened.count("▀") == 40 * 20 / 2


def test_two_pixels_are_one_character():
    """Red over blue, then black over white; a last row that is alone is shown twice."""
    pixels = np.array([[[255, 0, 0], [0, 0, 0]], [[0, 0, 255], [255, 255, 255]]], np.uint8)
    pictures = [drawn(sight.stored(rows)["bytes"], width=80) for rows in (pixels, pixels[:1])]
    lines = [line.spans for shown in pictures for line in shown.split("\n") if line]
    assert [str(span.style) for spans in lines for span in spans] == [
        "#ff0000 on #0000ff", "#000000 on #ffffff", "#ff0000 on #ff0000", "#000000 on #000000",
    ]  # fmt: skip


def test_a_selection_is_where_the_application_begins(store):
    selection = Selection(sort="tokens", where="finish_reason = stop")
    (shown,) = look(store, "golden/rollouts@1", selection=selection)
    assert "1–1 of 1" in shown and "lowest tokens first" in shown


def test_a_picture_in_json_is_base64():
    answer = json.loads(to_json({"images": [{"bytes": sight.png(0), "path": None}]}))
    assert base64.b64decode(answer["images"][0]["bytes"]) == sight.png(0)
