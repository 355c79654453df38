"""Backward in two parts, for zero-bubble schedules: gradients of inputs now, those of weights later.

Penghui Qi et al., "Zero Bubble Pipeline Parallelism" (2023). The products with a weight (nn.Linear and what
calls it so, transformers' Conv1D) take nearly all of backward; theirs are put off. The gradients of all other
parameters are made at once, and so are those of what is checkpointed: it runs again in backward, out of this
mode's sight, and must save the same tensors. So no autograd graph is walked twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from ..gradients import plain

# The hooks that saved tensors go through, or None. Without it zero-bubble fails on what is checkpointed.
_saves = torch._C._autograd._top_saved_tensors_default_hooks

Product = tuple[Tensor, Tensor, Tensor]  # a parameter, and the factors of its gradient, [r, n] and [r, m]


class Deferred(TorchFunctionMode):
    """While it is on, weights' gradients of the products that are made are left to `take`."""

    def __init__(self) -> None:
        super().__init__()
        self.products: list[Product] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func is F.linear and len(args) >= 2 and _puts_off(args[0], args[1]):
            out = _Product.apply(args[0], args[1].detach(), (args[1],), True, self)
            bias = args[2] if len(args) > 2 else given.get("bias")
            return out if bias is None else out + bias
        if func is torch.addmm and len(args) == 3 and not given and _puts_off(args[1], args[2]):
            return args[0] + _Product.apply(args[1], args[2].detach(), (args[2],), False, self)
        return func(*args, **given)

    def take(self) -> Callable[[], None]:
        """The weights' gradients of the backward that has just run, as something to be done."""
        products, self.products = self.products, []

        @torch.no_grad()
        def later() -> None:
            for weight, left, right in products:
                _accumulate(weight, left.t() @ right)
            products.clear()

        return later


def _puts_off(x: Any, weight: Any) -> bool:
    return (type(weight) is torch.nn.Parameter and weight.requires_grad and isinstance(x, Tensor)
            and x.requires_grad and torch.is_grad_enabled() and _saves(False) is None
            and not torch.is_autocast_enabled(weight.device.type))  # fmt: skip


class _Product(Function):
    """x @ weight, or (transposed) x @ weight.T, with weight of [out, in]. parameter: what weight is the value
    of, in a tuple, where autograd doesn't see it."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, parameter: tuple[Tensor], transposed: bool, deferred: Deferred
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parameter, ctx.transposed, ctx.deferred = parameter, transposed, deferred
        return F.linear(x, weight) if transposed else x @ weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        left, right = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        ctx.deferred.products.append((*ctx.parameter, *((left, right) if ctx.transposed else (right, left))))
        return grad @ weight if ctx.transposed else grad @ weight.t(), None, None, None, None


def _accumulate(weight: Tensor, grad: Tensor) -> None:
    """As autograd does it: the hooks of the parameter, then its `.grad`."""
    for hook in (weight._backward_hooks or {}).values():
        changed = hook(grad)
        grad = grad if changed is None else changed
    if weight.grad is None:
        weight.grad = grad
    else:
        plain(weight.grad).add_(grad)
