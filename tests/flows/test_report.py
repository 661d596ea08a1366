"""The report of a run: the numbers are the manifests', foreign text stays text, and what is gone is
told."""

import dataclasses
import itertools
import json
import re
import shutil
from functools import partial
from html.parser import HTMLParser
from pathlib import Path

import pyarrow as pa
import pytest

from quiver.flows.look import samples, troubles
from quiver.flows.look import stage as report
from quiver.flows.look.gather import gather
from quiver.flows.look.joined import prompt_fields
from quiver.flows.look.plots import Panel, draw, ticks
from quiver.flows.look.words import number, score_of
from quiver.flows.verification import verify
from quiver.schemas.errors import ConfigError, LineageError
from quiver.stages.core.store import Store
from quiver.stages.core.store.retention import Rule, collect, remove
from quiver.stages.evaluate.stage import Config as EvaluateConfig
from quiver.stages.model.checkpoints import model_entry
from quiver.stages.optimize.stage import Config as OptimizeConfig
from tests.benchmarks.made import (
    make_prompts,
    make_rewards,
    rollouts_table,
    tiny_policy,
    write_rollouts,
    write_version,
)
from tests.writing import run_here

evaluate = partial(run_here, "evaluate")
optimize = partial(run_here, "optimize")


HOSTILE = [
    "<script>document.title = 'x'</script>",
    '<img src="https://example.org/seen.png" onerror="alert(1)">',
    "</pre></td></table><h1>head</h1>",
    "\x1b[31mred\x1b[0m\x07\x00\r\b",
    "left\u202eright\u200b\ufeff",
    "x" * 100_000,
    "two\nlines",
    "🙂 é 漢字 &lt; {{ 7 * 7 }}",
]
CONFIG = OptimizeConfig(
    learning_rate=1e-3,
    audit={"enabled": False},
    precision="fp32",
    # no engine gave the made logprobs, so a narrower bound would be met in the first step
    clip_low=1.0,
    clip_high=1e9,
)


class Page(HTMLParser):
    """Tags with their attributes, texts of the cells row by row, and all that can be read."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.tags, self.rows, self.words, self._open = [], [], "", False
        self.feed(content)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self._open = True

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self._open = False

    def handle_data(self, data):
        self.words += data
        if self._open:
            self.rows[-1][-1] += data

    def paragraphs(self, kind: str) -> int:
        return sum(tag == "p" and about.get("class") == kind for tag, about in self.tags)


def sampled(store, policy, asked):
    """8 rollouts of 4 prompts whose texts are `HOSTILE`, half of them cut off, and random rewards;
    measured as well."""
    models = (model_entry("policy", policy),)
    rollouts = write_rollouts(store, asked, rollouts_table(8, 8, 8, 2), HOSTILE, models)
    rewards = make_rewards(store, rollouts)
    evaluate(EvaluateConfig(), store, rollouts=rollouts.ref, rewards=rewards.ref)
    return rollouts, rewards


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two iterations of a tiny model, each policy measured but the last."""
    store = Store(tmp_path_factory.mktemp("report") / "store")
    policy, asked = tiny_policy(store), make_prompts(store, 4)
    for _ in range(2):
        rollouts, rewards = sampled(store, policy, asked)
        ref = optimize(CONFIG, store, policy=policy.ref, rollouts=rollouts.ref, rewards=rewards.ref)
        policy = store.open(ref)
    return store


@pytest.fixture
def store(made, tmp_path):
    shutil.copytree(made.url, tmp_path / "store")
    return Store(tmp_path / "store")


def test_the_numbers_are_the_manifests(made):
    gathered = gather(made, "bench")
    page = Page(report.render(made, gathered))
    before, after = (
        score_of(made.open(f"bench/evaluations@{number}").manifest.metrics) for number in (1, 2)
    )
    assert f"Held-out score {before} → {after} (4 prompts)." in page.words
    assert "2 iterations, from bench/policy@0 to bench/policy@2." in page.words
    assert page.paragraphs("warn") == 0
    kls = [
        number(made.open(f"bench/policy@{each}").manifest.metrics["approx_kl"]) for each in (1, 2)
    ]
    rows = [row for row in page.rows if len(row) == 10 and row[1].startswith("bench/policy@")]
    assert [(row[0], row[2], row[7], row[9]) for row in rows] == [
        ("0", "", "–", before),
        ("1", "bench/rollouts@1", kls[0], after),
        ("2", "bench/rollouts@2", kls[1], ""),
    ]
    assert json.dumps({"learning_rate": 0.001})[1:-1] in page.words
    (made_of,) = [row[2] for row in page.rows if row[:2] == ["bench/policy@2", "optimize"]]
    assert made_of == "policy@1, rollouts@2, rewards@2"
    steps = [row for each in gathered.iterations for row in each.steps]
    losses = [made.open(f"bench/updates@{each}").table()["loss"].to_pylist() for each in (1, 2)]
    assert [row["loss"] for row in steps] == [*losses[0], *losses[1]]
    assert [row["step"] for row in steps] == list(range(len(steps)))


def test_foreign_text_is_text_and_nothing_is_fetched(made):
    page = Page(report.render(made, gather(made, "bench")))
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"script", "img", "link", "iframe", "object", "embed", "base", "form"}
    assert all(about["href"].startswith("#") for tag, about in page.tags if tag == "a")
    names = {name for _, about in page.tags for name in about}
    assert "src" not in names and not any(name.startswith("on") for name in names)
    assert {
        "content": "default-src 'none'; img-src data:; media-src data:; style-src 'unsafe-inline'",
        "http-equiv": "Content-Security-Policy",
    } in [about for tag, about in page.tags if tag == "meta"]
    shown = "\n".join(cell for row in page.rows for cell in row)
    for text in (HOSTILE[0], HOSTILE[1], HOSTILE[2], HOSTILE[6], HOSTILE[7]):
        assert text in shown
    assert "\\x1b[31mred" in shown and "left\\u202eright" in shown
    assert "x" * 1000 in shown and "x" * 1500 not in shown
    assert all(character.isprintable() or character == "\n" for character in shown)


def test_the_same_store_gives_the_same_bytes(store):
    first = report.write(store, "bench").read_bytes()
    shutil.copytree(store.url, Path(store.url).parent / "elsewhere")
    assert report.write(Store(Path(store.url).parent / "elsewhere"), "bench").read_bytes() == first
    other = report.write(store, "bench", Path(store.url).parent / "other.html")
    assert other.read_bytes() == first
    assert verify(store) == (len(list(store.refs())), []), "the report is no part of a version"
    with pytest.raises(ConfigError, match="cannot be written: Is a directory"):
        report.write(store, "bench", store.url)


def test_what_is_gone_is_told(store):
    for ref in ("rollouts/v000001", "prompts/v000001", "updates/v000001"):
        shutil.rmtree(Path(store.url) / "bench" / ref)
    page = Page(report.render(store, gather(store, "bench")))
    assert (
        "3 versions that the run names are gone: bench/prompts@1, bench/rollouts@1, "
        "bench/updates@1." in page.words
    )
    assert ["1", "bench/policy@1", "gone"] in [row[:3] for row in page.rows]


@pytest.mark.parametrize(("policy", "shown"), [(1, [3]), (0, [1, 2])])
def test_the_newest_policys_evaluation_says_what_is_compared(store, policy, shown):
    """Another threshold measures something else."""
    refs = {kind: f"bench/{kind}@{policy + 1}" for kind in ("rollouts", "rewards")}
    evaluate(EvaluateConfig(threshold=0.9), store, **refs)
    assert [each.version for each in gather(store, "bench").evaluations] == shown


def test_the_line_keeps_the_reward_it_was_trained_by(store):
    """A newer evaluation by another reward takes no place on it, and the headline says which."""
    sampled = store.open("bench/rollouts@2")
    table = store.open("bench/rewards@2").table().combine_chunks()
    table = table.set_column(2, table.schema.field("reward"), pa.array([2.0] * 8, pa.float32()))
    other = write_version(store, "rewards", "override", table, {"rollouts": sampled})
    assert "Held-out score by" not in Page(report.render(store, gather(store, "bench"))).words
    evaluate(EvaluateConfig(), store, rollouts=str(sampled.ref), rewards=str(other.ref))
    gathered = gather(store, "bench")
    assert [each.version for each in gathered.evaluations] == [1, 2]
    assert "Held-out score by bench/rewards@2 " in Page(report.render(store, gathered)).words


def test_a_run_without_a_policy_is_refused(made):
    with pytest.raises(LineageError, match="has no policy"):
        report.write(made, "nobody")


END = {"unknown_end": {"id": 7, "text": "<|eot|>"}}
CUT = {"length": 2, "stop": 6}
AT_LIMIT = "25% of the completions ended at the token limit: "


@pytest.mark.parametrize(
    ("which", "metrics", "status", "told"),
    [
        ("policy", {"skipped_steps": 2}, {}, "2 optimizer steps left out"),
        ("policy", {"audit": {"mean_gap": 0.07}}, {}, "trainer and engine differ by 0.07 nats"),
        ("policy", {"first_clip_fraction": 0.25}, {}, "the first step clipped 0.25 of its tokens"),
        ("rewards", {"reward_null": 3}, {}, "3 of 8 rollouts have no reward"),
        ("rewards", {"groups": {"zero_variance": 0.75}}, {}, "in 75% of the groups all rewards"),
        (
            "prompts",
            {},
            {"kept": 5, "dropped": 3},
            "3 of 8 prompts left out, because they have more than ",
        ),
        ("rollouts", {}, {"dropped": 2}, "2 prompts left out, because they leave no room"),
        ("rollouts", END, CUT, f"{AT_LIMIT}set generate.sampling.stop_token_ids = [7], since"),
        ("rollouts", {}, CUT, f"{AT_LIMIT}raise generate.sampling.max_tokens"),
    ],
)
def test_what_somebody_should_look_at(made, which, metrics, status, told):
    """Changed numbers of the last iteration; those of a healthy one say nothing."""
    found = gather(made, "bench")
    last = found.iterations[-1]
    (healthy,) = last.of_kind(which)
    changed = healthy.model_copy(
        update={"metrics": {**healthy.metrics, **metrics}, "status": status}
    )
    versions = [changed if each is healthy else each for each in last.versions]
    found.iterations[-1] = dataclasses.replace(last, versions=versions)
    page = Page(report.render(made, found))
    assert f"{healthy.ref}: {told}" in page.words and page.paragraphs("warn") == 1


@pytest.mark.parametrize(("reject", "is_told"), [("ratio", True), (None, False)])
def test_a_last_gradient_of_zero_is_told_if_tokens_may_be_rejected(made, reject, is_told):
    """Equal rewards give one too, late in many trainings."""
    found = gather(made, "bench")
    last = found.iterations[-1]
    policy = last.policy.model_copy(
        update={
            "metrics": {**last.policy.metrics, "grad_norm": 0.0},
            "config": {**last.policy.config, "correction": {"reject": reject, "mode": "truncate"}},
        }
    )
    versions = [policy if each is last.policy else each for each in last.versions]
    found.iterations[-1] = dataclasses.replace(last, versions=versions)
    assert any("optimize.correction" in text for text in troubles.warnings(found)) == is_told


def test_the_reference_of_verls_layout_is_shown():
    def reference(**columns):
        row = {"columns": columns, "messages": None, "prompt_text": "1+1="}
        return prompt_fields(row).get("reference")

    assert reference(reward_model={"style": "rule", "ground_truth": "2"}) == "2"
    assert reference(reward_model={"ground_truth": "2"}, answer="3") == "3"
    assert reference(reward_model="a name") is None


def test_best_and_worst_are_of_different_prompts_with_their_references(store):
    """Ten places and twelve prompts of two answers each: the best answer of five of them, the worst
    of five others; a prompt with all of its answers, from the best mean to the worst."""
    asked = make_prompts(store, 12)
    rewards = make_rewards(store, write_rollouts(store, asked, rollouts_table(24, 8, 8, 2)))
    rows = samples.best_and_worst(store, rewards).rows
    assert len(rows) == len({row["group_id"] for row in rows}) == 10
    values = [row["reward"] for row in rows]
    scores = {row["rollout_id"]: row["reward"] for row in rewards.table().to_pylist()}
    assert values == sorted(values, reverse=True) == [scores[row["rollout_id"]] for row in rows]
    assert (values[0], values[-1]) == (max(scores.values()), min(scores.values()))
    references = {
        row["group_id"]: prompt_fields(row)["reference"] for row in asked.table().to_pylist()
    }
    assert [row["reference"] for row in rows] == [references[row["group_id"]] for row in rows]
    groups = samples.groups(store, rewards)
    means = [group["mean"] for group in groups]
    assert len(groups) == 10 and means == sorted(means, reverse=True)
    for group in groups:
        values = [row["reward"] for row in group["rows"]]
        assert values == sorted(values, reverse=True) and len(values) == 2
        assert len({row["group_id"] for row in group["rows"]}) == 1
        assert group["mean"] == pytest.approx(sum(values) / 2)


def test_a_second_run_stands_beside_it(made):
    found = gather(made, "bench")
    other = dataclasses.replace(found, run="other", iterations=found.iterations[:1])
    page = Page(report.render(made, found, other, ["other scores less."]))
    assert "other scores less." in page.words
    assert [row[0] for row in page.rows if len(row) == 10 and row[0].isdigit()] == [
        *["0", "1", "2"],
        *["0", "1"],
    ]
    lines = [about["points"].split() for tag, about in page.tags if tag == "polyline"]
    assert [1, 2] in [[len(a), len(b)] for a, b in itertools.pairwise(lines)]


@pytest.mark.parametrize(
    ("low", "high", "most", "least", "expected"),
    [
        (0.137, 0.52, 4, 0, [0.2, 0.3, 0.4, 0.5]),
        (-1, 1, 4, 0, [-1, -0.5, 0, 0.5, 1]),
        (3e-6, 1.1e-5, 4, 0, [4e-6, 6e-6, 8e-6, 1e-5]),
        (0, 5000, 6, 0, [0, 1000, 2000, 3000, 4000, 5000]),
        (7, 7, 6, 0, [7]),
        (0, 3, 6, 1, [0, 1, 2, 3]),
    ],
)
def test_marks_of_an_axis_are_round(low, high, most, least, expected):
    assert ticks(low, high, most, least) == pytest.approx(expected)


@pytest.mark.parametrize("extreme", [5e-324, -1e-320, 1e308, -1e308, float("inf"), float("nan")])
def test_numbers_that_no_plot_can_hold_are_left_out(extreme):
    for strange in ((2, 0.5, extreme), (2, extreme, 0.0)):
        for points in ([(0, 0.0, 0.0), strange], [strange, strange], [(0, 1e308, 0.0), strange]):
            picture = draw([Panel("loss", points)], "step")
            assert picture is None or not re.search("nan|inf", picture.svg)


@pytest.mark.parametrize(
    "ys, is_share, first, last",
    [
        ([0.0, 0.0], True, 0, 1),
        ([0.0, 0.0], False, 0, 1),
        ([1.0, 1.0], True, 0, 1),
        ([0.4, 0.4], True, 0, 0.4),
        ([0.001, 1.0], False, 0, 1),
        ([-1.0, 1.0], False, -1, 1),
    ],
)
def test_an_axis_has_no_room_for_what_cannot_be(ys, is_share, first, last):
    panel = Panel("share", [(x, y, 0.0) for x, y in enumerate(ys)], is_share=is_share)
    levels = re.findall(r'text-anchor="end">([^<]*)<', draw([panel], "step").svg)
    assert [float(levels[0]), float(levels[-1])] == [first, last]


def test_the_line_of_the_run_is_told_of_and_others_are_named(store):
    """What was trained by hand beside a run hides nothing of it, whether it is as long or
    shorter, and measured or not."""
    for version, policy in ((1, "bench/policy@0"), (2, "bench/policy@1")):
        refs = {"rollouts": f"bench/rollouts@{version}", "rewards": f"bench/rewards@{version}"}
        optimize(CONFIG.model_copy(update={"seed": 7}), store, policy=policy, **refs)
    sampled(store, store.open("bench/policy@3"), store.open("bench/prompts@1"))

    def line(end: str | None = None) -> tuple[list[int], list[str], list[str]]:
        gathered = gather(store, "bench", end)
        measured = [each.model("policy").ref for each in gathered.evaluations]
        return [each.policy.version for each in gathered.iterations], gathered.branches, measured

    zero, one, two, three, four = (f"bench/policy@{number}" for number in range(5))
    assert line() == ([1, 2], [four, three], [zero, one])
    assert line(three) == ([3], [two, four], [zero, three])
    page = Page(report.render(store, gather(store, "bench")))
    assert f"Not shown: {four}, {three}, where" in page.words


def test_a_sweeps_cells_are_no_iterations_even_if_the_runs_own_policies_expired(store):
    """Neither cells trained from the newest policy, nor what continued one of them."""
    config = CONFIG.model_copy(update={"seed": 7, "max_staleness": 3})
    for start, version, cell in ((2, 2, 1), (3, 2, 1), (0, 1, 2)):
        refs = {"rollouts": f"bench/rollouts@{version}", "rewards": f"bench/rewards@{version}"}
        note = f"sweep 0123456789ab, cell {cell} (7)"
        optimize(config, store, policy=f"bench/policy@{start}", note=note, **refs)
    found = gather(store, "bench")
    assert [each.policy.version for each in found.iterations] == [1, 2]
    assert found.branches == ["bench/policy@4", "bench/policy@5"]
    collect(store, Rule(keep=1, grace_seconds=0), apply=True)
    found = gather(store, "bench")
    assert [each.policy.version for each in found.iterations] == [1, 2]


def test_the_line_of_a_run_that_only_swept_is_a_cells(store):
    for ref in ("bench/policy@2", "bench/policy@1"):
        remove(store, ref)
    refs = {"rollouts": "bench/rollouts@1", "rewards": "bench/rewards@1"}
    config = CONFIG.model_copy(update={"seed": 7})
    optimize(config, store, policy="bench/policy@0", note="sweep 0123456789ab, cell 1 (7)", **refs)
    assert [each.policy.version for each in gather(store, "bench").iterations] == [3]


def test_a_line_that_was_deleted_is_not_followed(store):
    refs = {"rollouts": "bench/rollouts@2", "rewards": "bench/rewards@2"}
    longer = CONFIG.model_copy(update={"seed": 7, "max_staleness": 2})
    optimize(longer, store, policy="bench/policy@2", **refs)
    assert gather(store, "bench").iterations[-1].policy.ref == "bench/policy@3"
    remove(store, "bench/policy@3")
    found = gather(store, "bench")
    assert [each.policy.ref for each in found.iterations] == ["bench/policy@1", "bench/policy@2"]
    assert found.branches == []
