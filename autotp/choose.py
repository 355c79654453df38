"""Which axes to shard over the tensor-parallel ranks, and how each is split.

Every leaf axis that some parameter carries is followed (`flow.follow`) and priced: elements that must be
sent per forward against weights that need no longer be held and multiplied on every rank. The best ratio
goes first; an axis that would share a parameter or a value with one already chosen is rejected, since one
mesh dim can shard a value only once. So the heads, the MLP's hidden axis, the vocabulary come out on top,
and the residual stream's axis, which would need a collective for every matmul, comes last and conflicts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import prod

from .axes import Axis, factors, leaves, occurrences, segments
from .flow import Flow, follow
from .graph import GraphIndex, describe, flat_axes, numel, tensors_of
from .layouts import DimLayout
from .layouts import split as split_evenly

LENGTH = 2048  # tokens of a text as models are run on


@dataclass(frozen=True)
class Split:
    """How the ranks share one leaf axis. `ranges[rank]` are in units of the leaf, in local order.

    A *group* split belongs to two leaves (key/value heads, queries per key/value head): `partner` is the
    other one. The major leaf's ranges may repeat (a key/value head held by several ranks, or several times
    on one); its `slots[rank]` say which of the partner's indices go with each head that is held: (head,
    start, stop).
    """

    ranges: tuple[DimLayout, ...]
    partner: Axis | None = None
    slots: tuple[tuple[tuple[int, int, int], ...], ...] = ()

    def size(self, rank: int) -> int:
        return sum(stop - start for start, stop in self.ranges[rank])


@dataclass
class Choice:
    """The chosen axes: their splits and flows, and why the others were not chosen."""

    splits: dict[Axis, Split] = field(default_factory=dict)
    flows: dict[Axis, Flow] = field(default_factory=dict)
    rejected: dict[Axis, str] = field(default_factory=dict)


def group_slots(major: int, minor: int, parts: int) -> tuple[tuple[tuple[int, int, int], ...], ...]:
    """Share major*minor query heads, `minor` to each key/value head, over more ranks than there are
    key/value heads.

    Returns per rank its groups of query heads: (key/value head, start, stop). All groups of a rank are of
    one size, the largest for which each has a single key/value head; so the model's own grouped attention
    runs on them.
    """
    ranks = []
    for ((start, stop),) in split_evenly(major * minor, parts):
        count = stop - start
        size = next(
            g
            for g in range(count, 0, -1)
            if count % g == 0 and all(i // minor == (i + g - 1) // minor for i in range(start, stop, g))
        )
        ranks.append(tuple((i // minor, i % minor, i % minor + size) for i in range(start, stop, size)))
    return tuple(ranks)


def choose(
    index: GraphIndex, parts: int, allow: Callable[[Axis, Flow], str | None] = lambda axis, flow: None
) -> Choice:
    """Choose the axes to shard over `parts` ranks. `allow` may veto an axis (a policy), giving the reason."""
    choice = Choice()
    if parts == 1:
        return choice
    candidates: list[tuple[float, int, Axis, Flow]] = []
    tokens = _tokens(index)
    for axis in list(index.holders):
        if axis.size == 1:
            continue
        flow = follow(index, axis)
        reason = allow(axis, flow) or _unfit(index, axis, flow)
        if reason:
            choice.rejected[axis] = reason
            continue
        gain = sum(_numel(index, p) * max(_share(d, axis) for d in index.axes.params[p]) for p in flow.params)
        if not gain:
            continue
        first = min(index.order[n] for n in index.touching[axis])
        candidates.append(((_price(index, flow, tokens) + 1) / gain, first, axis, flow))
    held: dict[str, Axis] = {}
    values: dict[object, Axis] = {}
    for _, _, axis, flow in sorted(candidates, key=lambda c: (c[0], c[1])):
        split = _split(index, axis, flow, parts)
        if isinstance(split, str):
            choice.rejected[axis] = split
            continue
        taken = next((held[p] for p in sorted(flow.params) if p in held), None) or next(
            (values[n] for n in index.nodes if (n in flow.sharded or n in flow.partial) and n in values), None
        )
        if taken is not None:
            choice.rejected[axis] = (
                f"its weights or values are already sharded over another axis (size {taken.size})"
            )
            continue
        for leaf, one in split.items():
            choice.splits[leaf] = one
            for p in flow.params:
                held[p] = axis
        choice.flows[axis] = flow
        values.update(dict.fromkeys(flow.sharded | flow.partial, axis))
    return choice


def _tokens(index: GraphIndex) -> set[Axis]:
    """The leaves that a text lies along: those of token ids and masks, but for the batch."""
    inputs = [n for n in index.nodes if n.op == "placeholder"]
    whole = [n for n in inputs if any(not t.is_floating_point() for t in tensors_of(n.meta["val"]))]
    return {leaf for n in whole for axis in list(flat_axes(index.axes.of[n]))[1:] for leaf in leaves(axis)}


def _price(index: GraphIndex, flow: Flow, tokens: set[Axis]) -> float:
    """Elements sent per forward; a gather or a reduce of a parameter counts fully. Example inputs are short:
    positions by positions are priced as a text of LENGTH tokens would have them, so that an attention's heads
    are split, and not the axis that its scores are summed over."""
    sent = 0.0
    for source in (e.source for e in flow.edges if e.kind in ("gather", "reduce", "stat")):
        counts = sum((occurrences(axis) for axis in flat_axes(index.axes.of[source])), Counter[Axis]())
        positions = sorted(leaf.size for leaf in tokens for _ in range(counts[leaf]))
        sent += numel(source) * prod(max(1.0, LENGTH / size) for size in positions[:-1])
    return sent


def _numel(index: GraphIndex, name: str) -> int:
    return index.parameters[name].numel()


def _share(dim: Axis, axis: Axis) -> float:
    """The share of a dim that is split when `axis` is: one of three fused projections is a third of it."""
    dim = dim.find()
    if dim.kind == "concat":
        return sum(part.size * _share(part, axis) for part in dim.parts) / dim.size
    return max((_share(part, axis) for part in dim.parts), default=float(dim is axis))


def _unfit(index: GraphIndex, axis: Axis, flow: Flow) -> str | None:
    """Why this axis can't be sharded at a reasonable price, or None."""
    if axis in index.unsized:
        return "its size hangs on the data"
    if flow.problems:
        return flow.problems[0]
    if (
        _only_looked_up(index, axis, flow)
        and sum(_numel(index, p) for p in flow.params) < index.largest_weight
    ):
        return "a small table: holding it whole is cheaper than a reduction after every look-up"
    weights = sum(_numel(index, p) for p in flow.params if index.parameters[p].ndim > 1)
    if not weights:
        return "only vectors carry it"
    sent = [e for e in flow.edges if e.kind in ("gather", "reduce", "stat") and not index.looks_up(e.source)]
    products = _products_with_weights(index, flow)
    if products > 1 and len(sent) > (products - 1 if products < 4 else 0.75 * products):
        return f"{len(sent)} collectives for {products} products: about one for every product along it"
    for edge in flow.edges:
        column = index.module_params.get(edge.source) and edge.source not in flow.partial
        if edge.kind == "gather" and not column:
            return f"{describe(edge.user or edge.source)}: {edge.why}"
    return None


def _products_with_weights(index: GraphIndex, flow: Flow) -> int:
    """How often a sharded matrix is multiplied by: a layer that runs twice counts twice."""
    matrices = {p for p in flow.params if index.parameters[p].ndim > 1}
    return sum(
        any(name in matrices for name in index.module_params.get(node, {}).values())
        or any(op.node.op == "get_attr" and op.node.target in matrices for op in index.operands[node])
        for node in flow.inside
    )


def _only_looked_up(index: GraphIndex, axis: Axis, flow: Flow) -> bool:
    hows = {c.how for n in flow.inside for c in index.axes.facts[n].contracts if axis in leaves(c.axis)}
    return hows == {"lookup"} and not any(
        n.op == "call_module" and n not in flow.partial for n in flow.inside
    )


def _split(index: GraphIndex, axis: Axis, flow: Flow, parts: int) -> dict[Axis, Split] | str:
    if axis.size >= parts:
        return {axis: Split(split_evenly(axis.size, parts))}
    partner = _partner(index, axis, flow)
    if partner is None:
        return f"its size {axis.size} is below the {parts} ranks"
    if partner in index.unsized:
        return f"its size {axis.size} is below the {parts} ranks, and that of the groups hangs on the data"
    if axis.size * partner.size < parts:
        return f"{axis.size} x {partner.size} heads are fewer than the {parts} ranks"
    other = follow(index, partner)
    repeated = [
        f"{describe(e.source)}: statistics over key/value heads that several ranks hold"
        for e in flow.edges
        if e.kind == "stat"
        and all(partner not in leaves(c.axis) for c in index.axes.facts[e.source].contracts)
    ]
    stray = (
        other.problems
        or repeated
        or [
            e.why
            for e in other.edges
            if e.kind == "gather" or (e.kind == "reduce" and not _shared(flow, other))
        ]
    )
    if stray:
        below = f"its size {axis.size} is below the {parts} ranks"
        return f"{below}, and the groups under it can't be split: {stray[0]}"
    slots = group_slots(axis.size, partner.size, parts)
    heads = tuple(tuple((head, head + 1) for head, _, _ in held) for held in slots)
    return {
        axis: Split(heads, partner, slots),
        partner: Split(tuple(((0, held[0][2] - held[0][1]),) for held in slots), axis),
    }


def _shared(flow: Flow, other: Flow) -> bool:
    return {(e.source, e.user) for e in other.edges if e.kind == "reduce"} <= {
        (e.source, e.user) for e in flow.edges if e.kind == "reduce"
    }


def _partner(index: GraphIndex, axis: Axis, flow: Flow) -> Axis | None:
    """The leaf that always stands just below `axis`, where some values have `axis` without it: the queries
    per key/value head."""
    above: dict[Axis, set[Axis]] = defaultdict(set)
    for name in flow.params:
        for dim in index.axes.params[name]:
            for parts in _products(dim):
                for i, minor in enumerate(parts):
                    for segment in segments(minor):
                        above[segment.find()].add(parts[i - 1] if i else segment)
    found = [
        minor
        for minor, majors in above.items()
        if majors == {axis}
        and minor.kind == "leaf"
        and minor.size > 1
        and any(minor not in index.carried[n] for n in flow.sharded if axis in index.carried[n])
    ]
    return found[0] if len(found) == 1 else None


def _products(dim: Axis) -> Iterable[list[Axis]]:
    """The products that a dim is joined of, as lists of factors."""
    dim = dim.find()
    if dim.kind == "product":
        yield [f.find() for f in factors(dim)]
    elif dim.kind == "concat":
        for part in dim.parts:
            yield from _products(part)


__all__ = ["Choice", "Split", "choose", "group_slots", "leaves"]
