"""One layer of each kind instead of all: what a model costs can be counted on a short copy of it.

A model's layers stand in an `nn.ModuleList`. Two layers are of one kind if their modules have the same
classes, parameter shapes and settings; a setting that is the layer's own number does not count. A copy that
keeps the first layer of each kind runs through the same Python, and takes a fraction of a second to capture
however deep the model is.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class LayerList:
    """Layers of a model. path: of their ModuleList. kinds: of each layer, in order. first: of each kind, its
    first layer.
    """

    path: str
    kinds: tuple[int, ...]
    first: tuple[int, ...]


def layer_lists(model: nn.Module) -> list[LayerList]:
    """The outermost lists of layers, in the order they are registered: of two or more modules, or of one that
    has modules inside (a model with a single layer; a single head is no layer)."""
    found = []
    for path, layers in _outermost_lists(model, ""):
        seen: dict[Any, int] = {}
        numbers = _numbers(layers)
        kinds = [seen.setdefault(_kind(layer, numbers), len(seen)) for layer in layers]
        found.append(LayerList(path, tuple(kinds), tuple(kinds.index(k) for k in range(len(seen)))))
    return found


def shortened(model: nn.Module, lists: list[LayerList]) -> nn.Module:
    """`model` with only the first layer of each kind; the modules kept are shared with it, the model is not
    changed.
    """
    short = _branch(model)
    for layers in lists:
        parent, names = short, layers.path.split(".")
        for name in names[:-1]:
            branch = _branch(getattr(parent, name))
            parent._modules[name] = branch
            parent = branch
        full: Any = parent._modules[names[-1]]
        parent._modules[names[-1]] = nn.ModuleList([full[i] for i in layers.first])
    return short


def _outermost_lists(module: nn.Module, path: str) -> Iterator[tuple[str, nn.ModuleList]]:
    for name, child in module.named_children():
        full = f"{path}.{name}" if path else name
        if isinstance(child, nn.ModuleList) and (len(child) > 1 or any(list(m.children()) for m in child)):
            yield full, child
        else:
            yield from _outermost_lists(child, full)


def _kind(layer: nn.Module, numbers: set[tuple[str, str]]) -> Any:
    return tuple(
        (
            name,
            type(module),
            tuple((n, tuple(p.shape)) for n, p in module.named_parameters(recurse=False)),
            tuple(sorted((key, value) for key, value in _settings(module) if (name, key) not in numbers)),
        )
        for name, module in layer.named_modules()
    )


def _settings(module: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((key, value) for key, value in vars(module).items() if isinstance(value, (int, float, str)))


def _numbers(layers: nn.ModuleList) -> set[tuple[str, str]]:
    """The settings that only number the layers that have them, from 0 or from 1: they make no kind."""
    offsets: dict[tuple[str, str], set[Any]] = {}
    for i, layer in enumerate(layers):
        for name, module in layer.named_modules():
            for key, value in _settings(module):
                numbers = isinstance(value, int) and not isinstance(value, bool)
                offsets.setdefault((name, key), set()).add(value - i if numbers else None)
    return {key for key, found in offsets.items() if found in ({0}, {1})}


def _branch(module: nn.Module) -> nn.Module:
    """The module again, with its own table of children."""
    new = copy.copy(module)
    new.__dict__["_modules"] = dict(module._modules)
    return new
