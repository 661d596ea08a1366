r"""Where the assistant's turn begins: which end of a rendered prompt is the turn's header, and
which is already its text.

A generation prompt may go on behind the header, `<|im_start|>assistant\n<think>\n` for one: the
policy continues that text, so it belongs to the answer, and whoever reads the answer as a message
needs it. `learn_start` compares the template's generation prompt with the turn that the same
template writes for an assistant's message; `prefill` then reads the text off any rendered prompt.
`learn_end` gives what stands behind that turn.

    start = learn_start(render, ("user",), guard.token_ends)
    # "<|im_end|>\n<|im_start|>assistant\n"
    prefill("…3 + four?<|im_end|>\n<|im_start|>assistant\n<think>\n", start)
    # "<think>\n"

Added tokens that stand in no such header, and in no other border between two messages, are markup
within a message. A served model reads them as one id wherever their text stands, so texts may hold
them: `learn_markup`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from os.path import commonprefix
from typing import TYPE_CHECKING, Any, NamedTuple

from quiver.schemas.errors import ConfigError
from quiver.stages.common.chat.template import Messages
from quiver.stages.common.models import checkpoints
from quiver.stages.common.store import Version

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_ANSWER = "probezanswer"
Render = Callable[[Messages, bool], str]


def learn_start(
    render: Render, roles: Sequence[str], token_ends: Callable[[str], list[int]]
) -> str | None:
    """What the template writes between the content of the last of `roles` and the assistant's own
    text.

    `render(messages, add_generation_prompt)`. Some templates write more into their last turn than
    into an earlier one (an empty `<think>` block), so both are tried and the shorter header counts.
    None where the template shows no turn of an assistant.
    """
    prompt = _probe_chat(roles)
    answer = {"role": "assistant", "content": _ANSWER}
    follow_up = {"role": "user", "content": "probezfollows"}
    last = prompt[-1]["content"]
    _, *tails = _rendered(render, prompt, generation=True).split(last)
    starts = []  # what generation prompt and assistant's turn have in common
    for messages in ([*prompt, answer], [*prompt, answer, follow_up]):
        turn, *after = _rendered(render, messages).split(_ANSWER)
        _, *headers = turn.split(last)
        if len(tails) == len(headers) == len(after) == 1:
            start = commonprefix([tails[0], headers[0]])  # noqa: RUF071  characters are meant
            # where they part (`<think>` and `</think>`), it ends where a token does
            if start not in (tails[0], headers[0]):
                ends = [end for end in token_ends(tails[0]) if end <= len(start)]
                start = start[: max(ends, default=0)]
            starts.append(start)
    start = min(starts, key=len, default=None)
    # it must stand in the generation prompt once, at its beginning
    if start is None or tails[0].rfind(start) != 0:
        return None
    return start


def learn_end(render: Render, roles: Sequence[str]) -> str:
    """What the template writes behind the text of an assistant's last turn; empty where it
    shows no such turn."""
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
    """What of a rendered prompt stands behind its last `start`; None where it has none."""
    if start not in prompt_text:
        return None
    return prompt_text[prompt_text.rindex(start) + len(start) :]


class Markup(NamedTuple):
    """Ids of added tokens that are no border between messages."""

    anywhere: frozenset[int] = frozenset()
    """Tokens that are not special: any content may hold them."""
    trusted_only: frozenset[int] = frozenset()
    """Special tokens in pairs, such as <think> and </think>: trusted contents may hold them."""


def reserved_ids(policy: Version) -> set[int]:
    """Ids that a policy's configs give a use of their own: begin, end and pad tokens, and what
    stands for a picture, a video or a sound."""
    config = checkpoints.model_config(policy)
    ids: set[Any] = set()
    with suppress(ConfigError):  # the model names no end token
        ids.update(checkpoints.end_token_ids(policy))
    for section in (config, config.get("text_config") or {}):
        for name, value in section.items():
            if name.endswith(("token_id", "token_index")):
                ids.update(value if isinstance(value, list) else [value])
    return {id for id in ids if type(id) is int}


def learn_markup(
    tokenizer: PreTrainedTokenizerFast, renders: Sequence[Render], reserved: Collection[int] = ()
) -> Markup:
    """The added tokens that are markup in each of the templates `renders`. `reserved`: ids with a
    use of their own, such as what stands for a picture."""
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
    """What a template writes between the messages of a conversation, without what it writes into
    a message itself. Pieces that it does not show are left out."""
    system, question, answer, more, result = (
        {"role": role, "content": f"probez{role}{n}z"}
        for n, role in enumerate(("system", "user", "assistant", "user", "tool"))
    )
    chat = _rendered(render, [question, answer, more])
    behind_answer = _between(chat, answer, more)
    if not behind_answer:  # it shows no conversation: all that it writes counts
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
    """What stands in `text` between the contents of two messages; empty if it lacks one."""
    _, _, behind = text.partition(first["content"])
    gap, mark, _ = behind.partition(second["content"])
    return gap if mark else ""
