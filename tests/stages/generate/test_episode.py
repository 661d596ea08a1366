"""One episode, turn by turn: what is read is the prompt and, of each turn, sampled ids and
observation; every limit has its end; sampled text is never encoded."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quiver.schemas.errors import ConfigError
from quiver.stages.common.chat.control_tokens import Guard
from quiver.stages.common.environments.environment import Step
from quiver.stages.common.environments.pool import EnvironmentPool
from quiver.stages.generate.texts import Texts
from quiver.stages.generate.turns.config import Turns
from quiver.stages.generate.turns.episode import Episode, Setting
from quiver.stages.generate.turns.tool_calls import Call, parse_hermes
from tests.stages.generate.chat_families import family, make_bridge, open_template

CHAT = [{"role": "user", "content": "a number?"}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
NAME = "qwen25"


def encode(text: str, name: str = NAME) -> list[int]:
    return family(name).tokenizer.encode(text, add_special_tokens=False)


@contextmanager
def setting_of(
    name: str = NAME,
    guard: Guard | None = None,
    answers: bool = True,
    context: int = 4096,
    turn_tokens: int = 4096,
    **limits,
):
    """What episodes share; the end of a turn is the family's."""
    made = family(name)
    with open_template(name) as template:
        bridge = make_bridge(name, template, guard)
        turns = Turns(**{"tools": ["mine.py:add"], "max_observation_tokens": 200, **limits})
        yield Setting(
            limits=turns,
            bridge=bridge,
            parse=parse_hermes if answers else None,
            decode=Texts(made.tokenizer, encode(made.end, name)).decode,
            stop_ids=frozenset(encode(made.end, name)),
            max_turn_tokens=turn_tokens,
            context=context,
            answers=answers,
            histories=bridge.measure() if turns.rewritten == "restart" else (),
        )


def prompt_of(setting: Setting) -> list[int]:
    return setting.bridge.restart("row", CHAT).ids


def play(
    episode: Episode,
    texts: list[str],
    answer: Callable[[Call], str] = lambda call: "12",
    name: str = NAME,
    reward: float | None = None,
) -> list[list[int]]:
    """Play to the end with a policy that says `texts`, each with an end where it fits; what it read
    before each turn."""
    turns = iter(texts)
    read = []
    while episode.state != "ended":
        if episode.state == "sample":
            request = episode.request()
            assert request.turn == len(read) and request.max_tokens >= 1
            read.append(request.prompt_ids)
            ids = encode(next(turns) + family(name).end, name)
            finish_reason = "stop" if len(ids) <= request.max_tokens else "length"
            ids = ids[: request.max_tokens]
            episode.sampled(ids, [-0.5] * len(ids), finish_reason)
        elif episode.state == "act":
            calls = episode.turn.calls
            messages = [
                {"role": "tool", "name": call.name, "content": answer(call)} for call in calls
            ]
            episode.observed(
                Step(messages=messages) if calls else Step(text=answer(episode.turn.text)), 0.25
            )
        else:
            episode.rewarded(reward)
    return read


def test_what_is_read_is_the_prompt_and_of_each_turn_its_ids_and_the_observation():
    with setting_of() as setting:
        prompt_ids = prompt_of(setting)
        episode = Episode(setting, "row", prompt_ids, CHAT)
        read = play(episode, [f"I add.{CALL}", CALL, "It is 13."], reward=0.5)
    record = episode.record()
    assert record["end_reason"] == "answered" and record["completion_text"] == "It is 13."
    assert sum(turn["length"] for turn in record["turns"]) == len(record["completion_ids"])
    assert record["old_logprobs"] == [-0.5] * len(record["completion_ids"])
    sequence = list(prompt_ids)
    sampled = iter(record["completion_ids"])
    for turn, before in zip(record["turns"], read, strict=True):
        assert sequence == before
        sequence += [next(sampled) for _ in range(turn["length"])] + turn["observation_ids"]
        assert turn["restart_ids"] is None and turn["finish_reason"] == "stop"
    first, _, last = record["turns"]
    assert json.loads(first["tool_calls"]) == [{"name": "add", "arguments": {"a": 1}}]
    assert first["observation"] == "12" and first["seconds"] == 0.25
    assert (
        last["observation_ids"] == [] and last["observation"] == "" and last["tool_calls"] is None
    )
    assert [turn["reward"] for turn in record["turns"]] == [None, None, 0.5]
    text = family(NAME).tokenizer.decode(sequence)
    assert text == (
        "<|im_start|>user\na number?<|im_end|>\n<|im_start|>assistant\n"
        f"I add.{CALL}<|im_end|>\n<|im_start|>user\n<tool_response>\n12\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        f"{CALL}<|im_end|>\n<|im_start|>user\n<tool_response>\n12\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        "It is 13.<|im_end|>"
    )


@pytest.mark.parametrize(
    "limits, texts, end_reason, num_turns",
    [
        ({}, ["no call"], "answered", 1),
        ({"max_turns": 2}, [CALL, CALL], "max_turns", 2),
        ({"max_turns": 1}, [CALL], "max_turns", 1),
        ({"max_tool_calls": 2}, [CALL, CALL + CALL], "max_tool_calls", 2),
        ({"max_tool_calls": 2}, [CALL, CALL, "done"], "answered", 3),
        ({"max_tokens": 10}, ["word " * 50], "max_tokens", 1),
        ({"turn_tokens": 10}, ["word " * 50], "max_tokens", 1),
        ({"context": 60}, ["word " * 50], "context", 1),
        ({"max_observation_tokens": 16}, [CALL], "context", 1),
        ({}, ['<tool_call>{"name"'], "parse_error", 1),
        ({}, ["<tool_call>{}</tool_call>", "so be it"], "answered", 2),
    ],
)
def test_every_limit_has_its_end(limits, texts, end_reason, num_turns):
    with setting_of(**limits) as setting:
        episode = Episode(setting, "row", prompt_of(setting), CHAT)
        play(episode, texts)
    record = episode.record()
    assert record["end_reason"] == end_reason and len(record["turns"]) == num_turns
    assert record["turns"][-1]["observation_ids"] == []
    assert len(record["completion_ids"]) <= setting.limits.max_tokens


def test_an_observation_that_leaves_no_room_for_an_answer_ends_the_episode():
    with setting_of() as setting:
        prompt_ids = prompt_of(setting)
        turn_ids = encode(CALL + family(NAME).end)
        message = {"role": "tool", "name": "add", "content": "12"}
        observation = setting.bridge.observation("row", [message], has_end=True)
        num_ids = len(prompt_ids) + len(turn_ids) + len(observation.ids)
        for context, end_reason in (
            (num_ids, "context"),
            (num_ids + 1, "context"),
            (4096, "answered"),
        ):
            episode = Episode(replace(setting, context=context), "row", prompt_ids, CHAT)
            read = play(episode, [CALL, "done"])
            assert episode.end_reason == end_reason
            assert len(read) == 1 + (context > num_ids)
            assert bool(episode.record()["turns"][0]["observation_ids"]) == (context > num_ids)


def test_the_whole_limit_holds_over_turns():
    num_call_tokens = len(encode(CALL + family(NAME).end))
    with setting_of(max_tokens=2 * num_call_tokens) as setting:
        episode = Episode(setting, "row", prompt_of(setting), CHAT)
        play(episode, [CALL, CALL])
    record = episode.record()
    assert record["end_reason"] == "max_tokens"
    assert [turn["length"] for turn in record["turns"]] == [num_call_tokens] * 2
    assert record["turns"][1]["observation"] == "12", "the last call was still made"


def test_a_call_that_can_not_be_read_is_told_and_noted():
    with setting_of() as setting:
        episode = Episode(setting, "row", prompt_of(setting), CHAT)
        read = play(episode, ["<tool_call>{</tool_call>", CALL, "done"])
    first, second, _ = episode.record()["turns"]
    assert "not valid JSON" in first["parse_error"] and first["tool_calls"] is None
    assert "Error: the call is not valid JSON" in family(NAME).tokenizer.decode(read[1])
    assert second["parse_error"] is None and second["seconds"] == 0.25


def test_an_environment_that_steps_reads_text_and_ends_the_episode():
    with setting_of(answers=False) as setting:
        episode = Episode(setting, "row", prompt_of(setting), CHAT)
        for text, step in (
            ("7", Step(text="higher", reward=0.25, info={"hint": 1})),
            ("<tool_call>", Step(text="a number, please")),
            ("9", Step(text="yes", reward=1.0, done=True)),
        ):
            ids = encode(text + family(NAME).end)
            episode.sampled(ids, [-1.0] * len(ids), "stop")
            assert episode.state == "act" and episode.turn.text == text
            episode.observed(step)
        assert episode.state == "finish"
        episode.rewarded(None)
    record = episode.record()
    assert record["end_reason"] == "environment"
    assert [turn["reward"] for turn in record["turns"]] == [0.25, None, 1.0]
    assert [turn["info"] for turn in record["turns"]] == ['{"hint": 1}', None, None]
    last = record["turns"][-1]
    assert last["observation"] == "yes" and last["observation_ids"] == []


@pytest.mark.parametrize(
    ("earned", "last_word", "expected"),
    [
        (0.25, 0.5, 0.75),
        (None, 0.5, 0.5),
        (0.25, None, 0.25),
        (0.25, 0.0, 0.25),
        (None, None, None),
    ],
)
def test_the_environments_last_word_adds_to_what_the_last_turn_earned(earned, last_word, expected):
    with setting_of(answers=False) as setting:
        episode = Episode(setting, "row", prompt_of(setting), CHAT)
        for step in (Step(text="higher", reward=2.0), Step(text="yes", reward=earned, done=True)):
            ids = encode("7" + family(NAME).end)
            episode.sampled(ids, [-1.0] * len(ids), "stop")
            episode.observed(step)
        assert episode.state == "finish"
        episode.rewarded(last_word)
    assert [turn["reward"] for turn in episode.record()["turns"]] == [2.0, expected]


def test_rewards_that_no_float32_holds_together_fail_the_episode():
    with setting_of(answers=False) as setting:
        episode = Episode(setting, "row", prompt_of(setting), CHAT)
        episode.sampled(encode("7"), [-1.0] * len(encode("7")), "stop")
        episode.observed(Step(text="right", reward=3e38, done=True))
        episode.rewarded(3e38)
    (turn,) = episode.record()["turns"]
    assert episode.state == "ended" and episode.end_reason == "environment_error"
    assert turn["reward"] is None and "no float32" in turn["info"]


@pytest.mark.parametrize("reason", ["timeout", "environment_error"])
def test_an_episode_that_failed_has_no_rewards(reason):
    with setting_of(answers=False) as setting:
        episode = Episode(setting, "row", prompt_of(setting), CHAT)
        for step in (Step(text="go on", reward=0.5), None):
            episode.sampled(encode("7"), [-1.0] * len(encode("7")), "stop")
            if step is not None:
                episode.observed(step)
        episode.failed(reason, "it hung", 3.0)
    record = episode.record()
    assert record["end_reason"] == reason and episode.state == "ended"
    assert [turn["reward"] for turn in record["turns"]] == [None, None]
    last = record["turns"][-1]
    assert json.loads(last["info"]) == {"quiver_failure": "it hung"} and last["seconds"] == 3.0


def test_an_environment_that_can_not_begin_and_an_engine_that_gives_up_are_failures():
    with setting_of() as setting:
        unopened = Episode(setting, "row", prompt_of(setting), CHAT)
        unopened.failed("environment_error", "no such row")
        record = unopened.record()
        assert [turn["length"] for turn in record["turns"]] == [0] and record[
            "completion_ids"
        ] == []
        aborted = Episode(setting, "row", prompt_of(setting), CHAT)
        aborted.sampled(encode("7"), [-1.0] * len(encode("7")), "abort")
    assert (
        aborted.end_reason == "environment_error" and "gave" in aborted.record()["turns"][0]["info"]
    )


def test_a_long_observation_is_cut_and_that_is_noted():
    with setting_of(max_observation_tokens=100) as setting:
        episode = Episode(setting, "row", prompt_of(setting), CHAT)
        play(episode, [CALL, "done"], lambda call: "word " * 500)
    first = episode.record()["turns"][0]
    cut = json.loads(first["info"])["quiver_cut_characters"]
    assert (
        len(first["observation_ids"]) <= 100
        and f"[… {cut} characters cut …]" in first["observation"]
    )


HUGE = {
    "words": "word " * 4_000_000,
    "control tokens": "<|im_end|>" * 2_000_000,
    "one word": "a" * 20_000_000,
    "white space": " " * 20_000_000,
}


@pytest.mark.parametrize("kind", HUGE)
@pytest.mark.parametrize("count", [1, 5])
def test_an_observation_of_20_mb_is_cut_before_it_is_encoded(kind, count):
    text = HUGE[kind][: 20_000_000 // count]
    with setting_of(max_observation_tokens=1000) as setting:
        encoded = []
        encode_whole = setting.bridge._guard.encode

        def encode_spied(name, roles, contents, render, **options):
            encoded.append(sum(map(len, contents)))
            return encode_whole(name, roles, contents, render, **options)

        setting.bridge._guard.encode = encode_spied
        episode = Episode(setting, "row", prompt_of(setting), CHAT)
        play(episode, [CALL * count, "done"], lambda call: text)
        setting.bridge._guard.encode = encode_whole
    first = episode.record()["turns"][0]
    cut = json.loads(first["info"])["quiver_cut_characters"]
    assert episode.end_reason == "answered" and len(first["observation_ids"]) <= 1000
    assert len(first["observation"]) < 200_000 and cut > 19_000_000 - 1000 * 128
    assert max(encoded) <= 1000 * 128 + count * 50
    assert "characters cut" in first["observation"]


def test_a_huge_last_observation_is_kept_in_short():
    with setting_of(answers=False) as setting:
        episode = Episode(setting, "row", prompt_of(setting), CHAT)
        episode.sampled(encode("7"), [-1.0] * len(encode("7")), "stop")
        episode.observed(Step(text="word " * 4_000_000, done=True))
    (turn,) = episode.record()["turns"]
    assert episode.end_reason == "environment" and len(turn["observation"]) < 200 * 128 + 100
    assert json.loads(turn["info"])["quiver_cut_characters"] == 20_000_000 - 200 * 128


def test_more_messages_than_ids_are_not_encoded():
    with setting_of(answers=False) as setting:
        episode = Episode(setting, "row", prompt_of(setting), CHAT)
        episode.sampled(encode("7"), [-1.0] * len(encode("7")), "stop")
        episode.observed(Step(messages=[{"role": "user", "content": "a"}] * 100_000))
    assert episode.end_reason == "context"


@pytest.mark.parametrize("key", ["step_seconds", "episode_seconds"])
def test_the_time_of_reading_an_observation_counts(key):
    with setting_of(answers=False, **{key: 1e-9}) as setting:
        episode = Episode(setting, "row", prompt_of(setting), CHAT)
        episode.sampled(encode("7"), [-1.0] * len(encode("7")), "stop")
        episode.observed(Step(text="word " * 10_000))
    (turn,) = episode.record()["turns"]
    assert episode.end_reason == "timeout"
    assert f"generate.turns.{key} 1e-09" in turn["info"]


def test_a_role_that_the_template_does_not_write_fails_the_episode():
    with setting_of("gemma", answers=False) as setting:
        episode = Episode(setting, "row", prompt_of(setting), CHAT)
        episode.sampled(encode("7"), [-1.0] * len(encode("7")), "stop")
        episode.observed(Step(messages=[{"role": "critic", "content": "no"}]))
    assert episode.end_reason == "environment_error"
    assert "message of the role critic" in episode.record()["turns"][0]["info"]


@pytest.mark.parametrize("rewritten", ["refuse", "restart"])
@pytest.mark.parametrize(
    "name, contents, why",
    [
        ("gemma", ["a", "b"], "roles must alternate"),
        ("forging", ["12 (13)"], "its text would become control tokens"),
    ],
)
def test_an_observation_that_no_policy_can_read_fails_the_episode(name, contents, why, rewritten):
    messages = [{"role": "user", "content": content} for content in contents]
    with setting_of(name, answers=False, rewritten=rewritten) as setting:
        episode = Episode(setting, "row", prompt_of(setting), CHAT)
        episode.sampled(encode("7"), [-1.0] * len(encode("7")), "stop")
        episode.observed(Step(messages=messages, reward=0.5))
    (turn,) = episode.record()["turns"]
    assert episode.state == "ended" and episode.end_reason == "environment_error"
    assert turn["observation"] == "\n".join(contents) and turn["observation_ids"] == []
    assert turn["reward"] is None and why in json.loads(turn["info"])["quiver_failure"]


def test_a_turn_that_a_stop_string_ended_gets_the_templates_end():
    with setting_of() as setting:
        episode = Episode(setting, "row", prompt_of(setting), CHAT)
        ids = encode(CALL)
        episode.sampled(ids, [-1.0] * len(ids), "stop", "</tool_call>")
        episode.observed(Step(messages=[{"role": "tool", "name": "add", "content": "2"}]))
        observation_ids = episode.request().prompt_ids[-len(episode._turns[0].observation_ids) :]
    assert family(NAME).tokenizer.decode(observation_ids).startswith("<|im_end|>\n<|im_start|>user")


# -- a history that is written anew

THINKING = "<think>\nhm {}\n</think>\n\n{}"


def test_where_thinking_is_dropped_a_new_sequence_begins():
    with setting_of("qwen3", answers=False, rewritten="restart") as setting:
        episode = Episode(setting, "row", prompt_of(setting), CHAT)
        read = _restarted(episode)
    record = episode.record()
    decode = family("qwen3").tokenizer.decode
    restarts = [turn["restart_ids"] for turn in record["turns"]]
    assert restarts[0] is None and restarts[1] is None, "nothing was thought before it"
    assert (
        restarts[2] == read[2] and "hm" not in decode(read[2]) and "7<|im_end|>" in decode(read[2])
    )
    assert record["turns"][1]["observation_ids"] == [], "nobody reads it but in the new sequence"
    assert record["turns"][1]["observation"] == "higher" and record["turns"][0]["observation_ids"]


def test_thinking_of_an_earlier_turn_is_not_forgotten():
    """A tool's message keeps it; the user's message that follows a turn without any drops it."""
    tool = {"role": "tool", "name": "add", "content": "1"}
    with setting_of("qwen3", answers=False, rewritten="restart") as setting:
        episode = Episode(setting, "row", prompt_of(setting), CHAT)
        read = []
        for text, step in (
            (THINKING.format(1, "7"), Step(messages=[tool])),
            ("8", Step(text="higher")),
        ):
            ids = encode(text + "<|im_end|>", "qwen3")
            episode.sampled(ids, [-1.0] * len(ids), "stop")
            episode.observed(step)
            read.append(family("qwen3").tokenizer.decode(episode.request().prompt_ids))
    assert ["hm" in text for text in read] == [True, False]


def _restarted(episode: Episode) -> list[list[int]]:
    texts = ["5", THINKING.format(1, "7"), "9"]
    read = []
    for number, text in enumerate(texts):
        read.append(episode.request().prompt_ids)
        ids = encode(text + "<|im_end|>", "qwen3")
        episode.sampled(ids, [-1.0] * len(ids), "stop")
        episode.observed(Step(text="higher", done=number == 2))
    episode.rewarded(1.0)
    return read


def test_a_restart_needs_the_prompts_messages():
    with setting_of("qwen3", answers=False, rewritten="restart") as setting:
        episode = Episode(setting, "row", prompt_of(setting), None)
        ids = encode(THINKING.format(1, "7") + "<|im_end|>", "qwen3")
        episode.sampled(ids, [-1.0] * len(ids), "stop")
        with pytest.raises(ConfigError, match="needs the messages of the prompt"):
            episode.observed(Step(text="higher"))


# -- what was sampled is never encoded


class SpyEncoder:
    """An encoder that raises where it is to encode what was sampled."""

    def __init__(self, encoder, secrets: set[str]) -> None:
        self._encoder = encoder
        self._secrets = secrets

    def encode(self, text: str, **options):
        assert not [secret for secret in self._secrets if secret in text], (
            f"sampled text is encoded: {text!r}"
        )
        return self._encoder.encode(text, **options)

    def __getattr__(self, name: str):
        return getattr(self._encoder, name)


class SpyGuard(Guard):
    """A guard with such an encoder."""

    def __init__(self, tokenizer, secrets: set[str]) -> None:
        self._secrets = secrets
        super().__init__(tokenizer)

    def _new_encoder(self):
        return SpyEncoder(super()._new_encoder(), self._secrets)


@pytest.mark.parametrize("name", ["qwen25", "llama3", "gemma", "mistral"])
def test_sampled_text_is_never_encoded(name):
    secrets: set[str] = set()
    guard = SpyGuard(family(name).tokenizer, secrets)
    with setting_of(name, guard=guard) as setting:
        episode = Episode(setting, "row", prompt_of(setting), CHAT)
        secrets |= {"zebra", "walrus"}
        with pytest.raises(AssertionError, match="sampled text is encoded"):
            guard.encode("row", (), ["zebra"], lambda texts: texts[0])
        play(
            episode,
            [f"zebra {CALL}", "<tool_call>walrus</tool_call>", "zebra"],
            lambda call: "12",
            name,
        )
    assert episode.end_reason == "answered" and "zebra" in episode.record()["completion_text"]


# -- whatever the policy says

WORDS = st.sampled_from(
    [
        CALL,
        CALL + CALL,
        "done",
        "word " * 30,
        "<tool_call>{}</tool_call>",
        "<tool_call>",
        "</think>",
    ]
)


@settings(max_examples=40, deadline=None)
@given(
    texts=st.lists(WORDS, min_size=6, max_size=6),
    outputs=st.lists(st.text(max_size=40) | st.just("x " * 300), min_size=6, max_size=6),
    limits=st.fixed_dictionaries({
        "max_turns": st.integers(1, 5), "max_tokens": st.integers(1, 400), "max_tool_calls": st.none() | st.integers(1, 4),
        "max_observation_tokens": st.integers(16, 200), "context": st.integers(40, 600),
    }),
)  # fmt: skip
def test_ids_add_up_whatever_is_said(shared_setting, texts, outputs, limits):
    limits = dict(limits)
    setting = replace(
        shared_setting,
        context=limits.pop("context"),
        limits=shared_setting.limits.model_copy(update=limits),
    )
    prompt_ids = prompt_of(setting)
    episode = Episode(setting, "row", prompt_ids, CHAT)
    answers = iter(outputs * 20)
    read = play(episode, texts, lambda call: next(answers).replace("\ud800", ""))
    record = episode.record()
    assert 1 <= len(record["turns"]) == len(read) <= setting.limits.max_turns
    assert sum(turn["length"] for turn in record["turns"]) == len(record["completion_ids"])
    assert len(record["completion_ids"]) <= setting.limits.max_tokens
    assert record["turns"][-1]["observation_ids"] == []
    sequence = list(prompt_ids)
    sampled = iter(record["completion_ids"])
    for turn, before in zip(record["turns"], read, strict=True):
        assert sequence == before and len(before) < setting.context
        sequence += [next(sampled) for _ in range(turn["length"])] + turn["observation_ids"]
        assert len(turn["observation_ids"]) <= setting.limits.max_observation_tokens
    assert len(sequence) <= setting.context
    json.dumps(record["turns"], allow_nan=False)


@pytest.fixture(scope="module")
def shared_setting():
    with setting_of() as setting:
        yield setting


# -- with environments in processes

COUNTER = '''
class Counter:
    def reset(self, start, **columns):
        self.number = start

    def add(self, amount: int) -> int:
        """Go up.

        Args:
            amount: How far.
        """
        self.number += amount
        return self.number

    def get_reward(self):
        return float(self.number == 12)
'''


def test_an_episode_with_a_real_environment_in_a_process(tmp_path):
    path = tmp_path / "counter.py"
    path.write_text(COUNTER)
    config = Turns(environment=f"{path}:Counter", processes=1)
    add = '<tool_call>{"name": "add", "arguments": {"amount": %d}}</tool_call>'
    with setting_of() as setting, EnvironmentPool(config) as pool:
        assert setting.answers == pool.loaded.answers
        episode = Episode(setting, "row", prompt_of(setting), CHAT)
        key = pool.open({"start": 5}, seed=0)
        assert pool.replies(wait=None)[0].failure is None
        texts = iter([add % 3 + add % 4, "I am at 12."])
        while episode.state != "ended":
            if episode.state == "sample":
                ids = encode(next(texts) + family(NAME).end)
                episode.sampled(ids, [-1.0] * len(ids), "stop")
                continue
            if episode.state == "act":
                pool.step(key, episode.turn)
            else:
                pool.finish(key)
            (reply,) = pool.replies(wait=None)
            if episode.state == "act":
                episode.observed(reply.step, reply.seconds)
            else:
                episode.rewarded(reply.step.reward, reply.seconds)
    record = episode.record()
    assert record["turns"][0]["observation"] == "8\n12"
    assert record["turns"][-1]["reward"] == 1.0 and record["end_reason"] == "answered"
