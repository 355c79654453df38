"""Weights that a package keeps as several tensors beside each other, made one tensor each.

Such a package gives a linear packed ints, scales, zero points, and a forward of its own that knows what to
make of them. `adopt` turns it into an nn.Linear whose weight is a `CodedWeight`: a tensor made of those, as
packed as they are, with the product that the package's own code makes of them. From there on it is a
quantised weight like others (`quantised.py`): cut along what it is made of, and every cut tried before."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .coded_formats import Coding, Found, found_in, let_go

aten = torch.ops.aten


class CodedWeight(Tensor):
    """A weight [out, in] made of `names`, tensors by the names that the module had for them.

    Those of two dims run along the weight's: where one has fewer entries, each stands for as many rows (or
    columns); where it has one, for all. The others belong to the weight as a whole."""

    names: tuple[str, ...]
    coding: Coding

    @staticmethod
    def __new__(
        cls, parts: Mapping[str, Tensor], coding: Coding, shape: tuple[int, ...], dtype: torch.dtype
    ) -> CodedWeight:
        device = next(iter(parts.values())).device
        made = Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype, device=device)
        made.names, made.coding = tuple(parts), coding
        for name, part in parts.items():
            setattr(made, name, part)
        return made

    @property
    def parts(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in self.names}

    def put_together(self, state: dict[str, Any], prefix: str, own: str) -> None:
        """In a state dict that has what such a weight is made of, put the weight under its `own` name."""
        named: dict[str, Any] = {name: state.get(prefix + name) for name in self.names}
        if all(isinstance(part, Tensor) and not isinstance(part, CodedWeight) for part in named.values()):
            named = {name: part.reshape(self.parts[name].shape) for name, part in named.items()}
            for name in named:
                del state[prefix + name]
            state[prefix + own] = CodedWeight(named, self.coding, tuple(self.shape), self.dtype)

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        return list(self.names), {"coding": self.coding, "dtype": self.dtype}

    @staticmethod
    def __tensor_unflatten__(
        parts: Mapping[str, Tensor], context: Mapping[str, Any], shape: Any, stride: Any
    ) -> CodedWeight:
        return CodedWeight(parts, context["coding"], shape, context["dtype"])

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        kinds = ", ".join(f"{name} {part.dtype} {list(part.shape)}" for name, part in self.parts.items())
        return f"CodedWeight({list(self.shape)}, {self.dtype}, made of {kinds})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            return _linear(*args, **(kwargs or {}))
        return torch._C._disabled_torch_function_impl(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (aten.detach.default, aten.alias.default):
            return args[0]._like(Tensor.detach)
        if func is aten.clone.default:
            return args[0]._like(Tensor.clone)
        if func is aten._to_copy.default:
            device = kwargs.get("device")
            return args[0]._like(lambda part: part.to(device=device, copy=True), dtype=kwargs.get("dtype"))
        if func is aten.slice.Tensor:
            return args[0]._slice(*args[1:], **kwargs)
        if func is aten.copy_.default and isinstance(args[1], cls) and args[0].names == args[1].names:
            for name in args[0].names:
                getattr(args[0], name).copy_(getattr(args[1], name))
            return args[0]
        raise NotImplementedError(
            f"{func} of a weight that is kept as {', '.join(args[0].names)}"
            if isinstance(args[0], cls)
            else f"{func} with a coded weight"
        )

    def _like(self, make: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None) -> CodedWeight:
        parts = {name: make(part) for name, part in self.parts.items()}
        return CodedWeight(parts, self.coding, self.shape, dtype or self.dtype)

    def _slice(self, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> CodedWeight:
        dim, size = dim % self.dim(), self.shape[dim]
        start, end, _ = slice(start, end).indices(size)
        if step != 1:
            raise NotImplementedError("every so many rows of a coded weight")
        parts = self.parts
        for name, part in parts.items():
            if part.dim() == self.dim() and part.shape[dim] > 1:
                a, b = start * part.shape[dim], end * part.shape[dim]
                if a % size or b % size:
                    raise ValueError(f"one entry of {name} stands for more than {start}:{end} of {size}")
                parts[name] = part.narrow(dim, a // size, (b - a) // size)
        shape = (*self.shape[:dim], end - start, *self.shape[dim + 1 :])
        return CodedWeight(parts, self.coding, shape, self.dtype)


def _linear(x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
    if not isinstance(weight, CodedWeight):
        raise NotImplementedError("a coded weight that is no weight of a linear")
    return weight.coding.product(weight.parts, tuple(weight.shape), weight.dtype, x, bias)


def as_stored(name: str, tensor: Any) -> dict[str, Any]:
    """A tensor of a state dict; of a coded weight what it is made of, by the names the module had for it."""
    if not isinstance(tensor, CodedWeight):
        return {name: tensor}
    path = name.rpartition(".")[0]
    parts = tensor.coding.stored(tensor.parts)
    return {f"{path}.{part}".lstrip("."): values for part, values in parts.items()}


def adopt(model: nn.Module) -> bool:
    """Give every linear of `model` whose weight is kept in a known form a `CodedWeight`, in place; whether
    there was any. The model computes what it computed. PlanError, with a module's path, for what can't be."""
    found = _found(model)
    for module, told in found.items():
        for name in told.attributes:
            del vars(module)[name]
        for name in told.parts:
            module._parameters.pop(name, None)
            module._buffers.pop(name, None)
        parts = {name: part.detach() for name, part in told.parts.items()}
        shape = (module.out_features, module.in_features)
        weight = CodedWeight(parts, told.coding, shape, told.dtype)
        if type(module).forward is not nn.Linear.forward:
            _made_plain(module)
        module.weight = nn.Parameter(weight, requires_grad=False)
    if found:
        let_go(model)
    return bool(found)


def _made_plain(module: Any) -> None:
    """Of a package's subclass an nn.Linear: its forward is the weight's product now, and what it does to a
    state dict before it is loaded is done as well (`put_together`)."""
    package = type(module).__module__.split(".")[0]
    hooks = module._load_state_dict_pre_hooks
    for key, hook in list(hooks.items()):
        if getattr(hook, "hook", hook).__module__.split(".")[0] == package:
            del hooks[key]
    module.__class__ = nn.Linear


def adopted(model: nn.Module) -> nn.Module:
    """`model` itself where nothing is to `adopt`; else a copy that shares its tensors, with it done."""
    if not _found(model):
        return model
    shared: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    copied = copy.deepcopy(model, shared)
    adopt(copied)
    return copied


def _found(model: nn.Module) -> dict[Any, Found]:
    floating = (p.dtype for p in model.parameters() if p.is_floating_point() and p.dtype.itemsize > 1)
    dtype = next(floating, torch.get_default_dtype())
    return {m: told for path, m in model.named_modules() if (told := found_in(path, m, dtype)) is not None}
