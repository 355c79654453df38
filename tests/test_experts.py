"""Experts split by expert (`ep`): against the whole model, and what is refused."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from models import TEXT, hf, randomise
from torch import nn
from whole import EXACT, FLOAT32, assert_close, assert_same_grads, forward_and_grads, on_ranks

import autotp
from autotp.errors import AutotpError, PlanError

Built = tuple[nn.Module, dict[str, Any]]


def built(name: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Built:
    pytest.importorskip("transformers", reason="transformers is not installed")
    config, cls, settings = TEXT[name]
    return hf(config, cls, dtype=dtype, **{**settings, **changes})


def split_by_expert(tp: int, build: Callable[[], Built], limit: float = FLOAT32) -> None:
    """Forward and every gradient, the router's too, on every rank, against the whole model."""
    want, want_grads = forward_and_grads(*build())
    for got, grads in on_ranks(tp, build, forward_and_grads, ep=tp):
        assert_close(got, want, limit)
        assert_same_grads(grads, want_grads, limit)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_steps_and_generation_equal(name: str, tp: int) -> None:
    model, inputs = built(name)
    report = autotp.verify(model, tp, ep=tp, example_inputs=inputs, steps=3)
    report.raise_if_wrong()
    assert {c.name for c in report.checks} == {"output", "generation", "norm", "step", "state"}
    stacks = [p.layout for n, p in report.plan.params.items() if ".experts." in n]
    assert stacks and all(layout is not None and set(layout.dims) == {0} for layout in stacks)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_gradients_equal(name: str) -> None:
    model, inputs = built(name)  # once: some of gpt_oss's weights are not initialised
    split_by_expert(2, lambda: (copy.deepcopy(model), inputs))


def test_a_policy_asks_for_it_and_a_plan_tells_it() -> None:
    model, _ = built("mixtral")
    plan = autotp.plan(model, 2, ep=2)
    again = autotp.plan(model, 2, yaml.safe_load(plan.to_yaml()))
    assert "options: {experts: whole}" in plan.to_yaml()
    assert {n: p.layout for n, p in again.params.items()} == {n: p.layout for n, p in plan.params.items()}
    assert any(layer.kind == "experts" for layer in again.layers)


def test_experts_that_ranks_do_not_divide() -> None:
    split_by_expert(4, lambda: built("qwen3_moe", num_experts=6))
    plan = autotp.plan(built("qwen3_moe", num_experts=6)[0], tp=4, ep=4)
    local = [plan.params["model.layers.0.mlp.experts.down_proj"].local_shape(r)[0] for r in range(4)]
    assert local == [2, 2, 1, 1]


def test_a_rank_whose_experts_nobody_chose() -> None:
    def few() -> Built:
        model, inputs = built("qwen3_moe", num_experts=16)
        return model, {**inputs, "input_ids": inputs["input_ids"][:1, :2]}

    split_by_expert(4, few)  # 4 routes over 4 ranks: some rank has none; its gradients are zero, not None


@pytest.mark.parametrize("how", ["eager", "grouped_mm", "batched_mm"])
def test_whatever_implementation_runs(how: str) -> None:
    def build() -> Built:
        model, inputs = built("qwen3_moe", torch.float32)
        model.set_experts_implementation(how)  # type: ignore[operator]
        return model, inputs

    split_by_expert(2, build)


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 16))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores, numbers = torch.topk(F.linear(x, self.weight).softmax(-1), 2, dim=-1)
        return numbers, scores


class Experts(nn.Module):
    """Experts by hand; `odd` is what makes them something else."""

    def __init__(self, odd: str) -> None:
        super().__init__()
        self.how_many, self.odd = 8, odd
        self.up = nn.Parameter(torch.zeros(8, 32, 16))
        self.down = nn.Parameter(torch.zeros(8, 16, 32))
        self.shift = nn.Parameter(torch.zeros(16))

    def forward(self, x: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if self.odd == "softmax over the chosen":
            weights = weights.softmax(-1)
        hidden = torch.einsum("tkhw,tw->tkh", self.up[numbers], x)
        if self.odd == "position":
            hidden = hidden * torch.arange(numbers.shape[1], dtype=x.dtype)[None, :, None]
        if self.odd == "dropout":
            hidden = F.dropout(hidden, 0.1, self.training)
        if self.odd == "noise" and self.training:
            hidden = hidden + torch.randn_like(hidden)
        if self.odd == "numbers":
            weights = weights * numbers
        out = torch.einsum("tkwh,tkh->tkw", self.down[numbers], torch.relu(hidden)) * weights[..., None]
        out = out.max(1).values if self.odd == "largest" else out.sum(1)
        if self.odd == "not linear":
            out = torch.tanh(out)
        return out + self.shift if self.odd == "shift" else out


class ByHand(nn.Module):
    def __init__(self, odd: str = "") -> None:
        super().__init__()
        self.inner, self.router, self.experts = nn.Linear(16, 16), Router(), Experts(odd)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(x).flatten(0, 1)
        return x + self.experts(h, *self.router(h)).view_as(x)


def by_hand(odd: str = "") -> Built:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    return randomise(ByHand(odd).double()), {"x": x}


def test_experts_by_hand() -> None:
    split_by_expert(4, by_hand, EXACT)


@pytest.mark.parametrize(
    ("odd", "why"),
    [
        ("softmax over the chosen", "softmax runs over it"),
        ("position", "position"),
        ("dropout", "random numbers"),
        ("noise", "random numbers"),
        ("numbers", "more than picking"),
        ("largest", "extreme"),
        ("not linear", "not linear"),
        ("shift", "no stack of experts"),
    ],
)
def test_what_mixes_routes_is_refused(odd: str, why: str) -> None:
    model, inputs = by_hand(odd)
    with pytest.raises(PlanError, match="can't be split by expert") as refused:
        autotp.plan(model, tp=2, ep=2, example_inputs=inputs)
    assert why in str(refused.value) and "experts: experts: " in str(refused.value)
    assert "test_experts.py:" in str(refused.value)


class Counting(Experts):
    """What runs counts the experts by an attribute that is not theirs alone; what is recorded does not."""

    def __init__(self) -> None:
        super().__init__("")
        self.setting = [8]

    def forward(self, x: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if torch._guards.detect_fake_mode() is None:
            weights = weights * (numbers + (self.setting[0] - self.up.shape[0]))
        return super().forward(x, numbers, weights)


def test_another_result_is_seen_before_anything_runs() -> None:
    def build() -> Built:
        model, inputs = by_hand()
        model.experts = randomise(Counting().double())
        return model, inputs

    with pytest.raises(AutotpError, match="gives another result"):
        on_ranks(2, build, lambda model, inputs: None, ep=2)


def test_refusals() -> None:
    model, inputs = by_hand()
    with pytest.raises(PlanError, match="ep=2 with tp=4"):
        autotp.plan(model, tp=4, ep=2, example_inputs=inputs)
    with pytest.raises(PlanError, match="8 experts are fewer than the 16 ranks"):
        autotp.plan(model, tp=16, ep=16, example_inputs=inputs)
    with pytest.raises(PlanError, match="no module of experts"):
        autotp.plan(nn.Linear(4, 4), tp=2, ep=2, example_inputs={"input": torch.randn(2, 4)})
