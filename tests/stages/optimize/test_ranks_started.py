"""`processes = n` without a launcher: the stage's own process starts the ranks, and none outlives
it. That two train as one is shown in test_optimize_ranks.py."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from quiver import run_stage
from quiver.flows.verification import verify
from quiver.schemas.errors import NumericError, ResourceError
from quiver.stages.core import ranks
from quiver.stages.core.run.call import Call, Where
from quiver.stages.core.run.stage_process import run_call
from tests.faults.failing import environment
from tests.stages.optimize import world

pytestmark = pytest.mark.dist
ALGORITHM = """
import os, time
from pathlib import Path

from quiver.schemas.errors import NumericError
from quiver.stages.optimize.algorithms import Algorithm


def plain(tokens, *, fault="none"):
    if fault == "fail" and os.environ.get("RANK") == "1":
        raise NumericError("mine", "what rank 1 alone meets")
    if fault == "hang" and "RANK" in os.environ:
        Path(__file__).with_name(f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
        time.sleep(600)
    if fault == "nan" and os.environ.get("RANK") == "1":
        return tokens.logprobs * float("nan"), tokens.logprobs > 0
    return -tokens.logprobs * tokens.advantages, tokens.logprobs > 0


ALGORITHM = Algorithm("mine", "leave_one_out", plain, "token_mean", {"fault": "none"})
"""
SCRIPT = """
import json, sys
from quiver import run_stage

store, config, refs = json.loads(sys.argv[1])
run_stage("optimize", config, store, **refs)
"""


@pytest.fixture
def refs(policy, made) -> dict[str, str]:
    inputs = world.inputs_of(policy, made)
    return {role: str(version.ref) for role, version in inputs.items()}


@pytest.fixture
def config(tmp_path):
    (tmp_path / "mine.py").write_text(ALGORITHM)
    algorithm = f"{tmp_path / 'mine.py'}:ALGORITHM"
    several = {"processes": 2, "token_budget": 40}  # micro-batches for both
    return lambda fault: world.config(algorithm=algorithm, options={"fault": fault}, **several)


def test_an_error_of_a_rank_that_does_not_write_is_the_stage_s(store, refs, config):
    with pytest.raises(NumericError, match="what rank 1 alone meets"):
        run_stage("optimize", config("fail"), store, **refs)
    assert store.numbers("tiny", "policy") == [0]


def test_nan_on_one_rank_is_a_step_left_out_on_both(store, refs, config):
    """Three in a row end the stage; a rank that waited for the other would do so for ever."""
    fields = {**config("nan").model_dump(mode="json"), "epochs": 4}
    with pytest.raises(NumericError, match="3 optimizer steps in a row"):
        run_call(Call("optimize", fields, store.url, refs, where=Where(timeout_seconds=120)))
    assert store.numbers("tiny", "policy") == [0]


def test_a_rank_that_dies_as_it_saves_ends_the_stage_and_the_next_call_goes_on(
    store, refs, config, monkeypatch, caplog
):
    chosen = config("none").model_copy(update={"epochs": 3, "resume_steps": 1})
    with monkeypatch.context() as patch:
        for name, text in environment("resume.saved@2:kill").items():
            patch.setenv(name, text)
        with pytest.raises(ResourceError, match="rank 0 of 2 was ended by SIGKILL"):
            run_stage("optimize", chosen, store, **refs)
    assert store.numbers("tiny", "policy") == [0] and verify(store)[1] == []
    caplog.set_level("INFO", "quiver.stages")
    assert run_stage("optimize", chosen, store, **refs).version == 1
    assert "the training continues after step 0" in caplog.text
    assert verify(store)[1] == [] and not list(Path(store.url).glob("tiny/policy/.work/*"))


def test_no_rank_outlives_whoever_asked(store, refs, config, tmp_path):
    asked = json.dumps([store.url, config("hang").model_dump(mode="json"), refs])
    asking = subprocess.Popen([sys.executable, "-c", SCRIPT, asked])
    pids = [tmp_path / f"pid-{rank}" for rank in (0, 1)]
    deadline = time.monotonic() + 60
    while not all(path.exists() and path.read_text() for path in pids):
        assert time.monotonic() < deadline and asking.poll() is None
        time.sleep(0.05)
    asking.kill()
    asking.wait()
    while any(Path("/proc", path.read_text()).exists() for path in pids):
        assert time.monotonic() < deadline + 30, "a rank is left"
        time.sleep(0.05)
    assert store.numbers("tiny", "policy") == [0]


def test_ranks_are_started_once(monkeypatch):
    assert ranks.needed("optimize", {"processes": 2}) == 2
    assert ranks.needed("optimize", {"processes": None}) == 1
    assert ranks.needed("generate", {"processes": 2}) == 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert ranks.needed("optimize", {"processes": 2}) == 1
