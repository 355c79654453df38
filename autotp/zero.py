"""ZeRO by FSDP2 on top of tensor parallelism: what every copy would hold is cut over the copies.

FSDP2 cuts the parameters that tensor parallelism left on this rank, along dim 0, over the dp dim of the mesh.
In a forward and backward modules see whole (local) parameters, as without it; outside, `p` and `p.grad` are
DTensors of the dp mesh. The corrections that tensor parallelism makes to gradients act on the former, before
they are summed over dp; the norms of the whole model on the latter (`ShardedGrad`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from .comm import ProcessComm
from .errors import AutotpError, PlanError
from .gradients import MarkGrad, watch
from .mesh import Mesh
from .nested import map_tensors
from .pipeline.absent import Absent, on_meta
from .pipeline.run import UnitForward
from .quantised import is_packed
from .spread_sums import Spread
from .state import Held, ShardState, part_of_copies


@dataclass(eq=False)
class Sharded:
    """A model whose copies share their parameters out: `state.copies` under zero=1, 2 or 3."""

    cuts = True

    zero: int
    mesh: Mesh
    modules: list[FSDPModule] = field(default_factory=list)
    count: int = 0
    _quiet: bool = False
    pending: bool = False  # gradients from `paused` that no backward has summed over the copies yet

    def install(self, model: nn.Module, state: ShardState, blocks: Sequence[str]) -> None:
        """Shard `model`'s parameters, block by block.

        blocks: paths of modules that run as a whole, and use no parameters but their own. All others make one
        more group, gathered while the whole model runs.
        """
        if not isinstance(self.mesh.dp, ProcessComm) or self.mesh.devices is None:
            raise PlanError(f"zero={self.zero} needs processes of torch.distributed: FSDP2 has no threads.")
        options: dict[str, Any] = {
            "mesh": self.mesh.devices["dp"],
            "reshard_after_forward": self.zero == 3,
        }
        elsewhere = {p for p in model.parameters() if isinstance(p, Absent)}
        for name, param in model.named_parameters():
            if param.dim() == 0:
                raise PlanError(f"zero={self.zero}: {name} has no dims, which FSDP2 can't cut; give it one, "
                                "or use zero=0.")
            if is_packed(param):
                raise PlanError(f"zero={self.zero}: {name} is quantised (a {type(param).__name__}), which "
                                "FSDP2 can't cut; use zero=0.")
            if param not in elsewhere and param.is_meta:
                raise PlanError(f"zero={self.zero}: {name} is on the meta device; give the model its values "
                                "first.")
        for block in map(model.get_submodule, own_blocks(model, blocks)):
            if elsewhere.isdisjoint(block.parameters()):
                _shard(block, **options)
        if state.pipeline is not None:
            options["reshard_after_forward"] = False
        _shard(model, **options, ignored_params=elsewhere)
        model.register_forward_pre_hook(self._before)
        model.register_forward_hook(self._after)
        self.count = len(list(model.parameters()))
        self.modules = [m for m in model.modules() if isinstance(m, FSDPModule)]
        root: Any = model
        if hasattr(root, "set_reduce_scatter_unused_params"):       # torch >= 2.13
            root.set_reduce_scatter_unused_params(True)
        root._get_fsdp_state()._lazy_init()      # else a part that is called first takes itself for the root
        for shared in self.modules:
            shared.unshard()                     # makes the parameters that forwards see: they stay the same
        whole = {id(owner._parameters.get(own)): held for owner, own, held in state.owners}
        seen = {n: whole.get(id(p)) for n, p in model.named_parameters()}
        for name, param in model.named_parameters():
            if (held := seen[name]) is not None and param not in elsewhere:
                watch(param, state.comm, held.layout, held.how, held.once, mark=False)
        self.reshard()
        for name, param in model.named_parameters():
            if param.requires_grad and param not in elsewhere:
                param.register_post_accumulate_grad_hook(MarkGrad(self._spread(param, seen[name])))
        for part in model.modules():
            if any(p is not None for p in part._parameters.values()):
                part.register_load_state_dict_pre_hook(_cut_loaded)
        if callable(getattr(model, "generate", None)):
            register_fsdp_forward_method(model, "generate")

    def _before(self, model: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():
            self.pending = self._quiet
        if torch.is_grad_enabled() and len(list(model.parameters())) != self.count:
            raise AutotpError(
                f"the model had {self.count} parameters when it was parallelized with zero={self.zero}, and "
                f"has {len(list(model.parameters()))} now: new ones would not be trained over all copies. "
                "Add them (adapters, say) before autotp.parallelize, or use zero=0."
            )

    def _after(self, model: nn.Module, args: Any, result: Any) -> None:
        """With zero=1 and 2 whole parameters stay until backward. Where none comes, `model.parameters()` must
        be those to train: an optimizer made then would have others."""
        if not torch.is_grad_enabled():
            self.reshard()

    def _spread(self, param: Tensor, held: Held | None) -> Spread:
        layout, once = (held.layout, held.once) if held else (None, False)
        spread = Spread.over(self.mesh.tp, layout, once, param.dim())
        weights = spread.weights
        if weights is not None and weights.shape[:1] == param.shape[:1]:
            values, start = part_of_copies(param)
            weights = weights[start:start + values.shape[0]]
        return Spread((*spread.comms, self.mesh.dp), weights)

    def reshard(self) -> None:
        """Back to what is stored between steps."""
        for module in self.modules:
            module.reshard()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Backwards in here only accumulate, where each rank may hold whole gradients (zero=1)."""
        if self.zero > 1:
            yield
            return
        root: Any = self.modules[0]
        root.set_requires_gradient_sync(False)
        self._quiet = True
        try:
            yield
        finally:
            root.set_requires_gradient_sync(True)
            self._quiet = False

    @contextmanager
    def in_stages(self, once: bool) -> Iterator[None]:
        """A step of a pipeline's schedule, in which forwards and backwards of micro-batches take turns.

        Gradients are summed over the copies after each micro-batch's backward; with zero=1 once, at the end,
        and so they are where `once` says that weights' gradients come after their backward. Parameters stay
        whole from their first use to the end of the step; with zero=3 those of blocks do not.
        """
        root: Any = self.modules[0]
        once = once or self.zero == 1
        root.set_requires_gradient_sync(not once)
        root.set_reshard_after_backward(self.zero == 3)
        root.set_reshard_after_backward(False, recurse=False)
        root.unshard()
        try:
            yield
            if once:
                root.set_requires_gradient_sync(True)
                for module in self.modules:
                    module.unshard()
                # What ends a backward: all gradients there are get summed (as torch's own stages do it).
                root._get_fsdp_state()._root_post_backward_final_callback()
        finally:
            root.set_requires_gradient_sync(True)
            root.set_reshard_after_backward(True)
            self.reshard()


def _shard(module: nn.Module, **options: Any) -> None:
    """fully_shard. FSDP2's hooks of a unit of a pipeline run where its own forward does."""
    if not isinstance(module.forward, UnitForward):
        module.register_forward_hook(_no_views)
        fully_shard(module, **options)
        return
    unit, part = module.forward, module

    def forward(*args: Any, **kwargs: Any) -> Any:
        return _no_views(part, args, own(*args, **kwargs))

    def hollow(*args: Any, **kwargs: Any) -> Any:
        """For shapes alone, where the values are not gathered."""
        cut = [(m._parameters, name, p) for m in part.modules() for name, p in m._parameters.items()
               if isinstance(p, DTensor)]  # fmt: skip
        for params, name, param in cut:
            params[name] = on_meta(param)  # type: ignore[arg-type, assignment]
        try:
            return own(*args, **kwargs)
        finally:
            for params, name, param in cut:
                params[name] = param

    own, unit.stub.forward = unit.forward, hollow
    sharded: Any = fully_shard(module, **options)
    sharded.run_unit = forward
    register_fsdp_forward_method(sharded, "run_unit")
    unit.forward = sharded.run_unit
    state = sharded._get_fsdp_state()
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()


def _no_views(module: nn.Module, args: Any, result: Any) -> Any:
    """FSDP2 gathers a module's parameters again when the gradient of its result comes. It does not hear of
    that where the result is a view and the model changes it in place."""
    if not torch.is_grad_enabled():
        return result
    return map_tensors(result, lambda t: t.clone() if t.requires_grad and t._base is not None else t)


def _cut_loaded(module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Before a module loads: what is whole (of this rank's tensor-parallel part) becomes this copy's rows."""
    for own, param in module._parameters.items():
        given = state_dict.get(prefix + own)
        if isinstance(param, DTensor) and isinstance(given, Tensor) and not isinstance(given, DTensor):
            if given.shape == param.shape:
                mesh, places = param.device_mesh, param.placements
                given = distribute_tensor(given.to(param.device), mesh, places, src_data_rank=None)
                state_dict[prefix + own] = given


def own_blocks(model: nn.Module, blocks: Sequence[str]) -> list[str]:
    """Those of `blocks` that have parameters and share none with a module outside, none inside another."""
    users: dict[int, set[str]] = {}
    for path in blocks:
        for param in model.get_submodule(path).parameters():
            users.setdefault(id(param), set()).add(path)
    inside = {f"{path}.{name}" if name else path for path in blocks
              for name, _ in model.get_submodule(path).named_modules()}
    for path, module in model.named_modules():
        if path not in inside:
            for param in module._parameters.values():
                if param is not None:
                    users.setdefault(id(param), set()).add("")
    found = []
    for path in dict.fromkeys(blocks):
        params = list(model.get_submodule(path).parameters())
        if path and params and all(users[id(p)] == {path} for p in params):
            found.append(path)
    return found
