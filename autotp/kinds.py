"""Which parallel layer a leaf call becomes."""

from __future__ import annotations

from typing import Any

from torch import fx, nn

from .axes import Axis, factors, leaves
from .choose import Choice
from .graph import GraphIndex
from .ints import plain
from .layers import CONVOLUTIONS
from .skeleton import leaf_class, linear_kind


def layer_kind(index: GraphIndex, node: fx.Node) -> str:
    """What a leaf call is, of the kinds that have a parallel layer; `other` if it is none of them."""
    module = index.captured.skeleton.get_submodule(str(node.target))
    if linear_kind(module):
        return "linear"
    cls = leaf_class(module)
    if cls is None:
        return "embedding" if isinstance(module, nn.Embedding) else "other"
    if issubclass(cls, CONVOLUTIONS):  # a subclass may do the convolution itself in another way
        own: Any = type(module)
        return "conv" if own._conv_forward is cls._conv_forward else "other"
    for kind, classes in {
        "embedding": (nn.Embedding,),
        "norm": (nn.LayerNorm, nn.RMSNorm),
        "group norm": (nn.GroupNorm,),
        "batch norm": (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
        "attention": (nn.MultiheadAttention,),
        "dropout": (nn.Dropout,),
    }.items():
        if issubclass(cls, classes):
            return kind
    return "other"


def parallel_kind(index: GraphIndex, choice: Choice, node: fx.Node) -> str | None:
    """The parallel layer that a leaf call becomes; None where it stays as it is, `other` where it can't."""
    kind = layer_kind(index, node)
    if kind == "dropout" or index.is_own(node):
        return "dropout" if kind == "dropout" else None
    own = {
        o: frozenset(
            a for a in index.param_leaves.get(n, ()) if a in choice.flows and n in choice.flows[a].params
        )
        for o, n in index.module_params[node].items()
    }
    if not any(own.values()):
        return "other" if kind == "group norm" else None  # its number of groups must become local
    if kind == "attention":  # its heads are split, not what its last projection gives
        out = index.axes.params[index.module_params[node]["out_proj.weight"]][0]
        return "other" if own["out_proj.weight"] & set(leaves(out)) else kind
    if kind not in ("linear", "embedding", "conv", "group norm"):
        return kind
    weight = index.axes.params[index.module_params[node]["weight"]]
    module: Any = index.captured.skeleton.get_submodule(str(node.target))
    sharded = [d for d, axis in enumerate(weight) if set(leaves(axis)) & own["weight"]]
    if kind == "embedding":
        return "vocab" if sharded == [0] else "embedding"
    groups = {"conv": "groups", "group norm": "num_groups"}.get(kind)
    if groups is not None and (kind != "conv" or module.groups > 1):
        whole = sharded == [0] and own["weight"] <= _major_leaves(weight[0], plain(getattr(module, groups)))
        return "grouped" if whole else "other"
    out_dim = 1 if linear_kind(module) == "transposed" else 0
    return "column" if sharded == [out_dim] else "row"


def _major_leaves(dim: Axis, groups: int) -> frozenset[Axis]:
    """The leaves of the groups of a dim that is `groups` times what is in one."""
    found: list[Axis] = []
    size = 1
    for factor in factors(dim):
        if size >= groups:
            break
        size *= factor.find().size
        found += leaves(factor)
    return frozenset(found) if size == groups else frozenset()
