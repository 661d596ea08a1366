"""Config of the prompt stage: the rows, how they become ids, and which rows a round takes.

A recipe has the first part in [data] and the second in [prompt].
Not of the spine: look up fields by name.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from quiver.schemas.prompts import MEDIA
from quiver.stages.core.config import Config as Base
from quiver.stages.core.config import Runtime, without_folder
from quiver.stages.model.media.checking import MediaLimits
from quiver.stages.turns.environment_config import EnvironmentConfig

INPUTS = ("messages", "prompt", "prompt_ids")
SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".arrow", ".feather")
"""Suffixes of the files that a source may be."""


class Curriculum(Base):
    """Choose rows to ask again by the last mean reward of each row.

    First come rows that were not asked in the last `iterations` iterations, in the usual order.
    Then come rows with a mean within the bounds and, if these do not fill `limit`, the others.
    Within both groups, rows that were not asked for the longest time come first. Rows that were
    dropped as too long come last.
    """

    low: float
    """Rows with a lower mean reward are too hard for now."""
    high: float
    """Rows with a higher mean reward are too easy."""
    iterations: Runtime[int] = Field(ge=1)
    """Number of earlier iterations of the run to look at. Older rewards of a row are ignored, so
    a row that was too hard gets another chance: with two epochs (2 · rows / limit) it rests for
    one."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low {self.low:g} is above high {self.high:g}: no row lies between")
        return self


class SourceConfig(Base):
    """Rows: their source, and the columns to use."""

    source: str = Field(min_length=1)
    """A .jsonl, .json, .csv, .parquet, .arrow or .feather file; `datasets:NAME`, or `datasets:PATH`
    for a folder that `save_to_disk` wrote; or a generator of rows, `module:function` or
    `file.py:function`."""
    split: str = "train"
    """Split of `datasets:NAME`, or of a `datasets:PATH` that has several."""
    name: str | None = None
    """Configuration of `datasets:NAME`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of a generator."""
    messages: str | None = None
    """Column with a chat: a list of {role, content}, or its JSON text. If neither this, `prompt`
    nor `prompt_ids` is set, the input is the first of the columns messages, prompt, prompt_ids that
    the source has."""
    prompt: str | None = None
    """Column with plain text; it becomes one user message, unless `raw_text` is set. A chat in it
    is read as a chat."""
    prompt_ids: str | None = None
    """Column with token ids, given to the engine unchanged. Each picture or clip has one id there,
    the policy's placeholder."""
    images: str | None = None
    """Column with a prompt's pictures, for a policy that sees them: one or a list, each as
    `datasets.Image` stores it, as bytes, as base64 or a data URL, or as a path below the source's
    folder. They are shown at the chat's parts of type image, or before its first user message's
    text if it has none."""
    audio: str | None = None
    """Column with a prompt's clips, for a policy that hears them: WAV, FLAC or MP3, each as
    `datasets.Audio` stores it or as in `images`, for the parts of type audio."""
    tools: str = "tools"
    """Column with a row's own tools, if the source has it: a list of JSON schemas of functions, or
    JSON text of it. The chat template shows them for that row, unless [generate.turns] or
    prompt.template_arguments define the tools. Empty: do not show them."""
    raw_text: bool = False
    """Use the text of `prompt` as the whole prompt, without a chat template. Control tokens typed
    in it stay text."""
    group_id: str | None = None
    """Column with unique names. Default: the row's number in the source, from 0, with at least six
    digits."""
    group_prefix: str = ""
    """Prefix of every group id."""
    limit: int | None = Field(default=None, ge=1)
    """Rows per iteration. Each iteration takes the next ones of a shuffle that is drawn anew every
    epoch. Default: all rows, in order."""
    curriculum: Curriculum | None = None
    """Choose rows by their difficulty. Default: in the order of the shuffle."""
    source_sha256: str = ""
    """Filled in by the stage: hash of the file, or of the rows if there is no file. If set, the
    source must match it."""

    @property
    def has_chats(self) -> bool:
        """True if a chat template writes the prompts, once the input column is known."""
        return bool(self.messages or self.prompt) and not self.raw_text

    @property
    def media(self) -> dict[str, str]:
        """The named columns of pictures and clips, by modality."""
        named = {modality: getattr(self, field) for modality, field in MEDIA.items()}
        return {modality: column for modality, column in named.items() if column}

    @property
    def input(self) -> str | None:
        """The one of INPUTS that is named; None if the source's columns decide."""
        return next((name for name in INPUTS if getattr(self, name)), None)

    def key(self) -> dict[str, Any]:
        """Return the key without the source's folder once its hash is known: the bytes decide, not
        their location."""
        fields = super().key()
        if self.source_sha256:
            fields["source"] = without_folder(self.source)
        return fields

    @model_validator(mode="after")
    def _one_input(self) -> Self:
        named = [name for name in INPUTS if getattr(self, name)]
        if len(named) > 1:
            raise ValueError(f"{' and '.join(named)} exclude each other: name one column")
        if self.raw_text and (self.messages or self.prompt_ids):
            raise ValueError(f"raw_text goes with prompt, not with {named[0]}")
        if self.media and self.raw_text:
            raise ValueError("images and audio are shown by a chat template: leave raw_text out")
        if self.curriculum is not None and self.limit is None:
            raise ValueError("curriculum chooses `limit` rows an iteration: set limit")
        return self


class TextConfig(Base):
    """Rendering of rows to token ids, and the limits of a prompt's text."""

    system: str | None = None
    """System message put before chats that do not begin with their own. It takes the place of one
    that is blank."""
    template: str | None = None
    """File with a jinja chat template. Default: the policy's own."""
    template_arguments: dict[str, Any] = Field(default_factory=dict)
    """More variables for the template, such as enable_thinking."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Maximum tokens of a prompt. It must also fit the model's context with `reserve_tokens`
    free."""
    reserve_tokens: int = Field(default=0, ge=0)
    """Room for the completion: prompt and this many tokens must fit the model's context (for an
    encoder: the prompt alone)."""
    overlong: Literal["error", "drop"] = "error"
    """If a prompt is too long: stop with an error, or drop the prompt, which is then counted and
    listed in the manifest."""
    template_seconds: Runtime[float] = Field(default=10.0, gt=0)
    """Maximum seconds that the template may take for one prompt."""


class TemplateConfig(MediaLimits, TextConfig):
    """Rendering of rows to token ids, and the limits of a prompt."""


class Config(SourceConfig, TemplateConfig):
    """Config of the prompt stage: the source of prompts, their rendering, and the rows to take."""

    seed: int = Field(default=0, ge=0)
    """Seed of the shuffles. Has no effect without `limit`."""
    round: int = Field(default=0, ge=0)
    """Number of the round of sampling, from 1; each takes the next `limit` rows. 0: an evaluation,
    which takes the first ones. Has no effect without `limit`. A recipe's flow sets it."""
    turns: EnvironmentConfig | None = None
    """Environment or tools of [generate.turns]. Prompts show the environment's opening and the
    tools' schemas."""
    first: int | None = Field(default=None, ge=1)
    """Render only this many of the rows, from the start; `quiver check` uses it. Default: all."""

    def key(self) -> dict[str, Any]:
        """Return the source's key without the template's folder: the model's entry has the
        template's hash."""
        fields = super().key()
        if self.template:
            fields["template"] = without_folder(self.template)
        return fields
