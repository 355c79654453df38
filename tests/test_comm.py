import threading
import time

import pytest
import torch
from distributed import run

from autotp.comm import ProcessComm, ShapeComm, simulate
from autotp.errors import RankError
from autotp.same import agree


def collectives(comm):
    """Every collective on values that are different on every rank; returns the results."""
    r, out = comm.rank, {}
    x = torch.arange(6.0).view(2, 3) + 10 * r
    kept = x.clone()
    out["sum"], out["max"], out["min"] = (comm.all_reduce(x, op) for op in ("sum", "max", "min"))
    out["bf16"] = comm.all_reduce(x.bfloat16())
    out["transposed"] = comm.all_reduce(x.t())
    sizes = [r + 1 for r in range(comm.size)]
    out["uneven"] = comm.all_gather(torch.full((2, r + 1, 2), float(r)), 1, sizes)
    # processes send these another way: 160 kB, and parts of 80 kB and more
    out["big"] = comm.all_reduce(torch.full((40000,), r + 1.0))
    part = torch.full((20000 * (r + 1),), float(r))
    out["big_uneven"] = comm.all_gather(part, 0, [20000 * n for n in sizes])
    out["even"] = comm.all_gather(x, -1, [3] * comm.size)
    out["scatter"] = comm.reduce_scatter(torch.ones(2, comm.size * 2) * (r + 1), 1, [2] * comm.size)
    out["scatter_uneven"] = comm.reduce_scatter(torch.ones(sum(sizes), 2) * (r + 1), 0, sizes)
    out["broadcast"] = comm.broadcast(x, comm.size - 1)
    assert comm.exchange(("rank", r)) == [("rank", i) for i in range(comm.size)]
    assert torch.equal(x, kept), "a collective wrote into its input"
    return out


def check(results):
    n = len(results)
    xs = [torch.arange(6.0).view(2, 3) + 10 * r for r in range(n)]
    total = n * (n + 1) / 2
    for r, out in enumerate(results):
        assert torch.equal(out["sum"], sum(xs))
        assert torch.equal(out["max"], xs[-1]) and torch.equal(out["min"], xs[0])
        assert out["bf16"].dtype == torch.bfloat16 and torch.equal(out["bf16"], sum(xs).bfloat16())
        assert torch.equal(out["transposed"], sum(xs).t())
        assert torch.equal(out["uneven"], torch.cat([torch.full((2, i + 1, 2), 1. * i) for i in range(n)], 1))
        assert torch.equal(out["big"], torch.full((40000,), total))
        parts = [torch.full((20000 * (i + 1),), 1. * i) for i in range(n)]
        assert torch.equal(out["big_uneven"], torch.cat(parts))
        assert torch.equal(out["even"], torch.cat(xs, -1))
        assert torch.equal(out["scatter"], torch.full((2, 2), total))
        assert torch.equal(out["scatter_uneven"], torch.full((r + 1, 2), total))
        assert torch.equal(out["broadcast"], xs[-1])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_threads(size):
    check(simulate(size, collectives))


def _gloo(rank):
    comm = ProcessComm()
    out = collectives(comm)
    with pytest.raises(RankError, match="failed on rank 1 of 3; rank 1 says: ValueError: no weights"):
        agree(comm, ValueError("no weights") if rank == 1 else "fine")
    with pytest.raises(RuntimeError, match="use an arrow"):
        comm.all_reduce(torch.ones(2, requires_grad=True))
    return out


def test_processes():
    check(run(3, _gloo))


def _fails(rank):
    if rank == 1:
        raise ValueError("broken weights")
    return ProcessComm().all_reduce(torch.ones(1))


def test_the_test_helper_names_the_rank_that_failed():
    with pytest.raises(RuntimeError, match="rank 1 of 2: ValueError: broken weights"):
        run(2, _fails)


def test_shapes_without_peers():
    comm = ShapeComm(1, 3)
    for make in (torch.zeros, lambda *s: torch.empty(*s, device="meta")):
        x = make(2, 4)
        assert comm.all_reduce(x).shape == (2, 4)
        assert comm.all_gather(x, 1, [5, 4, 3]).shape == (2, 12)
        assert comm.all_gather(x, 1, [5, 4, 3]).device == x.device
        assert comm.reduce_scatter(make(6, 2), 0, [2, 3, 1]).shape == (3, 2)
    assert comm.exchange("a") == ["a", "a", "a"]
    x = torch.randn(2, 4)
    assert torch.equal(ShapeComm(0, 1).all_gather(x, 0, [2]), x)


def test_an_exception_ends_all_ranks_and_is_raised_with_its_rank():
    ended = []

    def fn(comm):
        try:
            comm.exchange(0)
            if comm.rank == 1:
                raise KeyError("lost")
            try:
                comm.all_reduce(torch.ones(1))
            except Exception:                    # a rank must not mistake another's failure for its own
                raise AssertionError("caught") from None
        finally:
            ended.append(comm.rank)

    start = time.monotonic()
    with pytest.raises(KeyError, match="lost") as caught:
        simulate(3, fn)
    assert sorted(ended) == [0, 1, 2] and time.monotonic() - start < 5
    if hasattr(caught.value, "__notes__"):
        assert caught.value.__notes__ == ["on rank 1 of 3"]


@pytest.mark.parametrize("first", [True, False])
def test_a_rank_that_leaves_early_is_an_error_not_a_hang(first):
    def fn(comm):
        if comm.rank == 0:
            time.sleep(0 if first else 0.1)
            return
        time.sleep(0.1 if first else 0)
        comm.all_reduce(torch.ones(1))

    with pytest.raises(RankError, match="rank 1 waits in all_reduce.*rank 0 has already returned"):
        simulate(2, fn)


def test_different_collectives_are_an_error():
    with pytest.raises(RankError, match=r"rank 0 calls all_reduce\(sum, \[1\].*rank 1 calls .*\[2\]"):
        simulate(2, lambda comm: comm.all_reduce(torch.ones(comm.rank + 1)))


def test_threads_take_over_the_grad_mode():
    assert simulate(2, lambda comm: torch.is_grad_enabled()) == [True, True]
    with torch.no_grad():
        assert simulate(2, lambda comm: torch.is_grad_enabled()) == [False, False]
    with torch.inference_mode():
        assert simulate(2, lambda comm: comm.all_reduce(torch.ones(1)).is_inference()) == [True, True]
    assert threading.active_count() < 10


def test_agree():
    assert simulate(3, lambda comm: agree(comm, "same")) == [None] * 3
    texts = ["tp: 2\nq: Shard(0)\n", "tp: 2\nq: Shard(0)\n", "tp: 2\nq: Replicate\n"]

    def differ(comm):
        with pytest.raises(RankError, match=r"rank 0, 1 has 'q: Shard\(0\)' \(line 2\), rank 2 has 'q: Rep"):
            agree(comm, texts[comm.rank])
        return True

    assert simulate(3, differ) == [True] * 3

    def fail(comm):
        outcome = RuntimeError(f"out of luck {comm.rank}") if comm.rank else "fine"
        with pytest.raises(RankError, match="failed on rank 1, 2 of 3; rank 1 says: RuntimeError: out of"):
            agree(comm, outcome)
        return True

    assert simulate(3, fail) == [True] * 3
