"""Axis trees: what a dim of a tensor is made of.

An axis is a *leaf* (nothing splits it), a *product* of axes (major to minor: what `view` merges and splits)
or a *concatenation* of axes (what `cat` joins and `split`, `chunk` and slices cut). Axes are union-find
nodes: `unify` makes two axes one, and a leaf may later be refined into a product or a concatenation, in
place, for everyone who holds it.

    view(b, s, heads, 64) of [b, s, 768]      768  becomes  product(12, 64)
    split(768, dim=-1)    of [b, s, 2304]     2304 becomes  concat(768, 768, 768)

Two sizes of 12 are never taken for the same axis because they are equal: every leaf starts alone, and only
the meaning of an operation unifies. This is the factor view of OpenXLA Shardy's sharding rules and of GSPMD
(arXiv 2105.04663), extended by concatenation, which fused projections need.

Sizes are positive or zero ints. Axes of size 1 are dropped from products and never unified: a dim of size 1
broadcasts and says nothing. Axes of size 0 are dropped from concatenations. So a part is always smaller than
the whole, and no axis can come to contain itself.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from .errors import AutotpError

Kind = Literal["leaf", "product", "concat"]
Ranges = tuple[tuple[int, int], ...]


class AxisConflict(AutotpError):
    """Two axes were said to be the same and have no common refinement. Nothing was changed."""


class Axis:
    """One axis. Compare identities on `find()`; `kind` and `parts` look through it."""

    __slots__ = ("_kind", "_parent", "_parts", "_rank", "size")

    def __init__(self, size: int, kind: Kind = "leaf", parts: Sequence["Axis"] = ()):
        self.size = size
        self._kind: Kind = kind
        self._parts = list(parts)
        self._parent: Axis | None = None
        self._rank = 0

    def find(self) -> "Axis":
        """The representative of this axis' class."""
        # No path compression: `_Trail` could not undo it. Union by rank keeps the paths short.
        axis = self
        while axis._parent is not None:
            axis = axis._parent
        return axis

    @property
    def kind(self) -> Kind:
        return self.find()._kind

    @property
    def parts(self) -> list["Axis"]:
        """The representatives of a product's factors (major to minor) or a concatenation's segments; [] for a
        leaf."""
        return [part.find() for part in self.find()._parts]

    def __repr__(self) -> str:
        return f"<{show(self)}>"


def leaf(size: int) -> Axis:
    """A new axis, equal to no other."""
    return Axis(int(size))


def product(parts: Iterable[Axis]) -> Axis:
    """The axis that a view merging `parts` (major to minor) makes."""
    kept = [part.find() for part in parts if part.size != 1]
    if not kept:
        return leaf(1)
    return kept[0] if len(kept) == 1 else Axis(math.prod(part.size for part in kept), "product", kept)


def concat(parts: Iterable[Axis]) -> Axis:
    """The axis that joining `parts` end to end makes."""
    kept = [part.find() for part in parts if part.size != 0]
    if not kept:
        return leaf(0)
    return kept[0] if len(kept) == 1 else Axis(sum(part.size for part in kept), "concat", kept)


def factors(axis: Axis) -> list[Axis]:
    """`axis` as a flat product, major to minor: leaves and concatenations, none of size 1."""
    axis = axis.find()
    if axis._kind == "product":
        return [factor for part in axis._parts for factor in factors(part)]
    return [] if axis.size == 1 else [axis]


def segments(axis: Axis) -> list[Axis]:
    """`axis` as a flat concatenation, in order: leaves and products.

    A product whose major factor is a concatenation is cut as well: (a|c)*b gives a*b and c*b."""
    axis = axis.find()
    if axis._kind == "concat":
        return [segment for part in axis._parts for segment in segments(part)]
    if axis._kind == "product":
        major, *minor = factors(axis)
        if major._kind == "concat":
            return [product([segment, *minor]) for segment in segments(major)]
    return [axis]


def leaves(axis: Axis) -> list[Axis]:
    """The representatives of the leaves below `axis`, each once, in order; none of size 1 or 0."""
    axis = axis.find()
    if axis._kind == "leaf":
        return [axis] if axis.size > 1 else []
    return list(dict.fromkeys(below for part in axis._parts for below in leaves(part)))


def occurrences(axis: Axis) -> Counter[Axis]:
    """How often each leaf indexes one element of `axis`: 1, or more where a product has the same leaf as two
    factors."""
    axis = axis.find()
    if axis._kind == "leaf":
        return Counter([axis] if axis.size > 1 else [])
    total: Counter[Axis] = Counter()
    for part in axis._parts:
        total = total + occurrences(part) if axis._kind == "product" else total | occurrences(part)
    return total


def covering(axis: Axis) -> set[Axis]:
    """The leaves that every element of `axis` has an index along: of a concatenation, those of all its
    segments."""
    axis = axis.find()
    if axis._kind == "leaf":
        return {axis} if axis.size > 1 else set()
    below = [covering(part) for part in axis._parts]
    return set.union(*below) if axis._kind == "product" else set.intersection(*below)


def same(a: Axis, b: Axis) -> bool:
    """Whether two axes are known to be one."""
    return a.find() is b.find()


def unify(a: Axis, b: Axis) -> Axis:
    """Make `a` and `b` the same axis and return it, refining both as far as that needs.

    Raises `AxisConflict`, with nothing changed, where no common refinement exists."""
    with _Trail() as trail:
        _unify(a, b, trail)
    return a.find()


def cut(axis: Axis, sizes: Sequence[int]) -> list[Axis]:
    """Cut `axis` into consecutive segments of `sizes`; an axis per size.

    A product is cut along its major factor. Raises `AxisConflict`, with nothing changed, where the cut runs
    through a step of it."""
    if sum(sizes) != axis.size:
        raise AxisConflict(f"an axis of size {axis.size} was cut into {list(sizes)}")
    with _Trail() as trail:
        return _cut(axis, [int(size) for size in sizes], trail)


def split(axis: Axis, minor: int) -> tuple[Axis, Axis]:
    """`axis` as (major, minor) factors, the minor one of size `minor`. Raises `AxisConflict` where it does
    not divide so."""
    if minor <= 0 or axis.size % minor:
        raise AxisConflict(f"an axis of size {axis.size} does not divide into steps of {minor}")
    major, low = reshape([axis], [axis.size // minor, minor])
    return major, low


def reshape(dims: Sequence[Axis], shape: Sequence[int]) -> list[Axis]:
    """The axes of a tensor with `dims` after `view(shape)` (row-major; `shape` without -1).

    Raises `AxisConflict`, with nothing changed, where a new dim would begin in the middle of an old
    factor."""
    shape = [int(size) for size in shape]
    if math.prod(shape) != math.prod(dim.size for dim in dims):
        raise AxisConflict(
            f"a view of {[dim.size for dim in dims]} as {shape} has another number of elements"
        )
    if 0 in shape:
        return [leaf(size) for size in shape]
    with _Trail() as trail:
        rest = [factor for dim in dims for factor in factors(dim)]  # major to minor: taken from the end
        result = []
        for size in reversed(shape):
            taken: list[Axis] = []
            while size > 1:
                factor = _pop_minor(rest)
                if size % factor.size == 0:
                    taken.append(factor)
                    size //= factor.size
                else:
                    rest.extend(_split(factor, size, trail))
            result.append(product(reversed(taken)))
        return result[::-1]


def layout(axis: Axis, held: Mapping[Axis, Ranges]) -> Ranges:
    """The index ranges of `axis`, in order, that someone holds who holds only `held[leaf]` of some leaves (by
    representative).

    Adjacent ranges are joined. A leaf that is not in `held` is held whole."""
    axis = axis.find()
    if axis._kind == "leaf":
        return held.get(axis, ((0, axis.size),)) if axis.size else ()
    if not any(below in held for below in leaves(axis)):
        return ((0, axis.size),)
    joined: list[tuple[int, int]] = []

    def add(start: int, stop: int) -> None:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))

    if axis._kind == "concat":
        offset = 0
        for part in axis._parts:
            for start, stop in layout(part, held):
                add(offset + start, offset + stop)
            offset += part.size
        return tuple(joined)
    major, *rest = axis.parts
    minor = product(rest)
    inner = layout(minor, held)
    for first, last in layout(major, held):
        if inner == ((0, minor.size),):
            add(first * minor.size, last * minor.size)
            continue
        for index in range(first, last):
            for start, stop in inner:
                add(index * minor.size + start, index * minor.size + stop)
    return tuple(joined)


def show(axis: Axis, names: dict[Axis, str] | None = None) -> str:
    """`axis` in words: `4a*2b*16c` for a product, `64a|64b` for a concatenation, the size alone for a size of
    1 or 0.

    `names` (representative leaf → name) is extended by a letter for each leaf it lacks: pass the same dict
    again and the letters keep their meaning."""
    names = {} if names is None else names
    axis = axis.find()
    if axis.size <= 1:
        return str(axis.size)
    if axis._kind == "leaf":
        if axis not in names:
            count = len(names)
            names[axis] = chr(ord("a") + count % 26) + (str(count // 26) if count >= 26 else "")
        return f"{axis.size}{names[axis]}"
    if axis._kind == "product":
        shown = [show(f, names) if f._kind == "leaf" else f"({show(f, names)})" for f in factors(axis)]
        return "*".join(shown)
    return "|".join(show(segment, names) for segment in axis.parts)


class _Trail(list[tuple[Axis, str, Any]]):
    """Writes to axes that are undone when the block raises `AxisConflict`."""

    def write(self, axis: Axis, attribute: str, value: Any) -> None:
        self.append((axis, attribute, getattr(axis, attribute)))
        setattr(axis, attribute, value)

    def refine(self, axis: Axis, kind: Kind, parts: Sequence[Axis]) -> None:
        self.write(axis, "_kind", kind)
        self.write(axis, "_parts", list(parts))

    def __enter__(self) -> "_Trail":
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None:
            for axis, attribute, old in reversed(self):
                setattr(axis, attribute, old)


def _unify(a: Axis, b: Axis, trail: _Trail) -> None:
    a, b = a.find(), b.find()
    if a is b:
        return
    if a.size != b.size:
        raise AxisConflict(f"sizes {a.size} and {b.size} cannot be one axis")
    if a.size <= 1:
        return
    if a._kind == "leaf" or b._kind == "leaf":
        structured = b if a._kind == "leaf" else a
    elif a._kind == b._kind == "product":
        _align(factors(a), factors(b), _pop_minor, _push_split, trail)
        structured = a
    elif a._kind == b._kind == "concat":
        _align(segments(a)[::-1], segments(b)[::-1], list.pop, _push_cut, trail)
        structured = a
    else:
        # A product that equals a concatenation is cut along its major factor, and stays a product: (x|y)*m
        # says both.
        structured, other = (a, b) if a._kind == "product" else (b, a)
        pieces = segments(other)
        for piece, segment in zip(_cut(structured, [s.size for s in pieces], trail), pieces, strict=True):
            _unify(piece, segment, trail)
    _link(a, b, structured, trail)


def _link(a: Axis, b: Axis, structured: Axis, trail: _Trail) -> None:
    """Join two classes by rank; the joint one has the structure of `structured`."""
    root, child = (a, b) if a._rank >= b._rank else (b, a)
    kind, parts = structured._kind, structured._parts
    if root is not structured:
        trail.refine(root, kind, parts)
    if root._rank == child._rank:
        trail.write(root, "_rank", root._rank + 1)
    trail.write(child, "_parent", root)


def _align(
    xs: list[Axis],
    ys: list[Axis],
    pop: Callable[[list[Axis]], Axis],
    push: Callable[[list[Axis], Axis, int, _Trail], None],
    trail: _Trail,
) -> None:
    """Walk two lists of the same total from their ends, splitting the bigger of the two last, and unify pair
    by pair."""
    while xs and ys:
        x, y = pop(xs), pop(ys)
        if x.size == y.size:
            _unify(x, y, trail)
        elif x.size > y.size:
            push(xs, x, y.size, trail)
            ys.append(y)
        else:
            push(ys, y, x.size, trail)
            xs.append(x)


def _push_split(rest: list[Axis], axis: Axis, minor: int, trail: _Trail) -> None:
    rest.extend(_split(axis, minor, trail))


def _push_cut(rest: list[Axis], axis: Axis, first: int, trail: _Trail) -> None:
    rest.extend(reversed(_cut(axis, [first, axis.size - first], trail)))


def _pop_minor(rest: list[Axis]) -> Axis:
    """Take the most minor factor; one that was refined into a product since it was listed is unfolded."""
    axis = rest.pop().find()
    if axis._kind != "product":
        return axis
    rest.extend(factors(axis))
    return rest.pop()


def _split(axis: Axis, minor: int, trail: _Trail) -> list[Axis]:
    """A leaf or concatenation as [major, minor] factors."""
    if axis.size % minor:
        raise AxisConflict(f"an axis of size {axis.size} does not divide into steps of {minor}")
    parts = [leaf(axis.size // minor), leaf(minor)]
    if axis._kind == "leaf":
        trail.refine(axis, "product", parts)
    else:
        _unify(axis, product(parts), trail)
    return parts


def _cut(axis: Axis, sizes: list[int], trail: _Trail) -> list[Axis]:
    axis = axis.find()
    if axis.size in sizes:  # the other sizes are 0
        return [axis if size else leaf(0) for size in sizes]
    if axis._kind == "leaf":
        pieces = [leaf(size) for size in sizes]
        trail.refine(axis, "concat", [piece for piece in pieces if piece.size])
        return pieces
    if axis._kind == "product":
        major, *rest = factors(axis)
        step = math.prod(factor.size for factor in rest)
        if all(size % step == 0 for size in sizes):
            pieces = _cut(major, [size // step for size in sizes], trail)
            return [product([piece, *rest]) if piece.size else piece for piece in pieces]
        if major._kind != "concat":
            raise AxisConflict(f"{show(axis)} cannot be cut into {sizes}: not whole steps of {step}")
    todo = segments(axis)[::-1]
    result = []
    for size in sizes:
        taken: list[Axis] = []
        while size:
            segment = todo.pop().find()
            if segment.size > size:
                todo.extend(reversed(_cut(segment, [size, segment.size - size], trail)))
            else:
                taken.append(segment)
                size -= segment.size
        result.append(concat(taken))
    return result
