"""A row's chat: its messages, the variables that it gives the template, and warnings about both.

The variables are its own tools and template arguments, in the columns that TRL and verl use. What
others gave is checked by `schemas/outside.py`; here errors name the row. Rows that look unintended
(a blank question, a chat as text, an answer at the end) are rendered unchanged. Each warning is
given once, for the first row; warnings about roles and control tokens once for each of them.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

from quiver.schemas.errors import ConfigError, printable, quoted_name
from quiver.schemas.outside import Message, shape_of
from quiver.schemas.plain import problem_of, read_clean_json
from quiver.stages.core.names_elsewhere import COLUMNS
from quiver.stages.model.media import WORDS

from .config import Config

ARGUMENTS = "chat_template_kwargs"
"""Column with a row's own template arguments."""
ROLES = ("assistant", "system", "tool", "user")
"""The roles that chat templates support; some support `developer` too, and then mention it."""
_NOT_ARGUMENTS = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_CHAT_AS_TEXT = re.compile(r"""\s*\[\s*\{[^}]{0,100}['"]role['"]\s*:""")
log = logging.getLogger(__name__)


@contextmanager
def naming_row(name: str) -> Iterator[None]:
    """Raise a ValueError of `schemas/outside.py` as a ConfigError about row `name`."""
    try:
        yield
    except ValueError as error:
        raise bad_row(name, str(error)) from None


def bad_row(name: str, message: str) -> ConfigError:
    """Return the error for an incorrect row."""
    return ConfigError(name, message, next="correct the row, or take it out of the source")


# -- messages


def text_of(content: str | list[dict[str, str]]) -> str:
    """Return the text of a content, without its media."""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)


def as_content_parts(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a content as a list of parts."""
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def with_system(messages: list[Message], system: str | None) -> list[Message]:
    """Return `messages` behind the recipe's message `system`, unless they begin with their own.

    A system message whose content is blank gets the text of `system`.
    """
    if system is None:
        return messages
    first, *others = messages
    if first["role"] != "system":
        return [{"role": "system", "content": system}, *messages]
    parts = as_content_parts(first["content"])
    if all(part["type"] == "text" and not part["text"].strip() for part in parts):
        return [{**first, "content": system}, *others]
    return messages


def show_media(name: str, messages: list[Message], counts: Mapping[str, int]) -> list[Message]:
    """Return `messages` with as many parts of each modality as `counts` says, or none.

    If they have no parts of a modality, all are put before the text of the first user message.
    Raises ConfigError if they have another number.
    """
    contents = [as_content_parts(message["content"]) for message in messages]
    shown = Counter(part["type"] for content in contents for part in content)
    missing = []
    for modality, word in WORDS.items():
        count = counts.get(modality, 0)
        if shown[modality] not in (0, count):
            raise bad_row(name, f"shows {shown[modality]} {word}s, and the row has {count}")
        missing += [{"type": modality}] * (count - shown[modality])
    if not missing:
        if not any(counts.values()):  # many templates accept only text
            return [{**each, "content": text_of(each["content"])} for each in messages]
        return messages
    for place, message in enumerate(messages):
        if message["role"] == "user":
            content = missing + as_content_parts(message["content"])
            return [*messages[:place], {**message, "content": content}, *messages[place + 1 :]]
    kind = missing[0]["type"]
    problem = f"has {counts[kind]} {WORDS[kind]}s and no message of a user that could show them"
    raise bad_row(name, f'{problem}: add parts {{type: "{kind}"}}')


# -- variables of the template


class RowVariables(NamedTuple):
    """Variables of the template for one row."""

    tools: list[dict[str, Any]] | None = None
    """JSON schemas of functions."""
    arguments: Mapping[str, Any] = {}

    def as_variables(self) -> dict[str, Any]:
        """Return the variables under the template's names."""
        return {**self.arguments, **({"tools": self.tools} if self.tools else {})}


def columns_of(config: Config, columns: Iterable[str]) -> dict[str, str]:
    """Return the source's columns for the template, by purpose: `tools` and `arguments`.

    There are none with [generate.turns], which renders later turns without the row.
    """
    if not config.has_chats or config.turns is not None:
        return {}
    named = {"arguments": ARGUMENTS}
    if config.tools and "tools" not in config.template_arguments:
        named["tools"] = config.tools
    columns = set(columns) - {getattr(config, config.input)}
    return {purpose: column for purpose, column in named.items() if column in columns}


def read_variables(
    name: str, cells: Mapping[str, Any], reserved: Collection[str], tools_column: str = "tools"
) -> RowVariables:
    """Return the variables in row `name`'s cells of `columns_of`.

    `reserved` are variables that a row may not set. Raises ConfigError.
    """
    column, way_out = ARGUMENTS, ""
    try:
        arguments = _parsed(cells.get("arguments")) or {}
        if not isinstance(arguments, dict):
            raise ValueError(f"holds {shape_of(arguments)}, expected an object")
        for argument in arguments:
            if argument in _NOT_ARGUMENTS or argument in reserved:
                raise ValueError(f"sets {argument}, which a row cannot set")
        column = tools_column
        way_out = ', or set data.tools = "" if the column is for something else'
        tools = _parsed(cells.get("tools")) or []
        if not isinstance(tools, list):
            raise ValueError(f"holds {shape_of(tools)}, expected a list of schemas")
        tools = [_parsed(tool) for tool in tools]
        for tool in tools:  # in transformers' form, with or without its wrapper
            function = tool.get("function", tool) if isinstance(tool, dict) else None
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                shown = printable(json.dumps(tool))[:80]
                raise ValueError(f"has {shown}, expected a function's schema")
    except ValueError as error:
        problem = f"column {quoted_name(column)} {error}"
        raise ConfigError(name, problem, next=f"correct the row{way_out}") from None
    return RowVariables(tools or None, arguments)


def _parsed(cell: Any) -> Any:
    """Return the value of JSON text; other cells are returned unchanged.

    Raises ValueError if JSON cannot represent the value.
    """
    try:
        parsed = read_clean_json(cell) if isinstance(cell, str) and cell else cell
        problem = problem_of(parsed)
        if not problem:
            json.dumps(parsed)
    except (TypeError, ValueError) as error:
        problem = printable(error)
    if problem:
        raise ValueError(f"cannot be read: {problem}")
    return parsed


# -- warnings


def warn_unused(config: Config, columns: Collection[str]) -> None:
    """Warn once per source about unused columns that other trainers make prompts of."""
    used = {getattr(config, config.input), *config.media.values()}
    used |= {*columns_of(config, columns).values()}
    for column in columns:
        if column in COLUMNS and column not in used:
            _warn_unused_column(config.source, column)


@cache
def _warn_unused_column(source: str, column: str) -> None:
    log.warning(
        "%s: column %s is not used in prompts: %s", printable(source), column, COLUMNS[column]
    )


class Remarks:
    """The warnings of one renderer."""

    def __init__(self) -> None:
        self._subjects: set[str] = set()
        """Subjects of the warnings given so far."""

    def say_once(self, subject: str, message: str) -> None:
        """Warn, unless there was a warning about this `subject` before."""
        if subject not in self._subjects:
            self._subjects.add(subject)
            log.warning("%s", message)

    def on_text(self, name: str, column: str, text: str) -> None:
        """Warn about a blank question in row `name`, and about a chat that is written as text."""
        if not text.strip():
            self._on_blank(f"{name}: column {column}")
        if _CHAT_AS_TEXT.match(text):
            self.say_once(
                "chat as text",
                f"{name}: column {column} holds a chat written as text, which the policy is shown "
                f'unchanged. If it is JSON, set data.messages = "{column}"',
            )

    def _on_blank(self, place: str) -> None:
        self.say_once(
            "blank",
            f"{place} is blank, so the policy is asked nothing: correct the row, or take it out of "
            "the source",
        )

    def on_chat(self, name: str, messages: list[Message], template: str) -> None:
        """Warn about the chat of row `name`.

        Subjects are roles that the `template` (its text) does not support, a blank question, and an
        answer at the end of the chat.
        """
        supported = sorted({*ROLES, *(["developer"] if "developer" in template else [])})
        roles = [message["role"] for message in messages]
        for role in sorted(set(roles).difference(supported)):
            self.say_once(
                f"role {role} as such",
                f"{name}: a message has the role {role}; the chat template is made for "
                f"{', '.join(supported)}: rename it, or set prompt.template to one that shows it",
            )
        if roles[-1] == "user" and not str(messages[-1]["content"]).strip():
            self._on_blank(f"{name}: the last message of the chat")
        if {"system", "developer"}.issuperset(roles):
            self.say_once(
                "no question",
                f"{name}: the chat asks nothing, it has only system messages: correct the row, or "
                "take it out of the source",
            )
        if roles[-1] == "assistant":
            self.say_once(
                "continued",
                f"{name}: the chat ends with a message of the assistant, which the policy "
                "continues, here and in other rows. Reward functions see what comes after it, and "
                "prompt_text has the beginning. If it is the answer to learn, take it out",
            )

    def on_spelled(self, name: str, tokens: Collection[str]) -> None:
        """Warn, once for each, about control `tokens` in a text that were spelled out."""
        new = sorted(set(tokens) - self._subjects)
        self._subjects.update(new)
        if new:
            log.warning(
                "%s: its text holds %s, which stays text: the policy reads it in pieces, not as "
                "its control tokens, here and in other rows. If the text was rendered with a chat "
                "template before, give the chats in data.messages, or their ids in data.prompt_ids",
                name,
                printable(", ".join(new)),
            )
