"""The section [[reward.servers]]: which server scores, in which dialect, and with which limits.
Plain config: nothing is loaded for it.

    [[reward.servers]]
    dialect = "quiver"
    urls = ["http://127.0.0.1:8700"]

`ServerConfig` refuses errors that the text alone shows. A token is named as `env:NAME`, never
written, and no message here shows the text written in its place.

The config cannot see the model behind a URL. Raise `revision` when it changes, so that rewards are
made anew.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from quiver.schemas.manifest import digest
from quiver.stages.core.config import Runtime
from quiver.stages.core.servers import refuse_section
from quiver.stages.reward.scoring import Interval, ScorerConfig

from .dialects import judge
from .dialects.rows import fields, of_several_words

VERSION = 1
"""Version of how the client reads an answer. Raising it makes rewards anew."""
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
    """One reward server, on one host or on several identical ones."""

    model_config = ConfigDict(hide_input_in_errors=True)

    dialect: Literal["quiver", "openrlhf", "vllm-classify", "vllm-score", "openai-judge"]
    """Protocol of requests and answers; `stages/reward/servers/dialects` describes each."""
    urls: tuple[str, ...] = Field(min_length=1)
    """One URL per host, asked in turn. A URL without any path, not even /, gets the dialect's own.
    No user, query or fragment."""
    token: Runtime[str] = ""
    """Bearer token, as `env:NAME`: an environment variable that is set where the stage runs."""
    model: str = ""
    """Name of the model on the server. vllm-classify and vllm-score need it if several are served,
    openai-judge always."""
    label: str = ""
    """Column that openrlhf sends as label. Empty: null."""
    columns: tuple[str, ...] | None = None
    """Columns that dialect `quiver` sends; `prompt_ids` and `prompt_text` may be among them.
    Default: all of the user's, without cells that have no JSON (bytes, decimals, durations, NaN),
    which the log names. If a named column has no JSON, that is the row's error."""
    score_key: str = ""
    """Number to use as the reward. openrlhf: `rewards` (empty) or `scores`. vllm-classify: number
    of the class, required if the model has several."""
    range: Interval | None = None
    """Lowest and highest number to accept; a number outside is the row's error. Default: any finite
    number."""
    rescale: bool = False
    """Map `range` linearly to 0 … 1."""
    rubric: str = ""
    """Question that openai-judge asks, with {prompt}, {completion}, {finish_reason}, {prompt_text}
    and any column by name, or a field {a.b} of column a. {{name}} is sent as {name}.
    Empty: asks for a score from 0 to 10, on a last line `Score: N`."""
    score_pattern: str = ""
    """Regular expression whose one group is the number in the judge's answer; the last match
    counts. Empty: `Score: N`."""
    max_tokens: int = Field(default=512, ge=1)
    """Longest answer of the judge, in tokens. An answer that is cut is the row's error."""
    message_template: str = "{role}: {content}\n\n"
    """Text of each message of a conversation, for openrlhf, vllm-score and openai-judge. Calls of
    tools are part of its content, as JSON."""
    reply_template: str = "assistant: "
    """Text between a conversation and the completion in openrlhf's query."""
    prefill: str | None = None
    """Text that the policy had to continue, sent as the beginning of each answer. Default: from the
    prompts' manifest. Dialect `quiver` sends completions unchanged: functions behind it get what
    they get here."""
    use_activation: bool = False
    """If true, a vLLM server applies the model's activation (usually a sigmoid) to its scores."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Further fields of each request to vllm-classify, vllm-score and openai-judge. They override
    the dialect's own."""
    revision: str = ""
    """Raise it when the model behind the URL changes: rewards are then made anew."""
    allow_plain_http: Runtime[bool] = False
    """If true, a token may be sent over http to another host."""
    batch_rows: Runtime[int] = Field(default=16, ge=1, le=10_000)
    """Rows per request, if the dialect takes several."""
    concurrency: Runtime[int] = Field(default=64, ge=1, le=1024)
    """Requests that run at once."""
    retries: Runtime[int] = Field(default=5, ge=0)
    """Further attempts for a request whose failure may be temporary."""
    connect_seconds: Runtime[float] = Field(default=5.0, gt=0)
    """Longest wait for a connection."""
    read_seconds: Runtime[float] = Field(default=60.0, gt=0)
    """Longest time for one attempt, until its answer is complete."""
    total_seconds: Runtime[float] = Field(default=300.0, gt=0)
    """Longest time for one request with its retries and waits."""
    backoff_seconds: Runtime[float] = Field(default=0.5, ge=0)
    """Longest pause before the first retry. It doubles with each retry; the pause is random below
    it."""
    requests_per_second: Runtime[float | None] = Field(default=None, gt=0)
    """Most requests per second, over all hosts. Default: limited by `concurrency` only."""
    breaker_failures: Runtime[int] = Field(default=8, ge=1)
    """Failures in a row after which a host rests."""
    breaker_seconds: Runtime[float] = Field(default=5.0, gt=0)
    """Seconds that a host rests before one request tries it again."""
    max_bytes: Runtime[int] = Field(default=16 * 1024 * 1024, ge=1)
    """Largest answer to read, in bytes."""

    @property
    def begins_with(self) -> str | None:
        """`prefill`, or empty for the dialect that sends completions unchanged."""
        return "" if self.dialect == "quiver" else self.prefill

    @model_validator(mode="before")
    @classmethod
    def _nothing_secret(cls, section: Any) -> Any:
        """Refuse written secrets, and fill in the name and the judge's defaults. It runs first, on
        the whole section as its input, so that no message shows what was written."""
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
            raise ValueError(f"is not a regular expression: {error}") from None
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
            asked = fields(getattr(self, name))
            if unknown := sorted(each for each in asked - names if " " not in each):
                raise ValueError(
                    f"{name} knows no {{{unknown[0]}}}; it may have {sorted(names)}. "
                    f"{{{{{unknown[0]}}}}} is sent as {{{unknown[0]}}}"
                )
        return self


def fingerprint(config: ServerConfig) -> str:
    """Return the hash of everything in the section that decides the server's answer for a row."""
    no_matter = {"name", "weight", "extra", "fingerprint"}
    decides = {name: setting for name, setting in config.key().items() if name not in no_matter}
    # names of several words were once sent as they stood
    templates = (config.rubric, config.message_template, config.reply_template)
    of_words = sorted(of_several_words("\n".join(templates)))
    return f"server:{digest([VERSION, decides, *of_words])}"
