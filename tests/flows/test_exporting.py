"""`quiver export`: what other trainers read, and what `quiver import` takes back."""

from __future__ import annotations

import json
from datetime import date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from uuid import UUID

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets import load_dataset

from quiver.flows import exporting, json_lines
from quiver.flows.cli import episodes as commands
from quiver.flows.cli.compare import diff
from quiver.flows.exporting import Exported, Options, export
from quiver.flows.json_lines import to_lines
from quiver.flows.look.paired import pair
from quiver.schemas.cells import json_array
from quiver.schemas.errors import ConfigError, LineageError
from quiver.schemas.refs import Ref
from quiver.stages.core.store import Store, Version
from quiver.stages.model.chat.messages import read_messages
from quiver.stages.model.loading import load_model
from tests import episodes, exported
from tests.stages.optimize import world
from tests.tiny import EOS, make_policy, tokenizer
from tests.writing import run_here, write_lines

ASSISTANT = {name: [{"role": "assistant", "content": name}] for name in ("12", "no", "3", "four", "it is 3")}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Store, exported.Made]:
    folder = tmp_path_factory.mktemp("exported")
    store = Store(folder / "store")
    return store, exported.make(store, folder)


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def save(store: Store, ref: Ref | str, path: Path, format: str, **options) -> Exported:
    return export(store, str(ref), path, Options(format, **options))


def take_back(store: Store, path: Path, policy: Version, run: str) -> None:
    """Import what was exported."""
    commands.import_(path, str(policy.ref), into=run, store=str(store.url))


def written(made, path: Path, format: str, **options) -> list[dict]:
    store, versions = made
    save(store, versions.rewards.ref, path / "out.jsonl", format, **options)
    return rows_of(path / "out.jsonl")


def texts(rows: list[dict], *names: str) -> list[tuple[str, ...]]:
    """The texts of the chats in these columns."""
    return [tuple(row[name][0]["content"] for name in names) for row in rows]


def prompt(group: str) -> list[dict]:
    return [
        {"role": "system", "content": exported.SYSTEM},
        {"role": "user", "content": exported.question(group)},
    ]


def test_pairs_are_the_best_and_the_worst_answer_to_each_prompt(made, tmp_path, command):
    """A prompt whose rewards are all equal has none; unscored and failed rollouts are left out."""
    store, versions = made
    named = (str(versions.rollouts.ref), "--as", "dpo", "--out", str(tmp_path / "pairs.jsonl"))
    code, answer = command("export", *named, "--store", str(store.url))
    assert code == 0
    assert rows_of(tmp_path / "pairs.jsonl") == [
        {"prompt": prompt("q0"), "chosen": ASSISTANT["12"], "rejected": ASSISTANT["no"]},
        {"prompt": prompt("q2"), "chosen": ASSISTANT["it is 3"], "rejected": ASSISTANT["four"]},
    ]
    left_out = {why: count for why, count in answer["left_out"].items() if count}
    assert left_out == {"failed": 1, "without a score": 1, "without a difference": 1}
    assert answer["rows"] == 2
    assert (answer["tokenised"], answer["other_ids"]) == (10, 0)


def test_cut_answers_may_be_left_out(made, tmp_path):
    rows = written(made, tmp_path, "reward", cut="leave-out")
    assert [row["chosen"] for row in rows] == [ASSISTANT["12"], ASSISTANT["3"]]


def test_every_pair_with_a_gap(made, tmp_path):
    rows = written(made, tmp_path, "dpo", pairs="all", min_gap=0.5)
    expected = [("12", "no"), ("12", "twelve"), ("it is 3", "3"), ("it is 3", "four"), ("twelve", "no")]  # fmt: skip
    assert sorted(texts(rows, "chosen", "rejected")) == expected


def test_a_gap_of_rounded_scores_is_as_large_as_it_says(made, tmp_path):
    """As float32, 1 − 0.2 is less than 0.8."""
    rows = written(made, tmp_path, "dpo", pairs="all", min_gap=0.8)
    expected = [("12", "no"), ("it is 3", "four"), ("it is 3", "3")]
    assert texts(rows, "chosen", "rejected") == expected


def test_labels_say_if_an_answer_is_above_the_mean_of_its_prompt(made, tmp_path):
    """Means are 0.5, 1 and 0.4: what lies at the mean has no label. The same for large rewards."""
    store, versions = made
    rows = versions.rewards.table().to_pylist()
    rewards = {row["rollout_id"]: row["reward"] for row in rows}

    def large(row):
        reward = rewards[row["rollout_id"]]
        return None if reward is None else [100_000 + 10 * reward]

    scored = episodes.write_rewards(store, versions.rollouts, large, "large", of_turns=False)
    for ref in (versions.rewards.ref, scored.ref):
        path = tmp_path / f"{ref.run}.jsonl"
        save(store, ref, path, "kto")
        labels = {row["completion"][0]["content"]: row["label"] for row in rows_of(path)}
        assert labels == {"12": True, "no": False, "3": False, "four": False, "it is 3": True}


def test_conditions_choose_answers_to_imitate(made, tmp_path):
    rows = written(made, tmp_path, "sft", where="reward > 0.9", cut="leave-out", ids=True)
    assert texts(rows, "completion") == [("12",), ("7",), ("seven",), ("7.",), ("7!",)]
    ids = [*tokenizer().encode("12"), EOS]
    asked = made[1].prompts.table()["prompt_ids"][0].as_py()
    assert rows[0]["input_ids"] == asked + ids
    assert rows[0]["completion_mask"] == [0] * len(asked) + [1] * len(ids)


def test_exact_ids_stand_beside_the_texts(made, tmp_path):
    rollouts = {row["completion_text"]: row for row in made[1].rollouts.table().to_pylist()}
    for row in written(made, tmp_path, "reward", ids=True):
        for name in ("chosen", "rejected"):
            rollout = rollouts[row[name][0]["content"]]
            assert row[f"{name}_ids"] == rollout["prompt_ids"] + rollout["completion_ids"]


def test_answers_that_become_other_ids_are_counted(store, tmp_path):
    made = exported.make(store, tmp_path)
    rows = made.rollouts.table().to_pylist()
    row = next(row for row in rows if row["completion_text"] == "seven")
    letters = [*(tokenizer().encode(letter)[0] for letter in "seven"), EOS]
    assert len(row["completion_ids"]) < len(letters), "BPE merges some of its letters"
    row |= {"completion_ids": letters, "old_logprobs": [-1.0] * len(letters)}
    rollouts = episodes.write(store, made.policy, rows, prompts=made.prompts)
    done = save(store, rollouts.ref, tmp_path / "sft.jsonl", "sft")
    assert (done.tokenised, done.other_ids) == (11, 1)


def test_the_id_that_stopped_an_answer_has_no_text_to_tokenise(tmp_path):
    """As an end token's: `sampling.stop_token_ids` ends answers whose text is the same."""
    store = Store(tmp_path / "store")
    made = exported.make(store, tmp_path)
    (mark,) = tokenizer().encode("#")
    rows = made.rollouts.table().to_pylist()
    for row in rows:
        row["completion_ids"] = [mark if id == EOS else id for id in row["completion_ids"]]
    sampling = {"stop_token_ids": [mark]}
    rollouts = episodes.write(store, made.policy, rows, prompts=made.prompts, **sampling)
    done = export(store, str(rollouts.ref), tmp_path / "sft.jsonl", Options("sft"))
    assert (done.tokenised, done.other_ids) == (11, 0)


AGENT = (
    "{% macro role(message, before) %}{{ 'agent' if message == 'assistant' and before == 'tool' "
    "else message }}{% endmacro %}"
    "{% for message in messages %}<|im_start|>"
    "{{ role(message['role'], messages[loop.index0 - 1]['role']) }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>"
    "{{ role('assistant', messages[-1]['role']) }}\n<think>\n{% endif %}"
)
"""A template that calls the assistant otherwise after a tool's answer."""


def test_what_begins_an_answer_is_told_by_the_role_before_it(tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text(AGENT)
    asked = {"role": "user", "content": "How many?"}
    looked = [{"role": "assistant", "content": "I look."}, {"role": "tool", "content": "7"}]
    chats = [[asked], [asked, *looked], [asked]]
    rows = [{"id": id, "chat": chat} for id, chat in zip(exported.ANSWERS, chats, strict=True)]
    source = tmp_path / "chats.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    of_chats = {"source": str(source), "prompt": None, "messages": "chat", "system": None}
    store = Store(tmp_path / "store")
    made = exported.make(store, tmp_path, template=str(template), **of_chats)
    export(store, str(made.rewards.ref), tmp_path / "sft.jsonl", Options("sft"))
    texts = {row["completion"][0]["content"] for row in rows_of(tmp_path / "sft.jsonl")}
    assert {"<think>\n12", "<think>\n7", "<think>\nfour"} <= texts


def test_what_the_prompt_begins_belongs_to_the_answer(tmp_path):
    template = tmp_path / "template.jinja"
    plain = tokenizer().chat_template
    template.write_text(plain.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}"))
    store = Store(tmp_path / "store")
    made = exported.make(store, tmp_path, template=str(template))
    save(store, made.rewards.ref, tmp_path / "sft.jsonl", "sft")
    first = rows_of(tmp_path / "sft.jsonl")[0]
    assert first["completion"] == [{"role": "assistant", "content": "<think>\n12"}]


def test_prompts_without_messages_are_texts(store, tmp_path):
    made = exported.make(store, tmp_path, raw_text=True, system=None)
    save(store, made.rewards.ref, tmp_path / "kto.jsonl", "kto")
    first = rows_of(tmp_path / "kto.jsonl")[0]
    assert first == {"prompt": exported.question("q0"), "completion": "12", "label": True}


CALLS = [{"name": "add", "arguments": {"a": 1, "b": "x"}}]


def with_tools(store: Store, folder: Path) -> exported.Made:
    """Rollouts/2: a call of a tool and its answer, an environment's answer, a rewritten history."""
    made = exported.make(store, folder)
    asked = made.prompts.table()["prompt_ids"][0].as_py()
    turns = [
        episodes.turn(2, [40, 41], text='Adding.<tool_call>{"name": "add"}</tool_call>', tool_calls=json.dumps(CALLS), observation="3"),
        episodes.turn(1, [42], text="three?", observation="no"),
        episodes.turn(1, text="four", observation="never read"),
    ]  # fmt: skip
    restarted = [episodes.turn(1, text="a"), episodes.turn(1, text="b", restart_ids=[7])]
    rows = [episodes.row("q0-0", turns), episodes.row("q0-1", restarted)]
    rows = [{**row, "prompt_ids": asked} for row in rows]
    rollouts = episodes.write(store, made.policy, rows, prompts=made.prompts)
    return made._replace(rollouts=rollouts)


@pytest.mark.parametrize("name", ["sft.jsonl", "sft.parquet"])
def test_episodes_are_conversations_with_calls_of_tools(store, tmp_path, name):
    """The text before a call is read by the parser that the manifest names; here there is none."""
    made = with_tools(store, tmp_path)
    path = tmp_path / name
    is_parquet = name.endswith("parquet")
    done = save(store, made.rollouts.ref, path, "sft", parquet=is_parquet)
    assert done.left_out["with a rewritten history"] == 1
    kind = "parquet" if is_parquet else "json"
    (row,) = load_dataset(kind, data_files=str(path), split="train", cache_dir=str(tmp_path / "c"))
    messages = [
        {name: member for name, member in message.items() if member is not None}
        for message in row["completion"]
    ]
    call = {"id": "call00000", "type": "function", "function": CALLS[0]}
    assert messages[0].pop("tool_calls") == [call]
    assert [message["role"] for message in messages] == ["assistant", "tool", "assistant", "user", "assistant"]  # fmt: skip
    assert messages[1]["content"] == "3" and messages[1]["tool_call_id"] == "call00000"
    assert [message["content"] for message in messages[2:]] == ["three?", "no", "four"]


def test_failed_episodes_are_no_demonstrations(store, tmp_path):
    """They come back from an import as failed, so a reward does not score them."""
    made = exported.make(store, tmp_path)
    asked = made.prompts.table()["prompt_ids"][0].as_py()
    rows = [
        episodes.row(f"q0-{index}", [episodes.turn(1, text=end)], prompt_ids=asked, end_reason=end)
        for index, end in enumerate(["answered", "timeout", "environment_error", "max_turns"])
    ]
    rollouts = episodes.write(store, made.policy, rows, prompts=made.prompts)
    done = save(store, rollouts.ref, tmp_path / "sft.jsonl", "sft")
    rows = rows_of(tmp_path / "sft.jsonl")
    assert texts(rows, "completion") == [("answered",), ("max_turns",)]
    assert done.left_out["failed"] == 2
    save(store, rollouts.ref, tmp_path / "all.jsonl", "trajectories")
    path = tmp_path / "all.jsonl"
    take_back(store, path, made.policy, "back")
    ends = store.open("back/rollouts@1").table()["end_reason"].to_pylist()
    assert ends == ["answered", "environment_error", "environment_error", "answered"]


def test_verls_prompts_have_what_its_dataset_reads(made, tmp_path):
    store, versions = made
    path = tmp_path / "verl.parquet"
    save(store, versions.rollouts.ref, path, "verl", parquet=True)
    rows = load_dataset(
        "parquet", data_files=str(path), split="train", cache_dir=str(tmp_path / "c")
    )
    assert [row["reward_model"] for row in rows] == [
        {"style": "rule", "ground_truth": str(answer)} for answer in range(3)
    ]
    assert rows[0]["prompt"] == prompt("q0")
    assert rows[0]["data_source"] == "tiny" and rows[0]["extra_info"] == {"index": "q0"}


def test_verl_gets_the_run_for_a_missing_data_source(store, tmp_path, monkeypatch):
    """Each row is a batch by itself, and all have the types of one Parquet file."""
    monkeypatch.setattr(exporting, "_ROWS_AT_ONCE", 1)
    policy = make_policy(store)
    lines = [
        {
            "prompt_ids": [5, 6 + number],
            "completion_ids": [7],
            "logprobs": [-0.5],
            "messages": [{"role": "user", "content": "?"}],
            "columns": {"answer": "7", "data_source": source},
        }
        for number, source in enumerate([None, "gsm8k"])
    ]
    path = tmp_path / "lines.jsonl"
    write_lines(path, lines)
    take_back(store, path, policy, "tiny")
    verl = tmp_path / "verl.parquet"
    save(store, "tiny/rollouts@1", verl, "verl", parquet=True)
    assert pq.read_table(verl)["data_source"].to_pylist() == ["tiny", "gsm8k"]


def test_parquet_has_the_rows_of_the_lines(made, tmp_path):
    store, versions = made
    lines = written(made, tmp_path, "reward", ids=True)
    path = tmp_path / "reward.parquet"
    save(store, versions.rewards.ref, path, "reward", ids=True, parquet=True)
    assert pq.read_table(path).to_pylist() == lines


@pytest.mark.parametrize("of_turns", [False, True])
def test_imported_trajectories_have_the_same_losses(tmp_path, monkeypatch, command, of_turns):
    """dr_grpo divides by the token limit, which the command of the export carries."""
    monkeypatch.chdir(tmp_path)
    store = Store("store")
    policy = make_policy(store)
    model = load_model(policy, dtype=torch.float32)
    rows = episodes.sample(model, episodes.prompts(3), 4, most_turns=3 if of_turns else 1)
    if not of_turns:
        rows = [{k: v for k, v in row.items() if k not in ("turns", "end_reason")} for row in rows]
    prompts = world.write_prompts(store, rows)
    rollouts = episodes.write(store, policy, rows, prompts=prompts, max_tokens=40)
    rewards = episodes.write_rewards(store, rollouts, episodes.even_ids if of_turns else one_reward, of_turns=of_turns)  # fmt: skip
    named = (str(rewards.ref), "--as", "trajectories", "--out", "all.jsonl", "--store", "store")
    code, answer = command("export", *named)
    assert code == 0
    words = answer["import"].split(" import ")[1]
    assert f"--policy {policy.ref}" in words and answer["sampling"] == (
        {} if of_turns else {"max_tokens": 40}
    )
    commands.import_(Path("all.jsonl"), str(policy.ref), into="back", settings=[f"sampling={json.dumps(answer['sampling'])}"], store="store")  # fmt: skip
    back = store.open("back/rollouts@1"), store.open("back/rewards@1")
    assert back[1].manifest.kind_schema == rewards.manifest.kind_schema
    assert store.open("back/prompts@1").table()["group_id"].equals(prompts.table()["group_id"])
    config = world.config(algorithm="dr_grpo", credit="turn" if of_turns else "rollout")
    runs = ((rollouts, rewards), back)
    steps = [world.updates(store, world.trained(store, policy, pair, config)) for pair in runs]
    for ours, theirs in zip(*steps, strict=True):
        assert theirs["loss"] == pytest.approx(ours["loss"], abs=1e-6)
        assert theirs["grad_norm"] == pytest.approx(ours["grad_norm"], abs=1e-6)


def one_reward(row: dict) -> list[float]:
    return [sum(id % 2 == 0 for id in row["completion_ids"]) / len(row["completion_ids"])]


def test_what_the_environment_paid_comes_back(store, tmp_path):
    """It is another number than the rewards that are made of it, and there if nothing is scored."""
    policy = make_policy(store)
    paid = [[0.25, None, 1.0], [None, None], [0.5, 2.0]]
    rows = [
        episodes.row(f"q-{index}", [episodes.turn(1, reward=reward) for reward in rewards])
        for index, rewards in enumerate(paid)
    ]
    rollouts = episodes.write(store, policy, rows, prompts=world.write_prompts(store, rows))
    half = {"functions": [{"use": "environment", "weight": 0.5}, {"use": "length", "arguments": {"target": 1}}]}  # fmt: skip
    whole = {"functions": half["functions"][1:]}
    for run, config in {"bare": None, "of-turns": half, "of-rollouts": whole}.items():
        ref = rollouts.ref
        if config:
            ref = run_here("reward", config, store, rollouts=rollouts.ref)
        path = tmp_path / f"{run}.jsonl"
        save(store, ref, path, "trajectories")
        take_back(store, path, policy, run)
        back = store.open(f"{run}/rollouts@1")
        turns = back.table()["turns"].to_pylist()
        assert [[turn["reward"] for turn in row] for row in turns] == paid
        assert bool(store.summaries(run, "rewards")) == bool(config)
        if config:
            again = store.open(run_here("reward", config, store, rollouts=back.ref))
            for version in (store.open(f"{run}/rewards@1"), again):
                for name in {"reward", "turn_rewards"} & {*store.open(ref).table().column_names}:
                    assert version.table()[name].equals(store.open(ref).table()[name])


def test_imported_chats_are_exported_as_chats(made, tmp_path):
    """Of single answers, and of episodes."""
    store = Store(tmp_path / "store")
    calls = with_tools(store, tmp_path)
    for index, (opened, ref) in enumerate([(made[0], made[1].rewards.ref), (store, calls.rollouts.ref)]):  # fmt: skip
        lines, ours, theirs = (tmp_path / f"{name}{index}.jsonl" for name in ("a", "b", "c"))
        save(opened, ref, lines, "trajectories")
        save(opened, ref, ours, "sft")
        take_back(store, lines, calls.policy, f"back{index}")
        save(store, f"back{index}/rollouts@1", theirs, "sft")
        assert rows_of(theirs) == rows_of(ours)


def test_imported_prompts_keep_chat_and_columns(made, tmp_path):
    store, versions = made
    path = tmp_path / "all.jsonl"
    save(store, versions.rewards.ref, path, "trajectories")
    theirs = Store(tmp_path / "theirs")
    take_back(theirs, path, make_policy(theirs), "tiny")
    prompts = theirs.open("tiny/prompts@1").table()
    for name in ("group_id", "prompt_text", "prompt_ids"):
        assert prompts[name].equals(versions.prompts.table()[name])
    chats = [read_messages(chat) for chat in prompts["messages"].to_pylist()]
    assert chats == [prompt(group) for group in exported.ANSWERS]
    assert [row["answer"] for row in prompts["columns"].to_pylist()] == [0, 1, 2]
    rewards = theirs.open("tiny/rewards@1").table()["reward"]
    assert rewards.equals(versions.rewards.table()["reward"])
    rollouts = theirs.open("tiny/rollouts@1")
    assert rollouts.manifest.input("prompts").ref == "tiny/prompts@1"


@pytest.mark.parametrize("has_messages", [True, False])
def test_an_imported_copy_pairs_with_its_original(store, tmp_path, has_messages):
    """By the chats of the prompts, though their schema has more fields; by their texts if the lines
    have no chats."""
    made = exported.make(store, tmp_path)
    path = tmp_path / "all.jsonl"
    save(store, made.rewards.ref, path, "trajectories")
    if not has_messages:
        lines = [{**line, "messages": None} for line in rows_of(path)]
        write_lines(path, lines)
    take_back(store, path, made.policy, "copy")
    paired = pair(store, str(made.rewards.ref), "copy/rewards@1")
    assert paired.places.tolist() == list(range(len(made.rewards.table())))
    changed = diff(store, str(made.prompts.ref), "copy/prompts@1")["rows"]["changed"]
    assert changed == ({} if has_messages else {"messages": 3})


@pytest.mark.parametrize(
    "words, said",
    [
        (["--as", "sft", "--min-gap", "0.5"], "--min-gap"),
        (["--as", "kto", "--pairs", "all"], "--pairs"),
        (["--as", "verl", "--ids"], "--ids"),
        (["--as", "dpo", "--ids"], "DPOTrainer tokenises"),
        (["--as", "trajectories", "--parquet"], "Parquet"),
        (["--as", "dpo", "--min-gap", "2"], "3 without a difference"),
    ],
)
def test_what_cannot_be_written_is_refused(made, tmp_path, monkeypatch, command, words, said):
    monkeypatch.chdir(tmp_path)
    store, versions = made
    named = (str(versions.rewards.ref), *words, "--out", "out.jsonl", "--store", str(store.url))
    code, answer = command("export", *named)
    assert code == 2
    assert said in f"{answer['error']['object']} {answer['error']['message']}"
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_there_stays(made, tmp_path):
    (tmp_path / "out.jsonl").write_text("mine")
    with pytest.raises(ConfigError, match="exists already"):
        written(made, tmp_path, "sft")
    assert (tmp_path / "out.jsonl").read_text() == "mine"


def test_episodes_without_messages_are_trajectories_only(store, tmp_path):
    policy = make_policy(store)
    rows = episodes.sample(load_model(policy, dtype=torch.float32), episodes.prompts(2), 2)
    rollouts = episodes.write(store, policy, rows, prompts=world.write_prompts(store, rows))
    with pytest.raises(LineageError, match="only trajectories"):
        save(store, rollouts.ref, tmp_path / "sft.jsonl", "sft")


def test_chats_that_end_with_a_role_unlike_the_prompts_are_trajectories_only(store, tmp_path):
    """`branch` ends a chat with a tool's answer; how an answer begins after it is not known."""
    made = with_tools(store, tmp_path)
    cut = store.open(run_here("branch", {"turn": 1}, store, rollouts=made.rollouts.ref, into="cut"))
    rows = [
        episodes.row(f"{row['group_id']}-0", [episodes.turn(1)], prompt_ids=row["prompt_ids"])
        | {"group_id": row["group_id"]}
        for row in cut.table().to_pylist()
    ]
    rollouts = episodes.write(store, made.policy, rows, "cut", cut)
    with pytest.raises(LineageError, match="only trajectories"):
        save(store, rollouts.ref, tmp_path / "sft.jsonl", "sft")


def with_own(store: Store, folder: Path, **own: pa.Array) -> exported.Made:
    """Rollouts of three prompts whose source, a Parquet file, has these columns too."""
    path = folder / "asked.parquet"
    questions = {"id": list(exported.ANSWERS), "question": ["one?", "two?", "three?"]}
    pq.write_table(pa.table({**questions, **own}), path)
    return exported.make(store, folder, source=str(path))


def test_what_json_cannot_hold_as_it_is_comes_back_as_the_nearest_or_is_refused(store, tmp_path):
    """A number that is not finite is null, a decimal is a number, a date is its text."""
    numbers = [[0.5, float("nan")], [1.0, float("inf")], [2.0, 3.0]]
    own = {
        "short": pa.array(numbers, pa.list_(pa.float32())),
        "fixed": pa.array(numbers, pa.list_(pa.float64(), 2)),
        "price": pa.array([Decimal("1.50"), None, Decimal("2.25")]),
        "day": pa.array([date(2026, 1, 2)] * 3),
        "large": pa.array(["a", "b\n", "c"], pa.large_string()),
        "answer": pa.array([Decimal("1.50")] * 3),
    }
    made = with_own(store, tmp_path, **own)
    lines = tmp_path / "lines.jsonl"
    save(store, made.rollouts.ref, lines, "trajectories")
    take_back(store, lines, made.policy, "back")
    first, second, _ = store.open("back/prompts@1").table()["columns"].to_pylist()
    assert first["short"] == first["fixed"] == [0.5, None]
    assert second["short"] == second["fixed"] == [1.0, None]
    assert (first["price"], second["price"]) == (1.5, None)
    assert (first["day"], second["large"]) == ("2026-01-02", "b\n")
    save(store, made.rollouts.ref, tmp_path / "verl.jsonl", "verl")
    questions = rows_of(tmp_path / "verl.jsonl")
    assert {row["reward_model"]["ground_truth"] for row in questions} == {"1.5"}


def test_types_that_json_does_not_know_are_their_text():
    day = datetime(2026, 1, 2, 3, 4, 5)
    id = UUID(int=7)
    ids = pa.array([id.bytes], pa.uuid())
    columns = {
        "id": ids,
        "ids": pa.StructArray.from_arrays([ids], ["id"]),
        "time": pa.array([day.time()]),
        "when": pa.array([day]),
        "took": pa.array([timedelta(seconds=90)]),
        "half": pa.array([1.5], pa.float32()).cast(pa.float16()),
        "price": pa.array([{"of": [Decimal("1.50")]}]),
    }
    row = json.loads(to_lines(pa.table(columns)))
    assert row["id"] == row["ids"]["id"] == str(id)
    assert (row["time"], row["when"], row["took"]) == ("03:04:05", str(day), "0:01:30")
    assert (row["half"], row["price"]) == (1.5, {"of": [1.5]})
    with pytest.raises(TypeError):
        to_lines(pa.table({"raw": [{"of": [b"a"]}]}))


def test_what_conditions_leave_out_is_counted(made, tmp_path):
    store, versions = made
    path, ref = tmp_path / "out.jsonl", versions.rewards.ref
    done = save(store, ref, path, "sft", where="finish_reason = stop")
    assert (done.rows, done.left_out["by --where"]) == (10, 2)
    with pytest.raises(ConfigError, match="left out: 12 by --where"):
        save(store, ref, tmp_path / "none.jsonl", "trajectories", where="tokens > 1000")


def test_prompts_that_verl_cannot_read_are_left_out(store, tmp_path):
    made = with_own(store, tmp_path, answer=pa.array(["1", None, "3"]))
    done = save(store, made.rollouts.ref, tmp_path / "verl.jsonl", "verl")
    rows = rows_of(tmp_path / "verl.jsonl")
    assert [row["extra_info"]["index"] for row in rows] == ["q0", "q2"]
    assert [row["prompt"][-1]["content"] for row in rows] == ["one?", "three?"]
    assert +done.left_out == {"without messages or a reference answer": 1}


def test_bytes_are_no_json(store, tmp_path):
    made = with_own(store, tmp_path, raw=pa.array([b"\xff"] * 3))
    with pytest.raises(ConfigError, match="column raw: holds bytes"):
        save(store, made.rollouts.ref, tmp_path / "lines.jsonl", "trajectories")


@pytest.mark.parametrize("most_bytes", [1, 2**26])
def test_json_lines_are_what_python_would_write(monkeypatch, most_bytes):
    monkeypatch.setattr(json_lines, "_MOST_BYTES", most_bytes)
    rows = [
        {"ids": [1, 2], "logprobs": [-0.5, -1e-12], "text": 'a "b"\n\u2028ü', "turns": [{"n": 1, "reward": None}], "flag": True, "own": {"a": [1, {"b": None}]}},
        {"ids": [], "logprobs": [], "text": None, "turns": [], "flag": False, "own": 7},
        {"ids": None, "logprobs": [3.0], "text": "", "turns": None, "flag": None, "own": None},
    ]  # fmt: skip
    kinds = {
        "ids": pa.list_(pa.int32()),
        "logprobs": pa.list_(pa.float32()),
        "text": pa.string(),
        "turns": pa.list_(pa.struct({"n": pa.int32(), "reward": pa.float32()})),
        "flag": pa.bool_(),
    }
    columns = {name: pa.array([row[name] for row in rows], kind) for name, kind in kinds.items()}
    table = pa.table({**columns, "own": json_array([row["own"] for row in rows])})
    for sliced, expected in ((table, rows), (table.slice(1), rows[1:])):
        read = [json.loads(line) for line in to_lines(sliced).split(b"\n") if line]
        for row, line in zip(expected, read, strict=True):
            told = {name: cell for name, cell in row.items() if cell is not None}
            told["logprobs"] = [pytest.approx(number, rel=1e-6) for number in row["logprobs"]]
            if row["turns"]:
                told["turns"] = [{"n": 1}]
            assert line == told


@pytest.mark.parametrize("kind", [pa.float16(), pa.float32(), pa.float64()])
def test_whole_floats_stay_floats(kind):
    """A reader that takes the type from the first row would read the column as integers."""
    numbers = [1.0, -0.0, 0.0, -7.0, 0.5]
    lists = pa.array(numbers, pa.float64()).cast(kind)
    table = pa.table({"all": pa.ListArray.from_arrays([0, 5], lists), "one": lists[:1], "n": [3]})
    assert to_lines(table) == b'{"all":[1.0,-0.0,0.0,-7.0,0.5],"one":1.0,"n":3}\n'
