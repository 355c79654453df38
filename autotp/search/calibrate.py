"""Measure the machine this runs on, and write it down as a cluster.

Matrix products by shape give peak and the efficiency curve; a copy gives memory bandwidth; tiny operations
give what a kernel and its launch cost; with several GPUs, all-reduces by size and number of ranks give the
link. Works on the CPU, too.
"""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from .cluster import Cluster, Gpu, Link, Software
from .fitting import nelder_mead

SMALL_SHAPES = [(m, n, k) for m in (64, 512, 2048) for n in (256, 1024, 2048) for k in (128, 512, 2048)]
LARGE_SHAPES = [
    (m, n, k) for m in (16, 256, 2048, 8192) for n in (256, 1024, 4096, 16384) for k in (128, 512, 2048, 8192)
]
SIZES = [2**e for e in range(12, 29, 2)]  # bytes of an all-reduce
Tick = Callable[[str], Any]


def calibrate(seconds: float = 60.0, progress: Tick = lambda text: None) -> Cluster:
    """Measure for about so many seconds. Gives a cluster of one node: this one."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32} if cuda else {"fp32": torch.float32}
    progress("memory")
    bandwidth, stream, kernel = _memory(device)
    peaks, curve = {}, (0.8, 8.0, 8.0, 8.0)
    share = seconds * 0.6 / len(dtypes)
    for name, dtype in dtypes.items():
        progress(f"matrix products in {name}")
        shapes = LARGE_SHAPES if cuda else SMALL_SHAPES
        measured = _products(device, dtype, shapes, share)
        peaks[name] = max(2 * m * n * k / t for (m, n, k), t in measured) / 1e12
        if name == next(iter(dtypes)):
            curve = _curve(
                measured, peaks[name] * 1e12, bandwidth * 1e9 * stream, kernel, torch.finfo(dtype).bits // 8
            )
    if "bf16" not in peaks:
        peaks["bf16"] = peaks["fp32"]  # a CPU without 16-bit units converts
    progress("launches")
    launch = _launch(device)
    ranks = torch.cuda.device_count() if cuda else 1
    progress("collectives")
    link = _link(ranks) if ranks > 1 else Link("none", 1, bandwidth / 4, 10.0)
    memory = (
        torch.cuda.get_device_properties(0).total_memory
        if cuda
        else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    )
    e0, half_m, half_n, half_k = (float(f"{v:.3g}") for v in curve)
    gpu = Gpu(
        torch.cuda.get_device_name(0) if cuda else f"CPU ({torch.get_num_threads()} threads)",
        round(memory / 1e9, 1),
        round(bandwidth, 1),
        {k: float(f"{v:.4g}") for k, v in peaks.items()},
        e0,
        half_m,
        half_n,
        half_k,
        sharp=3.0,
        stream=round(stream, 3),
        kernel_us=round(kernel * 1e6, 2),
        attention=0.5,
    )
    software = Software(launch_us=round(launch * 1e6, 2), decode_launch_us=round(launch * 1e6, 2))
    return Cluster(f"calibrated-{socket.gethostname()}", gpu, ranks, (link,), software)


def to_yaml(cluster: Cluster) -> str:
    """The cluster as a file that `load` reads."""
    data = asdict(cluster)
    data.pop("nodes")
    data["links"] = [{k: v for k, v in link.items() if v != {}} for link in data["links"]]
    data["source"] = f"measured by autotp calibrate, torch {torch.__version__}"
    return yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=110)


def timed(run: Callable[[], Any], device: torch.device, least: float = 0.01) -> float:
    """Seconds of one call: the best of three measurements of at least `least` seconds."""
    run()
    _wait(device)
    best, count = float("inf"), 1
    for _ in range(3):
        while True:
            start = time.perf_counter()
            for _ in range(count):
                run()
            _wait(device)
            taken = time.perf_counter() - start
            if taken >= least or count >= 4096:
                break
            count *= 2
        best = min(best, taken / count)
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _memory(device: torch.device) -> tuple[float, float, float]:
    """GB/s of a copy, the fraction of it that a pointwise operation reaches, seconds of a kernel."""
    n = 2**28 if device.type == "cuda" else 2**24
    a = torch.ones(n, dtype=torch.float32, device=device)
    b, c = torch.empty_like(a), torch.empty_like(a)
    copied = 8 * n / timed(lambda: b.copy_(a), device)
    added = 12 * n / timed(lambda: torch.add(a, b, out=c), device)
    one = torch.ones(8, device=device)
    kernel = timed(lambda: one.add_(1.0), device)
    most = max(copied, added)
    # A copy reaches about nine tenths of what the chip could do.
    return most / 0.9e9, 0.9 * min(copied, added) / most, kernel


def _products(
    device: torch.device, dtype: torch.dtype, shapes: list[tuple[int, int, int]], seconds: float
) -> list[tuple[tuple[int, int, int], float]]:
    """Seconds of matrix products, small ones first, while the time lasts."""
    end = time.perf_counter() + seconds
    measured: list[tuple[tuple[int, int, int], float]] = []
    for m, n, k in sorted(shapes, key=lambda s: s[0] * s[1] * s[2]):
        if time.perf_counter() > end and len(measured) > 8:
            break
        a, b = torch.randn(m, k, device=device).to(dtype), torch.randn(k, n, device=device).to(dtype)
        measured.append(((m, n, k), timed(lambda a=a, b=b: a @ b, device)))  # type: ignore[misc]
    return measured


def _curve(
    measured: list[Any], peak: float, stream: float, kernel: float, width: int
) -> tuple[float, float, float, float]:
    """The fraction of peak for large products, and the m, n and k at which it is halved."""
    m, n, k = np.array([shape for shape, _ in measured], float).T
    t = np.array([t for _, t in measured])

    def model(x: np.ndarray) -> np.ndarray:
        e0, hm, hn, hk = np.exp(x)
        fraction = e0 * m / (m + hm) * n / (n + hn) * k / (k + hk)
        computing, moving = 2 * m * n * k / (peak * fraction), width * (m * k + k * n + m * n) / stream
        return (computing**3 + moving**3) ** (1 / 3) + kernel

    best, _ = nelder_mead(
        lambda x: float(np.mean(np.abs(np.log(model(x) / t)))), np.log([0.95, 8.0, 16.0, 64.0]), 0.5, 400
    )
    e0, hm, hn, hk = np.exp(best)
    return float(e0), float(hm), float(hn), float(hk)


def _launch(device: torch.device) -> float:
    """Seconds of the host for one operation of an ordinary module."""
    layer, x = torch.nn.Linear(8, 8, device=device), torch.ones(1, 8, device=device)
    start = time.perf_counter()
    for _ in range(500):
        layer(x)
    taken = (time.perf_counter() - start) / 500
    _wait(device)
    return taken


def _link(ranks: int) -> Link:
    """The link between the GPUs of this machine, from all-reduces over two and over all of them."""
    with tempfile.TemporaryDirectory() as folder:
        for n in sorted({2, ranks}):
            torch.multiprocessing.spawn(_reduces, (n, str(Path(folder) / f"{n}")), nprocs=n)
        found = {n: np.loadtxt(Path(folder) / f"{n}.txt") for n in sorted({2, ranks})}
    speeds, latency = {}, {}
    for n, (sizes, times) in found.items():
        sent = 2 * (n - 1) / n * sizes
        speeds[n] = float(sent[-1] / (times[-1] - times[0])) / 1e9
        latency[n] = float(times[0]) * 1e6
    per_rank = (latency[ranks] - latency[2]) / (ranks - 2) if ranks > 2 else 0.0
    return Link(
        "measured",
        ranks,
        round(speeds[ranks], 1),
        round(latency[ranks] - per_rank * ranks, 1),
        round(per_rank, 2),
        two_ranks=round(speeds[2] / speeds[ranks], 3),
    )


def _reduces(rank: int, ranks: int, path: str) -> None:
    """One process of the all-reduce measurement; rank 0 writes sizes and times."""
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group(
        "nccl", init_method=f"file://{path}.store", rank=rank, world_size=ranks
    )
    times = []
    for size in SIZES:
        x = torch.ones(size // 2, dtype=torch.bfloat16, device="cuda")
        for _ in range(3):
            torch.distributed.all_reduce(x)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(10):
            torch.distributed.all_reduce(x)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) / 10)
    if rank == 0:
        np.savetxt(f"{path}.txt", np.array([SIZES, times]))
    torch.distributed.destroy_process_group()
