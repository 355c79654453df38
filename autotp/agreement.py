"""Whether a plan holds in another way through the model's code: it is compared with the plan made of that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .axes import Axis, layout, leaves
from .data_ways import Idle
from .graph import GraphIndex
from .layouts import Layout, split
from .plan import Plan


def allowed_by(plan: Plan, index: GraphIndex) -> dict[Axis, str]:
    """The axes of another capture that `plan` does not shard, as axes to refuse."""
    wanted: set[Axis] = set()
    for name, p in plan.params.items():
        if p.layout is not None and name in index.axes.params:
            for d, ranks in p.layout.dims.items():
                wanted |= _split_in(index.axes.params[name][d], ranks)
    return {axis: "the plan does not shard it" for axis in index.holders if axis not in wanted}


def _split_in(dim: Axis, ranks: Layout) -> set[Axis]:
    """The leaves of `dim` that are split where its layout is `ranks`: of heads * head_dim the heads, if whole
    heads are held. All, where no single leaf split evenly gives that layout."""
    all_of_it = set(leaves(dim))

    def gives(leaf: Axis) -> bool:
        return ranks == tuple(layout(dim, {leaf: held}) for held in split(leaf.size, len(ranks)))

    return {leaf for leaf in all_of_it if leaf.size >= len(ranks) and gives(leaf)} or all_of_it


def disagreement(plan: Plan, other: Plan, index: GraphIndex) -> str | None:
    """What a plan made of another way (`index`) wants otherwise than `plan`, for the modules and weights met
    there."""
    idle = Idle(index)
    called, used, trained = idle.modules, idle.weights(), idle.weights(trained=True)
    for name, p in other.params.items():
        mine = plan.params[name]
        differs = (p.layout, p.once) != (mine.layout, mine.once)
        if (name in used and differs) or (name in trained and p.gradient != mine.gradient):
            return f"{name} as {p.placement}, not {mine.placement}"
    layers = {la.module: (la.kind, dict(la.options)) for la in plan.layers}
    others = {la.module: (la.kind, dict(la.options)) for la in other.layers}
    for module in sorted((layers.keys() | others.keys()) & called):
        if layers.get(module) != others.get(module):
            return f"another layer for {module}"
    ints = {(i.module, i.name): i.local for i in plan.ints}
    for i in other.ints:
        if ints.get((i.module, i.name)) != i.local:
            return f"{i.module}.{i.name} = {i.local[0]}"

    def at(keep: Callable[[Any], bool], p: Plan) -> set[Any]:
        return {(c.kind, c.enter, w) for c in p.collectives for w in c.where if keep(w)}

    def met(w: Any) -> bool:
        return w.module in called if w.site is None else w.site in idle.sites

    here, there = at(met, plan), at(met, other)
    for kind, _, w in sorted(here - there, key=str):
        if not idle.at(kind, w):
            return f"no {kind} at {w}"
    inside = at(lambda w: w.site is not None, other) - at(lambda w: w.site is not None, plan)
    for kind, _, w in sorted(there - here | inside, key=str):
        if not idle.at(kind, w):
            return f"a {kind} at {w}"
    arguments = {(a.where, a.local) for a in plan.arguments}
    lacking = (a for a in other.arguments if (a.where, a.local) not in arguments)
    return next((f"{a.local[0]} at {a.where}" for a in lacking), None)
