"""Why a parameter is where it is: its axes, and what decided each."""

from __future__ import annotations

from rich.text import Text

from .advice import advice
from .axes import Axis, leaves, show
from .flow import Edge
from .graph import describe
from .plan import Plan
from .planner import Analysis
from .show import few, local, pattern, ranks_text


def why(found: Analysis, plan: Plan, name: str) -> Text:
    """One parameter, axis by axis: who shares it and what it costs if it is sharded, what forbids it if not.

    name: a parameter, or one of its tied names. Raises KeyError where the plan has none of that name.
    """
    by_name = {n: p for p in plan.params.values() for n in (p.name, *p.also)}
    param = by_name[name]
    out = Text()
    out.append(f"{name}\n", "bold cyan")
    out.append(f"  {local(param, 0)} on rank 0, {param.placement}, gradient {param.gradient}\n")
    if param.also:
        others = [n for n in (param.name, *param.also) if n != name]
        out.append(f"  the same tensor as {', '.join(others)}\n", "dim")
    dims = found.index.axes.params.get(param.name)
    if dims is None or not any(found.index.touching.get(leaf) for dim in dims for leaf in leaves(dim)):
        out.append("  The captured run never uses it: its axes are unknown, so it stays whole.\n", "yellow")
        return out
    by_expert = any(param.name in one.stacks for one in found.experts)
    if by_expert:
        held = ranks_text(tuple(param.local_shape(r)[0] for r in range(plan.tp)))
        out.append(f"\n    ✓ dim 0 counts experts: {held} of {param.shape[0]} a rank (ep)\n", "green")
    letters: dict[Axis, str] = {}
    for d, dim in enumerate(dims):
        if by_expert and d == 0:
            continue
        out.append(f"\n  dim {d}", "bold")
        out.append(f", {dim.size} = {show(dim, letters)}\n")
        for leaf in leaves(dim):
            label = f"axis {show(leaf, letters)}"
            if leaf in found.choice.flows:
                _sharded(out, found, plan, leaf, label)
            elif leaf in found.choice.splits:
                sizes = tuple(found.choice.splits[leaf].size(r) for r in range(plan.tp))
                out.append(f"    ✓ {label} is split in groups with the axis above it", "green")
                out.append(f": {ranks_text(sizes)} a rank\n")
            else:
                _whole(out, found, leaf, label)
    return out


def _sharded(out: Text, found: Analysis, plan: Plan, leaf: Axis, label: str) -> None:
    flow, split = found.choice.flows[leaf], found.choice.splits[leaf]
    out.append(f"    ✓ {label} is sharded", "green")
    out.append(f": {ranks_text(tuple(split.size(r) for r in range(plan.tp)))} of {leaf.size} a rank\n")
    holders = list(dict.fromkeys(map(pattern, sorted(flow.params))))
    out.append(f"      shared by {len(flow.params)} parameters: {few(holders)}\n", "dim")
    inside = sorted(flow.inside, key=found.index.order.__getitem__)
    if inside:
        out.append(f"      from {describe(inside[0])}\n      to   {describe(inside[-1])}\n", "dim")
    alike: dict[tuple[str, str], list[Edge]] = {}
    for edge in flow.edges:
        alike.setdefault((edge.kind, edge.why), []).append(edge)
    for (kind, because), edges in alike.items():
        first = edges[0]
        out.append(f"      ◆ {kind}{f' × {len(edges)}' if len(edges) > 1 else ''}", "red")
        out.append(f" at {describe(first.user or first.source)}: {because}\n", "dim")


def _whole(out: Text, found: Analysis, leaf: Axis, label: str) -> None:
    out.append(f"    ✗ {label} stays whole", "yellow")
    out.append(f": {found.choice.rejected.get(leaf, 'nothing is gained by sharding it')}\n")
    forbids: dict[str, str] = {}  # by reason, the first place
    for node in found.index.touching.get(leaf, ()):
        facts = found.index.axes.facts.get(node)
        for forbid in facts.forbids if facts is not None else ():
            if leaf in leaves(forbid.axis):
                forbids.setdefault(forbid.why, describe(node))
    for because, where in list(forbids.items())[:3]:
        out.append(f"      {where}: {because}\n", "dim")
    helps = [advice(because) for because in (found.choice.rejected.get(leaf), *forbids) if because]
    helps.sort(key=lambda line: line.startswith("nothing"))
    if helps:
        out.append(f"      what would help: {helps[0]}\n", "dim")
