"""The stages' models on a device that is not the CPU: the same tests as there, in one child
process."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
THESE = """
    generate/test_generate_transformers.py::test_logprobs_are_those_of_a_plain_forward_pass[llama]
    generate/test_generate_transformers.py::test_logprobs_are_those_of_a_plain_forward_pass[t5]
    logprobs/test_logprobs_stage.py::test_it_is_the_models_own_logprob[packed]
    logprobs/test_logprobs_stage.py::test_another_precision_is_near[bf16]
    optimize/test_lora.py::test_only_the_adapters_are_trained_and_have_moments
    optimize/test_optimize_goes_on.py::test_two_iterations_of_one_step_are_one_of_two_bit_for_bit[llama-fields2]
    optimize/test_optimize_goes_on.py::test_two_iterations_of_one_step_are_one_of_two_bit_for_bit[llama-fields3]
    optimize/test_optimize_goes_on.py::test_two_iterations_of_one_step_are_one_of_two_bit_for_bit[llama-fields4]
    optimize/test_optimize_stage.py::test_score_after_says_what_the_new_policy_thinks
    optimize/test_critic_stage.py::test_one_rollout_a_prompt_gives_an_advantage_a_token[t5]
    reward/test_reward_forward.py::test_each_way_gives_what_one_input_alone_gives[llama-1-shared]
    reward/test_reward_forward.py::test_each_way_gives_what_one_input_alone_gives[llama-1-packed]
    reward/test_reward_forward.py::test_each_way_gives_what_one_input_alone_gives[llama-1-padded]
    reward/test_reward_forward.py::test_each_way_gives_what_one_input_alone_gives[llama-1-single]
"""
"""Of tests that take the same lines, one."""


def test_nobody_forgets_where_a_models_tensors_live():
    tests = [f"tests/stages/{name}" for name in THESE.split()]
    command = [sys.executable, "-m", "tests.stages.other_device_checks"]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", "-q", *tests],
        cwd=ROOT,
        # with the same --basetemp it would empty the folders of this pytest
        env={**os.environ, "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
