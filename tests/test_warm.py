"""Commands of tests are forks of warm interpreters: a fresh one takes longer to import what it needs
than most tests take."""

import subprocess

from tests.flows.conftest import command_line
from tests.warm import seconds_of_forks


def test_a_command_of_a_test_is_a_fork():
    before = seconds_of_forks()
    subprocess.run([*command_line(), "algorithms"], check=True, capture_output=True)
    assert seconds_of_forks() > before
