"""Sums, means and extremes over a gradient that is spread over ranks, and what can't be had of it.

An element that several slots hold counts once, by its weight. What looks across elements in any other way
(a product of matrices, a mean along one dim, a sort) would see one rank's part and give a number that looks
right: that is an error, which names the way out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from .comm import Comm
from .errors import ShardStateError


class Spread(Protocol):
    """Where the elements are: `gradients.Spread`."""

    @property
    def comms(self) -> tuple[Comm, ...]: ...
    @property
    def weights(self) -> Tensor | None: ...


Answer = Callable[[Tensor, Spread], Tensor]


def total(local: Tensor, spread: Spread) -> Tensor:
    """The sum of all elements, each once; integers and bools are counted in int64."""
    wide = local if local.is_floating_point() or local.is_complex() else local.long()
    if spread.weights is not None:
        summed = (wide * spread.weights.to(wide.device)).sum()
        wide = summed.to(wide.dtype) if wide.is_floating_point() or wide.is_complex() else summed
    return _over_ranks(wide.sum(), spread, "sum").to(local.sum().dtype)


def mean(local: Tensor, spread: Spread) -> Tensor:
    return total(local, spread) / total(torch.ones_like(local), spread)


def largest(local: Tensor, spread: Spread) -> Tensor:
    return _over_ranks(local.amax() if local.numel() else _limit(local, "min"), spread, "max")


def smallest(local: Tensor, spread: Spread) -> Tensor:
    return _over_ranks(local.amin() if local.numel() else _limit(local, "max"), spread, "min")


def _limit(local: Tensor, which: str) -> Tensor:
    """What a rank without elements brings: the least, or the most, that the dtype holds."""
    kind = torch.finfo if local.is_floating_point() else torch.iinfo
    return local.new_full((), getattr(kind(local.dtype), which))


def any_of(local: Tensor, spread: Spread) -> Tensor:
    return _over_ranks(local.any().int(), spread, "max").bool()


def all_of(local: Tensor, spread: Spread) -> Tensor:
    return _over_ranks(local.all().int(), spread, "min").bool()


def _over_ranks(value: Tensor, spread: Spread, op: str) -> Tensor:
    for comm in spread.comms:
        value = comm.all_reduce(value.reshape(1), op)[0]
    return value


# By the name of torch's function or method: of all elements at once.
ANSWERS: dict[str, Answer] = {
    "sum": total,
    "mean": mean,
    "max": largest,
    "amax": largest,
    "min": smallest,
    "amin": smallest,
    "any": any_of,
    "all": all_of,
}
# These look across elements: of a part they give something else.
NEEDS_WHOLE = frozenset(
    "matmul __matmul__ __rmatmul__ mm bmm mv dot vdot inner addmm addmv baddbmm einsum tensordot linear "
    "norm vector_norm linalg_vector_norm matrix_norm std var std_mean var_mean median nanmedian mode "
    "quantile nanquantile nansum nanmean prod logsumexp softmax log_softmax cumsum cumprod cummax "
    "cummin sort msort argsort topk kthvalue argmax argmin aminmax histc unique cat concat concatenate "
    "stack hstack vstack linalg_svd linalg_qr linalg_eigh linalg_inv svd qr trace diagonal "
    "cosine_similarity count_nonzero".split()
)
# The same elements in other places.
RESHAPES = frozenset(
    "view reshape flatten ravel t T mT transpose permute movedim unsqueeze squeeze view_as reshape_as".split()
)


def name_of(func: Any) -> str:
    """`sum` of torch.sum and Tensor.sum; `T` of the property."""
    name = getattr(func, "__name__", "")
    return getattr(getattr(func, "__self__", None), "__name__", name) if name == "__get__" else name


def over_all(dims: Any, n: int) -> bool:
    """Whether `dims` (None, an int or several) are all of `n` dims."""
    if dims is None or (isinstance(dims, Sequence) and not dims):
        return True
    asked = {dims} if isinstance(dims, int) else set(dims)
    return len({d % max(n, 1) for d in asked}) == n


def refuse(name: str) -> None:
    """Raise ShardStateError for a function that needs the whole gradient."""
    raise ShardStateError(
        f"{name} of a gradient that is spread over ranks: each rank has only a part of it, and would get "
        "another number than the whole model's. Sums, means, extremes and norms over all of it are the "
        "whole's, and elementwise functions work; for more, gather it (autotp.state.gather(grad, layout, "
        "comm)). An optimizer that looks across a whole weight (Adafactor, Muon, LBFGS, Shampoo) can't "
        "step a part: use one that works by element (AdamW, SGD, Lion), or keep the weights that it steps"
        " whole with a policy."
    )
