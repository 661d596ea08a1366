"""`quiver diff`: which cells of two versions differ."""

from quiver.flows.commands.compare import diff
from quiver.stages.common.store import Store
from tests.stages.optimize import world
from tests.tiny import make_policy


def test_errors_that_nobody_has_do_not_differ(tmp_path):
    """Though they are those of functions of other names."""
    store = Store(tmp_path / "store")
    rollouts, first = world.make(store, make_policy(store), world.even_share, groups=2)
    second = world.write_rewards(store, rollouts, world.even_share, "other", names=("g",))
    changed = diff(store, str(first.ref), str(second.ref))["rows"]["changed"]
    assert changed == {"parts": 8}
