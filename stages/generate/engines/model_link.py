"""One path for one model after another, so that vLLM finds what it compiled for the last one.

vLLM's compile cache has the model's path in its key, and each version of a policy has another path.
An engine is therefore given a link to the version, `~/.cache/quiver/engines/0`. (Not in $TMPDIR, of
which each stage's process has its own.) Engines that run at the same time have links of other
numbers: a link is its holder's by a lease, which is free when its process has died.

    link = ModelLink(version.files.folder)
    LLM(str(link.path))
    link.release()
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path

from quiver.stages.common.store.leases import Leases
from quiver.stages.common.store.storage import Storage


class ModelLink:
    """A link that leads to `model` until it is released."""

    def __init__(self, model: Path) -> None:
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        folder = Path(cache, "quiver", "engines")
        folder.mkdir(parents=True, exist_ok=True)
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
