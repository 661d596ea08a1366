"""Warnings about rows that look unintended: a blank question, a chat as text, an answer at the end.

Such rows are rendered unchanged. Each warning is given once, for the first row; warnings about
roles and control tokens once for each of them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection

from quiver.schemas.errors import printable

from .messages import Message

ROLES = ("assistant", "system", "tool", "user")
"""The roles that chat templates support; some support `developer` too, and then mention it."""
_CHAT_AS_TEXT = re.compile(r"""\s*\[\s*\{[^}]{0,100}['"]role['"]\s*:""")
log = logging.getLogger(__name__)


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
            self.say_once(
                "blank",
                f"{name}: column {column} is blank, and the policy is asked it: correct the row, "
                "or take it out of the source",
            )
        if _CHAT_AS_TEXT.match(text):
            self.say_once(
                "chat as text",
                f"{name}: column {column} holds a chat written as text, which the policy is shown "
                f'as it stands. If it is JSON, set data.messages = "{column}"',
            )

    def on_chat(self, name: str, messages: list[Message], template: str) -> None:
        """Warn about the chat of row `name`.

        Subjects are roles that the `template` (its text) does not support, a blank question, and an
        answer at the end of the chat.
        """
        content = messages[-1]["content"]
        as_shown = content if isinstance(content, str) else "parts"
        roles = {*ROLES, *(["developer"] if "developer" in template else [])}
        for role in sorted({message["role"] for message in messages} - roles):
            self.say_once(
                f"role {role} as such",
                f"{name}: a message has the role {printable(role)}; the chat template is made for "
                f"{', '.join(sorted(roles))}: rename it, or set prompt.template to one that shows "
                "it",
            )
        if messages[-1]["role"] == "user" and not as_shown.strip():
            self.say_once(
                "blank",
                f"{name}: the last message of the chat is blank, and the policy is asked it: "
                "correct the row, or take it out of the source",
            )
        if all(message["role"] in ("system", "developer") for message in messages):
            self.say_once(
                "no question",
                f"{name}: the chat asks nothing, its messages are the system's alone: correct the "
                "row, or take it out of the source",
            )
        if messages[-1]["role"] == "assistant":
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
