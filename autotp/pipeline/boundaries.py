"""The places between units: what would cross a cut there, and what prevents one.

What a stage receives stands in for the output of the unit that made it, from the call of that unit on. So
what glue makes of it is made again on the stage that receives it, and is not sent.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from ..captured import CapturedGraph
from ..graph import describe
from ..nested import map_nodes
from .units import Unit, draws, sources


@dataclass
class Boundary:
    """The place behind a unit. crossing: what would be sent there, with its uses after it. why: what prevents
    a cut there (the first reason met)."""

    crossing: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    why: str | None = None

    @property
    def bytes(self) -> int:
        values: list[torch.Tensor] = [node.meta["val"] for node in self.crossing]
        return sum(value.numel() * value.element_size() for value in values)


class Dataflow:
    """A captured graph by its units.

    units: in the order they run. dependent: the nodes whose values depend on units. outputs: by unit, the
    nodes of the tensors in its output, in order. boundaries[i]: the place behind unit i, for all but the
    last.
    """

    def __init__(self, captured: CapturedGraph, units: Sequence[Unit], dependent: set[fx.Node]):
        self.units, self.dependent, self.skeleton = units, dependent, captured.skeleton
        self.nodes = list(captured.graph.nodes)
        self.order = {node: i for i, node in enumerate(self.nodes)}
        self.ends = [unit.end for unit in units]
        self.outputs = [_output_leaves(unit) for unit in units]
        self.boundaries = [Boundary() for _ in units[1:]]
        # A unit is not run without all that is given to it, used or not.
        self.given: dict[fx.Node, list[fx.Node]] = {}
        for unit in units:
            if unit.start < unit.end:
                first = self.nodes[unit.start]
                taken: list[fx.Node] = []
                map_nodes((unit.call.args, unit.call.kwargs), taken.append)
                for node in taken:
                    self.given.setdefault(node, []).append(first)
        for node in self.nodes:
            if node in dependent:
                self._pass(node)
            self._change(node)
        for boundary in self.boundaries:
            in_order = sorted(boundary.crossing, key=self.order.__getitem__)
            boundary.crossing = {node: boundary.crossing[node] for node in in_order}

    def unit_of(self, node: fx.Node) -> int | None:
        """The index of the unit that `node` was recorded in."""
        at = self.order[node]
        i = bisect_right(self.ends, at)
        return i if i < len(self.units) and self.units[i].start <= at else None

    def uses(self, node: fx.Node) -> list[fx.Node]:
        """What computes with its value, and the first operations of units that it is given to: not what reads
        its sizes, and not the model's output, whose parts are sent from where they are."""
        return [*(user for user in node.users if node in sources(user)), *self.given.get(node, ())]

    def _between(self, first: int, last: int) -> Iterator[int]:
        """The boundaries behind the node at index `first` and before the one at `last`."""
        for i in range(bisect_right(self.ends, first), len(self.boundaries)):
            if self.ends[i] > last:
                return
            yield i

    def _pass(self, node: fx.Node) -> None:
        """Take the value of a node that depends on units across the boundaries between it and its uses."""
        uses = self.uses(node)
        for i in self._between(self.order[node], max((self.order[user] for user in uses), default=-1)):
            after = [user for user in uses if self.order[user] >= self.ends[i]]
            self._need(node, i, after, set())

    def _need(self, node: fx.Node, i: int, after: Sequence[fx.Node], seen: set[fx.Node]) -> None:
        """Make a value known behind boundary i: sent as a unit's output, or made once more of what is."""
        if node in seen or node not in self.dependent:
            return
        seen.add(node)
        unit = self.unit_of(node)
        if unit is not None and node in self.outputs[unit]:
            uses = self.boundaries[i].crossing.setdefault(node, [])
            uses += [use for use in after if use not in uses]
        elif unit is None and not node.meta.get("mutates") and not draws(node, self.skeleton):
            for source in sources(node):
                self._need(source, i, after, seen)
        elif self.boundaries[i].why is None:
            what = "is not among its outputs" if unit is not None else "can't be made twice"
            self.boundaries[
                i
            ].why = f"{_value(node)} is made before it, {what}, and is used after it by {describe(after[0])}"

    def _change(self, node: fx.Node) -> None:
        """Keep a change in place together with what makes and uses the values it changes."""
        changed = [other for other in node.meta.get("mutates", ()) if other is not node]
        if not changed or self.dependent.isdisjoint((node, *changed)):
            return
        first = min(self.order[other] for other in changed)
        last = max(self.order[user] for other in (node, *changed) for user in (other, *self.uses(other)))
        for i in self._between(first, last):
            if self.boundaries[i].why is None:
                self.boundaries[i].why = f"{describe(node)} changes {_value(changed[0])} in place across it"


def _output_leaves(unit: Unit) -> list[fx.Node]:
    found: list[fx.Node] = []
    map_nodes(unit.call.output, found.append)
    return found


def _value(node: fx.Node) -> str:
    """`a value of 2x12x64 made by layers.0.mlp: add (modeling_x.py:12)`."""
    value = node.meta.get("val")
    shape = "x".join(map(str, value.shape)) if isinstance(value, torch.Tensor) else "tensors"
    return f"a value of {shape} made by {describe(node)}"
