"""What `quiver export` writes, read by the trainers that it is for: one step of each of TRL's, and
verl's loader of prompts."""

from __future__ import annotations

from pathlib import Path

import pytest
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from quiver.flows.exporting import Options, export
from quiver.stages.core.store import Store
from tests import exported
from tests.oracles.peers import peer
from tests.tiny import PAD

pytestmark = pytest.mark.oracle
trl = peer("trl")
COMMON = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": "none",
    "max_steps": 1,
    "per_device_train_batch_size": 2,
}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Store, exported.Made]:
    folder = tmp_path_factory.mktemp("exported")
    store = Store(folder / "store")
    return store, exported.make(store, folder)


def rows_of(made, folder: Path, suffix: str, format: str, **options):
    store, versions = made
    path = folder / f"rows{suffix}"
    parquet = suffix == ".parquet"
    export(store, str(versions.rewards.ref), path, Options(format, parquet=parquet, **options))
    kind = "parquet" if parquet else "json"
    return load_dataset(kind, data_files=str(path), split="train", cache_dir=str(folder / "cache"))


def trained(made, folder: Path, name: str, rows):
    """The trainer of this name after one step on `rows`."""
    model_folder = made[1].policy.files.folder
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    kind, more = AutoModelForCausalLM, {}
    if name == "Reward":
        kind, more = AutoModelForSequenceClassification, {"num_labels": 1, "pad_token_id": PAD}
    trainer = getattr(trl, f"{name}Trainer")(
        model=kind.from_pretrained(model_folder, **more),
        args=getattr(trl, f"{name}Config")(str(folder / "trl"), **COMMON),
        train_dataset=rows,
        processing_class=tokenizer,
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize(
    ("name", "format", "ids"),
    [
        ("DPO", "dpo", False),
        ("KTO", "kto", False),
        ("SFT", "sft", False),
        ("SFT", "sft", True),
        ("Reward", "reward", False),
        ("Reward", "reward", True),
    ],
)
def test_a_trainer_takes_a_step(made, tmp_path, name, format, suffix, ids):
    trainer = trained(made, tmp_path, name, rows_of(made, tmp_path, suffix, format, ids=ids))
    assert trainer.state.global_step == 1
    assert all(entry["loss"] > 0 for entry in trainer.state.log_history if "loss" in entry)


def test_sft_reads_the_ids_that_were_sampled(made, tmp_path):
    """From the text as well as from --ids: prompt, answer and end token; the template's line feed
    after it is the only difference."""
    rollouts = made[1].rollouts.table().to_pylist()[:3]
    whole = [row["prompt_ids"] + row["completion_ids"] for row in rollouts]
    for ids in (False, True):
        folder = tmp_path / str(ids)
        folder.mkdir()
        rows = rows_of(made, folder, ".jsonl", "sft", ids=ids)
        prepared = trained(made, folder, "SFT", rows).train_dataset
        for row, expected in zip(prepared, whole, strict=False):
            assert row["input_ids"][: len(expected)] == expected
            assert len(row["input_ids"]) - len(expected) == (0 if ids else 1)


def test_verl_loads_the_prompts(made, tmp_path, monkeypatch):
    peer("verl")
    from omegaconf import OmegaConf
    from verl.utils.dataset.rl_dataset import RLHFDataset

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows_of(made, tmp_path, ".parquet", "verl")
    tokenizer = AutoTokenizer.from_pretrained(made[1].policy.files.folder)
    config = {"cache_dir": str(tmp_path / "verl"), "max_prompt_length": 200, "filter_overlong_prompts_workers": None}  # fmt: skip
    data = RLHFDataset(str(tmp_path / "rows.parquet"), tokenizer, OmegaConf.create(config))
    assert len(data) == 3
    row = data[0]
    assert row["reward_model"] == {"style": "rule", "ground_truth": "0"}
    assert row["raw_prompt"][1]["content"] == exported.question("q0")
