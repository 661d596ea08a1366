"""Signs of plain or dense code, counted: python -m tests.measures [PATH ...]

Printed by `make lint`; what the spine must hold is asserted in tests/test_measures.py. Code is read
as text; nothing is imported or run.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("schemas", "stages", "flows", "deployments")
SPINE = (
    "flows/post_train.py",
    "flows/rounds.py",
    "flows/calls.py",
    "flows/recipe.py",
    "stages/core/run/stage.py",
    "stages/core/run/call.py",
    "stages/core/run/runner.py",
    "stages/core/store/__init__.py",
    "stages/core/store/plan.py",
    "stages/core/store/storage.py",
    "stages/core/store/versions.py",
    "stages/core/store/leases.py",
    "stages/core/store/sharing.py",
    "stages/core/store/writer.py",
    "stages/core/store/tags.py",
    "stages/model/checkpoints.py",
    "stages/model/forward/layout.py",
    "stages/prompt/stage.py",
    "stages/generate/stage.py",
    "stages/reward/stage.py",
    "stages/logprobs/stage.py",
    "stages/optimize/stage.py",
    "stages/optimize/losses.py",
    "stages/optimize/advantages.py",
    "stages/optimize/algorithms.py",
    "stages/optimize/objective.py",
    "stages/optimize/trainer.py",
    "stages/optimize/audit.py",
    "stages/evaluate/stage.py",
)
"""The files to read first: what a run does, from the recipe to the loss."""
_VAGUE = """
    found made told own each given wanted rest known held about taken said other others one kept
    what where part parts begun spent whole coming soon beside ahead result value data item obj
    tmp info res
"""
VAGUE_NAMES = set(_VAGUE.split())
"""Names that do not say what they hold."""
_CODE = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)


@dataclass
class Measures:
    """Sums over files."""

    files: int = 0
    lines: int = 0
    code_lines: int = 0
    tokens: int = 0
    comments: int = 0
    long_lines: int = 0
    bindings: int = 0
    vague: Counter = field(default_factory=Counter)
    """How often each vague name is bound."""
    assignments: int = 0
    tuple_assignments: int = 0
    one_caller: list[str] = field(default_factory=list)
    """Private functions that one place calls."""
    named_once: list[str] = field(default_factory=list)
    """Public functions that the measured files name in one place besides their definition."""
    function_lines: dict[str, int] = field(default_factory=dict)
    """Length of each function without its docstring."""

    @property
    def vague_percent(self) -> float:
        """Of all names that are bound."""
        return 100 * sum(self.vague.values()) / max(self.bindings, 1)

    @property
    def one_caller_per_1000(self) -> float:
        """Private functions with one caller in 1,000 lines of code."""
        return 1000 * len(self.one_caller) / max(self.code_lines, 1)

    @property
    def named_once_per_1000(self) -> float:
        """Public functions named once elsewhere in 1,000 lines of code."""
        return 1000 * len(self.named_once) / max(self.code_lines, 1)


def measure(paths: list[Path]) -> Measures:
    """The sums over these files."""
    measures = Measures()
    mentions_anywhere = Counter()
    for path in paths:
        mentions_anywhere.update(_mentions(path))
    for path in paths:
        _add(measures, path, mentions_anywhere)
    return measures


@cache
def _tokens(path: Path) -> list[tokenize.TokenInfo]:
    return [*tokenize.generate_tokens(io.StringIO(path.read_text()).readline)]


@cache
def _mentions(path: Path) -> Counter:
    """How often a file holds each name."""
    return Counter(token.string for token in _tokens(path) if token.type == tokenize.NAME)


def _add(measures: Measures, path: Path, mentions_anywhere: Counter) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    docstring_lines = _docstring_lines(tree)
    code_lines = set()
    mentions = _mentions(path)
    for token in _tokens(path):
        if token.type == tokenize.COMMENT:
            measures.comments += "noqa" not in token.string
        elif token.type in _CODE and token.start[0] not in docstring_lines:
            measures.tokens += 1
            code_lines.add(token.start[0])
    measures.files += bool(code_lines)
    measures.code_lines += len(code_lines)
    measures.lines += len(text.splitlines())
    measures.long_lines += sum(len(line) > 100 for line in text.splitlines())
    for node in ast.walk(tree):
        name = None
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.arg) and node.arg not in ("self", "cls"):
            name = node.arg
        elif isinstance(node, ast.Assign):
            is_tuple = isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)
            measures.assignments += 1
            measures.tuple_assignments += is_tuple
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            _add_function(measures, path, node, mentions, mentions_anywhere)
        if name is not None:
            measures.bindings += 1
            if name in VAGUE_NAMES:
                measures.vague[name] += 1


def _add_function(
    measures: Measures,
    path: Path,
    node: ast.FunctionDef | ast.AsyncFunctionDef,
    mentions: Counter,
    mentions_anywhere: Counter,
) -> None:
    name = f"{path}:{node.lineno} {node.name}"
    lines = node.end_lineno - node.lineno + 1
    measures.function_lines[name] = lines - len(_docstring_lines(node))
    is_private = node.name.startswith("_") and not node.name.startswith("__")
    if is_private and mentions[node.name] == 2:
        measures.one_caller.append(name)
    if not node.name.startswith("_") and mentions_anywhere[node.name] == 2:
        measures.named_once.append(name)


def _docstring_lines(tree: ast.AST) -> set[int]:
    lines: set[int] = set()
    for node in ast.walk(tree):
        is_constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_constant and isinstance(node.value.value, str):
            lines.update(range(node.lineno, node.end_lineno + 1))
    return lines


def report(title: str, measures: Measures) -> str:
    """A few lines for people."""
    lengths = sorted(measures.function_lines.values())
    rows = [
        (
            "files / lines / lines of code",
            f"{measures.files} / {measures.lines} / {measures.code_lines}",
        ),
        ("tokens", f"{measures.tokens:,}"),
        ("tokens a line of code", f"{measures.tokens / max(measures.code_lines, 1):.1f}"),
        ("vague names, % of bindings", f"{measures.vague_percent:.1f}"),
        (
            "tuple assignments, %",
            f"{100 * measures.tuple_assignments / max(measures.assignments, 1):.1f}",
        ),
        (
            "private functions with one caller, in 1,000 lines",
            f"{measures.one_caller_per_1000:.1f}",
        ),
        (
            "public functions named once elsewhere, in 1,000 lines",
            f"{measures.named_once_per_1000:.1f}",
        ),
        ("comments, % of lines", f"{100 * measures.comments / max(measures.lines, 1):.1f}"),
        ("lines over 100 characters", f"{measures.long_lines}"),
        ("longest function, lines", f"{lengths[-1] if lengths else 0}"),
    ]
    return "\n".join([title, *(f"  {name:54} {value:>22}" for name, value in rows)])


def product_files() -> list[Path]:
    """Every module of the product."""
    return [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]


def main(arguments: list[str]) -> None:
    """Print the measures of the paths, or of spine and product."""
    if arguments:
        paths = [Path(argument) for argument in arguments]
        files = [
            file
            for path in paths
            for file in ([path] if path.is_file() else sorted(path.rglob("*.py")))
        ]
        print(report(" ".join(arguments), measure(files)))
        return
    print(report("spine", measure([ROOT / name for name in SPINE])))
    print(report("product", measure(product_files())))


if __name__ == "__main__":
    main(sys.argv[1:])
