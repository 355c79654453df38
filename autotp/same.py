"""What ranks must hold alike: the weights before they are split, the batches afterwards, outcomes."""

from __future__ import annotations

import hashlib
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from .comm import Comm
from .errors import RankError
from .lazy import LazyTensor
from .nested import tensors_in
from .quantised import components, is_packed

PLACES = 8191  # different ones


def same_weights(model: nn.Module, comm: Comm) -> None:
    """Give every rank rank 0's values where the ranks' models differ (heads initialised with different
    seeds), and say so."""
    if comm.size == 1:
        return
    tensors: dict[str, Tensor] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device.type != "meta" and not is_packed(tensor):
            tensors[name] = tensor
        elif is_packed(tensor):  # one that is still to be read is the same file's on every rank
            inner = {f"{name}.{part}": t for part, t in components(tensor).items()}
            tensors |= {part: t for part, t in inner.items() if not isinstance(t, LazyTensor)}
    told = comm.exchange({name: fingerprint(t) for name, t in tensors.items()})
    differing = [name for name in tensors if len({prints.get(name) for prints in told}) > 1]
    for name in differing:
        tensor = tensors[name].detach()
        tensor.copy_(comm.broadcast(tensor, 0))
    if differing and comm.rank == 0:
        warnings.warn(
            f"{len(differing)} tensors differed between the ranks (first: {differing[0]}); all ranks now "
            "have rank 0's. "
            "Seed the ranks alike, or load the same checkpoint, to avoid this.",
            stacklevel=4,
        )


def fingerprint(tensor: Tensor) -> str:
    """A short text that is the same for equal tensors, and hardly ever for others."""
    values = tensor.detach()
    if values.is_floating_point() or values.is_complex():
        # Two sums that depend on values and places: enough to see differently seeded tensors, without moving
        # them. A block at a time: in double precision a tensor is four times what it was.
        flat = torch.view_as_real(values).flatten() if values.is_complex() else values.flatten()
        places = torch.arange(PLACES, dtype=torch.float64, device=flat.device)
        places = places.repeat(32 if flat.device.type == "cpu" else 2048)
        sums = torch.zeros(2, dtype=torch.float64, device=flat.device)
        for block in flat.split(len(places)):
            wide = block.double()
            sums += torch.stack([wide.sum(), wide.dot(places[: len(wide)])])
        return f"{tuple(values.shape)} {values.dtype} {sums.tolist()}"
    digest = hashlib.sha256(values.cpu().contiguous().numpy().tobytes()).hexdigest()
    return f"{tuple(values.shape)} {values.dtype} {digest[:16]}"


@dataclass
class SameBatch:
    """Before a forward of the root: `comm`'s ranks, which work on one batch, do so in one mode (with or
    without gradients, training or not), and in training were given the same.

    Comparing costs a look at the inputs and one exchange of a short text. So it is done at the first forward
    in a mode, and in training at the forwards 1, 2, 4, 8, ... of it: a data loader that shuffles by rank is
    met at the first, one that drifts apart soon after.
    """

    comm: Comm
    count: int = 0
    mode: str = ""

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            return
        grad, mode = torch.is_grad_enabled(), _mode(module)
        if mode == self.mode and not grad:
            return  # one token after another
        named = [*tensors_in(list(args), "argument"), *tensors_in(kwargs)]
        if any(isinstance(t, FakeTensor) or t.device.type == "meta" for _, t in named):
            return
        self.count = self.count + 1 if mode == self.mode else 1
        self.mode = mode
        if self.count & (self.count - 1) == 0:
            # a compiled model calls its hooks too
            torch.compiler.disable(same_batch)(dict(named) if grad else {}, self.comm, mode)


def _mode(module: nn.Module) -> str:
    gradients = "with gradients" if torch.is_grad_enabled() else "without gradients (under no_grad)"
    return f"{gradients}, in {'training' if module.training else 'eval'} mode"


def same_batch(batch: dict[str, Tensor], comm: Comm, mode: str = "") -> None:
    """RankError, on every rank, where `comm`'s ranks hold different tensors, or call the model in another
    mode."""
    told = comm.exchange((mode, {name: fingerprint(t) for name, t in batch.items()}))
    (first_mode, first), *_ = told
    for rank, (its_mode, prints) in enumerate(told):
        if its_mode != first_mode:
            raise RankError(
                f"rank {rank} of {comm.size} calls the model {its_mode}, rank 0 {first_mode}. These ranks "
                "run one model together, backward included: all must call it alike."
            )
        differing = [n for n in sorted({*first, *prints}) if first.get(n) != prints.get(n)]
        if differing:
            name = differing[0]
            raise RankError(
                f"rank {rank} of {comm.size} was given another batch than rank 0: {name} is "
                f"{prints.get(name, 'missing')}, on rank 0 {first.get(name, 'missing')}. These ranks work "
                "on one batch together: let each load part `i` of `n` of the data, "
                "`i, n = autotp.data_rank(model)`, with the same seed."
            )


# ---------------------------------------------------------------- one outcome on all ranks
def agree(comm: Comm, outcome: str | BaseException) -> None:
    """Make sure that all ranks stand at the same point with the same `outcome`, before what can't be undone.

    `outcome` is a text that must be equal on all ranks (a digest or a printed plan), or the exception that
    this rank met instead. Either all ranks return, or all raise RankError: with the failed ranks and the
    first one's error, or with the ranks that differ and the first line in which they do. Never hangs while
    every rank calls it.
    """
    failed = isinstance(outcome, BaseException)
    text = f"{type(outcome).__name__}: {outcome}" if failed else outcome
    told = comm.exchange((failed, text))
    failures = [(rank, said) for rank, (bad, said) in enumerate(told) if bad]
    if failures:
        ranks = ", ".join(str(rank) for rank, _ in failures)
        message = f"failed on rank {ranks} of {comm.size}; rank {failures[0][0]} says: {failures[0][1]}"
        raise RankError(message) from (outcome if isinstance(outcome, BaseException) else None)
    groups: dict[Any, list[int]] = {}
    for rank, (_, said) in enumerate(told):
        groups.setdefault(said, []).append(rank)
    if len(groups) > 1:
        (one, one_ranks), (two, two_ranks) = list(groups.items())[:2]
        raise RankError(f"the ranks disagree: rank {_names(one_ranks)} has {_difference(one, two)}, rank "
                        f"{_names(two_ranks)} has {_difference(two, one)}. Give every rank the same model, "
                        "inputs, policy and versions.")


def _names(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


def _difference(text: str, other: str) -> str:
    """The first line of `text` that is not the same in `other`."""
    lines, others = text.splitlines() or [""], other.splitlines() or [""]
    for number, line in enumerate(lines):
        if number >= len(others) or line != others[number]:
            return repr(line) if len(lines) == 1 else f"{line.strip()!r} (line {number + 1})"
    return f"nothing after line {len(lines)}"
