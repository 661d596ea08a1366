"""Engine `scripted`: answers with a small function of (prompt ids, seed), without model or torch.

A flow with it runs in a second. It is the shipped test double: real code under the real stage,
deterministic, and able to script every shape of answer. Its logprobs are invented: training on them
is refused unless `optimize.audit.enabled` is false, and then says nothing about the policy.

    [generate]
    engine = "scripted"
    options = { script = "echo" }    # or "sample", "fixed" with completion_ids, "my_module:answer"

A dotted path names `answer(prompt_ids: list[int], seed: int) -> list[int]`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator

import numpy as np

from quiver.stages.core import plugins
from quiver.stages.core.config import parse
from quiver.stages.generate.engine import Completion, Request, Setup
from quiver.stages.generate.options import ScriptedOptions
from quiver.stages.generate.stopping import StopStrings
from quiver.stages.model import checkpoints


def echo(prompt_ids: list[int], seed: int) -> list[int]:
    """Return the prompt."""
    return prompt_ids


def sample(prompt_ids: list[int], seed: int) -> list[int]:
    """Draw one to len(prompt_ids) ids from the prompt, so that rows and rewards of a group
    differ."""
    draw = random.Random(seed)
    return draw.choices(prompt_ids, k=draw.randint(1, len(prompt_ids)))


class ScriptedEngine:
    """Answers at once and in order. A completion with room left ends with the first stop id."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.options = parse(ScriptedOptions, setup.options, "generate.options")
        script = self.options.script
        self.info = {"name": "scripted", "script": script, "logprobs_mode": "scripted"}
        self._tokenizer = None
        if setup.sampling.stop:
            self._tokenizer = checkpoints.load_tokenizer(setup.policy)
        fixed = [*self.options.completion_ids]
        shipped = {"echo": echo, "sample": sample, "fixed": lambda *_: fixed}
        if script in shipped:
            self._answer = shipped[script]
        else:
            self._answer, _ = plugins.load(script, "generate.options.script")

    def generate(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Yield one completion per request, in their order."""
        for request in requests:
            max_tokens = request.max_tokens or self.setup.sampling.max_tokens
            time.sleep(self.options.seconds_per_row)
            prompt_ids = request.prompt_ids.tolist()
            ids = self._answer(prompt_ids, request.seed)[:max_tokens]
            finish_reason = "length"
            stop_reason = None
            if self.setup.stop_ids and len(ids) < max_tokens:
                ids = [*ids, self.setup.stop_ids[0]]
                finish_reason = "stop"
                stop_reason = str(ids[-1])
            if self._tokenizer is not None:
                stops = StopStrings(self._tokenizer, self.setup.sampling, prompt_ids)
                for length, token in enumerate(ids, 1):
                    string = stops.add(token)
                    if string is not None:
                        finish_reason = "stop"
                        stop_reason = string
                        ids = ids[:length]
                        break
            logprobs = np.full(len(ids), self.options.logprob, np.float32)
            ids = np.array(ids, np.int32)
            yield Completion(request.index, ids, logprobs, finish_reason, stop_reason)

    def close(self) -> None:
        """Do nothing: this engine holds no resources."""
