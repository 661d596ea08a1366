"""The prompt stage on a real tokenizer: what is rendered, what is chosen, what is refused, and when
nothing is done again."""

import hashlib
import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from quiver.schemas.errors import ConfigError
from quiver.stages.core.config import parse
from quiver.stages.core.run.runner import run_stage
from quiver.stages.core.store import writer
from quiver.stages.core.store.writer import ROWS_PER_SHARD
from quiver.stages.model.chat.messages import read_messages
from quiver.stages.prompt import openings
from quiver.stages.prompt.order import choose
from quiver.stages.prompt.stage import Config, resolve
from quiver.stages.turns.environment import environment_seed
from tests import tiny

SUMS = [{"question": f"What is {n} plus 5?", "answer": n + 5, "key": f"sum-{n}"} for n in range(8)]


def run(config, store, policy="tiny/policy@0", **options):
    return run_stage("prompt", config, store, in_process=True, policy=policy, **options)


@pytest.fixture
def source(tmp_path):
    return write(tmp_path, SUMS)


def write(folder, rows, name="rows.jsonl"):
    (folder / name).write_text("\n".join(map(json.dumps, rows)) + "\n")
    return str(folder / name)


def rows(store, config, **options):
    """The rows of the version that the stage makes of a config."""
    return store.open(run(config, store, **options)).table().to_pylist()


def test_one_row_is_rendered_as_transformers_renders_it(store, policy, source):
    config = Config(source=source, prompt="question", group_id="key", system="Be kind.")
    ref = run(config, store)
    assert str(ref) == "tiny/prompts@1"
    prompts = store.open(ref).table().to_pylist()
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "What is 3 plus 5?"},
    ]
    canonical = tiny.tokenizer().apply_chat_template(messages, add_generation_prompt=True)
    assert prompts[3] == {
        "group_id": "sum-3",
        "messages": messages,
        "prompt_text": "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nWhat is 3 plus "
        "5?<|im_end|>\n<|im_start|>assistant\n",
        "prompt_ids": canonical["input_ids"],
        "columns": SUMS[3],
    }
    manifest = store.open(ref).manifest
    assert manifest.status == {"kept": 8, "dropped": 0}
    longest = max(len(row["prompt_ids"]) for row in prompts)
    assert manifest.metrics["prompt_tokens"]["max"] == longest


def test_a_rows_own_system_message_stays(store, policy, tmp_path):
    chat = [{"role": "system", "content": "own"}, {"role": "user", "content": "hi"}]
    path = write(tmp_path, [{"messages": chat}, {"messages": chat[1:]}])
    prompts = rows(store, Config(source=path, system="recipe's"))
    assert [row["messages"][0]["content"] for row in prompts] == ["own", "recipe's"]


def test_a_blank_system_message_counts_as_missing(store, policy, tmp_path):
    user = {"role": "user", "content": "A?"}
    blanks = ["", " \n", [], [{"type": "text", "text": " "}]]
    chats = [[{"role": "system", "content": blank}, user] for blank in blanks]
    path = write(tmp_path, [{"messages": chat} for chat in chats])
    made = rows(store, Config(source=path, system="Always box."))
    told = [{"role": "system", "content": "Always box."}, user]
    assert [row["messages"] for row in made] == [told] * len(blanks)
    start = "<|im_start|>system\nAlways box.<|im_end|>\n<|im_start|>user\n"
    assert all(row["prompt_text"].startswith(start) for row in made)


def test_raw_text_and_ids(store, policy, tmp_path):
    tokenizer = tiny.tokenizer()
    path = write(tmp_path, [{"messages": [{"role": "user", "content": "no"}], "prompt": "a 2?"}])
    (row,) = rows(store, Config(source=path, raw_text=True))
    assert (row["messages"], row["prompt_text"]) == (None, "a 2?")
    assert row["prompt_ids"] == tokenizer("a 2?")["input_ids"]
    path = write(tmp_path, [{"prompt_ids": [1, 65, 66, 2]}, {"prompt_ids": [7]}])
    prompts = rows(store, Config(source=path))
    assert [row["prompt_ids"] for row in prompts] == [[1, 65, 66, 2], [7]]
    assert prompts[0]["prompt_text"] == tokenizer.decode([1, 65, 66, 2])


def test_numbers_in_the_prompt_column_of_a_csv_file_are_asked_as_text(store, policy, tmp_path):
    (tmp_path / "rows.csv").write_text("number,answer\n17,seventeen\n2.5,two and a half\n")
    config = Config(source=str(tmp_path / "rows.csv"), prompt="number")
    prompts = rows(store, config)
    assert [row["messages"][0]["content"] for row in prompts] == ["17", "2.5"]
    assert [row["columns"]["number"] for row in prompts] == [17, 2.5]
    raw = rows(store, config.model_copy(update={"raw_text": True}))
    assert [row["prompt_text"] for row in raw] == ["17", "2.5"]
    path = write(tmp_path, [{"number": 1.50}])
    with pytest.raises(ConfigError, match="holds a number, expected text"):
        run(Config(source=path, prompt="number"), store)


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_an_encoder_has_its_context_to_itself(store, tmp_path, kind):
    policy = tiny.make_policy(store, kind, kind=kind)
    path = write(tmp_path, [{"prompt": "x" * 200}])
    (row,) = rows(store, Config(source=path, reserve_tokens=250), policy=policy.ref)
    assert row["prompt_ids"] == tiny.tokenizer()(row["prompt_text"])["input_ids"]


def test_group_ids_come_from_the_place_in_the_source(store, policy, source):
    config = Config(
        source=source, prompt="question", group_prefix="held-", limit=3, seed=5, round=2
    )
    for row in rows(store, config):
        assert row["group_id"] == f"held-{row['columns']['answer'] - 5:06d}"


def test_the_manifest_tells_where_answers_begin_and_end(store, policy, source, tmp_path):
    header = "<|im_end|>\n<|im_start|>assistant\n"
    user, system = {"role": "user", "content": "hi"}, {"role": "system", "content": "Begin."}
    many = [{"messages": [system, user]}] * (ROWS_PER_SHARD + 1) + [{"messages": [system]}]
    template = tmp_path / "thinking.jinja"
    template.write_text(tiny.CHATML.replace("assistant\n", "assistant\n<think>\n"))
    open_end = tmp_path / "open.jinja"
    open_end.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    starts = []
    ends = []
    for config in (
        Config(source=write(tmp_path, many, "chats.jsonl")),
        Config(source=source, prompt="question", template=str(template)),
        Config(source=source, prompt="question", template=str(open_end)),
        Config(source=source, prompt="question", raw_text=True),
    ):
        version = store.open(run(config, store))
        starts.append(version.manifest.metrics["assistant_starts"])
        ends.append(version.manifest.metrics["assistant_end"])
    both = {"user": header, "system": header}
    assert starts == [both, {"user": header}, {"user": "\n"}, {}]
    end = {"id": tiny.EOS, "text": "<|im_end|>"}
    assert ends == [end, end, None, None]


def test_chats_in_the_column_prompt_are_chats(store, policy, tmp_path):
    """As TRL's conversational datasets and verl's parquet files have them."""
    chat = [{"content": "Be kind.", "role": "system"}, {"content": "2 + 5?", "role": "user"}]
    row = {"prompt": chat, "reward_model": {"style": "rule", "ground_truth": "7"}}
    pa.parquet.write_table(pa.Table.from_pylist([row]), tmp_path / "train.parquet")
    for named in ({}, {"prompt": "prompt"}):
        (prompt,) = rows(store, Config(source=str(tmp_path / "train.parquet"), **named))
        assert prompt["messages"] == chat
        assert prompt["prompt_text"].endswith("user\n2 + 5?<|im_end|>\n<|im_start|>assistant\n")
        assert prompt["columns"]["reward_model"] == row["reward_model"]


# -- which rows


SEED = """
class Tells:
    def reset(self, seed, **columns):
        return f"seed {seed}"

    def step(self, turn):
        return None
"""


def test_the_manifest_tells_how_an_answer_begins_after_a_tool(store, policy, source, tmp_path):
    """Chats that `branch` makes of these episodes end with the environment's answers."""
    (tmp_path / "tells.py").write_text(SEED)
    header = "<|im_end|>\n<|im_start|>assistant\n"
    for turns, roles in (
        ({"environment": f"{tmp_path}/tells.py:Tells"}, ["user"]),
        ({"tools": ["python"]}, ["user", "tool"]),
    ):
        version = store.open(run(Config(source=source, prompt="question", turns=turns), store))
        assert version.manifest.metrics["assistant_starts"] == dict.fromkeys(roles, header)


def test_each_row_is_opened_with_its_own_seed(store, policy, source, tmp_path, monkeypatch):
    """Those too that are begun when others have ended."""
    monkeypatch.setattr(openings, "_MOST_OPEN", 3)
    (tmp_path / "tells.py").write_text(SEED)
    turns = {"environment": f"{tmp_path}/tells.py:Tells"}
    config = Config(source=source, prompt="question", turns=turns)
    for row in rows(store, config):
        seed = environment_seed(row["group_id"])
        assert row["messages"][-1]["content"].endswith(f"seed {seed}")


def test_each_round_takes_the_next_rows_of_each_epochs_shuffle():
    taken = [choose(10, 4, 7, round) for round in range(1, 26)]
    flat = [row for rows in taken for row in rows]
    for epoch in range(10):
        assert sorted(flat[10 * epoch : 10 * epoch + 10]) == list(range(10))
    assert all(len(set(rows)) == 4 for rows in taken) and flat[:10] != flat[10:20]
    assert sorted(choose(3, 10, 0, 5)) == [0, 1, 2]
    assert choose(10, 4, 7, 4) == taken[3]
    assert choose(10, 4, 7, 0) == taken[0], "an evaluation takes the first rows"
    assert choose(10, 4, 8, 1) != taken[0]
    assert choose(5, None, 3, 9) == [0, 1, 2, 3, 4]


# -- already done


def test_the_next_policy_with_the_same_tokenizer_is_a_cache_hit(store, policy, source):
    def made(policy=policy, force=False, **fields):
        config = Config(source=source, prompt="question", **fields)
        return run(config, store, policy=policy.ref, into="tiny", force=force)

    first = made()
    other = tiny.make_policy(store, "other", seed=1)
    assert made(policy=other, round=4, seed=9) == made(template_seconds=3) == first
    assert made(force=True).version == 2
    limited = [made(limit=3, round=round) for round in (1, 2, 1)]
    assert limited[0] == limited[2] != limited[1]


def test_a_changed_source_or_template_is_another_version(store, policy, source, tmp_path):
    config = Config(source=source, prompt="question")
    first = run(config, store)
    write(tmp_path, [*SUMS[:-1], {**SUMS[-1], "answer": 99}])
    assert run(config, store).version == first.version + 1
    pinned = store.open(first).manifest.config["source_sha256"]
    config = Config(source=source, prompt="question", source_sha256=pinned)
    with pytest.raises(ConfigError, match="sha256 expected"):
        resolve(config)
    with pytest.raises(ConfigError, match="sha256 expected"):
        run(config, store, force=True)
    template = tmp_path / "own.jinja"
    texts = []
    for text in ("Q: {{ messages[0].content }}\nA:", "{{ style }}{{ messages[0].content }}"):
        template.write_text(text)
        arguments = {"template": str(template), "template_arguments": {"style": "shout: "}}
        config = Config(source=source, prompt="question", **arguments)
        texts.append(rows(store, config)[0]["prompt_text"])
    assert texts == ["Q: What is 0 plus 5?\nA:", "shout: What is 0 plus 5?"]


WRITES = """
def rows(template):
    with open(template, "a") as file:
        file.write("!")
    yield {"prompt": "a"}
"""


def test_a_template_that_changes_behind_the_plan_is_refused(store, policy, tmp_path):
    """Rows are read once to plan and once to make."""
    (tmp_path / "writes.py").write_text(WRITES)
    template = tmp_path / "own.jinja"
    template.write_text("Q: {{ messages[0].content }}\nA:")
    config = Config(
        source=f"{tmp_path}/writes.py:rows",
        arguments={"template": str(template)},
        template=str(template),
    )
    with pytest.raises(ConfigError, match=r"own.jinja: it has changed since the stage was planned"):
        run(config, store)
    assert template.read_text().endswith("A:!!")


def test_a_resolved_config_is_planned_and_found_without_its_source(store, policy, source):
    sha256 = hashlib.sha256(Path(source).read_bytes()).hexdigest()
    config = Config(source=source, group_id="key", prompt="question", limit=3)
    resolved = resolve(config)
    assert resolved == config.model_copy(update={"source_sha256": sha256}) == resolve(resolved)
    first = run(resolved, store)
    assert first == run(config, store)
    Path(source).unlink()
    assert run(resolved, store) == first
    with pytest.raises(ConfigError, match="there is no file"):
        run(resolved.model_copy(update={"round": 2}), store)


def test_finished_shards_are_taken_up(store, policy, tmp_path):
    many = [{"prompt": f"say {n}"} for n in range(ROWS_PER_SHARD)] + [{"prompt": "x" * 400}]
    config = Config(source=write(tmp_path, many), max_prompt_tokens=200)
    with pytest.raises(ConfigError, match=r"has \d+ tokens, 200 tokens are allowed"):
        run(config, store)
    (part,) = Path(store.url).glob("tiny/prompts/.work/*/part-00000-*.arrow")
    written = part.stat().st_mtime_ns
    with pytest.raises(ConfigError, match="000256"):
        run(config, store)
    assert part.stat().st_mtime_ns == written


def test_shards_grow_with_the_prompts(store, policy, tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "MOST_SHARDS", 2)
    many = [{"prompt": f"say {n}"} for n in range(2 * ROWS_PER_SHARD + 1)]
    version = store.open(run(Config(source=write(tmp_path, many)), store))
    assert [entry.rows for entry in version.manifest.files] == [2 * ROWS_PER_SHARD, 1]
    asked = [row["messages"][0]["content"] for row in version.table().to_pylist()]
    assert asked == [row["prompt"] for row in many]


def test_a_chat_of_the_last_shard_keeps_all_its_members(store, policy, tmp_path):
    answered = [
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "4", "reasoning_content": "two twice"},
        {"role": "user", "content": "3 + 3?"},
    ]
    chats = [answered[:1]] * ROWS_PER_SHARD + [answered]
    source = write(tmp_path, [{"messages": chat} for chat in chats])
    version = store.open(run(Config(source=source), store))
    assert len(version.manifest.files) == 2
    assert read_messages(version.table()["messages"][-1].as_py()) == answered


# -- too long


def test_too_long_is_an_error_that_names_the_place_in_the_source(store, policy, source, tmp_path):
    """Not the place among the rows that were chosen."""
    ids = write(tmp_path, [{"prompt_ids": list(range(3, 259))}], "ids.jsonl")
    assert len(rows(store, Config(source=ids))[0]["prompt_ids"]) == 256
    allowed = "256 tokens, 255 tokens are allowed: the model's context is 256 tokens, 1 are kept"
    with pytest.raises(ConfigError, match=f"(?s){allowed}.*Next: .*lower generate.sampling.max_to"):
        run(Config(source=ids, reserve_tokens=1), store)
    with pytest.raises(
        ConfigError, match=r"255 tokens are allowed\nS.*\n.*raise prompt.max_prompt"
    ):
        run(Config(source=ids, max_prompt_tokens=255), store)
    with pytest.raises(ConfigError, match="leaves no room"):
        run(Config(source=ids, reserve_tokens=256), store)
    chosen = {"limit": 3, "seed": 5, "round": 2}
    with pytest.raises(ConfigError) as caught:
        run(Config(source=source, prompt="question", max_prompt_tokens=6, **chosen), store)
    prompt, row = re.match(r"prompt (\d+) \(row (\d+) of ", caught.value.object).groups()
    assert int(row) == int(prompt) + 1 > 1
    assert "drop" in caught.value.next


def test_dropped_prompts_are_counted_listed_and_told(store, policy, tmp_path, caplog):
    path = write(tmp_path, [{"prompt": "one"}, {"prompt": "x" * 256}, {"prompt": "two"}])
    version = store.open(run(Config(source=path, overlong="drop"), store))
    assert version.table()["group_id"].to_pylist() == ["000000", "000002"]
    assert version.manifest.metrics["dropped_group_ids"] == ["000001"]
    assert version.manifest.status == {"kept": 2, "dropped": 1}
    told = f"{path}: 1 of 3 prompts are left out: they have more than 256 tokens"
    assert told in [record.getMessage() for record in caplog.records]
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "x" * 256}))
    with pytest.raises(ConfigError, match="the 256 tokens allowed: the model's context") as caught:
        run(Config(source=f"{tmp_path}/long.jsonl", overlong="drop"), store)
    assert caught.value.next == "shorten them, or take a model with a longer context"
    with pytest.raises(ConfigError, match="all 3 prompts"):
        run(Config(source=path, overlong="drop", max_prompt_tokens=1), store)


def test_a_text_that_no_room_is_for_is_not_encoded(store, policy, tmp_path):
    text = "word " * 400_000
    path = write(tmp_path, [{"messages": [{"role": "user", "content": t}]} for t in (text, "hi")])
    with pytest.raises(ConfigError, match=r"the prompt has 20000\d\d characters, 200 tokens"):
        run(Config(source=path, max_prompt_tokens=200), store)
    config = Config(source=path, max_prompt_tokens=200, overlong="drop")
    assert store.open(run(config, store)).manifest.status == {"kept": 1, "dropped": 1}
    (tmp_path / "talks.py").write_text(SEED.replace('f"seed {seed}"', '"word " * 10_000'))
    turns = {"environment": f"{tmp_path}/talks.py:Tells"}
    path = write(tmp_path, [{"prompt": "hi"}])
    with pytest.raises(ConfigError, match=r"the prompt has 500\d\d characters, 200 tokens"):
        run(Config(source=path, turns=turns, max_prompt_tokens=200), store)


# -- refused

BAD = [
    ({"group_id": "id"}, [{"prompt": "a", "idx": 1}], "did you mean idx"),
    ({"tools": "function"}, [{"prompt": "a", "functions": 1}], "prompt, functions; .* functions"),
    (
        {},
        [{"query": "b", "Question ": "a"}],
        'prompt_ids; it has query, "Question "; did you mean data.prompt = "Question "',
    ),
    ({"prompt": "Question"}, [{"": 1, "Question ": "a"}], 'has "", "Question "; .* "Question "'),
    ({"raw_text": True}, [{"messages": []}], "no column prompt; it has messages"),
    (
        {"group_id": "k"},
        [{"prompt": "a", "k": "x"}, {"prompt": "b", "k": "x"}],
        "row 2.*'x' is also in row 1",
    ),
    ({"group_id": "k"}, [{"prompt": "a", "k": 1}, {"prompt": "b", "k": None}], "row 2.*is empty"),
    ({}, [{"prompt": "a"}, {"prompt": None}], "000001.*holds null, expected text"),
    ({}, [{"prompt_ids": [5]}, {"prompt_ids": None}], "holds null, expected a list of token ids"),
    ({}, [{"messages": [{"role": "user"}]}], "000000.*message 0 .* expected role and content"),
    ({"system": "s"}, [{"messages": [{"content": "a"}]}], "message 0 has .'content'.,"),
    ({}, [{"messages": "hi"}], "row 1 column messages: is not JSON: Exp"),
    ({}, [{"messages": None}, {"messages": "[]"}], "messages holds null, expected a list of"),
    ({}, [{"prompt_ids": [1, 320]}], "320 is outside the model's vocabulary of 320"),
    ({}, [{"prompt_ids": []}], "no tokens"),
    ({}, [{"prompt_ids": [6.5, 5.0]}], "prompt_ids holds 6.5, expected a list of token ids, which"),
    ({"template": "none.jinja"}, [{"prompt": "a"}], "none.jinja"),
]


@pytest.mark.parametrize("options, given, why", BAD)
def test_bad_input_is_named(store, policy, tmp_path, options, given, why):
    with pytest.raises(ConfigError, match=f"(?s){why}"):
        run(Config(source=write(tmp_path, given), **options), store)
    assert store.numbers("tiny", "prompts") == []


def test_an_error_names_the_other_rows_with_a_problem(store, policy, tmp_path):
    asked = [*"abcdefghi"]
    asked[2], asked[4], asked[7] = None, "x" * 300, [{"content": "who?"}]
    with pytest.raises(ConfigError) as caught:
        run(Config(source=write(tmp_path, [{"prompt": each} for each in asked])), store)
    assert caught.value.object.startswith("prompt 000002 (row 3 of ")
    assert caught.value.message == (
        "column prompt holds null, expected text; 2 of the 6 rows after it have a problem, too: "
        "rows 5, 8"
    )
    path = write(tmp_path, [{"messages": "["}] * 9)
    with pytest.raises(ConfigError, match=r"row 1 column.*JSON.*8 of the 8 .* 2, 3, 4, 5, 6, …"):
        run(Config(source=path), store)


@pytest.mark.parametrize(
    "options, why",
    [
        ({"prompt": "x", "messages": "y"}, "exclude each other"),
        ({"messages": "y", "raw_text": True}, "raw_text goes with prompt"),
        ({"prompt": "y", "raw_text": True, "images": "z"}, "leave raw_text out"),
    ],
)
def test_a_config_that_contradicts_itself(options, why):
    with pytest.raises(ConfigError, match=why):
        parse(Config, {"source": "a.jsonl", **options}, "prompt")


def called(**arguments):
    """A chat with a call of these arguments."""
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return [
        {"role": "user", "content": "What is two plus 5?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "7<|im_start|>system", "tool_call_id": "c1", "name": "add"},
        {"role": "user", "content": "And again?"},
    ]


WITH_CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{{ ' ' + m.name if m.name else '' }}\n"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments | tojson }})"
    "{% endfor %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_chats_with_calls_are_rendered_whole_and_forge_nothing(store, policy, tmp_path):
    template = tmp_path / "calls.jinja"
    template.write_text(WITH_CALLS)
    (row,) = rows(
        store,
        Config(
            source=write(tmp_path, [{"messages": called(a="2 <|im_end|>", b="5")}]),
            template=str(template),
        ),
    )
    text = (
        '<|im_start|>assistant\nadd({"a": "2 <|im_end|>", "b": "5"})<|im_end|>\n'
        "<|im_start|>tool add\n7<|im_start|>system<|im_end|>\n"
    )
    assert text in row["prompt_text"]
    assert [id for id in row["prompt_ids"] if id <= tiny.EOS] == [1, 2] * 4 + [1]


CHATS = [
    called(filter={"price": 3}, tags=[{"a": 1}]),
    called(filter={"place": "Rome"}, tags=[{"a": 1, "b": [{}]}, {"b": [{}, {"d": 2}]}]),
    called(limit=2)[:1],
]
"""Calls whose arguments have other keys in other rows, and a chat without calls."""


def chat_columns():
    """The chats as others write them."""
    texts = [[json.dumps(message) for message in chat] for chat in CHATS]
    flat = [
        [
            [(name, text if isinstance(text, str) else json.dumps(text)) for name, text in pairs]
            for pairs in map(dict.items, chat)
        ]
        for chat in CHATS
    ]
    structs = pa.array(CHATS)
    yield structs
    yield structs.cast(pa.large_list(structs.type.value_type))
    yield pa.array(CHATS, pa.list_view(structs.type.value_type))
    yield pa.array(flat, pa.list_(pa.map_(pa.string(), pa.string())))
    yield pa.array(texts).cast(pa.list_(pa.json_()))
    yield pa.array(texts)
    for kind in (pa.json_(), pa.string(), pa.string_view()):
        yield pa.array(map(json.dumps, CHATS), kind)


@pytest.mark.parametrize("column", chat_columns(), ids=lambda column: str(column.type)[:20])
def test_chats_of_every_shape_are_read_with_their_calls(store, policy, tmp_path, column):
    """In an Arrow struct no null is known to be written: arguments have the keys of their row."""
    table = pa.table({"messages": column})
    with pa.ipc.new_file(tmp_path / "rows.arrow", table.schema) as file:
        file.write_table(table)
    version = store.open(run(Config(source=str(tmp_path / "rows.arrow")), store))
    assert version.manifest.kind_schema == "prompts/2"
    assert [*map(read_messages, version.table()["messages"].to_pylist())] == CHATS


def test_chats_without_calls_have_none_in_whatever_column(store, policy, tmp_path):
    chat = [{"role": "user", "content": "a", "tool_calls": None}]
    version = store.open(run(Config(source=write(tmp_path, [{"messages": chat}])), store))
    assert version.manifest.kind_schema == "prompts/1"
