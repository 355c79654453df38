"""Which axes to shard over the tensor-parallel ranks, and how each is split.

Every leaf axis that some parameter carries is followed (`flow.follow`) and priced: elements that must be sent per forward
against weights that need no longer be held and multiplied on every rank. The best ratio goes first; an axis that would
share a parameter or a value with one already chosen is rejected, since one mesh dim can shard a value only once. So the
heads, the MLP's hidden axis, the vocabulary come out on top, and the residual stream's axis, which would need a
collective for every matmul, comes last and conflicts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from .axes import Axis, factors, leaves, segments
from .flow import Flow, GraphIndex, describe, follow
from .layouts import DimLayout
from .layouts import split as split_evenly


@dataclass(frozen=True)
class Split:
    """How the ranks share one leaf axis. `ranges[rank]` are in units of the leaf, in local order.

    A *group* split belongs to two adjacent leaves (key/value heads, queries per key/value head): `partner` is the other
    one, and the ranges of the major leaf may repeat (a key/value head held by several ranks, or several times on one).
    """

    ranges: tuple[DimLayout, ...]
    partner: Axis | None = None
    flat: tuple[DimLayout, ...] = ()  # of the product (major, partner), in units of the partner; major leaf only

    def size(self, rank: int) -> int:
        return sum(stop - start for start, stop in self.ranges[rank])

    @property
    def even(self) -> bool:
        return len({self.size(r) for r in range(len(self.ranges))}) == 1


@dataclass
class Choice:
    """The chosen axes: their splits and flows, and why the others were not chosen."""

    splits: dict[Axis, Split] = field(default_factory=dict)
    flows: dict[Axis, Flow] = field(default_factory=dict)
    rejected: dict[Axis, str] = field(default_factory=dict)


def group_split(major: int, minor: int, parts: int) -> tuple[list[DimLayout], list[DimLayout], list[int]]:
    """Share major*minor query heads, `minor` to each key/value head, over more ranks than there are key/value heads.

    Returns per rank the query heads, the key/value heads it holds (one per local group, repeats allowed) and the size of
    its groups: the largest for which the rank's query heads fall into equal groups of one key/value head each.
    """
    flat = split_evenly(major * minor, parts)
    held: list[DimLayout] = []
    group_sizes: list[int] = []
    for ((start, stop),) in flat:
        count = stop - start
        size = next(
            g
            for g in range(count, 0, -1)
            if count % g == 0 and all(i // minor == (i + g - 1) // minor for i in range(start, stop, g))
        )
        held.append(tuple((i // minor, i // minor + 1) for i in range(start, stop, size)))
        group_sizes.append(size)
    return list(flat), held, group_sizes


def choose(index: GraphIndex, parts: int, allow: Callable[[Axis, Flow], str | None] = lambda axis, flow: None) -> Choice:
    """Choose the axes to shard over `parts` ranks. `allow` may veto an axis (a policy), giving the reason."""
    choice = Choice()
    if parts == 1:
        return choice
    candidates: list[tuple[float, int, Axis, Flow]] = []
    for axis in list(index.holders):
        if axis.size == 1:
            continue
        flow = follow(index, axis)
        reason = allow(axis, flow) or _unfit(index, axis, flow)
        if reason:
            choice.rejected[axis] = reason
            continue
        gain = sum(_numel(index, p) for p in flow.params)
        if not gain:
            continue
        first = min(index.order[n] for n in index.touching[axis])
        candidates.append(((flow.price + 1) / gain, first, axis, flow))
    held: dict[str, Axis] = {}
    values: dict[object, Axis] = {}
    for _, _, axis, flow in sorted(candidates, key=lambda c: (c[0], c[1])):
        split = _split(index, axis, flow, parts)
        if isinstance(split, str):
            choice.rejected[axis] = split
            continue
        taken = next((held[p] for p in sorted(flow.params) if p in held), None) or next(
            (values[n] for n in flow.sharded if n in values), None
        )
        if taken is not None:
            choice.rejected[axis] = f"its weights or values are already sharded over another axis (size {taken.size})"
            continue
        for leaf, one in split.items():
            choice.splits[leaf] = one
            for p in flow.params:
                held[p] = axis
        choice.flows[axis] = flow
        values.update(dict.fromkeys(flow.sharded | flow.partial, axis))
    return choice


def _numel(index: GraphIndex, name: str) -> int:
    return index.captured.skeleton.get_parameter(name).numel()


def _unfit(index: GraphIndex, axis: Axis, flow: Flow) -> str | None:
    """Why this axis can't be sharded at a reasonable price, or None."""
    if flow.problems:
        return flow.problems[0]
    if _only_looked_up(index, axis, flow) and sum(_numel(index, p) for p in flow.params) < index.largest_weight:
        return "a small table: holding it whole is cheaper than a reduction after every look-up"
    weights = sum(_numel(index, p) for p in flow.params if index.captured.skeleton.get_parameter(p).ndim > 1)
    if not weights:
        return "only vectors carry it"
    for edge in flow.edges:
        column = edge.source.op == "call_module" and edge.source not in flow.partial
        if edge.kind == "gather" and not column:
            return f"{describe(edge.user or edge.source)}: {edge.why}"
    return None


def _only_looked_up(index: GraphIndex, axis: Axis, flow: Flow) -> bool:
    hows = {c.how for n in flow.inside for c in index.axes.facts[n].contracts if axis in leaves(c.axis)}
    return hows == {"lookup"} and not any(n.op == "call_module" and n not in flow.partial for n in flow.inside)


def _split(index: GraphIndex, axis: Axis, flow: Flow, parts: int) -> dict[Axis, Split] | str:
    if axis.size >= parts:
        return {axis: Split(split_evenly(axis.size, parts))}
    partner = _partner(index, axis, flow)
    if partner is None:
        return f"its size {axis.size} is below the {parts} ranks"
    if axis.size * partner.size < parts:
        return f"{axis.size} x {partner.size} heads are fewer than the {parts} ranks"
    other = follow(index, partner)
    stray = other.problems or [
        e.why for e in other.edges if e.kind in ("gather", "stat") or (e.kind == "reduce" and not _shared(flow, other))
    ]
    if stray:
        return f"its size {axis.size} is below the {parts} ranks, and the groups under it can't be split: {stray[0]}"
    flat, held, sizes = group_split(axis.size, partner.size, parts)
    return {
        axis: Split(tuple(held), partner, tuple(flat)),
        partner: Split(tuple(((0, g),) for g in sizes), axis),
    }


def _shared(flow: Flow, other: Flow) -> bool:
    return {(e.source, e.user) for e in other.edges if e.kind == "reduce"} <= {
        (e.source, e.user) for e in flow.edges if e.kind == "reduce"
    }


def _partner(index: GraphIndex, axis: Axis, flow: Flow) -> Axis | None:
    """The leaf that is always the factor just below `axis` where both are, and that only some of the axis' parameters
    have: the queries per key/value head."""
    above: dict[Axis, set[Axis]] = defaultdict(set)
    for name in flow.params:
        for dim in index.axes.params[name]:
            for product in _products(dim):
                parts = [f.find() for f in factors(product)]
                for i, minor in enumerate(parts):
                    above[minor].add(parts[i - 1] if i else minor)
    found = [
        minor
        for minor, majors in above.items()
        if majors == {axis} and minor.kind == "leaf" and index.holders.get(minor, set()) < index.holders[axis]
    ]
    return found[0] if len(found) == 1 else None


def _products(dim: Axis) -> Iterable[Axis]:
    dim = dim.find()
    if dim.kind == "product":
        yield dim
    elif dim.kind == "concat":
        for part in segments(dim):
            yield from _products(part)


__all__ = ["Choice", "Split", "choose", "group_split", "leaves"]
