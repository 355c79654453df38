"""Ways through a model's code that the captured run did not take: other sizes, training, decoding."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import MODELS, randomise
from torch import nn
from whole import assert_close, on_ranks

import autotp
from autotp.errors import PlanError


class Mlp(nn.Module):
    """`way(h, x)` is what happens between the two linears."""

    def __init__(self, way: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 48), nn.Linear(48, 24)
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.way(self.up(x), x))


def normed(h: torch.Tensor) -> torch.Tensor:
    return h / h.norm(dim=-1, keepdim=True)


def when_long(h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return normed(h) if x.shape[1] > 7 else torch.tanh(h)


def when_short(h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return normed(h) if x.shape[1] <= 2 else torch.tanh(h)


def when_alone(h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return normed(h) if x.size(0) == 1 else torch.tanh(h)


def within(h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    if h.shape[-2] > 100:
        h = torch.relu(h)
        if x.shape[1] > 1000:
            h = normed(h)
    return torch.tanh(h)


def as_a_plain_int(h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return normed(h) if int(x.shape[1]) > 5 else torch.tanh(h)


def in_a_loop(h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    for i in range(x.shape[1]):
        h = normed(h) if i > 5 else torch.tanh(h)
    return h


def of_a_product(h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return normed(h) if x.shape[0] * x.shape[1] // 2 >= 300 else torch.tanh(h)


def with_a_literal(h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    if x.shape[1] > 7:
        return F.softmax(h.view(h.shape[0], -1, 4, 12), -1).flatten(2)
    return torch.tanh(h)


# the sizes [batch, length] at which it is normed
BRANCHES: dict[Callable[..., Any], tuple[int, int]] = {
    when_long: (2, 9), when_short: (2, 2), when_alone: (1, 5), within: (2, 1001), as_a_plain_int: (2, 9),
    in_a_loop: (2, 9), of_a_product: (60, 11), with_a_literal: (2, 9),
}  # fmt: skip


def assert_equal_at(way: Callable[..., Any], sizes: list[tuple[int, int]]) -> autotp.Plan:
    """The split model gives what the whole one does, at all `sizes`. Returns its plan."""

    def build() -> tuple[nn.Module, dict[str, Any]]:
        torch.manual_seed(0)
        return randomise(Mlp(way).double()), {"x": torch.randn(2, 5, 24, dtype=torch.float64)}

    given = [torch.randn(*size, 24, dtype=torch.float64) for size in sizes]
    whole = build()[0]

    def use(model: nn.Module, inputs: Any) -> Any:
        return model.autotp.plan, [model(x).detach() for x in given]

    try:
        ranks = on_ranks(2, build, use)
    except PlanError:  # nothing can be split
        return autotp.plan(build()[0], 2, example_inputs=build()[1])
    for _, outputs in ranks:
        for x, got in zip(given, outputs, strict=True):
            assert_close(got, whole(x).detach())
    return ranks[0][0]


@pytest.mark.parametrize("way", BRANCHES)
def test_what_happens_at_other_sizes_is_seen(way: Callable[..., Any]) -> None:
    plan = assert_equal_at(way, [(2, 5), BRANCHES[way]])
    why = plan.kept.get("up.weight", "")
    assert plan.params["up.weight"].layout is None and "with a size of" in why and "(line " in why, why


def longer_is_gentler(h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.relu(h) * 2 if x.shape[1] > 7 else torch.tanh(h)


def checked(h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    if x.shape[-1] != 24 or x.shape[1] > 50:
        raise ValueError("no such sizes")
    return torch.tanh(h)


@pytest.mark.parametrize("way", [longer_is_gentler, checked])
def test_harmless_branches_cost_nothing(way: Callable[..., Any]) -> None:
    plan = assert_equal_at(way, [(2, 5), (2, 9), (1, 1)])
    assert plan.params["up.weight"].layout is not None, plan.kept


class Unrecordable(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and bool((x > 0).any()):
            x = x * 2
        return super().forward(x)


def test_a_way_that_cannot_be_recorded_is_told() -> None:
    x = torch.randn(2, 5, 24)
    plan = autotp.plan(Unrecordable(lambda h, x: torch.tanh(h)), 2, example_inputs=(x,))
    assert "in training" in plan.unexamined[0] and "needs the values" in plan.unexamined[0]
    assert "not examined in training" in str(plan)
    with pytest.warns(UserWarning, match="not examined"):
        on_ranks(2, lambda: (Unrecordable(lambda h, x: torch.tanh(h)), {"x": x}), lambda m, i: None)


@pytest.mark.parametrize("name", ["llama_gqa", "t5", "bart", "whisper", "mamba"])
def test_decoding_of_known_models_is_examined(name: str) -> None:
    model, inputs = MODELS[name]()
    assert autotp.plan(model, 2, example_inputs=inputs).unexamined == ()


class Keeps(Mlp):
    """Keeps what it made of a weight while it is in eval mode; in training it needs all of `h`."""

    def __init__(self) -> None:
        super().__init__(torch.mul)
        self.scale, self.kept = nn.Parameter(torch.randn(48)), {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        return x + self.down(normed(h) if self.training else h * self.factor())

    def factor(self) -> torch.Tensor:
        if not self.kept:
            self.kept["factor"] = self.scale.exp()
        return self.kept["factor"]

    def train(self, mode: bool = True) -> nn.Module:
        if mode:
            self.kept = {}
        return super().train(mode)


def test_what_a_model_clears_when_it_trains_is_there_for_the_next_plan() -> None:
    model, x = Keeps().double().eval(), torch.randn(2, 5, 24, dtype=torch.float64)
    with torch.no_grad():
        model(x)
    plan = autotp.plan(model, 2, example_inputs={"x": x})
    assert "in training it also does div, norm" in plan.kept["up.weight"]
