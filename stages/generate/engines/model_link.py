"""A constant path for changing models, so that vLLM reuses what it compiled for the previous one.

vLLM's compile cache has the model's path in its key, and each version of a policy has another path.
So an engine gets a link to the version, `~/.cache/quiver/engines/HOST/0`. (It is not in $TMPDIR,
because each stage's process has its own.) Engines that run at the same time have links with other
numbers: a lease protects each link, and ends when its process dies. HOST names this boot of this
host or container, so that every holder's process can be checked.

The path is the model's own if no folder for links can be made. The same holds for a second engine
in one process, which vLLM would otherwise confuse with the first one.

    link = ModelLink(version.files.folder)
    LLM(str(link.path))
    link.release()
"""

from __future__ import annotations

import itertools
import logging
import os
from pathlib import Path

from quiver.stages.common.store.leases import Lease, Leases, Owner
from quiver.stages.common.store.storage import Storage

_models: list[Path] = []
"""Models that this process has requested a link for."""
log = logging.getLogger(__name__)


class ModelLink:
    """A path that points to `model` until it is released."""

    def __init__(self, model: Path) -> None:
        self.path = model
        self._lease: Lease | None = None
        _models.append(model)
        if len(_models) > 1:
            return
        try:
            self._link(model)
        except OSError as error:  # the link only saves time
            log.debug("no constant path for %s: %s", model, error)

    def _link(self, model: Path) -> None:
        owner = Owner.this_process()
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        host = f"{owner.boot_id[:8]}-{owner.pid_namespace}"
        folder = Path(cache, "quiver", "engines", host)
        # The user has no home folder.
        if not folder.is_absolute():
            return
        folder.mkdir(parents=True, exist_ok=True)
        # A stopped engine reads its model when it resumes, so it keeps its link.
        leases = Leases(Storage(folder), "leases", f"engine of {model}", sleepers_hold=True)
        for number in itertools.count():
            lease = leases.take(str(number))
            if lease is not None:
                break
        self._lease = lease
        leases.trim(lease)
        replacement = folder / f"{number}.new"
        # Left over from a process that died.
        replacement.unlink(missing_ok=True)
        replacement.symlink_to(model.absolute())
        os.replace(replacement, folder / str(number))
        self.path = folder / str(number)

    def release(self) -> None:
        """Give up the link, so that the next engine can use it; this engine reads no more files."""
        if self._lease is not None:
            self._lease.release()
            self._lease = None
