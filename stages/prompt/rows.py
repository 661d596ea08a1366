"""Rows of a source as rows of prompts/1: each rendered, measured against the context and the
vocabulary, its columns kept."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from quiver.schemas import fields, prompts
from quiver.schemas.errors import ConfigError, printable
from quiver.stages.common.chat.control_tokens import Guard
from quiver.stages.common.chat.generation_prompt import learn_start
from quiver.stages.common.chat.template import Messages, Template, bad_text
from quiver.stages.common.models import checkpoints
from quiver.stages.common.store import Version

from .config import Config
from .sources import Source

_ROLE = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class Prompt(NamedTuple):
    """One row of prompts/1, but for its group and its columns; in that table's order."""

    messages: Messages | None
    prompt_text: str
    prompt_ids: list[int]


class Renderer:
    """Makes prompts of one column's values; a context manager that ends the template's process."""

    def __init__(self, config: Config, policy: Version, template: str | None) -> None:
        """`template`: the text of a file; None: the policy's own."""
        self.config = config
        tokenizer = checkpoints.load_tokenizer(policy)
        self._guard = Guard(tokenizer, closes=checkpoints.is_encoder_decoder(policy))
        self._vocabulary = checkpoints.vocabulary_size(policy)
        self._template: Template | None = None
        if config.messages or (config.prompt and not config.raw_text):
            variables = {
                "tools": None,
                "documents": None,
                "add_generation_prompt": True,
                **tokenizer.special_tokens_map,
                **config.template_arguments,
            }
            try:
                source = tokenizer.get_chat_template() if template is None else template
            except ValueError:
                raise ConfigError(
                    str(policy.ref),
                    "the policy's tokenizer has no chat template (or several, none of them the "
                    "default)",
                    next="set prompt.template to a jinja file, or prompt.raw_text = true",
                ) from None
            self._template = Template(source, variables, config.template_seconds)

    def __enter__(self) -> Renderer:
        return self

    def __exit__(self, *_: object) -> None:
        if self._template:
            self._template.close()

    def render(self, name: str, cell: Any) -> Prompt | None:
        """The prompt that a cell of the input column is; None where it is too long, and such are
        dropped. ConfigError, SecurityError."""
        config = self.config
        if config.messages:
            if not isinstance(cell, list) or not cell:
                raise _bad_row(
                    name,
                    f"column {config.messages} holds {_type_name(cell)}, expected a list of "
                    "{role, content}",
                )
            chat = [_read_message(name, number, message) for number, message in enumerate(cell)]
            prompt = self._render_chat(name, chat)
        elif config.prompt:
            text = _require_text(name, cell, f"column {config.prompt}")
            if config.raw_text:
                prompt = Prompt(None, *self._guard.encode(name, (), [text], lambda texts: texts[0]))
            else:
                prompt = self._render_chat(name, [{"role": "user", "content": text}])
        else:
            if not isinstance(cell, list) or not all(type(id) is int for id in cell):
                raise _bad_row(
                    name,
                    f"column {config.prompt_ids} holds {_type_name(cell)}, expected a list of "
                    "token ids",
                )
            valid_ids = [id for id in cell if 0 <= id < self._vocabulary]
            prompt = Prompt(None, self._guard.decode(valid_ids), cell)
        return prompt if self._fits(name, prompt.prompt_ids) else None

    def assistant_start(self, roles: Iterable[str]) -> str | None:
        """What stands between the last message, of a chat with these roles, and the assistant's own
        text; None: can not be told."""

        def render(messages: Messages, generation: bool) -> str:
            return self._template.render(
                "prompt.template", messages, add_generation_prompt=generation
            )

        return learn_start(render, tuple(roles), self._guard.token_ends)

    def _render_chat(self, name: str, messages: Messages) -> Prompt:
        if self.config.system is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.config.system}, *messages]
        roles = tuple(message["role"] for message in messages)

        def render(contents: list[str]) -> str:
            pairs = zip(roles, contents, strict=True)
            chat = [{"role": role, "content": content} for role, content in pairs]
            return self._template.render(name, chat)

        contents = [message["content"] for message in messages]
        return Prompt(messages, *self._guard.encode(name, roles, contents, render))

    def _fits(self, name: str, ids: list[int]) -> bool:
        """Whether the prompt is short enough. ConfigError when it is wrong otherwise, or the config
        wants an error."""
        if not ids:
            raise ConfigError(
                name, "the prompt is empty: it has no tokens", next="take the row out of the source"
            )
        for id in ids:
            if not 0 <= id < self._vocabulary:
                raise ConfigError(
                    name,
                    f"token id {id} is outside the model's vocabulary of {self._vocabulary}",
                    next="use the model's own tokenizer",
                )
        allowed = self.config.max_prompt_tokens
        if allowed is None or len(ids) <= allowed:
            return True
        if self.config.overlong == "error":
            raise ConfigError(
                name,
                f"the prompt has {len(ids)} tokens, {allowed} are allowed "
                f"({self.config.reserve_tokens} are kept for the completion)",
                next='shorten it, raise the limit, or set prompt.overlong = "drop"',
            )
        return False


def render_rows(
    source: Source, rows: list[int], group_ids: pa.Array, renderer: Renderer
) -> pa.Table:
    """Those `rows` of the source as prompts/1; the ones that are too long left out, where the
    config says so."""
    table = source.table.take(pa.array(rows, pa.int64()))
    group_ids = group_ids.take(pa.array(rows, pa.int64()))
    config = renderer.config
    cells = table.column(getattr(config, config.input)).to_pylist()
    rendered: list[Prompt] = []
    positions: list[int] = []
    for position, (group_id, cell) in enumerate(zip(group_ids.to_pylist(), cells, strict=True)):
        row_number = rows[position] + 1
        name = f"prompt {printable(group_id)} (row {row_number} of {printable(source.name)})"
        prompt = renderer.render(name, cell)
        if prompt is not None:
            rendered.append(prompt)
            positions.append(position)
    indices = pa.array(positions, pa.int64())
    columns = table.take(indices).replace_schema_metadata(None).combine_chunks().to_struct_array()
    struct = columns.chunk(0) if columns.num_chunks else pa.array([], columns.type)
    schema = fields.with_struct(prompts.SCHEMA, columns=struct.type)
    arrays = {
        "group_id": group_ids.take(indices),
        **{
            name: pa.array([getattr(prompt, name) for prompt in rendered], schema.field(name).type)
            for name in Prompt._fields
        },
        "columns": struct,
    }
    return pa.table(arrays, schema=schema)


def assistant_starts(messages: pa.ChunkedArray, renderer: Renderer) -> dict[str, str | None]:
    """For each role that a chat of `messages` ends with, what stands between that message and the
    assistant's own text.

    Whoever reads a completion as a message finds in it how much of `prompt_text` belongs to that
    message already.
    """
    starts: dict[str, str | None] = {}
    for chunk in messages.chunks:
        roles = chunk.flatten().field("role")
        ends = np.cumsum(pc.list_value_length(chunk.drop_null()).to_numpy())
        last_roles = roles.take(pa.array(ends - 1)).to_pylist()
        for start, end, last_role in zip([0, *ends], ends, last_roles, strict=False):
            if last_role not in starts:
                starts[last_role] = renderer.assistant_start(roles[start:end].to_pylist())
    return starts


def _read_message(name: str, number: int, message: Any) -> dict[str, str]:
    """Role and content of a message that has nothing else."""
    entries: dict[str, Any] = {}
    if isinstance(message, dict):
        entries = {key: entry for key, entry in message.items() if entry is not None}
    if set(entries) != {"role", "content"}:
        raise _bad_row(
            name,
            f"message {number} has {printable(sorted(entries) or _type_name(message))}, expected "
            "role and content alone",
        )
    role = entries["role"]
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise _bad_row(
            name,
            f"message {number} has role {printable(repr(role))}, expected a word of A-Z a-z 0-9 _ "
            ". -",
        )
    content = _require_text(name, entries["content"], f"the content of message {number}")
    return {"role": role, "content": content}


def _require_text(name: str, content: Any, place: str) -> str:
    if not isinstance(content, str):
        raise _bad_row(name, f"{place} holds {_type_name(content)}, expected text")
    problem = bad_text(content)
    if problem:
        raise _bad_row(name, f"{place} {problem}")
    return content


def _type_name(content: Any) -> str:
    return "nothing" if content is None else f"a {type(content).__name__}"


def _bad_row(name: str, message: str) -> ConfigError:
    return ConfigError(name, message, next="correct the row, or take it out of the source")
