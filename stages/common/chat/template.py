"""A chat template as a child process: messages in, text out. A broken, hostile or endless template
is a ConfigError.

jinja2's sandbox keeps a template from files and attributes, not from eating time or memory; a
process of its own does.

    with Template(source, variables) as template:
        messages = [{"role": "user", "content": "3 + four?"}]
        text = template.render("prompt sum-0017", messages, add_generation_prompt=True)
"""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from quiver.schemas.errors import ConfigError, printable
from quiver.schemas.plain import bad_text
from quiver.stages.common.runtime.subprocesses import Process

MEMORY = 2 * 1024**3
_WORKER = Path(__file__).with_name("jinja_worker.py")
Messages = list[dict[str, str]]


class Template:
    """A compiled template in its child process; after a rendering that ended the child, the next
    one starts another."""

    def __init__(
        self,
        source: str,
        variables: dict[str, Any],
        seconds: float = 10.0,
        name: str = "prompt.template",
    ) -> None:
        """`variables`: what the template sees beside `messages`. `name`: what errors about the
        template itself call it."""
        self._name = name
        self._template = {"template": source, "variables": variables, "seconds": seconds}
        self._closed = False
        self._start()

    def _start(self) -> None:
        self._child = Process(
            [sys.executable, "-I", str(_WORKER)],
            limits={resource.RLIMIT_AS: MEMORY},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )
        try:
            self._ask(self._name, self._template)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Template:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the child and wait for it."""
        self._closed = True
        self._child.end(grace=0)

    def render(self, name: str, messages: Messages, **variables: Any) -> str:
        """The text of `messages`, with other `variables` for this once. ConfigError names the
        prompt and says what was raised."""
        if self._child.poll() is not None and not self._closed:
            self._start()
        shown = [_with_thinking(message) for message in messages]
        return self._ask(name, {**variables, "messages": shown})

    def _ask(self, name: str, question: dict[str, Any]) -> str:
        try:
            print(json.dumps(question), file=self._child.stdin, flush=True)
            line = self._child.stdout.readline()
        except BrokenPipeError:
            line = ""
        answer = json.loads(line) if line else {"error": self._death()}
        text = answer.get("text", "")
        wrong = bad_text(text.replace("\0", ""))  # what a policy wrote may hold a NUL
        if wrong or "error" in answer:
            raise ConfigError(
                name,
                f"the chat template failed: {printable(answer.get('error', f'its text {wrong}'))}",
                next="correct the template or the row",
            )
        return text

    def _death(self) -> str:
        code = self._child.wait()
        if code == -signal.SIGALRM:
            return f"it did not end within {self._template['seconds']:g} seconds"
        return f"its process ended with code {code} (limit: {MEMORY // 1024**2} MiB of memory)"


def _with_thinking(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose thinking has each name that templates read it by."""
    thinking = message.get("reasoning_content")
    if thinking is None:
        return message
    return {**message, "reasoning": thinking, "thinking": thinking}
