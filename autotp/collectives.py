"""Typed arrows: the only differentiable collectives there are.

Over the ranks a value is `Replicate` (all hold the same), `Shard` (each holds its part) or `Partial` (the
true value is the ranks' sum), and so is its gradient:

| value | its gradient |
|---|---|
| Replicate, *whole* gradient: what follows is replicated | Replicate |
| Replicate, *partial* gradient: what follows is sharded | Partial |
| Shard (some indices may be held by several slots) | Shard: an index's gradient is the sum over its slots |
| Partial | Replicate |

Each arrow goes from one row to another and its backward is the transposed map between the gradients' columns,
so "all-reduce, and all-reduce again in backward" can only be written as `reduce_enter`, where it is right.
Arrows are differentiable once; `comm` refuses tensors that require grad, so no other way leads to a gradient.
"""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from .comm import Comm
from .layouts import Layout, add_dim, is_partition, pieces, sizes, take_dim, whole_size


class _Enter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm) -> Tensor:
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.comm.all_reduce(grad), None


class _Reduce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm) -> Tensor:
        return comm.all_reduce(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class _ReduceEnter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm) -> Tensor:
        ctx.comm = comm
        return comm.all_reduce(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.comm.all_reduce(grad), None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, layout: Layout, comm: Comm) -> Tensor:
        ctx.dim, ctx.layout, ctx.comm = dim, layout, comm
        return gather_values(x, dim, layout, comm)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _first_slots(grad, ctx.dim, ctx.layout, ctx.comm.rank), None, None, None


class _GatherEnter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, layout: Layout, comm: Comm) -> Tensor:
        ctx.dim, ctx.layout, ctx.comm = dim, layout, comm
        return gather_values(x, dim, layout, comm)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _sum_to_slots(grad, ctx.dim, ctx.layout, ctx.comm), None, None, None


class _Slice(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, layout: Layout, comm: Comm) -> Tensor:
        ctx.dim, ctx.layout, ctx.comm = dim, layout, comm
        return take_dim(x, dim, layout[comm.rank]).clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        dim, layout, comm = ctx.dim, ctx.layout, ctx.comm
        if is_partition(layout):
            return gather_values(grad, dim, layout, comm), None, None, None
        shape = list(grad.shape)
        shape[dim] = whole_size(layout)
        full = grad.new_zeros(shape)
        add_dim(full, grad, dim, layout[comm.rank])
        return comm.all_reduce(full), None, None, None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, layout: Layout, comm: Comm) -> Tensor:
        ctx.dim, ctx.layout, ctx.comm = dim, layout, comm
        return _sum_to_slots(x, dim, layout, comm, every_slot=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return gather_values(grad, ctx.dim, ctx.layout, ctx.comm), None, None, None


class _Once(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm) -> Tensor:
        return x.view_as(x) if comm.rank == 0 else torch.zeros_like(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class _Extreme(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm, op: str, enter: bool) -> Tensor:
        ctx.comm, ctx.enter = comm, enter
        out = comm.all_reduce(x, op)
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, out = ctx.saved_tensors
        if ctx.enter:
            grad = ctx.comm.all_reduce(grad)
        winner = (x == out).to(grad.dtype)
        return grad * winner / ctx.comm.all_reduce(winner), None, None, None


# ---------------------------------------------------------------- the arrows
# Where no gradient is recorded there is none to type: the values alone, without autograd's bookkeeping.
def enter(x: Tensor, comm: Comm) -> Tensor:
    """Replicate (whole) -> Replicate (partial). Identity; backward all-reduces the gradient."""
    return x if comm.size == 1 or not torch.is_grad_enabled() else _Enter.apply(x, comm)


def reduce(x: Tensor, comm: Comm) -> Tensor:
    """Partial -> Replicate (whole). All-reduce; backward is the identity."""
    if comm.size == 1:
        return x
    return _Reduce.apply(x, comm) if torch.is_grad_enabled() else comm.all_reduce(x)


def reduce_enter(x: Tensor, comm: Comm) -> Tensor:
    """Partial -> Replicate (partial). All-reduce; backward too, as only sharded values use the result."""
    if comm.size == 1:
        return x
    return _ReduceEnter.apply(x, comm) if torch.is_grad_enabled() else comm.all_reduce(x)


def gather(x: Tensor, dim: int, layout: Layout, comm: Comm) -> Tensor:
    """Shard -> Replicate (whole). All-gather along `dim`, indices put in their places; backward slices.

    Of an index held by several slots the first one's value is used, and that slot alone gets its gradient.
    """
    if _trivial(layout):
        return x
    give = _Gather.apply if torch.is_grad_enabled() else gather_values
    return give(x, dim, layout, comm)


def gather_enter(x: Tensor, dim: int, layout: Layout, comm: Comm) -> Tensor:
    """Shard -> Replicate (partial). All-gather; backward reduce-scatters (what follows is a column's)."""
    if _trivial(layout):
        return x
    give = _GatherEnter.apply if torch.is_grad_enabled() else gather_values
    return give(x, dim, layout, comm)


def slice_(x: Tensor, dim: int, layout: Layout, comm: Comm) -> Tensor:
    """Replicate (whole) -> Shard. This rank's ranges of `dim`; backward all-gathers (sums slots)."""
    return x if _trivial(layout) else _Slice.apply(x, dim, layout, comm)


def reduce_scatter(x: Tensor, dim: int, layout: Layout, comm: Comm) -> Tensor:
    """Partial -> Shard. The ranks' sum, of which each keeps its ranges; backward all-gathers.

    `layout` must hold each index once (sequence parallelism, after a row).
    """
    if not is_partition(layout):
        raise ValueError("reduce_scatter needs a layout that holds each index once; use reduce, then slice_")
    return x if _trivial(layout) else _ReduceScatter.apply(x, dim, layout, comm)


def once(x: Tensor, comm: Comm) -> Tensor:
    """Replicate (whole) -> Partial. Kept on rank 0, zero elsewhere, so that the ranks' sum has it once."""
    return x if comm.size == 1 else _Once.apply(x, comm)


def reduce_mean(x: Tensor, local_n: int, global_n: int, comm: Comm, enter: bool = False) -> Tensor:
    """The mean over a sharded axis from each rank's mean `x` over its own `local_n` of `global_n` indices.

    Uneven parts are weighted. `enter`: the result is used with sharded values (as `reduce_enter`).
    """
    part = x * (local_n / global_n)
    return reduce_enter(part, comm) if enter else reduce(part, comm)


def reduce_max(x: Tensor, comm: Comm, op: str = "max", enter: bool = False) -> Tensor:
    """The maximum (or `op="min"`) over a sharded axis from each rank's own `x`.

    The gradient goes to the ranks that hold the extreme, in equal parts when several do (a valid subgradient;
    torch's `amax` divides among equal *elements*). `enter` as in `reduce_mean`.
    """
    return x if comm.size == 1 else _Extreme.apply(x, comm, op, enter)


# ---------------------------------------------------------------- on values, without gradients
def gather_values(x: Tensor, dim: int, layout: Layout, comm: Comm) -> Tensor:
    """All ranks' parts in the order of the whole `dim` (first slot of each index). Not differentiable."""
    lengths = sizes(layout)
    joined = comm.all_gather(x, dim, lengths)
    starts = [sum(lengths[:rank]) for rank in range(len(lengths))]
    runs = pieces(layout)
    if sum(lengths) == whole_size(layout) and all(starts[rank] + at == low for rank, at, low, _ in runs):
        return joined
    return torch.cat([joined.narrow(dim, starts[rank] + at, length) for rank, at, _, length in runs], dim)


def _first_slots(full: Tensor, dim: int, layout: Layout, rank: int) -> Tensor:
    """This rank's part of `full`, zero where another slot comes first: the adjoint of `gather_values`."""
    part = take_dim(full, dim, layout[rank])
    if is_partition(layout):
        return part.clone()
    first = torch.zeros_like(part)
    for owner, at, _, length in pieces(layout):
        if owner == rank:
            first.narrow(dim, at, length).copy_(part.narrow(dim, at, length))
    return first


def _sum_to_slots(x: Tensor, dim: int, layout: Layout, comm: Comm, every_slot: bool = False) -> Tensor:
    """The ranks' sum of `x`, of which each keeps its part."""
    if is_partition(layout) and all(len(ranges) == 1 for ranges in layout) \
            and [ranges[0][0] for ranges in layout] == sorted(ranges[0][0] for ranges in layout):
        return comm.reduce_scatter(x, dim, sizes(layout))
    total = comm.all_reduce(x)
    return take_dim(total, dim, layout[comm.rank]).clone() if every_slot \
        else _first_slots(total, dim, layout, comm.rank)


def _trivial(layout: Layout) -> bool:
    """One rank that holds the whole dim in order."""
    return len(layout) == 1 and len(layout[0]) == 1
