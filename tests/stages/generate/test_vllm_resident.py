"""Engine `vllm` sleeps and takes the next policy: the calls of vLLM, and what it refuses."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from quiver.stages.core.run.runner import run_stage
from quiver.stages.core.store import Store
from quiver.stages.generate.engine import Setup
from quiver.stages.generate.engines import vllm
from quiver.stages.generate.options import Sampling, VllmOptions
from quiver.stages.model import vllm_env
from tests.tiny import EOS, make_folder, make_policy
from tests.vllm_process import checked

MEMORY = {"gpu_memory_utilization": 0.5}


class Recorder:
    """Stands in for `vllm.LLM`, and notes its calls in their order."""

    def __init__(self, awake: bool = True) -> None:
        self.asked: list[tuple] = []
        self.awake = awake

    def sleep(self, level):
        self.asked.append(("sleep", level))

    def wake_up(self, tags):
        self.asked.append(("wake_up", *tags))
        return self.awake and tags == ["kv_cache"]

    def collective_rpc(self, method, kwargs):
        self.asked.append((method, kwargs))

    def reset_prefix_cache(self):
        self.asked.append(("reset_prefix_cache",))
        return True


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Store:
    """Two policies that differ by their weights, and others that differ by more."""
    store = Store(tmp_path_factory.mktemp("resident") / "store")
    for run, seed, family in (("tiny", 0, "llama"), ("next", 1, "llama"), ("qwen", 0, "qwen3")):
        make_policy(store, run, family, seed=seed)
    folders = {run: make_folder(tmp_path_factory.mktemp(run)) for run in ("turning", "words")}
    config = LlamaConfig.from_pretrained(folders["turning"])
    config.rope_parameters["rope_theta"] = 7.0
    LlamaForCausalLM(config).save_pretrained(folders["turning"])
    with open(folders["words"] / "tokenizer.json", "a") as tokenizer:
        tokenizer.write("\n")
    for run, folder in folders.items():
        run_stage("policy", {"model": str(folder)}, store, into=run, in_process=True)
    return store


def setup_of(store: Store, run: str = "tiny", **changed) -> Setup:
    fields = {"max_model_len": 128, "options": MEMORY, "resident": True, **changed}
    return Setup(store.open(f"{run}/policy@0"), Sampling(), (EOS,), **fields)


def engine_of(setup: Setup, llm: Recorder) -> vllm.VllmEngine:
    """An engine as it is on a GPU, but for vLLM itself."""
    engine = vllm.VllmEngine.__new__(vllm.VllmEngine)
    engine.setup = setup
    engine.cpu = False
    engine._max_model_len = setup.max_model_len
    engine.options = VllmOptions(**setup.options)
    engine.llm = llm
    engine.link = SimpleNamespace(release=lambda: llm.asked.append(("release",)))
    engine._architecture = vllm._architecture(setup.policy)
    return engine


def test_it_wakes_loads_the_weights_and_forgets_its_prefix_cache(store):
    llm = Recorder()
    engine = engine_of(setup_of(store), llm)
    assert engine.sleep()
    shorter = {"stop_ids": (), "max_model_len": 64, "longest": 40}
    following = replace(setup_of(store, "next"), sampling=Sampling(max_tokens=3), **shorter)
    assert engine.take(following)
    assert engine.setup is following
    folder = str(store.open("next/policy@0").files.folder)
    assert llm.asked == [
        ("release",),
        ("sleep", 2),
        ("wake_up", "weights"),
        ("reload_weights", {"weights_path": folder}),
        ("wake_up", "kv_cache"),
        ("reset_prefix_cache",),
    ]
    # it was made for this length, and stays as it was made
    assert engine.take(setup_of(store)) and not engine.take(setup_of(store, max_model_len=192))


def test_an_engine_that_does_not_wake_took_nothing(store):
    assert not engine_of(setup_of(store), Recorder(awake=False)).take(setup_of(store, "next"))


def test_it_takes_nothing_that_differs_by_more_than_weights(store):
    llm = Recorder()
    engine = engine_of(setup_of(store), llm)
    for changed in (
        {"max_model_len": 192},
        {"dtype": "float32"},
        {"device": "cuda"},
        {"options": {**MEMORY, "max_num_seqs": 8}},
        {"options": {**MEMORY, "lora": True}},
        {"most_media": {"image": 1}},
        {"base": store.open("tiny/policy@0")},
        {"run": "qwen"},
        {"run": "turning"},
        {"run": "words"},
    ):
        assert not engine.take(setup_of(store, **{"run": "next", **changed})), changed
    # These positions depend on the length.
    engine._architecture = ({"rope_parameters": {"rope_type": "longrope"}}, {})
    assert not engine.take(setup_of(store, "next", max_model_len=64))
    assert llm.asked == []


def test_an_engine_with_more_than_weights_does_not_sleep(store):
    llm = Recorder()
    for changed in (
        {"base": store.open("tiny/policy@0")},
        {"most_media": {"image": 1}},
        {"options": {"engine_args": {"kv_cache_dtype": "fp8"}}},
        {"resident": False},
    ):
        assert not engine_of(setup_of(store, **changed), llm).sleep(), changed
    assert llm.asked == []


def test_its_cpu_build_never_sleeps(store):
    """It is the default where there is one GPU, whichever build is installed there."""
    engine = engine_of(setup_of(store), llm := Recorder())
    engine.cpu = True
    assert not engine.sleep() and llm.asked == []


@pytest.mark.vllm
def test_a_real_vllm_takes_weights_and_its_cpu_build_takes_them_wrong(store):
    """Everything except the memory that a GPU gives back. If the CPU's answers become right, it may
    sleep there too."""
    answers = checked("tests.stages.generate.resident_checks", store.url)
    assert answers["slept"] and answers["taken"]
    assert answers["second"] != answers["first"], "it is the same model"
    is_right = answers["second"] == [pytest.approx(row, abs=1e-3) for row in answers["fresh"]]
    assert is_right == (not vllm_env.find_build("test").cpu)
