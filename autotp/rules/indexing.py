"""Reading and writing by position."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from ..axes import Axis, AxisConflict, leaf, reshape, unify
from ..captured import setitem
from ..ints import plain
from ..known import PICKS, ROWS, is_mask
from .op import Dims, NoRule, Op, Rule, everywhere, rule

RULES: dict[Any, Rule] = {}
here = partial(rule, into=RULES)


@here(torch.Tensor.__getitem__)
def getitem(op: Op) -> Dims:
    op.linear("each", 0)
    return indexed(op, op.dims(0), op.value(1))


@here(setitem)
def assign(op: Op) -> Dims:
    """Not linear: the elements that are not written stay as they are on every rank."""
    x, index, value = op.dims(0), op.value(1), op.dims(2)
    if is_mask(index) and not value:  # x[mask] = number, element by element
        mask = op.dims(1)
        return op.broadcast(mask, x[: len(mask)], shape=op.shape[: len(mask)]) + x[len(mask) :]
    if is_mask(index):  # the masked elements, in order
        mask, rest = op.dims(1), x[len(op.dims(1)) :]
        op.forbid([*mask, *x[: len(mask)]], "single elements of it are written")
        rows = max(len(value) - len(rest), 0)
        op.forbid(value[:rows], "its elements are written one by one")
        op.broadcast(rest, value[rows:], shape=[axis.size for axis in rest])
        return x
    target = indexed(op, x, index)
    while len(value) > len(target) and value[0].size == 1:
        value = value[1:]
    op.broadcast(target, value, shape=[axis.size for axis in target])
    return x


def indexed(op: Op, x: Dims, index: Any) -> Dims:
    """The axes of `x[index]`, as numpy's rules have it; forbids what is not read whole."""
    items = list(index) if isinstance(index, tuple) else [index]
    used = sum(_width(item) for item in items)
    if not any(item is Ellipsis for item in items):
        items.append(Ellipsis)
    result: Dims = []
    advanced: list[Dims] = []  # the axes of index tensors
    places: list[int] = []  # where in `result` the dims they index stood
    last_advanced, apart = None, False
    position = 0
    for number, item in enumerate(items):
        if item is Ellipsis:
            result += x[position : position + len(x) - used]
            position += len(x) - used
        elif item is None:
            result.append(leaf(1))
        elif isinstance(item, slice):
            result.append(_sliced(op, x[position], item))
            position += 1
        elif (run := _run(item, x[position].size if position < len(x) else 0)) is not None:
            result.append(_sliced(op, x[position], run))
            position += 1
        else:
            width = _width(item)
            op.forbid(x[position : position + width], "single elements of it are picked")
            position += width
            if isinstance(item, int):  # counts as an index tensor of no dims where there are others
                dims: Dims = []
            elif is_mask(item):
                op.forbid(op.of(item), "it says which elements are picked")
                dims = [_rows(op, [axis for dims in advanced for axis in dims])]
            elif isinstance(item, fx.Node):
                dims = op.of(item)
            else:
                dims = [leaf(size) for size in torch.as_tensor(plain(item)).shape]
            advanced.append(dims)
            places.append(len(result))
            apart |= last_advanced is not None and number != last_advanced + 1
            last_advanced = number
    if not any(advanced):
        return result
    broadcast = torch.broadcast_shapes(*([axis.size for axis in dims] for dims in advanced))
    picked = op.broadcast(*advanced, shape=tuple(broadcast))
    place = 0 if apart else places[0]
    return result[:place] + picked + result[place:]


def _width(item: Any) -> int:
    """How many dims an index element takes."""
    if item is None or item is Ellipsis:
        return 0
    return item.meta["val"].ndim if is_mask(item) else 1


def _rows(op: Op, others: Dims) -> Axis:
    """The axis of what a mask picks. others: of index tensors beside it."""
    if PICKS not in op.node.meta:
        raise NoRule("how many elements a mask picks depends on the values")
    if others:
        raise NoRule("a mask beside other index tensors")
    return op.unsized(op.node.meta[ROWS][0])


def _run(item: Any, size: int) -> slice | None:
    """The slice that a list of consecutive positions is: `x[..., [-2], :]` picks no single elements."""
    if not isinstance(item, list) or not item or not all(isinstance(i, int) for i in item):
        return None
    at = [int(i) % size for i in item] if size else []
    return slice(at[0], at[-1] + 1) if at == list(range(at[0], at[0] + len(at))) else None


def _sliced(op: Op, axis: Axis, item: slice) -> Axis:
    """The axis of `x[start:stop:step]`."""
    if any(isinstance(bound, fx.Node) for bound in (item.start, item.stop, item.step)):
        raise NoRule("a slice whose ends are values of tensors")
    start, stop, step = slice(plain(item.start), plain(item.stop), plain(item.step)).indices(axis.size)
    length = len(range(start, stop, step))
    if op.hangs_on_data(item):
        op.forbid(axis, "where it is cut hangs on the data")
        return op.unsized(length)
    if step == 1:
        stop = start + length
        before, kept, after = op.cut(
            axis, [start, length, axis.size - stop], "a slice of it begins or ends in the middle of a unit"
        )
        op.drop([before, after])
        return kept
    if length * step == axis.size and start < step and axis.size > step:
        # Every step-th element: one place in the minor factor, all of the major one.
        try:
            major, minor = reshape([axis], [length, step])
        except AxisConflict:
            pass
        else:
            op.forbid(minor, "every so many of its elements are picked")
            return major
    op.forbid(axis, "every so many of its elements are picked")
    return leaf(length)


@here(*everywhere("select"))
def select(op: Op) -> Dims:
    op.linear("each", (0, "input"))
    x = op.dims((0, "input"))
    dim = op.arg("dim", 1) % len(x)
    op.forbid(x[dim], "single elements of it are picked")
    return x[:dim] + x[dim + 1 :]


@here(*everywhere("narrow"))
def narrow(op: Op) -> Dims:
    if op.has((2, "start")):
        raise NoRule("a slice whose ends are values of tensors")
    op.linear("each", (0, "input"))
    x = op.dims((0, "input"))
    dim, start = op.arg("dim", 1) % len(x), op.arg("start", 2)
    if op.hangs_on_data(*op.args[2:], *op.kwargs.values()):
        op.forbid(x[dim], "where it is cut hangs on the data")
        x[dim] = op.unsized(op.shape[dim])
    else:
        x[dim] = _sliced(op, x[dim], slice(start, start % x[dim].size + op.arg("length", 3)))
    return x


@here(*everywhere("index_select"))
def index_select(op: Op) -> Dims:
    op.linear("each", (0, "input"))
    x, index = op.dims((0, "input")), op.dims((2, "index"))
    dim = op.arg("dim", 1) % len(x)
    op.forbid(x[dim], "single elements of it are picked")
    x[dim] = index[0] if index else leaf(1)
    return x


@here(*everywhere("gather", "take_along_dim"))
def gather(op: Op) -> Dims:
    op.linear("each", (0, "input"))
    x = op.dims((0, "input"))
    names = getattr(op.node.target, "__name__", "") == "take_along_dim"
    index = op.dims((1, "indices") if names else (2, "index"))
    dim = op.arg("dim", 2 if names else 1)
    if dim is None:
        raise NoRule("the indices are into the flattened tensor")
    dim %= len(x)
    op.forbid(x[dim], "single elements of it are picked")
    return _beside(op, index, x, dim)


def _beside(op: Op, index: Dims, x: Dims, dim: int) -> Dims:
    """`index` with the other dims of `x` unified into it. Where `index` covers only the first of `x`'s
    positions, both are needed whole."""
    result = list(index)
    for i, (a, b) in enumerate(zip(index, x, strict=True)):
        if i == dim or a.size == b.size == 1:
            continue
        if a.size == b.size:
            result[i] = unify(a, b)
        elif op.shape[i] == b.size and a.size == 1:  # take_along_dim broadcasts
            result[i] = b
        elif op.shape[i] != a.size or b.size != 1:
            op.forbid([a, b], "only its first elements are read")
    return result


@here(*everywhere("scatter_add", "index_add"))
def scatter_add(op: Op) -> Dims:
    """Elements of the source are added into places of the first operand: a sum over them."""
    op.linear("joint", (0, "input"), (3, "src") if op.has((3, "src")) else (3, "source"))
    x, index = op.dims((0, "input")), op.dims((2, "index"))
    source = op.dims((3, "src")) or op.dims((3, "source"))
    dim = op.arg("dim", 1) % len(x)
    op.forbid(x[dim], "elements are added into places of it")
    for i, axis in enumerate(source):
        if i == dim:
            places = index[min(i, len(index) - 1)]
            if places.size == axis.size:
                unify(places, axis)
                op.contract(axis)
            else:
                op.forbid([places, axis], "only its first elements are read")
        elif axis.size == x[i].size:
            unify(x[i], axis)
            if len(index) > 1 and index[i].size == axis.size:
                unify(index[i], axis)
            elif len(index) > 1:
                op.forbid([index[i], axis], "only its first elements are read")
        else:
            op.forbid([x[i], axis], "only its first elements are read")
            if len(index) > 1:
                op.forbid(index[i], "only its first elements are read")
    op.addend((0, "input"))
    return x


@here(*everywhere("scatter", "scatter_reduce", "index_copy", "index_fill", "index_reduce", "put"))
def scatter(op: Op) -> Dims:
    """Not linear: where elements meet, one of them wins."""
    x = op.dims((0, "input"))
    dim = op.arg("dim", 1) % len(x)
    name = getattr(op.node.target, "__name__", "")
    others = [op.dims(key) for key in (*range(2, len(op.args)), *op.kwargs) if op.has(key)]
    op.forbid(x[dim], "elements are written into places of it")
    for dims in others:
        if len(dims) != len(x) or name.startswith("put"):
            op.forbid(dims, "it says where elements are written, or what")
            continue
        for i, axis in enumerate(dims):
            if i == dim:
                op.forbid(axis, "its elements are written into places")
            elif axis.size == x[i].size:
                unify(axis, x[i])
            else:
                op.forbid([axis, x[i]], "only its first elements are read")
    return x


@here(*everywhere("index_put"))
def index_put(op: Op) -> Dims:
    x = op.dims((0, "input"))
    items = tuple(slice(None) if item is None else item for item in op.value((1, "indices")))
    target = indexed(op, x, items)
    values = op.dims((2, "values"))
    op.forbid([axis for axis in values if axis.size != 1], "its elements are written into places")
    op.forbid(
        [axis for dims in op.each((1, "indices")) for axis in dims], "it says where elements are written"
    )
    del target
    return x


@here(*everywhere("masked_scatter"))
def masked_scatter(op: Op) -> Dims:
    x = op.dims((0, "input"))
    op.broadcast(x, op.dims((1, "mask")))
    op.forbid(x, "elements are taken in order")
    op.forbid(op.dims((2, "source")), "elements are taken in order")
    return x


@here(*everywhere("masked_select", "nonzero", "argwhere"))
def selected(op: Op) -> Any:
    """As many rows as a mask picks."""
    if PICKS not in op.node.meta:
        raise NoRule("how many elements it gives depends on the values")
    for key in (*range(len(op.args)), *op.kwargs):
        op.forbid(op.dims(key), "it says which elements are picked, or they are taken one by one")
    rows = op.unsized(op.node.meta[ROWS][0])
    if isinstance(op.out, tuple):
        return [[rows] for _ in op.out]
    return [rows, op.fresh(op.shape[1])] if op.out.ndim == 2 else [rows]


@here(F.embedding, torch.embedding)
def embedding(op: Op) -> Dims:
    swapped = op.node.target is torch.embedding
    weight, indices = ((0, "weight"), (1, "indices")) if swapped else ((1, "weight"), (0, "input"))
    op.linear("each", weight)
    rows, *rest = op.dims(weight)
    if not swapped and op.arg("max_norm", 3) is not None:
        op.forbid([rows, *rest], "its rows are normalised")
    op.contract(rows, "lookup", weight)
    return op.dims(indices) + rest


@here(F.one_hot)
def one_hot(op: Op) -> Dims:
    classes = op.shape[-1]
    made = op.unsized(classes) if op.hangs_on_data(*op.args[1:], *op.kwargs.values()) else op.fresh(classes)
    return [*op.dims((0, "input")), op.positional(made)]
