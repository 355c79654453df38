"""Shared memory between ranks: threads of one process stand for them, as they see the same memory."""

import mmap
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from distributed import run
from hypothesis import given, settings
from hypothesis import strategies as st

from autotp import mailbox
from autotp.comm import ProcessComm
from autotp.errors import RankError
from autotp.mailbox import Mailbox

pytestmark = pytest.mark.skipif(not mailbox.available(), reason="no ordered shared memory on this machine")


def together(size, fn, timeout=20.0):
    """fn(mailbox) for each rank, in threads; the results in rank order."""
    memory = mmap.mmap(-1, Mailbox.length(size))
    results = [None] * size

    def one(rank):
        try:
            results[rank] = fn(Mailbox(memory, rank, [os.getpid()] * size, timeout))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool]
lengths = st.integers(0, 60)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 4), st.lists(lengths, min_size=1, max_size=6), st.sampled_from(DTYPES), st.integers())
def test_a_run_of_reductions(small_slots, size, turns, dtype, seed):
    generator = torch.Generator().manual_seed(seed % 2**32)
    values = [[torch.randint(0, 9, (n,), generator=generator).to(dtype) for n in turns] for _ in range(size)]
    found = together(size, lambda box: [box.all_reduce(x, torch.maximum) for x in values[box.rank]])
    for turn in range(len(turns)):
        truth = torch.stack([values[rank][turn] for rank in range(size)]).amax(0) if turns[turn] else \
            values[0][turn]
        assert all(torch.equal(out[turn], truth) for out in found)


@settings(max_examples=40, deadline=None)
@given(st.lists(lengths, min_size=2, max_size=4), st.integers(1, 3), st.sampled_from(DTYPES), st.booleans())
def test_gathers_of_uneven_parts(small_slots, sizes, other, dtype, first):
    dim = 0 if first else 1
    shapes = [torch.Size((n, other) if dim == 0 else (other, n)) for n in sizes]
    parts = [torch.full(shape, rank + 1).to(dtype) for rank, shape in enumerate(shapes)]
    found = together(len(sizes), lambda box: box.all_gather(parts[box.rank], shapes, dim))
    assert all(torch.equal(out, torch.cat(parts, dim)) for out in found)


@pytest.fixture(scope="module")
def small_slots():
    """Slots of 128 bytes, so that most tensors take several turns."""
    before, mailbox._SLOT = mailbox._SLOT, 128
    yield
    mailbox._SLOT = before


def test_results_outlive_later_turns():
    def one(box):
        outs = [box.all_reduce(torch.full((1000,), float(i)), torch.add) for i in range(50)]
        return [out.unique().tolist() for out in outs]

    assert together(3, one) == [[[3.0 * i] for i in range(50)]] * 3


def test_who_does_not_come_is_named():
    def one(box):
        if box.rank == 0:
            with pytest.raises(RankError, match="rank 0 waited 0 s for rank 1 of 2 .* took different ways"):
                box.timeout = 0.2
                box.all_reduce(torch.ones(3), torch.add)

    mailbox_ask, mailbox._ASK = mailbox._ASK, 0.05
    try:
        together(2, one)
    finally:
        mailbox._ASK = mailbox_ask


@pytest.mark.parametrize("brought", [
    lambda box: box.all_reduce(torch.ones(3 + box.rank), torch.add),
    lambda box: box.all_reduce(torch.ones(3, dtype=[torch.float32, torch.float64][box.rank]), torch.add),
    lambda box: box.all_reduce(torch.ones(3), torch.add) if box.rank else box.all_gather(
        torch.ones(3), [torch.Size([3])] * 2, 0),
    lambda box: box.all_gather(torch.ones(2 + box.rank), [torch.Size([2 + box.rank])] * 2, 0),
])
def test_ranks_that_bring_different_things_are_told(brought):
    def one(box):
        with pytest.raises(RankError, match="came to a collective of rank . with"):
            brought(box)

    together(2, one)


def test_who_has_died_is_named():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    memory = mmap.mmap(-1, Mailbox.length(2))
    box = Mailbox(memory, 0, [os.getpid(), child.pid], 60.0)
    threading.Timer(0.3, lambda: child.send_signal(signal.SIGKILL)).start()
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 1 of 2 has ended"):
        box.all_reduce(torch.ones(3), torch.add)
    assert time.monotonic() - start < 30       # long before the timeout, and before the child is waited for
    child.wait()


def _no_memory(rank):
    comm = ProcessComm()
    if rank == 1:
        mailbox.available = lambda: False       # as on a machine of another kind
    return comm.all_reduce(torch.ones(2)).tolist(), comm._mailbox is None


def test_where_one_rank_has_no_shared_memory_none_uses_it():
    assert run(2, _no_memory) == [([2.0, 2.0], True)] * 2


def _leaves_no_file(rank):
    comm = ProcessComm()
    comm.all_reduce(torch.ones(2))
    assert comm._mailbox is not None
    with open("/proc/self/maps") as maps:
        return [line.split()[-1] for line in maps if "/autotp-" in line and str(mailbox._FOLDER) in line]


def test_no_file_stays():
    assert run(2, _leaves_no_file) == [["(deleted)"]] * 2
