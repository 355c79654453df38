"""What a rank holds of a dim: splits of leaf axes against index arithmetic."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from autotp.axes import concat, leaf, product
from autotp.choose import Split, group_slots
from autotp.layouts import split as evenly
from autotp.local import dim_layout, local_offset, local_size


def indices(ranges) -> torch.Tensor:
    return torch.cat([torch.arange(a, b) for a, b in ranges]) if ranges else torch.zeros(0, dtype=torch.long)


@given(st.integers(2, 6), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(2, 3))
def test_layout_of_products_and_joins_is_that_of_their_leaves(heads, width, other, before, ranks):
    if heads < ranks:
        heads = ranks
    axis = leaf(heads)
    splits = {axis: Split(evenly(heads, ranks))}
    dim = concat([product([leaf(before), axis, leaf(width)]), leaf(other), product([axis, leaf(width)])])
    table = torch.arange(dim.size)
    first, rest = table[: before * heads * width], table[before * heads * width :]
    for rank in range(ranks):
        own = indices(splits[axis].ranges[rank])
        want = torch.cat(
            [
                first.view(before, heads, width)[:, own].reshape(-1),
                rest[:other],
                rest[other:].view(heads, width)[own].reshape(-1),
            ]
        )
        got = indices(dim_layout(dim, rank, splits))
        assert torch.equal(got, want)
        assert local_size(dim, rank, splits) == len(want)
        assert local_offset(dim, before * heads * width, rank, splits) == before * len(own) * width


@given(st.integers(1, 4), st.integers(1, 5), st.integers(2, 6))
def test_group_slots_share_all_query_heads_in_equal_groups(kv, per_kv, ranks):
    if not kv < ranks <= kv * per_kv:
        return
    heads = []
    for slots in group_slots(kv, per_kv, ranks):
        assert len({stop - start for _, start, stop in slots}) == 1
        heads += [head * per_kv + i for head, start, stop in slots for i in range(start, stop)]
    assert heads == list(range(kv * per_kv))


@given(st.integers(2, 3), st.integers(2, 4), st.integers(1, 3), st.integers(3, 6), st.booleans())
def test_a_group_split_gives_each_local_query_head_its_own_key_head(kv, per_kv, width, ranks, fused):
    if not kv < ranks <= kv * per_kv:
        return
    major, minor = leaf(kv), leaf(per_kv)
    slots = group_slots(kv, per_kv, ranks)
    splits = {
        major: Split(tuple(tuple((h, h + 1) for h, _, _ in s) for s in slots), minor, slots),
        minor: Split(tuple(((0, s[0][2] - s[0][1]),) for s in slots), major),
    }
    inner = concat([minor, leaf(1), leaf(1)]) if fused else minor
    queries = product([major, inner, leaf(width)])
    keys = product([major, leaf(width)])
    for rank in range(ranks):
        held = indices(dim_layout(queries, rank, splits)) // width
        assert local_size(queries, rank, splits) == len(held)
        if fused:  # kv * (queries | k | v): every group has its key and value behind it
            per = per_kv + 2
            group = slots[rank][0][2] - slots[rank][0][1] + 2
            for s, (head, start, stop) in enumerate(slots[rank]):
                rows = held[s * group * width : (s + 1) * group * width : width]
                assert rows.tolist() == [head * per + i for i in (*range(start, stop), per_kv, per_kv + 1)]
        else:
            group = slots[rank][0][2] - slots[rank][0][1]
            key_heads = indices(dim_layout(keys, rank, splits))[::width] // width if width else None
            assert key_heads is not None
            assert torch.equal((held[::width] // per_kv), key_heads.repeat_interleave(group))
