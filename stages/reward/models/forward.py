"""Run a reward model over many inputs with transformers, without padding if the architecture allows
it. Look here for the numerics of reward models.

A decoder reads the inputs of one prompt as one strip that holds their common beginning once
(`shared`), or packed one after another (`packed`). If its attention cannot be cut into blocks,
inputs of similar length are padded to the longest (`padded`). The value comes from the hidden state
of an input's last id. Its length locates that id, not the pad id, which may be an end token. A way
is used only if it agrees with the model's own pass over one input at a time (`single`).

    forward = Forward(folder, config)
    logits = forward.score([[1, 5, 2], [1, 5, 9, 2]], groups=[0, 0])       # [2, labels]
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Hashable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from quiver.schemas.errors import printable
from quiver.stages.model.devices import next_gpus, placing, uses_gpu
from quiver.stages.model.families import depends_on_length
from quiver.stages.model.forward.attention import hidden_states, set_mode
from quiver.stages.model.forward.layout import Sequences, make_layout
from quiver.stages.model.forward.logprob_head import Shaping, completion_logprobs
from quiver.stages.model.forward.packing import pack
from quiver.stages.model.forward.policy import pieces_of
from quiver.stages.model.forward.precision import products
from quiver.stages.model.forward.transfer import to_device
from quiver.stages.model.loading import load_pretrained, short_of_memory
from quiver.stages.model.mkl_warmup import make_first_calls
from quiver.stages.model.ragged import Ragged

from .config import ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WAYS = ("shared", "packed", "padded", "single")
TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 5e-2, torch.float16: 2e-2}
"""Largest difference from the model's own pass, relative to its largest absolute value there (or to
1 if that is smaller)."""
_UNSUITED = (NotImplementedError, TypeError, ValueError, AttributeError)
log = logging.getLogger(__name__)


class Forward:
    """A model on a device. Its values are a classifier's logits, or the log-probabilities of
    `targets` as the next id."""

    def __init__(self, folder: Path, config: ModelConfig, targets: Sequence[int] = ()) -> None:
        """Load the model. Raises ConfigError.

        Args:
            targets: Ids whose probability a language model gives. Default: a sequence classifier.
        """
        cuda = uses_gpu("reward.models.device", config.device)
        dtype = config.dtype
        if dtype == "auto":
            dtype = "bfloat16" if cuda else "float32"
        model = _load(folder, bool(targets), getattr(torch, dtype))
        with placing:
            self.gpus = next_gpus(1) if cuda else []
            self.device = torch.device("cuda", *self.gpus) if cuda else torch.device("cpu")
            self.model = model.to(self.device)
        self.targets = list(targets)
        self.shaping = Shaping.of(self.model.config)
        self.has_plain_head = self.targets or isinstance(
            getattr(self.model, "score", None), nn.Module
        )
        """True if its values come from a head on the last hidden state."""
        self.budget = config.token_budget or (8192 if cuda else 2048)
        self.way = ""
        """Empty until a batch shows it."""

    @torch.inference_mode()
    def score(self, inputs: list[list[int]], groups: Sequence[Hashable]) -> torch.Tensor:
        """Return [inputs, values] float32 on the CPU.

        Args:
            inputs: At least one input, none empty.
            groups: Group of each input. Inputs of one group begin alike.

        Raises ResourceError if memory is short.
        """
        name = f"reward model {type(self.model).__name__}"
        with (
            short_of_memory(name, "lower token_budget of that model and run again"),
            products(self.device),
            torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext(),
        ):
            self.way = self.way or self._choose_way(inputs)
            way = self.way or "single"
            values = self._run(way, inputs, groups)
            broken = (~values.isfinite()).any(1).nonzero()[:, 0].tolist()
            if broken and way != "single":  # in a strip one input's NaN can reach others
                values[broken] = self._run("single", [inputs[row] for row in broken], broken)
            return values.cpu()

    def _run(self, way: str, inputs: list[list[int]], groups: Sequence[Hashable]) -> torch.Tensor:
        """Return [inputs, values], computed in one way."""
        if self.has_plain_head:
            set_mode(self.model, way if way in ("shared", "packed") else "single")
        if way == "single":
            return torch.cat([self._run_alone(ids) for ids in inputs])
        if way == "padded":
            batches = self._padded(inputs)
        else:
            batches = self._packed(way, inputs, groups)
        by_row = {}
        for rows, values in batches:
            by_row.update(zip(rows, values, strict=True))
        return torch.stack([by_row[row] for row in range(len(inputs))])

    # -- the ways

    def _run_alone(self, ids: list[int]) -> torch.Tensor:
        """Return [1, values] of one input, exactly as the model alone computes them."""
        logits = self.model(input_ids=torch.tensor([ids], device=self.device)).logits.float()
        return logits[:, -1].log_softmax(-1)[:, self.targets] if self.targets else logits

    def _packed(
        self, way: str, inputs: list[list[int]], groups: Sequence[Hashable]
    ) -> Iterator[tuple[list[int], torch.Tensor]]:
        """Yield rows and their values. Each group's common beginning is its prompt, the rest are
        completions."""
        group_of, lengths = _common_beginnings(inputs, groups)
        pairs = list(zip(inputs, lengths, strict=True))
        sequences = Sequences(
            _ragged([ids[:length] for ids, length in pairs]),
            # one more id, whose value is not read: the hidden state of the id before predicts it
            _ragged([[*ids[length:], 0] for ids, length in pairs]),
            torch.ones(len(inputs)),
        )
        pieces = pieces_of(way, range(len(inputs)), group_of, sequences, self.budget)
        for micro in pack(pieces, self.budget):
            layout = make_layout(micro, sequences)
            last = sequences.completions.lengths[layout.rows].cumsum(0) - 1
            layout = dataclasses.replace(layout, predictors=layout.predictors[last])
            layout = to_device(layout, self.device)
            yield layout.rows.tolist(), self._values(hidden_states(self.model, layout))

    def _padded(self, inputs: list[list[int]]) -> Iterator[tuple[list[int], torch.Tensor]]:
        """Yield rows and their values, inputs of similar length together."""
        unscored = sorted(range(len(inputs)), key=lambda row: -len(inputs[row]))
        while unscored:
            longest = len(inputs[unscored[0]])
            count = max(1, self.budget // longest)
            rows = unscored[:count]
            unscored = unscored[count:]
            chosen = [torch.tensor(inputs[row], device=self.device) for row in rows]
            ids = pad_sequence(chosen, batch_first=True)
            mask = pad_sequence(list(map(torch.ones_like, chosen)), batch_first=True)
            arguments = {"input_ids": ids, "attention_mask": mask}
            if self.has_plain_head:
                states = self.model.base_model(**arguments, use_cache=False).last_hidden_state
                last = states[torch.arange(len(rows), device=self.device), mask.sum(1) - 1]
                yield rows, self._values(last)
            else:
                yield rows, self.model(**arguments).logits.float()

    def _values(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map [b, d] hidden states to values [b, values] in float32."""
        if not self.targets:
            return self.model.score(hidden).float()
        head = self.model.get_output_embeddings()
        temperature = torch.ones(len(hidden), device=self.device)
        columns = []
        for target in self.targets:
            ids = torch.full((len(hidden),), target, device=self.device)
            logprobs, _ = completion_logprobs(hidden, head, ids, temperature, self.shaping)
            columns.append(logprobs)
        return torch.stack(columns, 1)

    # -- which of them

    def _choose_way(self, inputs: list[list[int]]) -> str:
        """Return the first way whose values agree with the model's own on three inputs: a short
        one, and two made of its ids, one that begins like it and one that does not.

        A batch may hold neither, and would show no error then. Empty if no input can be so changed.
        """
        if depends_on_length(self.model.config):
            log.warning(
                "reward model: its positions depend on the length of the row, so one input runs "
                "at a time"
            )
            return "single"
        first = min((ids for ids in inputs if len(set(ids)) > 2), key=len, default=None)
        if first is None:
            return ""
        # the last id stays: some models look for their end token
        mate = [first[0], *first[2:]]
        stranger = [*first[1:-1], first[0], first[-1]]
        probe = [first, mate, stranger], [0, 0, 1]
        expected = self._run("single", *probe)
        bound = TOLERANCE[self.model.dtype] * max(1.0, float(expected.abs().max()))
        for way in WAYS[:-1] if self.has_plain_head else ("padded",):
            try:
                gap = float((self._run(way, *probe) - expected).abs().max())
            except _UNSUITED as error:
                problem = f"does not suit it ({printable(error)})"
            else:
                if gap <= bound:
                    return way
                problem = f"is not right for it (values differ by {gap:.4f})"
            log.warning("reward model: %r %s; trying the next way", way, problem)
        return "single"


def _load(folder: Path, language_model: bool, dtype: torch.dtype) -> PreTrainedModel:
    """Return the model in eval mode. Raises ConfigError if weights are missing, which transformers
    would draw at random."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    make_first_calls()
    loader = AutoModelForCausalLM if language_model else AutoModelForSequenceClassification
    model = load_pretrained(loader, folder, f"reward model {folder.name}", dtype=dtype)
    # a single input has no padding, even if it ends with the pad id; some configs admit no None
    for config in (model.config, model.config.get_text_config()):
        vars(config)["pad_token_id"] = None
    return model.eval()


def _common_beginnings(
    inputs: list[list[int]], groups: Sequence[Hashable]
) -> tuple[list[int], list[int]]:
    """Return for each input the number of its group, and how many ids it shares with the whole
    group.

    If a group's inputs share no first id, the group is split into single inputs.
    """
    members: dict[Hashable, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    group_of = list(range(len(inputs)))
    lengths = [len(ids) for ids in inputs]
    for rows in members.values():
        shared = len(os.path.commonprefix([inputs[row] for row in rows]))  # noqa: RUF071  of lists
        for row in rows if shared else ():
            group_of[row] = rows[0]
            lengths[row] = shared
    return group_of, lengths


def _ragged(rows: list[list[int]]) -> Ragged:
    return Ragged.from_lengths(
        torch.tensor([id for row in rows for id in row]), torch.tensor([len(row) for row in rows])
    )
