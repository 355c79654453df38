"""Training checkpoints by `torch.distributed.checkpoint`: saved over so many ranks, resumed over others.

Each rank writes the blocks of whole tensors that it holds; each rank reads the blocks that it needs. Model
and optimizer go under the parameters' own names, so nothing in a checkpoint depends on how the model was
split. A checkpoint is written beside its place and moved there when all ranks are done: what a crash leaves
behind is never taken for one.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from .comm import Comm, ProcessComm
from .errors import CheckpointError, PlanError
from .gradients import plain
from .layouts import DimLayout, ParamLayout, pieces
from .save import everyone, meet, split_of
from .state import Held, part_of_copies

SETTINGS = "training.json"
PATIENCE = 60.0  # seconds a rank waits for the others to come to a save or a load


def save_training(
    directory: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    wait: bool = True,
) -> Future[None]:
    """Write model and optimizer, to be resumed by `load_training` over any number of ranks.

    directory: replaced as a whole when all of it is written; until then what was there stays. extra: what
    else to keep (step, epoch, a scheduler's state), as JSON. wait: False copies the tensors to the CPU and
    writes on a thread, while training goes on; the future tells when it is done, and what went wrong. One
    save at a time.

    Every rank must call it. Raises RankError when another rank does not, CheckpointError for `extra` that
    JSON can't hold, for parameters in the optimizer that the model lacks, and when writing fails.
    """
    _over_processes(model)
    meet(everyone(model), "autotp.save_training", PATIENCE)
    target = Path(directory).absolute()
    entries = {**_model_entries(model), **_optimizer_entries(model, optimizer)}
    entries = {name: entry.to_write(copy=not wait) for name, entry in entries.items()}
    settings = {"extra": dict(extra or {}), **_optimizer_settings(model, optimizer)}
    try:
        text = json.dumps(settings)
    except TypeError as error:
        raise CheckpointError(
            f"extra and the optimizer's settings must be numbers and texts: {error}"
        ) from error
    if wait:
        _write(target, entries, text, None)
        done: Future[None] = Future()
        done.set_result(None)
        return done
    # Its own group: training's collectives go on over the other one, in an order of their own.
    group = dist.new_group(backend="gloo") if dist.is_initialized() else None
    pool = ThreadPoolExecutor(1, thread_name_prefix="autotp-save")
    future = pool.submit(_write, target, entries, text, group)
    pool.shutdown(wait=False)
    return future


def load_training(
    directory: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """Put a checkpoint of `save_training` into `model` and `optimizer`, split as they are now; gives `extra`.

    Every rank must call it. torch's own format has a pickle in it (.metadata): load only checkpoints you
    trust. Raises CheckpointError where there is no complete checkpoint, or where it lacks what the model or
    the optimizer needs.
    """
    _over_processes(model)
    source = _complete(Path(directory).absolute())
    settings = json.loads((source / SETTINGS).read_text())
    reader = dcp.FileSystemReader(source)
    stored = reader.read_metadata().state_dict_metadata
    wanted = _model_entries(model)
    missing = sorted(set(wanted) - set(stored))
    if missing:
        raise CheckpointError(f"{source} lacks {len(missing)} tensors of the model: {', '.join(missing[:8])}")
    shapes = [
        f"{n} is {list(stored[n].size)}, the model's {list(wanted[n].shape)}"  # type: ignore[union-attr]
        for n in wanted
        if tuple(stored[n].size) != tuple(wanted[n].shape)  # type: ignore[union-attr]
    ]
    if shapes:
        raise CheckpointError(f"{source} is of another model: {'; '.join(shapes[:5])}")
    if optimizer is not None:
        if settings["groups"] is None:
            raise CheckpointError(f"{source} was saved without an optimizer.")
        _prepare_optimizer(model, optimizer, stored, settings)
        wanted |= _optimizer_entries(model, optimizer)
    with torch.no_grad():
        dcp.load(dict(wanted), storage_reader=reader, planner=_Reader(), no_dist=not dist.is_initialized())
        for entry in wanted.values():
            entry.finish()
    extra: dict[str, Any] = settings["extra"]
    return extra


def _over_processes(model: nn.Module) -> None:
    comm, _ = split_of(model)
    if getattr(getattr(model, "autotp", None), "pipeline", None) is not None:
        raise PlanError("pipeline stages have no training checkpoints yet; autotp.save keeps the weights.")
    if comm.size > 1 and not isinstance(comm, ProcessComm):
        what = "training checkpoints are written by processes of torch.distributed, not by simulated ranks."
        raise PlanError(what)


def _write(
    target: Path, entries: Mapping[str, Entry], settings: str, group: dist.ProcessGroup | None
) -> None:
    """Write beside `target`, then put it there. A checkpoint that is replaced stays until the new one is
    whole."""
    alone = not dist.is_initialized()
    leader = alone or dist.get_rank() == 0
    part, old = (target.with_name(f".{target.name}.{what}") for what in ("part", "old"))
    if leader:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True, exist_ok=True)  # torch's writer on another rank may have made it by now
    try:
        # No rank writes before the leader, who is past the lines above, has made the plan for all.
        files = dcp.FileSystemWriter(part)
        dcp.save(
            dict(entries),
            storage_writer=files,
            planner=_Writer(False, False),
            process_group=group,
            no_dist=alone,
        )
    except dcp.CheckpointException as error:
        raise CheckpointError(f"{target} could not be written: {error}") from error
    failed: str | None = None
    if leader:
        try:
            (part / SETTINGS).write_text(settings)
            if target.exists():
                shutil.rmtree(old, ignore_errors=True)
                os.rename(target, old)
            os.rename(part, target)
            shutil.rmtree(old, ignore_errors=True)
        except OSError as error:
            failed = str(error)
    told = [failed]
    if not alone:
        dist.broadcast_object_list(told, src=0, group=group)
    if told[0] is not None:
        raise CheckpointError(f"{target} could not be written: {told[0]}")


def _complete(directory: Path) -> Path:
    """Where the checkpoint is: in its place, or beside it, where a crash came between two renames."""
    for place in (directory, directory.with_name(f".{directory.name}.old")):
        if (place / SETTINGS).is_file() and (place / ".metadata").is_file():
            return place
    raise CheckpointError(f"{directory} holds no complete checkpoint of autotp.save_training.")


# ---------------------------------------------------------------- one tensor, as blocks of the whole
Block = tuple[tuple[int, ...], Tensor]  # where in the whole it begins, its values


@dataclass(frozen=True)
class Entry:
    """This rank's part of a tensor, for torch.distributed.checkpoint: which blocks of the whole it writes,
    or reads."""

    local: Tensor
    held: Held | None
    comm: Comm
    writing: bool = False
    rows: tuple[int, int] | None = None  # where copies share out what tp left: this one's first row, of all

    @classmethod
    def of(cls, tensor: Tensor, held: Held | None, comm: Comm) -> Entry:
        local, start = part_of_copies(tensor)
        cut = (start, tensor.shape[0]) if local is not tensor else None
        return cls(local.detach(), held, comm, rows=cut)

    @property
    def layout(self) -> ParamLayout | None:
        return None if self.held is None else self.held.layout

    @property
    def shape(self) -> tuple[int, ...]:
        if self.layout is not None:
            return tuple(self.layout.shape)
        return tuple(self.local.shape if self.rows is None else (self.rows[1], *self.local.shape[1:]))

    @property
    def elsewhere(self) -> bool:
        """Whether only rank 0, and not this one, has the values: they are added up over the ranks."""
        return self.comm.rank > 0 and self.held is not None and self.held.once

    def to_write(self, copy: bool) -> Entry:
        """The same, to be written; with a copy of the values on the CPU where training goes on meanwhile."""
        local = self.local.detach()
        return Entry(local.to("cpu", copy=True) if copy else local, self.held, self.comm, True, self.rows)

    def finish(self) -> None:
        """After reading."""
        if self.elsewhere:
            self.local.zero_()

    def blocks(self) -> list[Block]:
        """What this rank reads; or writes: of rows that several ranks hold, the first of them."""
        ranges = [[(0, 0, n)] for n in self.shape]
        if self.layout is not None:
            for d, ranks in self.layout.dims.items():
                if self.writing and len(self.layout.dims) == 1:
                    first = [piece for piece in pieces(ranks) if piece[0] == self.comm.rank]
                    ranges[d] = [(at, start, start + length) for _, at, start, length in first]
                else:
                    ranges[d] = list(_placed(ranks[self.comm.rank]))
        if self.rows is not None:
            ranges[0] = list(_within(ranges[0], self.rows[0], self.local.shape[0]))
        found = []
        for choice in itertools.product(*ranges):
            view = self.local
            for d, (at, start, stop) in enumerate(choice):
                view = view.narrow(d, at, stop - start)
            found.append((tuple(start for _, start, _ in choice), view))
        return found

    def chunks(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(start), block.shape) for start, block in self.blocks()]

    def block(self, index: MetadataIndex) -> Tensor:
        """The values of one of the blocks."""
        blocks, start = self.blocks(), tuple(index.offset or ())
        if index.index is not None and index.index < len(blocks) and blocks[index.index][0] == start:
            return blocks[index.index][1]  # of rows held twice, the one that is meant
        return next(block for at, block in blocks if at == start)


class _Writer(DefaultSavePlanner):
    """Writes entries block by block. Blocks that several ranks propose are written by one of them."""

    def create_local_plan(self) -> SavePlan:
        items = []
        for name, entry in self.state_dict.items():
            properties = TensorProperties.create_from_tensor(entry.local)
            for chunk in () if entry.elsewhere else entry.chunks():
                data = TensorWriteData(chunk, properties, torch.Size(entry.shape))
                items.append(
                    WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)
                )
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        entry: Entry = self.state_dict[index.fqn]
        return entry.block(index)


class _Reader(DefaultLoadPlanner):
    """Reads what entries need, from whichever blocks there are."""
    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def create_local_plan(self) -> LoadPlan:
        items: list[Any] = []
        for name, entry in self.state_dict.items():
            stored: Any = self.metadata.state_dict_metadata[name]  # type: ignore[union-attr]
            items += create_read_items_for_chunk_list(name, stored, entry.chunks())
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        entry: Entry = self.state_dict[index.fqn]
        return entry.block(index)


def _placed(ranges: DimLayout) -> Iterator[tuple[int, int, int]]:
    """(where on the rank, start, stop) of each range."""
    at = 0
    for start, stop in ranges:
        yield at, start, stop
        at += stop - start


def _within(placed: Any, first: int, count: int) -> Iterator[tuple[int, int, int]]:
    """What of `placed` ranges lies in the rows `first`, ... of the rank, placed from there."""
    for at, start, stop in placed:
        low, high = max(at, first), min(at + stop - start, first + count)
        if low < high:
            yield low - first, start + low - at, start + high - at


# ---------------------------------------------------------------- the model's and the optimizer's tensors
def _model_entries(model: nn.Module) -> dict[str, Entry]:
    comm, held = split_of(model)
    names = {id(t): n for n, t in reversed(model.state_dict(keep_vars=True).items()) if isinstance(t, Tensor)}
    tensors = {id(t): t for t in model.state_dict(keep_vars=True).values() if isinstance(t, Tensor)}
    return {f"model.{names[key]}": Entry.of(t, held.get(key), comm) for key, t in tensors.items()}


def _optimizer_entries(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Entry]:
    """The optimizer's tensors: those shaped like their parameter are split like it."""
    comm, held = split_of(model)
    entries = {}
    for name, param in _trained(model, optimizer).items():
        for key, value in (optimizer.state.get(param, {}) if optimizer else {}).items():
            if isinstance(value, Tensor):
                how = held.get(id(param)) if value.shape == param.shape else None
                entries[f"optimizer.{name}.{key}"] = Entry.of(plain(value), how, comm)
    return entries


def _trained(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """The optimizer's parameters by the model's names for them."""
    names = {id(p): n for n, p in model.named_parameters()}
    trained = {}
    for group in optimizer.param_groups if optimizer is not None else ():
        for param in group["params"]:
            if id(param) not in names:
                raise CheckpointError(
                    f"the optimizer has a parameter of shape {list(param.shape)} that is none of the model's."
                    " Make it after the model is parallelized or loaded, from model.parameters()."
                )
            trained[names[id(param)]] = param
    return trained


def _optimizer_settings(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """Its groups, with parameters by name, and what of its state is no tensor."""
    if optimizer is None:
        return {"groups": None, "state": {}}
    trained = _trained(model, optimizer)
    names = {id(p): n for n, p in trained.items()}
    groups = []
    for group in optimizer.param_groups:
        kept = {k: v.item() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}
        groups.append({**kept, "params": [names[id(p)] for p in group["params"]]})
    state = {
        name: {k: v for k, v in optimizer.state.get(p, {}).items() if not isinstance(v, Tensor)}
        for name, p in trained.items()
    }
    return {"groups": groups, "state": {name: values for name, values in state.items() if values}}


def _prepare_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, stored: Mapping[str, Any], settings: Mapping[str, Any]
) -> None:
    """Give the optimizer the settings of the checkpoint, and empty state to read into."""
    trained = _trained(model, optimizer)
    names = {id(p): n for n, p in trained.items()}
    now = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    if [sorted(group) for group in now] != [sorted(group["params"]) for group in settings["groups"]]:
        raise CheckpointError("the optimizer's groups hold other parameters than those of the checkpoint.")
    for group, saved in zip(optimizer.param_groups, settings["groups"], strict=True):
        for key, value in saved.items():
            if key == "params":
                continue
            if isinstance(group.get(key), Tensor):
                group[key].fill_(value)
            else:
                group[key] = tuple(value) if isinstance(value, list) else value
        for param in group["params"]:
            name = names[id(param)]
            _, held = split_of(model)
            layout = held[id(param)].layout if id(param) in held else None
            whole = tuple(param.shape if layout is None else layout.shape)
            state: dict[str, Any] = dict(settings["state"].get(name, {}))
            for entry, known in stored.items():
                key = entry.removeprefix(f"optimizer.{name}.")
                if key == entry or "." in key or not isinstance(known, TensorStorageMetadata):
                    continue
                if tuple(known.size) == whole:
                    state[key] = torch.zeros_like(param, dtype=known.properties.dtype).detach()
                else:  # a count of steps: on the CPU, unless the optimizer runs on the GPU as a whole
                    on_device = group.get("capturable") or group.get("fused")
                    where = param.device if on_device else torch.device("cpu")
                    state[key] = torch.zeros(known.size, dtype=known.properties.dtype, device=where)
            optimizer.state[param] = state
