"""Tensors made from nothing. Constant ones may be made at local size; others are made whole and sliced."""

from functools import partial
from typing import Any

from .op import Dims, Op, Rule, everywhere, rule

RULES: dict[Any, Rule] = {}
here = partial(rule, into=RULES)


@here(
    *everywhere(
        "zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty", "empty_strided"
    )
)
def constant(op: Op) -> Dims:
    op.ignore(0)  # new_zeros: only its dtype and device are read
    return [op.fill(op.fresh(size)) for size in op.shape]


@here(*everywhere(
    "arange", "range", "linspace", "logspace", "eye", "tensor", "as_tensor", "asarray", "scalar_tensor",
    "rand", "randn", "randint", "randperm", "tril_indices", "triu_indices", "hann_window", "hamming_window",
    "from_numpy", "new_tensor", "complex_from", "combinations",
))  # fmt: skip
def table(op: Op) -> Dims:
    if op.has(0):
        return (
            op.dims(0)
            if op.tensor(0).shape == op.out.shape
            else [op.positional(op.fresh(n)) for n in op.shape]
        )
    return [op.positional(op.fresh(size)) for size in op.shape]


@here(*everywhere("zeros_like", "ones_like", "full_like", "empty_like"))
def like(op: Op) -> Dims:
    """As big as the operand is on this rank."""
    return op.dims((0, "input"))


@here(
    *everywhere(
        "rand_like",
        "randn_like",
        "randint_like",
        "bernoulli",
        "normal",
        "uniform",
        "exponential",
        "multinomial",
    )
)
def random(op: Op) -> Dims:
    x = op.dims((0, "input"))
    op.forbid(x, "its elements are drawn in order")
    return (
        x
        if len(x) == len(op.shape) and all(axis.size == size for axis, size in zip(x, op.shape, strict=True))
        else [op.positional(op.fresh(size)) for size in op.shape]
    )
