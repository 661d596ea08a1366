"""[[reward.servers]]: what is refused before anything is asked, that no message shows a secret, and
servers in the stage."""

from functools import partial

import pytest
from pydantic import ValidationError

from quiver.schemas.errors import ConfigError, RemoteError
from quiver.stages.common import config as common
from quiver.stages.common.config import parse
from quiver.stages.reward.servers.config import ServerConfig, fingerprint
from quiver.stages.reward.servers.scorer import ServerScorer
from quiver.stages.reward.stage import Config
from tests.stages.reward.fake_server import FakeServer, reply
from tests.writing import run_here

run = partial(run_here, "reward")


CANARY = "sk-canary-5f1d"
HERE = "http://127.0.0.1:8700"


class Section(common.Config):
    """A recipe's section around it, so that errors are those that a user reads."""

    servers: tuple[ServerConfig, ...]


def section(**options) -> ServerConfig:
    return parse(
        Section, {"servers": [{"dialect": "quiver", "urls": [HERE], **options}]}, "reward"
    ).servers[0]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"token": CANARY}, "token must be env:NAME"),
        ({"token": f"env:{CANARY}"}, "token must be env:NAME"),
        ({"token": [CANARY]}, "token must be env:NAME"),
        ({"api_key": CANARY}, "unknown key servers.0.api_key"),
        ({"urls": [f"https://me:{CANARY}@scores.example"]}, "URL of scores.example has a user"),
        ({"urls": [f"https://scores.example/?key={CANARY}"]}, "a query"),
        ({"urls": f"https://scores.example/#{CANARY}"}, "a fragment"),
        ({"urls": [f"file:///etc/{CANARY}"]}, "a URL must be"),
        ({"urls": [f"scores.example/{CANARY}"]}, "a URL must be"),
        ({"urls": [f"http://host:99999/{CANARY}"]}, "a URL must be"),
        ({"urls": [f"http://host /{CANARY}"]}, "a URL must be"),
        ({"urls": [f"http://host\\@{CANARY}"]}, "a URL must be"),
        ({"urls": [f"http://hôst/{CANARY}"]}, "a URL must be"),
        ({"urls": [f"http:///{CANARY}"]}, "a URL must be"),
        ({"urls": [7]}, "a URL must be"),
        ({"urls": []}, "servers.0.urls"),
        ({"urls": ["http://scores.example"], "token": "env:KEY"}, "in the clear"),
        ({"dialect": "quiver2"}, "servers.0.dialect"),
        ({"label": "answer"}, "label belongs to dialect openrlhf,"),
        ({"rubric": "{prompt}"}, "rubric belongs to dialect openai-judge"),
        ({"range": [1, 0]}, "the low end must be below the high end"),
        ({"rescale": True}, "rescale needs range"),
        ({"retrys": 3}, "did you mean retries?"),
        ({"name": "a b"}, "servers.0.name"),
        ({"dialect": "openai-judge", "model": "m"}, "needs model"),
        (
            {"dialect": "openai-judge", "model": "m", "range": [0, 1], "score_pattern": "("},
            "no regular expression",
        ),
        (
            {"dialect": "openai-judge", "model": "m", "range": [0, 1], "score_pattern": "[0-9]"},
            "one group",
        ),
        ({"dialect": "openrlhf", "score_key": "x"}, "rewards or scores"),
        ({"dialect": "vllm-classify", "score_key": "LABEL_1"}, "number of a class"),
        ({"dialect": "openrlhf", "message_template": "{name}"}, "knows no {name}"),
    ],
)
def test_a_wrong_section_is_refused_and_no_secret_is_shown(options, says):
    with pytest.raises(ConfigError) as caught:
        section(**options)
    assert says in str(caught.value) and CANARY not in str(caught.value)


def test_a_section_made_in_python_shows_no_secret_either():
    with pytest.raises(ValidationError) as caught:
        ServerConfig(dialect="quiver", urls=[HERE], token=CANARY)
    assert "env:NAME" in str(caught.value) and CANARY not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"urls": ["http://localhost:1"], "token": "env:KEY"},
        {"urls": ["http://[::1]:1", "http://127.0.0.2"], "token": "env:KEY"},
        {"urls": ["https://scores.example/v2/score"], "token": "env:KEY"},
        {"urls": ["http://scores.example"], "token": "env:KEY", "allow_plain_http": True},
        {"urls": ["http://scores.example"]},
    ],
)
def test_a_right_section_survives_being_written_down(options):
    made = section(**options)
    assert made.name == "quiver"
    assert section(**made.model_dump(mode="json")) == made


def test_only_true_lets_a_token_go_over_plain_http():
    options = {"urls": ["http://scores.example"], "token": "env:KEY"}
    with pytest.raises(ValidationError, match="https"):
        ServerConfig(dialect="quiver", **options, allow_plain_http="false")


@pytest.mark.parametrize(
    "value", [None, "", "short", "has space in it", "líne-of-text", "two\nlines-here"]
)
def test_a_token_must_be_in_its_variable(value, monkeypatch):
    config = section(token="env:REWARD_KEY")
    monkeypatch.delenv("REWARD_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("REWARD_KEY", value)
    with pytest.raises(ConfigError, match="environment variable REWARD_KEY") as caught:
        ServerScorer(config)
    assert not value or value not in str(caught.value)
    monkeypatch.setenv("REWARD_KEY", CANARY)
    ServerScorer(config)
    ServerScorer(section())


@pytest.mark.parametrize("host", ["1.2.3.999", "xn--a", "[v1.x]"])
def test_a_host_that_no_request_can_have_is_refused_before_any(host):
    with pytest.raises(ConfigError, match=r"urls|a URL must be"):
        ServerScorer(section(urls=[f"http://{host}:80/"]))


def test_the_fingerprint_is_of_what_decides_the_number(monkeypatch):
    monkeypatch.setenv("REWARD_KEY", CANARY)
    first = fingerprint(section())
    for same in (
        {"name": "x"},
        {"weight": 2},
        {"extra": True},
        {"retries": 9},
        {"batch_rows": 1},
        {"token": "env:REWARD_KEY"},
        {"allow_plain_http": True},
    ):
        assert fingerprint(section(**same)) == first
    for other in (
        {"revision": "2"},
        {"urls": ["http://127.0.0.1:8701"]},
        {"range": [0, 1]},
        {"columns": []},
        {"dialect": "openrlhf"},
    ):
        assert fingerprint(section(**other)) != first


def test_columns_that_are_sent_must_be_there():
    judge = {
        "dialect": "openai-judge",
        "model": "m",
        "range": [0, 1],
        "rubric": "{prompt} {completion} {answer}",
    }
    for options in ({"columns": ["answer"]}, {"dialect": "openrlhf", "label": "answer"}, judge):
        ServerScorer(section(**options)).require(["answer", "level"])
        with pytest.raises(ConfigError, match=r"needs answer.*did you mean answers\?"):
            ServerScorer(section(**options)).require(["answers"])
    ServerScorer(section()).require([])


# -- in the stage


def scored_by(asked):
    """Half a point a word; a completion of one word is an error there."""
    rows = asked.body["rows"]
    found = [
        {"id": row["id"], "reward": len(row["completion"].split()) / 2, "extra": {"n": 1}}
        for row in rows
    ]
    failed = [
        {"id": row["id"], "reward": None, "error": "too short"}
        for row in rows
        if len(row["completion"].split()) == 1
    ]
    return reply(
        {
            "format": 1,
            "rows": [each for each in found if each["id"] not in {f["id"] for f in failed}]
            + failed,
        }
    )


def test_the_stage_adds_a_server_s_part_to_those_of_functions(sample, store, monkeypatch):
    monkeypatch.setenv("REWARD_KEY", "canary-0123456789")
    rollouts = sample([["one two", "one"], ["a b c", "d e"]], {"answer": [1, 2]})
    with FakeServer(scored_by) as server:
        section = {
            "name": "words",
            "dialect": "quiver",
            "urls": [server.url],
            "token": "env:REWARD_KEY",
            "extra": True,
        }
        functions = [{"use": "length", "arguments": {"target": 2}, "weight": 10.0}]
        config = parse(
            Config,
            {"functions": functions, "servers": [{**section, "weight": 2.0}], "max_invalid": 0.25},
            "reward",
        )
        version = store.open(run(config, store, rollouts=rollouts.ref))
        asked = len(server.asked)
        assert str(run(config, store, rollouts=rollouts.ref)) == str(
            version.ref
        )  # found by its key, nobody asked
        assert len(server.asked) == asked
        assert server.asked[0].headers["authorization"] == "Bearer canary-0123456789"
    table = {row["rollout_id"]: row for row in version.table().to_pylist()}
    assert table["0-sum-0-0"]["reward"] == 10 * 1 + 2 * 1.0
    assert table["0-sum-0-0"]["extra"] == {"words": '{"extra": {"n": 1}}'}
    assert table["0-sum-1-0"]["reward"] == 10 * 0 + 2 * 1.5
    assert (
        table["0-sum-0-1"]["reward"] is None
        and "too short" in table["0-sum-0-1"]["errors"]["words"]
    )
    assert version.manifest.status == {"scored": 3, "not_scored": 0, "failed": 1}
    assert "canary" not in (version.files.folder / "manifest.json").read_text()


def test_a_server_that_refuses_ends_the_stage_and_keeps_nothing_half(sample, store):
    rollouts = sample([["a", "b"]], {"answer": [1]})
    with FakeServer(lambda asked: reply({}, 401)) as server:
        config = parse(
            Config,
            {"servers": [{"name": "s", "dialect": "quiver", "urls": [server.url]}]},
            "reward",
        )
        with pytest.raises(RemoteError, match="401"):
            run(config, store, rollouts=rollouts.ref)
    assert store.numbers("arith", "rewards") == []


def test_what_the_policy_was_given_to_continue_begins_the_answer():
    batch = {"prompts": ["2 + 2?"], "completions": ["so</think>4"], "completion_ids": [[5]], "finish_reason": ["stop"],
             "rollout_ids": ["r"]}  # fmt: skip
    with FakeServer(lambda asked: reply({}, 400)) as server:
        ServerScorer(
            section(dialect="openrlhf", urls=[server.url]), prefill=lambda rollout: f"<{rollout}>"
        ).score(batch)
    body = server.asked[0].body
    assert body["query"][0].endswith("<r>so</think>4")


def test_only_dialects_that_send_text_begin_answers():
    assert section(dialect="openrlhf", prefill="<think>").begins_with == "<think>"
    assert (section(dialect="openrlhf").begins_with, section().begins_with) == (None, "")
    with pytest.raises(ConfigError, match="prefill"):
        section(prefill="<think>")
