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
    """Time against memory: every configuration that fits, the front, and how far the GPU goes."""
    figure, axes = _axes(8, 5)
    scale, unit = _unit(result.pareto)
    time, memory = result.fitting()
    axes.plot(memory / 1e9, time * scale, ".", color=COLOURS[2], ms=3, alpha=0.5, label="fits", zorder=1)
    front = sorted(result.pareto, key=lambda p: p.peak_memory)
    x = [p.peak_memory / 1e9 for p in front]
    y = [p.step_time * scale for p in front]
    axes.step(x, y, where="post", color=COLOURS[0], lw=1.4, zorder=2)
    axes.plot(x, y, "o", color=COLOURS[0], ms=5, label="not beaten in both", zorder=3)
    capacity = front[0].capacity / 1e9
    axes.axvline(capacity, color="black", lw=0.8, ls="--", label="what a GPU holds")
    axes.set_xlim(0, capacity * 1.04)
    if max(y) > 1.5 * min(y):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.tick_params(axis="y", which="minor", labelsize=7)
    highest = max(max(y), float(np.quantile(time, 0.9)) * scale)
    axes.set_ylim(0.93 * min(y), min(1.1 * highest, 4 * min(y)))
    shown: list[float] = []
    for p, at, level in zip(front[::-1], x[::-1], y[::-1], strict=True):  # from the fastest on
        if level < 4 * min(y) and all(abs(at - other) > capacity / 7 for other in shown):
            left = p is front[-1] and at > capacity / 2
            axes.annotate(
                _label(p),
                (at, level),
                xytext=(-4, -12) if left else (4, 5),
                ha="right" if left else "left",
                textcoords="offset points",
                fontsize=7,
            )
            shown.append(at)
    axes.set(
        xlabel="GB on the fullest GPU",
        ylabel=f"{unit} a token" if result.mode == "generate" else f"{unit} a step",
    )
    figure.legend(fontsize=7, frameon=False, ncols=3, loc="outside lower center")
    _title(axes, f"{result.workload.name} on {result.cluster.gpus} x {result.cluster.gpu.name}")
    return figure


def breakdown(plans: Sequence[Prediction], title: str = "") -> Any:
    """Where the time of each plan goes, stacked."""
    figure, axes = _axes(9, 1.3 + 0.36 * len(plans))
    scale, unit = _unit(plans)
    left = np.zeros(len(plans))
    for kind, colour in zip(plans[0].breakdown, COLOURS, strict=False):
        widths = np.array([p.breakdown[kind] for p in plans]) * scale
        if (widths < 0.002 * max(p.step_time for p in plans) * scale).all():
            continue  # no one could see it
        axes.barh(range(len(plans)), widths, left=left, color=colour, label=kind, height=0.7)
        left += widths
    for i, p in enumerate(plans):
        axes.annotate(
            f"{p.step_time * scale:.3g}", (p.step_time * scale, i), xytext=(3, 0), va="center",
            textcoords="offset points", fontsize=7,
        )  # fmt: skip
    axes.set_yticks(range(len(plans)), [f"{_label(p)}   {i + 1}" for i, p in enumerate(plans)], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel(f"{unit} a token" if plans[0].prefill_time is not None else f"{unit} a step")
    figure.legend(fontsize=7, frameon=False, ncols=6, loc="outside lower center")
    _title(axes, title)
    return figure


def pipeline(p: Prediction) -> Any:
    """Who computes what when, a row a pipeline rank (the beginning of the step, where the schedule repeats
    itself). Raises SearchError where no schedule was simulated.
    """
    if p.timeline is None:
        raise SearchError(f"{p.config}: no schedule was simulated (generation, or too many actions to draw).")
    figure, axes = _axes(10, min(12.0, 1.3 + 0.3 * p.config.pp))
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
    axes.set(xlabel="seconds", ylabel="pipeline rank", xlim=(0, p.timeline.length))
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.invert_yaxis()
    figure.legend(fontsize=7, frameon=False, ncols=3, loc="outside lower center")
    _title(axes, f"{_label(p)}: {_drawn(p)}")
    return figure


def memory(p: Prediction) -> Any:
    """Memory of pipeline ranks over the step: activations come with each forward and go with each backward.
    Raises SearchError where no schedule was simulated.
    """
    if p.timeline is None:
        raise SearchError(f"{p.config}: no schedule was simulated (generation, or too many actions to draw).")
    figure, axes = _axes(9, 4.2)
    passing = ("activations", "layer at work", "logits", "loose gradient")
    stays = [sum(v for k, v in kinds.items() if k not in passing) for kinds in p.memory_by_stage]
    for rank, colour in zip(sorted({0, p.config.pp // 2, p.config.pp - 1}), COLOURS, strict=False):
        steps = [
            (s if a.kind == "F" else e, 1 if a.kind == "F" else -1)
            for r, a, s, e in p.timeline.rows
            if r == rank and a.kind != "W"
        ]
        steps.sort()
        held = np.cumsum([d for _, d in steps])
        fixed, most = stays[rank], max(1, int(held.max()))
        size = (p.memory[rank] - fixed) / most
        x = [0.0, *(t for t, _ in steps), p.timeline.length]
        y = [fixed / 1e9, *((fixed + held * size) / 1e9), fixed / 1e9]
        axes.step(x, y, where="post", label=f"pipeline rank {rank}", lw=1.2, color=colour)
    axes.axhspan(
        0, stays[0] / 1e9, color=COLOURS[2], alpha=0.25, lw=0, label="weights, gradients, optimizer of rank 0"
    )
    axes.axhline(p.capacity / 1e9, color="black", lw=0.8, ls="--", label="what a GPU holds")
    axes.set(xlabel="seconds", ylabel="GB", ylim=(0, 1.05 * max(p.capacity, p.peak_memory) / 1e9))
    axes.set_xlim(0, p.timeline.length)
    figure.legend(fontsize=7, frameon=False, ncols=5, loc="outside lower center")
    _title(axes, f"{_label(p)}: {_drawn(p)}")
    return figure


def _unit(plans: Sequence[Prediction]) -> tuple[float, str]:
    """What to multiply seconds with, and the unit that gives."""
    return (1.0, "seconds") if min(p.step_time for p in plans) >= 0.5 else (1e3, "milliseconds")


def _title(axes: Any, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=10)


def _drawn(p: Prediction) -> str:
    """How much of the step the simulated timeline is."""
    assert p.timeline is not None
    some = len({a.microbatch for _, a, _, _ in p.timeline.rows})
    return f"{some} of {p.config.microbatches} micro-batches" if some < p.config.microbatches else "one step"


def _label(p: Prediction) -> str:
    c = p.config
    if p.prefill_time is not None:
        return f"tp{c.tp} pp{c.pp} x {c.dp} replicas"
    parts = [f"tp{c.tp}", f"pp{c.pp}", f"dp{c.dp}", f"mb{c.micro_batch}", f"zero{c.zero}"]
    parts += [f"cp{c.cp}"] if c.cp > 1 else []
    parts += [f"ep{c.ep}"] if c.ep > 1 else []
    parts += [f"virtual{c.virtual_stages}"] if c.virtual_stages > 1 else []
    return " ".join(parts + ([f"recompute {c.recompute}"] if c.recompute != "none" else []))
