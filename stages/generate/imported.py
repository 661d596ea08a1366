"""imported: turn another system's samples into rollouts, as if `generate` had made them.

The input is a file of JSON lines with ids and logprobs (see `stages/turns/trajectories.py`) and
the policy that is said to have sampled them. The output is rollouts/1, or rollouts/2 if a line has
turns. Every line is checked before anything is written. The audit of `optimize` checks if the
logprobs are the policy's. If lines have rewards, the stage `imported_rewards` makes a version of
them.

    config = resolve(Config(source="trajectories.jsonl"))
    ref = run_stage("imported", config, store, policy="arith/policy@0")
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa
from pydantic import Field

from quiver.schemas import rollouts as rollouts_kind
from quiver.schemas.errors import printable
from quiver.stages.core import config as common
from quiver.stages.core.file_rows import bad_source
from quiver.stages.core.run.stage import Plan, Refs
from quiver.stages.core.store import Store, Version
from quiver.stages.core.store.writer import Writer
from quiver.stages.model import checkpoints
from quiver.stages.turns import trajectories
from quiver.stages.turns.trajectories import Trajectory

from .ends import stop_ids_of
from .options import Sampling
from .prompts import require_readable_ids
from .texts import Texts

STAGE_VERSION = 1
_END_OF = {"stop": "answered", "length": "max_tokens", "abort": "environment_error"}
"""An episode's end reason, by the finish reason of its last turn; the lines say no more
about it."""
_OF_PROMPT = ("columns", "messages", "tools")
"""Fields of a line that belong to the prompt of its group."""


class Limits(common.Config):
    """Limits that episodes were held to."""

    max_tokens: int = Field(ge=1)
    """Maximum sampled ids of an episode, over all its turns."""


class Config(trajectories.Source):
    """Trajectories of another system, and how they were sampled."""

    sampling: Sampling = Sampling()
    """Sampling of the trajectories, if the lines do not say it. Without `max_tokens`, the
    longest completion is taken as the limit. If every line has a temperature, the most frequent
    one becomes `temperature`."""
    turns: Limits | None = None
    """Filled in by the stage, if lines have turns."""


def resolve(config: Config) -> Config:
    """Fill in what the lines say about their sampling. Reads the file. Raises ConfigError."""
    lines, sha256 = trajectories.read(config.source, config.source_sha256)
    longest = max(1, *(len(line.completion_ids) for line in lines.values()))
    temperatures = Counter(line.temperature for line in lines.values())
    sampling = config.sampling.model_dump()
    if None not in temperatures:
        sampling["temperature"] = temperatures.most_common(1)[0][0]
    if "max_tokens" not in config.sampling.model_fields_set:
        sampling["max_tokens"] = longest
    filled_in: dict[str, Any] = {
        "sampling": common.parse(Sampling, sampling, "sampling"),
        "source_sha256": sha256,
    }
    if any(line.turns is not None for line in lines.values()):
        filled_in["turns"] = Limits(max_tokens=sampling["max_tokens"])
    return config.model_copy(update=filled_in)


def check(config: Config, policy: Version) -> None:
    """Raise ConfigError if `policy` could not have read or sampled a line, or if prompts of a group
    differ."""
    lines, _ = trajectories.read(config.source, config.source_sha256)
    _require_readable(config, lines, policy)
    _groups(config, lines, None)


def plan(config: Config, store: Store, refs: Refs, into: str | None = None) -> Plan:
    """Plan the lines as rollouts of `refs["policy"]`, for `refs["prompts"]` if it is given.

    Raises ConfigError.
    """
    policy = store.open(refs["policy"])
    inputs = {"prompts": store.open(refs["prompts"])} if refs.get("prompts") else {}
    return Plan(
        store=store,
        stage="imported",
        stage_version=STAGE_VERSION,
        config=config if config.source_sha256 else resolve(config),
        run=into or policy.ref.run,
        kinds=("rollouts",),
        inputs=inputs,
        models=(checkpoints.model_entry("policy", policy),),
    )


def make(plan: Plan, writers: Mapping[str, Writer]) -> None:
    """Check every line, then write. Raises ConfigError with line and field, or LineageError."""
    config = plan.config
    writer = writers["rollouts"]
    lines, _ = trajectories.read(config.source, config.source_sha256)
    policy = plan.store.open(plan.models[0].ref)
    _require_readable(config, lines, policy)
    prompts = plan.inputs.get("prompts")
    if prompts is not None:
        require_readable_ids(prompts, policy, plan.store.open)
    groups = _groups(config, lines, prompts)
    rows = _rows(plan, lines.values(), groups, policy)
    schema = rollouts_kind.SCHEMA if config.turns is None else rollouts_kind.OF_TURNS
    writer.write_table(pa.Table.from_pylist(rows, schema))
    num_tokens = sum(len(line.completion_ids) for line in lines.values())
    writer.finish(
        metrics={
            "tokens": num_tokens,
            "mean_completion_tokens": num_tokens / len(lines),
            "rewarded": sum(line.total_reward is not None for line in lines.values()),
        },
        status=dict(sorted(Counter(row["finish_reason"] for row in rows).items())),
    )


def _require_readable(config: Config, lines: Mapping[str, Trajectory], policy: Version) -> None:
    """Raise ConfigError for a line that the policy could not have read or sampled."""
    vocabulary = checkpoints.vocabulary_size(policy)
    context = checkpoints.context_length(policy)
    is_encoder_decoder = checkpoints.is_encoder_decoder(policy)
    allowed = config.sampling.max_tokens
    for place, line in lines.items():
        problem = ""
        for field, ids in line.ids.items():
            if ids and max(ids) >= vocabulary:
                problem = f"{field} holds {max(ids)}, {policy.ref} knows ids below {vocabulary}"
                break
        longest = max(line.sequences)
        # Encoder and decoder have a context each.
        if is_encoder_decoder:
            longest = max(len(line.prompt_ids), len(line.completion_ids))
        if context is not None and longest > context:
            problem = f"a sequence has {longest} tokens, {policy.ref} reads {context}"
        elif is_encoder_decoder and line.turns is not None:
            problem = f"turns: {policy.ref} is an encoder-decoder model, which answers once"
        elif len(line.completion_ids) > allowed:
            problem = (
                f"completion_ids has {len(line.completion_ids)} items, sampling.max_tokens is "
                f"{allowed}"
            )
        if problem:
            raise bad_source(f"{config.source} {place}", problem)


def _groups(config: Config, lines: Mapping[str, Trajectory], prompts: Version | None) -> list[str]:
    """Return the group of each line. Raises ConfigError if a line's prompt differs from its
    group's, or without `prompts` what it says about it differs from an earlier line."""
    prompts_by_group: dict[str, list[int]] = {}
    if prompts is not None:
        table = prompts.table(["group_id", "prompt_ids"])
        pairs = (table[name].to_pylist() for name in ("group_id", "prompt_ids"))
        prompts_by_group = dict(zip(*pairs, strict=True))
    first: dict[str, Trajectory] = {}
    groups = []
    for place, line in lines.items():
        group = line.group
        earlier = first.setdefault(group, line)
        differing = [
            name
            for name in _OF_PROMPT
            if (cell := getattr(line, name)) and cell != getattr(earlier, name)
        ]
        problem = ""
        if prompts is not None and group not in prompts_by_group:
            problem = f"group_id: {prompts.ref} has no {printable(group)}"
        elif prompts_by_group.setdefault(group, line.prompt_ids) != line.prompt_ids:
            others = "an earlier line" if prompts is None else str(prompts.ref)
            problem = f"prompt_ids: group {printable(group)} has others in {others}"
        elif differing and prompts is None:
            problem = (
                f"{differing[0]}: group {printable(group)} has others in an earlier line; give "
                "prompts that differ in them a group_id each"
            )
        if problem:
            raise bad_source(f"{config.source} {place}", problem)
        groups.append(group)
    return groups


def _rows(
    plan: Plan, lines: Iterable[Trajectory], groups: Sequence[str], policy: Version
) -> list[dict[str, Any]]:
    """Return rows of rollouts/1, or of rollouts/2 if some line has turns."""
    sampling = plan.config.sampling
    end_ids = {*stop_ids_of(sampling, policy)}
    texts = Texts.of(policy, end_ids)
    counts: Counter[str] = Counter()
    rows = []
    for line, group in zip(lines, groups, strict=True):
        sample = counts[group]
        counts[group] += 1
        turns = _turns_of(line, texts, end_ids)
        finish_reason = turns[-1]["finish_reason"]
        row = {
            "rollout_id": f"{plan.run_key[:8]}-{group}-{sample}",
            "group_id": group,
            "sample_index": sample,
            "prompt_ids": line.prompt_ids,
            "completion_ids": line.completion_ids,
            "old_logprobs": line.logprobs,
            "finish_reason": finish_reason,
            "stop_reason": None,
            "completion_text": turns[-1]["text"],
            "temperature": sampling.temperature if line.temperature is None else line.temperature,
            "seed": 0,
        }
        if plan.config.turns is not None:
            row |= {"turns": turns, "end_reason": _END_OF[finish_reason]}
        rows.append(row)
    return rows


def _turns_of(line: Trajectory, texts: Texts, end_ids: set[int]) -> list[dict[str, Any]]:
    """Return a line's turns as rollouts/2 stores them; a line without turns is one turn. Missing
    texts are decoded from the ids."""
    given = line.turns or [trajectories.Turn(length=len(line.completion_ids), reward=line.reward)]
    rows = []
    start = 0
    for number, turn in enumerate(given, 1):
        ids = line.completion_ids[start : start + turn.length]
        start += turn.length
        is_last = number == len(given)
        ends = bool(ids) and ids[-1] in end_ids
        guess = "stop" if ends or not is_last else "length"
        reason = turn.finish_reason or (line.finish_reason if is_last else None) or guess
        text = turn.text if turn.text is not None or not is_last else line.text
        observation = turn.observation
        calls = None
        if turn.tool_calls is not None:
            calls = json.dumps([call.model_dump() for call in turn.tool_calls], ensure_ascii=False)
        if observation is None:
            observation = texts.decode(turn.observation_ids)
        rows.append(
            {
                "length": turn.length,
                "text": texts.decode(ids) if text is None else text,
                "observation_ids": turn.observation_ids,
                "restart_ids": turn.restart_ids,
                "finish_reason": reason,
                "tool_calls": calls,
                "parse_error": None,
                "observation": observation,
                "reward": turn.reward if line.paid is None else line.paid[number - 1],
                "info": None,
                "seconds": 0.0,
            }
        )
    return rows
