"""The inside of a `UserProcess`: python -P answering.py CONNECTION (a descriptor)

It is started as a file; -P keeps the files beside it from shadowing libraries. The first message
gives the module search path and the module that answers; each later message is one request:

    {"path": sys.path, "module": …}                  it has a class Answerer
    {"key": …, "number": 3, "request": {…}}        → {"key": …, "number": 3, "piece": 0,
                                                      "answer": Answerer.answer(request, send)}

Messages from the stage are pickled, answers are JSON: the stage never unpickles data from a process
that ran a user's code. `send` sends a piece of an answer before the last one. Each piece repeats
the key and number of its request and counts the pieces, so that the stage can recognise an answer
that belongs elsewhere.
"""

from __future__ import annotations

import importlib
import json
import os
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any


@contextmanager
def no_copies() -> Iterator[None]:
    """End a forked child that leaves the block, for example because a user's code raises in it.

    Only the process that entered the block leaves it.
    """
    pid = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != pid:
            os._exit(0)


def main() -> None:
    """Answer requests until the connection is closed."""
    connection = Connection(int(sys.argv[1]))
    # programs that a user's code starts must not keep the connection open
    os.set_inheritable(connection.fileno(), False)
    # output that was printed before a kill must reach the stage
    sys.stdout.reconfigure(line_buffering=True)
    pid = os.getpid()
    answerer: Any = None
    while True:
        try:
            message = pickle.loads(connection.recv_bytes())
        except EOFError:
            os._exit(0)  # without waiting for threads that a user's code left
        if "module" in message:
            sys.path[:] = message["path"]
            answerer = importlib.import_module(message["module"]).Answerer()
            continue
        envelope = {"key": message["key"], "number": message["number"], "piece": 0}

        def send(answer: dict[str, Any], envelope: dict[str, Any] = envelope) -> None:
            if os.getpid() != pid:  # a forked copy that still runs, in an event loop for example
                os._exit(0)
            connection.send_bytes(json.dumps({**envelope, "answer": answer}).encode())
            envelope["piece"] += 1

        with no_copies():
            answer = answerer.answer(message["request"], send)
        send(answer)


if __name__ == "__main__":
    main()
