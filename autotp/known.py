"""Values that tensors have while a model is recorded.

A run on fake tensors has no values. But what a model makes of sizes alone (a causal mask, which torch's own
decoder then recognises by looking at it) is the same in every run at these sizes, and what it makes of the
token ids it was given is what it would make of them in earnest. So both can be computed for real, from the
graph recorded so far. Nothing is known of parameters, buffers, random numbers and inputs with a fraction, but
that what `torch.rand` draws is from 0 to below 1.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily

PICKS, ROWS = "picks", "rows"
"""In a node's meta: how many rows its masks pick (`exact`, `all` or `none`), and how many each picks."""


class Basis(IntEnum):
    """What a value hangs on, from what is most certain."""

    SIZES = 0  # sizes and constants: the same in every run at these sizes
    INPUTS = 1  # the whole numbers among the example inputs
    ASSUMED = 2  # a mask taken to pick all its rows, or none
    MADE_UP = 3  # numbers drawn in place of what is unknown


class Values:
    """Computes values of the nodes of `graph`, which may still grow.

    constants: the tensors of `get_attr` nodes that are neither parameters nor buffers. seed: for what is made
    up; the same node always gets the same.
    """

    def __init__(self, graph: fx.Graph, constants: Mapping[str, torch.Tensor], seed: int = 0) -> None:
        self.graph, self.constants, self.seed = graph, constants, seed
        self.writers: list[fx.Node] = []  # the nodes that change tensors in place
        self._inputs: dict[fx.Node, torch.Tensor] = {}
        self._known: dict[fx.Node, bool] = {}  # whether a node, and all that it is made of, is known
        self._made: dict[fx.Node, Any] = {}

    def give(self, node: fx.Node, tensor: torch.Tensor) -> None:
        """`tensor` is the input that `node` stands for: its values are known where they are whole numbers."""
        if not (tensor.is_floating_point() or tensor.is_complex()):
            if not tensor.is_meta and not isinstance(tensor, FakeTensor):
                with unset_fake_temporarily():
                    self._inputs[node] = tensor.detach().cpu()

    def of(self, wanted: Iterable[fx.Node], make_up: bool = False) -> tuple[dict[fx.Node, Any], Basis] | None:
        """The values of `wanted` and of all they are made of, and what they hang on; None where they are not
        known. make_up: draw numbers in place of unknown fractions, where that helps."""
        wanted = list(wanted)
        if not make_up and not all(map(self._is_known_throughout, wanted)):
            return None
        needed = _made_of(wanted)
        if any(node not in needed and not needed.isdisjoint(node.meta["mutates"]) for node in self.writers):
            return None  # changed in place by something that is not in their history
        unknown = {node for node in needed if not self._is_known(node)}
        if not all(map(_is_fraction, unknown)):
            return None
        basis = Basis.MADE_UP if unknown else max(map(self._basis, needed), default=Basis.SIZES)
        with unset_fake_temporarily(), torch.no_grad(), torch.random.fork_rng(devices=()):
            try:
                values, again = (self._computed(sorted(needed), unknown, seed) for seed in (0, 1))
            except Exception:  # made-up numbers may be none that the code can do with
                return None
            decided = all(map(_comes_out_alike, wanted))
            random = not decided and any(not _equal(value, again[node]) for node, value in values.items())
        if random:
            return (values, Basis.MADE_UP) if make_up else None
        return values, basis

    def _is_known_throughout(self, node: fx.Node) -> bool:
        todo = [node]
        while todo:
            last = todo[-1]
            if last in self._known or not self._is_known(last):
                self._known.setdefault(last, False)
                todo.pop()
                continue
            sources = _sources(last)
            unseen = [source for source in sources if source not in self._known]
            if not unseen:
                self._known[last] = all(self._known[source] for source in sources)
            todo += unseen
        return self._known[node]

    def _is_known(self, node: fx.Node) -> bool:
        if node.op == "placeholder":
            return node in self._inputs
        if node.op == "get_attr":
            held = self.constants.get(str(node.target))
            return held is not None and not held.is_meta
        return node.op == "call_function" and "custom_grad" not in node.meta

    def _basis(self, node: fx.Node) -> Basis:
        assumed = node.meta.get(PICKS, "exact") != "exact"
        return Basis.ASSUMED if assumed else Basis(int(node.op == "placeholder"))

    def _computed(self, needed: list[fx.Node], unknown: set[fx.Node], seed: int) -> dict[fx.Node, Any]:
        torch.default_generator.manual_seed(seed)
        values: dict[fx.Node, Any] = {}
        for node in needed:
            values[node] = self._made_up(node) if node in unknown else self._value(node, values)
        return values

    def _made_up(self, node: fx.Node) -> Any:
        if node not in self._made:
            generator = torch.Generator().manual_seed(1 + 1000 * self.seed + len(self._made))
            self._made[node] = _drawn(node.meta["val"], generator)
        return self._made[node]

    def _value(self, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        if node.op == "placeholder":
            return self._inputs[node].clone()  # an operation may change it in place
        if node.op == "get_attr":
            return self.constants[str(node.target)].clone()
        if isinstance(node.meta.get("val"), (int, float)):
            return node.meta["val"]

        def filled(used: fx.Node) -> Any:
            if used in values:
                return values[used]
            if used in _only_shapes(node):
                return torch.zeros(used.meta["val"].shape, dtype=used.meta["val"].dtype)
            return as_picked(used, node.meta[PICKS])

        return node.target(*fx.map_arg(node.args, filled), **fx.map_arg(node.kwargs, filled))  # type: ignore


def is_mask(value: Any) -> bool:
    """Whether `value` is the node of a tensor that picks by truth where it is an index."""
    return isinstance(value, fx.Node) and value.meta["val"].dtype in (torch.bool, torch.uint8)


def masks_of(function: Any, args: Any, kwargs: Any) -> list[fx.Node]:
    """Of a call, with nodes for tensors: the operands whose truths say how many rows it gives."""
    if function is torch.Tensor.__getitem__:
        index = args[1]
        return [item for item in (index if isinstance(index, tuple) else (index,)) if is_mask(item)]
    operands = [*args, *kwargs.values()]
    if getattr(function, "__name__", "") == "masked_select":
        operands = operands[1:]
    return [item for item in operands[:1] if isinstance(item, fx.Node)]


def as_picked(mask: fx.Node, picks: str) -> torch.Tensor:
    """The mask that picks `all` or `none`, of the kind of `mask`."""
    value = mask.meta["val"]
    return torch.full(value.shape, int(picks == "all"), dtype=value.dtype)


def _made_of(wanted: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes and all they are made of, as far as there is anything to compute."""
    found: set[fx.Node] = set()
    todo = list(wanted)
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += _sources(node)
    return found


def _sources(node: fx.Node) -> list[fx.Node]:
    """The nodes whose values are needed to compute that of `node`."""
    if isinstance(node.meta.get("val"), (int, float)) or node.op == "call_module":
        return []  # a size is known without what it is the size of
    spared = _only_shapes(node)
    if node.meta.get(PICKS, "exact") != "exact":
        spared |= set(masks_of(node.target, node.args, node.kwargs))
    return [used for used in node.all_input_nodes if used not in spared]


_SHAPE_ONLY = {"expand_as": 1, "view_as": 1, "reshape_as": 1, "type_as": 1, "zeros_like": 0, "ones_like": 0,
               "full_like": 0, "empty_like": 0, "new_zeros": 0, "new_ones": 0, "new_full": 0, "new_empty": 0,
               "new_tensor": 0}  # fmt: skip
"""Of which operand only shape and dtype are read."""


def _only_shapes(node: fx.Node) -> set[fx.Node]:
    """The operands of `node` whose values it does not read."""
    position = _SHAPE_ONLY.get(getattr(node.target, "__name__", ""))
    given = node.args[position] if position is not None and len(node.args) > position else None
    if position is None or not isinstance(given, fx.Node):
        return set()
    others = [*node.args[:position], *node.args[position + 1 :], node.kwargs]
    read: set[fx.Node] = set()
    fx.map_arg(others, read.add)
    return {given} - read


def _is_fraction(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return all(
        isinstance(part, torch.Tensor) and part.is_floating_point()
        for part in (value if isinstance(value, (tuple, list)) else [value])
    )


def _drawn(value: Any, generator: torch.Generator) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(_drawn(part, generator) for part in value)
    return torch.randn(value.shape, generator=generator).to(value.dtype)


def _comes_out_alike(node: fx.Node) -> bool:
    """Is it a comparison that all numbers of `torch.rand`, from 0 to below 1, pass or fail alike (is a layer
    skipped at a rate of 0)?"""
    compare = _COMPARISONS.get(getattr(node.target, "__name__", "").strip("_"))
    drawn, limit = node.args if len(node.args) == 2 else (None, None)
    if compare is None or not isinstance(drawn, fx.Node) or drawn.target is not torch.rand:
        return False
    if not isinstance(limit, (int, float)):
        return False
    return compare(0.0, limit) == compare(math.nextafter(1.0, 0.0), limit)


_COMPARISONS = {"lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge}


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, (tuple, list)):
        return all(map(_equal, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
