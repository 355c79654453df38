"""A model counted: what one run over one sequence multiplies, moves, keeps and sends, unit by unit.

A size is a `Shares`: elements by the number of ways that tensor parallelism can divide them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .regions import Traffic


class Shares(dict[int, float]):
    """Elements by the number of ways they can be divided over tensor-parallel ranks (1: all on each)."""

    def add(self, ways: int, elements: float) -> None:
        self[ways] = self.get(ways, 0.0) + elements

    def local(self, tp: np.ndarray | int, whole_by: np.ndarray | int = 1) -> np.ndarray:
        """Elements on the fullest of `tp` ranks; what can't be divided is divided by `whole_by` (sequence
        parallelism).
        """
        tp = np.asarray(tp)
        return sum(
            (n * (share(tp, ways) if ways > 1 else 1 / np.asarray(whole_by)) for ways, n in self.items()),
            np.zeros(tp.shape),
        )

    @property
    def total(self) -> float:
        return sum(self.values())


def share(tp: np.ndarray, ways: int) -> np.ndarray:
    """The fullest rank's share of something that comes in `ways` equal pieces."""
    return np.ceil(ways / tp) / ways


@dataclass(frozen=True)
class Product:
    """[rows, inner] @ [inner, cols], `batch` times. split: which of them tensor parallelism divides, in up to
    `ways`.

    weight: elements of the parameter that is multiplied (0: two activations). Rows grow with the batch.
    """

    rows: float
    cols: float
    inner: float
    batch: float = 1.0
    split: str = ""
    ways: int = 1
    weight: float = 0.0

    @property
    def experts(self) -> int:
        """Matrices that the weight holds, of which each row sees one: experts; 1 for a plain weight."""
        return max(1, round(self.weight / (self.cols * self.inner)))


@dataclass(frozen=True)
class Attention:
    """softmax(q k') v: query and key/value heads, their lengths, the sizes of a head of q and k, and of v.

    dropout: on the probabilities.
    """

    heads: int
    kv_heads: int
    queries: int
    keys: int
    size: int
    value_size: int
    causal: bool
    dropout: bool


@dataclass(frozen=True)
class Message:
    """A tensor-parallel collective of so many elements. kind: `reduce` (all-reduce) or `gather`; when:
    `forward`, `backward`.

    statistic: it sends numbers per row, which sequence parallelism does not change.
    """

    kind: str
    when: str
    elements: float
    statistic: bool = False


@dataclass
class Unit:
    """A layer, or what stands between the layers. All sizes are for one sequence."""

    name: str
    layer: bool
    products: list[Product] = field(default_factory=list)
    attentions: list[Attention] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    traffic: Traffic = field(default_factory=Traffic)
    params: Shares = field(default_factory=Shares)
    experts: Shares = field(default_factory=Shares)  # of params: those of which a token uses a part
    table: float = 0.0  # of params: elements that are looked up, not multiplied
    output: float = 0.0  # elements it hands to the next unit
    state: float = 0.0  # bytes that generation keeps of a sequence whatever its length


@dataclass(frozen=True)
class Workload:
    """A model, counted. order: of its run, an index into `units` each (layers of one kind share one).

    seq: tokens of a sequence. logits: elements of the output that a loss is taken of. tied: parameters of the
    last unit that are the first one's. split_ways: the largest tensor-parallel degree that leaves no rank
    without work.
    """

    name: str
    units: tuple[Unit, ...]
    order: tuple[int, ...]
    seq: int
    logits: Shares
    tied: Shares
    head_ways: int
    unknown: tuple[str, ...]

    @property
    def parameters(self) -> float:
        return sum(self.units[i].params.total for i in self.order)

    @property
    def experts(self) -> int:
        """Experts of a layer; 1 where there are none. Of several numbers the one that divides all."""
        found = [p.experts for u in self.units for p in u.products if p.experts > 1]
        return int(np.gcd.reduce(found)) if found else 1

    @property
    def layers(self) -> int:
        return sum(self.units[i].layer for i in self.order)

    def flops(self) -> float:
        """Multiplications and additions of one forward of one sequence; a causal attention's masked half not
        counted.
        """
        return sum(unit_flops(self.units[i]) for i in self.order)


def unit_flops(unit: Unit) -> float:
    products = sum(2 * p.rows * p.cols * p.inner * p.batch for p in unit.products)
    return products + sum(
        2 * a.heads * a.queries * a.keys * (a.size + a.value_size) * (0.5 if a.causal else 1)
        for a in unit.attentions
    )
