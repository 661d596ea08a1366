r"""Finds where the assistant's turn begins: the turn's header, and text after it in the prompt.

A generation prompt may contain text after the header, for example
`<|im_start|>assistant\n<think>\n`. The policy continues that text, so it belongs to the answer, and
code that reads the answer as a message needs it. `learn_start` compares the template's generation
prompt with the turn that the same template writes for an assistant's message. `prefill` then reads
the text after the header from any rendered prompt. `learn_end` returns the text after that turn.

    start = learn_start(render, ("user",), guard.token_ends)
    # "<|im_end|>\n<|im_start|>assistant\n"
    prefill("…3 + four?<|im_end|>\n<|im_start|>assistant\n<think>\n", start)
    # "<think>\n"

Added tokens that are in no such header, and in no other border between two messages, are markup
within a message. A served model reads them as one id anywhere in a text, so texts may hold them:
see `learn_markup`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from os.path import commonprefix
from typing import TYPE_CHECKING, Any, NamedTuple

from quiver.schemas.errors import ConfigError
from quiver.stages.core.store import Version
from quiver.stages.model import checkpoints
from quiver.stages.model.chat.template import Messages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_ANSWER = "probezanswer"
Render = Callable[[Messages, bool], str]


def learn_start(
    render: Render, roles: Sequence[str], token_ends: Callable[[str], list[int]]
) -> str | None:
    """Return the text between the content of the last of `roles` and the assistant's own text.

    Some templates write more into their last turn than into an earlier one (an empty `<think>`
    block), so both are tried and the shorter header counts.

    Args:
        render: `render(messages, add_generation_prompt)` returns the text of a chat.
        roles: Roles of the messages before the assistant's turn.
        token_ends: Returns the ends of the tokens of a text, ascending.

    Returns:
        The header, or None if the template shows no turn of an assistant.
    """
    prompt = _probe_chat(roles)
    answer = {"role": "assistant", "content": _ANSWER}
    follow_up = {"role": "user", "content": "probezfollows"}
    last = prompt[-1]["content"]
    _, *tails = _rendered(render, prompt, generation=True).split(last)
    starts = []  # the common beginnings of generation prompt and assistant's turn
    for messages in ([*prompt, answer], [*prompt, answer, follow_up]):
        turn, *after = _rendered(render, messages).split(_ANSWER)
        _, *headers = turn.split(last)
        if len(tails) == len(headers) == len(after) == 1:
            start = commonprefix([tails[0], headers[0]])  # noqa: RUF071  characters are meant
            # if they part inside a token (`<think>`, `</think>`), the header ends before that token
            if start not in (tails[0], headers[0]):
                ends = [end for end in token_ends(tails[0]) if end <= len(start)]
                start = start[: max(ends, default=0)]
            starts.append(start)
    start = min(starts, key=len, default=None)
    # it must be in the generation prompt once, at its beginning
    if start is None or tails[0].rfind(start) != 0:
        return None
    return start


def learn_end(render: Render, roles: Sequence[str]) -> str:
    """Return the text that the template writes after an assistant's last turn; empty if it shows
    no such turn."""
    chat = [*_probe_chat(roles), {"role": "assistant", "content": _ANSWER}]
    return _rendered(render, chat).partition(_ANSWER)[2]


def _probe_chat(roles: Sequence[str]) -> Messages:
    return [{"role": role, "content": f"probez{number}z"} for number, role in enumerate(roles)]


def _rendered(render: Render, messages: Messages, *, generation: bool = False) -> str:
    try:
        return render(messages, generation)
    except ConfigError:  # the template refuses these roles
        return ""


def prefill(prompt_text: str, start: str) -> str | None:
    """Return the part of a rendered prompt after its last `start`; None if it has no `start`."""
    if start not in prompt_text:
        return None
    return prompt_text[prompt_text.rindex(start) + len(start) :]


class Markup(NamedTuple):
    """Ids of added tokens that do not separate messages."""

    anywhere: frozenset[int] = frozenset()
    """Tokens that are not special; any content may hold them."""
    trusted_only: frozenset[int] = frozenset()
    """Special tokens in pairs, such as <think> and </think>; trusted contents may hold them."""


def reserved_ids(policy: Version) -> set[int]:
    """Return the ids to which a policy's configs give a use of their own.

    These are begin, end and pad tokens, and placeholders of pictures, videos and sounds.
    """
    config = checkpoints.model_config(policy)
    ids: list[Any] = []
    with suppress(ConfigError):  # the model names no end token
        ids += checkpoints.end_token_ids(policy)
    for section in (config, config.get("text_config") or {}):
        for name, value in section.items():
            if name.endswith(("token_id", "token_index")):
                ids += value if isinstance(value, list) else [value]
    return {id for id in ids if type(id) is int}


def learn_markup(
    tokenizer: PreTrainedTokenizerFast, renders: Sequence[Render], reserved: Collection[int] = ()
) -> Markup:
    """Return the added tokens that are markup in each of the templates `renders`.

    `reserved` are ids with a use of their own, such as a picture's placeholder.
    """
    encode = tokenizer.backend_tokenizer.encode

    def token_ends(text: str) -> list[int]:
        return [end for _, end in encode(text, add_special_tokens=False).offsets]

    kept = set(reserved)
    for render in renders:
        for border in _borders(render, token_ends):
            kept |= set(encode(border, add_special_tokens=False).ids)
    named = {text for text in tokenizer.special_tokens_map.values() if isinstance(text, str)}
    tokens = {
        id: token
        for id, token in tokenizer.added_tokens_decoder.items()
        if id not in kept and token.content not in named
    }
    texts = {token.content for token in tokens.values()}
    special = {id: token.content for id, token in tokens.items() if token.special}
    partners = {text: text.replace("<", "</", 1) for text in texts if re.match("<[^/]", text)}
    partners.update({closing: opening for opening, closing in partners.items()})
    return Markup(
        anywhere=frozenset(tokens.keys() - special.keys()),
        trusted_only=frozenset(id for id, text in special.items() if partners.get(text) in texts),
    )


def _borders(render: Render, token_ends: Callable[[str], list[int]]) -> list[str]:
    """Return the pieces that a template writes between the messages of a conversation, without
    what it writes into a message itself. Pieces that it does not show are left out."""
    system, question, answer, more, result = (
        {"role": role, "content": f"probez{role}{n}z"}
        for n, role in enumerate(("system", "user", "assistant", "user", "tool"))
    )
    chat = _rendered(render, [question, answer, more])
    behind_answer = _between(chat, answer, more)
    if not behind_answer:  # no conversation is shown, so all text that it writes counts
        return [_rendered(render, [question], generation=True)]
    start = learn_start(render, ["user"], token_ends)
    before_answer = _between(chat, question, answer) if start is None else start
    with_system = _rendered(render, [system, question])
    before_system = with_system.partition(system["content"])[0]
    borders = [before_answer, behind_answer, _between(with_system, system, question)]
    borders.append(before_system if before_system != with_system else "")
    result = {**result, "name": "probeztool", "tool_call_id": "call00000"}
    for turn in (answer, _CALL):
        before = _rendered(render, [question, turn])
        whole = _rendered(render, [question, turn, result])
        if before and result["content"] in whole:
            borders.append(whole[len(commonprefix([before, whole])) :])  # noqa: RUF071
    return borders


_CALL: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call00000",
            "type": "function",
            "function": {"name": "probeztool", "arguments": {}},
        }
    ],
}
"""A turn of the assistant that calls a tool."""


def _between(text: str, first: dict[str, str], second: dict[str, str]) -> str:
    """Return the part of `text` between the contents of two messages; empty if it lacks one."""
    _, _, behind = text.partition(first["content"])
    gap, mark, _ = behind.partition(second["content"])
    return gap if mark else ""
