"""Write the warnings about a run, each with the recipe key that would help most. The report shows
them and `quiver run` repeats them at its end.
"""

from __future__ import annotations

from collections import Counter

from quiver.schemas.manifest import Manifest
from quiver.stages.turns.statistics import FAILURES, LIMITS, way_to_end

from .episodes import failures_in_words
from .gather import Gathered, Iteration, metric
from .words import counted, number

_MOST_FAILED = 0.05
_MOST_LIMITED = 0.5
_MOST_PARSE_ERRORS = 0.2


def warnings(gathered: Gathered) -> list[str]:
    """Return one sentence per kind of trouble, from the newest iteration that has it, and how many
    iterations have it. A run that learned nothing is reported first."""
    num_iterations = len(gathered.iterations)
    sentences = []
    if gathered.iterations and all(map(learned_nothing, gathered.iterations)):
        sentences.append(
            f"{gathered.run} learned nothing: in no group did one answer score better than "
            "another. Look at the answers (`quiver view`), then at [reward] and [data]."
        )
    for of_one_kind in zip(*map(_troubles, reversed(gathered.iterations)), strict=True):
        troubles = list(filter(None, of_one_kind))
        if troubles and num_iterations > 1:
            of_all = counted(num_iterations, "iteration")
            sentence = troubles[0].removesuffix(".")
            sentences.append(f"{sentence} (in {len(troubles)} of {of_all}).")
        else:
            sentences += troubles
    return sentences


def learned_nothing(iteration: Iteration) -> bool:
    """True if nothing moved the policy: every advantage was 0 or no rollout was left, and no other
    term of the loss trained it."""
    is_idle = metric(iteration.policy, "all_advantages_zero")
    return bool(is_idle and not metric(iteration.policy, "trained_by"))


def _troubles(iteration: Iteration) -> list[str]:
    """Return a sentence for each kind of trouble, empty if the iteration does not have it."""
    policy = iteration.policy
    rewards = iteration.rewards
    prompts = next((each for each in iteration.of_kind("prompts") if _dropped(each)), None)
    skipped = metric(policy, "skipped_steps") or 0
    unscored = metric(rewards, "reward_null") or 0
    length_share = iteration.length_share or 0
    equal_share = metric(rewards, "groups", "zero_variance") or 0
    gap = metric(policy, "audit", "mean_gap") or 0
    clipped = metric(policy, "first_clip_fraction") or 0
    corrected = {"reject": None, "mode": "none", **policy.config_section("correction")}
    return [
        f"{prompts.ref}: {_dropped(prompts)} of {counted(sum(prompts.status.values()), 'prompt')} "
        f"left out, because they have more than {prompts.config.get('max_prompt_tokens')} "
        "tokens: shorten their rows, or take them out of the source."
        if prompts
        else "",
        f"{iteration.rollouts.ref}: {counted(_dropped(iteration.rollouts), 'prompt')} left out, "
        "because they leave no room for the completion: lower generate.sampling.max_tokens."
        if iteration.rollouts and _dropped(iteration.rollouts)
        else "",
        f"{policy.ref}: {counted(skipped, 'optimizer step')} left out, because a loss or gradient "
        "was not finite: lower optimize.learning_rate."
        if skipped
        else "",
        f"{rewards.ref}: {number(unscored)} of {counted(rewards.rows, 'rollout')} have no reward: "
        f"`quiver show {rewards.ref}` tells why."
        if unscored
        else "",
        f"{iteration.rollouts.ref}: {length_share:.0%} of the completions ended at the token "
        f"limit: {way_to_end(iteration.rollouts)}."
        if length_share > 0.1 and not iteration.episodes
        else "",
        f"{rewards.ref}: in {equal_share:.0%} of the groups all rewards are equal, so they teach "
        "nothing: raise generate.samples_per_prompt, or take other prompts."
        if equal_share > 0.5
        else "",
        f"{policy.ref}: trainer and engine differ by {number(gap)} nats per token on average: set "
        "logprobs.prox = true."
        if gap > 0.05
        else "",
        f"{policy.ref}: the first step clipped {clipped:.2g} of its tokens, although no weight had "
        "changed: the ratio's denominator differs numerically from the trainer's logprobs; set "
        "logprobs.prox = true."
        if clipped
        else "",
        f"{policy.ref}: the gradient of its last step was 0: widen the bounds of "
        "optimize.correction, which may reject every token."
        if metric(policy, "grad_norm") == 0 and (corrected["reject"] or corrected["mode"] == "mask")
        else "",
        *_troubles_of_episodes(iteration),
    ]


def _dropped(version: Manifest) -> int:
    """Return how many prompts were left out because they are too long."""
    return version.status.get("dropped", 0)


def _troubles_of_episodes(iteration: Iteration) -> list[str]:
    """Return the same for the episodes of rollouts with turns."""
    numbers = iteration.episodes
    if not numbers or not numbers["rollouts"]:
        return ["", "", ""]
    ref = iteration.rollouts.ref
    ends = Counter(numbers["end_reasons"])
    num_late, num_broken = (ends[reason] for reason in FAILURES)
    if num_broken > num_late:
        remedy = f'`quiver view {ref} --where "end_reason = environment_error"` tells why.'
    else:
        late = numbers["timeouts"] or {"step_seconds": 0}
        remedy = f"raise generate.turns.{max(late, key=late.__getitem__)}."
    failed_share = (num_late + num_broken) / numbers["rollouts"]
    limit = max(LIMITS, key=ends.__getitem__)
    limited_share = sum(ends[reason] for reason in LIMITS) / numbers["rollouts"]
    if limit == "max_tokens":
        way_out = way_to_end(iteration.rollouts, numbers["max_limited_tokens"])
    elif limit != "context":
        way_out = f"raise generate.turns.{limit}"
    elif iteration.rollouts.config.get("max_model_len") is not None:
        way_out = "raise generate.max_model_len"
    else:  # the limit is the model's own, which cannot be raised
        way_out = "lower generate.turns.max_observation_tokens"
    error_share = numbers["parse_error_share"] or 0
    return [
        f"{ref}: {failed_share:.0%} of the episodes failed ({failures_in_words(numbers)}), and "
        f"teach nothing: {remedy}"
        if failed_share > _MOST_FAILED
        else "",
        f"{ref}: {limited_share:.0%} of the episodes ended by a limit, most by {limit}: {way_out}."
        if limited_share > _MOST_LIMITED
        else "",
        f"{ref}: in {error_share:.0%} of the turns no tool call could be read: set "
        "generate.turns.parser to the format that the policy writes."
        if error_share > _MOST_PARSE_ERRORS
        else "",
    ]
