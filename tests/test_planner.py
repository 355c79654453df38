"""What the planner decides, on models small enough to say what is right."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import autotp
from autotp.advice import warn_replicated
from autotp.errors import LayerError, PlanError
from autotp.planner import plan_and_analysis
from autotp.verify import Check, Report


class Mlp(nn.Module):
    def __init__(self, bias: bool = True, functional: bool = False):
        super().__init__()
        self.up, self.down = nn.Linear(8, 12, bias=bias), nn.Linear(12, 8, bias=bias)
        self.functional = functional

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.functional:
            return x + self.down(F.gelu(self.up(x)))
        hidden = F.gelu(F.linear(x, self.up.weight, self.up.bias))
        return x + F.linear(hidden, self.down.weight, self.down.bias)


def layouts(plan: autotp.Plan) -> dict[str, list[int]]:
    return {n: sorted(p.layout.dims) for n, p in plan.params.items() if p.layout is not None}


X = {"x": torch.randn(3, 8)}


def test_an_mlp_is_column_then_row_with_one_collective_each_way() -> None:
    plan = autotp.plan(Mlp(), 2, example_inputs=X)
    assert layouts(plan) == {"up.weight": [0], "up.bias": [0], "down.weight": [1]}
    assert [(c.kind, [str(w) for w in c.where]) for c in plan.collectives] == [
        ("reduce", ["down"]),
        ("enter", ["up in[0]"]),
    ]
    assert plan.params["down.bias"].gradient == "whole" and plan.sharded_fraction == 1.0


def test_a_bias_inside_a_functional_sum_is_kept_once() -> None:
    model = Mlp(functional=True).double()
    with torch.no_grad():
        model.down.bias.add_(3)
    report = autotp.verify(model, 3, example_inputs={"x": X["x"].double()}, steps=3)
    assert report.ok, str(report)
    assert report.plan.params["down.bias"].once
    assert layouts(report.plan)["down.weight"] == [1]


class Mixed(nn.Module):
    """A router, a learned scale and a norm inside the sharded region: their gradients are shares."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 1), nn.Linear(8, 12), nn.Linear(12, 8)
        self.scale = nn.Parameter(torch.tensor(1.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gated = torch.sigmoid(self.gate(x)) * self.up(x)
        return self.down(self.scale * torch.tanh(self.up(x))) * 2 + self.down(gated)


@pytest.mark.parametrize("tp", [2, 3])
def test_replicated_parameters_inside_get_summed_gradients(tp: int) -> None:
    report = autotp.verify(Mixed().double(), tp, example_inputs={"x": X["x"].double()}, steps=3)
    assert report.ok, str(report)
    assert report.plan.params["scale"].gradient == "summed"
    assert report.plan.params["up.weight"].layout is not None


class Minus(nn.Module):
    """OPT's trap: `-1` where the heads should be would swallow the shrink into the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.width = 4, 4
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        q, k, v = (p(x).view(b, -1, self.heads, self.width).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = torch.softmax(q @ k.transpose(-1, -2) / 2.0, -1) @ v
        return self.o(y.transpose(1, 2).reshape(b, s, 16))


def test_a_minus_one_does_not_swallow_the_shrink() -> None:
    report = autotp.verify(Minus().double(), 2, example_inputs={"x": torch.randn(2, 6, 16).double()}, steps=2)
    assert report.ok, str(report)
    assert {i.name: i.local for i in report.plan.ints} == {"heads": (2, 2)}
    assert report.plan.sharded_fraction == 1.0


class Unknown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.fft.fft(self.up(x)).real).sum(-1)


def test_an_unknown_operation_gets_whole_values_and_is_named() -> None:
    report = autotp.verify(Unknown().double(), 2, example_inputs={"x": X["x"].double()})
    assert report.ok, str(report)
    assert any("no rule for fft" in note for note in report.plan.notes)
    assert [c.kind for c in report.plan.collectives if str(c.where[0]) == "up"] == ["gather"]


def test_what_stays_whole_is_told_and_refused_under_strict() -> None:
    model = nn.Sequential(nn.Linear(8, 3), nn.Tanh(), nn.Linear(3, 3), nn.Linear(3, 8))
    plan = autotp.plan(model, 4, example_inputs=(torch.randn(2, 8),))
    assert "its size 3 is below the 4 ranks" in plan.kept["2.weight"]
    with pytest.warns(UserWarning, match="2.weight"):
        warn_replicated(plan, strict=False)
    with pytest.raises(PlanError, match="(?s)2.weight.*strict=False"):
        warn_replicated(plan, strict=True)


def test_a_reason_that_quotes_an_address_is_the_same_on_every_rank() -> None:
    plan = autotp.plan(Mlp(), 2, example_inputs=X)
    here, there, else_ = (
        dataclasses.replace(plan, kept={"up": f"{what} was called"}).digest
        for what in ("<built-in method f at 0x7f01>", "<built-in method f at 0x7f02>", "g")
    )
    assert here == there != else_


def test_a_report_is_true_when_every_check_passed() -> None:
    plan = autotp.plan(Mlp(), 2, example_inputs=X)
    assert Report(plan, [Check("output", 1e-7, 1e-5)])
    assert not Report(plan, [Check("output", 1e-7, 1e-5), Check("parameters", 0.5, 1e-5)]) and not Report(
        plan
    )


def test_two_plans_of_one_model_have_one_digest() -> None:
    a, b = (autotp.plan(Mlp(), 2, example_inputs=X) for _ in range(2))
    assert a.digest == b.digest != autotp.plan(Mlp(bias=False), 2, example_inputs=X).digest


def test_planning_changes_nothing_and_draws_nothing() -> None:
    model = Mixed().train()
    before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    names = {n: sorted(vars(m)) for n, m in model.named_modules()}
    plan_and_analysis(model, 2, example_inputs=X)
    assert torch.equal(torch.get_rng_state(), state) and model.training
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert names == {n: sorted(vars(m)) for n, m in model.named_modules()}


def test_a_layer_that_cannot_be_made_is_a_reason_not_to_split_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.norm, self.down = nn.Linear(24, 48), nn.BatchNorm1d(48), nn.Linear(48, 24)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(torch.relu(self.norm(self.up(x))))

    def plan() -> autotp.Plan:
        return autotp.plan(Net(), 2, example_inputs=(torch.randn(5, 24),))

    assert plan().params["up.weight"].layout is not None

    def refuse(*_: object) -> None:
        raise LayerError("it has no such channels")

    monkeypatch.setattr("autotp.layers.make_batch_norm", refuse)
    assert plan().params["norm.weight"].layout is None


def test_heads_are_split_and_not_the_axis_that_scores_are_summed_over() -> None:
    """At twelve tokens it is cheaper to send an attention's scores than its output; of a text it is not."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="eager",
    )
    inputs = {"input_ids": torch.zeros(1, 6, dtype=torch.long)}
    planned = autotp.plan(LlamaForCausalLM(config), tp=2, example_inputs=inputs)
    sums = [c for c in planned.collectives if c.kind == "reduce"]
    assert all(c.shape == (1, 6, 128) for c in sums), sums
