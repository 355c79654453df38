"""Nested values: the arguments, inputs and outputs of calls."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.immutable_collections import immutable_dict

from .ints import plain


def map_parts(value: Any, of: Callable[[Any], Any]) -> Any:
    """`value` with `of` applied to each part of a tuple, list, slice, mapping, dataclass or record (see
    `fields_of`), the container's type kept (but a `torch.Size` becomes a tuple, and fx's immutable containers
    plain ones); any other value as it is."""
    if isinstance(value, tuple):
        parts = [of(part) for part in value]
        if isinstance(value, torch.Size) or type(value) is tuple:
            return tuple(parts)
        return value._make(parts) if hasattr(value, "_make") else type(value)(parts)
    if isinstance(value, list):
        return [of(part) for part in value]
    if isinstance(value, slice):
        return slice(of(value.start), of(value.stop), of(value.step))
    if type(value) in (dict, immutable_dict):
        return {key: of(part) for key, part in value.items()}
    if isinstance(value, Mapping):
        changed = {key: new for key, part in value.items() if (new := of(part)) is not part}
        other: Any = copy.copy(value) if changed else value
        for key, new in changed.items():
            other[key] = new
        return other
    held = fields_of(value)
    changed = {name: new for name, part in held.items() if (new := of(part)) is not part}
    other = copy.copy(value) if changed else value
    for name, new in changed.items():
        object.__setattr__(other, name, new)
    return other


def fields_of(value: Any) -> dict[str, Any]:
    """The fields of a dataclass, the attributes of a record: an object of a class that only holds values. One
    that does something (a cache, a config) has methods, and is left alone: it may be changed in place."""
    if isinstance(value, type):
        return {}
    if dataclasses.is_dataclass(value):
        return {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
    held = getattr(value, "__dict__", None)
    if type(held) is not dict or not held or callable(value) or not _only_holds(type(value)):
        return {}
    return dict(held)


def unseen_parts(value: Any) -> list[Any]:
    """What an object holds into which `map_parts` does not look: attributes, slots, a set's members."""
    if isinstance(value, (set, frozenset)):
        return list(value)
    slots = [vars(kind).get("__slots__", ()) for kind in type(value).__mro__]
    names = [name for own in slots for name in ((own,) if isinstance(own, str) else own)]
    return [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in names)]


def _only_holds(kind: type) -> bool:
    own = [base for base in kind.__mro__ if base not in (object, types.SimpleNamespace)]
    if not all(base.__flags__ & _MADE_BY_CLASS for base in own):
        return False
    return not any(
        inspect.isroutine(member) and not (name.startswith("__") and name.endswith("__"))
        for base in own
        for name, member in vars(base).items()
    )


_MADE_BY_CLASS = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made by a class statement, not by an extension


def map_nodes(value: Any, of: Callable[[fx.Node], Any], device: torch.device | None = None) -> Any:
    """`value` with every node replaced by `of(node)`, and the CPU, on which captures run, by `device`."""
    if isinstance(value, fx.Node):
        return of(value)
    if device is not None and isinstance(value, torch.device):
        return device if value.type == "cpu" else value
    return map_parts(value, lambda part: map_nodes(part, of, device))


def map_tensors(value: Any, of: Callable[[torch.Tensor], Any]) -> Any:
    """`value` with every tensor replaced by `of(tensor)`: each container's parts in its own order, a
    mapping's as they were put in. What is no container (a cache object) is left as it is."""
    if isinstance(value, torch.Tensor):
        return of(value)
    return map_parts(value, lambda part: map_tensors(part, of))


def tensors_in(inputs: Any, name: str = "") -> list[tuple[str, torch.Tensor]]:
    """The tensors in nested inputs, by placeholder name: `past_0_1` is `inputs["past"][0][1]`."""
    if isinstance(inputs, torch.Tensor):
        return [(name, inputs)]
    parts: Iterable[tuple[Any, Any]] = ()
    if isinstance(inputs, dict):
        parts = inputs.items()
    elif isinstance(inputs, (tuple, list)):
        parts = enumerate(inputs)
    return [found for key, part in parts for found in tensors_in(part, f"{name}_{key}" if name else str(key))]


def has_tensor(value: Any) -> bool:
    """Whether a call's result is or holds a tensor."""
    if isinstance(value, (tuple, list)):
        return any(has_tensor(part) for part in value)
    return isinstance(value, torch.Tensor)


def versions(value: Any) -> list[tuple[torch.Tensor, int]]:
    """The tensors in nested arguments, each with its version: what an in-place change counts up."""
    if isinstance(value, torch.Tensor):
        return [(value, value._version)]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return [found for part in parts for found in versions(part)]


def untracked(value: Any) -> Any:
    """Arguments with plain numbers: torch's own Python code is no reader of the model's ints."""
    if isinstance(value, (tuple, list)):
        parts = [untracked(part) for part in value]
        if all(a is b for a, b in zip(parts, value, strict=True)):
            return value
        return parts if isinstance(value, list) else tuple(parts)
    if type(value) is dict or isinstance(value, slice):
        return map_parts(value, untracked)
    return plain(value)


def own_objects(value: Any, operands: set[int]) -> Any:
    """A call's result in which tensors that are `operands` (by id) are replaced by new objects for the same
    data."""
    if isinstance(value, torch.Tensor):
        if id(value) not in operands:
            return value
        with torch.enable_grad():
            return torch.ops.aten.alias.default(value)
    return map_parts(value, lambda part: own_objects(part, operands)) if has_tensor(value) else value


def plain_containers(value: Any) -> Any:
    """An output in the containers that fx knows: tuples, lists, dicts."""
    if isinstance(value, Mapping):
        return {str(key): plain_containers(part) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        parts = [plain_containers(part) for part in value]
        return parts if isinstance(value, list) else tuple(parts)
    return {name: plain_containers(part) for name, part in fields_of(value).items()} or value
