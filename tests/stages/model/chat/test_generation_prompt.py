"""Where the assistant's text begins, in published templates: headers written by hand, prefilled
text told from them."""

import json

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from quiver.schemas.errors import ConfigError
from quiver.stages.core.store import Store
from quiver.stages.model import small
from quiver.stages.model.chat.control_tokens import Guard
from quiver.stages.model.chat.generation_prompt import learn_start, prefill, reserved_ids
from quiver.stages.model.chat.template import Template
from quiver.stages.model.checkpoints import PolicyConfig
from tests.stages.reward.reward_models import FAMILIES, Family, byte_tokenizer
from tests.tiny import EOS, make_folder

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
# its way with reasoning: kept in the last turn alone, where an empty block stands if there is none
QWEN3 = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content "
    "}}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% "
    "endif %}{% endif %}"
)
DEEPSEEK_R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}{% "
    "else %}"
    "<｜Assistant｜>{{ m.content.split('</think>')[-1] }}<｜end▁of▁sentence｜>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}"
)
DEEPSEEK_V31 = DEEPSEEK_R1.replace("<｜Assistant｜>{{", "<｜Assistant｜></think>{{").replace(
    "<think>\n", "<think>"
)
SMOLLM3 = (  # what is prefilled hangs on the system message
    CHATML + "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if '/no_think' in messages[0].content %}<think>\n\n</think>\n{% endif %}{% endif %}"
)


def learn(template, roles=("user",), tokens=(), **variables):
    guard = Guard(byte_tokenizer(Family(("<s>", *tokens), template)))
    with Template(template, {"bos_token": "<s>", "eos_token": "</s>", **variables}) as made:
        return learn_start(
            lambda messages, generation: made.render(
                "t", messages, add_generation_prompt=generation
            ),
            roles,
            guard.token_ends,
        )


def rendered(template, messages, **variables):
    text, _ = render_jinja_template(
        conversations=[messages],
        chat_template=template,
        add_generation_prompt=True,
        bos_token="<s>",
        **variables,
    )
    return text[0]


@pytest.mark.parametrize(
    "family, roles, start",
    [
        ("qwen2", ["system", "user", "assistant", "tool"], "<|im_end|>\n<|im_start|>assistant\n"),
        ("llama3", ["user"], "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"),
        ("mistral", ["user", "assistant", "user"], " [/INST]"),
        ("gemma", ["user"], "<end_of_turn>\n<start_of_turn>model\n"),
        ("zephyr", ["system", "user"], "</s>\n<|assistant|>\n"),
        ("gemma", ["system", "user"], None),  # it refuses system messages
        ("mistral", ["user", "assistant"], None),
    ],
)
def test_the_header_of_the_assistants_turn(family, roles, start):
    assert learn(FAMILIES[family].template, roles) == start


@pytest.mark.parametrize(
    "template, variables, start, begun",
    [
        (QWEN3, {}, "<|im_end|>\n<|im_start|>assistant\n", ""),
        (
            QWEN3,
            {"enable_thinking": False},
            "<|im_end|>\n<|im_start|>assistant\n",
            "<think>\n\n</think>\n\n",
        ),
        (DEEPSEEK_R1, {}, "<｜Assistant｜>", "<think>\n"),
        (DEEPSEEK_V31, {}, "<｜Assistant｜>", "<think>"),
        (
            CHATML + "<|im_start|>assistant\n{{ '<think>\n' }}",
            {},
            "<|im_end|>\n<|im_start|>assistant\n",
            "<think>\n",
        ),
    ],
)
def test_text_behind_the_header_belongs_to_the_answer(template, variables, start, begun):
    assert learn(template, tokens=("<｜Assistant｜>", "<think>", "</think>"), **variables) == start
    chat = [{"role": "user", "content": f"why {start}?"}]
    assert prefill(rendered(template, chat, **variables), start) == begun
    assert prefill("Q: hi", start) is None


def test_what_is_prefilled_may_differ_from_prompt_to_prompt():
    start = learn(SMOLLM3, ("system", "user"))
    user = {"role": "user", "content": "hi"}
    texts = [
        rendered(SMOLLM3, [{"role": "system", "content": system}, user])
        for system in ("be kind", "/no_think")
    ]
    assert [prefill(text, start) for text in texts] == ["", "<think>\n\n</think>\n"]


@pytest.mark.parametrize(
    "template",
    [
        "Q: {{ messages[0].content }}\nA:",  # shows no answer
        # nor a header
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt "
        "%}<think>{% endif %}",
        "{% for m in messages %}{{ m.content | upper }}|{% endfor %}",
        "{{ raise_exception('no') }}",
    ],
)
def test_a_template_that_does_not_tell(template):
    assert learn(template) is None


def test_a_template_may_fail_and_render_again():
    endless = (
        "{% if messages|length > 1 %}{% for a in range(99999) %}{% for b in range(99999) %}{% "
        "endfor %}{% endfor %}{% endif %}"
    )
    user = {"role": "user", "content": "hi\0"}
    with Template(endless + "{{ messages[0].content }}{{ mark }}", {"mark": "."}, 0.5) as made:
        with pytest.raises(ConfigError, match="did not end"):
            made.render("t", [user, user])
        assert made.render("t", [user], mark="!") == "hi\0!"
        assert made.render("t", [user]) == "hi\0."


def test_what_a_config_names_and_is_no_id_is_not_reserved(tmp_path):
    """Python compares neither dicts nor lists of lists by hash."""
    config = json.loads((make_folder(tmp_path / "model") / "config.json").read_text())
    config |= {"bos_token_id": {"a": 1}, "image_token_id": [[7], 9], "pad_token_id": "x"}
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    config = PolicyConfig(model=str(tmp_path / "model"))
    policy = small.import_without_weights(config, Store(tmp_path / "store"), "a")
    assert reserved_ids(policy) == {EOS, 9}
