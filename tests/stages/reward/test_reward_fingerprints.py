"""Planning a reward stage: every scorer's fingerprint, without a process, torch or a user's code."""

import json
import os
import subprocess
import sys

from tests.stages.reward.reward_models import make_model

COUNTING = """
import json, sys

started = []
NEW_PROCESS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system"}
sys.addaudithook(lambda event, arguments: started.append(event) if event in NEW_PROCESS else None)

from quiver.stages.reward.config import Config, with_fingerprints

config = Config.model_validate_json(sys.argv[1])
found = {scorer.name: scorer.fingerprint for scorer in with_fingerprints(config)[0].scorers}
heavy = {"torch", "transformers", "vllm", "mine"} & set(sys.modules)
print(json.dumps([found, started, sorted(heavy)]))
"""


def test_planning_starts_no_process_and_imports_no_torch(tmp_path, monkeypatch):
    """Nor does it run a user's code."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("print('this was run')\ndef f(completions): ...\n")
    make_model(tmp_path / "model")
    functions = {"shipped": "numeric", "file": "mine.py:f", "module": "mine:f"}
    config = {
        "functions": [{"use": use, "name": name} for name, use in functions.items()],
        "models": [{"model": "model"}],
        "servers": [{"dialect": "quiver", "urls": ["http://127.0.0.1:9"]}],
    }
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", COUNTING, json.dumps(config)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    found, started, imported = json.loads(done.stdout)
    assert {name: text.partition(":")[0] for name, text in found.items()} == {
        "shipped": "quiver",
        "file": "sha256",
        "module": "sha256",
        "model": "sha256",
        "quiver": "server",
    }
    assert (started, imported) == ([], [])
