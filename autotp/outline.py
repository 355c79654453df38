"""A plan as it reads: the model's modules in the order they run, each operation with its local shape, alike
layers once.

`outlining.outline` turns the captured graph and the plan into a tree of `Block`s (module calls) and `Step`s
(operations and leaf modules). The text dump and every picture are drawn from this tree, so they can't tell
different stories.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from .plan import Collective, LocalInt, ParamPlan
from .realise import Where

BEFORE = ("enter", "slice")  # arrows that convert what comes in; the others convert what comes out


@dataclass(frozen=True)
class Mark:
    """A collective at one place, before or after the step or block it belongs to. `value`: the value that
    crosses."""

    collective: Collective
    where: Where
    before: bool


@dataclass(frozen=True)
class Value:
    """What a step gives on one rank. state: Replicate, Shard(dims) or Partial."""

    name: str
    shape: tuple[int, ...]
    whole: tuple[int, ...]
    dtype: str
    state: str


@dataclass
class Step:
    """One operation, or one leaf module (`module` is its path then).

    operands: the names of the tensors it takes, with what is given beside them as text. uses: the graph's own
    names of the values it takes that carry a gradient: the edges of a drawing. joins: it multiplies several
    of them together.
    """

    node: str
    op: str
    text: str
    values: tuple[Value, ...]
    uses: tuple[str, ...]
    place: Any = None  # where in the source; the turns of a loop share it
    joins: bool = False
    grad: bool = True
    module: str | None = None
    layer: str = ""  # column, row, vocab, ...: the parallel layer it becomes
    params: tuple[ParamPlan, ...] = ()
    marks: list[Mark] = field(default_factory=list)
    stage: int | None = None  # the pipeline stage it runs on, where it is a unit


@dataclass
class Block:
    """One call of a module that has steps of its own. `names`: the paths of all that are alike, the first is
    shown. stage: the pipeline stage it runs on, where it is a unit."""

    path: str
    label: str  # relative to the block around it
    kind: str  # class name
    names: list[str] = field(default_factory=list)
    items: list[Step | Block] = field(default_factory=list)
    params: tuple[ParamPlan, ...] = ()
    ints: tuple[LocalInt, ...] = ()
    marks: list[Mark] = field(default_factory=list)
    stage: int | None = None

    def steps(self) -> Iterator[Step]:
        """Every step below, in the order they run."""
        for item in self.items:
            if isinstance(item, Step):
                yield item
            else:
                yield from item.steps()

    def blocks(self) -> Iterator[Block]:
        """This block and every one below it."""
        yield self
        for item in self.items:
            if isinstance(item, Block):
                yield from item.blocks()


@dataclass
class Outline:
    """The tree, folded; `alias` names, for every value of a folded block, the shown one that stands for
    it."""

    root: Block
    inputs: tuple[Value, ...]
    rank: int
    alias: Mapping[str, str]
    unused: tuple[ParamPlan, ...]  # parameters of modules that the captured run never reached


# ---------------------------------------------------------------- folding
def fold(block: Block, alias: dict[str, str]) -> tuple[Any, ...]:
    """Show alike siblings once. Gives what makes two blocks alike: everything but their names."""
    first: dict[Any, Block] = {}
    kept: list[Step | Block] = []
    prints: list[Any] = []
    for item in block.items:
        if isinstance(item, Step):
            kept.append(item)
            prints.append(_print_step(item, block.path))
            continue
        before = [s.node for s in item.steps()]
        own = fold(item, alias)
        prints.append((_stem(item.label) or item.label, own))
        key = (_stem(item.label), own)
        like = first.get(key) if key[0] else None  # only numbered siblings: members of a list of layers
        if like is None:
            first[key] = item
            kept.append(item)
        else:
            like.names += item.names
            # What leaves a folded block seems to leave the last one shown: alternating layers stay a chain.
            last = next(b for b in reversed(kept) if isinstance(b, Block))
            end = [s.node for s in last.steps()][-1]
            shown = [s.node for s in like.steps()]
            folded = [s.node for s in item.steps()]
            alias.update(zip(folded, shown if last is like else [end] * len(folded), strict=True))
            alias.update((n, alias[alias[n]]) for n in before if alias.get(n) in alias)
    block.items = kept
    own_params = tuple((p.name.rsplit(".", 1)[-1], p.shape, p.placement) for p in block.params)
    ints = tuple((i.name, i.local) for i in block.ints)
    return (block.kind, block.stage, own_params, ints, _print_marks(block.marks), tuple(prints))


def _stem(label: str) -> str:
    """`layers.` of `layers.3`; nothing for a block that isn't numbered."""
    return label.rstrip("0123456789") if label[-1:].isdigit() else ""


def _print_step(step: Step, path: str) -> tuple[Any, ...]:
    params = tuple((p.name.rsplit(".", 1)[-1], p.shape, p.placement, p.once) for p in step.params)
    values = tuple((v.shape, v.state, v.dtype) for v in step.values)
    module = (step.module or "").removeprefix(path)
    return (step.op, step.stage, step.layer, module, values, params, _print_marks(step.marks))


def _print_marks(marks: list[Mark]) -> tuple[Any, ...]:
    return tuple(
        (m.collective.kind, m.collective.enter, m.collective.bytes, m.where.kind, m.where.path) for m in marks
    )


def range_of(names: list[str]) -> str:
    """`layers.0 … layers.31`, with gaps written out: the paths of folded siblings, given as labels."""
    numbers = [int(n[len(n.rstrip("0123456789")) :]) for n in names if n[-1:].isdigit()]
    if len(names) == 1 or len(numbers) != len(names):
        return ", ".join(names)
    stem = _stem(names[0])
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    if len(runs) > 4:
        return f"{stem}{numbers[0]}, {numbers[1]}, … {numbers[-1]}"
    return ", ".join(f"{stem}{a}" if a == b else f"{stem}{a} … {stem}{b}" for a, b in runs)
