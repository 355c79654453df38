"""A plan in the words of transformers' `tp_plan`: one style for each glob of module or parameter names.

A style is said of a name, so it can only say what concerns one module: its weight cut evenly along a dim
(`colwise`, `rowwise`, `packed_colwise` for two fused halves, `embedding_rowwise`), its input's gradient or
its output summed. Which code runs between is the model's own, with the numbers it had. So an axis is put
into styles as a whole or not at all: every weight that carries it, every collective it needs, every gradient
that it makes partial, in every layer of the same glob; what speaks against it is kept as the reason.

The styles' meaning is that of `transformers/distributed/tensor_parallel.py`, 5.23.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from .axes import Axis
from .captured import ModuleCall
from .flow import Flow
from .graph import GraphIndex, describe
from .layouts import ParamLayout
from .plan import ParamPlan, TpPlan
from .skeleton import linear_kind
from .solve import unmet
from .tp_gradients import Gradients

if TYPE_CHECKING:
    from .planner import Analysis


class Unsayable(Exception):
    """No style says this."""


def glob(name: str) -> str:
    """A name as a plan's keys have it: numbers between dots are `*` (of two in a row, the first)."""
    return re.sub(r"\.\d+(\.|$)", r".*\1", name)


def in_styles(found: Analysis, params: Mapping[str, ParamPlan], tp: int, shipped: Any = None) -> TpPlan:
    """The axes that `found` shards, in styles.

    shipped: the `tp_plan` that the model comes with. transformers merges a given plan into that one, so what
    it says of a name that has no style here is switched off with `replicate`.
    """
    said = Translation(found, params, tp)
    styles = said.styles()
    names = said.names
    for pattern in shipped if isinstance(shipped, Mapping) else ():
        owner = pattern.rpartition(".")[0]
        if pattern in names and pattern not in styles:
            is_param = any(n in said.index.parameters for n in names[pattern])
            styles[pattern] = styles.get(owner, "replicate") if is_param else "replicate"
    left_out: dict[str, str] = {}
    for axis, why in said.refused.items():
        for name in sorted(found.choice.flows[axis].params):
            left_out.setdefault(glob(name), why)
    for name in (name for one in found.experts for name in one.stacks):
        left_out[glob(name)] = "split by expert: a plan for ep_size, not for tp_size"
    order = {pattern: i for i, pattern in enumerate(names)}
    return TpPlan(dict(sorted(styles.items(), key=lambda item: order[item[0]])), left_out)


@dataclass
class Said:
    """One axis in styles: those of names, and the experts modules whose inputs and output they sum."""

    styles: dict[str, str] = field(default_factory=dict)
    experts: set[str] = field(default_factory=set)

    def say(self, name: str, style: str) -> None:
        if self.styles.setdefault(name, style) != style:
            raise Unsayable(f"{name} would need two styles, {self.styles[name]} and {style}")


class Translation:
    def __init__(self, found: Analysis, params: Mapping[str, ParamPlan], tp: int):
        self.found, self.params, self.tp = found, params, tp
        self.index: GraphIndex = found.index
        self.skeleton = found.captured.skeleton
        self.refused: dict[Axis, str] = {}
        self.calls: dict[str, list[ModuleCall]] = defaultdict(list)
        for call in found.captured.calls:
            self.calls[call.path].append(call)
        self.leaf_users: dict[str, list[tuple[fx.Node, str]]] = defaultdict(list)
        self.attr_nodes: dict[str, list[fx.Node]] = defaultdict(list)
        for node in self.index.nodes:
            for own, name in self.index.module_params.get(node, {}).items():
                self.leaf_users[name].append((node, own))
            if node.op == "get_attr":
                self.attr_nodes[str(node.target)].append(node)
        self.names: dict[str, list[str]] = defaultdict(list)  # glob -> what goes by it, in the model's order
        for module_name, module in self.skeleton.named_modules(remove_duplicate=False):
            self.names[glob(module_name)].append(module_name)
            for own in module._parameters:
                name = f"{module_name}.{own}".lstrip(".")
                self.names[glob(name)].append(name)
        self.changed = {m: n for n in self.index.nodes for m in n.meta.get("mutates", ())}  # -> by what
        self.reduced_at = {a.source: places for a, places in found.realised.places if a.kind == "reduce"}

    def styles(self) -> dict[str, str]:
        """Styles by glob, for the axes that can be said; the others are in `refused`."""
        flows = self.found.choice.flows
        for rank in {0, self.tp - 1}:
            for want, given in unmet(self.index, self.found.choice, rank):
                for axis in want.axes or set(flows):
                    why = f"{describe(want.node)}: a size would be {given} and must be {want.wanted}"
                    if axis in flows:
                        self.refused.setdefault(axis, why)
        said: dict[Axis, Said] = {}
        for axis, flow in flows.items():
            try:
                if axis not in self.refused:
                    said[axis] = self._say(flow)
            except Unsayable as why:
                self.refused[axis] = str(why)
        while True:
            extra = Gradients(self, said).styles()
            gone = {**extra.refused, **self._uneven_globs(said, extra.styles)}
            if not gone:
                break
            self.refused.update(gone)
            said = {axis: one for axis, one in said.items() if axis not in gone}
        by_name = {n: s for one in said.values() for n, s in one.styles.items()}
        return {glob(n): s for n, s in {**by_name, **{n: s for n, (s, _) in extra.styles.items()}}.items()}

    def _uneven_globs(self, said: dict[Axis, Said], extra: dict[str, tuple[str, Axis]]) -> dict[Axis, str]:
        """The axes with a name that goes by the same glob as another one of another style or of none."""
        given: dict[str, list[tuple[str, Axis]]] = defaultdict(list)
        for axis, one in said.items():
            for name, style in one.styles.items():
                given[name].append((style, axis))
        for name, pair in extra.items():
            given[name].append(pair)
        gone: dict[Axis, str] = {}
        for pattern in {glob(name) for name in given}:
            styles = {name: {style for style, _ in given.get(name, [])} for name in self.names[pattern]}
            if all(len(s) == 1 for s in styles.values()) and len(set().union(*styles.values())) == 1:
                continue
            shown = list(styles.items())[:3]
            what = ", ".join(f"{name}: {' and '.join(sorted(s)) or 'whole'}" for name, s in shown)
            for name in styles:
                for _, axis in given.get(name, []):
                    gone[axis] = f"{pattern} is one name for what differs ({what})"
        return gone

    def _say(self, flow: Flow) -> Said:
        said = Said()
        if flow.once:
            raise Unsayable(f"{sorted(flow.once)[0]} is added to a partial sum: every rank would add it")
        handled: set[Any] = set()
        for edge in flow.edges:
            if edge.kind == "stat":
                raise Unsayable(f"{describe(edge.source)}: a {edge.why} over the axis has to be reduced")
            if edge.kind == "reduce" and not self.index.module_params.get(edge.source):
                self._own_sum(flow, edge.source, said)
                handled.add(edge)
        for name in sorted(flow.params):
            plan = self.params[name]
            if plan.layout is None:
                raise Unsayable(f"{name} is not sharded alone")
            for node, own in self.leaf_users[name]:
                handled |= self._leaf(flow, node, own, plan, said)
            for node in self.attr_nodes[name]:
                self._attribute(node, name, plan.layout, said)
        for name in sorted(flow.params):
            plan = self.params[name]
            for other in (name, *plan.also) if plan.also else ():
                assert plan.layout is not None
                if other.rpartition(".")[0] not in said.styles:  # a name by which the code does not use it
                    said.say(other, self._of_parameter(other, plan.layout))
        for edge in flow.edges:
            if edge not in handled:
                at = describe(edge.user or edge.source)
                raise Unsayable(f"{at}: a {edge.kind} of a value inside of the code: {edge.why}")
        return said

    def _leaf(self, flow: Flow, node: fx.Node, own: str, plan: ParamPlan, said: Said) -> set[Any]:
        """The style of a linear layer or an embedding, and the conversions it makes."""
        module, path = self.skeleton.get_submodule(str(node.target)), str(node.target)
        kind = type(module).__name__
        assert plan.layout is not None
        dims = set(plan.layout.dims)
        reduce = {e for e in flow.edges if e.kind == "reduce" and e.source is node}
        gather = {e for e in flow.edges if e.kind == "gather" and e.source is node and e.user is None}
        cut = {e for e in flow.edges if e.kind == "slice" and e.user is node and e.path == (0,)}
        even = cuts(plan.layout, self.tp)
        if node in self.changed:
            where = describe(self.changed[node])
            raise Unsayable(f"{where}: it changes in place what {path} gives, which a style gives as a view")
        if set(module._parameters) - {"weight", "bias"}:
            raise Unsayable(f"{path}: {kind} has parameters other than weight and bias")
        if isinstance(module, nn.Embedding):
            if even == 1 and dims == {0} and reduce:
                said.say(path, "embedding_rowwise")
            elif even == 1 and dims == {1} and gather:
                said.say(path, "embedding_colwise")
            else:
                raise Unsayable(f"{path}: no style for this split of an embedding")
            return reduce | gather
        if linear_kind(module) != "linear" or not hasattr(module, "out_features") or not node.args:
            raise Unsayable(f"{path}: the styles are for nn.Linear and nn.Embedding, not for {kind}")
        if even == 0:
            raise Unsayable(f"{plan.name}: no style for its layout ({plan.placement}, {_first(plan.layout)})")
        if dims == {0}:
            whole = "colwise_gather_output"
            if even == 2 and (gather or module._parameters.get("bias") is not None):
                raise Unsayable(f"{plan.name}: packed_colwise neither cuts a bias in two halves nor gathers")
            said.say(path, "packed_colwise" if even == 2 else whole if gather else "colwise")
        elif dims == {1} and even == 1 and reduce:
            said.say(path, "rowwise_split_input" if cut else "rowwise")
        else:
            raise Unsayable(f"{plan.name}: no style for its layout ({plan.placement}, {_first(plan.layout)})")
        return reduce | gather | cut

    def _own_sum(self, flow: Flow, source: fx.Node, said: Said) -> None:
        """The style of a module whose own code makes this sum: an embedding's look-up, then at most scaled;
        or experts, with all of the axis inside."""
        table = self.index.looks_up(source)
        if table is not None and self._is_plain_embedding(table, source):
            said.say(table, "embedding_rowwise")
            return
        places = self.reduced_at.get(source, [])
        if len(places) != 1 or places[0].kind != "out" or places[0].path:
            raise Unsayable(f"{describe(source)}: a sum over the ranks that is no module's output")
        module = places[0].module
        for call in self.calls[module]:
            if len(call.args) < 3 or not isinstance(call.output, fx.Node):
                raise Unsayable(
                    f"{module}: it sums over the ranks in its own code, and is neither an nn.Linear nor "
                    "called like experts (hidden states, indices, weights)"
                )
        if not all(any(self.within(c, n) for c in self.calls[module]) for n in flow.inside):
            raise Unsayable(f"{describe(source)}: the sum of what {module} and others compute")
        said.say(module, "moe_tp_experts")
        said.experts.add(module)

    def _is_plain_embedding(self, module: str, lookup: fx.Node) -> bool:
        """Does the call look up what its first argument says, and then at most scale it?"""
        (call,) = (c for c in self.calls[module] if self.within(c, lookup))
        later = self.index.nodes[self.index.order[lookup] + 1 : call.last + 1]
        later = [n for n in later if n.op != "get_attr" and isinstance(n.meta.get("val"), torch.Tensor)]
        ids = [op.node for op in self.index.operands[lookup] if op.node.op != "get_attr"]
        return ids == list(call.args[:1]) and all(map(self._scales, later))

    @staticmethod
    def _scales(node: fx.Node) -> bool:
        """Is it a product with a scalar, or a cast?"""
        name = getattr(node.target, "__name__", "")
        factors = [a.meta["val"] for a in node.args if isinstance(a, fx.Node) and "val" in a.meta]
        scalars = sum(isinstance(f, torch.Tensor) and f.ndim == 0 for f in factors)
        product = name in ("mul", "__mul__") and scalars + 1 >= len(factors)
        return product or name in ("to", "type_as", "float")

    def _attribute(self, node: fx.Node, name: str, layout: ParamLayout, said: Said) -> None:
        """The style of a parameter that its module's own code uses."""
        owner = name.rpartition(".")[0]
        if not any(self.within(c, node) for c in self.calls[owner]):
            raise Unsayable(f"{name} is used outside of the forward of {owner or 'the model'}")
        dims, even = set(layout.dims), cuts(layout, self.tp)
        if said.styles.get(owner) == "embedding_rowwise":
            if even != 1 or dims != {0}:
                raise Unsayable(f"{name}: no style for this split of an embedding")
            return
        said.say(name, self._of_parameter(name, layout))
        if owner not in said.experts:
            said.say(owner, "local_params")

    def _of_parameter(self, name: str, layout: ParamLayout) -> str:
        """The style that cuts a parameter alone."""
        ndim, dims, even = len(layout.shape), set(layout.dims), cuts(layout, self.tp)
        if even == 1 and dims == {max(ndim - 2, 0)}:
            return "colwise"
        if even == 1 and dims == {ndim - 1} and name.rpartition(".")[2] != "bias":
            return "rowwise"
        if even == 2 and ndim > 1 and dims in ({ndim - 2}, {ndim - 1}):
            return "packed_colwise" if dims == {ndim - 2} else "packed_rowwise"
        raise Unsayable(f"{name}: no style for its layout (dims {sorted(dims)}, {_first(layout)})")

    def within(self, call: ModuleCall, node: fx.Node) -> bool:
        return call.first <= self.index.order[node] <= call.last


def cuts(layout: ParamLayout, tp: int) -> int:
    """1: cut in equal contiguous parts (the last may be shorter). 2: each half is. 0: in another way."""
    if len(layout.dims) != 1:
        return 0
    ((dim, ranks),) = layout.dims.items()
    size = layout.shape[dim]
    step = -(-size // tp)
    if tuple(ranks) == tuple(((r * step, min((r + 1) * step, size)),) for r in range(tp)):
        return 1 if (tp - 1) * step < size else 0
    half, part = size // 2, size // 2 // tp
    both = tuple(((r * part, (r + 1) * part), (half + r * part, half + (r + 1) * part)) for r in range(tp))
    return 2 if part * tp * 2 == size and tuple(ranks) == both else 0


def _first(layout: ParamLayout) -> str:
    (ranks,) = list(layout.dims.values())[:1]
    return "rank 0 holds " + ", ".join(f"{a}:{b}" for a, b in ranks[0][:4])


__all__ = ["cuts", "glob", "in_styles"]
