"""The child process in which a chat template runs: sandboxed, with a limit on time that also holds
inside C code.

First line in: {"template", "variables", "seconds"}; then one rendering a line: {"messages"} and
variables that hold for it alone. One answer a line: {"text"} or {"error"}. When a rendering takes
too long the process is ended by its own alarm, so nothing can be left running. It is started as a
file, by itself, and imports jinja2 and the standard library alone. The environment is the one of
transformers.
"""

import json
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


def _raise_exception(message):
    raise TemplateError(message)


def _tojson(content, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(
        content,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def make_environment() -> ImmutableSandboxedEnvironment:
    """Blocks trimmed, loop controls, `raise_exception`, `strftime_now`, and a `tojson` that does
    not escape HTML."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda text: datetime.now().strftime(text)
    return environment


def main() -> None:
    """Answer to the template itself, then to each rendering."""
    first = json.loads(sys.stdin.readline())
    template = None
    line = "{}"
    while line:
        variables = {**first["variables"], **json.loads(line)}
        # SIGALRM keeps its default action, which ends the process wherever it is
        signal.setitimer(signal.ITIMER_REAL, first["seconds"])
        try:
            if template is None:
                template = make_environment().from_string(first["template"])
                answer = {"text": ""}
            else:
                answer = {"text": template.render(**variables)}
        except Exception as error:  # a template may raise anything; the parent says whose it was
            lineno = getattr(error, "lineno", None)
            place = f" (line {lineno})" if lineno else ""
            answer = {"error": f"{type(error).__name__}: {error}{place}"[:10_000]}
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(answer), flush=True)
        line = sys.stdin.readline()


if __name__ == "__main__":
    main()
