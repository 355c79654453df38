"""What a model runs on: GPUs, the links between them, and the software, as a small YAML.

    cluster = load("dgx-h100:8")        # eight nodes of the shipped clusters/dgx-h100.yaml
    cluster = load("mine.yaml:2")       # your own file, say one that `autotp calibrate` wrote

Units in the file: TFLOP/s, GB/s (10^9 bytes), microseconds, GB of GPU memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from ..errors import SearchError

SHIPPED = Path(__file__).parent.parent / "clusters"


@dataclass(frozen=True)
class Gpu:
    """One device. peak: dtype -> TFLOP/s. Of a matrix product [m, k] @ [k, n] it reaches the fraction `matmul
    * m/(m+half_m) * n/(n+half_n) * k/(k+half_k)`; of its memory's bandwidth `stream`, with `kernel_us` to
    start a kernel. The slower of the two decides, smoothed by the exponent `sharp`. attention: fraction of
    peak of a fused attention. sustained: what is left of matmul speed in hours of training, by heat and
    power. unaligned: what is left of matmul speed where the rows of a matrix are an odd number of 16-bit
    elements, so that tensor cores are fed two bytes at a time; between that and rows of eight elements it
    falls evenly with each halving.
    """

    name: str
    memory: float
    bandwidth: float
    peak: Mapping[str, float]
    matmul: float
    half_m: float = 0.0
    half_n: float = 0.0
    half_k: float = 0.0
    sharp: float = 4.0
    stream: float = 0.8
    kernel_us: float = 3.0
    attention: float = 0.5
    sustained: float = 1.0
    unaligned: float = 0.5


@dataclass(frozen=True)
class Link:
    """A level of interconnect: groups of up to `size` GPUs. bandwidth: GB/s of one GPU in one direction, as
    measured.

    A collective over n ranks takes `latency_us + per_rank_us * n + root_us * sqrt(MiB) + f * bytes /
    bandwidth`, where f is the share of the tensor that a ring sends, (n-1)/n (twice for an all-reduce).
    reduce_bandwidth: {ranks: GB/s}
    of an all-reduce from so many ranks on, where it is another: a switch that sums (NVLS), PCIe over two
    sockets.
    """

    name: str
    size: int
    bandwidth: float
    latency_us: float
    per_rank_us: float = 0.0
    root_us: float = 0.0
    reduce_bandwidth: Mapping[int, float] = field(default_factory=dict)
    two_ranks: float = 1.0  # bandwidth of two ranks, as a fraction of that of a full group


@dataclass(frozen=True)
class Software:
    """How the training program behaves. fused_attention: false for software of before 2022, which wrote the
    score matrix.

    launch_us: the host's time to start a kernel; a pass over a layer takes no less than its kernels times
    that. tp_overlap, dp_overlap, pp_overlap, zero3_overlap: the share of such communication that can hide
    behind computation. grouped_zero3: false where ZeRO-3 brings every weight to every GPU over its own
    network card, as DeepSpeed did in 2021. gradient_bytes: of a gradient that is accumulated; reduce_bytes:
    of one on its way between data-parallel ranks. softmax_group: where the heads of a rank times the
    micro-batch are no multiple of it, Megatron's fused softmax gives way to PyTorch's, of more kernels (0:
    never).
    reserve: GB that CUDA, NCCL and the allocator take. step_ms: per step, whatever the model. hop_us: what
    a pipeline stage waits for its neighbour each time, beside the bytes.
    decode_launch_us: the same as launch_us for generation, where kernels are launched as a graph.
    decode_reduce_us: to start a one-shot all-reduce, as serving engines have for short messages (0: they
    have none, as over PCIe). decode_sequence_us: the host's time a sequence and token (scheduling, sampling).
    straggle: by how much launch-bound ranks of tp=8 hold each other up. overlap_sharp: how sharply a pass
    turns from launch-bound to compute-bound. traffic: bytes that the regions between products really move,
    over those of perfect fusion.
    """

    fused_attention: bool = True
    launch_us: float = 20.0
    decode_launch_us: float = 3.0
    decode_reduce_us: float = 0.0
    decode_sequence_us: float = 0.0
    straggle: float = 0.25
    overlap_sharp: float = 2.5
    traffic: float = 1.0
    tp_overlap: float = 0.0
    dp_overlap: float = 0.0
    pp_overlap: float = 0.0
    zero3_overlap: float = 0.7
    hop_us: float = 50.0
    grouped_zero3: bool = True
    gradient_bytes: float = 4.0
    reduce_bytes: float = 4.0
    softmax_group: int = 0
    reserve: float = 1.0
    step_ms: float = 10.0


@dataclass(frozen=True)
class Cluster:
    """GPUs in nodes. node: GPUs of one. links: the innermost level first; the last spans all."""

    name: str
    gpu: Gpu
    node: int
    links: tuple[Link, ...]
    software: Software
    nodes: int = 1

    @property
    def gpus(self) -> int:
        return self.node * self.nodes

    def peak(self, dtype: str) -> float:
        """FLOP/s of a matrix product of `dtype`."""
        known = self.gpu.peak
        name = {
            "fp16": "bf16",
            "float16": "bf16",
            "bfloat16": "bf16",
            "float32": "fp32",
            "float8": "fp8",
        }.get(dtype, dtype)
        if name not in known:
            raise SearchError(
                f"{self.name} states no peak for {dtype}; it has {', '.join(known)}. Choose one of them."
            )
        return known[name] * 1e12


def load(source: str | Cluster) -> Cluster:
    """A cluster by name, or from a YAML file; `:8` after either means eight nodes. Raises SearchError, naming
    what there is.
    """
    if isinstance(source, Cluster):
        return source
    name, _, nodes = source.partition(":")
    path = Path(name) if name.endswith((".yaml", ".yml")) else SHIPPED / f"{name}.yaml"
    if not path.is_file():
        shipped = ", ".join(sorted(p.stem for p in SHIPPED.glob("*.yaml")))
        raise SearchError(
            f"No cluster {name!r}. Shipped: {shipped}. Or give a YAML file, as `autotp calibrate` writes one."
        )
    if nodes and not (nodes.isdigit() and int(nodes) > 0):
        raise SearchError(f"{source}: after the colon comes a number of nodes, as in {name}:8.")
    return parse(yaml.safe_load(path.read_text()), str(path), int(nodes or 1))


def parse(raw: Any, where: str, nodes: int = 1) -> Cluster:
    """A cluster from what a YAML file holds. Raises SearchError for a key that is missing or unknown."""
    if not isinstance(raw, dict):
        raise SearchError(f"{where}: holds no mapping. It must have name, node, gpu, links and software.")
    top = {"name", "node", "gpu", "links", "software"}
    if set(raw) - top - {"source"} or not {"name", "node", "gpu", "links"} <= set(raw):
        raise SearchError(
            f"{where}: keys {sorted(map(str, raw))}; it must have {', '.join(sorted(top))} "
            "(and may have source)."
        )
    links = tuple(_make(Link, link, f"{where}: links") for link in raw["links"])
    return Cluster(
        raw["name"],
        _make(Gpu, raw["gpu"], f"{where}: gpu"),
        int(raw["node"]),
        links,
        _make(Software, raw.get("software") or {}, f"{where}: software"),
        nodes,
    )


def _make(kind: Any, raw: Mapping[str, Any], where: str) -> Any:
    known = {f.name for f in fields(kind)}
    if set(raw) - known:
        raise SearchError(
            f"{where}: unknown {', '.join(sorted(set(raw) - known))}; known are {', '.join(sorted(known))}."
        )
    try:
        return kind(**raw)
    except TypeError as error:
        raise SearchError(f"{where}: {error}.") from error


# ---------------------------------------------------------------- collectives
def collective(link: Link, kind: str, ranks: Any, size: Any) -> np.ndarray:
    """Seconds of a `reduce` (all-reduce), `scatter` (reduce-scatter) or `gather` of `size` bytes over `ranks`
    of one group.
    """
    n, size = np.asarray(ranks, float), np.asarray(size, float)
    bandwidth = np.where(n <= 2, link.bandwidth * link.two_ranks, link.bandwidth)
    if kind == "reduce":
        for start, fast in link.reduce_bandwidth.items():
            bandwidth = np.where(n >= start, fast, bandwidth)
    rounds = 2.0 if kind == "reduce" else 1.0
    sent = rounds * (n - 1) / np.maximum(n, 1) * size / (bandwidth * 1e9)
    start_up = (
        link.latency_us + link.per_rank_us * n * rounds / 2 + link.root_us * np.sqrt(size / 2**20)
    ) * 1e-6
    return np.where(n > 1, sent + start_up, 0.0)


def spread(cluster: Cluster, kind: str, ranks: Any, stride: Any, size: Any) -> np.ndarray:
    """Seconds of a collective over `ranks` GPUs that are `stride` apart: inside the node first, then between
    nodes.

    Hierarchical: reduce-scatter inside, all-reduce of the parts between, all-gather inside. All the groups of
    a node run at once, so each GPU has its own share of the network.
    """
    ranks, stride = np.asarray(ranks, float), np.asarray(stride, float)
    inside = np.clip(cluster.links[0].size / stride, 1, ranks)
    outside = np.maximum(1, ranks / inside)
    inner, outer = cluster.links[0], cluster.links[-1]
    if len(cluster.links) == 1:
        return collective(inner, kind, ranks, size)
    within = collective(inner, kind, inside, size)
    return within + collective(outer, kind, outside, np.asarray(size, float) / inside)


def exchange(cluster: Cluster, ranks: Any, stride: Any, size: Any) -> np.ndarray:
    """Seconds of an all-to-all of `size` bytes a rank over `ranks` GPUs that are `stride` apart: what stays
    in the node and what leaves it go at the same time."""
    ranks, stride, size = (np.asarray(x, float) for x in (ranks, stride, size))
    inner, outer = cluster.links[0], cluster.links[-1]
    inside = np.clip(inner.size / stride, 1, ranks) if len(cluster.links) > 1 else ranks
    near = (inside - 1) / ranks * size / (inner.bandwidth * 1e9) + inner.latency_us * 1e-6
    far = (1 - inside / ranks) * size / (outer.bandwidth * 1e9) + outer.latency_us * 1e-6
    return np.where(ranks > 1, np.where(inside < ranks, np.maximum(near, far), near), 0.0)


def send(cluster: Cluster, stride: Any, size: Any) -> np.ndarray:
    """Seconds that a pipeline stage is held up by sending `size` bytes to the GPU `stride` away."""
    stride = np.asarray(stride)
    outside = (stride >= cluster.links[0].size) & (len(cluster.links) > 1)
    inner, outer = cluster.links[0], cluster.links[-1]
    bandwidth = np.where(outside, outer.bandwidth, inner.bandwidth)
    software = cluster.software
    return software.hop_us * 1e-6 + np.asarray(size, float) / (bandwidth * 1e9) * (1 - software.pp_overlap)
