"""Decides which architectures can be trained, and how, by trying a tiny model with random weights.

The tiny model has every kind of layer and windows of a few tokens (shrink.py). So an error that
appears only in long rows, or that weights of little effect would hide, appears in rows of 42
tokens. Each way of packing must give the logprobs and the gradients of the model's own pass over
one row. The trial also finds which tokens a logprob depends on: a model that reads later ones is
refused.

    verdict = judge(model.config)     # mode "shared", "packed" or "single"; None: refused
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from quiver.schemas.errors import ConfigError, printable
from quiver.stages.common.models.folder import says_no_memory
from quiver.stages.common.models.shrink import VOCABULARY, shrink
from quiver.stages.common.ragged import Ragged
from quiver.stages.common.turns import Inputs

from .attention import MODES, hidden_states, set_mode, trunk_of
from .encoder_decoder import decoder_states, make_pairs, pack_pairs
from .layout import Sequences, make_layout
from .logprob_head import Shaping, completion_logprobs
from .packing import Piece, make_pieces

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

TOLERANCE = 1e-3
"""Largest difference of logprobs, in nats, that counts as rounding."""
_GRADIENT_TOLERANCE = 1e-2
"""Largest difference of a gradient that counts as rounding, as a share of its norm."""
FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Errors that modeling code raises at inputs it is not made for."""
_DIFFERENCES = {
    "shared": "rollouts that share their prompt's tokens have other {}",
    "packed": "rollouts behind each other in a row have other {}",
    "single": "output embedding times last hidden state gives other {} than the model",
}
_verdicts: dict[str, Verdict] = {}
"""Verdicts of this process, by config."""
_norms: dict[str, frozenset[str]] = {}
"""Results of `norms_before_products`, by config."""


@dataclass(frozen=True)
class Verdict:
    """The result of trying the tiny model of an architecture."""

    mode: str | None
    """The widest correct way of packing: `shared`, `packed` or `single`. None: none is correct."""
    reason: str = ""
    """Reason why it is not a wider one."""
    advice: str = "name a causal language model"
    """Advice if the architecture is refused."""
    tried: bool = True
    """False if no tiny model could be made, so that `single` is the careful choice."""

    def require(self, title: str) -> None:
        """Raise ConfigError about `title` if the architecture is refused."""
        if self.mode is None:
            raise ConfigError(title, f"cannot be trained: {self.reason}", next=self.advice)


def judge(config: PreTrainedConfig) -> Verdict:
    """Return the verdict on the architecture of `config`; tried once per process."""
    key = _key(config)
    if key not in _verdicts:
        _verdicts[key] = _judge(config)
    return _verdicts[key]


def _key(config: PreTrainedConfig) -> str:
    return json.dumps(config.to_dict(), sort_keys=True, default=str)


def _judge(config: PreTrainedConfig) -> Verdict:
    import transformers

    loader = transformers.AutoModelForCausalLM
    if config.is_encoder_decoder:
        loader = transformers.AutoModelForSeq2SeqLM
    elif type(config) not in loader._model_mapping:
        loader = transformers.AutoModelForImageTextToText
    if type(config) not in loader._model_mapping:
        return Verdict(None, f"transformers has no text model of type {config.model_type}")
    with _quiet(), _one_thread(), torch.enable_grad():
        try:
            model = make_tiny(loader.from_config, config)
            trial = Trial(model)
        except ImportError as error:
            problem = " ".join(str(error).split())
            return Verdict(None, printable(problem, 120), "install what it needs")
        except FAILURES as error:
            if says_no_memory(error):
                raise
            problem = f"no tiny model of it runs ({type(error).__name__}: {printable(error, 120)})"
            return Verdict("single", problem, tried=False)
        return trial.verdict()


def norms_before_products(config: PreTrainedConfig) -> frozenset[str]:
    """Return the names of norms, within a layer, whose outputs are read only by matrix products.

    Under autocast such norms may output bfloat16. Tried on the tiny model, once per process:
    rounding their outputs must not change a bit of its states.
    """
    from transformers import AutoModelForCausalLM

    key = _key(config)
    if type(config) not in AutoModelForCausalLM._model_mapping:
        _norms[key] = frozenset()
    if key not in _norms:
        with _quiet(), _one_thread(), torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            try:
                model = make_tiny(AutoModelForCausalLM.from_config, config)
                set_mode(model, "single")
                norms: dict[str, list[nn.Module]] = {}
                for path, module in model.named_modules():
                    if hasattr(module, "variance_epsilon"):
                        norms.setdefault(path.rpartition(".")[2], []).append(module)
                expected = _states(model, [])
                _norms[key] = frozenset(
                    name
                    for name, modules in norms.items()
                    if torch.equal(_states(model, modules), expected)
                )
            except FAILURES as error:
                if says_no_memory(error):
                    raise
                _norms[key] = frozenset()
    return _norms[key]


def _states(model: nn.Module, rounded: Sequence[nn.Module]) -> Tensor:
    """Return the last hidden states of a few ids, with the outputs of `rounded` in bfloat16."""
    hooks = [
        module.register_forward_hook(lambda _, __, output: output.bfloat16().to(output.dtype))
        for module in rounded
    ]
    states = trunk_of(model)(input_ids=torch.arange(9)[None], use_cache=False)[0]
    for hook in hooks:
        hook.remove()
    return states


@contextmanager
def _one_thread() -> Iterator[None]:
    """Use one thread: with products this small, threads mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence transformers, whose warnings about a tiny model are useless."""
    from transformers.utils import logging as transformers_logging

    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


def make_tiny(make: Callable[..., nn.Module], config: PreTrainedConfig) -> nn.Module:
    """Return a tiny model like `config`'s, made by `make`, in float32 and eval mode.

    Its weights are the same each time, and large enough that every part of it matters.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = make(shrink(config), dtype=torch.float32).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(std=0.15)
                else:
                    parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model


class Trial:
    """A tiny model, five rollouts of three prompts, and the reference results for them.

    The reference is the model's own pass over each rollout: its logprobs, and the gradients of
    their weighted sum.
    """

    prompt_numbers = (0, 0, 1, 2, 1)

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.is_causal = not model.config.is_encoder_decoder
        self.start = (
            0 if self.is_causal else (getattr(model.config, "decoder_start_token_id", None) or 0)
        )
        vocabulary = min(VOCABULARY, model.get_input_embeddings().weight.shape[0])
        draw = torch.Generator().manual_seed(0)
        prompts = [torch.randint(vocabulary, (length,), generator=draw) for length in (7, 19, 3)]
        lengths = torch.tensor([9, 23, 5, 17, 12])
        ids = torch.randint(vocabulary, (int(lengths.sum()),), generator=draw)
        chosen = [prompts[number] for number in self.prompt_numbers]
        self.sequences = Sequences(
            Ragged.from_lengths(torch.cat(chosen), torch.tensor([len(row) for row in chosen])),
            Ragged.from_lengths(ids, lengths),
            torch.linspace(0.7, 1.3, len(lengths)),
        )
        self.weights = torch.randn(len(ids), generator=draw)
        set_mode(model, "single")
        # the longest prompt first: BigBird changes its attention permanently at a short one
        own = {row: self.own(row) for row in (2, 4, 0, 1, 3)}
        self.logprobs = torch.cat([own[row] for row in range(len(lengths))])
        self.gradients: list[Tensor] = []

    def own(self, row: int, length: int | None = None) -> Tensor:
        """Return [T] the whole model's logprobs of rollout `row`, or of its first `length` ids."""
        completion = self.sequences.completions[row][:length]
        return own_logprobs(
            self.model,
            self.sequences.prompts[row],
            completion,
            float(self.sequences.temperature[row]),
            None if self.is_causal else self.start,
        )

    def verdict(self) -> Verdict:
        """Return the widest correct way of packing, or why the architecture is refused."""
        with torch.no_grad():
            longest = self.sequences.completions.lengths.argmax().item()
            whole = self.logprobs.split(self.sequences.completions.lengths.tolist())[longest]
            for length in (1, 11):
                gap = (self.own(longest, length) - whole[:length]).abs().max()
                if not gap <= TOLERANCE:
                    return self._refuse_later_tokens()
        try:
            self.gradients = self._gradients(self.logprobs)
        except FAILURES as error:
            return Verdict(None, f"it has no gradients: {printable(error, 120)}")
        reason = ""
        modes = MODES
        if self.is_causal and self.model._is_stateful:
            modes = ("single",)
            reason = "its state runs on from token to token, and would into the next rollout"
        for mode in modes:
            problem = self.problem(mode)
            if not problem:
                return Verdict(mode, reason)
            reason = problem
        return Verdict(None, problem)

    def _refuse_later_tokens(self) -> Verdict:
        problem = "a token's logprob depends on later tokens"
        for name in ("is_decoder", "causal"):
            if self.is_causal and getattr(self.model.config, name, None) is False:
                advice = f"set {name} = true in its config.json, if it was trained so"
                return Verdict(None, problem, advice)
        return Verdict(None, problem)

    def problem(self, mode: str) -> str:
        """Return what is wrong with `mode`; empty if nothing is."""
        try:
            logprobs = self.packed(mode)
            gap = float((logprobs - self.logprobs).detach().abs().max())
            if not gap <= TOLERANCE:
                return _DIFFERENCES[mode].format("logprobs")
            gap = self._gradient_gap(self._gradients(logprobs))
            return "" if gap <= _GRADIENT_TOLERANCE else _DIFFERENCES[mode].format("gradients")
        except NotImplementedError as error:
            return printable(error, 120)
        except FAILURES as error:
            if says_no_memory(error):
                raise
            return f"it does not run so: {type(error).__name__}: {printable(error, 120)}"

    def packed(self, mode: str) -> Tensor:
        """Return [N] logprobs of all rollouts, packed by `mode` into as few rows as it can."""
        set_mode(self.model, mode if self.is_causal else "single")
        rows = range(len(self.prompt_numbers))
        numbers = self.prompt_numbers if mode == "shared" else rows
        if not self.is_causal:
            microbatches = pack_pairs(rows, numbers, self.sequences, 1 << 30)
            if mode == "single":
                microbatches = [[Piece((row,), 0)] for row in rows]
        else:
            lengths = self.sequences.prompts.lengths, self.sequences.input_lengths
            pieces = make_pieces(rows, numbers, *(each.tolist() for each in lengths), 1 << 30)
            microbatches = [[piece] for piece in pieces] if mode == "single" else [pieces]
        logprobs = torch.zeros(len(self.weights))
        for pieces in microbatches:
            if self.is_causal:
                layout = make_layout(pieces, self.sequences)
                hidden = hidden_states(self.model, layout, single=mode == "single")
            else:
                layout = make_pairs(pieces, self.sequences, self.start)
                hidden = decoder_states(self.model, layout)
            offset = getattr(self.model, "final_logits_bias", None)
            places = self.sequences.completions.positions(layout.rows)
            logprobs = logprobs.index_copy(
                0,
                places,
                completion_logprobs(
                    hidden,
                    self.model.get_output_embeddings(),
                    layout.targets,
                    layout.temperature,
                    Shaping.of(self.model.config),
                    None if offset is None else offset.flatten(),
                )[0],
            )
        return logprobs

    def _gradients(self, logprobs: Tensor) -> list[Tensor]:
        parameters = [each for each in self.model.parameters() if each.requires_grad]
        gradients = torch.autograd.grad(
            (self.weights * logprobs).sum(), parameters, allow_unused=True
        )
        return [
            torch.zeros_like(parameter) if gradient is None else gradient
            for parameter, gradient in zip(parameters, gradients, strict=True)
        ]

    def _gradient_gap(self, gradients: Sequence[Tensor]) -> float:
        """Return the largest difference of a parameter's gradient, as a share of its norm."""
        total = torch.stack([gradient.norm() for gradient in self.gradients]).norm()
        gaps = [
            (gradient - own).norm() / (own.norm() + TOLERANCE * total)
            for gradient, own in zip(gradients, self.gradients, strict=True)
        ]
        return float(torch.stack(gaps).max())


def own_logprobs(
    model: nn.Module,
    prompt: Tensor,
    completion: Tensor,
    temperature: float,
    start: int | None = None,
    pictures: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """Return the logprobs that the whole model gives for one row alone.

    Args:
        model: The whole model.
        prompt: [P] ids.
        completion: [T] ids.
        temperature: Temperature of the logits.
        start: First id of an encoder-decoder's decoder. Default: a causal model.
        pictures: Model inputs of the prompt's pictures.

    Returns:
        [T] float32 logprobs of `completion`.
    """
    prompt = prompt.long().to(model.device)
    completion = completion.long().to(model.device)
    if start is None:
        ids = torch.cat([prompt, completion[:-1]])[None]
        options = {"use_cache": False, "logits_to_keep": len(completion)}
        output = model(input_ids=ids, **options, **(pictures or {}))
    else:
        ids = torch.cat([torch.tensor([start], device=model.device), completion[:-1]])[None]
        # without a mask, some models treat ids equal to the pad id as padding
        output = model(
            input_ids=prompt[None],
            attention_mask=torch.ones_like(prompt[None]),
            decoder_input_ids=ids,
            decoder_attention_mask=torch.ones_like(ids),
            use_cache=False,
        )
    logits = output.logits[0, -len(completion) :].float()
    table = (logits / temperature).log_softmax(-1)
    return table.gather(1, completion[:, None])[:, 0]


def turn_logprobs(
    model: nn.Module,
    sequences: Sequences,
    row: int,
    completion: Tensor,
    temperature: float,
) -> Tensor:
    """Return the logprobs of ids sampled in several turns, by one pass over each sequence.

    Args:
        model: The whole model.
        sequences: The rollouts.
        row: Number of the rollout.
        completion: [T] the first sampled ids of the rollout.
        temperature: Temperature of the logits.

    Returns:
        [T] float32 logprobs of `completion`.
    """
    index = torch.tensor([row])
    inputs = Inputs.of(sequences.completions.take(index), sequences.turns.take(index))
    prompt = sequences.prompts[row].long()
    ids = torch.cat([prompt, inputs.ids[0].long()]).to(model.device)
    predictors = inputs.predictors[0][: len(completion)].to(model.device) + len(prompt)
    starts = [0, *(inputs.restarts[0] + len(prompt)).tolist(), len(ids)]
    tables = []
    for start, end in itertools.pairwise(starts):
        places = predictors[(start <= predictors) & (predictors < end)] - start
        if len(places):
            read = ids[None, start : start + int(places.max()) + 1]
            options = {"use_cache": False, "logits_to_keep": places}
            if start == 0 and sequences.pictures is not None:
                num_read = read.shape[1] - len(prompt)
                options |= sequences.pictures.of_rollout(row, model.device, num_read)
            logits = model(input_ids=read, **options).logits[0]
            tables.append(logits if len(logits) == len(places) else logits[places])
    table = (torch.cat(tables).float() / temperature).log_softmax(-1)
    return table.gather(1, completion.long().to(model.device)[:, None])[:, 0]
