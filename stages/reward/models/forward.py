"""A reward model's pass over many inputs, by transformers: nothing padded where the architecture
allows it.

A decoder reads the inputs of one prompt as one packed row in which their common beginning stands
once (`shared`), or packed one after another (`packed`); where its attention can not be cut into
blocks, inputs of similar length are padded to the longest (`padded`). What counts is the hidden
state of an input's last id, told by its length: never by the pad id, which may be an end token. A
way is used only when it agrees with the model's own pass over one input at a time (`single`).

    forward = Forward(folder, budget=2048)
    logits = forward.score([[1, 5, 2], [1, 5, 9, 2]], groups=[0, 0])                     # [2, labels]
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from quiver.schemas.errors import ConfigError, ResourceError, printable
from quiver.stages.common.forward.attention import hidden_states, set_mode
from quiver.stages.common.forward.layout import Sequences, make_layout
from quiver.stages.common.forward.logprob_head import Shaping, completion_logprobs
from quiver.stages.common.forward.packing import pack
from quiver.stages.common.forward.policy import pieces_of, token_budget
from quiver.stages.common.forward.precision import products
from quiver.stages.common.forward.verify import depends_on_length
from quiver.stages.common.models.loading import is_memory_error
from quiver.stages.common.models.mkl_warmup import make_first_calls
from quiver.stages.common.ragged import Ragged

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WAYS = ("shared", "packed", "padded", "single")
TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 5e-2, torch.float16: 2e-2}
"""Largest difference from the model's own pass, as a share of its largest value there (of 1, where
that is smaller)."""
_UNSUITED = (NotImplementedError, TypeError, ValueError, AttributeError)
log = logging.getLogger(__name__)


class Forward:
    """A model on a device. Its values: a classifier's logits, or the log-probabilities of `targets`
    as the next id."""

    def __init__(
        self,
        folder: Path,
        *,
        targets: Sequence[int] = (),
        dtype: str = "auto",
        device: str = "auto",
        budget: int | None = None,
    ) -> None:
        """`targets`: ids whose probability is asked of a language model; none: a sequence
        classifier. ConfigError."""
        cuda = torch.cuda.is_available() if device == "auto" else device == "cuda"
        self.device = torch.device("cuda" if cuda else "cpu")
        auto = torch.bfloat16 if cuda else torch.float32
        self.model = _load(
            folder, bool(targets), auto if dtype == "auto" else getattr(torch, dtype)
        ).to(self.device)
        self.targets = list(targets)
        self.shaping = Shaping.of(self.model.config)
        self.headed = bool(targets) or isinstance(getattr(self.model, "score", None), nn.Module)
        self.budget = budget or token_budget(self.device)
        self.way = ""

    @torch.inference_mode()
    def score(self, inputs: list[list[int]], groups: Sequence[int]) -> torch.Tensor:
        """[inputs, values] float32 on the CPU, for at least one input; none is empty, those of one
        group begin alike.

        ResourceError when memory is short.
        """
        try:
            with products(self.device, fast=False):
                return self._score(inputs, groups).cpu()
        except RuntimeError as error:
            if not is_memory_error(error):
                raise
            raise ResourceError(
                f"reward model {type(self.model).__name__}",
                f"memory is short for {self.budget} tokens at once on {self.device.type}",
                state="finished shards are kept.",
                next="lower token_budget of that model and run again",
            ) from error

    def _score(self, inputs: list[list[int]], groups: Sequence[int]) -> torch.Tensor:
        self.way = self.way or self._choose(inputs, groups)
        values = self._run(self.way, inputs, groups)
        odd = (~values.isfinite()).any(1).nonzero()[:, 0].tolist()
        if odd and self.way != "single":  # in a packed row one input's NaN can reach its neighbours
            values[odd] = self._run("single", [inputs[row] for row in odd], odd)
        return values

    def _run(self, way: str, inputs: list[list[int]], groups: Sequence[int]) -> torch.Tensor:
        if self.headed:
            set_mode(self.model, way if way in ("shared", "packed") else "single")
        if way == "single":
            return torch.cat([self._own(torch.tensor([ids], device=self.device)) for ids in inputs])
        return self._padded(inputs) if way == "padded" else self._packed(way, inputs, groups)

    # -- the ways

    def _own(self, ids: torch.Tensor) -> torch.Tensor:
        """[1, values] of ids [1, T], as whoever uses the model alone has them."""
        logits = self.model(input_ids=ids).logits.float()
        return logits[:, -1].log_softmax(-1)[:, self.targets] if self.targets else logits

    def _packed(self, way: str, inputs: list[list[int]], groups: Sequence[int]) -> torch.Tensor:
        numbers, shared = _common_beginnings(inputs, groups)
        begin = [ids[:length] for ids, length in zip(inputs, shared, strict=True)]
        rest = [
            [*ids[length:], 0] for ids, length in zip(inputs, shared, strict=True)
        ]  # its last id stands in no row
        data = Sequences(_ragged(begin), _ragged(rest), torch.ones(len(inputs)))
        pieces = pieces_of(way, range(len(inputs)), numbers, data, self.budget)
        found = {}
        for micro in pack(pieces, self.budget):
            layout = make_layout(micro, data, self.device)
            last = data.completions.lengths[layout.rows].cumsum(0) - 1
            layout = dataclasses.replace(layout, predictors=layout.predictors[last.to(self.device)])
            found |= dict(
                zip(
                    layout.rows.tolist(), self._head(hidden_states(self.model, layout)), strict=True
                )
            )
        return torch.stack([found[row] for row in range(len(inputs))])

    def _padded(self, inputs: list[list[int]]) -> torch.Tensor:
        order = sorted(range(len(inputs)), key=lambda row: -len(inputs[row]))
        found = {}
        while order:
            width = len(inputs[order[0]])
            count = max(1, self.budget // width)
            rows, order = order[:count], order[count:]
            lengths = torch.tensor([len(inputs[row]) for row in rows], device=self.device)
            mask = (torch.arange(width, device=self.device) < lengths[:, None]).long()
            ids = torch.zeros_like(mask)
            ids[mask.bool()] = torch.tensor(
                [id for row in rows for id in inputs[row]], device=self.device
            )
            if self.headed:
                states = self.model.base_model(
                    input_ids=ids, attention_mask=mask, use_cache=False
                ).last_hidden_state
                values = self._head(
                    states[torch.arange(len(rows), device=self.device), lengths - 1]
                )
            else:
                values = self.model(input_ids=ids, attention_mask=mask).logits.float()
            found |= dict(zip(rows, values, strict=True))
        return torch.stack([found[row] for row in range(len(inputs))])

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        """[b, d] hidden states as values [b, values] in float32."""
        if not self.targets:
            return self.model.score(hidden).float()
        head, warmth = (
            self.model.get_output_embeddings(),
            torch.ones(len(hidden), device=self.device),
        )
        ids = [torch.full((len(hidden),), target, device=self.device) for target in self.targets]
        return torch.stack(
            [completion_logprobs(hidden, head, each, warmth, self.shaping)[0] for each in ids], 1
        )

    # -- which of them

    def _choose(self, inputs: list[list[int]], groups: Sequence[int]) -> str:
        """The first way whose values agree with the model's own on a few short inputs."""
        ways = WAYS if self.headed else WAYS[2:]
        if depends_on_length(self.model.config):
            log.warning(
                "reward model: its positions depend on the length of the row, so one input runs "
                "at a time"
            )
            ways = WAYS[3:]
        rows = _probe(inputs, groups)
        probe = [inputs[row] for row in rows], [groups[row] for row in rows]
        own = self._run("single", *probe)
        bound = TOLERANCE.get(self.model.dtype, max(TOLERANCE.values())) * max(
            1.0, float(own.abs().max())
        )
        for way in ways[:-1]:
            try:
                gap = float((self._run(way, *probe) - own).abs().max())
            except _UNSUITED as error:
                log.warning(
                    "reward model: %r does not suit it (%s); trying the next way",
                    way,
                    printable(error),
                )
                continue
            if gap <= bound:
                return way
            log.warning(
                "reward model: %r is not right for it (values differ by %.4f); trying the next way",
                way,
                gap,
            )
        return ways[-1]


def _load(folder: Path, language_model: bool, dtype: torch.dtype) -> PreTrainedModel:
    """The model in eval mode. ConfigError where weights are missing: transformers would draw them
    at random."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    make_first_calls()
    loader = AutoModelForCausalLM if language_model else AutoModelForSequenceClassification
    try:
        model, info = loader.from_pretrained(
            folder,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"reward model {folder.name}", printable(error), next="name another model"
        ) from error
    missing = sorted(info["missing_keys"])
    if missing:
        message = (
            f"{len(missing)} weights are missing, which would be random: {printable(missing[0])}"
        )
        raise ConfigError(
            f"reward model {folder.name}", message, next="name a model that was trained for this"
        )
    for config in (model.config, model.config.get_text_config()):
        config.pad_token_id = (
            None  # a single input has no padding, even where it ends with the pad id
        )
    return model.eval()


def _probe(inputs: list[list[int]], groups: Sequence[int]) -> list[int]:
    """Up to three short inputs: the shortest, another of its group, and one of another group."""
    order = sorted(range(len(inputs)), key=lambda row: len(inputs[row]))
    first, *others = order
    mates = [row for row in others if groups[row] == groups[first]]
    strangers = [row for row in others if groups[row] != groups[first]]
    return [first, *mates[:1], *strangers[:1]]


def _common_beginnings(
    inputs: list[list[int]], groups: Sequence[int]
) -> tuple[list[int], list[int]]:
    """For each input: the number of its group, and how many ids it shares with the whole group.

    A group whose inputs do not begin alike is taken apart: at least one id must be shared.
    """
    members: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    numbers, shared = [0] * len(inputs), [0] * len(inputs)
    for rows in members.values():
        low, high = (
            min(inputs[row] for row in rows),
            max(inputs[row] for row in rows),
        )  # the two that differ soonest
        most = min(len(low), len(high))
        same = next((at for at in range(most) if low[at] != high[at]), most)
        for row in rows:
            numbers[row], shared[row] = (rows[0], same) if same else (row, len(inputs[row]))
    return numbers, shared


def _ragged(rows: list[list[int]]) -> Ragged:
    return Ragged.from_lengths(
        torch.tensor([id for row in rows for id in row]), torch.tensor([len(row) for row in rows])
    )
