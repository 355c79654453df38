"""A plan for people, in the terminal: the sharded model printed like code, and tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from .outline import Block, Mark, Outline, Step, Value, range_of
from .pipeline.show import stage_rows
from .plan import Collective, ParamPlan, Plan

STYLE = {"column": "blue", "row": "dark_orange", "vocab": "green", "embedding": "green", "": "bright_black"}

# What each arrow does forward and backward, as architecture.md's table of arrows says.
MEANING = {
    "enter": "nothing forward, all-reduce backward",
    "reduce": "all-reduce forward, nothing backward",
    "gather": "all-gather forward, slice backward",
    "slice": "slice forward, all-gather backward",
    "once": "kept on rank 0, nothing sent",
}


def meaning(collective: Collective) -> str:
    """What a collective does in the forward and in the backward pass."""
    if collective.enter and collective.kind == "gather":
        return "all-gather forward, reduce-scatter backward"
    if collective.enter:
        return "all-reduce forward and backward"
    return MEANING.get(collective.kind, f"all-reduce of a {collective.kind} forward")


def kind_of(collective: Collective) -> str:
    """`reduce`, or `reduce + enter` where both directions send."""
    return collective.kind + (" + enter" if collective.enter else "")


def human_bytes(n: float) -> str:
    """`12.6 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"


def size(shape: Iterable[int]) -> str:
    """`[4096, 1024]`."""
    return f"[{', '.join(map(str, shape))}]"


def local(param: ParamPlan, rank: int) -> str:
    """`[4096, 4096] → [512, 4096]`, or one shape where nothing changes."""
    whole, mine = size(param.shape), size(param.local_shape(rank))
    return whole if whole == mine else f"{whole} → {mine}"


def totals(plan: Plan, itemsize: int) -> tuple[int, list[int]]:
    """Bytes of the whole model's parameters, and of each rank's, of every stage."""
    whole = sum(_numel(p.shape) for p in plan.params.values()) * itemsize
    stages = [None] if plan.stages is None else range(plan.stages.count)
    return whole, [plan.local_bytes(rank, itemsize, s) for s in stages for rank in range(plan.tp)]


def _numel(shape: tuple[int, ...]) -> int:
    total = 1
    for n in shape:
        total *= n
    return total


def headline(plan: Plan, itemsize: int) -> list[tuple[str, str]]:
    """The few numbers that matter, with what each says."""
    whole, ranks = totals(plan, itemsize)
    per_rank = (
        human_bytes(ranks[0])
        if len(set(ranks)) == 1
        else f"{human_bytes(min(ranks))} to {human_bytes(max(ranks))}"
    )
    sharded = sum(p.layout is not None for p in plan.params.values())
    count, places = str(len(plan.collectives)), sum(len(c.where) for c in plan.collectives)
    staged = [("stages", _stages(plan, itemsize))] if plan.stages else []
    return [
        ("ranks", str(len(ranks))),
        *staged,
        ("block weights sharded", f"{plan.sharded_fraction:.1%}"),
        ("parameters sharded", f"{sharded} of {len(plan.params)}"),
        ("memory per rank", f"{per_rank} of {human_bytes(whole)}"),
        ("collectives", count if places == len(plan.collectives) else f"{count} at {places} places"),
        ("digest", plan.digest),
    ]


def _stages(plan: Plan, itemsize: int) -> str:
    """`4, of 24.1% / 25.6% / 25.6% / 24.7% of the FLOPs`."""
    rows = stage_rows(plan, itemsize, 0)
    return f"{len(rows)}, of {' / '.join(f'{row.share:.1%}' for row in rows)} of the FLOPs"


# ---------------------------------------------------------------- like code
def text(plan: Plan, shown: Outline, itemsize: int) -> Text:
    """The sharded model as code: each module, its operations with this rank's shapes, and the collectives
    between."""
    out = Text()
    out.append(f"# {plan.model} over {plan.degrees}, rank {shown.rank}\n", "bold")
    for name, value in headline(plan, itemsize):
        if name not in ("ranks",):
            out.append(f"#   {name:22} {value}\n", "dim")
    for row in stage_rows(plan, itemsize, shown.rank):
        out.append(f"# stage {row.stage}: {row.units}\n", "bold blue")
        out.append(
            f"#     {row.share:.1%} of the FLOPs, {row.parameters:,} parameters, "
            f"{human_bytes(row.bytes)} on this rank\n",
            "dim",
        )
        for sent in row.sends:
            out.append(f"#     sends {sent}\n", "red")
        if row.sends:
            out.append(f"#     {human_bytes(row.sent_bytes)} to stage {row.stage + 1}\n", "dim")
    out.append("\n")
    for given in shown.inputs:
        out.append(f"{given.name:48}  {_value(given)}\n", "dim")
    _block(out, shown.root, 0, shown)
    for param in shown.unused:
        out.append(f"# not reached: {param.name}  {size(param.shape)}\n", "yellow")
    for note in plan.notes:
        out.append(f"# note: {note}\n", "yellow")
    return out


def _block(out: Text, block: Block, depth: int, shown: Outline) -> None:
    pad = "    " * depth
    for mark in (m for m in block.marks if m.before):
        _mark(out, mark, depth)
    out.append(pad)
    labels = (
        [block.label] + [n[len(block.path) - len(block.label) :] for n in block.names[1:]]
        if block.path
        else []
    )
    out.append(range_of(labels) if labels else "model", "bold cyan")
    out.append(f": {block.kind}", "cyan")
    if len(block.names) > 1:
        out.append(f"   × {len(block.names)} alike", "bold magenta")
    if block.stage is not None:
        out.append(f"   # stage {block.stage}", "bold blue")
    out.append("\n")
    for i in block.ints:
        out.append(f"{pad}    self.{i.name} = {i.local[shown.rank]}", "magenta")
        out.append(f"   # {i.value} in the whole model\n", "dim")
    for param in block.params:
        _param(out, param, depth + 1, shown.rank)
    for run in _runs(block.items):
        if isinstance(run, Block):
            _block(out, run, depth + 1, shown)
        elif len(run) > 3:
            _aside(out, run, depth + 1)
        else:
            for step in run:
                _step(out, step, depth + 1, shown)
    for mark in (m for m in block.marks if not m.before):
        _mark(out, mark, depth)


def _runs(items: list[Step | Block]) -> Iterator[Block | list[Step]]:
    """Blocks and steps in order, those in a row that no gradient and no rank touches (masks, positions)
    together."""
    aside: list[Step] = []
    for item in items:
        if isinstance(item, Step) and not (
            item.grad or item.marks or item.params or item.values[0].state != "Replicate"
        ):
            aside.append(item)
            continue
        if aside:
            yield aside
            aside = []
        yield item if isinstance(item, Block) else [item]
    if aside:
        yield aside


def _aside(out: Text, steps: list[Step], depth: int) -> None:
    kinds = few(list(dict.fromkeys(s.op for s in steps)), 5)
    line = f"{'    ' * depth}# {len(steps)} operations without gradient, the same on every rank: {kinds}"
    out.append(f"{line}\n", "dim italic")


def _step(out: Text, step: Step, depth: int, shown: Outline) -> None:
    for mark in (m for m in step.marks if m.before):
        _mark(out, mark, depth)
    pad = "    " * depth
    line = f"{pad}{step.text}"
    if len(line) > 72:
        line = line[:71] + "…"
    out.append(f"{line:72}", STYLE.get(step.layer, "") if step.layer else "")
    out.append(f"  {', '.join(_value(v) for v in step.values)}", "dim")
    out.append(f"   # stage {step.stage}\n" if step.stage is not None else "\n", "bold blue")
    for param in step.params:
        _param(out, param, depth + 1, shown.rank)
    for mark in (m for m in step.marks if not m.before):
        _mark(out, mark, depth)


def _param(out: Text, param: ParamPlan, depth: int, rank: int) -> None:
    name = param.name.rsplit(".", 1)[-1]
    out.append(f"{'    ' * depth}{name:8} {local(param, rank)}  ", "" if param.layout else "bright_black")
    out.append(param.placement, "green" if param.layout else "bright_black")
    out.append(f"   {param.axes}\n", "dim")


def _mark(out: Text, mark: Mark, depth: int) -> None:
    c = mark.collective
    at = f" at {mark.where}" if mark.where.path or mark.where.site else ""
    out.append(f"{'    ' * depth}◆ {kind_of(c)}", "bold red")
    out.append(f"  {human_bytes(c.bytes)}, {meaning(c)}{at}", "red")
    out.append(f"   # {c.why}\n" if c.why else "\n", "dim")


def few(names: list[str], limit: int = 8) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _value(value: Value) -> str:
    states = {"Replicate": "", "Partial": "  Partial"}
    return f"{value.dtype}{size(value.shape)}{states.get(value.state, '  ' + value.state)}"


# ---------------------------------------------------------------- tables
def tables(plan: Plan, itemsize: int, rank: int) -> Group:
    """What is where, as tables: memory, parameters, collectives, local numbers, the replicated remainder."""
    parts: list[RenderableType] = [_summary(plan, itemsize), _parameters(plan, rank)]
    if plan.stages is not None:
        parts.append(_pipeline(plan, itemsize, rank))
    if plan.collectives:
        parts.append(_collectives(plan))
    if plan.ints or plan.arguments:
        parts.append(_locals(plan))
    if plan.kept:
        parts.append(_remainder(plan))
    parts += [Text(f"note: {note}", "yellow") for note in plan.notes]
    return Group(*(Padding(p, (0, 0, 1, 0)) for p in parts))


def _table(title: str, *columns: str) -> Table:
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        header_style="bold",
        border_style="bright_black",
    )
    for column in columns:
        table.add_column(
            column, overflow="fold", justify="right" if column in ("bytes", "places") else "left"
        )
    return table


def _summary(plan: Plan, itemsize: int) -> Table:
    table = Table(
        title=f"{plan.model} over {plan.tp} ranks"
        if plan.stages is None
        else f"{plan.model} over {plan.degrees}",
        title_justify="left",
        title_style="bold",
        show_header=False,
        box=None,
    )
    for name, value in headline(plan, itemsize):
        table.add_row(Text(name, "dim"), Text(value, "bold"))
    return table


def _pipeline(plan: Plan, itemsize: int, rank: int) -> Table:
    columns = "stage", "units", "parameters", f"memory of rank {rank}", "of the FLOPs", "sends", "bytes"
    table = _table("Pipeline stages", *columns)
    for row in stage_rows(plan, itemsize, rank):
        cells = f"{row.parameters:,}", human_bytes(row.bytes), f"{row.share:.1%}", "\n".join(row.sends)
        sent = human_bytes(row.sent_bytes) if row.sends else ""
        table.add_row(str(row.stage), row.units, *cells, sent)
    return table


def fold_params(plan: Plan) -> Iterator[tuple[str, int, ParamPlan]]:
    """Parameters that differ only in the numbers in their names, once: (pattern, how many, the first)."""
    groups: dict[Any, list[ParamPlan]] = {}
    for p in plan.params.values():
        key = (pattern(p.name), p.shape, repr(p.layout), p.placement, p.gradient, tuple(map(pattern, p.also)))
        groups.setdefault(key, []).append(p)
    for key, members in groups.items():
        yield (key[0] if len(members) > 1 else members[0].name), len(members), members[0]


def pattern(name: str) -> str:
    """`model.layers.*.mlp` for `model.layers.3.mlp`."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _parameters(plan: Plan, rank: int) -> Table:
    table = _table(f"Parameters (rank {rank})", "name", "", "whole", "local", "placement", "axes", "gradient")
    for name, count, p in fold_params(plan):
        style = "" if p.layout else "bright_black"
        times = f"× {count}" if count > 1 else ""
        tied = f"\n= {', '.join(p.also)}" if p.also else ""
        mine = size(p.local_shape(rank))
        table.add_row(name + tied, times, size(p.shape), mine, p.placement, p.axes, p.gradient, style=style)
    return table


def fold_collectives(plan: Plan) -> Iterator[tuple[Collective, list[str], int]]:
    """Alike collectives once: (the first, the patterns of the places, how many collectives)."""
    groups: dict[Any, list[Collective]] = {}
    for c in plan.collectives:
        where = tuple(dict.fromkeys(pattern_of(str(w)) for w in c.where))
        groups.setdefault((c.kind, c.enter, c.bytes, where, pattern_of(c.why)), []).append(c)
    for key, members in groups.items():
        where = key[3] if len(members) > 1 else tuple(str(w) for w in members[0].where)
        yield members[0], list(where), len(members)


def pattern_of(place: str) -> str:
    """The pattern of the module path that a place begins with."""
    module, _, rest = place.partition(" ")
    return " ".join(filter(None, (pattern(module), rest)))


def _collectives(plan: Plan) -> Table:
    table = _table("Collectives", "kind", "", "where", "value", "bytes", "what it does", "why")
    for c, where, count in fold_collectives(plan):
        kind = kind_of(c)
        times = f"× {count}" if count > 1 else ""
        table.add_row(
            Text(f"◆ {kind}", "red"),
            times,
            "\n".join(where),
            size(c.shape),
            human_bytes(c.bytes),
            meaning(c),
            c.why,
        )
    return table


def ranks_text(values: tuple[int, ...]) -> str:
    """One number where all ranks have it, else one each."""
    return str(values[0]) if len(set(values)) == 1 else " / ".join(map(str, values))


def fold_ints(plan: Plan) -> list[tuple[str, int, str, int]]:
    """Numbers in the model's code that become local: (place, whole, on the ranks, how many alike)."""
    rows = [(f"{pattern(i.module)}.{i.name}".lstrip("."), i.value, ranks_text(i.local)) for i in plan.ints]
    rows += [(pattern_of(str(a.where)), a.value, ranks_text(a.local)) for a in plan.arguments]
    return [(*row, rows.count(row)) for row in dict.fromkeys(rows)]


def _locals(plan: Plan) -> Table:
    table = _table("Numbers that become local", "where", "", "whole", "local")
    for place, whole, mine, count in fold_ints(plan):
        table.add_row(place, f"× {count}" if count > 1 else "", str(whole), mine)
    return table


def fold_kept(plan: Plan) -> list[tuple[str, str, int]]:
    """The replicated remainder: (pattern, why, how many alike)."""
    rows = [(pattern(name), why) for name, why in plan.kept.items()]
    return [(*row, rows.count(row)) for row in dict.fromkeys(rows)]


def _remainder(plan: Plan) -> Table:
    table = _table("Weights that stay whole on every rank", "name", "", "why")
    for name, why, count in fold_kept(plan):
        table.add_row(name, f"× {count}" if count > 1 else "", why)
    return table
