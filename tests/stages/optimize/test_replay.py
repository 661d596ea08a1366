"""Several versions of rollouts in one update: numbers against a float64 loop, what belongs
together, what is refused."""

import shutil
from functools import partial
from types import SimpleNamespace

import pytest

from quiver.flows.verification import verify
from quiver.schemas.errors import ConfigError, LineageError, NumericError
from quiver.stages.core.store import Store
from quiver.stages.logprobs.config import Config as LogprobsConfig
from quiver.stages.optimize.inputs import open_inputs
from quiver.stages.optimize.trainer import Trainer
from tests.stages.optimize import world
from tests.stages.optimize.test_trainer import _compare, _expected
from tests.tiny import make_policy
from tests.writing import run_here

_config = partial(world.config, max_staleness=1)


def _sampled(policy, prefix: str, temperature: float = 1.0, seed: int = 0) -> list[dict]:
    """Sixteen rollouts of the same four prompts each time, so with the same group ids; ids start
    with `prefix`."""
    rows = world.rows_of(policy, 4, 4, temperature=temperature, seed=seed)
    return [{**row, "rollout_id": f"{prefix}-{row['rollout_id']}"} for row in rows]


@pytest.fixture(scope="module")
def _store_of_two(tmp_path_factory):
    """A store with what `two` names, and the references to it."""
    store = Store(tmp_path_factory.mktemp("two") / "store")
    policy = make_policy(store)
    older = world.write_rollouts(store, policy, _sampled(policy, "a"), sampling={"max_tokens": 20})
    scored = world.write_rewards(store, older, world.even_share)
    start = world.trained(store, policy, (older, scored), _config())
    fresh = world.write_rollouts(store, start, _sampled(start, "b", temperature=0.7, seed=1))
    scored_fresh = world.write_rewards(store, fresh, world.even_share)
    versions = {"base": policy, "start": start, "fresh": fresh, "older": older}
    refs = {name: version.ref for name, version in versions.items()}
    return store.url, {**refs, "scored": scored.ref, "scored_fresh": scored_fresh.ref}


@pytest.fixture
def store(tmp_path, _store_of_two):
    """A copy of the module's store."""
    shutil.copytree(_store_of_two[0], tmp_path / "store")
    return Store(tmp_path / "store")


@pytest.fixture
def two(store, _store_of_two):
    """policy@1 and two versions of rollouts with their rewards: `fresh` of policy@1 at 0.7, `older`
    of policy@0 at 1.0."""
    versions = {name: store.open(ref) for name, ref in _store_of_two[1].items()}
    rewards = [versions.pop("scored"), versions.pop("scored_fresh")]
    return SimpleNamespace(**versions, rewards=rewards)


def _run(store, two, config=None, **refs):
    named = {
        "rollouts": [two.fresh.ref, two.older.ref],
        "rewards": [version.ref for version in two.rewards],
        **refs,
    }
    made = two.fresh, two.rewards[1]
    return world.trained(store, two.start, made, config or _config(), **named)


def _trainer(store, two, algorithm: str, settings: dict | None = None, **others) -> Trainer:
    beside = {"rewards": [version.ref for version in two.rewards], **others}
    inputs = open_inputs(store, two.start.ref, [two.fresh.ref, two.older.ref], beside)
    config = _config(algorithm=algorithm, audit={"enabled": False}, **(settings or {}))
    return world.trainer(store, inputs, config)


def _rows(*versions) -> list[dict]:
    """The rows of the versions with what `_expected` wants of them; a group is one version's."""
    return [
        {
            **row,
            "old": row["old_logprobs"],
            "reward": world.even_share(row),
            "group": (number, row["group_id"]),
        }
        for number, version in enumerate(versions)
        for row in version.table().to_pylist()
    ]


# -- numbers


@pytest.mark.parametrize("algorithm", ["grpo", "rloo"])
def test_the_gradient_is_that_of_a_loop_over_both_versions(store, two, algorithm):
    """Equal group ids stay apart, each row has its own temperature and old logprobs; rewards are
    given in the other order."""
    made = _trainer(store, two, algorithm)
    assert made.batch.max_completion_tokens == 20, "what any of the versions allowed"
    assert sorted(set(made.batch.sequences.temperature.tolist())) == pytest.approx([0.7, 1.0])
    assert len(set(made.batch.groups)) == 8
    _compare(made, _expected(two.start, _rows(two.fresh, two.older), algorithm))


def test_proximal_logprobs_are_those_of_each_versions_own_policy(store, two):
    """Given in the other order; `old` is what the engine said, a little off, so that the weight
    exp(prox − old) matters."""
    made, prox, exact = [], [], []
    for policy, prefix in ((two.start, "c"), (two.base, "d")):
        rows = _sampled(policy, prefix, 0.9, 2)
        exact += [row["old_logprobs"] for row in rows]
        for number, row in enumerate(rows):
            row["old_logprobs"] = [value - 0.01 * (number % 7) for value in row["old_logprobs"]]
        made.append(world.scored(store, policy, rows))
        prox.append(world.write_logprobs(store, made[-1][0], exact[-16:], "prox", policy))
    (two.fresh, two.older), two.rewards = zip(*made, strict=True)
    trainer = _trainer(store, two, "grpo", prox=[prox[1].ref, prox[0].ref])
    rows = _rows(two.fresh, two.older)
    for row, values in zip(rows, exact, strict=True):
        row["old_logprobs"] = values  # `_expected` takes these for the anchor
    _compare(trainer, _expected(two.start, rows, "grpo", prox=True))


def _scored_by(store, policy, *versions) -> list:
    """Proximal logprobs of the versions under `policy`, as the stage logprobs makes them."""
    config = LogprobsConfig(role="prox", prox_of="start")
    return [
        store.open(run_here("logprobs", config, store, rollouts=each.ref, policy=policy.ref))
        for each in versions
    ]


def test_decoupled_ppo_takes_its_ratio_to_the_starting_policy(store, two):
    """Stale rows too have ratio 1, and the weight exp(start − old), at most 2; the float64 loop has
    them from the formula."""
    prox = _scored_by(store, two.start, two.fresh, two.older)
    refs = [version.ref for version in prox]
    made = _trainer(store, two, "grpo", {"prox_of": "start"}, prox=refs)
    rows = _rows(two.fresh, two.older)
    scores = [row for version in prox for row in version.table()["logprobs"].to_pylist()]
    gaps = []
    for row, row_scores in zip(rows, scores, strict=True):
        gaps += [new - old for new, old in zip(row_scores, row["old"], strict=True)]
        row["old_logprobs"] = row_scores  # `_expected` takes these for the anchor
    assert max(gaps) > 0.1
    _compare(made, _expected(two.start, rows, "grpo", prox=True))
    done = _run(store, two, _config(prox_of="start"), prox_logprobs=refs)
    (step,) = world.updates(store, done)
    assert step["clip_fraction"] == done.manifest.metrics["first_clip_fraction"] == 0.0
    assert done.manifest.config["prox_of"] == "start"
    report = done.manifest.metrics["audit"]
    assert report["prox"]["rollouts"] == report["rollouts"]  # of the fresh ones alone
    assert report["stale"]["judged"] is None


def test_proximal_logprobs_of_the_other_policy_are_refused(store, two):
    named = {"rollouts": two.older.ref, "rewards": two.rewards[0].ref}
    (of_start,) = _scored_by(store, two.start, two.older)
    (of_sampler,) = _scored_by(store, two.base, two.older)
    with pytest.raises(LineageError, match="this training starts from"):
        _run(store, two, _config(prox_of="start"), prox_logprobs=of_sampler.ref, **named)
    with pytest.raises(LineageError, match="policy that sampled"):
        _run(store, two, _config(), prox_logprobs=of_start.ref, **named)
    with pytest.raises(ConfigError, match="needs proximal logprobs"):
        _run(store, two, _config(prox_of="start"), **named)


def test_stale_rollouts_alone_are_audited_by_their_proximal_logprobs(store, two):
    named = {"rollouts": two.older.ref, "rewards": two.rewards[0].ref}
    (prox,) = _scored_by(store, two.base, two.older)
    report = _run(store, two, prox_logprobs=prox.ref, **named).manifest.metrics["audit"]
    assert report["judged"] is None and report["mean_gap"] > 0.01
    assert report["prox"]["judged"] == "mean_gap" and report["prox"]["max_gap"] < 1e-4
    rows = two.older.table().to_pylist()
    for row in rows:  # as if another temperature had been at work
        row["old_logprobs"] = [value * 0.7 for value in row["old_logprobs"]]
    moved, rewards = world.scored(store, two.base, rows)
    (prox,) = _scored_by(store, two.base, moved)
    with pytest.raises(NumericError, match="proximal logprobs differ from the engine's"):
        _run(store, two, rollouts=moved.ref, rewards=rewards.ref, prox_logprobs=prox.ref)


# -- what it writes


def test_the_manifest_names_every_version_and_advantages_every_row(store, two):
    done = _run(store, two)
    rewards = {version.manifest.input("rollouts").ref: str(version.ref) for version in two.rewards}
    assert {entry.role: entry.ref for entry in done.manifest.inputs} == {
        "policy": "tiny/policy@1",
        "rollouts": str(two.fresh.ref),
        "rollouts.2": str(two.older.ref),
        "rewards": rewards[str(two.fresh.ref)],
        "rewards.2": rewards[str(two.older.ref)],
    }
    ids = [row["rollout_id"] for row in _rows(two.fresh, two.older)]
    advantages = store.open(done.manifest.metrics["advantages"])
    assert advantages.table()["rollout_id"].to_pylist() == ids
    assert advantages.manifest.status == {"kept": 32}
    versions = done.manifest.metrics["versions"]
    for version, stale in ((two.fresh, False), (two.older, True)):
        rows = version.table().to_pylist()
        mean = sum(map(world.even_share, rows)) / len(rows)
        told = {"stale": stale, "rollouts": 16, "kept": 16}
        told["reward_mean"] = pytest.approx(mean, abs=1e-6)
        assert versions[str(version.ref)] == told
    assert verify(store)[1] == []


def test_the_same_work_again_is_a_cache_hit_in_whatever_order_rewards_stand(store, two):
    first = _run(store, two)
    assert _run(store, two, rewards=[version.ref for version in two.rewards[::-1]]).ref == first.ref
    alone = _run(store, two, rollouts=two.fresh.ref, rewards=two.rewards[1].ref)
    assert _run(store, two, rollouts=[two.fresh.ref], rewards=[two.rewards[1].ref]).ref == alone.ref
    metrics = alone.manifest.metrics
    assert "versions" not in metrics and "stale" not in metrics["audit"]


@pytest.mark.parametrize("minibatches", [1, 2])
def test_fresh_rows_are_audited_strictly_and_stale_ones_reported(store, two, minibatches):
    config = _config(minibatches=minibatches)
    done = _run(store, two, config)
    report = done.manifest.metrics["audit"]
    assert report["max_gap"] < 1e-4
    assert report["stale"]["mean_gap"] > 0.01
    learned = {row["rollout_id"] for row in world.advantages(store, done) if row["advantage"]}
    sizes = [
        sum(len(row["completion_ids"]) for row in _rows(version) if row["rollout_id"] in learned)
        for version in (two.fresh, two.older)
    ]
    assert [report["tokens"], report["stale"]["tokens"]] == sizes
    for number, policy in ((1, two.base), (0, two.start)):
        versions = [two.fresh, two.older]
        rewards = two.rewards[::-1]
        rows = [
            {**row, "old_logprobs": [value * 0.7 for value in row["old_logprobs"]]}
            for row in versions[number].table().to_pylist()
        ]
        versions[number], rewards[number] = world.scored(store, policy, rows)
        refs = {"rollouts": [v.ref for v in versions], "rewards": [v.ref for v in rewards]}
        if number:
            assert _run(store, two, config, **refs).manifest.metrics["audit"]["max_gap"] < 1e-4
        else:
            with pytest.raises(NumericError, match="max_mean_gap"):
                _run(store, two, config, **refs)


def test_a_version_without_rows_adds_nothing(store, two):
    empty = world.write_rollouts(store, two.start, [])
    none = world.write_rewards(store, empty, world.even_share)
    done = _run(
        store, two, rollouts=[empty.ref, two.fresh.ref], rewards=[none.ref, two.rewards[1].ref]
    )
    assert done.manifest.metrics["rollouts"] == 16
    assert done.manifest.metrics["versions"][str(empty.ref)]["reward_mean"] is None


# -- refusals


def test_each_version_must_be_of_an_allowed_policy(store, two):
    with pytest.raises(LineageError, match="max_staleness is 0") as caught:
        _run(store, two, _config(max_staleness=0))
    assert caught.value.object == str(two.older.ref)


def test_each_version_must_be_sampled_without_bias(store, two):
    other = world.write_rollouts(
        store, two.start, _sampled(two.start, "e"), sampling={"top_p": 0.9}
    )
    rewards = world.write_rewards(store, other, world.even_share)
    named = {"rollouts": [two.fresh.ref, other.ref], "rewards": [two.rewards[1].ref, rewards.ref]}
    with pytest.raises(ConfigError, match="top_p") as caught:
        _run(store, two, **named)
    assert caught.value.object == str(other.ref)
    named["prox_logprobs"] = [
        world.write_logprobs(store, version, world.sampled_logprobs(version), "prox", two.start).ref
        for version in (two.fresh, other)
    ]
    metrics = _run(store, two, _config(allow_biased_sampling=True), **named).manifest.metrics
    assert metrics["biased_sampling"] == ["top_p = 0.9"]
    report = metrics["audit"]
    assert (report["judged"], report["biased"]["judged"]) == ("mean_gap", "mean_excess")
    assert report["rollouts"] + report["biased"]["rollouts"] == sum(
        1 for row in store.open(metrics["advantages"]).table()["advantage"].to_pylist() if row
    )


def test_a_version_is_given_once(store, two):
    with pytest.raises(ConfigError, match="given twice"):
        _run(store, two, rollouts=[two.fresh.ref, two.fresh.ref])
    with pytest.raises(ConfigError, match="no rollouts are given"):
        _run(store, two, rollouts=[])
    again = world.write_rollouts(store, two.start, two.fresh.table().to_pylist())
    with pytest.raises(ConfigError, match=f"the same rows as {two.fresh.ref}"):
        _run(store, two, rollouts=[two.fresh.ref, again.ref])


def test_no_rollout_stands_in_two_versions(store, two):
    rows = [{**row, "seed": 5} for row in two.older.table().to_pylist()]
    again = world.write_rollouts(store, two.base, rows)
    rewards = world.write_rewards(store, again, world.even_share)
    named = {"rollouts": [two.older.ref, again.ref], "rewards": [two.rewards[0].ref, rewards.ref]}
    with pytest.raises(LineageError, match=f"16 rollout ids are also in {again.ref}, such as"):
        _run(store, two, **named)


def test_each_version_has_its_own_rewards_and_no_others(store, two):
    with pytest.raises(
        LineageError, match="no rewards of these rollouts are given, found"
    ) as caught:
        _run(store, two, rewards=two.rewards[1].ref)
    assert caught.value.object == str(two.older.ref)
    other = world.write_rollouts(store, two.start, _sampled(two.start, "e"))
    foreign = world.write_rewards(store, other, world.even_share)
    with pytest.raises(
        LineageError, match=f"made of {other.ref}, not of {two.fresh.ref} or {two.older.ref}"
    ):
        _run(store, two, rewards=[version.ref for version in (*two.rewards, foreign)])
    second = world.write_rewards(store, two.fresh, lambda row: 0.5 * world.even_share(row))
    with pytest.raises(
        ConfigError, match=f"rewards of {two.fresh.ref}, and so is {two.rewards[1].ref}"
    ):
        _run(store, two, rewards=[version.ref for version in (*two.rewards, second)])


def test_the_kl_holds_on_to_one_reference(store, two):
    config = _config(kl_coef=0.1)
    scored = [
        world.write_logprobs(store, version, world.sampled_logprobs(version), "ref", two.base)
        for version in (two.older, two.fresh)
    ]
    with pytest.raises(LineageError, match="no reference logprobs of these rollouts"):
        _run(store, two, config, ref_logprobs=scored[0].ref)
    done = _run(store, two, config, ref_logprobs=[version.ref for version in scored])
    assert {entry.role for entry in done.manifest.inputs} >= {"ref", "ref.2"}
    other = make_policy(store, "other", seed=1)
    values = world.sampled_logprobs(two.fresh)
    foreign = world.write_logprobs(store, two.fresh, values, "ref", other)
    with pytest.raises(LineageError, match="under tiny/policy@0") as caught:
        _run(store, two, config, ref_logprobs=[scored[0].ref, foreign.ref])
    assert "other/policy@0" in str(caught.value)
