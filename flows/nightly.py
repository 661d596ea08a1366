"""The flow `nightly`: improve the policy in use on new prompts, then promote or reject the result.

Look here for the order of a night's steps: new prompts → improve → measure both policies → decide.
A better policy that moved further than [promotion] allows waits for a person, or is rejected. The
state of the flow run is named after the decision, and its message says why. A name that was decided
before, for example by an earlier run on the same date in UTC, ends in the state "Decided before".

With [promotion] approval the flow run pauses, with a form on its page. No answer in time is a no.
Programs answer over Prefect's API:

    POST /api/flow_runs/ID/resume
    {"run_input": {"approve": true, "author": "ada", "reason": "reads well"}}

A night starts from the policy that bears the tag, regardless of the nights in between. So a
rejected policy is not trained further. It stays in the store, and the tag's history names it with
the reason. Each night has new rows: `[data]` with a `limit` gives the next rows that no decided
night has taken, and `{night}` anywhere in [data] is the night's name. The tag's history keeps only
the number of the last round. So after another `limit`, `seed` or source, a night may ask rows
again, and says so in a warning. A restarted night continues at the point where it stopped; a
decided night stays decided. Two nights that end at once cannot both promote: the tag moves by
compare-and-swap from the policy that was compared with.

    nightly(recipe)                           # tonight, named by its date in UTC
    nightly(recipe, night="2026-11-20")
"""

from __future__ import annotations

import logging
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, replace
from threading import Event, Thread
from typing import Any
from uuid import UUID, uuid4

from prefect import flow
from prefect.events import emit_event
from prefect.exceptions import NotPausedError
from prefect.flow_runs import pause_flow_run, resume_flow_run
from prefect.input import RunInput
from prefect.runtime import flow_run
from prefect.states import Completed
from pydantic import Field

from quiver.schemas.errors import printable
from quiver.stages.core.store import Store
from quiver.stages.core.store.tags import Entry, previous

from .evaluation import measure
from .look.pages import link_report, show_nights
from .look.pages.events import moved_event, payload_of
from .placement import require_server
from .post_train import Chain
from .promotion import decide, entry_of, judge, moved
from .recipe import Recipe
from .retention import clean_up
from .rounds import Iteration
from .sections import NIGHT
from .tasks import as_tasks

DECIDED_BEFORE = "Decided before"
"""Name of the final state if nothing was done."""
POLL_SECONDS = 5.0
_SPARE_SECONDS = 300  # Prefect fails a run that is not resumed in time, so our own no comes first.
log = logging.getLogger("quiver")


class Answer(RunInput):
    """A person's answer about the waiting policy; an invalid one does not resume the flow run."""

    approve: bool = Field(description="Promote it.")
    author: str = Field(pattern=r"\S", max_length=2000, description="Who answers.")
    reason: str = Field(pattern=r"\S", max_length=2000, description="Why; it stays with the tag.")


@dataclass(frozen=True)
class Night:
    """The plan of one night."""

    name: str
    recipe: Recipe
    """The recipe with the night's name filled in; `iterations` is the number of its last iteration,
    counted over all nights."""
    store: Store
    first: int
    """Number of its first iteration."""
    first_round: int
    """Number of its first round; rounds continue after the rows of the last decided night."""
    has_own_rows: bool
    """True if the night's name decides its source."""

    @property
    def key(self) -> str:
        """Key of its decision in the tag's history."""
        return f"night {self.name}"

    @property
    def rollback_key(self) -> str:
        """Key of its rollback in the tag's history."""
        return f"rollback {self.name}"


def _run_name() -> str:
    parameters = flow_run.parameters
    night = _name(parameters.get("night"))
    return f"{parameters['recipe'].run} · nightly {night}"


def _name(night: str | None) -> str:
    """Return the night's name: the given one, or the date in UTC for which the run was
    scheduled."""
    return night or f"{flow_run.scheduled_start_time:%Y-%m-%d}"


@flow(name="nightly", flow_run_name=_run_name, persist_result=False)
def nightly(recipe: Recipe, night: str | None = None) -> Any:
    """Improve the policy in use `iterations` times, and promote the result if it is better on the
    held-out rows.

    Args:
        recipe: The whole recipe, with the sections of its TOML file.
        night: Name of the night; each name is decided once. Default: the date in UTC for which the
            run is scheduled.

    Returns:
        A Prefect state named after the decision. Its data is the object that `quiver nightly
        --json` prints: the night, the decision with its numbers, and the iterations like `quiver
        run`. If the night was decided before, the state is named "Decided before", and there are no
        iterations.
    """
    tonight = plan_night(recipe, _name(night))
    iterations: list[Iteration] = []
    with as_tasks(tonight.recipe):
        entry = entry_of(tonight.store, recipe.run, recipe.promotion, tonight.key)
        if entry is None:
            if recipe.overlap or recipe.evaluate.every:
                log.warning(
                    "a night ignores overlap and evaluate.every: it runs one iteration after "
                    "another, and evaluates at its end"
                )
            tonight = replace(tonight, recipe=tonight.recipe.resolved())
            warn_of_another_order(tonight)
            chain = Chain(tonight.recipe)
            base = chain.import_policy()
            in_use = _policy_in_use(tonight, base)
            baseline = measure(tonight.recipe, in_use, tonight.first - 1)
            iterations = chain.improve(
                in_use, base, first=tonight.first, first_round=tonight.first_round
            )
            entry = _decide(tonight, in_use, baseline.ref, iterations[-1])
        show_nights(recipe.store, recipe.run, recipe.promotion.tag)
        link_report(recipe.store, recipe.run, recipe.report_url)
        clean_up(recipe.store, recipe.run, recipe.retention)
    why = printable(entry.why, 1000)
    message = f"{entry.about['decision']}: {why}"
    before = "" if iterations else "decided before, "
    log.info("%-22s %s%s", f"nightly {tonight.name}", before, message)
    answer = {
        "run": recipe.run,
        "tag": recipe.promotion.tag,
        **payload_of(entry),
        "iterations": [iteration.to_json() for iteration in iterations],
    }
    if not iterations:
        return Completed(name=DECIDED_BEFORE, message=message, data=answer)
    # A night that rolled back and then rejected its candidate is called rolled back.
    back = entry_of(tonight.store, recipe.run, recipe.promotion, tonight.rollback_key)
    decision = entry.about["decision"]
    if back is not None and decision == "rejected":
        decision = back.about["decision"]
        why = f"{printable(back.why, 1000)}. Then rejected: {why}"
    return Completed(name=decision.capitalize(), message=why, data=answer)


def plan_night(recipe: Recipe, name: str) -> Night:
    """Plan the night `name` of `recipe`.

    Raises ConfigError if there are no held-out rows, or if a person must approve but no server is
    named.
    """
    has_own_rows = NIGHT in recipe.data.model_dump_json(include={"source", "arguments"})
    recipe = recipe.for_night(name)
    recipe.data.require_held_out()
    if recipe.promotion.approval:
        require_server("promotion.approval")
    store = Store(recipe.store)
    entries = store.history(recipe.run, recipe.promotion.tag)
    iterations = [entry.about.get("iteration", 0) for entry in entries]
    rounds = [
        entry.about.get("round", number) for entry, number in zip(entries, iterations, strict=True)
    ]
    first = 1 + max(iterations, default=0)
    update = {
        "iterations": first + recipe.iterations - 1,
        # Only the end of the night is measured.
        "evaluate": recipe.evaluate.model_copy(update={"every": 0}),
        "overlap": 0,  # The iterations of a night run one after another.
    }
    recipe = recipe.model_copy(update=update)
    return Night(name, recipe, store, first, 1 + max(rounds, default=0), has_own_rows)


def _order(night: Night) -> dict[str, Any]:
    """Return what decides the rows of a round besides its number, by key of the recipe; empty if
    the night has rows of its own, or asks all of them."""
    config = night.recipe.prompt_config(night.first_round)
    if night.has_own_rows or config.limit is None:
        return {}
    return {
        "data.limit": config.limit,
        "seed": config.seed,
        "data.source_sha256": config.source_sha256,
    }


def warn_of_another_order(night: Night) -> None:
    """Warn if the rows of tonight's rounds, whose sources are looked up, are chosen in another
    order than on a decided night."""
    entries = night.store.history(night.recipe.run, night.recipe.promotion.tag)
    orders = [entry.about["order"] for entry in entries if entry.about.get("order")]
    now = _order(night)
    differing = [order for order in orders if order != now]
    if not differing or not now:
        return
    changed = [
        f"{key} was {differing[-1].get(key)} and is {value}"
        for key, value in now.items()
        if differing[-1].get(key) != value
    ]
    log.warning(
        "%-22s may ask rows again that earlier nights took, since %s: the order of the rows has "
        "changed, and only the number of rounds is counted on; for new rows, give each night a "
        "source with {night} in it",
        f"nightly {night.name}",
        printable(", ".join(changed), 1000),
    )


def _policy_in_use(night: Night, base: str) -> str:
    """Return the policy that bears the tag; the first night gives it to `base`.

    With `rollback`, the tag first returns to the policy before, if that one is better.
    """
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
    entry = decide(store, run, promotion, key=key, before=in_use, ref=earlier, why=why, about=about)
    log.warning(
        "%-22s rolled back to %s: %s",
        f"nightly {night.name}",
        entry.ref,
        printable(entry.why, 1000),
    )
    emit_event(**moved_event(tag, entry))
    return entry.ref


def _decide(night: Night, in_use: str, baseline: str, last: Iteration) -> Entry:
    """Measure the last policy, ask for approval if [promotion] says so, and move the tag or leave
    it."""
    store = night.store
    recipe = night.recipe
    promotion = recipe.promotion
    candidate = last.policy
    evaluation = measure(recipe, candidate, recipe.iterations, baseline=baseline).ref
    judgement = judge(promotion, store.open(evaluation).manifest.metrics)
    distance = moved(promotion, store, in_use, candidate, evaluation)
    far = "; ".join(distance.beyond_limits)
    if far:
        log.warning("%-22s %s moved far: %s", f"nightly {night.name}", candidate, far)
    is_promoted = judgement.better and not far
    answer = None
    if judgement.better and promotion.approval:
        warning = f"**It moved far from the policy in use: {far}.**\n\n" if far else ""
        question = (
            f"Shall **{candidate}** replace **{in_use}** as "
            f"`{recipe.run}/policy@{promotion.tag}`?\n\n"
            f"{warning}{judgement.why}\n\n"
            f"Their answers: `quiver compare {in_use} {candidate} --store {recipe.store}`."
        )
        answer = ask(question, promotion.approval_seconds)
        is_promoted = answer.approve
    about = {
        "night": night.name,
        "decision": "promoted" if is_promoted else "rejected",
        "author": answer.author if answer else "quiver",
        "candidate": candidate,
        "rewards": last.rounds[0].rewards,
        "iteration": recipe.iterations,
        # without it, a later night could not know that [data] refill took more than one each
        "round": last.rounds[-1].number,
        "order": _order(night),
        "evaluation": evaluation,
        **judgement.numbers,
        "watch": distance.beyond_limits,
        "moved": distance.numbers,
    }
    why = judgement.why
    if far:
        reason = "it moved far from the policy in use"
        if judgement.better and answer is None:
            reason = f"better, but not promoted, because {reason}"
        why = f"{reason}: {far}; {why}"
    if answer is not None:
        why = f"{answer.author} said {'yes' if answer.approve else 'no'}: {answer.reason}; {why}"
    ref = candidate if is_promoted else in_use
    entry = decide(
        store, recipe.run, promotion, key=night.key, before=in_use, ref=ref, why=why, about=about
    )
    if is_promoted:
        emit_event(**moved_event(f"{recipe.run}/policy@{promotion.tag}", entry))
    return entry


def ask(question: str, seconds: float) -> Answer:
    """Pause this flow run until its form is answered; after `seconds` the answer is no.

    A flow run that was stopped while it waited asks again.
    """
    question += f" Without an answer within {seconds:g} s it is not promoted."
    is_over = Event()

    def answer_no(run: UUID) -> None:
        reason = f"no answer within {seconds:g} s"
        is_over.wait(seconds)
        while not is_over.is_set():
            with suppress(NotPausedError):  # Answered just now, or not paused yet.
                resume_flow_run(run, {"approve": False, "author": "quiver", "reason": reason})
            is_over.wait(POLL_SECONDS)

    target = copy_context().run
    Thread(target=target, args=(answer_no, UUID(flow_run.id)), daemon=True).start()
    try:
        return pause_flow_run(
            Answer.with_initial_data(description=question),
            timeout=int(seconds) + _SPARE_SECONDS,
            poll_interval=POLL_SECONDS,
            key=str(uuid4()),
        )
    finally:
        is_over.set()
