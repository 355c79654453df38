"""What the parallel leaf modules share: what they know of their split, how they show it."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from .. import collectives
from ..comm import Comm
from ..errors import LayerError
from ..layouts import Layout, ParamLayout, check, local_size, take, whole_size
from ..quantised import is_packed, put_in, take_packed

Layouts = dict[str, ParamLayout]
REDUCE: dict[str | None, Callable[[Tensor, Comm], Tensor]] = {
    "reduce": collectives.reduce,
    "reduce_enter": collectives.reduce_enter,
    None: lambda x, comm: x,
}


@dataclass(frozen=True)
class Tp:
    """What a parallel module knows of its split: `module.tp`."""
    comm: Comm
    layout: Layout                    # of the sharded axis: features, groups, rows, heads
    enter: bool = False               # the input's gradient is all-reduced
    gather: bool = False              # the output is made whole
    partial: bool = False             # of a gathered output: the gradient is the ranks' sum
    reduce: str | None = None         # of a partial output: "reduce", "reduce_enter", or left partial

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """This rank's ranges of the sharded axis."""
        return self.layout[self.comm.rank]

    def describe(self, what: str) -> str:
        """For `print(model)`: how much of `what` is here."""
        return (f"{what} {local_size(self.ranges)} of {whole_size(self.layout)}, "
                f"tp rank {self.comm.rank}/{self.comm.size}")


class Parallel:
    """What the parallel classes share."""
    tp: Tp
    tp_axis: str

    def extra_repr(self) -> str:
        own = super().extra_repr()  # type: ignore[misc]
        return ", ".join(s for s in (own, self.tp.describe(self.tp_axis)) if s)


def gathered(y: Tensor, dim: int, tp: Tp) -> Tensor:
    """A column's output: made whole where the split says so."""
    if not tp.gather:
        return y
    return (collectives.gather_enter if tp.partial else collectives.gather)(y, dim, tp.layout, tp.comm)


def check_reduce(reduce: str | None) -> None:
    """LayerError for what is no way to reduce a partial output."""
    if reduce not in REDUCE:
        raise LayerError(f"reduce={reduce!r} is not one of {list(REDUCE)}")


def _subclass(mixin: Any, original: Any, name: str) -> Any:
    """`mixin` in front of `original`; one class per pair, so that equal modules have equal types."""
    doc = f"{original.__name__}, tensor-parallel."
    return type(name, (mixin, original), {"__module__": __name__, "__doc__": doc})


subclass: Callable[[Any, Any, str], Any] = cache(_subclass)


def shard_parameter(param: Tensor, layout: ParamLayout, rank: int) -> None:
    """Replace a parameter's (or buffer's) data with this rank's part, keeping the object (hooks, ties).

    Does nothing when it has the local shape already (a tied parameter that was sharded under its other name).
    LayerError when it has neither shape.
    """
    shape = tuple(param.shape)
    if shape == layout.local_shape(rank) and shape != layout.shape:
        return
    if shape != layout.shape:
        raise LayerError(f"a parameter of shape {shape} is neither whole {layout.shape} nor this rank's "
                         f"{layout.local_shape(rank)}; it was split another way under another name.")
    if is_packed(param):
        put_in(param, take_packed(param, layout, rank))
        return
    # A clone even of a view: the whole tensor's memory must go.
    grad, param.grad = param.grad, None
    param.data = take(param.data, layout, rank).clone(memory_format=torch.contiguous_format)
    if grad is not None:                 # of micro-batches before the split
        param.grad = take(grad, layout, rank).clone(memory_format=torch.contiguous_format)


def shard_parameters(module: nn.Module, splits: dict[str, tuple[int, int, Layout]], comm: Comm) -> Layouts:
    """Shard a module's parameters, where they exist, in one dim each: `{name: (dim, whole size, layout)}`."""
    made: Layouts = {}
    for name, (dim, size, layout) in splits.items():
        param = getattr(module, name, None)
        if param is None:
            continue
        shape = (*param.shape[:dim], size, *param.shape[dim + 1:])     # a tied parameter may be local already
        check(layout, size, comm.size, f"dim {dim} of {type(module).__name__}.{name}")
        made[name] = ParamLayout(shape, {dim: layout})
        shard_parameter(param, made[name], comm.rank)
    return made
