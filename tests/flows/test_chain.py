"""The chain of stages, in this process: who is scored by whom, what is learned from again, and what
`quiver STAGE` finds of it."""

import itertools
from pathlib import Path

import pytest
import torch

from quiver.flows.evaluation import measure
from quiver.flows.look.lineage import parents_of
from quiver.flows.post_train import Chain
from quiver.flows.preflight import finished, preflight
from quiver.flows.recipe import load
from quiver.flows.rerun import rerun
from quiver.flows.rounds import proximal_config
from quiver.flows.sections import Logprobs, Optimize, Reference
from quiver.flows.verification import verify
from quiver.schemas.errors import ConfigError, LineageError
from quiver.schemas.refs import parse
from quiver.stages.core.store import Store, Version, marks
from quiver.stages.core.store.listing import EXPIRED
from quiver.stages.model.loading import load_model
from tests.flows.conftest import write_recipe
from tests.flows.stages_here import Stages
from tests.stages.optimize.test_critic_from import make_classifier
from tests.tiny import make_policy, plain_logprobs

TIGHT = """
from quiver.stages.optimize.algorithms import Algorithm

BOUNDS = {"clip_low": 1e-3, "clip_high": 1e-3}
TIGHT = Algorithm("tight", "group_normalized", "sequence_clipped", "token_mean", BOUNDS)
"""
FLAKY = """
import os

def flaky(completion_ids):
    values = [float(len(ids)) if os.path.exists("repaired") else None for ids in completion_ids]
    return [1.0 if ids[0] % 2 else value for ids, value in zip(completion_ids, values)]
"""


@pytest.fixture(scope="module", autouse=True)
def store(tmp_path_factory) -> Store:
    """The store of a recipe, whose folder is the working directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(write_recipe(tmp_path_factory.mktemp("chain")))
        yield Store("store")


def iterations(*settings: str) -> list[dict]:
    """The iterations of the recipe, as `quiver run` prints them."""
    recipe = load("recipe.toml", ["data.held_out=null", *settings]).resolved()
    with Stages().of(recipe):
        chain = Chain(recipe)
        base = chain.import_policy()
        return [iteration.to_json() for iteration in chain.improve(base, base)]


def by_hand(stage: str, *settings: str, **refs: str | list[str]):
    recipe = load("recipe.toml", ["data.held_out=null", *settings])
    with Stages().of(recipe):
        return rerun(recipe, stage, refs)


def inputs(version: Version, *prefixes: str) -> dict[str, str]:
    """References by role, of the roles that begin so."""
    entries = version.manifest.inputs
    return {entry.role: entry.ref for entry in entries if entry.role.startswith(prefixes or "")}


@pytest.fixture(scope="module")
def plain(store) -> list[dict]:
    return iterations()


def test_tight_bounds_are_scored_for_by_themselves_under_the_starting_policy(store):
    """gspo needs proximal logprobs, and decoupled PPO has them of the policy that each iteration
    starts from, of replayed rollouts too; by hand the same versions are found."""
    settings = ("run=decoupled", "optimize.algorithm=gspo", "optimize.prox_of=start",
                "optimize.replay=1", "optimize.max_staleness=1", "optimize.precision=fp32")  # fmt: skip
    done = iterations(*settings)
    for number, each in enumerate(done):
        policy = store.open(each["policy"])
        assert policy.manifest.metrics["first_clip_fraction"] == 0.0
        scored = inputs(policy, "prox")
        assert scored["prox"] == each["prox_logprobs"] and len(scored) == number + 1
        for ref in scored.values():
            manifest = store.open(ref).manifest
            assert manifest.model("prox").ref == f"decoupled/policy@{number}"
            assert manifest.config["precision"] == "fp32"
        assert "logprobs prox" in each["seconds"]
    again = by_hand("optimize", *settings, rollouts=[each["rollouts"] for each in done[::-1]])
    assert (again.ref, again.cached) == ("decoupled/policy@2", True)
    Path("tight.py").write_text(TIGHT)
    tight = ("run=decoupled", "optimize.algorithm=tight.py:TIGHT")
    owned = store.open(by_hand("optimize", *tight, rollouts=done[0]["rollouts"]).ref)
    prox = store.open(inputs(owned)["prox"]).manifest
    assert (prox.model("prox").ref, prox.config["prox_of"]) == ("decoupled/policy@0", "behaviour")


def test_truncated_sampling_is_scored_for_by_itself(store):
    settings = ("run=truncated", "generate.sampling.top_k=50", "optimize.max_staleness=1",
                "optimize.allow_biased_sampling=true", "overlap=1")  # fmt: skip
    done = iterations(*settings)
    for each in done:  # the second is one policy old
        prox = store.open(each["prox_logprobs"]).manifest
        assert prox.model("prox").ref == "truncated/policy@0"
        report = store.open(each["policy"]).manifest.metrics["audit"]["prox"]
        assert (report["judged"], report["biased_sampling"]) == ("mean_excess", "top_k = 50")
        assert report["mean_gap"] > 0.5 and report["mean_excess"] < 1e-3
    again = by_hand("optimize", *settings, rollouts=done[0]["rollouts"])
    assert (again.ref, again.cached) == ("truncated/policy@1", True)


def test_references_and_proximal_logprobs(store):
    """`every` 1: the reference of an iteration is the policy that it starts from, so its logprobs
    are the proximal ones.

    What is replayed is scored under the reference of the present iteration; its proximal logprobs
    stay those of its own policy.
    """
    settings = ("run=kl", "optimize.kl_coef=0.05", "optimize.max_staleness=1", "logprobs.prox=true")
    every = ("reference.rule=every", "optimize.replay=1")
    done = iterations(*settings, *every)
    for number, each in enumerate(done):
        ref, prox = store.open(each["ref_logprobs"]), store.open(each["prox_logprobs"])
        models = (ref.manifest.model("ref").ref, prox.manifest.model("prox").ref)
        assert models == (f"kl/policy@{number}",) * 2
        assert ref.table()["logprobs"].to_pylist() == prox.table()["logprobs"].to_pylist()
        roles = inputs(store.open(each["policy"]))
        assert (roles["ref"], roles["prox"]) == (each["ref_logprobs"], each["prox_logprobs"])
        assert {"logprobs ref", "logprobs prox"} <= set(each["seconds"])
    assert roles["prox.2"] == done[0]["prox_logprobs"]
    replayed = store.open(roles["ref.2"]).manifest
    assert replayed.model("ref").ref == "kl/policy@1"
    assert replayed.input("rollouts").ref == roles["rollouts.2"] == done[0]["rollouts"]
    ema = ("reference.rule=ema", "reference.rate=0.5", "logprobs.prox=false")
    moving = iterations(*settings, *ema)
    followed = [store.open(each["ref_logprobs"]).manifest.model("ref").ref for each in moving]
    assert followed == ["kl/policy@0", "kl.ref/policy@0"]
    halves = {model.role: model.ref for model in store.open(followed[1]).manifest.models}
    assert halves == {"reference": "kl/policy@0", "policy": moving[0]["policy"]}
    again = by_hand("optimize", *settings, rollouts=done[0]["rollouts"])
    assert (again.ref, again.cached) == ("kl/policy@1", True)
    fixed = by_hand("logprobs", *settings, rollouts=done[1]["rollouts"])
    assert store.open(fixed.ref).manifest.model("ref").ref == "kl/policy@0"
    with pytest.raises(ConfigError) as caught:
        by_hand("optimize", *settings, *every, rollouts=done[1]["rollouts"])
    assert caught.value.object == "reference.rule"


def scored_by(store, ref: str) -> str:
    return store.open(ref).manifest.model("ref").ref


def under(model, rollouts: Version) -> list[list[float]]:
    """Logprobs of saved completions, one plain pass each."""
    columns = ("prompt_ids", "completion_ids", "temperature")
    rows = rollouts.table().to_pylist()
    return [plain_logprobs(model, *(row[name] for name in columns)).tolist() for row in rows]


def test_the_reference_is_any_policy_of_the_store(store):
    """Of another run, by number or tag; the bytes count, not the name."""
    teacher, other = (make_policy(store, "teacher", seed=1), make_policy(store, "other", seed=2))
    settings = ("run=taught", "optimize.kl_coef=0.05", "optimize.learning_rate=1e-2")
    named = (*settings, "reference.policy=teacher/policy@0")
    done = iterations(*named)
    model = load_model(teacher, dtype=torch.float32)
    for each in done:
        assert scored_by(store, each["ref_logprobs"]) == "teacher/policy@0"
        expected = under(model, store.open(each["rollouts"]))
        for row, right in zip(
            store.open(each["ref_logprobs"]).table()["logprobs"].to_pylist(), expected, strict=True
        ):
            assert row == pytest.approx(right, abs=1e-4)
    assert "teacher/policy@0" in parents_of(store.open(done[-1]["ref_logprobs"]).manifest)
    assert verify(store)[1] == []
    by_tag = (*settings, "reference.policy=teacher/policy@good")
    store.tag("teacher", "good", teacher.ref)
    assert [each["policy"] for each in iterations(*by_tag)] == [each["policy"] for each in done]
    again = by_hand("optimize", *by_tag, rollouts=done[0]["rollouts"])
    assert (again.ref, again.cached) == (done[0]["policy"], True)
    again = by_hand("logprobs", *by_tag, rollouts=done[1]["rollouts"])
    assert (again.ref, again.cached) == (done[1]["ref_logprobs"], True)
    (elsewhere,) = iterations(*settings, f"reference.policy={other.ref}", "iterations=1")
    assert elsewhere["policy"] not in [each["policy"] for each in done]
    # of the run itself, without its name
    own = iterations(*settings, "reference.policy=policy@1")
    assert [scored_by(store, each["ref_logprobs"]) for each in own] == ["taught/policy@1"] * 2


MIXED = ("optimize.kl_coef=0.05", "optimize.learning_rate=1e-2", "optimize.replay=1",
         "optimize.max_staleness=1", "iterations=5", "reference.rule=every",
         "reference.iterations=2", "reference.rate=0.6", "reference.policy=teacher/policy@0")  # fmt: skip


def test_every_two_iterations_the_reference_takes_a_share_of_the_policy(store):
    """As TRL's callback after `ref_model_sync_steps` steps; what is replayed is scored under the
    present reference."""
    teacher = make_policy(store, "teacher", seed=1)
    done = iterations("run=mixed", *MIXED)
    followed = [scored_by(store, each["ref_logprobs"]) for each in done]
    own = ["mixed.ref/policy@0", "mixed.ref/policy@1"]
    assert followed == [str(teacher.ref)] * 2 + [own[0]] * 2 + [own[1]]
    reference = load_model(teacher, dtype=torch.float32)
    for number, each in enumerate(done):
        if number in (2, 4):
            policy = load_model(store.open(f"mixed/policy@{number}"), dtype=torch.float32)
            pairs = zip(reference.parameters(), policy.parameters(), strict=True)
            with torch.no_grad():
                for old, new in pairs:
                    old.mul_(1.0 - 0.6).add_(new, alpha=0.6)
        roles = inputs(store.open(each["policy"]), "ref")
        assert set(roles) == ({"ref", "ref.2"} if number else {"ref"})
        for ref in roles.values():
            scored = store.open(ref)
            assert scored.manifest.model("ref").ref == followed[number]
            rollouts = store.open(scored.manifest.input("rollouts").ref)
            found = scored.table()["logprobs"].to_pylist()
            for row, right in zip(found, under(reference, rollouts), strict=True):
                assert row == pytest.approx(right, abs=1e-4)


def test_a_run_that_is_stopped_again_and_again_has_the_same_references(store):
    """After every fourth stage; then nothing is left to do."""
    recipe = load("recipe.toml", ["data.held_out=null", "run=stopped", *MIXED]).resolved()
    make_policy(store, "teacher", seed=1)
    num_made, num_stopped = [], 0
    while not num_made or num_made[-1]:
        stages = Stages(4)
        num_made.append(0)
        try:
            with stages.of(recipe):
                chain = Chain(recipe)
                base = chain.import_policy()
                done = [iteration.to_json() for iteration in chain.improve(base, base)]
        except KeyboardInterrupt:
            num_stopped += 1
        num_made[-1] = stages.num_made
    straight = iterations("run=mixed", *MIXED)
    assert num_stopped > 5
    for ours, theirs in zip(done, straight, strict=True):
        for name in ("policy", "ref_logprobs"):
            assert ours[name] == theirs[name].replace("mixed/", "stopped/")
        one, other = (store.open(each["ref_logprobs"]).manifest for each in (ours, theirs))
        assert one.model("ref").weights == other.model("ref").weights
    assert store.numbers("stopped.ref", "policy") == [0, 1]


def test_a_reference_that_is_not_there_is_refused_before_anything_is_sampled(store):
    for name, problem in (
        ("nowhere/policy@3", "there is no such version"),
        ("teacher/policy@best", "run teacher has no tag best"),
        ("policy@latest", "not the run's latest, which each iteration changes"),
        ("teacher/rollouts@1", "expected a policy"),
    ):
        make_policy(store, "teacher", seed=1)
        with pytest.raises((ConfigError, LineageError), match=problem):
            iterations("run=refused", "optimize.kl_coef=0.05", f"reference.policy={name}")
        with pytest.raises((ConfigError, LineageError), match=problem):
            preflight(load("recipe.toml", ["optimize.kl_coef=0.05", f"reference.policy={name}"]))
    assert store.numbers("refused", "prompts") == []
    for unused in ("optimize.kl_coef=0", "reference.policy=policy@0"):
        settings = ["run=fresh", "optimize.kl_coef=0.05", "reference.policy=nowhere/policy@3"]
        preflight(load("recipe.toml", [*settings, unused]))


def test_a_critic_starts_from_a_classifier_and_is_then_the_runs_own(store):
    make_classifier(Path("judge"))
    settings = ("run=ppo", "optimize.algorithm=ppo", "optimize.critic=model", "iterations=3",
                "optimize.critic_from=judge")  # fmt: skip
    done = iterations(*settings)
    roles = [[m.role for m in store.open(each["policy"]).manifest.models] for each in done]
    assert roles == [["policy", "critic"], ["policy"], ["policy"]]
    assert [each["policy"] for each in iterations(*settings)] == [each["policy"] for each in done]
    again = by_hand("optimize", *settings, rollouts=done[0]["rollouts"])
    assert (again.ref, again.cached) == ("ppo/policy@1", True)


@pytest.mark.parametrize(
    ("fields", "weight"),
    [
        ({"rate": 0.6}, 0.0),
        ({"rule": "every"}, 1.0),
        ({"rule": "ema"}, 0.1),
        ({"rule": "ema", "rate": 1.0}, 1.0),
    ],
)
def test_the_weight_of_the_newest_policy_in_a_reference_by_default(fields, weight):
    assert Reference(**fields).weight_of_newest == weight


@pytest.mark.parametrize(
    ("training", "own", "precision"),
    [
        ("fp32", "auto", "fp32"),
        ("bf16_stochastic", "auto", "bf16_pure"),
        ("fp32", "bf16", "bf16"),
    ],
)
def test_proximal_logprobs_have_the_trainers_precision(training, own, precision):
    """Also if the loss does not need them and the recipe asks for them."""
    logprobs = Logprobs(prox=True, precision=own)
    config = proximal_config(Optimize(precision=training), logprobs, ())
    assert config.precision == precision


def test_a_fork_holds_on_to_the_first_policy_of_its_line(store, plain):
    """The run that it goes into has no policy of its own: its reference is that of the run which it
    leaves."""
    fork = ("run=fork", "optimize.kl_coef=0.05")
    sampled = plain[1]["rollouts"]
    forked = by_hand("optimize", *fork, rollouts=sampled, rewards=plain[1]["rewards"])
    roles = inputs(store.open(forked.ref))
    assert (forked.ref, roles["policy"]) == ("fork/policy@2", "tiny/policy@1")
    assert store.open(roles["ref"]).manifest.model("ref").ref == "tiny/policy@0"
    again = by_hand("logprobs", *fork, rollouts=sampled)
    assert (again.ref, again.cached) == (roles["ref"], True)


def test_rewards_are_those_of_the_recipe_or_named(plain):
    with pytest.raises(LineageError, match=r"\[reward\] has not scored these rollouts"):
        by_hand("optimize", "reward.reward_clip=[0.0,0.5]", rollouts=plain[0]["rollouts"])


def test_replay_trains_on_the_iteration_before_too(store, plain):
    """Of three iterations the second and third also take the rollouts before theirs; what was
    sampled is not sampled again."""
    done = iterations("optimize.replay=1", "optimize.max_staleness=1", "iterations=3")
    assert done[0]["rollouts"] == plain[0]["rollouts"]
    for before, now in itertools.pairwise([None, *done]):
        expected = {"rollouts": now["rollouts"], "rewards": now["rewards"]}
        policy = store.open(now["policy"])
        if before:
            expected |= {"rollouts.2": before["rollouts"], "rewards.2": before["rewards"]}
            audit = policy.manifest.metrics["audit"]
            assert audit["mean_gap"] < 0.1 and audit["stale"]["mean_gap"] > audit["mean_gap"]
        assert inputs(policy, "rollouts", "rewards") == expected


def test_what_is_made_again_is_of_the_run_that_it_was_of(store, plain):
    """Held-out rollouts, whose files expired, for another reward."""
    numbers = store.numbers("tiny", "rollouts")
    for setting in ((), ("reward.reward_clip=[0.0,0.5]",)):
        recipe = load("recipe.toml", setting).resolved()
        with Stages().of(recipe):
            measured = measure(recipe, plain[0]["policy"], 1)
        (sampled,) = inputs(store.open(measured.ref), "rollouts").values()
        marks.write(store.storage, parse(sampled), EXPIRED, "gc")
    assert sampled == "tiny.eval/rollouts@2"
    assert store.numbers("tiny", "rollouts") == numbers


def test_replay_by_hand(store, plain):
    """Rewards and the policy are found for several rollouts as for one."""
    first, second = ({role: each[role] for role in ("rollouts", "rewards")} for each in plain)
    stale = "optimize.max_staleness=1"
    rollouts = [first["rollouts"], second["rollouts"]]
    trained = by_hand("optimize", stale, rollouts=rollouts).ref
    roles = inputs(store.open(trained))
    assert roles.pop("policy") == plain[0]["policy"], "the newest policy that sampled"
    assert roles == {**first, **{f"{role}.2": ref for role, ref in second.items()}}
    rewards = [second["rewards"], first["rewards"]]
    assert by_hand("optimize", stale, rollouts=rollouts, rewards=rewards).ref == trained
    assert by_hand("optimize", stale, rewards=rewards[::-1]).ref == trained
    with pytest.raises(ConfigError, match="is given twice"):
        by_hand("optimize", stale, rollouts=[first["rollouts"]] * 2)
    with pytest.raises(ConfigError, match="quiver reward takes one version, got 2"):
        by_hand("reward", rollouts=rollouts)


def test_a_retry_scores_what_has_no_reward(store, plain):
    Path("flaky.py").write_text(FLAKY)
    flaky = "reward.functions=[{use='flaky.py:flaky'}]"
    first = by_hand("reward", flaky, rollouts=plain[0]["rollouts"])
    missing = store.open(first.ref).manifest.status["not_scored"]
    Path("repaired").touch()
    second = by_hand("reward", flaky, retry=first.ref)
    metrics = second.metrics
    assert metrics["retried"] == metrics["recovered"] == missing > 0
    again = by_hand("reward", flaky, retry=second.ref)
    assert (again.ref, again.cached) == (second.ref, True)
    with pytest.raises(LineageError, match="was made of tiny/rollouts@1"):
        by_hand("reward", flaky, rollouts=plain[1]["rollouts"], retry=first.ref)


def test_a_run_that_another_recipe_began_is_told_with_the_keys_that_differ(plain, caplog):
    finished(load("recipe.toml", ["seed=8"]).resolved())
    assert "run tiny has tiny/prompts@1, made with other settings" in caplog.text
    assert "\n  seed was 7 and is 8" in caplog.text
