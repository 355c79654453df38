"""How the losses of parts of a batch make the loss of the whole: what each part's mean was taken over.

A mean over the whole batch is the parts' means weighted by what each counted: tokens that are not ignored.
The loss functions of torch are watched while the model's own code calls them, so shifted labels, padding and
class weights count as they do there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .errors import TrainError
from .nested import map_tensors

WEIGH = ("tokens", "rows", "sum")
CLOSE = 1e-3  # half precision; a mean over other things is off by far more


@dataclass(frozen=True)
class Counted:
    """One call of a loss function. kind: its reduction. total: the sum of what it added up, n: what its mean
    divides by, numel: of how many places (n, and those that are ignored)."""

    kind: str
    total: float
    n: float
    numel: int


class Watch(TorchFunctionMode):
    """While it is on, calls of torch's loss functions are noted."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, Tensor, Tensor | float, int]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        rule = _RULES.get(func)
        if rule is not None and isinstance(result, Tensor):
            kind, n, numel = rule(*args, **(kwargs or {}))
            self.seen.append((kind, result.detach(), n, numel))
        return result

    def counted(self) -> list[Counted]:
        """What was noted; reads values, so a GPU is waited for."""
        found = []
        for kind, result, n, numel in self.seen:
            count, value = float(n), float(result.double().sum())
            total = value * count if kind in ("mean", "batchmean") and count else value
            found.append(Counted("mean" if kind == "batchmean" else kind, total, count, numel))
        return found


def _classes(input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: Any = None,
             ignore_index: int = -100, reduce: Any = None, reduction: str = "mean",
             label_smoothing: float = 0.0) -> tuple[str, Tensor | float, int]:  # fmt: skip
    """cross_entropy, nll_loss: classes as numbers, of which one is ignored, or as probabilities."""
    if target.is_floating_point():
        n = target.numel() // max(target.shape[1 if target.dim() > 1 else 0], 1)
        return reduction, float(n), n
    counts = target != ignore_index
    if weight is None:
        return reduction, counts.sum(), target.numel()
    return reduction, (weight[target.clamp_min(0)] * counts).sum(), target.numel()


def _elements(input: Tensor, target: Any = None, *args: Any, reduction: str = "mean", **_: Any) -> Any:
    """A loss of every element."""
    texts = [a for a in args if isinstance(a, str)]
    kind = texts[0] if texts else reduction
    n = input.shape[0] if kind == "batchmean" else input.numel()
    return kind, float(n), n


def _rows(input: Tensor, *args: Any, reduction: str = "mean", **_: Any) -> Any:
    """A loss of every row."""
    texts = [a for a in args if isinstance(a, str)]
    n = input.shape[0] if input.dim() else 1
    return texts[0] if texts else reduction, float(n), n


_RULES: dict[Any, Any] = {
    F.cross_entropy: _classes, F.nll_loss: _classes,
    **dict.fromkeys((F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.kl_div, F.binary_cross_entropy,
                     F.binary_cross_entropy_with_logits, F.poisson_nll_loss, F.soft_margin_loss), _elements),
    **dict.fromkeys((F.ctc_loss, F.cosine_embedding_loss, F.margin_ranking_loss, F.multi_margin_loss,
                     F.hinge_embedding_loss, F.triplet_margin_loss, F.multilabel_margin_loss,
                     F.multilabel_soft_margin_loss, F.gaussian_nll_loss), _rows),
}  # fmt: skip


@dataclass
class Weights:
    """The weights of a batch's parts. Each is known when its own loss is: `share` times the loss goes
    backward; when all are known, `scale` makes the sum of their gradients the whole batch's.

    weigh: "tokens" (as the loss functions count), "rows" (parts count alike), "sum" (losses add up).
    """

    weigh: str
    parts: list[list[Counted]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    error: str = ""  # kept until all ranks can hear of it
    dtype: str = ""

    def share(self, loss: Tensor, watch: Watch) -> float:
        """What part of one its loss counts; notes the part."""
        counted = watch.counted() if self.weigh == "tokens" else []
        value, self.dtype = float(loss.detach()), str(loss.dtype).removeprefix("torch.")
        try:
            counted = [_as_reduced(c, value, len(counted)) for c in counted]
        except TrainError as error:
            self.error = str(error)
        if self.weigh == "tokens" and not counted:
            self.error = (
                "the model's loss comes from no loss function of torch.nn.functional, so it is not known "
                "what its mean is over. Say how the losses of micro-batches make that of the batch: "
                'weigh="rows" (means over rows, all alike) or weigh="sum" (they add up).'
            )
        self.parts.append(counted)
        self.losses.append(value)
        return counted[0].n / counted[0].numel if counted and counted[0].kind == "mean" else 1.0

    def told(self) -> tuple[str, str, list[list[Counted]], list[float], str]:
        """What other ranks need to hear: what went wrong, the ways of weighing, the parts, their losses, and
        the losses' dtype."""
        return self.error, self.weigh, self.parts, self.losses, self.dtype


def combined(told: Sequence[tuple[str, list[list[Counted]], list[float]]]) -> tuple[float, float]:
    """(scale, loss) of the whole batch, from what every copy of the model told of its part.

    scale: what the sum of all parts' gradients, each taken of `share` times its loss, is multiplied by.
    Raises TrainError where no weighting of the parts makes the loss of the whole.
    """
    weigh = told[0][0]
    parts = [part for _, these, _ in told for part in these]
    losses = [loss for _, _, these in told for loss in these]
    if weigh != "tokens":
        scale = 1.0 if weigh == "sum" else 1.0 / len(losses)
        return scale, scale * math.fsum(losses)
    kinds = {c.kind for part in parts for c in part}
    if len({len(part) for part in parts}) > 1 or len(kinds) > 1:
        raise TrainError(
            f"the micro-batches call different loss functions, or of different reductions "
            f"({', '.join(sorted(kinds))}): "
            'their losses have no common weights. Use one reduction, or weigh="rows" or "sum".'
        )
    if kinds == {"sum"}:
        return 1.0, math.fsum(losses)
    totals = [math.fsum(part[i].n for part in parts) for i in range(len(parts[0]))]
    for part in parts:
        shares = [c.n / total if total else 0.0 for c, total in zip(part, totals, strict=True)]
        if max(shares) - min(shares) > 1e-9:
            raise TrainError(
                f"the model adds up {len(part)} losses that count different things (a micro-batch has "
                f"{', '.join(f'{share:.1%}' for share in shares)} of what they count in all): no one weight "
                'of it makes the loss of the whole batch. Use microbatches=1, or weigh="rows".'
            )
    numel, total = parts[0][0].numel, totals[0]
    if any(part[0].numel != numel for part in parts):
        raise TrainError("the micro-batches' losses are over different numbers of places.")
    if total == 0:  # nothing is counted anywhere: the whole batch's loss is 0/0 too
        return math.nan, math.nan
    known = [(loss, part[0].n) for loss, part in zip(losses, parts, strict=True) if part[0].n]
    return numel / total, math.fsum(loss * n for loss, n in known) / total


def _as_reduced(c: Counted, loss: float, calls: int) -> Counted:
    """What the model made of a result that it reduced, or divided, itself."""
    if c.kind == "mean":
        return c
    means = {c.n: c, float(c.numel): Counted("mean", c.total, float(c.numel), c.numel)}
    for n, mean in means.items():
        if calls == 1 and n and math.isclose(loss, c.total / n, rel_tol=CLOSE, abs_tol=1e-12):
            return Counted("mean", mean.total, n, c.numel)
    if c.kind == "none" and not (calls == 1 and math.isclose(loss, c.total, rel_tol=CLOSE)):
        raise TrainError(
            "the model reduces the losses of single tokens in its own way: it is not known how those of "
            'micro-batches make that of the batch. Say so: weigh="rows" (means over rows) or weigh="sum".'
        )
    return Counted("sum", c.total, c.n, c.numel)


def loss_of(output: Any) -> Tensor:
    """The loss in a model's output: itself, its `loss`, or the first of a tuple: a number with a gradient."""
    found = output
    if not isinstance(output, Tensor):
        found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if found is None and isinstance(output, (tuple, list)) and output:
            found = output[0]
    if not isinstance(found, Tensor) or found.numel() != 1 or not found.requires_grad:
        what = f"shape {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise TrainError(
            f"the model's output, a {type(output).__name__}, has no loss to train on (found: {what}). Put "
            "what it needs into the batch (`labels`), or let it give the loss as `loss`, or first in a tuple."
        )
    return found.reshape(())


def weighted(output: Any, watch: Watch, weights: Weights) -> Tensor:
    """What of a micro-batch's output goes backward."""
    try:
        loss = loss_of(output)
    except TrainError as error:
        weights.error = str(error)
        return torch.zeros((), requires_grad=True)
    share = weights.share(loss, watch)
    if share:
        return loss * share
    # Nothing is counted here, and the mean is 0/0: a zero that backward can begin with
    others: list[Tensor] = []
    map_tensors(output, lambda t: others.append(t) or t)  # type: ignore[func-returns-value]
    zero = torch.zeros((), device=loss.device, requires_grad=True)
    for other in others:
        if other.requires_grad and other.dim():
            zero = zero + other.float().sum() * 0.0
    return zero
