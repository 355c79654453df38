"""Pipeline schedules, simulated: who does what when, and how long it all takes.

`orders` gives each rank's list of actions as the schedules do: GPipe (Huang et al., 2019), 1F1B (Narayanan et
al., 2019), interleaved 1F1B (Narayanan et al., 2021) and zero-bubble H1 (Qi et al., 2023), in which the
gradients of weights are put off to fill the end. `simulate` runs them: an action waits for its rank, and for
what another stage sends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import SearchError

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")


@dataclass(slots=True)
class Action:
    """kind: F forward, B backward, W gradients of weights (zero-bubble only). stage: 0 to ranks*virtual-1."""

    kind: str
    stage: int
    microbatch: int


@dataclass(frozen=True)
class Timeline:
    """rows: (rank, action, start, end) in seconds. length: of the whole. busy: seconds that each rank
    computes.
    """

    rows: tuple[tuple[int, Action, float, float], ...]
    length: float
    busy: tuple[float, ...]


def orders(schedule: str, ranks: int, microbatches: int, virtual: int = 1) -> list[list[Action]]:
    """Each rank's actions, in order. Raises SearchError for a schedule or numbers that do not go together."""
    if schedule not in SCHEDULES:
        raise SearchError(f"schedule={schedule!r}: choose one of {', '.join(SCHEDULES)}.")
    if virtual > 1 and microbatches % ranks:
        raise SearchError(
            f"virtual_stages={virtual}: interleaving runs in rounds of pp={ranks} micro-batches, and "
            f"{microbatches} is no multiple of it. Change the micro-batch or pp."
        )
    if virtual > 1:
        return [_interleaved(rank, ranks, microbatches, virtual) for rank in range(ranks)]
    return [_plain(schedule, rank, ranks, microbatches) for rank in range(ranks)]


def _plain(schedule: str, rank: int, ranks: int, count: int) -> list[Action]:
    ahead = count if schedule == "gpipe" else min(count, ranks - rank)
    late = rank if schedule == "zero-bubble" else None  # weight gradients still to do
    actions = [Action("F", rank, i) for i in range(ahead)]
    weights = 0
    for i in range(count):
        actions.append(Action("B", rank, i))
        if late is not None and i >= late:
            actions.append(Action("W", rank, weights))
            weights += 1
        if i + ahead < count:
            actions.append(Action("F", rank, i + ahead))
    if late is not None:
        actions += [Action("W", rank, i) for i in range(weights, count)]
    return actions


def _interleaved(rank: int, ranks: int, count: int, virtual: int) -> list[Action]:
    total = count * virtual
    ahead = min(total, (ranks - rank - 1) * 2 + (virtual - 1) * ranks + 1)

    def place(step: int, forward: bool) -> tuple[int, int]:
        round_, within = divmod(step, ranks * virtual)
        chunk, lane = divmod(within, ranks)
        chunk = chunk if forward else virtual - 1 - chunk
        return chunk * ranks + rank, round_ * ranks + lane

    actions = [Action("F", *place(i, True)) for i in range(ahead)]
    for i in range(total):
        actions.append(Action("B", *place(i, False)))
        if i + ahead < total:
            actions.append(Action("F", *place(i + ahead, True)))
    return actions


def simulate(
    schedule: str,
    forward: Sequence[float],
    backward: Sequence[float],
    microbatches: int,
    *,
    ranks: int,
    send: float = 0.0,
    weights: Sequence[float] | None = None,
    single: Mapping[tuple[str, int, int], float] | None = None,
) -> Timeline:
    """Run a schedule. forward, backward: seconds of each stage (ranks * virtual of them) for one micro-batch;
    `weights`: of `backward`, the part that zero-bubble puts off (half, if not given). send: seconds between
    two stages. single: seconds of actions that took otherwise, by kind, stage and micro-batch."""
    stages = len(forward)
    order = orders(schedule, ranks, microbatches, stages // ranks)
    late = [b / 2 for b in backward] if weights is None else list(weights)
    split = schedule == "zero-bubble"
    length = {
        "F": list(forward),
        "B": [b - w if split else b for b, w in zip(backward, late, strict=True)],
        "W": late,
    }
    ready: dict[tuple[str, int, int], float] = {}
    clock, at, busy = [0.0] * ranks, [0] * ranks, [0.0] * ranks
    rows = []
    todo = list(range(ranks))
    while todo:
        rank = todo.pop()
        while at[rank] < len(order[rank]):
            action = order[rank][at[rank]]
            needs = _needs(action, stages)
            if needs is not None and needs not in ready:
                break
            hop = send if needs is not None and needs[1] != action.stage and needs[1] % ranks != rank else 0.0
            start = max(clock[rank], ready.get(needs, 0.0) + hop if needs is not None else 0.0)
            key = action.kind, action.stage, action.microbatch
            end = start + (single or {}).get(key, length[action.kind][action.stage])
            ready[key] = end
            rows.append((rank, action, start, end))
            clock[rank], at[rank], busy[rank] = end, at[rank] + 1, busy[rank] + end - start
            other = (action.stage + (1 if action.kind == "F" else -1)) % ranks
            if action.kind != "W" and other != rank and other not in todo:
                todo.append(other)
    if any(a < len(o) for a, o in zip(at, order, strict=True)):
        raise SearchError(f"{schedule} with {ranks} ranks and {microbatches} micro-batches waits for itself.")
    return Timeline(tuple(rows), max(clock), tuple(busy))


def _needs(action: Action, stages: int) -> tuple[str, int, int] | None:
    if action.kind == "F":
        return ("F", action.stage - 1, action.microbatch) if action.stage else None
    if action.kind == "W":
        return "B", action.stage, action.microbatch
    if action.stage == stages - 1:
        return "F", action.stage, action.microbatch
    return "B", action.stage + 1, action.microbatch


def in_flight(schedule: str, ranks: int, microbatches: int, virtual: int = 1) -> np.ndarray:
    """By rank, the most micro-batches of one of its (virtual) stages whose activations it holds at a time."""
    rank = np.arange(ranks)
    if virtual > 1:
        return np.minimum(microbatches * virtual, 2 * (ranks - rank - 1) + (virtual - 1) * ranks + 1)
    return np.minimum(microbatches, ranks - rank) if schedule != "gpipe" else np.full(ranks, microbatches)


def balanced(costs: Sequence[float], stages: int) -> list[int]:
    """Cut a row of units into `stages` contiguous parts so that the dearest costs least: the number of units
    of each.

    The linear partition problem by dynamic programming; O(units^2 * stages) with numpy inside.
    """
    n = len(costs)
    if stages > n:
        raise SearchError(f"{stages} stages of {n} units: each stage needs one.")
    sums = np.concatenate([[0.0], np.cumsum(costs)])
    best = sums[1:].copy()  # best[i]: dearest part of units 0..i in the parts so far
    cuts = np.zeros((stages, n), int)
    for k in range(1, stages):
        new = np.full(n, np.inf)
        for i in range(k, n):
            parts = np.maximum(best[k - 1 : i], sums[i + 1] - sums[k : i + 1])
            j = int(np.argmin(parts))
            new[i], cuts[k, i] = parts[j], j + k
        best = new
    sizes, end = [], n
    for k in range(stages - 1, 0, -1):
        start = int(cuts[k, end - 1])
        sizes.append(end - start)
        end = start
    return [end, *reversed(sizes)]
