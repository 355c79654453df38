"""Which numbers in the model's code must become local, so that it runs on its shard.

`view(b, s, self.num_heads, self.head_dim)` is right on a rank only if `num_heads` is the rank's own. Every
int that an operation was given is one of: derived from a shape (local by itself), derived from attributes,
or a literal. The planner knows what each must be on each rank (`wanted`). `solve` looks for attribute values
under which every recorded expression gives what is wanted; what no attribute can give is overridden at its
call site.

An attribute is made local only if *all* its recorded uses agree, also those that want the whole value.
"""

from __future__ import annotations

import dis
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from .axes import Axis, factors, leaves, product
from .choose import Choice
from .graph import GraphIndex, describe, has_tensor, walk
from .ints import Attr, Dim, Expr, TrackedFloat, TrackedInt, atoms, evaluate, plain
from .local import local_offset, local_size
from .sites import Frame

Key = tuple[str, str]  # module path, attribute name


class LocalShapes:
    """The shapes of a graph's values on one rank."""

    def __init__(self, index: GraphIndex, choice: Choice, rank: int):
        self.index, self.choice, self.rank = index, choice, rank
        self._leaves: dict[fx.Node, set[Axis]] = defaultdict(set)
        for axis, flow in choice.flows.items():
            partner = choice.splits[
                axis
            ].partner  # a value with the groups' axis has the key/value heads' axis too
            for node in flow.sharded:
                self._leaves[node] |= {axis} if partner is None else {axis, partner}

    def splits(self, node: fx.Node) -> dict[Axis, Any]:
        return {a: self.choice.splits[a] for a in self._leaves.get(node, ())}

    def size(self, node: fx.Node, axis: Axis) -> int:
        return local_size(axis, self.rank, self.splits(node))

    def offset(self, node: fx.Node, axis: Axis, at: int) -> int | None:
        return local_offset(axis, at, self.rank, self.splits(node))

    def dim(self, dim: Dim) -> int:
        dims = self.index.axes.of.get(dim.node)
        return self.size(dim.node, dims[dim.index]) if dims else dim.node.meta["val"].shape[dim.index]

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        return tuple(self.size(node, d) for d in self.index.axes.of[node])


@dataclass(frozen=True)
class Want:
    """An int argument of an operation: what it is in the whole model and what it must be on this rank."""

    node: fx.Node
    path: tuple[int | str, ...]
    value: int
    wanted: int
    axes: frozenset[Axis]  # sharded leaves it depends on
    fixed: bool  # the wanted value is the same at any batch and length


@dataclass
class Solution:
    attrs: dict[Key, int] = field(default_factory=dict)
    patches: dict[tuple[fx.Node, tuple[int | str, ...]], int] = field(default_factory=dict)
    problems: list[tuple[str, frozenset[Axis]]] = field(default_factory=list)


def solve(index: GraphIndex, choice: Choice, rank: int) -> Solution:
    shapes = LocalShapes(index, choice, rank)
    solution = Solution()
    wants = list(wanted_ints(index, shapes))
    pinned = {
        (a.module, a.name) for a, frames in index.captured.escapes.items() if any(map(_passed_on, frames))
    }
    solution.problems += _lost_sizes(index, shapes)
    constraints: dict[Key, list[Want]] = defaultdict(list)
    for want in wants:
        for atom in _attrs(want):
            constraints[atom].append(want)
    for group in _groups(constraints):
        todo = {w for key in group for w in constraints[key]}
        if all(given_for(_value(w), {}, shapes) == w.wanted for w in todo):
            continue  # the whole values are right as they are
        solution.attrs.update(_best(index, group - pinned, list(todo), choice, shapes))
    for want in wants:
        if given_for(_value(want), solution.attrs, shapes) == want.wanted:
            continue
        if want.fixed:
            solution.patches[want.node, want.path] = want.wanted
        else:
            must = f"the size {want.value} must become {want.wanted}, but depends on the batch or length"
            why = f"{describe(want.node)}: {must}"
            solution.problems.append((why, want.axes))
    return solution


def unmet(index: GraphIndex, choice: Choice, rank: int) -> Iterator[tuple[Want, int | None]]:
    """The ints that the model's own code would get wrong on this rank, were no attribute made local, and what
    it would get."""
    shapes = LocalShapes(index, choice, rank)
    for want in wanted_ints(index, shapes):
        given = given_for(_value(want), {}, shapes)
        if given != want.wanted:
            yield want, given


def _lost_sizes(index: GraphIndex, shapes: LocalShapes) -> Iterator[tuple[str, frozenset[Axis]]]:
    """Sizes along a sharded dim whose bare value went where it can't be followed: `math.sqrt(x.shape[-1])`
    would be that of the part."""
    for dim, frames in index.captured.size_escapes.items():
        dims = index.axes.of.get(dim.node)
        passed = [frame for frame in frames if _passed_on(frame)]
        if not dims or not passed or not isinstance(dims[dim.index], Axis):
            continue
        if shapes.dim(dim) != dims[dim.index].size:
            axes = frozenset(set(leaves(dims[dim.index])) & set(shapes.splits(dim.node)))
            where = f"{passed[0].code.co_filename.rsplit('/', 1)[-1]}:{passed[0].lineno}"
            yield f"{describe(dim.node)}: the bare value of a size of it is used ({where})", axes


def _passed_on(frame: Frame) -> bool:
    """Was a bare value handed to other code there (`math.sqrt(n)`)? A comparison is none: both its sides
    become local."""
    names = (i.opname for i in dis.get_instructions(frame.code) if i.offset == frame.lasti)
    return next(names, "").startswith(("CALL", "PRECALL"))


def _expr(value: Any) -> Expr | None:
    return value.expr if isinstance(value, (TrackedInt, TrackedFloat)) else None


def _value(want: Want) -> Any:
    return argument(want.node, want.path)


def argument(node: fx.Node, path: tuple[int | str, ...]) -> Any:
    """The argument at `path`, as the model passed it."""
    tree: Any = {**dict(enumerate(node.meta["args"])), **node.meta["kwargs"]}
    for step in path:
        tree = getattr(tree, step) if isinstance(tree, slice) else tree[step]  # type: ignore[arg-type]
    return tree


def _attrs(want: Want) -> set[Key]:
    expr = _expr(_value(want))
    return {(a.module, a.name) for a in atoms(expr)} if expr is not None else set()


def given_for(value: Any, attrs: dict[Key, int], shapes: LocalShapes) -> Any:
    """What the code that gave `value` in the whole model computes on this rank, these attributes local."""
    expr = _expr(value)
    if expr is None:
        return value
    try:
        return evaluate(expr, _Attributes(attrs, shapes.index), shapes.dim)
    except ZeroDivisionError:
        return None


class _Attributes(dict):
    """Trial values over the model's own."""

    def __init__(self, trial: dict[Key, int], index: GraphIndex):
        super().__init__(trial)
        self.index = index

    def __missing__(self, key: Key) -> int:
        return self.index.attribute(*key)


def _groups(constraints: dict[Key, list[Want]]) -> Iterator[set[Key]]:
    """Attributes that meet in some expression, together."""
    seen: set[Key] = set()
    for start in constraints:
        if start in seen:
            continue
        group, todo = {start}, [start]
        while todo:
            for want in constraints[todo.pop()]:
                for key in _attrs(want) - group:
                    group.add(key)
                    todo.append(key)
        seen |= group
        yield group


def _best(index, keys: set[Key], wants: list[Want], choice: Choice, shapes: LocalShapes) -> dict[Key, int]:
    """The fewest attributes made local under which no want is worse off and as many as possible come
    right."""
    original = {k: index.attribute(*k) for k in keys}
    options: dict[Key, list[int]] = {}
    parts = _parts(choice, shapes.rank, {a for w in wants for a in w.axes})
    for key in sorted(keys):
        images = {original[key] * part // whole for part, whole in parts if original[key] * part % whole == 0}
        images |= {w.wanted for w in wants if isinstance(_expr(_value(w)), Attr) and key in _attrs(w)}
        options[key] = sorted(images - {original[key]})[:6]
    movable = [k for k in sorted(options) if options[k]]
    unmoved = [w for w in wants if given_for(_value(w), {}, shapes) == w.wanted]
    best: dict[Key, int] = {}
    best_score = len(unmoved)
    for count in range(1, min(len(movable), 4) + 1):
        for chosen in itertools.combinations(movable, count):
            for values in itertools.product(*(options[k] for k in chosen)):
                trial = dict(zip(chosen, values, strict=False))
                if any(given_for(_value(w), trial, shapes) != w.wanted for w in unmoved):
                    continue
                score = sum(given_for(_value(w), trial, shapes) == w.wanted for w in wants)
                if score > best_score:
                    best, best_score = trial, score
        if best_score == len(wants):
            break
    return best


def _parts(choice: Choice, rank: int, axes: set[Axis]) -> set[tuple[int, int]]:
    """By which ratios sizes shrink on this rank: (local, whole) of each axis, and of key/value heads times
    groups."""
    found = set()
    for axis in axes:
        split = choice.splits[axis]
        found.add((split.size(rank), axis.size))
        if split.partner is not None:
            found.add(
                (split.size(rank) * choice.splits[split.partner].size(rank), axis.size * split.partner.size)
            )
    return found


def wanted_ints(index: GraphIndex, shapes: LocalShapes) -> Iterator[Want]:
    """Every int given to an operation that is not plainly right: tracked ones, and literals along sharded
    dims."""
    inputs = [n for n in index.nodes if n.op == "placeholder"]
    dynamic = {leaf for n in inputs for leaf in index.carried.get(n, ())}
    for node in index.nodes:
        if node.op not in ("call_function", "call_method") or node not in index.axes.of:
            continue
        sized = dict(_sizes(index, node))
        tree = {**dict(enumerate(node.meta["args"])), **node.meta["kwargs"]}
        for path, value in walk(tree):
            if isinstance(value, bool) or not isinstance(value, (int, TrackedFloat)):
                continue
            if value == -1 and _expr(value) is None:
                continue
            if path in sized:
                owner, axis, at = sized[path]
                local = shapes.size(owner, axis) if at is None else shapes.offset(owner, axis, at)
                sharded = frozenset(set(leaves(axis)) & set(shapes.splits(owner)))
                if local is None:
                    local = -2  # no local value exists: reported by the caller
                if value < 0 and at is not None:
                    local -= shapes.size(owner, axis)
                fixed = not (set(leaves(axis)) & dynamic)
                if axis.size != value and at is None:
                    continue  # not the size of that axis
                if sharded or _expr(value) is not None:
                    yield Want(node, path, plain(value), local, sharded, fixed)
            elif _expr(value) is not None:
                yield Want(node, path, plain(value), plain(value), frozenset(), False)


def _sizes(
    index: GraphIndex, node: fx.Node
) -> Iterator[tuple[tuple[int | str, ...], tuple[fx.Node, Axis, int | None]]]:
    """Which int arguments state which sizes: argument path -> (value whose dim it is, the dim, offset in it
    or None)."""
    name = getattr(node.target, "__name__", str(node.target))
    args, kwargs = node.meta["args"], node.meta["kwargs"]
    out = index.axes.of[node]

    def listed(first: int, key: str) -> list[tuple[tuple[int | str, ...], Any]]:
        """Sizes given as a tuple or as several arguments."""
        if key in kwargs:
            return [((key, i), v) for i, v in enumerate(kwargs[key])]
        if len(args) > first and isinstance(args[first], (tuple, list)):
            return [((first, i), v) for i, v in enumerate(args[first])]
        return [((i,), v) for i, v in enumerate(args) if i >= first]

    if name in (
        "view",
        "reshape",
        "expand",
        "new_zeros",
        "new_ones",
        "new_empty",
        "new_full",
        "broadcast_to",
    ):
        sizes = listed(1, "shape" if name == "reshape" else "size")
    elif name in ("zeros", "ones", "empty", "full", "rand", "randn"):
        sizes = listed(0, "size")
    else:
        sizes = []
    for (path, _), axis in zip(sizes, out, strict=False):
        yield path, (node, axis, None)
    if name == "unflatten":
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0) % node_ndim(args[0])
        for i, (path, _) in enumerate(listed(2, "sizes")):
            yield path, (node, out[dim + i], None)
    elif name in ("split", "split_with_sizes"):
        dim = kwargs.get("dim", args[2] if len(args) > 2 else 0)
        key: Any = 1 if len(args) > 1 else "split_size_or_sections" if name == "split" else "split_sizes"
        given = args[1] if key == 1 else kwargs[key]
        if isinstance(given, (list, tuple)):
            for i, part in enumerate(out):
                yield (key, i), (node, part[dim], None)
        elif out:
            yield (key,), (node, out[0][dim], None)
    elif name == "repeat_interleave":
        dim = kwargs.get("dim", args[2] if len(args) > 2 else None)
        if dim is not None:
            yield ("output_size",), (node, out[dim], None)
            times = factors(out[dim])[-1] if out[dim].kind == "product" else out[dim]
            yield ((1,) if len(args) > 1 else ("repeats",)), (node, times, None)
    elif name in ("conv1d", "conv2d", "conv3d"):
        groups = kwargs.get("groups", args[6] if len(args) > 6 else 1)
        if groups > 1 and out[1].size == groups:  # depthwise: as many groups as channels
            yield ((6,) if len(args) > 6 else ("groups",)), (node, out[1], None)
    elif name == "group_norm":
        whole = index.axes.of[args[0]][1]
        major = _major(whole, kwargs.get("num_groups", args[1] if len(args) > 1 else 0))
        if major is not None:
            yield ((1,) if len(args) > 1 else ("num_groups",)), (args[0], major, None)
    elif name == "narrow":
        source, dim = args[0], kwargs.get("dim", args[1] if len(args) > 1 else None)
        whole = index.axes.of[source][dim]
        start = kwargs.get("start", args[2] if len(args) > 2 else 0)
        if isinstance(start, int):
            yield ((2,) if len(args) > 2 else ("start",)), (source, whole, int(start))
        yield ((3,) if len(args) > 3 else ("length",)), (node, out[dim], None)
    elif name in ("__getitem__", "getitem") and isinstance(args[0], fx.Node) and has_tensor(args[0]):
        yield from _slice_offsets(index, args[0], args[1])


def _major(dim: Axis, size: int) -> Axis | None:
    """The leading factors of `dim` that make up `size`."""
    parts: list[Axis] = []
    for factor in factors(dim):
        parts.append(factor.find())
        if math.prod(p.size for p in parts) >= size:
            break
    return product(parts) if math.prod(p.size for p in parts) == size else None


def node_ndim(node: fx.Node) -> int:
    return node.meta["val"].ndim


def _slice_offsets(
    index: GraphIndex, source: fx.Node, given: Any
) -> Iterator[tuple[tuple[int | str, ...], tuple[fx.Node, Axis, int]]]:
    dims = index.axes.of.get(source)
    if not dims or not isinstance(dims[0], Axis):
        return
    items = list(given) if isinstance(given, tuple) else [given]
    taken = sum(1 for i in items if i is not None and i is not Ellipsis)
    dim = 0
    for position, item in enumerate(items):
        path: tuple[int | str, ...] = (1, position) if isinstance(given, tuple) else (1,)
        if item is None:
            continue
        if item is Ellipsis:
            dim += len(dims) - taken
            continue
        if isinstance(item, slice) and dim < len(dims) and item.step in (None, 1):
            for key, end in (("start", item.start), ("stop", item.stop)):
                if isinstance(end, int):
                    at = int(end) + dims[dim].size if end < 0 else min(int(end), dims[dim].size)
                    if at >= 0:
                        yield (*path, key), (source, dims[dim], at)
        dim += 1


__all__ = ["LocalShapes", "Solution", "Want", "solve", "unmet", "wanted_ints"]
