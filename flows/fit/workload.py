"""The tokens and rollouts of one iteration: from the run's last rollouts, else from the keys.

If the run has no rollouts yet, completions count with their longest length. Prompts are then
assumed to have `_PROMPT_TOKENS` tokens, and without data.limit there are `_PROMPTS` of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow.compute as pc

from quiver.schemas.errors import ConfigError, LineageError
from quiver.stages.common.store import Store

from ..recipe import Recipe

_PROMPTS = 64
_PROMPT_TOKENS = 256


@dataclass(frozen=True)
class Workload:
    """Size of one iteration. Token counts are means, except `longest`."""

    prompts: int
    samples: int
    """Rollouts per prompt."""
    prompt_tokens: float
    completion_tokens: float
    longest: int
    """Tokens of the longest rollout, including its prompt."""
    source: str
    """Origin of the numbers, for people."""

    @property
    def rollouts(self) -> int:
        return self.prompts * self.samples

    @property
    def passed_tokens(self) -> float:
        """Tokens that a pass over all rollouts reads; each prompt counts once."""
        return self.prompts * self.prompt_tokens + self.rollouts * (self.completion_tokens - 1)

    @property
    def keys_per_token(self) -> float:
        """Keys that attention gathers per token read: each rollout has its prompt's keys beside its
        own."""
        keys = self.rollouts * (self.prompt_tokens + self.completion_tokens - 1)
        return (self.prompts * self.prompt_tokens + keys) / self.passed_tokens

    @property
    def predicted_share(self) -> float:
        """Share of the tokens read that predict a completion token."""
        return self.rollouts * self.completion_tokens / self.passed_tokens


def workload_of(recipe: Recipe) -> Workload:
    """Return the workload of the run's newest rollouts if there are any, else of the recipe's
    keys."""
    samples = recipe.generate.samples_per_prompt
    turns = recipe.generate.turns
    most = turns.most_read_tokens if turns else recipe.generate.sampling.max_tokens
    try:
        rollouts = Store(recipe.store, create=False).open(f"{recipe.run}/rollouts@latest")
        table = rollouts.table()
        were_as_long = rollouts.manifest.config_section("sampling").get("max_tokens") == most
        lengths = [pc.list_value_length(table[f"{of}_ids"]) for of in ("prompt", "completion")]
        if len(table):
            return Workload(
                prompts=recipe.data.limit or pc.count_distinct(table["group_id"]).as_py(),
                samples=samples,
                prompt_tokens=pc.mean(lengths[0]).as_py(),
                completion_tokens=max(1.0, pc.mean(lengths[1]).as_py()) if were_as_long else most,
                longest=pc.max(pc.add(*lengths)).as_py()
                if were_as_long
                else pc.max(lengths[0]).as_py() + most,
                source=str(rollouts.ref)
                if were_as_long
                else f"prompts as in {rollouts.ref}, completions as long as they may be",
            )
    except (ConfigError, LineageError):
        pass  # No store yet, or no rollouts.
    return Workload(
        prompts=recipe.data.limit or _PROMPTS,
        samples=samples,
        prompt_tokens=_PROMPT_TOKENS,
        completion_tokens=most,
        longest=_PROMPT_TOKENS + most,
        source=f"no rollouts yet: prompts of {_PROMPT_TOKENS} tokens, completions of {most}"
        + ("" if recipe.data.limit else f", {_PROMPTS} prompts"),
    )
