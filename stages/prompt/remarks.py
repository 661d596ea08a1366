"""Warnings about rows that may not be what their author meant: a blank question, a chat written as
text, an answer at the end of a chat.

Such rows are rendered as they stand. Each warning is given once, for the first row; of roles and of
control tokens once each.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection

from quiver.schemas.errors import printable

from .messages import Message

ROLES = ("assistant", "system", "tool", "user")
"""The roles that chat templates are made for; some know `developer` too, and name it."""
_CHAT_AS_TEXT = re.compile(r"""\s*\[\s*\{[^}]{0,100}['"]role['"]\s*:""")
log = logging.getLogger(__name__)


class Remarks:
    """The warnings of one renderer."""

    def __init__(self) -> None:
        self._subjects: set[str] = set()
        """What has been warned of."""

    def say_once(self, subject: str, message: str) -> None:
        """Warn, unless of the same `subject` before."""
        if subject not in self._subjects:
            self._subjects.add(subject)
            log.warning("%s", message)

    def on_text(self, name: str, column: str, text: str) -> None:
        """Warn of a blank question of row `name`, and of a chat that is written as text."""
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
        """Warn of roles that the `template` (its text) is not made for, of a blank question, and of
        an answer that is in the chat."""
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
        """Warn, once for each, of control `tokens` that a text holds and that were spelled out."""
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
