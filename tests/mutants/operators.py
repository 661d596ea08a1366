"""Bugs made in source text by fixed operators on its syntax tree.

An operator is told an expression and the parameters of the function around it, and yields the
expressions that a slip of the pen could have put there. The new expression is written into the
source in place of the old one, so that all other text and every line number stay.

    for bug in find_bugs(source): bug.name, bug.line, mutated(source, bug)

What only speaks is left alone: docstrings, log lines, error texts, annotations, the default values
of parameters, progress by the clock. So is all that stands outside of functions.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

FUNCTION_KINDS = (ast.FunctionDef, ast.AsyncFunctionDef)
LARGEST_NUMBER = 8
"""Larger whole numbers are sizes, times or budgets, where one more or less changes nothing."""
ORDER_DOES_NOT_MATTER = {"min", "max", "minimum", "maximum", "equal", "isinstance", "suppress"}
BOUNDING_FUNCTIONS = {"min", "max", "minimum", "maximum"}
REMOVABLE_METHODS = {"abs", "clamp", "cumsum", "exp", "sqrt", "square"}
UNTOUCHED_CALLS = {"ThreadPoolExecutor", "isinstance", "round"}
CLOCK_NAMES = {"time"}
MODULES = {"math", "np", "pa", "pc", "torch"}
QUIET_FUNCTIONS = {"_log_progress", "free"}
"""Functions of the product that make texts for people, or give memory back: no result changes."""
TEXT_VARIABLES = {"hint", "message", "problem"}
"""Names in the product that stand for texts for people."""
TINY = 1e-6
"""A bound below this keeps a division from failing; without it the result is the same."""


@dataclass(frozen=True)
class Bug:
    """One expression of a file, and the text that takes its place."""

    function: str
    """Qualified name of the innermost function that it stands in."""
    operator: str
    ordinal: int
    """Which of the operator's bugs in this function it is, from 0 on, in the order of the text."""
    line: int
    start: int
    """Where the old expression starts in the source, in bytes; `end` likewise."""
    end: int
    text: str

    @property
    def name(self) -> str:
        """What tells it from the file's other bugs; lines that move change nothing in it."""
        return f"{self.function}:{self.operator}:{self.ordinal}"


@lru_cache(256)
def find_bugs(source: str) -> list[Bug]:
    """All bugs that the operators can make in the functions of a file, in the order of its text."""
    collector = _Collector(source)
    collector.visit(ast.parse(source))
    return collector.bugs


def mutated(source: str, bug: Bug) -> str:
    """The file with the bug in it."""
    old = source.encode()
    return (old[: bug.start] + bug.text.encode() + old[bug.end :]).decode()


# -- operators: an expression and the annotations of the parameters -> other expressions -----------


def flip_sign(node: ast.expr, parameters: dict[str, str]) -> Iterator[ast.expr]:
    """−a, not a and ~a lose their sign; + and − change places; a comparison becomes its opposite."""
    if isinstance(node, ast.UnaryOp):
        yield node.operand
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and not _joins_text(node):
        yield ast.BinOp(node.left, ast.Sub(), node.right)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
        yield ast.BinOp(node.left, ast.Add(), node.right)
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        opposite = OPPOSITES[type(node.ops[0])]
        yield ast.Compare(node.left, [opposite()], node.comparators)


def off_by_one(node: ast.expr, parameters: dict[str, str]) -> Iterator[ast.expr]:
    """A small whole number is one more or one less; < takes in its edge, and <= loses it."""
    if _is_small_number(node):
        yield ast.Constant(node.value + 1)
        if node.value > 0:
            yield ast.Constant(node.value - 1)
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        edge = OTHER_EDGES.get(type(node.ops[0]))
        has_number = isinstance(node.left, ast.Constant) or isinstance(
            node.comparators[0], ast.Constant
        )
        if edge and not has_number:
            yield ast.Compare(node.left, [edge()], node.comparators)


def swap(node: ast.expr, parameters: dict[str, str]) -> Iterator[ast.expr]:
    """Two names that stand side by side change places: operands, arguments, parts of a tuple, the
    branches of a conditional expression whose condition has no sign to flip."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ORDERED_OPERATORS):
        yield ast.BinOp(node.right, node.op, node.left)
    if isinstance(node, ast.IfExp) and not isinstance(node.test, (ast.Compare, ast.UnaryOp)):
        yield ast.IfExp(node.test, node.orelse, node.body)
    if isinstance(node, ast.Call) and _called_name(node) not in ORDER_DOES_NOT_MATTER:
        for arguments in _with_neighbours_swapped(node.args, parameters):
            yield ast.Call(node.func, arguments, node.keywords)
    if isinstance(node, ast.Tuple):
        for parts in _with_neighbours_swapped(node.elts, parameters):
            yield ast.Tuple(parts, node.ctx)


def other_name(node: ast.expr, parameters: dict[str, str]) -> Iterator[ast.expr]:
    """A parameter is read where the next parameter with the same annotation was meant."""
    if not isinstance(node, ast.Name) or not isinstance(node.ctx, ast.Load):
        return
    annotation = parameters.get(node.id)
    alike = [name for name, other in parameters.items() if other == annotation]
    if annotation is not None and len(alike) > 1:
        following = (alike.index(node.id) + 1) % len(alike)
        yield ast.Name(alike[following], node.ctx)


def drop(node: ast.expr, parameters: dict[str, str]) -> Iterator[ast.expr]:
    """One of two terms, factors, conditions or bounds is forgotten, or a method on a number."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, DROPPABLE_OPERATORS):
        yield node.left
    if isinstance(node, ast.BinOp) and isinstance(node.op, COMMUTATIVE_OPERATORS):
        yield node.right
    if isinstance(node, ast.BoolOp):
        yield _joined(node.op, node.values[:-1])
        yield _joined(node.op, node.values[1:])
    if isinstance(node, ast.Call):
        name = _called_name(node)
        if name in BOUNDING_FUNCTIONS and len(node.args) == 2 and not _is_tiny(node.args[1]):
            yield from node.args
        is_method = isinstance(node.func, ast.Attribute) and not _is_module(node.func.value)
        if name in REMOVABLE_METHODS and is_method:
            yield node.func.value


def forget_call(node: ast.expr, parameters: dict[str, str]) -> Iterator[ast.expr]:
    """A call whose result nobody takes is forgotten. Only told calls that are statements."""
    if isinstance(node, ast.Call):
        yield ast.Constant(None)


OPERATORS: dict[str, Callable[[ast.expr, dict[str, str]], Iterator[ast.expr]]] = {
    "sign": flip_sign,
    "one": off_by_one,
    "swap": swap,
    "name": other_name,
    "drop": drop,
}
OPPOSITES = {
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OTHER_EDGES = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
ORDERED_OPERATORS = (ast.Sub, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow)
COMMUTATIVE_OPERATORS = (ast.Add, ast.Mult, ast.BitAnd, ast.BitOr)
DROPPABLE_OPERATORS = (*COMMUTATIVE_OPERATORS, ast.Sub, ast.Div)


def _joins_text(node: ast.BinOp) -> bool:
    """Whether + joins texts or lists, which have no difference."""
    kinds = (ast.List, ast.ListComp, ast.Tuple, ast.JoinedStr)
    texts = (
        isinstance(side, ast.Constant) and isinstance(side.value, str) for side in _sides(node)
    )
    return any(texts) or any(isinstance(side, kinds) for side in _sides(node))


def _sides(node: ast.BinOp) -> tuple[ast.expr, ast.expr]:
    return node.left, node.right


def _is_small_number(node: ast.expr) -> bool:
    if not isinstance(node, ast.Constant) or type(node.value) not in (int, float):
        return False
    return node.value == int(node.value) and node.value <= LARGEST_NUMBER


def _called_name(node: ast.Call) -> str | None:
    """The last part of what is called: `maximum` of `torch.maximum(a, b)`."""
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else None


def _is_module(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in MODULES


def _is_tiny(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, float) and node.value < TINY


def _with_neighbours_swapped(
    nodes: list[ast.expr], parameters: dict[str, str]
) -> Iterator[list[ast.expr]]:
    """The list once for each two neighbours that are different names, with these swapped. Not two
    parameters with different annotations: that would be an error of types."""
    for place in range(len(nodes) - 1):
        first, second = nodes[place : place + 2]
        are_names = all(isinstance(node, (ast.Name, ast.Attribute)) for node in (first, second))
        texts = ast.unparse(first), ast.unparse(second)
        annotations = {parameters[text] for text in texts if text in parameters}
        if are_names and texts[0] != texts[1] and len(annotations) < 2:
            yield [*nodes[:place], second, first, *nodes[place + 2 :]]


def _joined(operator: ast.boolop, values: list[ast.expr]) -> ast.expr:
    return values[0] if len(values) == 1 else ast.BoolOp(operator, values)


# -- walking through a file ------------------------------------------------------------------------


class _Collector(ast.NodeVisitor):
    """Collects the bugs of a file. Each `visit_` method says what is looked at in one syntax."""

    def __init__(self, source: str) -> None:
        self.bugs: list[Bug] = []
        self._line_starts = _line_starts(source)
        self._scope: list[str] = []
        self._parameters: list[dict[str, str]] = []
        self._counts: Counter[tuple[str, str]] = Counter()

    # statements

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._scope.append(node.name)
        self._visit_all(node.body)
        self._scope.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if node.name in QUIET_FUNCTIONS or _returns_an_error(node):
            return
        self._scope.append(node.name)
        self._parameters.append(_annotations(node.args))
        self._visit_all(node.body)
        self._parameters.pop()
        self._scope.pop()

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Raise(self, node: ast.Raise) -> None:
        """An error's text is for people."""

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        """In which order errors are named changes nothing."""
        self._visit_all(node.body)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant) or _speaks(node.value) or _reads_clock(node):
            return
        if self._parameters:
            self._apply("drop", forget_call, node.value)
        self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        if not _makes_text(node) and not _reads_clock(node):
            self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if not _reads_clock(node):
            self.visit(node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None and not _reads_clock(node):
            self.visit(node.value)

    def visit_If(self, node: ast.If) -> None:
        """Where it only decides on a log line, it is left alone."""
        if all(isinstance(line, ast.Expr) and _speaks(line.value) for line in node.body):
            self._visit_all(node.orelse)
            return
        if not _reads_clock(node.test):
            self.visit(node.test)
        self._visit_all(node.body)
        self._visit_all(node.orelse)

    # expressions

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Text with values in it."""

    def visit_Call(self, node: ast.Call) -> None:
        if _called_name(node) not in UNTOUCHED_CALLS:
            self._visit_expression(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if not isinstance(node.op, ast.LShift):
            self._visit_expression(node)

    def generic_visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.expr):
            self._visit_expression(node)
        else:
            super().generic_visit(node)

    def _visit_expression(self, node: ast.expr) -> None:
        if self._parameters:
            for operator, make in OPERATORS.items():
                self._apply(operator, make, node)
        super().generic_visit(node)

    def _visit_all(self, nodes: list[ast.stmt]) -> None:
        for node in nodes:
            self.visit(node)

    def _apply(
        self, operator: str, make: Callable[..., Iterator[ast.expr]], node: ast.expr
    ) -> None:
        function = ".".join(self._scope)
        for expression in make(node, self._parameters[-1]):
            ordinal = self._counts[function, operator]
            self._counts[function, operator] += 1
            start = self._line_starts[node.lineno - 1] + node.col_offset
            end = self._line_starts[node.end_lineno - 1] + node.end_col_offset
            text = _as_text(expression, node.end_lineno - node.lineno)
            self.bugs.append(Bug(function, operator, ordinal, node.lineno, start, end, text))


def _line_starts(source: str) -> list[int]:
    """Where each line starts, in bytes, as the syntax tree counts columns."""
    starts = [0]
    for line in source.encode().split(b"\n"):
        starts.append(starts[-1] + len(line) + 1)
    return starts


def _annotations(arguments: ast.arguments) -> dict[str, str]:
    """Each parameter that has an annotation, with its text."""
    parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return {each.arg: ast.unparse(each.annotation) for each in parameters if each.annotation}


def _returns_an_error(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return node.returns is not None and ast.unparse(node.returns).endswith(("Error", "Exception"))


def _speaks(node: ast.expr) -> bool:
    """Whether it is a log line, or another call that only makes text."""
    if not isinstance(node, ast.Call):
        return False
    is_log_line = isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "log"
    return is_log_line or _called_name(node) in QUIET_FUNCTIONS


def _makes_text(node: ast.Assign) -> bool:
    """Whether it puts a text with values in it together, or gives a text its name."""
    if any(isinstance(each, ast.JoinedStr) for each in ast.walk(node.value)):
        return True
    return any(ast.unparse(target) in TEXT_VARIABLES for target in node.targets)


def _reads_clock(node: ast.AST) -> bool:
    return any(isinstance(each, ast.Name) and each.id in CLOCK_NAMES for each in ast.walk(node))


def _as_text(expression: ast.expr, lines_to_fill: int) -> str:
    """In parentheses where it could fall apart otherwise, and over as many lines as the old one."""
    text = ast.unparse(expression)
    whole = (ast.Name, ast.Constant, ast.Attribute, ast.Subscript, ast.Call, ast.Tuple)
    if isinstance(expression, whole) and not lines_to_fill:
        return text
    return f"({text}{chr(10) * lines_to_fill})"
