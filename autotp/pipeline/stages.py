"""What a cut into pipeline stages is, as data.

A *unit* is a module that runs as a whole on one stage: a decoder layer, an embedding, a final norm, the
head. What the modules around the units do themselves (masks, positions, scaling, the loss) is *glue*. A
*stage* is a run of consecutive unit calls. A *crossing* is a unit's output that is made before a cut and used
after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class UnitCall:
    """One call of a unit. path: of its module. number: which call of that module it is in one forward, from
    0. cost: forward FLOPs at the captured sizes."""

    path: str
    number: int
    stage: int
    cost: float


@dataclass(frozen=True)
class Crossing:
    """A unit's output that a cut passes on.

    path, number: the unit call that makes it (the first whose output it is). leaf: its index among the
    tensors of that call's output, in the order `autotp.nested.map_tensors` meets them. also: later calls
    before the cut that give the very same tensor on, each as (path, number, leaf). shape, dtype: as captured.
    itemsize: bytes of an element. used_by: what uses it after the cut: paths of units, or of the module whose
    own code does (the root: ""). requires_grad: a gradient comes back.
    """

    path: str
    number: int
    leaf: int
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    used_by: tuple[str, ...]
    also: tuple[tuple[str, int, int], ...] = ()
    requires_grad: bool = True

    @property
    def bytes(self) -> int:
        total = self.itemsize
        for n in self.shape:
            total *= n
        return total

    def __str__(self) -> str:
        part = f"[{self.leaf}]" if self.leaf else ""
        shape = "x".join(map(str, self.shape)) or "scalar"
        return f"{name_of(self.path, self.number)}{part}: {self.dtype} {shape}"


def name_of(path: str, number: int) -> str:
    """A unit call as `stages=` names it: `path:n` for call n of a module, `path` for its first."""
    return f"{path}:{number}" if number else path


@dataclass(frozen=True)
class Stages:
    """A model cut into `count` stages.

    calls: every unit call, in the order they run; stages are consecutive. crossings[c]: what is passed from
    stage c to c+1, in the order it is made; what a stage only hands on is in both of its crossings. params:
    every parameter and buffer, by every name -> the stages that hold it.
    """

    count: int
    calls: tuple[UnitCall, ...]
    crossings: tuple[tuple[Crossing, ...], ...]
    params: Mapping[str, tuple[int, ...]]

    @cached_property
    def units(self) -> tuple[str, ...]:
        """The paths of the units, in the order they first run."""
        return tuple(dict.fromkeys(call.path for call in self.calls))

    @cached_property
    def stage_of(self) -> Mapping[tuple[str, int], int]:
        """By path and number of a unit call, its stage."""
        return {(call.path, call.number): call.stage for call in self.calls}

    @cached_property
    def _owners(self) -> Mapping[str, tuple[int, ...]]:
        found: dict[str, set[int]] = {}
        for call in self.calls:
            found.setdefault(call.path, set()).add(call.stage)
        return {path: tuple(sorted(stages)) for path, stages in found.items()}

    def owners(self, path: str) -> tuple[int, ...]:
        """The stages that run the unit at `path`: several where one module is called on several."""
        return self._owners[path]

    def of(self, stage: int) -> tuple[UnitCall, ...]:
        """The unit calls of a stage."""
        return tuple(call for call in self.calls if call.stage == stage)

    @cached_property
    def last_calls(self) -> tuple[UnitCall, ...]:
        """The last unit call of each stage: when that returns, what crosses is sent and received."""
        last = {call.stage: call for call in self.calls}
        return tuple(last[stage] for stage in range(self.count))

    @cached_property
    def starts(self) -> tuple[str, ...]:
        """The first unit of each stage but the first: what `stages=` takes."""
        firsts = [self.of(stage)[0] for stage in range(1, self.count)]
        return tuple(name_of(call.path, call.number) for call in firsts)

    @cached_property
    def balance(self) -> tuple[float, ...]:
        """Forward FLOPs of each stage."""
        costs = [0.0] * self.count
        for call in self.calls:
            costs[call.stage] += call.cost
        return tuple(costs)

    def bytes(self, cut: int) -> int:
        """Bytes that go from stage `cut` to the next, at the captured sizes."""
        return sum(crossing.bytes for crossing in self.crossings[cut])

    def lines(self) -> list[str]:
        """Each stage and what it sends, a line each."""
        shares = [cost / (sum(self.balance) or 1.0) for cost in self.balance]
        lines = []
        for stage, share in enumerate(shares):
            units = [name_of(c.path, c.number) for c in self.of(stage)]
            lines.append(f"stage {stage}: {units[0]} to {units[-1]}, {share:.1%} of the FLOPs")
            lines += [f"  sends {c}" for c in (self.crossings[stage] if stage < self.count - 1 else ())]
        return lines

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, dicts, numbers and strings, for JSON and YAML."""
        return {
            "count": self.count,
            "starts": list(self.starts),
            "stages": [
                {
                    "units": [name_of(c.path, c.number) for c in self.of(stage)],
                    "flops": self.balance[stage],
                }
                for stage in range(self.count)
            ],
            "crossings": [
                [
                    {
                        "from": name_of(c.path, c.number),
                        "leaf": c.leaf,
                        "shape": list(c.shape),
                        "dtype": c.dtype,
                        "bytes": c.bytes,
                        "used_by": list(c.used_by),
                    }
                    for c in crossings
                ]
                for crossings in self.crossings
            ],
            "held_by_several": {
                name: list(stages) for name, stages in self.params.items() if len(stages) > 1
            },
        }
