"""[[reward.servers]]: what is refused before anything is asked, that no message shows a secret, and
servers in the stage."""

from functools import partial

import pytest
from pydantic import ValidationError

from quiver.schemas.errors import ConfigError, RemoteError
from quiver.stages.core import config as common
from quiver.stages.core.config import parse
from quiver.stages.reward.servers.config import ServerConfig, fingerprint
from quiver.stages.reward.servers.dialects import named_columns
from quiver.stages.reward.servers.dialects.rows import fill, of_several_words
from quiver.stages.reward.servers.scorer import ServerScorer
from quiver.stages.reward.stage import Config
from tests.stages.reward.fake_server import FakeServer, reply
from tests.writing import run_here

run = partial(run_here, "reward")
CANARY = "sk-canary-5f1d"
HERE = "http://127.0.0.1:8700"
JUDGE = {"dialect": "openai-judge", "model": "m", "range": [0, 1]}


class Section(common.Config):
    """A recipe's section around it, so that errors are those that a user reads."""

    servers: tuple[ServerConfig, ...]


def section(**options) -> ServerConfig:
    servers = [{"dialect": "quiver", "urls": [HERE], **options}]
    return parse(Section, {"servers": servers}, "reward").servers[0]


@pytest.mark.parametrize(
    ("options", "problem"),
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
        ({"urls": [7]}, "a URL must be"),
        ({"urls": []}, "servers.0.urls"),
        ({"urls": ["http://scores.example"], "token": "env:KEY"}, "unencrypted"),
        ({"dialect": "quiver2"}, "servers.0.dialect"),
        ({"label": "answer"}, "label belongs to dialect openrlhf,"),
        ({"prefill": "<think>"}, "prefill belongs to dialect openrlhf and"),
        ({"rescale": True}, "rescale needs range"),
        ({"dialect": "openai-judge", "model": "m"}, "needs model"),
        ({**JUDGE, "score_pattern": "("}, "not a regular expression"),
        ({**JUDGE, "score_pattern": "[0-9]"}, "one group"),
        ({"dialect": "openrlhf", "score_key": "x"}, "rewards or scores"),
        ({"dialect": "vllm-classify", "score_key": "LABEL_1"}, "number of a class"),
        ({"dialect": "openrlhf", "message_template": "{name}"}, "knows no {name}"),
    ],
)
def test_a_wrong_section_is_refused_and_no_secret_is_shown(options, problem):
    with pytest.raises(ConfigError) as caught:
        section(**options)
    assert problem in str(caught.value) and CANARY not in str(caught.value)


def test_a_section_made_in_python_shows_no_secret_either():
    with pytest.raises(ValidationError) as caught:
        ServerConfig(dialect="quiver", urls=[HERE], token=CANARY)
    assert "env:NAME" in str(caught.value) and CANARY not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"urls": ["http://[::1]:1", "http://127.0.0.2", "http://localhost:1"], "token": "env:KEY"},
        {"urls": ["https://scores.example/v2/score"], "token": "env:KEY"},
        {"urls": ["http://scores.example"], "token": "env:KEY", "allow_plain_http": True},
        {"urls": ["http://scores.example"]},
    ],
)
def test_a_right_section_survives_being_written_down(options):
    parsed = section(**options)
    assert parsed.name == "quiver"
    assert section(**parsed.model_dump(mode="json")) == parsed


def test_only_true_lets_a_token_go_over_plain_http():
    options = {"urls": ["http://scores.example"], "token": "env:KEY"}
    with pytest.raises(ConfigError, match="https"):
        section(**options, allow_plain_http="false")


@pytest.mark.parametrize("token", [None, "", "short", "has space in it", "líne-of-text"])
def test_a_token_must_be_in_its_variable(token, monkeypatch):
    config = section(token="env:REWARD_KEY")
    monkeypatch.setenv("REWARD_KEY", token or "")
    if token is None:
        monkeypatch.delenv("REWARD_KEY")
    with pytest.raises(ConfigError, match="environment variable REWARD_KEY") as caught:
        ServerScorer(config)
    assert not token or token not in str(caught.value)


@pytest.mark.parametrize("host", ["1.2.3.999", "xn--a", "[v1.x]"])
def test_a_host_that_no_request_can_have_is_refused_before_any(host):
    with pytest.raises(ConfigError, match=r"urls|a URL must be"):
        ServerScorer(section(urls=[f"http://{host}:80/"]))


def test_the_fingerprint_is_of_what_decides_the_number():
    first = fingerprint(section())
    for same in {"name": "x"}, {"weight": 2}, {"extra": True}, {"retries": 9}, {"token": "env:KEY"}:
        assert fingerprint(section(**same)) == first
    for changed in {"revision": "2"}, {"urls": ["http://127.0.0.1:8701"]}, {"range": [0, 1]}:
        assert fingerprint(section(**changed)) != first


DECIDING = [
    ({}, {"dialect": "openrlhf"}),
    ({}, {"urls": ["http://127.0.0.1:8701"]}),
    ({}, {"columns": ["answer"]}),
    ({"dialect": "openrlhf"}, {"label": "answer"}),
    ({"dialect": "openrlhf"}, {"score_key": "scores"}),
    ({"dialect": "openrlhf"}, {"reply_template": ""}),
    ({"dialect": "openrlhf"}, {"prefill": "<think>"}),
    (JUDGE, {"model": "n"}),
    (JUDGE, {"range": [0, 2]}),
    (JUDGE, {"rescale": True}),
    (JUDGE, {"rubric": "{prompt}"}),
    (JUDGE, {"score_pattern": "([0-9])"}),
    (JUDGE, {"message_template": "{content}"}),
    (JUDGE, {"max_tokens": 9}),
    (JUDGE, {"arguments": {"temperature": 0}}),
    ({"dialect": "vllm-score"}, {"use_activation": True}),
    ({}, {"revision": "2"}),
]


@pytest.mark.parametrize(("options", "changed"), DECIDING)
def test_each_key_that_decides_the_number_is_in_the_fingerprint(options, changed):
    assert fingerprint(section(**{**options, **changed})) != fingerprint(section(**options))


def test_no_key_that_may_decide_the_number_is_forgotten_here():
    about = {"name", "weight", "extra", "fingerprint"}
    assert section().key().keys() - about == {key for _, changed in DECIDING for key in changed}


@pytest.mark.parametrize(
    "options",
    [
        {"columns": ["answer"]},
        {"dialect": "openrlhf", "label": "answer"},
        {**JUDGE, "rubric": "{prompt} {completion} {answer}"},
    ],
)
def test_columns_that_are_sent_must_be_there(options):
    ServerScorer(section(**options)).require(["answer", "level"])
    with pytest.raises(ConfigError, match=r"needs answer.*did you mean answers\?"):
        ServerScorer(section(**options)).require(["answers"])


@pytest.mark.parametrize(
    "options",
    [
        {"columns": ["reward_model.truth"]},
        {"dialect": "openrlhf", "label": "reward_model.truth"},
        {**JUDGE, "rubric": "{reward_model.truth}"},
    ],
)
def test_fields_that_are_sent_must_be_there(options):
    server = ServerScorer(section(**options))
    server.require({"reward_model": {"truth": None}})
    server.require(["reward_model"])
    with pytest.raises(ConfigError, match=r"has no field truth; did you mean truths\?"):
        server.require({"reward_model": {"truths": None}})


@pytest.mark.parametrize("name", ["ground-truth", "truth"])
def test_a_name_in_a_rubric_that_is_no_column_is_refused(name):
    judge = ServerScorer(section(**JUDGE, rubric=f"{{{name}}} {{{{{name}}}}}"))
    judge.require([name])
    with pytest.raises(ConfigError, match=f"needs .?{name}") as caught:
        judge.require(["truths"])
    assert "{{word}} is sent as {word}" in caught.value.next


def test_words_in_a_rubric_are_prose_unless_a_column_has_their_name():
    section_ = section(**JUDGE, rubric=r"{the answer}, as \boxed{{final word}} or {your score}")
    ServerScorer(section_).require(["level"])
    assert named_columns(section_, ["level"]) == set()
    assert named_columns(section_, ["the answer"]) == {"the answer"}
    assert fill(section_.rubric, {"the answer": 7}) == r"7, as \boxed{{final word}} or {your score}"
    plain, escaped = (section(**JUDGE, rubric=rubric) for rubric in ("{{a}}", "{{a.b}}"))
    assert not of_several_words(plain.rubric) and of_several_words(escaped.rubric) == {"a.b"}


@pytest.mark.parametrize(
    "options",
    [
        {"columns": ["images"]},
        {"dialect": "openrlhf", "label": "images"},
        {**JUDGE, "rubric": "{images}"},
    ],
)
def test_files_of_prompts_are_not_sent_by_name(options):
    """A column of the same name may be, such as of addresses."""
    server = ServerScorer(section(**options))
    server.require({"images": None})
    with pytest.raises(ConfigError, match="cannot be sent images"):
        server.require({"images": ()})


def test_the_text_that_the_policy_continued_begins_the_answer_in_dialects_that_send_text():
    assert section(dialect="openrlhf", prefill="<think>").begins_with == "<think>"
    assert (section(dialect="openrlhf").begins_with, section().begins_with) == (None, "")
    batch = {"prompts": ["2 + 2?"], "completions": ["so</think>4"], "completion_ids": [[5]]}
    batch |= {"finish_reason": ["stop"], "rollout_ids": ["r"]}
    with FakeServer(lambda asked: reply({}, 400)) as server:
        config = section(dialect="openrlhf", urls=[server.url])
        ServerScorer(config, prefill=lambda rollout: f"<{rollout}>").score(batch)
    assert server.asked[0].body["query"] == ["2 + 2?<r>so</think>4"]


# -- in the stage


def half_a_point_a_word(asked):
    """A completion of one word is an error there."""
    rows = []
    for row in asked.body["rows"]:
        num_words = len(row["completion"].split())
        failed = {"reward": None, "error": "too short"}
        scored = {"reward": num_words / 2, "extra": {"n": 1}}
        rows.append({"id": row["id"], **(failed if num_words == 1 else scored)})
    return reply({"format": 1, "rows": rows})


def test_the_stage_adds_a_server_s_part_to_those_of_functions(sample, store, monkeypatch):
    monkeypatch.setenv("REWARD_KEY", CANARY)
    rollouts = sample([["one two", "one"], ["a b c", "d e"]], {"answer": [1, 2]})
    with FakeServer(half_a_point_a_word) as server:
        words = {"name": "words", "dialect": "quiver", "urls": [server.url], "weight": 2.0}
        words |= {"token": "env:REWARD_KEY", "extra": True}
        length = {"use": "length", "arguments": {"target": 2}, "weight": 10.0}
        config = {"functions": [length], "servers": [words], "max_invalid": 0.25}
        config = parse(Config, config, "reward")
        version = store.open(run(config, store, rollouts=rollouts.ref))
        num_asked = len(server.asked)
        again = run(config, store, rollouts=rollouts.ref)
    assert (str(again), len(server.asked)) == (str(version.ref), num_asked)
    assert server.asked[0].headers["authorization"] == f"Bearer {CANARY}"
    rows = {row["rollout_id"]: row for row in version.table().to_pylist()}
    assert rows["0-sum-0-0"]["reward"] == 10 * 1 + 2 * 1.0
    assert rows["0-sum-0-0"]["extra"] == {"words": '{"extra": {"n": 1}}'}
    assert rows["0-sum-1-0"]["reward"] == 10 * 0 + 2 * 1.5
    assert rows["0-sum-0-1"]["reward"] is None
    assert "too short" in rows["0-sum-0-1"]["errors"]["words"]
    assert version.manifest.status == {"scored": 3, "not_scored": 0, "failed": 1}
    assert CANARY not in (version.files.folder / "manifest.json").read_text()


def test_a_server_that_refuses_ends_the_stage_and_keeps_nothing_half(sample, store):
    rollouts = sample([["a", "b"]], {"answer": [1]})
    with FakeServer(lambda asked: reply({}, 401)) as server:
        config = parse(Config, {"servers": [{"dialect": "quiver", "urls": [server.url]}]}, "reward")
        with pytest.raises(RemoteError, match="401"):
            run(config, store, rollouts=rollouts.ref)
    assert store.numbers("arith", "rewards") == []
