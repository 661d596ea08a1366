"""Turn conversations into the ids that a reward model reads when it is used alone: with its own
tokenizer, its own chat template, and one BOS.

The policy's ids are never used. The input is the prompt's messages and the assistant's message. The
latter is the text that the policy had to continue (`<think>`) plus the text that it wrote. Control
tokens typed into either are spelled out. Added tokens that are neither special nor part of the
template's own turns (`</think>`) stay tokens in text; in an answer, paired special tags do too.

    with closing(Reader(tokenizer, template, config)) as reader:
        ids = reader.read("rollout 4be1c0de-sum-0017-2", [{"role": "user", …}, {"role": "assistant",
        "content": "7"}])
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from quiver.schemas.errors import ConfigError, printable
from quiver.stages.common.chat.control_tokens import Guard
from quiver.stages.common.chat.generation_prompt import learn_markup, prefill
from quiver.stages.common.chat.template import Messages, Template
from quiver.stages.common.store import Version

from .config import ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PROBE = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}]
"""A small conversation, which shows how a template begins and ends."""


class Reader:
    """A reward model's tokenizer, and its template in a child process."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, template: str, config: ModelConfig
    ) -> None:
        """Start the template's process. A judge's input ends with a generation prompt. Raises
        ConfigError if the template cannot render an answer."""
        variables = {
            "tools": None,
            "documents": None,
            **tokenizer.special_tokens_map,
            "add_generation_prompt": config.kind == "token",
            **config.template_arguments,
        }
        name = f"{config.title}: template"
        self._template = Template(template, variables, config.template_seconds, name)
        try:
            self._template.render(name, PROBE)
            unseen = self._template.unseen(name, PROBE)
            if unseen:
                raise ConfigError(
                    name,
                    f"does not show a message of the role {PROBE[min(unseen)]['role']}, or cuts "
                    "it, as text and as a list of parts",
                    next="set template to a jinja file that shows questions and answers",
                )
            markup = learn_markup(tokenizer, [self._template.probe])
            self._guard = Guard(tokenizer, **markup._asdict())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the template's process."""
        self._template.close()

    def read(self, name: str, messages: Messages) -> list[int]:
        """Return the ids of `messages`. Raises ConfigError or SecurityError about `name` if they
        cannot be rendered."""
        roles = tuple(message["role"] for message in messages)

        def render(contents: list[str]) -> str:
            chat = [
                {"role": role, "content": content}
                for role, content in zip(roles, contents, strict=True)
            ]
            return self._template.render(name, chat)

        contents = [message["content"] for message in messages]
        answers = [n for n, role in enumerate(roles) if role == "assistant"]
        return self._guard.encode(name, roles, contents, render, trusted=answers).ids


def token_id(tokenizer: PreTrainedTokenizerFast, field: str, text: str) -> int:
    """Return the one id of `text`. Raises ConfigError if it has several."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        pieces = ", ".join(repr(tokenizer.decode([id])) for id in ids)
        raise ConfigError(
            f"{field} {printable(repr(text))}",
            f"is {len(ids)} tokens of the reward model ({printable(pieces)}), one is needed",
            next="choose a word that is one token, such as Yes",
        )
    return ids[0]


# -- what the policy was given to continue


def beginnings(
    beginning: str | None, prompts: Version | None, rollouts: Version | None
) -> Callable[[str], str]:
    """Return a function from a rollout_id to the text that the policy had to continue: the part of
    the prompt that begins the answer, such as `<think>`. It is mostly empty.

    Args:
        beginning: The recipe's setting. Default: computed from `prompts`.

    Raises ConfigError if the prompts do not determine it.
    """
    if beginning is not None or prompts is None:
        return lambda _: beginning or ""
    starts = prompts.manifest.metrics.get("assistant_starts", {})
    by_group = {
        row["group_id"]: _prefill(prompts, row, starts)
        for row in prompts.table(["group_id", "messages", "prompt_text"]).to_pylist()
    }
    first, *others = set(by_group.values()) or {""}
    if not others or rollouts is None:
        return lambda _: first
    rows = rollouts.table(["rollout_id", "group_id"]).to_pylist()
    group_of = {row["rollout_id"]: row["group_id"] for row in rows}
    return lambda rollout_id: by_group[group_of[rollout_id]]


def _prefill(prompts: Version, row: dict[str, Any], starts: Mapping[str, str | None]) -> str:
    if not row["messages"]:
        return ""
    start = starts.get(row["messages"][-1]["role"])
    beginning = None if start is None else prefill(row["prompt_text"], start)
    if beginning is None:
        raise ConfigError(
            f"{prompts.ref} prompt {printable(row['group_id'])}",
            "cannot tell how much of its text is the beginning of the answer: its template shows "
            "no turn of an assistant, or the prompts were rendered before that was noted",
            next='set prefill of the reward model or server: "" where the policy was given '
            "nothing to continue",
        )
    return beginning
