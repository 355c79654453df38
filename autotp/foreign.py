"""What a graph does not show: users' hooks, quantised weights, and code that runs only in the backward.

A hook on a module, a parameter or a tensor sees what is there at run time: on a sharded value, a part. One
that takes a norm of it would be wrong and say nothing. So an axis is not sharded where a hook that was there
at planning would meet a part. The backward of an `autograd.Function` may be any code: it is tried, whole and
in two parts, on random numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from .axes import Axis, leaves
from .captured import FunctionCall, map_nodes
from .choose import Choice, Split
from .graph import GraphIndex, describe, walk
from .layouts import split, take_dim
from .local import dim_layout
from .place import Placement
from .quantised import Packed
from .realise import Realised

Doubt = tuple[str, frozenset[Axis]]
_TABLES = {
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
    "_backward_hooks": "backward hook",
    "_backward_pre_hooks": "backward pre-hook",
}


@dataclass
class Hooked:
    """The modules and parameters of a model that users' hooks look at: path or name -> the kind of hook."""

    modules: dict[str, str] = field(default_factory=dict)
    params: dict[str, str] = field(default_factory=dict)
    packed: Packed = field(default_factory=Packed)  # the quantised weights


def hooks_of(model: nn.Module) -> Hooked:
    """The hooks on `model` that are the user's: not torch's, autotp's, or those of the model's package; and
    its quantised weights. PlanError where these have a form that can't be cut."""
    packages = {_package(type(m)) for m in model.modules()} - {"torch", "__main__"} | {"torch", "autotp"}
    found = Hooked(packed=Packed.of(model))
    for path, module in model.named_modules():
        for table, kind in _TABLES.items():
            own = {"torch", "autotp"} if "backward" in kind else packages
            if any(_package(hook) not in own for hook in vars(module).get(table, {}).values()):
                found.modules.setdefault(path, kind)
    for name, param in model.named_parameters():
        if param._backward_hooks or param._post_accumulate_grad_hooks:
            found.params[name] = "hook on its gradient"
    return found


def _package(thing: Any) -> str:
    return (getattr(thing, "__module__", None) or type(thing).__module__).split(".")[0]


def doubts(
    index: GraphIndex, choice: Choice, placement: Placement, realised: Realised, hooked: Hooked
) -> Iterator[Doubt]:
    """Why some chosen axes can't be: the reason and the axes."""

    def through(node: fx.Node) -> frozenset[Axis]:
        return frozenset(a for a, f in choice.flows.items() if node in f.sharded or node in f.inside)

    at_modules = {w.module for _, places in realised.places for w in places if w.kind in ("in", "out")}
    for call in index.captured.calls:
        kind = hooked.modules.get(call.path)
        if kind is None:
            continue
        values = [v for _, v in walk((call.args, call.kwargs, call.output)) if isinstance(v, fx.Node)]
        parts = [v for v in values if v in placement.sharded]
        if "backward" in kind:
            parts += [v for v in values if v in placement.partial_gradient or call.path in at_modules]
        axes = frozenset(a for v in parts for a in through(v) or _next(choice, v))
        if axes:
            yield f"{call.path} has a {kind}, which would see a part of what it sees now", axes
    for name in hooked.params.keys() & (placement.params | placement.summed_params | placement.once_params):
        users = [n for n in index.nodes if name in (n.target, *index.module_params.get(n, {}).values())]
        axes = frozenset(a for n in users for a in through(n) or _next(choice, n))
        yield f"{name} has a {hooked.params[name]}, which would see a part of it", axes
    summed = {arrow.source for arrow in placement.arrows if arrow.kind == "enter" or arrow.enter}
    for node in index.nodes:
        partial = node in placement.partial_gradient or node in summed  # before the sum or after: who knows
        if node.meta.get("gradient_hook") and (through(node) or partial):
            axes = through(node) or _next(choice, node)
            yield f"{describe(node)}: a hook on its gradient would see a part of it", axes
        buffer = node.meta.get("kept_as")
        if buffer and through(node):
            yield f"{describe(node)}: it becomes the buffer {buffer}, which is whole", through(node)
    differentiated = [node for node in index.nodes if node.meta.get("differentiated")]
    for node in _ancestors(index, differentiated):
        if through(node):
            yield f"{describe(node)}: the model differentiates it in its own forward", through(node)
    yield from _unproven_functions(index, choice)
    yield from _uncut(index, choice, hooked.packed)


def parts_kept(index: GraphIndex, choice: Choice, placement: Placement) -> Iterator[str]:
    """Attributes that the forward sets to what is a rank's part in a split model, in words."""
    for node in index.nodes:
        name = node.meta.get("set_as")
        if name and (node in placement.sharded or any(node in f.inside for f in choice.flows.values())):
            yield (
                f"{name}: the forward sets it to a value that is split ({describe(node)}): it is the rank's "
                "part. Return the value instead, or keep its module whole"
            )


def _ancestors(index: GraphIndex, nodes: list[fx.Node]) -> Iterator[fx.Node]:
    """The nodes and all that they are computed from, in the graph's order."""
    found, todo = set(nodes), list(nodes)
    while todo:
        new = [op.node for op in index.operands[todo.pop()] if op.node not in found]
        found.update(new)
        todo += new
    return (node for node in index.nodes if node in found)


def _uncut(index: GraphIndex, choice: Choice, packed: Packed) -> Iterator[Doubt]:
    """Quantised weights whose parts, as the choice cuts them, would not make the whole's product."""
    for axis, flow in choice.flows.items():
        ranks = range(len(choice.splits[axis].ranges))
        for name in sorted(flow.params & packed.weights.keys()):
            laid = {
                d: tuple(dim_layout(dim, rank, choice.splits) for rank in ranks)
                for d, dim in enumerate(index.axes.params[name])
                if axis in leaves(dim)
            }
            why = _used_otherwise(index, name) or packed.unfit(name, laid)
            if why is not None:
                yield why, frozenset((axis,))


def _used_otherwise(index: GraphIndex, name: str) -> str | None:
    for node in index.nodes:
        own = name in index.module_params.get(node, {}).values()
        linear = own and isinstance(index.captured.skeleton.get_submodule(str(node.target)), nn.Linear)
        if node.target == name or (own and not linear):
            return f"{name} is quantised, and used otherwise than as the weight of an nn.Linear"
    return None


def _next(choice: Choice, node: fx.Node) -> frozenset[Axis]:
    """The axes of the sharded operations that a value leads to first."""
    todo, seen = [node], {node}
    while todo:
        axes = frozenset(a for n in todo for a, f in choice.flows.items() if n in f.inside)
        if axes:
            return axes
        todo = [u for n in todo for u in n.users if u not in seen]
        seen.update(todo)
    return frozenset(choice.flows)


def _unproven_functions(index: GraphIndex, choice: Choice) -> Iterator[Doubt]:
    tried: dict[Any, bool] = {}
    for axis, flow in choice.flows.items():
        calls = {id(f): f for n in index.nodes if n in flow.inside and (f := n.meta.get("custom_grad"))}
        for call in calls.values():
            key = (call.function, tuple(_signature(index, value, axis) for value in call.args))
            if key not in tried:
                with torch.device("cpu"):  # numbers, even where the caller builds all on meta
                    tried[key] = _same_in_parts(index, call, axis)
            if not tried[key]:
                name = call.function.__name__
                why = f"the backward of {name} on parts is not a part of its backward"
                yield f"{describe(call.nodes[0])}: {why}", frozenset((axis,))


def _signature(index: GraphIndex, value: Any, axis: Axis) -> Any:
    if not isinstance(value, fx.Node):
        return repr(value)
    made = value.meta["val"]
    where = tuple(index.dims_with(value, axis)) if isinstance(made, torch.Tensor) else ()
    return str(getattr(made, "shape", made)), where


def _same_in_parts(index: GraphIndex, call: FunctionCall, axis: Axis) -> bool:
    """Run the function on random numbers: does half of everything give half of the result and gradients?"""
    result = call.result()
    if result is None:
        return False
    splits = {axis: Split(split(axis.size, 2))}
    generator = torch.Generator().manual_seed(0)

    def real(node: fx.Node) -> Any:
        value = node.meta["val"]
        if not isinstance(value, torch.Tensor):
            return value
        if value.is_floating_point():
            return torch.randn(value.shape, generator=generator).to(value.dtype)
        return torch.ones(value.shape, dtype=value.dtype)

    def part(node: fx.Node, whole: torch.Tensor, rank: int) -> torch.Tensor:
        for d, dim in enumerate(index.axes.of[node]):
            if axis in leaves(dim):
                whole = take_dim(whole, d, dim_layout(dim, rank, splits))
        return whole

    def run(args: Any, grad: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        fresh = [a.clone().requires_grad_(a.is_floating_point()) if torch.is_tensor(a) else a for a in args]
        out = call.function.apply(*fresh)
        out.backward(grad)
        grads = [a.grad for a in fresh if torch.is_tensor(a) and a.is_floating_point()]
        return out.detach(), [g if g is not None else torch.zeros(()) for g in grads]

    try:
        args = [map_nodes(a, real) for a in call.args]
        nodes = [a for a, v in zip(call.args, args, strict=True) if torch.is_tensor(v)]
        floats = [n for n in nodes if n.meta["val"].is_floating_point()]
        grad = torch.randn(result.meta["val"].shape, generator=generator).to(result.meta["val"].dtype)
        out, grads = run(args, grad)
        halves = []
        for rank in range(2):
            given = [
                part(n, v, rank) if torch.is_tensor(v) else v for n, v in zip(call.args, args, strict=True)
            ]
            halves.append(run(given, part(result, grad, rank)))
    except Exception:  # noqa: BLE001 - whatever it is, it is no proof
        return False
    for rank, (own, _) in enumerate(halves):
        if not torch.allclose(own, part(result, out, rank), rtol=1e-3, atol=1e-4):
            return False
    for i, node in enumerate(floats):
        carries = any(axis in leaves(dim) for dim in index.axes.of[node])
        got = [own[i] for _, own in halves]
        if carries:
            want = [part(node, grads[i], rank) for rank in range(2)]
        else:
            got, want = [got[0] + got[1]], [grads[i]]
        if not all(torch.allclose(g, w, rtol=1e-3, atol=1e-4) for g, w in zip(got, want, strict=True)):
            return False
    return True


__all__ = ["Hooked", "doubts", "hooks_of"]
