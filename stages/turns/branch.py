"""branch: turn saved episodes into prompts/2, so that one of their turns is sampled again.

The prompt's ids are what the policy read before the turn: nothing is rendered or encoded again. The
environment's answers up to there are stored in the prompt's columns (see `schemas/prompts.py`), so
that it can be brought to the same state. Many episodes can thus continue one saved episode, which
shows how much a single turn was worth.

    ref = run_stage("branch", Config(turn=2), store, rollouts="guess/rollouts@3")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from quiver.schemas import prompts as prompts_kind
from quiver.schemas.errors import ConfigError, SchemaError, printable
from quiver.schemas.rollouts import SCHEMAS
from quiver.stages.core import config as common
from quiver.stages.core.lineage import open_input, prompt_rows
from quiver.stages.core.run.stage import Plan, Refs
from quiver.stages.core.store import Store
from quiver.stages.core.store.writer import ROWS_PER_SHARD, Writer
from quiver.stages.model import checkpoints
from quiver.stages.model.media.checking import MediaLimits
from quiver.stages.turns.environment import Message
from quiver.stages.turns.saved import (
    Played,
    as_json,
    beginning_of,
    cut_of,
    ids_before,
    messages_of_turn,
    require_episodes,
    text_before_calls,
    turns_answered,
)
from quiver.stages.turns.statistics import FAILURES

STAGE_VERSION = 1
_OF_ROLLOUTS = ["rollout_id", "group_id", "prompt_ids", "completion_ids", "turns", "end_reason"]
_CARRIED = ("turns", "template_arguments", "template_seconds", *MediaLimits.model_fields)
"""Fields of the prompts' config: later turns must be rendered like the first ones."""
_TOLD = ("assistant_starts", "assistant_end", "chat_template")
"""The same for their metrics."""
_BESIDE = ("tools", *prompts_kind.MEDIA.values(), "spans")
"""Columns of the prompt that are kept."""


class Config(MediaLimits):
    """Config of branch: the turn at which saved episodes are cut."""

    turn: int = Field(ge=1)
    """The turn to sample again, from 0. Shorter and failed episodes are left out and counted."""
    turns: dict[str, Any] | None = None
    """Filled in by the stage, like the next two fields: the environment that the prompts were
    rendered for."""
    template_arguments: dict[str, Any] = Field(default_factory=dict)
    """Filled in by the stage: variables that the prompts' template was rendered with."""
    template_seconds: float = 10.0
    """Maximum seconds that the template may take for one prompt."""

    def key(self) -> dict[str, Any]:
        """Return only `turn`: the other fields follow from the inputs."""
        return {"turn": self.turn}


def plan(config: Config, store: Store, refs: Refs, into: str | None = None) -> Plan:
    """Plan prompts from the episodes of `refs["rollouts"]`, cut before the turn. Raises
    LineageError."""
    rollouts = store.open(refs["rollouts"])
    require_episodes(rollouts)
    inputs = {"rollouts": rollouts}
    if rollouts.manifest.input("prompts") is not None:
        prompts = inputs["prompts"] = open_input(store, rollouts, "prompts")
        saved = prompts.manifest.config
        carried = {name: saved[name] for name in _CARRIED if name in saved}
        config = common.parse(Config, {"turn": config.turn, **carried}, f"{prompts.ref} config")
    # Only its tokenizer matters, because the ids are already known.
    policy = rollouts.manifest.require_model("policy").model_copy(update={"weights": ""})
    return Plan(
        store=store,
        stage="branch",
        stage_version=STAGE_VERSION,
        config=config,
        run=into or rollouts.ref.run,
        kinds=("prompts",),
        inputs=inputs,
        models=(policy,),
    )


def make(plan: Plan, writers: Mapping[str, Writer]) -> None:
    """Write the prompts. Raises ConfigError if no episode is long enough, or SchemaError."""
    writer = writers["prompts"]
    turn = plan.config.turn
    rollouts = plan.inputs["rollouts"]
    saved_columns = SCHEMAS[rollouts.manifest.kind_schema].names
    observed = [name for name in prompts_kind.MEDIA.values() if name in saved_columns]
    columns = [*_OF_ROLLOUTS, *observed]
    table = rollouts.table(columns)
    # the rewards of failed episodes are unknown, so the environment could not repeat them
    failed = pc.is_in(table["end_reason"], value_set=pa.array(FAILURES))
    ended = table.filter(pc.invert(failed))
    num_turns = pc.list_value_length(ended["turns"])
    longer = ended.filter(pc.greater(num_turns, turn))
    if len(table) and not len(ended):
        raise ConfigError(
            str(rollouts.ref),
            f"all its {len(table)} episodes failed, so none can go on",
            next=f"quiver show {rollouts.ref}",
        )
    if not len(longer):
        most = pc.max(num_turns).as_py() or 0
        raise ConfigError(
            f"{rollouts.ref} turn {turn}",
            f"there is none: turns are numbered from 0, and the longest episode has {most}"
            + (", without those that failed" if len(ended) < len(table) else ""),
            next=f"name turn {most - 1} or an earlier one" if most > 1 else "sample the prompts",
        )
    branches = _Branches(plan, turn)
    num_shards = -(-len(longer) // ROWS_PER_SHARD)
    for index in writer.take_shards(num_shards):
        writer.write(index, branches.table(longer.slice(index * ROWS_PER_SHARD, ROWS_PER_SHARD)))
    prompts = plan.inputs.get("prompts")
    saved = prompts.manifest.metrics if prompts else {}
    writer.finish(
        metrics={
            "prompt_tokens": prompts_kind.token_counts(map(writer.read, range(num_shards))),
            "source_rows": len(table),
            **{name: saved[name] for name in _TOLD if name in saved},
        },
        status={
            "kept": len(longer),
            "shorter": len(ended) - len(longer),
            "failed": len(table) - len(ended),
        },
    )


class _Branches:
    """Turns rows of rollouts/2 into rows of prompts/2."""

    def __init__(self, plan: Plan, turn: int) -> None:
        self._turn = turn
        self._name = str(plan.inputs["rollouts"].ref)
        policy = plan.store.open(plan.models[0].ref)
        self._tokenizer = checkpoints.load_tokenizer(policy).backend_tokenizer
        self._before_calls = text_before_calls(plan.store, plan.inputs["rollouts"])
        self._prompts: pa.Table | None = None
        if "prompts" in plan.inputs:
            table = plan.inputs["prompts"].table()
            self._prompts = prompts_kind.with_large_files(table).combine_chunks()

    def table(self, rollouts: pa.Table) -> pa.Table:
        """Return prompts/2 of these episodes; each must have the turn."""
        rows = []
        columns = []
        asked = None
        prompts = [{}] * len(rollouts)
        if self._prompts is not None:
            asked = self._prompts.take(prompt_rows(rollouts, self._prompts))
            prompts = asked.to_pylist()
        for row, saved in zip(rollouts.to_pylist(), prompts, strict=True):
            prompt = {**dict.fromkeys(("messages", "columns", *_BESIDE)), **saved}
            beginning = beginning_of(row["group_id"], prompt["columns"] or {})
            before = row["turns"][: self._turn]
            answered = turns_answered(row["rollout_id"], before, None, self._before_calls)
            is_rewritten = any(turn["restart_ids"] for turn in row["turns"][: self._turn + 1])
            if prompt["spans"] and is_rewritten:
                raise SchemaError(
                    f"{self._name} {printable(row['rollout_id'])}",
                    "its history was rewritten, so the places of its pictures and clips are not "
                    "known",
                    next="name an earlier turn",
                )
            played = [
                *beginning.turns,
                *(
                    Played(turn, record["observation"], cut_of(record), record["reward"])
                    for turn, record in zip(answered, before, strict=True)
                    if turn is not None
                ),
            ]
            prompt |= _shown(prompt, row, self._turn)
            columns.append((as_json(played), beginning.group))
            rows.append(
                {
                    "group_id": f"{row['rollout_id']}.{self._turn}",
                    "messages": self._messages(row["rollout_id"], prompt["messages"], before),
                    "prompt_ids": ids_before(row, self._turn),
                    **{name: prompt[name] for name in _BESIDE},
                }
            )
        all_ids = [row["prompt_ids"] for row in rows]
        texts = self._tokenizer.decode_batch(all_ids, skip_special_tokens=False)
        for row, text in zip(rows, texts, strict=True):
            row["prompt_text"] = text
        return prompts_kind.table_of(rows, _columns(asked, columns))

    def _messages(
        self, name: str, chat: list[Message] | None, turns: Sequence[dict[str, Any]]
    ) -> list[Message] | None:
        """Return the known chat before the turn; None if the prompt has none."""
        if chat is None:
            return None
        messages = list(chat)
        for turn in turns:
            message, answers = messages_of_turn(name, turn, self._before_calls)
            messages += [message, *answers]
        return messages


def _columns(prompts: pa.Table | None, played: list[tuple[str, str]]) -> pa.StructArray:
    """Return the prompts' own columns, with the turns played before the cut."""
    columns: dict[str, tuple[pa.Field, pa.Array]] = {}
    if prompts is not None:
        struct = prompts["columns"].combine_chunks()
        for field, column in zip(struct.type, struct.flatten(), strict=True):
            columns[field.name] = (field, column)
    names = (prompts_kind.PLAYED_TURNS, prompts_kind.PLAYED_GROUP)
    for name, texts in zip(names, zip(*played, strict=True), strict=True):
        columns[name] = (pa.field(name, pa.string()), pa.array(texts, pa.string()))
    fields, arrays = zip(*columns.values(), strict=True)
    return pa.StructArray.from_arrays(arrays, fields=fields)


def _shown(prompt: dict[str, Any], row: dict[str, Any], turn: int) -> dict[str, Any]:
    """Return media and `spans` of a prompt, including those shown before that turn."""
    shown: dict[str, Any] = {}
    spans = []
    for modality, column in prompts_kind.MEDIA.items():
        for file in row.get(column) or ():
            number = file["turn"]
            if number >= turn:
                continue
            start = len(ids_before(row, number)) + row["turns"][number]["length"] + file["start"]
            spans.append({"modality": modality, "start": start, "length": file["length"]})
            files = shown.setdefault(column, list(prompt[column] or ()))
            files.append({"bytes": file["bytes"], "path": None})
    if spans:
        spans.sort(key=lambda span: span["start"])
        shown["spans"] = [*(prompt["spans"] or ()), *spans]
    return shown
