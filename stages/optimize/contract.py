"""Checks of a user's own algorithm: the signatures of its functions, and what they return.

A loss of the wrong shape would be broadcast silently, and a loss without gradient would fail deep
inside torch. So signatures are checked before any data is read, and every result before it is used:
ConfigError, also for whatever the function raises. It gets tensors of its own, which it may change,
and may return any float dtype. The table's own rows are not checked.

    function = checked("mine.py:ALGORITHM advantage", "advantage", my_advantage)
    function(rewards, groups)                            # called like the user's

Not of the spine: `algorithms` and `losses` say what the functions are.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from quiver.schemas.errors import ConfigError, QuiverError, printable

ADVANTAGE_COLUMNS = ("lengths", "parts", "part_weights")
"""Optional arguments of an advantage of rollouts, passed by name."""
TOKEN_OPTIONS = ("groups", "gamma", "gae_lambda")
"""Optional arguments of an advantage of tokens, passed by name."""
PROVIDED = ("logprobs", "values", "collisions", "last_values")
"""Arguments that a pass before the first step provides for an advantage of tokens, if its row needs
them."""
_OPTIONS = {"rollouts": ADVANTAGE_COLUMNS, "tokens": TOKEN_OPTIONS, "aggregation": ("groups",)}
GROUP_ADVANTAGES = {
    "group_normalized",
    "group_centered",
    "batch_scaled",
    "part_normalized",
    "pass_at_k",
    "leave_one_out",
    "length_weighted",
    "batch_normalized_baseline",
    "optimal_token_baseline",
    "turn_leave_one_out",
}
"""Advantages that compare the completions of one prompt with one another."""
_ROLES = {
    "rollouts": ("(rewards, groups)", 2, ("advantages",)),
    "turns": ("(rewards, offsets, groups)", 3, ("advantages",)),
    "tokens": ("(rewards, offsets)", 1, ("advantages",)),
    "surrogate": ("(tokens, **options)", 1, ("loss", "clipped")),
    "aggregation": ("(lengths, max_completion_tokens)", 2, ("weights",)),
}
"""For each role, or unit of an advantage: the arguments as text, their number, and the tensors
returned, [B], [T] or [N]. `clipped` is bool, the others are float."""


def problem_of(row: Any) -> str:
    """Return what is wrong with the unit and the needs of a user's row, an `Algorithm`, or ""."""
    needs = row.needs
    if row.advantage_of not in ("rollouts", "turns", "tokens"):
        return f"expected advantage_of rollouts, turns or tokens, found {row.advantage_of!r}"
    allowed = PROVIDED if row.advantage_of == "tokens" else ()
    if not isinstance(needs, tuple | list) or not all(name in allowed for name in needs):
        return (
            f"expected needs among {', '.join(PROVIDED)} for an advantage of tokens, found "
            f"{needs!r} for one of {row.advantage_of}"
        )
    if "last_values" in needs and "values" not in needs:
        return "expected values beside last_values in needs: there is no critic without them"
    return ""


def checked(name: str, role: str, function: Callable, needs: Sequence[str] = ()) -> Callable:
    """Return `function` with a check of every result, in the dtype that its callers compute with.
    Raises ConfigError now if its signature is wrong.

    Args:
        name: name of the function in errors.
        role: a key of `_ROLES`.
        needs: further arguments of an advantage of tokens.
    """
    form, num_arguments, contents = _ROLES[role]
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # such as torch.sub
        raise _wrong(
            name, "Python cannot tell its arguments: call it in a function of your own"
        ) from None
    # a surrogate's options are checked later, with the values from the config
    bind = signature.bind_partial if role == "surrogate" else signature.bind
    options = [name for name in _OPTIONS.get(role, ()) if name in signature.parameters]
    if role == "tokens":
        required = ["offsets", *needs]
        if "values" in needs:
            required += ["gamma", "gae_lambda"]
            contents = ("advantages", "returns")
        options += required
        form = f"(rewards, {', '.join(required)})"
    try:
        bind(*[0] * num_arguments, **dict.fromkeys(options))
    except TypeError as error:
        raise _wrong(name, f"expected a function {form}: {error}") from None

    @functools.wraps(function)
    def call(first: Any, *others: Any, **options: Any) -> Any:
        import torch

        from quiver.stages.model.folder import says_no_memory

        copies = {key: _own(option) for key, option in options.items()}
        try:
            answer = function(_own(first), *map(_own, others), **copies)
        except QuiverError:
            raise
        except Exception as error:  # the user's code may raise anything
            if says_no_memory(error):
                raise
            raise _wrong(name, f"raised {type(error).__name__}: {printable(error)}") from error
        tensors = answer if len(contents) > 1 else (answer,)
        if not isinstance(tensors, tuple) or len(tensors) != len(contents):
            raise _wrong(
                name,
                f"expected the two tensors {' and '.join(contents)}, found {_describe(answer)}",
            )
        column = first.logprobs if role == "surrogate" else first
        shape = [int(first.sum())] if role == "aggregation" else list(column.shape)
        results = []
        for content, tensor in zip(contents, tensors, strict=True):
            kind = "bool" if content == "clipped" else "float"
            fits = isinstance(tensor, torch.Tensor) and list(tensor.shape) == shape
            if not (fits and kind in str(tensor.dtype)):
                raise _wrong(
                    name, f"expected {content} as {kind} {shape}, found {_describe(tensor)}"
                )
            dtype = {"clipped": torch.bool, "weights": torch.float64}.get(content, torch.float32)
            results.append(tensor.to(column.device, dtype))
        if role == "surrogate":
            if column.requires_grad > results[0].requires_grad:
                raise _wrong(
                    name, "its loss has no gradient: nothing of it depends on tokens.logprobs"
                )
            return tuple(results)
        results = [tensor.detach() for tensor in results]
        for content, tensor in zip(contents, results, strict=True):
            _require_finite(name, content, tensor, may_be_nan=role in ("rollouts", "turns"))
        return tuple(results) if len(contents) > 1 else results[0]

    return call


def _own(value: Any) -> Any:
    """Return a copy of a tensor, or `Tokens` with copies of theirs; anything else as it is."""
    if hasattr(value, "_make"):
        return value._make(map(_own, value))
    return value.clone() if hasattr(value, "clone") else value


def _require_finite(name: str, content: str, tensor: Any, may_be_nan: bool) -> None:
    """Raise ConfigError if a number is infinite in float32, or NaN where each must be a number."""
    is_bad = tensor.isinf() if may_be_nan else ~tensor.isfinite()
    if not bool(is_bad.any()):
        return
    place = int(is_bad.nonzero()[0])
    allowed = " (NaN: none)" if may_be_nan else ""
    raise _wrong(
        name,
        f"expected finite {content}{allowed}, found {int(is_bad.sum())} that are not, such as "
        f"{float(tensor[place])} at [{place}]",
    )


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
