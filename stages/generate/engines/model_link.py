"""One path for one model after another, so that vLLM finds what it compiled for the last one.

vLLM's compile cache has the model's path in its key, and each version of a policy has another path.
An engine is therefore given a link to the version, `~/.cache/quiver/engines/HOST/0`. (Not in
$TMPDIR, of which each stage's process has its own.) Engines that run at the same time have links of
other numbers: a link is its holder's by a lease, which is free when its process has died. HOST is
this start of this host, or of this container, so every holder's process can be looked for.

Where there is no folder for links, or for a second engine of one process, which vLLM would take for
the first one by its path, the path is the model's own.

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
"""Those that this process has asked a link for."""
log = logging.getLogger(__name__)


class ModelLink:
    """A path that leads to `model` until it is released."""

    def __init__(self, model: Path) -> None:
        self.path = model
        self._lease: Lease | None = None
        _models.append(model)
        if len(_models) > 1:
            return
        try:
            self._link(model)
        except OSError as error:  # the link saves time, and nothing else
            log.debug("no constant path for %s: %s", model, error)

    def _link(self, model: Path) -> None:
        owner = Owner.this_process()
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        host = f"{owner.boot_id[:8]}-{owner.pid_namespace}"
        folder = Path(cache, "quiver", "engines", host)
        if not folder.is_absolute():  # the user has no home
            return
        folder.mkdir(parents=True, exist_ok=True)
        # an engine that was stopped reads its model when it goes on
        leases = Leases(Storage(folder), "leases", f"engine of {model}", sleepers_hold=True)
        for number in itertools.count():
            lease = leases.take(str(number))
            if lease is not None:
                break
        self._lease = lease
        leases.trim(lease)
        replacement = folder / f"{number}.new"
        replacement.unlink(missing_ok=True)  # of a process that died
        replacement.symlink_to(model.absolute())
        os.replace(replacement, folder / str(number))
        self.path = folder / str(number)

    def release(self) -> None:
        """Let the next engine have the link; this one reads no file any more."""
        if self._lease is not None:
            self._lease.release()
            self._lease = None
