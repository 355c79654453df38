"""Matrix products and all that contracts axes of two operands: linear, einsum, convolution, attention."""

from collections import Counter
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from ..axes import Axis, product, reshape, unify
from .op import Dims, NoRule, Op, Operand, Rule, everywhere, parameter_of, rule

RULES: dict[Any, Rule] = {}
here = partial(rule, into=RULES)


@here(F.linear)
def linear(op: Op) -> Dims:
    op.linear("each", (0, "input"), (1, "weight"))
    return multiply_by_weight(op, op.dims((0, "input")), op.dims((1, "weight")), (1, "weight"), (2, "bias"))


def multiply_by_weight(op: Op, x: Dims, weight: Dims, name: Operand, bias: Operand) -> Dims:
    """`x @ weight.T + bias` with weight [out, in] or [in]."""
    op.contract(unify(x[-1], weight[-1]), "sum", name)
    result = x[:-1] + weight[:-1]
    if op.has(bias):
        result = op.broadcast(result, op.dims(bias))
        op.addend(bias)
    return result


@here(*everywhere("matmul", "mm", "bmm", "mv", "dot", "vdot", "inner"), torch.Tensor.__rmatmul__)
def matmul(op: Op) -> Dims:
    left: Operand = (0, "input")
    right: Operand = next(key for key in (1, "other", "mat2", "vec2", "vec", "tensor") if op.has(key))
    if op.node.target is torch.Tensor.__rmatmul__:
        left, right = right, left
    op.linear("each", left, right)
    x, y = op.dims(left), op.dims(right)
    name = getattr(op.node.target, "__name__", "")
    if name == "inner" and len(y) > 1:
        if not x:
            raise NoRule("inner with a number")
        op.contract(unify(x[-1], y[-1]))
        return x[:-1] + y[:-1]
    op.contract(unify(x[-1], y[-2] if len(y) > 1 else y[0]), "sum", _parameter(op, left, right))
    return matrix_result(op, x, y)


@here(*everywhere("solve_triangular"))
def solve_triangular(op: Op) -> Dims:
    """The columns of B and the batch are solved each on their own."""
    if not op.arg("left", 4, True):
        raise NoRule("the unknown is on the left of the matrix")
    op.linear("each", (1, "B"))
    a, b = op.dims((0, "A")), op.dims((1, "B"))
    op.forbid([*a[-2:], b[-2]], "a system of equations runs along it")
    return op.broadcast(a[:-2], b[:-2], shape=op.shape[:-2]) + b[-2:]


def matrix_result(op: Op, x: Dims, y: Dims) -> Dims:
    rows = [x[-2]] if len(x) > 1 else []
    columns = [y[-1]] if len(y) > 1 else []
    batch = op.shape[: len(op.shape) - len(rows) - len(columns)]
    return op.broadcast(x[:-2], y[:-2], shape=batch) + rows + columns


def _parameter(op: Op, *operands: Operand) -> Operand | None:
    """The operand that is the module's own."""
    return next((o for o in operands if parameter_of(op.value(o)) is not None), None)


@here(*everywhere("addmm", "addmv", "baddbmm", "addbmm"))
def addmm(op: Op) -> Dims:
    """`beta * input + alpha * (x @ y)`."""
    name = getattr(op.node.target, "__name__", "").strip("_")
    first, second = {
        "addmm": ((1, "mat1"), (2, "mat2")), "addmv": ((1, "mat"), (2, "vec")),
        "baddbmm": ((1, "batch1"), (2, "batch2")), "addbmm": ((1, "batch1"), (2, "batch2")),
    }[name]  # fmt: skip
    x, y = op.dims(first), op.dims(second)
    op.contract(unify(x[-1], y[-2] if len(y) > 1 else y[0]), "sum", _parameter(op, first, second))
    if name == "addbmm":
        op.contract(unify(x[0], y[0]))
        x, y = x[1:], y[1:]
    op.linear("each", first, second)
    op.addend((0, "input"))
    return op.broadcast(matrix_result(op, x, y), op.dims((0, "input")))


@here(*everywhere("outer", "ger"))
def outer(op: Op) -> Dims:
    op.linear("each", (0, "input"), (1, "vec2"))
    return op.dims((0, "input")) + op.dims((1, "vec2"))


@here(torch.einsum)
def einsum(op: Op) -> Dims:
    equation = op.value(0)
    if not isinstance(equation, str):
        raise NoRule("einsum with sublists instead of an equation")
    listed = len(op.args) == 2 and isinstance(op.args[1], (tuple, list))
    tensors = op.each(1) if listed else [op.dims(i) for i in range(1, len(op.args))]
    op.linear("each", *range(1, len(op.args)))
    if listed and len(tensors) > 1:
        op.facts.linear = None  # one argument holds all operands: "each" cannot be said of it
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow:
        counts = Counter(letter for term in terms for letter in term.replace("...", ""))
        right = ("..." if "..." in left else "") + "".join(sorted(c for c, n in counts.items() if n == 1))
    axes: dict[str, Axis] = {}
    spread: list[Dims] = []
    for term, dims in zip(terms, tensors, strict=True):
        before, _, after = term.partition("...")
        count = len(dims) - len(before) - len(after)
        spread.append(dims[len(before) : len(before) + count])
        named = [*zip(before, dims, strict=False), *zip(after, dims[len(before) + count :], strict=True)]
        for letter, axis in named:
            if (before + after).count(letter) > 1:
                op.forbid(axis, "a diagonal is taken of it")
            known = axes.get(letter)
            if known is None or known.size == 1:
                axes[letter] = axis
            elif axis.size != 1:
                axes[letter] = unify(known, axis)
    width = max(len(dims) for dims in spread)
    shape = [max((d[i - width].size for d in spread if len(d) >= width - i), default=1) for i in range(width)]
    common = op.broadcast(*spread, shape=shape)
    kept = right.replace("...", "")
    weight = _parameter(op, *range(1, len(op.args)))
    for letter, axis in axes.items():
        if letter not in kept:
            op.contract(axis, "sum", weight)
    if "..." not in right:
        for axis in common:
            op.contract(axis, "sum", weight)
    before, dots, after = right.partition("...")
    return [axes[c] for c in before] + (common if dots else []) + [axes[c] for c in after]


@here(*everywhere("conv1d", "conv2d", "conv3d"))
def conv(op: Op) -> Dims:
    op.linear("each", (0, "input"), (1, "weight"))
    op.addend((2, "bias"))
    bias = op.dims((2, "bias"))
    return convolve(
        op, op.dims((0, "input")), op.dims((1, "weight")), bias, op.arg("groups", 6, 1), (1, "weight")
    )


def convolve(op: Op, x: Dims, weight: Dims, bias: Dims, groups: int, name: Operand) -> Dims:
    """x [batch, in, *space] or [in, *space], weight [out, in / groups, *window] -> [batch, out, *space]."""
    space = len(weight) - 2
    batch, channels, places = x[: -space - 1], x[-space - 1], x[-space:]
    out, per_group, *window = weight
    op.forbid(places, "windows run over it")
    op.forbid(window, "it is a window")
    if groups > 1:
        group, per_group_in = reshape([channels], [groups, per_group.size])
        unify(per_group, per_group_in)
        group_out, _ = reshape([out], [groups, out.size // groups])
        unify(group, group_out)
        op.contract(per_group, "sum", name)
    else:
        op.contract(unify(channels, per_group), "sum", name)
    if bias:
        unify(bias[0], out)
    return [*batch, out, *(op.positional(op.fresh(size)) for size in op.shape[-space:])]


@here(F.scaled_dot_product_attention)
def attention(op: Op) -> Dims:
    """query [..., h, q, d], key [..., h, k, d], value [..., h, k, e] -> [..., h, q, e]."""
    op.linear("each", (2, "value"))
    query, key, value = op.dims((0, "query")), op.dims((1, "key")), op.dims((2, "value"))
    op.forbid(unify(query[-1], key[-1]), "scores are summed over it before the softmax")
    op.forbid(unify(key[-2], value[-2]), "the softmax runs over it")
    if op.arg("is_causal", 5, False):  # without it, queries may be anything: the groups of a key head, say
        op.forbid(query[-2], "a causal mask depends on the position")
    grouped = op.arg("enable_gqa", 7, False)
    heads = query[:-2]
    for other in (key[:-2], value[:-2]):
        if grouped and other[-1].size != heads[-1].size:
            repeat = op.fresh(heads[-1].size // other[-1].size)
            other = [*other[:-1], product([other[-1], repeat])]
        heads = op.broadcast(heads, other, shape=op.shape[:-2])
    if op.has((3, "attn_mask")):
        scores = [*heads, query[-2], key[-2]]
        op.broadcast(scores, op.dims((3, "attn_mask")), shape=[axis.size for axis in scores])
    return [*heads, query[-2], value[-1]]


GROUPED = [f for f in (getattr(F, "grouped_mm", None), getattr(torch, "_grouped_mm", None)) if f is not None]


@here(*GROUPED)
def grouped_mm(op: Op) -> Dims:
    """x [rows, i], weight [groups, i, o], offs [groups]: rows up to offs[0] times weight[0], and so on ->
    [rows, o]."""
    x, weight = op.dims((0, "mat_a")), op.dims((1, "mat_b"))
    if len(x) != 2 or len(weight) != 3 or not op.has("offs"):
        raise NoRule("grouped_mm other than [rows, in] @ [groups, in, out]")
    op.linear("each", (0, "mat_a"), (1, "mat_b"))
    op.forbid(x[0], "rows are told apart by their position")
    op.forbid([weight[0], *op.dims("offs")], "rows are assigned to it by their position")
    op.contract(unify(x[1], weight[1]), "sum", (1, "mat_b"))
    if op.has("bias"):
        raise NoRule("grouped_mm with a bias")
    return [x[0], weight[2]]
