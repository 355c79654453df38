"""A plan as it reads: the model's modules in the order they run, each operation with its local shape, alike layers once.

`outline` turns the captured graph and the plan into a tree of `Block`s (module calls) and `Step`s (operations and leaf
modules). The text dump, the tables and every picture are drawn from this tree, so they can't tell different stories.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from .captured import CapturedGraph
from .plan import Collective, LocalInt, ParamPlan, Plan
from .realise import Where

if TYPE_CHECKING:
    from .planner import Analysis

BEFORE = ("enter", "slice")  # arrows that convert what comes in; the others convert what comes out


@dataclass(frozen=True)
class Mark:
    """A collective at one place, before or after the step or block it belongs to. `value`: the value that crosses."""

    collective: Collective
    where: Where
    before: bool


@dataclass(frozen=True)
class Value:
    """What a step gives on one rank. state: Replicate, Shard(dims) or Partial."""

    name: str
    shape: tuple[int, ...]
    whole: tuple[int, ...]
    dtype: str
    state: str


@dataclass
class Step:
    """One operation, or one leaf module (`module` is its path then).

    operands: the names of the tensors it takes, with what is given beside them as text. uses: the graph's own names of
    the values it takes that carry a gradient: the edges of a drawing. joins: it multiplies several of them together.
    """

    node: str
    op: str
    text: str
    values: tuple[Value, ...]
    uses: tuple[str, ...]
    joins: bool = False
    module: str | None = None
    layer: str = ""  # column, row, vocab, ...: the parallel layer it becomes
    params: tuple[ParamPlan, ...] = ()
    marks: list[Mark] = field(default_factory=list)


@dataclass
class Block:
    """One call of a module that has steps of its own. `names`: the paths of all that are alike, the first is shown."""

    path: str
    label: str  # relative to the block around it
    kind: str  # class name
    names: list[str] = field(default_factory=list)
    items: list[Step | Block] = field(default_factory=list)
    params: tuple[ParamPlan, ...] = ()
    ints: tuple[LocalInt, ...] = ()
    marks: list[Mark] = field(default_factory=list)

    def steps(self) -> Iterator[Step]:
        """Every step below, in the order they run."""
        for item in self.items:
            if isinstance(item, Step):
                yield item
            else:
                yield from item.steps()

    def blocks(self) -> Iterator[Block]:
        """This block and every one below it."""
        yield self
        for item in self.items:
            if isinstance(item, Block):
                yield from item.blocks()


@dataclass
class Outline:
    """The tree, folded; `alias` names, for every value of a folded block, the shown one that stands for it."""

    root: Block
    inputs: tuple[Value, ...]
    rank: int
    alias: Mapping[str, str]
    unused: tuple[ParamPlan, ...]  # parameters of modules that the captured run never reached


def outline(found: Analysis, plan: Plan, rank: int = 0) -> Outline:
    """The outline of `plan` on `rank`, folded."""
    from .solve import LocalShapes

    shapes = LocalShapes(found.index, found.choice, rank)
    partial = {n for flow in found.choice.flows.values() for n in flow.partial}
    attributes = {(i.module, i.name): i.local[rank] for i in plan.ints}

    def shape_of(node: fx.Node) -> tuple[int, ...]:
        return shapes.shape(node) if node in found.placement.sharded else tuple(node.meta["val"].shape)

    def state_of(node: fx.Node) -> str:
        if node in partial:
            return "Partial"
        if node not in found.placement.sharded or not isinstance(node.meta.get("val"), torch.Tensor):
            return "Replicate" if node not in found.placement.sharded else "Shard"
        whole, local = node.meta["val"].shape, shape_of(node)
        cut = [d for d, (a, b) in enumerate(zip(whole, local)) if a != b]
        return ", ".join(f"Shard({d})" for d in cut) or "Shard"

    def int_of(value: Any) -> int:
        from .ints import evaluate

        known = _Known(attributes, found.index.attribute)
        try:
            return int(evaluate(value.expr, known, shapes.dim))
        except (KeyError, AttributeError, ZeroDivisionError):
            return int(value)

    arguments = {(a.where.site, a.where.path): a.local[rank] for a in plan.arguments}
    return build(found.captured, plan, rank, shape_of, state_of, int_of, arguments)


class _Known(dict[tuple[str, str], Any]):
    """Attributes of modules: the local values, and the model's own for the rest."""

    def __init__(self, local: Mapping[tuple[str, str], int], other: Callable[[str, str], Any]):
        super().__init__(local)
        self.other = other

    def __missing__(self, key: tuple[str, str]) -> Any:
        return self.other(*key)


def build(
    captured: CapturedGraph,
    plan: Plan,
    rank: int = 0,
    shape_of: Callable[[fx.Node], tuple[int, ...]] = lambda node: tuple(node.meta["val"].shape),
    state_of: Callable[[fx.Node], str] = lambda node: "Replicate",
    int_of: Callable[[Any], int] = int,
    arguments: Mapping[Any, int] | None = None,
) -> Outline:
    """The outline of a captured graph: `outline` with the local shapes, states and ints given as functions."""
    builder = _Builder(captured, plan, shape_of, state_of, int_of, arguments or {})
    root = builder.run()
    alias: dict[str, str] = {}
    _fold(root, alias)
    unused = tuple(p for p in plan.params.values() if not {p.name, *p.also} & builder.reached)
    return Outline(root, tuple(builder.inputs), rank, alias, unused)


class _Builder:
    """Walks the graph once, opening and closing a block for each module call."""

    def __init__(self, captured, plan, shape_of, state_of, int_of, arguments) -> None:
        self.captured, self.plan = captured, plan
        self.shape_of, self.state_of, self.int_of, self.arguments = shape_of, state_of, int_of, arguments
        self.inputs: list[Value] = []
        self.reached: set[str] = set()
        self.names: dict[fx.Node, str] = {}  # what a value is called where it is made
        self.home: dict[fx.Node, tuple[Block, ...]] = {}
        self.counts: dict[int, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        self.by_name = {n: p for p in plan.params.values() for n in (p.name, *p.also)}
        self.layers = {layer.module: layer.kind for layer in plan.layers}
        self.marks: dict[tuple[str, Any], list[Mark]] = defaultdict(list)
        for collective in plan.collectives:
            for where in collective.where:
                mark = Mark(collective, where, where.kind in ("in", "before") or collective.kind in BEFORE)
                self.marks[where.module, where.site].append(mark)
        self.modules = dict(captured.skeleton.named_modules(remove_duplicate=False))

    def run(self) -> Block:
        root = self.block("", None)
        stack: list[tuple[Block, int]] = [(root, len(self.captured.graph.nodes))]
        waiting = [c for c in self.captured.calls if not c.leaf and c.path and c.last >= c.first]
        waiting.reverse()
        for i, node in enumerate(self.captured.graph.nodes):
            while stack[-1][1] < i:
                stack.pop()
            while waiting and waiting[-1].first <= i:
                call = waiting.pop()
                if call.last < i:
                    continue
                inner = self.block(call.path, stack[-1][0])
                stack[-1][0].items.append(inner)
                stack.append((inner, call.last))
            self.node(node, tuple(b for b, _ in stack))
        return root

    def block(self, path: str, around: Block | None) -> Block:
        label = path
        if around is not None and around.path and path.startswith(around.path + "."):
            label = path[len(around.path) + 1 :]
        kind = type(self.modules[path]).__name__ if path else self.plan.model
        ints = tuple(i for i in self.plan.ints if i.module == path)
        return Block(path, label, kind, [path], params=self.own(path, False), ints=ints, marks=self.marks_at(path, None))

    def marks_at(self, module: str, site: Any) -> list[Mark]:
        return list(self.marks.get((module, site), ()))

    def own(self, path: str, below: bool) -> tuple[ParamPlan, ...]:
        """The parameters of a module, and of those below it if asked."""
        prefix = f"{path}." if path else ""
        names = [n for n in self.by_name if n.startswith(prefix) and (below or "." not in n[len(prefix) :])]
        self.reached.update(names)
        return tuple(self.by_name[n] for n in names)

    def node(self, node: fx.Node, stack: tuple[Block, ...]) -> None:
        tensors = _tensors(node.meta.get("val"))
        if node.op in ("output", "get_attr") or not tensors:
            if node.op == "get_attr":
                self.names[node] = str(node.target).rsplit(".", 1)[-1]
            return
        here = stack[-1]
        self.home[node] = stack
        if node.op == "placeholder":
            self.names[node] = str(node.target)
            self.inputs.append(self.value(node, tensors[0]))
            return
        leaf = str(node.target) if node.op == "call_module" else None
        op = type(self.modules[leaf]).__name__ if leaf else _op_name(node)
        base = leaf[len(here.path) + 1 :] if leaf and here.path and leaf.startswith(here.path + ".") else leaf or op
        count = self.counts[id(here)][base]
        self.counts[id(here)][base] += 1
        self.names[node] = f"{base}_{count}" if count else base
        uses = tuple(n.name for n in _operands(node) if n.op != "get_attr" and n.meta.get("grad"))
        site = node.meta.get("site")
        marks = self.marks_at(leaf, None) if leaf else self.marks_at(str(node.meta.get("scope", "")), site)
        step = Step(
            node=node.name,
            op=op,
            text=f"{self.names[node]} = {self.call(node, stack, op, leaf)}",
            values=tuple(self.value(node, t) for t in tensors),
            uses=uses,
            joins=len(uses) > 1,
            module=leaf,
            layer=self.layers.get(leaf or "", ""),
            params=self.own(leaf, True) if leaf else (),
            marks=marks,
        )
        here.items.append(step)

    def value(self, node: fx.Node, tensor: torch.Tensor) -> Value:
        single = isinstance(node.meta["val"], torch.Tensor)
        shape = self.shape_of(node) if single else tuple(tensor.shape)
        dtype = str(tensor.dtype).removeprefix("torch.")
        return Value(self.names.get(node, node.name), shape, tuple(tensor.shape), dtype, self.state_of(node))

    def call(self, node: fx.Node, stack: tuple[Block, ...], op: str, leaf: str | None) -> str:
        args = node.meta.get("args", node.args)
        kwargs = node.meta.get("kwargs", node.kwargs)
        shown = [self.argument(a, node, stack, (i,)) for i, a in enumerate(args)]
        named = [f"{k}={self.argument(a, node, stack, (k,))}" for k, a in kwargs.items() if a is not None]
        if leaf is None and op.startswith("__getitem__"):
            return f"{shown[0]}[{', '.join(shown[1:]).strip('()')}]"
        return f"{op}({', '.join([*shown, *named])})"

    def argument(self, a: Any, node: fx.Node, stack: tuple[Block, ...], path: tuple[Any, ...]) -> str:
        if isinstance(a, fx.Node):
            return self.reference(a, stack)
        if isinstance(a, (tuple, list)):
            inner = ", ".join(self.argument(x, node, stack, (*path, i)) for i, x in enumerate(a))
            return f"({inner})" if isinstance(a, tuple) else f"[{inner}]"
        if isinstance(a, slice):
            parts = [(s, getattr(a, s)) for s in ("start", "stop", "step")]
            text = ":".join("" if x is None else self.argument(x, node, stack, (*path, s)) for s, x in parts)
            return text.removesuffix(":") if a.step is None else text
        if isinstance(a, int) and not isinstance(a, bool):
            local = self.arguments.get((node.meta.get("site"), path))
            return str(local if local is not None else self.int_of(a) if hasattr(a, "expr") else int(a))
        if isinstance(a, float):
            return f"{float(a):.6g}"
        return "…" if a is Ellipsis else str(a).removeprefix("torch.")

    def reference(self, node: fx.Node, stack: tuple[Block, ...]) -> str:
        """A value's name as seen from another block: the name of the module it came out of, unless it was made here."""
        name = self.names.get(node, node.name)
        home = self.home.get(node)
        if home is None or home[-1] in stack:
            return name
        shared = sum(a is b for a, b in zip(home, stack))
        return home[shared].label.rsplit(".", 1)[-1] if not home[shared].label[-1:].isdigit() else home[shared].label


def _op_name(node: fx.Node) -> str:
    return getattr(node.target, "__name__", str(node.target)).rsplit(".", 1)[-1]


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for v in value for t in _tensors(v)] if isinstance(value, (tuple, list)) else []


def _operands(node: fx.Node) -> list[fx.Node]:
    return [n for n in node.all_input_nodes if _tensors(n.meta.get("val"))]


# ---------------------------------------------------------------- folding
def _fold(block: Block, alias: dict[str, str]) -> tuple[Any, ...]:
    """Show alike siblings once. Gives what makes two blocks alike: everything but their names."""
    first: dict[Any, Block] = {}
    kept: list[Step | Block] = []
    prints: list[Any] = []
    for item in block.items:
        if isinstance(item, Step):
            kept.append(item)
            prints.append(_print_step(item, block.path))
            continue
        before = [s.node for s in item.steps()]
        own = _fold(item, alias)
        prints.append((_stem(item.label) or item.label, own))
        key = (_stem(item.label), own)
        like = first.get(key) if key[0] else None  # only numbered siblings: members of a list of layers
        if like is None:
            first[key] = item
            kept.append(item)
        else:
            like.names += item.names
            shown = [s.node for s in like.steps()]
            folded = [s.node for s in item.steps()]
            alias.update(zip(folded, shown))
            alias.update((n, alias[alias[n]]) for n in before if alias.get(n) in alias)
    block.items = kept
    own_params = tuple((p.name.rsplit(".", 1)[-1], p.shape, p.placement) for p in block.params)
    ints = tuple((i.name, i.local) for i in block.ints)
    return (block.kind, own_params, ints, _print_marks(block.marks), tuple(prints))


def _stem(label: str) -> str:
    """`layers.` of `layers.3`; nothing for a block that isn't numbered."""
    return label.rstrip("0123456789") if label[-1:].isdigit() else ""


def _print_step(step: Step, path: str) -> tuple[Any, ...]:
    params = tuple((p.name.rsplit(".", 1)[-1], p.shape, p.placement, p.once) for p in step.params)
    values = tuple((v.shape, v.state, v.dtype) for v in step.values)
    module = (step.module or "").removeprefix(path)
    return (step.op, step.layer, module, values, params, _print_marks(step.marks))


def _print_marks(marks: list[Mark]) -> tuple[Any, ...]:
    return tuple((m.collective.kind, m.collective.enter, m.collective.bytes, m.where.kind, m.where.path) for m in marks)


def range_of(names: list[str]) -> str:
    """`layers.0 … layers.31`, with gaps written out: the paths of folded siblings, given as labels."""
    numbers = [int(n[len(n.rstrip("0123456789")) :]) for n in names if n[-1:].isdigit()]
    if len(names) == 1 or len(numbers) != len(names):
        return ", ".join(names)
    stem = _stem(names[0])
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    if len(runs) > 4:
        return f"{stem}{numbers[0]}, {numbers[1]}, … {numbers[-1]}"
    return ", ".join(f"{stem}{a}" if a == b else f"{stem}{a} … {stem}{b}" for a, b in runs)
