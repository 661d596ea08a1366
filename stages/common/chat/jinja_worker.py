"""The child process in which a chat template runs: sandboxed, with a limit on time and memory that
also holds inside C code.

First line in: {"template", "variables", "seconds", "bytes"}; then one rendering a line:
{"messages"} and variables that hold for it alone. One answer a line: {"text"} or {"error"}. When a
rendering takes too long the process is ended by its own alarm, so nothing can be left running. It
is started as a file, by itself, and imports jinja2 and the standard library alone. The environment
is the one of transformers.
"""

import json
import resource
import signal
import sys
from datetime import datetime

import jinja2.ext
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text for trainers of another
    kind; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012  jinja2's own way

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(["name:endgeneration"], drop_needle=True)


def _raise(message):
    raise TemplateError(message)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def environment() -> ImmutableSandboxedEnvironment:
    """Blocks trimmed, loop controls, `raise_exception`, `strftime_now`, and a `tojson` that does
    not escape HTML."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    made.filters["tojson"] = _tojson
    made.globals["raise_exception"] = _raise
    made.globals["strftime_now"] = lambda text: datetime.now().strftime(text)
    return made


def _attempt(seconds, work):
    """`work()` as an answer. SIGALRM keeps its default action, which ends the process wherever it
    is."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return work()
    except Exception as error:  # a template may raise anything; the parent says whose it was
        where = f" (line {error.lineno})" if getattr(error, "lineno", None) else ""
        return {"error": f"{type(error).__name__}: {error}{where}"[:10_000]}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def answers(lines):
    """One answer for the template itself, then one for each rendering."""
    first = json.loads(next(lines))
    seconds, variables = first["seconds"], first["variables"]
    resource.setrlimit(resource.RLIMIT_AS, (first["bytes"], first["bytes"]))
    compiled = []
    yield _attempt(
        seconds,
        lambda: compiled.append(environment().from_string(first["template"])) or {"text": ""},
    )
    for line in lines:
        given = {**variables, **json.loads(line)}
        yield _attempt(seconds, lambda given=given: {"text": compiled[0].render(**given)})


if __name__ == "__main__":
    for answer in answers(iter(sys.stdin.readline, "")):
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
