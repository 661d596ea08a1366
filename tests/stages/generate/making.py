"""Prompts for the tests of generate, and engines that misbehave, each in one way."""

from __future__ import annotations

import errno
from itertools import islice

import numpy as np
import pyarrow as pa

from quiver.schemas import fields, prompts
from quiver.stages.core.config import Config
from quiver.stages.core.store import Store, Version
from quiver.stages.generate.engine import Completion
from quiver.stages.model.checkpoints import model_entry
from tests.writing import begin


class Made(Config):
    """Stands in for the prompt stage's config."""

    ids: list[list[int]]
    """Prompt ids, one list a group."""


def make_prompts(
    store: Store,
    ids: list[list[int]],
    run: str = "tiny",
    renderer: Version | None = None,
    **metrics: object,
) -> Version:
    """A prompts version with these ids, of the renderer's tokenizer; groups g0, g1, …"""
    models = (model_entry("policy", renderer),) if renderer else ()
    schema = fields.with_struct(prompts.SCHEMA, columns=pa.struct([pa.field("answer", pa.int64())]))
    table = pa.table(
        {
            "group_id": [f"g{row}" for row in range(len(ids))],
            "messages": pa.nulls(len(ids), prompts.MESSAGES),
            "prompt_text": ["text"] * len(ids),
            "prompt_ids": ids,
            "columns": pa.array(
                [{"answer": row} for row in range(len(ids))], schema.field("columns").type
            ),
        },
        schema=schema,
    )
    about = {"stage": "prompt", "stage_version": 1, "config": Made(ids=ids), "inputs": {}}
    with begin(store, run, "prompts", **about, models=models) as work:
        if work.done:
            return work.done
        work.write(0, table)
        return work.commit(metrics=metrics)


def random_prompts(
    store: Store, count: int, low: int = 3, high: int = 9, seed: int = 0, run: str = "tiny"
) -> Version:
    """`count` prompts of `low` to `high - 1` ordinary ids."""
    draw = np.random.default_rng(seed)
    return make_prompts(
        store, [draw.integers(3, 320, draw.integers(low, high)).tolist() for _ in range(count)], run
    )


def good(index: int, **changed) -> Completion:
    """A whole answer, with some of it changed."""
    whole = {
        "completion_ids": np.array([5, 2], np.int32),
        "logprobs": np.array([-0.5, -0.1], np.float32),
    }
    return Completion(index, **{**whole, "finish_reason": "stop", **changed})


class Honest:
    """Answers all rows in order; the others below change one thing."""

    info = {"name": "honest"}  # noqa: RUF012

    def __init__(self, setup) -> None:
        self.setup = setup

    def generate(self, requests):
        for request in requests:
            yield from self.answers(request)

    def answers(self, request):
        yield good(request.index)

    def close(self) -> None:
        pass


class Dies(Honest):
    def answers(self, request):
        if request.index == 2:
            raise RuntimeError("the engine is gone")
        yield good(request.index)


class Mistakes(Honest):
    """Makes the mistake that `options.mistake` names."""

    def __init__(self, setup) -> None:
        super().__init__(setup)
        self.mistake = setup.options["mistake"]
        if self.mistake == "init":
            raise KeyError("licence")
        if self.mistake == "info":
            self.info = {"name": "mine", "loss": np.float32(1)}
        if self.mistake == "no info":
            self.info = None

    def generate(self, requests):
        if self.mistake == "nothing":
            return None
        if self.mistake == "list":
            return [good(request.index) for request in requests]
        return super().generate(requests)

    def answers(self, request):
        if self.mistake == "generate":
            raise KeyError("licence")
        if self.mistake == "disk":
            raise OSError(errno.ENOSPC, "no space left on device")
        completion = good(request.index, stop_reason=2 if self.mistake == "stop_reason" else "2")
        if self.mistake == "index":
            completion = completion._replace(index=[request.index])
        yield tuple(completion) if self.mistake == "tuple" else completion

    def close(self) -> None:
        if self.mistake == "close":
            raise KeyError("licence")


class Forgets(Honest):
    """Leaves a row out."""

    def answers(self, request):
        if request.index != 2:
            yield good(request.index)


class Waits(Honest):
    """Reads the weights once they are checked, as an engine should."""

    has_read = False

    def __init__(self, setup) -> None:
        setup.verified()
        type(self).has_read = True


class Chokes(Honest):
    """Reads the weights at once, and finds them torn in its own words."""

    def __init__(self, setup) -> None:
        raise RuntimeError("unexpected end of file")


def answer(prompt_ids: list[int], seed: int) -> list[int]:
    """A script of a user's own."""
    return [prompt_ids[0], 7]


class Steps(Honest):
    """Decodes up to eight rows at once and answers one at each step; `flying` is how many it had at
    each."""

    ahead = 3
    flying: list[int] = []  # noqa: RUF012

    def generate(self, requests):
        rows = []
        while rows := rows + list(islice(requests, 8 - len(rows))):
            self.flying.append(len(rows))
            yield good(rows.pop(0).index)
