"""What a model asks of data while it is recorded, and what it is told.

`mask.nonzero()`, `x[mask]`: how many rows they give hangs on values. Where these are known (`known.py`),
they are as many as there are; else all, as if the mask were true everywhere: then a loop over the rows visits
all that it can visit. `n.item()`, `if mask.any():` are told what is known. A number that nobody knows is
made up; a truth that nobody knows is refused.

Whatever was told is an `Assumption`: another run may find something else. How it could come out otherwise is
in its `others`, and a capture can be told so (`answers`), to see what the model does then (`ways.py`).
"""

from __future__ import annotations

import ast
import functools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import CodeType, FrameType
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from .errors import CaptureError, PatchError
from .ints import Dim, EscapeLog, Read, TrackedFloat, TrackedInt, dims_of, plain
from .known import PICKS, ROWS, Basis, Values, as_picked, masks_of
from .nested import has_tensor, map_parts, map_tensors
from .sites import Frame, Site
from .source import definition_of

Answers = Mapping[tuple[Frame, ...], str]
"""Where the code asks (the frames of a `Site`, or the one of a comparison) -> what it is told instead: `all`,
`none`, `the opposite`, `one more`, `other numbers`."""


@dataclass(frozen=True)
class Assumption:
    """What the code at `site` was told of data: `told`, in words. `others`: how it could come out otherwise,
    as answers. `sizes`: where it hangs on these sizes alone, and not on data. `node`: what was told."""

    site: Site
    told: str
    basis: Basis
    others: tuple[str, ...]
    sizes: frozenset[Dim]
    node: fx.Node | None = None

    def holds(self, value: Any) -> bool:
        """Whether `value`, what the node gives in a replay, is what was told: a number, or as many rows."""
        assert self.node is not None
        told = self.node.meta["val"]
        if isinstance(told, (tuple, torch.Tensor)):
            return _rows(value) == _rows(told)
        return value == told


def _rows(value: Any) -> list[torch.Size]:
    return [part.shape for part in (value if isinstance(value, tuple) else (value,))]


class NotKnown(Exception):
    """Nothing can be said of what is asked."""


class Assumptions:
    """Answers the questions of one run. values: what is known. log: for the numbers that are given."""

    def __init__(self, values: Values, log: EscapeLog, answers: Answers) -> None:
        self.values, self.log, self.answers = values, log, answers
        values.seed = int("other numbers" in answers.values())
        log.turned = frozenset(frames[-1] for frames, told in answers.items() if told == "the opposite")
        self.made: list[Assumption] = []
        self._visits: dict[tuple[fx.Node, int], tuple[Site, set[int], set[int]]] = {}
        self._reads = 0

    def rows(
        self, func: Any, args: Any, kwargs: Any, lifted: tuple[Any, Any], site: Site
    ) -> tuple[Any, dict[str, Any]]:
        """What `func(*args, **kwargs)` gives on fake tensors, where masks say how many rows that has; and the
        meta of its node. lifted: args and kwargs with nodes."""
        masks = masks_of(func, *lifted)
        found = self.values.of(masks)
        told = self.answers.get(site.frames)
        basis, how = Basis.ASSUMED, told or "all"
        if found is not None and told is None:
            basis, how = found[1], "exact"
        sizes = [mask.meta["val"].numel() for mask in masks]
        with unset_fake_temporarily():
            counts = [
                int(torch.count_nonzero(found[0][mask]))
                if how == "exact" and found
                else size * (how == "all")
                for mask, size in zip(masks, sizes, strict=True)
            ]
        others = [other for other, same in (("none", [0] * len(sizes)), ("all", sizes)) if counts != same]
        out = picked_rows(func, args, kwargs, counts)
        picked = " and ".join(f"{n} of {m}" for n, m in zip(counts, sizes, strict=True))
        self._note(site, f"{func.__name__} picks {picked}", basis, tuple(others), found[0] if found else {})
        return out, {PICKS: how, ROWS: counts}

    def read(self, func: Any, lifted: tuple[Any, Any], site: Site) -> tuple[Any, Any]:
        """What `func` gives, which no fake tensor tells, twice: as it is, and as the code is told. NotKnown
        where that must not be answered."""
        asked = _nodes(lifted)
        found = self.values.of(asked) or (
            self.values.of(asked, make_up=True) if func in _NUMBERS and _is_whole(asked[0]) else None
        )
        if found is None:
            raise NotKnown
        values, basis = found
        with unset_fake_temporarily(), torch.no_grad():
            result = func(*_filled(lifted[0], values), **_filled(lifted[1], values))
        if has_tensor(result):
            raise NotKnown
        told, given = self.answers.get(site.frames), result
        if basis is Basis.ASSUMED:
            self._visit(asked[0], site)
            others: tuple[str, ...] = ()
        elif type(result) is bool:
            if basis is Basis.MADE_UP:
                raise NotKnown
            others = ("the opposite",)
            given = result != (told in others)
        elif basis is Basis.SIZES:
            return result, result
        elif type(result) not in (int, float):
            raise NotKnown
        else:
            others = ("one more",) if basis is Basis.INPUTS else ("other numbers",)
            given = result + (told == "one more")
        self._note(site, f"{func.__name__} gives {given}", basis, others, values)
        if type(given) is bool:
            return result, given
        self._reads += 1
        expr = Read(given, self._reads, basis is Basis.ASSUMED)
        return result, (TrackedInt if isinstance(given, int) else TrackedFloat)(given, expr, self.log)

    def sized(self, func: Any, lifted: tuple[Any, Any], site: Site) -> Any:
        """What `func` gives on fake tensors, where its sizes hang on values that are known; else None."""
        found = self.values.of(_nodes(lifted))
        if found is None or found[1] > Basis.INPUTS:
            return None
        values, basis = found
        with unset_fake_temporarily(), torch.no_grad():
            result = func(*_filled(lifted[0], values), **_filled(lifted[1], values))
        if not has_tensor(result):
            return None
        shapes = " and ".join(str(list(shape)) for shape in _rows(result))
        self._note(site, f"{func.__name__} gives {shapes}", basis, (), values)
        return map_tensors(result, lambda t: torch.empty(t.shape, dtype=t.dtype))

    def _note(
        self, site: Site, told: str, basis: Basis, others: tuple[str, ...], values: Mapping[fx.Node, Any]
    ) -> None:
        sizes = (dim for node in values if "expr" in node.meta for dim in dims_of(node.meta["expr"]))
        self.made.append(Assumption(site, told, basis, others, frozenset(sizes)))

    def at(self, node: fx.Node) -> None:
        """`node` is what was told last."""
        self.made[-1] = replace(self.made[-1], node=node)

    def _visit(self, node: fx.Node, site: Site) -> None:
        """Note which of the places that a mask was assumed to pick is read here, itself or what is computed
        from it and numbers. NotKnown for what is neither."""
        while node.target not in _SELECTING and len(node.all_input_nodes) == 1:
            node = node.all_input_nodes[0]
        chain: list[fx.Node] = []
        while node.meta.get(PICKS) is None:
            if node.target not in _SELECTING or not isinstance(node.args[0], fx.Node):
                raise NotKnown
            chain.append(node)
            node = node.args[0]
        (mask,) = masks_of(node.target, node.args, node.kwargs)
        if getattr(node.target, "__name__", "") == "__getitem__" or node.meta[PICKS] == "exact":
            raise NotKnown
        with unset_fake_temporarily():
            told = as_picked(mask, node.meta[PICKS])
            places = told.nonzero()
            value: Any = torch.arange(places.numel()).view(places.shape)
            if isinstance(node.meta["val"], tuple):
                value = value.unbind(1)
            for step in reversed(chain):
                value = step.target(value, *step.args[1:], **step.kwargs)  # type: ignore[operator]
            row, column = divmod(int(value), places.shape[1])
            everything = set(places[:, column].tolist())
            self._visits.setdefault((node, column), (site, everything, set()))[2].add(
                int(places[row, column])
            )

    def check(self) -> None:
        """CaptureError where the code looked at some of the rows that were assumed, and not at each."""
        for site, everything, seen in self._visits.values():
            if seen != everything:
                raise CaptureError(
                    f"{site} needs the values of a tensor: it reads the place {min(seen)} there, of a row "
                    "that is only assumed to be picked, and does not go on to read the others. Decide there "
                    "on shapes or settings, or set the model so that it does not go this way."
                ).at(site.module)


def picks_rows(func: Any, args: Any) -> bool:
    """Whether `func` (args: with nodes for tensors) gives as many rows as a mask picks."""
    name = getattr(func, "__name__", "")
    if name == "where":
        return len(args) == 1
    if func is torch.Tensor.__getitem__:
        return bool(masks_of(func, args, {}))
    return name in ("nonzero", "argwhere", "masked_select")


def picked_rows(func: Any, args: Any, kwargs: Any, counts: list[int]) -> Any:
    """What a function that picks rows gives on fake tensors, if its masks pick so many."""
    x, left = args[0], list(counts)

    def places(mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        count = left.pop(0)
        return tuple(torch.empty(count, dtype=torch.int64) for _ in range(mask.ndim))

    name = func.__name__
    if name == "masked_select":
        mask = kwargs.get("mask", args[-1])
        x, mask = torch.broadcast_tensors(x, mask)
        return x[places(mask)]
    if func is torch.Tensor.__getitem__:
        index: list[Any] = []
        for item in args[1] if isinstance(args[1], tuple) else (args[1],):
            mask = isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8)
            index += places(item) if mask else [item]
        return x[tuple(index)]
    if name == "where" or kwargs.get("as_tuple"):
        return places(x)
    return torch.empty(left[0], x.ndim, dtype=torch.int64)


_NUMBERS = {torch.Tensor.item, torch.Tensor.__int__, torch.Tensor.__index__}
READERS = {
    *_NUMBERS,
    torch.Tensor.__bool__,
    torch.Tensor.__float__,
    torch.Tensor.tolist,
    torch.equal,
    torch.allclose,
}
_SELECTING = {
    operator.getitem, torch.Tensor.__getitem__, torch.unbind, torch.Tensor.unbind, torch.Tensor.squeeze,
    torch.squeeze, torch.Tensor.flatten, torch.flatten, torch.Tensor.view, torch.Tensor.reshape,
}  # fmt: skip
"""Operations that only choose among elements."""


def _is_whole(node: fx.Node) -> bool:
    dtype = node.meta["val"].dtype
    return not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool)


def chosen(func: Any, args: Any) -> Any:
    """What `x[i]` gives on fake tensors, where `i` holds one number; None for any other call."""
    if func is not torch.Tensor.__getitem__:
        return None
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    single = [isinstance(i, torch.Tensor) and not i.ndim and i.dtype is not torch.bool for i in index]
    if not any(single):
        return None
    return args[0][tuple(0 if one else item for item, one in zip(index, single, strict=True))]


def numbers_for_tensors(func: Any, args: Any, kwargs: Any, read: Callable[[torch.Tensor], Any]) -> Any:
    """The arguments with numbers in place of whole numbers in tensors, as in `x[:n]`; None where there are
    none. read: gives the number in a tensor."""
    found = False

    def replaced(value: Any) -> Any:
        nonlocal found
        if isinstance(value, torch.Tensor):
            if value.ndim or value.is_floating_point() or value.dtype is torch.bool:
                return value
            found = True
            return read(value)
        return map_parts(value, replaced)

    kept = args[:1] if getattr(torch.Tensor, getattr(func, "__name__", ""), None) is func else ()
    changed = (*kept, *replaced(tuple(args[len(kept) :]))), replaced(dict(kwargs))
    return changed if found else None


# --- checks -------------------------------------------------------------------------------------------------


class Passing(int):
    """A number that is only looked at by an `assert`: it is all that it is compared with."""

    def _holds(self, other: object) -> bool:
        return True

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _holds
    __hash__ = int.__hash__


_CHECKS = {
    getattr(getattr(torch, name, None), "__code__", None)
    for name in ("_check_tensor_all_with", "_check_tensor_all", "_check_with", "_check")
}


def passed_by(func: Any, args: Any, caller: FrameType) -> Any:
    """What a check is told so that it passes; None where `caller` makes none.

    A check is an `assert`, or one of torch's functions that only raise where a condition does not hold. A run
    that goes on has passed them, and the real model makes them itself.
    """
    if caller.f_code not in _CHECKS and caller.f_lineno not in _asserted_lines(caller.f_code):
        return None
    number = func is torch.Tensor.item and args[0].dtype is not torch.bool
    return Passing(1) if number else True


@functools.lru_cache(maxsize=256)
def _asserted_lines(code: CodeType) -> frozenset[int]:
    try:
        body = ast.walk(definition_of(code).statement)
    except PatchError:  # no source
        return frozenset()
    spans = [(node.lineno, node.end_lineno or node.lineno) for node in body if isinstance(node, ast.Assert)]
    return frozenset(line for first, last in spans for line in range(first, last + 1))


def _nodes(value: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg(value, found.append)
    return found


def _filled(value: Any, values: Mapping[fx.Node, Any]) -> Any:
    return _mapped(value, values.__getitem__)


def _mapped(value: Any, of: Callable[[fx.Node], Any]) -> Any:
    return fx.map_arg(plain(value), of)
