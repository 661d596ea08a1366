"""Tiny policies whose tokenizers have another token for some id."""

import json

from quiver.stages.core.run.runner import run_stage
from tests.tiny import make_folder


def with_tokenizer(store, folder, run, *changes):
    """`run/policy@0`: the tiny policy with changes in its tokenizer's JSON."""
    path = make_folder(folder / run, seed=2) / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    for change in changes:
        change(tokenizer)
    path.write_text(json.dumps(tokenizer))
    config = {"model": str(path.parent)}
    return store.open(run_stage("policy", config, store, into=run, in_process=True))


def swap(tokenizer):
    """Two tokens have each other's id."""
    vocabulary = tokenizer["model"]["vocab"]
    a, b = (token for token, id in vocabulary.items() if id in (300, 301))
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]


def rename(tokenizer):
    """The end token has another name."""
    tokenizer["added_tokens"][2]["content"] = "<|end|>"
    tokenizer["model"]["vocab"]["<|end|>"] = tokenizer["model"]["vocab"].pop("<|im_end|>")


def make_special(tokenizer):
    """An ordinary token becomes a control token of another name."""
    vocabulary = tokenizer["model"]["vocab"]
    (token,) = (token for token, id in vocabulary.items() if id == 300)
    vocabulary["<|tool|>"] = vocabulary.pop(token)
    merges = tokenizer["model"]["merges"]
    tokenizer["model"]["merges"] = [pair for pair in merges if token not in (*pair, "".join(pair))]
    control = {**tokenizer["added_tokens"][2], "id": 300, "content": "<|tool|>"}
    tokenizer["added_tokens"].append(control)
