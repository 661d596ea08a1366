"""The main flow: prompts → rollouts → rewards → the next policy, for each iteration in turn.

Read this file to follow a training run from start to end. The policy is measured on held-out rows
before the first iteration, after the last one, and in between if `evaluate.every` asks for it.

Only references travel between tasks: the addresses of versions, `run/kind@number`. (The policy that
the KL term compares with is called the KL reference.) A restarted run takes the same steps:
finished versions are found in the store, and the first unfinished stage continues at its first
unfinished shard. Finished versions need not be readable. If [retention] or `quiver gc` deleted
their files, the manifest is enough, and a version that a later stage must read is made again.

Iteration k makes policy@k, unless a run with other settings took that number or the iteration is
forced again; then it makes the next free number. policy@0 is the base. With `overlap = 0`,
policy@k-1 samples the rollouts that improve it:

    sample 1 (policy@0) · optimize 1 (policy@0 → 1) · sample 2 (policy@1) · optimize 2 (1 → 2) · …

With `overlap = 1`, iteration k+1 is sampled and scored while iteration k optimizes, by the policy
that k starts from. Iteration 1 is therefore on-policy, and each later iteration k learns from
rollouts of policy@k-2, one policy old:

    sample 1 (policy@0) · optimize 1 (policy@0 → 1) · optimize 2 (1 → 2)  · optimize 3 (2 → 3) · …
                        · sample 2 (policy@0)       · sample 3 (policy@1) · …

The losses correct for this: each token carries the logprob it was sampled with, the denominator of
its ratio (losses.py tells the policies apart). Seeds follow from the round's number (see `rounds`),
so contents and lineage do not depend on interruptions. Version numbers do not either, since
versions of a kind are made one after another. The exception is logprobs with overlap: two
iterations may make theirs at the same time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from prefect import flow

from quiver.stages import CHAIN
from quiver.stages.core.config import Config
from quiver.stages.core.run.call import Outcome
from quiver.stages.core.store import Store
from quiver.stages.logprobs.config import Config as LogprobsConfig
from quiver.stages.reward.stage import with_fingerprints

from .calls import check_stages, perform
from .evaluation import measure, printed_evaluation
from .look.pages import Curve, link_report
from .preflight import check_base
from .recipe import Recipe
from .retention import clean_up
from .rounds import Iteration, Round, choose_kl_reference, fill_up, proximal_config
from .stopping import run_ahead
from .tasks import as_tasks

_LEARNED_FROM = ("rollouts", "rewards", "prox_logprobs")
"""Roles of optimize's inputs that are fields of `Round`, under the same names."""


@flow(name="post-train", flow_run_name="{recipe.run} · post-train", persist_result=False)
def post_train(recipe: Recipe, first_forced: Literal[CHAIN] | None = None) -> dict[str, Any]:
    """Improve the recipe's policy `iterations` times, measured on held-out rows before and after.

    Args:
        recipe: The whole recipe, with the sections of its TOML file.
        first_forced: In each iteration, this stage and those after it in `CHAIN` (prompt, generate,
            reward, logprobs, optimize, evaluate) run again, even if a finished version exists. The
            stages before it are looked up: those of the first iteration are finished, later ones
            see a new policy and usually are not. Evaluation is always among them: its rollouts,
            rewards and scores are made again, its prompts are not. A forced stage is not retried if
            it fails.

    Returns:
        The object that `quiver run --json` prints: the run, its report or None, the
        evaluation of the base model (`baseline`), and for each iteration the references of its
        versions, mean reward, evaluation and seconds by stage.

    Raises:
        ConfigError: If a stage cannot run with this recipe.
    """
    forced = CHAIN[CHAIN.index(first_forced) :] if first_forced else ()
    with as_tasks(recipe):
        recipe = recipe.resolved()
        chain = Chain(recipe, forced)
        base = chain.import_policy()
        # Before the first evaluation, so that a missing source is reported before generation.
        prompts = chain.make_prompts(base, 1, 1)
        check = partial(chain.check_prompts, prompts.ref)
        baseline = printed_evaluation(measure(recipe, base, 0, forced, before=check))
        printed: list[dict[str, Any]] = []
        curve = Curve(recipe.run)

        def finish(iteration: Iteration) -> None:
            number = iteration.number
            if recipe.is_measured(number):
                evaluation = measure(recipe, iteration.policy, number, forced)
                # A copy to print; `improve` keeps the iteration without its evaluation.
                iteration = replace(
                    iteration,
                    evaluation={**printed_evaluation(evaluation), "baseline": baseline},
                    seconds={**iteration.seconds, "evaluate": evaluation.seconds},
                )
            printed.append(iteration.to_json())
            curve.show(printed, baseline, last=number == recipe.iterations)

        policy = chain.improve(base, base, prompts=prompts, finish=finish)[-1].policy
        report = link_report(recipe.store, recipe.run, recipe.report_url, policy)
        clean_up(recipe.store, recipe.run, recipe.retention, policy)
    return {"run": recipe.run, "report": report, "baseline": baseline, "iterations": printed}


@dataclass(frozen=True)
class Chain:
    """The stages of a recipe, called one after another within `as_tasks`."""

    recipe: Recipe
    """The resolved recipe."""
    forced: Collection[str] = ()
    """Stages to run again even if a finished version exists."""

    def improve(
        self,
        policy: str,
        base: str,
        *,
        first: int = 1,
        first_round: int | None = None,
        prompts: Outcome | None = None,
        finish: Callable[[Iteration], None] = lambda iteration: None,
    ) -> list[Iteration]:
        """Run the iterations from number `first` to the recipe's last; return them, oldest first.

        A night, and the best cells of a sweep, begin after iteration 1.

        Args:
            policy: The policy that iteration `first` improves.
            base: The KL term's reference policy if `reference.rule` is "fixed" and names none.
            first: Number of the first iteration. Earlier iterations are not replayed, and a
                reference policy that moves starts at `policy`.
            first_round: Number of its first round. Default: the iteration's number.
            prompts: The first iteration's prompts, if they were made already.
            finish: Called after each iteration; with `overlap`, while the next one is sampled.
        """
        recipe = self.recipe
        iterations: list[Iteration] = []
        earlier: list[Round] = []
        kl_reference = None
        if recipe.optimize.kl_coef > 0:
            moves = recipe.reference.weight_of_newest > 0
            kl_reference = recipe.kl_reference() or (policy if moves else base)
        rounds = self.sample(policy, first, earlier, prompts, first_round)
        for number in range(first, recipe.iterations + 1):
            starts = [policy, *(iteration.policy for iteration in iterations)]
            is_last = number == recipe.iterations
            if kl_reference:
                kl_reference = choose_kl_reference(
                    recipe.reference,
                    starts,
                    kl_reference,
                    label=f"reference {number}/{recipe.iterations}",
                    into=f"{recipe.run}.ref",
                    iteration=number,
                )
            newest_first = iterations[::-1][: recipe.optimize.replay]
            earlier = [*earlier, *rounds]  # a thread may read the old list
            sample_iteration = partial(self.sample, iteration=number + 1, earlier=earlier)
            sampling_ahead = nullcontext()
            if recipe.overlap and not is_last:
                sampling_ahead = run_ahead(partial(sample_iteration, starts[-1]))
            with sampling_ahead as next_rounds:
                iteration = self.update(starts[-1], kl_reference, rounds, newest_first)
                iterations.append(iteration)
                finish(iteration)
                if not is_last:
                    clean_up(recipe.store, recipe.run, recipe.retention, iteration.policy)
                if next_rounds is not None:
                    rounds = next_rounds.result()
                elif not is_last:
                    rounds = sample_iteration(iteration.policy)
        return iterations

    def import_policy(self) -> str:
        """Import the base model as policy@0.

        Raises ConfigError before the import if code or a reward model is missing, or if this
        machine cannot train; after it as `check_base` does.
        """

        recipe = self.recipe

        def check() -> None:
            check_stages({"optimize": recipe.optimize_config()})
            # Raises if a scorer no longer has the fingerprint that the recipe names.
            with_fingerprints(recipe.reward)

        base = perform("policy", recipe.policy, {}, label="import policy", before=check).ref
        store = Store(recipe.store).with_expired()
        check_base(recipe, store.open, store.open(base))
        return base

    def make_prompts(
        self, policy: str, iteration: int, round: int, earlier: Sequence[Round] = ()
    ) -> Outcome:
        """Make the prompts of one round of an iteration, rendered for `policy`.

        With [data] curriculum, they are chosen by the rewards of the last iterations and of the
        earlier rounds of this one. These belong to the prompts' lineage and run key. With
        `overlap` the same rewards decide as without it: iteration k+1 is sampled while k optimizes,
        and k's rewards exist by then. `earlier` holds all rounds before this one, oldest first.
        """
        refs: dict[str, Any] = {"policy": policy}
        if curriculum := self.recipe.data.curriculum:
            first = iteration - curriculum.iterations
            rewards = [sampled.rewards for sampled in earlier if sampled.iteration >= first]
            if rewards:
                refs["rewards"] = rewards
        config = self.recipe.prompt_config(round)
        return perform("prompt", config, refs, **self.options("prompt", iteration, round))

    def check_prompts(self, prompts: str) -> None:
        """Raise ConfigError if the rewards cannot score these prompts, or if this machine cannot
        train."""
        recipe = self.recipe
        configs = {"reward": recipe.reward, "optimize": recipe.optimize_config()}
        check_stages(configs, prompts, recipe.offered_columns)

    def sample(
        self,
        policy: str,
        iteration: int,
        earlier: Sequence[Round],
        prompts: Outcome | None = None,
        first_round: int | None = None,
    ) -> Sequence[Round]:
        """Sample the rounds that iteration `iteration` learns from, by `policy`.

        There is one round, after the `earlier` ones of previous iterations. With [data] refill,
        further rounds follow until enough groups have contrast.

        Args:
            policy: The policy that samples.
            iteration: Number of the iteration, from 1.
            earlier: All rounds of previous iterations, oldest first.
            prompts: The first round's prompts, if they were made already.
            first_round: Number of the first round if `earlier` is empty. Default: the iteration's
                number.
        """
        round = earlier[-1].number + 1 if earlier else first_round or iteration
        sample_round = partial(self.sample_round, policy, iteration)
        first = sample_round(round, earlier, prompts)
        refill = self.recipe.data.refill
        if refill is None:
            return [first]
        label = f"refill {iteration}/{self.recipe.iterations}"
        return fill_up(refill, self.recipe.store, first, earlier, sample_round, label)

    def sample_round(
        self,
        policy: str,
        iteration: int,
        round: int,
        earlier: Sequence[Round],
        prompts: Outcome | None = None,
    ) -> Round:
        """Sample one round by `policy`: prompts (unless given), rollouts, rewards and, if the
        recipe needs them, proximal logprobs."""
        recipe = self.recipe
        prompts = prompts or self.make_prompts(policy, iteration, round, earlier)
        options = partial(self.options, iteration=iteration, round=round)
        rollouts = perform(
            "generate",
            recipe.generate_config(round),
            {"prompts": prompts.ref, "policy": policy},
            **options("generate"),
            # optimize's process imports its modules meanwhile; reward, which comes first, has none
            # that are slow
            upcoming={} if recipe.overlap else {"optimize": recipe.optimize_config()},
            before=partial(self.check_prompts, prompts.ref),
        )
        refs = {"rollouts": rollouts.ref}
        rewards = perform("reward", recipe.reward, refs, **options("reward"))
        outcomes = {"prompt": prompts, "generate": rollouts, "reward": rewards}
        prox = None
        sampling = recipe.generate.sampling.model_dump()
        config = proximal_config(recipe.optimize, recipe.logprobs, [sampling])
        # proximal logprobs of the policy at the update's start are made in `update`
        if config is not None and config.is_of_sampler:
            refs = {"rollouts": rollouts.ref, "policy": policy}
            outcomes["logprobs prox"] = perform("logprobs", config, refs, **options("logprobs"))
            prox = outcomes["logprobs prox"].ref
        return Round(
            iteration=iteration,
            number=round,
            prompts=prompts.ref,
            rollouts=rollouts.ref,
            rewards=rewards.ref,
            prox_logprobs=prox,
            reward_mean=rewards.metrics.get("reward_mean"),
            num_scored=rewards.rows - (rewards.metrics.get("reward_null") or 0),
            seconds={name: outcome.seconds for name, outcome in outcomes.items()},
        )

    def update(
        self,
        policy: str,
        kl_reference: str | None,
        rounds: Sequence[Round],
        replayed: Sequence[Iteration],
    ) -> Iteration:
        """Train `policy` on the rounds of one iteration and return the finished iteration.

        Rounds of the `replayed` iterations, newest first, are trained on again, with logprobs
        under the current `kl_reference`, the policy that the KL term compares with; it is None if
        the loss has no KL term. With `prox_of = "start"`, all rounds get proximal logprobs under
        `policy`.
        """
        recipe, number = self.recipe, rounds[0].iteration
        # the iteration's own rounds come first; only they count in its seconds
        learned = [*rounds, *(sampled for iteration in replayed for sampled in iteration.rounds)]
        seconds: Counter[str] = Counter()
        for sampled in rounds:
            seconds.update(sampled.seconds)

        def logprobs_under(policy: str, config: LogprobsConfig) -> list[str]:
            refs = []
            for sampled in learned:
                options = self.options("logprobs", sampled.iteration, sampled.number)
                if sampled.iteration != number:
                    # not forced: a replayed round belongs to a finished iteration
                    label = f"logprobs of {sampled.iteration}/{recipe.iterations}"
                    options = {"iteration": sampled.iteration, "label": label}
                inputs = {"rollouts": sampled.rollouts, "policy": policy}
                outcome = perform("logprobs", config, inputs, **options)
                refs.append(outcome.ref)
                if sampled.iteration == number:
                    seconds[f"logprobs {config.role}"] += outcome.seconds
            return refs

        if recipe.optimize.prox_of == "start":
            config = proximal_config(recipe.optimize, recipe.logprobs, ())
            pairs = zip(learned, logprobs_under(policy, config), strict=True)
            learned = [replace(sampled, prox_logprobs=prox) for sampled, prox in pairs]
        ref_logprobs: list[str] = []
        if kl_reference:
            ref_logprobs = logprobs_under(kl_reference, recipe.logprobs.for_role("ref"))
        refs: dict[str, Any] = {"policy": policy, "ref_logprobs": ref_logprobs}
        for role in _LEARNED_FROM:
            versions = [getattr(sampled, role) for sampled in learned]
            refs[role] = [version for version in versions if version is not None]
        config = recipe.optimize_config()
        options = {"upcoming": self.upcoming_after(number), **self.options("optimize", number)}
        updated = perform("optimize", config, refs, **options)
        seconds["optimize"] = updated.seconds
        return Iteration(
            rounds=tuple(learned[: len(rounds)]),
            ref_logprobs=ref_logprobs[0] if ref_logprobs else None,
            policy=updated.ref,
            seconds=dict(seconds),
        )

    def upcoming_after(self, iteration: int) -> dict[str, Config]:
        """Return the config of the stage that follows optimize in `iteration`, by its name.

        A process for that stage imports its modules while optimize runs. Empty if sampling already
        runs beside optimize (`overlap`), or if no stage follows.
        """
        recipe = self.recipe
        is_last = iteration == recipe.iterations
        if recipe.overlap and not is_last:
            return {}
        if recipe.is_measured(iteration):
            return {"generate": recipe.generate_config(0, evaluation=True)}
        # only the engine counts here, and it is that of every round
        return {} if is_last else {"generate": recipe.generate_config(iteration + 1)}

    def options(self, stage: str, iteration: int, round: int | None = None) -> dict[str, Any]:
        """Return the options of `perform` that all stages share: `force`, iteration and label.

        The label names the round only with [data] refill: otherwise that is the iteration's number.
        """
        label = f"{stage} {iteration}/{self.recipe.iterations}"
        if round is not None and self.recipe.data.refill:
            label += f" round {round}"
        return {"force": stage in self.forced, "iteration": iteration, "label": label}
