"""Check which weights a vLLM server serves, and that its logprobs match its sampling.

A server proves its weights in one of three ways, and every answer is checked against the proof:

* name: a name that it was started with (`--served-model-name`) contains the hash of the policy's
  weights;
* path: it was started with the policy's own folder and no other name, after the version was made.
  The path counts as it is now, if no link or folder on it was moved or changed since. A restarted
  server may read other weights under the same name, so the start time is asked again on each new
  connection;
* label: the process that loaded weights into it later labelled them with that hash
  (`/update_weight_version`).

If its folder can be read from here and holds another version, a name does not count. A server whose
weights have a label of another kind is refused whatever its name.

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
"""A server's label for the weights that it was started with."""
TOKEN_ADVICE = "set generate.options.token to the server's --api-key, as env:NAME"
_SECONDS = 60.0  # for requests other than rows
_SLACK = 2.0
"""Tolerance in seconds for a start time that seems too early.

Linux reports the boot time, from which start times are counted, in whole seconds. No server reads
its model within that time.
"""


@dataclass(frozen=True)
class Served:
    """A server that answers with the expected weights."""

    name: str
    """Model name to use in requests."""
    names: frozenset[str]
    """All model names that its answers may have."""
    label: str
    """Label of its weights, repeated in every answer."""
    proof: str
    """"name", "path" or "label"."""
    version: str
    """Its vLLM version."""
    started: float | None
    """Start time in seconds since 1970, if the proof is the path."""


@dataclass(frozen=True)
class Expected:
    """The weights and settings that a server must prove."""

    ref: str
    weights: str
    """Hash of the policy's weights and config."""
    files: dict[str, str]
    """Hashes of the files that hold the weights."""
    folder: Path
    published: float
    """Time of publication of the version, in seconds since 1970."""
    least_length: int
    """Minimum context that a server must have: the most ids of prompt and completion of any row."""
    max_model_len: int
    dtype: str
    probe_id: int
    """An id of the vocabulary, for the probe."""

    @classmethod
    def of(cls, setup: Setup) -> Expected:
        """Return the requirements for the servers of an engine with this setup."""
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
        """Return a command that starts a suitable server, on a GPU or CPU build of vLLM."""
        port = urlsplit(url).port if url else None
        arguments = ["--model", str(self.folder), "--served-model-name", self.weights]
        arguments += ["--logprobs-mode", "processed_logprobs", "--enable-scale-out"]
        arguments += ["--max-model-len", str(self.max_model_len)]
        arguments += ["--dtype", self.dtype] if self.dtype != "auto" else []
        arguments += ["--port", str(port)] if port else []
        return shlex.join(["python", "-m", "vllm.entrypoints.openai.api_server", *arguments])

    def is_contradicted_by(self, root: Any) -> bool:
        """Return True if the server's folder `root` is a version, readable from here, with other
        weights."""
        try:
            manifest = json.loads(Path(root, "manifest.json").read_bytes())
            hashes = {entry["name"]: entry["sha256"] for entry in manifest["files"]}
        except (OSError, ValueError, TypeError, KeyError):
            return False
        return any(hashes.get(name) != sha256 for name, sha256 in self.files.items())


async def identify(wire: Wire, url: str, expected: Expected) -> Served:
    """Return the server behind `url`, once it has proved its weights and its logprobs.

    Raises:
        LineageError: It serves other weights.
        ConfigError: It was started with wrong options.
        FailedError: It failed, and may succeed later.
    """
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
        # A card with a parent is an adapter.
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
        # Before its path is checked, because the path may change in between.
        started = await start_of(wire)
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
    """Return the labels of the weights, from an answer with only one allowed id.

    That id must have the logprob 0 exactly if logprobs are taken after everything that shapes the
    distribution. Otherwise some other id may have taken its place.
    """
    sampling = {"temperature": 1.0, "max_tokens": 2, "logprobs": 0, "ignore_eos": True}
    body = {
        "model": name,
        "token_ids": [expected.probe_id],
        "sampling_params": {**sampling, "allowed_token_ids": [expected.probe_id]},
    }
    try:
        answer = await wire.ask("POST", GENERATE, body, seconds=_SECONDS)
    except RefusedError as error:
        # 404: a vLLM without this endpoint has none that takes and returns ids.
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
    """Return the start time of the server's process in seconds since 1970; None if it reports
    none."""
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
    """Return why the server's start path does not prove its weights; "" if it does."""
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
                # Adding or removing an entry sets both times of a folder; moving the folder sets
                # only one.
                is_listed = (
                    stat.S_ISDIR(status.st_mode) and status.st_ctime_ns == status.st_mtime_ns
                )
                if started < status.st_ctime - _SLACK and not is_listed:
                    problem = f", and {printable(place)} was moved or changed after its start"
                    break
    except (OSError, ValueError) as error:  # a link that disappears, or an invalid path
        problem = f", which cannot be read: {printable(error)}"
    return problem and printable(root) + problem


def _way(path: Path) -> Iterator[Path]:
    """Yield all links and folders on the way to a file, and the file."""
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
