"""What a reward model reads: ids written by hand for five families, and those that transformers
gives when it is used alone."""

from contextlib import closing

import pytest
from tokenizers import processors

from quiver.schemas.errors import ConfigError
from quiver.stages.core.processes import subprocesses
from quiver.stages.model.chat.template import Messages
from quiver.stages.reward.models.config import ModelConfig
from quiver.stages.reward.models.scorer import Reader, beginnings, token_id
from tests import tiny
from tests.stages.reward.reward_models import FAMILIES, byte_tokenizer

ASK, ANSWER = "What is 3 + 4?", "It is 7."
CHAT = [{"role": "user", "content": ASK}, {"role": "assistant", "content": ANSWER}]
AGAIN = [*CHAT, {"role": "user", "content": "Sure?"}, {"role": "assistant", "content": " é\n"}]
LLAMA_BOS, LLAMA_EOT = 256, 260
ZEPHYR_BOS, ZEPHYR_EOS = 257, 258


def qwen(role: bytes, content: bytes) -> list[int]:
    return [257, *role, *b"\n", *content, 258, *b"\n"]


def llama(role: bytes, content: bytes) -> list[int]:
    return [258, *role, 259, *b"\n\n", *content, LLAMA_EOT]


def mistral(role: bytes, content: bytes) -> list[int]:
    return [258, *b" ", *content, *b" ", 259] if role == b"user" else [*content, 257]


def gemma(role: bytes, content: bytes) -> list[int]:
    return [259, *role.replace(b"assistant", b"model"), *b"\n", *content, 260, *b"\n"]


def zephyr(role: bytes, content: bytes) -> list[int]:
    return [*b"<|", *role, *b"|>\n", *content, ZEPHYR_EOS, *b"\n"]


TURNS = {
    "qwen2": (qwen, qwen(b"system", b"You are a helpful assistant.")),
    "llama3": (llama, [LLAMA_BOS]),
    "mistral": (mistral, [256]),
    "gemma": (gemma, [258]),
    "zephyr": (zephyr, [ZEPHYR_BOS]),
}
"""A turn's ids and those that begin a conversation, by family."""


@pytest.fixture(scope="module")
def read():
    """Read a chat as a family's reward model does."""
    readers = {}

    def ids(family: str, messages: Messages, judge: bool = False) -> list[int]:
        if (family, judge) not in readers:
            given = FAMILIES[family]
            config = ModelConfig(model="rm", kind="token" if judge else "classifier")
            readers[family, judge] = Reader(byte_tokenizer(given), given.template, config)
        return readers[family, judge].read("rollout 0", messages)

    yield ids
    for reader in readers.values():
        reader.close()


@pytest.mark.parametrize("family", TURNS)
def test_ids_by_hand_and_as_the_model_is_used_alone(read, family):
    """Zephyr's template leaves BOS to the tokenizer, which apply_chat_template does not ask for
    one."""
    turn, begin = TURNS[family]
    trims = family in ("llama3", "gemma")
    for chat in (CHAT, AGAIN):
        ids = list(begin)
        for message in chat:
            content = message["content"].strip() if trims else message["content"]
            ids += turn(message["role"].encode(), content.encode())
        assert read(family, chat) == ids
        alone = byte_tokenizer(FAMILIES[family]).apply_chat_template(chat)["input_ids"]
        assert ids == [ZEPHYR_BOS] * (family == "zephyr") + alone


@pytest.mark.parametrize("written", [True, False])
@pytest.mark.parametrize("added", [True, False])
def test_exactly_one_bos(written, added):
    """By template or tokenizer or both; where neither has one, none."""
    family = FAMILIES["llama3"]
    tokenizer = byte_tokenizer(family)
    if not added:
        tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    template = family.template if written else family.template.replace("bos_token + ", "")
    with closing(Reader(tokenizer, template, ModelConfig(model="rm"))) as reader:
        ids = reader.read("rollout 0", CHAT)
    assert [id for id in ids if id == LLAMA_BOS] == ids[: int(written or added)]


def test_a_judge_is_asked_to_go_on(read):
    asked = [*CHAT, {"role": "user", "content": "Yes?"}]
    assert read("gemma", asked, judge=True)[-8:] == [*b"\n", 259, *b"model\n"]
    assert read("gemma", asked, judge=False)[-2:] == [260, *b"\n"]


# -- calls of tools

CALLS = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }}"
    "{{ call.function.arguments | tojson }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
)


def calling(city: str) -> Messages:
    call = {"type": "function", "function": {"name": "book", "arguments": {"city": city}}}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    return [CHAT[0], called, {"role": "tool", "content": "ok", "name": "book"}, CHAT[1]]


def test_calls_are_read_where_the_template_shows_them(caplog):
    """And no control token typed into one becomes one. A template that hides them is told once."""
    family = FAMILIES["qwen2"]
    config = ModelConfig(model="rm", name="judge")
    with closing(Reader(byte_tokenizer(family), CALLS, config)) as reader:
        for city in ("Rome", "Oslo"):
            ids = reader.read("rollout 0", calling(city))
            turns = [
                qwen(b"user", ASK.encode()),
                qwen(b"assistant", f'book{{"city": "{city}"}}'.encode()),
                qwen(b"tool", b"ok"),
                qwen(b"assistant", ANSWER.encode()),
            ]
            assert ids == [id for turn in turns for id in turn]
        typed = reader.read("rollout 0", calling("a<|im_end|>b"))
        assert [id for id in typed if id > 255] == [id for id in ids if id > 255]
        assert not caplog.records
    with closing(Reader(byte_tokenizer(family), family.template, config)) as reader:
        rome, oslo = (reader.read("rollout 0", calling(city)) for city in ("Rome", "Oslo"))
        assert rome == oslo
    (told,) = caplog.messages
    assert told.startswith("reward model judge: template does not show the calls of tools")


# -- what is typed


@pytest.mark.parametrize("family", FAMILIES)
def test_typed_control_tokens_are_text(read, family):
    given, neutral = FAMILIES[family], read(family, CHAT)
    controls = [id for id in neutral if id > 255]
    for text in given.tokens:
        for typed in (text, f"a{text}\n{text}b"):
            for chat in (
                [CHAT[0], {**CHAT[1], "content": typed}],
                [{**CHAT[0], "content": typed}, CHAT[1]],
            ):
                ids = read(family, chat)
                assert [id for id in ids if id > 255] == controls, text
                assert typed.encode() in bytes(id for id in ids if id < 256)


def test_a_token_that_is_not_special_stays_what_it_is(read):
    """`</think>` in an answer is one id for a reward model whose tokenizer has it, as when the
    model is used alone."""
    chat = [CHAT[0], {**CHAT[1], "content": "<think>sum</think>7"}]
    think, end = 259, 260
    ids = read("qwen2", chat)
    assert ids[-8:] == [think, *b"sum", end, *b"7", 258, *b"\n"]
    assert ids == byte_tokenizer(FAMILIES["qwen2"]).apply_chat_template(chat)["input_ids"]


# -- templates that fail


def test_a_row_that_the_template_refuses_is_an_error_of_that_row(read):
    with pytest.raises(ConfigError, match="System role not supported") as caught:
        read("gemma", [{"role": "system", "content": "Be kind."}, *CHAT])
    assert caught.value.object == "rollout 0"


def test_a_template_that_renders_no_answer_fails_before_any_row(monkeypatch):
    """And leaves no process."""
    started = []
    start = subprocesses.Process.__init__

    def watched(process, *args, **options):
        started.append(process)
        start(process, *args, **options)

    monkeypatch.setattr(subprocesses.Process, "__init__", watched)
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    for template, why in (
        ("{% for m in messages %}", "endfor"),
        ("{{ raise_exception('only users') }}", "only users"),
        (endless, "did not end"),
    ):
        config = ModelConfig(model="rm", template_seconds=0.3)
        with pytest.raises(ConfigError, match=why) as caught:
            Reader(byte_tokenizer(FAMILIES["qwen2"]), template, config)
        assert caught.value.object == "reward model rm: template"
    assert started and all(process.poll() is not None for process in started)


def test_a_word_is_one_token():
    tokenizer = tiny.tokenizer()
    assert token_id(tokenizer, "token", "\n") == tokenizer("\n")["input_ids"][0]
    with pytest.raises(ConfigError, match="is 3 tokens of the reward model"):
        token_id(tokenizer, "token", "Yes")
    with pytest.raises(ConfigError, match="is 0 tokens"):
        token_id(tokenizer, "token", "")


def test_prompts_that_do_not_tell_are_refused(store, sample):
    sample([["7"]], {"answer": [7]})
    with pytest.raises(ConfigError, match="beginning of the answer") as caught:
        beginnings(None, store.open("arith/prompts@1"), None)
    assert "prefill" in caught.value.next and "sum-0" in caught.value.object
