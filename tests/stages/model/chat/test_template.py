"""Chat templates in their child process: the text of transformers; broken, hostile and endless ones
end as ConfigErrors."""

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from quiver.schemas.errors import ConfigError
from quiver.stages.model.chat.template import Template
from tests import tiny

CHAT = [
    {"role": "system", "content": "<b>be</b> kind"},
    {"role": "user", "content": "  3 + four? é漢 'q' \n"},
]
VARIABLES = {
    "tools": None,
    "documents": None,
    "add_generation_prompt": True,
    "bos_token": "<s>",
    "enable_thinking": False,
}
GOOD = [
    tiny.CHATML,
    "{{ bos_token }}{% for m in messages %}[INST] {{ m.content | trim }} [/INST]{% endfor %}",
    "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m['content'].strip() | "
    "tojson }}{% endfor %}",
    "{%- if not tools %}\n  none\n{%- endif %}\n{% for m in messages %}\n    {{ m.role | upper "
    "}}\n{% endfor %}\n",
    "{% set ns = namespace(n=0) %}{% for m in messages[::-1] %}{% set ns.n = ns.n + "
    "m.content|length %}{% endfor %}{{ ns.n }}",
    "{% macro say(m) %}{{ m.role }}: {{ m.content }}{% endmacro %}{% for m in messages %}{{ "
    "say(m) }}{% break %}{% endfor %}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "{{ messages | tojson(indent=2) }}{{ {'b': 1, 'a': '<é>'} | tojson }}",
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>{% endif "
    "%}{{ unknown }}",
]


@pytest.mark.parametrize("template", GOOD)
def test_renders_as_transformers_does(template):
    expected, _ = render_jinja_template(conversations=[CHAT], chat_template=template, **VARIABLES)
    with Template(template, VARIABLES) as made:
        assert made.render("prompt 0", CHAT) == expected[0]


BROKEN = [
    ("{% for m in messages %}", "endfor"),
    ("{% if %}", "line 1"),
    ("{{ messages | nofilter }}", "nofilter"),
    ("{% include '/etc/passwd' %}", "loader"),
]
HOSTILE = [
    ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    ("{{ messages.nothing.there }}", "no attribute"),
    ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
    ("{{ cycler.__init__.__globals__.os.popen('id').read() }}", "unsafe"),
    ("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(0) }}", "Recursion"),
    ("{% for i in range(1000000000) %}x{% endfor %}", "blocks ranges"),
    (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        r"did not end within 1 seconds \(template_seconds\)",
    ),
    ("{{ 3 ** (10 ** 9) }}", r"did not end within 1 seconds \(template_seconds\)"),
    ("{{ messages[0].content * 10 ** 10 }}", "Memory"),
    ('{{ "\\ud800" }}', "lone surrogate"),
    ("{{ '{0.__class__.__init__.__globals__}'.format(messages) }}", "unsafe|no attribute"),
    ("{{ (messages | map(attribute='__class__') | first).__name__ }}", "unsafe|no attribute"),
    ("{% set _ = messages[0].update({'content': 'x'}) %}", "unsafe"),
    ("{{ raise_exception('\x1b[2J') }}", "2J"),
]


@pytest.mark.parametrize("template, why", BROKEN)
def test_a_broken_template_fails_before_any_row(template, why):
    with pytest.raises(ConfigError, match=why), Template(template, VARIABLES) as made:
        made.render("prompt 0", CHAT)


@pytest.mark.parametrize("template, why", HOSTILE)
def test_a_hostile_template_is_a_config_error_that_names_the_row(template, why):
    with (
        pytest.raises(ConfigError, match=why) as caught,
        Template(template, VARIABLES, seconds=1.0) as made,
    ):
        made.render("prompt sum-7", CHAT)
    assert caught.value.object in ("prompt sum-7", "prompt.template")


def test_a_child_killed_between_two_renderings_costs_no_row():
    with Template("{{ messages[0].content }}", VARIABLES) as made:
        child = made._script._child
        child.kill()
        child.wait()
        assert made.render("prompt 0", CHAT) == CHAT[0]["content"]


def test_what_the_sandbox_hides_is_empty():
    hidden = "{{ ''.__class__ }}{{ self._TemplateReference__context }}{{ lipsum.__globals__ }}"
    with Template(hidden, VARIABLES) as made:
        assert made.render("prompt 0", CHAT) == ""


def test_the_form_of_contents_is_that_of_a_chat_with_tools_or_without():
    content = "{{ m.content[0].text if tools else m.content }}"
    with Template("{% for m in messages %}[" + content + "]{% endfor %}", {"tools": None}) as made:
        chat = [{"role": "user", "content": "Which?"}]
        texts = [made.render("row", chat, tools=tools) for tools in (None, [{"name": "f"}], None)]
    assert texts == ["[Which?]"] * 3


def test_what_is_continued_ends_behind_its_last_message_whatever_others_hold():
    user = {"role": "user", "content": "What is CONTINUE_FINAL_MESSAGE_TAG ?"}
    with Template("{% for m in messages %}[{{ m.content }}]{% endfor %}", {}) as made:
        text = made.render_to_continue("row", [user, {"role": "assistant", "content": "It is"}])
    assert text == "[What is CONTINUE_FINAL_MESSAGE_TAG ?][It is"


CALLS = [
    {"role": "user", "content": "w?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "type": "function",
                "function": {"name": "f", "arguments": {"city": "Café", "ok": True, "no": None}},
            }
        ],
    },
    {"role": "tool", "content": "None"},
]
ARGUMENTS = '{"city": "Café", "ok": true, "no": null}'


def render_calls(content: str, call: str) -> str:
    """The rendering of CALLS by a template with an expression for contents, another for calls."""
    source = (
        "{% for m in messages %}[" + content + "{% for c in m.tool_calls or [] %}"
        "{% set f = c.function %}" + call + "{% endfor %}]{% endfor %}"
    )
    with Template(source, {}) as made:
        return made.render("prompt 0", CALLS)


@pytest.mark.parametrize(
    "call", ["{{ f.arguments }}", "{{ '' + f.arguments }}", "{{ f.arguments | tojson }}"]
)
def test_arguments_are_shown_as_json(call):
    text = render_calls("{{ m.content }}", "{{ f.name }} " + call)
    assert text == "[w?][f " + ARGUMENTS + "][None]"


def test_arguments_that_a_template_walks_stay_an_object():
    call = "{% for key, value in f.arguments.items() %}{{ key }}={{ value }} {% endfor %}"
    text = render_calls("{{ m.content }}", "{{ f.name }} " + call)
    assert text == "[w?][f city=Café ok=True no=None ][None]"


def test_calls_that_a_template_shows_beside_null_alone_are_shown():
    source = (
        "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}"
        "{% for c in m.tool_calls %}<{{ c.function.name + c.function.arguments }}>"
        "{% endfor %}{% else %}{{ m.content }};{% endif %}{% endfor %}"
    )
    with Template(source, {}) as made:
        assert made.render("prompt 0", CALLS) == f"w?;<f{ARGUMENTS}>None;"


@pytest.mark.parametrize(
    ("content", "end"),
    [
        ("{{ m.content }}", ""),
        ("{{ '' + m.content }}", ""),
        ("{% if m.content is not none %}{{ m.content }}\n{% endif %}", "\n"),
    ],
)
def test_null_is_never_printed(content, end):
    assert render_calls(content, "<{{ f.name }}>") == f"[w?{end}][<f>][None{end}]"


@pytest.mark.parametrize(
    ("content", "unseen"),
    [
        ("{{ m.content }}", {1}),
        ("{{ m.content if m.content is string else m.content[0].text }}", set()),
        ("{% for part in m.content %}{{ part.text }}{% endfor %}", set()),
        ("{{ m.content[:1000] }}", {0, 1}),
    ],
)
def test_parts_that_a_template_prints_as_python_does_are_not_seen(content, unseen):
    messages = [
        {"role": "user", "content": "w?"},
        {"role": "user", "content": [{"type": "text", "text": "w?"}]},
    ]
    with Template("{% for m in messages %}" + content + "{% endfor %}", {}) as made:
        assert made.unseen("prompt 0", messages) == unseen
