"""How the stage goes on from iteration to iteration, that it learns, and what it leaves alone."""

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from quiver.schemas.errors import ConfigError
from quiver.stages.core.config import Config
from quiver.stages.core.store import Store
from quiver.stages.evaluate.stage import Config as Evaluation
from quiver.stages.model.checkpoints import model_entry
from quiver.stages.optimize import tracking
from quiver.stages.turns.statistics import measure
from tests import episodes
from tests.stages.optimize import world
from tests.stages.optimize.world import config as _config
from tests.stages.optimize.world import trained as _run
from tests.tiny import make_policy
from tests.vllm_process import checked
from tests.writing import begin, run_here

LATER = {"max_staleness": 3, "audit": {"enabled": False}}
"""A later iteration on the same rollouts, which are stale by then."""


@pytest.mark.parametrize(
    "kind, fields",
    [
        ("llama", {}),
        ("llama", {"schedule": "cosine", "warmup_steps": 1, "total_steps": 7}),
        ("llama", {"precision": "bf16_stochastic"}),
        ("llama", {"optimizer": "adamw_8bit"}),
        ("llama", {"lora": {"rank": 4, "alpha": 12}}),
        ("t5", {"lora": {"rank": 4, "alpha": 12}}),
    ],
)
def test_two_iterations_of_one_step_are_one_of_two_bit_for_bit(store, kind, fields):
    policy = make_policy(store, kind, kind)
    made = world.by_engine(store, policy)
    fields = {**fields, "audit": {"max_mean_gap": 1.0}, "max_staleness": 1}
    together = _run(store, policy, made, _config(epochs=2, **fields), into="together")
    first = _run(store, policy, made, _config(**fields))
    second = _run(store, first, made, _config(**fields))
    assert second.manifest.metrics["step"] == 2
    names = [name for name in together.files.names if name.endswith(".safetensors")]
    assert len(names) == 2 + ("lora" in fields)
    for name in names:
        assert world.are_equal(world.weights(together, name), world.weights(second, name)), name


def test_a_stage_that_would_learn_nothing_is_refused(store, train, caplog):
    """Linear over two steps: the third, and each after it, has the learning rate 0."""
    fields = {**LATER, "schedule": "linear", "total_steps": 2}
    first = train(**fields)
    assert "learning rate is 0" not in caplog.text
    second = train(start=first, epochs=3, **fields)
    assert "is 0 from step 2 on, and this stage goes from step 1 up to step 3" in caplog.text
    rates = [row["learning_rate"] for row in world.updates(store, second)]
    assert rates == [pytest.approx(rates[0]), 0.0, 0.0] and rates[0] > 0
    with pytest.raises(ConfigError, match="has taken 4 steps: nothing would be") as caught:
        train(start=second, **fields)
    assert caught.value.next == "raise optimize.total_steps above 4"
    just_ended = train(start=first, **fields)
    with pytest.raises(ConfigError, match="has taken 2 steps: nothing would be"):
        train(start=just_ended, **fields)


def test_without_the_state_the_moments_start_anew(store, made, train):
    first = train(save_optimizer=False)
    assert not (first.files.folder / "optimizer").exists()
    fresh = train(start=first, **LATER)
    kept = _run(store, train(), made, _config(**LATER))
    assert not world.are_equal(world.weights(fresh), world.weights(kept))
    assert fresh.manifest.metrics["step"] == 2


def test_neither_engine_nor_tokenizer_is_touched(store, policy, made):
    """And a store opened anew gives the same answer: nothing is kept in memory between runs."""
    module, refs = "tests.stages.optimize.untouched_checks", [version.ref for version in made]
    assert checked(module, store.url, *refs) == "tiny/policy@1"
    assert str(_run(Store(store.url), policy, made).ref) == "tiny/policy@1"


def test_bf16_autocast_trains_and_saves_what_an_engine_loads(store):
    policy = make_policy(store, "qwen", "qwen3")
    made = world.make(store, policy, world.even_share, run="qwen")
    done = _run(store, policy, made, _config(precision="bf16"))
    metrics = done.manifest.metrics
    assert 0 < metrics["audit"]["mean_gap"] < 0.1
    assert metrics["packing"] == "shared" and metrics["padding_share"] == 0
    assert {value.dtype for value in world.weights(done).values()} == {torch.bfloat16}


def test_each_line_of_trainings_has_a_tracker_run_of_its_own(store, policy, made, train, tmp_path):
    """And an evaluation is beside the training of its policy."""
    trackers = {**LATER, "trackers": ["tensorboard"], "tracker_folder": str(tmp_path)}

    def trained(start, rate, **options):
        return train(start=start, learning_rate=rate, **trackers, **options)

    first = trained(policy, 0.01)
    other = trained(policy, 0.02)
    on = {"first": trained(first, 0.01), "other": trained(other, 0.01)}
    cell = trained(on["other"], 0.01, note="sweep 0123456789ab, cell 1", force=True)
    again = trained(policy, 0.01, force=True)
    assert again.manifest.run_key == first.manifest.run_key
    key = other.manifest.run_key[:8]
    names = {"first": "tiny", "other": f"tiny-{key}", "cell": f"tiny-{cell.manifest.run_key[:8]}"}
    losses = {}
    for name in names.values():
        events = EventAccumulator(str(tmp_path / f"{name}-{store.id[:8]}")).Reload()
        losses[name] = sorted(point.step for point in events.Scalars("loss"))
    assert losses == {names["first"]: [0, 0, 1], names["other"]: [0, 1], names["cell"]: [2]}
    assert len([*tmp_path.glob("tiny*")]) == 3

    def curve(measured):
        rollouts = world.write_rollouts(store, measured, made[0].table().to_pylist())
        rewards = world.write_rewards(store, rollouts, world.even_share)
        refs = {"rollouts": rollouts.ref, "rewards": rewards.ref}
        evaluation = run_here("evaluate", Evaluation(), store, **refs)
        return tracking.evaluated(store, store.open(evaluation))[:2]

    assert curve(policy) == ("tiny", 0)
    assert curve(on["first"]) == (names["first"], 2)
    assert curve(on["other"]) == (names["other"], 2)
    assert curve(cell) == (names["cell"], 3)


@pytest.mark.parametrize(
    ("kind", "ends", "share"),
    [
        ("turns", ["max_turns", "max_tokens", "answered", "context"], 0.75),
        ("turns", ["answered", "timeout"], 0.0),
        ("answers", ["length", "stop"], 0.5),
    ],
)
def test_the_share_of_cut_answers_counts_each_limit_of_an_episode(store, policy, kind, ends, share):
    if kind == "turns":
        rows = [
            episodes.row(f"a-{number}", [episodes.turn(1)], end_reason=end)
            for number, end in enumerate(ends)
        ]
        table = episodes.table_of(rows)
        about = {"stage": "generate", "stage_version": 1, "config": Config()}
        models = (model_entry("policy", policy),)
        with begin(store, "tiny", "rollouts", models=models, inputs={}, **about) as work:
            work.write(0, table)
            sampled = work.commit(metrics=measure(table), status={"stop": len(rows)})
        paid = episodes.write_rewards(store, sampled, lambda row: [1.0])
    else:
        rows = world.rows_of(policy, 1, len(ends))
        rows = [row | {"finish_reason": end} for row, end in zip(rows, ends, strict=True)]
        sampled, paid = world.scored(store, policy, rows)
    inputs = {"policy": policy, "rollouts": sampled, "rewards": paid}
    numbers = tracking.learned_from(inputs)
    assert numbers["completion_tokens/truncated"] == share


def test_means_of_parts_count_the_answers_that_have_a_number(store, policy, tmp_path):
    """Of two sets of rollouts one has a single answer that is scored."""
    (tmp_path / "mine.py").write_text(
        "def first(completion_ids, **_):\n"
        "    return [None if ids[0] == 9 else ids[0] for ids in completion_ids]\n"
    )
    score = {"functions": [{"use": f"{tmp_path}/mine.py:first"}]}
    inputs = {"policy": policy}
    for ending, ids in (("", [1, 9, 9, 9]), (".2", [0, 0, 0, 0])):
        rows = world.rows_of(policy, 1, 4)
        for row, id in zip(rows, ids, strict=True):
            row |= {"completion_ids": [id], "old_logprobs": [-1.0]}
        prompts = world.write_prompts(store, rows)
        sampled = world.write_rollouts(store, policy, rows, prompts=prompts)
        inputs[f"rollouts{ending}"] = sampled
        inputs[f"rewards{ending}"] = store.open(
            run_here("reward", score, store, rollouts=sampled.ref)
        )
    numbers = tracking.learned_from(inputs)
    assert numbers["reward/parts/first"] == numbers["reward/mean"] == pytest.approx(0.2)


def test_trackers_write_where_they_are_told(store, train, tmp_path, monkeypatch, caplog):
    """A tracker that fails later, as on a disk that is full, costs its curve alone."""
    trackers = {"trackers": ["tensorboard"], "tracker_folder": str(tmp_path / "logs")}
    done = train(**trackers)
    events = EventAccumulator(str(tmp_path / "logs" / f"tiny-{store.id[:8]}")).Reload()
    row = world.updates(store, done)[0]
    for name in ("loss", "grad_norm", "tokens"):
        assert events.Scalars(name)[0].value == pytest.approx(row[name])

    class Failing(tracking.GeneralTracker):
        name, requires_logging_directory, tracker = "failing", True, None

        def __init__(self, *_, **__):
            super().__init__()

        def log(self, values, step=None, **_):
            raise OSError("no space left")

    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "tensorboard", Failing)
    assert train(seed=1, **trackers).ref.version == 2
    assert "tensorboard did not get all numbers: no space left" in caplog.text
