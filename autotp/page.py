"""A plan as one self-contained HTML page: the picture, the tables, details on hover, light and dark."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from html import escape

from .draw import svg
from .outline import Outline
from .pipeline.show import stage_rows
from .plan import Plan
from .scene import Item, scene
from .show import (
    fold_collectives,
    fold_ints,
    fold_kept,
    headline,
    human_bytes,
    kind_of,
    meaning,
    size,
)


def html(plan: Plan, shown: Outline, itemsize: int) -> str:
    """The page. Every parameter is listed; the picture and the parameter table point at each other."""
    cards = "".join(
        f"<div class=card><b>{escape(v)}</b><span>{escape(k)}</span></div>"
        for k, v in headline(plan, itemsize)
    )
    details = {i.key: {"title": i.title, "rows": i.details, "params": i.params} for i in _all(scene(shown))}
    data = json.dumps(details).replace("</", "<\\/")
    title = f"{plan.model} over {plan.degrees}"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1">
<title>{escape(title)}</title><style>{_CSS}</style></head><body>
<header><h1>{escape(title)}</h1><button id="theme" title="light or dark">◐</button></header>
<div class="cards">{cards}</div>
<main><section class="picture">{svg(plan, shown, itemsize)}</section>
<aside id="details"><p class="dim">Point at a box. Click to keep it.</p></aside></main>
{"".join(_sections(plan, shown, itemsize))}
<script>const DETAILS={data};{_JS}</script></body></html>
"""


def _all(item: Item) -> Iterator[Item]:
    yield item
    for inner in item.items:
        yield from _all(inner)


def _sections(plan: Plan, shown: Outline, itemsize: int) -> Iterator[str]:
    rank = shown.rank
    rows = []
    for p in plan.params.values():
        look = "sharded" if p.layout else "replicate"
        name = p.name + "".join(f" = {other}" for other in p.also)
        cells = (
            name,
            size(p.shape),
            size(p.local_shape(rank)),
            p.placement,
            p.axes,
            p.gradient,
            p.why or plan.kept.get(p.name, ""),
        )
        rows.append(f'<tr class="{look}" data-param="{escape(p.name)}">{_cells(cells)}</tr>')
    head = ("name", "whole", f"rank {rank}", "placement", "axes", "gradient", "why")
    search = (
        '<input id="filter" type="search" placeholder="filter parameters" aria-label="filter parameters">'
    )
    yield f"<section><h2>Parameters {search}</h2>{_table(head, rows, 'params')}</section>"
    rows = [
        _row(str(r.stage), r.units, human_bytes(r.bytes), f"{r.share:.1%}", "; ".join(r.sends),
             human_bytes(r.sent_bytes) if r.sends else "")
        for r in stage_rows(plan, itemsize, rank)
    ]
    if rows:
        table = _table(("stage", "units", f"memory of rank {rank}", "of the FLOPs", "sends", "bytes"), rows)
        yield f"<section><h2>Pipeline stages</h2>{table}</section>"
    rows = [
        _row(kind_of(c), _times(n), ", ".join(w), size(c.shape), human_bytes(c.bytes), meaning(c), c.why)
        for c, w, n in fold_collectives(plan)
    ]
    if rows:
        head = ("collective", "", "where", "value", "bytes", "what it does", "why")
        yield f"<section><h2>Collectives</h2>{_table(head, rows)}</section>"
    rows = [_row(place, _times(n), str(whole), mine) for place, whole, mine, n in fold_ints(plan)]
    if rows:
        table = _table(("where", "", "whole", "local"), rows)
        yield f"<section><h2>Numbers that become local</h2>{table}</section>"
    rows = [_row(name, _times(n), why) for name, why, n in fold_kept(plan)]
    if rows:
        yield f"<section><h2>Weights that stay whole</h2>{_table(('name', '', 'why'), rows)}</section>"
    if plan.notes:
        items = "".join(f"<li>{escape(note)}</li>" for note in plan.notes)
        yield f"<section><h2>Notes</h2><ul>{items}</ul></section>"


def _times(n: int) -> str:
    return f"× {n}" if n > 1 else ""


def _row(*cells: str) -> str:
    return f"<tr>{_cells(cells)}</tr>"


def _cells(cells: Iterable[str]) -> str:
    return "".join(f"<td>{escape(c)}</td>" for c in cells)


def _table(head: Iterable[str], rows: list[str], name: str = "") -> str:
    top = "".join(f"<th>{escape(h)}</th>" for h in head)
    body = f"<thead><tr>{top}</tr></thead><tbody>{''.join(rows)}</tbody>"
    return f'<div class="scroll"><table id="{name}">{body}</table></div>'


_CSS = """
:root{--bg:#fff;--ink:#1b2129;--dim:#69737f;--line:#e2e6eb;--card:#f7f8fa;--lit:#fff3c4}
@media(prefers-color-scheme:dark){
:root{--bg:#0f1216;--ink:#e8ecf1;--dim:#98a3b0;--line:#2b323b;--card:#171b21;--lit:#4a3f12}
}
:root[data-theme=light]{--bg:#fff;--ink:#1b2129;--dim:#69737f;--line:#e2e6eb;--card:#f7f8fa;--lit:#fff3c4}
:root[data-theme=dark]{--bg:#0f1216;--ink:#e8ecf1;--dim:#98a3b0;--line:#2b323b;--card:#171b21;--lit:#4a3f12}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1400px;padding:24px;background:var(--bg);color:var(--ink);
font:14px/1.45 system-ui,-apple-system,'Segoe UI',Roboto,sans-serif}
header{display:flex;justify-content:space-between;align-items:center}h1{font-size:22px;margin:0}
h2{font-size:16px;margin:32px 0 10px;display:flex;gap:16px;align-items:center}
button,input{font:inherit;color:inherit;background:var(--card);border:1px solid var(--line);
border-radius:8px;padding:4px 10px}
input{font-weight:400;width:280px}.dim{color:var(--dim)}
.cards{display:flex;flex-wrap:wrap;gap:10px;margin:16px 0}
.card{background:var(--card);border:1px solid var(--line);
border-radius:10px;padding:8px 14px}
.card b{display:block;font-size:16px}.card span{color:var(--dim);font-size:12px}
main{display:grid;grid-template-columns:minmax(0,1fr) 360px;gap:18px;align-items:start}
@media(max-width:900px){main{grid-template-columns:1fr}}
.picture{overflow:auto;border:1px solid var(--line);border-radius:12px;max-height:86vh}
.picture svg{display:block;margin:0 auto}
#details{position:sticky;top:16px;background:var(--card);border:1px solid var(--line);border-radius:12px;
padding:14px;max-height:86vh;overflow:auto}#details h3{margin:0 0 8px;font-size:15px}#details dl{margin:0}
#details dt{color:var(--dim);font-size:12px;margin-top:7px;overflow-wrap:anywhere}
#details dd{margin:0;overflow-wrap:anywhere;
font:12px/1.4 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
.scroll{overflow-x:auto;max-height:70vh;overflow-y:auto;border:1px solid var(--line);border-radius:10px}
table{border-collapse:collapse;width:100%;font-size:12.5px}
th{position:sticky;top:0;background:var(--card);text-align:left}
th,td{padding:5px 10px;border-bottom:1px solid var(--line);vertical-align:top}
td:nth-child(-n+3){font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}
tr.replicate td{color:var(--dim)}tr.lit td{background:var(--lit)}
"""

_JS = """
const root=document.documentElement,panel=document.getElementById('details');let kept=null;
document.getElementById('theme').onclick=()=>{const dark=root.dataset.theme?root.dataset.theme==='dark':
matchMedia('(prefers-color-scheme:dark)').matches;root.dataset.theme=dark?'light':'dark'};
const rows=[...document.querySelectorAll('#params tbody tr')],hits=[...document.querySelectorAll('.hit')];
const el=(tag,text)=>{const e=document.createElement(tag);e.textContent=text;return e};
function show(key){const d=DETAILS[key];if(!d)return;
panel.replaceChildren(el('h3',d.title));const dl=document.createElement('dl');
for(const[k,v]of d.rows)dl.append(el('dt',k),el('dd',v));panel.append(dl);
const names=new Set(d.params);for(const r of rows)r.classList.toggle('lit',names.has(r.dataset.param))}
function light(keys){for(const h of hits)h.classList.toggle('lit',keys.has(h.dataset.key))}
for(const h of hits){h.querySelector('title')?.remove();
h.onmouseenter=()=>{if(!kept)show(h.dataset.key)};
h.onclick=()=>{kept=kept===h.dataset.key?null:h.dataset.key;
show(h.dataset.key);light(new Set(kept?[kept]:[]))}}
const holding=name=>new Set(Object.keys(DETAILS).filter(k=>DETAILS[k].params.includes(name)));
for(const r of rows)r.onmouseenter=()=>{if(!kept)light(holding(r.dataset.param))};
document.getElementById('filter').oninput=e=>{const t=e.target.value.toLowerCase();
for(const r of rows)r.hidden=!r.textContent.toLowerCase().includes(t)};
"""
