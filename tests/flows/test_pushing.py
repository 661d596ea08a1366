"""`quiver push`: the card and the files, and a hub that does not answer."""

from __future__ import annotations

import copy
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml

from quiver.flows.pushing import card, deletions, prepare, push
from quiver.schemas.errors import ConfigError, RemoteError
from quiver.stages.core.store import Store
from quiver.stages.model.checkpoints import model_entry
from tests import exported


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Store, exported.Made]:
    folder = tmp_path_factory.mktemp("pushed")
    store = Store(folder / "store")
    return store, exported.make(store, folder)


def test_a_card_says_what_a_dataset_was_made_of(made):
    _, versions = made
    operations = prepare(versions.prompts)
    files = {operation.path_in_repo: operation.path_or_fileobj for operation in operations}
    text = files.pop("README.md").decode()
    assert [*files] == [entry.name for entry in versions.prompts.manifest.files]
    _, front, body = text.split("---\n", 2)
    assert yaml.safe_load(front)["configs"][0]["data_files"] == "*.arrow"
    weights = model_entry("policy", versions.policy).tokenizer
    assert f"| policy, tokenizer | tiny/policy@0 | {weights} |" in body
    settings = json.loads(re.search(r"```json\n(.*?)\n```", body, re.DOTALL)[1])
    assert settings["source"] == "asked.jsonl", "without its folder"
    assert settings["system"] == exported.SYSTEM
    assert "| prompt_ids | list<item: int32 not null> |" in body


def test_a_policy_is_a_folder_of_transformers_without_the_manifest(made):
    _, versions = made
    names = {operation.path_in_repo for operation in prepare(versions.policy)}
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= names
    assert "manifest.json" not in names


def test_files_of_an_earlier_push_that_end_alike_are_deleted(made):
    """A loader would read both; what a user added stays."""
    _, versions = made
    additions = prepare(versions.rollouts)
    name = versions.rollouts.manifest.files[0].name
    present = [".gitattributes", "LICENSE", "README.md", "plot.png", name, "part-00000-0a1b2c3d.arrow"]  # fmt: skip
    deleted = [operation.path_in_repo for operation in deletions(additions, present)]
    assert deleted == ["part-00000-0a1b2c3d.arrow"]
    weights = ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "model.safetensors"]  # fmt: skip
    deleted = [operation.path_in_repo for operation in deletions(prepare(versions.policy), weights)]
    assert deleted == weights[:2]


def test_files_that_no_push_made_stay(made):
    _, versions = made
    mine = ["vocabulary.json", "eval/results.json", "train.txt", "notes.jinja", "old/model.safetensors", "mine.safetensors", "old/a.arrow"]  # fmt: skip
    for version in (versions.policy, versions.rollouts):
        assert deletions(prepare(version), mine) == []
    assert deletions(prepare(versions.policy), ["cached.arrow"]) == []
    assert deletions(prepare(versions.rollouts), ["model.safetensors"]) == []
    adapter = "adapter/adapter_model.safetensors"
    read = [adapter, "added_tokens.json", "preprocessor_config.json"]
    deleted = [each.path_in_repo for each in deletions(prepare(versions.policy), read)]
    assert deleted == read


def test_a_card_names_no_folder(made):
    """Neither of a model outside the store, nor in a setting."""
    _, versions = made
    version = copy.copy(versions.prompts)
    manifest = version.manifest
    model = manifest.models[0]
    models = [model.model_copy(update={"ref": ref}) for ref in ("/home/me/judge", "them/judge")]
    texts = ["/no_think Answer yes/no.", "/think", 'Write "/data/x/y" here.', "and/or", "~ a/b"]
    paths = ["/home/me/a b/day", "a/b", "~/data/rows.jsonl", "/data/mine.py:rows"]
    paths += ["/Users/Jane Doe/rows.jsonl", "/my data/f.py:g"]
    settings = {
        **manifest.config,
        "system": texts[0],
        "template_arguments": {"of": paths, "texts": texts},
    }
    version.manifest = manifest.model_copy(update={"models": (*models,), "config": settings})
    text = card(version)
    assert f"| policy, tokenizer | judge | {model.tokenizer} |" in text
    assert f"| policy, tokenizer | them/judge | {model.tokenizer} |" in text
    read = json.loads(re.search(r"```json\n(.*?)\n```", text, re.DOTALL)[1])
    assert read["system"] == texts[0]
    named = ["day", "a/b", "rows.jsonl", "mine.py:rows", "rows.jsonl", "f.py:g"]
    assert read["template_arguments"] == {"of": named, "texts": texts}


@pytest.mark.parametrize("url", ["hf://me/repo", "s3://datasets/me/repo", "me/repo"])
def test_rows_go_to_a_repository_of_datasets(made, url):
    store, versions = made
    with pytest.raises(ConfigError, match="hf://datasets/NAME/REPO"):
        push(store, str(versions.rollouts.ref), url)


@pytest.fixture
def hub():
    """A hub on this host that answers each request with its `status`; 0 drops the connection."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            if self.server.status:
                self.send_response(self.server.status)
                self.send_header("Content-Length", "0")
                self.end_headers()
            self.close_connection = True

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.mark.parametrize(
    "status, said, advice",
    [
        (401, "401", "HF_TOKEN"),
        (403, "403", "HF_TOKEN"),
        (404, "404", "correct the url"),
        (500, "500", "later"),
        (0, "disconnected", "HF_ENDPOINT"),
    ],
)
def test_an_error_of_the_hub_says_what_to_do(made, hub, monkeypatch, status, said, advice):
    from huggingface_hub import constants

    store, versions = made
    hub.status = status
    endpoint = f"http://127.0.0.1:{hub.server_port}"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    with pytest.raises(RemoteError) as caught:
        push(store, str(versions.rollouts.ref), "hf://datasets/me/repo")
    assert caught.value.object == f"hub {endpoint}"
    assert said in caught.value.message
    assert advice in caught.value.next
