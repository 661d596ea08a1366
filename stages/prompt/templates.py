"""A chat template as a child process: messages in, text out. A broken, hostile or endless template is a ConfigError.

jinja2's sandbox keeps a template from files and attributes, not from eating time or memory; a process of its own does.

    with Template(source, variables) as template:
        text = template.render("prompt sum-0017", [{"role": "user", "content": "3 + four?"}])
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from schemas.errors import ConfigError, printable
from stages.common.config import Config as Base
from stages.common.config import Runtime

from .python_rows import bad_text

MEMORY = 2 * 1024**3
_WORKER = Path(__file__).with_name("jinja_worker.py")
Messages = list[dict[str, str]]


class TemplateConfig(Base):
    """How rows become token ids, and how long a prompt may be."""

    system: str | None = None
    """System message put before chats that do not begin with one of their own."""
    template: str | None = None
    """File with a jinja chat template. None: the policy's own."""
    template_arguments: dict[str, Any] = Field(default_factory=dict)
    """More variables for the template, such as enable_thinking."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Longest prompt. The model's context less `reserve_tokens` holds besides."""
    reserve_tokens: int = Field(default=0, ge=0)
    """Room for the completion: prompt and this many tokens must fit the model's context (an encoder's: the prompt alone)."""
    overlong: Literal["error", "drop"] = "error"
    """What to do with a prompt that is too long: stop, or leave it out, counted and listed in the manifest."""
    template_seconds: Runtime[float] = Field(default=10.0, gt=0)
    """Longest time that the template may take for one prompt."""


class Template:
    """A compiled template in its child process. `variables` are what the template sees beside `messages`."""

    def __init__(self, source: str, variables: dict[str, Any], seconds: float = 10.0) -> None:
        self._seconds = seconds
        self._child = subprocess.Popen(
            [sys.executable, "-I", str(_WORKER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
        )
        first = {"template": source, "variables": variables, "seconds": seconds, "bytes": MEMORY}
        try:
            self._ask("prompt.template", first)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Template:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the child and wait for it."""
        self._child.kill()
        self._child.communicate()

    def render(self, name: str, messages: Messages) -> str:
        """The text of `messages`. ConfigError names the prompt and says what the template raised."""
        return self._ask(name, messages)

    def _ask(self, name: str, question: Any) -> str:
        try:
            self._child.stdin.write(json.dumps(question) + "\n")
            self._child.stdin.flush()
            line = self._child.stdout.readline()
        except BrokenPipeError:
            line = ""
        answer = json.loads(line) if line else {"error": self._death()}
        wrong = bad_text(answer.get("text", ""))
        if wrong or "error" in answer:
            raise ConfigError(
                name,
                f"the chat template failed: {printable(answer.get('error', f'its text {wrong}'))}",
                next="correct the template or the row",
            )
        return answer["text"]

    def _death(self) -> str:
        code = self._child.wait()
        if code == -signal.SIGALRM:
            return f"it did not end within {self._seconds:g} seconds"
        return f"its process ended with code {code} (limit: {MEMORY // 1024**2} MiB of memory)"
