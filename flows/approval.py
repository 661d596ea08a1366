"""Approval of a policy by a person: the flow run pauses, asks, and takes no answer in time as a no.

Look here to change the question, the form, or retraining on corrected rewards. The answer is typed
into the form on Prefect's pages or sent to its API:

    POST /api/flow_runs/ID/resume
    {"run_input": {"approve": true, "author": "ada", "reason": "reads well"}}

The server checks the answer against the form; an invalid one does not resume the run. If an answer
overrides rewards, the policy is trained again on them (the new version records author and reason),
and the question is asked again. A run without a server of its own is refused, since Prefect's
embedded server ends with the run.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from threading import Event, Thread
from typing import Any, NamedTuple
from uuid import UUID, uuid4

import numpy as np
from prefect.exceptions import NotPausedError
from prefect.flow_runs import pause_flow_run, resume_flow_run
from prefect.input import RunInput
from prefect.runtime import flow_run
from pydantic import Field

from quiver.schemas.errors import ConfigError, LineageError
from quiver.stages.common.config import parse
from quiver.stages.common.store import Store
from quiver.stages.evaluate.comparison import compare
from quiver.stages.report.joined import Selection
from quiver.stages.report.templates import page
from quiver.stages.reward.override import Config as Overrides

from .calls import perform
from .drift import Moved
from .promotion import Judgement
from .recipe import Recipe
from .view.paired import pair

POLL_SECONDS = 5.0
SAMPLES = 5
"""Number of answers shown that improved, and number shown that got worse."""
_REF_ROLES = {
    "rollouts": "rollouts",
    "rewards": "rewards",
    "ref": "ref_logprobs",
    "prox": "prox_logprobs",
}
"""Input roles of an optimize call, beside the policy, by their role in its manifest."""
_SPARE_SECONDS = 300  # Prefect's own limit fails a run that was not resumed, so ours comes first.


class Answer(RunInput):
    """A reviewer's answer about the waiting policy."""

    approve: bool = Field(description="Promote it.")
    author: str = Field(pattern=r"\S", max_length=2000, description="Who answers.")
    reason: str = Field(
        pattern=r"\S",
        max_length=2000,
        description="Why; it stays with the tag, and with the rewards.",
    )
    overrides: dict[str, float] = Field(
        default_factory=dict,
        description="Rewards by rollout_id that shall be others. If there are any, the policy is "
        "trained again on the rewards with these in place, and asked about again; `approve` then "
        "decides nothing.",
    )


class Candidate(NamedTuple):
    """A policy that may take over the tag: the rewards it learned from last, its evaluation, the
    judgement, and how far it moved from the policy in use."""

    policy: str
    rewards: str
    evaluation: str
    judgement: Judgement
    moved: Moved


def ask(question: str, seconds: float) -> Answer:
    """Pause this flow run until it is answered; after `seconds` the answer is no.

    `question` (Markdown) stands above the form. A run that was stopped while it waited asks again.
    """
    form = Answer.with_initial_data(description=question)
    is_over = Event()

    def answer_no(run: UUID) -> None:
        """Answer no after `seconds`, unless the question is over."""
        answer = {
            "approve": False,
            "author": "quiver",
            "reason": f"nobody answered within {seconds:g} s",
        }
        is_over.wait(seconds)
        while not is_over.is_set():
            with suppress(NotPausedError):  # Answered just now, or not paused yet.
                resume_flow_run(run, run_input=answer)
            is_over.wait(POLL_SECONDS)

    target = copy_context().run
    Thread(target=target, args=(answer_no, UUID(flow_run.id)), daemon=True).start()
    try:
        return pause_flow_run(
            form,
            timeout=int(seconds) + _SPARE_SECONDS,
            poll_interval=POLL_SECONDS,
            key=str(uuid4()),
        )
    finally:
        is_over.set()


def reviewed(
    recipe: Recipe, candidate: Candidate, before: str, weigh: Callable[[str, str], Candidate]
) -> tuple[Candidate, Answer | None]:
    """Ask about a candidate until it is approved or rejected.

    Args:
        recipe: The recipe of the run.
        candidate: The first candidate.
        before: Reference of the policy in use.
        weigh: Judges a policy, given with the rewards that it learned from.

    Returns:
        The last candidate and the answer. The answer is None if a retrained candidate is not
        better.
    """
    note = ""
    while True:
        question = _question(recipe, candidate, before) + note
        answer = ask(question, recipe.promotion.approval_seconds)
        if not answer.overrides:
            return candidate, answer
        try:
            config = parse(Overrides, answer.model_dump(exclude={"approve"}), "overrides")
            refs = {"rewards": candidate.rewards}
            rewards = perform("override", config, refs, label="override").ref
        except ConfigError as error:
            # The error is about the typed overrides, so it is shown above the next form.
            note = (
                f"\n\n**The overrides of {answer.author} were refused**: {error.object}: "
                f"{error.message}"
            )
            continue
        note = ""
        candidate = weigh(train_again(recipe, candidate, rewards), rewards)
        if not candidate.judgement.better:
            return candidate, None


def train_again(recipe: Recipe, candidate: Candidate, rewards: str) -> str:
    """Repeat the candidate's last training with other `rewards` and return the new policy.

    All other inputs stay the same.
    """
    manifest = Store(recipe.store).open(candidate.policy).manifest
    refs: dict[str, Any] = {"policy": manifest.require_input("policy").ref}
    for entry in manifest.inputs:
        role = _REF_ROLES.get(entry.role.partition(".")[0])
        if role:
            ref = rewards if entry.ref == candidate.rewards else entry.ref
            refs.setdefault(role, []).append(ref)
    config = recipe.optimize_config()
    return perform("optimize", config, refs, label="optimize again").ref


def compared(store: Store, evaluation: str) -> str:
    """Return an evaluation beside its baseline, as Markdown.

    The text has the paired difference, and the answers whose score rose and fell most. It is empty
    if the rows were deleted.
    """
    with suppress(LineageError):
        after = store.open(evaluation)
        before = store.open(after.manifest.require_input("baseline").ref)
        paired = pair(store, str(before.ref), str(after.ref))
        gains = paired.first.number("gain")
        order = paired.first.order(Selection(sort="gain"))
        order = order[np.isfinite(gains[order])]
        rising = [place for place in reversed(order) if gains[place] > 0][:SAMPLES]
        falling = [place for place in order if gains[place] < 0][:SAMPLES]
        rows = paired.first.rows([*rising, *falling])
        partners = paired.partners([*rising, *falling])
        answer = compare(store, before, after)
        return page("compared", answer, list(zip(rows, partners, strict=True)))
    return ""


def _question(recipe: Recipe, candidate: Candidate, before: str) -> str:
    rewards = candidate.rewards
    watch = candidate.moved.in_words
    warning = f"**It moved far from the policy in use: {watch}.**\n\n" if watch else ""
    return (
        f"Shall **{candidate.policy}** replace **{before}** as "
        f"`{recipe.run}/policy@{recipe.promotion.tag}`?\n\n"
        f"{warning}{candidate.judgement.why}\n\n"
        f"{compared(Store(recipe.store), candidate.evaluation)}\n\n"
        f"Its last rewards are {rewards}: `quiver show {rewards} --store {recipe.store}`. To "
        "correct some, give `overrides` by rollout_id: it is then trained again on them, and this "
        "question is put again. Without an answer within "
        f"{recipe.promotion.approval_seconds:g} s it is not promoted."
    )
