"""What is refused where the config is read, before anything is opened."""

import pytest

from schemas.errors import ConfigError
from stages.common.config import parse
from stages.optimize.stage import Config, run
from tests.stages.optimize import world


@pytest.mark.parametrize(
    "given, said",
    [
        ({"correction": {"mode": "mask", "low": 3.0}}, "low must be < high = 2, got 3"),
        ({"betas": (0.9, 1.0)}, "betas.1: Input should be less than 1, got 1.0"),
        ({"betas": (-0.1, 0.9)}, "betas.0: Input should be greater than or equal to 0"),
        ({"options": {"clip_low": 0.5}}, "options.clip_low has a field of its own: set optimize.clip_low"),
        ({"algorithm": "mine.py:MINE", "options": {"drop_zero_variance": True}}, "set optimize.drop_zero_variance"),
    ],
)
def test_what_can_not_be_meant_is_refused(given, said):
    with pytest.raises(ConfigError) as caught:
        parse(Config, given, "optimize")
    assert said in caught.value.message


def test_a_seed_may_be_a_time_in_nanoseconds(store, policy):
    made = world.make(store, policy, world.even_share)
    config = Config(seed=1_790_000_000_000_000_000, minibatches=2, device="cpu")
    done = store.open(run(config, store, policy=policy.ref, rollouts=made[0].ref, rewards=made[1].ref))
    assert done.manifest.metrics["steps"] == 2
