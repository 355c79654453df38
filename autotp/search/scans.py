"""Models whose code runs once a token, as a recurrence without a kernel of its own does.

Their graph grows with the sequence, and recording thousands of tokens takes minutes. So they are counted at
two short lengths: what runs once a token comes up so many times more often, everything else grows by so many
rows, and both in even steps, from which any length follows.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import fields, replace
from typing import Any

from ..errors import SearchError
from .workload import Message, Product, Unit, Workload

LENGTHS = (16, 32)  # tokens at which such a model is counted


class Unrolled(Exception):
    """Raised where a model's graph has more operations the more tokens there are."""


def extended(short: Workload, long: Workload, seq: int) -> Workload:
    """The workload at `seq` tokens, from those at two other lengths. Raises SearchError where they do not
    grow evenly."""
    steps = (seq - short.seq) / (long.seq - short.seq)

    def grown(a: Any, b: Any) -> Any:
        if isinstance(a, bool | str) or a is None:
            return a
        if isinstance(a, int | float):
            value = a + (b - a) * steps
            return round(value) if isinstance(a, int) and isinstance(b, int) else value
        if isinstance(a, dict):
            return type(a)({k: grown(a.get(k, 0.0), b.get(k, 0.0)) for k in {**a, **b}})
        if isinstance(a, list):
            return [grown(x, y) for x, y in zip(a, b, strict=True)]
        return replace(a, **{f.name: grown(getattr(a, f.name), getattr(b, f.name)) for f in fields(a)})

    units = [[merged(u) for u in w.units] for w in (short, long)]
    shapes = [[(len(u.products), len(u.attentions), len(u.messages)) for u in some] for some in units]
    if shapes[0] != shapes[1]:
        raise SearchError(
            f"{long.name} runs its code once a token, and not in the same way for each: it can't be counted "
            f"at {seq} tokens from {short.seq} and {long.seq}. Count it at fewer tokens, given as `seq`."
        )
    return replace(
        long,
        units=tuple(grown(a, b) for a, b in zip(*units, strict=True)),
        logits=grown(short.logits, long.logits),
        seq=seq,
    )


def merged(unit: Unit) -> Unit:
    """The unit with products that are alike as one of a larger batch, each still a kernel, and messages that
    are alike as one."""
    times: dict[Product, float] = defaultdict(float)
    for p in unit.products:
        times[replace(p, batch=1.0)] += p.batch
    sent: dict[Message, float] = defaultdict(float)
    for m in unit.messages:
        sent[replace(m, elements=0.0)] += m.elements
    more = len(unit.products) - len(times)
    return replace(
        unit,
        products=[replace(p, batch=n) for p, n in times.items()],
        messages=[replace(m, elements=n) for m, n in sent.items()],
        traffic=replace(unit.traffic, kernels=unit.traffic.kernels + more),
    )
