"""What `quiver cost` adds up, and what a version records of its own making."""

import pytest

from quiver.flows.look.cost import cost, cost_lines
from quiver.schemas.errors import LineageError
from quiver.schemas.refs import Ref
from quiver.stages.core.store import Store, marks
from quiver.stages.core.store.listing import REMOVED
from tests.flows.long_run import write_run


@pytest.fixture
def store(tmp_path) -> Store:
    store = Store(tmp_path / "store")
    write_run(store, 3)
    return store


def by_name(answer):
    return {row["name"]: row for row in answer["rows"]}


def test_each_stage_counts_once_and_measurements_apart(store):
    """Advantages and updates are made in the seconds of their policy."""
    answer = cost(store, "long")
    rows = by_name(answer)
    assert {name: (row["versions"], row["seconds"]) for name, row in rows.items()} == {
        "prompt": (3, 3.0),
        "generate": (3, 180.0),
        "reward": (3, 15.0),
        "optimize": (9, 90.0),
        "evaluate": (2, 4.0),
        "policy": (1, 0.0),
        "prompt (held-out)": (2, 2.0),
        "generate (held-out)": (2, 120.0),
        "reward (held-out)": (2, 10.0),
    }
    optimize = rows["optimize"]
    assert optimize["phases"] == {"work": 67.5} and optimize["bytes"] == 9000
    assert (optimize["processor_seconds"], optimize["device_seconds"]) == (60.0, 180.0)
    assert (optimize["devices"], optimize["peak_device_memory"]) == (2, 7000)
    assert rows["generate"]["peak_memory"] == 1003 and rows["generate"]["tokens"] == 300
    total = answer["total"]
    assert total["seconds"] == 424.0 and total["tokens"] == 700
    assert total["versions"] == 27 and total["unfinished_attempts"] == 1
    assert answer["unmeasured"] == 15
    text = "\n".join(cost_lines(answer))
    assert "1 attempt did not finish" in text and "15 versions without record" in text


def test_an_iteration_is_the_number_of_the_policy_trained_or_measured(store):
    rows = by_name(cost(store, "long", "iteration"))
    measured = 1 + 60 + 5 + 2
    assert {name: row["seconds"] for name, row in rows.items()} == {
        0: measured,
        1: 96.0,
        2: 96.0,
        3: 96.0 + measured,
    }
    assert list(rows) == [0, 1, 2, 3] and rows[2]["unfinished_attempts"] == 1


def test_days_add_up_to_the_same_total_and_deleted_data_count(store):
    marks.write(store.storage, Ref("long", "rollouts", 2), REMOVED, "")
    answer = cost(store, "long", "day")
    assert [row["name"] for row in answer["rows"]] == ["2026-03-01"]
    assert answer["rows"][0]["seconds"] == answer["total"]["seconds"] == 424.0


def test_a_damaged_or_missing_manifest_is_counted_and_left_out(store):
    path = store.version(Ref("long", "rollouts", 2)).files.folder / "manifest.json"
    path.write_bytes(path.read_bytes()[:-9])
    (store.version(Ref("long", "rollouts", 3)).files.folder / "manifest.json").unlink()
    answer = cost(store, "long")
    assert answer["unreadable"] == 2 and answer["total"]["versions"] == 25
    with pytest.raises(LineageError, match="has no versions"):
        cost(store, "short")


def test_the_command_names_what_it_takes(store, command):
    assert command("cost", "long", "--by", "day", "--store", store.url)[1]["by"] == "day"
    code, answer = command("cost", "long", "--by", "week", "--store", store.url)
    assert code == 2 and "'stage', 'iteration', 'day'" in answer["error"]["message"]
