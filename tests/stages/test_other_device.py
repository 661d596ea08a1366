"""The stages' models on a device that is not the CPU: the same tests as there, in one child
process."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]
THESE = """
    generate/test_generate_transformers.py::test_logprobs_are_those_of_a_plain_forward_pass[llama]
    generate/test_generate_transformers.py::test_logprobs_are_those_of_a_plain_forward_pass[t5]
    logprobs/test_logprobs_stage.py::test_it_is_the_models_own_logprob[0.7-shared]
    logprobs/test_logprobs_stage.py::test_it_is_the_models_own_logprob[0.7-packed]
    logprobs/test_logprobs_stage.py::test_another_precision_is_near[0.7-bf16]
    optimize/test_lora.py::test_only_the_adapters_are_trained_and_have_moments
    optimize/test_optimize_goes_on.py::test_two_iterations_of_one_step_are_one_of_two_bit_for_bit
    optimize/test_optimize_stage.py::test_score_after_says_what_the_new_policy_thinks
    optimize/test_critic_stage.py::test_one_rollout_a_prompt_gives_an_advantage_a_token[llama]
    optimize/test_critic_stage.py::test_one_rollout_a_prompt_gives_an_advantage_a_token[t5]
    reward/test_reward_forward.py::test_each_way_gives_what_one_input_alone_gives
"""


def child(*command: str) -> subprocess.CompletedProcess:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "PYTEST_ADDOPTS": "",  # with the same --basetemp it would empty the folders of this pytest
    }
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_nobody_forgets_where_a_models_tensors_live():
    tests = [f"tests/stages/{name}" for name in THESE.split()]
    done = child("-m", "pytest", "-p", "tests.other_device", "-p", "no:cacheprovider", "-q", *tests)
    assert done.returncode == 0, done.stdout[-8000:]


def test_a_tensor_left_on_the_cpu_is_refused():
    code = """
        import torch
        import tests.other_device

        there = torch.ones(2, 3).to("other")
        assert (there @ there.T + torch.tensor(1.0)).tolist() == [[4, 4], [4, 4]]
        assert there[torch.tensor([1])].device.type == "other"
        there + torch.ones(3)
    """
    done = child("-c", textwrap.dedent(code))
    assert (
        "expected all tensors on one device, found tensors of shape [(3,)] on the CPU"
        in done.stderr.splitlines()[-1]
    )
