"""The bubble of each pipeline schedule, measured, beside what the search's simulation says.

`python tools/bench/pp_bench.py` starts two processes over gloo, one thread each, and times `train_step` of a
stack of equal MLPs: when each forward and backward began, and when a rank began to wait for another. The
bubble is the share of the time from the first one's begin to the last one's end in which ranks are idle. The
simulation (`autotp/search/schedule.py`) is given the time that each forward and backward took in the same
step, its messages sent, and what a message then takes until it is there, measured before (`hop`). A rank that
sends or runs the library's Python is not idle: that has a column, `between`. What a step
has before and after its actions is no part of a schedule, and has a column of its own; the search has it in
`step_ms`. Both need a core for each process and nothing else running: the row is that of the shortest of the
rounds' steps, since other work only adds to one, with the median of all beside it.

`--tokens 256` makes a micro-batch, and so each action, that much smaller; real ones take long.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.stage import PipelineStage

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from launch import launch, say, telling_errors  # noqa: E402

WIDTH, HIDDEN = 512, 2048
HOPS = 50  # messages that are timed
BLOCKS = 8  # of a model that computes: as many in each stage
STAGES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero-bubble": 1}  # a rank
KINDS = {"forward_one_chunk": "F", "backward_one_chunk": "B", "backward_weight_one_chunk": "W"}

Times = list[tuple[str, int, float, float]]  # kind, stage (-1: a wait), begin, end, by the machine's clock


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Stack(nn.Module):
    """Equal blocks behind an embedding of little work, so that gradients reach the first one, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])

    def forward(self, ids: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(x, target)


def built(pp: int, stages: int, tokens: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The model in `stages` stages over the ranks; one micro-batch."""
    import autotp

    torch.manual_seed(0)
    model = Stack()
    batch = {"ids": torch.zeros(1, tokens, dtype=torch.long), "target": torch.zeros(1, tokens, WIDTH)}
    starts = [f"blocks.{BLOCKS * i // stages}" for i in range(1, stages)]
    autotp.parallelize(model, tp=1, pp=pp, stages=starts, example_inputs=batch)
    return model, batch


def watch(times: Times) -> None:
    """Note when forwards and backwards of this process run, those of torch's stages, from their call to its
    end; and when its schedules wait for messages."""

    def timed(run: Any, kind: str) -> Any:
        def one_chunk(self: Any, *args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return run(self, *args, **kwargs)
            finally:
                times.append((kind, self.stage_index, start, time.perf_counter()))

        return one_chunk

    for name, kind in KINDS.items():
        setattr(PipelineStage, name, timed(getattr(PipelineStage, name), kind))
    wait = schedules._wait_batch_p2p

    def waiting(work: Any) -> None:
        start = time.perf_counter()
        wait(work)
        times.append(("wait", -1, start, time.perf_counter()))

    schedules._wait_batch_p2p = waiting


def hop(numel: int) -> float:
    """Seconds of a message from one process to the next, sent as torch's schedules send it: the receiver
    waits for it, the sender goes on with its next action, which gloo's threads share a core with."""
    rank, moments, message = dist.get_rank(), [], torch.zeros(numel)
    block, x = Block(), torch.zeros(numel // WIDTH, WIDTH)
    for _ in range(HOPS):
        if rank == 0:
            moments.append(time.perf_counter())
            sent = dist.isend(message, 1)
            block(x)
            sent.wait()  # type: ignore[union-attr]
        elif rank == 1:
            dist.irecv(message, 0).wait()  # type: ignore[union-attr]
            moments.append(time.perf_counter())
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, moments)
    return statistics.median(end - start for start, end in zip(of_ranks[0], of_ranks[1], strict=True))


def worker(pp: int, schedules: list[str], counts: list[int], rounds: int, tokens: int) -> None:
    """One rank: of every schedule and number of micro-batches, when its steps ran, and what was done when."""
    from autotp import train_step

    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    torch.set_num_threads(1)
    times: Times = []
    watch(times)
    found = []
    sent = hop(tokens * WIDTH)
    for schedule in schedules:
        model, one = built(pp, pp * STAGES[schedule], tokens)
        for count in counts:
            batch = {name: value.repeat(count, *[1] * (value.dim() - 1)) for name, value in one.items()}
            steps = []
            for round_ in range(rounds + 1):  # in the first connections are made
                model.zero_grad()
                dist.barrier()
                times.clear()
                start = time.perf_counter()
                train_step(model, batch, count, schedule)
                if round_:
                    steps.append({"start": start, "end": time.perf_counter(), "times": list(times)})
                    say(step=True)
            found.append({"schedule": schedule, "count": count, "steps": steps, "hop": sent})
    dist.barrier()
    dist.destroy_process_group()
    say(result=True, found=found)


@dataclass
class Step:
    """One step. All in seconds. actions: from the first one's begin to the last one's end; simulated: those.
    measured, expected: shares that are bubble. between: neither computing nor waiting, of a rank."""

    whole: float
    actions: float
    simulated: float
    measured: float
    expected: float
    between: float

    @property
    def off(self) -> float:
        return self.measured / self.expected - 1


def compared(pp: int, schedule: str, count: int, sent: float, ranks: list[Any]) -> Step:
    """A step beside its simulation, from what every rank noted of it."""
    from autotp.search.schedule import simulate

    stages = pp * STAGES[schedule]
    of_ranks = [busy_times(rank["times"]) for rank in ranks]
    length = max(end for rank in of_ranks for *_, end in rank) - min(rank[0][2] for rank in of_ranks)
    single: dict[tuple[str, int, int], float] = {}
    done: dict[tuple[str, int], int] = {}  # a stage runs its micro-batches in order
    for kind, stage, begin, end in itertools.chain(*of_ranks):
        at = done[kind, stage] = done.get((kind, stage), -1) + 1
        single[kind, stage, at] = end - begin
    none = [0.0] * stages  # every action's own time is known
    run = simulate(schedule, none, none, count, ranks=pp, weights=none, send=sent, single=single)
    busy = sum(run.busy)
    whole = max(rank["end"] for rank in ranks) - min(rank["start"] for rank in ranks)
    computing = sum(end - begin for rank in ranks for kind, _, begin, end in rank["times"] if kind != "wait")
    between = sum(end - begin for *_, begin, end in itertools.chain(*of_ranks)) - computing
    shares = 1 - busy / (pp * length), 1 - busy / (pp * run.length)
    return Step(whole, length, run.length, *shares, between / pp)


def busy_times(times: Times) -> Times:
    """A rank's actions in order, each until the rank waits or the next one begins."""
    times = sorted(times, key=lambda one: one[2])
    found: Times = []
    for i, (kind, stage, begin, end) in enumerate(times):
        if kind != "wait":
            found.append((kind, stage, begin, times[i + 1][2] if i + 1 < len(times) else end))
    return found


def row(pp: int, ranks: list[dict[str, Any]]) -> list[str]:
    """Of one schedule and number of micro-batches, from what every rank found."""
    schedule, count, sent = ranks[0]["schedule"], ranks[0]["count"], ranks[0]["hop"]
    steps = [compared(pp, schedule, count, sent, list(of_one))
             for of_one in zip(*(rank["steps"] for rank in ranks), strict=True)]  # fmt: skip
    best = min(steps, key=lambda step: step.actions)
    return [
        schedule, str(count), f"{best.actions:.3f}", f"{best.simulated:.3f}", f"{best.measured:.1%}",
        f"{best.expected:.1%}", f"{best.off:+.1%}", f"{statistics.median(step.off for step in steps):+.1%}",
        f"{1000 * best.between:.0f}", f"{1000 * (best.whole - best.actions):.0f}",
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--schedules", nargs="+", default=list(STAGES), choices=list(STAGES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=1024, help="of a micro-batch")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)  # given to the ranks
    options = parser.parse_args()
    if options.worker:
        with telling_errors():
            worker(options.pp, options.schedules, options.microbatches, options.rounds, options.tokens)
        return 0

    from rich.progress import Progress

    with Progress() as progress:
        total = len(options.schedules) * len(options.microbatches) * options.rounds
        task = progress.add_task("steps", total=total)

        def show(message: dict[str, Any]) -> None:
            if message["rank"] == 0 and "step" in message:
                progress.update(task, advance=1)

        ranks = launch(__file__, [*sys.argv[1:], "--worker"], options.pp, show)
    head = ["schedule", "micro-batches", "actions (s)", "simulated (s)", "bubble", "simulated", "off by",
            "median", "between (ms)", "beside (ms)"]  # fmt: skip
    rows = [head, ["---"] + ["---:"] * (len(head) - 1)]
    for of_one in zip(*(rank["found"] for rank in ranks), strict=True):
        rows.append(row(options.pp, list(of_one)))
    print(f"a message takes {1000 * ranks[0]['found'][0]['hop']:.2f} ms\n")
    print("\n".join("| " + " | ".join(cells) + " |" for cells in rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
