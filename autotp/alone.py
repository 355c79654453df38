"""Weights that no axis shards, split one by one.

An axis that is sharded through a model (heads, an MLP's hidden axis) costs one collective for several
products. Where none can be (a state space that scans over it, a product from the residual stream to itself)
the weight can still be split by itself: each rank computes its part of the output, which is gathered at once.
To all around it the layer is what it was; so this needs no proof but that its input and output are replicated
and their gradients whole, or both partial: so they are between an `enter` and the sharded values it is for.

It costs a collective for every product, and is done only where much would stay whole otherwise: with a tenth
of the weights on every rank, eight ranks are less than five times as fast as one (Amdahl, 1967). The largest
weights go first, all of one shape together, until less than that tenth is left. A model that repeats no
layers is left as it is: it is small, or its weights are where no rule of thumb knows.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import fx, nn

from .axes import leaves
from .flow import Flow
from .foreign import Hooked
from .graph import GraphIndex
from .kinds import layer_kind
from .layouts import ParamLayout
from .layouts import split as split_evenly
from .skeleton import linear_kind

if TYPE_CHECKING:
    from .plan import LayerPlan, ParamPlan, Plan
    from .planner import Analysis

TOLERATED = 0.1  # the share of the block weights that may stay whole


def split_alone(
    found: Analysis, params: Mapping[str, ParamPlan], hooked: Hooked, tp: int
) -> dict[str, dict[str, ParamLayout]]:
    """The modules to split alone: path -> layouts of its parameters by their own names. Empty where at most a
    tenth of the block weights stays whole without it, or nothing repeats."""
    if found.alone is not None:
        chosen = [path for path, _ in _candidates(found, params, hooked, tp) if path in found.alone]
        return {path: _layouts(found.index, path, params, tp) for path in chosen}
    block = [p for p in params.values() if p.block]
    whole = sum(math.prod(p.shape) * (1 - p.sharded_share) for p in block)
    allowed = TOLERATED * sum(math.prod(p.shape) for p in block)
    repeats = any(isinstance(m, nn.ModuleList) for m in found.index.captured.skeleton.modules())
    if whole <= allowed or tp == 1 or not repeats:
        return {}
    alike: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for path, weight in _candidates(found, params, hooked, tp):
        alike[params[weight].shape].append(path)
    done: dict[str, dict[str, ParamLayout]] = {}
    for shape in sorted(alike, key=math.prod, reverse=True):
        if whole <= allowed:
            break
        for path in alike[shape]:
            done[path] = _layouts(found.index, path, params, tp)
            whole -= math.prod(shape)
    return done


def options_alone(found: Analysis, path: str) -> dict[str, bool]:
    """How a layer that is split alone gathers its output. partial: its gradients are still to be summed."""
    node = next(n for n in found.index.module_params if str(n.target) == path)
    partial = node in found.placement.partial_gradient
    return {"gather": True, "partial" if partial else "enter": True}


def arrows_around(layer: LayerPlan) -> tuple[tuple[str, bool], ...]:
    """The arrows in a layer that is split alone: (kind, whether its gradient is summed too)."""
    if "partial" in layer.options:
        return (("gather", True),)  # what it gives its input is partial, as everything there
    return (("enter", False), ("gather", False)) if "enter" in layer.options else ()


def split_alone_in(plan: Plan) -> frozenset[str]:
    """The modules that a plan splits alone."""
    return frozenset(layer.module for layer in plan.layers if arrows_around(layer))


def _candidates(
    found: Analysis, params: Mapping[str, ParamPlan], hooked: Hooked, tp: int
) -> Iterator[tuple[str, str]]:
    """(path, name of the weight) of the linears and convolutions that can be split alone."""
    index, placement = found.index, found.placement
    used: dict[str, set[str]] = defaultdict(set)  # parameter -> the modules it is used by, "" for code
    calls: dict[str, list[fx.Node]] = defaultdict(list)
    for node in index.nodes:
        if node.op == "call_module":
            calls[str(node.target)].append(node)
            for name in index.module_params[node].values():
                used[name].add(str(node.target))
        elif node.op == "get_attr":
            used[str(node.target)].add("")
    unreduced = {n for flow in found.choice.flows.values() for n in flow.partial}
    unreduced -= {a.source for a in placement.arrows if a.kind == "reduce"}
    parts, partial = placement.sharded | unreduced, placement.partial_gradient
    gathered = {use for a in placement.arrows if a.kind == "gather" for use in a.users}
    for path, nodes in calls.items():
        own = index.module_params[nodes[0]]
        weight = params.get(own.get("weight", ""))
        summed = nodes[0] in partial
        operands = [(n, o) for n in nodes for o in index.operands[n]]
        free = (
            weight is not None
            and weight.block
            and layer_kind(index, nodes[0]) in ("linear", "conv")
            and set(own) <= {"weight", "bias"}
            and all(
                used[name] == {path} and _plain(params[name], "summed" if summed else "whole")
                for name in own.values()
            )
            and path not in hooked.modules
            and not any(name in hooked.params for name in own.values())
            and _divides(index, path, weight.shape, tp)
            and not any(n in parts or n in placement.inside or (n in partial) != summed for n in nodes)
            and not any(o.node in parts and (summed or (n, o.path) not in gathered) for n, o in operands)
            and (summed or not any(o.node in partial for _, o in operands))
        )
        if not free or weight is None or found.policy.veto(*_as_flow(index, path, weight.name)) is not None:
            continue
        out = _out_dim(index, path)
        if hooked.packed.unfit(weight.name, {out: split_evenly(weight.shape[out], tp)}) is None:
            yield path, weight.name


def _plain(param: ParamPlan, gradient: str) -> bool:
    return param.layout is None and not param.once and param.gradient == gradient and not param.also


def _divides(index: GraphIndex, path: str, shape: tuple[int, ...], tp: int) -> bool:
    """Into equal parts: of whole groups, or within them, where it has groups of channels."""
    groups = int(getattr(index.captured.skeleton.get_submodule(path), "groups", 1))
    return shape[_out_dim(index, path)] % tp == 0 and (groups % tp == 0 or tp % groups == 0)


def _out_dim(index: GraphIndex, path: str) -> int:
    return 1 if linear_kind(index.captured.skeleton.get_submodule(path)) == "transposed" else 0


def _as_flow(index: GraphIndex, path: str, weight: str) -> tuple:
    """What a policy is asked about: an axis of the weight's output, and that it shards this weight."""
    out = index.axes.params[weight][_out_dim(index, path)]
    axis = max(leaves(out), key=lambda leaf: leaf.size)
    return axis, Flow(axis, params={weight})


def _layouts(
    index: GraphIndex, path: str, params: Mapping[str, ParamPlan], tp: int
) -> dict[str, ParamLayout]:
    module = index.captured.skeleton.get_submodule(path)
    found = {}
    for own, tensor in module.named_parameters():
        assert isinstance(tensor, torch.Tensor)
        dim = _out_dim(index, path) if own == "weight" else 0
        found[own] = ParamLayout(tuple(tensor.shape), {dim: split_evenly(tensor.shape[dim], tp)})
    return found
