"""The main flow: prompts → rollouts → rewards → the next policy, again and again, measured before
and after.

Only references travel between tasks. A run that is started again walks the same way: what is
finished is found in the store, and the first unfinished stage goes on at its first unfinished
shard. What is finished need not be read again: where [retention] or `quiver gc` took files away,
the manifest answers, and what a later stage does read is made again.

Iteration k makes policy@k; policy@0 is the base. With `overlap = 0` its rollouts are sampled by
policy@k-1, which it improves:

    sample 1 (policy@0) · optimize 1 (policy@0 → 1) · sample 2 (policy@1) · optimize 2 (1 → 2) · …

With `overlap = 1` the rollouts of iteration k+1 are sampled and scored while iteration k optimizes,
by the policy that k starts from; so those of iteration 1 are on-policy, and those of every later
one are by policy@k-2, one step old:

    sample 1 (policy@0) · optimize 1 (policy@0 → 1) · optimize 2 (1 → 2)  · optimize 3 (2 → 3) · …
                        · sample 2 (policy@0)       · sample 3 (policy@1) · …

The losses correct it, since each row carries the logprob that it was sampled with. Seeds follow
from the iteration, so contents and lineage are the same however often the flow was interrupted.
Numbers are too, since versions of a kind are made one after another; but for logprobs with overlap,
where those of two iterations may be made at a time.
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
from .curriculum import measured_before
from .evaluation import measure, numbers
from .pages import link_report
from .pages.iterations import Curve
from .placement import STAGES, check_placement, stage_call, trained_here
from .proximal import score_behaviour, score_start
from .recipe import Recipe
from .reference import choose_reference
from .refill import fill_up, with_rounds
from .retention import clean_up
from .sampled import Sampled
from .tasks import check_stages, perform, tagged

_LEARNED_FROM = ("rollouts", "rewards", "prox_logprobs")
"""What optimize is given of `Sampled`, under the same names."""


@dataclass(frozen=True)
class Iteration(Sampled):
    """A whole iteration: what was sampled, and the policy that learned from it."""

    ref_logprobs: str | None
    """Under the reference of the KL term. None: there is no such term."""
    policy: str
    """The policy that it made."""
    evaluation: dict[str, Any] | None = None
    """Score, standard error and n of that policy and of the baseline. None: not measured."""

    def to_json(self) -> dict[str, Any]:
        """As `quiver run --json` prints it: what nobody asked for is left out."""
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
        recipe: The whole recipe, as a TOML file has it.
        first_forced: A stage (prompt, generate, reward, logprobs, optimize or evaluate): it and
            those after it are done anew, even where a finished version exists. Evaluation is always
            among them: its rollouts, rewards and scores are made anew, its prompts are not. What is
            done anew is not tried again where it fails.

    Returns:
        What `quiver run --json` prints: the run, and for each iteration its references, mean
        reward, evaluation and seconds by stage.
    """
    if first_forced is not None and first_forced not in STAGES:
        raise ConfigError(
            f"first_forced {printable(first_forced)}",
            f"expected one of {', '.join(STAGES)}",
            next="name a stage, or leave it out",
        )
    forced = STAGES[STAGES.index(first_forced) :] if first_forced else ()
    check_placement(recipe)
    with tagged(recipe, expired=True):
        return _run_iterations(recipe.resolved(), forced)


def _run_iterations(recipe: Recipe, forced: Collection[str]) -> dict[str, Any]:
    base = import_policy(recipe)
    # before the baseline: a missing source is told before anything is generated
    prompts = make_prompts(recipe, base, 1, forced)
    baseline = numbers(measure(recipe, base, 0, forced))
    printed: list[dict[str, Any]] = []
    curve = Curve(recipe.run)

    def finish(iteration: Iteration) -> None:
        number = iteration.iteration
        if recipe.is_measured(number):
            evaluation = measure(recipe, iteration.policy, number, forced)
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
    """The iterations from number `first` to the recipe's last, the first of which improves
    `policy`.

    A fixed reference is `base`; replay, and a reference that moves, begin with the first iteration.
    `first_round`: the number of its first round, where that is not its own. `prompts`: those of the
    first iteration, where they are there. `finish` is called with each
    iteration, while the next one is sampled where the recipe says `overlap`.
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
    """The base model, as policy@0; before it is imported, ConfigError where code or a model that
    scores is missing, or this machine could not train."""
    check_stages(recipe, trained_here(recipe), stage_call(recipe, "policy", recipe.policy, {}))
    pinned(recipe.reward)
    return perform(recipe, "policy", recipe.policy, {}, label="import policy").ref


def make_prompts(
    recipe: Recipe,
    policy: str,
    iteration: int,
    forced: Collection[str],
    round: int | None = None,
    earlier: Sequence[Sampled] = (),
) -> Outcome:
    """The prompts of one round of an iteration, rendered for `policy`; ConfigError when the rewards
    could not score them, or this machine not train. `earlier`: the rounds before it."""
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
    """What iteration `iteration` learns from, by `policy`: one round, which comes after the
    `earlier` ones of the iterations before, and with [data] refill as many more as it takes.

    `prompts`: those of the first round, where they are there. `first_round`: its number, where none
    is earlier, and it is not the iteration's.
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
    """One round by `policy`: prompts (unless they are there already), rollouts, rewards and, where
    the recipe asks for them, proximal logprobs."""
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
    """What was sampled, and the policy that `policy` becomes by it; a KL term, where there is one,
    holds on to `reference`.

    What `earlier` iterations sampled is trained on again, beside this one's, scored under the
    present reference.
    """
    rounds = [each for iteration in (sampled, *earlier) for each in iteration.rounds]
    sources = score_start(recipe, policy, rounds, forced)
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
    """The config of the stage that comes after iteration `iteration` has optimized; none where
    sampling goes on beside it, or nothing comes."""
    is_last = iteration == recipe.iterations
    if recipe.overlap and not is_last:
        return {}
    if recipe.is_measured(iteration):
        return {"generate": recipe.generate_config(0, evaluation=True)}
    return {} if is_last else {"generate": recipe.generate_config(iteration + 1)}
