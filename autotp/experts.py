"""Experts split by expert: which modules can be, proven on their graph, and what that adds to a plan.

A module of experts is called with hidden states `[tokens, width]`, the numbers of the experts that each token
chose `[tokens, k]` and their weights `[tokens, k]`, and holds stacks of weights from which it picks by those
numbers. Call a pair (token, one of its k) a route. If nothing in the module mixes routes but one sum over
the k of a token, the result is a sum of what each route gives alone. Then every rank can hold some of the
experts, compute the routes that chose them, and the ranks' results are summed: the experts' parallelism of
GShard (Lepikhin et al., 2020) without an exchange of tokens, since all ranks have all tokens here.

The axes say whether it is so: no operation may forbid, count positions along, or contract the tokens' axes;
the axis of k may only be summed over, and what follows the sum must be linear in it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import fx, nn

from .axes import Axis, leaves
from .captured import ModuleCall
from .errors import PlanError
from .graph import RANDOM, GraphIndex, describe, flat_axes, walk
from .ints import TrackedFloat, TrackedInt, atoms, plain
from .layouts import ParamLayout, split
from .place import Arrow, Placement, wants_grad
from .plan import LayerPlan, LocalInt, ParamPlan, Plan
from .realise import Where

RESHAPES = ("reshape", "view", "flatten", "ravel", "contiguous")
PICKS = ("__getitem__", "getitem")


@dataclass(frozen=True)
class Experts:
    """A module whose experts can be split: its stacks of weights, `count` experts along dim 0 of each."""

    module: str
    calls: tuple[ModuleCall, ...]
    stacks: tuple[str, ...]
    count: int
    counters: tuple[str, ...]  # attributes of the module that say how many experts there are


def find_experts(index: GraphIndex, tp: int) -> tuple[Experts, ...]:
    """All modules of experts in the graph. PlanError where there are none, or where one can't be split."""
    stacks: dict[str, set[str]] = defaultdict(set)
    for node in index.nodes:
        name = _picked(index, node)
        if name is not None:
            stacks[name.rpartition(".")[0]].add(name)
    found, failed = [], []
    for module, names in stacks.items():
        if all(index.parameters[name].ndim < 3 for name in names):
            continue  # a table
        calls = tuple(c for c in index.captured.calls if c.path == module)
        counts = {index.parameters[name].shape[0] for name in names}
        why: str | None = None
        if len(counts) != 1:
            why = f"its stacks of weights hold {sorted(counts)} experts"
        elif max(counts) < tp:
            why = f"its {max(counts)} experts are fewer than the {tp} ranks; use a smaller ep"
        why = why or next((w for c in calls if (w := _mixes_routes(index, c, names))), None)
        if why is not None or not calls:
            failed.append(f"  {module or 'the model'}: {why or 'it is not called itself'}")
            continue
        (count,) = counts
        counters = tuple(_counters(index, module, calls, count))
        found.append(Experts(module, calls, tuple(sorted(names)), count, counters))
    if failed:
        raise PlanError(
            "ep: these experts can't be split by expert; without ep their hidden units are split:\n"
            + "\n".join(failed[:8])
        )
    if not found:
        raise PlanError(
            "ep: the model has no module of experts, called with (hidden states, numbers, weights), that "
            "picks them by number from stacks of weights; leave ep out."
        )
    return tuple(found)


def _picked(index: GraphIndex, node: fx.Node) -> str | None:
    """The stack of weights from which this operation picks by numbers that are computed, if it does."""
    if getattr(node.target, "__name__", "") not in PICKS or node.op != "call_function":
        return None
    source, number = node.meta["args"][:2]
    if not isinstance(source, fx.Node) or source.op != "get_attr" or not isinstance(number, fx.Node):
        return None
    value = number.meta["val"]
    integer = isinstance(value, torch.Tensor) and not value.is_floating_point() and value.dtype != torch.bool
    name = str(source.target)
    return name if integer and index.is_parameter(name) and index.parameters[name].ndim > 1 else None


def _mixes_routes(index: GraphIndex, call: ModuleCall, stacks: set[str]) -> str | None:
    """Why the result of a call is not proven to be a sum of what each route gives alone; None if it is."""
    args = call.args
    if len(args) != 3 or call.kwargs or not all(isinstance(a, fx.Node) for a in args):
        return "it is not called with (hidden states, numbers, weights), by position"
    hidden, numbers, weights = args
    shapes = [a.meta["val"].shape for a in args]
    if any(len(s) != 2 for s in shapes) or shapes[1] != shapes[2] or not isinstance(call.output, fx.Node):
        shown = ", ".join(str(list(s)) for s in shapes)
        return f"its arguments are of shapes {shown}, not [tokens, width] and twice [tokens, k]"
    of = index.axes.of
    tokens, chosen = of[numbers]
    if not all(_alike(tokens, of[value][0]) for value in (hidden, weights, call.output)):
        return "its arguments and its result have not the same tokens"
    if not _alike(chosen, of[weights][1]):
        return "its numbers and weights are not of the same routes"
    per_token, routes = set(leaves(chosen)), set(leaves(tokens)) | set(leaves(chosen))
    body = index.nodes[call.first : call.last + 1]
    own, aliases, summed = set(body), {numbers}, set[fx.Node]()
    for node in body:
        operands = [op.node for op in index.operands[node]]
        name = getattr(node.target, "__name__", str(node.target))
        if node.op == "get_attr":
            if index.is_parameter(str(node.target)) and str(node.target) not in stacks:
                (user, _), *_ = index.uses[node]
                return f"{describe(user)}: it uses {node.target}, which is no stack of experts"
            continue
        if name in RANDOM or (node.op == "call_module" and _drops(index, str(node.target))):
            return f"{describe(node)}: each rank would draw another number of random numbers"
        stray = [o for o in operands if o not in own and o not in args]
        if stray:
            return f"{describe(node)}: it uses {describe(stray[0])}, which is not one of its arguments"
        if _picked(index, node) is None:
            if any(o in aliases for o in operands):
                if name not in RESHAPES or routes != {a for d in of[node] for a in leaves(d)}:
                    return f"{describe(node)}: the numbers of the experts are used for more than picking"
                aliases.add(node)
            if any(o.op == "get_attr" and str(o.target) in stacks for o in operands):
                return f"{describe(node)}: it uses the weights of all experts at once"
        elif node.meta["args"][1] not in aliases:
            return f"{describe(node)}: it picks by other numbers than those it was given"
        why = _mixed_by(index, node, routes, per_token)
        if why is not None:
            return f"{describe(node)}: {why}"
        facts = index.facts(node)
        partial = [o for o in operands if o in summed]
        if partial:
            if facts is None or not _linear(index, node, summed):
                return f"{describe(node)}: it is not linear in the sum over a token's experts"
            summed.add(node)
        if facts is not None and any(set(leaves(c.axis)) & per_token for c in facts.contracts):
            summed.add(node)
        if node is not call.output and any(u not in own for u, _ in index.uses[node]):
            return f"{describe(node)}: its value is used outside of the module"
    if per_token and call.output not in summed:
        return "its result is no sum over a token's experts"
    return None


def _drops(index: GraphIndex, module: str) -> bool:
    return isinstance(index.captured.skeleton.get_submodule(module), nn.modules.dropout._DropoutNd)


def _alike(one: Axis, other: Axis) -> bool:
    return one.size == other.size and list(leaves(one)) == list(leaves(other))


def _mixed_by(index: GraphIndex, node: fx.Node, routes: set[Axis], per_token: set[Axis]) -> str | None:
    """How an operation lets one route's value depend on another's, but for the sum over a token's."""
    facts = index.facts(node)
    carried = {a for op in index.operands[node] for a in index.carried[op.node]} & routes
    if facts is None:
        return "an operation without a rule" if carried else None
    for forbid in facts.forbids:
        if set(leaves(forbid.axis)) & routes:
            return forbid.why
    if any(set(leaves(axis)) & routes for axis in facts.positional):
        return "its values depend on the route's position"
    for contract in facts.contracts:
        over = set(leaves(contract.axis)) & routes
        if over and not (over == per_token and contract.how == "sum"):
            return f"a {contract.how} over the routes"
    made = {a for d in flat_axes(index.axes.of.get(node)) for a in leaves(d)}
    gone = carried - made - {a for c in facts.contracts for a in leaves(c.axis)}
    return "it drops some of the routes" if gone and _picked(index, node) is None else None


def _linear(index: GraphIndex, node: fx.Node, summed: set[fx.Node]) -> bool:
    facts = index.facts(node)
    if facts is None or facts.linear is None:
        return False
    how, positions = facts.linear
    mine = [op.node in summed for op in index.operands[node] if op.path[0] in positions]
    others = [op for op in index.operands[node] if op.path[0] not in positions and op.node in summed]
    return not others and (all(mine) if how == "joint" else sum(mine) == 1)


def _counters(index: GraphIndex, module: str, calls: tuple[ModuleCall, ...], count: int) -> Iterator[str]:
    """The module's own int attributes of that value, but for those that were read as another size."""
    sizes = set()
    for call in calls:
        for node in index.nodes[call.first : call.last + 1]:
            for _, value in walk((node.meta.get("args", ()), node.meta.get("kwargs", {}))):
                if isinstance(value, (TrackedInt, TrackedFloat)):
                    sizes |= {a.name for a in atoms(value.expr) if a.module == module}
    for name, value in vars(index.captured.skeleton.get_submodule(module)).items():
        if isinstance(value, int) and not isinstance(value, bool) and not name.startswith("_"):
            if plain(value) == count and name not in sizes:
                yield name


def exchanges(
    experts: tuple[Experts, ...], placement: Placement
) -> Iterator[tuple[Arrow, list[Where]]]:
    """What the ranks exchange at each module: the gradients of its inputs, and its result. PlanError where a
    gradient would arrive in parts."""
    for one in experts:
        parts = [n for c in one.calls for n in c.args if n in placement.sharded]
        parts += [c.output for c in one.calls if c.output in placement.partial_gradient]
        if parts:
            raise PlanError(f"ep: {one.module}: {describe(parts[0])} is on each rank in part.")
        for call in one.calls:
            for i in (0, 2):
                if wants_grad(call.args[i]):
                    why = "each rank computes with its own experts"
                    yield Arrow("enter", call.args[i], why=why), [Where("in", one.module, (i,))]
            yield Arrow("reduce", call.output, why="the sum over all experts"), [Where("out", one.module)]


def set_apart(index: GraphIndex, experts: tuple[Experts, ...]) -> dict[Axis, str]:
    """Mark what the modules compute, so that no gradient arrives there in parts; give the axes of their
    weights, which are then not split otherwise, with that reason."""
    refused: dict[Axis, str] = {}
    for one in experts:
        for call in one.calls:
            for node in index.nodes[call.first : call.last + 1]:
                node.meta["by_expert"] = True
        for name in one.stacks:
            why = "the experts that carry it are split by expert (ep)"
            refused.update(dict.fromkeys(index.param_leaves[name], why))
    return refused


def with_experts(plan: Plan, experts: tuple[Experts, ...]) -> Plan:
    """The plan with these experts split over the ranks."""
    params: dict[str, ParamPlan] = dict(plan.params)
    ints, layers = list(plan.ints), list(plan.layers)
    for one in experts:
        layout = split(one.count, plan.tp)
        held = tuple(sum(b - a for a, b in ranges) for ranges in layout)
        for name in one.stacks:
            shape = params[name].shape
            why = f"{one.count} experts over the ranks"
            params[name] = replace(
                params[name], layout=ParamLayout(shape, {0: layout}), gradient="own", why=why
            )
        hidden, numbers, _ = (a.meta["val"].shape for a in one.calls[0].args)
        options = {"experts": one.count, "width": hidden[1], "chosen": numbers[1]}
        layers.append(LayerPlan(one.module, "experts", options))
        ints += [LocalInt(one.module, name, one.count, held) for name in one.counters]
    kept = {name: why for name, why in plan.kept.items() if params[name].layout is None}
    return replace(plan, params=params, layers=tuple(layers), ints=tuple(ints), kept=kept)


__all__ = ["Experts", "exchanges", "find_experts", "set_apart", "with_experts"]
