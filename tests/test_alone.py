"""Dense convolutions, norms with their channels sharded; weights that are split one by one."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autotp
from autotp.comm import simulate
from autotp.layers import make_batch_norm, make_conv_column, make_conv_row
from autotp.layouts import split, take


def noisy(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(3)
    model = model.double()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return model


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.up, self.norm = nn.Conv2d(16, 24, 3, padding=1), nn.BatchNorm2d(24)
        self.deep, self.down = nn.Conv2d(24, 24, 3, padding=1, groups=24), nn.Conv2d(24, 16, 1)
        self.wide, self.groups = nn.Conv2d(16, 32, 1, bias=False), nn.GroupNorm(8, 32)
        self.back, self.head = nn.Conv2d(32, 16, 1), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = x + self.down(F.relu(self.deep(F.relu(self.norm(self.up(x))))))
        x = x + self.back(F.gelu(self.groups(self.wide(x))))
        return self.head(x.mean((2, 3)))


@pytest.mark.parametrize("tp", [2, 4])
def test_convolutions_are_columns_and_rows(tp: int) -> None:
    model = noisy(Convolutions())
    model.norm.running_mean.add_(0.3)
    model.norm.running_var.mul_(1.5)
    x = {"x": torch.randn(2, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))}
    report = autotp.verify(model, tp, example_inputs=x, steps=2)
    assert report.ok, str(report)
    kinds = {layer.module: layer.kind for layer in report.plan.layers}
    assert kinds.items() >= {
        "up": "column", "norm": "batch norm", "deep": "grouped", "down": "row",
        "wide": "column", "groups": "grouped", "back": "row",
    }.items()  # fmt: skip


class GroupNormed(nn.Module):
    def __init__(self, functional: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm = None if functional else nn.GroupNorm(4, 16, affine=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        return self.down(F.group_norm(h, 4) if self.norm is None else self.norm(h))


@pytest.mark.parametrize("functional", [True, False])
def test_the_number_of_groups_is_that_of_the_rank(functional: bool) -> None:
    """With the whole number of groups the shapes are right and the statistics are not."""
    x = {"x": torch.randn(3, 8, dtype=torch.float64)}
    report = autotp.verify(noisy(GroupNormed(functional)), 2, example_inputs=x, steps=2)
    assert report.ok, str(report)


class Sorted(nn.Module):
    """What it computes runs over its channels: no axis inside can be sharded."""

    def __init__(self, convolve: bool = False) -> None:
        super().__init__()
        self.norm, self.into, self.out = nn.LayerNorm(16), nn.Linear(16, 24), nn.Linear(24, 16, bias=False)
        self.conv = nn.Conv1d(24, 24, 3, padding=1) if convolve else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.cumsum(self.into(self.norm(x)), -1)
        if self.conv is not None:
            h = h + torch.sort(self.conv(h.transpose(1, 2)), 1)[0].transpose(1, 2)
        return x + self.out(torch.tanh(torch.sort(h, -1)[0]))


class Mixed(nn.Module):
    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Sorted(), Sorted(convolve=True)])
        self.mlps = nn.ModuleList([nn.Sequential(nn.Linear(16, hidden), nn.GELU(), nn.Linear(hidden, 16))])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.layers[0](layer(x))  # one of them runs three times
        return x + self.mlps[0](x)


Y = {"x": torch.randn(3, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))}


@pytest.mark.parametrize("tp", [2, 4])
def test_what_no_axis_shards_is_split_alone(tp: int) -> None:
    report = autotp.verify(noisy(Mixed()), tp, example_inputs=Y, steps=3)
    assert report.ok, str(report)
    alone = {m.module for m in report.plan.layers if "enter" in m.options}
    assert alone == {"layers.0.into", "layers.0.out", "layers.1.into", "layers.1.out", "layers.1.conv"}
    assert report.plan.sharded_fraction == 1.0
    arrows = [(c.kind, str(c.where[0])) for c in report.plan.collectives if str(c.where[0]) == "layers.0.out"]
    assert sorted(arrows) == [("enter", "layers.0.out")] * 3 + [("gather", "layers.0.out")] * 3


def test_little_that_stays_whole_is_left_whole() -> None:
    plan = autotp.plan(noisy(Mixed(hidden=2048)), 2, example_inputs=Y)
    assert 0.9 < plan.sharded_fraction < 1
    assert not any("enter" in layer.options for layer in plan.layers)


def test_a_policy_keeps_what_would_be_split_alone() -> None:
    modules = {"layers.*.into": "replicate"}
    policy = {"schema": 1, "modules": modules, "options": {"alone": "allow"}}
    plan = autotp.plan(noisy(Mixed()), 2, policy, example_inputs=Y)
    assert plan.params["layers.0.into.weight"].layout is None
    assert plan.params["layers.0.out.weight"].layout is not None
    plan = autotp.plan(noisy(Mixed()), 2, {"schema": 1, "modules": modules}, example_inputs=Y)
    assert plan.params["layers.0.out.weight"].layout is None  # who names modules has them split as named


def test_the_policy_of_a_plan_splits_alone_again(tmp_path) -> None:
    plan = autotp.plan(noisy(Mixed()), 2, example_inputs=Y)
    (tmp_path / "plan.yaml").write_text(plan.to_yaml())
    again = autotp.plan(noisy(Mixed()), 2, str(tmp_path / "plan.yaml"), example_inputs=Y)
    assert {n: p.layout for n, p in again.params.items()} == {n: p.layout for n, p in plan.params.items()}
    assert any("split alone" in p.why for p in again.params.values())


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("channels, tp", [(6, 2), (7, 3)])
def test_a_batch_norm_in_training_has_the_whole_statistics(channels: int, tp: int, momentum) -> None:
    whole = noisy(nn.BatchNorm1d(channels, momentum=momentum)).train()
    x = torch.randn(4, channels, 5, dtype=torch.float64, requires_grad=True)
    layout = split(channels, tp)
    norms = [copy.deepcopy(whole) for _ in range(tp)]
    for _ in range(2):
        want = whole(x)
    want.square().sum().backward()

    def one(comm) -> None:
        norm = norms[comm.rank]
        made = make_batch_norm(norm, layout, comm)
        part = x.detach()[:, slice(*layout[comm.rank][0])].requires_grad_()
        for _ in range(2):
            got = norm(part)
        got.square().sum().backward()
        rows = slice(*layout[comm.rank][0])
        torch.testing.assert_close(got, want[:, rows])
        torch.testing.assert_close(part.grad, x.grad[:, rows])
        torch.testing.assert_close(norm.weight.grad, take(whole.weight.grad, made["weight"], comm.rank))
        torch.testing.assert_close(norm.running_mean, whole.running_mean)
        torch.testing.assert_close(norm.running_var, whole.running_var)
        assert norm.num_batches_tracked == 2

    simulate(tp, one)


class Scored(nn.Module):
    """Scores that no axis splits, for values that one does: their gradients are partial."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(16, 16), nn.Conv1d(16, 16, 3, padding=1, groups=4)
        self.norm, self.v, self.o = nn.LayerNorm(16), nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        q, k = torch.sort(self.q(x), -1)[0], torch.sort(self.k(x.transpose(1, 2)), 1)[0]
        return x + self.o(torch.softmax(q @ k, -1) @ self.v(x))


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Scored(), Scored()])
        self.last = nn.Conv1d(16, 8, 1, groups=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return torch.sort(self.last(x.transpose(1, 2)), 1)[0]


@pytest.mark.parametrize("tp", [2, 4])
def test_what_is_split_alone_where_gradients_are_partial(tp: int) -> None:
    report = autotp.verify(noisy(Scores()), tp, example_inputs=Y, steps=3)
    assert report.ok, str(report)
    options = {m.module: m.options for m in report.plan.layers if "gather" in m.options}
    inner, last = {"gather": True, "partial": True}, {"gather": True, "enter": True}
    assert options["layers.1.q"] == options["layers.0.k"] == inner
    assert {"layers.0.q", "layers.0.k", "layers.1.q", "layers.1.k"} <= options.keys()
    assert options.get("last", last) == last
    kinds = [(c.kind, c.enter) for c in report.plan.collectives if str(c.where[0]) == "layers.0.k"]
    assert kinds == [("gather", True)]


@pytest.mark.parametrize("groups, tp", [(4, 2), (2, 4), (4, 4)])
@pytest.mark.parametrize("partial", [False, True])
def test_a_grouped_convolution_with_whole_inputs(groups: int, tp: int, partial: bool) -> None:
    """partial: each rank's loss is a part of it, and the gradients of what is whole are summed outside."""
    whole = noisy(nn.Conv1d(8, 16, 3, padding=2, groups=groups))
    x = torch.randn(3, 8, 5, dtype=torch.float64, requires_grad=True)
    want = whole(x)
    probes = torch.randn(tp, *want.shape, dtype=torch.float64)
    (want * (probes.sum(0) if partial else probes[0])).sum().backward()
    locals_ = [copy.deepcopy(whole) for _ in range(tp)]
    for one_of in locals_:
        one_of.zero_grad()

    def one(comm) -> None:
        conv, given = locals_[comm.rank], x.detach().clone().requires_grad_()
        made = make_conv_column(
            conv, split(16, tp), comm, gather_output=True, enter=not partial, partial=partial
        )
        got = conv(given)
        torch.testing.assert_close(got, want)
        (got * probes[comm.rank if partial else 0]).sum().backward()
        grad = comm.all_reduce(given.grad) if partial else given.grad
        torch.testing.assert_close(grad, x.grad)
        for name, p in conv.named_parameters():
            torch.testing.assert_close(p.grad, take(whole.get_parameter(name).grad, made[name], comm.rank))

    simulate(tp, one)


@pytest.mark.parametrize("kind", ["column", "gathered", "row"])
@pytest.mark.parametrize("batched", [True, False])
def test_a_convolution_in_parts(kind: str, batched: bool) -> None:
    whole = noisy(nn.Conv1d(6, 10, 3, padding=1, padding_mode="circular"))
    x = torch.randn(*([4] if batched else []), 6, 7, dtype=torch.float64, requires_grad=True)
    want = whole(x)
    probe = torch.randn_like(want)
    (want * probe).sum().backward()
    locals_ = [copy.deepcopy(whole) for _ in range(2)]
    for one_of in locals_:
        one_of.zero_grad()

    def one(comm) -> None:
        conv, given, out, layout = locals_[comm.rank], x.detach().clone(), want, split(10, 2)
        rows = slice(5 * comm.rank, 5 * comm.rank + 5) if kind == "column" else slice(None)
        if kind == "row":
            layout = split(6, 2)
            given = given.narrow(-2, 3 * comm.rank, 3).clone()
            made = make_conv_row(conv, layout, comm)
        else:
            made = make_conv_column(conv, layout, comm, gather_output=kind == "gathered")
        given.requires_grad_()
        got = conv(given)
        torch.testing.assert_close(got, out[..., rows, :])
        (got * probe[..., rows, :]).sum().backward()
        grad = x.grad.narrow(-2, 3 * comm.rank, 3) if kind == "row" else x.grad
        torch.testing.assert_close(given.grad, grad)
        for name, p in conv.named_parameters():
            grad = whole.get_parameter(name).grad
            torch.testing.assert_close(p.grad, take(grad, made[name], comm.rank) if name in made else grad)

    simulate(2, one)


class OneHead(nn.Module):
    """One head: its width can be sharded, if the scale of the scores is not read off a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        return self.o(torch.softmax(scores, -1) @ v)


def test_a_size_whose_bare_value_is_used_stays_whole() -> None:
    report = autotp.verify(noisy(OneHead()), 2, example_inputs=Y, steps=1)
    assert report.ok, str(report)


class Gathered(nn.Module):
    """What follows the norm needs all channels: the norm itself gathers nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.out = nn.Linear(16, 24), nn.BatchNorm1d(24), nn.Linear(24, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.sort(self.norm(self.up(x[:, 0])), -1)[0])


def test_a_gather_behind_a_norm_is_made() -> None:
    report = autotp.verify(noisy(Gathered()), 2, example_inputs=Y, steps=1)
    assert report.ok, str(report)


class Gates(nn.Module):
    """Sums over the sharded channels, made by a product in the code and then taken apart."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)
        self.sums, self.back = nn.Parameter(torch.zeros(10, 24)), nn.Parameter(torch.zeros(24, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        low, scale = torch.split(h @ self.sums.t(), [4, 6], dim=-1)
        return self.down(h * torch.tanh(low @ self.back.t()) * scale.softmax(-1)[..., :1])


class NormedGates(Gates):
    """What is taken apart is normalised, by code that uses it twice, and then used step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Parameter(torch.zeros(24, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        low, scale = torch.split(F.linear(h, self.sums), [4, 6], dim=-1)
        low = low * torch.rsqrt(low.square().mean(-1, keepdim=True) + 1e-6)
        steps = [h[:, i] * torch.tanh(low[:, i] @ self.back.t()) for i in range(x.shape[1])]
        return self.down(torch.stack(steps, 1) * torch.tanh(scale @ self.more.t()))


def test_a_reduction_reaches_past_a_norm_to_the_sharded_uses() -> None:
    report = autotp.verify(noisy(NormedGates()), 2, example_inputs=Y, steps=2)
    assert report.ok, str(report)
    inner = [(c.kind, c.enter) for c in report.plan.collectives if c.shape[-1] in (4, 6, 10)]
    assert inner == [("reduce", True)]


def test_a_sum_that_is_taken_apart_is_reduced_before() -> None:
    report = autotp.verify(noisy(Gates()), 2, example_inputs=Y, steps=2)
    assert report.ok, str(report)
    assert report.plan.sharded_fraction == 1.0
