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

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from .comm import ProcessComm
from .errors import PlanError
from .gradients import MarkGrad, Spread, watch
from .mesh import Mesh
from .state import Held, ShardState

LEVELS = {1: "optimizer states", 2: "optimizer states and gradients", 3: "parameters too"}


@dataclass(eq=False)
class Sharded:
    """A model whose copies share their parameters out: `state.copies` under zero=1, 2 or 3."""

    zero: int
    mesh: Mesh
    modules: list[FSDPModule] = field(default_factory=list)

    def install(self, model: nn.Module, state: ShardState, blocks: Sequence[str]) -> None:
        """Shard `model`'s parameters, block by block.

        blocks: paths of modules that run as a whole, and use no parameters but their own. All others make one
        more group, gathered while the whole model runs.
        """
        if not isinstance(self.mesh.dp, ProcessComm) or self.mesh.devices is None:
            raise PlanError(f"zero={self.zero} needs processes of torch.distributed: FSDP2 has no simulation.")
        options: dict[str, Any] = {
            "mesh": self.mesh.devices["dp"],
            "reshard_after_forward": self.zero == 3,
        }
        for path in own_blocks(model, blocks):
            fully_shard(model.get_submodule(path), **options)
        fully_shard(model, **options)
        self.modules = [m for m in model.modules() if isinstance(m, FSDPModule)]
        if hasattr(model, "set_reduce_scatter_unused_params"):      # torch >= 2.13
            model.set_reduce_scatter_unused_params(True)
        for module in self.modules:
            module.unshard()                     # makes the parameters that forwards see: they stay the same
        whole = {id(owner._parameters.get(own)): held for owner, own, held in state.owners}
        seen = {n: whole.get(id(p)) for n, p in model.named_parameters()}
        for name, param in model.named_parameters():
            if (held := seen[name]) is not None:
                watch(param, state.comm, held.layout, held.how, held.once, mark=False)
        for module in self.modules:
            module.reshard()
        for name, param in model.named_parameters():
            if param.requires_grad:
                param.register_post_accumulate_grad_hook(MarkGrad(self._spread(param, seen[name])))
        if callable(getattr(model, "generate", None)):
            register_fsdp_forward_method(model, "generate")

    def _spread(self, param: Tensor, held: Held | None) -> Spread:
        spread = Spread.over(self.mesh.tp, held.layout if held else None, bool(held and held.once), param.dim())
        weights = spread.weights
        if weights is not None and weights.shape[:1] == param.shape[:1]:
            values, start = local(param)         # this copy's rows
            weights = weights[start:start + values.shape[0]]
        return Spread((*spread.comms, self.mesh.dp), weights)

    def reshard(self) -> None:
        """Back to what is stored between steps."""
        for module in self.modules:
            module.reshard()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Backwards in here only accumulate, where each rank may hold whole gradients (zero=1)."""
        root: Any = self.modules[0]
        if self.zero > 1:
            yield
            return
        root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            root.set_requires_gradient_sync(True)


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


def whole(tensor: Tensor) -> Tensor:
    """A parameter (or state of the optimizer) with the parts of all copies: what tensor parallelism left on
    this rank. Collective over dp for one that is cut, any other as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor  # type: ignore[no-any-return]


def local(tensor: Tensor) -> tuple[Tensor, int]:
    """This rank's part of a parameter, and the row at which it begins."""
    if not isinstance(tensor, DTensor):
        return tensor, 0
    mesh = tensor.device_mesh
    chunk = -(-tensor.shape[0] // mesh.size())
    return tensor.to_local(), min(mesh.get_local_rank() * chunk, tensor.shape[0])


__all__ = ["LEVELS", "Sharded", "local", "own_blocks", "whole"]
