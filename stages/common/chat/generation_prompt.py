r"""Where the assistant's turn begins: which end of a rendered prompt is the turn's header, and
which is already its text.

A generation prompt may go on behind the header, `<|im_start|>assistant\n<think>\n` for one: the
policy continues that text, so it belongs to the answer, and whoever reads the answer as a message
needs it. `learn_start` compares the template's generation prompt with the turn that the same
template writes for an assistant's message; `prefill` then reads the text off any rendered prompt.

    start = learn_start(render, ("user",), guard.token_ends)          # "<|im_end|>\n<|im_start|>assistant\n"
    prefill("…3 + four?<|im_end|>\n<|im_start|>assistant\n<think>\n", start)                         # "<think>\n"
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quiver.schemas.errors import ConfigError
from quiver.stages.common.chat.template import Messages

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
    asked = [{"role": role, "content": f"probez{number}z"} for number, role in enumerate(roles)]
    last, answer = asked[-1]["content"], {"role": "assistant", "content": _ANSWER}
    _, *tail = _try(render, asked, True).split(last)
    found = []
    for after in ([], [{"role": "user", "content": "probezfollows"}]):
        turn, *rest = _try(render, [*asked, answer, *after], False).split(_ANSWER)
        _, *header = turn.split(last)
        if len(tail) == len(header) == len(rest) == 1:
            found.append(_shared(tail[0], header[0], token_ends))
    start = min(found, key=len, default=None)
    return start if start is not None and tail[0].rfind(start) == 0 else None


def prefill(prompt_text: str, start: str) -> str | None:
    """What of a rendered prompt stands behind its last `start`; None where it has none."""
    at = prompt_text.rfind(start)
    return None if at < 0 else prompt_text[at + len(start) :]


def _try(render: Render, messages: Messages, generation: bool) -> str:
    try:
        return render(messages, generation)
    except ConfigError:  # the template refuses these roles
        return ""


def _shared(tail: str, header: str, token_ends: Callable[[str], list[int]]) -> str:
    """The beginning that both have. Where they part (`<think>` and `</think>`), it ends where a
    token of `tail` does."""
    shorter = min(len(tail), len(header))
    same = next((at for at in range(shorter) if tail[at] != header[at]), shorter)
    if same == shorter:
        return tail[:same]
    return tail[: max((end for end in token_ends(tail) if end <= same), default=0)]
