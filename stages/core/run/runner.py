"""The runner, one for all stages: plan → find → lease → make → commit.

This module decides whether to force, share, resume, or answer "already done". A finished version is
found in this process within milliseconds. Otherwise the stage runs in a child process, so that its
memory and device are free when it ends; it ends with its caller. Another process may finish the
same work meanwhile. So the version is looked for again: when the child begins, once it holds the
lease, while it shares the work, and right before the commit. If another process is at the same
work, `run_stage` raises BusyError; in a flow, the call waits for that process's version (`tasks`).

With `placement.resident_engine` the child of generate stays resident: it waits for the next call
with its engine asleep, and keeps some memory. If it died meanwhile, or fails, that call runs in a
fresh child, without an error.

    call = Call("generate", config, store.url, {"prompts": "a/prompts@1", "policy": "a/policy@0"})
    outcome = find_outcome(call)    # only look; None if it is not finished
    outcome = run_call(call)        # `stage_process`: in a child, which calls `find_or_make`
    outcome = find_or_make(call)    # in this process

    run_stage("generate", config, store, prompts="a/prompts@1", policy="a/policy@0")

`run_stage` builds such a Call, looks for its version, and passes it to `run_call`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quiver.schemas.errors import BusyError, ConfigError, printable
from quiver.schemas.refs import Ref
from quiver.stages.core.config import Config, parse
from quiver.stages.core.store import Store, Version
from quiver.stages.core.store.writer import open_staging

from .call import Call, Outcome
from .roles import RequiredRefs
from .stage import Plan, load_stage
from .stage_process import run_call


def plan_of(call: Call, store: Store | None = None) -> Plan:
    """Return the call's plan. Raises ConfigError, LineageError or SchemaError."""
    stage = load_stage(call.stage)
    config = parse(stage.Config, dict(call.config), f"stage {call.stage}")
    refs = RequiredRefs(call.stage, call.refs)
    plan = stage.plan(config, store or Store(call.store), refs, call.into)
    refs.require_asked()
    return plan


def find_outcome(call: Call, *, expired: bool = False) -> Outcome | None:
    """Return the finished version that answers the call; None if there is none, or with `force`.

    With `expired`, versions whose files expired count as answers and as inputs too.
    """
    if call.force:
        return None
    store = Store(call.store)
    plan = plan_of(call, store.with_expired() if expired else store)
    version = find_version(plan)
    return _outcome(version, plan) if version else None


def find_version(plan: Plan) -> Version | None:
    """Return the finished version that answers the plan, or None.

    Raises ConflictError if another version has the only number allowed, and any error of the
    stage's `accept`.
    """
    kind = plan.kinds[-1]
    listing = plan.listing
    version = plan.already_made or plan.store.find(plan.run, kind, plan.run_key, listing=listing)
    if version is None:
        plan.require_number(listing)
    elif accept := getattr(load_stage(plan.stage), "accept", None):
        accept(plan, version)
    return version


def find_or_make(call: Call, store: Store | None = None) -> Outcome:
    """Find the version or make it, in this process. Raises the stage's errors.

    Another process may make it meanwhile; then its version is returned. Under `torch.distributed`
    every rank calls this. The first rank writes and publishes; the others take part in the stage's
    work without writers.

    Args:
        store: the call's store, if it is already open; its `written` then lists the new versions.
    """
    started_at = time.monotonic()
    plan = plan_of(call, store)
    stage = load_stage(call.stage)
    version = None if call.force else find_version(plan)
    if version is None and call.share and not getattr(stage, "SHARED", False):
        raise ConfigError(
            f"stage {plan.stage}",
            "its work cannot be shared among processes",
            next="start it once, without share",
        )
    # a forced version is added beside the existing one
    only_number = None if call.force else plan.only_number
    plan = replace(plan, note=call.note, only_number=only_number)
    if version is None and os.environ.get("RANK", "0") != "0":
        version = _make_without_writers(stage, plan, call.force)
    elif version is None:
        with open_staging(plan, force=call.force, share=call.share) as staging:
            if staging.committed is None:
                stage.make(plan, staging.writers)
                staging.publish()
        version = staging.committed
    return _outcome(version, plan, time.monotonic() - started_at)


def _make_without_writers(stage: Any, plan: Plan, force: bool) -> Version:
    """Do a rank's part of the work without writing, then wait for the version.

    With `force`, the versions with this run key that were there before the work do not count, as in
    rank 0's `Writer`. Raises ConfigError if the stage does not know ranks.
    """
    if not getattr(stage, "RANKS", False):
        raise ConfigError(
            f"stage {plan.stage}",
            "its work cannot be shared among ranks",
            next="start it once, without RANK in the environment",
        )
    kind = plan.kinds[-1]
    skip = len(plan.listing.find(plan.run_key)) if force else 0
    stage.make(plan, {})
    while True:
        version = plan.store.find(plan.run, kind, plan.run_key, skip=skip)
        if version is not None:
            return version
        time.sleep(0.1)  # rank 0 is publishing; if it fails, the launcher ends all ranks


def _outcome(version: Version, plan: Plan, seconds: float = 0.0) -> Outcome:
    manifest = version.manifest
    is_cached = str(version.ref) not in plan.store.written
    if is_cached:
        seconds = manifest.seconds.get("total", 0.0)
    return Outcome(str(version.ref), is_cached, manifest.rows, round(seconds, 3), manifest.metrics)


def run_stage(
    stage: str,
    config: Config | Mapping[str, Any],
    store: Store | str | os.PathLike[str],
    *,
    into: str | None = None,
    force: bool = False,
    share: bool = False,
    in_process: bool = False,
    note: str = "",
    **refs: str | Ref | list[str],
) -> Ref:
    """Run one stage on saved versions, and return the reference of the result.

    Args:
        stage: its name.
        config: its `Config`, or the same as a dict.
        store: the store, or its folder.
        into: run to write into. Default: the inputs' run.
        force: make a new version, even if a finished one exists.
        share: share the work with other processes that run the same call.
        in_process: run in this process instead of a child.
        note: your words about it, kept in its manifest. A finished version keeps its own.
        refs: references by role, such as `rollouts="arith/rollouts@3"`; a list only for a role
            that takes several. A role that the stage does not take is refused.

    Raises:
        BusyError: another process does the same work, and they do not share it.
    """
    opened = store if isinstance(store, Store) else Store(store)
    if not isinstance(config, Config):
        config = parse(load_stage(stage).Config, dict(config), f"stage {stage}")
    try:
        # what was left out stays so: a stage may fill it in
        fields = config.model_dump(mode="json", exclude_unset=True)
    except ValueError as error:
        raise ConfigError(
            f"stage {stage}",
            f"its config is not plain data: {printable(error)}",
            next="give texts, numbers, lists and tables alone",
        ) from None
    texts = {
        role: [str(one) for one in ref]
        if isinstance(ref, list | tuple) and not isinstance(ref, Ref)
        else str(ref)
        for role, ref in refs.items()
        if ref is not None
    }
    call = Call(stage, fields, opened.url, texts, into, force, share, note=note)
    try:
        outcome = find_or_make(call, opened) if in_process else find_outcome(call) or run_call(call)
    except BusyError as error:
        if getattr(load_stage(stage), "SHARED", False) and not force and not share:
            error.next += "; or run all these calls with share=True, so that they share the work"
        raise
    return opened.resolve(outcome.ref)
