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
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os.path import commonprefix

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

    def rendered(messages: Messages, generation: bool) -> str:
        try:
            return render(messages, generation)
        except ConfigError:  # the template refuses these roles
            return ""

    prompt = [{"role": role, "content": f"probez{number}z"} for number, role in enumerate(roles)]
    answer = {"role": "assistant", "content": _ANSWER}
    follow_up = {"role": "user", "content": "probezfollows"}
    last = prompt[-1]["content"]
    _, *tails = rendered(prompt, True).split(last)
    starts = []  # what generation prompt and assistant's turn have in common
    for messages in ([*prompt, answer], [*prompt, answer, follow_up]):
        turn, *after = rendered(messages, False).split(_ANSWER)
        _, *headers = turn.split(last)
        if len(tails) == len(headers) == len(after) == 1:
            start = commonprefix([tails[0], headers[0]])  # noqa: RUF071  characters are meant
            # where they part (`<think>` and `</think>`), it ends where a token does
            if start not in (tails[0], headers[0]):
                ends = [end for end in token_ends(tails[0]) if end <= len(start)]
                start = start[: max(ends, default=0)]
            starts.append(start)
    start = min(starts, key=len, default=None)
    if start is None or tails[0].rfind(start) != 0:
        return None
    return start


def learn_end(render: Render, roles: Sequence[str]) -> str:
    """Returns what the template writes behind the text of an assistant's last turn; empty where it
    shows no such turn."""
    prompt = [{"role": role, "content": f"probez{number}z"} for number, role in enumerate(roles)]
    try:
        text = render([*prompt, {"role": "assistant", "content": _ANSWER}], False)
    except ConfigError:  # the template refuses these roles
        return ""
    return text.partition(_ANSWER)[2]


def prefill(prompt_text: str, start: str) -> str | None:
    """What of a rendered prompt stands behind its last `start`; None where it has none."""
    if start not in prompt_text:
        return None
    return prompt_text[prompt_text.rindex(start) + len(start) :]
