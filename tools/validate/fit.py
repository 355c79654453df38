"""Fit a cluster's constants to the fit rows of the tables that ran on it. Held-out rows are not looked at.

    python -m tools.validate.fit dgx-a100 dgx-a100-4nic

prints the constants; they are put into the YAML by hand. Nelder and Mead (1965) on the mean absolute log
error, a table weighing as the root of its rows.
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
from .tables import Case, training

Vector = np.ndarray

# What may move, by cluster family: a path into the cluster, and whether all named clusters share it.
FREE = {
    "dgx-a100": [
        "gpu.sustained",
        "gpu.half_k",
        "software.launch_us",
        "software.straggle",
        "software.traffic",
        "software.step_ms",
        "links.0.bandwidth",
        "links.1.bandwidth",
    ],
    "dgx-h100": [
        "gpu.sustained",
        "software.launch_us",
        "software.traffic",
        "software.tp_overlap",
        "software.dp_overlap",
        "software.pp_overlap",
        "software.step_ms",
    ],
}


def put(cluster: Cluster, path: str, value: float) -> Cluster:
    """The cluster with one constant replaced."""
    head, *rest = path.split(".")
    if head == "links":
        links = list(cluster.links)
        changed: dict[str, Any] = {rest[1]: value}
        links[int(rest[0])] = replace(links[int(rest[0])], **changed)
        return replace(cluster, links=tuple(links))
    return replace(cluster, **{head: replace(getattr(cluster, head), **{rest[0]: value})})


def get(cluster: Cluster, path: str) -> float:
    """One constant of a cluster."""
    head, *rest = path.split(".")
    if head == "links":
        return float(getattr(cluster.links[int(rest[0])], rest[1]))
    return float(getattr(getattr(cluster, head), rest[0]))


def error(cases: list[Case], clusters: dict[str, Cluster]) -> float:
    """Mean over the tables, by the root of their rows, of the mean absolute log error."""
    tables: dict[str, list[float]] = defaultdict(list)
    for case in cases:
        name, _, nodes = case.cluster.partition(":")
        machine = replace(clusters[name], nodes=int(nodes or 1))
        time = train(case.workload, machine, config(case), simulated=False).step_time
        # a few rows of every table are off by a factor of two for reasons of their own
        tables[case.table].append(min(abs(np.log(time / case.measured)), 0.3))
    weights = np.sqrt([len(v) for v in tables.values()])
    return float(np.average([np.mean(v) for v in tables.values()], weights=weights))


def config(case: Case) -> Config:
    """A case's configuration."""
    options = dict(case.options)
    if options.get("virtual_stages", 1) > 1:
        options["schedule"] = "interleaved"
    return Config(**options)


def main(names: list[str], steps: int = 160) -> None:
    """Fit and print."""
    models, rng = Models(), np.random.default_rng(0)
    cases = [
        c
        for c in training(models)
        if c.fit and c.what == "time" and c.cluster.split(":")[0] in names and c.table != "SC21 table 2"
    ]
    single = [c for c in cases if c.table == "vTrain single-node"]
    chosen = {id(single[i]) for i in rng.permutation(len(single))[:90]}
    cases = [c for c in cases if c.table != "vTrain single-node" or id(c) in chosen]
    base = {name: load(name) for name in names}
    # bandwidth between nodes and the like belong to one cluster each
    free = [(path, [n]) for path in FREE[names[0]] for n in names if path.startswith("links.1")]
    free += [(path, names) for path in FREE[names[0]] if not path.startswith("links.1")]
    start = np.array([get(base[owners[0]], path) for path, owners in free])
    unit = np.array(["overlap" in path for path, _ in free])

    def clusters(x: Vector) -> dict[str, Cluster]:
        made = dict(base)
        for (path, owners), value in zip(free, np.where(unit, 1 / (1 + np.exp(-x)), np.exp(x)), strict=True):
            for name in owners:
                made[name] = put(made[name], path, float(value))
        return made

    first = np.where(
        unit,
        np.log(np.clip(start, 0.05, 0.95) / (1 - np.clip(start, 0.05, 0.95))),
        np.log(np.maximum(start, 1e-3)),
    )
    print(f"{len(cases)} rows; before: {error(cases, base):.4f}")
    best, value = nelder_mead(lambda x: error(cases, clusters(x)), first, 0.15, steps)
    print(f"after: {value:.4f}")
    for (path, owners), v in zip(free, np.where(unit, 1 / (1 + np.exp(-best)), np.exp(best)), strict=True):
        print(f"  {path:28} {v:10.4g}  {', '.join(owners)}")


if __name__ == "__main__":
    main(sys.argv[1:])
