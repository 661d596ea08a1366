"""Engine `transformers`: decoder-only and encoder-decoder models (T5, BART), with our own loop.

`model.generate` is not used. Here each row draws from its own generator, and its logprobs come
from exactly the distribution that was sampled from (float32). The model's generation config has
no effect, forced tokens included. Padding happens only in this file: prompts of similar length
are batched, left-padded for a decoder, right-padded for an encoder, and masks come from lengths,
never from ids. A stored completion never contains the decoder's start token.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby, islice
from typing import Any

import numpy as np
import torch
import transformers
from torch.nn.utils.rnn import pad_sequence
from transformers.cache_utils import CacheLayerMixin

from quiver.schemas.errors import ConfigError
from quiver.stages.core.config import parse
from quiver.stages.generate.engine import Completion, Request, Setup
from quiver.stages.generate.options import TransformersOptions
from quiver.stages.generate.sampling import draw, processed_logprobs
from quiver.stages.generate.stopping import StopStrings
from quiver.stages.model import checkpoints
from quiver.stages.model.devices import uses_gpu
from quiver.stages.model.families import NOT_SAMPLED, UNPADDED, most_tokens_alike, types_of
from quiver.stages.model.forward.axes import shifts
from quiver.stages.model.forward.media import (
    feature_places,
    grid_of,
    medium_features,
    put_features,
    reader_of,
)
from quiver.stages.model.forward.precision import products
from quiver.stages.model.loading import (
    decoder_start_id,
    load_model,
    set_attention,
    short_of_memory,
)
from quiver.stages.model.media.processor import features_merged, load_processor, token_ids

log = logging.getLogger(__name__)
_WINDOW = 8  # batches per window; requests are sorted by length within a window


@dataclass
class _Batch:
    """Rows that are decoded together.

    B rows, P ids of the longest prompt, T ids so far, V ids of the vocabulary, d embedding width.
    """

    requests: list[Request]
    uniforms: torch.Tensor  # [B, max_tokens]
    ids: torch.Tensor  # [B, T]
    logprobs: torch.Tensor  # [B, T]
    mask: torch.Tensor  # decoder: [B, P + T]; encoder: [B, P]
    input_ids: torch.Tensor  # the ids to read next: first the prompts, later each row's last id
    seen: torch.Tensor | None = None  # [B, V]: in prompt or completion, if penalized
    counts: torch.Tensor | None = None  # [B, V]: count in the completion, if penalized
    media: dict[str, Any] | None = None  # arguments of the first pass, if prompts show media
    shift: torch.Tensor | None = None  # [B, 1]: of later positions, if they have three axes
    encoded: Any = None
    cache: Any = None
    stops: list[StopStrings] | None = None  # [B]: if there are stop strings

    def append(self, ids: torch.Tensor, logprobs: torch.Tensor) -> None:
        """Append one id to each row: `ids` [B], drawn from `logprobs` [B, V]."""
        ids = ids[:, None]
        self.ids = torch.cat([self.ids, ids], 1)
        self.logprobs = torch.cat([self.logprobs, logprobs.gather(-1, ids)], 1)
        if self.seen is not None:
            self.seen.scatter_(1, ids, True)
        if self.counts is not None:
            self.counts.scatter_add_(1, ids, torch.ones_like(ids, dtype=self.counts.dtype))

    def keep(self, rows: torch.Tensor) -> None:
        """Drop all rows except these, everywhere."""
        self.requests = [self.requests[row] for row in rows.tolist()]
        if self.stops is not None:
            self.stops = [self.stops[row] for row in rows.tolist()]
        for name in ("uniforms", "ids", "logprobs", "mask", "seen", "counts", "shift"):
            tensor = getattr(self, name)
            if tensor is not None:
                setattr(self, name, tensor[rows])
        self.cache.reorder_cache(rows)  # layers with a state have no other way to drop rows
        if self.encoded is not None:
            self.encoded.last_hidden_state = self.encoded.last_hidden_state[rows]

    def stop_reasons(self, stop_ids: torch.Tensor) -> dict[int, str]:
        """Return the stop reason of each row that its last id ends: the completed stop string, else
        the id."""
        last_ids = self.ids[:, -1].tolist()
        ended_rows = torch.isin(self.ids[:, -1], stop_ids).nonzero()[:, 0].tolist()
        reasons = {row: str(last_ids[row]) for row in ended_rows}
        for row, stops in enumerate(self.stops or ()):
            string = stops.add(last_ids[row])
            if string is not None:
                reasons[row] = string
        return reasons

    def completion(self, row: int, finish_reason: str, stop_reason: str | None) -> Completion:
        """Return a row's completion."""
        ids = self.ids[row].cpu().numpy().astype(np.int32)
        logprobs = self.logprobs[row].float().cpu().numpy()
        return Completion(self.requests[row].index, ids, logprobs, finish_reason, stop_reason)


class TransformersEngine:
    """A transformers model as an `Engine`."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.options = parse(TransformersOptions, setup.options, "generate.options")
        on_gpu = uses_gpu("generate.device", setup.device)
        self.device = torch.device("cuda" if on_gpu else "cpu")
        dtype = setup.dtype
        if dtype == "auto":
            has_bf16 = on_gpu and torch.cuda.is_bf16_supported()
            dtype = "bfloat16" if has_bf16 else "float32"
        self._processor = None
        setup.verified()
        self.model = load_model(
            setup.policy,
            dtype=getattr(torch, dtype),
            device=self.device,
            base=setup.base,
        )
        if self.options.attn_implementation != "sdpa":
            name = self.options.attn_implementation
            set_attention(self.model, name, "generate.options.attn_implementation")
        types = types_of(self.model.config)
        if types & NOT_SAMPLED:
            raise self._refusal(
                "transformers gives other logprobs for a row read id by id than for the whole row"
            )
        self._pads = not types & UNPADDED
        longest = setup.longest or setup.max_model_len
        limit = most_tokens_alike(self.model.config)
        if limit is not None and longest > limit:
            log.warning(
                "engine transformers: rows may have %d ids, but beyond %d this model's positions "
                "(longrope) change for the whole row, so the trainer gives such rows other "
                "logprobs. Set generate.max_model_len = %d to leave them out",
                longest,
                limit,
                limit,
            )
        self.stop_ids = torch.tensor(setup.stop_ids, dtype=torch.long, device=self.device)
        if setup.sampling.stop:
            self.tokenizer = checkpoints.load_tokenizer(setup.policy)
        self.info = {
            "name": "transformers",
            "version": transformers.__version__,
            "dtype": dtype,
            "device": self.device.type,
            "logprobs_mode": "processed_logprobs",
        }

    def generate(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Yield completions batch by batch, shortest prompts first within a window of requests."""
        requests = iter(requests)
        size = self.options.batch_size
        while window := list(islice(requests, _WINDOW * size)):
            window.sort(key=lambda request: len(request.prompt_ids))
            # Without padding a batch has prompts of one length.
            runs = groupby(window, lambda request: self._pads or len(request.prompt_ids))
            for _, run in runs:
                while batch := list(islice(run, size)):
                    yield from self._run(batch)

    @torch.inference_mode()
    def _run(self, requests: list[Request]) -> list[Completion]:
        out_of_memory = short_of_memory(
            "engine transformers",
            "lower options.batch_size, then run the same command again",
            state="finished shards are kept; nothing else was written.",
        )
        with out_of_memory, products(self.device):
            return list(self._decode(self._start(requests)))

    def _start(self, requests: list[Request]) -> _Batch:
        """Return the batch before its first id.

        An encoder reads its prompts here; they are not penalized.
        """
        sampling = self.setup.sampling
        longest = max(map(self._most_tokens, requests))
        uniforms = torch.empty(len(requests), longest, dtype=torch.float64)
        for row, request in enumerate(requests):
            uniforms[row].uniform_(generator=torch.Generator().manual_seed(request.seed))
        has_encoder = self.model.config.is_encoder_decoder
        pad = partial(
            pad_sequence, batch_first=True, padding_side="right" if has_encoder else "left"
        )
        input_ids = pad([torch.tensor(request.prompt_ids).long() for request in requests])
        mask = pad([torch.ones(len(request.prompt_ids)).long() for request in requests])
        input_ids = input_ids.to(self.device)
        mask = mask.to(self.device)
        empty = torch.empty(len(requests), 0, device=self.device)
        uniforms = uniforms.to(self.device)
        batch = _Batch(requests, uniforms, empty.long(), empty, mask, input_ids)
        shape = (len(requests), self.model.config.get_text_config().vocab_size)
        if sampling.presence_penalty or sampling.frequency_penalty:
            batch.counts = torch.zeros(shape, device=self.device)
        if sampling.repetition_penalty != 1:
            prompt_counts = torch.zeros(shape, dtype=torch.long, device=self.device)
            if not has_encoder:
                prompt_counts.scatter_add_(1, input_ids, mask)
            batch.seen = prompt_counts > 0
        if sampling.stop:
            before = [[] if has_encoder else request.prompt_ids.tolist() for request in requests]
            batch.stops = [StopStrings(self.tokenizer, sampling, ids) for ids in before]
        if any(request.media for request in requests):
            self._show(batch)
        if has_encoder:
            batch.encoded = self.model.get_encoder()(input_ids=input_ids, attention_mask=mask)
            start_id = decoder_start_id(self.model)
            batch.input_ids = torch.full((len(requests), 1), start_id, device=self.device)
        return batch

    def _show(self, batch: _Batch) -> None:
        """Put the features of pictures and clips into a batch of left-padded prompts."""
        if self._processor is None:
            self._processor = load_processor(self.setup.policy)
        length = batch.input_ids.shape[1]
        tokens = token_ids(self.setup.policy)
        merge = features_merged(self.setup.policy)
        places = []
        features: dict[bytes, list[torch.Tensor]] = {}
        grids: dict[bytes, tuple[int, int]] = {}
        shown = []
        shift = []
        for row, request in enumerate(batch.requests):
            spans = [(medium.start, medium.length) for medium in request.media]
            in_prompt = feature_places(request.prompt_ids, spans, tokens)
            in_prompt += length - len(request.prompt_ids)
            places.append(in_prompt + row * length)
            for medium in request.media:
                if medium.content not in features:  # the rows of a group share files
                    inputs = self._processor.read(medium.modality, medium.content).inputs.items()
                    tensors = {name: torch.from_numpy(array) for name, array in inputs}
                    if merge is not None:
                        grids[medium.content] = grid_of(tensors, merge)
                    on_device = {name: tensor.to(self.device) for name, tensor in tensors.items()}
                    features[medium.content] = medium_features(self.model, on_device)
                shown.append(features[medium.content])
            if merge is not None:
                of_row = [grids[medium.content] for medium in request.media]
                shift.append(shifts(length, in_prompt, of_row))
        batch.media = put_features(
            self.model,
            batch.input_ids,
            torch.from_numpy(np.concatenate(places)).to(self.device),
            shown,
            str(self.setup.policy.ref),
        )
        if shift:
            table = torch.from_numpy(np.stack(shift, 1)).to(self.device)  # [3, B, P + 1]
            batch.shift = table[0, :, -1:]
            batch.media["position_ids"] = _positions(batch.mask) + table[..., :-1]

    def _decode(self, batch: _Batch) -> Iterator[Completion]:
        sampling = self.setup.sampling
        for position in range(batch.uniforms.shape[1]):
            logits = self._logits(batch, is_first=position == 0)
            logprobs = processed_logprobs(
                logits,
                sampling,
                position=position,
                stop_ids=self.stop_ids,
                seen=batch.seen,
                counts=batch.counts,
            )
            ids = draw(logprobs, batch.uniforms[:, position], sampling.temperature)
            batch.append(ids, logprobs)
            reasons = batch.stop_reasons(self.stop_ids)
            unended_rows = []
            for row, request in enumerate(batch.requests):
                if row in reasons:
                    yield batch.completion(row, "stop", reasons[row])
                elif position + 1 == self._most_tokens(request):
                    yield batch.completion(row, "length", None)
                else:
                    unended_rows.append(row)
            if not unended_rows:
                return
            if len(unended_rows) < len(batch.requests):
                batch.keep(torch.tensor(unended_rows, device=self.device))
            batch.input_ids = batch.ids[:, -1:]

    def _most_tokens(self, request: Request) -> int:
        return request.max_tokens or self.setup.sampling.max_tokens

    def _logits(self, batch: _Batch, *, is_first: bool) -> torch.Tensor:
        """Return the logits of the next id, [B, V]."""
        ids = batch.input_ids
        if batch.encoded is not None:
            inputs = {
                "encoder_outputs": batch.encoded,
                "attention_mask": batch.mask,
                "decoder_input_ids": ids,
            }
        else:
            if not is_first:
                batch.mask = torch.cat([batch.mask, torch.ones_like(batch.mask[:, :1])], 1)
            positions = _positions(batch.mask)[:, -ids.shape[1] :]
            inputs = {
                "attention_mask": batch.mask,
                "position_ids": positions if batch.shift is None else positions + batch.shift,
            }
            if is_first and batch.media is not None:
                inputs |= batch.media
            else:
                inputs["input_ids"] = ids
        inputs |= {"past_key_values": batch.cache, "use_cache": True}
        reader = reader_of(self.model, inputs)
        try:
            if reader is self.model:
                is_decoder = batch.encoded is None
                output = self.model(**inputs, **({"logits_to_keep": 1} if is_decoder else {}))
                logits = output.logits[:, -1]
            else:
                output = reader(**inputs)
                logits = self.model.get_output_embeddings()(output.last_hidden_state[:, -1])
        except ValueError:
            layers = transformers.DynamicCache(config=self.model.config).layers
            if not layers or any(isinstance(layer, CacheLayerMixin) for layer in layers):
                raise
            # transformers builds its mask from the keys of its first attention layer, so it needs
            # one.
            raise self._refusal("none of its layers keeps keys and values") from None
        batch.cache = output.get("past_key_values")
        if batch.cache is None:
            raise self._refusal("transformers keeps no keys and values of its past ids")
        return logits

    def _refusal(self, problem: str) -> ConfigError:
        return ConfigError(
            "engine transformers",
            f"cannot sample from a model of type {self.model.config.model_type}: {problem}",
            next='set generate.engine = "vllm", or take a model of another family',
        )

    def close(self) -> None:
        """Free the model's memory."""
        del self.model


def _positions(mask: torch.Tensor) -> torch.Tensor:
    """Return [B, L] the position of each id in its left-padded row, from the row's mask."""
    return (mask.cumsum(-1) - 1).clamp(min=0)
