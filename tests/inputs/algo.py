"""An algorithm of a user's own."""

from quiver.stages.optimize.algorithms import Algorithm


def doubled(rewards, groups):
    """Twice the distance from the batch's mean."""
    return 2 * (rewards - rewards.mean())


DEFAULTS = {"clip_low": 0.1, "clip_high": 0.3}
ALGORITHM = Algorithm(
    "doubled", advantage=doubled, surrogate="clipped", aggregation="token_mean", defaults=DEFAULTS
)
