"""Generation: time to the first token, time per token, and how many sequences a replica holds."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ..errors import SearchError
from . import memory
from .cluster import Cluster, send
from .cost import BYTES, Setting, attention_time, matmul, messages_time, product_time, region_time
from .workload import Product, Shares, Unit, Workload, share

if TYPE_CHECKING:
    from .predict import Config


WORKSPACE = 2e9  # bytes of activations and buffers of a serving engine


def generation(
    workload: Workload, cluster: Cluster, c: Config
) -> tuple[float, float, int, tuple[float, ...], dict[str, float], dict[str, float]]:
    """Seconds per token, seconds of the prefill, sequences that fit, bytes per stage, bytes by kind, seconds
    by kind.

    `c.batch` sequences are shared out over dp replicas; of each, `workload.seq` tokens are in the cache. One
    token passes through all stages: pp adds memory, not speed.
    """
    if c.batch % c.dp:
        raise SearchError(f"batch={c.batch} over dp={c.dp} replicas: give a multiple.")
    sequences = c.batch // c.dp
    tp, one = np.ones(1) * c.tp, np.ones(1)
    ahead = Setting(tp, one * sequences, one * 0, one, c.dtype, True)
    token = decode_units(workload)
    times = Counter(workload.order)  # layers of one kind cost the same
    prefill = sum(
        n * _pass(cluster, workload.units[i], ahead, last=i == workload.order[-1], seq=workload.seq)[0]
        for i, n in times.items()
    )
    parts = {"compute": 0.0, "cache": 0.0, "tensor-parallel communication": 0.0, "pipeline sends": 0.0}
    parts["host"] = sequences * cluster.software.decode_sequence_us * 1e-6
    for i, n in times.items():
        compute, reading, sent = decode(cluster, token[i], ahead, workload)
        if i == workload.order[-1]:
            reading = 0.0
        parts["compute"] += n * compute
        parts["cache"] += n * reading
        parts["tensor-parallel communication"] += n * sent
    if c.pp > 1:
        width = max(u.output for u in token) * ahead.width * sequences
        parts["pipeline sends"] = (c.pp - 1) * float(send(cluster, c.tp * c.dp, width))
    step = sum(parts.values())
    mem, kinds, fit = _memory(workload, cluster, c, sequences)
    return step, prefill, fit, mem, kinds, parts


def decode_units(workload: Workload) -> list[Unit]:
    """The units as one new token sees them: one row where there was a sequence, the keys and values all
    there.
    """
    n = workload.seq

    def per_token(shares):
        return {k: v / n for k, v in shares.items()}

    def once_a_token(p):  # in batches, as a recurrence
        return not p.weight and p.batch >= n and p.batch % n == 0

    def product(p):
        if once_a_token(p):
            return replace(p, batch=p.batch / n)
        return replace(p, rows=p.rows / n if p.weight else max(1.0, p.rows / n))

    def kernels(unit):  # those of the other tokens' steps are not there, if each step was one
        others = (n - 1) * sum(once_a_token(p) for p in unit.products)
        return unit.traffic.kernels - (others if unit.traffic.kernels >= others else 0)

    return [
        replace(
            unit,
            products=[product(p) for p in unit.products],
            attentions=[replace(a, queries=1, causal=False) for a in unit.attentions],
            messages=[replace(m, elements=m.elements / n) for m in unit.messages],
            traffic=replace(unit.traffic, forward=per_token(unit.traffic.forward), kernels=kernels(unit)),
            output=unit.output / n,
        )
        for unit in workload.units
    ]


def _pass(cluster: Cluster, unit: Unit, s: Setting, last: bool, seq: int) -> tuple[float, float]:
    """Seconds of a forward over a unit (of the last one, the head, for one token per sequence), and of its
    communication.
    """
    total = np.zeros(1)
    for p in unit.products:
        total = total + product_time(cluster, replace(p, rows=p.rows / seq) if last else p, s)[0]
    for a in unit.attentions:
        total = total + attention_time(cluster, a, s)[0]
    total = total + region_time(cluster, Shares(unit.traffic.forward), s, unit.traffic.kernels)
    sent = messages_time(cluster, unit, s, "forward")
    return float((total + sent)[0]), float(sent[0])


def decode(cluster: Cluster, unit: Unit, s: Setting, workload: Workload) -> tuple[float, float, float]:
    """Seconds of one token for each sequence, of one unit: products and regions, reading the cache,
    communication.
    """
    compute = np.zeros(1)
    for p in unit.products:
        compute = compute + _token_product(cluster, p, s)
    kernels = unit.traffic.kernels + len(unit.products) + len(unit.attentions)
    compute = (
        compute
        + region_time(cluster, Shares(unit.traffic.forward), s, 0)
        + kernels * cluster.software.decode_launch_us * 1e-6
    )
    cached = memory.cache(
        unit, s.tp, s.micro_batch, float(workload.seq), s.dtype if BYTES[s.dtype] >= 2 else "fp8"
    )
    reading = cached / (cluster.gpu.bandwidth * 1e9 * cluster.gpu.stream)
    sent = np.minimum(messages_time(cluster, unit, s, "forward"), _one_shot(cluster, unit, s))
    return float(compute[0]), float(reading[0]), float(sent[0])


def _one_shot(cluster: Cluster, unit: Unit, s: Setting) -> np.ndarray:
    """Seconds of a unit's all-reduces, where each rank reads what it needs from the others' memory: all of it
    at once, or (twice the start) its part of the sum and then the others' parts. Infinite without such links.
    """
    start = cluster.software.decode_reduce_us * 1e-6
    others = [m for m in unit.messages if m.when == "forward" and m.kind != "reduce"]
    if not start or others or float(s.tp[0]) > cluster.links[0].size:
        return np.full(s.tp.shape, np.inf)
    total = np.zeros(s.tp.shape)
    for m in unit.messages:
        if m.when == "forward":
            each = m.elements * s.micro_batch * s.width / (cluster.links[0].bandwidth * 1e9)
            once, twice = (s.tp - 1) * each, 2 * (s.tp - 1) / s.tp * each + start
            total = total + start + np.minimum(once, twice)
    return np.where(s.tp > 1, total, 0.0)


def _token_product(cluster: Cluster, p: Product, s: Setting) -> np.ndarray:
    part = share(s.tp, p.ways) if p.ways > 1 else np.ones(1)
    rows = p.rows * s.micro_batch
    cols, inner, times = np.full(1, p.cols), np.full(1, p.inner), np.full(1, p.batch)
    groups = max(1.0, round(p.weight / (p.cols * p.inner)))
    if p.split == "cols":
        cols = cols * part
    elif p.split == "inner":
        inner = inner * part
    elif p.split in ("rows", "batch"):
        times = times * part
    if groups > 1:
        used = groups * (1 - (1 - 1 / groups) ** rows)  # experts that some token chose
        times, rows = times * used, rows / used
    return matmul(cluster, rows, cols, inner, times, s.dtype) - cluster.gpu.kernel_us * 1e-6


def _memory(workload: Workload, cluster: Cluster, c: Config, sequences: int):
    width = BYTES[c.dtype]
    tp = np.ones(1) * c.tp
    layers = [i for i in workload.order]
    per = -(-len(layers) // c.pp)
    held = [layers[k * per : (k + 1) * per] for k in range(c.pp)]
    totals, kinds, fits = [], [], []
    for stage in held:
        weights = sum(float(workload.units[i].params.local(tp)[0]) for i in stage) * width
        cached = sum(
            float(memory.cache(workload.units[i], tp, np.ones(1), float(workload.seq), c.dtype)[0])
            for i in stage
        )
        kind = {"weights": weights, "cache": cached * sequences, "workspace": WORKSPACE}
        kinds.append(kind)
        totals.append(sum(kind.values()))
        room = memory.usable(cluster) * 0.95 - kind["weights"] - kind["workspace"]
        fits.append(int(max(0.0, room / cached)) if cached else 10**9)
    return tuple(totals), kinds[int(np.argmax(totals))], min(fits) * c.dp
