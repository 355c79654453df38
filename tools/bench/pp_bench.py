"""The bubble of each pipeline schedule, measured, beside what the search's simulation says.

`python tools/bench/pp_bench.py` starts two processes over gloo, one thread each, and times `train_step` of a
stack of equal MLPs: how long a step takes, and of it how long each rank is busy with forwards and backwards.
The bubble is the idle share. The simulation (`autotp/search/schedule.py`) is given the mean time that each
stage's forwards and backwards took in the same steps. Both need a core for each process and nothing else
running.

`--sleep 0.2` puts sleep in the place of computing: a block's forward, its backward to inputs and that to
weights take 0.2 s each, whatever else the machine does, and the simulation is told just that. So what is
measured is the schedule itself, its messages and the library's own Python; of the rounds' steps the shortest.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining.stage import PipelineStage

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from launch import launch, say, telling_errors  # noqa: E402

WIDTH, HIDDEN, TOKENS = 512, 2048, 256
BLOCKS = 8  # of a model that computes: as many in each stage
STAGES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero-bubble": 1}  # a rank
KINDS = {"forward_one_chunk": "F", "backward_one_chunk": "B", "backward_weight_one_chunk": "W"}

Times = dict[tuple[str, int], list[float]]  # by kind and stage, seconds of each


class Nap(torch.autograd.Function):
    """Its argument; forward and backward take their time."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        if not x.is_meta:  # another stage has the values
            time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        time.sleep(ctx.seconds)
        return grad, None


class Sleeper(nn.Module):
    """A block that sleeps as long in its forward as in either half of its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(8, 8), 0.0

    def sleep(self, seconds: float) -> None:
        self.seconds = seconds
        self.linear.weight.register_hook(lambda grad: time.sleep(seconds))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Nap.apply(self.linear(x), self.seconds)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Stack(nn.Module):
    """Equal blocks behind an embedding of little work, so that gradients reach the first one, too."""

    def __init__(self, blocks: list[nn.Module], width: int) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(16, width), nn.ModuleList(blocks)

    def forward(self, ids: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(x, target)


def built(pp: int, stages: int, seconds: float) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The model in `stages` stages over the ranks, one block in each where blocks sleep; one micro-batch."""
    import autotp

    torch.manual_seed(0)
    blocks = [Sleeper() for _ in range(stages)] if seconds else [Block() for _ in range(BLOCKS)]
    width, tokens = (8, 1) if seconds else (WIDTH, TOKENS)
    model = Stack(list(blocks), width)
    batch = {"ids": torch.zeros(1, tokens, dtype=torch.long), "target": torch.zeros(1, tokens, width)}
    starts = [f"blocks.{len(blocks) * i // stages}" for i in range(1, stages)]
    autotp.parallelize(model, tp=1, pp=pp, stages=starts, example_inputs=batch)
    for block in blocks:
        if isinstance(block, Sleeper) and not hasattr(block.linear.weight, "origin"):  # not another stage's
            block.sleep(seconds)
    return model, batch


def watch(times: Times) -> None:
    """Note how long this process's forwards and backwards take: of torch's stages, from their call to its
    end."""

    def timed(run: Any, kind: str) -> Any:
        def one_chunk(self: Any, *args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return run(self, *args, **kwargs)
            finally:
                times[kind, self.stage_index].append(time.perf_counter() - start)

        return one_chunk

    for name, kind in KINDS.items():
        setattr(PipelineStage, name, timed(getattr(PipelineStage, name), kind))


def worker(pp: int, schedules: list[str], counts: list[int], rounds: int, seconds: float) -> None:
    """One rank: of every schedule and number of micro-batches, the seconds of steps and of what was done."""
    from autotp import train_step

    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    torch.set_num_threads(1)
    times: Times = defaultdict(list)
    watch(times)
    found = []
    for schedule in schedules:
        model, one = built(pp, pp * STAGES[schedule], seconds)
        for count in counts:
            batch = {name: value.repeat(count, *[1] * (value.dim() - 1)) for name, value in one.items()}
            steps = []
            train_step(model, batch, count, schedule)  # connections are made
            times.clear()
            for _ in range(rounds):
                dist.barrier()
                start = time.perf_counter()
                train_step(model, batch, count, schedule)
                dist.barrier()
                steps.append(time.perf_counter() - start)
                say(step=True)
            spent = [(kind, stage, list(values)) for (kind, stage), values in times.items()]
            found.append({"schedule": schedule, "count": count, "steps": steps, "spent": spent})
    dist.barrier()
    dist.destroy_process_group()
    say(result=True, found=found)


def row(pp: int, seconds: float, ranks: list[dict[str, Any]]) -> list[str]:
    """Of one schedule and number of micro-batches, from what every rank found."""
    from autotp.search.schedule import simulate

    schedule, count, steps = ranks[0]["schedule"], ranks[0]["count"], ranks[0]["steps"]
    rounds, stages = len(steps), pp * STAGES[schedule]
    spent: Times = {(kind, stage): values for rank in ranks for kind, stage, values in rank["spent"]}
    mean = {key: statistics.fmean(values) for key, values in spent.items()}
    forward = [mean["F", s] for s in range(stages)]
    weights = [mean.get(("W", s), 0.0) for s in range(stages)]
    backward = [mean["B", s] + weights[s] for s in range(stages)]
    if seconds:
        forward, backward, weights = [seconds] * stages, [2 * seconds] * stages, [seconds] * stages
    run = simulate(schedule, forward, backward, count, ranks=pp, weights=weights)
    expected = 1 - sum(run.busy) / (pp * run.length)
    busy = sum(map(sum, spent.values())) / rounds if not seconds else sum(run.busy)
    length = statistics.fmean(steps) if not seconds else min(steps)  # others' work only adds to it
    measured = 1 - busy / (pp * length)
    return [schedule, str(count), f"{length:.3f}", f"{run.length:.3f}", f"{measured:.1%}", f"{expected:.1%}",
            f"{measured / expected - 1:+.1%}"]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--schedules", nargs="+", default=list(STAGES), choices=list(STAGES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sleep", type=float, default=0.0, help="seconds; 0: blocks compute")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)  # given to the ranks
    options = parser.parse_args()
    if options.worker:
        with telling_errors():
            worker(options.pp, options.schedules, options.microbatches, options.rounds, options.sleep)
        return 0

    from rich.progress import Progress

    with Progress() as progress:
        total = len(options.schedules) * len(options.microbatches) * options.rounds
        task = progress.add_task("steps", total=total)

        def show(message: dict[str, Any]) -> None:
            if message["rank"] == 0 and "step" in message:
                progress.update(task, advance=1)

        ranks = launch(__file__, [*sys.argv[1:], "--worker"], options.pp, show)
    head = ["schedule", "micro-batches", "step (s)", "simulated (s)", "bubble", "simulated", "off by"]
    rows = [head, ["---"] + ["---:"] * (len(head) - 1)]
    for of_one in zip(*(rank["found"] for rank in ranks), strict=True):
        rows.append(row(options.pp, options.sleep, list(of_one)))
    print("\n".join("| " + " | ".join(cells) + " |" for cells in rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
