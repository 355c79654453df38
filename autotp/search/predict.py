"""One configuration, predicted: seconds of a step, bytes on each stage, and where both go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import Any

import numpy as np
from torch import nn

from ..errors import SearchError
from . import memory
from .cluster import Cluster, load, send
from .cost import Setting, dtype_named, loss_time, ring_time, unit_passes
from .counts import count
from .data_parallel import data_parallel
from .generate import generation
from .schedule import SCHEDULES, Timeline, balanced, simulate
from .states import with_states
from .workload import Workload

RECOMPUTE = ("none", "selective", "full")
MOST_STEPS = 20_000  # of a schedule that is simulated; beyond, the closed form stands in


@dataclass(frozen=True)
class Config:
    """Degrees and choices of one run. batch: sequences of a step over all GPUs; micro_batch: of one pass of
    one rank.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    batch: int = 1
    micro_batch: int = 1
    recompute: str = "none"
    zero: int = 0
    virtual_stages: int = 1
    sequence_parallel: bool = False
    schedule: str = "1f1b"
    dtype: str = "bf16"
    ep: int = 1

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def microbatches(self) -> int:
        return self.batch // (self.dp * self.micro_batch)

    def __str__(self) -> str:
        parts = [f"tp={self.tp}", f"pp={self.pp}", f"dp={self.dp}"]
        parts += [f"cp={self.cp}"] if self.cp > 1 else []
        parts += [f"ep={self.ep}"] if self.ep > 1 else []
        parts += [f"virtual={self.virtual_stages}"] if self.virtual_stages > 1 else []
        parts += [f"micro_batch={self.micro_batch}", f"zero={self.zero}", f"recompute={self.recompute}"]
        return " ".join(parts + (["sequence_parallel"] if self.sequence_parallel else []))


@dataclass(frozen=True)
class Prediction:
    """step_time: seconds of one optimizer step; in `generate`, of one token for each sequence. prefill_time:
    seconds until the first token (generate). memory: bytes at the peak of each pipeline stage. breakdown:
    seconds by what they go to; they sum to step_time. memory_breakdown: bytes by kind, of the fullest stage.
    capacity: GB-limit in bytes of a GPU."""

    config: Config
    step_time: float
    memory: tuple[float, ...]
    breakdown: Mapping[str, float]
    memory_breakdown: Mapping[str, float]
    capacity: float
    prefill_time: float | None = None
    tokens_per_second: float = 0.0
    sequences: int = 0  # generate: that fit into memory at once, with `seq` tokens each
    timeline: Timeline | None = field(default=None, repr=False)
    stages: tuple[int, ...] = ()  # layers of each stage
    memory_by_stage: tuple[Mapping[str, float], ...] = ()  # train: `memory` of each stage by kind

    @property
    def peak_memory(self) -> float:
        return max(self.memory)

    @property
    def fits(self) -> bool:
        return self.peak_memory <= self.capacity

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "config": vars(self.config) | {"gpus": self.config.gpus},
            "step_time_s": self.step_time,
            "prefill_time_s": self.prefill_time,
            "tokens_per_second": self.tokens_per_second,
            "sequences_that_fit": self.sequences,
            "breakdown_s": dict(self.breakdown),
            "memory_bytes": list(self.memory),
            "memory_breakdown_bytes": dict(self.memory_breakdown),
            "memory_by_stage_bytes": [dict(kinds) for kinds in self.memory_by_stage],
            "capacity_bytes": self.capacity,
            "fits": self.fits,
            "layers_per_stage": list(self.stages),
        }


def predict(
    model: nn.Module | Workload,
    cluster: str | Cluster,
    *,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    cp: int = 1,
    ep: int = 1,
    batch: int = 1,
    micro_batch: int = 1,
    seq: int | None = None,
    recompute: str = "none",
    zero: int = 0,
    virtual_stages: int = 1,
    sequence_parallel: bool = False,
    schedule: str = "1f1b",
    dtype: str = "bf16",
    mode: str = "train",
    attention: str | None = None,
    example_inputs: Mapping[str, Any] | None = None,
) -> Prediction:
    """Predict one run of `model` (on meta, or a `Workload` counted before) on a cluster.

    batch: sequences of one step over all GPUs; micro_batch: of one pass of one data-parallel rank; seq:
    tokens of each (in `generate`: of context). ep: over so many of the dp ranks the experts are shared out.
    attention: `fused` or `unfused` instead of what the cluster's software does. GPUs beyond those of the
    cluster count as more nodes of it. It does not refuse what does not fit: see `Prediction.fits`. Raises
    SearchError where the numbers do not go together.
    """
    machine = load(cluster)
    if attention is not None:
        if attention not in ("fused", "unfused"):
            raise SearchError(
                f"attention={attention!r}: fused, unfused, or None for what {machine.name}'s software does."
            )
        machine = replace(machine, software=replace(machine.software, fused_attention=attention == "fused"))
    dtype = dtype_named(dtype)
    workload = model if isinstance(model, Workload) else count(model, seq, example_inputs)
    if mode == "generate" and not isinstance(model, Workload):
        workload = with_states(workload, model)
    if seq is not None and workload.seq != seq:
        raise SearchError(
            f"seq={seq}, but the workload was counted at {workload.seq} tokens. Count it again."
        )
    config = Config(
        tp,
        pp,
        dp,
        cp,
        batch,
        micro_batch,
        recompute,
        zero,
        virtual_stages,
        sequence_parallel,
        "interleaved" if virtual_stages > 1 and schedule == "1f1b" else schedule,
        dtype,
        ep,
    )
    if mode == "generate":
        check_serving(config, workload)
        step, prefill, sequences, mem, kinds, parts = generation(workload, machine, config)
        return Prediction(
            config,
            step,
            mem,
            parts,
            kinds,
            memory.usable(machine),
            prefill,
            batch / step,
            sequences,
            None,
            (),
        )
    if mode != "train":
        raise SearchError(f"mode={mode!r}: train or generate.")
    check(config, workload, machine)
    return train(workload, machine, config)


def check(config: Config, workload: Workload, cluster: Cluster) -> None:
    """Raise SearchError where a training configuration makes no sense."""
    c = config
    _check_numbers(c)
    if c.recompute not in RECOMPUTE:
        raise SearchError(f"recompute={c.recompute!r}: choose one of {', '.join(RECOMPUTE)}.")
    if c.schedule not in SCHEDULES:
        raise SearchError(f"schedule={c.schedule!r}: choose one of {', '.join(SCHEDULES)}.")
    if c.zero not in (0, 1, 2, 3):
        raise SearchError(f"zero={c.zero}: 0, 1, 2 or 3.")
    if c.batch % (c.dp * c.micro_batch):
        raise SearchError(
            f"batch={c.batch} is no multiple of dp * micro_batch = {c.dp} * {c.micro_batch}. Change one."
        )
    if c.virtual_stages > 1 and c.schedule != "interleaved":
        raise SearchError(
            f"virtual_stages={c.virtual_stages} with schedule={c.schedule!r}: only 1F1B is interleaved. "
            "Leave virtual_stages at 1, or the schedule at 1f1b."
        )
    if workload.seq % c.cp:
        raise SearchError(f"cp={c.cp}: {workload.seq} tokens are no multiple of it. Change one.")
    if c.pp * c.virtual_stages > max(1, workload.layers):
        raise SearchError(
            f"pp={c.pp} with {c.virtual_stages} virtual stages: there are {workload.layers} layers to share."
        )
    if c.ep > 1 and (workload.experts % c.ep or c.dp % c.ep):
        raise SearchError(
            f"ep={c.ep}: it shares {workload.experts} experts over dp={c.dp} ranks, and must divide both."
            if workload.experts > 1
            else f"ep={c.ep}: {workload.name} has no experts. Leave ep at 1."
        )


def check_serving(config: Config, workload: Workload) -> None:
    """Raise SearchError where a configuration to generate with makes no sense."""
    c = config
    _check_numbers(c)
    for name in ("cp", "ep"):
        if getattr(c, name) > 1:
            raise SearchError(f"{name}={getattr(c, name)}: is predicted for training only. Use tp to serve.")
    if c.pp > max(1, workload.layers):
        raise SearchError(f"pp={c.pp}: there are {workload.layers} layers to share.")


def _check_numbers(c: Config) -> None:
    for name in ("tp", "pp", "dp", "cp", "ep", "batch", "micro_batch", "virtual_stages"):
        value = getattr(c, name)
        if not isinstance(value, Integral) or value < 1:
            raise SearchError(f"{name}={value!r}: must be a whole number, at least 1.")


def cut(workload: Workload, stages: int, costs: Sequence[float]) -> list[list[int]]:
    """The units of each stage, in order: as many layers each where they divide, else so that the dearest is
    cheapest. The embedding goes with the first layer, the head with the last, what is between layers with
    those before it."""
    groups: list[list[int]] = []
    for i in workload.order:
        if workload.units[i].layer and (groups and any(workload.units[j].layer for j in groups[-1])):
            groups.append([i])
        elif groups:
            groups[-1].append(i)
        else:
            groups = [[i]]
    if len(groups) % stages == 0:
        sizes = [len(groups) // stages] * stages
    else:
        sizes = balanced([sum(costs[i] for i in group) for group in groups], stages)
    found, at = [], 0
    for size in sizes:
        found.append([i for group in groups[at : at + size] for i in group])
        at += size
    return found


def train(workload: Workload, cluster: Cluster, c: Config, simulated: bool = True) -> Prediction:
    """A training step. simulated: the pipeline's schedule is run, where that takes no more than MOST_STEPS
    actions.
    """
    one = np.ones(1)
    s = Setting(
        one * c.tp,
        one * c.micro_batch,
        one * c.sequence_parallel,
        one * c.cp,
        c.dtype,
        cluster.software.fused_attention,
        c.ep,
    )
    selective = c.recompute == "selective" and not s.fused
    passes = [unit_passes(cluster, unit, s) for unit in workload.units]
    ring = [float(ring_time(cluster, [unit], s)[0]) for unit in workload.units]
    compute_f, compute_b, sent_f, sent_b = ([] for _ in range(4))
    for unit, p, r in zip(workload.units, passes, ring, strict=True):
        f, b, fs, bs = (float(x[0]) for x in (p.forward, p.backward, p.forward_sent, p.backward_sent))
        if unit.layer and c.recompute == "full":
            b, bs = b + f, bs + fs
        elif unit.layer and selective:
            b += float(p.again[0])
        compute_f.append(f)
        compute_b.append(b)
        sent_f.append(fs + r)
        sent_b.append(bs + 2 * r)
    loss_f, loss_b = (float(x[0]) for x in loss_time(cluster, workload, s))
    compute_f[workload.order[-1]] += loss_f
    compute_b[workload.order[-1]] += loss_b
    costs = [sum(x) for x in zip(compute_f, compute_b, sent_f, sent_b, strict=True)]
    stages = cut(workload, c.pp * c.virtual_stages, costs)
    forward = [sum(compute_f[i] + sent_f[i] for i in stage) for stage in stages]
    backward = [sum(compute_b[i] + sent_b[i] for i in stage) for stage in stages]
    hop = float(send(cluster, c.tp * c.dp * c.cp, _crossing(workload, s, c))) if c.pp > 1 else 0.0
    pipeline, timeline = _pipeline(forward, backward, hop, c, simulated)
    rank_work = [sum(forward[k] + backward[k] for k in range(r, len(stages), c.pp)) for r in range(c.pp)]
    slowest = int(np.argmax(rank_work))
    held = [[i for k in range(r, len(stages), c.pp) for i in stages[k]] for r in range(c.pp)]
    params = memory.stage_params(workload, held, s.tp, one * c.ep)[0]
    experts = memory.stage_experts(workload, held, s.tp, c.ep)[0]
    data, optimizer = (
        float(x)
        for x in data_parallel(
            cluster,
            c.tp,
            c.dp * c.cp,
            c.zero,
            params.max(),
            min(sum(backward[r :: c.pp]) for r in range(c.pp)),
            max(rank_work),
            c.microbatches,
            c.dtype,
            experts[params.argmax()],
            c.ep,
        )
    )
    step = pipeline + data + optimizer + cluster.software.step_ms * 1e-3
    computing = c.microbatches * sum(compute_f[i] + compute_b[i] for i in held[slowest])
    sending = c.microbatches * sum(sent_f[i] + sent_b[i] for i in held[slowest])
    breakdown = {
        "compute": computing,
        "tensor-parallel communication": sending,
        "pipeline bubble and sends": max(0.0, pipeline - computing - sending),
        "data-parallel communication": data,
        "optimizer": optimizer,
        "fixed per step": cluster.software.step_ms * 1e-3,
    }
    kinds = memory.by_stage(workload, cluster, c, held, s)
    mem = tuple(float(sum(kind.values())) for kind in kinds)
    fullest = kinds[int(np.argmax(mem))]
    tokens = c.batch * workload.seq / step
    layers = tuple(sum(workload.units[i].layer for i in stage) for stage in held)
    return Prediction(
        c,
        step,
        mem,
        breakdown,
        fullest,
        memory.usable(cluster),
        None,
        tokens,
        0,
        timeline,
        layers,
        tuple(kinds),
    )


def _crossing(workload: Workload, s: Setting, c: Config) -> float:
    """Bytes from one stage to the next for one micro-batch, of one rank."""
    largest = max((u.output for u in workload.units if u.layer), default=0.0)
    return largest * s.width * c.micro_batch / c.cp / (c.tp if c.sequence_parallel else 1)


def _pipeline(
    forward: list[float], backward: list[float], hop: float, c: Config, simulated: bool
) -> tuple[float, Timeline | None]:
    """Seconds of all micro-batches, and the beginning as a timeline: in its middle a schedule repeats itself,
    and that part is multiplied. Not simulated: the slowest rank's work, and once through the others."""
    work = [sum(forward[k] + backward[k] for k in range(r, len(forward), c.pp)) for r in range(c.pp)]
    if c.pp == 1:
        few = min(c.microbatches, 2)
        timeline = simulate("1f1b", forward, backward, few, ranks=1) if simulated else None
        return c.microbatches * work[0], timeline
    # A send holds its rank up, too: frameworks of 2021-24 do not run on while they send.
    sends = 2 * hop * c.virtual_stages
    few = c.microbatches if c.schedule == "gpipe" else min(c.microbatches, 2 * c.pp)
    steps = 2 * few * len(forward)
    if c.schedule == "zero-bubble" or (simulated and steps <= MOST_STEPS):
        timeline = simulate(
            c.schedule, [t + hop for t in forward], [t + hop for t in backward], few, ranks=c.pp
        )
        return timeline.length + (c.microbatches - few) * (max(work) + sends), timeline
    through = (sum(work) - max(work) + sends * (c.pp - 1)) / c.virtual_stages
    return c.microbatches * (max(work) + sends) + through, None
