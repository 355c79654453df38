"""A fused weight's layout as a user states it, and whether the axes found by dataflow agree.

    [q*h, k*kv, v*kv]    h query vectors, then kv key vectors, then kv value vectors      (phi3; gpt2 with kv
    = h) kv*(q*r, k, v)       for each key/value head: r query vectors, a key and a value      (falcon,
    gpt_neox with r = 1) [gate, up]           two pieces end to end

Brackets and parentheses both join pieces end to end; `a*b` is an a of b, major to minor. `q`, `k` and `v` are
the vector of one head and always innermost, wherever they are written in a product: `q*h` and `h*q` say the
same. All other names are free: a name stands for one or more axes, the same ones each time it is written. An
int is an axis of that size.

The dataflow's axes are the truth; what is checked is whether names can be bound to them so that the shape of
the expression fits. Queries and keys are contracted with each other, so `q` and `k` have one width axis: a
layout under which `q` and `v` share it and `k` does not has keys and values the wrong way round.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .axes import Axis, concat, factors, product, segments
from .errors import PolicyError

VECTORS = ("q", "k", "v")
Bound = Mapping[str, tuple[Any, ...]]  # name -> the structure of the axes it stands for


@dataclass(frozen=True)
class Name:
    text: str


@dataclass(frozen=True)
class Product:
    parts: tuple[Name | Concat, ...]  # major to minor


@dataclass(frozen=True)
class Concat:
    parts: tuple[Name | Product | Concat, ...]


Expression = Name | Product | Concat


@dataclass(frozen=True)
class Layout:
    """A stated layout: its text, where it was written, and what it says."""

    text: str
    where: str
    tree: Expression


def parse_layout(text: Any, where: str) -> Layout:
    """Parse a layout expression. Raises PolicyError at the place where it can't be read on."""
    if isinstance(text, list) and all(isinstance(part, str) for part in text):
        text = f"[{', '.join(text)}]"  # without quotes, YAML reads brackets as a list
    if not isinstance(text, str):
        raise PolicyError(f'{where}: a layout is text like "[gate, up]" (in quotes, for YAML), not {text!r}.')
    tokens = re.findall(r"\w+|\S", text)
    position = 0

    def peek() -> str:
        return tokens[position] if position < len(tokens) else "the end"

    def take(expected: str | None = None) -> str:
        nonlocal position
        token = peek()
        if position == len(tokens) or (expected is not None and token != expected):
            raise PolicyError(
                f"{where}: layout {text!r}: {expected or 'a name'} expected, {token!r} found. "
                'Layouts look like "[q*h, k*kv, v*kv]", "kv*(q*r, k, v)" or "[gate, up]".'
            )
        position += 1
        return token

    def atom() -> Name | Concat:
        opening = peek()
        if opening not in "[(":
            if not re.fullmatch(r"\w+", opening):
                take("a name")
            return Name(take())
        take()
        parts = [term()]
        while peek() == ",":
            take()
            parts.append(term())
        take("]" if opening == "[" else ")")
        return Concat(tuple(parts))

    def term() -> Expression:
        parts = [atom()]
        while peek() == "*":
            take()
            parts.append(atom())
        inner = [p for p in parts if isinstance(p, Name) and p.text in VECTORS]
        ordered = [p for p in parts if p not in inner] + inner
        return ordered[0] if len(ordered) == 1 else Product(tuple(ordered))

    tree = term()
    if position < len(tokens):
        raise PolicyError(
            f"{where}: layout {text!r}: {peek()!r} is left over after {''.join(tokens[:position])!r}."
        )
    return Layout(text, where, tree)


def agrees(layout: Layout, axis: Axis, heads: Collection[Axis] = ()) -> bool:
    """Can the names of `layout` be bound to the axes of `axis` so that both say the same?

    heads: leaves that count heads, so that no vector has them.
    """
    return any(_sensible(bound, heads) for bound in _fit(layout.tree, axis, {}))


def _sensible(bound: Bound, heads: Collection[Axis]) -> bool:
    vectors = [bound[name] for name in VECTORS if name in bound]
    if not vectors:
        return all(bound.values())
    if any(axis in heads for axes in vectors for axis in _leaves_in(axes)):
        return False
    q, k, v = (bound.get(name) for name in VECTORS)
    return not (q is not None and k is not None and q == v and q != k)


def _fit(tree: Expression, axis: Axis, bound: Bound) -> Iterator[Bound]:
    """Every way to bind the names of `tree` to parts of `axis`, extending `bound`."""
    axis = axis.find()
    if isinstance(tree, Name):
        yield from _bind(tree, tuple(factors(axis)), bound)
    elif isinstance(tree, Product):
        yield from _runs(list(tree.parts), factors(axis), bound, _fit_factors)
    elif len(tree.parts) == 1:
        yield from _fit(tree.parts[0], axis, bound)
    else:
        pieces = segments(axis)
        if len(pieces) > 1:
            yield from _runs(list(tree.parts), pieces, bound, _fit_segments)


def _runs(parts: list[Any], pieces: list[Axis], bound: Bound, fit: Any) -> Iterator[Bound]:
    """Share `pieces`, in order, among `parts`. A part takes at least one; in a product, of one vector, it may
    take none."""
    if not parts:
        if not pieces:
            yield bound
        return
    head, rest = parts[0], parts[1:]
    for count in range(0 if fit is _fit_factors else 1, len(pieces) + 1):
        for extended in fit(head, pieces[:count], bound):
            yield from _runs(rest, pieces[count:], extended, fit)


def _fit_factors(part: Name | Concat, run: list[Axis], bound: Bound) -> Iterator[Bound]:
    if isinstance(part, Name):
        yield from _bind(part, tuple(run), bound)
    elif run:
        yield from _fit(part, product(run), bound)


def _fit_segments(part: Expression, run: list[Axis], bound: Bound) -> Iterator[Bound]:
    if isinstance(part, Name) and len(run) > 1:
        yield from _bind(part, (concat(run),), bound)
    elif len(run) == 1:
        yield from _fit(part, run[0], bound)


def _bind(name: Name, axes: tuple[Axis, ...], bound: Bound) -> Iterator[Bound]:
    # A count of heads that is one leaves no axis behind (axes of size 1 are dropped from products).
    if name.text.isdigit():
        if math.prod(axis.size for axis in axes) == int(name.text):
            yield bound
    elif name.text in bound:
        if bound[name.text] == tuple(map(_structure, axes)):
            yield bound
    elif axes or name.text not in VECTORS:
        yield {**bound, name.text: tuple(map(_structure, axes))}


def _leaves_in(structure: Any) -> Iterator[Axis]:
    if isinstance(structure, Axis):
        yield structure
    elif isinstance(structure, tuple):
        for part in structure:
            yield from _leaves_in(part)


def _structure(axis: Axis) -> Any:
    """What an axis is made of, comparable: two concatenations of the same pieces are one thing."""
    axis = axis.find()
    return axis if axis.kind == "leaf" else (axis.kind, tuple(map(_structure, axis.parts)))


__all__ = ["Layout", "agrees", "parse_layout"]
