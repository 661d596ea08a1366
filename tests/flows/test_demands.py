"""What is asked of servers, hosts and GPUs is looked at before a run samples anything."""

import pytest

from quiver.flows.preflight import check_demands, preflight
from quiver.flows.recipe import load
from quiver.schemas.errors import ConfigError
from tests.flows.conftest import write_recipe

SERVERS = 'generate={engine="vllm-server", options={urls=["http://127.0.0.1:9"]}}'
WAITS = "generate.options.wait_seconds=60"
TWO_GPUS = "generate.options={tensor_parallel_size=2}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_recipe(tmp_path_factory.mktemp("demands") / "place")


@pytest.mark.parametrize(
    ("settings", "environment", "problem", "advice"),
    [
        (
            [SERVERS, "iterations=3"],
            {},
            r"generate\.engine vllm-server: 3 policies need servers one after another",
            "options.wait_seconds to as",
        ),
        ([SERVERS, WAITS, "data.images='picture'"], {}, "pictures", 'engine = "transformers"'),
        ([SERVERS, WAITS, "optimize.lora.save='adapter'"], {}, "adapter alone", '"merged"'),
        ([SERVERS, WAITS, "generate.options.token='env:NONE'"], {}, "NONE is not set", "set NONE"),
        (["optimize.processes=4"], {"CUDA_VISIBLE_DEVICES": "0,1"}, "4 GPUs are needed", "lower"),
        (
            ["generate.engine='vllm'", "generate.options={tensor_parallel_size=4}"],
            {"CUDA_VISIBLE_DEVICES": "0,1"},
            "4 GPUs are needed",
            "lower processes or tensor_parallel_size",
        ),
        (
            [
                "generate.engine='vllm'",
                "generate.options={tensor_parallel_size=4}",
                "placement.devices=2",
            ],
            {},
            "one engine needs 4 GPUs",
            "placement.devices to 4",
        ),
        (
            ["generate.engine='transformers'", "generate.options={tensor_parallel_size=4}"],
            {},
            "options.tensor_parallel_size belongs to engine vllm, not to transformers",
            "quiver keys generate",
        ),
        (["generate.engine='scripted'"], {}, "logprobs are made up", "audit.enabled = false"),
        (["placement.python.optimize='bin/py'"], {}, "optimize bin/py: there is no", "interpreter"),
    ],
)
def test_what_could_not_begin_is_refused(
    folder, monkeypatch, settings, environment, problem, advice
):
    monkeypatch.chdir(folder)
    for name, text in environment.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError, match=problem) as caught:
        preflight(load(folder / "recipe.toml", settings))
    assert advice in caught.value.next


def test_an_evaluation_by_another_engine_begins_without_options(folder):
    asked = ["generate.engine='vllm'", "generate.options={tensor_parallel_size=4}"]
    by_servers = 'evaluate.generate={engine="vllm-server", options={urls=["http://127.0.0.1:9"]}}'
    recipe = load(folder / "recipe.toml", [*asked, by_servers])
    assert recipe.generate_config(1).options == {"tensor_parallel_size": 4}
    config = recipe.generate_config(1, evaluation=True)
    assert (config.engine, config.options) == ("vllm-server", {"urls": ["http://127.0.0.1:9"]})


@pytest.mark.parametrize(
    ("settings", "environment"),
    [
        ([SERVERS, "iterations=1", "evaluate.generate={engine='transformers'}"], {}),
        ([SERVERS, WAITS], {}),
        (["generate.engine='vllm'", TWO_GPUS, "placement.devices=2"], {}),
        ([SERVERS, "placement.generate='pool'"], {}),
        (["optimize.processes=4", "placement.optimize='pool'"], {"CUDA_VISIBLE_DEVICES": "0"}),
    ],
)
def test_what_can_begin_is_let_through(folder, monkeypatch, settings, environment):
    monkeypatch.chdir(folder)
    for name, text in environment.items():
        monkeypatch.setenv(name, text)
    check_demands(load(folder / "recipe.toml", settings))


def test_servers_of_an_evaluation_have_demands_of_their_own(folder, monkeypatch):
    """It samples from the first policy and from the last one, however many the run makes."""
    monkeypatch.chdir(folder)
    by_servers = 'evaluate.generate={engine="vllm-server", options={urls=["http://127.0.0.1:9"]}}'
    recipe = load(folder / "recipe.toml", [by_servers, "iterations=1"])
    with pytest.raises(ConfigError, match="2 policies need servers") as caught:
        check_demands(recipe)
    assert "set evaluate.generate.options.wait_seconds" in caught.value.next
