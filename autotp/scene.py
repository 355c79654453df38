"""What a picture of a plan shows: boxes for modules, chips for joining operations, diamonds for collectives,
and edges.

Of an outline only what matters to the eye is kept: modules with weights, activations, the collectives, and
the operations where two flows meet (a residual sum, a gate, the attention product). Reshapes and casts become
plain edges. Edges follow the values that carry a gradient: masks and rotary tables come from the side and
would hide the structure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .outline import Block, Mark, Outline, Step, range_of
from .plan import ParamPlan
from .show import human_bytes, kind_of, local, meaning, ranks_text, size

PORT = "in"  # the source that stands for "comes from outside of this group"
_SYMBOLS = {"add": "+", "iadd": "+", "radd": "+", "mul": "×", "imul": "×", "rmul": "×", "sub": "−"}


@dataclass
class Item:
    """One thing in the picture. kind: group, module, op or collective. look: its colour class.

    sources: keys of items of the same group, or PORT. details: what a reader may ask of it: (label, text).
    """

    key: str
    kind: str
    title: str
    lines: list[str] = field(default_factory=list)
    look: str = "plain"
    sources: list[str] = field(default_factory=list)
    details: list[tuple[str, str]] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)
    count: int = 1
    params: list[str] = field(default_factory=list)  # names of the parameters in it, for links to a table

    def outs(self) -> list[Item]:
        """The items of a group whose value no other item of it takes: what leaves it."""
        used = {s for item in self.items for s in item.sources}
        return [item for item in self.items if item.key not in used]


def scene(shown: Outline) -> Item:
    """The picture of an outline, as one group."""
    root = _Group(shown, shown.root).run({}, frozenset())
    root.title = shown.root.kind
    if shown.unused:
        names = [p.name for p in shown.unused]
        note = [(p.name, size(p.shape)) for p in shown.unused]
        root.items.append(
            Item("unused", "module", f"{len(names)} not reached", [], "replicate", [PORT], note, params=names)
        )
    return root


class _Group:
    """Builds the group of one block. `at` maps a value (by node name) to the items of this group it comes out
    of."""

    def __init__(self, shown: Outline, block: Block) -> None:
        self.shown, self.block = shown, block
        self.items: list[Item] = []
        self.at: dict[str, frozenset[str]] = {}
        self.turns: dict[Any, Item] = {}  # by place in the source: what the first turn of a loop drew

    def run(self, outside: dict[str, frozenset[str]], inputs: frozenset[str]) -> Item:
        for item in self.block.items:
            if isinstance(item, Step):
                self.step(item)
            else:
                self.child(item)
        block = self.block
        label = [block.label, *(n[len(block.path) - len(block.label) :] for n in block.names[1:])]
        title = f"{range_of(label)}" if block.path else block.kind
        staged = [] if block.stage is None else [("stage", str(block.stage))]
        title += "".join(f"  ·  stage {number}" for _, number in staged)
        lines = [block.kind]
        details = [("module", block.path or "model"), ("class", block.kind), *staged]
        details += [(f"self.{i.name}", f"{i.value} → {ranks_text(i.local)}") for i in block.ints]
        details += _param_details(block.params, self.shown.rank)
        names = [p.name for p in block.params]
        return Item(
            f"g:{block.path}",
            "group",
            title,
            lines,
            "group",
            sorted(inputs),
            details,
            self.items,
            len(block.names),
            names,
        )

    def sources(self, uses: tuple[str, ...]) -> list[frozenset[str]]:
        return [self.at.get(self.shown.alias.get(u, u), frozenset((PORT,))) for u in uses]

    def step(self, step: Step) -> None:
        origins = self.sources(step.uses)
        merged = frozenset().union(*origins)
        turn = (step.place, step.op, step.module)
        if turn in self.turns and step.place is not None:
            first = self.turns[turn]
            first.count += 1
            self.at[step.node] = self.at[first.key[2:]]
            return
        item = self.visible(step, origins)
        if item is None and not step.marks:
            self.at[step.node] = merged
            return
        merged = self.collectives(step.marks, True, merged or frozenset((PORT,)), step.node)
        if item is not None:
            item.sources = sorted(merged)
            self.turns[turn] = item
            self.items.append(item)
            merged = frozenset((item.key,))
        self.at[step.node] = self.collectives(step.marks, False, merged, step.node)

    def visible(self, step: Step, origins: list[frozenset[str]]) -> Item | None:
        rank = self.shown.rank
        value = step.values[0]
        given = [
            ("gives", f"{value.dtype}{size(value.shape)} {value.state}"),
            ("in the whole model", size(value.whole)),
            *([] if step.stage is None else [("stage", str(step.stage))]),
        ]
        if step.module is not None:
            name = step.module[len(self.block.path) + 1 :] if self.block.path else step.module
            if not step.params:
                if step.op in ("Dropout", "Identity"):
                    return None
                return Item(
                    f"s:{step.node}", "op", step.op, [], "plain", [], [("module", step.module), *given]
                )
            look = (
                step.layer
                if step.layer in ("column", "row")
                else "vocab"
                if step.layer in ("vocab", "embedding")
                else ""
            )
            look = look or ("other" if any(p.layout for p in step.params) else "replicate")
            lines = [f"{step.op} · {step.layer or 'replicated'}"]
            lines += [_short(p, rank) for p in step.params]
            details = [
                ("module", step.module),
                ("class", step.op),
                ("becomes", step.layer or "unchanged"),
                *given,
            ]
            details += _param_details(step.params, rank)
            names = [p.name for p in step.params]
            return Item(f"s:{step.node}", "module", name, lines, look, [], details, params=names)
        if len(set(origins)) > 1 or step.joins:
            title = _SYMBOLS.get(step.op, step.op.replace("scaled_dot_product_attention", "attention"))
            return Item(f"s:{step.node}", "op", title, [], "plain", [], [("operation", step.text), *given])
        return None

    def child(self, block: Block) -> None:
        inner = {s.node for s in block.steps()}
        uses = {u for s in block.steps() for u in s.uses if self.shown.alias.get(u, u) not in inner}
        origins = frozenset().union(*self.sources(tuple(sorted(uses))))
        group = _Group(self.shown, block).run(self.at, origins)
        params = [p for b in block.blocks() for p in b.params]
        if not group.items and not origins and not params:
            return  # tables made from positions: nothing with a gradient goes through
        origins = self.collectives(block.marks, True, origins or frozenset((PORT,)), block.path)
        group.sources = sorted(origins)
        weighty = any(len(p.shape) > 1 for p in block.params)  # it multiplies by weights of its own
        if not group.items or (all(i.kind == "op" for i in group.items) and not weighty):
            self.flatten(group, params, block)
        else:
            group.lines += [_short(p, self.shown.rank) for p in block.params]
        self.items.append(group)
        out = self.collectives(block.marks, False, frozenset((group.key,)), block.path)
        self.at.update(dict.fromkeys(inner, out))

    def flatten(self, group: Item, params: list[ParamPlan], block: Block) -> None:
        """A module without modules in it is one box: a norm, an activation."""
        group.items = []
        group.kind = "module" if params else "op"
        if not params:
            group.title, group.lines = block.kind, []
            group.look = "plain"
            return
        group.look = "other" if any(p.layout for p in params) else "replicate"
        group.lines = [f"{block.kind} · {'sharded' if group.look == 'other' else 'replicated'}"]
        group.lines += [_short(p, self.shown.rank) for p in params]

    def collectives(
        self, marks: list[Mark], before: bool, sources: frozenset[str], at: str
    ) -> frozenset[str]:
        for n, mark in enumerate(m for m in marks if m.before is before):
            c = mark.collective
            key = f"c:{at}:{'before' if before else 'after'}:{n}"
            title = kind_of(c)
            details = [
                ("collective", title),
                ("does", meaning(c)),
                ("at", str(mark.where)),
                ("value", size(c.shape)),
            ]
            details += [("bytes", f"{c.bytes:,} ({human_bytes(c.bytes)})"), ("why", c.why)]
            self.items.append(
                Item(key, "collective", title, [human_bytes(c.bytes)], "collective", sorted(sources), details)
            )
            sources = frozenset((key,))
        return sources


def _short(param: ParamPlan, rank: int) -> str:
    name = param.name.rsplit(".", 1)[-1]
    return f"{name} {local(param, rank)}" + (" · rank 0 only" if param.once else "")


def _param_details(params: tuple[ParamPlan, ...], rank: int) -> list[tuple[str, str]]:
    found = []
    for p in params:
        found.append((p.name, f"{local(p, rank)}  {p.placement}"))
        found += [("axes", p.axes)] if p.axes else []
        found += [("why", p.why)] if p.why else []
        found += [("tied to", ", ".join(p.also))] if p.also else []
    return found
