"""The prompt stage's config: the rows, how they become token ids, and which an iteration takes.

A recipe has the first part in [data] and the second in [prompt].

Not of the spine: its fields are looked up by name.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from quiver.stages.common.config import Config as Base
from quiver.stages.common.config import Runtime, without_folder
from quiver.stages.common.environments.config import EnvironmentConfig

INPUTS = ("messages", "prompt", "prompt_ids")
SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".arrow", ".feather")
"""Of the files that a source may be."""


class Curriculum(Base):
    """Which rows are asked again, by the mean reward that each had when it was asked last.

    First come rows that were not asked in the last `iterations` iterations, in the usual order;
    then those whose mean lies within the bounds, and, where these do not fill `limit`, the others:
    of each those that were not asked for the longest time.
    """

    low: float
    """Rows with a lower mean reward are too hard for now."""
    high: float
    """Rows with a higher one are too easy."""
    iterations: Runtime[int] = Field(ge=1)
    """How many earlier iterations of the run are looked at. What a row measured before them is
    forgotten, so a row that was too hard gets its turn again: with two epochs (2 · rows / limit) it
    rests for one."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.low > self.high:
            raise ValueError(f"low {self.low:g} is above high {self.high:g}: no row lies between")
        return self


class SourceConfig(Base):
    """Rows: where they come from, and which columns matter."""

    source: str = Field(min_length=1)
    """A .jsonl, .json, .csv, .parquet, .arrow or .feather file; `datasets:NAME`, or `datasets:PATH`
    of a folder that `save_to_disk` wrote; or a generator of rows, `module:function` or
    `file.py:function`."""
    split: str = "train"
    """Which split of `datasets:NAME`."""
    name: str | None = None
    """Which configuration of `datasets:NAME`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of a generator."""
    messages: str | None = None
    """Column with a chat: a list of {role, content}, or its JSON text. Where neither this, `prompt`
    nor `prompt_ids` is set, the first of the columns messages, prompt, prompt_ids that the source
    has is taken."""
    prompt: str | None = None
    """Column with plain text; it becomes one user message, unless `raw_text`. A chat in it is taken
    as one."""
    prompt_ids: str | None = None
    """Column with token ids, given to the engine as they are."""
    images: str | None = None
    """Column with a prompt's pictures, for a policy that sees them: one or a list, each as
    `datasets.Image` stores it, as bytes, as base64 or a data URL, or as a path below the source's
    folder. They are shown where the chat has parts of type image, else before its first user
    message's text."""
    tools: str = "tools"
    """Column with a row's own tools, if the source has it: a list of JSON schemas of functions, or
    JSON text of it. The chat template shows them for that row, unless [generate.turns] or
    prompt.template_arguments say what may be called. Empty: they are not shown."""
    raw_text: bool = False
    """Take the text of `prompt` as the whole prompt, without a chat template. Control tokens typed
    in it stay text."""
    group_id: str | None = None
    """Column with unique names. None: the row's number in the source, from 0, with at least six
    digits."""
    group_prefix: str = ""
    """Put before every group id."""
    limit: int | None = Field(default=None, ge=1)
    """Rows an iteration. Each iteration takes the next ones of a shuffle that is drawn anew every
    epoch. None: all, in order."""
    curriculum: Curriculum | None = None
    """Choose rows by their difficulty. None: only by their turn."""
    source_sha256: str = ""
    """Filled in by the stage: hash of the file, or of the rows where there is no file. If set, the
    source must have it."""

    @property
    def has_chats(self) -> bool:
        """Whether a chat template writes the prompts, once the input column is known."""
        return bool(self.messages or self.prompt) and not self.raw_text

    @property
    def input(self) -> str | None:
        """Which of INPUTS is named; None where it is left to the source's columns."""
        return next((name for name in INPUTS if getattr(self, name)), None)

    def key(self) -> dict[str, Any]:
        """The bytes decide, wherever they lie, once their hash is known."""
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
        if self.images and (self.raw_text or self.prompt_ids):
            raise ValueError("images are shown by a chat template: leave raw_text, prompt_ids out")
        if self.curriculum is not None and self.limit is None:
            raise ValueError("curriculum chooses `limit` rows an iteration: set limit")
        return self


class TemplateConfig(Base):
    """How rows become token ids, and how long a prompt may be."""

    system: str | None = None
    """System message put before chats that do not begin with one of their own."""
    template: str | None = None
    """File with a jinja chat template. None: the policy's own."""
    template_arguments: dict[str, Any] = Field(default_factory=dict)
    """More variables for the template, such as enable_thinking."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Most tokens of a prompt. It must also fit the model's context with `reserve_tokens` free."""
    reserve_tokens: int = Field(default=0, ge=0)
    """Room for the completion: prompt and this many tokens must fit the model's context (an
    encoder's: the prompt alone)."""
    overlong: Literal["error", "drop"] = "error"
    """What to do with a prompt that is too long: stop, or leave it out, counted and listed in the
    manifest."""
    template_seconds: Runtime[float] = Field(default=10.0, gt=0)
    """Longest time that the template may take for one prompt."""
    max_image_pixels: Runtime[int] = Field(default=4096 * 4096, ge=1)
    """Most pixels of a picture; one with more is refused."""
    max_image_bytes: Runtime[int] = Field(default=20 * 1024**2, ge=1)
    """Most bytes of a picture as it is stored."""
    image_seconds: Runtime[float] = Field(default=10.0, gt=0)
    """Longest time that decoding a picture may take."""


class Config(SourceConfig, TemplateConfig):
    """Where prompts come from, how they are rendered, and which of them an iteration takes."""

    seed: int = Field(default=0, ge=0)
    """Decides the shuffles. Without `limit` it decides nothing."""
    iteration: int = Field(default=0, ge=0)
    """Which `limit` rows to take, from 0. Without `limit` it decides nothing. In a recipe's flow
    the first iteration has 0, and so has an evaluation."""
    turns: EnvironmentConfig | None = None
    """The environment or the tools of [generate.turns], of which prompts show the opening and the
    schemas."""
    first: int | None = Field(default=None, ge=1)
    """Render only the first so many of these rows, which `quiver check` looks at. None: all."""

    def key(self) -> dict[str, Any]:
        """As the source has it; a template's hash is that of the model that it stands in for."""
        fields = super().key()
        if self.template:
            fields["template"] = without_folder(self.template)
        return fields
