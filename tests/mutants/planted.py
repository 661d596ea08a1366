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


CHAT = "tests/stages/model/chat"
GENERATE = "tests/stages/generate"
OPTIMIZE = "tests/stages/optimize"
PROMPT = "tests/stages/prompt"
FAULTS = "tests/faults"
PLANTED = (
    Planted(
        "folders_above_are_not_flushed",
        "stages/core/store/disk.py",
        "closed, folder.parents[1], self._root):",
        "closed):",
        (
            "tests/stages/core/store/test_storage.py"
            "::test_a_version_is_flushed_with_the_names_of_its_kind_and_run",
        ),
    ),
    Planted(
        "failed_flush_is_passed_over",
        "stages/core/store/disk.py",
        "with storage_errors(prefix), contextlib.suppress(FileNotFoundError):",
        "with contextlib.suppress(OSError):",
        (f"{FAULTS}/test_disk_and_clock.py::test_any_operation_may_fail",),
    ),
    Planted(
        "folder_in_the_way_stays",
        "stages/core/store/disk.py",
        "if path.is_dir():  # not ours",
        "if False:  # not ours",
        (f"{FAULTS}/test_corruption.py::test_what_was_staged_is_made_again_whatever_became_of_it",),
    ),
    Planted(
        "opo_counts_unscored",
        "stages/optimize/estimators.py",
        "scored_lengths = torch.where(rewards.isnan(), 0.0, lengths.double())",
        "scored_lengths = lengths.double()",
        (f"{OPTIMIZE}/test_advantages.py::test_golden",),
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
        "collision_stays",
        "stages/optimize/trainer.py",
        "self.policy.entropy_is_collision = False",
        "self.policy.entropy_is_collision = True",
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
        (f"{OPTIMIZE}/test_critic.py::test_rewards_stand_on_the_last_token_and_the_kl_on_each",),
    ),
    Planted(
        "empty_turn_in_the_rollout_before",
        "stages/model/turns.py",
        "return torch.maximum(ends - 1, starts.repeat_interleave(self.lengths.lengths))",
        "return (ends - 1).clamp(min=0)",
        (
            "tests/stages/model/test_turns.py::"
            "test_a_turn_without_ids_has_its_last_token_in_its_own_rollout",
        ),
    ),
    Planted(
        "last_word_replaces",
        "stages/turns/episode.py",
        "record.reward = reward + (record.reward or 0.0)",
        "record.reward = reward",
        (
            "tests/stages/turns/test_episode.py::"
            "test_the_environments_last_word_adds_to_what_the_last_turn_earned",
        ),
    ),
    Planted(
        "scale_of_kept",
        "stages/optimize/rollouts.py",
        "reward_moments = terms.reward_moments(before, joined.rewards)",
        "reward_moments = terms.reward_moments(before, batch.rewards)",
        (f"{OPTIMIZE}/test_critic_stage.py::test_the_reward_scale_counts_every_scored_rollout",),
    ),
    Planted(
        "nll_of_bad_answers",
        "stages/optimize/terms.py",
        "if batch.rewards[row] >= config.nll_reward]",
        "if batch.rewards[row] >= config.nll_reward or batch.rewards[row] < 0]",
        (f"{OPTIMIZE}/test_terms.py::test_what_is_learned_by_heart_has_the_least_reward_or_more",),
    ),
    Planted(
        "zero_variance_without_kl",
        "stages/optimize/rollouts.py",
        "is_equal = zero_variance(shaped_rewards, joined.groups)",
        "is_equal = zero_variance(joined.rewards, joined.groups)",
        (f"{OPTIMIZE}/test_critic_stage.py::test_zero_variance_is_of_the_rewards_less_the_kl",),
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
        "stages/optimize/inputs.py",
        "earned = pc.list_flatten(column.filter(is_scored)).fill_null(0.0)",
        "earned = pc.list_flatten(column.filter(is_scored)).fill_null(1.0)",
        (f"{OPTIMIZE}/test_credit_of_turns.py::test_a_turn_without_a_reward_earned_nothing",),
    ),
    Planted(
        "entropy_target_of_kl",
        "stages/optimize/trainer.py",
        'self.last_entropy = update["entropy"]',
        'self.last_entropy = update["approx_kl"]',
        (f"{OPTIMIZE}/test_terms.py::test_the_coefficient_is_fed_by_the_entropy_of_the_step",),
    ),
    Planted(
        "decay_of_vectors",
        "stages/optimize/optimizer.py",
        '{"params": vectors, "weight_decay": 0.0, **options}',
        '{"params": vectors, "weight_decay": config.weight_decay, **options}',
        (f"{OPTIMIZE}/test_trainer.py::test_weight_decay_is_of_matrices_alone",),
    ),
    Planted(
        "seed_without_round",
        "stages/generate/rows.py",
        "return row_seed(config.seed, config.round, self._groups[prompt], sample, *turn)",
        "return row_seed(config.seed, 0, self._groups[prompt], sample, *turn)",
        (f"{GENERATE}/test_generate_stage.py::test_each_prompt_gets_its_group_in_order",),
    ),
    Planted(
        "ratio_max_of_one_rank",
        "stages/optimize/trainer.py",
        '"ratio_max": float(self.accelerator.gather(log_ratio_max.exp()[None]).max()),',
        '"ratio_max": float(log_ratio_max.exp()),',
        (f"{OPTIMIZE}/test_optimize_ranks.py::test_two_ranks_train_as_one_process",),
    ),
    Planted(
        "unused_beside_no_text",
        "schemas/outside.py",
        '(_UNUSED - {"refusal"} if content is None else _UNUSED)',
        '(_UNUSED if content else _UNUSED - {"refusal", "weight"})',
        ("tests/schemas/test_outside.py::test_messages_are_read",),
    ),
    Planted(
        "thinking_once",
        "schemas/outside.py",
        "if len(set(texts.values())) > 1:",
        "if len(texts) > 1:",
        ("tests/schemas/test_outside.py::test_thinking_is_read_whatever_it_is_called",),
    ),
    Planted(
        "nulls_in_a_part",
        "schemas/outside.py",
        "for key, member in members.items() if member is not None}\n        if members in",
        "for key, member in members.items()}\n        if members in",
        ("tests/schemas/test_outside.py::test_messages_are_read",),
    ),
    Planted(
        "empty_id_of_a_call",
        "schemas/outside.py",
        'call = {key: member for key, member in given.items() if member not in (None, "")}',
        "call = {key: member for key, member in given.items() if member is not None}",
        ("tests/schemas/test_outside.py::test_a_call_of_a_chat_may_have_no_arguments_and_no_id",),
    ),
    Planted(
        "nan_of_csv_is_a_number",
        "stages/core/file_rows.py",
        "if str(number) == text and math.isfinite(number):",
        "if str(number) == text:",
        (f"{PROMPT}/test_values.py::test_csv_columns_are_numbers_only_if_every_cell_is_one",),
    ),
    Planted(
        "notes_of_a_table_are_hashed",
        "stages/prompt/sources.py",
        "table = table.replace_schema_metadata(None).combine_chunks()",
        "table = table.combine_chunks()",
        (
            f"{PROMPT}/test_sources.py::"
            "test_the_hash_of_rows_does_not_depend_on_their_chunks_or_notes",
        ),
    ),
    Planted(
        "one_odd_role_is_told",
        "stages/prompt/chats.py",
        'f"role {role} as such",',
        '"role as such",',
        (
            f"{PROMPT}/test_templates.py::"
            "test_a_chat_that_holds_its_answer_and_each_odd_role_are_told_once",
        ),
    ),
    Planted(
        "unknown_is_typed",
        "stages/model/chat/control_tokens.py",
        "if self._controls(ids) == expected and not (typed and self._unknown):",
        "if self._controls(ids) == expected:",
        (f"{CHAT}/test_control_tokens.py::test_the_token_for_unknown_text_can_not_be_typed",),
    ),
    Planted(
        "second_start_stays",
        "stages/model/chat/control_tokens.py",
        "        while self._start and ids[",
        "        if self._start and ids[",
        (f"{CHAT}/test_control_tokens.py::test_exactly_one_bos_where_the_tokenizer_puts_one",),
    ),
    Planted(
        "form_of_contents_without_tools",
        "stages/model/chat/template.py",
        "key = shapes, tuple(sorted(name for name, value in variables.items() if value))",
        "key = shapes, ()",
        (
            f"{CHAT}/test_template.py::"
            "test_the_form_of_contents_is_that_of_a_chat_with_tools_or_without",
        ),
    ),
    Planted(
        "continued_at_the_first_mark",
        "stages/model/chat/template.py",
        "before = text[: text.rindex(mark)]",
        "before = text[: text.index(mark)]",
        (
            f"{CHAT}/test_template.py::"
            "test_what_is_continued_ends_behind_its_last_message_whatever_others_hold",
        ),
    ),
    Planted(
        "thought_behind_a_line_break",
        "stages/turns/tool_calls.py",
        "return text.lstrip().startswith(_THOUGHT_START)",
        "return text.startswith(_THOUGHT_START)",
        ("tests/stages/turns/test_tool_calls.py::test_a_turn_without_calls_is_text",),
    ),
    Planted(
        "broken_framing_is_another_format",
        "stages/turns/tool_calls.py",
        "if parsed.calls or parsed.is_broken or not tools:",
        "if parsed.calls or not tools:",
        (
            "tests/stages/turns/test_tool_calls.py::"
            "test_a_call_of_another_format_between_the_tags_is_told_as_such",
        ),
    ),
    Planted(
        "content_without_calls",
        "stages/turns/tool_calls.py",
        "return ParsedTurn(before if calls else text, calls)",
        "return ParsedTurn(before, calls)",
        (
            "tests/stages/turns/test_tool_calls.py::test_the_tokenizers_own_response_template_reads_calls",
        ),
    ),
    Planted(
        "stop_string_is_the_whole_end",
        "stages/generate/ends.py",
        'is_stop = any(string in end["text"] for string in sampling.stop)',
        'is_stop = end["text"] in sampling.stop',
        (
            f"{GENERATE}/test_generate_stage.py::"
            "test_a_template_whose_end_ends_no_completion_is_told",
        ),
    ),
    Planted(
        "end_of_the_template_is_lost",
        "stages/generate/ends.py",
        'if text and id != template_end.get("id"):',
        "if text:",
        (f"{GENERATE}/test_texts.py::test_the_templates_end_of_a_turn_is_no_text_that_is_lost",),
    ),
    Planted(
        "worst_above_zero",
        "stages/evaluate/answers.py",
        "number = min([number, float(below), *(score for score in lowest if score is not None)])",
        "number = min((score for score in lowest if score is not None), default=number)",
        ("tests/stages/evaluate/test_evaluate_stage.py::test_the_worst_score_is_at_most_zero",),
    ),
    Planted(
        "another_scorer_failed",
        "stages/evaluate/answers.py",
        'if config.score in ("reward", name):',
        "if True:",
        (
            "tests/stages/evaluate/test_evaluate_stage.py::"
            "test_an_error_of_another_scorer_leaves_no_cut_answer_out",
        ),
    ),
    Planted(
        "why_alone_is_printable",
        "flows/look/nights.py",
        "rows.append(NightRow(*(printable(cell, _LONGEST) for cell in row)))",
        "rows.append(row._replace(why=printable(entry.why, _LONGEST)))",
        ("tests/flows/test_nights.py::test_no_cell_of_a_night_writes_control_characters",),
    ),
    Planted(
        "one_limit_of_episodes",
        "stages/turns/statistics.py",
        "return sum(ends.get(reason, 0) for reason in LIMITS) / max(rollouts.rows, 1)",
        'return ends.get("max_turns", 0) / max(rollouts.rows, 1)',
        ("tests/flows/test_promotion.py::test_each_limit_of_an_episode_cuts_its_answer_off",),
    ),
    Planted(
        "keys_that_are_gone",
        "flows/preflight.py",
        "for key in tables[1] | tables[0]",
        "for key in tables[1]",
        (
            "tests/flows/test_checking.py::"
            "test_a_key_that_the_first_iteration_had_and_the_recipe_has_not_is_told",
        ),
    ),
    Planted(
        "changes_since_the_last_iteration",
        "flows/preflight.py",
        "@{numbers[0]}",
        "@{numbers[-1]}",
        (
            "tests/flows/test_checking.py::"
            "test_a_key_that_the_first_iteration_had_and_the_recipe_has_not_is_told",
        ),
    ),
    Planted(
        "rewards_before_the_environment",
        "flows/checking.py",
        'problems = {f"generate.turns {sources}": answered.failure, **problems}',
        'problems = {**problems, f"generate.turns {sources}": answered.failure}',
        (
            "tests/flows/test_checking.py::"
            "test_an_environment_that_fails_is_told_before_the_rewards_of_it",
        ),
    ),
    Planted(
        "keys_are_not_looked_at",
        "schemas/plain.py",
        'children = [*node.items(), *(("a key", name) for name in node)]',
        "children = node.items()",
        ("tests/schemas/test_outside.py::test_other_calls_are_refused",),
    ),
    Planted(
        "bound_is_taken_for_granted",
        "flows/look/nights.py",
        "if self.difference.stderr is None or self.bound is None:",
        "if self.difference.stderr is None:",
        ("tests/flows/test_nights.py::test_a_difference_without_a_bound_names_none",),
    ),
    Planted(
        "last_words_are_lost",
        "stages/core/run/answering.py",
        "    sys.stdout.reconfigure(line_buffering=True)\n",
        "",
        (
            "tests/stages/turns/test_environment_pool.py::"
            "test_who_fails_costs_itself_and_its_neighbours_are_played_again",
        ),
    ),
    Planted(
        "nulls_of_structs_in_maps",
        "schemas/cells.py",
        "key: to_python(item, kind.item_type, keep_nulls=keep_nulls) for key, item in cell",
        "key: to_python(item, kind.item_type) for key, item in cell",
        (f"{PROMPT}/test_values.py::test_a_struct_inside_a_map_has_no_null_of_another_rows_key",),
    ),
    Planted(
        "deep_features_in_the_order_of_pictures",
        "stages/model/forward/media.py",
        "order = places.argsort()",
        "order = torch.arange(len(places), device=places.device)",
        (f"{OPTIMIZE}/test_images_observed.py::test_the_trainer_sees_what_the_engine_saw",),
    ),
    Planted(
        "completions_begin_where_ids_end",
        "stages/model/forward/media.py",
        "before=0 if is_prompt else after_prompt,",
        "before=0,",
        (f"{OPTIMIZE}/test_images_trained.py::test_logprobs_and_gradients_are_transformers_own",),
    ),
    Planted(
        "later_ids_are_sampled_at_plain_positions",
        "stages/generate/engines/transformers.py",
        "positions if batch.shift is None else positions + batch.shift",
        "positions",
        (f"{GENERATE}/test_images_answered.py::test_transformers_gives_the_models_own_logprobs",),
    ),
    Planted(
        "a_state_runs_on_into_the_next_rollout",
        "stages/model/forward/attention.py",
        "starts = starts.to(block.keys.device) + block.prefix_lengths",
        "starts = starts.to(block.keys.device)",
        (f"{OPTIMIZE}/test_images_trained.py::test_logprobs_and_gradients_are_transformers_own",),
    ),
    Planted(
        "rm_goes_on_where_it_cannot_see",
        "stages/core/store/retention.py",
        "_DAMAGED = (CorruptError, LineageError)",
        "_DAMAGED = (CorruptError, LineageError, OSError)",
        (
            "tests/stages/core/store/test_retention.py::"
            "test_who_needs_a_version_is_not_told_if_a_folder_cannot_be_read",
        ),
    ),
    Planted(
        "clip_of_just_the_limit",
        "stages/model/media/decoder.py",
        "if num_samples > most_seconds * clip.samplerate:",
        "if num_samples >= most_seconds * clip.samplerate:",
        (f"{PROMPT}/test_prompt_audio.py::test_a_clip_at_its_limits_is_read",),
    ),
    Planted(
        "odd_chunks_are_not_filled_up",
        "stages/model/media/decoder.py",
        "at += size + size % 2",
        "at += size",
        (f"{PROMPT}/test_prompt_audio.py::test_clips_that_would_be_heard_in_part_are_refused",),
    ),
    Planted(
        "frames_of_mp3_are_not_padded",
        "stages/model/media/decoder.py",
        "        size += head >> 9 & 1\n",
        "",
        (f"{PROMPT}/test_prompt_audio.py::test_clips_are_heard_to_their_end",),
    ),
    Planted(
        "one_block_is_heard",
        "stages/model/media/decoder.py",
        "while len(samples := clip.read(_BLOCK, dtype, always_2d=True)):",
        "if len(samples := clip.read(_BLOCK, dtype, always_2d=True)):",
        (f"{PROMPT}/test_prompt_audio.py::test_clips_are_heard_to_their_end",),
    ),
    Planted(
        "md5_of_lower_bytes",
        "stages/model/media/decoder.py",
        "of_each[:, -width:]",
        "of_each[:, :width]",
        (f"{PROMPT}/test_prompt_audio.py::test_clips_are_heard_to_their_end",),
    ),
    Planted(
        "left_channel_alone",
        "stages/model/media/decoder.py",
        "samples.mean(1) for samples",
        "samples[:, 0] for samples",
        (f"{PROMPT}/test_prompt_audio.py::test_a_clip_is_heard_at_the_rate_of_the_model",),
    ),
    Planted(
        "resampled_is_louder",
        "stages/model/media/decoder.py",
        " * (count / len(clip))",
        "",
        (f"{PROMPT}/test_prompt_audio.py::test_a_clip_is_heard_at_the_rate_of_the_model",),
    ),
    Planted(
        "bytes_of_just_the_limit",
        "stages/model/media/checking.py",
        "if len(content) > limits.bytes:",
        "if len(content) >= limits.bytes:",
        (f"{PROMPT}/test_prompt_audio.py::test_a_clip_at_its_limits_is_read",),
    ),
    Planted(
        "policy_may_cut_clips",
        "stages/model/media/checking.py",
        '        audio = min(audio, (most_seconds, "the policy hears no more"))\n',
        "",
        (f"{PROMPT}/test_prompt_audio.py::test_a_clip_that_the_policy_would_cut_is_refused",),
    ),
    Planted(
        "clips_keep_their_rate",
        "stages/model/media/processor.py",
        "return open_clip(content, self._processor.feature_extractor.sampling_rate)[0]",
        "return open_clip(content)[0]",
        (
            f"{PROMPT}/test_prompt_audio.py::test_a_clip_of_another_rate_has_the_features_of_its_length",
        ),
    ),
    Planted(
        "part_of_a_window_is_promised",
        "stages/model/media/processor.py",
        "return most // window * window",
        "return most",
        (f"{PROMPT}/test_prompt_audio.py::test_a_clip_fills_whole_windows_at_most",),
    ),
    Planted(
        "files_from_the_end",
        "stages/model/media/processor.py",
        "unread[modalities[id]].pop(0)",
        "unread[modalities[id]].pop()",
        (f"{PROMPT}/test_prompt_audio.py::test_clips_stand_where_the_chat_shows_them",),
    ),
    Planted(
        "jpegs_are_clips",
        "stages/turns/environment.py",
        'thing[1:2] >= b"\\xe0"',
        'thing[1:2] >= b"\\xd0"',
        (f"{OPTIMIZE}/test_audio_observed.py::test_bytes_of_a_tool_are_told_apart",),
    ),
)
