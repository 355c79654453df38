"""Gradients of a sharded model: corrected where ranks hold shares of them, and with the norms of the whole
model.

`p.grad` is a local tensor to every optimizer that works by element. What its class, `ShardGrad`, changes is
what looks across elements: norms, sums, means and extremes of all of them, and of what is made of them by
element, give the number that a single process would get, on every rank; what needs the whole is refused
(`spread_sums.py`).
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .comm import Comm
from .errors import ShardStateError
from .layouts import ParamLayout, put, take
from .quantised import is_packed
from .spread_sums import ANSWERS, RESHAPES, Spread, asks_nothing, by_element, name_of, over_all, refuse


# ---------------------------------------------------------------- corrections, as hooks of the parameter
@dataclass(frozen=True)
class CorrectGrad:
    """A parameter's tensor hook: from this rank's share of the gradient to the gradient.

    `how`: "summed" (a replicated parameter, of which each rank computed a share), "slots" (rows held more
    than once: summed over their slots). `once`: the value is rank 0's and zero elsewhere, so the others'
    gradient is zero.
    """
    comm: Comm
    how: str
    layout: ParamLayout | None = None
    once: bool = False

    def __call__(self, grad: Tensor) -> Tensor:
        with torch.no_grad():
            if self.how == "summed":
                grad = self.comm.all_reduce(grad)
            elif self.how == "slots":
                assert self.layout is not None
                full = grad.new_zeros(self.layout.shape)
                put(full, grad, self.layout, self.comm.rank, add=True)
                grad = take(self.comm.all_reduce(full), self.layout, self.comm.rank).contiguous()
            return torch.zeros_like(grad) if self.once and self.comm.rank > 0 else grad


@dataclass(frozen=True)
class MarkGrad:
    """A parameter's post-accumulate hook: gives `p.grad` the norms of the whole."""
    spread: Spread

    def __call__(self, param: Tensor) -> None:
        if param.grad is not None and not isinstance(param.grad, (ShardGrad, ShardedGrad)):
            param.grad = marked(param.grad, self.spread)


def marked(x: Tensor, spread: Spread) -> Tensor:
    """`x`, sharing its memory, with the norms of the whole."""
    return ShardedGrad.of(x, spread) if isinstance(x, DTensor) else ShardGrad.of(x, spread)


def spread_of(param: Tensor) -> Spread | None:
    """Where the elements of a watched parameter are; None where all are here."""
    hooks = (param._post_accumulate_grad_hooks or {}).values()
    return next((hook.spread for hook in hooks if isinstance(hook, MarkGrad)), None)


def watch(param: Tensor, comm: Comm, layout: ParamLayout | None, how: str, once: bool,
          mark: bool = True) -> None:
    """Install the hooks a parameter needs, once: a second call finds them and does nothing.

    how: `own` or `whole` (the gradient is right as it is), `summed`, `slots`; see `CorrectGrad`. mark: False
    where its gradient is not the one that users see.
    """
    if is_packed(param) or not (param.is_floating_point() or param.is_complex()):
        return
    frozen = not param.requires_grad
    if frozen:
        param.requires_grad_()                   # only then are hooks accepted; they stay afterwards
    if (how in ("summed", "slots") or once) and not _has(param._backward_hooks, CorrectGrad):
        param.register_hook(CorrectGrad(comm, how, layout, once))
    if mark and (layout is not None or once) and not _has(param._post_accumulate_grad_hooks, MarkGrad):
        param.register_post_accumulate_grad_hook(MarkGrad(Spread.over(comm, layout, once, param.dim())))
    if frozen:
        param.requires_grad_(False)


def _has(hooks: Any, kind: type) -> bool:
    return any(isinstance(hook, kind) for hook in (hooks or {}).values())


# ---------------------------------------------------------------- norms
class ShardGrad(Tensor):
    """One rank's part of a gradient. Norms and sums over all of it are those of the whole gradient, each
    element counted once, and collective: every rank must call them. What is made of it element by element is
    a ShardGrad too; what looks across elements otherwise raises ShardStateError.
    """
    spread: Spread

    @staticmethod
    def of(grad: Tensor, spread: Spread) -> ShardGrad:
        """`grad`, sharing its memory, as a ShardGrad."""
        marked = grad.as_subclass(ShardGrad)
        marked.spread = spread
        return marked

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _answer(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardGrad:
        return ShardGrad.of(plain(self).clone(), self.spread)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain(self).__reduce_ex__(protocol)          # saved as a plain tensor: peers cannot be saved


class ShardedGrad(DTensor):
    """The same for gradients that FSDP2 cuts over copies of the model too: a DTensor in all but its norms."""
    spread: Spread

    @staticmethod
    def of(grad: DTensor, spread: Spread) -> ShardedGrad:
        """`grad`, sharing its memory, as a ShardedGrad."""
        # A DTensor's own parts: torch has no public way to give it another class.
        marked: Any = DTensor.__new__(ShardedGrad, grad._local_tensor, grad._spec, requires_grad=False)
        marked.spread = spread
        return marked

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _answer(func, args, kwargs or {})


def _answer(func: Any, args: Any, kwargs: Any) -> Any:
    """A function of marked gradients: norms and sums of the whole, else what it is of the elements here."""
    norm: Callable[..., Any] | None = _NORMS.get(func)
    if norm is not None:
        asked = norm(*args, **kwargs)
        if asked is not None:
            return asked()
    name = name_of(func)
    of = _first_marked(args, kwargs)
    spread = Spread() if of is None else of.spread
    whole = of is None or not spread.comms       # all of it is here
    elementwise = by_element(name, args, kwargs)
    if name in ANSWERS and of is not None and not elementwise:
        return _of_all(name, of, args, kwargs)
    if not (whole or elementwise or name in RESHAPES or asks_nothing(func, name)):
        refuse(name)
    with torch._C.DisableTorchFunctionSubclass():
        result = func(*args, **kwargs)
        if func in _FINDS_INF:
            _share_found_inf(*args)
        if of is None:
            return result
        if elementwise and isinstance(args[0], (list, tuple)):
            lists = [x for x in args if isinstance(x, (list, tuple))]
            if name.endswith("_"):
                _mark_buffers(args[0], lists)
                return result
            return [_marked(r, _first_marked(at, {})) for r, *at in zip(result, *lists, strict=True)]
        if any(result is x for x in (*args, *kwargs.values())):
            if elementwise and type(result) is Tensor:
                _mark_buffers([result], [[of]])
            return result                        # changed in place
        if name in RESHAPES and isinstance(of, ShardGrad):
            return ShardGrad.of(result, spread.moved(of.shape, func, args[1:], kwargs))
        return _marked(result, of, strict=not whole and elementwise)


def _first_marked(args: Any, kwargs: Any) -> Any:
    """The first marked gradient among the arguments, and in lists among them."""
    for x in (*args, *kwargs.values()):
        if isinstance(x, _MARKED):
            return x
        if isinstance(x, (list, tuple)) and (of := _first_marked(x, {})) is not None:
            return of
    return None


def _mark_buffers(changed: Sequence[Any], lists: Sequence[Sequence[Any]]) -> None:
    """What was changed in place by gradients (sums of them, say) gets the norms of the whole too."""
    for x, *operands in zip(changed, *lists, strict=True):
        if type(x) is Tensor and not x.requires_grad:
            of = _first_marked(operands, {})
            if isinstance(of, ShardGrad) and of.shape == x.shape:
                x.__class__ = ShardGrad
                x.spread = of.spread             # type: ignore[attr-defined]


def _marked(result: Any, of: Any, strict: bool = False) -> Any:
    """`result` with the marks of the gradient that it was made of, if of its shape. strict: else refused."""
    if isinstance(of, ShardGrad) and type(result) is Tensor and result.shape == of.shape:
        return ShardGrad.of(result, of.spread)
    if isinstance(of, ShardedGrad) and type(result) is DTensor:
        if result.shape == of.shape and result.placements == of.placements:
            return ShardedGrad.of(result, of.spread)
    if strict and isinstance(result, Tensor) and result.shape != of.shape:
        refuse(f"a tensor of another shape, {tuple(result.shape)},")
    return result


def _of_all(name: str, x: Tensor, args: Any, kwargs: Any) -> Tensor:
    """`name` of all elements of the whole; ShardStateError where it is along some dims, or no such sum."""
    rest = args[1:]
    dims = kwargs.get("dim", kwargs.get("axis", rest[0] if rest else None))
    if name not in ANSWERS or isinstance(dims, Tensor) or not over_all(dims, x.dim()):
        refuse(name)
    spread: Spread = x.spread  # type: ignore[attr-defined]
    with torch.no_grad():
        local = x._local_tensor if isinstance(x, ShardedGrad) else plain(x)
        asked = kwargs.get("dtype")
        result = ANSWERS[name](local if asked is None else local.to(asked), spread)
    return result.reshape((1,) * x.dim()) if kwargs.get("keepdim") else result


class StageNorm(Tensor):
    """Norms of a pipeline stage's gradients. Their norm is that of all stages' gradients, and collective.

    comm: the stages' ranks. counts: float64 like the norms: 0 for what another stage counts.
    """
    comm: Comm
    counts: Tensor

    @staticmethod
    def of(norm: Tensor, comm: Comm, counts: Tensor) -> StageNorm:
        marked = norm.as_subclass(StageNorm)
        marked.comm, marked.counts = comm, counts
        return marked

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, kwargs = args[0] if args else None, kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func is Tensor.to and isinstance(given, StageNorm):
                moved = func(given.as_subclass(Tensor), *args[1:], **kwargs)
                return StageNorm.of(moved, given.comm, given.counts)
            if func is torch.stack and given and all(isinstance(norm, StageNorm) for norm in given):
                values = torch.stack([norm.as_subclass(Tensor) for norm in given])
                return StageNorm.of(values, given[0].comm, torch.stack([norm.counts for norm in given]))
            if func is torch.linalg.vector_norm and isinstance(given, StageNorm) and given.dim() == 1:
                return given._of_all_stages(float(args[1] if len(args) > 1 else kwargs.get("ord", 2.0)))
            result = func(*args, **kwargs)
            return result.as_subclass(Tensor) if isinstance(result, StageNorm) else result

    def _of_all_stages(self, ord: float) -> Tensor:
        own = self.as_subclass(Tensor).double()[self.counts.to(self.device) > 0]
        local = torch.linalg.vector_norm(own, ord) if len(own) else own.new_zeros(())
        return _combine(local.reshape(1), ord, self.comm)[0].to(self.dtype)


def plain(x: Tensor) -> Tensor:
    """The local tensor under a ShardGrad (sharing its memory), any other tensor as it is."""
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(Tensor) if isinstance(x, ShardGrad) else x


def global_norms(tensors: Sequence[Tensor], ord: float = 2.0,
                 dtype: torch.dtype | None = None) -> list[Tensor]:
    """The `ord`-norm of each tensor, of the whole gradient for ShardGrads: one all-reduce for the list (per
    comm).

    As torch: each norm is a 0-dim tensor of the tensor's dtype (or `dtype`). Sums are in float64.
    """
    with torch.no_grad():
        norms = [_local_norm(t, ord, dtype) for t in tensors]
        spreads = [getattr(t, "spread", Spread()) for t in tensors]
        by_comms: dict[tuple[int, ...], list[int]] = {}
        for i, spread in enumerate(spreads):
            if spread.comms:
                by_comms.setdefault(tuple(map(id, spread.comms)), []).append(i)
        for indices in by_comms.values():
            device = norms[indices[0]].device
            values = torch.stack([norms[i].double().to(device) for i in indices])
            for comm in spreads[indices[0]].comms:
                values = _combine(values, ord, comm)
            for i, value in zip(indices, values, strict=True):
                norms[i] = value.to(norms[i].device, dtype or tensors[i].real.dtype)
        for i, spread in enumerate(spreads):
            if spread.stages is not None:
                comm, counts = spread.stages
                norms[i] = StageNorm.of(norms[i], comm, torch.tensor(float(counts), dtype=torch.float64))
    return norms


def _local_norm(t: Tensor, ord: float, dtype: torch.dtype | None) -> Tensor:
    """The norm of this rank's elements, each weighted by 1 / (slots that hold it), in float32 at least."""
    if not isinstance(t, (ShardGrad, ShardedGrad)):
        return torch.linalg.vector_norm(t, ord, dtype=dtype)
    local = t._local_tensor if isinstance(t, ShardedGrad) else plain(t)
    wide = torch.promote_types(local.dtype, torch.float32)
    weights = t.spread.weights
    if local.numel() == 0:
        return local.new_zeros((), dtype=wide)
    if weights is None or math.isinf(ord):
        return torch.linalg.vector_norm(local.to(wide), ord)
    weights = weights.to(local.device)
    if ord == 0:
        return ((local != 0) * weights).sum()
    return torch.linalg.vector_norm(local.to(wide) * weights.to(wide) ** (1 / ord), ord)


def _combine(norms: Tensor, ord: float, comm: Comm) -> Tensor:
    """The norms of the whole from every rank's norms (float64, one all-reduce). NaN stays NaN."""
    if math.isinf(ord):
        sign = math.copysign(1.0, ord)
        nan = norms.isnan()                      # backends differ in what the maximum of a NaN is
        found = comm.all_reduce(torch.cat([torch.where(nan, -math.inf, sign * norms), nan.double()]), "max")
        top, any_nan = found.chunk(2)
        return torch.where(any_nan > 0, math.nan, sign * top)
    if ord == 0:
        return comm.all_reduce(norms)
    return comm.all_reduce(norms ** ord) ** (1 / ord)


_MARKED = (ShardGrad, ShardedGrad)


# What is asked of each norm function: a callable that answers, or None when it is not over the whole tensor.
def _vector_norm(x: Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, *,
                 dtype: torch.dtype | None = None, out: Any = None) -> Any:
    if not isinstance(x, _MARKED) or not over_all(dim, x.dim()):
        return None
    return lambda: _shaped(global_norms([x], float(ord), dtype)[0], x, keepdim)


def _tensor_norm(input: Tensor, p: Any = "fro", dim: Any = None, keepdim: bool = False, out: Any = None,
                 dtype: torch.dtype | None = None) -> Any:
    if not isinstance(input, _MARKED) or not over_all(dim, input.dim()):
        return None
    return lambda: _shaped(global_norms([input], _order(p), dtype)[0], input, keepdim)


def _linalg_norm(A: Tensor, ord: Any = None, dim: Any = None, keepdim: bool = False, *, out: Any = None,
                 dtype: torch.dtype | None = None) -> Any:
    if not isinstance(A, _MARKED) or not over_all(dim, A.dim()):
        return None
    if ord not in (None, "fro") and A.dim() > 1:
        _order("nuc")
    return lambda: _shaped(global_norms([A], 2.0 if ord is None else _order(ord), dtype)[0], A, keepdim)


def _foreach_norm(tensors: Any, ord: float = 2, dtype: torch.dtype | None = None) -> Any:
    return lambda: global_norms(list(tensors), float(ord), dtype)


def _order(p: Any) -> float:
    if p in (None, "fro"):
        return 2.0
    if isinstance(p, str):
        raise ShardStateError("a matrix norm of a sharded gradient needs all of it on one rank: gather it "
                              "with autotp.state.gather(grad, layout, comm), then ask torch.")
    return float(p)


def _shaped(norm: Tensor, x: Tensor, keepdim: bool) -> Tensor:
    return norm.reshape((1,) * x.dim()) if keepdim else norm


_NORMS: dict[Any, Callable[..., Any]] = {
    torch.linalg.vector_norm: _vector_norm, torch.norm: _tensor_norm, Tensor.norm: _tensor_norm,
    torch.linalg.norm: _linalg_norm, torch._foreach_norm: _foreach_norm,
}
_FINDS_INF = {torch._amp_foreach_non_finite_check_and_unscale_}


def _share_found_inf(grads: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """A GradScaler skips the step on all ranks or on none."""
    spreads = [g.spread for g in grads if isinstance(g, _MARKED)]
    comms = [comm for spread in spreads for comm in spread.comms]
    comms += [spread.stages[0] for spread in spreads if spread.stages is not None]
    for comm in dict.fromkeys(comms):
        found_inf.copy_(comm.all_reduce(found_inf, "max"))
