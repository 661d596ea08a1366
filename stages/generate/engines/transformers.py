"""Engine `transformers`: decoder-only and encoder-decoder models (T5, BART), sampled by a loop of
its own.

`model.generate` is not used: here each row draws from its own generator, the logprob is that of the
very distribution that was sampled from (float32), and nothing of the model's generation config
applies, forced tokens included. Padding lives in this file
alone: prompts of like length stand together, left-padded for a decoder, right-padded for an
encoder, and masks come from lengths, never from ids. A stored completion never holds the decoder's
start token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
import transformers

from quiver.schemas.errors import ConfigError, ResourceError, printable
from quiver.stages.common.config import parse
from quiver.stages.common.forward.precision import products
from quiver.stages.common.models.loading import (
    decoder_start_id,
    is_memory_error,
    load_model,
)
from quiver.stages.generate.engine import Completion, Request, Setup
from quiver.stages.generate.options import TransformersOptions
from quiver.stages.generate.sampling import draw, processed_logprobs

_WINDOW = 8  # batches whose requests are sorted by length together


@dataclass
class _Batch:
    """Rows that are decoded together. B rows, T ids so far."""

    requests: list[Request]
    uniforms: torch.Tensor  # [B, max_tokens]
    ids: torch.Tensor  # [B, T]
    logprobs: torch.Tensor  # [B, T]
    fed: torch.Tensor | None = (
        None  # what the model reads next: the prompts, later the last id of each row
    )
    cache: Any = None
    mask: torch.Tensor | None = None  # decoder: [B, P + T]; encoder: [B, P]
    encoded: Any = None

    def keep(self, rows: torch.Tensor) -> None:
        """Drop all rows but these, everywhere."""
        self.requests = [self.requests[row] for row in rows.tolist()]
        self.uniforms, self.ids, self.logprobs = (
            self.uniforms[rows],
            self.ids[rows],
            self.logprobs[rows],
        )
        self.mask = self.mask[rows]
        self.cache.batch_select_indices(rows)
        if self.encoded is not None:
            self.encoded.last_hidden_state = self.encoded.last_hidden_state[rows]


class TransformersEngine:
    """A transformers model behind the protocol."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.options = (
            setup,
            parse(TransformersOptions, setup.options, "generate.options"),
        )
        cuda = torch.cuda.is_available()
        if setup.device == "cuda" and not cuda:
            raise ConfigError(
                "engine transformers",
                "device is cuda, but torch sees no GPU",
                next='set generate.device = "auto"',
            )
        self.device = torch.device(
            "cuda" if setup.device == "cuda" or (setup.device == "auto" and cuda) else "cpu"
        )
        dtype = self._dtype()
        setup.verified()
        attention = self.options.attn_implementation
        self.model = load_model(
            setup.policy, dtype=dtype, device=self.device, attn_implementation=attention
        )
        self.stop_ids = torch.tensor(setup.stop_ids, dtype=torch.long, device=self.device)
        self.info = {
            "name": "transformers",
            "version": transformers.__version__,
            "dtype": str(dtype).removeprefix("torch."),
            "device": self.device.type,
            "logprobs_mode": "processed_logprobs",
        }

    def _dtype(self) -> torch.dtype:
        if self.setup.dtype != "auto":
            return getattr(torch, self.setup.dtype)
        if self.device.type == "cuda":
            return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
        return torch.bfloat16 if torch.cpu.get_capabilities().get("avx512_bf16") else torch.float32

    def generate(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Completions batch by batch, within a window of requests the shortest prompts first."""
        requests, size = iter(requests), self.options.batch_size
        while window := list(islice(requests, _WINDOW * size)):
            window.sort(key=lambda request: len(request.prompt_ids))
            for start in range(0, len(window), size):
                yield from self._run(window[start : start + size])

    @torch.inference_mode()
    def _run(self, requests: list[Request]) -> list[Completion]:
        try:
            with products(self.device, fast=False):
                return list(self._decode(self._start(requests)))
        except (RuntimeError, MemoryError) as error:
            if not is_memory_error(error):
                raise
            raise ResourceError(
                "engine transformers",
                f"{type(error).__name__}: {printable(error)}",
                state="finished shards are kept; nothing else was written.",
                next="lower options.batch_size, then run the same command again",
            ) from error

    def _start(self, requests: list[Request]) -> _Batch:
        limit = self.setup.sampling.max_tokens
        numbers = [
            torch.rand(limit, generator=torch.Generator().manual_seed(r.seed), dtype=torch.float64)
            for r in requests
        ]
        empty = torch.empty(len(requests), 0, device=self.device)
        batch = _Batch(requests, torch.stack(numbers).to(self.device), empty.long(), empty)
        encoder = self.model.config.is_encoder_decoder
        prompts, batch.mask = _pad(
            [request.prompt_ids for request in requests], left=not encoder, device=self.device
        )
        if encoder:
            batch.encoded = self.model.get_encoder()(input_ids=prompts, attention_mask=batch.mask)
            prompts = torch.full(
                (len(requests), 1), decoder_start_id(self.model), device=self.device
            )
        batch.fed = prompts
        return batch

    def _decode(self, batch: _Batch) -> Iterator[Completion]:
        sampling = self.setup.sampling
        penalties = _Penalties(sampling, batch, self.model.config.vocab_size)
        for step in range(sampling.max_tokens):
            logits = self._forward(batch, first=step == 0)
            logprobs = processed_logprobs(
                logits,
                sampling,
                step=step,
                stop_ids=self.stop_ids,
                seen=penalties.seen,
                counts=penalties.counts,
            )
            ids = draw(logprobs, batch.uniforms[:, step], sampling.temperature)
            penalties.add(ids)
            batch.ids = torch.cat([batch.ids, ids[:, None]], 1)
            batch.logprobs = torch.cat([batch.logprobs, logprobs.gather(-1, ids[:, None])], 1)
            ended = torch.isin(ids, self.stop_ids)
            yield from _completions(batch, ended.nonzero()[:, 0].tolist(), "stop")
            going = (~ended).nonzero()[:, 0]
            if not len(going):
                return
            if len(going) < len(ids):
                batch.keep(going)
                penalties.keep(going)
            batch.fed = batch.ids[:, -1:]
        yield from _completions(batch, range(len(batch.requests)), "length")

    def _forward(self, batch: _Batch, *, first: bool) -> torch.Tensor:
        """Logits of the next id, [B, V]."""
        ids = batch.fed
        if batch.encoded is not None:
            inputs = {
                "encoder_outputs": batch.encoded,
                "attention_mask": batch.mask,
                "decoder_input_ids": ids,
            }
        else:
            if not first:
                batch.mask = torch.cat([batch.mask, torch.ones_like(batch.mask[:, :1])], 1)
            places = (batch.mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            inputs = {
                "input_ids": ids,
                "attention_mask": batch.mask,
                "position_ids": places,
                "logits_to_keep": 1,
            }
        output = self.model(**inputs, past_key_values=batch.cache, use_cache=True)
        batch.cache = output.past_key_values
        return output.logits[:, -1]

    def close(self) -> None:
        """Free the model's memory."""
        del self.model


class _Penalties:
    """Which ids stand in prompt and completion, kept only for the penalties that are on. An
    encoder's prompt does not count."""

    def __init__(self, sampling: Any, batch: _Batch, vocabulary: int) -> None:
        size = (len(batch.requests), vocabulary)
        additive = sampling.presence_penalty or sampling.frequency_penalty
        self.counts = torch.zeros(size, device=batch.uniforms.device) if additive else None
        self.seen = None
        if sampling.repetition_penalty != 1:
            self.seen = torch.zeros(size, dtype=torch.bool, device=batch.uniforms.device)
            for row, request in enumerate(batch.requests if batch.encoded is None else ()):
                self.seen[row, torch.from_numpy(request.prompt_ids.astype(np.int64))] = True

    def add(self, ids: torch.Tensor) -> None:
        if self.seen is not None:
            self.seen.scatter_(1, ids[:, None], True)
        if self.counts is not None:
            self.counts.scatter_add_(
                1, ids[:, None], torch.ones_like(ids[:, None], dtype=self.counts.dtype)
            )

    def keep(self, rows: torch.Tensor) -> None:
        self.seen = None if self.seen is None else self.seen[rows]
        self.counts = None if self.counts is None else self.counts[rows]


def _pad(
    prompts: list[np.ndarray], *, left: bool, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts as one tensor [B, P] and the mask [B, P] of what is not padding, from the lengths."""
    width = max(len(prompt) for prompt in prompts)
    ids, mask = np.zeros((len(prompts), width), np.int64), np.zeros((len(prompts), width), np.int64)
    for row, prompt in enumerate(prompts):
        place = slice(width - len(prompt), None) if left else slice(0, len(prompt))
        ids[row, place], mask[row, place] = prompt, 1
    return torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device)


def _completions(batch: _Batch, rows: Iterable[int], reason: str) -> Iterator[Completion]:
    for row in rows:
        ids = batch.ids[row].cpu().numpy().astype(np.int32)
        logprobs = batch.logprobs[row].float().cpu().numpy()
        yield Completion(
            batch.requests[row].index,
            ids,
            logprobs,
            reason,
            str(ids[-1]) if reason == "stop" else None,
        )
