"""updates/1: one row per optimizer step.

| column | unit | meaning |
|---|---|---|
| step, epoch, minibatch | | `step`: optimizer steps taken before in the policy's whole training |
| loss, policy_loss, kl_loss | | as minimised; mean over the step, by the recipe's aggregation |
| grad_norm | | before clipping; without a critic's separate trunk, unless it trains alone |
| learning_rate | | of this step |
| clip_fraction | share of tokens | tokens for which the surrogate's clipped branch was taken |
| approx_kl | nats per token | k3 estimate of KL(old ‖ current), mean over tokens |
| ratio_max | | largest π_θ / π_old of a token |
| entropy | nats per token | of the temperature-scaled distribution, mean over tokens |
| value_loss | | the critic's part of the loss, before `value_coef`; null without a critic |
| explained_variance | share | 1 − Var(returns − values) / Var(returns); null: equal returns |
| tokens, prompt_tokens, rollouts, microbatches | count | tokens in the loss, … |
| applied | | false: loss or gradient not finite; not applied, so the next has the same `step` |
| seconds | s | wall time of the step |

    {"step": 0, "epoch": 0, "minibatch": 0, "loss": 0.01, "grad_norm": 1.3, "tokens": 4096,
     "applied": true, …}
"""

import pyarrow as pa

from . import fields

_COUNTS = ("tokens", "prompt_tokens", "rollouts", "microbatches")
_FLOATS = (
    "loss",
    "policy_loss",
    "kl_loss",
    "grad_norm",
    "learning_rate",
    "clip_fraction",
    "approx_kl",
    "ratio_max",
    "entropy",
    "value_loss",
    "explained_variance",
)
SCHEMA = fields.kind_schema(
    "updates/1",
    [
        *[fields.required(name, pa.int64()) for name in ("step", "epoch", "minibatch")],
        *[pa.field(name, pa.float64()) for name in _FLOATS],
        *[fields.required(name, pa.int64()) for name in _COUNTS],
        fields.required("applied", pa.bool_()),
        fields.required("seconds", pa.float64()),
    ],
)
SCHEMAS = fields.by_name(SCHEMA)


def check(table: pa.Table) -> pa.Schema:
    """Return the schema of `table`. Raises SchemaError unless it is updates/1."""
    fields.compare(table, SCHEMA)
    return SCHEMA
