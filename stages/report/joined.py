"""Join rollouts with their prompt, reward, parts, errors, score, advantage and ratio, by id. Look
here for the rows of `quiver show` and `quiver view`.

Rows are read page by page; sorting, filters and search read whole columns.

Any version of the chain may be named: rollouts, rewards, logprobs, advantages, updates,
evaluations, a policy, or prompts. The rollouts behind it are joined with what belongs to that
version. For every other kind, the newest version made from these rollouts is taken. Advantages
are the newest made from the rewards that are shown.

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
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from quiver.schemas.errors import ConfigError, LineageError, printable, quoted_name
from quiver.schemas.manifest import Manifest
from quiver.schemas.prompts import OURS
from quiver.schemas.refs import Ref
from quiver.stages.common.episodes import COUNTS, counts_of, sum_of_each
from quiver.stages.common.store import Store, Version

from .episodes import told_of_turns
from .shards import Shards, columns_of

ANSWERS = ("answer", "reference", "solution", "target", "label", "ground_truth", "expected")
"""User columns that may hold the reference answer; the first present one is used. Without one, the
field `ground_truth` of a column `reward_model` is used, as in verl's layout."""
_CONDITION = re.compile(r"\s*([\w.\- ]+?)\s*(<=|>=|!=|=|<|>)\s*(.+?)\s*")
_COMPARE = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "=": operator.eq,
    "!=": operator.ne,
}
_TEXTS = ("finish_reason", "group_id", "rollout_id")
"""Columns of rollouts that a filter compares as text."""


@dataclass(frozen=True)
class Selection:
    """A choice of rollouts and their order."""

    sort: str = ""
    """One of `Joined.numbers`, or `random`. Empty: the stored order."""
    descending: bool = False
    where: str = ""
    """Conditions such as `reward < 0.5, finish_reason = length`; all must hold."""
    search: str = ""
    """Text that the completion, the prompt, a turn or an observation must contain, in any case."""


@dataclass(frozen=True)
class Tokens:
    """One completion, token by token; every list has one entry per token."""

    ids: list[int]
    logprobs: list[float]
    """Log-probabilities under the policy that sampled, in nats."""
    ratios: dict[str, list[float]]
    """π of another model / π of the sampling policy, by role of that model: `prox`, `ref`."""
    advantages: list[float] | None
    """Advantage per token. None if the rollout has none."""
    turns: list[dict[str, Any]] | None = None
    """Turns in the form of rollouts/2, with their observations. None for other rollouts."""


@dataclass
class Joined:
    """The rollouts behind a version, with the shards of every other version joined to them."""

    store: Store
    ref: Ref
    """The version that was asked for."""
    rollouts: Shards
    prompts: Shards | None = None
    rewards: Shards | None = None
    evaluation: Shards | None = None
    advantages: Shards | None = None
    logprobs: dict[str, Shards] | None = None
    """Logprobs by the role of the model that computed them: `prox`, `ref`."""
    added: dict[str, Callable[[], np.ndarray]] = field(default_factory=dict)
    """Functions for further numbers of the rollouts, by name, each [rollouts] float64."""

    def __len__(self) -> int:
        return len(self.rollouts)

    @property
    def sources(self) -> list[str]:
        """References of all joined versions."""
        shards = [self.rollouts, self.prompts, self.rewards, self.evaluation, self.advantages]
        shards += (self.logprobs or {}).values()
        return [str(each.version.ref) for each in shards if each is not None]

    @property
    def policy(self) -> str | None:
        """Reference of the policy that sampled."""
        model = self.rollouts.version.manifest.model("policy")
        return model.ref if model else None

    @property
    def score_name(self) -> str:
        """Column that rollouts are ranked by: `score`, `reward`, or empty."""
        if self.evaluation is not None:
            return "score"
        return "" if self.rewards is None else "reward"

    @property
    def has_turns(self) -> bool:
        """True if the rollouts are rollouts/2."""
        return "turns" in columns_of(self.rollouts.version)

    # -- rows

    def rows(self, positions: Sequence[int] | np.ndarray) -> list[dict[str, Any]]:
        """Return the rollouts at `positions` as plain values.

        Each row holds:
            position: Its place in the version.
            (columns of rollouts): All, except the token ids and `old_logprobs`.
            tokens: Number of completion tokens.
            turns: As `told_of_turns` returns them; with rewards/2 also `turn_rewards`.
            prompt: The last message, or the rendered prompt.
            columns: The user's columns.
            reference: The first of `ANSWERS` that is present.
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
                row["turns"] = told_of_turns(row["turns"])
        ids = [row["rollout_id"] for row in rows]
        near = positions / max(len(self), 1)
        if self.prompts is not None:
            groups = [row["group_id"] for row in rows]
            prompts = self.prompts.at(self.prompts.find(groups, near))
            for row, prompt in zip(rows, prompts, strict=True):
                row.update(told_of_prompt(prompt))
        for shards in (self.rewards, self.evaluation, self.advantages):
            if shards is not None:
                partners = shards.at(shards.find(ids, near))
                for row, partner in zip(rows, partners, strict=True):
                    row.update((name, cell) for name, cell in partner.items() if name not in row)
        for row in rows:
            if isinstance(row.get("advantage"), list):
                row["advantage"] = statistics.fmean(row["advantage"]) if row["advantage"] else None
        return rows

    def tokens(self, position: int) -> Tokens:
        """Return the completion at `position`, token by token."""
        columns = ["rollout_id", "completion_ids", "old_logprobs"]
        columns += ["turns"] if self.has_turns else []
        (row,) = self.rollouts.at([position], columns)
        near = [position / len(self)]
        logprobs = np.array(row["old_logprobs"], np.float64)
        ratios = {}
        for role, shards in (self.logprobs or {}).items():
            (scored,) = shards.at(shards.find([row["rollout_id"]], near), ["logprobs"])
            if len(scored.get("logprobs", ())) == len(logprobs):
                ratios[role] = np.exp(np.array(scored["logprobs"]) - logprobs).tolist()
        advantages = None
        if self.advantages is not None:
            found_at = self.advantages.find([row["rollout_id"]], near)
            (weighed,) = self.advantages.at(found_at, ["advantage"])
            advantage = weighed.get("advantage")
            if isinstance(advantage, float):
                advantages = [advantage] * len(logprobs)
            elif advantage is not None and len(advantage) == len(logprobs):
                advantages = advantage
        ids = row["completion_ids"]
        return Tokens(ids, row["old_logprobs"], ratios, advantages, row.get("turns"))

    # -- whole columns

    @property
    def numbers(self) -> list[str]:
        """Names of the columns that can be sorted by and compared with a number."""
        names = [] if self.evaluation is None else ["score"]
        if self.rewards is not None:
            names += ["reward", *(f"part {name}" for name in self._part_names), "errors"]
        names += ["tokens", "logprob", "sample_index", *(COUNTS if self.has_turns else ())]
        if self.advantages is not None:
            names += ["advantage", "mean_ratio", "change"]
        return [*names, *(name for name in self.added if name not in names)]

    def number(self, name: str) -> np.ndarray:
        """Return one of `numbers` as [rollouts] float64, NaN for a rollout that has none.

        `logprob` is the mean over a rollout's tokens. `change` is |log mean_ratio|: how far
        training moved the rollout. Raises ConfigError if the name is unknown.
        """
        if name not in self.numbers:
            raise ConfigError(
                f"column {quoted_name(name)}",
                f"expected one of {', '.join(self.numbers)}",
                next="name one of these",
            )
        if name not in self._numbers:
            self._numbers[name] = self._read_number(name)
        return self._numbers[name]

    def order(self, selection: Selection) -> np.ndarray | range:
        """Return the positions of the selected rollouts in order. Rollouts without the number to
        sort by come last. Raises ConfigError if a condition cannot be read."""
        if selection == Selection():
            return range(len(self))
        is_meant = np.ones(len(self), bool)
        for condition in filter(str.strip, selection.where.split(",")):
            is_meant &= self._holds(condition)
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

    def groups(self) -> pa.Table:
        """Return a table with one row per prompt, in the order of the rollouts. [groups]

        Columns: `group_id`, `count`; `mean`, `std`, `min` and `max` of the reward (or score), null
        if nothing is scored; `position` of the group's first rollout. `std` divides by n, not n −
        1.
        """
        numbers = np.full(len(self), np.nan)
        if self.score_name:
            numbers = self.number(self.score_name)
        columns = {
            "group_id": self.rollouts.column("group_id"),
            "number": pa.array(numbers, from_pandas=True),
            "position": pa.array(np.arange(len(self))),
        }
        table = pa.table(columns).group_by("group_id", use_threads=False)
        grouped = table.aggregate(
            [
                ([], "count_all"),
                ("number", "mean"),
                ("number", "stddev", pc.VarianceOptions(ddof=0)),
                ("number", "min"),
                ("number", "max"),
                ("position", "min"),
            ]
        )
        names = ["group_id", "count", "mean", "std", "min", "max", "position"]
        return grouped.rename_columns(names).sort_by("position")

    @cached_property
    def _numbers(self) -> dict[str, np.ndarray]:
        return {}

    @cached_property
    def _part_names(self) -> list[str]:
        (row,) = self.rewards.at([0], ["parts"]) if len(self.rewards) else [{"parts": {}}]
        return list(row["parts"])

    def _read_number(self, name: str) -> np.ndarray:
        if name in self.added:
            return self.added[name]()
        if name == "tokens":
            lengths = pc.list_value_length(self.rollouts.column("completion_ids"))
            return lengths.to_numpy().astype(np.float64)
        if name in COUNTS:
            counts = counts_of(self.rollouts.column("turns"))
            self._numbers |= {name: each.astype(np.float64) for name, each in counts.items()}
            return self._numbers[name]
        if name == "change":
            with np.errstate(divide="ignore"):
                return np.abs(np.log(self.number("mean_ratio")))
        if name in ("logprob", "sample_index"):
            shards = self.rollouts
            column = shards.column("old_logprobs" if name == "logprob" else name)
        elif name in ("advantage", "mean_ratio", "score"):
            shards = self.evaluation if name == "score" else self.advantages
            column = shards.column(name)
        elif name == "errors":
            shards = self.rewards
            column = pa.array(np.zeros(len(shards)))
            for errors in shards.column("errors").flatten():
                column = pc.add(column, pc.cast(errors.is_valid().combine_chunks(), pa.float64()))
        else:
            shards = self.rewards
            column = shards.column("reward" if name == "reward" else "parts")
            if name != "reward":
                column = pc.struct_field(column, name.removeprefix("part "))
        numbers = _list_means(column) if pa.types.is_list(column.type) else column.to_numpy()
        if shards is self.rollouts:
            return numbers.astype(np.float64)
        # in the order of the rollouts; place −1 (no such row) picks the appended NaN
        places = shards.find_all(self.rollouts.column("rollout_id"))
        return np.append(numbers.astype(np.float64), np.nan)[places]

    def _holds(self, condition: str) -> np.ndarray:
        """Return [rollouts] bool: true if a condition such as `reward < 0.5` holds."""
        match = _CONDITION.fullmatch(condition)
        if not match:
            raise ConfigError(
                f"condition {printable(condition)}",
                "expected COLUMN, one of < <= > >= = !=, and a number or text",
                next="write it as in: reward < 0.5, finish_reason = length",
            )
        name, sign, text = match.groups()
        text_names = [*_TEXTS, *(["end_reason"] if self.has_turns else [])]
        if name in text_names and sign in ("=", "!="):
            is_equal = pc.equal(self.rollouts.column(name), text).to_numpy()
            return is_equal if sign == "=" else ~is_equal
        try:
            number = np.float32(text)
        except ValueError:
            raise ConfigError(
                f"condition {printable(condition)}",
                f"expected a number, found {printable(text)}; texts are {', '.join(text_names)}",
                next="write it as in: reward < 0.5, finish_reason = length",
            ) from None
        # rewards are float32, so 0.1 in a filter must become the float32 that a reward of 0.1 is
        return _COMPARE[sign](self.number(name).astype(np.float32), number)

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
        if self.prompts is not None:
            asked = self.prompts.column("prompt_text")
            matches = pc.match_substring(asked, text, ignore_case=True)
            groups = self.prompts.column("group_id").filter(matches).combine_chunks()
            mine = self.rollouts.column("group_id")
            is_there = is_there | pc.is_in(mine, value_set=groups).to_numpy()
        return is_there


def told_of_prompt(row: dict[str, Any]) -> dict[str, Any]:
    """Return `prompt`, `columns`, `reference` and `images` of a row of prompts, each only if the
    row has it. An empty row gives an empty dict."""
    if not row:
        return {}
    columns = {name: cell for name, cell in (row["columns"] or {}).items() if name not in OURS}
    messages = row["messages"]
    told = {
        "prompt": messages[-1]["content"] if messages else row["prompt_text"],
        "columns": columns,
    }
    name = next((name for name in ANSWERS if columns.get(name) is not None), None)
    if name is not None:
        told["reference"] = columns[name]
    elif isinstance(columns.get("reward_model"), dict):
        told["reference"] = columns["reward_model"].get("ground_truth")
    if row.get("images"):
        told["images"] = row["images"]
    return told


def open_joined(store: Store, ref: str | Ref) -> Joined:
    """Open the rollouts behind `ref` and all that joins them. Raises LineageError if none exist."""
    version = store.open(ref)
    manifest = version.manifest
    roles: dict[str, Version | None] = {manifest.kind: version}
    if manifest.kind == "prompts":
        roles["rollouts"] = _newest(store, version, "rollouts", "prompts")
    elif manifest.kind != "rollouts":
        roles["rollouts"] = _named(store, manifest, "rollouts")
    rollouts = roles["rollouts"]
    if rollouts is None:
        raise LineageError(
            str(version.ref), "no rollouts are behind it", next=f"quiver show {version.ref}"
        )
    if manifest.kind == "policy" and "advantages" in manifest.metrics:
        advantages = _opened(store, manifest.metrics["advantages"])
        is_one = advantages is not None and advantages.ref.kind == "advantages"
        roles["advantages"] = advantages if is_one else None
    roles.setdefault("prompts", _named(store, rollouts.manifest, "prompts"))
    if "rewards" not in roles and manifest.input("rewards"):
        roles["rewards"] = _named(store, manifest, "rewards")
    elif "rewards" not in roles:
        roles["rewards"] = _newest(store, rollouts, "rewards")
    if "advantages" not in roles:
        rewards = roles["rewards"]
        roles["advantages"] = (
            _newest(store, rewards, "advantages", "rewards")
            if rewards
            else _newest(store, rollouts, "advantages")
        )
    logprobs = {}
    for role in ("prox", "ref"):
        scored = _named(store, manifest, role, "logprobs")
        if manifest.kind == "logprobs" and manifest.model(role):
            scored = version
        scored = scored or _newest(store, rollouts, "logprobs", model=role)
        if scored is not None:
            logprobs[role] = Shards(scored)

    def shards(kind: str, key: str = "rollout_id") -> Shards | None:
        return Shards(roles[kind], key) if roles.get(kind) else None

    return Joined(
        store=store,
        ref=version.ref,
        rollouts=Shards(rollouts),
        prompts=shards("prompts", "group_id"),
        rewards=shards("rewards"),
        evaluation=shards("evaluations"),
        advantages=shards("advantages"),
        logprobs=logprobs,
    )


def _opened(store: Store, ref: str | None) -> Version | None:
    """Return the version if it exists and its rows have not expired."""
    with suppress(LineageError):
        return store.open(ref) if ref else None
    return None


def _named(store: Store, manifest: Manifest, role: str, kind: str = "") -> Version | None:
    """Return the input of `manifest` that has this role.

    Args:
        kind: Expected kind. Default: the kind with the role's name.

    Raises LineageError if the input is a version of another kind.
    """
    entry = manifest.input(role)
    version = _opened(store, entry.ref if entry else None)
    if version is not None and version.ref.kind != (kind or role):
        next = f"quiver lineage {manifest.ref}"
        raise LineageError(manifest.ref, f"its {role} are {version.ref}", next=next)
    return version


def _newest(
    store: Store, source: Version, kind: str, role: str = "rollouts", model: str = ""
) -> Version | None:
    """Return the newest version of `kind` in the run of `source` that was made from it as `role`.
    With `model`, only versions made by a model of this role count."""
    for version in _made_after(store, source, kind):
        entries = [entry for entry in version.manifest.inputs if entry.ref == str(source.ref)]
        roles = {entry.role.partition(".")[0] for entry in entries}
        if role in roles and (not model or version.manifest.model(model)):
            return version
    return None


def _made_after(store: Store, source: Version, kind: str) -> Iterator[Version]:
    """Yield versions of `kind` in the same run that are not older than `source`, newest first."""
    run = source.ref.run
    for entry in reversed(store.index(run, kind).entries()):
        if not entry.error and entry.created >= source.manifest.created:
            yield store.version(Ref(run, kind, entry.number))


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
