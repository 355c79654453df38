"""Copies of a model that see different data: their gradients are averaged while backward goes on.

As torch's DistributedDataParallel does it, without its wrapper: gradients are summed in buckets, each sent as
soon as all of its gradients are there, in the same order on every rank. Here whole `.grad`s are averaged;
what was in them before was averaged too (the same on all ranks), or gathered under `no_sync`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from .comm import Comm
from .errors import AutotpError
from .gradients import MarkGrad, plain
from .nested import map_tensors
from .pipeline.absent import is_missing

FIRST_BUCKET = 2**20  # bytes; small, so that sending begins early
BUCKET = 25 * 2**20


@dataclass(eq=False)
class Bucket:
    """Gradients that go in one message. waiting: how many are still to come in this backward."""

    params: list[nn.Parameter]
    waiting: int = 0
    flat: Tensor | None = None
    wait: Callable[[], Any] | None = None
    stale: bool = False  # a gradient changed after it was sent

    def send(self, comm: Comm) -> None:
        """Begin to sum the averages' shares. A gradient that is not there counts as zero."""
        grads = [torch.zeros_like(p) if p.grad is None else plain(p.grad) for p in self.params]
        self.flat = torch.cat([grad.reshape(-1) for grad in grads]).div_(comm.size)
        self.wait = comm.start_sum(self.flat)

    def averages(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        assert self.flat is not None and self.wait is not None
        self.wait()
        parts = self.flat.split([p.numel() for p in self.params])
        for param, part in zip(self.params, parts, strict=True):
            yield param, part.view(param.shape)

    def reset(self) -> None:
        self.waiting, self.flat, self.wait, self.stale = len(self.params), None, None, False


@dataclass(eq=False)
class Averager:
    """Averages the gradients of `params` over `comm`, by hooks on them.

    active: False under `no_sync`. seen: parameters that got a gradient since the last average.
    """

    comm: Comm
    params: list[nn.Parameter]
    active: bool = True
    buckets: list[Bucket] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)
    handles: list[Any] = field(default_factory=list)
    begun: bool = False
    sent: int = 0  # buckets, in order

    def __post_init__(self) -> None:
        self.buckets = list(_buckets(self.params))
        self._bucket_of = {id(p): bucket for bucket in self.buckets for p in bucket.params}
        self.handles = [p.register_post_accumulate_grad_hook(self._arrived) for p in self.params]
        self.reset()

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None  # a copied model makes its own at its first forward

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    def reset(self) -> None:
        self.begun, self.sent = False, 0
        for bucket in self.buckets:
            bucket.reset()

    def begin(self, grad: Tensor | None = None) -> None:
        """A backward has reached this model: finish when it ends. As a hook of the model's outputs this runs
        in the outermost backward, where checkpointed parts run backwards of their own inside."""
        if self.active and not self.begun:
            self.begun = True
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)

    def _arrived(self, param: Tensor) -> None:
        self.seen.add(id(param))
        if not self.active:
            return
        self.begin()
        if param.grad is not None and param.grad.is_sparse:
            raise AutotpError("a sparse gradient (nn.Embedding(sparse=True)) can't be averaged over dp; use "
                              "sparse=False.")
        bucket = self._bucket_of[id(param)]
        if bucket.wait is not None:
            bucket.stale = True
        bucket.waiting -= 1
        while self.sent < len(self.buckets) and self.buckets[self.sent].waiting <= 0:
            self._send()

    def _send(self) -> None:
        self.buckets[self.sent].send(self.comm)
        self.sent += 1

    @torch.no_grad()
    def finish(self) -> None:
        """Average what is left, and put the averages into the gradients that any rank has."""
        while self.sent < len(self.buckets):
            self._send()
        facts = [id(p) in self.seen for p in self.params] + [bucket.stale for bucket in self.buckets]
        own = torch.tensor(facts, dtype=torch.int32, device=self.params[0].device)
        told = self.comm.all_reduce(own, "max").tolist()
        used = {id(p) for p, yes in zip(self.params, told, strict=False) if yes}
        for bucket, stale in zip(self.buckets, told[len(self.params):], strict=True):
            if stale:
                for _ in bucket.averages():  # what was sent too early is let go
                    pass
                bucket.send(self.comm)
            for param, average in bucket.averages():
                if id(param) in used:
                    _put(param, average)
        self.seen.clear()
        self.reset()


def _buckets(params: list[nn.Parameter]) -> Iterator[Bucket]:
    """The last parameters first: their gradients come first."""
    groups: dict[Any, list[nn.Parameter]] = {}
    limits: dict[Any, int] = {}
    for param in reversed(params):
        kind = (param.device, param.dtype)
        group = groups.setdefault(kind, [])
        group.append(param)
        if sum(p.nbytes for p in group) >= limits.setdefault(kind, FIRST_BUCKET):
            yield Bucket(groups.pop(kind))
            limits[kind] = BUCKET
    for group in groups.values():
        yield Bucket(group)


def _put(param: nn.Parameter, average: Tensor) -> None:
    if param.grad is not None:
        plain(param.grad).copy_(average)
        return
    param.grad = average.clone()  # this rank had none
    for hook in (param._post_accumulate_grad_hooks or {}).values():
        if isinstance(hook, MarkGrad):
            hook(param)


@dataclass(eq=False)
class Replica:
    """The hooks on a model that is one of `comm.size` copies: `install`."""

    cuts = False  # every copy holds all

    comm: Comm
    averager: Averager | None = None
    active: bool = True

    def install(self, model: nn.Module) -> None:
        model.register_forward_pre_hook(self._before)
        model.register_forward_hook(self._after)
        self._before(model, ())

    def _before(self, model: nn.Module, args: Any) -> None:
        """Watch the parameters that are trained now: some may be new, frozen, copied or replaced."""
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        params = [p for p in model.parameters() if p.requires_grad and not is_missing(p)]
        if any(isinstance(p, FakeTensor) for p in params):
            return
        old = self.averager
        if old is not None and [id(p) for p in old.params] == [id(p) for p in params]:
            if torch._C._current_graph_task_id() == -1:  # a backward that failed has left it begun
                old.reset()
            return
        if old is not None:
            old.remove()
        self.averager = Averager(self.comm, params, self.active) if params else None

    def _after(self, model: nn.Module, args: Any, output: Any) -> None:
        averager = self.averager
        if averager is None or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return

        def watch(tensor: Tensor) -> Tensor:
            if tensor.requires_grad:
                tensor.register_hook(averager.begin)
            return tensor

        map_tensors(output, watch)

    def __deepcopy__(self, memo: dict[int, Any]) -> Replica:
        return Replica(self.comm, None, self.active)

    @property
    def pending(self) -> bool:
        """Whether there are gradients that wait to be averaged."""
        held = self.averager
        return held is not None and any(p.grad is not None and id(p) in held.seen for p in held.params)

    def average(self, params: list[nn.Parameter]) -> None:
        """Average the gradients that are there now; `params`: those that have one."""
        if self.averager is not None:
            self.averager.seen.update(id(p) for p in params)
            self.averager.finish()

    def in_stages(self, once: bool) -> AbstractContextManager[None]:
        """A step of a pipeline's schedule: gradients are averaged after it (`average`)."""
        return self.paused()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Backwards in here only accumulate."""
        self.active = False
        if self.averager is not None:
            self.averager.active = False
        try:
            yield
        finally:
            self.active = True
            if self.averager is not None:
                self.averager.active = True
