"""A reward model as a scorer: a classifier's logit, or how probable a judge finds a word such as
Yes.

It reads each conversation as if it were used alone (`template`): the prompt's messages and the
decoded completion, never the policy's ids. An input that is too long, a text that its template
refuses, or a logit that is not finite costs its row; nothing is cut. The weights are read when it
first scores.

    scorer = load(ModelConfig(model="path/to/reward-model"), prompts, rollouts)
    scorer.require(columns); scorer.score(batch); scorer.close()
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from quiver.schemas.errors import ConfigError, ResourceError, SecurityError, printable
from quiver.schemas.manifest import canonical
from quiver.stages.common.models import checkpoints
from quiver.stages.common.store import Version
from quiver.stages.reward.scoring import Batch, Part

from .config import ModelConfig, check, who

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from .template import Reader

log = logging.getLogger(__name__)


class Engine(Protocol):
    """What runs the model: `forward.Forward`, `vllm_pooling.Pooling`."""

    def score(self, inputs: list[list[int]], groups: list[int]) -> Any:
        """[inputs, values]: logits of all labels, or log-probabilities of `token` and `against`.
        Groups begin alike."""
        ...


def load(
    config: ModelConfig, prompts: Version | None = None, rollouts: Version | None = None
) -> ModelScorer:
    """The scorer of a reward model; weights are read when it first scores. ConfigError,
    SecurityError.

    `prompts` and `rollouts`: what is to be scored; prompts alone are checked. Without them answers
    begin with `prefill`, or with nothing.
    """
    if (
        prompts is not None
        and config.text_as is None
        and prompts.table(["messages"]).column("messages").null_count
    ):
        raise ConfigError(
            who(config),
            f"reads chats, and {prompts.ref} holds plain text",
            next='set text_as = "user"',
        )
    from .template import beginnings

    return ModelScorer(config, beginnings(config.prefill, prompts, rollouts))


class ModelScorer:
    """A reward model as a scorer."""

    def __init__(self, config: ModelConfig, prefill: Callable[[str], str] = lambda _: "") -> None:
        """`prefill`: the beginning of the answer that a rollout, by its id, was given. ConfigError,
        SecurityError."""
        self.config, self.name, self.weight, self.seconds = config, config.name, config.weight, 0.0
        self.found, self._prefill, self._closed = check(config), prefill, False

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerFast:
        return checkpoints.load_folders_tokenizer(self.found.folder)

    @cached_property
    def _reader(self) -> Reader:
        from .template import Reader

        config, template = self.config, self.found.template
        try:
            template = self._tokenizer.get_chat_template() if template is None else template
        except ValueError:
            message = "its tokenizer has no chat template (or several, none of them the default)"
            raise ConfigError(who(config), message, next="set template to a jinja file") from None
        return Reader(
            self._tokenizer,
            template,
            judge=config.kind == "token",
            arguments=config.template_arguments,
            seconds=config.template_seconds,
            name=who(config),
        )

    @cached_property
    def _targets(self) -> list[int]:
        from .template import token_id

        words = (
            {"token": self.config.token, "against": self.config.against}
            if self.config.kind == "token"
            else {}
        )
        return [
            token_id(self._tokenizer, f"{who(self.config)}: {field}", word)
            for field, word in words.items()
            if word
        ]

    @cached_property
    def _engine(self) -> Engine:
        config, found = self.config, self.found
        log.info("reward model %s: loading", config.name)
        if config.engine == "vllm":
            from .vllm_pooling import Pooling

            return Pooling(
                found.folder,
                config,
                [self._tokenizer.convert_ids_to_tokens(id) for id in self._targets],
            )
        from .forward import Forward

        return Forward(
            found.folder,
            targets=self._targets,
            dtype=config.dtype,
            device=config.device,
            budget=config.token_budget,
        )

    def require(self, columns: Iterable[str]) -> None:
        """ConfigError unless tokenizer and template can be used; it needs none of the prompts'
        columns."""
        ids = self._reader.probe()
        pooled = self.config.kind == "classifier" and self.config.pooling is None
        if pooled and ids[-1] == self.found.pad:
            raise ConfigError(
                who(self.config),
                "each input ends with its pad token "
                f"{printable(self._tokenizer.decode(ids[-1:]))!r}: transformers takes the logit "
                "of the token before, vLLM that of the last",
                next='set pooling = "last_not_pad" (transformers; most models trained with it) or '
                '"last"',
            )
        if self.config.kind == "token":
            _ = self._targets

    def score(self, batch: Batch) -> list[Part]:
        """One part a row. ResourceError or ConfigError where the model itself fails; a row's own
        failure is its error.

        ResourceError after `close`, which may come from another thread.
        """
        start = time.monotonic()
        try:
            read = [self._read(batch, row) for row in range(len(batch["completions"]))]
            keys: dict[str, int] = {}
            prompts = [
                keys.setdefault(json.dumps(prompt), len(keys)) for prompt in batch["prompts"]
            ]
            inputs: dict[tuple[int, ...], int] = {}  # equal answers are scored once
            for ids, prompt in zip(read, prompts, strict=True):
                if not isinstance(ids, Part):
                    inputs.setdefault(ids, prompt)
            self._require_open()
            values = (
                self._engine.score([list(ids) for ids in inputs], list(inputs.values())).tolist()
                if inputs
                else []
            )
            parts = {ids: self._part(found) for ids, found in zip(inputs, values, strict=True)}
            return [ids if isinstance(ids, Part) else parts[ids] for ids in read]
        finally:
            self.seconds += time.monotonic() - start
            if self._closed:
                self._release()  # what was in the making when `close` came

    def _require_open(self) -> None:
        if self._closed:
            raise ResourceError(who(self.config), "was closed while it scored", next="run again")

    def _read(self, batch: Batch, row: int) -> tuple[int, ...] | Part:
        """The ids of one row, or why there are none."""
        prompt, rollout = batch["prompts"][row], batch["rollout_ids"][row]
        if isinstance(prompt, str) and self.config.text_as is None:
            return Part(error='the prompt is plain text: set text_as = "user"')
        messages = (
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        )
        messages.append(
            {"role": "assistant", "content": self._prefill(rollout) + batch["completions"][row]}
        )
        if self.config.kind == "token" and self.config.question:
            messages.append({"role": "user", "content": self.config.question})
        try:
            self._require_open()  # else a reader would be made anew
            ids = self._reader.read(f"rollout {rollout}", messages)
        except (ConfigError, SecurityError) as error:
            return Part(error=printable(error.message))
        if len(ids) > self.found.limit:
            return Part(
                error=f"the input has {len(ids)} tokens, {self.found.limit:.0f} are allowed"
            )
        while self.config.pooling == "last_not_pad" and len(ids) > 1 and ids[-1] == self.found.pad:
            ids = ids[:-1]
        return tuple(ids)

    def _part(self, values: list[float]) -> Part:
        odd = next((value for value in values if not math.isfinite(value)), None)
        if odd is not None:
            return Part(error=f"the model gave {odd}")
        if self.config.kind == "token":
            return Part(
                math.exp(values[0]) if len(values) == 1 else _sigmoid(values[0] - values[1])
            )
        values = _ACTIVATIONS[self.config.activation](values)
        kept = (
            {"extra": canonical(dict(zip(self.found.labels, values, strict=True))).decode()}
            if self.config.extra
            else {}
        )
        return Part(values[self.found.label], **kept)

    def close(self) -> None:
        """End the template's process and let go of the model."""
        self._closed = True
        self._release()

    def _release(self) -> None:
        for made in ("_reader", "_engine"):
            held = self.__dict__.pop(made, None)
            if hasattr(held, "close"):
                held.close()


def _sigmoid(value: float) -> float:
    """1 / (1 + e^−value), without overflow.

    >>> _sigmoid(0.0), _sigmoid(-1000.0)
    (0.5, 0.0)
    """
    return 1 / (1 + math.exp(-value)) if value >= 0 else math.exp(value) / (1 + math.exp(value))


def _softmax(values: list[float]) -> list[float]:
    powers = [math.exp(value - max(values)) for value in values]
    return [power / math.fsum(powers) for power in powers]


_ACTIVATIONS = {
    "none": list,
    "sigmoid": lambda values: [_sigmoid(value) for value in values],
    "softmax": _softmax,
}
