"""What a parallelized model knows of its split (`model.autotp`), and its state dict, whole and local."""
from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .coded import CodedWeight, as_stored
from .comm import Comm
from .errors import RankError, ShardStateError
from .gradients import global_norms, marked, plain, spread_of, watch
from .late import Watchman
from .layers.attention import turn_off_fast_path
from .layouts import ParamLayout, put, take
from .pipeline.absent import Absent, is_missing
from .quantised import components, gather_packed, is_packed, outline, rebuilt, take_packed

if TYPE_CHECKING:
    from .mesh import Mesh
    from .pipeline.run import Pipeline
    from .plan import Plan
    from .replicas import Replica
    from .zero import Sharded


@dataclass(frozen=True)
class Held:
    """How one parameter or buffer lies over the ranks and what its gradient needs (`gradients.watch`).

    whole: of a quantised weight, the outline before it was cut.
    """
    layout: ParamLayout | None
    how: str = "own"
    once: bool = False
    whole: Tensor | None = field(default=None, repr=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Held:
        return self                              # a value: the copy of a model may hold the same


@dataclass
class ShardState:
    """The split of one model, kept as `model.autotp` on the module that was parallelized.

    comm: the tensor-parallel ranks. held: by first name, every parameter or buffer that is not simply
    replicated. plan: what was done. mesh: all ranks. copies: what keeps the copies of the model alike that
    see different data. pipeline: this rank's stages and how they run, where there are several.
    """
    comm: Comm
    held: Mapping[str, Held]
    plan: Plan | None = None
    owners: list[tuple[nn.Module, str, Held]] = field(default_factory=list, repr=False)
    mesh: Mesh | None = None
    copies: Replica | Sharded | None = field(default=None, repr=False)
    pipeline: Pipeline | None = field(default=None, repr=False)

    @classmethod
    def prepare(cls, model: nn.Module, plan: Plan, comm: Comm) -> ShardState:
        """From a plan, before the model is changed. ShardStateError where the plan is not of this model."""
        held = {}
        for name, p in plan.params.items():
            param = model.get_parameter(name)
            shape = tuple(param.shape)
            if shape != tuple(p.shape):
                raise ShardStateError(f"the plan knows {name} as {tuple(p.shape)}, this model's is {shape}; "
                                      "plan the model that is to be parallelized.")
            packed = is_packed(param)
            if p.layout is not None or p.once or p.gradient in ("summed", "slots") or packed:
                held[name] = Held(p.layout, p.gradient, p.once, outline(param) if packed else None)
        return cls(comm, held, plan)

    def finish(self, model: nn.Module) -> None:
        """Install everything on the model whose tensors are local now: hooks for gradients and for loading.

        Raises ShardStateError when a tensor does not have its local shape.
        """
        by_tensor: dict[int, Held] = {}
        for name, held in self.held.items():
            tensor = _tensor(model, name)
            if held.layout is not None and tuple(tensor.shape) != held.layout.local_shape(self.comm.rank):
                raise ShardStateError(
                    f"{name} has shape {tuple(tensor.shape)} on rank {self.comm.rank}, its layout says "
                    f"{held.layout.local_shape(self.comm.rank)} of {tuple(held.layout.shape)}.")
            by_tensor[id(tensor)] = held
        self.owners = [(module, own, by_tensor[id(tensor)]) for module in model.modules()
                       for own, tensor in _own_tensors(module) if id(tensor) in by_tensor]
        for module in dict.fromkeys(module for module, _, _ in self.owners):
            mine = {own: held for owner, own, held in self.owners if owner is module}
            module.register_load_state_dict_pre_hook(_SliceLoaded(mine, self.comm))
            module.register_load_state_dict_post_hook(_WatchLoaded(mine, self.comm))
        self.watch()
        turn_off_fast_path(model)
        model.autotp = self  # type: ignore[assignment]
        # A deep copy loses its parameters' hooks, new parameters have none; their gradients would be wrong.
        if self.comm.size > 1:
            Watchman.install(model)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardState:
        return ShardState(self.comm, self.held, self.plan, copy.deepcopy(self.owners, memo), self.mesh,
                          copy.deepcopy(self.copies, memo), self.pipeline)

    def watch(self) -> None:
        """Put the gradients' hooks on the parameters that lack them."""
        if self.copies is not None and self.copies.cuts:
            return                               # they are where `zero.py` put them
        for module, own, held in self.owners:
            param = module._parameters.get(own)
            if param is not None:
                watch(param, self.comm, held.layout, held.how, held.once)


@dataclass(frozen=True)
class _SliceLoaded:
    """Before a module loads: a whole tensor becomes this rank's part; a local one is taken as it is."""
    held: Mapping[str, Held]
    comm: Comm

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any],
                 strict: bool, missing: list[str], unexpected: list[str], errors: list[str]) -> None:
        for own, held in self.held.items():
            if isinstance(held.whole, CodedWeight):
                held.whole.put_together(state_dict, prefix, own)
            tensor = state_dict.get(prefix + own)
            if not isinstance(tensor, Tensor):
                continue
            layout, rank = held.layout, self.comm.rank
            if layout is not None and tuple(tensor.shape) == tuple(layout.shape):
                part = take_packed(tensor, layout, rank) if is_packed(tensor) else take(tensor, layout, rank)
                # Assigned tensors stay: they must not keep the whole one's memory.
                state_dict[prefix + own] = part.clone() if metadata.get("assign_to_params_buffers") else part
            elif layout is not None and tuple(tensor.shape) != layout.local_shape(rank):
                errors.append(
                    f"{prefix + own} has shape {tuple(tensor.shape)} in the state dict; this model is split "
                    f"over tp={self.comm.size}: give the whole tensor, {tuple(layout.shape)}, or rank "
                    f"{rank}'s part, {layout.local_shape(rank)}.")
            elif held.once and rank > 0:
                state_dict[prefix + own] = torch.zeros_like(tensor)


@dataclass(frozen=True)
class _WatchLoaded:
    """After a module has loaded: `assign=True` put in new parameters, which need the gradients' hooks."""
    held: Mapping[str, Held]
    comm: Comm

    def __call__(self, module: nn.Module, incompatible_keys: Any) -> None:
        for own, held in self.held.items():
            param = module._parameters.get(own)
            if param is not None and not isinstance(param, DTensor):
                watch(param, self.comm, held.layout, held.how, held.once)


def _tensor(model: nn.Module, name: str) -> Tensor:
    path, _, own = name.rpartition(".")
    module = model.get_submodule(path)
    found: Tensor | None = module._parameters.get(own)
    found = module._buffers.get(own) if found is None else found
    if found is None:
        raise ShardStateError(f"{type(model).__name__} has no parameter or buffer {name}")
    return found


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for tensors in (module._parameters, module._buffers):
        for own, tensor in tensors.items():
            if tensor is not None:
                yield own, tensor


# ---------------------------------------------------------------- whole again
def whole_of_copies(tensor: Tensor) -> Tensor:
    """What tensor parallelism left on this rank of a tensor that is cut over copies of the model (`zero.py`);
    any other as it is. Collective over dp."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part_of_copies(tensor: Tensor) -> tuple[Tensor, int]:
    """This copy's rows of such a tensor, sharing its memory, and the first row's number."""
    if not isinstance(tensor, DTensor):
        return tensor, 0
    mesh = tensor.device_mesh
    longest = -(-tensor.shape[0] // mesh.size())
    return tensor.to_local().detach(), min(mesh.get_local_rank() * longest, tensor.shape[0])


def gather(local: Tensor, layout: ParamLayout, comm: Comm) -> Tensor:
    """The full tensor, on every rank, from each rank's part. Collective; bit for bit what was split."""
    parts = [layout.local_shape(rank) for rank in range(comm.size)]
    counts = [torch.Size(shape).numel() for shape in parts]
    local = plain(local.detach())
    flat = comm.all_gather(local.reshape(-1), 0, counts)
    full = local.new_empty(layout.shape)
    for rank, part in enumerate(flat.split(counts)):
        put(full, part.view(parts[rank]), layout, rank)
    return full


def full_state_dict(model: nn.Module) -> dict[str, Any]:
    """The state dict of the unsharded model, on every rank: its names, full shapes, the same bits; ties are
    kept.

    Collective: every rank must call it. Whole tensors are the model's own, as in `state_dict()`; a model that
    is not parallelized gives its `state_dict()`. Needs memory for one whole model on each rank. Raises
    RankError where another rank has ended, or does not come within the group's timeout.
    """
    with torch.no_grad(), naming_ranks(model, "autotp.full_state_dict"):
        tensors = model.state_dict(keep_vars=True)
        held = {id(tensor): (comm, how) for module in model.modules() for comm, mine in _held_by(module)
                for name, tensor in _own_tensors(module) if (how := mine.get(name))}
        done: dict[int, Tensor] = {}
        full: dict[str, Any] = {}
        for name, tensor in tensors.items():
            if not isinstance(tensor, Tensor):
                full[name] = tensor              # extra state of a module
                continue
            if id(tensor) not in done:
                done[id(tensor)] = _from_stages(model, name, tensor, held.get(id(tensor)))
            full |= as_stored(name, done[id(tensor)])
        return full


@contextmanager
def naming_ranks(model: nn.Module, what: str) -> Iterator[None]:
    """Where the backend fails in it as other ranks are gone, the error says so."""
    try:
        yield
    except RuntimeError as error:
        comm = getattr(getattr(model, "autotp", None), "comm", None)
        if comm is None or not (isinstance(error, dist.DistError) or "gloo" in str(error).lower()):
            raise
        raise RankError(
            f"{what}: tp rank {comm.rank} of {comm.size} waited for another rank, which has ended or did not "
            f"call it. Call it on every rank. The backend says: {str(error).splitlines()[0]}"
        ) from error


def weight_norms(model: nn.Module, ord: float = 2.0) -> dict[str, Tensor]:
    """The `ord`-norm of every parameter of the unsharded model, by name: 0-dim, without gradients, the same
    on every rank. What `p.norm()` is of a rank's part alone (LARS' and LAMB's trust ratios ask for it).

    Collective: one all-reduce for all. Under pipeline stages, of the parameters that this rank's stages hold.
    ShardStateError for quantised ones, and for those that copies of the model share out but don't train.
    """
    state: ShardState | None = getattr(model, "autotp", None)
    if state is not None:
        state.watch()
    found: dict[str, Tensor] = {}
    for name, param in model.named_parameters():
        if is_missing(param):
            continue
        spread = spread_of(param)
        if is_packed(param) or (isinstance(param, DTensor) and spread is None):
            raise ShardStateError(f"{name} is quantised or, under zero, frozen: its norm is not known here.")
        with torch.no_grad():
            values = param.detach()
            found[name] = values if spread is None else marked(values, spread)
    return dict(zip(found, global_norms(list(found.values()), ord), strict=True))


def _from_stages(model: nn.Module, name: str, tensor: Tensor, here: tuple[Comm, Held] | None) -> Tensor:
    """The whole tensor, from the tensor-parallel ranks of the first stage that holds it."""
    full: Tensor | None = None
    if not isinstance(tensor, Absent):
        mine = whole_of_copies(tensor.detach())
        full = mine if here is None else _whole(mine, *here)
    state: ShardState | None = getattr(model, "autotp", None)
    if state is None or state.pipeline is None or state.mesh is None:
        assert full is not None
        return full
    holders = state.pipeline.holders(name)
    if len(holders) == state.pipeline.size:
        assert full is not None
        return full
    pp, lies = state.mesh.pp, state.pipeline.lies()
    outlined = here[1].whole if here is not None else None
    if outlined is not None:                     # quantised: what it is made of, one after another
        parts = {} if full is None else components(full)
        names = {id(part): inner for inner, part in components(outlined).items()}
        return rebuilt(outlined, lambda part: pp.broadcast(
            parts.get(names[id(part)], torch.empty(part.shape, dtype=part.dtype, device=lies)), holders[0]))
    if full is None:
        shape = tensor.shape if here is None or here[1].layout is None else here[1].layout.shape
        full = torch.empty(tuple(shape), dtype=tensor.dtype, device=lies)
    return pp.broadcast(full, holders[0])


def _held_by(module: nn.Module) -> Iterator[tuple[Comm, Mapping[str, Held]]]:
    """What a module itself holds parts of. Its hook for loading knows, wherever the module was moved."""
    for hook in module._load_state_dict_pre_hooks.values():
        slices = getattr(hook, "hook", hook)     # torch wraps it
        if isinstance(slices, _SliceLoaded):
            yield slices.comm, slices.held


def _whole(tensor: Tensor, comm: Comm, held: Held) -> Tensor:
    if held.layout is not None and held.whole is not None:
        return gather_packed(tensor, held.whole, held.layout, lambda part, laid: gather(part, laid, comm))
    if held.layout is not None:
        return gather(tensor, held.layout, comm)
    return comm.broadcast(tensor.detach(), 0) if held.once else tensor.detach()


def refuse_partial_saves(model: nn.Module) -> None:
    """Make `save_pretrained`, of the model or a part, an error where it would write this rank's shards."""
    for module in model.modules():
        original = getattr(getattr(module, "save_pretrained", None), "__func__", None)
        if original is not None:
            module.save_pretrained = types.MethodType(_checked(original), module)  # type: ignore[assignment]


def _checked(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def save_pretrained(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("state_dict")
        shapes = {f"{path}.{own}".lstrip("."): held.layout.shape for path, module in self.named_modules()
                  for _, mine in _held_by(module) for own, held in mine.items() if held.layout is not None}
        partial = [n for n, shape in shapes.items() if given is None
                   or (n in given and tuple(given[n].shape) != tuple(shape))]
        if partial:
            raise ShardStateError(
                f"save_pretrained would write this rank's part of {partial[0]} only. On every rank: state = "
                "autotp.full_state_dict(model); then, on one: model.save_pretrained(dir, state_dict=state).")
        return original(self, *args, **kwargs)

    return save_pretrained


class _Refused:
    """What DistributedDataParallel asks a module for: that it is asked is the error."""

    def __init__(self, model: str) -> None:
        self.model = model

    def __iter__(self) -> Any:
        raise ShardStateError(
            f"{self.model} is split over ranks already: DistributedDataParallel would give all ranks the "
            "shards of rank 0 and average the gradients of different ones. For copies of the model: "
            "autotp.parallelize(model, tp=..., dp=...). A Trainer wraps whatever it finds in several "
            "processes: take RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE out of os.environ after "
            "parallelize, before its TrainingArguments are made, and every rank trains as if alone, on "
            "the same batches."
        )


def refuse_ddp(model: nn.Module) -> None:
    """Make `DistributedDataParallel(model)` an error, where it would overwrite shards without a word."""
    model._ddp_params_and_buffers_to_ignore = _Refused(type(model).__name__)  # type: ignore[assignment]
