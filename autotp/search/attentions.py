"""An attention's nodes in a captured graph, whether it is fused or two products and a softmax."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.nn.modules.dropout import _DropoutNd

from ..graph import GraphIndex, tensors_of


def core_of(index: GraphIndex, node: fx.Node) -> tuple[set[fx.Node], list[fx.Node], bool]:
    """An attention's nodes, its operands q, k, v, and whether its probabilities are dropped out."""
    args = [op.node for op in index.operands[node]]
    if len(args) >= 3:  # fused
        dropout = node.meta["kwargs"].get("dropout_p", 0.0) or (
            node.meta["args"][4] if len(node.meta["args"]) > 4 else 0.0
        )
        return {node}, args[:3], bool(dropout)
    scores = max(args, key=lambda n: _depends_on_softmax(index, n))
    core, todo, products, dropout = {node}, [scores], [], False
    while todo:
        n = todo.pop()
        if n in core:
            continue
        core.add(n)
        facts = index.facts(n)
        dropout |= drops_out(index, n)
        if facts and any(c.how == "sum" for c in facts.contracts) and len(index.operands[n]) in (2, 3):
            products.append(n)
            continue
        # Scores are the largest of what is put together; attention sinks add a column to them, or drop it.
        sizes = [_numel(op.node) for op in index.operands[n]]
        least = min(_numel(n), max(sizes, default=0))
        todo += [op.node for op, size in zip(index.operands[n], sizes, strict=True) if size >= least]
    first = products[0] if products else node
    # of three, the first is added to the product
    q, k = [op.node for op in index.operands[first]][-2:] if products else (scores, scores)
    values = next(n for n in args if n is not scores)
    return core, [q, _untransposed(index, k), values], bool(dropout)


def drops_out(index: GraphIndex, node: fx.Node) -> bool:
    """Whether a node is a dropout that drops anything in this run."""
    if node.op == "call_module":
        module: Any = index.captured.skeleton.get_submodule(str(node.target))
        return isinstance(module, _DropoutNd) and module.p > 0 and index.captured.training
    args, kwargs = node.meta.get("args", ()), node.meta.get("kwargs", {})
    p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
    training = kwargs.get("training", args[2] if len(args) > 2 else True)
    return getattr(node.target, "__name__", "") == "dropout" and bool(p) and bool(training)


def _untransposed(index: GraphIndex, node: fx.Node) -> fx.Node:
    """Before the transposition that a product of queries and keys takes."""
    return index.operands[node][0].node if "transpose" in str(node.target) and index.operands[node] else node


def _depends_on_softmax(index: GraphIndex, node: fx.Node) -> int:
    for _ in range(6):
        if "softmax" in str(getattr(node.target, "__name__", node.target)).lower():
            return 1
        if not index.operands[node]:
            return 0
        node = index.operands[node][0].node
    return 0


def _numel(node: fx.Node) -> int:
    return next(tensors_of(node.meta["val"])).numel()
