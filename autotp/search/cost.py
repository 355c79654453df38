"""Seconds of each unit of a model on one rank, for many configurations at once.

All functions take arrays of tensor-parallel degrees, micro-batch sizes and so on, of one shape, and give
arrays of it.

* A matrix product [m, k] @ [k, n] reaches a fraction of peak that falls for small m, n and k, and can't be
  faster than its bytes: time = ((flops / (peak * fraction))^q + (bytes / stream)^q)^(1/q) + start. The small
  k is what makes tensor parallelism cost something even without communication.
* Regions between products cost their bytes. An attention is fused (flops) or not (two products and the score
  matrix).
* A pass over a layer takes no less than the host needs to launch its kernels. At the embedding and the head
  that time adds up, since the loss is read for every micro-batch.
* Tensor-parallel collectives are exposed, but for the share that the software overlaps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ..errors import SearchError
from .cluster import Cluster, collective, exchange, spread
from .workload import Attention, Product, Shares, Unit, Workload, share

BYTES = {"fp32": 4.0, "tf32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "fp4": 0.5}
Array = np.ndarray

# Elements moved per score of an attention that is not fused, beside its two products: by a softmax (read,
# write), and with dropout by its read, write and mask; backward likewise.
_SOFTMAX, _SOFTMAX_BACK = 2.0, 3.0  # elements
_DROPOUT, _DROPOUT_BACK = 2.5, 2.5
_PLAIN_SOFTMAX = 4  # kernels more, where the fused softmax can't run: casts, scale, mask

# Bytes moved per logit by a cross-entropy of one kernel an operation, in 32 bits: cast, maximum, subtract,
# exp, sum and divide; backward, scale and cast.
_LOSS, _LOSS_BACK = 38.0, 14.0
_LOSS_KERNELS, _LOSS_BACK_KERNELS = 8, 4


def dtype_named(dtype: object) -> str:
    """The short name of a dtype: `bf16` for "bfloat16" and torch.bfloat16. Raises SearchError for others."""
    long = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float8": "fp8"}
    name = str(dtype).removeprefix("torch.")
    name = long.get(name, name)
    if name not in BYTES:
        raise SearchError(f"dtype={dtype!r}: choose one of {', '.join(BYTES)}.")
    return name


@dataclass(frozen=True)
class Passes:
    """Seconds of one micro-batch. Computation and exposed tensor-parallel communication, forward and
    backward; `again`: the forward parts that selective recomputation runs again in the backward."""

    forward: Array
    backward: Array
    again: Array
    forward_sent: Array
    backward_sent: Array


@dataclass(frozen=True)
class Setting:
    """What the cost of a unit depends on. Arrays of one shape: tp, micro_batch, sequence_parallel (0 or 1),
    cp, ep.

    dtype: of products; fused: whether attentions are. kept: bytes of an element of an activation.
    """

    tp: Array
    micro_batch: Array
    sequence_parallel: Array
    cp: Array
    dtype: str = "bf16"
    fused: bool = True
    ep: Array | float = 1.0

    @property
    def width(self) -> float:
        return max(BYTES[self.dtype], 2.0)  # fp8 training keeps its activations in 16 bits

    @property
    def divide(self) -> Array:
        """By how much sequence parallelism divides what tensor parallelism does not."""
        return np.where(self.sequence_parallel > 0, self.tp, 1)


def matmul(
    cluster: Cluster,
    m: Array,
    n: Array,
    k: Array,
    times: Array,
    dtype: str,
    weight_width: float | None = None,
) -> Array:
    """Seconds of `times` products [m, k] @ [k, n], run as one kernel."""
    gpu = cluster.gpu
    width = BYTES[dtype]
    fraction = gpu.matmul * m / (m + gpu.half_m) * n / (n + gpu.half_n) * k / (k + gpu.half_k)
    computing = 2 * m * n * k * times / (cluster.peak(dtype) * fraction)
    moved = (width * m * k + (weight_width or width) * k * n + 2.0 * m * n) * times
    moving = moved / (gpu.bandwidth * 1e9 * gpu.stream)
    return (computing**gpu.sharp + moving**gpu.sharp) ** (1 / gpu.sharp) + gpu.kernel_us * 1e-6


def aligned(cluster: Cluster, *dims: float) -> float:
    """The fraction of speed that rows of so many elements leave: 1 for multiples of 8, `unaligned` for odd
    ones."""
    worst = min(int(np.gcd(round(d), 8)) for d in dims)
    return float(cluster.gpu.unaligned ** (1 - np.log2(worst) / 3))


def product_time(cluster: Cluster, product: Product, s: Setting) -> tuple[Array, Array]:
    """Seconds of a product forward, and backward (with respect to both operands)."""
    part = share(s.tp, product.ways) if product.ways > 1 else np.ones(s.tp.shape)
    rows = product.rows * s.micro_batch / s.cp
    cols, inner = np.full(s.tp.shape, product.cols), np.full(s.tp.shape, product.inner)
    times = np.full(s.tp.shape, product.batch)
    groups = product.experts  # each sees some of the rows, and expert parallelism leaves a rank some of them
    if not product.weight:
        times, rows = times * s.micro_batch, np.full(s.tp.shape, product.rows) / s.cp
    if groups > 1:
        rows, times = rows * s.ep / groups, times * groups / s.ep
    if product.split == "cols":
        cols = cols * part
    elif product.split == "inner":
        inner = inner * part
    elif product.split in ("rows", "batch"):
        times = times * part
    forward = matmul(cluster, rows, cols, inner, times, s.dtype)
    backward = matmul(cluster, rows, inner, cols, times, s.dtype) + matmul(
        cluster, inner, cols, rows, times, s.dtype
    )
    speed: Array = np.full(s.tp.shape, cluster.gpu.sustained)
    if product.weight and s.width == 2.0:
        # Who divides an odd dimension pads it (Megatron's vocabulary); whole it is as the model has it.
        padded = (s.tp > 1) & (product.split in ("cols", "inner"))
        speed = speed * np.where(padded, 1.0, aligned(cluster, product.cols, product.inner))
    return forward / speed, backward / speed


def attention_time(cluster: Cluster, a: Attention, s: Setting) -> tuple[Array, Array]:
    """Seconds of an attention forward and backward."""
    gpu = cluster.gpu
    heads = a.heads * share(s.tp, a.heads) * s.micro_batch
    queries = a.queries / s.cp
    stream = gpu.bandwidth * 1e9 * gpu.stream
    if s.fused:
        # FlashAttention (Dao et al., 2022): the masked half is skipped, the backward makes the scores again.
        half = 0.5 if a.causal else 1.0
        flops = 2 * heads * queries * a.keys * (a.size + a.value_size) * half
        peak = cluster.peak("bf16" if BYTES[s.dtype] < 2 else s.dtype) * gpu.attention * gpu.sustained
        moved = (
            s.width
            * heads
            * (queries * (a.size + a.value_size) + a.keys * (a.size + a.value_size) * a.kv_heads / a.heads)
        )
        forward = np.maximum(flops / peak, moved / stream)
        return forward + gpu.kernel_us * 1e-6, 2.5 * forward * 1.15 + 2 * gpu.kernel_us * 1e-6
    scores, values = np.full(s.tp.shape, queries), np.full(s.tp.shape, float(a.keys))
    size, value_size = np.full(s.tp.shape, float(a.size)), np.full(s.tp.shape, float(a.value_size))
    first = matmul(cluster, scores, values, size, heads, s.dtype)
    second = matmul(cluster, scores, value_size, values, heads, s.dtype)
    elements = s.width * heads * scores * values
    softmax = elements * (_SOFTMAX + (_DROPOUT if a.dropout else 0)) / stream + 2 * gpu.kernel_us * 1e-6
    back = (
        elements * (_SOFTMAX_BACK + (_DROPOUT_BACK if a.dropout else 0)) / stream + 2 * gpu.kernel_us * 1e-6
    )
    products = (first + second) / gpu.sustained
    return products + softmax, 2 * products + back


def region_time(cluster: Cluster, moved: Shares, s: Setting, kernels: int) -> Array:
    """Seconds of the regions between products, that read and write so many elements."""
    moved = Shares(moved)
    size = s.width * moved.local(s.tp, s.divide) * s.micro_batch / s.cp * cluster.software.traffic
    return size / (cluster.gpu.bandwidth * 1e9 * cluster.gpu.stream) + kernels * cluster.gpu.kernel_us * 1e-6


def messages_time(cluster: Cluster, unit: Unit, s: Setting, when: str, overlap: float = 0.0) -> Array:
    """Seconds of a unit's tensor-parallel collectives, but for the share `overlap` that computation hides."""
    total = np.zeros(s.tp.shape)
    for m in unit.messages:
        if m.when != when:
            continue
        size = m.elements * s.micro_batch / s.cp * (4.0 if m.statistic else s.width)
        whole = spread(cluster, m.kind, s.tp, np.ones(s.tp.shape), size)
        if m.kind == "reduce" and not m.statistic:
            # A reduce-scatter and an all-gather: the same bytes, started twice.
            halves = spread(cluster, "scatter", s.tp, np.ones(s.tp.shape), size) + spread(
                cluster, "gather", s.tp, np.ones(s.tp.shape), size
            )
            whole = np.where(s.sequence_parallel > 0, halves, whole)
        total = total + whole
    return total * (1 - overlap)


def exchange_time(cluster: Cluster, unit: Unit, s: Setting) -> Array:
    """Seconds of one pass's all-to-alls of expert parallelism: tokens to their experts, and back."""
    chosen = [p for p in unit.products if p.experts > 1]
    if not chosen or np.all(np.asarray(s.ep) == 1):
        return np.zeros(s.tp.shape)
    size = chosen[0].rows * chosen[0].inner * s.micro_batch / s.cp / s.divide * s.width
    return 2 * exchange(cluster, s.ep, s.tp * s.cp, size)


def unit_passes(cluster: Cluster, unit: Unit, s: Setting) -> Passes:
    """Seconds of one unit for one micro-batch."""
    forward, backward, again = (np.zeros(s.tp.shape) for _ in range(3))
    for product in unit.products:
        ahead, back = product_time(cluster, product, s)
        forward, backward = forward + ahead, backward + back
    for attention in unit.attentions:
        ahead, back = attention_time(cluster, attention, s)
        forward, backward, again = forward + ahead, backward + back, again + ahead
    t = unit.traffic
    forward = forward + region_time(cluster, Shares(t.forward), s, t.kernels)
    backward = backward + region_time(cluster, Shares(t.backward), s, t.kernels)
    kernels: Array = np.full(
        s.tp.shape, len(unit.products) + t.kernels + len(unit.attentions) * (1 if s.fused else 4)
    )
    group = cluster.software.softmax_group
    if group and not s.fused:
        for a in unit.attentions:
            uneven = np.round(a.heads * share(s.tp, a.heads) * s.micro_batch) % group > 0
            kernels = kernels + np.where(uneven, _PLAIN_SOFTMAX, 0)
    # Ranks that are launch-bound wait for the slowest of them at every collective.
    # No one has seen them at more than eight, so more wait no longer than those.
    waiting = 1 + cluster.software.straggle * np.minimum(s.tp / 8.0, 1.0) ** 2 * (s.tp > 1)
    launching = kernels * cluster.software.launch_us * 1e-6 * waiting
    hidden = cluster.software.tp_overlap
    ahead, back = (messages_time(cluster, unit, s, when, hidden) for when in ("forward", "backward"))
    moved = exchange_time(cluster, unit, s)
    ahead, back = ahead + moved, back + moved
    if unit.layer:
        # A collective ends when the last rank's host has come to it: no rank's launching hides behind it.
        forward = _overlapped(forward, launching, cluster)
        backward = _overlapped(backward, 2 * launching, cluster)
    else:
        # The loss is read for every micro-batch: there the host is not ahead, and its time adds up.
        forward, backward = forward + launching, backward + 2 * launching
    return Passes(forward, backward, again, ahead, back)


def _overlapped(device: Array, host: Array, cluster: Cluster) -> Array:
    """Seconds of a pass that the device computes while the host launches: the longer of the two, and more
    where they are alike, since each then waits for the other at times."""
    q = cluster.software.overlap_sharp
    return (device**q + host**q) ** (1 / q)


def loss_time(cluster: Cluster, workload: Workload, s: Setting) -> tuple[Array, Array]:
    """Seconds of a cross-entropy on the logits, forward and backward: in 32 bits, over vocabulary-parallel
    parts.
    """
    local = workload.logits.local(s.tp, 1) * s.micro_batch / s.cp
    stream = cluster.gpu.bandwidth * 1e9 * cluster.gpu.stream
    sent = collective(cluster.links[0], "reduce", s.tp, 4.0 * workload.seq * s.micro_batch / s.cp)
    host = cluster.software.launch_us * 1e-6
    forward = local * _LOSS / stream + 3 * sent + _LOSS_KERNELS * host
    return forward, local * _LOSS_BACK / stream + _LOSS_BACK_KERNELS * host


def ring_time(cluster: Cluster, units: Iterable[Unit], s: Setting) -> Array:
    """Seconds of context parallelism for one pass over a unit: keys and values go round, each hop behind its
    computation but for the first; none where cp is 1."""
    total = np.zeros(s.tp.shape)
    for unit in units:
        for a in unit.attentions:
            size = (
                s.width
                * s.micro_batch
                * a.keys
                / s.cp
                * a.kv_heads
                * share(s.tp, a.kv_heads)
                * (a.size + a.value_size)
            )
            total = total + spread(cluster, "gather", s.cp, s.tp, size * s.cp) * (
                1 - cluster.software.tp_overlap
            )
    return np.where(s.cp > 1, total, 0.0)
