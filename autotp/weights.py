"""`load`: from a checkpoint straight to each rank's shards. No rank reads or holds more than it keeps."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .ahead import fetched_ahead
from .api import mesh_over, split_model
from .checkpoint import locate, open_checkpoint
from .comm import Comm, ProcessComm
from .data_parallel import keep_copies_alike
from .errors import AutotpError, CheckpointError, PlanError
from .lazy import fill, read, sources
from .mesh import Mesh
from .pipeline.absent import Absent
from .plan import Plan
from .presharded import find_shards
from .pretrained import (
    adopt_generation_config,
    build_unloaded,
    initialise_rest,
    put_packed,
    recipes,
    tie,
    untied,
)
from .quantised import components, is_packed, put_in, rebuilt
from .same import agree
from .tensorfiles import FileTensor, Region, populated, whole_region


def load(
    path: str | Path,
    tp: int | None = None,
    pp: int = 1,
    dp: int = 1,
    ep: int = 1,
    *,
    stages: Sequence[str] | int | None = None,
    zero: int = 0,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    policy: Any = None,
    strict: bool = False,
    example_inputs: Any = None,
    comm: Comm | Mesh | None = None,
    allow_pickle: bool = False,
    allow_missing: bool = False,
    allow_unexpected: bool = False,
    progress: bool | None = None,
    **overrides: Any,
) -> nn.Module:
    """A transformers model from its checkpoint, parallelized, each rank reading only the slices that it
    keeps, of its own stages.

    path: a directory in Hugging Face's layout, or a hub id. tp, pp, dp, ep, stages, zero, policy, strict,
    example_inputs, comm: as for `parallelize`. dtype: of the parameters; None: the config's, else the
    checkpoint's. device: None for this process's GPU where the ranks talk over NCCL, else the CPU.
    allow_pickle: read .bin files where there are no others, with torch's weights_only, and by the slice too
    (whole those of before torch 1.6). allow_missing: initialise what the checkpoint lacks (rank 0's values).
    allow_unexpected: leave out what the model has no place for. progress: a bar on rank 0 (None: when stderr
    is a terminal). overrides: entries that the config has (`attn_implementation="sdpa"`).

    Checkpoints that transformers converts on load (fused or split experts, other names) are converted first,
    cut after.

    Every rank must call it. Raises CheckpointError, with names, before anything is allocated: entries that
    are missing, unexpected, of another shape, truncated or damaged files, quantised weights, pickles that
    were not asked for. Raises ModelSourceError for the config, and what `parallelize` raises."""
    mesh = mesh_over(comm, tp, pp, dp)
    ranks = mesh.tp
    where = stated_device(device) if device is not None else default_device(mesh.world)
    with together(mesh.world):
        root = _fetched(path, mesh.world, allow_pickle)
        shards = find_shards(root)
        mine = None if shards is None else shards.of_rank(ranks.rank, ranks.size)
        checkpoint = open_checkpoint(root, allow_pickle) if shards is None else shards.checkpoint
        floating = next((t.dtype for t in checkpoint.tensors.values() if t.is_floating_point()), None)
        model = build_unloaded(root, dtype, floating, **overrides)
        found = recipes(model, checkpoint, allow_missing=allow_missing, allow_unexpected=allow_unexpected)
    with together(mesh.world):
        apart = shards.apart if shards is not None else untied(model, found) if ranks.rank == 0 else []
    put_packed(model, found)
    tie(model, found, ranks.exchange(apart)[0])
    initialise_rest(model, found, where)
    with fetched_ahead(files_of(found if mine is None else mine), mesh.world.rank, mesh.world.size):
        blocks = split_model(
            model,
            mesh,
            ep,
            stages=stages,
            zero=zero,
            policy=policy,
            strict=strict,
            example_inputs=example_inputs,
        )
    with together(mesh.world):
        if shards is not None:
            shards.check(made_plan(model))
        fill_shards(
            model, found if mine is None else mine, where, _bar(progress, mesh.world), cut=mine is not None
        )
        adopt_generation_config(model, root)
    if mesh.dp.size > 1:
        keep_copies_alike(model, mesh, zero, blocks)
    return model


def _fetched(path: str | Path, comm: Comm, allow_pickle: bool) -> Path:
    """`locate`, rank 0 first: it fetches, the others find what it fetched."""
    if Path(path).exists() or comm.size == 1:
        return locate(path, allow_pickle)
    first: Path | BaseException | None = None
    if comm.rank == 0:
        try:
            first = locate(path, allow_pickle)
        except AutotpError as error:
            first = error
    told = comm.exchange(first)[0]
    if isinstance(told, BaseException):
        raise told
    return locate(path, allow_pickle)


@contextmanager
def together(comm: Comm) -> Iterator[None]:
    """What every rank must get through: where one fails, all raise, the failed ones their own error."""
    failed: Exception | None = None
    try:
        yield
    except (AutotpError, OSError) as error:
        failed = error
    if comm.size == 1:
        if failed is not None:
            raise failed
        return
    try:
        agree(comm, failed if failed is not None else "")
    except AutotpError as error:
        raise (failed or error) from None


def stated_device(device: torch.device | str) -> torch.device:
    """The device that a user named. Raises PlanError where this process has none such."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise PlanError(
            f"device={device!r}: this process can't use it ({str(error).splitlines()[0]}). Leave it out for "
            "the GPU of this process where the ranks talk over NCCL, else the CPU."
        ) from None
    return torch.device(device)


def default_device(comm: Comm) -> torch.device:
    """This process's GPU where the ranks talk over NCCL (or there is one rank, and a GPU), else the CPU."""
    if torch.cuda.is_available():
        alone = comm.size == 1 and not dist.is_initialized()
        nccl = isinstance(comm, ProcessComm) and "nccl" in str(dist.get_backend_config(comm.group))
        if alone or nccl:
            return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def made_plan(model: nn.Module) -> Plan:
    """The plan that a parallelized model was cut by."""
    plan: Plan = model.autotp.plan  # type: ignore[union-attr, assignment]
    return plan


Progress = Callable[[int, int], None]  # bytes done now, bytes in all


def fill_shards(
    model: nn.Module, found: Mapping[str, Tensor], device: torch.device, told: Progress, cut: bool
) -> None:
    """Replace every meta tensor of a parallelized model by this rank's part of what `found` has for one of
    its names.

    cut: what `found` has are the rank's parts already. Raises CheckpointError when a tensor has no recipe.
    """
    state: Any = getattr(model, "autotp", None)
    held = {} if state is None else state.held
    rank = 0 if state is None else state.comm.rank
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        if tensor.device.type == "meta" and not isinstance(tensor, Absent):
            names.setdefault(id(tensor), []).append(name)
            tensors[id(tensor)] = tensor
    lost = [mine[0] for mine in names.values() if not any(n in found for n in mine)]
    if lost:
        raise CheckpointError(
            f"nothing was found to fill {', '.join(sorted(lost)[:8])}: this is a fault of autotp."
        )
    packed = {id(p): p for p in model.parameters() if is_packed(p) and not isinstance(p, Absent)}
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    total += sum(c.numel() * c.element_size() for p in packed.values() for c in components(p).values())
    real: dict[int, Tensor] = {}
    for key, tensor in tensors.items():
        how = next((held[n] for n in names[key] if n in held), None)
        source = next(found[n] for n in names[key] if n in found)
        values = populated(torch.empty(tensor.shape, dtype=tensor.dtype, device=device))
        if how is not None and how.once and rank > 0:
            values.zero_()
        else:
            fill(values, source, _kept(source, how.layout if how is not None and not cut else None, rank))
        real[key] = _like(tensor, values)
        told(values.numel() * values.element_size(), total)
    for param in packed.values():
        for part in components(param).values():
            told(part.numel() * part.element_size(), total)
        put_in(param, rebuilt(param.detach(), lambda part: read(part).to(device)))
    for module in model.modules():
        for own in (module._parameters, module._buffers):
            for name, old in own.items():
                if old is not None and id(old) in real:
                    own[name] = real[id(old)]  # type: ignore[assignment]
    if state is not None:
        state.watch()


def files_of(found: Mapping[str, Tensor]) -> list[Path]:
    """The files that what was `found` is read from."""
    origins = (origin for tensor in found.values() for origin in sources(tensor))
    return sorted({origin.path for origin in origins if isinstance(origin, FileTensor)})


def _kept(source: Tensor, layout: Any, rank: int) -> Region:
    region = whole_region(source.shape)
    if layout is None:
        return region
    return tuple(layout.dims[d][rank] if d in layout.dims else ranges for d, ranges in enumerate(region))


def _like(old: Tensor, values: Tensor) -> Tensor:
    if not isinstance(old, nn.Parameter):
        return values
    new = nn.Parameter(values, old.requires_grad and (values.is_floating_point() or values.is_complex()))
    vars(new).update(vars(old))
    return new


def _bar(asked: bool | None, comm: Comm) -> Progress:
    if comm.rank > 0 or not (asked if asked is not None else sys.stderr.isatty()):
        return lambda now, total: None
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    console = Console(stderr=True)
    bar = Progress(
        TextColumn("loading"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), console=console
    )
    task = bar.add_task("loading", total=None)

    def told(now: int, total: int) -> None:
        bar.start()
        bar.update(task, total=total)
        bar.advance(task, now)
        if bar.finished:
            bar.stop()

    return told
