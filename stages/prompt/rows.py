"""Rows of a source as rows of prompts/1: each rendered, measured against the context and the
vocabulary, its columns kept."""

from __future__ import annotations

import re
from typing import Any

import pyarrow as pa

from quiver.schemas import prompts
from quiver.schemas.errors import ConfigError, printable
from quiver.schemas.fields import required
from quiver.stages.common.chat.control_tokens import Guard, Rendering
from quiver.stages.common.chat.generation_prompt import learn_start
from quiver.stages.common.chat.template import Messages, Template, bad_text
from quiver.stages.common.models import checkpoints
from quiver.stages.common.store import Version

from .config import Config

_ROLE = re.compile(r"[A-Za-z0-9_.-]{1,64}")
Prompt = dict[str, Any]
"""A row of prompts/1, but for its group and its columns."""


class Renderer:
    """Makes prompts of the cells of one column."""

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
                    next="set prompt.template to a jinja file, or data.raw_text = true",
                ) from None
            self._template = Template(source, variables, config.template_seconds)

    def close(self) -> None:
        """End the template's process."""
        if self._template:
            self._template.close()

    def render(self, name: str, cell: Any) -> Prompt | None:
        """The prompt that a cell of the input column is; None where it is too long, and such are
        dropped. ConfigError, SecurityError."""
        config = self.config
        messages = None
        # TRL and verl keep chats in a column `prompt`
        is_chat = bool(config.prompt) and not config.raw_text and isinstance(cell, list)
        if config.messages or is_chat:
            if not isinstance(cell, list) or not cell:
                raise _bad_row(
                    name,
                    f"column {config.messages or config.prompt} holds {_type_name(cell)}, expected "
                    "a list of {role, content}",
                )
            messages = [_read_message(name, number, message) for number, message in enumerate(cell)]
        elif config.prompt:
            text = _require_text(name, cell, f"column {config.prompt}")
            if config.raw_text:
                rendering = self._guard.encode(name, (), [text], lambda texts: texts[0])
            else:
                messages = [{"role": "user", "content": text}]
        else:
            if not isinstance(cell, list) or not all(type(id) is int for id in cell):
                raise _bad_row(
                    name,
                    f"column {config.prompt_ids} holds {_type_name(cell)}, expected a list of "
                    "token ids",
                )
            valid_ids = [id for id in cell if 0 <= id < self._vocabulary]
            rendering = Rendering(self._guard.decode(valid_ids), cell)
        if messages:
            if config.system is not None and messages[0]["role"] != "system":
                messages.insert(0, {"role": "system", "content": config.system})
            rendering = self._render_chat(name, messages)
        if not self._fits(name, rendering.ids):
            return None
        return {"messages": messages, "prompt_text": rendering.text, "prompt_ids": rendering.ids}

    def assistant_starts(self, chats: pa.ChunkedArray) -> dict[str, str | None]:
        """For each role that a chat ends with, what stands between that message and the assistant's
        own text; None: can not be told.

        Whoever reads a completion as a message finds in it how much of `prompt_text` belongs to
        that message already.
        """

        def render(messages: Messages, generation: bool) -> str:
            return self._template.render(
                "prompt.template", messages, add_generation_prompt=generation
            )

        starts: dict[str, str | None] = {}
        for chat in chats.drop_null():
            roles = [message["role"] for message in chat.as_py()]
            if roles[-1] not in starts:
                starts[roles[-1]] = learn_start(render, roles, self._guard.token_ends)
        return starts

    def _render_chat(self, name: str, messages: Messages) -> Rendering:
        roles = tuple(message["role"] for message in messages)

        def render(contents: list[str]) -> str:
            pairs = zip(roles, contents, strict=True)
            chat = [{"role": role, "content": content} for role, content in pairs]
            return self._template.render(name, chat)

        contents = [message["content"] for message in messages]
        return self._guard.encode(name, roles, contents, render)

    def _fits(self, name: str, ids: list[int]) -> bool:
        """Whether the prompt is short enough. ConfigError when it is wrong otherwise, or the config
        wants an error."""
        if not ids:
            raise ConfigError(
                name, "the prompt is empty: it has no tokens", next="take the row out of the source"
            )
        wrong_ids = [id for id in ids if not 0 <= id < self._vocabulary]
        if wrong_ids:
            raise ConfigError(
                name,
                f"token id {wrong_ids[0]} is outside the model's vocabulary of {self._vocabulary}",
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
    source: pa.Table, rows: list[int], group_ids: list[str], renderer: Renderer
) -> pa.Table:
    """Those `rows` of `source` as prompts/1; the ones that are too long left out, where the
    config says so."""
    table = source.take(pa.array(rows, pa.int64()))
    config = renderer.config
    cells = table.column(getattr(config, config.input)).to_pylist()
    rendered: list[Prompt] = []
    positions: list[int] = []
    for position, (row, cell) in enumerate(zip(rows, cells, strict=True)):
        group_id = group_ids[row]
        name = f"prompt {printable(group_id)} (row {row + 1} of {printable(config.source)})"
        prompt = renderer.render(name, cell)
        if prompt is not None:
            rendered.append({"group_id": group_id, **prompt})
            positions.append(position)
    columns = table.take(pa.array(positions, pa.int64())).replace_schema_metadata(None)
    struct = columns.combine_chunks().to_struct_array().combine_chunks()
    schema = prompts.SCHEMA.remove(prompts.SCHEMA.get_field_index("columns"))
    field = required("columns", struct.type)
    return pa.Table.from_pylist(rendered, schema).append_column(field, struct)


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
