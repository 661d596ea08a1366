"""Rollouts on prompts that show pictures or play clips, and the whole model's own pass over them.

shown.sample(store, sight.REFS)
rows, sequences, numbers = shown.read(store, "sees", "images")
shown.require_own_pass(model, (rows, sequences, numbers), inputs_of)
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from quiver.schemas.errors import ConfigError
from quiver.stages.core.store import Store, Version
from quiver.stages.model.forward.layout import Sequences, prompt_numbers
from quiver.stages.model.forward.media import vision_parameters
from quiver.stages.model.forward.policy import Policy
from quiver.stages.model.media.dataset import load_media
from quiver.stages.model.ragged import Ragged
from quiver.stages.optimize.config import Lora
from quiver.stages.optimize.lora import attach
from quiver.stages.turns.reenact import reenact
from tests import sight
from tests.stages.model.forward.test_policy import packed
from tests.tiny import make_policy
from tests.writing import begin, run_here

REWARD = """
def score(completion_ids):
    return [sum(ids) % 7 for ids in completion_ids]
"""
OPTIMIZE = {
    "algorithm": "grpo",
    "precision": "fp32",
    "learning_rate": 1e-3,
    "drop_zero_variance": False,
    "device": "cpu",
}
MODES = ("shared", "packed", "single")
Read = tuple[list[dict], Sequences, list[int]]
"""Rollouts, each with the bytes of its files; what the model reads of them; their prompts' numbers."""


def sample(store: Store, refs: dict[str, str]) -> str:
    """The reference of scored rollouts on the prompts of `refs`."""
    rollouts = str(run_here("generate", sight.GENERATE, store, **refs))
    score(store, rollouts)
    return rollouts


def score(store: Store, rollouts: str) -> str:
    """The reference of rewards."""
    path = Path(store.url).parent / "rewards.py"
    path.write_text(REWARD)
    config = {"functions": [{"use": f"{path}:score"}]}
    return str(run_here("reward", config, store, rollouts=rollouts))


def read(store: Store, run: str, column: str, change: Callable = lambda ids: ids) -> Read:
    """The first rollouts of a run whose prompts have files in `column`. `change`: of each row's
    sampled ids."""
    rollouts = store.open(f"{run}/rollouts@1")
    media = load_media(store, rollouts, rollouts.table(), store.open(f"{run}/policy@0"))
    rows = rollouts.table().to_pylist()
    asked = store.open(f"{run}/prompts@1").table().to_pylist()
    prompts = {row["group_id"]: row for row in asked}
    for row in rows:
        row[column] = [file["bytes"] for file in prompts[row["group_id"]][column]]
        row["completion_ids"] = change(row["completion_ids"])
    prompt_ids, completions = (
        Ragged.from_lengths(
            torch.tensor([id for row in rows for id in row[name]]),
            torch.tensor([len(row[name]) for row in rows]),
        )
        for name in ("prompt_ids", "completion_ids")
    )
    temperature = torch.full((len(rows),), 0.9)
    sequences = Sequences(prompt_ids, completions, temperature, media=media)
    return rows, sequences, prompt_numbers(prompt_ids, [row["group_id"] for row in rows])


def logprobs_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Logprobs of `ids` [T], from the logits [T, V] before each, at the rollouts' temperature."""
    return (logits / 0.9).log_softmax(-1).gather(1, ids[:, None])[:, 0]


def require_own_pass(
    model: Any,
    given: Read,
    inputs_of: Callable[[dict], dict],
) -> set[str]:
    """Every way of packing gives logprobs and gradients of the whole model, which merges features
    itself. Returns the names of the weights that have a gradient.

    Args:
        model: The model.
        given: The result of `read`.
        inputs_of: What the whole model takes for a row.
    """
    rows, sequences, numbers = given
    own = [
        logprobs_of(
            model(**inputs_of(row)).logits[0, len(row["prompt_ids"]) - 1 : -1],
            torch.tensor(row["completion_ids"]),
        )
        for row in rows
    ]
    expected = torch.cat(own)
    weights = torch.randn(len(expected), generator=torch.Generator().manual_seed(1))
    (weights * expected).sum().backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    total = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    for mode, budget in ("shared", 40), *((mode, 10_000) for mode in MODES):
        model.zero_grad()
        logprobs = packed(Policy(model, autocast=False), mode, sequences, numbers, budget)
        torch.testing.assert_close(logprobs, expected, rtol=5e-6, atol=1e-5)
        (weights * logprobs).sum().backward()
        for name, parameter in model.named_parameters():
            if name in gradients:
                gap = (parameter.grad - gradients[name]).norm()
                assert gap <= 1e-5 * gradients[name].norm() + 1e-6 * total, (mode, name)
    return set(gradients)


def require_logprobs(model: Any, given: Read, expected: list[torch.Tensor]) -> None:
    """Every way of packing gives these logprobs."""
    _, sequences, numbers = given
    for mode in MODES:
        logprobs = packed(Policy(model, autocast=False), mode, sequences, numbers, 10_000)
        torch.testing.assert_close(logprobs, torch.cat(expected), rtol=5e-6, atol=1e-5)


def changed_weights(loader: Any, store: Store, run: str, **options: Any) -> set[str]:
    """The names of the weights that a training on the first rollouts changes, after an audit
    without a gap."""
    refs = {kind: f"{run}/{kind}@1" for kind in ("rollouts", "rewards")}
    refs["policy"] = f"{run}/policy@0"
    ref = run_here("optimize", {**OPTIMIZE, **options}, store, into="trained", **refs)
    assert store.open(ref).manifest.metrics["audit"]["max_gap"] < 3e-5
    before, after = (
        loader.from_pretrained(store.open(each).files.folder).state_dict()
        for each in (refs["policy"], str(ref))
    )
    return {name for name in before if not torch.equal(before[name], after[name])}


def with_other_files(store: Store, run: str, column: str, others: dict[bytes, bytes]) -> dict:
    """References for a training on the same rollouts, as if sampled from prompts with `others` in
    place of their files."""
    prompts = store.open(f"{run}/prompts@1").table()
    cells = [
        [{**file, "bytes": others[file["bytes"]]} for file in files]
        for files in prompts[column].to_pylist()
    ]
    place, field = prompts.schema.get_field_index(column), prompts.schema.field(column)
    about = {"stage_version": 1, "config": sight.Plain()}
    with begin(store, "swapped", "prompts", stage="prompt", inputs={}, **about) as work:
        work.write(0, prompts.set_column(place, field, pa.array(cells, field.type)))
        about["inputs"] = {"prompts": work.commit()}
    rollouts = store.open(f"{run}/rollouts@1")
    about["models"] = rollouts.manifest.models
    with begin(store, "swapped", "rollouts", stage="generate", **about) as work:
        work.write(0, rollouts.table())
        swapped = str(work.commit().ref)
    return {"rollouts": swapped, "rewards": score(store, swapped), "policy": f"{run}/policy@0"}


def require_scored_as_sampled(store: Store, run: str, atol: float) -> None:
    """The stage logprobs gives what the engine gave."""
    config = {"role": "ref", "precision": "fp32", "device": "cpu"}
    refs = {"rollouts": f"{run}/rollouts@1", "policy": f"{run}/policy@0"}
    scored = store.open(run_here("logprobs", config, store, **refs)).table()
    sampled = store.open(refs["rollouts"]).table()
    for now, then in zip(scored["logprobs"], sampled["old_logprobs"], strict=True):
        np.testing.assert_allclose(now.as_py(), then.as_py(), atol=atol)


def paid(store: Store, rollouts: str, policy: str) -> dict[str, str]:
    """References for a training on episodes, with the rewards that their environment gave."""
    config = {"functions": [{"use": "environment"}]}
    rewards = run_here("reward", config, store, rollouts=rollouts)
    return {"rollouts": rollouts, "rewards": str(rewards), "policy": policy}


def require_end(store: Store, config: dict, refs: dict, end: str, why: str | None) -> None:
    """Every episode ends so, and where it failed it is told why."""
    rows = store.open(run_here("generate", config, store, **refs)).table().to_pylist()
    assert {row["end_reason"] for row in rows} == {end}
    for row in rows:
        failure = json.loads(row["turns"][-1]["info"] or "{}").get("quiver_failure")
        assert failure is None if why is None else why in failure


def require_told_apart(store: Store, rollouts: str, other: str, shown: str) -> None:
    """Nine episodes played again agree, and differ where an `other` environment shows other
    files."""
    same = reenact(store, rollouts, processes=1)
    assert same.episodes == same.episodes_agree == 9
    report = reenact(store, rollouts, environment=other, processes=1)
    found = {difference.what for difference in report.differences}
    assert report.episodes_agree < 9 and found == {"opening", "observation"}
    assert any(shown in difference.recorded for difference in report.differences)


def require_refused(store: Store, folder: Path, config: dict, refs: dict, says: str) -> str:
    """A policy of texts alone is neither sampled from nor given a prompt, with this message; the
    object of the refusal to sample."""
    make_policy(store)
    blind = {"policy": "tiny/policy@0"}
    with pytest.raises(ConfigError, match=f"tiny/policy@0 {says}") as refusal:
        run_here("generate", config, store, **{**refs, **blind})
    source = sight.write_rows(folder, [{"prompt": "one", "first": 5}], "others.jsonl")
    turns = {"environment": config["turns"]["environment"]}
    config = {"source": source, "prompt": "prompt", "turns": turns}
    with pytest.raises(ConfigError, match=says):
        run_here("prompt", config, store, **blind)
    return refusal.value.object


def require_no_adapters(model: Any, policy: Version) -> None:
    """What sees or hears gets none, though its layers have the names that were chosen: it is
    frozen, so they would not be saved and the next training would miss them."""
    attach(Lora(target_modules=["v_proj"]), model, policy, seed=0)
    trained = {id(each) for each in model.parameters() if each.requires_grad}
    assert trained and not trained & {id(each) for each in vision_parameters(model)}
