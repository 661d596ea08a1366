"""Parses Arrow files for whoever does not trust them: a path a line in, an answer a line out.

A crafted file with the right hash can crash the process that reads it, so it is read here first.
The answer is JSON: what is wrong with the file, or an empty string. This file imports no module of
ours: it is run by its path.
"""

import json
import sys

import pyarrow as pa


def main() -> None:
    """Answer for each file of stdin."""
    for line in sys.stdin:
        problem = ""
        try:
            pa.ipc.open_file(pa.memory_map(json.loads(line))).read_all().validate(full=True)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        print(json.dumps(problem), flush=True)


if __name__ == "__main__":
    main()
