"""Processes that share a stage's work: started together, stopped, killed; what each of them
returned, and what they left."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import time
from dataclasses import asdict, replace
from pathlib import Path

from quiver.flows.verification import verify
from quiver.schemas.errors import QuiverError, unexpected
from quiver.stages.core.run.runner import Call, find_or_make
from quiver.stages.core.store import Store

_FORK = multiprocessing.get_context("fork")
LIMIT_SECONDS = 60


class Worker:
    """One process that performs `call`."""

    def __init__(self, call: Call, number: int) -> None:
        self._answer = Path(call.store).parent / f"answer-{number}.json"
        self._process = _FORK.Process(target=_perform, args=(call, self._answer), daemon=True)
        self._process.start()

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    @property
    def pid(self) -> int:
        """By which the owner of a lease is told."""
        return self._process.pid

    def answer(self) -> dict | None:
        """Its outcome or its error; None where it was killed."""
        self._process.join(LIMIT_SECONDS)
        assert self._process.exitcode is not None, "still running"
        return json.loads(self._answer.read_text()) if self._answer.exists() else None


def _perform(call: Call, answer: Path) -> None:
    signal.alarm(LIMIT_SECONDS)
    try:
        outcome = asdict(find_or_make(call))
    except Exception as error:
        if not isinstance(error, QuiverError):
            error = unexpected(call.stage, error)
        outcome = {"error": error.to_dict()}
    answer.write_text(json.dumps(outcome))


def start(call: Call, count: int, **config) -> list[Worker]:
    """`count` processes that share `call`."""
    shared = replace(call, config={**call.config, **config}, share=True)
    return [Worker(shared, number) for number in range(count)]


def copy(store: Store, folder: Path) -> Store:
    """The same store in `folder`, links and all."""
    return Store(shutil.copytree(store.url, folder / "store"))


def hashes(store: Store, ref: str) -> dict[str, str]:
    """sha256 of each data file, by name."""
    return {entry.name: entry.sha256 for entry in store.open(ref).manifest.files}


def require_whole(store: Store, run: str, kind: str) -> None:
    """One version, of whole files, and nothing beside it."""
    assert len(store.numbers(run, kind)) == 1
    assert verify(store)[1] == []
    assert list((Path(store.url) / run / kind / ".work").iterdir()) == []


def wait(condition) -> None:
    """Until `condition()` holds."""
    deadline = time.monotonic() + LIMIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)
