"""A fixed set of small bugs, and the tests that are to notice them.

    python -m tests.mutants            # what caught.json says is caught must still be caught
    python -m tests.mutants --list     # the bugs, as differences

Bugs that were planted by hand stand in planted.py, each with its test. The others are made by the
operators of operators.py. Which of a file's are taken is decided by a hash of their names, so that
a change in one function does not choose others everywhere else, and neither does another name of
the file. The product is read as text here and never imported.
"""

from __future__ import annotations

import difflib
import hashlib
from dataclasses import dataclass
from pathlib import Path

from .operators import Bug, find_bugs, mutated
from .planted import PLANTED, Planted

MOST_A_FILE = 20


@dataclass(frozen=True)
class Target:
    """A file that gets bugs, and the test files, or single tests, that are to notice them; the
    cheapest first."""

    path: str
    tests: tuple[str, ...]
    most: int = MOST_A_FILE
    """How many it gets at most: fewer where its tests take long to begin."""

    @property
    def stem(self) -> str:
        """What the names of its mutants start with: the file's name, behind its folder's where
        TARGETS has another file of that name."""
        path = Path(self.path)
        names = [Path(target.path).stem for target in TARGETS]
        return f"{path.parent.name}/{path.stem}" if names.count(path.stem) > 1 else path.stem


@dataclass(frozen=True)
class Mutant:
    """One bug in one file."""

    target: Target
    bug: Bug
    old_source: str

    @property
    def name(self) -> str:
        """For people, `--only` and caught.json: file, function, operator, ordinal."""
        return f"{self.target.stem}:{self.bug.name}"

    @property
    def new_source(self) -> str:
        return mutated(self.old_source, self.bug)

    def difference(self) -> str:
        """The lines that the bug changes, as a unified diff without context."""
        old, new = self.old_source.splitlines(), self.new_source.splitlines()
        path = self.target.path
        return "\n".join(difflib.unified_diff(old, new, path, path, n=0, lineterm=""))


FORWARD = "tests/stages/model/forward"
OPTIMIZE = "tests/stages/optimize"
REWARD = "tests/stages/reward"
GENERATE_STAGE = "tests/stages/generate/test_generate_stage.py"
ANSWERED = "tests/stages/generate/test_images_answered.py"
TURNS = "tests/stages/generate/test_turns_generated.py"
ENVIRONMENT_POOL = "tests/stages/turns/test_environment_pool.py"
STORE = "tests/stages/core/store"
FAULTS = "tests/faults"
VERIFICATION = "tests/flows/test_verification.py"
PROMPT = "tests/stages/prompt"
RESIDENT = "tests/flows/test_resident.py"
FLOW_POOL = "tests/flows/test_pool.py"
TARGETS = (
    Target(
        "stages/optimize/losses.py",
        (f"{OPTIMIZE}/test_losses.py", f"{OPTIMIZE}/test_critic.py"),
    ),
    Target(
        "stages/optimize/advantages.py",
        (f"{OPTIMIZE}/test_advantages.py", f"{OPTIMIZE}/test_critic.py"),
    ),
    Target(
        "stages/optimize/objective.py",
        (
            f"{OPTIMIZE}/test_bad_input.py::test_bad_input",
            f"{OPTIMIZE}/test_algorithms.py",
            f"{OPTIMIZE}/test_critic.py",
            f"{OPTIMIZE}/test_trainer.py",
        ),
    ),
    Target(
        "stages/optimize/trainer.py",
        (
            f"{OPTIMIZE}/test_critic.py",
            f"{OPTIMIZE}/test_optimize_resume.py",
            f"{OPTIMIZE}/test_optimize_stage.py::test_it_writes_a_policy_advantages_and_updates",
            f"{OPTIMIZE}/test_optimize_stage.py"
            "::test_a_step_that_runs_out_of_memory_is_repeated_in_smaller_micro_batches",
            f"{OPTIMIZE}/test_optimize_goes_on.py::test_trackers_write_where_they_are_told",
            f"{OPTIMIZE}/test_otb.py",
            f"{OPTIMIZE}/test_optimize_refuses.py",
            f"{OPTIMIZE}/test_trainer.py",
            f"{OPTIMIZE}/test_optimize_ranks.py",
        ),
    ),
    Target(
        "stages/optimize/rollouts.py",
        (
            f"{OPTIMIZE}/test_parts.py",
            f"{OPTIMIZE}/test_critic_stage.py::test_zero_variance_is_of_the_rewards_less_the_kl",
            f"{OPTIMIZE}/test_critic_stage.py::test_the_reward_scale_counts_every_scored_rollout",
            f"{OPTIMIZE}/test_critic_stage.py::test_zero_variance_is_not_of_the_advantages",
            f"{OPTIMIZE}/test_optimize_refuses.py"
            "::test_one_rollout_in_all_has_nothing_to_be_compared_with",
            f"{OPTIMIZE}/test_replay.py",
            f"{OPTIMIZE}/test_optimize_stage.py",
            f"{OPTIMIZE}/test_bad_input.py",
            f"{OPTIMIZE}/test_credit_of_turns.py",
        ),
    ),
    Target(
        "stages/optimize/audit.py",
        (
            f"{OPTIMIZE}/test_losses.py",
            f"{OPTIMIZE}/test_ratio.py",
            f"{OPTIMIZE}/test_replay.py",
            f"{OPTIMIZE}/test_optimize_refuses.py",
        ),
    ),
    Target(
        "stages/model/ragged.py",
        ("tests/stages/model/test_ragged.py", f"{OPTIMIZE}/test_critic.py"),
    ),
    Target(
        "stages/model/forward/policy.py",
        (
            f"{FORWARD}/test_precision.py",
            f"{FORWARD}/test_recompute.py",
            f"{FORWARD}/test_encoder_decoder.py",
            f"{OPTIMIZE}/test_critic.py",
            f"{FORWARD}/test_policy.py",
        ),
    ),
    Target(
        "stages/model/forward/layout.py",
        (
            f"{FORWARD}/test_layout.py",
            f"{FORWARD}/test_turn_passes.py",
            f"{FORWARD}/test_policy.py",
            f"{OPTIMIZE}/test_images_trained.py",
        ),
    ),
    Target("stages/model/forward/axes.py", (f"{FORWARD}/test_axes.py",)),
    Target(
        "stages/reward/tables.py",
        (
            f"{REWARD}/test_reward_groups.py",
            f"{REWARD}/test_reward_turns.py",
            f"{REWARD}/test_reward_retry.py",
            f"{REWARD}/test_reward_stage.py",
            f"{REWARD}/test_pictures.py",
        ),
    ),
    Target(
        "stages/generate/rows.py",
        (
            GENERATE_STAGE,
            f"{TURNS}::test_other_environments_and_limits_are_other_work",
            f"{ANSWERED}::test_transformers_gives_the_models_own_logprobs",
        ),
    ),
    Target("stages/generate/shards.py", (GENERATE_STAGE,)),
    Target(
        "stages/generate/prompts.py",
        (
            GENERATE_STAGE,
            f"{ANSWERED}::test_rows_of_one_batch_do_not_look_at_each_others_pictures",
            f"{ANSWERED}::test_a_row_may_be_null_where_others_have_pictures",
            f"{ANSWERED}::test_an_engine_is_told_of_the_pictures_of_prompts_and_of_turns",
            f"{ANSWERED}::test_a_policy_that_sees_nothing_does_not_answer_pictures",
            f"{OPTIMIZE}/test_images_observed.py::test_who_sees_nothing_is_not_asked",
        ),
    ),
    Target("stages/generate/requests.py", (GENERATE_STAGE,)),
    Target(
        "stages/generate/stage.py",
        (
            GENERATE_STAGE,
            f"{TURNS}::test_other_environments_and_limits_are_other_work",
            "tests/stages/generate/test_generate_vllm_lora.py::test_the_manifest_names_the_weights_and_the_base",
        ),
    ),
    Target("stages/core/store/tags.py", (f"{STORE}/test_tags.py",)),
    Target(
        "stages/core/store/leases.py",
        (
            f"{STORE}/test_leases.py",
            f"{STORE}/test_store.py::test_work_that_ends_on_a_full_disk_is_free_at_once",
            f"{STORE}/test_sharing.py",
            f"{STORE}/test_retention.py::"
            "test_a_process_of_another_boot_that_fell_silent_is_not_at_work",
        ),
    ),
    Target(
        "stages/core/store/listing.py",
        (f"{STORE}/test_listing.py", f"{STORE}/test_retention.py"),
    ),
    Target(
        "stages/core/store/marks.py",
        (
            f"{STORE}/test_retention.py",
            f"{VERIFICATION}::test_a_mark_that_cannot_be_read_is_told",
            f"{FAULTS}/test_corruption.py",
        ),
    ),
    Target(
        "stages/core/store/retention.py",
        (
            f"{STORE}/test_retention.py",
            f"{STORE}/test_no_folder.py::test_a_run_that_is_a_link_to_nowhere_is_told",
            f"{VERIFICATION}::test_a_version_that_is_deleted_on_purpose_is_no_error",
            f"{VERIFICATION}::test_a_damaged_version_is_put_aside_and_made_again",
            f"{FAULTS}/test_full_disk.py",
            f"{STORE}/test_bucket.py::"
            "test_what_a_sleeper_publishes_after_gc_deleted_its_data_is_marked",
            f"{OPTIMIZE}/test_adapter_alone.py::test_its_base_is_needed",
        ),
    ),
    Target(
        "stages/core/store/disk.py",
        (
            f"{STORE}/test_storage.py",
            f"{FAULTS}/test_kill.py",
            f"{FAULTS}/test_power_loss.py",
            f"{FAULTS}/test_two_writers.py",
        ),
    ),
    Target(
        "stages/core/store/bucket.py",
        (f"{STORE}/test_bucket.py", f"{STORE}/test_bucket_cache.py"),
        8,
    ),
    Target("stages/core/store/copying.py", (f"{STORE}/test_copying.py",), 8),
    Target("stages/core/store/places.py", (f"{STORE}/test_places.py",)),
    Target(
        "stages/core/store/versions.py",
        (
            f"{STORE}/test_store.py",
            f"{STORE}/test_listing.py::"
            "test_versions_are_seen_beside_an_older_copy_that_was_put_back",
            f"{STORE}/test_bucket_cache.py::test_a_copy_that_was_damaged_here_is_fetched_again",
            f"{STORE}/test_bucket.py::test_what_a_run_does_not_have_is_not_asked_for",
            f"{VERIFICATION}::test_a_crafted_arrow_file_with_the_right_hash_is_told",
            f"{STORE}/test_tags.py::test_every_move_has_its_entry",
            f"{STORE}/test_tags.py::test_verify_reads_the_entries_of_old_moves_too",
            f"{STORE}/test_retention.py",
        ),
    ),
    Target(
        "stages/core/store/writer.py",
        (
            f"{STORE}/test_store.py",
            f"{STORE}/test_sharing.py",
            f"{STORE}/test_leases.py::test_a_commit_that_slept_too_long_makes_no_second_version",
            f"{STORE}/test_retention.py::"
            "test_numbers_stay_given_and_what_expired_is_made_again_under_another",
            f"{STORE}/test_bucket.py::test_no_version_has_the_files_of_one_that_was_removed",
            f"{FAULTS}/test_two_writers.py",
        ),
    ),
    Target("stages/turns/pool.py", (ENVIRONMENT_POOL,), 12),
    Target("stages/turns/environment_process.py", (ENVIRONMENT_POOL,), 9),
    Target(
        "stages/prompt/rows.py",
        (f"{PROMPT}/test_templates.py", f"{PROMPT}/test_prompt_stage.py"),
        12,
    ),
    Target("stages/turns/tool_calls.py", ("tests/stages/turns/test_tool_calls.py",)),
    Target(
        "flows/placement.py",
        (
            f"{RESIDENT}::test_where_no_engine_can_stay_it_is_refused",
            f"{RESIDENT}::test_an_interpreter_of_its_own_is_asked_by_the_engine",
            f"{RESIDENT}::test_on_one_gpu_an_engine_is_resident_by_default",
            "tests/flows/test_placement.py",
        ),
        12,
    ),
    Target(
        "flows/pool.py",
        (
            "tests/flows/test_placement.py::test_a_call_travels_whole",
            f"{FLOW_POOL}::test_the_first_that_is_done_ends_the_others",
            f"{FLOW_POOL}::test_where_all_have_failed_an_error_says_more_than_a_crash",
            f"{FLOW_POOL}::test_a_run_that_the_server_lost_has_crashed",
            f"{FLOW_POOL}::test_a_run_that_is_taken_up_and_not_begun_has_failed",
            f"{FLOW_POOL}::test_there_are_as_many_runs_as_workers_where_they_can_share",
            f"{FLOW_POOL}::test_a_worker_that_is_busy_is_waited_for_until_its_pool_is_paused",
            f"{FLOW_POOL}::test_a_pool_that_the_server_lacks_is_told",
        ),
        8,
    ),
)
"""The golden trace wakes for none of them: its last digits are of one machine, and a test that
fails without a bug catches nothing."""
TOO_LONG = (
    f"{FORWARD}/test_encoder_decoder.py::"
    "test_logprobs_and_gradients_are_those_of_one_rollout_at_a_time",
    f"{GENERATE_STAGE}::test_kill_9_costs_at_most_one_shard",
    f"{ENVIRONMENT_POOL}::test_killed_from_outside_twenty_times_the_answers_are_the_same",
)
"""Tests that are left out: each takes ten seconds or more, and others see the same bugs."""

EQUIVALENT = {
    "ragged:_repeat:name:2": "a GPU alone takes that line: tests/gpu",
    "advantages:group_sums:one:0": "one more sum, of a group that no rollout is in",
    "shards:Shards.summary:one:1": "a process that made tokens has its seconds of generate",
    "shards:Shards.__init__:one:2": "one token more in the speed that a line of progress tells",
    "stage:import_ahead:sign:0": "it imports ahead of time what is imported anyway",
    "stage:_sample:drop:2": "files of the right size are verified too, as they are right after",
    "trainer:Trainer.warming:drop:1": "only the critic's step reads it",
    "trainer:Trainer._members:one:4": "what seeds people write is below 2**63 and 3**63",
    "leases:Owner.this_process:drop:0": "a process that asks is alive, so it has begun",
    "leases:Leases.top:one:3": "of a link that was released, nothing else is asked",
    "listing:Listing.visible:drop:5": "without marks, the order is that of the numbers anyway",
    "versions:Version._verify_files:one:1": "one file is fetched alone or with its folder",
    "turns/pool:_Slot.__init__:drop:0": "an annotation",
    "environment_process:Answerer._randomness:drop:2": "a finished one's state takes memory alone",
    "leases:_keep_renewed:drop:1": "the thread ends with its process, or is forgotten in a fork",
}
"""Bugs that change nothing which comes out, and why; they are not tried."""


class StaleTable(Exception):
    """A path of TARGETS or PLANTED, or the old text of a planted bug, is not in the repository."""


def every_mutant(root: Path) -> list[Mutant]:
    """The mutants of all tables. StaleTable."""
    made = [mutant for target in TARGETS for mutant in mutants_of(root, target)]
    return [*made, *(planted_mutant(root, planted) for planted in PLANTED)]


def mutants_of(root: Path, target: Target) -> list[Mutant]:
    """The file's mutants by operators, in the order of its text. StaleTable."""
    source = _source(root, target, "TARGETS in tests/mutants/__init__.py")
    mutants = [Mutant(target, bug, source) for bug in choose(find_bugs(source), target.most)]
    return [mutant for mutant in mutants if mutant.name not in EQUIVALENT]


def planted_mutant(root: Path, planted: Planted) -> Mutant:
    """The mutant of one planted bug. StaleTable."""
    target = Target(planted.path, planted.tests)
    table = f"{planted.name} in tests/mutants/planted.py"
    source = _source(root, target, table)
    if (count := source.count(planted.old)) != 1:
        raise StaleTable(
            f"{planted.path} has the old text of a planted bug {count} times, expected once: "
            f"correct {table}"
        )
    before = source.partition(planted.old)[0]
    start = len(before.encode())
    end = start + len(planted.old.encode())
    line = before.count("\n") + 1
    return Mutant(target, Bug(planted.name, "planted", 0, line, start, end, planted.new), source)


def _source(root: Path, target: Target, table: str) -> str:
    """The text of the target's file; its tests are there too. StaleTable."""
    for path in (target.path, *(test.partition("::")[0] for test in target.tests)):
        if not (root / path).is_file():
            raise StaleTable(f"{path} is not in {root}: correct {table}")
    return (root / target.path).read_text()


def choose(bugs: list[Bug], most: int = MOST_A_FILE) -> list[Bug]:
    """At most so many of a file's bugs: one of each function first, then whichever come first by
    the hash of their names."""

    def hashed(bug: Bug) -> str:
        return hashlib.sha256(bug.name.encode()).hexdigest()

    firsts: list[Bug] = []
    others: list[Bug] = []
    seen: set[str] = set()
    for bug in sorted(bugs, key=hashed):
        (others if bug.function in seen else firsts).append(bug)
        seen.add(bug.function)
    taken = [*firsts, *others][:most]
    return sorted(taken, key=bugs.index)
