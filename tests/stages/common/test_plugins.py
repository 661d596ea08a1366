"""Code that a recipe names: which file it comes from."""

from quiver.stages.common.plugins import load

CODE = "def where():\n    return __file__\n"


def test_copies_of_a_file_are_modules_of_their_own(tmp_path):
    """A function that opens what lies beside its file finds that folder's, not that of a copy
    loaded before."""
    found = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text(CODE)
        function, sha256 = load(f"{tmp_path / name / 'mine.py'}:where", "field")
        found.append((function(), sha256))
    assert [path for path, _ in found] == [str(tmp_path / name / "mine.py") for name in ("a", "b")]
    assert found[0][1] == found[1][1], "the content is the same, and so is the hash"


def test_an_edited_file_is_read_again(tmp_path):
    path = tmp_path / "mine.py"
    answers = []
    for number in (1, 2):
        path.write_text(f"def f():\n    return {number}\n")
        answers.append(load(f"{path}:f", "field")[0]())
    assert answers == [1, 2]
