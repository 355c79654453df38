"""Ways through a model's code that data decide: which there are, and what a plan does there in vain.

While it is recorded, a model asks how many rows a mask picks, whether a mask is true anywhere, which number a
tensor holds (`assumed.py`). On other data it is told otherwise. `data_ways` says how; each is captured as any
other way is (`ways.py`), and the plan must hold in all of them. So a loop over the experts that were hit is
seen visiting all of them and none: as all its turns are planned alike (a call in the code wants the same each
time it runs), the plan holds for any number of turns. And all ranks make the same turns: what the code asks
about is whole on every rank, since an operation that picks or reads forbids the axes of what it looks at.

What the plan does in a loop has no counterpart where the loop does not run. `Idle` tells what is harmless
there: a sum over the ranks of zeros, and arrows whose values nothing uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from .assumed import Answers
from .captured import CapturedGraph
from .graph import GraphIndex, walk
from .ints import COMPARISONS, Comparison, Dim, dims_of, evaluate, reads_of
from .known import Basis
from .place import wants_grad
from .realise import Where
from .sites import Site


@dataclass(frozen=True)
class DataWay:
    """`answers` for a capture; `when`, in words: `where x.item() at … gives the opposite`. `only_assumed`:
    what the code was told was not known."""

    answers: Answers
    when: str
    only_assumed: bool


def data_ways(index: GraphIndex) -> Iterator[DataWay]:
    """How data could have told the code of a captured model otherwise: one question at a time."""
    captured, seen = index.captured, set()
    for assumption in captured.assumed:
        if assumption.basis is Basis.SIZES and not any(_varies(index, dim) for dim in assumption.sizes):
            continue
        for other in assumption.others:
            key = assumption.site.frames
            if (key, other) not in seen:
                seen.add((key, other))
                when = f"where it is otherwise than that {assumption.told} ({other}) at {assumption.site}"
                yield DataWay({key: other}, when, assumption.basis > Basis.INPUTS)
    for frame, comparisons in captured.asked.items():
        of_data = [comparison for comparison in comparisons if _hangs_on_data(index, comparison)]
        if of_data and len({_outcome(index, comparison) for comparison in comparisons}) == 1:
            when = f"where a comparison of what data decide comes out the other way at {frame}"
            yield DataWay({(frame,): "the opposite"}, when, True)


def everywhere(skipped: set[Site], captured: CapturedGraph) -> list[Site]:
    """The sites, and those at the same places in the code of other modules: of layers that are alike, one was
    examined."""
    frames = {site.frames for site in skipped}
    sites = (n.meta.get("site") for n in captured.graph.nodes if n.op == "call_function")
    return [site for site in dict.fromkeys(sites) if site is not None and site.frames in frames]


def _hangs_on_data(index: GraphIndex, comparison: Comparison) -> bool:
    sides = (comparison.left, comparison.right)
    if any(not read.every for side in sides for read in reads_of(side)):
        return True
    return any(_varies(index, dim) for side in sides for dim in dims_of(side))


def _varies(index: GraphIndex, dim: Dim) -> bool:
    """Whether this size hangs on the data."""
    axes = index.axes.of.get(dim.node) or []
    return dim.index < len(axes) and index.hangs_on_data(axes[dim.index])


def _outcome(index: GraphIndex, comparison: Comparison) -> bool:
    left, right = (
        evaluate(side, index.captured.attributes, lambda d: d.node.meta["val"].shape[d.index])
        for side in (comparison.left, comparison.right)
    )
    return COMPARISONS[comparison.op](left, right)


class Idle:
    """What is without effect in a captured graph."""

    def __init__(self, index: GraphIndex) -> None:
        self.index = index
        self.alive = self._reaching(lambda node: True)
        self.trained = self._reaching(wants_grad)
        self.sites = {n.meta.get("site") for n in index.nodes if n.op == "call_function"}
        calls = index.captured.calls
        self.modules = {call.path for call in calls if call.node is None or call.node in self.alive} | {""}

    def _reaching(self, carries: Callable[[fx.Node], bool]) -> set[fx.Node]:
        """The nodes that the output is made of, along values that `carries` is true of."""
        found: set[fx.Node] = set()
        todo = [n for n in self.index.nodes if n.op == "output" or "reads" in n.meta]
        writers = [(n, set(n.meta["mutates"])) for n in self.index.nodes if n.meta.get("mutates")]
        while todo:
            while todo:
                node = todo.pop()
                if node not in found and (node.op == "output" or carries(node)):
                    found.add(node)
                    todo += node.all_input_nodes
            todo = [n for n, changed in writers if n not in found and carries(n) and changed & found]
        return found

    def weights(self, trained: bool = False) -> set[str]:
        """The parameters that the output is made of; trained: that get a gradient from it."""
        nodes = self.trained if trained else self.alive
        used = {str(n.target) for n in nodes if n.op == "get_attr"}
        return used | {name for n in nodes for name in self.index.module_params.get(n, {}).values()}

    def _zero(self, node: fx.Node) -> bool:
        """Whether the value is zero throughout."""
        if getattr(node.target, "__name__", "") in ("zeros", "zeros_like", "new_zeros"):
            return True
        facts = self.index.facts(node)
        if facts is None or facts.linear is None:
            return False
        how, operands = facts.linear
        given = [self._zero(op.node) for op in self.index.operands[node] if op.path[0] in operands]
        return bool(given) and (any(given) if how == "each" else all(given))

    def at(self, kind: str, where: Where) -> bool:
        """Whether an arrow of this kind does nothing at this place, if the code comes by it at all."""
        counting = self.trained if kind == "enter" else self.alive
        return all(
            (kind == "reduce" and self._zero(value)) or counting.isdisjoint(users)
            for value, users in self._values(where)
        )

    def _values(self, where: Where) -> Iterator[tuple[fx.Node, list[fx.Node]]]:
        """The values that are converted there, and what uses them after that."""
        index = self.index
        if where.site is not None:
            for node in index.nodes:
                if node.op == "call_function" and node.meta.get("site") == where.site:
                    if where.kind == "before":
                        yield from ((op.node, [node]) for op in index.operands[node] if op.path == where.path)
                    else:
                        yield node, [user for user, _ in index.uses[node]]
            return
        for call in index.captured.calls:
            if call.path != where.module:
                continue
            inside = {call.node} if call.leaf else set(index.nodes[call.first : call.last + 1])
            tree: Any = (
                call.output
                if where.kind in ("out", "layer")
                else {**dict(enumerate(call.args)), **call.kwargs}
            )
            for path, value in walk(tree):
                if isinstance(value, fx.Node) and (path == where.path or where.kind == "layer"):
                    users = [user for user, _ in index.uses[value]]
                    yield value, [u for u in users if (u in inside) == (where.kind == "in")]
