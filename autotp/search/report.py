"""A search result as it is read: tables for the terminal, a trace that Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from .predict import Prediction
from .result import SearchResult, named, seconds


def plans_table(plans: Sequence[Prediction], title: str, numbered: bool = True) -> Table:
    """A plan a row: degrees, step, where the time goes, memory."""
    generate = any(p.prefill_time is not None for p in plans)
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        header_style="bold",
        border_style="bright_black",
    )
    kinds = [
        k
        for k in (plans[0].breakdown if plans else ())
        if any(p.breakdown[k] >= 0.005 * p.step_time for p in plans)
    ]
    if numbered:
        table.add_column("#", justify="right")
    table.add_column("configuration", no_wrap=True)
    for name in ["token", "prefill", "tokens/s", "fit"] if generate else ["step", "tokens/s"]:
        table.add_column(name, justify="right", no_wrap=True)
    for kind in kinds:
        table.add_column(_short(kind), justify="right")
    table.add_column("memory", justify="right", no_wrap=True)
    for i, p in enumerate(plans, 1):
        numbers = [seconds(p.step_time)]
        if generate:
            numbers += [seconds(p.prefill_time or 0.0), f"{p.tokens_per_second:,.0f}", f"{p.sequences:,}"]
        else:
            numbers += [f"{p.tokens_per_second:,.0f}"]
        shares = [f"{p.breakdown[k] / p.step_time:.0%}" for k in kinds]
        row = [named(p), *numbers, *shares, f"{p.peak_memory / 1e9:.1f} GB"]
        table.add_row(*([str(i)] if numbered else []), *row)
    return table


def prediction_table(p: Prediction) -> Table:
    """One prediction: seconds and bytes by what they go to."""
    table = Table(
        title=named(p),
        title_justify="left",
        title_style="bold",
        header_style="bold",
        border_style="bright_black",
    )
    table.add_column("")
    table.add_column("", justify="right")
    table.add_column("share", justify="right")
    table.add_row("a token" if p.prefill_time is not None else "step", seconds(p.step_time), "")
    for kind, t in p.breakdown.items():
        table.add_row(f"  {kind}", seconds(t), f"{t / p.step_time:.1%}")
    if p.prefill_time is not None:
        table.add_row("prefill", seconds(p.prefill_time), "")
        table.add_row("sequences that fit", f"{p.sequences:,}", "")
    table.add_row("tokens/s", f"{p.tokens_per_second:,.0f}", "")
    table.add_section()
    full = Text(f"{p.peak_memory / 1e9:.2f} GB", "" if p.fits else "bold red")
    table.add_row(
        "memory of the fullest stage", full, f"{p.peak_memory / p.capacity:.1%} of {p.capacity / 1e9:.1f} GB"
    )
    for kind, size in p.memory_breakdown.items():
        if size:
            table.add_row(f"  {kind}", f"{size / 1e9:.2f} GB", f"{size / p.peak_memory:.1%}")
    if len(p.memory) > 1:
        table.add_row("by stage, GB", " ".join(f"{m / 1e9:.0f}" for m in p.memory), "")
        table.add_row("layers by stage", " ".join(map(str, p.stages)), "")
    return table


def summary(result: SearchResult) -> str:
    """One line: what was looked at, on what."""
    return (
        f"{result.workload.name}, {result.workload.parameters / 1e9:.1f}B parameters, on "
        f"{result.cluster.gpus} x {result.cluster.gpu.name}: "
        f"{result.considered:,} configurations, {result.fit:,} fit"
    )


def _short(kind: str) -> str:
    return (
        kind.replace("tensor-parallel communication", "tp comm")
        .replace("data-parallel communication", "dp comm")
        .replace("pipeline bubble and sends", "bubble")
        .replace("pipeline sends", "sends")
    )


def trace(p: Prediction) -> str:
    """The pipeline's timeline as Trace Event JSON (its beginning, where the schedule repeats itself).
    Microseconds.
    """
    names = {"F": "forward", "B": "backward", "W": "weight gradients"}
    rows = p.timeline.rows if p.timeline else ()
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": {"name": f"pipeline rank {rank}"}}
        for rank in range(p.config.pp)
    ]
    events += [
        {
            "ph": "X",
            "pid": 0,
            "tid": rank,
            "name": f"{names[a.kind]} {a.microbatch}",
            "cat": names[a.kind],
            "ts": start * 1e6,
            "dur": (end - start) * 1e6,
            "args": {"stage": a.stage, "microbatch": a.microbatch},
        }
        for rank, a, start, end in rows
    ]
    return json.dumps(
        {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"configuration": str(p.config)}}
    )
