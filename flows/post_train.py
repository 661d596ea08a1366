"""The main flow: prompts → rollouts → rewards → the next policy, for each iteration in turn.

Read this file to follow a training run from start to end. The policy is measured on held-out rows
before the first iteration, after the last one, and in between if `evaluate.every` asks for it.

Only references travel between tasks. A restarted run takes the same steps: finished versions are
found in the store, and the first unfinished stage continues at its first unfinished shard. Finished
versions need not be readable. If [retention] or `quiver gc` deleted their files, the manifest is
enough, and a version that a later stage must read is made again.

Iteration k makes policy@k, unless a run with other settings took that number or the iteration is
forced again; then it makes the next free number. policy@0 is the base. With `overlap = 0`,
policy@k-1 samples the rollouts that improve it:

    sample 1 (policy@0) · optimize 1 (policy@0 → 1) · sample 2 (policy@1) · optimize 2 (1 → 2) · …

With `overlap = 1`, iteration k+1 is sampled and scored while iteration k optimizes, by the policy
that k starts from. Iteration 1 is therefore on-policy, and each later iteration k learns from
rollouts of policy@k-2, one step old:

    sample 1 (policy@0) · optimize 1 (policy@0 → 1) · optimize 2 (1 → 2)  · optimize 3 (2 → 3) · …
                        · sample 2 (policy@0)       · sample 3 (policy@1) · …

The losses correct for this, since each row carries the logprob it was sampled with. Seeds follow
from the iteration, so contents and lineage do not depend on interruptions. Version numbers do not
either, since versions of a kind are made one after another. The exception is logprobs with overlap:
two iterations may make theirs at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from prefect import flow

from quiver.schemas.errors import ConfigError, printable
from quiver.stages.common.config import Config
from quiver.stages.common.runtime.runner import Outcome
from quiver.stages.reward.stage import pinned

from .ahead import run_ahead
from .evaluation import measure, numbers
from .pages import Curve, link_report
from .placement import STAGES, check_placement, stage_call, trained_here
from .recipe import Recipe
from .rescoring import choose_reference, score_behaviour, score_start
from .retention import clean_up
from .rounds import Sampled, fill_up, measured_before, with_rounds
from .tasks import check_stages, perform, tagged

_LEARNED_FROM = ("rollouts", "rewards", "prox_logprobs")
"""Roles of optimize's inputs that are fields of `Sampled`, under the same names."""


@dataclass(frozen=True)
class Iteration(Sampled):
    """A whole iteration: the sampled rounds, and the policy that learned from them."""

    ref_logprobs: str | None
    """Logprobs under the reference of the KL term. None: the loss has no KL term."""
    policy: str
    """The policy that this iteration made."""
    evaluation: dict[str, Any] | None = None
    """Score, standard error and n of that policy and of the baseline. None: not measured."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields for `quiver run --json`, without logprobs that were not asked for."""
        optional = ("prox_logprobs", "ref_logprobs")
        fields = {
            name: field
            for name, field in asdict(self).items()
            if field is not None or name not in optional
        }
        return with_rounds(fields)


@flow(name="post-train", flow_run_name="{recipe.run} · post-train", persist_result=False)
def post_train(recipe: Recipe, first_forced: str | None = None) -> dict[str, Any]:
    """Improve the recipe's policy `iterations` times, measured on held-out rows before and after.

    Args:
        recipe: The whole recipe, with the sections of its TOML file.
        first_forced: A stage (prompt, generate, reward, logprobs, optimize or evaluate). This stage
            and all later ones run again, even if a finished version exists. Evaluation is always
            among them: its rollouts, rewards and scores are made again, its prompts are not. A
            forced stage is not retried if it fails.

    Returns:
        The object that `quiver run --json` prints: the run, the baseline, and for each iteration
        its references, mean reward, evaluation and seconds by stage.

    Raises:
        ConfigError: If `first_forced` is not a stage, or a stage cannot run with this recipe.
    """
    if first_forced is not None and first_forced not in STAGES:
        raise ConfigError(
            f"first_forced {printable(first_forced)}",
            f"expected one of {', '.join(STAGES)}",
            next="name a stage, or leave it out",
        )
    forced = STAGES[STAGES.index(first_forced) :] if first_forced else ()
    check_placement(recipe)
    # Tags the Prefect tasks, and ends waiting child processes at the end. `expired`: a finished
    # version counts as done even if its files were deleted.
    with tagged(recipe, expired=True):
        return _run_iterations(recipe.resolved(), forced)


def _run_iterations(recipe: Recipe, forced: Collection[str]) -> dict[str, Any]:
    base = import_policy(recipe)
    # Before the baseline, so that a missing source is reported before anything is generated.
    prompts = make_prompts(recipe, base, 1, forced)
    baseline = numbers(measure(recipe, base, 0, forced))
    printed: list[dict[str, Any]] = []
    curve = Curve(recipe.run)

    def finish(iteration: Iteration) -> None:
        number = iteration.iteration
        if recipe.is_measured(number):
            evaluation = measure(recipe, iteration.policy, number, forced)
            # A copy to print; `improve` keeps the iteration without its evaluation.
            iteration = replace(
                iteration,
                evaluation={**numbers(evaluation), "baseline": baseline},
                seconds={**iteration.seconds, "evaluate": evaluation.seconds},
            )
        printed.append(iteration.to_json())
        curve.show(printed, baseline, last=number == recipe.iterations)

    iterations = improve(recipe, base, base, forced=forced, prompts=prompts, finish=finish)
    policy = iterations[-1].policy
    link_report(recipe, policy)
    clean_up(recipe.store, recipe.run, recipe.retention, policy)
    return {"run": recipe.run, "baseline": baseline, "iterations": printed}


def improve(
    recipe: Recipe,
    policy: str,
    base: str,
    *,
    first: int = 1,
    first_round: int | None = None,
    forced: Collection[str] = (),
    prompts: Outcome | None = None,
    finish: Callable[[Iteration], None] = lambda iteration: None,
) -> list[Iteration]:
    """Run the iterations from number `first` to the recipe's last; return them, oldest first.

    Args:
        recipe: The resolved recipe.
        policy: The policy that iteration `first` improves.
        base: The reference if `reference.rule` is "fixed". Replay, and a reference that moves,
            begin with iteration `first`.
        first: Number of the first iteration.
        first_round: Number of its first round. Default: the iteration's number.
        forced: Stages to run again even if a finished version exists.
        prompts: The first iteration's prompts, if they were made already.
        finish: Called after each iteration; with `overlap`, while the next one is sampled.
    """
    iterations: list[Iteration] = []
    rounds: list[Sampled] = []
    sampled = sample(recipe, policy, first, forced, rounds, prompts, first_round)
    reference = None
    for number in range(first, recipe.iterations + 1):
        starts = [policy, *(iteration.policy for iteration in iterations)]
        is_last = number == recipe.iterations
        references = [base] if recipe.reference.rule == "fixed" else starts
        reference = choose_reference(recipe, references, number, reference)
        newest_first = iterations[::-1][: recipe.optimize.replay]
        rounds += sampled.rounds
        sample_next = partial(sample, recipe, iteration=number + 1, forced=forced, earlier=rounds)
        overlap = nullcontext()
        if recipe.overlap and not is_last:
            overlap = run_ahead(partial(sample_next, policy=starts[-1]))
        with overlap as ahead:
            iteration = update(recipe, starts[-1], reference, sampled, forced, newest_first)
            iterations.append(iteration)
            finish(iteration)
            if not is_last:
                clean_up(recipe.store, recipe.run, recipe.retention, iteration.policy)
            if ahead is not None:
                sampled = ahead.result()
            elif not is_last:
                sampled = sample_next(policy=iteration.policy)
    return iterations


def import_policy(recipe: Recipe) -> str:
    """Import the base model as policy@0.

    Raises ConfigError before the import if code or a model that scores is missing, or if this
    machine cannot train.
    """
    check_stages(recipe, trained_here(recipe), stage_call(recipe, "policy", recipe.policy, {}))
    pinned(recipe.reward)  # only raises, if a scorer is not the one that the recipe pins
    return perform(recipe, "policy", recipe.policy, {}, label="import policy").ref


def make_prompts(
    recipe: Recipe,
    policy: str,
    iteration: int,
    forced: Collection[str],
    round: int | None = None,
    earlier: Sequence[Sampled] = (),
) -> Outcome:
    """Make the prompts of one round of an iteration, rendered for `policy`.

    `earlier` holds the rounds before it, oldest first. Raises ConfigError if the rewards
    cannot score these prompts, or if this machine cannot train.
    """
    round = round or iteration
    prompts = perform(
        recipe,
        "prompt",
        recipe.prompt_config(round),
        {"policy": policy, **measured_before(recipe, iteration, earlier)},
        force="prompt" in forced,
        iteration=iteration,
        round=round,
    )
    # The call that comes next. It is not made here: if it is finished, the checks are skipped.
    config = recipe.generate_config(round)
    refs = {"prompts": prompts.ref, "policy": policy}
    call = stage_call(recipe, "generate", config, refs, force="generate" in forced)
    configs = {"reward": recipe.reward, **trained_here(recipe)}
    check_stages(recipe, configs, call, prompts.ref)
    return prompts


def sample(
    recipe: Recipe,
    policy: str,
    iteration: int,
    forced: Collection[str],
    earlier: Sequence[Sampled],
    prompts: Outcome | None = None,
    first_round: int | None = None,
) -> Sampled:
    """Sample the rounds that iteration `iteration` learns from, by `policy`.

    There is one round, after the `earlier` ones of previous iterations. With [data] refill, further
    rounds follow until enough groups have contrast.

    Args:
        recipe: The resolved recipe.
        policy: The policy that samples.
        iteration: Number of the iteration, from 1.
        forced: Stages to run again even if a finished version exists.
        earlier: All rounds of previous iterations, oldest first.
        prompts: The first round's prompts, if they were made already.
        first_round: Number of the first round if `earlier` is empty. Default: the iteration's
            number.
    """
    round = earlier[-1].round + 1 if earlier else first_round or iteration
    sample_next = partial(sample_round, recipe, policy, iteration, forced)
    return fill_up(recipe, sample_next(round, earlier, prompts), earlier, sample_next)


def sample_round(
    recipe: Recipe,
    policy: str,
    iteration: int,
    forced: Collection[str],
    round: int,
    earlier: Sequence[Sampled],
    prompts: Outcome | None = None,
) -> Sampled:
    """Sample one round by `policy`: prompts (unless given), rollouts, rewards and, if the recipe
    needs them, proximal logprobs."""
    run = partial(perform, iteration=iteration, round=round)
    prompts = prompts or make_prompts(recipe, policy, iteration, forced, round, earlier)
    rollouts = run(
        recipe,
        "generate",
        recipe.generate_config(round),
        {"prompts": prompts.ref, "policy": policy},
        force="generate" in forced,
        next_configs={} if recipe.overlap else {"optimize": recipe.optimize_config()},
    )
    refs = {"rollouts": rollouts.ref}
    rewards = run(recipe, "reward", recipe.reward, refs, force="reward" in forced)
    prox = score_behaviour(recipe, rollouts.ref, policy, run, forced)
    outcomes = {"prompt": prompts, "generate": rollouts, "reward": rewards, **prox}
    return Sampled(
        iteration=iteration,
        round=round,
        prompts=prompts.ref,
        rollouts=rollouts.ref,
        rewards=rewards.ref,
        prox_logprobs=prox["logprobs prox"].ref if prox else None,
        reward_mean=rewards.metrics.get("reward_mean"),
        seconds={name: outcome.seconds for name, outcome in outcomes.items()},
        contrast_groups=None,
        more=(),
    )


def update(
    recipe: Recipe,
    policy: str,
    reference: str | None,
    sampled: Sampled,
    forced: Collection[str],
    earlier: Sequence[Sampled],
) -> Iteration:
    """Train `policy` on the sampled rounds and return the finished iteration.

    Rounds of the `earlier` iterations, newest first, are trained on again (replay), scored under
    the current reference. `reference` is the policy of the KL term, or None if the loss has no KL
    term. (In `sample`, `earlier` are rounds, oldest first.)
    """
    rounds = [each for iteration in (sampled, *earlier) for each in iteration.rounds]
    sources = score_start(recipe, policy, rounds, forced)
    # The current iteration's first round, which may now have proximal logprobs.
    sampled = sources[0]
    scored: list[Outcome] = []
    for source in sources if reference else ():
        config = recipe.logprobs_config("ref")
        refs = {"rollouts": source.rollouts, "policy": reference}
        number = source.iteration
        if number == sampled.iteration:
            about = {"force": "logprobs" in forced, "round": source.round}
        else:
            about = {"label": f"logprobs of {number}/{recipe.iterations}"}
        scored.append(perform(recipe, "logprobs", config, refs, iteration=number, **about))
    refs = {"policy": policy, "ref_logprobs": [outcome.ref for outcome in scored]}
    for role in _LEARNED_FROM:
        versions = [getattr(source, role) for source in sources]
        refs[role] = [version for version in versions if version is not None]
    updated = perform(
        recipe,
        "optimize",
        recipe.optimize_config(),
        refs,
        force="optimize" in forced,
        iteration=sampled.iteration,
        next_configs=configs_after(recipe, sampled.iteration),
    )
    seconds = dict(sampled.seconds)
    ref = None
    if scored:
        ref = scored[0].ref
        seconds["logprobs ref"] = scored[0].seconds
    seconds["optimize"] = updated.seconds
    sampled = replace(sampled, seconds=seconds)
    return Iteration(**vars(sampled), ref_logprobs=ref, policy=updated.ref)


def configs_after(recipe: Recipe, iteration: int) -> dict[str, Config]:
    """Return the config of the stage that follows optimize in `iteration`.

    A process for that stage imports its modules while optimize runs.

    Empty if sampling already runs beside optimize (`overlap`), or if no stage follows.
    """
    is_last = iteration == recipe.iterations
    if recipe.overlap and not is_last:
        return {}
    if recipe.is_measured(iteration):
        return {"generate": recipe.generate_config(0, evaluation=True)}
    return {} if is_last else {"generate": recipe.generate_config(iteration + 1)}
