"""The flow `nightly`: new prompts → improve the policy in use → measure both → promote the new one,
or keep the old.

A better policy that moved further than [promotion] allows waits for a person, or is kept aside. The
state of the flow run is called by the decision, and its message says why.

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
from prefect.events import emit_event
from prefect.runtime import flow_run
from prefect.states import Completed

from quiver.schemas.errors import printable
from quiver.stages.common.store import Store
from quiver.stages.common.store.tags import Entry, previous

from .approval import Candidate, reviewed
from .drift import moved
from .evaluation import measure, require_held_out
from .pages import link_report, show_nights
from .pages.events import moved_event, payload_of
from .placement import check_placement, require_server
from .post_train import Iteration, import_policy, improve
from .promotion import decide, entry_of, judge
from .recipe import Recipe
from .retention import clean_up
from .tasks import tagged

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
    first_round: int
    """number of its first round: it goes on behind the last row that a decided night asked"""

    @property
    def key(self) -> str:
        """What its decision is called in the tag's journal."""
        return f"night {self.name}"

    @property
    def rollback_key(self) -> str:
        """What going back to the policy before is called there."""
        return f"rollback {self.name}"


def _run_name() -> str:
    parameters = flow_run.parameters
    night = _name(parameters.get("night"))
    return f"{parameters['recipe'].run} · nightly {night}"


def _name(night: str | None) -> str:
    """The night's name: as given, or the date in UTC for which the run was scheduled."""
    return night or f"{flow_run.scheduled_start_time:%Y-%m-%d}"


@flow(name="nightly", flow_run_name=_run_name, persist_result=False)
def nightly(recipe: Recipe, night: str | None = None) -> Any:
    """Improve the policy in use `iterations` times, and promote the result if it is better on the
    held-out rows.

    Args:
        recipe: The whole recipe, as a TOML file has it.
        night: Name of what is decided once. None: the date in UTC for which the run is scheduled.

    Returns:
        What `quiver nightly --json` prints: the night, the decision with its numbers, and its
        iterations as `quiver run` has them. Prefect has it in a state of the decision's name.
    """
    tonight = begin(recipe, _name(night))
    iterations: list[Iteration] = []
    with tagged(recipe, expired=True):
        entry = entry_of(tonight.store, recipe.run, recipe.promotion, tonight.key)
        if entry is None:
            tonight = replace(tonight, recipe=tonight.recipe.resolved())
            base = import_policy(tonight.recipe)
            in_use = _policy_in_use(tonight, base)
            baseline = measure(tonight.recipe, in_use, tonight.first - 1)
            iterations = improve(
                tonight.recipe, in_use, base, first=tonight.first, first_round=tonight.first_round
            )
            entry = _decide(tonight, in_use, baseline.ref, iterations[-1])
        show_nights(recipe)
        link_report(recipe)
        clean_up(recipe.store, recipe.run, recipe.retention)
    why = printable(entry.why, 1000)
    log.info("%-22s %s: %s", f"nightly {tonight.name}", entry.about["decision"], why)
    answer = {
        "run": recipe.run,
        "tag": recipe.promotion.tag,
        **payload_of(entry),
        "iterations": [iteration.to_json() for iteration in iterations],
    }
    # a night that kept the policy to which it had rolled back is called by that
    back = entry_of(tonight.store, recipe.run, recipe.promotion, tonight.rollback_key)
    decision = entry.about["decision"]
    if back is not None and decision == "kept":
        decision = back.about["decision"]
        why = f"{printable(back.why, 1000)}. Then kept: {why}"
    return Completed(name=decision.capitalize(), message=why, data=answer)


def begin(recipe: Recipe, name: str) -> Night:
    """The night `name` of `recipe`. ConfigError where there are no held-out rows, or nobody could
    approve."""
    require_held_out(recipe)
    check_placement(recipe)
    if recipe.promotion.approval:
        require_server("promotion.approval")
    # a user's own algorithm is told what is wrong with it before anything is made
    recipe.optimize_config().resolved()
    store = Store(recipe.store)
    entries = store.history(recipe.run, recipe.promotion.tag)
    iterations = [entry.about.get("iteration", 0) for entry in entries]
    rounds = [
        entry.about.get("round", number) for entry, number in zip(entries, iterations, strict=True)
    ]
    first = 1 + max(iterations, default=0)
    update = {
        "iterations": first + recipe.iterations - 1,
        "evaluate": recipe.evaluate.model_copy(update={"every": 0}),  # the night's end is measured
        "overlap": 0,  # a night goes one iteration after another
    }
    recipe = recipe.for_night(name).model_copy(update=update)
    return Night(name, recipe, store, first, 1 + max(rounds, default=0))


def _policy_in_use(night: Night, base: str) -> str:
    """The policy that bears the tag; the first night gives it to `base`. With `rollback` the one
    before, where that is better."""
    store = night.store
    promotion = night.recipe.promotion
    run = night.recipe.run
    tag = f"{run}/policy@{promotion.tag}"
    if store.tagged(run, promotion.tag) is None:
        about = {"night": night.name, "decision": "began", "author": "quiver"}
        store.tag(
            run, promotion.tag, base, expected=None, why="the base model", key="base", about=about
        )
        emit_event(**moved_event(tag, entry_of(store, run, promotion, "base")))
    in_use = str(store.resolve(tag))
    key = night.rollback_key
    earlier = previous(store.history(run, promotion.tag))
    if not promotion.rollback or earlier is None or entry_of(store, run, promotion, key):
        return in_use
    in_use_score = measure(night.recipe, in_use, night.first - 1)
    earlier_score = measure(night.recipe, earlier, night.first - 1, baseline=in_use_score.ref)
    judgement = judge(promotion, store.open(earlier_score.ref).manifest.metrics)
    if not judgement.better:
        return in_use
    about = {
        "night": night.name,
        "decision": "rolled back",
        "author": "quiver",
        "candidate": earlier,
        "evaluation": earlier_score.ref,
        **judgement.numbers,
    }
    why = f"{earlier} is better: {judgement.why}"
    entry = decide(store, run, promotion, key, in_use, earlier, why, about)
    log.warning(
        "%-22s rolled back to %s: %s",
        f"nightly {night.name}",
        entry.ref,
        printable(entry.why, 1000),
    )
    emit_event(**moved_event(tag, entry))
    return entry.ref


def _decide(night: Night, in_use: str, baseline: str, last: Iteration) -> Entry:
    """Measure what the last iteration made, ask where somebody is to be asked, and move the tag or
    leave it."""
    store = night.store
    recipe = night.recipe
    promotion = recipe.promotion

    def weigh(policy: str, rewards: str) -> Candidate:
        evaluation = measure(recipe, policy, recipe.iterations, baseline=baseline)
        judgement = judge(promotion, store.open(evaluation.ref).manifest.metrics)
        distance = moved(promotion, store, in_use, policy, evaluation.ref)
        if distance.watch:
            name = f"nightly {night.name}"
            log.warning("%-22s %s moved far: %s", name, policy, distance.in_words)
        return Candidate(policy, rewards, evaluation.ref, judgement, distance)

    candidate = weigh(last.policy, last.rewards)
    answer = None
    if candidate.judgement.better and promotion.approval:
        candidate, answer = reviewed(recipe, candidate, in_use, weigh)
    is_near = not candidate.moved.watch
    is_approved = answer.approve if answer else is_near and not promotion.approval
    is_promoted = candidate.judgement.better and is_approved
    about = {
        "night": night.name,
        "decision": "promoted" if is_promoted else "kept",
        "author": answer.author if answer else "quiver",
        "candidate": candidate.policy,
        "rewards": candidate.rewards,
        "iteration": recipe.iterations,
        "evaluation": candidate.evaluation,
        **candidate.judgement.numbers,
        "watch": candidate.moved.watch,
        "moved": candidate.moved.numbers,
    }
    if recipe.data.refill is not None:
        about["round"] = last.rounds[-1].round
    why = candidate.judgement.why
    if not is_near:
        held = "it moved far from the policy in use"
        if candidate.judgement.better and answer is None:
            held = f"better, and not promoted, since {held}"
        why = f"{held}: {candidate.moved.in_words}; {why}"
    if answer is not None:
        word = "yes" if answer.approve else "no"
        why = f"{answer.author} said {word}: {answer.reason}; {why}"
    ref = candidate.policy if is_promoted else in_use
    entry = decide(store, recipe.run, promotion, night.key, in_use, ref, why, about)
    if is_promoted:
        emit_event(**moved_event(f"{recipe.run}/policy@{promotion.tag}", entry))
    return entry
