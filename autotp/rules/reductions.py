"""Operations that reduce, scan, order or normalise along a dim."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from ..axes import reshape, unify
from .op import Dims, How, NoRule, Op, Rule, everywhere, rule

RULES: dict[Any, Rule] = {}
here = partial(rule, into=RULES)


def reduced(op: Op, x: Dims, name: str = "dim", position: int = 1) -> tuple[Dims, Dims]:
    """(the axes of `x` that a reduction runs over, the axes of its result)."""
    dim = op.value((position, name))
    if dim is None and name == "dim":
        dim = op.value("axis")
    if isinstance(dim, torch.dtype):
        dim = None
    given = [] if dim is None else [int(d) for d in (dim if isinstance(dim, (tuple, list)) else [dim])]
    over = {d % len(x) for d in given} if given else set(range(len(x)))
    result = op.out if isinstance(op.out, torch.Tensor) else op.out[0]
    kept = len(result.shape) == len(x)
    left = [op.fresh(1) if i in over else axis for i, axis in enumerate(x) if kept or i not in over]
    return [x[i] for i in sorted(over)], left


@here(*everywhere("sum", "nansum"))
def sum_(op: Op) -> Dims:
    return _contract(op, "sum", linear=getattr(op.node.target, "__name__", "") == "sum")


@here(*everywhere("mean"))
def mean(op: Op) -> Dims:
    return _contract(op, "mean", linear=True)


@here(*everywhere("amax"))
def amax(op: Op) -> Dims:
    return _contract(op, "max", linear=False)


@here(*everywhere("amin"))
def amin(op: Op) -> Dims:
    return _contract(op, "min", linear=False)


@here(*everywhere("max", "min"))
def extreme(op: Op) -> Any:
    """x.max() reduces all; x.max(dim) also tells where; x.max(other) is element by element."""
    x = op.dims((0, "input"))
    if op.has((1, "other")):
        return op.broadcast(x, op.dims((1, "other")))
    if isinstance(op.out, torch.Tensor):
        return _contract(
            op, "max" if op.node.target in (torch.max, torch.Tensor.max) else "min", linear=False
        )
    over, left = reduced(op, x)
    op.forbid(over, "it is searched for the extreme")
    return [left, list(left)]


def _contract(op: Op, how: How, linear: bool) -> Dims:
    if linear:
        op.linear("each", (0, "input"))
    over, left = reduced(op, op.dims((0, "input")))
    for axis in over:
        op.contract(axis, how)
    return left


@here(*everywhere(
    "prod", "logsumexp", "norm", "vector_norm", "var", "std", "any", "all", "argmax", "argmin",
    "count_nonzero", "median", "nanmedian", "mode", "aminmax", "var_mean", "std_mean",
))  # fmt: skip
def reduce_whole(op: Op) -> Any:
    x = op.dims((0, "input"))
    name = getattr(op.node.target, "__name__", "")
    position = 2 if name in ("norm", "vector_norm", "linalg_vector_norm") else 1
    if op.value("dim") is None and isinstance(op.value(position), bool):
        raise NoRule("the reduction runs over an unknown dim")
    over, left = reduced(op, x, position=position)
    op.forbid(over, "it is reduced in a way that cannot be done in parts")
    return left if isinstance(op.out, torch.Tensor) else [list(left) for _ in op.out]


@here(*everywhere("softmax", "log_softmax", "softmin", "gumbel_softmax", "normalize", "glu"))
def along_dim(op: Op) -> Dims:
    x = op.dims((0, "input"))
    name = getattr(op.node.target, "__name__", "")
    position, default = {"normalize": (2, 1), "gumbel_softmax": (4, -1), "glu": (1, -1)}.get(name, (1, None))
    dim = op.arg("dim", position, default)
    if dim is None:
        raise NoRule("softmax over an unnamed dim")
    if name == "glu":
        half = op.cut(x[dim], [op.shape[dim]] * 2, "its halves are multiplied")
        x[dim] = unify(*half)
        return x
    op.forbid(x[dim], f"{name} runs over it")
    return x


@here(*everywhere("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "sort", "argsort", "msort"))
def scan(op: Op) -> Any:
    x = op.dims((0, "input"))
    name = getattr(op.node.target, "__name__", "").strip("_")
    if name == "cumsum":
        op.linear("each", (0, "input"))
    dim = 0 if name == "msort" else op.arg("dim", 1, -1 if "sort" in name else None)
    dim = -1 if isinstance(dim, bool) else dim
    op.forbid(x[dim], f"{name} runs over it")
    return x if isinstance(op.out, torch.Tensor) else [list(x) for _ in op.out]


@here(*everywhere("diff"))
def diff(op: Op) -> Dims:
    dim = op.arg("dim", 2, -1)
    tensors = [op.dims(key) for key in ((0, "input"), (3, "prepend"), (4, "append")) if op.has(key)]
    x = tensors[0]
    for other in tensors:
        op.forbid(other[dim], "neighbours along it are subtracted")
        del other[dim]
    x = op.broadcast(*tensors, shape=[axis.size for axis in x])
    dim %= len(x) + 1
    return [*x[:dim], op.positional(op.fresh(op.shape[dim])), *x[dim:]]


@here(*everywhere("topk", "kthvalue"))
def topk(op: Op) -> Any:
    x = op.dims((0, "input"))
    dim = op.arg("dim", 2, -1) % len(x)
    op.forbid(x[dim], "the largest are searched for along it")
    if len(op.out[0].shape) < len(x):
        return [x[:dim] + x[dim + 1 :] for _ in op.out]
    chosen = op.positional(op.fresh(op.out[0].shape[dim]))
    return [[*x[:dim], chosen, *x[dim + 1 :]] for _ in op.out]


@here(F.layer_norm, torch.layer_norm)
def layer_norm(op: Op) -> Dims:
    count = len(op.arg("normalized_shape", 1))
    return norm_last(op, op.dims((0, "input")), count, op.dims((2, "weight")), op.dims((3, "bias")))


@here(F.rms_norm, torch.rms_norm)
def rms_norm(op: Op) -> Dims:
    return norm_last(op, op.dims((0, "input")), len(op.arg("normalized_shape", 1)), op.dims((2, "weight")))


def norm_last(op: Op, x: Dims, count: int, *params: Dims | None) -> Dims:
    """Normalise over the last `count` dims, scale and shift by parameters of their shape."""
    for dims in params:
        for a, b in zip(dims or [], x[-count:], strict=False):
            unify(a, b)
    for axis in x[-count:]:
        if count == 1:
            op.contract(axis, "norm", "weight" if op.module is not None else (2, "weight"))
        else:
            op.forbid(axis, "its statistics are taken together with other dims")
    return x


@here(F.group_norm, torch.group_norm)
def group_norm(op: Op) -> Dims:
    return norm_groups(
        op, op.dims((0, "input")), op.arg("num_groups", 1), op.dims((2, "weight")), op.dims((3, "bias"))
    )


def norm_groups(op: Op, x: Dims, groups: int, *params: Dims | None) -> Dims:
    """x [batch, channels, *space]: statistics over each group of channels and all of space."""
    for dims in params:
        if dims:
            unify(dims[0], x[1])
    _, within = reshape([x[1]], [groups, x[1].size // groups])
    op.forbid([within, *x[2:]], "statistics are taken over it")
    return x


@here(*everywhere("batch_norm", "instance_norm"))
def batch_norm(op: Op) -> Dims:
    instance = getattr(op.node.target, "__name__", "") == "instance_norm"
    params = [op.dims((i, n)) for i, n in enumerate(("running_mean", "running_var", "weight", "bias"), 1)]
    x = op.dims((0, "input"))
    return norm_channels(op, x, [x[0]] if not instance else [], *params)


def norm_channels(op: Op, x: Dims, over: Dims, *params: Dims | None) -> Dims:
    """x [batch, channels, *space]: statistics per channel over `over` and all of space."""
    for dims in params:
        if dims:
            unify(dims[0], x[1])
    op.forbid([*over, *x[2:]], "statistics are taken over it")
    return x


@here(F.cross_entropy, F.nll_loss)
def cross_entropy(op: Op) -> Dims:
    """input [batch, classes, *space] or [classes], target [batch, *space] of class indices, or like the
    input."""
    x, target = op.dims((0, "input")), op.dims((1, "target"))
    at = 0 if len(x) == 1 else 1
    op.forbid(x[at], "the loss normalises over it")
    if op.has((2, "weight")):
        op.forbid(op.dims((2, "weight")), "classes are looked up in it")
    others = x[:at] + x[at + 1 :]
    if len(target) == len(x):
        op.forbid(target[at], "the loss normalises over it")
        target = target[:at] + target[at + 1 :]
    for a, b in zip(others, target, strict=True):
        unify(a, b)
    return _loss(op, others, plain_mean=False)


@here(*everywhere(
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
))  # fmt: skip
def elementwise_loss(op: Op) -> Dims:
    operands = [op.dims(key) for key in (*range(len(op.args)), *op.kwargs) if op.has(key)]
    shape = torch.broadcast_shapes(*([axis.size for axis in dims] for dims in operands))
    return _loss(
        op, op.broadcast(*operands, shape=tuple(shape)), plain_mean=op.value("reduction") != "batchmean"
    )


def _loss(op: Op, axes: Dims, plain_mean: bool) -> Dims:
    """The loss of each element, or their sum or mean. The mean of a loss may count only some elements: then
    not in parts."""
    if op.shape:
        return axes
    for axis in axes:
        if op.value("reduction") == "sum":
            op.contract(axis, "sum")
        elif plain_mean:
            op.contract(axis, "mean")
        else:
            op.forbid(axis, "the loss is averaged over what is not ignored")
    return []
