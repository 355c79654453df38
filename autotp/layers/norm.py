"""torch's norms over a sharded dim, and grouped convolutions and norms with their groups sharded."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .. import collectives
from ..comm import Comm
from ..errors import LayerError
from ..layouts import Layout, check, expand, is_partition, local_size, shrink, whole_size
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


def make_depthwise_conv(module: Any, layout: Layout, comm: Comm) -> Layouts:
    """`make_grouped` for a convolution, from the layout of its *output channels* (dim 0 of its weight).

    LayerError when a group's channels would be parted.
    """
    if not isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        raise LayerError(f"{type(module).__name__} is no convolution.")
    per_group = module.out_channels // module.groups
    return make_grouped(module, shrink(layout, per_group, "the convolution's groups"), comm)
