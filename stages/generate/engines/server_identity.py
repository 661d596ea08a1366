"""Which weights a vLLM server answers with, and whether its logprobs are those of what it samples.

A server proves its weights in one of three ways, and every answer is held to it:

* name: a name that it was started with (`--served-model-name`) has the hash of the policy's weights
  in it;
* path: it was started with the policy's own folder and no other name, after the version was made.
  The way there counts as it is now, if no link or folder on it was moved or changed since. A server
  that is started anew may read other weights under the same name, so each new connection is asked
  when it was started;
* label: whoever loaded weights into it since said so (`/update_weight_version`), with that hash.

Where its folder can be read here, and says that it is another version, no name counts. A server
whose weights have a label of another kind is refused whatever its name.

    policy = Expected.of(setup)
    served = await identify(wire, url, policy)    # or LineageError, ConfigError
"""

from __future__ import annotations

import json
import math
import os
import shlex
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from quiver.schemas.errors import ConfigError, LineageError, printable
from quiver.stages.common.models import checkpoints
from quiver.stages.generate.engine import Setup

from .server_wire import FailedError, RefusedError, Wire

GENERATE = "/inference/v1/generate"
LABEL = "default"
"""What a server calls the weights that it was started with."""
TOKEN_ADVICE = "set generate.options.token to the server's --api-key, as env:NAME"
_SECONDS = 60.0  # for a question that is no row
_SLACK = 2.0
"""Seconds by which a process may seem to have started too early: Linux tells the host's start, from
which it counts, in whole ones. No server reads its model so soon."""


@dataclass(frozen=True)
class Served:
    """A server that answers with the expected weights."""

    name: str
    """The model that requests ask it for."""
    names: frozenset[str]
    """All that its answers may name."""
    label: str
    """Of its weights, in every answer."""
    proof: str
    """name, path or label."""
    version: str
    """Of vLLM."""
    started: float | None
    """When, in seconds since 1970, where the path is the proof."""


@dataclass(frozen=True)
class Expected:
    """What a server has to prove."""

    ref: str
    weights: str
    """The hash of the policy's weights and config."""
    files: dict[str, str]
    """Hashes of the files with its weights."""
    folder: Path
    published: float
    """When the version was there, in seconds since 1970."""
    least_length: int
    """Most ids of prompt and completion together that a row needs."""
    max_model_len: int
    dtype: str
    probe_id: int
    """Some id of the vocabulary."""

    @classmethod
    def of(cls, setup: Setup) -> Expected:
        """What an engine of this setup asks of its servers."""
        policy = setup.policy
        return cls(
            ref=str(policy.ref),
            weights=checkpoints.as_model("policy", policy).weights,
            files={
                entry.name: entry.sha256
                for entry in policy.manifest.files
                if entry.name.endswith(".safetensors") and "/" not in entry.name
            },
            folder=Path(policy.files.folder).absolute(),
            published=datetime.fromisoformat(policy.manifest.created).timestamp(),
            least_length=setup.longest or setup.max_model_len,
            max_model_len=setup.max_model_len,
            dtype=setup.dtype,
            probe_id=checkpoints.vocabulary_size(policy) // 2,
        )

    def command(self, url: str = "") -> str:
        """What starts a server that proves it, on either build of vLLM."""
        port = urlsplit(url).port if url else None
        arguments = ["--model", str(self.folder), "--served-model-name", self.weights]
        arguments += ["--logprobs-mode", "processed_logprobs", "--enable-scale-out"]
        arguments += ["--max-model-len", str(self.max_model_len)]
        arguments += ["--dtype", self.dtype] if self.dtype != "auto" else []
        arguments += ["--port", str(port)] if port else []
        return shlex.join(["python", "-m", "vllm.entrypoints.openai.api_server", *arguments])

    def is_contradicted_by(self, root: Any) -> bool:
        """Whether a server's folder is a version's that can be read here, with other weights."""
        try:
            manifest = json.loads(Path(root, "manifest.json").read_bytes())
            hashes = {entry["name"]: entry["sha256"] for entry in manifest["files"]}
        except (OSError, ValueError, TypeError, KeyError):
            return False
        return any(hashes.get(name) != sha256 for name, sha256 in self.files.items())


async def identify(wire: Wire, url: str, expected: Expected) -> Served:
    """The server behind `url`, once it has proved its weights and its logprobs. LineageError where
    it serves others; ConfigError where it was started otherwise; FailedError where it may do so
    later."""
    who = f"vllm-server {url}"
    try:
        cards = (await wire.ask("GET", "/v1/models", seconds=_SECONDS)).get("data")
    except RefusedError as error:
        advice = "correct options.urls"
        if error.status in (401, 403):
            advice = TOKEN_ADVICE
        raise ConfigError(who, f"GET /v1/models {error}", next=advice) from None
    cards = [
        card
        for card in (cards if isinstance(cards, list) else [])
        # one with a parent is an adapter
        if isinstance(card, dict) and isinstance(card.get("id"), str) and not card.get("parent")
    ]
    if not cards:
        raise FailedError("/v1/models names no model")
    by_name = next((card for card in cards if expected.weights in card["id"]), None)
    served = by_name or cards[0]
    labels = await _probe(wire, who, url, served["id"], expected)
    started = None
    if labels == [expected.weights]:
        proof = "label"
    elif labels != [LABEL]:
        words = printable(", ".join(map(str, labels)))
        raise _wrong(who, url, expected, f"weights that were loaded later, as {words}")
    elif by_name is not None:
        if expected.is_contradicted_by(served.get("root")):
            raise _wrong(who, url, expected, f"{printable(served['root'])}, whatever its name says")
        proof = "name"
    else:
        started = await start_of(wire)  # before the look at its path, which may change now
        problem = _not_by_path(served, started, expected)
        if problem:
            raise _wrong(who, url, expected, problem)
        proof = "path"
    longest = served.get("max_model_len")
    if not isinstance(longest, int) or longest < expected.least_length:
        raise ConfigError(
            who,
            f"its max_model_len is {printable(longest)}, and rows have up to "
            f"{expected.least_length} ids",
            next=expected.command(url),
        )
    version = (await wire.ask("GET", "/version", seconds=_SECONDS)).get("version")
    names = frozenset(card["id"] for card in cards)
    return Served(served["id"], names, labels[0], proof, printable(version, 40), started)


async def _probe(wire: Wire, who: str, url: str, name: str, expected: Expected) -> list[Any]:
    """The labels of the weights, by an answer whose one possible id has the logprob 0 exactly:
    after all that shapes the distribution. Before, any other id may have taken its place."""
    sampling = {"temperature": 1.0, "max_tokens": 2, "logprobs": 0, "ignore_eos": True}
    body = {
        "model": name,
        "token_ids": [expected.probe_id],
        "sampling_params": {**sampling, "allowed_token_ids": [expected.probe_id]},
    }
    try:
        answer = await wire.ask("POST", GENERATE, body, seconds=_SECONDS)
    except RefusedError as error:
        # 404: before it had this endpoint, vLLM had none that takes ids and tells ids
        raise ConfigError(who, f"POST {GENERATE} {error}", next=expected.command(url)) from None
    try:
        choice = answer["choices"][0]
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        labels = [span["version"] for span in choice["weight_versions"]]
        labels = [label for place, label in enumerate(labels) if label not in labels[:place]]
        labels[0]
    except (KeyError, IndexError, TypeError):
        raise ConfigError(
            who,
            f"POST {GENERATE} answers without logprobs or weight_versions: vLLM before 0.32",
            next="update vLLM where the server runs",
        ) from None
    if logprobs != [0.0, 0.0] or choice.get("token_ids") != 2 * [expected.probe_id]:
        raise ConfigError(
            who,
            "its logprobs are not those of the distribution that it samples from: the only id that "
            f"was allowed has {printable(logprobs)}, expected 0.0",
            next=expected.command(url),
        )
    return labels


async def start_of(wire: Wire) -> float | None:
    """When the server's process was started, in seconds since 1970; None where it does not say."""
    try:
        metrics = await wire.read("GET", "/metrics", seconds=_SECONDS)
        for line in metrics.decode(errors="replace").splitlines():
            if line.startswith("process_start_time_seconds "):
                started = float(line.split()[1])
                return started if math.isfinite(started) else None
    except (RefusedError, ValueError):
        pass
    return None


def _not_by_path(served: dict[str, Any], started: float | None, expected: Expected) -> str:
    """Why the path that a server was started with does not prove its weights; empty where it
    does."""
    root = served.get("root")
    if not isinstance(root, str) or not os.path.isabs(root):
        return f"{printable(served['id'])}, from {printable(root)}"
    if served["id"] != root:
        return f"{printable(served['id'])}, a name that says nothing of weights"
    problem = ""
    try:
        if os.path.realpath(root) != os.path.realpath(expected.folder):
            return printable(root)
        if started is None:
            problem = ", and does not say when it was started"
        elif started < expected.published - _SLACK:
            problem = f", and was started before that was {expected.ref}"
        else:
            for place in _way(Path(root, "manifest.json")):
                status = place.lstat()
                # what comes into a folder or leaves it sets both; a folder that moves, one alone
                is_listed = (
                    stat.S_ISDIR(status.st_mode) and status.st_ctime_ns == status.st_mtime_ns
                )
                if started < status.st_ctime - _SLACK and not is_listed:
                    problem = f", and {printable(place)} was moved or changed after its start"
                    break
    except (OSError, ValueError) as error:  # a link that goes away, a path that is none
        problem = f", which cannot be read: {printable(error)}"
    return problem and printable(root) + problem


def _way(path: Path) -> Iterator[Path]:
    """All links and folders on the way to a file, and the file."""
    here = Path("/")
    for part in path.parts[1:]:
        yield here / part
        if (here / part).is_symlink():
            yield from _way(here / os.readlink(here / part))
        here = Path(os.path.realpath(here / part))


def _wrong(who: str, url: str, expected: Expected, serves: str) -> LineageError:
    return LineageError(
        who,
        f"it serves {serves}; expected the weights of {expected.ref}, {expected.weights[:12]}…",
        next=expected.command(url),
    )
