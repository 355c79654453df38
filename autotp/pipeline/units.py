"""Which module calls are a pipeline's units, from structure and dataflow alone.

A *chain* is a row of modules held by one parent that run one after another, each taking what the one before
gave: the layers of a model, not the experts of a layer (those run beside each other). A module that has a
chain inside is opened, and so on inwards, down to the members of a chain that are alike: the repeated blocks.
What is not opened runs as a whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from torch import fx, nn

from ..captured import CapturedGraph, ModuleCall
from ..graph import has_tensor
from ..sites import Site

ALIKE = 0.5  # share of equal parameters (name and shape) from which two modules are the same block
_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_RANDOM = {
    "bernoulli", "normal", "uniform", "exponential", "multinomial", "rand", "randn", "randint", "randperm",
    "rand_like", "randn_like", "randint_like", "dropout", "dropout1d", "dropout2d", "dropout3d",
    "alpha_dropout", "feature_alpha_dropout", "rrelu",
}  # fmt: skip
_OF_A_FORM = {
    "zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty",
}  # fmt: skip
"""These read of their first operand its form alone, which every stage knows."""


@dataclass(frozen=True)
class Unit:
    """A call that runs as a whole. number: which call of its module it is. start, end: the nodes recorded in
    it are those at `start:end` of the graph (`start == end`: none)."""

    call: ModuleCall
    number: int
    start: int
    end: int

    @property
    def path(self) -> str:
        return self.call.path

    def __str__(self) -> str:
        return f"{self.path} (call {self.number + 1})" if self.number else self.path


@dataclass
class _Call:
    """A module call with the calls its own code made."""

    call: ModuleCall
    module: nn.Module
    parent: nn.Module  # that holds the module
    inner: list[_Call] = field(default_factory=list)


def find_units(captured: CapturedGraph) -> tuple[list[Unit], set[fx.Node]]:
    """The units in the order they run, and the values that depend on them.

    A call that is not opened is a unit if its module has parameters, or if it computes with what a unit gave
    (a dropout), or draws random numbers: those are made once, not anew on every stage. Else it is glue: a
    rotary table, a mask. Values that depend on a random number drawn by glue count as depending on a unit.
    """
    nodes = list(captured.graph.nodes)
    units: list[Unit] = []
    dependent: set[fx.Node] = set()
    numbers: dict[str, int] = defaultdict(int)

    def depends(node: fx.Node) -> bool:
        return draws(node, captured.skeleton) or any(source in dependent for source in sources(node))

    def note(inside: Iterable[fx.Node], all_of_it: bool) -> None:
        for node in inside:
            if has_tensor(node) and (all_of_it and node.op != "get_attr" or depends(node)):
                dependent.update((node, *node.meta.get("mutates", ())))

    at = 0
    for found in _unopened(captured, nodes):
        start = max(at, found.call.first)
        end = max(start, found.call.last + 1)
        note(nodes[at:start], False)
        at, inside = end, nodes[start:end]
        is_unit = next(found.module.parameters(), None) is not None or any(map(depends, inside))
        note(inside, is_unit)
        if is_unit:
            path = found.call.path
            units.append(Unit(found.call, numbers[path], start, end))
            numbers[path] += 1
    note(nodes[at:], False)
    return units, dependent


def sources(node: fx.Node) -> list[fx.Node]:
    """The nodes whose values it computes with: none for a size, which is known wherever the form is."""
    if not has_tensor(node):
        return []
    form = node.args[0] if node.args and getattr(node.target, "__name__", "") in _OF_A_FORM else None
    return [source for source in node.all_input_nodes if source is not form and has_tensor(source)]


def draws(node: fx.Node, skeleton: nn.Module) -> bool:
    """Whether it draws random numbers, in training if not now."""
    if node.op == "call_module":
        return isinstance(skeleton.get_submodule(str(node.target)), nn.modules.dropout._DropoutNd)
    return node.op == "call_function" and getattr(node.target, "__name__", "").rstrip("_") in _RANDOM


def _unopened(captured: CapturedGraph, nodes: Sequence[fx.Node]) -> list[_Call]:
    """The outermost calls that run as a whole, in order."""

    def calls_in(opened: _Call) -> Iterator[_Call]:
        blocks = {id(one) for one in _repeated(opened, nodes)}
        for one in opened.inner:
            if id(one) not in blocks and _has_chain(one, nodes):
                yield from calls_in(one)
            else:
                yield one

    return list(calls_in(_tree(captured)))


def _tree(captured: CapturedGraph) -> _Call:
    root_call = ModuleCall("", (), {}, None, 0, -1, False, None, Site("", ()))
    running = [_Call(root_call, captured.skeleton, captured.skeleton)]
    for call in captured.calls:
        while running[-1].call.path != call.site.module and len(running) > 1:
            running.pop()
        module = captured.skeleton.get_submodule(call.path)
        parent = captured.skeleton.get_submodule(call.path.rpartition(".")[0])
        made = _Call(call, module, parent)
        running[-1].inner.append(made)
        if not call.leaf:
            running.append(made)
    return running[0]


def _has_chain(call: _Call, nodes: Sequence[fx.Node]) -> bool:
    return next(_chains(call, nodes), None) is not None or any(_has_chain(one, nodes) for one in call.inner)


def _repeated(call: _Call, nodes: Sequence[fx.Node]) -> list[_Call]:
    """The members of the chains in `call` of which there is another alike."""
    return [
        one
        for chain in _chains(call, nodes)
        for one in chain
        if any(one is not other and _alike(one.module, other.module) for other in chain)
    ]


def _chains(call: _Call, nodes: Sequence[fx.Node]) -> Iterator[list[_Call]]:
    """Modules of one parent, called by one code, of which some take what others gave.

    Members have matrices, and modules of their own; they are of one class or in one list. Leaves (a `Linear`)
    form a chain only in a list of which some are alike: those of the usual MLP are not.
    """
    siblings: dict[tuple[int, type | None], list[_Call]] = defaultdict(list)
    for one in call.inner:
        listed = isinstance(one.parent, _LISTS)
        if any(p.ndim > 1 for p in one.module.parameters()) and (listed or not one.call.leaf):
            siblings[id(one.parent), None if listed else type(one.module)].append(one)
    for members in siblings.values():
        pairs = list(zip(members, members[1:], strict=False))
        leaves_only = all(one.call.leaf for one in members)
        if leaves_only and not any(_alike(a.module, b.module) for a, b in combinations(members, 2)):
            continue
        if any(_feeds(a.call, b.call, nodes) for a, b in pairs):
            yield members


def _alike(one: nn.Module, other: nn.Module) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    ours, theirs = (
        {(name, tensor.shape) for name, tensor in (*m.named_parameters(), *m.named_buffers())}
        for m in (one, other)
    )
    return len(ours & theirs) >= ALIKE * len(ours | theirs)


def _feeds(one: ModuleCall, other: ModuleCall, nodes: Sequence[fx.Node]) -> bool:
    """Whether `other` computes with a value that comes from `one`."""
    from_one = set(nodes[one.first : one.last + 1])
    for node in nodes[one.last + 1 : other.last + 1]:
        if has_tensor(node) and any(source in from_one for source in node.all_input_nodes):
            from_one.add(node)
    return any(node in from_one for node in nodes[other.first : other.last + 1])
