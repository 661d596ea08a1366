"""Nights on a tiny model: what is better is promoted, what is not is rejected, and every
decision can be read later.

The stages are the real ones, in this process instead of children of it; Prefect's server is a real
one too. A tag of its own gives a test a first night whose stages are all done already.
"""

import json
import re
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from quiver.flows import nightly
from quiver.flows.cli.running import nightly as shell_nightly
from quiver.flows.recipe import load
from quiver.schemas.errors import ConfigError, ConflictError
from quiver.stages.core.store import Store
from tests.flows.conftest import options, quiver, stay_here, write_recipe
from tests.writing import write_lines

pytestmark = pytest.mark.prefect

BETTER = [
    "iterations=1",
    "data.limit=8",
    "data.held_out.limit=24",
    "generate.samples_per_prompt=32",
    "reward.workers=1",
]
BETTER += ["optimize.learning_rate=1e-2", "optimize.minibatches=4", "promotion.margin=0.02"]
BETTER += ["evaluate.score=evenness", "evaluate.generate.samples_per_prompt=2"]
BRIEF = ["generate.samples_per_prompt=2", "optimize.minibatches=1"]
WORSE = [*BETTER, "reward.functions=[{use='rewards.py:evenness', weight=-1}]"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = write_recipe(tmp_path_factory.mktemp("nights"))
    for name, plus in (("questions", 5), ("held_out", 6)):
        rows = [{"question": f"What is {a} plus {plus}?", "answer": a + plus} for a in range(24)]
        write_lines(made / f"{name}.jsonl", rows)
    return made


@pytest.fixture(scope="module", autouse=True)
def server(api):
    return api


@pytest.fixture(autouse=True)
def here(folder, monkeypatch):
    stay_here(folder, monkeypatch)


def spend(name: str, settings: list[str], tag: str = "prod") -> dict:
    return nightly.nightly(load("recipe.toml", [*settings, f"promotion.tag={tag}"]), name)


@pytest.fixture(scope="module")
def nights(folder, server) -> list[dict]:
    """The first learns what is measured, the second the opposite; about what is no better nobody is
    asked."""
    with pytest.MonkeyPatch.context() as patch:
        stay_here(folder, patch)
        first = spend("one", BETTER)
        shutil.copytree("store", "untidy")
        return [first, spend("two", [*WORSE, "promotion.approval=true"])]


@pytest.fixture
def store(nights, here) -> Store:
    return Store("store")


def names(store) -> set[str]:
    return {str(ref) for ref in store.refs()}


def test_what_is_better_is_promoted_and_what_is_worse_is_not(store, nights):
    """Each is measured against the policy in use, on the same prompts."""
    names = ("decision", "before", "candidate", "in_use")
    base, first, second = (f"tiny/policy@{number}" for number in range(3))
    assert [[night[name] for name in names] for night in nights] == [
        ["promoted", base, first, first],
        ["rejected", first, second, first],
    ]
    for night in nights:
        assert (night["bound"] >= 0.02) is (night["decision"] == "promoted")
        measured = store.open(night["evaluation"]).manifest
        baseline = store.open(measured.input("baseline").ref).manifest
        policies = [manifest.model("policy").ref for manifest in (baseline, measured)]
        assert policies == [night["before"], night["candidate"]]
    entries = store.history("tiny", "prod")
    assert [(entry.before, entry.ref, entry.key) for entry in entries] == [
        (None, base, "base"),
        (base, first, "night one"),
        (first, first, "night two"),
    ]
    # the next night goes on behind it, whether or not [data] refill is set then
    assert [entry.about.get("round") for entry in entries] == [None, 1, 2]
    assert entries[2].about["candidate"] == second and entries[2].why == nights[1]["why"]


def test_the_first_night_and_a_promotion_are_events_and_a_night_that_keeps_the_old_is_none(
    nights, server
):
    """A promotion's with what the night tells of itself, so that whoever it starts need not ask."""
    body = {
        "filter": {
            "event": {"name": ["quiver.tag.moved"]},
            "resource": {"id": ["quiver://tiny/policy@prod"]},
        }
    }
    deadline = time.monotonic() + 60  # a thread sends them
    while len(found := httpx.post(f"{server}/events/filter", json=body).json()["events"]) < 2:
        assert time.monotonic() < deadline, f"{len(found)} events"
        time.sleep(0.1)
    base, promoted = sorted(
        (event["payload"] for event in found), key=lambda payload: payload["at"]
    )
    assert (base["before"], base["in_use"], base["why"]) == (
        None,
        "tiny/policy@0",
        "the base model",
    )
    assert promoted == {
        name: value for name, value in nights[0].items() if name not in ("run", "tag", "iterations")
    }


def states(server) -> dict[str, tuple[str, str]]:
    """Name and message of the newest finished state, by the name of the flow run."""
    body = {"flow_runs": {"state": {"type": {"any_": ["COMPLETED"]}}}, "sort": "END_TIME_DESC"}
    runs = httpx.post(f"{server}/flow_runs/filter", json=body, timeout=60).json()
    return {run["name"]: (run["state"]["name"], run["state"]["message"]) for run in reversed(runs)}


def test_a_flow_run_ends_in_a_state_of_the_decisions_name(nights, server):
    ended = states(server)
    better, worse = nights
    assert ended["tiny · nightly one"] == ("Promoted", better["why"])
    assert ended["tiny · nightly two"] == ("Rejected", worse["why"])


def test_the_table_of_nights_is_on_prefects_pages(nights, server):
    body = {"artifacts": {"key": {"any_": ["nights-tiny"]}}, "sort": "ID_DESC"}
    pages = httpx.post(f"{server}/artifacts/filter", json=body).json()
    page = next(page["data"] for page in pages if "| rejected |" in page["data"])
    shown = [line for line in page.splitlines() if line.startswith(("| one |", "| two |"))]
    assert [line.split(" | ")[4] for line in shown] == ["rejected", "promoted", "began"]


LEFT_OUT = "a night ignores overlap and evaluate.every"


def test_a_better_policy_that_moved_too_far_is_rejected_with_the_reason(
    store, nights, server, caplog
):
    done = spend("one", [*BETTER, "promotion.max_kl=0", "evaluate.every=1"], "far")
    assert (done["decision"], done["in_use"]) == ("rejected", "tiny/policy@0")
    assert done["bound"] >= 0.02, "by the score it would have been promoted"
    (watch,) = done["watch"]
    assert re.fullmatch(r"approx. KL \S+ nats per token \(promotion.max_kl 0\)", watch)
    why = f"better, but not promoted, because it moved far from the policy in use: {watch}; score +"
    assert done["why"].startswith(why)
    assert store.history("tiny", "far")[-1].why == done["why"]
    assert states(server)["tiny · nightly one"] == ("Rejected", done["why"])
    assert f"tiny/policy@1 moved far: {watch}" in caplog.text
    assert caplog.text.count(LEFT_OUT) == 1, "told, since the recipe has a key of these"


def test_each_night_has_rows_of_its_own(store, nights):
    (one,), (two,) = (night["iterations"] for night in nights)
    asked = [
        set(store.open(done["prompts"]).table()["group_id"].to_pylist()) for done in (one, two)
    ]
    assert [len(groups) for groups in asked] == [8, 8] and not asked[0] & asked[1]
    assert store.open(two["rollouts"]).manifest.model("policy").ref == "tiny/policy@1"


def test_a_night_warns_if_it_may_ask_rows_again(store, nights, caplog, tmp_path):
    """Only the number of rounds is counted on; rows move if anything else of the order changes."""

    def told(*settings: str) -> str:
        caplog.clear()
        tonight = nightly.plan_night(load("recipe.toml", [*BETTER, *settings]), "three")
        nightly.warn_of_another_order(replace(tonight, recipe=tonight.recipe.resolved()))
        return caplog.text

    rows = (Path("questions.jsonl").read_text(), '{"question": "What is 0 plus 9?", "answer": 9}\n')
    longer = tmp_path / "longer.jsonl"
    longer.write_text("".join(rows))
    again = "may ask rows again that earlier nights took"
    assert told() == ""
    assert again in told("data.limit=4")
    assert "data.limit was 8 and is 4" in caplog.text
    assert "seed was 7 and is 8" in told("seed=8", f"data.source={longer}")
    assert "data.source_sha256 was " in caplog.text
    assert told("data.limit=null") == "", "each night asks all rows"
    shutil.copy(longer, tmp_path / "three.jsonl")
    assert told(f"data.source={tmp_path}/{{night}}.jsonl") == "", "each night has rows of its own"


def test_a_night_that_is_decided_stays_so(store, nights, server):
    """And its state does not announce the decision again."""
    before, entries = names(store), store.history("tiny", "prod")
    assert spend("one", BETTER) == {**nights[0], "iterations": []}
    told = f"promoted: {nights[0]['why']}"
    assert states(server)["tiny · nightly one"] == ("Decided before", told)
    assert names(store) == before and store.history("tiny", "prod") == entries


def test_a_crash_before_the_promotion_and_the_same_night_again(store, monkeypatch, caplog):
    def dies(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(nightly, "decide", dies)
        spend("one", BETTER, "crash")
    assert str(store.resolve("tiny/policy@crash")) == "tiny/policy@0"
    before = names(store)
    assert spend("one", BETTER, "crash")["in_use"] == "tiny/policy@1"
    assert names(store) == before
    assert [entry.key for entry in store.history("tiny", "crash")] == ["base", "night one"]
    assert LEFT_OUT not in caplog.text


def test_of_two_nights_at_once_one_promotes(store, monkeypatch):
    """When one has measured and is about to decide, another one promotes."""
    decide = nightly.decide

    def late(*arguments, **decision):
        monkeypatch.setattr(nightly, "decide", decide)
        assert spend("other", BETTER, "race")["decision"] == "promoted"
        return decide(*arguments, **decision)

    monkeypatch.setattr(nightly, "decide", late)
    with pytest.raises(
        ConflictError, match="expected tiny/policy@0, found tiny/policy@1"
    ) as caught:
        spend("one", BETTER, "race")
    assert "start the same night again" in caught.value.next
    assert [entry.key for entry in store.history("tiny", "race")] == ["base", "night other"]


def test_the_policy_in_use_goes_back_when_the_one_before_is_better(store, server):
    """Somebody gave the tag to the worse policy by hand; the next night gives it back, and starts
    from what is in use then."""
    store.tag("tiny", "prod", "tiny/policy@2", why="by hand")
    # two samples a prompt are too few to be sure of the difference on every machine
    settings = [*BETTER, "evaluate.generate.samples_per_prompt=16", "promotion.rollback=true"]
    settings += ["promotion.margin=0"]
    done = spend("three", [*settings, *BRIEF])
    _, back, decided = store.history("tiny", "prod")[-3:]
    assert (back.before, back.ref, back.key) == ("tiny/policy@2", "tiny/policy@1", "rollback three")
    assert back.why.startswith("tiny/policy@1 is better: score +")
    assert back.about["difference"]["score"] > 0.02
    assert decided.before == "tiny/policy@1"
    assert store.open(done["candidate"]).manifest.input("policy").ref == "tiny/policy@1"
    assert done["iteration"] == 3
    # what came last is told; a rejection behind it leaves the policy in use the one gone back to
    named = {"promoted": "Promoted", "rejected": "Rolled back"}[decided.about["decision"]]
    assert states(server)["tiny · nightly three"][0] == named


class Reviewer(threading.Thread):
    """Answers each pause over Prefect's API, one reply after another; keeps what was asked and what
    the API said."""

    def __init__(self, url: str, *replies: dict) -> None:
        super().__init__(daemon=True)
        self.url, self.replies, self.questions, self.statuses = url, list(replies), [], []
        self.start()

    def run(self) -> None:
        paused = {"flow_runs": {"state": {"type": {"any_": ["PAUSED"]}}}}
        while self.replies:
            for run in self.call("POST", "filter", paused) or []:
                keys = run["state"]["state_details"]["run_input_keyset"]
                question = self.call("GET", f"{run['id']}/input/{keys['description']}")
                body = {"run_input": self.replies[0]}
                told = question and self.call("POST", f"{run['id']}/resume", body)
                if told and told["status"] != "ABORT":
                    self.questions.append(question)
                    self.statuses.append(told["status"])
                    self.replies.pop(0)
            time.sleep(0.05)

    def call(self, method: str, path: str, body: dict | None = None):
        """The server's answer; None while it has none, as for a form that is not there yet."""
        answered = httpx.request(method, f"{self.url}/flow_runs/{path}", json=body, timeout=60)
        return answered.json() if answered.status_code < 300 else None


APPROVAL = [*BETTER, "promotion.approval=true", "promotion.approval_seconds=200"]


def test_a_person_promotes_a_policy_that_moved_far(store, nights, server, monkeypatch):
    """An answer without a reason is refused by the server. How far the candidate moved is told."""
    monkeypatch.setattr(nightly, "POLL_SECONDS", 0.1)
    said = {"approve": True, "author": "ada"}
    reviewer = Reviewer(server, said, {**said, "reason": "reads well"})
    done = spend("one", [*APPROVAL, "promotion.max_kl=0"], "asked")
    reviewer.join(10)
    assert reviewer.statuses == ["REJECT", "ACCEPT"]
    far = "t moved far from the policy in use: approx. KL "
    assert f"**I{far}" in reviewer.questions[0]
    assert "tiny/policy@1** replace **tiny/policy@0" in reviewer.questions[0]
    assert (done["decision"], done["author"], len(done["watch"])) == ("promoted", "ada", 1)
    assert done["why"].startswith(f"ada said yes: reads well; i{far}")


def test_no_is_no_and_silence_is_no(store, server, monkeypatch):
    monkeypatch.setattr(nightly, "POLL_SECONDS", 0.1)
    Reviewer(server, {"approve": False, "author": "bob", "reason": "reads badly"})
    refused = spend("bob", APPROVAL, "refused")
    silent = spend("nobody", [*APPROVAL, "promotion.approval_seconds=1"], "silent")
    for night, why in (
        (refused, "bob said no: reads badly; score +"),
        (silent, "quiver said no: no answer within 1 s"),
    ):
        assert (night["decision"], night["in_use"]) == ("rejected", "tiny/policy@0")
        assert night["why"].startswith(why)
    names = {"any_": ["tiny · nightly bob", "tiny · nightly nobody"]}
    runs = httpx.post(f"{server}/flow_runs/filter", json={"flow_runs": {"name": names}}).json()
    assert [run["state_type"] for run in runs] == ["COMPLETED"] * 2


def test_what_can_not_work_is_refused_before_anything_is_made(store, monkeypatch):
    before = names(store)
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    with (
        temporary_settings(restore_defaults={PREFECT_API_URL}),
        pytest.raises(ConfigError, match="needs a permanent Prefect server") as caught,
    ):
        shell_nightly(Path("recipe.toml"), settings=["promotion.approval=true"])
    assert caught.value.object == "promotion.approval"
    assert "prefect server start" in caught.value.next
    with pytest.raises(ConfigError, match="names no held-out rows"):
        nightly.plan_night(load("recipe.toml", ["data.held_out=null"]), "x")
    with pytest.raises(ConfigError, match=r"evaluate\.k"):
        load("recipe.toml", ["promotion.by=pass@4"])
    assert names(store) == before


def test_nights_clean_up_and_the_policy_in_use_stays_one_to_go_on_from(nights):
    """So does the one that a rollback would go back to; what was rejected is only the newest."""
    shutil.rmtree("untidy/tiny/tags")  # the first night is decided again, and finds all else
    tidy = ["store=untidy", "promotion.rollback=true"]
    tidy += ["retention={keep=1, moments=1, grace_hours=0}"]
    better = spend("one", [*BETTER, *tidy])
    worse = spend("two", [*BETTER, *BRIEF, *tidy, "promotion.margin=0.9"])
    assert (better["decision"], worse["decision"]) == ("promoted", "rejected")
    store = Store("untidy")
    left = names(store)
    assert store.numbers("tiny", "policy") == [0, 1, 2]
    with_state = [path.parent.name for path in Path(store.url).glob("tiny/policy/*/optimizer")]
    assert sorted(with_state) == ["v000001", "v000002"]
    assert {"tiny/rollouts@1", "tiny/rollouts@2"} <= left, "those that policy@1 and @2 learned from"
    evaluations = {name for name in left if "evaluations" in name}
    assert worse["evaluation"] in evaluations and better["evaluation"] not in evaluations


def test_the_name_of_the_night_reaches_the_rows():
    settings = ["data.source='prompts/{night}.jsonl'", "data.held_out.source='mine.py:rows'"]
    settings += ["data.held_out.arguments={seed='{night}',n=3}"]
    data = nightly.plan_night(load("recipe.toml", settings), "2026-11-20").recipe.data
    assert data.source == "prompts/2026-11-20.jsonl"
    assert data.for_evaluation().arguments == {"seed": "2026-11-20", "n": 3}


def test_the_same_from_the_shell(store, nights, folder, server, command):
    """And what a night rewarded is replaced by a person's word."""
    night = ["nightly", "recipe.toml", "--night", "one", *options(BETTER)]
    assert quiver(folder, *night, PREFECT_API_URL=server) == {**nights[0], "iterations": []}
    _, shown = command("history", "tiny/policy@prod")
    assert [entry["key"] for entry in shown["entries"]][:3] == ["base", "night one", "night two"]
    assert [row["why"] for row in shown["nights"][1:3]] == [night["why"] for night in nights]
    rewards = nights[1]["rewards"]
    row = store.open(rewards).table().to_pylist()[0]
    said = {"author": "ada", "reason": "by hand", "overrides": {row["rollout_id"]: 0.75}}
    (folder / "said.json").write_text(json.dumps(said))
    over = ["reward", "recipe.toml", "--override", "said.json"]
    made = store.open(command(*over, "--rewards", rewards)[1]["ref"])
    assert made.manifest.config == said and made.table().to_pylist()[0] == row | {"reward": 0.75}
    error = command(*over, "--retry", rewards)[1]["error"]
    assert error["message"] == "quiver reward --override takes --rollouts and --rewards"
    code, refused = command("generate", *over[1:])
    assert (code, refused["error"]["object"]) == (2, "--override")
