"""imported_prompts: take the prompts in another system's trajectories, one for each group.

The ids are the lines' own. `messages`, `tools` and `columns` are kept if lines have them, so that
`reward` can score the rollouts that the stage `imported` makes from the same file. The policy's
chat template says how an answer to `messages` begins.

    config = Config(source="trajectories.jsonl")
    ref = run_stage("imported_prompts", config, store, policy="arith/policy@0")
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing, suppress
from typing import Any

import pyarrow as pa

from quiver.schemas import prompts
from quiver.schemas.errors import ConfigError
from quiver.stages.core.run.stage import Plan, Refs
from quiver.stages.core.store import Store
from quiver.stages.core.store.writer import Writer
from quiver.stages.model import checkpoints
from quiver.stages.model.chat.messages import save_messages
from quiver.stages.turns import trajectories
from quiver.stages.turns.trajectories import Source as Config
from quiver.stages.turns.trajectories import Trajectory

from .columns import to_table
from .config import Config as PromptConfig

STAGE_VERSION = 1


def plan(config: Config, store: Store, refs: Refs, into: str | None = None) -> Plan:
    """Plan the prompts of the lines, for the tokenizer of `refs["policy"]`. Raises ConfigError."""
    policy = store.open(refs["policy"])
    if not config.source_sha256:
        _, sha256 = trajectories.read(config.source)
        config = config.model_copy(update={"source_sha256": sha256})
    return Plan(
        store=store,
        stage="imported_prompts",
        stage_version=STAGE_VERSION,
        config=config,
        run=into or policy.ref.run,
        kinds=("prompts",),
        models=(checkpoints.model_entry("policy", policy),),
    )


def make(plan: Plan, writers: Mapping[str, Writer]) -> None:
    """Write the prompt of each group's first line. Raises ConfigError."""
    from .rows import Renderer

    source = plan.config.source
    lines, _ = trajectories.read(source, plan.config.source_sha256)
    first: dict[str, tuple[str, Trajectory]] = {}
    for place, line in lines.items():
        first.setdefault(line.group, (place, line))
    policy = plan.store.open(plan.models[0].ref)
    tokenizer = checkpoints.load_tokenizer(policy).backend_tokenizer
    rows: list[dict[str, Any]] = []
    for group, (_, line) in first.items():
        row = {
            "group_id": group,
            "messages": line.messages and save_messages(line.messages),
            "prompt_text": tokenizer.decode(line.prompt_ids, skip_special_tokens=False),
            "prompt_ids": line.prompt_ids,
            "tools": line.tools and json.dumps(line.tools, ensure_ascii=False),
        }
        rows.append(row)
    columns = pa.array([{}] * len(rows), pa.struct([]))
    if any(line.columns for _, line in first.values()):
        table = to_table(source, ((place, line.columns) for place, line in first.values()))
        columns = table.combine_chunks().to_struct_array().combine_chunks()
    made = prompts.table_of(rows, columns)
    writer = writers["prompts"]
    writer.write_table(made)
    metrics = {}
    if made["messages"].null_count < len(made):
        chats = PromptConfig(source=source, messages="messages")
        # a policy without a template cannot say how an answer begins
        with suppress(ConfigError), closing(Renderer(chats, policy, None)) as renderer:
            metrics = renderer.of_assistant(made["messages"])
    writer.finish(metrics=metrics, status={"kept": len(rows)})
