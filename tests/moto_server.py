"""Moto's S3 server: `python -m tests.moto_server`, with moto on the search path.

It answers one request at a time, because moto looks whether an object is there and puts it in two
steps: of racers with put-if-absent several would win. Bodies are read before a request's turn comes,
so that a client which stops halfway holds up nobody else.

With `google` as its argument it speaks the XML interface of Google Cloud Storage. That is S3's, but
that each object has a generation, a number that rises with every write, and that a write may name
the generation it replaces (0: none). https://cloud.google.com/storage/docs/xml-api/reference-headers
"""

import gc
import io
import itertools
import sys
import threading
from urllib.parse import quote

from moto.moto_server.werkzeug_app import create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server
from werkzeug.wsgi import ClosingIterator, get_input_stream

_moto = create_backend_app("s3")
_turn = threading.Lock()


_generations: dict[str, int] = {}
"""Of each object of Google's, by path."""
_next = itertools.count(1)
_AMAZONS = "AWS4-HMAC-SHA256 Credential=anyone/20260101/us-east-1/s3/aws4_request"


def _answer(environ, start_response):
    body = get_input_stream(environ).read()
    environ["wsgi.input"] = io.BytesIO(body)
    environ["CONTENT_LENGTH"] = str(len(body))
    with _turn:
        return list(ClosingIterator(_application(environ, start_response)))


def _google(environ, start_response):
    path, method, query = (environ[n] for n in ("PATH_INFO", "REQUEST_METHOD", "QUERY_STRING"))
    # Google's client quotes more than moto expects, and signs in another way
    environ["RAW_URI"] = environ["REQUEST_URI"] = f"{quote(path)}?{query}".rstrip("?")
    environ["HTTP_AUTHORIZATION"] = _AMAZONS
    replaces = environ.get("HTTP_X_GOOG_IF_GENERATION_MATCH")
    if replaces is not None and int(replaces) != _generations.get(path, 0):
        start_response("412 Precondition Failed", [("Content-Length", "0")])
        return [b""]
    answers = []
    content = list(_moto(environ, lambda *about: answers.append(about)))
    status, headers, *_ = answers[0]
    if status.startswith("2"):
        is_part = "partNumber" in query or query.startswith("uploads")
        if method in ("PUT", "POST") and not is_part and path.strip("/").count("/"):
            _generations[path] = next(_next)
        if method == "DELETE":
            _generations.pop(path, None)
        headers = [*headers, ("x-goog-generation", str(_generations.get(path, 0)))]
    start_response(status, headers)
    return content


_application = _google if "google" in sys.argv[1:] else _moto


class _Handler(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"  # a connection serves many requests
    disable_nagle_algorithm = True

    def log(self, *message) -> None:
        """Write nothing."""


if __name__ == "__main__":
    server = make_server("127.0.0.1", 0, _answer, threaded=True, request_handler=_Handler)
    gc.freeze()
    print(f"listens on http://127.0.0.1:{server.port}", flush=True)
    server.serve_forever()
