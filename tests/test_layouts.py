import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autotp.errors import LayoutError
from autotp.layouts import (
    ParamLayout,
    expand,
    fuse,
    is_partition,
    local_size,
    merge,
    multiplicity,
    pieces,
    put,
    split,
    take,
    take_dim,
    whole,
)


@st.composite
def layouts(draw, repeats=True):
    """A layout of one dim: its indices given to ranks and slots in any order, every index held."""
    ranks, size = draw(st.integers(1, 4)), draw(st.integers(4, 14))
    order = draw(st.permutations(range(size)))
    owners = [i % ranks if i < ranks else draw(st.integers(0, ranks - 1)) for i in range(size)]
    held = [[i for i, r in zip(order, owners, strict=True) if r == rank] for rank in range(ranks)]
    if repeats:
        for own in held:
            own.extend(draw(st.lists(st.integers(0, size - 1), max_size=3)))
    return tuple(merge([(i, i + 1) for i in own]) for own in held), size


def indices(ranges):
    return [i for start, stop in ranges for i in range(start, stop)]


@given(layouts(), st.integers(0, 2))
@settings(max_examples=60, deadline=None)
def test_take_then_put_over_all_ranks_gives_the_full_tensor(drawn, dim):
    layout, size = drawn
    shape = [3, 2, 4]
    shape[dim] = size
    full = torch.randn(shape)
    param = ParamLayout(tuple(shape), {dim: layout})
    back = torch.full(shape, torch.nan)
    for rank, ranges in enumerate(layout):
        part = take(full, param, rank)
        assert part.shape == param.local_shape(rank)
        assert torch.equal(part, full.index_select(dim, torch.tensor(indices(ranges))))
        put(back, part, param, rank)
    assert torch.equal(back, full)


@given(layouts())
@settings(max_examples=60, deadline=None)
def test_multiplicity_weights_and_pieces_agree_with_counting(drawn):
    layout, size = drawn
    held = [i for ranges in layout for i in indices(ranges)]
    assert multiplicity(layout, size) == tuple(held.count(i) for i in range(size))
    assert is_partition(layout) == (sorted(held) == list(range(size)))
    param = ParamLayout((size, 3), {0: layout})
    assert param.repeats == (len(held) > size)
    x = torch.randn(size, 3, dtype=torch.float64)
    once = sum(float((take(x, param, r) ** 2 * param.weights(r)).sum()) for r in range(len(layout)))
    assert abs(once - float((x ** 2).sum())) < 1e-9
    joined = [indices(layout[rank])[at:at + n] for rank, at, _, n in pieces(layout)]
    assert [i for run in joined for i in run] == list(range(size))
    added = torch.zeros_like(x)
    for rank in range(len(layout)):
        put(added, take(x, param, rank), param, rank, add=True)
    assert torch.allclose(added, x * torch.tensor(multiplicity(layout, size))[:, None])


def test_split_is_as_even_as_it_goes():
    assert split(9, 2) == (((0, 5),), ((5, 9),))
    assert [local_size(r) for r in split(257, 4)] == [65, 64, 64, 64]
    assert whole(5, 2) == (((0, 5),), ((0, 5),))


def test_fused_qkv_with_grouped_heads():
    # 4 query heads, 2 kv heads, head_dim 3: [Q | K | V]
    q, kv = expand(split(4, 2), 3), expand(split(2, 2), 3)
    fused = fuse((q, 12), (kv, 6), (kv, 6))
    assert fused == (((0, 6), (12, 15), (18, 21)), ((6, 12), (15, 18), (21, 24)))
    w = torch.arange(24)
    assert take_dim(w, 0, fused[1]).tolist() == [*range(6, 12), *range(15, 18), *range(21, 24)]


def test_merge_joins_adjacent_and_drops_empty():
    assert merge([(0, 2), (2, 3), (5, 5), (3, 4), (0, 1)]) == ((0, 4), (0, 1))


def test_bad_layouts_are_refused_with_what_is_wrong():
    with pytest.raises(LayoutError, match="no rank holds index 2"):
        ParamLayout((4,), {0: (((0, 2),), ((3, 4),))})
    with pytest.raises(LayoutError, match="rank 1 of 2 would hold none"):
        ParamLayout((1,), {0: split(1, 2)})
    with pytest.raises(LayoutError, match="not inside the dim of size 3"):
        ParamLayout((3,), {0: (((0, 4),),)})
    with pytest.raises(LayoutError, match="diagonal blocks"):
        ParamLayout((4, 4), {0: split(4, 2), 1: split(4, 2)})
    with pytest.raises(LayoutError, match=r"full tensor of shape \(4,\) was expected, got \(2,\)"):
        take(torch.zeros(2), ParamLayout((4,), {0: split(4, 2)}), 0)


def test_two_dims_of_which_one_is_repeated():
    param = ParamLayout((4, 2), {0: split(4, 2), 1: whole(2, 2)})
    assert param.local_shape(0) == (2, 2) and not param.repeats
