"""Every rule against the truth: operands are cut over two ranks along an axis, the operation runs on the
pieces, and what the rule says is put together and compared with the whole result.

An instance names its sizes by letters, so that hypothesis can draw them; `free` is how many leaf axes may be
sharded, so that a rule that forbids everything fails too.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call

from autotp.axes import layout, leaves
from autotp.capture import capture
from autotp.propagate import Axes, propagate
from autotp.rules import RULES, rule

Shape = tuple[int, ...]
Call = Callable[[list[torch.Tensor], Shape], Any]


@dataclass
class Case:
    """One call. operands: shapes such as `b s h*d`, with `mask:` or `ids(v):` before those of masks and of
    indices below v. out: the result's shape where the call must be told it; it is then called with local
    sizes."""

    name: str
    operands: str
    call: Call
    free: int
    out: str = ""


def c(name: str, operands: str, call: Call, free: int, out: str = "") -> Case:
    return Case(name, operands, call, free, out)


CASES = [
    # element by element
    c("add", "b s h, h", lambda t, n: t[0] + t[1], 3),
    c("add number", "b h", lambda t, n: t[0] + 1, 2),
    c("radd", "b h", lambda t, n: 1 + t[0], 2),
    c("add in place", "b h, b h", lambda t, n: t[0].clone().add_(t[1]), 2),
    c("add alpha", "b h, b h", lambda t, n: torch.add(t[0], t[1], alpha=3), 2),
    c("sub", "b 1 h, s h", lambda t, n: t[0] - t[1], 3),
    c("rsub", "b h", lambda t, n: 1 - t[0], 2),
    c("mul", "b s h, h", lambda t, n: t[0] * t[1], 3),
    c("mul number", "b h", lambda t, n: t[0] * 3, 2),
    c("div", "b h, b 1", lambda t, n: t[0] / t[1], 2),
    c("rdiv", "b h", lambda t, n: 1 / t[0], 2),
    c("div floor", "b h, h", lambda t, n: torch.div(t[0], t[1], rounding_mode="floor"), 2),
    c("neg", "b h", lambda t, n: -t[0], 2),
    c("pow", "b h", lambda t, n: t[0] ** 2, 2),
    c("silu", "b h", lambda t, n: F.silu(t[0]), 2),
    c("to", "b h", lambda t, n: t[0].to(torch.float64), 2),
    c("to int", "b h", lambda t, n: (t[0] * 9).to(torch.int64), 2),
    c("type_as", "b h, k", lambda t, n: t[0].type_as(t[1]), 3),
    c("where", "mask:s h, b s h, h", lambda t, n: torch.where(t[0], t[1], t[2]), 3),
    c("where zero", "mask:s h, b s h", lambda t, n: torch.where(t[0], t[1], 0.0), 3),
    c("where number", "mask:s h, b s h", lambda t, n: torch.where(t[0], 2.0, t[1]), 3),
    c("x.where", "mask:s h, s h, h", lambda t, n: t[1].where(t[0], t[2]), 2),
    c("masked_fill 0", "b s, mask:s", lambda t, n: t[0].masked_fill(t[1], 0), 2),
    c("masked_fill inf", "b s, mask:s", lambda t, n: t[0].masked_fill(t[1], -9.0), 2),
    c("maximum", "b s, s", lambda t, n: torch.maximum(*t), 2),
    c("max of two", "b s, s", lambda t, n: torch.max(*t), 2),
    c("lerp", "b s, s, s", lambda t, n: torch.lerp(*t), 2),
    c("complex", "b s, b s", lambda t, n: torch.complex(*t), 2),
    c("copy_", "b s, s", lambda t, n: torch.zeros_like(t[0]).copy_(t[1]), 2),
    # shapes
    c("view split", "b s h*d", lambda t, n: t[0].view(*n), 4, "b s h d"),
    c("view merge", "b s h d", lambda t, n: t[0].reshape(n), 4, "b s h*d"),
    c("view flat", "b s h", lambda t, n: t[0].view(n), 3, "b*s h"),
    c("view regroup", "h*d b", lambda t, n: t[0].view(n), 3, "h d*b"),
    c("view across", "b h 3 5", lambda t, n: t[0].view(n), 2, "b h 5 3"),
    c("view across, split", "b h*d 1 4 6", lambda t, n: t[0].reshape(n), 3, "b h d 1 6 4"),
    c("view across, twice", "b 4 6 h 3 2", lambda t, n: t[0].view(n), 2, "b 6 4 h 2 3"),
    c("flatten", "b s h", lambda t, n: t[0].flatten(1), 3),
    c("unflatten", "b h*d", lambda t, n: t[0].unflatten(-1, n[1:]), 3, "b h d"),
    c("squeeze", "b 1 h", lambda t, n: t[0].squeeze(1), 2),
    c("squeeze all", "b 1 h", lambda t, n: t[0].squeeze(), 0),
    c("squeeze two", "b 1 1 h", lambda t, n: t[0].squeeze((1, 2)), 2),
    c("squeeze none", "b 3 h", lambda t, n: t[0].squeeze(1), 2),
    c("unsqueeze", "b h", lambda t, n: t[0].unsqueeze(-2), 2),
    c("transpose", "b s h", lambda t, n: t[0].transpose(1, -1), 3),
    c("permute", "b s h", lambda t, n: t[0].permute(2, 0, 1), 3),
    c("movedim", "b s h", lambda t, n: torch.movedim(t[0], 0, -1), 3),
    c("mT", "b s h", lambda t, n: t[0].mT, 3),
    c("t", "b s", lambda t, n: t[0].t(), 2),
    c("swapaxes", "b s h", lambda t, n: torch.swapaxes(t[0], axis0=0, axis1=2), 3),
    c("expand", "b 1 h", lambda t, n: t[0].expand(*n), 3, "b s h"),
    c("expand more", "h", lambda t, n: t[0].expand(n), 2, "b h"),
    c("expand_as", "b 1 h, b s h", lambda t, n: t[0].expand_as(t[1]), 3),
    c("view_as", "b s h d, b s h*d", lambda t, n: t[0].reshape_as(t[1]), 4),
    c("repeat", "b h", lambda t, n: t[0].repeat(n[0] // t[0].shape[0], 1), 3, "r*b h"),
    c("repeat_interleave", "b h", lambda t, n: t[0].repeat_interleave(n[0] // t[0].shape[0], 0), 3, "b*r h"),
    c("split", "b h+h", lambda t, n: torch.mul(*t[0].split([n[1], n[1]], dim=-1)), 2, "b h"),
    c("chunk", "b h+h", lambda t, n: torch.mul(*t[0].chunk(2, dim=-1)), 2),
    c("unbind", "b 2 h", lambda t, n: t[0].unbind(1)[1], 2),
    c("cat", "b h, b k", lambda t, n: torch.cat(t, dim=-1), 3),
    c("stack", "b h, b h", lambda t, n: torch.stack(t, dim=1), 2),
    c("pad", "b s h", lambda t, n: F.pad(t[0], (0, 0, 1, 2)), 2),
    c("pad value", "b s h", lambda t, n: F.pad(t[0], (1, 0), value=3.0), 2),
    c("roll", "b s h", lambda t, n: torch.roll(t[0], 1, 1), 2),
    c("flip", "b s h", lambda t, n: t[0].flip(1), 2),
    c("tril", "b s k", lambda t, n: t[0].tril(), 1),
    c("unfold", "b 5 h", lambda t, n: t[0].unfold(1, 2, 1), 2),
    c("meshgrid", "s, k", lambda t, n: torch.meshgrid(*t, indexing="ij")[0], 2),
    c("view_as_complex", "b s 2", lambda t, n: torch.view_as_complex(t[0]), 2),
    c("view_as_real", "b s, b s", lambda t, n: torch.view_as_real(torch.complex(*t)), 2),
    # indexing
    c("x[None, :, :]", "b s", lambda t, n: t[0][None, :, :], 2),
    c("x[..., 0]", "b s", lambda t, n: t[0][..., 0], 1),
    c("x[:, -1:]", "b 3+s", lambda t, n: t[0][:, -1:], 2),
    c("x[..., half:]", "b h+h", lambda t, n: t[0][..., : n[1]] * t[0][..., n[1] :], 2, "b h"),
    c("x[..., ::2]", "b h*2", lambda t, n: t[0][..., ::2], 2),
    c("x[..., 1::2]", "b h*2", lambda t, n: t[0][..., 1::2], 2),
    c("x[..., ::3] of 5", "b 5", lambda t, n: t[0][..., ::3], 1),
    c("x[:, [-2]]", "b 3+s h", lambda t, n: t[0][:, [-2]], 3),
    c("x[ids]", "v h, ids(v):b s", lambda t, n: t[0][t[1]], 3),
    c("x[:, ids]", "b v h, ids(v):s", lambda t, n: t[0][:, t[1]], 3),
    c("x[ids, :, ids]", "v s w, ids(v):b, ids(w):b", lambda t, n: t[0][t[1], :, t[2]], 2),
    c("x[ids, ids]", "v w h, ids(v):b 1, ids(w):s", lambda t, n: t[0][t[1], t[2]], 3),
    c("x[0, ids]", "2 w h, ids(w):s", lambda t, n: t[0][0, t[1]], 2),
    c("x[mask] = 0", "b s h, mask:b s", lambda t, n: _assign(t[0], t[1], 0.0), 3),
    c("x[:, :, 0] = y", "b s h, s", lambda t, n: _assign(t[0], (slice(None), slice(None), 0), t[1]), 2),
    c("index_select", "b v h, ids(v):s", lambda t, n: t[0].index_select(1, t[1]), 3),
    c("gather", "b v, ids(v):b k", lambda t, n: t[0].gather(-1, t[1]), 2),
    c("take_along_dim", "b v h, ids(v):b k 1", lambda t, n: torch.take_along_dim(t[0], t[1], dim=1), 3),
    c("index_add", "v h, ids(v):s, s h", lambda t, n: t[0].index_add(0, t[1], t[2]), 2),
    c("scatter_add", "b v, ids(v):b k, b k", lambda t, n: t[0].scatter_add(1, t[1], t[2]), 2),
    c("scatter", "b v, ids(v):b 1", lambda t, n: t[0].scatter(1, t[1], 1.0), 1),
    c("narrow", "b h+h", lambda t, n: t[0].narrow(-1, 0, n[1]) * t[0].narrow(-1, n[1], n[1]), 2, "b h"),
    c("select", "b s h", lambda t, n: t[0].select(1, 1), 2),
    c("one_hot", "ids(5):b s", lambda t, n: F.one_hot(t[0], 5), 2),
    # products
    c("linear", "b s i, o i, o", lambda t, n: F.linear(*t), 4),
    c("linear no bias", "b i, o i", lambda t, n: F.linear(*t), 3),
    c("matmul", "b h s d, b h d k", lambda t, n: t[0] @ t[1], 5),
    c("matmul one head", "b h s d, b 1 d k", lambda t, n: torch.matmul(*t), 5),
    c("matmul vector", "b s d, d", lambda t, n: t[0] @ t[1], 3),
    c("rmatmul", "s d, b s", lambda t, n: t[0].__rmatmul__(t[1]), 3),
    c("bmm", "b s d, b d k", lambda t, n: torch.bmm(*t), 4),
    c("addmm", "o, b i, i o", lambda t, n: torch.addmm(*t), 3),
    c("addmm beta", "b o, b i, i o", lambda t, n: torch.addmm(*t, beta=2, alpha=3), 3),
    c("baddbmm", "b 1 k, b s d, b d k", lambda t, n: torch.baddbmm(*t, beta=0.5), 4),
    c("outer", "s, d", lambda t, n: torch.outer(*t), 2),
    c("inner", "b d, k d", lambda t, n: torch.inner(*t), 3),
    c("solve_triangular", "b 3 3, b 3 d",
      lambda t, n: torch.linalg.solve_triangular(*t, upper=True, unitriangular=True), 2),
    c("einsum", "b s h d, b k h d", lambda t, n: torch.einsum("bqhd,bkhd->bhqk", *t), 5),
    c("einsum dots", "b s d, d o", lambda t, n: torch.einsum("...d,do->...o", *t), 4),
    c("einsum implicit", "b s, s d", lambda t, n: torch.einsum("ij,jk", *t), 3),
    c("einsum sum", "b s d", lambda t, n: torch.einsum("bsd->bd", *t), 3),
    c("einsum diagonal", "3 3 d", lambda t, n: torch.einsum("aad->d", *t), 1),
    c("conv1d", "b i 5, o i 2, o", lambda t, n: F.conv1d(*t), 3),
    c("conv1d depthwise", "b i 5, i 1 2, i", lambda t, n: F.conv1d(*t, groups=t[0].shape[1]), 2),
    c("conv2d", "b i 4 4, o i 2 2", lambda t, n: F.conv2d(*t, stride=2), 3),
    c("sdpa", "b h s d, b h k d, b h k e, h s k", lambda t, n: F.scaled_dot_product_attention(*t), 4),
    c(
        "sdpa causal", "b h s d, b h k d, b h k e",
        lambda t, n: F.scaled_dot_product_attention(*t, is_causal=True), 3,
    ),
    c(
        "sdpa grouped", "b g*r s d, b g k d, b g k e",
        lambda t, n: F.scaled_dot_product_attention(*t, enable_gqa=t[0].shape[1] != t[1].shape[1]), 5,
    ),
    # reductions
    c("sum", "b s h", lambda t, n: t[0].sum(-1), 3),
    c("sum all", "b s", lambda t, n: t[0].sum(), 2),
    c("sum dims", "b s h", lambda t, n: torch.sum(t[0], dim=(0, 2), keepdim=True), 3),
    c("mean", "b s h", lambda t, n: t[0].mean(dim=-1, keepdim=True), 3),
    c("amax", "b s h", lambda t, n: t[0].amax(dim=1), 3),
    c("amin", "b s h", lambda t, n: t[0].amin(-1), 3),
    c("max dim", "b s h", lambda t, n: t[0].max(dim=-1, keepdim=True).values, 2),
    c("max all", "b s", lambda t, n: t[0].max(), 2),
    c("logsumexp", "b s", lambda t, n: t[0].logsumexp(-1), 1),
    c("norm", "b s h", lambda t, n: t[0].norm(dim=-1, keepdim=True), 2),
    c("norm p", "b s h", lambda t, n: torch.norm(t[0], 2, -1), 2),
    c("linalg norm", "b s h", lambda t, n: torch.linalg.vector_norm(t[0], dim=-1), 2),
    c("var", "b s h", lambda t, n: t[0].var(-1, unbiased=False), 2),
    c("any", "mask:b s", lambda t, n: t[0].any(-1), 1),
    c("argmax", "b s", lambda t, n: t[0].argmax(-1), 1),
    c("softmax", "b s", lambda t, n: t[0].softmax(-1), 1),
    c("F.softmax", "b h s", lambda t, n: F.softmax(t[0], dim=1, dtype=torch.float64), 2),
    c("log_softmax", "b s", lambda t, n: F.log_softmax(t[0], -1), 1),
    c("normalize", "b s", lambda t, n: F.normalize(t[0], dim=-1), 1),
    c("glu", "b h+h", lambda t, n: F.glu(t[0]), 2),
    c("cumsum", "b s", lambda t, n: t[0].cumsum(-1), 1),
    c("sort", "b s", lambda t, n: t[0].sort(dim=-1).values, 1),
    c("topk", "b s", lambda t, n: t[0].topk(2, dim=-1)[0], 1),
    c("diff", "b s, b 1", lambda t, n: t[0].diff(prepend=t[1], dim=-1), 1),
    c("layer_norm", "b h, h, h", lambda t, n: F.layer_norm(t[0], t[0].shape[-1:], t[1], t[2]), 1),
    c("rms_norm", "b h, h", lambda t, n: F.rms_norm(t[0], t[0].shape[-1:], t[1]), 1),
    c("group_norm", "b g*4 h", lambda t, n: F.group_norm(t[0], t[0].shape[1] // 4), 2),
    c("batch_norm", "b h s, h, h", lambda t, n: F.batch_norm(t[0], t[1], t[2].abs()), 1),
    c("mse_loss", "b h, b h", lambda t, n: F.mse_loss(*t), 2),
    c("mse_loss sum", "b h, b h", lambda t, n: F.mse_loss(*t, reduction="sum"), 2),
    c("cross_entropy", "b v, ids(v):b", lambda t, n: F.cross_entropy(*t), 0),
    c("cross_entropy sum", "b v, ids(v):b", lambda t, n: F.cross_entropy(*t, reduction="sum"), 1),
    c("cross_entropy none", "b v, ids(v):b", lambda t, n: F.cross_entropy(*t, reduction="none"), 1),
    # two operations: what becomes one axis later is one in what came before
    c("sum of joined", "b h, b k", lambda t, n: torch.cat(t, dim=-1).sum(-1), 1),
    c("mean of joined", "b h, b k", lambda t, n: torch.cat(t, dim=-1).mean(-1), 1),
    c("max of joined", "b h, b k", lambda t, n: torch.cat(t, dim=-1).amax(-1), 3),
    c("product of joined", "b h, b k, o h+k", lambda t, n: F.linear(torch.cat(t[:2], -1), t[2]), 2),
    c("sum of halves", "b h, b h", lambda t, n: torch.cat([t[0] * t[1], t[0]], dim=-1).sum(-1), 2),
    c("square weight", "b i, i i", lambda t, n: t[0] + F.linear(t[0], t[1]), 1),
    # made from nothing
    c("zeros", "b", lambda t, n: torch.zeros(n, dtype=t[0].dtype), 3, "s h"),
    c("new_full", "b", lambda t, n: t[0].new_full(n, 3.0), 3, "s h"),
    c("ones_like", "b s", lambda t, n: torch.ones_like(t[0]), 2),
    c("arange", "b", lambda t, n: torch.arange(n[0]), 1, "s"),
    c("eye", "b", lambda t, n: torch.eye(n[0]), 1, "3 3"),
]  # fmt: skip


def _assign(x: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    x = x.clone()
    x[index] = value
    return x


class Called(nn.Module):
    """A call as a model: `forward(t0=..., t1=...)`."""

    def __init__(self, call: Call, shape: Shape):
        super().__init__()
        self.call, self.result_shape = call, shape

    def forward(self, **tensors: torch.Tensor) -> Any:
        return self.call(list(tensors.values()), self.result_shape)


def size(expression: str, letters: dict[str, int]) -> int:
    return sum(math.prod(int(letters.get(f, f)) for f in term.split("*")) for term in expression.split("+"))


def sizes(spec: str, letters: dict[str, int]) -> Shape:
    return tuple(size(expression, letters) for expression in spec.split())


def operand(spec: str, letters: dict[str, int], generator: torch.Generator) -> torch.Tensor:
    kind, _, shape = spec.rpartition(":")
    dims = sizes(shape, letters)
    if kind == "mask":
        return torch.rand(dims, generator=generator) < 0.5
    if kind:
        return torch.randint(0, size(kind[4:-1], letters), dims, generator=generator)
    return torch.randn(dims, generator=generator, dtype=torch.float64)


def take(tensor: torch.Tensor, dims: list, held: dict) -> torch.Tensor:
    for i, axis in enumerate(dims):
        picked = [j for start, stop in layout(axis, held) for j in range(start, stop)]
        if len(picked) != axis.size:
            tensor = tensor.index_select(i, torch.tensor(picked, dtype=torch.long))
    return tensor


def below(facts: list) -> set:
    return {leaf for fact in facts for leaf in leaves(getattr(fact, "axis", fact))}


def check(model: nn.Module, inputs: dict[str, torch.Tensor], run: Callable) -> int:
    """Check what the rules say of the last operation of `model(**inputs)`; `run(params, inputs, shape)` runs
    it on pieces.

    Returns how many leaf axes may be sharded."""
    captured = capture(model, **inputs)
    axes = propagate(captured)
    assert not axes.unknown, axes.unknown
    nodes = [n for n in captured.graph.nodes if n.op != "output"]
    result = captured.output
    whole = model(**inputs)
    assert torch.equal(captured.run(model, **inputs), whole)
    facts = [axes.facts[n] for n in nodes]
    given = {str(n.target): axes.of[n] for n in nodes if n.op == "placeholder"}
    params = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    stuck = set().union(*(below(f.forbids) | below(f.positional) for f in facts))
    shardable = 0
    everything = [a for dims in (*given.values(), *axes.params.values(), axes.of[result]) for a in dims]
    for leaf in dict.fromkeys(b for a in everything for b in leaves(a)):
        if leaf in stuck:
            continue
        reduce = {x.how for f in facts for x in f.contracts if leaf in leaves(x.axis)}
        if reduce & {"norm", "lookup"}:
            continue
        shardable += 1
        ranks = [{leaf: ((0, (leaf.size + 1) // 2),)}, {leaf: (((leaf.size + 1) // 2, leaf.size),)}]
        parts = []
        for rank, held in enumerate(ranks):
            local = {k: take(inputs[k], given[k], held) if k in given else inputs[k] for k in inputs}
            own = {k: take(p, axes.params[k], held) for k, p in params.items()}
            if reduce == {"sum"} and rank:
                for key in added(axes, result):
                    local[key] = torch.zeros_like(local[key])
                whole_bias = [k for k, p in own.items() if k.endswith("bias") and p.shape == params[k].shape]
                own.update({k: torch.zeros_like(own[k]) for k in whole_bias})  # a layer adds its bias once
            shape = tuple(sum(b - a for a, b in layout(axis, held)) for axis in axes.of[result])
            parts.append(run(own, local, shape))
        if not reduce:
            for part, held in zip(parts, ranks, strict=True):
                same_numbers(part, take(whole, axes.of[result], held), f"sharded along {leaf}")
            continue
        (how,) = reduce
        first = ranks[0][leaf][0][1] / leaf.size
        same_numbers(combine(how, parts, first), whole, f"{how} over {leaf}")
    linearity(axes, result, inputs, params, whole, run)
    return shardable


def combine(how: str, parts: list[torch.Tensor], first: float) -> torch.Tensor:
    """The whole of two ranks' parts; first: the share of the axis that the first of them has."""
    a, b = parts
    return {
        "sum": lambda: a + b,
        "mean": lambda: a * first + b * (1 - first),
        "max": lambda: torch.maximum(a, b),
        "min": lambda: torch.minimum(a, b),
    }[how]()


def same_numbers(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    torch.testing.assert_close(got, want, msg=lambda m: f"{what}: {m}")


def added(axes: Axes, node) -> list[str]:
    return [str(n.target) for key in axes.facts[node].addends for n in placeholders(node, key)]


def placeholders(node, key) -> list:
    value = node.meta["args"][key] if isinstance(key, int) else node.meta["kwargs"][key]
    found = value if isinstance(value, (tuple, list)) else [value]
    return [n for n in found if getattr(n, "op", "") == "placeholder"]


def linearity(axes: Axes, node, inputs, params, whole, run) -> None:
    """The result for a sum of two operands is the sum of the results."""
    linear = axes.facts[node].linear
    if linear is None:
        return
    kind, keys = linear
    groups = [[str(n.target) for n in placeholders(node, key)] for key in keys]
    names = [n for group in groups for n in group]
    if len(names) != len(set(names)) or not all(groups):
        return  # the harness can vary only what is an input of its own
    for group in [names] if kind == "joint" else groups:
        if not group or any(not inputs[k].is_floating_point() for k in group):
            continue
        noise = {k: torch.randn(inputs[k].shape, dtype=torch.float64) for k in group}
        rest = {k: torch.zeros_like(inputs[k]) for k in added(axes, node) if k not in group}
        one = run(params, {**inputs, **{k: inputs[k] - noise[k] for k in group}}, tuple(whole.shape))
        two = run(params, {**inputs, **rest, **noise}, tuple(whole.shape))
        same_numbers(one + two, whole, f"linear in {group}")


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_rule_says_the_truth(case: Case, data) -> None:
    letters = {letter: data.draw(st.integers(2, 4), letter) for letter in "bdeghikorsvw"}
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99), "seed"))
    tensors = [operand(spec.strip(), letters, generator) for spec in case.operands.split(",")]
    inputs = {f"t{i}": t for i, t in enumerate(tensors)}

    def run(params, given, shape):
        return case.call(list(given.values()), shape)

    assert check(Called(case.call, sizes(case.out, letters)), inputs, run) == case.free


class Holder(nn.Module):
    """A leaf module inside a model; the first of several results is given."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner
        self.options = {"need_weights": False} if isinstance(inner, nn.MultiheadAttention) else {}

    def forward(self, **tensors: torch.Tensor) -> torch.Tensor:
        out = self.inner(*tensors.values(), **self.options)
        return out[0] if isinstance(out, tuple) else out


class TransposedLinear(nn.Module):
    """As transformers' Conv1D: known by what it does."""

    def __init__(self, out: int, into: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(into, out)), nn.Parameter(torch.empty(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(
            *x.shape[:-1], self.weight.shape[1]
        )


def heads_run(params, given, shape):
    """nn.MultiheadAttention with head_dim 3, in plain operations on whatever heads the weights hold."""
    p = {k.removeprefix("inner."): v for k, v in params.items()}
    weights, biases = p["in_proj_weight"].chunk(3), p["in_proj_bias"].chunk(3)
    q, k, v = (
        F.linear(x, w, b).unflatten(-1, (-1, 3)).transpose(1, 2)
        for x, w, b in zip(given.values(), weights, biases, strict=True)
    )
    out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    return F.linear(out, p["out_proj.weight"], p["out_proj.bias"])


MODULES: list[tuple[str, nn.Module, str, int, Callable | None]] = [
    ("linear", nn.Linear(4, 6), "2 3 4", 4, None),
    ("linear without bias", nn.Linear(4, 6, bias=False), "2 4", 3, None),
    ("transposed linear", TransposedLinear(6, 4), "2 3 4", 4, None),
    ("embedding", nn.Embedding(7, 4), "ids(7):2 3", 3, None),
    ("layer norm", nn.LayerNorm(4), "2 3 4", 2, None),
    ("rms norm", nn.RMSNorm(4), "2 3 4", 2, None),
    ("layer norm over two", nn.LayerNorm((3, 4)), "2 3 4", 1, None),
    ("group norm", nn.GroupNorm(2, 6), "3 6 5", 2,
     lambda p, t, n: F.group_norm(t["t0"], t["t0"].shape[1] // 3, p["inner.weight"], p["inner.bias"])),
    ("batch norm", nn.BatchNorm1d(4), "2 4 3", 1, None),
    ("conv1d", nn.Conv1d(4, 6, 2), "2 4 5", 3, None),
    ("conv1d depthwise", nn.Conv1d(4, 4, 2, groups=4), "2 4 5", 2,
     lambda p, t, n: F.conv1d(t["t0"], p["inner.weight"], p["inner.bias"], groups=t["t0"].shape[1])),
    ("conv1d grouped", nn.Conv1d(6, 4, 2, groups=2, bias=False), "2 6 5", 4,
     lambda p, t, n: F.conv1d(t["t0"], p["inner.weight"], None, groups=t["t0"].shape[1] //
     p["inner.weight"].shape[1])),
    ("conv2d", nn.Conv2d(3, 4, 2, 2), "2 3 4 4", 3, None),
    ("gelu", nn.GELU(), "2 3", 2, None),
    ("dropout", nn.Dropout(0.5), "2 3", 2, None),
    ("prelu", nn.PReLU(4), "2 4 3", 3, None),
    ("softmax", nn.Softmax(-1), "2 4", 1, None),
    ("attention", nn.MultiheadAttention(12, 4, batch_first=True), "2 3 12, 2 5 12, 2 5 12", 3, heads_run),
]  # fmt: skip


@pytest.mark.parametrize("name, module, operands, free, run", MODULES, ids=[case[0] for case in MODULES])
def test_leaf_module_rule_says_the_truth(name, module, operands, free, run) -> None:
    generator = torch.Generator().manual_seed(3)
    model = Holder(module).double().eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype))
    inputs = {f"t{i}": operand(spec.strip(), {}, generator) for i, spec in enumerate(operands.split(","))}

    def plainly(params, given, shape):
        return functional_call(model, params, (), given)

    with torch.no_grad():
        assert check(model, inputs, run or plainly) == free


def test_norms_over_a_sharded_axis_are_statistics() -> None:
    for module in (nn.LayerNorm(4), nn.RMSNorm(4)):
        captured = capture(Holder(module), t0=torch.zeros(2, 4))
        (contract,) = propagate(captured).facts[captured.output].contracts
        assert contract.how == "norm" and contract.weight == "inner.weight" and contract.axis.size == 4


def test_lookup_in_a_table_names_it() -> None:
    captured = capture(Holder(nn.Embedding(7, 4)), t0=torch.zeros(2, 3, dtype=torch.long))
    (contract,) = propagate(captured).facts[captured.output].contracts
    assert (contract.how, contract.weight, contract.axis.size) == ("lookup", "inner.weight", 7)


def test_contractions_name_their_weight() -> None:
    class Raw(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.b = nn.Parameter(torch.zeros(5, 4)), nn.Parameter(torch.zeros(5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, self.w, bias=self.b)

    captured = capture(Raw(), x=torch.zeros(2, 4))
    facts = propagate(captured).facts[captured.output]
    assert [c.weight for c in facts.contracts] == ["w"]
    assert facts.addends == ("bias",) and facts.linear == ("each", (0, 1))


def test_attention_weights_average_the_heads_only_when_asked() -> None:
    class Weights(nn.Module):
        def __init__(self, average: bool) -> None:
            super().__init__()
            self.inner, self.average = nn.MultiheadAttention(12, 4, batch_first=True), average

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x, x, x, average_attn_weights=self.average)[1]

    for average in (True, False):
        captured = capture(Weights(average), x=torch.zeros(2, 3, 12))
        axes = propagate(captured)
        assert [a.size for a in axes.of[captured.output]] == ([2, 3, 3] if average else [2, 4, 3, 3])
        heads = axes.params["inner.out_proj.weight"][1].parts[0]
        stuck = set().union(*(below(f.forbids) for f in axes.facts.values()))
        assert (heads in stuck) == average


def test_own_rules_come_first_and_change_nothing_built_in() -> None:
    def kernel(x):
        return torch.fft.fftn(x)

    captured = capture(Called(lambda t, n: kernel(t[0]), ()), t0=torch.zeros(2, 4))
    before = propagate(captured)
    assert [why for _, why in before.unknown] == ["no rule for fft_fftn"]
    assert len(below(before.facts[captured.output].forbids)) == 2
    mine: dict = {}

    @rule(torch.fft.fftn, into=mine)
    def _(op):
        op.forbid(op.dims(0)[-1], "transformed")
        return op.dims(0)

    after = propagate(captured, rules=mine)
    assert not after.unknown and len(below(after.facts[captured.output].forbids)) == 1
    assert propagate(captured).unknown and torch.fft.fftn not in RULES
    with pytest.raises(TypeError):
        RULES[torch.fft.fftn] = _  # type: ignore[index]


def test_a_rule_that_forgets_an_axis_forbids_it() -> None:
    mine: dict = {}
    rule(torch.fft.fftn, into=mine)(lambda op: [op.fresh(2), op.fresh(4)])
    captured = capture(Called(lambda t, n: torch.fft.fftn(t[0]), ()), t0=torch.zeros(2, 4))
    facts = propagate(captured, rules=mine).facts[captured.output]
    assert sorted(a.size for a in below(facts.forbids)) == [2, 4]
    assert sorted(a.size for a in below(facts.positional)) == [2, 4]


def test_a_rule_that_gives_wrong_sizes_is_reported() -> None:
    mine: dict = {}
    rule(torch.fft.fftn, into=mine)(lambda op: op.dims(0)[::-1])
    captured = capture(Called(lambda t, n: torch.fft.fftn(t[0]), ()), t0=torch.zeros(2, 4))
    axes = propagate(captured, rules=mine)
    assert "sizes [4, 2]" in axes.unknown[0][1] and len(below(axes.facts[captured.output].forbids)) == 2


def test_scores_over_one_sequence_are_not_sharded_along_it() -> None:
    captured = capture(Called(lambda t, n: t[0] @ t[0].mT, ()), t0=torch.zeros(2, 5, 3))
    axes = propagate(captured)
    (twice,) = {a.find() for a in axes.of[captured.output] if a.size == 5}
    assert twice in below(axes.facts[captured.output].forbids)
