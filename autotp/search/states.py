"""What generation keeps of a sequence whatever its length: the states of recurrences and convolutions.

A model that decodes hands back a cache. It is run on meta at two lengths: what grows are keys and values,
which are counted from its attentions (`memory.cache`); what does not is a state. Some models keep theirs on
their modules.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..recapture import hollow
from .recorded import inputs_of
from .shorten import LayerList, layer_lists, shortened
from .workload import Workload

LENGTHS = (16, 32)  # tokens: more than the kernels of convolutions have
CACHES = ("past_key_values", "cache_params", "state")  # of a model's output


def with_states(workload: Workload, model: nn.Module) -> Workload:
    """The workload with the states of `model`'s layers in its units.

    Unchanged where the model does not decode with a cache, or not on meta."""
    if not hasattr(model, "generate"):
        return workload
    lists = layer_lists(model)
    whole = [LayerList(one.path, tuple(range(len(one.kinds))), tuple(range(len(one.kinds)))) for one in lists]
    for some in (lists, whole):  # whole: some look for other layers by their number
        try:
            short, long = (_kept(model, some, length) for length in LENGTHS)
            break
        except Exception:  # any of the model's own
            continue
    else:
        return workload
    found = {
        name: sum(a for a, b in zip(sizes, long.get(name, []), strict=False) if a == b)
        for name, sizes in short.items()
    }
    units = tuple(replace(u, state=float(found.get(u.name, 0.0))) for u in workload.units)
    return replace(workload, units=units)


def _kept(model: nn.Module, lists: list[LayerList], length: int) -> dict[str, list[int]]:
    """By unit, the bytes of each tensor that a run over so many tokens leaves for the next."""
    copy = hollow(shortened(model, lists)).eval().to(torch.bfloat16)
    before = {id(t) for m in copy.modules() for t in _tensors(vars(m))}
    with torch.no_grad():
        output = copy(**(inputs_of(copy, length) | {"use_cache": True}))
    found: dict[str, list[int]] = {}
    caches = [output[name] for name in CACHES if name in output and output[name] is not None]
    for i, one in enumerate(lists):
        layers: Any = copy.get_submodule(one.path)
        for number, layer in zip(one.first, layers, strict=True):
            own = [t for m in layer.modules() for t in _tensors(vars(m)) if id(t) not in before]
            if i == len(lists) - 1:  # of several lists, it is the decoder that has a cache
                own += [t for cache in caches for t in _of_layer(cache, number, len(one.kinds))]
            found[f"{one.path}.{number}"] = [t.numel() * t.element_size() for t in own]
    return found


def _of_layer(cache: Any, number: int, layers: int) -> Iterator[torch.Tensor]:
    """A layer's tensors of a cache that has a list of layers; of another, an equal share of each."""
    listed = getattr(cache, "layers", None)
    if listed is not None:
        yield from _tensors(listed[number])
        return
    for tensor in _tensors(cache):
        yield tensor.flatten()[: -(-tensor.numel() // layers)]


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in containers and in objects that are not modules."""
    if isinstance(value, torch.Tensor):
        if value.ndim:
            yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _tensors(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
    elif hasattr(value, "__dict__") and not isinstance(value, nn.Module | type) and not callable(value):
        yield from _tensors(vars(value))
