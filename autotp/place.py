"""The type of every value under the chosen axes, and the arrows between them.

A value is `Shard` (it holds a chosen axis in sharded form), `Partial` (to be summed over the ranks) or
`Replicate`; a replicated value's gradient is *whole* or *partial*. Partial gradients arise where a
replicated value meets sharded ones: each rank sees only its share of the uses. An `enter` arrow sums them.
It can stand anywhere between the value's making and its first use with sharded ones, so it is moved up to
where several uses share it (one collective for q, k and v, not three), past replicated operations, whose
parameters then get partial gradients and are summed once per step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import fx

from .axes import Axis
from .choose import Choice
from .graph import GraphIndex, describe, numel, walk

Use = tuple[fx.Node, tuple[int | str, ...]]


@dataclass
class Arrow:
    """A conversion of `source`; for `users` only, or (empty) where it is made."""

    kind: str  # enter, reduce, gather, slice, or the statistic (mean, max, min, norm) that is reduced
    source: fx.Node
    users: tuple[Use, ...] = ()
    axes: frozenset[Axis] = frozenset()
    why: str = ""
    enter: bool = False  # reduce and statistics: the result is only used with sharded values


@dataclass
class Placement:
    sharded: set[fx.Node] = field(default_factory=set)
    inside: set[fx.Node] = field(default_factory=set)
    params: set[str] = field(default_factory=set)  # sharded parameters
    partial_gradient: set[fx.Node] = field(default_factory=set)  # replicated values whose gradient is partial
    arrows: list[Arrow] = field(default_factory=list)
    summed_params: set[str] = field(
        default_factory=set
    )  # replicated parameters whose gradient must be summed
    once_params: set[str] = field(default_factory=set)
    problems: list[tuple[str, Axis]] = field(default_factory=list)  # the axis to give up, and why


def place(index: GraphIndex, choice: Choice) -> Placement:
    """Type every value of the graph under `choice`."""
    result = Placement()
    reduced: dict[fx.Node, Arrow] = {}
    unreduced: set[fx.Node] = set()
    converted: dict[Use, Arrow] = {}
    owner: dict[fx.Node, Axis] = {}
    for axis, flow in choice.flows.items():
        result.sharded |= flow.sharded
        result.inside |= flow.inside
        result.params |= flow.params
        result.once_params |= flow.once
        unreduced |= flow.partial
        for node in flow.inside:
            owner.setdefault(node, axis)
        for edge in flow.edges:
            if edge.user is None:
                if edge.source not in reduced:
                    how = edge.why if edge.kind == "stat" else edge.kind
                    arrow = Arrow(how, edge.source, (), frozenset((axis,)), edge.why)
                    result.arrows.append(arrow)
                    if edge.source not in flow.sharded:
                        reduced[edge.source] = arrow
            else:
                use = (edge.user, edge.path)
                if use in converted:
                    converted[use].axes |= {axis}
                else:
                    converted[use] = Arrow(edge.kind, edge.source, (use,), frozenset((axis,)), edge.why)
    result.arrows += _together(converted.values())
    _gradients(index, result, reduced, unreduced, set(converted), owner)
    return result


def _together(arrows) -> list[Arrow]:
    """One arrow for all uses of a value that need the same conversion."""
    grouped: dict[tuple, Arrow] = {}
    for a in arrows:
        key = (a.kind, a.source, a.axes)
        if key in grouped:
            grouped[key].users += a.users
        else:
            grouped[key] = a
    return list(grouped.values())


def wants_grad(node: fx.Node) -> bool:
    """Does a gradient flow through this value?"""
    # Inside an autograd.Function torch records no gradients, and a checkpointed part (reentrant) runs first
    # without and then again with them.
    unseen = node.meta.get("custom_grad") or not node.meta.get("grad_enabled", True)
    value = node.meta.get("val")
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return bool(node.meta.get("grad") or (unseen and floating))


def _gradients(index, result, reduced, unreduced, converted, owner) -> None:
    """Find where gradients become partial, where they are summed, and which parameters get partial ones."""
    inside = result.inside

    def replicated(node: fx.Node) -> bool:
        return node in reduced or not (node in result.sharded or node in unreduced)

    def grad_uses(node: fx.Node) -> list[Use]:
        return [(u, p) for u, p in index.uses[node] if u.op == "output" or wants_grad(u)]

    values = [n for n in index.nodes if replicated(n) and wants_grad(n) and n.op != "output"]
    # A part of a sharded value that no rank splits (the one key head in a fused projection): its gradient is
    # partial.
    forced = {n for n in values if n in inside and n not in reduced}
    partial = set(forced)
    for node in index.nodes:  # what is computed from such a part alone is the same
        if (
            node not in inside
            and replicated(node)
            and wants_grad(node)
            and node.op not in ("output", "get_attr")
        ):
            if any(op.node in partial and op.node not in reduced for op in index.operands[node]):
                partial.add(node)
                owner.setdefault(
                    node, next(owner[op.node] for op in index.operands[node] if op.node in partial)
                )
    for node in partial:
        if any(u.op == "output" for u, _ in grad_uses(node)):
            result.problems.append((f"{describe(node)}: a part of a sharded value is an output", owner[node]))

    entering = {
        n
        for n in values
        if n not in partial and any(_enters(u, p, inside, partial, converted) for u, p in grad_uses(n))
    }
    for node in reversed(values):
        if node in entering and node not in reduced:
            region = _upwards(index, node, entering, inside, partial, reduced, converted, grad_uses)
            if region:
                partial |= region
                entering -= region
    for node in reversed(values):
        if node in entering and node not in reduced:
            region, inputs = _to_inputs(index, node, entering, inside, partial, reduced, converted, grad_uses)
            if region:
                partial |= region
                entering = (entering - region) | inputs
    for node in values:
        if node not in reduced and (
            node.op != "call_module" or node in entering or node in inside or node in partial
        ):
            continue
        arrow = reduced.get(node)
        if arrow is not None and arrow.kind == "gather":
            continue
        if node in entering:
            if arrow is not None:
                arrow.enter = all(_enters(u, p, inside, partial, converted) for u, p in grad_uses(node))
        else:
            region = _downwards(index, node, entering, inside, reduced, converted, grad_uses)
            shared = region & entering
            if (
                region
                and sum(numel(n) for n in shared) >= numel(node)
                and (arrow is not None or len(shared) > 1)
            ):
                partial |= region
                entering -= region
                if arrow is not None:
                    arrow.enter = True
                else:
                    entering.add(node)
        if arrow is not None and arrow.enter:
            entering.discard(node)
    result.partial_gradient = partial
    for node in values:
        if node in entering and node.op != "get_attr":
            users = tuple((u, p) for u, p in grad_uses(node) if _enters(u, p, inside, partial, converted))
            every = len(users) == len(grad_uses(node))
            result.arrows.append(
                Arrow("enter", node, () if every else users, why="it is used with sharded values")
            )
    _parameters(index, result, reduced, converted, owner, grad_uses)


def _enters(user: fx.Node, path, inside, partial, converted) -> bool:
    """Does this use give a replicated operand a partial gradient?"""
    return (user in inside or user in partial) and (user, path) not in converted


def _opaque(node: fx.Node) -> bool:
    """May the backward here be other than linear in the gradient? Then a share of one won't do."""
    return bool(node.meta.get("custom_grad") or node.meta.get("gradient_hook") or node.meta.get("by_expert"))


def _upwards(index, node, entering, inside, partial, reduced, converted, grad_uses) -> set[fx.Node]:
    """The replicated operations between `node` and values that enter anyway: there its `enter` costs nothing
    more.

    Empty where some path up ends elsewhere, or where a value on the way is also used outside of sharded
    regions.
    """
    region: set[fx.Node] = set()
    todo = [node]
    while todo:
        value = todo.pop()
        if value in region:
            continue
        if (
            value.op in ("placeholder", "get_attr")
            or _opaque(value)
            or value in reduced
            or value in inside
            or len(region) > 2000
        ):
            return set()
        region.add(value)
        for op in index.operands[value]:
            if wants_grad(op.node) and op.node.op != "get_attr" and op.node not in partial:
                if op.node not in entering or op.node is node:
                    todo.append(op.node)
    for value in region:
        if not all(u in region or _enters(u, p, inside, partial, converted) for u, p in grad_uses(value)):
            return set()
    return region


def _to_inputs(
    index, node, entering, inside, partial, reduced, converted, grad_uses
) -> tuple[set[fx.Node], set[fx.Node]]:
    """What lies between a value made inside a module and the module's inputs, if it costs no more to enter
    there.

    A module's boundary is the better place: how the module computes inside may differ from one call to the
    next.
    """
    call = index.enclosing[node]
    if node.op == "call_module" or call is None or not call.path:
        return set(), set()
    if any(v is node for _, v in walk(call.output)):
        return set(), set()  # it stands at a boundary already
    body = set(index.nodes[call.first : call.last + 1])
    given = {v for _, v in walk((call.args, call.kwargs)) if isinstance(v, fx.Node)}
    region: set[fx.Node] = set()
    inputs: set[fx.Node] = set()
    todo = [node]
    while todo:
        value = todo.pop()
        if value in region or value in inputs or value.op == "get_attr" or not wants_grad(value):
            continue
        if value not in body:
            if value not in given:
                return set(), set()
            inputs.add(value)
            continue
        if value in reduced or value in inside or value.op == "placeholder" or _opaque(value):
            return set(), set()
        region.add(value)
        todo += [op.node for op in index.operands[value]]
    for value in (*region, *inputs):
        uses = [(u, p) for u, p in grad_uses(value) if u in body or value in region]
        if not all(u in region or _enters(u, p, inside, partial, converted) for u, p in uses):
            return set(), set()
    spared = sum(numel(v) for v in region & entering)
    if sum(numel(v) for v in inputs if v not in entering) > spared:
        return set(), set()
    return region, inputs - partial


def _downwards(index, node, entering, inside, reduced, converted, grad_uses) -> set[fx.Node]:
    """What is computed from a reduced value alone, if all of it ends in values that enter: the reduction can
    do it."""
    region: set[fx.Node] = set()
    todo = [u for u, _ in grad_uses(node)]
    while todo:
        value = todo.pop()
        if value in region or value in inside:
            continue
        if value.op not in ("call_function", "call_module") or value in reduced or len(region) > 2000:
            return set()
        if _opaque(value):
            return set()
        region.add(value)
        todo += [u for u, _ in grad_uses(value)]
    for value in region:
        others = [op.node for op in index.operands[value] if op.node is not node and op.node not in region]
        if any(wants_grad(other) and other.op != "get_attr" for other in others):
            return set()
    for value in (node, *region):
        if not all(u in region or _enters(u, p, inside, region, converted) for u, p in grad_uses(value)):
            return set()
    return region


def _parameters(index, result, reduced, converted, owner, grad_uses) -> None:
    """Which replicated parameters are used with partial gradients. One that is used both ways can't be
    summed."""
    inside, partial = result.inside, result.partial_gradient
    whole_uses: set[str] = set()
    partial_uses: set[str] = set()
    for node in index.nodes:
        runs_partial = node in inside or (node in partial and node not in reduced)
        for own, name in index.module_params.get(node, {}).items():
            if index.is_parameter(name) and name not in result.params and wants_grad(node):
                late_bias = node in reduced and own in ("bias", "out_proj.bias")  # added after the reduction
                (partial_uses if runs_partial and not late_bias else whole_uses).add(name)
        if node.op == "get_attr" and wants_grad(node) and str(node.target) not in result.params:
            for user, path in grad_uses(node):
                uses = partial_uses if _enters(user, path, inside, partial, converted) else whole_uses
                uses.add(str(node.target))
    partial_uses -= result.once_params
    for name in sorted(partial_uses & whole_uses):
        users = [n for n in index.nodes if n in owner and name in index.module_params.get(n, {}).values()]
        axis = owner[users[0]] if users else next(iter(owner.values()))
        result.problems.append((f"{name} is used both inside and outside of sharded regions", axis))
    result.summed_params = partial_uses - whole_uses


__all__ = ["Arrow", "Placement", "place"]
