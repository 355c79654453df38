"""nn.MultiheadAttention with its heads sharded."""
from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import collectives
from ..comm import Comm
from ..errors import LayerError
from ..layouts import Layout, check, expand, fuse, is_partition, local_size, merge, shrink, whole_size
from .base import Layouts, Parallel, Tp, shard_parameters, subclass
from .linear import make_row


class ParallelMultiheadAttention(Parallel, nn.MultiheadAttention):
    """nn.MultiheadAttention with its heads sharded: same arguments, same results on every rank.

    `num_heads` is local, `embed_dim` whole. Attention weights are averaged over *all* heads (one more
    all-reduce), or gathered. Dropout of attention weights is drawn per rank, as they are different heads.
    """
    tp_axis = "heads"

    def forward(self, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
                need_weights: bool = True, attn_mask: Tensor | None = None, average_attn_weights: bool = True,
                is_causal: bool = False) -> tuple[Tensor, Tensor | None]:
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
        batched = query.dim() == 3
        entered: dict[int, Tensor] = {}          # self-attention enters once: one all-reduce, not three
        for x in (query, key, value):
            if id(x) not in entered:
                entered[id(x)] = collectives.enter(x, self.tp.comm) if self.tp.enter else x
        q, k, v = self._project(*(entered[id(x)] for x in (query, key, value)))
        if not batched:                          # [length, features] -> [batch, length, features]
            q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
        elif not self.batch_first:
            q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
        if self.bias_k is not None:
            k = torch.cat([k, self.bias_k.expand(k.shape[0], -1, -1)], 1)
            v = torch.cat([v, self.bias_v.expand(v.shape[0], -1, -1)], 1)  # type: ignore[union-attr]
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for t in (q, k, v))
        mask = self._mask(attn_mask, key_padding_mask, q, k)
        p = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = (q / math.sqrt(self.head_dim)) @ k.transpose(-2, -1)
            weights = F.dropout(torch.softmax(scores if mask is None else scores + mask, -1), p)
            y = weights @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, mask, p)
        y = self.out_proj(y.transpose(1, 2).flatten(2))
        if weights is not None:
            weights = self._over_all_heads(weights, average_attn_weights)
        if not batched:
            return y.squeeze(0), None if weights is None else weights.squeeze(0)
        return y if self.batch_first else y.transpose(0, 1), weights

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the local heads, `[..., local heads * head_dim]`."""
        if self.in_proj_weight is not None:
            if query is key is value:
                q, k, v = F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
                return q, k, v
            weights: Any = self.in_proj_weight.chunk(3)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        q, k, v = (F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
        return q, k, v

    def _mask(self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, q: Tensor,
              k: Tensor) -> Tensor | None:
        """Both masks as one additive `[batch or 1, local heads or 1, target, source]`."""
        merged = None
        if attn_mask is not None:
            mask = attn_mask
            if mask.dim() == 3:                  # [batch * all heads, target, source]
                mask = mask.unflatten(0, (q.shape[0], -1))
                mask = collectives.slice_(mask, 1, self.tp.layout, self.tp.comm)
            elif mask.requires_grad:
                mask = collectives.enter(mask, self.tp.comm)
            merged = _additive(mask, q.dtype)
        if key_padding_mask is not None:
            padding = key_padding_mask if key_padding_mask.dim() == 2 else key_padding_mask.unsqueeze(0)
            padding = _additive(padding[:, None, None, :], q.dtype)
            merged = padding if merged is None else merged + padding
        if merged is not None and merged.shape[-1] < k.shape[2]:   # bias_k, the zero key: never masked
            merged = F.pad(merged, (0, k.shape[2] - merged.shape[-1]))
        return merged

    def _over_all_heads(self, weights: Tensor, average: bool) -> Tensor:
        layout, comm = self.tp.layout, self.tp.comm
        if average:
            return collectives.reduce(weights.sum(1) / whole_size(layout), comm)
        return collectives.gather(weights, 1, layout, comm)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, -math.inf)
    return mask.to(dtype)


def make_attention(module: Any, layout: Layout, comm: Comm, reduce: str | None = "reduce",
                   enter: bool = True) -> Layouts:
    """Shard an nn.MultiheadAttention's heads; `layout` is that of its heads, or of `in_proj_weight`'s rows.

    `enter` (queries, keys and values) as in `make_column`, `reduce` (the output) as in `make_row`. An
    nn.TransformerEncoderLayer around it may not use its fused kernel: see `turn_off_fast_path`.
    LayerError for other classes, subclasses with a forward of their own, heads parted or held twice.
    """
    if getattr(type(module), "forward", None) is not nn.MultiheadAttention.forward:
        raise LayerError(f"{type(module).__name__} is no nn.MultiheadAttention with torch's own forward.")
    size, heads = module.embed_dim, layout
    if whole_size(layout) == 3 * size:
        heads = tuple(merge([(a, b) for a, b in ranges if b <= size]) for ranges in layout)
        heads = shrink(heads, module.head_dim, "the heads of nn.MultiheadAttention")
    own = expand(heads, module.head_dim)
    fused = fuse((own, size), (own, size), (own, size))
    if layout not in (heads, fused):
        raise LayerError("the layout of in_proj_weight does not give a rank the same heads of Q, K and V")
    if not is_partition(heads):
        raise LayerError("heads must be held once each: the output's sum would count them twice")
    check(heads, module.num_heads, comm.size, "the heads of nn.MultiheadAttention")
    splits = {"in_proj_weight": (0, 3 * size, fused), "in_proj_bias": (0, 3 * size, fused),
              "bias_k": (2, size, own), "bias_v": (2, size, own)}
    splits |= {name: (0, size, own) for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight")}
    made = shard_parameters(module, splits, comm)
    # out_proj's class, NonDynamicallyQuantizableLinear, is there for quantisation alone.
    made |= {f"out_proj.{name}": held for name, held in make_row(module.out_proj, own, comm, reduce).items()}
    module.num_heads = local_size(heads[comm.rank])
    module._qkv_same_embed_dim = False           # the condition torch's fast paths read
    plain = type(module) is nn.MultiheadAttention
    module.__class__ = ParallelMultiheadAttention if plain else subclass(
        ParallelMultiheadAttention, type(module), f"Parallel{type(module).__name__}")
    module.tp = Tp(comm, heads, enter=enter)
    return made


def turn_off_fast_path(model: nn.Module) -> list[str]:
    """Keep torch's fused encoder kernel, which reads raw weights past every forward, away from `model`.

    Returns the paths of the nn.TransformerEncoder and nn.TransformerEncoderLayer modules concerned.
    """
    found = []
    for path, module in model.named_modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0   # "neither": the kernel has no such activation
            found.append(path)
        elif isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False     # decided when it was built, from its layers
            found.append(path)
    return found
