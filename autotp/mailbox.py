"""Memory that the ranks of one machine share, for collectives between CPU tensors.

Over gloo a small all-reduce between two processes of one machine costs half a millisecond of both cores:
system calls, and threads that wake each other. A token of decoding has dozens of them. Here a rank copies its
tensor into memory that all of them see, counts up, and reads the others' as soon as they have counted too.

The order of writes is all that this stands on: the data first, then the count. x86 processors keep it; on
others (`available`) gloo stays in use. Nothing is locked, so a rank that dies leaves nothing behind: the file
has no name any more when the first message goes through it, and who waits for a process that is gone is told.
"""

from __future__ import annotations

import functools
import mmap
import os
import platform
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .errors import RankError

if TYPE_CHECKING:
    from .comm import Comm

_FOLDER = Path("/dev/shm")
_SLOT = 2**20  # bytes that go through in one turn
_LINE = 128  # counts lie apart, so that a rank that writes its own disturbs no other's
_SPINS = 200  # looks before the first pause: about 10 µs
_PATIENCE = 0.005  # seconds of yielding before the first sleep
_GONE = -1  # the count of a rank that has given up
_ASK = 1.0  # seconds between looks whether the others live


def available() -> bool:
    """Whether this machine keeps writes in order and has memory files."""
    return platform.machine() in ("x86_64", "AMD64") and _FOLDER.is_dir() and os.access(_FOLDER, os.W_OK)


class Mailbox:
    """Two slots and a count for each of `size` ranks, of which this is `rank`.

    Every rank calls `all_reduce` and `all_gather` in the same order. In turn n all write their slot n % 2 and
    set their count to n + 1; a slot is written again in turn n + 2, which no rank begins before all have
    begun turn n + 1, and so have read what turn n brought. Beside its count a rank leaves what it brought:
    one that came to another collective, or with a tensor of another size, is an error and not a number.
    """

    def __init__(self, memory: mmap.mmap, rank: int, pids: Sequence[int], timeout: float) -> None:
        """memory: `length(size)` bytes that all ranks have mapped. timeout: seconds to wait for a rank."""
        size = len(pids)
        self.rank, self.size, self.pids, self.timeout = rank, size, tuple(pids), timeout
        self._turn = 0
        self._counts = memoryview(memory).cast("q")
        whole = torch.frombuffer(memory, dtype=torch.uint8)[size * _LINE :]
        self._slots = [list(pair) for pair in whole.view(size, 2, _SLOT)]
        self._peers = [r for r in range(size) if r != rank]

    @staticmethod
    def length(size: int) -> int:
        return size * (_LINE + 2 * _SLOT)

    @classmethod
    def open(cls, comm: Comm, timeout: float) -> Mailbox | None:
        """For the ranks of `comm`, which all call this; None for all where they are not on one machine."""
        shared = share(comm, cls.length(comm.size))
        return cls(shared[0], comm.rank, shared[1], timeout) if shared else None

    def all_reduce(self, x: Tensor, combine: Callable[..., Tensor]) -> Tensor:
        """x: contiguous, on the CPU. combine: torch.add, maximum or minimum. The ranks are taken in order, so
        all get the same bits."""
        flat = x.detach().reshape(-1)
        if flat.nbytes <= _SLOT:
            return self._combined(self._turns(flat), combine, None).view(x.shape)
        out = torch.empty_like(flat)
        step = _SLOT // flat.element_size()
        for part, whole in zip(flat.split(step), out.split(step), strict=True):
            self._combined(self._turns(part), combine, whole)
        return out.view(x.shape)

    @staticmethod
    def _combined(parts: list[Tensor], combine: Callable[..., Tensor], out: Tensor | None) -> Tensor:
        out = combine(parts[0], parts[1], out=out)
        for part in parts[2:]:
            combine(out, part, out=out)
        return out

    def all_gather(self, x: Tensor, shapes: Sequence[torch.Size], dim: int) -> Tensor:
        """All ranks' `x`, contiguous and of the given shapes, joined along `dim`."""
        flat = x.detach().reshape(-1)
        lengths = [shape.numel() for shape in shapes]
        step = _SLOT // flat.element_size()
        if max(lengths) <= step:
            parts = self._turns(flat, lengths)
            return torch.cat([part.view(shape) for part, shape in zip(parts, shapes, strict=True)], dim)
        wholes = [flat.new_empty(length) for length in lengths]
        for start in range(0, max(lengths), step):
            here = [max(0, min(step, length - start)) for length in lengths]
            parts = self._turns(flat.narrow(0, min(start, len(flat)), here[self.rank]), here)
            for whole, part in zip(wholes, parts, strict=True):
                whole[start : start + len(part)] = part
        return torch.cat([whole.view(shape) for whole, shape in zip(wholes, shapes, strict=True)], dim)

    def _turns(self, flat: Tensor, lengths: Sequence[int] | None = None) -> list[Tensor]:
        """One turn: every rank's part, to be used before the next one (the others' are the shared memory)."""
        which, self._turn = self._turn % 2, self._turn + 1
        dtype, width = flat.dtype, flat.element_size()
        if len(flat):
            self._slots[self.rank][which][: flat.nbytes].view(dtype).copy_(flat)
        counts, own, kind = self._counts, self.rank * (_LINE // 8), _kind(dtype, lengths is not None)
        counts[own + 1 + 2 * which], counts[own + 2 + 2 * which] = kind, len(flat)
        counts[own] = self._turn
        found = [flat] * self.size
        for peer in self._peers:
            at, length = peer * (_LINE // 8), lengths[peer] if lengths else len(flat)
            if counts[at] < self._turn:
                self._wait(peer)
            came = counts[at + 1 + 2 * which], counts[at + 2 + 2 * which]
            if came != (kind, length):
                self._misfit(peer, length, came[1] if came[0] == kind else None)
            found[peer] = self._slots[peer][which][: length * width].view(dtype)
        return found

    def give_up(self) -> None:
        """This rank comes no more, and who waits for it is told."""
        self._counts[self.rank * (_LINE // 8)] = _GONE

    def _misfit(self, peer: int, expected: int, brought: int | None) -> None:
        what = f"{brought} elements, not {expected}" if brought is not None else "another kind or dtype"
        raise RankError(f"rank {peer} of {self.size} came to a collective of rank {self.rank} with {what}: "
                        "the ranks were given other inputs, or took different ways. Give all the same.")

    def _wait(self, peer: int) -> None:
        counts, at, turn = self._counts, peer * (_LINE // 8), self._turn
        waiting = Waiting(self.timeout)
        while counts[at] < turn:
            ask = waiting.pause()
            if ask and counts[at] == _GONE:
                raise RankError(f"rank {peer} of {self.size} has failed, and comes to no more collectives; "
                                f"rank {self.rank} waits for it in one.")
            # A rank may have counted up and ended since.
            if ask and not lives(self.pids[peer]) and counts[at] < turn:
                raise RankError(f"rank {peer} of {self.size} has ended while rank {self.rank} waited for "
                                "it in a collective: what it printed says why.")
            if waiting.over:
                raise RankError(f"rank {self.rank} waited {self.timeout:.0f} s for rank {peer} of "
                                f"{self.size} in a collective that it has not come to: the ranks took "
                                "different ways.")

    def __reduce__(self) -> Any:
        raise TypeError("a Mailbox belongs to running processes and can't be copied or pickled")


class Waiting:
    """For a loop that looks whether another process has written: how long each look waits for the next.

    timeout: seconds until `over`. yielding: seconds in which it sleeps for as short as can be.
    """

    __slots__ = ("_asked", "_spins", "_start", "over", "timeout", "yielding")

    def __init__(self, timeout: float, yielding: float = _PATIENCE) -> None:
        self.timeout, self.yielding, self.over, self._spins = timeout, yielding, False, 0

    def pause(self) -> bool:
        """Wait a moment: none, then as little as gives way to others, then 50 to 500 µs. True about once a
        second: time to ask whether the others live."""
        if self._spins < _SPINS:
            self._spins += 1
            return False
        now = time.monotonic()
        if self._spins == _SPINS:
            self._spins += 1
            self._start = self._asked = now
        if now - self._start < self.yielding:
            os.sched_yield()
            return False
        # A look takes CPU time that the awaited process may need: the longer it has taken, the fewer.
        time.sleep(min(max(5e-5, (now - self._start) / 100), 5e-4))
        if now - self._asked <= _ASK:
            return False
        self._asked = now
        self.over = now - self._start > self.timeout
        return True


def share(comm: Comm, length: int) -> tuple[mmap.mmap, list[int]] | None:
    """`length` bytes of zeros that the ranks of `comm` share, and their processes. All ranks call this; None
    for all where they are not on one machine, or it has no such memory."""
    memory, path = None, ""
    if comm.rank == 0 and available():
        path, memory = _create(length)
    told = comm.exchange((path, os.getpid()))
    path, pids = told[0][0], [pid for _, pid in told]
    if comm.rank and path and available():
        memory = _map(Path(path), length)
    alive = memory is not None and all(lives(pid) for pid in pids)
    together = all(comm.exchange(alive))
    if comm.rank == 0 and path:
        Path(path).unlink(missing_ok=True)
    return (memory, pids) if together and memory is not None else None


@functools.cache
def _kind(dtype: torch.dtype, gathers: bool) -> int:
    """A number for what a turn is of, the same in all processes."""
    return zlib.crc32(f"{dtype} {gathers}".encode())


def _create(length: int) -> tuple[str, mmap.mmap | None]:
    """A new memory file; no name where there is no room for it (/dev/shm is small in many containers)."""
    try:
        handle, name = tempfile.mkstemp(prefix="autotp-", dir=_FOLDER)
        try:
            os.posix_fallocate(handle, 0, length)  # now, or writing to it would kill the process later
            return name, mmap.mmap(handle, length)
        except OSError:
            os.unlink(name)
            return "", None
        finally:
            os.close(handle)
    except OSError:
        return "", None


def _map(path: Path, length: int) -> mmap.mmap | None:
    """The memory file that another rank made, if it is this machine's."""
    try:
        with path.open("r+b") as file:
            return mmap.mmap(file.fileno(), length)
    except (OSError, ValueError):
        return None


def lives(pid: int) -> bool:
    """Whether there is such a process here, and not only its exit status waiting to be read."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state not in ("Z", "X")

