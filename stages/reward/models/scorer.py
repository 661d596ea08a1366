"""A reward model as a scorer: a classifier's logit, or a judge's probability of a word such as Yes.
Look here for how an input is built and which inputs are errors.

The model reads each conversation as if it were used alone: with its own tokenizer, its own chat
template and one BOS. The policy's ids are never used. The input is the prompt's messages, with
calls of tools and thinking if its template shows them, and the assistant's message. The latter is
the text that the policy had to continue (`<think>`) plus the text that it wrote. Control tokens
typed into either are spelled out. Added tokens that are neither special nor part of the template's
own turns (`</think>`) stay tokens in text; in an answer, paired special tags do too.

Inputs that are too long, texts that the template refuses, and logits that are not finite are errors
of their row; nothing is cut. The weights are loaded at the first call of `score`.

    scorer = ModelScorer(ModelConfig(model="path/to/reward-model"), prompts, rollouts)
    scorer.require(columns); scorer.score(batch); scorer.close()
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

from quiver.schemas.errors import ConfigError, ResourceError, SecurityError, printable
from quiver.schemas.manifest import canonical
from quiver.schemas.outside import MORE
from quiver.stages.core.store import Version
from quiver.stages.model import checkpoints
from quiver.stages.model.chat.control_tokens import Guard
from quiver.stages.model.chat.generation_prompt import learn_markup, prefill
from quiver.stages.model.chat.messages import is_assistants, put_texts, take_texts, texts_of
from quiver.stages.model.chat.template import Messages, Template, first_variables
from quiver.stages.reward.scoring import Batch, Part

from .config import ModelConfig, check

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

log = logging.getLogger(__name__)
_SHOWN = {"role", "content", *MORE}
"""Members of a message that a template may show; pictures and clips are not shown."""
PROBE = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}]
"""A small conversation, which shows how a template begins and ends."""


class ModelScorer:
    """A reward model as a scorer."""

    def __init__(
        self, config: ModelConfig, prompts: Version | None = None, rollouts: Version | None = None
    ) -> None:
        """Check the model; weights are loaded later. Raises ConfigError, SecurityError.

        Args:
            prompts, rollouts: The data to be scored; only prompts are checked. Without them answers
                begin with `prefill`, or with nothing.
        """
        reads_chats = prompts is not None and config.text_as is None
        if reads_chats and prompts.table(["messages"]).column("messages").null_count:
            raise ConfigError(
                config.title,
                f"reads chats, and {prompts.ref} holds plain text",
                next='set text_as = "user"',
            )
        self.config = config
        self.name = config.name
        self.seconds = 0.0
        self._model = check(config)
        self._prefill = beginnings(config.prefill, prompts, rollouts)
        self._closed = False

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerFast:
        return checkpoints.load_folders_tokenizer(self._model.folder, self.config.title)

    @cached_property
    def _reader(self) -> Reader:
        config = self.config
        template = self._model.template
        try:
            template = self._tokenizer.get_chat_template() if template is None else template
        except ValueError:
            raise ConfigError(
                config.title,
                "its tokenizer has no chat template (or several, none of them the default)",
                next="set template to a jinja file",
            ) from None
        return Reader(self._tokenizer, template, config)

    @cached_property
    def _targets(self) -> list[int]:
        """Ids of a judge's `token` and `against`. Raises ConfigError."""
        if self.config.kind != "token":
            return []
        words = {"token": self.config.token, "against": self.config.against}
        return [
            token_id(self._tokenizer, f"{self.config.title}: {field}", word)
            for field, word in words.items()
            if word
        ]

    @cached_property
    def _engine(self) -> Any:
        """The engine that runs the model. Its `score(inputs, groups)` returns [inputs, values]:
        logits of all labels or log-probabilities of the targets."""
        config = self.config
        folder = self._model.folder
        log.info("reward model %s: loading", config.name)
        if config.engine == "vllm":
            from .vllm_pooling import Pooling

            words = [self._tokenizer.convert_ids_to_tokens(id) for id in self._targets]
            return Pooling(folder, config, words)
        from .forward import Forward

        return Forward(folder, config, self._targets)

    @property
    def gpus(self) -> Sequence[int]:
        """Numbers of the GPUs that the loaded model takes."""
        return getattr(self.__dict__.get("_engine"), "gpus", ())

    def require(self, columns: Iterable[str]) -> None:
        """Raise ConfigError unless tokenizer and template can be used. It needs none of the
        prompts' columns."""
        config = self.config
        last = self._reader.read("probe", PROBE)[-1]
        if config.kind == "classifier" and config.pooling is None and last == self._model.pad:
            raise ConfigError(
                config.title,
                "each input ends with its pad token "
                f"{printable(self._tokenizer.decode([last]))!r}: transformers takes the logit of "
                "the token before, vLLM of the last",
                next='set pooling = "last_not_pad" (transformers; most models trained with it) or '
                '"last"',
            )
        _ = self._targets  # raises ConfigError if a word is no single token

    def score(self, batch: Batch) -> list[Part]:
        """Return one part per row; a row's own failure is its error.

        Raises ResourceError or ConfigError if the model itself fails, and ResourceError after
        `close`, which may come from another thread.
        """
        started_at = time.monotonic()
        try:
            inputs = [self._read(batch, row) for row in range(len(batch["completions"]))]
            prompt_of: dict[tuple[int, ...], str] = {}  # equal answers are scored once
            for ids, prompt in zip(inputs, batch["prompts"], strict=True):
                if not isinstance(ids, Part):
                    prompt_of.setdefault(ids, json.dumps(prompt))
            self._require_open()
            values = []
            if prompt_of:
                values = self._engine.score(
                    list(map(list, prompt_of)), list(prompt_of.values())
                ).tolist()
            parts = dict(zip(prompt_of, map(self._part, values), strict=True))
            return [ids if isinstance(ids, Part) else parts[ids] for ids in inputs]
        finally:
            self.seconds += time.monotonic() - started_at
            if self._closed:
                self.close()  # also release what was being made when `close` came

    def _require_open(self) -> None:
        if self._closed:
            raise ResourceError(self.config.title, "was closed while it scored", next="run again")

    def _read(self, batch: Batch, row: int) -> tuple[int, ...] | Part:
        """Return the ids of one row, or a part with the error."""
        config = self.config
        prompt = batch["prompts"][row]
        rollout_id = batch["rollout_ids"][row]
        if isinstance(prompt, str):
            if config.text_as is None:
                return Part(error='the prompt is plain text: set text_as = "user"')
            prompt = [{"role": "user", "content": prompt}]
        answer = self._prefill(rollout_id) + batch["completions"][row]
        messages = [*prompt, {"role": "assistant", "content": answer}]
        if config.kind == "token" and config.question:
            messages.append({"role": "user", "content": config.question})
        try:
            self._require_open()  # after `close` a new reader would leak
            ids = self._reader.read(f"rollout {rollout_id}", messages)
        except (ConfigError, SecurityError) as error:
            return Part(error=printable(error.message))
        limit = self._model.limit
        if len(ids) > limit:
            return Part(error=f"the input has {len(ids)} tokens, {limit:.0f} are allowed")
        while config.pooling == "last_not_pad" and len(ids) > 1 and ids[-1] == self._model.pad:
            ids = ids[:-1]
        return tuple(ids)

    def _part(self, values: list[float]) -> Part:
        """Return the part of a row from the engine's values."""
        for value in values:
            if not math.isfinite(value):
                return Part(error=f"the model gave {value}")
        if self.config.kind == "token":
            token, *against = values
            return Part(_sigmoid(token - against[0]) if against else math.exp(token))
        if self.config.activation == "sigmoid":
            values = list(map(_sigmoid, values))
        elif self.config.activation == "softmax":
            powers = [math.exp(value - max(values)) for value in values]
            values = [power / math.fsum(powers) for power in powers]
        extra = None
        if self.config.extra:
            extra = canonical(dict(zip(self._model.labels, values, strict=True))).decode()
        return Part(values[self._model.label], extra=extra)

    def close(self) -> None:
        """End the template's process and release the model."""
        self._closed = True
        for name in ("_reader", "_engine"):
            resource = self.__dict__.pop(name, None)
            if hasattr(resource, "close"):
                resource.close()


def _sigmoid(logit: float) -> float:
    """Return 1 / (1 + e^−logit), without overflow.

    >>> _sigmoid(0.0), _sigmoid(-1000.0)
    (0.5, 0.0)
    """
    return 1 / (1 + math.exp(-logit)) if logit >= 0 else math.exp(logit) / (1 + math.exp(logit))


# -- what the model reads


class Reader:
    """A reward model's tokenizer, and its template in a child process."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, template: str, config: ModelConfig
    ) -> None:
        """Start the template's process. A judge's input ends with a generation prompt. Raises
        ConfigError if the template cannot render an answer."""
        is_judge = config.kind == "token"
        arguments = {"add_generation_prompt": is_judge, **config.template_arguments}
        variables = first_variables(tokenizer, arguments)
        name = f"{config.title}: template"
        self._title = name
        self._has_looked = False
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
        chat = [
            {key: member for key, member in message.items() if key in _SHOWN}
            for message in messages
        ]
        self._look_for_calls(name, chat)
        structure, texts = take_texts(chat)

        def render(texts: list[str]) -> str:
            shown, _ = put_texts(structure, iter(texts))
            return self._template.render(name, shown)

        trusted = texts_of(chat, is_assistants)
        return self._guard.encode(
            name, (json.dumps(structure),), texts, render, trusted=trusted
        ).ids

    def _look_for_calls(self, name: str, chat: Messages) -> None:
        """Warn once if the template shows nothing of the calls of tools in `chat`: then answers
        after different calls read the same."""
        if self._has_looked or not any("tool_calls" in message for message in chat):
            return
        self._has_looked = True
        without = [{**message} for message in chat]
        for message in without:
            message.pop("tool_calls", None)
        with suppress(ConfigError):  # a row's own failure, which `read` tells
            if self._template.render(name, chat) == self._template.render(name, without):
                log.warning(
                    "%s does not show the calls of tools in the prompts' chats: set template to a "
                    "jinja file that shows them",
                    self._title,
                )


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
            next='set prefill of the reward model or server: "" if the policy was given '
            "nothing to continue",
        )
    return beginning
