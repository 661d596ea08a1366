"""Moto's S3 server: `python -m tests.moto_server`, with moto on the search path.

It answers one request at a time, because moto looks whether an object is there and puts it in two
steps: of racers with put-if-absent several would win. Bodies are read before a request's turn comes,
so that a client which stops halfway holds up nobody else.
"""

import io
import threading

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server
from werkzeug.wsgi import ClosingIterator, get_input_stream

_moto = DomainDispatcherApplication(create_backend_app)
_turn = threading.Lock()


def _answer(environ, start_response):
    body = get_input_stream(environ).read()
    environ["wsgi.input"] = io.BytesIO(body)
    environ["CONTENT_LENGTH"] = str(len(body))
    with _turn:
        return list(ClosingIterator(_moto(environ, start_response)))


if __name__ == "__main__":
    server = make_server("127.0.0.1", 0, _answer, threaded=True)
    print(f"listens on http://127.0.0.1:{server.port}", flush=True)
    server.serve_forever()
