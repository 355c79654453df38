"""The plan: every decision about a model, as data. It prints, compares and digests; `rewrite` puts it onto
the model."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from .layouts import DimLayout, ParamLayout
from .realise import Where
from .sites import Site

if TYPE_CHECKING:
    from .pipeline.stages import Stages


@dataclass(frozen=True)
class ParamPlan:
    """One parameter, under its first name.

    gradient: `whole` (every rank computes all of it), `own` (the rank computes its part's), `summed`
    (replicated, each rank computes a share: summed over ranks), `slots` (some rows are held more than once:
    summed over their slots).
    once: kept on rank 0, zero on the others, since it is added to a partial value.
    """

    name: str
    shape: tuple[int, ...]
    layout: ParamLayout | None
    gradient: str
    axes: str
    why: str
    once: bool = False
    also: tuple[str, ...] = ()  # other names of the same tensor (tied weights)
    block: bool = False  # a weight inside a repeated block

    def local_shape(self, rank: int) -> tuple[int, ...]:
        return self.shape if self.layout is None else self.layout.local_shape(rank)

    @property
    def sharded_share(self) -> float:
        """The share of its elements that not every rank holds: 0 to 1."""
        if self.layout is None:
            return 0.0
        shares = []
        for d, ranks in self.layout.dims.items():
            bounds = sorted({0, self.shape[d], *(b for ranges in ranks for r in ranges for b in r)})
            held = sum(
                b - a
                for a, b in zip(bounds, bounds[1:], strict=False)
                if all(_holds(ranges, a) for ranges in ranks)
            )
            shares.append(1 - held / self.shape[d])
        return max(shares)

    @property
    def placement(self) -> str:
        if self.layout is None:
            return "Replicate (rank 0, zero elsewhere)" if self.once else "Replicate"
        dims = ", ".join(f"Shard({d})" for d in sorted(self.layout.dims))
        return f"{dims} with repeats" if self.gradient == "slots" else dims


@dataclass(frozen=True)
class LayerPlan:
    """A leaf module that becomes a parallel one. `options` are the keyword arguments of its maker in
    `layers.py`."""

    module: str
    kind: str  # column, row, vocab, embedding, norm, batch norm, grouped, attention, dropout
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SliceDim:
    """How one dim of a value is cut: it is a whole number of `unit`s, each laid out over the ranks as
    `layout`."""

    dim: int
    unit: int
    layout: tuple[DimLayout, ...]


@dataclass(frozen=True)
class Collective:
    """A typed arrow at one or several places. `shape`: of the value at the captured inputs; `bytes` of one
    crossing.

    An `enter` costs nothing forward and an all-reduce of that many bytes backward; `slice` costs nothing
    forward.
    """

    kind: str
    where: tuple[Where, ...]
    shape: tuple[int, ...]
    bytes: int
    why: str
    enter: bool = False
    dims: tuple[SliceDim, ...] = ()
    shares: tuple[tuple[int, int], ...] = ()  # a mean: per rank (local count, whole count)


@dataclass(frozen=True)
class LocalInt:
    """An attribute that takes a local value: `local[rank]`."""

    module: str
    name: str
    value: int
    local: tuple[int, ...]


@dataclass(frozen=True)
class LocalArgument:
    """An int argument that takes a local value at one call in the model's code."""

    where: Where
    value: int
    local: tuple[int, ...]


@dataclass(frozen=True)
class Region:
    """From the call of module `first` to that of `last`, random numbers are drawn for sharded values; if
    `owner` is given, only where that module has a rate of dropout."""

    first: str
    last: str
    owner: str | None


@dataclass(frozen=True)
class TpPlan:
    """A plan in transformers' styles. styles: glob -> style; left_out: glob of a parameter that the plan
    shards and no style can -> why."""

    styles: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """What `autotp.plan` decided for `model` over `tp` ranks, in pipeline `stages` of so many ranks each."""

    model: str
    tp: int
    params: Mapping[str, ParamPlan]
    layers: tuple[LayerPlan, ...]
    collectives: tuple[Collective, ...]
    ints: tuple[LocalInt, ...]
    arguments: tuple[LocalArgument, ...]
    kept: Mapping[str, str]  # replicated weights: why
    notes: tuple[str, ...] = ()
    # Ways through the model's code that could not be recorded, and why; attributes that hold a rank's part.
    unexamined: tuple[str, ...] = ()
    roles: Mapping[str, str] = field(default_factory=dict)  # module -> role
    observed: tuple[
        Collective, ...
    ] = ()  # gathers of what only a hook or a caller's request sees (attention weights)
    regions: tuple[Region, ...] = ()
    precision: str = (
        "float32"  # the coarsest floating dtype that values pass through: what comparisons can expect
    )
    stages: Stages | None = None
    styles: TpPlan = field(default_factory=TpPlan)
    assumed: tuple[str, ...] = ()  # what the model was told of data when it was captured
    skippable: tuple[Site, ...] = ()  # calls that it does not come by on some data: that is no error

    @property
    def degrees(self) -> str:
        """`tp=8`, or `pp=4 × tp=2`."""
        return f"tp={self.tp}" if self.stages is None else f"pp={self.stages.count} × tp={self.tp}"

    @cached_property
    def sharded_fraction(self) -> float:
        """The share of the block weights (by elements) that is sharded: 0 to 1."""
        block = [p for p in self.params.values() if p.block]
        total = sum(_numel(p.shape) for p in block)
        return sum(_numel(p.shape) * p.sharded_share for p in block) / total if total else 0.0

    def local_bytes(self, rank: int, itemsize: int = 4, stage: int | None = None) -> int:
        """Bytes of this tp rank's parameters (those of one stage) at `itemsize` bytes an element."""
        held = [p for p in self.params.values() if stage is None or self.holds(p.name, stage)]
        return itemsize * sum(_numel(p.local_shape(rank)) for p in held)

    def holds(self, name: str, stage: int) -> bool:
        """Whether a pipeline stage holds the parameter `name`."""
        return self.stages is None or stage in self.stages.params[name]

    @cached_property
    def digest(self) -> str:
        """The same on every rank that made the same plan: compared before anything is rewritten."""
        text = alike_everywhere(json.dumps(self.to_dict(), sort_keys=True))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, dicts, numbers and strings, for JSON and YAML."""
        return {
            "model": self.model,
            "tp": self.tp,
            **({"pipeline": self.stages.to_dict()} if self.stages else {}),
            "sharded_fraction": round(self.sharded_fraction, 4),
            "parameters": {
                name: {
                    "shape": list(p.shape),
                    "placement": p.placement,
                    "axes": p.axes,
                    "gradient": p.gradient,
                    "why": p.why,
                    **({"layout": _layout(p.layout)} if p.layout else {}),
                    **({"tied": list(p.also)} if p.also else {}),
                }
                for name, p in self.params.items()
            },
            "layers": {layer.module: {"kind": layer.kind, **_plain(layer.options)} for layer in self.layers},
            "collectives": [
                {
                    "kind": c.kind + (" + enter" if c.enter else ""),
                    "where": [str(w) for w in c.where],
                    "shape": list(c.shape),
                    "bytes": c.bytes,
                    "why": c.why,
                    **({"dims": [_plain(vars(d)) for d in c.dims]} if c.dims else {}),
                }
                for c in self.collectives
            ],
            "local": {
                f"{i.module}.{i.name}".lstrip("."): {"whole": i.value, "ranks": list(i.local)}
                for i in self.ints
            },
            "arguments": [
                {"where": str(a.where), "whole": a.value, "ranks": list(a.local)} for a in self.arguments
            ],
            "replicated": dict(self.kept),
            "notes": list(self.notes),
            "unexamined": list(self.unexamined),
        }

    def to_tp_plan(self) -> dict[str, str]:
        """A transformers `tp_plan` (glob of names -> style) of what this plan does, as far as styles can say.

        For `DistributedConfig(tp_size=tp, tp_plan=…)`. What can't be said is left out whole, so that the
        result is right; `styles.left_out` names it, with the reasons.
        """
        return dict(self.styles.styles)

    def to_yaml(self) -> str:
        """A policy that reproduces this plan, as YAML: give it back as `policy=`. `to_dict` has all of it."""
        from .policy import to_policy

        return to_policy(self)

    def __str__(self) -> str:
        sharded = sum(p.layout is not None for p in self.params.values())
        lines = [
            f"{self.model} over {self.degrees}: {sharded} of {len(self.params)} parameters sharded, "
            f"{self.sharded_fraction:.1%} of the block weights, {len(self.collectives)} collectives, "
            f"digest {self.digest}"
        ]
        width = max((len(n) for n in self.params), default=0)
        for name, p in self.params.items():
            lines.append(
                f"  {name:{width}}  {_shape(p.shape)} -> {_shape(p.local_shape(0))}  {p.placement}  {p.axes}"
            )
        if self.stages is not None:
            lines += [f"  {line}" for line in self.stages.lines()]
        lines += [
            f"  {c.kind}{' + enter' if c.enter else ''} at {', '.join(map(str, c.where))}: "
            f"{_shape(c.shape)}, {c.why}"
            for c in self.collectives
        ]
        lines += [f"  {i.module}.{i.name}: {i.value} -> {_ranks(i.local)}" for i in self.ints]
        lines += [f"  {a.where}: {a.value} -> {_ranks(a.local)}" for a in self.arguments]
        lines += [f"  replicated {name}: {why}" for name, why in self.kept.items()]
        lines += [f"  not examined {way}" for way in self.unexamined]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def _holds(ranges: DimLayout, index: int) -> bool:
    return any(start <= index < stop for start, stop in ranges)


def _ranks(values: tuple[int, ...]) -> str:
    return str(values[0]) if len(set(values)) == 1 else " / ".join(map(str, values))


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def _numel(shape: tuple[int, ...]) -> int:
    total = 1
    for n in shape:
        total *= n
    return total


def _layout(layout: ParamLayout) -> dict[str, Any]:
    return {str(d): [[list(r) for r in ranges] for ranges in ranks] for d, ranks in layout.dims.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value if isinstance(value, (int, float, str, bool, type(None))) else str(value)


def alike_everywhere(text: str) -> str:
    """Without addresses of objects (a reason may quote a repr), which differ from rank to rank."""
    return re.sub(r"0x[0-9a-fA-F]+", "0x…", text)
