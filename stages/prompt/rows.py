"""Rows of a source as rows of prompts/1: each rendered, measured against the context and the
vocabulary, its columns kept."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from quiver.schemas import prompts
from quiver.schemas.cells import without_nulls
from quiver.schemas.errors import ConfigError, printable
from quiver.schemas.fields import required
from quiver.schemas.outside import CHARACTERS_OF_TOKEN, count_characters
from quiver.stages.common.chat.control_tokens import Guard, Rendering
from quiver.stages.common.chat.generation_prompt import learn_end, learn_start
from quiver.stages.common.chat.messages import as_parts, put_texts, save_messages, take_texts
from quiver.stages.common.chat.template import Messages, Template
from quiver.stages.common.environments.environment import pictures_in, without_pictures
from quiver.stages.common.json_rows import parse
from quiver.stages.common.models import checkpoints
from quiver.stages.common.store import Version

from .config import Config
from .images import Picture, Pictures
from .messages import (
    MORE,
    Message,
    bad_row,
    read_message,
    require_text,
    show_images,
    text_of,
    type_name,
)
from .python_rows import CHUNK

log = logging.getLogger(__name__)
Prompt = dict[str, Any]
"""A row of prompts/1, but for its group and its columns."""


class Renderer:
    """Makes prompts of the cells of one column."""

    def __init__(
        self,
        config: Config,
        policy: Version,
        template: str | None,
        tools: list[dict[str, Any]] | None = None,
    ) -> None:
        """`template`: the text of a file; None: the policy's own. `tools`: what the policy may
        call."""
        self.config = config
        self.tools = tools or None
        self.chat_template = ""
        """The text of the template that is used, where one is."""
        self.have_calls: bool | None = None
        """Whether messages of the version have more than role and content. None: not known yet."""
        tokenizer = checkpoints.load_tokenizer(policy)
        self._policy = policy
        self._pictures = Pictures(config, policy) if config.images else None
        self._guard = Guard(tokenizer, closes=checkpoints.is_encoder_decoder(policy))
        self._vocabulary = checkpoints.vocabulary_size(policy)
        self._template: Template | None = None
        if config.messages or (config.prompt and not config.raw_text):
            variables = {
                "tools": self.tools,
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
            self.chat_template = source
            question = [{"role": "user", "content": "?"}]
            seen = [
                self._template.render("prompt.template", question, tools=tools)
                for tools in ([self.tools, None] if self.tools else [])
            ]
            if self.tools and seen[0] == seen[1]:
                log.warning(
                    "the policy's chat template does not show the tools of generate.turns to it: "
                    "say in prompt.system, or in the chats, what it may call and how"
                )

    def close(self) -> None:
        """End the processes of the template and of the pictures."""
        if self._template:
            self._template.close()
        if self._pictures:
            self._pictures.close()

    def render(
        self, name: str, cell: Any, opening: Sequence[Message] = (), images: Any = None
    ) -> Prompt | None:
        """The prompt that a cell of the input column is, with what an environment says at its
        start, and with the pictures of a cell `images`; None where it is too long, and such are
        dropped. ConfigError, SecurityError."""
        config = self.config
        if self._is_hopeless(name, cell, opening):
            return None
        messages = None
        # TRL and verl keep chats in a column `prompt`
        is_chat = bool(config.prompt) and not config.raw_text and isinstance(cell, list)
        if config.messages or is_chat:
            if not isinstance(cell, list) or not cell:
                raise bad_row(
                    name,
                    f"column {config.messages or config.prompt} holds {type_name(cell)}, expected "
                    "a list of {role, content}",
                )
            messages = [read_message(name, number, message) for number, message in enumerate(cell)]
        elif config.prompt:
            text = require_text(name, cell, f"column {config.prompt}")
            if config.raw_text:
                rendering = self._guard.encode(name, (), [text], lambda texts: texts[0])
            else:
                messages = [{"role": "user", "content": text}]
        else:
            if not isinstance(cell, list) or not all(type(id) is int for id in cell):
                raise bad_row(
                    name,
                    f"column {config.prompt_ids} holds {type_name(cell)}, expected a list of "
                    "token ids",
                )
            valid_ids = [id for id in cell if 0 <= id < self._vocabulary]
            rendering = Rendering(self._guard.decode(valid_ids), cell)
        if messages:
            if config.system is not None and messages[0]["role"] != "system":
                messages.insert(0, {"role": "system", "content": config.system})
            pictures = self._read_pictures(name, images, opening)
            num_shown = len(pictures) - len(pictures_in(opening))
            messages = _followed_by(show_images(name, messages, num_shown), opening)
            rendering = self._render_chat(name, messages)
            messages = [{**each, "content": text_of(each["content"])} for each in messages]
        prompt = {
            "messages": messages and save_messages(messages),
            "prompt_text": rendering.text,
            "prompt_ids": rendering.ids,
        }
        if config.images or (messages and pictures):
            prompt |= self._pictures.expanded(name, rendering.ids, pictures)
        return prompt if self._fits(name, prompt["prompt_ids"]) else None

    def _read_pictures(self, name: str, cell: Any, opening: Sequence[Message]) -> list[Picture]:
        """The pictures of a cell, then those that an environment shows at its start."""
        pictures = self._pictures.of_cell(name, cell) if self._pictures else []
        of_opening = pictures_in(opening)
        if of_opening:
            self._pictures = self._pictures or Pictures(self.config, self._policy)
            pictures += self._pictures.of_cell(f"{name}: its environment", of_opening)
        return pictures

    def of_assistant(self, chats: pa.ChunkedArray) -> dict[str, Any]:
        """Where the template begins and ends an assistant's turn, for the manifest."""
        return {
            "assistant_starts": self.assistant_starts(chats),
            "assistant_end": self.assistant_end(chats),
        }

    def assistant_starts(self, chats: pa.ChunkedArray) -> dict[str, str | None]:
        """For each role that a chat ends with, what stands between that message and the assistant's
        own text; None: can not be told.

        Whoever reads a completion as a message finds in it how much of `prompt_text` belongs to
        that message already.
        """
        starts: dict[str, str | None] = {}
        for chat in chats.drop_null():
            roles = [message["role"] for message in chat.as_py()]
            if roles[-1] not in starts:
                starts[roles[-1]] = learn_start(self._probe, roles, self._guard.token_ends)
        return starts

    def assistant_end(self, chats: pa.ChunkedArray) -> dict[str, Any] | None:
        """`id` and `text` of the control token with which the template ends an assistant's turn;
        None: there is none, or no chat."""
        for chat in chats.drop_null().slice(0, 1):
            roles = [message["role"] for message in chat.as_py()]
            behind = learn_end(self._probe, roles).lstrip()
            id = self._guard.first_control(behind)
            return None if id is None else {"id": id, "text": self._guard.decode([id])}
        return None

    def _probe(self, messages: Messages, generation: bool) -> str:
        return self._template.render("prompt.template", messages, add_generation_prompt=generation)

    def _render_chat(self, name: str, messages: Messages) -> Rendering:
        structure, texts = take_texts(messages)

        def render(texts: list[str]) -> str:
            return self._template.render(name, put_texts(structure, iter(texts)))

        return self._guard.encode(name, (json.dumps(structure),), texts, render)

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
        self._refuse_long(name, f"{len(ids)} tokens, {allowed}")
        return False

    def _is_hopeless(self, name: str, cell: Any, opening: Sequence[Message]) -> bool:
        """Whether there are more characters than the allowed tokens can stand for: such a text is
        not rendered, which could take minutes. ConfigError as of `_fits`."""
        allowed = self.config.max_prompt_tokens
        num_characters = count_characters(cell) + count_characters(list(opening))
        if allowed is None or num_characters <= allowed * CHARACTERS_OF_TOKEN:
            return False
        self._refuse_long(name, f"{num_characters} characters, {allowed} tokens")
        return True

    def _refuse_long(self, name: str, lengths: str) -> None:
        """ConfigError if the config wants an error for a prompt that is too long."""
        if self.config.overlong == "error":
            raise ConfigError(
                name,
                f"the prompt has {lengths} are allowed "
                f"({self.config.reserve_tokens} are kept for the completion)",
                next="shorten it (or what its environment says), lower "
                "generate.sampling.max_tokens, raise prompt.max_prompt_tokens, or set "
                'prompt.overlong = "drop"',
            )


def render_rows(
    source: pa.Table,
    rows: list[int],
    group_ids: list[str],
    renderer: Renderer,
    openings: list[list[Message]],
    chosen: Sequence[int],
) -> pa.Table:
    """Those `rows` of `source` as prompts/1, or prompts/2 where there is more than text; the ones
    that are too long left out, where the config says so. `openings`: of each row what its
    environment says at the start. `chosen`: all rows of the version, which has one schema."""
    table = source.take(pa.array(rows, pa.int64()))
    config = renderer.config
    rendered: list[Prompt] = []
    positions: list[int] = []
    images = table.column(config.images) if config.images else None
    cells = _input_cells(config, source, rows)
    for position, (row, cell, opening) in enumerate(zip(rows, cells, openings, strict=True)):
        group_id = group_ids[row]
        name = f"prompt {printable(group_id)} (row {row + 1} of {printable(config.source)})"
        pictures = images[position].as_py() if images else None
        prompt = renderer.render(name, cell, opening, pictures)
        if prompt is not None:
            rendered.append({"group_id": group_id, **prompt})
            positions.append(position)
    if config.images:  # they are a column of their own
        table = table.drop_columns(config.images)
    if config.turns is not None:  # with what the environment is to begin again
        texts = [json.dumps(without_pictures(each), ensure_ascii=False) for each in openings]
        table = table.append_column(prompts.OPENING, pa.array(texts, pa.string()))
    columns = table.take(pa.array(positions, pa.int64())).replace_schema_metadata(None)
    struct = columns.combine_chunks().to_struct_array().combine_chunks()
    kind_schema = prompts.SCHEMA
    if renderer.have_calls is None:
        renderer.have_calls = any(
            isinstance(message, dict) and message.get(name) is not None
            for chat in _input_cells(config, source, chosen)
            if isinstance(chat, list)
            for message in chat
            for name in MORE
        )
    if config.turns is not None or config.images or renderer.have_calls:
        kind_schema = prompts.BEYOND_TEXT
        tools = renderer.tools and json.dumps(renderer.tools)
        rendered = [{**prompt, "tools": tools} for prompt in rendered]
    place = kind_schema.get_field_index("columns")
    field = required("columns", struct.type)
    prompts_table = pa.Table.from_pylist(rendered, kind_schema.remove(place))
    return prompts_table.add_column(place, field, struct)


def _input_cells(config: Config, source: pa.Table, rows: Sequence[int]) -> Iterator[Any]:
    """The cells that `rows` are rendered from. A chat, or a message of one, may be JSON text.
    ConfigError."""
    column = source.column(getattr(config, config.input))
    for start in range(0, len(rows), CHUNK):
        some_rows = rows[start : start + CHUNK]
        cells = without_nulls(column.take(pa.array(some_rows, pa.int64())))
        for row, cell in zip(some_rows, cells, strict=True):
            place = f"{config.source} row {row + 1} column {config.messages}"
            yield _chat(place, cell) if config.messages else cell


def _chat(place: str, cell: Any) -> Any:
    """A cell of messages, where it or its messages are JSON text, as that says. ConfigError."""
    if isinstance(cell, str):
        cell = parse(place, cell.encode())
    if not isinstance(cell, list):
        return cell
    return [parse(place, each.encode()) if isinstance(each, str) else each for each in cell]


def _followed_by(messages: list[Message], opening: Sequence[Message]) -> list[Message]:
    """`messages`, and what an environment says at the start. Two messages of the user are made one,
    since many templates take none behind another."""
    messages = list(messages)
    for message in map(as_parts, opening):
        last = messages[-1]
        if not last["role"] == message["role"] == "user":
            messages.append(message)
            continue
        content, added = last["content"], message["content"]
        if isinstance(content, str) and isinstance(added, str):
            content = f"{content}\n\n{added}"
        elif isinstance(added, str):
            content = [*content, *_parts(f"\n\n{added}")]
        else:
            content = [*_parts(content), *_parts("\n\n"), *added]
        messages[-1] = {"role": "user", "content": content}
    return messages


def _parts(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]
