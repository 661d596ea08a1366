"""What the policy wrote, as text: which tokens it holds, from the first character to the last."""

import json
from functools import cache, partial

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from quiver.stages.core.run.runner import run_stage
from quiver.stages.core.store import Store, Version
from quiver.stages.generate.texts import Texts
from tests.stages.generate.making import make_prompts
from tests.stages.model.chat.test_control_tokens import fast, gemma, llama3, mistral, t5
from tests.tiny import BOS, EOS, PAD, make_folder, tokenizer

TAGS = ["<think>", "</think>", "<answer>", "</answer>"]
WRITTEN = "<think>three</think><answer>7</answer>"
run = partial(run_stage, "generate", in_process=True)


@cache
def tagged() -> PreTrainedTokenizerFast:
    """The tiny tokenizer, in which the tags are special tokens and `<tool_call>` is an added one."""
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tokenizer().backend_tokenizer.to_str()),
        pad_token="<|endoftext|>",
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        clean_up_tokenization_spaces=True,
    )
    made.add_special_tokens({"additional_special_tokens": TAGS})
    made.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    made.chat_template = tokenizer().chat_template
    return made


def ids_of(text: str, made: PreTrainedTokenizerFast | None = None) -> list[int]:
    return (made or tagged()).encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    "text",
    [
        WRITTEN,
        "<tool_call>{}",
        " seven ",
        "\n\n7 , 5 . do n't",  # transformers' clean-up would take spaces out
        "ɽé",
        "",
    ],
)
def test_text_is_whole(text):
    assert Texts(tagged(), []).decode(ids_of(text)) == text


def test_only_ends_padding_and_beginnings_are_left_out():
    (seven,) = ids_of(" seven")
    texts = Texts(tagged(), [], [seven])
    for id in (PAD, BOS, EOS, seven):
        assert texts.decode([id, *ids_of(WRITTEN), id]) == WRITTEN
        assert texts.decode([id]) == ""


def test_bytes_of_an_unfinished_character_are_one_replacement_character():
    first, second = ids_of("é")
    texts = Texts(tagged(), [])
    assert texts.decode([*ids_of("7"), first]) == "7\ufffd"
    assert texts.decode([*ids_of("7"), first, EOS]) == "7\ufffd"
    assert texts.decode([second, *ids_of("7")]) == "\ufffd7"


@pytest.mark.parametrize("make", [llama3, mistral, gemma])
def test_the_space_that_a_completion_begins_with_stays(make):
    made, _ = make()
    word = made.convert_tokens_to_ids(
        next(token for token in ("Ġseven", "▁seven", "▁s", "▁") if token in made.get_vocab())
    )
    written = Texts(made, []).decode([word, *ids_of("x", made)[-1:]])
    assert written == made.convert_ids_to_tokens(word).replace("▁", " ").replace("Ġ", " ") + "x"
    assert written.startswith(" ")


def test_the_text_of_a_decoder_beside_an_encoder_begins_with_a_word():
    made, _ = t5()
    ids = made.encode("seven plus <extra_id_0>")
    text = Texts(made, [], begins_text=True).decode(ids)
    assert text.startswith("seven plus") and text.endswith("<extra_id_0>")


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece()])
def test_a_tokenizer_that_joins_words_adds_no_space_before_the_first(decoder):
    made = Tokenizer(models.WordLevel({"a": 0, "seven": 1, "plus": 2}, unk_token="a"))
    if decoder is not None:
        made.decoder = decoder
    assert Texts(fast(made), []).decode([1, 2]) == "seven plus"


def test_ids_that_the_tokenizer_does_not_know_have_no_text():
    assert Texts(tagged(), []).decode([*ids_of("7"), 339]) == "7"


# -- one text, whoever made it


@pytest.fixture(params=[None, "</answer>"])
def end(request) -> str | None:
    """Another end that the model names."""
    return request.param


@pytest.fixture
def policy(store, tmp_path, end) -> Version:
    """A policy whose tags are special tokens."""
    folder = make_folder(tmp_path / "model", vocabulary=340)
    tagged().save_pretrained(folder)
    if end is not None:
        ids = [tagged().convert_tokens_to_ids(end), EOS]
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    ref = run_stage("policy", {"model": str(folder)}, store, into="tiny", in_process=True)
    return store.open(ref)


def scripted(store: Store, policy: Version, ids: list[int], prompts=None, **sampling) -> dict:
    """A row that the scripted engine makes of these ids."""
    config = {
        "engine": "scripted",
        "samples_per_prompt": 1,
        "options": {"script": "fixed", "completion_ids": ids},
        "sampling": {"max_tokens": 40, "ignore_eos": True, **sampling},
    }
    prompts = prompts or make_prompts(store, [[5]])
    refs = {"prompts": prompts.ref, "policy": policy.ref}
    ref = run_stage("generate", config, store, in_process=True, **refs)
    return store.open(ref).table().to_pylist()[0]


def test_special_tokens_reach_the_rewards_from_engines_and_imports(store, policy, tmp_path, end):
    ids = [*ids_of(f" {WRITTEN} "), EOS]
    row = scripted(store, policy, ids)
    assert row["completion_ids"] == ids
    assert row["completion_text"] == f" {WRITTEN} ".replace(end or "", "")
    turns = [{"length": 2, "observation_ids": ids_of("<answer>")}, {"length": len(ids) - 2}]
    for number, more in enumerate(({}, {"turns": turns})):
        line = {"prompt_ids": [5], "completion_ids": ids, "logprobs": [-1.0] * len(ids), **more}
        source = tmp_path / f"{number}.jsonl"
        source.write_text(json.dumps(line))
        given = {"source": str(source)}
        ref = run_stage("imported", given, store, policy=policy.ref, in_process=True)
        (imported,) = store.open(ref).table().to_pylist()
        of_turns = imported.get("turns", [{"text": imported["completion_text"]}])
        assert "".join(turn["text"] for turn in of_turns) == row["completion_text"]
    assert of_turns[0]["observation"] == "<answer>"


@pytest.mark.parametrize("end", [None], indirect=True)
@pytest.mark.parametrize("is_templates", [False, True])
def test_the_templates_end_of_a_turn_is_no_text_that_is_lost(store, policy, caplog, is_templates):
    """The text of any other stop id is."""
    *_, stop = ids_of("</answer>")
    ends = {"assistant_end": {"id": stop, "text": "</answer>"}} if is_templates else {}
    prompts = make_prompts(store, [[5]], **ends)
    row = scripted(store, policy, ids_of(WRITTEN)[:-1], prompts, stop_token_ids=[stop])
    assert row["completion_ids"] == ids_of(WRITTEN)
    assert row["completion_text"] == "<think>three</think><answer>7"
    messages = [message for message in caplog.messages if "stop_token_ids" in message]
    lost = f"{stop} ends a completion, so its text '</answer>' is not part"
    assert [lost in message for message in messages] == ([] if is_templates else [True])
