"""Which part of a full tensor each rank holds.

A *layout* of one dim on one rank is a tuple of `(start, stop)` ranges of the whole dim, in the order in which
the rank stores them. That says contiguous, uneven, fused (`[Q | K | V]`), interleaved, grouped and repeated
(replicated KV rows) layouts alike. A `Layout` is one `DimLayout` per rank; a *slot* is one place on one rank
that holds an index of the whole dim.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from .errors import LayoutError

DimLayout = tuple[tuple[int, int], ...]
Layout = tuple[DimLayout, ...]


F = TypeVar("F", bound=Callable[..., Any])


def _of_layout(function: F) -> F:
    """Layouts are constants: computed once each, and never traced by torch.compile."""
    cached = lru_cache(maxsize=4096)(function)

    @torch.compiler.assume_constant_result
    @wraps(function)
    def constant(*args: Any) -> Any:
        return cached(*args)

    return cast(F, constant)


# ---------------------------------------------------------------- making layouts of one dim
def merge(ranges: Sequence[tuple[int, int]]) -> DimLayout:
    """The same indices in the same order, empty ranges dropped and adjacent ones joined."""
    merged: list[tuple[int, int]] = []
    for start, stop in ranges:
        if start == stop:
            continue
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)


def split(size: int, ranks: int) -> Layout:
    """`size` indices in contiguous runs, as even as they go: the first `size % ranks` ranks hold one more."""
    base, more = divmod(size, ranks)
    bounds = [r * base + min(r, more) for r in range(ranks + 1)]
    return tuple(merge([(bounds[r], bounds[r + 1])]) for r in range(ranks))


def whole(size: int, ranks: int) -> Layout:
    """Every rank holds all of the dim."""
    return (((0, size),),) * ranks


def expand(layout: Layout, inner: int) -> Layout:
    """The layout of `axis * inner` (axis major) when `axis` has this layout: heads -> heads * head_dim."""
    return tuple(merge([(a * inner, b * inner) for a, b in ranges]) for ranges in layout)


def shrink(layout: Layout, inner: int, what: str) -> Layout:
    """The inverse of `expand`; LayoutError (naming `what`) when it cuts through a block of `inner`."""
    bounds = [bound for ranges in layout for pair in ranges for bound in pair]
    if any(bound % inner for bound in bounds):
        raise LayoutError(f"the layout cuts through {what}: blocks of {inner} must stay together.")
    return tuple(merge([(a // inner, b // inner) for a, b in ranges]) for ranges in layout)


def fuse(*parts: tuple[Layout, int]) -> Layout:
    """The layout of concatenated dims: `fuse((q, q_size), (k, k_size), (v, v_size))` is `[Q | K | V]`."""
    fused: list[list[tuple[int, int]]] = [[] for _ in parts[0][0]]
    offset = 0
    for layout, size in parts:
        for ranges, own in zip(fused, layout, strict=True):
            ranges.extend((a + offset, b + offset) for a, b in own)
        offset += size
    return tuple(merge(ranges) for ranges in fused)


# ---------------------------------------------------------------- asking about layouts of one dim
def local_size(ranges: DimLayout) -> int:
    """How many indices (slots) a rank with these ranges holds."""
    return sum(stop - start for start, stop in ranges)


def sizes(layout: Layout) -> list[int]:
    """`local_size` of every rank."""
    return [local_size(ranges) for ranges in layout]


@_of_layout
def multiplicity(layout: Layout, size: int) -> tuple[int, ...]:
    """How many slots, over all ranks, hold each of the `size` indices of the whole dim."""
    change = [0] * (size + 1)
    for ranges in layout:
        for start, stop in ranges:
            change[start] += 1
            change[stop] -= 1
    counts, held = [], 0
    for index in range(size):
        held += change[index]
        counts.append(held)
    return tuple(counts)


@_of_layout
def whole_size(layout: Layout) -> int:
    """The size of the whole dim: one past the last index that any rank holds."""
    return max((stop for ranges in layout for _, stop in ranges), default=0)


@_of_layout
def is_partition(layout: Layout) -> bool:
    """True when every index is held by exactly one slot."""
    return set(multiplicity(layout, whole_size(layout))) <= {1}


@_of_layout
def _missing(layout: Layout, size: int) -> tuple[int, ...]:
    """The indices that no slot holds."""
    return tuple(i for i, count in enumerate(multiplicity(layout, size)) if count == 0)


def check(layout: Layout, size: int, ranks: int, what: str) -> None:
    """Refuse what is no layout of `size` indices over `ranks`: LayoutError names `what` and the fault."""
    if len(layout) != ranks:
        raise LayoutError(f"{what}: the layout is for {len(layout)} ranks, there are {ranks}; plan again.")
    for rank, ranges in enumerate(layout):
        bad = [r for r in ranges if not 0 <= r[0] < r[1] <= size]
        if bad:
            raise LayoutError(f"{what}: range {bad[0]} of rank {rank} is not inside the dim of size {size}.")
        if not ranges:
            raise LayoutError(f"{what}: rank {rank} of {ranks} would hold none of the {size} indices; "
                              f"use at most {size} ranks or keep it replicated.")
    missing = _missing(layout, size)
    if missing:
        raise LayoutError(f"{what}: no rank holds index {missing[0]} of {size} ({len(missing)} are missing).")


@_of_layout
def pieces(layout: Layout) -> tuple[tuple[int, int, int, int], ...]:
    """Where to find the whole dim: runs `(rank, start in the rank, start in the whole dim, length)`.

    Only the first slot of each index is listed, in the order of the whole dim: the runs joined are the dim.
    """
    runs: list[tuple[int, int, int, int]] = []      # whole start, whole stop, rank, local start; may overlap
    for rank, ranges in enumerate(layout):
        local = 0
        for start, stop in ranges:
            runs.append((start, stop, rank, local))
            local += stop - start
    bounds = sorted({bound for start, stop, *_ in runs for bound in (start, stop)})
    found: list[tuple[int, int, int, int]] = []
    for low, high in zip(bounds, bounds[1:], strict=False):
        for start, stop, rank, local in runs:       # in rank order: the first slot wins
            if start <= low and high <= stop:
                at = local + low - start
                if found and found[-1][0] == rank and found[-1][1] + found[-1][3] == at \
                        and found[-1][2] + found[-1][3] == low:
                    found[-1] = (rank, found[-1][1], found[-1][2], found[-1][3] + high - low)
                else:
                    found.append((rank, at, low, high - low))
                break
    return tuple(found)


# ---------------------------------------------------------------- tensors, one dim
def take_dim(tensor: Tensor, dim: int, ranges: DimLayout) -> Tensor:
    """The part of `tensor` that `ranges` say: a view when there is one range, else a new tensor."""
    if len(ranges) == 1:
        return tensor.narrow(dim, ranges[0][0], ranges[0][1] - ranges[0][0])
    if not ranges:
        return tensor.narrow(dim, 0, 0)
    return torch.cat([tensor.narrow(dim, start, stop - start) for start, stop in ranges], dim)


def add_dim(full: Tensor, local: Tensor, dim: int, ranges: DimLayout) -> None:
    """Add each slot of `local` to its index in `full`, in place: the adjoint of `take_dim`."""
    at = 0
    for start, stop in ranges:
        full.narrow(dim, start, stop - start).add_(local.narrow(dim, at, stop - start))
        at += stop - start


# ---------------------------------------------------------------- a whole parameter
@dataclass(frozen=True)
class ParamLayout:
    """How a tensor of `shape` lies over the ranks: `dims[d][rank]` are the ranges of dim `d`."""
    shape: tuple[int, ...]
    dims: Mapping[int, Layout]

    def __post_init__(self) -> None:
        ranks = {len(layout) for layout in self.dims.values()}
        if len(ranks) > 1:
            raise LayoutError(f"the dims of a tensor are laid out over {sorted(ranks)} ranks: use one count")
        for dim, layout in self.dims.items():
            if not 0 <= dim < len(self.shape):
                raise LayoutError(f"dim {dim} is not a dim of shape {tuple(self.shape)}; count dims from 0")
            check(layout, self.shape[dim], len(layout), f"dim {dim} of shape {tuple(self.shape)}")
        if len(self.dims) > 1 and not bool((self.counts > 0).all()):
            raise LayoutError(f"the blocks of dims {sorted(self.dims)} do not cover {tuple(self.shape)}: two "
                              "dims over the same ranks give only the diagonal blocks; shard one of them.")

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of this rank's part."""
        return tuple(local_size(self.dims[d][rank]) if d in self.dims else n
                     for d, n in enumerate(self.shape))

    @cached_property
    def counts(self) -> Tensor:
        """How many slots, over all ranks, hold each element (int64); dims that are whole have size 1."""
        shape = [n if d in self.dims else 1 for d, n in enumerate(self.shape)]
        counts = torch.zeros(shape, dtype=torch.int64, device="cpu")  # also under another default device
        ranks = len(next(iter(self.dims.values()), ()))
        for rank in range(ranks):
            own = [(dim, layout[rank]) for dim, layout in self.dims.items()]
            ones = torch.ones([local_size(dict(own)[d]) if d in self.dims else 1 for d in range(len(shape))],
                              dtype=torch.int64, device="cpu")
            _put(counts, ones, own, add=True)
        return counts if ranks else counts + 1

    @cached_property
    def repeats(self) -> bool:
        """True when some element is held by more than one slot."""
        return bool((self.counts > 1).any())

    def weights(self, rank: int) -> Tensor:
        """1 / (slots that hold the element), shaped to broadcast over this rank's part (float64).

        The sum over all ranks of `weights * part` counts each distinct element once.
        """
        weights = 1.0 / self.counts.double()
        for dim, layout in self.dims.items():
            weights = take_dim(weights, dim, layout[rank])
        return weights


def take(tensor: Tensor, layout: ParamLayout, rank: int) -> Tensor:
    """This rank's part of a full tensor (a view where every dim has one range).

    Raises LayoutError when `tensor` does not have the layout's full shape.
    """
    if tuple(tensor.shape) != tuple(layout.shape):
        raise LayoutError(f"a full tensor of shape {tuple(layout.shape)} was expected, "
                          f"got {tuple(tensor.shape)}")
    for dim, ranges in layout.dims.items():
        tensor = take_dim(tensor, dim, ranges[rank])
    return tensor


def put(full: Tensor, local: Tensor, layout: ParamLayout, rank: int, add: bool = False) -> None:
    """Write this rank's part into `full`, in place; with `add`, add every slot (the adjoint of `take`)."""
    if tuple(local.shape) != layout.local_shape(rank):
        raise LayoutError(f"rank {rank} holds {layout.local_shape(rank)} of {tuple(layout.shape)}, "
                          f"got {tuple(local.shape)}")
    _put(full, local, [(dim, ranges[rank]) for dim, ranges in layout.dims.items()], add)


def _put(full: Tensor, local: Tensor, dims: list[tuple[int, DimLayout]], add: bool) -> None:
    if not dims:
        if add:
            full.add_(local)
        else:
            full.copy_(local)
        return
    (dim, ranges), rest = dims[0], dims[1:]
    at = 0
    for start, stop in ranges:
        _put(full.narrow(dim, start, stop - start), local.narrow(dim, at, stop - start), rest, add)
        at += stop - start
