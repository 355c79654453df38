"""Bytes on each pipeline stage of one rank: weights, gradients, optimizer, activations, logits, cache.

Weights and optimizer, mixed precision with Adam (Rajbhandari et al., 2020; Korthikanti et al., 2022): 2 bytes
of weight, the gradient as it is accumulated, and 12 bytes of master weight and moments. ZeRO 1 divides the 12
over the data-parallel ranks, 2 the gradients too, 3 the weights too (but for the layer at work, gathered, and
the next).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .cluster import Cluster
from .cost import BYTES, Setting
from .schedule import in_flight
from .workload import Shares, Unit, Workload, share

if TYPE_CHECKING:
    from .predict import Config

Array = np.ndarray
OPTIMIZER = 12.0  # bytes of a parameter's master copy and Adam moments


@dataclass(frozen=True)
class Saved:
    """Bytes that one micro-batch keeps of one unit until its backward, and the most it holds while it runs
    again.
    """

    kept: Array
    transient: Array


def saved(
    unit: Unit, tp: Array, micro_batch: Array, sp: Array, cp: Array, width: float, fused: bool, recompute: str
) -> Saved:
    """Activations of a unit. recompute: `none`; `selective` (an attention's scores are made again); `full`
    (all but its input)."""
    divide = np.where(sp > 0, tp, 1)
    scale = micro_batch / cp
    traffic = unit.traffic
    whole = width * Shares(traffic.saved).local(tp, divide) + Shares(traffic.masks).local(tp, divide)
    scores = np.zeros(tp.shape)
    if not fused:
        for a in unit.attentions:
            # softmax's result, dropout's mask and result; without dropout the result alone
            per = 2 * width + 1 if a.dropout else width
            scores = scores + per * a.heads * share(tp, a.heads) * a.queries / cp * a.keys
    if recompute == "full" and unit.layer:
        kept = width * unit.output / divide * scale
        return Saved(kept, (whole + scores) * scale)
    # While a layer goes backward, the gradients of what it saved are there, too.
    if recompute == "selective" or fused:
        return Saved(whole * scale, (whole + scores) * scale)
    return Saved((whole + scores) * scale, whole * scale)


def state(
    params: Array, dp: Array, zero: Array, gradient_bytes: float, dtype: str
) -> tuple[Array, Array, Array]:
    """Bytes of weights, gradients and optimizer state of `params` parameters on a rank."""
    weight = 4.0 if dtype == "fp32" else 2.0
    return (
        params * weight / np.where(zero >= 3, dp, 1),
        params * gradient_bytes / np.where(zero >= 2, dp, 1),
        params * (OPTIMIZER - (4.0 if dtype == "fp32" else 0.0)) / np.where(zero >= 1, dp, 1),
    )


def stage_experts(workload: Workload, stages: list[list[int]], tp: Array, ep: Array | int = 1) -> Array:
    """Of `stage_params`, those of experts that a rank holds: an ep-th."""
    return _summed([u.experts.local(tp) for u in workload.units], stages) / np.asarray(ep, float)[..., None]


def stage_params(workload: Workload, stages: list[list[int]], tp: Array, ep: Array | int = 1) -> Array:
    """Parameters on a rank of each stage (units by index), in the shape of `tp` with the stages as last axis.
    Tied ones stand on the first and the last."""
    result = _summed([u.params.local(tp) for u in workload.units], stages)
    if len(stages) > 1:
        result[..., -1] += workload.tied.local(tp)
    experts = stage_experts(workload, stages, tp)
    return result - experts * (1 - 1 / np.asarray(ep, float))[..., None]


def _summed(each: list[Array], stages: list[list[int]]) -> Array:
    """The values of the units of each stage, summed."""
    counts = np.array([np.bincount(stage, minlength=len(each)) for stage in stages], float)
    return np.stack(each, -1) @ counts.T


def logits(workload: Workload, tp: Array, micro_batch: Array, cp: Array) -> Array:
    """Bytes at the loss: the logits in 16 and in 32 bits, and the softmax that its backward needs."""
    return workload.logits.local(tp, 1) * micro_batch / cp * 10.0


def head_gradient(workload: Workload, tp: Array) -> Array:
    """Bytes of the gradient of the head's weight, in 32 bits, before it is added to other micro-batches'."""
    weights = [p.weight * share(tp, p.ways) for p in workload.units[workload.order[-1]].products]
    return 4.0 * np.max([np.zeros(np.shape(tp)), *weights], axis=0)


def table_gradient(workload: Workload, tp: Array) -> Array:
    """The same of the embedding. It is the last of a backward: that micro-batch's activations are gone."""
    return 4.0 * workload.units[workload.order[0]].params.local(tp)


def cache(unit: Unit, tp: Array, sequences: Array, context: float, dtype: str) -> Array:
    """Bytes of a unit's keys and values of `sequences` sequences of `context` tokens, and of its states.

    Those are taken as whole on every rank: recurrences divide theirs in ways that no attention shows."""
    width = max(1.0, BYTES[dtype])
    total = np.full(tp.shape, unit.state)
    for a in unit.attentions:
        total = total + a.kv_heads * share(tp, a.kv_heads) * (a.size + a.value_size) * context * width
    return total * sequences


def usable(cluster: Cluster) -> float:
    """Bytes of a GPU that tensors can fill: what CUDA, NCCL and the allocator take is left out."""
    return (cluster.gpu.memory - cluster.software.reserve) * 1e9


def by_stage(
    workload: Workload, cluster: Cluster, c: Config, held: list[list[int]], s: Setting
) -> list[dict[str, float]]:
    """Peak bytes by kind of each pipeline rank that holds the units `held`."""
    params = stage_params(workload, held, s.tp, np.ones(1) * c.ep)[0]
    experts = stage_experts(workload, held, s.tp, c.ep)[0]
    data, zero, width = np.array(float(c.dp * c.cp)), np.array(c.zero), cluster.software.gradient_bytes
    dense = state(params - experts, data, zero, width, c.dtype)
    routed = state(experts, data / c.ep, zero, width, c.dtype)
    weights, gradients, optimizer = (a + b for a, b in zip(dense, routed, strict=True))
    flight = in_flight(c.schedule, c.pp, c.microbatches, c.virtual_stages) / c.virtual_stages
    kept = [
        saved(u, s.tp, s.micro_batch, s.sequence_parallel, s.cp, s.width, s.fused, c.recompute)
        for u in workload.units
    ]
    found = []
    for rank, units in enumerate(held):
        activations = flight[rank] * sum(float(kept[i].kept[0]) for i in units)
        transient = max((float(kept[i].transient[0]) for i in units), default=0.0)
        one = sum(float(kept[i].kept[0]) for i in units)
        head = loose = 0.0
        if rank == c.pp - 1:
            head = float(logits(workload, s.tp, s.micro_batch, s.cp)[0])
            loose = float(head_gradient(workload, s.tp)[0])
        elif rank == 0:
            loose = max(0.0, float(table_gradient(workload, s.tp)[0]) - one)
        gathered = 0.0
        if c.zero >= 3:
            largest = max(float(stage_params(workload, [[i]], s.tp, c.ep)[0, 0]) for i in units)
            gathered = 2 * (4.0 if c.dtype == "fp32" else 2.0) * largest
        kinds = {
            "weights": float(weights[rank]),
            "gradients": float(gradients[rank]),
            "optimizer": float(optimizer[rank]),
            "activations": activations,
            "layer at work": transient,
            "loose gradient": loose,
            "logits": head,
            "gathered": gathered,
        }
        found.append(kinds)
    return found
