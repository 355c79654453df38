"""Short queues between the stages of one machine, in memory that they share: messages without gloo.

From each rank to each other lie a few slots. The sender fills the next one, then counts up; the receiver
reads it, then counts up too, and the slot is free again. As in `mailbox.py` the order of writes is all that
this stands on. What finds no free slot is kept at the sender, which tries again whenever it sends or waits:
so sending never blocks. What is too large for one slot goes in pieces, as long as the receiver takes them.
"""

from __future__ import annotations

import mmap
import os
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..comm import Comm
from ..mailbox import share

_SLOTS = 4
_LARGEST = 2**20  # bytes of one message
_TOTAL = 2**24  # bytes for the messages between all ranks
_LINE = 128  # bytes: counts that different ranks write lie apart
_HEAD = 64
_TAKING = 2e-3  # seconds in which a receiver that waits takes a piece

Head = tuple[int, int, int, int]  # what goes before a message's data


class Rings:
    """The queues between rank `rank` and the others, which are the processes `pids`. room: bytes of the
    largest message."""

    def __init__(self, memory: mmap.mmap, rank: int, pids: Sequence[int]) -> None:
        """memory: `length(size)` bytes, zeros at first, that all ranks have mapped."""
        self.rank, self.size, self.pids, self.room = rank, len(pids), tuple(pids), _room(len(pids))
        self._numbers = memoryview(memory).cast("q")
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        self._to, self._from = {}, {}
        for peer in range(self.size):
            self._to[peer] = _Queue(self, whole, rank, peer)
            self._from[peer] = _Queue(self, whole, peer, rank)
        self._kept: deque[tuple[int, Head, Tensor | None]] = deque()  # in order: what has no slot yet

    @staticmethod
    def length(size: int) -> int:
        return size * _LINE + size * size * _stride(size)

    @classmethod
    def open(cls, comm: Comm) -> Rings | None:
        """All ranks of `comm` call this; None for all where they are not on one machine."""
        shared = share(comm, cls.length(comm.size))
        return cls(shared[0], comm.rank, shared[1]) if shared else None

    def put(self, to: int, head: Head, data: Tensor | None) -> None:
        """Send `head`, and `data` (contiguous, on the CPU, at most `room` bytes), which may change
        afterwards."""
        if self.flush() and self._to[to].write(head, data):
            return
        self._kept.append((to, head, None if data is None else data.clone()))

    def stream(self, to: int, data: Tensor, head: Callable[[int], Head]) -> int:
        """Send bytes in pieces, as long as the receiver takes them: how many went. Each has the head of its
        length. No more than one lies there before one is taken, and one slot stays free for a message that
        says how the rest comes."""
        queue, at, since = self._to[to], 0, 0.0
        first = queue.at
        while at < len(data) and self.flush():
            piece = data[at : at + self.room]
            if queue.free > (at + len(piece) < len(data)) and (not at or queue.taken > first):
                queue.write(head(len(piece)), piece)
                at, since = at + len(piece), 0.0
                continue
            since = since or time.monotonic()
            if time.monotonic() - since > _TAKING:
                break
            os.sched_yield()
        return at

    def flush(self) -> bool:
        """Write what was kept, as far as there are slots; whether all is written."""
        while self._kept:
            to, head, data = self._kept[0]
            if not self._to[to].write(head, data):
                return False
            self._kept.popleft()
        return True

    def head(self, source: int) -> Head | None:
        """The head of the next message from `source`; None where there is none yet."""
        return self._from[source].head()

    def take(self, source: int, out: Tensor | None) -> None:
        """Put that message's data into `out` (contiguous; None: it has none, or nobody wants it), and free
        its slot."""
        self._from[source].take(out)

    def fail(self, turn: int) -> None:
        """Say that this rank has failed in `turn`."""
        self._numbers[self.rank * _LINE // 8] = turn

    def failed(self, turn: int, source: int) -> int | None:
        """A rank that has failed in `turn`; or `source`, if it has failed since."""
        told = [self._numbers[rank * _LINE // 8] for rank in range(self.size)]
        return source if told[source] >= turn else next((r for r, t in enumerate(told) if t == turn), None)


class _Queue:
    """From one rank to another. Counts of what is written and read, then slots: a head and its data."""

    def __init__(self, rings: Rings, whole: Tensor, source: int, to: int) -> None:
        base = rings.size * _LINE + (source * rings.size + to) * _stride(rings.size)
        self.numbers, self.at = rings._numbers, 0
        self.written, self.read = base // 8, (base + _LINE) // 8
        first, step = base + 2 * _LINE, _HEAD + rings.room
        self.heads = [(first + i * step) // 8 for i in range(_SLOTS)]
        self.slots = [whole[first + i * step + _HEAD :][: rings.room] for i in range(_SLOTS)]

    @property
    def taken(self) -> int:
        return self.numbers[self.read]

    @property
    def free(self) -> int:
        return _SLOTS - (self.at - self.taken)

    def write(self, head: Head, data: Tensor | None) -> bool:
        if not self.free:
            return False
        i = self.at % _SLOTS
        if data is not None and data.nbytes:
            self.slots[i][: data.nbytes].view(data.dtype).copy_(data.view(-1))
        for j, number in enumerate(head):
            self.numbers[self.heads[i] + j] = number
        self.at += 1
        self.numbers[self.written] = self.at
        return True

    def head(self) -> Head | None:
        if self.numbers[self.written] <= self.at:
            return None
        at = self.heads[self.at % _SLOTS]
        numbers = self.numbers
        return numbers[at], numbers[at + 1], numbers[at + 2], numbers[at + 3]

    def take(self, out: Tensor | None) -> None:
        if out is not None and out.nbytes:
            out.view(-1).copy_(self.slots[self.at % _SLOTS][: out.nbytes].view(out.dtype))
        self.at += 1
        self.numbers[self.read] = self.at


def _room(size: int) -> int:
    return min(_LARGEST, _TOTAL // (size * size * _SLOTS)) // _HEAD * _HEAD


def _stride(size: int) -> int:
    return 2 * _LINE + _SLOTS * (_HEAD + _room(size))
