"""Render rows of a source as rows of prompts/1 or prompts/2, and keep their columns.

Each prompt is checked against the context and the vocabulary.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import pyarrow as pa

from quiver.schemas import outside, prompts
from quiver.schemas.cells import without_nulls
from quiver.schemas.errors import ConfigError, printable, quoted_name
from quiver.schemas.outside import Message
from quiver.stages.core.file_rows import parse_line
from quiver.stages.core.store import Version
from quiver.stages.model import checkpoints
from quiver.stages.model.chat.control_tokens import Guard, Rendering
from quiver.stages.model.chat.generation_prompt import (
    learn_end,
    learn_markup,
    learn_start,
    reserved_ids,
)
from quiver.stages.model.chat.messages import (
    as_parts,
    is_assistants,
    put_texts,
    save_messages,
    take_texts,
    texts_of,
)
from quiver.stages.model.chat.template import Template, first_variables
from quiver.stages.model.media.processor import token_ids
from quiver.stages.turns.environment import files_in, without_files

from .chats import (
    ARGUMENTS,
    Remarks,
    RowVariables,
    as_content_parts,
    bad_row,
    columns_of,
    naming_row,
    read_variables,
    show_media,
    text_of,
    with_system,
)
from .columns import CHUNK
from .config import Config
from .media import Media, without_media

_EXPECTED = {
    "messages": "a list of {role, content}",
    "prompt": "text",
    "prompt_ids": "a list of token ids, which are whole numbers",
}
"""Expected cells of each input column."""
_SECONDS_FOR_OTHERS = 10.0
"""Time to look for other bad rows after the first one: a broken template may be slow on each."""
_MOST_NAMED = 5
_IF_IT_SHOULD = ": the policy never reads it; if it should, set prompt.template to another"
Prompt = dict[str, Any]
"""A row of prompts/1, without its group and its columns."""


class Renderer:
    """Makes prompts from the cells of one column."""

    def __init__(
        self,
        config: Config,
        policy: Version,
        template: str | None,
        tools: list[dict[str, Any]] | None = None,
    ) -> None:
        """Load the tokenizer and templates.

        Args:
            config: The stage's config.
            policy: Its tokenizer, template and limits are used.
            template: Text of a template file. Default: the policy's own template.
            tools: Schemas of the tools that the policy may call.
        """
        self.config = config
        self.tools = tools or None
        self._shown_tools = config.template_arguments.get("tools", self.tools)
        """The recipe's tools that the template shows."""
        self.chat_template = ""
        """Source of the chat template; empty if none is used."""
        self.has_more_members: bool | None = None
        """True if messages of the version have more than role and content; None until that is
        known."""
        self._policy = policy
        self._tokenizer = checkpoints.load_tokenizer(policy)
        self._media = Media(config, policy, config.media) if config.media else None
        self._feature_ids: set[int] = set()
        """Ids that stand for pictures and clips; prompts of ids without files may not hold them."""
        if config.prompt_ids and not config.media and checkpoints.modalities(policy):
            self._feature_ids = set(token_ids(policy))
        self._vocabulary = checkpoints.vocabulary_size(policy)
        self.limited_by, self.way_out = _limit_of(config, policy)
        """For errors: what else limits the prompts, and how to allow longer ones."""
        self._own_template = template
        self._title = "the policy's chat template"
        """The template's name in messages."""
        if config.template is not None:
            self._title = f"prompt.template {printable(config.template)}"
        self._templates: dict[str, Template] = {}
        self._remarks = Remarks()
        self._seen: set[str] = set()
        """Structures of chats that the template is known to show."""
        if config.has_chats:
            self.chat_template = self._template(self._shown_tools).source
            if self.tools:
                self._warn_of_hidden_tools(self.tools, "generate.turns")
        # If the recipe has no tools, rows may still have their own: prepare both templates.
        for kind in [self._shown_tools] if self._shown_tools else [None, [{}]]:
            try:
                self._template(kind)
            except ConfigError:  # the policy may have no template if there are no chats
                if config.has_chats:
                    raise
        renders = [template.probe for template in self._templates.values()]
        markup = learn_markup(self._tokenizer, renders, reserved_ids(policy))
        is_encoder = checkpoints.is_encoder_decoder(policy)
        self._guard = Guard(self._tokenizer, closes=is_encoder, **markup._asdict())
        self._ends: set[int | None] = set()
        """The ids that end an answer, by the model's configs and by the template."""
        if not is_encoder:
            self._ends = {self._tokenizer.eos_token_id}
            with suppress(ConfigError):  # the model names none
                self._ends.update(checkpoints.end_token_ids(policy))
            if config.has_chats:
                self._ends |= self._end_ids(["user"])

    def close(self) -> None:
        """End the processes of the templates and of the media."""
        for template in self._templates.values():
            template.close()
        if self._media:
            self._media.close()

    def render(
        self,
        name: str,
        cell: Any,
        opening: Sequence[Message] = (),
        media: Mapping[str, Any] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> Prompt | None:
        """Render one row as a prompt.

        Args:
            name: The row's name in errors.
            cell: Its cell of the input column.
            opening: The environment's opening messages.
            media: Its cells of pictures and clips, by modality.
            variables: Its cells for the template, see `columns_of`.

        Returns:
            The prompt; None if it is too long and `overlong` is "drop".

        Raises ConfigError or SecurityError.
        """
        config = self.config
        num_characters = outside.count_characters([cell, *opening])
        allowed = config.max_prompt_tokens
        if allowed is not None and num_characters > allowed * outside.CHARACTERS_OF_TOKEN:
            self._refuse_long(name, f"{num_characters} characters")  # rendering could take minutes
            return None
        messages = None
        files = self._media.of_row(name, media or {}) if self._media else {}
        reserved = self._tokenizer.special_tokens_map
        own = read_variables(name, variables or {}, reserved, config.tools)
        # TRL and verl keep chats in a column `prompt`.
        is_chat = bool(config.prompt) and not config.raw_text and isinstance(cell, list)
        if config.messages or is_chat:
            with naming_row(name):
                messages = [
                    outside.read_message(message, f"message {number}")
                    for number, message in enumerate(cell)
                ]
        elif config.prompt:
            with naming_row(name):
                text = outside.read_text(cell, f"column {quoted_name(config.prompt)}")
            self._remarks.on_text(name, printable(config.prompt), text)
            if config.raw_text:
                rendering = self._guard.encode(name, (), [text], lambda texts: texts[0])
                self._remarks.on_spelled(name, self._guard.spelled_out([text]))
            else:
                messages = [{"role": "user", "content": text}]
        else:
            no_ids = [id for id in cell if type(id) is not int]
            if no_ids:
                raise bad_row(
                    name,
                    f"column {quoted_name(config.prompt_ids)} holds "
                    f"{printable(repr(no_ids[0]))[:40]}, expected {_EXPECTED['prompt_ids']}",
                )
            self._require_no_features(name, cell)
            valid_ids = [id for id in cell if 0 <= id < self._vocabulary]
            rendering = Rendering(self._guard.decode(valid_ids), cell)
        if messages:
            messages = with_system(messages, config.system)
            messages = show_media(name, messages, {each: len(files[each]) for each in files})
            of_opening = files_in(opening)
            if of_opening:
                self._media = self._media or Media(config, self._policy, of_opening)
                shown = self._media.of_row(f"{name}: its environment", of_opening)
                files |= {each: [*files.get(each, ()), *shown[each]] for each in shown}
            messages = _followed_by(messages, opening)
            rendering = self._render_chat(name, messages, own)
            if messages[-1]["role"] == "assistant":  # the policy continues it
                messages = messages[:-1]
            messages = [{**each, "content": text_of(each["content"])} for each in messages]
        # With [generate.turns], its tools are the ones that can be called, whatever the template
        # shows.
        tools = self.tools if config.turns is not None else self._shown_tools or own.tools
        prompt = {
            "messages": messages and save_messages(messages),
            "prompt_text": rendering.text,
            "prompt_ids": rendering.ids,
            "tools": tools and json.dumps(tools),
        }
        if files:
            prompt |= self._media.expanded(name, rendering.ids, files)
        return prompt if self._fits(name, prompt["prompt_ids"]) else None

    def _require_no_features(self, name: str, ids: Sequence[int]) -> None:
        """Raise ConfigError if a row without files has an id that stands for one."""
        places = self._feature_ids.intersection(ids)
        if places:
            raise ConfigError(
                name,
                f"column {quoted_name(self.config.prompt_ids)} holds {min(places)}, in whose place "
                "the policy reads a picture or a clip, and the row has none",
                next="name the column of the files in data.images or data.audio, or take the row "
                "out of the source",
            )

    def of_assistant(self, chats: pa.ChunkedArray) -> dict[str, Any]:
        """Return, for the manifest, how the template begins and ends an assistant's turn.

        `assistant_starts` has the text before an assistant's own text, for each role that a chat
        ends with; with [generate.turns] also for the roles of an environment's answers, since
        `branch` makes prompts that end with one. To read a completion as a message, use it to find
        the part of `prompt_text` that already belongs to that message. `assistant_end` has `id` and
        `text` of the control token that ends the turn. A text or the end is None if it cannot be
        determined, or differs between rows with tools and without.
        """
        starts: dict[str, str | None] = {}
        first_roles: list[str] = []
        end = None

        def start_after(roles: Sequence[str]) -> str | None:
            return _only(
                learn_start(template.probe, roles, self._guard.token_ends)
                for template in self._templates.values()
            )

        for number, chat in enumerate(chats.drop_null()):
            roles = [message["role"] for message in chat.as_py()]
            if roles[-1] not in starts:
                starts[roles[-1]] = start_after(roles)
            if number == 0:
                id = _only(self._end_ids(roles))
                end = None if id is None else {"id": id, "text": self._guard.decode([id])}
                first_roles = roles
        answering = ("user", "tool") if self.tools else ("user",)
        for role in answering if self.config.turns and first_roles else ():
            start = start_after([*first_roles, "assistant", role])
            if role not in starts and start is not None:
                starts[role] = start
        return {"assistant_starts": starts, "assistant_end": end}

    def _end_ids(self, roles: Sequence[str]) -> set[int]:
        """Return the control ids with which the templates end an assistant's turn after these
        roles."""
        ends = (learn_end(template.probe, roles) for template in self._templates.values())
        return {self._guard.first_control(end.lstrip()) for end in ends} - {None}

    # -- the template

    def _template(self, tools: list[dict[str, Any]] | None) -> Template:
        """Return the template for a prompt with `tools`, chosen as transformers does.

        Raises ConfigError if the policy has none.
        """
        jinja = self._own_template
        if jinja is None:
            try:
                jinja = self._tokenizer.get_chat_template(tools=tools or None)
            except ValueError:
                named = self._tokenizer.chat_template
                lack = "no chat template"
                if isinstance(named, dict):
                    names = ", ".join(sorted(named))
                    lack = f"the chat templates {names}, and none of them is the default"
                raise ConfigError(
                    str(self._policy.ref),
                    f"the policy's tokenizer has {printable(lack)}",
                    next="set prompt.template to a jinja file, or data.raw_text = true",
                ) from None
        if jinja not in self._templates:
            variables = first_variables(self._tokenizer, self.config.template_arguments)
            variables["tools"] = None  # may hold a server's texts: each prompt passes them guarded
            seconds = self.config.template_seconds
            self._templates[jinja] = Template(jinja, variables, seconds, self._title)
        return self._templates[jinja]

    def _warn_of_hidden_tools(self, tools: list[dict[str, Any]], whose: str) -> None:
        """Warn if the template writes the same without `tools`."""
        template = self._template(tools)
        question = [{"role": "user", "content": "?"}]
        with_them, without = (
            template.render("prompt.template", question, tools=shown) for shown in (tools, None)
        )
        if with_them == without:
            self._remarks.say_once(
                "tools",
                f"{self._title} does not show the tools of {whose}: say in "
                "prompt.system, or in the chats, what it may call and how",
            )

    def _render_chat(self, name: str, messages: list[Message], own: RowVariables) -> Rendering:
        own = own._replace(tools=self._shown_tools or own.tools)
        template = self._template(own.tools)
        is_continued = messages[-1]["role"] == "assistant"
        if is_continued:
            roles = {message["role"] for message in messages}
            problem = ""
            if "tool_calls" in messages[-1]:
                problem = "ends with calls of an assistant, which no tool has answered"
            elif roles <= {"assistant", "system", "developer"}:
                problem = "has no question that its last message, an assistant's, answers"
            elif self.config.turns is not None:
                problem = "ends with an assistant's message, which [generate.turns] cannot continue"
            if problem:
                raise bad_row(name, f"the chat {problem}")
        self._remarks.on_chat(name, messages, template.source)
        structure, texts = take_texts(messages, own.as_variables())
        # Markup stays in texts by the recipe or an assistant.
        trusted = texts_of(messages, lambda each: is_assistants(each) or self._is_recipes(each))

        def render(texts: list[str]) -> str:
            chat, variables = put_texts(structure, iter(texts))
            if is_continued:
                return template.render_to_continue(name, chat, **variables)
            return template.render(name, chat, **variables)

        key = json.dumps(structure)
        if key not in self._seen:
            self._seen.add(key)
            self._require_seen(name, messages, template, own)
        rendering = self._guard.encode(name, (key,), texts, render, trusted=trusted)
        self._remarks.on_spelled(name, self._guard.spelled_out(texts, trusted))
        return rendering

    def _is_recipes(self, message: Message) -> bool:
        return message["role"] == "system" and message["content"] == self.config.system

    def _require_seen(
        self, name: str, messages: list[Message], template: Template, own: RowVariables
    ) -> None:
        """Check that the template shows a chat's texts.

        Raises ConfigError if it does not show the last user message or the recipe's system message;
        warns about other texts.
        """
        variables = own.as_variables()
        users = [n for n, message in enumerate(messages) if message["role"] == "user"]
        for n in sorted(template.unseen(name, messages, **variables)):
            role = messages[n]["role"]
            if self._is_recipes(messages[n]):
                raise self._unseen(name, "prompt.system", ", or take prompt.system out")
            if n == max(users, default=-1):
                raise self._unseen(name, "the last message of the user")
            self._remarks.say_once(
                f"role {role}",
                f"{name}: {self._title} does not show message {n}, of the role "
                f"{role}, or cuts it{_IF_IT_SHOULD}",
            )
        arguments = {
            **dict.fromkeys(self.config.template_arguments, "prompt.template_arguments"),
            **dict.fromkeys(own.arguments, f"column {ARGUMENTS}"),
        }
        for argument, place in arguments.items():
            if not re.search(rf"\b{re.escape(argument)}\b", template.source):
                self._remarks.say_once(
                    f"argument {argument}",
                    f"{name}: {self._title} does not use {printable(argument)}, which "
                    f"{place} sets: correct its name, or take it out",
                )
        text = template.render(name, messages, **variables)
        if messages[-1]["role"] != "assistant":
            header = template.missing_header(name, messages, text, **variables)
            if header:
                self._remarks.say_once(
                    "turn",
                    f"{name}: nothing begins the assistant's turn in the prompt, although the "
                    f"policy's chat template writes {printable(repr(header))} before an answer: "
                    "let the template write it if add_generation_prompt is true",
                )
        start = self._guard.missing_start(text)
        if start:
            self._remarks.say_once(
                "start",
                f"{self._title} does not begin with {start}, which its tokenizer puts before a "
                "text: Quiver puts it before each prompt. A server that renders chats leaves it "
                "out, unless prompt.template, and the served template, begin with {{ bos_token }}",
            )
        if own.tools and not self._shown_tools:
            self._warn_of_hidden_tools(own.tools, f"column {self.config.tools}")
        for member in ("tool_calls", "reasoning_content"):
            if not any(message.get(member) for message in messages):
                continue
            with suppress(ConfigError):  # the template refuses the chat without it
                without = [
                    {key: value for key, value in message.items() if key != member}
                    for message in messages
                ]
                if text == template.render(name, without, **variables):
                    self._remarks.say_once(
                        member,
                        f"{name}: {self._title} does not show {member} of its "
                        f"messages{_IF_IT_SHOULD}",
                    )

    def _unseen(self, name: str, what: str, way_out: str = "") -> ConfigError:
        return ConfigError(
            name,
            f"{self._title} does not show {what}, or cuts it, as text and as a list of parts",
            next=f"set prompt.template to a template that shows it{way_out}",
        )

    def _fits(self, name: str, ids: list[int]) -> bool:
        """Return True if the prompt is short enough.

        Raises ConfigError if it is empty, has ids that the model lacks, or is too long and
        `overlong` is "error".
        """
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
        if ids[-1] in self._ends:
            end = printable(self._guard.decode(ids[-1:]))
            where = "the chat template" if self.config.has_chats else "the rows"
            self._remarks.say_once(
                "ended",
                f"{name}: the prompt ends with {end}, which ends an answer: the policy has to "
                f"continue after it. If that is not intended, take it out of {where}",
            )
        allowed = self.config.max_prompt_tokens
        if allowed is None or len(ids) <= allowed:
            return True
        self._refuse_long(name, f"{len(ids)} tokens")
        return False

    def _refuse_long(self, name: str, length: str) -> None:
        """Raise ConfigError if a prompt that is too long is an error by the config."""
        if self.config.overlong == "error":
            raise ConfigError(
                name,
                f"the prompt has {length}, {self.config.max_prompt_tokens} tokens are allowed"
                f"{self.limited_by}",
                next=f"shorten it (or what its environment says), {self.way_out}, or set "
                'prompt.overlong = "drop"',
            )


def _limit_of(config: Config, policy: Version) -> tuple[str, str]:
    """Return in words how the model's context limits the prompts, empty if the recipe does, and the
    change that allows longer ones."""
    room = checkpoints.room_for_prompt(policy, config.reserve_tokens)
    if room is None or config.max_prompt_tokens != room:
        return "", "raise prompt.max_prompt_tokens"
    context = checkpoints.context_length(policy)
    limit = f": the model's context is {context} tokens"
    if room == context:
        return limit, "take a model with a longer context"
    return (
        f"{limit}, {config.reserve_tokens} are kept for the completion",
        "lower generate.sampling.max_tokens (prompt.reserve_tokens if set)",
    )


def render_rows(
    source: pa.Table,
    rows: list[int],
    group_ids: list[str],
    renderer: Renderer,
    openings: list[list[Message]],
    chosen: Sequence[int],
) -> pa.Table:
    """Render `rows` of `source` as prompts/1, or as prompts/2 if there is more than text.

    Prompts that are too long are left out if the config says so.

    Args:
        source: All rows of the source.
        rows: Positions of the rows to render.
        group_ids: Of all rows of the source.
        renderer: Shared by the shards of the version.
        openings: For each of `rows`, the environment's opening messages.
        chosen: Positions of all rows of the version, which has one schema.
    """
    table = source.take(pa.array(rows, pa.int64()))
    config = renderer.config
    rendered: list[Prompt] = []
    positions: list[int] = []
    errors: dict[int, ConfigError] = {}
    deadline = 0.0
    media_columns = {each: table.column(column) for each, column in config.media.items()}
    cells = _input_cells(config, source, rows)
    named = columns_of(config, source.column_names).items()
    variables = {role: without_nulls(table[column]) for role, column in named}
    for position, (row, cell, opening) in enumerate(zip(rows, cells, openings, strict=True)):
        group_id = group_ids[row]
        name = f"prompt {printable(group_id)} (row {row + 1} of {printable(config.source)})"
        media = {each: column[position].as_py() for each, column in media_columns.items()}
        of_row = {role: column[position] for role, column in variables.items()}
        try:
            given = _read_cell(config, row, cell)
            _require_input(config, name, given)
            prompt = renderer.render(name, given, opening, media, of_row)
        except ConfigError as error:
            deadline = deadline if errors else time.monotonic() + _SECONDS_FOR_OTHERS
            errors[position] = error
            if time.monotonic() > deadline:
                break
            continue
        if prompt is not None:
            rendered.append({"group_id": group_id, **prompt})
            positions.append(position)
    if errors:
        raise _with_others(errors, rows[: position + 1])
    table = without_media(table, config)
    if config.turns is not None:  # with the state from which the environment begins again
        texts = [json.dumps(without_files(each), ensure_ascii=False) for each in openings]
        table = table.append_column(prompts.OPENING, pa.array(texts, pa.string()))
    columns = table.take(pa.array(positions, pa.int64())).replace_schema_metadata(None)
    struct = columns.combine_chunks().to_struct_array().combine_chunks()
    kind_schema = prompts.SCHEMA
    if renderer.has_more_members is None:
        renderer.has_more_members = any(
            isinstance(message, dict) and message.get(member) is not None
            for row, cell in zip(chosen, _input_cells(config, source, chosen), strict=True)
            if isinstance(chat := _read_cell(config, row, cell), list)
            for message in chat
            for member in (*outside.MORE, *outside.THINKING)
        )
    has_tools = "tools" in variables or config.template_arguments.get("tools")
    is_more = config.turns is not None or config.media or has_tools
    if is_more or renderer.has_more_members:
        kind_schema = prompts.BEYOND_TEXT
    return prompts.table_of(rendered, struct, kind_schema)


def _require_input(config: Config, name: str, cell: Any) -> None:
    """Raise ConfigError unless a cell has a type that the input column may hold."""
    is_input = isinstance(cell, list) and bool(cell or config.prompt_ids)
    if config.prompt:
        is_input = isinstance(cell, str) or (is_input and not config.raw_text)
    if not is_input:
        holds = outside.shape_of(cell) if cell != [] else "an empty list"
        column = quoted_name(getattr(config, config.input))
        raise bad_row(name, f"column {column} holds {holds}, expected {_EXPECTED[config.input]}")


def _with_others(errors: Mapping[int, ConfigError], rows: Sequence[int]) -> ConfigError:
    """Return the first of `errors`, by position among `rows`, which also names the others."""
    (first, error), *others = errors.items()
    if others:
        numbers = [str(rows[position] + 1) for position, _ in others]
        more = ", …" if len(numbers) > _MOST_NAMED else ""
        error.message += (
            f"; {len(others)} of the {len(rows) - first - 1} rows after it have a problem, too: "
            f"rows {', '.join(numbers[:_MOST_NAMED])}{more}"
        )
    return error


def _input_cells(config: Config, source: pa.Table, rows: Sequence[int]) -> Iterator[Any]:
    """Yield the cells that `rows` are rendered from."""
    column = source.column(getattr(config, config.input))
    for start in range(0, len(rows), CHUNK):
        yield from without_nulls(column.take(pa.array(rows[start : start + CHUNK], pa.int64())))


def _read_cell(config: Config, row: int, cell: Any) -> Any:
    """Return the input in a cell: parsed if it is a chat and it or its messages are JSON text.

    A number of a CSV file is its text, which Python writes as it was in the file. Raises
    ConfigError.
    """
    is_csv = config.source.endswith(".csv") and not config.source.startswith("datasets:")
    if is_csv and config.prompt and isinstance(cell, int | float):
        return str(cell)
    if not config.messages:
        return cell
    place = f"{config.source} row {row + 1} column {config.messages}"
    if isinstance(cell, str):
        cell = parse_line(cell.encode(), place)
    if not isinstance(cell, list):
        return cell
    return [parse_line(each.encode(), place) if isinstance(each, str) else each for each in cell]


def _only(values: Iterable[Any]) -> Any:
    """Return the only one of `values` that is not None; None if there is none, or several."""
    different = set(values) - {None}
    return different.pop() if len(different) == 1 else None


def _followed_by(messages: list[Message], opening: Sequence[Message]) -> list[Message]:
    """Return `messages` followed by the environment's opening.

    Two user messages in a row become one, because many templates refuse them.
    """
    messages = list(messages)
    for message in map(as_parts, opening):
        last = messages[-1]
        if not last["role"] == message["role"] == "user":
            messages.append(message)
            continue
        content, added = last["content"], message["content"]
        if isinstance(content, str) and isinstance(added, str):
            content = f"{content}\n\n{added}"
        else:
            added = as_content_parts("\n\n") + as_content_parts(added)
            content = as_content_parts(content) + added
        messages[-1] = {**last, "content": content}
    return messages
