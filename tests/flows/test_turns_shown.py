"""What people are shown of rollouts with turns: lists, rows, tokens, the page of a run; and that
none of it is told apart by position."""

import pyarrow as pa
import pytest
import torch

from quiver.flows.commands import versions, viewing
from quiver.schemas import fields, prompts
from quiver.stages.common.models.loading import load_model
from quiver.stages.common.store import Store
from quiver.stages.common.verification import verify
from quiver.stages.report.joined import Selection, open_joined
from tests import episodes
from tests.flows.conftest import quiver
from tests.stages.optimize import world
from tests.tiny import make_policy
from tests.writing import begin


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Store:
    """`tiny`: episodes, their prompts and rewards, and the policy that was trained on them."""
    store = Store(tmp_path_factory.mktemp("turns") / "store")
    policy = make_policy(store)
    rows = episodes.sample(load_model(policy, dtype=torch.float32), episodes.prompts(3), 4)
    asked = world.write_prompts(store, rows)
    rollouts = episodes.write(store, policy, rows, prompts=asked)
    single = [{k: v for k, v in row.items() if k not in ("turns", "end_reason")} for row in rows]
    episodes.write(store, policy, single, "single")
    rewards = episodes.write_rewards(store, rollouts)
    world.trained(store, policy, (rollouts, rewards), world.config(credit="turn"))
    return store


def test_lists_rows_and_tokens(store, capsys):
    path = str(store.path)
    for ref in ("tiny/rollouts@1", "tiny/rewards@1", "tiny/advantages@1", "tiny/policy@1"):
        versions.show(ref, 3, path)
        viewing.view(ref, n=3, store=path)
    shown = capsys.readouterr().out
    assert "answer 0" in shown
    rows = store.open("tiny/rollouts@1").table().to_pylist()
    for ref in ("tiny/rollouts@1", "tiny/rewards@1", "tiny/policy@1"):
        joined = open_joined(store, ref)
        for position, row in enumerate(rows):
            tokens = joined.tokens(position)
            assert tokens.ids == row["completion_ids"]
            assert len(tokens.advantages) == len(tokens.ids)
        best = joined.order(Selection(sort="reward", descending=True))
        rewards = store.open("tiny/rewards@1").table()["reward"].to_pylist()
        assert rewards[best[0]] == max(rewards)


def test_the_commands_and_their_json(store, tmp_path):
    path = str(store.path)
    answer = quiver(tmp_path, "show", "tiny/rollouts@1", "-n", "2", "--store", path)
    assert answer["rows"][0]["rollout_id"] == "e-000-0"
    assert answer["manifest"]["schema"] == "rollouts/2"
    for command in (
        ["ls", "tiny"],
        ["lineage", "tiny/policy@1"],
        ["verify"],
        ["diff", "tiny/rollouts@1", "single/rollouts@1"],
    ):
        assert quiver(tmp_path, *command, "--store", path)
    assert verify(store)[1] == []


def test_the_page_of_a_run(store, tmp_path):
    page = tmp_path / "page.html"
    quiver(tmp_path, "report", "tiny", "-o", str(page), "--store", str(store.path))
    assert '<pre class="policy">text 0</pre>' in page.read_text()


def test_prompts_beyond_text_are_shown(store):
    """prompts/2 beside episodes: the last message is what was asked."""
    schema = fields.with_struct(prompts.BEYOND_TEXT, columns=pa.struct({"answer": pa.int64()}))
    message = {
        "role": "user",
        "content": "guess",
        "tool_calls": None,
        "tool_call_id": None,
        "name": None,
    }
    about = {
        "prompt_text": "guess",
        "columns": {"answer": 7},
        "tools": "[]",
        "images": None,
        "image_spans": None,
    }
    rows = store.open("tiny/rollouts@1").table().to_pylist()
    asked = {row["group_id"]: row["prompt_ids"] for row in rows}
    table = pa.Table.from_pylist(
        [
            {"group_id": group, "messages": [message], "prompt_ids": ids, **about}
            for group, ids in asked.items()
        ],
        schema=schema,
    )
    stage = {"stage": "prompt", "stage_version": 1, "config": world.Settings(), "inputs": {}}
    with begin(store, "beyond", "prompts", **stage, force=True) as work:
        work.write(0, table)
        version = work.commit()
    assert version.manifest.kind_schema == "prompts/2"
    for row in rows:
        row["rollout_id"] = f"b-{row['rollout_id']}"
    rollouts = episodes.write(store, store.open("tiny/policy@0"), rows, "beyond", version)
    shown = open_joined(store, rollouts.ref).rows([0])[0]
    assert (shown["prompt"], shown["reference"]) == ("guess", 7)
