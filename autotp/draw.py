"""Pictures of a plan: SVG by a small layered layout of its own, and graphviz text of the same scene.

The layout, per group: an item's row is one below the lowest it takes values from (longest path); rows are
centred; an edge to the next row is a curve, a longer one runs in a lane at the left.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from xml.sax.saxutils import escape, quoteattr

from .outline import Outline
from .plan import Plan
from .scene import PORT, Item, scene
from .show import headline, kind_of, meaning, size

LOOKS = {
    "column": "column: output split",
    "row": "row: input split",
    "vocab": "vocabulary or embedding split",
    "other": "otherwise split",
    "replicate": "whole on every rank",
}
# fill, stroke, text
LIGHT = {
    "column": ("#dbe9ff", "#2f6fde", "#12356f"),
    "row": ("#ffe6cc", "#e07b16", "#6b3604"),
    "vocab": ("#d8f3dd", "#2e9e4f", "#0f4a22"),
    "other": ("#d5f2f1", "#1f9a97", "#0b4745"),
    "replicate": ("#eceef1", "#9aa2ad", "#3d444e"),
    "plain": ("#ffffff", "#b9c0ca", "#3d444e"),
    "group": ("#f7f8fa", "#cfd5dd", "#59626f"),
    "collective": ("#e5383b", "#b3191d", "#b3191d"),
    "page": ("#ffffff", "#8b94a1", "#1b2129"),
}
DARK = {
    "column": ("#16305c", "#5b95f5", "#d6e5ff"),
    "row": ("#55310b", "#f09a3e", "#ffe6cc"),
    "vocab": ("#123f20", "#4fc274", "#d3f5dc"),
    "other": ("#0d3f3e", "#3cc0bc", "#d0f4f2"),
    "replicate": ("#2c323b", "#6c7684", "#d5dae1"),
    "plain": ("#1d2229", "#525c69", "#d5dae1"),
    "group": ("#171b21", "#3a424d", "#a5afbc"),
    "collective": ("#ff5a5f", "#ff9a9d", "#ff9a9d"),
    "page": ("#0f1216", "#6f7a88", "#e8ecf1"),
}
GAP_X, GAP_Y, PAD, HEAD, LANE = 22.0, 30.0, 18.0, 30.0, 14.0
MONO, SANS = 6.7, 7.3  # advance of a character at the sizes used here, in px


@dataclass
class Box:
    """An item with its place, relative to the group around it."""

    item: Item
    w: float
    h: float
    content: float = 0.0  # width of the widest row; the lanes are beside it
    inner: list[Box] = field(default_factory=list)
    lanes: dict[tuple[str, str], int] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    x: float = 0.0
    y: float = 0.0


def svg(plan: Plan, shown: Outline, itemsize: int) -> str:
    """The plan as a self-contained SVG document; hovering shows details. Light and dark follow the viewer's
    setting."""
    box = _measure(scene(shown))
    title = f"{plan.model} over {plan.degrees}"
    facts = dict(headline(plan, itemsize))
    given = ", ".join(f"{v.name} {size(v.shape)}" for v in shown.inputs)
    under = (
        f"{facts['block weights sharded']} of the block weights sharded  ·  "
        f"{facts['memory per rank']} on each rank  ·  shapes of rank {shown.rank}, at {given}"
    )
    words = {kind_of(c): meaning(c) for c in plan.collectives}
    diamonds = "  ·  ".join(f"{kind}: {does}" for kind, does in words.items()) or "no collectives"
    legend = [(k, v) for k, v in LOOKS.items() if k in set(_looks(box.item))]
    legend_width = sum(34 + SANS * len(v) for _, v in legend)
    width = (
        max(box.w, SANS * 1.7 * len(title), 6.4 * len(under), 6.4 * len(diamonds) + 20, legend_width)
        + 2 * PAD
    )
    top = 118.0
    height = top + box.h + PAD
    parts = [
        f'<svg class="autotp" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" role="img" aria-label={quoteattr(title)}>',
        f"<style>{_css()}</style>",
        f'<rect class="page" width="{width:.0f}" height="{height:.0f}"/>',
        _text(PAD, 30, title, "title"),
        _text(PAD, 52, under, "facts"),
    ]
    x = PAD
    for look, what in legend:
        parts.append(f'<rect class="{look}" x="{x:.1f}" y="66" width="14" height="14" rx="3"/>')
        parts.append(_text(x + 20, 77, what, "facts"))
        x += 34 + 6.6 * len(what)
    parts.append(_diamond(PAD + 7, 95, 7))
    parts.append(_text(PAD + 20, 99, diamonds, "facts"))
    parts += _draw(box, (width - box.w) / 2, top)
    return "\n".join([*parts, "</svg>\n"])


def _looks(item: Item) -> Iterator[str]:
    yield item.look
    for inner in item.items:
        yield from _looks(inner)


# ---------------------------------------------------------------- layout
def _measure(item: Item) -> Box:
    if item.kind == "group":
        return _measure_group(item)
    if item.kind == "collective":
        label = f"{item.title} · {item.lines[0]}"
        return Box(item, 24 + 2 * (6 + SANS * len(label) * 0.92), 24)
    if item.kind == "op":
        return Box(item, max(28.0, 22 + SANS * len(_title(item))), 26)
    width = max([SANS * 1.1 * len(item.title), *(MONO * len(line) for line in item.lines)])
    return Box(item, width + 26, 28 + 16 * len(item.lines))


def _title(item: Item) -> str:
    return f"{item.title} × {item.count}" if item.count > 1 else item.title


def _measure_group(item: Item) -> Box:
    boxes = [_measure(i) for i in item.items]
    rows = _rows(item.items)
    by_row: dict[int, list[Box]] = defaultdict(list)
    for b in boxes:
        by_row[rows[b.item.key]].append(b)
    content = max(_width(row) for row in by_row.values())
    centre = {PORT: 0.0}  # x of each item, the group's middle being 0
    head = HEAD + 16 * len(item.lines[1:])
    y = head + GAP_Y * 0.6
    for r in sorted(by_row):
        row = by_row[r]
        width = _width(row)
        over = [sum(centre[s] for s in b.item.sources) / len(b.item.sources) for b in row if b.item.sources]
        room = (content - width) / 2
        x = max(-room, min(room, sum(over) / len(over) if over else 0.0)) - width / 2
        tallest = max(b.h for b in row)
        for b in row:
            b.x, b.y = x, y + (tallest - b.h) / 2
            centre[b.item.key] = x + b.w / 2
            x += b.w + GAP_X
        y += tallest + GAP_Y
    lanes = _lanes(item.items, rows, centre)
    side = PAD + LANE * max((abs(n) for n in lanes.values()), default=0)
    title = SANS * 1.05 * (len(item.title) + len(item.lines[0]) + (8 if item.count > 1 else 0)) + 40
    own = (
        max((MONO * len(line) for line in item.lines[1:]), default=0.0) * 2 + 60
    )  # at the left of the middle
    box = Box(
        item,
        max(content + 2 * side, title, own if item.lines[1:] else 0.0),
        y - GAP_Y * 0.3,
        content,
        boxes,
        lanes=lanes,
        rows=rows,
    )
    for b in boxes:
        b.x += box.w / 2
    return box


def _width(row: list[Box]) -> float:
    return sum(b.w for b in row) + GAP_X * (len(row) - 1)


def _rows(items: list[Item]) -> dict[str, int]:
    rows = {PORT: 0}
    for item in items:  # in the order they run, so sources come first
        rows[item.key] = 1 + max((rows[s] for s in item.sources), default=0)
    return rows


def _lanes(items: list[Item], rows: dict[str, int], centre: dict[str, float]) -> dict[tuple[str, str], int]:
    """A lane for each edge that passes a row: the innermost that is free over its rows. Left: -1, -2 …,
    right: 1, 2 …"""
    long = [(rows[s], rows[i.key], s, i.key) for i in items for s in i.sources if rows[i.key] - rows[s] > 1]
    taken: dict[int, list[tuple[int, int]]] = defaultdict(list)
    lanes: dict[tuple[str, str], int] = {}
    for start, stop, source, key in sorted(long, key=lambda e: e[1] - e[0]):
        side = 1 if centre[source] > 1 else -1
        lane = next(n for n in count(1) if all(stop <= a or start >= b for a, b in taken[side * n]))
        taken[side * lane].append((start, stop))
        lanes[source, key] = side * lane
    return lanes


# ---------------------------------------------------------------- SVG
def _css() -> str:
    base = (
        ".autotp text{font:12px system-ui,-apple-system,'Segoe UI',Roboto,sans-serif}"
        ".autotp .title{font-size:20px;font-weight:650}.autotp .facts{font-size:12px}"
        ".autotp .name{font-weight:600;font-size:13px}"
        ".autotp .line{font:11px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}"
        ".autotp path{fill:none;stroke-width:1.6}.autotp rect{stroke-width:1.3}"
        ".autotp .page{stroke:none!important}"
        ".autotp .hit{cursor:pointer}.autotp .hit:hover>rect,.autotp .hit:hover>polygon{stroke-width:3}"
        ".autotp .lit>rect,.autotp .lit>polygon{stroke-width:3}"
    )
    dark = _theme(DARK, ".autotp")
    return (
        f"{base}{_theme(LIGHT, '.autotp')}@media(prefers-color-scheme:dark){{{dark}}}"
        f"{_theme(LIGHT, ':root[data-theme=light] .autotp')}{_theme(DARK, ':root[data-theme=dark] .autotp')}"
    )


def _theme(colours: dict[str, tuple[str, str, str]], at: str) -> str:
    rules = []
    for look, (fill, stroke, ink) in colours.items():
        rules.append(
            f"{at} rect.{look},{at} polygon.{look}{{fill:{fill};stroke:{stroke}}}"
            f"{at} text.{look}{{fill:{ink}}}"
        )
    fill, stroke, ink = colours["page"]
    rules.append(f"{at} path.edge{{stroke:{stroke}}}{at} polygon.tip{{fill:{stroke};stroke:none}}")
    rules.append(f"{at} .title{{fill:{ink}}}{at} .facts{{fill:{colours['group'][2]}}}")
    return "".join(rules)


def _text(x: float, y: float, text: str, cls: str, anchor: str = "start") -> str:
    at = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text class="{cls}" x="{x:.1f}" y="{y:.1f}"{at}>{escape(text)}</text>'


def _diamond(x: float, y: float, r: float) -> str:
    corners = ((x, y - r), (x + r, y), (x, y + r), (x - r, y))
    return f'<polygon class="collective" points="{" ".join(f"{a:.1f},{b:.1f}" for a, b in corners)}"/>'


def _rect(look: str, x: float, y: float, w: float, h: float, radius: int) -> str:
    return f'<rect class="{look}" x="{x:.1f}" y="{y:.1f}" width="{w:.1f}" height="{h:.1f}" rx="{radius}"/>'


def _draw(box: Box, x: float, y: float) -> Iterator[str]:
    item, cx = box.item, x + box.w / 2
    details = "\n".join(f"{label}: {text}" for label, text in item.details)
    yield f'<g class="hit" data-key={quoteattr(item.key)}><title>{escape(details)}</title>'
    if item.kind == "collective":
        yield _diamond(cx, y + box.h / 2, 11)
        yield _text(cx + 17, y + box.h / 2 + 4, f"{item.title} · {item.lines[0]}", "collective")
    elif item.kind == "op":
        yield _rect(item.look, x, y, box.w, box.h, 13)
        yield _text(cx, y + 17.5, _title(item), item.look, "middle")
    elif item.kind == "module":
        yield _rect(item.look, x, y, box.w, box.h, 8)
        yield _text(cx, y + 20, item.title, f"name {item.look}", "middle")
        for n, line in enumerate(item.lines):
            yield _text(cx, y + 37 + 16 * n, line, f"line {item.look}", "middle")
    else:
        for behind in (8, 4) if item.count > 1 else ():  # a stack of cards: this one stands for several
            yield _rect("group", x + behind, y + behind, box.w, box.h, 12)
        yield _rect("group", x, y, box.w, box.h, 12)
        yield _text(x + 14, y + 20, item.title, "name group")
        offset = 14 + SANS * 1.02 * len(item.title) + 10
        yield _text(x + offset, y + 20, item.lines[0] if item.lines[0] != item.title else "", "group")
        for n, line in enumerate(item.lines[1:]):
            yield _text(x + 14, y + 38 + 16 * n, line, f"line {'other' if '→' in line else 'group'}")
        if item.count > 1:
            yield _text(x + box.w - 14, y + 20, f"× {item.count}", "name group", "end")
    yield "</g>"
    if item.kind == "group":
        yield from _edges(box, x, y)
        for inner in box.inner:
            yield from _draw(inner, x + inner.x, y + inner.y)


def _edges(box: Box, x: float, y: float) -> Iterator[str]:
    cx = x + box.w / 2
    at = {b.item.key: b for b in box.inner}
    bottom: dict[int, float] = defaultdict(float)  # of each row
    top: dict[int, float] = defaultdict(lambda: float("inf"))
    in_row: dict[int, int] = defaultdict(int)
    for b in box.inner:
        row = box.rows[b.item.key]
        in_row[row] += 1
        bottom[row] = max(bottom[row], y + b.y + b.h)
        top[row] = min(top[row], y + b.y)
    under = HEAD + 16 * len(box.item.lines[1:])
    titled = under > HEAD or SANS * (len(box.item.title) + len(box.item.lines[0])) + 40 > box.w / 2
    bottom[0] = y + (under if titled else 0)
    for b in box.inner:
        target = x + b.x + b.w / 2, y + b.y
        for source in b.item.sources:
            s = at.get(source)
            start = (x + s.x + s.w / 2, y + s.y + s.h) if s else (cx, bottom[0])
            lane = box.lanes.get((source, b.item.key))
            if lane is None:
                yield _curve(*start, *target)
                continue
            side = 1 if lane > 0 else -1
            beside = cx + side * box.content / 2 + LANE * (lane - 0.3 * side)
            leave = bottom[box.rows[source]] + GAP_Y * 0.3 if s else y + under + GAP_Y * 0.1
            if (
                b.item.kind == "op" and in_row[box.rows[b.item.key]] == 1
            ):  # alone in its row: come in from the side
                yield _lane(*start, leave, beside, target[1] + b.h / 2, target[0] + side * b.w / 2, None)
            else:
                yield _lane(*start, leave, beside, top[box.rows[b.item.key]] - GAP_Y * 0.3, *target)
    for out in box.item.outs():
        b = at[out.key]
        yield _curve(x + b.x + b.w / 2, y + b.y + b.h, cx, y + box.h, tip=False)


def _curve(sx: float, sy: float, tx: float, ty: float, tip: bool = True) -> str:
    mid = (sy + ty) / 2
    end = ty - (5 if tip else 0)
    d = f"M{sx:.1f},{sy:.1f} C{sx:.1f},{mid:.1f} {tx:.1f},{mid:.1f} {tx:.1f},{end:.1f}"
    return f'<path class="edge" d="{d}"/>' + (_tip(tx, ty) if tip else "")


def _lane(sx: float, sy: float, y1: float, lane: float, y2: float, tx: float, ty: float | None) -> str:
    """Down to y1, sideways to the lane, down it to y2 and back: onto the target's top, or (ty None) its
    side."""
    r = 6.0
    away = r if lane > sx else -r
    back = r if tx > lane else -r
    d = (
        f"M{sx:.1f},{sy:.1f} V{y1 - r:.1f} Q{sx:.1f},{y1:.1f} {sx + away:.1f},{y1:.1f} H{lane - away:.1f} "
        f"Q{lane:.1f},{y1:.1f} {lane:.1f},{y1 + r:.1f} V{y2 - r:.1f} "
        f"Q{lane:.1f},{y2:.1f} {lane + back:.1f},{y2:.1f} "
    )
    if ty is None:
        return f'<path class="edge" d="{d}H{tx - back:.1f}"/>{_tip(tx, y2, 1 if back > 0 else -1)}'
    d += f"H{tx - back:.1f} Q{tx:.1f},{y2:.1f} {tx:.1f},{min(y2 + r, ty):.1f} V{ty - 5:.1f}"
    return f'<path class="edge" d="{d}"/>{_tip(tx, ty)}'


def _tip(x: float, y: float, sideways: int = 0) -> str:
    """An arrow head: down onto (x, y), or sideways (1: to the right, -1: to the left)."""
    if sideways:
        back = x - 7 * sideways
        return (
            f'<polygon class="tip" points="{x:.1f},{y:.1f} {back:.1f},{y - 4:.1f} {back:.1f},{y + 4:.1f}"/>'
        )
    return f'<polygon class="tip" points="{x:.1f},{y:.1f} {x - 4:.1f},{y - 7:.1f} {x + 4:.1f},{y - 7:.1f}"/>'


# ---------------------------------------------------------------- graphviz
def dot(plan: Plan, shown: Outline) -> str:
    """The same scene as graphviz text: `autotp dump MODEL --tp 8 --format dot | dot -Tpdf > plan.pdf`."""
    root = scene(shown)
    lines = [
        f"digraph {_quote(plan.model)} {{",
        f"  label={_quote(f'{plan.model} over {plan.degrees}')}; labelloc=t; fontname=Helvetica;",
        '  node [fontname=Helvetica, fontsize=10, style="filled,rounded", shape=box];',
        '  edge [color="#8b94a1"];',
        '  "in" [label="input", shape=plaintext, style=""];',
        *_cluster(root, 1),
        *sorted(set(_dot_edges(root, ["in"]))),
        "}",
    ]
    return "\n".join(lines) + "\n"


def _quote(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


def _cluster(item: Item, depth: int) -> Iterator[str]:
    pad = "  " * depth
    if item.kind != "group":
        fill, stroke, ink = LIGHT[item.look]
        shape = ", shape=diamond, fontcolor=white" if item.kind == "collective" else f', fontcolor="{ink}"'
        label = _quote("\n".join([item.title, *item.lines]))
        yield f'{pad}{_quote(item.key)} [label={label}, fillcolor="{fill}", color="{stroke}"{shape}];'
        return
    times = f" × {item.count}" if item.count > 1 else ""
    fill, stroke, _ = LIGHT["group"]
    yield f"{pad}subgraph {_quote('cluster ' + item.key)} {{"
    yield f"{pad}  label={_quote(f'{item.title}: {item.lines[0]}{times}')};"
    yield f'{pad}  style="filled,rounded"; fillcolor="{fill}"; color="{stroke}";'
    for inner in item.items:
        yield from _cluster(inner, depth + 1)
    yield f"{pad}}}"


def _dot_edges(group: Item, came_from: list[str]) -> Iterator[str]:
    at = {i.key: i for i in group.items}
    for item in group.items:
        sources = [e for s in item.sources for e in (came_from if s == PORT else _ends(at[s]))]
        if item.kind == "group":
            yield from _dot_edges(item, sources)
        else:
            yield from (f"  {_quote(s)} -> {_quote(item.key)};" for s in sources)


def _ends(item: Item) -> list[str]:
    """Where a group's value comes from."""
    return [e for out in item.outs() for e in _ends(out)] if item.kind == "group" else [item.key]
