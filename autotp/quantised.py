"""Quantised weights: what of them can be cut, and what is refused.

A weight may be a tensor subclass that holds ints and scales and says so by torch's own protocol
(`__tensor_flatten__`: torchao's do, and `coded.py` makes such of what others keep). It is cut by its own
slicing. No format is known here: whether parts cut so give the product of the whole is tried for every shape,
on random numbers in the weight's own form. A cut inside of a group of scales, a packing that pairs what is
cut apart, activations that are quantised by the row all show there. Quantised weights of any other form are
refused: nothing says how their parts belong together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .errors import CheckpointError, PlanError
from .layouts import DimLayout, Layout, ParamLayout, take_dim
from .lazy import LazyTensor, read

ENOUGH = 1024  # rows or columns that a trial has where they are not cut
SAME = 1e-4  # of the product's norm: float32 rounding is far below, one wrong scale far above


def is_packed(tensor: Any) -> bool:
    """Whether it is a tensor made of others by a class of its own, as quantised weights are."""
    return is_traceable_wrapper_subclass(tensor) and not isinstance(tensor, DTensor)


def components(tensor: Tensor) -> dict[str, Tensor]:
    """What a packed tensor is made of, down to plain tensors, by dotted names."""
    found: dict[str, Tensor] = {}
    for name in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
        inner = getattr(tensor, name)
        inside = components(inner) if is_packed(inner) else {"": inner}
        found |= {f"{name}.{rest}".rstrip("."): part for rest, part in inside.items()}
    return found


def rebuilt(tensor: Any, make: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """A packed tensor of the same form whose components are `make` of the old ones. dtype: what it says of
    itself instead."""
    names, context = tensor.__tensor_flatten__()
    inner = {}
    for name in names:
        old = getattr(tensor, name)
        inner[name] = rebuilt(old, make, dtype) if is_packed(old) else make(old)
    if dtype is not None:
        context = _with_dtype(context, tensor.dtype, dtype)
    return type(tensor).__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())


def _with_dtype(context: Any, old: torch.dtype, new: torch.dtype) -> Any:
    if isinstance(context, dict):
        changed = {key: new if value is old else value for key, value in context.items()}
        return {k: v.computing_in(new) if hasattr(v, "computing_in") else v for k, v in changed.items()}
    if isinstance(context, (list, tuple)):
        return type(context)(new if value is old else value for value in context)
    return context


def take_packed(tensor: Tensor, layout: ParamLayout, rank: int) -> Tensor:
    """This rank's part of a packed tensor, in memory of its own (lazy components stay lazy)."""
    with torch.no_grad():
        part = tensor.detach()
        for dim, ranges in layout.dims.items():
            part = _cut(part, dim, ranges[rank])
        return rebuilt(part, lambda inner: inner.clone(memory_format=torch.contiguous_format))


def _cut(tensor: Tensor, dim: int, ranges: DimLayout) -> Tensor:
    if len(ranges) <= 1:
        return take_dim(tensor, dim, ranges)
    parts = [take_dim(tensor, dim, (one,)) for one in ranges]
    whole = components(tensor)
    pieces = [components(part) for part in parts]
    joined: dict[int, Tensor] = {}
    for name, first in pieces[0].items():
        cut = [d for d, n in enumerate(whole[name].shape) if first.shape[d] != n]
        joined[id(first)] = torch.cat([p[name] for p in pieces], cut[0]) if cut else first
    names, context = parts[0].__tensor_flatten__()  # type: ignore[attr-defined]
    inner = {name: joined[id(getattr(parts[0], name))] for name in names}
    shape = [sum(b - a for a, b in ranges) if d == dim else n for d, n in enumerate(tensor.shape)]
    strides = torch.empty(shape, device="meta").stride()
    return type(tensor).__tensor_unflatten__(inner, context, torch.Size(shape), strides)  # type: ignore[attr-defined]


def refuse_packed(model: nn.Module, what: str, instead: str) -> None:
    """CheckpointError where `model` holds quantised weights, which `what` can't do."""
    for name, param in model.named_parameters():
        if is_packed(param):
            raise CheckpointError(
                f"{what} can't handle quantised weights yet ({name} is a {type(param).__name__}). {instead}"
            )


def put_in(param: Tensor, part: Tensor) -> None:
    """Make the parameter `part`, keeping the object: what holds it, or is tied to it, sees the change."""
    made = nn.Parameter(part, requires_grad=False)
    vars(made).update({k: v for k, v in vars(param).items() if k not in vars(made)})
    torch.utils.swap_tensors(param, made)


def outline(tensor: Tensor) -> Tensor:
    """The same form without values, on meta."""
    return rebuilt(tensor.detach(), lambda inner: torch.empty_like(inner, device="meta"))


def laid_out(whole: Tensor, layout: ParamLayout) -> dict[str, ParamLayout]:
    """How each component of a packed tensor (its outline will do) lies over the ranks when it is cut so."""
    found = {}
    parts = [components(take_packed(whole, layout, rank)) for rank in range(_rank_count(layout))]
    for name, inner in components(whole).items():
        shape = tuple(inner.shape)
        dims = {d for part in parts for d, n in enumerate(part[name].shape) if n != shape[d]}
        ((dim, ranks),) = layout.dims.items()
        scale = [shape[d] / layout.shape[dim] for d in dims]
        found[name] = ParamLayout(shape, {
            d: tuple(tuple((round(a * f), round(b * f)) for a, b in ranges) for ranges in ranks)
            for d, f in zip(dims, scale, strict=True)
        })  # fmt: skip
    return found


def gather_packed(
    local: Tensor, whole: Tensor, layout: ParamLayout, gather: Callable[[Tensor, ParamLayout], Tensor]
) -> Tensor:
    """The whole packed tensor from each rank's part. whole: its outline. gather: of one plain tensor."""
    mine, laid = components(local), laid_out(whole, layout)
    names = {id(inner): name for name, inner in components(whole).items()}

    def full(inner: Tensor) -> Tensor:
        name = names[id(inner)]
        return gather(mine[name], laid[name]) if laid[name].dims else mine[name]

    return rebuilt(whole, full)


def _rank_count(layout: ParamLayout) -> int:
    return len(next(iter(layout.dims.values())))


# ---------------------------------------------------------------- what may be cut
@dataclass
class Packed:
    """The packed parameters of a model, by every name, and what trying their parts has shown."""

    weights: dict[str, Tensor] = field(default_factory=dict)
    tried: dict[Any, str | None] = field(default_factory=dict)
    empty: dict[str, set[str]] = field(default_factory=dict)  # the components that are zero, by weight

    @classmethod
    def of(cls, model: nn.Module) -> Packed:
        """PlanError, with the parameter's name, for quantised weights of other forms."""
        found = cls()
        for name, param in model.named_parameters(remove_duplicate=False):
            if is_packed(param):
                found.weights[name] = param
        _refuse_others(model, found.weights)
        return found

    def unfit(self, name: str, dims: Mapping[int, Layout]) -> str | None:
        """Why the weight can't be cut so; None where it can, or is not packed."""
        weight = self.weights.get(name)
        if weight is None:
            return None
        if name not in self.empty:
            self.empty[name] = _empty(weight)
        empty = self.empty[name]
        kind = {n: (tuple(t.shape), t.dtype, n in empty) for n, t in components(weight).items()}
        context = weight.__tensor_flatten__()[1]  # type: ignore[attr-defined]
        key = (type(weight), repr(context), repr(kind), tuple(dims.items()))
        if key not in self.tried:
            self.tried[key] = _tried(weight, dims, empty)
        why = self.tried[key]
        return None if why is None else f"{name} is quantised ({type(weight).__name__}): {why}"


def _empty(weight: Tensor) -> set[str]:
    """The small components that are all zero, as the zero points of a symmetric quantisation are."""
    small = {n: t for n, t in components(weight).items() if t.numel() * 8 <= weight.numel()}
    return {n for n, t in small.items() if not bool((read(t) if isinstance(t, LazyTensor) else t).any())}


def _tried(weight: Tensor, dims: Mapping[int, Layout], empty: set[str]) -> str | None:
    """Whether the products of parts of such a weight make the product of the whole: why not, or None.

    empty: the components that are zero in all such weights; the others get random values."""
    if len(dims) != 1 or weight.dim() != 2:
        return "it can only be cut along one of two dims"
    ((dim, layout),) = dims.items()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        weight = _shortened(weight.detach(), 1 - dim)
        try:
            zero = {id(t) for n, t in components(weight).items() if n in empty}
            whole = rebuilt(
                weight,
                lambda old: _zero(old) if id(old) in zero else _random(old, generator),
                dtype=torch.float32,
            )
            x = torch.randn(3, weight.shape[1], generator=generator)
            x[range(3), torch.randint(weight.shape[1], (3,), generator=generator)] *= 20
            x = x.to(next(iter(components(whole).values())).device)
            product = F.linear(x, whole)
            parts = [
                take_packed(whole, ParamLayout(tuple(weight.shape), {dim: layout}), rank)
                for rank in range(len(layout))
            ]
            if any(type(part) is not type(weight) for part in parts):
                return "its class gives parts of another class"
            if dim == 0:
                got = [F.linear(x, part) for part in parts]
                want = [take_dim(product, -1, ranges) for ranges in layout]
            else:
                pairs = zip(layout, parts, strict=True)
                got = [sum(F.linear(take_dim(x, -1, ranges), part) for ranges, part in pairs)]  # type: ignore[list-item]
                want = [product]
            wrong = max(float((g - w).norm() / product.norm()) for g, w in zip(got, want, strict=True))
        except Exception as error:  # whatever it is, it is no proof
            said = (str(error) or type(error).__name__).splitlines()[0]
            return f"a part of it can't be tried ({said})"
    if not wrong <= SAME:
        along = "outputs" if dim == 0 else "inputs"
        return (
            f"parts along its {along} give other products than the whole, by {wrong:.1%} "
            "(cut inside of a group with one scale, or activations are quantised by the row)"
        )
    return None


def _shortened(weight: Tensor, dim: int) -> Tensor:
    """A weight of the same form that is shorter in `dim`, which is not to be cut; itself where its class
    can't make one."""
    if weight.shape[dim] <= ENOUGH:
        return weight
    try:
        part = weight.narrow(dim, 0, ENOUGH)
        return part if type(part) is type(weight) else weight
    except Exception:  # of any kind: its slicing is its own affair
        return weight


def _zero(old: Tensor) -> Tensor:
    return torch.zeros(old.shape, dtype=old.dtype, device=old.device)


def _random(old: Tensor, generator: torch.Generator) -> Tensor:
    """Random values of a component's shape and dtype, on its device."""
    shape, device = tuple(old.shape), old.device
    if (
        old.dtype.is_floating_point
    ):  # of one byte: quantised values, unless they are powers of two; else scales
        values = torch.randn(shape, generator=generator)
        if old.dtype.itemsize > 1 or old.dtype == getattr(torch, "float8_e8m0fnu", None):
            values = values.abs() + 0.5
        return values.to(old.dtype).to(device)
    if old.dtype == torch.bool:
        return (torch.rand(shape, generator=generator) < 0.5).to(device)
    limits = torch.iinfo(old.dtype)
    low, high = max(limits.min, -(2**31)), min(limits.max, 2**31 - 1)
    narrow = old.dtype in (torch.int8, torch.uint8, torch.int32)  # others are drawn in 64 bits
    drawn = torch.randint(low, high, shape, generator=generator, dtype=old.dtype if narrow else torch.int64)
    return drawn.to(old.dtype).to(device)


def _refuse_others(model: nn.Module, packed: Mapping[str, Tensor]) -> None:
    """PlanError where weights are quantised in a form that says nothing of its parts."""
    told: Any = getattr(getattr(model, "config", None), "quantization_config", None)
    stated = bool(told) and not packed
    for path, module in model.named_modules():
        own = [(n, p) for n, p in module._parameters.items() if p is not None and not is_packed(p)]
        if stated:
            own += [(n, b) for n, b in module._buffers.items() if b is not None]
        for name, tensor in own:
            narrow = tensor.dtype.itemsize == 1 or tensor.dtype == torch.int32
            if tensor.dim() < 2 or not narrow or tensor.dtype == torch.bool:
                continue
            method = told.get("quant_method") if isinstance(told, dict) else getattr(told, "quant_method", "")
            how = f"by {getattr(method, 'value', method)}, " if method else ""
            where, package = f"{path}.{name}".lstrip("."), type(module).__module__.split(".")[0]
            kind = type(module).__name__
            raise PlanError(
                f"{where} is quantised ({how}{tensor.dtype} {list(tensor.shape)}, in a {kind} of {package}): "
                "nothing says which scales belong to which part, so it can't be cut. Load the model "
                "unquantised (or dequantised: model.dequantize()), or as torchao or compressed-tensors do it."
            )
