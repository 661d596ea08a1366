"""A manifest finds its own damage: torn, flipped, doubled keys, numbers that are not JSON, another
format."""

import json

import pytest

from quiver.schemas.errors import CorruptError
from quiver.schemas.manifest import (
    FORMAT,
    FileEntry,
    Manifest,
    canonical,
    content_hash,
    digest,
    from_json,
)
from quiver.schemas.plain import flatten

SHA = "0" * 64


def manifest(**changes) -> Manifest:
    about = {
        "run": "a", "kind": "rollouts", "version": 1, "schema": "rollouts/1", "created": "now", "commit_id": "c",
        "stage": "generate", "stage_version": 1, "run_key": SHA, "config": {"seed": 1}, "inputs": [], "models": [],
        "files": [{"name": "part-00000.arrow", "bytes": 3, "sha256": SHA, "rows": 2}], "rows": 2, "content_hash": SHA,
        "environment": {}, "seconds": {}, "bytes": {}, "metrics": {}, "status": {},
    }  # fmt: skip
    return Manifest.model_validate({**about, **changes})


def resealed(data: dict) -> bytes:
    data.pop("checksum", None)
    return canonical({**data, "checksum": digest(data)})


def test_it_reads_back_and_is_canonical():
    raw = manifest().to_json()
    assert from_json(raw, "a/rollouts@1") == manifest()
    assert raw == canonical(json.loads(raw))


def test_every_flipped_bit_and_every_cut_is_found():
    raw = manifest().to_json()
    for position in range(len(raw)):
        torn = bytearray(raw)
        torn[position] ^= (1, 16, 128)[position % 3]
        for damaged in (bytes(torn), raw[:position]):
            with pytest.raises(CorruptError):
                from_json(damaged, "a/rollouts@1")


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"format":2}',
        b'{"format":2,"format":2}',
        b"[" * 200_000,
        b'{"a":NaN}',
        b'{"a":1e400}',
        b"\xff\xfe{",
    ],
)
def test_what_is_no_manifest_is_corrupt(raw):
    with pytest.raises(CorruptError):
        from_json(raw, "a/rollouts@1")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rows": 2**63}, "rows: Input should be less than"),
        ({"bytes": {"data": -1}}, "bytes.data: "),
        ({"metrics": {"x": 10**301}}, "a number has 302 digits"),
        ({"config": json.loads("[" * 300 + "]" * 300)}, "nested more than 100 levels"),
        ({"files": [{"name": "x" * 256, "bytes": 1, "sha256": SHA, "rows": 2}]}, "files.0.name"),
        ({"inputs": [{"role": "r", "ref": "a/b@1", "content_hash": SHA}]}, "inputs.0.ref"),
        (
            {"inputs": [{"role": "r", "ref": "a/policy@latest", "content_hash": SHA}]},
            "inputs.0.ref",
        ),
        ({"x": "y" * 9_000_000}, "has 9000"),
    ],
)
def test_a_right_checksum_over_wrong_contents_is_corrupt(changes, said):
    data = json.loads(manifest().to_json())
    with pytest.raises(CorruptError) as caught:
        from_json(resealed(data | changes), "a/rollouts@1")
    assert said in caught.value.message


def test_nesting_and_numbers_are_read_up_to_their_limits():
    deepest = {"x": json.loads("[" * 98 + "]" * 98), "number": 10**299}
    assert from_json(manifest(config=deepest).to_json(), "a/rollouts@1").config == deepest


@pytest.mark.parametrize("format", [FORMAT - 1, FORMAT + 1, str(FORMAT), None])
def test_another_format_says_so(format):
    data = json.loads(manifest().to_json())
    with pytest.raises(CorruptError, match=f"has format {format}, expected {FORMAT}"):
        from_json(resealed(data | {"format": format}), "a/rollouts@1")


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a//b", ".hidden", "a/../b", "a\0b", ""])
def test_file_names_stay_in_the_folder(name):
    data = json.loads(manifest().to_json())
    data["files"][0]["name"] = name
    with pytest.raises(CorruptError):
        from_json(resealed(data), "a/rollouts@1")


def test_the_content_hash_tells_of_content_only():
    entry = FileEntry(name="part-00000.arrow", bytes=3, sha256=SHA, rows=2)
    other = entry.model_copy(update={"sha256": "1" * 64})
    given = [("rollouts/1", entry), ("rollouts/1", other), ("rewards/1", entry)]
    assert len({content_hash(schema, (file,)) for schema, file in given * 2}) == 3


def test_leaves_have_paths_that_two_manifests_share():
    """Tables in a list are named by their role, or by their place; no two are taken for one."""
    assert flatten({"inputs": [{"role": "policy", "ref": "a"}], "k": []}) == {
        "inputs.policy.role": "policy",
        "inputs.policy.ref": "a",
        "k": [],
    }
    assert flatten({"functions": [{"use": "f"}, {"use": "g"}]}) == {
        "functions.0.use": "f",
        "functions.1.use": "g",
    }
    chat = [{"role": "user", "content": text} for text in ("one", "two")]
    assert flatten(chat, "chat")["chat.1.content"] == "two"
    assert flatten([1, {"a": 2}], "mixed") == {"mixed": [1, {"a": 2}]}
