"""Code by which a split could go wrong without a word: each is right, or stays whole with its reason."""

import copy
import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import randomise
from torch import nn
from torch.nn import functional as F
from whole import EXACT, assert_close, assert_same_grads, forward_and_grads

import autotp
from autotp.comm import Comm, ShapeComm, simulate
from autotp.errors import PlanError

X = torch.randn(2, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


class Mlp(nn.Module):
    """Split whatever the rest of a model does, so that there is something to split."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(self.up(x)))


def assert_as_whole(build: Callable[[], nn.Module], calls: int = 1) -> list[nn.Module]:
    """Output and gradients at tp=2 equal the whole model's, at every call."""
    model = randomise(build().double())
    want = [forward_and_grads(model, {"x": X}) for _ in range(calls)]
    model.zero_grad()

    def one(comm: Comm) -> Any:
        split = randomise(build().double())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            autotp.parallelize(split, comm=comm, example_inputs={"x": X})
        return [forward_and_grads(split, {"x": X}) for _ in range(calls)], split

    ranks = simulate(2, one)
    for found, _ in ranks:
        for (output, grads), (whole, whole_grads) in zip(found, want, strict=True):
            assert_close(output, whole, EXACT)
            assert_same_grads(grads, whole_grads, EXACT)
    return [split for _, split in ranks]


# --- a sum over the ranks times what they share out ------------------------------------------------------


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.u, self.d = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.d(self.u(x) * self.u.weight.sum())


class LinearAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.o((self.q(x) @ self.k(x).mT / 5) @ self.v(x))


class ProductsOfSums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.us = nn.ModuleList([nn.Linear(16, 32) for _ in range(6)])
        self.ds = nn.ModuleList([nn.Linear(32, 16) for _ in range(6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = sum(u(x).tanh() for u in self.us)
        h = h * h.sum(-1, keepdim=True) * (h.sum(-1, keepdim=True) * h.sum(-1, keepdim=True) / 9)
        return sum(d(h) for d in self.ds)  # type: ignore[return-value]


@pytest.mark.parametrize("kind", [Scaled, LinearAttention, ProductsOfSums])
def test_a_partial_sum_is_reduced_before_it_meets_a_part(kind: type[nn.Module]) -> None:
    assert_as_whole(kind)


# --- numbers that Python reads unseen ---------------------------------------------------------------------


@functools.lru_cache
def remembered(n: int) -> float:
    return math.log(n)


TABLE = {4: 0.3, 2: 0.7}
READS: dict[str, Callable[[int], float]] = {
    "log": math.log,
    "table": lambda n: TABLE[n],
    "range": lambda n: sum(0.1 for _ in range(n)),
    "text": lambda n: float(str(n)),
    "negative": lambda n: -n / 4,
    "bits": lambda n: (n & 6) + 0.1,
    "comparison": lambda n: 2.0 if n > 3 else 0.5,
    "slice": lambda n: sum([0.1, 0.2, 0.3, 0.4][:n]),
    "size": lambda n: torch.Size((n, 2)).numel() / 8,
    "cached": remembered,
    "sqrt": math.sqrt,
}


class Reads(nn.Module):
    def __init__(self, read: Callable[[int], float], of_shape: bool) -> None:
        super().__init__()
        self.h, self.read, self.of_shape = 4, read, of_shape
        self.qkv, self.o, self.mlp = nn.Linear(16, 48), nn.Linear(16, 16), Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (self.h, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        scale = self.read(q.shape[1] if self.of_shape else self.h)
        a = (q @ k.mT * scale / 2).softmax(-1)
        return self.mlp(self.o((a @ v).transpose(1, 2).flatten(2)) + x)


@pytest.mark.parametrize("of_shape", [False, True], ids=["attribute", "shape"])
@pytest.mark.parametrize("how", READS)
def test_a_number_read_by_python_is_the_whole_models(how: str, of_shape: bool) -> None:
    for split in assert_as_whole(lambda: Reads(READS[how], of_shape)):
        assert split.mlp.up.weight.numel() == 32 * 16  # type: ignore[union-attr]


class Branch(Reads):
    """Another line of code for few heads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (self.h, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        a = q @ k.mT
        if self.h > 3:
            a = a.tanh()
        return self.mlp(self.o((a.softmax(-1) @ v).transpose(1, 2).flatten(2)) + x)


def test_a_branch_on_the_number_of_heads() -> None:
    assert_as_whole(lambda: Branch(math.log, False))


class ReadsElsewhere(Reads):
    """Reads the number of heads only in training, or only of long sequences."""

    def __init__(self, training: bool) -> None:
        super().__init__(math.log, False)
        self.when_training = training

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (self.h, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        scale = 1.0
        if self.training if self.when_training else x.shape[1] > 8:
            scale = self.read(self.h)
        a = (q @ k.mT * scale / 2).softmax(-1)
        return self.mlp(self.o((a @ v).transpose(1, 2).flatten(2)) + x)


@pytest.mark.parametrize("training", [True, False], ids=["in training", "of long sequences"])
def test_a_number_read_on_another_way_than_the_captured_one(training: bool) -> None:
    x = X if training else X.repeat(1, 2, 1)
    whole = randomise(ReadsElsewhere(training).double()).train(training)

    def one(comm: Comm) -> Any:
        split = randomise(ReadsElsewhere(training).double())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            autotp.parallelize(split, comm=comm, example_inputs={"x": X})
        return forward_and_grads(split.train(training), {"x": x})

    want = forward_and_grads(whole, {"x": x})
    for output, grads in simulate(2, one):
        assert_close(output, want[0], EXACT)
        assert_same_grads(grads, want[1], EXACT)


class Reorders(Reads):
    """Picks by a list for many heads: that moves numbers and keeps the shape."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (self.h, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        a = (q @ k.mT).softmax(-1)
        if self.h > 3:
            a = a[..., [4, 3, 2, 1, 0]]
        return self.mlp(self.o((a @ v).transpose(1, 2).flatten(2)) + x)


def test_a_branch_that_only_moves_numbers() -> None:
    assert_as_whole(lambda: Reorders(math.log, False))


# --- gradients in the forward, values kept ----------------------------------------------------------------


class Forces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.u, self.d, self.mlp = nn.Linear(16, 32), nn.Linear(32, 1), Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            at = x.detach().requires_grad_()
            energy = self.d(torch.tanh(self.u(at))).sum()
            (force,) = torch.autograd.grad(energy, at, create_graph=True)
        return self.mlp(force)


class HookInForward(nn.Module):
    def __init__(self, by_node: bool) -> None:
        super().__init__()
        self.n, self.u, self.d = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.mlp, self.by_node = Mlp(), by_node

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.n(x)
        if not h.requires_grad:
            pass
        elif self.by_node:
            h.grad_fn.register_prehook(lambda grads: (grads[0].clamp(-1e-4, 1e-4),))
        else:
            h.register_hook(lambda g: g.clamp(-1e-4, 1e-4))
        return self.mlp(x + self.d(F.relu(self.u(h))))


class Average(nn.Module):
    ema: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.u, self.d, self.mlp = nn.Linear(16, 32), nn.Linear(32, 16), Mlp()
        self.register_buffer("ema", torch.zeros(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.u(x)
        self.ema = 0.9 * self.ema + 0.1 * h.detach().mean((0, 1))
        return self.mlp(self.d(F.relu(h - self.ema)))


def test_what_is_differentiated_in_the_forward_stays_whole() -> None:
    assert_as_whole(Forces)


@pytest.mark.parametrize("by_node", [False, True], ids=["register_hook", "grad_fn"])
def test_a_hook_put_on_in_the_forward_sees_whole_gradients(by_node: bool) -> None:
    assert_as_whole(lambda: HookInForward(by_node))


def test_a_buffer_made_anew_in_every_call_stays_whole() -> None:
    whole = randomise(Average().double())
    for _ in range(2):
        forward_and_grads(whole, {"x": X})
    for split in assert_as_whole(Average, calls=2):
        assert_close(split.ema, whole.ema, EXACT)  # type: ignore[arg-type]


def test_where_nothing_else_can_be_split_the_reason_is_told() -> None:
    model = HookInForward(by_node=False)
    model.mlp = nn.Identity()  # type: ignore[assignment]
    with pytest.raises(PlanError, match="a hook on its gradient would see a part of it"):
        autotp.parallelize(copy.deepcopy(model), comm=ShapeComm(0, 2), example_inputs={"x": X.float()})


# --- what the model's code keeps on its modules -----------------------------------------------------------


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.norm = Mlp(), nn.LayerNorm(16)
        self.seen: list[torch.Tensor] = []
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.mlp.up(x))
        self.seen = [hidden]
        self.last = self.norm(self.mlp.down(hidden))
        return self.last


def test_attributes_that_hold_a_part_are_told() -> None:
    plan = autotp.plan(randomise(Keeps().double()), 2, example_inputs={"x": X})
    assert plan.params["mlp.up.weight"].layout is not None
    (line,) = plan.unexamined
    assert line.startswith("seen: the forward sets it to a value that is split (the model: relu")
    with pytest.warns(UserWarning, match="seen: the forward sets it"):
        simulate(2, lambda comm: autotp.parallelize(Keeps(), comm=comm, example_inputs={"x": X.float()}))
    assert_as_whole(Keeps)
