"""Figures of a search, by matplotlib (`pip install 'autotp[plot]'`): each function gives a figure, to save as
PNG or SVG.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import SearchError
from .predict import Prediction
from .result import SearchResult

COLOURS = ("#33658a", "#f26419", "#9aa5b1", "#86bbd8", "#758e4f", "#f6ae2d", "#55505c", "#c8553d")


def _axes(width: float, height: float) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SearchError("Figures need matplotlib: pip install 'autotp[plot]'.") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def pareto(result: SearchResult) -> Any:
    """Time against memory of the plans on the front."""
    figure, axes = _axes(7, 4.5)
    x = [p.peak_memory / 1e9 for p in result.pareto]
    y = [p.step_time for p in result.pareto]
    axes.step(x, y, where="post", color=COLOURS[0], lw=1.2)
    axes.plot(x, y, "o", color=COLOURS[0], ms=4)
    for i, p in enumerate(result.pareto):
        if i % max(1, len(x) // 6) == 0:
            axes.annotate(_label(p), (x[i], y[i]), xytext=(6, 6), textcoords="offset points", fontsize=7)
    axes.set(
        xlabel="memory of the fullest stage, GB",
        ylabel="seconds a token" if result.mode == "generate" else "seconds a step",
    )
    axes.set_title(
        f"{result.workload.name} on {result.cluster.gpus} x {result.cluster.gpu.name}",
        loc="left",
        fontsize=10,
    )
    return figure


def breakdown(plans: Sequence[Prediction]) -> Any:
    """Where the time of each plan goes, stacked."""
    figure, axes = _axes(8, 0.6 + 0.42 * len(plans) + 0.6)
    left = np.zeros(len(plans))
    for kind, colour in zip(plans[0].breakdown, COLOURS, strict=False):
        widths = np.array([p.breakdown[kind] for p in plans])
        axes.barh(range(len(plans)), widths, left=left, color=colour, label=kind, height=0.7)
        left += widths
    axes.set_yticks(range(len(plans)), [_label(p) for p in plans], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.legend(
        fontsize=7, frameon=False, ncols=3, loc="upper left", bbox_to_anchor=(0, -0.14 - 0.4 / len(plans))
    )
    return figure


def pipeline(p: Prediction) -> Any:
    """Who computes what when, a row a pipeline rank (the beginning of the step). Raises SearchError without a
    pipeline.
    """
    if p.timeline is None:
        raise SearchError(f"{p.config}: no pipeline was simulated (pp=1, or too many actions to draw).")
    figure, axes = _axes(10, 0.8 + 0.3 * p.config.pp)
    tone = {"F": COLOURS[0], "B": COLOURS[1], "W": COLOURS[4]}
    for kind, name in (("F", "forward"), ("B", "backward"), ("W", "weight gradients")):
        some = [(r, s, e) for r, a, s, e in p.timeline.rows if a.kind == kind]
        if some:
            ranks, starts, ends = (np.array(v) for v in zip(*some, strict=True))
            axes.barh(
                ranks,
                ends - starts,
                left=starts,
                height=0.85,
                color=tone[kind],
                edgecolor="white",
                lw=0.3,
                label=name,
            )
    axes.set(xlabel="seconds", ylabel="pipeline rank")
    axes.invert_yaxis()
    axes.legend(fontsize=7, frameon=False, ncols=3, loc="upper right", bbox_to_anchor=(1, 1.12))
    return figure


def memory(p: Prediction) -> Any:
    """Memory of each pipeline rank over the step: activations come with each forward and go with each
    backward.
    """
    if p.timeline is None:
        raise SearchError(f"{p.config}: no pipeline was simulated (pp=1, or too many actions to draw).")
    figure, axes = _axes(8, 4)
    fixed = sum(
        v
        for k, v in p.memory_breakdown.items()
        if k not in ("activations", "layer at work", "logits", "loose gradient")
    )
    for rank in sorted({0, p.config.pp // 2, p.config.pp - 1}):
        steps = [
            (s if a.kind == "F" else e, 1 if a.kind == "F" else -1)
            for r, a, s, e in p.timeline.rows
            if r == rank and a.kind != "W"
        ]
        steps.sort()
        held = np.cumsum([d for _, d in steps])
        most = max(1, int(held.max()))
        size = max(0.0, p.memory[rank] - fixed) / most
        axes.step(
            [t for t, _ in steps], (fixed + held * size) / 1e9, where="post", label=f"rank {rank}", lw=1.2
        )
    axes.axhline(p.capacity / 1e9, color="black", lw=0.8, ls="--")
    axes.annotate(
        "what a GPU holds", (0, p.capacity / 1e9), xytext=(4, 4), textcoords="offset points", fontsize=7
    )
    axes.set(xlabel="seconds", ylabel="GB", ylim=(0, None))
    axes.legend(fontsize=7, frameon=False)
    return figure


def _label(p: Prediction) -> str:
    c = p.config
    extra = "" if c.virtual_stages == 1 else f" v{c.virtual_stages}"
    return f"tp{c.tp} pp{c.pp}{extra} dp{c.dp} mb{c.micro_batch} z{c.zero} {c.recompute}"
