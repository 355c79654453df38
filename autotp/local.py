"""What a rank holds of a dim: from the splits of leaf axes to ranges, sizes and offsets of whole dims."""

from __future__ import annotations

from collections.abc import Mapping

from .axes import Axis, factors, leaves, product, segments
from .choose import Split
from .layouts import DimLayout, merge

Splits = Mapping[Axis, Split]


def dim_layout(dim: Axis, rank: int, splits: Splits) -> DimLayout:
    """The ranges of `dim` (an axis tree) that `rank` holds, in the order it holds them, adjacent ones
    merged."""
    return merge(_ranges(dim.find(), rank, splits))


def _ranges(axis: Axis, rank: int, splits: Splits) -> list[tuple[int, int]]:
    if not any(leaf in splits for leaf in leaves(axis)):
        return [(0, axis.size)]
    if axis.kind == "leaf":
        return list(splits[axis].ranges[rank])
    if axis.kind == "concat":
        found, offset = [], 0
        for part in segments(axis):
            found += [(a + offset, b + offset) for a, b in _ranges(part.find(), rank, splits)]
            offset += part.size
        return found
    major, *rest = (f.find() for f in factors(axis))
    minor = product(rest)
    split = splits.get(major)
    if split is not None and split.slots and split.partner in leaves(minor):
        return [
            (head * minor.size + a, head * minor.size + b)
            for head, start, stop in split.slots[rank]
            for a, b in _ranges(
                minor, rank, {**splits, split.partner: Split((((start, stop),),) * (rank + 1))}
            )
        ]
    inner = _ranges(minor, rank, splits)
    if inner == [(0, minor.size)]:
        return [(a * minor.size, b * minor.size) for a, b in _ranges(major, rank, splits)]
    return [
        (i * minor.size + a, i * minor.size + b)
        for first, last in _ranges(major, rank, splits)
        for i in range(first, last)
        for a, b in inner
    ]


def local_size(dim: Axis, rank: int, splits: Splits) -> int:
    """How many of the dim's indices `rank` holds. Unlike the layout, it also counts a group split taken
    apart: key/value heads and their groups as two dims."""
    dim = dim.find()
    if not any(leaf in splits for leaf in leaves(dim)):
        return dim.size
    if dim.kind == "leaf":
        return splits[dim].size(rank)
    if dim.kind == "concat":
        return sum(local_size(s, rank, splits) for s in segments(dim))
    total = 1
    for f in factors(dim):
        total *= local_size(f, rank, splits)
    return total


def local_offset(dim: Axis, offset: int, rank: int, splits: Splits) -> int | None:
    """Where index `offset` of the whole dim falls in the local one, or None if it falls inside a split
    leaf."""
    dim = dim.find()
    if offset == dim.size:
        return local_size(dim, rank, splits)
    if offset == 0 or not any(leaf in splits for leaf in leaves(dim)):
        return offset
    if dim.kind == "concat":
        done = 0
        for part in segments(dim):
            if offset <= part.size:
                inside = local_offset(part, offset, rank, splits)
                return None if inside is None else done + inside
            offset -= part.size
            done += local_size(part, rank, splits)
    if dim.kind == "product":
        fs = factors(dim)
        minor = dim.size // fs[0].find().size
        if offset % minor == 0:
            inside = local_offset(fs[0], offset // minor, rank, splits)
            rest = 1
            for f in fs[1:]:
                rest *= local_size(f, rank, splits)
            return None if inside is None else inside * rest
    return None
