"""Operations element by element: operands broadcast, each dim of the result is the dim it comes from."""

from functools import partial
from typing import Any

import torch

from .indexing import selected
from .op import Dims, Op, Operand, Rule, everywhere, rule

RULES: dict[Any, Rule] = {}
here = partial(rule, into=RULES)


def all_operands(op: Op) -> Dims:
    """Every tensor argument broadcast together."""
    keys = [*range(len(op.args)), *op.kwargs]
    return op.broadcast(*(op.dims(key) for key in keys if op.has(key) and key != "out"))


@here(*everywhere(
    "abs", "acos", "acosh", "angle", "asin", "asinh", "atan", "atan2", "bitwise_and", "bitwise_not",
    "bitwise_or", "bitwise_xor", "bitwise_left_shift", "bitwise_right_shift", "ceil", "celu", "clamp",
    "clamp_max", "clamp_min", "clip", "copysign", "cos", "cosh", "digamma", "elu", "eq", "erf", "erfc",
    "erfinv", "exp", "exp2", "expm1", "fix", "floor", "floor_divide", "floordiv", "fmax", "fmin", "fmod",
    "frac", "gcd", "ge", "gelu", "greater", "greater_equal", "gt", "hardshrink", "hardsigmoid", "hardswish",
    "hardtanh", "heaviside", "hypot", "invert", "isclose", "isfinite", "isinf", "isnan", "isneginf",
    "isposinf", "le", "leaky_relu", "less", "less_equal", "lgamma", "log", "log10", "log1p", "log2",
    "logaddexp", "logical_and", "logical_not", "logical_or", "logical_xor", "logit", "logsigmoid", "lt",
    "maximum", "minimum", "mish", "mod", "nan_to_num", "ne", "nextafter", "not_equal", "pow", "reciprocal",
    "relu", "relu6", "remainder", "round", "rsqrt", "rsub", "selu", "sigmoid", "sign", "signbit", "silu",
    "sin", "sinc", "sinh", "softplus", "softshrink", "softsign", "sqrt", "square", "tan", "tanh",
    "tanhshrink", "threshold", "trunc", "truncate", "xlogy", "and", "or", "xor", "lshift", "rshift", "polar",
    "addcmul", "addcdiv", "lerp", "expit", "long", "int", "bool", "short", "char", "sgn", "ldexp",
))  # fmt: skip
@here(
    torch.Tensor.__rdiv__, torch.Tensor.__rsub__, torch.Tensor.__rpow__, torch.Tensor.__rfloordiv__,
    torch.Tensor.__rmod__, torch.Tensor.__rand__, torch.Tensor.__ror__, torch.Tensor.__rxor__,
)  # fmt: skip
def pointwise(op: Op) -> Dims:
    return all_operands(op)


@here(*everywhere("add", "sub", "subtract"), torch.Tensor.__radd__)
def add(op: Op) -> Dims:
    # x + 1 is affine: each of n ranks would add the 1.
    if op.has((0, "input")) and op.has((1, "other")):
        op.linear("joint", (0, "input"), (1, "other"))
    return all_operands(op)


@here(torch.complex)
def complex_of(op: Op) -> Dims:
    op.linear("joint", (0, "real"), (1, "imag"))
    return all_operands(op)


@here(*everywhere("mul", "multiply"), torch.Tensor.__rmul__)
def mul(op: Op) -> Dims:
    op.linear("each", (0, "input"), (1, "other"))
    return all_operands(op)


@here(*everywhere("div", "divide", "true_divide", "truediv"))
def div(op: Op) -> Dims:
    if op.arg("rounding_mode", 2) is None:
        op.linear("each", (0, "input"))
    return all_operands(op)


@here(*everywhere(
    "neg", "negative", "positive", "pos", "clone", "contiguous", "detach", "alias", "conj", "resolve_conj",
    "resolve_neg", "conj_physical", "deg2rad", "rad2deg", "requires_grad_", "data", "real", "imag", "cpu",
    "cuda", "view_as_real_copy",
))  # fmt: skip
def linear_unary(op: Op) -> Dims:
    op.linear("each", (0, "input"))
    return op.dims((0, "input"))


@here(*everywhere("to", "float", "double", "half", "bfloat16", "type", "type_as", "cfloat"))
def cast(op: Op) -> Dims:
    source = op.tensor((0, "input")).dtype
    if _continuous(source) and _continuous(op.out.dtype):
        op.linear("each", (0, "input"))
    op.ignore((1, "other"))  # only its dtype is read
    return op.dims((0, "input"))


@here(*everywhere("dropout", "alpha_dropout", "feature_alpha_dropout", "rrelu", "prelu"))
def random_unary(op: Op) -> Dims:
    """Dropout and its like. Not linear: what is dropped of a partial sum differs from rank to rank."""
    x = op.dims((0, "input"))
    if op.has((1, "weight")) and len(x) > 1:  # prelu's slope, one or one per channel
        slope = op.dims((1, "weight"))
        op.broadcast([slope[0], *([op.fresh(1)] * (len(x) - 2))], x)
    return x


@here(*everywhere("where"))
def where(op: Op) -> Dims:
    if len(op.args) + len(op.kwargs) == 1:
        return selected(op)
    # x.where(condition, other) has the value first.
    first: Operand = 0 if op.node.target is torch.Tensor.where else (1, "input")
    other: Operand = (2, "other")
    if op.has(first) and op.has(other):
        op.linear("joint", first, other)
    elif op.has(first) and op.value(other) == 0:
        op.linear("each", first)
    elif op.has(other) and op.value(first) == 0:
        op.linear("each", other)
    return all_operands(op)


@here(*everywhere("masked_fill"))
def masked_fill(op: Op) -> Dims:
    if not op.has((2, "value")) and op.arg("value", 2) == 0:
        op.linear("each", (0, "input"))
    return all_operands(op)


@here(torch.Tensor.copy_)
def copy_(op: Op) -> Dims:
    op.linear("each", (1, "src"))
    return all_operands(op)


@here(torch.Tensor.fill_, torch.Tensor.zero_)
def fill_(op: Op) -> Dims:
    return all_operands(op)


def _continuous(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex
