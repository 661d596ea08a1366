"""One product of matrices in place of several that read the same input: queries with keys and
values, gate with up.

A product of 576 × 192 keeps two cores less busy than one of 576 × 960, and a bfloat16 pass casts
one weight instead of three. The weights stay the parameters that they are, under their names: they
become slices of one tensor, and only `forward` of the `nn.Linear` modules is replaced. The first of
them to be called computes for all; the others take their part when they are called with the very
same input, and compute for themselves when not. So every model is right, and those of the common
families are faster. A merged model is not to be copied: the copy's modules would compute with the
weights of the first.

    merged = merge(model)              # after the weights have their dtype and device, before an optimizer reads them
    with merged.casts():               # weights do not change inside: each is cast to autocast's dtype once
        ...
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of modules that read the same input, in Llama, Mistral, Qwen, Gemma, OLMo, SmolLM and their
like."""


def product_dtype(states: torch.Tensor) -> torch.dtype:
    """The dtype in which a product of `states` is made: autocast's where it is on."""
    kind = states.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else states.dtype


class Merged:
    """All merged products of one model."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self.groups, self._depth = groups, 0

    @contextmanager
    def casts(self) -> Iterator[None]:
        """No weight may change inside. Weights that somebody moved elsewhere before, to another
        device or dtype, are joined again."""
        if not self._depth:
            for group in self.groups:
                group.rejoin()
                group.keeps = True
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                for group in self.groups:
                    group.forget()

    def free(self) -> None:
        """Let go of the joined weights; nothing can be computed after this."""
        for group in self.groups:
            group.forget()
            group.weight = group.bias = None


def merge(model: nn.Module) -> Merged:
    """Merge what is alike in every module of `model`: plain linear siblings of one dtype, all
    trained or all frozen.

    On a CPU the other weights get memory of their own too: one of them in the mapped file would
    keep all of that in memory.
    """
    found = []
    for module in model.modules():
        for names in SIBLINGS:
            parts = [getattr(module, name, None) for name in names]
            if (
                all(type(part) is nn.Linear for part in parts)
                and len({_kind(part) for part in parts}) == 1
            ):
                found.append(getattr(parts[0], "_merged", None) or Group(parts))
    joined = {
        id(parameter) for group in found for part in group.parts for parameter in part.parameters()
    }
    for parameter in model.parameters():
        if id(parameter) not in joined and parameter.device.type == "cpu":
            parameter.data = parameter.data.clone()
    return Merged(found)


def _kind(linear: nn.Linear) -> tuple:
    weight = linear.weight
    return (
        linear.in_features,
        linear.bias is None,
        weight.dtype,
        weight.device,
        weight.requires_grad,
    )


class Group:
    """Linear siblings whose weights [o_i, d] are slices of one [Σ o_i, d]."""

    @torch.no_grad()
    def __init__(self, parts: Sequence[nn.Linear]) -> None:
        self.parts = parts
        self.weight = _joined([part.weight for part in parts])
        self.bias = None if parts[0].bias is None else _joined([part.bias for part in parts])
        self.forget()
        for index, part in enumerate(parts):
            part.forward = partial(self._forward, index)
        parts[0]._merged = self  # whoever merges the same model again gets this very group

    @torch.no_grad()
    def rejoin(self) -> None:
        """Weights are slices of `weight` again, if they are no longer."""
        if not _is_joined(self.weight, [part.weight for part in self.parts]):
            self.weight = _joined([part.weight for part in self.parts])
        if self.bias is not None and not _is_joined(self.bias, [part.bias for part in self.parts]):
            self.bias = _joined([part.bias for part in self.parts])

    def forget(self) -> None:
        """Drop casts, keep none from now on, and drop what no sibling came for."""
        self.keeps = False
        self._narrow: torch.Tensor | None = None
        self._read: tuple[torch.Tensor, int] | None = None
        self._left: dict[int, torch.Tensor] = {}

    def _forward(self, index: int, states: torch.Tensor) -> torch.Tensor:
        """[…, d] -> […, o_index]"""
        key = (states, states._version)
        if (
            self._read is not None
            and self._read[0] is states
            and self._read[1] == key[1]
            and index in self._left
        ):
            found = self._left.pop(index)
        elif index:
            return F.linear(states, self.parts[index].weight, self.parts[index].bias)
        else:
            found, *others = self._product(states)
            self._read, self._left = key, dict(enumerate(others, 1))
        if not self._left:
            self._read = None
        return found

    def _product(self, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        dtype = product_dtype(states)
        weight = self._narrow
        if weight is None or weight.dtype != dtype:
            weight = self.weight.to(dtype)
            self._narrow = weight if self.keeps else None
        biases = [] if self.bias is None else [part.bias for part in self.parts]
        return _Product.apply(
            states, weight, self.bias, *(part.weight for part in self.parts), *biases
        )


def _joined(tensors: Sequence[nn.Parameter]) -> torch.Tensor:
    """One tensor whose slices the parameters now are."""
    whole = torch.cat([each.data for each in tensors])
    for each, part in zip(tensors, whole.split([len(each) for each in tensors]), strict=True):
        each.data = part
    return whole


def _is_joined(whole: torch.Tensor, tensors: Sequence[nn.Parameter]) -> bool:
    parts = whole.split([len(each) for each in tensors])
    return all(
        each.data_ptr() == part.data_ptr() for each, part in zip(tensors, parts, strict=True)
    )


def _alone(part: torch.Tensor) -> torch.Tensor:
    """`part` as a tensor that is a view of nothing, over the same memory: autograd lets nobody
    change one of several views in place, and some models clamp their queries so."""
    return part.new_empty(0).set_(
        part.untyped_storage(), part.storage_offset(), part.shape, part.stride()
    )


class _Product(torch.autograd.Function):
    """`weight` and `bias` are what the parameters that follow are slices of; the gradient goes to
    these."""

    @staticmethod
    def forward(ctx, states, weight, bias, *parameters):
        dtype = weight.dtype
        small = states.to(dtype)
        ctx.save_for_backward(small, weight)
        ctx.kinds, ctx.biased = (states.dtype, parameters[0].dtype), bias is not None
        ctx.sizes = [
            len(each) for each in (parameters[: len(parameters) // 2] if ctx.biased else parameters)
        ]
        with torch.autocast(states.device.type, enabled=False):
            whole = F.linear(small, weight, None if bias is None else bias.to(dtype))
        return tuple(_alone(part) for part in whole.split(ctx.sizes, -1))

    @staticmethod
    def backward(ctx, *grads):
        small, weight = ctx.saved_tensors
        with torch.autocast(small.device.type, enabled=False):
            grad = torch.cat([each.flatten(0, -2) for each in grads], -1)
            into = (
                (grad @ weight).view(small.shape).to(ctx.kinds[0])
                if ctx.needs_input_grad[0]
                else None
            )
            parts = [None] * len(ctx.sizes) * (1 + ctx.biased)
            if ctx.needs_input_grad[3]:
                parts[: len(ctx.sizes)] = (
                    (grad.T @ small.flatten(0, -2)).to(ctx.kinds[1]).split(ctx.sizes)
                )
                if ctx.biased:
                    parts[len(ctx.sizes) :] = (
                        grad.sum(0, dtype=torch.float32).to(ctx.kinds[1]).split(ctx.sizes)
                    )
        return into, None, None, *parts
