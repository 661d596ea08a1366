"""Bugs that were planted by hand, once unnoticed by the tests nearby, and the test that notices each.
`make mutants` plants them beside those of the operators.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Planted:
    """One bug: `new` stands in the file in place of `old`, which is in it exactly once."""

    name: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]
    """The tests that are to notice it, each `FILE::FUNCTION`."""


GENERATE = "tests/stages/generate"
OPTIMIZE = "tests/stages/optimize"
PLANTED = (
    Planted(
        "opo_counts_unscored",
        "stages/optimize/estimators.py",
        "scored_lengths = torch.where(rewards.isnan(), 0.0, lengths.double())",
        "scored_lengths = lengths.double()",
        (f"{OPTIMIZE}/test_advantages.py::test_opo_counts_the_tokens_of_scored_rollouts_alone",),
    ),
    Planted(
        "dppo_kl_reversed",
        "stages/optimize/surrogates.py",
        "distance = binary_divergence(tokens.logprobs.detach(), tokens.anchor, divergence)",
        "distance = binary_divergence(tokens.anchor, tokens.logprobs.detach(), divergence)",
        (
            f"{OPTIMIZE}/test_peer_losses.py::"
            "test_the_kl_of_dppo_goes_from_what_sampled_to_the_policy",
        ),
    ),
    Planted(
        "covariance_uncentred",
        "stages/optimize/surrogates.py",
        "return (logprobs - logprobs.mean()) * (advantages - advantages.mean())",
        "return (logprobs - logprobs.mean()) * advantages",
        (
            f"{OPTIMIZE}/test_peer_losses.py::"
            "test_a_covariance_is_of_both_distances_from_their_means",
        ),
    ),
    Planted(
        "collision_stays",
        "stages/optimize/trainer.py",
        "self.policy.collision = False",
        "self.policy.collision = True",
        (
            f"{OPTIMIZE}/test_otb.py::"
            "test_the_stage_takes_the_baseline_from_the_policy_that_it_starts_from",
        ),
    ),
    Planted(
        "kl_is_scaled",
        "stages/optimize/critic.py",
        "return rewards.index_add(0, last_tokens, earned.double() * batch.reward_scale)",
        "return rewards.index_add(0, last_tokens, earned.double()) * batch.reward_scale",
        (f"{OPTIMIZE}/test_critic.py::test_the_kl_in_the_reward_is_not_scaled_with_it",),
    ),
    Planted(
        "empty_turn_in_the_rollout_before",
        "stages/common/turns.py",
        "return torch.maximum(ends - 1, starts.repeat_interleave(self.lengths.lengths))",
        "return (ends - 1).clamp(min=0)",
        (
            "tests/stages/common/test_turns.py::"
            "test_a_turn_without_ids_has_its_last_token_in_its_own_rollout",
        ),
    ),
    Planted(
        "last_word_replaces",
        "stages/generate/turns/episode.py",
        "record.reward = reward + (record.reward or 0.0)",
        "record.reward = reward",
        (
            f"{GENERATE}/test_episode.py::"
            "test_the_environments_last_word_adds_to_what_the_last_turn_earned",
        ),
    ),
    Planted(
        "scale_of_kept",
        "stages/optimize/rollouts.py",
        "moments = reward_scaling.go_on(before, joined.rewards)",
        "moments = reward_scaling.go_on(before, batch.rewards)",
        (f"{OPTIMIZE}/test_ppo_stage.py::test_the_reward_scale_counts_every_scored_rollout",),
    ),
    Planted(
        "nll_of_bad_answers",
        "stages/optimize/imitation.py",
        "if batch.rewards[row] >= config.nll_reward]",
        "if batch.rewards[row] >= config.nll_reward or batch.rewards[row] < 0]",
        (f"{OPTIMIZE}/test_batch.py::test_what_is_learned_by_heart_has_the_least_reward_or_more",),
    ),
    Planted(
        "zero_variance_without_kl",
        "stages/optimize/rollouts.py",
        "is_equal = zero_variance(shaped_rewards, joined.groups)",
        "is_equal = zero_variance(joined.rewards, joined.groups)",
        (f"{OPTIMIZE}/test_ppo_stage.py::test_zero_variance_is_of_the_rewards_less_the_kl",),
    ),
    Planted(
        "turns_that_cancel_are_idle",
        "stages/optimize/batch.py",
        "counts = self.sequences.completions.with_values(is_active.long()).segment_sum()\n"
        "                is_active = counts > 0",
        "counts = self.sequences.completions.with_values(self.advantages).segment_sum()\n"
        "                is_active = counts != 0",
        (
            f"{OPTIMIZE}/test_batch.py::"
            "test_rollouts_whose_turns_cancel_are_passed_and_those_of_zeros_are_not",
        ),
    ),
    Planted(
        "unpaid_turn_earns_one",
        "stages/optimize/credit.py",
        "earned = pc.list_flatten(column.filter(is_scored)).fill_null(0.0)",
        "earned = pc.list_flatten(column.filter(is_scored)).fill_null(1.0)",
        (f"{OPTIMIZE}/test_credit_of_turns.py::test_a_turn_without_a_reward_earned_nothing",),
    ),
    Planted(
        "baseline_by_position",
        "stages/optimize/checks.py",
        'rewards = pc.if_else(is_answer, greedy.column("rewards", "reward"), None)',
        'rewards = pc.if_else(is_answer, greedy.inputs["rewards"].table()["reward"], None)',
        (f"{OPTIMIZE}/test_baseline.py::test_rewards_of_greedy_answers_are_joined_by_id",),
    ),
    Planted(
        "entropy_target_of_kl",
        "stages/optimize/trainer.py",
        'self.last_entropy = update["entropy"]',
        'self.last_entropy = update["approx_kl"]',
        (f"{OPTIMIZE}/test_entropy.py::test_the_coefficient_is_fed_by_the_entropy_of_the_step",),
    ),
    Planted(
        "decay_of_vectors",
        "stages/optimize/optimizer.py",
        '{"params": vectors, "weight_decay": 0.0, **options}',
        '{"params": vectors, "weight_decay": config.weight_decay, **options}',
        (f"{OPTIMIZE}/test_trainer.py::test_weight_decay_is_of_matrices_alone",),
    ),
    Planted(
        "seed_without_iteration",
        "stages/generate/rows.py",
        "return row_seed(config.seed, config.iteration, self._groups[prompt], sample, *turn)",
        "return row_seed(config.seed, 0, self._groups[prompt], sample, *turn)",
        (f"{GENERATE}/test_generate_stage.py::test_each_prompt_gets_its_group_in_order",),
    ),
    Planted(
        "ratio_max_of_one_rank",
        "stages/optimize/trainer.py",
        '"ratio_max": float(self.accelerator.gather(log_ratio_max.exp()[None]).max()),',
        '"ratio_max": float(log_ratio_max.exp()),',
        (f"{OPTIMIZE}/test_optimize_dist.py::test_two_ranks_train_as_one",),
    ),
)
