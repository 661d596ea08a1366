"""Engine `vllm-server`: samples on running vLLM servers, over HTTP.

Ids go in; ids and their processed logprobs come out.

    [generate]
    engine = "vllm-server"
    options = { urls = ["http://first:8000", "http://second:8000"] }

A server takes part if its model's name contains the hash of the policy's weights. The command that
an error shows starts such a server. Every answer repeats the name, and the label that vLLM gives to
weights loaded later. If either is wrong, the answer is discarded and the server is checked again.

A name only says which weights were meant: the audit before the first update compares the logprobs.
One test row shows that the server's logprobs belong to the distribution that it samples from.

Each server has one worker per concurrent request; all draw from one queue, so a fast server answers
more rows. A row has its own seed, so the result does not depend on the server or on the number of
attempts. A failed row goes back to the queue a limited number of times, after a pause that doubles,
and to another server if there is one. A failed server rests until it passes its check again, for a
limited time. An error that no later attempt can fix (a status of 400, say) is final at once.

The requests run in their own thread, so that answers arrive while a shard is written.
"""

from __future__ import annotations

import asyncio
import json
import logging
import queue
import resource
import shlex
import threading
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

import numpy as np
from pydantic import BaseModel, Field

from quiver.schemas.errors import (
    ConfigError,
    LineageError,
    NumericError,
    QuiverError,
    ResourceError,
    printable,
)
from quiver.stages.core.client import Client, FailedError
from quiver.stages.core.config import parse
from quiver.stages.core.servers import read_as, root_of, secret
from quiver.stages.generate.engine import Completion, Request, Setup, require_decoder
from quiver.stages.generate.options import VllmServerOptions
from quiver.stages.model import checkpoints

from .vllm import sampling_parameters

_GENERATE = "/inference/v1/generate"
_LABEL = "default"
"""vLLM's label for the weights that a server was started with."""
_NO_LOGPROB = -9999.0  # vLLM reports it for NaN, -inf, and a missing logprob
_CHECK_SECONDS = 60.0  # for each request of a server's check
# Bytes of an answer besides its tokens. Parsed JSON may take twenty times as much memory.
_MOST_BYTES = 4 * 2**20
_TOKEN_BYTES = 1024  # for each requested token; most need 100
# Seconds between two checks of a server that is away, or two attempts of a row.
_LONGEST_PAUSE = 5.0
_FIRST_PAUSE = 0.2  # seconds between two attempts of a row
_STATE = "finished shards are kept; nothing else was written."
_Model = TypeVar("_Model", bound=BaseModel)
log = logging.getLogger(__name__)


class _Card(BaseModel):
    id: str
    parent: str | None = None
    """The model, if this is an adapter."""
    max_model_len: int | None = None


class _Models(BaseModel):
    """Answer of /v1/models."""

    data: list[_Card]


class _Version(BaseModel):
    """Answer of /version."""

    version: str


class _Entry(BaseModel):
    token_id: int
    logprob: float | None


class _Logprobs(BaseModel):
    content: list[_Entry]


class _Span(BaseModel):
    version: str


class _Choice(BaseModel):
    token_ids: list[int] = Field(min_length=1)
    logprobs: _Logprobs
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None = None
    weight_versions: list[_Span]


class _Usage(BaseModel):
    prompt_tokens: int


class _Answer(BaseModel):
    """Answer of vLLM's endpoint that takes and returns ids."""

    request_id: str
    model: str
    choices: list[_Choice] = Field(min_length=1, max_length=1)
    usage: _Usage


@dataclass
class _Row:
    """A request in progress, and the servers that failed on it."""

    request: Request
    failed_by: list[_Server] = field(default_factory=list)


class _Server:
    """One URL: if it takes rows, and if not, why."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.name = ""
        """Model name to use in requests."""
        self.version = ""
        """Its vLLM version; empty until it passed its check once."""
        self.is_up = False
        self.is_dropped = False
        self.problem: QuiverError | None = None
        """The last problem."""
        self.checking = asyncio.Lock()


class VllmServerEngine:
    """Servers of one policy as an `Engine`."""

    def __init__(self, setup: Setup) -> None:
        """Raises ConfigError, LineageError or ResourceError if no server can take part."""
        self.setup = setup
        self.options = parse(VllmServerOptions, setup.options, "generate.options")
        _refuse_what_no_server_takes(setup)
        self._weights = checkpoints.model_entry("policy", setup.policy).weights
        self._token = secret(self.options.token, "engine vllm-server")
        # Also counts servers that come up later.
        self.ahead = self.options.concurrency * len(self.options.urls)
        # Each connection is an open file.
        _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
        self._outcomes: queue.SimpleQueue[Completion | Exception] = queue.SimpleQueue()
        self._rows: asyncio.Queue[_Row] = asyncio.Queue()
        self._closing = asyncio.Event()
        self._servers = [_Server(url) for url in self.options.urls]
        self._started: Future[None] = Future()
        self._is_waiting = False
        """True once the log says that the start waits for a server."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_until_complete,
            args=(self._run(),),
            name="vllm-server",
            daemon=True,
        )
        self._thread.start()
        try:
            self._started.result()
            setup.verified()
        except BaseException:
            self.close()
            raise
        versions = {server.version for server in self._servers} - {""}
        self.info = {
            "name": "vllm-server",
            "version": ", ".join(sorted(versions)),
            # No server reports it.
            "dtype": "unknown",
            "device": "server",
            "logprobs_mode": "processed_logprobs",
        }

    def generate(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Yield completions as they arrive.

        Twice as many rows as the servers take at once are in flight, so that no server waits for
        one.
        """
        requests = iter(requests)
        unanswered: set[int] = set()
        while True:
            for request in islice(requests, 2 * self.ahead - len(unanswered)):
                unanswered.add(request.index)
                self._loop.call_soon_threadsafe(self._rows.put_nowait, _Row(request))
            if not unanswered:
                return
            outcome = self._outcomes.get()
            if isinstance(outcome, Exception):
                raise outcome
            unanswered.discard(outcome.index)
            yield outcome

    def close(self) -> None:
        """Close every connection; servers drop the rows that they were still working on."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join()
        self._loop.close()

    def start_command(self, url: str) -> str:
        """Return a command that starts a suitable server, on a GPU or CPU build of vLLM."""
        setup = self.setup
        arguments = {
            "--model": setup.policy.files.folder.absolute(),
            "--served-model-name": self._weights,
            "--logprobs-mode": "processed_logprobs",
            "--max-model-len": setup.max_model_len,
            "--dtype": setup.dtype,
        }
        if port := urlsplit(url).port:
            arguments["--port"] = port
        words = [str(word) for argument in arguments.items() for word in argument]
        program = ["python", "-m", "vllm.entrypoints.openai.api_server"]
        return shlex.join([*program, *words, "--enable-scale-out"])

    # -- runs in the thread

    async def _run(self) -> None:
        """Send rows to the servers until `close`."""
        try:
            async with asyncio.TaskGroup() as group:
                # Interleave the servers, so that a few rows are spread over all of them.
                tasks = [
                    group.create_task(self._work(server))
                    for _ in range(self.options.concurrency)
                    for server in self._servers
                ]
                await self._closing.wait()  # perhaps before any server is up
                for task in tasks:
                    task.cancel()
        except BaseExceptionGroup as defects:  # no other code waits for these tasks
            self._end(defects.exceptions[0])

    def _end(self, problem: BaseException) -> None:
        """Raise `problem` where this engine is started, or where its rows are awaited."""
        self._outcomes.put(problem)
        if not self._started.done():
            self._started.set_exception(problem)

    async def _work(self, server: _Server) -> None:
        """Send one row after another to a server, over one connection."""
        async with Client(self._token, self.options.connect_seconds) as client:
            while await self._is_ready(server, client):
                row = await self._rows.get()
                if not server.is_up:
                    self._rows.put_nowait(row)
                    continue
                is_elsewhere = any(
                    server.is_up for server in self._servers if server not in row.failed_by
                )
                if server in row.failed_by and is_elsewhere:
                    self._rows.put_nowait(row)
                    await asyncio.sleep(0.05)  # another server may take it
                    continue
                request = row.request
                # A server may be configured to watermark what it samples.
                sampling = {**sampling_parameters(self.setup, request), "watermarking": False}
                seconds = self.options.row_seconds
                try:
                    self._outcomes.put(await self._ask(server, client, request, sampling, seconds))
                except (FailedError, LineageError) as error:
                    # 404: it has no model of that name any more
                    if getattr(error, "is_final", False) and error.status != 404:
                        problem = f"row {request.index}: {error}"
                        advice = "correct generate.sampling, or start the server with other options"
                        self._outcomes.put(self._explained(server, error, problem, advice))
                    else:
                        self._retry(server, row, error)
                except QuiverError as error:
                    self._outcomes.put(error)

    def _retry(self, server: _Server, row: _Row, error: Exception) -> None:
        """Give a failed row to the queue again, or end the stage. The server is checked anew."""
        words = printable(getattr(error, "message", error), 600)
        if server.is_up:
            server.is_up = False
            log.warning("vllm-server %s: %s", server.url, words)
        pause = min(_FIRST_PAUSE * 2 ** len(row.failed_by), _LONGEST_PAUSE)
        row.failed_by.append(server)
        if len(row.failed_by) <= self.options.retries:
            self._loop.call_later(pause, self._rows.put_nowait, row)
            return
        problem = (
            f"row {row.request.index} failed {len(row.failed_by)} times, at last at {server.url}: "
            f"{words}"
        )
        advice = "look at the server's log, and run the same command again"
        self._outcomes.put(ResourceError("engine vllm-server", problem, state=_STATE, next=advice))

    # -- which servers take part

    async def _is_ready(self, server: _Server, client: Client) -> bool:
        """Wait until the server takes rows. False if it is dropped: it did not pass its check in
        time, or was up before and now serves other weights."""
        async with server.checking:
            was_up = server.version != ""
            seconds = self.options.down_seconds if was_up else self.options.wait_seconds
            deadline = self._loop.time() + seconds
            pause = 0.25
            while not server.is_up and not server.is_dropped:
                try:
                    await self._check(server, client)
                    server.is_up = True
                except FailedError as error:
                    advice = self.start_command(server.url)
                    server.problem = self._explained(server, error, str(error), advice)
                except QuiverError as error:
                    server.problem = error
                    server.is_dropped = was_up
                is_last = self._loop.time() + pause > deadline
                server.is_dropped |= not server.is_up and is_last
                self._note_check(server)
                if not server.is_up and not server.is_dropped:
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, _LONGEST_PAUSE)
            return server.is_up

    def _note_check(self, server: _Server) -> None:
        """Report a start, a server that is left out, or that none is left."""
        servers = self._servers
        problems = [server.problem for server in servers if server.problem]
        if all(server.is_dropped for server in servers):
            # A wrong option is reported before wrong weights, and those before no answer.
            ranks = {ConfigError: 0, LineageError: 1}
            first = min(problems, key=lambda problem: ranks.get(type(problem), 2))
            words = "; ".join(f"{server.url}: {server.problem.message}" for server in servers)
            self._end(type(first)("engine vllm-server", words, state=_STATE, next=first.next))
        elif server.is_dropped:
            log.warning("vllm-server %s is left out: %s", server.url, server.problem.message)
        if self._started.done() or not all(server.version or server.problem for server in servers):
            return
        if any(server.is_up for server in servers):
            self._started.set_result(None)
        elif not self._is_waiting:
            self._is_waiting = True
            log.warning(
                "waiting %g s for a server of %s: %s; next: %s",
                self.options.wait_seconds,
                self.setup.policy.ref,
                problems[0].message,
                problems[0].next,
            )

    def _explained(
        self, server: _Server, error: FailedError, problem: str, advice: str
    ) -> QuiverError:
        """Return the error of the stage for a failed request."""
        if error.status in (401, 403):
            advice = "set generate.options.token to the server's --api-key, as env:NAME"
        kind = ConfigError if error.is_final else ResourceError
        return kind(f"vllm-server {server.url}", problem, state=_STATE, next=advice)

    async def _check(self, server: _Server, client: Client) -> None:
        """Check which weights the server names, and that its logprobs match its sampling.

        Raises:
            FailedError: It failed, and may succeed later unless the error is final.
            LineageError: It serves other weights.
            ConfigError: It was started with wrong options.
        """
        models = await self._get(server, client, "/v1/models", _Models)
        cards = [card for card in models.data if not card.parent]
        card = next((card for card in cards if self._weights in card.id), None)
        if card is None:
            names = ", ".join(card.id for card in cards)
            raise self._wrong_weights(server, names or "no model")
        server.name = card.id
        needed = self.setup.longest or self.setup.max_model_len
        who = f"vllm-server {server.url}"
        advice = self.start_command(server.url)
        if (card.max_model_len or 0) < needed:
            problem = f"its max_model_len is {card.max_model_len}, and rows have up to {needed} ids"
            raise ConfigError(who, problem, next=advice)
        probe_id = checkpoints.vocabulary_size(self.setup.policy) // 2
        request = Request(0, np.array([probe_id], np.int32), 0)
        # The only allowed id has the logprob 0 exactly if logprobs are taken after everything that
        # shapes the distribution. Otherwise some other id may have taken its place.
        sampling = {"temperature": 1.0, "max_tokens": 2, "logprobs": 0, "ignore_eos": True}
        completion = await self._ask(
            server, client, request, sampling | {"allowed_token_ids": [probe_id]}, _CHECK_SECONDS
        )
        if completion.completion_ids.tolist() != 2 * [probe_id] or completion.logprobs.any():
            problem = (
                "its logprobs do not belong to the distribution that it samples from: the only "
                f"allowed id has {completion.logprobs.tolist()}, expected 0.0"
            )
            raise ConfigError(who, problem, next=advice)
        about_vllm = await self._get(server, client, "/version", _Version)
        server.version = printable(about_vllm.version, 40) or "unknown"

    async def _get(self, server: _Server, client: Client, path: str, model: type[_Model]) -> _Model:
        return await client.ask(
            root_of(server.url) + path,
            read=lambda raw: read_as(model, raw),
            seconds=_CHECK_SECONDS,
            most_bytes=_MOST_BYTES,
        )

    def _wrong_weights(self, server: _Server, served: str) -> LineageError:
        return LineageError(
            f"vllm-server {server.url}",
            f"it serves {printable(served)}; expected the weights of {self.setup.policy.ref}, "
            f"{self._weights[:12]}…",
            next=self.start_command(server.url),
        )

    # -- one row

    async def _ask(
        self,
        server: _Server,
        client: Client,
        request: Request,
        sampling: dict[str, Any],
        seconds: float,
    ) -> Completion:
        """Return what the server samples. Raises FailedError, LineageError or NumericError."""
        name = f"quiver-{uuid.uuid4().hex}"
        body = {
            "model": server.name,
            "request_id": name,
            "token_ids": request.prompt_ids.tolist(),
            "sampling_params": sampling,
        }
        return await client.ask(
            root_of(server.url) + _GENERATE,
            json.dumps(body).encode(),
            lambda raw: self._read(raw, server, request, name),
            seconds=seconds,
            most_bytes=_MOST_BYTES + _TOKEN_BYTES * sampling["max_tokens"],
        )

    def _read(self, raw: bytes, server: _Server, request: Request, name: str) -> Completion:
        """Return an answer as a completion.

        Raises:
            MalformedError, FailedError: It is not a whole answer to this row.
            LineageError: It is from other weights.
            NumericError: A logprob is not finite.
        """
        answer = read_as(_Answer, raw)
        choice = answer.choices[0]
        labels = {span.version for span in choice.weight_versions}
        if self._weights not in answer.model:
            raise self._wrong_weights(server, answer.model)
        if labels != {_LABEL}:
            shown = ", ".join(sorted(labels))
            raise self._wrong_weights(server, f"weights that were loaded later, as {shown}")
        if not answer.request_id.endswith(name):
            raise FailedError("it answered another request")
        if [entry.token_id for entry in choice.logprobs.content] != choice.token_ids:
            raise FailedError("its logprobs are of other ids than its completion")
        if answer.usage.prompt_tokens != len(request.prompt_ids):
            raise FailedError(
                f"it read {answer.usage.prompt_tokens} ids, the prompt has "
                f"{len(request.prompt_ids)}"
            )
        logprobs = np.array([entry.logprob for entry in choice.logprobs.content], np.float32)
        if not np.isfinite(logprobs).all() or _NO_LOGPROB in logprobs:
            raise NumericError(
                "engine vllm-server",
                f"row {request.index}: the logprob of an id is not a number",
                state=_STATE,
                next="look at the server's log, and at the policy's weights",
            )
        try:
            ids = np.array(choice.token_ids, np.int32)
        except OverflowError:
            raise FailedError("its ids are beyond int32") from None
        stop_reason = None
        if choice.finish_reason == "stop":
            last = choice.token_ids[-1]
            stop_reason = str(last if choice.stop_reason is None else choice.stop_reason)
        return Completion(request.index, ids, logprobs, choice.finish_reason, stop_reason)


def _refuse_what_no_server_takes(setup: Setup) -> None:
    """Raise ConfigError for models and prompts that need an engine on this machine."""
    require_decoder("vllm-server", setup.policy)
    engine = "transformers"
    if setup.most_media:
        problem = "prompts with pictures or clips are not sent to servers"
    elif setup.base is not None:
        problem = f"{setup.policy.ref} has an adapter and no weights that a server could load"
        engine = "vllm"
    else:
        return
    raise ConfigError("engine vllm-server", problem, next=f'set generate.engine = "{engine}"')
