"""The second derivation: capture the rewritten model and compare it with what the plan predicts.

The plan predicts the local shape of every value. Here the plan is put onto a hollow copy of the model (meta tensors, no
data, no peers) and that is captured like any model. A `-1` that swallowed the shrink, an attribute that two places read
differently, a table of the wrong length show as shapes that differ, before anything of the user's is touched.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from .capture import CapturedGraph, capture
from .comm import ShapeComm
from .errors import PlanError
from .flow import describe, walk
from .solve import LocalShapes

if TYPE_CHECKING:
    from .plan import Plan
    from .planner import Analysis


def hollow(model: nn.Module) -> nn.Module:
    """A deep copy of `model` with its tensors on meta: structure without data."""
    memo: dict[int, Any] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        if id(tensor) not in memo:
            empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
            memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(model, memo)


def check_plan(model: nn.Module, plan: Plan, found: Analysis) -> list[CapturedGraph]:
    """Raise PlanError where the rewritten model's values have other shapes than planned, on any rank. Gives the captures."""
    from .rewrite import rewrite

    captures = []
    seen: set[tuple[int, ...]] = set()
    for rank in range(plan.tp):
        sizes = tuple(split.size(rank) for split in found.choice.splits.values())
        if sizes in seen:
            continue
        seen.add(sizes)
        local = hollow(model)
        rewrite(local, plan, ShapeComm(rank, plan.tp))
        again = capture(local, **found.captured.inputs)
        compare(found, again, rank)
        captures.append(again)
    return captures


def compare(found: Analysis, again: CapturedGraph, rank: int) -> None:
    """Compare value by value: what each operation of the model's code, and each module, gives on this rank."""
    shapes = LocalShapes(found.index, found.choice, rank)
    gathered = {a.source for a, places in found.realised.places for w in places if a.kind == "gather" and w.kind in ("layer", "out")}
    wrong = []
    planned: dict[Any, list[fx.Node]] = _by_place(found.captured)
    actual = _by_place(again)
    compared = 0
    for key, nodes in planned.items():
        others = actual.get(key, [])
        if len(others) != len(nodes):
            continue  # a branch that the local sizes made unnecessary (repeating key heads once): its results are compared
        for node, other in zip(nodes, others):
            if node in gathered or not isinstance(node.meta.get("val"), torch.Tensor):
                continue
            compared += 1
            want, got = shapes.shape(node), tuple(other.meta["val"].shape)
            if want != got:
                wrong.append(f"{describe(node)}: {list(got)} on rank {rank}, planned {list(want)}")
    if wrong:
        raise PlanError(
            "the rewritten model does not compute what was planned (this is a fault of autotp; the model is unchanged):\n  "
            + "\n  ".join(wrong[:6])
        )
    if planned and not compared:
        raise PlanError("the rewritten model has nothing in common with the captured one; the model is unchanged")


def _by_place(captured: CapturedGraph) -> dict[Any, list[fx.Node]]:
    """Values by where they come from: results of module calls, then operations by their place in the source."""
    places: dict[Any, list[fx.Node]] = defaultdict(list)
    for call in captured.calls:
        for path, value in walk(call.output):
            if isinstance(value, fx.Node):
                places["call", call.path, path].append(value)
    for node in captured.graph.nodes:
        site = node.meta.get("site")
        if node.op == "call_function" and site is not None and site.frames:
            where = tuple((f.code.co_filename, f.lineno) for f in site.frames)
            places["site", node.meta["scope"], where, str(node.target)].append(node)
    return places
