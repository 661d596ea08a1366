"""The reference of a recipe's keys: whole, true and current; and what an error says of a key is in
it."""

import ast
import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from quiver.flows import keys
from quiver.flows.recipe import Recipe, load
from quiver.schemas.errors import ConfigError
from quiver.stages.core.config import Config, keys_of
from quiver.stages.evaluate.config import Config as EvaluateConfig
from quiver.stages.generate.engine import ENGINES
from quiver.stages.generate.options import Sampling
from quiver.stages.generate.stage import Config as GenerateConfig
from quiver.stages.logprobs.config import Config as LogprobsConfig
from quiver.stages.optimize.config import Audit, Correction, Lora
from quiver.stages.optimize.stage import Config as OptimizeConfig
from quiver.stages.prompt.config import Config as PromptConfig
from quiver.stages.prompt.config import Curriculum
from quiver.stages.reward.config import Config as RewardConfig
from quiver.stages.reward.config import FunctionConfig, ModelConfig, Overlong, ServerConfig
from quiver.stages.turns.config import Turns
from tests.test_architecture import FILES

ROOT = Path(__file__).parents[2]
ENTRIES = {key.name: key for section in keys.sections() for key in section.keys}
SECTIONS = {section.name for section in keys.sections() if section.name}
BASES: dict[str, Config] = {
    "data": PromptConfig(source="rows.jsonl", limit=4),
    "data.curriculum": Curriculum(low=0.1, high=0.9, iterations=9),
    "prompt": PromptConfig(source="rows.jsonl", limit=4),
    "generate": GenerateConfig(),
    "generate.sampling": Sampling(),
    "generate.turns": Turns(environment="mine.py:Game"),
    "reward": RewardConfig(functions=[{"use": "length"}]),
    "reward.functions": FunctionConfig(use="length"),
    "reward.models": ModelConfig(model="judge"),
    "reward.servers": ServerConfig(dialect="quiver", urls=["http://127.0.0.1:1"]),
    "reward.overlong": Overlong(max_tokens=9, cache=3),
    "logprobs": LogprobsConfig(),
    "optimize": OptimizeConfig(),
    "optimize.correction": Correction(),
    "optimize.lora": Lora(),
    "optimize.audit": Audit(),
    "evaluate": EvaluateConfig(),
}
"""A config of each section that feeds a stage."""
WITHIN = {
    "reward.functions": 'reward.functions=[{use="length",%s}]',
    "reward.models": 'reward.models=[{model="judge",%s}]',
    "reward.servers": 'reward.servers=[{dialect="quiver",urls=["http://127.0.0.1:1"],%s}]',
}
"""How a key is set in a list of tables."""
WRONG = {
    "text or": "[]",
    "text": "5",
    "integer": '"many"',
    "number": '"hot"',
    "true or false": '"perhaps"',
}
"""By the first words of a type: a value of another; for all other types a number."""


def setting(name: str, text: str) -> str:
    section, _, leaf = name.rpartition(".")
    if section in WITHIN:
        without = re.sub(rf"\b{leaf}=[^,]*,", "", WITHIN[section])  # no key may be there twice
        return without % f"{leaf}={text}"
    return f"{name}={text}"


def with_engine(name: str) -> list[str]:
    """What an engine's option is checked with."""
    leaf = name.removeprefix("generate.options.")
    return [
        f"generate.engine={name}" for name, e in ENGINES.items() if leaf in e.options.model_fields
    ]


def refused(recipe: Path, *settings: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(recipe, settings)
    return caught.value


def check_advice(error: ConfigError) -> None:
    """What the error says next is a command that runs, and each key that it may mean is one."""
    assert error.next.startswith("quiver keys "), error
    keys.look_up(error.next.removeprefix("quiver keys "))
    for names in re.findall(r"did you mean ([^?]+)\?", error.message):
        for name in names.split(" or "):
            assert keys.look_up(name.removesuffix(" at the top of the recipe")), error


def test_every_key_is_listed_with_what_it_means():
    leaves = {key.path for key in keys_of(Recipe) if key.section is None}
    options = {
        f"generate.options.{name}" for e in ENGINES.values() for name in e.options.model_fields
    }
    assert set(ENTRIES) == leaves | options and len(ENTRIES) > 200
    for entry in ENTRIES.values():
        assert len(entry.description) > 8 and entry.type, entry.name
    learning_rate = ENTRIES["optimize.learning_rate"]
    assert (learning_rate.type, learning_rate.default) == ("number > 0", "1e-06")
    assert ENTRIES["data.source"].default is None and ENTRIES["data.limit"].default == "not set"
    assert ENTRIES["optimize.betas"].type == "[number, number]"
    assert ENTRIES["reward.functions.use"].section == "[[reward.functions]]"


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_whether_a_key_enters_the_run_key():
    """Another value of it makes another key of its stage's config, or not, as the reference says."""
    own_code = {"engine": "own.py:Engine", "options": {"max_num_seqs": 3, "lora": True}}
    for name, entry in ENTRIES.items():
        section, _, leaf = name.rpartition(".")
        if section in ("policy", "generate.options") or name in ("seed", "optimize.critic_from"):
            continue  # the bytes of a model; the engine's; what the stages' own seeds follow
        if section not in BASES or leaf not in type(BASES[section]).model_fields:
            assert entry.run_key == ("yes" if name in keys.OVERLAYS else "no"), name
            continue
        value = own_code.get(leaf, "other") if section == "generate" else "other"
        if name == "optimize.algorithm":
            value = "dapo"
        changed = BASES[section].model_copy(update={leaf: value})
        assert (changed.key() != BASES[section].key()) is (entry.run_key != "no"), name
    for engine, row in ENGINES.items():
        others = {"script": "echo", "attn_implementation": "eager", "lora": True, "logprob": -1}
        others |= {"completion_ids": [1], "engine_args": {"a": 1}, "logits_dtype": "float32"}
        others |= {"urls": ["http://127.0.0.1:9"], "token": "env:TOKEN"}
        needed = {"urls": ["http://127.0.0.1:8"]} if "urls" in row.options.model_fields else {}
        for leaf in row.options.model_fields:
            options = needed | {leaf: others.get(leaf, 1)}
            changed = GenerateConfig(engine=engine, options=options)
            is_other = changed.key() != GenerateConfig(engine=engine, options=needed).key()
            assert is_other is (ENTRIES[f"generate.options.{leaf}"].run_key != "no"), leaf


def test_the_document_is_current():
    assert (ROOT / "deployments/docs/keys.md").read_text() == keys.markdown(), "make keys"


def test_a_value_of_another_type_is_refused_by_the_name_of_its_key(recipe):
    for name, entry in ENTRIES.items():
        kind = next((kind for kind in WRONG if entry.type.startswith(kind)), None)
        error = refused(recipe, *with_engine(name), setting(name, WRONG.get(kind, "5")))
        assert re.search(rf"\b{name.rpartition('.')[2]}\b", error.message), error
        check_advice(error)


def test_a_misspelt_key_is_told_the_right_one(recipe):
    for name in ENTRIES:
        leaf = name.rpartition(".")[2]
        error = refused(recipe, *with_engine(name), setting(f"{name}x", "1"))
        assert "unknown key" in error.message
        assert re.search(rf"did you mean [^?]*\b{leaf}\b", error.message), error
        check_advice(error)


def test_a_key_at_the_wrong_level_is_told_its_place(recipe):
    leaves = {name.rpartition(".")[2] for name in ENTRIES if "generate.options" not in name}
    for level in ("", "promotion."):
        for leaf in sorted(leaves):
            if level + leaf in {*ENTRIES, *SECTIONS}:
                continue
            error = refused(recipe, f"{level}{leaf}=1")
            same = [name for name in ENTRIES if name.rpartition(".")[2] == leaf]
            assert any(name in error.message for name in same), error
            check_advice(error)


def test_a_number_that_is_written_as_text_counts(recipe):
    assert load(recipe, ["data.limit='10'"]).data.limit == 10


def test_every_key_that_a_message_names_is_one():
    """In all messages of the product, whatever provokes them; the stages too name keys as a recipe
    has them."""
    sections = {name.partition(".")[0] for name in SECTIONS}
    dotted = re.compile(rf"(?<![\w./@{{-])((?:{'|'.join(sections)})(?:\.[a-z_0-9]+)+)(?![\w/(:])")
    named = {}
    for path in FILES:
        tree = ast.parse(path.read_text())
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                texts = [p.value if isinstance(p, ast.Constant) else "{}" for p in node.values]
            elif isinstance(node, ast.Constant) and id(node) not in docstrings:
                texts = [str(node.value)]
            else:
                continue
            named |= dict.fromkeys(dotted.findall("".join(texts)), path)
    assert len(named) > 40
    for name, path in named.items():
        assert keys.look_up(name), f"{path} names {name}"


def test_keys_through_the_command_line(command):
    assert command("keys", "optimize.learning_rate")[1]["keys"] == [
        {
            "name": "optimize.learning_rate",
            "section": "[optimize]",
            "type": "number > 0",
            "default": "1e-06",
            "run_key": "yes",
            "description": "Peak learning rate of AdamW, after warm-up.",
        }
    ]
    assert {entry["name"] for entry in command("keys")[1]["keys"]} == set(ENTRIES)
    code, refused = command("keys", "optimise")
    assert (code, refused["error"]["next"]) == (2, "quiver keys optimize")


def test_every_name_of_trls_and_verls_in_the_document_is_answered_with_our_key():
    """As the recipe's loader answers it: the right column of the table has the key."""
    document = (ROOT / "deployments/docs/coming-from.md").read_text()
    table = document.partition("| recipe |\n")[2].partition("\n## ")[0]
    names = {}
    for line in table.splitlines()[1:]:
        *elsewhere, here = (re.findall(r"`([\w.]+)", cell) for cell in line.split("|")[1:4])
        for name in itertools.chain(*elsewhere):
            names.setdefault(name, []).extend(here)
    assert len(names) > 70 and names["beta"] == ["optimize.kl_coef"]
    own_names = {name.rpartition(".")[2] for name in ENTRIES}
    for name, expected in names.items():
        if name.rpartition(".")[2] in own_names - {"path", "name"}:
            continue  # its own name says where it is
        found = keys.look_up(name)
        found_names = {section.name for section in found}
        found_names |= {key.name for section in found for key in section.keys}
        assert found_names & {*expected}, name


ELSEWHERE = {
    "learning_rate": "optimize.learning_rate",
    "lr": "optimize.learning_rate",
    "actor.optim.lr": "optimize.learning_rate",
    "optimize.beta": "optimize.kl_coef",
    "rollout.n": "generate.samples_per_prompt",
    "rollout.temperature": "generate.sampling.temperature",
    "rollout.top_p": "generate.sampling.top_p",
    "rollout.top_k": "generate.sampling.top_k",
    "lora.r": "optimize.lora.rank",
    "r": "optimize.lora.rank",
    "lora.rank": "optimize.lora.rank",
    "sampling.max_tokens": "generate.sampling.max_tokens",
    "reward.functions[0].use": "reward.functions.use",
    "data.held_out.limit": "data.limit",
    "optimize.lora": "optimize.lora.rank optimize.lora.alpha optimize.lora.target_modules "
    "optimize.lora.save optimize.lora.base",
}
"""A name from elsewhere, or the end of a path, and our keys."""


def test_a_name_from_elsewhere_or_the_end_of_a_path_is_answered():
    for name, expected in ELSEWHERE.items():
        listed = [key.name for section in keys.look_up(name) for key in section.keys]
        assert listed == expected.split(), name


def test_a_section_that_is_not_there_is_answered_with_those_that_are():
    with pytest.raises(ConfigError) as caught:
        keys.look_up("training")
    listed = (
        "policy, data, prompt, generate, reward, reference, logprobs, optimize, evaluate, "
        "promotion, schedule, retention, sweep, placement"
    )
    assert f"no recipe has such a key or section (sections: {listed})" in caught.value.message
    for name, advice in (
        ("optimize.learning_rat", "quiver keys optimize.learning_rate"),
        ("xyzzy", "quiver keys"),
    ):
        with pytest.raises(ConfigError) as caught:
            keys.look_up(name)
        assert caught.value.next == advice


def test_the_list_of_all_keys_says_what_each_means():
    lines = keys.lines_of(keys.look_up(None), with_text=False)
    after = {line.split()[0]: text.strip() for line, text in itertools.pairwise(lines) if line}
    for name, entry in ENTRIES.items():
        assert " ".join(entry.description.split()).startswith(after[name]) and after[name], name
    assert after["optimize.learning_rate"] == "Peak learning rate of AdamW, after warm-up."


def test_the_reference_is_read_without_what_is_heavy():
    heavy = {"torch", "vllm", "prefect", "transformers", "datasets"}
    program = (
        "import sys; sys.argv = ['quiver', 'keys', 'optimize'];"
        "from quiver.flows.cli import main as cli\n"
        "try: cli.main()\n"
        f"finally: print(sorted({heavy} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    *lines, modules = done.stdout.splitlines()
    assert lines[0] == "[optimize]" and modules == "[]"
