"""An engine of a user's own."""

import numpy as np

from quiver.stages.generate.engine import Completion


class Engine:
    def __init__(self, setup):
        self.setup, self.info = setup, {"name": "mine"}

    def generate(self, requests):
        for request in requests:
            ids = np.array([33 + request.seed % 60, 2], np.int32)
            yield Completion(request.index, ids, np.full(2, -1.5, np.float32), "stop", "2")

    def close(self):
        pass
