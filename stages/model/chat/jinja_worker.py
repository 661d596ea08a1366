"""Runs a chat template in a child process: sandboxed, with a time limit that also stops C code.

Each line of input is one rendering: {"template", "variables", "seconds"}; without variables the
template is only compiled. All lines have the same template. Each answer is one line: {"text"} or
{"error"}. If a rendering takes too long, the process's own alarm ends it, so nothing is left
running. The file runs as a script and imports only jinja2 and the standard library. Its jinja2
environment matches the one of transformers.
"""

import json
import signal
import sys
from datetime import datetime

import jinja2.ext
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}`, which marks the assistant's text for other trainers.

    Here it renders as its body.
    """

    tags = {"generation"}  # noqa: RUF012  a class attribute, as jinja2 expects

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
    """Return the jinja2 environment of templates.

    It trims blocks and has loop controls, `raise_exception`, `strftime_now`, and a `tojson` that
    does not escape HTML.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda text: datetime.now().strftime(text)
    return environment


def main() -> None:
    """Answer one request after another until stdin ends."""
    template = None
    for line in sys.stdin:
        question = json.loads(line)
        # the default action of SIGALRM is needed: it ends the process wherever it hangs
        signal.setitimer(signal.ITIMER_REAL, question["seconds"])
        try:
            template = template or make_environment().from_string(question["template"])
            variables = question["variables"]
            answer = {"text": "" if variables is None else template.render(**variables)}
        except Exception as error:  # a template may raise anything; the parent names the prompt
            lineno = getattr(error, "lineno", None)
            place = f" (line {lineno})" if lineno else ""
            answer = {"error": f"{type(error).__name__}: {error}{place}"[:10_000]}
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
