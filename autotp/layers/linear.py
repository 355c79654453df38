"""Column- and row-parallel linears: nn.Linear, its subclasses, and linears with a transposed weight."""
from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from .. import collectives
from ..comm import Comm
from ..errors import LayerError
from ..layouts import Layout, is_partition, local_size
from .base import REDUCE, Layouts, Parallel, Tp, check_reduce, gathered, shard_parameters, subclass


class _Column(Parallel):
    """Output features sharded; the forward of the module's own class, on local weights."""
    tp_axis = "out"

    def forward(self, x: Tensor) -> Tensor:
        tp = self.tp
        y = super().forward(collectives.enter(x, tp.comm) if tp.enter else x)  # type: ignore[misc]
        return gathered(y, -1, tp)


class _Row(Parallel):
    """Input features sharded; the local product is partial, the whole bias is added once."""
    tp_axis = "in"
    bias: Any

    def forward(self, x: Tensor) -> Tensor:
        tp, bias = self.tp, self.bias
        y = self.product(x)
        if tp.reduce is None:
            return y if bias is None else y + collectives.once(bias, tp.comm)
        if bias is None:
            return REDUCE[tp.reduce](y, tp.comm)
        # The bias comes before `enter`: its gradient is whole.
        y = collectives.reduce(y, tp.comm) + bias
        return y if tp.reduce == "reduce" else collectives.enter(y, tp.comm)

    def product(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class _RowOwnForward(_Row):
    """A class with its own forward, linear in input and bias together: it sees the bias on rank 0 only."""
    _parameters: dict[str, Any]

    def forward(self, x: Tensor) -> Tensor:
        tp, bias = self.tp, self._parameters.get("bias")
        if bias is None:
            return REDUCE[tp.reduce](super(_Row, self).forward(x), tp.comm)  # type: ignore[misc]
        try:
            self._parameters["bias"] = collectives.once(bias, tp.comm)
            y = super(_Row, self).forward(x)  # type: ignore[misc]
        finally:
            self._parameters["bias"] = bias
        return REDUCE[tp.reduce](y, tp.comm)


class ColumnParallelLinear(_Column, nn.Linear):
    """nn.Linear with its output features sharded."""


class RowParallelLinear(_Row, nn.Linear):
    """nn.Linear with its input features sharded."""

    def product(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class _RowTransposed(_Row):
    weight: Tensor

    def product(self, x: Tensor) -> Tensor:
        return x @ self.weight


def is_transposed(module: nn.Module) -> bool:
    """True for a linear that keeps its weight as [in, out] (transformers' Conv1D), told by its size `nf`."""
    weight = getattr(module, "weight", None)
    return (not isinstance(module, nn.Linear) and isinstance(weight, Tensor) and weight.dim() == 2
            and isinstance(getattr(module, "nf", None), int))


def make_column(module: Any, layout: Layout, comm: Comm, gather_output: bool = False,
                enter: bool = True, partial: bool = False) -> Layouts:
    """Shard a linear's output features: `[..., in] -> [..., local out]`, or whole with `gather_output`.

    `enter`: the input is replicated with a whole gradient, and its gradient is all-reduced here. Without it
    the caller has done that. `partial`: the gradient of the gathered output is still to be summed over the
    ranks. nn.Linear and its subclasses, and linears with a transposed weight; LayerError otherwise.
    """
    transposed = _linear_kind(module)
    out_dim = 1 if transposed else 0
    size = module.nf if transposed else module.out_features
    made = shard_parameters(module, {"weight": (out_dim, size, layout), "bias": (0, size, layout)}, comm)
    setattr(module, "nf" if transposed else "out_features", local_size(layout[comm.rank]))
    if type(module) is nn.Linear:
        module.__class__ = ColumnParallelLinear
    else:
        module.__class__ = subclass(_Column, type(module), f"ColumnParallel{type(module).__name__}")
    module.tp = Tp(comm, layout, enter=enter, gather=gather_output, partial=partial)
    return made


def make_row(module: Any, layout: Layout, comm: Comm, reduce: str | None = "reduce") -> Layouts:
    """Shard a linear's input features: `[..., local in] -> [..., out]`, the whole bias added once.

    `reduce`: "reduce" when all that follows is replicated, "reduce_enter" when only sharded values use the
    result, None to leave it partial. A subclass with a forward of its own must be linear in input and bias
    together. LayerError for what is no linear.
    """
    transposed = _linear_kind(module)
    check_reduce(reduce)
    if not is_partition(layout):
        raise LayerError("a row's input features must be held once each: the sum would count them twice")
    in_dim = 0 if transposed else 1
    size = getattr(module, "nx" if transposed else "in_features", module.weight.shape[in_dim])
    made = shard_parameters(module, {"weight": (in_dim, size, layout)}, comm)
    if not transposed or hasattr(module, "nx"):
        setattr(module, "nx" if transposed else "in_features", local_size(layout[comm.rank]))
    if type(module) is nn.Linear:
        module.__class__ = RowParallelLinear
    else:
        plain = transposed or type(module).forward is nn.Linear.forward
        mixin = (_RowTransposed if transposed else RowParallelLinear) if plain else _RowOwnForward
        module.__class__ = subclass(mixin, type(module), f"RowParallel{type(module).__name__}")
    module.tp = Tp(comm, layout, reduce=reduce)
    return made


def _linear_kind(module: Any) -> bool:
    """Whether the weight is transposed; LayerError when the module is no linear that can be split."""
    transposed = is_transposed(module)
    if not transposed and not isinstance(module, nn.Linear):
        raise LayerError(f"{type(module).__name__} is no linear (nn.Linear, or a weight [in, out] with "
                         "`nf`); leave it replicated or patch its forward.")
    if isinstance(module, Parallel):
        raise LayerError(f"{module} is already tensor-parallel; a module is split once.")
    if not module.weight.is_floating_point():
        raise LayerError(f"{type(module).__name__} holds a quantised weight ({module.weight.dtype}), whose "
                         "packed rows cannot be cut; shard the model before quantising it.")
    return transposed
