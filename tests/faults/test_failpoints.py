"""What QUIVER_FAIL says, what it costs, and how a mistake in it is told."""

import signal
import time

import pytest

from quiver.schemas.errors import ConfigError, ResourceError
from quiver.stages.common.store import Store
from quiver.stages.common.store.failpoints import POINTS, VARIABLE, failpoint
from tests.faults.scenes import in_child, one_version, written


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        ("shard.noted:kill", -signal.SIGKILL),
        ("shard.noted:signal", -signal.SIGTERM),
        ("shard.noted:signal=10", -signal.SIGUSR1),
        ("shard.noted@2:kill", -signal.SIGKILL),
        ("tag.moved:kill,commit.renamed:kill", -signal.SIGKILL),
        ("shard.noted@5:kill", 0),
        ("tag.moved:kill", 0),
    ],
)
def test_a_process_ends_where_it_is_told(tmp_path, failure, code):
    assert in_child(lambda: one_version(tmp_path / "store", seed=3), failure)[0] == code


def test_the_third_time_is_counted_in_each_process(tmp_path):
    for number in range(2):
        path = tmp_path / str(number)
        in_child(lambda path=path: one_version(path, seed=3), "shard.noted@3:kill")
        assert len([*path.glob("a/logprobs/.staging/*.notes/part-*")]) == 3


def test_an_error_is_the_systems(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, "shard.flushing:raise=28")
    with pytest.raises(ResourceError, match="the disk is full"):
        written(tmp_path / "store", 0, 1)


def test_it_sleeps(monkeypatch):
    monkeypatch.setenv(VARIABLE, "flow.answered:sleep=0.05")
    started_at = time.monotonic()
    failpoint("flow.answered")
    assert time.monotonic() - started_at >= 0.05
    failpoint("flow.answered")
    assert time.monotonic() - started_at < 5, "once"


@pytest.mark.parametrize(
    "failure",
    ["nowhere:kill", "shard.noted", "shard.noted:explode", "shard.noted@0:kill", "x\x1b[1m"],
)
def test_a_mistake_is_told_when_the_store_is_opened(tmp_path, monkeypatch, failure):
    monkeypatch.setenv(VARIABLE, failure)
    with pytest.raises(ConfigError, match="expected NAME") as caught:
        Store(tmp_path / "store")
    assert "\x1b" not in str(caught.value)
    assert not (tmp_path / "store").exists()


def test_each_place_says_how_things_stand():
    assert len(POINTS) >= 24
    assert all(len(about) > 5 for _, _, about in POINTS.values())
