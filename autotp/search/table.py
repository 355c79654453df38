"""All candidates at once: the columns of a table of configurations, and their times and memory by numpy.

The same cost functions as `predict`, with the pipeline in closed form instead of simulated, and memory looked
at on the first and the last stage.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from . import memory
from .cluster import Cluster, send
from .cost import Setting, loss_time, ring_time, unit_passes
from .data_parallel import data_parallel
from .predict import RECOMPUTE, Config, cut
from .workload import Shares, Workload

Array = np.ndarray


@dataclass(frozen=True)
class Table:
    """A configuration a row. recompute: an index into RECOMPUTE."""

    tp: Array
    cp: Array
    pp: Array
    dp: Array
    virtual: Array
    micro_batch: Array
    sp: Array
    recompute: Array
    zero: Array
    ep: Array

    def __len__(self) -> int:
        return len(self.tp)

    def take(self, rows: Array) -> Table:
        return Table(*(getattr(self, f.name)[rows] for f in fields(self)))

    def config(self, row: int, batch: int, dtype: str, schedule: str) -> Config:
        """One row as a configuration."""
        v = {f.name: int(getattr(self, f.name)[row]) for f in fields(self)}
        return Config(
            v["tp"],
            v["pp"],
            v["dp"],
            v["cp"],
            batch,
            v["micro_batch"],
            RECOMPUTE[v["recompute"]],
            v["zero"],
            v["virtual"],
            bool(v["sp"]),
            "interleaved" if v["virtual"] > 1 else schedule,
            dtype,
            v["ep"],
        )


@dataclass(frozen=True)
class Costs:
    """Seconds of a step and bytes of the fullest stage, a number a row; `parts`: seconds by kind, `kinds`:
    bytes by kind.
    """

    time: Array
    memory: Array
    parts: dict[str, Array]
    kinds: dict[str, Array]


def evaluate(workload: Workload, cluster: Cluster, table: Table, batch: int, dtype: str) -> Costs:
    """Time and memory of every row."""
    keys = np.stack([table.tp, table.cp, table.micro_batch, table.sp, table.ep], 1)
    unique, of = np.unique(keys, axis=0, return_inverse=True)
    of = of.reshape(-1)
    tp, cp, mb, sp, ep = unique.T.astype(float)
    s = Setting(tp, mb, sp, cp, dtype, cluster.software.fused_attention, ep)
    compute, sent, kept, transient = _units(workload, cluster, s)
    head = memory.logits(workload, tp, mb, cp)
    longest, total, first_kept, last_kept, passing, sending = (np.zeros(len(table)) for _ in range(6))
    params, experts = np.zeros(len(table)), np.zeros(len(table))
    backward = np.zeros(len(table))
    nominal = [float(compute[0, i, 0] + compute[1, i, 0]) for i in range(len(workload.units))]
    for pp, virtual in {(int(a), int(b)) for a, b in zip(table.pp, table.virtual, strict=True)}:
        rows = np.flatnonzero((table.pp == pp) & (table.virtual == virtual))
        counts = _counts(workload, pp, virtual, nominal)  # rank, unit
        for choice in range(len(RECOMPUTE)):
            some = rows[table.recompute[rows] == choice]
            if not len(some):
                continue
            at = of[some]
            f, b = counts @ compute[choice * 2], counts @ compute[choice * 2 + 1]  # rank, unique
            m = counts @ sent[choice]
            work = f + b + m
            worst = work.argmax(0)
            every = np.arange(work.shape[1])
            longest[some], total[some] = work.max(0)[at], work.sum(0)[at]
            sending[some] = m[worst, every][at]
            backward[some] = b.min(0)[at]
            first_kept[some] = (counts[:1] @ kept[choice])[0][at]
            last_kept[some] = (counts[-1:] @ kept[choice])[0][at]
            passing[some] = transient[choice].max(0)[at]
        routed = np.stack([Shares(u.experts).local(unique[:, 0]) for u in workload.units])
        local = np.stack([Shares(u.params).local(unique[:, 0]) for u in workload.units])
        per_rank = counts @ (local - routed * (1 - 1 / ep))
        if pp > 1:
            per_rank[-1] += workload.tied.local(unique[:, 0])
        params[rows] = per_rank.max(0)[of[rows]]
        fullest = (counts @ routed / ep)[per_rank.argmax(0), np.arange(len(ep))]
        experts[rows] = fullest[of[rows]]
    microbatches = batch / (table.dp * table.micro_batch)
    width = max((u.output for u in workload.units if u.layer), default=0.0) * s.width
    crossing = width * table.micro_batch / table.cp / np.where(table.sp > 0, table.tp, 1)
    hop = np.where(
        table.pp > 1,
        send(cluster, table.tp * table.dp * table.cp, crossing),
        0.0,
    )
    longest_sent = longest + 2 * hop * table.virtual
    pipeline = (
        microbatches * longest_sent
        + (total - longest + 2 * hop * table.virtual * (table.pp - 1)) / table.virtual
    )
    data, optimizer = data_parallel(
        cluster,
        table.tp,
        table.dp * table.cp,
        table.zero,
        params,
        backward,
        longest,
        microbatches,
        dtype,
        experts,
        table.ep,
    )
    step = cluster.software.step_ms * 1e-3
    time = pipeline + data + optimizer + step
    flight = _in_flight(table, microbatches)
    data_ranks, width = table.dp * table.cp, cluster.software.gradient_bytes
    dense = memory.state(params - experts, data_ranks, table.zero, width, dtype)
    shared = memory.state(experts, data_ranks / table.ep, table.zero, width, dtype)
    weights, gradients, state = (a + b for a, b in zip(dense, shared, strict=True))
    each = [memory.stage_params(workload, [[i]], table.tp, table.ep) for i in range(len(workload.units))]
    biggest = np.max(each, axis=0)[:, 0]
    gathered = np.where(table.zero >= 3, (8.0 if dtype == "fp32" else 4.0) * biggest, 0.0)
    # On the first stage the embedding's gradient comes when a micro-batch's activations are gone.
    table_gradient = np.maximum(0.0, memory.table_gradient(workload, table.tp) - first_kept)
    first = first_kept * flight + np.where(table.pp > 1, table_gradient, 0.0)
    activations = np.maximum(first, last_kept + head[of] + memory.head_gradient(workload, table.tp))
    base = weights + gradients + state + gathered
    return Costs(
        time,
        base + activations + passing,
        {
            "compute": microbatches * (longest - sending),
            "tensor-parallel communication": microbatches * sending,
            "pipeline bubble and sends": pipeline - microbatches * longest,
            "data-parallel communication": data,
            "optimizer": optimizer,
            "fixed per step": np.full(len(table), step),
        },
        {
            "weights": weights,
            "gradients": gradients,
            "optimizer": state,
            "activations": activations,
            "layer at work": passing,
            "gathered": gathered,
        },
    )


def _units(workload: Workload, cluster: Cluster, s: Setting) -> tuple[Array, Array, Array, Array]:
    """By recomputation (twice, forward and backward, for the first), unit and setting: seconds, seconds of
    communication, bytes kept, bytes in passing."""
    n, k = len(workload.units), len(s.tp)
    compute, sent = np.zeros((6, n, k)), np.zeros((3, n, k))
    kept, transient = np.zeros((3, n, k)), np.zeros((3, n, k))
    loss = loss_time(cluster, workload, s)
    for i, unit in enumerate(workload.units):
        p, ring = unit_passes(cluster, unit, s), ring_time(cluster, [unit], s)
        last = i == workload.order[-1]
        for choice, name in enumerate(RECOMPUTE):
            again = p.forward if name == "full" and unit.layer else 0.0
            again = p.again if name == "selective" and unit.layer and not s.fused else again
            compute[choice * 2, i] = p.forward + (loss[0] if last else 0.0)
            compute[choice * 2 + 1, i] = p.backward + again + (loss[1] if last else 0.0)
            twice = p.forward_sent if name == "full" and unit.layer else 0.0
            sent[choice, i] = p.forward_sent + p.backward_sent + twice + 3 * ring
            saved = memory.saved(unit, s.tp, s.micro_batch, s.sequence_parallel, s.cp, s.width, s.fused, name)
            kept[choice, i], transient[choice, i] = saved.kept, saved.transient
    return compute, sent, kept, transient


def _counts(workload: Workload, pp: int, virtual: int, nominal: list[float]) -> Array:
    """How many of each unit each rank runs."""
    counts = np.zeros((pp, len(workload.units)))
    for k, stage in enumerate(cut(workload, pp * virtual, nominal)):
        for i in stage:
            counts[k % pp, i] += 1
    return counts


def _in_flight(table: Table, microbatches: Array) -> Array:
    """Micro-batches of all its layers that the first rank holds: what `schedule.in_flight` counts."""
    interleaved = (2 * (table.pp - 1) + (table.virtual - 1) * table.pp + 1) / table.virtual
    return np.minimum(microbatches, np.where(table.virtual > 1, interleaved, table.pp))
