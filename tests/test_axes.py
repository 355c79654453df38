"""Axis trees against the truth: the index every leaf has at every element."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autotp.axes import (
    Axis,
    AxisConflict,
    concat,
    cut,
    factors,
    layout,
    leaf,
    leaves,
    occurrences,
    product,
    reshape,
    same,
    segments,
    show,
    split,
    unify,
)


def digits(axis: Axis) -> list[tuple]:
    """What each element of `axis` is: the (leaf, index) pairs on the path to it."""
    axis = axis.find()
    if axis.kind == "leaf":
        return [((axis, i),) if axis.size > 1 else () for i in range(axis.size)]
    if axis.kind == "concat":
        return [d for part in axis.parts for d in digits(part)]
    result: list[tuple] = [()]
    for part in axis.parts:
        result = [d + e for d in result for e in digits(part)]
    return result


def elements(dims) -> list[tuple]:
    result: list[tuple] = [()]
    for dim in dims:
        result = [d + e for d in result for e in digits(dim)]
    return result


@st.composite
def trees(draw, depth=2, pool=None):
    pool = [] if pool is None else pool
    if depth == 0 or draw(st.booleans()):
        if pool and draw(st.booleans()):
            return draw(st.sampled_from(pool))
        axis = leaf(draw(st.sampled_from([1, 2, 3, 4])))
        pool.append(axis)
        return axis
    parts = [draw(trees(depth=depth - 1, pool=pool)) for _ in range(draw(st.integers(1, 3)))]
    tree = (product if draw(st.booleans()) else concat)(parts)
    return tree if tree.size <= 48 else parts[0]


def freeze(*axes):
    return [(a.size, a.kind, show(a)) for a in axes]


@given(trees(), trees())
@settings(max_examples=120, deadline=None)
def test_unify_makes_the_same_elements_or_changes_nothing(a, b):
    before = freeze(a, b), digits(a), digits(b)
    try:
        one = unify(a, b)
    except AxisConflict:
        assert (freeze(a, b), digits(a), digits(b)) == before
        return
    assert a.size <= 1 or (same(a, b) and one is a.find())
    assert a.size == b.size == len(digits(a))
    shown = show(a)
    unify(a, b)
    unify(b, a)
    assert show(a) == shown, "unify is not idempotent"


@given(trees(), trees(), trees())
@settings(max_examples=120, deadline=None)
def test_unify_keeps_every_other_tree_consistent(a, b, c):
    """A tree that shares leaves keeps its size, and elements that were one stay one."""
    both = product([a, c])
    equal = [[x == y for y in digits(both)] for x in digits(both)]
    try:
        unify(a, b)
    except AxisConflict:
        return
    assert both.size == a.size * c.size == len(digits(both))
    after = digits(both)
    for i, row in enumerate(equal):
        for j, was in enumerate(row):
            assert not was or after[i] == after[j]


@given(st.lists(trees(), min_size=1, max_size=3), st.data())
@settings(max_examples=120, deadline=None)
def test_reshape_is_torchs(dims, data):
    total = math.prod(d.size for d in dims)
    divisors = [d for d in range(1, total + 1) if total % d == 0]
    first = data.draw(st.sampled_from(divisors))
    rest = total // first
    second = data.draw(st.sampled_from([d for d in divisors if rest % d == 0]))
    shape = [first, second, rest // second]
    before = freeze(*dims)
    try:
        out = reshape(dims, shape)
    except AxisConflict:
        assert freeze(*dims) == before
        return
    assert [o.size for o in out] == shape
    assert elements(out) == elements(dims)
    assert elements(reshape(out, [d.size for d in dims])) == elements(dims)


@given(trees(), st.data())
@settings(max_examples=120, deadline=None)
def test_cut_gives_the_consecutive_elements(axis, data):
    first = data.draw(st.integers(0, axis.size))
    second = data.draw(st.integers(0, axis.size - first))
    sizes = [first, second, axis.size - first - second]
    before = freeze(axis)
    try:
        pieces = cut(axis, sizes)
    except AxisConflict:
        assert freeze(axis) == before
        return
    assert [p.size for p in pieces] == sizes
    assert [d for p in pieces for d in digits(p)] == digits(axis)
    assert [d for s in segments(axis) for d in digits(s)] == digits(axis)
    assert elements(factors(axis)) == digits(axis)


@given(trees(), st.data())
@settings(max_examples=100, deadline=None)
def test_layout_holds_exactly_the_elements_whose_leaves_are_held(axis, data):
    held = {}
    for below in leaves(axis):
        if data.draw(st.booleans()):
            start = data.draw(st.integers(0, below.size))
            held[below] = ((start, data.draw(st.integers(start, below.size))),)
    ranges = layout(axis, held)
    got = [i for start, stop in ranges for i in range(start, stop)]
    want = [
        i
        for i, d in enumerate(digits(axis))
        if all(held[a][0][0] <= j < held[a][0][1] for a, j in d if a in held)
    ]
    assert got == want


def test_layout_keeps_the_order_of_a_leaf_held_out_of_order():
    heads, dim = leaf(4), leaf(2)
    assert layout(product([heads, dim]), {heads: ((2, 3), (0, 1))}) == ((4, 6), (0, 2))


def test_view_splits_heads_and_merges_them_back():
    hidden = leaf(12)
    batch, heads, dim = reshape([leaf(2), hidden], [2, 3, 4])
    assert hidden.kind == "product" and same(hidden.parts[0], heads) and same(hidden.parts[1], dim)
    assert reshape([heads, dim], [12])[0].parts == [heads.find(), dim.find()]


def test_view_refines_for_everyone():
    hidden = leaf(12)
    merged = product([hidden, leaf(5)])
    reshape([hidden], [3, 4])
    assert [f.size for f in factors(merged)] == [3, 4, 5]


def test_grouped_heads_meet_query_heads():
    query, kv, rep = leaf(8), leaf(2), leaf(4)
    unify(query, product([kv, rep]))
    assert factors(query) == [kv.find(), rep.find()]


def test_fused_projection_is_cut_then_split_into_heads():
    fused = leaf(36)
    q, k, v = cut(fused, [12, 12, 12])
    heads, dim = split(q, 4)
    for other in (k, v):
        major, minor = split(other, 4)
        unify(major, heads)
        unify(minor, dim)
    assert show(fused) == "3a*4b|3a*4b|3a*4b"


def test_concatenated_products_with_one_minor_are_a_product():
    a, b, c = leaf(4), leaf(16), leaf(2)
    fused = leaf(96)
    major, minor = split(fused, 16)  # viewed as [heads + 2, 16]
    unify(fused, concat([product([a, b]), product([c, b])]))
    assert same(minor, b)
    assert major.kind == "concat" and [same(x, y) for x, y in zip(major.parts, [a, c], strict=True)] == [
        True,
        True,
    ]
    assert digits(fused) == digits(concat([product([a, b]), product([c, b])]))


def test_a_concatenation_viewed_as_steps_ties_its_parts():
    a, b = leaf(16), leaf(16)
    major, minor = split(concat([a, b]), 16)
    assert same(a, b) and same(minor, a) and major.size == 2


def test_conflict_leaves_no_half_unified_trees():
    a, b, c, d = leaf(4), leaf(6), leaf(3), leaf(8)
    first, second = product([a, b]), product([d, c])
    unify(first, second)  # 4*6 = 8*3 as 4*2*3
    assert show(first) == "4a*2b*3c"
    x, y = concat([leaf(5), leaf(19)]), product([leaf(6), leaf(4)])
    before = show(x), show(y)
    with pytest.raises(AxisConflict, match="cannot be cut"):
        unify(x, y)
    assert (show(x), show(y)) == before
    three, four = leaf(3), leaf(4)
    with pytest.raises(AxisConflict):  # the 4 fits, then 6 = 2*3 meets 3*2
        unify(product([product([leaf(2), three]), four]), product([leaf(3), leaf(2), leaf(4)]))
    assert four.kind == "leaf" and three.kind == "leaf"


def test_sizes_one_never_unify_and_zero_is_dropped():
    one, other = leaf(1), leaf(1)
    unify(one, other)
    assert not same(one, other)
    heads = leaf(4)
    assert same(product([one, heads, other]), heads) and same(concat([leaf(0), heads]), heads)
    with pytest.raises(AxisConflict):
        unify(leaf(2), leaf(3))


def test_equal_sizes_are_not_the_same_axis():
    a, b = leaf(4), leaf(4)
    assert not same(a, b) and len(leaves(product([a, b]))) == 2


def test_an_axis_at_two_places_is_counted():
    a, b = leaf(4), leaf(4)
    square = product([a, b])
    unify(square, product([b, a]))
    assert occurrences(square)[a.find()] == 2
    assert occurrences(concat([a, b]))[a.find()] == 1


def test_many_links_stay_shallow():
    axes = [leaf(8) for _ in range(5000)]
    for x, y in zip(axes, axes[1:], strict=False):
        unify(x, y)
    depth, node = 0, axes[-1]
    while node._parent is not None:
        node, depth = node._parent, depth + 1
    assert depth <= 13 and same(axes[0], axes[-1])


def test_show_keeps_names():
    names: dict[Axis, str] = {}
    kv, rep = leaf(2), leaf(3)
    names[kv.find()] = "kv"
    assert show(product([kv, rep]), names) == "2kv*3b" and show(rep, names) == "3b"
    assert show(product([kv, concat([rep, rep])]), names) == "2kv*(3b|3b)"


def test_elements_agree_with_torch_strides():
    """The digits used above are row-major, as torch's are."""
    x = torch.arange(24).reshape(2, 3, 4)
    a, b, c = leaf(2), leaf(3), leaf(4)
    for code, d in zip(x.flatten().tolist(), digits(product([a, b, c])), strict=True):
        assert code == d[0][1] * 12 + d[1][1] * 4 + d[2][1]
