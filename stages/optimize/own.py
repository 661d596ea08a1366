"""A user's own algorithm held to its contract: other arguments, or an answer in another form, are a
ConfigError.

A loss of the wrong shape would be broadcast in silence, and a loss without gradient would end deep
inside torch. So signatures are looked at before any data is read, and every answer before it is
used. The table's own rows need none of it.

    row = held(Algorithm("mine", "leave_one_out", my_surrogate, "token_mean"), "mine.py:ALGORITHM")
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from quiver.schemas.errors import ConfigError

if TYPE_CHECKING:
    from .algorithms import Algorithm


def held(row: Algorithm, name: str) -> Algorithm:
    """`row` with each of its own functions watched; `name` is what the recipe calls it. ConfigError
    for a wrong signature."""
    parts = {
        "advantage": _judged if row.critic else _advantage,
        "surrogate": _surrogate,
        "aggregation": _aggregation,
    }
    watched = {
        part: _watched(f"{name} {part}", getattr(row, part), wrap) for part, wrap in parts.items()
    }
    return dataclasses.replace(row, **watched)


def _watched(name: str, function: Any, wrap: Callable) -> Any:
    return wrap(name, function) if callable(function) else function


def _advantage(name: str, function: Callable) -> Callable:
    _takes(name, function, "(rewards, groups)", 0, 0)

    @functools.wraps(function)
    def call(rewards, groups):
        found = function(rewards, groups)
        _is_tensor(name, found, "advantages", rewards.shape)
        return found

    return call


def _judged(name: str, function: Callable) -> Callable:
    options = {"gamma": 1.0, "gae_lambda": 1.0, "last_values": None}
    _takes(
        name,
        function,
        "(rewards, values, offsets, *, gamma, gae_lambda, last_values)",
        0,
        0,
        0,
        **options,
    )

    @functools.wraps(function)
    def call(rewards, values, offsets, **options):
        found = _pair(name, function(rewards, values, offsets, **options), "advantages and returns")
        for each, what in zip(found, ("advantages", "returns"), strict=True):
            _is_tensor(name, each, what, values.shape)
        return found

    return call


def _surrogate(name: str, function: Callable) -> Callable:
    try:
        inspect.signature(function).bind_partial(0)
    except TypeError as error:
        raise _wrong(name, f"expected a function (tokens, **options): {error}") from None

    @functools.wraps(function)
    def call(tokens, **options):
        loss, clipped = found = _pair(name, function(tokens, **options), "loss and clipped")
        _is_tensor(name, loss, "loss", tokens.logprobs.shape)
        _is_tensor(name, clipped, "clipped", tokens.logprobs.shape, kind="bool")
        if tokens.logprobs.requires_grad and not loss.requires_grad:
            raise _wrong(name, "its loss has no gradient: nothing of it depends on tokens.logprobs")
        return found

    return call


def _aggregation(name: str, function: Callable) -> Callable:
    _takes(name, function, "(lengths, max_completion_tokens)", 0, 0)

    @functools.wraps(function)
    def call(lengths, max_completion_tokens):
        found = function(lengths, max_completion_tokens)
        _is_tensor(name, found, "weights", (int(lengths.sum()),))
        return found

    return call


def _takes(name: str, function: Callable, form: str, *given: Any, **options: Any) -> None:
    try:
        inspect.signature(function).bind(*given, **options)
    except TypeError as error:
        raise _wrong(name, f"expected a function {form}: {error}") from None


def _pair(name: str, found: Any, what: str) -> tuple[Any, Any]:
    if not isinstance(found, tuple) or len(found) != 2:
        raise _wrong(name, f"expected the two tensors {what}, found {_described(found)}")
    return found


def _is_tensor(
    name: str, found: Any, what: str, shape: tuple[int, ...], kind: str = "float"
) -> None:
    import torch

    fits = isinstance(found, torch.Tensor) and tuple(found.shape) == tuple(shape)
    if not (fits and (found.dtype == torch.bool if kind == "bool" else found.is_floating_point())):
        raise _wrong(name, f"expected {what} as {kind} {list(shape)}, found {_described(found)}")


def _described(found: Any) -> str:
    shape = getattr(found, "shape", None)
    if shape is not None:
        return f"{str(found.dtype).removeprefix('torch.')} {list(shape)}"
    return (
        f"{type(found).__name__} of {len(found)}"
        if isinstance(found, tuple | list)
        else type(found).__name__
    )


def _wrong(name: str, message: str) -> ConfigError:
    return ConfigError(
        f"optimize.algorithm {name}",
        message,
        next="correct the function; stages/optimize/README.md has one that works",
    )
