"""The table of algorithms, and a user's own row by a dotted path."""

import dataclasses
import hashlib
import inspect
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from quiver.schemas.errors import ConfigError, NumericError
from quiver.stages.common.config import parse
from quiver.stages.optimize import algorithms, effects, estimators, losses
from quiver.stages.optimize.algorithms import find_function
from quiver.stages.optimize.objective import Objective
from quiver.stages.optimize.stage import Config
from tests.stages.optimize import world
from tests.writing import run_here

run = partial(run_here, "optimize")


@pytest.mark.parametrize("row", algorithms.ALGORITHMS.values(), ids=lambda row: row.name)
def test_every_row_names_what_exists_and_says_what_it_is(row):
    assert callable(find_function("advantages", row.advantage))
    assert callable(find_function("losses", row.aggregation))
    surrogate = find_function("losses", row.surrogate)
    tokens = losses.Tokens(*[torch.zeros(3)] * 3, torch.tensor([0, 3]))
    options = {name: value for name, value in row.defaults.items() if name != "drop_zero_variance"}
    loss, clipped = surrogate(tokens, **options)
    assert loss.shape == clipped.shape == (3,)
    assert row.reference.startswith("https://") and row.description


@pytest.mark.parametrize(
    "name, advantage, aggregation, low, high",
    [
        ("grpo", "group_normalized", "sequence_mean", 0.2, 0.2),
        ("bnpo", "group_normalized", "token_mean", 0.2, 0.2),
        ("dapo", "group_normalized", "token_mean", 0.2, 0.28),
        ("dr_grpo", "group_centered", "constant", 0.2, 0.2),
        ("rloo", "leave_one_out", "token_mean", 0.2, 0.2),
        ("reinforce_pp", "batch_normalized", "token_mean", 0.2, 0.2),
        ("reinforce_pp_baseline", "batch_normalized_baseline", "token_mean", 0.2, 0.2),
    ],
)
def test_rows(name, advantage, aggregation, low, high):
    row = algorithms.resolve(name)
    assert (row.advantage, row.surrogate, row.aggregation) == (advantage, "clipped", aggregation)
    assert (row.defaults["clip_low"], row.defaults["clip_high"]) == (low, high)


@pytest.mark.parametrize(
    "name, surrogate, aggregation, defaults",
    [
        ("gspo", "sequence_clipped", "sequence_mean", {"clip_low": 3e-4, "clip_high": 4e-4}),
        ("cispo", "cispo", "token_mean", {"clip_max": 5.0}),
        ("sapo", "sapo", "sequence_mean", {"tau_positive": 1.0, "tau_negative": 1.05}),
        ("gmpo", "geometric_clipped", "sequence_mean", {"clip_low": 0.4, "clip_high": 0.4}),
        ("luspo", "sequence_clipped", "sequence_sum", {"clip_low": 2e-3, "clip_high": 2.5e-3}),
    ],
)
def test_rows_with_a_surrogate_of_their_own(name, surrogate, aggregation, defaults):
    row = algorithms.resolve(name)
    assert (row.advantage, row.surrogate, row.aggregation) == (
        "group_normalized",
        surrogate,
        aggregation,
    )
    assert row.defaults == defaults


@pytest.mark.parametrize(
    "given, said",
    [
        (
            {"algorithm": "cispo", "clip_high": 0.2},
            "clip_high is no option of algorithm 'cispo': leave it out; it takes clip_max",
        ),
        ({"algorithm": "grpo", "clip_max": 5.0}, "clip_max is no option of algorithm 'grpo'"),
        ({"algorithm": "ppo", "options": {"cap": 5.0}}, "cap is no option of algorithm 'ppo'"),
    ],
)
def test_an_option_that_the_surrogate_does_not_know_is_refused(given, said):
    with pytest.raises(ConfigError) as caught:
        parse(Config, given, "optimize")
    assert said in caught.value.message


@pytest.mark.parametrize(
    "given, said",
    [
        ({"correction": {"mode": "mask", "low": 3.0}}, "low must be < high = 2, got 3"),
        ({"correction": {"reject": "k3"}}, "reject needs reject_high, above reject_low = 0"),
        ({"correction": {"reject_high": 0.1}}, "reject_high have no effect without reject"),
        ({"betas": (0.9, 1.0)}, "betas.1: Input should be less than 1, got 1.0"),
        ({"betas": (-0.1, 0.9)}, "betas.0: Input should be greater than or equal to 0"),
        (
            {"options": {"clip_low": 0.5}},
            "options.clip_low has a field of its own: set optimize.clip_low",
        ),
        (
            {"algorithm": "mine.py:MINE", "options": {"drop_zero_variance": True}},
            "set optimize.drop_zero_variance",
        ),
    ],
)
def test_what_can_not_be_meant_is_refused(given, said):
    with pytest.raises(ConfigError) as caught:
        parse(Config, given, "optimize")
    assert said in caught.value.message


def test_a_seed_may_be_a_time_in_nanoseconds(store, policy):
    made = world.make(store, policy, world.even_share)
    config = Config(seed=1_790_000_000_000_000_000, minibatches=2, device="cpu")
    done = store.open(
        run(config, store, policy=policy.ref, rollouts=made[0].ref, rewards=made[1].ref)
    )
    assert done.manifest.metrics["steps"] == 2


def test_the_options_of_every_surrogate_are_those_of_its_function():
    assert {row.surrogate for row in algorithms.ALGORITHMS.values()} <= algorithms.OPTIONS.keys()
    for name, options in algorithms.OPTIONS.items():
        parameters = inspect.signature(find_function("losses", name)).parameters.values()
        assert tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY) == options


def test_single_rollouts_of_a_prompt_are_enough_for_reinforce_pp(store, policy):
    made = world.make(store, policy, world.even_share, groups=6, each=1)
    config = Config(algorithm="reinforce_pp", device="cpu")
    done = store.open(
        run(config, store, policy=policy.ref, rollouts=made[0].ref, rewards=made[1].ref)
    )
    table = store.open(done.manifest.metrics["advantages"]).table().to_pylist()
    rewards = [row["reward"] for row in made[1].table().to_pylist()]
    mean = sum(rewards) / 6
    std = (sum((x - mean) ** 2 for x in rewards) / 5) ** 0.5
    assert [row["advantage"] for row in table] == pytest.approx(
        [(x - mean) / (std + 1e-8) for x in rewards], rel=1e-5
    )


def test_statistics_are_of_the_batch_and_not_of_the_mini_batch(store, policy):
    made = world.make(store, policy, world.even_share, groups=6, each=1)
    refs = {"policy": policy.ref, "rollouts": made[0].ref, "rewards": made[1].ref}
    found = []
    for minibatches in (1, 3):
        done = store.open(
            run(
                Config(algorithm="reinforce_pp", device="cpu", minibatches=minibatches),
                store,
                **refs,
            )
        )
        table = store.open(done.manifest.metrics["advantages"]).table()
        found.append([table["rollout_id"].to_pylist(), table["advantage"].to_pylist()])
    assert found[0] == found[1]


def test_a_wrong_name_says_the_nearest():
    with pytest.raises(ConfigError, match=r"did you mean dapo\?"):
        parse(Config, {"algorithm": "dapoo"}, "optimize")


@pytest.mark.parametrize("name", ["no_such_module:ALGORITHM", "math:NOTHING", "math:pi"])
def test_a_dotted_path_that_leads_nowhere(name):
    with pytest.raises(ConfigError, match=r"optimize\.algorithm"):
        algorithms.resolve(name)


def test_an_edited_algorithm_is_another_one(tmp_path, monkeypatch):
    source = (
        "from quiver.stages.optimize.algorithms import Algorithm\nMINE = Algorithm('mine', "
        "'group_centered', 'clipped', 'constant')\n"
    )
    (tmp_path / "my_algo.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    first = Config(algorithm="my_algo:MINE").key()
    assert first == Config(algorithm="my_algo:MINE").key()
    (tmp_path / "my_algo.py").write_text(source + "# edited\n")
    assert Config(algorithm="my_algo:MINE").key() != first


def test_an_algorithm_in_a_file(tmp_path, monkeypatch):
    source = (
        "from quiver.stages.optimize.algorithms import Algorithm\nMINE = Algorithm('mine', "
        "'group_centered', 'clipped', 'constant')\n"
    )
    (tmp_path / "own_algo.py").write_text(source)
    assert algorithms.resolve(f"{tmp_path}/own_algo.py:MINE").name == "mine"
    monkeypatch.chdir(tmp_path)
    assert algorithms.resolve("own_algo:MINE").name == "mine"
    assert effects.source_hash("own_algo:MINE") == hashlib.sha256(source.encode()).hexdigest()
    with pytest.raises(ConfigError, match="has no Algorithm MIN; did you mean MINE"):
        algorithms.resolve("own_algo:MIN")


def test_an_own_algorithms_option_of_a_fields_name_is_that_field(tmp_path):
    path = tmp_path / "own_algo.py"
    path.write_text(OWN.replace("{'clip_low': 0.1}", "{'clip_low': 0.1, 'ratio_max': 2.0}"))
    plain = Config(algorithm=f"{path}:MINE").resolved()
    assert plain.surrogate_options() == {"clip_low": 0.1, "ratio_max": 2.0}
    assert Config(algorithm=f"{path}:MINE", ratio_max=3.0).resolved().ratio_max == 3.0
    for algorithm in (f"{path}:MINE", "dppo"):
        with pytest.raises(ConfigError, match=r"options\.ratio_max has a field of its own"):
            parse(Config, {"algorithm": algorithm, "options": {"ratio_max": 3.0}}, "optimize")


OWN = (
    "from quiver.stages.optimize.algorithms import Algorithm\nMINE = Algorithm('mine', "
    "'group_centered', 'clipped', 'constant', {'clip_low': 0.1})\n"
)


def test_an_own_aggregation_may_look_at_groups(tmp_path):
    source = OWN.replace("'constant'", "lambda lengths, most, groups: groups.double()")
    (tmp_path / "own_algo.py").write_text(source)
    row = algorithms.resolve(f"{tmp_path}/own_algo.py:MINE")
    objective = Objective(Config(clip_high=0.2), row)
    batch = SimpleNamespace(
        counted_tokens=lambda members: (torch.ones(len(members), dtype=torch.int64), members),
        old_logprobs=torch.zeros(3),
        groups=[5, 5, 7],
        max_completion_tokens=9,
    )
    assert objective.weights(batch, [1, 2]).tolist() == [0.0, 5.0, 7.0]


@pytest.mark.parametrize(
    ("credit", "algorithm", "is_idle"),
    [("rollout", "grpo", True), ("turn", "grpo", True), ("gae", "ppo", False)],
)
def test_rollouts_with_nothing_to_learn_are_passed_over(credit, algorithm, is_idle):
    """Where advantages are known before the pass, of turns too; a critic's come with it."""
    config = Config(algorithm=algorithm, credit=credit).resolved()
    assert Objective(config, config.row()).zero_is_idle is is_idle


def test_what_is_resolved_is_keyed_without_the_file(tmp_path):
    path = tmp_path / "own_algo.py"
    path.write_text(OWN)
    config = Config(algorithm=f"{path}:MINE", drop_zero_variance=True)
    resolved = config.resolved()
    assert (resolved.clip_low, resolved.aggregation) == (0.1, "constant")
    assert resolved.algorithm_source == hashlib.sha256(OWN.encode()).hexdigest()
    unkeyed = {name: value for name, value in resolved.key().items() if name != "clip_low"}
    assert unkeyed.items() <= {**config.key(), "aggregation": "constant"}.items()
    path.unlink()
    assert resolved.resolved() == resolved and resolved.resolved().key() == resolved.key()
    with pytest.raises(ConfigError, match="there is no file"):
        config.resolved()


def test_an_algorithm_with_another_hash_is_refused(tmp_path):
    (tmp_path / "own_algo.py").write_text(OWN)
    pinned = {"algorithm_source": "0" * 64}
    with pytest.raises(ConfigError, match="hash expected 000000000000…, found"):
        Config(algorithm=f"{tmp_path}/own_algo.py:MINE", **pinned).resolved()
    with pytest.raises(ConfigError, match="hash expected 000000000000…, found none…"):
        Config(algorithm="grpo", drop_zero_variance=False, **pinned).resolved()


def test_an_algorithm_that_was_edited_after_it_was_planned_does_not_train(store, policy, tmp_path):
    path = tmp_path / "own_algo.py"
    path.write_text(OWN)
    made = world.make(store, policy, world.even_share, groups=2, each=2)
    refs = {"policy": policy.ref, "rollouts": made[0].ref, "rewards": made[1].ref}
    resolved = world.config(algorithm=f"{path}:MINE").resolved()
    path.write_text(OWN.replace("0.1", "0.3"))
    before = list(map(str, store.versions()))
    with pytest.raises(ConfigError, match=r"own_algo.py:MINE: hash expected .*…, found"):
        run(resolved, store, **refs)
    assert list(map(str, store.versions())) == before


def test_what_the_table_fills_in_is_part_of_the_work(monkeypatch):
    filled = Config(algorithm="dapo").resolved()
    assert (filled.clip_low, filled.clip_high, filled.aggregation, filled.drop_zero_variance) == (
        0.2,
        0.28,
        "token_mean",
        True,
    )
    assert filled.key() == Config(algorithm="dapo", clip_high=0.28).resolved().key()
    assert Config(algorithm="dapo", drop_zero_variance=False).resolved().drop_zero_variance is False
    row = algorithms.ALGORITHMS["dapo"]
    changed = dataclasses.replace(row, defaults={**row.defaults, "clip_high": 0.3})
    monkeypatch.setitem(algorithms.ALGORITHMS, "dapo", changed)
    assert Config(algorithm="dapo").resolved().key() != filled.key()


@pytest.mark.parametrize(
    "name, field", [("cispo", "clip_max"), ("sapo", "tau_positive"), ("sapo", "tau_negative")]
)
def test_what_only_one_row_knows_is_part_of_the_work_too(monkeypatch, name, field):
    row = algorithms.ALGORITHMS[name]
    filled = Config(algorithm=name).resolved()
    assert getattr(filled, field) == row.defaults[field]
    monkeypatch.setitem(
        algorithms.ALGORITHMS, name, dataclasses.replace(row, defaults={**row.defaults, field: 2.0})
    )
    assert Config(algorithm=name).resolved().key() != filled.key()
    with pytest.raises(ConfigError, match=rf"{field}.*greater than 0"):
        parse(Config, {"algorithm": name, field: 0.0}, "optimize")


def test_a_cap_inside_the_clip_bound_is_refused():
    with pytest.raises(ConfigError, match=r"delta must be > 1 \+ clip_high = 1.28"):
        Config(algorithm="dapo", delta=1.25).resolved()
    assert Config(algorithm="grpo", delta=1.25).resolved().delta == 1.25


CRITICS = {
    "critic": "model", "value_coef": 0.5, "value_clip": None, "gamma": 0.9, "gae_lambda": 0.5, "bootstrap_length": True,
    "critic_learning_rate": 1e-3, "critic_warmup_steps": 3, "critic_lambda": 1.0,
    "reward_scaling": "running",
}  # fmt: skip


@pytest.mark.parametrize("name", CRITICS)
def test_an_option_of_a_critic_is_refused_where_there_is_none(name, tmp_path):
    given = {name: CRITICS[name]}
    assert Config(algorithm="ppo", **given).resolved()
    with pytest.raises(
        ConfigError, match=rf"{name} would have no effect: algorithm 'grpo' has no critic.*: ppo"
    ):
        parse(Config, given, "optimize")
    source = (
        "from quiver.stages.optimize.algorithms import Algorithm\n"
        "NONE = Algorithm('mine', 'group_normalized', 'reinforce', 'token_mean')\n"
        "OWN = Algorithm('mine', 'gae', 'clipped', 'token_mean', advantage_of='tokens', "
        "columns=('values', 'last_values'))\n"
    )
    (tmp_path / "rows.py").write_text(source)
    assert Config(algorithm=f"{tmp_path}/rows.py:OWN", **given).resolved()
    with pytest.raises(ConfigError, match=f"{name} would have no effect"):
        Config(algorithm=f"{tmp_path}/rows.py:NONE", **given).resolved()


def test_an_own_advantage_of_tokens_takes_the_discounts_that_it_names(tmp_path):
    (tmp_path / "rows.py").write_text(
        "from quiver.stages.optimize.algorithms import Algorithm\n"
        "def discounted(rewards, offsets, gae_lambda):\n    return rewards\n"
        "OWN = Algorithm('mine', discounted, 'reinforce', 'token_mean', advantage_of='tokens')\n"
    )
    own = f"{tmp_path}/rows.py:OWN"
    assert Config(algorithm=own, gae_lambda=0.5).resolved()
    with pytest.raises(ConfigError, match="gamma would have no effect"):
        Config(algorithm=own, gamma=0.5).resolved()


def test_defaults_that_are_written_out_go_through_every_algorithm():
    with pytest.raises(
        ConfigError, match=r"value_coef, gamma would .* default: value_coef = 0.1, gamma = 1.0\)"
    ):
        parse(Config, {"value_coef": 0.5, "gamma": 0.5}, "optimize")
    for name in algorithms.ALGORITHMS:
        assert Config(algorithm=name, value_coef=0.1, gamma=1.0).resolved()
        assert parse(Config, Config(algorithm=name).model_dump(mode="json"), "optimize").resolved()


def test_a_critic_that_can_not_learn_does_not_warm_up():
    with pytest.raises(ConfigError, match="nothing would learn"):
        parse(Config, {"algorithm": "ppo", "value_coef": 0, "critic_warmup_steps": 3}, "optimize")


def test_what_is_left_out_has_no_value_to_bootstrap():
    with pytest.raises(ConfigError, match="bootstrap_length is for completions cut by length"):
        parse(
            Config, {"algorithm": "ppo", "bootstrap_length": True, "on_length": "mask"}, "optimize"
        )


def test_the_readmes_algorithm_trains(store, policy, tmp_path, monkeypatch):
    text = (Path(algorithms.__file__).parent / "README.md").read_text()
    (tmp_path / "readme_algo.py").write_text(text.split("```python")[-1].split("```")[0])
    monkeypatch.syspath_prepend(tmp_path)
    made = world.make(store, policy, world.even_share)
    config = Config(algorithm="readme_algo:ALGORITHM", options={"cap": 3.0}, device="cpu")
    done = store.open(
        run(config, store, policy=policy.ref, rollouts=made[0].ref, rewards=made[1].ref)
    )
    (row,) = store.open(done.manifest.metrics["updates"]).table().to_pylist()
    assert row["applied"] and row["clip_fraction"] == 0.0 and row["grad_norm"] > 0


# -- another advantage than the algorithm's


def advantages_of(store, policy, made, **values) -> list[float]:
    """What the stage saves."""
    done = world.trained(store, policy, made, world.config(**values))
    return store.open(done.manifest.metrics["advantages"]).table()["advantage"].to_pylist()


@pytest.mark.parametrize(
    "advantage, epsilon",
    [(None, 0.5), ("batch_scaled", None), ("batch_scaled", 0.5), ("group_centered", None)],
)
def test_the_stage_trains_on_the_advantage_that_is_chosen(store, policy, advantage, epsilon):
    made = world.make(store, policy, world.even_share)
    rewards = torch.tensor(made[1].table()["reward"].to_pylist(), dtype=torch.float64).view(4, 4)
    centered = rewards - rewards.mean(1, keepdim=True)
    scale = {
        None: rewards.std(1, keepdim=True) + 0.5,
        "batch_scaled": rewards.std() + (epsilon or 1e-4),
        "group_centered": 1.0,
    }[advantage]
    found = advantages_of(store, policy, made, advantage=advantage, advantage_epsilon=epsilon)
    assert found == pytest.approx((centered / scale).flatten().tolist(), rel=1e-5)


def test_the_stage_takes_k(store, policy):
    made = world.make(store, policy, world.even_share)
    rewards = torch.tensor(made[1].table()["reward"].to_pylist())
    groups = torch.arange(4).repeat_interleave(4)
    found = advantages_of(store, policy, made, algorithm="pass_at_k", pass_k=2)
    assert found == pytest.approx(estimators.pass_at_k(rewards, groups, k=2).tolist())
    with pytest.raises(NumericError, match="16 of 16 rollouts are scored, no advantage"):
        advantages_of(store, policy, made, algorithm="pass_at_k")  # of four there is one choice


@pytest.mark.parametrize(
    "given, said",
    [
        ({"algorithm": "ppo", "advantage": "group_centered"}, "without its advantages of tokens"),
        (
            {"algorithm": "rloo", "advantage_epsilon": 0.1},
            "advantage_epsilon would have no effect: the advantage is 'leave_one_out'",
        ),
        ({"advantage": "group_centered", "advantage_epsilon": 0.1}, "would have no effect"),
        (
            {"algorithm": "gdpo", "kl_in_reward": True, "kl_coef": 0.1},
            "kl_in_reward would have no effect",
        ),
    ],
)
def test_an_advantage_that_can_not_be_is_refused(given, said):
    with pytest.raises(ConfigError) as caught:
        parse(Config, given, "optimize")
    assert said in caught.value.message


def test_an_own_advantage_has_no_epsilon(tmp_path):
    source = OWN.replace("'group_centered'", "lambda rewards, groups: rewards")
    (tmp_path / "own_algo.py").write_text(source)
    name = f"{tmp_path}/own_algo.py:MINE"
    with pytest.raises(ConfigError, match="advantage_epsilon would have no effect"):
        Config(algorithm=name, advantage_epsilon=0.1).resolved()
    chosen = Config(algorithm=name, advantage="group_normalized", advantage_epsilon=0.1)
    assert chosen.resolved().row().advantage == "group_normalized"


def test_the_options_of_every_advantage_are_those_of_its_function():
    for name, options in effects.ADVANTAGE_OPTIONS.items():
        parameters = inspect.signature(find_function("advantages", name)).parameters
        assert set(options) <= parameters.keys() and set(options) <= effects.ADVANTAGE_FIELDS.keys()
    for name in Config.model_fields["advantage"].annotation.__args__[0].__args__:
        function = find_function("advantages", name)
        takes = inspect.signature(function).parameters.keys() & effects.ADVANTAGE_FIELDS.keys()
        assert takes == set(effects.ADVANTAGE_OPTIONS.get(name, ()))
