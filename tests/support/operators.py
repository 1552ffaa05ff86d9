"""Small changes of code, as people make them by mistake.

| what | becomes |
|---|---|
| `a < b`, `a == b`, `a in b`, `a is b` | the neighbour (`<=`) and the opposite (`>=`) |
| `a + b`, `a * b`, `a // b`, `a \\| b` … | `a - b`, `a / b`, … |
| `a and b`, `not a`, `-a` | `a or b`, `a`, `a` |
| a condition of `if`, `while`, `x if c else y`, of a comprehension | true; false |
| a number, True, False, a word | another |
| an argument of a call | None; left out if it has a name |
| a statement, an `await`, a value that is returned | left out |
| `min`, `any`, `lstrip`, `partition` … | `max`, `all`, `rstrip`, `rpartition` … |
"""

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.paths import ROOT

_COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
}
_OPERATIONS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.BitXor: ast.BitOr,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
_PAIRS = (
    ("min", "max"),
    ("any", "all"),
    ("lstrip", "rstrip"),
    ("removeprefix", "removesuffix"),
    ("partition", "rpartition"),
    ("startswith", "endswith"),
    ("find", "rfind"),
    ("ceil", "floor"),
    ("lower", "upper"),
)
_SWAPPED = dict(_PAIRS) | {second: first for first, second in _PAIRS}
_LOGS = ("log", "_log", "logger")
_WORDING = ("remedy", "help", "description", "encoding")
"""Keywords whose values are for people, or are what Linux takes without them."""


@dataclass
class Change:
    """One change: `owner.field` (or its entry `index`) becomes `new`."""

    path: Path
    line: int
    owner: ast.AST
    field: str
    index: int | None
    new: Any

    @contextmanager
    def made(self) -> Iterator[None]:
        """The tree has the change inside this context."""
        old = self._swap(self.new)
        try:
            yield
        finally:
            self._swap(old)

    def _swap(self, new: Any) -> Any:
        if self.index is None:
            old = getattr(self.owner, self.field)
            setattr(self.owner, self.field, new)
            return old
        values = getattr(self.owner, self.field)
        old = values[self.index]
        values[self.index] = new
        return old

    def __str__(self) -> str:
        shown = self.owner
        if self.index is not None and isinstance(getattr(self.owner, self.field)[0], ast.stmt):
            shown = getattr(self.owner, self.field)[self.index]
            return f"{self._where()}: {_first(shown)}   ─►   {_first(self.new)}"
        before = _first(shown)
        with self.made():
            return f"{self._where()}: {before}   ─►   {_first(shown)}"

    def _where(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"


def _first(node: ast.AST) -> str:
    """Returns the code of a node, of a compound statement the first line."""
    text = ast.unparse(node)
    return text.partition("\n")[0] if isinstance(node, ast.stmt) else " ".join(text.split())


def changes(path: Path, tree: ast.Module) -> Iterator[Change]:
    """Yields all changes in the bodies of a file's functions, in the order of the file."""
    for node in _outermost_functions(tree):
        for owner in _without_wording(node):
            for field, index, new in _of(owner):
                line: int = getattr(new, "lineno", 0) or getattr(owner, "lineno", node.lineno)
                yield Change(path, line, owner, field, index, new)


def function_of_default(
    change: Change, tree: ast.Module
) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """Returns the function of a file of which a change makes a default different, if any."""
    for function in _outermost_functions(tree):
        if any(node is change.owner for node in ast.walk(function.args)):
            return function
    return None


def is_in_kernel(change: Change, tree: ast.Module) -> bool:
    """Returns whether a change is in a kernel of Triton, which has read its text when the module
    was imported.
    """
    for function in _outermost_functions(tree):
        decorators = [ast.unparse(each) for each in function.decorator_list]
        if "triton.jit" in decorators and any(n is change.owner for n in ast.walk(function)):
            return True
    return False


def _outermost_functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
        elif isinstance(child, ast.ClassDef | ast.If | ast.Try | ast.With):
            yield from _outermost_functions(child)


def _without_wording(node: ast.AST) -> Iterator[ast.AST]:
    """Yields a node and what is in it, without what people only read."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        if name == "args" and _is_cast(node):
            value = value[1:]
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not _is_wording(child):
                yield from _without_wording(child)


def _is_cast(node: ast.AST) -> bool:
    """Returns whether the first argument of a call is only a type."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "cast"


def _is_wording(node: ast.AST) -> bool:
    match node:
        case ast.Expr(value=ast.Constant()):
            return True  # a docstring
        case ast.Constant(value=str(text)):
            return " " in text
        case ast.JoinedStr(values=parts):
            return any(_is_wording(part) for part in parts)
        case ast.Call(func=ast.Attribute(value=ast.Name(id=name))):
            return name in _LOGS
        case ast.keyword(arg=name):
            return name in _WORDING
        case ast.AnnAssign(value=None) | ast.Import() | ast.ImportFrom() | ast.Assert():
            return True
    return False


def _of(node: ast.AST) -> Iterator[tuple[str, int | None, Any]]:
    """Yields the changes of one node, without those of the nodes inside it."""
    yield from _operators(node)
    yield from _conditions(node)
    yield from _values(node)
    yield from _statements(node)


def _operators(node: ast.AST) -> Iterator[tuple[str, int | None, Any]]:
    match node:
        case ast.Compare(ops=ops):
            for index, op in enumerate(ops):
                for other in _COMPARISONS[type(op)]:
                    yield "ops", index, other()
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in _OPERATIONS:
            yield "op", None, _OPERATIONS[type(op)]()
        case ast.BoolOp(op=op):
            yield "op", None, ast.And() if isinstance(op, ast.Or) else ast.Or()
        case ast.Attribute(attr=name) if name in _SWAPPED:
            yield "attr", None, _SWAPPED[name]
        case ast.Name(id=name) if name in _SWAPPED:
            yield "id", None, _SWAPPED[name]
    for field, value in ast.iter_fields(node):
        match value:
            case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
                yield field, None, operand
            case ast.Await(value=inner):
                yield field, None, inner


def _conditions(node: ast.AST) -> Iterator[tuple[str, int | None, Any]]:
    match node:
        case ast.If() | ast.IfExp():
            for value in (True, False):
                yield "test", None, _constant(value, node.test)
        case ast.While(test=test) if not isinstance(test, ast.Constant):
            yield "test", None, _constant(False, test)
        case ast.comprehension(ifs=ifs):
            for index, test in enumerate(ifs):
                yield "ifs", index, _constant(True, test)


def _values(node: ast.AST) -> Iterator[tuple[str, int | None, Any]]:
    match node:
        case ast.Constant(value=bool(value)):
            yield "value", None, not value
        case ast.Constant(value=int(value) | float(value)):
            yield "value", None, value + 1
        case ast.Constant(value=str(text)) if text:
            yield "value", None, f"{text}?"
        case ast.Call(args=args, keywords=keywords):
            for index, value in enumerate(args):
                is_type = index == 0 and _is_cast(node)
                is_value = not isinstance(value, ast.Starred | ast.Constant)
                if is_value and not is_type and not _is_wording(value):
                    yield "args", index, _constant(None, value)
            for index, keyword in enumerate(keywords):
                if keyword.arg and keyword.arg not in _WORDING:
                    yield "keywords", None, keywords[:index] + keywords[index + 1 :]
        case ast.Return(value=value) if value is not None and not isinstance(value, ast.Constant):
            yield "value", None, _constant(None, value)
        case ast.Slice():
            for field in ("lower", "upper"):
                if getattr(node, field) is not None:
                    yield field, None, None


def _statements(node: ast.AST) -> Iterator[tuple[str, int | None, Any]]:
    for field in ("body", "orelse", "finalbody"):
        body = getattr(node, field, None)
        for index, statement in enumerate(body if isinstance(body, list) else []):
            if _can_go(statement):
                yield field, index, ast.copy_location(ast.Pass(), statement)


def _can_go(statement: ast.stmt) -> bool:
    """Returns whether a function can still be compiled, and mostly run, without a statement."""
    match statement:
        case ast.Assign(targets=[ast.Name()]) | ast.AnnAssign(target=ast.Name()):
            return False  # the name would be unknown, which every test notices that reaches it
        case ast.Expr(value=value):
            return not isinstance(value, ast.Yield | ast.YieldFrom) and not _is_wording(value)
    return isinstance(
        statement,
        ast.Assign
        | ast.AnnAssign
        | ast.AugAssign
        | ast.Delete
        | ast.Raise
        | ast.Continue
        | ast.Break
        | ast.Nonlocal
        | ast.Global,
    )


def _constant(value: object, at: ast.AST) -> ast.expr:
    return ast.copy_location(ast.Constant(value), at)  # type: ignore[arg-type]
