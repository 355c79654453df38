"""One training step of a model under any tp × pp × dp: forward and backward of a batch in micro-batches.

What the mean of each micro-batch's loss was taken over is noted (`losses.py`), so that the gradients are
those of the whole batch, over all copies of the model. With pp=1 micro-batches run one after another; stages
run by a schedule (`pipeline/schedule.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from .errors import TrainError
from .gradients import plain
from .losses import WEIGH, Watch, Weights, combined, weighted
from .mesh import Mesh
from .microbatches import split_batch
from .pipeline.absent import is_missing
from .pipeline.failures import after_schedule
from .pipeline.run import Pipeline
from .pipeline.schedule import SCHEDULES, mark_gradients, run_in_stages, sum_shared
from .replicas import Replica


def train_step(
    model: nn.Module,
    batch: Mapping[str, Any],
    microbatches: int = 8,
    schedule: str = "1f1b",
    *,
    weigh: str = "tokens",
    batch_dims: Mapping[str, int | None] | None = None,
) -> Tensor:
    """Forward and backward of `batch`, as `model(**batch).loss.backward()` of one process: the loss of the
    whole batch, the same on every rank (0 dims, no gradient). `.grad` accumulates; the caller steps the
    optimizer.

    batch: the model's arguments by name, with labels: this copy's part of the data (`autotp.data_rank`), the
    same on its tp and pp ranks. It is cut into `microbatches` along the batch's rows; batch_dims says for an
    argument which dim that is, where it is not the first, or None: it has no rows, and goes to all. schedule:
    "1f1b", "gpipe", "interleaved" (several stages a rank) or "zero-bubble"; with pp=1 micro-batches run one
    after another.

    weigh: how micro-batches' losses make the batch's. "tokens": as the mean of torch's loss function that the
    model calls: by the places that are not ignored, over all micro-batches and copies; where the model
    divides a sum by a number it is given (transformers' `num_items_in_batch`: of the whole batch over all
    copies), losses add up. "rows": micro-batches count alike. "sum": losses add up. What a model adds to its
    loss (router losses of mixtures of experts) is weighted along, and is of each micro-batch, as with any
    gradient accumulation. Dropout draws anew for each micro-batch, the same on tensor-parallel ranks where it
    must.

    Every rank must call it. Raises TrainError where the batch can't be cut, there is no loss, or no weighting
    is right; RankError, with rank, stage and micro-batch, where another rank failed.
    """
    if schedule not in SCHEDULES:
        raise TrainError(f"schedule={schedule!r}: choose one of {', '.join(SCHEDULES)}.")
    if weigh not in WEIGH:
        raise TrainError(f"weigh={weigh!r}: choose one of {', '.join(WEIGH)}.")
    state: Any = getattr(model, "autotp", None)
    mesh: Mesh | None = getattr(state, "mesh", None)
    pipeline: Pipeline | None = getattr(state, "pipeline", None)
    copies: Any = getattr(state, "copies", None)
    if copies is not None and copies.cuts:
        copies.reshard()
    parts = split_batch(batch, microbatches, batch_dims)
    if copies is not None and copies.pending:
        raise TrainError("there are gradients from autotp.no_sync that no backward has averaged yet: finish "
                         "that accumulation, or set them to None, before train_step.")
    params = [p for p in model.parameters() if p.requires_grad and not is_missing(p)]
    before = [p.grad for p in params]
    for p in params:
        p.grad = None
    copy_count = mesh.dp.size if mesh is not None else 1
    weights = Weights(weigh, len(parts) if copy_count == 1 else 0)
    try:
        with torch.enable_grad():
            if pipeline is None:
                _one_after_another(model, parts, weights, copies)
            else:
                assert mesh is not None
                run_in_stages(model, pipeline, mesh, parts, schedule, weights, copies)
        with torch.no_grad(), nullcontext() if pipeline is None else after_schedule(pipeline):
            scale, loss, dtype = _agreed(weights, mesh, pipeline)
            if pipeline is not None and mesh is not None:
                sum_shared(model, pipeline, mesh)
            if isinstance(copies, Replica):
                copies.average([p for p in params if p.grad is not None])
            if pipeline is not None and mesh is not None:
                mark_gradients(model, pipeline, mesh)
            factor = scale * copy_count          # gradients of copies were averaged
            for p, grad in zip(params, before, strict=True):
                if p.grad is not None and grad is not None:
                    plain(grad).add_(plain(p.grad), alpha=factor)
                elif p.grad is not None and factor != 1:
                    plain(p.grad).mul_(factor)
    except BaseException:
        for p, grad in zip(params, before, strict=True):
            p.grad = grad
        raise
    for p, grad in zip(params, before, strict=True):
        if grad is not None:
            p.grad = grad
    device = params[0].device if params else torch.device("cpu")
    return torch.tensor(loss, dtype=getattr(torch, dtype), device=device)


def _agreed(weights: Weights, mesh: Mesh | None, pipeline: Pipeline | None) -> tuple[float, float, str]:
    """The scale of the gradients, the loss and its dtype, from what the last stages of all copies noted."""
    told: Any = weights.told()
    if pipeline is not None and pipeline.channel is not None:
        told = pipeline.channel.exchange(told)[(pipeline.stages.count - 1) % pipeline.size]
        pipeline.channel.end()
    copies = [told] if mesh is None else mesh.dp.exchange(told)
    for error, *_ in copies:
        if error:
            raise TrainError(error)
    return *combined([rest for _, *rest, _ in copies]), copies[0][-1]


def _one_after_another(
    model: nn.Module, parts: Sequence[Mapping[str, Any]], weights: Weights, copies: Any
) -> None:
    for i, part in enumerate(parts):
        last = i == len(parts) - 1
        quiet = copies is not None and (isinstance(copies, Replica) or not last)
        with copies.paused() if quiet else nullcontext():
            watch = Watch()
            with watch:
                output = model(**part)
            going = weighted(output, watch, weights)
            if going.requires_grad:
                going.backward()
