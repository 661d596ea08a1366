"""Engine `vllm-server`: samples on running vLLM servers, over HTTP.

Ids go in; ids and their processed logprobs come out.

    [generate]
    engine = "vllm-server"
    options = { urls = ["http://first:8000", "http://second:8000"] }

A server takes part once it has proved the policy's weights (`server_identity`), and every answer
names them again. If one does not, the answer is discarded and the server must prove its weights
again. Each server has one worker per concurrent request; all draw from one queue, so a fast server
answers more rows. A row has its own seed, so the result does not depend on the server or on the
number of attempts. A failed row goes back to the queue a limited number of times, after a pause
that doubles, and to another server if there is one. A failed server rests until it proves its
weights again, for a limited time. An error that no later attempt can fix (a status of 400, say) is
final at once.

The requests run in their own thread, so that answers arrive while a shard is written.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import resource
import threading
import uuid
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from quiver.schemas.errors import (
    ConfigError,
    LineageError,
    NumericError,
    QuiverError,
    ResourceError,
    printable,
)
from quiver.stages.common.config import parse
from quiver.stages.common.models import checkpoints
from quiver.stages.common.servers import secret
from quiver.stages.generate.engine import Completion, Request, Setup
from quiver.stages.generate.options import VllmServerOptions

from .server_identity import GENERATE, TOKEN_ADVICE, Expected, Served, identify, start_of
from .server_wire import FailedError, RefusedError, Wire
from .vllm_sampling import sampling_parameters

_NO_LOGPROB = -9999.0  # vLLM reports it for NaN, -inf, and a missing logprob
# Seconds between two checks of a server that is away, or two attempts of a row.
_LONGEST_PAUSE = 5.0
_FIRST_PAUSE = 0.2  # seconds between two attempts of a row
_OTHER_FILES = 512  # files that a stage may have open besides its connections
_STATE = "finished shards are kept; nothing else was written."
log = logging.getLogger(__name__)


@dataclass
class _Row:
    """A request in progress, and the servers that failed on it."""

    request: Request
    failed_by: list[_Server] = field(default_factory=list)


class _Server:
    """One URL: if it takes rows, and if not, why."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.served: Served | None = None
        """The proof that it gave last."""
        self.is_up = asyncio.Event()
        self.has_failed = asyncio.Event()
        self.was_asked = asyncio.Event()
        """Set once the server has been asked for its proof."""
        self.is_dropped = False
        self.problem: Exception | None = None
        """The last problem."""

    @property
    def words(self) -> str:
        """The last problem, on one line."""
        return printable(getattr(self.problem, "message", self.problem), 600)

    def fail(self, problem: Exception) -> None:
        """Send no more rows until it has proved its weights again."""
        self.problem = problem
        self.is_up.clear()
        self.has_failed.set()


class VllmServerEngine:
    """Servers of one policy as an `Engine`."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.options = parse(VllmServerOptions, setup.options, "generate.options")
        refuse_what_no_server_takes(setup)
        self._expected = Expected.of(setup)
        self._token = secret(self.options.token, "engine vllm-server")
        # Also counts servers that come up later.
        self.ahead = self.options.concurrency * len(self.options.urls)
        _allow_connections(self.ahead)
        self._outcomes: queue.SimpleQueue[Completion | Exception] = queue.SimpleQueue()
        self._rows: asyncio.Queue[_Row] = asyncio.Queue()
        self._closing = asyncio.Event()
        self._servers: list[_Server] = []
        self._started: Future[None] = Future()
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
        servers = [server.served for server in self._servers if server.served]
        self.info = {
            "name": "vllm-server",
            "version": ", ".join(sorted({served.version for served in servers})),
            # No server reports it.
            "dtype": "unknown",
            "device": "server",
            "logprobs_mode": "processed_logprobs",
            "weights_proved_by": ", ".join(sorted({served.proof for served in servers})),
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

    # -- runs in the thread

    async def _run(self) -> None:
        """Tend the servers and send rows to them, until `close`."""
        self._servers = [_Server(url) for url in self.options.urls]
        coroutines = [*map(self._tend, self._servers)]
        # Interleave the servers, so that a few rows are spread over all of them.
        for _ in range(self.options.concurrency):
            coroutines += map(self._work, self._servers)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(coroutine) for coroutine in coroutines]
                tasks.append(group.create_task(self._start()))
                await self._closing.wait()  # perhaps before any server is up
                for task in tasks:
                    task.cancel()
        except BaseExceptionGroup as defects:  # no other code waits for these tasks
            self._outcomes.put(defects.exceptions[0])
            if not self._started.done():
                self._started.set_exception(defects.exceptions[0])

    async def _start(self) -> None:
        """Report the start once one server takes rows and every other one was checked."""
        for server in self._servers:
            await server.was_asked.wait()
        seconds = self.options.wait_seconds
        if seconds and not any(server.is_up.is_set() for server in self._servers):
            advice = self._none_left()
            message = "waiting %g s for a server of %s: %s; next: %s"
            log.warning(message, seconds, self._expected.ref, advice.message, advice.next)
        while not any(server.is_up.is_set() for server in self._servers):
            if all(server.is_dropped for server in self._servers):
                self._started.set_exception(self._none_left())
                return
            await asyncio.sleep(0.05)
        self._started.set_result(None)

    async def _tend(self, server: _Server) -> None:
        """Ask a server for its proof, at first and after each failure, until it takes too long."""
        seconds = self.options.wait_seconds
        wire = Wire(server.url, self._token, self.options)
        try:
            while await self._prove(server, wire, seconds):
                seconds = self.options.down_seconds
                await server.has_failed.wait()
                log.warning("vllm-server %s: %s", server.url, server.words)
        finally:
            await wire.close()
        server.is_dropped = True
        if all(each.is_dropped for each in self._servers):
            self._outcomes.put(self._none_left())
        else:
            log.warning("vllm-server %s is left out: %s", server.url, server.words)

    async def _prove(self, server: _Server, wire: Wire, seconds: float) -> bool:
        """Return True if the server proves its weights within `seconds`.

        A server that served them before and now serves others is not asked again.
        """
        deadline = self._loop.time() + seconds
        pause = 0.25
        while True:
            try:
                server.served = await identify(wire, server.url, self._expected)
            except (FailedError, RefusedError) as error:
                server.problem = error
            except QuiverError as error:
                server.problem = error
                if server.served is not None:
                    return False
            else:
                server.has_failed.clear()
                server.is_up.set()
                return True
            finally:
                server.was_asked.set()
            if self._loop.time() + pause > deadline:
                return False
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _none_left(self) -> QuiverError:
        """Return the error for having no server left.

        A wrong start option is reported before wrong weights, and wrong weights before no answer.
        """
        problems = [s.problem for s in self._servers if isinstance(s.problem, QuiverError)]
        problems.sort(key=lambda problem: isinstance(problem, LineageError))
        words = "; ".join(f"{server.url}: {server.words}" for server in self._servers)
        if not problems:
            return ResourceError(
                "engine vllm-server",
                f"no server answers; {words}",
                state=_STATE,
                next=self._expected.command(self._servers[0].url),
            )
        kind = LineageError if isinstance(problems[0], LineageError) else ConfigError
        return kind("engine vllm-server", words, state=_STATE, next=problems[0].next)

    async def _work(self, server: _Server) -> None:
        """Send one row after another to a server, over one connection."""
        wire = Wire(server.url, self._token, self.options)
        try:
            while True:
                await server.is_up.wait()
                row = await self._rows.get()
                if not server.is_up.is_set():
                    self._rows.put_nowait(row)
                    continue
                others = [each for each in self._servers if each not in row.failed_by]
                if server in row.failed_by and any(each.is_up.is_set() for each in others):
                    self._rows.put_nowait(row)
                    await asyncio.sleep(0.05)  # another server may take it
                    continue
                try:
                    self._outcomes.put(await self._ask(server, wire, row.request))
                except QuiverError as error:
                    self._outcomes.put(error)
                except (FailedError, RefusedError) as error:
                    if server.is_up.is_set():
                        server.fail(error)
                    pause = min(_FIRST_PAUSE * 2 ** len(row.failed_by), _LONGEST_PAUSE)
                    row.failed_by.append(server)
                    if len(row.failed_by) <= self.options.retries:
                        self._loop.call_later(pause, self._rows.put_nowait, row)
                        continue
                    problem = (
                        f"row {row.request.index} failed {len(row.failed_by)} times, at last at "
                        f"{server.url}: {printable(error)}"
                    )
                    advice = "look at the server's log, and run the same command again"
                    self._outcomes.put(
                        ResourceError("engine vllm-server", problem, state=_STATE, next=advice)
                    )
        finally:
            await wire.close()

    async def _ask(self, server: _Server, wire: Wire, request: Request) -> Completion:
        """Return the row's completion. FailedError or RefusedError mean that another attempt may
        succeed."""
        served = server.served
        name = f"quiver-{uuid.uuid4().hex}"
        body = {
            "model": served.name,
            "request_id": name,
            "token_ids": request.prompt_ids.tolist(),
            # A server may be configured to watermark what it samples.
            "sampling_params": {**sampling_parameters(self.setup, request), "watermarking": False},
        }
        try:
            answer = await wire.ask("POST", GENERATE, body, seconds=self.options.row_seconds)
        except RefusedError as error:
            if error.status == 404:  # it no longer has a model of that name
                raise
            advice = "correct generate.sampling, or start the server otherwise"
            raise ConfigError(
                f"vllm-server {server.url}",
                f"row {request.index}: {error}",
                state=_STATE,
                next=TOKEN_ADVICE if error.status in (401, 403) else advice,
            ) from None
        try:
            completion = _completion(answer, name, served, request)
            if served.started is not None and wire.has_reconnected:
                if await start_of(wire) != served.started:
                    raise FailedError("it was started anew since it proved its weights")
                wire.has_reconnected = False
            return completion
        except (FailedError, QuiverError):
            await wire.close()
            raise


def _allow_connections(count: int) -> None:
    """Raise this process's limit of open files if needed. Raises ConfigError if it may not."""
    wanted = count + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise ConfigError(
            "generate.options.concurrency",
            f"{count} connections at once and {_OTHER_FILES} other files are more than the {hard} "
            "that this process may have open",
            next="set a smaller generate.options.concurrency, or raise the limit (ulimit -Hn)",
        )
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def refuse_what_no_server_takes(setup: Setup) -> None:
    """Raise ConfigError for models and prompts that need an engine on this machine."""
    engine = "transformers"
    if checkpoints.is_encoder_decoder(setup.policy):
        problem = f"{setup.policy.ref} is an encoder-decoder model"
    elif setup.most_pictures:
        problem = "prompts with pictures are not sent to servers"
    elif setup.base is not None:
        problem = f"{setup.policy.ref} has an adapter and no weights that a server could load"
        engine = "vllm"
    else:
        return
    raise ConfigError("engine vllm-server", problem, next=f'set generate.engine = "{engine}"')


def _completion(answer: dict[str, Any], name: str, served: Served, request: Request) -> Completion:
    """Return the answer as a completion.

    Raises FailedError unless it is complete and belongs to this row and these weights, and
    NumericError if a logprob is not finite.
    """
    if not str(answer.get("request_id")).endswith(name):
        raise FailedError("it answered another request than the one that was asked")
    if answer.get("model") not in list(served.names):
        raise FailedError(f"it answered as model {printable(answer.get('model'))}")
    try:
        [choice] = answer["choices"]
        token_ids = choice["token_ids"]
        entries = choice["logprobs"]["content"] or []
        logprob_ids = [entry["token_id"] for entry in entries]
        logprobs = [entry["logprob"] for entry in entries]
        labels = {span["version"] for span in choice["weight_versions"]}
        finish_reason = choice["finish_reason"]
        num_prompt_ids = answer["usage"]["prompt_tokens"]
        ids = np.array(token_ids, np.int32)
        completion_logprobs = np.array(logprobs, np.float32)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        words = printable(f"{type(error).__name__} {error}")
        raise FailedError(f"its answer is not that of {GENERATE}: {words}") from None
    if labels != {served.label}:
        raise FailedError(f"it answered with weights called {printable(sorted(map(str, labels)))}")
    if logprob_ids != token_ids or any(type(token_id) is not int for token_id in token_ids):
        raise FailedError("its logprobs are of other ids than its completion")
    if num_prompt_ids != len(request.prompt_ids):
        raise FailedError(
            f"it read {printable(num_prompt_ids)} ids, the prompt has {len(request.prompt_ids)}"
        )
    if not token_ids:
        raise FailedError("it answered no ids")
    if finish_reason not in ("stop", "length"):
        raise FailedError(f"it ended the row for the reason {printable(finish_reason)}")
    if _NO_LOGPROB in logprobs or not np.isfinite(completion_logprobs).all():
        raise NumericError(
            "engine vllm-server",
            f"row {request.index}: the logprob of an id is no number",
            state=_STATE,
            next="look at the server's log, and at the policy's weights",
        )
    stop_reason = None
    if finish_reason == "stop":
        stop_reason = choice.get("stop_reason")
        stop_reason = str(token_ids[-1] if stop_reason is None else stop_reason)
    return Completion(request.index, ids, completion_logprobs, finish_reason, stop_reason)
