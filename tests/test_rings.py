"""Queues between stages in shared memory: both ends in one process, as they see the same memory."""

import mmap
import os
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from distributed import run
from hypothesis import given, settings
from hypothesis import strategies as st

from autotp import mailbox
from autotp.comm import ProcessComm
from autotp.errors import RankError
from autotp.pipeline import rings
from autotp.pipeline.channel import ProcessChannel, StageError
from autotp.pipeline.rings import Rings

pytestmark = pytest.mark.skipif(not mailbox.available(), reason="no ordered shared memory on this machine")


def ends(size):
    memory = mmap.mmap(-1, Rings.length(size))
    return [Rings(memory, rank, [os.getpid()] * size) for rank in range(size)]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.sampled_from([1, 2])), max_size=60))
def test_messages_arrive_whole_and_in_order_however_the_ends_alternate(steps):
    sender, *receivers = ends(3)
    sent, got, number = {1: [], 2: []}, {1: [], 2: []}, 0

    def take(peer):
        receiver = receivers[peer - 1]
        head = receiver.head(0)
        if head is not None:
            out = torch.empty(head[3] // 8, dtype=torch.float64)
            receiver.take(0, out)
            got[peer].append((head, out.tolist()))

    for sends, count, peer in steps:
        if sends:
            number += 1
            data = torch.arange(count, dtype=torch.float64) + number
            sender.put(peer, (1, number, data.nbytes, data.nbytes), data)
            sent[peer].append(((1, number, data.nbytes, data.nbytes), data.tolist()))
            data.fill_(-1)  # it may change at once
        else:
            take(peer)
    for _ in range(len(steps)):
        sender.flush()
        take(1)
        take(2)
    assert sender.flush() and got == sent


def test_a_full_queue_keeps_the_sender_going_and_slots_are_far_apart():
    one, two = ends(2)
    largest = torch.randint(0, 255, (one.room,), dtype=torch.uint8)
    for i in range(rings._SLOTS + 2):
        one.put(1, (1, i, one.room, one.room), largest + i)
    assert not one.flush()
    back = torch.ones(3)
    two.put(0, (1, 0, 12, 12), back)
    for i in range(rings._SLOTS + 2):
        one.flush()
        out = torch.empty_like(largest)
        assert two.head(0) == (1, i, one.room, one.room)
        two.take(0, out)
        assert torch.equal(out, largest + i)
    out = torch.empty(3)
    assert one.flush() and two.head(0) is None and one.head(1) == (1, 0, 12, 12)
    one.take(1, out)
    assert torch.equal(out, back) and one.failed(1, 1) is None
    two.fail(1)
    assert one.failed(1, 0) == 1 and one.failed(2, 1) is None
    two.fail(2)
    assert one.failed(1, 1) == 1 and one.failed(1, 0) is None


def test_what_is_large_goes_in_pieces_while_it_is_taken_and_leaves_a_slot_when_it_is_not(monkeypatch):
    one, two = ends(2)
    data = torch.randint(0, 255, (one.room * 11 + 5,), dtype=torch.uint8)
    assert one.stream(1, data, lambda here: (1, 0, len(data), here)) == one.room
    one.put(1, (1, 0, len(data), -1), None)
    assert one.flush()  # it found its slot
    for _ in range(2):
        two.take(0, None)

    def take():
        pieces = []
        while sum(map(len, pieces)) < len(data):
            if head := two.head(0):
                pieces.append(torch.empty(head[3], dtype=torch.uint8))
                two.take(0, pieces[-1])
        got.extend(pieces)

    got = []
    monkeypatch.setattr(rings, "_TAKING", 30.0)  # on a loaded machine the taker may have to wait for its turn
    taker = threading.Thread(target=take, daemon=True)
    taker.start()
    sent = one.stream(1, data, lambda here: (1, 1, len(data), here))
    taker.join(30)
    assert sent == len(data) and len(got) == 12 and torch.equal(torch.cat(got), data)


def _talk(rank):
    channel = ProcessChannel(ProcessComm())
    assert channel._rings is not None
    big = torch.arange(channel._rings.room, dtype=torch.float32)  # four times what fits
    cpu = torch.device("cpu")
    for x in (torch.ones(3), big, torch.tensor(5), torch.empty(0, 4), torch.tensor([True, False])):
        if rank == 0:
            channel.send(x, 1)
        else:
            assert torch.equal(channel.receive(torch.empty_like(x), cpu, 0), x)
    channel.end()
    huge = torch.arange(3 * channel._rings.room, dtype=torch.float32)  # more than the queue
    for late in (0, 1):  # who comes late: the sender, whose pieces are taken; the receiver
        dist.barrier()
        time.sleep(0.2 * (rank == late))
        if rank == 0:
            channel.send(huge, 1)
            channel.send(torch.ones(2), 1)
            huge.add_(1)
            channel.end()
        else:
            assert torch.equal(channel.receive(huge, cpu, 0), huge)
            assert channel.receive(torch.ones(2), cpu, 0).tolist() == [1, 1]
            huge.add_(1)
    assert channel.exchange(("rank", rank)) == [("rank", 0), ("rank", 1)]

    channel.begin()  # a call that is given up: what it left is passed over by the next
    if rank == 0:
        channel.send(big, 1)
        channel.send(torch.ones(2), 1)
        channel.end()
        channel.fail("rank 0 gave up")
    else:
        channel.receive(big, cpu, 0)
        channel.receive(torch.ones(2), cpu, 0)
        with pytest.raises(StageError, match="rank 0 gave up"):
            channel.receive(torch.ones(2), cpu, 0)
    channel.begin()
    if rank == 0:
        channel.send(big, 1)
        channel.send(big, 1)
        channel.fail("again")
    channel.begin()
    if rank == 0:
        channel.send(torch.full((2,), 7.0), 1)
        channel.send(torch.ones(3), 1)
        channel.end()  # what finds no slot is sent by who waits
    else:
        assert channel.receive(torch.ones(2), cpu, 0).tolist() == [7, 7]
        with pytest.raises(RankError, match="out of step.*8 bytes, from pp rank 0, and got.*12 bytes"):
            channel.receive(torch.ones(2), cpu, 0)
    channel.begin()
    return channel.exchange("here")


def test_between_processes():
    assert run(2, _talk) == [["here", "here"]] * 2


def test_a_process_that_is_gone_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(mailbox, "_ASK", 0.05)
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    channel = ProcessChannel.__new__(ProcessChannel)
    channel.rank, channel.size, channel.patience = 0, 2, 30.0
    memory = mmap.mmap(-1, Rings.length(2))
    one = Rings(memory, 0, [os.getpid(), gone.pid])
    Rings(memory, 1, one.pids).put(0, (1, 0, 4, 4), torch.ones(1))  # it sent before it ended
    channel._rings = one
    channel.begin()
    like = torch.ones(1)
    assert channel.receive(like, like.device, 1).tolist() == [1]
    with pytest.raises(RankError, match="pp rank 1 has ended"):
        channel.receive(like, like.device, 1)
