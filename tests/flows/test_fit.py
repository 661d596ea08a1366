"""`quiver fit`: what it tells is what stages take. Memory of a CPU is a process's own peak, measured;
bytes of a GPU are held to those that are counted on meta tensors in test_bytes_moved.py."""

import pytest
from transformers import GPT2Config, LlamaConfig, OpenAIGPTConfig, Qwen2MoeConfig

from quiver.flows.fit.machines import GPUS, Machine, parse_machine, this_host
from quiver.flows.fit.needs import Pass, needs_of, sampling, scoring, training
from quiver.flows.fit.remedies import fits, has_enough, remedies
from quiver.flows.fit.shapes import Shape, find_config, shape_of
from quiver.flows.fit.workload import Workload, workload_of
from quiver.flows.recipe import Recipe
from quiver.schemas.errors import ConfigError
from quiver.stages.common.store import Store
from quiver.stages.logprobs.config import Config as LogprobsConfig
from quiver.stages.optimize.config import Config
from tests.flows import measured_peak
from tests.flows.conftest import quiver
from tests.flows.measured_peak import COMPLETION, PROMPT, PROMPTS, SAMPLES, SIZES
from tests.stages.optimize import test_bytes_moved as counted
from tests.tiny import make_folder, make_policy

H100 = GPUS["h100"]
WORK = Workload(PROMPTS, SAMPLES, PROMPT, COMPLETION, PROMPT + COMPLETION, "the test")
SETTINGS = {
    "generate": {
        "options": {"max_num_seqs": 64},
        "dtype": "float32",
        "samples_per_prompt": SAMPLES,
    },
    "logprobs": {"precision": "fp32", "device": "cpu"},
    "optimize": {"precision": "fp32", "device": "cpu", "epochs": 2, "audit": {"enabled": False}},
}


def recipe(place, **sections) -> Recipe:
    fields = {
        "run": "tiny",
        "store": str(place / "store"),
        "policy": {"model": str(place / "model")},
        "data": {"source": "rows.jsonl", "limit": PROMPTS},
        "reward": {"functions": [{"use": "math"}]},
    }
    return Recipe(**{**fields, **sections})


@pytest.mark.parametrize(
    ("size", "stage"),
    [
        ("small", "generate"),
        ("small", "optimize"),
        ("small", "logprobs"),
        pytest.param("medium", "generate", marks=pytest.mark.slow),
        pytest.param("medium", "optimize", marks=pytest.mark.slow),
        pytest.param("medium", "logprobs", marks=pytest.mark.slow),
    ],
)
def test_memory_is_within_a_fifth_of_what_a_process_took(fresh_python, tmp_path, size, stage):
    settings = SETTINGS[stage]
    asked = settings
    if stage == "generate":
        sampled = {"engine": "vllm", "sampling": {"max_tokens": COMPLETION, "ignore_eos": True}}
        asked = {**settings, **sampled}
    store, refs = measured_peak.prepare(tmp_path, size, stage)
    peak = measured_peak.measure(store, stage, asked, refs)
    sections = {"optimize": {**SETTINGS["optimize"], "kl_coef": 0.1}, stage: asked}
    if stage == "optimize":
        sections["optimize"] = {**asked, "kl_coef": 0.1}
    needs = needs_of(recipe(tmp_path, **sections), shape_of(SIZES[size]), WORK, this_host())
    (need,) = [need for need in needs if need.stage.startswith(stage)]
    assert need.bytes == pytest.approx(peak, rel=0.2)


SEVEN = shape_of(counted.MODELS["7B"])
LONG = Workload(128, 8, 256, 1024, 1280, "the test")


def test_a_shape_is_told_from_the_config_alone(tmp_path):
    assert (SEVEN.weights, SEVEN.layers, SEVEN.head) == (7_615_616_512, 28, 152064 * 3584)
    assert (SEVEN.attention, SEVEN.keys, SEVEN.is_tied) == (3584, 512, False)
    layer = 3584 * (3584 + 2 * 512) + 3584 + 2 * 512 + 3584**2 + 3 * 3584 * 18944 + 2 * 3584
    assert SEVEN.largest_layer == layer
    assert SEVEN.outside_layers == 2 * SEVEN.head + 3584
    make_folder(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    shape = shape_of(find_config(recipe(tmp_path)))
    assert (shape.hidden, shape.vocabulary) == (32, 320)


@pytest.mark.parametrize(
    ("config", "bytes_a_weight"),
    [
        ({"precision": "fp32"}, 16),
        ({"precision": "bf16"}, 18),
        ({"precision": "bf16_stochastic"}, 14),
    ],
)
def test_what_training_holds_of_a_weight_is_what_the_documents_say(config, bytes_a_weight):
    parts = training(SEVEN, Config(**config), LONG, H100).parts
    held = sum(parts[name] for name in ("weights", "gradients", "moments"))
    assert held / SEVEN.weights == pytest.approx(bytes_a_weight, rel=0.02)


def test_what_does_not_fit_is_told_with_what_would(tmp_path):
    seven = recipe(tmp_path, optimize={"kl_coef": 0.1})
    need = training(SEVEN, seven.optimize_config(), LONG, H100)
    assert not fits(need, H100)
    ways = dict(remedies(need, seven, SEVEN, LONG, H100))
    assert next(iter(ways)) == "optimize.lora = {}" and all(
        fits(way, H100) for way in ways.values()
    )
    eight = Machine(**{**H100.__dict__, "count": 8})
    shared = dict(remedies(need, seven, SEVEN, LONG, eight))
    way = shared["optimize.processes = 8, optimize.shard = true"]
    assert way.devices == 8 and fits(way, eight) and not fits(way, H100)
    four = parse_machine("l4:4")
    sampled = sampling(SEVEN, seven, LONG, parse_machine("rtx4090"))
    assert fits(sampled, parse_machine("rtx4090"))
    halved = recipe(tmp_path, generate={"options": {"tensor_parallel_size": 2}})
    split = sampling(SEVEN, halved, LONG, four)
    assert (split.devices, split.parts["weights"]) == (2, SEVEN.weights)


def test_no_setting_is_advised_that_the_recipe_would_refuse(tmp_path):
    with_critic = recipe(tmp_path, optimize={"algorithm": "ppo", "critic": "model"})
    need = training(SEVEN, with_critic.optimize_config(), LONG, H100)
    larger = Machine(**{**H100.__dict__, "memory": int(0.75 * need.bytes)})
    ways = dict(remedies(need, with_critic, SEVEN, LONG, larger))
    assert ways and not [setting for setting in ways if "bf16_stochastic" in setting]


def test_one_more_gpu_halves_seconds_on_paper(tmp_path):
    all_of_them = recipe(tmp_path, placement={"devices": "all"})
    enough = Workload(1024, 8, 256, 1024, 1280, "the test")  # for as many at once as fit
    one, two = (
        sampling(SEVEN, all_of_them, enough, parse_machine(text)) for text in ("h100", "h100:2")
    )
    assert (one.devices, two.devices) == (1, 2)
    assert two.seconds == pytest.approx(one.seconds / 2, rel=0.01)
    assert one.seconds > one.flops / H100.bf16_flops


def test_a_run_that_sampled_says_how_long_its_rollouts_are(tmp_path):
    store = Store(tmp_path / "store")
    policy = make_policy(store)
    measured_peak.make_rollouts(store, policy)
    as_sampled = {"samples_per_prompt": SAMPLES, "sampling": {"max_tokens": COMPLETION}}
    work = workload_of(recipe(tmp_path, generate=as_sampled))
    assert work == Workload(PROMPTS, SAMPLES, PROMPT, COMPLETION, 192, "tiny/rollouts@1")
    assert work.passed_tokens == PROMPTS * PROMPT + PROMPTS * SAMPLES * (COMPLETION - 1)
    doubled = recipe(
        tmp_path,
        data={"source": "rows.jsonl"},
        generate={**as_sampled, "samples_per_prompt": 2 * SAMPLES},
    )
    assert workload_of(doubled).rollouts == 2 * work.rollouts
    fewer = recipe(tmp_path, data={"source": "rows.jsonl", "limit": 9}, generate=as_sampled)
    assert workload_of(fewer).prompts == 9
    made_by_a_function = recipe(tmp_path, policy={"model": "mine.py:make"})
    assert find_config(made_by_a_function).vocab_size == 320


RECIPE = """
run = "tiny"
[policy]
model = "model"
[data]
source = "rows.jsonl"
limit = 4
[generate]
sampling = { max_tokens = 64 }
[[reward.functions]]
use = "math"
"""


def test_the_command_line_tells_it_and_ends_with_7_where_it_does_not_fit(tmp_path):
    make_folder(tmp_path / "model")
    (tmp_path / "recipe.toml").write_text(RECIPE)
    answer = quiver(tmp_path, "fit", "recipe.toml", "--gpu", "a100:2")
    assert answer["fits"] and [each["stage"] for each in answer["stages"]] == [
        "generate",
        "optimize",
    ]
    for each in answer["stages"]:
        assert each["bytes"] == pytest.approx(sum(each["parts"].values()), abs=5)
        assert each["fits"] and each["paper_seconds"] > 0 and each["fits_with"] == []
    LlamaConfig(hidden_size=8192, num_hidden_layers=80, intermediate_size=28672).save_pretrained(
        tmp_path / "model"
    )
    answer = quiver(tmp_path, "fit", "recipe.toml", "--gpu", "l4", code=7)
    assert not answer["fits"] and answer["stages"][1]["fits_with"] == []
    assert not (tmp_path / "store").exists()


def test_what_is_asked_of_it_goes_before_what_the_run_did(tmp_path):
    store = Store(tmp_path / "store")
    measured_peak.make_rollouts(store, make_policy(store))
    make_folder(tmp_path / "model", "gpt2")
    assert find_config(recipe(tmp_path)).model_type == "gpt2"
    longer = workload_of(recipe(tmp_path, generate={"sampling": {"max_tokens": 900}}))
    assert (longer.prompt_tokens, longer.completion_tokens) == (PROMPT, 900)
    assert longer.longest == PROMPT + 900 and longer.source.startswith("prompts as in")


def test_processes_on_a_cpu_share_its_memory_and_gpus_are_counted(tmp_path):
    shape = shape_of(SIZES["small"])
    host = this_host()
    two = training(shape, Config(processes=2, device="cpu"), WORK, host)
    assert two.devices == 2 and fits(two, host) and fits(two, H100)
    many = training(shape, Config(processes=10**6), WORK, host)
    assert not fits(many, host)
    on_gpus = training(shape, Config(processes=2), WORK, H100)
    assert not has_enough(on_gpus, H100) and not fits(on_gpus, H100)
    assert fits(on_gpus, parse_machine("h100:2"))


def test_no_split_is_advised_to_an_engine_that_knows_none(tmp_path):
    need = sampling(SEVEN, recipe(tmp_path), LONG, GPUS["l4"])
    eight = parse_machine("l4:8")  # of 28 heads no eighth is whole
    for options, sizes in (({}, [2, 4]), ({"tensor_parallel_size": 2}, [4])):
        split = recipe(tmp_path, generate={"engine": "vllm", "options": options})
        advised = [setting for setting, _ in remedies(need, split, SEVEN, LONG, eight)]
        assert advised == [f"generate.options.tensor_parallel_size = {size}" for size in sizes]
    by_transformers = recipe(tmp_path, generate={"engine": "transformers"})
    assert remedies(need, by_transformers, SEVEN, LONG, eight) == []


def test_no_more_gpus_are_counted_than_there_are_shards(tmp_path):
    eight = parse_machine("h100:8")
    work = Workload(64, 8, 256, 1024, 1280, "the test")
    for rows, devices in ((256, 2), (64, 8)):
        asked = {"placement": {"devices": "all"}, "generate": {"rows_per_shard": rows}}
        need = sampling(SEVEN, recipe(tmp_path, **asked), work, eight)
        assert need.devices == devices
        assert ("2 shards of" in " ".join(need.notes)) == (rows == 256)


def test_vllm_decodes_fewer_together_on_an_a100(tmp_path):
    shape = shape_of(SIZES["small"])
    for name, most in (("a100", 256), ("h100", 1024), ("l40s", 256)):
        need = sampling(shape, recipe(tmp_path), LONG, GPUS[name])
        assert need.notes[0].startswith(f"up to {most} rollouts")


def test_adapters_need_no_gradients_of_the_base(tmp_path):
    every, adapters = (training(SEVEN, Config(lora=lora), LONG, H100) for lora in (None, {}))
    assert adapters.flops == pytest.approx(every.flops * 2 / 3)


def test_episodes_are_as_long_as_they_may_be(tmp_path):
    turns = {"tools": ["quiver.deployments.recipes.calculator:calculate"], "max_tokens": 4096}
    played = recipe(tmp_path, generate={"turns": turns, "sampling": {"max_tokens": 48}})
    assert workload_of(played).longest > 4096


def test_copies_of_an_engine_are_whole_each(tmp_path):
    args = {"data_parallel_size": 2, "pipeline_parallel_size": 2}
    copies = recipe(tmp_path, generate={"options": {"engine_args": args}})
    need = sampling(SEVEN, copies, LONG, parse_machine("h100:4"))
    assert (need.devices, need.parts["weights"]) == (4, 2 * SEVEN.weights / 2)


def test_an_engine_that_takes_nearly_all_of_a_gpu_fits_there(tmp_path):
    shape = shape_of(SIZES["small"])
    greedy = recipe(tmp_path, generate={"options": {"gpu_memory_utilization": 0.99}})
    assert fits(sampling(shape, greedy, WORK, H100), H100)


def test_a_stage_on_the_cpu_of_a_host_with_gpus_is_one_of_this_host(tmp_path):
    shape = shape_of(SIZES["small"])
    there = recipe(tmp_path, generate={"device": "cpu"}, optimize={"device": "cpu"})
    for need_of in (
        lambda machine: sampling(shape, there, WORK, machine),
        lambda machine: training(shape, there.optimize_config(), WORK, machine),
    ):
        assert need_of(H100) == need_of(this_host())


def test_a_reward_model_takes_as_many_gpus_as_it_is_split_over(tmp_path):
    make_folder(tmp_path / "model")
    judge = {"model": str(tmp_path / "model"), "engine": "vllm"}
    needs = []
    for size in (1, 2):
        model = {**judge, "engine_args": {"tensor_parallel_size": size}}
        scored = recipe(tmp_path, reward={"models": [model]})
        [need] = [
            each
            for each in needs_of(scored, SEVEN, WORK, parse_machine("h100:2"))
            if each.stage.startswith("reward")
        ]
        needs.append(need)
    assert [need.devices for need in needs] == [1, 2]
    weights = shape_of(find_config(recipe(tmp_path))).weights
    assert [need.parts["weights"] for need in needs] == [2 * weights, weights]


def test_an_engine_without_a_cache_of_its_own_takes_no_share_of_the_gpu(tmp_path):
    shape = shape_of(SIZES["small"])
    by_transformers = recipe(tmp_path, generate={"engine": "transformers"})
    need = sampling(shape, by_transformers, WORK, H100)
    assert need.bytes < 2e9 < sampling(shape, recipe(tmp_path), WORK, H100).bytes
    mine = recipe(tmp_path, generate={"engine": "mine.py:Engine"})
    assert [need.stage for need in needs_of(mine, shape, WORK, H100)] == ["optimize"]


def test_what_each_token_is_multiplied_with(tmp_path):
    dense = shape_of(GPT2Config())
    assert dense.multiplied == dense.in_layers  # without a gate
    assert (dense.intermediate, dense.is_tied) == (4 * 768, True)
    sparse = shape_of(
        Qwen2MoeConfig(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
            num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=48,
        )
    )  # fmt: skip
    assert sparse.multiplied == 2 * (4 * 64 * 64 + 3 * 64 * (2 * 32 + 48)) < sparse.in_layers


FEW = Workload(4, 2, 100, 50, 150, "the test")
ONE_PASS = 2 * SEVEN.in_layers * (400 + 8 * 49) + 2 * SEVEN.head * 400 + 4 * 28 * 3584 * 125 * 792
"""Operations over FEW: two a weight and token, four a number of attention's and key it meets."""


def test_operations_are_counted_by_hand():
    twice = training(SEVEN, Config(epochs=2), FEW, H100)
    assert twice.flops == pytest.approx(2 * 3 * ONE_PASS)
    again = training(SEVEN, Config(activation_checkpointing=True), FEW, H100)
    assert again.flops == pytest.approx(4 * ONE_PASS)
    scored = scoring(SEVEN, LogprobsConfig(role="ref"), FEW, H100, 1)
    assert scored.flops == pytest.approx(ONE_PASS)
    of_a_gpu = {"bf16": 989e12, "fp32": 67e12}
    for precision, rate in of_a_gpu.items():
        need = training(SEVEN, Config(precision=precision), LONG, H100)
        assert need.seconds == pytest.approx(max(need.flops / rate, need.moved / 3.35e12))
    assert need.flops / 67e12 > 2 * need.moved / 3.35e12


def test_one_rank_shares_nothing():
    alone, shared = (training(SEVEN, Config(shard=shard), FEW, H100) for shard in (False, True))
    assert alone == shared


def test_sampling_on_paper(tmp_path):
    """A prompt is read once; then each step of the engine reads all weights, and of each rollout
    its keys and values."""
    need = sampling(SEVEN, recipe(tmp_path), FEW, H100)
    products = 2 * SEVEN.in_layers * (400 + 400) + 2 * SEVEN.head * 400
    attention = 4 * 28 * 3584 * (400 * 50 + 400 * 125)
    assert need.flops == pytest.approx(products + attention)
    weights, keys = 50 * SEVEN.weights * 2, 400 * 125 * 2 * 28 * 512 * 2
    assert need.moved == pytest.approx(weights + keys)
    assert need.seconds == pytest.approx(need.moved / 3.35e12)


def test_a_rank_with_its_share_holds_what_is_whole_in_a_pass_besides():
    parts = training(SEVEN, Config(precision="fp32", processes=8, shard=True), LONG, H100).parts
    assert parts["weights"] == 4 * SEVEN.weights / 8
    weights_and_gradients = 2 * 4 * (2 * SEVEN.head)  # of both embeddings, in float32
    assert weights_and_gradients < parts["whole for a moment"] < 2 * weights_and_gradients


def test_bytes_moved_follow_steps_and_micro_batches():
    moved = {
        (epochs, minibatches): training(
            SEVEN, Config(epochs=epochs, minibatches=minibatches, token_budget=198), FEW, H100
        ).moved
        for epochs, minibatches in ((1, 1), (2, 1), (1, 2))
    }
    assert moved[2, 1] == pytest.approx(2 * moved[1, 1])
    # four micro-batches either way; one more step of AdamW's seven numbers, with gradients that are
    # clipped and summed
    assert moved[1, 2] - moved[1, 1] == pytest.approx((4 * 7 + 8 + 12) * SEVEN.weights)
    scored = scoring(SEVEN, LogprobsConfig(role="ref", token_budget=198), FEW, H100, 1)
    forward_and_backward = Pass(SEVEN, FEW, H100, is_narrow=True).moved_by_micro_batch(198)
    assert scored.moved == pytest.approx(4 / 3 * forward_and_backward)


def test_what_a_pass_holds_is_counted_by_hand():
    stored, again = (
        training(SEVEN, Config(activation_checkpointing=again), FEW, H100).parts["activations"]
        for again in (False, True)
    )
    assert again - stored / 28 == pytest.approx(792 * 4 * 3584 * 28)  # what each layer reads
    # of each token both norms' inputs and outputs, queries, attention's output, gate and up, and the
    # keys and values of what its row attends to: 400 of prompts, 149 of each rollout
    kept = 2 * 3584 * (4 + 2) + 2 * (2 * 3584 + 2 * 512 * (400 + 8 * 149) / 792 + 2 * 18944)
    assert stored == pytest.approx(792 * 28 * kept)
    narrow, wide = (
        training(SEVEN, Config(precision=precision), FEW, H100).parts["activations"]
        for precision in ("bf16_stochastic", "bf16")
    )
    assert wide - narrow == 792 * 28 * 2 * 3584 * 2  # the stream between layers, twice
    longest = training(SEVEN, Config(token_budget=64), FEW, H100)
    assert longest.notes == ("micro-batches of 150 tokens, bf16",)
    scored = scoring(SEVEN, LogprobsConfig(role="ref"), FEW, H100, 1)
    assert scored.parts["weights"] == 4 * SEVEN.weights + 2 * (SEVEN.in_layers + SEVEN.head)


def test_what_adapters_and_a_critic_hold():
    sides = 2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18944)
    adapters = 28 * 16 * sides
    base = 2 * (SEVEN.in_layers + SEVEN.head) + 4 * (SEVEN.head + 3584)
    for precision, weights in (("bf16", base), ("fp32", 4 * SEVEN.weights)):
        config = Config(precision=precision, lora={"rank": 16})
        parts = training(SEVEN, config, FEW, H100).parts
        assert parts["weights"] == weights + 4 * adapters
        assert (parts["gradients"], parts["moments"]) == (4 * adapters, 8 * adapters)
    alone, judged = (
        training(SEVEN, Config(algorithm="ppo", critic=critic), FEW, H100).parts
        for critic in ("trunk", "model")
    )
    for name in ("weights", "gradients", "moments"):
        assert judged[name] == 2 * alone[name]


def test_a_cache_is_as_large_as_it_is_told(tmp_path):
    shape = shape_of(SIZES["small"])
    asked = recipe(tmp_path, generate={"options": {"cpu_kv_cache_gib": 2}, "device": "cpu"})
    assert sampling(shape, asked, WORK, this_host()).parts["cache"] == 2 * 2**30
    unasked = recipe(tmp_path, generate={"device": "cpu", "dtype": "float32"})
    of_a_gpu = sampling(SEVEN, recipe(tmp_path), LONG, H100)
    assert of_a_gpu.bytes == pytest.approx(0.9 * H100.memory)  # vLLM's own default
    endless = Workload(4, 2, 100, 10**7, 10**7, "the test")
    most = sampling(shape, unasked, endless, this_host()).parts["cache"]
    assert most == 0.4 * this_host().memory
    one_rollout = sampling(SEVEN, recipe(tmp_path), LONG, parse_machine("rtx3090")).parts["cache"]
    small = Machine("small", 2**30, 1, 1e12, 1e12, 1e12)
    assert one_rollout > sampling(SEVEN, recipe(tmp_path), LONG, small).parts["cache"]
    assert sampling(SEVEN, recipe(tmp_path), LONG, small).parts["cache"] == 1280 * 28 * 2 * 512 * 2


def test_devices_are_those_that_whole_engines_use(tmp_path):
    four = parse_machine("h100:4")
    for asked, size, devices in ((3, 2, 2), (8, 2, 4), ("all", 1, 4), (None, 2, 2)):
        placed = recipe(
            tmp_path,
            placement={} if asked is None else {"devices": asked},
            generate={"options": {"tensor_parallel_size": size}},
        )
        assert sampling(SEVEN, placed, LONG, four).devices == devices
    many = Workload(80, 8, 100, 50, 150, "the test")
    scored = recipe(
        tmp_path, placement={"devices": "all"}, optimize={"kl_coef": 0.1}, logprobs={"prox": True}
    )
    devices = {need.stage: need.devices for need in needs_of(scored, SEVEN, many, four)}
    assert devices == {"generate": 3, "logprobs (ref)": 3, "logprobs (prox)": 3, "optimize": 1}


def test_denominators_that_the_engine_can_not_give_are_scored(tmp_path):
    for optimize, stages in (({}, []), ({"prox_of": "start"}, ["logprobs (prox)"])):
        asked = recipe(tmp_path, optimize=optimize)
        needs = needs_of(asked, SEVEN, FEW, H100)
        assert [need.stage for need in needs] == ["generate", *stages, "optimize"]


def test_what_can_not_be_told_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="expected one of a10, a100") as caught:
        parse_machine("h10")
    assert caught.value.next == "name --gpu h100"
    for count in ("none", "0", "1025", "\N{FULLWIDTH DIGIT ONE}", "1" * 5000):
        with pytest.raises(ConfigError, match="number of GPUs"):
            parse_machine(f"h100:{count}")
    eight = parse_machine("H100:8")
    assert (eight.name, eight.count, eight.memory) == ("h100", 8, 81559 * 2**20)
    make_folder(tmp_path / "t5", "t5")
    seq2seq = recipe(tmp_path, policy={"model": str(tmp_path / "t5")})
    with pytest.raises(ConfigError, match="decoders with attention alone"):
        shape_of(find_config(seq2seq))
    with pytest.raises(ConfigError, match="no layers of a kind that is known"):
        shape_of(OpenAIGPTConfig())
    made = recipe(tmp_path, policy={"model": "mine.py:make"})
    with pytest.raises(ConfigError, match="has not made the model yet"):
        find_config(made)
    assert isinstance(SEVEN, Shape)
