"""Where a model is cut into stages: the fairest of the possible cuts, or one stated by hand.

    stages = cut(captured, 4)                                  # balanced by FLOPs
    stages = cut(captured, 2, stages=["model.layers.9"])       # stated: the first unit of each next stage

Every stage runs the model's whole Python; only the units of other stages give no values. So between two units
a cut is possible where each value that is made before and used after it is known to every stage (inputs,
parameters, glue that depends on no unit), or an output of a unit, which is sent, or made of these by glue.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from ..captured import CapturedGraph
from ..errors import PlanError
from ..graph import canonical_names
from ..place import wants_grad
from .boundaries import Dataflow
from .costs import balance, flops
from .stages import Crossing, Stages, UnitCall
from .units import find_units


def cut(captured: CapturedGraph, count: int, *, stages: Sequence[str] | None = None) -> Stages:
    """Cut a captured model into `count` stages.

    The dearest stage is made as cheap as can be (forward FLOPs at the captured sizes), then what crosses as
    little as can be. stages: the cut by hand, as `count - 1` module paths: each is the first unit of the next
    stage (`path:n`: call n of it; a module around units: the first of them).
    Raises PlanError where there is no such cut: it says how many stages are possible, or which value, made
    where in the model's code, prevents the cut.
    """
    if not isinstance(count, int) or count < 1:
        raise PlanError(f"pp={count!r}: give a number of stages of at least 1.")
    flow = Dataflow(captured, *find_units(captured))
    by_node = flops(captured)
    costs = [sum(by_node.get(n, 0.0) for n in flow.nodes[unit.start : unit.end]) for unit in flow.units]
    if stages is None:
        prices = [float(b.bytes) if b.why is None else None for b in flow.boundaries]
        ends = balance(costs, prices, count) if count > 1 else ()
        if ends is None:
            raise _too_many(flow, count)
    else:
        ends = _stated(flow, count, stages)
    stage_of = [sum(end < i for end in ends) for i in range(len(flow.units))]
    calls = tuple(
        UnitCall(unit.path, unit.number, stage, cost)
        for unit, stage, cost in zip(flow.units, stage_of, costs, strict=True)
    )
    return Stages(
        count,
        calls,
        tuple(tuple(_crossings(flow, end)) for end in ends),
        _holders(captured, flow, count, stage_of),
    )


def _crossings(flow: Dataflow, end: int) -> Iterator[Crossing]:
    """What crosses the boundary behind unit `end`."""
    for node, uses in flow.boundaries[end].crossing.items():
        given = [
            (unit.path, unit.number, leaf)
            for unit, outputs in zip(flow.units[: end + 1], flow.outputs, strict=False)
            for leaf, output in enumerate(outputs)
            if output is node
        ]
        users = []
        for use in uses:
            unit_index = flow.unit_of(use)
            users.append(use.meta["scope"] if unit_index is None else flow.units[unit_index].path)
        value: torch.Tensor = node.meta["val"]
        yield Crossing(
            *given[0],
            shape=tuple(value.shape),
            dtype=str(value.dtype).removeprefix("torch."),
            itemsize=value.element_size(),
            used_by=tuple(dict.fromkeys(users)),
            also=tuple(given[1:]),
            requires_grad=wants_grad(node),
        )


def _holders(
    captured: CapturedGraph, flow: Dataflow, count: int, stage_of: Sequence[int]
) -> dict[str, tuple[int, ...]]:
    """By every name of every parameter and buffer, the stages that hold it: those whose units have it inside
    or read it; all, where glue reads it or no unit was seen to."""
    skeleton = captured.skeleton
    first_name = canonical_names(skeleton)
    held: dict[str, set[int]] = defaultdict(set)
    everywhere = set(range(count))

    def hold(module: nn.Module, stages: set[int]) -> None:
        for tensor in (*module.parameters(), *module.buffers()):
            held[first_name[id(tensor)]] |= stages

    for unit, stage in zip(flow.units, stage_of, strict=True):
        hold(skeleton.get_submodule(unit.path), {stage})
    for node in flow.nodes:
        if node.op == "call_module":  # it may be outside of the unit that calls it
            index = flow.unit_of(node)
            hold(skeleton.get_submodule(str(node.target)), everywhere if index is None else {stage_of[index]})
        if node.op == "get_attr":
            for user in node.users:
                index = flow.unit_of(user)
                held[str(node.target)] |= everywhere if index is None else {stage_of[index]}
    names = [
        *skeleton.named_parameters(remove_duplicate=False),
        *skeleton.named_buffers(remove_duplicate=False),
    ]
    return {name: tuple(sorted(held.get(first_name[id(t)]) or everywhere)) for name, t in names}


def _too_many(flow: Dataflow, count: int) -> PlanError:
    possible = [i for i, b in enumerate(flow.boundaries) if b.why is None]
    lines = [
        f"pp={count}: the model can be cut into {len(possible) + 1} stages at most. It runs "
        f"{len(flow.units)} units one after another, with {len(possible)} places to cut between them."
    ]
    prevented = [(i, b.why) for i, b in enumerate(flow.boundaries) if b.why is not None]
    lines += [f"  no cut before {flow.units[i + 1]}: {why}" for i, why in prevented[:5]]
    if len(prevented) > 5:
        lines.append(f"  … and {len(prevented) - 5} more")
    return PlanError("\n".join([*lines, f"Use pp={len(possible) + 1} or less, and tp for the other ranks."]))


def _stated(flow: Dataflow, count: int, stages: Sequence[str]) -> tuple[int, ...]:
    """The indices of the units that end the stages, for a cut by hand."""
    if isinstance(stages, str) or len(stages) != count - 1:
        raise PlanError(
            f"stages={stages!r}: give the first unit of each stage but the first, a list of {count - 1} "
            f"module paths for pp={count}."
        )
    ends: list[int] = []
    for name in stages:
        first = _find(flow, name)
        if first == 0:
            raise PlanError(f"stages: {name!r} is the model's first unit, so nothing is left for stage 0.")
        if ends and first - 1 <= ends[-1]:
            raise PlanError(
                f"stages: {name!r} does not run after {stages[len(ends) - 1]!r}; state them in order."
            )
        why = flow.boundaries[first - 1].why
        if why is not None:
            places = [str(flow.units[i + 1]) for i, b in enumerate(flow.boundaries) if b.why is None]
            near = ", ".join(places[:8]) + (", …" if len(places) > 8 else "")
            raise PlanError(
                f"stages: the model can't be cut before {name!r}: {why}. "
                + (f"It can be cut before {near}." if places else "It can't be cut anywhere.")
            )
        ends.append(first - 1)
    return tuple(ends)


def _find(flow: Dataflow, name: str) -> int:
    """The index of the first unit that is `name`, or is inside the module of that name."""
    path, _, number = str(name).partition(":")
    for i, unit in enumerate(flow.units):
        if unit.path == path and unit.number == int(number or 0):
            return i
    for i, unit in enumerate(flow.units):
        if not number and unit.path.startswith(f"{path}."):
            return i
    around = next((u.path for u in flow.units if path.startswith(f"{u.path}.")), None)
    paths = list(dict.fromkeys(u.path for u in flow.units))
    shown = ", ".join(paths[:12]) + (f", … ({len(paths)} units)" if len(paths) > 12 else "")
    raise PlanError(
        f"stages: {name!r} is inside {around!r}, which runs as a whole on one stage; name that."
        if around is not None
        else f"stages: {name!r} is no unit of the model. Its units: {shown}."
    )
