"""A checkpoint that scores saved completions: loaded once, then one logprob a token, shard by
shard."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import torch

from quiver.schemas import logprobs
from quiver.schemas.errors import ConfigError
from quiver.stages.common.forward.layout import Sequences, prompt_numbers
from quiver.stages.common.forward.policy import Policy, score, token_budget
from quiver.stages.common.forward.precision import narrow, resolve
from quiver.stages.common.forward.verify import choose_kernel, choose_mode
from quiver.stages.common.models.loading import load_model
from quiver.stages.common.ragged import Ragged
from quiver.stages.common.store import Version

from .config import Config


def choose_device(name: str) -> torch.device:
    """The device that the config names; `auto`: the GPU where there is one. ConfigError."""
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise ConfigError(
            "logprobs.device", "expected cuda, there is none", next='set logprobs.device = "auto"'
        )
    return torch.device("cuda" if has_gpu and name != "cpu" else "cpu")


class Scorer:
    """The model of a policy version on its device."""

    def __init__(self, config: Config, model: Version, device: torch.device) -> None:
        self.ways: dict[str, str] = {}
        """Of `packing` and `attention`, as tried out with the first rows; empty before those."""
        self._config = config
        precision = resolve(config.precision, device)
        self._policy = Policy(
            load_model(model, dtype=torch.float32, device=device),
            autocast=precision == "bf16",
            fast=precision == "fp32_fast",
        )

    def score(self, rollouts: pa.Table) -> pa.Table:
        """logprobs/1 of these rollouts; a completion without ids has none. ConfigError."""
        rows = torch.arange(len(rollouts))
        prompts = Ragged.from_arrow(rollouts["prompt_ids"]).take(rows)
        completions = Ragged.from_arrow(rollouts["completion_ids"]).take(rows)
        temperature = np.array(rollouts["temperature"].combine_chunks(), dtype=np.float32)
        sequences = Sequences(prompts, completions, torch.from_numpy(temperature))
        token_logprobs = torch.zeros(len(completions.values))
        if len(token_logprobs):
            token_logprobs = self._score(sequences, rollouts["group_id"].to_pylist())
        column = completions.with_values(token_logprobs.clamp(max=0.0)).to_arrow()
        ids = rollouts["rollout_id"].combine_chunks()
        return pa.Table.from_arrays([ids, column], schema=logprobs.SCHEMA)

    def _score(self, sequences: Sequences, groups: list[str]) -> torch.Tensor:
        """[N] logprobs of all completion tokens."""
        policy = self._policy
        prompt_of_row = prompt_numbers(sequences.prompts, groups)
        if not self.ways:
            mode = choose_mode(policy, sequences, prompt_of_row, self._config.packing)
            policy.set_mode(mode)
            if self._config.precision == "bf16_pure":
                narrow(policy.model)
        lengths = sequences.completions.lengths.tolist()
        microbatches = policy.microbatches(
            [row for row, length in enumerate(lengths) if length],
            prompt_of_row,
            sequences,
            self._config.token_budget or token_budget(policy.device),
        )
        if not self.ways:
            with torch.no_grad():
                kernel = choose_kernel(policy, microbatches[0], sequences)
            self.ways = {"packing": mode, "attention": kernel}
        return score(policy, microbatches, sequences)
