"""Who the ranks are and how they talk: a process group, threads in one process, or nobody (shapes only).

Nothing here is differentiable. Gradients belong to the typed arrows of `collectives.py`; a raw collective on
a tensor that requires grad is refused, because its backward would be wrong without saying so.
"""
from __future__ import annotations

import datetime
import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.constants import default_pg_timeout

from .errors import RankError, ShardStateError
from .mailbox import Mailbox

T = TypeVar("T")
_REDUCE_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class Comm(ABC):
    """`size` ranks, of which this is `rank`. Methods are collective: all ranks call them, in one order."""

    rank: int
    size: int

    @abstractmethod
    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        """The elementwise `op` ("sum", "max", "min") of all ranks' `x`, as a new tensor."""

    @abstractmethod
    def all_gather(self, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        """All ranks' `x` joined along `dim` in rank order; rank r brings `sizes[r]` (they may differ)."""

    @abstractmethod
    def exchange(self, obj: T) -> list[T]:
        """Every rank's (picklable) object, in rank order."""

    @abstractmethod
    def broadcast(self, x: Tensor, src: int) -> Tensor:
        """Rank `src`'s `x`, as a new tensor; the others' `x` gives shape and dtype."""

    def start_sum(self, x: Tensor) -> Callable[[], Any]:
        """Begin to sum all ranks' `x` (contiguous) in place; done when the function returned was called."""
        x.copy_(self.all_reduce(x))
        return lambda: None

    def reduce_scatter(self, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        """The sum of all ranks' `x`, of which rank r keeps its `sizes[r]` along `dim`."""
        return self.all_reduce(x).narrow(dim, sum(sizes[:self.rank]), sizes[self.rank]).clone()

    def __deepcopy__(self, memo: dict[int, Any]) -> Comm:
        """Itself: copies of a model go on talking to the same peers."""
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ShardStateError(
            "a parallelized model can't be pickled: it is one rank's part, tied to its process. Save with "
            "autotp.save(model, path), or call autotp.full_state_dict(model) on every rank and torch.save "
            "what it gives on one."
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank {self.rank} of {self.size})"


def _refuse_grad(x: Tensor) -> None:
    if x.requires_grad and torch.is_grad_enabled():
        raise RuntimeError("a raw collective was called on a tensor that requires grad; its backward depends "
                           "on what the result is used for: use an arrow of autotp.collectives (enter, ...).")


# torch 2.13 renamed both and warns at the old names; 2.9 has only those.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# ---------------------------------------------------------------- processes
_COMBINE: dict[str, Callable[..., Tensor]] = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


def timeout_of(group: dist.ProcessGroup | None) -> float:
    """Seconds that the group's own collectives would wait."""
    backend = group._get_backend(torch.device("cpu")) if group is not None else None
    given = getattr(getattr(backend, "options", None), "_timeout", None)
    return (given or default_pg_timeout).total_seconds()


class ProcessComm(Comm):
    """The ranks of a `torch.distributed` process group (None: the default group).

    CPU tensors of ranks on one machine go through memory that they share (`mailbox.py`), all others through
    the group's backend.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group if group is not None else dist.group.WORLD
        self.rank = dist.get_rank(self.group)
        self.size = dist.get_world_size(self.group)

    @functools.cached_property
    def _mailbox(self) -> Mailbox | None:
        """Made with the other ranks at the first collective that could use it."""
        return Mailbox.open(self, timeout_of(self.group))

    def give_up(self) -> None:
        """Come to no collective any more: the others' waiting in shared memory for this rank ends."""
        if mailbox := self.__dict__.get("_mailbox"):
            mailbox.give_up()

    def _shared(self, x: Tensor) -> Mailbox | None:
        """The way through shared memory, where `x` can take it."""
        fits = x.device.type == "cpu" and not isinstance(x, FakeTensor) and not torch.compiler.is_compiling()
        return self._mailbox if fits and self.size > 1 else None

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        _refuse_grad(x)
        if mailbox := self._shared(x):
            return mailbox.all_reduce(x.contiguous(), _COMBINE[op])
        out = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(out, op=_REDUCE_OPS[op], group=self.group)
        return out

    def all_gather(self, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        _refuse_grad(x)
        before, after = x.shape[:dim % x.dim()], x.shape[dim % x.dim() + 1:]
        if mailbox := self._shared(x):
            shapes = [torch.Size((*before, n, *after)) for n in sizes]
            return mailbox.all_gather(x.contiguous(), shapes, dim)
        dim, longest = dim % x.dim(), max(sizes)
        if x.shape[dim] < longest:       # no backend gathers unequal sizes: pad to the longest, and cut after
            x = torch.cat([x, x.new_zeros(*before, longest - x.shape[dim], *after)], dim)
        parts = x.new_empty(self.size, *x.shape)
        _all_gather_single(parts.flatten(0, 1), x.contiguous(), group=self.group)
        return torch.cat([part.narrow(dim, 0, n) for part, n in zip(parts, sizes, strict=True)], dim)

    def reduce_scatter(self, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        _refuse_grad(x)
        if min(sizes) < max(sizes):
            return super().reduce_scatter(x, dim, sizes)
        out = x.movedim(dim, 0).contiguous()
        own = out.new_empty(sizes[0], *out.shape[1:])
        _reduce_scatter_single(own, out, group=self.group)
        return own.movedim(0, dim)

    def start_sum(self, x: Tensor) -> Callable[[], Any]:
        _refuse_grad(x)
        work = dist.all_reduce(x, group=self.group, async_op=True)
        assert work is not None                  # None is for ranks outside of the group
        return work.wait

    def exchange(self, obj: T) -> list[T]:
        out: list[Any] = [None] * self.size
        dist.all_gather_object(out, obj, group=self.group)
        return out

    def broadcast(self, x: Tensor, src: int) -> Tensor:
        _refuse_grad(x)
        out = x.clone(memory_format=torch.contiguous_format)
        dist.broadcast(out, src=dist.get_global_rank(self.group, src) if self.group is not None else src,
                       group=self.group)
        return out

    def split(self, groups: Sequence[Sequence[int]]) -> ProcessComm:
        """Among the ranks of the group that this one is in; every rank is in one, and all call it alike."""
        ranks = next(group for group in groups if self.rank in group)
        assert self.group is not None
        world = [dist.get_global_rank(self.group, rank) for rank in ranks]
        patience = datetime.timedelta(seconds=timeout_of(self.group))
        return ProcessComm(dist.new_group(world, patience, use_local_synchronization=True))


# ---------------------------------------------------------------- nobody
class ShapeComm(Comm):
    """A rank without peers: results have the right shapes, the others' values are missing (taken as zero).

    For fake and meta tensors, and, as `ShapeComm(0, 1)`, the exact communicator of a single process.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        _refuse_grad(x)
        return x.clone(memory_format=torch.contiguous_format)

    def all_gather(self, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        _refuse_grad(x)
        shape = list(x.shape)

        def zeros(n: int) -> Tensor:
            shape[dim] = n
            return x.new_zeros(shape)

        return torch.cat([x if rank == self.rank else zeros(n) for rank, n in enumerate(sizes)], dim)

    def exchange(self, obj: T) -> list[T]:
        return [obj] * self.size

    def broadcast(self, x: Tensor, src: int) -> Tensor:
        return x.clone()


# ---------------------------------------------------------------- threads
class _Stopped(BaseException):
    """Another rank failed: this one ends quietly (past any `except Exception`), that one reports."""


class _Meeting:
    """Where the threads of one simulation meet: each brings a value, the last one combines them for all."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.brought: dict[int, tuple[str, Any]] = {}
        self.round = 0
        self.result: Any = None
        self.gone: set[int] = set()              # ranks whose function has returned
        self.failure: tuple[int, BaseException] | None = None     # the first one, with its rank
        self.parts: list[tuple[_Meeting, Sequence[int]]] = []     # of some of the ranks, with who they are

    def divide(self, groups: Sequence[Sequence[int]]) -> list[_Meeting]:
        """A meeting for each group of ranks; what ends a rank here ends it there."""
        made = [_Meeting(len(ranks)) for ranks in groups]
        self.parts += zip(made, groups, strict=True)
        return made

    def meet(self, rank: int, what: str, value: Any, combine: Callable[[list[Any]], Any]) -> Any:
        with self.changed:
            self._stop_if_failed()
            self.brought[rank] = (what, value)
            if len(self.brought) == self.size:
                self._combine(rank, combine)
            elif self.gone:
                self._fail_waiting()
                self._stop_if_failed()
            else:
                started = self.round
                self.changed.wait_for(lambda: self.round > started or self.failure is not None)
                # A failure after the round was completed belongs to the next meeting.
                if self.round == started:
                    self._stop_if_failed()
            return self.result

    def leave(self, rank: int) -> None:
        """`rank` has returned: nobody may wait for it any more."""
        with self.changed:
            self.gone.add(rank)
            if self.brought:
                self._fail_waiting()
            parts = list(self.parts)
        for part, ranks in parts:
            if rank in ranks:
                part.leave(ranks.index(rank))

    def fail(self, rank: int, error: BaseException) -> None:
        """Rank `rank` met `error`: the others stop at their next meeting."""
        with self.changed:
            self.failure = self.failure or (rank, error)
            self.changed.notify_all()
            parts = list(self.parts)
        for part, _ in parts:
            part.fail(rank, error)

    def _combine(self, rank: int, combine: Callable[[list[Any]], Any]) -> None:
        calls = [self.brought[r] for r in range(self.size)]
        try:
            if len({what for what, _ in calls}) > 1:
                said = "; ".join(f"rank {r} calls {what}" for r, (what, _) in enumerate(calls))
                raise RankError(f"the ranks meet in different collectives: {said}. "
                                "Every rank must run the same operations on the same shapes.")
            with torch.no_grad():
                self.result = combine([value for _, value in calls])
        except Exception as error:
            self.fail(rank, error)
            raise
        self.brought = {}
        self.round += 1
        self.changed.notify_all()

    def _fail_waiting(self) -> None:
        rank, (what, _) = next(iter(self.brought.items()))
        self.fail(rank, RankError(f"rank {rank} waits in {what}, but rank {min(self.gone)} has already "
                                  "returned; every rank must run the same collectives."))

    def _stop_if_failed(self) -> None:
        if self.failure is not None:
            raise _Stopped from self.failure[1]


class ThreadComm(Comm):
    """One of the simulated ranks of `simulate`: exact, and checked (mismatched calls are errors)."""

    def __init__(self, rank: int, size: int, meeting: _Meeting) -> None:
        self.rank, self.size, self._meeting = rank, size, meeting

    def all_reduce(self, x: Tensor, op: str = "sum") -> Tensor:
        _refuse_grad(x)
        what = f"all_reduce({op}, {list(x.shape)}, {x.dtype})"
        combine = functools.partial(functools.reduce, _COMBINE[op])
        return self._meeting.meet(self.rank, what, x.detach(), combine).clone()

    def all_gather(self, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        _refuse_grad(x)
        rest = [n for d, n in enumerate(x.shape) if d != dim % x.dim()]
        if x.shape[dim] != sizes[self.rank]:
            raise RankError(f"rank {self.rank} brings {x.shape[dim]} to an all_gather that expects "
                            f"{sizes[self.rank]}")
        what = f"all_gather(dim {dim % x.dim()}, sizes {list(sizes)}, others {rest}, {x.dtype})"
        return self._meeting.meet(self.rank, what, x.detach(), lambda xs: torch.cat(xs, dim)).clone()

    def exchange(self, obj: T) -> list[T]:
        return list(self._meeting.meet(self.rank, "exchange", obj, list))

    def check(self) -> None:
        """End this rank, too, where another one has failed."""
        self._meeting._stop_if_failed()

    def broadcast(self, x: Tensor, src: int) -> Tensor:
        _refuse_grad(x)
        what = f"broadcast({list(x.shape)}, {x.dtype}, from {src})"
        return self._meeting.meet(self.rank, what, x.detach(), lambda xs: xs[src].clone()).clone()

    def split(self, groups: Sequence[Sequence[int]]) -> ThreadComm:
        """Among the ranks of the group that this one is in; every rank is in one, and all call it alike."""
        made = self._meeting.meet(self.rank, f"split({groups})", None,
                                  lambda _: self._meeting.divide(groups))
        mine, ranks = next((m, g) for m, g in zip(made, groups, strict=True) if self.rank in g)
        return ThreadComm(ranks.index(self.rank), len(ranks), mine)


def simulate(size: int, fn: Callable[[Comm], T]) -> list[T]:
    """Run `fn(comm)` as `size` ranks, each in a thread of this process, and return the results in rank order.

    Threads start with the caller's grad mode, and CPU backward runs in the thread that asks for it. The first
    exception of a rank ends the others and is raised here, with a note that names the rank (Python 3.11).
    torch's random generator is one for all threads: seeded randomness (dropout) is not reproducible in here.
    """
    meeting = _Meeting(size)
    results: list[Any] = [None] * size
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    def run(rank: int) -> None:
        try:
            with torch.inference_mode(inference), torch.set_grad_enabled(grad):
                results[rank] = fn(ThreadComm(rank, size, meeting))
        except BaseException as error:
            meeting.fail(rank, error)
        else:
            meeting.leave(rank)

    threads = [threading.Thread(target=run, args=(r,), name=f"rank {r}", daemon=True) for r in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if meeting.failure is not None:
        rank, error = meeting.failure
        if hasattr(error, "add_note"):
            error.add_note(f"on rank {rank} of {size}")
        raise error
    return results
