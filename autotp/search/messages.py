"""The tensor-parallel collectives of a run: the plan's arrows, and those of a vocabulary in parts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from typing import Any

from torch import fx

from ..axes import leaves
from ..graph import tensors_of
from ..planner import Analysis
from .workload import Message

Found = tuple[fx.Node, Message]


def messages(
    found: Analysis, head: fx.Node | None, vocabulary: Set[Any], uses: Mapping[fx.Node, Any], alone: Set[str]
) -> Iterator[Found]:
    """Each collective with the node whose unit sends it.

    head: the node of the logits. vocabulary: axes of theirs that training splits, where the planner does not.
    uses: by node, the parameters it multiplies. alone: modules that are split alone.
    """
    yield from _arrows(found, head)
    yield from _alone(found, alone)
    if vocabulary:
        yield from _vocabulary(found, vocabulary, uses)


def _arrows(found: Analysis, head: fx.Node | None) -> Iterator[Found]:
    for arrow in found.placement.arrows:
        node, n = arrow.source, _numel(arrow.source)
        if arrow.kind in ("reduce", "enter", "gather", "slice"):
            if arrow.kind == "gather" and node is head:
                continue  # the loss is taken of logits in parts; generation gathers one token's
            if arrow.kind in ("reduce", "gather"):
                yield node, Message(arrow.kind, "forward", n)
            if arrow.kind in ("enter", "slice") or arrow.enter:
                yield node, Message("gather" if arrow.kind == "slice" else "reduce", "backward", n)
        elif arrow.kind != "once":
            rows = n / next(tensors_of(node.meta["val"])).shape[-1]
            for when in ("forward", "backward"):
                yield node, Message("reduce", when, rows, True)


def _alone(found: Analysis, alone: Set[str]) -> Iterator[Found]:
    """A layer split alone gathers what it gives, and sums the gradient of what it took."""
    for node in found.index.nodes:
        if node.op == "call_module" and node.target in alone:
            yield node, Message("gather", "forward", _numel(node))
            yield node, Message("reduce", "backward", _numel(found.index.operands[node][0].node))


def _vocabulary(found: Analysis, vocabulary: Set[Any], uses: Mapping[fx.Node, Any]) -> Iterator[Found]:
    index = found.index
    for node in index.nodes:
        facts = index.facts(node)
        looked_up = [c for c in facts.contracts if c.how == "lookup"] if facts else []
        if _numel(node) and any(vocabulary & set(leaves(c.axis)) for c in looked_up):
            yield node, Message("reduce", "forward", _numel(node))
        if any(vocabulary & use.made for use in uses.get(node, ())) and index.operands[node]:
            yield node, Message("reduce", "backward", _numel(index.operands[node][0].node))


def _numel(node: fx.Node) -> float:
    return float(sum(t.numel() for t in tensors_of(node.meta.get("val"))))
