"""Rows of a source as rows of prompts/1: each rendered, measured against the context and the
vocabulary, its columns kept."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from quiver.schemas import fields, prompts
from quiver.schemas.errors import ConfigError, printable
from quiver.stages.common.chat.control_tokens import Guard, Rendering
from quiver.stages.common.chat.generation_prompt import learn_start
from quiver.stages.common.chat.template import Messages, Template, bad_text
from quiver.stages.common.models import checkpoints
from quiver.stages.common.store import Version

from .sources import Source

if TYPE_CHECKING:
    from .stage import Config

_ROLE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_Row = tuple[Messages | None, str, list[int]]


class Renderer:
    """The tokenizer's guard, and the template's child process where one is needed."""

    def __init__(self, config: Config, policy: Version, template: str | None) -> None:
        """`template`: the text of a file; None: the policy's own."""
        tokenizer = checkpoints.load_tokenizer(policy)
        self.guard = Guard(tokenizer, closes=checkpoints.is_encoder_decoder(policy))
        self.vocabulary = checkpoints.vocabulary_size(policy)
        self._template: Template | None = None
        if config.messages or (config.prompt and not config.raw_text):
            variables = {
                "tools": None,
                "documents": None,
                "add_generation_prompt": True,
                **tokenizer.special_tokens_map,
                **config.template_arguments,
            }
            source = template if template is not None else _own_template(tokenizer, policy)
            self._template = Template(source, variables, config.template_seconds)

    def __enter__(self) -> Renderer:
        return self

    def __exit__(self, *_: object) -> None:
        if self._template:
            self._template.close()

    def chat(self, name: str, messages: Messages) -> Rendering:
        """`messages` through the template."""
        roles = tuple(message["role"] for message in messages)

        def render(contents: list[str]) -> str:
            chat = [
                {"role": role, "content": content}
                for role, content in zip(roles, contents, strict=True)
            ]
            return self._template.render(name, chat)

        return self.guard.encode(name, roles, [message["content"] for message in messages], render)

    def assistant_start(self, roles: Iterable[str]) -> str | None:
        """What stands between the last message, of a chat with these roles, and the assistant's own
        text; None: can not be told."""

        def render(messages: Messages, generation: bool) -> str:
            return self._template.render(
                "prompt.template", messages, add_generation_prompt=generation
            )

        return learn_start(render, tuple(roles), self.guard.token_ends)

    def plain(self, name: str, text: str) -> Rendering:
        """`text` as it is."""
        return self.guard.encode(name, (), [text], lambda contents: contents[0])


def _own_template(tokenizer: Any, policy: Version) -> str:
    try:
        return tokenizer.get_chat_template()
    except ValueError:
        raise ConfigError(
            str(policy.ref),
            "the policy's tokenizer has no chat template (or several, none of them the default)",
            next="set prompt.template to a jinja file, or prompt.raw_text = true",
        ) from None


def render_rows(
    config: Config, source: Source, rows: list[int], groups: pa.Array, renderer: Renderer
) -> pa.Table:
    """Those `rows` of the source as prompts/1; the ones that are too long left out, where the
    config says so."""
    table = source.table.take(pa.array(rows, pa.int64()))
    groups = groups.take(pa.array(rows, pa.int64()))
    kind = next(name for name in _MAKERS if getattr(config, name))
    values = table.column(getattr(config, kind)).to_pylist()
    made: list[_Row] = []
    kept: list[int] = []
    for at, (row, group, value) in enumerate(zip(rows, groups.to_pylist(), values, strict=True)):
        name = f"prompt {printable(group)} (row {row + 1} of {printable(source.name)})"
        messages, text, ids = _MAKERS[kind](config, name, value, renderer)
        if _fits(config, name, ids, renderer.vocabulary):
            made.append((messages, text, ids))
            kept.append(at)
    indices = pa.array(kept, pa.int64())
    columns = table.take(indices).replace_schema_metadata(None).combine_chunks().to_struct_array()
    struct = columns.chunk(0) if columns.num_chunks else pa.array([], columns.type)
    schema = fields.with_struct(prompts.SCHEMA, columns=struct.type)
    rendered = [pa.array([row[at] for row in made], schema.field(at + 1).type) for at in range(3)]
    return pa.table([groups.take(indices), *rendered, struct], schema=schema)


def assistant_starts(messages: pa.ChunkedArray, renderer: Renderer) -> dict[str, str | None]:
    """For each role that a chat of `messages` ends with, what stands between that message and the
    assistant's own text.

    Whoever reads a completion as a message finds in it how much of `prompt_text` belongs to that
    message already.
    """
    found: dict[str, str | None] = {}
    for chunk in messages.chunks:
        roles = chunk.flatten().field("role")
        ends = np.cumsum(pc.list_value_length(chunk.drop_null()).to_numpy())
        last = roles.take(pa.array(ends - 1)).to_pylist()
        starts = [0, *ends.tolist()]
        for role in [role for role in dict.fromkeys(last) if role not in found]:
            row = last.index(role)
            found[role] = renderer.assistant_start(roles[starts[row] : starts[row + 1]].to_pylist())
    return found


def _fits(config: Config, name: str, ids: list[int], vocabulary: int) -> bool:
    """Whether the prompt may be kept; ConfigError when that is no question of length, or the config
    wants an error."""
    if not ids:
        raise ConfigError(
            name, "the prompt is empty: it has no tokens", next="take the row out of the source"
        )
    wrong = next((id for id in ids if not 0 <= id < vocabulary), None)
    if wrong is not None:
        raise ConfigError(
            name,
            f"token id {wrong} is outside the model's vocabulary of {vocabulary}",
            next="use the model's own tokenizer",
        )
    allowed = config.max_prompt_tokens
    if allowed is None or len(ids) <= allowed:
        return True
    if config.overlong == "error":
        raise ConfigError(
            name,
            f"the prompt has {len(ids)} tokens, {allowed} are allowed ({config.reserve_tokens} "
            "are kept for the completion)",
            next='shorten it, raise the limit, or set prompt.overlong = "drop"',
        )
    return False


# -- the three kinds of input


def _chat(config: Config, name: str, value: Any, renderer: Renderer) -> _Row:
    if not isinstance(value, list) or not value:
        raise _wrong(
            name,
            f"column {config.messages} holds {_kind(value)}, expected a list of {{role, content}}",
        )
    messages = _with_system(
        config, [_message(name, number, message) for number, message in enumerate(value)]
    )
    return (messages, *renderer.chat(name, messages))


def _message(name: str, number: int, message: Any) -> dict[str, str]:
    given = (
        {key: item for key, item in message.items() if item is not None}
        if isinstance(message, dict)
        else {}
    )
    if set(given) != {"role", "content"}:
        raise _wrong(
            name,
            f"message {number} has {printable(sorted(given) or _kind(message))}, expected role "
            "and content alone",
        )
    if not isinstance(given["role"], str) or not _ROLE.fullmatch(given["role"]):
        raise _wrong(
            name,
            f"message {number} has role {printable(repr(given['role']))}, expected a word of A-Z "
            "a-z 0-9 _ . -",
        )
    return {
        "role": given["role"],
        "content": _require_text(name, given["content"], f"the content of message {number}"),
    }


def _text(config: Config, name: str, value: Any, renderer: Renderer) -> _Row:
    text = _require_text(name, value, f"column {config.prompt}")
    if config.raw_text:
        return (None, *renderer.plain(name, text))
    messages = _with_system(config, [{"role": "user", "content": text}])
    return (messages, *renderer.chat(name, messages))


def _ids(config: Config, name: str, value: Any, renderer: Renderer) -> _Row:
    whole = isinstance(value, list) and all(type(id) is int for id in value)
    if not whole:
        raise _wrong(
            name, f"column {config.prompt_ids} holds {_kind(value)}, expected a list of token ids"
        )
    known = [id for id in value if 0 <= id < renderer.vocabulary]
    return None, renderer.guard.decode(known), value


_MAKERS: dict[str, Callable[[Any, str, Any, Renderer], _Row]] = {
    "messages": _chat,
    "prompt": _text,
    "prompt_ids": _ids,
}


def _with_system(config: Config, messages: Messages) -> Messages:
    if config.system is None or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": config.system}, *messages]


def _require_text(name: str, value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise _wrong(name, f"{what} holds {_kind(value)}, expected text")
    if wrong := bad_text(value):
        raise _wrong(name, f"{what} {wrong}")
    return value


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"


def _wrong(name: str, message: str) -> ConfigError:
    return ConfigError(name, message, next="correct the row, or take it out of the source")
