"""Leaf modules that hold one rank's part.

Each `make_*` changes one module in place: the Parameter objects stay and get the local slice as data, sizes
become local, and the module's class becomes a subclass of its own class (so `isinstance`, hooks, names and
ties hold). It returns the layouts of the parameters it sharded, by their name in the module. The forward is
the plain local computation and its collectives.
"""
from .attention import ParallelMultiheadAttention, make_attention, turn_off_fast_path
from .base import Tp, shard_parameter
from .conv import CONVOLUTIONS, make_conv_column, make_conv_row
from .embedding import VocabParallelEmbedding, make_feature_embedding, make_vocab_embedding
from .experts import LocalExperts, Trial, make_experts
from .linear import ColumnParallelLinear, RowParallelLinear, is_transposed, make_column, make_row
from .norm import (
    ShardedLayerNorm,
    ShardedRMSNorm,
    make_batch_norm,
    make_grouped,
    make_grouped_channels,
    make_norm,
)

__all__ = [
    "CONVOLUTIONS", "ColumnParallelLinear", "LocalExperts", "ParallelMultiheadAttention", "RowParallelLinear",
    "ShardedLayerNorm", "ShardedRMSNorm", "Tp", "Trial", "VocabParallelEmbedding", "is_transposed",
    "make_attention", "make_batch_norm", "make_column", "make_conv_column", "make_conv_row", "make_experts",
    "make_feature_embedding", "make_grouped", "make_grouped_channels", "make_norm", "make_row",
    "make_vocab_embedding", "shard_parameter", "turn_off_fast_path",
]
