"""The flow `nightly`: new prompts → improve the policy in use → measure both → promote the new one,
or keep the old.

A night starts from the policy that bears the tag, whatever became of those in between; so what was
rejected is trained on no further, and stays in the store, named with the reason in the tag's
journal. What is new each night: `[data]` with a `limit` gives the next rows that no decided night
has taken; `{night}` anywhere in [data] is the night's name. A night that is started again goes on
where it stopped; one that is decided stays so. Two that end at once can not both promote: the tag
moves by compare-and-swap from the policy that was compared with.

    nightly(recipe)                           # tonight, named by its date in UTC
    nightly(recipe, night="2026-11-20")
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

from prefect import flow
from prefect.runtime import flow_run

from quiver.schemas.errors import printable
from quiver.schemas.refs import check_name
from quiver.stages.common.config import parse
from quiver.stages.common.runtime.prewarm import end_prewarmed
from quiver.stages.common.runtime.runner import Outcome
from quiver.stages.common.store import Store
from quiver.stages.common.store.tags import Entry, previous

from .approval import Answer, Candidate, require_server, reviewed
from .evaluation import measure, require_held_out
from .pages import link_report
from .pages.events import announce_move, payload_of
from .placement import check_placement
from .post_train import choose_reference, improve
from .promotion import Promotion, decide, entry_of, judge, roll_back
from .recipe import Data, Recipe
from .tasks import perform, tagged

NIGHT = "{night}"
"""In [data]: the night's name."""
log = logging.getLogger("quiver")


@dataclass(frozen=True)
class Night:
    """What one night is made of."""

    name: str
    recipe: Recipe
    """with the night's name filled in; `iterations` is the number of its last one, counted over all
    nights"""
    store: Store
    first: int
    """number of its first iteration"""

    @property
    def promotion(self) -> Promotion:
        """The recipe's section."""
        return self.recipe.promotion

    @property
    def key(self) -> str:
        """What its decision is called in the tag's journal."""
        return f"night {self.name}"


def _run_name() -> str:
    return (
        f"{flow_run.parameters['recipe'].run} · nightly {_name(flow_run.parameters.get('night'))}"
    )


def _name(night: str | None) -> str:
    """The night's name: as given, or the date in UTC for which the run was scheduled."""
    return check_name(night or f"{flow_run.scheduled_start_time:%Y-%m-%d}", "night")


@flow(name="nightly", flow_run_name=_run_name, persist_result=False)
def nightly(recipe: Recipe, night: str | None = None) -> dict[str, Any]:
    """Improve the policy in use `iterations` times, and promote the result if it is better on the
    held-out rows.

    Args:
        recipe: The whole recipe, as a TOML file has it.
        night: Name of what is decided once. None: the date in UTC for which the run is scheduled.

    Returns:
        What `quiver nightly --json` prints: the night, the decision with its numbers, and its
        iterations as `quiver run` has them.
    """
    tonight = begin(recipe, _name(night))
    try:
        with tagged(recipe):
            entry, iterations = _spent(tonight)
            link_report(recipe)
    finally:
        end_prewarmed()
    log.info(
        "%-22s %s: %s",
        f"nightly {tonight.name}",
        entry.about["decision"],
        printable(entry.why, 1000),
    )
    return {
        "run": recipe.run,
        "tag": recipe.promotion.tag,
        **payload_of(entry),
        "iterations": iterations,
    }


def _spent(night: Night) -> tuple[Entry, list[dict[str, Any]]]:
    """What is decided of the night, and its iterations; none where that was decided before."""
    recipe, promotion = night.recipe, night.promotion
    entry = entry_of(night.store, recipe.run, promotion, night.key)
    if entry:
        return entry, []
    recipe = recipe.resolved()
    night = replace(night, recipe=recipe)
    base = perform(recipe, "import policy", "policy", recipe.policy, {}, recipe.run, False).ref
    before = _in_use(night, base)
    baseline = measure(recipe, before, night.first - 1)
    iterations = _improved(night, before, base)
    return _decided(night, before, baseline, iterations[-1]), iterations


def begin(recipe: Recipe, name: str) -> Night:
    """The night `name` of `recipe`. ConfigError where there are no held-out rows, or nobody could
    approve."""
    require_held_out(recipe)
    check_placement(recipe)
    if recipe.promotion.approval:
        require_server()
    # a user's own algorithm is told what is wrong with it before anything is made
    recipe.optimize_config().resolved()
    store = Store(recipe.store)
    taken = [
        entry.about.get("iteration", 0) for entry in store.history(recipe.run, recipe.promotion.tag)
    ]
    first = 1 + max(taken, default=0)
    data = parse(
        Data, _filled(recipe.data.model_dump(mode="json", exclude_unset=True), name), "data"
    )
    asked = recipe.evaluate.model_copy(update={"every": 0})  # measured is what the night ends with
    filled = recipe.model_copy(
        update={"data": data, "iterations": first + recipe.iterations - 1, "evaluate": asked}
    )
    return Night(name, filled, store, first)


def _filled(value: Any, night: str) -> Any:
    if isinstance(value, dict):
        return {key: _filled(each, night) for key, each in value.items()}
    if isinstance(value, list):
        return [_filled(each, night) for each in value]
    return value.replace(NIGHT, night) if isinstance(value, str) else value


def _in_use(night: Night, base: str) -> str:
    """The policy that bears the tag; the first night gives it to `base`. With `rollback` the one
    before, where that is better."""
    store, promotion, run = night.store, night.promotion, night.recipe.run
    tagged = f"{run}/policy@{promotion.tag}"
    if store.tagged(run, promotion.tag) is None:
        store.tag(run, promotion.tag, base, expected=None, why="the base model", key="base")
        announce_move(tagged, entry_of(store, run, promotion, "base"))
    ref, key = str(store.resolve(tagged)), f"rollback {night.name}"
    earlier = previous(store.history(run, promotion.tag))
    if not promotion.rollback or earlier is None or entry_of(store, run, promotion, key):
        return ref
    now = measure(night.recipe, ref, night.first - 1)
    then = measure(night.recipe, earlier, night.first - 1, baseline=now.ref)
    judged = judge(promotion, store.open(then.ref).manifest.metrics)
    if not judged.better:
        return ref
    about = {
        "night": night.name,
        "decision": "rolled back",
        "candidate": ref,
        "evaluation": then.ref,
        **judged.numbers,
    }
    entry = roll_back(store, run, promotion, key, f"{earlier} is better: {judged.why}", about)
    log.warning(
        "%-22s rolled back to %s: %s",
        f"nightly {night.name}",
        entry.ref,
        printable(entry.why, 1000),
    )
    announce_move(tagged, entry)
    return entry.ref


def _improved(night: Night, policy: str, base: str) -> list[dict[str, Any]]:
    """The night's iterations, from `policy` on. Replay and a reference that moves stay within the
    night; a fixed one is `base`."""
    recipe, policies, reference = night.recipe, [policy], None
    done: list[dict[str, Any]] = []
    for iteration in range(night.first, recipe.iterations + 1):
        known = [base] if recipe.reference.rule == "fixed" else policies
        reference = choose_reference(recipe, known, 1 + len(done), reference)
        done.append(
            improve(
                recipe,
                policies[-1],
                reference,
                iteration,
                set(),
                done[: -recipe.optimize.replay - 1 : -1],
            )
        )
        policies.append(done[-1]["policy"])
    return done


def _decided(night: Night, before: str, baseline: Outcome, made: dict[str, Any]) -> Entry:
    """Measure what the last iteration `made`, ask where somebody is to be asked, and move the tag
    or leave it."""
    store, promotion, recipe = night.store, night.promotion, night.recipe

    def weigh(policy: str, rewards: str) -> Candidate:
        evaluation = measure(recipe, policy, recipe.iterations, baseline=baseline.ref)
        return Candidate(
            policy,
            rewards,
            evaluation.ref,
            judge(promotion, store.open(evaluation.ref).manifest.metrics),
        )

    candidate, answer = weigh(made["policy"], made["rewards"]), None
    if candidate.judged.better and promotion.approval:
        candidate, answer = reviewed(recipe, candidate, before, weigh)
    promoted = candidate.judged.better and (answer.approve if answer else not promotion.approval)
    about = {
        "night": night.name,
        "decision": "promoted" if promoted else "kept",
        "candidate": candidate.policy,
        "rewards": candidate.rewards,
        "iteration": recipe.iterations,
        "evaluation": candidate.evaluation,
        **candidate.judged.numbers,
    }
    ref = candidate.policy if promoted else before
    entry = decide(
        store, recipe.run, promotion, night.key, before, ref, _why(candidate, answer), about
    )
    if promoted:
        announce_move(f"{recipe.run}/policy@{promotion.tag}", entry)
    return entry


def _why(candidate: Candidate, answer: Answer | None) -> str:
    if answer is None:
        return candidate.judged.why
    return (
        f"{answer.author} said {'yes' if answer.approve else 'no'}: {answer.reason}; "
        f"{candidate.judged.why}"
    )
