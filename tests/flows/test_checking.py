"""`quiver check` sees what `quiver run` sees: the first rows go through the stages of a run."""

import json
import logging
import shutil
import tracemalloc
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest

from quiver.flows.calls import by_hand
from quiver.flows.checking import Looked, failure, look
from quiver.flows.doubts import questions
from quiver.flows.first_rows import Answered, Score, visible
from quiver.flows.post_train import Chain
from quiver.flows.preflight import preflight
from quiver.flows.recipe import load
from quiver.flows.rerun import rerun
from quiver.schemas.errors import ConfigError, ConflictError, LineageError
from quiver.stages.core.store import Store
from quiver.stages.evaluate.config import IS_THE_SUM
from quiver.stages.prompt.columns import plain_table, to_table
from quiver.stages.prompt.config import Config
from tests import sight
from tests.flows.conftest import write_recipe
from tests.stages.model.chat.test_control_tokens import mistral
from tests.stages.optimize.test_critic_from import make_classifier
from tests.tiny import EOS, make_folder, tokenizer
from tests.writing import run_here, write_lines

REWARDS = """
import random


def as_trl(completions, **kwargs):
    return [len(completion[0]["content"]) for completion in completions]


def letters(completions):
    return [len(text) for text in completions]


def none(completions):
    return [None for _ in completions]


def exact(completions, answer):
    print("asked about", completions, answer)
    return [float(text == str(right)) for text, right in zip(completions, answer)]


def strict(completions, *, answer, level):
    return [float(answer[0] == 5)] * len(completions)
"""
ALONE = "data.held_out=null"
WHOLE = (ALONE, "data.limit=null")
"""All rows of the training data, and no others."""


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    folder = write_recipe(tmp_path_factory.mktemp("checked"))
    with (folder / "rewards.py").open("a") as file:
        file.write(REWARDS)
    return folder


@pytest.fixture
def folder(original, tmp_path, monkeypatch) -> Path:
    """A folder of one's own with the recipe and all that it names; it is the working one."""
    shutil.copytree(original, tmp_path / "here", ignore=shutil.ignore_patterns("prefect"))
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def check(*settings: str, **asked: bool) -> Looked:
    return look(load("recipe.toml", settings), Path("recipe.toml"), **asked)


def warnings(*settings: str) -> list[str]:
    return check(*settings).answer["warnings"]


def write_rows(rows: list[dict], name: str = "questions.jsonl") -> None:
    write_lines(name, rows)


def rewarded(use: str, *more: str) -> str:
    """The setting of one reward function."""
    return f"reward.functions=[{{{', '.join([f'use={use!r}', *more])}}}]"


def asks(*answers) -> list[dict]:
    """A row with a question of its own for each of these answers."""
    return [{"question": f"{n}?", "answer": answer} for n, answer in enumerate(answers)]


def import_base(recipe, store=None) -> str:
    """What a run does first; in its own store unless another is given."""
    return run_here("policy", recipe.policy, store or recipe.store, into=recipe.run)


def prompts_of_a_run(*settings: str):
    """The version of prompts that the first iteration of a run makes."""
    recipe = load("recipe.toml", settings).resolved()
    store = Store("elsewhere")
    policy = import_base(recipe, store)
    return store.open(run_here("prompt", recipe.prompt_config(1), store, policy=policy))


# -- what the first rows become


def test_prompts_are_measured_and_shown_as_a_run_makes_them(folder):
    first = prompts_of_a_run().table().slice(0, 1).to_pylist()[0]
    before = sorted(path for path in folder.rglob("*") if "elsewhere" not in path.parts)
    looked = check(is_shown=True)
    assert looked.answer["prompts"]["data"] == {
        "rows": 8,
        "looked_at": 8,
        "dropped": 0,
        "tokens": {"min": 19, "median": 19, "max": 20},
        "most_tokens": 250,
    }
    assert looked.answer["prompts"]["data.held_out"]["looked_at"] == 3
    shown = looked.answer["first_prompt"]
    assert shown["tokens"] == len(first["prompt_ids"])
    assert shown["text"].replace("⟦", "").replace("⟧", "") == first["prompt_text"]
    question = first["columns"]["question"]
    assert shown["text"] == (
        f"⟦<|im_start|>⟧user\n{question}⟦<|im_end|>⟧\n⟦<|im_start|>⟧assistant\n"
    )
    assert shown["text"] in looked.lines
    assert looked.answer["warnings"] == []
    after = sorted(path for path in folder.rglob("*") if "elsewhere" not in path.parts)
    assert after == before, "nothing is written"


def test_control_tokens_stand_in_brackets_with_the_space_behind_them():
    typed = tokenizer().encode("say <|im_end|>", split_special_tokens=True)
    assert visible(tokenizer(), [*typed, EOS]) == "say <|im_end|>⟦<|im_end|>⟧"
    made, _ = mistral()
    ids = made.convert_tokens_to_ids(["[INST]", "▁", "s", "[/INST]", "s"])
    assert made.unk_token_id not in ids
    assert visible(made, ids) == "⟦[INST]⟧ s⟦[/INST]⟧s"
    assert visible(made, ids[1:3]) == "s", "the tokenizer puts that space before a text"


@pytest.mark.parametrize(
    "rows, settings",
    [
        ([{"question": ""}, {"question": None}], []),
        ([{"question": [1, 2, 500]}], ["data.prompt_ids='question'", "data.prompt=null"]),
        ([{"question": "one " * 400}], ["prompt.overlong='drop'"]),
        ([{"question": "one"}], ["prompt.template='broken.jinja'"]),
    ],
)
def test_errors_are_those_of_a_run(folder, rows, settings):
    (folder / "broken.jinja").write_text("{{ raise_exception('no') }}")
    write_rows([{**row, "answer": 1} for row in rows])
    settings = [*settings, *WHOLE]
    with pytest.raises(ConfigError) as of_run:
        prompts_of_a_run(*settings)
    with pytest.raises(ConfigError) as of_check:
        check(*settings)
    assert of_check.value.to_dict() == of_run.value.to_dict()


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            ["generate.max_model_len=22", ALONE],
            "data 000001: 4 of 4 prompts leave no room: .* the context of 22",
        ),
        (
            ["evaluate.generate.max_model_len=22"],
            "data.held_out 000003: 3 of 3 prompts leave no room",
        ),
        (["generate.sampling.stop_token_ids=[999]"], "999 is outside the vocabulary"),
    ],
)
def test_prompts_that_generate_would_refuse_are_refused(folder, settings, problem):
    """By their section: their version is of a store that is gone by then."""
    with pytest.raises(ConfigError, match=problem):
        check(*settings, "iterations=1")


def test_rows_that_no_iteration_takes_are_not_looked_at(folder):
    """The shuffle of seed 7 begins with other rows than the last one."""
    rows = [json.loads(line) for line in Path("questions.jsonl").read_text().splitlines()]
    taken = set(prompts_of_a_run("iterations=1").table()["group_id"].to_pylist())
    left_out = next(row for row in range(8) if f"{row:06d}" not in taken)
    rows[left_out]["question"] = "one " * 400
    write_rows(rows)
    assert check("iterations=1", ALONE).answer["prompts"]["data"]["looked_at"] == 4
    with pytest.raises(ConfigError, match=f"prompt {left_out:06d} .*the prompt has 4"):
        check("iterations=2", ALONE)


def test_prompts_that_are_too_long_are_counted(folder):
    write_rows([{"question": "one " * length, "answer": 1} for length in (3, 300, 5, 400, 7)])
    with pytest.raises(ConfigError, match=r"prompt 000001 \(row 2"):
        check(*WHOLE)
    looked = check(*WHOLE, "prompt.overlong='drop'")
    assert looked.answer["prompts"]["data"]["dropped"] == 2
    assert looked.answer["warnings"] == [
        "questions.jsonl: 2 of 5 prompts are left out: they have more than 250 tokens"
    ]
    assert "warning: " + looked.answer["warnings"][0] in looked.lines


def test_of_many_rows_the_first_ones_are_looked_at(folder, monkeypatch):
    monkeypatch.setattr("quiver.flows.first_rows.ROWS", 3)
    told = "data: prompts of 19 to 19 tokens, median 19, in the first 3 of 8 rows; 250 are allowed"
    assert told in check(ALONE).lines


def test_what_a_template_does_with_tools_is_told_once_and_in_the_answer(folder):
    (folder / "tools.py").write_text(
        'def find(city: str) -> str:\n    """Find it.\n\n    Args:\n        city: Where.\n    """\n'
    )
    looked = check("generate.turns={tools=['tools.py:find']}")
    assert [each for each in looked.answer["warnings"] if "does not show the tools" in each] == [
        "the policy's chat template does not show the tools of generate.turns: say in "
        "prompt.system, or in the chats, what it may call and how"
    ]


def test_pictures_are_decoded_and_read(folder):
    sight.make_folder(folder / "seeing", "llava")
    write_rows([{"question": "?", "answer": 1, "picture": f"{n}.png"} for n in range(2)])
    for number in range(2):
        (folder / f"{number}.png").write_bytes(sight.png(number))
    settings = ["policy.model='seeing'", "data.images='picture'", *WHOLE]
    looked = check(*settings, is_shown=True, is_tried=True)
    assert looked.error is None
    assert [each for each in looked.answer["warnings"] if "pays more" not in each] == []
    assert looked.answer["prompts"]["data"]["looked_at"] == 2
    assert looked.answer["first_prompt"]["text"].count("⟦<image>⟧") == 16
    (folder / "1.png").write_bytes(b"no picture")
    with pytest.raises(ConfigError, match=r"row 2 .*picture 1"):
        check(*settings)


# -- a base model that is made


MAKE = """
import shutil
from pathlib import Path

def make(folder):
    Path("called").touch()
    shutil.copytree("model", folder, dirs_exist_ok=True)
"""


def test_a_function_that_makes_the_base_model_is_called_when_it_is_asked_for(folder):
    Path("base.py").write_text(MAKE)
    made = "policy.model='base.py:make'"
    looked = check(made)
    assert looked.answer["prompts"] == {}
    assert looked.answer["warnings"] == [
        "prompts are not checked: policy.model is a function that the first run calls to make "
        "the base model; --show and --try also call it"
    ]
    assert not Path("called").exists()
    assert check(made, is_shown=True).answer["first_prompt"]["tokens"] == 19
    Path("called").unlink()
    recipe = load("recipe.toml", [made]).resolved()
    import_base(recipe)
    Path("called").unlink()
    looked = check(made)
    assert looked.answer["prompts"]["data"]["looked_at"] == 8, "that of the store is read"
    assert looked.answer["finished"] == {"policy": "tiny/policy@0"}
    looked = check(made, "run='second'", is_shown=True)
    assert looked.answer["first_prompt"]["tokens"] == 19, "and that of another run"
    assert looked.answer["finished"] == {}
    assert not Path("called").exists()


def test_it_is_told_before_a_function_makes_the_base_model(folder, caplog):
    Path("base.py").write_text("def make(folder):\n    raise ValueError('not today')\n")
    with caplog.at_level(logging.INFO), pytest.raises(ConfigError, match="not today"):
        check("policy.model='base.py:make'", is_shown=True)
    (line,) = caplog.messages
    assert line.startswith("policy.model is a function: it makes the base model now")


def test_a_first_iteration_of_another_recipe_is_told_with_the_keys_that_differ(folder):
    Path("rows").mkdir()
    Path("questions.jsonl").rename("rows/questions.jsonl")
    here = ["data.source='rows/questions.jsonl'", ALONE]
    recipe = load("recipe.toml", here).resolved()
    store, policy = recipe.store, import_base(recipe)
    prompts = run_here("prompt", recipe.prompt_config(1), store, policy=policy)
    asked = {"prompts": prompts, "policy": policy}
    rollouts = run_here("generate", recipe.generate_config(1), store, **asked)
    run_here("reward", recipe.reward, store, rollouts=rollouts)
    made = {
        "policy": "tiny/policy@0",
        "prompt": "tiny/prompts@1",
        "generate": "tiny/rollouts@1",
        "reward": "tiny/rewards@1",
    }
    same = check(*here).answer
    assert (same["finished"], same["warnings"]) == (made, [])
    beside = (
        "The run adds its own versions to these; to keep them apart, give the run another name: "
        "--set run=NAME"
    )
    heavy = "{use='rewards.py:evenness', weight=2, timeout_seconds=9}"
    for stage, settings, changes in (
        (
            "generate",
            ["generate.sampling.temperature=0.5"],
            ["sampling.temperature was 1.0 and is 0.5"],
        ),
        (
            "prompt",
            ["seed=8", "data.limit=2"],
            ["limit was 4 and is 2", "seed was 7 and is 8"],
        ),
        (
            "prompt",
            [f"prompt.system={'Be short. ' * 12!r}"],
            [f"system was not set and is {('Be short. ' * 6).strip()}…"],
        ),
        (
            "reward",
            [f"reward.functions=[{heavy}, {{use='length', arguments={{target=3}}}}]"],
            [
                "functions.0.weight was 1.0 and is 2.0",
                "functions.1 was not set and is "
                "{'name': 'length', 'weight': 1.0, 'extra': False, 'fingerpr…",
            ],
        ),
    ):
        told = f"run tiny has {made[stage]}, made with other settings than this recipe's. {beside}"
        lines = [told, *(f"  {change}" for change in changes)]
        assert warnings(*here, *settings) == ["\n".join(lines)]
    assert warnings(*here, "run='fresh'", "seed=8") == []


def test_a_key_that_the_first_iteration_had_and_the_recipe_has_not_is_told(folder):
    settings = [
        "data.curriculum={low=0.2, high=0.8, iterations=1}",
        "prompt.template_arguments.a=1",
    ]
    before = load("recipe.toml", settings).resolved()
    policy = import_base(before)
    for iteration in (1, 2):
        run_here("prompt", before.prompt_config(iteration), before.store, policy=policy)
    (told,) = warnings(ALONE)
    assert told.startswith("run tiny has tiny/prompts@1, made with other settings")
    assert told.splitlines()[1:] == [
        "  template_arguments.a was 1 and is not set",
        "  curriculum was {'low': 0.2, 'high': 0.8} and is not set",
    ]


def test_a_critic_that_cannot_start_is_refused_as_the_run_refuses_it(folder):
    """Before a store is made, or anything sampled."""
    settings = ["run=judged", "optimize.algorithm=ppo", "optimize.critic=model"]
    for name, problem in (
        (make_classifier(folder / "narrow", hidden_size=16), "has hidden_size 16, expected 32"),
        (make_classifier(folder / "two", labels=2), "has 2 labels"),
        (folder / "missing", "there is no such directory"),
    ):
        asked = [*settings, f"optimize.critic_from={name}"]
        with pytest.raises(ConfigError, match=problem):
            check(*asked)
        assert not Path("store").exists()
        recipe = load("recipe.toml", asked).resolved()
        with pytest.raises(ConfigError, match=problem), by_hand(recipe):
            Chain(recipe).import_policy()
        shutil.rmtree("store", ignore_errors=True)
    check(*settings, f"optimize.critic_from={make_classifier(folder / 'judge')}")
    with pytest.raises(ConfigError, match="there is no store here"):
        check(*settings, "optimize.critic_from=judge/policy@0")


def refused_before_prompts(problem: str, *settings: str) -> None:
    """By `quiver check`, and by a run once it has its base model."""
    with pytest.raises((ConfigError, LineageError), match=problem):
        check(*settings)
    recipe = load("recipe.toml", settings).resolved()
    with pytest.raises((ConfigError, LineageError), match=problem), by_hand(recipe):
        Chain(recipe).import_policy()
    assert Store("store").numbers(recipe.run, "prompts") == []


def test_layers_that_the_model_lacks_are_refused_as_the_run_refuses_them(folder):
    problem = "no linear layer inside the language model is called 'q_porj'"
    refused_before_prompts(problem, "optimize.lora.target_modules=['q_porj']")
    check("optimize.lora.target_modules=['q_proj']")


def test_a_base_that_writes_nothing_or_that_the_engine_can_not_read_is_refused(folder):
    classifier = make_classifier(folder / "judge")
    refused_before_prompts("is a classifier", f"policy.model='{classifier}'", "run=judged")
    make_folder(folder / "encodes", "t5")
    settings = ["policy.model=encodes", "run=encoded", "generate.engine=vllm"]
    refused_before_prompts("is an encoder-decoder model", *settings)


def test_a_reference_with_other_tokens_is_refused_as_the_run_refuses_it(folder):
    make_folder(folder / "other")
    path = folder / "other" / "tokenizer.json"
    about = json.loads(path.read_text())
    vocabulary = about["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.get)[10:12]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(about))
    for model, run in (("other", "teacher"), ("model", "twin")):
        run_here("policy", {"model": str(folder / model)}, Store("store"), into=run)
    settings = ["run=taught", "optimize.kl_coef=0.05"]
    problem = "teacher/policy@0: its tokenizer is another than taught/policy@0"
    refused_before_prompts(problem, *settings, "reference.policy=teacher/policy@0")
    check(*settings, "reference.policy=twin/policy@0")
    check("run=taught", "reference.policy=teacher/policy@0")


def test_another_base_model_is_refused_as_the_run_refuses_it(folder):
    recipe = load("recipe.toml").resolved()
    import_base(recipe)
    make_folder(folder / "other", seed=1)
    other = "policy.model='other'"
    with pytest.raises(ConflictError) as of_check:
        check(other)
    recipe = load("recipe.toml", [other]).resolved()
    with pytest.raises(ConflictError) as of_run:
        import_base(recipe)
    assert of_check.value.to_dict() == of_run.value.to_dict()
    assert of_run.value.message == "the run starts from another base model than other"
    assert check(other, "run='fresh'").answer["finished"] == {}


# -- nights


def test_what_asks_rows_of_a_night_and_is_none_is_refused(folder):
    recipe = load("recipe.toml", ["data.held_out.source='of {night}.jsonl'"])
    for refuse in (preflight, partial(rerun, stage="evaluate", references={})):
        with pytest.raises(ConfigError, match=r"holds \{night\}, which only a night") as caught:
            refuse(recipe)
        assert caught.value.object == "data.held_out.source"
        assert caught.value.next == "quiver nightly RECIPE"
    refused = pytest.raises(LineageError, match="run tiny has no rollouts yet")
    with refused, by_hand(recipe):
        rerun(recipe, "reward", {})  # which reads no source
    Path("held_out.jsonl").rename("of x.jsonl")
    assert preflight(recipe.for_night("x")).data.held_out["source"] == "of x.jsonl"


# -- what the rewards say


def test_a_made_up_answer_is_scored(folder):
    functions = ["{use='rewards.py:evenness'}", "{use='rewards.py:none'}", "{use='numeric'}"]
    looked = check(f"reward.functions=[{', '.join(functions)}]", is_tried=True)
    ids = [*tokenizer().encode("The answer is 1.")[:5], EOS]  # 6 are generate.sampling.max_tokens
    assert looked.answer["answer"] == tokenizer().decode(ids[:5]) == "The answer"
    scores = looked.answer["rewards"]
    assert scores["evenness"]["values"] == [pytest.approx(sum(id % 2 == 0 for id in ids) / 6)]
    assert (scores["none"]["values"], scores["numeric"]["values"]) == ([None], [0.0])
    assert [score["error"] for score in scores.values()] == [None] * 3
    assert (looked.answer["tried"], looked.error) == (["reward", "optimize"], None)
    start = looked.lines.index("of the answer 'The answer'")
    assert looked.lines[start + 2 : start + 4] == ["  none: no number", "  numeric: 0"]


def test_the_row_s_own_answer_is_scored_too(folder):
    """As text, by functions alone: a server is asked about the made-up answer only."""
    write_rows(asks(7))
    looked = check(rewarded("numeric"), *WHOLE, is_tried=True)
    assert looked.answer["rewards"]["numeric"]["values"] == [0.0]
    assert looked.answer["reference"] == "7"
    assert looked.answer["reference_rewards"] == {"numeric": {"values": [1.0], "error": None}}
    start = looked.lines.index("of the reference '7'")
    assert looked.lines[start + 1] == "  numeric: 1"
    assert looked.answer["warnings"] == []
    write_rows([{"question": "3 + 4", "solution": {"of": "7"}, "answer": "none"}])
    nested = rewarded("numeric", "columns={answer='solution.of'}")
    assert check(nested, *WHOLE, is_tried=True).answer["reference"] == "7"
    write_rows(asks("seven " * 9))
    long = check(rewarded("exact_match"), *WHOLE, is_tried=True)
    assert "reference" not in long.answer, "an answer of max_tokens cannot say it"


@pytest.mark.parametrize(
    ("function", "is_doubted"),
    [
        (["rewards.py:exact"], False),
        (["exact_match", "arguments={extract='boxed'}"], True),
        (["rewards.py:exact", "weight=-1"], True),
        (["rewards.py:letters"], False),
    ],
)
def test_a_reward_that_never_pays_the_right_answer_is_doubted(folder, function, is_doubted):
    write_rows(asks(7))
    looked = check(rewarded(*function), *WHOLE, is_tried=True)
    begun = "no reward function pays more for the first row's own answer, '7', than for 'The answer"
    assert [each.startswith(begun) for each in looked.answer["warnings"]] == [True] * is_doubted


def test_what_a_reward_prints_is_shown(folder, caplog):
    with caplog.at_level(logging.INFO):
        check(rewarded("rewards.py:exact"), is_tried=True)
    assert [line for line in caplog.messages if "asked" in line] == [
        "exact: asked about ['The answer'] [6]",
        "exact: asked about ['6'] [6]",
    ]


def test_an_answer_that_is_read_beside_numbers_alone_is_an_error(folder):
    Path("bad.csv").write_text("question,answer\n1+1,2\n2+3,$$5\n2+4,\\$6\n")
    with pytest.raises(ConfigError, match="the reward function math cannot read it") as caught:
        check("data.source='bad.csv'", *WHOLE, rewarded("math"))
    assert caught.value.object == "bad.csv row 2"
    assert "this affects 1 of the first 3 rows" in caught.value.message


def test_an_answer_that_a_shipped_function_cannot_read_is_an_error(folder):
    """Told with its row in the source, whichever rows the run takes first."""
    Path("bad.csv").write_text("question,answer\n1+1,2\n2+2,4\n3+3,NaN\n4+4,n/a\n5+5,10\n")
    source = "data.source='bad.csv'"
    settings = [source, *WHOLE, rewarded("numeric")]
    with pytest.raises(ConfigError) as caught:
        check(*settings)
    assert caught.value.object == "bad.csv row 3"
    assert caught.value.message == (
        "column answer: the reward function numeric cannot read it: ValueError: the answer 'NaN' "
        "holds no number; this affects 2 of the first 5 rows of data"
    )
    with pytest.raises(ConfigError, match="row 3: column answer"):
        check(*settings, "data.limit=3", "iterations=9")
    told = warnings(*settings, "reward.max_invalid=0.4")
    assert told == [f"bad.csv row 3: {caught.value.message}"]
    own = check(source, *WHOLE, rewarded("rewards.py:exact"))
    assert own.error is None, "a user's function is asked by --try alone"
    held_out = ["data.held_out={source='bad.csv'}", rewarded("numeric")]
    with pytest.raises(ConfigError, match=r"bad.csv row 3.*2 of the first 5 rows of data.held_out"):
        check(*held_out)


@pytest.mark.parametrize(
    ("function", "answer"),
    [
        (["math"], "2024-01-05"),
        (["choice"], "E"),
        (["exact_match"], ["7"]),
        (["json_schema", "columns={schema='answer'}"], '{"type": "nonsense"}'),
    ],
)
def test_each_function_that_compares_is_asked(folder, function, answer):
    write_rows(asks(answer))
    with pytest.raises(ConfigError, match=r"questions\.jsonl row 1: column answer"):
        check(rewarded(*function), *WHOLE)
    write_rows(asks(None))
    assert check(rewarded(*function), *WHOLE).error is None


def test_a_field_that_no_row_of_the_source_has_is_refused(folder):
    write_rows(asks({"of": "0"}, {"of": "1"}))
    assert check(rewarded("numeric", "columns={answer='answer.of'}"), *WHOLE).error is None
    with pytest.raises(ConfigError, match="answer has no field off; did you mean of"):
        check(rewarded("numeric", "columns={answer='answer.off'}"), *WHOLE)


def test_a_reference_that_the_stage_adds_is_left_to_it(folder):
    function = rewarded("exact_match", "columns={answer='prompt_text'}")
    assert check(function, "data.limit=null").error is None


def test_a_reward_that_fails_on_it_is_an_error(folder):
    looked = check(rewarded("rewards.py:as_trl"), is_tried=True)
    part = looked.answer["rewards"]["as_trl"]
    assert part["values"] == [None]
    assert part["error"].startswith("TypeError: string indices must be integers")
    assert f"  as_trl: {part['error']}" in looked.lines
    assert looked.error.code == "E-CONFIG" and looked.error.object == "reward as_trl"
    assert looked.error.message == f"fails on the answer 'The answer': {part['error']}"
    assert looked.answer["tried"] == []
    assert not any("can run" in line for line in looked.lines)
    as_messages = rewarded("rewards.py:as_trl", "completions='messages'")
    assert check(as_messages, is_tried=True).answer["rewards"]["as_trl"]["error"] is None


def test_an_environment_that_fails_is_told_before_the_rewards_of_it(folder):
    recipe = load("recipe.toml", ["generate.turns={tools=['python']}"])
    scores = {"evenness": Score([None], error="nothing was answered")}
    told = failure(recipe.generate, Answered("1", failure="no python here", scores=scores))
    assert told.object == "generate.turns python" and "no python here" in told.message


def test_a_server_that_is_not_there_is_an_error(folder):
    servers = "reward={servers=[{dialect='quiver', urls=['http://127.0.0.1:9'], retries=0}]}"
    looked = check(servers, is_tried=True)
    assert looked.answer["rewards"]["quiver"]["values"] == [None]
    assert looked.error.object == "reward quiver"


def test_the_command_fails_with_a_reward_that_fails(folder, command):
    """With one JSON object, and as it fails with any config that is wrong."""
    failing = ("--try", "--set", rewarded("rewards.py:as_trl"))
    code, answer = command("check", "recipe.toml", *failing)
    assert (code, answer["error"]["object"]) == (2, "reward as_trl")
    assert answer["error"]["next"].startswith("correct it, or take it out of the recipe")
    assert answer["rewards"]["as_trl"]["error"].startswith("TypeError")
    assert answer["prompts"]["data"]["rows"] == 8


# -- what it may not mean


def test_columns_that_nothing_reads_are_named_once(folder):
    write_rows([{"question": "one?", "answer": 1, "level": 3, "topic": "sums"}])
    url = "urls=['http://127.0.0.1:9']"
    judge = f"dialect='openai-judge', {url}, model='m', range=[0, 10]"
    rubric = "rubric='{prompt} {completion} {level}'"
    for reward, unused in {
        rewarded("rewards.py:letters"): "answer level topic",
        rewarded("rewards.py:strict"): "topic",
        rewarded("numeric"): "level topic",
        rewarded("rewards.py:as_trl"): "",
        f"reward={{servers=[{{{judge}, {rubric}}}]}}": "answer topic",
        f"reward={{servers=[{{dialect='quiver', {url}}}]}}": "",
    }.items():
        looked = check(reward, ALONE)
        assert looked.answer["unused"] == unused.split(), reward
        told = f"nothing reads {unused.replace(' ', ', ')}"
        assert (told in looked.lines) is bool(unused)


def test_held_out_rows_that_are_training_rows_are_counted(folder):
    """By what they ask, whatever else is in their row."""
    rows = [{"question": f"What is {n} plus 5?", "source": "elsewhere"} for n in (6, 7, 8, 9)]
    write_rows([{"answer": 99, **row} for row in rows], "held_out.jsonl")
    assert warnings() == [
        "2 of the 4 rows of data.held_out ask the same as rows of data, apart from case and "
        "spacing: an evaluation cannot tell learning from memorizing"
    ]


CHAT = [{"role": "user", "content": "What is Café?"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "What is Café?"}]}]


@pytest.mark.parametrize(
    ("row", "other", "is_same"),
    [
        ({"messages": CHAT}, {"messages": json.dumps(CHAT)}, True),
        ({"messages": CHAT}, {"messages": [json.dumps(CHAT[0])]}, True),
        ({"messages": CHAT}, {"messages": CHAT, "tools": []}, True),
        ({"messages": CHAT}, {"messages": [{**CHAT[0], "weight": 1}]}, True),
        ({"messages": CHAT}, {"messages": [{**CHAT[0], "name": "Ann"}]}, False),
        ({"messages": json.dumps(PARTS)}, {"prompt": "what is café?"}, True),
        ({"messages": CHAT}, {"messages": CHAT, "tools": [{"name": "f"}]}, False),
        ({"prompt": "What is Café?"}, {"prompt": "what is  Cafe\u0301? "}, True),
        ({"prompt": "What is Café?"}, {"prompt": "What is Cafe?"}, False),
        ({"prompt": "[1, 2"}, {"prompt": "[1, 2]"}, False),
    ],
)
def test_copies_of_a_question_are_found_in_other_spellings(row, other, is_same):
    first, second = (
        questions(
            Config(source="rows.jsonl", **{next(iter(each)): next(iter(each))}),
            to_table("rows.jsonl", [("line 1", each)]),
        )
        for each in (row, other)
    )
    assert (first == second) is is_same


def test_the_same_question_about_another_picture_is_another_row(folder):
    config = Config(source="x.jsonl", prompt="question", images="picture")
    rows = pa.Table.from_pylist(
        [{"question": "How many?", "picture": each} for each in (b"a", b"b", b"a")]
    )
    first, second, third = questions(config, rows)
    assert first == third != second


def test_maps_with_keys_of_any_type_are_compared():
    turns = {"environment": "env.py:Env"}
    config = Config(source="x.jsonl", prompt="question", turns=turns)
    for kind, keys in [(pa.date32(), [1, 2, 1]), (pa.binary(), [b"a", b"b", b"a"])]:
        maps = pa.array([[(key, 1)] for key in keys], pa.map_(kind, pa.int64()))
        rows = plain_table("x.arrow", pa.table({"question": ["a"] * 3, "map": maps}))
        first, second, third = questions(config, rows)
        assert first == third != second


def test_pictures_are_compared_without_holding_them_all():
    size = 200_000
    pictures = pa.array([bytes([n]) * size for n in range(200)])
    rows = pa.table({"question": ["How many?"] * 200, "picture": pictures})
    tracemalloc.start()
    try:
        asked = questions(Config(source="x.jsonl", prompt="question", images="picture"), rows)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(set(asked)) == 200
    assert peak < 100 * size


WARNINGS = {
    "data.limit=9": "data.limit is 9, and the source has 8 rows: all of them are asked each time",
    "data.held_out={source='held_out.jsonl',limit=5}": (
        "data.held_out.limit is 5, and the source has 4 rows: all of them are asked each time"
    ),
    "optimize.minibatches=5": (
        "optimize.minibatches is 5, and an iteration has 4 prompts: each step takes at least one, "
        "so there are no more steps than prompts"
    ),
    "optimize.warmup_steps=2": (
        "optimize.warmup_steps is 2, and the run has 2 steps: the learning rate never reaches 0.001"
    ),
    "optimize.learning_rate=0.01": (
        "optimize.learning_rate is 0.01: AdamW moves each weight by about that much per step, "
        "which makes a policy forget all it knew; 1e-6 to 1e-5 are usual, with optimize.lora 1e-5 "
        "to 1e-4"
    ),
    "optimize.schedule=linear optimize.total_steps=1": (
        "optimize.total_steps is 1, and the run has 2 steps: iterations that begin after it "
        "fail; raise it to 2"
    ),
    "reward.functions=[{use='rewards.py:evenness',weight=0}]": (
        "every part of the reward has weight 0: nothing is learned"
    ),
    "reward.overlong={max_tokens=16,cache=10}": (
        "reward.overlong begins after 6 tokens, but a completion has at most 6: the penalty is "
        "never applied"
    ),
    "data.held_out=null evaluate.every=1": (
        "evaluate.every is set, but without data.held_out nothing is measured: set data.held_out"
    ),
    "evaluate.every=3": (
        "evaluate.every is 3, and the run has 2 iterations: it is measured before the first and "
        "after the last"
    ),
    "generate.engine=scripted optimize.audit.enabled=false": (
        "generate.engine is scripted: a script answers in place of the policy, so rewards and "
        "scores say nothing about the policy"
    ),
    "evaluate.generate.engine=scripted": (
        "evaluate.generate.engine is scripted: a script answers in place of the policy, so rewards "
        "and scores say nothing about the policy"
    ),
    "data.raw_text=true prompt.template=chat.jinja": (
        "prompt.template is not used: the rows are not chats"
    ),
    "data.limit=8": None,
    "optimize.minibatches=4": None,
    "optimize.minibatches=8 optimize.replay=1 optimize.max_staleness=1": None,
    "optimize.minibatches=8 data.refill={groups=4,max_rounds=2}": None,
    "optimize.warmup_steps=1": None,
    "optimize.learning_rate=0.01 optimize.lora={rank=2}": None,
    "optimize.schedule=linear optimize.total_steps=2": None,
    "reward.overlong={max_tokens=6,cache=2}": None,
    "evaluate.every=2": None,
    "evaluate.every=2 reward.functions=[{use='rewards.py:evenness',name='reward'}]": None,
    "evaluate.every=2 reward.functions=[{use='rewards.py:evenness',name='reward',weight=2}]": (
        IS_THE_SUM
    ),
    "evaluate={every=2,score='length'} reward.functions=[{use='rewards.py:evenness',name='reward'}"
    ",{use='length',arguments={target=5}}]": None,
    "evaluate.every=2 reward.functions=[{use='rewards.py:evenness',name='reward'}"
    ",{use='length',arguments={target=5}}]": IS_THE_SUM,
    "prompt.system=brief": None,
}
"""Settings, and what they may not mean; None: nothing is wrong with them."""


def test_what_a_recipe_may_not_mean_is_a_warning(folder):
    (folder / "chat.jinja").write_text("{{ messages[0].content }}")
    for settings, warning in WARNINGS.items():
        expected = [warning] if warning else []
        alone = [] if "evaluate" in settings or "held_out" in settings else [ALONE]
        assert check(*settings.split(), *alone).answer["warnings"] == expected, settings


def test_a_gpu_that_is_not_seen_here_is_told(folder, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    settings = ["optimize.device='cuda'", ALONE]
    assert warnings(*settings) == [
        "optimize.device is cuda, and this machine shows no GPU: the stage would fail here"
    ]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert warnings(*settings) == []


def test_a_system_prompt_that_chats_do_not_show_is_counted(folder):
    own = [{"role": "system", "content": "Be long."}, {"role": "user", "content": "one?"}]
    other = [own[0], {"role": "user", "content": "two?"}]
    write_rows([{"question": chat, "answer": 1} for chat in (own, own[1:], other)])
    assert warnings(*WHOLE, "prompt.system='Be short.'") == [
        "prompt.system is not shown in 2 of the first 3 prompts of data: they are not chats, or "
        "begin with a system message of their own"
    ]


def test_empty_cells_of_a_column_that_the_reward_reads_are_counted(folder):
    write_rows(asks(None, "1", "2", "", "4", "5", " ", "7"))  # a CSV file's are texts
    empty = "column answer, which the reward reads, is empty in"
    assert warnings(rewarded("exact_match"), ALONE) == [f"{empty} 3 of 8 rows"]
    assert warnings(rewarded("rewards.py:letters"), ALONE) == []
    write_rows([{"question": f"{n} more?", "answer": None} for n in range(4)], "held_out.jsonl")
    of_held_out = f"{empty} 4 of 4 rows of data.held_out"
    assert warnings(rewarded("exact_match")) == [of_held_out, f"{empty} 3 of 8 rows"]


@pytest.mark.parametrize(
    ("field", "answers", "warning"),
    [
        ("answer", [["1"], ["1", None], [None]], ["holds nulls in 2 of 3 rows"]),
        (
            "answer",
            [{"of": None, "or": ["2"]}, {"of": "1", "or": [None, None]}, {"of": "3"}],
            ["holds nulls in 2 of 3 rows: answer.of, answer.or"],
        ),
        (
            "answer.of.it",
            [{"of": {"it": "1", "is": None}}, {"of": {"it": ""}}, {"of": None}],
            ["is empty in 2 of 3 rows"],
        ),
        ("answer.of", [{"of": "1", "is": None}], []),
    ],
    ids=["list", "object", "field", "beside the field"],
)
def test_nulls_inside_cells_that_the_reward_reads_are_counted(folder, field, answers, warning):
    write_rows(asks(*answers))
    told = warnings(rewarded("rewards.py:exact", f"columns={{answer='{field}'}}"), *WHOLE)
    assert told == [f"column {field}, which the reward reads, {each}" for each in warning]


def test_check_warns_of_a_column_that_rewards_cannot_read(folder):
    write_rows([{"question": "1?", "answer": 1, "completions": "", "prompt_text": "1?"}])
    assert warnings(rewarded("rewards.py:letters"), *WHOLE) == [
        "data has a column completions, but Quiver gives rewards its own completions: give the "
        "column another name if a reward should read it"
    ]


def test_check_warns_of_a_column_that_hides_behind_the_turns_of_episodes(folder):
    """Without episodes a reward gets the column."""
    write_rows([{"question": "1?", "turns": 1}])
    Path("rewards.py").write_text(
        "def count(completions, turns):\n    return [1.0 for _ in turns]\n"
    )
    settings = (rewarded("rewards.py:count"), *WHOLE)
    assert warnings(*settings) == []
    Path("env.py").write_text("class Env:\n    def step(self, turn):\n        return None\n")
    (told,) = warnings(*settings, "generate.turns={environment='env.py:Env'}")
    assert told.startswith("data has a column turns, but Quiver gives rewards its own turns")


@pytest.mark.parametrize("section", ["data", "data.held_out"])
def test_rows_that_ask_the_same_as_an_earlier_one_are_counted(folder, section):
    asked = ["1?", "2?", "3?", " 1?", "4?", "2?", "5?"]
    rows = [{"question": each, "answer": 1} for each in asked]
    write_rows(rows, "questions.jsonl" if section == "data" else "held_out.jsonl")
    assert warnings(*([ALONE] if section == "data" else [])) == [
        f"2 of the 7 rows of {section} ask the same as an earlier row, apart from case and "
        "spacing: if their other columns are the same too, keep each once"
    ]


def test_rows_that_stand_there_many_times_are_told(folder):
    write_rows([{"question": f"{n % 4}?", "answer": 1} for n in range(8)])
    assert warnings(ALONE) == [
        "the 8 rows of data ask 4 different questions: keep each once, and set "
        "generate.samples_per_prompt to the number of answers to each"
    ]
