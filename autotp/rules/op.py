"""What a rule sees of one operation, and the facts it states about it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, MutableMapping, Sequence, Set
from dataclasses import dataclass, field
from types import GetSetDescriptorType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import fx, nn

from ..axes import Axis, AxisConflict, cut, leaf, leaves, unify
from ..errors import AutotpError
from ..ints import TrackedFloat, TrackedInt, dims_of, reads_of
from ..nested import untracked

Dims = list[Axis]
Rule = Callable[["Op"], Any]
Rules = Mapping[Hashable, Rule]
OwnRules = Mapping[Hashable, Rule] | Sequence[Rule] | None  # as a caller gives them
Operand = int | str | tuple[int, str]  # by position, by keyword, or either way
How = Literal["sum", "mean", "max", "min", "norm", "lookup"]


class NoRule(AutotpError):
    """A rule does not cover this form of its operation."""


@dataclass(frozen=True)
class Contract:
    """The operation reduces over `axis`, so a sharded one leaves each rank with a part of the result (of
    several results, the first).

    how: `sum`, `mean`, `max`, `min` (what combines the parts), `lookup` (rows of a table: the rank that lacks
    a row adds zero), `norm` (statistics over the axis, which itself passes through). weight: the parameter it
    is reduced with."""

    axis: Axis
    how: How
    weight: str | None = None


@dataclass(frozen=True)
class Forbid:
    """The operation needs `axis` whole."""

    axis: Axis
    why: str


@dataclass
class Facts:
    """What an operation does to the axes of its operands.

    linear: None, or ("joint" | "each", operands): the result is linear in those operands together (add, cat)
    or in each alone (mul, matmul). addends: operands added to the result; where it is a partial sum, a
    replicated one enters once. Operands are argument positions or keyword names, as the call gave them.
    positional: axes made here along which values depend on the position: made whole, and sliced. fill: axes
    made here along which the value is constant: a local size is right."""

    contracts: list[Contract] = field(default_factory=list)
    forbids: list[Forbid] = field(default_factory=list)
    linear: tuple[Literal["joint", "each"], tuple[int | str, ...]] | None = None
    addends: tuple[int | str, ...] = ()
    positional: list[Axis] = field(default_factory=list)
    fill: list[Axis] = field(default_factory=list)
    unsized: list[Axis] = field(default_factory=list)


class Op:
    """One operation of a captured graph, as its rule sees it."""

    def __init__(
        self,
        node: fx.Node,
        of: Mapping[fx.Node, Any],
        module: nn.Module | None = None,
        param: Callable[[str], tuple[str, Dims] | None] = lambda name: None,
        hanging: Set[Axis] = frozenset(),
        cuts: list[tuple[Dims, Axis]] | None = None,
    ):
        self.node, self.module, self.facts = node, module, Facts()
        self.args: tuple[Any, ...] = tuple(node.meta["args"])
        self.kwargs: dict[str, Any] = dict(node.meta["kwargs"])
        self.out: Any = node.meta["val"]
        self.ignored: set[int | str] = set()
        self.dropped: Dims = []
        self._of, self._param = of, param
        self._hanging = hanging  # leaves whose size hangs on the data
        self._cuts = [] if cuts is None else cuts  # axes that were cut as the data said, and their segments

    @property
    def shape(self) -> tuple[int, ...]:
        """The result's whole shape."""
        return tuple(int(size) for size in self.out.shape)

    def key(self, operand: Operand) -> int | str | None:
        """Where the call gave `operand`: a position, a keyword, or None if it did not."""
        for key in operand if isinstance(operand, tuple) else (operand,):
            if (isinstance(key, int) and key < len(self.args)) or key in self.kwargs:
                return key
        return None

    def value(self, operand: Operand, default: Any = None) -> Any:
        """The argument itself, nodes for tensors."""
        key = self.key(operand)
        if key is None:
            return default
        return self.args[key] if isinstance(key, int) else self.kwargs[key]

    def arg(self, name: str, position: int, default: Any = None) -> Any:
        """A non-tensor argument, plain."""
        return untracked(self.value((position, name), default))

    def varargs(self, name: str, position: int) -> Any:
        """An argument that may be a sequence or spread over the rest of the positional arguments."""
        value = self.value((position, name))
        if isinstance(value, (tuple, list)) or position >= len(self.args):
            return untracked(value)
        return untracked(self.args[position:])

    def has(self, operand: Operand) -> bool:
        """Whether `operand` was given and is a tensor."""
        return self._tensor(self.value(operand)) is not None

    def tensor(self, operand: Operand) -> torch.Tensor:
        """The fake value of a tensor operand."""
        return self.value(operand).meta["val"]

    def dims(self, operand: Operand) -> Dims:
        """The axes of a tensor operand's dims; [] for a number or None."""
        value = self.value(operand)
        return self.of(value) if self._tensor(value) is not None else []

    def of(self, node: fx.Node) -> Dims:
        """The axes of any tensor of the graph."""
        return list(self._of[node])

    def each(self, operand: Operand) -> list[Dims]:
        """The axes of every tensor of an operand that is a list of tensors."""
        return [self.of(item) for item in self.value(operand)]

    def param(self, name: str) -> Dims | None:
        """The axes of a leaf module's own parameter or buffer; None where it has none."""
        found = self._param(name)
        return None if found is None else list(found[1])

    def forbid(self, axes: Axis | Sequence[Axis], why: str) -> None:
        """The operation needs these axes whole."""
        for axis in [axes] if isinstance(axes, Axis) else axes:
            if axis.size > 1:
                self.facts.forbids.append(Forbid(axis, why))

    def contract(self, axis: Axis, how: How = "sum", weight: Operand | None = None) -> None:
        """The operation reduces over `axis`; weight: the operand, or for a leaf module its parameter, it does
        that with."""
        if axis.size <= 1:
            return
        name = None
        if self.module is not None and isinstance(weight, str):
            found = self._param(weight)
            name = found[0] if found else None
        elif weight is not None:
            name = parameter_of(self.value(weight))
        self.facts.contracts.append(Contract(axis, how, name))

    def linear(self, kind: Literal["joint", "each"], *operands: Operand) -> None:
        """The result is linear in these operands, together or each alone. Numbers among them are left out."""
        keys = [self.key(operand) for operand in operands if self._has_tensor(self.value(operand))]
        self.facts.linear = (kind, tuple(key for key in keys if key is not None))

    def addend(self, operand: Operand) -> None:
        """This operand is added to the result."""
        key = self.key(operand)
        if key is not None and self.has(operand):
            self.facts.addends += (key,)

    def ignore(self, *operands: Operand) -> None:
        """The result does not depend on these operands' values or sizes."""
        self.ignored.update(key for operand in operands if (key := self.key(operand)) is not None)

    def drop(self, axes: Sequence[Axis]) -> None:
        """The result leaves these parts of an operand out, and would be the same if they were others."""
        self.dropped += axes

    def fresh(self, size: int) -> Axis:
        """An axis made here: positional unless said to be `fill`."""
        return leaf(size)

    def positional(self, axis: Axis) -> Axis:
        self.facts.positional.append(axis)
        return axis

    def fill(self, axis: Axis) -> Axis:
        self.facts.fill.append(axis)
        return axis

    def unsized(self, size: int) -> Axis:
        """An axis made here whose size hangs on the data."""
        axis = leaf(size)
        self.facts.unsized.append(axis)
        return axis

    def hangs_on_data(self, *numbers: Any) -> bool:
        """Whether one of these numbers, nested or not, was read from a tensor, or is the size of an axis that
        hangs on the data."""
        return any(self._hangs_on_data(number) for number in numbers)

    def _hangs_on_data(self, value: Any) -> bool:
        if isinstance(value, slice):
            return self.hangs_on_data(value.start, value.stop, value.step)
        if isinstance(value, (tuple, list)):
            return self.hangs_on_data(*value)
        if not isinstance(value, (TrackedInt, TrackedFloat)):
            return False
        sizes = (self._of[dim.node][dim.index] for dim in dims_of(value.expr) if self._of.get(dim.node))
        return bool(reads_of(value.expr)) or any(not self._hanging.isdisjoint(leaves(axis)) for axis in sizes)

    def broadcast(self, *operands: Dims, shape: Sequence[int] | None = None) -> Dims:
        """The axes of operands broadcast together. A dim of size 1 that is stretched says nothing of the
        others."""
        shape = self.shape if shape is None else shape
        result: list[Axis | None] = [None] * len(shape)
        for dims in operands:
            offset = len(shape) - len(dims)
            for i, axis in enumerate(dims, offset):
                if axis.size == 1 and shape[i] != 1:
                    continue
                known = result[i]
                result[i] = axis if known is None else unify(known, axis)
        return [axis if axis is not None else leaf(size) for axis, size in zip(result, shape, strict=True)]

    def cut(self, axis: Axis, sizes: Sequence[int], why: str) -> Dims:
        """`axis` cut into segments; where it has no such segments it is needed whole, and they are new."""
        if self.hangs_on_data(*self.args[1:], *self.kwargs.values()):
            self.forbid(axis, "where it is cut hangs on the data")
            segments = [self.unsized(size) for size in sizes]
            self._cuts.append((segments, axis))
            return segments
        try:
            return cut(axis, sizes)
        except AxisConflict:
            self.forbid(axis, why)
            return [leaf(size) for size in sizes]

    def uncut(self, segments: Sequence[Axis]) -> Axis | None:
        """The axis that was cut into just these segments, where the data said how."""
        found = [part.find() for part in segments]
        cuts = (axis for parts, axis in self._cuts if [part.find() for part in parts] == found)
        return next(cuts, None)

    def _tensor(self, value: Any) -> torch.Tensor | None:
        if isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.Tensor):
            return value.meta["val"]
        return None

    def _has_tensor(self, value: Any) -> bool:
        if isinstance(value, (tuple, list)):
            return any(self._has_tensor(item) for item in value)
        return self._tensor(value) is not None


_SAME_VALUES = {
    "T",
    "mT",
    "t",
    "transpose",
    "permute",
    "to",
    "type_as",
    "contiguous",
    "float",
    "half",
    "bfloat16",
}


def parameter_of(value: Any) -> str | None:
    """The name of the parameter or buffer that a value is, as it stands or with its dims in another order."""
    while isinstance(value, fx.Node) and value.op == "call_function":
        name = value.args[1] if value.target is getattr else getattr(value.target, "__name__", "")
        if name not in _SAME_VALUES:
            return None
        value = value.args[0]
    return str(value.target) if isinstance(value, fx.Node) and value.op == "get_attr" else None


def rule(*targets: Hashable, into: MutableMapping[Hashable, Rule] | None = None) -> Callable[[Rule], Rule]:
    """A rule for functions, `torch.Tensor` methods, custom operators or module classes.

    @autotp.rule(torch.ops.mine.scan)
    def scan(op):
        op.forbid(op.dims(0)[1], "it scans over it")
        return op.dims(0)
    autotp.parallelize(model, tp=8, rules=[scan])

    A module of a class that has a rule is recorded as one call, and its forward runs on the local parts of
    its parameters. into: a mapping to put the rule in, instead.
    """

    def register(function: Rule) -> Rule:
        if into is None:
            function.targets = targets  # type: ignore[attr-defined]
        else:
            into.update(dict.fromkeys(targets, function))
        return function

    return register


def rules_by_target(rules: Rules | Iterable[Rule] | None) -> dict[Hashable, Rule]:
    """Rules as a mapping, from one or from functions that `rule` was put on; a custom operator under each of
    the names it is called by. TypeError for a function without targets."""
    given: dict[Hashable, Rule] = dict(rules) if isinstance(rules, Mapping) else {}
    for function in () if rules is None or isinstance(rules, Mapping) else rules:
        targets = getattr(function, "targets", None)
        if targets is None:
            raise TypeError(f"{function!r} is no rule: put @autotp.rule(what it is for) on it")
        given.update(dict.fromkeys(targets, function))
    return {name: function for target, function in given.items() for name in _names_of(target)}


def _names_of(target: Any) -> list[Hashable]:
    target = getattr(target, "_opoverload", target)  # torch.library.custom_op
    if isinstance(target, torch._ops.OpOverload):
        return [target, target.overloadpacket]
    if isinstance(target, torch._ops.OpOverloadPacket):
        return [target, *(getattr(target, name) for name in target.overloads())]
    return [target]


def everywhere(*names: str) -> list[Hashable]:
    """All that torch calls by these names: functions, methods, in-place forms and operators."""
    found: dict[Hashable, None] = {}
    for name in names:
        for holder in (torch, torch.Tensor, F, torch._C._nn, torch.special, torch.linalg, torch.fft):
            operators = (f"__{name}__", f"__i{name}__") if holder is torch.Tensor else ()
            for spelling in (name, f"{name}_", *operators):
                target = getattr(holder, spelling, None)
                if callable(target) or isinstance(target, GetSetDescriptorType):
                    found[target] = None
    if not found:
        raise LookupError(f"torch has nothing called {names}")
    return list(found)
