"""What a model's run consists of, counted on its captured graph: products, memory traffic, saved values,
collectives.

    workload = count(model, seq=4096)      # one sequence; everything grows with the number of sequences

Nothing here knows an architecture. The graph says which operations multiply and how large, the axes say what
tensor parallelism divides, and a model of a hundred layers is counted on one layer of each kind
(`shorten.py`).

* A *product* is an operation that sums over an axis of two tensors. A softmax between two products, or the
  fused operation, is an *attention*, whatever the kernel.
* Everything else between products is fused into *regions*: operations of one unit with the same number of
  products before them. A region reads what others wrote, and writes what others read.
* *Saved* for the backward are the activations that products multiply with a weight, the operands of
  attentions, and what nonlinear operations need, looked up where it was last written to memory. On a GPT
  layer that gives the 34 bytes per token and hidden unit of Korthikanti et al. (2022).

What comes out is a `Workload` (`workload.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.conv import _ConvNd

from ..errors import AutotpError
from ..flow import follow
from ..graph import tensors_of
from ..lowering import modules_alone
from ..match import structure
from ..planner import Analysis
from .attentions import core_of
from .messages import messages
from .recorded import analysed, inputs_of
from .regions import traffic
from .scans import LENGTHS, Unrolled, extended
from .shorten import LayerList, layer_lists, shortened
from .workload import Attention, Product, Shares, Unit, Workload


def count(model: nn.Module, seq: int | None = None, example: Mapping[str, Any] | None = None) -> Workload:
    """Count one run of `model` over one sequence of `seq` tokens. Meta tensors will do, and all is in the
    model's own order.

    example: inputs of batch 1, for models that don't take token ids. Raises SearchError where the model has
    no sequence to size, CaptureError where it can't be recorded.
    """
    small = None if example is not None or seq is None else inputs_of(model, None)
    try:
        return _counted(model, seq, example, small)
    except Unrolled:
        if seq is None or seq <= LENGTHS[1]:
            return _counted(model, seq, example, None)
        short, long = (_counted(model, n, None, None) for n in LENGTHS)
        return extended(short, long, seq)


def _counted(
    model: nn.Module, seq: int | None, example: Mapping[str, Any] | None, small: Mapping[str, Any] | None
) -> Workload:
    """One run, recorded at its size; small: inputs on which the axes are chosen."""
    inputs = dict(example) if example is not None else inputs_of(model, seq)
    lists = layer_lists(model)
    short = any(len(one.first) < len(one.kinds) for one in lists)
    found = None
    if short:
        try:
            found = analysed(shortened(model, lists), inputs, small)
        except (AutotpError, IndexError, KeyError):
            # Its code looks its layers up by number: it must be recorded whole.
            lists = [
                LayerList(one.path, tuple(range(len(one.kinds))), tuple(range(len(one.kinds))))
                for one in lists
            ]
    if found is None:
        found = analysed(model, inputs, small)
    length = seq or max((t.shape[1] for t in tensors_of(tuple(inputs.values())) if t.ndim > 1), default=1)
    return _Counter(found, lists, type(model).__name__, length).workload()


class _Counter:
    """Walks one analysed graph."""

    def __init__(self, found: Analysis, lists: list[LayerList], name: str, seq: int):
        self.found, self.index, self.lists, self.name, self.seq = found, found.index, lists, name, seq
        self.structure = structure(found.index)
        self.split = self._split_leaves()
        self.uses = defaultdict(list)
        for use in self.structure.uses:
            self.uses[use.node].append(use)
        self.vocabulary = self._vocabulary()
        self.split |= self.vocabulary
        self.alone = modules_alone(found.captured.skeleton, found, 2)
        self.units: list[Unit] = []
        self.unit_of: dict[fx.Node, int] = {}
        self._make_units()

    def _split_leaves(self) -> set[Any]:
        """The leaves that are divided; with a group's heads also the queries of each, once the groups are
        used up.
        """
        chosen = set(self.found.choice.flows)
        for attention in self.structure.attentions:
            if attention.heads & chosen:
                chosen |= attention.heads
        return chosen

    def _vocabulary(self) -> set[Any]:
        """The axis of the logits, where the planner keeps it whole for the price of gathering them: a loss
        over parts of the vocabulary needs no gather, so in training it is split."""
        node = self._head()
        while node is not None and node not in self.uses and self.index.operands.get(node):
            node = self.index.operands[node][0].node
        uses = self.uses[node] if node is not None else []
        made = {a for use in uses for a in use.made if a.size > 1} - self.split
        return {a for a in made if not follow(self.index, a).problems}

    # ---------------------------------------------------------------- units
    def _make_units(self) -> None:
        self.layer_unit: dict[tuple[int, int], int] = {}
        self.between: list[int] = []
        for i, one in enumerate(self.lists):
            for j in range(len(one.first)):
                self.layer_unit[i, j] = self._new_unit(f"{one.path}.{one.first[j]}", True)
        names = ["before the layers", *("between the layers" for _ in self.lists[1:]), "after the layers"]
        self.between = (
            [self._new_unit(n, False) for n in names[: len(self.lists) + 1]]
            if self.lists
            else [self._new_unit("the model", False)]
        )
        begun: list[int] = []
        for node in self.index.nodes:
            path = str(node.target) if node.op == "call_module" else str(node.meta.get("scope") or "")
            place = self._layer(path)
            if place is not None and place[0] not in begun:
                begun.append(place[0])
            self.unit_of[node] = self.layer_unit[place] if place is not None else self.between[len(begun)]
        self.begun = begun

    def _new_unit(self, name: str, layer: bool) -> int:
        self.units.append(Unit(name, layer))
        return len(self.units) - 1

    def _layer(self, path: str) -> tuple[int, int] | None:
        for i, one in enumerate(self.lists):
            if path.startswith(one.path + "."):
                number = path[len(one.path) + 1 :].split(".")[0]
                if number.isdigit() and (i, int(number)) in self.layer_unit:
                    return i, int(number)
        return None

    def workload(self) -> Workload:
        cores = self._attentions()
        anchors = self._products(cores)
        for unit, moved in traffic(self.index, self.unit_of, anchors, cores, self.ways).items():
            self.units[unit].traffic = moved
        found = messages(self.found, self._head(), self.vocabulary, self.uses, self.alone.keys())
        for node, message in found:
            self.units[self.unit_of[node]].messages.append(message)
        tied, head = self._params()
        order = [self.between[0]]
        for k, i in enumerate(self.begun):
            order += [self.layer_unit[i, kind] for kind in self.lists[i].kinds]
            order.append(self.between[k + 1])
        logits = self._logits()
        return Workload(
            self.name,
            tuple(self.units),
            tuple(order),
            self.seq,
            logits,
            tied,
            head,
            tuple(f"{node.target}: {why}" for node, why in self.index.axes.unknown),
        )

    def ways(self, node: fx.Node) -> int:
        """Into how many pieces tensor parallelism can divide the value of `node`."""
        if node not in self.found.placement.sharded:
            return 1
        return self._pieces(self.index.carried[node])

    def _pieces(self, leaves: Iterable[Any]) -> int:
        pieces = 1
        for leaf in leaves:
            if leaf in self.split:
                pieces *= leaf.size
        return pieces

    # ---------------------------------------------------------------- operations
    def _attentions(self) -> dict[fx.Node, set[fx.Node]]:
        """By the node that gives an attention's result, the nodes that make it up; and the attentions of the
        units.
        """
        cores: dict[fx.Node, set[fx.Node]] = {}
        for attention in self.structure.attentions:
            node = attention.node
            core, operands, dropout = core_of(self.index, node)
            cores[node] = core
            q, k, v = (next(tensors_of(n.meta["val"])) for n in operands)
            keys, size = v.shape[-2], q.shape[-1]  # k may lie either way
            kv_heads = _numel(k) // (keys * size) or 1
            heads = _numel(q) // (q.shape[-1] * q.shape[-2]) or 1
            made = [use for use in attention.k if use.node in self.index.order]
            if made and kv_heads == heads:  # keys repeated for every query head: fewer are made
                kv_heads = max(
                    1,
                    min(
                        kv_heads,
                        _numel(next(tensors_of(made[0].node.meta["val"]))) // (self.seq * size),
                    ),
                )
            causal = q.shape[-2] == keys and q.shape[-2] > 1
            self.units[self.unit_of[node]].attentions.append(
                Attention(heads, kv_heads, q.shape[-2], keys, size, v.shape[-1], causal, dropout)
            )
        return cores

    def _products(self, cores: Mapping[fx.Node, set[fx.Node]]) -> set[fx.Node]:
        """The nodes that are products, outside of attentions; they are put into the units."""
        inside = set().union(*cores.values()) if cores else set()
        anchors = set()
        for node in self.index.nodes:
            facts = self.index.facts(node)
            sums = [c for c in facts.contracts if c.how == "sum"] if facts else []
            if node in inside or not sums:
                continue
            product = self._weighted(node) if sums[0].weight else self._activations(node)
            if product is not None:
                anchors.add(node)
                self.units[self.unit_of[node]].products.append(product)
        return anchors

    def _weighted(self, node: fx.Node) -> Product | None:
        use = next((u for u in self.uses[node] if u.taken), None)
        if use is None:
            return None
        weight = self.index.captured.skeleton.get_parameter(use.param)
        if weight.ndim < 2:
            return None
        out = next(tensors_of(node.meta["val"])).numel()
        stack = weight.shape[0] if weight.ndim == 3 and node.op == "call_function" else 1
        inner = 1
        for c in self.index.axes.facts[node].contracts:
            inner *= c.axis.size if c.how == "sum" and c.weight == use.param else 1
        cols = weight.numel() / stack / inner
        if self._convolves(node):  # a row is what the kernel is laid on
            cols, inner = weight.shape[0], weight[0].numel()
        if node.op == "call_module" and node.target in self.alone:
            split, ways = "cols", round(cols)
        elif self._pieces(use.taken) > 1:
            split, ways = "inner", self._pieces(use.taken)
        elif self._pieces(use.made) > 1:
            split, ways = "cols", self._pieces(use.made)
        else:
            ways = self.ways(node)
            split = "rows" if ways > 1 else ""
        return Product(out / cols, cols, inner, 1.0, split, ways, float(weight.numel()))

    def _convolves(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            return isinstance(self.index.captured.skeleton.get_submodule(str(node.target)), _ConvNd)
        return getattr(node.target, "__name__", "") in ("conv1d", "conv2d", "conv3d")

    def _activations(self, node: fx.Node) -> Product | None:
        operands = [op.node for op in self.index.operands[node]]
        out = next(tensors_of(node.meta["val"]), None)
        if len(operands) < 2 or out is None or out.ndim < 2:
            return None
        chosen = next((name for o in operands if (name := self._chosen_experts(o))), None)
        if chosen is not None:
            return self._experts(node, chosen, out)
        ways = self.ways(node)
        rows, cols = out.shape[-2], out.shape[-1]
        batch = out.numel() / (rows * cols)
        first = next(tensors_of(operands[0].meta["val"]))
        inner = max(1.0, first.numel() / (batch * rows))
        return Product(rows, cols, inner, batch, "batch" if ways > 1 else "", ways)

    def _chosen_experts(self, node: fx.Node) -> str | None:
        """The stack of weights of which `node` is a choice by index: one matrix for every row."""
        for _ in range(4):
            if node.op == "get_attr":
                name = str(node.target)
                stack = name in self.index.param_leaves and node.meta["val"].ndim == 3
                return name if stack else None
            if not self.index.operands[node] or node in self.uses:
                return None
            node = self.index.operands[node][0].node
        return None

    def _experts(self, node: fx.Node, name: str, out: torch.Tensor) -> Product:
        """A product of each row with the matrix that was chosen for it: as a group of products by expert."""
        weight = self.index.captured.skeleton.get_parameter(name)
        rows = out.shape[0]
        cols = out.numel() / rows
        inner = weight[0].numel() / cols
        pieces = self._pieces(self.index.param_leaves.get(name, ()))
        split = "" if pieces == 1 else "cols" if node in self.found.placement.sharded else "inner"
        return Product(rows, cols, inner, 1.0, split, pieces, float(weight.numel()))

    # ---------------------------------------------------------------- parameters and output
    def _params(self) -> tuple[Shares, int]:
        skeleton, index = self.index.captured.skeleton, self.index
        used: dict[str, list[fx.Node]] = defaultdict(list)
        for node in index.nodes:
            if node.op == "get_attr":
                used[str(node.target)].append(node)
            for name in index.module_params.get(node, {}).values():
                used[name].append(node)
        looked_up = {c.weight for f in index.axes.facts.values() for c in f.contracts if c.how == "lookup"}
        tied = Shares()
        for name, param in skeleton.named_parameters():
            units = [self.unit_of[n] for n in used[name]] or [self.between[0]]
            place = self._layer(name)
            unit = self.units[self.layer_unit[place] if place else units[0]]
            held = index.param_leaves.get(name, frozenset())
            path, _, own = name.rpartition(".")
            if path in self.alone:
                (dim,) = self.alone[path][own].dims
                unit.params.add(param.shape[dim], param.numel())
                continue
            ways = self._pieces(held) if name in self.found.placement.params or held & self.vocabulary else 1
            unit.params.add(ways, param.numel())
            if param.ndim == 3 and param.shape[0] > 1 and place:
                unit.experts.add(ways, param.numel())
            if name in looked_up and name not in {
                u.param for us in self.uses.values() for u in us if u.taken
            }:
                unit.table += param.numel()
            if len(set(units)) > 1 and not place:
                tied.add(ways, param.numel())
        for i, one in enumerate(self.units):
            nodes = [
                n for n in index.nodes if self.unit_of[n] == i and any(self.unit_of[u] != i for u in n.users)
            ]
            one.output = max(
                (
                    float(_numel(t))
                    for n in nodes
                    for t in tensors_of(n.meta.get("val"))
                    if t.is_floating_point()
                ),
                default=0.0,
            )
        if any(at.heads & self.split for at in self.structure.attentions):
            return tied, max(a.heads for unit in self.units for a in unit.attentions)
        # Without heads to share out, what the layers' widest product divides into.
        return tied, max((p.ways for unit in self.units if unit.layer for p in unit.products), default=1)

    def _head(self) -> fx.Node | None:
        """The node that gives the model's logits: the first floating result."""
        found: list[fx.Node] = []
        _collect(self.index.captured.output, found)
        return next(
            (n for n in found if any(t.is_floating_point() for t in tensors_of(n.meta.get("val")))), None
        )

    def _logits(self) -> Shares:
        node, logits = self._head(), Shares()
        if node is not None:
            out = next(tensors_of(node.meta["val"]))
            makers = [
                p
                for p in self.units[self.unit_of[node]].products
                if p.split == "cols" and p.cols == out.shape[-1]
            ]
            logits.add(makers[0].ways if makers else self.ways(node), float(out.numel()))
        return logits


def _collect(tree: Any, into: list[fx.Node]) -> None:
    if isinstance(tree, fx.Node):
        into.append(tree)
    elif isinstance(tree, Mapping):
        for value in tree.values():
            _collect(value, into)
    elif isinstance(tree, (tuple, list)):
        for value in tree:
            _collect(value, into)


def _numel(tensor: torch.Tensor) -> int:
    return int(tensor.numel())
