"""Which ranks do what: the world as a mesh of dims dp, pp and tp, tp innermost.

Tensor-parallel peers talk most and so are consecutive ranks (one machine); stages come next, copies of the
model for other data last: rank = (dp * PP + pp) * TP + tp.
"""
from __future__ import annotations

import math
import os
import warnings
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .comm import Comm, ProcessComm, ShapeComm, ThreadComm
from .errors import LaunchError

DIMS = ("dp", "pp", "tp")


@dataclass(frozen=True)
class Mesh:
    """This rank's peers along each dim: those whose place differs in that dim only.

    tp: the ranks that split tensors. pp: rank p owns stage p. dp: the copies that take other data. world: all
    of them, in rank order, for what everyone must agree on. copy: those of them that make up this copy of the
    model, tp × pp. devices: the same as torch's DeviceMesh, with the dims of more than one rank by name; None
    where there are no processes to speak of.
    """
    tp: Comm
    pp: Comm
    dp: Comm
    world: Comm
    copy: Comm
    devices: DeviceMesh | None = None

    @classmethod
    def of(cls, tp: Comm) -> Mesh:
        """Tensor-parallel ranks alone: whoever `tp` stands for (processes, threads, nobody)."""
        return cls(tp, ShapeComm(0, 1), ShapeComm(0, 1), tp, tp)

    @classmethod
    def split(cls, world: ThreadComm, tp: int = 1, pp: int = 1, dp: int = 1) -> Mesh:
        """The mesh that simulated ranks make, laid out as `attach` lays out processes."""
        places = torch.arange(world.size).reshape(dp, pp, tp)
        comms: list[Comm] = []
        for dim in (2, 1, 0):
            lines = places.movedim(dim, -1).flatten(0, 1).tolist()
            comms.append(world.split(lines) if places.shape[dim] > 1 else ShapeComm(0, 1))
        copy = world if dp == 1 else world.split(places.flatten(1).tolist()) if pp * tp > 1 else comms[0]
        return cls(comms[0], comms[1], comms[2], world, copy)

    @property
    def sizes(self) -> dict[str, int]:
        return {name: getattr(self, name).size for name in DIMS}

    def __str__(self) -> str:
        """This rank's place, for errors: `rank 5 (dp 1, pp 0, tp 1)`."""
        places = [f"{name} {getattr(self, name).rank}" for name in DIMS if getattr(self, name).size > 1]
        return f"rank {self.world.rank}" + (f" ({', '.join(places)})" if places else "")


def attach(tp: int | None = None, pp: int = 1, dp: int = 1) -> Mesh:
    """The mesh this process belongs to: `dp * pp * tp` consecutive ranks of the world (tp=None: all that dp
    and pp leave).

    Uses the running process group, else starts one from torchrun's environment: nccl where there is a GPU for
    each process (it takes the one of its LOCAL_RANK), else gloo. `tp=pp=dp=1` needs neither. In a larger
    world there are several such meshes, which do not talk to each other: a warning says so.

    Raises LaunchError when there is nothing to attach to or the sizes do not fit the world.
    """
    for name, size in (("tp", tp), ("pp", pp), ("dp", dp)):
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            taken = " None takes all." if name == "tp" else ""
            raise LaunchError(f"{name}={size!r}: give a number of processes, at least 1.{taken}")
    if not started():
        if (tp, pp, dp) == (1, 1, 1):
            return Mesh.of(ShapeComm(0, 1))
        need: int | str = "N" if tp is None else dp * pp * tp
        raise LaunchError(f"{_asked(tp, pp, dp)} needs several processes, and this one was started alone."
                          f" Run with: torchrun --nproc-per-node {need} your_script.py; for one "
                          "process, use autotp.plan or autotp.verify.")
    world = dist.get_world_size()
    others = dp * pp
    size = others * tp if tp is not None else max(world // others, 1) * others
    if world % size:
        raise LaunchError(f"{_asked(tp, pp, dp)} does not divide the world size {world}. Start a multiple of "
                          f"{size} processes (torchrun --nproc-per-node N), or choose sizes whose product "
                          f"divides {world}.")
    sizes = {"dp": dp, "pp": pp, "tp": size // others}
    if 1 < size < world and dist.get_rank() == 0:
        warnings.warn(f"{world} processes make {world // size} meshes of {_asked(**sizes)}, which do not "
                      f"talk to each other; dp={dp * world // size} makes them train one model.",
                      stacklevel=3)
    return _mesh(sizes, world)


def started() -> bool:
    """Whether there is a process group: one that runs, or else one that torchrun's environment asks for."""
    if dist.is_initialized():
        return True
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():
        return False
    # On a machine with fewer GPUs than processes the ranks meet on the CPU.
    local = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", 1)))
    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= local
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    return True


def _mesh(sizes: dict[str, int], world: int) -> Mesh:
    """The mesh of `sizes` (by dim, outermost first), this process's copy of it."""
    size = math.prod(sizes.values())
    split = {name: n for name, n in sizes.items() if n > 1}
    if not split:
        return Mesh.of(ShapeComm(0, 1))
    copies = {"mesh": world // size} if size < world else {}
    kind = "cuda" if "nccl" in dist.get_backend_config() else "cpu"
    devices = init_device_mesh(kind, (*copies.values(), *split.values()), mesh_dim_names=(*copies, *split))
    comms = {name: ProcessComm(devices.get_group(name)) if n > 1 else ShapeComm(0, 1)
             for name, n in sizes.items()}
    if size == world:
        whole: Comm = ProcessComm()
    elif len(split) == 1:
        whole = comms[next(iter(split))]
    else:
        whole = _blocks(size, world)
    if sizes["dp"] == 1:
        copy = whole
    elif 1 in (sizes["tp"], sizes["pp"]):
        copy = comms["tp"] if sizes["pp"] == 1 else comms["pp"]
    else:
        copy = _blocks(sizes["pp"] * sizes["tp"], world)
    return Mesh(comms["tp"], comms["pp"], comms["dp"], whole, copy, devices)


def _blocks(size: int, world: int) -> Comm:
    """This process's group where every `size` consecutive ranks are one. Every process makes every group."""
    groups = [dist.new_group(list(range(first, first + size))) for first in range(0, world, size)]
    return ProcessComm(groups[dist.get_rank() // size])


def _asked(tp: int | None, pp: int, dp: int) -> str:
    """What was asked for, as it was written: `tp=2 x pp=4`."""
    sizes = {"tp": tp or "all", **{name: n for name, n in (("pp", pp), ("dp", dp)) if n != 1}}
    return " x ".join(f"{name}={n}" for name, n in sizes.items())
