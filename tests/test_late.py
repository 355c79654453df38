"""A split model that is no longer the one that was split: new parameters, others in place of its own."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from whole import assert_same_grads, forward_and_grads, full_grads, loss_of, on_ranks

import autotp
from autotp.comm import ShapeComm
from autotp.errors import ShardStateError

DIM, HIDDEN = 8, 12


class MLP(nn.Module):
    """A norm scale on split values: replicated, each rank has a share of its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, HIDDEN)
        self.scale = nn.Parameter(torch.empty(3))
        self.down = nn.Linear(HIDDEN, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(self.up(x)).unflatten(-1, (-1, 3)) * self.scale
        return self.down(hidden.flatten(-2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([MLP(), MLP()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class Adapted(nn.Module):
    """What peft makes of a linear."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        out, into = base.weight.shape
        self.a, self.b = nn.Linear(into, 2, bias=False), nn.Linear(2, out, bias=False)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))


class Around(nn.Module):
    """Calls the base layer, and has no parameters of its own."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x)


def build() -> tuple[nn.Module, dict[str, Any]]:
    seed = torch.Generator().manual_seed(0)  # of its own: ranks are threads
    model = Model().double()
    for p in model.parameters():
        nn.init.normal_(p, 0.2, 0.5, generator=seed)
    return model, {"x": torch.randn(2, 3, DIM, dtype=torch.float64, generator=seed)}


@pytest.mark.parametrize("called", ["the model", "its forward"])
def test_an_adapter_added_after_the_split_is_not_trained_wrong(called: str) -> None:
    def use(model: Any, inputs: Any) -> Any:
        model.blocks[1].up = Adapted(model.blocks[1].up)
        with pytest.raises(ShardStateError) as error:
            model(**inputs) if called == "the model" else model.forward(**inputs)
        return str(error.value)

    for message in on_ranks(2, build, use):
        assert message.startswith("blocks.1.up.a.weight, blocks.1.up.b.weight: not in this Model")
        assert "before autotp.parallelize" in message


def test_a_parameter_added_after_a_training_step_is_met_at_the_next() -> None:
    def use(model: Any, inputs: Any) -> None:
        model(**inputs).sum().backward()
        model.blocks[0].shift = nn.Parameter(torch.zeros(DIM))
        with pytest.raises(ShardStateError, match=r"^blocks\.0\.shift: not in this Model"):
            model(**inputs)
        del model.blocks[0].shift
        model(**inputs)

    on_ranks(2, build, use)


def test_functional_call_in_training_is_an_error() -> None:
    """Its tensors stand in for parameters, without their hooks."""

    def use(model: Any, inputs: Any) -> None:
        given = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
        with pytest.raises(ShardStateError, match="functional_call"):
            torch.func.functional_call(model, given, kwargs=inputs)
        with torch.no_grad():
            torch.func.functional_call(model, given, kwargs=inputs)

    on_ranks(2, build, use)


def _jvp_by_hand(model: Any, x: torch.Tensor) -> Any:
    with forward_ad.dual_level(), torch.no_grad():
        return model(forward_ad.make_dual(x, x))


TRANSFORMS = {
    "grad": lambda model, x: torch.func.grad(lambda x: model(x).sum())(x),
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (x,)),
    "vmap": lambda model, x: torch.vmap(model)(x),
    "forward mode": _jvp_by_hand,
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transforms_of_a_split_model_are_refused(transform: str) -> None:
    model, inputs = build()
    autotp.parallelize(model, comm=ShapeComm(0, 2), example_inputs=inputs)  # forward AD's level: all threads'
    with pytest.raises(ShardStateError, match="don't go over ranks"):
        TRANSFORMS[transform](model, inputs["x"])


@pytest.mark.parametrize("change", ["a parameter replaced", "the model copied", "a module around another"])
def test_what_the_plan_still_holds_for_is_trained_right(change: str) -> None:
    model, inputs = build()
    _, want = forward_and_grads(model, inputs)

    def use(model: Any, inputs: Any) -> Any:
        loss_of(model, inputs).backward()  # it has been looked at before
        model.zero_grad()
        block = model.blocks[0]
        if change == "a parameter replaced":  # the others have their hooks
            block.scale = nn.Parameter(block.scale.detach().clone())
        elif change == "the model copied":
            model = copy.deepcopy(model)
        else:
            model.blocks[0] = Around(block)
        loss_of(model, inputs).backward()
        if change == "a module around another":
            model.blocks[0] = block
        return full_grads(model)

    for grads in on_ranks(2, build, use):
        assert_same_grads(grads, want)
