"""Prompts as a served model reads them: ids of published templates equal those of transformers'
`apply_chat_template`. Where the guard makes them differ, a warning names what it spelled out."""

import logging
from contextlib import contextmanager

import pytest

from quiver.stages.common.runtime.runner import run_stage
from quiver.stages.common.store import Store
from quiver.stages.prompt.config import Config
from quiver.stages.prompt.rows import Renderer
from tests import tiny
from tests.stages.prompt.templates import FAMILIES
from tests.stages.reward.reward_models import byte_tokenizer

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Get the weather, é.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Where to look."}},
            "required": ["city"],
        },
    },
}


def system(content):
    return {"role": "system", "content": content}


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Rome"}},
}
ASKED = [user("weather in Rome?"), assistant("", tool_calls=[CALL])]
RESULT = {"role": "tool", "name": "weather", "tool_call_id": "call00001", "content": "18 degrees"}
CHATS = {
    "question": ([user("3 + four?")], None),
    "parts": ([user("  two\n lines ")], None),
    "system": ([system("Be kind."), user("3 + four?")], None),
    "history": ([user("one?"), assistant("1"), user("two?"), assistant(" 2 "), user("3?")], None),
    "thinking": ([user("one?"), assistant("<think>\nhm\n</think>\n\n1"), user("two?")], None),
    "tags": ([user("Reason between <think> and </think>, or <tool_call>.")], None),
    "tools": ([user("weather in Rome?")], [WEATHER]),
    "system and tools": ([system("Be kind."), user("weather?")], [WEATHER]),
    "called": ([*ASKED, RESULT], [WEATHER]),
    "called before": ([*ASKED, RESULT, assistant("Mild."), user("and now?")], [WEATHER]),
    "prefix": ([user("one?"), assistant("Let me see: ")], None),
    "thought prefix": ([user("one?"), assistant("<think>\nLet me")], None),
    "prefix behind system": ([system("Be kind."), user("one?"), assistant("1")], None),
}
LEFT_OUT = {
    "gemma": {"system", "system and tools", "called", "called before", "prefix behind system"},
    "smolvlm": {"called"},
    "deepseek_r1": {"called"},
}
"""Chats that the published template refuses, or does not show."""


def make_policy(store, run_name, folder, tokenizer):
    tiny.make_folder(folder, vocabulary=len(tokenizer))
    for old in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / old).unlink()
    tokenizer.save_pretrained(folder)
    config = {"model": str(folder)}
    return store.open(run_stage("policy", config, store, into=run_name, in_process=True))


@pytest.fixture(scope="module")
def policy_of(tmp_path_factory):
    """The policy of a family, made once."""
    store = Store(tmp_path_factory.mktemp("store"))
    made = {}

    def policy_of(name, tokenizer=None):
        if name not in made:
            tokenizer = tokenizer or byte_tokenizer(FAMILIES[name])
            folder = tmp_path_factory.mktemp("model")
            made[name] = make_policy(store, name.replace("_", "-"), folder, tokenizer), tokenizer
        return made[name]

    return policy_of


@contextmanager
def opened(policy, template=None, tools=None, **config):
    fields = {"source": "rows.jsonl", "messages": "messages", **config}
    renderer = Renderer(Config(**fields), policy, template, tools)
    try:
        yield renderer
    finally:
        renderer.close()


def expected(tokenizer, messages, tools=None, **variables):
    is_continued = messages[-1]["role"] == "assistant"
    return tokenizer.apply_chat_template(
        messages,
        tools=tools,
        add_generation_prompt=not is_continued,
        continue_final_message=is_continued,
        return_dict=False,
        **variables,
    )


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_are_those_of_transformers(policy_of, family, caplog):
    policy, tokenizer = policy_of(family)
    with opened(policy) as renderer:
        for name, (messages, tools) in CHATS.items():
            if name in LEFT_OUT.get(family, ()):
                continue
            given = messages
            if family == "smolvlm":  # it reads parts alone
                given = [
                    {**each, "content": [{"type": "text", "text": each["content"]}]}
                    for each in messages
                ]
            prompt = renderer.render(name, messages, variables={"tools": tools})
            assert prompt["prompt_ids"] == expected(tokenizer, given, tools), name
    assert not [each for each in warnings(caplog) if "stays text" in each]
