"""torch's norms over a sharded dim or with their channels sharded, grouped convolutions with their groups."""
from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import collectives
from ..comm import Comm
from ..errors import LayerError
from ..layouts import Layout, check, expand, is_partition, local_size, shrink, take_dim, whole_size
from .base import Layouts, Parallel, Tp, shard_parameters, subclass


class ShardedLayerNorm(Parallel, nn.LayerNorm):
    """nn.LayerNorm over a sharded last dim: `[..., local] -> [..., local]`, two small all-reduces of
    statistics.
    """
    tp_axis = "features"

    def forward(self, input: Tensor) -> Tensor:
        comm, n = self.tp.comm, whole_size(self.tp.layout)
        x = _wide(input)
        x = x - collectives.reduce_enter(x.sum(-1, keepdim=True) / n, comm)
        variance = collectives.reduce_enter(x.square().sum(-1, keepdim=True) / n, comm)
        return _affine(x * torch.rsqrt(variance + self.eps), self.weight, self.bias).to(input.dtype)


class ShardedRMSNorm(Parallel, nn.RMSNorm):
    """nn.RMSNorm over a sharded last dim: `[..., local] -> [..., local]`, one small all-reduce."""
    tp_axis = "features"

    def forward(self, x: Tensor) -> Tensor:
        comm, n, h = self.tp.comm, whole_size(self.tp.layout), _wide(x)
        square = collectives.reduce_enter(h.square().sum(-1, keepdim=True) / n, comm)
        eps = torch.finfo(h.dtype).eps if self.eps is None else self.eps
        return _affine(h * torch.rsqrt(square + eps), self.weight, None).to(x.dtype)


def _wide(x: Tensor) -> Tensor:
    """torch's norm kernels compute half precision in float32."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def make_norm(module: Any, layout: Layout, comm: Comm) -> Layouts:
    """Shard an nn.LayerNorm or nn.RMSNorm over its one (last) dim: input and output `[..., local]`.

    The statistics are those of the whole dim, uneven parts included. LayerError for other classes, for
    subclasses with a forward of their own, for several normalized dims and for indices held twice.
    """
    sharded: dict[Any, type] = {nn.LayerNorm.forward: ShardedLayerNorm, nn.RMSNorm.forward: ShardedRMSNorm}
    target = sharded.get(type(module).forward)
    shape: tuple[int, ...] = getattr(module, "normalized_shape", ())
    if target is None or len(shape) != 1 or not is_partition(layout):
        raise LayerError(f"{type(module).__name__} with normalized_shape {tuple(shape)} cannot be sharded: "
                         "only nn.LayerNorm and nn.RMSNorm over one dim can, each index of it held once.")
    check(layout, shape[0], comm.size, "the normalized dim")
    made = shard_parameters(module, {"weight": (0, shape[0], layout), "bias": (0, shape[0], layout)}, comm)
    module.normalized_shape = (local_size(layout[comm.rank]),)
    plain = type(module) in (nn.LayerNorm, nn.RMSNorm)
    module.__class__ = target if plain else subclass(target, type(module), f"Sharded{type(module).__name__}")
    module.tp = Tp(comm, layout)
    return made


class _Grouped(Parallel):
    tp_axis = "groups"


def make_grouped(module: Any, layout: Layout, comm: Comm) -> Layouts:
    """Shard the *groups* of a grouped (or depthwise) nn.Conv1d/2d/3d, or of an nn.GroupNorm: channels follow.

    Input and output `[batch, local channels, ...]`; nothing is communicated. `layout` is over the groups: for
    a depthwise convolution they are the input channels. LayerError for transposed convolutions and other
    classes.
    """
    if isinstance(module, nn.GroupNorm):
        groups, per = module.num_groups, module.num_channels // module.num_groups
        channels = expand(layout, per)
        splits = {name: (0, groups * per, channels) for name in ("weight", "bias")}
        check(layout, groups, comm.size, "the groups of nn.GroupNorm")
        made = shard_parameters(module, splits, comm)
        module.num_groups = local_size(layout[comm.rank])
        module.num_channels = module.num_groups * per
    elif isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        groups = module.groups
        check(layout, groups, comm.size, f"the groups of {type(module).__name__}")
        per_in, per_out = module.in_channels // groups, module.out_channels // groups
        splits = {name: (0, groups * per_out, expand(layout, per_out)) for name in ("weight", "bias")}
        made = shard_parameters(module, splits, comm)
        module.groups = local_size(layout[comm.rank])
        module.in_channels, module.out_channels = module.groups * per_in, module.groups * per_out
    else:
        raise LayerError(f"{type(module).__name__} has no groups that can be sharded; leave it replicated.")
    module.__class__ = subclass(_Grouped, type(module), f"GroupParallel{type(module).__name__}")
    module.tp = Tp(comm, layout)
    return made


def make_grouped_channels(module: Any, layout: Layout, comm: Comm) -> Layouts:
    """`make_grouped`, from the layout of the channels: a convolution's *output* channels (dim 0 of its
    weight), an nn.GroupNorm's channels.

    LayerError when a group's channels would be parted.
    """
    if isinstance(module, nn.GroupNorm):
        per_group = module.num_channels // module.num_groups
    elif isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        per_group = module.out_channels // module.groups
    else:
        raise LayerError(f"{type(module).__name__} has no groups of channels.")
    return make_grouped(module, shrink(layout, per_group, f"the groups of {type(module).__name__}"), comm)


class _ChannelBatchNorm(Parallel):
    """Torch's batch norm on this rank's channels. The running statistics stay whole on every rank: in
    training each rank's part of them is sent to the others, so that they are the same everywhere.
    """
    tp_axis = "channels"

    def forward(self, x: Tensor) -> Tensor:
        norm: Any = self
        norm._check_input_dim(x)
        comm, layout = self.tp.comm, self.tp.layout
        updates = norm.training and norm.track_running_stats and norm.running_mean is not None
        share = 0.0 if norm.momentum is None else norm.momentum
        if updates and norm.num_batches_tracked is not None:
            norm.num_batches_tracked.add_(1)
            if norm.momentum is None:  # the mean over all batches
                share = 1.0 / float(norm.num_batches_tracked)
        mean, var = None, None
        if norm.running_mean is not None and (updates or not norm.training):
            mean = take_dim(norm.running_mean, 0, self.tp.ranges).clone()
            var = take_dim(norm.running_var, 0, self.tp.ranges).clone()
        of_batch = norm.training or norm.running_mean is None
        y = F.batch_norm(x, mean, var, norm.weight, norm.bias, of_batch, share, norm.eps)
        if updates and mean is not None and var is not None:
            with torch.no_grad():
                both = collectives.gather_values(torch.stack([mean, var]), 1, layout, comm)
                norm.running_mean.copy_(both[0])
                norm.running_var.copy_(both[1])
        return y


def make_batch_norm(module: Any, layout: Layout, comm: Comm) -> Layouts:
    """Shard the channels of an nn.BatchNorm1d/2d/3d: input and output `[batch, local channels, ...]`. Its
    statistics are per channel, so they are those of the whole. LayerError for other classes.
    """
    if not isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)) or not is_partition(layout):
        raise LayerError(f"{type(module).__name__} is no batch norm whose channels are held once each.")
    splits = {name: (0, module.num_features, layout) for name in ("weight", "bias")}
    made = shard_parameters(module, splits, comm)
    norm: Any = module
    norm.__class__ = subclass(_ChannelBatchNorm, type(module), f"ChannelParallel{type(module).__name__}")
    norm.tp = Tp(comm, layout)
    return made
