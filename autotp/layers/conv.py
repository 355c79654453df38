"""Convolutions with their output or their input channels sharded, as columns and rows of a linear are."""
from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .. import collectives
from ..comm import Comm
from ..errors import LayerError
from ..layouts import DimLayout, Layout, is_partition, local_size
from .base import REDUCE, Layouts, Parallel, Tp, check_reduce, gathered, shard_parameters, subclass

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class _ColumnConv(Parallel):
    """Output channels sharded; the forward of the module's own class, on local weights."""
    tp_axis = "out channels"
    weight: Tensor
    reads: tuple[int, int] | None     # the input channels of this rank's groups: first, how many

    def forward(self, x: Tensor) -> Tensor:
        tp = self.tp
        x = collectives.enter(x, tp.comm) if tp.enter else x
        if self.reads is not None:
            # The gradient is zero for the channels that others read: the sum over the ranks is the whole.
            x = x.narrow(_channels(x, self.weight), *self.reads)
        y = super().forward(x)  # type: ignore[misc]
        return gathered(y, _channels(y, self.weight), tp)


class _RowConv(Parallel):
    """Input channels sharded; the local result is partial, the whole bias is added once."""
    tp_axis = "in channels"
    weight: Tensor
    bias: Any

    def forward(self, x: Tensor) -> Tensor:
        tp, bias = self.tp, self.bias
        y = self._conv_forward(x, self.weight, None)  # type: ignore[attr-defined]
        if bias is not None:
            bias = bias.view(-1, *[1] * (self.weight.dim() - 2))
        if tp.reduce is None:
            return y if bias is None else y + collectives.once(bias, tp.comm)
        if bias is None:
            return REDUCE[tp.reduce](y, tp.comm)
        # The bias comes before `enter`: its gradient is whole.
        y = collectives.reduce(y, tp.comm) + bias
        return y if tp.reduce == "reduce" else collectives.enter(y, tp.comm)


def _channels(y: Tensor, weight: Tensor) -> int:
    """The dim of the channels: `y` is [batch, channels, *space] or [channels, *space]."""
    return y.dim() - weight.dim() + 1


def make_conv_column(module: Any, layout: Layout, comm: Comm, gather_output: bool = False,
                     enter: bool = True, partial: bool = False) -> Layouts:
    """Shard a convolution's output channels: `[batch, in, *space] -> [batch, local out, *space]`, or whole
    with `gather_output`. `enter`, `partial` as in `make_column`.

    Of the input channels, whole on every rank, only those of its groups are read (where each rank holds its
    input channels alone, `make_grouped` needs no communication). LayerError where a rank would hold parts of
    several groups, and for what is no nn.Conv1d, nn.Conv2d or nn.Conv3d.
    """
    _check(module)
    reads, groups = _groups_read(module, layout[comm.rank])
    splits = {name: (0, module.out_channels, layout) for name in ("weight", "bias")}
    made = shard_parameters(module, splits, comm)
    module.out_channels = local_size(layout[comm.rank])
    module.reads = reads
    if reads is not None:
        module.groups, module.in_channels = groups, reads[1]
    module.__class__ = subclass(_ColumnConv, type(module), f"ColumnParallel{type(module).__name__}")
    module.tp = Tp(comm, layout, enter=enter, gather=gather_output, partial=partial)
    return made


def _groups_read(module: Any, ranges: DimLayout) -> tuple[tuple[int, int] | None, int]:
    """(which input channels these output channels read: first, how many; in how many groups). None: all."""
    if module.groups == 1:
        return None, 1
    per_out, per_in = module.out_channels // module.groups, module.in_channels // module.groups
    ((start, stop),) = ranges if len(ranges) == 1 else ((0, 0),)
    first, last = start // per_out, -(-stop // per_out)
    if stop == start or (last - first > 1 and (start % per_out or stop % per_out)):
        raise LayerError(f"output channels {ranges} are no whole groups of {per_out}, nor in one of them.")
    return (first * per_in, (last - first) * per_in), last - first


def make_conv_row(module: Any, layout: Layout, comm: Comm, reduce: str | None = "reduce") -> Layouts:
    """Shard a convolution's input channels: `[batch, local in, *space] -> [batch, out, *space]`, the whole
    bias added once. `reduce` as in `make_row`. LayerError as in `make_conv_column`.
    """
    _check(module)
    if module.groups != 1:
        raise LayerError(f"a convolution of {module.groups} groups is sharded by its groups: make_grouped")
    check_reduce(reduce)
    if not is_partition(layout):
        raise LayerError("a row's input channels must be held once each: the sum would count them twice")
    made = shard_parameters(module, {"weight": (1, module.in_channels, layout)}, comm)
    module.in_channels = local_size(layout[comm.rank])
    module.__class__ = subclass(_RowConv, type(module), f"RowParallel{type(module).__name__}")
    module.tp = Tp(comm, layout, reduce=reduce)
    return made


def _check(module: Any) -> None:
    if not isinstance(module, CONVOLUTIONS):
        raise LayerError(f"{type(module).__name__} is no nn.Conv1d, nn.Conv2d or nn.Conv3d; leave it "
                         "replicated.")
    if isinstance(module, Parallel):
        raise LayerError(f"{module} is already tensor-parallel; a module is split once.")
