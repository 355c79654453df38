"""Shards initialised on meta have the values of the whole model built with the same seed."""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch
from test_weights import QUIET
from torch import nn

import autotp
from autotp.comm import Comm, simulate
from autotp.errors import CheckpointError
from autotp.initialise import initialise
from autotp.state import full_state_dict


def made(name: str) -> nn.Module:
    import transformers

    config, cls, settings = models.TEXT[name]
    return getattr(transformers, cls)(getattr(transformers, config)(**settings)).eval()


@QUIET
@pytest.mark.parametrize("name", ["llama_gqa", "gpt2", "t5", "mixtral", "bert", "llama_9_3"])
def test_same_values_as_unsharded(name: str) -> None:
    torch.manual_seed(11)
    whole = made(name)
    after = torch.rand(3)
    with torch.device("meta"):
        hollow = [made(name) for _ in range(2)]
    rngs: list[Any] = []

    def one(comm: Comm) -> Any:
        model = autotp.parallelize(hollow[comm.rank], comm=comm)
        comm.exchange("planned")
        if comm.rank == 0:  # one generator for all threads: in turn
            initialise(model, seed=11)
            rngs.append(torch.rand(3))
        comm.exchange("turn")
        if comm.rank == 1:
            initialise(model, seed=11)
        return full_state_dict(model), dict(model.named_buffers())

    want, buffers = whole.state_dict(), dict(whole.named_buffers())
    for state, own in simulate(2, one):
        assert set(state) == set(want)
        assert [n for n, v in want.items() if not torch.equal(state[n], v)] == []
        assert [n for n, v in buffers.items() if not torch.equal(own[n], v)] == []
    assert torch.equal(rngs[0], after)  # the generator stands where it would


class Odd(nn.Module):
    """Values made of other values, views written to, and factories that draw."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.scale = nn.Parameter(torch.rand(16) + torch.arange(16))
        nn.init.trunc_normal_(self.down.weight, std=0.3, a=-0.4, b=0.4)  # draws again what it rejects
        nn.init.orthogonal_(self.up.weight)
        with torch.no_grad():
            self.down.weight[3:5].mul_(2).add_(self.scale[:2, None])
            self.scale.div_(self.scale.norm())
        self.register_buffer("table", torch.linspace(0, 1, 16).exp(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x))) * self.scale + self.table


def test_a_model_of_ones_own() -> None:
    torch.manual_seed(3)
    whole = Odd()
    with torch.device("meta"):
        hollow = Odd()
    model = autotp.parallelize(hollow, comm=autotp.comm.ShapeComm(0, 2), example_inputs=(torch.ones(2, 16),))
    initialise(model, Odd, seed=3)
    assert torch.equal(model.up.weight, whole.up.weight[:16])  # type: ignore[union-attr, index]
    assert torch.equal(model.down.weight, whole.down.weight[:, :16])  # type: ignore[union-attr, index]
    assert torch.equal(model.scale, whole.scale) and torch.equal(model.table, whole.table)  # type: ignore[arg-type]


def test_says_that_it_cannot() -> None:
    with torch.device("meta"):
        hollow = Odd()
    model = autotp.parallelize(hollow, comm=autotp.comm.ShapeComm(0, 2), example_inputs=(torch.ones(2, 16),))
    with pytest.raises(CheckpointError, match="give build="):
        initialise(model, seed=3)
    with pytest.raises(CheckpointError, match="parallelize"):
        initialise(Odd(), Odd)
    with pytest.raises(CheckpointError, match="scale"):
        initialise(model, lambda: nn.ModuleDict({"up": nn.Linear(16, 32), "down": nn.Linear(32, 16)}), seed=3)
    with pytest.raises(CheckpointError, match="in place"):
        initialise(model, lambda: nn.init.orthogonal_(nn.Linear(16, 8).weight), seed=3)
