"""From a model to a `Plan`: capture, propagate, choose, place, realise, solve, and check against a second capture.

What can't be realised for an axis is a reason not to choose it: then the planner chooses again without it. It never
patches over a doubt. So the loop ends with a plan in which every axis that is sharded is proven, and a reason for each
that is not.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from .axes import Axis, factors, leaves, product, show
from .capture import CapturedGraph, capture
from .choose import Choice, choose
from .errors import AutotpError, PlanError
from .flow import Flow, GraphIndex, describe, tensors_of
from .inputs import bind_inputs
from .inputs import example_inputs as make_inputs
from .ints import plain
from .layouts import ParamLayout
from .local import dim_layout
from .outputs import seen_from_outside
from .place import Arrow, Placement, place
from .plan import Collective, LayerPlan, LocalArgument, LocalInt, ParamPlan, Plan, Region, SliceDim
from .policy import BoundPolicy, Policy, load
from .propagate import propagate
from .recapture import check_plan, hollow
from .realise import Realised, Where, realise
from .skeleton import leaf_class, linear_kind
from .solve import Solution, argument, solve


@dataclass
class Analysis:
    """Everything the planner found out on the way: for dumps, policies and the curious."""

    captured: CapturedGraph
    index: GraphIndex
    choice: Choice
    placement: Placement
    realised: Realised
    solutions: list[Solution]  # per rank
    policy: BoundPolicy


def analyse(model: nn.Module, tp: int, inputs: Mapping[str, Any] | None = None, policy: Policy | None = None) -> Analysis:
    """Choose axes for `model` over `tp` ranks; a policy may refuse some.

    Raises CaptureError where the model can't be recorded.
    """
    captured = capture(model, **(inputs if inputs is not None else make_inputs(model)))
    index = GraphIndex(captured, propagate(captured))
    return decide(index, tp, (policy or Policy()).bind(index, tp), {})


def decide(index: GraphIndex, tp: int, policy: BoundPolicy, refused: dict[Axis, str]) -> Analysis:
    """Choose axes other than the `refused` ones (which grow by those that turn out to be impossible)."""

    def allow(axis: Axis, flow: Flow) -> str | None:
        return refused.get(axis) or policy.veto(axis, flow)

    while True:
        choice = choose(index, tp, allow)
        placement = place(index, choice)
        realised = realise(index, placement)
        solutions = _solve_ranks(index, choice, tp)
        problems = [(why, {axis}) for why, axis in placement.problems]
        problems += [(why, _nearest_axes(choice, node, set(axes))) for why, node, axes in realised.problems]
        problems += [(why, set(axes)) for s in solutions for why, axes in s.problems]
        problems += [(why, set(axes)) for why, axes in _unsupported(index, choice, placement)]
        given_up = {axis: why for why, axes in problems for axis in (axes or set(choice.flows)) if axis in choice.flows}
        if not given_up:
            if problems:
                raise PlanError(f"no axis explains these problems: {[why for why, _ in problems][:3]}")
            return Analysis(index.captured, index, choice, placement, realised, solutions, policy)
        refused.update(given_up)


def _axes_in(found: Analysis, module: str) -> set[Axis]:
    """The chosen axes that `module` computes with; its parent's where it has none."""
    while module:
        axes = {
            axis
            for axis, flow in found.choice.flows.items()
            if any(f"{n.meta.get('scope')}.".startswith(f"{module}.") for n in flow.inside)
        }
        if axes:
            return axes
        module = module.rpartition(".")[0]
    return set()


def _nearest_axes(choice: Choice, node: fx.Node, axes: set[Axis]) -> set[Axis]:
    """The axes to give up for an arrow without a place: its own, or those of the sharded operations it leads to."""
    todo, seen = [node], {node}
    while todo and not axes:
        axes = {a for n in todo for a, flow in choice.flows.items() if n in flow.inside}
        todo = [u for n in todo for u in n.users if u not in seen]
        seen.update(todo)
    return axes


def _solve_ranks(index: GraphIndex, choice: Choice, tp: int) -> list[Solution]:
    """The local numbers of every rank; ranks with the same sizes share one solution."""
    solved: dict[tuple[int, ...], Solution] = {}
    found = []
    for rank in range(tp):
        sizes = tuple(split.size(rank) for split in choice.splits.values())
        if sizes not in solved:
            solved[sizes] = solve(index, choice, rank)
        found.append(solved[sizes])
    return found


def _unsupported(index: GraphIndex, choice: Choice, placement: Placement) -> list[tuple[str, frozenset[Axis]]]:
    """Operations inside sharded regions that no layer or arrow can do."""
    found = []
    for arrow in placement.arrows:
        node = arrow.source
        leaf = node.op == "call_module"
        if arrow.kind in ("norm", "var", "std") and not (leaf and layer_kind(index, node) == "norm"):
            found.append((f"{describe(node)}: its statistics over a sharded axis can't be reduced", arrow.axes))
    for node in placement.inside:
        if node.op == "call_function" and any(c.how == "lookup" and set(leaves(c.axis)) & set(choice.flows) for c in index.axes.facts[node].contracts):
            if index.looks_up(node) is None:
                axes = frozenset(a for c in index.axes.facts[node].contracts for a in leaves(c.axis) if a in choice.flows)
                found.append((f"{describe(node)}: a look-up outside of an nn.Embedding", axes))
        if node.op != "call_module" or layer_kind(index, node) != "other":
            continue
        touched = [a for name in index.module_params[node].values() for a in index.param_leaves.get(name, ()) if a in choice.flows]
        if touched:
            kind = type(index.captured.skeleton.get_submodule(str(node.target))).__name__
            found.append((f"{describe(node)}: no parallel form of {kind}", frozenset(touched)))
    return found


def layer_kind(index: GraphIndex, node: fx.Node) -> str:
    """Which parallel layer a leaf call can become; `other` if none."""
    module = index.captured.skeleton.get_submodule(str(node.target))
    if linear_kind(module):
        return "linear"
    cls = leaf_class(module)
    if cls is None:
        return "embedding" if isinstance(module, nn.Embedding) else "other"
    if issubclass(cls, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return "conv" if module.groups == module.in_channels > 1 else "other"  # type: ignore[attr-defined]
    for kind, classes in {
        "embedding": (nn.Embedding,),
        "norm": (nn.LayerNorm, nn.RMSNorm),
        "attention": (nn.MultiheadAttention,),
        "dropout": (nn.Dropout,),
    }.items():
        if issubclass(cls, classes):
            return kind
    return "other"


def plan(
    model: nn.Module, tp: int, policy: Any = None, *, example_inputs: Any = None, check: bool = True
) -> Plan:
    """Plan `model` over `tp` tensor-parallel ranks. Needs no process group, no GPU and no weights (meta is fine).

    policy: path of a policy YAML, a dict of that form, a transformers `tp_plan`, or a list of these (later ones win).
    example_inputs: dict or tuple for `model.forward`; made from its signature and config when not given.
    check: capture the rewritten model too, and compare (`recapture`).
    Raises CaptureError, PlanError, PolicyError. What stays replicated is in `Plan.kept`, with reasons.
    """
    return plan_and_analysis(model, tp, policy, example_inputs=example_inputs, check=check)[0]


def plan_and_analysis(
    model: nn.Module, tp: int, policy: Any = None, *, example_inputs: Any = None, check: bool = True
) -> tuple[Plan, Analysis]:
    """`plan`, and all that was found out on the way."""
    if tp < 1:
        raise PlanError(f"tp={tp}: give a number of ranks of at least 1.")
    quiet = hollow(model).eval()  # dropout and layer drop would make the graph a matter of chance
    inputs = given_inputs(quiet, example_inputs)
    found = analyse(quiet, tp, inputs, load(policy))
    refused: dict[Axis, str] = {}
    while True:
        result = to_plan(model, found, tp)
        found.policy.check(result, found.index)
        if not check or tp == 1:
            return result, found
        try:
            check_plan(quiet, result, found)
            return result, found
        except AutotpError as doubt:
            axes = _axes_in(found, doubt.module or "")
            if not axes:
                raise
            refused.update(dict.fromkeys(axes, str(doubt).splitlines()[0]))
            found = decide(found.index, tp, found.policy, refused)


def given_inputs(model: nn.Module, given: Any) -> dict[str, Any]:
    """The example inputs as keyword arguments; made from the model where none are given."""
    return make_inputs(model) if given is None else bind_inputs(model, given)


def to_plan(model: nn.Module, found: Analysis, tp: int) -> Plan:
    """The analysis as data."""
    index, choice = found.index, found.choice
    params = _params(found, tp)
    kept = {name: _why_kept(index, choice, name) for name, p in params.items() if p.layout is None and len(p.shape) > 1}
    collectives, layers = _collectives(found, tp)
    return Plan(
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


def _observed(found: Analysis, tp: int) -> Iterator[Collective]:
    """What a hook or a caller may ask to see of the sharded values, and how it is made whole then."""
    for node, where in seen_from_outside(found.index, found.placement):
        value, why = next(tensors_of(node.meta["val"])), "only when somebody looks at it"
        arrow = Arrow("gather", node, (), frozenset(found.choice.flows), why)
        size = value.numel() * value.element_size()
        yield Collective("gather", (where,), tuple(value.shape), size, why, dims=_slice_dims(found, arrow, tp))


def _regions(found: Analysis) -> Iterator[Region]:
    """Where dropout is called as a function on sharded values: between a column and the row that reduces."""
    index, order = found.index, found.index.order
    for flow in found.choice.flows.values():
        inside = sorted(flow.inside, key=order.__getitem__)
        leaf_calls = [n for n in inside if n.op == "call_module"]
        for node in inside:
            if getattr(node.target, "__name__", "") not in ("dropout", "scaled_dot_product_attention"):
                continue
            before = [n for n in leaf_calls if order[n] < order[node] and index.enclosing[n] is index.enclosing[node]]
            after = [n for n in leaf_calls if order[n] > order[node] and n in flow.partial]
            if before and after:
                yield Region(str(before[0].target), str(after[0].target), str(node.meta["scope"]))


def _precision(captured: CapturedGraph) -> str:
    """The coarsest floating dtype among the values: a float64 model may take its softmax in float32."""
    dtypes = {t.dtype for n in captured.graph.nodes for t in tensors_of(n.meta.get("val")) if t.is_floating_point()}
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
            name, tuple(p.shape), layout, gradient,
            axes=", ".join(show(d, shown) for d in dims) if dims else "",
            why=_why_sharded(index, choice, name) if layout is not None else "",
            once=once, also=tuple(names[id(p)][1:]),
            block=p.ndim > 1 and name not in lookups and (not blocks or name.startswith(blocks)),
        )
    return result


def _block_prefixes(model: nn.Module) -> tuple[str, ...]:
    """The paths under which a model repeats itself: what its ModuleLists hold."""
    return tuple(f"{n}." for n, m in model.named_modules() if isinstance(m, nn.ModuleList))


def _why_sharded(index: GraphIndex, choice: Choice, name: str) -> str:
    axes = [a for a in choice.flows if a in index.param_leaves[name]]
    return "; ".join(
        f"axis of {a.size}: {len(choice.flows[a].params)} parameters share it, "
        f"{sum(e.kind == 'reduce' for e in choice.flows[a].edges)} reductions"
        for a in axes
    )


def _why_kept(index: GraphIndex, choice: Choice, name: str) -> str:
    if name not in index.used_params:
        return "nothing in the captured run uses it; pass example_inputs that do"
    reasons = [
        f"axis of {a.size}: {choice.rejected[a]}" for a in index.param_leaves.get(name, ()) if a in choice.rejected
    ]
    return "; ".join(sorted(reasons, key=lambda r: (len(r), r))[:3]) or "no axis of it can be sharded"


def _layout_of(name: str, found: Analysis, tp: int, dim: int) -> tuple:
    axis = found.index.axes.params[name][dim]
    return tuple(dim_layout(axis, r, found.choice.splits) for r in range(tp))


def _collectives(found: Analysis, tp: int) -> tuple[list[Collective], list[LayerPlan]]:
    index, choice = found.index, found.choice
    layers: dict[str, tuple[str, dict[str, Any]]] = {}
    for node in sorted(found.placement.inside, key=index.order.__getitem__):
        if node.op == "call_module":
            kind = _parallel_kind(index, choice, node)
            if kind:
                layers.setdefault(str(node.target), (kind, {}))
        elif (table := index.looks_up(node)) is not None:
            layers.setdefault(table, ("vocab" if node in _reduced(found) else "embedding", {}))
    collectives = []
    for arrow, places in found.realised.places:
        node = arrow.source
        value = next(tensors_of(node.meta["val"]))
        shares, dims = (), ()
        if arrow.kind == "mean":
            shares = tuple(_share(arrow, choice, r) for r in range(tp))
        if arrow.kind in ("slice", "gather"):
            dims = _slice_dims(found, arrow, tp)
        collectives.append(
            Collective(arrow.kind, tuple(places), tuple(value.shape), value.numel() * value.element_size(), arrow.why,
                       arrow.enter, dims, shares)
        )
        for where in places:
            if where.kind == "layer" and where.module in layers:
                layers[where.module][1][arrow.kind] = arrow.enter if arrow.kind == "reduce" else True
    return collectives, [LayerPlan(m, k, o) for m, (k, o) in layers.items()]


def _reduced(found: Analysis) -> set[fx.Node]:
    return {a.source for a in found.placement.arrows if a.kind == "reduce"}


def _parallel_kind(index: GraphIndex, choice: Choice, node: fx.Node) -> str | None:
    kind = layer_kind(index, node)
    own = {o: index.param_leaves.get(n, frozenset()) & set(choice.flows) for o, n in index.module_params[node].items()}
    if kind == "dropout":
        return "dropout"
    if not any(own.values()):
        return None
    if kind != "linear" and kind != "embedding":
        return kind
    weight = index.axes.params[index.module_params[node]["weight"]]
    module = index.captured.skeleton.get_submodule(str(node.target))
    sharded = [d for d, axis in enumerate(weight) if set(leaves(axis)) & set(choice.flows)]
    if kind == "embedding":
        return "vocab" if sharded == [0] else "embedding"
    out_dim = 0 if linear_kind(module) == "linear" else 1
    return "column" if sharded == [out_dim] else "row"


def _share(arrow: Arrow, choice: Choice, rank: int) -> tuple[int, int]:
    local, whole = 1, 1
    axes = {a for axis in arrow.axes for a in (axis, choice.splits[axis].partner) if a is not None}
    for axis in axes:
        local, whole = local * choice.splits[axis].size(rank), whole * axis.size
    return local, whole


def _slice_dims(found: Analysis, arrow: Arrow, tp: int) -> tuple[SliceDim, ...]:
    """How each dim of the value that carries a sharded axis is cut. Leading factors that vary at run time (the batch in a
    batch*heads dim) are left out of the unit."""
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
        result.append(LocalInt(module, name, value, tuple(s.attrs.get((module, name), value) for s in found.solutions)))
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


def warn_replicated(result: Plan, strict: bool) -> None:
    """Say which weights of the blocks stay whole, and why; an error under `strict`."""
    kept = {n: why for n, why in result.kept.items() if result.params[n].block}
    if not kept:
        return
    lines = [f"  {name}: {why}" for name, why in kept.items()]
    text = f"{len(kept)} block weights of {result.model} stay whole on every rank:\n" + "\n".join(lines[:12])
    if len(lines) > 12:
        text += f"\n  … and {len(lines) - 12} more (print the plan)"
    if strict:
        raise PlanError(text + "\nPass strict=False to run with them replicated.")
    warnings.warn(text, stacklevel=3)


__all__ = ["Analysis", "analyse", "plan", "to_plan", "warn_replicated"]
