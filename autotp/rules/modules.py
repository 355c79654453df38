"""Leaf modules: torch's own, recorded as one call."""

from functools import partial
from typing import Any

from torch import nn

from ..axes import concat, leaf, product, unify
from .op import Dims, NoRule, Op, Rule, rule
from .products import convolve
from .reductions import norm_channels, norm_groups, norm_last
from .shapes import view

RULES: dict[Any, Rule] = {}
here = partial(rule, into=RULES)


@here(nn.Linear)
def linear(op: Op) -> Dims:
    return _weighted(op, out_first=True)


def transposed_linear(op: Op) -> Dims:
    """`x @ weight + bias`, weight [in, out]."""
    return _weighted(op, out_first=False)


def _weighted(op: Op, out_first: bool) -> Dims:
    """The bias is the layer's own to add once; a partial operand can't pass where there is one."""
    weight, bias, x = op.param("weight"), op.param("bias"), op.dims((0, "input"))
    if weight is None:
        raise NoRule("its weight is computed")
    out, into = weight if out_first else weight[::-1]
    if bias is None:
        op.linear("each", (0, "input"))
    else:
        unify(bias[0], out)
    op.contract(unify(x[-1], into), "sum", "weight")
    return [*x[:-1], out]


@here(nn.Embedding)
def embedding(op: Op) -> Dims:
    weight = op.param("weight")
    assert weight is not None and op.module is not None
    if op.module.max_norm is not None:
        op.forbid(weight, "its rows are normalised")
    op.contract(weight[0], "lookup", "weight")
    return [*op.dims((0, "input")), weight[1]]


@here(nn.LayerNorm, nn.RMSNorm)
def norm(op: Op) -> Dims:
    assert op.module is not None
    count = len(op.module.normalized_shape)  # type: ignore[arg-type]
    return norm_last(op, op.dims((0, "input")), count, op.param("weight"), op.param("bias"))


@here(nn.GroupNorm)
def group_norm(op: Op) -> Dims:
    assert op.module is not None
    groups = int(op.module.num_groups)  # type: ignore[arg-type]
    return norm_groups(op, op.dims((0, "input")), groups, op.param("weight"), op.param("bias"))


@here(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
def batch_norm(op: Op) -> Dims:
    x = op.dims((0, "input"))
    return norm_channels(op, x, [x[0]], *map(op.param, ("weight", "bias", "running_mean", "running_var")))


@here(nn.Conv1d, nn.Conv2d, nn.Conv3d)
def conv(op: Op) -> Dims:
    assert op.module is not None
    weight, bias = op.param("weight"), op.param("bias")
    if weight is None:
        raise NoRule("its weight is computed")
    if bias is None:
        op.linear("each", (0, "input"))
    groups = int(op.module.groups)  # type: ignore[arg-type]
    return convolve(op, op.dims((0, "input")), weight, bias or [], groups, "weight")


@here(
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Sigmoid,
    nn.LogSigmoid, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.Hardshrink, nn.Softshrink, nn.Tanhshrink,
    nn.Tanh, nn.Softplus, nn.Softsign, nn.Threshold, nn.Dropout, nn.AlphaDropout,
)  # fmt: skip
def pointwise(op: Op) -> Dims:
    return op.dims((0, "input"))


@here(nn.Identity)
def identity(op: Op) -> Dims:
    op.linear("each", (0, "input"))
    return op.dims((0, "input"))


@here(nn.PReLU)
def prelu(op: Op) -> Dims:
    slope, x = op.param("weight"), op.dims((0, "input"))
    assert slope is not None
    if slope[0].size > 1:
        unify(slope[0], x[1])
    return x


@here(nn.Softmax, nn.LogSoftmax, nn.Softmin)
def softmax(op: Op) -> Dims:
    x = op.dims((0, "input"))
    dim = getattr(op.module, "dim", None)
    if dim is None:
        raise NoRule("softmax over an unnamed dim")
    op.forbid(x[dim], "the softmax runs over it")
    return x


@here(nn.GLU)
def glu(op: Op) -> Dims:
    x, dim = op.dims((0, "input")), int(op.module.dim)  # type: ignore[union-attr, arg-type]
    x[dim] = unify(*op.cut(x[dim], [x[dim].size // 2] * 2, "its halves are multiplied"))
    return x


@here(nn.Flatten, nn.Unflatten)
def reshaped(op: Op) -> Dims:
    return view(op)


@here(nn.MultiheadAttention)
def multihead_attention(op: Op) -> list[Any]:
    """query [batch, q, i], key [batch, k, i], value [batch, k, i] (or sequence first, or no batch) -> [batch,
    q, o].

    The heads axis is split off the projections: in_proj is q | k | v, each heads * head_dim; out_proj reads
    heads * head_dim."""
    module: Any = op.module
    heads, head_dim = leaf(module.num_heads), leaf(module.head_dim)
    merged = product([heads, head_dim])
    query, key, value = op.dims((0, "query")), op.dims((1, "key")), op.dims((2, "value"))
    fused, out, bias = op.param("in_proj_weight"), op.param("out_proj.weight"), op.param("in_proj_bias")
    assert out is not None
    if fused is not None:
        unify(fused[0], concat([merged, merged, merged]))
        into = [fused[1]] * 3
    else:
        into = []
        for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
            weight = op.param(name)
            assert weight is not None
            unify(weight[0], merged)
            into.append(weight[1])
    if bias is not None:
        unify(bias[0], concat([merged, merged, merged]))
    for name in ("bias_k", "bias_v"):
        extra = op.param(name)
        if extra is not None:
            unify(extra[-1], merged)
    unify(out[1], merged)
    out_bias = op.param("out_proj.bias")
    if out_bias is not None:
        unify(out_bias[0], out[0])
    for dims, axis in zip((query, key, value), into, strict=True):
        op.forbid(unify(dims[-1], axis), "projections are summed over it before the softmax")
    batched = len(query) == 3
    sequence = (1 if module.batch_first else 0) if batched else 0
    for a, b in zip(key[:-1], value[:-1], strict=True):
        unify(a, b)
    if batched:
        unify(query[1 - sequence], key[1 - sequence])
    op.forbid([query[sequence], key[sequence]], "the softmax runs over it, or a mask depends on the position")
    op.forbid(head_dim, "scores are summed over it before the softmax")
    op.contract(heads, "sum", "out_proj.weight")
    _attention_masks(op, batched, query, key, sequence)
    result = [*query[:-1], out[0]]
    weights = op.out[1] if len(op.out) > 1 else None
    if weights is None:
        return [result, []]
    batch = [query[1 - sequence]] if batched else []
    averaged = op.arg("average_attn_weights", 6, True)
    if averaged:
        op.forbid(heads, "the weights are averaged over it")
    return [result, [*batch, *([] if averaged else [heads]), query[sequence], _key_length(op, key[sequence])]]


def _key_length(op: Op, axis: Any) -> Any:
    size = int(op.out[1].shape[-1])
    return axis if axis.size == size else op.positional(op.fresh(size))  # one more key: bias_k or a zero


def _attention_masks(op: Op, batched: bool, query: Dims, key: Dims, sequence: int) -> None:
    """attn_mask [q, k] or [batch * heads, q, k], key_padding_mask [batch, k]."""
    if op.has((3, "key_padding_mask")):
        *batch, places = op.dims((3, "key_padding_mask"))
        unify(places, key[sequence])
        if batch and batched:
            unify(batch[0], query[1 - sequence])
    if op.has((5, "attn_mask")):
        mask = op.dims((5, "attn_mask"))
        unify(mask[-1], key[sequence])
        unify(mask[-2], query[sequence])
        op.forbid(mask[:-2], "a mask per batch element and head")
