"""What a model reads of its own tensors while it is recorded: known where it follows from sizes, refused
elsewhere."""

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import autotp
from autotp.errors import CaptureError

Deciding = Callable[[nn.Linear, torch.Tensor], torch.Tensor]


class Decides(nn.Module):
    """Takes one of two ways by the value that `decide` gives."""

    def __init__(self, decide: Deciding):
        super().__init__()
        self.decide, self.linear = decide, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) if self.decide(self.linear, x) else x


def triangle(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    mask = torch.full((x.shape[0],) * 2, 1.0)
    mask.triu_(1)
    return mask.sum() == 3 * 2 / 2


KNOWN: dict[str, Deciding] = {
    "a mask made of sizes, in place": triangle,
    "an empty comparison": lambda linear, x: (torch.arange(x.shape[1]) >= 0).all(),
    "a seeded constant": lambda linear, x: torch.tensor([1.0, 2.0]).sum() == 3,
}
UNKNOWN: dict[str, Deciding] = {
    "an input": lambda linear, x: x.sum() > 0,
    "a parameter": lambda linear, x: linear.weight.sum() > 0,
    "random numbers": lambda linear, x: torch.rand(3).sum() > 1,
    "a table an input was written into": lambda linear, x: torch.zeros(4).copy_(x[0]).sum() > 0,
    "a table an input was written into a view of": lambda linear, x: written_through_a_view(x),
}


def written_through_a_view(x: torch.Tensor) -> torch.Tensor:
    table = torch.zeros(2, 4)
    table[0].copy_(x[0])
    return table.sum() > 0


@pytest.mark.parametrize("decide", KNOWN.values(), ids=KNOWN)
def test_what_follows_from_sizes_is_known(decide: Deciding) -> None:
    model, x = Decides(decide), torch.randn(3, 4)
    captured = autotp.capture(model, x=x)
    assert [n.target for n in captured.graph.nodes if n.op == "call_module"] == ["linear"]
    assert torch.equal(captured.run(model, x=x), model(x))


@pytest.mark.parametrize("decide", UNKNOWN.values(), ids=UNKNOWN)
def test_what_depends_on_data_is_refused(decide: Deciding) -> None:
    with pytest.raises(CaptureError, match="needs the values of a tensor"):
        autotp.capture(Decides(decide), x=torch.randn(3, 4))


def test_a_decision_by_size_is_made_anew_at_another_size() -> None:
    """The way taken belongs to the sizes captured; at others the replay is refused or right, never wrong."""
    model = Decides(triangle)
    captured = autotp.capture(model, x=torch.randn(3, 4))
    other = torch.randn(5, 4)
    try:
        got = captured.run(model, x=other)
    except CaptureError:
        return
    assert torch.equal(got, model(other))


class Checks(nn.Module):
    """Makes sure of its input, in the way torch has for it, and goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._check_tensor_all_with(ValueError, x.sum() < 1e6, lambda: "too large")
        return self.linear(x)


def test_checks_of_values_are_passed_by() -> None:
    model, x = Checks(), torch.randn(3, 4)
    assert torch.equal(autotp.capture(model, x=x).run(model, x=x), model(x))
    with pytest.raises(ValueError, match="too large"):
        model(x + 1e7)


ASSERTS = """
import torch
from torch import nn

class Asserts(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        assert x.shape[0] > 1 and x.sum().item() < 1e6, "too large"
        assert (x < 1e6).all()
        return self.linear(x)
"""


def test_asserts_of_values_are_passed_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "asserting.py").write_text(ASSERTS)  # in a file of its own: pytest rewrites asserts in tests
    monkeypatch.syspath_prepend(tmp_path)
    model, x = importlib.import_module("asserting").Asserts(), torch.randn(3, 4)
    assert torch.equal(autotp.capture(model, x=x).run(model, x=x), model(x))
    with pytest.raises(AssertionError, match="too large"):
        model(x + 1e7)


class Packed(nn.Module):
    """Rows of pictures of `grid` [pictures, 2] patches each, one after another, each patch at its place."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        which = torch.repeat_interleave(torch.arange(len(grid)), grid.prod(-1))
        longest = [(h * w, h.float()) for h, w in grid]
        sizes = torch.tensor(longest, dtype=torch.float64)  # puts numbers in tensors together
        kinds = torch.unique_consecutive(which)
        return self.down(torch.tanh(self.up(x + sizes[which] @ x[:2])) * (1 + kinds.sum()))


def test_sizes_that_hang_on_whole_numbers_among_the_inputs_are_known() -> None:
    model, x = Packed().double(), torch.randn(10, 8, dtype=torch.float64)
    grid = torch.tensor([[2, 3], [2, 2]])
    captured = autotp.capture(model, x=x, grid=grid)
    assert torch.equal(captured.run(model, x=x, grid=grid), model(x, grid))
    other = torch.tensor([[1, 3], [7, 1]])  # as many patches in all: what is told of them holds
    assert torch.equal(captured.run(model, x=x, grid=other), model(x, other))
    with pytest.raises(CaptureError, match=r"repeat_interleave gives \[10\] at"):
        captured.run(model, x=x, grid=torch.tensor([[2, 3], [1, 3]]))
    report = autotp.verify(model, tp=2, example_inputs={"x": x, "grid": grid})
    report.raise_if_wrong()
    assert report.plan.sharded_fraction == 1


@pytest.mark.parametrize(("rate", "known"), [(0.0, True), (1.0, True), (0.5, False)])
def test_layers_skipped_by_chance_are_known_at_rates_of_zero_and_one(rate: float, known: bool) -> None:
    class Skips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.rate = nn.Linear(4, 4), rate

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if torch.rand([]) < self.rate else self.layer(x)

    if known:
        captured = autotp.capture(Skips(), x=torch.ones(2, 4))
        assert [call.path for call in captured.calls if call.leaf] == ([] if rate else ["layer"])
    else:
        with pytest.raises(CaptureError, match="needs the values of a tensor"):
            autotp.capture(Skips(), x=torch.ones(2, 4))
