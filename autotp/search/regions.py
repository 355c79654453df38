"""Memory traffic and saved activations: what is between the products of a graph, fused into regions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from ..graph import GraphIndex, has_tensor, tensors_of
from .attentions import drops_out

SizeByWays = dict[int, float]


@dataclass
class Traffic:
    """Elements by the ways they can be divided. forward: read and written by regions. backward: the same for
    their gradients, and what they re-read. saved: kept from forward to backward; masks: bytes of dropout
    masks, likewise.

    attention_saved: of `saved`, what an attention keeps that is not its operands. kernels: how many regions
    do work.
    """

    forward: SizeByWays = field(default_factory=dict)
    backward: SizeByWays = field(default_factory=dict)
    saved: SizeByWays = field(default_factory=dict)
    masks: SizeByWays = field(default_factory=dict)
    kernels: int = 0


def traffic(
    index: GraphIndex,
    unit_of: Mapping[fx.Node, int],
    products: set[fx.Node],
    cores: Mapping[fx.Node, set[fx.Node]],
    ways: Callable[[fx.Node], int],
) -> dict[int, Traffic]:
    """Traffic by unit. products: the nodes that multiply. cores: of each attention, its nodes."""
    return _Regions(index, unit_of, products, cores, ways).count()


class _Regions:
    def __init__(self, index: GraphIndex, unit_of: Any, products: Any, cores: Any, ways: Any):
        self.index, self.unit_of, self.ways = index, unit_of, ways
        self.anchors = products | set().union(*cores.values())
        self.products, self.cores = products, cores
        self.values = [n for n in index.nodes if has_tensor(n)]
        self.source: dict[fx.Node, fx.Node] = {}  # a view's base
        self.region: dict[fx.Node, Any] = {}
        depth: dict[fx.Node, int] = {}
        for node in self.values:
            operands = [op.node for op in index.operands[node]]
            self.source[node] = self.source[operands[0]] if operands and self._is_view(node) else node
            depth[node] = max((depth[o] + (o in self.anchors) for o in operands if o in depth), default=0)
        self._fuse(depth)
        self.written = {self.source[n] for n in self.values if self._leaves_region(n)}

    def _is_view(self, node: fx.Node) -> bool:
        """Does it give its first operand's elements, moved or in part? Copies between layouts count as views:
        they are cheap beside what makes and uses them."""
        if node in self.anchors or node.op != "call_function":
            return False
        name = getattr(node.target, "__name__", "")
        if node.target is getattr:
            return True
        return name in _VIEWS

    def _fuse(self, depth: Mapping[fx.Node, int]) -> None:
        parent: dict[fx.Node, fx.Node] = {}

        def find(n: fx.Node) -> fx.Node:
            while parent.setdefault(n, n) is not n:
                n = parent[n]
            return n

        for node in self.values:
            if not self._works(node):
                continue
            for op in self.index.operands[node]:
                base = self.source.get(op.node, op.node)
                if self._works(base) and self._place(base, depth) == self._place(node, depth):
                    parent[find(node)] = find(base)
        self.region = {n: find(n) for n in self.values if self._works(n)}

    def _place(self, node: fx.Node, depth: Mapping[fx.Node, int]) -> tuple[int, int]:
        return self.unit_of[node], depth[node]

    def _works(self, node: fx.Node) -> bool:
        """Does it compute something, outside of products?"""
        return (
            node in self.source
            and self.source[node] is node
            and node not in self.anchors
            and node.op in ("call_function", "call_module")
        )

    def _leaves_region(self, node: fx.Node) -> bool:
        base = self.source[node]
        if not self._works(base):
            return True
        return any(
            u.op == "output"
            or (has_tensor(u) and self.source.get(u) is u and self.region.get(u) is not self.region[base])
            for u in node.users
        )

    def count(self) -> dict[int, Traffic]:
        result: dict[int, Traffic] = defaultdict(Traffic)
        reads: dict[Any, set[fx.Node]] = defaultdict(set)
        for node, region in self.region.items():
            for op in self.index.operands[node]:
                base = self.source.get(op.node)
                if base is not None and self.region.get(base) is not region and base.op != "get_attr":
                    reads[region].add(base)
        writes: dict[Any, set[fx.Node]] = defaultdict(set)
        for node in self.written:
            if node in self.region:
                writes[self.region[node]].add(node)
        for region in set(self.region.values()):
            moved = result[self.unit_of[region]]
            if not any(_floating(n) for n in writes[region]):
                continue
            moved.kernels += 1
            for node in reads[region] | writes[region]:
                self._add(moved.forward, node)
                if node.meta.get("grad") and _floating(node):
                    self._add(moved.backward, node)
        for node, unit in self._saved().items():
            self._add(result[unit].saved, node)
            if self.region.get(node) is not None:
                self._add(result[unit].backward, node)
        for node in self.values:
            if self._drops(node):
                out = result[self.unit_of[node]].masks
                key = self.ways(node)
                out[key] = out.get(key, 0.0) + _numel(node)
        return dict(result)

    def _add(self, into: SizeByWays, node: fx.Node) -> None:
        key = self.ways(node)
        into[key] = into.get(key, 0.0) + _numel(node)

    def _drops(self, node: fx.Node) -> bool:
        return node not in self.anchors and drops_out(self.index, node)

    def _saved(self) -> dict[fx.Node, int]:
        """Values kept for the backward, each once, with the unit that keeps it."""
        kept: dict[fx.Node, int] = {}

        def keep(node: fx.Node, unit: int) -> None:
            for base in self._written_for(node):
                if _floating(base) and base.op != "get_attr" and base.meta.get("grad"):
                    kept.setdefault(base, unit)

        for node in self.values:
            unit = self.unit_of[node]
            if not node.meta.get("grad"):
                continue
            operands = [op.node for op in self.index.operands[node]]
            if node in self.products:
                for operand in operands:
                    keep(operand, unit)
            elif node in self.cores:
                for operand in self._outer(node):
                    keep(operand, unit)
                keep(node, unit)
            elif self._works(node) and not self._drops(node):
                for operand in self._needed(node, operands):
                    keep(operand, unit)
        return kept

    def _outer(self, node: fx.Node) -> list[fx.Node]:
        core = self.cores[node]
        return [op.node for n in core for op in self.index.operands[n] if op.node not in core]

    def _needed(self, node: fx.Node, operands: list[fx.Node]) -> list[fx.Node]:
        """The operands whose values the backward of this operation needs."""
        facts = self.index.facts(node)
        if facts is None or any(c.how == "lookup" for c in facts.contracts):
            return []
        if facts.linear is None:
            return operands
        how, _ = facts.linear
        if how == "joint" or len(operands) < 2:
            return []
        return [o for o in operands if any(p is not o and p.meta.get("grad") for p in operands)] or operands[
            :1
        ]

    def _written_for(self, node: fx.Node) -> list[fx.Node]:
        """The values in memory from which `node` can be made again without a product."""
        found, todo, seen = [], [node], set()
        while todo:
            base = self.source.get(todo.pop())
            if base is None or base in seen:
                continue
            seen.add(base)
            if base in self.written or not self._works(base):
                found.append(base)
            else:
                todo += [op.node for op in self.index.operands[base]]
        return found


_VIEWS = frozenset(
    "view reshape transpose permute getitem __getitem__ unsqueeze squeeze expand expand_as contiguous split "
    "chunk unbind flatten unflatten narrow select swapaxes movedim t to float type type_as half bfloat16 "
    "clone detach tile "
    "repeat_interleave view_as reshape_as unfold".split()
)


def _floating(node: fx.Node) -> bool:
    return any(t.is_floating_point() for t in tensors_of(node.meta.get("val")))


def _numel(node: fx.Node) -> float:
    return float(sum(t.numel() for t in tensors_of(node.meta.get("val"))))
