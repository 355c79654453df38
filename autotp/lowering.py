"""From what the planner found to a `Plan`: graph nodes and axes become names, layouts and places."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch.nn.utils import parametrize

from .alone import arrows_around, options_alone, split_alone
from .axes import Axis, factors, leaves, product, show
from .captured import CapturedGraph
from .choose import Choice
from .experts import with_experts
from .foreign import hooks_of
from .graph import RANDOM, GraphIndex, describe, tensors_of
from .ints import plain
from .kinds import parallel_kind
from .layouts import ParamLayout
from .local import dim_layout
from .modalities import arguments_left_out
from .outputs import seen_from_outside
from .place import Arrow
from .plan import Collective, LayerPlan, LocalArgument, LocalInt, ParamPlan, Plan, Region, SliceDim
from .realise import Where
from .solve import argument

if TYPE_CHECKING:
    from .planner import Analysis


def to_plan(model: nn.Module, found: Analysis, tp: int) -> Plan:
    """The analysis as data."""
    index, choice = found.index, found.choice
    params = _params(found, tp)
    alone = _alone(model, found, params, tp)
    for path, layouts in alone.items():
        params |= {p.name: p for p in _alone_params(found, params, path, layouts)}
    kept = {
        name: _why_kept(index, choice, name)
        for name, p in params.items()
        if p.layout is None and len(p.shape) > 1
    }
    collectives, layers = _collectives(found, tp)
    for path in alone:
        layers.append(LayerPlan(path, "column", options_alone(found, path)))
        collectives += _around(found, layers[-1])
    plan = Plan(
        model=type(model).__name__,
        tp=tp,
        params=params,
        layers=tuple(layers),
        collectives=tuple(collectives),
        ints=tuple(_local_ints(found)),
        arguments=tuple(_local_arguments(found)),
        kept=kept,
        notes=(*(f"{describe(node)}: {why}" for node, why in index.axes.unknown), *found.policy.notes),
        roles=found.policy.roles,
        regions=tuple(dict.fromkeys(_regions(found))),
        precision=_precision(found.captured),
        observed=tuple(_observed(found, tp)),
    )
    return with_experts(plan, found.experts)


def modules_alone(model: nn.Module, found: Analysis, tp: int) -> dict[str, dict[str, ParamLayout]]:
    """The modules that the plan splits alone, without the rest of it: path -> layouts of its parameters."""
    return _alone(model, found, _params(found, tp), tp)


def _alone(
    model: nn.Module, found: Analysis, params: dict[str, ParamPlan], tp: int
) -> dict[str, dict[str, ParamLayout]]:
    may = found.policy.splits_alone and not found.experts
    return split_alone(found, params, hooks_of(model), tp) if may else {}


def _alone_params(
    found: Analysis, params: dict[str, ParamPlan], path: str, layouts: dict[str, ParamLayout]
) -> Iterator[ParamPlan]:
    names = next(own for n, own in found.index.module_params.items() if str(n.target) == path)
    for own, layout in layouts.items():
        why = "split alone: no axis of it can be sharded, and much would stay whole"
        yield replace(params[names[own]], layout=layout, gradient="own", why=why)


def _around(found: Analysis, layer: LayerPlan) -> Iterator[Collective]:
    """The arrows in a layer that is split alone, one for each of its calls."""
    where = (Where("layer", layer.module),)
    for node in [n for n in found.index.module_params if str(n.target) == layer.module]:
        for kind, enter in arrows_around(layer):
            at = found.index.operands[node][0].node if kind == "enter" else node
            value, why = next(tensors_of(at.meta["val"])), "its weight is split alone"
            why += ": what follows needs all of it" if kind == "gather" else ""
            size = value.numel() * value.element_size()
            yield Collective(kind, where, tuple(value.shape), size, why, enter)


def _observed(found: Analysis, tp: int) -> Iterator[Collective]:
    """What a hook or a caller may ask to see of the sharded values, and how it is made whole then."""
    for node, where in seen_from_outside(found.index, found.placement):
        value, why = next(tensors_of(node.meta["val"])), "only when somebody looks at it"
        arrow = Arrow("gather", node, (), frozenset(found.choice.flows), why)
        size = value.numel() * value.element_size()
        yield Collective(
            "gather", (where,), tuple(value.shape), size, why, dims=_slice_dims(found, arrow, tp)
        )


def _regions(found: Analysis) -> Iterator[Region]:
    """Where dropout is called as a function on sharded values: between a column and the row that reduces."""
    index, order = found.index, found.index.order
    for flow in found.choice.flows.values():
        inside = sorted(flow.inside, key=order.__getitem__)
        leaf_calls = [n for n in inside if n.op == "call_module"]
        for node in inside:
            name = getattr(node.target, "__name__", "")
            if node.op == "call_module":
                module = index.captured.skeleton.get_submodule(str(node.target))
                draws = isinstance(module, nn.modules.dropout._DropoutNd) and type(module) is not nn.Dropout
                name = "dropout" if draws else ""
            if name not in RANDOM:
                continue
            before = [
                n
                for n in leaf_calls
                if order[n] < order[node] and index.enclosing[n] is index.enclosing[node]
            ]
            after = [n for n in leaf_calls if order[n] > order[node] and n in flow.partial]
            if before and after:
                # attention drops only if its module has a rate for it; the others do what they are named for
                owner = str(node.meta["scope"]) if name == "scaled_dot_product_attention" else None
                yield Region(str(before[0].target), str(after[0].target), owner)


def _precision(captured: CapturedGraph) -> str:
    """The coarsest floating dtype among the values: a float64 model may take its softmax in float32."""
    dtypes = {
        t.dtype for n in captured.graph.nodes for t in tensors_of(n.meta.get("val")) if t.is_floating_point()
    }
    return str(max(dtypes, key=lambda d: torch.finfo(d).eps, default=torch.float32)).removeprefix("torch.")


def _params(found: Analysis, tp: int) -> dict[str, ParamPlan]:
    index, choice, placement = found.index, found.choice, found.placement
    skeleton = found.captured.skeleton
    names: dict[int, list[str]] = defaultdict(list)
    for name, p in skeleton.named_parameters(remove_duplicate=False):
        names[id(p)].append(name)
    lookups = {c.weight for f in index.axes.facts.values() for c in f.contracts if c.how == "lookup"}
    shown: dict[Axis, str] = {}
    blocks = _block_prefixes(skeleton)
    result = {}
    for name, p in skeleton.named_parameters():
        dims = index.axes.params.get(name)
        layouts: dict[int, Any] = {}
        if name in placement.params and dims is not None:
            for d, axis in enumerate(dims):
                ranks = tuple(dim_layout(axis, r, choice.splits) for r in range(tp))
                if any(ranges != ((0, axis.size),) for ranges in ranks):
                    layouts[d] = ranks
        layout = ParamLayout(tuple(p.shape), layouts) if layouts else None
        once = name in placement.once_params
        if layout is not None:
            gradient = "slots" if layout.repeats else "own"
        else:
            gradient = "summed" if name in placement.summed_params else "whole"
        result[name] = ParamPlan(
            name,
            tuple(p.shape),
            layout,
            gradient,
            axes=", ".join(show(d, shown) for d in dims) if dims else "",
            why=_why_sharded(index, choice, name) if layout is not None else "",
            once=once,
            also=tuple(names[id(p)][1:]),
            block=p.ndim > 1 and name not in lookups and (not blocks or name.startswith(blocks)),
        )
    return result


def _block_prefixes(model: nn.Module) -> tuple[str, ...]:
    """The paths under which a model repeats itself: what its ModuleLists hold (a list of parametrizations is
    none of layers)."""
    lists = [n for n, m in model.named_modules() if isinstance(m, nn.ModuleList)]
    modules = model.get_submodule
    return tuple(f"{n}." for n in lists if not isinstance(modules(n), parametrize.ParametrizationList))


def _why_sharded(index: GraphIndex, choice: Choice, name: str) -> str:
    axes = [a for a in choice.flows if a in index.param_leaves[name]]
    return "; ".join(
        f"axis of {a.size}: {len(choice.flows[a].params)} parameters share it, "
        f"{sum(e.kind == 'reduce' for e in choice.flows[a].edges)} reductions"
        for a in axes
    )


def _why_kept(index: GraphIndex, choice: Choice, name: str) -> str:
    if name not in index.used_params:
        others = arguments_left_out(index.captured)
        told = f" (forward also takes {', '.join(others)})" if others else ""
        return f"nothing in the captured run uses it; pass example_inputs that do{told}"
    reasons = [
        f"axis of {a.size}: {choice.rejected[a]}"
        for a in index.param_leaves.get(name, ())
        if a in choice.rejected
    ]
    return "; ".join(sorted(reasons, key=lambda r: (len(r), r))[:3]) or "no axis of it can be sharded"


def _collectives(found: Analysis, tp: int) -> tuple[list[Collective], list[LayerPlan]]:
    index, choice = found.index, found.choice
    layers: dict[str, tuple[str, dict[str, Any]]] = {}
    for node in sorted(found.placement.inside, key=index.order.__getitem__):
        if node.op == "call_module":
            kind = parallel_kind(index, choice, node)
            if kind:
                layers.setdefault(str(node.target), (kind, {}))
        elif (table := index.looks_up(node)) is not None:
            layers.setdefault(table, ("vocab" if node in _reduced(found) else "embedding", {}))
    collectives = []
    put: set[tuple[str, Where]] = set()  # one conversion at a place serves all calls that go through it
    for arrow, all_places in found.realised.places:
        places = [w for w in dict.fromkeys(all_places) if (arrow.kind, w) not in put]
        put.update((arrow.kind, w) for w in places)
        if not places:
            continue
        node = arrow.source
        value = next(tensors_of(node.meta["val"]))
        shares: tuple[tuple[int, int], ...] = ()
        dims: tuple[SliceDim, ...] = ()
        if arrow.kind == "mean":
            shares = tuple(_share(arrow, choice, r) for r in range(tp))
        if arrow.kind in ("slice", "gather"):
            dims = _slice_dims(found, arrow, tp)
        collectives.append(
            Collective(
                arrow.kind,
                tuple(places),
                tuple(value.shape),
                value.numel() * value.element_size(),
                arrow.why,
                arrow.enter,
                dims,
                shares,
            )
        )
        for where in places:
            if where.kind == "layer" and where.module in layers:
                layers[where.module][1][arrow.kind] = arrow.enter if arrow.kind == "reduce" else True
    return collectives, [LayerPlan(m, k, o) for m, (k, o) in layers.items()]


def _reduced(found: Analysis) -> set[fx.Node]:
    return {a.source for a in found.placement.arrows if a.kind == "reduce"}


def _share(arrow: Arrow, choice: Choice, rank: int) -> tuple[int, int]:
    local, whole = 1, 1
    axes = {a for axis in arrow.axes for a in (axis, choice.splits[axis].partner) if a is not None}
    for axis in axes:
        local, whole = local * choice.splits[axis].size(rank), whole * axis.size
    return local, whole


def _slice_dims(found: Analysis, arrow: Arrow, tp: int) -> tuple[SliceDim, ...]:
    """How each dim of the value that carries a sharded axis is cut. Leading factors that vary at run time
    (the batch in a batch*heads dim) are left out of the unit."""
    index = found.index
    dynamic = {leaf for n in index.nodes if n.op == "placeholder" for leaf in index.carried[n]}
    cut = []
    for d, axis in enumerate(index.axes.of[arrow.source]):
        below = set(leaves(axis))
        if not below & arrow.axes:
            continue
        parts = [axis] if axis.kind != "product" else factors(axis)
        while parts and parts[0].find() not in arrow.axes and set(leaves(parts[0])) <= dynamic:
            parts = parts[1:]
        ranks = [tuple(_product_layout(parts, r, found.choice)) for r in range(tp)]
        unit = 1
        for f in parts:
            unit *= f.size
        cut.append(SliceDim(d, unit, tuple(ranks)))
    return tuple(cut)


def _product_layout(parts: list[Axis], rank: int, choice: Choice):
    return dim_layout(product(parts), rank, choice.splits)


def _local_ints(found: Analysis) -> list[LocalInt]:
    keys = sorted({key for s in found.solutions for key in s.attrs})
    result = []
    for module, name in keys:
        value = found.index.attribute(module, name)
        result.append(
            LocalInt(module, name, value, tuple(s.attrs.get((module, name), value) for s in found.solutions))
        )
    return result


def _local_arguments(found: Analysis) -> list[LocalArgument]:
    result: dict[Where, LocalArgument] = {}
    keys = {key for s in found.solutions for key in s.patches}
    for node, path in sorted(keys, key=lambda k: (found.index.order[k[0]], str(k[1]))):
        whole = plain(argument(node, path))
        where = Where("argument", str(node.meta["scope"]), path, node.meta["site"])
        local = tuple(s.patches.get((node, path), whole) for s in found.solutions)
        result.setdefault(where, LocalArgument(where, whole, local))
    return list(result.values())
