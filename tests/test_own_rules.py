"""Rules of a user's own, for an operator and for modules that autotp does not know, up to a split model."""

import pytest
import torch
from torch import nn

import autotp
from autotp.axes import unify
from autotp.rules import RULES, rules_by_target


@torch.library.custom_op("autotp_tests::scan", mutates_args=())
def scan(x: torch.Tensor, decay: float) -> torch.Tensor:
    """[batch, time, channels]: a sum along the time, each channel by itself."""
    weights = decay ** torch.arange(x.shape[1], dtype=x.dtype, device=x.device)
    return torch.cumsum(x * weights[:, None], 1)


@scan.register_fake
def _(x, decay):
    return torch.empty_like(x)


def _backward(ctx, grad):
    weights = ctx.decay ** torch.arange(grad.shape[1], dtype=grad.dtype)
    return torch.flip(torch.cumsum(torch.flip(grad, (1,)), 1), (1,)) * weights[:, None], None


def _setup(ctx, inputs, output):
    ctx.decay = inputs[1]


scan.register_autograd(_backward, setup_context=_setup)


@autotp.rule(scan)
def scan_rule(op):
    op.forbid(op.dims(0)[1], "it scans over the time")
    return op.dims(0)


class Scanned(nn.Module):
    def __init__(self, packet: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.packet = packet

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        call = torch.ops.autotp_tests.scan if self.packet else scan
        return x + self.down(call(self.up(x), 0.5))


X = {"x": torch.randn(3, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))}


@pytest.mark.parametrize("packet", [False, True])
def test_a_rule_for_an_operator_reaches_the_plan(packet: bool) -> None:
    model = Scanned(packet).double()
    without = autotp.plan(model, 2, example_inputs=X)
    assert any("no rule for" in note for note in without.notes)
    assert any(c.kind == "gather" for c in without.collectives) or without.params["up.weight"].layout is None
    report = autotp.verify(model, 2, example_inputs=X, steps=2, rules=[scan_rule])
    assert report.ok, str(report)
    assert report.plan.sharded_fraction == 1.0 and not report.plan.notes
    assert [c.kind for c in report.plan.collectives] == ["reduce", "enter"]


class Gemm(nn.Module):
    """x @ weight, by a way torch does not show: as a kernel of a user's own would be."""

    def __init__(self, into: int, out: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(into, out) / into**0.5)
        self.bias = nn.Parameter(torch.randn(out)) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.fft.ifft(torch.fft.fft(x[..., None] * self.weight, dim=-1), dim=-1).real.sum(-2)
        return y if self.bias is None else y + self.bias


@autotp.rule(Gemm)
def gemm_rule(op):
    weight, bias = op.param("weight"), op.param("bias")
    op.contract(unify(op.dims(0)[-1], weight[0]), "sum", "weight")
    if bias is not None:
        unify(bias[0], weight[1])
    return [*op.dims(0)[:-1], weight[1]]


class OfGemms(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.up, self.down = Gemm(8, 12, True), Gemm(12, 8, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def test_a_rule_for_a_module_shards_its_parameters() -> None:
    report = autotp.verify(OfGemms(False).double(), 2, example_inputs=X, steps=3, rules=[gemm_rule])
    assert report.ok, str(report)
    layouts = {n: sorted(p.layout.dims) for n, p in report.plan.params.items() if p.layout}
    assert layouts == {"up.weight": [1], "up.bias": [0], "down.weight": [0]}


def test_a_module_of_ones_own_does_not_add_its_bias_on_every_rank() -> None:
    report = autotp.verify(OfGemms(True).double(), 2, example_inputs=X, steps=2, rules=[gemm_rule])
    assert report.ok, str(report)
    assert report.plan.params["down.weight"].layout is None
    assert "would count on every rank" in report.plan.kept["down.weight"]


def test_rules_are_given_and_change_nothing_else() -> None:
    assert rules_by_target([scan_rule]).keys() == {
        torch.ops.autotp_tests.scan,
        torch.ops.autotp_tests.scan.default,
    }
    assert rules_by_target({torch.sort: scan_rule}) == {torch.sort: scan_rule}
    assert not any("autotp_tests" in str(target) for target in RULES)
    with pytest.raises(TypeError, match="is no rule"):
        autotp.plan(Scanned(False), 2, example_inputs=X, rules=[lambda op: op.dims(0)])
