"""`save`: a sharded model back to the files that `save_pretrained` of the whole model writes, byte for byte.

Tensors are gathered a block of rows at a time and written as they come, so no rank ever holds more than a
block of the others' parts. Conversions that the checkpoint went through on load (`pretrained.py`) are undone
on the way, by transformers' own code on lazy tensors."""

from __future__ import annotations

import functools
import itertools
import json
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .coded import CodedWeight
from .comm import Comm, ProcessComm, ShapeComm
from .errors import AutotpError, CheckpointError, RankError
from .layouts import DimLayout, local_size, take_dim
from .lazy import LazyTensor, lazy, read_in_blocks
from .pipeline.absent import Absent
from .plan import Plan
from .pretrained import Files, saved_entries, saved_names, split_into_files
from .quantised import is_packed
from .same import agree
from .save_quantised import taken_apart, whole_packed
from .state import Held, whole_of_copies
from .tensorfiles import FileWriter, Region, in_file_order, whole_region

PATIENCE = 60.0  # seconds a rank waits for the others to call save too


def save(
    model: nn.Module,
    directory: str | Path,
    *,
    max_shard_size: int | str = "50GB",
    variant: str | None = None,
    save_original_format: bool = True,
    patience: float = PATIENCE,
) -> None:
    """Write what `save_pretrained` of the unsharded model would write: names, dtypes, ties, index, configs,
    bit for bit.

    directory: made on rank 0, which writes everything. max_shard_size (bytes, or "5GB"), variant,
    save_original_format: as for transformers' save_pretrained. A model that is not of transformers gives one
    model.safetensors.

    Every rank must call it: one that waits over `patience` seconds for the others raises RankError. Raises
    CheckpointError where a tensor can't be stored, and RankError where rank 0 could not write."""
    comm, held = split_of(model)
    world = everyone(model)
    meet(world, "autotp.save", patience)
    target = Path(directory)
    failed: Exception | None = None
    copies: Any = getattr(getattr(model, "autotp", None), "copies", None)
    if copies is None or copies.cuts or copies.comm.rank == 0:  # else other copies hold the same
        writes = world.rank == 0
        failed = _write_all(model, target, comm, writes, held, max_shard_size, variant, save_original_format)
    if world.size == 1:
        if failed is not None:
            raise failed
        return
    try:
        agree(world, failed if failed is not None else "saved")
    except AutotpError as error:
        raise (failed or error) from None


def _write_all(
    model: nn.Module,
    target: Path,
    comm: Comm,
    writes: bool,
    held: Mapping[int, Held],
    max_shard_size: int | str,
    variant: str | None,
    save_original_format: bool,
) -> Exception | None:
    """Every file, by the rank that `writes`; what went wrong with one."""
    failed: Exception | None = None
    with torch.no_grad(), as_whole(model):
        if writes:
            failed = _attempt(lambda: _write_configs(model, target, variant))
        entries, metadata = _entries(model, comm, held, save_original_format)
        files = split_into_files(entries, max_shard_size, variant)
        for file, names in files.names.items():
            mine = {n: entries[n] for n in names}
            told = _write_file(target / file, mine, metadata, writes and failed is None)
            failed = failed or told
        if writes and failed is None and len(files.names) > 1:
            failed = _attempt(lambda: _write_index(model, target, files, held, variant))
    return failed


def install_save(model: nn.Module) -> None:
    """Let `model.save_pretrained` of a sharded model write the whole model: `save`, under the name users
    know."""
    original = getattr(type(model), "save_pretrained", None)
    if original is not None:
        model.save_pretrained = types.MethodType(_saving(original), model)  # type: ignore[assignment]


def _saving(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def save_pretrained(
        self: nn.Module,
        save_directory: Any,
        is_main_process: bool = True,
        state_dict: Any = None,
        **kwargs: Any,
    ) -> Any:
        taken = {
            k: kwargs.pop(k) for k in ("max_shard_size", "variant", "save_original_format") if k in kwargs
        }
        if state_dict is not None:  # whole tensors, from `full_state_dict`
            _refuse_parts(self, state_dict)
            return original(self, save_directory, is_main_process, state_dict, **taken, **kwargs)
        asked = [k for k, v in kwargs.items() if v and k in ("push_to_hub", "distributed_checkpoint")]
        if asked or getattr(self, "_hf_peft_config_loaded", False):
            what = asked[0] if asked else "adapters loaded into the model"
            raise CheckpointError(
                f"save_pretrained of a model split over ranks can't do {what}. On every rank: "
                "state = autotp.full_state_dict(model); on one: model.save_pretrained(dir, state_dict=state)."
            )
        return save(self, save_directory, **taken)

    return save_pretrained


def _refuse_parts(model: nn.Module, state: Mapping[str, Any]) -> None:
    _, held = split_of(model)
    for name, tensor in model.state_dict(keep_vars=True).items():
        layout = held[id(tensor)].layout if id(tensor) in held else None
        if is_packed(tensor):
            told = "of quantised weights transformers stores this rank's part: leave state_dict out."
            raise CheckpointError(f"{name}: {told} Call save_pretrained on every rank.")
        if layout is not None and name in state and tuple(state[name].shape) != tuple(layout.shape):
            raise CheckpointError(
                f"state_dict holds only this rank's part of {name}. Leave it out, and call save_pretrained "
                "on every rank; or give autotp.full_state_dict(model)."
            )


def meet(comm: Comm, what: str, patience: float) -> None:
    """Wait until every rank calls this; RankError after `patience` seconds, with the ranks that did not.

    Over processes it goes by the store that started them, so that a rank which went on to other collectives
    is not mixed up with the one that waits."""
    if not isinstance(comm, ProcessComm):
        comm.exchange(what)
        return
    ranks = dist.get_process_group_ranks(comm.group or dist.group.WORLD)
    store = dist.PrefixStore(
        f"autotp/{what}/{ranks[0]}-{ranks[-1]}", dist.distributed_c10d._get_default_store()
    )
    turn = getattr(comm, "_turns", 0)
    store.set(f"{turn}/{comm.rank}", "here")
    for rank in range(comm.size):
        try:
            store.wait([f"{turn}/{rank}"], timedelta(seconds=patience))
        except RuntimeError as error:  # DistStoreError
            absent = [r for r in range(comm.size) if not store.check([f"{turn}/{r}"])]
            store.delete_key(f"{turn}/{comm.rank}")
            raise RankError(
                f"{what}: rank {', '.join(map(str, absent or [rank]))} of {comm.size} did not call it within "
                f"{patience:g} s, rank {comm.rank} did. It gathers the parts of all ranks: call it on every "
                "rank."
            ) from error
    comm._turns = turn + 1  # type: ignore[attr-defined]


# ---------------------------------------------------------------- the parts of all ranks
@dataclass(frozen=True)
class Gathered:
    """A parameter whose values are spread over ranks. `fill` is collective."""

    local: Tensor
    held: Held | None
    comm: Comm
    stages: Comm | None = None  # the ranks of all stages, where some lack the tensor
    stage: int = 0  # the first that holds it

    @property
    def dtype(self) -> torch.dtype:
        return self.local.dtype

    def fill(self, dest: Tensor, region: Region) -> None:
        """Put the part `region` of the whole into `dest`, on every rank; of replicated tensors, on rank 0."""
        if not isinstance(self.local, Absent):
            self._gather(dest, region)
        if self.stages is not None:
            dest.copy_(self.stages.broadcast(dest, self.stage))

    def _gather(self, dest: Tensor, region: Region) -> None:
        layout = None if self.held is None else self.held.layout
        local = whole_of_copies(self.local.detach())
        if layout is None or self.comm.size == 1:
            dest.copy_(_taken(local, region))
            return
        blocks = [_meeting(layout.dims, rank, region) for rank in range(self.comm.size)]
        pieces = [_taken(local, mine) for mine, _ in blocks[self.comm.rank]]
        flat = [
            p.contiguous().view(torch.uint8).flatten() if p.dim() else p.view(1).view(torch.uint8)
            for p in pieces
        ]
        mine = torch.cat(flat) if flat else local.new_empty(0, dtype=torch.uint8)
        width = self.local.element_size()
        counts = [width * sum(_size(there) for _, there in own) for own in blocks]
        parts = self.comm.all_gather(mine, 0, counts).split(counts)
        for part, own in zip(parts, blocks, strict=True):
            sizes = [width * _size(there) for _, there in own]
            for bytes_, (_, there) in zip(part.split(sizes), own, strict=True):
                place = _taken(dest, there)  # views: `there` has one range in each dim
                place.copy_(bytes_.clone().view(self.local.dtype).view(place.shape))


Block = tuple[Region, Region]  # where on the rank, where in the region


def _meeting(dims: Mapping[int, Any], rank: int, region: Region) -> list[Block]:
    """What `rank` holds of `region`, block by block; a whole dim is one block where the region has one
    range."""
    by_dim = []
    for d, wanted in enumerate(region):
        held: DimLayout = dims[d][rank] if d in dims else ((0, max(stop for _, stop in wanted)),)
        by_dim.append(list(_overlaps(held, wanted)))
    return [
        (tuple((h,) for h, _ in choice), tuple((w,) for _, w in choice))
        for choice in itertools.product(*by_dim)
    ]


def _overlaps(held: DimLayout, wanted: DimLayout) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    at = 0
    for start, stop in held:
        to = 0
        for low, high in wanted:
            a, b = max(start, low), min(stop, high)
            if a < b:
                yield (at + a - start, at + b - start), (to + a - low, to + b - low)
            to += high - low
        at += stop - start


def _size(region: Region) -> int:
    size = 1
    for ranges in region:
        size *= local_size(ranges)
    return size


def _taken(tensor: Tensor, region: Region) -> Tensor:
    for dim, ranges in enumerate(region):
        tensor = take_dim(tensor, dim, ranges)
    return tensor


# ---------------------------------------------------------------- what is written
def everyone(model: nn.Module) -> Comm:
    """All ranks that a model is spread over, copies of it and all."""
    state: Any = getattr(model, "autotp", None)
    return ShapeComm(0, 1) if state is None else state.comm if state.mesh is None else state.mesh.world


def split_of(model: nn.Module) -> tuple[Comm, dict[int, Held]]:
    """The ranks, and how each tensor (by id) lies over them."""
    state: Any = getattr(model, "autotp", None)
    if state is None:
        return ShapeComm(0, 1), {}
    if state.copies is not None and state.copies.cuts:
        state.copies.reshard()
    return state.comm, {
        id(module._parameters.get(own, module._buffers.get(own))): held for module, own, held in state.owners
    }


@contextmanager
def as_whole(model: nn.Module) -> Iterator[None]:
    """The model's own config with the whole numbers in place of this rank's, while it is written."""
    plan: Plan | None = getattr(getattr(model, "autotp", None), "plan", None)
    local = []
    for i in plan.ints if plan else ():
        owner, _, name = i.name.rpartition(".")
        if not i.module and owner:
            config = functools.reduce(getattr, owner.split("."), model)
            local.append((config, name, getattr(config, name)))
            setattr(config, name, i.value)
    try:
        yield
    finally:
        for config, name, value in local:
            setattr(config, name, value)


def _entries(
    model: nn.Module, comm: Comm, held: Mapping[int, Held], original_format: bool
) -> tuple[dict[str, LazyTensor], dict[str, str]]:
    """What the files hold, as lazy tensors that gather: the same, in the same order, on every rank; and what
    they say of themselves."""
    state = {n: t for n, t in model.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
    # For what other stages hold: tied as it is, of one element's memory.
    absent = {id(t): t for t in state.values() if isinstance(t, Absent)}
    stand_ins = {key: torch.empty((), dtype=t.dtype).expand(tuple(t.shape)) for key, t in absent.items()}
    whole: dict[str, Tensor] = {}
    for name, tensor in state.items():
        how = held.get(id(tensor), Held(None))
        gathered: Any = functools.partial(Gathered, comm=comm, **_stages(model, name))
        if is_packed(tensor) or how.whole is not None:
            whole[name] = whole_packed(tensor, how, gathered)
        else:
            shape = tensor.shape if how.layout is None else how.layout.shape
            whole[name] = lazy(tuple(shape), tensor.dtype, gathered(tensor, how))
    apart, metadata = taken_apart(model, whole)
    part_of = {n: torch.empty(()).expand(t.shape) for n, t in apart.items() if whole.get(n) is not t}
    local = {n: part_of[n] if n in part_of else stand_ins.get(id(state[n]), state[n]) for n in apart}
    entries = {name: apart[name] for name in saved_names(model, local)}
    return saved_entries(model, entries) if original_format else entries, {**metadata, "format": "pt"}


def _stages(model: nn.Module, name: str) -> dict[str, Any]:
    """The ranks of all stages and the first that holds `name`, where some lack it."""
    split: Any = getattr(model, "autotp", None)
    holders = split.pipeline.holders(name) if split is not None and split.pipeline is not None else []
    if not holders or len(holders) == split.pipeline.size:
        return {}
    return {"stages": split.mesh.pp, "stage": holders[0]}


def _write_file(
    path: Path, entries: Mapping[str, LazyTensor], metadata: Mapping[str, str], writes: bool
) -> Exception | None:
    """Gather and write. What goes wrong on the rank that writes is kept until all ranks are through: they
    gather together."""
    failed: Exception | None = None
    writer: FileWriter | None = None
    shapes = {n: (t.dtype, tuple(t.shape)) for n, t in entries.items()}
    if writes:
        try:
            writer = FileWriter(path, shapes, metadata)
        except (OSError, AutotpError) as error:
            failed = error
    for name in in_file_order({n: dtype for n, (dtype, _) in shapes.items()}):
        for block in read_in_blocks(entries[name], whole_region(entries[name].shape)):
            if writer is not None and failed is None:
                failed = _attempt(functools.partial(writer.write, block))
    if writer is not None:
        failed = failed or _attempt(writer.close)
    return failed


def _write_configs(model: Any, target: Path, variant: str | None) -> None:
    """Config, generation config and whatever else save_pretrained writes beside the weights; old weights
    go."""
    if target.is_file():
        raise CheckpointError(f"{target} is a file; give a directory.")
    target.mkdir(parents=True, exist_ok=True)
    original = getattr(type(model), "save_pretrained", None)
    if original is not None:
        quantizer = vars(model).pop("hf_quantizer", None)  # it would have tensors of its own written
        try:
            original(model, target, state_dict={}, variant=variant)
        finally:
            if quantizer is not None:
                model.hf_quantizer = quantizer


def _write_index(
    model: nn.Module, target: Path, files: Files, held: Mapping[int, Held], variant: str | None
) -> None:
    parameters = 0
    for p in {id(p): p for p in model.parameters()}.values():
        layout = held[id(p)].layout if id(p) in held else None
        whole = held[id(p)].whole if id(p) in held else p
        if isinstance(whole, CodedWeight) and whole.coding.several:
            parameters += sum(part.numel() for part in whole.parts.values())
        else:
            parameters += torch.Size(p.shape if layout is None else layout.shape).numel()
    index = {
        "metadata": {"total_parameters": parameters, "total_size": files.size},
        "weight_map": {name: file for file, names in files.names.items() for name in names},
    }
    name = f"model.safetensors.index{'.' + variant if variant else ''}.json"
    (target / name).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _attempt(action: Callable[[], None]) -> Exception | None:
    try:
        action()
    except (OSError, AutotpError, ValueError, RuntimeError) as error:
        return CheckpointError(f"could not be saved: {error}") if isinstance(error, OSError) else error
    return None
