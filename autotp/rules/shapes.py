"""Operations that move, merge, split, join and repeat dims and leave the values as they are."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F

from ..axes import AxisConflict, concat, product, reshape, unify
from .op import Dims, NoRule, Op, Rule, everywhere, rule

RULES: dict[Any, Rule] = {}
here = partial(rule, into=RULES)


@here(
    *everywhere("view", "reshape", "flatten", "unflatten", "view_as", "reshape_as", "ravel", "_unsafe_view")
)
def view(op: Op) -> Dims:
    x = op.dims((0, "input"))
    if isinstance(op.arg("dtype", 1), torch.dtype):  # view(dtype) reads the bits anew
        if op.out.dtype.itemsize == op.tensor(0).dtype.itemsize:
            return x
        op.forbid(x[-1], "its bits are read as another dtype")
        return [*x[:-1], op.fresh(op.shape[-1])]
    op.linear("each", (0, "input"))
    try:
        result = reshape(x, op.shape)
    except AxisConflict:
        result = [axis for old, new in _groups(x, op.shape) for axis in _regrouped(op, old, new)]
    if op.has((1, "other")):  # view_as: the sizes are the other's
        op.broadcast(result, op.dims((1, "other")))
    return result


def _groups(x: Dims, shape: Sequence[int]) -> Iterator[tuple[Dims, list[int]]]:
    """The dims of a view in the smallest runs that have as many elements before as after it: each such run
    is a view by itself."""
    old: Dims = []
    new: list[int] = []
    todo, sizes = list(x), list(shape)
    while todo or sizes:
        before, after = math.prod(axis.size for axis in old), math.prod(new)
        if before == after and old and new:
            yield old, new
            old, new = [], []
        elif todo and (before <= after or not sizes):
            old.append(todo.pop(0))
        else:
            new.append(sizes.pop(0))
    yield old, new


def _regrouped(op: Op, old: Dims, new: list[int]) -> Dims:
    """The axes of a run of dims that is viewed as `new`; where they begin in the middle of units, all is
    needed whole."""
    try:
        return reshape(old, new)
    except AxisConflict as error:
        op.forbid(old, str(error))
        return [op.positional(op.fresh(size)) for size in new]


@here(*everywhere("squeeze"))
def squeeze(op: Op) -> Dims:
    x, dim = op.dims((0, "input")), op.varargs("dim", 1)
    dims = range(len(x)) if dim is None or dim == () else [dim] if isinstance(dim, int) else dim
    for i in dims:
        op.forbid(x[i], "it would be dropped where a rank holds one element of it")
    return unsqueeze(op)


@here(*everywhere("unsqueeze", "atleast_1d", "atleast_2d"))
def unsqueeze(op: Op) -> Dims:
    op.linear("each", (0, "input"))
    kept = iter([axis for axis in op.dims((0, "input")) if axis.size != 1])
    return [op.fresh(1) if size == 1 else next(kept) for size in op.shape]


@here(*everywhere(
    "transpose", "permute", "t", "T", "mT", "H", "mH", "adjoint", "movedim", "moveaxis", "swapaxes",
    "swapdims",
))  # fmt: skip
def permute(op: Op) -> Dims:
    op.linear("each", (0, "input"))
    x = op.dims((0, "input"))
    # Run on a tensor whose sizes are all different, the operation itself says which dim goes where.
    probe = torch.empty(tuple(range(2, 2 + len(x))), device="meta")
    kwargs = {key: value for key, value in op.kwargs.items() if key != "input"}
    moved = cast(Callable[..., torch.Tensor], op.node.target)(probe, *op.args[1:], **kwargs)
    return [x[size - 2] for size in moved.shape]


@here(*everywhere("expand", "expand_as", "broadcast_to"))
def expand(op: Op) -> Dims:
    op.linear("each", (0, "input"))
    x = op.dims((0, "input"))
    if op.has((1, "other")):  # expand_as: the sizes are the other's
        return op.broadcast(x, op.dims((1, "other")))
    offset = len(op.shape) - len(x)
    kept = [None] * offset + [axis if axis.size == op.shape[offset + i] else None for i, axis in enumerate(x)]
    return [
        axis if axis is not None else op.fill(op.fresh(n)) for axis, n in zip(kept, op.shape, strict=True)
    ]


@here(*everywhere("broadcast_tensors"))
def broadcast_tensors(op: Op) -> list[Dims]:
    tensors = (
        op.each(0) if isinstance(op.value(0), (tuple, list)) else [op.dims(i) for i in range(len(op.args))]
    )
    shape = tuple(op.out[0].shape)
    result = []
    for dims in tensors:
        padded = [op.fresh(1)] * (len(shape) - len(dims)) + dims
        result.append(
            [a if a.size == n else op.fill(op.fresh(n)) for a, n in zip(padded, shape, strict=True)]
        )
    return result


@here(*everywhere("repeat", "tile"))
def repeat(op: Op) -> Dims:
    """Copies follow one another: the copy is the major factor."""
    op.linear("each", (0, "input"))
    x = op.dims((0, "input"))
    x = [op.fresh(1)] * (len(op.shape) - len(x)) + x
    return [
        axis if axis.size == size or not axis.size else product([op.fill(op.fresh(size // axis.size)), axis])
        for axis, size in zip(x, op.shape, strict=True)
    ]


@here(*everywhere("repeat_interleave"))
def repeat_interleave(op: Op) -> Dims:
    """Each element's copies follow it: the copy is the minor factor."""
    x, times, dim = op.dims((0, "input")), op.value((1, "repeats")), op.arg("dim", 2)
    if not op.has((0, "input")) or times is None:
        raise NoRule("the number of copies depends on the values")
    op.linear("each", (0, "input"))
    if dim is None:
        x, dim = [product(x)], 0
    if op.has((1, "repeats")):
        op.forbid(op.dims((1, "repeats")), "it says how often each element is repeated")
        op.forbid(x[dim], "its elements are repeated each its own number of times")
        x[dim] = op.fresh(op.shape[dim])
    elif int(times) != 1:
        x[dim] = product([x[dim], op.fill(op.fresh(int(times)))])
    return x


@here(*everywhere("split", "chunk", "tensor_split", "split_with_sizes", "unsafe_split", "unsafe_chunk"))
def split(op: Op) -> list[Dims]:
    op.linear("each", (0, "input"))
    x = op.dims((0, "input"))
    dim = op.arg("dim", 2, 0) % len(x)
    pieces = op.cut(x[dim], [part.shape[dim] for part in op.out], "it is split in the middle of a unit")
    return [[*x[:dim], piece, *x[dim + 1 :]] for piece in pieces]


@here(*everywhere("unbind"))
def unbind(op: Op) -> list[Dims]:
    op.linear("each", (0, "input"))
    x = op.dims((0, "input"))
    dim = op.arg("dim", 1, 0) % len(x)
    op.forbid(x[dim], "its elements are used one by one")
    return [x[:dim] + x[dim + 1 :] for _ in op.out]


@here(*everywhere("cat", "concat", "concatenate"))
def cat(op: Op) -> Dims:
    op.linear("joint", (0, "tensors"))
    # torch takes (and skips) empty tensors of one dim beside any others
    tensors = [dims for dims in op.each((0, "tensors")) if len(dims) == len(op.shape)]
    return joined(op, tensors, op.arg("axis", 1, op.arg("dim", 1, 0)))


@here(*everywhere("hstack"))
def hstack(op: Op) -> Dims:
    op.linear("joint", (0, "tensors"))
    return joined(op, op.each((0, "tensors")), 0 if len(op.shape) == 1 else 1)


def joined(op: Op, tensors: list[Dims], dim: int) -> Dims:
    dim %= len(op.shape)
    result = list(tensors[0])
    for other in tensors[1:]:
        for i, (a, b) in enumerate(zip(result, other, strict=True)):
            if i != dim:
                result[i] = unify(a, b)
    parts = [dims[dim] for dims in tensors]
    result[dim] = op.uncut(parts) or concat(parts)
    return result


@here(*everywhere("stack"))
def stack(op: Op) -> Dims:
    op.linear("joint", (0, "tensors"))
    first, *others = op.each((0, "tensors"))
    for other in others:
        for a, b in zip(first, other, strict=True):
            unify(a, b)
    dim = op.arg("dim", 1, 0) % len(op.shape)
    return [*first[:dim], op.positional(op.fresh(op.shape[dim])), *first[dim:]]


@here(F.pad)
def pad(op: Op) -> Dims:
    x = op.dims((0, "input"))
    if op.arg("mode", 2, "constant") != "constant" or not op.arg("value", 3):
        op.linear("each", (0, "input"))
    amounts = op.arg("pad", 1)
    for i in range(len(amounts) // 2):
        if amounts[2 * i] or amounts[2 * i + 1]:
            op.forbid(x[-1 - i], "its ends are padded")
            x[-1 - i] = op.positional(op.fresh(op.shape[-1 - i]))
    return x


@here(*everywhere("roll", "flip", "fliplr", "flipud", "rot90"))
def roll(op: Op) -> Dims:
    op.linear("each", (0, "input"))
    x = op.dims((0, "input"))
    name = getattr(op.node.target, "__name__", "")
    dims = op.arg("dims", 2) if name == "roll" else op.varargs("dims", 1) if name == "flip" else None
    moved = range(len(x)) if dims is None else [dims] if isinstance(dims, int) else dims
    for dim in moved:
        op.forbid(x[dim], "its elements change places")
    return x if name != "rot90" else [op.fresh(size) for size in op.shape]


@here(*everywhere("tril", "triu"))
def triangle(op: Op) -> Dims:
    op.linear("each", (0, "input"))
    x = op.dims((0, "input"))
    op.forbid(x[-2:], "what is kept depends on the position")
    return x


@here(torch.Tensor.unfold)
def unfold(op: Op) -> Dims:
    op.linear("each", (0, "input"))
    x = op.dims((0, "input"))
    dim = op.arg("dimension", 1) % len(x)
    op.forbid(x[dim], "windows run over it")
    return [
        *x[:dim],
        op.positional(op.fresh(op.shape[dim])),
        *x[dim + 1 :],
        op.positional(op.fresh(op.shape[-1])),
    ]


@here(*everywhere("meshgrid"))
def meshgrid(op: Op) -> list[Dims]:
    tensors = (
        op.each(0) if isinstance(op.value(0), (tuple, list)) else [op.dims(i) for i in range(len(op.args))]
    )
    axes = [dims[0] if dims else op.fresh(1) for dims in tensors]
    if op.value("indexing") == "xy" and len(axes) > 1:
        axes[:2] = axes[1], axes[0]
    for i, axis in enumerate(axes):
        if axis.size != op.out[0].shape[i]:
            raise AxisConflict(f"dim {i} of the grid has size {op.out[0].shape[i]}, not {axis.size}")
    # Along its own dim a grid repeats its vector; along the others it is constant, like an expanded tensor.
    return [list(axes) for _ in op.out]


@here(*everywhere("view_as_real"))
def view_as_real(op: Op) -> Dims:
    op.linear("each", (0, "input"))
    return [*op.dims((0, "input")), op.positional(op.fresh(2))]


@here(*everywhere("view_as_complex"))
def view_as_complex(op: Op) -> Dims:
    op.linear("each", (0, "input"))
    *x, pair = op.dims((0, "input"))
    op.forbid(pair, "it holds the real and the imaginary part")
    return x
