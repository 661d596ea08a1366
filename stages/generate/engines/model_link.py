"""One path for one model after another, so that vLLM finds what it compiled for the last one.

vLLM's compile cache has the model's path in its key, and each version of a policy has another path.
An engine is therefore given a link to the version, `$TMPDIR/quiver-engines-UID/0`. Engines that run
at the same time have links of other numbers: a link is its holder's by a lease, which is free when
its process has died.

    link = ModelLink(version.files.folder)
    LLM(str(link.path))
    link.release()
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from quiver.stages.common.runtime.folders import users_folder
from quiver.stages.common.store.leases import Leases
from quiver.stages.common.store.storage import Storage


class ModelLink:
    """A link that leads to `model` until it is released."""

    def __init__(self, model: Path) -> None:
        """Raises SecurityError where the folder of links is another user's."""
        folder = users_folder("engines")
        # an engine that was stopped reads its model when it goes on
        leases = Leases(Storage(folder), "leases", f"engine of {model}", sleepers_hold=True)
        for number in itertools.count():
            self._lease = leases.take(str(number))
            if self._lease is not None:
                break
        leases.trim(self._lease)
        self.path = folder / str(number)
        replacement = folder / f"{number}.new"
        replacement.unlink(missing_ok=True)  # of a process that died
        replacement.symlink_to(model.absolute())
        os.replace(replacement, self.path)

    def release(self) -> None:
        """Let the next engine have the link; this one reads no file any more."""
        self._lease.release()
