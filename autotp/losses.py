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
    """One call of a loss function in one part. readings: what the part's loss can be: a "sum", a mean over
    what is "counted", a mean over "all" places; several where they are the same number. n: what counted.
    numel: of how many places."""

    readings: tuple[str, ...]
    n: float
    numel: int


READINGS = ("counted", "all", "sum")


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

    def counted(self, loss: float) -> list[Counted]:
        """What was noted, of a part whose loss is this. Reads values, so a GPU is waited for."""
        found = []
        for kind, result, n, numel in self.seen:
            count, value = float(n), float(result.double().sum())
            readings: tuple[str, ...] = ("counted",)
            if kind not in ("mean", "batchmean"):
                readings = _readings(kind, value, count, numel, loss, len(self.seen))
            found.append(Counted(readings, count, numel))
        return found


def _readings(kind: str, total: float, n: float, numel: int, loss: float, calls: int) -> tuple[str, ...]:
    """What a loss can be that the model made of a result which it reduced, or divided, itself."""
    wanted = {"counted": total / n if n else 0.0, "all": total / numel, "sum": total}
    found = [k for k, v in wanted.items() if math.isclose(loss, v, rel_tol=CLOSE, abs_tol=1e-12)]
    if n == 0:
        return tuple(wanted)                     # nothing to be learnt from it
    if found and calls == 1:
        return tuple(found)
    if kind == "sum":
        return ("sum",)                          # divided by something that is given: they add up
    raise TrainError(
        "the model reduces the losses of single tokens in its own way: it is not known how those of "
        'micro-batches make that of the batch. Say so: weigh="rows" (means over rows) or weigh="sum".'
    )


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

    weigh: "tokens" (as the loss functions count), "rows" (parts count alike), "sum" (losses add up). whole:
    how many parts the batch has; 0 where other copies of the model have more of them. Where it is known, and
    the parts count alike, their shares are right as they are, and `scale` is 1. unit: what a part counts
    whose share is one of them.
    """

    weigh: str
    whole: int = 0
    unit: float = 0.0
    parts: list[list[Counted]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    error: str = ""  # kept until all ranks can hear of it
    dtype: str = ""

    def share(self, loss: Tensor, watch: Watch) -> float:
        """What part of one its loss counts; notes the part."""
        value, self.dtype = float(loss.detach()), str(loss.dtype).removeprefix("torch.")
        counted: list[Counted] = []
        if self.weigh == "tokens":
            try:
                counted = watch.counted(value)
                if not counted:
                    raise TrainError(
                        "the model's loss comes from no loss function of torch.nn.functional, so it is not "
                        "known what its mean is over. Say how the losses of micro-batches make that of the "
                        'batch: weigh="rows" (means over rows, all alike) or weigh="sum" (they add up).'
                    )
            except TrainError as error:
                self.error = str(error)
        share = 1.0 if self.weigh == "sum" else 1.0 / (self.whole or 1)
        if counted:
            first = counted[0]
            self.unit = self.unit or (first.n if self.whole else first.numel)
            before = [r for part in self.parts if part for r in READINGS if r not in part[0].readings]
            reading = next((r for r in first.readings if r not in before), first.readings[0])
            if reading == "counted" or first.n == 0:
                share *= first.n / self.unit if first.n else 0.0
            elif reading == "sum":
                share = 1.0
        self.parts.append(counted)
        self.losses.append(value)
        self.shares.append(share)
        return share

    def told(self) -> tuple[str, str, list[list[Counted]], list[float], list[float], str]:
        """What other ranks need to hear: what went wrong, the ways of weighing, the parts, their losses and
        shares, and the losses' dtype."""
        return self.error, self.weigh, self.parts, self.losses, self.shares, self.dtype


def combined(
    told: Sequence[tuple[str, list[list[Counted]], list[float], list[float]]],
) -> tuple[float, float]:
    """(scale, loss) of the whole batch, from what every copy of the model told of its part.

    scale: what the sum of all parts' gradients, each taken of its share of its loss, is multiplied by.
    Raises TrainError where no weighting of the parts makes the loss of the whole.
    """
    weigh = told[0][0]
    losses = [loss for _, _, these, _ in told for loss in these]
    shares = [share for *_, these in told for share in these]
    if weigh == "tokens":
        weights = _weights([part for _, these, *_ in told for part in these])
    else:
        weights = [1.0 if weigh == "sum" else 1.0 / len(losses)] * len(losses)
    going = [i for i, share in enumerate(shares) if share]
    if not going:                                # the whole batch's loss is 0/0, too
        return math.nan, math.nan
    scale = weights[going[0]] / shares[going[0]]
    if any(abs(weights[i] - scale * shares[i]) > 1e-9 * weights[i] for i in going):
        raise TrainError(UNCLEAR)
    return scale, math.fsum(weights[i] * losses[i] for i in going)


UNCLEAR = (
    "from the micro-batches' losses it is not clear whether they are sums or means, and of what: say so with "
    'weigh="rows" or "sum", or let the model call a loss function with reduction="mean".'
)


def _weights(parts: Sequence[Sequence[Counted]]) -> list[float]:
    """What each part's loss is multiplied by in that of the whole batch, as the loss functions count."""
    if len({len(part) for part in parts}) > 1 or len({c.numel for part in parts for c in part[:1]}) > 1:
        raise TrainError(
            "the micro-batches call different loss functions, or over different numbers of places: their "
            'losses have no common weights. Use microbatches=1, or weigh="rows" or "sum".'
        )
    readings = [r for r in READINGS if all(r in c.readings for part in parts for c in part)]
    found = [_read(reading, parts) for reading in readings]
    counts = [i for i, part in enumerate(parts) if part[0].n]
    if not found or any(abs(w[i] - found[0][i]) > 1e-9 * w[i] for w in found for i in counts):
        raise TrainError(UNCLEAR)
    return found[0]


def _read(reading: str, parts: Sequence[Sequence[Counted]]) -> list[float]:
    """The weights, if the parts' losses are so."""
    if reading != "counted":
        return [1.0 if reading == "sum" else 1.0 / len(parts)] * len(parts)
    totals = [math.fsum(part[i].n for part in parts) for i in range(len(parts[0]))]
    for part in parts:
        shares = [c.n / total if total else 0.0 for c, total in zip(part, totals, strict=True)]
        if max(shares) - min(shares) > 1e-9:
            raise TrainError(
                f"the model adds up {len(part)} losses that count different things (a micro-batch has "
                f"{', '.join(f'{share:.1%}' for share in shares)} of what they count in all): no one weight "
                'of it makes the loss of the whole batch. Use microbatches=1, or weigh="rows".'
            )
    return [part[0].n / totals[0] if totals[0] else 0.0 for part in parts]


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
