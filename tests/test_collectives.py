"""Each arrow inside a computation whose single-process version is known, forward and backward."""
import pytest
import torch
from distributed import run
from hypothesis import given, settings
from hypothesis import strategies as st
from test_layouts import layouts
from torch.utils.checkpoint import checkpoint

from autotp import collectives as c
from autotp.comm import ProcessComm, simulate
from autotp.layouts import ParamLayout, put, split, take_dim


def leaf(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def copy_of(x):
    return x.detach().clone().requires_grad_()


def sum_of_slots(layout, size, dim, parts):
    shape = list(parts[0].shape)
    shape[dim] = size
    full = torch.zeros(shape, dtype=parts[0].dtype)
    for rank, part in enumerate(parts):
        put(full, part, ParamLayout(tuple(shape), {dim: layout}), rank, add=True)
    return full


@given(layouts(repeats=False), st.booleans())
@settings(max_examples=25, deadline=None)
def test_column_then_row_is_the_mlp(drawn, use_checkpoint):
    layout, hidden = drawn
    x, w1, w2, b = leaf(3, 5), leaf(hidden, 5), leaf(4, hidden), leaf(4)
    want = torch.tanh(x @ w1.t()) @ w2.t() + b
    (want ** 2).sum().backward()

    def fn(comm):
        own = layout[comm.rank]
        x_, b_ = copy_of(x), copy_of(b)
        w1_, w2_ = copy_of(take_dim(w1, 0, own)), copy_of(take_dim(w2, 1, own))

        def mlp(x):
            return c.reduce(torch.tanh(c.enter(x, comm) @ w1_.t()) @ w2_.t(), comm) + b_

        got = checkpoint(mlp, x_, use_reentrant=False) if use_checkpoint else mlp(x_)
        (got ** 2).sum().backward()
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(x_.grad, x.grad)
        torch.testing.assert_close(b_.grad, b.grad)
        torch.testing.assert_close(w1_.grad, take_dim(w1.grad, 0, own))
        torch.testing.assert_close(w2_.grad, take_dim(w2.grad, 1, own))
        return got.detach()

    got = simulate(len(layout), fn)
    assert all(torch.equal(g, got[0]) for g in got)


@given(layouts(repeats=True))
@settings(max_examples=25, deadline=None)
def test_slice_and_gather_of_repeated_slots(drawn):
    """y = f(x) elementwise on each slot: a slot's gradient counts where gather takes it; slice sums."""
    layout, size = drawn
    x, scale = leaf(2, size, 3), torch.randn(2, size, 3, dtype=torch.float64)
    want = torch.sin(x)
    (want * scale).sum().backward()

    def fn(comm):
        x_ = copy_of(x)
        part = c.slice_(x_, 1, layout, comm)
        got = c.gather(torch.sin(part), 1, layout, comm)
        (got * scale).sum().backward()
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(x_.grad, x.grad)

    simulate(len(layout), fn)


@given(layouts(repeats=True))
@settings(max_examples=15, deadline=None)
def test_every_repeated_slot_used_is_counted(drawn):
    """Each slot is used on its own rank (a sharded region): x's gradient is the sum over all slots."""
    layout, size = drawn
    x = leaf(size, 2)
    ranks = len(layout)
    weights = [torch.randn(take_dim(x, 0, own).shape, dtype=torch.float64) for own in layout]
    want = sum((take_dim(x, 0, own) * w).sum() for own, w in zip(layout, weights, strict=True))
    want.backward()

    def fn(comm):
        x_ = copy_of(x)
        got = c.reduce((c.slice_(x_, 0, layout, comm) * weights[comm.rank]).sum(), comm)
        got.backward()
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(x_.grad, x.grad)

    simulate(ranks, fn)


@given(st.integers(2, 4), st.integers(4, 9))
@settings(max_examples=20, deadline=None)
def test_sequence_parallel_arrows_and_reduce_enter(ranks, size):
    """gather_enter before a column, reduce_scatter after a row, reduce_enter between sharded regions."""
    seq, hid = split(size, ranks), split(size + 1, ranks)
    x, w1, w2, v = leaf(size, 3), leaf(size + 1, 3), leaf(3, size + 1), leaf(size + 1)
    h = torch.tanh(x @ w1.t())
    norm = (h ** 2).sum(-1, keepdim=True)
    want = (h * v / norm) @ w2.t()
    (want ** 3).sum().backward()

    def fn(comm):
        own = hid[comm.rank]
        x_ = copy_of(take_dim(x, 0, seq[comm.rank]))
        w1_, w2_, v_ = (copy_of(take_dim(w, d, own)) for w, d in ((w1, 0), (w2, 1), (v, 0)))
        h = torch.tanh(c.gather_enter(x_, 0, seq, comm) @ w1_.t())
        norm = c.reduce_enter((h ** 2).sum(-1, keepdim=True), comm)
        got = c.reduce_scatter((h * v_ / norm) @ w2_.t(), 0, seq, comm)
        (got ** 3).sum().backward()
        torch.testing.assert_close(got, take_dim(want, 0, seq[comm.rank]))
        for ours, theirs in ((x_, take_dim(x.grad, 0, seq[comm.rank])), (w1_, take_dim(w1.grad, 0, own)),
                             (w2_, take_dim(w2.grad, 1, own)), (v_, take_dim(v.grad, 0, own))):
            torch.testing.assert_close(ours.grad, theirs)

    simulate(ranks, fn)


@given(st.integers(2, 4), st.integers(4, 9))
@settings(max_examples=15, deadline=None)
def test_once_adds_a_bias_to_a_partial_result(ranks, size):
    layout = split(size, ranks)
    x, w, b = leaf(3, size), leaf(4, size), leaf(4)
    want = (x @ w.t() + b) * 2
    (want ** 2).sum().backward()

    def fn(comm):
        own = layout[comm.rank]
        x_, w_, b_ = copy_of(take_dim(x, 1, own)), copy_of(take_dim(w, 1, own)), copy_of(b)
        got = c.reduce((x_ @ w_.t() + c.once(b_, comm)) * 2, comm)
        (got ** 2).sum().backward()
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(b_.grad, b.grad)
        torch.testing.assert_close(w_.grad, take_dim(w.grad, 1, own))

    simulate(ranks, fn)


@given(st.integers(2, 4), st.integers(4, 9), st.booleans())
@settings(max_examples=20, deadline=None)
def test_mean_and_extremes_over_an_uneven_sharded_axis(ranks, size, used_sharded):
    layout = split(size, ranks)
    x, v = leaf(3, size), leaf(size)

    def model(x, v, mean, low, high):
        return (x - mean) * v / (1 + high - low)

    want = model(x, v, x.mean(-1, True), x.amin(-1, True), x.amax(-1, True)) if used_sharded else \
        torch.tanh(x.mean(-1)) + x.amax(-1) * x.amin(-1)
    (want ** 2).sum().backward()

    def fn(comm):
        own = layout[comm.rank]
        x_, v_ = copy_of(take_dim(x, 1, own)), copy_of(take_dim(v, 0, own))
        n = x_.shape[1]
        stats = [c.reduce_mean(x_.mean(-1, True), n, size, comm, enter=used_sharded),
                 c.reduce_max(x_.amin(-1, True), comm, "min", enter=used_sharded),
                 c.reduce_max(x_.amax(-1, True), comm, enter=used_sharded)]
        if used_sharded:
            got = c.gather(model(x_, v_, *stats), 1, layout, comm)
        else:
            mean, low, high = (s.squeeze(-1) for s in stats)
            got = torch.tanh(mean) + high * low
        (got ** 2).sum().backward()
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(x_.grad, take_dim(x.grad, 1, own))

    simulate(ranks, fn)


def test_a_tie_of_extremes_shares_the_gradient():
    def fn(comm):
        x = torch.tensor([2.0, float(comm.rank)], requires_grad=True)
        c.reduce_max(x, comm).sum().backward()
        return x.grad.tolist()

    assert simulate(2, fn) == [[0.5, 0.0], [0.5, 1.0]]


def test_gradcheck_of_the_replicated_function():
    """x (whole) -> enter -> sharded work -> gather -> reduce, checked numerically on all ranks at once."""
    layout = (((0, 2), (4, 5)), ((2, 4),))
    w = torch.randn(5, 3, dtype=torch.float64)

    def fn(comm):
        def f(x):
            h = torch.tanh(c.enter(x, comm) @ take_dim(w, 0, layout[comm.rank]).t())
            back = c.gather(h, 1, layout, comm)
            return c.reduce(c.slice_(back * back, 1, layout, comm) @ take_dim(w, 0, layout[comm.rank]), comm)

        g = torch.Generator().manual_seed(3)
        x = torch.randn(2, 3, dtype=torch.float64, generator=g, requires_grad=True)
        return torch.autograd.gradcheck(f, (x,))

    assert simulate(2, fn) == [True, True]


def test_twice_differentiating_and_raw_collectives_are_refused():
    def fn(comm):
        x = leaf(2)
        (g,) = torch.autograd.grad((c.enter(x, comm) ** 2).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            g.sum().backward()
        with pytest.raises(RuntimeError, match=r"use an arrow of autotp\.collectives"):
            comm.all_reduce(x)
        with pytest.raises(ValueError, match="each index once"):
            c.reduce_scatter(x, 0, (((0, 2),), ((0, 2),)), comm)

    simulate(2, fn)


def test_inputs_are_not_written_to_and_one_rank_needs_no_arrow():
    def fn(comm):
        x = torch.randn(4, 3)
        kept, layout = x.clone(), split(4 * comm.size, comm.size)
        for y in (c.enter(x, comm), c.reduce(x, comm), c.reduce_enter(x, comm), c.once(x, comm),
                  c.gather(x, 0, layout, comm), c.reduce_max(x, comm)):
            assert torch.equal(x, kept)
            assert (y is x) == (comm.size == 1)

    simulate(2, fn)
    simulate(1, fn)


def _step(x, w1, w2, b, layout, comm):
    h = torch.tanh(c.enter(x, comm) @ w1.t())
    whole = c.gather(h, 1, layout, comm)
    return c.reduce(c.slice_(whole, 1, layout, comm) @ w2.t(), comm) + b


def _gloo(rank, compiled):
    comm, layout = ProcessComm(), split(5, 2)
    g = torch.Generator().manual_seed(1)
    full = [torch.randn(*s, generator=g).requires_grad_() for s in ((3, 4), (5, 4), (4, 5), (4,))]
    x, w1, w2, b = full
    want = torch.tanh(x @ w1.t()) @ w2.t() + b
    (want ** 2).sum().backward()
    own = layout[rank]
    mine = [copy_of(t) for t in (x, take_dim(w1, 0, own), take_dim(w2, 1, own), b)]
    step = torch.compile(_step, backend=compiled, fullgraph=True) if compiled else _step
    got = step(*mine, layout, comm)
    (got ** 2).sum().backward()
    torch.testing.assert_close(got, want)
    grads = (x.grad, take_dim(w1.grad, 0, own), take_dim(w2.grad, 1, own), b.grad)
    for p, want_grad in zip(mine, grads, strict=True):
        torch.testing.assert_close(p.grad, want_grad)
    return True


@pytest.mark.parametrize("compiled", [None, "aot_eager"])
def test_processes(compiled):
    assert run(2, _gloo, compiled) == [True, True]
