"""The stages of a flow in this process, without Prefect around them."""

import threading

from quiver.flows.calls import calls_of
from quiver.stages.core.run import runner


class Stages:
    """Makes what is not finished: one stage after another, with overlap too, since torch's settings
    are the whole process's. After `calls` of them the flow is stopped."""

    def __init__(self, calls: int = 1000) -> None:
        self.calls = calls
        self.num_made = 0
        self._one_at_a_time = threading.Lock()

    def make(self, call, *_):
        with self._one_at_a_time:
            if not self.calls:
                raise KeyboardInterrupt
            self.calls -= 1
            self.num_made += 1
            return runner.find_or_make(call)

    def of(self, recipe):
        """A block in which these stages are the recipe's."""
        return calls_of(recipe, self.make, expired=True)
