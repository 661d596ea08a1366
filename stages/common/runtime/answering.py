"""The process of a `Worker` (see `workers`): python -P answering.py CONNECTION (a descriptor)

It is started as a file (-P: the files beside it do not stand in for libraries). The first message
says where modules are found and which one answers; each later message is one request:

    {"path": sys.path, "module": …}                  it has a class Host
    {"key": …, "number": 3, "request": {…}}        → {"key": …, "number": 3, "piece": 0,
                                                      "answer": Host.answer(request, send)}

Messages are pickled by the stage, answers are JSON: the stage never unpickles what came from a
process that ran a user's code. `send` sends a piece of an answer before the last one. Each piece
repeats the key and the number of its request and counts the pieces, so that the stage can tell an
answer that belongs elsewhere.
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
    """End a forked child that would leave the block, such as one in which a user's code raises:
    only the process that entered the block leaves it."""
    pid = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != pid:
            os._exit(0)


def main() -> None:
    """Answer requests until the connection is closed."""
    connection = Connection(int(sys.argv[1]))
    os.set_inheritable(connection.fileno(), False)
    # what a process printed before it was killed is to be seen
    sys.stdout.reconfigure(line_buffering=True)
    pid = os.getpid()
    host: Any = None
    while True:
        try:
            message = pickle.loads(connection.recv_bytes())
        except EOFError:
            os._exit(0)  # without waiting for threads that a user's code left
        if "module" in message:
            sys.path[:] = message["path"]
            host = importlib.import_module(message["module"]).Host()
            continue
        envelope = {"key": message["key"], "number": message["number"], "piece": 0}

        def send(answer: dict[str, Any], envelope: dict[str, Any] = envelope) -> None:
            if os.getpid() != pid:  # a copy that goes on in an event loop, say
                os._exit(0)
            connection.send_bytes(json.dumps({**envelope, "answer": answer}).encode())
            envelope["piece"] += 1

        with no_copies():
            answer = host.answer(message["request"], send)
        send(answer)


if __name__ == "__main__":
    main()
