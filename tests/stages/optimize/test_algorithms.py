"""The table of algorithms, and a user's own row by a dotted path."""

import hashlib
import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from quiver.schemas.errors import ConfigError
from quiver.stages.core.config import parse
from quiver.stages.optimize import algorithms, config, contract, estimators, losses
from quiver.stages.optimize.algorithms import find_function
from quiver.stages.optimize.objective import Objective
from quiver.stages.optimize.stage import Config
from tests.stages.optimize import world

CLIP = {"clip_low": 0.2, "clip_high": 0.2}
ROWS = {
    "grpo": ("group_normalized clipped sequence_mean", CLIP),
    "bnpo": ("group_normalized clipped token_mean", CLIP),
    "dapo": (
        "group_normalized clipped token_mean",
        {"clip_low": 0.2, "clip_high": 0.28, "drop_zero_variance": True},
    ),
    "dr_grpo": ("group_centered clipped constant", CLIP),
    "gspo": (
        "group_normalized sequence_clipped sequence_mean",
        {"clip_low": 3e-4, "clip_high": 4e-4},
    ),
    "cispo": ("group_normalized cispo token_mean", {"clip_max": 5.0}),
    "sapo": (
        "group_normalized sapo sequence_mean",
        {"tau_positive": 1.0, "tau_negative": 1.05},
    ),
    "gmpo": (
        "group_normalized geometric_clipped sequence_mean",
        {"clip_low": 0.4, "clip_high": 0.4},
    ),
    "luspo": (
        "group_normalized sequence_clipped sequence_sum",
        {"clip_low": 2e-3, "clip_high": 2.5e-3},
    ),
    "rloo": ("leave_one_out clipped token_mean", CLIP),
    "reinforce_pp": ("batch_normalized clipped token_mean", CLIP),
    "reinforce_pp_baseline": ("batch_normalized_baseline clipped token_mean", CLIP),
    "ppo": ("gae clipped token_mean", CLIP),
}
"""What the papers and the contract name; the golden trace has the others too."""
ROW = "from quiver.stages.optimize.algorithms import Algorithm\n"
OWN = ROW + "MINE = Algorithm('mine', 'group_centered', 'clipped', 'constant', {'clip_low': 0.1})\n"


@pytest.fixture
def own(tmp_path):
    """(source) -> the dotted path of MINE in a file with it."""

    def write(source: str = OWN) -> str:
        (tmp_path / "own_algo.py").write_text(source)
        return f"{tmp_path}/own_algo.py:MINE"

    return write


def test_the_rows():
    for name, (functions, defaults) in ROWS.items():
        row = algorithms.find_algorithm(name)
        assert [row.advantage, row.surrogate, row.aggregation] == functions.split(), name
        assert dict(row.defaults) == defaults, name
    for row in algorithms.ALGORITHMS.values():
        assert callable(find_function("advantages", row.advantage))
        assert callable(find_function("losses", row.aggregation))
        options = {
            name: row.defaults[name] for name in row.defaults.keys() - {"drop_zero_variance"}
        }
        tokens = losses.Tokens(*[torch.zeros(3)] * 3, torch.tensor([0, 3]))
        loss, clipped = find_function("losses", row.surrogate)(tokens, **options)
        assert loss.shape == clipped.shape == (3,)
        assert row.paper.startswith("https://") and row.description


def test_the_tables_of_options_are_those_of_the_functions():
    assert {row.surrogate for row in algorithms.ALGORITHMS.values()} <= algorithms.OPTIONS.keys()
    for name, options in algorithms.OPTIONS.items():
        parameters = inspect.signature(find_function("losses", name)).parameters.values()
        assert tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY) == options
    for name in Config.model_fields["advantage"].annotation.__args__[0].__args__:
        parameters = inspect.signature(find_function("advantages", name)).parameters
        takes = parameters.keys() & config.ADVANTAGE_FIELDS.keys()
        assert takes == set(config.ADVANTAGE_OPTIONS.get(name, ()))


@pytest.mark.parametrize("name", ["no_such_module:ALGORITHM", "math:NOTHING", "math:pi"])
def test_a_dotted_path_that_leads_nowhere(name):
    with pytest.raises(ConfigError, match=r"optimize\.algorithm"):
        algorithms.find_algorithm(name)


def test_an_algorithm_in_a_file_or_a_module(own, tmp_path, monkeypatch):
    assert algorithms.find_algorithm(own()).name == "mine"
    monkeypatch.chdir(tmp_path)
    assert algorithms.find_algorithm("own_algo:MINE").name == "mine"
    first = Config(algorithm="own_algo:MINE").key()
    assert first["algorithm_source"] == hashlib.sha256(OWN.encode()).hexdigest()
    with pytest.raises(ConfigError, match="has no Algorithm MIN; did you mean MINE"):
        algorithms.find_algorithm("own_algo:MIN")
    own(OWN + "# edited\n")
    assert Config(algorithm="own_algo:MINE").key() != first


def test_an_own_algorithms_option_of_a_fields_name_is_that_field(own):
    algorithm = own(OWN.replace("{'clip_low': 0.1}", "{'clip_low': 0.1, 'ratio_max': 2.0}"))
    plain = Config(algorithm=algorithm).resolved()
    assert plain.surrogate_options() == {"clip_low": 0.1, "ratio_max": 2.0}
    assert Config(algorithm=algorithm, ratio_max=3.0).resolved().ratio_max == 3.0
    with pytest.raises(ConfigError, match=r"options\.ratio_max has a field of its own"):
        parse(Config, {"algorithm": algorithm, "options": {"ratio_max": 3.0}}, "optimize")


def test_an_own_aggregation_may_look_at_groups(own):
    source = OWN.replace("'constant'", "lambda lengths, most, groups: groups.double()")
    row = algorithms.find_algorithm(own(source))
    objective = Objective(Config(clip_high=0.2), row)
    batch = SimpleNamespace(
        counted_tokens=lambda members: (torch.ones(len(members), dtype=torch.int64), members),
        old_logprobs=torch.zeros(3),
        groups=[5, 5, 7],
        max_completion_tokens=9,
    )
    assert objective.weights(batch, [1, 2]).tolist() == [0.0, 5.0, 7.0]
    counted = Config(algorithm=own(source), on_length="mask", mask_counted=True)
    with pytest.raises(ConfigError, match="mask_counted"):
        counted.resolved()
    assert counted.model_copy(update={"aggregation": "sequence_mean"}).resolved().mask_counted


def in_place(first, *others, **options):
    """Overwrites every tensor that it gets; returns the first."""
    for tensor in (*others, *options.values()):
        if isinstance(tensor, torch.Tensor):
            tensor.mul_(2)
    return first.mul_(2)


ROLES = {
    "rollouts": (lambda rewards, groups, lengths: in_place(rewards, groups, lengths=lengths)),
    "turns": in_place,
    "tokens": lambda rewards, offsets, groups: in_place(rewards, offsets, groups=groups),
    "aggregation": lambda lengths, most, groups: in_place(lengths, groups=groups).double(),
}


@pytest.mark.parametrize("role", ROLES)
def test_an_own_function_that_works_in_place_changes_only_its_own_tensors(role):
    first = torch.ones(4, dtype=torch.int64 if role == "aggregation" else torch.float32)
    column = torch.arange(4)
    others, options = {
        "rollouts": ([column], {"lengths": column}),
        "turns": ([column, column], {}),
        "tokens": ([], {"offsets": column, "groups": column}),
        "aggregation": ([9], {"groups": column}),
    }[role]
    answer = contract.checked("mine", role, ROLES[role])(first, *others, **options)
    assert answer.tolist() == [2.0] * 4
    assert first.tolist() == [1] * 4 and column.tolist() == [0, 1, 2, 3]


def test_an_own_surrogate_that_works_in_place_changes_only_its_own_tensors():
    def surrogate(tokens):
        for tensor in tokens:
            tensor.mul_(2)
        return -tokens.logprobs * tokens.advantages, tokens.advantages > 9

    columns = [torch.full((3,), value) for value in (-1.0, -1.0, 1.0)]
    columns[0].requires_grad_()
    tokens = losses.Tokens(*columns, torch.tensor([0, 3]))
    loss, _ = contract.checked("mine", "surrogate", surrogate)(tokens)
    assert loss.tolist() == [4.0] * 3
    loss.sum().backward()
    assert columns[0].grad.tolist() == [-4.0] * 3
    assert [column.tolist() for column in tokens] == [[-1.0] * 3, [-1.0] * 3, [1.0] * 3, [0, 3]]


def call_of(role: str, values: torch.Tensor):
    """(first argument) -> what is made of an own function's answer, which is `values`."""
    function, others, options = {
        "rollouts": (lambda rewards, groups: values, [9], {}),
        "turns": (lambda rewards, offsets, groups: values, [9, 9], {}),
        "tokens": (lambda rewards, offsets: values, [], {"offsets": torch.tensor([0, 4])}),
        "aggregation": (lambda lengths, most: values, [9], {}),
    }[role]
    return lambda first: contract.checked("mine", role, function)(first, *others, **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("role", ["rollouts", "turns", "tokens", "surrogate", "aggregation"])
def test_an_own_function_may_return_any_float(role, dtype):
    """Its caller gets the dtype that it computes with, without a gradient but for the loss."""
    halves = torch.full((4,), 0.5, dtype=dtype, requires_grad=True)
    if role == "surrogate":
        first = losses.Tokens(*[torch.zeros(4, requires_grad=True)] * 3, torch.tensor([0, 4]))
        answer, _ = contract.checked(
            "mine", role, lambda tokens: (tokens.logprobs.to(dtype) + 0.5, tokens.logprobs > 9)
        )(first)
    else:
        first = torch.tensor([4]) if role == "aggregation" else torch.zeros(4)
        answer = call_of(role, halves)(first)
    assert answer.dtype == (torch.float64 if role == "aggregation" else torch.float32)
    assert answer.tolist() == [0.5] * 4 and answer.requires_grad is (role == "surrogate")


def test_an_own_function_that_raises_is_named_unless_memory_is_short():
    def advantage(rewards, groups):
        raise error

    call = contract.checked("mine.py:MINE advantage", "rollouts", advantage)
    error = KeyError("x")
    with pytest.raises(ConfigError, match="raised KeyError: 'x'") as caught:
        call(torch.zeros(2), torch.zeros(2))
    assert caught.value.object == "optimize.algorithm mine.py:MINE advantage"
    assert caught.value.__cause__ is error
    error = RuntimeError("CUDA out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        call(torch.zeros(2), torch.zeros(2))


@pytest.mark.parametrize("builtin", [torch.sub, torch.tensor(1.0).sub])
def test_a_builtin_whose_arguments_python_cannot_tell_is_refused(builtin):
    with pytest.raises(ConfigError, match="Python cannot tell its arguments") as caught:
        contract.checked("mine.py:MINE advantage", "rollouts", builtin)
    assert "call it in a function of your own" in caught.value.message


@pytest.mark.parametrize(
    ("role", "bad", "is_refused"),
    [
        ("rollouts", torch.inf, True),
        ("rollouts", torch.nan, False),
        ("turns", -torch.inf, True),
        ("tokens", torch.inf, True),
        ("tokens", torch.nan, True),
        ("rollouts", 1e300, True),
        ("aggregation", torch.nan, True),
    ],
)
def test_own_numbers_are_finite_but_for_rollouts_without_an_advantage(role, bad, is_refused):
    call = call_of(role, torch.tensor([0.0, bad, 1.0], dtype=torch.float64))
    if not is_refused:
        assert call(torch.ones(3)).isnan().tolist() == [False, True, False]
        return
    with pytest.raises(ConfigError, match=r"expected finite .*, found .* at \[1\]"):
        call(torch.ones(3))


@pytest.mark.parametrize(
    ("credit", "algorithm", "is_idle"),
    [("rollout", "grpo", True), ("turn", "grpo", True), ("gae", "ppo", False)],
)
def test_rollouts_with_nothing_to_learn_are_passed_over(credit, algorithm, is_idle):
    """Advantages of turns are known before the pass; a critic's come with it."""
    config = Config(algorithm=algorithm, credit=credit).resolved()
    assert Objective(config, config.chosen_algorithm()).zero_is_idle is is_idle


def test_what_is_resolved_needs_the_file_no_more(own, tmp_path):
    config = Config(algorithm=own(), drop_zero_variance=True)
    resolved = config.resolved()
    assert (resolved.clip_low, resolved.aggregation) == (0.1, "constant")
    assert resolved.needs_prox is False and config.model_copy(update={"clip_low": 0.01}).resolved()
    unkeyed = {name: value for name, value in resolved.key().items() if name != "clip_low"}
    assert unkeyed.items() <= {**config.key(), "aggregation": "constant"}.items()
    (tmp_path / "own_algo.py").unlink()
    assert resolved.resolved() == resolved and resolved.resolved().key() == resolved.key()
    with pytest.raises(ConfigError, match="there is no file"):
        config.resolved()


def test_tight_bounds_of_an_own_algorithm_are_known_once_it_is_resolved(own):
    assert Config(algorithm=own(OWN.replace("0.1", "0.01"))).resolved().needs_prox


def test_an_algorithm_that_was_edited_after_it_was_planned_does_not_train(store, train, own):
    pinned = {"algorithm_source": "0" * 64}
    with pytest.raises(ConfigError, match="hash expected 000000000000…, found"):
        Config(algorithm=own(), **pinned).resolved()
    with pytest.raises(ConfigError, match="hash expected 000000000000…, found none…"):
        Config(algorithm="grpo", drop_zero_variance=False, **pinned).resolved()
    resolved = world.config(algorithm=own()).resolved()
    own(OWN.replace("0.1", "0.3"))
    before = list(map(str, store.versions()))
    with pytest.raises(ConfigError, match=r"own_algo.py:MINE: hash expected .*…, found"):
        train(resolved)
    assert list(map(str, store.versions())) == before


def test_fields_without_effect_on_an_own_algorithm_are_refused(own):
    """Once its file has run, which tells its advantage."""
    critic = own(
        ROW + "MINE = Algorithm('mine', 'gae', 'clipped', 'token_mean', advantage_of='tokens', "
        "needs=('values', 'last_values'))\n"
    )
    assert Config(algorithm=critic, critic="model", gamma=0.9).resolved()
    discounted = own(
        ROW + "def discounted(rewards, offsets, gae_lambda):\n    return rewards\n"
        "MINE = Algorithm('mine', discounted, 'reinforce', 'token_mean', advantage_of='tokens')\n"
    )
    assert Config(algorithm=discounted, gae_lambda=0.5).resolved()
    plain = OWN.replace("'group_centered'", "lambda rewards, groups: rewards")
    for source, fields in (
        (None, {"gamma": 0.5}),
        (OWN, {"critic": "model"}),
        (plain, {"advantage_epsilon": 0.1}),
    ):
        algorithm = own(source) if source else discounted
        (name,) = fields
        with pytest.raises(ConfigError, match=f"{name} would have no effect"):
            Config(algorithm=algorithm, **fields).resolved()
    chosen = Config(algorithm=own(plain), advantage="group_normalized", advantage_epsilon=0.1)
    assert chosen.resolved().chosen_algorithm().advantage == "group_normalized"


def test_the_readmes_algorithm_trains(store, train, tmp_path, monkeypatch):
    text = (Path(algorithms.__file__).parent / "README.md").read_text()
    (tmp_path / "readme_algo.py").write_text(text.split("```python")[-1].split("```")[0])
    monkeypatch.syspath_prepend(tmp_path)
    config = world.config(algorithm="readme_algo:ALGORITHM", options={"cap": 3.0})
    (row,) = world.updates(store, train(config))
    assert row["applied"] and row["clip_fraction"] == 0.0 and row["grad_norm"] > 0


@pytest.mark.parametrize(
    "fields",
    [
        {"advantage_epsilon": 0.5},
        {"advantage": "batch_scaled"},
        {"advantage": "batch_scaled", "advantage_epsilon": 0.5},
        {"algorithm": "pass_at_k", "pass_k": 2},
    ],
)
def test_the_stage_trains_on_the_advantage_that_is_chosen(store, made, train, fields):
    rewards = torch.tensor(made[1].table()["reward"].to_pylist(), dtype=torch.float64).view(4, 4)
    epsilon = fields.get("advantage_epsilon", 1e-4)
    if "pass_k" in fields:
        groups = torch.arange(4).repeat_interleave(4)
        expected = estimators.pass_at_k(rewards.flatten(), groups, k=2)
    elif "advantage" in fields:
        expected = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std() + epsilon)
    else:
        expected = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 0.5)
    done = train(**fields)
    assert world.gains(store, done) == pytest.approx(expected.flatten().tolist(), rel=1e-5)


def test_an_advantage_that_works_in_place_leaves_the_rewards_of_the_manifest(
    store, made, train, own
):
    source = (
        ROW + "def centered(rewards, groups):\n    rewards -= rewards.nanmean()\n"
        "    return rewards.double()\n"
        "MINE = Algorithm('mine', centered, 'reinforce', 'token_mean')\n"
    )
    rewards = torch.tensor(made[1].table()["reward"].to_pylist())
    done = train(algorithm=own(source))
    assert done.manifest.metrics["reward_mean"] == pytest.approx(float(rewards.mean()))
    assert world.gains(store, done) == pytest.approx((rewards - rewards.mean()).tolist())
