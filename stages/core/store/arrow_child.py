"""Parse untrusted Arrow files in a process of their own: one path per line in, one answer out.

A crafted file with the right hash can crash the process that reads it, so it is read here first.
An answer is {}, or {"error": the problem with the file}. If parsing takes too long, the process's
own alarm ends it. This file imports no other module of this project, because it is run by its path.
"""

import json
import signal
import sys

import pyarrow as pa

MOST_SECONDS = 60


def main() -> None:
    """Answer for each path on stdin."""
    for line in sys.stdin:
        answer = {}
        # the default action of SIGALRM is needed: it ends the process wherever it hangs
        signal.alarm(MOST_SECONDS)
        try:
            pa.ipc.open_file(pa.memory_map(json.loads(line))).read_all().validate(full=True)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        signal.alarm(0)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
