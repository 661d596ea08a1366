"""Export saved rollouts: as datasets of TRL's trainers, as verl's prompts, or as trajectories that
`quiver import` reads.

    exported = export(store, "arith/rewards@3", Path("pairs.jsonl"), Options("dpo", min_gap=0.5))
    exported.rows, exported.left_out

Rows are read and written in batches. A conversation is the prompt's messages, then the policy's
turns and the answers to them. If the prompts have no messages, or do not say how an answer begins,
texts are written. Rollouts that are left out are counted by the reason, and so are answers that
would become other ids if their text were tokenised again. Pictures and clips are refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet

from quiver.flows.json_lines import json_text, lists_like, to_lines
from quiver.flows.look.joined import Selection, open_joined, prompt_fields
from quiver.schemas.cells import holds
from quiver.schemas.errors import ConfigError, LineageError, printable, quoted_name
from quiver.schemas.outside import Message
from quiver.schemas.prompts import MESSAGES, MESSAGES_WITH_MORE, most_media
from quiver.stages.core.files import replacing, storage_errors
from quiver.stages.core.store import Store
from quiver.stages.model import checkpoints
from quiver.stages.model.chat.generation_prompt import prefill
from quiver.stages.turns.saved import messages_of_turn, text_before_calls
from quiver.stages.turns.statistics import FAILURES, sum_of_each

PAIRED = ("dpo", "reward")
"""Formats of pairs."""
_ROWS_AT_ONCE = 512
_MOST_TOKENISED = 1000
"""Answers whose text is tokenised again, to count how many become other ids."""
_OF_LINES = (
    "group_id",
    "prompt_ids",
    "completion_ids",
    "old_logprobs",
    "temperature",
    "finish_reason",
    "completion_text",
    "reward",
    "turn_rewards",
    "turns",
    "messages",
    "tools",
    "columns",
)
"""Columns of a trajectory, if they are there."""
_OF_VERL = pa.schema(
    {
        "data_source": pa.string(),
        "ability": pa.string(),
        "reward_model": pa.struct({"style": pa.string(), "ground_truth": pa.string()}),
        "extra_info": pa.struct({"index": pa.string()}),
    }
)
"""Columns of verl's rows, but for the prompt."""
_NOT_OF_LINES = ("parse_error", "info", "seconds")
"""Fields of a saved turn that a trajectory does not have."""


@dataclass(frozen=True)
class Options:
    """What to write."""

    format: Literal["dpo", "kto", "sft", "reward", "trajectories", "verl"]
    min_gap: float = 0.0
    """Least difference of a pair's scores; for kto, of a score from the mean of its prompt."""
    pairs: Literal["best-worst", "all"] = "best-worst"
    """The pairs of a prompt's answers."""
    cut: Literal["keep", "leave-out"] = "keep"
    """What to do with answers whose last turn the token limit cut."""
    ids: bool = False
    """Write the exact token ids beside the texts."""
    where: str = ""
    """Conditions that rollouts must meet, as in `Selection`."""
    parquet: bool = False
    """Write Parquet instead of JSON lines."""

    def __post_init__(self) -> None:
        of_rows = self.format in ("trajectories", "verl")
        tokenises = self.format in ("dpo", "kto")
        unused = {
            "--min-gap": self.min_gap and self.format not in (*PAIRED, "kto"),
            "--pairs": self.pairs == "all" and self.format not in PAIRED,
            "--ids": self.ids and (of_rows or tokenises),
            "Parquet": self.parquet and self.format == "trajectories",
            "--cut": self.cut != "keep" and of_rows,
        }
        for name in filter(unused.get, unused):
            problem = f"has no use for --as {self.format}"
            if tokenises and name == "--ids":
                problem += f": TRL's {self.format.upper()}Trainer tokenises the texts itself"
            raise ConfigError(name, problem, next="leave it out")


@dataclass
class Exported:
    """What was written."""

    ref: str
    rewards: str | None
    """The rewards that are written, as `open_joined` chooses them."""
    sampling: dict[str, Any]
    """How the rollouts were sampled, as `quiver import` needs it."""
    rows: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    """Number of rollouts, or of pairs, by the reason."""
    tokenised: int = 0
    other_ids: int = 0
    """How many of the answers that were `tokenised` again became other ids."""


def export(store: Store, ref: str, path: Path, options: Options) -> Exported:
    """Write the rollouts behind `ref` to a new file. Raises ConfigError or LineageError."""
    if path.exists() or not path.absolute().parent.is_dir():
        problem = "exists already" if path.exists() else "is in a folder that does not exist"
        raise ConfigError(f"file {printable(path)}", problem, next="name a new file in --out")
    exporter = _Exporter(store, ref, options)
    exported = exporter.exported
    with storage_errors(f"file {printable(path)}"), replacing(path) as file:
        writer = None
        for table in filter(len, exporter.tables()):
            exported.rows += len(table)
            if not options.parquet:
                file.write(to_lines(table))
                continue
            if writer is None:
                sink = pa.PythonFile(file, "w")
                writer = pyarrow.parquet.ParquetWriter(sink, table.schema)
            writer.write_table(table)
        if not exported.rows:
            counts = ", ".join(f"{count} {why}" for why, count in (+exported.left_out).items())
            problem = f"nothing is left to write; left out: {counts}"
            raise ConfigError(exported.ref, problem, next="ask for less")
        if writer is not None:
            writer.close()
    return exported


class _Exporter:
    """The rollouts behind a version, with their prompts and scores."""

    def __init__(self, store: Store, ref: str, options: Options) -> None:
        self.options = options
        self.joined = open_joined(store, ref)
        if len(versions := self.joined.all_rollouts) > 1:
            raise LineageError(
                str(self.joined.ref),
                f"was made of several versions of rollouts: {', '.join(versions)}; an export "
                "writes one",
                next="export each by itself: name its rewards, or these rollouts",
            )
        self.rollouts = self.joined.rollouts.version
        manifest = self.rollouts.manifest
        sampling = dict(manifest.config_section("sampling"))
        if self.joined.has_turns:  # the limit in `sampling` is for one turn
            sampling["max_tokens"] = manifest.config_section("turns").get("max_tokens")
        sampling = {name: value for name, value in sampling.items() if value is not None}
        self.exported = Exported(str(self.rollouts.ref), self.joined.rewards, sampling)
        self.has_turns = self.joined.has_turns
        self._before_calls = text_before_calls(store, self.rollouts)
        if "prompts" not in self.joined.shards:
            raise self._refusal("its prompts are gone", "name other rollouts")
        prompts = self.joined.shards["prompts"].version
        table = prompts.table()
        is_of_media = manifest.kind_schema in ("rollouts/3", "rollouts/4")
        if is_of_media or most_media(table):
            raise self._refusal(
                "has pictures or clips, which an export cannot hold",
                "read the version's own files with `datasets`",
            )
        self._starts = prompts.manifest.metrics.get("assistant_starts") or {}
        messages = table["messages"].combine_chunks()
        self.is_chat = not messages.null_count and all(
            self._starts.get(role) is not None
            for role in _last_roles(messages).unique().to_pylist()
        )
        is_dialogue = options.format not in ("trajectories", "verl")
        if is_dialogue and self.has_turns and (options.ids or not self.is_chat):
            problem = "has turns, whose ids, and texts without messages, only trajectories hold"
            raise self._refusal(problem, "take --as trajectories")

    def _refusal(self, problem: str, advice: str) -> LineageError:
        return LineageError(self.exported.ref, problem, next=advice)

    def tables(self) -> Iterator[pa.Table]:
        """Yield the rows of the format, some at a time."""
        name = self.options.format
        positions = self._chosen()
        if name in PAIRED:
            positions = self._pairs(positions)
        elif name == "kto":
            gains = np.abs(self._gains[positions])
            positions = positions[self._are_apart(gains, self._scores[positions])]
        elif name == "verl":
            _, first = np.unique(self._groups[positions], return_index=True)
            positions = positions[first]
        makers = {"trajectories": self._lines, "verl": self._questions}
        for start in range(0, positions.shape[-1], _ROWS_AT_ONCE):
            yield makers.get(name, self._dialogues)(positions[..., start : start + _ROWS_AT_ONCE])

    # -- which rollouts

    def _chosen(self) -> np.ndarray:
        """Return the positions of the rollouts to write, and count the others."""
        options = self.options
        chosen = np.zeros(len(self.joined), bool)
        chosen[self.joined.order(Selection(where=options.where))] = True
        self.exported.left_out["by --where"] = int((~chosen).sum())
        if options.format in ("trajectories", "verl"):
            return np.flatnonzero(chosen)
        reasons = self.joined.rollouts.column("finish_reason")
        checks = {
            "failed": self._has_failed,
            "without a prompt": self.joined.places("prompts") < 0,
        }
        if options.cut == "leave-out":
            checks["cut"] = np.array(pc.equal(reasons, "length"))
        if self.has_turns:
            turns = self.joined.rollouts.column("turns")
            restarts = pc.struct_field(pc.list_flatten(turns), "restart_ids").is_valid()
            lengths = np.array(pc.list_value_length(turns))
            checks["with a rewritten history"] = sum_of_each(np.array(restarts), lengths) > 0
        if options.format != "sft":
            checks["without a score"] = np.isnan(self._scores)
        for why, is_out in checks.items():
            self.exported.left_out[why] = int((chosen & is_out).sum())
            chosen &= ~is_out
        positions = np.flatnonzero(chosen)
        self._tokenise_again(positions)
        return positions

    @cached_property
    def _has_failed(self) -> np.ndarray:
        """[rollouts] bool: the engine gave up, or the environment did not answer."""
        rollouts = self.joined.rollouts
        has_failed = pc.equal(rollouts.column("finish_reason"), "abort")
        if self.has_turns:
            has_no_answer = pc.is_in(rollouts.column("end_reason"), pa.array(FAILURES))
            has_failed = pc.or_(has_failed, has_no_answer)
        return np.array(has_failed)

    @cached_property
    def _scores(self) -> np.ndarray:
        """[rollouts] float64: the score or reward; NaN without one."""
        if not self.joined.score_name:
            raise self._refusal(
                "has no rewards", f"quiver reward RECIPE --rollouts {self.rollouts.ref}"
            )
        return self.joined.number(self.joined.score_name)

    @cached_property
    def _groups(self) -> np.ndarray:
        """[rollouts] the row of `Joined.groups` of each rollout's prompt."""
        groups = self.joined.groups()["group_id"].combine_chunks()
        return np.array(pc.index_in(self.joined.rollouts.column("group_id"), value_set=groups))

    def _pairs(self, positions: np.ndarray) -> np.ndarray:
        """Return [2, pairs] positions: better answers, and worse ones to the same prompt."""
        if not len(positions):
            return np.zeros((2, 0), int)
        scores = self._scores[positions]
        groups = self._groups[positions]
        order = np.lexsort((scores, groups))
        ends = np.flatnonzero(np.diff(groups[order])) + 1
        every_pair = cache(lambda count: np.triu_indices(count, 1))
        pairs = []
        for answers in np.split(order, ends):
            worse, better = [0], [-1]
            if self.options.pairs == "all":
                worse, better = every_pair(len(answers))
            pairs.append(np.stack([answers[better], answers[worse]]))
        better, worse = np.concatenate(pairs, axis=1)
        is_apart = self._are_apart(scores[better] - scores[worse], scores[better])
        return positions[np.stack([better, worse])[:, is_apart]]

    @cached_property
    def _gains(self) -> np.ndarray:
        """[rollouts] float64: the score minus the mean of its prompt's scores."""
        gains = self._scores - np.array(self.joined.groups()["mean"], float)[self._groups]
        return np.where(np.abs(gains) <= _rounding(self._scores), 0, gains)

    def _are_apart(self, gaps: np.ndarray, scores: np.ndarray) -> np.ndarray:
        """Return which gaps are large enough, and count the others."""
        is_large = (gaps > 0) & (gaps >= self.options.min_gap - _rounding(scores))
        self.exported.left_out["without a difference"] += int((~is_large).sum())
        return is_large

    # -- tables of some rows

    def _dialogues(self, positions: np.ndarray) -> pa.Table:
        """Return prompts and answers as TRL's trainers read them.

        Args:
            positions: [rows], or [2, rows] of answers to the same prompts.
        """
        names = ("chosen", "rejected") if positions.ndim == 2 else ("completion",)
        columns: dict[str, Any] = {}
        for name, places in zip(names, np.atleast_2d(positions), strict=True):
            rows = self.joined.table(places).combine_chunks()
            columns["prompt"] = _messages(rows) if self.is_chat else rows["prompt_text"]
            columns[name] = self._answers(rows)
            if self.options.ids:
                columns |= self._ids(name, rows)
            if "tools" in rows.column_names:
                columns["tools"] = rows["tools"]
        if self.options.format == "kto":
            columns["label"] = pa.array(self._gains[positions] > 0)
        return pa.table(columns)

    def _answers(self, rows: pa.Table) -> pa.Array | pa.ChunkedArray:
        """Return the policy's messages and the answers to them; its text if there is no chat."""
        if not self.is_chat:
            return rows["completion_text"]
        beginnings = self._beginnings(rows)
        chats = []
        if not self.has_turns:
            texts = pc.binary_join_element_wise(
                pa.array(beginnings, pa.string()), rows["completion_text"].combine_chunks(), ""
            )
            roles = pa.repeat("assistant", len(rows))
            answers = pa.StructArray.from_arrays([roles, texts], fields=[*MESSAGES.value_type])
            return pa.ListArray.from_arrays(pa.array(range(len(rows) + 1), pa.int32()), answers)
        episodes = rows.select(["rollout_id", "turns"]).to_pylist()
        for beginning, row in zip(beginnings, episodes, strict=True):
            chat: list[Message] = []
            answers: list[Message] = []
            for turn in row["turns"]:
                chat += answers  # the answer to the last turn was never read
                message, answers = messages_of_turn(row["rollout_id"], turn, self._before_calls)
                chat.append({**message, "content": beginning + message["content"]})
            chats.append(chat)
        return _with_json(pa.array(chats, MESSAGES_WITH_MORE))

    def _beginnings(self, rows: pa.Table) -> list[str]:
        """Return the end of each prompt that already belongs to the answer, such as `<think>`."""
        roles = _last_roles(rows["messages"].combine_chunks()).to_pylist()
        texts = rows["prompt_text"].to_pylist()
        return [
            prefill(text, self._starts[role]) or "" for text, role in zip(texts, roles, strict=True)
        ]

    def _ids(self, name: str, rows: pa.Table) -> dict[str, Any]:
        """Return columns with the ids of prompts and answers, under TRL's names."""
        both = [rows[name].combine_chunks() for name in ("prompt_ids", "completion_ids")]
        lengths = np.stack([pc.list_value_length(lists) for lists in both], axis=1)
        mask = np.repeat(np.tile([0, 1], len(rows)), lengths.ravel())
        ids = np.empty(len(mask), np.int32)
        for part, lists in enumerate(both):
            ids[mask == part] = lists.flatten()
        offsets = pa.array(np.append(0, lengths.sum(1).cumsum()), pa.int32())
        if self.options.format == "reward":
            return {f"{name}_ids": pa.ListArray.from_arrays(offsets, ids)}
        return {
            "input_ids": pa.ListArray.from_arrays(offsets, ids),
            "completion_mask": pa.ListArray.from_arrays(offsets, mask),
        }

    def _lines(self, positions: np.ndarray) -> pa.Table:
        """Return trajectories (see `stages/turns/trajectories.py`)."""
        rows = self.joined.table(positions).combine_chunks()
        columns = {name: rows[name] for name in _OF_LINES if name in rows.column_names}
        for own in rows.schema.field("columns").type:
            if holds(own.type, _is_bytes):
                raise ConfigError(
                    f"column {quoted_name(own.name)}",
                    "holds bytes, which JSON lines cannot hold",
                    next="leave the column out of the source",
                )
        columns["logprobs"] = columns.pop("old_logprobs")
        columns["text"] = columns.pop("completion_text")
        columns["messages"] = _messages(rows)
        if "tools" in columns:
            columns["tools"] = _as_json(rows["tools"].combine_chunks())
        has_failed = self._has_failed[positions]
        columns["finish_reason"] = _aborted(rows["finish_reason"], has_failed)
        if "reward" in columns:  # an import refuses rewards of failed rollouts
            columns["reward"] = pc.if_else(pa.array(has_failed), None, rows["reward"])
        if self.has_turns:
            turns = rows["turns"].combine_chunks()
            flat = turns.flatten()
            lengths = pc.list_value_length(turns).to_numpy()
            columns["paid"] = lists_like(turns, pc.struct_field(flat, "reward"))
            numbers = np.full(len(flat), np.nan, np.float32)
            if "turn_rewards" in columns:
                is_scored = np.array(columns["reward"].is_valid())
                known = columns.pop("turn_rewards").filter(pa.array(is_scored)).combine_chunks()
                numbers[np.repeat(is_scored, lengths)] = np.array(known.flatten(), np.float32)
            is_end_of_failed = np.zeros(len(flat), bool)
            is_end_of_failed[np.cumsum(lengths)[has_failed] - 1] = True
            columns["turns"] = _with_json(
                turns,
                reward=pa.array(numbers, from_pandas=True),
                finish_reason=_aborted(pc.struct_field(flat, "finish_reason"), is_end_of_failed),
            )
        return pa.table(columns)

    def _questions(self, positions: np.ndarray) -> pa.Table:
        """Return prompts as verl's RLHFDataset reads them."""
        rows = self.joined.table(positions).combine_chunks()
        questions: list[dict[str, Any]] = []
        is_whole: list[bool] = []
        for row in rows.select(["group_id", "messages", "prompt_text", "columns"]).to_pylist():
            fields = prompt_fields(row)
            answer = fields.get("reference")
            is_whole.append(answer is not None and row["messages"] is not None)
            if not is_whole[-1]:
                continue
            text = answer if isinstance(answer, str) else json_text(answer)
            question = {
                "data_source": str(fields["columns"].get("data_source") or self.rollouts.ref.run),
                "ability": str(fields["columns"].get("ability") or ""),
                "reward_model": {"style": "rule", "ground_truth": text},
                "extra_info": {"index": row["group_id"]},
            }
            questions.append(question)
        self.exported.left_out["without messages or a reference answer"] += is_whole.count(False)
        asked = _messages(rows.filter(pa.array(is_whole)).combine_chunks())
        return pa.Table.from_pylist(questions, _OF_VERL).add_column(1, "prompt", asked)

    # -- tokens

    def _tokenise_again(self, positions: np.ndarray) -> None:
        """Count answers whose text becomes other ids, among `_MOST_TOKENISED` of them."""
        manifest = self.rollouts.manifest
        try:
            policy = self.joined.store.open(manifest.require_model("policy").ref)
            ends = checkpoints.end_token_ids(policy)
        except (LineageError, ConfigError):  # the policy is gone, or names no end token
            return
        tokenizer = checkpoints.load_tokenizer(policy)
        without_text = {*ends, *manifest.config_section("sampling").get("stop_token_ids", ())}
        some = self.joined.table(positions[:: 1 + len(positions) // _MOST_TOKENISED])
        for row in some.to_pylist():
            ids = iter(row["completion_ids"])
            whole = {"text": row["completion_text"], "length": row["tokens"]}
            is_other = False
            for turn in row.get("turns", [whole]):
                sampled = list(islice(ids, turn["length"]))
                written = [id for id in sampled if id not in without_text]
                text = row["prompt_text"] + turn["text"]
                again = tokenizer(text, add_special_tokens=False)["input_ids"]
                is_other |= again[len(again) - len(written) :] != written
            self.exported.tokenised += 1
            self.exported.other_ids += is_other


def _is_bytes(kind: pa.DataType) -> bool:
    types = pa.types
    return types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind)


def _rounding(scores: np.ndarray) -> np.ndarray:
    """Return how far scores may be off, since they were rounded to float32."""
    return 1e-6 * np.maximum(1, np.abs(scores))


def _last_roles(chats: pa.ListArray) -> pa.StringArray:
    """Return the role of the last message of each chat."""
    ends = np.cumsum(pc.list_value_length(chats)) - 1
    return pc.struct_field(chats.flatten(), "role").take(pa.array(ends))


def _aborted(reasons: pa.Array, is_aborted: np.ndarray) -> pa.Array:
    """Return finish reasons, with `abort` in some places."""
    return pc.if_else(pa.array(is_aborted), "abort", reasons)


def _as_json(texts: pa.Array) -> pa.Array:
    """Return JSON texts as the values that they hold."""
    return pa.ExtensionArray.from_storage(pa.json_(), texts)


def _messages(rows: pa.Table) -> pa.ListArray:
    """Return the prompts' messages."""
    return _with_json(rows["messages"].combine_chunks())


def _with_json(lists: pa.ListArray, **changed: pa.Array) -> pa.ListArray:
    """Return saved messages, or turns, with `tool_calls` as values and with `changed` members."""
    structs = lists.flatten()
    names = [member.name for member in structs.type]
    members = dict(zip(names, structs.flatten(), strict=True)) | changed
    if "tool_calls" in members:
        members["tool_calls"] = _as_json(members["tool_calls"])
    for name in _NOT_OF_LINES:
        members.pop(name, None)
    return lists_like(lists, pa.StructArray.from_arrays([*members.values()], names=[*members]))
