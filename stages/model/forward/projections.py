"""Fused projections: one matrix product for several that read the same input (q, k, v; gate, up).

A product of 576 × 192 uses two cores less well than one of 576 × 960, and a bfloat16 pass casts one
weight instead of three. The weights remain the same parameters under the same names: they become
slices of one tensor, and only `forward` of the `nn.Linear` modules is replaced.

The first module to be called computes for all. The others return their output if they are called
with the very same input, and otherwise compute their own. So every model stays correct, and the
common families are faster. Do not copy a model with fused projections: the copy's modules would
compute with the weights of the original.

    groups = fuse_projections(model)   # once the weights have their final dtype and device
    with casts(groups):                # weights must not change inside: each is cast once
        ...
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .gpu.choice import fits, float32_product, gradient_of, makes_float32, uncast

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of modules that read the same input, in Llama, Mistral, Qwen, Gemma, OLMo, SmolLM and
similar families."""
ALONE = (("o_proj",), ("down_proj",))
"""Names of modules without siblings. With kernels (modules.py) each is a group of one: its
gradient is then float32 directly, and the gated MLP recomputes its product."""


def product_dtype(states: Tensor) -> torch.dtype:
    """Return the dtype in which a product of `states` is made: autocast's if it is on."""
    device = states.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else states.dtype


@contextmanager
def casts(groups: Sequence[Group]) -> Iterator[None]:
    """Let each group cast its weights once; no weight may change inside.

    Within another such context it does nothing.
    """
    opened = [group for group in groups if not group.keeps_cast]
    for group in opened:
        group.keeps_cast = True
    try:
        yield
    finally:
        for group in opened:
            group.forget()


def fuse_projections(model: nn.Module) -> list[Group]:
    """Fuse plain linear siblings of one dtype, all trained or all frozen, in every module.

    Afterwards weights may only be changed in place. On a CPU the other weights are copied too: one
    weight left in the memory-mapped file would keep the whole file in memory.
    """
    groups = []
    for module in model.modules():
        for names in (*SIBLINGS, *ALONE):
            linears = [getattr(module, name, None) for name in names]
            if any(type(linear) is not nn.Linear for linear in linears):
                continue
            if names in ALONE and not fits(linears[0].weight):
                continue
            kinds = {
                (
                    linear.in_features,
                    linear.bias is None,
                    linear.weight.dtype,
                    linear.weight.device,
                    linear.weight.requires_grad,
                )
                for linear in linears
            }
            if len(kinds) == 1:
                groups.append(Group(linears))
    linears = [linear for group in groups for linear in group.linears]
    joined = {parameter for linear in linears for parameter in linear.parameters()}
    for parameter in model.parameters():
        if parameter not in joined and parameter.device.type == "cpu":
            parameter.data = parameter.data.clone()
    return groups


class Group:
    """Linear siblings whose weights [o_i, d] are slices of one [Σ o_i, d]."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        self.linears = linears
        self.parameters = [linear.weight for linear in linears]
        self.weight = _join(self.parameters)
        self.bias = None
        if linears[0].bias is not None:
            biases = [linear.bias for linear in linears]
            self.bias = _join(biases)
            self.parameters += biases
        self.forget()
        for index, linear in enumerate(linears):
            linear.forward = partial(self._forward, index)
            linear.group = self

    def forget(self) -> None:
        """Drop the cast and stop keeping casts; also drop outputs that no sibling fetched."""
        self.keeps_cast = False
        self._cast: Tensor | None = None
        self._input: Tensor | None = None
        self._input_version = 0
        self._outputs: dict[int, Tensor] = {}

    def _forward(self, index: int, states: Tensor) -> Tensor:
        """[…, d] -> […, o_index]"""
        is_same = self._input is states and self._input_version == states._version
        if not (is_same and index in self._outputs):
            if index:
                return F.linear(states, self.linears[index].weight, self.linears[index].bias)
            self._input = states
            self._input_version = states._version
            outputs = _Product.apply(states, *self.operands(product_dtype(states)))
            self._outputs = dict(enumerate(outputs))
        output = self._outputs.pop(index)
        if not self._outputs:
            self._input = None
        return output

    def operands(self, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
        """Return the operands of a product in `dtype` besides the states: weight, bias, and the
        parameters that get the gradients."""
        weight = self._cast
        if weight is None or weight.dtype != dtype:
            weight = self.weight.to(dtype)
            self._cast = weight if self.keeps_cast else None
        return weight, self.bias, *self.parameters

    def free(self) -> None:
        """Release the joined weights; the group is unusable afterwards."""
        self.forget()
        self.weight = self.bias = None


def _join(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Join the parameters into one tensor, make them its slices, and return it."""
    joined = torch.cat([parameter.data for parameter in parameters])
    sizes = [len(parameter) for parameter in parameters]
    for parameter, weight in zip(parameters, joined.split(sizes), strict=True):
        parameter.data = weight
    return joined


class _Product(torch.autograd.Function):
    """A product with joined weights.

    `parameters` are slices of `weight` and `bias`: all weights, then all biases if there are any.
    The gradients go to `parameters`.
    """

    @staticmethod
    def forward(ctx, states, weight, bias, *parameters):
        ctx.state_dtype = states.dtype
        ctx.kind = Kind.of(bias, parameters)
        states = states.to(weight.dtype)
        ctx.save_for_backward(states, weight)
        output = product(states, weight, bias)
        # autograd forbids changing one of several views in place, as some models do when they clamp
        # their queries; so each output is a separate tensor, not a view, over the same memory
        return tuple(view.data for view in output.split(ctx.kind.sizes, -1))

    @staticmethod
    def backward(ctx, *grads):
        states, weight = ctx.saved_tensors
        needs_states = ctx.needs_input_grad[0]
        grad_states = None
        grad_parameters = [None] * len(ctx.kind.parameters)
        with uncast(weight):
            grad = _side_by_side([grad.flatten(0, -2) for grad in grads])
            if needs_states:
                grad_states = (grad @ weight).view(states.shape).to(ctx.state_dtype)
            if ctx.needs_input_grad[3]:
                grad_parameters = ctx.kind.gradients(grad, states.flatten(0, -2))
        return grad_states, None, None, *grad_parameters


def product(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return states · weightᵀ + bias, in the dtype of states and weight."""
    with uncast(states):
        return F.linear(states, weight, None if bias is None else bias.to(weight.dtype))


@dataclass(frozen=True)
class Kind:
    """Joined parameters, and how their gradients are made."""

    parameters: tuple[Tensor, ...]
    """All weights, then all biases."""
    sizes: tuple[int, ...]
    """Rows of each weight."""
    has_bias: bool

    @classmethod
    def of(cls, bias: Tensor | None, parameters: Sequence[Tensor]) -> Kind:
        """Describe `parameters`: all weights, then all biases if there is a `bias`."""
        weights = parameters[: len(parameters) // (1 if bias is None else 2)]
        sizes = tuple(len(weight) for weight in weights)
        return cls(tuple(parameters), sizes, bias is not None)

    def gradients(self, grad: Tensor, states: Tensor) -> list[Tensor | None]:
        """Return the gradients of weights and biases, for a product of `states` [N, d] whose output
        gradient is `grad` [N, Σ o_i]; None for those that were added to the gradients so far."""
        dtype = self.parameters[0].dtype
        total = self._joined_gradient(states.shape[1])
        gradients: list[Tensor | None] = [None] * len(self.sizes)
        if total is not None:
            float32_product(grad.T, states, total)
        elif dtype == torch.float32 and makes_float32(grad):
            gradients = [*float32_product(grad.T, states).split(self.sizes)]
        else:
            gradients = [*(grad.T @ states).to(dtype).split(self.sizes)]
        if self.has_bias:
            grad_bias = grad.sum(0, dtype=torch.float32)
            gradients += grad_bias.to(dtype).split(self.sizes)
        return gradients

    def _joined_gradient(self, width: int) -> Tensor | None:
        """Return the weights' gradients so far as one matrix [Σ o_i, d], which lie so in memory if
        `gradients` made them; None if they do not."""
        parts = [gradient_of(weight) for weight in self.parameters[: len(self.sizes)]]
        if any(part is None or not part.is_contiguous() for part in parts):
            return None
        joined = _adjacent([part.view(1, -1) for part in parts])
        return None if joined is None else joined.view(-1, width)


def _side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """Return matrices [N, o_i] as one [N, Σ o_i]; no copy if they already are columns of one."""
    joined = _adjacent(parts)
    return torch.cat(parts, -1) if joined is None else joined


def _adjacent(parts: Sequence[Tensor]) -> Tensor | None:
    """Return matrices [N, o_i] that are columns of one as that one; None if they are not."""
    first = parts[0]
    width = sum(part.shape[1] for part in parts)
    place = first.storage_offset()
    for part in parts:
        is_next = part.untyped_storage()._cdata == first.untyped_storage()._cdata
        is_strided = part.stride(1) == 1 and (len(part) == 1 or part.stride(0) == width)
        if not (is_next and part.storage_offset() == place and is_strided):
            return None
        place += part.shape[1]
    return first.as_strided((len(first), width), (width, 1))
