"""What happens to every value of a graph when one axis is sharded.

`Flow` follows one leaf axis from the parameters that carry it, in graph order:

* a value is *sharded* once a parameter, or a sharded operand, brings the axis in sharded form;
* an operand that carries the axis whole (a table, a mask, an input) is *sliced* where it first meets a
  sharded one;
* an operation that needs the axis whole gets its operands *gathered*;
* an operation that sums over the axis gives a *partial* result. It flows through linear operations, inside
  the module that made it, and is *reduced* once where it stops;
* an operation that needs only statistics over the axis (a mean, a norm) has those reduced inside.

This is the propagation of GSPMD (Xu et al., 2021) and OpenXLA Shardy, run once per axis on a static graph.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from .axes import Axis, leaves
from .captured import setitem
from .graph import GraphIndex, Operand, describe

SUMS = ("sum", "lookup")


@dataclass(frozen=True)
class Edge:
    """A conversion needed on `source` before `user` (at `path`) uses it; `user` None: on the result
    itself."""

    kind: str  # slice, gather, reduce, stat
    source: fx.Node
    user: fx.Node | None
    path: tuple[int | str, ...]
    axis: Axis
    why: str


@dataclass
class Flow:
    """The consequences of sharding `axis`."""

    axis: Axis
    sharded: set[fx.Node] = field(default_factory=set)  # values that hold the axis in sharded form
    partial: set[fx.Node] = field(default_factory=set)  # values that must still be summed over the ranks
    inside: set[fx.Node] = field(default_factory=set)  # operations that compute on sharded or partial values
    edges: list[Edge] = field(default_factory=list)
    fills: set[fx.Node] = field(default_factory=set)  # constant factories made at local size
    gathered: set[fx.Node] = field(default_factory=set)  # column outputs made whole at once
    params: set[str] = field(default_factory=set)
    once: set[str] = field(
        default_factory=set
    )  # parameters added to a partial value: kept on rank 0, zero elsewhere
    problems: list[str] = field(default_factory=list)
    alike: dict[Any, bool] = field(default_factory=dict)  # by place and operand: is it partial each time?


def carries(facts_axes: Iterable[Any], leaf: Axis) -> list[Any]:
    return [item for item in facts_axes if leaf in leaves(item.axis)]


def follow(
    index: GraphIndex,
    axis: Axis,
    fills: frozenset[fx.Node] = frozenset(),
    gathered: frozenset[fx.Node] = frozenset(),
) -> Flow:
    """Shard `axis` (a leaf) and see what it takes.

    Runs again when a sliced operand turns out to be a constant factory (`fills`: making it small beats
    slicing it), or when all that a column's output meets before it is gathered is done element by element
    (`gathered`: scaled, cast or capped logits; the layer can gather them itself).
    """
    flow = Flow(axis, fills=set(fills), gathered=set(gathered))
    for node in index.touching[axis]:
        _step(index, flow, node)
    made: set[fx.Node] = set()
    for edge in flow.edges:
        if edge.kind == "slice":
            made |= _origins(index, edge.source, axis) or set()
    columns = {_column_before(index, e.source) for e in flow.edges if e.kind == "gather"} - {None}
    if made - fills or columns - gathered:
        return follow(index, axis, fills | made, gathered | frozenset(n for n in columns if n is not None))
    for node in [n for n in index.touching[axis] if n in flow.partial]:
        _reduce_late(index, flow, node)
    for source in dict.fromkeys(e.source for e in flow.edges if e.kind == "slice"):
        _slice_early(index, flow, source)
    return flow


def _slice_early(index: GraphIndex, flow: Flow, source: fx.Node) -> None:
    """Move a slice from inside a module up to the module's input, where what lies between runs on a slice as
    well."""
    axis, call, node = flow.axis, index.enclosing[source], source
    moved: list[fx.Node] = []
    while call is not None and call.path and call.first <= index.order[node] <= call.last:
        carrying = [op for op in index.operands[node] if axis in index.carried[op.node]]
        facts = index.facts(node)
        sliced = {(e.user, e.path) for e in flow.edges if e.source is node and e.kind == "slice"}
        users_sliced = all(use in sliced or use[0] in moved for use in index.uses[node])
        plain = facts is not None and not carries(facts.forbids, axis) and not carries(facts.contracts, axis)
        if (
            node.op != "call_function"
            or len(carrying) != 1
            or not users_sliced
            or not plain
            or node.meta.get("mutates")
        ):
            return
        moved.append(node)
        node = carrying[0].node
    if not moved or call is None:
        return
    flow.edges = [e for e in flow.edges if not (e.kind == "slice" and e.source in moved)]
    flow.sharded.update(moved)
    flow.inside.update(moved)
    for path in [op.path for op in index.operands[moved[-1]] if op.node is node]:
        flow.edges.append(Edge("slice", node, moved[-1], path, axis, "it meets a sharded value"))


def _column_before(index: GraphIndex, node: fx.Node) -> fx.Node | None:
    """The leaf module whose output `node` is, up to changes element by element."""
    while node.op == "call_function" or (node.op == "call_module" and not index.module_params.get(node)):
        operands = index.operands[node]
        same_axes = len(operands) == 1 and index.axes.of[operands[0].node] == index.axes.of[node]
        if not same_axes or len(index.uses[operands[0].node]) != 1 or node.meta.get("mutates"):
            return None
        node = operands[0].node
    return node if node.op == "call_module" and index.module_params.get(node) else None


def _origins(index: GraphIndex, node: fx.Node, axis: Axis) -> set[fx.Node] | None:
    """The operations that made `axis` in this value, if the value is constant along it from all of them,
    else None."""
    facts = index.facts(node)
    carrying = [op.node for op in index.operands[node] if axis in index.carried[op.node]]
    if not carrying:
        constant = facts is not None and any(axis in leaves(a) for a in facts.fill)
        return {node} if constant else None
    if facts is None or carries(facts.forbids, axis):
        return None
    found: set[fx.Node] = set()
    for source in carrying:
        origins = _origins(index, source, axis)
        if origins is None:
            return None
        found |= origins
    return found


def _step(index: GraphIndex, flow: Flow, node: fx.Node) -> None:
    axis = flow.axis
    if node.op == "placeholder" or (node.op == "get_attr" and not index.is_parameter(str(node.target))):
        return  # inputs, buffers and constants are whole
    if node.op == "get_attr":
        flow.sharded.add(node)
        flow.params.add(str(node.target))
        return
    if node in flow.fills:
        flow.sharded.add(node)
        if index.operands[node]:
            flow.inside.add(
                node
            )  # a replicated value repeated along the axis: each rank sees its share of the copies
        return
    carrying = [op for op in index.operands[node] if axis in index.carried[op.node]]
    own = [p for p in index.module_params.get(node, {}).values() if axis in index.param_leaves.get(p, ())]
    own_params = [p for p in own if index.is_parameter(p)]
    if not own_params and not any(op.node in flow.sharded for op in carrying):
        return
    if node.op == "output":
        for op in carrying:
            if op.node in flow.sharded:
                flow.edges.append(
                    Edge("gather", op.node, node, op.path, axis, "it is an output of the model")
                )
        return
    facts = index.facts(node)
    forbids = carries(facts.forbids, axis) if facts else []
    twice = any(len(index.dims_with(n, axis)) > 1 for n in (node, *(op.node for op in carrying)))
    if facts is None or forbids or twice:
        why = (
            forbids[0].why
            if forbids
            else "the axis is in two dims at once"
            if twice
            else "operation without a rule"
        )
        if own:
            flow.problems.append(f"{describe(node)}: {why}, and its own weights carry the axis")
        for op in carrying:
            if op.node in flow.sharded:
                if op.node.op == "get_attr":
                    flow.problems.append(f"{describe(node)}: {why}, and it uses {op.node.target} whole")
                flow.edges.append(Edge("gather", op.node, node, op.path, axis, why))
        return
    flow.inside.add(node)
    flow.params.update(own_params)
    if len(own) != len(own_params) and not (own_params and index.keeps_statistics(node)):
        flow.problems.append(f"{describe(node)}: it has buffers along the axis")
    for op in carrying:
        if op.node not in flow.sharded:
            flow.edges.append(Edge("slice", op.node, node, op.path, axis, "it meets a sharded value"))
            if node.meta.get("mutates") and op.path[:1] == (0,):
                flow.problems.append(
                    f"{describe(node)}: it changes in place a tensor that would have to be sliced"
                )
    contracts = carries(facts.contracts, axis)
    for contract in contracts:
        if contract.how not in SUMS:
            flow.edges.append(Edge("stat", node, None, (), axis, contract.how))
    if any(c.how in SUMS for c in contracts):
        flow.partial.add(node)
        added = [op for op in index.operands[node] if op.path[0] in facts.addends]
        if index.is_own(node) and len(own) < len(index.module_params[node]):
            flow.problems.append(f"{describe(node)}: its other parameters would count on every rank")
        if node.op == "call_function" and added and not _add_once(index, flow, added):
            flow.problems.append(f"{describe(node)}: a whole value is added to a sum over the axis")
    if axis in index.carried[node]:
        if node in flow.partial:
            flow.problems.append(f"{describe(node)}: the axis is summed over and kept at once")
        if node in flow.gathered:
            flow.edges.append(Edge("gather", node, None, (), axis, "what follows needs all of it"))
        else:
            flow.sharded.add(node)


def _reduce_late(index: GraphIndex, flow: Flow, node: fx.Node) -> None:
    """Let a partial result flow through linear operations of its own module, then reduce it once."""
    why = "it is summed over a sharded axis"
    if node.op == "call_module" or index.looks_up(node):  # its parallel layer reduces
        flow.edges.append(Edge("reduce", node, None, (), flow.axis, why))
        return
    home = index.enclosing[node]
    while True:
        users = {u for u, _ in index.uses[node]}
        if len(users) != 1:
            break
        (user,) = users
        if index.enclosing[user] is not home or user.op != "call_function" or user in flow.partial:
            break
        if not isinstance(user.meta["val"], torch.Tensor):
            break  # several results (a split): before they part, one reduction does for all
        if not _alike_there(index, flow, node, user) or not _passes_partial(index, flow, node, user):
            break
        flow.partial.add(user)
        flow.inside.add(user)
        node = user
    flow.edges.append(Edge("reduce", node, None, (), flow.axis, why))


def _alike_there(index: GraphIndex, flow: Flow, node: fx.Node, user: fx.Node) -> bool:
    """Whether every run of `user`'s place in the code gets a partial value where this one gets `node`. A loop
    over experts may have some that compute nothing: then the sum is reduced before the two ways meet."""
    others = index.at_site(user)
    if len(others) == 1:
        return True
    (path, *_) = [op.path for op in index.operands[user] if op.node is node]
    if (user.meta["site"], path) not in flow.alike:
        given = [op.node for other in others for op in index.operands[other] if op.path == path]
        flow.alike[user.meta["site"], path] = all(_from_partial(index, flow, value) for value in given)
    return flow.alike[user.meta["site"], path]


def _from_partial(index: GraphIndex, flow: Flow, value: fx.Node) -> bool:
    """Whether `value` is made of a partial one by linear operations of the same module."""
    home, todo, seen = index.enclosing[value], [value], {value}
    while todo:
        node = todo.pop()
        if node in flow.partial:
            return True
        facts = index.facts(node)
        if index.enclosing[node] is home and facts is not None and facts.linear is not None:
            made_of = [op.node for op in index.operands[node] if op.path[0] in facts.linear[1]]
            todo += [source for source in made_of if source not in seen]
            seen.update(made_of)
    return False


def _passes_partial(index: GraphIndex, flow: Flow, node: fx.Node, user: fx.Node) -> bool:
    facts = index.facts(user)
    if facts is None or facts.linear is None or user.target is setitem:
        return False
    others = [op.node for op in index.operands[user] if op.node is not node]
    if user in flow.sharded or any(other in flow.sharded or other in flow.partial for other in others):
        return False  # each rank would multiply its summand by its own part: that is no part of the product
    how, operands = facts.linear
    mine = [op for op in index.operands[user] if op.path[0] in operands]
    partial = [op for op in mine if op.node is node]
    if len(partial) != sum(1 for op in index.operands[user] if op.node is node):
        return False
    if how == "each":
        return len(partial) == 1
    return _add_once(index, flow, [op for op in mine if op.node is not node])


def _add_once(index: GraphIndex, flow: Flow, others: list[Operand]) -> bool:
    """May these be added to a partial value? Yes if each comes from a parameter used for nothing else."""
    found: set[str] = set()
    for op in others:
        node = op.node
        while True:
            if len({u for u, _ in index.uses[node]}) != 1:
                return False
            if node.op == "get_attr":
                break
            facts, operands = index.facts(node), index.operands[node]
            floats = [o for o in operands if o.node.meta["val"].is_floating_point()]
            if (
                facts is None
                or facts.linear is None
                or len(floats) != 1
                or floats[0].path[0] not in facts.linear[1]
            ):
                return False
            node = floats[0].node
        if not index.is_parameter(str(node.target)):
            return False
        found.add(str(node.target))
    flow.once |= found
    return True
