"""What happens to every value of a graph when one axis is sharded.

`Flow` follows one leaf axis from the parameters that carry it, in graph order:

* a value is *sharded* once a parameter, or a sharded operand, brings the axis in sharded form;
* an operand that carries the axis whole (a table, a mask, an input) is *sliced* where it first meets a sharded one;
* an operation that needs the axis whole gets its operands *gathered*;
* an operation that sums over the axis gives a *partial* result. It flows through linear operations, inside the module
  that made it, and is *reduced* once where it stops;
* an operation that needs only statistics over the axis (a mean, a norm) has those reduced inside.

This is the propagation of GSPMD (Xu et al., 2021) and OpenXLA Shardy, run once per axis on a static graph.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from .axes import Axis, leaves
from .capture import CapturedGraph, ModuleCall
from .ints import plain
from .propagate import Axes, Facts

SUMS = ("sum", "lookup")


@dataclass(frozen=True)
class Operand:
    """One tensor operand of a node: where it stands among the arguments, and the node that makes it."""

    path: tuple[int | str, ...]
    node: fx.Node


@dataclass(frozen=True)
class Edge:
    """A conversion needed on `source` before `user` (at `path`) uses it; `user` None: on the result itself."""

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
    once: set[str] = field(default_factory=set)  # parameters added to a partial value: kept on rank 0, zero elsewhere
    problems: list[str] = field(default_factory=list)

    @property
    def price(self) -> int:
        """Elements sent per forward at the captured shapes; a gather or a reduce of a parameter counts fully."""
        return sum(_numel(e.source) for e in self.edges if e.kind in ("gather", "reduce", "stat"))


def _numel(node: fx.Node) -> int:
    return sum(t.numel() for t in tensors_of(node.meta.get("val")))


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_of(item)


def walk(tree: Any, path: tuple[int | str, ...] = ()) -> Iterator[tuple[tuple[int | str, ...], Any]]:
    """Every leaf of nested tuples, lists, dicts and slices, with its path."""
    if isinstance(tree, (tuple, list)):
        for i, item in enumerate(tree):
            yield from walk(item, (*path, i))
    elif isinstance(tree, dict):
        for key, item in tree.items():
            yield from walk(item, (*path, key))
    elif isinstance(tree, slice):
        for key, item in (("start", tree.start), ("stop", tree.stop), ("step", tree.step)):
            yield from walk(item, (*path, key))
    else:
        yield path, tree


class GraphIndex:
    """A captured graph with its axes, indexed the ways the planner asks: made once, read by every flow."""

    def __init__(self, captured: CapturedGraph, axes: Axes):
        self.captured, self.axes = captured, axes
        self.nodes = list(captured.graph.nodes)
        self.order = {n: i for i, n in enumerate(self.nodes)}
        self.operands: dict[fx.Node, list[Operand]] = {}
        self.uses: dict[fx.Node, list[tuple[fx.Node, tuple[int | str, ...]]]] = defaultdict(list)
        self.carried: dict[fx.Node, frozenset[Axis]] = {}  # leaves in a value's dims
        self.touching: dict[Axis, list[fx.Node]] = defaultdict(list)  # nodes a leaf passes through, in order
        self.holders: dict[Axis, set[str]] = defaultdict(set)  # parameters that carry a leaf
        self.param_leaves: dict[str, frozenset[Axis]] = {}
        self.module_params: dict[fx.Node, dict[str, str]] = {}  # leaf call -> {own name: graph-wide parameter name}
        self._tensors()
        self._axes()
        self.enclosing = self._enclosing()
        self.used_params = {str(n.target) for n in self.nodes if n.op == "get_attr"}
        self.used_params |= {name for names in self.module_params.values() for name in names.values()}
        lookups = {c.weight for f in axes.facts.values() for c in f.contracts if c.how == "lookup"}
        matrices = [p.numel() for n, p in captured.skeleton.named_parameters() if p.ndim > 1 and n not in lookups]
        self.largest_weight = max(matrices, default=0)

    def _tensors(self) -> None:
        for node in self.nodes:
            args = (*node.meta.get("args", node.args),) if node.op != "output" else node.args
            tree = {**dict(enumerate(args)), **(node.meta.get("kwargs", node.kwargs) or {})}
            found = [Operand(p, v) for p, v in walk(tree) if isinstance(v, fx.Node) and has_tensor(v)]
            computes = has_tensor(node) or node.op == "output"  # a read of a shape uses no values
            self.operands[node] = found if computes else []
            for op in self.operands[node]:
                self.uses[op.node].append((node, op.path))

    def _axes(self) -> None:
        first_name = canonical_names(self.captured.skeleton)
        for name, dims in self.axes.params.items():
            self.param_leaves[name] = frozenset(leaf for d in dims for leaf in leaves(d))
            if self.is_parameter(name):
                for leaf in (leaf for d in dims for leaf in leaves(d)):  # in order: ties are broken alike on all ranks
                    self.holders[leaf].add(name)
        for node in self.nodes:
            own = frozenset(leaf for d in flat_axes(self.axes.of.get(node)) for leaf in leaves(d))
            self.carried[node] = own
            touched = set(own)
            for op in self.operands[node]:
                touched |= self.carried.get(op.node, frozenset())
            if node.op == "call_module":
                module = self.captured.skeleton.get_submodule(str(node.target))
                self.module_params[node] = {
                    own_name: first_name.get(id(p), f"{node.target}.{own_name}")
                    for own_name, p in [*module.named_parameters(), *module.named_buffers()]
                }
                for name in self.module_params[node].values():
                    touched |= self.param_leaves.get(name, frozenset())
            for leaf in touched:
                self.touching[leaf].append(node)

    def is_parameter(self, name: str) -> bool:
        try:
            self.captured.skeleton.get_parameter(name)
            return True
        except AttributeError:
            return False

    def _enclosing(self) -> dict[fx.Node, ModuleCall | None]:
        """For every node the innermost non-leaf module call that was running."""
        found: dict[fx.Node, ModuleCall | None] = dict.fromkeys(self.nodes)
        for call in sorted((c for c in self.captured.calls if not c.leaf), key=lambda c: c.last - c.first, reverse=True):
            for i in range(call.first, min(call.last + 1, len(self.nodes))):
                found[self.nodes[i]] = call
        return found

    def attribute(self, module: str, name: str) -> int:
        """The value of a module's attribute, dotted (`config.num_heads`) where it sits in a config."""
        value: Any = self.captured.skeleton.get_submodule(module)
        for part in name.split("."):
            value = getattr(value, part)
        return plain(value)

    def looks_up(self, node: fx.Node) -> str | None:
        """The nn.Embedding whose rows this operation looks up: a leaf call, or the look-up in a subclass's own forward."""
        facts = self.axes.facts.get(node)
        if facts is None or not any(c.how == "lookup" for c in facts.contracts):
            return None
        path = str(node.target) if node.op == "call_module" else str(node.meta["scope"])
        return path if isinstance(self.captured.skeleton.get_submodule(path), torch.nn.Embedding) else None

    def facts(self, node: fx.Node) -> Facts | None:
        return self.axes.facts.get(node)

    def dims_with(self, node: fx.Node, leaf: Axis) -> list[int]:
        dims = self.axes.of.get(node) or []
        return [i for i, d in enumerate(dims) if isinstance(d, Axis) and leaf in leaves(d)]


def has_tensor(node: fx.Node) -> bool:
    return any(True for _ in tensors_of(node.meta.get("val")))


def is_store(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "setitem"


def flat_axes(dims: Any) -> Iterator[Axis]:
    if isinstance(dims, Axis):
        yield dims
    elif isinstance(dims, (list, tuple)):
        for d in dims:
            yield from flat_axes(d)


def canonical_names(model: torch.nn.Module) -> dict[int, str]:
    """id of every parameter and buffer -> the first name it goes by."""
    names: dict[int, str] = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        names.setdefault(id(tensor), name)
    return names


def carries(facts_axes: Iterable[Any], leaf: Axis) -> list[Any]:
    return [item for item in facts_axes if leaf in leaves(item.axis)]


def follow(
    index: GraphIndex, axis: Axis, fills: frozenset[fx.Node] = frozenset(), gathered: frozenset[fx.Node] = frozenset()
) -> Flow:
    """Shard `axis` (a leaf) and see what it takes.

    Runs again when a sliced operand turns out to be a constant factory (`fills`: making it small beats slicing it), or
    when all that a column's output meets before it is gathered is done element by element (`gathered`: scaled, cast or
    capped logits; the layer can gather them itself).
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
    """Move a slice from inside a module up to the module's input, where what lies between runs on a slice as well."""
    axis, call, node = flow.axis, index.enclosing[source], source
    moved: list[fx.Node] = []
    while call is not None and call.path and call.first <= index.order[node] <= call.last:
        carrying = [op for op in index.operands[node] if axis in index.carried[op.node]]
        facts = index.facts(node)
        sliced = {(e.user, e.path) for e in flow.edges if e.source is node and e.kind == "slice"}
        users_sliced = all(use in sliced or use[0] in moved for use in index.uses[node])
        plain = facts is not None and not carries(facts.forbids, axis) and not carries(facts.contracts, axis)
        if node.op != "call_function" or len(carrying) != 1 or not users_sliced or not plain or node.meta.get("mutates"):
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
    while node.op == "call_function":
        operands = index.operands[node]
        same_axes = len(operands) == 1 and index.axes.of[operands[0].node] == index.axes.of[node]
        if not same_axes or len(index.uses[operands[0].node]) != 1 or node.meta.get("mutates"):
            return None
        node = operands[0].node
    return node if node.op == "call_module" and index.module_params.get(node) else None


def _origins(index: GraphIndex, node: fx.Node, axis: Axis) -> set[fx.Node] | None:
    """The operations that made `axis` in this value, if the value is constant along it from all of them, else None."""
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
            flow.inside.add(node)  # a replicated value repeated along the axis: each rank sees its share of the copies
        return
    carrying = [op for op in index.operands[node] if axis in index.carried[op.node]]
    own = [p for p in index.module_params.get(node, {}).values() if axis in index.param_leaves.get(p, ())]
    own_params = [p for p in own if index.is_parameter(p)]
    if not own_params and not any(op.node in flow.sharded for op in carrying):
        return
    if node.op == "output":
        for op in carrying:
            if op.node in flow.sharded:
                flow.edges.append(Edge("gather", op.node, node, op.path, axis, "it is an output of the model"))
        return
    facts = index.facts(node)
    forbids = carries(facts.forbids, axis) if facts else []
    twice = any(len(index.dims_with(n, axis)) > 1 for n in (node, *(op.node for op in carrying)))
    if facts is None or forbids or twice:
        why = forbids[0].why if forbids else "the axis is in two dims at once" if twice else "operation without a rule"
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
    if len(own) != len(own_params):
        flow.problems.append(f"{describe(node)}: it has buffers along the axis")
    for op in carrying:
        if op.node not in flow.sharded:
            flow.edges.append(Edge("slice", op.node, node, op.path, axis, "it meets a sharded value"))
            if node.meta.get("mutates") and op.path[:1] == (0,):
                flow.problems.append(f"{describe(node)}: it changes in place a tensor that would have to be sliced")
    contracts = carries(facts.contracts, axis)
    for contract in contracts:
        if contract.how not in SUMS:
            flow.edges.append(Edge("stat", node, None, (), axis, contract.how))
    if any(c.how in SUMS for c in contracts):
        flow.partial.add(node)
        added = [op for op in index.operands[node] if op.path[0] in facts.addends]
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
        if not _passes_partial(index, flow, node, user):
            break
        flow.partial.add(user)
        flow.inside.add(user)
        node = user
    flow.edges.append(Edge("reduce", node, None, (), flow.axis, why))


def _passes_partial(index: GraphIndex, flow: Flow, node: fx.Node, user: fx.Node) -> bool:
    facts = index.facts(user)
    if facts is None or facts.linear is None or is_store(user):
        return False
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
            if facts is None or facts.linear is None or len(floats) != 1 or floats[0].path[0] not in facts.linear[1]:
                return False
            node = floats[0].node
        if not index.is_parameter(str(node.target)):
            return False
        found.add(str(node.target))
    flow.once |= found
    return True


def describe(node: fx.Node) -> str:
    """`layers.0.mlp: softmax (modeling_x.py:12)`: an operation, where a reader finds it."""
    name = str(node.target) if node.op == "call_module" else getattr(node.target, "__name__", str(node.target))
    site = node.meta.get("site")
    where = ""
    if site is not None and site.frames:
        frame = site.frames[-1]
        where = f" ({frame.code.co_filename.rsplit('/', 1)[-1]}:{frame.lineno})"
    scope = node.meta.get("scope") or "the model"
    return f"{scope}: {name}{where}"
