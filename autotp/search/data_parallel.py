"""What a step spends on reducing gradients, gathering weights and the optimizer."""

from __future__ import annotations

from typing import Any

import numpy as np

from .cluster import Cluster, collective, spread

OPTIMIZER_TRAFFIC = 34.0  # bytes Adam moves per parameter, and the clip of the gradients' norm


def data_parallel(
    cluster: Cluster,
    tp: Any,
    ranks: Any,
    zero: Any,
    params: Any,
    backward: Any,
    micro_step: Any,
    microbatches: Any,
    dtype: str,
    experts: Any = 0.0,
    ep: Any = 1,
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of exposed data-parallel communication, and of the optimizer step. Arrays, a number a
    configuration.

    ranks: data-parallel ones; params: of the fullest rank, of which `experts` are on every ep-th rank alone;
    backward: seconds of a micro-batch's, behind which gradients can be reduced; micro_step: seconds of a
    micro-batch, forward and backward.
    """
    software = cluster.software
    weight = 4.0 if dtype == "fp32" else 2.0
    bandwidth = cluster.gpu.bandwidth * 1e9 * cluster.gpu.stream
    dense, fewer = params - experts, np.asarray(ranks) / ep
    held = [np.where(np.asarray(zero) > 0, n, 1) for n in (ranks, fewer)]
    optimizer = (dense / held[0] + experts / held[1]) * OPTIMIZER_TRAFFIC / bandwidth

    def move(kind: str, width: float) -> np.ndarray:
        whole = spread(cluster, kind, ranks, tp, dense * width)
        return whole + np.where(experts > 0, spread(cluster, kind, fewer, tp * ep, experts * width), 0.0)

    whole = np.maximum(0.0, move("reduce", software.reduce_bytes) - software.dp_overlap * backward)
    reduce, gather = move("scatter", software.reduce_bytes), move("gather", weight)
    # ZeRO 2 keeps no whole gradients from one micro-batch to the next: it reduces after each.
    times = np.where(np.asarray(zero) == 2, microbatches, 1)
    hidden = times * np.minimum(reduce, backward) + np.minimum(gather, micro_step - backward)
    halves = times * reduce + gather - software.dp_overlap * hidden
    # ZeRO 3: weights gathered for each forward and backward, gradients scattered after, beside computation.
    each = 2 * move("gather", weight) + move("scatter", weight)
    if not software.grouped_zero3:
        link = cluster.links[-1]
        flat = 2 * collective(link, "gather", ranks, params * weight) + collective(
            link, "scatter", ranks, params * weight
        )
        each = np.where(np.asarray(ranks) * tp > cluster.links[0].size, flat, each)
    sharded = microbatches * np.maximum(each - software.zero3_overlap * micro_step, each * 0.05)
    exposed = np.select([np.asarray(zero) == 0, np.asarray(zero) < 3], [whole, halves], sharded)
    return np.where(np.asarray(ranks) > 1, exposed, 0.0), optimizer
