"""Puts a cut onto a model, in place: stubs for what other stages run, and no memory for what they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import PlanError
from .absent import Absent, absent_like
from .channel import Channel
from .run import EntryForward, Pipeline, UnitForward
from .stages import Stages


def install(
    model: nn.Module,
    stages: Stages,
    rank: int,
    size: int,
    channel: Channel | None,
    place: str,
    device: torch.device | None = None,
) -> Pipeline:
    """Make `model` what pp rank `rank` of `size` has of `stages`.

    Parameters and buffers that none of its stages holds lose their values; the others are untouched. Units
    and the modules around them get a forward of their own (`run.py`). device: where this rank's tensors lie
    (None: where the first parameter is).

    Raises PlanError where `stages` is not a cut of this model, before anything is changed.
    """
    names = {name for name, _ in model.named_modules(remove_duplicate=False)}
    lost = [path for path in stages.units if path not in names]
    if lost:
        raise PlanError(f"the stages name {lost[0]}, which {type(model).__name__} does not have")
    if stages.count % size:
        raise PlanError(f"{stages.count} stages can't be spread evenly over {size} ranks")
    home = device or next((p.device for p in model.parameters()), torch.device("cpu"))
    pipeline = Pipeline(stages, rank, size, channel, home, place)
    _drop_values(model, pipeline)
    pipeline.trains = lambda: any(p.requires_grad for p in model.parameters())
    pipeline.lies = _device_of(model, home)
    around = {""} | {path[:i] for path in stages.units for i, c in enumerate(path) if c == "."}
    for path in stages.units:
        module = model.get_submodule(path)
        module.forward = UnitForward(path, module.forward, pipeline)
    for path in around - set(stages.units):
        module = model.get_submodule(path)
        if not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            module.forward = EntryForward(path, module.forward, pipeline)
    return pipeline


def _device_of(model: nn.Module, otherwise: torch.device) -> Callable[[], torch.device]:
    """Where the tensors of this rank lie, asked at every call: of one that it holds."""
    for module in model.modules():
        for own, tensor in tensors_of(module):
            if not isinstance(tensor, Absent):
                return lambda module=module, own=own: getattr(module, own).device  # type: ignore[misc]
    return lambda: otherwise


def _drop_values(model: nn.Module, pipeline: Pipeline) -> None:
    """Replace what this rank doesn't hold by Absents. Tied tensors stay tied."""
    names: dict[int, list[str]] = {}
    for name, tensor in (*model.named_parameters(remove_duplicate=False),
                         *model.named_buffers(remove_duplicate=False)):  # fmt: skip
        names.setdefault(id(tensor), []).append(name)
    absents: dict[int, Absent] = {}
    for module in model.modules():
        gone = []
        for own, tensor in tensors_of(module):
            mine = names[id(tensor)]
            if any(pipeline.rank in pipeline.holders(name) for name in mine):
                continue
            if id(tensor) not in absents:
                stage = min(stage for name in mine for stage in pipeline.stages.params[name])
                absents[id(tensor)] = absent_like(tensor, pipeline.origin(mine[0], stage))
                absents[id(tensor)]._kept = tensor  # type: ignore[attr-defined]  # no id may be used twice
            gone.append((own, absents[id(tensor)]))
        for own, new in gone:
            held: Any = module._parameters if own in module._parameters else module._buffers
            held[own] = new
        if gone:
            module.register_load_state_dict_pre_hook(_NothingLoaded(tuple(own for own, _ in gone)))
    for new in absents.values():
        del new._kept  # type: ignore[attr-defined]


def tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A module's own parameters and buffers."""
    for tensors in (module._parameters, module._buffers):
        for own, tensor in tensors.items():
            if tensor is not None:
                yield own, tensor


@dataclass(frozen=True)
class _NothingLoaded:
    """Before a module loads: what this rank does not hold keeps no values, whole or local ones."""

    names: tuple[str, ...]

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        held: Mapping[str, Any] = {**module._parameters, **module._buffers}
        for own in self.names:
            if prefix + own in state and isinstance(held[own], Absent):
                state[prefix + own] = held[own]
