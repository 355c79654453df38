"""Making an outline: one walk over the captured graph, with the plan's shapes, numbers and collectives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from .captured import CapturedGraph
from .ints import evaluate
from .outline import BEFORE, Block, Mark, Outline, Step, Value, fold
from .plan import ParamPlan, Plan
from .planner import Analysis
from .solve import LocalShapes


def outline(found: Analysis, plan: Plan, rank: int = 0) -> Outline:
    """The outline of `plan` on `rank`, folded."""
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
        cut = [d for d, (a, b) in enumerate(zip(whole, local, strict=True)) if a != b]
        return ", ".join(f"Shard({d})" for d in cut) or "Shard"

    def int_of(value: Any) -> int:
        known = _Known(attributes, found.index.attribute)
        try:
            return int(evaluate(value.expr, known, shapes.dim))
        except (KeyError, AttributeError, ZeroDivisionError):
            return int(value)

    arguments = {(a.where.site, a.where.path): a.local[rank] for a in plan.arguments}

    def multiplies(node: fx.Node) -> bool:
        carried = found.index.carried  # an operand's axis that the result lacks was summed over
        return any(carried[n] - carried[node] for n in _operands(node) if n.op != "get_attr")

    return build(found.captured, plan, rank, shape_of, state_of, int_of, multiplies, arguments)


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
    multiplies: Callable[[fx.Node], bool] = lambda node: False,
    arguments: Mapping[Any, int] | None = None,
) -> Outline:
    """The outline of a captured graph: `outline` with local shapes, states, ints and contractions given as
    functions."""
    builder = _Builder(captured, plan, shape_of, state_of, int_of, multiplies, arguments or {})
    root = builder.run()
    alias: dict[str, str] = {}
    fold(root, alias)
    unused = tuple(p for p in plan.params.values() if not {p.name, *p.also} & builder.reached)
    return Outline(root, tuple(builder.inputs), rank, alias, unused)


class _Builder:
    """Walks the graph once, opening and closing a block for each module call."""

    def __init__(
        self,
        captured: CapturedGraph,
        plan: Plan,
        shape_of: Callable[[fx.Node], tuple[int, ...]],
        state_of: Callable[[fx.Node], str],
        int_of: Callable[[Any], int],
        multiplies: Callable[[fx.Node], bool],
        arguments: Mapping[Any, int],
    ) -> None:
        self.captured, self.plan, self.multiplies = captured, plan, multiplies
        self.shape_of, self.state_of, self.int_of, self.arguments = shape_of, state_of, int_of, arguments
        self.inputs: list[Value] = []
        self.reached: set[str] = set()
        self.flowing: set[fx.Node] = set()  # values that a gradient goes through
        self.names: dict[fx.Node, str] = {}  # what a value is called where it is made
        self.home: dict[fx.Node, tuple[Block, ...]] = {}
        self.counts: dict[int, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        self.by_name = {n: p for p in plan.params.values() for n in (p.name, *p.also)}
        self.below: dict[str, list[str]] = defaultdict(list)  # by module path, the parameters anywhere in it
        for name in self.by_name:
            parts = name.split(".")
            for n in range(len(parts)):
                self.below[".".join(parts[:n])].append(name)
        self.layers = {layer.module: layer.kind for layer in plan.layers}
        self.marks: dict[tuple[str, Any], list[Mark]] = defaultdict(list)
        for collective in plan.collectives:
            for where in collective.where:
                mark = Mark(collective, where, where.kind in ("in", "before") or collective.kind in BEFORE)
                self.marks[where.module, where.site].append(mark)
        self.modules = dict(captured.skeleton.named_modules(remove_duplicate=False))
        self.unit_calls: dict[str, int] = defaultdict(int)

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
                inner.stage = self.stage(call.path, [b for b, _ in stack])
                stack[-1][0].items.append(inner)
                stack.append((inner, call.last))
            self.node(node, tuple(b for b, _ in stack))
        return root

    def stage(self, path: str, around: Sequence[Block]) -> int | None:
        """The pipeline stage of the next call of a module, where that is a unit."""
        stages = self.plan.stages
        call = path, self.unit_calls[path]
        if stages is None or call not in stages.stage_of or any(b.stage is not None for b in around):
            return None
        self.unit_calls[path] += 1
        return stages.stage_of[call]

    def block(self, path: str, around: Block | None) -> Block:
        label = path
        if around is not None and around.path and path.startswith(around.path + "."):
            label = path[len(around.path) + 1 :]
        kind = type(self.modules[path]).__name__ if path else self.plan.model
        ints = tuple(i for i in self.plan.ints if i.module == path)
        return Block(
            path,
            label,
            kind,
            [path],
            params=self.own(path, False),
            ints=ints,
            marks=self.marks_at(path, None),
        )

    def marks_at(self, module: str, site: Any) -> list[Mark]:
        """The collectives at a place. Several alike (a loop's turns) are one: each turn crosses one."""
        alike = {
            (m.collective.kind, m.collective.enter, m.collective.shape, m.where): m
            for m in self.marks[module, site]
        }
        return list(alike.values())

    def own(self, path: str, below: bool) -> tuple[ParamPlan, ...]:
        """The parameters of a module, and of those below it if asked."""
        start = len(path) + 1 if path else 0
        names = [n for n in self.below[path] if below or "." not in n[start:]]
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
        called = "item" if op == "getitem" else op
        base = (
            leaf[len(here.path) + 1 :]
            if leaf and here.path and leaf.startswith(here.path + ".")
            else leaf or called
        )
        count = self.counts[id(here)][base]
        self.counts[id(here)][base] += 1
        self.names[node] = f"{base}_{count}" if count else base
        # Inside a torch.autograd.Function nothing requires a gradient, yet one goes through it.
        made_of = any(n in self.flowing for n in _operands(node)) and tensors[0].is_floating_point()
        if node.meta.get("grad") or made_of:
            self.flowing.add(node)
        uses = tuple(n.name for n in _operands(node) if n in self.flowing)
        site = node.meta.get("site")
        marks = self.marks_at(leaf, None) if leaf else self.marks_at(str(node.meta.get("scope", "")), site)
        step = Step(
            node=node.name,
            op=op,
            text=f"{self.names[node]} = {self.call(node, stack, op, leaf)}",
            values=tuple(self.value(node, t) for t in tensors),
            uses=uses,
            place=site,
            joins=len(set(uses)) > 1 and self.multiplies(node),
            grad=node in self.flowing,
            module=leaf,
            layer=self.layers.get(leaf or "", ""),
            params=self.own(leaf, True) if leaf else (),
            marks=marks,
            stage=self.stage(leaf, stack) if leaf else None,
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
        if leaf is None and op == "getitem":
            return f"{shown[0]}[{', '.join(shown[1:]).strip('()')}]"
        if leaf is None and op in _SYMBOLS and len(shown) == 2 and not named:
            return f"{shown[0]} {_SYMBOLS[op]} {shown[1]}"
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
        """A value's name as seen from another block: the name of the module it came out of, unless it was
        made here."""
        name = self.names.get(node, node.name)
        home = self.home.get(node)
        if home is None or home[-1] is stack[-1] or not home[-1].path:
            return name
        if any(home[-1] is block for block in stack):
            return f"{home[-1].label}.{name}"
        shared = sum(a is b for a, b in zip(home, stack, strict=False))
        return (
            home[shared].label.rsplit(".", 1)[-1]
            if not home[shared].label[-1:].isdigit()
            else home[shared].label
        )


_SYMBOLS = {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "div": "/", "pow": "**", "matmul": "@",
    "eq": "==", "ne": "!=", "le": "<=", "lt": "<", "ge": ">=", "gt": ">", "and": "&", "or": "|",
}  # fmt: skip


def _op_name(node: fx.Node) -> str:
    """`add` for torch.add, Tensor.add and Tensor.__add__ alike."""
    return getattr(node.target, "__name__", str(node.target)).rsplit(".", 1)[-1].strip("_")


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for v in value for t in _tensors(v)] if isinstance(value, (tuple, list)) else []


def _operands(node: fx.Node) -> list[fx.Node]:
    return [n for n in node.all_input_nodes if _tensors(n.meta.get("val"))]
