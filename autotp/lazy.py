"""Tensors that are not there yet, but know where they come from.

A `LazyTensor` has a shape and a dtype and stands for a tensor of a file, or for what operations make of some.
Any Python code may split, join, stack, transpose and rename them; then `fill` reads just the wanted part of
the outcome, by following each operation backwards to the parts of its operands. So a checkpoint that is
converted on load is cut *after* the conversion, and still only the rank's own bytes are read. Operations it
has no way back for are run on whole operands."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from .layouts import DimLayout, local_size, merge, take_dim
from .tensorfiles import CHUNK, Region, row_blocks, whole_region

aten = torch.ops.aten


class Source(Protocol):
    """Where a tensor's values can be had. `dtype`: of the stored ones."""

    @property
    def dtype(self) -> torch.dtype: ...

    def fill(self, dest: Tensor, region: Region) -> None:
        """Write the part `region` into `dest`, casting to its dtype."""


@dataclass(frozen=True)
class Made:
    """Result number `index` of an operation on tensors some of which are lazy."""

    op: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    index: int


class LazyTensor(Tensor):
    """A tensor without data. `source` says where its values come from."""

    source: Source | Made

    @staticmethod
    def __new__(cls, like: Tensor, source: Source | Made) -> LazyTensor:
        made = Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=torch.device("cpu")
        )
        made.source = source
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"LazyTensor({list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = {
            k: v for k, v in (kwargs or {}).items() if k not in ("device", "pin_memory", "non_blocking")
        }
        out = func(*tree_map(_shell, args), **tree_map(_shell, kwargs))
        if isinstance(out, Tensor):
            return LazyTensor(out, Made(func, args, kwargs, 0))
        if isinstance(out, (list, tuple)) and all(isinstance(o, Tensor) for o in out):
            return type(out)(LazyTensor(o, Made(func, args, kwargs, i)) for i, o in enumerate(out))
        raise TypeError(f"{func} needs the values of a tensor that is not read yet")


def lazy(shape: tuple[int, ...], dtype: torch.dtype, source: Source) -> LazyTensor:
    """A tensor of that shape and dtype whose values are to be had from `source`."""
    return LazyTensor(torch.empty(shape, dtype=dtype, device="meta"), source)


def _shell(value: Any) -> Any:
    """A meta tensor in place of a lazy one: operations on it give shapes."""
    if isinstance(value, LazyTensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return value


# ---------------------------------------------------------------- reading a part
def fill(dest: Tensor, tensor: Tensor, region: Region) -> None:
    """Write the part `region` of a lazy (or any) tensor into `dest`, of that shape, casting to its dtype."""
    source = getattr(tensor, "source", None)
    if source is None:
        dest.copy_(_take(tensor.detach(), region))
    elif not isinstance(source, Made):
        source.fill(dest, region)
    elif dest.dtype != tensor.dtype:
        part = torch.empty(dest.shape, dtype=tensor.dtype)
        fill(part, tensor, region)
        dest.copy_(part)
    else:
        back = _BACK.get(source.op)
        if back is None or not back(source, dest, region):
            dest.copy_(_take(_computed(source), region))


def read(tensor: Tensor) -> Tensor:
    """All of a lazy tensor, on the CPU."""
    values = torch.empty(tensor.shape, dtype=tensor.dtype)
    fill(values, tensor, whole_region(tensor.shape))
    return values


def read_in_blocks(tensor: Tensor, region: Region) -> Iterator[Tensor]:
    """The part `region`, on the CPU, some of its rows at a time: blocks of about `CHUNK` bytes."""
    sizes = [local_size(ranges) for ranges in region]
    rows = max(1, CHUNK // max(1, math.prod(sizes[1:]) * tensor.element_size()))
    for _, ranges in row_blocks(region[0], rows) if region else [(0, ())]:
        block = torch.empty([local_size(ranges), *sizes[1:]] if region else [], dtype=tensor.dtype)
        fill(block, tensor, (ranges, *region[1:]) if region else ())
        yield block


def _take(tensor: Tensor, region: Region) -> Tensor:
    for dim, ranges in enumerate(region):
        tensor = take_dim(tensor, dim, ranges)
    return tensor


def _computed(made: Made) -> Tensor:
    """The result of an operation, by running it on whole operands."""

    def whole(value: Any) -> Any:
        return read(value) if isinstance(value, LazyTensor) else value

    out = made.op(*tree_map(whole, made.args), **tree_map(whole, dict(made.kwargs)))
    return out if isinstance(out, Tensor) else out[made.index]


def sources(tensor: Tensor) -> list[Source]:
    """What has to be read for a lazy tensor."""
    source = getattr(tensor, "source", None)
    if source is None:
        return []
    if not isinstance(source, Made):
        return [source]
    operands, _ = tree_flatten((source.args, dict(source.kwargs)))
    return [s for operand in operands if isinstance(operand, Tensor) for s in sources(operand)]


def origin(tensor: Tensor) -> Source | None:
    """Where all of a lazy tensor is stored as it is; None where it is made of what is stored."""
    while isinstance(source := getattr(tensor, "source", None), Made):
        if _BACK.get(source.op) is not _same or source.args[0].dtype != tensor.dtype:
            return None
        tensor = source.args[0]
    return source


def base(tensor: Tensor) -> Tensor:
    """The tensor whose memory a lazy one would share: the same one for all its views."""
    while isinstance(source := getattr(tensor, "source", None), Made) and source.op.is_view:
        tensor = source.args[0]
    return tensor


# ---------------------------------------------------------------- operations, backwards
Back = Callable[[Made, Tensor, Region], bool]
_BACK: dict[Any, Back] = {}
"""For an operation: fill `dest` with a part of its result from parts of its operands. False where it can't be
done so."""


def _backwards(*ops: Any) -> Callable[[Back], Back]:
    def register(back: Back) -> Back:
        _BACK.update(dict.fromkeys(ops, back))
        return back

    return register


def _arg(made: Made, position: int, name: str, default: Any = None) -> Any:
    return made.args[position] if len(made.args) > position else made.kwargs.get(name, default)


def _dim(value: int, rank: int) -> int:
    return value % rank


@_backwards(
    aten.alias.default,
    aten.detach.default,
    aten.clone.default,
    aten._to_copy.default,
    aten.contiguous.default,
)
def _same(made: Made, dest: Tensor, region: Region) -> bool:
    fill(dest, made.args[0], region)  # a cast is `dest`'s
    return True


@_backwards(aten.slice.Tensor)
def _slice(made: Made, dest: Tensor, region: Region) -> bool:
    operand = made.args[0]
    if _arg(made, 4, "step", 1) != 1:
        return False
    dim, size = (
        _dim(_arg(made, 1, "dim", 0), operand.dim()),
        operand.shape[_dim(_arg(made, 1, "dim", 0), operand.dim())],
    )
    start = _arg(made, 2, "start") or 0
    start = min(max(start + size if start < 0 else start, 0), size)
    fill(dest, operand, _with(region, dim, _shifted(region[dim], start)))
    return True


@_backwards(aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default)
def _split(made: Made, dest: Tensor, region: Region) -> bool:
    operand, sizes = made.args[0], made.args[1]
    dim = _dim(_arg(made, 2, "dim", 0), operand.dim())
    if made.op is aten.chunk.default:
        sizes = math.ceil(operand.shape[dim] / sizes)
    start = made.index * sizes if isinstance(sizes, int) else sum(sizes[: made.index])
    fill(dest, operand, _with(region, dim, _shifted(region[dim], start)))
    return True


@_backwards(aten.select.int)
def _select(made: Made, dest: Tensor, region: Region) -> bool:
    operand = made.args[0]
    dim = _dim(made.args[1], operand.dim())
    index = made.args[2] % operand.shape[dim]
    fill(dest.unsqueeze(dim), operand, (*region[:dim], ((index, index + 1),), *region[dim:]))
    return True


@_backwards(aten.unbind.int)
def _unbind(made: Made, dest: Tensor, region: Region) -> bool:
    dim = _arg(made, 1, "dim", 0)
    return _select(Made(aten.select.int, (made.args[0], dim, made.index), {}, 0), dest, region)


@_backwards(aten.squeeze.dim)
def _squeeze(made: Made, dest: Tensor, region: Region) -> bool:
    operand = made.args[0]
    dim = _dim(made.args[1], max(operand.dim(), 1))
    if operand.dim() == 0 or operand.shape[dim] != 1:
        return _same(made, dest, region)
    return _select(Made(aten.select.int, (operand, dim, 0), {}, 0), dest, region)


@_backwards(aten.unsqueeze.default)
def _unsqueeze(made: Made, dest: Tensor, region: Region) -> bool:
    dim = _dim(made.args[1], dest.dim())
    if local_size(region[dim]):
        fill(dest.select(dim, 0), made.args[0], (*region[:dim], *region[dim + 1 :]))
    return True


@_backwards(aten.transpose.int, aten.t.default, aten.permute.default)
def _permute(made: Made, dest: Tensor, region: Region) -> bool:
    order = list(range(dest.dim()))
    if made.op is aten.permute.default:
        order = [_dim(d, dest.dim()) for d in made.args[1]]
    elif made.op is aten.transpose.int:
        a, b = (_dim(d, dest.dim()) for d in made.args[1:3])
        order[a], order[b] = b, a
    else:
        order.reverse()
    back = sorted(range(len(order)), key=order.__getitem__)  # operand dim -> dim of the result
    fill(dest.permute(back), made.args[0], tuple(region[d] for d in back))
    return True


@_backwards(aten.cat.default)
def _cat(made: Made, dest: Tensor, region: Region) -> bool:
    parts = [p for p in made.args[0] if p.dim() == dest.dim()]  # torch lets empty 1-d tensors in
    dim = _dim(_arg(made, 1, "dim", 0), dest.dim())
    begins = [0]
    for part in parts:
        begins.append(begins[-1] + part.shape[dim])
    at = 0
    for start, stop in region[dim]:
        for part, begin, end in zip(parts, begins, begins[1:], strict=False):
            low, high = max(start, begin), min(stop, end)
            if low < high:
                here = _with(region, dim, ((low - begin, high - begin),))
                fill(dest.narrow(dim, at, high - low), part, here)
                at += high - low
    return True


@_backwards(aten.stack.default)
def _stack(made: Made, dest: Tensor, region: Region) -> bool:
    dim = _dim(_arg(made, 1, "dim", 0), dest.dim())
    rest = (*region[:dim], *region[dim + 1 :])
    indices = [i for start, stop in region[dim] for i in range(start, stop)]
    for at, index in enumerate(indices):
        fill(dest.select(dim, at), made.args[0][index], rest)
    return True


@_backwards(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def _view(made: Made, dest: Tensor, region: Region) -> bool:
    """Where only the dims behind (or before) the wanted cut change their form, or a dim is split or joined
    whole."""
    operand, shape = made.args[0], [local_size(r) for r in region]
    full = _full_shape(made)
    cut = [d for d, (ranges, n) in enumerate(zip(region, full, strict=True)) if ranges != ((0, n),)]
    if len(cut) != 1:
        return False
    # The cut dim must begin, in the operand too, where a dim does; then its ranges scale.
    before, size = math.prod(full[: cut[0]]), full[cut[0]]
    begins = [math.prod(operand.shape[:d]) for d in range(operand.dim())]
    dims = [d for d, n in enumerate(operand.shape) if begins[d] == before and n > 1]
    if not dims:
        return False
    dim, n = dims[0], operand.shape[dims[0]]
    ranges = region[cut[0]]
    if n % size == 0:
        ranges = merge([(a * (n // size), b * (n // size)) for a, b in ranges])
    elif size % n or any(bound % (size // n) for pair in ranges for bound in pair):
        return False
    else:
        ranges = merge([(a // (size // n), b // (size // n)) for a, b in ranges])
    part = torch.empty(
        [local_size(ranges) if d == dim else m for d, m in enumerate(operand.shape)], dtype=operand.dtype
    )
    fill(part, operand, _with(whole_region(operand.shape), dim, ranges))
    dest.copy_(part.reshape(shape))
    return True


def _full_shape(made: Made) -> list[int]:
    shape, count = list(made.args[1]), made.args[0].numel()
    if -1 in shape:
        known = math.prod(n for n in shape if n != -1)
        shape[shape.index(-1)] = count // max(known, 1)
    return shape


def _with(region: Region, dim: int, ranges: DimLayout) -> Region:
    return (*region[:dim], ranges, *region[dim + 1 :])


def _shifted(ranges: DimLayout, by: int) -> DimLayout:
    return tuple((a + by, b + by) for a, b in ranges)
