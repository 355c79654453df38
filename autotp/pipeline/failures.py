"""What a stage does when something fails in a training step: it says where, and ends the others' waiting.

A rank that raises says so to the others, who give its words. Of one that has died nobody does: the stages
next to it find their connections closed, and say what they were waiting for.
"""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from ..errors import AutotpError, RankError
from .run import Pipeline


@dataclass
class Progress:
    """Where this rank is in a step. place: the rank in words. running: what it computes. awaited: what it has
    asked others for and not used yet, as (what, stage that uses it, micro-batch, rank it comes from)."""

    place: str
    running: str = ""
    last: str = ""
    awaited: list[tuple[str, int, int, int]] = field(default_factory=list)

    def __str__(self) -> str:
        if self.running:
            return f"{self.place}, {self.running}"
        if self.awaited:
            what, stage, index, source = self.awaited[0]
            return f"{self.place}, stage {stage}, micro-batch {index}, waiting for {what} of pp rank {source}"
        return f"{self.place}, {'after ' + self.last if self.last else 'at the first message'}"

    @contextmanager
    def run(self, what: str, stage: int, index: int, uses: str = "") -> Iterator[None]:
        """Around a forward or backward; its name stays where it fails."""
        self.awaited = [x for x in self.awaited if x[:3] != (uses, stage, index)]
        self.running = f"stage {stage}, micro-batch {index}, in its {what}"
        yield
        self.running, self.last = "", self.running.replace(", in its", ", its")


ACTIVATIONS, GRADIENTS = "activations", "gradients"


class Stage(PipelineStage):
    """torch's stage; what it does is noted in `progress`."""

    progress: Progress

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> Any:
        return self._asked(ACTIVATIONS, fwd_chunk_id, super().get_fwd_recv_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> Any:
        return self._asked(GRADIENTS, bwd_chunk_id, super().get_bwd_recv_ops(bwd_chunk_id))

    def _asked(self, what: str, index: int, ops: Any) -> Any:
        if ops:
            source = self.stage_index + (1 if what == GRADIENTS else -1)
            self.progress.awaited.append((what, self.stage_index, index, source % self.group_size))
        return ops

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self.progress.run("forward", self.stage_index, fwd_chunk_id, ACTIVATIONS):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self.progress.run("backward", self.stage_index, bwd_chunk_id, GRADIENTS):
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self.progress.run("backward to weights", self.stage_index, bwd_chunk_id):
            return super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)


def failed(pipeline: Pipeline, progress: Progress, error: BaseException) -> BaseException:
    """The error to raise for one that ended a step: of this rank, which the other stages are told, or theirs.
    No step can be made after it."""
    root: BaseException = error
    while not isinstance(root, AutotpError) and root.__cause__ is not None:
        root = root.__cause__
    cause = root if isinstance(root, AutotpError) else None
    channel: Any = pipeline.channel
    said = "" if progress.running else channel.said()
    if cause is None and said:
        cause = RankError(said)
    elif cause is None:
        lines = [line.strip() for line in str(root).splitlines() if line.strip()] or [""]
        gone = "" if progress.running else ", which has ended or sends nothing"
        cause = RankError(f"{progress}{gone}: {type(root).__name__}: {lines[0]}")
    elif isinstance(cause, RankError) and pipeline.place not in str(cause):
        cause = RankError(f"{progress}: {cause}")
    if str(cause) != said:
        channel.fail(str(cause))
    pipeline.failed = str(cause)
    text = "".join(traceback.format_exception(error))
    if hasattr(cause, "add_note"):  # Python 3.11
        cause.add_note(text)
    else:
        print(text, file=sys.stderr)
    return cause if isinstance(error, Exception) else error


@contextmanager
def after_schedule(pipeline: Pipeline) -> Iterator[None]:
    """Around what the stages do together when all micro-batches are done."""
    try:
        yield
    except (RuntimeError, RankError) as error:   # the former are gloo's and NCCL's
        raise failed(pipeline, Progress(pipeline.place, last="its last micro-batch"), error) from None


def close(held: list[dist.ProcessGroup], error: BaseException | None) -> None:
    """Close the connections of the group in `held`. gloo does when nothing has the group any more: so what
    the calls that failed held goes, too."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    dist.destroy_process_group(held.pop())
    gc.collect()
