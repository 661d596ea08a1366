"""Two versions side by side: pairs of rollouts by id, or by prompt and sample.

paired = pair(store, "arith/rewards@1", "arith/rewards@2")       # the same rollouts, scored twice
paired = pair(store, "arith/policy@0", "arith/policy@5")         # by their newest evaluations
paired.first.order(Selection(sort="change", descending=True))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from quiver.schemas.errors import LineageError
from quiver.schemas.refs import Ref
from quiver.stages.common.store import Store
from quiver.stages.evaluate.comparison import pair_prompts
from quiver.stages.report.joined import Joined, open_joined

from ..commands.compare import find_evaluations


@dataclass
class Paired:
    """Rollouts and their partners in a second version, if any.

    With b the second and a the first reward or score of a pair, `first.number("gain")` is b − a and
    `first.number("change")` is |b − a|.
    """

    first: Joined
    second: Joined | None = None
    """The second version. None: only one version is shown."""
    places: np.ndarray | None = None
    """[rollouts of first] int64: row of the partner in `second`; −1 if there is none."""

    def partners(self, positions: list[int]) -> list[dict[str, Any]]:
        """Return the rows of `second` that belong to these of `first`; {} if there is no
        partner."""
        if self.second is None:
            return [{} for _ in positions]
        places = self.places[positions]
        rows = iter(self.second.rows(places[places >= 0]))
        return [next(rows) if place >= 0 else {} for place in places]


def open_paired(store: Store, first: str, second: str | None) -> Paired:
    """Open one version, or two as pairs. Raises LineageError if they cannot be paired."""
    return pair(store, first, second) if second else Paired(open_joined(store, first))


def pair(store: Store, first: str, second: str) -> Paired:
    """Pair two versions by the ids of their rollouts, else by prompt and sample.

    Policies are represented by their evaluations, chosen as in `quiver compare`. Raises
    LineageError if nothing pairs.
    """
    refs: list[Ref] = [store.resolve(ref) for ref in (first, second)]
    if all(ref.kind == "policy" for ref in refs):
        refs = [version.ref for version in find_evaluations(store, *map(str, refs))]
    a, b = (open_joined(store, ref) for ref in refs)
    places = b.rollouts.find_all(a.rollouts.column("rollout_id"))
    if not np.any(places >= 0):
        names = pair_prompts(store, a.rollouts.version, b.rollouts.version)
        keys_a, keys_b = (_samples(*each) for each in zip((a, b), names, strict=True))
        matches = pc.index_in(keys_a, value_set=keys_b.combine_chunks())
        places = matches.fill_null(-1).to_numpy().astype(np.int64)
    if not np.any(places >= 0):
        raise LineageError(
            f"{refs[0]} {refs[1]}",
            "no rollout of one has the prompt and sample of one of the other",
            next="name two versions on the same prompts",
        )

    def gain() -> np.ndarray:
        after = np.append(b.number(b.score_name), np.nan)
        return after[places] - a.number(a.score_name)

    if a.score_name and b.score_name:
        a.added = {"gain": gain, "change": lambda: np.abs(a.number("gain"))}
    return Paired(a, b, places)


def _samples(joined: Joined, names: Any) -> pa.ChunkedArray:
    """Return each rollout's prompt name and sample index as one string. Shape: [rollouts]."""
    groups = joined.rollouts.column("group_id")
    places = pc.index_in(groups, value_set=pa.array(list(names)))
    prompts = pa.array(list(names.values())).take(places.combine_chunks())
    samples = pc.cast(joined.rollouts.column("sample_index"), pa.string()).combine_chunks()
    return pa.chunked_array([pc.binary_join_element_wise(prompts, samples, " ")])
