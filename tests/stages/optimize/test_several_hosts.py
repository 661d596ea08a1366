"""Ranks of which nobody watches over all, as where each of several hosts has a launcher of its own: of
one that dies or falls silent the other learns."""

from __future__ import annotations

import json
import signal
import sys
import time

import pytest

from tests.stages.optimize import world
from tests.warm import REAL_PYTHON

pytestmark = pytest.mark.dist


@pytest.mark.parametrize(
    "death", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)]
)
def test_a_rank_whose_peer_is_gone_or_silent_says_so(store, policy, made, tmp_path, death):
    """Of a killed one connections are reset; a host without power or cable is silent."""
    inputs = world.inputs_of(policy, made)
    refs = {role: str(version.ref) for role, version in inputs.items()}
    settings = world.config(token_budget=40, learning_rate=1e-2, epochs=4000)
    call = json.dumps([store.url, settings.model_dump(mode="json"), refs, "two"])
    # a signal that cannot be caught does not reach a fork
    python = sys.executable if death == signal.SIGKILL else REAL_PYTHON
    module = "tests.stages.optimize.host_checks"
    ranks, logs = world.start_ranks(python, module, tmp_path, 2, call)
    try:
        deadline = time.monotonic() + 120
        while not any("step 3:" in log.read_text() for log in logs):
            assert time.monotonic() < deadline and not any(rank.poll() for rank in ranks)
            time.sleep(0.05)
        ranks[0].send_signal(death)
        stdout, _ = ranks[1].communicate(timeout=120)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    error = json.loads(stdout.splitlines()[-1])["error"]
    assert (error["code"], error["object"]) == ("E-RESOURCE", "the other ranks"), error
    assert "run the same command again" in error["next"]
    assert ranks[1].returncode == 7
    assert store.numbers("two", "policy") == []
