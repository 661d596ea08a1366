"""The lifetime of a stage's engine: closed after its rows, or asleep until the next call's policy.

It sleeps if its process stays resident (`placement.resident_engine`).

    with resident_or_fresh_engine(config, setup, writer) as engine:
        shards.make(engine, requests)

A sleeping engine that does not take the new policy is an error here; the caller then repeats the
call in a fresh process. So a fresh engine is always in a process of its own.

Not of the spine: an engine's answers do not depend on how it got the policy.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace

from quiver.schemas.errors import ResourceError, printable
from quiver.stages.core.run.stage_process import this_process
from quiver.stages.core.store.writer import Writer
from quiver.stages.model.loading import verify_model

from .config import Config
from .engine import Engine, Setup, errors_of_own, info_of, make_engine

log = logging.getLogger(__name__)


@dataclass
class ResidentEngine:
    """An engine that may sleep from one call to the next."""

    engine: Engine
    made_for: tuple[str, str]
    """Its name, and the hash of its code."""
    num_policies: int = 1
    """Number of policies that it has had, one per call."""

    def take(self, config: Config, setup: Setup) -> None:
        """Give the engine the policy and settings of `setup`; ResourceError if it refuses."""
        reason = "it was made for another engine, or for other code"
        if self.made_for == (config.engine, config.code_sha256):
            reason = "it was made for other options or another model"
            try:
                setup.verified()
                if self.engine.take(setup):
                    self.num_policies += 1
                    return
            except Exception as error:  # a user's own engine may raise anything
                reason = f"{type(error).__name__}: {printable(error)}"
        raise ResourceError(
            f"engine {printable(config.engine)}",
            f"was asleep, and cannot load {setup.policy.ref}: {reason}",
            next="run the same command again",
        )

    def sleep(self) -> bool:
        """Send the engine to sleep. Returns False if it cannot."""
        try:
            return hasattr(self.engine, "take") and self.engine.sleep()
        except Exception as error:  # its rows are finished, so nothing else needs it
            log.warning("the engine could not sleep, and ends: %s", printable(error))
            return False

    def close(self) -> None:
        """Free what the engine holds."""
        with errors_of_own(self.made_for[0]):
            self.engine.close()


@contextmanager
def resident_or_fresh_engine(config: Config, setup: Setup, writer: Writer) -> Iterator[Engine]:
    """Yield the engine that slept in this process, with the new policy, or a fresh one.

    Notes its info in `writer`; if it slept before, with `resident` and the number of its policies.
    Afterwards it sleeps or is closed. One that refuses the policy is closed with its process.

    Raises:
        ConfigError, ResourceError: the engine cannot start, or does not take the policy.
        CorruptError: a file of the policy is damaged.
    """
    resident = this_process.resident_engine
    with writer.phase("load"), ThreadPoolExecutor(1) as thread:
        # Hashing gigabytes takes as long as importing an engine's library, so do both at once.
        verification = thread.submit(verify_model, setup.policy)
        setup = replace(setup, verified=verification.result, resident=this_process.may_be_resident)
        try:
            if resident is None:
                engine = make_engine(config.engine, setup)
                resident = ResidentEngine(engine, (config.engine, config.code_sha256))
            else:
                resident.take(config, setup)
        finally:
            # For a damaged file this error is clearer than the engine's own.
            verification.result()
    writer.report_fields["engine"] = info_of(config.engine, resident.engine)
    if resident.num_policies > 1:
        writer.report_fields["engine"] |= {"resident": True, "policies": resident.num_policies}
    this_process.resident_engine = None
    try:
        yield resident.engine
        with writer.phase("close"):
            if this_process.may_be_resident and resident.sleep():
                this_process.resident_engine = resident
    finally:
        if this_process.resident_engine is None:
            with writer.phase("close"):
                resident.close()
