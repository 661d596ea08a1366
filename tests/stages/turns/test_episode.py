"""One episode, turn by turn: what is read is the prompt and, of each turn, sampled ids and
observation; every limit has its end; sampled text is never encoded."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quiver.stages.generate.texts import Texts
from quiver.stages.model.chat.control_tokens import Guard
from quiver.stages.turns.config import Turns
from quiver.stages.turns.environment import Step, Turn
from quiver.stages.turns.episode import Episode, Setting
from quiver.stages.turns.tool_calls import parse_hermes
from tests.stages.generate.chat_families import family, make_bridge, open_template
from tests.stages.generate.recorded import play

CHAT = [{"role": "user", "content": "a number?"}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
NAME = "qwen25"


def encode(text: str, name: str = NAME) -> list[int]:
    return family(name).tokenizer.encode(text, add_special_tokens=False)


CALL_TOKENS = len(encode(CALL + family(NAME).end))
AB = [{"role": "user", "content": content} for content in "ab"]


@dataclass
class Game:
    """Episodes of one setting, by the chat template of a family."""

    setting: Setting
    name: str

    def play(
        self,
        texts: list[str],
        answer: Callable[[Turn], Step] | None = None,
        *,
        reward: float | None = None,
    ) -> tuple[dict, list[list[int]]]:
        """Play to the end with a policy that says `texts`, each with an end if it fits.

        `answer`: the environment; default: "12" to each call or turn. Returns the record, and what
        was read before each turn.
        """
        prompt_ids = self.setting.bridge.restart("row", CHAT).ids
        episode = Episode(self.setting, "row", prompt_ids, CHAT)

        def act() -> None:
            if episode.state == "act":
                episode.observed((answer or twelve)(episode.turn), 0.25)
            else:
                episode.rewarded(reward)

        end = family(self.name).end
        read = play(episode, lambda turn: encode(texts[turn] + end, self.name), act)
        record = episode.record()
        assert record["end_reason"] == episode.end_reason
        return record, read


def twelve(turn: Turn, text: str = "12") -> Step:
    """Answer each call, or the turn, with a text."""
    tools = [{"role": "tool", "name": call.name, "content": text} for call in turn.calls]
    return Step(messages=tools) if tools else Step(text=text)


def in_order(*steps: Step) -> Callable[[Turn], Step]:
    """An environment that gives these answers."""
    answers = iter(steps)
    return lambda turn: next(answers)


def failure_of(record: dict) -> str:
    assert {turn["reward"] for turn in record["turns"]} == {None}
    return json.loads(record["turns"][-1]["info"])["quiver_failure"]


@contextmanager
def game(
    name: str = NAME,
    guard: Guard | None = None,
    answers: bool = True,
    context: int = 4096,
    turn_tokens: int = 4096,
    **limits,
):
    """A game; the end of a turn is the family's."""
    made = family(name)
    with open_template(name) as template:
        bridge = make_bridge(name, template, guard)
        turns = Turns(**{"tools": ["mine.py:add"], "max_observation_tokens": 200, **limits})
        setting = Setting(
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
        yield Game(setting, name)


def check_ids(record: dict, read: list[list[int]]) -> list[int]:
    """Check that each turn read the prompt and, of each turn before it, sampled ids and
    observation. Returns all ids."""
    assert sum(turn["length"] for turn in record["turns"]) == len(record["completion_ids"])
    assert len(record["old_logprobs"]) == len(record["completion_ids"])
    sequence = list(read[0])
    sampled = iter(record["completion_ids"])
    for turn, before in zip(record["turns"], read, strict=True):
        assert sequence == before and turn["restart_ids"] is None
        sequence += [next(sampled) for _ in range(turn["length"])] + turn["observation_ids"]
    assert record["turns"][-1]["observation_ids"] == []
    return sequence


def test_what_is_read_is_the_prompt_and_of_each_turn_its_ids_and_the_observation():
    bad = "<tool_call>{</tool_call>"
    with game() as played:
        record, read = played.play([f"I add.{CALL}", bad, "It is 13."], reward=0.5)
    assert record["end_reason"] == "answered" and record["completion_text"] == "It is 13."
    text = family(NAME).tokenizer.decode(check_ids(record, read))
    between = "\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    first, second, last = record["turns"]
    assert json.loads(first["tool_calls"]) == [{"name": "add", "arguments": {"a": 1}}]
    assert first["observation"] == "12" and first["seconds"] == 0.25
    assert "not valid JSON" in second["parse_error"] and second["tool_calls"] is None
    assert second["observation"] == f"Error: {second['parse_error']}" and second["seconds"] == 0.0
    assert (last["observation"], last["tool_calls"], last["parse_error"]) == ("", None, None)
    assert [turn["reward"] for turn in record["turns"]] == [None, None, 0.5]
    assert text == (
        "<|im_start|>user\na number?<|im_end|>\n<|im_start|>assistant\n"
        f"I add.{CALL}<|im_end|>\n<|im_start|>user\n<tool_response>\n12{between}"
        f"{bad}<|im_end|>\n<|im_start|>user\n<tool_response>\n{second['observation']}{between}"
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
        ({"max_tokens": 2 * CALL_TOKENS}, [CALL, CALL], "max_tokens", 2),
        ({"turn_tokens": 10}, ["word " * 50], "max_tokens", 1),
        ({"context": 60}, ["word " * 50], "context", 1),
        ({"max_observation_tokens": 16}, [CALL], "max_observation_tokens", 1),
        ({}, ['<tool_call>{"name"'], "parse_error", 1),
        ({}, ["<tool_call>{}</tool_call>", "so be it"], "answered", 2),
    ],
)
def test_every_limit_has_its_end(limits, texts, end_reason, num_turns):
    with game(**limits) as played:
        record, read = played.play(texts)
    check_ids(record, read)
    assert record["end_reason"] == end_reason and len(record["turns"]) == num_turns
    assert len(record["completion_ids"]) <= played.setting.limits.max_tokens
    if texts[-1] == CALL and end_reason in ("max_tokens", "max_turns"):
        assert record["turns"][-1]["observation"] == "12", "the last call is still made"


def test_an_observation_that_leaves_no_room_for_an_answer_ends_the_episode():
    with game() as played:
        _, read = played.play([CALL, "done"])
        num_ids = len(read[1])
        for context, num_read in ((num_ids, 1), (num_ids + 1, 2)):
            tight = Game(replace(played.setting, context=context), NAME)
            record, read = tight.play([CALL, "done"])
            assert record["end_reason"] == "context" and len(read) == num_read
            assert bool(record["turns"][0]["observation_ids"]) == (num_read == 2)


# -- an environment that steps


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
    steps = in_order(
        Step(text="higher", reward=2.0, info={"hint": 1}),
        Step(text="a number, please"),
        Step(text="yes", reward=earned, done=True),
    )
    with game(answers=False) as played:
        record, read = played.play(["7", "<tool_call>", "9"], steps, reward=last_word)
    check_ids(record, read)
    assert record["end_reason"] == "environment"
    assert [turn["reward"] for turn in record["turns"]] == [2.0, None, expected]
    assert [turn["info"] for turn in record["turns"]] == ['{"hint": 1}', None, None]
    assert [turn["text"] for turn in record["turns"]] == ["7", "<tool_call>", "9"]
    assert record["turns"][-1]["observation"] == "yes"


def test_rewards_that_no_float32_holds_together_fail_the_episode():
    with game(answers=False) as played:
        step = Step(text="right", reward=3e38, done=True)
        record, _ = played.play(["7"], in_order(step), reward=3e38)
    assert record["end_reason"] == "environment_error" and "no float32" in failure_of(record)


def test_a_failed_episode_has_no_rewards():
    """Of an environment that fails or cannot begin, or an engine that gives up."""
    with game(answers=False) as played:
        hung, given_up, unopened = (
            Episode(played.setting, "row", encode("a"), CHAT) for _ in range(3)
        )
        for episode in (hung, given_up):
            episode.sampled(encode("7"), [-1.0], "stop")
            episode.observed(Step(text="go on", reward=0.5))
    hung.sampled(encode("7"), [-1.0], "stop")
    hung.failed("timeout", "it hung", 3.0)
    given_up.sampled(encode("7"), [-1.0], "abort")
    unopened.failed("environment_error", "no such row")
    assert failure_of(hung.record()) == "it hung" and hung.end_reason == "timeout"
    assert hung.record()["turns"][-1]["seconds"] == 3.0
    assert "gave this turn up" in failure_of(given_up.record())
    assert given_up.end_reason == "environment_error"
    assert failure_of(unopened.record()) == "no such row"
    assert unopened.record()["turns"][0]["length"] == 0


@pytest.mark.parametrize(
    ("name", "limits", "step", "end_reason", "why"),
    [
        (NAME, {"step_seconds": 1e-9}, {"text": "word " * 10_000}, "timeout", "generate.turns.step_seconds 1e-09"),
        (NAME, {"episode_seconds": 1e-9}, {"text": "word"}, "timeout", "generate.turns.episode_seconds 1e-09"),
        ("gemma", {}, {"messages": [{"role": "critic", "content": "no"}]}, "environment_error", "message of the role critic"),
        ("gemma", {}, {"messages": AB}, "environment_error", "roles must alternate"),
        ("gemma", {"rewritten": "restart"}, {"messages": AB}, "environment_error", "roles must alternate"),
        ("forging", {}, {"text": "12 (13)"}, "environment_error", "its text would become control tokens"),
        ("forging", {"rewritten": "restart"}, {"text": "12 (13)"}, "environment_error", "its text would become control tokens"),
    ],
)  # fmt: skip
def test_an_observation_that_no_policy_can_read_fails_the_episode(
    name, limits, step, end_reason, why
):
    with game(name, answers=False, **limits) as played:
        record, _ = played.play(["7"], in_order(Step(**step, reward=0.5)))
    assert record["end_reason"] == end_reason and why in failure_of(record)
    (turn,) = record["turns"]
    assert turn["observation"] and turn["observation_ids"] == []


# -- long observations


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
    with game(max_observation_tokens=1000) as played:
        encoded = []
        guard = played.setting.bridge._guard
        encode_whole = guard.encode

        def encode_spied(name, roles, contents, render, **options):
            encoded.append(sum(map(len, contents)))
            return encode_whole(name, roles, contents, render, **options)

        guard.encode = encode_spied
        record, _ = played.play([CALL * count, "done"], lambda turn: twelve(turn, text))
        guard.encode = encode_whole
    first = record["turns"][0]
    num_cut = json.loads(first["info"])["quiver_cut_characters"]
    assert record["end_reason"] == "answered" and len(first["observation_ids"]) <= 1000
    assert len(first["observation"]) < 200_000 and num_cut > 19_000_000 - 1000 * 128
    assert max(encoded) <= 1000 * 128 + count * 50
    assert f"[… {num_cut // count} characters cut …]" in first["observation"]


def test_a_last_observation_is_kept_in_short_and_too_many_messages_are_not_read():
    many = [{"role": "user", "content": "a"}] * 100_000
    with game(answers=False) as played:
        record, _ = played.play(["7"], in_order(Step(text=HUGE["words"], done=True)))
        unread, _ = played.play(["7"], in_order(Step(messages=many)))
    (turn,) = record["turns"]
    assert len(turn["observation"]) < 200 * 128 + 100
    assert json.loads(turn["info"])["quiver_cut_characters"] == 20_000_000 - 200 * 128
    assert unread["end_reason"] == "max_observation_tokens"


def test_a_turn_that_a_stop_string_ended_gets_the_templates_end():
    with game() as played:
        episode = Episode(played.setting, "row", encode("a"), CHAT)
        ids = encode(CALL)
        episode.sampled(ids, [-1.0] * len(ids), "stop", "</tool_call>")
        episode.observed(twelve(episode.turn))
        read = family(NAME).tokenizer.decode(episode.request().prompt_ids)
    assert read.startswith(f"a{CALL}<|im_end|>\n<|im_start|>user")


# -- a history that is written anew

THINKING = "<think>\nhm\n</think>\n\n7"


def test_where_thinking_is_dropped_a_new_sequence_begins():
    """A tool's message keeps it; a user's drops it, also that of a turn long before."""
    tool = Step(messages=[{"role": "tool", "name": "add", "content": "1"}])
    steps = (Step(text="more"), tool, Step(text="higher"), Step(text="yes", done=True))
    with game("qwen3", answers=False, rewritten="restart") as played:
        record, read = played.play(["5", THINKING, "8", "9"], in_order(*steps))
    texts = [family("qwen3").tokenizer.decode(ids) for ids in read]
    assert ["hm" in text for text in texts] == [False, False, True, False]
    assert "7<|im_end|>" in texts[3]
    turns = record["turns"]
    assert [turn["restart_ids"] for turn in turns] == [None, None, None, read[3]]
    assert [bool(turn["observation_ids"]) for turn in turns] == [True, True, False, False]
    assert turns[2]["observation"] == "higher"


def test_a_call_that_could_not_be_read_stands_in_the_new_sequence():
    bad = '<tool_call>{"name": oops}</tool_call>'
    steps = (Step(text="higher"), Step(text="yes", done=True))
    with game("qwen3", answers=False, rewritten="restart") as played:
        calling = replace(played.setting, parse=parse_hermes)
        texts = [f"<think>\nhm\n</think>\n\nI look.{bad}", "8", "9"]
        record, read = Game(calling, "qwen3").play(texts, in_order(*steps))
    assert record["turns"][0]["parse_error"] and record["turns"][2]["restart_ids"] == read[2]
    text = family("qwen3").tokenizer.decode(read[2])
    assert "hm" not in text and f"I look.{bad}<|im_end|>" in text


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
    with game(name, guard=guard) as played:
        secrets |= {"zebra", "walrus"}
        with pytest.raises(AssertionError, match="sampled text is encoded"):
            guard.encode("row", (), ["zebra"], lambda texts: texts[0])
        record, _ = played.play([f"zebra {CALL}", "<tool_call>walrus</tool_call>", "zebra"])
    assert record["end_reason"] == "answered" and "zebra" in record["completion_text"]


# -- whatever the policy says

WORDS = st.sampled_from(
    [CALL, CALL * 2, "done", "word " * 30, "<tool_call>{}</tool_call>", "<tool_call>", "</think>"]
)


@pytest.fixture(scope="module")
def shared():
    with game() as played:
        yield played


@settings(max_examples=20, deadline=None)
@given(
    texts=st.lists(WORDS, min_size=6, max_size=6),
    outputs=st.lists(st.text(max_size=40) | st.just("x " * 300), min_size=6, max_size=6),
    context=st.integers(40, 600),
    limits=st.fixed_dictionaries({
        "max_turns": st.integers(1, 5), "max_tokens": st.integers(1, 400), "max_tool_calls": st.none() | st.integers(1, 4),
        "max_observation_tokens": st.integers(16, 200),
    }),
)  # fmt: skip
def test_ids_add_up_whatever_is_said(shared, texts, outputs, context, limits):
    limits = shared.setting.limits.model_copy(update=limits)
    played = Game(replace(shared.setting, context=context, limits=limits), NAME)
    answers = iter(outputs * 20)
    record, read = played.play(texts, lambda turn: twelve(turn, next(answers)))
    assert len(check_ids(record, read)) <= context and max(map(len, read)) < context
    assert 1 <= len(record["turns"]) <= limits.max_turns
    assert len(record["completion_ids"]) <= limits.max_tokens
    for turn in record["turns"]:
        assert len(turn["observation_ids"]) <= limits.max_observation_tokens
    json.dumps(record["turns"], allow_nan=False)
