"""Join rollouts with their prompt, reward, parts, errors, score, advantage and ratio, by id. Look
here for the rows of `quiver show` and `quiver view`.

Rows are read page by page; sorting, filters and search read whole columns.

Any version of the chain may be named: rollouts, rewards, logprobs, advantages, updates,
evaluations, a policy, or prompts. The rollouts behind it are joined with what belongs to that
version. For every other kind, a version made from these rollouts is taken: of several, the one
that the run's own next policy was made of, else the newest. Advantages are made from the rewards
that are shown. Of a policy that learned from several versions of rollouts, the first are joined
(`Joined.all_rollouts`).

    joined = open_joined(store, "arith/rewards@3")
    order = joined.order(Selection(sort="reward", descending=True, where="length > 20"))
    joined.rows(order[:10])
    joined.tokens(order[0])
"""

from __future__ import annotations

import operator
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from functools import cache, cached_property, partial, reduce
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from quiver.schemas.cells import Cells
from quiver.schemas.errors import (
    ConfigError,
    CorruptError,
    LineageError,
    printable,
    quoted_name,
)
from quiver.schemas.manifest import Manifest
from quiver.schemas.prompts import MEDIA, OURS
from quiver.schemas.refs import Ref
from quiver.schemas.rollouts import END_REASONS, FINISH_REASONS
from quiver.stages.core.store import Store, Version
from quiver.stages.core.store.listing import is_of_sweep
from quiver.stages.turns.statistics import COUNTS, counts_of, sum_of_each

from .episodes import turn_fields
from .gather import Manifests, ends_of
from .shards import Shards, schema_of

ANSWERS = ("answer", "reference", "solution", "target", "label", "ground_truth", "expected")
"""User columns that may hold the reference answer; the first present one is used. Without one, the
field `ground_truth` of a column `reward_model` is used, as in verl's layout."""
_QUOTED = r"""(?:"[^"]*"|'[^']*')"""
_CONDITION = re.compile(
    rf"\s*({_QUOTED}|(?=\S)[^<>=!,]+?)\s*(<=|>=|!=|==?|<|>)"
    rf"\s*+({_QUOTED}|(?![<>=])[^,]+?)\s*(?:,|\Z)"
)
_COMPARE = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "=": operator.eq,
    "!=": operator.ne,
}
_TEXTS = ("finish_reason", "group_id", "rollout_id", "end_reason")
"""Columns of rollouts that a filter compares as text."""
_WORDS = {"finish_reason": FINISH_REASONS, "end_reason": END_REASONS}
"""All texts that such a column may hold, if they are few."""
_SHOWN_AS = {"end": "finish_reason", "ratio": "mean_ratio"}
"""Names of columns by the title that a table has for them. A user's column with such a title is
`columns.NAME`."""
_OWN = "columns."
"""Before the name of a user's column, if Quiver's own has the same name."""
_HOW = "write it as in: reward < 0.5, finish_reason = length"


@dataclass(frozen=True)
class Selection:
    """A choice of rollouts and their order."""

    sort: str = ""
    """One of `Joined.numbers`, or `random`. Empty: the stored order."""
    descending: bool = False
    where: str = ""
    """Conditions such as `reward < 0.5, finish_reason = length`; all must hold. Texts and names of
    columns may be quoted, and must be if they hold a comma. A user's column that has the name of
    one of Quiver's is called `columns.NAME`."""
    search: str = ""
    """Text that the completion, the prompt, a turn or an observation must contain, in any case."""
    group: str = ""
    """Id of the only prompt to show. Empty: all."""


@dataclass(frozen=True)
class Tokens:
    """One completion, token by token."""

    ids: list[int]
    numbers: dict[str, list[float]]
    """One number per token, by name: `logprob` under the policy that sampled, in nats; `ratio prox`
    and `ratio ref`, π of that model / π of the sampling policy; `advantage`. Names of which nothing
    is known are absent."""
    turns: list[dict[str, Any]]
    """Turns in the form of rollouts/2, with their observations. A rollout of one turn has one,
    without observation."""


class Joined:
    """The rollouts behind a version, with the shards of every other version joined to them."""

    def __init__(self, store: Store, ref: Ref, shards: dict[str, Shards]) -> None:
        self.store = store
        self.ref = ref
        """The version that was asked for."""
        self.shards = shards
        """`rollouts` and all that joins them, by kind; logprobs by their model: `prox`, `ref`."""
        self.rollouts = shards["rollouts"]
        self._places: dict[str, np.ndarray] = {}

    def __len__(self) -> int:
        return len(self.rollouts)

    @property
    def sources(self) -> list[str]:
        """References of all joined versions."""
        return [str(shards.version.ref) for shards in self.shards.values()]

    @property
    def policy(self) -> str | None:
        """Reference of the policy that sampled."""
        model = self.rollouts.version.manifest.model("policy")
        return model.ref if model else None

    @property
    def rewards(self) -> str | None:
        """Reference of the rewards."""
        shards = self.shards.get("rewards")
        return str(shards.version.ref) if shards else None

    @property
    def all_rollouts(self) -> list[str]:
        """References of all rollouts that the version was made of. Only the first are joined: a
        policy may have learned from several rounds, or from earlier rollouts again."""
        shown = str(self.rollouts.version.ref)
        inputs = self.store.version(self.ref).manifest.inputs
        named = [each.ref for each in inputs if each.role.partition(".")[0] == "rollouts"]
        return named if shown in named else [shown]

    @property
    def title(self) -> str:
        """The version, the policy that sampled, and the rewards, if they are another version. And
        what the rows are of, if they are not all that it was made of."""
        by = f" by {self.policy}" if self.policy else ""
        rewards = None if self.ref.kind == "rewards" else self.rewards
        shown, *others = self.all_rollouts
        only = f" (rows of {shown}, not of {', '.join(others)})" if others else ""
        return with_rewards(f"{self.ref}{by}", rewards) + only

    @property
    def score_name(self) -> str:
        """Column that rollouts are ranked by: `score`, `reward`, or empty."""
        if "evaluations" in self.shards:
            return "score"
        return "reward" if "rewards" in self.shards else ""

    @property
    def has_turns(self) -> bool:
        """True if the rollouts are rollouts/2."""
        return "turns" in schema_of(self.rollouts.version).names

    # -- rows

    def rows(self, positions: Sequence[int] | np.ndarray) -> list[dict[str, Any]]:
        """Return the rollouts at `positions` as plain values.

        Each row holds:
            position: Its place in the version.
            (columns of rollouts): All, except the token ids and `old_logprobs`.
            tokens: Number of completion tokens.
            turns: As `turn_fields` returns them, each with the media shown after it; with rewards/2
                also `turn_rewards`.
            prompt: The last message, or the rendered prompt.
            columns: The user's columns.
            reference: The first of `ANSWERS` that is present.
            reference_column: Its name, if it is a column by itself.
            advantage: The rollout's advantage, or the mean over its tokens if there is one per
                token.
            reward, parts, errors, extra, score, kept, drop_reason, mean_ratio.

        A name is absent if no joined version has it.
        """
        positions = np.asarray(positions, np.int64)
        rows = self.rollouts.at(positions)
        for position, row in zip(positions.tolist(), rows, strict=True):
            row["position"] = position
            row["tokens"] = len(row.pop("completion_ids"))
            for name in ("prompt_ids", "old_logprobs"):
                row.pop(name)
            if "turns" in row:
                row["turns"] = turn_fields(row["turns"])
                for column in MEDIA.values():
                    for file in row.pop(column, None) or ():
                        shown = row["turns"][file["turn"]].setdefault(column, [])
                        shown.append({"bytes": file["bytes"], "path": None})
        for kind in ("prompts", "rewards", "evaluations", "advantages"):
            if kind in self.shards:
                partners = self.shards[kind].at(self.places(kind, positions))
                for row, partner in zip(rows, partners, strict=True):
                    fields = prompt_fields(partner) if kind == "prompts" else partner
                    row.update((name, cell) for name, cell in fields.items() if name not in row)
        for row in rows:
            if isinstance(row.get("advantage"), list):
                row["advantage"] = statistics.fmean(row["advantage"]) if row["advantage"] else None
        return rows

    def table(self, positions: np.ndarray | None = None) -> pa.Table:
        """Return the rollouts at `positions` as one table, in this order; by default all.

        It holds every column of the rollouts, token ids too, and of the prompts, rewards,
        evaluations and advantages those that are not there yet; null for a rollout without a
        partner. `tokens` and `prompt` are added. Unlike in `rows`, `position` and `reference` are
        absent, and `turns`, `columns` and media are as they are stored. Columns that are in the
        same order are not copied.
        """
        if positions is None:
            positions = np.arange(len(self))
        table = self.rollouts.take(positions)
        table = table.append_column("tokens", pc.list_value_length(table["completion_ids"]))
        for kind in ("prompts", "rewards", "evaluations", "advantages"):
            if kind not in self.shards:
                continue
            partners = self.shards[kind].take(self.places(kind)[positions])
            if kind == "prompts":
                partners = partners.append_column("prompt", _last_messages(partners))
            for name in partners.column_names:
                if name not in table.column_names:
                    table = table.append_column(name, partners[name])
        index = table.schema.get_field_index("advantage")
        if index >= 0 and pa.types.is_list(table["advantage"].type):
            means = pa.array(_list_means(table["advantage"]), from_pandas=True)
            table = table.set_column(index, "advantage", means)
        return table

    def places(self, kind: str, positions: np.ndarray | None = None) -> np.ndarray:
        """Return int64 [positions]: the position of each rollout's partner of this kind, −1 if
        there is none. Default: for all rollouts."""
        if kind in self._places:
            places = self._places[kind]
            return places if positions is None else places[positions]
        shards = self.shards[kind]
        asked = np.arange(len(self)) if positions is None else positions
        # if no row is missing or moved, a partner lies as far through its version
        share = asked / max(len(self), 1)
        places = np.minimum((share * len(shards)).round(6).astype(np.int64), len(shards) - 1)
        ids = self.rollouts.take(asked, [shards.key])[shards.key]
        if not shards.take(places, [shards.key])[shards.key].equals(ids):
            all_ids = shards.column(shards.key).combine_chunks()
            found = pc.index_in(ids, value_set=all_ids)
            places = found.fill_null(-1).to_numpy().astype(np.int64)
        if positions is None:
            self._places[kind] = places
        return places

    def tokens(self, position: int) -> Tokens:
        """Return the completion at `position`, token by token."""
        columns = ["completion_ids", "old_logprobs"]
        columns += ["turns"] if self.has_turns else []
        (row,) = self.rollouts.at([position], columns)
        ids = row["completion_ids"]
        numbers = {"logprob": row["old_logprobs"]}
        columns = {"prox": "logprobs", "ref": "logprobs", "advantages": "advantage"}
        for kind, column in columns.items():
            if kind not in self.shards:
                continue
            place = self.places(kind, np.array([position]))
            values = self.shards[kind].at(place, [column])[0].get(column)
            if isinstance(values, float):
                values = [values] * len(ids)
            if values is None or len(values) != len(ids):
                continue
            if kind == "advantages":
                numbers["advantage"] = values
            else:
                numbers[f"ratio {kind}"] = np.exp(np.subtract(values, numbers["logprob"])).tolist()
        single = {"length": len(ids), "restart_ids": None, "observation_ids": []}
        return Tokens(ids, numbers, row.get("turns", [single]))

    # -- whole columns

    @cached_property
    def numbers(self) -> dict[str, Callable[[], np.ndarray]]:
        """Functions that read what can be sorted by and compared with a number, by name.

        Each returns [rollouts] float64, NaN for a rollout that has none. `logprob` is the mean over
        a rollout's tokens. `change` is |log mean_ratio|: how far training moved the rollout.
        """
        return {**self._own_numbers, **self._measured}

    @cached_property
    def _measured(self) -> dict[str, Callable[[], np.ndarray]]:
        """Those of `numbers` that are no columns of the user's."""
        functions: dict[str, Callable[[], np.ndarray]] = {}

        def add(name: str, kind: str, column: str, numbers_of: Callable = lambda cells: cells):
            functions[name] = lambda: self._aligned(kind, column, numbers_of)

        if "evaluations" in self.shards:
            add("score", "evaluations", "score")
        if "rewards" in self.shards:
            add("reward", "rewards", "reward")
            for part in self.shards["rewards"].schema.field("parts").type:
                part_of = partial(pc.struct_field, indices=part.name)
                add(f"part {part.name}", "rewards", "parts", part_of)
            add("errors", "rewards", "errors", _count_fields)
        add("tokens", "rollouts", "completion_ids", pc.list_value_length)
        add("logprob", "rollouts", "old_logprobs")
        add("sample_index", "rollouts", "sample_index")
        if self.has_turns:
            counts = cache(lambda: counts_of(self.rollouts.column("turns")))
            for name in COUNTS:
                functions[name] = lambda name=name: counts()[name].astype(np.float64)
        if "advantages" in self.shards:
            add("advantage", "advantages", "advantage")
            add("mean_ratio", "advantages", "mean_ratio")
            functions["change"] = lambda: np.abs(np.log(self.number("mean_ratio")))
        return {name: cache(function) for name, function in functions.items()}

    @cached_property
    def _own_numbers(self) -> dict[str, Callable[[], np.ndarray]]:
        """Functions that read the numbers among `own_columns`, by name, as in `numbers`."""
        to_double = pc.CastOptions.unsafe(pa.float64())  # large integers are rounded
        return {
            name: cache(lambda name=name: self.values(name).cast(options=to_double).to_numpy())
            for name, kind in self.own_columns.items()
            if not _is_text(kind)
        }

    @cached_property
    def own_columns(self) -> dict[str, pa.DataType]:
        """Types of the user's columns that hold one number, text or yes and no, by name; by
        `columns.NAME` if one of Quiver's has that name.

        A column that mixes 1 and 2.5 is stored as JSON; its type here is float64.
        """
        prompts = self.shards.get("prompts")
        if prompts is None:
            return {}
        kinds = {}
        for field in prompts.schema.field("columns").type:
            if field.name in OURS:
                continue
            kind = field.type.value_type if pa.types.is_dictionary(field.type) else field.type
            if isinstance(kind, Cells) and kind.storage_type == pa.string():
                with suppress(pa.ArrowInvalid):  # not numbers alone
                    kind = self._own_cells(field.name).type
            is_simple = _is_text(kind) or any(
                is_kind(kind)
                for is_kind in (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)
            )
            if is_simple:
                is_taken = field.name in (*_TEXTS, *_SHOWN_AS, *self._measured)
                kinds[f"{_OWN}{field.name}" if is_taken else field.name] = kind
        return kinds

    def _resolved(self, name: str) -> str:
        """Return the name of one of `numbers`, texts and `own_columns` that is meant."""
        for each in (name, name.removeprefix(_OWN)):
            if each in self.own_columns:
                return each
        return _SHOWN_AS.get(name, name)

    def _own_cells(self, name: str) -> pa.ChunkedArray:
        """Return a column of the user's, without dictionaries, and numbers in JSON as float64.
        [prompts]"""
        columns = self.shards["prompts"].column("columns")
        if columns.type.get_field_index(name) < 0:
            name = name.removeprefix(_OWN)
        column = pc.struct_field(columns, name)
        if isinstance(column.type, Cells):
            chunks = [chunk.storage for chunk in column.chunks]
            return pa.chunked_array(chunks, column.type.storage_type).cast(pa.float64())
        is_dictionary = pa.types.is_dictionary(column.type)
        return column.cast(column.type.value_type) if is_dictionary else column

    def values(self, name: str) -> pa.ChunkedArray:
        """Return a column of rollouts or one of `own_columns`. [rollouts]"""
        if name in _TEXTS:
            return self.rollouts.column(name)
        places = self.places("prompts")
        return self._own_cells(name).take(pa.array(places, mask=places < 0))

    def number(self, name: str) -> np.ndarray:
        """Return one of `numbers`. Raises ConfigError if the name is unknown."""
        name = self._resolved(name)
        if name not in self.numbers:
            raise ConfigError(
                f"column {quoted_name(name)}",
                f"expected one of {', '.join(self.numbers)}",
                next="name one of these",
            )
        with np.errstate(divide="ignore"):
            return self.numbers[name]()

    def order(self, selection: Selection) -> np.ndarray | range:
        """Return the positions of the selected rollouts in order. Rollouts without the number to
        sort by come last. Raises ConfigError if a condition cannot be read."""
        if selection == Selection():
            return range(len(self))
        is_meant = np.ones(len(self), bool)
        if selection.group:
            is_meant &= pc.equal(self.rollouts.column("group_id"), selection.group).to_numpy()
        for name, sign, text in _conditions(selection.where):
            is_meant &= self._holds(name, sign, text)
        if selection.search:
            is_meant &= self._contains(selection.search)
        positions = np.flatnonzero(is_meant)
        if selection.sort == "random":
            return np.random.default_rng().permutation(positions)
        if selection.sort:
            numbers = self.number(selection.sort)[positions]
            ranks = np.argsort(-numbers if selection.descending else numbers, kind="stable")
            return positions[ranks]  # NaN is sorted to the end
        return positions

    def groups(self, by: str = "group_id", rows: Sequence[int] | None = None) -> pa.Table:
        """Return a table with one row per prompt, in the order of the rollouts; or one per value of
        another text or own column. [groups]

        `rows`: positions of the rollouts that count. Default: all.

        Columns: `by`, `count`; `mean`, `std`, `min` and `max` of the reward (or score), null if
        nothing is scored; `position` of the group's first rollout. `std` divides by n, not n − 1.
        If the user's column has the name of another one here, it is called `columns.NAME`.
        """
        by = self._resolved(by)
        names = [*self._text_names, *self.own_columns]
        if by not in names and f"{_OWN}{by}" in names:
            by = f"{_OWN}{by}"  # a number of Quiver's, for which there are no means
        if by not in names:
            problem = f"expected one of {', '.join(map(printable, names))}"
            raise ConfigError(f"column {quoted_name(by)}", problem, next="name one of these")
        numbers = self.number(self.score_name) if self.score_name else [None] * len(self)
        columns = {
            "key": self.values(by),
            "number": pa.array(numbers, pa.float64(), from_pandas=True),
            "position": pa.array(np.arange(len(self))),
        }
        table = pa.table(columns)
        grouped = (
            (table if rows is None else table.take(np.asarray(rows)))
            .group_by("key", use_threads=False)
            .aggregate(
                [
                    ([], "count_all"),
                    ("number", "mean"),
                    ("number", "stddev", pc.VarianceOptions(ddof=0)),
                    ("number", "min"),
                    ("number", "max"),
                    ("position", "min"),
                ]
            )
        )
        names = ["count", "mean", "std", "min", "max", "position"]
        title = f"columns.{by}" if by in names else by
        return grouped.rename_columns([title, *names]).sort_by("position")

    def _aligned(self, kind: str, name: str, numbers_of: Callable[[Any], Any]) -> np.ndarray:
        """Return `numbers_of` a column as [rollouts] float64, in the order of the rollouts; of
        lists their means."""
        column = numbers_of(self.shards[kind].column(name))
        numbers = _list_means(column) if pa.types.is_list(column.type) else column.to_numpy()
        numbers = numbers.astype(np.float64)
        if kind == "rollouts":
            return numbers
        return np.append(numbers, np.nan)[self.places(kind)]  # place −1 is the NaN

    @property
    def _text_names(self) -> tuple[str, ...]:
        return _TEXTS if self.has_turns else _TEXTS[:-1]

    def _holds(self, name: str, sign: str, text: str) -> np.ndarray:
        """Return [rollouts] bool: true if a condition such as `reward < 0.5` holds."""
        condition = f"condition {printable(f'{name} {sign} {text}')}"
        name = self._resolved(name)
        own = [each for each, kind in self.own_columns.items() if _is_text(kind)]
        text_names = [*self._text_names, *own]
        if name in text_names and sign in ("=", "!="):
            words = _WORDS.get(name, (text,))
            if text not in words:
                raise ConfigError(condition, f"expected one of {', '.join(words)}", next=_HOW)
            is_equal = pc.equal(self.values(name), text).fill_null(False).to_numpy()
            return is_equal if sign == "=" else ~is_equal
        if self.own_columns.get(name) == pa.bool_():
            text = {"true": "1", "false": "0"}.get(text, text)
        try:
            number = float(text)
        except ValueError:
            raise ConfigError(
                condition,
                f"expected a number, found {printable(text)}; texts are {', '.join(text_names)}",
                next=_HOW,
            ) from None
        compare = _COMPARE[sign]
        numbers = self.number(name)
        if self.numbers[name] is not self._own_numbers.get(name):
            # rewards are float32, so 0.1 in a filter must become the float32 of a reward of 0.1
            return compare(numbers.astype(np.float32), np.float32(text))
        values = self.values(name)
        if number.is_integer() and not pa.types.is_floating(values.type):
            number = int(Decimal(text))
        is_there = values.is_valid().to_numpy()
        holds = np.full(len(values), sign == "!=")
        with np.errstate(over="ignore"):  # a number too large for the column's type is infinite
            # NumPy compares a plain number in the column's own type, integers exactly
            holds[is_there] = compare(values.drop_null().to_numpy(), number)
        return holds

    def _contains(self, text: str) -> np.ndarray:
        """Return [rollouts] bool: true if the completion, a turn, an observation or the prompt
        contains `text`."""
        completions = self.rollouts.column("completion_text")
        is_there = pc.match_substring(completions, text, ignore_case=True).to_numpy()
        if self.has_turns:
            column = self.rollouts.column("turns")
            lengths = pc.list_value_length(column).to_numpy()
            turns = pc.list_flatten(column)
            for name in ("text", "observation"):
                texts = pc.struct_field(turns, name)
                matches = pc.match_substring(texts, text, ignore_case=True).to_numpy()
                is_there = is_there | (sum_of_each(matches, lengths) > 0)
        if prompts := self.shards.get("prompts"):
            matches = pc.match_substring(prompts.column("prompt_text"), text, ignore_case=True)
            is_there = is_there | np.append(matches, False)[self.places("prompts")]  # −1: False
        return is_there


def _conditions(where: str) -> Iterator[tuple[str, str, str]]:
    """Yield name, sign and text of each condition. Raises ConfigError."""
    rest = where.lstrip(" \t\n,")
    while rest:
        match = _CONDITION.match(rest)
        if not match:
            raise ConfigError(
                f"condition {printable(rest.partition(',')[0])}",
                "expected COLUMN, one of < <= > >= = !=, and a number or text",
                next=_HOW,
            )
        name, sign, text = match.groups()
        yield _unquoted(name), sign.replace("==", "="), _unquoted(text)
        rest = rest[match.end() :].lstrip(" \t\n,")


def _unquoted(text: str) -> str:
    return text[1:-1] if re.fullmatch(_QUOTED, text) else text


def prompt_fields(row: dict[str, Any]) -> dict[str, Any]:
    """Return `prompt`, `columns`, `reference` with the name of its column, and the media of a row
    of prompts, each only if the row has it. An empty row gives an empty dict."""
    if not row:
        return {}
    columns = {name: cell for name, cell in (row["columns"] or {}).items() if name not in OURS}
    messages = row["messages"]
    fields = {
        "prompt": messages[-1]["content"] if messages else row["prompt_text"],
        "columns": columns,
    }
    name = next((name for name in ANSWERS if columns.get(name) is not None), None)
    if name is not None:
        fields |= {"reference": columns[name], "reference_column": name}
    elif isinstance(columns.get("reward_model"), dict):
        fields["reference"] = columns["reward_model"].get("ground_truth")
    return fields | {name: row[name] for name in MEDIA.values() if row.get(name)}


def rows(store: Store, ref: str | Ref) -> pa.Table:
    """Return the rollouts behind a version and all that joins them as one table: `Joined.table`. Of
    several versions of rollouts behind a policy, these are the first."""
    return open_joined(store, ref).table()


def with_rewards(name: str, rewards: str | None) -> str:
    """Return `arith/rollouts@3 with arith/rewards@4`; the name alone without rewards."""
    return f"{name} with {rewards}" if rewards else name


def open_joined(store: Store, ref: str | Ref, most_bytes: int | None = None) -> Joined:
    """Open the rollouts behind `ref` and all that joins them.

    Args:
        most_bytes: If set, only that much of each version is read, from its first shards.

    Raises LineageError if there are no rollouts.
    """
    version = store.open(ref)
    manifest = version.manifest
    line_of_run = cache(partial(_own_line, store))

    def behind(
        kind: str, source: Version | None, made_as: str = "rollouts", model: str = ""
    ) -> Version | None:
        """Return the version of `kind` that belongs to `version`: itself, the one that it names, or
        else one that was made from `source`."""
        if manifest.kind == kind and (not model or manifest.model(model)):
            return version
        if entry := manifest.input(model or kind):
            return _named(store, manifest, entry.ref, kind)
        found = _made_from(store, source, kind, made_as, model) if source else []
        if len(found) > 1:  # manifests of a whole line are read
            line = line_of_run(source.ref.run)
            found.sort(key=lambda one: (_first_use(line, one), is_of_sweep(one.manifest.note)))
        return found[0] if found else None

    rollouts = behind("rollouts", version if manifest.kind == "prompts" else None, "prompts")
    if rollouts is None:
        raise LineageError(
            str(version.ref), "it was not made from rollouts", next=f"quiver show {version.ref}"
        )
    rewards = behind("rewards", rollouts)
    if manifest.kind == "policy" and manifest.metrics.get("advantages"):
        advantages = _named(store, manifest, manifest.metrics["advantages"], "advantages")
    elif rewards:
        advantages = behind("advantages", rewards, "rewards")
    else:
        advantages = behind("advantages", rollouts)
    prompts = rollouts.manifest.input("prompts")
    versions = {
        "rollouts": rollouts,
        "prompts": _named(store, rollouts.manifest, prompts.ref, "prompts") if prompts else None,
        "rewards": rewards,
        "evaluations": behind("evaluations", None),
        "advantages": advantages,
        "prox": behind("logprobs", rollouts, model="prox"),
        "ref": behind("logprobs", rollouts, model="ref"),
    }
    keys = {"prompts": "group_id"}
    shards = {
        kind: Shards(joined, keys.get(kind, "rollout_id"), most_bytes)
        for kind, joined in versions.items()
        if joined is not None
    }
    return Joined(store, version.ref, shards)


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _named(store: Store, manifest: Manifest, ref: str, kind: str) -> Version | None:
    """Return a version that `manifest` names; None if it is gone, or its rows are.

    Raises LineageError if it is a version of another kind.
    """
    try:
        version = store.open(ref)
    except LineageError:
        return None
    if version.ref.kind != kind:
        problem = f"its {kind} must be a version of {kind}, found {version.ref}"
        raise LineageError(manifest.ref, problem, next=f"quiver lineage {manifest.ref}")
    return version


def _made_from(store: Store, source: Version, kind: str, role: str, model: str) -> list[Version]:
    """Return the versions of `kind` in the run of `source` that were made from it as `role`, the
    newest first. With `model`, only versions made by a model of this role count."""
    versions = []
    for ref, summary in reversed(store.summaries(source.ref.run, kind)):
        if summary.error or str(source.ref) not in summary.sources:
            continue
        version = store.version(ref)
        inputs = version.manifest.inputs
        roles = {each.role.partition(".")[0] for each in inputs if each.ref == str(source.ref)}
        if role in roles and (not model or version.manifest.model(model)):
            versions.append(version)
    return versions


def _own_line(store: Store, run: str) -> list[Manifest]:
    """Return the policies of the run's own line, the oldest first; none if they cannot be read."""
    manifests = Manifests(store)
    with suppress(LineageError, CorruptError):
        newest = manifests.store.open(ends_of(store, run)[0]).manifest
        return list(manifests.line(newest))[::-1]
    return []


def _first_use(policies: Sequence[Manifest], version: Version) -> int:
    """Return the index of the first policy that was made of `version`; their number if none was."""
    ref = str(version.ref)
    for index, policy in enumerate(policies):
        sources = [entry.ref for entry in policy.inputs]
        if ref in (*sources, policy.metrics.get("advantages")):
            return index
    return len(policies)


def _count_fields(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return [rows] float64: the number of fields of a struct that are not null."""
    counts = [pc.cast(field.is_valid(), pa.float64()) for field in column.flatten()]
    return reduce(pc.add, counts, pa.array(np.zeros(len(column))))


def _last_messages(prompts: pa.Table) -> pa.ChunkedArray:
    """Return [prompts] the content of each prompt's last message, or its text without messages."""
    messages = prompts["messages"].combine_chunks()
    lengths = pc.list_value_length(messages).fill_null(0).to_numpy(zero_copy_only=False)
    places = pa.array(np.cumsum(lengths) - 1, mask=lengths == 0)
    contents = pc.struct_field(pc.list_flatten(messages), "content")
    return pc.coalesce(contents.take(places), prompts["prompt_text"])


def _list_means(column: pa.ChunkedArray) -> np.ndarray:
    """Return [rows] float64: the mean of each list; NaN for an empty list or null."""
    means = [np.zeros(0)]
    for chunk in column.chunks:
        lengths = pc.list_value_length(chunk).fill_null(0).to_numpy(False).astype(np.int64)
        numbers = chunk.flatten().to_numpy(zero_copy_only=False)
        sums = np.append(0.0, np.cumsum(numbers, dtype=np.float64))
        ends = np.cumsum(lengths)
        means.append((sums[ends] - sums[ends - lengths]) / np.where(lengths, lengths, np.nan))
    return np.concatenate(means)
