"""[[reward.servers]]: which server scores, in which dialect, and how patiently it is asked. Plain
config; nothing is loaded for it.

    [[reward.servers]]
    dialect = "quiver"
    urls = ["http://127.0.0.1:8700"]

`ServerConfig` refuses what can be told from the text alone. A token is named, as `env:NAME`, never
written, and no message here shows what was written in its place.

What the config cannot see is the model behind a URL: raise `revision` when it changes, so that
rewards are made anew.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from quiver.schemas.manifest import digest
from quiver.stages.common.config import Runtime
from quiver.stages.common.servers import refuse_section
from quiver.stages.reward.scoring import Interval, ScorerConfig

from .dialects import judge
from .dialects.rows import fields

VERSION = 1
"""Of what the client makes of an answer: a higher one makes rewards anew."""
_BELONGS = {
    "columns": ("quiver",),
    "label": ("openrlhf",),
    "score_key": ("openrlhf", "vllm-classify"),
    "model": ("vllm-classify", "vllm-score", "openai-judge"),
    "message_template": ("openrlhf", "vllm-score", "openai-judge"),
    "reply_template": ("openrlhf",),
    "prefill": ("openrlhf", "vllm-classify", "vllm-score", "openai-judge"),
    "rubric": ("openai-judge",),
    "score_pattern": ("openai-judge",),
    "max_tokens": ("openai-judge",),
    "use_activation": ("vllm-classify", "vllm-score"),
    "arguments": ("vllm-classify", "vllm-score", "openai-judge"),
}


class ServerConfig(ScorerConfig):
    """One reward server, on one host or several that are alike."""

    model_config = ConfigDict(hide_input_in_errors=True)

    dialect: Literal["quiver", "openrlhf", "vllm-classify", "vllm-score", "openai-judge"]
    """How it is asked and answers; `stages/reward/servers/dialects` describes each."""
    urls: tuple[str, ...] = Field(min_length=1)
    """One URL a host, asked in turn. Without any path, not even /, the dialect's own is taken. No
    user, query or fragment."""
    token: Runtime[str] = ""
    """Bearer token, as `env:NAME`: the environment variable that holds it where the stage runs."""
    model: str = ""
    """Name of the model on the server: vllm-classify and vllm-score need it where several are
    served, openai-judge always."""
    label: str = ""
    """Column sent as label by openrlhf. Empty: null."""
    columns: tuple[str, ...] | None = None
    """Columns sent by quiver; `prompt_ids` and `prompt_text` may be among them. None: all of the
    user's, without cells that have no JSON (bytes, decimals, durations, NaN), which the log names.
    A column that is named and has no JSON is the row's error."""
    score_key: str = ""
    """Which number counts. openrlhf: `rewards` (empty) or `scores`. vllm-classify: number of the
    class, needed where the model has several."""
    range: Interval | None = None
    """Lowest and highest number that is believed; one outside is the row's error. None: any finite
    one."""
    rescale: bool = False
    """Map `range` linearly to 0 … 1."""
    rubric: str = ""
    """What openai-judge asks, with {prompt}, {completion}, {finish_reason}, {prompt_text} and any
    column by name.
    Empty: for a score from 0 to 10, on a last line `Score: N`."""
    score_pattern: str = ""
    """Regular expression whose one group is the number in the judge's answer; the last match
    counts. Empty: `Score: N`."""
    max_tokens: int = Field(default=512, ge=1)
    """Longest answer of the judge. One that is cut is the row's error."""
    message_template: str = "{role}: {content}\n\n"
    """How each message of a conversation becomes text, for openrlhf, vllm-score and
    openai-judge."""
    reply_template: str = "assistant: "
    """What stands between a conversation and the completion in openrlhf's query."""
    prefill: str | None = None
    """What the policy was given to continue, as the beginning of each answer that is sent. None:
    what the prompts' manifest tells of each. Dialect `quiver` sends completions as they are:
    functions behind it get what they get here."""
    use_activation: bool = False
    """Whether a vLLM server puts its scores through the model's activation (usually a sigmoid)."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """More fields of each request to vllm-classify, vllm-score and openai-judge, over the dialect's
    own."""
    revision: str = ""
    """Raise it when the model behind the URL changes: rewards are then made anew."""
    allow_plain_http: Runtime[bool] = False
    """Send a token over http to a host other than this one."""
    batch_rows: Runtime[int] = Field(default=16, ge=1, le=10_000)
    """Rows a request, where the dialect takes several."""
    concurrency: Runtime[int] = Field(default=64, ge=1, le=1024)
    """Requests under way at once."""
    retries: Runtime[int] = Field(default=5, ge=0)
    """Further attempts for a request that failed in a way that may pass."""
    connect_seconds: Runtime[float] = Field(default=5.0, gt=0)
    """Longest wait for a connection."""
    read_seconds: Runtime[float] = Field(default=60.0, gt=0)
    """Longest time for one attempt, until its answer is whole."""
    total_seconds: Runtime[float] = Field(default=300.0, gt=0)
    """Longest time for one request with its retries and waits."""
    backoff_seconds: Runtime[float] = Field(default=0.5, ge=0)
    """Longest pause before the first retry; it doubles with each, and is drawn at random below
    that."""
    requests_per_second: Runtime[float | None] = Field(default=None, gt=0)
    """Most requests a second, over all hosts. None: as many as `concurrency` gives."""
    breaker_failures: Runtime[int] = Field(default=8, ge=1)
    """Failures in a row after which a host rests."""
    breaker_seconds: Runtime[float] = Field(default=5.0, gt=0)
    """How long it rests before one request tries it again."""
    max_bytes: Runtime[int] = Field(default=16 * 1024 * 1024, ge=1)
    """Largest answer that is read."""

    @property
    def begins_with(self) -> str | None:
        """`prefill`, and nothing for a dialect that sends completions as they are."""
        return "" if self.dialect == "quiver" else self.prefill

    @model_validator(mode="before")
    @classmethod
    def _nothing_secret(cls, section: Any) -> Any:
        """First, and with the whole section as its input, so that no message shows what was
        written."""
        if not isinstance(section, dict):
            return section
        refuse_section(section)
        defaults = {"name": section.get("dialect", "")}
        if section.get("dialect") == "openai-judge":
            defaults |= {"rubric": judge.RUBRIC, "score_pattern": judge.PATTERN}
        return section | {name: section.get(name) or text for name, text in defaults.items()}

    @field_validator("score_pattern")
    @classmethod
    def _one_group(cls, pattern: str) -> str:
        try:
            groups = re.compile(pattern).groups
        except re.error as error:
            raise ValueError(f"is no regular expression: {error}") from None
        if pattern and groups != 1:
            raise ValueError(f"must have one group, which is the number, got {groups}")
        return pattern

    @model_validator(mode="after")
    def _fits(self) -> ServerConfig:
        set_fields = self.model_dump(exclude_defaults=True)
        for name, dialects in _BELONGS.items():
            if self.dialect not in dialects and name in set_fields:
                raise ValueError(
                    f"{name} belongs to dialect {' and '.join(dialects)}, not to {self.dialect}: "
                    "leave it out"
                )
        key = self.score_key
        if self.dialect == "openrlhf" and key not in ("", "rewards", "scores"):
            raise ValueError(f"score_key must be rewards or scores for openrlhf, got {key!r}")
        if self.dialect == "vllm-classify" and not re.fullmatch(r"[0-9]{0,6}", key):
            raise ValueError(
                f"score_key must be the number of a class for vllm-classify, got {key!r}"
            )
        if self.dialect == "openai-judge" and not (self.model and self.range):
            raise ValueError(
                "openai-judge needs model, its name on the server, and range, the scores that the "
                "rubric allows"
            )
        if self.rescale and not self.range:
            raise ValueError("rescale needs range, whose ends become 0 and 1")
        allowed = {"message_template": {"role", "content"}, "reply_template": set()}
        for name, names in allowed.items():
            if unknown := sorted(fields(getattr(self, name)) - names):
                raise ValueError(f"{name} knows no {{{unknown[0]}}}; it may have {sorted(names)}")
        return self


def fingerprint(config: ServerConfig) -> str:
    """Hash of everything in the section that decides what the server says of a row."""
    no_matter = {"name", "weight", "extra", "fingerprint"}
    decides = {name: setting for name, setting in config.key().items() if name not in no_matter}
    return f"server:{digest([VERSION, decides])}"
