"""Ints that remember the expression they came from.

`view(b, s, self.num_heads, self.head_dim)` runs on local shapes only if `num_heads` becomes local. So while a
model is recorded, its attributes and its tensors' sizes are `TrackedInt`s: ints in every respect, and each
carries an `Expr` over module attributes (`Attr`) and tensor sizes (`Dim`). Arithmetic builds larger
expressions. Where Python takes the bare value (a comparison, `math.sqrt`, `int()`), the number *escapes*: the
place is written to the numbers' `EscapeLog`, if they have one. `range(n)` and indexing read an int subclass
without asking it: those escapes cannot be seen.
"""

from __future__ import annotations

import ast
import dis
import functools
import math
import operator
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType, MethodType
from typing import Any

from .errors import PatchError
from .sites import Frame, is_internal
from .source import PARSER, definition_of


@dataclass(frozen=True)
class Const:
    """A number that is written in the code, or whose origin is unknown."""

    value: int | float


@dataclass(frozen=True)
class Attr:
    """An int attribute of a module. `module`: its path; `name`: may be dotted, as in
    `config.num_attention_heads`."""

    module: str
    name: str


@dataclass(frozen=True)
class Dim:
    """The size of dim `index` (never negative) of the tensor that `node` (an `fx.Node`) stands for."""

    node: Any
    index: int


@dataclass(frozen=True)
class Read:
    """A number that was read from a tensor's values: another run may find another. `number`: which read.
    `every`: each number that could be read there was."""

    value: int | float
    number: int
    every: bool = False


@dataclass(frozen=True)
class Bin:
    """`op(left, right)`; `op` is a key of `OPS`."""

    op: str
    left: Expr
    right: Expr


Expr = Const | Attr | Dim | Read | Bin


def ceildiv(left: float, right: float) -> int:
    """The quotient rounded up: exact for ints of any size, which `math.ceil(left / right)` is not."""
    return -int(-left // right)


OPS: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "truediv": operator.truediv,
    "pow": operator.pow,
    "ceildiv": ceildiv,
}


def evaluate(
    expr: Expr, attrs: Mapping[tuple[str, str], int], dims: Callable[[Dim], int] | None = None
) -> Any:
    """The value of `expr`.

    attrs: values by (module path, attribute name). dims: gives the size a `Dim` stands for.
    Raises KeyError for an attribute that `attrs` lacks, ValueError for a `Dim` when `dims` is None.
    """
    if isinstance(expr, (Const, Read)):
        return expr.value
    if isinstance(expr, Attr):
        return attrs[expr.module, expr.name]
    if isinstance(expr, Dim):
        if dims is None:
            raise ValueError(f"{expr} needs `dims` to be evaluated")
        return dims(expr)
    return OPS[expr.op](evaluate(expr.left, attrs, dims), evaluate(expr.right, attrs, dims))


def _leaves(expr: Expr, kind: type) -> set[Any]:
    if isinstance(expr, Bin):
        return _leaves(expr.left, kind) | _leaves(expr.right, kind)
    return {expr} if isinstance(expr, kind) else set()


def atoms(expr: Expr) -> set[Attr]:
    """The module attributes in `expr`."""
    return _leaves(expr, Attr)


def dims_of(expr: Expr) -> set[Dim]:
    """The tensor sizes in `expr`."""
    return _leaves(expr, Dim)


def reads_of(expr: Expr) -> set[Read]:
    """The numbers in `expr` that were read from tensors' values."""
    return _leaves(expr, Read)


def expr_of(value: int | float) -> Expr:
    """The expression a number carries; a plain number is a `Const`."""
    return value.expr if isinstance(value, (TrackedInt, TrackedFloat)) else Const(value)


def plain(value: Any) -> Any:
    """The exact `int` or `float` in a tracked number (no escape is logged); any other value as it is."""
    if isinstance(value, TrackedInt):
        return int.__int__(value)
    return float.__float__(value) if isinstance(value, TrackedFloat) else value


def asks_a_cache(frame: FrameType) -> bool:
    """Whether the code that runs in `frame` is calling a function under `functools.lru_cache`."""
    called = _called_at(frame.f_code, frame.f_lasti)
    if called is None:
        return False
    try:
        function = eval(called, frame.f_globals, frame.f_locals)
    except Exception:  # a name that is gone, a property that fails: then it is not what is being called
        return False
    while isinstance(function, (functools.partial, MethodType)):
        function = function.func if isinstance(function, functools.partial) else function.__func__
    return isinstance(function, _Cached)


_Cached = type(functools.lru_cache(lambda: None))


@functools.cache
def _called_at(code: CodeType, lasti: int) -> CodeType | None:
    """What gives the function that is called at an instruction, where it is a name or an attribute of one."""
    if not dis.opname[code.co_code[lasti]].startswith(("CALL", "PRECALL")):
        return None
    try:
        node = definition_of(code).node_at(code, lasti)
    except PatchError:
        return None
    function = node.func if isinstance(node, ast.Call) else None
    inner = function
    while isinstance(inner, ast.Attribute):
        inner = inner.value
    if not isinstance(inner, ast.Name) or not isinstance(function, ast.expr):
        return None
    with PARSER:
        return compile(ast.fix_missing_locations(ast.Expression(function)), code.co_filename, "eval")


@dataclass(frozen=True)
class Comparison:
    """`left op right`, asked by the model's code: a branch may hang on it. `op`: a key of `COMPARISONS`."""

    op: str
    left: Expr
    right: Expr


COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}


class EscapeLog:
    """Where the bare values of tracked numbers were read, as places in the model's own code; and what they
    were compared with."""

    def __init__(self) -> None:
        self.frames: dict[Attr | Dim, list[Frame]] = {}
        self.comparisons: dict[Comparison, Frame] = {}
        self.asked: dict[Frame, list[Comparison]] = {}  # all that was asked at a place
        self.turned: frozenset[Frame] = frozenset()  # where comparisons give the opposite
        self._seen: set[tuple[Attr | Dim, CodeType, int]] = set()

    def compared(self, comparison: Comparison, depth: int) -> bool:
        """Log a comparison made by the code `depth` calls above this one. Returns whether to give the
        opposite of what it is."""
        frame = sys._getframe(depth)
        if is_internal(frame.f_code):
            return False
        at = Frame(frame.f_code, frame.f_lasti, frame.f_lineno)
        self.comparisons.setdefault(comparison, at)
        if (
            reads_of(comparison.left)
            or dims_of(comparison.left)
            or reads_of(comparison.right)
            or dims_of(comparison.right)
        ):
            self.asked.setdefault(at, []).append(comparison)
        return at in self.turned

    def note(self, expr: Expr, depth: int) -> None:
        """Log that `expr` was read by the code `depth` calls above this one; library code is not the
        model's."""
        frame = sys._getframe(depth)
        if is_internal(frame.f_code):
            return
        found: set[Attr | Dim] = {*atoms(expr), *dims_of(expr)}
        for atom in found:
            key = (atom, frame.f_code, frame.f_lasti)
            if key not in self._seen:
                self._seen.add(key)
                self.frames.setdefault(atom, []).append(Frame(frame.f_code, frame.f_lasti, frame.f_lineno))


class TrackedInt(int):
    """An int that carries the expression it was computed by.

    value: the int. expr: its expression (left out: a `Const`). log: where its escapes are noted.
    """

    expr: Expr
    log: EscapeLog | None

    def __new__(cls, value: int, expr: Expr | None = None, log: EscapeLog | None = None) -> TrackedInt:
        self = super().__new__(cls, value)
        self.expr = Const(int.__int__(self)) if expr is None else expr
        self.log = log
        return self

    def __neg__(self) -> TrackedInt:
        return TrackedInt(-plain(self), Bin("sub", Const(0), self.expr), self.log)

    def __pos__(self) -> TrackedInt:
        return self

    def __copy__(self) -> TrackedInt:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> TrackedInt:
        return self

    def __reduce__(self) -> Any:  # what is written to disk is the number, not where it came from
        return int, (plain(self),)

    def __hash__(self) -> int:
        # A cached function would give the number of an earlier call, with that call's expression: it is
        # made to miss.
        return object.__hash__(self) if asks_a_cache(sys._getframe(1)) else hash(plain(self))


class TrackedFloat(float):
    """A float that carries the expression it was computed by; see `TrackedInt`."""

    expr: Expr
    log: EscapeLog | None

    def __new__(cls, value: float, expr: Expr | None = None, log: EscapeLog | None = None) -> TrackedFloat:
        self = super().__new__(cls, value)
        self.expr = Const(float.__float__(self)) if expr is None else expr
        self.log = log
        return self

    def __ceil__(self) -> TrackedInt:
        return TrackedInt(math.ceil(plain(self)), self._quotient("ceildiv"), self.log)

    def __floor__(self) -> TrackedInt:
        return TrackedInt(math.floor(plain(self)), self._quotient("floordiv"), self.log)

    def _quotient(self, op: str) -> Bin:
        if isinstance(self.expr, Bin) and self.expr.op == "truediv":
            return Bin(op, self.expr.left, self.expr.right)
        return Bin(op, self.expr, Const(1))

    def __neg__(self) -> TrackedFloat:
        return TrackedFloat(-plain(self), Bin("sub", Const(0), self.expr), self.log)

    def __pos__(self) -> TrackedFloat:
        return self

    def __copy__(self) -> TrackedFloat:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> TrackedFloat:
        return self

    def __reduce__(self) -> Any:
        return float, (plain(self),)

    def __hash__(self) -> int:
        return object.__hash__(self) if asks_a_cache(sys._getframe(1)) else hash(plain(self))


def _tracked(value: Any, expr: Expr, log: EscapeLog | None) -> Any:
    if isinstance(value, int):
        return TrackedInt(value, expr, log)
    return TrackedFloat(value, expr, log) if isinstance(value, float) else value  # (-2) ** 0.5 is complex


def _arithmetic(
    base: type, name: str, op: Callable[[Any, Any], Any], *, reflected: bool
) -> Callable[..., Any]:
    fallback = getattr(base, f"__{'r' if reflected else ''}{name}__")

    def method(self: Any, other: Any, *modulus: Any) -> Any:
        if modulus or not isinstance(other, (int, float)):  # tensors, complex numbers, 3-argument pow
            return fallback(plain(self), other, *modulus)
        left, right = (other, self) if reflected else (self, other)
        log = self.log if self.log is not None else getattr(other, "log", None)
        return _tracked(op(plain(left), plain(right)), Bin(name, expr_of(left), expr_of(right)), log)

    return method


def _escaping(base: type, name: str) -> Callable[..., Any]:
    read = getattr(base, name)
    op = "ne" if name == "__bool__" else name.strip("_")  # `if n:` asks whether it is 0

    def method(self: Any, *others: Any) -> Any:
        turned = False
        if op in COMPARISONS and self.log is not None:
            other = others[0] if others else 0
            if isinstance(other, (int, float)):
                turned = self.log.compared(Comparison(op, self.expr, expr_of(other)), depth=2)
        for number in (self, *others):
            if isinstance(number, (TrackedInt, TrackedFloat)) and number.log is not None:
                number.log.note(number.expr, depth=2)
        result = read(plain(self), *(plain(other) for other in others))
        return not result if turned else result

    return method


def _install() -> None:
    arithmetic = ("add", "sub", "mul", "floordiv", "mod", "truediv", "pow")
    reads = (
        "__eq__",
        "__ne__",
        "__lt__",
        "__le__",
        "__gt__",
        "__ge__",
        "__bool__",
        "__float__",
        "__int__",
        "__divmod__",
        "__round__",
        "__trunc__",
        "__abs__",
    )
    for tracked, base in ((TrackedInt, int), (TrackedFloat, float)):
        for name in arithmetic:
            setattr(tracked, f"__{name}__", _arithmetic(base, name, OPS[name], reflected=False))
            setattr(tracked, f"__r{name}__", _arithmetic(base, name, OPS[name], reflected=True))
        for name in reads:
            setattr(tracked, name, _escaping(base, name))


_install()
