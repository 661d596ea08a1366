"""Dialects: how a server is asked for rewards and how its answer is read. Pure functions; nothing
here touches the network.

| dialect | asked | answered | rows a request |
|---|---|---|---|
| quiver | rows with ids, prompt, completion, columns | reward, error, parts, extra by id | many |
| openrlhf | query, prompts, labels | rewards, scores, extra_logs | many |
| vllm-classify | messages, or input | probs by index | one conversation, many texts |
| vllm-score | text_1, text_2 | score by index | many |
| openai-judge | a rubric, filled in | text with a score in it | one |

`encode(rows, config)` gives the request's JSON, `decode(answer, rows, config)` the parts, one a row
and in order. Where the answer as a whole is not of the dialect, `decode` raises MalformedError;
where one row has no number, that row's part carries an error. The first two have an answering
side too: `Request`, `Answer` and `answer`, which `deployments/reward_server.py` serves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from quiver.stages.reward.scoring import Part

from . import judge, openrlhf, quiver, vllm
from .rows import Row


class Dialect(NamedTuple):
    """`path` stands in for that of a URL that has none; `is_alone` says whether a row needs a
    request of its own; `has_ids`, whether an answer names the rows that it is about."""

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
