"""A secret that a recipe names appears nowhere: not in the store, logs, errors, temporary files or
command lines, nor in Prefect's database, while a stage runs or after it.

The server that wants it plays it back: in a refusal, in the error of a row, beside a number, plain
and escaped.
"""

import base64
import json
import subprocess
from pathlib import Path

import pytest

from quiver.flows.recipe import load
from quiver.schemas.errors import ConfigError
from quiver.stages.core.store import Store
from tests.flows.conftest import QUICK, command_environment, command_line, write_recipe
from tests.stages.reward.fake_server import FakeServer, reply, scored

pytestmark = pytest.mark.prefect
CANARY = "canary-5b1e0f4c9d77"
ESCAPED = "".join(f"\\u{ord(letter):04x}" for letter in CANARY)
SERVER = """
[[reward.servers]]
dialect = "quiver"
urls = ["{url}"]
token = "env:REWARD_KEY"
extra = true
"""


def forms() -> list[bytes]:
    """The secret as it is, and as base64 has it at each place where it may begin."""
    coded = [base64.b64encode(b"x" * skipped + CANARY.encode())[4:-4] for skipped in range(3)]
    return [CANARY.encode(), *coded]


def places(folder: Path) -> list[str]:
    """Files below `folder`, and command lines of all processes, that hold the secret."""
    found = []
    for path in (*folder.rglob("*"), *Path("/proc").glob("[0-9]*/cmdline")):
        try:
            if path.is_file() and any(form in path.read_bytes() for form in forms()):
                found.append(str(path))
        except OSError:  # gone meanwhile
            continue
    return found


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    """`quiver run` with the secret in its environment, and its temporary files below `folder`."""
    (folder / "tmp").mkdir(exist_ok=True)
    env = {**command_environment(folder), "REWARD_KEY": CANARY, "TMPDIR": str(folder / "tmp")}
    env |= {"PREFECT_LOGGING_LEVEL": "DEBUG", "PREFECT_LOGGING_TO_API_ENABLED": "true"}
    command = [
        *command_line(),
        "run",
        "recipe.toml",
        "--json",
        "--debug",
    ]
    return subprocess.run(
        [*command, *arguments], cwd=folder, env=env, capture_output=True, check=False
    )


def test_a_secret_appears_nowhere(embedded_server, tmp_path):
    folder, met = write_recipe(tmp_path / "work"), []

    def play_back(asked):
        met.extend(places(folder))
        assert asked.headers["authorization"] == f"Bearer {CANARY}"
        if refusing:
            return reply({"detail": f"bad key {CANARY}"}, 401)
        answer = scored(asked)
        answer["rows"][0] |= {"reward": None, "error": f"the key {CANARY} is odd"}
        for row in answer["rows"][1:]:
            row["extra"] = {"note": CANARY, "again": "ESCAPED"}
        return reply(json.dumps(answer).replace("ESCAPED", ESCAPED).encode())

    with FakeServer(play_back) as server:
        recipe = folder / "recipe.toml"
        section = SERVER.format(url=server.url) + "\n[optimize]"
        recipe.write_text(recipe.read_text().replace("\n[optimize]", section))
        options = ["--iterations=1", "--set=data.held_out=null", "--set=reward.max_invalid=0.5"]
        options += [f"--set={setting}" for setting in ("placement.retry_seconds=0.1", *QUICK)]
        refusing = True
        refused = run(folder, *options)
        assert refused.returncode == 6 and b"bad key ***" in refused.stderr, refused.stderr.decode()
        refusing = False
        done = run(folder, *options)
        assert done.returncode == 0, done.stderr.decode()
        servers = f"[{{dialect='quiver',urls=['{server.url}'],token='{CANARY}'}}]"
        with pytest.raises(ConfigError) as inline:
            load(recipe, [f"reward.servers={servers}"])
        assert CANARY not in str(inline.value)
    assert met == places(folder) == []
    for output in (refused, done):
        assert not any(form in output.stdout + output.stderr for form in forms())
    table = Store(folder / "store").open("tiny/rewards@1").table().to_pylist()
    told = [str(row["errors"]["quiver"] or row["extra"]["quiver"]) for row in table]
    assert any("the key *** is odd" in text for text in told) and any(
        '"again": "***"' in text for text in told
    )
    database = b"".join(path.read_bytes() for path in (folder / "prefect").glob("prefect.db*"))
    assert b"env:REWARD_KEY" in database, "what was searched holds the runs with their parameters"
