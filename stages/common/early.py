"""A stage's process that is there before its call is: it imports what the stage will need, and
waits.

So an engine's library is there when the optimizer has its checkpoint. Where a hint names an
announcement (`announced`), the engine itself starts as soon as the checkpoint's model is whole,
while the rest is written, hashed and committed. Such a process decides
nothing: the stage compares what was committed with what it read, and where that differs, or where
the start failed, the process begins anew (`Anew`). Where it is gone, or was not needed, no harm is
done.

    begin_early("generate", Hint(config, store, {"prompts": "a/prompts@latest"}, announcement))
    ...
    with taken("generate") or Child("generate") as child:
        child.tell(spec)
"""

from __future__ import annotations

import json
import logging
import os
import select
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from quiver.schemas.errors import printable

from .announced import look
from .child import Child
from .config import parse
from .store import Store

_POLL_SECONDS = 0.05
_early: dict[tuple[str, str | None, bool], tuple[Child, Hint]] = {}
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Hint:
    """What is known of a call that will come."""

    config: dict[str, Any]
    """Its config, or as much of it as says what to import."""
    store: str = ""
    """Its store."""
    refs: dict[str, str] = field(default_factory=dict)
    """Versions like those that it will read."""
    announcement: str = ""
    """File in which the maker of its checkpoint will say that the model is whole; empty: import
    only."""


class Anew(BaseException):
    """What was prepared does not fit the call; the process is to begin again, with nothing
    prepared."""


# -- whoever calls


def begin_early(stage: str, hint: Hint, python: str | None = None, online: bool = False) -> None:
    """Start a child that prepares for a call of `stage`; at most one of a kind."""
    if (stage, python, online) not in _early:
        _early[stage, python, online] = Child(stage, python, online, hint=asdict(hint)), hint


def taken(stage: str, python: str | None = None, online: bool = False) -> Child | None:
    """The child that waits for a call of `stage`, the caller's from now on; None where there is
    none, or it is dead."""
    child, _ = _early.pop((stage, python, online), (None, None))
    if child and child.process.poll() is not None:
        child.__exit__(None, None, None)
        return None
    return child


def end_early(*, engines: bool = False) -> None:
    """End those that nobody took; with `engines` those alone that may have started one, and hold
    memory."""
    for kind, (child, hint) in list(_early.items()):
        if hint.announcement or not engines:
            del _early[kind]
            child.__exit__(None, None, None)


# -- in the process itself


def wait(stage: ModuleType, config_class: type, path: Path) -> bool:
    """Prepare for what `path` hints at, until a line comes in; False where the caller went without
    one. Anew.

    `stage` may have `prepare(config)`, which imports, and `start(config, store, refs, policy)`, for
    a policy that is announced.
    """
    hint, failed = Hint(**json.loads(path.read_text())) if path.exists() else None, False
    since = path.stat().st_mtime if hint else 0.0
    try:
        config = _prepared(stage, config_class, hint)
    except Exception as error:  # the call meets it again, if there is one, and tells it as its own
        log.debug("%s could not prepare: %s", stage.__name__, error)
        config = None
    while (
        config is not None
        and hint.announcement
        and not select.select([sys.stdin], [], [], _POLL_SECONDS)[0]
    ):
        policy = look(Path(hint.announcement), since)
        if policy is not None:
            try:
                stage.start(config, Store(hint.store, create=False), hint.refs, policy)
            except Exception as error:
                failed = True
                log.info(
                    "could not start before its checkpoint was committed, and starts again: %s",
                    printable(error),
                )
            break
    if not sys.stdin.readline():
        return False
    if failed:
        raise Anew
    return True


def _prepared(stage: ModuleType, config_class: type, hint: Hint | None) -> Any:
    if hint is None or not hasattr(stage, "prepare"):
        return None
    config = parse(config_class, hint.config, f"stage {stage.__name__}")
    stage.prepare(config)
    return config


def begin_anew() -> None:
    """This process from its beginning, with nothing prepared; its call is in the spec by now."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [word for word in sys.orig_argv if word != "--waits"])
