"""Dialects: the requests and answers of each kind of reward server, as pure functions without a
network.

| dialect | asked | answered | rows per request |
|---|---|---|---|
| quiver | rows with ids, prompt, completion, columns | reward, error, parts, extra by id | many |
| openrlhf | query, prompts, labels | rewards, scores, extra_logs | many |
| vllm-classify | messages, or input | probs by index | one conversation, many texts |
| vllm-score | text_1, text_2 | score by index | many |
| openai-judge | a rubric, filled in | text with a score in it | one |

`encode(rows, config)` returns the request's JSON, `decode(answer, rows, config)` the parts, one per
row and in order. If the answer as a whole breaks the dialect, `decode` raises MalformedError. If
one row has no number, that row's part carries an error. The first two also have an answering side:
`Request`, `Answer` and `answer`, which `deployments/reward_server.py` serves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from quiver.stages.reward.scoring import Part

from . import judge, openrlhf, quiver, vllm
from .rows import Row


class Dialect(NamedTuple):
    """A dialect. `path` is for URLs without one. `is_alone` returns true if a row needs a request
    of its own. `has_ids`: answers name their rows."""

    path: str
    encode: Callable[..., dict[str, Any]]
    decode: Callable[..., list[Part]]
    description: str
    is_alone: Callable[[Row], bool] = lambda _: False
    has_ids: bool = False


DIALECTS: dict[str, Dialect] = {
    "quiver": Dialect(
        quiver.PATH,
        quiver.encode,
        quiver.decode,
        "Quiver's own: rows by id, errors apart from numbers",
        has_ids=True,
    ),
    "openrlhf": Dialect(
        openrlhf.PATH, openrlhf.encode, openrlhf.decode, "OpenRLHF's remote reward server"
    ),
    "vllm-classify": Dialect(
        vllm.CLASSIFY,
        vllm.encode_classify,
        vllm.decode_classify,
        "a reward model or classifier behind vLLM",
        vllm.is_alone,
    ),
    "vllm-score": Dialect(
        vllm.SCORE, vllm.encode_score, vllm.decode_score, "a cross-encoder behind vLLM"
    ),
    "openai-judge": Dialect(
        judge.PATH,
        judge.encode,
        judge.decode,
        "a chat model that grades by a rubric",
        lambda _: True,
    ),
}
