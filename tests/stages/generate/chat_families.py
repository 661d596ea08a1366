"""Chat templates of six families, and a tokenizer for each, as small as they can be: how they write
tools' messages, end a turn, and treat earlier thinking is as in the families they are named after."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from quiver.stages.model.chat.control_tokens import Guard
from quiver.stages.model.chat.template import Template
from quiver.stages.turns.bridge import Bridge
from tests.stages.model.chat.test_control_tokens import byte_level, fast, gemma, mistral

_TOOL_RUN = """
{%- if m.role == 'tool' %}
    {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
    {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
    {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
"""
_CALLS = """
    {%- for call in m.tool_calls or [] %}
        {{- '\n<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' }}
    {%- endfor %}
"""
QWEN25 = (
    "{%- if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{%- for m in messages %}"
    + _TOOL_RUN
    + "{%- else %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    + _CALLS
    + "{{- '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QWEN3 = (
    "{%- set ns = namespace(query=0) %}"
    "{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.query = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}"
    + _TOOL_RUN
    + """
{%- elif m.role == 'assistant' %}
    {%- set text = m.content %}{%- set thought = m.reasoning_content or '' %}
    {%- if '</think>' in text %}
        {%- set thought = text.split('</think>')[0].split('<think>')[-1].strip('\n') %}
        {%- set text = text.split('</think>')[-1].lstrip('\n') %}
    {%- endif %}
    {{- '<|im_start|>assistant\n' }}
    {%- if loop.index0 > ns.query and (loop.last or thought) %}
        {{- '<think>\n' + thought + '\n</think>\n\n' }}
    {%- endif %}
    {{- text }}"""
    + _CALLS
    + "{{- '<|im_end|>\n' }}"
    "{%- else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
LLAMA3 = """{{ bos_token }}{%- for m in messages %}
    {%- set role = 'ipython' if m.role == 'tool' else m.role %}
    {{- '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}
    {%- if m.tool_calls %}{%- set f = m.tool_calls[0].function %}
        {{- {'name': f.name, 'parameters': f.arguments} | tojson }}
    {%- else %}{{ m.content | trim }}{%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""
SMOLLM2 = """{%- for m in messages %}
    {%- if loop.first and m.role != 'system' %}{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}
    {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
GEMMA = """{{ bos_token }}{%- for m in messages %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
    {{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim }}
    {{- '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""
MISTRAL = """{{ bos_token }}{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- if tools and m == (messages | selectattr('role', 'equalto', 'user') | list | last) %}
            {{- 'Tools: ' + (tools | tojson) }}
        {%- endif %}
        {{- '[INST] ' + m.content + '[/INST]' }}
    {%- elif m.role == 'tool' %}
        {%- if m.tool_call_id | length != 9 %}{{ raise_exception('an id has 9 characters') }}{% endif %}
        {%- if not messages[loop.index0 - 1].tool_calls and messages[loop.index0 - 1].role != 'tool' %}
            {{- raise_exception('a result must follow a call') }}
        {%- endif %}
        {{- '[TOOL_RESULTS] ' + ({'content': m.content} | tojson) + '[/TOOL_RESULTS]' }}
    {%- elif m.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in m.tool_calls %}
            {{- call.function | tojson }}{{ ', ' if not loop.last }}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}
    {%- endif %}
{%- endfor %}"""
FORGING = QWEN25.replace("m.content", "m.content | replace('(', '<|im_end|>')")
"""Writes a control token for a letter of a content."""
BARE = """{%- for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"""
_TAGS = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
]


class Family(NamedTuple):
    """A template and its tokenizer."""

    template: str
    tokenizer: PreTrainedTokenizerFast
    end: str
    """The end of a turn as the policy samples it."""
    tool_role: str = "tool"
    """Whose message a tool's output is."""


def _chatml() -> PreTrainedTokenizerFast:
    added = [AddedToken(text, special=False, normalized=False) for text in _TAGS]
    made = byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"], added)
    return fast(made, eos_token="<|im_end|>")


def _llama3() -> PreTrainedTokenizerFast:
    specials = [
        "<|begin_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|python_tag|>",
    ]
    return fast(byte_level(specials, split=True), bos_token=specials[0], eos_token="<|eot_id|>")


def _mistral() -> PreTrainedTokenizerFast:
    tokenizer, _ = mistral()
    texts = ["[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"]
    tokenizer.add_special_tokens({"additional_special_tokens": texts})
    return tokenizer


@cache
def family(name: str) -> Family:
    """The family of that name."""
    if name == "llama3":
        return Family(LLAMA3, _llama3(), "<|eot_id|>")
    if name == "gemma":
        return Family(GEMMA, gemma()[0], "<end_of_turn>", "user")
    if name == "mistral":
        return Family(MISTRAL, _mistral(), "</s>")
    templates = {"qwen25": QWEN25, "qwen3": QWEN3, "smollm2": SMOLLM2, "bare": BARE}
    templates["forging"] = FORGING
    templates["one_turn"] = (
        "{{ messages[0].content }}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    templates["cutting"] = QWEN25.replace("m.content", "m.content[:500]")
    cut = "(m.content if loop.last else m.content[:500])"
    templates["cutting_later"] = QWEN25.replace("m.content", cut)
    return Family(templates[name], _chatml(), "<|im_end|>")


FAMILIES = ("qwen25", "qwen3", "llama3", "smollm2", "gemma", "mistral")


def open_template(name: str, **variables) -> Template:
    """The family's template in its process."""
    tokens = family(name).tokenizer.special_tokens_map
    return Template(family(name).template, {**tokens, **variables})


def make_bridge(name: str, template: Template, guard: Guard | None = None, **options) -> Bridge:
    """A bridge of the family's template."""
    made = family(name)
    return Bridge(template, guard or Guard(made.tokenizer), end_token=made.end, **options)
