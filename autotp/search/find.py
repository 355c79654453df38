"""The search: every configuration of a cluster, timed and weighed; the best, the front, and why the others
are not it.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from typing import Any

import numpy as np
from torch import nn

from ..errors import SearchError
from . import memory
from .cluster import Cluster, load
from .cost import dtype_named
from .counts import count
from .predict import RECOMPUTE, Config, Prediction, predict, train
from .result import BATCH, FINE, ROUNDS, TOO_BIG, Rejected, SearchResult
from .states import with_states
from .table import Costs, Table, evaluate
from .workload import Workload

MICRO_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
LONG = 16384  # tokens, from which on a sequence is worth splitting over context-parallel ranks
SIMULATED = 4  # candidates whose schedule is run; the others' is in closed form


def search(
    model: nn.Module | Workload,
    cluster: str | Cluster,
    *,
    batch: int,
    seq: int | None = None,
    mode: str = "train",
    dtype: str = "bf16",
    top: int = 10,
    fixed: Mapping[str, Any] | None = None,
    example_inputs: Mapping[str, Any] | None = None,
) -> SearchResult:
    """The best configurations of `model` on all GPUs of `cluster`, for `batch` sequences of `seq` tokens.

    In `generate`, batch is the number of sequences served at once. fixed: degrees and choices to hold, named
    as for `predict`, e.g. {"tp": 8, "zero": 1}. Raises SearchError where the request makes no sense; a result
    without plans says why nothing fits when `best` is asked for.
    """
    machine = load(cluster)
    dtype = dtype_named(dtype)
    workload = model if isinstance(model, Workload) else count(model, seq, example_inputs)
    if mode == "generate" and not isinstance(model, Workload):
        workload = with_states(workload, model)
    if seq is not None and workload.seq != seq:
        raise SearchError(
            f"seq={seq}, but the workload was counted at {workload.seq} tokens. Count it again."
        )
    if not isinstance(batch, Integral) or batch < 1:
        raise SearchError(f"batch={batch!r}: must be a whole number, at least 1.")
    known = {
        "tp",
        "pp",
        "dp",
        "cp",
        "ep",
        "micro_batch",
        "recompute",
        "zero",
        "virtual_stages",
        "sequence_parallel",
    }
    held = dict(fixed or {})
    if set(held) - known:
        raise SearchError(
            f"fixed: {', '.join(sorted(set(held) - known))} can't be held; {', '.join(sorted(known))} can."
        )
    if mode == "generate":
        return _generate(workload, machine, batch, dtype, top, held)
    if mode != "train":
        raise SearchError(f"mode={mode!r}: train or generate.")
    table, coarse = candidates(workload, machine, batch, held)
    why = _impossible(table, batch)
    costs = _costs(workload, machine, table, why, batch, dtype)
    why[(why == FINE) & (costs.memory > memory.usable(machine))] = TOO_BIG
    good = np.flatnonzero(why == FINE)
    result = SearchResult(
        machine,
        workload,
        mode,
        [],
        [],
        len(table),
        len(good),
        coarse,
        batch,
        dtype,
        table,
        why,
        costs.memory,
        costs.time,
    )
    order = good[np.argsort(costs.time[good], kind="stable")]
    plans = [
        train(workload, machine, result._config(int(row)), i < SIMULATED)
        for i, row in enumerate(order[: 2 * top])
    ]
    result.plans = sorted((p for p in plans if p.fits), key=lambda p: p.step_time)[:top]
    front = [train(workload, machine, result._config(row), False) for row in pareto(costs, order)]
    result.pareto = unbeaten([*front, *result.plans[:1]])
    return result


def candidates(
    workload: Workload, cluster: Cluster, batch: int, held: Mapping[str, Any]
) -> tuple[Table, list[str]]:
    """Every configuration that uses all GPUs, and the rules by which families of them were left out."""
    gpus, layers = cluster.gpus, max(1, workload.layers)
    inner = cluster.links[0].size
    coarse, rows = [], []
    recompute = [
        i
        for i, name in enumerate(RECOMPUTE)
        if not (name == "selective" and cluster.software.fused_attention)
    ]
    for tp in _divisors(gpus):
        if "tp" not in held and tp > inner:
            coarse.append(f"tp={tp}: reaches over the {inner} GPUs that {cluster.links[0].name} joins")
            continue
        if tp > max(1, workload.head_ways) and tp > 1 and "tp" not in held:
            coarse.append(f"tp={tp}: {workload.name} divides into {workload.head_ways} at most")
            continue
        for cp in _divisors(gpus // tp):
            if workload.seq % cp:
                coarse.append(f"cp={cp}: {workload.seq} tokens are no multiple of it")
                continue
            if cp > 1 and "cp" not in held and (workload.seq < LONG or cp > 16 or workload.seq // cp < 1024):
                continue
            for pp in _divisors(gpus // tp // cp):
                if pp > layers:
                    coarse.append(f"pp={pp}: {layers} layers are fewer than its stages")
                    continue
                dp = gpus // tp // cp // pp
                if dp > batch:
                    coarse.append(f"tp={tp} pp={pp} cp={cp}: dp={dp} ranks for a batch of {batch}")
                    continue
                rows.append((tp, cp, pp, dp, _virtual(layers, pp)))
    coarse += _unused(cluster, layers)
    if workload.seq < LONG and "cp" not in held:
        coarse.append(f"cp > 1: for sequences from {LONG} tokens on; these have {workload.seq}")
    if cluster.software.fused_attention:
        coarse.append("recompute=selective: a fused attention keeps no scores to make again")
    coarse.append(f"micro_batch other than {', '.join(map(str, MICRO_BATCHES))}: near one of these")
    coarse.append("virtual_stages that do not cut the layers evenly, or more than 16")
    if workload.experts > 1:
        coarse.append(
            f"ep that does not divide {workload.experts} experts and dp: a rank would have a part of one"
        )
    columns: list[np.ndarray] = []
    for tp, cp, pp, dp, virtual in rows:
        micro = [m for m in MICRO_BATCHES if m <= batch // dp]
        grid = np.meshgrid(
            [tp],
            [cp],
            [pp],
            [dp],
            virtual,
            micro,
            [0, 1] if tp > 1 else [0],
            recompute,
            [0, 1, 2, 3] if dp * cp > 1 else [0],
            _divisors(int(np.gcd(workload.experts, dp))),
            indexing="ij",
        )
        columns.append(np.stack([g.reshape(-1) for g in grid]))
    if not columns:
        raise SearchError(f"No way to lay {workload.name} over {gpus} GPUs: " + "; ".join(coarse[:4]) + ".")
    table = Table(*np.concatenate(columns, axis=1))
    keep = np.ones(len(table), bool)
    names = {"virtual_stages": "virtual", "sequence_parallel": "sp"}
    for name, value in held.items():
        value = RECOMPUTE.index(value) if name == "recompute" else int(value)
        keep &= getattr(table, names.get(name, name)) == value
    # ZeRO 2 and 3 hold no whole gradients between the micro-batches of a pipeline.
    keep &= (table.pp == 1) | (table.zero < 2)
    if not keep.any():
        raise SearchError(f"No configuration of {gpus} GPUs has {dict(held)}. Leave some of it open.")
    coarse.append("zero=2 and zero=3 with pp > 1: each micro-batch would reduce or gather again")
    return table.take(np.flatnonzero(keep)), list(dict.fromkeys(coarse))


def _unused(cluster: Cluster, layers: int) -> list[str]:
    """Degrees of a pipeline that do not come up, for those who wonder."""
    return [
        f"pp={p}: {cluster.gpus} GPUs are no multiple of it"
        + (f", and {layers} layers and {p} stages are uneven" if layers % p else "")
        for p in (3, 5, 6, 7)
        if cluster.gpus % p
    ]


def _virtual(layers: int, pp: int) -> list[int]:
    """Interleavings that cut the layers evenly."""
    if pp == 1 or layers % pp:
        return [1]
    return [v for v in _divisors(layers // pp) if v <= 16]


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _impossible(table: Table, batch: int) -> np.ndarray:
    why = np.full(len(table), FINE)
    why[batch % (table.dp * table.micro_batch) != 0] = BATCH
    microbatches = batch // (table.dp * table.micro_batch)
    why[(why == FINE) & (table.virtual > 1) & (microbatches % table.pp != 0)] = ROUNDS
    return why


def _costs(
    workload: Workload, cluster: Cluster, table: Table, why: np.ndarray, batch: int, dtype: str
) -> Costs:
    """Costs of the possible rows; infinite time for the others."""
    rows = np.flatnonzero(why == FINE)
    if not len(rows):
        raise SearchError(
            f"batch={batch} over {cluster.gpus} GPUs: no dp and micro-batch divide it. Choose another."
        )
    some = evaluate(workload, cluster, table.take(rows), batch, dtype)

    def full(values: np.ndarray) -> np.ndarray:
        result = np.full(len(table), np.inf)
        result[rows] = values
        return result

    return Costs(
        full(some.time),
        full(some.memory),
        {k: full(v) for k, v in some.parts.items()},
        {k: full(v) for k, v in some.kinds.items()},
    )


def pareto(costs: Costs, by_time: np.ndarray) -> list[int]:
    """Rows that no other beats in both time and memory, given the rows from the fastest on."""
    front, least = [], np.inf
    for row in by_time:
        if costs.memory[row] < least * 0.995:  # half a percent is nobody's reason to choose
            front.append(int(row))
            least = costs.memory[row]
    return front


def unbeaten(plans: list[Prediction]) -> list[Prediction]:
    """Those that no other beats in both time and memory, fastest first."""
    front: list[Prediction] = []
    for plan in sorted(plans, key=lambda p: (p.step_time, p.peak_memory)):
        if not front or plan.peak_memory < front[-1].peak_memory:
            front.append(plan)
    return front


def _generate(
    workload: Workload, cluster: Cluster, batch: int, dtype: str, top: int, held: Mapping[str, Any]
) -> SearchResult:
    plans, rejected, coarse = [], [], []
    for tp in _divisors(cluster.gpus):
        if tp > max(1, workload.head_ways) and "tp" not in held:
            coarse.append(f"tp={tp}: {workload.name} divides into {workload.head_ways} at most")
            continue
        for pp in _divisors(cluster.gpus // tp):
            dp = cluster.gpus // tp // pp
            degrees = {"tp": tp, "pp": pp, "dp": dp}
            if any(degrees.get(k, v) != v for k, v in held.items()):
                continue
            config = Config(tp, pp, dp, 1, batch, 1, dtype=dtype)
            if pp > max(1, workload.layers):
                rejected.append(Rejected(config, f"{workload.layers} layers are fewer than {pp} stages"))
            elif batch % dp:
                rejected.append(Rejected(config, f"batch {batch} is no multiple of {dp} replicas"))
            else:
                plan = predict(
                    workload, cluster, tp=tp, pp=pp, dp=dp, batch=batch, dtype=dtype, mode="generate"
                )
                if plan.fits:
                    plans.append(plan)
                else:
                    needs = f"needs {plan.peak_memory / 1e9:.0f} GB of {cluster.gpu.memory:.0f}"
                    rejected.append(Rejected(config, needs, plan.peak_memory))
    plans.sort(key=lambda p: p.step_time)
    return SearchResult(
        cluster,
        workload,
        "generate",
        plans[:top],
        unbeaten(plans),
        len(plans) + len(rejected),
        len(plans),
        coarse,
        batch,
        dtype,
        _others=rejected,
    )


def choose_degrees(
    model: nn.Module | Workload,
    world_size: int,
    *,
    cluster: str | Cluster | None = None,
    batch: int | None = None,
    seq: int = 2048,
    mode: str = "train",
    **fixed: Any,
) -> dict[str, int]:
    """Degrees for the processes there are: {"tp": ..., "pp": ..., "dp": ...}, for `parallelize(model,
    tp="auto")`.

    cluster: what they run on; by default the shipped one whose GPU this process sees, or the CPU host. batch:
    sequences of a step, by default one a process. fixed: degrees that are given. Raises SearchError where
    nothing fits.
    """
    from dataclasses import replace

    machine = load(cluster if cluster is not None else here())
    per_node = min(machine.node, world_size)
    machine = replace(machine, node=per_node, nodes=max(1, world_size // per_node))
    if machine.gpus != world_size:
        raise SearchError(
            f"{world_size} processes do not fill nodes of {per_node}. Start a multiple, or give tp and pp."
        )
    best = search(model, machine, batch=batch or world_size, seq=seq, mode=mode, fixed=fixed).best.config
    return {"tp": best.tp, "pp": best.pp, "dp": best.dp}


def here() -> str:
    """The shipped cluster whose GPU this process sees; `cpu-host` where it sees none."""
    import torch

    if not torch.cuda.is_available():
        return "cpu-host"
    name = torch.cuda.get_device_name(0)
    for part, cluster in {
        "V100": "dgx-2",
        "A100": "dgx-a100",
        "H100": "dgx-h100",
        "H200": "hgx-h200",
        "GB200": "gb200-nvl72",
        "B200": "dgx-b200",
        "L40S": "l40s",
        "MI300X": "mi300x",
    }.items():
        if part in name:
            return cluster
    raise SearchError(
        f"No shipped cluster has {name!r}. Run `autotp calibrate`, and give the file it writes as cluster."
    )
