"""Fit a cluster's constants to the fit rows of the tables that ran on it. Held-out rows are not looked at.

    python -m tools.validate.fit dgx-a100 dgx-a100-4nic [--crossed]

prints the constants; they are put into the YAML by hand. Nelder and Mead (1965) on `error`. With --crossed
the constants are fitted to the held-out rows, too, and every row is judged by those that have not seen it.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np

from autotp.search.cluster import Cluster, load
from autotp.search.fitting import nelder_mead
from autotp.search.predict import Config, train

from .models import Models
from .report import line, outcomes
from .tables import Case, training

Vector = np.ndarray

# What may move, by cluster family.
FREE = {
    "dgx-a100": [
        "gpu.sustained",
        "gpu.half_k",
        "software.launch_us",
        "software.straggle",
        "software.overlap_sharp",
        "software.hop_us",
        "software.step_ms",
    ],
    "dgx-h100": [
        "gpu.sustained",
        "software.launch_us",
        "software.hop_us",
        "software.tp_overlap",
        "software.dp_overlap",
        "software.pp_overlap",
        "software.step_ms",
    ],
}


def put(cluster: Cluster, path: str, value: float) -> Cluster:
    """The cluster with one constant replaced."""
    part, name = path.split(".")
    changed: dict[str, Any] = {part: replace(getattr(cluster, part), **{name: value})}
    return replace(cluster, **changed)


def get(cluster: Cluster, path: str) -> float:
    """One constant of a cluster."""
    part, name = path.split(".")
    return float(getattr(getattr(cluster, part), name))


def error(cases: list[Case], clusters: dict[str, Cluster]) -> float:
    """Mean over the tables, each weighing the same: of the mean absolute log error, and of how far the errors
    of runs that are ranked among each other differ (their standard deviation)."""
    tables: dict[str, dict[object, list[float]]] = defaultdict(lambda: defaultdict(list))
    for case in cases:
        time = train(case.workload, machine(case, clusters), config(case), simulated=False).step_time
        # a few rows of every table are off by a factor of two for reasons of their own
        off = float(np.clip(np.log(time / case.measured), -0.3, 0.3))
        tables[case.table][case.group].append(off)
    errors = []
    for groups in tables.values():
        every = np.concatenate([np.array(g) for g in groups.values()])
        apart = [np.std(g) * len(g) for group, g in groups.items() if group]
        errors.append(np.abs(every).mean() + sum(apart) / len(every))
    return float(np.mean(errors))


def machine(case: Case, clusters: dict[str, Cluster]) -> Cluster:
    """A case's cluster, with the constants of `clusters`."""
    name, _, nodes = str(case.cluster).partition(":")
    return replace(clusters[name], nodes=int(nodes or 1))


def config(case: Case) -> Config:
    """A case's configuration."""
    options = dict(case.options)
    if options.get("virtual_stages", 1) > 1:
        options["schedule"] = "interleaved"
    return Config(**options)


def fitted(cases: list[Case], names: list[str], steps: int = 160) -> dict[str, Cluster]:
    """The named clusters with the constants of FREE that fit the cases best. Prints them."""
    base, free = {name: load(name) for name in names}, FREE[names[0]]
    share = np.array([path.endswith("_overlap") for path in free])
    start = np.array([get(base[names[0]], path) for path in free])
    some = np.clip(start, 0.05, 0.95)
    first = np.where(share, np.log(some / (1 - some)), np.log(np.maximum(start, 1e-3)))

    def values(x: Vector) -> Vector:
        return np.where(share, 1 / (1 + np.exp(-x)), np.exp(x))

    def clusters(x: Vector) -> dict[str, Cluster]:
        made = dict(base)
        for path, value in zip(free, values(x), strict=True):
            made = {name: put(cluster, path, float(value)) for name, cluster in made.items()}
        return made

    best, value = nelder_mead(lambda x: error(cases, clusters(x)), first, 0.15, steps)
    print(f"{len(cases)} rows; before: {error(cases, base):.4f}, after: {value:.4f}")
    print(", ".join(f"{path}: {v:.4g}" for path, v in zip(free, values(best), strict=True)), flush=True)
    return clusters(best)


def main(arguments: list[str]) -> None:
    """Fit and print."""
    names = [a for a in arguments if not a.startswith("--")]
    cases = [c for c in training(Models()) if str(c.cluster).split(":")[0] in names and c.what == "time"]

    def part(fit: bool) -> list[Case]:
        return [c for c in cases if c.fit == fit]

    def unlike(some: list[Case]) -> list[Case]:
        return [c for c in some if c.table != "SC21 table 2"]  # judged by its order alone

    ours = fitted(unlike(part(True)), names)
    if "--crossed" not in arguments:
        return
    others = fitted(unlike(part(False)), names)
    judged = [replace(c, cluster=machine(c, others if c.fit else ours)) for c in cases]
    for table in dict.fromkeys(c.table for c in judged):
        print(line(table, outcomes(c for c in judged if c.table == table), "crossed"), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
