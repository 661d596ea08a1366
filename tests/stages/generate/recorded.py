"""Real episodes against an environment of a test's own, with a policy that says what it is told to:
rollouts/2 and their prompts, as `generate` writes them.

    made = record(store, policy, Turns(environment="guess.py:Guess"), [{"limit": 9}], say)
    made.read["…-0"][1]        # the ids that were read before that episode's turn 1
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple

import pyarrow as pa
from pydantic import Field

from quiver.schemas import fields
from quiver.schemas import prompts as prompts_kind
from quiver.stages.core.config import Config
from quiver.stages.core.store import Store, Version
from quiver.stages.generate.texts import Texts
from quiver.stages.model.chat.control_tokens import Guard
from quiver.stages.model.chat.template import Template
from quiver.stages.model.checkpoints import model_entry
from quiver.stages.turns.bridge import Bridge
from quiver.stages.turns.config import Turns
from quiver.stages.turns.episode import Episode, Setting
from quiver.stages.turns.pool import EnvironmentPool, Reply
from quiver.stages.turns.saved import Beginning, beginning_of
from quiver.stages.turns.tool_calls import parse_hermes
from tests import episodes
from tests.tiny import CHATML, EOS, tokenizer
from tests.writing import begin

Say = Callable[[str, int, int], str]
"""What the policy says, by group, sample and turn."""


class Settings(Config):
    """What the stand-ins for stages write into their manifests."""

    turns: dict[str, Any] = Field(default_factory=dict)
    sampling: dict[str, Any] = Field(default_factory=dict)


class Recorded(NamedTuple):
    prompts: Version
    rollouts: Version
    read: dict[str, list[list[int]]]
    """By rollout id: what the policy read before each of its turns."""


def record(
    store: Store,
    policy: Version,
    turns: Turns,
    columns: list[dict[str, Any]] | Version,
    say: Say,
    samples: int = 2,
    run: str = "tiny",
) -> Recorded:
    """`samples` episodes of each row of columns, or of each prompt that is there already."""
    with (
        closing(Template(CHATML, {"tools": None, "add_generation_prompt": True})) as template,
        EnvironmentPool(turns) as pool,
    ):
        setting = Setting(
            limits=turns.model_copy(update={"fingerprint": pool.loaded.fingerprint}),
            bridge=Bridge(template, Guard(tokenizer()), end_token="<|im_end|>", tool_role="user"),
            parse=parse_hermes if pool.loaded.tools else None,
            decode=Texts(tokenizer(), [EOS]).decode,
            stop_ids=frozenset([EOS]),
            max_turn_tokens=512,
            context=4096,
            answers=pool.loaded.answers,
        )
        prompts = columns
        if isinstance(columns, list):
            prompts = _write_prompts(store, columns, setting, pool, run)
        return _record(store, policy, setting, pool, prompts, say, samples, run)


def play(
    episode: Episode, say: Callable[[int], list[int]], act: Callable[[], None]
) -> list[list[int]]:
    """Play to the end, with the ids that `say` gives for each turn, if they fit; `act` answers for
    the environment. Returns what was read before each turn."""
    read = []
    while episode.state != "ended":
        if episode.state != "sample":
            act()
            continue
        request = episode.request()
        assert request.turn == len(read) and request.max_tokens >= 1
        read.append(request.prompt_ids)
        ids = say(request.turn)
        finish_reason = "stop" if len(ids) <= request.max_tokens else "length"
        ids = ids[: request.max_tokens]
        episode.sampled(ids, [-0.5] * len(ids), finish_reason)
    return read


def answer(pool: EnvironmentPool) -> Reply:
    """The one reply that is waited for."""
    (reply,) = pool.replies(wait=None)
    return reply


def opened(pool: EnvironmentPool, beginning: Beginning) -> tuple[int, Reply]:
    """An environment at the place where an episode begins: its key, and its last answer."""
    key = pool.open(beginning.row, beginning.seed)
    reply = answer(pool)
    for played in beginning.turns:
        pool.step(key, played.turn)
        reply = answer(pool)
    return key, reply


def _write_prompts(
    store: Store, columns: list[dict[str, Any]], setting: Setting, pool: EnvironmentPool, run: str
) -> Version:
    rows = []
    for number, row in enumerate(columns):
        group = f"g{number}"
        key, reply = opened(pool, beginning_of(group, row))
        pool.finish(key)
        answer(pool)
        pool.forget(key)
        opening = reply.step.observation()
        messages = opening or [{"role": "user", "content": "begin"}]
        rendering = setting.bridge.restart(group, messages)
        rows.append(
            {
                "group_id": group,
                "messages": messages,
                "prompt_text": rendering.text,
                "prompt_ids": rendering.ids,
                "columns": {**row, prompts_kind.OPENING: json.dumps(opening)},
            }
        )
    struct = pa.array([row["columns"] for row in rows]).type
    schema = fields.with_struct(prompts_kind.BEYOND_TEXT, columns=struct)
    return _write(store, run, "prompts", pa.Table.from_pylist(rows, schema), Settings())


def _record(
    store: Store,
    policy: Version,
    setting: Setting,
    pool: EnvironmentPool,
    prompts: Version,
    say: Say,
    samples: int,
    run: str,
) -> Recorded:
    rows = []
    read: dict[str, list[list[int]]] = {}
    for prompt in prompts.table().to_pylist():
        for sample in range(samples):
            group = prompt["group_id"]
            rollout_id = f"{run}-{group}-{sample}"
            key, _ = opened(pool, beginning_of(group, prompt["columns"]))
            episode = Episode(setting, group, prompt["prompt_ids"], prompt["messages"])
            ids_of_turn = partial(_ids_of_turn, say, group, sample)
            read[rollout_id] = play(episode, ids_of_turn, partial(_act, pool, key, episode))
            pool.forget(key)
            rows.append(
                {
                    "rollout_id": rollout_id,
                    "group_id": group,
                    "sample_index": sample,
                    "prompt_ids": prompt["prompt_ids"],
                    "temperature": 1.0,
                    "seed": 0,
                    **episode.record(),
                }
            )
    config = Settings(turns=setting.limits.model_dump(mode="json"), sampling={"max_tokens": 64})
    models = (model_entry("policy", policy),)
    table = episodes.table_of(rows)
    inputs = {"prompts": prompts}
    return Recorded(
        prompts, _write(store, run, "rollouts", table, config, inputs=inputs, models=models), read
    )


def _ids_of_turn(say: Say, group: str, sample: int, turn: int) -> list[int]:
    text = say(group, sample, turn) + "<|im_end|>"
    return tokenizer().encode(text, add_special_tokens=False)


def _act(pool: EnvironmentPool, key: int, episode: Episode) -> None:
    """Let the environment answer the episode."""
    is_turn = episode.state == "act"
    if is_turn:
        pool.step(key, episode.turn)
    else:
        pool.finish(key)
    reply = answer(pool)
    if reply.failure is not None:
        episode.failed(reply.failure, reply.why)
    elif is_turn:
        episode.observed(reply.step)
    else:
        episode.rewarded(reply.step.reward)


def _write(
    store: Store, run: str, kind: str, table: pa.Table, config: Settings, **about: Any
) -> Version:
    about = {"stage": "test", "stage_version": 1, "config": config, "inputs": {}, **about}
    with begin(store, run, kind, **about, force=True) as work:
        half = max(1, len(table) // 2)
        for index, start in enumerate(range(0, len(table), half)):
            work.write(index, table.slice(start, half))
        return work.commit()
