"""How stages talk: tensors from one to another, in order, and the news that one has failed.

A message's shape is known to both sides (the receiver has the Absent that stands for it), so one message
carries one tensor. On the CPU a few numbers go before it, in the same message: which call of the model it
belongs to, and whether it is a tensor at all or the news of a failure.
"""

from __future__ import annotations

import pickle
import queue
from abc import ABC, abstractmethod
from collections import defaultdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm import Comm, ProcessComm, ThreadComm
from ..errors import RankError
from ..mailbox import Waiting, lives
from .rings import Rings

PATIENCE = 300.0  # seconds a stage waits for another
_YIELDING = 2e-4  # seconds: a stage computes for longer, and may share its cores with the waiting one
_TAG = 7920  # a caller's own messages in the group stay apart
_DATA, _FAILED = 0, 1  # what a message of the group is
_HEAD = 32  # bytes: turn, kind, number of the message, bytes of the tensor


class StageError(RankError):
    """What another stage said of its failure: it names rank and stage."""


class Channel(ABC):
    """Messages between `size` ranks, of which this is `rank`.

    A *turn* is one outermost call of the model; all ranks count them alike. patience: seconds to wait for a
    message. Waiting ends with RankError where the other rank failed, died, or sent nothing for so long.
    """

    rank: int
    size: int
    device: torch.device  # where an exchange's bytes lie: one that the backend can send from
    patience: float = PATIENCE
    turn: int = 0

    def begin(self) -> None:
        """A new turn."""
        self.turn += 1
        self._sent: dict[int, int] = defaultdict(int)
        self._received: dict[int, int] = defaultdict(int)

    @abstractmethod
    def send(self, x: Tensor, to: int) -> None:
        """Send `x`; returns at once."""

    @abstractmethod
    def receive(self, like: Tensor, device: torch.device, source: int) -> Tensor:
        """The next tensor of rank `source`, which has the shape and dtype of `like`."""

    @abstractmethod
    def fail(self, text: str) -> None:
        """Tell the other ranks that this one has failed: their waiting for it ends with `text`."""

    @abstractmethod
    def end(self) -> None:
        """Wait until all that was sent is on its way."""

    def exchange(self, obj: Any) -> list[Any]:
        """Every rank's (picklable) object, in rank order."""
        data = torch.frombuffer(bytearray(pickle.dumps(obj)), dtype=torch.uint8).to(self.device)
        size = torch.tensor([len(data)], device=self.device)
        peers = [rank for rank in range(self.size) if rank != self.rank]
        for peer in peers:
            self.send(size, peer)
            self.send(data, peer)
        found = {self.rank: obj}
        for peer in peers:
            theirs = torch.empty(int(self.receive(size, self.device, peer)), dtype=torch.uint8)
            found[peer] = pickle.loads(self.receive(theirs, self.device, peer).cpu().numpy().tobytes())
        return [found[rank] for rank in range(self.size)]


class ProcessChannel(Channel):
    """Over a process group: gloo for tensors on the CPU, NCCL for those on GPUs.

    Tensors on the CPU of ranks on one machine go through memory that they share (`rings.py`), large ones by
    their heads alone. On GPUs messages carry nothing but the tensor: the news of a failure stays in the
    store, where a rank that has waited too long finds it.
    """

    def __init__(self, comm: ProcessComm) -> None:
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        self._pending: list[tuple[Any, Tensor]] = []
        self._news: list[tuple[Any, Tensor]] = []     # kept: a message that is dropped is not sent
        gloo = "gloo" in str(dist.get_backend_config(comm.group))
        self.device = torch.device("cpu") if gloo else torch.device("cuda", torch.cuda.current_device())
        ranks = dist.get_process_group_ranks(comm.group or dist.group.WORLD)
        self._store = dist.PrefixStore(
            f"autotp/stages/{'-'.join(map(str, ranks))}", dist.distributed_c10d._get_default_store()
        )
        self._rings = Rings.open(comm) if gloo else None
        self.begin()

    def send(self, x: Tensor, to: int) -> None:
        number, x = self._sent[to], x.detach().contiguous()
        self._sent[to] += 1
        if x.device.type == "cpu" and self._rings is not None:
            rest = self._put(self._rings, to, number, x)
            if rest is None:
                return
            x = rest
        elif x.device.type == "cpu":
            x = self._packed(_DATA, number, x)
        self._pending.append((dist.isend(x, group=self.comm.group, group_dst=to, tag=_TAG), x))

    def _put(self, rings: Rings, to: int, number: int, x: Tensor) -> Tensor | None:
        """Send to a rank on this machine. Gives what is left for the group to send: the end of what is large,
        where the other rank has no time for it."""
        def head(here: int) -> tuple[int, int, int, int]:
            """here: bytes in this slot, or less than none: as many come through the group."""
            return self.turn, number, x.nbytes, here

        if x.nbytes <= rings.room:
            rings.put(to, head(x.nbytes), x)
            return None
        data = x.view(-1).view(torch.uint8)
        rest = data[rings.stream(to, data, head):]
        if not len(rest):
            return None
        rings.put(to, head(-len(rest)), None)
        return rest.clone()                      # the model may change it

    def _packed(self, kind: int, number: int, x: Tensor) -> Tensor:
        message = torch.empty(_HEAD + x.nbytes, dtype=torch.uint8)
        message[:_HEAD].view(torch.int64).copy_(torch.tensor([self.turn, kind, number, x.nbytes]))
        message[_HEAD:] = x.view(-1).view(torch.uint8)
        return message

    def receive(self, like: Tensor, device: torch.device, source: int) -> Tensor:
        shape, dtype = tuple(like.shape), like.dtype
        number = self._received[source]
        self._received[source] += 1
        if device.type != "cpu":
            out = torch.empty(shape, dtype=dtype, device=device)
            self._wait(out, source)
            return out
        nbytes = like.numel() * like.element_size()
        if self._rings is not None:
            out = torch.empty(shape, dtype=dtype)
            self._fetch(self._rings, source, number, out)
            return out
        message = torch.empty(_HEAD + nbytes, dtype=torch.uint8)
        while True:
            self._wait(message, source)
            turn, kind, sent, size = message[:_HEAD].view(torch.int64).tolist()
            if turn < self.turn:                 # of a call that this rank has given up
                continue
            if kind == _FAILED:
                raise StageError(self._told(source, turn) or f"pp rank {source} failed.")
            self._check(source, (turn, sent, size), number, nbytes)
            return message[_HEAD:].view(dtype).view(shape)

    def _fetch(self, rings: Rings, source: int, number: int, out: Tensor) -> None:
        """A message of a rank on this machine."""
        left: Tensor | None = out.view(-1).view(torch.uint8)
        if out.nbytes > rings.room and rings.head(source) is None:
            out.zero_()                          # memory is made while there is time
        while left is not None:
            turn, sent, size, here = self._head(rings, source)
            if turn < self.turn:                 # of a call that this rank has given up
                rings.take(source, None)
                if here < 0:
                    self._wait(torch.empty(-here, dtype=torch.uint8), source)
                continue
            if turn > self.turn and (told := self._told(source, self.turn)):
                raise StageError(told)           # it has given up this call, and gone on
            self._check(source, (turn, sent, size), number, out.nbytes)
            rings.take(source, left[:here] if here > 0 else None)
            if here < 0:
                self._wait(left, source)
            left = left[here:] if 0 < here < len(left) else None

    def _head(self, rings: Rings, source: int) -> tuple[int, int, int, int]:
        waiting = Waiting(self.patience, _YIELDING)
        while (head := rings.head(source)) is None:
            rings.flush()
            failed, ask = rings.failed(self.turn, source), waiting.pause()
            if failed is not None and rings.head(source) is None:
                raise StageError(self._told(source, self.turn) or f"pp rank {failed} failed.")
            gone = ask and not lives(rings.pids[source]) and rings.head(source) is None
            if gone or waiting.over:
                raise RankError(f"pp rank {source} " + ("has ended: what it printed says why" if gone else
                                f"sent nothing to pp rank {self.rank} within {self.patience:g} s"))
        return head

    def _check(self, source: int, got: tuple[int, int, int], number: int, nbytes: int) -> None:
        if got != (self.turn, number, nbytes):
            raise RankError(
                f"stages out of step: pp rank {self.rank} expects message {number} of call {self.turn}, "
                f"{nbytes} bytes, from pp rank {source}, and got message {got[1]} of call {got[0]}, {got[2]} "
                "bytes. Every rank must make the same calls with the same inputs."
            )

    def _wait(self, out: Tensor, source: int) -> None:
        try:
            work = dist.irecv(out, group=self.comm.group, group_src=source, tag=_TAG)
            assert work is not None              # None is for ranks outside of the group
            work.wait(timedelta(seconds=self.patience))
        except RuntimeError as error:            # no time left, or the other side is gone
            told = self._told(source, self.turn)
            raise (StageError if told else RankError)(
                told
                or f"pp rank {source} sent nothing to pp rank {self.rank} within {self.patience:g} s, or is "
                f"gone: {str(error).splitlines()[0]}"
            ) from error

    def _told(self, source: int, turn: int) -> str:
        """What a rank said of its failure; "" where it said nothing, or the store is gone."""
        try:
            for rank in (source, *range(self.size)):
                key = f"{turn}/{rank}"
                if self._store.check([key]):
                    return self._store.get(key).decode()
        except RuntimeError:
            pass
        return ""

    def said(self) -> str:
        """What a rank said of its failure in this turn; "" where none did."""
        return self._told(self.rank, self.turn)

    def fail(self, text: str) -> None:
        try:
            self._store.set(f"{self.turn}/{self.rank}", text)
            if self._rings is not None:
                self._rings.fail(self.turn)
                return
            news = self._packed(_FAILED, 0, torch.empty(0, dtype=torch.uint8))
            for peer in range(self.size):
                if peer != self.rank and self.device.type == "cpu":
                    work = dist.isend(news, group=self.comm.group, group_dst=peer, tag=_TAG)
                    self._news.append((work, news))
        except RuntimeError:                     # whoever is gone needs no news
            pass

    def end(self) -> None:
        waiting = Waiting(self.patience)
        while self._rings is not None and not self._rings.flush():
            waiting.pause()
            if self._rings.failed(self.turn, self.rank) is not None or waiting.over:
                told = self._told(self.rank, self.turn)
                raise (StageError if told else RankError)(
                    told or f"a message of pp rank {self.rank} was not taken within {self.patience:g} s")
        pending, self._pending = self._pending, []
        for work, _ in pending:
            try:
                work.wait(timedelta(seconds=self.patience))
            except RuntimeError as error:
                told = self._told(self.rank, self.turn)
                raise (StageError if told else RankError)(
                    told
                    or f"a message of pp rank {self.rank} was not taken: {str(error).splitlines()[0]}"
                ) from error


class ThreadChannel(Channel):
    """Between the threads of `comm.simulate`."""

    def __init__(self, comm: ThreadComm) -> None:
        self.comm, self.rank, self.size = comm, comm.rank, comm.size
        boxes: list[dict[tuple[int, int], queue.Queue]] = comm.exchange({})
        self._boxes, self.device = boxes[0], torch.device("cpu")
        self.begin()

    def _box(self, source: int, to: int) -> queue.Queue:
        return self._boxes.setdefault((source, to), queue.Queue())   # atomic

    def send(self, x: Tensor, to: int) -> None:
        self._box(self.rank, to).put((self.turn, x.detach().clone()))

    def receive(self, like: Tensor, device: torch.device, source: int) -> Tensor:
        box = self._box(source, self.rank)
        for _ in range(int(self.patience * 20)):
            self.comm.check()
            try:
                turn, got = box.get(timeout=0.05)
            except queue.Empty:
                continue
            if turn < self.turn:
                continue
            if isinstance(got, str):
                raise StageError(got)
            if (tuple(got.shape), got.dtype) != (tuple(like.shape), like.dtype):
                raise RankError(f"pp rank {self.rank} expects {list(like.shape)} {like.dtype} from pp rank "
                                f"{source} and got {list(got.shape)} {got.dtype}")
            return got
        raise RankError(f"pp rank {source} sent nothing to pp rank {self.rank} within {self.patience:g} s")

    def fail(self, text: str) -> None:
        for peer in range(self.size):
            if peer != self.rank:
                self._box(self.rank, peer).put((self.turn, text))

    def end(self) -> None:
        pass


def channel(comm: Comm) -> Channel:
    """The channel between the ranks of a communicator."""
    if isinstance(comm, ThreadComm):
        return ThreadChannel(comm)
    assert isinstance(comm, ProcessComm), comm
    return ProcessChannel(comm)


__all__ = ["Channel", "ProcessChannel", "ThreadChannel", "channel"]
