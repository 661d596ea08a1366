"""Serve a recipe's [reward] section over HTTP: python -m quiver.deployments.reward_server
RECIPE.toml

    POST /v1/score     dialect quiver       rows with ids, columns, token ids
    POST /get_reward   dialect openrlhf     queries, prompts and labels
    GET  /health, /openapi.json

The protocols are in `stages/reward/servers/dialects`. A recipe whose [[reward.servers]] uses one of
these dialects gets the scores that this section gives, row by row, with weights, clip and the
overlong penalty. One difference: a reward model served here knows only its own `prefill`, not the
text that the policy had to continue.

- Labels reach functions as the column `--label`.
- Rows of requests that arrive together are scored together.
- A row that fails is an error in the answer, never a number.
- OpenRLHF sends the policy's end token with each answer. It is removed, unless `--keep-end-tokens`.

The server listens on loopback. On any other address it requires `--token env:NAME`, and requests
must carry that bearer token. Without a token it answers only requests that name a loopback host, so
that no web page can reach it through a browser. `batcher.Limits` limits the size and time of
headers and bodies, and the number of connections.
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import itertools
import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import h11
import uvicorn
from fastapi import APIRouter, FastAPI, HTTPException, Request, Response, Security
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from pydantic import BaseModel
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.responses import JSONResponse
from uvicorn.protocols.http.h11_impl import H11Protocol

from quiver.schemas.errors import ConfigError, QuiverError, SecurityError, printable, unexpected
from quiver.stages.core.config import parse, read_recipe
from quiver.stages.core.servers import MalformedError, is_loopback, read_json, secret
from quiver.stages.reward.config import Config, with_fingerprints
from quiver.stages.reward.pool.scorer import no_groups
from quiver.stages.reward.scoring import Scorer
from quiver.stages.reward.servers.dialects import openrlhf, quiver
from quiver.stages.reward.stage import open_scorers

from .batcher import Batcher, Limits, score_rows

log = logging.getLogger(__name__)
DEFAULT = Limits()
_STATUS = {"E-CONFIG": 422, "E-BUSY": 503, "E-REMOTE": 502}

GRACE_SECONDS = 5.0
"""Seconds that the connection waits for a body beyond the application's limit, so that the
application answers first."""
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\ncontent-length: 0\r\n"
    b"connection: close\r\n\r\n"
)


# -- HTTP


class _StrictRequest(Request):
    """A request whose body is limited in size and time, and parsed as strict JSON."""

    async def body(self) -> bytes:
        seconds = self.app.state.limits.body_seconds
        try:
            async with asyncio.timeout(seconds):
                return await super().body()
        except TimeoutError:
            problem = f"the body did not arrive within {seconds:g} s"
            raise HTTPException(408, problem) from None

    async def stream(self) -> AsyncIterator[bytes]:
        most = self.app.state.limits.bytes
        size = 0
        async for chunk in super().stream():
            size += len(chunk)
            if size > most:
                raise HTTPException(413, f"the body has more than {most} bytes")
            yield chunk

    async def json(self) -> Any:
        try:
            return read_json(await self.body(), "the body")
        except MalformedError as error:
            raise HTTPException(400, str(error)) from None


class _StrictRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def strictly(request: Request) -> Response:
            return await handle(_StrictRequest(request.scope, request.receive))

        return strictly


class _Gate:
    """Middleware that refuses requests with too many headers or without the token. If the server
    has no token, it refuses requests that do not name a loopback host."""

    def __init__(self, app: Any, token: str, most_headers: int) -> None:
        self._app = app
        self._most_headers = most_headers
        self._token = f"Bearer {token}".encode() if token else b""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        await (refusal or self._app)(scope, receive, send)

    def _refusal(self, scope: Any) -> Response | None:
        headers = dict(scope["headers"])
        if len(scope["headers"]) > self._most_headers:
            status = 431
            problem = f"the request has more than {self._most_headers} headers"
            may_enter = False
        elif self._token:
            status = 401
            problem = "the bearer token is missing or wrong"
            is_known = hmac.compare_digest(headers.get(b"authorization", b""), self._token)
            may_enter = is_known or scope["path"] == "/health"
        else:
            status = 403
            problem = "the request names another host than loopback"
            host = headers.get(b"host", b"").decode("latin-1").rpartition("@")[2]
            is_bracketed = host.startswith("[")
            name = host.partition("]")[0].strip("[") if is_bracketed else host.partition(":")[0]
            may_enter = is_loopback(name)
        if may_enter:
            return None
        return _refuse(status, SecurityError("reward server", problem, next="see /openapi.json"))


def _refuse(status: int, error: QuiverError) -> Response:
    shown = {key: text for key, text in error.to_dict().items() if key != "state"}
    headers = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "1"}}.get(status)
    return JSONResponse({"error": shown}, status, headers)


async def _explain(_: Request, error: Exception) -> Response:
    """Answer every refusal as an `Error`. Of the request it repeats only the place of the error."""
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        status = 422
        problem = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    elif isinstance(error, StarletteHTTPException):
        status = error.status_code
        problem = str(error.detail)
    elif isinstance(error, QuiverError):
        return _refuse(_STATUS.get(error.code, 500), error)
    else:
        return _refuse(500, unexpected("reward server", error))
    return _refuse(
        status, ConfigError("reward server", printable(problem), next="see /openapi.json")
    )


_HANDLERS = dict.fromkeys(
    (RequestValidationError, StarletteHTTPException, QuiverError, Exception), _explain
)


class Error(BaseModel):
    """Reason why a request was refused."""

    error: dict[str, str]


_REFUSALS = {
    status: {"model": Error} for status in (400, 401, 403, 408, 413, 422, 431, 500, 502, 503)
}


def make_app(
    config: Config,
    scorers: list[Scorer],
    *,
    token: str = "",
    label: str = "answer",
    keeps_end_tokens: bool = False,
    limits: Limits = DEFAULT,
) -> FastAPI:
    """Return the application.

    Args:
        label: Column that labels of openrlhf become.
        keeps_end_tokens: If true, end tokens that openrlhf sends are scored.
    """
    batcher = Batcher(lambda rows: score_rows(config, scorers, rows), limits)
    numbers = itertools.count()

    app = FastAPI(
        title="Quiver reward server",
        version="1",
        lifespan=batcher.lifespan,
        docs_url=None,
        redoc_url=None,
        exception_handlers=_HANDLERS,
    )
    app.state.limits = limits
    app.add_middleware(_Gate, token=token, most_headers=limits.headers)
    bearer = [Security(HTTPBearer(auto_error=False))] if token else []
    router = APIRouter(route_class=_StrictRoute, responses=_REFUSALS, dependencies=bearer)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        """Answer that the server is running."""
        return {"status": "ok", "format": quiver.FORMAT}

    @router.post(quiver.PATH, response_model=quiver.Answer)
    async def score(request: quiver.Request) -> Response:
        """Score rows, identified by their ids."""
        rows = request.as_rows()
        return JSONResponse(quiver.answer(rows, await batcher.score(rows)))

    @router.post(openrlhf.PATH, response_model=openrlhf.Answer)
    async def get_reward(request: openrlhf.Request) -> Response:
        """Score queries that begin with their prompts, as OpenRLHF sends them."""
        rows = request.as_rows(label, keeps_end_tokens=keeps_end_tokens)
        # ids of their own, so that no request waits for another's rows
        rows = [row._replace(id=str(next(numbers))) for row in rows]
        scored = await batcher.score(rows) if rows else []
        return JSONResponse(openrlhf.answer(request, rows, scored))

    app.include_router(router)
    return app


class Connection(H11Protocol):
    """One connection, with a time limit for each request. The application's `state.limits` gives
    the number of connections and the seconds for headers and bodies.

    uvicorn does not limit the time of headers that never end, or of a body whose request was
    already refused. A client that sends those would keep a connection for ever. The bytes of
    incomplete headers are limited by h11.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._limits = self.config.app.state.limits
        self._awaited: Any = None
        """The next part of a request: h11.IDLE for headers, h11.SEND_BODY for a body."""
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        if len(self.connections) > self._limits.connections:
            transport.write(_FULL)
            transport.close()
        else:
            self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(error)

    def _watch(self) -> None:
        """Start the timer of the part of a request that comes next."""
        if self.conn.their_state is self._awaited:
            return  # its timer runs already; further bytes do not extend it
        self._awaited = self.conn.their_state
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        seconds = {
            h11.IDLE: self._limits.header_seconds,
            h11.SEND_BODY: self._limits.body_seconds + GRACE_SECONDS,
        }
        if self._awaited in seconds:
            self._timer = self.loop.call_later(seconds[self._awaited], self.transport.abort)


def make_server(app: FastAPI) -> uvicorn.Server:
    """Return the uvicorn server of the application."""
    settings = uvicorn.Config(
        app,
        http=Connection,
        h11_max_incomplete_event_size=app.state.limits.header_bytes,
        ws="none",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=5,
    )
    return uvicorn.Server(settings)


# -- command line


def load(path: Path) -> Config:
    """Return the [reward] section of a TOML file, which may hold other sections too. Raises
    ConfigError."""
    section = read_recipe(path).get("reward")
    if not isinstance(section, dict):
        raise ConfigError(
            f"recipe {path}", "has no section [reward]", next="name a recipe that has one"
        )
    return parse(Config, section, "reward")


def listen(host: str, port: int, token: str) -> socket.socket:
    """Return a socket that listens at `host`.

    Raises:
        SecurityError: The host is not loopback and there is no token.
        ConfigError: The address cannot be used.
    """
    if not token and not is_loopback(host):
        raise SecurityError(
            f"reward server on {printable(host)}",
            "other hosts could reach it without a token",
            next="give --token env:NAME",
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=512)
    except OSError as error:
        raise ConfigError(
            f"reward server on {printable(host)}:{port}",
            printable(error),
            next="choose another port",
        ) from None


def main(arguments: list[str] | None = None) -> int:
    """Serve until a signal, then shut down in order. Returns the exit code: the error's, 143 after
    SIGTERM or 130 after SIGINT."""
    parser = argparse.ArgumentParser(
        prog="python -m quiver.deployments.reward_server", description=__doc__.splitlines()[0]
    )
    parser.add_argument("recipe", type=Path, help="TOML file with a [reward] section")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument(
        "--port", type=int, default=8700, help="port to listen on; 0: any free port"
    )
    parser.add_argument(
        "--token", default="", help="env:NAME of the bearer token that requests must carry"
    )
    parser.add_argument("--label", default="answer", help="column that receives openrlhf's labels")
    parser.add_argument(
        "--keep-end-tokens",
        action="store_true",
        help="keep the special tokens at the end of what openrlhf sends",
    )
    parser.add_argument(
        "--rows", type=int, default=DEFAULT.rows, help="maximum number of rows scored together"
    )
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        config, _ = with_fingerprints(load(options.recipe))
        for function in config.functions:
            if function.scope == "group":
                raise no_groups(function.name)
        token = secret(options.token, "reward server")
        with listen(options.host, options.port, token) as listener, open_scorers(config) as scorers:
            app = make_app(
                config,
                scorers,
                token=token,
                label=options.label,
                keeps_end_tokens=options.keep_end_tokens,
                limits=DEFAULT._replace(rows=max(1, options.rows)),
            )
            log.info("rewards are served on http://%s:%d", options.host, listener.getsockname()[1])
            # uvicorn catches the signal, shuts down in order, then raises it again for this handler
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
            make_server(app).run(sockets=[listener])
    except QuiverError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
