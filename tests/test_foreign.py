"""Hooks and backward code that a graph does not show: what would meet a part keeps its axis whole."""

import copy
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import autotp
from autotp.comm import simulate
from autotp.layouts import take


class NormGrad(torch.autograd.Function):
    """Forward a view, backward a norm of the whole gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad / grad.norm()


class Doubling(torch.autograd.Function):
    """Element by element, both ways."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


class Model(nn.Module):
    def __init__(self, kind: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.kind = nn.Linear(24, 48), nn.Linear(48, 24), kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        if self.kind in ("norm function", "plain function"):
            h = (NormGrad if self.kind == "norm function" else Doubling).apply(h)
        if self.kind == "tensor hook" and h.requires_grad:
            h.register_hook(lambda g: g / g.norm())
        return self.b(torch.tanh(h))


def hook(model: Model) -> Model:
    if model.kind == "forward hook":
        model.a.register_forward_hook(lambda m, args, out: out * out.mean(-1, keepdim=True))
    if model.kind == "forward pre-hook":
        model.b.register_forward_pre_hook(lambda m, args: (args[0] / args[0].norm(dim=-1, keepdim=True),))
    if model.kind == "backward pre-hook":
        model.a.register_full_backward_pre_hook(lambda m, grads: (grads[0] / grads[0].norm(),))
    if model.kind == "parameter hook":
        model.a.weight.register_hook(lambda g: g / g.norm())
    return model


def run(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    y = model(x)
    y.pow(2).sum().backward()
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(p.grad)
    return [y.detach(), *(v.clone() for v in autotp.full_state_dict(model).values())]


KINDS = [
    "forward hook", "forward pre-hook", "backward pre-hook", "parameter hook", "tensor hook", "norm function",
    "plain function",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:.*stay whole on every rank")
def test_what_hooks_and_backwards_do_is_the_same(kind: str) -> None:
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    # the ranks' threads share one random generator: built once
    state = copy.deepcopy(Model().double().state_dict())

    def built() -> Model:
        model = hook(Model(kind).double())
        model.load_state_dict(state)
        return model

    want = run(built(), x)

    def one(comm: Any) -> list[torch.Tensor]:
        return run(autotp.parallelize(built(), comm=comm, example_inputs=(x,)), x)

    for got in simulate(2, one):
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w, rtol=1e-10, atol=1e-12)


def test_an_elementwise_function_does_not_keep_its_axis_whole() -> None:
    plan = autotp.plan(Model("plain function"), 2, example_inputs=(torch.randn(2, 5, 24),))
    assert [c.kind for c in plan.collectives] == ["reduce", "enter"] and plan.sharded_fraction == 1.0


class Helper(nn.Module):
    """One local helper, called three times: one call site, reached on three ways."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(24, 24) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        heads = lambda y: y.view(b, t, 4, 6).transpose(1, 2)  # noqa: E731
        q, k, v = heads(self.q(x)), heads(self.k(x)), heads(self.v(x))
        y = torch.softmax(q @ k.transpose(-1, -2), -1) @ v
        return self.o(y.transpose(1, 2).reshape(b, t, 24))


def test_a_local_helper_called_several_times() -> None:
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    report = autotp.verify(Helper().double(), 2, example_inputs=(x,), steps=2)
    assert report.ok, str(report)
    assert report.plan.sharded_fraction == 1.0 and report.plan.arguments
    assert copy.deepcopy(report.plan).digest == report.plan.digest


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(24, 24), nn.ModuleList([Model(), Model()])
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + torch.utils.checkpoint.checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_parts(reentrant: bool) -> None:
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    report = autotp.verify(Checkpointed(reentrant).double(), 2, example_inputs=(x,), steps=2)
    assert report.ok, str(report)
    assert report.plan.params["blocks.0.a.weight"].layout is not None


class OnlyInTraining(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        if self.training:
            h = h / h.norm(dim=-1, keepdim=True)
        return self.b(torch.tanh(h))


def test_what_only_training_does_is_seen() -> None:
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    report = autotp.verify(OnlyInTraining().double(), 2, example_inputs=(x,), steps=2)
    assert report.ok, str(report)
    assert report.plan.params["a.weight"].placement != "Shard(0)"  # along what the norm runs over


def test_a_gradient_from_before_the_split_is_kept() -> None:
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    whole = Model().double()
    state = copy.deepcopy(whole.state_dict())
    for _ in range(2):
        whole(x).pow(2).sum().backward()

    def one(comm: Any) -> dict[str, tuple[torch.Tensor, Any]]:
        model = Model().double()
        model.load_state_dict(state)
        model(x).pow(2).sum().backward()
        autotp.parallelize(model, comm=comm, example_inputs=(x,))
        model(x).pow(2).sum().backward()
        layouts = {n: p.layout for n, p in model.autotp.plan.params.items()}
        return {n: (p.grad.as_subclass(torch.Tensor), layouts[n]) for n, p in model.named_parameters()}

    for rank, grads in enumerate(simulate(2, one)):
        for name, (grad, layout) in grads.items():
            want = whole.get_parameter(name).grad
            torch.testing.assert_close(grad, take(want, layout, rank) if layout else want)
