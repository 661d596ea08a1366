"""The lifetime of a stage's engine: closed after its rows, or asleep until the next call's policy.

It sleeps if its process is asked to stay.

    resident = start(config, setup)     # the sleeping engine with the new policy, or a fresh one
    writer.notes["engine"] = resident.info
    with resident.at_work(writer):
        shards.make(resident.engine, requests)

A sleeping engine that does not take the new policy is an error here; the caller then starts a fresh
process. So a fresh engine is always in a process of its own.

Not of the spine: an engine's answers do not depend on how it got the policy.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from quiver.schemas.errors import ResourceError, printable
from quiver.stages.common.runtime import staying
from quiver.stages.common.store.writer import Writer

from .config import Config
from .engine import Engine, Setup, make_engine

log = logging.getLogger(__name__)


class Resident:
    """An engine together with the config that it was made for."""

    def __init__(self, config: Config, setup: Setup) -> None:
        self.engine: Engine = make_engine(
            config.engine, replace(setup, resident=staying.is_asked())
        )
        self.made_for = (config.engine, config.code_sha256)
        self.num_policies = 1
        """Number of policies that it has had, one per call."""

    def take(self, config: Config, setup: Setup) -> None:
        """Give the engine the policy and settings of `setup`; ResourceError if it refuses."""
        reason = "it was made for another engine, or for other code"
        try:
            if self.made_for == (config.engine, config.code_sha256):
                reason = "it was made for other options or another model"
                setup.verified()
                if self.engine.take(replace(setup, resident=staying.is_asked())):
                    self.num_policies += 1
                    return
        except Exception as error:  # a user's own engine may raise anything
            reason = f"{type(error).__name__}: {printable(error)}"
        with suppress(Exception):  # its process ends anyway, with all its children
            self.engine.close()
        raise ResourceError(
            f"engine {printable(config.engine)}",
            f"slept, and does not take {setup.policy.ref}: {reason}",
            state="finished shards are kept; nothing else was written.",
            next="run the same command again",
        )

    @property
    def info(self) -> dict[str, Any]:
        """The engine's info for the manifest; if it slept before this policy, also `resident` and
        the number of policies that it has had."""
        if self.num_policies == 1:
            return self.engine.info
        return {**self.engine.info, "resident": True, "policies": self.num_policies}

    @contextmanager
    def at_work(self, writer: Writer) -> Iterator[None]:
        """Run the engine inside the context; afterwards it sleeps or is closed."""
        try:
            yield
        except BaseException:
            with writer.phase("close"):
                self.engine.close()
            raise
        sleeps = False
        with writer.phase("close"):
            if staying.is_asked() and hasattr(self.engine, "take"):
                try:
                    sleeps = self.engine.sleep()
                except Exception as error:  # its rows are finished, so nothing else needs it
                    log.warning("the engine could not sleep, and ends: %s", printable(error))
            if sleeps:
                staying.keep(self)
            else:
                self.engine.close()

    def close(self) -> None:
        """Free what the engine holds."""
        self.engine.close()


def start(config: Config, setup: Setup) -> Resident:
    """Return the engine that sleeps in this process, with the new policy; else a fresh one.

    Raises ConfigError or ResourceError.
    """
    resident = staying.take()
    if resident is None:
        return Resident(config, setup)
    resident.take(config, setup)
    return resident
