"""Where in the model each arrow is put: in a leaf layer, at a module's input or output, or at one call in
its code.

In this order of preference: a leaf module that becomes a parallel layer can do the collective itself; a
module boundary can carry it as a hook; only where neither is possible is the module's own forward rewritten
at the call site. A module that is called several times must want the same at every call.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from .axes import Axis
from .capture import ModuleCall, Site
from .graph import GraphIndex, describe, walk
from .kinds import layer_kind
from .place import Arrow, Placement, Use, wants_grad

ArgPath = tuple[int | str, ...]


@dataclass(frozen=True)
class Where:
    """kind: layer (the leaf itself), in (module argument), out (module result), before/after (an operation's
    operand or result)."""

    kind: str
    module: str
    path: ArgPath = ()
    site: Site | None = None

    def __str__(self) -> str:
        at = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in self.path)
        name = self.module or "model"
        if self.site is not None:
            line = self.site.frames[-1].lineno if self.site.frames else "?"
            return f"{name} line {line} {self.kind}{at}"
        return name if self.kind == "layer" else f"{name} {self.kind}{at}"


@dataclass
class Realised:
    places: list[tuple[Arrow, list[Where]]] = field(default_factory=list)
    problems: list[tuple[str, fx.Node, frozenset[Axis]]] = field(default_factory=list)


def realise(index: GraphIndex, placement: Placement) -> Realised:
    """Find a place for every arrow of the placement."""
    calls_of = Counter[str | Site](call.path for call in index.captured.calls)
    calls_of.update(n.meta["site"] for n in index.nodes if n.op == "call_function" and n.meta.get("site"))
    boundaries = Boundaries(index)
    options = [(arrow, list(_options(boundaries, arrow))) for arrow in placement.arrows]
    chosen = [0] * len(options)
    while True:
        counts: dict[tuple[Any, Where], int] = defaultdict(int)
        for (arrow, places), pick in zip(options, chosen, strict=False):
            for where in places[pick] if pick < len(places) else ():
                counts[_what(index, arrow), where] += 1
        moved = False
        for i, (arrow, places) in enumerate(options):
            if chosen[i] >= len(places):
                continue
            what = _what(index, arrow)
            if any(_uneven(where, counts[what, where], calls_of) for where in places[chosen[i]]):
                chosen[i] += 1
                moved = True
        if not moved:
            break
    result = Realised()
    for (arrow, places), pick in zip(options, chosen, strict=False):
        if pick < len(places):
            result.places.append((arrow, places[pick]))
        else:
            result.problems.append(
                (f"no place for the {arrow.kind} of {describe(arrow.source)}", arrow.source, arrow.axes)
            )
    return result


def _what(index: GraphIndex, arrow: Arrow) -> tuple[Any, ...]:
    """What is done at a place: equal for arrows that one conversion can serve."""
    dims: list[int] = []
    if arrow.kind in ("slice", "gather"):
        dims = sorted({d for axis in arrow.axes for d in index.dims_with(arrow.source, axis)})
    return arrow.kind, arrow.enter, tuple(dims)


def _uneven(where: Where, count: int, calls_of: Counter[str | Site]) -> bool:
    """Would the place also convert at calls that want no conversion?"""
    return count < calls_of[where.module if where.site is None else where.site]


class Boundaries:
    """Which module calls are given a value, and which return it."""

    def __init__(self, index: GraphIndex):
        self.index = index
        self.given: dict[fx.Node, list[tuple[ModuleCall, ArgPath]]] = defaultdict(list)
        self.returned: dict[fx.Node, list[tuple[ModuleCall, ArgPath]]] = defaultdict(list)
        for call in index.captured.calls:
            if not call.path:
                continue
            for path, value in walk({**dict(enumerate(call.args)), **call.kwargs}):
                if isinstance(value, fx.Node):
                    self.given[value].append((call, path))
            for path, value in walk(call.output):
                if isinstance(value, fx.Node) and call.first <= index.order[value] <= call.last:
                    self.returned[value].append((call, path))


def _options(boundaries: Boundaries, arrow: Arrow) -> Iterator[list[Where]]:
    source, index = arrow.source, boundaries.index
    uses = [u for u in index.uses[source] if arrow.kind != "enter" or u[0].op == "output" or wants_grad(u[0])]
    every = not arrow.users or len(arrow.users) == len(uses)
    outputs = [u for u in arrow.users if u[0].op == "output"]
    # A leaf call with weights: it becomes a parallel layer.
    leaf = bool(index.module_params.get(source)) and not index.is_own(source)
    made_here = arrow.kind not in ("enter", "slice", "gather")
    gathers = leaf and layer_kind(index, source) in ("linear", "conv", "embedding")
    if leaf and (made_here or (arrow.kind == "gather" and every and gathers)):
        yield [Where("layer", str(source.target))]
    elif made_here and index.looks_up(source):
        yield [Where("layer", str(index.looks_up(source)))]
    if outputs and not every:
        return
    if every and source.op not in ("placeholder", "get_attr"):
        for call, path in sorted(boundaries.returned[source], key=lambda c: c[0].last - c[0].first):
            if not any(
                _within(index, call, user) for user, _ in (arrow.users or uses)
            ):  # else it comes too late
                yield [Where("out", call.path, path)]
    users = arrow.users or tuple(uses)
    at_outputs = any(u.op == "output" for u, _ in users)
    found: list[Where] = []
    left = list(users)
    if not made_here and not at_outputs:
        inmost = arrow.kind == "slice" and source.op == "placeholder"
        found, left = _at_inputs(boundaries, source, users, uses, inmost)
        if not left:
            yield found
    site = source.meta.get("site")
    if every and site is not None and site.frames and source.op == "call_function":
        yield [Where("after", str(source.meta["scope"]), (), site)]
    if made_here or at_outputs:
        return
    for some, rest in ((found, left), ([], list(users))):
        sites = [
            Where("before", str(u.meta["scope"]), p, u.meta.get("site"))
            for u, p in rest
            if u.op != "call_module"
        ]
        if len(sites) == len(rest) and all(w.site is not None for w in sites):
            yield some + sites


def _at_inputs(
    boundaries: Boundaries, source: fx.Node, users: tuple[Use, ...], uses: list[Use], inmost: bool
) -> tuple[list[Where], list[Use]]:
    """Module calls that are given `source` and use it in no other way than `users`; and the users they leave
    over. The outermost calls, so that one conversion serves many uses; or the inmost, where it costs nothing
    and outer modules may be passed by: `generate` calls encoders and towers by itself."""
    index, left = boundaries.index, set(users)
    found: list[Where] = []
    paths: dict[int, list[ArgPath]] = defaultdict(list)
    for call, path in boundaries.given[source]:
        paths[id(call)].append(path)
    calls = {id(c): c for c, _ in boundaries.given[source]}
    outward = 1 if inmost else -1
    for call in sorted(calls.values(), key=lambda c: (outward * (c.last - c.first), c.path)):
        inner = {u for u in uses if _within(index, call, u[0])}
        if not inner & left or not inner <= set(users):
            continue
        found += [Where("in", call.path, p) for p in paths[id(call)]]
        left -= inner
    return found, sorted(left, key=lambda use: (index.order[use[0]], str(use[1])))


def _within(index: GraphIndex, call: ModuleCall, node: fx.Node) -> bool:
    if call.leaf:
        return call.node is node
    return call.first <= index.order[node] <= call.last


__all__ = ["Realised", "Where", "realise"]
