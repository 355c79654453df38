"""What of a model and its optimizer goes into a training checkpoint, by the parameters' own names.

A rank knows of the stages that it has: what the ranks' optimizers say is put together (`merged`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from .entries import Entry
from .errors import CheckpointError
from .gradients import plain
from .pipeline.absent import is_missing
from .save import split_of


def model_entries(model: nn.Module) -> dict[str, Entry]:
    """Its parameters and buffers that this rank has."""
    comm, held = split_of(model)
    state = {n: t for n, t in model.state_dict(keep_vars=True).items() if isinstance(t, Tensor)}
    names = {id(t): n for n, t in reversed(state.items())}
    return {f"model.{names[id(t)]}": Entry.of(t, held.get(id(t)), comm)
            for t in state.values() if not is_missing(t)}  # fmt: skip


def optimizer_entries(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Entry]:
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


def settings_of(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    """The optimizer's groups, with parameters by name, and what of its state is no tensor."""
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


def merged(told: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The settings of the whole model's optimizer, from every rank's."""
    counts = [None if settings["groups"] is None else len(settings["groups"]) for settings in told]
    state = {name: values for settings in told for name, values in settings["state"].items()}
    if counts[0] is None or len(set(counts)) > 1:
        if len(set(counts)) > 1:
            raise CheckpointError(
                f"rank 0's optimizer has {counts[0] or 'no'} groups of parameters, another rank's "
                f"{next(count for count in counts if count != counts[0]) or 'none'}: make it alike on all."
            )
        return {"groups": None, "state": state}
    groups = []
    for i, first in enumerate(told[0]["groups"]):
        same = [settings["groups"][i] for settings in told]
        for other in same:
            differs = [key for key, value in first.items() if key != "params" and other.get(key) != value]
            if differs:
                raise CheckpointError(
                    f"{differs[0]} of the optimizer's group {i} is {first[differs[0]]} on rank 0 and "
                    f"{other.get(differs[0])} on another rank: a checkpoint has one."
                )
        groups.append({**first, "params": list(dict.fromkeys(n for g in same for n in g["params"]))})
    return {"groups": groups, "state": state}


def check_groups(now: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """CheckpointError where the groups of `merged` settings hold other parameters than those saved."""
    if saved["groups"] is None:
        raise CheckpointError("the checkpoint was saved without an optimizer.")
    names = [sorted(group["params"]) for group in now["groups"]]
    if names != [sorted(group["params"]) for group in saved["groups"]]:
        raise CheckpointError("the optimizer's groups hold other parameters than those of the checkpoint.")


def prepare(
    model: nn.Module, optimizer: torch.optim.Optimizer, stored: Mapping[str, Any], settings: Mapping[str, Any]
) -> None:
    """Give the optimizer the settings of the checkpoint, and empty state to read into. stored: the
    checkpoint's tensors."""
    names = {id(p): n for n, p in _trained(model, optimizer).items()}
    _, held = split_of(model)
    known: dict[str, dict[str, Any]] = {}  # by parameter, its tensors
    for entry, what in stored.items():
        name, _, key = entry.removeprefix("optimizer.").rpartition(".")
        if entry.startswith("optimizer.") and isinstance(what, TensorStorageMetadata):
            known.setdefault(name, {})[key] = what
    for group, saved in zip(optimizer.param_groups, settings["groups"], strict=True):
        for key, value in saved.items():
            if key == "params":
                continue
            if isinstance(group.get(key), Tensor):
                group[key].fill_(value)
            else:
                group[key] = tuple(value) if isinstance(value, list) else value
        for param in group["params"]:
            if is_missing(param):
                continue
            name = names[id(param)]
            layout = held[id(param)].layout if id(param) in held else None
            whole = tuple(param.shape if layout is None else layout.shape)
            state: dict[str, Any] = dict(settings["state"].get(name, {}))
            for key, what in known.get(name, {}).items():
                if tuple(what.size) == whole:
                    state[key] = torch.zeros_like(param, dtype=what.properties.dtype).detach()
                else:  # a count of steps: on the CPU, unless the optimizer runs on the GPU as a whole
                    on_device = group.get("capturable") or group.get("fused")
                    where = param.device if on_device else torch.device("cpu")
                    state[key] = torch.zeros(what.size, dtype=what.properties.dtype, device=where)
            optimizer.state[param] = state
