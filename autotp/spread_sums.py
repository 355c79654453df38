"""Sums, means and extremes over a gradient that is spread over ranks, and what can't be had of it.

An element that several slots hold counts once, by its weight. What looks across elements in any other way
(a product of matrices, a mean along one dim, a sort, a row) would see one rank's part and give a number that
looks right. So what is not known to work by element, or to ask for no element at all, is an error, which
names the way out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .comm import Comm
from .errors import ShardStateError
from .layouts import ParamLayout


@dataclass(frozen=True)
class Spread:
    """Where the elements of a gradient are.

    comms: the dims of the mesh over which they are spread, each rank having a part. weights: None, or
    1 / (slots that hold the element), to broadcast. stages: None, or the pipeline's ranks, each with
    gradients of its own, and whether this rank's counts (of what several stages hold, the first's does).
    """
    comms: tuple[Comm, ...] = ()
    weights: Tensor | None = None
    stages: tuple[Comm, bool] | None = None

    def moved(self, shape: torch.Size, func: Any, args: Any, kwargs: Any) -> Spread:
        """Of the same elements in the places that `func` gives them."""
        weights = self.weights
        if weights is not None:
            weights = func(weights.expand(shape).contiguous(), *args, **kwargs)
        return replace(self, weights=weights)

    @classmethod
    def over(cls, comm: Comm, layout: ParamLayout | None, once: bool, dim: int) -> Spread:
        """What tensor parallelism makes of a parameter of `dim` dims."""
        if once:
            return cls((comm,), torch.full((1,) * dim, float(comm.rank == 0), dtype=torch.float64))
        if layout is None:
            return cls()
        return cls((comm,), layout.weights(comm.rank) if layout.repeats else None)


Answer = Callable[[Tensor, Spread], Tensor]


def total(local: Tensor, spread: Spread) -> Tensor:
    """The sum of all elements, each once; integers and bools are counted in int64."""
    wide = local if local.is_floating_point() or local.is_complex() else local.long()
    if spread.weights is not None:
        summed = (wide * spread.weights.to(wide.device)).sum()
        wide = summed.to(wide.dtype) if wide.is_floating_point() or wide.is_complex() else summed
    return _over_ranks(wide.sum(), spread, "sum").to(local.sum().dtype)


def mean(local: Tensor, spread: Spread) -> Tensor:
    return total(local, spread) / total(torch.ones_like(local), spread)


def largest(local: Tensor, spread: Spread) -> Tensor:
    return _over_ranks(local.amax() if local.numel() else _limit(local, "min"), spread, "max")


def smallest(local: Tensor, spread: Spread) -> Tensor:
    return _over_ranks(local.amin() if local.numel() else _limit(local, "max"), spread, "min")


def _limit(local: Tensor, which: str) -> Tensor:
    """What a rank without elements brings: the least, or the most, that the dtype holds."""
    kind = torch.finfo if local.is_floating_point() else torch.iinfo
    return local.new_full((), getattr(kind(local.dtype), which))


def any_of(local: Tensor, spread: Spread) -> Tensor:
    return _over_ranks(local.any().int(), spread, "max").bool()


def all_of(local: Tensor, spread: Spread) -> Tensor:
    return _over_ranks(local.all().int(), spread, "min").bool()


def _over_ranks(value: Tensor, spread: Spread, op: str) -> Tensor:
    for comm in spread.comms:
        value = comm.all_reduce(value.reshape(1), op)[0]
    return value


# By the name of torch's function or method: of all elements at once.
ANSWERS: dict[str, Answer] = {
    "sum": total,
    "mean": mean,
    "max": largest,
    "amax": largest,
    "min": smallest,
    "amin": smallest,
    "any": any_of,
    "all": all_of,
}
# By element, as functions, methods, in place (`add_`) and of lists (`_foreach_add`).
BY_ELEMENT = frozenset(
    "abs absolute acos acosh add addcdiv addcmul angle arccos arccosh arcsin arcsinh arctan arctan2 "
    "arctanh asin asinh atan atan2 atanh bernoulli bfloat16 bitwise_and bitwise_not bitwise_or "
    "bitwise_xor bool byte cdouble ceil cfloat char clamp clamp_max clamp_min clip clone conj "
    "conj_physical contiguous copy copysign cos cosh cpu cuda deg2rad detach div divide double elu "
    "empty_like eq erf erfc erfinv exp exp2 expm1 exponential fill fix float float_power floor "
    "floor_divide fmax fmin fmod frac full_like ge gelu greater greater_equal gt half hardshrink "
    "hardsigmoid hardswish hardtanh heaviside hypot i0 int isclose isfinite isinf isnan isneginf "
    "isposinf isreal ldexp le leaky_relu lerp less less_equal lgamma log log10 log1p log2 logaddexp "
    "logical_and logical_not logical_or logical_xor logit logsigmoid long lt masked_fill maximum "
    "minimum mish mul multiply nan_to_num ne neg negative nextafter normal not_equal ones_like positive "
    "pow rad2deg rand_like randint_like randn_like random reciprocal relu relu6 remainder requires_grad "
    "resolve_conj resolve_neg round rsqrt rsub selu sgn short sigmoid sign signbit silu sin sinc sinh "
    "softplus softshrink sqrt square sub subtract tan tanh threshold to true_divide trunc type_as "
    "uniform where xlogy zero zeros_like".split()
)
_OPERATORS = frozenset(
    f"__{kind}{name}__"
    for name in "add sub mul truediv div floordiv mod pow and or xor".split()
    for kind in ("", "r", "i")
) | frozenset("__neg__ __pos__ __abs__ __invert__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__".split())
# These ask for no element, or put the tensor elsewhere as it is.
FACTS = frozenset(
    "size dim ndimension numel nelement stride storage_offset storage untyped_storage _typed_storage "
    "data_ptr element_size get_device is_contiguous is_floating_point is_complex is_signed is_conj "
    "is_neg is_inference is_pinned is_shared is_same_size is_set_to is_coalesced coalesce indices "
    "values _indices _values _nnz sparse_dim dense_dim type result_type can_cast new_zeros new_ones "
    "new_empty new_full new_tensor new_empty_strided set_ resize_ resize_as_ as_subclass pin_memory "
    "share_memory_ record_stream retain_grad register_hook register_post_accumulate_grad_hook backward "
    "view_as_real __len__ __repr__ __format__ __hash__ __dir__ __deepcopy__ __reduce_ex__ __reduce__ "
    "__setstate__".split()
)
# The same elements in other places.
RESHAPES = frozenset(
    "view reshape flatten ravel t T mT transpose permute movedim unsqueeze squeeze view_as reshape_as".split()
)


def name_of(func: Any) -> str:
    """`sum` of torch.sum and Tensor.sum; `T` of the property."""
    name = getattr(func, "__name__", "")
    return getattr(getattr(func, "__self__", None), "__name__", name) if name == "__get__" else name


def by_element(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function of this name gives (or changes) each element by those in its place."""
    if name in ("max", "min"):  # of two tensors
        return isinstance(args[1] if len(args) > 1 else kwargs.get("other"), Tensor)
    if name == "__setitem__":  # x[mask] = value, with a mask for each element
        return isinstance(args[1], Tensor) and args[1].dtype == torch.bool and args[1].shape == args[0].shape
    plain = name.removeprefix("_foreach_")
    return plain in BY_ELEMENT or plain.removesuffix("_") in BY_ELEMENT or name in _OPERATORS


def asks_nothing(func: Any, name: str) -> bool:
    """Whether `func` gives facts about a tensor (and properties are), or is a kernel of an optimizer that
    works by element, or of a GradScaler."""
    is_property = getattr(func, "__name__", "") in ("__get__", "__set__", "__delete__")
    return is_property or name in FACTS or name.startswith(("_fused_", "_amp_"))


def over_all(dims: Any, n: int) -> bool:
    """Whether `dims` (None, an int or several) are all of `n` dims."""
    if dims is None or (isinstance(dims, Sequence) and not dims):
        return True
    asked = {dims} if isinstance(dims, int) else set(dims)
    return len({d % max(n, 1) for d in asked}) == n


def refuse(name: str) -> None:
    """Raise ShardStateError for a function that needs the whole gradient."""
    raise ShardStateError(
        f"{name} of a gradient that is spread over ranks: each rank has only a part of it, and would get "
        "another number than the whole model's. Sums, means, extremes and norms over all of it are the "
        "whole's, and elementwise functions work; for more, gather it (autotp.state.gather(grad, layout, "
        "comm)). An optimizer that looks across a whole weight (Adafactor, Muon, LBFGS, Shampoo) can't "
        "step a part: use one that works by element (AdamW, SGD, Lion), or keep the weights that it steps"
        " whole with a policy."
    )
