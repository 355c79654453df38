"""A captured graph with its axes, indexed the ways the planner asks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from .axes import Axis, leaves
from .captured import CapturedGraph, ModuleCall
from .ints import plain
from .propagate import Axes, Facts

RANDOM = (
    "scaled_dot_product_attention", "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout",
    "feature_alpha_dropout", "rrelu", "bernoulli", "rand_like", "randn_like",
)  # fmt: skip
"""Functions that draw random numbers, in training at least."""


@dataclass(frozen=True)
class Operand:
    """One tensor operand of a node: where it stands among the arguments, and the node that makes it."""

    path: tuple[int | str, ...]
    node: fx.Node


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_of(item)


def walk(tree: Any, path: tuple[int | str, ...] = ()) -> Iterator[tuple[tuple[int | str, ...], Any]]:
    """Every leaf of nested tuples, lists, dicts and slices, with its path."""
    if isinstance(tree, (tuple, list)):
        for i, item in enumerate(tree):
            yield from walk(item, (*path, i))
    elif isinstance(tree, dict):
        for key, item in tree.items():
            yield from walk(item, (*path, key))
    elif isinstance(tree, slice):
        for key, item in (("start", tree.start), ("stop", tree.stop), ("step", tree.step)):
            yield from walk(item, (*path, key))
    else:
        yield path, tree


def has_tensor(node: fx.Node) -> bool:
    return any(True for _ in tensors_of(node.meta.get("val")))


def flat_axes(dims: Any) -> Iterator[Axis]:
    if isinstance(dims, Axis):
        yield dims
    elif isinstance(dims, (list, tuple)):
        for d in dims:
            yield from flat_axes(d)


def canonical_names(model: torch.nn.Module) -> dict[int, str]:
    """id of every parameter and buffer -> the first name it goes by."""
    names: dict[int, str] = {}
    for name, tensor in [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]:
        names.setdefault(id(tensor), name)
    return names


class GraphIndex:
    """A captured graph with its axes, indexed the ways the planner asks: made once, read by every flow."""

    def __init__(self, captured: CapturedGraph, axes: Axes):
        self.captured, self.axes = captured, axes
        self.parameters = dict(captured.skeleton.named_parameters(remove_duplicate=False))
        self.nodes = list(captured.graph.nodes)
        self.order = {n: i for i, n in enumerate(self.nodes)}
        self.operands: dict[fx.Node, list[Operand]] = {}
        self.uses: dict[fx.Node, list[tuple[fx.Node, tuple[int | str, ...]]]] = defaultdict(list)
        self.carried: dict[fx.Node, frozenset[Axis]] = {}  # leaves in a value's dims
        self.touching: dict[Axis, list[fx.Node]] = defaultdict(list)  # nodes a leaf passes through, in order
        self.holders: dict[Axis, set[str]] = defaultdict(set)  # parameters that carry a leaf
        self.param_leaves: dict[str, frozenset[Axis]] = {}
        self.module_params: dict[
            fx.Node, dict[str, str]
        ] = {}  # leaf call -> {own name: graph-wide parameter name}
        self.unsized = axes.hanging()  # leaves whose size hangs on the data
        self._unsized = {axis.find() for axis in axes.unsized}  # one of size 1 has no leaves
        self._tensors()
        self._axes()
        self.enclosing = self._enclosing()
        self._at_site: dict[Any, list[fx.Node]] = defaultdict(list)
        for node in self.nodes:
            if node.op == "call_function":
                self._at_site[node.meta.get("site")].append(node)
        self.used_params = {str(n.target) for n in self.nodes if n.op == "get_attr"}
        self.used_params |= {name for names in self.module_params.values() for name in names.values()}
        lookups = {c.weight for f in axes.facts.values() for c in f.contracts if c.how == "lookup"}
        matrices = [
            p.numel() for n, p in captured.skeleton.named_parameters() if p.ndim > 1 and n not in lookups
        ]
        self.largest_weight = max(matrices, default=0)

    def _tensors(self) -> None:
        for node in self.nodes:
            args = (*node.meta.get("args", node.args),) if node.op != "output" else node.args
            tree = {**dict(enumerate(args)), **(node.meta.get("kwargs", node.kwargs) or {})}
            found = [Operand(p, v) for p, v in walk(tree) if isinstance(v, fx.Node) and has_tensor(v)]
            # A read of a shape uses no values.
            computes = has_tensor(node) or node.op == "output" or "reads" in node.meta
            self.operands[node] = found if computes else []
            for op in self.operands[node]:
                self.uses[op.node].append((node, op.path))

    def _axes(self) -> None:
        first_name = canonical_names(self.captured.skeleton)
        for name, dims in self.axes.params.items():
            self.param_leaves[name] = frozenset(leaf for d in dims for leaf in leaves(d))
            if self.is_parameter(name):
                for leaf in (
                    leaf for d in dims for leaf in leaves(d)
                ):  # in order: ties are broken alike on all ranks
                    self.holders[leaf].add(name)
        for node in self.nodes:
            own = frozenset(leaf for d in flat_axes(self.axes.of.get(node)) for leaf in leaves(d))
            self.carried[node] = own
            touched = set(own)
            for op in self.operands[node]:
                touched |= self.carried.get(op.node, frozenset())
            if node.op == "call_module":
                module = self.captured.skeleton.get_submodule(str(node.target))
                self.module_params[node] = {
                    own_name: first_name.get(id(p), f"{node.target}.{own_name}")
                    for own_name, p in [*module.named_parameters(), *module.named_buffers()]
                }
                for name in self.module_params[node].values():
                    touched |= self.param_leaves.get(name, frozenset())
            for leaf in touched:
                self.touching[leaf].append(node)

    def is_parameter(self, name: str) -> bool:
        return name in self.parameters

    def _enclosing(self) -> dict[fx.Node, ModuleCall | None]:
        """For every node the innermost non-leaf module call that was running."""
        found: dict[fx.Node, ModuleCall | None] = dict.fromkeys(self.nodes)
        for call in sorted(
            (c for c in self.captured.calls if not c.leaf), key=lambda c: c.last - c.first, reverse=True
        ):
            for i in range(call.first, min(call.last + 1, len(self.nodes))):
                found[self.nodes[i]] = call
        return found

    def at_site(self, node: fx.Node) -> list[fx.Node]:
        """The operations that the same place in the code did, this one among them."""
        site = node.meta.get("site")
        return [n for n in self._at_site[site] if n.target is node.target] if site is not None else [node]

    def attribute(self, module: str, name: str) -> int:
        """The value of a module's attribute, dotted (`config.num_heads`) where it sits in a config."""
        if (module, name) in self.captured.attributes:
            return self.captured.attributes[module, name]
        value: Any = self.captured.skeleton.get_submodule(module)
        for part in name.split("."):
            value = getattr(value, part)
        return plain(value)

    def looks_up(self, node: fx.Node) -> str | None:
        """The nn.Embedding whose rows this operation looks up: a leaf call, or the look-up in a subclass's
        own forward."""
        facts = self.axes.facts.get(node)
        if facts is None or not any(c.how == "lookup" for c in facts.contracts):
            return None
        path = str(node.target) if node.op == "call_module" else str(node.meta["scope"])
        return path if isinstance(self.captured.skeleton.get_submodule(path), torch.nn.Embedding) else None

    def is_own(self, node: fx.Node) -> bool:
        """A call of a module of the caller's own kind: its forward runs on local parameters as it is."""
        if node.op != "call_module":
            return False
        return type(self.captured.skeleton.get_submodule(str(node.target))) in self.captured.leaves

    def keeps_statistics(self, node: fx.Node) -> bool:
        """A batch norm: its buffers stay whole, its parallel layer takes its part of them."""
        module = self.captured.skeleton.get_submodule(str(node.target))
        return isinstance(module, (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d))

    def hangs_on_data(self, axis: Axis) -> bool:
        """Whether another run may find another size of `axis`."""
        return axis.find() in self._unsized or not self.unsized.isdisjoint(leaves(axis))

    def facts(self, node: fx.Node) -> Facts | None:
        return self.axes.facts.get(node)

    def dims_with(self, node: fx.Node, leaf: Axis) -> list[int]:
        dims = self.axes.of.get(node) or []
        return [i for i, d in enumerate(dims) if isinstance(d, Axis) and leaf in leaves(d)]


_TORCH = str(Path(torch.__file__).parent)


def describe(node: fx.Node) -> str:
    """`layers.0.mlp: softmax (modeling_x.py:12)`: an operation, where a reader finds it."""
    name = (
        str(node.target) if node.op == "call_module" else getattr(node.target, "__name__", str(node.target))
    )
    site = node.meta.get("site")
    where = ""
    if site is not None and site.frames:
        # The model's own line, not that of torch's module which it calls.
        own = [f for f in site.frames if not f.code.co_filename.startswith(_TORCH)]
        frame = (own or site.frames)[-1]
        where = f" ({frame.code.co_filename.rsplit('/', 1)[-1]}:{frame.lineno})"
    scope = node.meta.get("scope") or "the model"
    return f"{scope}: {name}{where}"


def numel(node: fx.Node) -> int:
    """How many elements a value has."""
    return sum(t.numel() for t in tensors_of(node.meta.get("val")))
