"""Parse untrusted Arrow files in a process of their own: one path per line in, one answer out.

A crafted file with the right hash can crash the process that reads it, so it is read here first.
An answer is a JSON string: the problem with the file, or empty. This file imports no other module
of this project, because it is run by its path.
"""

import json
import sys

import pyarrow as pa


def main() -> None:
    """Answer for each path on stdin."""
    for line in sys.stdin:
        problem = ""
        try:
            pa.ipc.open_file(pa.memory_map(json.loads(line))).read_all().validate(full=True)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        print(json.dumps(problem), flush=True)


if __name__ == "__main__":
    main()
