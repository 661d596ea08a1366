"""A base model that a function of the user's makes: once, told by its file and arguments; whatever
it does wrong is named."""

import json
import re

import pytest

from quiver.schemas.errors import ConfigError, ConflictError, SecurityError
from quiver.stages.common.config import parse
from quiver.stages.common.models.checkpoints import PolicyConfig, as_model
from quiver.stages.common.runtime.runner import run_stage
from tests.tiny import make_folder

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


def run(config, store, *, into):
    return run_stage("policy", config, store, into=into, in_process=True)


@pytest.fixture
def source(tmp_path):
    """The file with the function."""
    path = tmp_path / "base.py"
    path.write_text(MAKES.replace("{calls!r}", repr(str(tmp_path / "calls"))))
    return path


def _config(source, **arguments) -> PolicyConfig:
    return PolicyConfig(model=f"{source}:prepare", arguments=arguments)


def _calls(source) -> int:
    path = source.with_name("calls")
    return len(path.read_text()) if path.exists() else 0


def test_it_is_made_once_and_holds_what_makes_a_model(store, source, tmp_path):
    ref = run(_config(source, seed=3), store, into="a")
    assert str(ref) == "a/policy@0"
    assert run(_config(source, seed=3), store, into="a") == ref and _calls(source) == 1
    version, folder = store.open(ref), make_folder(tmp_path / "same", "t5", seed=3)
    names = {entry.name for entry in version.manifest.files}
    assert (
        names
        == {path.name for path in folder.iterdir()}
        == {path.name for path in version.files.folder.iterdir()} - {"manifest.json"}
    )
    for name in names:
        assert (version.files.folder / name).read_bytes() == (folder / name).read_bytes()
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
    files = store.open(run(_config(source), store, into="a")).files
    written = json.loads(files.path("tokenizer_config.json").read_bytes())
    assert written["chat_template"][-1] == {"name": "tool_use", "template": "{{ messages }}"}
    assert not (files.folder / "additional_chat_templates").exists()


def test_other_code_or_arguments_are_another_base(store, source):
    first = run(_config(source), store, into="a")
    with pytest.raises(ConflictError, match="the run starts from another base model"):
        run(_config(source, seed=1), store, into="a")
    source.write_text(source.read_text() + "# edited\n")
    with pytest.raises(ConflictError, match="the run starts from another base model"):
        run(_config(source), store, into="a")
    assert _calls(source) == 1 and store.numbers("a", "policy") == [0]
    same, other = (
        run(_config(source), store, into="b"),
        run(_config(source, seed=1), store, into="c"),
    )
    weights = [as_model("policy", store.open(ref)).weights for ref in (first, same, other)]
    assert weights[0] == weights[1] != weights[2]


@pytest.mark.parametrize(
    ("body", "arguments", "said"),
    [
        ("raise ValueError('no digits left')", {}, "raised ValueError: no digits left"),
        (
            "pass",
            {"sede": 1},
            "raised TypeError: prepare() got an unexpected keyword argument 'sede'",
        ),
        ("pass", {}, "config.json is missing"),
        (
            "make_folder(folder); (folder / 'tokenizer.json').unlink()",
            {},
            "the tokenizer's files are missing",
        ),
        ("make_folder(folder); (folder / 'model.safetensors').unlink()", {}, "no *.safetensors"),
        (
            "make_folder(folder); (folder / 'model.safetensors').write_bytes(b'half')",
            {},
            "model.safetensors is cut",
        ),
    ],
)
def test_what_goes_wrong_is_named_and_nothing_is_kept(store, source, body, arguments, said):
    whole = source.read_text()
    source.write_text(
        f"from tests.tiny import make_folder\ndef prepare(folder, seed=0):\n    {body}\n"
    )
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        run(_config(source, **arguments), store, into="a")
    assert f"{source}:prepare" in caught.value.object and caught.value.next
    assert list(store.versions()) == []
    source.write_text(whole)
    assert str(run(_config(source), store, into="a")) == "a/policy@0"


def test_pickled_weights_are_refused(store, source):
    source.write_text(
        "def prepare(folder):\n    (folder / 'config.json').write_text('{}')\n    (folder / "
        "'x.bin').touch()\n"
    )
    with pytest.raises(SecurityError, match="pickled"):
        run(_config(source), store, into="a")


def test_a_full_disk_is_not_the_functions_fault(store, source):
    source.write_text(
        "import errno\ndef prepare(folder):\n    raise OSError(errno.ENOSPC, 'no space')\n"
    )
    with pytest.raises(OSError, match="the disk is full") as caught:
        run(_config(source), store, into="a")
    assert caught.value.code == "E-RESOURCE"


def test_a_function_that_is_not_there(store, source, tmp_path):
    with pytest.raises(ConfigError, match=r"did you mean prepare\?"):
        run(PolicyConfig(model=f"{source}:prepar"), store, into="a")
    with pytest.raises(ConfigError, match="there is no file"):
        run(PolicyConfig(model=f"{tmp_path}/nowhere.py:prepare"), store, into="a")
    with pytest.raises(ConfigError, match=r"arguments are for a function.*model is 'some/model'"):
        parse(PolicyConfig, {"model": "some/model", "arguments": {"seed": 1}}, "policy")


def test_a_directory_may_bear_such_a_name(store, tmp_path):
    folder = make_folder(tmp_path / "run:best")
    assert (
        store.open(run(PolicyConfig(model=str(folder)), store, into="a")).manifest.metrics[
            "parameters"
        ]
        > 0
    )
