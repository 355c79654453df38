"""Runs the rules over a captured graph: the axes of every dim of every value, and what each operation does to
them.

Nets are under every rule. An axis of an operand that is neither in the result nor reduced is needed whole,
whatever the rule forgot to say. An axis made by an operation and not constant along it is positional. A leaf
that would index one element twice (rows and columns of a score matrix over one sequence) cannot be sharded
there: each rank would hold a diagonal block. Nor can a leaf that is only part of a concatenation that is
summed: the rest would be summed on every rank.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from .axes import Axis, AxisConflict, covering, leaf, leaves, occurrences
from .captured import CapturedGraph
from .ints import TrackedFloat, TrackedInt, reads_of
from .known import PICKS
from .rules import (
    RULES,
    SEES_NUMBERS,
    Contract,
    Dims,
    Facts,
    Forbid,
    NoRule,
    Op,
    Rule,
    Rules,
    rules_by_target,
)
from .rules.modules import transposed_linear
from .skeleton import leaf_class, linear_kind

__all__ = ["Axes", "Contract", "Facts", "Forbid", "propagate"]


@dataclass
class Axes:
    """of: per node a list with an axis per dim (a list of lists where the result is a tuple; [] for what is
    no tensor). params: the same by the name of each parameter and buffer; tied ones share a list. facts: per
    node. unknown: the operations without a rule, or whose rule failed, with the reason: every axis they touch
    is forbidden there. rules: the caller's own. unsized: axes whose size hangs on the data: never sharded.
    cuts: the segments, and the axis that the data cut into them."""

    of: dict[fx.Node, Any] = field(default_factory=dict)
    params: dict[str, Dims] = field(default_factory=dict)
    facts: dict[fx.Node, Facts] = field(default_factory=dict)
    unknown: list[tuple[fx.Node, str]] = field(default_factory=list)
    rules: Rules = field(default_factory=dict)
    unsized: list[Axis] = field(default_factory=list)
    cuts: list[tuple[Dims, Axis]] = field(default_factory=list)

    def hanging(self) -> set[Axis]:
        """The leaves whose size hangs on the data."""
        return {below for axis in self.unsized for below in leaves(axis)}


def propagate(captured: CapturedGraph, rules: Rules | Iterable[Rule] | None = None) -> Axes:
    """The axes of all values of `captured`.

    rules: more rules (see `autotp.rule`), which come before the built-in ones."""
    own = rules_by_target(rules)
    table: Rules = {**RULES, **own}
    axes = Axes(rules=own)
    ops: list[Op] = []
    first_names = _params(captured.skeleton, axes)
    for node in captured.graph.nodes:
        if node.op == "output":
            continue
        if node.op == "placeholder" or (node.op == "get_attr" and node.target not in axes.params):
            axes.of[node] = _fresh(node.meta["val"])
            axes.facts[node] = Facts()
        elif node.op == "get_attr":
            axes.of[node] = axes.params[str(node.target)]
            axes.facts[node] = Facts()
        elif "reads" in node.meta:
            axes.of[node] = []
            operands = [axis for used in node.all_input_nodes for axis in axes.of[used]]
            axes.facts[node] = Facts(forbids=[Forbid(axis, "the code reads its values") for axis in operands])
        elif not _has_tensor(node.meta.get("val")):
            axes.of[node] = []  # numbers computed from shapes
            axes.facts[node] = Facts()
        elif node.target is operator.getitem:
            source, index = node.meta["args"]
            axes.of[node] = axes.of[source][index]
            axes.facts[node] = Facts(linear=("each", (0,)))
        else:
            ops.append(_apply(node, captured.skeleton, table, axes, first_names))
    for op in ops:
        _forbid_misuse(op, axes.of[op.node])
    return axes


def find_rule(node: fx.Node, module: nn.Module | None, rules: Rules) -> Rule | None:
    """The rule for the operation of `node`."""
    target: Any = node.target
    if module is not None:
        if linear_kind(module) == "transposed":
            return transposed_linear
        cls = leaf_class(module)
        classes = type(module).__mro__ if cls is None else (*type(module).__mro__[:1], cls)
        return next((rules[c] for c in classes if c in rules), None)
    if target is getattr:
        target = getattr(torch.Tensor, node.args[1], None)
    return rules.get(target) if isinstance(target, Hashable) else None


def _apply(
    node: fx.Node, skeleton: nn.Module, rules: Rules, axes: Axes, first_names: Mapping[str, str]
) -> Op:
    module = skeleton.get_submodule(str(node.target)) if node.op == "call_module" else None

    def param(name: str) -> tuple[str, Dims] | None:
        full = first_names.get(f"{node.target}.{name}" if node.target else name)
        return None if full is None else (full, axes.params[full])

    op = Op(node, axes.of, module, param, axes.hanging() if axes.unsized else frozenset(), axes.cuts)
    rule = find_rule(node, module, rules)
    name = getattr(node.target, "__name__", str(node.target))
    try:
        if rule is None:
            raise NoRule(f"no rule for {name if module is None else type(module).__name__}")
        if _reads(op) and node.target not in SEES_NUMBERS:
            raise NoRule("one of its numbers is read from a tensor's values")
        dims = rule(op)
        _check_sizes(dims, op.out)
    except (AxisConflict, NoRule, IndexError, KeyError, TypeError, ValueError) as error:
        # A rule that meets arguments it does not know is as good as none: the operation is reported, and
        # nothing it touches is sharded there.
        why = (
            str(error)
            if isinstance(error, (AxisConflict, NoRule))
            else f"{type(error).__name__} in its rule: {error}"
        )
        axes.unknown.append((node, why))
        op.facts, op.ignored, op.dropped = Facts(), set(), []
        for _, operand in _operands(op):
            op.forbid(operand, why)
        dims = _fresh(op.out)
        if _reads(op) or PICKS in node.meta:
            op.facts.unsized += _flat(dims)
    axes.unsized += op.facts.unsized
    _mark_positional(op, dims)
    axes.of[node], axes.facts[node] = dims, op.facts
    return op


def _reads(op: Op) -> bool:
    """Whether a number among the arguments was read from a tensor's values."""

    def read(value: Any) -> bool:
        if isinstance(value, slice):
            return read((value.start, value.stop, value.step))
        if isinstance(value, (tuple, list)):
            return any(map(read, value))
        return isinstance(value, (TrackedInt, TrackedFloat)) and bool(reads_of(value.expr))

    return read([*op.args, *op.kwargs.values()])


def _mark_positional(op: Op, dims: Any) -> None:
    """Axes the operation made. To be asked at once: later they may turn out to be ones that were there
    before."""
    seen = {below for _, d in _operands(op) for axis in d for below in leaves(axis)}
    stated = {below for axis in (*op.facts.fill, *op.facts.positional) for below in leaves(axis)}
    for below in {below for axis in _flat(dims) for below in leaves(axis)} - seen - stated:
        op.positional(below)


def _forbid_misuse(op: Op, dims: Any) -> None:
    """The facts that follow from the axes alone. To be asked last: what turns out to be one axis is one
    everywhere."""
    operands = list(_operands(op))
    made = {below for axis in _flat(dims) for below in leaves(axis)}
    read = {below for key, d in operands if key not in op.ignored for axis in d for below in leaves(axis)}
    told = [*op.dropped, *(c.axis for c in op.facts.contracts), *(f.axis for f in op.facts.forbids)]
    for below in read - made - {below for axis in told for below in leaves(axis)}:
        op.forbid(below, "the operation uses it up")
    for contract in op.facts.contracts:
        if contract.how in ("max", "min"):
            continue  # what every rank has may be compared twice
        for below in set(leaves(contract.axis)) - covering(contract.axis):
            op.forbid(below, "it is only a part of what is reduced: the rest would count on every rank")
        if contract.how != "norm":
            result = next(_tensors(dims))  # of several results, the first is the reduced one
            for below in set(leaves(contract.axis)) & {below for axis in result for below in leaves(axis)}:
                op.forbid(below, "it is reduced and kept at once")
    for tensor in (*(d for _, d in operands), *_tensors(dims)):
        count: Counter[Axis] = Counter()
        for axis in tensor:
            count += occurrences(axis)
        for below, times in count.items():
            if times > 1:
                op.forbid(below, "it indexes two dims of one tensor")


def _operands(op: Op) -> Iterator[tuple[int | str, Dims]]:
    """The tensors an operation reads, those of a leaf module's own by their names."""
    given: list[tuple[int | str, Any]] = [*enumerate(op.args), *op.kwargs.items()]
    for key, value in given:
        for node in _nodes(value):
            if isinstance(node.meta.get("val"), torch.Tensor):
                yield key, op.of(node)
    if op.module is not None:
        for name, _ in (*op.module.named_parameters(), *op.module.named_buffers()):
            dims = op.param(name)
            if dims is not None:
                yield f"module.{name}", dims


def _nodes(value: Any) -> Iterator[fx.Node]:
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, slice):
        yield from _nodes((value.start, value.stop, value.step))
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _nodes(item)
    elif isinstance(value, dict):
        yield from _nodes(tuple(value.values()))


def _params(skeleton: nn.Module, axes: Axes) -> dict[str, str]:
    """Axes for every parameter and buffer; returns their names, each to the first name of the same tensor."""
    first: dict[int, str] = {}
    names: dict[str, str] = {}
    for name, tensor in (
        *skeleton.named_parameters(remove_duplicate=False),
        *skeleton.named_buffers(remove_duplicate=False),
    ):
        names[name] = first.setdefault(id(tensor), name)
        if names[name] == name:
            axes.params[name] = _fresh(tensor)
        else:
            axes.params[name] = axes.params[names[name]]
    return names


def _fresh(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return [leaf(size) for size in value.shape]
    return [_fresh(item) for item in value] if isinstance(value, (tuple, list)) else []


def _check_sizes(dims: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        sizes = [axis.size for axis in dims]
        if sizes != list(value.shape):
            raise AxisConflict(f"the rule gives sizes {sizes} to a result of {list(value.shape)}")
    elif isinstance(value, (tuple, list)):
        for d, item in zip(dims, value, strict=True):
            _check_sizes(d, item)


def _tensors(dims: Any) -> Iterator[Dims]:
    if dims and isinstance(dims[0], list):
        for item in dims:
            yield from _tensors(item)
    else:
        yield dims


def _flat(dims: Any) -> Iterator[Axis]:
    for tensor in _tensors(dims):
        yield from tensor


def _has_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (
        isinstance(value, (tuple, list)) and any(_has_tensor(item) for item in value)
    )
