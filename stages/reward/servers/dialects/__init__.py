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

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from quiver.stages.reward.scoring import Part, require_columns

from . import judge, openrlhf, quiver, vllm
from .rows import Row, fields


class Dialect(NamedTuple):
    """A dialect."""

    path: str
    """Path of URLs that have none."""
    encode: Callable[..., dict[str, Any]]
    decode: Callable[..., list[Part]]
    description: str
    columns: Callable[..., set[str] | None] = lambda config: set()
    """Columns that the config names. None: send all that have JSON."""
    columns_key: str = ""
    """Config key that names them."""
    is_alone: Callable[[Row], bool] = lambda row: False
    """True if a row needs a request of its own."""
    has_ids: bool = False
    """True if answers name their rows."""
    shows_pictures: bool = False


DIALECTS: dict[str, Dialect] = {
    "quiver": Dialect(
        quiver.PATH,
        quiver.encode,
        quiver.decode,
        "Quiver's own: rows by id, errors apart from numbers",
        lambda config: None if config.columns is None else set(config.columns),
        "columns",
        has_ids=True,
    ),
    "openrlhf": Dialect(
        openrlhf.PATH,
        openrlhf.encode,
        openrlhf.decode,
        "OpenRLHF's remote reward server",
        lambda config: {config.label} - {""},
        "label",
    ),
    "vllm-classify": Dialect(
        vllm.CLASSIFY,
        vllm.encode_classify,
        vllm.decode_classify,
        "a reward model or classifier behind vLLM",
        is_alone=vllm.is_alone,
    ),
    "vllm-score": Dialect(
        vllm.SCORE, vllm.encode_score, vllm.decode_score, "a cross-encoder behind vLLM"
    ),
    "openai-judge": Dialect(
        judge.PATH,
        judge.encode,
        judge.decode,
        "a chat model that grades by a rubric",
        lambda config: fields(config.rubric) - judge.OFFERED,
        "rubric",
        is_alone=lambda row: True,
        shows_pictures=True,
    ),
}


def named_columns(config: Any, columns: Collection[str]) -> set[str] | None:
    """Return the user's columns that a server's section names; None if its requests hold all.

    Words with blanks in the braces of a rubric are prose, unless they are one of `columns`.
    """
    dialect = DIALECTS[config.dialect]
    named = dialect.columns(config)
    if dialect.columns_key != "rubric":
        return named
    return {name for name in named if " " not in name or name.partition(".")[0] in columns}


def require_named(config: Any, columns: Collection[str]) -> set[str]:
    """Return the columns that a server's section names. Raises ConfigError if one is missing (see
    `require_columns` of scoring)."""
    named = named_columns(config, columns) or set()
    is_rubric = DIALECTS[config.dialect].columns_key == "rubric"
    advice = "; {{word}} is sent as {word}" if is_rubric else ""
    require_columns(f"reward server {config.name}", named, columns, advice)
    return named
