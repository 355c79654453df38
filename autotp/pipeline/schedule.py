"""Stages trained by the schedules of `torch.distributed.pipelining`.

A stage is the model's own Python, left when the stage's last unit has returned (`run.py`); the last stage's
loss is the model's own. Messages and their order are torch's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

from ..comm import Comm, ProcessComm, timeout_of
from ..errors import PlanError, RankError, TrainError
from ..gradients import marked, plain, spread_of
from ..losses import Watch, Weights, weighted
from ..mesh import Mesh
from ..nested import map_tensors
from ..same import same_batch
from ..spread_sums import Spread
from ..state import part_of_copies
from .absent import is_missing
from .deferred import Deferred
from .failures import Progress, Stage, close, failed
from .run import Key, Pipeline

SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero-bubble")


class StageModule(nn.Module):
    """A stage as torch's schedules see it: from what is received and the number of a micro-batch to what is
    sent, or the last stage's weighted loss."""

    def __init__(self, model: nn.Module, pipeline: Pipeline, stage: int) -> None:
        super().__init__()
        self.run = lambda *args, **kwargs: pipeline.run_stage(model, stage, *args, **kwargs)
        self.parts: Sequence[Mapping[str, Any]] = ()
        self.weights: Weights | None = None
        self.last = stage == pipeline.stages.count - 1
        self.deferred: Deferred | None = None
        self.receives, self.sends = crossing_keys(pipeline, stage)

    def forward(self, *received: Tensor, index: Tensor) -> Any:
        number = int(index)
        values = {key: t for (key, _), t in zip(self.receives, received, strict=True)}
        watch = Watch()
        with watch if self.last else nullcontext(), self.deferred or nullcontext():
            output = self.run(values, (), self.parts[number], f"micro-batch {number}")
        if not self.last:
            return tuple(_sendable(output[key], grad) for key, grad in self.sends)
        assert self.weights is not None
        return weighted(output, watch, self.weights).reshape(1)


def crossing_keys(pipeline: Pipeline, stage: int) -> tuple[list[tuple[Key, bool]], list[tuple[Key, bool]]]:
    """What a stage receives and sends, in order, and whether it has a gradient."""
    cuts = pipeline.stages.crossings
    before = cuts[stage - 1] if stage else ()
    after = cuts[stage] if stage < len(cuts) else ()
    return ([((c.path, c.number, c.leaf), c.requires_grad) for c in before],
            [((c.path, c.number, c.leaf), c.requires_grad) for c in after])  # fmt: skip


def _sendable(x: Tensor, grad: bool) -> Tensor:
    """A tensor that torch's schedules may send, keep and cut off: no view, no leaf, dense, and with a
    gradient wherever the next stage sends one back."""
    if grad and not x.requires_grad:
        return x.detach().clone().requires_grad_()
    if x.is_leaf or x._is_view() or not x.is_contiguous():
        return x.clone(memory_format=torch.contiguous_format)
    return x


@dataclass
class Runner:
    """A schedule, made for micro-batches of certain shapes. signature: which. group: of its messages alone,
    so that closing it ends the other stages' waiting and nothing else."""

    signature: Any
    group: dist.ProcessGroup
    modules: list[StageModule]
    schedule: Any
    progress: Progress


def run_in_stages(
    model: nn.Module,
    pipeline: Pipeline,
    mesh: Mesh,
    parts: Sequence[Mapping[str, Any]],
    schedule: str,
    weights: Weights,
    copies: Any,
) -> None:
    """Forward and backward of all micro-batches; `.grad`s of this rank's stages are their weighted sums."""
    if not isinstance(mesh.pp, ProcessComm) or pipeline.channel is None:
        raise PlanError("train_step over stages needs processes: its schedules are torch.distributed's.")
    if pipeline.failed:
        raise RankError("an earlier train_step failed, and closed the stages' connections: start the "
                        f"processes anew. It said: {pipeline.failed}")
    around: Any = nullcontext() if copies is None else copies.in_stages(schedule == "zero-bubble")
    pipeline.channel.begin()
    with around:
        runner = _runner(model, pipeline, mesh.pp, parts, schedule)
        for module in runner.modules:
            module.parts, module.weights = parts, weights
        numbers = torch.arange(len(parts))
        try:
            runner.schedule.step(index=numbers, target=numbers)
        except BaseException as error:
            failure = failed(pipeline, runner.progress, error)
            held = [runner.group]
            pipeline.runner = runner = None  # type: ignore[assignment]
            close(held, error)
            for comm in (mesh.tp, mesh.dp):
                if isinstance(comm, ProcessComm):
                    comm.give_up()
            raise failure from None
    for module in runner.modules:
        module.parts, module.weights = (), None


def _runner(
    model: nn.Module, pipeline: Pipeline, comm: ProcessComm, parts: Sequence[Mapping[str, Any]], schedule: str
) -> Runner:
    """The one of the step before, or a new one where micro-batches or schedule are others."""
    signature = (schedule, len(parts), _shapes(parts[0]), model.training)
    runner: Runner | None = pipeline.runner
    if runner is None or runner.signature != signature:
        same_batch(_named(parts), comm)
        group = runner.group if runner is not None else _group_of_its_own(comm)
        runner = _built(model, pipeline, group, parts, schedule, signature)
        del group                                # see `close`
        pipeline.runner = runner
    return runner


def _group_of_its_own(comm: ProcessComm) -> dist.ProcessGroup:
    ranks = dist.get_process_group_ranks(comm.group or dist.group.WORLD)
    patience = timedelta(seconds=timeout_of(dist.group.WORLD))
    group: dist.ProcessGroup = dist.new_group(ranks, timeout=patience, use_local_synchronization=True)
    return group


def _built(
    model: nn.Module,
    pipeline: Pipeline,
    group: dist.ProcessGroup,
    parts: Sequence[Mapping[str, Any]],
    schedule: str,
    signature: Any,
) -> Runner:
    """The stages of this rank, and torch's schedule over them."""
    shapes = pipeline.shapes(model, parts[0])
    modules, stages, progress = [], [], Progress(pipeline.place)

    def example(keys: list[tuple[Key, bool]]) -> tuple[Tensor, ...]:
        return tuple(
            torch.empty(shapes[k].shape, dtype=shapes[k].dtype, device="meta", requires_grad=grad)
            for k, grad in keys
        )

    for number in pipeline.mine:
        module = StageModule(model, pipeline, number)
        module.deferred = Deferred() if schedule == "zero-bubble" else None
        outputs = example(module.sends) if not module.last else (torch.empty(1, device="meta"),)
        stage = Stage(
            module, number, pipeline.stages.count, pipeline.home.device,
            input_args=example(module.receives), output_args=outputs, group=group,
            dw_builder=module.deferred.take if module.deferred else None,
        )  # fmt: skip
        stage.progress = progress
        modules.append(module)
        stages.append(stage)
    made = _schedule(schedule, stages, len(parts), pipeline.size)
    return Runner(signature, group, modules, made, progress)


def _schedule(name: str, stages: list[Any], count: int, ranks: int) -> Any:
    options: dict[str, Any] = {"loss_fn": lambda output, target: output.sum(), "scale_grads": False}
    several = len(stages) > 1
    if name == "1f1b" and not several:
        if count < ranks:
            raise TrainError(
                f"schedule 1f1b over {ranks} stages needs {ranks} micro-batches or more, not {count}: give "
                "more, or schedule='gpipe'."
            )
        return pipelining.Schedule1F1B(stages[0], count, **options)
    if name == "gpipe":
        return (pipelining.ScheduleLoopedBFS(stages, count, **options) if several
                else pipelining.ScheduleGPipe(stages[0], count, **options))  # fmt: skip
    if (name == "interleaved") != several and name != "zero-bubble":
        raise TrainError(
            f"schedule {name!r} does not fit {len(stages)} stages a rank: interleaved has several, 1f1b one."
        )
    if count % ranks:
        raise TrainError(f"schedule {name!r} takes a multiple of {ranks} micro-batches, not {count}.")
    kind = (pipelining.ScheduleInterleaved1F1B if name == "interleaved"
            else pipelining.ScheduleInterleavedZeroBubble)  # fmt: skip
    return kind(stages, count, **options)


def _shapes(part: Mapping[str, Any]) -> Any:
    def form(value: Any) -> Any:
        return str(map_tensors(value, lambda t: (tuple(t.shape), t.dtype)))

    return tuple((name, form(value)) for name, value in part.items())


def _named(parts: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    return {
        f"{name} of micro-batch {i}": value
        for i, part in enumerate(parts)
        for name, value in part.items()
        if isinstance(value, Tensor)
    }


# ---------------------------------------------------------------- gradients of several stages
def sum_shared(model: nn.Module, pipeline: Pipeline, mesh: Mesh) -> None:
    """Sum the gradients of parameters that several ranks' stages hold, over those."""
    channel = pipeline.channel
    shared = [(n, p, pipeline.holders(n)) for n, p in model.named_parameters() if p.requires_grad]
    shared = [(n, p, ranks) for n, p, ranks in shared if len(ranks) > 1]
    if not shared:
        return
    assert channel is not None
    has = channel.exchange({n for n, p, _ in shared if not is_missing(p) and p.grad is not None})
    for name, param, ranks in shared:
        if pipeline.rank not in ranks or not any(name in theirs for theirs in has):
            continue
        grad = torch.zeros_like(param).detach() if param.grad is None else plain(param.grad)
        own, _ = part_of_copies(grad)
        if pipeline.rank == ranks[0]:
            for rank in ranks[1:]:
                own = own + channel.receive(own, own.device, rank)
            for rank in ranks[1:]:
                channel.send(own, rank)
        else:
            channel.send(own, ranks[0])
            own = channel.receive(own, own.device, ranks[0])
        part_of_copies(grad)[0].copy_(own)
        param.grad = grad
    channel.end()


def mark_gradients(model: nn.Module, pipeline: Pipeline, mesh: Mesh) -> None:
    """Give the gradients the norms of the whole model: of all stages, what several hold counted once."""
    own = [(n, p, p.grad) for n, p in model.named_parameters() if not is_missing(p) and p.grad is not None]
    stages = _with_gradients(bool(own), pipeline, mesh)
    for name, param, grad in own:
        spread = spread_of(param) or Spread()
        counts = pipeline.holders(name)[0] == pipeline.rank
        if stages is not None:
            spread = replace(spread, stages=(stages, counts))
        param.grad = marked(plain(grad), spread)


def _with_gradients(own: bool, pipeline: Pipeline, mesh: Mesh) -> Comm | None:
    """The ranks of the pipeline that have gradients: others come to no norm. None: at most this one."""
    has = torch.zeros(mesh.pp.size, device=pipeline.lies())
    has[mesh.pp.rank] = float(own)
    told = tuple(bool(n) for n in mesh.pp.all_reduce(has).tolist())
    if all(told):
        return mesh.pp
    if told not in pipeline.trained:
        groups = [[r for r, trains in enumerate(told) if trains == kind] for kind in (True, False)]
        comm: Any = mesh.pp
        pipeline.trained[told] = comm.split([group for group in groups if group])
    found = pipeline.trained[told]
    return found if found.size > 1 else None
