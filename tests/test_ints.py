"""Ints that remember where they came from: they are ints in every respect, and their expression gives their
value."""

import copy
import functools
import json
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autotp.ints import (
    Attr,
    Bin,
    Const,
    Dim,
    EscapeLog,
    TrackedFloat,
    TrackedInt,
    atoms,
    ceildiv,
    dims_of,
    evaluate,
    expr_of,
    plain,
)

HEADS, SIZE = Attr("layers.0", "num_heads"), Attr("layers.0", "config.head_dim")
VALUES = {("layers.0", "num_heads"): 12, ("layers.0", "config.head_dim"): 64}


def heads(log: EscapeLog | None = None) -> TrackedInt:
    return TrackedInt(12, HEADS, log)


def test_arithmetic_builds_expressions() -> None:
    hidden = heads() * TrackedInt(64, SIZE)
    assert isinstance(hidden, TrackedInt) and plain(hidden) == 768
    assert hidden.expr == Bin("mul", HEADS, SIZE)
    assert (3 * heads()).expr == Bin("mul", Const(3), HEADS)
    assert (hidden // 4).expr == Bin("floordiv", hidden.expr, Const(4))
    assert evaluate((-(heads() - 20)).expr, VALUES) == 8


def test_local_values_follow_from_local_attributes() -> None:
    hidden = 3 * heads() * TrackedInt(64, SIZE) // 2 + 1
    local = {**VALUES, ("layers.0", "num_heads"): 6}
    assert evaluate(hidden.expr, local) == 3 * 6 * 64 // 2 + 1
    assert atoms(hidden.expr) == {HEADS, SIZE} and dims_of(hidden.expr) == set()


def test_sizes_of_tensors_are_asked_for() -> None:
    rows = TrackedInt(5, Dim("x", 0)) + heads()
    assert dims_of(rows.expr) == {Dim("x", 0)}
    assert evaluate(rows.expr, VALUES, lambda dim: 100 + dim.index) == 112
    with pytest.raises(ValueError, match="dims"):
        evaluate(rows.expr, VALUES)


def test_division_gives_a_float_that_rounds_back_to_a_tracked_int() -> None:
    quotient = heads() / 5
    assert isinstance(quotient, TrackedFloat) and plain(quotient) == 2.4
    assert math.ceil(quotient).expr == Bin("ceildiv", HEADS, Const(5)) and plain(math.ceil(quotient)) == 3
    assert math.floor(quotient).expr == Bin("floordiv", HEADS, Const(5)) and plain(math.floor(quotient)) == 2
    scale = heads() ** -0.5
    assert isinstance(scale, TrackedFloat) and evaluate(scale.expr, VALUES) == 12**-0.5


ops = st.sampled_from(["add", "sub", "mul", "floordiv", "mod", "truediv"])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(ops, st.integers(1, 9), st.booleans()), max_size=5), st.integers(2, 50))
def test_expression_always_evaluates_to_the_value(steps: list[tuple[str, int, bool]], start: int) -> None:
    import operator

    tracked, bare = TrackedInt(start, HEADS), start
    for name, number, reflected in steps:
        op = getattr(operator, name)
        if reflected and bare == 0:
            continue
        tracked, bare = (
            (op(number, tracked), op(number, bare)) if reflected else (op(tracked, number), op(bare, number))
        )
    assert plain(tracked) == bare and type(plain(tracked)) is type(bare)
    assert evaluate(expr_of(tracked), {("layers.0", "num_heads"): start}) == bare


def test_it_is_an_int_to_everyone() -> None:
    n = heads()
    assert {n: "a"}[12] == "a" and {12: "a"}[n] == "a" and hash(n) == hash(12)
    assert f"{n} {n:03d} {n!r} {n}" == "12 012 12 12" and json.dumps({"n": n}) == '{"n": 12}'
    assert list(range(n))[-1] == 11 and [0] * n == [0] * 12 and "x" * n == "x" * 12
    assert isinstance(n, int) and int(n) == 12 and type(int(n)) is int and type(float(n)) is float
    assert max(n, 3) is n and divmod(n, 5) == (2, 2) and pow(n, 2, 5) == 4 and n & 4 == 4 and ~n == -13
    assert n == 12 and n != 13 and n < 13 and n >= 12 and bool(n) and n in [12] and round(n) == 12


def test_it_is_an_int_to_torch() -> None:
    n = heads()
    assert torch.zeros(n, 2).view(3, n // 3, -1).shape == (3, 4, 2)
    assert torch.equal(n * torch.ones(2), torch.full((2,), 12.0)) and torch.equal(
        torch.ones(2) * n, n * torch.ones(2)
    )
    size = torch.Size([n, 3])[:-1] + (7,)
    assert size[0].expr == HEADS and size == (12, 7)


def test_copies_keep_the_expression_and_pickles_drop_it() -> None:
    n, f = heads(), heads() / 5
    assert (
        copy.deepcopy([n])[0].expr == HEADS and copy.copy(n).expr == HEADS and copy.deepcopy(f).expr == f.expr
    )
    assert type(pickle.loads(pickle.dumps(n))) is int and type(pickle.loads(pickle.dumps(f))) is float


def test_reads_of_the_bare_value_are_logged_once_per_place() -> None:
    log = EscapeLog()
    product = heads(log) * TrackedInt(64, SIZE)
    for _ in range(2):
        math.sqrt(product)
        here = math.sqrt.__name__, product > 5
    assert here[1]
    lines = {frame.lineno for frame in log.frames[HEADS]}
    first = test_reads_of_the_bare_value_are_logged_once_per_place.__code__.co_firstlineno
    assert lines == {first + 4, first + 5} and len(log.frames[HEADS]) == 2 and len(log.frames[SIZE]) == 2
    assert all(frame.code.co_name.startswith("test_reads") for frame in log.frames[HEADS])


@pytest.mark.parametrize(
    "read", [float, int, bool, lambda n: n == 3, lambda n: 3 < n, lambda n: 5 > n, abs, round]
)
def test_every_kind_of_read_is_logged(read) -> None:
    log = EscapeLog()
    read(heads(log))
    assert HEADS in log.frames


@pytest.mark.parametrize(
    "use", [hash, str, lambda n: n * 2, lambda n: {n: 1}, lambda n: list(torch.Size([n]))]
)
def test_uses_that_keep_the_expression_are_not_logged(use) -> None:
    log = EscapeLog()
    use(heads(log))
    assert not log.frames


@given(st.integers(-(10**20), 10**20), st.integers(1, 10**10))
def test_ceildiv_is_exact(a: int, b: int) -> None:
    assert (ceildiv(a, b) - 1) * b < a <= ceildiv(a, b) * b


@functools.lru_cache(maxsize=8)
def twice(sizes: tuple[int, ...], by: int = 2) -> int:
    return sizes[0] * by


class Doubling:
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Doubling)

    def __hash__(self) -> int:
        return 0

    @functools.lru_cache(maxsize=8)  # noqa: B019
    def of(self, size: int) -> int:
        return 2 * size


def through_caches(number: int) -> list[int]:
    """pytest rewrites the code of functions with asserts; this is code as users have it."""
    thrice, doubling = functools.partial(twice, by=3), Doubling()
    return [twice((number,)), thrice((number,)), doubling.of(number)]


def test_cached_functions_do_not_mix_up_where_numbers_come_from() -> None:
    """Equal numbers of two layers would share a cache entry, and the second layer get the first one's
    expression."""
    for layer in ("0", "1"):
        for number in through_caches(TrackedInt(4, Attr(layer, "heads"))):
            assert atoms(expr_of(number)) == {Attr(layer, "heads")}
    assert [type(number) for number in through_caches(4)] == [
        int,
        int,
        int,
    ]  # nothing tracked stays in the cache


def test_dictionaries_find_tracked_numbers() -> None:
    table = {4: "four", 8: "eight"}
    four = TrackedInt(4, HEADS)
    assert table[four] == table.get(four) == "four" and four in table and {four: 1}[4] == 1
