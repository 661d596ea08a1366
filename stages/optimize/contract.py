"""A user's own algorithm held to its contract, by what its functions take and what they answer.

A loss of the wrong shape would be broadcast in silence, and a loss without gradient would end deep
inside torch. So signatures are looked at before any data is read, and every answer before it is
used: ConfigError. The table's own rows need none of it.

    checked = advantage("mine.py:ALGORITHM advantage", my_advantage)      # called like the user's
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from quiver.schemas.errors import ConfigError


def advantage(name: str, function: Callable) -> Callable:
    """(rewards [B], groups [B]) -> advantages [B]"""
    _require_signature(name, function, "(rewards, groups)", 0, 0)

    @functools.wraps(function)
    def checked(rewards, groups):
        advantages = function(rewards, groups)
        _require_tensor(name, "advantages", advantages, rewards.shape)
        return advantages

    return checked


def token_advantage(name: str, function: Callable) -> Callable:
    """(rewards [N], values [N], offsets [B+1], *, gamma, gae_lambda, last_values) -> advantages
    [N], returns [N]"""
    form = "(rewards, values, offsets, *, gamma, gae_lambda, last_values)"
    options = {"gamma": 1.0, "gae_lambda": 1.0, "last_values": None}
    _require_signature(name, function, form, 0, 0, 0, **options)

    @functools.wraps(function)
    def checked(rewards, values, offsets, **options):
        answer = function(rewards, values, offsets, **options)
        _require_pair(name, "advantages and returns", answer)
        _require_tensor(name, "advantages", answer[0], values.shape)
        _require_tensor(name, "returns", answer[1], values.shape)
        return answer

    return checked


def surrogate(name: str, function: Callable) -> Callable:
    """(Tokens, **options) -> loss [N] with gradient, at_bound [N] bool"""
    try:
        inspect.signature(function).bind_partial(0)
    except TypeError as error:
        raise _wrong(name, f"expected a function (tokens, **options): {error}") from None

    @functools.wraps(function)
    def checked(tokens, **options):
        answer = function(tokens, **options)
        _require_pair(name, "loss and clipped", answer)
        _require_tensor(name, "loss", answer[0], tokens.logprobs.shape)
        _require_tensor(name, "clipped", answer[1], tokens.logprobs.shape, kind="bool")
        if tokens.logprobs.requires_grad and not answer[0].requires_grad:
            raise _wrong(name, "its loss has no gradient: nothing of it depends on tokens.logprobs")
        return answer

    return checked


def aggregation(name: str, function: Callable) -> Callable:
    """(lengths [B], max_completion_tokens) -> weights [N]"""
    _require_signature(name, function, "(lengths, max_completion_tokens)", 0, 0)

    @functools.wraps(function)
    def checked(lengths, max_completion_tokens):
        weights = function(lengths, max_completion_tokens)
        _require_tensor(name, "weights", weights, (int(lengths.sum()),))
        return weights

    return checked


def _require_signature(
    name: str, function: Callable, form: str, *arguments: Any, **options: Any
) -> None:
    try:
        inspect.signature(function).bind(*arguments, **options)
    except TypeError as error:
        raise _wrong(name, f"expected a function {form}: {error}") from None


def _require_pair(name: str, form: str, answer: Any) -> None:
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise _wrong(name, f"expected the two tensors {form}, found {_describe(answer)}")


def _require_tensor(
    name: str, content: str, answer: Any, shape: Sequence[int], kind: str = "float"
) -> None:
    import torch

    fits = isinstance(answer, torch.Tensor) and answer.shape == tuple(shape)
    if fits and kind == "bool":
        fits = answer.dtype == torch.bool
    elif fits:
        fits = answer.is_floating_point()
    if not fits:
        raise _wrong(name, f"expected {content} as {kind} {list(shape)}, found {_describe(answer)}")


def _describe(answer: Any) -> str:
    shape = getattr(answer, "shape", None)
    if shape is not None:
        return f"{str(answer.dtype).removeprefix('torch.')} {list(shape)}"
    name = type(answer).__name__
    return f"{name} of {len(answer)}" if isinstance(answer, tuple | list) else name


def _wrong(name: str, message: str) -> ConfigError:
    return ConfigError(
        f"optimize.algorithm {name}",
        message,
        next="correct the function; stages/optimize/README.md has one that works",
    )
