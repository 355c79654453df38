"""Pictures from outlines made by hand, whose right layout is known, and outlines from a real plan."""

from __future__ import annotations

import re
from itertools import combinations
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from autotp.draw import _lanes, _measure, _rows, dot, svg
from autotp.explain import why
from autotp.outline import Block, Outline, Step, Value, range_of
from autotp.outlining import outline
from autotp.page import html
from autotp.plan import Collective, ParamPlan, Plan
from autotp.planner import analyse, to_plan
from autotp.realise import Where
from autotp.scene import PORT, Item, scene
from autotp.show import fold_collectives, fold_params, human_bytes, text


class Block2(nn.Module):
    """A residual block whose two projections share a hidden axis."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, hiddens=(24, 24, 24)):
        super().__init__()
        self.embed = nn.Embedding(40, 8)
        self.layers = nn.ModuleList(Block2(8, h) for h in hiddens)
        self.never = nn.Linear(3, 5)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x


def planned(model: nn.Module, tp: int = 2, rank: int = 0):
    found = analyse(model.eval(), tp, {"ids": torch.zeros(2, 7, dtype=torch.long)})
    plan = to_plan(model, found, tp)
    return found, plan, outline(found, plan, rank)


@pytest.fixture(scope="module")
def stack():
    return planned(Stack())


# ---------------------------------------------------------------- the outline
def test_alike_layers_are_one_and_all_named(stack):
    _, _, shown = stack
    layers = [b for b in shown.root.blocks() if b.kind == "Block2"]
    assert [b.names for b in layers] == [["layers.0", "layers.1", "layers.2"]]


def test_layers_of_another_size_are_shown_apart():
    _, _, shown = planned(Stack((24, 32, 24)))
    layers = [b for b in shown.root.blocks() if b.kind == "Block2"]
    assert [b.names for b in layers] == [["layers.0", "layers.2"], ["layers.1"]]
    boxes = {i.key: i for i in scene(shown).items}
    assert boxes["g:layers.1"].sources == ["g:layers.0"]  # still a chain, though layers.2 ran last


def test_local_shapes_are_the_ranks_own():
    """25 hidden over 2: 13 and 12."""
    sizes = {}
    for rank in (0, 1):
        _, _, shown = planned(Stack((25,)), rank=rank)
        steps = {s.module: s for s in shown.root.steps() if s.module}
        sizes[rank] = steps["layers.0.up"].values[0].shape, steps["layers.0.down"].values[0]
    assert [s[0] for s in sizes.values()] == [(2, 7, 13), (2, 7, 12)]
    assert sizes[0][1].shape == (2, 7, 8) and sizes[0][1].state == "Partial"


def test_every_collective_is_shown_where_it_is(stack):
    _, plan, shown = stack
    marks = [m for b in shown.root.blocks() for m in b.marks] + [
        m for s in shown.root.steps() for m in s.marks
    ]
    kinds = sorted(m.collective.kind for m in marks)
    # One of three alike layers is shown: a third of the layers' collectives and all of the others.
    own = [c for c in plan.collectives if not str(c.where[0]).startswith(("layers.1", "layers.2"))]
    assert kinds == sorted(c.kind for c in own for _ in c.where)
    down = next(s for s in shown.root.steps() if s.module == "layers.0.down")
    assert [(m.collective.kind, m.before) for m in down.marks] == [("reduce", False)]


def test_what_never_ran_is_told(stack):
    _, plan, shown = stack
    assert [p.name for p in shown.unused] == ["never.weight", "never.bias"]
    assert "not reached: never.weight" in text(plan, shown, 4).plain


def test_text_reads_like_the_model(stack):
    _, plan, shown = stack
    lines = text(plan, shown, 4).plain.splitlines()
    names = ["embed = ", "norm = ", "up = ", "relu = ", "down = ", "◆ reduce", "add = "]
    places = [
        next(i for i, line in enumerate(lines) if line.strip().startswith(n))
        for n in names
        if n != "◆ reduce"
    ]
    assert places == sorted(places)
    assert any("add = embed + down" in line for line in lines)
    assert any("[24, 8] → [12, 8]" in line for line in lines)


def test_why_reports_both_sides(stack):
    found, plan, _ = stack
    said = why(found, plan, "layers.1.up.weight").plain
    assert "24a is sharded: 12 of 24 a rank" in said and "stays whole" in said
    assert "layers.*.down.weight" in said
    assert "never uses it" in why(found, plan, "never.weight").plain
    with pytest.raises(KeyError):
        why(found, plan, "layers.1.up.no")


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["h.0"], "h.0"),
        (["h.0", "h.1", "h.2"], "h.0 … h.2"),
        (["h.0", "h.1", "h.3", "h.5", "h.6"], "h.0 … h.1, h.3, h.5 … h.6"),
        ([f"h.{i}" for i in range(0, 20, 2)], "h.0, 2, … 18"),
    ],
)
def test_ranges_of_names(names, said):
    assert range_of(names) == said


# ---------------------------------------------------------------- the layout
def item(key: str, *sources: str, kind: str = "op") -> Item:
    return Item(key, kind, key, ["x"], "plain", list(sources))


def diamond_of_residuals() -> list[Item]:
    return [
        item("a", PORT),
        item("b", "a"),
        item("c", "a"),
        item("d", "b", "c"),
        item("e", "a", "d"),
        item("f", PORT, "e"),
    ]


def test_rows_are_longest_paths():
    rows = _rows(diamond_of_residuals())
    assert rows == {PORT: 0, "a": 1, "b": 2, "c": 2, "d": 3, "e": 4, "f": 5}


def test_lanes_that_overlap_are_apart():
    items = diamond_of_residuals()
    lanes = _lanes(items, _rows(items), dict.fromkeys([PORT, *"abcdef"], 0.0))
    assert set(lanes) == {("a", "e"), (PORT, "f")}
    assert lanes["a", "e"] != lanes[PORT, "f"]  # one runs beside the other


def test_boxes_of_a_group_never_overlap_and_stay_inside():
    group = Item("g", "group", "g", ["Kind"], "group", [], items=diamond_of_residuals())
    box = _measure(group)
    for a, b in combinations(box.inner, 2):
        apart = a.x + a.w <= b.x or b.x + b.w <= a.x or a.y + a.h <= b.y or b.y + b.h <= a.y
        assert apart, (a.item.key, b.item.key)
    for a in box.inner:
        assert 0 <= a.x and a.x + a.w <= box.w and 0 <= a.y and a.y + a.h <= box.h


# ---------------------------------------------------------------- the formats
def by_hand(name: str = "proj") -> tuple[Plan, Outline]:
    """One layer with a name that markup must not break on."""
    param = ParamPlan(f"{name}.weight", (4, 8), None, "whole", "4a, 8b", "")
    collective = Collective("reduce", (Where("layer", name),), (2, 4), 32, "sums <&> more")
    plan = Plan(
        "A<B>&C", 2, {param.name: param}, (), (collective,), (), (), {param.name: "because <it> is & stays"}
    )
    value = Value(name, (2, 4), (2, 4), "float32", "Replicate")
    step = Step("n", "Linear", f"{name} = Linear(x)", (value,), ("x",), module=name, params=(param,))
    root = Block("", "", "A<B>&C", [""], [step])
    return plan, Outline(root, (Value("x", (2, 8), (2, 8), "float32", "Replicate"),), 0, {}, ())


def test_markup_in_names_is_escaped():
    plan, shown = by_hand('p<r>"o&j')
    root = ElementTree.fromstring(svg(plan, shown, 4))
    assert 'p<r>"o&j' in {e.text for e in root.iter("{http://www.w3.org/2000/svg}text")}
    page = html(plan, shown, 4)
    assert "because &lt;it&gt; is &amp; stays" in page and "A<B>" not in page.split("<script>")[0]
    assert r'"p<r>\"o&j' in dot(plan, shown).replace("s:n", "")


def test_svg_is_the_same_every_time(stack):
    _, plan, shown = stack
    assert svg(plan, shown, 4) == svg(plan, shown, 4)


def test_svg_edges_end_inside_the_picture(stack):
    _, plan, shown = stack
    drawn = svg(plan, shown, 4)
    width, height = map(float, ElementTree.fromstring(drawn).attrib["viewBox"].split()[2:])
    numbers = [p for d in re.findall(r' d="([^"]+)"', drawn) for p in re.findall(r"([-\d.]+),([-\d.]+)", d)]
    assert len(numbers) > 20
    assert all(0 <= float(x) <= width and 0 <= float(y) <= height for x, y in numbers)


def test_collective_chips_follow_the_layer_that_sends(stack):
    _, _, shown = stack
    layer = next(i for i in scene(shown).items if i.title.startswith("layers"))
    kinds = {i.key: i for i in layer.items}
    reduce = next(i for i in layer.items if i.kind == "collective" and i.title.startswith("reduce"))
    assert [kinds[s].title for s in reduce.sources] == ["down"]
    total = next(i for i in layer.items if i.title == "+")
    assert set(total.sources) == {PORT, reduce.key}  # the residual and the reduced branch


def test_folded_tables_lose_nothing(stack):
    _, plan, _ = stack
    assert sum(count for _, count, _ in fold_params(plan)) == len(plan.params)
    assert sum(count for _, _, count in fold_collectives(plan)) == len(plan.collectives)
    assert ("layers.*.up.weight", 3) in [(name, count) for name, count, _ in fold_params(plan)]


@pytest.mark.parametrize(
    ("n", "said"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 * 2**40, "3.0 TiB")]
)
def test_bytes_for_people(n, said):
    assert human_bytes(n) == said
