"""What stages take, as `quiver fit` tells it: on a CPU a process's own peak is measured. And what a
flow holds in memory, which does not grow with its rollouts."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from quiver.flows.fit import (
    Estimate,
    Machine,
    Workload,
    find_config,
    parse_machine,
    this_host,
    workload_of,
)
from quiver.flows.recipe import Recipe
from quiver.schemas.errors import ConfigError
from quiver.stages.core.run.stage_process import ENVIRONMENT, allocator_environment
from quiver.stages.core.store import Store
from quiver.stages.generate.config import Config as GenerateConfig
from quiver.stages.logprobs.config import Config as LogprobsConfig
from quiver.stages.model.memory import shape_of
from quiver.stages.optimize.config import Config
from tests.benchmarks import made
from tests.benchmarks.made import rollouts_table
from tests.flows.conftest import RECIPE, command_environment
from tests.stages.generate.making import random_prompts
from tests.stages.model.test_memory import SEVEN
from tests.stages.optimize import world
from tests.tiny import make_folder
from tests.writing import run_here

SIZES = {
    "small": LlamaConfig(
        vocab_size=32000, hidden_size=256, intermediate_size=1024, num_hidden_layers=8,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=1024, tie_word_embeddings=True,
    ),
    "medium": LlamaConfig(
        vocab_size=32000, hidden_size=512, intermediate_size=1536, num_hidden_layers=12,
        num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=1024, tie_word_embeddings=False,
    ),
}  # fmt: skip
"""16 and 74 million weights."""
SMALL = shape_of(SIZES["small"])
WORK = Workload(3, 8, 128, 64, 192, "the test")
LONG = Workload(128, 8, 256, 1024, 1280, "the test")
FEW = Workload(4, 2, 100, 50, 150, "the test")


def recipe(place="none", **sections) -> Recipe:
    fields = {
        "run": "tiny",
        "store": f"{place}/store",
        "policy": {"model": f"{place}/model"},
        "data": {"source": "rows.jsonl", "limit": WORK.prompts},
        "reward": {"functions": [{"use": "math"}]},
    }
    return Recipe(**{**fields, **sections})


def estimate(machine="h100", shape=SEVEN, work=LONG, **sections) -> Estimate:
    """An estimate of a recipe with these sections; `machine` None: this host."""
    machine = parse_machine(machine) if machine else this_host()
    return Estimate(recipe(**sections), shape, work, machine)


def sampled(machine="h100", shape=SEVEN, work=LONG, **sections):
    found = estimate(machine, shape, work, **sections)
    return found.sampling(found.recipe.generate)


def trained(machine="h100", work=FEW, **config):
    return estimate(machine, work=work).training(Config(**config))


# -- measured

CONFIGS = {
    "generate": {
        "engine": "vllm",
        "options": {"max_num_seqs": 64},
        "dtype": "float32",
        "samples_per_prompt": WORK.samples,
        "sampling": {"max_tokens": WORK.completion_tokens, "ignore_eos": True},
    },
    "logprobs": {"precision": "fp32", "device": "cpu"},
    "optimize": {"precision": "fp32", "device": "cpu", "epochs": 2, "audit": {"enabled": False}},
}
RUN = """
import json, re, resource, sys
from pathlib import Path
from quiver import run_stage

for call, refs in json.loads(sys.argv[1]):
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    run_stage(*call, in_process=True, **refs)
    peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
    engine = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    print(call[0], max(peak, engine) * 1024)
"""
"""Stages in one process, and the most bytes that it, or a child of it, held at once in each."""


def make_rollouts(store, policy):
    rows = rollouts_table(WORK.rollouts, WORK.prompt_tokens, WORK.completion_tokens, WORK.samples)
    sampling = {"max_tokens": WORK.completion_tokens}
    return world.write_rollouts(store, policy, rows.to_pylist(), "tiny", sampling=sampling)


def measured_peaks(place, size: str, stages: tuple[str, ...]) -> dict[str, int]:
    """The most bytes that a process of a stage's environment had at once in each."""
    folder = make_folder(place / "model")
    AutoModelForCausalLM.from_config(SIZES[size]).save_pretrained(folder)
    store = Store(place / "store")
    policy = store.open(run_here("policy", {"model": str(folder)}, store, into="tiny"))
    rollouts = make_rollouts(store, policy)
    rewards = world.write_rewards(store, rollouts, lambda row: row["seed"] % 3, run="tiny")
    length = WORK.prompt_tokens
    prompts = random_prompts(store, WORK.prompts, length, length + 1)
    roles = {
        "generate": {"prompts": prompts},
        "logprobs": {"rollouts": rollouts},
        "optimize": {"rollouts": rollouts, "rewards": rewards},
    }
    calls = []
    for stage in stages:
        versions = {"policy": policy, **roles[stage]}
        refs = {role: str(version.ref) for role, version in versions.items()}
        calls.append(([stage, CONFIGS[stage], store.url], refs))
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(calls)],
        env={**os.environ, **ENVIRONMENT, **allocator_environment("optimize")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    return {words[0]: int(words[1]) for words in lines if words[0] in stages}


@pytest.mark.parametrize(
    ("size", "stages"),
    [
        ("small", ("logprobs", "optimize")),
        pytest.param("small", ("generate",), marks=pytest.mark.slow),  # it starts vLLM
        pytest.param("medium", ("generate",), marks=pytest.mark.slow),
        pytest.param("medium", ("logprobs", "optimize"), marks=pytest.mark.slow),
    ],
)
def test_memory_is_within_a_fifth_of_a_process(fresh_python, tmp_path, size, stages):
    sections = {stage: CONFIGS[stage] for stage in ("optimize", *stages)}
    sections["optimize"] = {**sections["optimize"], "kl_coef": 0.1}
    needs = estimate(None, shape_of(SIZES[size]), WORK, **sections).needs()
    needed = {need.stage.split()[0]: need.bytes for need in needs}
    measured = measured_peaks(tmp_path, size, stages)
    assert {stage: needed[stage] for stage in stages} == pytest.approx(measured, rel=0.2)


def test_the_command_line_ends_with_7_if_a_stage_does_not_fit(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    make_folder(tmp_path / "model")
    (tmp_path / "recipe.toml").write_text(
        'run = "tiny"\n[policy]\nmodel = "model"\n[data]\nsource = "rows.jsonl"\n'
        '[[reward.functions]]\nuse = "math"\n[optimize]\nprocesses = 3\n'
    )
    code, answer = command("fit", "recipe.toml", "--gpu", "a100:2")
    assert code == 7
    assert not answer["fits"] and answer["machine"]["count"] == 2
    generate, optimize = answer["stages"]
    assert (generate["stage"], generate["fits"]) == ("generate", True)
    assert (optimize["stage"], optimize["fits"], optimize["devices"]) == ("optimize", False, 3)
    for stage in answer["stages"]:
        assert stage["bytes"] == pytest.approx(sum(stage["parts"].values()), abs=5)
    assert [way["settings"] for way in optimize["fits_with"]] == [
        "optimize.processes = 2, optimize.shard = true",
        "optimize.processes = 2, optimize.shard = true, optimize.token_budget = 512",
        'optimize.processes = 2, optimize.shard = true, optimize.optimizer = "adamw_8bit"',
    ]
    assert not (tmp_path / "store").exists()


# -- what is estimated


@pytest.mark.parametrize(
    ("text", "message", "advice"),
    [
        ("h10", "expected one of a10, a100", "name --gpu h100"),
        ("cpu", "expected one of a10, a100", "name a GPU of the list"),
        ("h100:0", "number of GPUs", "write it like --gpu h100:8"),
        ("h100:1025", "number of GPUs", "write it like --gpu h100:8"),
        ("h100:\N{FULLWIDTH DIGIT ONE}", "number of GPUs", "write it like --gpu h100:8"),
    ],
)
def test_a_machine_that_is_not_known_is_refused(text, message, advice):
    with pytest.raises(ConfigError, match=message) as caught:
        parse_machine(text)
    assert caught.value.next == advice
    assert parse_machine("H100:8") == replace(parse_machine("h100"), count=8)


def test_the_model_is_the_one_asked_for_or_what_the_function_made(tmp_path):
    make_folder(tmp_path / "model", "gpt2")
    (tmp_path / "model" / "model.safetensors").unlink()
    made = recipe(tmp_path, policy={"model": "mine.py:make"})
    with pytest.raises(ConfigError, match="has not made the model yet"):
        find_config(made.policy, made.store, made.run)
    run_here(
        "policy",
        {"model": str(make_folder(tmp_path / "other"))},
        Store(tmp_path / "store"),
        into="tiny",
    )
    assert find_config(made.policy, made.store, made.run).model_type == "llama"
    assert find_config(recipe(tmp_path).policy, made.store, made.run).model_type == "gpt2"


def size_of(made):
    return workload_of(made.generate, made.data, made.store, made.run)


def test_the_size_of_an_iteration(tmp_path):
    """From the newest rollouts; what the recipe changes since goes before."""
    turns = {"tools": ["quiver.deployments.recipes.calculator:calculate"], "max_tokens": 4096}
    played = recipe(tmp_path, generate={"turns": turns, "sampling": {"max_tokens": 48}})
    assert size_of(played).longest > 4096
    store = Store(tmp_path / "store")
    folder = str(make_folder(tmp_path / "model"))
    make_rollouts(store, store.open(run_here("policy", {"model": folder}, store, into="tiny")))
    as_sampled = {"samples_per_prompt": 8, "sampling": {"max_tokens": 64}}
    work = size_of(recipe(tmp_path, generate=as_sampled))
    assert work == Workload(3, 8, 128, 64, 192, "tiny/rollouts@1")
    assert work.passed_tokens == 3 * 128 + 24 * 63
    doubled = {**as_sampled, "samples_per_prompt": 16}
    every = {"source": "rows.jsonl"}
    assert size_of(recipe(tmp_path, generate=doubled, data=every)).rollouts == 48
    fewer = {"source": "rows.jsonl", "limit": 9}
    assert size_of(recipe(tmp_path, generate=as_sampled, data=fewer)).prompts == 9
    longer = size_of(recipe(tmp_path, generate={"sampling": {"max_tokens": 900}}))
    assert (longer.prompt_tokens, longer.completion_tokens, longer.longest) == (128, 900, 1028)
    assert longer.source.startswith("prompts as in tiny/rollouts@1")


@pytest.mark.parametrize(
    ("sections", "stages"),
    [
        ({}, ["generate", "optimize"]),
        ({"optimize": {"prox_of": "start"}}, ["generate", "logprobs (prox)", "optimize"]),
        (
            {"optimize": {"kl_coef": 0.1}, "logprobs": {"prox": True}},
            ["generate", "logprobs (ref)", "logprobs (prox)", "optimize"],
        ),
        ({"generate": {"engine": "mine.py:Engine"}}, ["optimize"]),
    ],
)
def test_stages_that_hold_a_model(sections, stages):
    assert [need.stage for need in estimate(work=FEW, **sections).needs()] == stages


@pytest.mark.parametrize(
    ("asked", "options", "rows_per_shard", "devices"),
    [
        (None, {"tensor_parallel_size": 2}, 256, 2),
        (3, {"tensor_parallel_size": 2}, 256, 2),
        (8, {"tensor_parallel_size": 2}, 256, 4),
        ("all", {}, 256, 4),
        ("all", {}, 512, 2),
        (None, {"engine_args": {"data_parallel_size": 2, "pipeline_parallel_size": 2}}, 256, 4),
    ],
)
def test_devices_are_those_that_whole_engines_and_shards_use(
    asked, options, rows_per_shard, devices
):
    need = sampled(
        "h100:4",
        placement={} if asked is None else {"devices": asked},
        generate={"options": options, "rows_per_shard": rows_per_shard},
    )
    assert need.devices == devices
    every = estimate("h100:4", placement={"devices": "all"})  # 1,024 rollouts, 256 in a shard
    assert every.logprobs(LogprobsConfig(role="ref")).devices == 4


def test_a_reward_model_takes_as_many_gpus_as_it_is_split_over(tmp_path):
    make_folder(tmp_path / "model")
    judge = {"model": str(tmp_path / "model"), "engine": "vllm"}
    weights = shape_of(find_config(recipe(tmp_path).policy, "store", "tiny")).weights
    for size in (1, 2):
        judge["engine_args"] = {"tensor_parallel_size": size}
        needs = estimate("h100:2", reward={"models": [judge]}).needs()
        [need] = [need for need in needs if need.stage.startswith("reward")]
        assert (need.devices, need.memory["weights"]) == (size, 2 * weights / size)


def test_vllm_decodes_fewer_together_on_an_a100():
    for name, most in (("a100", 256), ("h100", 1024), ("l40s", 256)):
        assert sampled(name, SMALL).notes[0].startswith(f"up to {most} rollouts")


def test_micro_batches_are_no_shorter_than_a_rollout():
    config = Config(token_budget=64, activation_checkpointing=False)
    [note] = estimate(work=FEW).training(config).notes
    assert note == "micro-batches of 150 tokens, bf16"
    assert trained(shard=True) == trained(), "one rank shares nothing"


QWEN3 = {
    "0.6B": (1024, 3072, 28, 16),
    "1.7B": (2048, 6144, 28, 16),
    "4B": (2560, 9728, 36, 32),
    "8B": (4096, 12288, 36, 32),
    "14B": (5120, 17408, 40, 40),
    "32B": (5120, 25600, 64, 64),
}
"""Hidden size, intermediate size, layers and heads."""


def qwen3(size):
    hidden, intermediate, layers, heads = QWEN3[size]
    return shape_of(
        Qwen3Config(
            vocab_size=151936, hidden_size=hidden, intermediate_size=intermediate,
            num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=8,
            head_dim=128, tie_word_embeddings=size not in ("8B", "14B", "32B"),
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    ("size", "chosen"),
    [
        ("0.6B", {"rtx4090": (8192, False), "a100-40gb": (24576, False), "h100": (49152, False)}),
        ("1.7B", {"a100-40gb": (16384, True), "h100": (24576, False), "h200": (49152, False)}),
        ("4B", {"h100": (8192, True), "h200": (16384, False), "b200": (24576, False)}),
        ("8B", {"h100": (8192, True), "b200": (32768, True)}),
    ],
)  # fmt: skip
def test_micro_batches_are_the_longest_that_a_card_holds(size, chosen):
    shape = qwen3(size)
    for name, (tokens, recomputes) in chosen.items():
        alone = estimate(name, shape, placement={"resident_engine": False})
        [note] = alone.training(Config()).notes
        assert note == f"micro-batches of {tokens} tokens, bf16" + (
            ", activations recomputed" if recomputes else ""
        ), name


def test_a_sleeping_engine_takes_its_part_of_one_gpu():
    """2.5 GB: activations may have to be recomputed then, and a stage may not fit."""
    for machine, is_asleep, note in (
        ("rtx4090", True, "micro-batches of 49152 tokens, bf16, activations recomputed"),
        ("rtx4090:2", False, "micro-batches of 8192 tokens, bf16"),
    ):
        here = estimate(machine, qwen3("0.6B"), optimize={"kl_coef": 0.1})
        sample, score, train = here.needs()
        assert "sleeping engine" not in sample.memory
        for need in (score, train):
            assert need.memory.get("sleeping engine") == (2.5e9 if is_asleep else None)
        assert train.notes == (note,)
    full = estimate("rtx4090", SMALL, WORK).training(Config())
    least = sum(full.memory.values()) / 0.97
    card = Machine("rtx4090", int(least) + 10**6)
    assert Estimate(recipe(), SMALL, WORK, card).fits(full)
    assert not Estimate(recipe(), SMALL, WORK, replace(card, memory=int(least - 1e9))).fits(full)


@pytest.mark.parametrize(
    ("size", "gpus", "fields", "gigabytes"),
    [
        ("8B", "h100", {}, 80),
        ("8B", "h100", {"precision": "bf16_stochastic"}, 62),
        ("32B", "h100:8", {"processes": 8, "shard": True}, 68),
    ],
)
def test_few_bytes_a_weight_make_larger_models_fit(size, gpus, fields, gigabytes):
    on_gpus = estimate(gpus, qwen3(size))
    plain = on_gpus.training(Config(**{**fields, "precision": "bf16"}))
    need = on_gpus.training(Config(optimizer="adamw_8bit", token_budget=8192, **fields))
    assert on_gpus.fits(need) and not on_gpus.fits(plain)
    assert need.bytes / 1e9 == pytest.approx(gigabytes, abs=1)
    assert "moments in 8 bits" in need.notes[0]


# -- does it fit


def test_settings_that_make_training_fit():
    one, eight = estimate(), estimate("h100:8")
    need = one.training(Config(kl_coef=0.1))
    assert not one.fits(need)
    remedies = dict(one.remedies(need))
    assert next(iter(remedies)) == 'optimize.optimizer = "adamw_8bit"'
    assert [*remedies][-1] == "optimize.lora = {}"
    assert all(map(one.fits, remedies.values()))
    shared = dict(eight.remedies(need))["optimize.processes = 8, optimize.shard = true"]
    assert shared.devices == 8 and eight.fits(shared) and not one.fits(shared)
    critic = estimate("h100:8", optimize={"algorithm": "ppo", "critic": "model"})
    settings = [setting for setting, _ in critic.remedies(critic.needs()[-1])]
    assert settings and "bf16_stochastic" not in " ".join(settings), "the recipe would refuse it"


def test_shards_go_with_8_bits_and_with_lora_before_4_bits():
    shards = "optimize.processes = 8, optimize.shard = true"
    llama = LlamaConfig(
        vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80,
        num_attention_heads=64, num_key_value_heads=8,
    )  # fmt: skip
    eight = estimate("h100:8", shape_of(llama))
    settings = [setting for setting, _ in eight.remedies(eight.training(Config()))]
    assert settings[0] == f"{shards}, optimize.lora = {{}}", "70 billion weights"
    assert '"nf4"' in settings[-1] and "shard" not in settings[-1]
    eight = estimate("h100:8", qwen3("32B"))
    settings = [setting for setting, _ in eight.remedies(eight.training(Config()))]
    assert settings[0] == f"{shards}, optimize.token_budget = 1280"
    assert settings[1] == f'{shards}, optimize.optimizer = "adamw_8bit"'
    one = estimate("h100", qwen3("32B"))
    assert not any("shard" in setting for setting, _ in one.remedies(one.training(Config())))


@pytest.mark.parametrize(
    ("generate", "sizes"),
    [
        ({}, [2, 4]),
        ({"options": {"tensor_parallel_size": 2}}, [4]),
        ({"engine": "transformers"}, []),
    ],
)
def test_an_engine_is_split_if_it_can_be(generate, sizes):
    eight = estimate("l4:8", generate=generate)  # of 28 heads no eighth is whole
    assert [setting for setting, _ in eight.remedies(sampled("l4"))] == [
        f"generate.options.tensor_parallel_size = {size}" for size in sizes
    ]


def test_what_fits_a_card_of_24_gb_is_in_the_documents():
    """The table of memory.md, as `quiver fit --gpu rtx4090` counts it."""
    ways = {
        "`bf16`": {},
        "`adamw_8bit`": {"optimizer": "adamw_8bit"},
        "`lora`": {"lora": {}},
        "`lora`, `token_budget = 2048`": {"lora": {}, "token_budget": 2048},
        "`nf4`": {"lora": {"base": "nf4"}},
        "`nf4`, `token_budget = 2048`": {"lora": {"base": "nf4"}, "token_budget": 2048},
    }
    columns = ["Qwen3", *ways, "decoded together"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for size in ("0.6B", "1.7B", "4B", "8B", "14B"):
        card = estimate("rtx4090", qwen3(size))
        cells = [size]
        for way in ways.values():
            need = card.training(Config(**way))
            tokens = int(need.notes[0].split()[2])
            again = ", recomputed" if "recomputed" in need.notes[0] else ""
            cell = f"{need.bytes / 1e9:.1f}: {tokens:,}{again}"
            cells.append(cell if card.fits(need) else f"no ({need.bytes / 1e9:.1f})")
        engine = card.sampling(GenerateConfig())
        decoded = engine.notes[0].split()[2]
        cells.append(decoded if card.fits(engine) else f"no ({engine.bytes / 1e9:.1f})")
        lines.append(f"| {' | '.join(cells)} |")
    table = "\n".join(lines)
    document = Path(__file__).parents[2] / "deployments/docs/memory.md"
    assert f"\n{table}\n\n" in document.read_text(), f"the table is now\n{table}"


def test_processes_on_a_cpu_share_its_memory_and_gpus_are_counted():
    host, one, two = (estimate(name, SMALL, WORK) for name in (None, "h100", "h100:2"))
    on_cpu = host.training(Config(processes=2, device="cpu"))
    assert on_cpu.devices == 2 and host.fits(on_cpu) and one.fits(on_cpu)
    assert not host.fits(host.training(Config(processes=10**6)))
    on_gpus = one.training(Config(processes=2))
    assert not one.has_enough(on_gpus) and not one.fits(on_gpus) and two.fits(on_gpus)
    config = GenerateConfig(device="cpu")
    assert one.sampling(config) == host.sampling(config), "GPUs change nothing"


def test_an_engine_takes_its_share_of_the_gpu_if_it_has_a_cache_of_its_own():
    greedy = estimate(
        shape=SMALL, work=WORK, generate={"options": {"gpu_memory_utilization": 0.99}}
    )
    assert greedy.fits(greedy.needs()[0]) and greedy.needs()[0].bytes > 80e9
    by_transformers = sampled(shape=SMALL, work=WORK, generate={"engine": "transformers"})
    assert by_transformers.bytes < 2e9


# -- a flow

MEASURE = """
import json, re
from pathlib import Path
from quiver.flows.recipe import load
from quiver.flows.calls import by_hand, perform

def memory(name):
    return int(re.search(rf"{name}:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

recipe = load("recipe.toml", ["run=bench", "reward.functions=[{use='length',arguments={target=100}}]"])
with by_hand(recipe):
    perform("reward", recipe.reward, {"rollouts": "bench/rollouts@1"}, label="one")
before = memory("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
with by_hand(recipe):
    done = perform("reward", recipe.reward, {"rollouts": "bench/rollouts@2"}, label="two")
print(json.dumps({"rows": done.rows, "growth": memory("VmHWM") - before}))
"""


@pytest.mark.slow
@pytest.mark.prefect
def test_a_gigabyte_of_rollouts(tmp_path):
    store = Store(tmp_path / "store")
    policy, rows = made.tiny_policy(store), 400_000
    small, large = made.make_prompts(store, 32), made.make_prompts(store, rows // 8)
    made.make_rollouts(store, policy, 256, asked=small)
    version = made.make_rollouts(store, policy, rows, asked=large)
    assert version.manifest.bytes["data"] > 1e9
    (tmp_path / "recipe.toml").write_text(RECIPE)
    env = command_environment(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["rows"] == rows
    assert found["growth"] < 50e6
