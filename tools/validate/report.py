"""The model against the tables: mean and worst error, rank correlation, and what a wrong choice costs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from autotp.search.predict import predict

from .tables import Case


@dataclass(frozen=True)
class Outcome:
    """A case and its prediction, in the case's unit."""

    case: Case
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.case.measured - 1


def outcomes(cases: Iterable[Case]) -> list[Outcome]:
    """Predict every case."""
    found = []
    for case in cases:
        if case.what in ("rate", "token"):
            found.append(Outcome(case, served(case)))
            continue
        p = predict(case.workload, case.cluster, **case.options)
        if case.what == "memory":
            kinds = case.notes.get("kinds") or p.memory_breakdown
            found.append(Outcome(case, float(sum(p.memory_breakdown[k] for k in kinds))))
        else:
            found.append(Outcome(case, p.step_time))
    return found


MOST_SEQUENCES = 2048  # that TensorRT-LLM runs at once
PREFILLED = 8192  # prompt tokens that it runs at once
OTHERS = 0.8  # of the others' prefills; 1 if requests came evenly, 0.5 if all came at once


def served(case: Case) -> float:
    """Seconds a token, or tokens/s, of a server in steady state: while its sequences make a token each, the
    share of new ones that a step brings in is prefilled. Of a sequence's own tokens, the prefills that delay
    them are the others', and of these the part that does not fall into its own wait for the first token."""
    prompt, output = case.notes["prompt"], case.notes["output"]
    options = {k: v for k, v in case.options.items() if k != "batch"} | {"mode": "generate"}
    fits = predict(case.workload, case.cluster, **options, batch=1).sequences
    # Room is kept for the whole of every sequence, though on average half of the output is there.
    room = max(1, int(fits * case.workload.seq / (prompt.seq + output)))
    batch = min(case.options.get("batch") or MOST_SEQUENCES, room)
    together = max(1, PREFILLED // prompt.seq)
    token = predict(case.workload, case.cluster, **options, batch=batch).step_time
    prefill = (predict(prompt, case.cluster, **options, batch=together).prefill_time or 0.0) / together
    if case.what == "token":
        return token + OTHERS * (batch - 1) / output * prefill
    return batch / (token + batch / output * prefill)


def ranks(values: np.ndarray) -> np.ndarray:
    """Ranks with ties shared."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2)[inverse]


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Rank correlation; 1 where there is nothing to rank."""
    if len(a) < 2 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return 1.0
    return float(np.corrcoef(ranks(a), ranks(b))[0, 1])


def choices(found: list[Outcome]) -> tuple[float, float, float, int]:
    """Over groups of at least three rows: mean and worst regret of the plan predicted fastest, mean rank
    correlation, and the number of groups."""
    groups: dict[tuple[object, ...], list[Outcome]] = defaultdict(list)
    for one in found:
        if one.case.group:
            groups[one.case.group].append(one)
    regrets, orders = [], []
    for rows in groups.values():
        if len(rows) < 3:
            continue
        predicted, measured = np.array([r.predicted for r in rows]), np.array([r.case.measured for r in rows])
        regrets.append(measured[predicted.argmin()] / measured.min() - 1)
        orders.append(spearman(predicted, measured))
    if not regrets:
        return float("nan"), float("nan"), float("nan"), 0
    return float(np.mean(regrets)), float(np.max(regrets)), float(np.mean(orders)), len(regrets)


def line(table: str, found: list[Outcome], part: str) -> str:
    """One row of the report, in Markdown."""
    errors = np.array([o.error for o in found])
    if not len(errors):
        return f"| {table} | {part} | 0 | | | | | | |"
    mean_regret, worst_regret, order, groups = choices(found)
    chosen = f"{mean_regret:.1%} ({worst_regret:.1%}, {groups} groups) | {order:.3f}" if groups else " | "
    return (
        f"| {table} | {part} | {len(found)} | {np.abs(errors).mean():.1%} | "
        f"{np.median(np.abs(errors)):.1%} | "
        f"{np.abs(errors).max():.1%} | {errors.mean():+.1%} | {chosen} |"
    )
