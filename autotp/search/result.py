"""What a search gives: the plans, the front, and why each other configuration is not among them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import SearchError
from .cluster import Cluster
from .predict import Config, Prediction
from .table import Table
from .workload import Workload

# Reasons are kept as numbers, and put into words when asked for.
FINE, TOO_BIG, BATCH, ROUNDS = range(4)


@dataclass(frozen=True)
class Rejected:
    """A configuration that is not possible, and why."""

    config: Config
    reason: str
    memory: float = float("inf")  # bytes of the fullest GPU, where it was too much


@dataclass
class SearchResult:
    """plans: the best, simulated, best first. pareto: those that no other beats in both time and memory,
    fastest first. considered: how many configurations were looked at, `fit` of them fit. coarse: reasons for
    whole families of configurations. `rejected()` gives every configuration that was turned down, with its
    reason."""

    cluster: Cluster
    workload: Workload
    mode: str
    plans: list[Prediction]
    pareto: list[Prediction]
    considered: int
    fit: int
    coarse: list[str]
    batch: int = 0
    dtype: str = "bf16"
    _table: Table | None = field(default=None, repr=False)
    _why: np.ndarray | None = field(default=None, repr=False)
    _memory: np.ndarray | None = field(default=None, repr=False)
    _time: np.ndarray | None = field(default=None, repr=False)
    _others: list[Rejected] = field(default_factory=list, repr=False)

    @property
    def best(self) -> Prediction:
        """The fastest plan. Raises SearchError where nothing fits, with what came nearest."""
        if not self.plans:
            raise SearchError(
                f"Nothing fits: of {self.considered} configurations of {self.workload.name} on "
                f"{self.cluster.gpus} x {self.cluster.gpu.name} none does. {self._nearest()} Take more "
                "GPUs, or a smaller batch or sequence."
            )
        return self.plans[0]

    def _nearest(self) -> str:
        if self._memory is not None and self._table is not None and len(self._memory):
            row = int(np.argmin(self._memory))
            least, config = self._memory[row], str(self._config(row))
        elif self._others:
            nearest = min(self._others, key=lambda r: r.memory)
            least, config = nearest.memory, degrees(nearest.config)
            if not np.isfinite(least):
                return f"With {config}: {nearest.reason}."
        else:
            return ""
        return f"The least memory: {least / 1e9:.0f} GB of {self.cluster.gpu.memory:.0f} with {config}."

    def _config(self, row: int) -> Config:
        assert self._table is not None
        return self._table.config(row, self.batch, self.dtype, "1f1b")

    def fitting(self) -> tuple[np.ndarray, np.ndarray]:
        """Seconds and bytes of every configuration that fits, as the search estimated them."""
        if self._why is None or self._time is None or self._memory is None:
            return np.array([p.step_time for p in self.plans]), np.array([p.peak_memory for p in self.plans])
        fine = self._why == FINE
        return self._time[fine], self._memory[fine]

    def rejected(self) -> Iterator[Rejected]:
        """Every configuration that was turned down, with its reason."""
        yield from self._others
        if self._why is None or self._table is None or self._memory is None:
            return
        for row in np.flatnonzero(self._why != FINE):
            config = self._config(int(row))
            yield Rejected(config, self._reason(int(row), config))

    def _reason(self, row: int, c: Config) -> str:
        assert self._why is not None and self._memory is not None
        if self._why[row] == TOO_BIG:
            return f"needs {self._memory[row] / 1e9:.0f} GB of {self.cluster.gpu.memory:.0f}"
        if self._why[row] == BATCH:
            return f"batch {self.batch} is no multiple of dp={c.dp} x micro_batch={c.micro_batch}"
        return f"{c.microbatches} micro-batches are no multiple of pp={c.pp}, which interleaving needs"

    def why(self, a: Prediction, b: Prediction) -> str:
        """The two plans compared: what each gains and pays."""
        lines = [f"A: {named(a)}", f"B: {named(b)}"]
        rows: list[tuple[str, float, float, Callable[[float], str]]] = [
            ("token" if a.prefill_time is not None else "step", a.step_time, b.step_time, seconds),
            *((f"  {k}", a.breakdown[k], b.breakdown.get(k, 0.0), seconds) for k in a.breakdown),
        ]
        if a.prefill_time is not None and b.prefill_time is not None:
            rows.append(("prefill", a.prefill_time, b.prefill_time, seconds))
        kinds = {**a.memory_breakdown, **b.memory_breakdown}
        rows.append(("memory of the fullest GPU", a.peak_memory, b.peak_memory, gigabytes))
        rows += [
            (f"  {k}", a.memory_breakdown.get(k, 0.0), b.memory_breakdown.get(k, 0.0), gigabytes)
            for k in kinds
        ]
        for name, x, y, shown in rows:
            if max(x, y) > 0:
                better = "equal" if shown(x) == shown(y) else "A is better" if x < y else "B is better"
                lines.append(f"  {name:34} {shown(x):>10}  {shown(y):>10}  {better}")
        faster, slower = (a, b) if a.step_time <= b.step_time else (b, a)
        gains = {k: slower.breakdown.get(k, 0.0) - v for k, v in faster.breakdown.items()}
        most = max(gains, key=lambda k: gains[k])
        lines.append(
            f"{'A' if faster is a else 'B'} is {slower.step_time / faster.step_time - 1:.1%} faster, most of "
            f"it by {most} ({seconds(gains[most])} less)."
        )
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "model": self.workload.name,
            "parameters": self.workload.parameters,
            "cluster": self.cluster.name,
            "gpus": self.cluster.gpus,
            "mode": self.mode,
            "considered": self.considered,
            "fit": self.fit,
            "plans": [p.to_dict() for p in self.plans],
            "pareto": [p.to_dict() for p in self.pareto],
            "rules": self.coarse,
        }


def named(p: Prediction) -> str:
    """A plan's configuration, as it reads: of generation the degrees alone."""
    return str(p.config) if p.prefill_time is None else degrees(p.config)


def degrees(c: Config) -> str:
    """The degrees of a configuration that generates."""
    return f"tp={c.tp} pp={c.pp} replicas={c.dp}"


def seconds(t: float) -> str:
    """A time in the unit that reads best."""
    if t >= 1:
        return f"{t:.2f} s"
    return f"{t * 1e3:.2f} ms" if t >= 1e-3 else f"{t * 1e6:.0f} us"


def gigabytes(size: float) -> str:
    """Bytes as GB."""
    return f"{size / 1e9:.2f} GB"
