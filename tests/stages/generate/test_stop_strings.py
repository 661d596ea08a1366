"""Stop strings: which id completes one, what is saved of the row, and that the row counts as
finished."""

from functools import partial

import pytest

from quiver.stages.core.run.runner import run_stage
from quiver.stages.generate.options import Sampling
from quiver.stages.generate.stopping import StopStrings
from tests.stages.generate.making import make_prompts, random_prompts
from tests.tiny import EOS, make_policy, tokenizer

run = partial(run_stage, "generate", in_process=True)


def ids_of(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False)


def stopped_at(ids: list[int], *strings: str, min_tokens: int = 0, prompt: str = ""):
    """How many ids there are when one of the strings is complete, and which; None for never."""
    sampling = Sampling(stop=strings, min_tokens=min_tokens)
    stops = StopStrings(tokenizer(), sampling, ids_of(prompt))
    for length, token in enumerate(ids, 1):
        string = stops.add(token)
        if string is not None:
            return length, string
    return None


def test_the_id_that_completes_a_string_is_the_last():
    ids = ids_of("The answer is 12. The answer is 13.")
    for string in ("answer", "s 12.", "r is", "13"):
        length, found = stopped_at(ids, string)
        assert found == string
        assert string in tokenizer().decode(ids[:length])
        assert string not in tokenizer().decode(ids[: length - 1])
    assert stopped_at(ids, "twelve", "answer was") is None


def test_of_several_strings_the_one_that_ends_first():
    (token,) = ids_of(" seven")  # one id, which completes all of them
    assert stopped_at([token], "even", "sev", "seven") == (1, "sev")


def test_a_character_of_several_ids_is_complete_with_its_last():
    ids = ids_of("7 ɽé")
    assert len(ids_of("ɽ")) == len(ids_of("é")) == 2
    assert stopped_at(ids, "é", "ɽ") == (len(ids) - 2, "ɽ")


def test_only_what_is_sampled_counts():
    assert stopped_at(ids_of("swer is 12"), "answer", prompt="an") is None


def test_special_tokens_have_the_text_that_names_them():
    ids = [*ids_of("7"), EOS, *ids_of("8")]
    assert stopped_at(ids, "<|im_end|>") == (2, "<|im_end|>")
    assert stopped_at(ids, "7<|im_end|>8") == (3, "7<|im_end|>8")
    assert stopped_at(ids, "78") is None


def test_a_string_that_ends_within_min_tokens_does_not_count():
    ids = ids_of("1 2 1 2 1")
    assert len(ids) == 5
    assert stopped_at(ids, "2") == (2, "2")
    assert stopped_at(ids, "2", min_tokens=2) == (4, "2")
    assert stopped_at(ids, "2 1", min_tokens=2) == (3, "2 1")  # it may begin within


def test_what_is_saved_of_a_stopped_row(store, policy):
    """Also if the last id that max_tokens allows completes the string."""
    ids = ids_of("The answer is 12. user")
    length, _ = stopped_at(ids, "is 12")
    prompts = make_prompts(store, [[5]])
    for max_tokens in (30, length):
        config = {
            "engine": "scripted",
            "samples_per_prompt": 2,
            "sampling": {"max_tokens": max_tokens, "stop": ["is 12"]},
            "options": {"script": "fixed", "completion_ids": ids},
        }
        version = store.open(run(config, store, prompts=prompts.ref, policy=policy.ref))
        row = version.table().to_pylist()[0]
        assert row["completion_ids"] == ids[:length]
        assert len(row["old_logprobs"]) == length
        assert row["completion_text"] == tokenizer().decode(ids[:length])
        assert (row["finish_reason"], row["stop_reason"]) == ("stop", "is 12")
        assert version.manifest.status == {"stop": 2}


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_a_stopped_row_is_the_beginning_of_the_whole_one(store, kind):
    """Rows that end leave the batch; the others are not touched by it."""
    policy = make_policy(store, kind, kind)
    prompts = random_prompts(store, 6, run=kind)
    rows = {}
    strings = ["a", "3", "U"]
    for stop in ([], strings):
        config = {
            "engine": "transformers",
            "dtype": "float32",
            "samples_per_prompt": 3,
            "options": {"batch_size": 18},
            "sampling": {"max_tokens": 24, "stop": stop},
        }
        ref = run(config, store, prompts=prompts.ref, policy=policy.ref)
        rows[bool(stop)] = store.open(ref).table().to_pylist()
    reasons = [row["stop_reason"] for row in rows[True]]
    assert {*reasons} & {*strings} and None in reasons
    for whole, row in zip(rows[False], rows[True], strict=True):
        length = len(row["completion_ids"])
        assert row["completion_ids"] == whole["completion_ids"][:length]
        assert row["old_logprobs"] == pytest.approx(whole["old_logprobs"][:length], abs=1e-5)
        prompt = [] if kind == "t5" else row["prompt_ids"]
        stops = StopStrings(tokenizer(), Sampling(stop=strings), prompt)
        ends = [n for n, token in enumerate(whole["completion_ids"], 1) if stops.add(token)]
        if row["stop_reason"] in strings:
            assert (row["finish_reason"], length) == ("stop", ends[0])
        else:
            assert (length, ends) == (len(whole["completion_ids"]), [])
