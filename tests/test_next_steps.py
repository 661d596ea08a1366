"""What an error says to do next: one command that the command line takes, or one plain
imperative."""

import ast
import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

from quiver.flows.cli.main import app
from quiver.flows.cli.next_step import Called, complete
from tests.test_architecture import FILES, ROOT

COMMANDS = get_command(app).commands


def told() -> list[tuple[str, str]]:
    """Every `next` that an error is made with, as (place, text); what is filled in at run time is a
    reference."""

    def text(node: ast.expr) -> list[str]:
        if isinstance(node, ast.Constant):
            return [str(node.value)]
        if isinstance(node, ast.IfExp):
            return [*text(node.body), *text(node.orelse)]
        if isinstance(node, ast.JoinedStr):
            return [
                "".join(
                    p.value if isinstance(p, ast.Constant) else "a/rollouts@1" for p in node.values
                )
            ]
        return []

    def nodes(path: Path):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "next":
                yield node.value
            if isinstance(node, ast.Dict):
                yield from (
                    v
                    for k, v in zip(node.keys, node.values, strict=True)
                    if getattr(k, "value", None) == "next"
                )

    return [
        (f"{path.relative_to(ROOT)}:{node.lineno}", said)
        for path in FILES
        for node in nodes(path)
        for said in text(node)
    ]


def test_a_command_stands_alone_and_is_one_that_there_is():
    found = told()
    assert len(found) > 100
    for place, said in found:
        assert "…" not in said, f"{place} leaves something out: {said}"
        assert not re.search(r"\bREF\b", said), f"{place} names no version: {said}"
        assert said.startswith("quiver ") or not re.search(r"\bquiver [a-z-]", said), (
            f"{place} has a command inside: {said}"
        )
        if said.startswith("quiver "):
            _, name, *arguments = shlex.split(said)
            if name.startswith("--"):
                continue
            assert name in COMMANDS, f"{place}: {said}"
            COMMANDS[name].make_context(name, arguments)


OPTIONS = {"verify": {"--store"}, "reward": {"--store", "--set"}, "rewards": {"--json"}}


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("quiver verify a/b@1", "quiver verify a/b@1 --store 'my store'"),
        ("quiver verify a/b@1 --store other", "quiver verify a/b@1 --store other"),
        ("quiver reward RECIPE", "quiver reward r.toml --set 'run=my run' --store 'my store'"),
        ("quiver rewards", "quiver rewards"),
        ("correct 'the key", "correct 'the key"),
        ("set quiver aside", "set quiver aside"),
    ],
)
def test_a_command_is_completed_with_what_was_given(said, expected, monkeypatch, tmp_path):
    monkeypatch.delenv("QUIVER_STORE", raising=False)
    called = Called(store="my store", recipe=Path("r.toml"), settings=("run=my run",))
    assert complete(said, called, OPTIONS) == expected
    assert complete(said, Called(), OPTIONS) == said
    if said == "quiver verify a/b@1":
        monkeypatch.setattr("sys.argv", ["my folder/bin/quiver", "ls"])
        assert complete(said, called, {}) == "'my folder/bin/quiver' verify a/b@1", (
            "as it was called"
        )
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin/quiver").write_text("")
        (tmp_path / "bin/quiver").chmod(0o755)
        monkeypatch.setattr("sys.argv", [str(tmp_path / "bin/quiver"), "ls"])
        monkeypatch.chdir(tmp_path)
        assert complete(said, called, {}) == "bin/quiver verify a/b@1"
        monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
        assert complete(said, called, {}) == "quiver verify a/b@1"
        monkeypatch.setattr("sys.argv", ["pytest"])
        assert complete(said, Called(store="store"), OPTIONS) == said, (
            "the command finds that one by itself"
        )
        monkeypatch.setenv("QUIVER_STORE", "my store")
        assert complete(said, called, OPTIONS) == said
