"""[[reward.servers]]: what is refused before anything is asked, and that no message shows a secret."""

import pytest
from pydantic import ValidationError

from schemas.errors import ConfigError
from stages.common.config import Config, parse
from stages.reward.remote import ServerScorer
from stages.reward.servers import ServerConfig, check

CANARY = "sk-canary-5f1d"
HERE = "http://127.0.0.1:8700"


class Section(Config):
    """A recipe's section around it, so that errors are those that a user reads."""

    servers: tuple[ServerConfig, ...]


def section(**options) -> ServerConfig:
    return parse(Section, {"servers": [{"dialect": "quiver", "urls": [HERE], **options}]}, "reward").servers[0]


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
        ({"label": "answer"}, "label belongs to dialect openrlhf and slime"),
        ({"rubric": "{prompt}"}, "rubric belongs to dialect openai-judge"),
        ({"range": [1, 0]}, "the low end must be below the high end"),
        ({"rescale": True}, "rescale needs range"),
        ({"retrys": 3}, "did you mean retries?"),
        ({"name": "a b"}, "servers.0.name"),
        ({"dialect": "openai-judge", "model": "m"}, "needs model"),
        ({"dialect": "openai-judge", "model": "m", "range": [0, 1], "score_pattern": "("}, "no regular expression"),
        ({"dialect": "openai-judge", "model": "m", "range": [0, 1], "score_pattern": "[0-9]"}, "one group"),
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


@pytest.mark.parametrize("value", [None, "", "short", "has space in it", "líne-of-text", "two\nlines-here"])
def test_a_token_must_be_in_its_variable(value, monkeypatch):
    config = section(token="env:REWARD_KEY")
    monkeypatch.delenv("REWARD_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("REWARD_KEY", value)
    for asks in (check, ServerScorer):
        with pytest.raises(ConfigError, match="environment variable REWARD_KEY") as caught:
            asks(config)
        assert not value or value not in str(caught.value)
    monkeypatch.setenv("REWARD_KEY", CANARY)
    check(config)
    check(section())


@pytest.mark.parametrize("host", ["1.2.3.999", "xn--a", "[v1.x]"])
def test_a_host_that_no_request_can_have_is_refused_before_any(host):
    with pytest.raises(ConfigError, match=r"urls|a URL must be"):
        ServerScorer(section(urls=[f"http://{host}:80/"]))


def test_the_fingerprint_is_of_what_decides_the_number(monkeypatch):
    monkeypatch.setenv("REWARD_KEY", CANARY)
    first = ServerScorer(section()).fingerprint
    for same in ({"name": "x"}, {"weight": 2}, {"extra": True}, {"retries": 9}, {"batch_rows": 1}, {"token": "env:REWARD_KEY"}):
        assert ServerScorer(section(**same)).fingerprint == first
    for other in (
        {"revision": "2"},
        {"urls": ["http://127.0.0.1:8701"]},
        {"range": [0, 1]},
        {"columns": []},
        {"dialect": "slime"},
    ):
        assert ServerScorer(section(**other)).fingerprint != first


def test_columns_that_are_sent_must_be_there():
    judge = {"dialect": "openai-judge", "model": "m", "range": [0, 1], "rubric": "{prompt} {completion} {answer}"}
    for options in ({"columns": ["answer"]}, {"dialect": "slime", "label": "answer"}, judge):
        ServerScorer(section(**options)).require(["answer", "level"])
        with pytest.raises(ConfigError, match=r"sends answer.*did you mean answers\?"):
            ServerScorer(section(**options)).require(["answers"])
    ServerScorer(section()).require([])
