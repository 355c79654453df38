"""A model over simulated ranks, against itself whole: what the tests of features share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import autotp
from autotp.comm import Comm, simulate
from autotp.gradients import plain
from autotp.pipeline.absent import is_missing
from autotp.state import gather, whole_of_copies
from autotp.verify import relative_error

Build = Callable[[], tuple[nn.Module, dict[str, Any]]]
EXACT = 1e-9  # float64, but for what a model itself takes in float32
FLOAT32 = 2e-6


def on_ranks(tp: int, build: Build, use: Callable[..., Any], **options: Any) -> list[Any]:
    """`use(model, inputs)` on each of `tp` simulated ranks, with a model built and parallelized there."""

    def one(comm: Comm) -> Any:
        model, inputs = build()
        autotp.parallelize(model, comm=comm, **{"example_inputs": inputs, **options})
        return use(model, inputs)

    return simulate(tp, one)


def logits_of(output: Any) -> torch.Tensor:
    return (
        output.logits
        if hasattr(output, "logits")
        else output
        if isinstance(output, torch.Tensor)
        else output[0]
    )


def loss_of(model: nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    """A loss in which every logit has a weight of its own, so that no gradient cancels."""
    logits = logits_of(model(**inputs))
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return (logits * weights.to(logits.dtype)).mean()


def full_grads(model: nn.Module) -> dict[str, torch.Tensor]:
    """The gradients there are, whole, on every rank."""
    state = getattr(model, "autotp", None)
    found = {}
    for name, param in model.named_parameters():
        if is_missing(param) or param.grad is None:  # of another stage
            continue
        grad, held = whole_of_copies(plain(param.grad)), state.held.get(name) if state else None
        if held is not None and held.layout is not None:
            grad = gather(grad, held.layout, state.comm)
        elif held is not None and held.once:
            grad = state.comm.broadcast(grad, 0)
        found[name] = grad.clone()
    return found


def forward_and_grads(
    model: nn.Module, inputs: dict[str, Any]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss_of(model, inputs).backward()
    with torch.no_grad():
        return logits_of(model(**inputs)), full_grads(model)


def assert_same_grads(
    got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], limit: float = EXACT
) -> None:
    """Every gradient, to `limit` of the largest entry of any: tiny ones are rounding of large ones."""
    assert set(got) == set(want)
    scale = max(float(g.abs().max()) for g in want.values())
    for name, grad in want.items():
        assert got[name].shape == grad.shape, name
        assert float((got[name] - grad).abs().max()) <= limit * scale, name
        assert float(grad.abs().max()) == 0 or float(got[name].abs().max()) > 0, f"{name} has no gradient"


def assert_close(got: torch.Tensor, want: torch.Tensor, limit: float = EXACT) -> None:
    assert relative_error(got, want) <= limit
