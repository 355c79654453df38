"""Embeddings with their rows or their features sharded."""
from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import collectives
from ..comm import Comm
from ..errors import LayerError
from ..layouts import Layout, is_partition, local_size, whole_size
from .base import REDUCE, Layouts, Parallel, Tp, check_reduce, shard_parameters, subclass


class VocabParallelEmbedding(Parallel, nn.Embedding):
    """nn.Embedding with its rows sharded: each rank looks up its own rows, zero for the others', and sums.

    Stands *behind* a subclass of nn.Embedding in the method resolution order, so that one which scales or
    shifts (`super().forward(ids) * scale`) lands here with its super call.
    """
    tp_axis = "rows"

    def forward(self, input: Tensor) -> Tensor:
        tp, rows = self.tp, self.weight.shape[0]
        # An id outside the whole vocabulary becomes one outside the local rows: the usual error everywhere.
        index = torch.where((input >= 0) & (input < whole_size(tp.layout)), 0, rows)
        mine = torch.zeros_like(input, dtype=torch.bool)
        padding, at = None, 0
        for start, stop in tp.ranges:
            inside = (input >= start) & (input < stop)
            index, mine = torch.where(inside, input - start + at, index), mine | inside
            if self.padding_idx is not None and start <= self.padding_idx < stop:
                padding = self.padding_idx - start + at
            at += stop - start
        part = F.embedding(index, self.weight, padding).masked_fill(~mine.unsqueeze(-1), 0)
        return REDUCE[tp.reduce](part, tp.comm)


class _FeatureEmbedding(Parallel):
    tp_axis = "features"

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        y = super().forward(*args, **kwargs)  # type: ignore[misc]
        return collectives.gather(y, -1, self.tp.layout, self.tp.comm) if self.tp.gather else y


def make_vocab_embedding(module: Any, layout: Layout, comm: Comm,
                         reduce: str | None = "reduce") -> Layouts:
    """Shard an nn.Embedding's rows: ids `[...] -> [..., features]`, reduced as in `make_row`.

    `padding_idx` stays what it was. LayerError for rows held twice, for max_norm, scale_grad_by_freq and
    sparse gradients (they look at all rows or all ids), and for a subclass whose forward does not call
    `super().forward`.
    """
    _check_embedding(module, max_norm=True, scale_grad_by_freq=True, sparse=True)
    check_reduce(reduce)
    if not is_partition(layout):
        raise LayerError("an embedding's rows must be held once each: the sum would count them twice")
    for cls in type(module).__mro__:
        if cls is nn.Embedding:
            break
        own = vars(cls).get("forward")
        if own is not None and "super" not in inspect.unwrap(own).__code__.co_names:
            raise LayerError(f"{cls.__name__}.forward does its own lookup (no super().forward), so its rows "
                             "cannot be sharded here; leave it replicated or patch its forward.")
    made = shard_parameters(module, {"weight": (0, module.num_embeddings, layout)}, comm)
    module.num_embeddings = local_size(layout[comm.rank])
    module.__class__ = VocabParallelEmbedding if type(module) is nn.Embedding else \
        subclass(type(module), VocabParallelEmbedding, f"VocabParallel{type(module).__name__}")
    module.tp = Tp(comm, layout, reduce=reduce)
    return made


def make_feature_embedding(module: Any, layout: Layout, comm: Comm,
                           gather_output: bool = False) -> Layouts:
    """Shard an nn.Embedding's features: ids `[...] -> [..., local features]`, or all with `gather_output`.

    LayerError for max_norm, whose norm is over all features.
    """
    _check_embedding(module, max_norm=True)
    made = shard_parameters(module, {"weight": (1, module.embedding_dim, layout)}, comm)
    module.embedding_dim = local_size(layout[comm.rank])
    module.__class__ = subclass(_FeatureEmbedding, type(module), f"FeatureParallel{type(module).__name__}")
    module.tp = Tp(comm, layout, gather=gather_output)
    return made


def _check_embedding(module: Any, **refused: bool) -> None:
    if not isinstance(module, nn.Embedding) or isinstance(module, Parallel):
        raise LayerError(f"{type(module).__name__} is no nn.Embedding that is whole; a module is split once.")
    used = [name for name in refused if getattr(module, name)]
    if used:
        raise LayerError(f"an embedding with {', '.join(used)} needs more than the local part of its weight; "
                         f"turn {used[0]} off or leave it replicated.")
