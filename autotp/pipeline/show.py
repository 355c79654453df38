"""The stages of a plan as rows, for every way of showing it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from ..outline import range_of
from ..plan import Plan
from .stages import Crossing, name_of


@dataclass(frozen=True)
class StageRow:
    """One stage in words. units: in order, alike ones as a range. parameters: how many elements its ranks
    hold together. bytes: of these on one rank. share: of the FLOPs, 0 to 1. sends: what goes to the next
    stage, a line each."""

    stage: int
    units: str
    parameters: int
    bytes: int
    share: float
    sends: tuple[str, ...]
    sent_bytes: int


def stage_rows(plan: Plan, itemsize: int, rank: int) -> list[StageRow]:
    """A row for each stage of the plan; bytes are those of a tensor-parallel rank, `itemsize` an element."""
    stages = plan.stages
    if stages is None:
        return []
    total = sum(stages.balance) or 1.0
    rows = []
    for stage in range(stages.count):
        crossings = stages.crossings[stage] if stage < stages.count - 1 else ()
        held = [p for p in plan.params.values() if plan.holds(p.name, stage)]
        elements = sum(_product(p.shape) for p in held)
        rows.append(
            StageRow(
                stage,
                units_text([name_of(c.path, c.number) for c in stages.of(stage)]),
                elements,
                plan.local_bytes(rank, itemsize, stage),
                stages.balance[stage] / total,
                tuple(_sent(c) for c in crossings),
                sum(c.bytes for c in crossings),
            )
        )
    return rows


def units_text(names: Sequence[str]) -> str:
    """`embed, layers.0 … layers.7, norm`: numbered siblings that follow each other as a range."""
    groups = groupby(names, lambda name: name.rstrip("0123456789") if name[-1:].isdigit() else name)
    return ", ".join(range_of(list(members)) for _, members in groups)


def _sent(crossing: Crossing) -> str:
    later = f" for {units_text(crossing.used_by)}" if any(crossing.used_by) else ""
    return f"{crossing}{later}"


def _product(shape: Sequence[int]) -> int:
    total = 1
    for n in shape:
        total *= n
    return total
