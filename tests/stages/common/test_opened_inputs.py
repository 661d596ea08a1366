"""What a version was made of, by the names and hashes of its manifest."""

import pytest

from quiver.schemas.errors import LineageError
from quiver.stages.common.lineage import open_input
from quiver.stages.common.store import Store
from tests import sight
from tests.stages.optimize import world
from tests.tiny import make_policy
from tests.writing import begin


def test_an_input_of_another_kind_than_its_role_is_told(tmp_path):
    """Whoever reads its columns would not find them."""
    store = Store(tmp_path / "store")
    rollouts, rewards = world.make(store, make_policy(store), world.even_share, groups=1)
    about = {"stage": "reward", "stage_version": 1, "config": sight.Plain()}
    with begin(store, "wrong", "rewards", inputs={"rollouts": rewards}, **about) as work:
        work.write(0, rewards.table())
        wrong = work.commit()
    assert open_input(store, rewards, "rollouts").ref == rollouts.ref
    with pytest.raises(LineageError, match="its rollouts are tiny/rewards@1"):
        open_input(store, wrong, "rollouts")
