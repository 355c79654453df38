"""Data parallelism as users meet it: which data is whose, and gradients that gather before they are averaged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from .errors import PlanError
from .mesh import Mesh
from .replicas import Replica
from .state import ShardState
from .zero import Sharded


def data_rank(model: nn.Module) -> tuple[int, int]:
    """(part, parts): which part of the data this rank loads, of how many.

    For a DistributedSampler: `rank, num_replicas`. Ranks that work on one batch together (tensor-parallel
    peers, stages) get the same part.

        part, parts = autotp.data_rank(model)
        loader = DataLoader(data, sampler=DistributedSampler(data, parts, part), batch_size=8)
    """
    mesh = mesh_of(model)
    return mesh.dp.rank, mesh.dp.size


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backwards in here add to `.grad` without a word to the other copies; the next one outside averages all.

        with autotp.no_sync(model):
            for batch in batches[:-1]:
                model(**batch).loss.backward()
        model(**batches[-1]).loss.backward()

    Under zero=2 and 3, whose point is that no rank has whole gradients, the exchange happens at every
    backward in here too; the sums are the same. With dp=1 there is nothing to put off.
    """
    state: ShardState | None = getattr(model, "autotp", None)
    if state is None or state.copies is None:
        yield
        return
    with state.copies.paused():
        yield


def mesh_of(model: nn.Module) -> Mesh:
    """The ranks of a parallelized model; PlanError for any other."""
    state: Any = getattr(model, "autotp", None)
    if state is None or state.mesh is None:
        raise PlanError(f"this {type(model).__name__} is not parallelized: call autotp.parallelize first, "
                        "and give the object that it returns.")
    mesh: Mesh = state.mesh
    return mesh


def keep_copies_alike(model: nn.Module, mesh: Mesh, zero: int, blocks: Sequence[str]) -> None:
    """Make `model` one of `mesh.dp`'s copies: whole ones whose gradients are averaged, or (zero > 0) ones
    that share out what they hold, `blocks` (paths of modules) at a time."""
    state: ShardState = model.autotp  # type: ignore[assignment]
    if zero == 0:
        replica = Replica(mesh.dp)
        state.copies = replica
        replica.install(model)
    else:
        sharded = Sharded(zero, mesh)
        sharded.install(model, state, blocks)
        state.copies = sharded
