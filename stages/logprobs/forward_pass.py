"""The logprobs of saved completions under one checkpoint: loaded once, one logprob per token, shard
by shard."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from quiver.schemas import logprobs
from quiver.stages.core.store import Version
from quiver.stages.model import memory
from quiver.stages.model.devices import available_bytes, uses_gpu
from quiver.stages.model.forward.layout import Sequences, prompt_numbers
from quiver.stages.model.forward.media import Media
from quiver.stages.model.forward.policy import Policy, compute_logprobs
from quiver.stages.model.forward.precision import choose_precision, narrow
from quiver.stages.model.forward.verify import choose_kernel, choose_mode
from quiver.stages.model.loading import load_for_autocast, load_model
from quiver.stages.model.ragged import Ragged
from quiver.stages.model.turns import Turns

from .config import Config


class LogprobPass:
    """The model of a policy version, on the device that the config names.

    Args:
        config: Precision, packing and device. `auto` is the GPU if there is one.
        model: The version to load.
        base: Its base weights, if it is only an adapter.

    Raises ConfigError if the device is missing.
    """

    def __init__(self, config: Config, model: Version, base: Version | None = None) -> None:
        on_gpu = uses_gpu("logprobs.device", config.device)
        self.device = torch.device("cuda" if on_gpu else "cpu")
        self.methods: dict[str, Any] = {}
        """The `token_budget`, `packing` and `attention` chosen for the first rows; empty before
        that."""
        self._config = config
        self._precision = choose_precision(config.precision, self.device)
        is_autocast = self._precision == "bf16"
        load = load_for_autocast if is_autocast else partial(load_model, dtype=torch.float32)
        self._policy = Policy(load(model, device=self.device, base=base), autocast=is_autocast)

    def compute_logprobs(self, rollouts: pa.Table, media: Media | None = None) -> pa.Table:
        """Return logprobs/1 of these rollouts, which may have turns.

        `pictures` belong to the prompts. A completion without ids gets no logprobs. Raises
        ConfigError.
        """
        prompts = Ragged.from_arrow(rollouts["prompt_ids"])
        completions = Ragged.from_arrow(rollouts["completion_ids"])
        temperature = np.array(rollouts["temperature"].combine_chunks(), dtype=np.float32)
        sequences = Sequences(
            prompts,
            completions,
            torch.from_numpy(temperature),
            Turns.of_table(rollouts, completions.lengths),
            media,
        )
        nonempty_rows = completions.lengths.nonzero()[:, 0].tolist()
        prompt_of_row = prompt_numbers(prompts, rollouts["group_id"].to_pylist())
        policy = self._policy
        is_first = nonempty_rows and not self.methods
        if is_first:
            passed, longest = sequences.sizes(prompt_of_row)
            shape = cache(partial(memory.shape_of, policy.model.config))

            def bytes_of(tokens: int, _: bool) -> dict[str, float]:
                return memory.scoring(
                    shape(),
                    max(min(tokens, passed), longest),
                    on_gpu=True,
                    precision=self._precision,
                )

            self.methods["token_budget"], _ = memory.choose_budget(
                bytes_of, available_bytes(self.device), self._config.token_budget, False
            )
            packing = choose_mode(policy, sequences, prompt_of_row, self._config.packing)
            self.methods["packing"] = packing
            if self._config.precision == "bf16_pure":
                narrow(policy.model)
        budget = self.methods.get("token_budget", 1)  # absent: there is no row
        microbatches = policy.microbatches(nonempty_rows, prompt_of_row, sequences, budget)
        if is_first:
            with torch.no_grad():
                self.methods["attention"] = choose_kernel(policy, microbatches[0], sequences)
        token_logprobs = compute_logprobs(policy, microbatches, sequences)
        column = completions.with_values(token_logprobs.clamp(max=0.0)).to_arrow()
        ids = rollouts["rollout_id"].combine_chunks()
        return pa.Table.from_arrays([ids, column], schema=logprobs.SCHEMA)
