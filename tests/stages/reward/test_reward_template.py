"""What a reward model reads: ids written by hand for five families, and those that transformers
gives when it is used alone."""

import json
import os
import subprocess
from contextlib import closing
from functools import partial

import pyarrow as pa
import pytest
from tokenizers import processors

from quiver.schemas import prompts as kind
from quiver.schemas.errors import ConfigError
from quiver.stages.common.chat.template import Messages
from quiver.stages.generate.stage import Config as GenerateConfig
from quiver.stages.prompt.stage import Config as PromptConfig
from quiver.stages.reward.models.config import ModelConfig
from quiver.stages.reward.models.scorer import Reader, beginnings, token_id
from tests import tiny
from tests.stages.reward.reward_models import FAMILIES, byte_tokenizer
from tests.writing import run_here

generate = partial(run_here, "generate")
make_prompts = partial(run_here, "prompt")


SYSTEM, ASK, ANSWER = "Be kind.", "What is 3 + 4?", "It is 7."
DEFAULT_SYSTEM = b"You are a helpful assistant."
CHAT = [{"role": "user", "content": ASK}, {"role": "assistant", "content": ANSWER}]
AGAIN = [*CHAT, {"role": "user", "content": "Sure?"}, {"role": "assistant", "content": " é\n"}]
QWEN_START, QWEN_END = 257, 258
LLAMA_BOS, LLAMA_START, LLAMA_HEADED, LLAMA_EOT = 256, 258, 259, 260
MISTRAL_BOS, MISTRAL_EOS, INST, INST_END = 256, 257, 258, 259
GEMMA_BOS, GEMMA_START, GEMMA_END = 258, 259, 260
ZEPHYR_BOS, ZEPHYR_EOS = 257, 258


def qwen(role: bytes, content: bytes) -> list[int]:
    return [QWEN_START, *role, *b"\n", *content, QWEN_END, *b"\n"]


def llama(role: bytes, content: bytes) -> list[int]:
    return [LLAMA_START, *role, LLAMA_HEADED, *b"\n\n", *content, LLAMA_EOT]


def gemma(role: bytes, content: bytes) -> list[int]:
    return [GEMMA_START, *role, *b"\n", *content, GEMMA_END, *b"\n"]


def zephyr(role: bytes, content: bytes) -> list[int]:
    return [*b"<|", *role, *b"|>\n", *content, ZEPHYR_EOS, *b"\n"]


GOLDEN = [
    (
        "qwen2",
        CHAT,
        qwen(b"system", DEFAULT_SYSTEM)
        + qwen(b"user", b"What is 3 + 4?")
        + qwen(b"assistant", b"It is 7."),
    ),
    (
        "qwen2",
        [{"role": "system", "content": SYSTEM}, *AGAIN],
        qwen(b"system", b"Be kind.")
        + qwen(b"user", b"What is 3 + 4?")
        + qwen(b"assistant", b"It is 7.")
        + qwen(b"user", b"Sure?")
        + qwen(b"assistant", b" \xc3\xa9\n"),
    ),
    (
        "llama3",
        CHAT,
        [LLAMA_BOS, *llama(b"user", b"What is 3 + 4?"), *llama(b"assistant", b"It is 7.")],
    ),
    (
        "llama3",
        [{"role": "system", "content": SYSTEM}, *AGAIN],
        [
            LLAMA_BOS,
            *llama(b"system", b"Be kind."),
            *llama(b"user", b"What is 3 + 4?"),
            *llama(b"assistant", b"It is 7."),
            *llama(b"user", b"Sure?"),
            *llama(b"assistant", b"\xc3\xa9"),
        ],
    ),
    (
        "mistral",
        CHAT,
        [MISTRAL_BOS, INST, *b" What is 3 + 4? ", INST_END, *b"It is 7.", MISTRAL_EOS],
    ),
    (
        "mistral",
        AGAIN,
        [
            *[MISTRAL_BOS, INST, *b" What is 3 + 4? ", INST_END, *b"It is 7.", MISTRAL_EOS],
            *[INST, *b" Sure? ", INST_END, *b" \xc3\xa9\n", MISTRAL_EOS],
        ],
    ),
    ("gemma", CHAT, [GEMMA_BOS, *gemma(b"user", b"What is 3 + 4?"), *gemma(b"model", b"It is 7.")]),
    (
        "zephyr",
        CHAT,
        [ZEPHYR_BOS, *zephyr(b"user", b"What is 3 + 4?"), *zephyr(b"assistant", b"It is 7.")],
    ),
]


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


@pytest.mark.parametrize("family, chat, ids", GOLDEN)
def test_ids_by_hand(read, family, chat, ids):
    assert read(family, chat) == ids


@pytest.mark.parametrize("family, chat", [each[:2] for each in GOLDEN])
def test_ids_as_the_model_is_used_alone(read, family, chat):
    """Zephyr's template leaves BOS to the tokenizer, which apply_chat_template does not ask for
    one."""
    alone = byte_tokenizer(FAMILIES[family]).apply_chat_template(chat)["input_ids"]
    assert read(family, chat) == [ZEPHYR_BOS] * (family == "zephyr") + alone


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
    assert read("gemma", asked, judge=True)[-len(b"\nmodel\n") - 1 :] == [
        *b"\n",
        GEMMA_START,
        *b"model\n",
    ]
    assert read("gemma", asked, judge=False)[-2:] == [GEMMA_END, *b"\n"]


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
    assert ids[-8:] == [think, *b"sum", end, *b"7", QWEN_END, *b"\n"]
    assert ids == byte_tokenizer(FAMILIES["qwen2"]).apply_chat_template(chat)["input_ids"]


def test_a_turns_own_tokens_are_control_even_when_not_marked_special():
    """Zephyr-like templates whose roles are plain added tokens: those of the turns cannot be
    typed, others stand."""
    given = FAMILIES["zephyr"]
    tokenizer = byte_tokenizer(given._replace(plain=("<|user|>", "<|assistant|>", "<|odd|>")))
    user, assistant, odd = 259, 260, 261
    with closing(Reader(tokenizer, given.template, ModelConfig(model="rm"))) as reader:
        ids = reader.read("rollout 0", [CHAT[0], {**CHAT[1], "content": "<|user|><|odd|>"}])
    assert [id for id in ids if id > 255] == [
        ZEPHYR_BOS,
        user,
        ZEPHYR_EOS,
        assistant,
        odd,
        ZEPHYR_EOS,
    ]


# -- templates that fail


def test_a_row_that_the_template_refuses_is_an_error_of_that_row(read):
    with pytest.raises(ConfigError, match="System role not supported") as caught:
        read("gemma", [{"role": "system", "content": SYSTEM}, *CHAT])
    assert caught.value.object == "rollout 0"


@pytest.mark.parametrize(
    "template, why",
    [
        ("{% for m in messages %}", "endfor"),
        ("{{ raise_exception('only users') }}", "only users"),
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "did not end",
        ),
    ],
)
def test_a_template_that_renders_no_answer_fails_before_any_row(template, why):
    before = children()
    with pytest.raises(ConfigError, match=why) as caught:
        Reader(
            byte_tokenizer(FAMILIES["qwen2"]),
            template,
            ModelConfig(model="rm", template_seconds=0.3),
        )
    assert caught.value.object == "reward model rm: template"
    assert children() == before


def children() -> set[str]:
    done = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(os.getpid())],
        capture_output=True,
        text=True,
        check=False,
    )
    return {pid for pid in done.stdout.split() if os.path.exists(f"/proc/{pid}/cmdline")}


def test_text_of_any_kind_can_be_read(read):
    assert read("llama3", [CHAT[0], {"role": "assistant", "content": "a\0\U0010fffd"}])[-7:] == [
        *b"a\0",
        *"\U0010fffd".encode(),
        LLAMA_EOT,
    ]


def test_a_word_is_one_token():
    tokenizer = tiny.tokenizer()
    assert token_id(tokenizer, "token", "\n") == tokenizer("\n")["input_ids"][0]
    with pytest.raises(ConfigError, match="is 3 tokens of the reward model"):
        token_id(tokenizer, "token", "Yes")
    with pytest.raises(ConfigError, match="is 0 tokens"):
        token_id(tokenizer, "token", "")


# -- what the policy was given to continue


@pytest.fixture
def asked(store, policy, tmp_path):
    """Prompts whose template makes the policy continue `<think>`, unless the system message says
    otherwise."""
    thinks = (
        "<|im_start|>assistant\n{% if 'quick' not in messages[0].content %}{{ '<think>\n' }}{% "
        "endif %}"
    )
    (tmp_path / "thinks.jinja").write_text(tiny.CHATML.replace("<|im_start|>assistant\n", thinks))

    def make(*system: str):
        chats = [[{"role": "system", "content": each}, CHAT[0]] for each in system]
        (tmp_path / "chats.jsonl").write_text(
            "\n".join(json.dumps({"messages": chat}) for chat in chats)
        )
        config = PromptConfig(
            source=str(tmp_path / "chats.jsonl"), template=str(tmp_path / "thinks.jinja")
        )
        return store.open(make_prompts(config, store, policy=policy.ref))

    return make


def answered(store, prompts):
    """Real rollouts of them, one each."""
    config = GenerateConfig(engine="scripted", samples_per_prompt=1, sampling={"max_tokens": 8})
    return store.open(generate(config, store, prompts=prompts.ref, policy="tiny/policy@0"))


def test_the_end_of_the_prompt_begins_the_answer(store, asked):
    for systems in (("calm", "calm"), ("quick", "calm", "quick")):
        rollouts = answered(store, prompts := asked(*systems))
        found = [
            beginnings(None, prompts, rollouts)(id)
            for id in rollouts.table(["rollout_id"]).column(0).to_pylist()
        ]
        assert found == ["" if system == "quick" else "<think>\n" for system in systems]


def test_prompts_that_do_not_tell_are_refused(write):
    columns = {
        "group_id": ["sum-0"],
        "messages": pa.array([CHAT[:1]], kind.MESSAGES),
        "prompt_text": ["ask"],
    }
    arrays = [
        *columns.values(),
        pa.array([[1]], kind.SCHEMA.field("prompt_ids").type),
        pa.array([{"a": 1}]),
    ]
    schema = pa.schema(
        [*list(kind.SCHEMA)[:4], pa.field("columns", arrays[-1].type, nullable=False)],
        kind.SCHEMA.metadata,
    )
    prompts = write("prompts", pa.table(arrays, schema=schema))
    with pytest.raises(ConfigError, match="beginning of the answer") as caught:
        beginnings(None, prompts, None)
    assert "prefill" in caught.value.next and "sum-0" in caught.value.object
