"""A server that speaks as vLLM's does, without a model, and misbehaves as it is told.

with FakeVllm(policy) as server:
    server.says = lambda answer, count: {**answer, "model": "another"}
    ... server.url, server.num_rows
"""

from __future__ import annotations

import json
import socket
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from quiver.stages.common.models.checkpoints import as_model

WORDS = "the engine core is dead"


def completion(prompt_ids: list[int], seed: int) -> tuple[list[int], list[float]]:
    """What the fake model answers: ids of the seed alone, and made-up logprobs."""
    ids = [3 + (seed + 7 * place) % 300 for place in range(3 + seed % 3)]
    return ids, [-0.25 * (place + 1) for place in range(len(ids))]


class FakeVllm:
    """One server on a free port, until it is closed."""

    def __init__(self, policy=None, **changed: Any) -> None:
        self.card = {"id": as_model("policy", policy).weights if policy else "none"}
        self.card |= {"root": "/models/there", "parent": None, "max_model_len": 256}
        self.card |= changed
        self.label = "default"
        self.later_label: str | None = None
        """Of the last ids of every answer, where weights came in the middle."""
        self.started = time.time()
        self.probe_logprob = 0.0
        self.says = lambda answer, count: answer
        """Of an answer to a row, and how many came before: what is sent. An int is a status, None
        a connection that is closed, bytes a body that ends too early."""
        self.num_rows = 0
        self.bodies: list[dict] = []
        self.headers: list[dict] = []
        self._connections: list[socket.socket] = []
        self._lock = threading.Lock()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(
            target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )

    def __enter__(self) -> FakeVllm:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def restart(self) -> None:
        """As a process that was started now: at the same port, and no connection is left."""
        self.started = time.time()
        for connection in self._connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._connections.clear()

    def answer(self, body: dict) -> Any:
        """To `/inference/v1/generate`."""
        if body["model"] != self.card["id"]:
            return 404
        allowed = body["sampling_params"].get("allowed_token_ids")
        if allowed:
            ids, logprobs = 2 * allowed, 2 * [self.probe_logprob]
        else:
            ids, logprobs = completion(body["token_ids"], body["sampling_params"]["seed"])
        content = [
            {"token_id": token, "logprob": logprob}
            for token, logprob in zip(ids, logprobs, strict=True)
        ]
        choice = {"token_ids": ids, "logprobs": {"content": content}, "finish_reason": "length"}
        labels = [label for label in (self.label, self.later_label) if label is not None]
        spans = [{"version": label} for label in labels]
        choice |= {"stop_reason": None, "weight_versions": spans}
        answer = {
            "request_id": f"generate-tokens-{body.get('request_id')}",
            "model": self.card["id"],
            "usage": {"prompt_tokens": len(body["token_ids"])},
            "choices": [choice],
        }
        if allowed:
            return answer
        with self._lock:
            count = self.num_rows
            self.num_rows += 1
            self.bodies.append(body)
        return self.says(answer, count)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                fake._connections.append(self.connection)

            def do_GET(self) -> None:
                fake.headers.append(dict(self.headers))
                texts = {
                    "/v1/models": json.dumps({"data": [fake.card]}),
                    "/version": json.dumps({"version": "0.32.0"}),
                    "/metrics": f"process_start_time_seconds {fake.started}\n",
                }
                text = texts.get(self.path)
                self._send(404 if text is None else 200, (text or "{}").encode())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                answer = fake.answer(body)
                if isinstance(answer, int):
                    token = self.headers.get("Authorization", "")
                    words = {"error": {"message": f"{WORDS} {token}"}}
                    self._send(answer, json.dumps(words).encode())
                elif isinstance(answer, bytes):
                    self._send(200, answer, len(answer) + 10)
                    self.close_connection = True
                elif answer is None:
                    self.close_connection = True
                else:
                    self._send(200, json.dumps(answer).encode())

            def _send(self, status: int, body: bytes, length: int | None = None) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(length or len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        return Handler
