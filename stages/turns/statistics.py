"""Statistics of episodes with several turns.

measure(store.open("guess/rollouts@1").table(["turns", "end_reason"]))["mean_turns"]
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from quiver.schemas.errors import printable
from quiver.schemas.manifest import Manifest
from quiver.schemas.plain import read_json
from quiver.schemas.rollouts import OF_EPISODES

if TYPE_CHECKING:
    from quiver.stages.core.store import Version

FAILURES = ("timeout", "environment_error")
"""End reasons of failed episodes; their rewards are unknown."""
FAILURE_INFO = "quiver_failure"
"""Key in a turn's info: why the environment did not answer it."""
CUT_INFO = "quiver_cut_characters"
"""Key in a turn's info: how many characters of the observation were cut."""
LIMITS = (
    "max_turns",
    "max_tokens",
    "context",
    "max_observation_tokens",
    "max_tool_calls",
    "max_images",
    "max_audio",
)
"""End reasons of episodes that a limit ended."""
COUNTS = ("turns", "tool_calls", "parse_errors", "observation_tokens")
"""Quantities counted for each episode."""
_LATE_KEY = re.compile(r"generate\.turns\.(step_seconds|episode_seconds)")


def first_failure(rollouts: pa.Table) -> str | None:
    """Return why the first failed episode of rollouts/2 failed, or None if unknown."""
    failed = pc.is_in(rollouts["end_reason"], value_set=pa.array(FAILURES))
    for turns in rollouts["turns"].filter(failed).slice(0, 1).to_pylist():
        return read_info(turns[-1]).get(FAILURE_INFO)
    return None


def read_info(turn: Mapping[str, Any]) -> dict[str, Any]:
    """Return `info` of a saved turn; {} if there is none, or none that can be read."""
    info = None
    with suppress(ValueError):  # a user's own may be nested too deeply
        info = read_json(turn["info"] or "null")
    return info if isinstance(info, dict) else {}


def way_to_end(rollouts: Manifest, longest: int | None = None) -> str:
    """Return the advice for completions of a version that were cut by its token limit.

    Args:
        longest: most ids in an episode that `max_tokens` ended. None: there are no episodes.
    """
    end = rollouts.metrics.get("unknown_end")
    if isinstance(end, dict):
        return (
            f"set generate.sampling.stop_token_ids = [{end['id']}], since the chat template ends a "
            f"turn with {printable(repr(end['text']))}, which ends no completion"
        )
    if rollouts.config_section("sampling").get("ignore_eos"):
        return "set generate.sampling.ignore_eos = false, since with it no token ends a completion"
    most = rollouts.config_section("turns").get("max_tokens")
    if longest is not None and isinstance(most, int) and longest >= most:
        return "raise generate.turns.max_tokens"
    return "raise generate.sampling.max_tokens"  # it limits one turn, if there are several


def were_cut(rollouts: Version) -> pa.ChunkedArray:
    """Return [rows] bool: true for an answer or episode that a limit cut off."""
    is_episode = rollouts.manifest.kind_schema in OF_EPISODES
    column = "end_reason" if is_episode else "finish_reason"
    limits = pa.array(LIMITS if is_episode else ["length"])
    return pc.is_in(rollouts.table([column])[column], value_set=limits)


def truncated_share(rollouts: Manifest) -> float:
    """Return the share of answers or episodes that a limit cut off; 0 if there are none."""
    ends = rollouts.metrics.get("end_reasons")
    if ends is None:
        return rollouts.status.get("length", 0) / max(rollouts.rows, 1)
    return sum(ends.get(reason, 0) for reason in LIMITS) / max(rollouts.rows, 1)


def measure(rollouts: pa.Table) -> dict[str, Any]:
    """Return the statistics of rollouts/2; None in place of a number if there is nothing to count.

    Means are per episode. `parse_error_share` is a share of all turns. `max_observation_tokens` and
    `max_seconds` are maxima over turns. `timeouts` counts by the key of [generate.turns] that was
    too low. `max_limited_tokens` is the most ids sampled in an episode that max_tokens ended.
    """
    counts = counts_of(rollouts["turns"])
    turns = pc.list_flatten(rollouts["turns"])
    num_turns = len(turns)
    reasons = Counter(rollouts["end_reason"].to_pylist())
    in_order = sorted(reasons, key=lambda reason: (-reasons[reason], reason))
    num_failed = sum(reasons[reason] for reason in FAILURES)
    num_errors = int(counts["parse_errors"].sum())
    observed = pc.list_value_length(pc.struct_field(turns, "observation_ids"))
    seconds = pc.struct_field(turns, "seconds")
    lengths = pc.struct_field(turns, "length").to_numpy()
    tokens = sum_of_each(lengths, counts["turns"])
    is_limited = pc.equal(rollouts["end_reason"], "max_tokens").to_numpy()
    return {
        "rollouts": len(rollouts),
        "turns": num_turns,
        "mean_turns": _mean(counts["turns"]),
        "max_turns": int(counts["turns"].max(initial=0)),
        "end_reasons": {reason: reasons[reason] for reason in in_order},
        "failed": num_failed,
        "failed_share": num_failed / len(rollouts) if len(rollouts) else None,
        "timeouts": _late_keys(rollouts),
        "tool_calls": int(counts["tool_calls"].sum()),
        "mean_tool_calls": _mean(counts["tool_calls"]),
        "parse_errors": num_errors,
        "parse_error_share": num_errors / num_turns if num_turns else None,
        "mean_observation_tokens": _mean(counts["observation_tokens"]),
        "max_observation_tokens": pc.max(observed).as_py() or 0,
        "max_limited_tokens": int(tokens[is_limited].max(initial=0)),
        "restarts": num_turns - pc.struct_field(turns, "restart_ids").null_count,
        "environment_seconds": pc.sum(seconds).as_py() or 0.0,
        "max_seconds": pc.max(seconds).as_py() or 0.0,
    }


def counts_of(column: pa.ChunkedArray) -> dict[str, np.ndarray]:
    """Return the `COUNTS` of each rollout from a column of turns: [rollouts] int64 each."""
    lengths = pc.list_value_length(column).to_numpy().astype(np.int64)
    turns = pc.list_flatten(column)
    texts = pc.struct_field(turns, "tool_calls").to_pylist()
    of_turns = {
        "tool_calls": np.array([len(read_calls(text)) for text in texts], np.int64),
        "parse_errors": pc.struct_field(turns, "parse_error").is_valid().to_numpy(),
        "observation_tokens": pc.list_value_length(
            pc.struct_field(turns, "observation_ids")
        ).to_numpy(),
    }
    return {"turns": lengths} | {
        name: sum_of_each(numbers, lengths) for name, numbers in of_turns.items()
    }


def sum_of_each(numbers: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Sum `numbers` [turns] over the turns of each rollout: [rollouts] int64."""
    sums = np.append(0, np.cumsum(numbers, dtype=np.int64))
    ends = np.cumsum(lengths)
    return sums[ends] - sums[ends - lengths]


def read_calls(text: str | None) -> list[Any]:
    """Return the tool calls of a turn, each `{name, arguments}` as in its JSON.

    Text that is not JSON, or not a list, counts as one entry.
    """
    if text is None:
        return []
    try:
        calls = read_json(text)
    except ValueError:
        return [text]
    return calls if isinstance(calls, list) else [calls]


def _late_keys(rollouts: pa.Table) -> dict[str, int]:
    """Count the episodes that each time limit ended, by its key; the last turn names the key."""
    infos = pc.struct_field(pc.list_flatten(rollouts["turns"]), "info")
    ends = pc.cumulative_sum(pc.cast(pc.list_value_length(rollouts["turns"]), pa.int64()))
    is_late = pc.equal(rollouts["end_reason"], "timeout")
    last_infos = infos.take(pc.subtract(ends, 1)).filter(is_late).to_pylist()
    keys = Counter(key for info in last_infos for key in _LATE_KEY.findall(info or "")[:1])
    return dict(sorted(keys.items()))


def _mean(counts: np.ndarray) -> float | None:
    return float(counts.mean()) if len(counts) else None
